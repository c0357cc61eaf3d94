"""`inchworm report`, `watch`, `plot`, `doctor`, `audit` and `runs` as commands, and what `train` leaves at its end."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from doubles.run_files import write_run
from inchworm.cli.main import main

TRAIN = ["train", "CartPole-v1", "--quiet", "--total-timesteps", "1024", "--ppo.rollout-steps", "32", "--evaluation.interval", "0"]
TRAIN += ["--evaluation.final-episodes", "2"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_training_ends_with_a_report_and_the_doctor(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [word for word in TRAIN if word != "--quiet"]
    assert main([*arguments, "--run.name", "sick", "--ppo.learning-rate", "0", "--total-timesteps", "2048"]) == 0
    printed = capsys.readouterr().out
    assert "doctor: " in printed
    assert "The learning rate is zero, so nothing is learned" in printed
    assert "best_policy.safetensors, report.html, metrics.jsonl" in printed
    assert 'class="badge finished"' in Path("runs/sick/report.html").read_text()
    assert main([*TRAIN, "--run.name", "quiet", "--run.report", "false"]) == 0
    assert not Path("runs/quiet/report.html").exists()
    assert main(["doctor", "sick", "quiet"]) == 0
    assert "sick: " in capsys.readouterr().out


def test_a_report_that_cannot_be_written_is_a_warning(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/full/report.html").mkdir(parents=True)
    Path("runs/full/report.html/file").touch()
    (here / "runs/full/report.html").rename(here / "blocked")
    assert main([*TRAIN, "--run.name", "full"]) == 0
    Path("runs/full/report.html").unlink()
    (here / "blocked").rename("runs/full/report.html")
    assert main(["resume", "full", "--total-timesteps", "2048", "--quiet"]) == 0
    assert "warning: no report was written: " in capsys.readouterr().err


def test_the_commands(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 1):
        write_run(here / "runs" / f"seed-{seed}", seed=seed)
    assert main(["report", "seed-0"]) == 0
    assert main(["report", "seed-0", "runs/seed-1", "--out", "both.html"]) == 0
    assert main(["plot", "seed-0", "seed-1", "--out", "curve.svg"]) == 0
    assert main(["plot", "seed-0", "--metric", "entropy", "--out", "entropy.svg"]) == 0
    assert main(["doctor", "seed-0"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "runs/seed-0/report.html",
        "both.html",
        "curve.svg",
        "entropy.svg",
        "seed-0: nothing wrong found in 20 updates",
    ]
    assert main(["runs"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"seed-0 +run +finished +200 ± 10 +10,240", printed)


def test_a_bundle_of_seeds_stands_for_its_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = here / "runs" / "many"
    for seed in (10, 2):
        write_run(bundle / f"seed-{seed}", seed=seed)
    begun = write_run(bundle / "seed-11", seed=11)
    (begun / "metrics.jsonl").unlink()
    (bundle / "bundle.yaml").touch()
    assert main(["report", "many"]) == 0
    assert main(["report", "many", "many/seed-2", "--out", "both.html"]) == 0
    assert main(["plot", "many", "--out", "curve.svg"]) == 0
    assert main(["doctor", "many"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "runs/many/report.html",
        "both.html",
        "curve.svg",
        "many/seed-2: nothing wrong found in 20 updates",
        "many/seed-10: nothing wrong found in 20 updates",
    ]
    assert "<title>many: 2 seeds</title>" in (bundle / "report.html").read_text()
    assert "<title>many: 2 seeds</title>" in Path("both.html").read_text(), "a run that is named twice is there once"
    assert main(["runs"]) == 0
    assert re.search(r"many +3 seeds +finished +206 +20,480 +\d+ s", capsys.readouterr().out), "206 is the mean of the scores 202 and 210"
    for run in bundle.glob("seed-*/metrics.jsonl"):
        run.unlink()
    assert main(["report", "many"]) == 2
    assert "runs/many holds no run with metrics yet; inchworm resume runs/many trains its seeds" in capsys.readouterr().err


def test_audit_prints_tables_and_writes_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TRAIN, "--run.name", "first", "--run.report", "false"]) == 0
    capsys.readouterr()
    arguments = ["audit", "first", "--states", "6", "--branches", "2", "--seed", "3", "--max-steps", "30", "--quiet"]
    assert main([*arguments, "--json", "found.json"]) == 0
    printed, found = capsys.readouterr().out, json.loads(Path("found.json").read_text())
    assert printed.startswith("first: policy version 4 in CartPole-v1, gamma 0.98, lambda 0.9\n6 states of 4 fresh episodes")
    assert f"{found['critic'][0]['true_mean']:.4g} (sd" in printed
    assert (found["seed"], found["branches"], found["gradient"]["parts"]) == (3, 2, 32)
    assert main(arguments) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("report", "no run is given; type: inchworm report RUN"),
        ("report nothing", "there is no run nothing"),
        ("doctor empty", "empty is not a run: it is empty"),
        ("audit", "no run is given; type: inchworm audit RUN"),
        ("audit nothing", "there is no run nothing"),
        ("audit empty", "empty is not a run: it is empty"),
        ("audit foreign", "foreign is not a run: it has no config.yaml but notes.txt"),
        ("audit one", "the run runs/one has no policy.safetensors yet"),
        ("audit one --states 0", "states=0 must be 3 or more"),
        ("audit one --json nowhere/found.json", "--json nowhere/found.json: there is no directory nowhere"),
        ("report one --out page.txt", "--out page.txt must name a file that ends in .html"),
        ("plot one --out curve.jpg", "must end in .svg, .png or .pdf"),
        ("plot one --metric entrop", "no run has the metric entrop; did you mean entropy?"),
        ("watch one --port 70000", "--port 70000 must be from 0 to 65535"),
        ("runs --delete", "name the runs: inchworm runs NAME … --delete"),
        ("runs one --delete --archive", "exclude each other"),
        ("runs nothing one", "there is no run nothing in runs; inchworm runs lists those that there are"),
        ("runs one --delete", "add --yes: there is no terminal to ask on"),
        ("runs --directory nowhere", "there is no directory nowhere"),
    ],
)
def test_wrong_use_is_one_line(here: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    write_run(here / "runs" / "one")
    Path("empty").mkdir()
    Path("foreign").mkdir()
    Path("foreign/notes.txt").touch()
    assert main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert Path("runs/one/config.yaml").exists()


def test_runs_are_removed_after_a_question(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two", "three"):
        write_run(here / "runs" / name)

    class Answers:
        def __init__(self, answer: str) -> None:
            self.answer = answer

        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            return self.answer

    monkeypatch.setattr(sys, "stdin", Answers("n\n"))
    assert main(["runs", "one", "--delete"]) == 2
    assert Path("runs/one").exists()
    monkeypatch.setattr(sys, "stdin", Answers("y\n"))
    assert main(["runs", "one", "nothing", "--delete"]) == 2
    assert Path("runs/one").exists(), "all are known before the first is deleted"
    assert main(["runs", "one", "--delete"]) == 0
    assert main(["runs", "two", "--archive", "--yes"]) == 0
    assert "delete one in runs? [y/N]" in capsys.readouterr().out
    assert sorted(entry.name for entry in Path("runs").iterdir()) == ["archive", "three"]


def test_a_port_that_is_taken_is_one_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(here / "runs" / "one")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["watch", "one", "--port", str(port)]) == 2
    assert capsys.readouterr().err == (
        f"inchworm: cannot serve the page at 127.0.0.1:{port}: Address already in use; without --port a free one is taken\n"
    )


@pytest.mark.slow
def test_watch_prints_its_address_serves_and_ends_with_ctrl_c(here: Path) -> None:
    write_run(here / "runs" / "one")
    command = [sys.executable, "-m", "inchworm", "watch", "one"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[0]
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(address, timeout=60) as answer:
            assert b"<main id=" in answer.read()
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
