"""A run on disk: its directory, its checkpoints, and saving and restoring a training exactly.

May import `core` to `collect` and `backends`.
"""
