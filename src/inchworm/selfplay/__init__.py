"""Self-play: a pool of past versions of the policy, ratings, the callback that updates them, and the ratings page.

May import `core` to `collect`, `backends` and `evaluate`.
"""
