"""A bundle: runs that differ only in their seed, in one directory.

```
runs/first/
  bundle.yaml            the seeds, and the config that they share
  seed-0/ seed-1/ …      one ordinary run each
  summary.json  summary.md
  lock
```
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from inchworm.config.reading import FROM_LIST, ConfigBase, config_class
from inchworm.config.sections import NonNegative, TrainingConfig
from inchworm.core.errors import ConfigError
from inchworm.core.protocols import Closes
from inchworm.core.tensor_file import remove_temporaries, write_atomically
from inchworm.run.directory import (
    BUNDLE,
    CONFIG,
    LOCK,
    REPORT,
    Run,
    check_config,
    find_named,
    keep_choices,
    make_run_directory,
    refuse_code,
    take_lock,
)

SUMMARY_JSON, SUMMARY_PAGE = "summary.json", "summary.md"


@config_class("bundle.")
class BundleConfig(ConfigBase):
    """The content of `bundle.yaml`."""

    seeds: Annotated[tuple[NonNegative, ...], FROM_LIST]
    """The seeds, in increasing order."""
    together: bool = False
    """Whether one program trains all seeds at once, so that they can only be resumed together exactly."""
    config: TrainingConfig
    """The config that the runs share; `run.seed` is the first seed that was asked for."""


class Bundle(Closes):
    """A directory of runs that differ only in their seed. Training it needs its lock; reading does not."""

    def __init__(self, path: Path, content: BundleConfig, *, continued: bool) -> None:
        """`continued` is true for a bundle that existed before."""
        self.path, self.continued = path, continued
        self.seeds, self.together, self.config = content.seeds, content.together, content.config
        self.altered = False
        """Whether seeds that have begun are trained by another program from now on: one with more seeds, or of the other kind."""
        self._lock: int | None = None

    @property
    def typed(self) -> str:
        """The bundle as it is typed after a command, quoted for a shell."""
        return Run(self.path, self.config, continued=True).typed

    def run_path(self, seed: int) -> Path:
        """The directory of one seed's run."""
        return self.path / f"seed-{seed}"

    def log_path(self, seed: int) -> Path:
        """The file for what one seed's process prints, and for the traceback of its error; it exists only if there is something."""
        return self.path / f"seed-{seed}.log"

    def run_config(self, seed: int) -> TrainingConfig:
        """The config of one seed's run: that of a single run with `run.seed`, at its place in this directory."""
        own = {"seed": seed, "name": self.run_path(seed).name, "directory": str(self.path)}
        return self.config.replace(run=self.config.run.replace(**own))

    def find_run(self, seed: int) -> Run | None:
        """One seed's run, not locked; None if it has not begun."""
        path = self.run_path(seed)
        if not (path / CONFIG).is_file():
            return None
        return Run(path, TrainingConfig.from_yaml(path / CONFIG), continued=True)

    def lock(self) -> None:
        """Become the one process that trains the bundle."""
        if self._lock is None:
            self._lock = take_lock(self.path / LOCK, f"the bundle {self.path}")
            remove_temporaries(self.path)

    def update(self, config: TrainingConfig, seeds: Sequence[int] = (), *, together: bool | None = None) -> None:
        """Continue with `config`, if it differs only where that does not alter completed training, and with more seeds."""
        check_config(self.path, self.config, config)
        every, together = tuple(sorted({*self.seeds, *seeds})), self.together if together is None else together
        if (every, together, config) != (self.seeds, self.together, self.config):
            self.altered |= self.continued and (together, together and every) != (self.together, self.together and self.seeds)
            self.seeds, self.together, self.config = every, together, config
            self.save()

    def save(self) -> None:
        """Write `bundle.yaml`."""
        write_atomically(self.path / BUNDLE, BundleConfig(seeds=self.seeds, together=self.together, config=self.config).to_yaml())

    def write_summary(self, data: Mapping[str, Any], page: str) -> None:
        """Write the summary beside the runs, as JSON and as a page."""
        write_atomically(self.path / SUMMARY_JSON, json.dumps(data, indent=2, allow_nan=False) + "\n")
        write_atomically(self.path / SUMMARY_PAGE, page)

    def discard(self) -> None:
        """Remove the directory of a new bundle none of whose runs has trained."""
        if self.continued:
            return
        for seed in self.seeds:
            if self.run_path(seed).is_dir():
                Run(self.run_path(seed), self.config, continued=False).discard()
        if not any(self.run_path(seed).exists() for seed in self.seeds):
            shutil.rmtree(self.path)

    def clear(self) -> None:
        """Delete every run and summary, so that the bundle is new again. No run may be in use."""
        for seed in self.seeds:
            run = self.find_run(seed)
            if run is not None:
                with run:
                    run.lock()
                    run.clear()
            shutil.rmtree(self.run_path(seed), ignore_errors=True)
            self.log_path(seed).unlink(missing_ok=True)
        for name in (SUMMARY_JSON, SUMMARY_PAGE, REPORT, BUNDLE):
            (self.path / name).unlink(missing_ok=True)
        self.continued = False

    def close(self) -> None:
        """Release the lock."""
        descriptor, self._lock = self._lock, None
        if descriptor is not None:
            os.close(descriptor)


def create_bundle(config: TrainingConfig, seeds: Sequence[int], *, overwrite: bool = False) -> Bundle:
    """Create and lock the bundle that `config` describes: a new directory, or an existing one named `run.name` with an equal config.

    An existing bundle keeps its seeds and gets those that are new. With `overwrite` it is deleted first.
    """
    if not seeds:
        raise ConfigError("a bundle needs 1 seed or more")
    path = make_run_directory(config)
    content = BundleConfig(seeds=tuple(sorted(set(seeds))), config=config)
    if (path / BUNDLE).exists() and not overwrite:
        bundle = open_bundle(path, env=config.env.id)
        bundle.lock()
        try:
            asked = keep_choices(bundle.config, config)
            bundle.update(asked.replace(run=asked.run.replace(seed=bundle.config.run.seed)), seeds)
        except BaseException:
            bundle.close()
            raise
        return bundle
    bundle = Bundle(path, content, continued=False)
    bundle.lock()
    try:
        if (path / BUNDLE).exists():
            Bundle(path, BundleConfig.from_yaml(path / BUNDLE), continued=True).clear()
        others = sorted(entry.name for entry in path.iterdir() if entry.name != LOCK)
        if others:
            what = "is a single run" if CONFIG in others else f"is not a bundle of seeds and holds {', '.join(others[:3])}"
            raise ConfigError(f"{path} {what}; use another run.name for several seeds")
        bundle.save()
    except BaseException:
        bundle.close()
        raise
    return bundle


def is_bundle(path_or_name: str | Path, directory: str | Path = "runs") -> bool:
    """Whether a path, or a name in `directory`, is a bundle."""
    return find_bundle(path_or_name, directory) is not None


def find_bundle(path_or_name: str | Path, directory: str | Path = "runs") -> Path | None:
    """The directory of a bundle that a path, or a name in `directory`, names; None if it names none."""
    return find_named(path_or_name, BUNDLE, directory)


def open_bundle(path_or_name: str | Path, *, directory: str | Path = "runs", env: str | None = None) -> Bundle:
    """Open an existing bundle by its path, or by its name in `directory`, without locking it. `env` as for `load_config`."""
    path = find_bundle(path_or_name, directory)
    if path is None:
        raise ConfigError(f"there is no bundle of seeds {path_or_name}; inchworm train ENV --seeds N makes one")
    content = BundleConfig.from_yaml(path / BUNDLE)
    refuse_code(content.config, path / BUNDLE, env)
    return Bundle(path, content, continued=True)


def why_not_alone(run: Run) -> str:
    """Why resuming a run alone is not exact, in a sentence: one program trains all seeds of its bundle at once. Else empty."""
    path = run.path.resolve().parent
    if not run.name.startswith("seed-") or not (path / BUNDLE).is_file() or not BundleConfig.from_yaml(path / BUNDLE).together:
        return ""
    typed = shlex.quote(str(run.path.parent))
    return f"{run.name} was trained in one program with the other seeds of its bundle; to resume all exactly: inchworm resume {typed}"
