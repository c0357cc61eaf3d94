"""The loop around the two motions, and the front door."""
