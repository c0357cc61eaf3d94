"""Where a run's time goes, as a table that adds up to 100 %. Costs nothing unless it is used.

Profiled parts get their methods wrapped, on that one object, so that the parts themselves contain no timing code. Each section counts
the time during which it was the innermost one: nothing is counted twice, and the rest is `other`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from inchworm.backends.composite import CompositeLearner
from inchworm.backends.learner import BaseLearner
from inchworm.collect.collector import RolloutCollector
from inchworm.core.protocols import Callback
from inchworm.core.types import ProfilePoint
from inchworm.train.loop import StepFunction, TrainingComponents, TrainingState, run_training_loop

SECTIONS = ("env", "act", "write", "GAE", "gather", "forward", "backward", "optimiser", "evaluation", "tracking", "checkpoints", "other")
"""In the order of an iteration; `callbacks` and sections that a learner adds come before `other`."""

_WHOLE = frozenset({"evaluation", "tracking", "checkpoints", "callbacks"})
"""Sections of callbacks, which name theirs by an attribute `profile_section`."""


class Profile:
    """Seconds and calls of each section of a run."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self._stack: list[str] = []
        self._since = 0.0

    def run(self, state: TrainingState, components: TrainingComponents, step_fn: StepFunction) -> None:
        """Run `run_training_loop` and time it."""
        collector, learner = components.collector, components.learner
        profile_points: list[ProfilePoint] = [
            ("write", collector, "collect"),
            ("write", collector, "set_weights"),
            ("other", learner, "update"),
        ]
        for part in (collector, learner):
            if isinstance(part, RolloutCollector | BaseLearner | CompositeLearner):
                profile_points += part.profile_points()
        for section, target, method in profile_points:
            setattr(target, method, self.timed(section, getattr(target, method)))
        watched = replace(components, callbacks=tuple(_TimedCallback(callback, self) for callback in components.callbacks))
        self.enter("other")
        try:
            run_training_loop(state, watched, step_fn)
        finally:
            self.leave()
            for _, target, method in profile_points:
                delattr(target, method)  # the class's method again

    def timed(self, section: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its time is counted for the section."""

        @functools.wraps(function)
        def watched(*arguments: Any, **options: Any) -> Any:
            self.enter(section)
            try:
                return function(*arguments, **options)
            finally:
                self.leave()

        return watched

    def enter(self, section: str) -> None:
        """Count time for `section` until `leave`. Everything inside a callback is counted for that callback."""
        self._charge()
        if self._stack and self._stack[-1] in _WHOLE:
            section = self._stack[-1]
        else:
            self.calls[section] = self.calls.get(section, 0) + 1
        self._stack.append(section)

    def leave(self) -> None:
        """Return to the enclosing section."""
        self._charge()
        self._stack.pop()

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._stack:
            section = self._stack[-1]
            self.seconds[section] = self.seconds.get(section, 0.0) + now - self._since
        self._since = now

    def rows(self) -> list[tuple[str, float, float, int]]:
        """(section, seconds, share, calls) in the order of an iteration; the shares add up to 1."""
        known = [*SECTIONS[:-1], *(name for name in self.seconds if name not in SECTIONS), "other"]
        total = sum(self.seconds.values()) or 1.0
        return [(name, self.seconds[name], self.seconds[name] / total, self.calls.get(name, 0)) for name in known if self.seconds.get(name)]


class _TimedCallback:
    """A callback whose time is counted for its section."""

    def __init__(self, callback: Callback, profile: Profile) -> None:
        section = getattr(callback, "profile_section", "callbacks")
        self.on_train_start = profile.timed(section, callback.on_train_start)
        self.on_rollout = profile.timed(section, callback.on_rollout)
        self.on_iteration = profile.timed(section, callback.on_iteration)
        self.on_train_end = profile.timed(section, callback.on_train_end)


def table_text(rows: Sequence[tuple[str, float, float, int]]) -> list[tuple[str, str, str, str, str]]:
    """The rows as text: section, seconds, share, calls, and microseconds per call."""
    lines = [
        (name, f"{seconds:.2f}", f"{share:.1%}", f"{calls:,}", f"{1e6 * seconds / max(calls, 1):,.0f}")
        for name, seconds, share, calls in rows
    ]
    total = sum(seconds for _, seconds, _, _ in rows)
    return [*lines, ("all", f"{total:.2f}", f"{sum(share for _, _, share, _ in rows):.1%}", "", "")]
