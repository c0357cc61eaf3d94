"""Serves the front door: keeps a run safe. Takes all that it is between two iterations, has it written, and brings it back."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from inchworm.backends.registry import describe_policy, policy_files
from inchworm.config.sections import RunConfig, TrainingConfig
from inchworm.core.errors import BadNumberError, ConfigError, EnvError, InchwormError
from inchworm.core.protocols import Callback, Policy, SaysExact, SaysInexact, Stateful, Tracker, VectorEnv
from inchworm.core.tensor_file import distrusted, make_directory
from inchworm.policy.file import read_policy, save_policy
from inchworm.policy.spec import PolicySpec
from inchworm.run.checkpoint import Checkpoint, Note, TrainingCheckpointer, prepare
from inchworm.run.directory import (
    BEST_POLICY,
    CHECKPOINTS,
    FREE_FIELDS,
    POLICY,
    VERSIONS,
    NotExactWarning,
    Run,
    check_config,
    keep_choices,
    versions,
    write_versions,
)
from inchworm.tracking.jsonl import JsonlTracker
from inchworm.train.callbacks import LAST_SAVE_FAILED, CheckpointCallback, FunctionCallback, SnapshotCallback

if TYPE_CHECKING:
    from inchworm.train.trainer import PPOTrainer


FORMAT = 2
_PARTS = {"format", "config", "weights", "learner", "collector", "state"}
_KEYS = {1: _PARTS, 2: _PARTS | {"spec", "callbacks", "trackers"}}

SAYS_NOTHING = "this vector env says nothing of its exactness"


@dataclass(frozen=True, slots=True)
class Moment:
    """All that a run is between two iterations, and what its record must say of it."""

    state: Mapping[str, Any]
    process: Mapping[str, Any]
    note: Note

    @property
    def iteration(self) -> int:
        """How many iterations the run has behind it."""
        return int(self.state["state"]["iteration"])


def inexactness(env: VectorEnv) -> list[str]:
    """What of the environments a checkpoint cannot restore, a sentence each, none twice."""
    if isinstance(env, SaysInexact):
        return list(dict.fromkeys(env.inexact))
    return [] if isinstance(env, SaysExact) and env.exact is True else [SAYS_NOTHING]


def binding_config(config: TrainingConfig) -> dict[str, Any]:
    """What of a config a checkpoint is bound to: all but what may change while a run goes on."""
    sections = config.to_dict()
    return {
        section: {name: value for name, value in fields.items() if f"{section}.{name}" not in FREE_FIELDS}
        for section, fields in sections.items()
    }


def check_parts(state: Mapping[str, Any], step: int, spec: Mapping[str, Any] | None) -> None:
    """Refuse a state that is not a trainer's, of another iteration than it says, or of another network."""
    keys = _KEYS.get(state.get("format"))  # type: ignore[arg-type]
    if keys is None or set(state) != keys:
        raise ConfigError(
            f"this is no checkpoint of a trainer that this inchworm knows: it holds {', '.join(sorted(state))} in format "
            f"{state.get('format')}; see TrainingCheckpointer.load_policy for a policy alone"
        )
    if state["state"]["iteration"] != step:
        raise ConfigError(f"the checkpoint of iteration {step} says of itself that it is of iteration {state['state']['iteration']}")
    if state.get("spec") is not None and spec is not None and _completed(state["spec"]) != spec:
        raise ConfigError("the checkpoint is of another network than this trainer's; give the policy that it was made with")


def _completed(spec: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A described network with the fields that came later; a composite's parts each by itself."""
    if spec is None:
        return None
    if "policies" in spec:
        return {**spec, "policies": {name: _completed(part) for name, part in spec["policies"].items()}}
    return PolicySpec.from_dict(spec).to_dict()


def states_of(parts: Sequence[object]) -> list[dict[str, Any]]:
    """What callbacks or trackers remember, with their places and names."""
    held = enumerate(map(_holder, parts))
    return [{"place": place, "name": type(part).__name__, "state": part.state_dict()} for place, part in held if isinstance(part, Stateful)]


def give_states(parts: Sequence[object], saved: Sequence[Mapping[str, Any]], what: str) -> None:
    """Give back what `states_of` took, each to the part in its place; a place that is filled otherwise is told of."""
    for entry in saved:
        part = _holder(parts[entry["place"]]) if 0 <= entry["place"] < len(parts) else None
        if isinstance(part, Stateful) and type(part).__name__ == entry["name"]:
            part.load_state_dict(entry["state"])
            continue
        found = "none" if part is None else f"a {type(part).__name__}"
        warnings.warn(
            f"the checkpoint holds the state of {what} {entry['place'] + 1}, a {entry['name']}, but there is {found} in its place: it is "
            f"left out and the run goes on, but not bit for bit; give the same {what}s in the same order",
            NotExactWarning,
            stacklevel=3,
        )


def _holder(part: object) -> object:
    """Who remembers: behind a plain callable, the callable itself."""
    return part.function if isinstance(part, FunctionCallback) else part


def torch_is_there() -> bool:
    """Whether this process has imported torch, for whatever reason."""
    return "torch" in sys.modules


def generators_state() -> dict[str, Any]:
    """The process-wide generators of Python, NumPy and torch, which people's own losses, networks and worlds may draw from."""
    version, numbers, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - it is other people's
    state: dict[str, Any] = {"random": [version, list(numbers), gauss], "numpy": _as_lists(legacy)}
    if torch_is_there():
        from inchworm.backends.torch.learner import generator_state

        state["torch"] = generator_state()
    return state


def restore_generators(state: Mapping[str, Any]) -> None:
    """Put them where `generators_state` found them; torch's only if torch is there, as it is wherever torch learns."""
    version, numbers, gauss = state["random"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(state["numpy"])  # noqa: NPY002
    if "torch" in state and torch_is_there():
        from inchworm.backends.torch.learner import restore_generator

        restore_generator(state["torch"])


def cpu_capability() -> str | None:
    """The vector instructions that torch chose for this processor; None without torch in the process."""
    if not torch_is_there():
        return None
    from inchworm.backends.torch.learner import capability

    return capability()


def thread_count(threads: int) -> int | None:
    """With how many threads a run that asks for `threads` learns; 0 asks for what the process has, which only torch knows."""
    if threads or not torch_is_there():
        return threads or None
    from inchworm.backends.torch.learner import num_threads

    return num_threads()


def as_arrays(tree: Any) -> Any:
    """A foreign optimiser's state as plain data: `{"tensor": array}` for a tensor, `{"keys": …, "values": …}` for a dict by number."""
    if isinstance(tree, Mapping):
        values = [as_arrays(value) for value in tree.values()]
        return {"keys": list(tree), "values": values}
    if isinstance(tree, list | tuple):
        return [as_arrays(value) for value in tree]
    if torch_is_there():
        from inchworm.backends.torch.learner import to_array

        array = to_array(tree)
        if array is not None:
            return {"tensor": array}
    return tree


def from_arrays(tree: Any) -> Any:
    """What `as_arrays` was given; tensors are torch's again."""
    if isinstance(tree, Mapping) and "tensor" in tree:
        from inchworm.backends.torch.learner import tensor_of

        return tensor_of(tree["tensor"])
    if isinstance(tree, Mapping):
        return {key: from_arrays(value) for key, value in zip(tree["keys"], tree["values"], strict=True)}
    return [from_arrays(value) for value in tree] if isinstance(tree, list | tuple) else tree


def _as_lists(tree: Any) -> Any:
    """Arrays as lists of numbers, for JSON."""
    if isinstance(tree, Mapping):
        return {key: _as_lists(value) for key, value in tree.items()}
    return tree.tolist() if isinstance(tree, np.ndarray | np.generic) else tree


class RunFiles:
    """What a trainer writes and reads. Without a run directory only checkpoints with a directory of their own can be written."""

    def __init__(self, run: Path | Run | None, policy: Policy, trackers: Sequence[Tracker], config: TrainingConfig) -> None:
        """`run` is a directory, which is locked from the first write on, or a `Run` that somebody has locked already."""
        self.directory = run.path if isinstance(run, Run) else run
        self._run = Run(run, config, continued=False) if isinstance(run, Path) else run
        self._lock = self._run if isinstance(run, Path) else None
        self._policy, self._asked = policy, config
        self._rows = [tracker for tracker in trackers if isinstance(tracker, JsonlTracker)]
        self._is_ours = False
        self._told: set[str] = set()
        self.saved_iteration = -1
        self._unwritten: dict[str, tuple[Mapping[str, Any], OSError]] = {}  # policy files that wait for the next attempt, and why

    @property
    def _config(self) -> TrainingConfig:
        """What the run is bound to: the config of its directory, or what the trainer was asked for."""
        return self._asked if self._lock is self._run or self._run is None else self._run.config

    def recorded_config(self, config: TrainingConfig) -> TrainingConfig:
        """What a checkpoint records: a trainer's own config, unless the run has one that is kept apart from its trainers."""
        return config if self._lock is self._run else self._config

    def begin(self, iteration: int) -> None:
        """Take possession: a run directory holds one run, the one that goes on here, or none yet."""
        self._take_lock()
        if self.directory is not None and not self._is_ours:
            there = TrainingCheckpointer(self.directory / CHECKPOINTS).latest()
            if there is not None:
                raise ConfigError(
                    f"{self.directory} holds a run already ({there.name}); go on with load_checkpoint(), or give another run_dir"
                )
            self._warn_of_lost_checkpoints()
            for rows in self._rows:  # of a run that was killed before its first checkpoint
                rows.truncate_after(iteration)
        self._is_ours = True

    def row_counts(self) -> dict[str, int] | None:
        """How many rows of metrics the run has written so far."""
        return self._rows[0].counts() if self._rows else None

    def job(self, moment: Moment, directory: str | Path | None = None) -> Callable[[], Path]:
        """Take a moment for the run's directory or the one given; what is returned writes it, in this thread or another.

        In the run's directory the rows of metrics are on disk before the checkpoint, and its policy file comes after.
        """
        target = Path(directory) if directory is not None else self._checkpoints("save_checkpoint(directory)")
        if directory is None:
            self.begin(moment.iteration)
        is_run = self._is_here(target)
        rows = self._rows if is_run else []
        for tracker in rows:
            tracker.flush()
        self.warn_of_inexact(moment.note.exact)
        _refuse_bad_weights(moment.state["weights"])
        run = self._config.run
        keeper = TrainingCheckpointer(target, keep=run.keep_checkpoints, keep_best=run.keep_best)
        prepared = prepare(moment.iteration, moment.state, process=moment.process, note=moment.note)

        def write() -> Path:
            for tracker in rows:
                tracker.sync()
            path = keeper.commit(prepared)
            if is_run:
                self.saved_iteration = moment.iteration
                self.write_policy(POLICY, moment.state["weights"])
            return path

        return write

    def read_checkpoint(self, path: str | Path | None = None) -> Checkpoint:
        """The newest checkpoint of the run, or the one given (or the newest of a directory of them); the run goes on from there."""
        target = Path(path) if path is not None else self._checkpoints("load_checkpoint(path)")
        single = (target / "manifest.json").exists()
        keeper = TrainingCheckpointer(target.parent if single else target)
        if path is None:
            self._take_lock()
        checkpoint = keeper.load(target if single else None)
        if path is None and "config" in checkpoint.state:  # the run itself goes on; a checkpoint by name may be the start of something else
            with distrusted(f"the checkpoint {checkpoint.path} has no valid config"):
                recorded = self._recorded(checkpoint.state["config"])
            check_config(target.parent, recorded, keep_choices(recorded, self._config))
        self._warn_of_other_bits(checkpoint)
        return checkpoint

    def go_on_from(self, checkpoint: Checkpoint) -> None:
        """The run is now where the checkpoint is: rows of its future go, and policy files are those of its past."""
        self.saved_iteration = -1
        self._unwritten.clear()
        is_run = self._is_here(checkpoint.path.parent)
        self._is_ours |= is_run or self.directory is None
        counts = checkpoint.manifest.get("rows") if is_run else None
        for tracker in self._rows if self._is_ours else ():
            if counts is None:
                tracker.truncate_after(checkpoint.step)
                continue
            for problem in tracker.truncate_to(counts):
                warnings.warn(f"{problem}; the others go on", stacklevel=3)
        if is_run:
            self._renew_policies(checkpoint)

    def _recorded(self, config: Mapping[str, Any]) -> TrainingConfig:
        """The config that a checkpoint was made with. Where a factory made the environment its name says little, and is not compared."""
        free = {section: dict(fields) for section, fields in self._config.to_dict().items()}
        recorded = TrainingConfig.from_dict({section: free[section] | dict(config[section]) for section in free})
        return recorded.replace(env=recorded.env.replace(id=self._config.env.id)) if ":" in recorded.env.id else recorded

    def close(self) -> None:
        """Let others write to the run."""
        if self._lock is not None:
            self._lock.close()

    def _take_lock(self) -> None:
        if self._lock is not None and self.directory is not None:
            make_directory(self.directory)
            self._lock.lock()
            if not (self.directory / VERSIONS).exists():
                write_versions(self.directory)

    def write_best_policy(self) -> None:
        """The policy as it is now, as the run's best."""
        self.write_policy(BEST_POLICY, self._policy.get_weights())

    def write_policy(self, name: str, weights: Mapping[str, Any]) -> None:
        """A policy file of the run (one for each part of a composite), if there is a run directory and a file can describe the network.

        What cannot be written waits for `retry`: no training ends because of a derived file.
        """
        if self.directory is None:
            return
        try:
            for file, (spec, share) in policy_files(self._policy, name, weights).items():
                save_policy(self.directory / file, spec, share)
        except OSError as error:
            problem = OSError(error.errno, f"{error.strerror} while writing", str(self.directory / name))
            if name not in self._unwritten:  # once, until it works again
                warnings.warn(f"{problem}; training goes on and tries again after each iteration", stacklevel=2)
            self._unwritten[name] = (weights, problem)
        else:
            self._unwritten.pop(name, None)

    def retry(self) -> None:
        """Write the policy files that could not be written before."""
        for name, (weights, _) in list(self._unwritten.items()):
            self.write_policy(name, weights)

    def check_all_written(self) -> None:
        """Raise what keeps a policy file from being written, if one is still waiting."""
        for _, problem in self._unwritten.values():
            raise problem

    def warn_of_inexact(self, sentences: Sequence[str]) -> None:
        """Say what a checkpoint cannot bring back, once."""
        for sentence in sentences:
            if sentence not in self._told:
                warnings.warn(f"a resumed run will not have the bits of this one: {sentence}", NotExactWarning, stacklevel=3)
        self._told |= set(sentences)

    def _warn_of_other_bits(self, checkpoint: Checkpoint) -> None:
        manifest = checkpoint.manifest
        before = dict(manifest["versions"])
        here: dict[str, Any] = {"cpu_capability": cpu_capability()}
        if not self._config.run.threads:  # else the configs have been compared
            here["threads"] = thread_count(0)
        before |= {name: manifest[name] for name in here if manifest.get(name) is not None and here[name] is not None}
        (self._run or Run(checkpoint.path, self._config, continued=True)).warn_of_versions(before, versions() | here)
        self.warn_of_inexact(manifest.get("exact", ()))

    def _warn_of_lost_checkpoints(self) -> None:
        interval = self._config.run.checkpoint_interval
        for tracker in self._rows:
            done = tracker.last_iteration()
            why = "its checkpoints have gone" if interval and done >= interval else "it ended before its first"
            if done:
                warnings.warn(f"{self.directory} has rows up to iteration {done} but no checkpoint ({why}): it begins again", stacklevel=4)

    def _renew_policies(self, checkpoint: Checkpoint) -> None:
        """A kill between a commit and the policy file leaves an old file, a resume from an older checkpoint a new one: write it again."""
        self._renew(POLICY, checkpoint.state["weights"])
        best = TrainingCheckpointer(checkpoint.path.parent).best()
        if best is not None:
            self._renew(BEST_POLICY, TrainingCheckpointer(best.parent).load(best).state["weights"])

    def _renew(self, name: str, weights: Mapping[str, Any]) -> None:
        if self.directory is None:
            return
        for file, (_, share) in policy_files(self._policy, name, weights).items():
            try:
                _, found = read_policy(self.directory / file)
            except (OSError, InchwormError):
                found = {}
            if found.keys() != share.keys() or any(not np.array_equal(found[key], value) for key, value in share.items()):
                self.write_policy(name, weights)
                return

    def _is_here(self, checkpoints: Path) -> bool:
        """Whether that is where the run's own checkpoints are."""
        return self.directory is not None and checkpoints.resolve() == (self.directory / CHECKPOINTS).resolve()

    def _checkpoints(self, instead: str) -> Path:
        if self.directory is None:
            raise ConfigError(f"this trainer has no run directory; give PPOTrainer(…, run_dir=…) or {instead}")
        return self.directory / CHECKPOINTS


def _refuse_bad_weights(weights: Mapping[str, Any]) -> None:
    """Whatever made them so, weights that are not finite are never saved over ones that are."""
    bad = [name for name, array in weights.items() if np.asarray(array).dtype.kind == "f" and not np.isfinite(array).all()]
    if bad:
        raise BadNumberError(
            f"the weight {bad[0]} is not finite: nothing is saved; go on from the last checkpoint with a lower learning rate"
        )


PAYS = 20
"""A save goes to a thread if at least so many times its duration has passed since the last one. With less between them a kill could
find several intervals unsaved, and little would be gained."""


class Saver:
    """Runs one job of writing at a time. The first is done here and timed; later ones beside training where that pays."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """The clock is there to be replaced in tests."""
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._seconds: float | None = None  # the last job took
        self._last = 0.0  # when the last job began

    @property
    def busy(self) -> bool:
        """Whether a job is under way in the thread."""
        return self._thread is not None and self._thread.is_alive()

    def run(self, job: Callable[[], object]) -> None:
        """Do a job, after the one before has ended. What goes wrong is raised here, or by `poll` or `wait` later."""
        self.wait()
        now = self._clock()
        beside = self._seconds is not None and now - self._last >= PAYS * self._seconds
        self._last = now
        if not beside:
            self._timed(job)
            return
        self._thread = threading.Thread(target=self._beside, args=(job,), name="inchworm-save", daemon=True)
        self._thread.start()

    def poll(self) -> None:
        """Raise what went wrong beside training, if it is known by now."""
        if not self.busy:
            self.wait()

    def wait(self) -> None:
        """Wait for the job that is under way; raises what went wrong in it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _beside(self, job: Callable[[], object]) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the main thread, which may have to be woken
        try:
            self._timed(job)
        except Exception as error:
            self._error = error

    def _timed(self, job: Callable[[], object]) -> None:
        began, self._seconds = self._clock(), None  # after one that failed the next is done here again, where its end is seen
        job()
        self._seconds = self._clock() - began


class Keeper:
    """What a trainer has to do with its checkpoints. One save is under way at most, and nothing else touches the files meanwhile."""

    def __init__(self, trainer: PPOTrainer, files: RunFiles, trackers: Sequence[Tracker]) -> None:
        """`trackers` are those that somebody gave; the run's own remember nothing."""
        self._trainer, self._files, self._trackers = trainer, files, list(trackers)
        self._callbacks: list[Callback] = list(trainer.callbacks)
        self._unclaimed: Sequence[Mapping[str, Any]] = ()
        self._saver = Saver()
        self.snapshot = SnapshotCallback(self.moment)

    def full_state(self) -> dict[str, Any]:
        """All that the run is at this moment, as plain data and arrays."""
        trainer = self._trainer
        return {
            "format": FORMAT,
            "config": binding_config(self._files.recorded_config(trainer.config)),
            "spec": describe_policy(trainer.policy),
            "weights": trainer.policy.get_weights(),
            "learner": trainer.learner.state_dict(),
            "collector": trainer.collector.state_dict(),
            "state": trainer.state.state_dict(),
            "callbacks": states_of(self._callbacks),
            "trackers": states_of(self._trackers),
        }

    def moment(self) -> Moment:
        """That, and what its record must say of it."""
        run, state = self._trainer.config.run, self._trainer.state
        note = Note(
            exact=inexactness(self._trainer.env),
            score=state.best_score if state.best_iteration == state.iteration else None,
            scored=state.scored == state.iteration,
            rows=self._files.row_counts(),
            threads=thread_count(run.threads),
            cpu_capability=cpu_capability(),
        )
        return Moment(self.full_state(), {"generators": generators_state()}, note)

    def begin(self, callbacks: Sequence[Callback]) -> None:
        """Training begins with these callbacks: they are given what a checkpoint that was loaded remembers of them."""
        self._callbacks = list(callbacks)
        give_states(self._callbacks, self._unclaimed, "callback")
        self._unclaimed = ()

    def callbacks(self, run: RunConfig) -> tuple[CheckpointCallback, SnapshotCallback] | None:
        """Who saves during training, beside it where that pays; nobody without a run directory."""
        if self._files.directory is None:
            return None

        def save() -> None:
            self._saver.run(self._files.job(self.moment()))

        finish = self._files.check_all_written
        checkpoint = CheckpointCallback(save, run.checkpoint_interval, keep_best=run.keep_best, settle=self._settle, finish=finish)
        return checkpoint, self.snapshot

    def save(self, directory: str | Path | None = None) -> Path:
        """Write a checkpoint now, into the run's directory or the one given."""
        self.wait()
        path = self._files.job(self.moment(), directory)()
        self._files.check_all_written()
        return path

    def save_snapshot(self) -> None:
        """After an interruption in the middle of an iteration: the last complete one that was kept, unless a later one is written."""
        self.wait()
        moment: Moment | None = self.snapshot.taken
        if self._files.directory is None or moment is None or moment.iteration <= self._files.saved_iteration:
            return
        try:
            self._files.job(moment)()
        except OSError as error:
            raise InchwormError(f"{LAST_SAVE_FAILED}: {error}") from error

    def load(self, path: str | Path | None = None) -> None:
        """Bring the trainer to where a checkpoint is."""
        self.wait()
        checkpoint = self._files.read_checkpoint(path)
        with distrusted(f"the checkpoint {checkpoint.path} does not fit this trainer", keep=(ConfigError, EnvError)):
            check_parts(checkpoint.state, checkpoint.step, describe_policy(self._trainer.policy) if path is None else None)
            self._give(checkpoint)
        self._files.go_on_from(checkpoint)

    def _give(self, checkpoint: Checkpoint) -> None:
        """Hand every part of the trainer its own."""
        trainer, state = self._trainer, checkpoint.state
        trainer.keep_choices(state["config"]["ppo"]["compile"])
        trainer.policy.set_weights(state["weights"])
        trainer.learner.load_state_dict(state["learner"])
        trainer.collector.set_weights(state["weights"])
        trainer.collector.load_state_dict(state["collector"])
        trainer.state.load_state_dict(state["state"])
        trainer.state.best_iteration = checkpoint.step if checkpoint.manifest.get("best") else None
        trainer.state.scored = checkpoint.step if checkpoint.manifest.get("scored", True) else None  # those from before do not know
        trainer.state.follow(trainer.collector)
        give_states(self._trackers, state.get("trackers", ()), "tracker")
        self._unclaimed = state.get("callbacks", ())  # given when training begins: only then all callbacks are known
        if "generators" in checkpoint.process:
            restore_generators(checkpoint.process["generators"])

    def wait(self) -> None:
        """Wait for a save that is under way; what went wrong in it is told, and stops nothing."""
        try:
            self._saver.wait()
        except OSError as error:
            warnings.warn(f"a save failed: {error}", stacklevel=3)

    def _settle(self, wait: bool) -> None:
        """Raise what went wrong beside training; a policy file that could not be written is tried again."""
        self._saver.wait() if wait else self._saver.poll()
        if not self._saver.busy:
            self._files.retry()
