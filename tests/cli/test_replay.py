"""`inchworm replay`: the page is written, said and opened; whatever is wrong is one line."""

import errno
import json
import os
import webbrowser
from pathlib import Path
from typing import Any

import pytest

from doubles.replays import hostile_replay, small_replay
from inchworm.cli import show as command
from inchworm.core.tensor_file import write_atomically
from inchworm.worlds.replay import replay_page, save_replay


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that a browser was asked to open."""
    addresses: list[str] = []

    def open_it(address: str) -> bool:
        addresses.append(address)
        return True

    monkeypatch.setattr(webbrowser, "open", open_it)
    return addresses


@pytest.fixture
def game(tmp_path: Path) -> Path:
    return save_replay(tmp_path / "game.json", small_replay())


def test_the_page_is_written_beside_the_file_and_opened(cli: Any, game: Path, opened: list[str]) -> None:
    result = cli("replay", "game.json")
    assert (result.code, result.out, result.err) == (0, "game.html\n", "")
    page = game.with_suffix(".html")
    assert page.read_text(encoding="utf-8") == replay_page(small_replay())
    assert opened == [page.as_uri()]


def test_it_can_be_done_again(cli: Any, game: Path, opened: list[str]) -> None:
    assert [cli("replay", game).code for _ in range(2)] == [0, 0]
    assert sorted(path.name for path in game.parent.iterdir()) == ["game.html", "game.json"]


def test_out_and_no_open(cli: Any, game: Path, opened: list[str]) -> None:
    result = cli("replay", "game.json", "--no-open", "--out", "pages/one.html")
    assert (result.code, result.out) == (0, "pages/one.html\n")
    assert (game.parent / "pages" / "one.html").read_text(encoding="utf-8") == replay_page(small_replay())
    assert opened == []
    assert not game.with_suffix(".html").exists()


@pytest.mark.parametrize("failure", [None, webbrowser.Error("none"), OSError("none")])
def test_without_a_browser_it_says_where_the_page_is(
    failure: Exception | None, cli: Any, game: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_nothing(address: str) -> bool:
        if failure is not None:
            raise failure
        return False

    monkeypatch.setattr(webbrowser, "open", open_nothing)
    result = cli("replay", "game.json")
    assert (result.code, result.out) == (0, "game.html; no browser was found, open the page yourself\n")


def test_somebody_elses_page_is_not_replaced(cli: Any, game: Path, opened: list[str]) -> None:
    other = game.with_suffix(".html")
    other.write_text("<!DOCTYPE html>\nmine")
    result = cli("replay", "game.json")
    assert result.code == 2
    assert result.err == "inchworm: game.html exists and is not the page of a replay; add --out PAGE to write another file\n"
    assert other.read_text() == "<!DOCTYPE html>\nmine"
    other.unlink()
    other.mkdir()
    assert cli("replay", "game.json").code == 2
    other.rmdir()
    os.mkfifo(other)  # must not be waited for
    assert cli("replay", "game.json").code == 2
    assert opened == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_where_nothing_can_be_written_the_page_goes_to_a_temporary_place(
    number: int, cli: Any, game: Path, opened: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, text: str) -> Path:
        if Path(path).parent == Path():
            raise OSError(number, os.strerror(number), str(path))
        return write_atomically(path, text)

    monkeypatch.setattr(command, "write_atomically", write)
    monkeypatch.setattr(command.tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    result = cli("replay", "game.json")
    assert result.code == 0
    page = Path(result.out.strip())
    assert page.parent.parent == tmp_path / "temporary"
    assert page.read_text(encoding="utf-8") == replay_page(small_replay())
    assert opened == [page.as_uri()]


def test_a_full_disk_is_said(cli: Any, game: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(command, "write_atomically", full)
    result = cli("replay", "game.json")
    assert (result.code, result.err) == (1, "inchworm: [Errno 28] No space left on device: 'game.html'\n")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "no replay is given; type: inchworm replay FILE"),
        (["none.json"], 2, "cannot read the replay none.json: No such file or directory"),
        (["."], 1, ". is a directory; name the replay file in it"),
        (["game.json", "--out", "game.json"], 2, "--out game.json is the replay itself; name another file"),
        (["game.json", "--out", "."], 2, "--out . is a directory; name a file in it"),
        (["game.json", "--opne"], 2, "unknown flag --opne; did you mean --open?"),
        (["cut.json"], 1, "cut.json is not a readable replay: truncated or not JSON"),
        (["other.json"], 1, """other.json is not a readable replay: "format" is 'x\\x1b[31m'"""),
    ],
)
def test_what_is_wrong_is_one_line(arguments: list[str], code: int, words: str, cli: Any, game: Path, opened: list[str]) -> None:
    game.with_name("cut.json").write_bytes(game.read_bytes()[:200])
    game.with_name("other.json").write_text(json.dumps({"format": "x\x1b[31m"}))
    result = cli("replay", *arguments)
    assert result.code == code
    assert words in result.err
    assert result.err.count("\n") == 1
    assert opened == []
    assert not list(game.parent.glob("*.html"))


def test_names_in_a_file_become_no_path(cli: Any, tmp_path: Path, opened: list[str]) -> None:
    replay = hostile_replay()
    replay["world"]["game"] = "../../elsewhere"
    save_replay(tmp_path / "game.json", replay)
    assert cli("replay", "game.json").out == "game.html\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["game.html", "game.json"]


def test_help_names_the_flags(cli: Any) -> None:
    out = cli("replay", "--help").out
    assert all(flag in out for flag in ("FILE", "--out PAGE", "--no-open"))
