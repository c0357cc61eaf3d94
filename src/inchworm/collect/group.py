"""Several collectors as one: each has its own share of the env copies, and their rollouts are joined. Engines decide where they run.

Every collector makes the same numbered rollouts. What rollout k depends on is fixed by config and seed: its weights are those before
learn k minus the staleness. So it does not matter where a collector runs, how fast it is, or whether it has been replaced.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, cast

import numpy as np

from inchworm.collect.host import Answer, Collected, CollectorEnvs, Engine, Failed, Job, LocalEngine, Recipe, SavedState, Share
from inchworm.config.sections import TrainingConfig
from inchworm.core.errors import ConfigError, WorkerError, WorkerRestartWarning
from inchworm.core.protocols import Actor, Closes, Policy, VectorEnv
from inchworm.core.types import RECENT_EPISODES, EpisodeRecord, Weights
from inchworm.env.workers.process import WorkerDied, WorkerTraceback
from inchworm.env.workers.rebuild import RestartBudget
from inchworm.policy.composite import CompositePolicy
from inchworm.policy.file import fingerprint
from inchworm.rollout.rollout import Rollout, combine_rollouts

SLOW_FACTOR, SLOW_SECONDS, SLOW_ROLLOUTS = 2.0, 0.5, 3
"""A collector is reported as slow if it takes this many times as long as the median and this much longer, as many times in a row."""
WAIT_SECONDS = 30.0
"""How long a rollout is waited for before that is reported; then twice as long, and so on."""
_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class _Weights:
    """Weights that some rollouts are collected with."""

    arrays: Weights
    version: int
    fingerprint: int
    shared: Any


@dataclass(slots=True)
class _Seat:
    """A collector as the group knows it."""

    share: Share
    link: Any
    budget: RestartBudget
    results: dict[int, Collected] = field(default_factory=dict)
    states: dict[int, Any] = field(default_factory=lambda: {0: None})  # before these rollouts; None is that of a new collector
    asked_state: int | None = None
    waiting: int = 0  # answers that are still to come
    since: float = 0.0  # when it was last heard of, or first asked
    slow: int = 0  # rollouts in a row that took long

    def newest_before(self, number: int) -> int:
        """The newest known state from which a rollout can be collected."""
        return max(known for known in self.states if known <= number)


class CollectorGroup(Closes):
    """N collectors with lanes of their own, whose rollouts are joined side by side into one.

    `policy` acts, with the weights of `follows` (itself by default) as they are when `collect` is called; with a `staleness` they are
    those of as many calls earlier, because rollouts are then begun ahead, while their predecessors are learned from. Only rollouts of
    `steps_ahead` steps are begun ahead, or of any number if that is None. A collector that dies, or does not answer within `timeout`
    seconds, is replaced from its saved state and collects the same rollout again, each at most `restarts` times in ten minutes.
    """

    def __init__(
        self,
        envs: CollectorEnvs,
        policy: Actor,
        engine: Engine,
        *,
        num_collectors: int,
        seed: int = 0,
        sequence_length: int = 1,
        staleness: int = 0,
        steps_ahead: int | None = None,
        follows: Actor | None = None,
        timeout: float = 600.0,
        restarts: int = 10,
        threads: int = 1,
    ) -> None:
        if not 1 <= num_collectors <= envs.num_envs:
            raise ConfigError(f"num_collectors={num_collectors} must be from 1 to {envs.num_envs}, the number of env copies")
        if staleness < 0:
            raise ConfigError(f"staleness={staleness} must be 0 or more")
        self.vector_env, self._policy, self._engine = cast(VectorEnv, envs), policy, engine
        if isinstance(policy, CompositePolicy) and envs.agent_spaces:
            policy.fit(self.vector_env)
        self.staleness, self.env_steps, self.episodes, self.env_seconds = staleness, 0, 0, 0.0
        self.recent: deque[EpisodeRecord] = deque(maxlen=RECENT_EPISODES)
        self._envs, self._steps_ahead, self._timeout = envs, steps_ahead, timeout
        self._trained = policy if isinstance(policy, Policy) else None
        self.follows = follows if isinstance(follows, Policy) else self._trained
        self._recipe = Recipe(envs.make, policy, seed, sequence_length, threads, engine.state_share, envs.spec)
        ends = [index * envs.num_envs // num_collectors for index in range(num_collectors + 1)]
        self._shares = [
            Share(index, first, end - first, envs.lanes_per_copy) for index, (first, end) in enumerate(itertools.pairwise(ends))
        ]
        self._restarts = restarts
        self._seats: list[_Seat] = []
        self._closed = False
        self._tickets = self._next = self._issued = 0  # jobs ever made; the next rollout to return; the first that is not begun yet
        self._jobs: dict[int, tuple[Job, _Weights | None]] = {}
        self._weights: _Weights | None = None
        self._acting = 0  # fingerprint of the weights of the actor here

    @property
    def num_collectors(self) -> int:
        """Number of collectors."""
        return len(self._shares)

    @property
    def policy(self) -> Actor:
        """An actor in this process, with the current weights of the policy that is followed."""
        weights = self._current_weights()
        if weights is not None and self._trained is not self.follows and weights.fingerprint != self._acting:
            assert self._trained is not None
            self._trained.set_weights(weights.arrays)
            self._acting = weights.fingerprint
        return self._policy

    @property
    def share_collected(self) -> float:
        """How much of the running or last `collect` is done, 0 to 1. Another thread may ask."""
        done = sum(self._next in seat.results for seat in list(self._seats))
        return done / len(self._shares)

    @property
    def processes(self) -> list[str]:
        """Where each collector runs."""
        self._start()
        return [self._engine.where(seat.link) for seat in self._seats]

    def collect(self, num_steps: int) -> Rollout:
        """The next `num_steps` steps of every lane."""
        if num_steps < 1:
            raise ConfigError(f"collect needs 1 step or more, not {num_steps}")
        self._start()
        number = self._next
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._withdraw)  # also on Ctrl-C: the next call collects the same rollout again
            if number < self._issued and self._jobs[number][0].num_steps != num_steps:
                self._withdraw()
            ahead = self.staleness if self._steps_ahead in (None, num_steps) else 0
            if self._issued <= number + ahead:
                weights = self._current_weights()
                for each in range(self._issued, number + ahead + 1):
                    self._issue(each, num_steps, weights)
            self._wait(lambda seat: number in seat.results, f"rollout {number}")
            on_error.pop_all()
        results = [seat.results.pop(number) for seat in self._seats]
        self._report_slow([result.seconds for result in results])
        self._next = number + 1
        for seat in self._seats:
            oldest = seat.newest_before(self._next)
            seat.states = {known: state for known, state in seat.states.items() if known >= oldest}
        oldest = min(min(seat.states) for seat in self._seats)
        self._jobs = {known: job for known, job in self._jobs.items() if known >= oldest}
        rollout = results[0].rollout if len(results) == 1 else combine_rollouts([result.rollout for result in results])
        self.env_steps += sum(result.env_steps for result in results)
        self.episodes += sum(result.episodes for result in results)
        self.env_seconds += max(result.env_seconds for result in results)
        self.recent.extend(rollout.episodes)
        return rollout

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Act with these weights in the rollouts that are begun from now on, until a policy that is followed changes."""
        if self._trained is None:
            raise ConfigError(f"{type(self._policy).__name__} is an actor without weights; it cannot be given any")
        self._trained.set_weights(weights)
        self.follows = self._trained

    def _current_weights(self) -> _Weights | None:
        """The weights of the followed policy, shared with the collectors if they have changed."""
        if self.follows is None:
            return None
        arrays = self.follows.get_weights()
        found, version = fingerprint(arrays), int(self.follows.policy_version)
        if self._weights is None or (self._weights.fingerprint, self._weights.version) != (found, version):
            self._weights = _Weights(arrays, version, found, self._engine.share(arrays))
        return self._weights

    def _start(self) -> None:
        """Start the collectors if they do not run yet."""
        if self._closed:
            raise WorkerError("the collectors are closed, or have ended after an earlier error; create new ones")
        while len(self._seats) < len(self._shares):
            share = self._shares[len(self._seats)]
            # Of its own, because the loss of a node is that of many collectors at once.
            budget = RestartBudget(self._restarts, "collect.restarts")
            self._seats.append(_Seat(share, self._engine.start(self._recipe, share), budget, since=time.monotonic()))

    def _issue(self, number: int, num_steps: int, weights: _Weights | None) -> None:
        """Ask every collector for a rollout."""
        self._tickets += 1
        changes, self._envs.changes = tuple(self._envs.changes), []
        version = 0 if weights is None else weights.version
        self._jobs[number] = (Job(self._tickets, number, num_steps, self._next, version, changes), weights)
        self._issued = number + 1
        for seat in self._seats:
            self._send(seat, number)

    def _send(self, seat: _Seat, number: int) -> None:
        job, weights = self._jobs[number]
        self._expect(seat)
        self._engine.collect(seat.link, job, None if weights is None else weights.shared)

    def _expect(self, seat: _Seat) -> None:
        if not seat.waiting:
            seat.since = time.monotonic()
        seat.waiting += 1

    def _withdraw(self) -> None:
        """Take back what was begun ahead, so that it can be collected again, with other steps or after an error."""
        taken_back = [self._jobs[number][0].changes for number in range(self._next, self._issued)]
        self._envs.changes = [change for changes in taken_back for change in changes] + self._envs.changes
        self._issued = self._next
        self._jobs = {number: job for number, job in self._jobs.items() if number < self._next}
        if isinstance(self._engine, LocalEngine):
            self._engine.forget()
        for seat in self._seats:
            seat.results, seat.asked_state = {}, None
            seat.states = {number: state for number, state in seat.states.items() if number <= self._next}

    def _wait(self, done: Callable[[_Seat], bool], what: str) -> None:
        """Take answers until every collector has what is waited for; replace those that die or hang meanwhile."""
        began, report = time.monotonic(), WAIT_SECONDS
        while missing := [seat for seat in self._seats if not done(seat)]:
            seats = {id(seat.link): seat for seat in self._seats}
            answers = self._engine.wait([seat.link for seat in self._seats], _POLL_SECONDS)
            for link, answer in answers:
                self._take(seats[id(link)], answer)
            if answers:
                continue
            now = time.monotonic()
            for seat in missing:
                if now - seat.since > self._timeout:
                    self._engine.kill(
                        seat.link, f"gave no answer within {self._timeout:g} s; raise collect.timeout if a rollout takes longer"
                    )
                    seat.since = now
            if now - began > report:
                late = ", ".join(f"{seat.share} in {self._engine.where(seat.link)}" for seat in missing[:3])
                more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
                warnings.warn(f"waiting for {what} of {late}{more} for {now - began:.0f} s", stacklevel=4)
                report *= 2

    def _take(self, seat: _Seat, answer: Answer) -> None:
        """Keep an answer, or replace a collector that has ended."""
        if isinstance(answer, WorkerDied):
            self._replace(seat, str(answer))
            return
        if isinstance(answer, Failed):
            self.close()
            raise WorkerError(f"{seat.share}: {answer.text}") from (WorkerTraceback(answer.traceback) if answer.traceback else None)
        seat.waiting, seat.since = max(0, seat.waiting - 1), time.monotonic()
        if isinstance(answer, SavedState):
            seat.states[answer.number] = answer.state
            seat.asked_state = None
            return
        for number in range(self._next, self._issued):
            if self._jobs[number][0].ticket == answer.ticket:  # else it was withdrawn, or is known
                seat.results[number] = answer
                if answer.state is not None:
                    seat.states[number + 1] = answer.state

    def _replace(self, seat: _Seat, reason: str) -> None:
        """Start another collector from the newest known state, and repeat what has no answer or led from that state to it."""
        began, where = time.monotonic(), self._engine.where(seat.link)
        self._engine.drop(seat.link)
        try:
            seat.budget.spend(seat.share, reason, f", in {where}", 0)
        except WorkerError:
            self._seats.remove(seat)
            self.close()
            raise
        seat.link, seat.waiting = self._engine.start(self._recipe, seat.share), 0
        first = seat.newest_before(self._next)
        if seat.states[first] is not None:
            self._engine.load(seat.link, first, seat.states[first])
        seat.results = {}
        for number in range(first, self._issued):
            self._send(seat, number)
        if seat.asked_state is not None:
            self._expect(seat)
            self._engine.ask_state(seat.link, seat.asked_state)
        repeated = self._issued - first
        warnings.warn(
            f"{seat.share} in {where} {reason}; it is replaced and repeats {repeated} rollout{'' if repeated == 1 else 's'} "
            f"({seat.budget.left} restarts left within ten minutes, {time.monotonic() - began:.2f} s)",
            WorkerRestartWarning,
            stacklevel=5,
        )

    def _report_slow(self, seconds: Sequence[float]) -> None:
        """Warn of a collector that has taken much longer than the others for several rollouts."""
        usual = median(seconds) if len(seconds) > 2 else min(seconds)
        for seat, own in zip(self._seats, seconds, strict=False):
            is_slow = own > SLOW_FACTOR * usual and own > usual + SLOW_SECONDS
            seat.slow = seat.slow + 1 if is_slow else 0
            if seat.slow == SLOW_ROLLOUTS:
                warnings.warn(
                    f"{seat.share} in {self._engine.where(seat.link)} is slow: it took {own:.1f} s for a rollout, the others "
                    f"{usual:.1f} s; all wait for it",
                    stacklevel=4,
                )

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next `collect` depends on besides the weights, and the old weights of rollouts that were begun ahead."""
        self._start()
        number = self._next
        for seat in self._seats:
            if seat.states.get(number) is None:
                seat.asked_state = number
                self._expect(seat)
                self._engine.ask_state(seat.link, number)
        self._wait(lambda seat: seat.states.get(number) is not None, "the state")
        begun = [self._jobs[each] for each in range(number, self._issued)]
        kept = {id(weights): weights for _, weights in begun if weights is not None}
        places = list(kept)
        return {
            "collectors": [seat.states[number] for seat in self._seats],
            "env_steps": self.env_steps,
            "episodes": self.episodes,
            "recent": [[e.episode_return, e.length, e.lane, e.seed, dict(e.info)] for e in self.recent],
            "weights": [{"arrays": weights.arrays, "version": weights.version} for weights in kept.values()],
            "begun": [
                {
                    "num_steps": job.num_steps,
                    "weights": -1 if weights is None else places.index(id(weights)),
                    "changes": [list(change) for change in job.changes],
                }
                for job, weights in begun
            ],
            "changes": [list(change) for change in self._envs.changes],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, or a single `RolloutCollector`'s. What was begun ahead is begun again."""
        states = state.get("collectors", [state])
        if len(states) != len(self._shares):
            raise ConfigError(
                f"the state is of {len(states)} collector{'s' if len(states) > 1 else ''}, here are {len(self._shares)}; "
                f"set collect.num_collectors={len(states)}"
            )
        self._start()
        self._withdraw()
        self._envs.changes = [(options, copies) for options, copies in state.get("changes", ())]
        self.env_steps, self.episodes = int(state["env_steps"]), int(state["episodes"])
        records = (EpisodeRecord(total, length, lane, seed, info) for total, length, lane, seed, info in state["recent"])
        self.recent = deque(records, maxlen=RECENT_EPISODES)
        self._next = self._issued = self._issued + 1  # a number that no answer under way has
        self._jobs = {}
        for seat, own in zip(self._seats, states, strict=False):
            seat.states = {self._next: own}
            self._engine.load(seat.link, self._next, own)
        weights = []
        for saved in state.get("weights", ()):
            arrays = {name: np.asarray(array) for name, array in saved["arrays"].items()}
            weights.append(_Weights(arrays, int(saved["version"]), fingerprint(arrays), self._engine.share(arrays)))
        later = self._envs.changes
        for begun in state.get("begun", ()):
            self._envs.changes = [(options, copies) for options, copies in begun["changes"]]
            self._issue(self._issued, int(begun["num_steps"]), weights[begun["weights"]] if begun["weights"] >= 0 else None)
        self._envs.changes = later

    def close(self) -> None:
        """End all collectors, in bounded time."""
        if not self._closed:
            self._closed = True
            seats, self._seats = self._seats, []
            self._engine.close([seat.link for seat in seats])

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # a constructor that failed, or an interpreter that is shutting down
            self.close()


def make_group(envs: CollectorEnvs, policy: Actor, config: TrainingConfig, *, sequence_length: int, follows: Actor) -> CollectorGroup:
    """The collectors of a run, on the engine of its config."""
    collect = config.collect
    engine: Engine = LocalEngine()
    if collect.engine == "async":
        from inchworm.collect.async_collector import ProcessEngine

        engine = ProcessEngine()
    elif collect.engine == "ray":
        from inchworm.collect.ray_collector import RayEngine

        engine = RayEngine.of(collect)
    return CollectorGroup(
        envs,
        policy,
        engine,
        num_collectors=collect.num_collectors,
        seed=config.run.seed,
        sequence_length=sequence_length,
        staleness=0 if collect.staleness == "auto" else collect.staleness,
        steps_ahead=config.ppo.rollout_steps,
        follows=follows,
        timeout=collect.timeout,
        restarts=collect.restarts,
        threads=config.run.threads,
    )
