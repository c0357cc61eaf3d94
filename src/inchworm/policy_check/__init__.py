"""Serves the front door: the laws that every policy must keep, tried on one that somebody brings."""
