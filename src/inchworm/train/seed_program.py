"""The process of one seed: `python -m inchworm.train.seed_program` trains one run of a bundle and reports to its parent.

It is a fresh interpreter that imports nothing of the user's script but what it was sent. When its parent is gone, it saves and ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle
import gymnasium as gym

from inchworm.config.sections import TrainingConfig
from inchworm.core.errors import USAGE_ERRORS, InchwormError, describe_error
from inchworm.core.protocols import BaseCallback
from inchworm.env.workers import messages
from inchworm.env.workers.process import TEXT_LIMIT, describe_warning
from inchworm.train.loop import TrainingState

# From the parent.
JOB = b"j"
# From the process of a seed: any number of the first two, then one of the others.
PROGRESS, WARNING, DONE, FAILED, INTERRUPTED = b"p", b"w", b"D", b"F", b"I"

REPORTED = ("mean_return", "evaluation/mean_return", "evaluation/win_rate")
"""Metrics that a report contains."""

_SECONDS_BETWEEN_REPORTS = 0.2


@dataclass(frozen=True, slots=True)
class SeedJob:
    """What the process of a seed is sent."""

    config: TrainingConfig
    policy: Any
    env: Any
    callbacks: tuple[Any, ...] = ()
    custom_losses: tuple[Any, ...] = ()
    specs: tuple[Any, ...] = ()
    """Gymnasium's descriptions of ids that the user's script has registered."""


class ReportCallback(BaseCallback):
    """Sends counters and the latest scores to the parent, a few times per second."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._latest: dict[str, float] = {}
        self._due_at = 0.0

    def on_train_start(self, state: TrainingState) -> None:
        """Report where the run begins; its metrics are in files, so that no history is needed."""
        state.keep_history = False
        self._send(state)

    def on_iteration(self, state: TrainingState, metrics: Mapping[str, float]) -> None:
        """Report if the last report is old."""
        self._latest |= {name: float(metrics[name]) for name in REPORTED if name in metrics}
        if time.monotonic() >= self._due_at:
            self._send(state)

    def _send(self, state: TrainingState) -> None:
        self._due_at = time.monotonic() + _SECONDS_BETWEEN_REPORTS
        send(self._connection, PROGRESS, {"env_steps": state.env_steps, "metrics": self._latest})


def send(connection: socket.socket, kind: bytes, header: Any = None) -> None:
    """Send a message, unless the parent is gone."""
    with contextlib.suppress(OSError):
        connection.sendall(messages.pack(kind, header))


def train_seed(job: SeedJob, connection: socket.socket) -> None:
    """Train the run of a job, from its newest checkpoint if there is one, and report how it ended."""
    from inchworm.train.trainer import functional_training_loop  # the parent reads this module only for the messages

    try:
        callbacks = [*job.callbacks, ReportCallback(connection)]
        state = functional_training_loop(job.config, job.policy, job.env, custom_losses=job.custom_losses, callbacks=callbacks)
    except KeyboardInterrupt:
        send(connection, INTERRUPTED)
    except BaseException as error:  # also SystemExit of an environment
        traceback.print_exc()  # to the seed's log
        text = str(error) if isinstance(error, InchwormError) else describe_error(error)
        send(connection, FAILED, {"text": text[:TEXT_LIMIT], "wrong_use": isinstance(error, USAGE_ERRORS)})
    else:
        ended = {"env_steps": state.env_steps, "stop_reason": state.history.stop_reason, "failures": state.failures}
        send(connection, DONE, ended)


def _follow_parent(connection: socket.socket) -> None:
    """Interrupt the training, which saves, when the parent is gone."""
    with contextlib.suppress(OSError):
        if not connection.recv(1):
            os.kill(os.getpid(), signal.SIGINT)


def main(arguments: list[str]) -> None:
    """Do the job that the socket `DESCRIPTOR` brings."""
    descriptor = int(arguments[0])
    os.set_inheritable(descriptor, False)
    with socket.socket(fileno=descriptor) as connection:
        try:
            message = messages.receive(connection)
            sys.path[:] = message.header["path"]
            job: SeedJob = cloudpickle.loads(message.raw)  # from our own parent, over a private socket
            for spec in job.specs:
                gym.registry.setdefault(spec.id, spec)
            threading.Thread(target=_follow_parent, args=(connection,), daemon=True).start()
        except (EOFError, KeyboardInterrupt):
            return
        except Exception as error:
            traceback.print_exc()
            send(connection, FAILED, {"text": f"its process could not begin: {describe_error(error)}", "wrong_use": True})
            return
        with warnings.catch_warnings():
            warnings.simplefilter("default")  # the parent's filters decide

            def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any) -> None:
                send(connection, WARNING, describe_warning(message, category, filename, lineno))

            warnings.showwarning = show
            train_seed(job, connection)


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the interpreter would wait for threads that environments left running
