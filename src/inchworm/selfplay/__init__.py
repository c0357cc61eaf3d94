"""Opponents made of past policies: the pool, ratings, the callback that feeds them, and the ratings page.

May import `core` to `collect`, `backends` and `evaluate`.
"""
