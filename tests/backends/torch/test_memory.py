"""Learning with memory: whole updates on rollouts of every length and spacing, and what is refused."""

import warnings

import numpy as np
import optree
import pytest
import torch
from gymnasium import spaces

from inchworm.backends.registry import acting_policy, compute_advantages
from inchworm.backends.torch.learner import PPOOptimizer
from inchworm.backends.torch.network import Past
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.collect.collector import RolloutCollector
from inchworm.config.sections import PolicyConfig, PPOConfig
from inchworm.core.errors import RolloutError
from inchworm.env.source import make_vector_env
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.fake import create_fake_rollout
from inchworm.rollout.rollout import Rollout

KINDS = ("lstm", "gru")
pytestmark = pytest.mark.filterwarnings("error:ratio_error")


def policy_of(env, kind, seed=0, **options):
    config = PolicyConfig(**{"kind": kind, "hidden_sizes": (8,), "memory_size": 6, **options})
    return TorchPolicy(PolicySpec(env.observation_space, env.action_space, config), seed=seed)


def cartpole(kind, steps=23, every=5, lanes=3, **options):
    """A policy, and two rollouts that it made one after another."""
    env = make_vector_env("CartPole-v1", lanes, 0, seed=1)
    policy = policy_of(env, kind, **options)
    collector = RolloutCollector(env, acting_policy(policy), seed=2, sequence_length=every)
    return policy, [collector.collect(steps), collector.collect(steps)]


def learned(policy, rollout, **options):
    twin = TorchPolicy(policy.spec, policy.get_weights())
    config = PPOConfig(**{"num_minibatches": 3, "update_epochs": 2, "learning_rate": 1e-2, **options})
    stats = PPOOptimizer(twin, config, device="cpu", seed=5).update(rollout)
    return twin.get_weights(), stats


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 5, 7, 23])
def test_an_update_with_any_sequence_length(kind, length):
    policy, (_, rollout) = cartpole(kind, every=length)
    assert rollout.policy_state["hidden"].shape == (-(-23 // length), 3, 1, 6)
    weights, stats = learned(policy, rollout, sequence_length=length)
    assert stats["ratio_error"] < 5e-5
    assert all(np.isfinite(value).all() for value in weights.values())
    moved = [name for name, value in policy.get_weights().items() if not np.array_equal(value, weights[name])]
    assert set(policy.spec.layers) <= set(moved)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_recorded_more_often_teaches_the_same(kind):
    (policy, (_, often)), (_, (_, seldom)) = cartpole(kind, every=2), cartpole(kind, every=6)
    assert len(often.policy_state["hidden"]) == 12 > len(seldom.policy_state["hidden"]) == 4
    np.testing.assert_equal(*(learned(policy, rollout, sequence_length=6)[0] for rollout in (often, seldom)))


def test_sequences_that_begin_where_nothing_was_recorded_are_refused():
    policy, (_, rollout) = cartpole("gru", every=4)
    with pytest.raises(RolloutError, match=r"recorded 6 times in 23 steps.*sequences of 5 steps.*ppo.sequence_length to a multiple"):
        learned(policy, rollout, sequence_length=5)
    learned(policy, rollout, sequence_length=23)  # one sequence begins at the first row, which is always recorded


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_give_the_same_step(kind):
    policy, (_, rollout) = cartpole(kind)
    whole, pieces = (learned(policy, rollout, gradient_accumulation=pieces, update_epochs=1)[0] for pieces in (1, 3))
    for name, value in whole.items():
        np.testing.assert_allclose(value, pieces[name], atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_many_sequences_are_valued_in_parts(kind, monkeypatch):
    policy, (_, rollout) = cartpole(kind)
    whole = compute_advantages(policy, rollout, PPOConfig(sequence_length=5)).values
    monkeypatch.setattr("inchworm.backends.torch.policy.VALUE_CHUNK", 11)  # two sequences of 5 rows at once
    np.testing.assert_allclose(compute_advantages(policy, rollout, PPOConfig(sequence_length=5)).values, whole, atol=1e-6)


def test_made_up_rollouts_have_memory_too():
    env = spaces.Box(-1, 1, (3,)), spaces.Discrete(2)
    policy = TorchPolicy(PolicySpec(*env, PolicyConfig(kind="gru", hidden_sizes=(4,), memory_size=3)))
    rollout = create_fake_rollout(*env, 20, 2, memory=policy.initial_state(1), sequence_length=8)
    assert rollout.policy_state["hidden"].shape == (3, 2, 1, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no policy made it
        assert np.isfinite(learned(policy, rollout, sequence_length=8)[1]["loss"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_rollout_without_the_policys_memory_is_refused(kind):
    policy, (_, rollout) = cartpole(kind)
    bare = optree.tree_map(lambda leaf: leaf, rollout.to_dict()) | {"policy_state": (), "cut_state": ()}
    other = cartpole("gru" if kind == "lstm" else "lstm")[1][0]
    wider = cartpole(kind, memory_size=7)[1][0]
    for wrong in (Rollout.from_dict(bare), other, wider):
        with pytest.raises(RolloutError, match=rf"policy.kind={kind}, 1 x 6.*collect it with this policy"):
            learned(policy, wrong)


def features_of(memory, rows, state, starts):
    """[L, N, size]"""
    return memory(rows, Past(state, starts))[0].reshape(*starts.shape, -1)


def test_memory_is_a_constant_of_learning():
    """No gradient goes through the recorded memory into the rollout before."""
    policy, (_, rollout) = cartpole("gru")
    state = {name: torch.zeros((2, *leaf.shape[2:]), requires_grad=True) for name, leaf in rollout.policy_state.items()}
    features = features_of(policy.network.memory, torch.ones((3, 2, 8)), state, torch.zeros((3, 2), dtype=torch.bool))
    assert torch.autograd.grad(features.sum(), list(state.values()), allow_unused=True) == (None,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_forgotten_is_forgotten_to_the_last_bit(kind, layers, dtype):
    """However much was remembered: after a reset the features are those of an empty memory, and no gradient goes back beyond it."""
    policy = policy_of(make_vector_env("CartPole-v1", 1, 0, seed=1), kind, memory_layers=layers).to(dtype)
    memory = policy.network.memory
    rows = torch.randn((7, 3, 8), generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    state = {name: torch.full((3, layers, 6), 1e3 if name == "cell" else 0.9, dtype=dtype) for name in memory.layout.names}
    starts = torch.zeros((7, 3), dtype=torch.bool)
    starts[4] = True
    found = features_of(memory, rows, state, starts)[4:]
    empty = {name: torch.zeros_like(leaf) for name, leaf in state.items()}
    alone = features_of(memory, rows[4:], empty, starts[:3])
    np.testing.assert_allclose(found.detach(), alone.detach(), rtol=0, atol=1e-7 if dtype == torch.float32 else 1e-15)
    (gradient,) = torch.autograd.grad(found.sum(), rows)
    assert gradient[:4].abs().max() == 0 < gradient[4:].abs().min()
