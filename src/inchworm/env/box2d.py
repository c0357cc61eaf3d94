"""Serves step 1: Gymnasium's BipedalWalker with a new Box2D world for every episode, so that an episode follows from its seed.

It keeps one world for all its episodes, and a world remembers: the order of its contacts and the length of its last step survive the
bodies, so that the same seed and actions lead elsewhere in a copy that has played before. Gymnasium's LunarLander makes a world for every
episode; so does this, and an episode is then that of a fresh copy, bit for bit.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym


def renew_world(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """The environment, made a function of its seed if it is a BipedalWalker."""
    is_walker = type(env.unwrapped).__module__ == "gymnasium.envs.box2d.bipedal_walker"
    return FreshWorld(env) if is_walker else env


class FreshWorld(gym.Wrapper[Any, Any, Any, Any]):
    """A Box2D environment whose world is made anew at each reset."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in a world without a past."""
        game: Any = self.unwrapped
        game._destroy()  # lets go of the bodies, so that the environment's own reset finds none
        game.world = type(game.world)()
        return self.env.reset(seed=seed, options=options)
