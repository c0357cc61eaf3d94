"""A run on disk: its directory, its checkpoints, and saving and restoring the exact state of a training."""
