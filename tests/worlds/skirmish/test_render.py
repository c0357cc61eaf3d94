"""Frames as images: every pixel that is asked for here follows from the world's size and the image's, 20 x 10 in 200 pixels."""

import copy
from typing import Any

import numpy as np
import pytest

from doubles.replays import skirmish_replay
from inchworm.worlds.skirmish import SkirmishConfig
from inchworm.worlds.skirmish.pettingzoo import DYING, EMPTY, GROUND, HEALTHY, HURT, INNER, OUTSIDE, TEAM_COLOURS, WALL, ZONE, render_frame

WORLD: dict[str, Any] = {
    "width": 20.0,
    "height": 10.0,
    "walls": [[9.0, 0.0, 11.0, 3.0]],
    "zone": {"x": 10.0, "y": 6.0, "radius": 2.0},
    "units": [{"team": 0, "max_health": 10.0, "radius": 0.5}, {"team": 1, "max_health": 20.0, "radius": 1.0}],
}
FRAME: dict[str, Any] = {"units": [[4.0, 6.0, 0.0, 10.0, 0.0], [16.0, 6.0, np.pi, 20.0, 0.0]], "score": [0, 0], "shots": []}


def at(image: np.ndarray, x: float, y: float) -> tuple[int, ...]:
    """The colour at a place of the world: 10 pixels a unit, 50 empty rows above and below, y upwards."""
    return tuple(int(value) for value in image[int(150 - 10 * y), int(10 * x)])


def changed(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(FRAME), **changes}


def test_arena_zone_and_walls_are_where_they_belong() -> None:
    image = render_frame(WORLD, FRAME, 200)
    assert (image.shape, image.dtype) == ((200, 200, 3), np.uint8)
    assert {tuple(row) for row in image[:50, 0].tolist()} == {OUTSIDE} == {tuple(row) for row in image[150:, 199].tolist()}
    assert at(image, 1, 1) == GROUND == at(image, 19.9, 9.9)
    assert at(image, 9.05, 2.9) == WALL == at(image, 10.9, 0.05)
    assert at(image, 8.9, 2.9) == GROUND == at(image, 11.1, 2.9)
    assert at(image, 10, 7.95) == ZONE == at(image, 8.1, 6)
    assert at(image, 10, 6) == tuple((a + b) // 2 for a, b in zip(ZONE, GROUND))
    assert at(image, 10, 8.2) == GROUND


def test_units_are_discs_with_a_nose_and_the_second_team_has_a_white_middle() -> None:
    image = render_frame(WORLD, FRAME, 200)
    assert at(image, 4, 6) == TEAM_COLOURS[0]
    assert at(image, 3.6, 6) == TEAM_COLOURS[0]
    assert at(image, 3.4, 6) == GROUND
    assert at(image, 4.7, 6) == TEAM_COLOURS[0]  # it faces +x: 1.6 radii
    assert at(image, 16, 6) == INNER
    assert at(image, 15.2, 6) == TEAM_COLOURS[1]
    assert at(image, 14.6, 6) == TEAM_COLOURS[1]  # it faces -x
    assert at(image, 17.4, 6) == GROUND
    up = render_frame(WORLD, changed(units=[[4.0, 6.0, np.pi / 2, 10.0, 0.0], FRAME["units"][1]]), 200)
    assert at(up, 4, 6.7) == TEAM_COLOURS[0]
    assert at(up, 4, 5.3) == GROUND


@pytest.mark.parametrize(("health", "colour"), [(20.0, HEALTHY), (13.0, HEALTHY), (10.0, HURT), (5.0, DYING)])
def test_health_bars_are_as_long_as_the_health(health: float, colour: tuple[int, int, int]) -> None:
    """The second unit's bar is 20 pixels wide, from x = 15 to 17, 7 pixels above the disc."""
    image = render_frame(WORLD, changed(units=[FRAME["units"][0], [16.0, 6.0, 0.0, health, 0.0]]), 200)
    row = [tuple(pixel) for pixel in image[150 - 70 - 7 + 1, 150:170].tolist()]
    filled = round(20 * health / 20)
    assert row == [colour] * filled + [EMPTY] * (20 - filled)


def test_the_dead_are_crosses_without_a_bar() -> None:
    image = render_frame(WORLD, changed(units=[FRAME["units"][0], [16.0, 6.0, 0.0, 0.0, 0.0]]), 200)
    assert at(image, 16.4, 6.45) == TEAM_COLOURS[1]
    assert at(image, 16, 6.9) == GROUND
    assert at(image, 15.5, 7.65) == GROUND


def test_shots_are_lines_whole_where_they_hit() -> None:
    below = [[4.0, 4.0, 0.0, 10.0, 0.0], [16.0, 4.0, 0.0, 20.0, 0.0]]
    hit = render_frame(WORLD, changed(units=below, shots=[[0, 1, 1]]), 200)[110, 50:140]
    missed = render_frame(WORLD, changed(units=below, shots=[[1, 0, 0]]), 200)[110, 60:140]
    assert (hit == TEAM_COLOURS[0]).all()
    share = (missed == TEAM_COLOURS[1]).all(1).mean()
    assert 0.4 < share < 0.6


@pytest.mark.parametrize("place", [(-1e6, 1e6), (0.0, 0.0), (20.0, 10.0), (25.0, -3.0)])
def test_whatever_stands_outside_breaks_nothing(place: tuple[float, float]) -> None:
    for health in (0.0, 10.0):
        image = render_frame(WORLD, changed(units=[[*place, 0.3, health, 0.0], FRAME["units"][1]], shots=[[0, 1, 1], [1, 0, 0]]), 64)
        assert image.shape == (64, 64, 3)
    tall = {**WORLD, "width": 5.0, "walls": [[-1e6, -1e6, 1e6, 1e6]], "zone": {"x": 0, "y": 0, "radius": 1e6}}
    assert tuple(render_frame(tall, FRAME, 64)[32, 32].tolist()) == WALL


def test_images_show_the_units_where_the_frame_has_them() -> None:
    replay = skirmish_replay(SkirmishConfig(), 3)
    world, frame = replay["world"], replay["frames"][-1]
    image = render_frame(world, frame, 480)  # 16 x 12 units in 480 x 360 pixels, 60 rows above
    for unit, (x, y, *_) in zip(world["units"], frame["units"]):
        rim = image[int(60 + (world["height"] - y + 0.8 * unit["radius"]) * 30), int(x * 30)]
        assert tuple(rim.tolist()) == TEAM_COLOURS[unit["team"]]
    assert tuple(image[61, 1].tolist()) == GROUND
