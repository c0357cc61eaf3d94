"""Environment copies in processes of their own: the worker's program, its messages, the pool, rebuilding after a crash.

May import what `env` may. A worker process imports no learning framework.
"""
