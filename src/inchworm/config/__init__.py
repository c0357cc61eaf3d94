"""What a run is made of, as typed and frozen configs: their sections, how they are read, other trainers' names, presets.

May import `core`.
"""
