"""Tests of env/source.py: the choice by known step times, measuring by a fake clock, and the cores that may be used."""

import os
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from doubles.toys import Counter
from inchworm.config.sections import EnvConfig
from inchworm.env import source
from inchworm.env.source import WorkerChoice, choose_by_step, choose_num_workers, step_seconds, usable_cores


class Slow(gym.Env):
    """By the class's clock, a step takes `step` seconds and a reset `reset`; only action 1 is legal."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)
    now = 0.0
    created = closed = 0

    def __init__(self, step=0.002, reset=0.0, length=10**9):
        Slow.created += 1
        self.durations, self.length, self.count = (step, reset), length, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        Slow.now += self.durations[1]
        self.count = 0
        return np.zeros(2, np.float32), {"action_mask": np.array([0, 1], np.int8)}

    def step(self, action):
        assert action == 1
        Slow.now += self.durations[0]
        self.count += 1
        return np.zeros(2, np.float32), 0.0, self.count == self.length, False, {"action_mask": np.array([0, 1], np.int8)}

    def close(self):
        Slow.closed += 1


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(source, "time", SimpleNamespace(perf_counter=lambda: Slow.now))


@pytest.fixture
def costs(monkeypatch):
    """An exchange costs 20 µs and 20 for each worker."""
    monkeypatch.setattr(source, "_EXCHANGE_SECONDS", 20e-6)
    monkeypatch.setattr(source, "_EXCHANGE_SECONDS_PER_WORKER", 20e-6)


def test_the_arithmetic_of_a_lockstep(costs):
    assert source.lockstep_seconds(50e-6, 8, 1) == pytest.approx(4 * 50e-6 + 40e-6)  # 4 copies each, in the worker and here
    assert source.lockstep_seconds(50e-6, 7, 1) == pytest.approx(4 * 50e-6 + 40e-6)  # the fullest has 4
    assert source.lockstep_seconds(50e-6, 8, 3) == pytest.approx(2 * 50e-6 + 80e-6)


def test_the_reason_is_a_sentence_with_the_figures(costs):
    words = "using 1 worker process plus this one: about 248 µs per vector step instead of 416 µs"
    assert choose_by_step(52e-6, 8, 2) == WorkerChoice(1, words, help_workers=True)
    words = "no worker processes: 72 µs per vector step in this process, about 76 µs with 1 worker process"
    assert choose_by_step(9e-6, 8, 2) == WorkerChoice(0, words)
    assert choose_by_step(2e-3, 8, 2).reason.endswith("about 8.04 ms per vector step instead of 16 ms")


def test_a_small_gain_is_not_taken(costs):
    # 8 copies of s in two processes: 8 s against 4 s + 40 µs; the gain is 30 % at 8 s = 1.3 (4 s + 40), s = 52 / 2.8 = 18.6 µs.
    assert choose_by_step(18e-6, 8, 2).num_workers == 0
    assert choose_by_step(19e-6, 8, 2).num_workers == 1


def test_never_more_processes_than_copies_or_cores_nor_more_than_help(costs):
    assert choose_by_step(10e-3, 3, 16).num_workers == 2
    assert choose_by_step(10e-3, 16, 4).num_workers == 3
    # 16 copies of 100 µs: 16 processes 100 + 320 = 420, 8 200 + 160 = 360, 6 300 + 120 = 420, 4 400 + 80 = 480.
    assert choose_by_step(100e-6, 16, 16).num_workers == 7
    # 9 copies of 10 ms in 8 processes take what they take in 5, two steps one after another.
    assert choose_by_step(10e-3, 9, 8).num_workers == 4


def test_step_seconds_counts_steps_and_their_part_of_the_resets(clock):
    Slow.created = Slow.closed = 0
    assert step_seconds(Slow) == pytest.approx(0.002)
    assert (Slow.created, Slow.closed) == (1, 1)
    # 10 ms of reset every 5 steps are 2 ms a step.
    assert step_seconds(lambda: Slow(0.001, 0.01, 5)) == pytest.approx(0.003)
    # Slower than the time for measuring: one step is enough.
    assert step_seconds(lambda: Slow(0.35)) == pytest.approx(0.35)


def test_answers_that_need_no_measuring(monkeypatch):
    monkeypatch.setattr(source, "step_seconds", lambda make: pytest.fail("measured"))
    for config, cores, workers, words in (
        (EnvConfig(num_workers=3), 8, 3, "3 worker processes (env.num_workers=3)"),
        (EnvConfig(num_workers=0), 8, 0, "no worker processes (env.num_workers=0)"),
        (EnvConfig(), 8, 0, "no worker processes: all 8 copies of CartPole-v1 are stepped together"),
        (EnvConfig(id="envpool:Pong-v5"), 8, 0, "no worker processes: EnvPool steps its copies in threads"),
        (EnvConfig(id="Acrobot-v1"), 1, 0, "no worker processes: there is only one core"),
        (EnvConfig(id="Acrobot-v1", num_envs=1), 8, 0, "no worker processes: there is only one copy"),
    ):
        assert choose_num_workers(config, cores=cores) == WorkerChoice(workers, words)


@pytest.mark.parametrize(("made", "workers"), [(Slow, 1), (Counter, 0)])  # the second takes no time by this clock
def test_what_a_config_makes_is_measured(clock, monkeypatch, made, workers):
    monkeypatch.setattr(source, "make_env", lambda config: made())
    assert choose_num_workers(EnvConfig(id="Acrobot-v1", num_envs=4), cores=2).num_workers == workers


def test_a_quick_environment_stays_in_this_process(clock):
    quick = choose_num_workers(EnvConfig(id="CartPole-v1", num_envs=2, native=False), cores=2)
    assert (quick.num_workers, quick.reason[:25]) == (0, "no worker processes: 0 µs")


def put(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3.0),
        ({"cpu,cpuacct/cpu.cfs_quota_us": "50000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n", "cpu.max": "200000 100000"}, 0.5),
    ],
)
def test_quota(tmp_path, files, quota):
    assert source.cpu_quota(put(tmp_path, files)) == quota


def test_affinity_and_quota_bound_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "_CGROUPS", put(tmp_path, {"cpu.max": "250000 100000"}))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    assert usable_cores() == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    assert usable_cores() == 1
    monkeypatch.setattr(source, "_CGROUPS", put(tmp_path, {"cpu.max": "10000 100000"}))
    assert usable_cores() == 1


def test_systems_without_affinity(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "_CGROUPS", tmp_path)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores() == 6
