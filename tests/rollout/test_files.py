"""Rollouts on disk: bit-identical when loaded, and damage is always detected."""

import hashlib
import json
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from gymnasium import spaces

from doubles.stepping import assert_equal_rollouts
from inchworm.core.errors import CorruptFileError, RolloutError
from inchworm.core.tensor_file import read_tensor_file, write_tensor_file
from inchworm.rollout.fake import create_fake_rollout
from inchworm.rollout.files import rollout_paths
from inchworm.rollout.rollout import Rollout, combine_rollouts

OBSERVATIONS = spaces.Dict(
    {"image": spaces.Box(0, 255, (3, 3, 1), np.uint8), "pair": spaces.Tuple([spaces.Discrete(4), spaces.Box(-1, 1)])}
)


def rollout() -> Rollout:
    return create_fake_rollout(OBSERVATIONS, spaces.MultiDiscrete([2, 3]), 12, 3, episode_length=4)


def test_files_of_version_1_load(tmp_path):
    """They lack newer fields; a successor is valid where its row is."""
    saved = replace(rollout(), valid=np.arange(36).reshape(12, 3) % 5 != 0)
    path = saved.save(tmp_path / "one.safetensors")
    arrays, header = read_tensor_file(path, kind="rollout", max_version=2)
    for name in ("cut_valid", "cut_global_state", "state_every"):
        del header["fields"]["dict"][name]
    del arrays["cut_valid"]
    write_tensor_file(path, arrays, kind="rollout", version=1, header=header)
    loaded = Rollout.load(path)
    assert (loaded.cut_global_state, loaded.state_every) == ((), 0)
    assert loaded.cut_valid.tolist() == saved.valid[tuple(saved.cut_rows.T)].tolist()
    assert not loaded.cut_valid.all()


def first_episode(header):
    return header["fields"]["dict"]["episodes"]["list"][0]["dict"]


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda a, h: a.pop("rewards"), "structure does not fit"),
        (lambda a, h: a.update(extra=np.zeros(1)), "does not name"),
        (lambda a, h: a.update(rewards=a["rewards"][:-1]), "expected float32.11, 3"),
        (lambda a, h: a.update({"observations/image": a["observations/image"][..., :-1, :]}), "image"),
        (lambda a, h: h["fields"]["dict"].pop("context"), "context"),
        (lambda a, h: first_episode(h).pop("seed"), "seed"),
        (lambda a, h: h.pop("fields"), "fields"),
        (lambda a, h: h.update(fields=3), "valid rollout"),
        (lambda a, h: h["fields"]["dict"].update(rewards=5), "valid rollout"),
        (lambda a, h: first_episode(h).update(length="x"), "valid rollout"),
        (lambda a, h: first_episode(h).update(lane=0.5), "valid rollout"),
        (lambda a, h: first_episode(h).update(seed=None), "valid rollout"),
        (lambda a, h: first_episode(h).update(episode_return="1"), "valid rollout"),
        (lambda a, h: first_episode(h).update(info=3), "valid rollout"),
        (lambda a, h: first_episode(h).update(info={"dict": {"a": "text"}}), "valid rollout"),
    ],
)
def test_files_with_a_good_checksum_and_bad_content_are_refused(tmp_path, change, words):
    path = rollout().save(tmp_path / "one.safetensors")
    arrays, header = read_tensor_file(path, kind="rollout", max_version=2)
    change(arrays, header)
    write_tensor_file(path, arrays, kind="rollout", version=2, header=header)
    with pytest.raises(CorruptFileError, match=f"one.safetensors.*{words}"):
        Rollout.load(path)


@pytest.mark.parametrize("mapped", [False, True])
def test_loading_holds_the_file_in_memory_once_or_not_at_all(tmp_path, mapped):
    large = create_fake_rollout(spaces.Box(-1, 1, (100,), np.float32), spaces.Discrete(2), 500, 8, seed=0)
    path = large.save(tmp_path / "large.safetensors")
    tracemalloc.start()
    loaded = Rollout.load(path, mapped=mapped)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < path.stat().st_size * (0.25 if mapped else 1.25)  # a header, flags and cut rows are checked in copies
    assert_equal_rollouts(loaded, large)
    assert not loaded.observations.flags.writeable
    replaced = large.select_lanes([1]).save(path)  # a mapped file may be replaced
    assert_equal_rollouts(loaded, large)
    assert Rollout.load(replaced, mapped=mapped).num_lanes == 1


def test_extras_and_only_they_need_version_3(tmp_path):
    plain, extras = rollout(), {"speed": np.arange(36.0).reshape(12, 3), "hit": np.ones((12, 3, 2), bool)}
    for given, version in ((plain, 2), (replace(plain, extras=extras), 3)):
        path = given.save(tmp_path / "one.safetensors")
        assert_equal_rollouts(Rollout.load(path), given)
        read_tensor_file(path, kind="rollout", max_version=version)
        if version == 3:
            with pytest.raises(CorruptFileError, match="version 3 of the rollout format"):
                read_tensor_file(path, kind="rollout", max_version=2)


@pytest.mark.parametrize("size", [1, 10_000, 10**9])
def test_a_directory_of_shards_is_the_same_rollout(tmp_path, size):
    whole = replace(rollout(), extras={"speed": np.arange(36.0).reshape(12, 3)})
    directory = whole.save(tmp_path / "sharded", shard_bytes=size)
    assert len(list(directory.iterdir())) == {1: 3, 10_000: 1, 10**9: 1}[size]  # a shard has one lane or more
    assert_equal_rollouts(Rollout.load(directory), whole)
    assert [path.name for path in tmp_path.iterdir()] == ["sharded"]
    with pytest.raises(FileExistsError, match="a directory of shards is written as a whole"):
        whole.save(directory, shard_bytes=size)


def test_shards_keep_the_lanes_of_a_copy_together(tmp_path):
    whole = replace(rollout().select_lanes([0, 1]), global_state=np.ones((12, 1, 2), "f"))
    whole = replace(whole, cut_global_state=np.ones((len(whole.cut_rows), 2), "f"))
    both = combine_rollouts([whole, whole, whole])
    directory = both.save(tmp_path / "sharded", shard_bytes=1)
    assert [Rollout.load(path).num_lanes for path in sorted(directory.iterdir())] == [2, 2, 2]
    assert_equal_rollouts(Rollout.load(directory), both)


def test_shards_that_are_missing_damaged_or_of_another_rollout_are_named(tmp_path):
    one, other = (create_fake_rollout(OBSERVATIONS, spaces.Discrete(2), 8, 3, seed=seed) for seed in (0, 1))
    kept, strange = one.save(tmp_path / "one", shard_bytes=1), other.save(tmp_path / "other", shard_bytes=1)
    middle = kept / "shard-00001-of-00003.safetensors"
    content = middle.read_bytes()
    middle.write_bytes((strange / middle.name).read_bytes())
    with pytest.raises(CorruptFileError, match=r"shard-00001-of-00003.safetensors.*another rollout"):
        Rollout.load(kept)
    middle.write_bytes((kept / "shard-00002-of-00003.safetensors").read_bytes())
    with pytest.raises(CorruptFileError, match="its name was changed"):
        Rollout.load(kept)
    middle.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    with pytest.raises(CorruptFileError, match=r"shard-00001-of-00003.safetensors.*checksum"):
        Rollout.load(kept)
    middle.unlink()
    with pytest.raises(CorruptFileError, match=r"not hold exactly 3 shards: shard-00001-of-00003.safetensors is missing"):
        Rollout.load(kept)
    with pytest.raises(CorruptFileError, match="holds no shards"):
        Rollout.load(tmp_path)


def test_files_and_directories_stand_for_rollouts_in_order(tmp_path):
    one = rollout()
    files = [one.save(tmp_path / "many" / f"rollout_{index:04d}.safetensors") for index in range(3)]
    shards = one.save(tmp_path / "many" / "sharded", shard_bytes=1)
    assert rollout_paths(tmp_path / "many") == [*files, shards]
    assert rollout_paths([shards, str(files[1])]) == [shards, files[1]]
    (tmp_path / "empty").mkdir()
    with pytest.raises(RolloutError, match="empty holds no rollouts"):
        rollout_paths([tmp_path / "empty"])
    with pytest.raises(FileNotFoundError, match="gone"):
        rollout_paths([tmp_path / "gone.safetensors"])


def test_every_damaged_byte_and_every_truncation_is_noticed(tmp_path):
    small = create_fake_rollout(spaces.Box(-1, 1, (1,), np.float32), spaces.Discrete(2), 2, 1, seed=0)
    path = small.save(tmp_path / "small.safetensors")
    content, rng = path.read_bytes(), np.random.default_rng(0)
    for place in rng.choice(len(content), 150, replace=False).tolist():
        path.write_bytes(content[:place] + bytes([content[place] ^ (1 << int(rng.integers(8)))]) + content[place + 1 :])
        with pytest.raises(CorruptFileError, match=r"small.safetensors"):
            Rollout.load(path, mapped=bool(place % 2))
        path.write_bytes(content[:place])
        with pytest.raises(CorruptFileError, match=r"small.safetensors"):
            Rollout.load(path, mapped=bool(place % 2))


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda h: h["rewards"].update(data_offsets=[0, 8]), "rewards"),
        (lambda h: h["rewards"].update(shape=[2, 10**15]), "do not fit"),
        (lambda h: h["rewards"].update(shape=[-2, -1]), "the shape"),
        (lambda h: h["rewards"].update(shape=[2.0, 1]), "the shape"),
        (lambda h: h["valid"].update(dtype="F8_E4M3"), "unknown dtype"),
        (lambda h: h.pop("valid"), "belong to no array"),
        (lambda h: h["rewards"].pop("shape"), "shape"),
    ],
)
def test_a_header_that_lies_about_the_bytes_is_refused(tmp_path, change, words):
    """The checksum is made anew: it protects against accidents, not attacks."""
    path = rollout().save(tmp_path / "one.safetensors")
    blob = path.read_bytes()
    length = int.from_bytes(blob[:8], "little")
    header, data = json.loads(blob[8 : 8 + length]), blob[8 + length :]
    change(header)
    entry = json.loads(header["__metadata__"]["inchworm"])
    header["__metadata__"]["inchworm"] = json.dumps({**entry, "sha256": "0" * 64})
    text = json.dumps(header, separators=(",", ":")).encode()
    unsigned = len(text).to_bytes(8, "little") + text + data
    path.write_bytes(unsigned.replace(b"0" * 64, hashlib.sha256(unsigned).hexdigest().encode(), 1))
    for mapped in (False, True):
        with pytest.raises(CorruptFileError, match=f"one.safetensors.*{words}"):
            Rollout.load(path, mapped=mapped)
