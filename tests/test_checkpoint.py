"""Checkpoints: complete, atomic, verified; a damaged one is passed over, never believed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from inchworm import checkpoint as module
from inchworm.checkpoint import TrainingCheckpointer
from inchworm.errors import CorruptFileError
from inchworm.seeding import make_stream, stream_state


def state(number: int = 0):
    return {
        "weights": {"w": np.arange(4.0) + number, "empty": np.zeros((0, 2), np.float32)},
        "moments": ({"step": number}, [1.5, None, float("inf")]),
        "stream": stream_state(make_stream(number, "test")),
        "threads": 1,
    }


def names(directory) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_round_trip(tmp_path):
    keeper = TrainingCheckpointer(tmp_path / "checkpoints")
    path = keeper.save(12345, state(7))
    assert path.name == "step-000000012345"
    assert names(path) == ["arrays.safetensors", "manifest.json", "state.json"]
    loaded = keeper.load()
    assert (loaded.step, loaded.path) == (12345, path)
    np.testing.assert_array_equal(loaded.state["weights"].pop("w"), np.arange(4.0) + 7)
    assert loaded.state["weights"].pop("empty").shape == (0, 2)
    expected = state(7)
    expected["weights"] = {}
    assert loaded.state == expected
    assert loaded.manifest["versions"]["numpy"] == np.__version__
    assert loaded.manifest["versions"].keys() >= {"inchworm", "python", "numpy", "torch", "gymnasium"}
    for name in ("arrays.safetensors", "state.json"):
        assert loaded.manifest["files"][name]["size"] == (path / name).stat().st_size


def test_the_newest_are_kept(tmp_path):
    keeper = TrainingCheckpointer(tmp_path, keep=3)
    for step in range(1, 6):
        keeper.save(step, state(step))
    assert [path.name[-1] for path in keeper.all()] == ["3", "4", "5"]
    assert keeper.latest() == tmp_path / "step-000000000005"
    assert keeper.load().state["moments"][0]["step"] == 5
    assert keeper.load(keeper.all()[0]).step == 3
    with pytest.raises(ValueError, match="at least 2"):
        TrainingCheckpointer(tmp_path, keep=1)


def test_order_is_by_number_not_by_text(tmp_path):
    keeper = TrainingCheckpointer(tmp_path)
    for step in (9, 10, 100_000_000_000):
        keeper.save(step, {})
    assert keeper.load().step == 100_000_000_000
    for step in (-1, 10**12):
        with pytest.raises(ValueError, match="step="):
            keeper.save(step, {})


def test_none_yet(tmp_path):
    keeper = TrainingCheckpointer(tmp_path / "nowhere")
    assert keeper.latest() is None
    assert keeper.all() == []
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint in .*nowhere"):
        keeper.load()
    with pytest.raises(FileNotFoundError, match="no checkpoint directory"):
        keeper.load(tmp_path / "nowhere" / "step-000000000001")


def test_the_same_step_twice(tmp_path):
    keeper = TrainingCheckpointer(tmp_path)
    keeper.save(1, state(1))
    keeper.save(2, state(2))
    keeper.save(2, state(22))
    assert keeper.load().state["moments"][0]["step"] == 22
    assert names(tmp_path) == ["step-000000000001", "step-000000000002.1"]
    keeper.save(2, state(222))
    assert keeper.load().state["moments"][0]["step"] == 222
    assert keeper.load().step == 2


def test_a_run_that_went_back_leaves_its_old_future(tmp_path):
    keeper = TrainingCheckpointer(tmp_path, keep=3)
    for step in (10, 20, 30):
        keeper.save(step, state(step))
    keeper.save(11, state(11))
    assert [path.name[-2:] for path in keeper.all()] == ["10", "11"]
    assert keeper.load().step == 11


def test_what_was_left_behind_is_removed_and_never_taken(tmp_path):
    keeper = TrainingCheckpointer(tmp_path)
    path = keeper.save(1, state())
    shutil.copytree(path, tmp_path / ".tmp-half")
    (tmp_path / ".tmp-file").touch()
    (tmp_path / "step-latest").mkdir()  # not ours
    assert keeper.all() == [path]
    keeper.save(2, state())
    assert names(tmp_path) == ["step-000000000001", "step-000000000002", "step-latest"]


def damage_flip(path):
    content = bytearray((path / "arrays.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "arrays.safetensors").write_bytes(content)


DAMAGE = {
    "bit flip": damage_flip,
    "cut": lambda path: os.truncate(path / "state.json", 10),
    "no arrays": lambda path: (path / "arrays.safetensors").unlink(),
    "no state": lambda path: (path / "state.json").unlink(),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "empty manifest": lambda path: (path / "manifest.json").write_text(""),
    "manifest of another": lambda path: shutil.copy(path.parent / "step-000000000001/manifest.json", path),
    "state of another": lambda path: shutil.copy(path.parent / "step-000000000001/state.json", path),
    "arrays of another": lambda path: shutil.copy(path.parent / "step-000000000001/arrays.safetensors", path),
    "all of another": lambda path: [shutil.copy(file, path) for file in (path.parent / "step-000000000001").iterdir()],
    "version in the manifest": lambda path: edit(path / "manifest.json", "numpy", "numpi"),
    "space in the manifest": lambda path: edit(path / "manifest.json", " ", "  "),
}


def edit(path, old, new):
    path.write_text(path.read_text().replace(old, new, 1))


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_one_is_passed_over_with_a_warning_that_names_it(tmp_path, case):
    keeper = TrainingCheckpointer(tmp_path)
    keeper.save(1, state(1))
    newest = keeper.save(2, state(2))
    DAMAGE[case](newest)
    with pytest.warns(UserWarning, match="step-000000000002 is damaged.*going on from step-000000000001"):
        assert keeper.load().step == 1
    with pytest.raises(CorruptFileError, match="step-000000000002"):
        keeper.load(newest)


def test_none_undamaged(tmp_path):
    keeper = TrainingCheckpointer(tmp_path)
    for step in (1, 2):
        damage_flip(keeper.save(step, state()))
    with pytest.raises(CorruptFileError, match=r"no checkpoint is undamaged.*000002.*arrays.safetensors.*000001"):
        keeper.load()


def test_damage_anywhere_is_noticed(tmp_path):
    keeper = TrainingCheckpointer(tmp_path)
    path = keeper.save(1, state())
    rng = np.random.default_rng(0)
    for file in path.iterdir():
        content = file.read_bytes()
        for number in range(60):
            at = int(rng.integers(len(content)))
            flipped = content[:at] + bytes([content[at] ^ 1 << number % 8]) + content[at + 1 :]
            file.write_bytes(flipped if number % 2 else content[:at])
            with pytest.raises(CorruptFileError):
                keeper.load()
        file.write_bytes(content)
    keeper.load()


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda m: m.update(version=2), "version 2; this inchworm reads up to version 1"),
        (lambda m: m.pop("files"), "files"),
        (lambda m: m["files"].pop("state.json"), "state.json"),
        (lambda m: m.update(step=5), "disagree"),
    ],
)
def test_manifests_with_a_good_checksum_and_bad_content(tmp_path, change, words):
    path = TrainingCheckpointer(tmp_path).save(1, state())
    manifest = json.loads((path / "manifest.json").read_text())["manifest"]
    change(manifest)
    (path / "manifest.json").write_text(module._manifest_text(manifest))
    with pytest.raises(CorruptFileError, match=words):
        TrainingCheckpointer(tmp_path).load()


def test_a_checkpoint_can_be_copied_out_under_another_name(tmp_path):
    path = TrainingCheckpointer(tmp_path).save(3, state(3))
    shutil.copytree(path, tmp_path / "kept")
    assert TrainingCheckpointer(tmp_path).load(tmp_path / "kept").step == 3


@pytest.mark.parametrize("point", ["write_tensor_file", "write_synced", "sync_directory"])
def test_a_full_disk_leaves_the_old_ones_and_names_the_place(tmp_path, monkeypatch, point):
    keeper = TrainingCheckpointer(tmp_path)
    keeper.save(1, state(1))

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, point, fail)
        with pytest.raises(
            OSError, match=r"No space left on device while saving the checkpoint of iteration 2.*step-000000000002"
        ) as caught:
            keeper.save(2, state(2))
    assert caught.value.errno == 28
    assert names(tmp_path) == ["step-000000000001"]
    assert keeper.load().step == 1
    keeper.save(2, state(2))
    assert keeper.load().step == 2


def test_what_cannot_be_saved_leaves_nothing(tmp_path):
    keeper = TrainingCheckpointer(tmp_path)
    with pytest.raises(TypeError, match="x is object"):
        keeper.save(1, {"x": object()})
    with pytest.raises(TypeError, match="object"):
        keeper.save(1, {"x": np.array([None])})
    assert names(tmp_path) == []


def test_a_failed_prune_is_a_warning(tmp_path, monkeypatch):
    keeper = TrainingCheckpointer(tmp_path)

    def fail(self, newest):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(TrainingCheckpointer, "_prune", fail)
    with pytest.warns(UserWarning, match="could not be removed.*Input/output"):
        keeper.save(1, state())
    assert keeper.load().step == 1


def test_the_order_of_syncs(tmp_path, monkeypatch):
    # Every file and the new directory reach the disk before the one rename; the parent after it.
    events, sync, path_type = [], os.fsync, type(tmp_path)
    rename = path_type.rename

    def record_sync(descriptor):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    def record_rename(self, target):
        events.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(path_type, "rename", record_rename)
    TrainingCheckpointer(tmp_path).save(1, state())
    cut = events.index("rename")
    before, after = events[:cut], events[cut + 1 :]
    assert {"state.json", "manifest.json"} <= set(before)
    assert any("arrays.safetensors" in name for name in before)
    assert before[-1].startswith(".tmp-")  # the directory, last
    assert after == [tmp_path.name]


KILLED = """
import os, shutil, sys
import numpy as np
from pathlib import Path
from inchworm.checkpoint import TrainingCheckpointer

def dies_at(point):
    left = [point]
    def dying(function):
        def call(*args, **kwargs):
            if left[0] == 0:
                os._exit(9)
            left[0] -= 1
            return function(*args, **kwargs)
        return call
    for owner, name in ((os, "fsync"), (os, "rename"), (os, "replace"), (os, "mkdir"), (os, "unlink"), (os, "rmdir"), (Path, "open")):
        setattr(owner, name, dying(getattr(owner, name)))

for point in range(100):
    directory = Path(sys.argv[1], f"killed at {point}")
    shutil.copytree(Path(sys.argv[1], "before"), directory)
    if os.fork() == 0:
        dies_at(point)
        TrainingCheckpointer(directory).save(4, {"x": np.full(3, 4)})
        os._exit(0)
    died = os.waitstatus_to_exitcode(os.wait()[1]) == 9
    keeper = TrainingCheckpointer(directory)
    newest = keeper.load()
    assert newest.step == 4 or died and newest.step == 3, (point, newest.step)
    for path in keeper.all():  # not one of them is half a checkpoint
        checkpoint = keeper.load(path)
        assert checkpoint.state["x"].tolist() == [checkpoint.step] * 3
    keeper.save(5, {"x": np.full(3, 5)})  # and the next save puts everything right
    assert [path.name[-1] for path in keeper.all()] in (["3", "5"], ["4", "5"])
    assert len(list(directory.iterdir())) == 2
    if not died:
        sys.exit(0 if point > 20 else 3)
sys.exit(4)
"""


def test_killed_at_every_point_of_a_save(tmp_path):
    """The process dies at the n-th file-system call of a save, for every n: what was committed always loads, whole."""
    keeper = TrainingCheckpointer(tmp_path / "before", keep=3)
    for step in (1, 2, 3):
        keeper.save(step, {"x": np.full(3, step)})
    (tmp_path / "before" / ".tmp-stale").mkdir()
    done = subprocess.run([sys.executable, "-W", "error", "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, (done.returncode, done.stderr)
