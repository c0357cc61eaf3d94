"""Delivery of a run's metrics and files to trackers, in a process of its own that reads what the JSONL tracker wrote.

```
RUN/tracking/   lock   mlflow.json   wandb.json   …      what each tracker has received
```
A tracker that fails, hangs or comes back can neither slow nor stop the training. Each has a thread, and a file with the position of the
last row it has received. Rows are written to that file before they are sent, with their times, so that after a failure, or a kill at any
moment, the same rows are sent again and the tracker can recognise them. Nothing is lost and nothing is repeated, also if a resumed run
writes rows again that were delivered before: a row is known by its number of env steps.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import select
import shlex
import subprocess
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inchworm.config.sections import MlflowConfig, TrackingConfig, TrainingConfig, WandbConfig
from inchworm.core.errors import ConfigError, CorruptFileError, InchwormError, MissingExtraError
from inchworm.core.protocols import Tracker
from inchworm.core.tensor_file import make_directory, read_bytes, read_json, untrusted, write_atomically
from inchworm.tracking.jsonl import METRICS, TIMING
from inchworm.tracking.mlflow import MlflowSink
from inchworm.tracking.sinks import CsvSink, Row, RunFacts, Sink, TensorBoardSink, WandbSink, explain

FILES = (METRICS, TIMING)
ARTEFACTS = ("config.yaml", "versions.json", "policy*.safetensors", "best_policy*.safetensors", "*.html", "*.png", "*.svg", "*.pdf")
"""Files of a run that trackers receive at the end of a training, where they exist."""

POLL_SECONDS, MOST_POLL_SECONDS, RETRY_SECONDS = 1.0, 10.0, 30.0
"""How often new rows are looked for at first, and later in a training; the longest time between two attempts after a failure."""

_BATCH = 20_000
"""About how many values are read and sent between two positions, which are synced to disk: small batches let the training wait for it."""
_EXTRA_SECONDS = 5.0
"""How much longer than `tracking.finish_seconds` the process may live before it is killed."""


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
        spec = importlib.util.find_spec(name) if name != "csv" else None
        if name != "csv" and (spec is None or spec.origin is None):  # a folder wandb/ in the current directory is not the package
            raise MissingExtraError(f'tracking.{name} needs {name}, which is not installed; type: pip install "inchworm[{name}]"')


def artefacts(directory: Path) -> list[Path]:
    """The files of a run that trackers receive, each once."""
    found = {path for pattern in ARTEFACTS for path in directory.glob(pattern)}
    return sorted(path for path in found if path.is_file() and not path.is_symlink())


@dataclass
class Reader:
    """Reads the rows of a file after a position, also those that are written later. A file that was cut back is read from its beginning."""

    path: Path
    step: int = -1
    """Env steps of the last row before the position."""
    count: int = 0
    """Number of rows with this step up to it: the final evaluation has the same step as the last iteration."""
    _offset: int = field(default=0, repr=False)
    _inode: int = field(default=0, repr=False)
    _seen: tuple[int, int] = field(default=(-1, 0), repr=False)

    def read(self, most_values: int = sys.maxsize) -> list[tuple[int, dict[str, float]]]:
        """The next complete rows, as (step, values), with about `most_values` values in all."""
        found: list[tuple[int, dict[str, float]]] = []
        if not self.path.exists():
            return found
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._inode, self._offset, self._seen = status.st_ino, 0, (-1, 0)
            file.seek(self._offset)
            while most_values > 0 and (line := file.readline()).endswith(b"\n"):
                self._offset += len(line)
                try:
                    row = dict(json.loads(line))
                    step = int(row.pop("env_steps"))
                except (ValueError, TypeError, KeyError, RecursionError):  # damaged
                    continue
                self._seen = step, self._seen[1] + 1 if step == self._seen[0] else 1
                if self._seen > (self.step, self.count):
                    self.step, self.count = self._seen
                    numbers = {str(name): float(value) for name, value in row.items() if type(value) in (int, float)}
                    if self.count > 1 or self.path.name != METRICS:
                        numbers.pop("iteration", None)  # the first row of the step has it
                    found.append((step, numbers))
                    most_values -= len(numbers)
        return found


class Delivery:
    """What one tracker has received of a run, and the next of it."""

    def __init__(self, name: str, sink: Sink, run: RunFacts, target: str = "") -> None:
        """`target` is what the tracker is: another server, or another project, begins with the first row."""
        self.name, self._sink, self._run, self._opened = name, sink, run, False
        self.path = run.folder / f"{name}.json"
        fresh = {"target": target, "number": 0, "rows": {}, "pending": [], "files": {}, "ended": False, "sink": {"id": uuid.uuid4().hex}}
        self.state: dict[str, Any] = fresh
        if self.path.exists():
            with untrusted(f"{self.path} is damaged; remove it to deliver everything again"):
                found = read_json(read_bytes(self.path).decode())
                self.state = {**fresh, **found} if found["target"] == target else fresh
        self._readers = self._make_readers()
        self.is_ours: Callable[[], bool] = lambda: True
        """Whether the run is still the one that is delivered: a training with --overwrite begins another in its directory."""

    def _make_readers(self) -> dict[str, Reader]:
        return {file: Reader(self._run.directory / file, *self.state["rows"].get(file, (-1, 0))) for file in FILES}

    def save(self) -> None:
        """Write the position."""
        if not self.is_ours():
            raise InchwormError(f"{self._run.directory} was removed or overwritten while it was delivered")
        write_atomically(self.path, json.dumps(self.state))

    def pump(self) -> bool:
        """Deliver the next batch of rows; return whether there was one."""
        state = self.state
        if not state["pending"]:
            now = int(time.time() * 1000)
            for file, reader in self._readers.items():
                for step, values in reader.read(_BATCH // 2):
                    state["pending"].append([file, step, state["number"], now, values])
                    state["number"] += 1
                state["rows"][file] = [reader.step, reader.count]
            if not state["pending"]:
                return False
            state["ended"] = False
        self._open()
        self._sink.send([Row(*row) for row in state["pending"]])
        state["pending"] = []
        self.save()
        return True

    def _open(self) -> None:
        """Save what is about to be sent, and the id under which the run is made there; open the sink, unless it is open."""
        self.save()
        if not self._opened:
            self._sink.open(self._run, self.state["sink"])
            self._opened = True
            self.save()

    def finish(self) -> None:
        """Deliver the files that have changed, and end the run there."""
        changed = self._changed_files()
        if self.state["ended"] and not changed:
            return
        self._open()
        for path, digest in changed.items():
            self._sink.send_file(path)
            self.state["files"][path.name] = digest
            self.save()
        self._sink.finish()
        self.state["ended"] = True
        self.save()

    def _changed_files(self) -> dict[Path, str]:
        """The files that have not been delivered as they are now, with their checksums."""
        digests = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in artefacts(self._run.directory)}
        return {path: digest for path, digest in digests.items() if self.state["files"].get(path.name) != digest}

    def left(self) -> str:
        """What has not been delivered yet, such as `12 rows and 3 files`; empty if nothing is left."""
        rows = len(self.state["pending"]) + sum(len(reader.read()) for reader in self._make_readers().values())
        counts = {"row": rows, "file": len(self._changed_files())}
        parts = [f"{count:,} {what}{'' if count == 1 else 's'}" for what, count in counts.items() if count]
        return " and ".join(parts) or ("" if self.state["ended"] else "the end of the run")

    def reset(self) -> None:
        """Close the sink at the end, or after a failure: the next attempt opens it again."""
        self._opened = False
        with contextlib.suppress(Exception):
            self._sink.close()


def make_deliveries(run: RunFacts, tracking: TrackingConfig) -> list[Delivery]:
    """One delivery for each tracker that is on. None of their packages is imported before the sink is opened."""
    wandb, mlflow = tracking.wandb, tracking.mlflow
    made: dict[str, tuple[Callable[[], Sink], list[Any]]] = {
        "csv": (CsvSink, []),
        "tensorboard": (TensorBoardSink, []),
        "wandb": (lambda: WandbSink(wandb), [wandb.project, wandb.entity, wandb.mode == "offline"]),
        "mlflow": (lambda: MlflowSink(mlflow), [mlflow.uri or os.environ.get("MLFLOW_TRACKING_URI", ""), mlflow.experiment]),
    }
    deliveries = []
    for name in tracking.sinks:
        make, target = made[name]
        digest = hashlib.sha256(json.dumps(target).encode()).hexdigest()  # the environment's URI may have a password
        deliveries.append(Delivery(name, make(), run, digest))
    return deliveries


def deliver(run: RunFacts, tracking: TrackingConfig, ending: threading.Event, warn: Callable[[str], None]) -> None:
    """Deliver rows as they are written until `ending` is set, then the rest, for `tracking.finish_seconds` at most.

    `warn` is called once for a tracker that fails. A thread that hangs is left behind: the caller ends the process.
    """
    with _locked(run.folder, ending) as is_ours:
        threads = []
        for delivery in make_deliveries(run, tracking):
            delivery.is_ours = is_ours
            threads.append(threading.Thread(target=_deliver_one, args=(delivery, ending, tracking.finish_seconds, warn), daemon=True))
            threads[-1].start()
        ending.wait()
        deadline = time.monotonic() + tracking.finish_seconds
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _deliver_one(delivery: Delivery, ending: threading.Event, finish_seconds: float, warn: Callable[[str], None]) -> None:
    """Deliver to one tracker, in its thread; after a failure again and again, less often."""
    delay, warned, deadline = POLL_SECONDS, False, None
    while deadline is None or time.monotonic() < deadline:
        ends = ending.is_set()  # before rows are read, so that the last ones are not missed
        if ends and deadline is None:
            deadline = time.monotonic() + finish_seconds
        try:
            while delivery.pump():
                pass
            delay = min(1.5 * delay, MOST_POLL_SECONDS)  # many rows at a time cost less than a few often
            if ends:
                delivery.finish()
                delivery.reset()
                return
        except InchwormError as error:  # trying again would not help
            warn(str(error))
            return
        except Exception as error:
            if not warned:
                warn(f"{delivery.name}: {explain(error)}; training continues, and what is missing is delivered when it works again")
            warned = True
            delivery.reset()
            delay = min(2 * delay, RETRY_SECONDS)
        if ends:
            time.sleep(POLL_SECONDS)
        else:
            ending.wait(delay)


@contextlib.contextmanager
def _locked(folder: Path, ending: threading.Event) -> Iterator[Callable[[], bool]]:
    """Be the only process that delivers this run, and yield a function that tells whether the run is still there.

    The process of a training that was killed may still be finishing.
    """
    make_directory(folder)
    path = folder / "lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if ending.is_set():
                    raise InchwormError(f"{folder.parent} is being delivered by another process; wait for it") from None
                ending.wait(0.2)
        yield lambda: path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor))
    finally:
        os.close(descriptor)


def describe_left(run: RunFacts, tracking: TrackingConfig) -> str:
    """A line on what trackers have not received yet and how to deliver it; empty if they have everything."""
    try:
        left = {delivery.name: text for delivery in make_deliveries(run, tracking) if (text := delivery.left())}
    except CorruptFileError as error:
        return str(error)
    name = run.name if run.runs.name == "runs" else str(run.directory)
    what = ", ".join(f"{text} to {tracker}" for tracker, text in left.items())
    return f"not delivered yet: {what}; type: inchworm ship {shlex.quote(name)}" if left else ""


def ship(directory: Path, config: TrainingConfig, warn: Callable[[str], None]) -> str:
    """Deliver a run now, in this process; return what could not be delivered, in a line."""
    run, ending = RunFacts(directory, config.to_dict()), threading.Event()
    ending.set()
    deliver(run, config.tracking, ending, warn)
    return describe_left(run, config.tracking)


class Shipping:
    """The process that delivers a run, as its training sees it. Its warnings are passed on by a thread."""

    def __init__(self, directory: Path, config: TrainingConfig) -> None:
        """Start the process. If that fails there is a warning, and `inchworm ship RUN` delivers later."""
        self._run, self._tracking = RunFacts(directory, config.to_dict()), config.tracking
        self._process: subprocess.Popen[bytes] | None = None
        home = str(Path(__file__).parents[2])  # the package may not be installed
        code = f"import sys; sys.path.append({home!r}); from inchworm.tracking.shipping import main; main()"
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        task = {"directory": str(directory.resolve()), "config": self._run.config}
        try:
            # A session of its own: Ctrl-C ends the training, and what it wrote is still delivered.
            self._process = subprocess.Popen([sys.executable, "-P", "-c", code], start_new_session=True, **pipes)
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(task).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            warnings.warn(f"the trackers' process could not be started: {error}", stacklevel=3)
        self._listener = threading.Thread(target=self._listen, name="inchworm shipping", daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        for line in (self._process and self._process.stdout) or ():
            with contextlib.suppress(ValueError):
                warnings.warn(str(json.loads(line)), stacklevel=1)

    def release(self) -> None:
        """Let it deliver the rest on its own, without waiting: the training was interrupted or has failed."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def finish(self) -> None:
        """Wait until everything is delivered, for `tracking.finish_seconds`; warn about what is left then."""
        self.release()
        if self._process is not None:
            try:
                self._process.wait(self._tracking.finish_seconds + _EXTRA_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._listener.join(_EXTRA_SECONDS)
            if self._process.stdout is not None:
                self._process.stdout.close()
        if left := describe_left(self._run, self._tracking):
            warnings.warn(left, stacklevel=3)


def main() -> None:
    """The process itself: its task is the first line of stdin, which ends with the training, also if that is killed."""
    trainer = os.getppid()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # packages print
    with contextlib.suppress(OSError):
        os.nice(19)  # the training comes first
    task = json.loads(sys.stdin.readline())
    ending, lock = threading.Event(), threading.Lock()

    def warn(text: str) -> None:
        with lock, contextlib.suppress(OSError):  # the training may be gone
            answers.write(json.dumps(text) + "\n")
            answers.flush()

    def wait_for_end() -> None:
        while not select.select([0], [], [], 1.0)[0] and os.getppid() == trainer:  # a forked child may keep the pipe open
            pass
        ending.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    try:
        deliver(RunFacts(Path(task["directory"]), task["config"]), TrackingConfig.from_dict(task["config"]["tracking"]), ending, warn)
    except InchwormError as error:
        warn(str(error))
    finally:
        os._exit(0)  # a thread may hang
