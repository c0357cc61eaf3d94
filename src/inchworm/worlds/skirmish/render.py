"""Serves step 1: one frame of a game as an image, drawn with NumPy alone, fast enough for video.

It draws what a replay holds, the world's description and one frame, so that a game and its recording look the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from inchworm.core.types import Array

GROUND, OUTSIDE, WALL, ZONE = (251, 250, 246), (226, 228, 231), (115, 125, 136), (206, 209, 213)
TEAMS = ((0, 114, 178), (213, 94, 0))  # blue and vermilion, which colour-blind people tell apart (Okabe and Ito)
INNER, EMPTY, HEALTHY, HURT, DYING = (255, 255, 255), (190, 195, 201), (47, 143, 91), (201, 138, 0), (179, 38, 30)


def _stripe(width: int, colour: tuple[int, int, int]) -> Array:
    """[width, 3]: a row of one colour, which fills a box five times as fast as the colour itself."""
    return np.frombuffer(bytes(colour) * width, np.uint8).reshape(width, 3)


class _Canvas:
    """An image with world coordinates: the arena fills the square as far as its shape allows, y upwards."""

    def __init__(self, world: Mapping[str, Any], size: int) -> None:
        self.image = np.empty((size, size, 3), np.uint8)  # [size, size, 3]
        self.box(0, 0, size, size, OUTSIDE)
        self.scale = size / max(world["width"], world["height"])
        self._left = (size - world["width"] * self.scale) / 2
        self._bottom = (size + world["height"] * self.scale) / 2

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Column and row of a place, as fractions of pixels; far outside is as good as just outside."""
        far = 4.0 * len(self.image)
        return min(max(self._left + x * self.scale, -far), far), min(max(self._bottom - y * self.scale, -far), far)

    def box(self, left: float, top: float, right: float, bottom: float, colour: tuple[int, int, int]) -> None:
        """A filled rectangle, at least a pixel thick, by columns and rows."""
        size = len(self.image)
        column, row = max(0, round(left)), max(0, round(top))
        bottom, right = min(size, max(row + 1, round(bottom))), min(size, max(column + 1, round(right)))
        if row < bottom and column < right:
            self.image[row:bottom, column:right] = _stripe(right - column, colour)

    def disc(self, x: float, y: float, radius: float, colour: tuple[int, int, int]) -> None:
        """A filled disc by its centre in columns and rows and its radius in pixels."""
        size = len(self.image)
        left, right = max(0, int(x - radius)), min(size, int(x + radius) + 2)
        top, bottom = max(0, int(y - radius)), min(size, int(y + radius) + 2)
        if left >= right or top >= bottom:
            return
        across = (np.arange(left, right) + 0.5 - x) ** 2  # [w]
        down = (np.arange(top, bottom) + 0.5 - y) ** 2  # [h]
        self.image[top:bottom, left:right][down[:, None] + across <= radius * radius] = colour

    def line(
        self, start: tuple[float, float], end: tuple[float, float], thickness: int, colour: tuple[int, int, int], gap: int = 0
    ) -> None:
        """A line by its ends in columns and rows, in pieces of `gap` pixels where that is not 0."""
        size, length = len(self.image), int(max(abs(end[0] - start[0]), abs(end[1] - start[1]))) + 1
        along = np.arange(length + 1)
        along = along[along // gap % 2 == 0] if gap else along
        columns = (start[0] + (end[0] - start[0]) / length * along).astype(np.int64)  # [n]
        rows = (start[1] + (end[1] - start[1]) / length * along).astype(np.int64)
        for offset in np.ndindex(thickness, thickness):
            column, row = columns + (offset[0] - thickness // 2), rows + (offset[1] - thickness // 2)
            inside = (column >= 0) & (column < size) & (row >= 0) & (row < size)
            self.image[row[inside], column[inside]] = colour


def render_frame(world: Mapping[str, Any], frame: Mapping[str, Any], size: int = 512) -> Array:
    """[size, size, 3] uint8: arena, zone, walls, shots, the units with their facing and health. The dead are crosses."""
    canvas = _Canvas(world, size)
    _draw_arena(canvas, world)
    units = list(zip(world["units"], frame["units"]))
    places = [canvas.place(row[0], row[1]) for _, row in units]
    for (unit, row), place in zip(units, places):
        if row[3] <= 0:
            _draw_dead(canvas, place, _size(canvas, unit), TEAMS[unit["team"]])
    for shooter, target, hit in frame["shots"]:
        colour = TEAMS[world["units"][shooter]["team"]]
        canvas.line(places[shooter], places[target], 2 if hit else 1, colour, gap=0 if hit else 4)
    for (unit, row), place in zip(units, places):
        if row[3] > 0:
            _draw_unit(canvas, place, _size(canvas, unit), row[2], unit["team"])
    for (unit, row), place in zip(units, places):
        if row[3] > 0:
            _draw_health(canvas, place, _size(canvas, unit), row[3] / unit["max_health"])
    return canvas.image


def _size(canvas: _Canvas, unit: Mapping[str, Any]) -> float:
    """A unit's radius in pixels: its own, but never too small to see."""
    return float(min(max(unit["radius"] * canvas.scale, 4.0), len(canvas.image)))


def _draw_arena(canvas: _Canvas, world: Mapping[str, Any]) -> None:
    canvas.box(*canvas.place(0, world["height"]), *canvas.place(world["width"], 0), GROUND)
    zone = world["zone"]
    radius = min(zone["radius"] * canvas.scale, 4.0 * len(canvas.image))
    canvas.disc(*canvas.place(zone["x"], zone["y"]), radius, ZONE)
    canvas.disc(*canvas.place(zone["x"], zone["y"]), radius - 2, tuple((a + b) // 2 for a, b in zip(ZONE, GROUND)))  # type: ignore[arg-type]
    for x0, y0, x1, y1 in world["walls"]:
        canvas.box(*canvas.place(min(x0, x1), max(y0, y1)), *canvas.place(max(x0, x1), min(y0, y1)), WALL)


def _draw_unit(canvas: _Canvas, place: tuple[float, float], size: float, facing: float, team: int) -> None:
    """A disc, with a white middle for the second team, and a line where it faces."""
    nose = (place[0] + 1.6 * size * np.cos(facing), place[1] - 1.6 * size * np.sin(facing))
    canvas.line(place, nose, max(2, int(size / 4)), TEAMS[team])
    canvas.disc(*place, size, TEAMS[team])
    if team:
        canvas.disc(*place, 0.55 * size, INNER)


def _draw_dead(canvas: _Canvas, place: tuple[float, float], size: float, colour: tuple[int, int, int]) -> None:
    arm, (x, y) = 0.6 * size, place
    canvas.line((x - arm, y - arm), (x + arm, y + arm), 2, colour)
    canvas.line((x - arm, y + arm), (x + arm, y - arm), 2, colour)


def _draw_health(canvas: _Canvas, place: tuple[float, float], size: float, share: float) -> None:
    wide, (x, y) = max(16.0, 2 * size), place
    left, top = x - wide / 2, y - size - 7
    canvas.box(left, top, left + wide, top + 4, EMPTY)
    canvas.box(left, top, left + wide * share, top + 4, HEALTHY if share > 0.6 else HURT if share > 0.3 else DYING)
