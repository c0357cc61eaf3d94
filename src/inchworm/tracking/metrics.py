"""The groups in which trackers show metrics, and `StatsLogger`, which passes the metrics of an iteration to trackers.

docs/metrics.md says what each metric means; a test compares its sections with the groups here. In the files of a run and in the history
a metric has its plain name; trackers that show groups get `group/name`.
"""

from __future__ import annotations

import functools
import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from inchworm.core.protocols import Tracker

GROUPS = {
    "loss": ("loss", "policy_loss", "value_loss", "entropy", "loss_weight"),
    "update": (
        "approx_kl", "clip_fraction", "explained_variance", "return_mean", "return_std", "advantage_std", "grad_norm", "learning_rate",
        "ratio_error", "effective_sample_size", "behavior_kl", "staleness", "n_updates", "epochs", "skipped_steps", "reward_scale",
        "warm_up",
    ),
    "episode": (
        "iteration", "env_steps", "episodes", "iteration_episodes", "mean_return", "mean_length", "length_std", "truncated_share",
        "observation_scale", "forced_share", "memory_spread",
    ),
    "curriculum": (),
    "opponent": ("win_rate", "pool_size", "rating", "rating_sigma", "rating_failed"),
    "evaluation": (), "convergence": (), "time": (), "system": (),
}  # fmt: skip
"""Group -> the metrics that belong to it besides those whose names begin with it, such as `evaluation/mean_return`."""

_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}


@functools.cache
def grouped_name(name: str) -> str:
    """The name of a metric in trackers that show groups: `loss/policy_loss`, `time/seconds`, `update/red/approx_kl` of the policy red.

    What follows a known name belongs to its group: `update/grad_norm/<loss>`. Other metrics are in `other`, or keep a prefix of their own.
    """
    first, slash, rest = name.partition("/")
    if slash and first == "timing":
        return f"time/{rest}"
    if slash and first in GROUPS:
        return name
    if first in _GROUP_OF:
        return f"{_GROUP_OF[first]}/{name}"
    if slash and (rest.partition("/")[0] in _GROUP_OF or rest.partition("/")[0] in GROUPS):
        group, _, last = grouped_name(rest).partition("/")
        return f"{group}/{first}/{last}"
    return name if slash else f"other/{name}"


class StatsLogger:
    """Turns an iteration into named metrics, and passes everything to each tracker in turn. Exceptions propagate."""

    def __init__(self, trackers: Sequence[Tracker] = ()) -> None:
        """Trackers are called in this order."""
        self.trackers = tuple(trackers)
        self._clocks = time.monotonic(), time.process_time()

    def process(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics of an iteration with those of the group system."""
        before, self._clocks = self._clocks, (time.monotonic(), time.process_time())
        seconds, busy = (now - then for now, then in zip(self._clocks, before))
        return {**metrics, "system/memory_mb": _memory_mb(), "system/cpu_share": busy / max(seconds, 1e-9)}

    def groups(self, metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
        """Metrics by group, in the order of `GROUPS`: {"loss": {"policy_loss": 0.1, …}, "update": {…}, …}."""
        found: dict[str, dict[str, float]] = {group: {} for group in GROUPS}
        for name, value in metrics.items():
            group, _, rest = grouped_name(name).partition("/")
            found.setdefault(group, {})[rest] = value
        return {group: values for group, values in found.items() if values}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log one row at `step` env steps to all."""
        for tracker in self.trackers:
            tracker.log(metrics, step)

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Log the run's config to all."""
        for tracker in self.trackers:
            tracker.log_params(params)

    def log_artifact(self, path: Path) -> None:
        """Log a file of the run to all."""
        for tracker in self.trackers:
            tracker.log_artifact(path)

    def close(self) -> None:
        """Close all, even if one fails; its exception is raised afterwards."""
        with ExitStack() as stack:
            for tracker in reversed(self.trackers):
                stack.callback(tracker.close)


def _memory_mb() -> float:
    """Resident memory of this process now; where the system does not say, its peak."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)
