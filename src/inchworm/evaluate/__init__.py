"""Scoring policies: the evaluator, matches of two players, suites of environments, and the statistics they return."""
