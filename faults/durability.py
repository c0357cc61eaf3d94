"""Section A: nothing that was saved is lost, whatever happens to the process, the disk or the file."""

from __future__ import annotations

import importlib

PARTS = ("kills", "crashes", "full_disk", "order", "damage", "sharing", "reading", "golden", "cost", "sb3", "sb3_damage")
"""A1; A2 and A3; A4 to A10; the peer. Importing a part puts its procedures into the programme, in this order."""

for part in PARTS:
    importlib.import_module(f"faults.durability_{part}")
