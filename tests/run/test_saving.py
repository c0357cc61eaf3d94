"""Saving beside training: only where it pays, one at a time, and what goes wrong is told to whoever trains."""

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from inchworm.run.saver import BACKGROUND_RATIO, SaveThread


class World:
    """A clock that moves when told to, and jobs that take some of its time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.saver = SaveThread(lambda: self.now)
        self.threads: list[str] = []

    def save(self, *, after: float, takes: float = 1.0, error: Exception | None = None) -> str:
        """A save `after` seconds since the last began; where it was done."""
        self.now += after

        def job() -> None:
            self.now += takes
            self.threads.append(threading.current_thread().name)
            if error is not None:
                raise error

        began = self.now
        self.saver.run(job)
        self.saver.wait()
        self.now = began
        return self.threads[-1]


def test_the_first_is_done_here_and_later_ones_beside_if_twenty_times_as_long_has_passed() -> None:
    world = World()
    assert world.save(after=1000.0) == "MainThread"
    assert world.save(after=BACKGROUND_RATIO - 0.1) == "MainThread"  # a save takes 1 second
    assert world.save(after=BACKGROUND_RATIO + 0.1) == "inchworm-save"
    assert world.save(after=BACKGROUND_RATIO + 0.1, takes=2.0) == "inchworm-save"
    assert world.save(after=BACKGROUND_RATIO + 0.1, takes=1.0) == "MainThread"  # the last one took 2
    assert world.save(after=BACKGROUND_RATIO + 0.1) == "inchworm-save"


def test_after_a_failure_the_next_is_done_here() -> None:
    world = World()
    world.save(after=0.0)
    with pytest.raises(OSError, match="full"):
        world.save(after=100.0, error=OSError(28, "full"))
    assert world.threads[-1] == "inchworm-save"
    assert world.save(after=100.0) == "MainThread"
    with pytest.raises(OSError, match="full"):
        world.save(after=1.0, error=OSError(28, "full"))
    assert world.save(after=100.0) == "MainThread"


def held(saver: SaveThread, world: World) -> tuple[threading.Event, list[str]]:
    """A job beside training that waits to be let go."""
    go, done = threading.Event(), list[str]()

    def job() -> None:
        go.wait(10)
        done.append("first")

    saver.run(lambda: None)
    world.now += 100.0
    saver.run(job)
    return go, done


def test_one_at_a_time_and_the_next_waits() -> None:
    world = World()
    go, done = held(world.saver, world)
    assert world.saver.busy
    world.saver.poll()  # does not wait
    assert done == []
    threading.Timer(0.1, go.set).start()
    world.now += 1000.0
    world.saver.run(lambda: done.append("second"))
    world.saver.wait()
    assert done == ["first", "second"]
    assert not world.saver.busy


def test_what_went_wrong_beside_is_raised_once_by_poll_or_wait() -> None:
    def fails() -> None:
        raise OSError(5, "Input/output error")

    asks: list[Callable[[SaveThread], Any]] = [SaveThread.wait, lambda saver: (saver._thread.join(), saver.poll())]  # type: ignore[union-attr, func-returns-value]
    for ask in asks:
        world = World()
        world.saver.run(lambda: None)
        world.now += 100.0
        world.saver.run(fails)
        with pytest.raises(OSError, match="Input/output"):
            ask(world.saver)
        world.saver.poll()
        world.saver.wait()


def test_the_thread_takes_no_signal() -> None:
    """A signal that the system hands to another thread would not wake a main thread that sleeps."""
    world, blocked = World(), set[int]()
    world.saver.run(lambda: None)
    world.now += 100.0
    world.saver.run(lambda: blocked.update(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    world.saver.wait()
    assert {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} <= blocked
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
