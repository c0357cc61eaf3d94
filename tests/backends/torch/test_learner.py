"""What is specific to the torch learner: optimisers of users, `compute_ppo_loss`, clipping, devices; `conformance/` has what all share."""

import copy
from dataclasses import replace

import numpy as np
import optree
import pytest
import torch
from gymnasium import spaces

from doubles.learners import CONFIG, TORCH, collect, parameters, tensors
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.backends.torch.gae import compute_advantages
from inchworm.backends.torch.learner import PackedSequences, PPOOptimizer, micro_batches, pick_device, sequences_of
from inchworm.backends.torch.loss import normalize
from inchworm.backends.torch.network import Network
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.config.sections import PolicyConfig, PPOConfig
from inchworm.core.errors import ConfigError, InchwormError
from inchworm.core.protocols import Learner
from inchworm.core.types import Advantages
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.fake import create_fake_rollout
from inchworm.rollout.rollout import Rollout

TERMS = ("loss", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")


@pytest.mark.parametrize("form", ["samples", "sequences"])
def test_compute_ppo_loss_gives_the_terms_of_the_update(form):
    policy = TORCH.policy(action_space=spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(-1, 1, (2,))}))
    rollout = collect(policy)
    config = PPOConfig(update_epochs=1, num_minibatches=1, normalize_advantages="batch", clip_vloss=True)
    learner = TORCH.learner(policy, config)
    found = compute_advantages(policy, tensors(rollout), config)
    fields = {
        "observations": rollout.observations,
        "actions": rollout.actions,
        "log_probs": rollout.log_probs,
        "advantages": normalize(found.advantages, torch.ones(12, 3, dtype=torch.bool)).numpy(),
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


def test_compute_ppo_loss_leaves_invalid_samples_out():
    policy = TORCH.policy()
    rollout, learner = collect(policy, 4, 1, episode_length=9), TORCH.learner(policy)
    row = np.ones(4, np.float32)
    fields = {"observations": rollout.observations[:, 0], "actions": rollout.actions[:, 0], "log_probs": rollout.log_probs[:, 0]}
    fields |= {"advantages": row, "returns": row, "values": row}
    half = {name: value[:2] for name, value in fields.items()}
    whole = learner.compute_ppo_loss(**fields, valid=np.array([True, True, False, False]))
    torch.testing.assert_close(whole["loss"], learner.compute_ppo_loss(**half)["loss"])


def test_a_foreign_optimizer_takes_our_gradient():
    policy = TORCH.policy()
    rollout, config = collect(policy), PPOConfig(update_epochs=1, num_minibatches=1, max_grad_norm=None, learning_rate=0.123)
    learner = TORCH.learner(policy, config, optimizer=torch.optim.SGD(policy.parameters(), lr=0.05))
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    stats = learner.update(rollout)
    norm = 0.0
    for name, p in policy.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.detach(), before[name] - 0.05 * p.grad)  # w - lr g, with its own lr
            norm += float(p.grad.square().sum())
    assert stats["grad_norm"] == pytest.approx(norm**0.5, rel=1e-5)  # no clipping


def test_a_foreign_optimizer_is_saved_and_follows_the_schedule():
    def learner(policy):
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.05, momentum=0.9)
        return TORCH.learner(policy, CONFIG.replace(learning_rate_schedule="linear"), optimizer=optimizer, total_timesteps=72)

    policy = TORCH.policy()
    first = learner(policy)
    first.update(collect(policy))
    state, weights = first.state_dict(), policy.get_weights()
    rollout = collect(policy, seed=1)
    first.update(rollout)
    assert first.optimizer.param_groups[0]["lr"] == pytest.approx(0.025)  # half of the run is over
    resumed = TORCH.policy()
    resumed.set_weights(weights)
    second = learner(resumed)
    second.load_state_dict(state)
    second.update(rollout)
    np.testing.assert_array_equal(parameters(resumed), parameters(policy))


def test_muon_moves_matrices_and_adamw_the_rest():
    policy, rate = TORCH.policy(), 1e-3
    config = PPOConfig(update_epochs=1, num_minibatches=1, learning_rate=rate, optimizer="muon", adam_eps=1e-12)
    before = {name: value.copy() for name, value in policy.get_weights().items() if name in policy.spec.layers}
    TORCH.learner(policy, config).update(collect(policy))
    for name, old in before.items():
        change = policy.get_weights()[name] - old
        if old.ndim == 2:  # orthogonal up to 5 steps of Newton and Schulz, and of the size that AdamW's steps have
            scale = 0.2 * rate * max(old.shape) ** 0.5
            singular = np.linalg.svd(change / scale, compute_uv=False)[: min(old.shape)]
            assert 0.3 < singular.min() <= singular.max() < 1.3, name
        else:  # Adam's first step is the rate, against the sign of the gradient
            np.testing.assert_allclose(np.abs(change), rate, rtol=0.05, err_msg=name)


def test_the_call_of_the_modular_components():
    """`PPOOptimizer(policy, optimizer, device, config)`, by position and by name, and `(policy, config)`: the same update."""
    config, ends = CONFIG.replace(clip_coef=0.1), []

    def sgd(policy):
        return torch.optim.SGD(policy.parameters(), lr=0.05)

    calls = [
        lambda policy: PPOOptimizer(policy, sgd(policy), "cpu", config),
        lambda policy: PPOOptimizer(policy, sgd(policy), torch.device("cpu"), config=config),
        lambda policy: PPOOptimizer(policy, optimizer=sgd(policy), device="cpu", config=config),
        lambda policy: PPOOptimizer(policy=policy, config=config, optimizer=sgd(policy), device="cpu"),
        lambda policy: PPOOptimizer(policy, config, optimizer=sgd(policy), device="cpu"),
    ]
    for call in calls:
        policy = TORCH.policy()
        learner = call(policy)
        assert isinstance(learner.optimizer, torch.optim.SGD)
        assert (learner.device.type, learner.config) == ("cpu", config)
        assert learner.update(collect(policy))["learning_rate"] == 0.05  # the optimiser's own
        ends.append(parameters(policy))
    for end in ends[1:]:
        np.testing.assert_array_equal(end, ends[0])
    policy = TORCH.policy()
    brought = sgd(policy)
    assert PPOOptimizer(policy, brought).config == PPOConfig()  # the config is optional
    assert PPOOptimizer(policy, brought).optimizer is brought
    assert PPOOptimizer(policy, None, "cpu", config).config == config
    assert PPOOptimizer(policy, config).config == config


def test_a_call_that_means_nothing_is_refused():
    policy = TORCH.policy()
    with pytest.raises(ConfigError, match=r"needs a torch.optim.Optimizer or a PPOConfig after the policy, not str; call it as"):
        PPOOptimizer(policy, "cpu")
    with pytest.raises(ConfigError, match=r"the config of PPOOptimizer is a PPOConfig, not dict; see PPOConfig.from_dict"):
        PPOOptimizer(policy, None, "cpu", {"clip_coef": 0.1})
    with pytest.raises(ConfigError, match=r"the optimizer SGD holds none of the policy's parameters, so nothing would be learned"):
        PPOOptimizer(policy, torch.optim.SGD(TORCH.policy().parameters(), lr=0.05), "cpu")
    sgd = torch.optim.SGD(policy.parameters(), lr=0.05)
    twice = [((CONFIG,), {"config": CONFIG}), ((sgd,), {"optimizer": sgd}), ((None, "cpu"), {"device": "cpu"})]
    for given, named in (*twice, ((None,) * 4, {})):
        with pytest.raises(TypeError):
            PPOOptimizer(policy, *given, **named)


def test_parameters_of_two_dtypes_need_an_optimizer_of_theirs():
    policy = TORCH.policy()
    policy.network.critic.double()
    with pytest.raises(ConfigError, match=r"one dtype, and these are torch.float32, torch.float64"):
        TORCH.learner(policy)


def test_which_policies_can_be_learned():
    policy = TORCH.policy()
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


@pytest.mark.parametrize("how", ["nan loss", "infinite loss", "nan gradient"])
def test_a_bad_minibatch_leaves_a_foreign_optimizer_alone(how):
    def flaw(values):
        if how == "nan gradient":  # a finite loss whose gradient is not: d sqrt(x) / dx at 0
            return (values * 0).sqrt().sum()
        return values.sum() * float("nan") if how == "nan loss" else values.sum() + float("inf")

    policy = TORCH.policy()
    sgd = torch.optim.SGD(policy.parameters(), lr=0.1, momentum=0.9)
    learner = TORCH.learner(policy, CONFIG.replace(num_minibatches=1, update_epochs=1), optimizer=sgd)
    learner.update(collect(policy))  # a good one, so that there are moments to harm
    before, saved = parameters(policy), copy.deepcopy(learner.state_dict()["moments"])
    assert learner.update(collect(policy, seed=1), [flaw])["skipped_steps"] == 1
    np.testing.assert_array_equal(parameters(policy), before)
    assert optree.tree_leaves(saved)
    np.testing.assert_equal(learner.state_dict()["moments"], saved)
    learner.update(collect(policy, seed=2))
    assert (parameters(policy) != before).any()


# Normalisers: they move once an update, by that rollout alone

BOTH = {"normalize_observations": True, "normalize_values": True}


def test_the_first_update_moves_statistics_only():
    policy = TORCH.policy(**BOTH)
    learner, rollout = TORCH.learner(policy), collect(policy)
    before, values = policy.get_weights(), policy.value(rollout.observations)
    stats = learner.update(rollout)
    after = policy.get_weights()
    assert stats["warm_up"] == 1
    assert all(stats[name] == 0 for name in ("loss", "policy_loss", "grad_norm"))
    assert all(np.isfinite(list(stats.values())))
    for name in before:
        moved = name.startswith(("observation_normalizer", "value_normalizer", "critic.head", "policy_version"))
        assert np.array_equal(before[name], after[name]) != moved, name
    assert learner.updates == policy.policy_version == 1
    assert learner.optimizer.state_dict()["step"] == 0  # no optimiser step was made
    assert "warm_up" not in learner.update(collect(policy, seed=1))
    assert values.shape == (12, 3)


def test_statistics_stand_still_within_an_update():
    """Every minibatch of every epoch is seen with the statistics that acted: the first one's ratio is 1."""
    policy = TORCH.policy(**BOTH)
    learner = TORCH.learner(policy)
    learner.update(collect(policy))
    assert policy.get_weights()["observation_normalizer.count"] == 36
    assert learner.update(collect(policy, seed=1))["ratio_error"] < 5e-5
    seen = []

    def spy(policy, entropy):
        seen.append(policy.get_weights()["observation_normalizer.mean"])
        return 0 * entropy.sum()

    learner.update(collect(policy, seed=2), [spy])
    assert len(seen) == 8
    assert all(np.array_equal(mean, seen[0]) for mean in seen)
    assert (policy.get_weights()["observation_normalizer.mean"] != seen[0]).any()
    assert policy.get_weights()["observation_normalizer.count"] == 3 * 36


@pytest.mark.parametrize("space", [spaces.Discrete(4), spaces.Box(0, 255, (2,), np.uint8)], ids=["categories", "bytes"])
def test_observations_that_are_scaled_already_need_no_statistics(space):
    policy = TORCH.policy(space, normalize_observations=True)
    learner = TORCH.learner(policy)
    stats = learner.update(collect(policy))
    assert "warm_up" not in stats  # nothing to wait for
    assert not any(name.startswith("observation_normalizer") for name in policy.get_weights())


# Rollouts as sequences, minibatches and micro-batches

SPACE = spaces.Dict({"x": spaces.Box(-1, 1, (2,)), "action_mask": spaces.MultiBinary(3)})


def advantages_of(rollout):
    number = torch.arange(rollout.rewards.numel(), dtype=torch.float32).reshape(rollout.rewards.shape)
    return Advantages(number, number, number, number)


def test_recorded_memory_follows_its_sequence():
    rollout = create_fake_rollout(SPACE, spaces.Discrete(3), 4, 2)
    memory = np.arange(2 * 2, dtype=np.float32).reshape(2, 2, 1)  # [T/L, B, mem]: 2 chunks of 2 lanes
    cut_state = np.zeros((len(rollout.cut_rows), 1), np.float32)
    held = tensors(replace(rollout, policy_state=memory, cut_state=cut_state))
    sequences = sequences_of(held, advantages_of(held), 2, successors=False)
    assert sequences.policy_state.shape == (4, 1)
    for part in PackedSequences(sequences).minibatches(np.array([[3, 1], [0, 2]]), np.ones((2, 2), bool)):
        chunks, lanes = (part.values[0] // 4).long(), (part.values[0] % 2).long()
        torch.testing.assert_close(part.policy_state[:, 0], torch.from_numpy(memory)[chunks, lanes, 0])
        for half in micro_batches(part, 2):
            assert half.policy_state.shape == (1, 1)


# A central critic
def central_spec(**options):
    config = PolicyConfig(hidden_sizes=(8,), central_critic=True, **options)
    return PolicySpec(spaces.Box(-1, 1, (3,)), spaces.Discrete(2), config, spaces.Box(-9, 9, (2,)), 2)


def central_rollout(num_lanes=6, copies=3, num_steps=8):
    """The global state of copy c at row t is (c, t), and a row's reward is 10 t + its lane, so that all can be recognised."""
    fake = create_fake_rollout(central_spec().observation_space, central_spec().action_space, num_steps, num_lanes)
    world = np.indices((num_steps, copies))[::-1].transpose(1, 2, 0).astype(np.float32)  # [T, E, 2]
    cuts = np.stack([fake.cut_rows[:, 1] // (num_lanes // copies), fake.cut_rows[:, 0] + 1], 1).astype(np.float32)
    rewards = (10 * np.arange(num_steps)[:, None] + np.arange(num_lanes)).astype(np.float32)
    return Rollout.from_dict({**fake.to_dict(), "global_state": world, "cut_global_state": cuts, "rewards": rewards})


@pytest.mark.parametrize("length", [1, 3, 8])
@pytest.mark.parametrize("pieces", [1, 2])
def test_every_sequence_of_a_minibatch_has_the_world_of_its_copy(length, pieces):
    seen = []

    def record(minibatch, entropy):
        seen.append(minibatch)
        return 0 * entropy.sum()

    config = PPOConfig(update_epochs=1, num_minibatches=2, sequence_length=length, gradient_accumulation=pieces)
    TORCH.learner(TorchPolicy(central_spec()), config).update(central_rollout(), [record])
    assert len(seen) == 2 * pieces
    for minibatch in seen:
        times, lanes = minibatch.rewards // 10, minibatch.rewards % 10
        torch.testing.assert_close(minibatch.global_state["world"], torch.stack([lanes // 2, times], -1))
        torch.testing.assert_close(minibatch.global_state["place"], (lanes % 2).long())


def test_the_gradient_reaches_the_critics_view_of_the_world_and_no_actor():
    policy = TorchPolicy(central_spec())
    rollout = tensors(central_rollout())
    minibatch = sequences_of(rollout, advantages_of(rollout), 1, successors=False)
    dead = replace(minibatch, valid=torch.zeros_like(minibatch.valid))
    policy.evaluate(minibatch).values.sum().backward()
    named = dict(policy.named_parameters())
    own, world = named["network.critic.0.weight"].grad.split([3, 4], 1)
    assert (world != 0).all()
    assert (own != 0).any()
    assert all(parameter.grad is None for name, parameter in named.items() if "actor" in name)
    policy.zero_grad()
    policy.evaluate(dead).values.sum().backward()
    own, world = named["network.critic.0.weight"].grad.split([3, 4], 1)
    assert (own == 0).all()  # of the dead the critic learns through the world alone
    assert (world != 0).all()


def test_statistics_of_the_world_count_each_copy_once():
    normalized = central_spec(normalize_observations=True)
    rollout = central_rollout()
    for policy in (TorchPolicy(normalized), NumpyPolicy(normalized)):
        assert policy.statistics.pending
        policy.update_statistics(rollout, rollout.rewards)
        assert policy.statistics.global_state is not None
        assert policy.statistics.global_state.count == 8 * 3
        np.testing.assert_allclose(policy.statistics.global_state.mean[-2:], [1, 3.5])  # copies 0 1 2, times 0 to 7
        assert not policy.statistics.pending


def test_a_loss_can_be_asked_for_with_the_world_given():
    learner, rollout = PPOOptimizer(TorchPolicy(central_spec()), CONFIG), central_rollout(num_lanes=3, copies=3)
    flat = {name: rollout[name].reshape(24, *rollout[name].shape[2:]) for name in ("observations", "actions", "log_probs")}
    numbers, world = np.zeros(24, np.float32), {"world": rollout.global_state.reshape(24, 2), "place": np.zeros(24, np.int64)}
    terms = learner.compute_ppo_loss(**flat, global_state=world, advantages=numbers, returns=numbers, values=numbers)
    assert terms["value_loss"].item() > 0


def test_rollouts_with_another_global_state_are_refused():
    with pytest.raises(ConfigError, match="belongs to the built-in networks"):
        TorchPolicy(central_spec(), network=Network())
    learner, rollout = PPOOptimizer(TorchPolicy(central_spec()), CONFIG), central_rollout()
    cuts = len(rollout.cut_rows)
    wider = replace(rollout, global_state=np.zeros((8, 3, 5), np.float32), cut_global_state=np.zeros((cuts, 5)))
    for wrong, words in (
        (replace(rollout, global_state=(), cut_global_state=()), "needs a global state, and there is none"),
        (wider, "global_state"),
        (central_rollout(num_lanes=9), "has 3 lanes per copy, but the policy's central critic was made for 2"),
    ):
        with pytest.raises(InchwormError, match=words):
            learner.update(wrong)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimiser_of_ones_own_leaves_frozen_weights_alone(kind):
    policy = TORCH.policy()
    mine = kind(policy.parameters(), lr=0.1, weight_decay=0.1)
    before, seen = policy.get_weights(), []

    def watching(policy, values):
        seen.append(policy.get_weights()["actor.0.weight"])
        return values.mean()

    TORCH.learner(policy, CONFIG.replace(freeze=("actor.*",)), optimizer=mine).update(collect(policy), [watching])
    assert all(np.array_equal(weight, before["actor.0.weight"]) for weight in seen)  # at every step
    after = policy.get_weights()
    assert {name.partition(".")[0] for name in before if np.array_equal(before[name], after[name])} == {"actor"}
    assert all(parameter.requires_grad for parameter in policy.parameters()), "a later learner may train them"
    TORCH.learner(policy).update(collect(policy))
    assert not np.array_equal(policy.get_weights()["actor.head.bias"], before["actor.head.bias"])


@pytest.mark.filterwarnings("ignore:ratio_error")
def test_frozen_buffers_of_ones_own_network_stay():
    class Normed(Network):
        def __init__(self):
            super().__init__()
            self.norm, self.actor, self.critic = torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)

        def action_outputs(self, observations):
            return self.actor(self.norm(observations))

        def values(self, observations):
            return self.critic(self.norm(observations))[:, 0]

    policy = TorchPolicy(PolicySpec(spaces.Box(-2, 2, (3,)), spaces.Discrete(3), PolicyConfig()), network=Normed())
    before = policy.get_weights()
    TORCH.learner(policy, CONFIG.replace(freeze=("network.norm.*",))).update(collect(policy))
    after = policy.get_weights()
    same = {name for name in before if np.array_equal(before[name], after[name])}
    assert same == {name for name in before if name.startswith("network.norm.")}
    assert len(same) == 5
