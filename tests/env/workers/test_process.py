"""Tests of env/workers/process.py: how processes start, and how a waiter spins for a bounded time, then blocks."""

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from doubles.crashing import kill, workers
from doubles.disk import failing
from doubles.toys import Counter
from inchworm.core.errors import WorkerError
from inchworm.env.source import WorkerVectorEnv
from inchworm.env.workers import process
from inchworm.env.workers.process import Waiter


@pytest.fixture
def pipe():
    read, write = os.pipe()
    yield read, write
    for descriptor in (read, write):
        os.close(descriptor)


@pytest.fixture
def yields(monkeypatch):
    """One entry for each time that the CPU was yielded, which is each unsuccessful try while spinning."""
    counted = []
    monkeypatch.setattr(process, "_yield_cpu", lambda: counted.append(1))
    monkeypatch.setattr(process, "_BUSY_CORE_SECONDS", 1e9)  # however busy this machine is
    return counted


def waiter(pipe, spin_seconds):
    made = Waiter(spin_seconds)
    made.register(pipe[0])
    return made


def test_what_is_readable_already_is_seen_at_the_first_try(pipe, yields):
    os.write(pipe[1], b"x")
    assert [descriptor for descriptor, _ in waiter(pipe, 1.0).wait(5.0)] == [pipe[0]]
    assert yields == []


@pytest.mark.parametrize(("spin_seconds", "timeout"), [(60.0, 60.0), (0.001, None)])
def test_a_message_is_seen_while_spinning_and_while_blocked(pipe, yields, spin_seconds, timeout):
    timer = threading.Timer(0.05, os.write, (pipe[1], b"x"))
    timer.start()
    assert waiter(pipe, spin_seconds).wait(timeout)
    assert yields
    timer.join()


def test_without_a_message_the_list_is_empty_after_the_timeout(pipe):
    began = time.perf_counter()
    assert waiter(pipe, 0.01).wait(0.05) == []
    assert time.perf_counter() - began > 0.045


def test_a_closed_peer_is_seen():
    read, write = os.pipe()
    os.close(write)
    assert waiter((read, write), 0.001).wait(5.0)
    os.close(read)


def test_after_two_long_waits_it_blocks_at_once_until_a_short_one(pipe, yields):
    made = waiter(pipe, 0.002)
    for _ in range(2):
        made.wait(0.01)
        assert yields, "a single long wait, as between two rollouts, changes nothing"
        yields.clear()
    made.wait(0.01)
    assert yields == []
    os.write(pipe[1], b"x")
    made._spin_seconds = 60.0  # so that this wait is a short one on any machine
    assert made.wait(0.01)
    os.read(pipe[0], 1)
    made._spin_seconds = 0.002
    made.wait(0.01)
    assert yields


def test_on_a_busy_core_many_waits_block_at_once(pipe, monkeypatch):
    calls = []

    def crowded():
        calls.append(1)
        time.sleep(0.003)  # another process computed for 3 ms

    monkeypatch.setattr(process, "_yield_cpu", crowded)
    made = waiter(pipe, 0.002)
    made.wait(0.0)
    assert len(calls) == 1
    os.write(pipe[1], b"x")
    for _ in range(process._BUSY_CORE_WAITS):
        assert made.wait(1.0)
    os.read(pipe[0], 1)
    assert len(calls) == 1
    made.wait(0.0)
    assert len(calls) == 2


def test_a_process_that_cannot_be_started_is_a_clear_error(monkeypatch):
    with WorkerVectorEnv(Counter, 2, 2) as env:
        env.reset()
        monkeypatch.setattr(subprocess, "Popen", failing(errno.EAGAIN))
        kill(env, 1)
        with pytest.raises(WorkerError, match=r"env worker 1 \(lane 1\) could not be started: .*temporarily unavailable.*ulimit -u"):
            env.step([0, 0])
    with pytest.raises(WorkerError, match=r"env worker 0 \(lane 0\) could not be started"):
        WorkerVectorEnv(Counter, 2, 2)


LIMITED = """
import os, resource, sys
from inchworm.env.source import make_vector_env
from inchworm.core.errors import WorkerError
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
held = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]
try:
    make_vector_env("CartPole-v1", 8, 4)
except WorkerError as error:
    print(error)
    sys.exit(3)
"""


def test_too_few_open_files_are_a_clear_error():
    """No signal, no hang, no traceback: exit code 3 is the script's own."""
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (3, "")
    words = r"env worker \d \(lanes \d to \d\) could not be started: .*Too many open files; use fewer env.num_workers"
    assert re.match(words, done.stdout)


def test_ctrl_c_waits_until_a_process_that_is_being_started_has_an_owner(monkeypatch):
    started = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.01)

    env = WorkerVectorEnv(Counter, 2, 2)
    env.reset()
    kill(env, 1)
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        env.step([0, 0])
    assert workers(env)[1].process is started[0]
    assert signal.getsignal(signal.SIGINT) is before
    env.close()
    assert started[0].returncode is not None
