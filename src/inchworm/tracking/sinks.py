"""Trackers that write files: CSV, TensorBoard's event files, and Weights & Biases, which uploads its own; and which trackers are on.

They are called by `tracking/shipping` in its process, and import their packages when they are opened.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from inchworm.config.sections import MlflowConfig, TrackingConfig, WandbConfig
from inchworm.core.errors import ConfigError, MissingExtraError
from inchworm.core.protocols import Tracker
from inchworm.core.tensor_file import make_directory, write_atomically
from inchworm.tracking.jsonl import METRICS, TIMING
from inchworm.tracking.mlflow import MlflowSink
from inchworm.tracking.shipping import Row, RunFacts, Sink


class CsvSink:
    """`metrics.csv` and `timing.csv`: a line per row, a column per name, with the names of the JSONL files."""

    def __init__(self) -> None:
        self._columns: dict[str, list[str]] = {}

    def open(self, run: RunFacts, state: dict[str, Any]) -> None:
        """Read the columns, and cut off lines of an attempt that was not completed."""
        self._state, self._paths = state, {file: run.folder / f"{Path(file).stem}.csv" for file in (METRICS, TIMING)}
        make_directory(run.folder)
        for file, path in self._paths.items():
            lines = self._read(path)
            self._columns[file] = lines[0] if lines else []
            if lines[1 + state.get(file, 0) :]:
                self._write(path, lines[: 1 + state.get(file, 0)])

    def send(self, rows: Sequence[Row], milliseconds: int) -> None:
        """Append the rows; a name that is new becomes the last column."""
        del milliseconds
        for file, path in self._paths.items():
            table = [{"env_steps": row.step, **row.values} for row in rows if row.file == file]
            columns = self._columns[file]
            new = [name for name in dict.fromkeys(name for row in table for name in row) if name not in columns]
            if new:
                columns += new
                self._write(path, [columns, *self._read(path)[1:]])
            lines = [[row.get(name, "") for name in columns] for row in table]
            if lines:
                with path.open("ab") as out:
                    out.write(_csv_text(lines))
                    out.flush()
                    os.fsync(out.fileno())
            self._state[file] = self._state.get(file, 0) + len(lines)

    def send_file(self, path: Path) -> None:
        """The run's files are in its directory."""

    def finish(self) -> None:
        """Nothing is left to do."""

    def close(self) -> None:
        """No file is kept open."""

    @staticmethod
    def _read(path: Path) -> list[list[str]]:
        return list(csv.reader(io.StringIO(path.read_text(encoding="utf-8")))) if path.exists() else []

    @staticmethod
    def _write(path: Path, lines: Sequence[Sequence[Any]]) -> None:
        width = len(lines[0])
        write_atomically(path, _csv_text([[*line, *[""] * (width - len(line))] for line in lines]))


def _csv_text(lines: Sequence[Sequence[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue().encode()


class TensorBoardSink:
    """An event file in `tracking/tensorboard` of the run: `tensorboard --logdir runs` shows all runs."""

    _file: Any = None

    def open(self, run: RunFacts, state: dict[str, Any]) -> None:
        """Open the event file, and cut off events of an attempt that was not completed."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Any = Event
        self._state, folder = state, run.folder / "tensorboard"
        make_directory(folder)
        state.setdefault("file", f"events.out.tfevents.{int(time.time()):010d}.{state['id'][:8]}")
        self._file = (folder / state["file"]).open("ab")
        self._file.truncate(state.get("size", 0))
        self._file.seek(0, os.SEEK_END)
        self._records: Any = RecordWriter(self._file)
        if not state.get("size"):
            self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def send(self, rows: Sequence[Row], milliseconds: int) -> None:
        """Write one event per row."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        for row in rows:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in row.grouped.items()]
            self._write(self._event(wall_time=milliseconds / 1000, step=row.step, summary=Summary(value=values)))
        self._sync()

    def send_file(self, path: Path) -> None:
        """Show texts on the page of texts; event files hold no others."""
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

    def finish(self) -> None:
        """Nothing is left to do."""

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


class WandbSink:
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
            console="off", silent=True, disable_git=True, disable_code=True, x_disable_meta=True, x_disable_stats=True, init_timeout=60
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

    def send(self, rows: Sequence[Row], milliseconds: int) -> None:
        """Log the rows. W&B ignores a row whose number it has received."""
        del milliseconds
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


def make_sinks(tracking: TrackingConfig) -> dict[str, Sink]:
    """The trackers that a config turns on, by name; none of their packages is imported before a sink is opened."""
    make: dict[str, Callable[[], Sink]] = {
        "csv": CsvSink,
        "tensorboard": TensorBoardSink,
        "wandb": lambda: WandbSink(tracking.wandb),
        "mlflow": lambda: MlflowSink(tracking.mlflow),
    }
    return {name: make[name]() for name in tracking.sinks}


def with_trackers(tracking: TrackingConfig, given: Sequence[Any]) -> tuple[TrackingConfig, list[Tracker]]:
    """Split what `trackers=` takes into settings (names, `WandbConfig`, `MlflowConfig`) and trackers of the caller's own."""
    own: list[Tracker] = []
    for tracker in given:
        if tracker in ("csv", "tensorboard"):
            tracking = tracking.replace(**{tracker: True})
        elif tracker == "mlflow":
            tracking = tracking.replace(mlflow=tracking.mlflow.replace(experiment=tracking.mlflow.experiment or "inchworm"))
        elif isinstance(tracker, WandbConfig | MlflowConfig):
            tracking = tracking.replace(**{"wandb" if isinstance(tracker, WandbConfig) else "mlflow": tracker})
        elif isinstance(tracker, str) or not callable(getattr(tracker, "log", None)):
            raise ConfigError(
                f"trackers: {tracker!r:.80} is not a tracker; use csv, tensorboard, mlflow, a WandbConfig, a MlflowConfig, or an object "
                "with the methods of inchworm.Tracker"
            )
        else:
            own.append(tracker)
    return tracking, own


def check_installed(tracking: TrackingConfig) -> None:
    """Raise if a tracker's package is not installed, with the line to type."""
    for name in tracking.sinks:
        if name != "csv" and importlib.util.find_spec(name) is None:
            raise MissingExtraError(f'tracking.{name} needs {name}, which is not installed; type: pip install "inchworm[{name}]"')
