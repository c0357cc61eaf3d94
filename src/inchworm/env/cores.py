"""Serves step 2: how many cores this process may use, by its affinity and by the quota of its control group."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """The cores that this process may use at once, at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota = cpu_quota(_CGROUPS)
    return max(1, cores if quota is None else min(cores, int(quota)))


def cpu_quota(root: Path) -> float | None:
    """How many cores a control group's quota grants, as a container's limit does; none without one."""
    found = [quota for quota in (_version_2(root / "cpu.max"), _version_1(root / "cpu"), _version_1(root / "cpu,cpuacct")) if quota]
    return min(found, default=None)


def _version_2(file: Path) -> float | None:
    words = _words(file)
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0] != "max" else None


def _version_1(directory: Path) -> float | None:
    quota, period = _words(directory / "cpu.cfs_quota_us"), _words(directory / "cpu.cfs_period_us")
    return int(quota[0]) / int(period[0]) if quota and period and int(quota[0]) > 0 else None


def _words(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii").split()
    except OSError:  # another system, another version, or no right to look
        return []
