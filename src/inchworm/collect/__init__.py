"""Step 3 of the walk: rollouts from environments."""
