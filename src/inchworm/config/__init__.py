"""Typed, immutable configs of a run: their sections, reading them from YAML, names of other trainers, presets."""
