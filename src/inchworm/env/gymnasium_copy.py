"""Step 1 of 9: the environment steps. One copy of a Gymnasium environment is one lane, with same-step autoreset.

A copy writes its rows into arrays owned by the engine, so that the same code runs in this process and in a worker. It keeps
no history: seeds, options and actions belong to the vector env (`episodes.py`), because they must outlive a worker that dies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from inchworm.core.errors import EnvError
from inchworm.core.padding import AgentSpaces
from inchworm.core.spaces import MASK_KEY, Space, leaf_dtype, leaves, mask_space, with_mask
from inchworm.env.episodes import Ended
from inchworm.env.restore import Env, find_state_keeper, refuse_stateful_wrappers
from inchworm.env.step_arrays import StepRows
from inchworm.env.values import (
    MASKS_UNKNOWN,
    Masks,
    Refusal,
    allow_all,
    call_reset,
    flag,
    info_numbers,
    make_writer,
    put_infos,
    real_scalar,
    returns_five,
)

STEP_VALUES = "step must return the 5 values (observation, reward, terminated, truncated, info)"


class GymnasiumCopy:
    """One Gymnasium environment as one lane. `num_lanes` is how many lanes a copy fills.

    To find out whether its infos hold masks, a copy is reset once when it is made; for an environment that `is_given`, the caller's own,
    another one made from its spec is reset instead.
    """

    num_lanes = 1
    turn_based = False
    global_state_space = None
    names: tuple[str, ...] = ()
    agent_spaces: tuple[AgentSpaces, ...] = ()

    def __init__(self, env: Env, lane: int, *, is_given: bool = False) -> None:
        self.env, self.lane = env, lane
        self._masks_unknown = False
        self.next_options: dict[str, Any] | None = None
        refuse_stateful_wrappers(env)
        list(leaves(env.observation_space)), list(leaves(env.action_space))  # refuses spaces that are not supported
        self.seed, self.steps = -1, 0
        self.state_keeper = find_state_keeper(env)
        self._step = env.step
        self._put = make_writer(env.observation_space)
        box = env.observation_space if isinstance(env.observation_space, spaces.Box) else None
        self._dtype = None if box is None else leaf_dtype(box)
        self._shape = None if box is None else box.shape
        # Every copy in every layout makes this reset if masks may be in its info, so that no copy differs.
        self._masks = Masks.find(
            env.observation_space,
            env.action_space,
            lambda name: env.get_wrapper_attr(name) if env.has_wrapper_attr(name) else None,
            self._infos_of_another if is_given else lambda: [self._reset_env(0, None)[1]],
        )
        self.action_space: Space = env.action_space
        self.observation_space: Space = env.observation_space
        self._adds_mask = self._masks is not None and self._masks.source != "key"
        if self._adds_mask:
            self.observation_space = with_mask(env.observation_space, mask_space(env.action_space))

    def _infos_of_another(self) -> list[Mapping[str, Any]]:
        """The first info of an environment made from this one's spec; none if it has no spec, and then the first reset decides."""
        try:
            spec = self.env.spec
            hidden = {} if spec is None or spec.kwargs.get("render_mode") is None else {"render_mode": None}  # no second window
            another = None if spec is None else gym.make(spec, disable_env_checker=True, **hidden)
        except Exception:  # such as a wrapper that cannot be made again
            another = None
        if another is None:
            self._masks_unknown = True
            return []
        try:
            return [another.reset(seed=0)[1]]
        finally:
            another.close()

    def attach(self, rows: StepRows) -> None:
        """Write into these rows from now on."""
        self._rows, self._rewards, self._infos = rows, rows.rewards, rows.infos
        self._seen, self._final_seen = rows.observations, rows.final_observations
        if self._masks is not None:
            self._mask, self._final_mask = self._seen[MASK_KEY], self._final_seen[MASK_KEY]
            if not isinstance(self.env.observation_space, spaces.Dict):
                self._seen, self._final_seen = self._seen["observation"], self._final_seen["observation"]

    def reset(self, seed: int, options: Any) -> None:
        """Begin an episode and write its first observation."""
        self.seed, self.steps = seed, 0
        observation, info = self._reset_env(seed, options)
        if self._masks_unknown and MASK_KEY in info:
            raise EnvError(f"{self.where()}: {MASKS_UNKNOWN}")
        try:
            self._put(observation, self._seen, self.lane)
            if self._masks is not None:
                self._masks.write(self._masks.fetch(observation, info), self._mask, self.lane, acted_on=True)
        except Refusal as refusal:
            raise EnvError(f"{self.where()}: {refusal}") from None

    def _reset_env(self, seed: int, options: Any) -> tuple[Any, Mapping[str, Any]]:
        result = call_reset(self.env, seed, options, self.where)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
            raise EnvError(f"{self.where()}: reset must return (observation, info), with info a dict; got {type(result).__name__}")
        return result

    def step(self, action: Any) -> list[Ended] | None:
        """Step the environment and write the row; where the episode ended, begin the next and return the last info's numbers."""
        rows, lane = self._rows, self.lane
        self.steps += 1
        try:
            result = self._step(action)
        except ValueError:
            if returns_five(self.env, action):
                raise
            raise EnvError(f"{self.where()}: {STEP_VALUES}") from None
        try:
            observation, reward, terminated, truncated, info = result
        except (TypeError, ValueError):
            raise EnvError(f"{self.where()}: {STEP_VALUES}; got {result!r:.200}") from None
        try:
            self._rewards[lane] = reward if type(reward) is float else real_scalar(reward)
            if self._infos:
                put_infos(info, self._infos, lane)
            if terminated is not False or truncated is not False:
                terminated, truncated = flag(terminated, "terminated"), flag(truncated, "truncated")
            if not terminated and not truncated:
                if type(observation) is np.ndarray and observation.dtype is self._dtype and observation.shape == self._shape:
                    self._seen[lane] = observation  # a Box in its own dtype and shape: nothing else to check
                else:
                    self._put(observation, self._seen, lane)
                if self._masks is not None:
                    self._masks.write(self._masks.fetch(observation, info), self._mask, lane, acted_on=True)
                return None
            self._put(observation, self._final_seen, lane)
            if self._masks is not None and self._adds_mask:
                if terminated:  # no action follows, and games often have no legal one in a terminal state
                    allow_all(self._final_mask, lane)
                else:
                    self._masks.write(self._masks.fetch(observation, info), self._final_mask, lane, acted_on=False)
            numbers = info_numbers(info)
        except Refusal as refusal:
            raise EnvError(f"{self.where()}: {refusal}") from None
        # Both flags mean terminated (a time limit that coincides with the end changes nothing).
        rows.terminated[lane], rows.truncated[lane] = terminated, truncated and not terminated
        self.reset(int(rows.next_seeds[lane]), self.next_options)
        return [(lane, numbers)]

    def where(self) -> str:
        """Lane, step and episode, for a message."""
        if self.seed < 0:
            return f"lane {self.lane}, before its first episode"
        return f"lane {self.lane}, step {self.steps} of {self._rows.describe_episode(self.lane, self.seed)}"
