"""Serves B1: replays, which are JSON without a checksum: cut, swollen, nested, of other types and ranges, and full of markup."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from doubles.replays import PWNED, hostile_replay, long_replay, small_replay
from faults.hostile_cases import Case, Sandbox, at
from faults.hostile_checkpoints import become
from faults.hostile_payloads import payloads

CHANGES: dict[str, tuple[str, Any]] = {
    "another format": ("format", "os.system"),
    "version 2": ("version", 2),
    "version true": ("version", True),
    "version 1.0": ("version", 1.0),
    "no world": ("world", ...),
    "world as text": ("world", "os.system"),
    "classes in the world": ("world.__class__", "os.system"),
    "a width of 10^308": ("world.width", 1e308),
    "a height of 0": ("world.height", 0),
    "10^6 walls": ("world.walls", [[0, 0, 1, 1]] * 100_000),
    "walls as text": ("world.walls", "1234"),
    "a zone of null": ("world.zone", None),
    "100,000 units": ("world.units", [small_replay()["world"]["units"][0]] * 50_000),
    "no units": ("world.units", []),
    "team -1": ("world.units.0.team", -1),
    "team __proto__": ("world.units.0.team", "__proto__"),
    "a kind of 10 MB": ("world.units.0.kind", "x" * 10_000_000),
    "a kind that is half a character": ("world.units.0.kind", "\ud800"),
    "10^30 steps": ("world.max_steps", 10**30),
    "steps of no time": ("world.step_seconds", 0),
    "frames as a mapping": ("frames", {"0": {}}),
    "no frames": ("frames", []),
    "a frame of null": ("frames.1", None),
    "a unit at 10^308": ("frames.1.units.0.0", 1e308),
    "a unit at text": ("frames.1.units.0.0", "</script>"),
    "a unit at a list": ("frames.1.units.0.0", [[]]),
    "negative health": ("frames.1.units.0.3", -1),
    "a shot by unit 10^9": ("frames.1.shots.0.0", 10**9),
    "a shot by unit -1": ("frames.1.shots.0.0", -1),
    "a shot by a constructor": ("frames.1.shots.0.0", "constructor"),
    "100,000 shots": ("frames.1.shots", [[0, 1, 1]] * 100_000),
    "meta 1,000 deep": ("meta.deep", json.loads("[" * 900 + "]" * 900)),
    "meta of 10^30": ("meta.seed", 10**30),
    "players as a mapping": ("meta.players", {"0": "a", "length": 2}),
    "a result of text": ("result", "won"),
    "an unknown winner": ("result.winner", 7),
    "an unknown reason": ("result.reason", "__proto__"),
}
TEXTS = {
    "nothing": "",
    "null": "null",
    "deep": "[" * 100_000,
    "deep maps": '{"a":' * 50_000,
    "wide": "[" + "[]," * 5_000_000 + "[]]",
    "wide maps": '{"format":"inchworm-replay","x":[' + "{}," * 240_000 + "{}]}",
    "doubled": '{"format":"inchworm-replay","format":"inchworm-replay"}',
    "NaN": '{"format":NaN}',
    "1e999": json.dumps(small_replay()).replace("20.0", "1e999"),
    "10,000 digits": '{"format":' + "9" * 10_000 + "}",
    "cut off": json.dumps(small_replay())[:-100],
    "40 MB of blanks": " " * 40_000_000,
    "15 MB of one text": '{"format":"' + "x" * 15_000_000 + '"}',
    "not UTF-8": '{"format":"\udcff"}',
    "UTF-16": "\udcff\udcfe{\0}\0",
    "code": "__import__('os').system('touch canary')",
}


def replay_cases() -> Iterator[Case]:
    """Each opened by the loader, whose result becomes a page, and many by the command."""
    contents: dict[str, bytes] = {name: text.encode("utf-8", "surrogateescape") for name, text in TEXTS.items()}
    contents |= {name: json.dumps(at(small_replay(), *change)).encode() for name, change in CHANGES.items()}
    for name, content in contents.items():
        yield Case(f"replay: {name}", "replay", lambda box, content=content: box.put("x.json", content))
        yield Case(f"inchworm replay: {name}", "command", lambda box, content=content: _command(box, content))
    for name in payloads(Path("x")):
        yield Case(f"{name} as a replay", "replay", lambda box, name=name: box.put("x.json", payloads(box.canary)[name]))
        yield Case(f"inchworm replay: {name}", "command", lambda box, name=name: _command(box, payloads(box.canary)[name]))
    for what in ("fifo", "/dev/zero", "directory"):
        yield Case(f"replay is {what}", "replay", lambda box, what=what: f"{become(box.inside, 'x.json', what)}/x.json")
    yield from _pages()


def _pages() -> Iterator[Case]:
    """Replays that are in order, in places that are not; and texts that a page must not obey."""
    whole = json.dumps(small_replay()).encode()
    yield Case("inchworm replay: markup everywhere", "command", lambda box: _command(box, json.dumps(hostile_replay()).encode()), True)
    yield Case("replay: as long as may be", "replay", lambda box: box.put("x.json", json.dumps(long_replay(3_400, 10))), True)
    climbing = at(at(small_replay(), "world.game", "../../victim"), "meta.players", ["/etc/passwd", PWNED])
    yield Case("inchworm replay: names that climb", "command", lambda box: _command(box, json.dumps(climbing).encode()), True)
    for what in ("fifo", "/dev/zero", "directory", "victim"):
        yield Case(f"inchworm replay: the page is {what}", "command", lambda box, what=what: _in_the_way(box, whole, what))
        yield Case(
            f"inchworm replay: --out is {what}", "command", lambda box, what=what: [*_in_the_way(box, whole, what), "--out", "x.html"], True
        )


def _command(box: Sandbox, content: bytes) -> list[str]:
    box.put("x.json", content)
    return ["replay", "x.json", "--no-open"]


def _in_the_way(box: Sandbox, content: bytes, what: str) -> list[str]:
    """The command, with something else where its page would go."""
    become(box.inside, "x.html", str(box.victim) if what == "victim" else what)
    return _command(box, content)
