"""Environment copies in worker processes: the worker's program, its messages, the pool, and rebuilding after a crash."""
