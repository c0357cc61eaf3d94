"""The entry point: every outcome is an exit code and a clear line; signals at any moment."""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from inchworm.cli import main as entrance
from inchworm.cli.main import COMMANDS, exit_code, leaving, main, raise_if_received, terminable
from inchworm.config.reading import LegacyNameWarning
from inchworm.core.errors import BadNumberError, ConfigError, MissingExtraError

SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
NUMBERS = [number for number, _ in SIGNALS]


def pretend(monkeypatch: pytest.MonkeyPatch, action: Callable[[], int]) -> None:
    """Make every command do `action` instead."""
    commands = {f"run_{name.replace('-', '_')}": lambda _: action() for name in COMMANDS}
    monkeypatch.setattr(entrance.importlib, "import_module", lambda _: SimpleNamespace(**commands))


def raising(error: BaseException) -> Callable[[], int]:
    def action() -> int:
        raise error

    return action


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_the_overview_names_every_command_and_each_has_its_function(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    out = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"\n  {name} " in out
        assert callable(getattr(importlib.import_module(f"inchworm.cli.{command.module}"), f"run_{name.replace('-', '_')}"))


def test_an_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == "inchworm: unknown command trian; did you mean inchworm train?\n"
    assert main(["frobnicate"]) == 2
    assert "commands: train, evaluate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no"), 2),
        (MissingExtraError("pip install x"), 2),
        (BadNumberError("nan"), 1),
        (OSError("disk"), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(0), 0),
    ],
)
def test_errors_become_exit_codes_and_one_line(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, raising(error))
    assert main(["train"]) == code
    assert capsys.readouterr().err == (f"inchworm: {error}\n" if isinstance(error, Exception) else "")
    assert main(["train", "--debug"]) == code
    assert ("Traceback" in capsys.readouterr().err) == isinstance(error, Exception)
    pretend(monkeypatch, raising(ZeroDivisionError("ours")))
    with pytest.raises(ZeroDivisionError):  # a defect keeps its traceback
        main(["train"])


def test_warnings_are_one_line_each_and_printed_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def action() -> int:
        for _ in range(2):
            warnings.warn("lr is called\n  learning_rate \x1b[2J here", LegacyNameWarning, stacklevel=1)
        return 0

    pretend(monkeypatch, action)
    assert main(["train"]) == 0
    assert capsys.readouterr().err == "warning: lr is called learning_rate here\n"


def test_the_current_directory_is_importable_but_shadows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    pretend(monkeypatch, lambda: 0)
    main(["train"])
    assert sys.path[-1] == str(tmp_path)


def test_help_and_config_import_no_learning_framework() -> None:
    code = (
        "import sys; from inchworm.cli.main import main; main([]); light = set(sys.modules); main(['config', 'CartPole-v1']);"
        "main(['train', '--help']); print(light & {'numpy', 'gymnasium', 'torch', 'pydantic', 'rich'}, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines()[-1] == "set() False"


@pytest.mark.parametrize("arguments", [["config", "CartPole-v1"], ["--help"], ["train", "--help"], ["version"]])
def test_a_reader_that_has_gone_makes_no_traceback(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "inchworm", *arguments], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=300, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_each_signal_interrupts_with_its_code_and_handlers_are_restored(
    number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def action() -> int:
        raise_if_received()  # nothing yet
        signal.raise_signal(number)
        return 0

    before = [signal.getsignal(each) for each in NUMBERS]
    pretend(monkeypatch, action)
    assert main(["train"]) == code
    with pytest.raises(KeyboardInterrupt):
        raise_if_received()
    assert [signal.getsignal(each) for each in NUMBERS] == before
    with terminable():  # forgotten
        assert exit_code() == 130


def test_a_signal_that_other_code_turned_into_an_error_still_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    def action() -> int:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        raise ImportError("interrupted half-way")

    pretend(monkeypatch, action)
    assert main(["train"]) == 143


def test_other_signals_go_to_the_current_handler_of_ctrl_c_and_ignored_ones_stay_ignored() -> None:
    pressed: list[int] = []
    with terminable():
        signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))  # as training does
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)
    assert pressed == [signal.SIGINT, signal.SIGINT]
    assert exit_code() == 143
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with terminable():
            signal.raise_signal(signal.SIGHUP)
            raise_if_received()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_process_without_ctrl_c_can_be_terminated() -> None:
    """A script's background processes ignore SIGINT; SIGTERM must end them all the same."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with terminable(), pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert exit_code() == 143
    finally:
        signal.signal(signal.SIGINT, before)


def test_outside_the_main_thread_signals_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = [signal.getsignal(each) for each in NUMBERS], list[object]()

    def action() -> int:
        seen.extend(signal.getsignal(each) for each in NUMBERS)
        return 0

    pretend(monkeypatch, action)
    thread = threading.Thread(target=main, args=(["train"],))
    thread.start()
    thread.join()
    assert seen == before


def test_closing_is_cut_short_only_if_it_takes_long() -> None:
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
    for seconds, expected in (("0", (0, "saved\nclosed\n")), ("90", (143, "saved\n"))):
        done = subprocess.run([sys.executable, "-c", script, seconds], capture_output=True, text=True, timeout=300)
        assert (done.returncode, done.stdout) == expected


def test_broken_streams_do_not_prevent_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Broken())
    monkeypatch.setattr(sys, "stderr", None)
    with leaving():
        pass
