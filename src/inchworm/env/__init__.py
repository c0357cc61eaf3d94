"""Vectorised environments: creating copies, stepping them as one, action masks, episodes, restoring, checking.

May import `core` and `config`. Environments that come with inchworm are loaded through `env/registry`, never imported here.
"""
