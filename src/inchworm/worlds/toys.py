"""Serves tests and docs: tiny worlds with known answers, and one world that speaks any spaces.

Each is a plain class, so it is its own factory: `make_vector_env(ConstantReward)` or the id `inchworm.worlds.toys:ConstantReward`.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from inchworm.core.spaces import MASK_KEY, Space, build_tree, leaf_shape, leaves, mask_sizes, mask_space, with_mask
from inchworm.core.types import Tree

Step = tuple[np.ndarray, float, bool, bool, dict[str, Any]]


def _number(value: float) -> np.ndarray:
    return np.array([value], np.float32)  # [1]


class _Toy(gym.Env[np.ndarray, Any]):
    """One number to see, two actions; the seed goes to `np_random`."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed, options=options)
        return self._first(), {}

    def _first(self) -> np.ndarray:
        return _number(0.0)


class ConstantReward(_Toy):
    """One step, observation 0, reward 1: V = 1. Tests the value head alone."""

    def step(self, action: Any) -> Step:  # noqa: ARG002
        """End with reward 1."""
        return _number(0.0), 1.0, True, False, {}


class _Sign(_Toy):
    """Shows +1 or -1, each half of the time, for one step."""

    def _first(self) -> np.ndarray:
        self.sign = float(self.np_random.integers(2) * 2 - 1)
        return _number(self.sign)


class ObservedReward(_Sign):
    """One step, observation ±1, reward equal to it: V(s) = s. Tests that the value reads the observation."""

    def step(self, action: Any) -> Step:  # noqa: ARG002
        """End with the observed reward."""
        return _number(self.sign), self.sign, True, False, {}


class ContextualReward(_Sign):
    """One step, observation ±1, actions 0 and 1 meaning -1 and +1, reward their product: the best policy earns 1, a blind one 0."""

    def step(self, action: Any) -> Step:
        """End with reward 1 for the action of the observed sign, else -1."""
        return _number(self.sign), self.sign * (2.0 * int(action) - 1.0), True, False, {}


class ActionReward(_Toy):
    """One step, action 0 earns -1 and action 1 earns 1: the best policy earns 1. Tests the policy gradient alone."""

    def step(self, action: Any) -> Step:
        """End with the action's reward."""
        return _number(0.0), 2.0 * int(action) - 1.0, True, False, {}


class DelayedReward(_Toy):
    """Two steps, observations 0 and 1, reward 1 at the end: V(0) = gamma, V(1) = 1. Tests the discount."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin at observation 0."""
        self.steps = 0
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Step:  # noqa: ARG002
        """Walk to observation 1, then end with reward 1."""
        self.steps += 1
        return _number(1.0), float(self.steps == 2), self.steps == 2, False, {}


class TruncatedForever(_Toy):
    """Reward 1 at every step, cut off after `length`: V = 1 / (1 - gamma). A learner that takes a cut for an end misses it."""

    def __init__(self, length: int = 5) -> None:
        super().__init__()
        self.length, self.steps = length, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin again; nothing looks different."""
        self.steps = 0
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Step:  # noqa: ARG002
        """Earn 1."""
        self.steps += 1
        return _number(0.0), 1.0, False, self.steps >= self.length, {}


class Corridor(_Toy):
    """A walk of `length` steps to the right end, reward 1 there: the best policy earns 1, and V(start) = gamma ** (length - 1)."""

    def __init__(self, length: int = 5) -> None:
        super().__init__()
        self.length, self.place, self.steps = length, 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin at the left end, or at `options["place"]`."""
        self.place, self.steps = int((options or {}).get("place", 0)), 0
        return super().reset(seed=seed, options=options)

    def _first(self) -> np.ndarray:
        return _number(self.place / self.length)

    def step(self, action: Any) -> Step:
        """Action 1 walks right, action 0 left; cut off after ten times the shortest way."""
        self.steps += 1
        self.place = max(0, self.place + 2 * int(action) - 1)
        there = self.place >= self.length
        return self._first(), float(there), there, self.steps >= 10 * self.length, {"place": self.place, "success": there}


class Counter(gym.Env[np.ndarray, Any]):
    """Identifiable data: the observation is (episode seed, step), the reward is the step, and `info` holds the sum of actions."""

    def __init__(self, length: int = 5, *, truncate: bool = False) -> None:
        self.observation_space = spaces.Box(0.0, 2.0**31, (2,), np.float64)
        self.action_space = spaces.Discrete(3)
        self.length, self.truncate = length, truncate

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin at step 0."""
        super().reset(seed=seed, options=options)
        self.episode, self.steps, self.total = seed or 0, 0, 0
        return self._observe(), {}

    def _observe(self) -> np.ndarray:
        return np.array([self.episode, self.steps], np.float64)

    def step(self, action: Any) -> Step:
        """Count one."""
        self.steps, self.total = self.steps + 1, self.total + int(action)
        over = self.steps >= self.length
        return self._observe(), float(self.steps), over and not self.truncate, over and self.truncate, {"total": self.total}


MaskBy = Literal["key", "info", "action_masks", "get_action_mask"]


class SpacesEnv(gym.Env[Any, Any]):
    """A world of any spaces: observations are samples, each legal action earns 1, and an illegal or foreign one raises.

    `mask` says how the world offers random action masks: in the observation, in `info`, or by one of the two methods.
    """

    def __init__(self, observation_space: Space, action_space: Space, episode_length: int = 5, mask: MaskBy | None = None) -> None:
        self.action_space, self._inner = copy.deepcopy(action_space), copy.deepcopy(observation_space)
        self._mask_by, self._length, self._steps = mask, episode_length, 0
        self._masks = mask_space(action_space) if mask else None
        self.observation_space = self._inner if mask != "key" or self._masks is None else with_mask(self._inner, self._masks)
        if mask in ("action_masks", "get_action_mask"):
            setattr(self, mask, lambda: self._mask)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode whose observations and masks are drawn from `seed`."""
        super().reset(seed=seed, options=options)
        self._inner.seed(int(self.np_random.integers(2**31)))
        self._steps = 0
        return self._observe()

    def _observe(self) -> tuple[Any, dict[str, Any]]:
        observation = self._inner.sample()
        if self._masks is None:
            return observation, {}
        self._mask = random_mask(self.action_space, self.np_random)
        if self._mask_by != "key":
            return observation, {MASK_KEY: self._mask} if self._mask_by == "info" else {}
        return ({**observation} if isinstance(self._inner, spaces.Dict) else {"observation": observation}) | {MASK_KEY: self._mask}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a legal action."""
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} is not in {self.action_space}")
        if self._masks is not None and not is_legal(self.action_space, action, self._mask):
            raise ValueError(f"{action!r} is illegal under {self._mask!r}")
        self._steps += 1
        observation, info = self._observe()
        over = self._steps >= self._length
        # Every other episode is cut off instead of ended, so that both ways are walked.
        cut = over and bool(self.np_random.integers(2))
        return observation, 1.0, over and not cut, cut, info


def random_mask(action_space: Space, rng: np.random.Generator) -> Tree:
    """A mask in which every discrete part has one legal action or more."""
    wanted = mask_space(action_space)
    actions = dict(leaves(action_space))

    def one(path: tuple[str | int, ...], leaf: Space) -> np.ndarray:
        mask = rng.integers(2, size=leaf_shape(leaf)).astype(np.int8)
        first = 0
        for size in mask_sizes(actions[path]):
            mask[first + rng.integers(size)] = 1
            first += size
        return mask

    return build_tree(wanted, one)


def is_legal(action_space: Space, action: Any, mask: Tree) -> bool:
    """Whether every discrete part of an action is allowed by its mask."""
    if isinstance(action_space, spaces.Dict):
        return all(is_legal(inner, action[key], mask.get(key)) for key, inner in action_space.spaces.items())
    if isinstance(action_space, spaces.Tuple):
        return all(is_legal(inner, action[index], mask[index]) for index, inner in enumerate(action_space.spaces))
    sizes = mask_sizes(action_space)
    firsts = np.cumsum([0, *sizes])[:-1].astype(np.int64)
    start = getattr(action_space, "start", 0) if sizes else 0
    chosen = np.reshape(np.asarray(action) - start, -1).astype(np.int64) if sizes else np.zeros(0, np.int64)
    return not sizes or bool(np.all(np.asarray(mask)[firsts + chosen]))


LEFT, RIGHT, WALK = 0, 1, 2
_REACH = 0.5
"""How far to the cue's side the best `reach` is."""


class MemoryCorridor(gym.Env[Any, Any]):
    """A cue at the start, `length` steps of nothing, then a choice: reward 1 for turning to the side that the cue showed.

    The observation is (cue, here): the cue is -1 (left) or +1 (right) in the first observation and 0 ever after; `here` is 1 in the last,
    where the choice is made. In between every observation is the same and no action matters, so a policy without memory chooses
    rightly half of the time, whatever it does. The last step's info says `is_success`.
    """

    def __init__(self, length: int = 20) -> None:
        if length < 1:
            raise ValueError(f"length={length}: between the cue and the choice there must be 1 step or more")
        self.observation_space: spaces.Space[Any] = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space: spaces.Space[Any] = spaces.Discrete(2)
        self.length, self.place, self.cue = length, 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Show a cue, left or right with equal chance."""
        super().reset(seed=seed, options=options)
        self.place, self.cue = 0, int(2 * self.np_random.integers(2) - 1)
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Walk on; at the end, turn."""
        if self.place < self.length:
            self.place += 1
            return self._observe(), 0.0, False, False, {}
        turned = self._turn(action) == (RIGHT if self.cue > 0 else LEFT)
        return self._observe(), self._reward(action, turned), True, False, {"is_success": float(turned)}

    def _observe(self) -> Any:
        return np.array([self.cue if self.place == 0 else 0, self.place == self.length], np.float32)  # [2]

    def _turn(self, action: Any) -> int:
        return int(action)

    def _reward(self, action: Any, turned: bool) -> float:  # noqa: ARG002 - other corridors look at the action
        return float(turned)


class MixedMemoryCorridor(MemoryCorridor):
    """The same with masks, dict observations and hybrid actions together.

    The action is {"turn": left, right or walk on; "reach": a number in -1 … 1}. The mask allows walking alone, and at the end turning
    alone; what it forbids is refused. At the end `reach` costs the square of its distance from the cue's side (cue / 2), so its best
    needs the memory as well: success is the turn alone, the best return 1.
    """

    def __init__(self, length: int = 20) -> None:
        super().__init__(length)
        self.observation_space = spaces.Dict(
            {
                "cue": spaces.Box(-1.0, 1.0, (1,), np.float32),
                "here": spaces.Discrete(2),
                MASK_KEY: spaces.Dict({"turn": spaces.MultiBinary(3)}),
            }
        )
        self.action_space = spaces.Dict({"turn": spaces.Discrete(3), "reach": spaces.Box(-1.0, 1.0, (1,), np.float32)})

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Walk on; at the end, turn."""
        if not self._legal()[self._turn(action)]:
            raise ValueError(f"turn={self._turn(action)} is illegal at place {self.place} of {self.length}")
        return super().step(action)

    def _legal(self) -> np.ndarray:
        end = self.place == self.length
        return np.array([end, end, not end], np.int8)  # [3]: left, right, walk

    def _observe(self) -> Any:
        cue, here = super()._observe()
        return {"cue": np.array([cue], np.float32), "here": np.int64(here), MASK_KEY: {"turn": self._legal()}}

    def _turn(self, action: Any) -> int:
        return int(action["turn"])

    def _reward(self, action: Any, turned: bool) -> float:
        reach = float(np.asarray(action["reach"]).reshape(-1)[0])
        return float(turned) - (reach - _REACH * self.cue) ** 2


class HideEntries(gym.ObservationWrapper[np.ndarray, Any, np.ndarray]):
    """Shows only some entries of a flat observation."""

    def __init__(self, env: gym.Env[np.ndarray, Any], keep: tuple[int, ...]) -> None:
        super().__init__(env)
        seen = env.observation_space
        if not isinstance(seen, spaces.Box) or len(seen.shape) != 1:
            raise ValueError(f"entries of {seen} cannot be hidden; it must be a Box of rank 1")
        self._keep = list(keep)
        self.observation_space = spaces.Box(seen.low[self._keep], seen.high[self._keep], dtype=seen.dtype.type)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """What is left."""
        return observation[self._keep]


def PartialCartPole(**kwargs: Any) -> gym.Env[Any, Any]:
    """CartPole-v1 with both velocities hidden: (cart position, pole angle). They must be remembered from step to step."""
    return HideEntries(gym.make("CartPole-v1", **kwargs), (0, 2))
