"""Every error that inchworm raises on purpose: one family, each message says what happened, where, and what to type."""

from __future__ import annotations

import difflib
import os
import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class InchwormError(Exception):
    """Base of all errors that are about the user's input or world, not about a defect in inchworm."""


class ConfigError(InchwormError):
    """A config field that is unknown, of the wrong type, out of range, or at odds with another."""


class RolloutError(InchwormError, ValueError):
    """Rollout data that lacks a key or has a wrong shape or dtype."""


class SpaceError(InchwormError, ValueError):
    """A space that policies cannot be built for, or a value that is not in its space."""


class CorruptFileError(InchwormError):
    """A file that fails its checksum, its header or its schema."""


class BadNumberError(InchwormError, FloatingPointError):
    """An observation, reward, loss or gradient that is not finite."""


class EnvError(InchwormError):
    """An environment broke its contract."""


class WorkerError(EnvError):
    """An environment raised inside a worker process, or the worker died or hung."""


class WorkerRestartWarning(UserWarning):
    """A worker process died or hung and was replaced; the run continues with the same results."""


class RankError(InchwormError):
    """Another of the processes that learn together has ended or does not answer."""


class SaveError(InchwormError):
    """The last save of a run failed; earlier checkpoints are intact."""


class MissingExtraError(InchwormError, ImportError):
    """An optional package is not installed; the message is the pip line to type."""


USAGE_ERRORS = (ConfigError, SpaceError, MissingExtraError)
"""What is wrong before anything has begun: commands exit with code 2 and leave nothing behind."""


def close_names(name: str, known: Iterable[str], most: int = 1) -> list[str]:
    """The known names that a mistyped one may stand for: nearly equal, or longer by what follows it; none if none is close."""
    folded = {each.casefold(): each for each in known}
    near = difflib.get_close_matches(name.casefold(), folded, n=most, cutoff=0.75)
    longer = sorted(each for each in folded if len(name) > 2 and each.startswith(name.casefold()))
    if not near and (most > 1 or len(longer) == 1):  # one of many would be a guess
        near = longer[-most:]
    return [folded[each] for each in near]


_SEQUENCES = re.compile(r"(\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)")
"""Escape sequences of terminals: colours, cursor movements, titles."""


def printable(text: str) -> str:
    """Remove escape sequences, as libraries colour their messages with, and escape other characters that control a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in _SEQUENCES.sub("", text))


# Errors of the user's own code, told in a line

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = ("<frozen", *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")))


def error_text(error: BaseException, limit: int = 2_000) -> str:
    """The text of an error on one line, cut after `limit` characters; also of an error whose `__str__` raises."""
    try:
        return " ".join(str(error)[: 2 * limit].split())[:limit]
    except Exception:
        return "(its __str__ raised an error)"


def describe_error(error: BaseException) -> str:
    """An error's type and text on one line, then a line for each of the three deepest frames of the user's code, or else of libraries."""
    text = error_text(error)
    places = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in traceback.walk_tb(error.__traceback__)]
    outside = [place for place in places if not place[0].startswith(_OURS)]
    own = [place for place in outside if not place[0].startswith(_LIBRARIES)]
    frames = [f"{file}:{line} in {function}" for file, line, function in (own or outside)[-3:]]
    return "\n  at ".join([f"{type(error).__name__}{': ' if text else ''}{text}", *frames])


@contextmanager
def env_errors(where: str, call: str) -> Iterator[None]:
    """Raise what an environment's code raises as an `EnvError`; even SystemExit, so that `sys.exit()` does not end the program."""
    try:
        yield
    except InchwormError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvError(f"{where}: {call} raised {describe_error(error)}") from error
