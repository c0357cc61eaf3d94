"""PPO in NumPy, with gradients written out: the place to read the algorithm, and the policy that acts everywhere."""
