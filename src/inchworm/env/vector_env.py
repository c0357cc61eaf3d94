"""Step 2 of 9: the one implementation of the `VectorEnv` contract. Rows of all copies become one `EnvStep`.

An engine moves the copies, in this process, in workers, or through another library. Everything else is decided here: the order of calls,
the seeds of episodes, what a checkpoint holds, and how copies are restored. `try_resume` plays a few random legal steps at the start of a
run to find out whether an environment restores exactly.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np

from inchworm.core.errors import EnvError
from inchworm.core.padding import AgentSpaces
from inchworm.core.protocols import Closes, default_agents
from inchworm.core.spaces import Space, map_tree, tree_leaves, zeros
from inchworm.core.types import EndedEpisode, EnvStep, Tree
from inchworm.env.episodes import Ended, EpisodeLedger, Replay, plain_options, plain_value
from inchworm.env.restore import CALLS, LEVEL, Restore, why_not_restored, with_call
from inchworm.env.step_arrays import StepRows, observation_hash, shown_arrays
from inchworm.env.values import make_put, put_legal_actions

NO_SEED = -1
"""The seed of an episode in an environment that cannot be given seeds."""

_NEW, _READY, _SENT, _FAILED, _CLOSED = "new", "ready", "sent", "failed", "closed"

_WHY_NOT = {
    _NEW: "the environments have not been reset; call reset() first",
    _READY: "no step has been sent; call send(actions) first",
    _SENT: "a step has been sent and not received; call recv() first",
    _FAILED: "the last call failed or was interrupted; call reset() for all copies, or close()",
    _CLOSED: "the vector env is closed; make a new one",
}


class Engine(Protocol):
    """What moves the copies.

    A copy may have several lanes, one for each agent that may ever live in it. It then writes `rows.valid` and `rows.joined` in every
    reset and step, where an episode ended also `rows.final_valid`, and if the rows have a global state that, too, also the final one.
    A lane without a living agent shows a legal observation with every action allowed; its action is in the rows and ignored.
    An agent that leaves while the episode continues: without a global state it is terminated (or truncated) in that step; with one it is
    not, but its later rows are invalid and keep their rewards, and it gets its flag with the others when the copy's episode ends.
    Where a lane is truncated and the episode continues, its row shows the agent's true last observation once.
    Where agents take turns (`turn_based`), every step is one move in each copy, and a lane is valid when it is its agent's turn; its first
    turn in an episode is marked in `rows.joined`.
    """

    observation_space: Space
    action_space: Space
    lanes_per_copy: int
    turn_based: bool = False
    agents: tuple[str, ...] = ()
    """Names of a copy's agents; empty where the environment gives none."""
    agent_spaces: tuple[AgentSpaces, ...] = ()
    """Their own spaces where these differ in size; else empty."""
    rows: StepRows

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin episodes in some copies and write their first observations into the rows."""

    @property
    def start(self) -> Callable[[], None] | None:
        """Begin a step with the actions in the rows; None where `finish` takes the whole step."""

    def finish(self) -> list[Ended]:
        """Wait for the step: its results are in the rows; where an episode ended, the next has begun with its `next_seeds`.

        Returns all lanes of the copies whose episode ended; an agent that leaves earlier ends no episode.
        """

    def set_options(self, indices: Sequence[int], options: Sequence[Any]) -> None:
        """Set the reset options of some copies, from their next reset on."""

    def replay(self, jobs: Sequence[Replay]) -> list[tuple[float, int]]:
        """Replay episodes in their copies: (return, steps) of each; fewer steps if one ended early."""

    def get_states(self) -> list[dict[str, Any]]:
        """For each copy {"state": …}, {"why": why not}, or nothing if it has no get_state; an empty list if none has."""
        return []

    def set_states(self, jobs: Sequence[Restore]) -> None:
        """Begin episodes in some copies and set their saved states; their rows show first observations."""
        raise EnvError(f"{len(jobs)} copies were saved by get_state, but the environments here have no get_state and set_state")

    def check_method(self, name: str) -> str | None:
        """Why the copies have no such method that can be called by name; None if they have."""
        return f"{name} cannot be called: {type(self).__name__} steps all copies as one; set env.native=false, or pass a factory"

    def call(self, indices: Sequence[int], name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> list[Any]:
        """Call a method of some copies now; returns their results as plain data."""
        raise EnvError(str(self.check_method(name)) + f" (asked of {list(indices)} with {arguments!r}, {keywords!r})")

    def close(self) -> None:
        """Release everything."""


class LaneVectorEnv(Closes):
    """The `VectorEnv` contract over an engine."""

    needs_trial = True
    """Whether a run tries at its start if the environment can be restored exactly."""
    resets_itself = False
    is_borrowed = False
    """Whether closing leaves open what steps the copies, because it belongs to the caller."""

    def __init__(
        self,
        engine: Engine,
        *,
        seed: int = 0,
        first_copy: int = 0,
        max_replay_steps: int = 100_000,
        takes_seeds: bool = True,
        inexact: Sequence[str] = (),
    ) -> None:
        """Without `takes_seeds` episodes cannot be replayed; `inexact` says why a resumed run may differ, a sentence each."""
        self._phase = _NEW
        self._flaws = list(inexact)  # of the environment
        self._not_restored: list[str] = []  # of this run
        self._warned: set[str] = set()
        self._engine, self.takes_seeds = engine, takes_seeds
        self._rows = rows = engine.rows
        self.observation_space, self.action_space = engine.observation_space, engine.action_space
        self.num_lanes = len(rows.rewards)
        self.num_envs = len(rows.seeds)
        self.lanes_per_copy = engine.lanes_per_copy
        self.agents_leave = engine.lanes_per_copy > 1
        self.turn_based = engine.turn_based
        self.agents: tuple[str, ...] = tuple(engine.agents) or default_agents(engine.lanes_per_copy)
        self.agent_spaces: tuple[AgentSpaces, ...] = tuple(engine.agent_spaces)
        self.global_state_space = rows.global_state_space
        self.kept_infos = tuple(rows.infos)
        self._put_actions = make_put(self.action_space)
        self._ledger = EpisodeLedger(
            rows,
            self.action_space,
            seed=seed,
            first_copy=first_copy,
            lanes_per_copy=engine.lanes_per_copy,
            max_replay_steps=max_replay_steps if takes_seeds else 0,
        )
        # What every step calls, looked up once.
        self._start, self._finish = engine.start, engine.finish
        self._record_actions, self._add_rewards = self._ledger.record_actions, self._ledger.add_rewards
        self._actions = rows.actions
        self._any_starts = False  # whether an entry of episode_starts is true
        self._episode_starts = np.zeros(self.num_lanes, np.bool_)  # [B]
        self._arrays = (rows.observations, rows.rewards, rows.terminated, rows.truncated, self._episode_starts, rows.valid)
        # The step in which nothing ended: always these arrays, so one object serves.
        self._quiet = EnvStep(*self._arrays, global_state=rows.global_state, infos=rows.infos or ())

    @property
    def inexact(self) -> list[str]:
        """Why a resumed run may differ from an uninterrupted one, a sentence each; empty if it is bit-identical."""
        return [*self._flaws, *self._not_restored]

    @property
    def exact(self) -> bool:
        """Whether `load_state_dict` restores every copy, so that a resumed run is bit-identical to an uninterrupted one."""
        return not self.inexact

    def mark_inexact(self, why: str) -> None:
        """Add a sentence to `inexact`: the environment cannot be restored exactly."""
        self._flaws.append(why)

    def reset(self, seeds: Sequence[int] | None = None, indices: Sequence[int] | None = None) -> EnvStep:
        """Begin new episodes in the copies `indices` (all by default), with these seeds or with derived ones.

        Returns all lanes: rewards 0, `episode_starts` true where the observation opens an episode. With `indices=()` nothing
        begins, and the lanes are returned as they are, which is how to look at them after `load_state_dict`.
        """
        self._require(_NEW, _READY, _FAILED)
        chosen = self._indices(indices)
        if self._phase != _READY and len(chosen) < self.num_envs:
            raise EnvError(f"{_WHY_NOT[self._phase]}: the first reset must be of all {self.num_envs} copies")
        if seeds is not None and len(seeds) != len(chosen):
            raise EnvError(f"reset got {len(seeds)} seeds for {len(chosen)} copies")
        if seeds is not None and any(not 0 <= int(seed) < 2**63 for seed in seeds):
            raise EnvError(f"seeds must be from 0 to 2**63 - 1; got {list(seeds)}")
        if seeds is not None and not self.takes_seeds:
            self._warn_once("the episodes of this environment cannot be given seeds: those of reset() are ignored")
        self._phase = _FAILED  # until it has worked
        self._begin(chosen, seeds)
        self._phase = _READY
        return self._current_step()

    def _begin(self, copies: Sequence[int], seeds: Sequence[int] | None = None) -> None:
        used = [self._ledger.begin(copy, None if seeds is None else int(seeds[place])) for place, copy in enumerate(copies)]
        self._engine.reset(copies, used)

    def _current_step(self) -> EnvStep:
        """All lanes as they are between two steps."""
        self._rows.rewards[:] = 0.0
        self._rows.terminated[:] = self._rows.truncated[:] = False
        for column in self._rows.infos.values():
            column[:] = np.nan
        self._episode_starts[:] = np.repeat(self._ledger.lengths == 0, self.lanes_per_copy) | self._rows.joined
        self._any_starts = True
        return self._quiet

    def send(self, actions: Tree) -> None:
        """Start one step with actions [B, *act], already within bounds."""
        if self._phase is not _READY:
            self._refuse()
        rows = self._actions
        if type(actions) is np.ndarray and type(rows) is np.ndarray and actions.dtype is rows.dtype and actions.shape == rows.shape:
            rows[...] = actions  # the usual case, in the least time
        else:
            self._put_actions(actions, rows)
        self._phase = _FAILED  # until it has worked
        self._record_actions()
        if self._start is not None:
            self._start()
        self._phase = _SENT

    def recv(self) -> EnvStep:
        """Wait for the step that `send` started."""
        if self._phase is not _SENT:
            self._refuse()
        self._phase = _FAILED  # until it has worked
        ended = self._finish()
        self._add_rewards()
        step = self._quiet
        if ended:
            rows, width, final = self._rows, self.lanes_per_copy, self._rows.final_observations
            returns = None
            if width == 1:
                np.logical_or(rows.terminated, rows.truncated, out=self._episode_starts)
            else:  # a flag alone begins no episode, because an agent may die before its copy's episode ends
                self._episode_starts[:] = rows.joined
                self._episode_starts[[lane for lane, _ in ended]] = True
                returns = self._ledger.episode_returns()
            self._any_starts = True
            records = []
            for lane, info in ended:
                copy = lane // width
                seed = int(rows.seeds[copy]) if self.takes_seeds else NO_SEED
                last = final[lane].copy() if type(final) is np.ndarray else copy_row(final, lane)
                state = copy_row(rows.final_global_state, copy) if self.global_state_space is not None else ()
                more = {} if returns is None else {"team_return": float(returns[copy])}
                options = self._ledger.options[copy]
                if options and LEVEL in options:
                    more["curriculum_level"] = float(options[LEVEL])
                records.append(EndedEpisode(lane, seed, last, {**info, **more}, state, bool(rows.final_valid[lane])))
            for lane, _ in ended:
                if lane % width == 0:  # once for each copy, after its seed was read
                    self._ledger.begin(lane // width)
            step = EnvStep(*self._arrays, tuple(records), rows.global_state, rows.infos or ())
        elif self._any_starts:  # an agent may join in any step where copies have several lanes; else no episode begins in this one
            self._episode_starts[:] = self._rows.joined
            self._any_starts = self.lanes_per_copy > 1
        self._phase = _READY
        return step

    def step(self, actions: Tree) -> EnvStep:
        """`send`, then `recv`."""
        self.send(actions)
        return self.recv()

    def set_reset_options(self, options: Mapping[str, Any] | None, indices: Sequence[int] | None = None) -> None:
        """Options that `env.reset` gets from the copies' next reset on; nothing changes in a running episode."""
        self._require(_NEW, _READY, _FAILED)
        plain, chosen = plain_options(options), self._indices(indices)
        before = [self._ledger.next_options[copy] for copy in chosen]
        self._set_next_options(chosen, [{CALLS: old[CALLS], **(plain or {})} if old and CALLS in old else plain for old in before])

    def call(
        self, name: str, *arguments: Any, indices: Sequence[int] | None = None, at_reset: bool = True, **keywords: Any
    ) -> list[Any] | None:
        """Call a method of the environment, such as `set_difficulty`, in some copies (all by default), also those in workers.

        It is called before the next reset of each copy and before all later ones: nothing changes in a running episode, and resumed runs
        and rebuilt workers repeat it. The latest call of a method replaces earlier ones, so its result must depend on its arguments
        alone. With `at_reset=False` it is called now and the results are returned, one for each copy: for methods that only read.
        """
        self._require(_NEW, _READY, _FAILED)
        chosen, where = self._indices(indices), f"{name}: an argument"
        arguments, keywords = tuple(plain_value(list(arguments), where)), plain_value(keywords, where)
        problem = self._engine.check_method(name)
        if problem is not None:
            raise EnvError(problem)
        if not at_reset:
            return self._engine.call(chosen, name, arguments, keywords)
        made = [name, list(arguments), keywords]
        self._set_next_options(chosen, [with_call(self._ledger.next_options[copy], made) for copy in chosen])
        return None

    def has_method(self, name: str) -> bool:
        """Whether `call` can call a method of this name."""
        return self._engine.check_method(name) is None

    def _set_next_options(self, copies: Sequence[int], options: Sequence[Any]) -> None:
        for copy, own in zip(copies, options):
            self._ledger.next_options[copy] = own
        self._engine.set_options(copies, options)

    def state_dict(self) -> dict[str, Any]:
        """What restores every copy: plain data, the actions since each copy's reset, and states from `get_state` where it is offered."""
        self._require(_NEW, _READY)
        state = self._ledger.state_dict([observation_hash(self._rows, copy) for copy in range(self.num_envs)])
        own_states = self._engine.get_states() if any(copy["episode"] >= 0 for copy in state["copies"]) else []
        for index, (copy, own) in enumerate(zip(state["copies"], own_states)):
            if "state" in own:
                copy["state"], copy["observation"] = own["state"], [array.copy() for array in shown_arrays(self._rows, index)]
            elif "why" in own:
                self._warn_once(f"{own['why']}; " + ("it is restored by replay instead" if self.takes_seeds else "it cannot be restored"))
        return {**state, "strayed": list(self._not_restored)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore every copy from its own state or by replay. A copy that cannot be restored begins a new episode, with a warning."""
        self._require(_NEW, _READY, _FAILED)
        self._phase = _FAILED  # until it has worked
        everyone = list(range(self.num_envs))
        # Before the ledger describes other episodes than those the copies are in: a worker may have to be rebuilt from it.
        self._engine.set_options(everyone, self._ledger.saved_options(state))
        replays = self._ledger.load_state_dict(state)
        with_state = {copy: saved for copy, saved in enumerate(state["copies"]) if saved.get("state") is not None}
        jobs = [job for job in replays if job.copy not in with_state and self.takes_seeds]
        results = dict(zip([job.copy for job in jobs], self._engine.replay(jobs)))  # (return, length) of each
        if with_state:
            self._engine.set_states([Restore(copy, int(own["seed"]), own["options"], own["state"]) for copy, own in with_state.items()])
        for copy, own in with_state.items():
            for array, seen in zip(shown_arrays(self._rows, copy), own["observation"], strict=True):
                array[...] = seen
            results[copy] = own["episode_return"], own["length"]
        self._not_restored = [str(text) for text in state.get("strayed", ())]
        self._restart_lost_copies(state["copies"], results)
        self._phase = _NEW if any(episode < 0 for episode in self._ledger.episodes) else _READY
        self._current_step()

    def _restart_lost_copies(self, saved: Sequence[Mapping[str, Any]], results: Mapping[int, tuple[float, int]]) -> None:
        """Begin new episodes in the copies that were not restored, and say why."""
        reasons: dict[str, list[int]] = {}
        for copy in range(self.num_envs):
            why = why_not_restored(saved[copy], results.get(copy), observation_hash(self._rows, copy), takes_seeds=self.takes_seeds)
            if why is not None:
                reasons.setdefault(why, []).append(copy)
        lost = sorted(copy for copies in reasons.values() for copy in copies)
        for why, copies in reasons.items():
            lanes = ", ".join(str(copy * self.lanes_per_copy) for copy in copies)
            which, what = ("lane", "a new episode") if len(copies) == 1 else ("lanes", "new episodes")
            warnings.warn(f"{which} {lanes} could not be restored ({why}); starting {what}", stacklevel=4)
        if lost:
            text = f"{len(lost)} of {self.num_envs} copies could not be restored at a resume and started new episodes"
            self._not_restored += [text] if text not in self._not_restored else []
            self._begin(lost)

    def _indices(self, indices: Sequence[int] | None) -> list[int]:
        chosen = list(range(self.num_envs)) if indices is None else [int(index) for index in indices]
        if len(set(chosen)) < len(chosen) or any(not 0 <= index < self.num_envs for index in chosen):
            raise EnvError(f"indices {chosen} must be different copies from 0 to {self.num_envs - 1}")
        return chosen

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=3)

    def _require(self, *phases: str) -> None:
        if self._phase not in phases:
            self._refuse()

    def _refuse(self) -> NoReturn:
        raise EnvError(_WHY_NOT[self._phase])

    def close(self) -> None:
        """Release everything, in bounded time; safe to call twice."""
        if self._phase != _CLOSED:
            self._phase = _CLOSED
            if not self.is_borrowed:
                self._engine.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # a constructor that failed, or an interpreter that is shutting down
            self.close()


def copy_row(rows: Tree, lane: int) -> Tree:
    """A copy of one lane's row, [*leaf]."""
    return map_tree(lambda array: array[lane].copy(), rows)


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
