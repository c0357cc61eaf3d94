"""Several trackers as one. Serves the loop, which then speaks to one tracker whatever the run writes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from inchworm.protocols import Tracker


class StatsLogger:
    """Hands everything to each tracker in turn. An exception of one propagates: a broken tracker is not hidden."""

    def __init__(self, trackers: Sequence[Tracker] = ()) -> None:
        """Trackers are called in this order."""
        self.trackers = tuple(trackers)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One row at `step` env steps, to all."""
        for tracker in self.trackers:
            tracker.log(metrics, step)

    def log_params(self, params: Mapping[str, Any]) -> None:
        """The run's config, to all."""
        for tracker in self.trackers:
            tracker.log_params(params)

    def log_artifact(self, path: Path) -> None:
        """A file of the run, to all."""
        for tracker in self.trackers:
            tracker.log_artifact(path)

    def close(self) -> None:
        """Close all, also when one of them fails to; its exception comes afterwards."""
        with ExitStack() as stack:
            for tracker in reversed(self.trackers):
                stack.callback(tracker.close)
