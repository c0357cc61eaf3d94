"""Rollouts of teams: invalid rows are not counted, cuts are the true successors, and credit flows past a death with a global state."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("pettingzoo")
from doubles.stepping import assert_equal_rollouts
from inchworm.backends.numpy.gae import compute_advantages
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.collect.collector import RolloutCollector
from inchworm.collect.opponents import OpponentVectorEnv, RandomActor
from inchworm.config.sections import PolicyConfig, PPOConfig
from inchworm.core.errors import BadNumberError
from inchworm.core.types import PolicyStep
from inchworm.env.source import make_vector_env
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.rollout import Rollout
from inchworm.worlds.toys import DEATHS, JOINS, Comings


class Memory:
    """An actor that does nothing, and counts the observations it has read since the last start."""

    def initial_state(self, num_lanes: int) -> np.ndarray:
        return np.zeros((num_lanes, 1), np.float32)

    def act(self, observations: Any, state: Any, episode_starts: Any, rng: Any, *, deterministic: bool = False) -> PolicyStep:
        lanes = len(episode_starts)
        actions = np.zeros(lanes, np.int64)
        return PolicyStep(actions, actions, np.zeros(lanes, np.float32), np.where(episode_starts[:, None], 0, state) + np.float32(1))


def collected(plan: Any, steps: int, *, copies: int = 1, global_state: bool = False, **kwargs: Any) -> tuple[Rollout, RolloutCollector]:
    collector = RolloutCollector(make_vector_env(lambda: Comings(plan, **kwargs), copies, global_state=global_state), Memory())
    rollout = collector.collect(steps)
    rollout.validate()
    return rollout, collector


def test_rows_after_a_death_are_invalid_and_not_counted():
    """Two copies of three agents in 8 steps; the second dies after 2 of 6: 2 x (6 x 3 - 4 + 2 x 3) = 40 valid steps."""
    rollout, collector = collected(DEATHS, 8, copies=2)
    row = [1, 1, 1]
    assert rollout.valid[:, :3].astype(int).tolist() == [row, row, *[[1, 0, 1]] * 4, row, row]
    assert rollout.num_valid == collector.env_steps == 40
    assert rollout.terminated[:, 1].astype(int).tolist() == [0, 1, 0, 0, 0, 1, 0, 1]
    records = {record.lane: record for record in rollout.episodes}
    # 1 + … + 6 = 21 | 11 + 12 = 23 | 21 + … + 26 = 141; lengths count valid steps
    assert [(records[lane].episode_return, records[lane].length) for lane in range(3)] == [(21, 6), (23, 2), (141, 6)]
    assert {record.info["team_return"] for record in rollout.episodes} == {185}
    assert collector.episodes == 6


def test_cuts_are_true_successors_also_of_agents_that_left():
    """The third leaves after 1 step, truncated; the second joins after 2; the third is back after 3, dies after 4; 5 steps in all."""
    rollout, _ = collected(JOINS, 4)
    assert rollout.valid.astype(int).tolist() == [[1, 0, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert rollout.episode_starts.astype(int).tolist() == [[1, 1, 1], [0, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert rollout.truncated.astype(int).tolist() == [[0, 0, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert rollout.terminated.astype(int).tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 1]]  # its death, in the last row
    assert rollout.cut_rows.tolist() == [[0, 2], [3, 0], [3, 1], [3, 2]]
    assert rollout.cut_observations[:, :2].tolist() == [[2, 1], [0, 4], [1, 4], [2, 4]]  # (place, steps taken) where they got to
    assert rollout.cut_state[:, 0].tolist() == [1, 4, 2, 1]  # observations read since the agent joined
    assert rollout.episodes == ()


def test_an_agent_that_never_joined_has_no_record():
    rollout, collector = collected([[(0, 2, "terminated")], [(9, 10, "terminated")]], 4)
    assert [(record.lane, record.length) for record in rollout.episodes] == [(0, 2), (0, 2)]
    assert collector.env_steps == 4


def test_the_global_state_and_its_successors():
    """6 steps in a game, 8 in the rollout: the game is cut off after row 5; the rollout ends 2 steps into the next."""
    rollout, _ = collected(DEATHS, 8, copies=2, global_state=True, pension=0.5)
    assert rollout.global_state.shape == (8, 2, 3)
    assert rollout.lanes_per_copy == 3
    assert rollout.global_state[:, 0, :2].tolist() == [[0, 3], [1, 3], [2, 2], [3, 2], [4, 2], [5, 2], [0, 3], [1, 3]]
    assert not rollout.terminated.any()
    assert np.argwhere(rollout.truncated).tolist() == [[5, lane] for lane in range(6)]
    assert rollout.cut_rows.tolist() == [[5, lane] for lane in range(6)] + [[7, lane] for lane in range(6)]
    assert rollout.cut_global_state[:, :2].tolist() == [[6, 0]] * 6 + [[2, 2]] * 6
    luck = rollout.cut_global_state[6:, 2]
    assert luck[0] == luck[1] == luck[2] != luck[3] == luck[4] == luck[5]  # each lane has its own copy's
    assert rollout.rewards[:, 1].tolist() == [11, 12, 0.5, 0.5, 0.5, 0.5, 11, 12]


@pytest.mark.parametrize("plan", [DEATHS, JOINS])
@pytest.mark.parametrize("global_state", [False, True])
def test_resuming_anywhere_changes_no_bit(plan: Any, global_state: bool):
    """Also where an agent has just joined, is dead, or has rejoined: memory, returns and lengths are restored."""

    def fresh() -> RolloutCollector:
        env = make_vector_env(lambda: Comings(plan, pension=0.25), 2, global_state=global_state, seed=4)
        return RolloutCollector(env, Memory(), seed=1)

    for stop in range(1, 8):
        straight, stopped, resumed = fresh(), fresh(), fresh()
        straight.collect(stop)
        stopped.collect(stop)
        resumed.load_state_dict(stopped.state_dict())
        assert_equal_rollouts(straight.collect(9), resumed.collect(9))
        assert (straight.env_steps, straight.episodes) == (resumed.env_steps, resumed.episodes)


@pytest.mark.parametrize("lane", [0, 1, 2])
def test_one_agent_of_each_copy_leaves_and_joins_among_opponents(lane: int):
    """The copies have three lanes, of which we see one: it leaves and joins as in the whole environment."""
    plan = [[(0, 4, "terminated")], [(1, 2, "truncated"), (3, 4, "truncated")], [(0, 1, "truncated"), (2, 3, "terminated")]]

    def alone() -> RolloutCollector:
        env = make_vector_env(lambda: Comings(plan, pension=0.25), 2, seed=4)
        return RolloutCollector(OpponentVectorEnv(env, RandomActor(env.action_space), [lane, 3 + lane]), Memory(), seed=1)

    whole, _ = collected(plan, 11, copies=2, pension=0.25)
    straight, steps = alone(), [1, 3, 2, 5]
    parts = [straight.collect(count) for count in steps]
    for name in ("valid", "terminated", "truncated", "episode_starts", "rewards"):
        assert np.array_equal(np.concatenate([part[name] for part in parts]), whole[name][:, [lane, 3 + lane]]), name
    for stop in range(1, 9):  # an agent that joined in the last step has not begun a new episode: its return stays
        stopped, resumed = alone(), alone()
        stopped.collect(stop)
        resumed.load_state_dict(stopped.state_dict())
        one, two = stopped.collect(9), resumed.collect(9)
        assert one.episodes == two.episodes
        assert np.array_equal(one.cut_observations, two.cut_observations)


def test_a_team_of_one_agent_is_an_ordinary_lane():
    rollout, collector = collected([[(0, 3, "truncated")]], 7, copies=2)
    assert rollout.rewards[:, 0].tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert rollout.truncated[:, 1].tolist() == [False, False, True] * 2 + [False]
    assert rollout.cut_observations[:, 1].tolist() == [3, 3, 3, 3, 1, 1]  # steps taken where the rows led to
    assert collector.env_steps == 14


def test_cut_valid_tells_whether_the_successor_has_an_agent():
    """Two games of 3 steps, cut off: the second agent dies in the step of the cut, the third before it; the fourth lives on."""
    plan = [[(0, 3, "truncated")], [(0, 3, "terminated")], [(0, 2, "terminated")], [(0, 3, "truncated")]]
    rollout, _ = collected(plan, 5, global_state=True)
    assert rollout.cut_rows.tolist() == [[2, 0], [2, 1], [2, 2], [2, 3], [4, 0], [4, 1], [4, 2], [4, 3]]
    # At the cut the second has died as the third before; in the last row, the second of its game, the third dies.
    assert rollout.cut_valid.tolist() == [True, False, False, True, True, True, False, True]
    alone, _ = collected(plan, 5)
    assert alone.cut_rows.tolist() == [[2, 0], [2, 3], [4, 0], [4, 1], [4, 2], [4, 3]]  # nothing follows for the dead
    assert alone.cut_valid.tolist() == [True, True, True, True, False, True]


@pytest.mark.parametrize("seen", [None, [1, 3]])
def test_a_central_critic_values_a_successor_as_the_row_that_it_becomes(seen: list[int] | None):
    """Wherever rollouts are cut: where agents die, join, or are away, their memories with them."""
    plan = [[(0, 6, "truncated")], [(0, 2, "terminated"), (3, 5, "truncated")]]

    def fresh() -> tuple[RolloutCollector, NumpyPolicy]:
        env: Any = make_vector_env(lambda: Comings(plan, pension=0.5), 2, global_state=True, seed=3)
        env = env if seen is None else OpponentVectorEnv(env, RandomActor(env.action_space), seen)
        config = PolicyConfig(kind="gru", hidden_sizes=(5,), memory_size=4, central_critic=True)
        policy = NumpyPolicy(
            PolicySpec(env.observation_space, env.action_space, config, env.global_state_space, env.lanes_per_copy), seed=1
        )
        return RolloutCollector(env, policy, seed=5), policy

    ppo = PPOConfig(sequence_length=1)
    (straight, policy), (parted, _) = fresh(), fresh()
    whole = compute_advantages(policy, straight.collect(14), ppo)
    row = 0
    for count in (1, 2, 3, 1, 4, 2):
        part = parted.collect(count)
        found = compute_advantages(policy, part, ppo)
        np.testing.assert_allclose(found.values, whole.values[row : row + count], rtol=1e-5, atol=1e-6)
        continues = ~part.terminated
        np.testing.assert_allclose(found.next_values[continues], whole.next_values[row : row + count][continues], rtol=1e-5, atol=1e-6)
        row += count


@pytest.mark.parametrize(("at", "what"), [(3, "the global state"), (6, "the final global state")])
def test_a_global_state_that_is_not_finite_stops_the_run(at: int, what: str):
    class Bad(Comings):
        def state(self):
            return super().state() + np.array([0, np.inf if self._now == at else 0, 0], np.float32)

    collector = RolloutCollector(make_vector_env(Bad, 2, global_state=True), Memory())
    with pytest.raises(BadNumberError, match=f"{what} of lane 0 is not finite"):
        collector.collect(8)
