"""Signals: each its exit code, at any moment, and nothing that was set stays set."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inchworm.cli.main import exit_code, leaving, raise_if_received, terminable

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_each_interrupts_and_has_its_code(number: signal.Signals, code: int) -> None:
    before = [signal.getsignal(each) for each in NUMBERS]
    with pytest.raises(KeyboardInterrupt), terminable():  # noqa: PT012 - before it nothing has come
        raise_if_received()
        signal.raise_signal(number)
    with pytest.raises(KeyboardInterrupt):
        raise_if_received()
    assert exit_code() == code
    with pytest.raises(KeyboardInterrupt):
        raise_if_received()
    assert [signal.getsignal(each) for each in NUMBERS] == before
    with terminable():  # forgotten
        assert exit_code() == 130


def test_what_somebody_else_made_of_ctrl_c_is_what_the_others_become() -> None:
    pressed: list[int] = []
    with terminable():
        signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))  # as training does
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)
    assert pressed == [signal.SIGINT, signal.SIGINT]
    assert exit_code() == 143


def test_what_is_ignored_stays_ignored() -> None:
    """As nohup asks for."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with terminable():
            signal.raise_signal(signal.SIGHUP)
            raise_if_received()  # nothing has come
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread_nothing_is_changed() -> None:
    before, seen = [signal.getsignal(each) for each in NUMBERS], list[object]()

    def run() -> None:
        with terminable():
            seen.extend(signal.getsignal(each) for each in NUMBERS)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == before


def test_closing_that_takes_long_is_cut_short_and_closing_that_does_not_is_left_alone() -> None:
    script = """
import signal, sys, time
from inchworm.cli import main as signals
signals.LEAVE_SECONDS = 0.2
try:
    with signals.terminable():
        signal.raise_signal(signal.SIGTERM)
except KeyboardInterrupt:
    print("saved")
    with signals.leaving():
        time.sleep(float(sys.argv[1]))
time.sleep(0.4)
print("closed")
"""
    codes = {}
    for seconds in ("0", "30"):
        done = subprocess.run([sys.executable, "-c", script, seconds], capture_output=True, text=True, timeout=20)
        codes[seconds] = (done.returncode, done.stdout)
    assert codes == {"0": (0, "saved\nclosed\n"), "30": (143, "saved\n")}


def test_streams_that_nobody_reads_do_not_keep_anybody_from_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Broken())
    monkeypatch.setattr(sys, "stderr", None)
    with leaving():
        pass


@contextlib.contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Whatever a test finds, nothing that it started stays."""
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.4, 0.8, 1.2, 1.6, 2.5])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_at_any_moment_of_the_start(tmp_path: Path, number: signal.Signals, code: int, seconds: float) -> None:
    flags = ["--run.name=x", "--run.total-timesteps=100000000", "--ppo.rollout-steps=64", "--env.num-workers=1", "--backend=torch"]
    process = subprocess.Popen(
        [sys.executable, "-m", "inchworm", "train", "CartPole-v1", *flags],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with ended(process):
        time.sleep(seconds)
        began = time.monotonic()
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert time.monotonic() - began < 10
    assert process.returncode in (code, -number), err  # the second, if Python itself had not begun yet
    assert "Traceback" not in err or process.returncode == -number


@pytest.mark.slow
def test_a_closed_terminal_saves(tmp_path: Path) -> None:
    flags = ["--run.name=x", "--run.total-timesteps=100000000", "--ppo.rollout-steps=64", "--quiet"]
    process = subprocess.Popen([sys.executable, "-m", "inchworm", "train", "CartPole-v1", *flags], cwd=tmp_path, stderr=subprocess.PIPE)
    rows, deadline = tmp_path / "runs" / "x" / "metrics.jsonl", time.monotonic() + 60
    with ended(process):
        while not rows.exists() or rows.read_bytes().count(b"\n") < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGHUP)
        _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (129, b"")
    assert len(list((tmp_path / "runs" / "x" / "checkpoints").iterdir())) == 1
