import importlib
import os
import resource
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from inchworm.cli import main as entrance
from inchworm.cli.main import COMMANDS, main
from inchworm.config.sections import LegacyNameWarning
from inchworm.core.errors import BadNumberError, ConfigError, MissingExtraError


def pretend(monkeypatch: pytest.MonkeyPatch, action: object) -> None:
    """Make every command do `action` instead."""
    commands = {f"run_{name.replace('-', '_')}": lambda _: action() for name in COMMANDS}  # type: ignore[operator]
    monkeypatch.setattr(entrance.importlib, "import_module", lambda _: SimpleNamespace(**commands))


def raising(error: BaseException) -> object:
    def action() -> int:
        raise error

    return action


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_the_overview_names_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in COMMANDS)


def test_every_command_has_its_module() -> None:
    for command, module in entrance._MODULES.items():
        assert callable(getattr(importlib.import_module(f"inchworm.cli.{module}"), f"run_{command.replace('-', '_')}"))
    assert set(entrance._MODULES) == set(COMMANDS)


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


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pretend(monkeypatch, raising(ConfigError("no")))
    assert main(["train", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, raising(ZeroDivisionError("ours")))
    with pytest.raises(ZeroDivisionError):
        main(["train"])


def test_warnings_are_one_line_each_and_said_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def action() -> int:
        warnings.warn("lr is called\n  learning_rate here", LegacyNameWarning, stacklevel=1)
        warnings.warn("lr is called\n  learning_rate here", LegacyNameWarning, stacklevel=1)
        return 0

    pretend(monkeypatch, action)
    assert main(["train"]) == 0
    assert capsys.readouterr().err == "warning: lr is called learning_rate here\n"


def test_sigterm_ends_in_order_with_143(monkeypatch: pytest.MonkeyPatch) -> None:
    def action() -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    before = signal.getsignal(signal.SIGTERM)
    pretend(monkeypatch, action)
    assert main(["train"]) == 143
    assert signal.getsignal(signal.SIGTERM) == before


def test_outside_the_main_thread_signals_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda: 0)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(main(["train"])))
    thread.start()
    thread.join()
    assert codes == [0]


def test_the_current_directory_is_importable_but_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    pretend(monkeypatch, lambda: 0)
    main(["train"])
    assert sys.path[-1] == str(tmp_path)


def test_version_prints_what_decides_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} >= {"python", "inchworm", "numpy", "torch"}
    assert main(["version", "x"]) == 2


def child(*arguments: str, code: str = "") -> tuple[subprocess.CompletedProcess[str], float]:
    """A process of its own, and the CPU seconds it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "inchworm", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_help_takes_less_than_a_second_of_cpu(arguments: tuple[str, ...]) -> None:
    done, seconds = child(*arguments)
    assert done.returncode == 0
    assert "usage: inchworm COMMAND" in done.stdout
    assert seconds < 1.0


def test_help_and_config_import_no_learning_framework() -> None:
    code = (
        "import sys; from inchworm.cli.main import main; main([]); light = set(sys.modules); main(['config', 'CartPole-v1']);"
        "main(['train', '--help']); print(light & {'numpy', 'gymnasium', 'torch', 'pydantic', 'rich'}, 'torch' in sys.modules)"
    )
    done, _ = child(code=code)
    assert done.stdout.splitlines()[-1] == "set() False"


def test_a_reader_that_has_gone_makes_no_traceback() -> None:
    for arguments in (["config", "CartPole-v1"], ["--help"], ["train", "--help"], ["version"]):
        reading, writing = os.pipe()
        os.close(reading)
        done = subprocess.run(
            [sys.executable, "-m", "inchworm", *arguments], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
        os.close(writing)
        assert (done.returncode, done.stderr) == (0, "")
