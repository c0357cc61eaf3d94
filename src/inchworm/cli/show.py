"""`inchworm config ENV`, `inchworm replay FILE` and `inchworm version`: commands that show something."""

from __future__ import annotations

import errno
import inspect
import sys
import tempfile
import typing
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import yaml

from inchworm.cli.arguments import Metavar, TrainOptions, UsageError, parse, parse_with_config, resolve_config
from inchworm.cli.main import OK
from inchworm.config.reading import ConfigBase, config_class, dump_yaml, field_docs
from inchworm.config.sections import TrainingConfig
from inchworm.core.errors import CorruptFileError
from inchworm.core.tensor_file import read_bytes, write_atomically
from inchworm.env.registry import find_preset
from inchworm.run.directory import versions
from inchworm.tracking.console import make_terminal
from inchworm.worlds.replay import MARK, MAX_BYTES, load_replay, replay_page

PROG_CONFIG, PROG_REPLAY = "inchworm config", "inchworm replay"


def run_config(arguments: Sequence[str]) -> int:
    """Print the config that `inchworm train` would use, as YAML that `train --config` reads."""
    options, changes = parse_with_config(TrainOptions, arguments, PROG_CONFIG)
    config = resolve_config(options.env, options.config, changes, PROG_CONFIG, options.preset)
    sys.stdout.write(commented_yaml(config, options.preset))
    return OK


def commented_yaml(config: TrainingConfig, size: str | None = None) -> str:
    """Return the config as YAML, with the meaning of each field; `size` is that of `--preset`."""
    preset = find_preset(config.env.id)
    if size is not None:
        lines = [f"# the config of size {size}, which is not tuned for {config.env.id}"]
    elif preset is None:
        lines = [f"# {config.env.id} has no preset: these are the defaults"]
    elif config != preset.config:
        lines = [f"# the preset of {config.env.id}, changed"]
    else:
        lines = [f"# the preset of {config.env.id}" + (f", which reaches {preset.score}" if preset.score else "")]
    hints = typing.get_type_hints(TrainingConfig)
    for name, section in config.to_dict().items():
        if name == "policies":
            lines += ["", f"# {field_docs(TrainingConfig)[name]}", dump_yaml({name: section}).strip()]
            continue
        lines += ["", f"# {inspect.getdoc(hints[name])}", f"{name}:"]
        docs = field_docs(hints[name])
        for key, value in section.items():
            entry = yaml.safe_dump({key: value}, default_flow_style=True, sort_keys=False, width=10**6)  # {key: value} on one line
            lines.append(f"  {entry.strip()[1:-1]}  # {docs[key]}")
    return "\n".join(lines) + "\n"


@config_class("--")
class ReplayOptions(ConfigBase):
    """Watch a recorded game: writes a self-contained HTML page and opens it."""

    file: Annotated[str, Metavar("FILE", positional=True)] = ""
    """The replay, as `inchworm evaluate --save-replay` writes it."""
    out: Annotated[str | None, Metavar("PAGE")] = None
    """The page to write; by default next to the replay, with the suffix .html."""
    open: bool = True
    """Open the page in the browser; --no-open only writes it."""


def run_replay(arguments: Sequence[str]) -> int:
    """Write the page, print its path, and open it."""
    options = parse(ReplayOptions, arguments, PROG_REPLAY)
    if not options.file:
        raise UsageError(f"no replay is given; type: {PROG_REPLAY} FILE")
    source = Path(options.file)
    try:
        text = replay_page(load_replay(source))
    except OSError as error:
        raise UsageError(f"cannot read the replay {source}: {error.strerror or error}") from error
    if options.out is None:
        page = _write_next_to(source, text)
    else:
        page = Path(options.out)
        if page.exists() and page.samefile(source):
            raise UsageError(f"--out {page} is the replay itself; name another file")
        if page.is_dir():
            raise UsageError(f"--out {page} is a directory; name a file in it")
        write_atomically(page, text)
    opened = not options.open or open_page(page.resolve().as_uri())
    make_terminal().print(f"{page}" if opened else f"{page}; no browser was found, open the page yourself")
    return OK


def open_page(address: str) -> bool:
    """Open a page in the browser; return whether there is one."""
    with suppress(webbrowser.Error, OSError):
        return webbrowser.open(address)
    return False


def _write_next_to(source: Path, text: str) -> Path:
    """Write the page next to the replay, or to a new temporary directory if that is not writable."""
    page = source.with_suffix(".html")
    if page.exists():
        first_line = b""
        with suppress(CorruptFileError, OSError):
            first_line = read_bytes(page, limit=10 * MAX_BYTES).partition(b"\n")[0]
        if MARK.encode() not in first_line:
            raise UsageError(f"{page} exists and is not the page of a replay; add --out PAGE to write another file")
    try:
        return write_atomically(page, text)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
    return write_atomically(Path(tempfile.mkdtemp(prefix="inchworm-replay-")) / page.name, text)


def run_version(arguments: Sequence[str]) -> int:
    """Print the versions of everything that affects a result, one per line."""
    if arguments:
        raise UsageError(f"unexpected argument {arguments[0]}; inchworm version takes none")
    sys.stdout.write("".join(f"{name} {version or 'not installed'}\n" for name, version in versions().items()))
    return OK
