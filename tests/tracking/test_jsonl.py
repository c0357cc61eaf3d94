import json
import os
from pathlib import Path

import pytest
import yaml

from inchworm.core.protocols import Tracker
from inchworm.tracking.jsonl import JsonlTracker, read_rows


def rows_to(directory: Path, *iterations: int) -> JsonlTracker:
    tracker = JsonlTracker(directory)
    for iteration in iterations:
        tracker.log({"iteration": float(iteration), "loss": iteration / 2, "timing/seconds": 0.25 * iteration}, 100 * iteration)
    return tracker


def test_a_row_holds_counters_first_and_then_metrics_by_name(tmp_path: Path) -> None:
    tracker: Tracker = JsonlTracker(tmp_path)
    tracker.log({"loss": 0.5, "iteration": 3.0, "entropy": 1.0, "episodes": 12}, 300)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"iteration": 3, "env_steps": 300, "entropy": 1.0, "episodes": 12, "loss": 0.5}\n'
    assert not (tmp_path / "timing.jsonl").exists()


def test_what_the_clock_decides_goes_to_its_own_file(tmp_path: Path) -> None:
    rows_to(tmp_path, 1).close()
    assert read_rows(tmp_path / "metrics.jsonl") == [{"iteration": 1, "env_steps": 100, "loss": 0.5}]
    assert read_rows(tmp_path / "timing.jsonl") == [{"iteration": 1, "env_steps": 100, "seconds": 0.25}]


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    JsonlTracker(tmp_path).log({"a": float("nan"), "b": float("-inf"), "c": 1.5}, 1)
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"env_steps": 1, "a": None, "b": None, "c": 1.5}


def test_every_row_is_on_disk_at_once_and_later_trackers_append(tmp_path: Path) -> None:
    tracker = rows_to(tmp_path, 1)
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 1  # the tracker is still open
    rows_to(tmp_path, 2)
    tracker.log({"iteration": 3.0, "loss": 1.0}, 300)
    assert [row["iteration"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_a_resumed_file_equals_an_undisturbed_one(tmp_path: Path) -> None:
    rows_to(tmp_path / "whole", 1, 2, 3, 4)
    rows_to(tmp_path / "killed", 1, 2, 3)  # the checkpoint is of iteration 2
    tracker = rows_to(tmp_path / "killed")
    tracker.truncate_after(2)
    assert [row["iteration"] for row in read_rows(tmp_path / "killed" / "timing.jsonl")] == [1, 2]
    for iteration in (3, 4):
        tracker.log({"iteration": float(iteration), "loss": iteration / 2, "timing/seconds": 9.0}, 100 * iteration)
    assert (tmp_path / "killed" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def test_a_row_cut_short_by_a_kill_is_dropped(tmp_path: Path) -> None:
    rows_to(tmp_path, 1, 2).close()
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"iteration": 3, "env_')
    assert [row["iteration"] for row in read_rows(path)] == [1, 2]
    rows_to(tmp_path, 3).close()
    assert [row["iteration"] for row in read_rows(path)] == [1, 2, 3]
    path.write_bytes(whole + b"not json\n[1]\n")
    JsonlTracker(tmp_path).truncate_after(9)
    assert path.read_bytes() == whole


def test_the_config_is_written_unless_there_is_one(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.log_params({"ppo": {"gamma": 0.9}})
    tracker.log_params({"ppo": {"gamma": 0.5}})
    tracker.log_artifact(tmp_path / "policy.safetensors")
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {"ppo": {"gamma": 0.9}}


def test_no_file_has_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "metrics.jsonl") == []
    JsonlTracker(tmp_path).truncate_after(0)


def test_rows_are_cut_to_what_a_checkpoint_knew(tmp_path: Path) -> None:
    tracker = rows_to(tmp_path, 1, 2)
    counts = tracker.counts()
    assert counts == {"metrics.jsonl": 2, "timing.jsonl": 2}
    tracker.log({"iteration": 2.0, "evaluation/mean_return": 7.0}, 200)  # of the same iteration, and yet of the future
    assert tracker.counts() == {"metrics.jsonl": 3, "timing.jsonl": 2}
    assert tracker.last_iteration() == 2
    assert tracker.truncate_to(counts) == []
    assert [row["loss"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0.5, 1.0]
    problems = tracker.truncate_to({"metrics.jsonl": 5, "timing.jsonl": 0})
    assert len(problems) == 1
    assert "metrics.jsonl has 2 rows, and had 5" in problems[0]
    assert read_rows(tmp_path / "timing.jsonl") == []


def test_syncing_reaches_both_files_and_a_new_name_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    sync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    tracker = rows_to(tmp_path, 1)
    tracker.flush()
    tracker.sync()
    assert synced == ["metrics.jsonl", "timing.jsonl", tmp_path.name]
    tracker.sync()
    assert synced[3:] == ["metrics.jsonl", "timing.jsonl"]
