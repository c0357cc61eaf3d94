"""Step 1 of 9, all lanes at once: CartPole's dynamics on arrays [B], bit-equal to Gymnasium's environment.

Gymnasium's own `CartPoleVectorEnv` has the same dynamics, but one random stream for all lanes, a reset one step late and
no final observation. So its arithmetic is done here, operation by operation in the same order and in float64, with each
lane's first state drawn by Gymnasium's environment from that lane's own episode seed. Before it is used, a process
compares it with Gymnasium's environment once; if any bit differs (another release, another NumPy), it is not used.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from inchworm.config import EnvConfig
from inchworm.env.block import Block
from inchworm.env.engine import Ended, Replay
from inchworm.env.lane_env import LaneVectorEnv
from inchworm.env.memory import StepRows, carve_rows
from inchworm.errors import EnvError
from inchworm.types import Array

_LEAST_LANES = 3
"""Measured: from here on one step on arrays costs less than a step of each environment."""

_IDS = ("CartPole-v0", "CartPole-v1")


def native_pays(config: EnvConfig) -> bool:
    """Whether a config's environment is stepped natively: it is one we know, nothing is wrapped around it, and the bits are equal."""
    plain = not (config.kwargs or config.wrappers or config.atari) and config.frame_stack == 1
    return config.native and plain and config.id in _IDS and config.num_envs >= _LEAST_LANES and _is_bit_equal(config.id)


class _Dynamics:
    """CartPole's equations on arrays; the constants are read from Gymnasium's environment."""

    def __init__(self, env: CartPoleEnv, num_lanes: int) -> None:
        def everywhere(constant: float) -> np.ndarray:  # [B]: NumPy takes an array in half the time that a float takes
            return np.full(num_lanes, constant, np.float64)

        self.env = env
        self.state = np.zeros((2, 2, num_lanes), np.float64)  # [position or speed, cart or pole, B]
        self.observations = self.state.transpose(2, 1, 0)  # [B, cart or pole, position or speed]: Gymnasium's order, row by row
        self._scratch = np.empty((6, num_lanes), np.float64)
        self._pair = np.empty((2, num_lanes), np.float64)
        self._accelerations = np.empty((2, num_lanes), np.float64)  # of cart and pole
        self._outside = np.empty((2, num_lanes), np.bool_)
        self._force, self._twice_force = everywhere(env.force_mag), everywhere(2.0 * env.force_mag)
        self._polemass_length, self._total_mass = everywhere(env.polemass_length), everywhere(env.total_mass)
        self._gravity, self._masspole, self._length = everywhere(env.gravity), everywhere(env.masspole), everywhere(env.length)
        self._four_thirds, self._tau = everywhere(4.0 / 3.0), np.full((2, num_lanes), env.tau)
        self._limits = np.stack([everywhere(env.x_threshold), everywhere(env.theta_threshold_radians)])

    def move(self, actions: Array, terminated: Array) -> None:
        """One Euler step of every lane [B]; each group is one line of Gymnasium's, its operations in the same order."""
        positions, speeds = self.state
        theta, theta_dot = positions[1], speeds[1]
        force, cos, sin, temp, low, high = self._scratch
        xacc, thetaacc = self._accelerations
        np.cos(theta, cos)
        np.sin(theta, sin)
        # force = force_mag if action == 1 else -force_mag
        np.multiply(actions, self._twice_force, force)
        np.subtract(force, self._force, force)
        # temp = (force + polemass_length * theta_dot**2 * sin) / total_mass
        np.square(theta_dot, temp)
        np.multiply(self._polemass_length, temp, temp)
        np.multiply(temp, sin, temp)
        np.add(force, temp, temp)
        np.divide(temp, self._total_mass, temp)
        # thetaacc = (gravity * sin - cos * temp) / (length * (4/3 - masspole * cos**2 / total_mass))
        np.square(cos, low)
        np.multiply(self._masspole, low, low)
        np.divide(low, self._total_mass, low)
        np.subtract(self._four_thirds, low, low)
        np.multiply(self._length, low, low)
        np.multiply(self._gravity, sin, high)
        np.multiply(cos, temp, thetaacc)
        np.subtract(high, thetaacc, thetaacc)
        np.divide(thetaacc, low, thetaacc)
        # xacc = temp - polemass_length * thetaacc * cos / total_mass
        np.multiply(self._polemass_length, thetaacc, xacc)
        np.multiply(xacc, cos, xacc)
        np.divide(xacc, self._total_mass, xacc)
        np.subtract(temp, xacc, xacc)
        # position += tau * speed, then speed += tau * acceleration, for cart and pole
        np.multiply(self._tau, speeds, self._pair)
        np.add(positions, self._pair, positions)
        np.multiply(self._tau, self._accelerations, self._pair)
        np.add(speeds, self._pair, speeds)
        np.abs(positions, self._pair)
        np.greater(self._pair, self._limits, self._outside)
        np.logical_or(self._outside[0], self._outside[1], terminated)

    def begin(self, lane: int, seed: int, options: Any) -> None:
        """The first state of an episode, drawn as Gymnasium's environment draws it."""
        self.env.reset(seed=seed, options=options)
        self.put(lane, self.env.state)

    def put(self, lane: int, state: Any) -> None:
        """Set one lane's state (x, x_dot, theta, theta_dot)."""
        self.observations[lane] = np.reshape(state, (2, 2))


class _CartPoleEngine:
    """The engine that moves all lanes of CartPole at once."""

    lanes_per_copy = 1

    def __init__(self, name: str, num_lanes: int, max_episode_steps: int | None) -> None:
        self._spec = gym.spec(name)
        self._limit = max_episode_steps or self._spec.max_episode_steps or 500
        env = CartPoleEnv()
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.rows: StepRows = carve_rows(self.observation_space, self.action_space, num_lanes, num_lanes)[0]
        self._dynamics = _Dynamics(env, num_lanes)
        self._steps = np.zeros(num_lanes, np.int64)  # [B] steps of the running episodes
        self._over = np.zeros(num_lanes, np.bool_)  # [B]
        self._options: list[Any] = [None] * num_lanes
        self._observations = self.rows.observations.reshape(num_lanes, 2, 2)  # a view

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin episodes in some lanes."""
        for lane, seed in zip(indices, seeds):
            self._begin(lane, seed)

    def _begin(self, lane: int, seed: int) -> None:
        self._dynamics.begin(lane, seed, self._options[lane])
        self._steps[lane] = 0
        self._observations[lane] = self._dynamics.observations[lane]

    def start(self) -> None:
        """Nothing to wake: `finish` takes the step."""

    def finish(self) -> list[Ended]:
        """One step of all lanes; where an episode ended, the next has begun."""
        rows = self.rows
        if np.bitwise_or.reduce(rows.actions) not in (0, 1):
            raise EnvError(f"actions {rows.actions.tolist()} are not all 0 or 1, as CartPole's must be")
        self._dynamics.move(rows.actions, rows.terminated)
        self._observations[...] = self._dynamics.observations
        rows.rewards.fill(1.0)
        np.add(self._steps, 1, self._steps)
        np.greater_equal(self._steps, self._limit, rows.truncated)
        np.greater(rows.truncated, rows.terminated, rows.truncated)  # both flags mean terminated
        np.logical_or(rows.terminated, rows.truncated, self._over)
        lanes = self._over.nonzero()[0]
        if len(lanes) == 0:
            return []
        rows.final_observations[lanes] = rows.observations[lanes]
        for lane in lanes:
            self._begin(int(lane), int(rows.next_seeds[lane]))
        return [(int(lane), {}) for lane in lanes]

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
        self._dynamics.put(job.copy, block.copies[0].env.unwrapped.state)  # type: ignore[attr-defined]
        self._steps[job.copy] = taken
        self._observations[job.copy] = self._dynamics.observations[job.copy]
        return total, taken

    def close(self) -> None:
        """Nothing is held."""


class NativeCartPole(LaneVectorEnv):
    """CartPole-v0 or -v1, all lanes at once: the same bits as `InProcessVectorEnv` in a fraction of the time."""

    def __init__(self, name: str, num_envs: int, *, max_episode_steps: int | None = None, **options: Any) -> None:
        super().__init__(_CartPoleEngine(name, num_envs, max_episode_steps), **options)


@functools.cache
def _is_bit_equal(name: str) -> bool:
    """Whether this Gymnasium and this NumPy give the same bits on arrays as one environment at a time: 64 steps of 16 lanes."""
    lanes = 16  # more than any vector register holds, so that whole registers and remainders are both compared
    engine = _CartPoleEngine(name, lanes, None)
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
