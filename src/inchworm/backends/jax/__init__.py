"""PPO in JAX: pure functions of weights and data, and a whole update compiled as one. The only folder that imports jax."""
