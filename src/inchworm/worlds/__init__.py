"""Environments that come with inchworm: native CartPole, toy environments with known optima, Skirmish and its replays.

May import `core`, `config` and `env`.
"""
