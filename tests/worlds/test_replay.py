"""Tests of worlds/replay.py: saved replays are loaded, anything else is rejected in one line, and nothing from a file becomes markup."""

import base64
import hashlib
import json
import math
import re
import zipfile
from collections.abc import Callable
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from doubles.replays import PWNED, hostile_replay, long_replay, skirmish_replay, small_replay
from inchworm.core.errors import CorruptFileError, InchwormError
from inchworm.worlds import replay as replay_format
from inchworm.worlds.replay import MARK, MAX_BYTES, ReplayError, check_replay, embedded, load_replay, replay_page, save_replay
from inchworm.worlds.skirmish import SkirmishConfig

Change = Callable[[dict[str, Any]], Any]


TEAMS = (("scout",), ("scout", "soldier", "heavy"), ("heavy",) * 10)
GAMES = [partial(skirmish_replay, SkirmishConfig(units=units), 60) for units in TEAMS]


@pytest.mark.parametrize("make", [small_replay, long_replay, hostile_replay, *GAMES])
def test_what_is_saved_is_loaded(make: Callable[[], dict[str, Any]], tmp_path: Path) -> None:
    replay = make()
    path = save_replay(tmp_path / "new" / "game.json", replay)
    assert load_replay(path) == replay == make()
    assert any(frame["shots"] for frame in replay["frames"])
    assert path.read_bytes() == save_replay(tmp_path / "again.json", load_replay(path)).read_bytes()


def test_a_game_that_was_not_played_to_its_end_has_no_result() -> None:
    assert check_replay({**small_replay(), "result": None})["result"] is None
    assert check_replay({**small_replay(), "result": {"winner": None, "reason": "time"}})["result"]["winner"] is None


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "game.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(small_replay()).encode())
    assert load_replay(path) == small_replay()


def put(place: str, value: Any) -> Change:
    """Sets `world.units.0.kind` and the like."""

    def change(replay: dict[str, Any]) -> None:
        *way, last = [int(part) if part.isdigit() else part for part in place.split(".")]
        inner: Any = replay
        for key in way:
            inner = inner[key]
        inner[last] = value

    return change


WRONG: dict[str, tuple[Change, str]] = {
    "another format": (put("format", "other"), """"format" is 'other', not "inchworm-replay\""""),
    "no format": (lambda replay: replay.pop("format"), '"format" is None'),
    "a later version": (put("version", 2), "format version 2 is not supported (this inchworm reads 1); update inchworm"),
    "version true": (put("version", True), "format version True"),
    "no frames": (lambda replay: replay.pop("frames"), "the replay lacks frames"),
    "an unknown entry": (put("more", 1), "the replay has the unknown key 'more'"),
    "an empty game": (put("frames", []), "frames has 0 entries; there must be 1 to 101"),
    "more frames than steps": (put("world.max_steps", 2), "frames has 4 entries; there must be 1 to 3"),
    "frames as text": (put("frames", "x"), "frames is str, not a list"),
    "a frame that is a list": (put("frames.1", []), "frames[1] is list, not a mapping"),
    "a unit too few": (lambda replay: replay["frames"][2]["units"].pop(), "frames[2].units has 1 entries; there must be 2"),
    "a row too short": (lambda replay: replay["frames"][2]["units"][0].pop(), "frames[2].units has 4 entries; there must be 5"),
    "a place that is NaN": (put("frames.1.units.0.0", math.nan), "frames[1].units: a place or facing is nan"),
    "an endless place": (put("frames.1.units.0.1", math.inf), "a place or facing is inf; it must be a number from -1e+06 to 1e+06"),
    "a place that is true": (put("frames.1.units.0.1", True), "a place or facing is True"),
    "too much health": (put("frames.1.units.0.3", 10.1), "a health is 10.1; it must be a number from 0 to 10"),
    "negative cooldown": (put("frames.1.units.0.4", -0.5), "a cooldown is -0.5"),
    "three scores": (put("frames.0.score", [0, 0, 0]), "frames[0].score has 3 entries; there must be 2"),
    "a score that is null": (put("frames.0.score.1", None), "frames[0].score is None"),
    "a shooter who is not there": (put("frames.1.shots.0.0", 2), "frames[1].shots: the shooter is 2; it must be an integer from 0 to 1"),
    "half a target": (put("frames.1.shots.0.1", 0.5), "the target is 0.5"),
    "a hit that is true": (put("frames.1.shots.0.2", True), "hit is True"),
    "65 shots": (put("frames.1.shots", [[0, 1, 1]] * 65), "frames[1].shots has 65 entries; there must be 0 to 64"),
    "world as a list": (put("world", []), "world is list, not a mapping"),
    "no width": (put("world.width", 0), "world.width is 0; it must be a number from 0.001 to 10000"),
    "an endless height": (put("world.height", 1e308), "world.height is 1e+308"),
    "1,001 walls": (put("world.walls", [[0, 0, 1, 1]] * 1001), "world.walls has 1,001 entries; there must be 0 to 1,000"),
    "a wall of three": (put("world.walls.0", [0, 0, 1]), "world.walls[0] has 3 entries; there must be 4"),
    "a zone without a radius": (put("world.zone", {"x": 0, "y": 0}), "world.zone lacks radius"),
    "a negative zone": (put("world.zone.radius", -1), "world.zone.radius is -1"),
    "one team": (put("world.teams", ["blue"]), "world.teams has 1 entries; there must be 2"),
    "a team that is a number": (put("world.teams.0", 5), "world.teams[0] is 5; it must be text"),
    "no units": (put("world.units", []), "world.units has 0 entries; there must be 1 to 64"),
    "a third team": (put("world.units.0.team", 2), "world.units[0].team is 2; it must be an integer from 0 to 1"),
    "a kind without letters": (put("world.units.0.kind", ""), "world.units[0].kind is ''"),
    "a kind of a million letters": (put("world.units.0.kind", "x" * 10**6), "it must be text of at most 1,000 characters"),
    "half a character": (put("world.units.0.kind", "\ud800"), "world.units[0].kind contains a lone surrogate"),
    "no health at all": (put("world.units.0.max_health", 0), "world.units[0].max_health is 0"),
    "an arc of 7": (put("world.units.0.arc", 7), "world.units[0].arc is 7"),
    "10^30 steps": (put("world.max_steps", 10**30), "world.max_steps is 1000000000000000000000000000000; it must"),
    "no time": (put("world.step_seconds", 0), "world.step_seconds is 0"),
    "meta as a list": (put("meta", []), "meta is list, not a mapping"),
    "three players": (put("meta.players", ["a", "b", "c"]), "meta.players has 3 entries; there must be 2"),
    "players that are numbers": (put("meta.players", [1, 2]), "meta.players[0] is 1; it must be text"),
    "meta beyond JSON": (put("meta.x", {1, 2}), "a number in meta is {1, 2}; it must be a number"),
    "meta with infinity": (put("meta.x", math.inf), "a number in meta is inf; it must be a number"),
    "meta with a name of numbers": (put("meta.x", {1: 2}), "a name in meta is 1; it must be text"),
    "meta too deep": (put("meta.x", json.loads("[" * 9 + "]" * 9)), "meta is more than 8 levels deep"),
    "a result that is text": (put("result", "won"), "result is str, not a mapping"),
    "a third winner": (put("result.winner", 2), "result.winner is 2"),
    "an unknown reason": (put("result.reason", "magic"), "result.reason is 'magic'; it must be one of elimination, zone, time"),
}


@pytest.mark.parametrize("name", WRONG)
def test_whatever_is_wrong_is_said_in_one_line(name: str, tmp_path: Path) -> None:
    change, words = WRONG[name]
    replay = small_replay()
    change(replay)
    with pytest.raises(CorruptFileError) as caught:
        check_replay(replay)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200
    with pytest.raises(ReplayError):  # nor is it written
        save_replay(tmp_path / "game.json", replay)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("data", [None, [], "x", 3])
def test_other_data_are_refused(data: Any) -> None:
    with pytest.raises(CorruptFileError, match=f'"format" is {type(data).__name__}, not'):
        check_replay(data)


def test_a_file_cut_short_anywhere_says_so(tmp_path: Path) -> None:
    whole = save_replay(tmp_path / "game.json", small_replay()).read_bytes()
    path = tmp_path / "cut.json"
    for length in (*range(0, len(whole) - 2, 7), len(whole) - 3):  # the last two are the closing brace and the line's end
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptFileError, match=r"cut\.json is not a readable replay: truncated or not JSON \(.*char \d+\)\)$"):
            load_replay(path)
    path.write_bytes(whole[:-1])
    assert load_replay(path) == small_replay()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe{}", "not UTF-8 text (byte 0)"),
        (b"[]", "JSON is not an object"),
        (b'{"format":"inchworm-replay","format":"x"}', "duplicate key in JSON"),
    ],
)
def test_json_of_other_kinds_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "game.json"
    path.write_bytes(content)
    with pytest.raises(CorruptFileError) as caught:
        load_replay(path)
    assert words in str(caught.value)


def test_a_file_that_is_too_large_is_refused_by_its_size_alone(tmp_path: Path) -> None:
    path = tmp_path / "game.json"
    with path.open("wb") as file:
        file.truncate(400_000_000)
    with pytest.raises(CorruptFileError, match=f"has 400,000,000 bytes, more than the limit of {MAX_BYTES:,}"):
        load_replay(path)


def test_a_directory_and_a_missing_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(CorruptFileError, match="is a directory; name the replay file in it"):
        load_replay(tmp_path)
    with pytest.raises(FileNotFoundError):
        load_replay(tmp_path / "none.json")


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_format, "MAX_BYTES", 500)
    with pytest.raises(ReplayError, match=r"too large \(9\d\d bytes and 1\d\d values; .*record fewer steps"):
        save_replay(tmp_path / "game.json", small_replay())
    monkeypatch.undo()
    monkeypatch.setattr(replay_format, "JSON_PIECES", 100)
    with pytest.raises(InchwormError, match="record fewer steps"):
        save_replay(tmp_path / "game.json", small_replay())


def test_the_largest_games_fit(tmp_path: Path) -> None:
    """20 units for 1,000 steps: 20 x 6 + 8 values a frame are 128,000, below the limit; and reading takes a moment, not seconds."""
    path = save_replay(tmp_path / "game.json", long_replay(1000, size=10))
    assert len(load_replay(path)["frames"]) == 1001


# ---- the page
class Elements(HTMLParser):
    """Every element with its attributes, and the text of each script and style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem:
            self.texts.append((self.cdata_elem, data))

    def text(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]


def test_the_data_in_the_page_are_the_replay() -> None:
    replay = small_replay()
    data = json.loads(Elements(replay_page(replay)).text("script")[0])
    assert data["meta"].pop("seed") == "9223372036854775809"  # 2^63 + 1, which a number of JavaScript's would round
    replay["meta"].pop("seed")
    assert data == replay


def test_a_replay_is_not_changed_and_is_checked_first() -> None:
    replay = small_replay()
    replay_page(replay)
    assert replay == small_replay()
    with pytest.raises(CorruptFileError, match="lacks frames"):
        replay_page({name: value for name, value in replay.items() if name != "frames"})


def test_hostile_text_changes_no_element_of_the_page() -> None:
    plain, hostile = Elements(replay_page(small_replay())), Elements(replay_page(hostile_replay()))
    assert plain.found == hostile.found
    assert len(hostile.text("script")) == 2
    assert plain.text("script")[1] == hostile.text("script")[1]
    assert json.loads(hostile.text("script")[0])["world"]["game"] == PWNED


def test_embedded_json_cannot_end_its_element() -> None:
    text = embedded({"a": "</script><!-- & \u2028\u2029\x00é"})
    assert text.isascii()
    assert not set("<>&\x00\u2028") & set(text)
    assert json.loads(text) == {"a": "</script><!-- & \u2028\u2029\x00é"}


def test_the_policy_allows_the_page_its_own_script_and_style_and_nothing_else() -> None:
    page = Elements(replay_page(small_replay()))
    policy = next(attributes["content"] for tag, attributes in page.found if attributes.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    hashes = {
        tag: "'sha256-" + base64.b64encode(hashlib.sha256(page.text(tag)[-1].encode()).digest()).decode() + "'"
        for tag in ("script", "style")
    }
    assert rules == {
        "default-src": "'none'",
        "script-src": hashes["script"],
        "style-src": hashes["style"],
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    attributes = {name for _, found in page.found for name in found}
    assert not attributes & {"src", "href", "style", "srcset", "action", "data"}
    assert not any(name.startswith("on") for name in attributes)


def test_the_script_shows_text_as_text() -> None:
    script = Elements(replay_page(small_replay())).text("script")[1]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|fetch\(|XMLHttp|WebSocket|import\(", script)


def test_a_page_is_marked_as_ours_in_its_first_line() -> None:
    assert replay_page(long_replay(0)).partition("\n")[0] == f"<!DOCTYPE html>{MARK}"


@pytest.mark.slow
def test_the_wheel_holds_the_parts_of_the_page(tmp_path: Path) -> None:
    hatchling = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed here")
    made = next(hatchling.WheelBuilder(str(Path(__file__).parents[2])).build(directory=str(tmp_path), versions=["standard"]))
    names = zipfile.ZipFile(made).namelist()
    assert {f"inchworm/worlds/replay_assets/page.{kind}" for kind in ("html", "css", "js")} <= set(names)
