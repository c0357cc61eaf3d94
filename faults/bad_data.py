"""Section D of the programme: numbers that are wrong, too large, or at an edge, in the order of the page."""

from __future__ import annotations

import importlib

for _name in ("steps", "learning", "edges", "numbers"):
    importlib.import_module(f"faults.bad_data_{_name}")
