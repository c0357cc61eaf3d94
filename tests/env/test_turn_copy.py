"""Turn-based PettingZoo environments: one move a step, one valid lane in each copy; workers, restoring and checks as everywhere."""

import functools

import numpy as np
import pytest

pytest.importorskip("pettingzoo")
from doubles.stepping import assert_equal_steps, continue_run, frozen, run
from doubles.turns import Stones
from inchworm import check_env
from inchworm.core.errors import EnvError
from inchworm.env.pettingzoo_copy import as_team
from inchworm.env.source import make_vector_env

GAME = functools.partial(Stones, 5, 3, out=2, seeded=True)


def steps_of(env, count):
    """Some steps in which one stone is taken each time."""
    return [frozen(env.reset()), *(frozen(env.step(np.zeros(env.num_lanes, np.int64))) for _ in range(count))]


def test_one_lane_is_valid_in_every_step_and_rewards_come_with_the_turn():
    with make_vector_env(functools.partial(Stones, 3), 1, 0) as env:
        assert env.turn_based
        steps = steps_of(env, 4)
    assert [step.valid.tolist() for step in steps] == [[True, False], [False, True], [True, False], [True, False], [False, True]]
    assert [step.rewards.tolist() for step in steps[1:]] == [[0, 0.25], [0.25, 0], [1.0, -1.0], [0, 0.25]]
    assert [step.terminated.tolist() for step in steps[1:]] == [[False] * 2, [False] * 2, [True] * 2, [False] * 2]
    # both lanes are marked when an episode begins, and the second player's again at its first turn
    assert [step.episode_starts.tolist() for step in steps] == [[True, True], [False, True], [False, False], [True, True], [False, True]]
    assert [(ended.lane, ended.info["win"], ended.info["team_return"]) for ended in steps[3].ended] == [(0, 1.0, 0.5), (1, 0.0, 0.5)]


def test_a_waiting_lane_shows_what_its_agent_saw_last():
    with make_vector_env(functools.partial(Stones, 9), 1, 0) as env:
        shown = [step.observations["observation"][:, 0].tolist() for step in steps_of(env, 3)]
    assert shown == [[9, 0], [9, 8], [7, 8], [7, 6]]


def test_a_draw_is_half_a_win_and_more_than_two_players_have_none():
    class Even(Stones):
        def step(self, action):
            super().step(action)
            self.rewards = dict.fromkeys(self.rewards, 0.0)
            self._cumulative_rewards = dict.fromkeys(self._cumulative_rewards, 0.0)

    with make_vector_env(functools.partial(Even, 1), 1, 0) as env:
        assert [ended.info["win"] for ended in steps_of(env, 1)[1].ended] == [0.5, 0.5]
    with make_vector_env(functools.partial(Stones, 1, 3), 1, 0) as env:
        assert [set(ended.info) for ended in steps_of(env, 1)[1].ended] == [{"team_return"}] * 3


def test_a_limit_truncates_every_agent_at_what_it_sees_then():
    with make_vector_env(lambda: as_team(Stones(9), 3), 1, 0) as env:
        step = steps_of(env, 3)[-1]
    assert step.truncated.tolist() == [True, True]
    assert not step.terminated.any()
    assert [ended.final_observation["observation"].tolist() for ended in step.ended] == [[6, 9, 0], [6, 9, 1]]
    assert [ended.valid for ended in step.ended] == [True, True]


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(workers):
    with make_vector_env(GAME, 3, 0, seed=3) as env, make_vector_env(GAME, 3, workers, seed=3) as other:
        assert other.turn_based
        assert_equal_steps(run(env, 40), run(other, 40))


def test_copies_are_restored_in_the_middle_of_a_game():
    with make_vector_env(GAME, 2, 0, seed=3) as env, make_vector_env(GAME, 2, 0, seed=9) as other:
        run(env, 12)
        other.load_state_dict(env.state_dict())
        assert not other.inexact
        assert_equal_steps(continue_run(env, 25), continue_run(other, 25))


def test_the_checker_says_that_agents_take_turns():
    report = check_env(GAME)
    assert report.ok, report
    assert "agents take turns: a lane is valid when its agent moves" in report.notes


def test_what_is_not_possible_is_refused_in_one_line():
    with pytest.raises(EnvError, match=r"take turns, which a central critic does not support; set policy\.central_critic=false"):
        make_vector_env(GAME, 1, 0, global_state=True)

    class Stays(Stones):
        def _was_dead_step(self, action):
            pass

    with make_vector_env(functools.partial(Stays, 1), 1, 0) as env, pytest.raises(EnvError, match=r"must remove it from env\.agents"):
        steps_of(env, 1)

    class NotFinite(Stones):
        def step(self, action):
            super().step(action)
            self._cumulative_rewards = dict.fromkeys(self._cumulative_rewards, np.nan)

    with (
        make_vector_env(functools.partial(NotFinite, 9), 1, 0) as env,
        pytest.raises(EnvError, match=r"'player_1' \(lane 1\).*reward is nan"),
    ):
        steps_of(env, 1)
