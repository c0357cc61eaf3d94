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
import json
import os
import shlex
import subprocess
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self
from urllib.parse import urlsplit

from inchworm.config.sections import TrackingConfig, TrainingConfig
from inchworm.core.errors import CorruptFileError, InchwormError, MissingExtraError
from inchworm.core.tensor_file import make_directory, read_bytes, read_json, untrusted, write_atomically
from inchworm.tracking.jsonl import METRICS, TIMING, TIMING_PREFIX
from inchworm.tracking.metrics import TIMING_GROUPS, grouped_name

FOLDER = "tracking"
FILES = (METRICS, TIMING)
ARTEFACTS = ("config.yaml", "versions.json", "policy*.safetensors", "best_policy*.safetensors", "*.html", "*.png", "*.svg", "*.pdf")
"""Files of a run that trackers receive at the end of a training, where they exist."""

POLL_SECONDS, RETRY_SECONDS = 1.0, 30.0
"""How often new rows are looked for, and the longest time between two attempts after a failure."""

_BATCH = 1_000
"""Most values in a batch: MLflow accepts no more."""
_EXTRA_SECONDS = 5.0
"""How much longer than `tracking.finish_seconds` the process may live before it is killed."""


class RunGoneError(InchwormError):
    """The run that is being delivered does not exist any more."""


class Row(NamedTuple):
    """A row of a metrics file."""

    file: str
    step: int
    number: int
    """How many rows the tracker has received before it."""
    values: Mapping[str, float]
    """By the names in the file."""

    @property
    def grouped(self) -> dict[str, float]:
        """The same by group and name: `loss/policy_loss`, `time/seconds`."""
        timing = self.file == TIMING
        return {
            grouped_name(TIMING_PREFIX + name if timing and not name.startswith(TIMING_GROUPS) else name): value
            for name, value in self.values.items()
        }


@dataclass(frozen=True)
class RunFacts:
    """What trackers know of a run besides its rows."""

    directory: Path
    config: Mapping[str, Any]
    """The run's config as plain data."""

    @property
    def name(self) -> str:
        """The name of its directory."""
        return self.directory.resolve().name

    @property
    def folder(self) -> Path:
        """Where trackers keep their files."""
        return self.directory / FOLDER


class Sink(Protocol):
    """A tracker as it is delivered to. Any method may fail: the sink is then closed, opened again, and asked for the same."""

    def open(self, run: RunFacts, state: dict[str, Any]) -> None:
        """Begin or continue the run there. `state` is kept with the position: an `id` of the run there, and what the sink adds to it."""

    def send(self, rows: Sequence[Row], milliseconds: int) -> None:
        """Deliver rows. The time is that of the first attempt, and rows may be sent again with the same number and time."""

    def send_file(self, path: Path) -> None:
        """Deliver a file of the run."""

    def finish(self) -> None:
        """Everything has been delivered, and the training has ended."""

    def close(self) -> None:
        """Release everything, without an error."""


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

    def read(self, most_values: int) -> list[tuple[int, int, dict[str, float]]]:
        """The next complete rows, as (step, count, values), with about `most_values` values in all."""
        found: list[tuple[int, int, dict[str, float]]] = []
        if not self.path.exists():
            return found
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._inode, self._offset, self._seen = status.st_ino, 0, (-1, 0)
            file.seek(self._offset)
            values = 0
            while values < most_values and (line := file.readline()).endswith(b"\n"):
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
                    found.append((*self._seen, numbers))
                    values += len(numbers)
        return found


class Delivery:
    """What one tracker has received of a run, and the next of it."""

    def __init__(self, name: str, sink: Sink, run: RunFacts, target: str) -> None:
        """`target` is what the tracker is: another server, or another project, begins with the first row."""
        self.name, self._sink, self._run = name, sink, run
        self.path = run.folder / f"{name}.json"
        self.state = self._read_state(hashlib.sha256(target.encode()).hexdigest())
        self._readers = {file: Reader(run.directory / file, *self.state["rows"].get(file, (-1, 0))) for file in FILES}
        self._opened = False
        self.is_ours: Callable[[], bool] = lambda: True
        """Whether the run is still the one that is delivered: a training with --overwrite begins another in its directory."""

    def _read_state(self, target: str) -> dict[str, Any]:
        fresh = {"target": target, "number": 0, "rows": {}, "pending": None, "files": {}, "ended": False, "sink": {"id": uuid.uuid4().hex}}
        if self.path.exists():
            with untrusted(f"{self.path} is damaged; remove it to deliver everything again"):
                found = read_json(read_bytes(self.path).decode())
                if found["target"] == target:
                    return {**fresh, **found}
        return fresh

    def save(self) -> None:
        """Write the position."""
        if not self.is_ours():
            raise RunGoneError(f"{self._run.directory} was removed or overwritten")
        write_atomically(self.path, json.dumps(self.state))

    def pump(self) -> bool:
        """Deliver the next batch of rows; return whether there was one."""
        state = self.state
        if state["pending"] is None:
            rows, number = [], state["number"]
            for file, reader in self._readers.items():
                for step, count, values in reader.read(_BATCH // 2):
                    rows.append([file, step, number, values])
                    number += 1
                    state["rows"][file] = [step, count]
            if not rows:
                return False
            state["pending"] = {"rows": rows, "milliseconds": int(time.time() * 1000)}
            state["ended"] = False
            self.save()
        self.open()
        batch = [Row(*row) for row in state["pending"]["rows"]]
        self._sink.send(batch, int(state["pending"]["milliseconds"]))
        state["number"], state["pending"] = batch[-1].number + 1, None
        self.save()
        return True

    def open(self) -> None:
        """Open the sink, unless it is open."""
        if not self._opened:
            self.save()  # the id under which the run is made there
            self._sink.open(self._run, self.state["sink"])
            self._opened = True
            self.save()

    def finish(self) -> None:
        """Deliver the files that have changed, and end the run there."""
        changed = self.changed_files()
        if self.state["ended"] and not changed:
            return
        self.open()
        for path, digest in changed.items():
            self._sink.send_file(path)
            self.state["files"][path.name] = digest
            self.save()
        self._sink.finish()
        self.state["ended"] = True
        self.save()

    def changed_files(self) -> dict[Path, str]:
        """The files that have not been delivered as they are now, with their checksums."""
        digests = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in artefacts(self._run.directory)}
        return {path: digest for path, digest in digests.items() if self.state["files"].get(path.name) != digest}

    def left(self) -> str:
        """What has not been delivered yet, such as `12 rows and 3 files`; empty if nothing is left."""
        pending = self.state["pending"]
        rows = len(pending["rows"]) if pending is not None else 0
        for file in FILES:
            rows += len(Reader(self._run.directory / file, *self.state["rows"].get(file, (-1, 0))).read(sys.maxsize))
        counts = {"row": rows, "file": len(self.changed_files())}
        parts = [f"{count:,} {what}{'' if count == 1 else 's'}" for what, count in counts.items() if count]
        return " and ".join(parts) or ("" if self.state["ended"] else "the end of the run")

    def reset(self) -> None:
        """Close the sink after a failure, so that the next attempt opens it again."""
        self._opened = False
        with contextlib.suppress(Exception):
            self._sink.close()


def make_deliveries(run: RunFacts, tracking: TrackingConfig) -> list[Delivery]:
    """One delivery for each tracker that is on."""
    from inchworm.tracking.sinks import make_sinks  # which needs the types of this module

    uri = tracking.mlflow.uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    targets = {"wandb": [tracking.wandb.project, tracking.wandb.entity, tracking.wandb.mode == "offline"]}
    targets["mlflow"] = [urlsplit(uri)._replace(netloc=urlsplit(uri).netloc.rpartition("@")[2]).geturl(), tracking.mlflow.experiment]
    return [Delivery(name, sink, run, json.dumps(targets.get(name))) for name, sink in make_sinks(tracking).items()]


def deliver(run: RunFacts, tracking: TrackingConfig, ending: threading.Event, warn: Callable[[str], None]) -> list[Delivery]:
    """Deliver rows as they are written until `ending` is set, then the rest, for `tracking.finish_seconds` at most.

    `warn` is called once for a tracker that fails. A thread that hangs is left behind: the caller ends the process.
    """
    with _locked(run.folder, ending) as is_ours:
        deliveries = make_deliveries(run, tracking)
        for one in deliveries:
            one.is_ours = is_ours
        threads = [threading.Thread(target=_deliver_one, args=(one, ending, tracking, warn), daemon=True) for one in deliveries]
        for thread in threads:
            thread.start()
        ending.wait()
        deadline = time.monotonic() + tracking.finish_seconds
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    return deliveries


def _deliver_one(delivery: Delivery, ending: threading.Event, tracking: TrackingConfig, warn: Callable[[str], None]) -> None:
    """Deliver to one tracker, in its thread; after a failure again and again, less often."""
    delay, warned, deadline = POLL_SECONDS, False, None
    while deadline is None or time.monotonic() < deadline:
        ends = ending.is_set()  # before rows are read, so that the last ones are not missed
        if ends and deadline is None:
            deadline = time.monotonic() + tracking.finish_seconds
        try:
            while delivery.pump():
                delay = POLL_SECONDS
            if ends:
                delivery.finish()
                delivery.reset()
                return
        except (MissingExtraError, RunGoneError) as error:
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


def explain(error: BaseException) -> str:
    """An error in one line, without the credentials that a URL in it may have."""
    text = " ".join(str(error).split())
    words = [
        f"{word[: word.index('//') + 2]}…{word[word.rindex('@') :]}" if "://" in word and "@" in word else word for word in text.split(" ")
    ]
    text = " ".join(words)
    return f"{type(error).__name__}: {text if len(text) <= 200 else text[:197] + '...'}"


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


def describe_left(deliveries: Sequence[Delivery], run: RunFacts) -> str:
    """A line on what trackers have not received yet and how to deliver it; empty if they have everything."""
    left = {delivery.name: text for delivery in deliveries if (text := delivery.left())}
    if not left:
        return ""
    directory = run.name if run.directory.parent.name == "runs" else str(run.directory)
    return (
        f"not delivered yet: {', '.join(f'{text} to {name}' for name, text in left.items())}; type: inchworm ship {shlex.quote(directory)}"
    )


class Shipping:
    """The process that delivers a run, as its training sees it. Its warnings are passed on by a thread."""

    def __init__(self, run: RunFacts, tracking: TrackingConfig) -> None:
        self._run, self._tracking = run, tracking
        self._process: subprocess.Popen[bytes] | None = None
        self._listener: threading.Thread | None = None

    def start(self) -> None:
        """Start to deliver. What cannot be started is a warning: `inchworm ship RUN` delivers later."""
        home = str(Path(__file__).parents[2])  # the package may not be installed
        code = f"import sys; sys.path.append({home!r}); from inchworm.tracking.shipping import main; main()"
        try:
            # A session of its own: Ctrl-C ends the training, and what it wrote is still delivered.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            task = {"directory": str(self._run.directory.resolve()), "config": self._run.config, "tracking": self._tracking.to_dict()}
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(task).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            warnings.warn(f"the trackers' process could not be started: {error}", stacklevel=3)
            self._process = None
            return
        self._listener = threading.Thread(target=self._listen, args=(self._process,), name="inchworm shipping", daemon=True)
        self._listener.start()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        for line in process.stdout or ():
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
        process, self._process = self._process, None
        if process is not None:
            try:
                process.wait(self._tracking.finish_seconds + _EXTRA_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if self._listener is not None:
                self._listener.join(_EXTRA_SECONDS)
            if process.stdout is not None:
                process.stdout.close()
        try:
            left = describe_left(make_deliveries(self._run, self._tracking), self._run)
        except CorruptFileError as error:
            left = str(error)
        if left:
            warnings.warn(left, stacklevel=3)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finish() if kind is None else self.release()


def main() -> None:
    """The process itself: the task is the first line of stdin, which ends with the training, also if that is killed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # packages print
    with contextlib.suppress(OSError):
        os.nice(10)  # the training comes first
    task = json.loads(sys.stdin.readline())
    ending, lock = threading.Event(), threading.Lock()

    def warn(text: str) -> None:
        with lock, contextlib.suppress(OSError):  # the training may be gone
            answers.write(json.dumps(text) + "\n")
            answers.flush()

    def wait_for_end() -> None:
        sys.stdin.read()
        ending.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    try:
        deliver(RunFacts(Path(task["directory"]), task["config"]), TrackingConfig.from_dict(task["tracking"]), ending, warn)
    except InchwormError as error:
        warn(str(error))
    finally:
        os._exit(0)  # a thread may hang


def ship(directory: Path, config: TrainingConfig, warn: Callable[[str], None]) -> str:
    """Deliver a run now, in this process; return what could not be delivered, in a line."""
    run, ending = RunFacts(directory, config.to_dict()), threading.Event()
    ending.set()
    deliver(run, config.tracking, ending, warn)
    return describe_left(make_deliveries(run, config.tracking), run)
