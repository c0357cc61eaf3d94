"""The values that pass between the steps of the walk. No behaviour here beyond reading them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np

Array: TypeAlias = Any
"""A NumPy array, or inside a backend that backend's tensor."""

Tree: TypeAlias = Any
"""An array, or a dict or tuple of trees; `()` is the empty tree."""

Weights: TypeAlias = dict[str, np.ndarray]
"""Named arrays: parameters, normaliser statistics and `policy_version`, all that a policy is besides its spec."""

ProfilePoint: TypeAlias = tuple[str, Any, str]
"""A section of a profile, an object, and the name of its method that is that section."""


@dataclass(frozen=True, slots=True)
class Activity:
    """What a training is doing at this moment, for a display of its progress."""

    env_steps: int
    """Taken so far, also within the running iteration."""
    iteration: int
    """The running one, from 1."""
    phase: str
    """"collecting", "learning" or "evaluating"; empty between them."""
    share: float | None = None
    """How much of the phase is done, 0 to 1; None if that is not known."""


class SeedEvent(NamedTuple):
    """What the training of one of several seeds reports."""

    seed: int
    kind: Literal["progress", "done", "failed"]
    """`progress` any number of times, then once `done` or `failed`."""
    env_steps: int | None = None
    """Env steps since the start of its run; None if not known."""
    metrics: Mapping[str, float] = MappingProxyType({})
    """The latest of `mean_return`, `evaluation/mean_return` and `evaluation/win_rate`."""
    text: str = ""
    """Why it failed, or, of one that is done, why it ended (see `History.stop_reason`)."""
    wrong_use: bool = False
    """Whether it failed because of what was asked for, so that other seeds would, too."""
    failures: Sequence[str] = ()
    """Errors outside of the training itself, such as a crashed evaluation."""


@dataclass(frozen=True, slots=True)
class PolicyStep:
    """What a policy did with one observation per lane."""

    actions: Tree
    """[B, *act] as sampled: what the rollout stores and what `log_probs` speaks of."""
    env_actions: Tree
    """[B, *act] what the environment gets: clipped or squashed into its bounds."""
    log_probs: Array
    """[B] f32, summed over the parts of a hybrid action."""
    state: Tree
    """[B, *mem] memory after reading the observation; `()` without memory."""


@dataclass(frozen=True, slots=True)
class EndedEpisode:
    """An episode that ended in this step, with what an automatic reset would otherwise lose."""

    lane: int
    seed: int
    """The seed that the episode was reset with."""
    final_observation: Tree
    """[*obs] the true last observation, before the reset."""
    info: Mapping[str, float]
    """The numbers among the environment's last `info`; where a copy has several lanes also `team_return`, the sum of their returns."""
    final_global_state: Tree = ()
    """[*] of its copy, before the reset; `()` if there is none."""
    valid: bool = True
    """Whether an agent would act on `final_observation`: False where it had died. Nothing depends on it where nothing follows."""


@dataclass(frozen=True, slots=True)
class EnvStep:
    """One step of all lanes, with same-step autoreset: where an episode ended, `observations` opens the next one.

    The arrays belong to the vector env and are overwritten by its next `send`, `reset` or `step`: copy what you keep.
    """

    observations: Tree
    """[B, *obs] what to act on next."""
    rewards: Array
    """[B] f32"""
    terminated: Array
    """[B] bool"""
    truncated: Array
    """[B] bool; never true where `terminated` is."""
    episode_starts: Array
    """[B] bool: `observations` opens an episode, or is the first of an agent that joins one."""
    valid: Array
    """[B] bool: the lane has a living agent that `observations` belongs to."""
    ended: tuple[EndedEpisode, ...] = ()
    """Of every lane of each env copy whose episode ended; an agent that dies before is not among them."""
    global_state: Tree = ()
    """[E, *] what a central critic sees, once for each env copy; `()` if there is none."""
    infos: Mapping[str, Array] | tuple[()] = ()
    """[B] f32 by name: the numbers of the step's `info` that are kept, NaN where it has none; `()` if none are kept."""


RECENT_EPISODES = 100
"""Finished episodes that means of returns and lengths are taken over."""


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """A finished episode: all that statistics need and all that a replay starts from."""

    episode_return: float
    length: int
    lane: int
    seed: int
    info: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Iteration:
    """One of several iterations that were computed in one call."""

    metrics: Mapping[str, float]
    """Of its update."""
    env_steps: int
    """Of the run, after it."""
    episodes: int
    """Of the run, after it."""
    records: Sequence[EpisodeRecord]
    """The last of the episodes that ended in it: at least as many as running means are taken over."""
    stages: Mapping[str, tuple[Array, ...]] = field(default_factory=dict)
    """Hashes of what it computed, by stage; empty if there are none. Of environment and acting the first are by step."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What the current policy says of a minibatch: tensors with gradients, each [L, N]."""

    log_probs: Array
    entropy: Array
    values: Array
    """In reward units."""
    value_scale: Array
    """The value normaliser's standard deviation (a scalar, 1 without one): the unit of the value loss and of its clip."""


@dataclass(frozen=True, slots=True)
class LossCoefficients:
    """The weights of the terms of PPO's loss in one update, after schedules."""

    clip_coef: float
    vf_coef: float
    ent_coef: float
    clip_vloss: bool
    vf_clip_coef: float
    """The bound of the value clip, in units of the value scale."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """The critic's opinion of a rollout, each [T, B] f32 in reward units."""

    values: Array
    next_values: Array
    """V of the true successor of each row."""
    advantages: Array
    returns: Array
    """advantages + values: the value targets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """N sequences of L steps, every leaf [L, N, …], on the learner's device."""

    observations: Tree
    actions: Tree
    log_probs: Array
    """Of the behaviour policy."""
    advantages: Array
    """Normalised, if the config says so."""
    returns: Array
    values: Array
    """As the critic saw them before the update: the centre of the value clip."""
    valid: Array
    """[L, N] bool: rows that count."""
    episode_starts: Array
    rewards: Array = ()
    terminated: Array = ()
    truncated: Array = ()
    next_observations: Tree = ()
    """The true successors (nothing follows a terminated row); filled only when a custom loss asks for them by name."""
    policy_state: Tree = ()
    """[N, *mem] memory before the first row."""
    global_state: Tree = ()
    """For a central critic: {"world": [L, N, *] the state of the lane's copy, "place": [L, N] the lane's number there}; else `()`."""
    context: Tree = ()
    extras: Tree = ()
    """The rollout's columns of your own, {name: [L, N, …]}; else `()`."""


@dataclass(frozen=True, slots=True)
class UpdateStats(Mapping[str, float]):
    """What one update did, as a mapping of finite floats under the canonical metric names."""

    metrics: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        return self.metrics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.metrics)

    def __len__(self) -> int:
        return len(self.metrics)


@dataclass(frozen=True)
class CheckReport:
    """Result of `check_env` and `check_policy`: `problems` break or degrade training, `notes` are worth knowing."""

    subject: ClassVar[str] = "environment"

    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    def __str__(self) -> str:
        wrong = f"{len(self.problems)} problem(s) would break or degrade training"
        head = f"the {self.subject} is ready for training" if self.ok else wrong
        return "\n".join([head, *(f"problem: {text}" for text in self.problems), *(f"note: {text}" for text in self.notes)])
