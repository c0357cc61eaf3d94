"""Reward scaling: the scale is that of a sum written out in loops and of Gymnasium's wrapper; rollouts are never written."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import NormalizeReward, TransformReward

from doubles.learners import SIDES, collect
from doubles.toys import Counter
from inchworm import PPOTrainer, load_policy
from inchworm.backends.corrections import RewardScaler
from inchworm.config.sections import PPOConfig, RunConfig, TrainingConfig
from inchworm.core.errors import CorruptFileError
from inchworm.core.tensor_file import write_tensor_file
from inchworm.policy.file import describe
from inchworm.rollout.fake import create_fake_rollout
from inchworm.rollout.rollout import Rollout, combine_rollouts, select_lanes

PPO = PPOConfig(learning_rate=1e-2, update_epochs=2, num_minibatches=2, gamma=0.9)


def rollout_of(rewards: Any, *, terminated: Any = 0, truncated: Any = 0, starts: Any = 0, valid: Any = 1) -> Rollout:
    """A rollout with these rewards [T, B] and flags; nothing else of it is read here."""
    rewards = np.array(rewards, np.float32)
    flags = (np.broadcast_to(np.array(flag, bool), rewards.shape) for flag in (terminated, truncated, starts, valid))
    names = ("terminated", "truncated", "episode_starts", "valid")
    made = create_fake_rollout(spaces.Box(-1, 1, (1,)), spaces.Discrete(2), *rewards.shape)
    return replace(made, rewards=rewards, **dict(zip(names, flags)))


def test_by_hand() -> None:
    scaler = RewardScaler(0.5)
    # 2; 0 + 1 = 1 | after the end: 4; 0 + 2 = 2. The mean is 2.25, the variance (4 + 1 + 16 + 4) / 4 - 2.25² = 1.1875.
    scaled = scaler(rollout_of([[2], [0], [4], [0]], terminated=[[0], [1], [0], [0]], starts=[[0], [0], [1], [0]]))
    assert scaler.scale == pytest.approx(1.1875**0.5, rel=1e-7)
    np.testing.assert_allclose(scaled.rewards[:, 0], np.array([2, 0, 4, 0]) / 1.1875**0.5, rtol=1e-6)
    # The lane continues at 2: 0 + 1 = 1. The mean of five is 2, the variance 26 / 5 - 4 = 1.2.
    scaler(rollout_of([[0]]))
    assert (scaler.running.tolist(), scaler.scale) == ([1.0], pytest.approx(1.2**0.5, rel=1e-7))
    scaler(rollout_of([[3]], truncated=1))
    assert scaler.running.tolist() == [0.0]
    scaler(rollout_of([[3, 3]]))  # other lanes: they begin at 0
    assert scaler.running.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("lanes", [1, 3, 12])
def test_sums_and_statistics_are_those_of_loops_over_lanes_and_rows(lanes: int) -> None:
    rng, scaler, running, seen = np.random.default_rng(lanes), RewardScaler(0.9), [0.0] * lanes, list[float]()
    for _ in range(5):
        shape = (17, lanes)
        terminated, truncated = rng.random(shape) < 0.1, rng.random(shape) < 0.1
        joins, valid = rng.random(shape) < 0.05, rng.random(shape) < 0.8
        given = rollout_of(rng.normal(1, 3, shape), terminated=terminated, truncated=truncated, starts=joins, valid=valid)
        before = given.rewards.copy()
        for lane in range(lanes):
            for t in range(17):
                running[lane] = (0.0 if joins[t, lane] else 0.9 * running[lane]) + float(given.rewards[t, lane])
                if valid[t, lane]:
                    seen.append(running[lane])
                if terminated[t, lane] or truncated[t, lane]:
                    running[lane] = 0.0
        scaled = scaler(given)
        assert scaler.scale == pytest.approx(np.sqrt(np.var(seen) + 1e-8), rel=1e-12)
        np.testing.assert_allclose(scaler.running, running, rtol=1e-12)
        np.testing.assert_array_equal(scaled.rewards, (before / scaler.scale).astype(np.float32))
        np.testing.assert_array_equal(given.rewards, before)
        assert scaled.observations is given.observations


def test_the_scale_is_that_of_gymnasiums_wrapper() -> None:
    """Rollouts of one step, so that the statistics move as often; the wrapper's begin with 1e-4 of a sample of variance 1."""
    rewards, scaler = np.random.default_rng(3).normal(2, 5, 300).astype(np.float32).tolist(), RewardScaler(0.99)
    env = NormalizeReward(TransformReward(Counter(length=301), lambda step: rewards[int(step) - 1]), gamma=0.99)
    env.reset()
    for step, reward in enumerate(rewards):
        normalised = float(env.step(0)[1])
        scaled = scaler(rollout_of([[reward]]))
        if step > 10:
            assert scaled.rewards.item() == pytest.approx(normalised, rel=1e-3), step
    assert scaler.scale == pytest.approx(float(np.sqrt(env.return_rms.var)), rel=1e-5)


def test_rewards_that_make_constant_returns_are_not_scaled() -> None:
    for reward in (0.0, 5.0):
        assert RewardScaler(0.0)(rollout_of(np.full((4, 2), reward))).rewards.tolist() == [[reward] * 2] * 4


@pytest.mark.parametrize("side", SIDES, ids=lambda side: side.name)
@pytest.mark.parametrize("popart", [False, True], ids=["plain", "popart"])
def test_learning_with_it_is_learning_from_scaled_rewards(side: Any, popart: bool) -> None:
    policies = [side.policy(normalize_values=popart) for _ in range(2)]
    scales, plain = side.learner(policies[0], PPO.replace(scale_rewards=True)), side.learner(policies[1], PPO)
    scaler = RewardScaler(PPO.gamma)
    for seed in range(3):
        rollout = collect(policies[0], seed=seed)
        rollout = replace(rollout, rewards=rollout.rewards * 1000)
        before = rollout.rewards.copy()
        stats = scales.update(rollout)
        plain.update(scaler(rollout))
        np.testing.assert_array_equal(rollout.rewards, before)
        assert stats["reward_scale"] == scaler.scale
        if side.name == "torch" and seed == 1:
            continued = side.learner(policies[0], PPO.replace(scale_rewards=True))
            continued.load_state_dict(scales.state_dict())
            scales = continued
    for name, expected in policies[1].get_weights().items():
        np.testing.assert_array_equal(policies[0].get_weights()[name], expected, err_msg=name)


def test_rollouts_combined_of_fewer_or_more_lanes() -> None:
    side = SIDES[0]
    policy = side.policy()
    learner = side.learner(policy, PPO.replace(scale_rewards=True, max_staleness=3))
    one, other = (collect(policy, seed=seed) for seed in (0, 1))
    for rollout in (one, combine_rollouts([one, other]), select_lanes(one, [1]), other):
        assert np.isfinite(list(learner.update(rollout).values())).all()
        assert learner.state_dict()["rewards"]["running"].shape == (rollout.num_lanes,)


@pytest.mark.parametrize("of", ["", "policy.safetensors", "checkpoints"])
def test_a_warm_start_begins_with_the_scale_of_the_saved_policy(of: str, tmp_path: Path) -> None:
    config = TrainingConfig(ppo=PPO.replace(rollout_steps=16, scale_rewards=True), run=RunConfig(total_timesteps=64))
    with PPOTrainer("mlp", "CartPole-v1", config, num_envs=2, run_dir=tmp_path) as trainer:
        trainer.train()
        saved = trainer.learner.state_dict()["rewards"]
        assert saved["count"] == 64
        trainer.save_policy(tmp_path / "by-hand.safetensors")
    for name in (of, "by-hand.safetensors"):
        with PPOTrainer("mlp", "CartPole-v1", config, num_envs=2, init_from=tmp_path / name) as trainer:
            begun = trainer.learner.state_dict()["rewards"]
            assert {name: begun[name] for name in ("mean", "var", "count")} == {name: saved[name] for name in ("mean", "var", "count")}
            assert begun["running"].size == 0  # these are other episodes
    with PPOTrainer("mlp", "CartPole-v1", config, num_envs=2, init_from=tmp_path, init_weights=["actor.*"]) as trainer:
        assert trainer.learner.state_dict()["rewards"]["count"] == 0  # the critic is new
    unscaled = config.replace(ppo=PPO.replace(rollout_steps=16))
    with PPOTrainer("mlp", "CartPole-v1", unscaled, num_envs=2, init_from=tmp_path) as trainer:
        assert "rewards" not in trainer.learner.state_dict()


@pytest.mark.parametrize("wrong", [{"mean": 0.0, "var": -1.0, "count": 1}, {"mean": "inf", "var": 1.0, "count": 1}, {"mean": 0.0}, 3])
def test_statistics_that_cannot_be_are_refused(wrong: Any, tmp_path: Path) -> None:
    policy = SIDES[0].policy()
    description = {**describe(policy).to_dict(), "reward_statistics": wrong}
    write_tensor_file(tmp_path / "policy", policy.get_weights(), kind="policy", version=1, header=description)
    with pytest.raises(CorruptFileError, match="policy is not a valid policy file: "):
        load_policy(tmp_path / "policy")
