"""The training loop, and `PPOTrainer`, the one place where all parts are put together.

May import everything but `policy_check`, `analysis` and `cli`.
"""
