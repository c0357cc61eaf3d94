"""Saving and restoring a training: its complete state as plain data, written in a background thread, restored bit for bit.

`Saver` takes the state of every part between two iterations and writes it as a checkpoint, with the metrics rows synced before it and the
policy file written after it. Slow, infrequent saves run in a background thread on a private copy of the state.
"""

from __future__ import annotations

import copy
import random
import shlex
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from inchworm.backends.registry import describe_policy, imported_backends, policy_files
from inchworm.collect.collector import RolloutCollector
from inchworm.config.sections import TrainingConfig
from inchworm.core.errors import BadNumberError, ConfigError, EnvError, InchwormError, SaveError
from inchworm.core.protocols import Learner, Policy, Stateful, Tracker
from inchworm.core.tensor_file import untrusted
from inchworm.policy.file import read_policy_file, save_policy, set_weights
from inchworm.policy.spec import PolicySpec
from inchworm.run.checkpoint import Checkpoint, ManifestNote, TrainingCheckpointer, load_checkpoint
from inchworm.run.directory import BEST_POLICY, POLICY, NotExactWarning, Run, binding_fields, check_config, keep_choices, versions
from inchworm.tracking.jsonl import JsonlTracker

if TYPE_CHECKING:
    from inchworm.train.loop import TrainingState

FORMAT = 2
_PARTS = {"format", "config", "weights", "learner", "collector", "state"}
_KEYS = {1: _PARTS, 2: _PARTS | {"spec", "callbacks", "trackers"}}

BACKGROUND_RATIO = 20
"""A save runs in the background if at least this many times its duration has passed since the last one. If saves are closer together, a
kill could lose several intervals, and little time would be gained."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The complete state of a training between two iterations, as plain data, and what the manifest notes about it."""

    state: Mapping[str, Any]
    process: Mapping[str, Any]
    note: ManifestNote

    @property
    def iteration(self) -> int:
        """Number of completed iterations."""
        return int(self.state["state"]["iteration"])

    @property
    def env_steps(self) -> int:
        """Env steps of these iterations."""
        return int(self.state["collector"]["env_steps"])


class SavedState(NamedTuple):
    """Which state of a run its newest checkpoint holds."""

    iteration: int
    env_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerParts:
    """The parts of a trainer that are saved and restored; functions for those that can be replaced during its life."""

    policy: Policy
    collector: RolloutCollector
    state: TrainingState
    rows: Sequence[JsonlTracker]
    """Metrics files of the run, cut back to the checkpoint on resume."""
    trackers: Sequence[Tracker]
    """Trackers given by the user, whose state is saved."""
    learner: Callable[[], Learner]
    config: Callable[[], TrainingConfig]
    keep_compile: Callable[[str], None]
    """Called with the checkpoint's `ppo.compile`, before the learner is restored: `auto` is resolved once per run."""
    inexact: Callable[[], Sequence[str]]
    """What of the environments cannot be restored exactly, a sentence each."""


def check_state(state: Mapping[str, Any], step: int, spec: Mapping[str, Any] | None) -> None:
    """Reject a state that is not a trainer's, belongs to another iteration than `step`, or to another network than `spec`."""
    keys = _KEYS.get(state.get("format"))  # type: ignore[arg-type]
    if keys is None or set(state) != keys:
        raise ConfigError(
            f"not a trainer checkpoint in a format that this inchworm reads: it holds {', '.join(sorted(state))} in format "
            f"{state.get('format')}; to load only a policy, use TrainingCheckpointer.load_policy"
        )
    if state["state"]["iteration"] != step:
        raise ConfigError(f"the checkpoint of iteration {step} holds the state of iteration {state['state']['iteration']}")
    if state.get("spec") is not None and spec is not None and _with_defaults(state["spec"]) != _with_defaults(spec):
        raise ConfigError("the checkpoint holds a different network than this trainer; pass the policy that it was made with")


def _with_defaults(spec: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A network's description with fields added in later versions; for a composite, of each part.

    None for a user's network: its class may have been moved or renamed, so only its weights are compared, when they are set.
    """
    if spec is None or "network" in spec or "policy" in spec:
        return None
    if "policies" in spec:
        return {**spec, "policies": {name: _with_defaults(part) for name, part in spec["policies"].items()}}
    return PolicySpec.from_dict(spec).to_dict()


def states_of(parts: Sequence[object]) -> list[dict[str, Any]]:
    """The state of each callback or tracker that has one, with its position and class name."""
    return [
        {"place": place, "name": type(part).__name__, "state": copy.deepcopy(part.state_dict())}  # it may return what it changes later
        for place, part in enumerate(parts)
        if isinstance(part, Stateful)
    ]


def restore_states(parts: Sequence[object], saved: Sequence[Mapping[str, Any]], what: str) -> None:
    """Restore what `states_of` returned, by position; warn where a part of another class or none is there."""
    for entry in saved:
        part = parts[entry["place"]] if 0 <= entry["place"] < len(parts) else None
        if isinstance(part, Stateful) and type(part).__name__ == entry["name"]:
            part.load_state_dict(entry["state"])
            continue
        found = "none" if part is None else f"a {type(part).__name__}"
        warnings.warn(
            f"the checkpoint holds the state of {what} {entry['place'] + 1}, a {entry['name']}, but found {found} in its place; "
            f"ignoring it: results will no longer be bit-identical. Pass the same {what}s in the same order",
            NotExactWarning,
            stacklevel=3,
        )


def generators_state() -> dict[str, Any]:
    """State of the process-wide random generators of Python, NumPy and other imported frameworks, which user code may draw from."""
    version, numbers, gauss = random.getstate()
    frameworks = {name: state() for name, backend in imported_backends().items() if (state := getattr(backend, "generator_state", None))}
    return {"random": [version, list(numbers), gauss], **frameworks}


def restore_generators(state: Mapping[str, Any]) -> None:
    """Restore what `generators_state` returned; a framework's only if this process has imported it."""
    version, numbers, gauss = state["random"]
    random.setstate((version, tuple(numbers), gauss))
    for name, backend in imported_backends().items():
        restore = getattr(backend, "restore_generator", None)
        if restore is not None and name in state:
            restore(state[name])


@contextmanager
def last_save() -> Iterator[None]:
    """Turn an `OSError` of the last save into an error that names what is left and what to do."""
    try:
        yield
    except OSError as error:
        message = "the last save of the run failed; earlier checkpoints are intact. Free some disk space, then resume"
        raise SaveError(f"{message}: {error}") from error


def process_facts(threads: int) -> dict[str, Any]:
    """What the last bits depend on besides the versions: the learning threads for `run.threads`, and the vector instructions in use.

    None if unknown: `threads` of 0 is the process's default, which is known only if a framework that has one is imported.
    """
    backends = imported_backends().values()
    counts = [count() for backend in backends if (count := getattr(backend, "num_threads", None))]
    found = [capability() for backend in backends if (capability := getattr(backend, "cpu_capability", None))]
    return {"threads": threads or (counts[0] if counts else None), "cpu_capability": found[0] if found else None}


class SaveThread:
    """Runs one save at a time: the first in the calling thread, to time it, later ones in the background if that is worthwhile."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Tests replace the clock."""
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._seconds: float | None = None  # duration of the last job
        self._started = 0.0  # time the last job started

    @property
    def busy(self) -> bool:
        """Whether a job is running in the background."""
        return self._thread is not None and self._thread.is_alive()

    def run(self, job: Callable[[], object]) -> None:
        """Run a job after the previous one has finished. Errors are raised here, or by `wait` later."""
        self.wait()
        now = self._clock()
        background = self._seconds is not None and now - self._started >= BACKGROUND_RATIO * self._seconds
        self._started = now
        if not background:
            self._timed(job)
            return

        def run_in_background() -> None:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they must wake the main thread, which may be blocked
            try:
                self._timed(job)
            except Exception as error:
                self._error = error

        self._thread = threading.Thread(target=run_in_background, name="inchworm-save", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the running job and raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _timed(self, job: Callable[[], object]) -> None:
        began, self._seconds = self._clock(), None  # after a failure the next job runs in the calling thread again
        job()
        self._seconds = self._clock() - began


class Saver:
    """Saves a training and restores it. One save runs at a time, and nothing else writes the run's files meanwhile.

    Without a run directory, checkpoints can be written only to a directory that the caller names.
    """

    def __init__(self, run: Path | Run | None, config: TrainingConfig, parts: TrainerParts) -> None:
        """`run` is a directory, locked from the first write on, or a `Run` that the caller has locked. `config` is the config asked for."""
        self._parts = parts
        self._own = Run(run, config, continued=False) if isinstance(run, Path) else None  # made and locked here
        self._run = run if isinstance(run, Run) else self._own
        self._config = config if self._run is None else self._run.config  # what the run is bound to
        self.directory = None if self._run is None else self._run.path
        self._thread = SaveThread()
        self._callbacks: list[object] = []
        self._callback_states: Sequence[Mapping[str, Any]] = ()  # of a loaded checkpoint, until the callbacks are known
        self._owns_directory = False
        self.saved: SavedState | None = None
        self._warned: set[str] = set()
        self._unwritten: dict[str, tuple[Mapping[str, Any], OSError]] = {}  # states whose policy file is to be tried again, and the error

    def set_callbacks(self, callbacks: Sequence[object]) -> None:
        """Set the callbacks whose state is saved, and restore what a loaded checkpoint holds of them."""
        self._callbacks = list(callbacks)
        restore_states(self._callbacks, self._callback_states, "callback")
        self._callback_states = ()

    def full_state(self) -> dict[str, Any]:
        """The complete state of the training, as plain data and arrays."""
        parts = self._parts
        config = parts.config() if self._run is None or self._own else self._run.config  # `learn` may change a given run's for once
        return {
            "format": FORMAT,
            "config": binding_fields(config),
            "spec": describe_policy(parts.policy),
            "weights": parts.policy.get_weights(),
            "learner": parts.learner().state_dict(),
            "collector": parts.collector.state_dict(),
            "state": parts.state.state_dict(),
            "callbacks": states_of(self._callbacks),
            "trackers": states_of(parts.trackers),
        }

    def take(self) -> TrainerState:
        """The complete state of the training and its process, with the note for the manifest."""
        parts, state = self._parts, self._parts.state
        note = ManifestNote(
            exact=parts.inexact(),
            score=state.best_score if state.best_iteration == state.iteration else None,
            scored=state.scored == state.iteration,
            converged=state.convergence.get("converged"),
            rows=parts.rows[0].counts() if parts.rows else None,
            **process_facts(parts.config().run.threads),
        )
        return TrainerState(self.full_state(), {"generators": generators_state()}, note)

    # ---- saving

    def claim_directory(self) -> None:
        """Lock the run directory and make it this training's; reject one that holds another run."""
        if self._own is not None:
            self._own.prepare()
        if self._run is not None and not self._owns_directory:
            newest = TrainingCheckpointer(self._run.checkpoints).latest()
            if newest is not None:
                raise ConfigError(
                    f"{self.directory} already holds a run ({newest.name}); resume it with load_checkpoint(), or use another run_dir"
                )
            for rows in self._parts.rows:
                if done := rows.last_iteration():
                    self._check_restart(self._run, done)
                rows.truncate_after(self._parts.state.iteration)
        self._owns_directory = True

    def note_outcome(self, outcome: str | None, reason: str = "") -> None:
        """Write into the run's directory how the training ended; None while it runs."""
        if self._run is not None:
            self._run.note_outcome(outcome, reason)

    def _check_restart(self, run: Run, done: int) -> None:
        """Refuse to begin a run again whose checkpoints were deleted; warn if it had none, because then nothing is lost.

        It had one if there is a policy file, which follows the first, or if it has done more iterations than lie between two.
        """
        found = f"{run.path} has rows up to iteration {done} but no checkpoint"
        files = policy_files(self._parts.policy, POLICY, self._parts.policy.get_weights())
        interval = self._parts.config().run.checkpoint_interval
        if not any((run.path / file).exists() for file in files) and not 0 < interval < done:
            warnings.warn(f"{found} (it ended before the first one); starting over", stacklevel=4)
            return
        again = "delete the directory"
        if self._own is None:
            again = f"repeat its inchworm train command with --run.name {shlex.quote(run.name)} --overwrite"
        raise ConfigError(
            f"{found}: its checkpoints are gone, and training from the beginning would replace what is left; put them back into "
            f"{run.checkpoints}, or use another directory; to start over here, {again}"
        )

    def prepare(self, taken: TrainerState, directory: str | Path | None = None) -> Callable[[], Path]:
        """Copy a state for the run's directory or the given one; the returned function writes it, in this thread or another.

        In the run's directory the metrics rows are synced before the checkpoint is written, and the policy file follows.
        """
        target = Path(directory) if directory is not None else self._checkpoints("save_checkpoint(directory)")
        if directory is None:
            self.claim_directory()
        in_run = self._is_run(target)
        rows = self._parts.rows if in_run else ()
        for tracker in rows:
            tracker.flush()
        self.warn_inexact(taken.note.exact)
        weights = taken.state["weights"]
        for name, array in weights.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise BadNumberError(
                    f"the weight {name} is not finite; not saved. Resume from the last checkpoint with a lower learning rate"
                )
        run = self._config.run
        checkpointer = TrainingCheckpointer(target, keep=run.keep_checkpoints, keep_best=run.keep_best)
        commit = checkpointer.prepare(taken.iteration, taken.state, process=taken.process, note=taken.note)

        def write() -> Path:
            for tracker in rows:
                tracker.sync()
            path = commit()
            if in_run:
                self.saved = SavedState(taken.iteration, taken.env_steps)
                self._write_policy(POLICY, taken.state)
            return path

        return write

    def save(self, directory: str | Path | None = None) -> Path:
        """Write a checkpoint now, to the run's directory or the given one."""
        self.wait()
        path = self.prepare(self.take(), directory)()
        self.check_all_written()
        return path

    def save_in_background(self) -> None:
        """Take the state and write it, in the background if that is worthwhile; errors are raised here or by `finalize`."""
        self._thread.run(self.prepare(self.take()))

    def save_snapshot(self, taken: TrainerState | None) -> None:
        """After an interruption within an iteration: write the last snapshot, unless a later state has been written."""
        self.wait()
        if self.directory is not None and taken is not None and (self.saved is None or taken.iteration > self.saved.iteration):
            with last_save():
                self.prepare(taken)()

    def describe_saved(self) -> str:
        """Which state of the run is on disk, and how to continue from it."""
        if self.saved is None:
            return "no state of the run is saved"
        how = "load_checkpoint(), then train()" if self._run is None or self._own else f"inchworm resume {self._run.typed}"
        where = f"is saved in {self._checkpoints('')}"
        return f"the state after iteration {self.saved.iteration} ({self.saved.env_steps:,} steps) {where}; to continue: {how}"

    def finalize(self, wait: bool) -> None:
        """Raise the error of a background save, waiting for it if asked to, and retry policy files that could not be written."""
        if wait or not self._thread.busy:
            self._thread.wait()
            for name, (state, _) in list(self._unwritten.items()):
                self._write_policy(name, state)

    def wait(self) -> None:
        """Wait for a running save; its error becomes a warning."""
        try:
            self._thread.wait()
        except OSError as error:
            warnings.warn(f"a save failed: {error}", stacklevel=3)

    def check_all_written(self) -> None:
        """Raise the error of a policy file that still could not be written."""
        for _, problem in self._unwritten.values():
            raise problem

    def write_best_policy(self) -> None:
        """Write the policy as it is now as the run's best."""
        self._write_policy(BEST_POLICY, {"weights": self._parts.policy.get_weights(), "learner": self._parts.learner().state_dict()})

    def _write_policy(self, name: str, state: Mapping[str, Any]) -> None:
        """Write a policy file of the run from the weights and the learner's state of a training; for a composite, one per part.

        A failure is a warning and is retried by `finalize`: training does not end because of a derived file.
        """
        if self.directory is None:
            return
        try:
            for file, (policy, share) in policy_files(self._parts.policy, name, state["weights"]).items():
                save_policy(self.directory / file, policy, share, reward_statistics=state["learner"].get("rewards"))
        except OSError as error:
            problem = OSError(error.errno, f"{error.strerror} while writing", str(self.directory / name))
            if name not in self._unwritten:  # warn once until it works again
                warnings.warn(f"{problem}; training continues and retries after each iteration", stacklevel=2)
            self._unwritten[name] = (state, problem)
        else:
            self._unwritten.pop(name, None)

    def warn_inexact(self, sentences: Sequence[str]) -> None:
        """Warn about what cannot be restored exactly, once per sentence."""
        for sentence in sentences:
            if sentence not in self._warned:
                warnings.warn(f"resuming will not be bit-exact: {sentence}", NotExactWarning, stacklevel=3)
        self._warned |= set(sentences)

    # ---- restoring

    def load(self, path: str | Path | None = None) -> None:
        """Restore the newest checkpoint of the run, or the one given (or the newest in a directory of checkpoints)."""
        self.wait()
        checkpoint, parts = self._read(path), self._parts
        state, manifest = checkpoint.state, checkpoint.manifest
        with untrusted(f"the checkpoint {checkpoint.path} does not fit this trainer", keep=(ConfigError, EnvError)):
            check_state(state, checkpoint.step, describe_policy(parts.policy) if path is None else None)
            parts.keep_compile(state["config"]["ppo"]["compile"])
            set_weights(parts.policy, state["weights"])
            parts.learner().load_state_dict(state["learner"])
            parts.collector.load_state_dict(state["collector"])
            parts.state.load_state_dict(state["state"])
            parts.state.best_iteration = checkpoint.step if manifest.get("best") else None
            parts.state.scored = checkpoint.step if manifest.get("scored", True) else None  # early manifests lack it
            parts.state.follow(parts.collector)
            restore_states(parts.trackers, state.get("trackers", ()), "tracker")
            self._callback_states = state.get("callbacks", ())  # restored when training begins and all callbacks are known
            if "generators" in checkpoint.process:
                restore_generators(checkpoint.process["generators"])
        self._rewind_files(checkpoint)

    def _read(self, path: str | Path | None) -> Checkpoint:
        """Read a checkpoint, compare its config with the run's, and warn about whatever makes a resumed run differ in bits."""
        target = Path(path) if path is not None else self._checkpoints("load_checkpoint(path)")
        if path is None and self._own is not None:
            self._own.prepare()
        checkpoint = load_checkpoint(target)
        manifest, config = checkpoint.manifest, self._config
        if path is None and "config" in checkpoint.state:  # a checkpoint given by path may start a different run
            with untrusted(f"the checkpoint {checkpoint.path} has no valid config"):
                saved = checkpoint.state["config"]
                known = {name: fields | dict(saved.get(name, {})) for name, fields in config.to_dict().items()}  # older ones lack policies
                recorded = TrainingConfig.from_dict(known)
                if ":" in recorded.env.id:  # a factory may have been renamed
                    recorded = recorded.replace(env=recorded.env.replace(id=config.env.id))
            check_config(target.parent, recorded, keep_choices(recorded, config))
        now = process_facts(config.run.threads)
        if config.run.threads:  # the configs have been compared
            del now["threads"]
        known = {name: manifest[name] for name in now if manifest.get(name) is not None and now[name] is not None}
        run = self._run or Run(checkpoint.path, config, continued=True)
        run.warn_of_versions({**manifest["versions"], **known}, {**versions(), **now})
        self.warn_inexact(manifest.get("exact", ()))
        return checkpoint

    def _rewind_files(self, checkpoint: Checkpoint) -> None:
        """Cut the metrics back to the checkpoint, and rewrite policy files that are not the checkpoint's."""
        self._unwritten.clear()
        in_run = self._is_run(checkpoint.path.parent)
        self.saved = SavedState(checkpoint.step, self._parts.collector.env_steps) if in_run else None
        self._owns_directory |= in_run or self.directory is None
        counts = checkpoint.manifest.get("rows") if in_run else None
        for rows in self._parts.rows if self._owns_directory else ():
            if counts is None:
                rows.truncate_after(checkpoint.step)
                continue
            for problem in rows.truncate_to(counts):
                warnings.warn(f"{problem}; continuing with the rows that are left", stacklevel=3)
        if not in_run or self.directory is None:
            return
        # A kill between a commit and its policy file leaves an old file, resuming from an older checkpoint a newer one.
        states = {POLICY: checkpoint.state}
        best = TrainingCheckpointer(checkpoint.path.parent).best()
        if best is not None:
            states[BEST_POLICY] = load_checkpoint(best).state
        for name, expected in states.items():
            for file, (_, share) in policy_files(self._parts.policy, name, expected["weights"]).items():
                try:
                    _, found = read_policy_file(self.directory / file)
                except (OSError, InchwormError):
                    found = {}
                if found.keys() != share.keys() or any(not np.array_equal(found[key], value) for key, value in share.items()):
                    self._write_policy(name, expected)
                    break

    # ---- the directory

    def close(self) -> None:
        """Release the run's lock, unless the caller holds it."""
        if self._own is not None:
            self._own.close()

    def _is_run(self, checkpoints: Path) -> bool:
        """Whether a directory of checkpoints is the run's own."""
        return self._run is not None and checkpoints.resolve() == self._run.checkpoints.resolve()

    def _checkpoints(self, instead: str) -> Path:
        if self._run is None:
            raise ConfigError(f"this trainer has no run directory; use PPOTrainer(…, run_dir=…) or {instead}")
        return self._run.checkpoints
