"""What a rollout takes is known before it is taken."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import optree
import pytest
from gymnasium import spaces

from inchworm import PPOTrainer, TrainingConfig
from inchworm.core.errors import ConfigError
from inchworm.rollout import buffer as size
from inchworm.rollout.buffer import available_bytes, check_fits, format_bytes, rollout_bytes
from inchworm.rollout.rollout import ARRAY_FIELDS


def test_by_hand() -> None:
    # a row: 4 floats observed, 1 int64 action, log-prob and reward as float32, 4 flags: 16 + 8 + 8 + 4 = 36 bytes
    # 128 steps x 64 lanes x 36 = 294,912, and 64 successors of 16 bytes = 1,024
    assert rollout_bytes(spaces.Box(-1, 1, (4,)), spaces.Discrete(2), 128, 64) == 295_936


@pytest.mark.parametrize(
    ("observation_space", "action_space"),
    [
        (spaces.Box(0, 255, (8, 8, 3), np.uint8), spaces.Discrete(3)),
        (spaces.Dict({"a": spaces.Box(-1, 1, (3,)), "b": spaces.Discrete(4)}), spaces.Box(-1, 1, (2,))),
    ],
)
def test_it_is_what_a_rollout_without_ends_holds(observation_space: spaces.Space, action_space: spaces.Space) -> None:
    with PPOTrainer("mlp", Endless(observation_space, action_space), seed=0) as trainer:
        rollout = trainer.collect_rollouts(7)
    held = ("policy_version", "weights_fingerprint", "cut_rows", "cut_valid")
    arrays = [leaf for name in ARRAY_FIELDS if name not in held for leaf in optree.tree_leaves(getattr(rollout, name))]
    assert sum(array.nbytes for array in arrays) == rollout_bytes(observation_space, action_space, 7, 1)


class Endless(gym.Env):
    """A world without ends."""

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space) -> None:
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}


def test_what_does_not_fit_is_refused_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size, "available_bytes", lambda: 1000)
    check_fits(1000, what="x")
    with pytest.raises(ConfigError, match=r"^x takes 1 kB, but 1 kB of memory are free; use fewer env.num_envs or ppo.rollout_steps$"):
        check_fits(1001, what="x")
    config = TrainingConfig.from_dict({"ppo": {"rollout_steps": 64}, "env": {"num_envs": 8}})
    with pytest.raises(ConfigError, match="a rollout of 8 lanes x 64 steps takes 18"):
        PPOTrainer("mlp", "CartPole-v1", config)
    monkeypatch.setattr(size, "available_bytes", lambda: None)
    check_fits(10**15, what="x")


def test_the_systems_answer(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    assert available_bytes() is None or available_bytes() > 10**6
    facts = tmp_path / "meminfo"
    facts.write_text("MemTotal: 9 kB\nMemAvailable:     2048 kB\n")
    monkeypatch.setattr(size, "_MEMINFO", facts)
    assert available_bytes() == 2048 * 1024
    facts.write_text("nothing of the kind\n")
    monkeypatch.setattr(size.os, "sysconf", lambda name: {"SC_AVPHYS_PAGES": 3, "SC_PAGE_SIZE": 4096}[name])
    assert available_bytes() == 3 * 4096
    monkeypatch.setattr(size.os, "sysconf", _unknown)
    assert available_bytes() is None


def _unknown(name: str) -> int:
    raise ValueError(name)


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 bytes"), (999, "999 bytes"), (18_600, "18.6 kB"), (2_500_000, "2.5 MB"), (3 * 10**9, "3 GB"), (10**16, "1e+04 TB")],
)
def test_bytes_for_people(count: int, words: str) -> None:
    assert format_bytes(count) == words
