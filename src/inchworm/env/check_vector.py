"""`check_env` of vector envs: lanes are played several times with the same seeds and actions, and compared.

A vector env is driven through the contract that training uses. Two plays may differ only where their seeds or actions differ, so
each difference shows a defect: randomness that the seed does not control, results in another order than the actions, lanes that a
reset of another lane changes, an end that is forgotten or reported late. `check_env` of one environment shares the findings.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from inchworm.core.errors import InchwormError, describe_error, error_text
from inchworm.core.protocols import VectorEnv
from inchworm.core.seeding import derive_seed
from inchworm.core.spaces import (
    Space,
    check_action_space,
    check_observation_space,
    leaf,
    leaves,
    map_tree,
    path_name,
    split_mask,
    tree_leaves,
    wide_one_hots,
    zeros,
)
from inchworm.core.types import Array, EnvStep, Tree
from inchworm.env.foreign import GymVectorEnv, adapt_vector_env, is_envpool
from inchworm.env.sb3 import adapt_vec_env, is_vec_env
from inchworm.env.values import put_legal_actions
from inchworm.env.vector_env import LaneVectorEnv

_CHANGED = 4
"""Copies whose actions and seeds are changed, one at a time; of a large vector env the first, the last and some between."""

FINAL_KEYS = ("final_obs", "final_observation", "terminal_observation")
"""Where an info holds the last observation of an episode, if the environment has begun the next one itself."""


_LARGE = 50.0
"""Larger observations slow learning down enough to report them."""


class Findings:
    """Problems, which break or degrade training, and notes, which are worth knowing."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []

    def attempt(self, what: str, action: Callable[[], Any]) -> Any:
        """The action's result; an exception becomes a problem, with the place where it was raised."""
        try:
            return action()
        except InchwormError as error:
            self.problems.append(error_text(error))
        except (Exception, SystemExit) as error:  # an environment may raise anything, and all of it is worth reporting
            self.problems.append(f"{what} raised {' '.join(describe_error(error).split())}")
        return None


def check_spaces(observation_space: Space, action_space: Space, found: Findings) -> None:
    """Check that a policy can read the observations and choose the actions."""
    found.attempt("reading its observation space", lambda: check_observation_space(observation_space))
    found.notes += found.attempt("reading its observation space", lambda: wide_one_hots(observation_space)) or []
    found.attempt("reading its action space", lambda: check_action_space(action_space))
    for path, part in leaves(action_space):
        if isinstance(part, spaces.Box) and not (np.isfinite(part.low).all() and np.isfinite(part.high).all()):
            which = f"the action{f' {path_name(path)}' if path else ''}"
            found.notes.append(f"{which} has infinite bounds {part}: policy.action_bounds=tanh is refused")


def check_leaves(seen: Space, tree: Tree, when: str, found: Findings) -> bool:
    """Whether an observation is finite and within its bounds; `when` names it in messages."""
    for path, space in leaves(seen):
        value = leaf(tree, path)
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            found.problems.append(f"{path_name(path)} {when} has values that are not finite: {np.asarray(value).ravel()[:8]}")
            return False
        if isinstance(space, spaces.Box):
            outside = (value < space.low) | (value > space.high)
            if outside.any():
                found.problems.append(f"{path_name(path)} {when} leaves its bounds: {value[outside].ravel()[:4]} is outside {space}")
                return False
            if value.dtype.kind == "f" and value.size and np.abs(value).max() > _LARGE:
                found.notes.append(f"{path_name(path)} has values beyond {_LARGE:g}: policy.normalize_observations=true will help")
    return True


class VectorSpy(gym.vector.VectorWrapper):
    """Watches what a `gymnasium.vector.VectorEnv` returns, before it is adapted and copied."""

    def __init__(self, env: GymVectorEnv, found: Findings) -> None:
        super().__init__(env)
        self._found, self._calls = found, 0
        self._kept: list[tuple[str, Array, Array]] = []  # of the last call: name, the array itself, a copy
        self.mask_ignored: str | None = None
        """The sentence about a reset that changed lanes outside of its mask: a problem unless lanes are mixed up anyway."""
        self._shown: Tree = None  # a copy of the latest observations [B, *obs]

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Tree, dict[str, Any]]:
        """Reset; lanes outside of a mask must stay as they are."""
        observations, info = self.env.reset(seed=seed, options=options)
        mask = np.ones(self.num_envs, bool) if options is None else options.get("reset_mask", np.ones(self.num_envs, bool))
        for shown, returned in zip(tree_leaves(self._shown) if not mask.all() else (), tree_leaves(observations)):
            changed = [lane for lane in (~mask).nonzero()[0] if shown[lane].tobytes() != np.asarray(returned[lane]).tobytes()]
            if changed and self.mask_ignored is None:
                self.mask_ignored = (
                    f"autoreset: reset with options['reset_mask'] of lane {mask.nonzero()[0][0]} changed lane {changed[0]}: reset only the "
                    "lanes of the mask, and return the latest observation of the others"
                )
        self._keep(("observations", observations))
        return observations, info

    def step(self, actions: Tree) -> tuple[Tree, Any, Any, Any, dict[str, Any]]:
        """Step; the actions must stay as they are."""
        before = map_tree(np.copy, actions)
        observations, rewards, terminated, truncated, info = result = self.env.step(actions)
        if any(one.tobytes() != other.tobytes() for one, other in zip(tree_leaves(before), tree_leaves(actions))):
            self._found.problems.append("step() writes into the actions that it is given: copy them before you change them")
        self._keep(("observations", observations), ("rewards", rewards), ("terminated", terminated), ("truncated", truncated))
        resets_itself = self.metadata.get("autoreset_mode") == AutoresetMode.SAME_STEP
        names = [name for name in FINAL_KEYS if name in info] if isinstance(info, Mapping) and not resets_itself else []
        if names:
            self._found.problems.append(
                f"autoreset: info[{names[0]!r}] at step {self._calls} holds a last observation, so step() resets lanes although "
                "metadata['autoreset_mode'] is DISABLED; return the last observation itself, and reset only in reset()"
            )
        return result

    def _keep(self, *returned: tuple[str, Tree]) -> None:
        """Compare what the last call returned with what it was then, and keep what this one returned."""
        for name, array, copy in self._kept:
            if array.tobytes() != copy.tobytes():
                self._found.notes.append(
                    f"buffers are reused: the {name} that one call returned are overwritten by the next. Training copies them at once; "
                    "in code of your own copy what you keep, or let the vector env return copies (Gymnasium: copy=True)"
                )
                break
        self._calls += 1
        arrays = [(name, part) for name, tree in returned for part in tree_leaves(tree) if isinstance(part, np.ndarray)]
        self._kept = [(name, part, part.copy()) for name, part in arrays]
        self._shown = map_tree(np.copy, returned[0][1])


@dataclass
class Play:
    """What the copies showed; row 0 is the reset."""

    actions: list[Tree] = field(default_factory=list)
    """[B, *act] of each step."""
    rows: list[dict[str, list[bytes]]] = field(default_factory=list)
    """Of each step, by name, the bits that each copy showed."""
    ends: dict[int, int] = field(default_factory=dict)
    """The step at which the first episode of a copy ended."""
    firsts: list[Array] = field(default_factory=list)
    """[n] first observations of episodes, flat."""
    lasts: list[tuple[Array, Array]] = field(default_factory=list)
    """([n], [n]) of each finished episode: the last observation but one, and the last."""


class VectorCheck:
    """Plays a vector env, a `gymnasium.vector.VectorEnv`, a `VecEnv` or a `VectorEnv`, as often as it is compared with itself."""

    def __init__(self, given: Any, seed: int, found: Findings) -> None:
        self._given, self._seed, self._found = given, seed, found
        self._spy = VectorSpy(given, found) if isinstance(given, gym.vector.VectorEnv) else None
        self._is_ours = self._spy is None and not is_vec_env(given)  # then it is driven as it is
        self.env: VectorEnv = given if self._is_ours else self._adapted(seed)
        self.takes_seeds = self.env.takes_seeds if isinstance(self.env, LaneVectorEnv) else True
        self._start = given.state_dict() if self._is_ours else None
        self.seeds = [derive_seed(seed, "check", copy) for copy in range(self.env.num_envs)]

    @property
    def mask_ignored(self) -> str | None:
        """The sentence about a reset that changed lanes outside of its mask, if there was one."""
        return None if self._spy is None else self._spy.mask_ignored

    @property
    def repeats(self) -> bool:
        """Whether a play can be repeated: a vector env with one stream for all lanes must be seeded again, which its adapter never does."""
        return self.takes_seeds or not self._is_ours

    def _adapted(self, seed: int) -> VectorEnv:
        """The vector env of another library behind our contract; it stays open."""
        adapted = adapt_vec_env(self._given, seed=seed) if self._spy is None else adapt_vector_env(self._spy, seed=seed)
        adapted.is_borrowed = True
        return adapted

    def _begin(self, seeds: Sequence[int], seed: int | None = None) -> EnvStep:
        """Begin new episodes as a new run does; `seed` is that of an env whose lanes share one stream."""
        if not self._is_ours:
            self.env = self._adapted(self._seed if seed is None else seed)
        elif self._start is not None:
            self.env.load_state_dict(self._start)
        return self.env.reset(list(seeds) if self.takes_seeds else None)

    def first(self, seeds: Sequence[int], seed: int | None = None) -> Play:
        """Only the first observations."""
        play = Play()
        self._record(play, self._begin(seeds, seed), None)
        return play

    def play(self, steps: int, like: Play | None = None, other: int | None = None) -> Play:
        """Take random legal steps, or those of `like`; the copy `other` takes its own."""
        play, rng = Play(), np.random.default_rng([self._seed, 0 if other is None else other + 1])
        step = self._begin(self.seeds)
        self._record(play, step, None)
        for now in range(steps):
            if self._found.problems:  # one is enough: what follows it means little
                break
            actions = zeros(self.env.action_space, (self.env.num_lanes,)) if like is None else map_tree(np.copy, like.actions[now])
            drawn = range(self.env.num_lanes) if like is None else () if other is None else self._lanes(other)
            put_legal_actions(self.env.action_space, step.observations, rng, actions, drawn)
            step = self._take(play, step, actions)
        return play

    def restart(self, like: Play, copy: int, at: int) -> tuple[Play, Play]:
        """As `like`, but after `at` steps begin the first episode of one copy again; returns (the other copies' play, that copy's)."""
        whole, again = Play(), Play()
        step = self._begin(self.seeds)
        self._record(whole, step, None)
        for now in range(at):
            step = self._take(whole, step, like.actions[now])
        step = self.env.reset([self.seeds[copy]], [copy])
        self._record(again, step, None)
        for now in range(at, len(like.actions)):
            actions = map_tree(np.copy, like.actions[now])
            for row, part in zip(tree_leaves(actions), tree_leaves(like.actions[now - at])):
                row[list(self._lanes(copy))] = part[list(self._lanes(copy))]
            step = self._take(whole, step, actions)
            again.rows.append(whole.rows[-1])
        return whole, again

    def _lanes(self, copy: int) -> range:
        return range(copy * self.env.lanes_per_copy, (copy + 1) * self.env.lanes_per_copy)

    def _take(self, play: Play, step: EnvStep, actions: Tree) -> EnvStep:
        before = map_tree(np.copy, step.observations)
        after = self.env.step(actions)
        play.actions.append(map_tree(np.copy, actions))
        self._record(play, after, before)
        return after

    def _record(self, play: Play, step: EnvStep, before: Tree) -> None:
        """Check the values of a step, and keep its bits."""
        now, width = len(play.rows), self.env.lanes_per_copy
        _check_step(step, width, now, self._found)
        seen, _ = split_mask(self.env.observation_space)
        if step.valid.any():
            check_leaves(seen, map_tree(operator.itemgetter(step.valid), step.observations), f"at step {now}", self._found)
        names = ("observations", "rewards", "terminated", "truncated", "valid")
        arrays = {name: tree_leaves(getattr(step, name)) for name in names}
        play.rows.append(
            {name: [b"".join(part[list(self._lanes(copy))].tobytes() for part in parts) for copy in range(self.env.num_envs)]
             for name, parts in arrays.items()}
        )  # fmt: skip

        def flat(tree: Tree) -> Array:
            return np.concatenate([np.asarray(leaf(tree, path), np.float64).reshape(-1) for path, _ in leaves(seen)])

        for lane in step.episode_starts.nonzero()[0]:
            play.firsts.append(flat(map_tree(operator.itemgetter(lane), step.observations)))
        for end in step.ended:
            play.ends.setdefault(end.lane // width, now)
            check_leaves(seen, end.final_observation, f"at the end of an episode (step {now})", self._found)
            play.lasts.append((flat(map_tree(operator.itemgetter(end.lane), before)), flat(end.final_observation)))


def check_vector_env(given: Any, steps: int, seed: int, found: Findings) -> None:
    """Check a vector env: what it returns, its seeds, the order of its lanes, its resets and its last observations."""
    if is_envpool(given):
        found.notes.append("seeds and the order of lanes of an EnvPool are not checked: its random streams cannot be set back")
        return
    check: VectorCheck | None = found.attempt("reading its spaces", lambda: VectorCheck(given, seed, found))
    if check is None:
        return
    check_spaces(check.env.observation_space, check.env.action_space, found)
    first: Play | None = found.attempt("stepping", lambda: check.play(steps))
    if first is None or found.problems:
        return
    _check_last_observations(first, found)
    if not check.repeats:
        found.notes.append("seeds and the order of lanes were not checked: its random streams cannot be set back")
        return
    found.attempt("stepping again", lambda: _check_repetition(check, first, found))
    if not found.problems:
        found.attempt("stepping again with other actions and seeds", lambda: _check_order(check, first, found))
    if not found.problems and check.mask_ignored is not None:
        found.problems.append(check.mask_ignored)
    if not found.problems and check.takes_seeds:
        found.attempt("resetting one lane", lambda: _check_restart(check, first, found))


def _check_step(step: EnvStep, width: int, now: int, found: Findings) -> None:
    """Check rewards and flags; a vector env of another library has been checked by its adapter, one of the contract has not."""
    if not np.isfinite(step.rewards).all():
        lane = int(np.flatnonzero(~np.isfinite(step.rewards))[0])
        found.problems.append(f"the reward of lane {lane} at step {now} is {step.rewards[lane]}")
    over = sorted(end.lane for end in step.ended)
    if (step.terminated & step.truncated).any():
        found.problems.append(f"a lane is terminated and truncated at step {now}: both mean terminated; set one flag")
    if width == 1 and over != (step.terminated | step.truncated).nonzero()[0].tolist():
        found.problems.append(f"the lanes with a flag at step {now} are not those in `ended`, {over}: add an EndedEpisode for each end")
    if not step.episode_starts[over].all():
        found.problems.append(f"an episode ended at step {now}, but episode_starts is false there: reset in the same step and set it")


def _check_last_observations(play: Play, found: Findings) -> None:
    """Report last observations that lie where episodes begin although the observations before them do not."""
    if len(play.lasts) < 2:
        found.notes.append(
            f"{len(play.lasts)} episodes ended within {len(play.actions)} random steps: last observations were not checked; take more steps"
        )
        return
    firsts = np.stack(play.firsts)  # [n, k]
    low, high = firsts.min(axis=0), firsts.max(axis=0)
    margin = 0.5 * (high - low)
    before, last = (np.stack(part) for part in zip(*play.lasts))  # [m, k]

    def begins(observations: Array) -> Array:
        inside: Array = ((observations >= low - margin) & (observations <= high + margin)).all(axis=1)
        return inside

    if begins(last).all() and begins(before).mean() < 0.5:
        found.problems.append(
            f"final observations: the last observations of all {len(last)} episodes look like first ones, those before them do not: does "
            "step() reset the lane? It must return the last observation; reset() begins the next episode"
        )


def _check_repetition(check: VectorCheck, first: Play, found: Findings) -> None:
    """Check that the same seeds and actions give the same results, and that lanes of one seed differ."""
    again = check.play(len(first.actions), like=first)
    difference = _difference(first, again, range(check.env.num_envs), len(first.rows))
    if difference is not None:
        copy, step, name = difference
        found.problems.append(
            f"seeding: the vector env, reset with the same seed, gave different {name} in lane {copy * check.env.lanes_per_copy} "
            f"at step {step} under the same actions; draw all random numbers from generators that reset(seed=…) sets, and keep "
            "nothing of earlier episodes"
        )
        return
    shown = first.rows[0]["observations"]
    if not check.takes_seeds and len(shown) > 1 and len(set(shown)) == 1:
        other = check.first(check.seeds, derive_seed(0, "another check"))
        if other.rows[0]["observations"] != shown:
            found.problems.append("seeding: all lanes begin with the same observation, whatever the seed: give each lane a seed of its own")


def _check_order(check: VectorCheck, first: Play, found: Findings) -> None:
    """Check that other actions or another seed of one copy change no other copy: results are in the order of the actions."""
    copies, width = check.env.num_envs, check.env.lanes_per_copy
    if copies == 1:
        return
    steps = min(len(first.actions), 64)
    for changed in sorted({round(place) for place in np.linspace(0, copies - 1, min(copies, _CHANGED))}):
        others = [copy for copy in range(copies) if copy != changed]
        what = "other actions"
        play = check.play(steps, like=first, other=changed)
        independent = check.takes_seeds and check.mask_ignored is None  # else a reset of one lane changes the others
        ends = [] if independent else [*first.ends.values(), *play.ends.values()]
        difference = _difference(first, play, others, min([steps + 1, *ends]))
        if difference is None and check.takes_seeds:
            what = "another seed"
            seeds = [derive_seed(seed, "another") if copy == changed else seed for copy, seed in enumerate(check.seeds)]
            difference = _difference(first, check.first(seeds), others, 1)
        if difference is not None:
            _check_repetition(check, first, found)  # earlier episodes may have left traces
        if difference is not None and not found.problems:
            copy, step, name = difference
            found.problems.append(
                f"order of lanes: {what} of lane {changed * width} alone changed the {name} of lane {copy * width} at step {step}; "
                "lanes must be independent, and results, flags and observations in the order of the actions"
            )
        if found.problems:
            return


def _check_restart(check: VectorCheck, first: Play, found: Findings) -> None:
    """Check that an episode that is begun again after an end repeats itself, and that the other copies do not notice."""
    copy, at = min(first.ends.items(), key=operator.itemgetter(1)) if first.ends else (0, min(8, len(first.actions) // 2))
    lane = copy * check.env.lanes_per_copy
    whole, again = check.restart(first, copy, at)
    others = [other for other in range(check.env.num_envs) if other != copy]
    own = _difference(first, again, [copy], min(first.ends.get(copy, len(first.rows)), len(again.rows)))
    theirs = _difference(first, whole, others, len(first.rows))
    if own is not None or theirs is not None:
        _check_repetition(check, first, found)  # earlier episodes may have left traces
    if found.problems:
        return
    if own is not None:
        found.problems.append(
            f"autoreset: lane {lane}, reset with the same seed after an episode ended, gave different {own[2]} at step {own[1]} under the "
            "same actions; a reset must begin the episode at once, and forget that the last one ended"
        )
    if theirs is not None:
        found.problems.append(
            f"autoreset: a reset of lane {lane} changed the {theirs[2]} of lane {theirs[0] * check.env.lanes_per_copy} at step "
            f"{theirs[1]}: reset only the lanes that are asked for"
        )


def _difference(one: Play, two: Play, copies: Sequence[int], rows: int) -> tuple[int, int, str] | None:
    """The first difference in some copies within the first rows: (copy, step, name)."""
    for step, (mine, theirs) in enumerate(zip(one.rows[:rows], two.rows)):
        for name in mine:
            for copy in copies:
                if mine[name][copy] != theirs[name][copy]:
                    return copy, step, name
    return None
