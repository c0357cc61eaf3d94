"""`check_env` drives an environment as training would, and reports what would break.

It steps the environment with the code that training uses, so what passes here is accepted there.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from inchworm.config.sections import EnvConfig
from inchworm.core.protocols import VectorEnv
from inchworm.core.spaces import in_one_line, map_tree, split_mask, tree_leaves
from inchworm.core.types import CheckReport, Tree
from inchworm.env.check_vector import FINAL_KEYS, Findings, check_leaves, check_spaces, check_vector_env
from inchworm.env.foreign import GymVectorEnv
from inchworm.env.gymnasium_copy import GymnasiumCopy
from inchworm.env.local import Copy, team_copy
from inchworm.env.make import call_factory, complete_env, make_env, named_factory
from inchworm.env.pettingzoo_copy import TeamCopy, has_state, is_team_env
from inchworm.env.registry import is_vector_only
from inchworm.env.restore import Env, accepts, wrapper_chain
from inchworm.env.source import env_source, is_vector_env, make_vector_env
from inchworm.env.step_arrays import allocate_rows
from inchworm.env.values import RESET_KEYWORDS, CastWarning, make_split, put_legal_actions

_LANES = 4
"""Copies of an environment that is made as one vector env only."""

_SHOWN = ("observations", "rewards", "terminated", "truncated", "valid", "joined", "global_state")
"""What a step shows, and must show again."""


@dataclass
class Trace:
    """What a copy did, step by step; row 0 is the first reset."""

    actions: list[Tree] = field(default_factory=list)
    """[k, *act] of each step."""
    rows: list[dict[str, Tree]] = field(default_factory=list)
    """What each step showed, [k, ...] each, and where an episode ended `final_observations`."""


class Spy(gym.Wrapper[Any, Any, Any, Any]):
    """Keeps the info of every step, of which a copy returns only the numbers."""

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self.infos: list[Any] = [None]  # that of the reset is of no interest

    def step(self, action: Any) -> Any:
        """Step, and keep the info."""
        result = self.env.step(action)
        self.infos.append(result[-1] if isinstance(result, tuple) and result else None)
        return result


def drive(copy: Copy, trace: Trace, steps: int, seed: int, actions: Sequence[Tree] | None = None) -> None:
    """Take random legal steps, or the given ones, and record all that happened."""
    rng, split = np.random.default_rng(seed), make_split(copy.action_space)
    spaces = (copy.observation_space, copy.action_space)
    rows, _ = allocate_rows(*spaces, copy.num_lanes, 1, global_state_space=copy.global_state_space)
    copy.attach(rows)
    rows.seeds[0] = seed
    copy.reset(seed, None)
    trace.rows.append({name: map_tree(np.copy, getattr(rows, name)) for name in _SHOWN})
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
        chosen = split(rows.actions)
        ended = copy.step(chosen if isinstance(copy, TeamCopy) else chosen[0]) is not None
        episodes += ended
        rows.seeds[0], rows.episodes[0] = seed + episodes, episodes
        names = (*_SHOWN, "final_observations") if ended else _SHOWN
        trace.rows.append({name: map_tree(np.copy, getattr(rows, name)) for name in names})


def check_env(env: EnvConfig | str | Env | Callable[[], Env] | GymVectorEnv | VectorEnv, *, steps: int = 200, seed: int = 0) -> CheckReport:
    """Drive `env` for some random steps and report what would break training. Environments made here are closed; a given one stays open.

    A vector env, or a factory of one, is checked too: its seeds, the order of its lanes, its resets, buffers and last observations.
    """
    found = Findings()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _check(env, steps, seed, found)
    for warning in caught:
        if issubclass(warning.category, CastWarning):
            found.problems.append(str(warning.message))
    return CheckReport(tuple(dict.fromkeys(found.problems)), tuple(dict.fromkeys(found.notes)))


def make_checked(config: EnvConfig) -> Any:
    """What `check_env` checks for a config: its environment, or the vector env that its factory returns."""
    if is_vector_only(config.id):
        return make_vector_env(config.replace(num_envs=_LANES))
    factory = named_factory(config)
    if factory is None:
        return make_env(config)
    made = call_factory(factory, config)
    return made if is_vector_env(made) else complete_env(made, config)


def _check(env: Any, steps: int, seed: int, found: Findings) -> None:
    source = env_source(env)
    config = EnvConfig(id=env) if source.kind == "id" else env
    make: Callable[[], Any] = partial(make_checked, config) if source.is_config else env if source.can_be_copied else lambda: env
    first = found.attempt("making the environment", make)
    if first is None:
        return
    try:
        if is_vector_env(first):
            check_vector_env(env_source(first).given, steps, seed, found)
            if env is not first and not source.is_config:
                found.notes.append(
                    "training takes a factory of one environment; to train with this vector env, give it to PPOTrainer itself"
                )
        elif not accepts(first.unwrapped.reset, seed=0, options=None):
            found.problems.append(RESET_KEYWORDS)
        else:
            copy = found.attempt("reading its spaces and its first reset", lambda: _copy_with_state(first, steps, seed, found))
            if copy is not None:
                _check_copy(copy, None if env is first else make, steps, seed, found)
    finally:
        if env is not first:
            found.attempt("closing", first.close)


def _copy_of(env: Any, *, global_state: bool = False) -> Copy:
    """The environment as training steps it."""
    return team_copy(env, 0, global_state=global_state) if is_team_env(env) else GymnasiumCopy(Spy(env), 0)


def _copy_with_state(env: Any, steps: int, seed: int, found: Findings) -> Copy:
    """The environment as training steps it, with its global state if there is one that can be read at every step."""
    copy, central = _copy_of(env), Findings()
    if not isinstance(copy, TeamCopy) or copy.turn_based:
        return copy
    copy.env.reset(seed=seed)

    def read_state() -> Copy | None:
        if not has_state(copy.env):
            return None
        with_state = _copy_of(env, global_state=True)
        drive(with_state, Trace(), steps, seed)
        return with_state

    with_state: Copy | None = central.attempt("reading state()", read_state)
    if central.problems:  # without a central critic its state is not read, and training works
        found.notes.append(f"policy.central_critic=true cannot be used: {central.problems[0]}")
    if with_state is None:
        return copy
    found.notes.append("state() gives a global state: policy.central_critic=true lets the critic read it")
    return with_state


def _check_copy(copy: Copy, make: Callable[[], Env] | None, steps: int, seed: int, found: Findings) -> None:
    """Step a copy with random actions, check what it did, and repeat it, also in a second copy if `make` can make one."""
    check_spaces(copy.observation_space, copy.action_space, found)
    if copy.agent_spaces:
        _note_padding(copy, found)
    trace = Trace()
    found.attempt("stepping", lambda: drive(copy, trace, steps, seed))
    _check_values(copy, trace, found)
    if len(trace.rows) > 1:
        _check_episodes(copy, trace, found)
    if not trace.rows or found.problems:
        return
    again, fresh = Trace(), Trace()
    found.attempt("stepping again", lambda: drive(copy, again, len(trace.actions), seed, trace.actions))
    _compare(trace, again, "the same environment", found)
    if make is None or found.problems:
        return
    other = found.attempt("making the environment again", make)
    if other is not None and other.unwrapped is not copy.env.unwrapped:

        def repeat() -> None:
            drive(_copy_of(other, global_state=copy.global_state_space is not None), fresh, len(trace.actions), seed, trace.actions)

        found.attempt("stepping a fresh copy", repeat)
        _compare(trace, fresh, "a fresh copy", found)
        found.attempt("closing", other.close)


def _note_padding(copy: Copy, found: Findings) -> None:
    """Note the spaces of lanes whose agents differ."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, own in zip(copy.names, copy.agent_spaces):
        groups.setdefault((in_one_line(own.seen), in_one_line(own.action_space)), []).append(name)
    own_spaces = "; ".join(f"{', '.join(names)}: {seen} and {action}" for (seen, action), names in groups.items())
    found.notes.append(
        f"agents have different spaces ({own_spaces}), so lanes are padded to {in_one_line(split_mask(copy.observation_space)[0])} and "
        f"{in_one_line(copy.action_space)}; a policy for each kind of agent (policies in the config) sees and sends only its own part"
    )


def _check_values(copy: Copy, trace: Trace, found: Findings) -> None:
    """Check that rewards are finite, and observations and global states also within their bounds; report the first that is not."""
    seen, _ = split_mask(copy.observation_space)
    for step, row in enumerate(trace.rows):
        wrong = row["rewards"][~np.isfinite(row["rewards"])]
        if wrong.size:
            found.problems.append(f"the reward at step {step} is {wrong[0]}")
            return
        for place in range(copy.num_lanes):
            when = f"of {copy.agents[place]} at step {step}" if isinstance(copy, TeamCopy) else f"at step {step}"
            shown = [row["observations"]] if row["valid"][place] else []
            shown += [row["final_observations"]] if "final_observations" in row else []
            for tree in shown:
                if not check_leaves(seen, map_tree(operator.itemgetter(place), tree), when, found):
                    return
        if copy.global_state_space is not None:
            state = map_tree(operator.itemgetter(0), row["global_state"])
            if not check_leaves(copy.global_state_space, state, f"of the global state at step {step}", found):
                return


def _check_episodes(copy: Copy, trace: Trace, found: Findings) -> None:
    """Check where episodes end, and which agents live in them."""
    rows, taken = trace.rows, len(trace.actions)
    ends = [step for step, row in enumerate(rows) if "final_observations" in row]
    if not ends and not any(isinstance(wrapper, gym.wrappers.TimeLimit) for wrapper in wrapper_chain(copy.env)):
        found.notes.append(f"no episode ended within {taken} random steps; set env.max_episode_steps if there is no time limit")
    if isinstance(copy, TeamCopy) and copy.turn_based:
        found.notes.append("agents take turns: a lane is valid when its agent moves")
    elif isinstance(copy, TeamCopy):
        running = [(rows[step - 1]["valid"], rows[step]["valid"]) for step in range(1, len(rows)) if step not in ends]
        if any((before & ~after).any() for before, after in running):
            found.notes.append("agents leave before their episode ends: their lanes are invalid from then on, and count in nothing")
        if any(row["joined"].any() for row in rows):
            found.notes.append("agents join running episodes: their lanes are invalid before")
    if isinstance(copy, TeamCopy):
        never = [agent for place, agent in enumerate(copy.agents) if not any(row["valid"][place] for row in rows)]
        if never:
            found.notes.append(f"{', '.join(map(str, never))} of possible_agents were never alive in {taken} random steps")
        return
    for step in ends:
        info = copy.env.infos[step] or {} if isinstance(copy.env, Spy) else {}
        names = [name for name in FINAL_KEYS if name in info]
        if names:
            found.problems.append(
                f"the environment resets itself: info[{names[0]!r}] at step {step} holds the last observation; return that one"
            )
            return
    # An environment that resets itself returns the next episode's first observation where the last one belongs.
    opens = [0, *ends]  # the rows whose observation opens an episode
    alike = [_same(rows[end]["final_observations"], rows[start]["observations"]) for start, end in zip(opens, ends)]
    longer = [start for start, end in zip(opens, ends) if end - start > 1]
    moves = any(not _same(rows[start + 1]["observations"], rows[start]["observations"]) for start in longer)
    if len(ends) > 1 and all(alike) and moves:
        found.problems.append(
            "the last observation of every episode equals its first: does step() reset the environment? It must return the last one"
        )


def _compare(trace: Trace, other: Trace, which: str, found: Findings) -> None:
    """Report the first difference between two traces of the same actions."""
    for step, (one, two) in enumerate(zip(trace.rows, other.rows)):
        for name, shown in one.items():
            if name not in two or not _same(shown, two[name]):
                found.problems.append(
                    f"not deterministic: {which}, reset with the same seed, gave different {name.replace('_', ' ')} at step {step} under "
                    "the same actions; draw all random numbers from self.np_random, after super().reset(seed=seed)"
                )
                return


def _same(one: Tree, other: Tree) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(tree_leaves(one), tree_leaves(other)))
