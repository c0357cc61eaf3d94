"""Section B of the programme: hostile files and inputs, in the order of the page."""

from __future__ import annotations

import importlib

for _name in ("files", "mutants", "code", "names", "secrets"):
    importlib.import_module(f"faults.hostile_{_name}")
