"""Policies by name: a policy file, or the latest or best policy of a run."""

from __future__ import annotations

from pathlib import Path

from inchworm.core.errors import ConfigError
from inchworm.core.protocols import Policy
from inchworm.policy.file import load_policy
from inchworm.run.checkpoint import TrainingCheckpointer
from inchworm.run.directory import Run, open_run


def load_named_policy(name: str, *, env: str | None = None) -> tuple[Policy, Path]:
    """Load a policy file, or the latest policy of a run; return it with its path. `env` as for `open_run`."""
    if Path(name).is_file():
        return load_policy(name), Path(name)
    return load_run_policy(open_player(name, env=env))


def open_player(name: str, *, env: str | None = None) -> Run:
    """Open the run that a player is named by; the error lists what else a player may be."""
    return open_run(name, env=env, hint="; a player is a run, a policy file, heuristic, heuristic:0.5 or random")


def load_run_policy(run: Run, *, best: bool = False) -> tuple[Policy, Path]:
    """Load a run's latest or best policy; return it with its path. Several policies are loaded from a checkpoint, with their lanes."""
    path = run.policy_path(best=best)
    if path.exists():
        return load_policy(path), path
    checkpoints = TrainingCheckpointer(run.checkpoints)
    checkpoint = checkpoints.best() if best else checkpoints.latest()
    if policy_names(run) and checkpoint is not None:
        return checkpoints.load_policy(checkpoint).policy, checkpoint
    hint = "omit --best" if best else f"inchworm resume {run.path} continues its training"
    raise ConfigError(f"the run {run.path} has no {path.name} yet; {hint}")


def policy_names(run: Run) -> list[str]:
    """Return the names of a run's policies if it trains several, else an empty list."""
    path = run.policy_path()
    return sorted(part.stem.removeprefix(f"{path.stem}-") for part in run.path.glob(f"{path.stem}-*{path.suffix}"))
