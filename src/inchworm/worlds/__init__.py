"""Environments that come with inchworm: native CartPole, small worlds with known answers, Skirmish and its replays.

May import `core`, `config` and `env`.
"""
