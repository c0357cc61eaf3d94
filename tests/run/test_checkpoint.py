"""Checkpoints: complete, atomic, verified; a damaged one is passed over, never believed."""

import errno
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from doubles.disk import failing, record_syncs
from inchworm.backends.registry import make_policy
from inchworm.config.sections import PolicyConfig
from inchworm.core.errors import ConfigError, CorruptFileError, InchwormError, SpaceError
from inchworm.core.seeding import make_stream, stream_state
from inchworm.policy.spec import PolicySpec
from inchworm.run import checkpoint as module
from inchworm.run.checkpoint import ManifestNote, TrainingCheckpointer
from inchworm.run.policies import PolicyStore


@pytest.fixture
def checkpoints(tmp_path):
    return TrainingCheckpointer(tmp_path)


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
    checkpoints = TrainingCheckpointer(tmp_path / "checkpoints")
    path = checkpoints.save(12345, state(7))
    assert path.name == "step-000000012345"
    assert names(path) == ["arrays.safetensors", "manifest.json", "state.json"]
    loaded = checkpoints.load()
    assert (loaded.step, loaded.path) == (12345, path)
    np.testing.assert_array_equal(loaded.state["weights"].pop("w"), np.arange(4.0) + 7)
    assert loaded.state["weights"].pop("empty").shape == (0, 2)
    expected = state(7)
    expected["weights"] = {}
    assert loaded.state == expected
    assert loaded.manifest["versions"]["numpy"] == np.__version__
    for name in ("arrays.safetensors", "state.json"):
        assert loaded.manifest["files"][name]["size"] == (path / name).stat().st_size


def test_the_newest_are_kept(tmp_path):
    checkpoints = TrainingCheckpointer(tmp_path, keep=3)
    for step in range(1, 6):
        checkpoints.save(step, state(step))
    assert [path.name[-1] for path in checkpoints.all()] == ["3", "4", "5"]
    assert checkpoints.latest() == tmp_path / "step-000000000005"
    assert checkpoints.load().state["moments"][0]["step"] == 5
    assert checkpoints.load(checkpoints.all()[0]).step == 3
    with pytest.raises(ValueError, match="at least 2"):
        TrainingCheckpointer(tmp_path, keep=1)


@pytest.mark.parametrize("step", [-1, 10**12])
def test_a_step_that_does_not_fit_the_name_is_refused(checkpoints, step):
    checkpoints.save(10**12 - 1, {})
    with pytest.raises(ValueError, match="step="):
        checkpoints.save(step, {})


def test_none_yet(tmp_path):
    checkpoints = TrainingCheckpointer(tmp_path / "nowhere")
    assert checkpoints.latest() is None
    assert checkpoints.all() == []
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint in .*nowhere"):
        checkpoints.load()
    with pytest.raises(FileNotFoundError, match="no checkpoint directory"):
        checkpoints.load(tmp_path / "nowhere" / "step-000000000001")


def test_the_same_step_twice(tmp_path, checkpoints):
    checkpoints.save(1, state(1))
    checkpoints.save(2, state(2))
    checkpoints.save(2, state(22))
    assert checkpoints.load().state["moments"][0]["step"] == 22
    assert names(tmp_path) == ["step-000000000001", "step-000000000002.1"]
    checkpoints.save(2, state(222))
    assert checkpoints.load().state["moments"][0]["step"] == 222
    assert checkpoints.load().step == 2


def test_what_was_left_behind_is_removed_and_never_taken(tmp_path, checkpoints):
    path = checkpoints.save(1, state())
    shutil.copytree(path, tmp_path / ".tmp-half")
    (tmp_path / ".tmp-file").touch()
    (tmp_path / "step-latest").mkdir()  # not ours
    assert checkpoints.all() == [path]
    checkpoints.save(2, state())
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
def test_a_damaged_one_is_passed_over_with_a_warning_that_names_it(checkpoints, case):
    checkpoints.save(1, state(1))
    newest = checkpoints.save(2, state(2))
    DAMAGE[case](newest)
    with pytest.warns(UserWarning, match="step-000000000002 is damaged.*using step-000000000001"):
        assert checkpoints.load().step == 1
    with pytest.raises(CorruptFileError, match="step-000000000002"):
        checkpoints.load(newest)


def test_none_undamaged(checkpoints):
    for step in (1, 2):
        damage_flip(checkpoints.save(step, state()))
    with pytest.raises(
        CorruptFileError, match=r"every checkpoint is damaged.*000002.*arrays.safetensors.*000001.*from a backup .*--overwrite"
    ):
        checkpoints.load()


def test_damage_anywhere_is_noticed(checkpoints):
    path = checkpoints.save(1, state(), process={"generators": [1, 2]})
    rng = np.random.default_rng(0)
    for file in path.iterdir():
        content = file.read_bytes()
        for number in range(60):
            at = int(rng.integers(len(content)))
            flipped = content[:at] + bytes([content[at] ^ 1 << number % 8]) + content[at + 1 :]
            file.write_bytes(flipped if number % 2 else content[:at])
            with pytest.raises(CorruptFileError):
                checkpoints.load()
        file.write_bytes(content)
    checkpoints.load()


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda m: m.update(version=2), "version 2; this inchworm reads up to version 1"),
        (lambda m: m.pop("files"), "files"),
        (lambda m: m["files"].pop("state.json"), "state.json"),
        (lambda m: m.update(step=5), "of step"),
        (lambda m: m["arrays"]["weights/w"].update(shape=[2, 2]), "the arrays weights/w differ from the manifest's list"),
    ],
)
def test_manifests_with_a_good_checksum_and_bad_content(checkpoints, change, words):
    path = checkpoints.save(1, state())
    rewrite_manifest(path, change)
    with pytest.raises(CorruptFileError, match=words):
        checkpoints.load()


def rewrite_manifest(path, change):
    manifest = module.read_manifest(path)
    change(manifest)
    (path / "manifest.json").write_text(module.manifest_text(manifest))


def test_a_checkpoint_can_be_copied_out_under_another_name(tmp_path, checkpoints):
    path = checkpoints.save(3, state(3))
    shutil.copytree(path, tmp_path / "kept")
    assert checkpoints.load(tmp_path / "kept").step == 3


@pytest.mark.parametrize("point", ["write_tensor_file", "write_synced", "sync_directory"])
def test_a_full_disk_leaves_the_old_ones_and_names_the_place(tmp_path, checkpoints, monkeypatch, point):
    checkpoints.save(1, state(1))
    with monkeypatch.context() as patch:
        patch.setattr(module, point, failing(errno.ENOSPC))
        with pytest.raises(
            OSError, match=r"No space left on device while saving the checkpoint of iteration 2.*step-000000000002"
        ) as caught:
            checkpoints.save(2, state(2))
    assert caught.value.errno == 28
    assert names(tmp_path) == ["step-000000000001"]
    assert checkpoints.load().step == 1
    checkpoints.save(2, state(2))
    assert checkpoints.load().step == 2


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        (object(), TypeError, "x is object"),
        (np.array([None]), TypeError, "object"),
        ([0] * 600_000, ValueError, "keep them in arrays"),
    ],
    ids=["object", "array of objects", "too many values"],
)
def test_what_cannot_be_saved_leaves_nothing(tmp_path, checkpoints, value, kind, words):
    with pytest.raises(kind, match=words):
        checkpoints.save(1, {"x": value})
    assert names(tmp_path) == []


def test_a_failed_prune_is_a_warning(tmp_path, monkeypatch):
    checkpoints, rename = TrainingCheckpointer(tmp_path), Path.rename
    checkpoints.save(1, state())
    checkpoints.save(2, state())

    def fail(self, target):
        if self.name == "step-000000000001":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.warns(UserWarning, match="could not be removed.*Input/output"):
        checkpoints.save(3, state())
    assert checkpoints.load().step == 3


def test_a_stale_directory_that_cannot_be_removed_stops_no_save(tmp_path, checkpoints, monkeypatch):
    (tmp_path / ".tmp-busy").mkdir()
    remove = os.rmdir

    def refuse(path, **options):
        if str(path).endswith(".tmp-busy"):
            raise OSError(16, "Device or resource busy")
        remove(path, **options)

    monkeypatch.setattr(os, "rmdir", refuse)
    checkpoints.save(1, state())
    assert (checkpoints.load().step, names(tmp_path)) == (1, [".tmp-busy", "step-000000000001"])


def test_the_order_of_syncs(tmp_path, checkpoints, monkeypatch):
    # Every file and the new directory reach the disk before the one rename; the parent after it.
    events = record_syncs(monkeypatch)
    checkpoints.save(1, state())
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
from inchworm.run.checkpoint import TrainingCheckpointer

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
    checkpoints = TrainingCheckpointer(directory)
    newest = checkpoints.load()
    assert newest.step == 4 or died and newest.step == 3, (point, newest.step)
    for path in checkpoints.all():  # not one of them is half a checkpoint
        checkpoint = checkpoints.load(path)
        assert checkpoint.state["x"].tolist() == [checkpoint.step] * 3
    checkpoints.save(5, {"x": np.full(3, 5)})  # and the next save puts everything right
    assert [path.name[-1] for path in checkpoints.all()] in (["3", "5"], ["4", "5"])
    assert len(list(directory.iterdir())) == 2
    if not died:
        sys.exit(0 if point > 20 else 3)
sys.exit(4)
"""


def test_killed_at_every_point_of_a_save(tmp_path):
    """The process dies at the n-th file-system call of a save, for every n: what was committed always loads, whole."""
    checkpoints = TrainingCheckpointer(tmp_path / "before", keep=3)
    for step in (1, 2, 3):
        checkpoints.save(step, {"x": np.full(3, step)})
    (tmp_path / "before" / ".tmp-stale").mkdir()
    done = subprocess.run([sys.executable, "-W", "error", "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.returncode, done.stderr)


# ---- what the manifest says
def test_the_manifest_lists_every_array_and_what_made_it(checkpoints):
    note = ManifestNote(exact=["the world has a clock"], score=12.5, rows={"metrics.jsonl": 3}, threads=2, cpu_capability="AVX2")
    path = checkpoints.save(1, state(), process={"generators": [1, 2]}, note=note)
    manifest = module.read_manifest(path)
    assert manifest["arrays"] == {
        "weights/w": {"dtype": "float64", "shape": [4]},
        "weights/empty": {"dtype": "float32", "shape": [0, 2]},
    }
    assert manifest["versions"].keys() >= {"python", "numpy", "torch", "inchworm", "simd", "cpu"}
    expected = {"exact": ["the world has a clock"], "best": True, "scored": False, "score": 12.5, "threads": 2, "cpu_capability": "AVX2"}
    assert {name: manifest[name] for name in expected} == expected
    assert manifest["rows"] == {"metrics.jsonl": 3}
    loaded = checkpoints.load()
    assert loaded.process == {"generators": [1, 2]}
    assert loaded.manifest == manifest


def test_a_score_that_is_not_a_number_does_not_make_it_unreadable(checkpoints):
    checkpoints.save(1, state(), note=ManifestNote(score=float("nan")))
    assert (checkpoints.load().manifest["best"], checkpoints.load().manifest["score"]) == (True, None)


def test_one_from_before_the_list_and_the_process_loads(checkpoints):
    path = checkpoints.save(1, state(7))
    rewrite_manifest(path, lambda m: [m.pop(name) for name in set(m) - {"version", "step", "versions", "files"}])
    assert checkpoints.load().state["moments"][0]["step"] == 7
    assert checkpoints.load().process == {}
    assert checkpoints.best() is None


def test_the_file_of_the_process_must_exist_and_hold_a_mapping(checkpoints):
    (checkpoints.save(1, state(), process={"generators": [1, 2]}) / "process.json").unlink()
    checkpoints.save(2, state(), process=[1, 2])
    for path in checkpoints.all():
        with pytest.raises(CorruptFileError, match="process"):
            checkpoints.load(path)


def test_a_prepared_save_shares_no_memory_with_the_state(checkpoints):
    live = {"w": np.arange(4.0), "seen": [1, 2], "deep": {"m": np.ones((2, 3))[:, ::2]}}
    commit = checkpoints.prepare(1, live)
    live["w"][:] = -1
    live["deep"]["m"][:] = -1
    live["seen"].append(3)
    commit()
    loaded = checkpoints.load().state
    assert loaded["w"].tolist() == [0, 1, 2, 3]
    assert loaded["deep"]["m"].tolist() == [[1, 1], [1, 1]]
    assert loaded["seen"] == [1, 2]


# ---- which ones stay
def steps(checkpoints):
    return [int(path.name[5:17]) for path in checkpoints.all()]


def test_the_best_is_kept_with_the_newest_and_load_takes_the_newest(tmp_path, checkpoints):
    assert checkpoints.best() is None
    for step in range(1, 9):
        checkpoints.save(step, state(step), note=ManifestNote(score={2: 1.0, 5: 3.0}.get(step)))
        best = {1: None, 2: 2, 3: 2, 4: 2}.get(step, 5)
        assert checkpoints.best() == (None if best is None else tmp_path / f"step-{best:012d}")
        assert steps(checkpoints) == sorted({step, step - 1, best or step} - {0}), step
        assert checkpoints.load().step == step
    without = TrainingCheckpointer(tmp_path, keep_best=False)
    without.save(9, state(9))
    assert steps(without) == [8, 9]


def test_a_run_that_went_back_leaves_its_old_future_and_the_best_of_it(tmp_path):
    checkpoints = TrainingCheckpointer(tmp_path, keep=3)
    for step, score in ((1, 1.0), (8, None), (9, 9.0), (2, None)):
        checkpoints.save(step, state(step), note=ManifestNote(score=score))
    assert steps(checkpoints) == [1, 2]
    assert checkpoints.load().step == 2
    assert checkpoints.best() == tmp_path / "step-000000000001"


def test_the_same_step_saved_again_keeps_a_best_before_it(tmp_path, checkpoints):
    checkpoints.save(1, state(1), note=ManifestNote(score=1.0))
    checkpoints.save(1, state(11))
    assert checkpoints.best() == tmp_path / "step-000000000001"
    assert checkpoints.load().state["moments"][0]["step"] == 11


def test_a_checkpoint_with_a_damaged_manifest_is_never_the_best(checkpoints):
    path = checkpoints.save(1, state(1), note=ManifestNote(score=1.0))
    edit(path / "manifest.json", "numpy", "numpi")
    assert checkpoints.best() is None


# ---- directories that are none
def make_file(path, monkeypatch):
    path.write_text("")


def make_broken_link(path, monkeypatch):
    path.symlink_to(path.with_name("gone"))


def make_unreadable(path, monkeypatch):
    path.mkdir()
    monkeypatch.setattr(module.os, "listdir", failing(errno.EACCES))


@pytest.mark.parametrize(
    ("make", "words"),
    [(make_file, "Not a directory"), (make_broken_link, "a broken symbolic link"), (make_unreadable, "Permission denied")],
)
def test_what_is_no_readable_directory_is_not_taken_for_an_empty_one(tmp_path, monkeypatch, make, words):
    checkpoints = TrainingCheckpointer(tmp_path / "checkpoints")
    make(checkpoints.directory, monkeypatch)
    for ask in (checkpoints.all, checkpoints.latest, checkpoints.best, checkpoints.load):
        with pytest.raises(InchwormError, match=f"checkpoints .*{words}"):
            ask()
    with pytest.raises(OSError, match="checkpoint of iteration 1"):
        checkpoints.save(1, state())


def test_files_and_links_among_checkpoints_are_passed_over_and_pruned(tmp_path, checkpoints):
    checkpoints.save(1, state(1))
    (tmp_path / "step-000000000005").write_text("no directory")
    (tmp_path / "step-000000000006").symlink_to(tmp_path / "gone")
    with pytest.warns(UserWarning, match="step-00000000000[56].*using step-000000000001"):
        assert checkpoints.load().step == 1
    for step in (7, 8, 9):
        checkpoints.save(step, state(step))
    assert names(tmp_path) == ["step-000000000008", "step-000000000009"]


def test_a_reader_looks_again_when_a_writer_prunes_meanwhile(tmp_path, monkeypatch):
    """What was listed is gone by the time it is read: that is not damage."""
    checkpoints, writer = TrainingCheckpointer(tmp_path), TrainingCheckpointer(tmp_path)
    writer.save(1, state(1))
    read, to_come = module.read_checkpoint, iter(range(2, 8))

    def slow(path):
        for step in itertools.islice(to_come, 2):
            writer.save(step, state())
        return read(path)

    monkeypatch.setattr(module, "read_checkpoint", slow)
    assert checkpoints.load().step == 7  # 1, and three times two more


# ---- views
def acting_policy(seed=0):
    spec = PolicySpec(spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2), PolicyConfig(hidden_sizes=(4,)))
    return make_policy(spec, seed=seed, backend="numpy")


def equal(one, other):
    return all(np.array_equal(value, other.get_weights()[name]) for name, value in one.get_weights().items())


def test_policy_and_trainer_state_of_an_epoch_are_one_checkpoint(checkpoints):
    policy = acting_policy(1)
    record = checkpoints.save_policy(policy, 3, {"note": "first", "score": 1.5})
    assert (record.policy, record.epoch, record.metadata) == (policy, 3, {"note": "first", "score": 1.5})
    checkpoints.save_trainer_state(640, 3, {"step": 5, "mean": np.arange(3.0)})
    assert len(checkpoints.all()) == 1
    trainer = checkpoints.load_trainer_state()
    assert (trainer.agent_step, trainer.epoch, trainer.optimizer_state["step"]) == (640, 3, 5)
    assert trainer.optimizer_state["mean"].tolist() == [0, 1, 2]
    for given in (None, trainer, trainer.path, str(trainer.path), checkpoints.load()):
        found = checkpoints.load_policy(given)
        assert equal(found.policy, policy)
        assert (found.epoch, found.path, found.metadata) == (3, trainer.path, {"note": "first", "score": 1.5})


def test_a_policy_store_keeps_what_a_checkpointer_deletes(tmp_path):
    store = PolicyStore(tmp_path / "policies")
    checkpoints = TrainingCheckpointer(tmp_path / "checkpoints", policy_store=store)
    policies = [acting_policy(seed) for seed in range(3)]
    for epoch, policy in enumerate(policies, 1):
        checkpoints.save_policy(policy, epoch, {"score": 10.0 / epoch, "note": "x"})
    assert len(checkpoints.all()) == 2
    assert [(record.score, record.metadata["epoch"], record.metadata["note"]) for record in store.list()] == [
        (10.0, 1, "x"), (5.0, 2, "x"), (10.0 / 3, 3, "x"),
    ]  # fmt: skip
    assert equal(store.load("best"), policies[0])
    assert equal(store.load("latest"), checkpoints.load_policy().policy)


def test_a_kill_between_the_two_leaves_a_pair_that_fits(checkpoints):
    checkpoints.save_trainer_state(1, 1, {})
    checkpoints.save_policy(acting_policy(1), 1)
    checkpoints.save_policy(acting_policy(2), 2)  # and killed
    trainer = checkpoints.load_trainer_state()
    assert trainer.epoch == 1
    assert equal(checkpoints.load_policy(trainer).policy, acting_policy(1))
    assert equal(checkpoints.load_policy().policy, acting_policy(2))  # the latest


def test_optimisers_of_torch_come_back_as_they_were(tmp_path):
    import torch

    def step(optimizer, parameter):
        optimizer.zero_grad()
        parameter.square().sum().backward()
        optimizer.step()

    one, other = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    optimizer = torch.optim.Adam([one], lr=0.1)
    step(optimizer, one)
    TrainingCheckpointer(tmp_path / "unused").save_trainer_state(5, 1, optimizer.state_dict(), run_dir=tmp_path / "run")
    found = TrainingCheckpointer(tmp_path / "unused").load_trainer_state(tmp_path / "run")
    assert found.path.parent == tmp_path / "run" / "checkpoints"
    again = torch.optim.Adam([other], lr=9.0)
    with torch.no_grad():
        other.copy_(one)
    again.load_state_dict(found.optimizer_state)
    for _ in range(3):
        step(optimizer, one)
        step(again, other)
    assert one.tolist() == other.tolist()


def test_the_trainer_state_of_a_trainers_run(tmp_path):
    # What a PPOTrainer saves has its own names for the same things.
    run = {"learner": {"updates": 7}, "collector": {"env_steps": 640}, "state": {"iteration": 5}}
    path = TrainingCheckpointer(tmp_path / "run" / "checkpoints").save(5, run)
    found = TrainingCheckpointer(tmp_path / "unused").load_trainer_state(tmp_path / "run")
    assert (found.agent_step, found.epoch, found.optimizer_state, found.path) == (640, 5, {"updates": 7}, path)


def test_nothing_there_is_never_a_fresh_start(tmp_path):
    checkpoints = TrainingCheckpointer(tmp_path / "nowhere")
    for ask in (checkpoints.load_policy, checkpoints.load_trainer_state):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            ask()
    checkpoints.save_trainer_state(1, 1, {})
    with pytest.raises(FileNotFoundError, match=r"nowhere holds a policy"):
        checkpoints.load_policy()
    with pytest.raises(CorruptFileError, match="holds no policy"):
        checkpoints.load_policy(checkpoints.latest())
    other = TrainingCheckpointer(tmp_path / "elsewhere")
    other.save_policy(acting_policy(), 1)
    with pytest.raises(FileNotFoundError, match=r"elsewhere holds a trainer state"):
        other.load_trainer_state()


def test_a_policy_is_checked_against_its_environment(checkpoints):
    import gymnasium as gym

    checkpoints.save_policy(acting_policy(), 1)
    for env in (gym.make("CartPole-v1"), gym.make_vec("CartPole-v1", 2)):
        for given in (None, checkpoints.latest()):
            with pytest.raises(SpaceError, match=r"was made for the observation space .*\(3,\).*but the environment has .*\(4,\)"):
                checkpoints.load_policy(given, env=env)


def test_what_is_not_a_policy_is_not_saved(checkpoints):
    with pytest.raises(ConfigError, match="object is not a policy with weights"):
        checkpoints.save_policy(object(), 1)
