"""The command line's entrance: chooses the command, and turns whatever happens into an exit code and a clear line.

Nothing heavy is imported here: the list of commands must appear at once. Exit codes: 0 done, 1 failed, 2 wrong use, 3 trained but an
evaluation failed on the way, 130 interrupted (Ctrl-C), 143 terminated, 129 hung up (its terminal was closed).
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

LEAVE_SECONDS = 1.5
"""How long closing may take once everything is saved: then nothing is left that would be lost by going."""

_received: list[int] = []


class Interrupted(KeyboardInterrupt):
    """A KeyboardInterrupt by its own name: where the plain one passes through `exec`, as in making a dataclass, Python ends by the

    signal instead of by our exit code, even if it was caught.
    """


def exit_code() -> int:
    """As shells have it: 130 interrupted (Ctrl-C), 143 terminated, 129 hung up."""
    return 128 + (_received[0] if _received else signal.SIGINT)


def raise_if_received() -> None:
    """Leave now if a signal came while others' code was running that may have swallowed it, such as an import."""
    if _received:
        raise Interrupted


@contextmanager
def terminable() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP become what Ctrl-C is. Signals belong to the main thread; elsewhere nothing is changed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _received.clear()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as nohup asks for
            signal.signal(number, _interrupt if number == signal.SIGINT else _pass_on)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    del frame
    _received.append(number)
    raise Interrupted


def _pass_on(number: int, frame: FrameType | None) -> None:
    """To whoever has SIGINT now: training, which saves first, or what leaves at once."""
    del frame
    _received.append(number)
    signal.raise_signal(signal.SIGINT)


@contextmanager
def leaving() -> Iterator[None]:
    """Inside, everything is saved and only closing is left: if that takes long, the process goes without."""

    def go() -> None:
        os._exit(exit_code())

    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            try:
                stream.flush()
            except (OSError, ValueError):
                continue
    timer = threading.Timer(LEAVE_SECONDS, go)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


COMMANDS = {
    "train": "train a policy:            inchworm train CartPole-v1 --ppo.clip-coef 0.1",
    "evaluate": "score a run's policy:      inchworm evaluate RUN --episodes 100",
    "match": "let two players meet:      inchworm match RUN heuristic",
    "resume": "go on with a run:          inchworm resume RUN --total-timesteps 200000",
    "config": "print a resolved config:   inchworm config CartPole-v1 > my.yaml",
    "check-env": "look for faults in an environment: inchworm check-env package.module:make_env",
    "check-policy": "look for faults in a policy: inchworm check-policy package.module:make_policy ENV",
    "collect": "gather a rollout:          inchworm collect RUN --out rollout.safetensors",
    "learn": "learn from rollout files:  inchworm learn RUN rollout.safetensors",
    "replay": "watch a recorded game:     inchworm replay game.json",
    "version": "print the versions of everything that decides a result",
}

_MODULES = {
    "train": "train",
    "evaluate": "evaluate",
    "match": "evaluate",
    "resume": "train",
    "config": "show",
    "check-env": "check",
    "check-policy": "check",
    "collect": "rollouts",
    "learn": "rollouts",
    "replay": "show",
    "version": "show",
}
"""Where each command lives: `run_<command>` in this module of `inchworm.cli`."""

OK, FAILED, WRONG_USE, EVALUATION_FAILED = 0, 1, 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        return _main(argv)
    except KeyboardInterrupt:  # before or after the command itself, which answers for its own
        return exit_code()


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        return _write(_overview())
    command = "version" if arguments[0] in ("-V", "--version") else arguments[0]
    if command not in COMMANDS:
        return _unknown(command)
    code = _run(command, arguments[1:], debug)
    _write("")
    return code


def _run(command: str, arguments: list[str], debug: bool) -> int:
    from inchworm.core.errors import ConfigError, InchwormError, MissingExtraError, SpaceError

    try:
        return _call(command, arguments)
    except (ConfigError, MissingExtraError, SpaceError) as error:
        return _complain(error, WRONG_USE, debug)
    except InchwormError as error:
        return _complain(error, FAILED, debug)
    except KeyboardInterrupt:
        return exit_code()
    except BrokenPipeError:  # whoever read our output has seen enough, as `| head` does
        _silence_stdout()
        return OK
    except OSError as error:  # a file that cannot be read or written
        return _complain(error, FAILED, debug)
    except SystemExit as end:  # help was printed
        return end.code if isinstance(end.code, int) else OK


def _call(command: str, arguments: list[str]) -> int:
    from inchworm.core.errors import InchwormError

    with _one_line_warnings(), terminable():
        try:
            _make_current_directory_importable()
            module = importlib.import_module(f"inchworm.cli.{_MODULES[command]}")
            return int(getattr(module, f"run_{command.replace('-', '_')}")(arguments))
        except InchwormError as error:
            if type(error) is not InchwormError:  # a last save that failed is told even then; the rest may be the signal's own doing
                raise_if_received()
            raise
        except Exception:
            raise_if_received()  # code that a signal hit may say so in other words, as an import does
            raise


def _complain(error: Exception, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    else:
        _write_error(f"inchworm: {error}\n")
    return code


def _write_error(text: str) -> None:
    """To stderr, if anybody listens: nothing ends because nobody does."""
    try:
        if sys.stderr is not None:
            sys.stderr.write(_without_controls(text))
    except (OSError, ValueError):
        return


def _overview() -> str:
    rows = "\n".join(f"  {name:<12} {summary}" for name, summary in COMMANDS.items())
    return (
        "inchworm: PPO in two motions, collect and learn\n\nusage: inchworm COMMAND …   (inchworm COMMAND --help says more)\n\n"
        f"{rows}\n\n  --debug    with any command: show the traceback of an error\n"
    )


def _without_controls(text: str) -> str:
    """Text without characters that a terminal obeys: a name in a file must not steer it. (As `printable`, which imports rich.)"""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def _unknown(command: str) -> int:
    import difflib

    near = difflib.get_close_matches(command, COMMANDS, n=1, cutoff=0.5)
    hint = f"did you mean inchworm {near[0]}?" if near else f"commands: {', '.join(COMMANDS)}"
    _write_error(f"inchworm: unknown command {command}; {hint}\n")
    return WRONG_USE


def _write(text: str) -> int:
    """Print, and flush now: a reader that has gone is met here, not at the interpreter's end."""
    try:
        if sys.stdout is not None:  # as after `>&-`
            sys.stdout.write(text)
            sys.stdout.flush()
    except BrokenPipeError:
        _silence_stdout()
    return OK


def _silence_stdout() -> None:
    from inchworm.tracking.console import detach

    detach(sys.stdout)


def _make_current_directory_importable() -> None:
    """So that `package.module:make_env` finds a module lying here. Last in the search, so that nothing here hides a library."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)


@contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Warnings as people read them: one line each, without the source that raised them."""
    seen: set[str] = set()

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None
    ) -> None:
        del category, filename, lineno, file, line
        text = " ".join(str(message).split())
        if text not in seen:
            seen.add(text)
            _write_error(f"warning: {text}\n")

    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = show
        yield
