"""The training loop, callbacks, and `PPOTrainer`, the only place where all parts are put together."""
