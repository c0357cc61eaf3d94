"""Serves step 1: `check_env` drives an environment as training would, and says in words what would break.

It uses the very lane that training uses, so what passes here is not refused there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from inchworm.config import EnvConfig
from inchworm.env.build import Env, make_env, wrapper_chain
from inchworm.env.findings import Findings, check_action_space, check_leaves, not_deterministic
from inchworm.env.lanes import GymnasiumCopy
from inchworm.env.probe import Spy, Trace, drive, first_difference, same
from inchworm.env.team_checker import check_team
from inchworm.env.teams import is_team_env
from inchworm.errors import EnvError
from inchworm.spaces import split_mask


@dataclass(frozen=True)
class CheckReport:
    """What was found: `problems` break or spoil training, `notes` are worth knowing."""

    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    def __str__(self) -> str:
        head = "the environment is ready for training" if self.ok else f"{len(self.problems)} problem(s) would break or spoil training"
        return "\n".join([head, *(f"problem: {text}" for text in self.problems), *(f"note: {text}" for text in self.notes)])


def check_env(env: EnvConfig | str | Env | Callable[[], Env], *, steps: int = 200, seed: int = 0) -> CheckReport:
    """Drive `env` for some random steps and report what would break training. Environments made here are closed; a given one stays open."""
    found = Findings()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _check(env, steps, seed, found)
    for warning in caught:
        if "it is cast at every step" in str(warning.message):
            found.problem(str(warning.message))
    return CheckReport(tuple(dict.fromkeys(found.problems)), tuple(dict.fromkeys(found.notes)))


def _check(env: Any, steps: int, seed: int, found: Findings) -> None:
    make = _maker(env)
    first = found.attempt("making the environment", make)
    if first is None:
        return
    if is_team_env(first):
        check_team(first, None if env is first else make, steps, seed, found)
        return
    try:
        lane = found.attempt("reading its spaces and its first reset", lambda: GymnasiumCopy(Spy(first), 0))
        if lane is None:
            return
        check_action_space(lane.action_space, found)
        trace = Trace()
        found.attempt("stepping", lambda: drive(lane, trace, steps, seed))
        _check_values(lane, trace, found)
        _check_endings(lane, trace, found)
        if trace.rows and found.problems == []:
            _check_determinism(lane, None if env is first else make, trace, seed, found)
    finally:
        if env is not first:
            found.attempt("closing", first.close)


def _maker(env: Any) -> Callable[[], Env]:
    if isinstance(env, str):
        env = EnvConfig(id=env)
    if isinstance(env, EnvConfig):
        return lambda: make_env(env)
    if isinstance(env, gym.Env) or is_team_env(env):
        return lambda: env
    if callable(env):
        return env  # type: ignore[no-any-return]
    raise EnvError(f"check_env takes an environment, an id, a factory or an EnvConfig; got {type(env).__name__}")


def _check_values(lane: GymnasiumCopy, trace: Trace, found: Findings) -> None:
    seen, _ = split_mask(lane.observation_space)
    for step, (observation, final, reward, _, _) in enumerate(trace.rows):
        if not np.isfinite(reward):
            found.problem(f"the reward at step {step} is {reward}")
            break
        for tree in (observation, final):
            if tree is not None and not check_leaves(seen, tree, f"at step {step}", found):
                return


def _check_endings(lane: GymnasiumCopy, trace: Trace, found: Findings) -> None:
    ends = [step for step, row in enumerate(trace.rows) if row[1] is not None]
    if not ends and len(trace.rows) > 1:
        limited = any(isinstance(wrapper, gym.wrappers.TimeLimit) for wrapper in wrapper_chain(lane.env))
        if not limited:
            found.note(f"no episode ended within {len(trace.actions)} random steps and there is no time limit; set env.max_episode_steps")
    for step in ends:
        names = [name for name in ("final_observation", "final_obs", "terminal_observation") if name in (trace.infos[step] or {})]
        if names:
            found.problem(f"the environment resets itself: info[{names[0]!r}] at step {step} holds the last observation; return that one")
            return
    _check_final_observations(trace, ends, found)


def _check_final_observations(trace: Trace, ends: Sequence[int], found: Findings) -> None:
    """An environment that resets itself returns the next episode's first observation where the last one belongs."""
    opens = [0, *ends]  # the rows whose observation opens an episode
    lengths = [end - start for start, end in zip(opens, ends)]
    alike = [same(trace.rows[end][1], trace.rows[start][0]) for start, end in zip(opens, ends)]
    moves = any(not same(trace.rows[start + 1][0], trace.rows[start][0]) for start, length in zip(opens, lengths) if length > 1)
    if len(ends) > 1 and all(alike) and moves:
        found.problem(
            "the last observation of every episode equals its first: does step() reset the environment? It must return the last one"
        )


def _check_determinism(lane: GymnasiumCopy, make: Callable[[], Env] | None, trace: Trace, seed: int, found: Findings) -> None:
    again = Trace()
    found.attempt("stepping again", lambda: drive(lane, again, len(trace.actions), seed, trace.actions))
    _compare(trace, again, "the same environment", found)
    if make is None or found.problems:
        return
    other = found.attempt("making the environment again", make)
    if other is None or other is lane.env.unwrapped:
        return
    fresh = Trace()
    found.attempt("stepping a fresh copy", lambda: drive(GymnasiumCopy(Spy(other), 0), fresh, len(trace.actions), seed, trace.actions))
    _compare(trace, fresh, "a fresh copy", found)
    found.attempt("closing", other.close)


def _compare(trace: Trace, other: Trace, who: str, found: Findings) -> None:
    difference = first_difference(trace, other)
    if difference is not None:
        found.problem(not_deterministic(who, difference))
