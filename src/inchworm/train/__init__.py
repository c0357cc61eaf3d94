"""The training loop, callbacks, and `PPOTrainer`, the only place where all parts are put together.

May import everything but `policy_check` and `cli`.
"""
