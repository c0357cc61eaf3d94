"""A policy with a task encoder: learning sees the context that acting saw, and its gradient reaches the encoder."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from inchworm import PolicyConfig, PolicySpec, PPOConfig, PPOOptimizer, RolloutCollector, TorchPolicy, compute_advantages, make_vector_env
from inchworm.backends.torch.context import TaskEncoder, TaskPolicy
from inchworm.core.errors import ConfigError, RolloutError
from inchworm.rollout.rollout import Rollout
from inchworm.worlds.tasks import PointWorld

FEATURES, LANES, STEPS = 5, 4, 16


def make_policy(seed: int = 0, **config: Any) -> TaskPolicy:
    spec = PolicySpec(PointWorld().observation_space, PointWorld().action_space, PolicyConfig(hidden_sizes=(8, 8), **config))
    return TaskPolicy(spec, FEATURES, embedding_size=3, seed=seed)


def collected(policy: Any, context: bool = True) -> Rollout:
    """A rollout whose lanes 0 and 2 are in one task, 1 and 3 in another."""
    index = np.array([0, 1, 0, 1])
    table = np.random.default_rng(5).normal(size=(2, 2, 6, FEATURES)).astype(np.float32)
    table[..., 0] = 1.0
    table[1, 1] = 0.0  # padding
    env = make_vector_env(PointWorld, num_envs=LANES)
    policy.set_context(table if context else None, index)
    rollout = RolloutCollector(env, policy).collect(STEPS)
    policy.set_context(None)
    env.close()
    return dataclasses.replace(rollout, context=(table, np.tile(index, (STEPS, 1)))) if context else rollout


@pytest.mark.parametrize("context", [True, False])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_first_ratio_is_one_and_the_encoder_learns(context: bool, accumulation: int) -> None:
    policy = make_policy()
    before = {name: weight.copy() for name, weight in policy.get_weights().items()}
    learner = PPOOptimizer(policy, PPOConfig(num_minibatches=3, update_epochs=2, gradient_accumulation=accumulation), device="cpu")
    stats = learner.update(collected(policy, context))
    assert stats["ratio_error"] < 5e-5
    after = policy.get_weights()
    moved = {name for name in after if "encoder" in name and not np.array_equal(after[name], before[name])}
    names = {name for name in after if "encoder" in name}
    # Without a context no step is read: only the head's bias, the embedding of an unknown task, is learned.
    assert moved == (names if context else {"network.encoder.head.bias"})


def test_a_policy_without_the_context_of_a_rollout_does_not_agree_with_it() -> None:
    policy = make_policy()
    rollout = collected(policy)
    with pytest.warns(UserWarning, match="ratio_error"):
        stats = PPOOptimizer(policy, PPOConfig(num_minibatches=1, update_epochs=1), device="cpu").update(
            dataclasses.replace(rollout, context=())
        )
    assert stats["ratio_error"] > 1e-3


def test_the_gradient_of_the_encoder_is_that_of_finite_differences() -> None:
    policy = make_policy().double()
    rollout = collected(policy)
    learner = PPOOptimizer(policy, PPOConfig(), device="cpu")
    on_device, advantages = learner.critic_pass(rollout, None)
    (minibatch,) = learner.shuffle(learner.make_sequences(on_device, advantages, 1, successors=False), 1, np.arange(LANES * STEPS))
    assert [tuple(part.shape) for part in minibatch.context] == [(2, 2, 6, FEATURES), (1, LANES * STEPS)]

    def loss() -> torch.Tensor:
        evaluation = policy.evaluate(minibatch)
        return (evaluation.log_probs * torch.linspace(-1, 1, LANES * STEPS)).sum() + (evaluation.values**2).sum()

    weight = policy.encoder.step[0].weight
    loss().backward()
    exact, step = weight.grad, 1e-6
    assert exact.abs().max() > 1e-4
    for place in [(0, 0), (3, 2), (17, 4), (40, 1)]:
        with torch.no_grad():
            found = []
            for sign in (1, -1):
                weight[place] += sign * step
                found.append(float(loss()))
                weight[place] -= sign * step
        assert (found[0] - found[1]) / (2 * step) == pytest.approx(float(exact[place]), rel=1e-4, abs=1e-7)


def test_the_critic_reads_the_context_also_at_the_successors_of_cut_rows() -> None:
    policy = make_policy()
    rollout = collected(policy)
    found = compute_advantages(policy, rollout.map(torch.from_numpy), PPOConfig())
    table, index = rollout.context
    with torch.no_grad():
        embedding = policy.encoder(torch.from_numpy(table))
    row, lane = rollout.cut_rows[1]
    assert (row, lane, index[row, lane]) == (STEPS - 1, 1, 1)
    from inchworm.backends.torch.context import Conditioned

    seen = Conditioned(torch.from_numpy(rollout.cut_observations[1:2]), embedding[1:2])
    with torch.no_grad():
        assert float(found.next_values[row, lane]) == pytest.approx(float(policy.network.values(seen)), abs=1e-6)


def test_the_embedding_is_the_mean_over_steps_and_padding_changes_nothing() -> None:
    torch.manual_seed(0)
    encoder = TaskEncoder(2, 4, 3)
    steps = torch.tensor([[1.0, 0.3], [1.0, -0.7], [1.0, 2.0]])
    one = encoder(steps[None, None])
    with torch.no_grad():
        by_hand = torch.tanh(encoder.head(encoder.step(steps).mean(0)))
    torch.testing.assert_close(one[0], by_hand)
    padded = torch.zeros(1, 2, 5, 2)
    padded[0, 0, 1:4] = steps
    torch.testing.assert_close(encoder(padded), one)
    torch.testing.assert_close(encoder(torch.zeros(1, 1, 1, 2))[0], torch.tanh(encoder.head.bias))


def test_weights_move_to_another_policy_and_what_was_encoded_is_encoded_again() -> None:
    policy, other = make_policy(0), make_policy(1)
    rng = np.random.default_rng
    table = np.ones((2, 1, 3, FEATURES), np.float32)
    seen, starts = np.full((2, 2), 0.3, np.float32), np.zeros(2, bool)
    for each in (policy, other):
        each.set_context(table)
    first = other.act(seen, (), starts, rng(0)).actions
    other.set_weights(policy.get_weights())
    np.testing.assert_array_equal(other.act(seen, (), starts, rng(0)).actions, policy.act(seen, (), starts, rng(0)).actions)
    assert not np.array_equal(other.act(seen, (), starts, rng(0)).actions, first)


def test_wrong_contexts_are_one_line() -> None:
    policy = make_policy()
    with pytest.raises(ConfigError, match=r"task_trajectories must be \[tasks, trajectories, length, 5\], not \[1, 2\]"):
        policy.set_context(np.zeros((1, 2)))
    policy.set_context(np.zeros((3, 1, 2, FEATURES), np.float32))
    with pytest.raises(ConfigError, match="the context has 3 lanes, but 2 act"):
        policy.act(np.zeros((2, 2), np.float32), (), np.zeros(2, bool), np.random.default_rng(0))
    rollout = collected(policy)
    wrong = dataclasses.replace(rollout, context=(np.zeros((2, 1, 1, 4), np.float32), rollout.context[1]))
    with pytest.raises(RolloutError, match=r"expected trajectories \[K, n, L, 5\]"):
        PPOOptimizer(policy, PPOConfig(), device="cpu").update(wrong)
    with pytest.raises(ConfigError, match=r"set policy\.kind=mlp"):
        make_policy(kind="lstm")
    plain = TorchPolicy(policy.spec)
    with pytest.raises(RolloutError, match="this policy reads none"):
        PPOOptimizer(plain, PPOConfig(), device="cpu").update(rollout)
