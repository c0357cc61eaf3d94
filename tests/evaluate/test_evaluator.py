"""A world whose episodes are known from their seeds: seed s gives s % 7 + 1 steps of reward s % 5 each."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from doubles.toys import Counter
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.collect.opponents import RandomActor
from inchworm.config.sections import EnvConfig, EvalConfig, OpponentConfig, PolicyConfig, TrainingConfig
from inchworm.core.errors import ConfigError, SpaceError
from inchworm.core.seeding import episode_seed
from inchworm.core.types import PolicyStep, Tree
from inchworm.env.source import make_vector_env
from inchworm.evaluate.evaluator import PolicyEvaluator, evaluate_policy, evaluation_opponent
from inchworm.evaluate.games import for_evaluation
from inchworm.evaluate.stats import EvalStats
from inchworm.policy.file import save_policy
from inchworm.policy.spec import PolicySpec


def length_of(seed: int) -> int:
    return seed % 7 + 1


class SeedWorld(Counter):
    """It shows (seed, step)."""

    opened = closed = 0

    def __init__(self, *, raises: bool = False) -> None:
        super().__init__()
        self.raises = raises
        SeedWorld.opened += 1

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self.raises:
            raise RuntimeError("the world ended")
        self.length = length_of(self.episode)
        observation, _, over, _, info = super().step(action)
        ending = {"is_success": self.episode % 2 == 0, "ones": info["total"]}
        return observation, float(self.episode % 5), over, False, ending if over else {}

    def close(self) -> None:
        SeedWorld.closed += 1


class Coin:
    """Samples a coin; greedily it is 1. Remembers, as a recurrent policy would, how many steps of the episode it has seen."""

    def __init__(self) -> None:
        self.memory: list[np.ndarray] = []

    def initial_state(self, num_lanes: int) -> Tree:
        return np.zeros(num_lanes)

    def act(self, observations: Tree, state: Tree, episode_starts: Any, rng: Any, *, deterministic: bool = False) -> PolicyStep:
        seen = np.where(episode_starts, 0.0, state)
        assert np.array_equal(seen, observations[:, 1])  # the observation counts the same steps
        actions = np.ones(len(seen), np.int64) if deterministic else rng.integers(0, 2, len(seen))
        return PolicyStep(actions, actions, np.zeros(len(seen), np.float32), seen + 1)


def expect(stats: EvalStats, seeds: list[int]) -> None:
    assert stats.seeds.tolist() == seeds
    assert stats.lengths.tolist() == [length_of(seed) for seed in seeds]
    assert stats.returns.tolist() == [length_of(seed) * (seed % 5) for seed in seeds]
    assert stats.infos["is_success"].tolist() == [float(seed % 2 == 0) for seed in seeds]


@pytest.mark.parametrize(("episodes", "copies"), [(1, 1), (3, 4), (10, 4), (12, 4), (9, 2)])
def test_every_planned_episode_is_played_once_and_no_other(episodes: int, copies: int) -> None:
    with PolicyEvaluator(SeedWorld, EvalConfig(num_envs=copies, seed=5)) as evaluator:
        stats = evaluator.evaluate(Coin(), episodes)
    # episode i is number i // copies of copy i % copies, whichever copy is quick
    expect(stats, [episode_seed(5, index % copies, index // copies) for index in range(episodes)])


def test_short_episodes_count_no_more_than_long_ones() -> None:
    # Two copies, five episodes each. Copy 0 plays 7 steps each time, copy 1 one step: "the first ten that finish" would
    # take eight or so of the short ones and find a mean length near 2; the true mean is (7 + 1) / 2 = 4.
    long, short = 7 * 100 + 6, 7 * 100
    stats = evaluate_policy(Coin(), SeedWorld, seeds=[long, short] * 5, num_envs=2)
    assert stats.lengths.tolist() == [7, 1] * 5
    assert stats.mean_episode_length == 4.0


def test_the_same_policy_gets_the_same_numbers_each_time_greedy_and_sampled() -> None:
    with PolicyEvaluator(SeedWorld, EvalConfig(num_envs=3, episodes=10)) as evaluator:
        for deterministic in (True, False):
            first = evaluator.evaluate(Coin(), deterministic=deterministic)
            second = evaluator.evaluate(Coin(), deterministic=deterministic)
            assert first.to_dict() == second.to_dict()
            assert first.deterministic is deterministic
    sampled = evaluate_policy(Coin(), SeedWorld, 10, deterministic=False, num_envs=3)
    assert sampled.infos["ones"].tolist() == second.infos["ones"].tolist()
    assert 0 < sampled.infos["ones"].sum() < sampled.lengths.sum()
    assert first.seeds.tolist() == sampled.seeds.tolist()


def test_seeds_are_derived_or_given() -> None:
    assert evaluate_policy(Coin(), SeedWorld, 4, seed=1).seeds.tolist() != evaluate_policy(Coin(), SeedWorld, 4, seed=2).seeds.tolist()
    expect(evaluate_policy(Coin(), SeedWorld, 5, seeds=[3, 1, 4, 1, 59], num_envs=2), [3, 1, 4, 1, 59])


def test_seeds_and_episodes_must_agree() -> None:
    with pytest.raises(ConfigError, match="got 3 seeds for 5 episodes; give one seed per episode"):
        evaluate_policy(Coin(), SeedWorld, 5, seeds=[1, 2, 3])
    with pytest.raises(ConfigError, match="episodes=0 must be 1 or more"):
        evaluate_policy(Coin(), SeedWorld, 0)


def test_a_hundred_episodes_by_default_and_progress_counts_them() -> None:
    assert evaluate_policy(Coin(), SeedWorld).episodes == 100
    assert evaluate_policy(Coin(), SeedWorld, seeds=range(7)).episodes == 7
    counts: list[int] = []
    with PolicyEvaluator(SeedWorld, EvalConfig(num_envs=2, episodes=5)) as evaluator:
        evaluator.evaluate(Coin(), progress=counts.append)
    assert counts == sorted(counts)
    assert counts[-1] == 5


def test_environments_are_made_once_and_closed() -> None:
    SeedWorld.opened = SeedWorld.closed = 0
    with PolicyEvaluator(SeedWorld, EvalConfig(num_envs=2, episodes=3)) as evaluator:
        assert SeedWorld.opened == 0
        evaluator.evaluate(Coin())
        evaluator.evaluate(Coin())
        assert (SeedWorld.opened, SeedWorld.closed) == (2, 0)
    assert SeedWorld.closed == 2
    evaluator.close()


def test_after_a_crash_the_environments_are_made_anew() -> None:
    worlds = [SeedWorld(raises=True), SeedWorld()]
    with PolicyEvaluator(lambda: worlds.pop(0), EvalConfig(num_envs=1, episodes=2)) as evaluator:
        with pytest.raises(Exception, match="the world ended"):
            evaluator.evaluate(Coin())
        assert evaluator.evaluate(Coin()).episodes == 2


def test_an_environment_that_is_given_stays_open() -> None:
    world = SeedWorld()
    SeedWorld.closed = 0
    expect(evaluate_policy(Coin(), world, seeds=[1, 2, 3]), [1, 2, 3])
    vector_env = make_vector_env(SeedWorld, 2)
    expect(evaluate_policy(Coin(), vector_env, seeds=[1, 2, 3]), [1, 2, 3])
    assert SeedWorld.closed == 0
    vector_env.close()
    assert SeedWorld.closed == 2


def test_atari_is_scored_by_whole_games_and_true_rewards() -> None:
    pytest.importorskip("ale_py")
    from inchworm.env.make import make_env

    trained = EnvConfig(id="ALE/Breakout-v5", atari=True, frame_stack=2, max_episode_steps=50)
    with contextlib.closing(make_env(for_evaluation(trained, 2))) as env:
        assert env.observation_space.shape == (2, 84, 84)
        assert "TransformReward" not in repr(env)
        env.reset(seed=0)
        rng, lives, steps, over = np.random.default_rng(0), set(), 0, False
        while not over:
            _, _, terminated, truncated, info = env.step(rng.integers(0, 4))
            lives.add(info["lives"])
            steps, over = steps + 1, terminated or truncated
    assert steps == 50  # the limit counts the agent's steps
    assert len(lives) > 1  # a life was lost on the way, and the game went on


ACROBOT = EnvConfig(id="Acrobot-v1", num_envs=16, num_workers=12)
HELPED = EnvConfig(id="Acrobot-v1", num_envs=4, num_workers=2, help_workers=True)
SKIRMISH = EnvConfig(id="Skirmish-v0", num_envs=8, num_workers=2)


@pytest.mark.parametrize(
    ("trained", "copies", "workers", "helps"),
    [
        (ACROBOT, 4, 4, False),  # no more workers than copies
        (EnvConfig(id="Acrobot-v1"), 4, "auto", False),
        (HELPED, 2, 2, False),
        (HELPED, 3, 2, True),  # this process steps the copy that is left
        (HELPED, 1, 1, False),
        (SKIRMISH.replace(help_workers=True), 4, 0, False),  # vectorised: in this process
        (SKIRMISH.replace(max_episode_steps=20), 4, 2, False),  # the vectorised form has no step limit
    ],
)
def test_evaluation_has_its_own_copies_and_workers(trained: EnvConfig, copies: int, workers: int | str, helps: bool) -> None:
    found = for_evaluation(trained, copies)
    assert (found.num_envs, found.num_workers, found.help_workers) == (copies, workers, helps)


def test_a_team_that_is_given_stays_open() -> None:
    pytest.importorskip("pettingzoo")
    from inchworm.worlds.skirmish import parallel_env

    team = parallel_env(units=("scout",), max_steps=5)
    closed = []
    team.close = lambda: closed.append(True)  # type: ignore[method-assign]
    actor = RandomActor(team.action_space(team.possible_agents[0]))
    stats = evaluate_policy(actor, team, seeds=[1, 2, 3])
    assert stats.agent_returns.shape == (3, 2)
    assert stats.lengths.tolist() == [5, 5, 5]
    assert closed == []


# ---- baselines


def small_policy(seed: int) -> NumpyPolicy:
    env = make_vector_env("CartPole-v1", 1)
    return NumpyPolicy(PolicySpec(env.observation_space, env.action_space, PolicyConfig(hidden_sizes=(8,))), seed=seed)


def test_a_baseline_plays_the_same_seeds_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = small_policy(5)
    path = str(save_policy(tmp_path / "other.safetensors", other.spec, other.get_weights()))
    config = EvalConfig(episodes=4, num_envs=2)
    expected = [evaluate_policy(small_policy(seed), "CartPole-v1", 4, num_envs=2) for seed in (3, 5)]
    with PolicyEvaluator("CartPole-v1", config.replace(baseline=path)) as evaluator:
        stats = evaluator.evaluate(small_policy(3))
        assert stats.returns.tolist() == expected[0].returns.tolist()
        assert (stats.baseline, stats.baseline_returns.tolist()) == (path, expected[1].returns.tolist())
        played: list[str] = []
        monkeypatch.setattr("inchworm.evaluate.evaluator.play_games", lambda *_, **how: played.append(str(how.get("purpose"))) or stats)
        evaluator.evaluate(small_policy(4))
        assert played == ["None"]  # the baseline's episodes are known


def test_random_is_a_baseline_and_a_missing_or_foreign_one_is_refused(tmp_path: Path) -> None:
    with PolicyEvaluator(SeedWorld, EvalConfig(episodes=3, num_envs=2, baseline="random")) as evaluator:
        stats = evaluator.evaluate(Coin())
    assert (stats.baseline, stats.difference, stats.difference_interval95) == ("random", 0.0, (0.0, 0.0))  # whatever one does
    with pytest.raises(ConfigError, match="nowhere"):
        PolicyEvaluator(SeedWorld, EvalConfig(baseline=str(tmp_path / "nowhere.safetensors")))
    policy = small_policy(1)
    path = save_policy(tmp_path / "cartpole.safetensors", policy.spec, policy.get_weights())
    with (
        PolicyEvaluator(SeedWorld, EvalConfig(baseline=str(path))) as evaluator,
        pytest.raises(SpaceError, match=r"the baseline .* was made for"),
    ):
        evaluator.evaluate(Coin())


def test_against_opponents_the_baseline_is_the_opponent() -> None:
    config = TrainingConfig(env=EnvConfig(id="Skirmish-v0"), opponent=OpponentConfig(mode="heuristic"))
    assert evaluation_opponent(config) == "heuristic"
    assert evaluation_opponent(config.replace(evaluation=EvalConfig(baseline="random"))) == "random"
    assert evaluation_opponent(TrainingConfig(evaluation=EvalConfig(baseline="random"))) is None
