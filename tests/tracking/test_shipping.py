"""Delivery to trackers: nothing is lost and nothing is repeated, whatever fails, hangs or is killed."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from doubles.runs import BATCH, small_config
from doubles.trackers import Recorder
from inchworm.config.sections import EvalConfig, MlflowConfig, TrackingConfig, TrainingConfig, WandbConfig
from inchworm.core.errors import ConfigError, CorruptFileError, InchwormError, MissingExtraError
from inchworm.tracking import shipping
from inchworm.tracking.jsonl import METRICS, TIMING, JsonlTracker
from inchworm.tracking.shipping import Delivery, check_installed, deliver, describe_left, make_deliveries, ship, with_trackers
from inchworm.tracking.sinks import Row, RunFacts, Sink, explain
from inchworm.train.trainer import PPOTrainer


class Server:
    """What a tracker has received; it may be down, or fail after it has accepted something."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, str, dict[str, float]]] = []  # number, time, step, file, values
        self.files: list[str] = []
        self.ended = 0
        self.down = self.forgets_to_answer = False
        self.ids: list[str] = []


class FakeSink(Sink):
    def __init__(self, server: Server) -> None:
        self.server = server

    def open(self, run: RunFacts, state: dict[str, Any]) -> None:
        self._check()
        self.server.ids.append(state["id"])

    def send(self, rows: Sequence[Row]) -> None:
        self._check()
        for row in rows:  # as MLflow does: equal rows of the same time are one
            entry = row.number, row.milliseconds, row.step, row.file, dict(row.values)
            if entry not in self.server.rows:
                self.server.rows.append(entry)
        if self.server.forgets_to_answer:
            raise TimeoutError("no answer")

    def send_file(self, path: Path) -> None:
        self._check()
        self.server.files.append(path.name)

    def finish(self) -> None:
        self.server.ended += 1

    def close(self) -> None:
        raise RuntimeError("closing fails, too")

    def _check(self) -> None:
        if self.server.down:
            raise ConnectionError("http://me:hunter2@host:5000 is down")


@pytest.fixture
def run(tmp_path: Path) -> RunFacts:
    return RunFacts(tmp_path / "run", TrainingConfig().to_dict())


def write(run: RunFacts, *iterations: int, seconds: float = 0.123456789012345) -> None:
    tracker = JsonlTracker(run.directory)
    for iteration in iterations:
        tracker.log({"iteration": iteration, "loss": iteration / 2, "timing/seconds": seconds}, 10 * iteration)
    tracker.close()


def delivery(run: RunFacts, server: Server, target: str = "") -> Delivery:
    return Delivery("fake", FakeSink(server), run, target)


def pump(one: Delivery) -> None:
    while one.pump():
        pass


def keys(server: Server) -> list[tuple[str, int]]:
    return sorted((file, step) for _, _, step, file, _ in server.rows)


def expected(*iterations: int) -> list[tuple[str, int]]:
    return sorted((file, 10 * iteration) for file in (METRICS, TIMING) for iteration in iterations)


def test_rows_are_delivered_once_also_by_a_process_that_begins_anew(run: RunFacts) -> None:
    server = Server()
    write(run, 1, 2)
    first = delivery(run, server)
    pump(first)
    write(run, 3)
    pump(first)
    again = delivery(run, server)
    assert not again.pump()
    write(run, 4)
    pump(again)
    assert keys(server) == expected(1, 2, 3, 4)
    assert sorted(number for number, *_ in server.rows) == list(range(8))
    assert server.rows[0][4] == {"iteration": 1.0, "loss": 0.5}
    assert len(set(server.ids)) == 1  # the same run there


def test_a_server_that_accepts_and_does_not_answer_gets_the_same_again_and_no_row_twice(run: RunFacts) -> None:
    server = Server()
    write(run, 1)
    one = delivery(run, server)
    pump(one)
    server.forgets_to_answer = True
    write(run, 2, 3)
    with pytest.raises(TimeoutError):
        one.pump()
    server.forgets_to_answer = False
    time.sleep(0.01)  # rows that are sent anew would have another time
    write(run, 4)
    pump(delivery(run, server))  # another process, after a kill
    assert keys(server) == expected(1, 2, 3, 4)


def test_rows_that_a_resumed_run_writes_again_are_not_delivered_again(run: RunFacts) -> None:
    server = Server()
    write(run, 1, 2, 3)
    first = delivery(run, server)
    pump(first)
    JsonlTracker(run.directory).truncate_after(1)  # the checkpoint
    write(run, 2, 3, 4, 5, seconds=1.0)  # shorter: row 4 begins before the end of the earlier file
    pump(first)  # the process of the killed training
    pump(delivery(run, server))
    assert keys(server) == expected(1, 2, 3, 4, 5)


def test_the_final_evaluation_has_the_step_of_the_last_iteration_and_is_delivered(run: RunFacts) -> None:
    server = Server()
    write(run, 1)
    one = delivery(run, server)
    pump(one)
    JsonlTracker(run.directory).log({"iteration": 1, "evaluation/mean_return": 5.0}, 10)
    pump(one)
    assert [values for *_, file, values in server.rows if file == METRICS][1] == {"evaluation/mean_return": 5.0}
    assert not delivery(run, server).pump()


def test_damaged_and_half_written_rows_and_numbers_that_are_none_are_skipped(run: RunFacts) -> None:
    server = Server()
    write(run, 1)
    with (run.directory / METRICS).open("ab") as file:
        file.write(b'nonsense\n[]\n{"loss": 1}\n{"env_steps": 20, "loss": null, "x": 1.5}\n{"env_steps": 30, "lo')
    one = delivery(run, server)
    pump(one)
    with (run.directory / METRICS).open("ab") as file:
        file.write(b'ss": 3}\n')
    pump(one)
    assert [(step, values) for _, _, step, file, values in server.rows if file == METRICS][1:] == [(20, {"x": 1.5}), (30, {"loss": 3.0})]


def test_another_target_gets_everything_from_the_beginning_and_a_damaged_position_is_named(run: RunFacts) -> None:
    one, other = Server(), Server()
    write(run, 1)
    pump(delivery(run, one, "here"))
    pump(delivery(run, other, "there"))
    assert keys(other) == keys(one) == expected(1)
    (run.folder / "fake.json").write_text("{")
    with pytest.raises(CorruptFileError, match=r"fake.json is damaged; remove it to deliver everything again"):
        delivery(run, one)


def test_files_are_delivered_at_the_end_and_again_only_if_they_change(run: RunFacts) -> None:
    server = Server()
    write(run, 1)
    for name in ("policy.safetensors", "config.yaml", "report.html", "secret.txt"):
        (run.directory / name).write_text(name)
    one = delivery(run, server)
    assert one.left() == "2 rows and 3 files"
    pump(one)
    one.finish()
    one.finish()
    (run.directory / "policy.safetensors").write_text("better")
    assert delivery(run, server).left() == "1 file"
    delivery(run, server).finish()
    assert server.files == ["config.yaml", "policy.safetensors", "report.html", "policy.safetensors"]
    assert server.ended == 2
    assert delivery(run, server).left() == ""


def start(run: RunFacts, server: Server, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[threading.Event, Any, list[str]]:
    """Deliver in a thread of this process, to a server that is none."""
    monkeypatch.setattr(shipping, "make_deliveries", lambda run, _: [delivery(run, server)])
    monkeypatch.setattr(shipping, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(shipping, "MOST_POLL_SECONDS", 0.02)
    monkeypatch.setattr(shipping, "RETRY_SECONDS", 0.02)
    warned: list[str] = []
    ending = threading.Event()
    thread = threading.Thread(target=deliver, args=(run, TrackingConfig(**settings), ending, warned.append), daemon=True)
    thread.start()
    return ending, thread, warned


def wait_for(condition: Any) -> None:
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("waited a minute")


def test_a_server_that_comes_back_has_every_row_once_after_one_warning(run: RunFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    ending, thread, warned = start(run, server, monkeypatch)
    write(run, 1)
    wait_for(lambda: keys(server) == expected(1))
    server.down = True
    write(run, 2)
    wait_for(lambda: warned)
    write(run, 3)
    time.sleep(0.1)  # several attempts
    server.down = False
    write(run, 4)
    ending.set()
    thread.join(60)
    assert keys(server) == expected(1, 2, 3, 4)
    assert server.ended == 1
    assert len(warned) == 1
    assert "hunter2" not in warned[0]
    assert "ConnectionError: http://…@host:5000 is down; training continues" in warned[0]


def test_a_server_that_stays_away_ends_in_bounded_time_and_leaves_a_count(run: RunFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    server.down = True
    write(run, 1, 2)
    ending, thread, warned = start(run, server, monkeypatch, finish_seconds=0.2)
    ending.set()
    thread.join(60)
    assert not thread.is_alive()
    assert len(warned) == 1
    assert delivery(run, server).left() == "4 rows"


def test_a_server_that_hangs_ends_in_bounded_time(run: RunFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    server, never = Server(), threading.Event()
    monkeypatch.setattr(FakeSink, "send", lambda *_: never.wait())
    write(run, 1)
    ending, thread, _ = start(run, server, monkeypatch, finish_seconds=0.2)
    ending.set()
    thread.join(60)
    assert not thread.is_alive()
    assert delivery(run, server).left() == "2 rows"
    never.set()


def test_one_process_delivers_a_run_at_a_time(run: RunFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    ending, thread, _ = start(run, Server(), monkeypatch)
    wait_for(lambda: (run.folder / "lock").exists())
    time.sleep(0.1)
    over = threading.Event()
    over.set()
    with pytest.raises(InchwormError, match="is being delivered by another process; wait for it"):
        deliver(run, TrackingConfig(), over, print)
    ending.set()
    thread.join(60)


def test_a_run_that_is_overwritten_gets_no_position_of_the_one_before(run: RunFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    ending, thread, _ = start(run, server, monkeypatch)
    write(run, 1, 2)
    wait_for(lambda: keys(server) == expected(1, 2))
    shutil.rmtree(run.directory)
    write(run, 1)  # another run
    ending.set()
    thread.join(60)
    assert not thread.is_alive()
    assert not (run.folder / "fake.json").exists()
    assert delivery(run, Server()).left() == "2 rows"


def test_a_url_in_an_error_loses_its_password() -> None:
    assert explain(ValueError("no https://me:pass@host/x\n here")) == "ValueError: no https://…@host/x here"
    assert len(explain(ValueError("x" * 1000))) < 220


def test_trackers_are_names_settings_and_objects() -> None:
    own = Recorder()
    wandb = WandbConfig(project="worm", mode="offline")
    tracking, rest = with_trackers(TrackingConfig(), ["csv", "tensorboard", "mlflow", wandb, own])
    assert tracking.sinks == ["csv", "tensorboard", "wandb", "mlflow"]
    assert tracking.wandb is wandb or tracking.wandb == wandb
    assert rest == [own]
    tracking, _ = with_trackers(tracking, [MlflowConfig(uri="http://127.0.0.1:1")])
    assert tracking.mlflow.uri == "http://127.0.0.1:1"
    for wrong in ("comet", 3):
        with pytest.raises(ConfigError, match="is not a tracker; use csv, tensorboard"):
            with_trackers(tracking, [wrong])


def test_a_missing_package_is_answered_with_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping.importlib.util, "find_spec", lambda name: None)
    check_installed(TrackingConfig(csv=True))
    for name, tracking in {
        "tensorboard": TrackingConfig(tensorboard=True),
        "wandb": TrackingConfig(wandb=WandbConfig(project="x")),
        "mlflow": TrackingConfig(mlflow=MlflowConfig(experiment="x")),
    }.items():
        with pytest.raises(MissingExtraError, match=rf'type: pip install "inchworm\[{name}\]"'):
            check_installed(tracking)


def test_a_password_is_refused_in_a_config_and_a_disabled_tracker_is_off() -> None:
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_PASSWORD"):
        MlflowConfig(uri="http://me:pass@host")
    assert TrackingConfig(wandb=WandbConfig(project="x", mode="disabled")).sinks == []


def test_trackers_need_a_run_directory() -> None:
    with pytest.raises(ConfigError, match=r"tracking.csv delivers what is in the directory of a run; set run.name, or give run_dir"):
        PPOTrainer("mlp", "CartPole-v1", num_envs=2, trackers=["csv"])


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_training_and_its_continuation_reach_csv_in_a_process_of_their_own(tmp_path: Path) -> None:
    config = small_config(iterations=4, evaluation=EvalConfig(interval=2, episodes=1, final_episodes=2), backend="numpy")
    own = Recorder()
    files: list[str] = []
    own.log_artifact = lambda path: files.append(path.name)  # type: ignore[method-assign]
    for iterations in (4, 6):
        with PPOTrainer("mlp", config.env, config, run_dir=tmp_path / "run", trackers=["csv", own]) as trainer:
            if iterations == 6:
                trainer.load_checkpoint()
            trainer.train(iterations * BATCH)
    rows = [json.loads(line) for line in (tmp_path / "run" / METRICS).read_text().splitlines()]
    found = table(tmp_path / "run" / "tracking" / "metrics.csv")
    assert [int(row["env_steps"]) for row in found] == [row["env_steps"] for row in rows]
    assert [row["evaluation/mean_return"] for row in found] == [str(row.get("evaluation/mean_return", "")) for row in rows]
    assert [float(row["policy_loss"]) for row in found if row["policy_loss"]] == [
        row["policy_loss"] for row in rows if "policy_loss" in row
    ]
    timing = table(tmp_path / "run" / "tracking" / "timing.csv")
    assert len(timing) == 6
    assert float(timing[0]["system/memory_mb"]) > 1
    assert {"config.yaml", "policy.safetensors", "best_policy.safetensors"} <= set(files)


PROGRAM = """
import sys
from doubles.runs import small_config
from inchworm.train.trainer import PPOTrainer
config = small_config(iterations=100_000, backend="numpy", checkpoint_interval=5)
trainer = PPOTrainer("mlp", config.env, config, run_dir=sys.argv[1], trackers=["csv"])
trainer.train()
"""


@pytest.mark.slow
def test_a_training_that_is_killed_and_resumed_has_every_row_once(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(directory)], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    position = directory / "tracking" / "csv.json"
    wait_for(lambda: position.exists() and json.loads(position.read_text())["number"] > 0)
    process.send_signal(signal.SIGKILL)
    process.wait()
    config = small_config(iterations=1, backend="numpy", checkpoint_interval=5)
    with PPOTrainer("mlp", config.env, config, run_dir=directory, trackers=["csv"]) as trainer:
        trainer.load_checkpoint()
        trainer.train(trainer.total_timesteps + 50 * BATCH)
    steps = [int(row["env_steps"]) for row in table(directory / "tracking" / "metrics.csv")]
    rows = [json.loads(line)["env_steps"] for line in (directory / METRICS).read_text().splitlines()]
    assert len(steps) == len(set(steps))
    assert set(rows) <= set(steps)
    assert [int(row["env_steps"]) for row in table(directory / "tracking" / "timing.csv")] == steps


def test_a_run_is_shipped_later(tmp_path: Path) -> None:
    config = small_config(iterations=2, backend="numpy")
    with PPOTrainer("mlp", config.env, config, run_dir=tmp_path / "run") as trainer:
        trainer.train()
    config = config.replace(tracking=TrackingConfig(csv=True))
    run = RunFacts(tmp_path / "run", config.to_dict())
    assert describe_left(run, config.tracking).startswith("not delivered yet: 4 rows and ")
    assert ship(tmp_path / "run", config, print) == ""
    assert ship(tmp_path / "run", config, print) == ""
    assert len(table(tmp_path / "run" / "tracking" / "metrics.csv")) == 2


def test_the_run_of_one_of_several_seeds_is_named_after_both(tmp_path: Path) -> None:
    (tmp_path / "runs" / "several" / "seed-0").mkdir(parents=True)
    run = RunFacts(tmp_path / "runs" / "several" / "seed-0", {})
    assert (run.runs, run.name) == (tmp_path / "runs" / "several", "seed-0")
    (tmp_path / "runs" / "several" / "bundle.yaml").touch()
    assert (run.runs, run.name) == (tmp_path / "runs", "several/seed-0")


def test_csv_lines_of_an_attempt_that_was_not_completed_are_cut_off(run: RunFacts) -> None:
    tracking = TrackingConfig(csv=True)
    write(run, 1, 2)
    (one,) = make_deliveries(run, tracking)
    pump(one)
    before = one.path.read_bytes()
    write(run, 3)
    JsonlTracker(run.directory).log({"iteration": 4, "new": 1.0}, 40)
    pump(one)
    one.path.write_bytes(before)  # killed before the position was written: the columns are there, and lines without a position
    (again,) = make_deliveries(run, tracking)
    pump(again)
    found = table(run.folder / "metrics.csv")
    assert [row["env_steps"] for row in found] == ["10", "20", "30", "40"]
    assert [row["new"] for row in found] == ["", "", "", "1.0"]
