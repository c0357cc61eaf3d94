import errno
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from doubles.disk import failing, record_syncs
from inchworm.core.protocols import Tracker
from inchworm.tracking import jsonl as module
from inchworm.tracking.jsonl import JsonlTracker, RowFile, read_complete_rows, read_rows


def rows_to(directory: Path, *iterations: int) -> JsonlTracker:
    tracker = JsonlTracker(directory)
    for iteration in iterations:
        tracker.log({"iteration": float(iteration), "loss": iteration / 2, "timing/seconds": 0.25 * iteration}, 100 * iteration)
    return tracker


def test_a_row_holds_counters_first_and_then_metrics_by_name_with_timing_apart(tmp_path: Path) -> None:
    tracker: Tracker = JsonlTracker(tmp_path)
    tracker.log({"loss": 0.5, "iteration": 3.0, "entropy": float("nan"), "episodes": 12, "a": float("-inf")}, 300)
    row = '{"iteration": 3, "env_steps": 300, "a": null, "entropy": null, "episodes": 12, "loss": 0.5}\n'  # null: not finite
    assert (tmp_path / "metrics.jsonl").read_text() == row
    assert not (tmp_path / "timing.jsonl").exists()
    tracker.log({"timing/seconds": 0.25, "iteration": 3.0}, 300)
    assert read_rows(tmp_path / "timing.jsonl") == [{"iteration": 3, "env_steps": 300, "seconds": 0.25}]
    assert (tmp_path / "metrics.jsonl").read_text() == row


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
    path = tmp_path / "metrics.jsonl"
    assert read_rows(path) == []  # no file, no rows
    rows_to(tmp_path, 1, 2).close()
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


def test_rows_are_cut_to_what_a_checkpoint_knew(tmp_path: Path) -> None:
    tracker = rows_to(tmp_path, 1, 2)
    counts = tracker.counts()
    assert counts == {"metrics.jsonl": 2, "timing.jsonl": 2, "hashes.jsonl": 0}
    tracker.log({"iteration": 2.0, "evaluation/mean_return": 7.0}, 200)  # of the same iteration, and yet of the future
    assert tracker.counts() == {"metrics.jsonl": 3, "timing.jsonl": 2, "hashes.jsonl": 0}
    assert tracker.last_iteration() == 2
    assert tracker.truncate_to(counts) == []
    assert [row["loss"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0.5, 1.0]
    problems = tracker.truncate_to({"metrics.jsonl": 5, "timing.jsonl": 0})
    assert len(problems) == 1
    assert "metrics.jsonl has 2 rows, and had 5" in problems[0]
    assert read_rows(tmp_path / "timing.jsonl") == []


def test_rows_of_hashes_are_written_together_and_cut_as_the_others(tmp_path: Path) -> None:
    tracker, path = JsonlTracker(tmp_path), tmp_path / "hashes.jsonl"
    for iteration in range(1, 18):
        tracker.log_hashes(lambda iteration=iteration: {"iteration": iteration, "weights": f"{iteration:x}"})  # type: ignore[misc]
        assert len(read_rows(path)) == (0 if iteration < 16 else 16)
    assert tracker.counts()["hashes.jsonl"] == 17
    tracker.flush()
    assert [row["iteration"] for row in read_rows(path)] == list(range(1, 18))
    tracker.truncate_to({"hashes.jsonl": 3})
    assert read_rows(path)[-1] == {"iteration": 3, "weights": "3"}
    tracker.truncate_after(2)
    assert tracker.counts()["hashes.jsonl"] == 2


def test_syncing_reaches_both_files_and_a_new_name_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = record_syncs(monkeypatch)
    tracker = rows_to(tmp_path)
    tracker.sync()
    assert synced == []  # no file yet
    tracker = rows_to(tmp_path / "new", 1)
    tracker.flush()
    tracker.sync()
    assert synced == ["metrics.jsonl", "timing.jsonl", "new"]
    tracker.sync()
    assert synced[3:] == ["metrics.jsonl", "timing.jsonl"]
    monkeypatch.setattr(module.os, "fsync", failing(errno.EIO))
    with pytest.raises(OSError, match=r"Input/output error while syncing: .*metrics\.jsonl"):
        tracker.sync()


class Disk:
    """`os.write` on a disk with so much room; a write that does not fit is taken in part, as a real one does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int = errno.ENOSPC) -> None:
        self.room, self.code, self.write = 10**9, code, os.write
        monkeypatch.setattr(module.os, "write", self)

    def __call__(self, descriptor: int, content: Any) -> int:
        if self.room == 0:
            raise OSError(self.code, os.strerror(self.code))
        written = self.write(descriptor, bytes(content)[: self.room])
        self.room -= written
        return written


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("room", [0, 1, 4, 5])
def test_what_does_not_fit_is_kept_and_written_later_in_order_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, code: int
) -> None:
    disk, file = Disk(monkeypatch, code), RowFile(tmp_path / "rows")
    file.append(b"one\n")
    disk.room = room  # `two two\n` is 8 bytes: a part of it, or nothing
    with pytest.warns(UserWarning, match=rf"\[Errno {code}\].*while writing 1 row.*rows'; training continues"):
        file.append(b"two two\n")
    assert (tmp_path / "rows").read_bytes() == b"one\n"  # cut back: no half a row
    assert file.count == 2
    file.append(b"three\n")  # no second warning while it lasts
    with pytest.raises(OSError, match="2 row"):
        file.flush()
    disk.room = 10**9
    file.append(b"four\n")
    assert (tmp_path / "rows").read_bytes() == b"one\ntwo two\nthree\nfour\n"
    assert file.count == 4
    disk.room = 0
    with pytest.warns(UserWarning, match="training continues"):  # it worked meanwhile, so this is news
        file.append(b"five\n")
    disk.room = 10**9
    file.close()
    assert (tmp_path / "rows").read_bytes().endswith(b"five\n")


def test_half_a_row_that_cannot_even_be_cut_back_is_cut_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, file, truncate = Disk(monkeypatch), RowFile(tmp_path / "rows"), os.ftruncate
    file.append(b"one\n")
    disk.room = 2
    monkeypatch.setattr(module.os, "ftruncate", failing(errno.EIO))
    with pytest.warns(UserWarning, match="training continues"):
        file.append(b"two\n")
    assert (tmp_path / "rows").read_bytes() == b"one\ntw"
    assert read_complete_rows(tmp_path / "rows") == [b"one\n"]
    monkeypatch.setattr(module.os, "ftruncate", truncate)
    disk.room = 10**9
    file.append(b"three\n")
    assert (tmp_path / "rows").read_bytes() == b"one\ntwo\nthree\n"


def test_an_interrupt_in_the_middle_of_a_row_writes_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, write = RowFile(tmp_path / "rows"), os.write
    file.append(b"one\n")

    def interrupted(descriptor: int, content: Any) -> int:
        write(descriptor, content)
        raise KeyboardInterrupt

    monkeypatch.setattr(module.os, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        file.append(b"two\n")
    monkeypatch.setattr(module.os, "write", write)
    file.close()
    assert (tmp_path / "rows").read_bytes() == b"one\ntwo\n"


def test_what_is_never_written_is_lost_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, file = Disk(monkeypatch), RowFile(tmp_path / "rows")
    disk.room = 0
    with pytest.warns(UserWarning, match="training continues"):
        file.append(b"one\n")
    with pytest.warns(UserWarning, match="1 row.*these rows are lost"):
        file.close()
    file.close()
    assert file.count == 0


def test_a_directory_that_is_not_there_yet_keeps_the_rows_waiting(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "gone" / "rows")
    with pytest.warns(UserWarning, match="No such file"):
        file.append(b"one\n")
    (tmp_path / "gone").mkdir()
    file.append(b"two\n")
    assert (tmp_path / "gone" / "rows").read_bytes() == b"one\ntwo\n"
