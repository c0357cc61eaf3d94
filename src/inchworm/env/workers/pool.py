"""Step 2 of 9, over worker processes: start their step, wait for it, replace workers that died or hung, report one that raised."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import cloudpickle
import gymnasium as gym

from inchworm.config.sections import EnvConfig
from inchworm.core.errors import EnvError, WorkerError
from inchworm.core.padding import AgentSpaces
from inchworm.core.spaces import space_from_dict
from inchworm.env.episodes import Ended, EpisodeLedger, Replay
from inchworm.env.local import LocalCopies, warn_of
from inchworm.env.make import make_env
from inchworm.env.restore import Env, Restore, pack_tree, unpack_tree
from inchworm.env.step_arrays import allocate_rows, map_shared, open_shared
from inchworm.env.workers import messages
from inchworm.env.workers.messages import Message
from inchworm.env.workers.process import POLL_SECONDS, Waiter, WorkerDied, WorkerProcess, end_processes
from inchworm.env.workers.rebuild import START_SECONDS, Exchange, Rebuilder

T = TypeVar("T")

_SPIN_SECONDS = 500e-6
"""How long the vector env spins for its workers' step before it blocks; beyond this a wake-up is a small part of the step."""
_GRACE_SECONDS = 2.0
_GRACE_AFTER_ERROR = 0.25
"""After an error workers get less time to close: the error must be reported within a second."""


class WorkerPool:
    """The engine of `WorkerVectorEnv`: copies in worker processes and, with `help_workers`, the last share of them in this process."""

    def __init__(
        self,
        make: EnvConfig | Callable[[], Env],
        num_copies: int,
        num_workers: int,
        timeout: float,
        restarts: int = 0,
        *,
        help_workers: bool = False,
        global_state: bool = False,
        keep_infos: Sequence[str] = (),
    ) -> None:
        self._timeout, self._owner = timeout, os.getpid()
        self._workers: list[WorkerProcess] = []
        self._by_descriptor: dict[int, WorkerProcess] = {}
        self._waiter = Waiter(_SPIN_SECONDS)
        self._exchange: Exchange | None = None  # the one in progress
        self._descriptor: int | None = None  # of the shared memory, for workers that are started later
        self._reads: dict[str, Any] = {"global_state": global_state, "keep_infos": list(keep_infos)}
        self._rebuilder = Rebuilder(pack_factory(make), timeout, restarts, self._reads)
        self._local: LocalCopies | None = None
        first_local = num_copies * num_workers // (num_workers + 1) if help_workers else num_copies
        self._local_copies = range(first_local, num_copies)
        try:
            for index in range(num_workers):
                first, end = index * first_local // num_workers, (index + 1) * first_local // num_workers
                self._workers.append(WorkerProcess(index, first, end - first, timeout))
                self._watch(self._workers[-1])
            self._create_copies(make, num_copies)
        except BaseException:
            self.close(_GRACE_AFTER_ERROR)
            raise
        self._step = Exchange(dict.fromkeys(self._workers, messages.STEP), is_step=True)

    def _watch(self, worker: WorkerProcess) -> None:
        descriptor = worker.connection.fileno()
        self._by_descriptor[descriptor] = worker
        self._waiter.register(descriptor)

    def _create_copies(self, make: EnvConfig | Callable[[], Env], num_copies: int) -> None:
        """Let every process create its share of the copies, and map the shared memory that they write to."""
        setups = {worker: self._rebuilder.setup(worker) for worker in self._workers}
        answers = self._ask(Exchange(setups, timeout=max(self._timeout, START_SECONDS)))
        described = [message.header for message in answers.values()]
        if any(spaces != described[0] for spaces in described):
            raise EnvError("the copies in different workers have different spaces: all copies of an environment must be alike")
        observations, actions, keeps_states, width, turn_based, global_state, agents, agent_spaces = described[0]
        self.observation_space, self.action_space = space_from_dict(observations), space_from_dict(actions)
        self._keeps_states, self.lanes_per_copy, self.turn_based = bool(keeps_states), int(width), bool(turn_based)
        self.global_state_space = None if global_state is None else space_from_dict(global_state)
        self.agents: tuple[str, ...] = tuple(agents)
        self.agent_spaces: tuple[AgentSpaces, ...] = tuple(map(AgentSpaces.from_dict, agent_spaces))
        for worker in self._workers:
            worker.lanes_per_copy = self.lanes_per_copy
        self._rebuilder.spaces = described[0]
        allocate = functools.partial(
            allocate_rows,
            self.observation_space,
            self.action_space,
            num_copies * self.lanes_per_copy,
            num_copies,
            global_state_space=self.global_state_space,
            keep_infos=self._reads["keep_infos"],
        )
        self._descriptor = open_shared(allocate()[1])
        self.rows, _ = allocate(map_shared(self._descriptor))
        attach = messages.pack(messages.ATTACH, {"num_copies": num_copies})
        self._ask(Exchange(dict.fromkeys(self._workers, attach), descriptor=self._descriptor))
        self._rebuilder.attach, self._rebuilder.rows = (attach, self._descriptor), self.rows
        if self._local_copies:
            factory = functools.partial(make_env, make) if isinstance(make, EnvConfig) else make
            own = self._local_copies
            self._local = local = LocalCopies(factory, own.start, len(own), **self._reads)
            ours, theirs = (
                (part.observation_space, part.action_space, part.lanes_per_copy, part.global_state_space) for part in (local, self)
            )
            if ours != theirs:
                raise EnvError(f"the copies here have the spaces {ours}, those in the workers {theirs}: all copies must be alike")
            local.attach(self.rows)

    def rebuild_from(self, ledger: EpisodeLedger) -> None:
        """Rebuild dead workers from the episodes in this ledger."""
        self._rebuilder.ledger = ledger

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin new episodes in some copies."""
        theirs, ours = self._split(indices, seeds)
        resets = {worker: messages.pack(messages.RESET, {"copies": copies, "seeds": own}) for worker, (copies, own) in theirs.items()}
        self._ask(Exchange(resets, moves=frozenset(indices)))
        if self._local is not None:
            self._local.reset(*ours)

    def set_options(self, indices: Sequence[int], options: Sequence[Any]) -> None:
        """Set what `env.reset` gets from the copies' next reset on."""
        theirs, ours = self._split(indices, options)
        changes = {worker: messages.pack(messages.OPTIONS, {"copies": copies, "options": own}) for worker, (copies, own) in theirs.items()}
        self._ask(Exchange(changes))
        if self._local is not None:
            self._local.set_options(*ours)

    def check_method(self, name: str) -> str | None:
        """Why the copies have no such method; None if they have."""
        first = self._workers[:1]  # all copies are alike
        asked = messages.pack(messages.CALL, {"copies": None, "name": name})
        answers = self._ask(Exchange(dict.fromkeys(first, asked)))
        return next((message.header["problem"] for message in answers.values()), None)

    def call(self, indices: Sequence[int], name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> list[Any]:
        """Call a method of some copies now; returns their results."""
        theirs, (our_copies, _) = self._split(indices, indices)
        how = {"name": name, "arguments": list(arguments), "keywords": dict(keywords)}
        calls = {worker: messages.pack(messages.CALL, {"copies": copies, **how}) for worker, (copies, _) in theirs.items()}
        results: dict[int, Any] = {}
        for worker, message in self._ask(Exchange(calls)).items():
            if message.header["problem"] is not None:
                raise EnvError(message.header["problem"])
            results |= dict(zip(theirs[worker][0], message.header["results"]))
        if self._local is not None:
            results |= dict(zip(our_copies, self._local.call(our_copies, name, arguments, keywords)))
        return [results[copy] for copy in indices]

    def start(self) -> None:
        """Start the step of every worker."""
        self._send(self._step)

    def finish(self) -> list[Ended]:
        """Step this process's share, then wait for the workers; return the lanes that ended."""
        ours: list[Ended] = []
        if self._local is not None:
            try:
                ours = self._local.step()
            except Exception:
                with contextlib.suppress(WorkerError):  # the first error is the one to report
                    self._gather(self._step)
                raise
        answers = self._gather(self._step).values()
        return [(lane, info) for message in answers if message.kind == messages.ENDED for lane, info in message.header] + ours

    def replay(self, jobs: Sequence[Replay]) -> list[tuple[float, int]]:
        """Replay episodes; return (return, steps) of each."""
        theirs, (our_copies, ours) = self._split([job.copy for job in jobs], jobs)
        replays = {worker: messages.pack(messages.REPLAY, *pack_tree(own)) for worker, (_, own) in theirs.items()}
        answers = self._ask(Exchange(replays, moves=range(len(self.rows.seeds))))  # no copy's earlier episode matters any more
        results = {} if self._local is None else dict(zip(our_copies, self._local.replay(ours)))
        for worker, message in answers.items():
            results |= {copy: (total, taken) for copy, (total, taken) in zip(theirs[worker][0], message.header)}
        return [results[job.copy] for job in jobs]

    def get_states(self) -> list[dict[str, Any]]:
        """Return each copy's own state, if the environment offers one."""
        if not self._keeps_states:
            return []
        answers = self._ask(Exchange(dict.fromkeys(self._workers, messages.pack(messages.GET_STATES))))
        states = [state for message in answers.values() for state in unpack_tree(message.header, message.raw)]
        return states + (self._local.get_states() if self._local is not None else [])

    def set_states(self, jobs: Sequence[Restore]) -> None:
        """Begin episodes and restore the states that the environments offered."""
        theirs, (_, ours) = self._split([job.copy for job in jobs], jobs)
        restores = {worker: messages.pack(messages.SET_STATES, *pack_tree(own)) for worker, (_, own) in theirs.items()}
        self._ask(Exchange(restores, moves=frozenset(job.copy for job in jobs)))
        if self._local is not None:
            self._local.set_states(ours)

    def _split(
        self, copies: Sequence[int], values: Sequence[T]
    ) -> tuple[dict[WorkerProcess, tuple[list[int], list[T]]], tuple[list[int], list[T]]]:
        """Split copies and their values into the shares of the workers that have any, and the share of this process."""

        def share(own: range) -> tuple[list[int], list[T]]:
            pairs = [(copy, value) for copy, value in zip(copies, values) if copy in own]
            return [copy for copy, _ in pairs], [value for _, value in pairs]

        shares = {worker: share(worker.copies) for worker in self._workers}
        return {worker: own for worker, own in shares.items() if own[0]}, share(self._local_copies)

    def _ask(self, exchange: Exchange) -> dict[WorkerProcess, Message]:
        self._send(exchange)
        return self._gather(exchange)

    def _send(self, exchange: Exchange) -> None:
        if not self._workers:
            raise WorkerError("the env workers have ended after an earlier error; create a new vector env")
        if self._exchange is not None:
            raise WorkerError("an exchange with the env workers was interrupted; close this vector env and create a new one")
        self._exchange = exchange
        for worker, data in exchange.messages.items():
            worker.send(data, exchange.descriptor)

    def _gather(self, exchange: Exchange) -> dict[WorkerProcess, Message]:
        """Wait for the answers to an exchange, in the order of workers; a worker that dies meanwhile is replaced.

        All workers are watched, also those without a part in the exchange, so that a death is noticed at once.
        """
        timeout = exchange.timeout or self._timeout
        waiting = set(exchange.messages)
        answers: dict[WorkerProcess, Message] = {}
        deadline = time.monotonic() + timeout
        try:
            while waiting:
                events = self._waiter.wait(min(deadline - time.monotonic(), POLL_SECONDS))
                dead: list[WorkerProcess] = []
                for descriptor, _ in events:
                    worker = self._by_descriptor[descriptor]
                    try:
                        message = worker.receive()
                    except WorkerDied:
                        dead.append(worker)
                        continue
                    if message.kind in (messages.ALIVE, messages.WARNING):
                        deadline = time.monotonic() + timeout
                    else:
                        waiting.discard(worker)
                        answers[worker] = message
                if not events:
                    overdue = timeout if time.monotonic() >= deadline else None
                    dead = [worker for worker in self._workers if worker in waiting and worker.has_died(overdue=overdue)]
                for worker in dead:
                    descriptor = worker.connection.fileno()
                    del self._by_descriptor[descriptor]
                    self._waiter.unregister(descriptor)
                    answer = self._rebuilder.replace(worker, exchange)
                    self._watch(worker)
                    waiting.discard(worker)
                    if answer is not None:
                        answers[worker] = answer
                    deadline = time.monotonic() + timeout  # the others' answers were not read meanwhile
        except WorkerError:
            self.close(_GRACE_AFTER_ERROR)
            raise
        # Only now: if Ctrl-C arrived above, answers may be lost, and the next exchange must not begin.
        self._exchange = None
        return {worker: answers[worker] for worker in self._workers if worker in answers}

    def close(self, grace: float = _GRACE_SECONDS) -> None:
        """End all workers in bounded time and close this process's share."""
        if os.getpid() != self._owner:  # a forked child does not own them
            return
        workers, self._workers = self._workers, []
        descriptor, self._descriptor = self._descriptor, None
        local, self._local = self._local, None
        try:
            warn_of(end_processes(workers, grace))
        finally:
            if descriptor is not None:
                os.close(descriptor)
        if local is not None:
            local.close()


def pack_factory(make: EnvConfig | Callable[[], Env]) -> bytes:
    """Pickle what workers create environments from, with the Gymnasium spec of an id that the user's script registered."""
    specs = []
    if isinstance(make, EnvConfig):
        spec = gym.registry.get(make.id)
        specs = [spec] if spec is not None and not str(spec.entry_point).startswith(("gymnasium.", "ale_py.")) else []
        make = functools.partial(make_env, make)
    try:
        return cloudpickle.dumps((make, specs))  # type: ignore[no-any-return]
    except Exception as error:  # pickling runs the user's code, which may raise anything
        raise EnvError(
            f"the environment factory cannot be sent to worker processes ({type(error).__name__}: {error}); "
            "use env.num_workers=0, or a function that creates everything it needs itself"
        ) from error
