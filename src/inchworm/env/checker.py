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
from gymnasium import spaces

from inchworm.config import EnvConfig
from inchworm.env.build import Env, make_env, wrapper_chain
from inchworm.env.lanes import GymnasiumCopy
from inchworm.env.probe import Spy, Trace, drive, first_difference, same
from inchworm.errors import EnvError, InchwormError
from inchworm.spaces import Space, leaf, leaves, path_name, split_mask
from inchworm.types import Tree

_LARGE = 50.0
"""Observations beyond this size slow learning down enough to say so."""


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
    found = _Findings()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _check(env, steps, seed, found)
    for warning in caught:
        if "it is cast at every step" in str(warning.message):
            found.problem(str(warning.message))
    return CheckReport(tuple(dict.fromkeys(found.problems)), tuple(dict.fromkeys(found.notes)))


class _Findings:
    def __init__(self) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []

    def problem(self, text: str) -> None:
        self.problems.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)


def _check(env: Any, steps: int, seed: int, found: _Findings) -> None:
    make = _maker(env)
    first = _attempt(found, "making the environment", make)
    if first is None:
        return
    try:
        lane = _attempt(found, "reading its spaces and its first reset", lambda: GymnasiumCopy(Spy(first), 0))
        if lane is None:
            return
        _check_spaces(lane, found)
        trace = Trace()
        _attempt(found, "stepping", lambda: drive(lane, trace, steps, seed))
        _check_values(lane, trace, found)
        _check_endings(lane, trace, found)
        if trace.rows and found.problems == []:
            _check_determinism(lane, None if env is first else make, trace, seed, found)
    finally:
        if env is not first:
            _attempt(found, "closing", first.close)


def _maker(env: Any) -> Callable[[], Env]:
    if isinstance(env, str):
        env = EnvConfig(id=env)
    if isinstance(env, EnvConfig):
        return lambda: make_env(env)
    if isinstance(env, gym.Env):
        return lambda: env
    if callable(env):
        return env  # type: ignore[no-any-return]
    raise EnvError(f"check_env takes an environment, an id, a factory or an EnvConfig; got {type(env).__name__}")


def _attempt(found: _Findings, what: str, action: Callable[[], Any]) -> Any:
    """The action's result; an exception becomes a problem that says where it happened."""
    try:
        return action()
    except InchwormError as error:
        found.problem(str(error))
    except Exception as error:  # an environment may raise anything, and all of it is worth reporting
        hint = _signature_hint(error)
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        at = f" at {place.tb_frame.f_code.co_filename}:{place.tb_lineno}" if place is not None else ""
        found.problem(f"{what} raised {type(error).__name__}: {str(error)[:500]}{at}{hint}")
    return None


def _signature_hint(error: Exception) -> str:
    if isinstance(error, TypeError) and any(f"'{name}'" in str(error) for name in ("seed", "options")):
        return "; reset must accept the keywords seed and options: def reset(self, *, seed=None, options=None)"
    return ""


def _check_spaces(lane: GymnasiumCopy, found: _Findings) -> None:
    for path, space in leaves(lane.action_space):
        if isinstance(space, spaces.Box) and not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
            found.note(
                f"the action{f' {path_name(path)}' if path else ''} has infinite bounds {space}: policy.action_bounds=tanh is refused"
            )


def _check_values(lane: GymnasiumCopy, trace: Trace, found: _Findings) -> None:
    seen, _ = split_mask(lane.observation_space)
    for step, (observation, final, reward, _, _) in enumerate(trace.rows):
        if not np.isfinite(reward):
            found.problem(f"the reward at step {step} is {reward}")
            break
        for tree in (observation, final):
            if tree is not None and not _check_leaves(seen, tree, step, found):
                return


def _check_leaves(seen: Space, tree: Tree, step: int, found: _Findings) -> bool:
    for path, space in leaves(seen):
        value = leaf(tree, path)
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            found.problem(f"{path_name(path)} at step {step} has values that are not finite: {np.asarray(value).ravel()[:8]}")
            return False
        if isinstance(space, spaces.Box):
            outside = (value < space.low) | (value > space.high)
            if outside.any():
                found.problem(f"{path_name(path)} at step {step} leaves its bounds: {value[outside].ravel()[:4]} is outside {space}")
                return False
            if value.dtype.kind == "f" and value.size and np.abs(value).max() > _LARGE:
                found.note(f"{path_name(path)} has values beyond {_LARGE:g}: policy.normalize_observations=true will help")
    return True


def _check_endings(lane: GymnasiumCopy, trace: Trace, found: _Findings) -> None:
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


def _check_final_observations(trace: Trace, ends: Sequence[int], found: _Findings) -> None:
    """An environment that resets itself returns the next episode's first observation where the last one belongs."""
    opens = [0, *ends]  # the rows whose observation opens an episode
    lengths = [end - start for start, end in zip(opens, ends)]
    alike = [same(trace.rows[end][1], trace.rows[start][0]) for start, end in zip(opens, ends)]
    moves = any(not same(trace.rows[start + 1][0], trace.rows[start][0]) for start, length in zip(opens, lengths) if length > 1)
    if len(ends) > 1 and all(alike) and moves:
        found.problem(
            "the last observation of every episode equals its first: does step() reset the environment? It must return the last one"
        )


def _check_determinism(lane: GymnasiumCopy, make: Callable[[], Env] | None, trace: Trace, seed: int, found: _Findings) -> None:
    again = Trace()
    _attempt(found, "stepping again", lambda: drive(lane, again, len(trace.actions), seed, trace.actions))
    _compare(trace, again, "the same environment", found)
    if make is None or found.problems:
        return
    other = _attempt(found, "making the environment again", make)
    if other is None or other is lane.env.unwrapped:
        return
    fresh = Trace()
    _attempt(found, "stepping a fresh copy", lambda: drive(GymnasiumCopy(Spy(other), 0), fresh, len(trace.actions), seed, trace.actions))
    _compare(trace, fresh, "a fresh copy", found)
    _attempt(found, "closing", other.close)


def _compare(trace: Trace, other: Trace, who: str, found: _Findings) -> None:
    difference = first_difference(trace, other)
    if difference is not None:
        found.problem(
            f"not deterministic: {who}, reset with the same seed, gave {difference} under the same actions; "
            "draw all random numbers from self.np_random, after super().reset(seed=seed)"
        )
