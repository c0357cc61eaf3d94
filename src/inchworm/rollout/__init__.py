"""The rollout: what collect brings back and learn reads; how it is written, joined, cut into sequences and kept in files."""
