"""What was measured, one file for each procedure, so that a later run of some of them leaves the others as they are."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

from faults.programme import ROOT
from inchworm.core.tensor_file import write_atomically
from inchworm.run.directory import versions

DIRECTORY = Path(__file__).parent / "results"
OURS = "inchworm"


def keep(id: str, peer: str, found: dict[str, Any], directory: Path = DIRECTORY) -> None:
    """Put a procedure's outcome beside what its peers did."""
    path = directory / f"{id}.json"
    data = read_one(path)
    data[peer or OURS] = {**found, "machine": machine()}
    text = json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False)
    write_atomically(path, text.replace(f"{ROOT}/", "") + "\n")  # where the project lies is nobody's business


def read_one(path: Path) -> dict[str, Any]:
    """Who -> outcome, of one procedure."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def read_all(directory: Path = DIRECTORY) -> dict[str, dict[str, Any]]:
    """ID -> who -> outcome."""
    return {path.stem: read_one(path) for path in sorted(directory.glob("*.json"))}


def machine() -> str:
    """Where it was measured."""
    found = versions()
    return f"{os.cpu_count()} cores, {found['cpu']}, Python {platform.python_version()}, NumPy {found['numpy']}, torch {found['torch']}"
