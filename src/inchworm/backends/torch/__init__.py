"""PPO in PyTorch: networks, loss by autograd, and the whole minibatch step compiled. The only folder that imports torch."""
