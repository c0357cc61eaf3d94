"""Evaluating policies: seeded episodes, matches between two players, suites, and statistics with confidence intervals."""
