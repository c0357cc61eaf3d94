"""A run as a directory: with what config and versions it is made, and who may write to it. Serves the front door and the CLI.

```
runs/CartPole-v1-20261115-214455-a1b2/
  config.yaml  versions.json  metrics.jsonl  timing.jsonl  checkpoints/  policy.safetensors  best_policy.safetensors  lock
```
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import functools
import importlib.metadata
import json
import os
import platform
import re
import secrets
import shutil
import stat
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from inchworm.config.sections import TrainingConfig
from inchworm.core.errors import ConfigError, CorruptFileError, InchwormError
from inchworm.core.tensor_file import (
    make_directory,
    read_bytes,
    read_json,
    remove_temporaries,
    sync_directory,
    untrusted,
    write_atomically,
)


def take_lock(path: Path, what: str) -> int:
    """Lock the file `path` for this process: the descriptor that holds the lock. `what` is what it protects, for a message."""
    try:
        # Never through a link: a directory from elsewhere could point at a file that is then emptied.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise InchwormError(f"{what} cannot be locked: {error}") from None
    try:
        _lock(descriptor, path, what)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _lock(descriptor: int, path: Path, what: str) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise InchwormError(f"{what} cannot be locked: {path} is no regular file; remove it")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode(errors="replace").strip() or "that has just begun"
        raise InchwormError(f"{what} is in use by process {holder}; wait for it, or stop it first") from None
    except OSError as error:
        raise InchwormError(f"{what} cannot be locked: {error}") from None
    with contextlib.suppress(OSError):  # on a full disk the lock holds all the same, only nobody can read whose it is
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)


def versions() -> dict[str, str | None]:
    """What the bits of a run depend on besides its config."""
    return dict(_versions())


@functools.cache
def _versions() -> dict[str, str | None]:
    """Looked up once: none of it changes while a process lives."""
    packages = ("inchworm", "numpy", "torch", "gymnasium", "safetensors", "optree")
    return (
        {"python": platform.python_version()}
        | {name: _version(name) for name in packages}
        | {"platform": platform.platform(), "cpu": _cpu(), "simd": _simd()}
    )


def version_changes(before: Mapping[str, Any], now: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Everything that was known before and is different now, as name -> `torch: 2.12 → 2.13`."""
    now = versions() if now is None else now
    return {name: f"{name}: {old} → {now[name]}" for name, old in before.items() if name in now and now[name] != old}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    """The processor's model; the architecture where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _simd() -> str | None:
    """The vector instructions that NumPy uses here, which decide the order of its sums."""
    config: Any = np.show_config(mode="dicts")
    extensions = config.get("SIMD Extensions", {})
    return " ".join([*extensions.get("baseline", ()), *extensions.get("found", ())]) or None


CONFIG = "config.yaml"
VERSIONS = "versions.json"
POLICY = "policy.safetensors"
BEST_POLICY = "best_policy.safetensors"
CHECKPOINTS = "checkpoints"
LOCK = "lock"
_VERSIONS_LIMIT = 1_000_000

FREE_FIELDS = frozenset(
    {
        "run.name",
        "run.directory",
        "run.total_timesteps",
        "run.max_iterations",
        "run.max_episodes",
        "run.checkpoint_interval",
        "run.keep_checkpoints",
        "run.keep_best",
        "run.log_interval",
        "evaluation.interval",
        "evaluation.episodes",
        "evaluation.final_episodes",
        "evaluation.num_envs",
        "env.num_workers",
        "env.help_workers",
        "env.worker_timeout",
        "env.worker_restarts",
        "collect.max_replay_steps",
    }
)
"""What may differ when a run goes on: how long it runs, what it writes and how often, how it is scored, how its copies are
stepped. None of it changes what has been learnt so far. (A schedule is stretched to a new total_timesteps from here on.)"""

BIT_FIELDS = frozenset({"run.backend", "run.device", "run.threads", "ppo.compile"})
"""What may differ too, with a warning: the run goes on, but not with the bits it would have had."""


class NotExactWarning(UserWarning):
    """The run goes on under other circumstances than it began with; its bits are no longer those of an undisturbed run."""


class Run:
    """A run's directory. Hold its lock while writing to it; reading needs none."""

    def __init__(self, path: Path, config: TrainingConfig, *, continued: bool) -> None:
        """`continued` says whether the run was there before."""
        self.path = path
        self.config = config
        self.continued = continued
        self.told: set[str] = set()
        """Which versions were found to have changed, and told of."""
        self._lock: int | None = None

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.path.name

    @property
    def checkpoints(self) -> Path:
        """Where its checkpoints are."""
        return self.path / CHECKPOINTS

    def policy_path(self, *, best: bool = False) -> Path:
        """The file of the latest policy, or of the best by evaluation."""
        return self.path / (BEST_POLICY if best else POLICY)

    def lock(self) -> None:
        """Become the one process that writes to the run. The system drops the lock when the process ends, however it ends."""
        if self._lock is not None:
            return
        if self.checkpoints.is_symlink():
            raise InchwormError(f"{self.checkpoints} is a link, and nothing is written through one; make it a directory")
        self._lock = take_lock(self.path / LOCK, f"the run {self.path}")
        for directory in (self.path, self.checkpoints):  # nobody else writes here now
            remove_temporaries(directory)

    def change_config(self, config: TrainingConfig) -> None:
        """Go on with `config`, if it differs from the run's own only where that changes nothing that has happened."""
        check_config(self.path, self.config, config)
        if config_changes(self.config, config):
            self.save_config(config)

    def save_config(self, config: TrainingConfig) -> None:
        """Write `config` as the run's own."""
        write_atomically(self.path / CONFIG, config.to_yaml())
        self.config = config

    def check_versions(self) -> None:
        """Warn of everything whose version differs from when the run began."""
        try:
            with untrusted(str(self.path / VERSIONS)):
                before = read_json(read_bytes(self.path / VERSIONS, limit=_VERSIONS_LIMIT).decode())
        except (OSError, CorruptFileError) as error:
            warnings.warn(f"cannot compare versions: {error}", NotExactWarning, stacklevel=2)
            return
        self.warn_of_versions(before)

    def warn_of_versions(self, before: Mapping[str, Any], now: Mapping[str, Any] | None = None) -> None:
        """Warn of everything that is not as before, unless that was told already."""
        for name, line in version_changes(before, now).items():
            if name not in self.told:
                warnings.warn(f"{line}: the run goes on, but not bit for bit", NotExactWarning, stacklevel=3)
        self.told |= version_changes(before, now).keys()

    def discard(self) -> None:
        """Remove a directory in which nothing began, because the very first thing went wrong."""
        if not self.continued and not self.checkpoints.exists() and not (self.path / "metrics.jsonl").exists():
            shutil.rmtree(self.path)

    def close(self) -> None:
        """Let others write to the run."""
        descriptor, self._lock = self._lock, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def check_config(path: Path, before: TrainingConfig, now: TrainingConfig) -> None:
    """Refuse to go on with a config that would have made another past; warn of what changes last bits only."""
    changes = config_changes(before, now)
    forbidden = [line for name, line in changes.items() if name not in FREE_FIELDS | BIT_FIELDS]
    if forbidden:
        raise ConfigError(f"the run {path} has another config: {', '.join(forbidden)}; leave that as it was, or begin another run")
    for name in sorted(BIT_FIELDS & set(changes)):
        warnings.warn(f"{changes[name]}: the run goes on, but not bit for bit", NotExactWarning, stacklevel=3)


def keep_choices(before: TrainingConfig, now: TrainingConfig) -> TrainingConfig:
    """`now`, with what `before` had chosen wherever `now` says auto: a run that goes on keeps its choices."""
    if now.env.num_workers == "auto":
        now = now.replace(env=now.env.replace(num_workers=before.env.num_workers, help_workers=before.env.help_workers))
    if now.ppo.compile == "auto":
        now = now.replace(ppo=now.ppo.replace(compile=before.ppo.compile))
    return now


def write_versions(path: Path) -> None:
    """Put down the versions of everything that a run's bits depend on."""
    write_atomically(path / VERSIONS, json.dumps(versions(), indent=2) + "\n")


def create_run(config: TrainingConfig) -> Run:
    """The run that `config` describes, locked: a new directory, or the one named `run.name` if it is there and has an equal config."""
    directory = Path(config.run.directory)
    try:
        make_directory(directory)
        path = _make_unique(directory, config.env.id) if config.run.name is None else directory / config.run.name
        path.mkdir(exist_ok=True)
        sync_directory(directory)
    except OSError as error:
        raise ConfigError(f"cannot make a run in run.directory={config.run.directory}: {error}") from error
    run = Run(path, config, continued=(path / CONFIG).exists())
    run.lock()
    try:
        _continue(run, config) if run.continued else _begin(run)
    except BaseException:
        run.close()
        raise
    return run


def _begin(run: Run) -> None:
    strangers = sorted(entry.name for entry in run.path.iterdir() if entry.name not in (LOCK, VERSIONS))
    if strangers:
        raise ConfigError(f"{run.path} is no run (it has no {CONFIG}) but holds {', '.join(strangers[:3])}; give another run.name")
    write_versions(run.path)
    run.save_config(run.config)  # last: a directory with a config is a run


def _continue(run: Run, config: TrainingConfig) -> None:
    run.config = load_config(run.path / CONFIG, env=config.env.id)
    run.change_config(keep_choices(run.config, config))
    run.check_versions()


def open_run(path_or_name: str | Path, *, directory: str | Path = "runs", env: str | None = None, hint: str = "") -> Run:
    """An existing run by its path, or by its name in `directory`. Not locked; `env` as for `load_config`; `hint` ends the error message."""
    for path in (Path(path_or_name), Path(directory) / path_or_name):
        if (path / CONFIG).is_file():
            return Run(path, load_config(path / CONFIG, env=env), continued=True)
    names = sorted(entry.parent.name for entry in Path(directory).glob(f"*/{CONFIG}"))
    if not names:
        raise ConfigError(f"there is no run {path_or_name}, and none in {directory}; inchworm train ENV makes one{hint}")
    near = difflib.get_close_matches(Path(path_or_name).name, names, n=3, cutoff=0.3) or names[-3:]
    raise ConfigError(f"there is no run {path_or_name}; nearest in {directory}: {', '.join(near)}{hint}")


def load_config(path: str | Path, *, env: str | None = None, allow: str = "--env {id}") -> TrainingConfig:
    """A config from a file. Code is never imported because a file says so: an id with ":" must be given as `env` too.

    `allow` is what the error tells people to type.
    """
    config = TrainingConfig.from_yaml(path)
    names_code = ":" in config.env.id and not config.env.id.startswith("envpool:")  # which names a world of one known package
    if names_code and env != config.env.id:
        raise ConfigError(
            f"{path} names code to import ({config.env.id}), which a file may not decide; "
            f"if you trust it, type: {allow.format(id=config.env.id)}"
        )
    return config


def config_changes(before: TrainingConfig, after: TrainingConfig) -> dict[str, str]:
    """Every field that differs, as name -> `ppo.gamma: 0.99 → 0.9`."""
    return _changes(before.to_dict(), after.to_dict())


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    old, new = _flat(before), _flat(after)
    names = [*old, *(name for name in new if name not in old)]
    return {name: f"{name}: {old.get(name)} → {new.get(name)}" for name in names if old.get(name) != new.get(name)}


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _make_unique(directory: Path, env_id: str) -> Path:
    """A new directory such as `CartPole-v1-20261115-214455-a1b2`: names sort by environment, then by time."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", env_id).strip("-.")[-60:] or "run"
    while True:
        path = directory / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
