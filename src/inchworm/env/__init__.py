"""Many copies of an environment stepped as one: making environments, stepping them, masks, episodes, restoring, checking.

May import `core` and `config`. Worlds that come with inchworm are reached through `env/registry`, never imported here.
"""
