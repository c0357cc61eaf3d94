"""Tests of env/workers/program.py and env/workers/messages.py from inside: a worker served by a thread, message by message."""

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
from inchworm.core.spaces import space_from_dict, space_to_dict
from inchworm.env.step_arrays import carve_rows, open_shared
from inchworm.env.workers import messages as channel
from inchworm.env.workers import program as worker
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
        thread.join(20)
        theirs.close()
    assert not thread.is_alive()


def ask(connection, kind, header=None, raw=b"", descriptor=None):
    data = channel.pack(kind, header, raw)
    if descriptor is None:
        connection.sendall(data)
    else:
        socket.send_fds(connection, [data], [descriptor])
    return channel.receive(connection)


def set_up(connection, make=Counter, copies=2, specs=()):
    header = {"path": sys.path, "first_copy": 0, "num_copies": copies, "global_state": False}
    hello = ask(connection, channel.SETUP, header, cloudpickle.dumps((make, specs)))
    assert hello.kind == channel.HELLO
    spaces = [space_from_dict(data) for data in hello.header[:2]]
    assert spaces == [Counter().observation_space, Counter().action_space]
    descriptor = open_shared(carve_rows(*spaces, copies, copies)[1])
    memory = mmap.mmap(descriptor, 0)
    assert ask(connection, channel.ATTACH, {"num_copies": copies}, descriptor=descriptor).kind == channel.DONE
    os.close(descriptor)
    return carve_rows(*spaces, copies, copies, memory)[0]


def test_a_whole_conversation(monkeypatch):
    spec = gym.envs.registration.EnvSpec("ToyOfWorkerTests-v0", Counter)
    with served(monkeypatch) as connection:
        rows = set_up(connection, lambda: Counter(length=2), specs=[spec])
        try:
            assert gym.registry["ToyOfWorkerTests-v0"].entry_point is Counter
        finally:
            gym.registry.pop("ToyOfWorkerTests-v0")
        assert ask(connection, channel.OPTIONS, {"copies": [1], "options": [{"a": 1}]}).kind == channel.DONE
        assert ask(connection, channel.RESET, {"copies": [0, 1], "seeds": [5, 6]}).kind == channel.DONE
        assert rows.observations.tolist() == [[5, 0], [6, 0]]
        rows.next_seeds[:] = 7, 8
        rows.actions[:] = 1, 2
        assert ask(connection, channel.STEP) == channel.Message(channel.STEPPED)
        assert rows.observations.tolist() == [[5, 1], [6, 1]]
        ended = ask(connection, channel.STEP)
        assert (ended.kind, ended.header) == (channel.ENDED, [[0, {"total": 2.0}], [1, {"total": 4.0}]])
        assert rows.observations.tolist() == [[7, 0], [8, 0]]
        assert rows.final_observations.tolist() == [[5, 2], [6, 2]]
        monkeypatch.setattr(worker, "_ALIVE_SECONDS", -1.0)
        header = {"copies": [0, 1], "seeds": [3, 4], "options": [None, None], "lengths": [0, 1]}
        answer = ask(connection, channel.REPLAY, header, np.array([2]).tobytes())
        assert answer.kind == channel.ALIVE  # one step, so one sign of life
        assert channel.receive(connection).header == [[0.0, 0], [1.0, 1]]
        assert rows.observations.tolist() == [[3, 0], [4, 1]]
        assert ask(connection, channel.CLOSE) == channel.Message(channel.CLOSED, [])


def test_errors_are_text_and_do_not_end_the_conversation(monkeypatch):
    class Broken(Counter):
        def step(self, action):
            raise KeyboardInterrupt("by the environment")

    with served(monkeypatch) as connection:
        early = ask(connection, channel.STEP)
        assert (early.kind, early.header["type"], early.header["lane"]) == (channel.ERROR, "RuntimeError", None)
        set_up(connection, Broken)
        ask(connection, channel.RESET, {"copies": [0, 1], "seeds": [5, 6]})
        report = ask(connection, channel.STEP).header
        assert (report["type"], report["text"], report["lane"], report["seed"]) == ("KeyboardInterrupt", "by the environment", 0, 5)
        assert "in step" in report["traceback"]
        assert json.loads(json.dumps(report)) == report
        assert ask(connection, channel.CLOSE).kind == channel.CLOSED


def test_a_worker_closes_its_environments_when_the_other_side_is_gone(monkeypatch):
    closed = threading.Event()

    class Closes(Counter):
        def close(self):
            closed.set()

    monkeypatch.setattr(cloudpickle, "loads", lambda _: (Closes, ()))
    with served(monkeypatch) as connection:
        set_up(connection, Counter, 1)
    assert closed.is_set()
    with served(monkeypatch):  # gone before anything was made
        pass


def test_main_ignores_ctrl_c_and_serves_unless_its_parent_is_gone(monkeypatch):
    monkeypatch.setattr(worker.ctypes, "CDLL", lambda *args, **kwargs: type("Libc", (), {"prctl": staticmethod(lambda *numbers: 0)}))
    monkeypatch.setattr(worker.os, "_exit", sys.exit)
    before = signal.getsignal(signal.SIGINT)
    ours, theirs = socket.socketpair()
    try:
        with pytest.raises(SystemExit):
            worker.main([str(theirs.fileno()), str(os.getppid() + 1)])
        ours.sendall(channel.pack(channel.CLOSE))
        worker.main([str(theirs.detach()), str(os.getppid())])
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert channel.receive(ours).kind == channel.CLOSED
    with pytest.raises(EOFError):
        channel.receive(ours)
    ours.close()


def test_messages_survive_being_cut_into_pieces():
    ours, theirs = socket.socketpair()
    data = channel.pack(channel.REPLAY, {"a": [1, "ż"]}, b"x" * 300_000)

    def trickle():
        for start in range(0, len(data), 70_001):
            ours.sendall(data[start : start + 70_001])

    thread = threading.Thread(target=trickle)
    thread.start()
    message = channel.receive(theirs)
    thread.join()
    assert (message.kind, message.header, len(message.raw)) == (channel.REPLAY, {"a": [1, "ż"]}, 300_000)
    ours.sendall(data[:50])
    ours.close()
    with pytest.raises(EOFError):
        channel.receive(theirs)
    theirs.close()


def test_shared_memory_without_memfd(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    space = Counter().observation_space
    descriptor = open_shared(100)
    memory = mmap.mmap(descriptor, 0)
    os.close(descriptor)
    assert len(memory) == 100
    assert carve_rows(space, Counter().action_space, 1, 1)[1] > 64
    assert space_to_dict(space)["kind"] == "Box"
