"""Lines of sight and free ways, against slow and plain versions on random walls; exact fractions, so equal means equal."""

from fractions import Fraction

import numpy as np
import pytest

from inchworm.worlds.skirmish.sight import free_distances, has_line_of_sight
from inchworm.worlds.skirmish.state import DIRECTIONS, LATTICE

EDGE = np.array([8.0, 6.0], np.float32)
ARENAS, UNITS, WALLS = 40, 3, 4
STEPS = np.arange(1, 32 * LATTICE)[:, None] / (2 * LATTICE)
"""Halves of the lattice: two edges can be neighbours on it, and what is between them is inside."""


def lattice(rng: np.random.Generator, low: float, high: float, shape: tuple[int, ...], cells: int = 1) -> np.ndarray:
    drawn = rng.integers(round(low * LATTICE / cells), round(high * LATTICE / cells) + 1, shape)
    return (drawn * cells / LATTICE).astype(np.float32)


def random_walls(rng: np.random.Generator) -> np.ndarray:
    centres = np.stack([lattice(rng, -6, 6, (WALLS, ARENAS)), lattice(rng, -4, 4, (WALLS, ARENAS))])
    return np.stack([centres, lattice(rng, 0.25, 1.5, (2, WALLS, ARENAS))])


def crosses(start: tuple[float, float], end: tuple[float, float], centre: np.ndarray, half: np.ndarray) -> bool:
    """Whether some part of a segment lies strictly inside a box: both axes' open intervals of the way meet within (0, 1)."""
    low, high = Fraction(0), Fraction(1)
    for axis in range(2):
        begin, way = Fraction(float(start[axis])), Fraction(float(end[axis])) - Fraction(float(start[axis]))
        lower, upper = Fraction(float(centre[axis] - half[axis])), Fraction(float(centre[axis] + half[axis]))
        if way == 0:
            if not lower < begin < upper:
                return False
            continue
        near, far = sorted(((lower - begin) / way, (upper - begin) / way))
        low, high = max(low, near), min(high, far)
    return low < high


@pytest.mark.parametrize("seed", range(4))
def test_lines_of_sight(seed: int) -> None:
    rng = np.random.default_rng(seed)
    walls = random_walls(rng)
    ours, theirs = (np.stack([lattice(rng, -7, 7, (UNITS, ARENAS), 4), lattice(rng, -5, 5, (UNITS, ARENAS), 4)]) for _ in range(2))
    found = has_line_of_sight(ours, theirs, walls)  # [j, i, E]
    hidden = 0
    for arena in range(ARENAS):
        for i in range(UNITS):
            for j in range(UNITS):
                start, end = ours[:, i, arena], theirs[:, j, arena]
                expected = not any(crosses(start, end, walls[0, :, wall, arena], walls[1, :, wall, arena]) for wall in range(WALLS))
                assert found[j, i, arena] == expected, (arena, start, end)
                hidden += not expected
    assert 50 < hidden < 310, "of 360 lines some are free and some are not"


@pytest.mark.parametrize("seed", range(2))
def test_free_distances(seed: int) -> None:
    """Walk in small steps until the unit would be inside a grown wall or beyond the edge."""
    rng = np.random.default_rng(seed)
    walls, radii = random_walls(rng), np.array([[0.25], [0.375], [0.5]], np.float32)
    places = np.stack([lattice(rng, -7, 7, (2, UNITS, ARENAS)), lattice(rng, -5, 5, (2, UNITS, ARENAS))])
    found = free_distances(places, radii, walls, EDGE)

    def stuck(points: np.ndarray, unit: int, arena: int) -> np.ndarray:
        """[K] for points [K, 2]."""
        inside = np.abs(points[:, :, None] - walls[0, :, :, arena]) < walls[1, :, :, arena] + radii[unit]  # [K, 2, W]
        return inside.all(1).any(1) | (np.abs(points) > EDGE - radii[unit]).any(1)

    checked = 0
    for arena in range(0, ARENAS, 2):
        for team in range(2):
            for unit in range(UNITS):
                place = places[:, team, unit, arena]
                if stuck(place[None], unit, arena)[0]:
                    continue  # no unit is ever there
                for index, direction in enumerate(DIRECTIONS):
                    way = place + STEPS * np.array(direction)  # [K, 2]
                    assert found[index, team, unit, arena] == stuck(way, unit, arena).argmax() / (2 * LATTICE), (
                        arena,
                        team,
                        unit,
                        direction,
                    )
                    checked += 1
    assert checked > 300


def test_without_walls_the_edge_is_all() -> None:
    places = np.zeros((2, 2, 1, 1), np.float32)
    free = free_distances(places, np.array([[0.5]], np.float32), np.zeros((2, 2, 0, 1), np.float32), EDGE)
    assert free[:, 0, 0, 0].tolist() == [7.5, 5.5, 5.5, 5.5, 7.5, 5.5, 5.5, 5.5]
    assert has_line_of_sight(places[:, 0], places[:, 1], np.zeros((2, 2, 0, 1), np.float32)).all()
