"""`inchworm config ENV`: the config that `train` would use, as YAML that `train --config` reads, with what each field means."""

from __future__ import annotations

import errno
import inspect
import sys
import tempfile
import textwrap
import typing
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
import yaml

from inchworm.cli.arguments import UsageError, config_from, parse, parse_over, spelled_out
from inchworm.cli.main import OK
from inchworm.cli.train import TrainOptions
from inchworm.config.presets import PRESETS
from inchworm.config.reading import field_docs
from inchworm.config.sections import TrainingConfig
from inchworm.core.errors import CorruptFileError
from inchworm.core.tensor_file import read_bytes, write_atomically
from inchworm.run.directory import versions
from inchworm.tracking.console import make_terminal
from inchworm.worlds.replay import MARK, MAX_BYTES, load_replay, replay_page

PROG_CONFIG = "inchworm config"


def run_config(arguments: Sequence[str]) -> int:
    """Print the config."""
    arguments = spelled_out(arguments)
    options = parse_over(TrainOptions, arguments, PROG_CONFIG, config_from(TrainOptions, arguments, PROG_CONFIG))
    sys.stdout.write(commented_yaml(options.settings))
    return 0


def commented_yaml(config: TrainingConfig) -> str:
    """The config as YAML, each field with its description."""
    lines = [_origin(config)]
    hints = typing.get_type_hints(TrainingConfig)
    for name, section in config.to_dict().items():
        lines += ["", f"# {inspect.getdoc(hints[name])}", f"{name}:"]
        comments = field_docs(hints[name])
        for key, value in section.items():
            lines.append(textwrap.indent(f"{_entry(key, value)}  # {comments[key]}", "  "))
    return "\n".join(lines) + "\n"


def _origin(config: TrainingConfig) -> str:
    tuned = PRESETS.get(config.env.id)
    if tuned is None:
        return f"# {config.env.id} has no preset: these are the defaults"
    known = f", which reaches {tuned.score}" if tuned.score else ""
    return f"# the preset of {config.env.id}{known}" if config == tuned.config else f"# the preset of {config.env.id}, changed"


def _entry(key: str, value: Any) -> str:
    """`key: value` on one line; the flow style keeps nested values there too."""
    text = yaml.safe_dump({key: value}, default_flow_style=True, sort_keys=False, width=10**6)
    return text.strip()[1:-1]


PROG_REPLAY = "inchworm replay"


@dataclass(frozen=True)
class ReplayOptions:
    """Watch a recorded game: writes one HTML page that needs nothing else, and opens it."""

    file: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")] = ""
    """The replay, as `inchworm evaluate --save-replay` writes it."""
    out: Annotated[str | None, tyro.conf.arg(metavar="PAGE")] = None
    """Where the page goes; by default beside the file, with the ending .html."""
    open: bool = True
    """Open the page in the browser; --no-open only writes it."""


def run_replay(arguments: Sequence[str]) -> int:
    """Write the page, say where it is, and open it."""
    options = parse(ReplayOptions, arguments, PROG_REPLAY)
    if not options.file:
        raise UsageError(f"no replay is given; type: {PROG_REPLAY} FILE")
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


def run_version(arguments: Sequence[str]) -> int:
    """Print them, one a line."""
    if arguments:
        raise UsageError(f"unexpected argument {arguments[0]}; inchworm version takes none")
    sys.stdout.write("".join(f"{name} {version or 'not installed'}\n" for name, version in versions().items()))
    return 0
