"""The replay file: a game as JSON, the world once and then a frame for every step. Serves evaluation, which saves what it saw.

A replay is plain data, so `check_replay` is the format's definition: what it lets through, every reader may rely on. It trusts nothing:
each value has a type and a range, each list a length, and the whole a size.
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
"""Of a file. A game of 20 units and 3,000 steps has about 8 million."""
REASONS = ("elimination", "zone", "time")
MAX_UNITS, MAX_WALLS, MAX_SHOTS, MAX_STEPS = 64, 1_000, 64, 1_000_000
FAR, LONG_TEXT, META_DEPTH = 1e6, 1_000, 8
EXACT = 2**64
"""Whole numbers in `meta` are below this, as seeds are."""


class ReplayError(InchwormError, ValueError):
    """What is wrong with a replay and where; of a file, `CorruptFileError` says it."""


def make_replay(world: Mapping[str, Any], frames: Sequence[Any], meta: Mapping[str, Any], last_info: Mapping[str, float]) -> dict[str, Any]:
    """A game as a replay. Who won, and how, is in the last info of a unit of team 0; it is empty while the game goes on."""
    result = None
    if last_info:
        reason = next(name for name in REASONS if last_info[f"ended_{name}"] == 1.0)
        result = {"winner": {1.0: 0, 0.0: 1}.get(last_info["win"]), "reason": reason}
    return {"format": FORMAT, "version": VERSION, "world": dict(world), "meta": dict(meta), "frames": list(frames), "result": result}


def save_replay(path: str | Path, replay: Mapping[str, Any]) -> Path:
    """Write a replay, whole or not at all. What could not be read again is refused with `ReplayError`."""
    text = json.dumps(_checked(dict(replay)), allow_nan=False, separators=(",", ":"))
    if len(text) > MAX_BYTES or json_pieces(text) > JSON_PIECES:
        size = f"{len(text):,} bytes and {json_pieces(text):,} values; a file may have {MAX_BYTES:,} and {JSON_PIECES:,}"
        raise ReplayError(f"the replay for {path} is too long to be read again ({size}); record fewer steps")
    return write_atomically(path, text + "\n")


def load_replay(path: str | Path) -> dict[str, Any]:
    """The replay in a file. Anything else is refused with `CorruptFileError`, in one line."""
    if Path(path).is_dir():
        raise CorruptFileError(f"{path} is a directory; name the replay file in it")
    blob = read_bytes(path, limit=MAX_BYTES)
    with untrusted(f"{path} is no replay that can be read"):
        try:
            data = read_json(blob.decode("utf-8-sig"))  # an editor may have put a byte order mark before it
        except UnicodeDecodeError as error:
            raise ValueError(f"it is no UTF-8 text (byte {error.start:,})") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"it is cut short or no JSON ({error})") from None
        return _checked(data)


def check_replay(data: Any) -> dict[str, Any]:
    """The data as they are, if they are a replay of version 1; else `CorruptFileError` says what is wrong and where."""
    with untrusted("this is no replay"):
        return _checked(data)


def _checked(data: Any) -> dict[str, Any]:
    if type(data) is not dict or data.get("format") != FORMAT:
        found = repr(data.get("format"))[:60] if type(data) is dict else type(data).__name__
        raise ReplayError(f'its "format" is {found} and not "{FORMAT}"')
    if type(data.get("version")) is not int or data["version"] != VERSION:
        raise ReplayError(f"it has version {data.get('version')!r:.40} of the format, and this inchworm reads {VERSION}; update inchworm")
    _keys(data, "the replay", ("format", "version", "world", "meta", "frames", "result"))
    _check_world(data["world"])
    _check_meta(data["meta"], len(data["world"]["teams"]))
    _check_frames(data["frames"], data["world"])
    _check_result(data["result"])
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
        _check_unit(unit, f"world.units[{number}]")
    _whole(world["max_steps"], "world.max_steps", 1, MAX_STEPS)
    _number(world["step_seconds"], "world.step_seconds", 1e-4, 3600)


def _check_unit(unit: Any, where: str) -> None:
    _keys(unit, where, ("team", "kind", "max_health", "radius", "range", "arc"))
    _whole(unit["team"], f"{where}.team", 0, 1)
    _text(unit["kind"], f"{where}.kind")
    _number(unit["max_health"], f"{where}.max_health", 1e-6, FAR)
    _number(unit["radius"], f"{where}.radius", 0, FAR)
    _number(unit["range"], f"{where}.range", 0, FAR)
    _number(unit["arc"], f"{where}.arc", 0, math.tau + 1e-6)


def _check_meta(meta: Any, teams: int) -> None:
    if type(meta) is not dict:
        raise ReplayError(f"meta is {type(meta).__name__} and no mapping")
    _plain(meta, "meta", META_DEPTH)
    if "players" in meta:
        for number, player in enumerate(_list(meta["players"], "meta.players", teams, teams)):
            _text(player, f"meta.players[{number}]")


def _plain(value: Any, where: str, depth: int) -> None:
    """Text, numbers, true, false and null in lists and mappings, not too deep."""
    if depth == 0:
        raise ReplayError(f"meta is more than {META_DEPTH} levels deep")
    if type(value) is dict:
        for name, inner in value.items():
            _text(name, f"a name in {where}", 0)
            _plain(inner, where, depth - 1)
    elif type(value) is list:
        for inner in value:
            _plain(inner, where, depth - 1)
    elif type(value) is str:
        _text(value, f"a text in {where}", 0)
    elif type(value) is int:
        _whole(value, f"a number in {where}", -EXACT, EXACT)
    elif value is not None and type(value) is not bool:
        _number(value, f"a number in {where}", -math.inf, math.inf)


def _check_frames(frames: Any, world: dict[str, Any]) -> None:
    units = len(world["units"])
    limits = [unit["max_health"] * (1 + 1e-6) for unit in world["units"]]
    for number, frame in enumerate(_list(frames, "frames", 1, world["max_steps"] + 1)):
        where = f"frames[{number}]"
        _keys(frame, where, ("units", "score", "shots"))
        for row, limit in zip(_list(frame["units"], f"{where}.units", units, units), limits):
            _check_row(row, limit, where)
        for score in _list(frame["score"], f"{where}.score", 2, 2):
            _number(score, f"{where}.score", -FAR, FAR)
        for shot in _list(frame["shots"], f"{where}.shots", 0, MAX_SHOTS):
            shooter, target, hit = _list(shot, f"{where}.shots", 3, 3)
            _whole(shooter, f"{where}.shots: the shooter", 0, units - 1)
            _whole(target, f"{where}.shots: the target", 0, units - 1)
            _whole(hit, f"{where}.shots: hit", 0, 1)


def _check_row(row: Any, limit: float, where: str) -> None:
    x, y, facing, health, cooldown = _list(row, f"{where}.units", 5, 5)
    for value in (x, y, facing):
        _number(value, f"{where}.units: a place or facing", -FAR, FAR)
    _number(health, f"{where}.units: a health", 0, limit)
    _number(cooldown, f"{where}.units: a cooldown", 0, FAR)


def _check_result(result: Any) -> None:
    """Null where the game was not played to its end."""
    if result is None:
        return
    _keys(result, "result", ("winner", "reason"))
    if result["winner"] is not None:
        _whole(result["winner"], "result.winner", 0, 1)
    if type(result["reason"]) is not str or result["reason"] not in REASONS:
        raise ReplayError(f"result.reason is {result['reason']!r:.40}; it must be one of {', '.join(REASONS)}")


def _keys(value: Any, where: str, names: tuple[str, ...]) -> None:
    if type(value) is not dict:
        raise ReplayError(f"{where} is {type(value).__name__} and no mapping")
    if len(value) != len(names) or any(name not in value for name in names):
        missing = [name for name in names if name not in value]
        strange = [name for name in value if name not in names]
        raise ReplayError(f"{where} lacks {missing[0]}" if missing else f"{where} has the unknown entry {strange[0]!r:.40}")


def _list(value: Any, where: str, least: int, most: int) -> list[Any]:
    if type(value) is not list:
        raise ReplayError(f"{where} is {type(value).__name__} and no list")
    if not least <= len(value) <= most:
        wanted = f"{least}" if least == most else f"{least} to {most:,}"
        raise ReplayError(f"{where} has {len(value):,} entries; there must be {wanted}")
    return value


def _number(value: Any, where: str, low: float, high: float) -> None:
    """A finite number within bounds. (Comparisons with NaN are false, so it is none.)"""
    if type(value) not in (float, int) or not low <= value <= high or value in (math.inf, -math.inf):
        raise ReplayError(f"{where} is {value!r:.40}; it must be a number" + ("" if math.isinf(high) else f" from {low:g} to {high:g}"))


def _whole(value: Any, where: str, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ReplayError(f"{where} is {value!r:.40}; it must be a whole number from {low} to {high}")


def _text(value: Any, where: str, least: int = 1) -> None:
    """Text of bounded length that UTF-8 can hold: a lone half of a surrogate pair cannot be written to a page."""
    if type(value) is not str or not least <= len(value) <= LONG_TEXT:
        raise ReplayError(f"{where} is {value!r:.40}; it must be text of at most {LONG_TEXT:,} characters")
    if not value.isascii() and value.encode("utf-8", "replace").decode() != value:
        raise ReplayError(f"{where} holds half a character")


MARK = "<!-- inchworm replay -->"
"""In the first line of every page, so that a command knows whose page it replaces."""

_HIDDEN = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
_EXACT_IN_JAVASCRIPT = 2**53


def replay_page(replay: Mapping[str, Any]) -> str:
    """The page for a replay, checked first: whoever opens it sees the game, offline."""
    data = check_replay(dict(replay))
    template, style, script = (files("inchworm.worlds").joinpath("replay_assets", name).read_text(encoding="utf-8") for name in _PARTS)
    parts = {
        "mark": MARK,
        "style": style,
        "script": script,
        "style-hash": _hash(style),
        "script-hash": _hash(script),
        "data": embedded({**data, "meta": _shown(data["meta"])}),
    }
    # In one pass, so that nothing inside a part is taken for a place to fill.
    return re.sub(r"\{\{([a-z-]+)\}\}", lambda match: parts[match.group(1)], template)


_PARTS = ("page.html", "page.css", "page.js")


def embedded(data: Any) -> str:
    """JSON that can stand in a script element: ASCII alone, and nothing that ends the element or begins a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&]", lambda match: _HIDDEN[match.group()], text)


def _hash(text: str) -> str:
    """What a Content-Security-Policy calls an inline element by."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _shown(value: Any) -> Any:
    """Plain data in which whole numbers that JavaScript would round, as it does large seeds, are text."""
    if type(value) is dict:
        return {name: _shown(inner) for name, inner in value.items()}
    if type(value) is list:
        return [_shown(inner) for inner in value]
    return str(value) if type(value) is int and abs(value) > _EXACT_IN_JAVASCRIPT else value
