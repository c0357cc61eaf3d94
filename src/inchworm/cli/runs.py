"""Runs as commands name them, and their policies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from inchworm.cli.arguments import UsageError
from inchworm.run import Run, open_run

if TYPE_CHECKING:
    from inchworm.protocols import Policy, VectorEnv


def named_run(positional: Sequence[str], prog: str, *, env: str | None = None) -> Run:
    """The run that the first argument names."""
    if not positional or not positional[0]:
        raise UsageError(f"no run is given; type: {prog} RUN, the run's directory or its name in runs/")
    return open_run(positional[0], env=env)


def load_run_policy(run: Run, *, best: bool = False) -> Policy:
    """The run's latest policy, or its best."""
    from inchworm.policy.weights import load_policy

    path = run.policy_path(best=best)
    if not path.exists():
        hint = "leave --best out" if best else f"inchworm resume {run.path} trains it further"
        raise UsageError(f"the run {run.path} has no {path.name} yet; {hint}")
    return load_policy(path)


def check_fits(path: Path, env: VectorEnv) -> None:
    """Refuse an environment whose spaces are not those that the policy in `path` was made for."""
    from inchworm.policy.weights import read_policy

    spec, _ = read_policy(path)
    for what, made_for, found in (
        ("observation", spec.observation_space, env.observation_space),
        ("action", spec.action_space, env.action_space),
    ):
        if made_for != found:
            raise UsageError(f"{path} was made for the {what} space {made_for}, but the environment has {found}")
