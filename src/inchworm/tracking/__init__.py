"""Where metrics go: the run's JSONL files and the terminal.

May import `core` and `config`.
"""
