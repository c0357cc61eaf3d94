"""Trackers, which record metrics: the JSONL files of a run and the terminal."""
