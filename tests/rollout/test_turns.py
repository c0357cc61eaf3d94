"""Rows of all moves become rows of each lane's own moves: every number by hand, in a game of stones whose players always take one."""

import functools

import numpy as np
import pytest

pytest.importorskip("pettingzoo")
from doubles.turns import Stones, TakesOne
from inchworm.collect.collector import RolloutCollector
from inchworm.env.source import make_vector_env
from inchworm.rollout.buffer import hold_memory
from inchworm.rollout.rollout import Rollout


def collected(pile: int, moves: int, *, players: int = 2, out: int = 0, before: int = 0) -> Rollout:
    with make_vector_env(functools.partial(Stones, pile, players, out=out), 1, 0) as env:
        collector = RolloutCollector(env, TakesOne())
        if before:
            collector.collect(before)
        rollout = collector.collect(moves)
        rollout.validate(env.observation_space, env.action_space)
        return rollout


def left(rollout: Rollout, lane: int) -> list[float]:
    """The stones that the lane's agent saw at each of its turns."""
    return rollout.observations["observation"][rollout.valid[:, lane], lane, 0].tolist()


def test_each_lane_has_its_own_moves_with_the_rewards_until_its_next_turn():
    # 4 stones: 0 takes, 1 takes, 0 takes, 1 takes the last. Two games in 8 moves; the moves 9 and 10 have no known result.
    rollout = collected(4, 10)
    assert rollout.rewards.T.tolist() == [[0.25, -1.0, 0.25, -1.0], [0.25, 1.0, 0.25, 1.0]]
    assert rollout.terminated.T.tolist() == [[False, True, False, True]] * 2
    assert not rollout.truncated.any()
    assert rollout.valid.all()
    assert left(rollout, 0) == [4, 2, 4, 2]
    assert left(rollout, 1) == [3, 1, 3, 1]
    assert rollout.episode_starts.T.tolist() == [[True, False, True, False]] * 2  # the second player's episode begins with its first turn


def test_a_move_without_a_known_result_is_left_out_and_what_was_seen_then_follows_the_move_before():
    # 9 stones, 7 moves: player 0 moves in rows 0, 2, 4, 6, player 1 in rows 1, 3, 5. The last of each has no result yet.
    rollout = collected(9, 7)
    assert left(rollout, 0) == [9, 7, 5]
    assert left(rollout, 1) == [8, 6]
    assert rollout.valid.T.tolist() == [[True, True, True], [True, True, False]]
    assert rollout.rewards.T.tolist() == [[0.25, 0.25, 0.25], [0.25, 0.25, 0.0]]
    assert rollout.truncated.T.tolist() == [[False] * 3, [False, True, False]]  # cut off before its padding
    assert rollout.cut_rows.tolist() == [[1, 1], [2, 0], [2, 1]]
    assert rollout.cut_observations["observation"][:2, 0].tolist() == [4, 3]  # what each saw at its next turn
    assert rollout.cut_valid.tolist() == [True, True, False]


def test_the_next_rollout_continues_the_games():
    # 9 stones, 4 moves before: player 0 sees 5, 3, 1 and takes the last one; then a game of 9 begins again.
    rollout = collected(9, 7, before=4)
    assert left(rollout, 0) == [5, 3, 1]
    assert left(rollout, 1) == [4, 2]
    assert rollout.rewards[rollout.valid[:, 0], 0].tolist() == [0.25, 0.25, 1.0]
    assert rollout.rewards[rollout.valid[:, 1], 1].tolist() == [0.25, -1.0]  # its loss came after its last move
    assert not rollout.episode_starts.any()
    assert rollout.terminated[2, 0]
    assert rollout.terminated[1, 1]


def test_an_agent_that_is_eliminated_gets_its_last_reward_and_no_rows_until_the_next_game():
    # 7 stones, three players; at 3 the last one is out. 0: 7->6, 1: 6->5, 2: 5->4, 0: 4->3 and 2 is out, 1: 3->2, 0: 2->1, 1: 1->0.
    rollout = collected(7, 9, players=3, out=3)
    assert left(rollout, 0) == [7, 4, 2]
    assert left(rollout, 1) == [6, 3, 1]
    assert left(rollout, 2) == [5]
    assert rollout.rewards[0, 2] == -2.0  # and not the toll or the loss of a game that went on without it
    assert rollout.terminated[0, 2]
    assert rollout.rewards[:, 0].tolist() == [0.5, 0.25, -1.0]
    assert rollout.rewards[:, 1].tolist() == [0.5, 0.25, 1.0]
    assert [(e.lane, e.length, e.episode_return) for e in rollout.episodes] == [(0, 3, -0.25), (1, 3, 2.0), (2, 1, -1.5)]


def test_too_few_moves_for_a_result_give_one_invalid_row():
    rollout = collected(9, 1)
    assert rollout.valid.tolist() == [[False, False]]


def test_the_memory_of_who_waits_is_held():
    before, after = np.zeros((3, 2)), np.ones((3, 2))
    held = hold_memory({"h": after}, {"h": before}, np.array([True, False, True]))
    assert held["h"].tolist() == [[1, 1], [0, 0], [1, 1]]
    assert hold_memory((), (), np.array([True])) == ()
