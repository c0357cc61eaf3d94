"""Evaluation where a copy has several lanes: an episode is the game of a copy, its return the team's."""

import math
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec

from doubles.duel import WIDTH, DuelVectorEnv, Plays, length_of
from doubles.toys import Counter
from inchworm.config.sections import EnvConfig, EvalConfig
from inchworm.core.errors import BadNumberError
from inchworm.core.seeding import episode_seed
from inchworm.evaluate import games
from inchworm.evaluate.evaluator import PolicyEvaluator, evaluate_policy, play_match
from inchworm.evaluate.games import mean_info


def test_an_episode_is_a_game_of_a_copy() -> None:
    # Everybody plays 3. Seed s has n = s % 3 + 2 steps: agents 0 and 2 are paid 3 n each, agents 1 and 3 only 3, for they die.
    seeds = [4, 8, 3, 7, 5]  # 3, 4, 2, 3, 4 steps
    env = DuelVectorEnv(2)
    stats = evaluate_policy(Plays(3), env, seeds=seeds)
    lengths = [length_of(seed) for seed in seeds]
    assert lengths == [3, 4, 2, 3, 4]
    assert stats.lengths.tolist() == lengths
    assert stats.agent_returns.tolist() == [[3 * n, 3, 3 * n, 3] for n in lengths]
    assert stats.returns.tolist() == [6 * n + 6 for n in lengths]
    assert stats.seeds.tolist() == seeds
    # numbers of infos are means over the lanes: own (3 n + 3 + 3 n + 3) / 4, sides (0 + 0 + 1 + 1) / 4, and equal teams draw
    assert stats.infos["own"].tolist() == [1.5 * n + 1.5 for n in lengths]
    assert stats.infos["side"].tolist() == stats.infos["win"].tolist() == [0.5] * 5
    # seeds go to copies, not to lanes: copy 0 has games 0, 2, 4, copy 1 has 1 and 3; nothing is reset after a copy's last game
    assert [one for one in env.begun if one[0] == 0] == [(0, 4), (0, 3), (0, 5)]
    assert [one for one in env.begun if one[0] == 1] == [(1, 8), (1, 7)]


def test_copies_have_the_seeds_that_single_lanes_have() -> None:
    with PolicyEvaluator(DuelVectorEnv(3), EvalConfig(seed=5)) as evaluator:
        stats = evaluator.evaluate(Plays(1), 7)
    assert stats.seeds.tolist() == [episode_seed(5, index % 3, index // 3) for index in range(7)]


def test_a_copy_without_a_game_idles_and_is_not_counted() -> None:
    env = DuelVectorEnv(4)
    stats = evaluate_policy(Plays(2), env, seeds=[5])  # one game, four copies: three have a fixed seed of their own
    assert stats.lengths.tolist() == [4]
    assert [copy for copy, _ in env.begun] == [0, 1, 2, 3]


def test_the_mean_of_equal_numbers_is_that_number() -> None:
    # (0.1 + 0.1 + 0.1) / 3 is 0.10000000000000002 in floats
    assert mean_info([{"x": 0.1}] * 3) == {"x": 0.1}
    assert mean_info([{"x": 1.0, "y": 3.0}, {"x": 2.0}]) == {"x": 1.5, "y": 3.0}
    assert math.isnan(mean_info([{"x": math.nan}, {"x": 1.0}])["x"])


def test_a_bad_return_names_the_lane() -> None:
    class Broken(DuelVectorEnv):
        def recv(self):  # type: ignore[no-untyped-def]
            step = super().recv()
            rewards = step.rewards.copy()
            rewards[WIDTH + 2] = np.inf
            return replace(step, rewards=rewards)

    with pytest.raises(BadNumberError, match=r"episode 1 \(lane 6, seed 8\) is inf"):
        evaluate_policy(Plays(2), Broken(2), seeds=[5, 8])


# ---- episodes that do not end


class Endless(Counter):
    """Never ends; pays its action, 0 or 1, at each step. An episode whose seed is even ends after three steps, with success."""

    def _observe(self) -> np.ndarray:
        return super()._observe()[::-1]  # (step, seed)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.length = 10**9 if self.episode % 2 else 3
        observation, _, over, _, _ = super().step(action)
        return observation, float(action), over, False, {"is_success": True} if over else {}


class EndlessDuel(DuelVectorEnv):
    """A duel whose games with odd seeds do not end."""

    def _end(self, copy: int) -> Any:
        return [] if self.seeds[copy] % 2 else super()._end(copy)


def test_an_episode_that_reaches_the_cap_is_cut_off_and_counted() -> None:
    # seeds 2 and 8 end after 3 steps; 1, 3 and 5 are cut off after 7. Every step pays 1.
    stats = evaluate_policy(Plays(1), Endless, seeds=[2, 1, 3, 8, 5], num_envs=2, max_episode_steps=7)
    assert stats.lengths.tolist() == stats.returns.tolist() == [3, 7, 7, 3, 7]
    assert stats.capped.tolist() == [False, True, True, False, True]
    assert stats.capped_episodes == 3
    assert stats.success_rate == 2 / 5  # an episode that was cut off is not a success
    assert str(stats).endswith("3 of 5 episodes capped at 7 steps")
    assert stats.to_dict()["capped_episodes"] == stats.metrics()["capped_episodes"] == 3
    assert stats.to_dict()["capped"] == stats.capped.tolist()


def test_an_episode_that_ends_at_the_cap_is_not_capped() -> None:
    stats = evaluate_policy(Plays(1), Endless, seeds=[2, 4], max_episode_steps=3)
    assert (stats.lengths.tolist(), stats.capped_episodes) == ([3, 3], 0)
    assert "capped" not in str(stats)
    assert "capped_episodes" not in stats.metrics()


def test_a_game_of_teams_that_reaches_the_cap_is_a_draw() -> None:
    # Games of seeds 4 and 8 have 3 and 4 steps, in which everybody plays 3 and draws; those of 5 and 7 are cut off after 6.
    stats = evaluate_policy(Plays(3), EndlessDuel(2), seeds=[4, 5, 7, 8], max_episode_steps=6)
    assert stats.lengths.tolist() == [3, 6, 6, 4]
    assert stats.agent_returns[1].tolist() == [18, 3, 18, 3]
    assert stats.infos["win"].tolist() == [0.5] * 4
    match = play_match(Plays(3), Plays(1), EndlessDuel(2), seeds=[4, 5], max_episode_steps=6)
    assert (match.wins, match.draws, match.losses, match.capped_episodes) == (2, 2, 0, 2)
    assert str(match).endswith("2 of 4 episodes capped at 6 steps")


def test_the_cap_is_by_default_the_registered_limit_and_else_a_large_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(games, "EPISODE_LIMIT", 9)
    registered = Endless()
    registered.spec = EnvSpec("Endless-v0", max_episode_steps=20)  # and no TimeLimit around it
    assert evaluate_policy(Plays(1), registered, seeds=[1]).lengths.tolist() == [20]
    assert evaluate_policy(Plays(1), Endless, seeds=[1]).lengths.tolist() == [9]
    assert evaluate_policy(Plays(1), EndlessDuel(2), seeds=[1]).lengths.tolist() == [9]
    with PolicyEvaluator(Endless, EvalConfig(episodes=3, num_envs=2, max_episode_steps=5)) as evaluator:
        assert evaluator.evaluate(Plays(1), seeds=[1, 3, 5]).lengths.tolist() == [5, 5, 5]
        suites = evaluator.evaluate_suites(Plays(1), {"endless": [Endless]})
    assert suites.groups["endless"]["Endless"].stats.lengths.max() == 5


def test_the_cap_of_a_config_is_the_environments_own_limit() -> None:
    assert games.episode_limit(EnvConfig(id="CartPole-v1"), None) == 500
    assert games.episode_limit(EnvConfig(id="CartPole-v1", max_episode_steps=70), None) == 70
    assert games.episode_limit("CartPole-v1", 30) == 30
    assert games.episode_limit(Endless, None) == games.EPISODE_LIMIT == 100_000
    assert games.episode_limit(gym.make_vec("CartPole-v1", 2), None) == 500
