"""Step 2 of 9, over worker processes: wakes them, waits for them, has those replaced that died or hung, and names one that raised."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from inchworm.config.sections import EnvConfig
from inchworm.core.errors import EnvError, WorkerError
from inchworm.core.spaces import space_from_dict
from inchworm.env.episodes import Ended, EpisodeLedger, Replay
from inchworm.env.local import Block, warn_of
from inchworm.env.make import Env, make_env
from inchworm.env.restore import Restore, pack_tree, unpack_tree
from inchworm.env.step_arrays import carve_rows, map_shared, open_shared
from inchworm.env.workers import messages as channel
from inchworm.env.workers.messages import Message, make_recipe, pack_replay
from inchworm.env.workers.process import LOOK_SECONDS, Gone, Waiter, WorkerProcess, end_processes
from inchworm.env.workers.rebuild import START_SECONDS, Exchange, Rebuilder

_AWAKE_SECONDS = 500e-6
"""How long the vector env waits for its workers' step before it sleeps; beyond this a wake-up is a small part of the step."""
_GRACE_SECONDS = 2.0
_GRACE_AFTER_ERROR = 0.25
"""After an error, workers get less time to close: the error must arrive within a second."""


class WorkerPool:
    """The copies of an environment in worker processes; the engine of `WorkerVectorEnv`."""

    def __init__(
        self,
        make: EnvConfig | Callable[[], Env],
        num_copies: int,
        num_workers: int,
        timeout: float,
        restarts: int = 0,
        *,
        rows_for: int | None = None,
        global_state: bool = False,
    ) -> None:
        """`rows_for` is for how many copies there are rows, if somebody else steps some beside the workers' `num_copies`."""
        self._timeout, self._owner = timeout, os.getpid()
        self._processes: list[WorkerProcess] = []
        self._by_descriptor: dict[int, WorkerProcess] = {}
        self._waiter = Waiter(_AWAKE_SECONDS)
        self._exchange: Exchange | None = None  # what is under way
        self._descriptor: int | None = None  # of the shared memory, for workers to come
        self._rebuilder = Rebuilder(make_recipe(make), timeout, restarts, global_state=global_state)
        self.rebuild_from: Callable[[EpisodeLedger], None] = self._rebuilder.know_episodes
        try:
            for index in range(num_workers):
                first, end = index * num_copies // num_workers, (index + 1) * num_copies // num_workers
                self._processes.append(WorkerProcess(index, first, end - first, timeout))
                self._watch(self._processes[-1])
            self._make_copies()
            self._share_memory(num_copies if rows_for is None else rows_for)
        except BaseException:
            self.close(_GRACE_AFTER_ERROR)
            raise
        self._step = Exchange(dict.fromkeys(self._processes, channel.STEP), is_step=True)

    def _watch(self, process: WorkerProcess) -> None:
        descriptor = process.connection.fileno()
        self._by_descriptor[descriptor] = process
        self._waiter.watch(descriptor)

    def _forget(self, process: WorkerProcess) -> None:
        descriptor = process.connection.fileno()
        del self._by_descriptor[descriptor]
        self._waiter.forget(descriptor)

    def _make_copies(self) -> None:
        messages = {process: self._rebuilder.setup(process) for process in self._processes}
        answers = self._ask(Exchange(messages, patience=max(self._timeout, START_SECONDS)))
        described = [message.header for message in answers.values()]
        if any(spaces != described[0] for spaces in described):
            raise EnvError("the copies in different workers have different spaces: all copies of an environment must be alike")
        self.observation_space, self.action_space = map(space_from_dict, described[0][:2])
        _, _, keeps_states, width, shared = described[0]
        self._keeps_states, self.lanes_per_copy = bool(keeps_states), int(width)
        self.global_state_space = None if shared is None else space_from_dict(shared)
        for process in self._processes:
            process.lanes_per_copy = self.lanes_per_copy
        self._rebuilder.know_spaces(described[0])

    def _share_memory(self, num_copies: int) -> None:
        carve = functools.partial(
            carve_rows,
            self.observation_space,
            self.action_space,
            num_copies * self.lanes_per_copy,
            num_copies,
            global_state_space=self.global_state_space,
        )
        self._descriptor = open_shared(carve()[1])
        self.rows, _ = carve(map_shared(self._descriptor))
        attach = channel.pack(channel.ATTACH, {"num_copies": num_copies})
        self._ask(Exchange(dict.fromkeys(self._processes, attach), descriptor=self._descriptor))
        self._rebuilder.know_memory(attach, self._descriptor, self.rows)

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin new episodes in some copies."""
        by_copy = dict(zip(indices, seeds))
        self._tell(channel.RESET, indices, lambda copies: {"copies": copies, "seeds": [by_copy[copy] for copy in copies]}, moves=indices)

    def set_options(self, indices: Sequence[int], options: Sequence[Any]) -> None:
        """What `env.reset` gets from the copies' next reset on."""
        by_copy = dict(zip(indices, options))
        self._tell(channel.OPTIONS, indices, lambda copies: {"copies": copies, "options": [by_copy[copy] for copy in copies]})

    def _tell(self, kind: bytes, indices: Sequence[int], header: Callable[[list[int]], Any], moves: Sequence[int] = ()) -> None:
        mine = {process: [copy for copy in indices if copy in process.copies] for process in self._processes}
        messages = {process: channel.pack(kind, header(copies)) for process, copies in mine.items() if copies}
        self._ask(Exchange(messages, moves=frozenset(moves)))

    def start(self) -> None:
        """Wake every worker for one step."""
        self._send(self._step)

    def finish(self) -> list[Ended]:
        """Wait for the step of all workers: the lanes that ended."""
        answers = self._gather(self._step).values()
        return [(lane, info) for message in answers if message.kind == channel.ENDED for lane, info in message.header]

    def replay(self, jobs: Sequence[Replay]) -> list[tuple[float, int]]:
        """Bring copies to where their episodes stood: (return, steps) of each."""
        mine = {process: [job for job in jobs if job.copy in process.copies] for process in self._processes}
        messages = {process: pack_replay(own) for process, own in mine.items() if own}
        answers = self._ask(Exchange(messages, moves=range(len(self.rows.seeds))))  # where copies stood before does not matter
        results = {}
        for process, message in answers.items():
            results.update({job.copy: (total, taken) for job, (total, taken) in zip(mine[process], message.header)})
        return [results[job.copy] for job in jobs]

    def get_states(self) -> list[dict[str, Any]]:
        """What the copies say of where they stand; nothing if they do not offer it."""
        if not self._keeps_states:
            return []
        answers = self._ask(Exchange(dict.fromkeys(self._processes, channel.pack(channel.GET_STATES))))
        return [own for message in answers.values() for own in unpack_tree(message.header, message.raw)]

    def set_states(self, jobs: Sequence[Restore]) -> None:
        """Begin episodes and put their copies where they stood."""
        mine = {process: [job for job in jobs if job.copy in process.copies] for process in self._processes}
        messages = {process: _pack_states(own) for process, own in mine.items() if own}
        self._ask(Exchange(messages, moves=frozenset(job.copy for job in jobs)))

    def _send(self, exchange: Exchange) -> None:
        if not self._processes:
            raise WorkerError("the env workers have ended after an earlier error; make a new vector env")
        if self._exchange is not None:
            raise WorkerError("an exchange with the env workers was interrupted; close this vector env and make a new one")
        self._exchange = exchange
        for process, data in exchange.messages.items():
            process.send(data, exchange.descriptor)

    def _ask(self, exchange: Exchange) -> dict[WorkerProcess, Message]:
        self._send(exchange)
        return self._gather(exchange)

    def _gather(self, exchange: Exchange) -> dict[WorkerProcess, Message]:
        """The answers that are owed, in the order of workers."""
        try:
            answers = self._answers(exchange, exchange.patience or self._timeout)
        except WorkerError:
            self.close(_GRACE_AFTER_ERROR)
            raise
        # Only now: if Ctrl-C arrived above, answers may be lost, and the next exchange must not begin.
        self._exchange = None
        return {process: answers[process] for process in self._processes if process in answers}

    def _answers(self, exchange: Exchange, patience: float) -> dict[WorkerProcess, Message]:
        """All workers are watched, also those that owe nothing: a death is noticed at once."""
        waiting = set(exchange.messages)
        answers: dict[WorkerProcess, Message] = {}
        deadline = time.monotonic() + patience
        while waiting:
            events = self._waiter.wait(min(deadline - time.monotonic(), LOOK_SECONDS))
            gone = [] if events else _gone(waiting, patience if time.monotonic() >= deadline else None)
            for descriptor, _ in events:
                process = self._by_descriptor[descriptor]
                try:
                    message = process.receive()
                except Gone:
                    gone.append(process)
                    continue
                if message.kind == channel.ALIVE:
                    deadline = time.monotonic() + patience
                else:
                    waiting.discard(process)
                    answers[process] = message
            for process in gone:
                answers |= self._replace(process, exchange)
                waiting.discard(process)
                deadline = time.monotonic() + patience  # nobody listened to the others meanwhile
        return answers

    def _replace(self, process: WorkerProcess, exchange: Exchange) -> dict[WorkerProcess, Message]:
        self._forget(process)
        answer = self._rebuilder.replace(process, exchange)
        self._watch(process)
        return {} if answer is None else {process: answer}

    def close(self, grace: float = _GRACE_SECONDS) -> None:
        """End all workers in bounded time."""
        if os.getpid() != self._owner:  # a forked copy of this process does not own them
            return
        processes, self._processes = self._processes, []
        descriptor, self._descriptor = self._descriptor, None
        try:
            warn_of(end_processes(processes, grace))
        finally:
            if descriptor is not None:
                os.close(descriptor)


def _pack_states(jobs: Sequence[Restore]) -> bytes:
    header, raw = pack_tree([job.state for job in jobs])
    columns = {"copies": [job.copy for job in jobs], "seeds": [job.seed for job in jobs], "options": [job.options for job in jobs]}
    return channel.pack(channel.SET_STATES, {**header, **columns}, raw)


def _gone(processes: Iterable[WorkerProcess], patience: float | None) -> list[WorkerProcess]:
    """Those that are gone without a word, in their order; all of them if the patience with them is over."""
    gone = []
    for process in sorted(processes, key=lambda process: process.index):
        try:
            process.look(patience)
        except Gone:
            gone.append(process)
    return gone


class HelpedPool:
    """The engine of a `WorkerVectorEnv` whose process helps: the first copies are the workers', the last ones its own."""

    def __init__(
        self,
        make: EnvConfig | Callable[[], Env],
        num_copies: int,
        num_workers: int,
        timeout: float,
        restarts: int = 0,
        *,
        global_state: bool = False,
    ) -> None:
        self._theirs = num_copies * num_workers // (num_workers + 1)  # copies of the workers
        options: dict[str, Any] = {"rows_for": num_copies, "global_state": global_state}
        self._pool = WorkerPool(make, self._theirs, num_workers, timeout, restarts, **options)
        self.rebuild_from = self._pool.rebuild_from
        try:
            factory = (lambda: make_env(make)) if isinstance(make, EnvConfig) else make
            self._block = Block(factory, self._theirs, num_copies - self._theirs, global_state=global_state)
            self._check_alike()
            self._block.attach(self._pool.rows)
        except BaseException:
            self._pool.close()
            raise
        self.observation_space, self.action_space, self.rows = self._block.observation_space, self._block.action_space, self._pool.rows
        self.lanes_per_copy = self._block.lanes_per_copy

    def _check_alike(self) -> None:
        parts = (self._block, self._pool)
        ours, theirs = ((part.observation_space, part.action_space, part.lanes_per_copy, part.global_state_space) for part in parts)
        if ours != theirs:
            self._block.close()
            raise EnvError(f"the copies here have the spaces {ours}, those in the workers {theirs}: all copies must be alike")

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin episodes in some copies."""
        theirs, ours = self._split(list(zip(indices, seeds)), indices)
        self._pool.reset(*_columns(theirs))
        self._block.reset(*_columns(ours))

    def start(self) -> None:
        """Wake the workers."""
        self._pool.start()

    def finish(self) -> list[Ended]:
        """Step our own copies while the workers step theirs, then wait for them."""
        try:
            ours = self._block.step()
        except Exception:
            with contextlib.suppress(WorkerError):  # the first error is the one that is told
                self._pool.finish()
            raise
        return self._pool.finish() + ours

    def set_options(self, indices: Sequence[int], options: Sequence[Any]) -> None:
        """Reset options from the copies' next reset on."""
        theirs, ours = self._split(list(zip(indices, options)), indices)
        self._pool.set_options(*_columns(theirs))
        self._block.set_options(*_columns(ours))

    def replay(self, jobs: Sequence[Replay]) -> list[tuple[float, int]]:
        """Bring copies to where their episodes stood."""
        theirs, ours = self._split(list(jobs), [job.copy for job in jobs])
        found = dict(zip([job.copy for job in theirs], self._pool.replay(theirs)))
        found |= {job.copy: self._block.replay(job) for job in ours}
        return [found[job.copy] for job in jobs]

    def get_states(self) -> list[dict[str, Any]]:
        """What the copies say of where they stand; nothing if they do not offer it."""
        return self._pool.get_states() + self._block.get_states() if self._block.keeps_states else []

    def set_states(self, jobs: Sequence[Restore]) -> None:
        """Put copies where they stood."""
        theirs, ours = self._split(list(jobs), [job.copy for job in jobs])
        self._pool.set_states(theirs)
        self._block.set_states(ours)

    def close(self) -> None:
        """End the workers and close our own."""
        self._pool.close()
        warn_of(self._block.close())

    def _split(self, items: list[Any], copies: Sequence[int]) -> tuple[list[Any], list[Any]]:
        """What is the workers' and what is ours."""
        return (
            [item for item, copy in zip(items, copies) if copy < self._theirs],
            [item for item, copy in zip(items, copies) if copy >= self._theirs],
        )


def _columns(pairs: list[tuple[int, Any]]) -> tuple[list[int], list[Any]]:
    return [copy for copy, _ in pairs], [value for _, value in pairs]
