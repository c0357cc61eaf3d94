"""Step 2 of 9, over Stable-Baselines3: a `VecEnv` behind the `VectorEnv` contract.

A `VecEnv` resets each copy itself in the step in which its episode ends, without a seed, and keeps the last observation in that copy's
info. So its episodes cannot be given seeds or options and cannot be replayed; everything else is as with other vector envs.
Stable-Baselines3 is never imported here: who has a `VecEnv` has imported it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from inchworm.core.errors import EnvError, env_errors
from inchworm.core.seeding import derive_seed
from inchworm.core.spaces import MASK_KEY, Space, map_tree, mask_sizes, mask_space, with_mask, zeros
from inchworm.core.types import Tree
from inchworm.env.foreign import BatchedVectorEnv, Moved
from inchworm.env.restore import StateKeeper, find_state_keeper
from inchworm.env.values import Masks, Refusal, allow_all

FINAL, CUT = "terminal_observation", "TimeLimit.truncated"
"""Where a copy's info holds its last observation, and whether its episode was cut off."""


class VecEnv(Protocol):
    """What is used of `stable_baselines3.common.vec_env.VecEnv`."""

    num_envs: int
    observation_space: Space
    action_space: Space

    def seed(self, seed: int | None = None) -> Any:
        """Seed all copies for the next reset."""

    def reset(self) -> Any:
        """Begin episodes in all copies."""

    def step_async(self, actions: np.ndarray) -> None:
        """Begin a step."""

    def step_wait(self) -> Any:
        """Wait for it: (observations, rewards, dones, infos)."""

    def env_method(self, method_name: str, *method_args: Any, **method_kwargs: Any) -> list[Any]:
        """Call a method of every copy."""

    def close(self) -> None:
        """Release everything."""


def is_vec_env(env: Any) -> bool:
    """Whether something is a `VecEnv` of Stable-Baselines3."""
    return any(base.__name__ == "VecEnv" and base.__module__.startswith("stable_baselines3.") for base in type(env).__mro__)


def adapt_vec_env(env: VecEnv, *, seed: int = 0, **options: Any) -> BatchedVectorEnv:
    """A `VecEnv` with the `VectorEnv` contract."""
    return BatchedVectorEnv(VecEnvWorld(env, seed), seed=seed, **options)


class VecEnvWorld:
    """A `VecEnv`. Each copy has its own random stream, seeded once: copy i with `derive_seed(seed, "vector env") + i`."""

    takes_seeds = False
    resets_itself = True

    def __init__(self, env: VecEnv, seed: int) -> None:
        layer: Any = env
        while layer is not None:  # from the outermost wrapper inwards
            if any(base.__name__ == "VecNormalize" for base in type(layer).__mro__):
                raise EnvError(
                    f"the wrapper {type(layer).__name__} is refused: its statistics would change within a rollout, and normalisers are "
                    "part of the policy here; pass the VecEnv inside it (env.venv) and set policy.normalize_observations=true and, for "
                    "rewards, ppo.scale_rewards=true"
                )
            layer = vars(layer).get("venv")
        self._env, self._name, self._is_new = env, type(env).__name__, True
        self._seed = derive_seed(seed, "vector env")
        self.num_lanes, self.action_space = int(env.num_envs), env.action_space
        self.observation_space: Space = env.observation_space
        has_attribute = getattr(env, "has_attr", None)
        has_masks = bool(mask_sizes(env.action_space)) and has_attribute is not None and has_attribute("action_masks")
        self._masks = Masks("action_masks", env.action_space) if has_masks else None  # as sb3-contrib's MaskablePPO reads them
        if self._masks is not None:
            masks = mask_space(env.action_space)
            self.observation_space = with_mask(env.observation_space, masks)
            self._mask_rows = zeros(masks, (self.num_lanes,))  # [B, n]
        own = {"get_state", "set_state"} <= set(dir(type(env)))  # a wrapper passes on those of what it wraps
        self.state_keeper: StateKeeper | None = find_state_keeper(env) if own else None
        self.inexact = (
            []
            if self.state_keeper is not None
            else [f"{self._name} resets itself, so that its episodes cannot be given seeds or replayed: a resumed run starts new episodes"]
        )

    def begin(self, lanes: Sequence[int], seeds: Sequence[int] | None, options: Mapping[str, Any] | None) -> Tree:  # noqa: ARG002
        """Begin episodes in all lanes: their first observations [B, *obs]."""
        with env_errors(self._name, "reset"):
            if self._is_new:
                self._env.seed(self._seed)
            self._is_new = False
            return self._with_masks(self._env.reset())

    def start(self, actions: Tree) -> None:
        """Begin a step."""
        with env_errors(self._name, "step_async"):
            self._env.step_async(actions)

    def finish(self) -> Moved:
        """Wait for it. Where an episode ended, the observation is the first of the next, and the last is in the copy's info."""
        with env_errors(self._name, "step_wait"):
            observations, rewards, dones, infos = self._env.step_wait()
        dones = np.asarray(dones, np.bool_)
        over = dones.nonzero()[0].tolist()
        for lane in over:
            if FINAL not in infos[lane]:
                raise EnvError(
                    f"{self._name}: the episode of lane {lane} ended, but its info has no {FINAL!r}; step_wait must keep the last "
                    f"observation there and set {CUT!r}, as DummyVecEnv does"
                )
        cut = np.array([bool(info.get(CUT, False)) for info in infos])  # [B]
        finals = {lane: self._with_free_mask(infos[lane][FINAL]) for lane in over}
        numbers = [{key: value for key, value in info.items() if key not in (FINAL, CUT)} for info in infos] if over else infos
        return Moved(self._with_masks(observations), np.asarray(rewards), dones & ~cut, dones & cut, numbers, finals)

    def _with_masks(self, observations: Any) -> Tree:
        """Observations [B, *obs] as a tree, with the masks if there are any."""
        seen: Tree = dict(observations) if isinstance(observations, Mapping) else observations
        if self._masks is None:
            return seen
        for lane, mask in enumerate(self._env.env_method("action_masks")):
            try:
                self._masks.write(mask, self._mask_rows, lane, acted_on=True)
            except Refusal as refusal:
                raise EnvError(f"{self._name}, lane {lane}: {refusal}") from None
        return self._add(seen, self._mask_rows)

    def _with_free_mask(self, observation: Any) -> Tree:
        """The last observation of an episode [*obs]; its mask is gone with the reset, and no action follows it."""
        seen: Tree = dict(observation) if isinstance(observation, Mapping) else observation
        if self._masks is None:
            return seen
        free = zeros(mask_space(self.action_space), (1,))
        allow_all(free, 0)
        return self._add(seen, map_tree(lambda array: array[0], free))

    def _add(self, seen: Tree, masks: Tree) -> Tree:
        return {**seen, MASK_KEY: masks} if isinstance(seen, dict) else {"observation": seen, MASK_KEY: masks}

    def close(self) -> None:
        """Close the vector env."""
        with env_errors(self._name, "close"):
            self._env.close()
