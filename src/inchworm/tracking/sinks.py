"""What a tracker of another package is here, a `Sink`; and those that write files: CSV, TensorBoard, and Weights & Biases.

Sinks are called by `tracking/shipping` in its process, and import their packages when they are opened.
"""

from __future__ import annotations

import csv
import io
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from inchworm.config.sections import WandbConfig
from inchworm.core.errors import error_text
from inchworm.core.tensor_file import make_directory, write_atomically
from inchworm.tracking.jsonl import METRICS, TIMING
from inchworm.tracking.metrics import grouped_name

FOLDER = "tracking"
"""Where trackers keep their files in the directory of a run."""


class Row(NamedTuple):
    """A row of a metrics file."""

    file: str
    step: int
    number: int
    """How many rows the tracker has received before it."""
    milliseconds: int
    """The time of the first attempt to deliver it."""
    values: Mapping[str, float]
    """By the names in the file."""

    @property
    def grouped(self) -> dict[str, float]:
        """The same by group and name: `loss/policy_loss`, `time/seconds`."""
        prefix = "time/" if self.file == TIMING else ""
        return {f"{prefix}{name}" if prefix and "/" not in name else grouped_name(name): value for name, value in self.values.items()}


@dataclass(frozen=True)
class RunFacts:
    """What trackers know of a run besides its rows."""

    directory: Path
    config: Mapping[str, Any]
    """The run's config as plain data."""

    @property
    def runs(self) -> Path:
        """The directory of all runs: the one above, or for one of several seeds the one above their bundle."""
        parent = self.directory.resolve().parent
        return parent.parent if (parent / "bundle.yaml").is_file() else parent

    @property
    def name(self) -> str:
        """The run's name in it: `first`, or `several/seed-0` for one of several seeds."""
        return str(self.directory.resolve().relative_to(self.runs))

    @property
    def folder(self) -> Path:
        """Where trackers keep their files."""
        return self.directory / FOLDER


class Sink:
    """A tracker as it is delivered to. Any method may fail: the sink is then closed, opened again, and asked for the same."""

    def open(self, run: RunFacts, state: dict[str, Any]) -> None:
        """Begin or continue the run there. `state` is kept with the position: an `id` of the run there, and what the sink adds to it."""
        raise NotImplementedError

    def send(self, rows: Sequence[Row]) -> None:
        """Deliver rows. After a failure, the same rows may be sent again."""
        raise NotImplementedError

    def send_file(self, path: Path) -> None:
        """Deliver a file of the run, at the end of a training."""

    def finish(self) -> None:
        """End the run there: everything has been delivered."""

    def close(self) -> None:
        """Release everything."""


class CsvSink(Sink):
    """`metrics.csv` and `timing.csv`: a line per row, a column per name, with the names of the JSONL files."""

    def open(self, run: RunFacts, state: dict[str, Any]) -> None:
        """Read the columns, and cut off lines of an attempt that was not completed."""
        self._state, self._columns = state, dict[str, list[str]]()
        self._paths = {file: run.folder / f"{Path(file).stem}.csv" for file in (METRICS, TIMING)}
        make_directory(run.folder)
        for file, path in self._paths.items():
            lines = self._read(path)
            self._columns[file] = lines[0] if lines else []
            if lines[1 + state.get(file, 0) :]:
                self._write(path, lines[: 1 + state.get(file, 0)])

    def send(self, rows: Sequence[Row]) -> None:
        """Append the rows; a name that is new becomes the last column."""
        for file, path in self._paths.items():
            table = [{"env_steps": row.step, **row.values} for row in rows if row.file == file]
            columns = self._columns[file]
            new = [name for name in dict.fromkeys(name for row in table for name in row) if name not in columns]
            if new:
                columns += new
                self._write(path, [columns, *self._read(path)[1:]])
            if table:
                with path.open("ab") as out:
                    out.write(_csv_text([[row.get(name, "") for name in columns] for row in table]))
                    out.flush()
                    os.fsync(out.fileno())
            self._state[file] = self._state.get(file, 0) + len(table)

    @staticmethod
    def _read(path: Path) -> list[list[str]]:
        return list(csv.reader(io.StringIO(path.read_text(encoding="utf-8")))) if path.exists() else []

    @staticmethod
    def _write(path: Path, lines: Sequence[Sequence[Any]]) -> None:
        write_atomically(path, _csv_text([[*line, *[""] * (len(lines[0]) - len(line))] for line in lines]))


def _csv_text(lines: Sequence[Sequence[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue().encode()


class TensorBoardSink(Sink):
    """An event file in `tracking/tensorboard` of the run: `tensorboard --logdir runs` shows all runs."""

    _file: Any = None

    def open(self, run: RunFacts, state: dict[str, Any]) -> None:
        """Open the event file, and cut off events of an attempt that was not completed."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._state, folder = state, run.folder / "tensorboard"
        make_directory(folder)
        state.setdefault("file", f"events.out.tfevents.{int(time.time()):010d}.{state['id'][:8]}")
        self._file = (folder / state["file"]).open("ab")
        self._file.truncate(state.get("size", 0))
        self._file.seek(0, os.SEEK_END)
        self._event, self._records = Event, RecordWriter(self._file)
        if not state.get("size"):
            self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def send(self, rows: Sequence[Row]) -> None:
        """Write one event per row."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        for row in rows:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in row.grouped.items()]
            self._write(self._event(wall_time=row.milliseconds / 1000, step=row.step, summary=Summary(value=values)))
        self._sync()

    def send_file(self, path: Path) -> None:
        """Show the config and versions on the page of texts; event files hold no other files."""
        if path.suffix not in (".yaml", ".json"):
            return
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        text = "".join(f"    {line}\n" for line in path.read_text(encoding="utf-8").splitlines())  # a block of code in Markdown
        value = Summary.Value(tag=f"{path.name}/text_summary", metadata=metadata)
        value.tensor.CopyFrom(TensorProto(dtype=DT_STRING, string_val=[text.encode()]))
        self._write(self._event(wall_time=time.time(), summary=Summary(value=[value])))
        self._sync()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._state["size"] = self._file.tell()


class WandbSink(Sink):
    """A run of Weights & Biases: online, or offline in `tracking/wandb` of the run. A resumed training continues it."""

    _run: Any = None

    def __init__(self, config: WandbConfig) -> None:
        self._config = config

    def open(self, run: RunFacts, state: dict[str, Any]) -> None:
        """Begin or continue the run there."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # to its makers
        import wandb

        folder, config = run.folder / "wandb", self._config
        make_directory(folder)
        # Nothing of this process is recorded: its arguments, code and load say nothing about the training.
        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
            init_timeout=60,
        )
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            name=config.name or run.name,
            group=config.group,
            tags=list(config.tags),
            notes=run.config["run"]["notes"] or None,
            config=dict(run.config),
            id=state["id"],
            resume="allow",
            mode=config.mode,
            dir=str(folder),
            settings=settings,
        )
        self._run.define_metric("env_steps")
        self._run.define_metric("*", step_metric="env_steps")

    def send(self, rows: Sequence[Row]) -> None:
        """Log the rows. W&B ignores a row whose number it has received."""
        for row in rows:
            self._run.log({"env_steps": row.step, **row.grouped}, step=row.number)

    def send_file(self, path: Path) -> None:
        """Log the file as an artifact."""
        import wandb

        kind = "model" if path.suffix == ".safetensors" else "file"
        artifact = wandb.Artifact(f"{self._run.id}-{path.name}".replace(" ", "-"), type=kind)
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def finish(self) -> None:
        """Wait until W&B has uploaded or written everything."""
        self._run.finish()

    def close(self) -> None:
        """End the connection."""
        if self._run is not None:
            self._run.finish()


def explain(error: BaseException) -> str:
    """An error in one line, without the credentials that a URL in it may have."""
    return f"{type(error).__name__}: {re.sub(r'//[^/@ ]+@', '//…@', error_text(error, 200))}"
