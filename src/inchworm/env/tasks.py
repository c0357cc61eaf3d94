"""Tasks: families of environments that differ by their reset options, and `TrialEnv`, which makes some episodes of one task one episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from inchworm.core.errors import ConfigError
from inchworm.core.spaces import MASK_KEY


@dataclass(frozen=True, slots=True)
class Task:
    """One task: its name, and the reset options with which the environment's episodes are in this task."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


def check_tasks(tasks: Sequence[Any]) -> list[Task]:
    """Return the tasks as a list; raise if one of them is something else, such as a name or bare options."""
    for task in tasks:
        if not isinstance(task, Task) or not isinstance(task.options, Mapping):
            raise ConfigError(f"a task is a Task(name, options) with a mapping of reset options, not {task!r:.80}")
    return list(tasks)


class TaskDistribution(Protocol):
    """A family of tasks. Any object with these methods is one; `TaskList` is made of given tasks."""

    def sample(self, rng: np.random.Generator) -> Task:
        """Draw a task to train on."""

    def held_out(self) -> Sequence[Task]:
        """The tasks to evaluate on, none of which `sample` draws."""


class TaskList:
    """A distribution of given tasks, drawn with equal probability."""

    def __init__(self, tasks: Sequence[Task], held_out: Sequence[Task] = ()) -> None:
        names = [task.name for task in check_tasks([*tasks, *held_out])]
        twice = sorted({name for name in names if names.count(name) > 1})
        if not tasks or twice:
            raise ConfigError(f"two tasks have the name {twice[0]!r}; give each its own" if twice else "a TaskList needs one task or more")
        self.tasks, self._held_out = tuple(tasks), tuple(held_out)

    def sample(self, rng: np.random.Generator) -> Task:
        """Draw one of the tasks."""
        return self.tasks[int(rng.integers(len(self.tasks)))]

    def held_out(self) -> Sequence[Task]:
        """The tasks that were given for evaluation."""
        return self._held_out


class TrialEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Makes `episodes` episodes of one task one episode, a trial, so that a policy with memory learns to adapt (RL²; Duan et al. 2016).

    The observation is a dict of the environment's own `observation`, the previous `action`, its `reward`, and whether an inner episode
    `ended` with it; at the start of a trial the action is any, the reward 0, and `ended` 1. The task is that of the reset options, else
    drawn from `tasks` by the trial's seed. The last info has the return of each inner episode, `return_0`, `return_1`, ….
    """

    def __init__(self, env: gym.Env[Any, Any], episodes: int = 3, tasks: TaskDistribution | None = None) -> None:
        super().__init__(env)
        if episodes < 1:
            raise ConfigError(f"a trial has 1 episode or more, not {episodes}")
        inner, shown = env.observation_space, {}
        if isinstance(inner, spaces.Dict) and MASK_KEY in inner.spaces:
            shown[MASK_KEY] = inner[MASK_KEY]
            inner = spaces.Dict({key: space for key, space in inner.spaces.items() if key != MASK_KEY})
        number = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        flag = spaces.Box(0.0, 1.0, (1,), np.float32)
        self.observation_space = spaces.Dict({"observation": inner, "action": env.action_space, "reward": number, "ended": flag, **shown})
        if not isinstance(env.action_space, spaces.Discrete | spaces.Box):
            raise ConfigError(f"TrialEnv shows the previous action, which must be Discrete or a Box, not {env.action_space}")
        self.episodes, self.tasks = episodes, tasks
        self._masked = bool(shown)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin a trial: draw its task, and begin its first episode."""
        self._rng = np.random.default_rng(seed)
        self._options = options or (dict(self.tasks.sample(self._rng).options) if self.tasks is not None else None)
        self._returns = [0.0]
        observation, info = self.env.reset(seed=seed, options=self._options)
        return self._seen(observation, self._no_action(), 0.0, True), info

    def _no_action(self) -> Any:
        """A fixed action that stands for none."""
        space = self.env.action_space
        if isinstance(space, spaces.Discrete):
            return space.start
        assert isinstance(space, spaces.Box)
        return np.clip(np.zeros(space.shape, space.dtype), space.low, space.high)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the inner episode; where it ends, begin the next of the same task, or end the trial."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._returns[-1] += float(reward)
        ended = bool(terminated or truncated)
        info = dict(info)
        over = ended and len(self._returns) == self.episodes
        if over:
            info |= {f"return_{number}": total for number, total in enumerate(self._returns)}
        elif ended:
            self._returns.append(0.0)
            observation, _ = self.env.reset(seed=int(self._rng.integers(2**31)), options=self._options)
        return self._seen(observation, action, float(reward), ended), float(reward), over, False, info

    def _seen(self, observation: Any, action: Any, reward: float, ended: bool) -> dict[str, Any]:
        mask = {}
        if self._masked:
            observation = dict(observation)
            mask = {MASK_KEY: observation.pop(MASK_KEY)}
        numbers = {name: np.array([value], np.float32) for name, value in (("reward", reward), ("ended", ended))}
        return {"observation": observation, "action": action, **numbers, **mask}
