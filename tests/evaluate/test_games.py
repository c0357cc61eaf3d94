"""Evaluation where a copy has several lanes: an episode is the game of a copy, its return the team's."""

import math
from dataclasses import replace

import numpy as np
import pytest

from doubles.duel import WIDTH, DuelVectorEnv, Plays, length_of
from inchworm.config.sections import EvalConfig
from inchworm.core.errors import BadNumberError
from inchworm.core.seeding import episode_seed
from inchworm.evaluate.evaluator import PolicyEvaluator, evaluate_policy
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
