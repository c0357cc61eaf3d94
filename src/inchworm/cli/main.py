"""Entry point of the command line: chooses the command and turns every outcome into an exit code and a clear line.

Nothing heavy is imported here, so that the list of commands appears at once. Exit codes: 0 success, 1 failure, 2 wrong use, 3 trained but
an evaluation failed, 130 interrupted (Ctrl-C), 143 terminated, 129 hung up (the terminal was closed).
"""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NamedTuple

from inchworm.core.errors import USAGE_ERRORS, InchwormError, SaveError, close_names, printable

OK, FAILED, WRONG_USE, EVALUATION_FAILED = 0, 1, 2, 3

_TRACEBACK = {"--traceback", "--debug"}
"""The flag, and its earlier name."""


class Command(NamedTuple):
    """A command: `run_<name>` in a module of `inchworm.cli`."""

    module: str
    summary: str
    example: str


COMMANDS = {
    "train": Command("train", "train a policy", "inchworm train CartPole-v1 --ppo.clip-coef 0.1"),
    "evaluate": Command("evaluate", "evaluate a run, or a policy file", "inchworm evaluate RUN --episodes 100"),
    "video": Command("evaluate", "record what a policy does", "inchworm video RUN --out video.mp4"),
    "match": Command("evaluate", "play two players against each other", "inchworm match RUN heuristic"),
    "resume": Command("train", "continue a run", "inchworm resume RUN --total-timesteps 200000"),
    "export": Command("evaluate", "write a policy as ONNX or NumPy", "inchworm export RUN --format numpy --out DIR"),
    "ship": Command("train", "deliver a run to trackers", "inchworm ship RUN --tracking.mlflow.uri URL"),
    "report": Command("analysis", "write a page about runs", "inchworm report RUN"),
    "watch": Command("analysis", "serve that page live while training", "inchworm watch RUN"),
    "plot": Command("analysis", "draw learning curves for a paper", "inchworm plot RUN RUN --out curve.svg"),
    "doctor": Command("analysis", "say what is likely wrong with a run", "inchworm doctor RUN"),
    "audit": Command("analysis", "measure the critic and the noise", "inchworm audit RUN"),
    "compare": Command("experiments", "compare two settings", "inchworm compare ENV --change ppo.gae_lambda=0.9"),
    "sweep": Command("experiments", "search hyperparameters", "inchworm sweep CartPole-v1 --trials 20"),
    "diff": Command("analysis", "say where two runs part", "inchworm diff RUN OTHER"),
    "runs": Command("analysis", "list runs, delete or archive some", "inchworm runs"),
    "config": Command("show", "print a complete config", "inchworm config CartPole-v1 > my.yaml"),
    "check-env": Command("check", "find problems of an environment", "inchworm check-env package.module:make_env"),
    "check-policy": Command("check", "find problems of a policy", "inchworm check-policy package.module:make_policy ENV"),
    "collect": Command("rollouts", "collect rollouts", "inchworm collect RUN --out rollout.safetensors"),
    "learn": Command("rollouts", "learn from rollout files", "inchworm learn RUN rollout.safetensors"),
    "inspect": Command("rollouts", "say what is in rollout files", "inchworm inspect rollout.safetensors --policy RUN"),
    "replay": Command("show", "watch a recorded game", "inchworm replay game.json"),
    "version": Command("show", "print the versions that affect results", "inchworm version"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Without `argv` this is the whole program, and ends even if threads are left."""
    code = _main(list(sys.argv[1:] if argv is None else argv))
    others = [thread for thread in threading.enumerate() if thread not in (threading.current_thread(), threading.main_thread())]
    if argv is None and not all(thread.daemon for thread in others):  # Python waits for those that an environment left running
        atexit.register(_exit_later(code).cancel)
    return code


def _main(arguments: list[str]) -> int:
    """Run the command that the arguments name."""
    traced = not _TRACEBACK.isdisjoint(arguments)
    arguments = [argument for argument in arguments if argument not in _TRACEBACK]
    try:
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            rows = "".join(f"  {name:<13}{command.summary:<40}{command.example}\n" for name, command in COMMANDS.items())
            _write(
                "inchworm: train agents with PPO\n\nusage: inchworm COMMAND …   (inchworm COMMAND --help lists its flags)\n\n"
                f"{rows}\n  --traceback  with any command: show the traceback of an error\n"
            )
            return OK
        name = "version" if arguments[0] in ("-V", "--version") else arguments[0]
        if name not in COMMANDS:
            near = close_names(name, COMMANDS)
            hint = f"did you mean inchworm {near[0]}?" if near else f"commands: {', '.join(COMMANDS)}"
            _write_error(f"inchworm: unknown command {name}; {hint}\n")
            return WRONG_USE
        code = _run(name, arguments[1:], traced)
        _write("")
        return code
    except KeyboardInterrupt:  # before or after the command, which handles its own
        return exit_code()


def _run(name: str, arguments: list[str], traced: bool) -> int:
    """Run a command; an error becomes one line and an exit code. A defect keeps its traceback."""
    try:
        with _one_line_warnings(), terminable():
            try:
                if os.getcwd() not in sys.path:  # so that package.module:make_env finds modules here; last, so that they shadow no library
                    sys.path.append(os.getcwd())
                module = importlib.import_module(f"inchworm.cli.{COMMANDS[name].module}")
                return int(getattr(module, f"run_{name.replace('-', '_')}")(arguments))
            except Exception as error:
                if not isinstance(error, SaveError):  # reported in any case; others may be caused by the signal
                    raise_if_received()
                raise
    except (InchwormError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # the reader of our output has gone, as `| head` does
            _silence_stdout()
            return OK
        if traced:
            traceback.print_exception(error)
        else:
            _write_error("\n".join([f"inchworm: {error}", *getattr(error, "__notes__", ())]) + "\n")
        return WRONG_USE if isinstance(error, USAGE_ERRORS) else FAILED
    except KeyboardInterrupt:
        return exit_code()
    except SystemExit as end:  # help was printed
        return end.code if isinstance(end.code, int) else OK


def _write(text: str) -> None:
    """Print and flush, so that a reader that has gone is noticed here and not at interpreter exit."""
    try:
        if sys.stdout is not None:  # as after `>&-`
            sys.stdout.write(text)
            sys.stdout.flush()
    except BrokenPipeError:
        _silence_stdout()


def _silence_stdout() -> None:
    from inchworm.tracking.console import detach

    detach(sys.stdout)


def _write_error(text: str) -> None:
    """Print to stderr if it is open, without escape sequences: a name in a file must not control the terminal."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            sys.stderr.write(printable(text))


@contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Print each warning once, on one line, without its source line."""
    seen: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        text = " ".join(printable(str(message)).split())
        if text not in seen:
            seen.add(text)
            _write_error(f"warning: {text}\n")

    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = show
        yield


# Signals

LEAVE_SECONDS = 1.5
"""How long closing may take once everything is saved; then the process exits."""

_received: list[int] = []


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, or a signal that is treated like it.

    Not a plain KeyboardInterrupt: if one passes through `exec`, as in creating a dataclass, Python exits by the signal instead of with
    our exit code, even if it was caught.
    """


def exit_code() -> int:
    """Return the exit code of the first signal, as shells have it: 130 interrupted (Ctrl-C), 143 terminated, 129 hung up."""
    return 128 + (_received[0] if _received else signal.SIGINT)


def raise_if_received() -> None:
    """Raise if a signal arrived while other code ran that may have swallowed it, such as an import."""
    if _received:
        raise Interrupted


@contextmanager
def terminable() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C. Signals belong to the main thread; in other threads nothing is changed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, _: FrameType | None) -> None:
        _received.append(number)
        raise Interrupted

    def forward(number: int, _: FrameType | None) -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a script's background process; this one must be obeyed
            interrupt(number, _)
        _received.append(number)
        signal.raise_signal(signal.SIGINT)  # to its current handler: that of training, which saves first, or `interrupt`

    _received.clear()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, interrupt if number == signal.SIGINT else forward)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit_later(code: int) -> threading.Timer:
    """Exit the process with `code` after `LEAVE_SECONDS`, unless the timer is cancelled."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.flush()
    timer = threading.Timer(LEAVE_SECONDS, os._exit, (code,))
    timer.daemon = True
    timer.start()
    return timer


@contextmanager
def leaving() -> Iterator[None]:
    """Exit the process if the block takes longer than `LEAVE_SECONDS`: everything is saved, and only closing is left."""
    timer = _exit_later(exit_code())
    try:
        yield
    finally:
        timer.cancel()
