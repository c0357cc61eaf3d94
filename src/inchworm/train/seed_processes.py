"""Training the runs of a bundle in processes, some at a time: start them, pass their reports on, stop them so that each is saved."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import gymnasium as gym

from inchworm.config.sections import TrainingConfig
from inchworm.core.errors import ConfigError, InchwormError
from inchworm.core.types import SeedEvent
from inchworm.env.source import env_source
from inchworm.env.workers import messages
from inchworm.env.workers.auto import usable_cores
from inchworm.env.workers.process import deferred_signals, describe_exit, repeat_warning
from inchworm.run.bundle import Bundle
from inchworm.train.seed_program import DONE, FAILED, INTERRUPTED, JOB, PROGRESS, WARNING, SeedJob

STOP_SECONDS = 120.0
"""How long processes may take to save after Ctrl-C before they are killed; each finishes or leaves its iteration within seconds."""

_POLL_SECONDS = 0.5
"""How often a silent process is checked for having exited: its socket stays open while a child of it holds the other end."""


def default_jobs(config: TrainingConfig, num_seeds: int) -> int:
    """How many seeds are trained at a time: as many as the cores can run, counting the environment workers of each."""
    workers = config.env.num_workers
    processes = 1 if workers == "auto" else max(1, workers + config.env.help_workers)
    return max(1, min(num_seeds, usable_cores() // processes))


class SeedProcess:
    """The process of one seed, as its parent sees it."""

    def __init__(self, bundle: Bundle, seed: int, job: bytes) -> None:
        self.seed, self._log = seed, bundle.log_path(seed)
        try:
            self.connection, theirs = socket.socketpair()
            command = [sys.executable, "-P", "-m", "inchworm.train.seed_program", str(theirs.fileno())]
            with theirs, open(self._log, "wb") as log, deferred_signals():
                try:
                    # In a separate process group, so that Ctrl-C in the terminal reaches only the parent.
                    self.process = subprocess.Popen(
                        command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
                    )
                except OSError:
                    self.connection.close()
                    raise
        except OSError as error:
            raise InchwormError(
                f"the process of seed {seed} could not be started: {error}; use fewer --jobs, or raise the limits of processes, "
                "open files and memory (ulimit -u, -n, -v)"
            ) from None
        with contextlib.suppress(OSError):  # it has died, which is noticed later
            self.connection.sendall(messages.pack(JOB, {"path": sys.path}, job))

    def receive(self) -> SeedEvent | None:
        """Receive one message; None for one that is no news. The process has ended after `done` or `failed`."""
        try:
            message = messages.receive(self.connection)
        except (EOFError, OSError):
            return self._failed(f"its process {describe_exit(self.end())}")
        header = message.header
        if message.kind == PROGRESS:
            return SeedEvent(self.seed, "progress", header["env_steps"], header["metrics"])
        if message.kind == WARNING:
            repeat_warning(header)
            return None
        code = self.end()
        if message.kind == DONE:
            return SeedEvent(self.seed, "done", header["env_steps"], text=header["stop_reason"] or "", failures=header["failures"])
        if message.kind == FAILED:
            return self._failed(header["text"], wrong_use=header["wrong_use"])
        assert message.kind == INTERRUPTED
        return self._failed(f"its process was interrupted, and {describe_exit(code)}")

    def check(self) -> SeedEvent | None:
        """Report a process that has exited without a message, though something else may hold its socket open."""
        if self.process.poll() is None or select.select([self.connection], [], [], 0)[0]:
            return None
        return self._failed(f"its process {describe_exit(self.end())}")

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

    def _failed(self, text: str, *, wrong_use: bool = False) -> SeedEvent:
        return SeedEvent(self.seed, "failed", text=text, wrong_use=wrong_use)


@dataclass(frozen=True)
class ProcessTrainer:
    """Trains the runs of a bundle in processes of their own, `jobs` at a time: a `SeedTrainer`."""

    policy: Any
    env: Any
    jobs: int
    callbacks: tuple[Any, ...] = ()
    custom_losses: tuple[Any, ...] = ()

    def __call__(self, bundle: Bundle, seeds: Sequence[int]) -> Generator[SeedEvent, None, None]:
        """Yield what the runs report. If the caller stops early, by Ctrl-C too, every run is saved first."""
        waiting, running = deque(seeds), dict[int, SeedProcess]()
        poll = select.poll()
        try:
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    seed = waiting.popleft()
                    child = SeedProcess(bundle, seed, self._pack(bundle.run_config(seed)))
                    running[child.connection.fileno()] = child
                    poll.register(child.connection.fileno(), select.POLLIN)
                ready = [descriptor for descriptor, _ in poll.poll(_POLL_SECONDS * 1000)]
                for descriptor in ready or list(running):
                    child = running[descriptor]
                    event = child.receive() if ready else child.check()
                    if event is not None and event.kind != "progress":
                        del running[descriptor]
                        poll.unregister(descriptor)
                    if event is not None:
                        yield event
        finally:
            stop(list(running.values()), announce=isinstance(sys.exception(), KeyboardInterrupt))

    def _pack(self, config: TrainingConfig) -> bytes:
        """What the process of a seed is sent. Several processes fill the cores, so that none needs workers unless they are asked for."""
        if config.env.num_workers == "auto" and self.jobs > 1:
            config = config.replace(env=config.env.replace(num_workers=0))
        spec = gym.registry.get(config.env.id)
        known = spec is None or str(spec.entry_point).startswith(("gymnasium.", "ale_py."))
        env = None if env_source(self.env).is_config else self.env  # the config has it
        job = SeedJob(config, self.policy, env, self.callbacks, self.custom_losses, () if known else (spec,))
        try:
            return cloudpickle.dumps(job)  # type: ignore[no-any-return]
        except Exception as error:  # pickling runs the user's code, which may raise anything
            raise ConfigError(
                f"the training cannot be sent to another process ({type(error).__name__}: {error}); give the environment as an id or a "
                "function, and callbacks and losses that hold no open files, locks or environments"
            ) from error


def stop(children: Sequence[SeedProcess], *, announce: bool) -> None:
    """Interrupt processes, wait until each has saved and ended, and kill those that do not. Ctrl-C again hurries them, twice kills them."""
    if not children:
        return
    if announce and sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            sys.stderr.write(f"stopping {len(children)} running seeds after their iterations; press again to stop now\n")
            sys.stderr.flush()
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
