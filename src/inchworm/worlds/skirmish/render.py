"""One frame of a game as an image, drawn with NumPy alone and fast enough for video.

The input is what a replay holds, the world's description and one frame, so that a game and its recording look the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from inchworm.core.types import Array

GROUND, OUTSIDE, WALL, ZONE = (251, 250, 246), (226, 228, 231), (115, 125, 136), (206, 209, 213)
TEAMS = ((0, 114, 178), (213, 94, 0))  # blue and vermilion, distinguishable for colour-blind people (Okabe and Ito)
INNER, EMPTY, HEALTHY, HURT, DYING = (255, 255, 255), (190, 195, 201), (47, 143, 91), (201, 138, 0), (179, 38, 30)


class _Canvas:
    """An image with world coordinates: the arena fills as much of the square as its shape allows, with y upwards."""

    def __init__(self, world: Mapping[str, Any], size: int) -> None:
        self.image = np.empty((size, size, 3), np.uint8)  # [size, size, 3]
        self.box(0, 0, size, size, OUTSIDE)
        self.scale = size / max(world["width"], world["height"])
        self._left = (size - world["width"] * self.scale) / 2
        self._bottom = (size + world["height"] * self.scale) / 2

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Column and row of a place, as fractions of pixels; places far outside are clipped."""
        far = 4.0 * len(self.image)
        return min(max(self._left + x * self.scale, -far), far), min(max(self._bottom - y * self.scale, -far), far)

    def box(self, left: float, top: float, right: float, bottom: float, colour: tuple[int, int, int]) -> None:
        """Draw a filled rectangle, at least a pixel thick, by columns and rows."""
        size = len(self.image)
        column, row = max(0, round(left)), max(0, round(top))
        bottom, right = min(size, max(row + 1, round(bottom))), min(size, max(column + 1, round(right)))
        if row < bottom and column < right:
            width = right - column
            stripe = np.frombuffer(bytes(colour) * width, np.uint8).reshape(width, 3)  # fills a box five times as fast as the colour itself
            self.image[row:bottom, column:right] = stripe

    def disc(self, x: float, y: float, radius: float, colour: tuple[int, int, int]) -> None:
        """Draw a filled disc by its centre in columns and rows and its radius in pixels."""
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
        """Draw a line by its ends in columns and rows, dashed in pieces of `gap` pixels if that is not 0."""
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
    """Draw arena, zone, walls, shots, and the units with their facing and health, as [size, size, 3] uint8. Dead units are crosses."""
    canvas = _Canvas(world, size)
    canvas.box(*canvas.place(0, world["height"]), *canvas.place(world["width"], 0), GROUND)
    zone = canvas.place(world["zone"]["x"], world["zone"]["y"])
    zone_radius = min(world["zone"]["radius"] * canvas.scale, 4.0 * size)
    canvas.disc(*zone, zone_radius, ZONE)
    canvas.disc(*zone, zone_radius - 2, tuple((a + b) // 2 for a, b in zip(ZONE, GROUND)))  # type: ignore[arg-type]
    for x0, y0, x1, y1 in world["walls"]:
        canvas.box(*canvas.place(min(x0, x1), max(y0, y1)), *canvas.place(max(x0, x1), min(y0, y1)), WALL)
    units = world["units"]
    places = [canvas.place(x, y) for x, y, *_ in frame["units"]]
    radii = [float(min(max(unit["radius"] * canvas.scale, 4.0), size)) for unit in units]  # never too small to see
    colours = [TEAMS[unit["team"]] for unit in units]
    alive = [index for index, row in enumerate(frame["units"]) if row[3] > 0]
    for index in sorted(set(range(len(units))) - set(alive)):
        arm, (x, y) = 0.6 * radii[index], places[index]
        canvas.line((x - arm, y - arm), (x + arm, y + arm), 2, colours[index])
        canvas.line((x - arm, y + arm), (x + arm, y - arm), 2, colours[index])
    for shooter, target, hit in frame["shots"]:
        canvas.line(places[shooter], places[target], 2 if hit else 1, colours[shooter], gap=0 if hit else 4)
    for index in alive:  # a disc, with a white centre for the second team, and a line where it faces
        radius, (x, y), facing = radii[index], places[index], frame["units"][index][2]
        nose = (x + 1.6 * radius * np.cos(facing), y - 1.6 * radius * np.sin(facing))
        canvas.line((x, y), nose, max(2, int(radius / 4)), colours[index])
        canvas.disc(x, y, radius, colours[index])
        if units[index]["team"]:
            canvas.disc(x, y, 0.55 * radius, INNER)
    for index in alive:
        share = frame["units"][index][3] / units[index]["max_health"]
        width, (x, y) = max(16.0, 2 * radii[index]), places[index]
        left, top = x - width / 2, y - radii[index] - 7
        canvas.box(left, top, left + width, top + 4, EMPTY)
        canvas.box(left, top, left + width * share, top + 4, HEALTHY if share > 0.6 else HURT if share > 0.3 else DYING)
    return canvas.image
