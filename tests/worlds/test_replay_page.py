"""The page as text: nothing from a file becomes markup, nothing comes from outside, and only its own script may run."""

import base64
import hashlib
import json
import re
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import pytest

from doubles.replays import PWNED, hostile_replay, long_replay, small_replay
from inchworm.core.errors import CorruptFileError
from inchworm.worlds.replay import MARK, embedded, replay_page


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
