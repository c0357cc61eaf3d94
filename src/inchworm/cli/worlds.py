"""Environments as commands name them: a wrong name is wrong use, found before anything is written."""

from __future__ import annotations

from inchworm.cli.arguments import UsageError
from inchworm.config import EnvConfig
from inchworm.env.adapters import ENVPOOL
from inchworm.env.build import Env, make_env
from inchworm.errors import EnvError


def made(config: EnvConfig) -> Env:
    """The environment, or one line about why there is none."""
    try:
        return make_env(config)
    except EnvError as error:
        raise UsageError(str(error)) from error


def check_can_be_made(config: EnvConfig) -> None:
    """Make the environment once and let it go; EnvPool's are made by their pool alone."""
    if not config.id.startswith(ENVPOOL):
        made(config).close()
