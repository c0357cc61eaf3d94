"""Tests of env/workers/waiting.py: awake for a bounded while, then asleep; asleep at once where staying awake does not pay."""

import os
import threading
import time

import pytest

from inchworm.env.workers import process as waiting
from inchworm.env.workers.process import Waiter


@pytest.fixture
def pipe():
    read, write = os.pipe()
    yield read, write
    for descriptor in (read, write):
        os.close(descriptor)


@pytest.fixture
def looks(monkeypatch):
    """How often the core was given away, which is how often somebody awake looked in vain."""
    counted = []
    monkeypatch.setattr(waiting, "_yield_cpu", lambda: counted.append(1))
    monkeypatch.setattr(waiting, "_BUSY_CORE_SECONDS", 1e9)  # whatever else this machine does
    return counted


def waiter(pipe, awake):
    made = Waiter(awake)
    made.register(pipe[0])
    return made


def test_what_is_there_already_is_seen_at_the_first_look(pipe, looks):
    os.write(pipe[1], b"x")
    assert [descriptor for descriptor, _ in waiter(pipe, 1.0).wait(5.0)] == [pipe[0]]
    assert looks == []


def test_a_message_that_comes_while_awake_is_seen(pipe, looks):
    timer = threading.Timer(0.02, os.write, (pipe[1], b"x"))
    timer.start()
    assert waiter(pipe, 5.0).wait(5.0)
    assert looks
    timer.join()


def test_a_message_that_comes_while_asleep_is_seen(pipe):
    timer = threading.Timer(0.05, os.write, (pipe[1], b"x"))
    timer.start()
    assert waiter(pipe, 0.001).wait()
    timer.join()


def test_nothing_in_time_is_an_empty_list_and_the_time_is_kept(pipe):
    began = time.perf_counter()
    assert waiter(pipe, 0.01).wait(0.05) == []
    assert time.perf_counter() - began > 0.045


def test_a_closed_other_side_is_seen():
    read, write = os.pipe()
    os.close(write)
    assert waiter((read, write), 0.001).wait(5.0)
    os.close(read)


def test_after_two_long_waits_it_sleeps_at_once_until_a_short_one(pipe, looks):
    made = waiter(pipe, 0.002)
    for _ in range(2):
        made.wait(0.01)
        assert looks, "one long wait alone, as between two rollouts, changes nothing"
        looks.clear()
    made.wait(0.01)
    assert looks == []
    os.write(pipe[1], b"x")
    assert made.wait(0.01)  # a short wait, asleep
    os.read(pipe[0], 1)
    made.wait(0.01)
    assert looks


def test_who_gets_the_core_back_late_sleeps_for_many_waits(pipe, monkeypatch):
    calls = []

    def crowded():
        calls.append(1)
        time.sleep(0.003)  # somebody else computed for 3 ms

    monkeypatch.setattr(waiting, "_yield_cpu", crowded)
    made = waiter(pipe, 0.002)
    made.wait(0.0)
    assert len(calls) == 1
    os.write(pipe[1], b"x")
    for _ in range(waiting._BUSY_CORE_WAITS):
        assert made.wait(1.0)
    os.read(pipe[0], 1)
    assert len(calls) == 1
    made.wait(0.0)
    assert len(calls) == 2
