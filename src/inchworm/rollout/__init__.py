"""The rollout, which collect returns and learn reads: the type, its writer, its checks, its file, and its split into sequences."""
