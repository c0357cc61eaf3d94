"""Self-play: a pool of past versions of the policy, ratings, the callback that updates them, and the ratings page.

May import `evaluate`, `collect`, `backends` and everything below them.
"""
