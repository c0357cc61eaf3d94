"""The same weights say the same on every backend: actions from the same stream, values, log-probs and entropies."""

from dataclasses import replace

import numpy as np
import optree
import pytest
from gymnasium import spaces

from doubles.learners import ACTIVATION_FUNCTIONS, plain_outputs, telling_weights
from inchworm.backends.numpy.policy import NumpyPolicy, fresh_weights
from inchworm.config.sections import PolicyConfig
from inchworm.core.types import Minibatch
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.fake import create_fake_rollout

LENGTH, WIDTH = 2, 5


def spec_of(case, observation_space, **options):
    config = PolicyConfig(hidden_sizes=(8, 7), action_bounds=case.bounds, **options)
    return PolicySpec(case.observation_space(observation_space), case.action_space, config)


def minibatch_of(policy, case, space, seed=4):
    """Observations [L, N, *obs] and the actions that `policy` takes on them."""
    rng = np.random.default_rng(seed)
    observations = case.observations(space, (LENGTH, WIDTH), rng)
    flat = optree.tree_map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), observations)
    step = policy.act(flat, (), np.ones(LENGTH * WIDTH, bool), rng)
    unflat = optree.tree_map(lambda leaf: leaf.reshape(LENGTH, WIDTH, *leaf.shape[1:]), step.actions)
    log_probs, none = step.log_probs.reshape(LENGTH, WIDTH), np.zeros((LENGTH, WIDTH), np.float32)
    zeros = dict.fromkeys(("advantages", "returns", "values"), none)
    flags = {"valid": none == 0, "episode_starts": none != 0}
    return Minibatch(observations=observations, actions=unflat, log_probs=log_probs, **zeros, **flags)


def test_evaluate_and_value_equal_the_reference(backend, case):
    compare_with_the_reference(backend, case, np.float64, 1e-10)


@pytest.mark.parametrize("case", ["multi_discrete+mask", "box_clip", "tuple_mix"], indirect=True)
def test_evaluate_and_value_equal_the_reference_in_float32(backend, case):
    compare_with_the_reference(backend, case, np.float32, 5e-5)


def compare_with_the_reference(backend, case, dtype, tolerance):
    space = spaces.Dict({"b": spaces.Box(-3, 3, (4,)), "a": spaces.Discrete(3, start=1)})
    spec = spec_of(case, space, normalize_observations=True, normalize_values=True)
    weights = telling_weights(spec, dtype)
    reference, policy = NumpyPolicy(spec, weights), backend.policy(spec, weights)
    minibatch = minibatch_of(reference, case, space)
    expected, found = reference.evaluate(minibatch), policy.evaluate(backend.minibatch(minibatch))
    for name in ("log_probs", "entropy", "values", "value_scale"):
        array = backend.numpy(getattr(found, name))
        assert array.dtype == dtype, name
        np.testing.assert_allclose(array, getattr(expected, name), rtol=0, atol=tolerance, err_msg=name)
    values = backend.numpy(policy.value(backend.tree(minibatch.observations), (), minibatch.episode_starts))
    np.testing.assert_allclose(values, expected.values, rtol=0, atol=tolerance)
    assert np.abs(values).max() > 0.1  # it is not a comparison of zeros


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_same_stream_gives_the_same_actions(backend, case, deterministic):
    space = spaces.Box(-3, 3, (4,))
    spec = spec_of(case, space, normalize_observations=True)
    weights = telling_weights(spec)
    observations = case.observations(space, (9,), np.random.default_rng(1))
    steps = [
        policy.act(observations, (), np.ones(9, bool), np.random.default_rng(2), deterministic=deterministic)
        for policy in (NumpyPolicy(spec, weights), backend.policy(spec, weights))
    ]
    for name in ("actions", "env_actions", "log_probs"):
        for one, other in zip(*(optree.tree_leaves(getattr(step, name)) for step in steps)):
            assert one.dtype == other.dtype
            np.testing.assert_allclose(one, other, rtol=0, atol=5e-6 if one.dtype.kind == "f" and one.dtype.itemsize > 2 else 1e-3)
    assert all(step.log_probs.dtype == np.float32 for step in steps)


def test_what_the_environment_gets_lies_in_its_space(backend, case):
    space = spaces.Box(-3, 3, (4,))
    spec = spec_of(case, space, log_std_init=2.0)  # wide enough to leave every bound
    policy = backend.policy(
        spec, {**telling_weights(spec), **({"log_std": np.full(spec.layers["log_std"], 2.0)} if "log_std" in spec.layers else {})}
    )
    rng = np.random.default_rng(1)
    observations = case.observations(space, (50,), rng)
    for row in range(50):
        action = policy.predict(optree.tree_map(lambda leaf, row=row: leaf[row], observations), deterministic=False, rng=rng)
        assert case.action_space.contains(action), action


def test_log_std_is_bounded_under_tanh(backend):
    spec = PolicySpec(spaces.Box(-2, 2, (3,)), spaces.Box(-1, 1, (1,)), PolicyConfig(action_bounds="tanh", log_std_init=4.0))
    policy = backend.policy(spec, fresh_weights(spec, 0))
    draws = policy.act(np.zeros((4000, 3), np.float32), (), np.ones(4000, bool), np.random.default_rng(0)).actions
    assert draws.std() == pytest.approx(np.exp(2.0), rel=0.05)  # not e^4


@pytest.mark.parametrize(
    ("activation", "shared_trunk", "hidden_sizes"),
    [
        *((activation, False, (6, 4)) for activation in ACTIVATION_FUNCTIONS),
        *(("tanh", shared, sizes) for shared, sizes in ((False, ()), (True, ()), (False, (5,)), (True, (6, 4)))),
    ],
)
def test_every_architecture(backend, activation, shared_trunk, hidden_sizes):
    config = PolicyConfig(hidden_sizes=hidden_sizes, activation=activation, shared_trunk=shared_trunk)
    spec = PolicySpec(spaces.Box(-1, 1, (3,)), spaces.Discrete(4), config)
    weights = telling_weights(spec, np.float64)
    observations = np.random.default_rng(0).standard_normal((1, 6, 3)).astype(np.float32)
    policy, expected = backend.policy(spec, weights), plain_outputs(spec, weights, observations[0].astype(np.float64))[1]
    values = backend.numpy(policy.value(backend.tree(observations), (), ()))
    np.testing.assert_allclose(values, expected[None], rtol=0, atol=1e-12)


def test_normalisers_by_hand(backend):
    # One input 3, mean 1, variance 4: (3 - 1) / sqrt(4 + 1e-8) = 1; value head weight 2, bias 0.5: 2.5; std 3, mean 7: 3 * 2.5 + 7 = 14.5.
    # An input of 101 becomes 50 and is clipped to 10: 20.5 * 3 + 7 = 68.5.
    config = PolicyConfig(hidden_sizes=(), normalize_observations=True, normalize_values=True)
    spec = PolicySpec(spaces.Box(-200, 200, (1,)), spaces.Discrete(2), config)
    weights = fresh_weights(spec, 0)
    weights |= {"critic.head.weight": np.array([[2.0]], np.float32), "critic.head.bias": np.array([0.5], np.float32)}
    weights |= {"observation_normalizer.mean": np.array([1.0]), "observation_normalizer.var": np.array([4.0])}
    weights |= {"value_normalizer.mean": np.array(7.0), "value_normalizer.var": np.array(9.0)}
    policy = backend.policy(spec, weights)
    values = backend.numpy(policy.value(backend.tree(np.array([[[3.0], [101.0]]], np.float32)), (), ()))
    np.testing.assert_allclose(values, [[14.5, 68.5]], rtol=1e-6)


def test_weights_travel_between_backends_unchanged(backend, case):
    spec = spec_of(case, spaces.Box(-1, 1, (2,)), normalize_observations=True, normalize_values=True)
    weights = telling_weights(spec)
    weights["policy_version"] = np.array(17)
    policy = backend.policy(spec, weights)
    found = policy.get_weights()
    np.testing.assert_equal(found, weights)
    assert policy.policy_version == 17
    found["actor.head.bias"] += 1  # a copy: the policy keeps its own
    np.testing.assert_array_equal(policy.get_weights()["actor.head.bias"], weights["actor.head.bias"])


def test_statistics_move_alike(backend):
    space = spaces.Dict({"b": spaces.Box(-3, 3, (2,)), "d": spaces.Discrete(3), "i": spaces.Box(0, 255, (2,), np.uint8)})
    config = PolicyConfig(hidden_sizes=(4,), normalize_observations=True, normalize_values=True)
    spec = PolicySpec(space, spaces.Discrete(2), config)
    rollout = create_fake_rollout(space, spec.action_space, 12, 3, seed=1)
    dead = np.zeros((12, 3), bool)
    dead[4:7, 1] = True
    rollout = replace(rollout, valid=~dead)
    returns = np.random.default_rng(0).normal(5, 3, (12, 3)).astype(np.float32)
    policy = backend.policy(spec, telling_weights(spec))
    policy.set_weights({**fresh_weights(spec, 0), "policy_version": np.array(0)})
    policy.update_statistics(rollout, backend.array(returns))
    weights = policy.get_weights()
    alive = rollout.observations["b"][~dead].astype(np.float64)  # [n, 2], the first entries of the flat input
    np.testing.assert_allclose(weights["observation_normalizer.mean"][:2], alive.mean(0), rtol=1e-12)
    np.testing.assert_allclose(weights["observation_normalizer.var"][:2], alive.var(0), rtol=1e-12)
    np.testing.assert_allclose(weights["value_normalizer.mean"], returns[~dead].astype(np.float64).mean(), rtol=1e-12)
    np.testing.assert_allclose(weights["value_normalizer.var"], returns[~dead].astype(np.float64).var(), rtol=1e-12)
    assert weights["observation_normalizer.count"] == weights["value_normalizer.count"] == (~dead).sum() == 33
    # Bytes and one-hot entries are scaled already: a byte of 255 still is 1 for the network, whatever the statistics say.
    center, inverse_std = policy.statistics.observation_scale
    np.testing.assert_array_equal(center[2:], 0)
    np.testing.assert_array_equal(inverse_std[2:], 1)


def test_popart_keeps_values_in_reward_units(backend):
    spec = PolicySpec(spaces.Box(-1, 1, (3,)), spaces.Discrete(2), PolicyConfig(hidden_sizes=(8,), normalize_values=True))
    rollout = create_fake_rollout(spec.observation_space, spec.action_space, 10, 2)
    policy = backend.policy(spec, telling_weights(spec))
    observations = backend.tree(rollout.observations)
    before = backend.numpy(policy.value(observations, (), ()))
    head = policy.get_weights()["critic.head.weight"]
    for mean, std in ((100.0, 50.0), (-3.0, 0.1)):  # statistics that move far
        returns = np.random.default_rng(0).normal(mean, std, (10, 2)).astype(np.float32)
        policy.update_statistics(rollout, backend.array(returns))
        after = backend.numpy(policy.value(observations, (), ()))
        np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5)
    assert np.abs(policy.get_weights()["critic.head.weight"] / head - 1).max() > 0.1  # the head did move
