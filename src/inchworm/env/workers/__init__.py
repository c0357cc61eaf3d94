"""Environment copies in worker processes: the worker's program, its messages, the pool, and rebuilding after a crash.

May import what `env` may. A worker process imports no learning framework.
"""
