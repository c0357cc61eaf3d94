"""Step 1 of 9: CartPole for all lanes together, bit-identical to Gymnasium's environment.

The operations are Gymnasium's, in the same order and in float64: once in Python floats, which are faster for a few lanes (most of a short
NumPy call is overhead), and once on arrays, for many lanes.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from inchworm.config.sections import EnvConfig
from inchworm.core.errors import EnvError
from inchworm.core.types import Array
from inchworm.env.episodes import Ended, Replay
from inchworm.env.local import LocalCopies
from inchworm.env.registry import World
from inchworm.env.step_arrays import StepRows, allocate_rows
from inchworm.env.vector_env import Engine, LaneVectorEnv


class LaneByLane:
    """The equations in Python floats, for a few lanes."""

    def __init__(self, env: CartPoleEnv, rows: StepRows) -> None:
        self._rows = rows
        self._states = [(0.0, 0.0, 0.0, 0.0)] * len(rows.rewards)
        self._bytes = memoryview(rows.observations).cast("B")  # of [B, 4] f32
        self._pack = struct.Struct("=4f").pack_into  # rounds to float32 as NumPy does
        self._cos, self._sin = trigonometry()
        self._force = float(env.force_mag)
        self._constants = tuple(map(float, (env.polemass_length, env.total_mass, env.gravity, env.length, env.masspole, env.tau)))
        self._limits = float(env.x_threshold), float(env.theta_threshold_radians)

    def move(self) -> list[int]:
        """Take one Euler step of every lane; return the lanes that fell."""
        states, raw, pack, cos, sin = self._states, self._bytes, self._pack, self._cos, self._sin
        polemass_length, total_mass, gravity, length, masspole, tau = self._constants
        x_limit, theta_limit = self._limits
        fell = []
        for lane, action in enumerate(self._rows.actions.tolist()):
            if action == 1:
                force = self._force
            elif action == 0:
                force = -self._force
            else:
                raise _invalid(self._rows.actions)
            x, x_dot, theta, theta_dot = states[lane]
            costheta, sintheta = cos(theta), sin(theta)
            temp = (force + polemass_length * (theta_dot * theta_dot) * sintheta) / total_mass
            thetaacc = (gravity * sintheta - costheta * temp) / (length * (4.0 / 3.0 - masspole * (costheta * costheta) / total_mass))
            xacc = temp - polemass_length * thetaacc * costheta / total_mass
            x += tau * x_dot
            x_dot += tau * xacc
            theta += tau * theta_dot
            theta_dot += tau * thetaacc
            states[lane] = (x, x_dot, theta, theta_dot)
            pack(raw, 16 * lane, x, x_dot, theta, theta_dot)
            if x < -x_limit or x > x_limit or theta < -theta_limit or theta > theta_limit:
                fell.append(lane)
        return fell

    def put(self, lane: int, state: Array) -> None:
        """Set one lane's state (x, x_dot, theta, theta_dot) and its observation."""
        self._states[lane] = tuple(map(float, state))  # type: ignore[assignment]
        self._rows.observations[lane] = state


@functools.cache
def trigonometry() -> tuple[Callable[[float], float], Callable[[float], float]]:
    """Return (cos, sin) of one float with NumPy's bits, as in Gymnasium: Python's own functions, which are faster, if they agree."""
    angles = np.linspace(-0.5, 0.5, 2001).tolist()  # the pole falls at 0.21
    if all(math.cos(angle) == np.cos(angle) and math.sin(angle) == np.sin(angle) for angle in angles):
        return math.cos, math.sin
    return (lambda angle: float(np.cos(angle))), (lambda angle: float(np.sin(angle)))


def _invalid(actions: Array) -> EnvError:
    return EnvError(f"actions {actions.tolist()} are not all 0 or 1, as CartPole requires")


class AllAtOnce:
    """The equations on arrays, for many lanes."""

    def __init__(self, env: CartPoleEnv, rows: StepRows) -> None:
        num_lanes = len(rows.rewards)
        self._rows = rows
        self._seen = rows.observations.reshape(num_lanes, 2, 2)  # a view
        self.state = np.zeros((2, 2, num_lanes), np.float64)  # [position or speed, cart or pole, B]
        self._ordered = self.state.transpose(2, 1, 0)  # [B, cart or pole, position or speed]: Gymnasium's order, row by row
        self._scratch = np.empty((6, num_lanes), np.float64)
        self._pair = np.empty((2, num_lanes), np.float64)
        self._accelerations = np.empty((2, num_lanes), np.float64)  # of cart and pole
        self._outside, self._fell = np.empty((2, num_lanes), np.bool_), np.empty(num_lanes, np.bool_)
        constants = (2.0 * env.force_mag, env.polemass_length, env.total_mass, env.gravity, env.length, env.masspole, 4.0 / 3.0)
        # [B] each: an array operand is twice as fast as a float
        self._force, *self._constants = (np.full(num_lanes, number, np.float64) for number in (env.force_mag, *constants))
        self._tau = np.full((2, num_lanes), env.tau)
        self._limits = np.array([[env.x_threshold], [env.theta_threshold_radians]]).repeat(num_lanes, 1)

    def move(self) -> list[int]:
        """Take one Euler step of every lane; return the lanes that fell."""
        actions = self._rows.actions  # [B]
        if np.bitwise_or.reduce(actions) not in (0, 1):
            raise _invalid(actions)
        positions, speeds = self.state
        theta, theta_dot = positions[1], speeds[1]
        force, cos, sin, temp, low, high = self._scratch
        xacc, thetaacc = self._accelerations
        twice_force, polemass_length, total_mass, gravity, length, masspole, four_thirds = self._constants
        np.cos(theta, cos)
        np.sin(theta, sin)
        # force = force_mag if action == 1 else -force_mag
        np.multiply(actions, twice_force, force)
        np.subtract(force, self._force, force)
        # temp = (force + polemass_length * theta_dot**2 * sin) / total_mass
        np.square(theta_dot, temp)
        np.multiply(polemass_length, temp, temp)
        np.multiply(temp, sin, temp)
        np.add(force, temp, temp)
        np.divide(temp, total_mass, temp)
        # thetaacc = (gravity * sin - cos * temp) / (length * (4/3 - masspole * cos**2 / total_mass))
        np.square(cos, low)
        np.multiply(masspole, low, low)
        np.divide(low, total_mass, low)
        np.subtract(four_thirds, low, low)
        np.multiply(length, low, low)
        np.multiply(gravity, sin, high)
        np.multiply(cos, temp, thetaacc)
        np.subtract(high, thetaacc, thetaacc)
        np.divide(thetaacc, low, thetaacc)
        # xacc = temp - polemass_length * thetaacc * cos / total_mass
        np.multiply(polemass_length, thetaacc, xacc)
        np.multiply(xacc, cos, xacc)
        np.divide(xacc, total_mass, xacc)
        np.subtract(temp, xacc, xacc)
        # position += tau * speed, then speed += tau * acceleration, for cart and pole
        np.multiply(self._tau, speeds, self._pair)
        np.add(positions, self._pair, positions)
        np.multiply(self._tau, self._accelerations, self._pair)
        np.add(speeds, self._pair, speeds)
        np.abs(positions, self._pair)
        np.greater(self._pair, self._limits, self._outside)
        np.logical_or(self._outside[0], self._outside[1], self._fell)
        self._seen[...] = self._ordered
        return self._fell.nonzero()[0].tolist()

    def put(self, lane: int, state: Array) -> None:
        """Set one lane's state (x, x_dot, theta, theta_dot) and its observation."""
        self._ordered[lane] = np.reshape(state, (2, 2))
        self._seen[lane] = self._ordered[lane]


_FEW_LANES = 16
"""Measured: up to this number floats are faster than arrays, whose overhead is that of about 20 lanes."""


class _CartPoleEngine(Engine):
    """Steps all lanes of CartPole together."""

    start = None  # `finish` takes the step
    lanes_per_copy = 1

    def __init__(self, name: str, num_lanes: int, max_episode_steps: int | None = None) -> None:
        self._spec = gym.spec(name)
        self._limit = max_episode_steps or self._spec.max_episode_steps or 500
        self._env = env = CartPoleEnv()
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.rows: StepRows = allocate_rows(self.observation_space, self.action_space, num_lanes, num_lanes)[0]
        self._dynamics = LaneByLane(env, self.rows) if num_lanes <= _FEW_LANES else AllAtOnce(env, self.rows)
        self._options: list[Any] = [None] * num_lanes
        self._now = 0  # steps taken
        self._cuts = np.zeros(num_lanes, np.int64)  # [B] the step at which the time limit ends each running episode
        self._next_cut = self._limit  # no time limit is reached earlier
        self._flags_set = False

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin episodes in some lanes."""
        for lane, seed in zip(indices, seeds):
            self._begin(lane, seed)

    def _begin(self, lane: int, seed: int) -> None:
        """Draw the first state of an episode as Gymnasium's environment does."""
        self._env.reset(seed=seed, options=self._options[lane])
        self._put(lane, 0)

    def _put(self, lane: int, taken: int) -> None:
        self._dynamics.put(lane, self._env.state)
        self._cuts[lane] = self._now + self._limit - taken
        self._next_cut = min(self._next_cut, self._now + self._limit - taken)

    def finish(self) -> list[Ended]:
        """Step all lanes; where an episode ended, begin the next."""
        fell = self._dynamics.move()
        rows = self.rows
        rows.rewards.fill(1.0)
        if self._flags_set:
            rows.terminated.fill(False)
            rows.truncated.fill(False)
            self._flags_set = False
        self._now += 1
        if not fell and self._now < self._next_cut:
            return []
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
        """Set the options of the lanes' next resets."""
        for lane, value in zip(indices, options):
            self._options[lane] = value

    def replay(self, jobs: Sequence[Replay]) -> list[tuple[float, int]]:
        """Replay episodes, each in Gymnasium's own environment; return (return, steps) of each."""
        results = []
        for job in jobs:
            block = LocalCopies(lambda: gym.make(self._spec, max_episode_steps=self._limit, disable_env_checker=True), 0, 1)
            block.attach(allocate_rows(self.observation_space, self.action_space, 1, 1)[0])
            ((total, taken),) = block.replay([job._replace(copy=0)])
            self._env.state = block.copies[0].env.unwrapped.state  # type: ignore[union-attr]
            self._put(job.copy, taken)
            results.append((total, taken))
        return results

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class NativeCartPole(LaneVectorEnv):
    """CartPole-v0 or -v1, all lanes together: bit-identical to `InProcessVectorEnv`, and several times as fast."""

    needs_trial = False  # replay is exact: tests compare it

    def __init__(self, name: str, num_envs: int, *, max_episode_steps: int | None = None, **options: Any) -> None:
        super().__init__(_CartPoleEngine(name, num_envs, max_episode_steps), **options)


@functools.cache
def _is_bit_equal(name: str, lanes: int) -> bool:
    """Whether 64 steps of this number of lanes are bit-identical to those of the installed Gymnasium with the installed NumPy."""
    engine = _CartPoleEngine(name, lanes)
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


def _vector_fits(config: EnvConfig) -> bool:
    """Whether all copies of a config can be stepped natively: it has no arguments, and the results are bit-identical here."""
    lanes = _FEW_LANES + (config.num_envs > _FEW_LANES)  # each form is compared once; both are more than a vector register holds
    return not config.kwargs and _is_bit_equal(config.id, lanes)


def _make_vector(config: EnvConfig, *, global_state: bool = False, **options: Any) -> NativeCartPole:
    del global_state  # one agent has none
    return NativeCartPole(config.id, config.num_envs, max_episode_steps=config.max_episode_steps, **options)


WORLD = World(make_vector=_make_vector, vector_fits=_vector_fits)
"""CartPole as `env/registry` knows it."""
