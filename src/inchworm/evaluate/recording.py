"""The first game of a match as a replay, which is plain data. Serves matches.

A vector env begins a copy's next game in the step that ends one, so the last moment of a game is never to be seen there. What is kept
is the joint actions, and the game is played again from its seed in a world of its own, which gives every frame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from inchworm.errors import ConfigError
from inchworm.protocols import VectorEnv
from inchworm.replay.format import make_replay
from inchworm.types import EnvStep, Tree

if TYPE_CHECKING:
    from inchworm.env.skirmish import SkirmishVectorEnv


class RecordedVectorEnv:
    """The `VectorEnv` contract passed on unchanged, with an eye on copy 0 until its first game is over."""

    def __init__(self, inner: VectorEnv, players: tuple[str, str]) -> None:
        self._inner, self._players = _skirmish(inner), players
        self.observation_space, self.action_space = inner.observation_space, inner.action_space
        self.num_lanes, self.num_envs, self.lanes_per_copy = inner.num_lanes, self._inner.num_envs, self._inner.lanes_per_copy
        self._seed = -1
        self._actions: list[np.ndarray] = []  # [2n, 3] each
        self._info: Mapping[str, float] | None = None  # the last of the first game, once it is over

    def reset(self, seeds: Sequence[int] | None = None, indices: Sequence[int] | None = None) -> EnvStep:
        """Pass it on; the first one begins the game that is recorded."""
        if self._seed < 0 and seeds is not None:
            self._seed = int(seeds[0])
        return self._inner.reset(seeds, indices)

    def send(self, actions: Tree) -> None:
        """Pass it on, and keep what copy 0 does."""
        if self._info is None:
            self._actions.append(np.array(actions[: self.lanes_per_copy], np.int64))
        self._inner.send(actions)

    def recv(self) -> EnvStep:
        """Pass it on, and see whether the game is over."""
        step = self._inner.recv()
        if self._info is None:
            self._info = next((ended.info for ended in step.ended if ended.lane == 0), None)
        return step

    def step(self, actions: Tree) -> EnvStep:
        """`send`, then `recv`."""
        self.send(actions)
        return self.recv()

    def set_reset_options(self, options: Mapping[str, Any] | None, indices: Sequence[int] | None = None) -> None:
        """Pass it on."""
        self._inner.set_reset_options(options, indices)

    def state_dict(self) -> dict[str, Any]:
        """Of the environments; a recording is not saved."""
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Pass it on."""
        self._inner.load_state_dict(state)

    def close(self) -> None:
        """Pass it on."""
        self._inner.close()

    def replay(self) -> dict[str, Any]:
        """The first game: its world, a frame for the beginning and for each step, and how it ended."""
        from inchworm.env.skirmish import SkirmishWorld

        if self._info is None:
            raise RuntimeError("the first game is not over")
        world = SkirmishWorld(self._inner.config, 1)
        world.begin([self._seed])
        frames = [world.frame(0)]
        for joint in self._actions:
            by_team = joint.reshape(2, self.lanes_per_copy // 2, -1, 1)  # [2, n, 3, 1]
            world.step(np.ascontiguousarray(by_team.transpose(2, 0, 1, 3)))
            frames.append(world.frame(0))
        meta = {"seed": self._seed, "players": list(self._players), "steps": len(self._actions), "hp_margin": self._info["hp_margin"]}
        return make_replay(world.describe(0), frames, meta, self._info)


def _skirmish(env: VectorEnv) -> SkirmishVectorEnv:
    from inchworm.env.skirmish import SkirmishVectorEnv

    if not isinstance(env, SkirmishVectorEnv):
        raise ConfigError(
            f"no replay can be made of {type(env).__name__}: only games of Skirmish-v0 can be shown, without wrappers and with "
            "env.max_episode_steps left out (max_steps among its kwargs limits them)"
        )
    return env
