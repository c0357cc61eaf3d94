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
from inchworm.tracking.shipping import Row, RunFacts, explain

DATABASE, ARTIFACTS = "mlflow.db", "mlartifacts"
MODEL_URI = "models:/"
BEST = "best"
"""The alias of the best version of a model."""

_ID, _SCORE, _SHA256, _METADATA = "inchworm.id", "inchworm.score", "inchworm.sha256", "inchworm.metadata"  # tags
RUNS = Path("runs")
"""Where the SQLite file of policies without a run is."""
_SCORED = "evaluation/mean_return"
_MOST_PARAMS = 100  # of a batch
_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""MLflow would try for many minutes, and `tracking/shipping` tries again anyway. Settings of the user's stay."""


def make_client(uri: str | None, directory: Path) -> tuple[Any, bool]:
    """Connect to a store: by default that of MLFLOW_TRACKING_URI, else the SQLite file in `directory`. Return whether it is that file."""
    try:
        from mlflow import MlflowClient
    except ImportError as error:
        raise MissingExtraError('MLflow is not installed; type: pip install "inchworm[mlflow]"') from error
    for name, value in _DEFAULTS.items():
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
        experiment = find_experiment(self._client, self._config.experiment or "inchworm", runs if embedded else None)
        found = self._client.search_runs([experiment], f"tags.`{_ID}` = '{state['id']}'", max_results=1)
        if found:
            self._mlflow_run = found[0]
            self._client.update_run(self._id, status="RUNNING")
        else:
            tags = {_ID: state["id"], "mlflow.note.content": str(run.config["run"]["notes"])}
            self._mlflow_run = self._client.create_run(experiment, run_name=run.name, tags=tags)
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
        name = self._config.model_name or re.sub(r"[/:.%\"']+", "-", config["env"]["id"])
        best = best_score(self._client, name)
        converged = config["convergence"]["target"] is not None and any(
            row.get("convergence/checks", 0) >= config["convergence"]["patience"] for row in rows
        )
        if best is not None and score <= best and not converged:
            return
        register_files(name, files, score, {}, client=self._client, run=self._mlflow_run)


def register_files(
    name: str, files: Sequence[Path], score: float | None, metadata: Mapping[str, Any], *, client: Any = None, run: Any = None
) -> int:
    """Register files as a version of a model, unless they are one; the version with the highest score gets the alias `best`.

    Without a `run` that they belong to, one is made for them.
    """
    if client is None:
        client, _ = make_client(None, RUNS)
    if not client.search_registered_models(f"name = '{name}'"):
        client.create_registered_model(name, description="Policies of inchworm; load_policy reads them.")
    best = best_score(client, name)
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    found = client.search_model_versions(f"name = '{name}'")
    version = next((one.version for one in found if one.tags.get(_SHA256) == digest), None)
    if version is None:
        if run is None:
            embedded = "MLFLOW_TRACKING_URI" not in os.environ
            run = client.create_run(find_experiment(client, "inchworm", RUNS.resolve() if embedded else None), run_name=name)
        folder = f"model-{digest[:12]}"  # never changed: it belongs to the version
        for file in files:
            client.log_artifact(run.info.run_id, str(file), folder)
        tags = {_SHA256: digest, _METADATA: json.dumps(dict(metadata)), **({} if score is None else {_SCORE: repr(score)})}
        source = f"{run.info.artifact_uri.rstrip('/')}/{folder}"
        version = client.create_model_version(name, source, run_id=run.info.run_id, tags=tags).version
    if score is not None and (best is None or score > best):
        client.set_registered_model_alias(name, BEST, version)
    return int(version)


def best_score(client: Any, name: str) -> float | None:
    """The score of the best registered version; None if there is none."""
    if not client.search_registered_models(f"name = '{name}'"):
        return None
    aliases = client.get_registered_model(name).aliases
    return float(client.get_model_version(name, aliases[BEST]).tags.get(_SCORE, "-inf")) if BEST in aliases else None


def registered_versions(name: str) -> dict[int, tuple[float | None, dict[str, Any]]]:
    """The versions of a model, with score and metadata."""
    client, _ = make_client(None, RUNS)
    return {
        int(one.version): (float(one.tags[_SCORE]) if _SCORE in one.tags else None, json.loads(one.tags.get(_METADATA, "{}")))
        for one in client.search_model_versions(f"name = '{name}'")
    }


def find_experiment(client: Any, name: str, directory: Path | None) -> str:
    """The id of an experiment, which is made if there is none; artifacts go next to the SQLite file in `directory`, if it is that."""
    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        return str(experiment.experiment_id)
    location = None if directory is None else (directory / ARTIFACTS).as_uri()  # MLflow's default is in the current directory
    return str(client.create_experiment(name, artifact_location=location))


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
def downloaded_model(uri: str) -> Iterator[Path]:
    """Download a registered policy, `models:/NAME@best` or `models:/NAME/3`, check it, and return its file for the block.

    The store is that of MLFLOW_TRACKING_URI, else the SQLite file in runs/.
    """
    match = re.fullmatch(r"models:/([^/@]+)(?:@([^/@]+)|/(\d+))", uri)
    if match is None:
        raise ConfigError(f"{uri} is not a registered policy; expected models:/NAME@best or models:/NAME/3")
    name, alias, number = match.groups()
    if "MLFLOW_TRACKING_URI" not in os.environ and not (RUNS / DATABASE).exists():
        raise ConfigError(f"{uri} names a registered policy, but there is no {RUNS / DATABASE}; set MLFLOW_TRACKING_URI to a server")
    client, _ = make_client(None, RUNS)
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
