"""What a benchmark's figures depend on besides the code: the machine and the versions, as text for the pages."""

from __future__ import annotations

import importlib.metadata
import os

from inchworm.run.directory import versions


def machine_facts() -> list[str]:
    """One line each, for a list."""
    known = versions()
    packages = {name: known[name] for name in ("inchworm", "torch", "numpy", "gymnasium")}
    packages |= {name: _version(name) for name in ("stable-baselines3", "sbx-rl", "jax", "optax", "gymnax")}
    return [
        f"processor: {known['cpu']}, {len(os.sched_getaffinity(0))} cores",
        f"system: {known['platform']}, Python {known['python']}",
        ", ".join(f"{name} {version}" for name, version in packages.items()),
    ]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
