"""G4 to G6: what happens every day. Wrong configs (G4), a long run (G5), a clock that jumps (G6); each in a module of its own."""

from __future__ import annotations

from faults import (
    everyday_clock,  # noqa: F401 - they enter their procedures
    everyday_configs,  # noqa: F401
    soak,  # noqa: F401
)
