"""What a run's bits depend on besides its config: versions, processor, threads. Serves the run's directory and its checkpoints."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def versions() -> dict[str, str | None]:
    """What the bits of a run depend on besides its config."""
    return dict(_versions())


@functools.cache
def _versions() -> dict[str, str | None]:
    """Looked up once: none of it changes while a process lives."""
    packages = ("inchworm", "numpy", "torch", "gymnasium", "safetensors", "optree")
    return (
        {"python": platform.python_version()}
        | {name: _version(name) for name in packages}
        | {"platform": platform.platform(), "cpu": _cpu(), "simd": _simd()}
    )


def version_changes(before: Mapping[str, Any], now: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Everything that was known before and is different now, as name -> `torch: 2.12 → 2.13`."""
    now = versions() if now is None else now
    return {name: f"{name}: {old} → {now[name]}" for name, old in before.items() if name in now and now[name] != old}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    """The processor's model; the architecture where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _simd() -> str | None:
    """The vector instructions that NumPy uses here, which decide the order of its sums."""
    config: Any = np.show_config(mode="dicts")
    extensions = config.get("SIMD Extensions", {})
    return " ".join([*extensions.get("baseline", ()), *extensions.get("found", ())]) or None
