"""Several collectors as one, in this process and in processes of their own: equal bits, replacement, resuming, errors."""

import os
import re
import signal
import threading
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from doubles.collectors import STEPS, assert_equal, iterations, local, policy
from doubles.crashing import Steered, World
from doubles.runs import finish, outcome, small_config
from inchworm.collect.async_collector import AsyncCollector
from inchworm.collect.collector import RolloutCollector
from inchworm.collect.group import CollectorGroup
from inchworm.collect.host import CollectorEnvs, Host, Job, LocalEngine, Recipe, Share
from inchworm.collect.opponents import RandomActor
from inchworm.config.sections import CollectConfig, EnvConfig, OpponentConfig, PolicyConfig, PPOConfig, TrainingConfig
from inchworm.core.errors import ConfigError, EnvError, WorkerError, WorkerRestartWarning
from inchworm.core.seeding import episode_seed
from inchworm.env.source import make_vector_env
from inchworm.train.trainer import PPOTrainer


def pid_of(collectors: CollectorGroup, index: int) -> int:
    found = re.search(r"process (\d+)", collectors.processes[index])
    assert found is not None
    return int(found[1])


class Level(gym.Env[np.ndarray, int]):
    """Rewards are the level; an episode has 3 steps, or another length."""

    observation_space, action_space = gym.spaces.Box(0, 9, (1,), np.float32), gym.spaces.Discrete(2)
    level, now = 1, 0

    def __init__(self, length: int = 3) -> None:
        self._length = length

    def set_level(self, level: int) -> None:
        self.level = level

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.now = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.now += 1
        return np.zeros(1, np.float32), float(self.level), self.now == self._length, False, {}


def test_methods_are_called_in_the_copies_of_all_collectors_before_their_next_resets() -> None:
    """Copies 0 and 1 are of the first collector, 2 and 3 of the second. The second call comes after 4 steps, the next reset after 6."""
    collectors = local(Level, RandomActor(Level.action_space), num_envs=4, num_collectors=2)
    envs: Any = collectors.vector_env
    envs.call("set_level", 3, indices=[0, 3])
    assert collectors.collect(4).rewards.tolist() == [[3, 1, 1, 3]] * 4
    envs.call("set_level", 5)
    assert collectors.collect(4).rewards.tolist() == [[3, 1, 1, 3]] * 2 + [[5] * 4] * 2
    with pytest.raises(EnvError, match="no method set_levle"):
        envs.call("set_levle", 3)
    with pytest.raises(EnvError, match="cannot be called at once"):
        envs.call("set_level", 3, at_reset=False)


@pytest.mark.parametrize(("length", "sent"), [(3, [4, 9]), (1_000, [])])
def test_after_some_rollouts_a_state_travels_unless_it_is_mostly_a_long_episode(
    monkeypatch: pytest.MonkeyPatch, length: int, sent: list[int]
) -> None:
    """Rollouts of 2 steps in 4 lanes are at least 36 bytes a step, 1,440 in 5 rollouts; a fifth of it is less than the state's 2,000. The
    actions, of 8 bytes, are at most 96 bytes of short episodes, and 320 of a long one after 5 rollouts."""
    monkeypatch.setattr("inchworm.collect.host.STATE_INTERVAL", 5)
    host = Host(
        Recipe(CollectorEnvs.of(partial(Level, length), 4).make, RandomActor(Level.action_space), state_share=0.2), Share(0, 0, 4, 1)
    )
    answers = [host.collect(Job(number, number, 2, number, 0), None) for number in range(12)]
    assert [number for number, answer in enumerate(answers) if answer.state is not None] == sent


def test_one_collector_in_a_group_gives_the_bits_of_a_collector_alone() -> None:
    acting, alone = policy(), policy()
    collector = RolloutCollector(make_vector_env("CartPole-v1", 4, seed=5), alone, seed=5)
    together = local("CartPole-v1", acting, num_collectors=1, seed=5)
    assert_equal(iterations(together, acting, 3), iterations(collector, alone, 3))
    assert (together.env_steps, together.episodes) == (collector.env_steps, collector.episodes) == (3 * 4 * STEPS, collector.episodes)
    assert list(together.recent) == list(collector.recent)


def test_lanes_and_episode_seeds_are_those_of_all_copies() -> None:
    """5 copies of 2 collectors: 0 to 1 and 2 to 4. Lane b's n-th episode has the seed of copy b, whoever steps it."""
    rollout = local("CartPole-v1", policy(), num_envs=5, num_collectors=2, seed=9).collect(100)
    assert rollout.num_lanes == 5
    for lane in range(5):
        seeds = [episode.seed for episode in rollout.episodes if episode.lane == lane]
        assert seeds == [episode_seed(9, lane, number) for number in range(len(seeds))]
        assert seeds
    first, third = (rollout.select_lanes([lane]).log_probs for lane in (0, 2))  # the first lanes of two collectors
    assert not np.array_equal(first, third), "each has a stream of its own"


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_rollout_k_is_made_with_the_weights_of_k_minus_staleness(staleness: int) -> None:
    acting = policy()
    found = iterations(local("CartPole-v1", acting, num_collectors=2, staleness=staleness), acting, 5)
    assert [rollout.policy_version.tolist() for rollout in found] == [[max(0, number - staleness)] * 4 for number in range(5)]


@pytest.fixture(scope="module")
def world() -> Any:
    """Dicts, masks, hybrid actions and episodes that depend on all of their history."""
    return partial(World)


def test_processes_give_the_same_bits_however_often_they_are_killed(world: Any) -> None:
    """Once before the first rollout is there, once while they collect ahead, once both of them."""
    acting, other = policy(world), policy(world)
    expected = iterations(local(world, acting, num_collectors=2, staleness=1), acting, 5)
    with AsyncCollector(world, other, num_collectors=2, num_envs=4) as collectors, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = []
        for number in range(5):
            if number in (0, 2, 3):
                for index in range(1 + (number == 3)):
                    os.kill(pid_of(collectors, index), signal.SIGKILL)
            found += iterations(collectors, other, 1)
    assert_equal(found, expected)
    restarts = [str(one.message) for one in caught if one.category is WorkerRestartWarning]
    assert len(restarts) in (3, 4)  # a rollout that had arrived needs no replacement before the next one
    assert restarts[0].startswith("collector 0 (lanes 0 to 1) in process ")
    assert "was killed by SIGKILL" in restarts[0]


def test_a_group_resumes_exactly_on_another_engine_with_what_was_begun_ahead(world: Any) -> None:
    acting = policy(world)
    collectors = local(world, acting, num_collectors=2, staleness=1)
    iterations(collectors, acting, 2)
    state, weights = collectors.state_dict(), acting.get_weights()
    assert [begun["num_steps"] for begun in state["begun"]] == [STEPS]
    assert [int(saved["version"]) for saved in state["weights"]] == [1], "of rollout 2, which was begun before learn 1 was over"
    expected = iterations(collectors, acting, 3)

    other = policy(world)
    other.set_weights(weights)
    with AsyncCollector(world, other, num_collectors=2, num_envs=4) as elsewhere:
        elsewhere.load_state_dict(state)
        assert_equal(iterations(elsewhere, other, 3), expected)
        assert elsewhere.env_steps == collectors.env_steps


def test_other_steps_take_back_what_was_begun_ahead() -> None:
    """The rollout begun ahead had 24 steps; 7 are asked for: they are its first ones, but with the weights of now."""
    acting, fresh = policy(), policy()
    ahead = local("CartPole-v1", acting, num_collectors=2, staleness=1, steps_ahead=STEPS)
    in_turns = local("CartPole-v1", fresh, num_collectors=2)
    assert_equal(iterations(ahead, acting, 1), iterations(in_turns, fresh, 1))
    assert_equal(iterations(ahead, acting, 1, 7), iterations(in_turns, fresh, 1, 7))


def test_reset_options_reach_the_copies_they_are_for(world: Any) -> None:
    """With the bonus 100 the next episodes of copy 2, a lane of the second collector, begin far from 0."""
    collectors = local(world, policy(world), num_collectors=2)
    collectors.vector_env.set_reset_options({"bonus": 100}, [2])
    collectors.collect(1)
    rollout = collectors.collect(30)
    far = [np.abs(rollout.observations["place"][rollout.episode_starts[:, lane], lane]).max() for lane in range(4)]
    assert [value > 50 for value in far] == [False, False, True, False]


def test_errors_of_the_environment_name_the_collector(tmp_path: Path) -> None:
    said = tmp_path / "said"
    said.write_text("0")
    env = partial(Steered, said)
    with AsyncCollector(env, policy(World), num_collectors=2, num_envs=4, staleness=0) as collectors:
        collectors.collect(2)
        said.write_text("raise")
        with pytest.raises(WorkerError, match=r"collector \d \(lanes .*\): .*ValueError: no more fuel"):
            collectors.collect(2)
        with pytest.raises(WorkerError, match="create new ones"):
            collectors.collect(2)


def test_one_that_hangs_is_replaced_and_restarts_are_bounded(tmp_path: Path) -> None:
    said = tmp_path / "said"
    said.write_text("1000")
    with (
        AsyncCollector(partial(Steered, said), policy(World), num_envs=1, timeout=1.0, restarts=1) as collectors,
        pytest.warns(WorkerRestartWarning, match=r"gave no answer within 1 s; raise collect.timeout"),
        pytest.raises(
            WorkerError, match=r"collector 0 \(lane 0\) gave no answer .*not restarted: .*\(collect.restarts=1 within ten minutes\)"
        ),
    ):
        collectors.collect(2)


def test_restarts_are_counted_for_each_collector() -> None:
    """A lost node takes many collectors at once: with one restart each, both of two may die."""
    acting = policy()
    with AsyncCollector("CartPole-v1", acting, num_collectors=2, num_envs=2, restarts=1) as collectors:
        collectors.collect(4)
        for pid in [pid_of(collectors, index) for index in range(2)]:
            os.kill(pid, signal.SIGKILL)
        with pytest.warns(WorkerRestartWarning) as caught:
            iterations(collectors, acting, 3, steps=4)
    texts = [str(one.message) for one in caught]
    assert sorted(text[:11] for text in texts) == ["collector 0", "collector 1"]
    assert all("(0 restarts left" in text for text in texts)


class ToldTimes(LocalEngine):
    """Says of the collectors of one copy that they took a second, of others that they took three."""

    def wait(self, links: Any, seconds: float) -> Any:
        return [
            (host, answer._replace(seconds=2.0 * host.collector.vector_env.num_envs - 1.0)) for host, answer in super().wait(links, seconds)
        ]


def test_a_slow_collector_is_reported_once() -> None:
    """4 copies for 3 collectors: one each for the first two, two for the last, which takes three times as long."""
    acting = policy()
    collectors = CollectorGroup(CollectorEnvs.of("CartPole-v1", 4), acting, ToldTimes(), num_collectors=3)
    with pytest.warns(
        UserWarning, match=r"collector 2 \(lanes 2 to 3\) in this process is slow: it took 3.0 s .* the others 1.0 s"
    ) as caught:
        iterations(collectors, acting, 5, steps=3)
    assert len(caught) == 1


def test_an_error_leaves_a_local_group_where_it_was(tmp_path: Path) -> None:
    """The rollout that failed is collected again, from the same state: as if it had not failed."""
    said, acting = tmp_path / "said", policy(World)
    said.write_text("0")
    collectors, undisturbed = (local(partial(Steered, said), acting, num_collectors=2) for _ in range(2))
    expected = [undisturbed.collect(5), undisturbed.collect(5)]
    found = [collectors.collect(5)]
    said.write_text("raise")
    with pytest.raises(EnvError, match="no more fuel"):
        collectors.collect(5)
    said.write_text("0")
    assert_equal([*found, collectors.collect(5)], expected)


def test_a_process_imports_no_framework_and_is_small() -> None:
    """What the process has mapped and holds in memory, after it has acted."""
    with AsyncCollector("CartPole-v1", policy(), num_envs=2) as collectors:
        collectors.collect(4)
        process = Path("/proc") / str(pid_of(collectors, 0))
        assert not re.search(r"libtorch|jaxlib", (process / "maps").read_text())
        resident = re.search(r"VmRSS:\s+(\d+) kB", (process / "status").read_text())
        assert resident is not None
        assert int(resident[1]) * 1024 < 150e6
    assert not process.exists(), "close ends it"


def trainer(directory: Path | None = None, iterations: int = 6, **collect: Any) -> PPOTrainer:
    config = small_config(iterations=iterations, backend="numpy").replace(collect=CollectConfig(num_collectors=2, **collect))
    return PPOTrainer("mlp", "CartPole-v1", config, run_dir=directory)


def test_a_run_is_the_same_on_both_engines_and_after_a_resume(tmp_path: Path) -> None:
    """Staleness 1: the metric is 0 for the first rollout, then 1. Half of the run in processes, half in this one, is the same run."""
    whole = trainer(tmp_path / "whole", engine="local", staleness=1)
    with whole:
        history = whole.train()
        expected = outcome(whole)
    assert history["staleness"] == [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    finish(trainer(tmp_path / "parts", engine="async", iterations=3))
    assert finish(trainer(tmp_path / "parts", engine="local", staleness=1), resume=True) == expected


def test_a_warm_up_is_not_collected_ahead_of() -> None:
    """The short first rollout initialises the normaliser; the next one is collected with it."""
    config = small_config(iterations=4, policy=PolicyConfig(hidden_sizes=(8,), normalize_observations=True), backend="numpy")
    config = config.replace(collect=CollectConfig(num_collectors=2, staleness=1), ppo=config.ppo.replace(rollout_steps=64))
    with PPOTrainer("mlp", "CartPole-v1", config.replace(run=config.run.replace(total_timesteps=300))) as made:
        history = made.train()
    assert history["staleness"][:3] == [0.0, 0.0, 1.0]


def test_wrong_use() -> None:
    with pytest.raises(ConfigError, match=r"collect.num_collectors=9 is more than env.num_envs=8"):
        TrainingConfig(collect=CollectConfig(num_collectors=9))
    with pytest.raises(ConfigError, match=r"collect.staleness=3 .* ppo.max_staleness=2 refuses"):
        TrainingConfig(collect=CollectConfig(staleness=3), ppo=PPOConfig(max_staleness=2))
    with pytest.raises(ConfigError, match=r"opponent.mode=self_play needs its opponents in one collector"):
        TrainingConfig(collect=CollectConfig(engine="async"), opponent=OpponentConfig(mode="self_play"))
    with pytest.raises(ConfigError, match=r"collect.ray_address=.* is used by collect.engine=ray"):
        CollectConfig(ray_address="127.0.0.1:6379")
    with pytest.raises(ConfigError, match=r"cannot share a .*CartPoleEnv.*pass an id or a factory"):
        PPOTrainer(
            "mlp", gym.make("CartPole-v1").unwrapped, TrainingConfig(env=EnvConfig(num_envs=1), collect=CollectConfig(engine="async"))
        )
    with pytest.raises(ConfigError, match="exists once"):
        AsyncCollector(gym.make("CartPole-v1"), policy())
    with pytest.raises(ConfigError, match=r"of 2 collectors, here are 1; set collect.num_collectors=2"):
        local("CartPole-v1", policy(), num_collectors=1).load_state_dict(local("CartPole-v1", policy(), num_collectors=2).state_dict())
    with pytest.raises(EnvError, match="stepped by their collectors"):
        local("CartPole-v1", policy(), num_collectors=2).vector_env.reset()
    lock = threading.Lock()  # cannot be pickled
    with (
        AsyncCollector(lambda: (lock, World())[1], policy(World)) as collectors,
        pytest.raises(EnvError, match=r"collect\.engine=local"),
    ):
        collectors.collect(1)
