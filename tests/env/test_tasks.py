"""Tasks are reset options, and a trial is some episodes of one task as one episode."""

import gymnasium as gym
import numpy as np
import pytest

from inchworm import Task, TaskList, TrialEnv, make_vector_env
from inchworm.core.errors import ConfigError
from inchworm.env.check import check_env
from inchworm.worlds.symbolic import SymbolicDiscovery
from inchworm.worlds.tasks import PhysicsCartPole, PointWorld, point_goals


def test_a_list_of_tasks_draws_its_tasks_and_none_that_is_held_out() -> None:
    tasks = TaskList([Task("a"), Task("b")], [Task("c")])
    rng = np.random.default_rng(0)
    assert {tasks.sample(rng).name for _ in range(50)} == {"a", "b"}
    assert [task.name for task in tasks.held_out()] == ["c"]
    with pytest.raises(ConfigError, match="two tasks have the name 'a'"):
        TaskList([Task("a")], [Task("a")])
    with pytest.raises(ConfigError, match="one task or more"):
        TaskList([])
    for wrong in ("b", Task("b", [1.0])):
        with pytest.raises(ConfigError, match=r"a task is a Task\(name, options\) with a mapping of reset options, not ('b'|Task)"):
            TaskList([Task("a")], [wrong])


def test_a_trial_is_some_episodes_of_one_task_with_the_last_action_and_reward() -> None:
    env = TrialEnv(PointWorld(), episodes=2)
    seen, _ = env.reset(seed=0, options={"goal_x": 0.0, "goal_y": 1.0})
    assert {name: np.asarray(value).tolist() for name, value in seen.items()} == {
        "observation": [0.0, 0.0], "action": [0.0, 0.0], "reward": [0.0], "ended": [1.0],
    }  # fmt: skip
    up = np.array([0.0, 1.0], np.float32)
    rewards, ends, shown = [], [], []
    for _ in range(32):
        seen, reward, terminated, truncated, info = env.step(up)
        rewards.append(reward)
        ends.append((terminated, truncated, float(seen["ended"][0])))
        shown.append(seen)
    assert rewards[:4] == [-0.75, -0.5, -0.25, 0.0]
    assert [place for place, (_, _, ended) in enumerate(ends) if ended] == [15, 31]
    assert ends[-1] == (True, False, 1.0)
    assert shown[15]["observation"].tolist() == [0.0, 0.0], "the next inner episode has begun"
    assert (shown[15]["reward"].tolist(), shown[15]["action"].tolist()) == ([-3.0], [0.0, 1.0])  # at y = 4, 3 above the goal
    # 0.25 (3 + 2 + 1) on the way there, and 0.25 (1 + 2 + … + 12) behind it
    assert info == {"return_0": -21.0, "return_1": -21.0}


def test_the_task_of_a_trial_is_drawn_by_its_seed_and_lasts_for_it() -> None:
    env, goals = TrialEnv(PointWorld(), episodes=3, tasks=point_goals()), set()
    for seed in (*range(12), 3):
        env.reset(seed=seed)
        first = tuple(env.unwrapped.goal)
        for _ in range(40):
            env.step(np.zeros(2, np.float32))
        assert tuple(env.unwrapped.goal) == first
        goals.add(first)
    assert 5 < len(goals) <= 12


def test_masks_stay_at_the_top_and_other_actions_are_refused() -> None:
    env = TrialEnv(SymbolicDiscovery("lorentz_factor", max_length=3), episodes=2)
    seen, _ = env.reset(seed=0)
    assert set(seen) == {"observation", "action", "reward", "ended", "action_mask"}
    assert env.observation_space.contains(seen)
    assert check_env(lambda: TrialEnv(PhysicsCartPole(), episodes=2)).ok
    with pytest.raises(ConfigError, match="must be Discrete or a Box"):
        TrialEnv(gym.wrappers.TransformAction(PointWorld(), lambda action: action, gym.spaces.MultiBinary(2)))
    with pytest.raises(ConfigError, match="a trial has 1 episode or more"):
        TrialEnv(PointWorld(), episodes=0)


def test_trials_are_replayed_exactly() -> None:
    make = lambda: make_vector_env(lambda: TrialEnv(PointWorld(), episodes=3, tasks=point_goals()), num_envs=2)  # noqa: E731
    with make() as env, make() as other:
        env.reset()
        action = np.full((2, 2), 0.5, np.float32)
        for _ in range(20):
            env.step(action)
        other.load_state_dict(env.state_dict())
        assert other.exact
        for _ in range(30):
            one, two = env.step(action), other.step(action)
            np.testing.assert_array_equal(one.rewards, two.rewards)
            np.testing.assert_array_equal(one.observations["observation"], two.observations["observation"])
