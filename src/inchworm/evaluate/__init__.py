"""Scoring policies: the evaluator and the statistics it returns."""
