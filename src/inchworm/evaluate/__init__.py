"""Scoring policies: seeded episodes, matches between two players, suites, and statistics with intervals.

May import `core` to `collect` and `backends`.
"""
