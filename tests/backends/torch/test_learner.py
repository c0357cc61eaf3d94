"""What is specific to the torch learner: optimisers of users, `compute_ppo_loss`, clipping, devices; `conformance/` has what all share."""

from __future__ import annotations

import numpy as np
import optree
import pytest
import torch
from gymnasium import spaces

from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.backends.torch.gae import compute_advantages
from inchworm.backends.torch.learner import PPOOptimizer, pick_device
from inchworm.backends.torch.loss import normalize
from inchworm.config.sections import PPOConfig
from inchworm.core.errors import ConfigError
from inchworm.core.protocols import Learner
from inchworm.rollout.rollout import combine_rollouts

CONFIG = PPOConfig(learning_rate=1e-2, update_epochs=2, num_minibatches=4, rollout_steps=12)
TERMS = ("loss", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")


def learner_of(policy, config=CONFIG, **options):
    return PPOOptimizer(policy, config, **{"device": "cpu", **options})


def test_a_writable_rollout_is_not_changed_either(make_policy, collect):
    policy = make_policy()
    rollout = collect(policy).map(np.array)  # an own, writable copy of every array
    before = [leaf.tobytes() for leaf in optree.tree_leaves(rollout.to_dict()) if isinstance(leaf, np.ndarray)]
    learner_of(policy).update(rollout)
    assert before == [leaf.tobytes() for leaf in optree.tree_leaves(rollout.to_dict()) if isinstance(leaf, np.ndarray)]


def test_rollouts_of_two_times_can_be_combined(make_policy, collect):
    policy = make_policy()
    learner = learner_of(policy)
    stats = learner.update(combine_rollouts([collect(policy, seed=seed) for seed in range(3)]))
    assert learner.env_steps == 108
    assert stats["ratio_error"] < 5e-5


@pytest.mark.parametrize("form", ["samples", "sequences"])
def test_compute_ppo_loss_gives_the_terms_of_the_update(make_policy, collect, form):
    policy = make_policy(action_space=spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(-1, 1, (2,))}))
    rollout = collect(policy)
    config = PPOConfig(update_epochs=1, num_minibatches=1, normalize_advantages="batch", clip_vloss=True)
    learner = learner_of(policy, config)
    tensors = rollout.map(lambda array: torch.from_numpy(array.astype(np.int64) if array.dtype == np.uint64 else np.array(array)))
    found = compute_advantages(policy, tensors, config)
    fields = {
        "observations": rollout.observations,
        "actions": rollout.actions,
        "log_probs": rollout.log_probs,
        "advantages": normalize(found.advantages, tensors.valid).numpy(),
        "returns": found.returns.numpy(),
        "values": found.values.numpy(),
    }
    if form == "samples":
        fields = {name: optree.tree_map(lambda leaf: leaf.reshape(36, *leaf.shape[2:]), tree) for name, tree in fields.items()}
    terms = learner.compute_ppo_loss(**fields)
    assert terms["loss"].requires_grad
    stats = learner.update(rollout)
    for name in TERMS:
        assert float(terms[name].detach()) == pytest.approx(stats[name], rel=1e-5, abs=1e-6), name


def test_compute_ppo_loss_leaves_invalid_samples_out(make_policy, collect):
    policy = make_policy()
    rollout, learner = collect(policy, 4, 1, episode_length=9), learner_of(policy)
    row = np.ones(4, np.float32)
    fields = {"observations": rollout.observations[:, 0], "actions": rollout.actions[:, 0], "log_probs": rollout.log_probs[:, 0]}
    fields |= {"advantages": row, "returns": row, "values": row}
    half = {name: value[:2] for name, value in fields.items()}
    whole = learner.compute_ppo_loss(**fields, valid=np.array([True, True, False, False]))
    torch.testing.assert_close(whole["loss"], learner.compute_ppo_loss(**half)["loss"])


def test_a_foreign_optimizer_takes_our_gradient(make_policy, collect):
    policy = make_policy()
    rollout, config = collect(policy), PPOConfig(update_epochs=1, num_minibatches=1, max_grad_norm=None, learning_rate=0.123)
    learner = learner_of(policy, config, optimizer=torch.optim.SGD(policy.parameters(), lr=0.05))
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    stats = learner.update(rollout)
    norm = 0.0
    for name, p in policy.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.detach(), before[name] - 0.05 * p.grad)  # w - lr g, with its own lr
            norm += float(p.grad.square().sum())
    assert stats["grad_norm"] == pytest.approx(norm**0.5, rel=1e-5)  # no clipping


def test_a_foreign_optimizer_is_saved_and_follows_the_schedule(make_policy, collect, parameters):
    def learner(policy):
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.05, momentum=0.9)
        return learner_of(policy, CONFIG.replace(learning_rate_schedule="linear"), optimizer=optimizer, total_timesteps=72)

    policy = make_policy()
    first = learner(policy)
    first.update(collect(policy))
    state, weights = first.state_dict(), policy.get_weights()
    rollout = collect(policy, seed=1)
    first.update(rollout)
    assert first.optimizer.param_groups[0]["lr"] == pytest.approx(0.025)  # half of the run is over
    resumed = make_policy()
    resumed.set_weights(weights)
    second = learner(resumed)
    second.load_state_dict(state)
    second.update(rollout)
    np.testing.assert_array_equal(parameters(resumed), parameters(policy))


def test_gradients_are_clipped_by_their_global_norm(make_policy, collect):
    policy = make_policy()
    limit = 0.01
    learner = learner_of(policy, PPOConfig(update_epochs=1, num_minibatches=1, max_grad_norm=limit))
    stats = learner.update(collect(policy))
    assert stats["grad_norm"] > limit  # the metric is the norm before clipping
    norm = sum(float(p.grad.square().sum()) for p in policy.parameters() if p.grad is not None) ** 0.5
    assert norm == pytest.approx(limit, rel=1e-3)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_our_adam_is_torchs(make_policy, collect, parameters, weight_decay):
    config = CONFIG.replace(weight_decay=weight_decay)
    kind = torch.optim.AdamW if weight_decay else torch.optim.Adam
    policy, other = make_policy(), make_policy()
    theirs = kind(other.parameters(), lr=config.learning_rate, eps=config.adam_eps, weight_decay=weight_decay)
    learner, twin = learner_of(policy, config), learner_of(other, config, optimizer=theirs)
    assert learner.optimizer.eps == config.adam_eps
    for seed in range(3):
        rollout = collect(policy, seed=seed)
        one, two = learner.update(rollout), twin.update(rollout)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-5)
    np.testing.assert_allclose(parameters(policy), parameters(other), rtol=0, atol=1e-5)


def test_parameters_of_two_dtypes_need_an_optimizer_of_theirs(make_policy):
    policy = make_policy()
    policy.network.critic.double()
    with pytest.raises(ConfigError, match=r"one dtype, and these are torch.float32, torch.float64"):
        learner_of(policy)


def test_who_can_be_learned(make_policy):
    policy = make_policy()
    with pytest.raises(ConfigError, match=r"torch.nn.Module policies, not NumpyPolicy"):
        PPOOptimizer(NumpyPolicy(policy.spec))
    learner: Learner = PPOOptimizer(policy)  # keeps the contract, with a config and a device of its own choice
    assert learner.updates == 0


def test_devices():
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device(torch.device("cpu")) == torch.device("cpu")
    assert pick_device(None) == pick_device("auto")
    for wrong in ("cuda:99", "no such device"):
        with pytest.raises(ConfigError, match=r"cannot be used here .*; use cpu or auto"):
            pick_device(wrong)
