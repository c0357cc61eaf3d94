"""A run as a directory: its config, the versions it was made with, and the lock that lets one process write to it.

```
runs/CartPole-v1-20261115-214455-a1b2/
  config.yaml  versions.json  metrics.jsonl  timing.jsonl  hashes.jsonl  checkpoints/  policy.safetensors  best_policy.safetensors
  outcome.json  replays/  lock
```
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.metadata
import json
import os
import platform
import re
import secrets
import shlex
import shutil
import stat
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from inchworm.config.sections import TrackingConfig, TrainingConfig
from inchworm.core.errors import ConfigError, CorruptFileError, InchwormError, close_names
from inchworm.core.protocols import Closes
from inchworm.core.tensor_file import make_directory, read_bytes, read_json, remove_temporaries, sync_directory, untrusted, write_atomically
from inchworm.env.registry import names_code

CONFIG = "config.yaml"
BUNDLE, COMPARISON, SWEEP = "bundle.yaml", "comparison.yaml", "sweep.yaml"
"""In directories that hold several runs: see `run/bundle.py`, `analysis/compare.py` and `analysis/sweep.py`."""
VERSIONS = "versions.json"
POLICY = "policy.safetensors"
RATINGS = "ratings.json"
BEST_POLICY = "best_policy.safetensors"
OUTCOME = "outcome.json"
REPORT = "report.html"
CHECKPOINTS = "checkpoints"
REPLAYS = "replays"
LOCK = "lock"


def flatten_config(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A config's plain data as field -> value, such as `ppo.gamma`."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat |= flatten_config(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


FREE_FIELDS = frozenset({
    "run.name", "run.directory", "run.report", "run.notes", "run.total_timesteps", "run.max_iterations", "run.max_episodes",
    "run.checkpoint_interval", "run.checkpoint_seconds", "run.keep_checkpoints", "run.keep_best", "run.log_interval", "run.rank_timeout",
    "evaluation.interval", "evaluation.episodes", "evaluation.final_episodes", "evaluation.num_envs", "evaluation.max_episode_steps",
    "evaluation.baseline", "evaluation.save_replay", "evaluation.keep_replays", "env.num_workers", "env.help_workers",
    "env.worker_timeout", "env.worker_restarts", "collect.max_replay_steps", "collect.engine", "collect.keep_infos", "collect.timeout",
    "collect.restarts", "collect.ray_address", "collect.ray_cpus", "collect.ray_memory", "collect.ray_resources", "collect.ray_strategy",
    "convergence.target", "convergence.window", "convergence.patience", "convergence.returns", "convergence.stop",
    *flatten_config(TrackingConfig().to_dict(), "tracking."),
})  # fmt: skip
"""Fields that may change on resume: how long the run is, what it writes and how often, how it is evaluated, how its environments are
stepped. None of them alters completed training. (Schedules stretch to a new total_timesteps from the resume on.)"""

BIT_FIELDS = frozenset({"run.backend", "run.device", "run.threads", "ppo.compile"})
"""Fields that may change on resume with a warning: the results are no longer bit-identical."""

NOT_BIT_IDENTICAL = "continuing; results will no longer be bit-identical"


class NotExactWarning(UserWarning):
    """The run continues under changed conditions; its results are no longer bit-identical to those of an undisturbed run."""


@functools.cache
def versions() -> Mapping[str, str | None]:
    """Everything that the bits of a run depend on besides its config: packages, platform and processor; looked up once per process."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("inchworm", "numpy", "torch", "jax", "jaxlib", "gymnasium", "safetensors", "optree"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    numpy_config: Any = np.show_config(mode="dicts")
    extensions = numpy_config.get("SIMD Extensions", {})  # they decide the order of NumPy's sums
    simd = " ".join([*extensions.get("baseline", ()), *extensions.get("found", ())]) or None
    return found | {"platform": platform.platform(), "cpu": models[0] if models else platform.machine(), "simd": simd}


def take_lock(path: Path, what: str) -> int:
    """Lock the file `path` for this process and return its descriptor. `what` names the protected thing in messages."""
    try:
        # Never through a link: it could point to a file outside the run, which would then be emptied.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise InchwormError(f"cannot lock {what}: {error}") from None
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, descriptor)  # unless the lock is taken
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InchwormError(f"cannot lock {what}: {path} is not a regular file; remove it")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip() or "that has just started"
            raise InchwormError(f"{what} is in use by process {holder}; wait for it, or stop it first") from None
        except OSError as error:
            raise InchwormError(f"cannot lock {what}: {error}") from None
        with contextlib.suppress(OSError):  # on a full disk the lock holds, but its file does not name the holder
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        stack.pop_all()
    return descriptor


class Run(Closes):
    """A run's directory. Writing to it needs its lock; reading does not."""

    def __init__(self, path: Path, config: TrainingConfig, *, continued: bool) -> None:
        """`continued` is true for a run that existed before."""
        self.path = path
        self.config = config
        self.continued = continued
        self._before: TrainingConfig | None = None  # what the directory held before `change_config`
        self._warned: set[str] = set()  # versions whose change has been reported
        self._lock: int | None = None

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.path.name

    @property
    def typed(self) -> str:
        """The run as it is typed after a command, quoted for a shell, with the environment if that is code to import."""
        words = [self.name if self.path.parent.name == "runs" else str(self.path)]
        return shlex.join([*words, "--env", self.config.env.id] if names_code(self.config.env.id) else words)

    @property
    def checkpoints(self) -> Path:
        """The directory of its checkpoints."""
        return self.path / CHECKPOINTS

    @property
    def replays(self) -> Path:
        """The directory of replays and videos."""
        return self.path / REPLAYS

    def policy_path(self, *, best: bool = False) -> Path:
        """The file of the latest policy, or of the best by evaluation."""
        return self.path / (BEST_POLICY if best else POLICY)

    @property
    def policy_names(self) -> list[str]:
        """The names of its policies if it trains several, else an empty list."""
        path = self.policy_path()
        return sorted(part.stem.removeprefix(f"{path.stem}-") for part in self.path.glob(f"{path.stem}-*{path.suffix}"))

    def policy_files(self, *, best: bool = False) -> list[str]:
        """The names of its policy files: one, or one for each of several policies."""
        path = self.policy_path(best=best)
        return [f"{path.stem}-{name}{path.suffix}" for name in self.policy_names] or [path.name]

    def lock(self) -> None:
        """Become the one process that writes to the run. The system releases the lock when the process ends, even by a kill."""
        if self._lock is not None:
            return
        for directory in (self.checkpoints, self.replays):
            if directory.is_symlink():
                raise InchwormError(f"{directory} is a symbolic link, and nothing is written through one; make it a directory")
        self._lock = take_lock(self.path / LOCK, f"the run {self.path}")
        for directory in (self.path, self.checkpoints, self.replays):  # no other process writes here now
            remove_temporaries(directory)

    def prepare(self) -> None:
        """Make and lock the directory, and write the versions that the run begins with, unless they are there."""
        make_directory(self.path)
        self.lock()
        if not (self.path / VERSIONS).exists():
            self.write_versions()

    def write_versions(self) -> None:
        """Write the versions of this process as those that the run was made with."""
        write_atomically(self.path / VERSIONS, json.dumps(versions(), indent=2) + "\n")

    def note_outcome(self, outcome: str | None, reason: str = "") -> None:
        """Write how the training ended: "finished", "interrupted" or "failed"; None while it runs. Never an error."""
        with contextlib.suppress(OSError):
            if outcome is None:
                (self.path / OUTCOME).unlink(missing_ok=True)
            else:
                write_atomically(self.path / OUTCOME, json.dumps({"outcome": outcome, "reason": reason}) + "\n")

    def change_config(self, config: TrainingConfig) -> None:
        """Continue with `config`, if it differs from the run's only where that does not alter completed training."""
        check_config(self.path, self.config, config)
        if config_changes(self.config, config):
            before = self.config
            self.save_config(config)
            self._before = before

    def restore_config(self) -> None:
        """Write the config that `change_config` replaced: nothing was trained with the new one."""
        if self._before is not None:
            self.save_config(self._before)

    def save_config(self, config: TrainingConfig) -> None:
        """Write `config` as the run's config."""
        write_atomically(self.path / CONFIG, config.to_yaml())
        self.config = config

    def check_versions(self) -> None:
        """Warn about everything whose version differs from when the run began."""
        try:
            with untrusted(str(self.path / VERSIONS)):
                before = read_json(read_bytes(self.path / VERSIONS, limit=1_000_000).decode())
        except (OSError, CorruptFileError) as error:
            warnings.warn(f"cannot compare versions: {error}", NotExactWarning, stacklevel=2)
            return
        self.warn_of_versions(before)

    def warn_of_versions(self, before: Mapping[str, Any], now: Mapping[str, Any] | None = None) -> None:
        """Warn about everything that differs from `before`, once each."""
        now = versions() if now is None else now
        for name, old in before.items():
            if name in now and now[name] != old and name not in self._warned:
                self._warned.add(name)
                warnings.warn(f"{name}: {old} → {now[name]}: {NOT_BIT_IDENTICAL}", NotExactWarning, stacklevel=3)

    def discard(self) -> None:
        """Remove the directory of a new run that failed before anything was written."""
        if not self.continued and not self.checkpoints.exists() and not (self.path / "metrics.jsonl").exists():
            shutil.rmtree(self.path)

    def clear(self) -> None:
        """Delete everything in the directory, which must be locked, so that the run is new again."""
        for entry in sorted(self.path.iterdir(), key=lambda entry: entry.name == CONFIG):  # the config last: until then it is a run
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != LOCK:
                entry.unlink()
        self.continued = False

    def close(self) -> None:
        """Release the lock."""
        descriptor, self._lock = self._lock, None
        if descriptor is not None:
            os.close(descriptor)


def create_run(config: TrainingConfig, *, overwrite: bool = False) -> Run:
    """Create and lock the run that `config` describes: a new directory, or an existing one named `run.name` with an equal config.

    With `overwrite` an existing run is deleted first.
    """
    path = make_run_directory(config)
    run = Run(path, config, continued=(path / CONFIG).exists())
    run.lock()
    try:
        if overwrite and run.continued:
            run.clear()
        if run.continued:
            run.config = load_config(path / CONFIG, env=config.env.id)
            run.change_config(keep_choices(run.config, config))
            run.check_versions()
        else:
            others = sorted(entry.name for entry in path.iterdir() if entry.name not in (LOCK, VERSIONS))
            if BUNDLE in others:
                raise ConfigError(f"{path} holds the runs of several seeds; add --seeds N to continue them, or use another run.name")
            if others:
                raise ConfigError(f"{path} is not a run (it has no {CONFIG}) but holds {', '.join(others[:3])}; use another run.name")
            run.write_versions()
            run.save_config(config)  # last: a directory with a config is a run
    except BaseException:
        run.close()
        raise
    return run


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of a run's directory. The lock is tried for a moment, shared with other readers."""
    try:
        descriptor = os.open(path / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def make_run_directory(config: TrainingConfig) -> Path:
    """Make the directory that a config names, unless it exists, or a new one if it names none."""
    directory, name = Path(config.run.directory), config.run.name
    try:
        make_directory(directory)
        path = directory / name if name is not None else _make_unique(directory, config.env.id)
        path.mkdir(exist_ok=True)
        sync_directory(directory)
    except OSError as error:
        raise ConfigError(f"cannot make a run in run.directory={config.run.directory}: {error}") from error
    return path


def _make_unique(directory: Path, env_id: str) -> Path:
    """Make a new directory such as `CartPole-v1-20261115-214455-a1b2`: names sort by environment, then by time."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", env_id).strip("-.")[-60:] or "run"
    while True:
        path = directory / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path


def open_run(path_or_name: str | Path, *, directory: str | Path = "runs", env: str | None = None, hint: str = "") -> Run:
    """Open an existing run by its path, or by its name in `directory`, without locking it.

    `env` as for `load_config`; `hint` ends the error message.
    """
    path = find_run(path_or_name, directory=directory, hint=hint)
    return Run(path, load_config(path / CONFIG, env=env), continued=True)


def find_named(path_or_name: str | Path, file: str, directory: str | Path = "runs") -> Path | None:
    """The directory with this file that a path, or a name in `directory`, names; None if it names none."""
    places = (Path(path_or_name), Path(directory) / path_or_name)
    return next((path for path in places if str(path_or_name) and (path / file).is_file()), None)


def find_run(path_or_name: str | Path, *, directory: str | Path = "runs", hint: str = "") -> Path:
    """Return the directory of a run, given by its path or by its name in `directory`."""
    for path in (Path(path_or_name), Path(directory) / path_or_name):
        if (path / CONFIG).is_file():
            return path
        if (path / BUNDLE).is_file():
            raise ConfigError(f"{path} holds the runs of several seeds; name one of them, such as {shlex.quote(f'{path_or_name}/seed-0')}")
    names = sorted(entry.parent.name for entry in Path(directory).glob(f"*/{CONFIG}"))
    if not names:
        raise ConfigError(f"there is no run {path_or_name}, and none in {directory}; inchworm train ENV makes one{hint}")
    near = close_names(Path(path_or_name).name, names, most=3)
    listed = f"nearest in {directory}: {', '.join(near)}" if near else f"none of the {len(names)} in {directory} has a similar name"
    raise ConfigError(f"there is no run {path_or_name}; {listed}{hint}")


def load_config(path: str | Path, *, env: str | None = None, allow: str = "--env {id}") -> TrainingConfig:
    """Load a config from a file. Files cannot import code: an environment id with ":" must also be given as `env`.

    `allow` is what the error message suggests to type.
    """
    config = TrainingConfig.from_yaml(path)
    refuse_code(config, path, env, allow)
    return config


def refuse_code(config: TrainingConfig, path: str | Path, env: str | None, allow: str = "--env {id}") -> None:
    """Refuse a config from a file that names code to import, unless that is also given as `env`."""
    if names_code(config.env.id) and env != config.env.id:
        raise ConfigError(
            f"{path} names code to import ({config.env.id}); for safety, config files cannot import code; "
            f"if you trust it, add {allow.format(id=shlex.quote(config.env.id))}"
        )


def check_config(path: Path, before: TrainingConfig, now: TrainingConfig) -> None:
    """Reject config changes that would have altered completed training; warn about those that change only the last bits."""
    changes = config_changes(before, now)
    forbidden = [line for name, line in changes.items() if name not in FREE_FIELDS | BIT_FIELDS]
    if forbidden:
        raise ConfigError(f"the run {path} has another config: {', '.join(forbidden)}; leave it unchanged, or start another run")
    for name in sorted(BIT_FIELDS & set(changes)):
        warnings.warn(f"{changes[name]}: {NOT_BIT_IDENTICAL}", NotExactWarning, stacklevel=3)


def keep_choices(before: TrainingConfig, now: TrainingConfig) -> TrainingConfig:
    """`now`, with every `auto` replaced by what the run chose `before`."""
    if now.env.num_workers == "auto":
        now = now.replace(env=now.env.replace(num_workers=before.env.num_workers, help_workers=before.env.help_workers))
    if now.ppo.compile == "auto":
        now = now.replace(ppo=now.ppo.replace(compile=before.ppo.compile))
    if now.run.backend == "auto":
        now = now.replace(run=now.run.replace(backend=before.run.backend))
    if now.collect.staleness == "auto":
        now = now.replace(collect=now.collect.replace(staleness=before.collect.staleness))
    return now


def binding_fields(config: TrainingConfig) -> dict[str, Any]:
    """The fields that may not change freely on resume, as plain data by section."""
    return {
        section: {name: value for name, value in fields.items() if f"{section}.{name}" not in FREE_FIELDS}
        for section, fields in config.to_dict().items()
        if section != "tracking"
    }


def config_changes(before: TrainingConfig, after: TrainingConfig) -> dict[str, str]:
    """Every field that differs, as name -> `ppo.gamma: 0.99 → 0.9`."""
    old, new = flatten_config(before.to_dict()), flatten_config(after.to_dict())
    names = [*old, *(name for name in new if name not in old)]
    return {name: f"{name}: {old.get(name)} → {new.get(name)}" for name in names if old.get(name) != new.get(name)}
