"""Schedules by hand, and a learner that is saved and restored goes on bit for bit."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from gymnasium import spaces

from inchworm.backends.torch.learner import PPOOptimizer
from inchworm.config.sections import PPOConfig
from inchworm.core.errors import ConfigError, InchwormError
from inchworm.core.trees import flatten_tree, unflatten_tree

SCHEDULED = PPOConfig(
    learning_rate=0.1, clip_coef=0.4, ent_coef=0.02, update_epochs=1, num_minibatches=2,
    learning_rate_schedule="linear", clip_schedule="cosine", ent_schedule="linear",
)  # fmt: skip


def test_linear_and_cosine_by_hand(make_policy, collect):
    # 36 samples an update, 144 in all: the updates begin at 0, 1/4, 1/2, 3/4 and 1 of the run.
    policy = make_policy()
    learner = PPOOptimizer(policy, SCHEDULED, device="cpu", total_timesteps=144)
    rates, clips, entropies = [], [], []
    for seed in range(6):
        coefficients = learner._coefficients()
        clips.append(coefficients.clip_coef)
        entropies.append(coefficients.ent_coef)
        rates.append(learner.update(collect(policy, seed=seed))["learning_rate"])
        assert learner.optimizer.learning_rate == pytest.approx(rates[-1])
    assert rates == pytest.approx([0.1, 0.075, 0.05, 0.025, 0, 0])  # past the end it stays at 0
    root = math.sqrt(0.5)  # cos(pi / 4)
    assert clips == pytest.approx([0.4, 0.2 * (1 + root), 0.2, 0.2 * (1 - root), 0, 0])
    assert entropies == pytest.approx([0.02, 0.015, 0.01, 0.005, 0, 0])


def test_the_learning_rate_can_be_steered_from_outside_and_is_saved(make_policy, collect):
    policy = make_policy()
    learner = PPOOptimizer(policy, SCHEDULED, device="cpu", total_timesteps=144)
    learner.learning_rate_scale = 0.5
    assert learner.update(collect(policy))["learning_rate"] == pytest.approx(0.05)
    restored = PPOOptimizer(make_policy(), SCHEDULED, device="cpu", total_timesteps=144)
    restored.load_state_dict(learner.state_dict())
    assert restored.update(collect(policy))["learning_rate"] == pytest.approx(0.075 / 2)
    assert restored.optimizer.learning_rate == pytest.approx(0.075 / 2)


def test_constant_schedules_need_no_length(make_policy, collect):
    policy = make_policy()
    learner = PPOOptimizer(policy, PPOConfig(learning_rate=0.1), device="cpu")
    for _ in range(2):
        assert learner.update(collect(policy))["learning_rate"] == 0.1
    assert learner.progress == 0.0


@pytest.mark.parametrize("name", ["learning_rate_schedule", "clip_schedule", "ent_schedule"])
def test_a_schedule_without_a_length_is_refused_in_words(make_policy, collect, name):
    policy = make_policy()
    learner = PPOOptimizer(policy, PPOConfig(**{name: "linear"}), device="cpu")
    with pytest.raises(ConfigError, match=rf'ppo.{name}="linear" needs the run\'s length'):
        learner.update(collect(policy))


@pytest.mark.parametrize("options", [{}, {"normalize_observations": True, "normalize_values": True}], ids=["plain", "normalisers"])
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_resumed_learner_ends_with_the_same_bits(make_policy, collect, options, stop):
    config = SCHEDULED.replace(update_epochs=2, weight_decay=0.01)
    rollouts = [collect(make_policy(**options), seed=seed) for seed in range(4)]

    def learner_of(policy):
        return PPOOptimizer(policy, config.replace(target_kl=0.5), device="cpu", seed=3, total_timesteps=200)

    straight = make_policy(**options)
    learner = learner_of(straight)
    for rollout in rollouts:
        learner.update(rollout)

    first = make_policy(**options)
    learner_before = learner_of(first)
    resumed = make_policy(**options, seed=9)  # begins as somebody else
    for rollout in rollouts[:stop]:
        learner_before.update(rollout)
    # Through what a file can hold: plain data and arrays.
    arrays, structure = flatten_tree(learner_before.state_dict())
    state = unflatten_tree(arrays, json.loads(json.dumps(structure)))
    resumed.set_weights(first.get_weights())
    learner_after = learner_of(resumed)
    learner_after.load_state_dict(state)
    for rollout in rollouts[stop:]:
        learner_after.update(rollout)
    expected = straight.get_weights()
    for name, value in resumed.get_weights().items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    assert (learner_after.updates, learner_after.env_steps) == (learner.updates, learner.env_steps) == (4, 144)
    assert json.dumps(learner_after.state_dict()["stream"]) == json.dumps(learner.state_dict()["stream"])


def test_a_saved_state_is_a_copy(make_policy, collect):
    policy = make_policy()
    learner = PPOOptimizer(policy, device="cpu")
    learner.update(collect(policy))
    state = learner.state_dict()
    before = {name: array.copy() for name, array in state["moments"]["mean"].items()}
    learner.update(collect(policy, seed=1))
    for name, array in before.items():
        np.testing.assert_array_equal(state["moments"]["mean"][name], array)


def test_moments_and_counters_are_all_restored(make_policy, collect):
    policy = make_policy(action_space=spaces.Box(-1, 1, (2,)))
    learner = PPOOptimizer(policy, device="cpu")
    learner.update(collect(policy))
    other = PPOOptimizer(make_policy(action_space=spaces.Box(-1, 1, (2,))), device="cpu", seed=77)
    other.load_state_dict(learner.state_dict())
    one, two = learner.state_dict(), other.state_dict()
    assert {name: value for name, value in one.items() if name != "moments"} == {k: v for k, v in two.items() if k != "moments"}
    assert one["moments"]["step"] == two["moments"]["step"] == 4 * 8
    for key in ("mean", "square"):
        assert set(one["moments"][key]) == set(policy.spec.layers)  # the names of the weights
        for name, value in one["moments"][key].items():
            assert value.shape == policy.get_weights()[name].shape
            assert value.any()
            np.testing.assert_array_equal(two["moments"][key][name], value)


def test_moments_of_another_policy_are_refused(make_policy, collect):
    policy = make_policy()
    learner = PPOOptimizer(policy, device="cpu")
    state = learner.state_dict()
    with pytest.raises(InchwormError, match=r"\['log_std'\] are only on one side"):
        PPOOptimizer(make_policy(action_space=spaces.Box(-1, 1, (3,))), device="cpu").load_state_dict(state)
    with pytest.raises(InchwormError, match=r"mean of actor.0.weight has shape \(8, 3\); the policy needs \(9, 3\)"):
        PPOOptimizer(make_policy(hidden_sizes=(9,)), device="cpu").load_state_dict(state)
