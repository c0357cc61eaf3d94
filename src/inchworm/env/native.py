"""Step 1 of 9, all lanes at once: CartPole without an environment object per lane, bit-equal to Gymnasium's environment.

Gymnasium's own `CartPoleVectorEnv` has the same dynamics, but one random stream for all lanes, a reset one step late and
no final observation. So its arithmetic is done by `cartpole.py`, operation by operation in the same order and in float64, with
each lane's first state drawn by Gymnasium's environment from that lane's own episode seed. Before it is used, a process
compares it with Gymnasium's environment once; if any bit differs (another release, another NumPy), it is not used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from inchworm.config import EnvConfig
from inchworm.env.block import Block
from inchworm.env.cartpole import AllAtOnce, Dynamics, LaneByLane
from inchworm.env.engine import Ended, Replay
from inchworm.env.lane_env import LaneVectorEnv
from inchworm.env.memory import StepRows, carve_rows

_FEW_LANES = 16
"""Measured: up to here floats cost less than arrays, whose overhead is that of some 20 lanes."""

_IDS = ("CartPole-v0", "CartPole-v1")

SKIRMISH = "Skirmish-v0"
"""Our own world of two teams (`env/skirmish`), whose arenas are stepped as one."""


def native_pays(config: EnvConfig) -> bool:
    """Whether a config's environment is stepped natively: it is one we know, nothing is wrapped around it, and the bits are equal."""
    bare = config.native and not (config.wrappers or config.atari) and config.frame_stack == 1
    if config.id == SKIRMISH:
        return bare and config.max_episode_steps is None
    return bare and not config.kwargs and config.id in _IDS and _is_bit_equal(config.id, _dynamics(config.num_envs))


class _CartPoleEngine:
    """The engine that moves all lanes of CartPole at once."""

    lanes_per_copy = 1

    def __init__(
        self, name: str, num_lanes: int, max_episode_steps: int | None, dynamics: Callable[[CartPoleEnv, StepRows], Dynamics]
    ) -> None:
        self._spec = gym.spec(name)
        self._limit = max_episode_steps or self._spec.max_episode_steps or 500
        self._env = env = CartPoleEnv()
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.rows: StepRows = carve_rows(self.observation_space, self.action_space, num_lanes, num_lanes)[0]
        self._dynamics = dynamics(env, self.rows)
        self._options: list[Any] = [None] * num_lanes
        self._now = 0  # steps taken
        self._cuts = np.zeros(num_lanes, np.int64)  # [B] the step at which the time limit ends each running episode
        self._next_cut = self._limit  # no cut is sooner
        self._flags_set = False

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin episodes in some lanes."""
        for lane, seed in zip(indices, seeds):
            self._begin(lane, seed)

    def _begin(self, lane: int, seed: int) -> None:
        """The first state of an episode, drawn as Gymnasium's environment draws it."""
        self._env.reset(seed=seed, options=self._options[lane])
        self._put(lane, 0)

    def _put(self, lane: int, taken: int) -> None:
        self._dynamics.put(lane, self._env.state)
        self._cuts[lane] = self._now + self._limit - taken
        self._next_cut = min(self._next_cut, self._now + self._limit - taken)

    def start(self) -> None:
        """Nothing to wake: `finish` takes the step."""

    def finish(self) -> list[Ended]:
        """One step of all lanes; where an episode ended, the next has begun."""
        fell = self._dynamics.move()
        self.rows.rewards.fill(1.0)
        if self._flags_set:
            self.rows.terminated.fill(False)
            self.rows.truncated.fill(False)
            self._flags_set = False
        self._now += 1
        if fell or self._now == self._next_cut:
            return self._end(fell)
        return []

    def _end(self, fell: list[int]) -> list[Ended]:
        rows = self.rows
        rows.terminated[fell] = True
        over = fell
        if self._now == self._next_cut:
            rows.truncated[:] = (self._cuts == self._now) & ~rows.terminated  # both flags mean terminated
            self._next_cut = self._now + self._limit
            over = (rows.terminated | rows.truncated).nonzero()[0].tolist()
            self._cuts[over] = self._next_cut
            self._next_cut = int(self._cuts.min())
        self._flags_set = bool(over)
        for lane in over:
            rows.final_observations[lane] = rows.observations[lane]
            self._begin(lane, int(rows.next_seeds[lane]))
        return [(lane, {}) for lane in over]

    def set_options(self, indices: Sequence[int], options: Sequence[Any]) -> None:
        """Reset options from the lanes' next reset on."""
        for lane, value in zip(indices, options):
            self._options[lane] = value

    def replay(self, jobs: Sequence[Replay]) -> list[tuple[float, int]]:
        """Bring lanes to where their episodes stood, each with Gymnasium's own environment."""
        return [self._replay(job) for job in jobs]

    def _replay(self, job: Replay) -> tuple[float, int]:
        block = Block(lambda: gym.make(self._spec, max_episode_steps=self._limit, disable_env_checker=True), 0, 1)
        block.attach(carve_rows(self.observation_space, self.action_space, 1, 1)[0])
        total, taken = block.replay(Replay(0, job.seed, job.options, job.actions))
        self._env.state = block.copies[0].env.unwrapped.state  # type: ignore[union-attr]
        self._put(job.copy, taken)
        return total, taken

    def close(self) -> None:
        """Nothing is held."""


class NativeCartPole(LaneVectorEnv):
    """CartPole-v0 or -v1, all lanes at once: the same bits as `InProcessVectorEnv` in a fraction of the time."""

    def __init__(self, name: str, num_envs: int, *, max_episode_steps: int | None = None, **options: Any) -> None:
        super().__init__(_CartPoleEngine(name, num_envs, max_episode_steps, _dynamics(num_envs)), **options)


def _dynamics(num_lanes: int) -> Callable[[CartPoleEnv, StepRows], Dynamics]:
    return LaneByLane if num_lanes <= _FEW_LANES else AllAtOnce


@functools.cache
def _is_bit_equal(name: str, dynamics: Callable[[CartPoleEnv, StepRows], Dynamics]) -> bool:
    """Whether this Gymnasium and this NumPy give the same bits with these dynamics as one environment at a time: 64 steps of 16 lanes."""
    lanes = 16  # more than any vector register holds, so that whole registers and remainders are both compared
    engine = _CartPoleEngine(name, lanes, None, dynamics)
    engine.reset(range(lanes), range(lanes))
    engine.rows.next_seeds[:] = np.arange(lanes) + lanes
    envs = [gym.make(name, disable_env_checker=True) for _ in range(lanes)]
    seen = np.array([env.reset(seed=seed)[0] for seed, env in enumerate(envs)])
    for turn in range(64):
        if not np.array_equal(seen, engine.rows.observations):
            return False
        engine.rows.actions[:] = (np.arange(lanes) + turn) % 3 % 2
        ended = {lane for lane, _ in engine.finish()}
        for lane, env in enumerate(envs):
            seen[lane], _, terminated, truncated, _ = env.step(int(engine.rows.actions[lane]))
            if (terminated or truncated) != (lane in ended):
                return False
            if lane in ended:
                seen[lane], _ = env.reset(seed=lane + lanes)
    return True
