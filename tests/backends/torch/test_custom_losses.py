"""Losses that people bring: both signatures, what they get, how they are logged, and what is refused."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from inchworm.backends.torch.learner import PPOOptimizer
from inchworm.config.sections import PPOConfig
from inchworm.core.errors import ConfigError
from inchworm.rollout.rollout import Rollout

WHOLE = PPOConfig(update_epochs=1, num_minibatches=1, normalize_advantages="off", max_grad_norm=None)


def learner_of(policy, config=WHOLE, **options):
    return PPOOptimizer(policy, config, device="cpu", **options)


def test_the_signature_with_tensors(make_policy, collect):
    seen = {}

    def my_loss(policy, obs, actions, rewards, values, advantages):
        seen.update(policy=policy, obs=obs, actions=actions, rewards=rewards, values=values, advantages=advantages)
        return values.square().mean()

    policy = make_policy()
    rollout = collect(policy)
    stats = learner_of(policy).update(rollout, custom_loss_fns=[my_loss])
    assert seen["policy"] is policy
    order = np.argsort(seen["rewards"].numpy().reshape(-1))
    expected = np.argsort(rollout.rewards.reshape(-1))
    np.testing.assert_array_equal(seen["obs"].reshape(-1, 3)[order], rollout.observations.reshape(-1, 3)[expected])
    np.testing.assert_array_equal(seen["actions"].reshape(-1)[order], rollout.actions.reshape(-1)[expected])
    assert seen["values"].requires_grad  # the current critic's, so that a loss on them teaches
    assert stats["loss/my_loss"] == pytest.approx(float(seen["values"].detach().square().mean()), rel=1e-6)


def test_the_signature_with_minibatch_and_evaluation(make_policy, collect):
    def my_loss(policy, minibatch, evaluation):
        assert minibatch.valid.all()
        return (evaluation.log_probs * minibatch.advantages).mean()

    policy = make_policy()
    stats = learner_of(policy).update(collect(policy), [my_loss])
    assert np.isfinite(stats["loss/my_loss"])
    assert stats["grad_norm/my_loss"] > 0


def test_the_total_is_the_sum_and_each_gradient_norm_is_its_own(make_policy, collect):
    def first(evaluation):
        return 3 * evaluation.values.mean()

    def second(entropy):
        return -entropy.mean()

    policy = make_policy()
    rollout = collect(policy)
    config = WHOLE.replace(vf_coef=0.0, ent_coef=0.0)
    plain = learner_of(make_policy(), config).update(rollout)
    stats = learner_of(policy, config).update(rollout, [first, second])
    assert stats["loss"] == pytest.approx(plain["loss"] + stats["loss/first"] + stats["loss/second"], abs=1e-6)
    # The gradient of 3 mean(V) with respect to the critic, by itself:
    fresh = make_policy()
    (3 * fresh.network.values(torch.from_numpy(rollout.observations.reshape(-1, 3).copy())).mean()).backward()
    expected = sum(float(p.grad.square().sum()) for p in fresh.parameters() if p.grad is not None) ** 0.5
    assert stats["grad_norm/first"] == pytest.approx(expected, rel=1e-5)
    assert stats["grad_norm/second"] > 0
    assert stats["grad_norm/first"] != pytest.approx(stats["grad_norm"], rel=1e-3)


def test_a_custom_loss_moves_the_weights(make_policy, collect, parameters):
    def pull(policy):
        return policy.network.actor["head"].bias[0] * 100.0

    policy, other = make_policy(), make_policy()
    rollout = collect(policy)
    learner_of(policy).update(rollout, [pull])
    learner_of(other).update(rollout)
    assert policy.network.actor["head"].bias[0] < other.network.actor["head"].bias[0] or (parameters(policy) != parameters(other)).any()
    assert float(policy.network.actor["head"].bias[0].detach()) == pytest.approx(-3e-4, rel=1e-2)  # Adam's first step is lr


def numbered(policy):
    """obs of row (t, b) is 10 t + b; the true successor of row t is 1000 + t at cuts, else the next row's."""
    steps, lanes = 6, 2
    number = (10 * np.arange(steps)[:, None] + np.arange(lanes)).astype(np.float32)
    observations = np.stack([number] * 3, -1)
    successors = 1000 + np.stack([number] * 3, -1)
    successors[:-1] = observations[1:]
    truncated, terminated = np.zeros((steps, lanes), bool), np.zeros((steps, lanes), bool)
    truncated[2, 0] = terminated[3, 1] = True
    successors[2, 0] = 1020.0
    data = {
        "observations": observations / 100,
        "actions": np.zeros((steps, lanes), np.int64),
        "log_probs": np.full((steps, lanes), np.log(1 / 3), np.float32),
        "rewards": number,
        "terminated": terminated,
        "truncated": truncated,
        "next_observations": successors / 100,
    }
    return Rollout.from_dict(data), successors


def test_next_observations_are_the_true_successors(make_policy):
    policy = make_policy()
    rollout, successors = numbered(policy)
    found = {}

    def curiosity(obs, next_observations, rewards):
        for row, reward in zip(next_observations.reshape(-1, 3), rewards.reshape(-1)):
            found[int(reward)] = float(row[0] * 100)
        return (next_observations - obs).square().mean() * 0

    learner_of(policy).update(rollout, [curiosity])
    for t in range(6):
        for b in range(2):
            if not rollout.terminated[t, b]:  # nothing follows a terminated row
                assert found[10 * t + b] == pytest.approx(float(successors[t, b, 0]), abs=1e-3), (t, b)
    assert found[20] == pytest.approx(1020, abs=1e-3)  # the truncated row: what came before the reset, not the next episode
    assert found[50] == pytest.approx(1050, abs=1e-3)  # and the lane's last row


def test_successors_are_made_on_demand_only(make_policy, collect):
    seen = []

    def my_loss(minibatch):
        seen.append(minibatch.next_observations)
        return torch.zeros(())

    policy = make_policy()
    stats = learner_of(policy).update(collect(policy), [my_loss])
    assert seen == [()]
    assert stats["loss/my_loss"] == 0.0
    assert "grad_norm/my_loss" not in stats  # a loss without a gradient has no norm


def test_names_of_partials_objects_and_lambdas(make_policy, collect):
    def scaled(values, weight=1.0):
        return weight * values.mean()

    class Penalty:
        def __call__(self, log_probs):
            return log_probs.mean()

    policy = make_policy()
    stats = learner_of(policy).update(collect(policy), [functools.partial(scaled, weight=2.0), Penalty()])
    assert {"loss/scaled", "loss/Penalty"} <= set(stats)


def test_what_is_refused(make_policy, collect):
    policy = make_policy()
    learner, rollout = learner_of(policy), collect(policy)

    def asks(observation):
        return observation.mean()

    with pytest.raises(ConfigError, match="the custom loss asks asks for 'observation'; a loss may ask for policy, minibatch"):
        learner.update(rollout, [asks])

    def vector(values):
        return values

    with pytest.raises(ConfigError, match=r"the custom loss vector returned \(1, 36\); it must return a scalar tensor"):
        learner.update(rollout, [vector])

    def number(values):
        return 1.0

    with pytest.raises(ConfigError, match="the custom loss number returned float"):
        learner.update(rollout, [number])

    def twin(values):
        return values.mean()

    with pytest.raises(ConfigError, match="two custom losses are called twin"):
        learner.update(rollout, [twin, twin])


def test_an_empty_rollout_logs_zeros_for_custom_losses(make_policy, collect):
    def my_loss(values):
        return values.mean()

    policy = make_policy()
    needed = ("observations", "actions", "log_probs", "rewards", "terminated")
    rollout = Rollout.from_dict({name: collect(policy)[name][:0] for name in needed})
    assert learner_of(policy).update(rollout, [my_loss])["loss/my_loss"] == 0.0
