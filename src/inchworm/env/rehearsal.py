"""Serves resume: tries at the start of a run whether its environment comes back to where it stood, so that the user knows.

A resume replays an episode in a fresh copy, while the original went on in a copy that had played others before. So that is
what is tried: a copy plays some episodes, its state is taken and brought to a fresh copy, and both go on with the same actions. An
environment that draws from a stream of its own, looks at a clock, or keeps something from one episode to the next then shows it.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections.abc import Callable, Iterator

import numpy as np

from inchworm.env.lane_env import LaneVectorEnv
from inchworm.env.memory import map_tree, tree_leaves
from inchworm.env.probe import put_legal_actions
from inchworm.spaces import zeros
from inchworm.types import Tree

_BEFORE, _SAVED, _AFTER = 8, 16, 32
"""Steps of each episode before, of the episode that is brought back, and of the way on from there."""

_SECONDS = 0.08
"""What each part of the stepping may take; slow environments take fewer steps."""

_QUICK_TO_MAKE = 0.05
"""An environment that is made in less seconds is made twice; else the same copy comes back to its first episode."""


def rehearse_resume(make: Callable[[], LaneVectorEnv], name: str, *, once: bool = False) -> str | None:
    """Why an environment is not exactly resumable, in a sentence, or None if nothing speaks against it. Never raises.

    `make` makes a vector env of one copy; with `once` it is called only once, however quick it is.
    """
    try:
        with warnings.catch_warnings(), contextlib.ExitStack() as made:
            warnings.simplefilter("ignore")  # the copies that train say what there is to say
            why = _rehearse(lambda: made.enter_context(make()), once)
    except Exception as error:  # somebody else's code may raise anything, and then nothing is promised
        return f"whether {name} is exactly resumable could not be tested: {type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
    return None if why is None else f"{name} is not exactly resumable, because it is not a function of seed and actions: {why}"


def _rehearse(make: Callable[[], LaneVectorEnv], once: bool) -> str | None:
    began = time.perf_counter()
    env = make()
    once = once or time.perf_counter() - began > _QUICK_TO_MAKE
    rng = np.random.default_rng(0)
    if not once:
        _play_others(env, rng)
    env.reset()
    _play(env, _random_actions(env, rng), _SAVED)
    state = env.state_dict()
    actions, first = _play(env, _random_actions(env, rng), _AFTER)
    other = env if once else make()
    other.load_state_dict(state)
    if not other.exact:
        return "replayed, an episode led to another state"
    _, second = _play(other, iter(actions), len(actions))
    differs = [step for step, (one, two) in enumerate(zip(first, second), 1) if one != two]
    return f"brought back to where it stood, an episode had gone another way {differs[0]} steps later" if differs else None


def _play_others(env: LaneVectorEnv, rng: np.random.Generator) -> None:
    """Episodes whose traces must not show later."""
    for _ in range(2):
        env.reset()
        _play(env, _random_actions(env, rng), _BEFORE)


def _random_actions(env: LaneVectorEnv, rng: np.random.Generator) -> Iterator[Tree]:
    """Random legal actions of one copy [B, *act], for as long as the clock allows; one at least."""
    actions, lanes = zeros(env.action_space, (env.num_lanes,)), range(env.num_lanes)
    until = time.perf_counter() + _SECONDS
    while True:
        put_legal_actions(env.action_space, env.reset(indices=()).observations, rng, actions, lanes)
        yield map_tree(np.copy, actions)
        if time.perf_counter() > until:
            return


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
