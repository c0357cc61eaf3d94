"""Serves step 2 of 9: actors that need no training. Random ones for any world, and the heuristic of a world that brings one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from inchworm.backends.numpy import distributions
from inchworm.backends.numpy.policy import encode_mask
from inchworm.config.sections import read_opponent
from inchworm.core.errors import ConfigError
from inchworm.core.protocols import Actor
from inchworm.core.spaces import MASK_KEY, Space
from inchworm.core.types import Array, PolicyStep, Tree
from inchworm.env.registry import heuristic_of, team_worlds
from inchworm.policy.layout import action_layout


class RandomActor:
    """Every legal choice equally likely, every bounded number uniform within its bounds, every unbounded one normal. No memory."""

    def __init__(self, action_space: Space) -> None:
        self.action_space = action_space
        self._layout = action_layout(action_space, "clip")
        low, high = self._layout.low.astype(np.float64), self._layout.high.astype(np.float64)
        self._bounded = np.isfinite(low) & np.isfinite(high)  # [D]
        self._low, self._width = np.where(self._bounded, low, 0.0), np.subtract(high, low, where=self._bounded, out=np.ones_like(low))
        self._log_width = np.log(np.maximum(self._width, np.finfo(np.float64).tiny))

    def initial_state(self, num_lanes: int) -> Tree:  # noqa: ARG002 - the protocol's
        """No memory."""
        return ()

    def act(
        self,
        observations: Tree,
        state: Tree,
        episode_starts: Array,
        rng: np.random.Generator,
        *,
        deterministic: bool = False,  # noqa: ARG002 - chance is all it has
    ) -> PolicyStep:
        """One legal action per lane, with its log-prob."""
        layout, lanes = self._layout, len(episode_starts)
        masked = layout.num_logits and isinstance(observations, dict) and MASK_KEY in observations
        mask = encode_mask(layout, observations[MASK_KEY]) if masked else None
        flat = np.zeros((lanes, layout.num_outputs), np.float32)
        choices, normal, _ = distributions.sample(layout, flat, flat[:1, layout.num_logits :].reshape(-1), mask, rng)
        numbers = np.where(self._bounded, self._low + self._width * rng.random(normal.shape), normal).astype(layout.low.dtype)
        log_probs = self._choice_log_probs(mask, lanes) + np.where(self._bounded, -self._log_width, _normal_log_prob(normal)).sum(-1)
        actions = layout.unflatten(choices, numbers, sampled=True)
        env_actions = layout.unflatten(choices, distributions.to_env(layout, numbers))
        return PolicyStep(actions, env_actions, log_probs.astype(np.float32), state)

    def _choice_log_probs(self, mask: np.ndarray | None, lanes: int) -> np.ndarray:
        """[B] minus the log of how many choices there were, over all groups."""
        legal = np.ones((lanes, self._layout.num_logits), bool) if mask is None else mask
        total = np.zeros(lanes)
        for group in self._layout.groups:
            total -= np.log(legal[:, group].sum(-1))
        return total


def _normal_log_prob(values: np.ndarray) -> np.ndarray:
    result: np.ndarray = -0.5 * values * values - distributions.HALF_LOG_2PI
    return result


def make_actor(name: str, action_space: Space, env_id: str, kwargs: Mapping[str, Any] | None = None) -> Actor:
    """The actor that a name means in a world: random, heuristic, or heuristic:0.5 for one of that skill."""
    kind, skill = read_opponent(name)
    if kind == "random":
        return RandomActor(action_space)
    make_heuristic = heuristic_of(env_id)
    if make_heuristic is None:
        raise ConfigError(f"{env_id} has no heuristic to play against; use {team_worlds()}, or random, a pool of policies, or self_play")
    return make_heuristic(kwargs or {}, skill)


def has_heuristic(env_id: str) -> bool:
    """Whether a world has a hand-written player."""
    return heuristic_of(env_id) is not None
