"""The trial at the start of a run: does an environment restore exactly? Plays a few random legal steps to find out."""

from __future__ import annotations

import contextlib
import itertools
import operator
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from inchworm.core.spaces import MASK_KEY, Space, build_tree, leaf, map_tree, mask_sizes, tree_leaves, zeros
from inchworm.core.types import Tree
from inchworm.env.vector_env import LaneVectorEnv

_DIFFERENT = 16
"""Number of different actions drawn where all lanes could share one."""


def legal_action(space: Space, observation: Tree, rng: np.random.Generator) -> Any:
    """A random action that the observation's mask allows, if it has one."""
    masks = observation.get(MASK_KEY) if isinstance(observation, dict) else None

    def one(path: tuple[str | int, ...], part: Space) -> Any:
        sizes = mask_sizes(part)
        if not sizes:
            part.seed(int(rng.integers(2**31)))
            return part.sample()
        mask = np.ones(sum(sizes)) if masks is None else np.reshape(leaf(masks, path), -1)
        pieces = np.split(mask, np.cumsum(sizes)[:-1])
        chosen = np.array([rng.choice(np.flatnonzero(piece)) for piece in pieces])
        start = part.start if isinstance(part, spaces.Discrete | spaces.MultiDiscrete) else 0
        if isinstance(part, spaces.Discrete):
            return int(chosen[0] + start)
        return (chosen.reshape(part.shape or ()) + start).astype(part.dtype)

    return build_tree(space, one)


def put_legal_actions(space: Space, observations: Tree, rng: np.random.Generator, rows: Tree, lanes: Sequence[int]) -> None:
    """Write random legal actions of some lanes into the rows [B, *act]; all lanes see `observations` [B, *obs].

    Without masks what is legal for one lane is legal for all, and many lanes share a few actions, because drawing one is slow.
    """
    masked = isinstance(observations, dict) and MASK_KEY in observations
    drawn = []
    for place, lane in enumerate(lanes):
        if masked or place < _DIFFERENT:
            seen = map_tree(operator.itemgetter(lane), observations)
            drawn.append(tree_leaves(legal_action(space, seen, rng)))
        for row, part in zip(tree_leaves(rows), drawn[place % len(drawn)]):
            row[lane] = part


def random_actions(env: LaneVectorEnv, rng: np.random.Generator, seconds: float) -> Iterator[Tree]:
    """Random legal actions of all lanes [B, *act] for what they show now, for some seconds; one at least."""
    actions, lanes = zeros(env.action_space, (env.num_lanes,)), range(env.num_lanes)
    until = time.perf_counter() + seconds
    while True:
        put_legal_actions(env.action_space, env.reset(indices=()).observations, rng, actions, lanes)
        yield map_tree(np.copy, actions)
        if time.perf_counter() > until:
            return


_BEFORE, _SAVED, _AFTER = 8, 16, 32
"""Steps of each earlier episode, of the restored episode, and after restoring it."""

_SECONDS = 0.08
"""Time limit of each part; slow environments take fewer steps."""

_QUICK_TO_MAKE = 0.05
"""An environment that is made faster than this is made twice; else the same copy is restored."""


def try_resume(make: Callable[[], LaneVectorEnv], name: str, *, once: bool = False) -> str | None:
    """Why an environment cannot be resumed exactly, in a sentence, or None if the trial found no difference. Never raises.

    `make` makes a vector env of one copy; with `once` it is called only once, however quick it is.
    """
    try:
        with warnings.catch_warnings(), contextlib.ExitStack() as made:
            warnings.simplefilter("ignore")  # the copies that train give these warnings
            why = _try(lambda: made.enter_context(make()), once)
    except Exception as error:  # an environment may raise anything, and then nothing is promised
        return f"whether {name} is exactly resumable could not be tested: {type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
    return None if why is None else f"{name} is not exactly resumable, because it is not a function of seed and actions: {why}"


def _try(make: Callable[[], LaneVectorEnv], once: bool) -> str | None:
    began = time.perf_counter()
    env = make()
    once = once or time.perf_counter() - began > _QUICK_TO_MAKE
    rng = np.random.default_rng(0)
    for _ in range(0 if once else 2):  # earlier episodes must not leave traces
        env.reset()
        _play(env, random_actions(env, rng, _SECONDS), _BEFORE)
    env.reset()
    _play(env, random_actions(env, rng, _SECONDS), _SAVED)
    state = env.state_dict()
    actions, first = _play(env, random_actions(env, rng, _SECONDS), _AFTER)
    other = env if once else make()
    other.load_state_dict(state)
    if not other.exact:
        return "replaying an episode gave a different result"
    _, second = _play(other, iter(actions), len(actions))
    differs = [step for step, (one, two) in enumerate(zip(first, second), 1) if one != two]
    return f"a restored episode differs {differs[0]} steps later" if differs else None


def _play(env: LaneVectorEnv, actions: Iterator[Tree], steps: int) -> tuple[list[Tree], list[list[bytes]]]:
    """(the actions taken, what each step showed, bit for bit)."""
    taken, seen = [], []
    for action in itertools.islice(actions, steps):
        step = env.step(action)
        ends = tuple((end.final_observation, end.final_global_state) for end in step.ended)
        shown = (step.observations, step.rewards, step.terminated, step.truncated, step.valid, step.episode_starts, step.global_state, ends)
        taken.append(action)
        seen.append([np.asarray(array).tobytes() for array in tree_leaves(shown)])
    return taken, seen
