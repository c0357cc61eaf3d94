"""Where the scripts of the pages keep what they measured: a file each in results/speed/, so that any can be run again alone."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from machine import machine_facts

DIRECTORY = Path(__file__).parent / "results" / "speed"


def save(name: str, data: Any, directory: Path = DIRECTORY) -> None:
    """Keep what a script measured, with the machine it was measured on, and renew the pages."""
    directory.mkdir(parents=True, exist_ok=True)
    whole = {"measured": time.strftime("%Y-%m-%d"), "machine": machine_facts(), "data": data}
    path = directory / f"{name}.json"
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    unfinished.rename(path)
    if directory == DIRECTORY:
        from page import write_pages

        write_pages()


def load(name: str, directory: Path = DIRECTORY) -> dict[str, Any] | None:
    """What a script kept, or None."""
    path = directory / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
