"""Replay files and pages: a recorded game as JSON, with the world once and a frame for every step, and as an HTML page.

`check_replay` defines the format: readers may rely on everything it accepts. It trusts nothing: each value has a type and a range, each
list a length, and the whole file a size.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from inchworm.core.errors import CorruptFileError, InchwormError
from inchworm.core.tensor_file import JSON_PIECES, json_pieces, read_bytes, read_json, untrusted, write_atomically

FORMAT, VERSION = "inchworm-replay", 1
MAX_BYTES = 16_000_000
"""The largest file. A game of 20 units and 3,000 steps has about 8 million bytes."""
REASONS = ("elimination", "zone", "time")
MAX_UNITS, MAX_WALLS, MAX_SHOTS, MAX_STEPS = 64, 1_000, 64, 1_000_000
FAR, LONG_TEXT, META_DEPTH = 1e6, 1_000, 8
EXACT = 2**64
"""Integers in `meta` are below this, as seeds are."""


class ReplayError(InchwormError, ValueError):
    """Data that are not a valid replay. For a file, `CorruptFileError` is raised instead."""


def make_replay(world: Mapping[str, Any], frames: Sequence[Any], meta: Mapping[str, Any], last_info: Mapping[str, float]) -> dict[str, Any]:
    """Create a replay. `last_info`, of a unit of team 0, has the winner and the reason; it is empty while the game is running."""
    result = None
    if last_info:
        reason = next(name for name in REASONS if last_info[f"ended_{name}"] == 1.0)
        result = {"winner": {1.0: 0, 0.0: 1}.get(last_info["win"]), "reason": reason}
    return {"format": FORMAT, "version": VERSION, "world": dict(world), "meta": dict(meta), "frames": list(frames), "result": result}


def save_replay(path: str | Path, replay: Mapping[str, Any]) -> Path:
    """Write a replay atomically. Raises `ReplayError` if the file could not be loaded again."""
    text = json.dumps(_checked(dict(replay)), allow_nan=False, separators=(",", ":"))
    if len(text) > MAX_BYTES or json_pieces(text) > JSON_PIECES:
        size = f"{len(text):,} bytes and {json_pieces(text):,} values; a file may have {MAX_BYTES:,} and {JSON_PIECES:,}"
        raise ReplayError(f"the replay for {path} is too large ({size}); record fewer steps")
    return write_atomically(path, text + "\n")


def load_replay(path: str | Path) -> dict[str, Any]:
    """Load a replay from a file. Raises `CorruptFileError`, in one line, if it is not one."""
    if Path(path).is_dir():
        raise CorruptFileError(f"{path} is a directory; name the replay file in it")
    blob = read_bytes(path, limit=MAX_BYTES)
    with untrusted(f"{path} is not a readable replay"):
        try:
            data = read_json(blob.decode("utf-8-sig"))  # an editor may have added a byte order mark
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 text (byte {error.start:,})") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"truncated or not JSON ({error})") from None
        return _checked(data)


def check_replay(data: Any) -> dict[str, Any]:
    """Return the data unchanged if they are a replay of version 1, else raise `CorruptFileError` with what is wrong and where."""
    with untrusted("not a replay"):
        return _checked(data)


def _checked(data: Any) -> dict[str, Any]:
    if type(data) is not dict or data.get("format") != FORMAT:
        found = repr(data.get("format"))[:60] if type(data) is dict else type(data).__name__
        raise ReplayError(f'"format" is {found}, not "{FORMAT}"')
    if type(data.get("version")) is not int or data["version"] != VERSION:
        raise ReplayError(f"format version {data.get('version')!r:.40} is not supported (this inchworm reads {VERSION}); update inchworm")
    _keys(data, "the replay", ("format", "version", "world", "meta", "frames", "result"))
    _check_world(data["world"])
    meta, result = data["meta"], data["result"]
    if type(meta) is not dict:
        raise ReplayError(f"meta is {type(meta).__name__}, not a mapping")
    _check_plain(meta, "meta", META_DEPTH)
    if "players" in meta:
        for number, player in enumerate(_list(meta["players"], "meta.players", 2, 2)):
            _text(player, f"meta.players[{number}]")
    _check_frames(data["frames"], data["world"])
    if result is not None:  # None: the game was not played to its end
        _keys(result, "result", ("winner", "reason"))
        if result["winner"] is not None:
            _integer(result["winner"], "result.winner", 0, 1)
        if type(result["reason"]) is not str or result["reason"] not in REASONS:
            raise ReplayError(f"result.reason is {result['reason']!r:.40}; it must be one of {', '.join(REASONS)}")
    return data


def _check_world(world: Any) -> None:
    names = ("game", "width", "height", "walls", "zone", "teams", "units", "max_steps", "step_seconds")
    _keys(world, "world", names)
    _text(world["game"], "world.game")
    for name in ("width", "height"):
        _number(world[name], f"world.{name}", 1e-3, 1e4)
    for number, wall in enumerate(_list(world["walls"], "world.walls", 0, MAX_WALLS)):
        for value in _list(wall, f"world.walls[{number}]", 4, 4):
            _number(value, f"world.walls[{number}]", -FAR, FAR)
    _keys(world["zone"], "world.zone", ("x", "y", "radius"))
    for name, value in world["zone"].items():
        _number(value, f"world.zone.{name}", 0 if name == "radius" else -FAR, FAR)
    for number, team in enumerate(_list(world["teams"], "world.teams", 2, 2)):
        _text(team, f"world.teams[{number}]")
    for number, unit in enumerate(_list(world["units"], "world.units", 1, MAX_UNITS)):
        where = f"world.units[{number}]"
        _keys(unit, where, ("team", "kind", "max_health", "radius", "range", "arc"))
        _integer(unit["team"], f"{where}.team", 0, 1)
        _text(unit["kind"], f"{where}.kind")
        _number(unit["max_health"], f"{where}.max_health", 1e-6, FAR)
        _number(unit["radius"], f"{where}.radius", 0, FAR)
        _number(unit["range"], f"{where}.range", 0, FAR)
        _number(unit["arc"], f"{where}.arc", 0, math.tau + 1e-6)
    _integer(world["max_steps"], "world.max_steps", 1, MAX_STEPS)
    _number(world["step_seconds"], "world.step_seconds", 1e-4, 3600)


def _check_plain(value: Any, where: str, depth: int) -> None:
    """Check that a value is text, a number, a bool or None, or lists and mappings of these, not nested too deeply."""
    if depth == 0:
        raise ReplayError(f"meta is more than {META_DEPTH} levels deep")
    if type(value) is dict:
        for name, inner in value.items():
            _text(name, f"a name in {where}", 0)
            _check_plain(inner, where, depth - 1)
    elif type(value) is list:
        for inner in value:
            _check_plain(inner, where, depth - 1)
    elif type(value) is str:
        _text(value, f"a text in {where}", 0)
    elif type(value) is int:
        _integer(value, f"a number in {where}", -EXACT, EXACT)
    elif value is not None and type(value) is not bool:
        _number(value, f"a number in {where}", -math.inf, math.inf)


def _check_frames(frames: Any, world: dict[str, Any]) -> None:
    units = len(world["units"])
    limits = [unit["max_health"] * (1 + 1e-6) for unit in world["units"]]
    for number, frame in enumerate(_list(frames, "frames", 1, world["max_steps"] + 1)):
        where = f"frames[{number}]"
        _keys(frame, where, ("units", "score", "shots"))
        for row, limit in zip(_list(frame["units"], f"{where}.units", units, units), limits):
            x, y, facing, health, cooldown = _list(row, f"{where}.units", 5, 5)
            for value in (x, y, facing):
                _number(value, f"{where}.units: a place or facing", -FAR, FAR)
            _number(health, f"{where}.units: a health", 0, limit)
            _number(cooldown, f"{where}.units: a cooldown", 0, FAR)
        for score in _list(frame["score"], f"{where}.score", 2, 2):
            _number(score, f"{where}.score", -FAR, FAR)
        for shot in _list(frame["shots"], f"{where}.shots", 0, MAX_SHOTS):
            shooter, target, hit = _list(shot, f"{where}.shots", 3, 3)
            _integer(shooter, f"{where}.shots: the shooter", 0, units - 1)
            _integer(target, f"{where}.shots: the target", 0, units - 1)
            _integer(hit, f"{where}.shots: hit", 0, 1)


def _keys(value: Any, where: str, names: tuple[str, ...]) -> None:
    if type(value) is not dict:
        raise ReplayError(f"{where} is {type(value).__name__}, not a mapping")
    if len(value) != len(names) or any(name not in value for name in names):
        missing = [name for name in names if name not in value]
        unknown = [name for name in value if name not in names]
        raise ReplayError(f"{where} lacks {missing[0]}" if missing else f"{where} has the unknown key {unknown[0]!r:.40}")


def _list(value: Any, where: str, least: int, most: int) -> list[Any]:
    if type(value) is not list:
        raise ReplayError(f"{where} is {type(value).__name__}, not a list")
    if not least <= len(value) <= most:
        wanted = f"{least}" if least == most else f"{least} to {most:,}"
        raise ReplayError(f"{where} has {len(value):,} entries; there must be {wanted}")
    return value


def _number(value: Any, where: str, low: float, high: float) -> None:
    """Check for a finite number within bounds; comparisons with NaN are false."""
    if type(value) not in (float, int) or not low <= value <= high or value in (math.inf, -math.inf):
        raise ReplayError(f"{where} is {value!r:.40}; it must be a number" + ("" if math.isinf(high) else f" from {low:g} to {high:g}"))


def _integer(value: Any, where: str, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ReplayError(f"{where} is {value!r:.40}; it must be an integer from {low} to {high}")


def _text(value: Any, where: str, least: int = 1) -> None:
    """Check for text of bounded length without lone surrogates, which UTF-8 cannot encode."""
    if type(value) is not str or not least <= len(value) <= LONG_TEXT:
        raise ReplayError(f"{where} is {value!r:.40}; it must be text of at most {LONG_TEXT:,} characters")
    if not value.isascii() and value.encode("utf-8", "replace").decode() != value:
        raise ReplayError(f"{where} contains a lone surrogate")


MARK = "<!-- inchworm replay -->"
"""In the first line of every page: a command overwrites only pages with this mark."""

_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
_MAX_SAFE_INTEGER = 2**53
_ASSETS = ("page.html", "page.css", "page.js")


def replay_page(replay: Mapping[str, Any]) -> str:
    """Check a replay and create an HTML page that shows the game offline."""
    data = check_replay(dict(replay))
    template, style, script = (files("inchworm.worlds").joinpath("replay_assets", name).read_text(encoding="utf-8") for name in _ASSETS)
    parts = {
        "mark": MARK,
        "style": style,
        "script": script,
        "style-hash": inline_hash(style),
        "script-hash": inline_hash(script),
        "data": embedded({**data, "meta": _exact_in_javascript(data["meta"])}),
    }
    # In one pass, so that a placeholder inside a part is not replaced.
    return re.sub(r"\{\{([a-z-]+)\}\}", lambda match: parts[match.group(1)], template)


def embedded(data: Any) -> str:
    """Encode data as JSON for a script element: only ASCII, and nothing that ends the element or begins a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&]", lambda match: _ESCAPES[match.group()], text)


def inline_hash(text: str) -> str:
    """The hash of an inline element as a Content-Security-Policy writes it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _exact_in_javascript(value: Any) -> Any:
    """Convert integers that JavaScript would round, such as large seeds, to text."""
    if type(value) is dict:
        return {name: _exact_in_javascript(inner) for name, inner in value.items()}
    if type(value) is list:
        return [_exact_in_javascript(inner) for inner in value]
    return str(value) if type(value) is int and abs(value) > _MAX_SAFE_INTEGER else value
