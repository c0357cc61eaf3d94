"""The maze has one way between any two cells, one reward, and starts that are as far from the goal as the difficulty says."""

import numpy as np
import pytest

from inchworm.env.check import check_env
from inchworm.worlds.toys import Maze


def test_the_maze_is_a_tree_and_its_reward_is_at_the_goal() -> None:
    env = Maze(5, layout=3)
    assert sum(map(len, env.open.values())) == 2 * (25 - 1), "25 cells joined by 24 passages, each open from both sides"
    assert len(env.distances) == 25
    env.reset(seed=0)
    rewards, over = [], False
    while not over:  # down the distances
        moves = [(move, (env.cell[0] + move[0], env.cell[1] + move[1])) for move in env.open[env.cell]]
        (action,) = [
            ((-1, 0), (0, 1), (1, 0), (0, -1)).index(move) for move, cell in moves if env.distances[cell] < env.distances[env.cell]
        ]
        _, reward, over, cut, info = env.step(action)
        rewards.append(reward)
    assert rewards == [0.0] * (len(rewards) - 1) + [1.0]
    assert (cut, info) == (False, {"is_success": 1.0})
    assert check_env(lambda: Maze(5)).ok


def test_an_episode_without_the_goal_is_cut_off() -> None:
    env = Maze(3)
    env.reset(seed=0)
    wall = next(place for place, move in enumerate(((-1, 0), (0, 1), (1, 0), (0, -1))) if move not in env.open[env.cell])
    steps = [env.step(wall) for _ in range(3 * env.longest)]
    assert [step[3] for step in steps] == [False] * (len(steps) - 1) + [True]
    assert steps[-1][4] == {"is_success": 0.0}
    observation = steps[-1][0]
    assert (observation[:3].sum(), observation[3:6].sum(), observation[6 + wall]) == (1.0, 1.0, 0.0)


@pytest.mark.parametrize("level", [1, 2, 3, 4, None])
def test_the_difficulty_is_the_distance_of_the_start(level: int | None) -> None:
    env = Maze(6, levels=4)
    options = {} if level is None else {"difficulty": level}
    ways = set()
    for seed in range(300):
        env.reset(seed=seed, options=options)
        ways.add(env.distances[env.cell])
    least, most = ((level or 4) - 2) * env.longest / 4, (level or 4) * env.longest / 4
    possible = {way for way in env.distances.values() if max(0, least) < way <= most}
    assert ways == possible, "all of them, and no others"


def test_a_difficulty_that_there_is_not_is_one_line() -> None:
    env = Maze(3, levels=4)
    env.set_difficulty(2)
    assert (env.level, env.observation_space.dtype) == (2, np.float32)
    for wrong in (0, 5, 1.5, "hard", True):
        with pytest.raises(ValueError, match="whole number from 1 to 4, not"):
            env.set_difficulty(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not 9"):
        env.reset(options={"difficulty": 9})
    with pytest.raises(ValueError, match="size=1"):
        Maze(1)
