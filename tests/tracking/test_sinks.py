"""TensorBoard's and W&B's own files, read back."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from wandb.proto.wandb_internal_pb2 import Record

from doubles.runs import small_config
from inchworm.config.sections import EvalConfig, TrackingConfig, TrainingConfig, WandbConfig
from inchworm.tracking.jsonl import METRICS, JsonlTracker
from inchworm.tracking.shipping import Delivery, make_deliveries
from inchworm.tracking.sinks import RunFacts
from inchworm.train.trainer import PPOTrainer


@pytest.fixture
def run(tmp_path: Path) -> RunFacts:
    return RunFacts(tmp_path / "run", TrainingConfig().to_dict())


def write(run: RunFacts, *iterations: int) -> None:
    tracker = JsonlTracker(run.directory)
    for iteration in iterations:
        tracker.log({"iteration": iteration, "loss": iteration / 2, "timing/seconds": 1.0}, 10 * iteration)


def scalars(folder: Path) -> list[tuple[str, int, float]]:
    """Every scalar of the event files in a folder, in order, as TensorBoard reads them."""
    found = []
    for path in sorted(folder.glob("*tfevents*")):
        for event in EventFileLoader(str(path)).Load():
            values = [value for value in event.summary.value if value.metadata.plugin_data.plugin_name == "scalars"]
            found += [(value.tag, event.step, value.tensor.float_val[0]) for value in values]
    return found


def pump(*deliveries: Delivery) -> None:
    for one in deliveries:
        while one.pump():
            pass


def test_event_files_hold_every_row_once_also_after_a_kill_between_writing_and_noting_it(run: RunFacts) -> None:
    tracking = TrackingConfig(tensorboard=True)
    write(run, 1)
    (one,) = make_deliveries(run, tracking)
    pump(one)
    before = one.path.read_bytes()
    write(run, 2)
    pump(one)
    one.reset()
    one.path.write_bytes(before)
    pump(*make_deliveries(run, tracking))
    found = scalars(run.folder / "tensorboard")
    assert sorted(found) == sorted(
        [
            *[("episode/iteration", 10 * step, float(step)) for step in (1, 2)],
            *[("loss/loss", 10 * step, step / 2) for step in (1, 2)],
            *[("time/seconds", 10 * step, 1.0) for step in (1, 2)],
        ]
    )


@pytest.mark.slow
def test_a_training_reaches_tensorboard(tmp_path: Path) -> None:
    config = small_config(iterations=4, evaluation=EvalConfig(interval=0, final_episodes=2), backend="numpy")
    with PPOTrainer("mlp", config.env, config, run_dir=tmp_path, trackers=["tensorboard"]) as trainer:
        trainer.train()
    rows = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    found = scalars(tmp_path / "tracking" / "tensorboard")
    losses = [("loss/policy_loss", row["env_steps"], pytest.approx(row["policy_loss"])) for row in rows if "policy_loss" in row]
    assert [entry for entry in found if entry[0] == "loss/policy_loss"] == losses
    assert {"update/approx_kl", "evaluation/mean_return", "time/collect_seconds", "system/memory_mb"} <= {tag for tag, _, _ in found}
    (file,) = (tmp_path / "tracking" / "tensorboard").iterdir()
    assert b"config.yaml/text_summary" in file.read_bytes()


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a file of W&B: a header of 7 bytes, then LevelDB's log format in blocks of 32 KiB."""
    content, place, parts = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def history(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        records = [record.history for record in wandb_records(path) if record.WhichOneof("record_type") == "history"]
        rows += [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.item} for record in records]
    return rows


@pytest.mark.slow
def test_a_training_and_its_continuation_reach_files_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    canary = "c0ffee" * 7
    for secret in ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(secret, canary[:40])
    config = small_config(iterations=3, backend="numpy", notes="a try")
    for iterations in (3, 5):
        trackers = [WandbConfig(project="worm", mode="offline", tags=["one"], name="first")]
        with PPOTrainer("mlp", config.env, config, run_dir=tmp_path, trackers=trackers) as trainer:
            if iterations == 5:
                trainer.load_checkpoint()
            trainer.train(iterations * 16)
    rows = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    found = history(tmp_path / "tracking" / "wandb")
    losses = [(row["env_steps"], row["loss/policy_loss"]) for row in found if "loss/policy_loss" in row]
    assert losses == [(row["env_steps"], pytest.approx(row["policy_loss"])) for row in rows]
    assert sorted(row["_step"] for row in found) == list(range(10))  # five rows of metrics, five of timing
    files = sorted((tmp_path / "tracking" / "wandb").glob("wandb/offline-run-*/*.wandb"))
    runs = [record.run for path in files for record in wandb_records(path) if record.WhichOneof("record_type") == "run"]
    assert {(run.project, run.display_name, run.notes, tuple(run.tags)) for run in runs} == {("worm", "first", "a try", ("one",))}
    assert len({run.run_id for run in runs}) == 1
    logged = [record.request for path in files for record in wandb_records(path) if record.WhichOneof("record_type") == "artifact"]
    assert len(logged) >= 3  # policy, config, versions
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"c0ffeec0ffee" in path.read_bytes()]
