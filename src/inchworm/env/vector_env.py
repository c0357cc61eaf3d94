"""env/vector_env."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol, Self

import numpy as np

from inchworm.core.errors import EnvError
from inchworm.core.spaces import Space
from inchworm.core.types import EndedEpisode, EnvStep, Tree
from inchworm.env.episodes import Ended, EpisodeLedger, Replay, plain_options
from inchworm.env.restore import add_own_states, observation_hash, set_own_states, why_astray
from inchworm.env.step_arrays import StepRows, map_tree
from inchworm.env.values import make_put

_NEW, _READY, _SENT, _FAILED, _CLOSED = "new", "ready", "sent", "failed", "closed"

_WHY_NOT = {
    _NEW: "the environments have not been reset; call reset() first",
    _READY: "no step has been sent; call send(actions) first",
    _SENT: "a step has been sent and not received; call recv() first",
    _FAILED: "the last call failed or was interrupted; call reset() for all lanes, or close()",
    _CLOSED: "the vector env is closed; make a new one",
}


class Engine(Protocol):
    """What moves the copies.

    A copy may have several lanes, one for each agent that may ever live in it. It then writes `rows.valid` and `rows.joined` in every
    reset and step, where an episode ended also `rows.final_valid`, and if the rows have a global state that, too, also the final one.
    Whose agent is not alive shows a legal observation, every action allowed. Its action is in the rows, and ignored.
    An agent that leaves while the episode goes on: without a global state it is terminated (or truncated) in that step; with one it is
    not, but its later rows are invalid and keep their rewards, and it gets its flag with the others when the copy's episode ends.
    Where a lane is truncated and the episode goes on, its row shows the agent's true last observation once.
    """

    observation_space: Space
    action_space: Space
    lanes_per_copy: int
    rows: StepRows

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin episodes in some copies; their first observations stand in the rows."""
        ...

    def start(self) -> None:
        """Begin a step with the actions that stand in the rows."""
        ...

    def finish(self) -> list[Ended]:
        """Wait for it: the step stands in the rows; where an episode ended, the next has begun with its `next_seeds`.

        Returns all lanes of the copies whose episode ended; an agent that leaves before ends no episode.
        """
        ...

    def set_options(self, indices: Sequence[int], options: Sequence[Any]) -> None:
        """Reset options from the copies' next reset on."""
        ...

    def replay(self, jobs: Sequence[Replay]) -> list[tuple[float, int]]:
        """Bring copies to where their episodes stood: (return, steps) of each; fewer steps if one ended on the way."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class LaneVectorEnv:
    """The `VectorEnv` contract over an engine."""

    def __init__(self, engine: Engine, *, seed: int = 0, first_copy: int = 0, max_replay_steps: int = 100_000) -> None:
        self._phase = _NEW
        self._flaws: list[str] = []  # of the environment
        self._strayed: list[str] = []  # of this run: what replay did not bring back
        self._told: set[str] = set()  # what was warned of
        self._engine = engine
        self._rows = rows = engine.rows
        self.observation_space, self.action_space = engine.observation_space, engine.action_space
        self.num_lanes = len(rows.rewards)
        self.num_envs = len(rows.seeds)
        self.lanes_per_copy = engine.lanes_per_copy
        self.global_state_space = rows.global_state_space
        self._put_actions = make_put(self.action_space)
        self._ledger = EpisodeLedger(
            rows,
            self.action_space,
            seed=seed,
            first_copy=first_copy,
            lanes_per_copy=engine.lanes_per_copy,
            max_replay_steps=max_replay_steps,
        )
        # What every step calls, looked up once.
        self._start, self._finish = engine.start, engine.finish
        self._record, self._add_rewards = self._ledger.record, self._ledger.add_rewards
        self._actions = rows.actions
        self._any_starts = False  # whether an entry of episode_starts is true
        self._episode_starts = np.zeros(self.num_lanes, np.bool_)  # [B]
        self._arrays = (rows.observations, rows.rewards, rows.terminated, rows.truncated, self._episode_starts, rows.valid)
        # The step in which nothing ended: always these arrays, so one object serves.
        self._quiet = EnvStep(*self._arrays, global_state=rows.global_state)

    @property
    def inexact(self) -> list[str]:
        """Why a resumed run may have other bits than an uninterrupted one, in sentences; empty if it has the same."""
        return [*self._flaws, *self._strayed]

    @property
    def exact(self) -> bool:
        """Whether `load_state_dict` brings every copy to where it stood, so that a resumed run has the bits of an uninterrupted one."""
        return not self.inexact

    def mark_inexact(self, why: str) -> None:
        """Write down that the environment cannot be brought to where it stood, for `inexact`."""
        self._flaws.append(why)

    def reset(self, seeds: Sequence[int] | None = None, indices: Sequence[int] | None = None) -> EnvStep:
        """Begin new episodes in the copies `indices` (all by default), with these seeds or with derived ones.

        Returns all lanes: rewards 0, `episode_starts` true where the observation opens an episode. With `indices=()` nothing
        begins, and the lanes are returned as they stand, which is how to look at them after `load_state_dict`.
        """
        self._require(_NEW, _READY, _FAILED)
        chosen = self._indices(indices)
        if self._phase != _READY and len(chosen) < self.num_envs:
            raise EnvError(f"{_WHY_NOT[self._phase]}: the first reset must be of all {self.num_envs} copies")
        if seeds is not None and len(seeds) != len(chosen):
            raise EnvError(f"reset got {len(seeds)} seeds for {len(chosen)} copies")
        if seeds is not None and any(not 0 <= int(seed) < 2**63 for seed in seeds):
            raise EnvError(f"seeds must be from 0 to 2**63 - 1; got {list(seeds)}")
        self._phase = _FAILED  # until it has worked
        self._begin(chosen, seeds)
        self._phase = _READY
        return self._standing()

    def _begin(self, copies: Sequence[int], seeds: Sequence[int] | None = None) -> None:
        used = [self._ledger.begin(copy, None if seeds is None else int(seeds[place])) for place, copy in enumerate(copies)]
        self._engine.reset(copies, used)

    def _standing(self) -> EnvStep:
        """All lanes as they stand, between steps."""
        self._rows.rewards[:] = 0.0
        self._rows.terminated[:] = self._rows.truncated[:] = False
        self._episode_starts[:] = np.repeat(self._ledger.lengths == 0, self.lanes_per_copy) | self._rows.joined
        self._any_starts = True
        return self._quiet

    def send(self, actions: Tree) -> None:
        """Start one step with actions [B, *act], already within bounds."""
        if self._phase is not _READY:
            self._refuse()
        self._put_actions(actions, self._actions)
        self._phase = _FAILED  # until it has worked
        self._record()
        self._start()
        self._phase = _SENT

    def recv(self) -> EnvStep:
        """Wait for the step that `send` started."""
        if self._phase is not _SENT:
            self._refuse()
        self._phase = _FAILED  # until it has worked
        ended = self._finish()
        self._add_rewards()
        if ended:
            step = self._with_ended(ended)
        else:
            step = self._quiet
            if self._any_starts:
                self._lower_starts()
        self._phase = _READY
        return step

    def step(self, actions: Tree) -> EnvStep:
        """`send`, then `recv`."""
        self.send(actions)
        return self.recv()

    def _lower_starts(self) -> None:
        """No episode begins in this step; where copies have several lanes an agent may join in any."""
        self._episode_starts[:] = self._rows.joined
        self._any_starts = self.lanes_per_copy > 1

    def _with_ended(self, ended: list[Ended]) -> EnvStep:
        rows, width = self._rows, self.lanes_per_copy
        if width == 1:
            np.logical_or(rows.terminated, rows.truncated, out=self._episode_starts)
        else:
            ended = self._of_teams(ended)
        self._any_starts = True
        records = []
        for lane, info in ended:
            copy = lane // width
            final = copy_row(rows.final_observations, lane)
            shared = () if self.global_state_space is None else copy_row(rows.final_global_state, copy)
            records.append(EndedEpisode(lane, int(rows.seeds[copy]), final, info, shared, bool(rows.final_valid[lane])))
        for copy in dict.fromkeys(record.lane // width for record in records):
            self._ledger.begin(copy)
        return EnvStep(*self._arrays, tuple(records), rows.global_state)

    def _of_teams(self, ended: list[Ended]) -> list[Ended]:
        """What ended, with the return of all lanes of the copy; a flag alone opens no episode, because an agent may die before its copy."""
        self._episode_starts[:] = self._rows.joined
        self._episode_starts[[lane for lane, _ in ended]] = True
        returns = self._ledger.episode_returns()
        return [(lane, {**info, "team_return": float(returns[lane // self.lanes_per_copy])}) for lane, info in ended]

    def set_reset_options(self, options: Mapping[str, Any] | None, indices: Sequence[int] | None = None) -> None:
        """Options that `env.reset` gets from the copies' next reset on; nothing changes in a running episode."""
        self._require(_NEW, _READY, _FAILED)
        plain, chosen = plain_options(options), self._indices(indices)
        for copy in chosen:
            self._ledger.next_options[copy] = plain
        self._engine.set_options(chosen, [plain] * len(chosen))

    def state_dict(self) -> dict[str, Any]:
        """Where every copy stands: plain data, the actions since each copy's reset, and the states that environments keep themselves."""
        self._require(_NEW, _READY)
        state = self._ledger.state_dict([observation_hash(self._rows, copy) for copy in range(self.num_envs)])
        for why in add_own_states(self._engine, self._rows, state["copies"]):
            if why not in self._told:
                warnings.warn(f"{why}; it is brought back by replay instead", stacklevel=2)
                self._told.add(why)
        return {**state, "strayed": list(self._strayed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring every copy to where `state` says, by its own state or by replay. One that does not get there begins a fresh episode."""
        self._require(_NEW, _READY, _FAILED)
        self._phase = _FAILED  # until it has worked
        everyone = list(range(self.num_envs))
        # Before the ledger speaks of other episodes than those the copies stand in: a worker may have to be rebuilt from it.
        self._engine.set_options(everyone, self._ledger.saved_options(state))
        jobs = [job for job in self._ledger.load_state_dict(state) if state["copies"][job.copy].get("state") is None]
        results = dict(zip([job.copy for job in jobs], self._engine.replay(jobs)))
        for copy in set_own_states(self._engine, self._rows, state["copies"]):
            results[copy] = state["copies"][copy]["episode_return"], state["copies"][copy]["length"]
        astray = [copy for copy in everyone if self._is_astray(copy, state["copies"][copy], results.get(copy))]
        self._strayed = [str(text) for text in state.get("strayed", ())]
        if astray:
            text = f"{len(astray)} of {self.num_envs} copies did not come back at a resume and began fresh episodes"
            self._strayed += [text] if text not in self._strayed else []
            self._begin(astray)
        self._phase = _NEW if any(episode < 0 for episode in self._ledger.episodes) else _READY
        self._standing()

    def _is_astray(self, copy: int, saved: Mapping[str, Any], result: tuple[float, int] | None) -> bool:
        why = why_astray(saved, result, observation_hash(self._rows, copy))
        if why is not None:
            warnings.warn(f"lane {copy * self.lanes_per_copy} is not where it was saved and begins a fresh episode: {why}", stacklevel=4)
        return why is not None

    def _indices(self, indices: Sequence[int] | None) -> list[int]:
        chosen = list(range(self.num_envs)) if indices is None else [int(index) for index in indices]
        if len(set(chosen)) < len(chosen) or any(not 0 <= index < self.num_envs for index in chosen):
            raise EnvError(f"indices {chosen} must be different copies from 0 to {self.num_envs - 1}")
        return chosen

    def _require(self, *phases: str) -> None:
        if self._phase not in phases:
            self._refuse()

    def _refuse(self) -> NoReturn:
        raise EnvError(_WHY_NOT[self._phase])

    def close(self) -> None:
        """Release everything, in bounded time; safe to call twice."""
        if self._phase != _CLOSED:
            self._phase = _CLOSED
            self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # a constructor that failed, or an interpreter that is shutting down
            self.close()


def copy_row(rows: Tree, lane: int) -> Tree:
    """A copy of one lane's row, [*leaf]."""
    return map_tree(lambda array: array[lane].copy(), rows)
