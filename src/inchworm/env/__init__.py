"""Vectorised environments: creating copies, stepping them as one, action masks, episodes, restoring, checking."""
