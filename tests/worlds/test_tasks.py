"""Environments whose reset options are tasks: what the options change, and that held-out tasks are others."""

import math

import numpy as np
import pytest

from inchworm.env.check import check_env
from inchworm.worlds.tasks import PhysicsCartPole, PointWorld, cartpole_tasks, point_goals


@pytest.mark.parametrize("make", [PhysicsCartPole, PointWorld])
def test_they_are_ready_for_training(make) -> None:
    assert check_env(make).ok


def test_the_physics_of_the_pole_are_those_of_the_options() -> None:
    """The cart's acceleration at an upright pole is about 10 / (masspole + masscart), and a negative force pushes the other way."""
    velocities = {}
    for name, options in {"usual": None, "heavy": {"masscart": 3.9}, "reversed": {"force": -10.0}, "long": {"length": 2.0}}.items():
        env = PhysicsCartPole()
        env.reset(seed=1, options=options)
        before = env._world.state[1]
        velocities[name] = env.step(1)[0][1] - before
    assert velocities["usual"] == pytest.approx(0.02 * 10 / 1.1, rel=0.1)
    assert velocities["heavy"] == pytest.approx(0.02 * 10 / 4.0, rel=0.1)
    assert velocities["reversed"] == pytest.approx(-0.02 * 10 / 1.1, rel=0.1)
    env = PhysicsCartPole(limit=3)
    env.reset(seed=0)
    assert [env.step(t % 2)[3] for t in range(3)] == [False, False, True]
    env.reset(seed=1)
    assert (env._world.length, env._world.force_mag) == (0.5, 10.0), "options hold for one episode"


def test_the_reward_of_the_point_is_minus_its_distance_to_the_goal() -> None:
    env = PointWorld()
    env.reset(options={"goal_x": 3.0, "goal_y": 4.0})
    observation, reward, *_ = env.step(np.array([1.0, -5.0], np.float32))  # clipped to -1
    assert observation.tolist() == [0.25, -0.25]
    assert reward == pytest.approx(-math.hypot(2.75, 4.25))


@pytest.mark.parametrize("tasks", [cartpole_tasks(8, 4), point_goals(8, 4)])
def test_held_out_tasks_are_others(tasks) -> None:
    trained = [dict(task.options) for task in tasks.tasks]
    assert len(trained) == 8
    assert len(tasks.held_out()) == 4
    assert all(dict(task.options) not in trained for task in tasks.held_out())


def test_a_task_that_the_environment_does_not_know_is_one_line() -> None:
    for env, options, words in (
        (PhysicsCartPole(), {"lenght": 1.0}, "PhysicsCartPole does not know the option 'lenght'; a task sets length, masscart, force"),
        (PhysicsCartPole(), {"length": -1.0}, "length and masscart must be above 0"),
        (PointWorld(), {"goal_x": "far"}, "the option goal_x='far' of PointWorld is not a number"),
        (PointWorld(), {"goal_x": math.nan}, "is not a number"),
    ):
        with pytest.raises(ValueError, match=words):
            env.reset(options=options)
