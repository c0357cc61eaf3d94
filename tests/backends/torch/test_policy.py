"""The torch policy: random streams, values in chunks, and networks and policies that users bring."""

from dataclasses import replace

import numpy as np
import optree
import pytest
import torch
from gymnasium import spaces
from torch import nn

from doubles.learners import TORCH
from doubles.policies import Forgetful
from inchworm.backends.registry import acting_policy, compute_advantages, is_builtin
from inchworm.backends.torch import policy as module
from inchworm.backends.torch.learner import PPOOptimizer
from inchworm.backends.torch.network import Network
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.config.sections import PolicyConfig, PPOConfig
from inchworm.core.errors import ConfigError, InchwormError
from inchworm.core.protocols import Policy
from inchworm.policy.file import fingerprint
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.rollout import Rollout


def test_values_do_not_depend_on_the_chunks_they_are_made_in(monkeypatch):
    policy = TORCH.policy()
    observations = np.random.default_rng(0).normal(size=(5, 7, 3)).astype(np.float32)
    whole = policy.value(observations)
    monkeypatch.setattr(module, "VALUE_CHUNK", 4)
    torch.testing.assert_close(policy.value(observations), whole, rtol=0, atol=1e-6)
    assert policy.value(np.zeros((0, 3, 3), np.float32)).shape == (0, 3)
    assert not policy.value(observations).requires_grad


class Counting(Network):
    """Records how many rows come at once."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def values(self, observations):
        leaves = optree.tree_leaves(observations)
        self.rows.append(len(leaves[0]))
        return sum(leaf.flatten(1).float().sum(1) for leaf in leaves)


def test_the_critic_reads_fewer_rows_at_once_the_larger_they_are(monkeypatch):
    monkeypatch.setattr(module, "VALUE_CHUNK", 4)
    monkeypatch.setattr(module, "VALUE_NUMBERS", 60)
    for size, expected in ((2, [4, 4, 2]), (20, [3, 3, 3, 1]), (100, [1] * 10)):  # 60 // 2 > 4; 60 // 20 = 3; never none
        spec = PolicySpec(spaces.Box(0, 9, (size,)), spaces.Discrete(2), PolicyConfig())
        policy = TorchPolicy(spec, network=Counting())
        values = policy.value(np.ones((5, 2, size), np.float32))
        assert policy.network.rows == expected
        assert torch.equal(values, torch.full((5, 2), float(size)))


# Networks and policies of users

CONFIG = PPOConfig(update_epochs=4, num_minibatches=4, learning_rate=1e-2, ent_coef=0.0)


def play(policy, seed, steps=32, lanes=8, see=lambda rows: rows):
    """A world of one step an episode: the observation is a sign, the action 0 or 1 that names it earns 1."""
    rng = np.random.default_rng(seed)
    columns = {name: [] for name in ("observations", "actions", "log_probs", "rewards")}
    for _ in range(steps):
        signs = rng.integers(0, 2, lanes)
        observations = see(np.stack([2.0 * signs - 1, rng.normal(size=lanes)], -1).astype(np.float32))
        step = policy.act(observations, policy.initial_state(lanes), np.ones(lanes, bool), rng)
        rewards = (step.env_actions == signs).astype(np.float32)
        for column, array in zip(columns.values(), (observations, step.actions, step.log_probs, rewards)):
            column.append(array)
    data = {name: optree.tree_map(lambda *rows: np.stack(rows), *column) for name, column in columns.items()}
    return Rollout.from_dict(data | {"terminated": np.ones((steps, lanes), bool)})


class MyNetwork(Network):
    """A network of a user, with a gate and a buffer."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 16)
        self.gate = nn.Linear(2, 16)
        self.actor, self.critic = nn.Linear(16, 2), nn.Linear(16, 1)
        self.register_buffer("calls", torch.zeros(()))

    def features(self, observations):
        return torch.tanh(self.body(observations)) * torch.sigmoid(self.gate(observations))

    def action_outputs(self, observations):
        return self.actor(self.features(observations))

    def values(self, observations):
        return self.critic(self.features(observations)).squeeze(-1)


SPEC = PolicySpec(spaces.Box(-np.inf, np.inf, (2,)), spaces.Discrete(2), PolicyConfig())


def train(policy, updates=6):
    learner = PPOOptimizer(policy, CONFIG, device="cpu")
    for seed in range(updates):
        stats = learner.update(play(policy, seed))
        assert all(np.isfinite(list(stats.values())))
        assert stats["ratio_error"] < 5e-5
    return learner


def test_a_network_behind_torch_policy_learns():
    torch.manual_seed(0)
    policy = TorchPolicy(SPEC, network=MyNetwork())
    assert not policy.builtin
    assert play(policy, 100).rewards.mean() < 0.7
    train(policy)
    assert play(policy, 101).rewards.mean() > 0.9
    assert policy.predict(np.array([1.0, 0.0])) == 1
    assert policy.predict(np.array([-1.0, 0.0])) == 0
    assert acting_policy(policy) is policy  # it acts where it learns
    assert not is_builtin(policy)


def test_its_weights_are_its_parameters_and_buffers():
    policy, other = TorchPolicy(SPEC, network=MyNetwork()), TorchPolicy(SPEC, network=MyNetwork())
    policy.network.calls.fill_(5)
    policy.policy_version = 3
    weights = policy.get_weights()
    layers = [f"network.{layer}.{kind}" for layer in ("body", "gate", "actor", "critic") for kind in ("weight", "bias")]
    assert {*layers, "network.calls", "policy_version"} == set(weights)
    other.set_weights(weights)
    assert other.policy_version == 3
    assert other.network.calls == 5
    observations = np.random.default_rng(0).normal(size=(1, 5, 2)).astype(np.float32)
    torch.testing.assert_close(other.value(observations), policy.value(observations), rtol=0, atol=0)
    with pytest.raises(InchwormError, match=r"missing network.actor.weight"):
        other.set_weights({name: value for name, value in weights.items() if name != "network.actor.weight"})
    with pytest.raises(InchwormError, match=r"network.actor.bias has shape \(1,\); the policy needs \(2,\)"):  # never broadcast
        other.set_weights({**weights, "network.actor.bias": np.ones(1, np.float32)})


def test_a_users_parameter_may_have_the_name_of_a_builtin_one():
    class Named(MyNetwork):
        def __init__(self):
            super().__init__()
            self.log_std = nn.Parameter(torch.tensor([7.0]))

    for space in (spaces.Discrete(2), spaces.Box(-1, 1, (2,))):
        policy = TorchPolicy(PolicySpec(SPEC.observation_space, space, PolicyConfig()), network=Named())
        weights = policy.get_weights()
        assert weights["network.log_std"] == [7.0]
        policy.set_weights({**weights, "network.log_std": np.array([8.0], np.float32)})
        assert float(policy.network.log_std.detach()) == 8.0
        assert (policy.log_std == 0).all()


def test_what_is_refused():
    with pytest.raises(ConfigError, match="belong to the built-in networks"):
        TorchPolicy(PolicySpec(SPEC.observation_space, SPEC.action_space, PolicyConfig(normalize_values=True)), network=MyNetwork())
    with pytest.raises(TypeError, match=r"Network must define action_outputs"):
        TorchPolicy(SPEC, network=Network()).predict(np.zeros(2))
    with pytest.raises(TypeError, match=r"Network must define values"):
        TorchPolicy(SPEC, network=Network()).value(np.zeros((1, 1, 2), np.float32))


class Raw(Forgetful):
    """The seven methods of the contract, without inheriting from this library."""

    rollouts_seen = 0

    def update_statistics(self, rollout, returns):
        assert isinstance(rollout, Rollout)
        assert returns.shape == rollout.rewards.shape
        self.rollouts_seen += 1


def as_dict(rows):
    return {"observation": np.pad(rows, ((0, 0), (0, 1))), "action_mask": np.ones((len(rows), 3), np.int8)}


@pytest.mark.parametrize("clip_vloss", [False, True])
def test_a_raw_module_that_keeps_the_contract_learns(clip_vloss):
    policy = Raw()
    assert isinstance(policy, Policy)
    learner = PPOOptimizer(policy, CONFIG.replace(clip_vloss=clip_vloss), device="cpu")
    for seed in range(6):
        learner.update(play(policy, seed, see=as_dict))
    assert play(policy, 101, see=as_dict).rewards.mean() > 0.9
    assert policy.policy_version == policy.rollouts_seen == learner.updates == 6
    other = Raw()
    other.set_weights(policy.get_weights())
    assert play(other, 101, see=as_dict).rewards.mean() == play(policy, 101, see=as_dict).rewards.mean()


def test_advantages_of_a_raw_module_as_arrays():
    policy = Raw()
    rollout = play(policy, 0, steps=4, lanes=2, see=as_dict)
    found = compute_advantages(policy, rollout, CONFIG)
    assert isinstance(found.values, np.ndarray)
    np.testing.assert_allclose(found.advantages, rollout.rewards - found.values, atol=1e-6)  # every row is terminal


class Modes(MyNetwork):
    """A network with a layer between its features and its heads."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def features(self, observations):
        return self.layer(super().features(observations))


class DropsOut(torch.nn.Module):
    """Dropout by a function of torch, which no look at the layers finds."""

    def forward(self, features):
        return torch.nn.functional.dropout(features, 0.5, self.training)


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (torch.nn.Dropout(0.5), "Dropout"),
        (torch.nn.BatchNorm1d(MyNetwork().features(torch.zeros(1, 2)).shape[1]), "BatchNorm1d"),
        (DropsOut(), "the network's own code"),
    ],
    ids=["dropout", "batch norm", "dropout by a function"],
)
def test_what_changes_with_the_mode_shows_in_the_ratio_and_is_named(layer, named):
    torch.manual_seed(0)
    policy = TorchPolicy(SPEC, network=Modes(layer))
    learner, measured = PPOOptimizer(policy, CONFIG), []

    def first_ratio(log_probs, minibatch):
        measured.append(float((log_probs.detach() - minibatch.log_probs).exp().sub(1).abs().max()))
        return log_probs.sum() * 0

    rollout = play(policy, 0)
    rollout = replace(rollout, weights_fingerprint=np.full(8, fingerprint(policy.get_weights()), np.uint64))
    with pytest.warns(UserWarning, match=rf"these behave differently in training and in acting: {named}"):
        stats = learner.update(rollout, [first_ratio])
    assert stats["ratio_error"] == measured[0] > 1e-3, "what the first step sees, with its random numbers"


def test_measuring_the_ratio_changes_nothing():
    layer = torch.nn.BatchNorm1d(MyNetwork().features(torch.zeros(1, 2)).shape[1])
    policy = TorchPolicy(SPEC, network=Modes(torch.nn.Sequential(layer, torch.nn.Dropout(0.5))))
    learner, rollout = PPOOptimizer(policy, CONFIG), play(policy, 0)
    before, generator = policy.get_weights(), torch.get_rng_state()
    assert np.abs(learner.log_probs(rollout) - rollout.log_probs).max() < 1e-5  # as it acts
    sequences = learner.make_sequences(*learner.critic_pass(rollout, None), 1, successors=False)
    ratios = learner.ratios(learner.shuffle(sequences, 1, np.arange(sequences.valid.shape[1]))[0])
    assert np.abs(ratios - 1).max() > 1e-3  # as it learns
    after = policy.get_weights()
    assert [name for name in before if not np.array_equal(before[name], after[name])] == []
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.filterwarnings("error")
def test_a_network_acts_in_eval_mode_and_learns_in_train_mode():
    modes = []

    class Watching(MyNetwork):
        def features(self, observations):
            modes.append(self.training)
            return super().features(observations)

    policy = TorchPolicy(SPEC, network=Watching())
    rollout = replace(play(policy, 0), weights_fingerprint=np.full(8, fingerprint(policy.get_weights()), np.uint64))
    assert set(modes) == {False}, "dropout and the like are off while acting"
    modes.clear()
    PPOOptimizer(policy, CONFIG).update(rollout)
    assert modes[:2] == [False, False], "the critic's pass over the rollout and its cut rows"
    assert set(modes[2:]) == {True}, "steps, and before them ratio_error, which asks whether what acted is what learns"
