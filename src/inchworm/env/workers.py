"""Step 2 of 9, over worker processes: wakes them, waits for them, and names the one that raised, died or hung."""

from __future__ import annotations

import mmap
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import cloudpickle
import gymnasium as gym

from inchworm.config import EnvConfig
from inchworm.env import channel
from inchworm.env.block import warn_of
from inchworm.env.build import Env, make_env
from inchworm.env.channel import Message
from inchworm.env.engine import Ended, Replay
from inchworm.env.memory import carve_rows, open_shared, tree_leaves
from inchworm.env.process import WorkerProcess, end_processes
from inchworm.env.waiting import Waiter
from inchworm.errors import EnvError, WorkerError
from inchworm.spaces import space_from_dict

_START_SECONDS = 60.0
"""The least time that a worker has to start: an interpreter and its imports, perhaps on a busy machine."""
_AWAKE_SECONDS = 500e-6
"""How long the vector env waits for its workers' step before it sleeps; beyond this a wake-up is a small part of the step."""
_GRACE_SECONDS = 2.0
_GRACE_AFTER_ERROR = 0.25
"""After an error, workers get less time to close: the error must arrive within a second."""


class WorkerPool:
    """The copies of an environment in worker processes; the engine of `WorkerVectorEnv`."""

    lanes_per_copy = 1

    def __init__(
        self, make: EnvConfig | Callable[[], Env], num_copies: int, num_workers: int, timeout: float, *, rows_for: int | None = None
    ) -> None:
        """`rows_for` is for how many copies there are rows, if somebody else steps some beside the workers' `num_copies`."""
        self._timeout, self._owner = timeout, os.getpid()
        self._processes: list[WorkerProcess] = []
        self._by_descriptor: dict[int, WorkerProcess] = {}
        self._waiter = Waiter(_AWAKE_SECONDS)
        self._waiting: set[WorkerProcess] = set()  # who owes an answer
        self._seeds: Any = None
        recipe = _recipe(make)
        try:
            for index in range(num_workers):
                first, end = index * num_copies // num_workers, (index + 1) * num_copies // num_workers
                self._add(WorkerProcess(index, first, end - first))
            self._make_copies(recipe)
            self._share_memory(num_copies if rows_for is None else rows_for)
        except BaseException:
            self.close(_GRACE_AFTER_ERROR)
            raise

    def _add(self, process: WorkerProcess) -> None:
        self._processes.append(process)
        process.connection.settimeout(self._timeout)
        self._by_descriptor[process.connection.fileno()] = process
        self._waiter.watch(process.connection.fileno())

    def _make_copies(self, recipe: bytes) -> None:
        def setup(process: WorkerProcess) -> bytes:
            header = {"path": sys.path, "first_copy": process.first_copy, "num_copies": process.num_copies}
            return channel.pack(channel.SETUP, header, recipe)

        self._send({process: setup(process) for process in self._processes})
        described = [message.header for message in self._gather(max(self._timeout, _START_SECONDS)).values()]
        if any(spaces != described[0] for spaces in described):
            raise EnvError("the copies in different workers have different spaces: all copies of an environment must be alike")
        self.observation_space, self.action_space = map(space_from_dict, described[0])

    def _share_memory(self, num_copies: int) -> None:
        _, size = carve_rows(self.observation_space, self.action_space, num_copies, num_copies)
        descriptor = open_shared(size)
        try:
            memory = mmap.mmap(descriptor, 0)
            data = channel.pack(channel.ATTACH, {"num_copies": num_copies})
            self._send(dict.fromkeys(self._processes, data), descriptor)
            self._gather()
        finally:
            os.close(descriptor)
        self.rows, _ = carve_rows(self.observation_space, self.action_space, num_copies, num_copies, memory)
        self._seeds = self.rows.seeds

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin new episodes in some copies."""
        by_copy = dict(zip(indices, seeds))
        self._tell(channel.RESET, indices, lambda copies: {"copies": copies, "seeds": [by_copy[copy] for copy in copies]})

    def set_options(self, indices: Sequence[int], options: Sequence[Any]) -> None:
        """What `env.reset` gets from the copies' next reset on."""
        by_copy = dict(zip(indices, options))
        self._tell(channel.OPTIONS, indices, lambda copies: {"copies": copies, "options": [by_copy[copy] for copy in copies]})

    def _tell(self, kind: bytes, indices: Sequence[int], header: Callable[[list[int]], Any]) -> None:
        mine = {process: [copy for copy in indices if copy in process.copies] for process in self._processes}
        self._send({process: channel.pack(kind, header(copies)) for process, copies in mine.items() if copies})
        self._gather()

    def start(self) -> None:
        """Wake every worker for one step."""
        self._send(dict.fromkeys(self._processes, channel.STEP))

    def finish(self) -> list[Ended]:
        """Wait for the step of all workers: the lanes that ended."""
        return [(lane, info) for message in self._gather().values() if message.kind == channel.ENDED for lane, info in message.header]

    def replay(self, jobs: Sequence[Replay]) -> list[tuple[float, int]]:
        """Bring copies to where their episodes stood: (return, steps) of each."""
        mine = {process: [job for job in jobs if job.copy in process.copies] for process in self._processes}
        self._send({process: _pack_replay(own) for process, own in mine.items() if own})
        results = {}
        for process, message in self._gather().items():
            results.update({job.copy: (total, taken) for job, (total, taken) in zip(mine[process], message.header)})
        return [results[job.copy] for job in jobs]

    def _send(self, messages: Mapping[WorkerProcess, bytes], descriptor: int | None = None) -> None:
        if not self._processes:
            raise WorkerError("the env workers have ended after an earlier error; make a new vector env")
        if self._waiting:
            raise WorkerError("an exchange with the env workers was interrupted; close this vector env and make a new one")
        self._waiting = set(messages)
        for process, data in messages.items():
            try:
                if descriptor is None:
                    process.connection.sendall(data)
                else:  # it travels with the first byte, and the worker maps it before it answers
                    socket.send_fds(process.connection, [data], [descriptor])
            except TimeoutError:
                self._hung([process], self._timeout)
            except OSError:
                self._died(process)

    def _gather(self, patience: float | None = None) -> dict[WorkerProcess, Message]:
        """The answers that are owed, in the order of workers. All workers are watched: a death is noticed at once."""
        patience = patience or self._timeout
        waiting = set(self._waiting)
        answers: dict[WorkerProcess, Message] = {}
        deadline = time.monotonic() + patience
        while waiting:
            events = self._waiter.wait(deadline - time.monotonic())
            if not events:
                self._hung(sorted(waiting, key=lambda process: process.index), patience)
            for descriptor, _ in events:
                process = self._by_descriptor[descriptor]
                message = self._receive(process)
                if message.kind == channel.ALIVE:
                    deadline = time.monotonic() + patience
                else:
                    waiting.discard(process)
                    answers[process] = message
        # Only now: if Ctrl-C arrived above, answers may be lost, and the next exchange must not begin.
        self._waiting = set()
        return {process: answers[process] for process in self._processes if process in answers}

    def _receive(self, process: WorkerProcess) -> Message:
        try:
            message = channel.receive(process.connection)
        except TimeoutError:
            self._hung([process], self._timeout)
        except (EOFError, OSError):
            self._died(process)
        if message.kind == channel.ERROR:
            self._raised(process, message.header)
        return message

    def _raised(self, process: WorkerProcess, report: Mapping[str, Any]) -> NoReturn:
        lane = "" if report["lane"] is None else f", lane {report['lane']}, episode seed {report['seed']}"
        traceback = f"\n\nTraceback in the worker:\n{report['traceback']}" if report["traceback"] else ""
        self._fail(f"{process}{lane}: {report['type']}: {report['text']}{traceback}")

    def _died(self, process: WorkerProcess) -> NoReturn:
        self._fail(f"{process} {process.how_it_died()}{self._running(process)}")

    def _hung(self, processes: Sequence[WorkerProcess], patience: float) -> NoReturn:
        for process in processes:
            process.process.kill()
        names = "; ".join(f"{process}{self._running(process)}" for process in processes)
        self._fail(f"{names}: no answer within {patience:g} s; raise env.worker_timeout if a step may take longer")

    def _running(self, process: WorkerProcess) -> str:
        if self._seeds is None:
            return ", while its environments were made"
        return ", episode seeds by lane " + ", ".join(f"{copy}: {self._seeds[copy]}" for copy in process.copies)

    def _fail(self, what: str) -> NoReturn:
        self.close(_GRACE_AFTER_ERROR)
        raise WorkerError(what)

    def close(self, grace: float = _GRACE_SECONDS) -> None:
        """End all workers in bounded time."""
        if os.getpid() != self._owner:  # a forked copy of this process does not own them
            return
        processes, self._processes = self._processes, []
        warn_of(end_processes(processes, grace))


def _pack_replay(jobs: Sequence[Replay]) -> bytes:
    header = {
        "copies": [job.copy for job in jobs],
        "seeds": [job.seed for job in jobs],
        "options": [job.options for job in jobs],
        "lengths": [len(tree_leaves(job.actions)[0]) for job in jobs],
    }
    raw = b"".join(part.tobytes() for job in jobs for part in tree_leaves(job.actions))
    return channel.pack(channel.REPLAY, header, raw)


class _FromConfig:
    """A factory that a worker can be sent: the config as it is, made into an environment over there."""

    def __init__(self, config: EnvConfig) -> None:
        self.config = config

    def __call__(self) -> Env:
        return make_env(self.config)


def _recipe(make: EnvConfig | Callable[[], Env]) -> bytes:
    """What workers make environments from. An id that the user's script registered goes along with its spec."""
    specs = []
    if isinstance(make, EnvConfig):
        spec = gym.registry.get(make.id)
        specs = [spec] if spec is not None and not str(spec.entry_point).startswith(("gymnasium.", "ale_py.")) else []
        make = _FromConfig(make)
    try:
        return cloudpickle.dumps((make, specs))  # type: ignore[no-any-return]
    except Exception as error:  # pickling runs the user's code, which may raise anything
        raise EnvError(
            f"the environment's factory cannot be sent to worker processes ({type(error).__name__}: {error}); "
            "use env.num_workers=0, or a function that makes everything it needs itself"
        ) from error
