"""What trains the runs of a bundle: processes, some at a time (`ProcessTrainer`), or one program for all of them (`TogetherTrainer`)."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import cloudpickle
import gymnasium as gym

from inchworm.backends.registry import fuse, learning_threads
from inchworm.config.sections import TrainingConfig
from inchworm.core.errors import USAGE_ERRORS, ConfigError, InchwormError, describe_error
from inchworm.core.protocols import BaseCallback
from inchworm.core.types import Iteration, SeedEvent
from inchworm.env.source import env_source, usable_cores
from inchworm.env.workers import messages
from inchworm.env.workers.process import TEXT_LIMIT, deferred_signals, describe_exit, describe_warning, repeat_warning, start_child
from inchworm.run.bundle import Bundle
from inchworm.train.loop import TrainingComponents, TrainingState

REPORTED = ("mean_return", "evaluation/mean_return", "evaluation/win_rate")
"""Metrics that a report contains."""
STOP_SECONDS = 120.0
"""How long processes may take to save after Ctrl-C before they are killed; each finishes or leaves its iteration within seconds."""

_SECONDS_BETWEEN_REPORTS = 0.2
_POLL_SECONDS = 0.5
"""How often a silent process is checked for having exited: its socket stays open while a child of it holds the other end."""

JOB, EVENT, WARNING = b"j", b"e", b"w"
"""Messages to the process of a seed, and from it."""


def default_jobs(config: TrainingConfig, num_seeds: int) -> int:
    """How many seeds are trained at a time: as many as the cores can run, counting the environment workers of each."""
    workers = config.env.num_workers
    processes = 1 if workers == "auto" else max(1, workers + config.env.help_workers)
    return max(1, min(num_seeds, usable_cores() // processes))


class ReportCallback(BaseCallback):
    """Reports counters and the latest scores of one seed, a few times per second, and ends its training when that is asked for."""

    sees_every = 0  # it reads only counters and metrics

    def __init__(self, seed: int, report: Callable[[SeedEvent], None], stopping: threading.Event) -> None:
        self._seed, self._report, self._stopping = seed, report, stopping
        self._latest: dict[str, float] = {}
        self._due_at = 0.0

    def on_train_start(self, state: TrainingState) -> None:
        """Report where the run begins; its metrics are in files, so that no history is needed."""
        state.keep_history = False
        self.on_iteration(state, {})

    def on_iteration(self, state: TrainingState, metrics: Mapping[str, float]) -> None:
        """Report if the last report is old."""
        self._latest |= {name: float(metrics[name]) for name in REPORTED if name in metrics}
        if time.monotonic() >= self._due_at:
            self._due_at = time.monotonic() + _SECONDS_BETWEEN_REPORTS
            self._report(SeedEvent(self._seed, "progress", state.env_steps, dict(self._latest)))
        if self._stopping.is_set():
            state.interrupted = state.should_stop = True


def train_seed(
    seed: int,
    options: Mapping[str, Any],
    report: Callable[[SeedEvent], None],
    log: Callable[[str], object],
    stopping: threading.Event | None = None,
) -> None:
    """Train the run of one seed, from its newest checkpoint if there is one, and report how it ended; tracebacks go to `log`.

    `options` are those of `functional_training_loop`.
    """
    from inchworm.train.trainer import functional_training_loop  # what plans seeds does not need it

    callbacks = [*options.get("callbacks", ()), ReportCallback(seed, report, stopping or threading.Event())]
    try:
        state = functional_training_loop(**{**options, "callbacks": callbacks})
    except KeyboardInterrupt:
        report(SeedEvent(seed, "failed", text="it was interrupted"))
    except BaseException as error:  # also SystemExit of an environment
        log(traceback.format_exc())
        text = str(error) if isinstance(error, InchwormError) else describe_error(error)
        report(SeedEvent(seed, "failed", text=text[:TEXT_LIMIT], wrong_use=isinstance(error, USAGE_ERRORS)))
    else:
        report(SeedEvent(seed, "done", state.env_steps, text=state.history.stop_reason or "", failures=state.failures))


# ---- in processes


class SeedProcess:
    """The process of one seed, as its parent sees it: a fresh interpreter that imports nothing of the user's script but what it is sent."""

    def __init__(self, bundle: Bundle, seed: int, job: bytes) -> None:
        self.seed, self._log = seed, bundle.log_path(seed)
        try:
            with open(self._log, "wb") as log, deferred_signals():
                self.process, self.connection = start_child("-c", f"from {__name__} import main; main()", output=log)
        except OSError as error:
            raise InchwormError(
                f"the process of seed {seed} could not be started: {error}; use fewer --jobs, or raise the limits of processes, "
                "open files and memory (ulimit -u, -n, -v)"
            ) from None
        with contextlib.suppress(OSError):  # it has died, which is noticed later
            self.connection.sendall(messages.pack(JOB, {"path": sys.path, "seed": seed}, job))

    def receive(self) -> SeedEvent | None:
        """Receive one message; None for one without a result. The process has ended after `done` or `failed`."""
        try:
            message = messages.receive(self.connection)
        except (EOFError, OSError):
            return self._died()
        if message.kind == WARNING:
            repeat_warning(message.header)
            return None
        event = SeedEvent(**message.header)
        if event.kind != "progress":
            self.end()
        return event

    def check(self) -> SeedEvent | None:
        """Report a process that has exited without a message, though something else may hold its socket open."""
        if self.process.poll() is None or select.select([self.connection], [], [], 0)[0]:
            return None
        return self._died()

    def _died(self) -> SeedEvent:
        return SeedEvent(self.seed, "failed", text=f"its process {describe_exit(self.end())}")

    def interrupt(self) -> None:
        """Ask the process to save and end; asked again, it does not finish its iteration."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def end(self, *, keep_log: bool = True) -> int:
        """Wait for the process, which has nothing left to do, close its socket, and return its exit code. An empty log is removed."""
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self.connection.close()
        with contextlib.suppress(OSError):
            if not keep_log or not self._log.stat().st_size:
                self._log.unlink()
        return code


@dataclass(frozen=True)
class ProcessTrainer:
    """Trains the runs of a bundle in processes of their own, `jobs` at a time: a `SeedTrainer`."""

    policy: Any
    """None is the one of each run's config."""
    env: Any
    jobs: int
    callbacks: tuple[Any, ...] = ()
    custom_losses: tuple[Any, ...] = ()

    def __call__(self, bundle: Bundle, seeds: Sequence[int]) -> Generator[SeedEvent, None, None]:
        """Yield what the runs report. If the caller stops early, by Ctrl-C too, every run is saved first."""
        waiting = deque((bundle, seed) for seed in seeds)
        with contextlib.closing(self.train(lambda: waiting.popleft() if waiting else None)) as events:
            for _, event in events:
                yield event

    def train(self, next_run: Callable[[], tuple[Bundle, int] | None]) -> Generator[tuple[Bundle, SeedEvent], None, None]:
        """Train runs of any bundles, and yield what each reports; closing it early saves every run.

        `next_run` is called whenever a process is free, and returns a bundle and a seed, or None if there is nothing to train before
        another report. It ends when there is nothing to train and no run is left.
        """
        running: dict[int, tuple[Bundle, SeedProcess]] = {}
        poll = select.poll()
        try:
            while True:
                while len(running) < self.jobs and (found := next_run()) is not None:
                    bundle, seed = found
                    child = SeedProcess(bundle, seed, self._pack(bundle.run_config(seed)))
                    running[child.connection.fileno()] = bundle, child
                    poll.register(child.connection.fileno(), select.POLLIN)
                if not running:
                    return
                ready = [descriptor for descriptor, _ in poll.poll(_POLL_SECONDS * 1000)]
                for descriptor in ready or list(running):
                    bundle, child = running[descriptor]
                    event = child.receive() if ready else child.check()
                    if event is not None and event.kind != "progress":
                        del running[descriptor]
                        poll.unregister(descriptor)
                    if event is not None:
                        yield bundle, event
        finally:
            stop([child for _, child in running.values()])

    def _pack(self, config: TrainingConfig) -> bytes:
        """What the process of a seed is sent. Several processes fill the cores, so that none needs workers unless they are asked for."""
        if config.env.num_workers == "auto" and self.jobs > 1:
            config = config.replace(env=config.env.replace(num_workers=0))
        spec = gym.registry.get(config.env.id)
        known = spec is None or str(spec.entry_point).startswith(("gymnasium.", "ale_py."))
        env = None if env_source(self.env).is_config else self.env  # the config has it
        policy = config.policy if self.policy is None else self.policy
        options = {"config": config, "policy": policy, "env": env, "callbacks": self.callbacks, "custom_losses": self.custom_losses}
        try:
            return cloudpickle.dumps((options, None if known else spec))  # type: ignore[no-any-return]
        except Exception as error:  # pickling runs the user's code, which may raise anything
            raise ConfigError(
                f"the training cannot be sent to another process ({type(error).__name__}: {error}); give the environment as an id or a "
                "function, and callbacks and losses that hold no open files, locks or environments"
            ) from error


def announce_stop(count: int) -> None:
    """Say on stderr that running seeds are being saved, if Ctrl-C is why."""
    if count and isinstance(sys.exception(), KeyboardInterrupt) and sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            sys.stderr.write(f"stopping {count} running seeds after their iterations; press again to stop now\n")
            sys.stderr.flush()


def stop(children: Sequence[SeedProcess]) -> None:
    """Interrupt processes, wait until each has saved and ended, and kill those that do not. Ctrl-C again hurries them, twice kills them."""
    announce_stop(len(children))
    deadline, presses = time.monotonic() + STOP_SECONDS, 1
    for child in children:
        child.interrupt()
    while presses < 3 and time.monotonic() < deadline:
        try:
            alive = [child for child in children if child.process.poll() is None]
            if not alive:
                break
            for child in alive:
                with contextlib.suppress(OSError):  # so that no one blocks on a full socket
                    child.connection.recv(65_536, socket.MSG_DONTWAIT)
            time.sleep(0.02)
        except KeyboardInterrupt:
            presses += 1
            for child in children:
                child.interrupt()
    for child in children:
        if child.process.poll() is None:
            child.process.kill()
        child.end(keep_log=False)  # it holds where the process was interrupted


def follow_parent(connection: socket.socket) -> None:
    """Interrupt this process, which saves, when its parent is gone."""
    with contextlib.suppress(ConnectionError):  # the end of a parent that has not read all reports is a reset
        connection.recv(1)
    os.kill(os.getpid(), signal.SIGINT)


def main() -> None:
    """The program of a seed's process: do the job that a socket brings. When the parent is gone, save and end."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)

    def send(kind: bytes, header: Any) -> None:
        with contextlib.suppress(OSError):  # the parent is gone
            connection.sendall(messages.pack(kind, header))

    def report(event: SeedEvent) -> None:
        send(EVENT, {**event._asdict(), "metrics": dict(event.metrics)})

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any) -> None:
        send(WARNING, describe_warning(message, category, filename, lineno))

    with contextlib.suppress(EOFError, KeyboardInterrupt):
        message = messages.receive(connection)
        seed, sys.path[:] = message.header["seed"], message.header["path"]
        warnings.simplefilter("default")  # the parent's filters decide
        warnings.showwarning = show
        try:
            options, spec = cloudpickle.loads(message.raw)  # from our own parent, over a private socket
            if spec is not None:  # of an id that the user's script has registered
                gym.registry.setdefault(spec.id, spec)
        except Exception as error:
            traceback.print_exc()
            report(SeedEvent(seed, "failed", text=f"its process could not begin: {describe_error(error)}", wrong_use=True))
        else:
            threading.Thread(target=follow_parent, args=(connection,), daemon=True).start()
            train_seed(seed, options, report, sys.stderr.write)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the interpreter would wait for threads that environments left running


# ---- in one program


class SeedGroup:
    """Seeds whose iterations one program computes. Each has a thread, of which one at a time runs.

    A seed waits in its step until all others have come to theirs, or are over; then the last one computes the iterations of all.
    """

    def __init__(self, places: Sequence[int], seeds: Sequence[int]) -> None:
        """`places` are all seeds of the program, `seeds` those that are to be trained."""
        self._places, self._running = places, set(seeds)
        self._turn = threading.Condition()
        self._waiting: dict[int, tuple[Any, int]] = {}  # seed -> its step, and the most iterations
        self._results: dict[int, Sequence[Iteration] | Exception] = {}
        self.leave = threading.Event()
        """Set to end every seed at its next step, with its newest snapshot saved."""

    def run(self, seed: int, train: Callable[[], None]) -> None:
        """Train one seed, in its thread."""
        with self._turn:
            try:
                train()
            finally:
                self._running.discard(seed)
                self._compute()

    def fuse(self, seed: int, *parts: Any) -> Any:
        """The step of a seed that computes those of all; or why there is none."""
        step = fuse(*parts)
        return step if isinstance(step, str) else partial(self._step, seed, step)

    def _step(self, seed: int, step: Any, _: TrainingComponents, most: int) -> Sequence[Iteration]:
        self._waiting[seed] = (step, most)
        self._compute()
        self._turn.wait_for(lambda: seed in self._results)
        found = self._results.pop(seed)
        if self.leave.is_set():
            raise KeyboardInterrupt
        if isinstance(found, Exception):
            raise found
        return found

    def _compute(self) -> None:
        """Compute the iterations of all seeds if every one that runs is waiting."""
        if not self._waiting or self._running - set(self._waiting):
            return
        steps, most = zip(*self._waiting.values())
        places = [self._waiting[seed][0] if seed in self._waiting else None for seed in self._places]
        try:
            found = steps[0].together(places, min(most))
        except Exception as error:
            found = [error] * len(places)
        self._results = {seed: result for seed, result in zip(self._places, found) if seed in self._waiting}
        self._waiting = {}
        self._turn.notify_all()


def join(threads: Sequence[threading.Thread]) -> None:
    """Wait until all threads have ended."""
    for thread in threads:
        thread.join()


@dataclass(frozen=True)
class TogetherTrainer:
    """Trains the runs of a bundle in this process, by one program that computes the iterations of all seeds: a `SeedTrainer`.

    Seeds that are over keep their places in it, so that it stays the same program to the end, and in a resumed bundle.
    """

    policy: Any

    def __call__(self, bundle: Bundle, seeds: Sequence[int]) -> Generator[SeedEvent, None, None]:
        """Yield what the runs report. If the caller stops early, by Ctrl-C too, every run is saved first."""
        group, events, stopping = SeedGroup(bundle.seeds, seeds), queue.SimpleQueue[SeedEvent](), threading.Event()
        threads = []
        for seed in seeds:
            bundle.log_path(seed).unlink(missing_ok=True)
            options = {"config": bundle.run_config(seed), "policy": self.policy, "fuse": partial(group.fuse, seed)}
            train = partial(train_seed, seed, options, events.put, bundle.log_path(seed).write_text, stopping)
            threads.append(threading.Thread(target=group.run, args=(seed, train), daemon=True))
        left = len(threads)
        with learning_threads(bundle.config.run.threads, bundle.config.run.backend):
            try:
                for thread in threads:
                    thread.start()
                while left:
                    event = events.get()
                    left -= event.kind != "progress"
                    yield event
            finally:
                announce_stop(left)
                stopping.set()
                for thread in threads:
                    if thread.ident is None:  # interrupted before: the others wait for it
                        thread.start()
                try:
                    join(threads)
                except KeyboardInterrupt:  # a second one
                    group.leave.set()
                    join(threads)
                    raise
