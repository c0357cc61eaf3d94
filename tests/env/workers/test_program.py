"""Tests of env/workers/program.py from inside: a worker in a thread, message by message."""

import contextlib
import json
import mmap
import os
import signal
import socket
import sys
import threading

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest

from doubles.toys import Counter
from inchworm.core.spaces import space_from_dict
from inchworm.env.restore import pack_tree
from inchworm.env.step_arrays import allocate_rows, open_shared
from inchworm.env.workers import messages, program
from inchworm.env.workers.program import Worker


@contextlib.contextmanager
def served(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    ours, theirs = socket.socketpair()
    ours.settimeout(120)
    thread = threading.Thread(target=lambda: Worker(theirs).run())
    thread.start()
    try:
        yield ours
    finally:
        ours.close()
        thread.join(120)
        theirs.close()
    assert not thread.is_alive()


def ask(connection, kind, header=None, raw=b"", descriptor=None):
    data = messages.pack(kind, header, raw)
    if descriptor is None:
        connection.sendall(data)
    else:
        socket.send_fds(connection, [data], [descriptor])
    return messages.receive(connection)


def set_up(connection, make=Counter, copies=2, specs=()):
    header = {"path": sys.path, "first_copy": 0, "num_copies": copies, "reads": {"global_state": False}}
    hello = ask(connection, messages.SETUP, header, cloudpickle.dumps((make, specs)))
    assert hello.kind == messages.HELLO
    spaces = [space_from_dict(data) for data in hello.header[:2]]
    assert spaces == [Counter().observation_space, Counter().action_space]
    descriptor = open_shared(allocate_rows(*spaces, copies, copies)[1])
    memory = mmap.mmap(descriptor, 0)
    assert ask(connection, messages.ATTACH, {"num_copies": copies}, descriptor=descriptor).kind == messages.DONE
    os.close(descriptor)
    return allocate_rows(*spaces, copies, copies, memory)[0]


def test_a_whole_conversation(monkeypatch):
    spec = gym.envs.registration.EnvSpec("ToyOfWorkerTests-v0", Counter)
    with served(monkeypatch) as connection:
        rows = set_up(connection, lambda: Counter(length=2), specs=[spec])
        assert gym.registry.pop("ToyOfWorkerTests-v0").entry_point is Counter
        assert ask(connection, messages.OPTIONS, {"copies": [1], "options": [{"a": 1}]}).kind == messages.DONE
        assert ask(connection, messages.RESET, {"copies": [0, 1], "seeds": [5, 6]}).kind == messages.DONE
        assert rows.observations.tolist() == [[5, 0], [6, 0]]
        rows.next_seeds[:] = 7, 8
        rows.actions[:] = 1, 2
        assert ask(connection, messages.STEP) == messages.Message(messages.STEPPED)
        assert rows.observations.tolist() == [[5, 1], [6, 1]]
        ended = ask(connection, messages.STEP)
        assert (ended.kind, ended.header) == (messages.ENDED, [[0, {"total": 2.0}], [1, {"total": 4.0}]])
        assert rows.observations.tolist() == [[7, 0], [8, 0]]
        assert rows.final_observations.tolist() == [[5, 2], [6, 2]]
        monkeypatch.setattr(program, "_ALIVE_SECONDS", -1.0)
        answer = ask(connection, messages.REPLAY, *pack_tree([(0, 3, None, np.zeros(0, int)), (1, 4, None, np.array([2]))]))
        assert answer.kind == messages.ALIVE  # one step, so one sign of life
        assert messages.receive(connection).header == [[0.0, 0], [1.0, 1]]
        assert rows.observations.tolist() == [[3, 0], [4, 1]]
        assert ask(connection, messages.CLOSE) == messages.Message(messages.CLOSED, [])


def test_errors_are_text_and_do_not_end_the_conversation(monkeypatch):
    class Broken(Counter):
        def step(self, action):
            raise KeyboardInterrupt("by the environment")

    with served(monkeypatch) as connection:
        early = ask(connection, messages.STEP)
        assert (early.kind, early.header["text"]) == (messages.ERROR, "RuntimeError: the worker has no environments yet")
        set_up(connection, Broken)
        ask(connection, messages.RESET, {"copies": [0, 1], "seeds": [5, 6]})
        report = ask(connection, messages.STEP).header
        assert report["text"].startswith("lane 0, step 1 of episode 2 with seed 5: KeyboardInterrupt: by the environment\n  at ")
        assert "in step" in report["traceback"]
        assert json.loads(json.dumps(report)) == report
        assert ask(connection, messages.CLOSE).kind == messages.CLOSED


def test_a_worker_closes_its_environments_when_the_parent_is_gone(monkeypatch):
    closed = threading.Event()

    class Closes(Counter):
        def close(self):
            closed.set()

    monkeypatch.setattr(cloudpickle, "loads", lambda _: (Closes, ()))
    with served(monkeypatch) as connection:
        set_up(connection, Counter, 1)
    assert closed.is_set()
    with served(monkeypatch):  # gone before anything was created
        pass


def test_main_ignores_ctrl_c_and_serves_unless_its_parent_is_gone(monkeypatch):
    monkeypatch.setattr(program.ctypes, "CDLL", lambda *args, **kwargs: type("Libc", (), {"prctl": staticmethod(lambda *numbers: 0)}))
    monkeypatch.setattr(program.os, "_exit", sys.exit)
    before = signal.getsignal(signal.SIGINT)
    ours, theirs = socket.socketpair()
    try:
        with pytest.raises(SystemExit):
            program.main([str(theirs.fileno()), str(os.getppid() + 1)])
        ours.sendall(messages.pack(messages.CLOSE))
        program.main([str(theirs.detach()), str(os.getppid())])
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert messages.receive(ours).kind == messages.CLOSED
    with pytest.raises(EOFError):
        messages.receive(ours)
    ours.close()
