"""The rollout: what collect returns and learn reads. The type, its writer, its checks, its file, and its split into sequences.

May import `core` and `config`.
"""
