"""Simulators on a device: collected in torch, the rollout is the one of the NumPy path, and learning takes it as it is."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import optree
import pytest
import torch
from gymnasium import spaces

from examples.device_env import TensorCartPole
from inchworm import (
    NumpyPolicy,
    PolicyConfig,
    PolicySpec,
    PPOConfig,
    PPOOptimizer,
    PPOTrainer,
    Rollout,
    RolloutCollector,
    TorchPolicy,
    combine_rollouts,
    compute_advantages,
    make_vector_env,
)
from inchworm.backends.torch.device_collector import DeviceCollector
from inchworm.backends.torch.device_env import NO_FINAL, NO_STATE, DeviceVectorEnv
from inchworm.core.errors import BadNumberError, ConfigError, EnvError
from inchworm.core.seeding import make_stream
from inchworm.env.source import env_source

LANES, STEPS = 6, 14


class Hybrid:
    """Hybrid actions and a mask: the observation is the running sum of pushes; choice 2 is never allowed; cut off after 5 steps."""

    single_observation_space = spaces.Dict(
        {"seen": spaces.Box(-np.inf, np.inf, (2,), np.float32), "action_mask": spaces.Dict({"kind": spaces.MultiBinary(3)})}
    )
    single_action_space = spaces.Dict({"kind": spaces.Discrete(3), "push": spaces.Box(-1.0, 1.0, (2,), np.float32)})

    def __init__(self, num_envs: int = LANES) -> None:
        self.num_envs, self.device = num_envs, "cpu"

    def _observe(self) -> dict[str, Any]:
        mask = torch.tensor([1, 1, 0], dtype=torch.int8).repeat(self.num_envs, 1)
        return {"seen": self._sum.clone(), "action_mask": {"kind": mask}}

    def reset(self) -> tuple[Any, dict[str, Any]]:
        self._sum, self._steps = torch.zeros(self.num_envs, 2), torch.arange(self.num_envs)
        return self._observe(), {}

    def step(self, actions: dict[str, torch.Tensor]) -> tuple[Any, ...]:
        assert int(actions["kind"].max()) < 2
        assert float(actions["push"].abs().max()) <= 1.0
        self._sum += actions["push"]
        self._steps += 1
        truncated = self._steps % 5 == 0
        final = self._observe()
        self._sum = torch.where(truncated[:, None], 0.0, self._sum)
        rewards = self._sum[:, 0] + actions["kind"]
        return self._observe(), rewards, torch.zeros(self.num_envs, dtype=torch.bool), truncated, {"final_observation": final}


def make(name: str) -> Any:
    return Hybrid() if name == "hybrid" else TensorCartPole(LANES, max_episode_steps=9)


def both_paths(name: str, policy: PolicyConfig) -> tuple[DeviceCollector, RolloutCollector, TorchPolicy]:
    """Collectors of the same lanes with the same weights and random numbers, on the device and from the host."""
    envs = [DeviceVectorEnv(make(name), seed=3) for _ in range(2)]
    spec = PolicySpec(envs[0].observation_space, envs[0].action_space, policy)
    learned = TorchPolicy(spec, seed=1)
    on_device = DeviceCollector(envs[0], learned, sequence_length=7)
    stream, layout = make_stream(0, "sampling"), spec.actions

    def normal() -> torch.Tensor:
        shape = (LANES, layout.num_gaussians)
        return torch.from_numpy(stream.standard_normal(shape, np.float32)) if layout.num_gaussians else torch.zeros(shape)

    def draw(num_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [(torch.from_numpy(stream.random((LANES, len(layout.groups)))), normal()) for _ in range(num_steps)]
        return torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])

    on_device.draw = draw  # type: ignore[method-assign]
    return on_device, RolloutCollector(envs[1], NumpyPolicy(spec, learned.get_weights()), sequence_length=7), learned


CASES = [
    ("cartpole", PolicyConfig(hidden_sizes=(8,), normalize_observations=True, normalize_values=True)),
    ("cartpole", PolicyConfig(kind="lstm", hidden_sizes=(8,), memory_size=8)),
    ("hybrid", PolicyConfig(hidden_sizes=(8,))),
    ("hybrid", PolicyConfig(hidden_sizes=(8,), action_bounds="tanh")),
]


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_the_rollout_is_that_of_the_numpy_path(name: str, policy: PolicyConfig) -> None:
    on_device, from_host, _ = both_paths(name, policy)
    for _ in range(2):  # the second goes on within episodes
        found, expected = on_device.collect(STEPS), from_host.collect(STEPS)
        assert found.on_device
        assert not expected.on_device
        host = found.to_numpy()
        host.validate(on_device.vector_env.observation_space, on_device.vector_env.action_space)
        for field in expected:
            if field not in ("episodes", "policy_version", "weights_fingerprint", "state_every"):
                for ours, theirs in zip(optree.tree_leaves(host[field]), optree.tree_leaves(expected[field]), strict=True):
                    assert ours.dtype == theirs.dtype, field
                    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6, err_msg=field)
        assert [(e.lane, e.length) for e in found.episodes] == [(e.lane, e.length) for e in expected.episodes]
        assert [e.episode_return for e in found.episodes] == pytest.approx([e.episode_return for e in expected.episodes], abs=1e-5)
        assert host.truncated.any()
    assert on_device.env_steps == from_host.env_steps == 2 * STEPS * LANES
    assert on_device.episodes == from_host.episodes


def test_the_successor_of_a_truncated_row_is_the_observation_before_the_reset() -> None:
    rollout = both_paths("hybrid", PolicyConfig(hidden_sizes=(8,)))[0].collect(STEPS)
    seen, pushes = rollout.observations["seen"], rollout.actions["push"].clamp(-1, 1)
    for (t, lane), shown in zip(rollout.cut_rows.tolist(), rollout.cut_observations["seen"]):
        torch.testing.assert_close(shown, seen[t, lane] + pushes[t, lane])
        if t < STEPS - 1:
            assert rollout.truncated[t, lane]
            assert seen[t + 1, lane].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("index", range(len(CASES)))
def test_learning_from_tensors_and_from_arrays_is_the_same(index: int) -> None:
    name, policy = CASES[index]
    config = PPOConfig(num_minibatches=2, update_epochs=2, sequence_length=7, scale_rewards=index == 0, rollout_steps=STEPS)
    weights, stats = [], []
    for convert in (False, True):
        collector, _, learned = both_paths(name, policy)
        learner = PPOOptimizer(learned, config, seed=2)
        for _ in range(2):  # with normalisers the first only begins them
            rollout = collector.collect(STEPS)
            stats.append(dict(learner.update(rollout.to_numpy() if convert else rollout)))
        weights.append(learned.get_weights())
    for weight in weights[0]:
        np.testing.assert_allclose(weights[0][weight], weights[1][weight], rtol=1e-6, atol=1e-6, err_msg=weight)
    assert stats[0] == pytest.approx(stats[2], rel=1e-5, abs=1e-6)
    assert stats[1] == pytest.approx(stats[3], rel=1e-5, abs=1e-6)


def test_learning_takes_the_tensors_without_a_copy() -> None:
    collector, _, learned = both_paths("cartpole", PolicyConfig(hidden_sizes=(8,)))
    rollout = collector.collect(STEPS)
    on_device, _ = PPOOptimizer(learned, PPOConfig()).critic_pass(rollout, None)
    for field in ("observations", "actions", "rewards", "log_probs", "terminated"):
        assert on_device[field].data_ptr() == rollout[field].data_ptr(), field


def test_advantages_of_both_forms_are_equal(tmp_path: Path) -> None:
    collector, _, learned = both_paths("cartpole", PolicyConfig(hidden_sizes=(8,)))
    rollout = collector.collect(STEPS)
    expected = compute_advantages(learned, rollout.to_numpy(), PPOConfig())
    found = PPOOptimizer(learned, PPOConfig()).critic_pass(rollout, None)[1]
    np.testing.assert_allclose(found.advantages.numpy(), expected.advantages, rtol=1e-6, atol=1e-6)
    assert Rollout.load(rollout.save(tmp_path / "rollout.safetensors")).num_valid == STEPS * LANES
    assert combine_rollouts([rollout, rollout]).num_lanes == 2 * LANES
    with pytest.raises(Exception, match="observations"):
        PPOOptimizer(both_paths("hybrid", PolicyConfig())[2], PPOConfig()).update(rollout)


PPO = PPOConfig(rollout_steps=8, num_minibatches=2, update_epochs=1)


def test_a_trainer_collects_on_the_device_and_resumes_exactly(tmp_path: Path) -> None:
    found = []
    for name, targets in (("straight", [240]), ("resumed", [120, 240])):
        for target in targets:
            with PPOTrainer("gru", TensorCartPole(5, max_episode_steps=9), PPO, seed=4, run_dir=tmp_path / name) as trainer:
                assert isinstance(trainer.collector, DeviceCollector)
                assert trainer.config.run.backend == "torch"
                assert trainer.inexact == []
                if target != targets[0]:
                    trainer.load_checkpoint()
                history = trainer.train(total_timesteps=target)
        found.append(trainer.policy.get_weights())
        assert history["timesteps"][-1] == 240
        assert history["mean_return"][-1] > 0
        assert 0 < history["truncated_share"][-1] <= 1
    for weight in found[0]:
        np.testing.assert_array_equal(found[0][weight], found[1][weight], err_msg=weight)


def test_a_simulator_without_state_is_marked_and_begins_anew() -> None:
    with PPOTrainer("mlp", Hybrid(), PPO) as trainer:
        trainer.train(total_timesteps=96)
        assert trainer.inexact == [NO_STATE]
        state = trainer.full_state()
    with PPOTrainer("mlp", Hybrid(), PPO) as trainer:
        trainer.collector.load_state_dict(state["collector"])
        assert trainer.collector.env_steps == 96
        assert trainer.collect_rollouts().episode_starts[0].all()


class Isaac(gym.Env[Any, Any]):
    """As Isaac Lab's: groups of observations, no last observations, a device by name."""

    def __init__(self) -> None:
        self.num_envs, self.device, self.episodes = 3, "cpu", 0
        box = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.single_observation_space = spaces.Dict({"policy": box, "critic": box})
        self.single_action_space = self.action_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.observation_space = self.single_observation_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        del seed, options
        self.steps = torch.tensor([0, 1, 2])
        return self._observe(), {}

    def _observe(self) -> dict[str, torch.Tensor]:
        return {"policy": self.steps[:, None].float(), "critic": torch.full((3, 1), -1.0)}

    def step(self, action: torch.Tensor) -> tuple[Any, ...]:
        self.steps = self.steps + 1
        over = self.steps == 4
        self.steps = torch.where(over, 0, self.steps)
        return self._observe(), action[:, 0], torch.zeros(3, dtype=torch.bool), over, {"log": {}}


class Brax(Isaac):
    """As the older interfaces: one flag, and the truncation in the info."""

    def reset(self, **_: Any) -> Any:  # type: ignore[override]
        return super().reset()[0]["policy"]

    def step(self, action: torch.Tensor) -> tuple[Any, ...]:
        observations, rewards, _, truncated, _ = super().step(action)
        return observations["policy"], rewards, truncated.float(), {"truncation": truncated.float()}


def test_without_last_observations_the_one_before_is_used_and_that_is_said() -> None:
    for env in (gym.wrappers.OrderEnforcing(Isaac()), Isaac()):
        assert env_source(env).kind == "device"
        with PPOTrainer("mlp", env, PPO) as trainer:
            assert trainer.env.observation_space.shape == (1,)  # the policy's group
            rollout = trainer.collect_rollouts()
            assert NO_FINAL in trainer.inexact
        before = {(t, lane): rollout.observations[t, lane].item() for t, lane in rollout.truncated.nonzero().tolist()}
        assert set(before.values()) == {3.0}  # a lane counts 0, 1, 2, 3
        cuts = dict(zip(map(tuple, rollout.cut_rows.tolist()), rollout.cut_observations[:, 0].tolist()))
        assert {place: cuts[place] for place in before} == before


def test_one_flag_and_the_truncation_in_the_info() -> None:
    env = Brax()
    env.single_observation_space = env.single_action_space
    with PPOTrainer("mlp", env, PPO) as trainer:
        rollout = trainer.collect_rollouts()
    assert rollout.truncated.any()
    assert not rollout.terminated.any()


def test_from_the_host_it_is_a_vector_env_like_any_other() -> None:
    env = make_vector_env(TensorCartPole(3, max_episode_steps=5), seed=2)
    step = env.reset()
    assert step.observations.shape == (3, 4)
    for _ in range(5):
        step = env.step(np.array([0, 1, 0]))
    assert step.truncated.tolist() == [True] * 3
    assert [ended.lane for ended in step.ended] == [0, 1, 2]
    saved = env.state_dict()
    after = env.step(np.array([1, 1, 1])).observations
    env.load_state_dict(saved)
    np.testing.assert_array_equal(env.step(np.array([1, 1, 1])).observations, after)
    with pytest.raises(EnvError, match="only all 3 lanes can be reset"):
        env.reset(indices=[0])


def test_what_does_not_fit_is_said_in_a_line() -> None:
    class Bad(TensorCartPole):
        def step(self, actions: torch.Tensor) -> Any:
            observations, rewards, *rest = super().step(actions)
            rewards[2] = float("nan")
            return observations, rewards, *rest

    with PPOTrainer("mlp", Bad(4), PPO) as trainer, pytest.raises(BadNumberError, match="the reward of lane 2 is not finite"):
        trainer.collect_rollouts()

    class Lost(TensorCartPole):
        def step(self, actions: torch.Tensor) -> Any:
            observations, *rest = super().step(actions)
            observations[1, 3] = float("inf")
            return observations, *rest

    with PPOTrainer("mlp", Lost(4), PPO) as trainer, pytest.raises(BadNumberError, match=r"observation .*lane 1 is not finite"):
        trainer.collect_rollouts()

    class Huge(TensorCartPole):
        def step(self, actions: torch.Tensor) -> Any:
            observations, rewards, *rest = super().step(actions)
            return observations, rewards * 3e38, *rest

    with PPOTrainer("mlp", Huge(4), PPO) as trainer:
        assert trainer.collect_rollouts().rewards.isfinite().all()  # their sum is not

    class Wide(TensorCartPole):
        def reset(self, *, seed: int | None = None) -> Any:
            return super().reset(seed=seed)[0][:, :3], {}

    with PPOTrainer("mlp", Wide(4), PPO) as trainer, pytest.raises(EnvError, match=r"not a tensor of shape \[4, 4\]"):
        trainer.collect_rollouts()
    with pytest.raises(ConfigError, match="num_envs=7, but the TensorCartPole has 4"):
        PPOTrainer("mlp", TensorCartPole(4), PPO, num_envs=7)
    with PPOTrainer("mlp", TensorCartPole(4), PPO) as trainer, pytest.raises(ConfigError, match="stepped from the host, not on a device"):
        trainer.collector.load_state_dict({"vector_env": {}})
