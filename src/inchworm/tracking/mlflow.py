"""MLflow: a run's parameters, metrics and files, its best policy in the model registry, and policies from there.

Without a server everything is in the SQLite file `mlflow.db` next to the runs: `mlflow ui --backend-store-uri sqlite:///runs/mlflow.db`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from inchworm.config.sections import MlflowConfig
from inchworm.core.errors import ConfigError, CorruptFileError, MissingExtraError
from inchworm.tracking.jsonl import METRICS, read_rows
from inchworm.tracking.sinks import Row, RunFacts, Sink, explain

DATABASE, ARTIFACTS = "mlflow.db", "mlartifacts"
RUNS = Path("runs")
"""Where the SQLite file is looked for by what knows no run."""
MODEL_URI = "models:/"
BEST = "best"
"""The alias of the best version of a model."""

_ID, _SCORE, _SHA256, _METADATA = "inchworm.id", "inchworm.score", "inchworm.sha256", "inchworm.metadata"  # tags
_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""MLflow would try for many minutes, and `tracking/shipping` tries again anyway. Settings of the user's stay."""


class MlflowSink(Sink):
    """A run of MLflow, which recognises metrics that are sent again by their step, time and value."""

    def __init__(self, config: MlflowConfig) -> None:
        self._config = config

    def open(self, run: RunFacts, state: dict[str, Any]) -> None:
        """Find the run there by its id, or begin it with its parameters."""
        self._run = run
        self._store = Store(self._config.uri, run.runs)
        client, experiment = self._store.client, self._store.experiment(self._config.experiment or "inchworm")
        found = client.search_runs([experiment], f"tags.`{_ID}` = '{state['id']}'", max_results=1)
        tags = {_ID: state["id"], "mlflow.note.content": str(run.config["run"]["notes"])}
        self._info = (found[0] if found else client.create_run(experiment, run_name=run.name, tags=tags)).info
        client.update_run(self._info.run_id, status="RUNNING")
        if not state.get("params"):  # MLflow accepts them again only with the same values, and config.yaml has those of a resumed run
            from mlflow.entities import Param

            params = [Param(name, str(value)[:6000]) for name, value in _flat(run.config)]
            for start in range(0, len(params), 100):  # of a batch
                client.log_batch(self._info.run_id, params=params[start : start + 100])
            state["params"] = True

    def send(self, rows: Sequence[Row]) -> None:
        """Log the rows as one batch or several."""
        from mlflow.entities import Metric

        metrics = [
            Metric(re.sub(r"[^\w./ \-]", "_", name)[:250], value, row.milliseconds, row.step)  # names with characters that it accepts
            for row in rows
            for name, value in row.grouped.items()
        ]
        for start in range(0, len(metrics), 1000):
            self._store.client.log_batch(self._info.run_id, metrics=metrics[start : start + 1000])

    def send_file(self, path: Path) -> None:
        """Log the file as an artifact."""
        self._store.client.log_artifact(self._info.run_id, str(path))

    def finish(self) -> None:
        """Register the best policy if the run has converged or improves on the best registered one, and end the run."""
        directory, config = self._run.directory, self._run.config
        files = sorted(directory.glob("best_policy*.safetensors")) or sorted(directory.glob("policy*.safetensors"))
        rows = read_rows(directory / METRICS) if self._config.register and files else []
        score = max((row["evaluation/mean_return"] for row in rows if type(row.get("evaluation/mean_return")) is float), default=None)
        if score is not None:
            name = self._config.model_name or re.sub(r"[/:.%\"']+", "-", config["env"]["id"])
            best = self._store.best_score(name)
            if best is None or score > best or any(row.get("convergence/converged") for row in rows):
                self._store.register(name, files, score, {}, self._info)
        self._store.client.set_terminated(self._info.run_id, "FINISHED")


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


class Store:
    """A store of MLflow with its registry: a server or another store by URI, by default MLFLOW_TRACKING_URI, else the SQLite file."""

    def __init__(self, uri: str | None = None, directory: Path = RUNS) -> None:
        """`directory` is that of the SQLite file."""
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise MissingExtraError('MLflow is not installed; type: pip install "inchworm[mlflow]"') from error
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
        uri = uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._directory = directory.resolve() if uri is None else None
        self.client: Any = MlflowClient(uri or f"sqlite:///{directory.resolve() / DATABASE}")

    def experiment(self, name: str) -> str:
        """The id of an experiment, which is made if there is none."""
        found = self.client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        location = None if self._directory is None else (self._directory / ARTIFACTS).as_uri()  # by default in the current directory
        return str(self.client.create_experiment(name, artifact_location=location))

    def best_score(self, name: str) -> float | None:
        """The score of the best version of a model; None if there is none."""
        models = self.client.search_registered_models(f"name = '{name}'")
        if not models or BEST not in models[0].aliases:
            return None
        return float(self.client.get_model_version(name, models[0].aliases[BEST]).tags.get(_SCORE, "-inf"))

    def register(self, name: str, files: Sequence[Path], score: float | None, metadata: Mapping[str, Any], info: Any = None) -> int:
        """Register files as a version of a model, unless they are one; the version with the highest score gets the alias `best`.

        `info` is of the run that they belong to; without it one is made for them.
        """
        client = self.client
        if not client.search_registered_models(f"name = '{name}'"):
            client.create_registered_model(name, description="Policies of inchworm; load_policy reads them.")
        best, digest = self.best_score(name), _digest(files)
        found = client.search_model_versions(f"name = '{name}'")
        version = next((one.version for one in found if one.tags.get(_SHA256) == digest), None)
        if version is None:
            info = info or client.create_run(self.experiment("inchworm"), run_name=name).info
            folder = f"model-{digest[:12]}"  # never changed: it belongs to the version
            for file in files:
                client.log_artifact(info.run_id, str(file), folder)
            tags = {_SHA256: digest, _METADATA: json.dumps(dict(metadata)), **({} if score is None else {_SCORE: repr(score)})}
            source = f"{info.artifact_uri.rstrip('/')}/{folder}"
            version = client.create_model_version(name, source, run_id=info.run_id, tags=tags).version  # last: a version is complete
        if score is not None and (best is None or score > best):
            client.set_registered_model_alias(name, BEST, version)
        return int(version)

    def versions(self, name: str) -> dict[int, tuple[float | None, dict[str, Any]]]:
        """The versions of a model in order, with score and metadata."""
        found = {int(one.version): one.tags for one in self.client.search_model_versions(f"name = '{name}'")}
        return {
            version: (float(tags[_SCORE]) if _SCORE in tags else None, json.loads(tags.get(_METADATA, "{}")))
            for version, tags in sorted(found.items())
        }


def _digest(files: Sequence[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@contextmanager
def downloaded_model(uri: str) -> Iterator[Path]:
    """Download a registered policy, `models:/NAME@best` or `models:/NAME/3`, verify it, and return its file for the block.

    The store is that of MLFLOW_TRACKING_URI, else the SQLite file in runs/.
    """
    match = re.fullmatch(r"models:/([^/@]+)(?:@([^/@]+)|/(\d+))", uri)
    if match is None:
        raise ConfigError(f"{uri} is not a registered policy; expected models:/NAME@best or models:/NAME/3")
    name, alias, number = match.groups()
    if "MLFLOW_TRACKING_URI" not in os.environ and not (RUNS / DATABASE).exists():
        raise ConfigError(f"{uri} names a registered policy, but there is no {RUNS / DATABASE}; set MLFLOW_TRACKING_URI to a server")
    client = Store().client
    from mlflow.exceptions import MlflowException

    with tempfile.TemporaryDirectory(prefix="inchworm-model-") as folder:
        try:
            version = client.get_model_version_by_alias(name, alias) if alias else client.get_model_version(name, number)
            path = Path(client.download_artifacts(version.run_id, Path(version.source).name, folder))
        except (MlflowException, OSError) as error:
            raise ConfigError(f"{uri} cannot be loaded: {explain(error)}") from None
        files = sorted(path.glob("*.safetensors"))
        if not files or version.tags.get(_SHA256) != _digest(files):
            raise CorruptFileError(f"{uri} is not what was registered: its files have another checksum")
        if len(files) > 1:
            raise ConfigError(f"{uri} holds several policies ({', '.join(file.name for file in files)}); download it and load one of them")
        yield files[0]
