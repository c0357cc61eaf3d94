"""The fault programme: what a run must survive, as procedures with pass figures. `make faults` runs it and writes docs/reliability.md."""
