"""A central critic that learns: whole runs on worlds with state(), what its gradient reaches, and what is refused."""

from __future__ import annotations

import dataclasses
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from inchworm import (
    NumpyPolicy,
    PolicyConfig,
    PolicyMap,
    PolicySpec,
    PPOConfig,
    PPOOptimizer,
    PPOTrainer,
    Rollout,
    RolloutCollector,
    TorchPolicy,
    create_fake_rollout,
    load_policy,
    make_vector_env,
)
from inchworm.backends.torch.learner import PackedSequences, sequences_of
from inchworm.backends.torch.network import Network, to_tensor
from inchworm.core.errors import ConfigError, InchwormError, RolloutError
from inchworm.core.types import Advantages
from inchworm.rollout.sequences import split_into_sequences

pytest.importorskip("pettingzoo")
from inchworm.worlds.team_toys import DEATHS, JOINS, Comings, comings, sacrifice

PPO = PPOConfig(rollout_steps=16, num_minibatches=2, update_epochs=2)
CENTRAL = PolicyConfig(hidden_sizes=(8,), memory_size=8, central_critic=True)
WORLD = partial(comings, plan=JOINS, masks="key")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("config", [{}, {"kind": "lstm"}, {"kind": "gru", "memory_place": "before", "normalize_observations": True}])
def test_the_ratio_is_1_with_masks_memory_deaths_and_joins(config: dict[str, Any], workers: int) -> None:
    from inchworm import EnvConfig, TrainingConfig

    settings = TrainingConfig(ppo=PPO, env=EnvConfig(num_envs=4, num_workers=workers))
    with PPOTrainer(CENTRAL.replace(**config), WORLD, settings) as trainer, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            rollout = trainer.collect_rollouts()
            assert rollout.global_state.shape == (16, 4, 3)  # once for each copy, of three lanes each
            assert not rollout.valid.all()
            stats = trainer.learn(rollout)
            assert stats.get("ratio_error", 0.0) < 5e-5
    assert stats["value_loss"] > 0


@pytest.mark.parametrize("kind", ["mlp", "gru"])
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, kind: Any) -> None:
    policy = CENTRAL.replace(kind=kind, normalize_observations=True, normalize_values=True)

    def run(name: str, *targets: int) -> dict[str, np.ndarray]:
        for index, target in enumerate(targets):
            with PPOTrainer(policy, WORLD, PPO, num_envs=2, run_dir=tmp_path / name) as trainer:
                if index:
                    trainer.load_checkpoint()
                trainer.train(target)
                weights = trainer.policy.get_weights()
        return weights

    whole, resumed = run("whole", 300), run("parts", 100, 300)
    assert whole.keys() == resumed.keys()
    assert all(np.array_equal(whole[name], resumed[name]) for name in whole)
    assert whole["global_state_normalizer.count"] > 0
    acting = load_policy(tmp_path / "whole" / "policy.safetensors")
    assert isinstance(acting, NumpyPolicy)
    assert acting.spec.global_state_space == spaces.Box(-np.inf, np.inf, (3,), np.float32)
    assert all(np.array_equal(whole[name], value) for name, value in acting.get_weights().items())


def mean_return(*, central: bool, seed: int) -> float:
    config = PPOConfig(rollout_steps=32, learning_rate=3e-3, num_minibatches=4)
    with PPOTrainer(CENTRAL.replace(central_critic=central), sacrifice, config, num_envs=16, seed=seed) as trainer:
        return trainer.train(20 * 32 * 32)["mean_return"][-1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_sacrifice_is_learned_with_a_central_critic_and_never_without(seed: int) -> None:
    assert mean_return(central=True, seed=seed) > 0.9  # the hero gets 1 - 0.1, the friend 1: 0.95 is all there is
    assert mean_return(central=False, seed=seed) < 0.2  # to live is worth 0, which is more than -0.1


def spec() -> PolicySpec:
    return PolicySpec(spaces.Box(-1, 1, (3,)), spaces.Discrete(2), CENTRAL, spaces.Box(-9, 9, (2,)), 2)


def rollout_of(*, num_lanes: int = 6, copies: int = 3, num_steps: int = 8) -> Rollout:
    """The world of copy c is at (c, t), so that it can be recognised; and a row's reward is its lane."""
    fake = create_fake_rollout(spec().observation_space, spec().action_space, num_steps, num_lanes)
    time, copy = np.meshgrid(np.arange(num_steps), np.arange(copies), indexing="ij")
    world = np.stack([copy, time], -1).astype(np.float32)  # [T, E, 2]
    cuts = np.stack([fake.cut_rows[:, 1] // (num_lanes // copies), fake.cut_rows[:, 0] + 1], 1).astype(np.float32)
    rewards = np.broadcast_to(np.arange(num_lanes, dtype=np.float32), (num_steps, num_lanes))
    return Rollout.from_dict({**fake.to_dict(), "global_state": world, "cut_global_state": cuts, "rewards": rewards})


@pytest.mark.parametrize("length", [1, 3, 8])
def test_every_sequence_of_a_minibatch_has_the_world_of_its_copy(length: int) -> None:
    rollout = rollout_of().map(partial(to_tensor, device="cpu"))
    nothing = torch.zeros((8, 6))
    opinions = Advantages(nothing, nothing, nothing, nothing)
    shared = split_into_sequences(rollout.global_state, length)
    whole = sequences_of(rollout, opinions, length, successors=False)
    packed = PackedSequences(sequences_of(dataclasses.replace(rollout, global_state=()), opinions, length, successors=False), shared)
    columns = whole.valid.shape[1]
    order = np.random.default_rng(0).permutation(columns)
    parts = packed.shuffled(2, order)
    assert sum(part.valid.shape[1] for part in parts) >= columns
    for minibatch in (whole, *parts):
        lanes, world, place = minibatch.rewards, minibatch.global_state["world"], minibatch.global_state["place"]
        assert world.shape == (*minibatch.valid.shape, 2)
        torch.testing.assert_close(world[..., 0], lanes // 2)
        torch.testing.assert_close(place, (lanes % 2).long())
    first = torch.from_numpy(order[: parts[0].valid.shape[1]])
    for name in ("world", "place"):
        torch.testing.assert_close(parts[0].global_state[name], whole.global_state[name][:, first])


def test_the_gradient_reaches_the_critics_view_of_the_world_and_no_actor() -> None:
    policy = TorchPolicy(spec())
    rollout = rollout_of().map(partial(to_tensor, device="cpu"))
    nothing = torch.zeros((8, 6))
    minibatch = sequences_of(rollout, Advantages(nothing, nothing, nothing, nothing), 1, successors=False)
    dead = dataclasses.replace(minibatch, valid=torch.zeros_like(minibatch.valid))
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


def test_statistics_of_the_world_count_each_copy_once() -> None:
    normalized = PolicySpec(
        spec().observation_space, spec().action_space, CENTRAL.replace(normalize_observations=True), spaces.Box(-9, 9, (2,))
    )
    rollout = rollout_of()
    for policy in (TorchPolicy(normalized), NumpyPolicy(normalized)):
        assert policy.statistics.pending
        policy.update_statistics(rollout, rollout.rewards)
        assert policy.statistics.global_state is not None
        assert policy.statistics.global_state.count == 8 * 3
        np.testing.assert_allclose(policy.statistics.global_state.mean[-2:], [1, 3.5])  # copies 0 1 2, times 0 to 7
        assert not policy.statistics.pending


def test_accumulated_gradients_are_the_same(tmp_path: Path) -> None:
    weights = []
    for pieces in (1, 2):
        learner = PPOOptimizer(TorchPolicy(spec()), PPO.replace(gradient_accumulation=pieces, normalize_advantages="minibatch"))
        learner.update(rollout_of())
        weights.append(learner.policy.get_weights())
    for name, value in weights[0].items():
        np.testing.assert_allclose(value, weights[1][name], atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_a_compiled_step_is_the_same() -> None:
    weights = []
    for compiled in ("off", "on"):
        policy = TorchPolicy(dataclasses.replace(spec(), config=CENTRAL.replace(normalize_observations=True)))
        learner = PPOOptimizer(policy, PPO.replace(compile=compiled))
        for _ in range(2):  # the first rollout only moves the statistics
            learner.update(rollout_of())
        weights.append(learner.policy.get_weights())
    for name, value in weights[0].items():
        np.testing.assert_allclose(value, weights[1][name], atol=1e-5, err_msg=name)


def test_a_loss_can_be_asked_for_with_the_world_given() -> None:
    learner, rollout = PPOOptimizer(TorchPolicy(spec()), PPO), rollout_of(num_lanes=3, copies=3)
    flat = {name: rollout[name].reshape(24, *rollout[name].shape[2:]) for name in ("observations", "actions", "log_probs")}
    numbers, world = np.zeros(24, np.float32), {"world": rollout.global_state.reshape(24, 2), "place": np.zeros(24, np.int64)}
    terms = learner.compute_ppo_loss(**flat, global_state=world, advantages=numbers, returns=numbers, values=numbers)
    assert terms["value_loss"].item() > 0


def test_a_critic_that_does_not_look_cannot_value_what_the_dead_are_credited_with() -> None:
    """Neither a policy that somebody brings may train in such a world, nor any policy learn from a rollout of it, once agents have died."""

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 4)

        def forward(self, seen: Any) -> Any:
            out = self.layer(seen)
            return out[..., :3], out[..., 3]

        def action_outputs(self, seen: Any) -> Any:
            return self(seen)[0]

        def values(self, seen: Any) -> Any:
            return self(seen)[1]

    with make_vector_env(lambda: Comings(DEATHS), 2, global_state=True) as env:
        plain = PolicySpec(env.observation_space, env.action_space, PolicyConfig(hidden_sizes=(4,)))
        with pytest.raises(ConfigError, match="which only a central critic can value"):
            PPOTrainer(TorchPolicy(plain, network=Own()), env, PPO)
        collector = RolloutCollector(env, NumpyPolicy(plain))
        everybody = collector.collect(2)  # of three agents in each of two copies the second dies after 2 steps
        somebody = collector.collect(4)
    learner = PPOOptimizer(TorchPolicy(plain), PPO)
    assert learner.update(everybody)["epochs"] > 0
    with pytest.raises(RolloutError, match="agents that died, so credit continues after death"):
        learner.update(somebody)


def test_several_policies_with_central_critics(tmp_path: Path) -> None:
    several = PolicyMap(policies={"a": CENTRAL, "b": CENTRAL.replace(kind="gru")}, lane_map=["a", "b", "a"])
    with PPOTrainer(several, WORLD, PPO, num_envs=2, run_dir=tmp_path) as trainer, warnings.catch_warnings():
        warnings.simplefilter("error")
        history = trainer.train(100)
    assert max(*history["a/ratio_error"], *history["b/ratio_error"]) < 5e-5
    mixed = PolicyMap(policies={"a": CENTRAL, "b": PolicyConfig()}, lane_map=["a", "b", "a"])
    with pytest.raises(ConfigError, match="credited with rewards after death, which only a central critic can value"):
        PPOTrainer(mixed, WORLD, PPO, num_envs=2)


def test_what_cannot_be_is_refused_in_one_line() -> None:
    def refused(words: str, kind: type[InchwormError], build: Any) -> None:
        with pytest.raises(kind, match=words) as caught:
            build()
        assert "\n" not in str(caught.value)

    refused("state", InchwormError, lambda: PPOTrainer(CENTRAL, "CartPole-v1", PPO, num_envs=2))
    refused("does not learn a central critic", ConfigError, lambda: PPOTrainer(CENTRAL, WORLD, PPO, num_envs=2, backend="numpy").learner)
    refused("belongs to the built-in networks", ConfigError, lambda: TorchPolicy(spec(), network=Network()))
    learner, rollout = PPOOptimizer(TorchPolicy(spec()), PPO), rollout_of()
    without = dataclasses.replace(rollout, global_state=(), cut_global_state=())
    refused("needs a global state, and there is none", RolloutError, lambda: learner.update(without))
    wider = dataclasses.replace(
        rollout, global_state=np.zeros((8, 3, 5), np.float32), cut_global_state=np.zeros((len(rollout.cut_rows), 5))
    )
    refused("global_state", InchwormError, lambda: learner.update(wider))
    crowded = rollout_of(num_lanes=9)
    refused("has 3 lanes per copy, but the policy's central critic was made for 2", RolloutError, lambda: learner.update(crowded))
    refused(
        "there is none; use an environment with state",
        InchwormError,
        lambda: PolicySpec(spec().observation_space, spaces.Discrete(2), CENTRAL),
    )
    with make_vector_env(WORLD, 2, global_state=True) as env:
        refused("set policy.central_critic=true, create it without global_state", ConfigError, lambda: PPOTrainer("mlp", env, PPO))
        refused("made for the global state space", InchwormError, lambda: PPOTrainer(wrong_world(env), env, PPO))


def wrong_world(env: Any) -> PolicySpec:
    return PolicySpec(env.observation_space, env.action_space, CENTRAL, spaces.Box(-1, 1, (7,)))
