"""How much memory this process holds, and held at most.

`VmHWM` and not `ru_maxrss`: the latter starts at the peak of the process that started this one.
"""

from __future__ import annotations

from pathlib import Path


def resident() -> int:
    """Bytes in memory now."""
    return _status("VmRSS")


def peak() -> int:
    """Most bytes in memory so far."""
    return _status("VmHWM")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}; memory is measured on Linux only")
