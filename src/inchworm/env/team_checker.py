"""Serves step 1: `check_env` of a PettingZoo environment drives it as training would, and says in words what would break.

It uses the very lanes that training uses, so what passes here is not refused there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from inchworm.env.actions import make_split
from inchworm.env.findings import Findings, check_action_space, check_leaves, not_deterministic
from inchworm.env.memory import StepRows, carve_rows, map_tree, tree_leaves
from inchworm.env.probe import put_legal_actions
from inchworm.env.team_lanes import TeamCopy
from inchworm.env.teams import as_team
from inchworm.spaces import split_mask
from inchworm.types import Tree

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
        copy = found.attempt("reading its spaces and its first reset", lambda: _copy_of(env, found))
        if copy is None:
            return
        check_action_space(copy.action_space, found)
        trace = TeamTrace()
        found.attempt("stepping", lambda: drive_team(copy, trace, steps, seed))
        _check_values(copy, trace, found)
        _check_lives(copy, trace, found)
        if trace.rows and not found.problems:
            _check_determinism(copy, make, trace, seed, found)
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
    """Take random legal steps, or the given ones, and write down all that happened."""
    rng, split = np.random.default_rng(seed), make_split(copy.action_space)
    spaces = (copy.observation_space, copy.action_space)
    rows, _ = carve_rows(*spaces, copy.num_lanes, 1, global_state_space=copy.global_state_space)
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


def _check_values(copy: TeamCopy, trace: TeamTrace, found: Findings) -> None:
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
        found.note(f"{', '.join(map(str, never))} of possible_agents never lived in {len(trace.actions)} random steps")


def _check_determinism(copy: TeamCopy, make: Callable[[], Any] | None, trace: TeamTrace, seed: int, found: Findings) -> None:
    again = TeamTrace()
    found.attempt("stepping again", lambda: drive_team(copy, again, len(trace.actions), seed, trace.actions))
    _compare(trace, again, "the same environment", found)
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
    _compare(trace, fresh, "a fresh copy", found)
    found.attempt("closing", other.close)


def _compare(trace: TeamTrace, other: TeamTrace, who: str, found: Findings) -> None:
    for step, (one, two) in enumerate(zip(trace.rows, other.rows)):
        for name in one:
            if name not in two or not _same(one[name], two[name]):
                found.problem(not_deterministic(who, f"other {name} at step {step}"))
                return


def _same(one: Tree, other: Tree) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(tree_leaves(one), tree_leaves(other)))
