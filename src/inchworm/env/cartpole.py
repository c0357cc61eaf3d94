"""Step 1 of 9: CartPole's equations, once for arrays of lanes and once lane by lane, bit-equal to Gymnasium's environment.

Every line is one of Gymnasium's, its operations in the same order and in float64. Python's own floats are the quicker
way for a few lanes (most of a short NumPy call is overhead), arrays for many.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable
from typing import NoReturn, Protocol

import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from inchworm.env.memory import StepRows
from inchworm.errors import EnvError
from inchworm.types import Array


class Dynamics(Protocol):
    """What moves all lanes of CartPole by one step."""

    def move(self) -> list[int]:
        """One Euler step of every lane with the actions in the rows; the observations go there too. Returns the lanes that fell."""
        ...

    def put(self, lane: int, state: Array) -> None:
        """Set one lane's state (x, x_dot, theta, theta_dot), and its observation."""
        ...


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
        """One Euler step of every lane; returns the lanes that fell."""
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
                _refuse(self._rows.actions)
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
        """Set one lane's state (x, x_dot, theta, theta_dot), and its observation."""
        self._states[lane] = tuple(map(float, state))  # type: ignore[assignment]
        self._rows.observations[lane] = state


@functools.cache
def trigonometry() -> tuple[Callable[[float], float], Callable[[float], float]]:
    """(cos, sin) of one float with NumPy's bits, which are Gymnasium's: Python's own where they are the same, which is quicker."""
    angles = np.linspace(-0.5, 0.5, 2001).tolist()  # the pole falls at 0.21
    if all(math.cos(angle) == np.cos(angle) and math.sin(angle) == np.sin(angle) for angle in angles):
        return math.cos, math.sin
    return (lambda angle: float(np.cos(angle))), (lambda angle: float(np.sin(angle)))


def _refuse(actions: Array) -> NoReturn:
    raise EnvError(f"actions {actions.tolist()} are not all 0 or 1, as CartPole's must be")


class AllAtOnce:
    """The equations on arrays, for many lanes."""

    def __init__(self, env: CartPoleEnv, rows: StepRows) -> None:
        num_lanes = len(rows.rewards)

        def everywhere(constant: float) -> np.ndarray:  # [B]: NumPy takes an array in half the time that a float takes
            return np.full(num_lanes, constant, np.float64)

        self._rows = rows
        self._seen = rows.observations.reshape(num_lanes, 2, 2)  # a view
        self.state = np.zeros((2, 2, num_lanes), np.float64)  # [position or speed, cart or pole, B]
        self._ordered = self.state.transpose(2, 1, 0)  # [B, cart or pole, position or speed]: Gymnasium's order, row by row
        self._scratch = np.empty((6, num_lanes), np.float64)
        self._pair = np.empty((2, num_lanes), np.float64)
        self._accelerations = np.empty((2, num_lanes), np.float64)  # of cart and pole
        self._outside, self._fell = np.empty((2, num_lanes), np.bool_), np.empty(num_lanes, np.bool_)
        self._force, self._twice_force = everywhere(env.force_mag), everywhere(2.0 * env.force_mag)
        self._polemass_length, self._total_mass = everywhere(env.polemass_length), everywhere(env.total_mass)
        self._gravity, self._masspole, self._length = everywhere(env.gravity), everywhere(env.masspole), everywhere(env.length)
        self._four_thirds, self._tau = everywhere(4.0 / 3.0), np.full((2, num_lanes), env.tau)
        self._limits = np.stack([everywhere(env.x_threshold), everywhere(env.theta_threshold_radians)])

    def move(self) -> list[int]:
        """One Euler step of every lane; returns the lanes that fell."""
        actions = self._rows.actions  # [B]
        if np.bitwise_or.reduce(actions) not in (0, 1):
            _refuse(actions)
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
        np.logical_or(self._outside[0], self._outside[1], self._fell)
        self._seen[...] = self._ordered
        return self._fell.nonzero()[0].tolist()

    def put(self, lane: int, state: Array) -> None:
        """Set one lane's state (x, x_dot, theta, theta_dot), and its observation."""
        self._ordered[lane] = np.reshape(state, (2, 2))
        self._seen[lane] = self._ordered[lane]
