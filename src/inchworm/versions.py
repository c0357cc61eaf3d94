"""The versions that a run's bits depend on. Serves the run's directory and its checkpoints."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path


def versions() -> dict[str, str | None]:
    """What the bits of a run depend on besides its config."""
    packages = ("inchworm", "numpy", "torch", "gymnasium", "safetensors", "optree")
    return (
        {"python": platform.python_version()}
        | {name: _version(name) for name in packages}
        | {"platform": platform.platform(), "cpu": _cpu()}
    )


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
