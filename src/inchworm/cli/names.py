"""Runs and environments as they are named on the command line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from inchworm.cli.arguments import UsageError
from inchworm.config.sections import EnvConfig, TrainingConfig
from inchworm.core.errors import ConfigError, CorruptFileError, EnvError, MissingExtraError, env_errors
from inchworm.env.make import make_env
from inchworm.env.pettingzoo_copy import is_team_env
from inchworm.env.registry import is_vector_only, team_worlds, vectorised
from inchworm.env.restore import Env
from inchworm.policy.file import read_policy_file
from inchworm.run.directory import Run, open_run


def named_run(name: str, prog: str, *, env: str | None = None, hint: str = "") -> Run:
    """Open the run that a command names; `hint` ends the message that there is none."""
    if not name:
        raise UsageError(f"no run is given; type: {prog} RUN, the run's directory or its name in runs/")
    return open_run(name, env=env, hint=hint)


def check_policy_of_config(run: Run) -> None:
    """Refuse to train a run whose policies are not made from its config, but in Python: several by lanes, or a network of the user's."""
    what, policy, names = "", "policy", run.policy_names
    if names and not run.config.policies:
        what, policy = f"several policies ({', '.join(names)}) that are not in its config", "PolicyMap(…)"
    elif not names and run.policy_path().is_file():
        with contextlib.suppress(CorruptFileError):  # a damaged file is written again, from the checkpoint
            description, _ = read_policy_file(run.policy_path())
            what = f"the {description.own} {description.class_path}, which a config cannot name" if description.own else ""
    if what:
        raise UsageError(
            f"the run {run.path} trains {what}; continue in Python: "
            f'PPOTrainer({policy}, …, run_dir="{run.path}"), then load_checkpoint() and train()'
        )


def make_named_env(config: EnvConfig, *, where: str = "", make: Callable[[EnvConfig], Env] = make_env) -> Env:
    """Make an environment; an error is wrong use, and its message begins with `where`."""
    try:
        return make(config)
    except (ConfigError, EnvError, MissingExtraError) as error:
        raise UsageError(f"{where}{error}") from error


def check_can_be_trained_in(config: TrainingConfig) -> None:
    """Make the run's environment once; refuse settings for several agents if it has one."""
    if has_several_agents(config.env):
        return
    if config.opponent.mode != "none":
        raise UsageError(
            f"opponent.mode={config.opponent.mode} needs an environment with two teams, such as {team_worlds()}; "
            f"{config.env.id} has one agent"
        )
    if config.policy.central_critic:
        raise UsageError(f"policy.central_critic needs an environment with several agents; {config.env.id} has one")


def has_several_agents(config: EnvConfig, *, where: str = "") -> bool:
    """Make the environment once, and return whether it has several agents. An error's message begins with `where`."""
    if is_vector_only(config.id):
        return False
    world = vectorised(config)
    if world is not None and world.has_teams:  # made without PettingZoo
        try:
            world.check_kwargs(config.kwargs)
        except ConfigError as error:
            raise UsageError(f"{where}{error}") from error
        return True
    env = make_named_env(config, where=where)
    with env_errors(f"{where}{config.id}", "close"):
        env.close()
    return is_team_env(env)
