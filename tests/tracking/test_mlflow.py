"""MLflow: a real server on 127.0.0.1, which is killed while a run trains, and the registry."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest

from doubles.runs import small_config
from inchworm import PolicyStore, load_policy
from inchworm.cli.main import main
from inchworm.config.sections import EvalConfig, MlflowConfig, TrackingConfig
from inchworm.core.errors import ConfigError, CorruptFileError
from inchworm.tracking.jsonl import METRICS, TIMING
from inchworm.tracking.metrics import grouped_name
from inchworm.tracking.shipping import ship
from inchworm.train.loop import TrainingState
from inchworm.train.trainer import PPOTrainer

pytestmark = pytest.mark.slow


class Server:
    """MLflow's server with a SQLite file, on a port of 127.0.0.1."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder, self.uri = folder, f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        store = [f"--backend-store-uri=sqlite:///{self.folder}/server.db", f"--artifacts-destination={self.folder}/artifacts"]
        command = [sys.executable, "-m", "mlflow", "server", *store, "--host=127.0.0.1", f"--port={self.port}", "--workers=1"]
        quick = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}  # it starts in half the time
        self._process = subprocess.Popen(
            command, env=os.environ | quick, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        for _ in range(1200):
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.1)
        raise AssertionError("the server did not start in two minutes")

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, 9)  # the server and its own workers
            self._process.wait()
            self._process = None


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    one = Server(tmp_path)
    one.start()
    yield one
    one.kill()


def written(directory: Path) -> list[tuple[str, int, float]]:
    """Every value in the files of a run, by the name that trackers show."""
    found = []
    for file in (METRICS, TIMING):
        for line in (directory / file).read_text().splitlines():
            row = json.loads(line)
            step = row.pop("env_steps")
            if file == TIMING or "policy_loss" not in row:
                row.pop("iteration")  # the first row of the step has it
            for name, value in row.items():
                full = f"timing/{name}" if file == TIMING and "/" not in name else name
                if value is not None:
                    found.append((grouped_name(full), step, float(value)))
    return sorted(found)


def received(uri: str, run: Any) -> list[tuple[str, int, float]]:
    client = mlflow.MlflowClient(uri)
    names = client.get_run(run.info.run_id).data.metrics
    return sorted((name, one.step, one.value) for name in names for one in client.get_metric_history(run.info.run_id, name))


def runs_of(uri: str, experiment: str) -> list[Any]:
    client = mlflow.MlflowClient(uri)
    return list(client.search_runs([client.get_experiment_by_name(experiment).experiment_id]))


class KillsServer:
    """Kills the server when it has received the first rows, and starts it again some iterations later."""

    def __init__(self, server: Server, position: Path) -> None:
        self._server, self._position = server, position

    def __call__(self, state: TrainingState, metrics: Any) -> None:
        if state.iteration == 2:  # the row of the first is written
            for _ in range(1200):
                position = json.loads(self._position.read_text()) if self._position.exists() else {}
                if position.get("rows") and not position["pending"]:  # sent
                    break
                time.sleep(0.1)
            self._server.kill()
        elif state.iteration == 5:
            self._server.start()


def test_a_server_that_is_killed_while_a_run_trains_has_every_row_once_and_the_policy(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluation = EvalConfig(interval=3, episodes=2, final_episodes=3)
    tracking = TrackingConfig(mlflow=MlflowConfig(uri=server.uri, experiment="worms", model_name="pole"), finish_seconds=300.0)
    config = small_config(iterations=8, evaluation=evaluation, backend="numpy", notes="a try").replace(tracking=tracking)
    directory = tmp_path / "run"
    kills = KillsServer(server, directory / "tracking" / "mlflow.json")
    with PPOTrainer("mlp", config.env, config, run_dir=directory, callbacks=[kills]) as trainer:
        trainer.train()
        weights = trainer.policy.get_weights()
    (run,) = runs_of(server.uri, "worms")
    expect = written(directory)
    assert {"loss/policy_loss", "evaluation/mean_return", "time/seconds", "system/cpu_share"} <= {name for name, _, _ in expect}
    assert received(server.uri, run) == expect
    assert run.info.status == "FINISHED"
    assert run.data.params["ppo.learning_rate"] == "0.0003"
    assert run.data.params["tracking.mlflow.uri"] == server.uri
    assert run.data.tags["mlflow.note.content"] == "a try"
    client = mlflow.MlflowClient(server.uri)
    names = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert {"policy.safetensors", "best_policy.safetensors", "config.yaml", "versions.json"} <= names

    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    monkeypatch.chdir(tmp_path)
    best = load_policy("models:/pole@best").get_weights()
    saved = load_policy(directory / "best_policy.safetensors").get_weights()
    assert best.keys() == weights.keys()
    assert all(np.array_equal(best[name], saved[name]) for name in best)
    version = client.get_model_version_by_alias("pole", "best")
    assert float(version.tags["inchworm.score"]) == max(value for name, _, value in expect if name == "evaluation/mean_return")
    with pytest.raises(ConfigError, match="models:/pole@worst cannot be loaded"):
        load_policy("models:/pole@worst")
    client.set_model_version_tag("pole", version.version, "inchworm.sha256", "0" * 64)
    with pytest.raises(CorruptFileError, match="models:/pole@best is not what was registered"):
        load_policy("models:/pole@best")


def test_a_server_that_never_answers_is_left_with_the_command_for_later(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        tracking = TrackingConfig(csv=True, mlflow=MlflowConfig(uri=uri), finish_seconds=3.0)
        config = small_config(iterations=2, backend="numpy").replace(tracking=tracking)
        left = r"not delivered yet: 4 rows and \d files to mlflow; type: inchworm ship .*/silent$"
        with pytest.warns(UserWarning, match=left), PPOTrainer("mlp", config.env, config, run_dir=tmp_path / "silent") as trainer:
            trainer.train()
    assert len((tmp_path / "silent" / "tracking" / "metrics.csv").read_text().splitlines()) == 3  # the others have everything


def test_the_best_policy_of_several_runs_is_registered_in_a_file_next_to_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "c0ffeec0ffee")
    with pytest.raises(ConfigError, match=r"there is no runs/mlflow.db; set MLFLOW_TRACKING_URI to a server"):
        load_policy("models:/CartPole-v1@best")
    config = small_config(iterations=2, evaluation=EvalConfig(interval=1, episodes=2, final_episodes=0), backend="numpy")
    tracking = TrackingConfig(mlflow=MlflowConfig(experiment="worms"), finish_seconds=300.0)
    for name, score in (("good", 100.0), ("worse", 50.0), ("better", 200.0)):
        directory = Path("runs") / name
        seeded = config.replace(run=config.run.replace(seed=int(score)))
        with PPOTrainer("mlp", config.env, seeded, run_dir=directory) as trainer:
            trainer.train()
        rows = [json.loads(line) | {"evaluation/mean_return": score} for line in (directory / METRICS).read_text().splitlines()]
        (directory / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert ship(directory, seeded.replace(tracking=tracking), print) == ""
        assert ship(directory, seeded.replace(tracking=tracking), print) == ""  # nothing is registered twice
    store = PolicyStore("models:/CartPole-v1")
    assert [(record.version, record.score) for record in store.list()] == [(1, 100.0), (2, 200.0)]
    best = load_policy("models:/CartPole-v1@best").get_weights()
    saved = load_policy("runs/better/best_policy.safetensors").get_weights()
    assert all(np.array_equal(best[name], saved[name]) for name in best)
    record = store.save(load_policy("runs/good"), score=300.0, metadata={"from": "hand"})
    assert store.get("best") == record == store.get(3)
    assert store.load("best").get_weights().keys() == best.keys()
    assert (tmp_path / "runs" / "mlartifacts").is_dir()
    assert not (tmp_path / "mlruns").exists()
    assert main(["evaluate", "models:/CartPole-v1/2", "--env", "CartPole-v1", "--episodes", "2"]) == 0
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"c0ffeec0ffee" in path.read_bytes()]
