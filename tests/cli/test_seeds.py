"""`inchworm train ENV --seeds N`, and `inchworm resume` of several seeds."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from doubles.seeds import train_here
from inchworm.core.types import SeedEvent
from inchworm.run.bundle import Bundle
from inchworm.tracking.jsonl import read_rows
from inchworm.train.seed_trainers import ProcessTrainer

FILES = ("metrics.jsonl", "policy.safetensors", "best_policy.safetensors")


@pytest.fixture
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train the seeds in this process, which is faster."""
    monkeypatch.setattr(ProcessTrainer, "__call__", lambda _, bundle, seeds: train_here(bundle, seeds))


def test_seeds_are_trained_as_single_runs_and_summarised(cli: Any, small: list[str], trained: Path, tmp_path: Path) -> None:
    result = cli("train", "CartPole-v1", *small, "--seeds", 2, "--run.name=many", "--jobs=2")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[:2] == ["training CartPole-v1 for 256 steps with 2 seeds (0 to 1), run runs/many", "2 processes at a time"]
    assert sum("seeds done)" in line for line in lines) == 2
    summary = json.loads((tmp_path / "runs/many/summary.json").read_text())
    scores = [row["score"] for row in summary["seeds"]]
    low, high = sorted(scores)
    assert lines[-4] == (
        f"score: interquartile mean {sum(scores) / 2:.5g} [{low:.5g}, {high:.5g}] of final evaluations (95 % bootstrap interval)"
    )
    assert lines[-3] == "run:   runs/many (report.html, summary.md, summary.json, seed-0, …)"
    assert "many: 2 seeds" in (tmp_path / "runs/many/report.html").read_text()
    assert lines[-2] == f"next:  inchworm evaluate runs/many/seed-{scores.index(high)} --episodes 100"
    assert lines[-1] == "       inchworm resume many --total-timesteps 512"
    for name in FILES:
        assert (tmp_path / "runs/many/seed-0" / name).read_bytes() == (trained / name).read_bytes()
    assert cli("evaluate", "many/seed-1", "--episodes", 2).code == 0


@pytest.mark.usefixtures("_here")
def test_resume_continues_all_seeds_with_a_new_target_and_the_same_command_adds_some(cli: Any, small: list[str], tmp_path: Path) -> None:
    flags = ["train", "CartPole-v1", *small, "--run.name=many", "--quiet"]
    assert cli(*flags, "--seeds=1", "--seed=4").code == 0
    assert "with the seeds 4, 7, run runs/many" in cli(*flags[:-1], "--seeds=1", "--seed=7").out
    resumed = cli("resume", "many", "--total-timesteps=320")
    assert resumed.code == 0, resumed.err
    assert [read_rows(tmp_path / f"runs/many/seed-{seed}/metrics.jsonl")[-1]["env_steps"] for seed in (4, 7)] == [320, 320]
    shutil.rmtree(tmp_path / "runs/many/seed-7")
    assert "1 of 2 seeds are done already" in cli("resume", "runs/many").out


def test_a_factory_must_be_typed_again(cli: Any, refused: Any, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_seeds.py").write_text("import gymnasium\n\n\ndef make_env():\n    return gymnasium.make('CartPole-v1')\n")
    result = cli("train", "my_seeds:make_env", *small, "--run.name=mine", "--seeds=1", "--evaluation.final-episodes=0", "--quiet")
    assert (result.code, result.err) == (0, "")
    refused("add --env my_seeds:make_env", "resume", "mine")
    result = cli("resume", "mine", "--env=my_seeds:make_env", "--total-timesteps=320")
    assert (result.code, result.err) == (0, "")
    assert "inchworm resume mine --env my_seeds:make_env --total-timesteps 640" in result.out


@pytest.mark.usefixtures("_here")
def test_wrong_use_of_seeds_is_one_line(refused: Any, cli: Any, small: list[str], run: Path) -> None:
    refused("--jobs is the number of seeds that are trained at a time; add --seeds N", "train", "CartPole-v1", "--jobs=2")
    refused("--together is about several seeds; add --seeds N", "train", "CartPole-v1", "--together")
    numpy = ["train", "CartPole-v1", *small, "--backend=numpy", "--seeds=2", "--run.name=wrong"]
    refused("cannot be trained together: run.backend=numpy does not compile whole iterations", *numpy, "--together")
    refused("small is a single run; leave it out", "resume", "small", "--jobs=2")
    refused("small is a single run; use another run.name", "train", "CartPole-v1", *small, "--seeds=2", "--run.name=small")
    refused("--seeds=0 must be 1 or more", "train", "CartPole-v1", "--seeds=0")
    refused("--profile is for a single run", "train", "CartPole-v1", "--seeds=2", "--profile")
    assert cli("train", "CartPole-v1", *small, "--seeds=1", "--run.name=many", "--quiet").code == 0
    refused("--profile is for a single run, and many has several seeds", "resume", "many", "--profile")
    refused("ppo.gamma: 0.98 → 0.5", "resume", "many", "--ppo.gamma=0.5")
    refused("run.seed: 0 → 3", "resume", "many", "--seed=3")
    refused("runs/many holds the runs of several seeds; name one of them, such as many/seed-0", "evaluate", "many")
    refused("add --seeds N to continue them", "train", "CartPole-v1", *small, "--run.name=many")
    refused("larger than the rollout", "train", "CartPole-v1", "--seeds=2", "--run.name=wrong", "--ppo.minibatch-size=100000")
    assert not Path("runs/wrong").exists()
    assert cli("train", "CartPole-v1", *small, "--seeds=1", "--run.name=many", "--ppo.gamma=0.5", "--overwrite", "--quiet").code == 0


def test_failed_seeds_and_evaluations_are_reported_and_make_the_exit_code(
    cli: Any, small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Any, bundle: Bundle, seeds: Sequence[int]) -> Generator[SeedEvent, None, None]:
        for event in train_here(bundle, seeds):
            if event.kind == "done" and event.seed == 1:
                event = SeedEvent(1, "failed", text="a wire came loose")
            yield event._replace(failures=["the scoring world ended"]) if event.kind == "done" else event

    monkeypatch.setattr(ProcessTrainer, "__call__", fails)
    flags = ["train", "CartPole-v1", *small, "--run.name=many"]
    result = cli(*flags, "--seeds=2")
    assert result.code == 1
    assert result.err.splitlines() == [
        "seed 0: an evaluation failed: the scoring world ended",
        "inchworm: seed 1 failed: a wire came loose",
    ]
    assert result.out.splitlines()[-1] == "next:  inchworm resume many"
    assert cli("train", "CartPole-v1", *small, "--run.name=other", "--seeds=1").code == 3


@pytest.mark.usefixtures("_here")
def test_resuming_one_of_seeds_that_were_trained_together_is_marked(cli: Any, small: list[str], tmp_path: Path) -> None:
    assert cli("train", "CartPole-v1", *small, "--seeds=2", "--run.name=many", "--quiet").code == 0
    alone = ["resume", "many/seed-1", "--total-timesteps=320", "--quiet"]
    assert cli(*alone).err == ""
    page = tmp_path / "runs/many/bundle.yaml"
    page.write_text(page.read_text().replace("together: false", "together: true"))
    result = cli(*alone[:2], "--total-timesteps=384", "--quiet")
    assert result.code == 0
    assert "warning: seed-1 was trained in one program with the other seeds of its bundle" in result.err
    assert "results will no longer be bit-identical" in result.err


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_saves_all_seeds_and_says_how_to_continue(tmp_path: Path, number: signal.Signals, code: int, cli: Any) -> None:
    flags = ["--run.name=long", "--run.total-timesteps=100000000", "--ppo.rollout-steps=128", "--seeds=3", "--jobs=2"]
    rows = [tmp_path / f"runs/long/seed-{seed}/metrics.jsonl" for seed in range(2)]
    options: dict[str, Any] = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    deadline = time.monotonic() + 120
    with subprocess.Popen([sys.executable, "-m", "inchworm", "train", "CartPole-v1", *flags], **options) as process:
        try:
            while any(len(read_rows(path)) < 3 for path in rows):
                assert time.monotonic() < deadline
                assert process.poll() is None, process.communicate()
                time.sleep(0.05)
            process.send_signal(number)
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
    assert (process.returncode, err) == (code, "stopping 2 running seeds after their iterations; press again to stop now\n")
    assert out.splitlines()[-2:] == ["interrupted; every seed that had begun is saved. To continue:", "  inchworm resume long"]
    result = cli("resume", "long", "--total-timesteps=1024", "--evaluation.final-episodes=0", "--quiet")
    assert result.code == 0, result.err
    for path in rows:
        iterations = [row["iteration"] for row in read_rows(path)]
        assert iterations == list(range(1, len(iterations) + 1))
