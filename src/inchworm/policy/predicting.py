"""Serves step 4 of 9, outside of training: one observation in, one action out, whatever backend acts."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import optree

from inchworm.policy.spec import PolicySpec
from inchworm.types import PolicyStep, Tree

FORGETFUL = "predict begins with an empty memory at every call; predict_with_memory(observation, state) keeps it between calls"


class Predicts:
    """What the built-in policies share: they have a spec, and act."""

    spec: PolicySpec
    initial_state: Callable[[int], Tree]
    act: Callable[..., PolicyStep]

    def predict(self, observation: Tree, *, deterministic: bool = True, rng: np.random.Generator | None = None) -> Tree:
        """The action for one unbatched observation, as the environment takes it; with a memory, for the first of an episode."""
        if optree.tree_leaves(self.initial_state(1)):
            warnings.warn(FORGETFUL, stacklevel=2)
        return self.predict_with_memory(observation, deterministic=deterministic, rng=rng)[0]

    def predict_with_memory(
        self, observation: Tree, state: Tree = None, *, deterministic: bool = True, rng: np.random.Generator | None = None
    ) -> tuple[Tree, Tree]:
        """The action for one unbatched observation, and the memory to give back with the next; None begins an episode."""
        stream = rng if rng is not None else np.random.default_rng()
        memory = self.initial_state(1) if state is None else state
        step = self.act(self.spec.batch(observation), memory, np.array([state is None]), stream, deterministic=deterministic)
        return self.spec.unbatch(step.env_actions), step.state

    @property
    def central_critic(self) -> bool:
        """Whether `value` reads the global state."""
        return self.spec.global_state is not None
