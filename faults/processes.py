"""Section C, processes and signals: C1 to C8. Importing the modules enters their procedures."""

from faults import (  # noqa: F401
    processes_ends,
    processes_errors,
    processes_kills,
    processes_limits,
    processes_sb3,
    processes_signals,
)
