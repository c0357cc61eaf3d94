"""Environments, policies and tools that the tests share."""
