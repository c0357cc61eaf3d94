"""MLflow: a run's parameters, metrics and files, its best policy in the model registry, and policies from there.

Without a server everything is in the SQLite file `mlflow.db` next to the runs: `mlflow ui --backend-store-uri sqlite:///runs/mlflow.db`.
"""

from __future__ import annotations

import hashlib
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
from inchworm.tracking.shipping import Row, RunFacts, explain

DATABASE, ARTIFACTS = "mlflow.db", "mlartifacts"
MODEL_URI = "models:/"
BEST = "best"
"""The alias of the best version of a model."""

_ID, _SCORE, _SHA256 = "inchworm.id", "inchworm.score", "inchworm.sha256"  # tags
_SCORED = "evaluation/mean_return"
_MOST_PARAMS = 100  # of a batch
_QUICK = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1"}
"""MLflow would try for many minutes, and `tracking/shipping` tries again anyway. Settings of the user's stay."""


def make_client(uri: str | None, directory: Path) -> tuple[Any, bool]:
    """Connect to a store: by default that of MLFLOW_TRACKING_URI, else the SQLite file in `directory`. Return whether it is that file."""
    try:
        from mlflow import MlflowClient
    except ImportError as error:
        raise MissingExtraError('MLflow is not installed; type: pip install "inchworm[mlflow]"') from error
    for name, value in _QUICK.items():
        os.environ.setdefault(name, value)
    uri = uri or os.environ.get("MLFLOW_TRACKING_URI")
    return MlflowClient(uri or f"sqlite:///{directory.resolve() / DATABASE}"), uri is None


class MlflowSink:
    """A run of MLflow. It recognises metrics that are sent again by their step, time and value."""

    def __init__(self, config: MlflowConfig) -> None:
        self._config = config

    def open(self, run: RunFacts, state: dict[str, Any]) -> None:
        """Find the run there by its id, or begin it with its parameters."""
        runs = run.directory.resolve().parent
        self._run, self._state = run, state
        self._client, embedded = make_client(self._config.uri, runs)
        name = self._config.experiment or "inchworm"
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            location = (runs / ARTIFACTS).as_uri() if embedded else None  # the default would be in the current directory
            experiment = self._client.get_experiment(self._client.create_experiment(name, artifact_location=location))
        found = self._client.search_runs([experiment.experiment_id], f"tags.`{_ID}` = '{state['id']}'", max_results=1)
        if found:
            self._mlflow_run = found[0]
            self._client.update_run(self._id, status="RUNNING")
        else:
            tags = {_ID: state["id"], "mlflow.note.content": str(run.config["run"]["notes"])}
            self._mlflow_run = self._client.create_run(experiment.experiment_id, run_name=run.name, tags=tags)
        if not state.get("params"):
            self._send_params()
            state["params"] = True

    @property
    def _id(self) -> str:
        return str(self._mlflow_run.info.run_id)

    def _send_params(self) -> None:
        """MLflow accepts a parameter again only with the same value; a resumed run with changed settings has them in its config file."""
        from mlflow.entities import Param

        params = [Param(name, str(value)[:6000]) for name, value in _flat(self._run.config)]
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + _MOST_PARAMS])

    def send(self, rows: Sequence[Row], milliseconds: int) -> None:
        """Log the rows as one batch or several."""
        from mlflow.entities import Metric

        metrics = [Metric(_metric_name(name), value, milliseconds, row.step) for row in rows for name, value in row.grouped.items()]
        for start in range(0, len(metrics), 1000):
            self._client.log_batch(self._id, metrics=metrics[start : start + 1000])

    def send_file(self, path: Path) -> None:
        """Log the file as an artifact."""
        self._client.log_artifact(self._id, str(path))

    def finish(self) -> None:
        """Register the policy if it deserves it, and end the run."""
        if self._config.register:
            self._register()
        self._client.set_terminated(self._id, "FINISHED")

    def close(self) -> None:
        """Connections are not kept."""

    def _register(self) -> None:
        """Register the best policy if the run has converged or improves on the best registered one, which has the alias `best`."""
        directory, config = self._run.directory, self._run.config
        rows = read_rows(directory / METRICS)
        score = max((row[_SCORED] for row in rows if type(row.get(_SCORED)) is float), default=None)
        files = sorted(directory.glob("best_policy*.safetensors")) or sorted(directory.glob("policy*.safetensors"))
        if score is None or not files:
            return
        digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
        name = self._config.model or re.sub(r"[/:.%\"']+", "-", config["env"]["id"])
        best = self._best_score(name)
        converged = config["convergence"]["target"] is not None and any(
            row.get("convergence/checks", 0) >= config["convergence"]["patience"] for row in rows
        )
        if best is not None and score <= best and not converged:
            return
        versions = self._client.search_model_versions(f"name = '{name}'")
        version = next((one.version for one in versions if one.tags.get(_SHA256) == digest), None)
        if version is None:
            folder = f"model-{digest[:12]}"  # never changed: it belongs to the version
            for file in files:
                self._client.log_artifact(self._id, str(file), folder)
            tags = {_SCORE: repr(score), _SHA256: digest, _ID: self._state["id"]}
            source = f"{self._mlflow_run.info.artifact_uri.rstrip('/')}/{folder}"
            version = self._client.create_model_version(name, source, run_id=self._id, tags=tags).version
        if best is None or score > best:
            self._client.set_registered_model_alias(name, BEST, version)

    def _best_score(self, name: str) -> float | None:
        """The score of the best registered version; None if there is none. The model is made if there is none."""
        if not self._client.search_registered_models(f"name = '{name}'"):
            self._client.create_registered_model(name, description="Policies of inchworm; load_policy reads them.")
            return None
        aliases = self._client.get_registered_model(name).aliases
        if BEST not in aliases:
            return None
        return float(self._client.get_model_version(name, aliases[BEST]).tags.get(_SCORE, "-inf"))


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _metric_name(name: str) -> str:
    """Replace what MLflow does not accept in names."""
    return re.sub(r"[^\w./ \-]", "_", name)[:250]


@contextmanager
def downloaded_model(uri: str, directory: Path) -> Iterator[Path]:
    """Download a registered policy, `models:/NAME@best` or `models:/NAME/3`, check it, and return its file for the block.

    The store is that of MLFLOW_TRACKING_URI, else the SQLite file in `directory`.
    """
    match = re.fullmatch(r"models:/([^/@]+)(?:@([^/@]+)|/(\d+))", uri)
    if match is None:
        raise ConfigError(f"{uri} is not a registered policy; expected models:/NAME@best or models:/NAME/3")
    name, alias, number = match.groups()
    if "MLFLOW_TRACKING_URI" not in os.environ and not (directory / DATABASE).exists():
        raise ConfigError(f"{uri} names a registered policy, but there is no {directory / DATABASE}; set MLFLOW_TRACKING_URI to a server")
    client, _ = make_client(None, directory)
    from mlflow.exceptions import MlflowException

    with tempfile.TemporaryDirectory(prefix="inchworm-model-") as folder:
        try:
            version = client.get_model_version_by_alias(name, alias) if alias else client.get_model_version(name, number)
            path = Path(client.download_artifacts(version.run_id, Path(version.source).name, folder))
        except (MlflowException, OSError) as error:
            raise ConfigError(f"{uri} cannot be loaded: {explain(error)}") from None
        files = sorted(path.glob("*.safetensors"))
        found = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
        if not files or version.tags.get(_SHA256) != found:
            raise CorruptFileError(f"{uri} is not what was registered: its files have another checksum")
        if len(files) > 1:
            raise ConfigError(f"{uri} holds several policies ({', '.join(file.name for file in files)}); download it and load one of them")
        yield files[0]
