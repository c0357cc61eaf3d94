"""Tiny environments with known answers, and one with any spaces. Each class is its own factory: `doubles.toys:Corridor` is an id."""

import copy

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from inchworm.core.spaces import MASK_KEY, mask_space, with_mask
from inchworm.env.values import is_legal, random_mask


def _number(value):
    return np.array([value], np.float32)  # [1]


class _Toy(gym.Env):
    """One number to see, two actions; the seed goes to `np_random`."""

    def __init__(self):
        self.observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return self._first(), {}

    def _first(self):
        return _number(0.0)


def watched(base):
    """A subclass of an environment, and the list of its environments that are open."""
    open_envs = []

    class Watched(base):
        def __init__(self):
            super().__init__()
            open_envs.append(self)

        def close(self):
            open_envs.remove(self)

    return Watched, open_envs


class ConstantReward(_Toy):
    """One step, observation 0, reward 1: V = 1. Tests the value head alone."""

    def step(self, action):
        return _number(0.0), 1.0, True, False, {}


class _Sign(_Toy):
    """Shows +1 or -1, each half of the time, for one step."""

    def _first(self):
        self.sign = float(self.np_random.integers(2) * 2 - 1)
        return _number(self.sign)


class ObservedReward(_Sign):
    """One step, observation ±1, reward equal to it: V(s) = s. Tests that the value reads the observation."""

    def step(self, action):
        return _number(self.sign), self.sign, True, False, {}


class ContextualReward(_Sign):
    """One step, observation ±1, actions 0 and 1 meaning -1 and +1, reward their product: the best policy earns 1, a blind one 0."""

    def step(self, action):
        return _number(self.sign), self.sign * (2.0 * int(action) - 1.0), True, False, {}


class ActionReward(_Toy):
    """One step, action 0 earns -1 and action 1 earns 1: the best policy earns 1. Tests the policy gradient alone."""

    def step(self, action):
        return _number(0.0), 2.0 * int(action) - 1.0, True, False, {}


class DelayedReward(_Toy):
    """Two steps, observations 0 and 1, reward 1 at the end: V(0) = gamma, V(1) = 1. Tests the discount."""

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.steps += 1
        return _number(1.0), float(self.steps == 2), self.steps == 2, False, {}


class TruncatedForever(_Toy):
    """Reward 1 at every step, cut off after `length`: V = 1 / (1 - gamma). A learner that takes a cut for an end misses it."""

    def __init__(self, length=5):
        super().__init__()
        self.length, self.steps = length, 0

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.steps += 1
        return _number(0.0), 1.0, False, self.steps >= self.length, {}


class Corridor(_Toy):
    """A walk of `length` steps to the right end, reward 1 there: the best policy earns 1, and V(start) = gamma ** (length - 1)."""

    def __init__(self, length=5):
        super().__init__()
        self.length, self.place, self.steps = length, 0, 0

    def reset(self, *, seed=None, options=None):
        """Begin at the left end, or at `options["place"]`."""
        self.place, self.steps = int((options or {}).get("place", 0)), 0
        return super().reset(seed=seed, options=options)

    def _first(self):
        return _number(self.place / self.length)

    def step(self, action):
        self.steps += 1
        self.place = max(0, self.place + 2 * int(action) - 1)
        there = self.place >= self.length
        return self._first(), float(there), there, self.steps >= 10 * self.length, {"place": self.place, "success": there}


class Counter(gym.Env):
    """Identifiable data: the observation is (episode seed, step), the reward is the step, and `info` holds the sum of actions."""

    def __init__(self, length=5, *, truncate=False):
        self.observation_space = spaces.Box(0.0, 2.0**31, (2,), np.float64)
        self.action_space = spaces.Discrete(3)
        self.length, self.truncate = length, truncate

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.episode, self.steps, self.total = seed or 0, 0, 0
        return self._observe(), {}

    def _observe(self):
        return np.array([self.episode, self.steps], np.float64)

    def step(self, action):
        self.steps, self.total = self.steps + 1, self.total + int(action)
        over = self.steps >= self.length
        return self._observe(), float(self.steps), over and not self.truncate, over and self.truncate, {"total": self.total}


class SpacesEnv(gym.Env):
    """An environment with any spaces: observations are samples, each legal action earns 1, and an invalid one raises.

    `mask` is how it offers random action masks: by "key" of the observation, by "info", or by a method of that name.
    """

    def __init__(self, observation_space, action_space, episode_length=5, mask=None):
        self.action_space, self._inner = copy.deepcopy(action_space), copy.deepcopy(observation_space)
        self._mask_by, self._length, self._steps = mask, episode_length, 0
        self._masks = mask_space(action_space) if mask else None
        self.observation_space = self._inner if mask != "key" or self._masks is None else with_mask(self._inner, self._masks)
        if mask in ("action_masks", "get_action_mask"):
            setattr(self, mask, lambda: self._mask)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self._inner.seed(int(self.np_random.integers(2**31)))
        self._steps = 0
        return self._observe()

    def _observe(self):
        observation = self._inner.sample()
        if self._masks is None:
            return observation, {}
        self._mask = random_mask(self.action_space, self.np_random)
        if self._mask_by != "key":
            return observation, {MASK_KEY: self._mask} if self._mask_by == "info" else {}
        return ({**observation} if isinstance(self._inner, spaces.Dict) else {"observation": observation}) | {MASK_KEY: self._mask}, {}

    def step(self, action):
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} is not in {self.action_space}")
        if self._masks is not None and not is_legal(self.action_space, action, self._mask):
            raise ValueError(f"{action!r} is illegal under {self._mask!r}")
        self._steps += 1
        observation, info = self._observe()
        over = self._steps >= self._length
        # About half of the episodes are truncated instead of terminated.
        cut = over and bool(self.np_random.integers(2))
        return observation, 1.0, over and not cut, cut, info


class PaidActions(_Toy):
    """Reward equal to the action, for `length` steps (0: for ever). Shows the discounted number of steps to come, so that V(s) is p times
    that for a policy that takes action 1 with probability p. A replay with other actions would show another `drift`."""

    discount = 0.9

    def __init__(self, length=8):
        super().__init__()
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.length, self.steps, self.drift = length, 0, 0.0

    def reset(self, *, seed=None, options=None):
        self.steps, self.drift = 0, 0.0
        return super().reset(seed=seed, options=options)

    def _first(self):
        left = self.discount ** (self.length - self.steps) if self.length else 0.0
        return np.array([(1 - left) / (1 - self.discount), self.drift], np.float32)

    def step(self, action):
        self.steps, self.drift = self.steps + 1, self.drift + float(action)
        return self._first(), float(action), self.steps == self.length, False, {}


class KeptPaidActions(PaidActions):
    """The same with `get_state` and `set_state`."""

    def get_state(self):
        return {"steps": self.steps, "drift": self.drift}

    def set_state(self, state):
        self.steps, self.drift = state["steps"], state["drift"]


class LateReward(_Toy):
    """Two steps; the first action is the reward, which comes after the second. Both are seen as the number of the step."""

    def reset(self, *, seed=None, options=None):
        self.first = None
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if self.first is None:
            self.first = float(action)
            return _number(1.0), 0.0, False, False, {}
        return _number(1.0), self.first, True, False, {}


class Unseeded(PaidActions):
    """Rewards that no seed decides."""

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, float(np.random.default_rng().random()), *rest
