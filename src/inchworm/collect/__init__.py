"""Collecting rollouts: the collector, opponents that play the other lanes, and actors by name."""
