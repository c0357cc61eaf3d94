"""`inchworm replay FILE`: a recorded game as a page, opened in the browser."""

from __future__ import annotations

import errno
import tempfile
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from inchworm.cli.arguments import UsageError, parse
from inchworm.cli.main import OK
from inchworm.errors import CorruptFileError
from inchworm.files import read_bytes, write_atomically
from inchworm.replay.format import MAX_BYTES, load_replay
from inchworm.replay.page import MARK, replay_page
from inchworm.tracking.terminal import make_terminal

PROG = "inchworm replay"


@dataclass(frozen=True)
class ReplayOptions:
    """Watch a recorded game: writes one HTML page that needs nothing else, and opens it."""

    file: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")] = ""
    """The replay, as `inchworm evaluate --save-replay` writes it."""
    out: Annotated[str | None, tyro.conf.arg(metavar="PAGE")] = None
    """Where the page goes; by default beside the file, with the ending .html."""
    open: bool = True
    """Open the page in the browser; --no-open only writes it."""


def run(arguments: Sequence[str]) -> int:
    """Write the page, say where it is, and open it."""
    options = parse(ReplayOptions, arguments, PROG)
    if not options.file:
        raise UsageError(f"no replay is given; type: {PROG} FILE")
    source = Path(options.file)
    text = replay_page(_loaded(source))
    page = write_atomically(_chosen(source, Path(options.out)), text) if options.out else _beside(source, text)
    opened = options.open and _opened(page)
    told = "" if opened or not options.open else "; no browser was found here, so open it yourself"
    make_terminal().print(f"{page}{told}", markup=False)
    return OK


def _loaded(source: Path) -> dict[str, Any]:
    try:
        return load_replay(source)
    except OSError as error:
        raise UsageError(f"cannot read the replay {source}: {error.strerror or error}") from error


def _chosen(source: Path, out: Path) -> Path:
    if out.exists() and out.samefile(source):
        raise UsageError(f"--out {out} is the replay itself; name another file")
    if out.is_dir():
        raise UsageError(f"--out {out} is a directory; name a file in it")
    return out


def _beside(source: Path, text: str) -> Path:
    """Beside the replay; where nothing can be written there, in a new directory for temporary files."""
    page = source.with_suffix(".html")
    if page.exists() and not _is_ours(page):
        raise UsageError(f"{page} is there already and is no page of a replay; say where this one goes: --out PAGE")
    try:
        return write_atomically(page, text)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
    return write_atomically(Path(tempfile.mkdtemp(prefix="inchworm-replay-")) / page.name, text)


def _is_ours(page: Path) -> bool:
    with suppress(CorruptFileError, OSError):
        return MARK.encode() in read_bytes(page, limit=10 * MAX_BYTES).partition(b"\n")[0]
    return False


def _opened(page: Path) -> bool:
    try:
        return webbrowser.open(page.resolve().as_uri())
    except (webbrowser.Error, OSError):
        return False
