"""Environments as commands name them: a wrong name is wrong use, found before anything is written."""

from __future__ import annotations

from inchworm.cli.arguments import UsageError
from inchworm.config import EnvConfig, TrainingConfig
from inchworm.env.adapters import ENVPOOL
from inchworm.env.build import Env, make_env
from inchworm.env.native import SKIRMISH, native_pays
from inchworm.env.teams import is_team_env
from inchworm.errors import ConfigError, EnvError, MissingExtraError


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
    from inchworm.env.skirmish import SkirmishConfig  # most runs need none of it

    try:
        SkirmishConfig.from_dict(config.kwargs)
    except ConfigError as error:
        raise UsageError(f"{where}{error}") from error
