"""`inchworm video`, and `--video` of `inchworm evaluate`: the episodes that are scored, as a file; wrong use is one line."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from doubles.painted import images
from inchworm.cli import evaluate as module


@pytest.fixture(autouse=True)
def short(run: Path) -> None:
    """Episodes of the run's evaluations end after 4 steps: 5 images to draw."""
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("max_episode_steps: null\n  baseline", "max_episode_steps: 4\n  baseline"))
    assert "max_episode_steps: 4" in path.read_text()


def test_the_video_is_of_the_first_episodes_that_evaluate_scores(cli: Any, run: Path) -> None:
    scored = json.loads(cli("evaluate", "small", "--json").out)
    done = cli("video", "small", "--episodes", 2, "--quiet")
    assert done.out.startswith("runs/small/replays/policy.mp4: mean return "), done.err
    assert len(images(run / "replays" / "policy.mp4")) == sum(scored["lengths"][:2]) + 2
    assert "replays/policy.mp4" in (cli("report", "small"), (run / "report.html").read_text())[1]
    assert cli("evaluate", "small", "--video", "first.gif").out.endswith("\nvideo: first.gif\n")
    both = cli("evaluate", "small", "--json", "--video", "first.mp4")
    assert json.loads(both.out) == scored
    assert len(images("first.mp4")) == scored["lengths"][0] + 1


def test_of_a_policy_file_a_checkpoint_or_with_other_settings(cli: Any, run: Path) -> None:
    cli("video", "runs/small/best_policy.safetensors", "--quiet")
    assert Path("best_policy.mp4").is_file()
    Path("elsewhere.safetensors").write_bytes((run / "policy.safetensors").read_bytes())
    flags = ["--out", "a.mp4", "--seed", 3, "--sampled", "--fps", 20, "--max-episode-steps", 3, "--best"]
    assert "mean return 3 (1 sampled episode), mean length 3" in cli("video", "small", *flags).out
    assert len(images("a.mp4")) == 4
    checkpoint = max((run / "checkpoints").iterdir())
    for name in ("elsewhere.safetensors", checkpoint):
        done = cli("video", name, "--env", "CartPole-v1", "--out", "b.gif", "--max-episode-steps", 2)
        assert done.out.startswith("b.gif: mean return 2 (1 greedy episode)"), done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["video"], "no run is given; type: inchworm video RUN"),
        (["video", "smal"], "there is no run smal; nearest in runs: small"),
        (["video", "small", "--out", "a.avi"], "a video is an .mp4 or a .gif file, and a.avi is not"),
        (["video", "small", "--fps", "0"], "fps=0 must be from 0.1 to 240"),
        (["video", "small", "--episodes", "0"], "evaluation.episodes=0 must be 1 or more"),
        (["video", "small", "--best", "--last"], "--best and --last exclude each other"),
        (["video", "small", "--env", "gymnax:CartPole-v1"], "gymnax:CartPole-v1 cannot be recorded"),
        (["video", "small", "--env", "doubles.painted:Blind"], "doubles.painted:Blind cannot be recorded"),
        (["video", "small", "--env", "Nowhere-v1"], "is not registered"),
        (["video", "small", "--env", "doubles.painted:Painted"], "was made for the observation space"),
        (["evaluate", "small", "--video", "a.avi"], "a video is an .mp4 or a .gif file, and a.avi is not"),
        (["evaluate", "small", "--suite", "x.yaml", "--video", "a.gif"], "--video and --suite exclude each other"),
        (["evaluate", "small", "--env", "doubles.painted:Blind", "--video", "a.gif"], "doubles.painted:Blind cannot be recorded"),
    ],
)
def test_wrong_use_is_one_line(refused: Any, run: Path, arguments: list[str], message: str) -> None:
    refused(message, *arguments)
    assert not (run / "replays").exists()
    assert not Path("a.gif").exists()


def test_without_the_extra_the_line_to_type(refused: Any, cli: Any, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    refused('needs PyAV; type: pip install "inchworm[video]", or write a .gif', "video", "small")
    assert cli("video", "small", "--out", "a.gif").code == 0


def test_a_window_is_opened_where_there_is_a_display(cli: Any, refused: Any, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    if sys.platform.startswith("linux"):
        refused("there is no display to show a window on (DISPLAY is not set)", "evaluate", "small", "--render")
    shown: list[Any] = []
    monkeypatch.setattr(module, "check_display", lambda: None)
    monkeypatch.setattr(module, "show_video", lambda source, episodes: shown.append((source.name, len(episodes[0].actions))))
    assert cli("evaluate", "small", "--render").code == 0
    assert shown == [("CartPole-v1", 4)]


def test_the_seeds_of_evaluations_can_be_listed(cli: Any, refused: Any, small: list[str]) -> None:
    own = [*small, "--run.name=own", "--evaluation.seeds", "11", "12", "13", "--evaluation.episodes=3", "--quiet"]
    assert cli("train", "CartPole-v1", *own).code == 0
    assert json.loads(cli("evaluate", "own", "--json").out)["seeds"] == [11, 12, 13]
    assert json.loads(cli("evaluate", "own", "--json", "--episodes", 2).out)["seeds"] == [11, 12]
    assert 11 not in json.loads(cli("evaluate", "own", "--json", "--seed", 2, "--episodes", 5).out)["seeds"]
    more = json.loads(cli("evaluate", "own", "--json", "--episodes", 5).out)["seeds"]
    assert len({*more}) == 5, "as the end of its training says: inchworm evaluate own --episodes 100"
    assert not {11, 12, 13} & {*more}
    assert "5 greedy episodes)" in cli("video", "own", "--episodes", 5, "--out", "five.gif").out
    both = "evaluation.episodes=20 and evaluation.final_episodes=100; set evaluation.episodes=3 and evaluation.final_episodes=3 or 0"
    refused(both, "train", "CartPole-v1", "--evaluation.seeds", 11, 12, 13)
