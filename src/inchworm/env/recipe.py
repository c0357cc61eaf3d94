"""Serves step 1: what a worker process makes its environments from, as bytes that travel to it over its socket."""

from __future__ import annotations

from collections.abc import Callable

import cloudpickle
import gymnasium as gym

from inchworm.config import EnvConfig
from inchworm.env.build import Env, make_env
from inchworm.errors import EnvError


class _FromConfig:
    """A factory that a worker can be sent: the config as it is, made into an environment over there."""

    def __init__(self, config: EnvConfig) -> None:
        self.config = config

    def __call__(self) -> Env:
        return make_env(self.config)


def make_recipe(make: EnvConfig | Callable[[], Env]) -> bytes:
    """What workers make environments from. An id that the user's script registered goes along with its spec."""
    specs = []
    if isinstance(make, EnvConfig):
        spec = gym.registry.get(make.id)
        specs = [spec] if spec is not None and not str(spec.entry_point).startswith(("gymnasium.", "ale_py.")) else []
        make = _FromConfig(make)
    try:
        return cloudpickle.dumps((make, specs))  # type: ignore[no-any-return]
    except Exception as error:  # pickling runs the user's code, which may raise anything
        raise EnvError(
            f"the environment's factory cannot be sent to worker processes ({type(error).__name__}: {error}); "
            "use env.num_workers=0, or a function that makes everything it needs itself"
        ) from error
