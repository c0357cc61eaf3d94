"""A policy as data: architecture, layout of observations and actions, memory, statistics, and the policy file."""
