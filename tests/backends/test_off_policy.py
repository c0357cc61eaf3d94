"""Rollouts of other weights, on every backend: V-trace from the paper's sum, the decoupled objective, the proximal average, the guards."""

import dataclasses
import math
from dataclasses import replace

import numpy as np
import optree
import pytest
import torch

from doubles.learners import CONFIG, SIDES, collect, of_unknown_weights, parameters
from inchworm.backends.corrections import ProximalWeights, importance_metrics
from inchworm.backends.jax import gae as jax_gae
from inchworm.backends.numpy import gae as numpy_gae
from inchworm.backends.registry import compute_advantages, log_probs
from inchworm.backends.torch import gae as torch_gae
from inchworm.config.sections import PPOConfig
from inchworm.core.errors import ConfigError
from inchworm.policy.statistics import OBSERVATIONS
from inchworm.rollout.fake import create_fake_rollout
from inchworm.rollout.rollout import Rollout

pytestmark = pytest.mark.filterwarnings("ignore:the rollout was made by")


@pytest.fixture(params=SIDES, ids=lambda side: side.name)
def side(request):
    return request.param


def from_the_paper(rewards, values, next_values, terminated, truncated, ratios, gamma, decay, rho_bar, c_bar):
    """v_s = V_s + Σ_t γ^(t-s) (Π_i c_i) ρ_t (r_t + γ V_{t+1} - V_t), until the episode ends; and delta_s + γ lambda (v_{s+1} - V_{s+1})."""
    steps, lanes = rewards.shape
    targets, advantages = np.zeros(rewards.shape), np.zeros(rewards.shape)

    def delta(t, b):
        return rewards[t, b] + gamma * next_values[t, b] * (not terminated[t, b]) - values[t, b]

    def target(s, b):
        total, product = values[s, b], 1.0
        for t in range(s, steps):
            total += gamma ** (t - s) * product * min(rho_bar, ratios[t, b]) * delta(t, b)
            product *= decay * min(c_bar, ratios[t, b])
            if terminated[t, b] or truncated[t, b]:
                break
        return total

    for s, b in np.ndindex(steps, lanes):
        targets[s, b] = target(s, b)
    for s, b in np.ndindex(steps, lanes):
        last = s == steps - 1 or terminated[s, b] or truncated[s, b]
        advantages[s, b] = delta(s, b) + (0 if last else gamma * decay * (targets[s + 1, b] - values[s + 1, b]))
    return advantages, targets


def as_tensors(*arrays):
    return [torch.from_numpy(array) for array in arrays]


VTRACE = {
    "numpy": numpy_gae.compute_vtrace,
    "torch": lambda *given: torch_gae.compute_vtrace(*as_tensors(*given[:6]), *given[6:]),
    "torch on a device": lambda *given: torch_gae.vtrace_on_device(*as_tensors(*given[:6]), *given[6:]),
    "jax": jax_gae.compute_vtrace,
}


@pytest.mark.parametrize("name", VTRACE)
@pytest.mark.parametrize(("decay", "clip"), [(1.0, 1.0), (0.9, 1.0), (0.5, 2.0)])
def test_vtrace_is_the_sum_of_the_paper(name, decay, clip):
    rng = np.random.default_rng(1)
    for steps, lanes in [(1, 2), (7, 3), (6, 12)]:  # few lanes and many
        rewards, values, next_values, logs = rng.standard_normal((4, steps, lanes)).astype(np.float32)
        terminated, truncated = rng.random((2, steps, lanes)) < 0.2
        next_values[:-1] = np.where((terminated | truncated)[:-1], next_values[:-1], values[1:])  # the next row's, unless the episode ends
        found = VTRACE[name](rewards, values, next_values, terminated, truncated, logs, 0.9, decay, clip)
        expected = from_the_paper(rewards, values, next_values, terminated, truncated, np.exp(logs), 0.9, decay, clip, clip)
        for array, known in zip(found, expected, strict=True):
            np.testing.assert_allclose(np.asarray(array), known, rtol=0, atol=1e-5)
        on_policy = VTRACE[name](rewards, values, next_values, terminated, truncated, 0 * logs, 0.9, decay, clip)
        plain = numpy_gae.compute_gae(rewards, values, next_values, terminated, truncated, 0.9, decay)
        np.testing.assert_allclose(np.asarray(on_policy[0]), plain, rtol=0, atol=1e-5)
        np.testing.assert_allclose(np.asarray(on_policy[1]), plain + values, rtol=0, atol=1e-5)


def moved(policy, size=0.3):
    """The policy with other weights."""
    weights, rng = policy.get_weights(), np.random.default_rng(5)
    noise = {name: size * rng.standard_normal(weights[name].shape).astype(np.float32) for name in policy.spec.layers}
    policy.set_weights({**weights, **{name: weights[name] + noise[name] for name in noise}})
    return policy


def test_log_probs_of_a_rollout(side):
    for options in ({}, {"kind": "lstm", "memory_size": 4}) if side.name != "numpy" else ({},):
        policy = side.policy(**options)
        rollout = collect(policy) if not options else played(policy)
        np.testing.assert_allclose(log_probs(policy, rollout, CONFIG), rollout.log_probs, atol=1e-5)
        assert np.abs(log_probs(moved(policy), rollout, CONFIG) - rollout.log_probs).max() > 0.01


def played(policy, steps=8, lanes=3) -> Rollout:
    """A rollout in which a policy with memory acted row after row."""
    state = policy.initial_state(lanes)
    spec, rng = policy.spec, np.random.default_rng(0)
    fake = create_fake_rollout(spec.observation_space, spec.action_space, steps, lanes, memory=policy.initial_state(1), sequence_length=4)
    states, actions, logs = [], [], []
    for row in range(steps):
        if row % 4 == 0:
            states.append({name: np.array(part) for name, part in state.items()} if isinstance(state, dict) else state)
        step = policy.act(fake.observations[row], state, fake.episode_starts[row], rng)
        state = step.state
        actions.append(np.asarray(step.actions))
        logs.append(np.asarray(step.log_probs))
    recorded = optree.tree_map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *states)
    return replace(fake, actions=np.stack(actions), log_probs=np.stack(logs), policy_state=recorded, state_every=4)


def test_vtrace_in_compute_advantages_and_in_an_update(side):
    config = CONFIG.replace(correction="vtrace", vtrace_clip=1.5, normalize_advantages="off", update_epochs=1)
    policy = side.policy()
    rollout = collect(policy)
    fresh, corrected = (compute_advantages(policy, rollout, one) for one in (CONFIG, config))
    np.testing.assert_allclose(corrected.advantages, fresh.advantages, atol=1e-5)  # on fresh data it is GAE
    old = compute_advantages(moved(policy), rollout, config)
    ratios = np.exp(log_probs(policy, rollout, config) - rollout.log_probs)
    given = (rollout.rewards, old.values, old.next_values, rollout.terminated, rollout.truncated)
    expected = from_the_paper(*given, ratios, config.gamma, config.gae_lambda, 1.5, 1.5)
    np.testing.assert_allclose(old.advantages, expected[0], atol=2e-5)
    np.testing.assert_allclose(old.returns, expected[1], atol=2e-5)
    stats = side.learner(policy, config).update(rollout)
    assert stats["return_mean"] == pytest.approx(expected[1].mean(), abs=1e-4)


@pytest.mark.parametrize("changes", [{"correction": "vtrace"}, {"proximal_decay": 0.0}, {"correction": "vtrace", "proximal_decay": 0.0}])
def test_on_fresh_rollouts_the_corrections_change_no_bit(side, changes):
    ends = []
    for config in (CONFIG, CONFIG.replace(**changes)):
        policy = side.policy()
        learner = side.learner(policy, config)
        for seed in range(2):
            learner.update(collect(policy, seed=seed))
        ends.append(parameters(policy))
    np.testing.assert_array_equal(*ends)


def test_the_decoupled_objective_is_that_of_the_paper(side):
    """Its value for one minibatch, from p, q and b: mean of -(q / b) min(x A, clip(x) A) with x = p / q."""
    config = CONFIG.replace(
        proximal_decay=0.5, num_minibatches=1, update_epochs=1, normalize_advantages="off", learning_rate=0.1, clip_coef=0.02
    )
    policy = side.policy()
    learner = side.learner(policy, config)
    behavior = collect(policy, seed=1)
    first = parameters(policy)
    for seed in range(2):
        learner.update(collect(policy, seed=seed))
        if seed == 0:
            second = parameters(policy)
    third = parameters(policy)
    # Adam-like correction: shares 0.25, 0.5 and 1 of the weights before, between and after the two updates
    average = (0.25 * first + 0.5 * second + third) / 1.75
    twin = side.policy()
    weights, place = policy.get_weights(), 0
    for name in policy.spec.layers:
        weights[name] = average[place : place + weights[name].size].reshape(weights[name].shape).astype(np.float32)
        place += weights[name].size
    twin.set_weights(weights)
    b = behavior.log_probs
    q, p = (log_probs(one, behavior, config) for one in (twin, policy))
    advantages = compute_advantages(policy, behavior, config).advantages
    x = np.exp(p - q)
    expected = -(np.exp(q - b) * np.minimum(x * advantages, np.clip(x, 0.98, 1.02) * advantages)).mean()
    assert (np.abs(x - 1) > 0.02).any()  # the clip is at work
    stats = learner.update(behavior)
    assert stats["policy_loss"] == pytest.approx(expected, abs=2e-5)
    ratios = np.exp((p - b).astype(np.float64))
    assert stats["effective_sample_size"] == pytest.approx(ratios.sum() ** 2 / np.square(ratios).sum() / ratios.size, abs=1e-5)
    assert stats["behavior_kl"] == pytest.approx((ratios - 1 - np.log(ratios)).mean(), abs=1e-5)
    assert stats["approx_kl"] == pytest.approx((x - 1 - np.log(x)).mean(), abs=1e-5)  # the step's bound is from q


def test_the_proximal_average_is_part_of_the_learners_state(side):
    config = CONFIG.replace(proximal_decay=0.9)
    policy = side.policy()
    learner, old = side.learner(policy, config), collect(policy)
    for seed in range(2):
        learner.update(collect(policy, seed=seed))
    twin = side.policy()
    twin.set_weights(policy.get_weights())
    twin.policy_version = policy.policy_version
    resumed = side.learner(twin, config)
    resumed.load_state_dict(learner.state_dict())
    for _ in range(2):
        assert dict(learner.update(old)) == dict(resumed.update(old))
    np.testing.assert_array_equal(parameters(policy), parameters(twin))


def test_the_proximal_average_by_hand():
    average, keep = ProximalWeights(0.5), np.array([7])
    for value in (0.0, 4.0, 8.0):
        average.add({"w": np.array([value]), f"{OBSERVATIONS}.mean": np.array([value]), "count": keep})
    # shares 1/4, 1/2, 1 of 0, 4, 8: (2 + 8) / 1.75
    found = average.within({"w": np.array([8.0]), f"{OBSERVATIONS}.mean": np.array([8.0]), "count": keep})
    assert found["w"] == pytest.approx(10 / 1.75)
    assert (found[f"{OBSERVATIONS}.mean"], found["count"]) == (8.0, 7)


def test_the_guards_keep_a_policy_that_is_too_far_away(side):
    policy = side.policy()
    rollout = of_unknown_weights(collect(policy))
    before = parameters(moved(policy))
    for changes, words in (
        ({"min_effective_sample_size": 0.99}, r"effective_sample_size is 0\.\d+, below ppo.min_effective_sample_size=0.99"),
        ({"max_behavior_kl": 1e-4}, r"behavior_kl is .*, above ppo.max_behavior_kl=0.0001"),
    ):
        learner = side.learner(policy, CONFIG.replace(**changes))
        with pytest.warns(UserWarning, match="no steps were taken on this rollout: " + words):
            stats = learner.update(rollout)
        assert (stats["epochs"], stats["n_updates"], learner.updates) == (0, 0, 0)
        assert stats["behavior_kl"] > 1e-4
        np.testing.assert_array_equal(parameters(policy), before)
    assert side.learner(policy, CONFIG.replace(max_behavior_kl=1e4)).update(rollout)["epochs"] == 2


def test_importance_metrics_by_hand():
    found = importance_metrics(np.log(np.array([0.5, 1.0, 2.0], np.float32)))
    # ratios ½, 1, 2: 3.5² / 5.25 / 3; KL: mean of r - 1 - log r = (-½ + log 2 + 0 + 1 - log 2) / 3
    assert found["effective_sample_size"] == pytest.approx(3.5**2 / 5.25 / 3, rel=1e-6)
    assert found["behavior_kl"] == pytest.approx(0.5 / 3, rel=1e-5)
    assert found["ratio_error"] == pytest.approx(1, rel=1e-6)
    for bad in (np.inf, np.nan, 2000.0):
        found = importance_metrics(np.array([0.0, bad], np.float32))
        assert all(math.isfinite(value) for value in found.values())
        assert found["effective_sample_size"] <= 0.5


def test_settings_that_exclude_each_other():
    with pytest.raises(ConfigError, match=r"set ppo.normalize_advantages=batch or off"):
        PPOConfig(proximal_decay=0.5, normalize_advantages="minibatch")
    with pytest.raises(ConfigError, match="proximal_decay=1"):
        PPOConfig(proximal_decay=1.0)
    assert dataclasses.asdict(PPOConfig())["correction"] == "off"
