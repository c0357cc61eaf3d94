"""The rules of Skirmish, by numbers worked out by hand.

A soldier has health 100, speed 0.75, radius 0.375, sight 7, reach 5, an arc of 90 degrees, damage 12 and cooldown 3.
"""

import math

import numpy as np
import pytest

from doubles.skirmish import BLUE, EAST, LEFT, NORTH, NORTH_EAST, RED, RIGHT, WEST, Arena
from inchworm.core.errors import EnvError
from inchworm.worlds.skirmish import SkirmishConfig, SkirmishWorld
from inchworm.worlds.skirmish.state import ALLY, CLASSES, HEADINGS, LATTICE, NO_TEAM, REASONS, Layout
from inchworm.worlds.skirmish.world import DAMAGE, DEATH, HURT, KILL, WIN, ZONE


def result(arena: Arena) -> tuple[int, str]:
    return int(arena.state.winners[0]), REASONS[int(arena.state.reasons[0])]


def face_off(distance: float = 4.0, **config: object) -> Arena:
    """Blue's unit 0 at (-6, 4) faces east; red's is `distance` east of it and faces it. Far from the zone."""
    arena = Arena(**config)
    arena.put(BLUE, 0, -6.0, 4.0)
    arena.put(RED, 0, 6.0 - distance, -4.0)  # in red's frame, which is turned by 180 degrees
    return arena


# ---- moving and turning
def test_moves_are_in_the_own_frame_and_diagonals_are_as_long_up_to_the_lattice() -> None:
    arena = Arena()
    arena.put(BLUE, 0, -3.0, 1.0)
    arena.put(RED, 0, -3.0, 1.0)
    arena.step(blue_0=(EAST, 0, 0), red_0=(NORTH_EAST, 0, 0))
    assert arena.state.places[:, BLUE, 0, 0].tolist() == [-2.25, 1.0]
    # 0.75 / sqrt(2) = 0.5303, of 1/16 that is 8.49, so 8 / 16
    assert arena.state.places[:, RED, 0, 0].tolist() == [-2.5, 1.5]
    blue, red = arena.world.frame(0)["units"]
    assert blue[:2] == [8.0 - 2.25, 6.0 + 1.0]
    assert red[:2] == [8.0 + 2.5, 6.0 - 1.5], "red's forward is west for who watches"


def test_turns_change_the_heading_by_the_class() -> None:
    arena = Arena(units=("scout", "soldier"))
    arena.step(blue_0=(0, LEFT, 0), blue_1=(0, RIGHT, 0))
    assert arena.state.headings[BLUE, :, 0].tolist() == [3, HEADINGS - 2]
    facing = arena.world.frame(0)["units"][0][2]
    assert facing == pytest.approx(math.radians(67.5))
    assert arena.world.frame(0)["units"][2][2] == pytest.approx(math.pi), "red faces blue's side"


def test_edges_and_walls_stop_moves() -> None:
    arena = Arena(wall_pairs=1)
    arena.wall(-2.0, -1.0, -1.0, 1.0)
    arena.put(BLUE, 0, -8.0 + 0.375 + 0.5, 0.0)  # 0.5 of free way to the west, and a step needs 0.75
    moves, turns, attacks = arena.mask(BLUE, 0)
    assert not moves[WEST]
    assert moves[EAST]
    assert moves[NORTH]
    assert all(turns)
    assert attacks == [True, False]
    assert arena.rays()[WEST - 1] == 0.5 / 4.0
    arena.put(BLUE, 0, -2.0 - 0.375 - 0.75, 0.0)  # just room for one step before the wall
    assert arena.mask(BLUE, 0)[0][EAST]
    arena.step(blue_0=(EAST, 0, 0))
    moves, _, _ = arena.mask(BLUE, 0)
    assert not moves[EAST]
    assert not moves[NORTH_EAST]
    assert (moves[NORTH], moves[WEST]) == (True, True), "along the wall and away from it the way is free"
    before = arena.state.places.copy()
    arena.step(blue_0=(EAST, 0, 0))
    assert (arena.state.places == before).all(), "a move into a wall is not done"


# ---- seeing
def test_sight_ends_at_its_radius() -> None:
    arena = face_off(7.0)
    assert (arena.enemy("visible"), arena.enemy("distance")) == (1.0, 1.0), "7 is a soldier's sight, and the unit of distances"
    assert (arena.enemy("dx"), arena.enemy("dy"), arena.enemy("ahead"), arena.enemy("left")) == (1.0, 0.0, 1.0, 0.0)
    arena = face_off(7.0625)
    seen = [arena.enemy(name) for name in ("visible", "alive", "dx", "distance", "health", "ahead", "aims")]
    assert seen == [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_bearings_are_from_the_own_facing_and_aims_from_the_enemys() -> None:
    arena = face_off()
    arena.put(BLUE, 0, -6.0, 4.0, 12)  # facing south: the enemy in the east is to the left
    assert (arena.enemy("ahead"), arena.enemy("left"), arena.enemy("aims")) == (0.0, 1.0, 1.0)
    assert (arena.enemy("ahead", team=RED), arena.enemy("aims", team=RED)) == (1.0, 0.0)


def test_walls_hide_and_a_touched_corner_does_not() -> None:
    arena = face_off(4.0, wall_pairs=1)
    arena.wall(-4.5, 3.5, -3.5, 4.5)
    assert arena.enemy("visible") == 0.0
    assert arena.enemy("visible", team=RED) == 0.0, "who is not seen does not see"
    arena.wall(-4.5, 4.0, -3.5, 5.0)  # its lower side lies on the line of sight
    assert arena.enemy("visible") == 1.0
    arena.wall(-4.5, 3.9375, -3.5, 5.0)
    assert arena.enemy("visible") == 0.0


def test_allies_are_known_wherever_they_are() -> None:
    arena = Arena(units=("soldier", "soldier"))
    arena.put(BLUE, 0, -6.0, 4.0)
    arena.put(BLUE, 1, 2.0, -4.0)
    rows = arena.state.observations[Layout(2).allies, BLUE, 0, 0].reshape(len(ALLY), 2)  # [feature, ally]
    # dx = 8 and dy = -8 over the longer side, 16; the first is the unit itself
    assert rows.tolist() == [[1.0, 1.0], [0.0, 0.5], [0.0, -0.5], [1.0, 1.0], [0.0, 0.0]]


# ---- shooting
def test_a_shot_takes_health_and_starts_the_cooldown() -> None:
    arena = face_off()
    assert arena.mask(BLUE, 0)[2] == [True, True]
    arena.step(blue_0=(0, 0, 1))
    assert (arena.health(RED), arena.health(BLUE)) == (88.0, 100.0)
    assert arena.world.frame(0)["shots"] == [[0, 1, 1]]
    assert arena.reward(DAMAGE, BLUE) == pytest.approx(0.5 * 12 / 100)
    assert arena.reward(HURT, RED) == pytest.approx(-0.25 * 12 / 100)
    assert arena.own("cooldown") == pytest.approx(2 / 3)
    for _ in range(2):  # two steps of waiting, in which the order is not followed
        assert arena.mask(BLUE, 0)[2] == [True, False]
        arena.step(blue_0=(0, 0, 1))
        assert arena.health(RED) == 88.0
        assert arena.world.frame(0)["shots"] == []
    assert arena.mask(BLUE, 0)[2] == [True, True]
    arena.step(blue_0=(0, 0, 1))
    assert arena.health(RED) == 76.0


def test_reach() -> None:
    assert face_off(5.0).mask(BLUE, 0)[2] == [True, True]
    assert face_off(5.0625).mask(BLUE, 0)[2] == [True, False]


@pytest.mark.parametrize(("heading", "legal"), [(0, True), (1, True), (2, True), (3, False), (8, False), (13, False), (14, True)])
def test_arc(heading: int, legal: bool) -> None:
    """45 degrees to either side; a heading is 22.5."""
    arena = face_off()
    arena.put(BLUE, 0, -6.0, 4.0, heading)
    assert arena.mask(BLUE, 0)[2] == [True, legal]
    assert arena.enemy("in_arc") == legal


def test_a_shot_misses_who_leaves_the_arc_in_the_same_step() -> None:
    arena = face_off(5.0)
    arena.step(blue_0=(0, 0, 1), red_0=(WEST, 0, 0))  # red steps back out of reach
    assert arena.health(RED) == 100.0
    assert arena.world.frame(0)["shots"] == [[0, 1, 0]]
    assert arena.own("cooldown") > 0, "the shot is spent"


def test_what_the_mask_forbids_is_not_done() -> None:
    arena = face_off(6.0)  # seen, out of reach
    arena.step(blue_0=(EAST, LEFT, 1))
    assert arena.health(RED) == 100.0
    assert arena.own("cooldown") == 0.0
    assert arena.world.frame(0)["shots"] == []
    assert (arena.state.places[0, BLUE, 0, 0], arena.state.headings[BLUE, 0, 0]) == (-5.25, 2), "the legal parts are done"


@pytest.mark.parametrize("action", [(9, 0, 0), (0, 3, 0), (0, 0, 2), (-1, 0, 0)])
def test_actions_outside_the_space_are_refused(action: tuple[int, int, int]) -> None:
    with pytest.raises(EnvError, match=r"from 0 to \[8, 2, 1\]"):
        face_off().step(blue_0=action)


def test_two_units_can_kill_each_other() -> None:
    arena = face_off()
    arena.state.health[:] = 12.0
    arena.step(blue_0=(0, 0, 1), red_0=(0, 0, 1))
    assert (arena.health(BLUE), arena.health(RED)) == (0.0, 0.0)
    assert result(arena) == (NO_TEAM, "elimination")
    for team in (BLUE, RED):
        assert arena.reward(KILL, team) == pytest.approx(0.2)
        assert arena.reward(DEATH, team) == pytest.approx(-0.2)
        assert arena.reward(WIN, team) == 0.0


def test_no_more_is_dealt_than_was_left_and_all_who_hit_have_killed() -> None:
    arena = Arena(units=("soldier", "soldier"))
    arena.put(BLUE, 0, -6.0, 4.0)
    arena.put(BLUE, 1, -6.0, 4.5)
    arena.put(RED, 0, 3.0, -4.0)
    arena.state.health[RED, 0, 0] = 5.0
    arena.step(blue_0=(0, 0, 1), blue_1=(0, 0, 1))
    assert [arena.reward(DAMAGE, BLUE, unit) for unit in (0, 1)] == pytest.approx([0.025, 0.025])  # 0.5 * 5 / 100
    assert [arena.reward(KILL, BLUE, unit) for unit in (0, 1)] == pytest.approx([0.2, 0.2])
    assert arena.reward(HURT, RED, 0) == pytest.approx(-0.25 * 5 / 100)


def test_the_dead_see_nothing_and_do_nothing() -> None:
    arena = Arena(units=("soldier", "soldier"))
    arena.put(BLUE, 0, -6.0, 4.0)
    arena.put(RED, 0, 3.0, -4.0)
    arena.state.health[RED, 0, 0] = 12.0
    arena.step(blue_0=(0, 0, 1))
    assert result(arena) == (NO_TEAM, "")
    assert arena.state.died[RED, :, 0].tolist() == [True, False]
    assert not arena.state.observations[:, RED, 0, 0].any()
    assert arena.state.mask[:, RED, 0, 0].all(), "the mask of a lane without an agent allows everything"
    assert (arena.enemy("alive"), arena.enemy("visible")) == (0.0, 0.0)
    before = arena.state.places.copy(), arena.state.headings.copy()
    for _ in range(3):
        arena.step(red_0=(EAST, LEFT, 1), blue_0=(0, 0, 1))
    assert (arena.state.places == before[0]).all()
    assert (arena.state.headings == before[1]).all()
    assert arena.health(BLUE) == 100.0
    assert arena.mask(BLUE, 0)[2] == [True, False, False], "dead units are not targets"
    assert arena.reward(DEATH, RED, 0) == 0.0, "one dies once"


# ---- zone and ends
def test_the_zone_counts_for_the_team_that_is_alone_in_it() -> None:
    arena = Arena(zone_target=3)
    arena.put(BLUE, 0, -2.5, 0.0)  # on its rim
    arena.step()
    assert arena.state.scores[:, 0].tolist() == [1.0, 0.0]
    assert (arena.own("holder"), arena.own("holder", RED), arena.own("in_zone")) == (1.0, -1.0, 1.0)
    assert arena.own("score") == pytest.approx(1 / 3)
    assert arena.own("enemy_score", RED) == pytest.approx(1 / 3)
    assert (arena.reward(ZONE, BLUE), arena.reward(ZONE, RED)) == (pytest.approx(0.01), pytest.approx(-0.01))
    arena.put(RED, 0, 0.0, 1.0)  # contested
    arena.step()
    assert arena.state.scores[:, 0].tolist() == [1.0, 0.0]
    assert arena.reward(ZONE, BLUE) == 0.0
    arena.put(BLUE, 0, -2.5625, 0.0)  # just outside
    for turn in range(3):
        assert result(arena) == (NO_TEAM, ""), turn
        arena.step()
    assert arena.state.scores[:, 0].tolist() == [1.0, 3.0]
    assert result(arena) == (RED, "zone")
    assert (arena.reward(WIN, RED), arena.reward(WIN, BLUE)) == (1.0, -1.0)


@pytest.mark.parametrize(
    ("scores", "health", "winner"),
    [((3, 2), (10, 100), BLUE), ((2, 3), (100, 10), RED), ((2, 2), (50, 49), BLUE), ((2, 2), (49, 50), RED), ((2, 2), (50, 50), NO_TEAM)],
)
def test_on_time_the_score_decides_then_health(scores: tuple[int, int], health: tuple[int, int], winner: int) -> None:
    arena = Arena(max_steps=2)
    arena.step()
    assert result(arena) == (NO_TEAM, "")
    assert arena.own("clock") == 0.5
    arena.state.scores[:, 0], arena.state.health[:, 0, 0] = scores, health
    arena.step()
    assert result(arena) == (winner, "time")
    assert arena.own("clock") == 0.0
    assert arena.reward(WIN, BLUE) == 0.0, "a game that is cut off pays no win"


def test_elimination_comes_before_zone_and_zone_before_time() -> None:
    arena = face_off(max_steps=1, zone_target=1, units=("soldier", "soldier"))
    arena.put(RED, 1, 0.0, 0.0)
    arena.step()
    assert result(arena) == (RED, "zone")
    arena = Arena(max_steps=1, zone_target=1)
    arena.put(BLUE, 0, -2.0, 0.0)
    arena.put(RED, 0, -2.0, 0.0)  # at (2, 0) in blue's frame; both are in the zone
    arena.state.health[RED] = 12.0
    arena.step(blue_0=(0, 0, 1))
    assert arena.state.scores[:, 0].tolist() == [1.0, 0.0], "the target is reached in the step of the kill"
    assert result(arena) == (BLUE, "elimination")


# ---- beginnings
@pytest.mark.parametrize(
    "config",
    [SkirmishConfig(), SkirmishConfig(units=("heavy",) * 10, wall_pairs=4), SkirmishConfig(units=("scout",), height=6.0, wall_pairs=2)],
)
def test_every_game_begins_on_the_lattice_with_room_to_move(config: SkirmishConfig) -> None:
    world = SkirmishWorld(config, 200)
    world.begin(range(200))
    state = world.state
    for array in (state.places, state.walls * 2):
        assert (array * LATTICE == np.round(array * LATTICE)).all()
    pairs = config.wall_pairs
    assert (state.walls[0, :, :pairs] == -state.walls[0, :, pairs:]).all()
    assert (state.walls[1] > 0).all()
    edge = np.array([config.width / 2, config.height / 2])[:, None, None]
    assert (np.abs(state.walls[0]) + state.walls[1] <= edge).all()
    assert (state.places[:, 0] == state.places[:, 1]).all(), "both sides are equal"
    free = state.mask[1:9].any(0)  # [2, n, E]
    assert free.all(), "every unit can move at the start"
    assert len(np.unique(state.walls.reshape(-1, 200), axis=1).T) == 200, "every seed has different walls"


def test_no_wall_closes_the_way() -> None:
    """A heavy unit, the widest, can go from its side to the other's in every one of 50 arenas: flood over the lattice of its steps."""
    config = SkirmishConfig(units=("heavy",))
    world = SkirmishWorld(config, 1)
    step = CLASSES["heavy"].speed
    for seed in range(50):
        world.begin([seed])
        reached, edge = set(), [tuple(world.state.places[:, 0, 0, 0].tolist())]
        while edge and not any(x > 6.0 for x, _ in edge):
            x, y = edge.pop()
            world.state.places[:, 0, 0, 0] = x, y
            world.observe()
            free = world.state.mask[[EAST, NORTH, WEST, 6], 0, 0, 0]
            around = [(x + step, y), (x, y + step), (x - step, y), (x, y - step)]
            fresh = [place for place, open_ in zip(around, free) if open_ and place not in reached]
            reached.update(fresh)
            edge += sorted(fresh)
        assert edge, f"seed {seed}"
