"""`inchworm config`, `inchworm replay` and `inchworm version`."""

import errno
import json
import os
import webbrowser
from pathlib import Path
from typing import Any

import pytest

from doubles.replays import small_replay
from inchworm.cli import show as command
from inchworm.cli.show import commented_yaml
from inchworm.config.presets import SIZES
from inchworm.config.sections import EnvConfig, TrainingConfig
from inchworm.core.tensor_file import write_atomically
from inchworm.env.registry import config_for
from inchworm.worlds.replay import replay_page, save_replay


@pytest.mark.parametrize("env", ["CartPole-v1", "Taxi-v3"])
def test_what_is_printed_is_what_train_would_use(cli: Any, tmp_path: Path, env: str) -> None:
    result = cli("config", env)
    assert (result.code, result.err) == (0, "")
    tuned = env == "CartPole-v1"
    assert result.out.startswith(
        "# the preset of CartPole-v1, which reaches 500" if tuned else "# Taxi-v3 has no preset: these are the defaults"
    )
    assert f"  gamma: {0.98 if tuned else 0.99}  # Discount of the next step's value." in result.out.splitlines()
    (tmp_path / "printed.yaml").write_text(result.out)
    assert TrainingConfig.from_yaml(tmp_path / "printed.yaml") == config_for(env)
    assert cli("config", "--config", "printed.yaml").out == result.out
    assert tuned == cli("config", env, "--ppo.gamma=0.5").out.startswith("# the preset of CartPole-v1, changed\n")


@pytest.mark.parametrize("size", SIZES)
def test_a_size_is_a_config_to_start_from(cli: Any, tmp_path: Path, size: str) -> None:
    result = cli("config", "Acrobot-v1", "--preset", size, "--ppo.gamma=0.5")
    assert result.out.startswith(f"# the config of size {size}, which is not tuned for Acrobot-v1")
    (tmp_path / "printed.yaml").write_text(result.out)
    config = SIZES[size]("Acrobot-v1")
    assert TrainingConfig.from_yaml(tmp_path / "printed.yaml") == config.replace(ppo=config.ppo.replace(gamma=0.5))


def test_nested_values_are_read_back(tmp_path: Path) -> None:
    config = TrainingConfig(env=EnvConfig(kwargs={"a": [1, {"b": "x: y # z"}], "c": "null"}))
    (tmp_path / "printed.yaml").write_text(commented_yaml(config))
    assert TrainingConfig.from_yaml(tmp_path / "printed.yaml") == config


def test_version_prints_what_affects_a_result(cli: Any) -> None:
    assert {line.split()[0] for line in cli("--version").out.splitlines()} >= {"python", "inchworm", "numpy", "torch"}
    assert cli("version", "x").code == 2


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


def test_the_page_is_written_next_to_the_file_and_opened(cli: Any, game: Path, opened: list[str]) -> None:
    page = game.with_suffix(".html")
    for _ in range(2):
        result = cli("replay", "game.json")
        assert (result.code, result.out, result.err) == (0, "game.html\n", "")
        assert page.read_text(encoding="utf-8") == replay_page(small_replay())
    assert opened == [page.as_uri()] * 2
    assert sorted(path.name for path in game.parent.iterdir()) == ["game.html", "game.json"]


def test_out_and_no_open(cli: Any, game: Path, opened: list[str]) -> None:
    assert cli("replay", "game.json", "--no-open", "--out", "pages/one.html").out == "pages/one.html\n"
    assert (game.parent / "pages" / "one.html").read_text(encoding="utf-8") == replay_page(small_replay())
    assert opened == []
    assert not game.with_suffix(".html").exists()


@pytest.mark.parametrize("failure", [None, webbrowser.Error("none"), OSError("none")])
def test_without_a_browser_the_path_is_printed(failure: Exception | None, cli: Any, game: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_nothing(address: str) -> bool:
        if failure is not None:
            raise failure
        return False

    monkeypatch.setattr(webbrowser, "open", open_nothing)
    result = cli("replay", "game.json")
    assert (result.code, result.out) == (0, "game.html; no browser was found, open the page yourself\n")


def test_another_page_is_not_replaced(refused: Any, game: Path, opened: list[str]) -> None:
    other, message = game.with_suffix(".html"), "game.html exists and is not the page of a replay; add --out PAGE to write another file"
    other.write_text("<!DOCTYPE html>\nmine")
    refused(message, "replay", "game.json")
    assert other.read_text() == "<!DOCTYPE html>\nmine"
    other.unlink()
    for make, remove in ((os.mkdir, os.rmdir), (os.mkfifo, os.unlink)):  # a pipe must not block
        make(other)
        refused(message, "replay", "game.json")
        remove(other)
    assert opened == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_where_nothing_may_be_written_the_page_goes_to_a_temporary_directory(
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
    if number == errno.ENOSPC:  # a full disk is reported
        assert (result.code, result.err) == (1, "inchworm: [Errno 28] No space left on device: 'game.html'\n")
        return
    assert result.code == 0
    page = Path(result.out.strip())
    assert page.parent.parent == tmp_path / "temporary"
    assert page.read_text(encoding="utf-8") == replay_page(small_replay())
    assert opened == [page.as_uri()]


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
def test_what_is_wrong_is_one_line(arguments: list[str], code: int, words: str, refused: Any, game: Path, opened: list[str]) -> None:
    game.with_name("cut.json").write_bytes(game.read_bytes()[:200])
    game.with_name("other.json").write_text(json.dumps({"format": "x\x1b[31m"}))
    refused(words, "replay", *arguments, code=code)
    assert opened == []
    assert not list(game.parent.glob("*.html"))
