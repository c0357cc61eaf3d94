"""Serves steps 1 and 2: waiting for a message, for a short while awake and then asleep.

To be woken takes a sleeping process longer than many environments need for a step, and on some kernels processes that sleep and
wake in turns are gathered on one core. So both sides of a worker's socket first look for the message again and again. At each look
they give the core away to whoever can use it, the while is bounded, and after two waits that were longer than it they sleep at once
until messages come quickly again: a core is never burnt on a slow world. On a core that others compute on they sleep too.
"""

from __future__ import annotations

import functools
import os
import select
import time
from collections.abc import Callable

_STRIKES = 2
"""Waits in a row that were too long for staying awake. One alone is what a worker sees between two rollouts."""
_CROWDED_SECONDS = 1e-3
"""Who gave the core away and got it back only now shares it with somebody who computes; one who sleeps is served before them."""
_CROWDED_WAITS = 200
"""So many waits are then slept, before the core is tried again."""

_give_way: Callable[[], None] = getattr(os, "sched_yield", functools.partial(time.sleep, 0.0))


class Waiter:
    """Waits until one of some descriptors has something to read; `awake` is how many seconds of it are not slept."""

    def __init__(self, awake: float) -> None:
        self._poll, self._awake = select.poll(), awake
        self._strikes = self._slept = 0

    def watch(self, descriptor: int) -> None:
        """Wait for this descriptor too."""
        self._poll.register(descriptor, select.POLLIN)

    def forget(self, descriptor: int) -> None:
        """No longer wait for this descriptor, which is about to be closed."""
        self._poll.unregister(descriptor)

    def wait(self, seconds: float | None = None) -> list[tuple[int, int]]:
        """The descriptors that have something to read, or whose other side is gone; empty after so many seconds without any."""
        began = time.perf_counter()
        if self._slept:
            self._slept -= 1
        elif self._strikes < _STRIKES:
            events = self._look(began)
            if events:
                self._strikes = 0
                return events
        events = self._poll.poll(None if seconds is None else max(0.0, seconds) * 1000)
        self._strikes = 0 if time.perf_counter() - began < self._awake else self._strikes + 1
        return events

    def _look(self, began: float) -> list[tuple[int, int]]:
        poll, now = self._poll.poll, time.perf_counter
        last, end = began, began + self._awake
        while not (events := poll(0)) and last < end:
            _give_way()
            before, last = last, now()
            if last - before > _CROWDED_SECONDS:
                self._slept = _CROWDED_WAITS
        return events
