"""Runs as commands name them, and their policies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from inchworm.cli.arguments import UsageError
from inchworm.config.sections import EnvConfig, TrainingConfig
from inchworm.core.errors import ConfigError, EnvError, MissingExtraError
from inchworm.env.foreign import ENVPOOL
from inchworm.env.make import Env, make_env
from inchworm.env.teams import is_team_env
from inchworm.run.directory import Run, open_run
from inchworm.worlds.cartpole import SKIRMISH, native_pays

if TYPE_CHECKING:
    from inchworm.core.protocols import Policy


def named_run(positional: Sequence[str], prog: str, *, env: str | None = None) -> Run:
    """The run that the first argument names."""
    if not positional or not positional[0]:
        raise UsageError(f"no run is given; type: {prog} RUN, the run's directory or its name in runs/")
    return open_run(positional[0], env=env)


def as_typed(run: Run) -> str:
    """The run as it is typed after a command: with the environment, where that is code that no file may name."""
    env = f" --env {run.config.env.id}" if ":" in run.config.env.id else ""
    return f"{run.name if run.path.parent.name == 'runs' else run.path}{env}"


def load_run_policy(run: Run, *, best: bool = False) -> tuple[Policy, Path]:
    """The run's latest policy, or its best, and where it is."""
    from inchworm.run.policies import load_run_policy

    return load_run_policy(run, best=best)


def check_one_policy(run: Run) -> None:
    """Refuse to train a run of several policies from here: its config names one, and who plays which lane is said in Python."""
    from inchworm.run.policies import policy_names

    parts = policy_names(run)
    if parts:
        raise UsageError(
            f"the run {run.path} trains several policies ({', '.join(parts)}), which a command cannot name; go on in Python: "
            f'PPOTrainer(PolicyMap(…), …, run_dir="{run.path}"), then load_checkpoint() and train()'
        )


def made(config: EnvConfig, *, where: str = "") -> Env:
    """The environment, or one line about why there is none, which begins with `where`."""
    try:
        return make_env(config)
    except (ConfigError, EnvError, MissingExtraError) as error:
        raise UsageError(f"{where}{error}") from error


def check_can_be_trained_in(config: TrainingConfig) -> None:
    """Make the run's environment once and let it go; refuse what needs several agents where there is one."""
    world, mode = config.env.id, config.opponent.mode
    alone = _has_one_agent(config.env, "")
    if alone and mode != "none":
        raise UsageError(f"opponent.mode={mode} needs a world with two teams, as Skirmish-v0 has, but {world} has one agent; use none")
    if alone and config.policy.central_critic:
        raise UsageError(f"policy.central_critic reads the state of a world of several agents, but {world} has one; use false")


def check_can_be_made(config: EnvConfig, *, where: str = "") -> None:
    """Make the environment once and let it go; what is wrong with it is told after `where`."""
    _has_one_agent(config, where)


def _has_one_agent(config: EnvConfig, where: str) -> bool:
    """Whether the environment, which is made to find out, has one agent. EnvPool's are made by their pool alone."""
    if config.id.startswith(ENVPOOL):
        return True
    if config.id == SKIRMISH and native_pays(config):  # its arenas step as one, without PettingZoo
        _check_rules(config, where)
        return False
    env = made(config, where=where)
    env.close()
    return not is_team_env(env)


def _check_rules(config: EnvConfig, where: str) -> None:
    from inchworm.worlds.skirmish import SkirmishConfig  # most runs need none of it

    try:
        SkirmishConfig.from_dict(config.kwargs)
    except ConfigError as error:
        raise UsageError(f"{where}{error}") from error
