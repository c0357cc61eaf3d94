"""`check_env` drives an environment as training would, and reports what would break.

It steps the environment with the code that training uses, so what passes here is accepted there.
"""

from __future__ import annotations

import inspect
import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from inchworm.config.sections import EnvConfig
from inchworm.core.errors import EnvError, InchwormError
from inchworm.core.spaces import Space, leaf, leaves, path_name, split_mask
from inchworm.core.types import Tree
from inchworm.env.gymnasium_copy import GymnasiumCopy
from inchworm.env.make import make_env
from inchworm.env.pettingzoo_copy import TeamCopy, as_team, is_team_env
from inchworm.env.restore import Env, wrapper_chain
from inchworm.env.source import env_source
from inchworm.env.step_arrays import StepRows, allocate_rows, map_tree, tree_leaves
from inchworm.env.trial import Spy, Trace, drive, first_difference, put_legal_actions, same
from inchworm.env.values import CastWarning, make_split

_LARGE = 50.0
"""Larger observations slow learning down enough to report them."""


class Findings:
    """Problems, which break or spoil training, and notes, which are worth knowing."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []

    def problem(self, text: str) -> None:
        """Add what would break or spoil training."""
        self.problems.append(text)

    def note(self, text: str) -> None:
        """Add what is worth knowing."""
        self.notes.append(text)

    def attempt(self, what: str, action: Callable[[], Any]) -> Any:
        """The action's result; an exception becomes a problem that says where it happened."""
        try:
            return action()
        except InchwormError as error:
            self.problem(str(error))
        except Exception as error:  # an environment may raise anything, and all of it is worth reporting
            place = error.__traceback__
            while place is not None and place.tb_next is not None:
                place = place.tb_next
            at = f" at {place.tb_frame.f_code.co_filename}:{place.tb_lineno}" if place is not None else ""
            self.problem(f"{what} raised {type(error).__name__}: {str(error)[:500]}{at}")
        return None


def takes_seed_and_options(env: Any, found: Findings) -> bool:
    """Whether `reset` accepts the keywords that every episode is begun with."""
    try:
        inspect.signature(env.unwrapped.reset).bind(seed=0, options=None)
    except TypeError:
        found.problem("reset must accept the keywords seed and options: def reset(self, *, seed=None, options=None)")
        return False
    except ValueError:  # some built-in callables have no signature
        pass
    return True


def check_action_space(space: Space, found: Findings) -> None:
    """Note what an action space does not allow."""
    for path, part in leaves(space):
        if isinstance(part, spaces.Box) and not (np.isfinite(part.low).all() and np.isfinite(part.high).all()):
            found.note(
                f"the action{f' {path_name(path)}' if path else ''} has infinite bounds {part}: policy.action_bounds=tanh is refused"
            )


def check_leaves(seen: Space, tree: Tree, when: str, found: Findings) -> bool:
    """Whether an observation is finite and within its bounds; `when` says which it is."""
    for path, space in leaves(seen):
        value = leaf(tree, path)
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            found.problem(f"{path_name(path)} {when} has values that are not finite: {np.asarray(value).ravel()[:8]}")
            return False
        if isinstance(space, spaces.Box):
            outside = (value < space.low) | (value > space.high)
            if outside.any():
                found.problem(f"{path_name(path)} {when} leaves its bounds: {value[outside].ravel()[:4]} is outside {space}")
                return False
            if value.dtype.kind == "f" and value.size and np.abs(value).max() > _LARGE:
                found.note(f"{path_name(path)} has values beyond {_LARGE:g}: policy.normalize_observations=true will help")
    return True


def not_deterministic(who: str, difference: str) -> str:
    """The problem of an environment whose replay differs."""
    return (
        f"not deterministic: {who}, reset with the same seed, gave {difference} under the same actions; "
        "draw all random numbers from self.np_random, after super().reset(seed=seed)"
    )


_SHOWN = ("observations", "rewards", "terminated", "truncated", "valid", "joined", "global_state")
"""What a step shows, and must show again."""


@dataclass
class TeamTrace:
    """What a team did, step by step; row 0 is the first reset."""

    actions: list[Tree] = field(default_factory=list)
    """[k, *act] of each step."""
    rows: list[dict[str, Tree]] = field(default_factory=list)
    """What each step showed, and where an episode ended `final_observations`."""


def check_team(env: Any, make: Callable[[], Any] | None, steps: int, seed: int, found: Findings) -> None:
    """Drive a PettingZoo environment for some random steps; `make` makes more of them, and then this one is closed at the end."""
    try:
        if not takes_seed_and_options(env, found):
            return
        copy = found.attempt("reading its spaces and its first reset", lambda: _copy_of(env, found))
        if copy is None:
            return
        check_action_space(copy.action_space, found)
        trace = TeamTrace()
        found.attempt("stepping", lambda: drive_team(copy, trace, steps, seed))
        _check_team_values(copy, trace, found)
        _check_lives(copy, trace, found)
        if trace.rows and not found.problems:
            _check_team_determinism(copy, make, trace, seed, found)
    finally:
        if make is not None:
            found.attempt("closing", env.close)


def _copy_of(env: Any, found: Findings) -> TeamCopy:
    """The environment's lanes, with the global state if it has one."""
    copy = TeamCopy(as_team(env), 0)
    try:
        copy.env.state()
    except NotImplementedError:
        return copy
    found.note("state() gives a global state: policy.central_critic=true lets the critic read it")
    return TeamCopy(as_team(env), 0, global_state=True)


def drive_team(copy: TeamCopy, trace: TeamTrace, steps: int, seed: int, actions: Sequence[Tree] | None = None) -> None:
    """Take random legal steps, or the given ones, and record all that happened."""
    rng, split = np.random.default_rng(seed), make_split(copy.action_space)
    spaces = (copy.observation_space, copy.action_space)
    rows, _ = allocate_rows(*spaces, copy.num_lanes, 1, global_state_space=copy.global_state_space)
    copy.attach(rows)
    copy.reset(seed, None)
    trace.rows.append(_shown(rows))
    episodes = 0
    for index in range(steps):
        if actions is None:
            put_legal_actions(copy.action_space, rows.observations, rng, rows.actions, range(copy.num_lanes))
        else:
            for row, part in zip(tree_leaves(rows.actions), tree_leaves(actions[index])):
                row[...] = part
        trace.actions.append(map_tree(np.copy, rows.actions))
        rows.terminated[:] = rows.truncated[:] = False
        rows.next_seeds[0] = seed + episodes + 1
        over = copy.step(split(map_tree(np.copy, rows.actions))) is not None
        episodes += over
        trace.rows.append(_shown(rows) | ({"final_observations": map_tree(np.copy, rows.final_observations)} if over else {}))


def _shown(rows: StepRows) -> dict[str, Tree]:
    return {name: map_tree(np.copy, getattr(rows, name)) for name in _SHOWN}


def _check_team_values(copy: TeamCopy, trace: TeamTrace, found: Findings) -> None:
    seen, _ = split_mask(copy.observation_space)
    for step, row in enumerate(trace.rows):
        for place in np.flatnonzero(row["valid"]).tolist():
            observation = map_tree(operator.itemgetter(place), row["observations"])
            if not check_leaves(seen, observation, f"of {copy.agents[place]} at step {step}", found):
                return
        if copy.global_state_space is not None:
            state = map_tree(operator.itemgetter(0), row["global_state"])
            if not check_leaves(copy.global_state_space, state, f"of the global state at step {step}", found):
                return


def _check_lives(copy: TeamCopy, trace: TeamTrace, found: Findings) -> None:
    if len(trace.rows) > 1 and not any("final_observations" in row for row in trace.rows):
        found.note(f"no episode ended within {len(trace.actions)} random steps; set env.max_episode_steps if there is no time limit")
    pairs = list(zip(trace.rows, trace.rows[1:]))
    running = [(before["valid"], after["valid"]) for before, after in pairs if "final_observations" not in after]
    if any((before & ~after).any() for before, after in running):
        found.note("agents leave before their episode ends: their lanes are invalid from then on, and count in nothing")
    if any(row["joined"].any() for row in trace.rows):
        found.note("agents join running episodes: their lanes are invalid before")
    never = [agent for place, agent in enumerate(copy.agents) if not any(row["valid"][place] for row in trace.rows)]
    if never and len(trace.rows) > 1:
        found.note(f"{', '.join(map(str, never))} of possible_agents were never alive in {len(trace.actions)} random steps")


def _check_team_determinism(copy: TeamCopy, make: Callable[[], Any] | None, trace: TeamTrace, seed: int, found: Findings) -> None:
    again = TeamTrace()
    found.attempt("stepping again", lambda: drive_team(copy, again, len(trace.actions), seed, trace.actions))
    _compare_teams(trace, again, "the same environment", found)
    if make is None or found.problems:
        return
    other = found.attempt("making the environment again", make)
    if other is None or other.unwrapped is copy.env.unwrapped:
        return
    fresh, shared = TeamTrace(), copy.global_state_space is not None
    found.attempt(
        "stepping a fresh copy",
        lambda: drive_team(TeamCopy(as_team(other), 0, global_state=shared), fresh, len(trace.actions), seed, trace.actions),
    )
    _compare_teams(trace, fresh, "a fresh copy", found)
    found.attempt("closing", other.close)


def _compare_teams(trace: TeamTrace, other: TeamTrace, who: str, found: Findings) -> None:
    for step, (one, two) in enumerate(zip(trace.rows, other.rows)):
        for name, shown in one.items():
            pairs = zip(tree_leaves(shown), tree_leaves(two[name])) if name in two else ()
            if name not in two or any(a.tobytes() != b.tobytes() for a, b in pairs):
                found.problem(not_deterministic(who, f"other {name} at step {step}"))
                return


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
        if issubclass(warning.category, CastWarning):
            found.problem(str(warning.message))
    return CheckReport(tuple(dict.fromkeys(found.problems)), tuple(dict.fromkeys(found.notes)))


def _check(env: Any, steps: int, seed: int, found: Findings) -> None:
    source = env_source(env)
    if source.is_vector:
        raise EnvError(f"check_env takes an environment, an id, a factory or an EnvConfig; got {type(env).__name__}")
    config = EnvConfig(id=env) if source.kind == "id" else env
    make: Callable[[], Env] = partial(make_env, config) if source.is_config else env if source.can_be_copied else lambda: env
    first = found.attempt("making the environment", make)
    if first is None:
        return
    if is_team_env(first):
        check_team(first, None if env is first else make, steps, seed, found)
        return
    try:
        if not takes_seed_and_options(first, found):
            return
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
    # An environment that resets itself returns the next episode's first observation where the last one belongs.
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
