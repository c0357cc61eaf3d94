"""Losses that people bring to NumPy return their gradients; beside the same losses in torch, which derives them itself."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium import spaces

from inchworm.backends.numpy.learner import NumpyOptimizer
from inchworm.backends.torch.learner import PPOOptimizer
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.config.sections import PPOConfig
from inchworm.core.errors import ConfigError

WHOLE = PPOConfig(update_epochs=1, num_minibatches=1, normalize_advantages="off", max_grad_norm=None)
SEVERAL = PPOConfig(learning_rate=1e-2, update_epochs=2, num_minibatches=5, normalize_advantages="minibatch")
HYBRID = spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Discrete(3)])


class InNumpy:
    """Each loss with its gradients, by hand. Their means are over valid samples, so that micro-batches add up."""

    @staticmethod
    def by_values(values, returns, valid):
        # Σ (V - R)³ / n: slope 3 (V - R)² / n
        off = (values - returns) * valid
        return (off**3).sum() / valid.sum(), {"values": 3 * off**2 / valid.sum()}

    @staticmethod
    def by_log_probs(log_probs, advantages, valid):
        # -Σ A log p / n
        return -(log_probs * advantages * valid).sum() / valid.sum(), {"log_probs": -advantages * valid / valid.sum()}

    @staticmethod
    def by_entropy(entropy, valid):
        # Σ (H - 1)² / n
        return ((entropy - 1) ** 2 * valid).sum() / valid.sum(), {"entropy": 2 * (entropy - 1) * valid / valid.sum()}

    @staticmethod
    def by_all(log_probs, entropy, values, valid):
        # Σ log p · H · V / n: three slopes at once
        weight = valid / valid.sum()
        slopes = {"log_probs": entropy * values * weight, "entropy": log_probs * values * weight, "values": log_probs * entropy * weight}
        return (log_probs * entropy * values * weight).sum(), slopes

    @staticmethod
    def by_weights(policy):
        # ½ Σ w² of the actor's first layer, and 3 Σ log_std
        weights = policy.get_weights()
        first, log_std = weights["actor.0.weight"], weights["log_std"]
        return 0.5 * (first**2).sum() + 3 * log_std.sum(), {"actor.0.weight": first, "log_std": np.full(log_std.shape, 3.0)}

    @staticmethod
    def by_both(values, policy, valid):
        # The mean value and the critic's last bias: a gradient through the network and one past it, to the same weight
        bias = policy.get_weights()["critic.head.bias"]
        value = (values * valid).sum() / valid.sum() + 2 * (bias**2).sum()
        return value, {"values": valid / valid.sum(), "critic.head.bias": 4 * bias}


class InTorch:
    """The same without them."""

    @staticmethod
    def by_values(values, returns, valid):
        return ((values - returns) ** 3 * valid).sum() / valid.sum()

    @staticmethod
    def by_log_probs(log_probs, advantages, valid):
        return -(log_probs * advantages * valid).sum() / valid.sum()

    @staticmethod
    def by_entropy(entropy, valid):
        return ((entropy - 1) ** 2 * valid).sum() / valid.sum()

    @staticmethod
    def by_all(log_probs, entropy, values, valid):
        return (log_probs * entropy * values * valid).sum() / valid.sum()

    @staticmethod
    def by_weights(policy):
        return 0.5 * policy.network.actor["0"].weight.square().sum() + 3 * policy.log_std.sum()

    @staticmethod
    def by_both(values, policy, valid):
        return (values * valid).sum() / valid.sum() + 2 * policy.network.critic["head"].bias.square().sum()


LOSSES = ("by_values", "by_log_probs", "by_entropy", "by_all", "by_weights", "by_both")


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("names", [*[(name,) for name in LOSSES], LOSSES], ids="+".join)
def test_values_gradient_norms_and_weights_are_those_of_torch(make_policy, collect, names, pieces):
    policy = make_policy(None, HYBRID, dtype=np.float64, random=True, action_bounds="tanh", normalize_values=True)
    theirs = TorchPolicy(policy.spec).double()
    theirs.set_weights(policy.get_weights())
    config = SEVERAL.replace(gradient_accumulation=pieces)
    learners = NumpyOptimizer(policy, config), PPOOptimizer(theirs, config, device="cpu")
    for seed in range(3):
        rollout = collect(policy, seed=seed)
        valid = rollout.valid.copy()
        valid[3:6, 1] = False
        rollout = replace(rollout, valid=valid)
        stats = [learner.update(rollout, [getattr(kind, name) for name in names]) for learner, kind in zip(learners, (InNumpy, InTorch))]
        assert stats[0].keys() == stats[1].keys()
        for name in stats[0]:
            assert stats[0][name] == pytest.approx(stats[1][name], rel=1e-9, abs=1e-9), name
        for name, weight in theirs.get_weights().items():
            np.testing.assert_allclose(policy.get_weights()[name], weight, rtol=0, atol=1e-10, err_msg=name)
    for name in names:
        assert stats[0][f"grad_norm/{name}"] > 1e-3


def test_the_total_is_the_sum_and_each_gradient_norm_is_its_own(make_policy, collect):
    # 100 times the actor's first bias, besides PPO's own loss: its norm is 100, and Adam's first step moves it by the rate.
    def pull(policy):
        slope = np.zeros(3)
        slope[0] = 100
        return 100 * policy.get_weights()["actor.head.bias"][0] + 7, {"actor.head.bias": slope}

    policy = make_policy()
    rollout = collect(policy)
    plain = NumpyOptimizer(make_policy(), WHOLE).update(rollout)
    stats = NumpyOptimizer(policy, WHOLE).update(rollout, [pull])
    assert stats["loss/pull"] == 7
    assert stats["loss"] == pytest.approx(plain["loss"] + 7, abs=1e-5)
    assert stats["grad_norm/pull"] == pytest.approx(100)
    assert stats["grad_norm"] == pytest.approx(100, rel=0.02)
    assert stats["grad_norm"] != pytest.approx(100, rel=1e-7)  # PPO's own is in it
    assert policy.get_weights()["actor.head.bias"][0] == pytest.approx(-3e-4, rel=1e-2)


def test_what_a_loss_gets(make_policy, collect):
    seen = {}

    def my_loss(policy, obs, actions, rewards, values, advantages, minibatch, evaluation, log_probs, entropy):
        seen.update(locals())
        return (values**2).mean(), {"values": 2 * values / values.size}

    policy = make_policy()
    rollout = collect(policy)
    stats = NumpyOptimizer(policy, WHOLE).update(rollout, [my_loss])
    assert seen["policy"] is policy
    order, expected = np.argsort(seen["rewards"].reshape(-1)), np.argsort(rollout.rewards.reshape(-1))
    np.testing.assert_array_equal(seen["obs"].reshape(-1, 3)[order], rollout.observations.reshape(-1, 3)[expected])
    np.testing.assert_array_equal(seen["actions"].reshape(-1)[order], rollout.actions.reshape(-1)[expected])
    np.testing.assert_allclose(seen["log_probs"].reshape(-1)[order], rollout.log_probs.reshape(-1)[expected], atol=1e-5)
    reference = make_policy().evaluate(seen["minibatch"])
    for name in ("log_probs", "entropy", "values"):
        assert seen[name].shape == (1, 36)
        assert seen[name] is getattr(seen["evaluation"], name)
        np.testing.assert_allclose(seen[name], getattr(reference, name), atol=1e-5)
    assert seen["evaluation"].value_scale == 1
    assert stats["loss/my_loss"] == pytest.approx((seen["values"] ** 2).mean(), rel=1e-6)


def test_sequences_keep_their_shape(make_policy, collect):
    shapes = []

    def my_loss(values, minibatch):
        shapes.append((values.shape, minibatch.observations.shape, minibatch.valid.shape))
        return 0.0, {"values": np.zeros(values.shape)}

    policy = make_policy()
    NumpyOptimizer(policy, PPOConfig(update_epochs=1, num_minibatches=2, sequence_length=4, gradient_accumulation=2)).update(
        collect(policy), [my_loss]
    )
    # 12 / 4 · 3 = 9 sequences, in minibatches of 5 and of 4 and padding, each in parts of 2 and 3
    assert shapes == [((4, n), (4, n, 3), (4, n)) for n in (2, 3, 2, 3)]


def test_the_policy_that_a_loss_sees_is_the_current_one(make_policy, collect):
    biases = []

    def watch(policy, evaluation, minibatch):
        np.testing.assert_allclose(policy.evaluate(minibatch).values, evaluation.values, atol=1e-5)
        biases.append(policy.get_weights()["actor.head.bias"].copy())
        return 0.0, {}

    policy = make_policy()
    NumpyOptimizer(policy, PPOConfig(learning_rate=1e-2, update_epochs=1, num_minibatches=4)).update(collect(policy), [watch])
    assert len(biases) == 4
    assert len({bias.tobytes() for bias in biases}) == 4  # each step moves it
    assert (policy.get_weights()["actor.head.bias"] != biases[-1]).any()


def test_a_loss_that_fails_leaves_the_weights_of_the_steps_before(make_policy, collect, parameters):
    def fails(policy, values):
        seen.append(parameters(policy))
        if len(seen) == 3:
            raise ZeroDivisionError
        return 0.0, {}

    seen = []
    policy = make_policy()
    before = parameters(policy)
    with pytest.raises(ZeroDivisionError):
        NumpyOptimizer(policy, SEVERAL).update(collect(policy), [fails])
    np.testing.assert_array_equal(parameters(policy), seen[-1])
    assert (parameters(policy) != before).any()


def test_next_observations_on_demand(make_policy, collect):
    seen = []

    def curiosity(obs, next_observations):
        seen.append((obs, next_observations))
        return ((next_observations - obs) ** 2).mean(), {}

    def plain(minibatch):
        return float(minibatch.next_observations != ()), {}

    policy = make_policy()
    stats = NumpyOptimizer(policy, WHOLE).update(collect(policy), [curiosity])
    assert seen[0][0].shape == seen[0][1].shape == (1, 36, 3)
    assert stats["loss/curiosity"] > 0
    assert stats["grad_norm/curiosity"] == 0
    assert NumpyOptimizer(make_policy(), WHOLE).update(collect(policy), [plain])["loss/plain"] == 0


def test_names_of_partials_and_objects(make_policy, collect):
    def scaled(values, weight=1.0):
        return weight, {"values": np.zeros(values.shape)}

    class Penalty:
        def __call__(self, log_probs):
            return np.float32(3), {"log_probs": np.zeros(log_probs.shape).tolist()}  # lists are arrays, too

    policy = make_policy()
    stats = NumpyOptimizer(policy, WHOLE).update(collect(policy), [functools.partial(scaled, weight=2.0), Penalty()])
    assert (stats["loss/scaled"], stats["loss/Penalty"]) == (2, 3)


def refusal(make_policy, collect, answer):
    def my_loss(values):
        return answer

    policy = make_policy()
    before = policy.get_weights()
    with pytest.raises(ConfigError) as caught:
        NumpyOptimizer(policy, WHOLE).update(collect(policy), [my_loss])
    for name, weight in before.items():
        np.testing.assert_array_equal(policy.get_weights()[name], weight)
    return str(caught.value)


@pytest.mark.parametrize(
    "answer", [1.0, torch.zeros(()), None, (1.0,), (1.0, {}, {}), (1.0, np.zeros((1, 36))), (np.zeros(2), {}), [1.0, {}]], ids=repr
)
def test_a_loss_that_returns_something_else_is_refused(make_policy, collect, answer):
    message = refusal(make_policy, collect, answer)
    assert message.startswith(
        "with --backend numpy the custom loss my_loss must return (value, gradients), gradients by log_probs, entropy"
    )
    assert "[1, 36]" in message
    assert message.endswith("NumPy cannot derive them itself; or use --backend torch")


def test_gradients_by_unknown_names_and_of_wrong_shapes_are_refused(make_policy, collect):
    message = refusal(make_policy, collect, (1.0, {"advantages": np.zeros((1, 36))}))
    assert (
        "the custom loss my_loss returned a gradient by 'advantages'; valid names are log_probs, entropy, values, actor.0.weight" in message
    )
    assert refusal(make_policy, collect, (1.0, {"values": np.zeros(36)})).endswith("a gradient by values of shape (36,), not (1, 36)")
    assert refusal(make_policy, collect, (1.0, {"actor.head.bias": 2.0})).endswith("by actor.head.bias of shape (), not (3,)")


def test_arguments_and_names_are_checked_before_anything_moves(make_policy, collect):
    policy = make_policy()
    learner, rollout = NumpyOptimizer(policy, WHOLE), collect(policy)

    def asks(observation):
        return 0.0, {}

    with pytest.raises(ConfigError, match="the custom loss asks asks for 'observation'; a loss may ask for policy, minibatch"):
        learner.update(rollout, [asks])

    def twin(values):
        return 0.0, {}

    with pytest.raises(ConfigError, match="two custom losses are called twin"):
        learner.update(rollout, [twin, twin])
    assert learner.updates == 0
