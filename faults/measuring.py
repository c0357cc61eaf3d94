"""Figures that a script of benchmarks/ measures, for procedures whose pass figure is a cost."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from faults.programme import ROOT


def benchmark(name: str) -> Any:
    """A script of benchmarks/ as a module; those import each other by their plain names."""
    directory = str(ROOT / "benchmarks")
    if directory not in sys.path:
        sys.path.append(directory)
    return importlib.import_module(name)
