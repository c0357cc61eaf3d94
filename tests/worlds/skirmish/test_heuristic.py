"""The hand-written player: legal, better with more skill, far better than chance."""

import numpy as np
import pytest

from doubles.skirmish import BLUE, EAST, LEFT, NORTH, RED, RIGHT, WEST, Arena, play
from inchworm.core.errors import ConfigError
from inchworm.worlds.skirmish import HeuristicPolicy, SkirmishConfig, SkirmishVectorEnv
from inchworm.worlds.skirmish.state import MOVES, TURNS


def win_rate(games: list[dict[str, float]]) -> float:
    return float(np.mean([game["win"] for game in games]))


def decide(arena: Arena, team: int = BLUE, unit: int = 0) -> list[int]:
    """What the player does with one unit."""
    seen = {
        "observation": arena.state.observations[:, team, unit, 0][None],
        "action_mask": arena.state.mask[:, team, unit, 0][None].astype(np.int8),
    }
    step = HeuristicPolicy(arena.config).act(seen, (), np.zeros(1, bool), np.random.default_rng(0))
    return step.env_actions[0].tolist()


@pytest.mark.parametrize(("better", "worse"), [(0.4, 0.0), (0.7, 0.4), (1.0, 0.7)])
def test_more_skill_wins(better: float, worse: float) -> None:
    """On either side; chance would give 0.5 with a standard error of 0.05."""
    assert win_rate(play(HeuristicPolicy(skill=better), HeuristicPolicy(skill=worse), 100)) >= 0.75
    assert win_rate(play(HeuristicPolicy(skill=worse), HeuristicPolicy(skill=better), 100, seed=1)) <= 0.25


@pytest.mark.parametrize("units", [("scout",), ("scout", "soldier", "heavy"), ("heavy",) * 10])
def test_all_that_it_does_is_legal(units: tuple[str, ...]) -> None:
    config = SkirmishConfig(units=units)
    player, rng = HeuristicPolicy(config, 0.8), np.random.default_rng(0)
    starts = np.cumsum([0, MOVES, TURNS])
    with SkirmishVectorEnv(config, 8) as env:
        step, attacks = env.reset(), 0
        for _ in range(60):
            actions = player.act(step.observations, player.initial_state(env.num_lanes), step.episode_starts, rng).env_actions
            legal = np.take_along_axis(step.observations["action_mask"], actions + starts, 1)
            assert legal.all()
            attacks += int((actions[:, 2] > 0).sum())
            step = env.step(actions)
    assert attacks > 20


def test_it_does_the_same_in_any_batch() -> None:
    with SkirmishVectorEnv(SkirmishConfig(), 8) as env:
        player, rng, step = HeuristicPolicy(), np.random.default_rng(0), env.reset()
        for _ in range(40):
            whole = player.act(step.observations, (), step.episode_starts, rng).env_actions
            for lane in range(0, env.num_lanes, 5):
                one = {key: array[lane : lane + 1] for key, array in step.observations.items()}
                assert player.act(one, (), np.zeros(1, bool), rng).env_actions.tolist() == [whole[lane].tolist()]
            step = env.step(whole)


def test_what_it_decides() -> None:
    arena = Arena(units=("soldier", "soldier"))
    arena.put(BLUE, 0, -6.0, 0.0)
    assert decide(arena) == [EAST, 0, 0], "to the zone, which is east"
    arena.put(BLUE, 0, 0.0, 0.0)
    assert decide(arena) == [0, 0, 0], "holds it"
    arena.put(RED, 0, -4.0, 0.0)  # 4 ahead of it, and within reach 5
    arena.put(RED, 1, -4.0, -1.0)  # the second a little to its left, at (4, 1)
    assert decide(arena)[2] == 1, "the nearer of two that are equally strong"
    arena.state.health[RED, 1, 0] = 20.0
    arena.world.observe()
    assert decide(arena)[2] == 2, "the weaker"
    arena.put(RED, 0, -6.0, 0.0)
    arena.put(RED, 1, 0.0, -6.0)
    arena.state.health[RED, 1, 0] = 100.0
    arena.world.observe()
    assert decide(arena)[:2] in ([NORTH, LEFT], [EAST, 0]), "towards an enemy that is out of reach"
    arena.put(RED, 1, 0.0, 3.5)  # at (0, -3.5): to the right
    assert decide(arena)[1] == RIGHT
    arena.put(RED, 1, 7.0, 5.0)
    arena.put(RED, 0, -4.0, 0.0)
    arena.state.health[BLUE, 0, 0] = 20.0
    arena.world.observe()
    assert decide(arena) == [WEST, 0, 1], "flees, shooting"


def test_it_walks_around_a_wall() -> None:
    """A wall block is between the unit and the zone; the unit still gets there."""
    arena = Arena(wall_pairs=1)
    arena.wall(-4.0, -1.5, -3.0, 1.5)
    arena.put(BLUE, 0, -6.0, 0.0)
    for _ in range(25):
        arena.step(blue_0=decide(arena))
    assert arena.own("in_zone") == 1.0


def test_skill_is_a_share() -> None:
    player = HeuristicPolicy(skill=0.3)
    player.skill = 0.9
    assert player.skill == 0.9
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="from 0 to 1"):
            player.skill = wrong
