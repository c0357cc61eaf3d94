"""Actors that need no training: random ones for any environment, and the heuristic of a world that has one."""

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
    """Draws legal choices and bounded numbers uniformly, unbounded numbers from a standard normal."""

    def __init__(self, action_space: Space) -> None:
        self.action_space = action_space
        self._layout = action_layout(action_space, "clip")
        low, high = self._layout.low.astype(np.float64), self._layout.high.astype(np.float64)
        self._bounded = np.isfinite(low) & np.isfinite(high)  # [D]
        self._low, self._width = np.where(self._bounded, low, 0.0), np.subtract(high, low, where=self._bounded, out=np.ones_like(low))
        self._log_width = np.log(np.maximum(self._width, np.finfo(np.float64).tiny))

    def initial_state(self, num_lanes: int) -> Tree:  # noqa: ARG002 - the protocol's
        """Return the empty state: there is no memory."""
        return ()

    def act(
        self,
        observations: Tree,
        state: Tree,
        episode_starts: Array,
        rng: np.random.Generator,
        *,
        deterministic: bool = False,  # noqa: ARG002 - the protocol's
    ) -> PolicyStep:
        """Draw one legal action per lane."""
        layout, lanes = self._layout, len(episode_starts)
        masked = layout.num_logits and isinstance(observations, dict) and MASK_KEY in observations
        mask = encode_mask(layout, observations[MASK_KEY]) if masked else None
        flat = np.zeros((lanes, layout.num_outputs), np.float32)
        choices, normal, _ = distributions.sample(layout, flat, flat[:1, layout.num_logits :].reshape(-1), mask, rng)
        numbers = np.where(self._bounded, self._low + self._width * rng.random(normal.shape), normal).astype(layout.low.dtype)
        legal = np.ones((lanes, layout.num_logits), bool) if mask is None else mask
        choice_log_probs = np.zeros(lanes)  # [B] minus the log of the number of legal choices, over all groups
        for group in layout.groups:
            choice_log_probs -= np.log(legal[:, group].sum(-1))
        normal_log_probs = -0.5 * normal * normal - distributions.HALF_LOG_2PI  # [B, D]
        log_probs = choice_log_probs + np.where(self._bounded, -self._log_width, normal_log_probs).sum(-1)
        actions = layout.unflatten(choices, numbers, sampled=True)
        env_actions = layout.unflatten(choices, distributions.to_env(layout, numbers))
        return PolicyStep(actions, env_actions, log_probs.astype(np.float32), state)


def make_actor(name: str, action_space: Space, env_id: str, kwargs: Mapping[str, Any] | None = None) -> Actor:
    """Make the actor of that name in a world: random, heuristic, or heuristic:0.5 for one of that skill."""
    kind, skill = read_opponent(name)
    if kind == "random":
        return RandomActor(action_space)
    make_heuristic = heuristic_of(env_id)
    if make_heuristic is None:
        raise ConfigError(f"{env_id} has no heuristic to play against; use {team_worlds()}, or random, a pool of policies, or self_play")
    return make_heuristic(kwargs or {}, skill)
