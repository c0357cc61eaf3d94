"""Rollouts on disk: bit-identical when loaded, and damage is always detected."""

from dataclasses import replace

import numpy as np
import optree
import pytest
from gymnasium import spaces

from inchworm.core.errors import CorruptFileError, RolloutError
from inchworm.core.tensor_file import read_tensor_file, write_tensor_file
from inchworm.rollout.fake import create_fake_rollout
from inchworm.rollout.rollout import Rollout

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


def test_another_byte_order_and_wider_numbers_from_elsewhere():
    data = rollout().to_dict()
    swapped = optree.tree_map(lambda leaf: leaf.astype(leaf.dtype.newbyteorder(">")), data["observations"])
    taken = Rollout.from_dict({**data, "observations": swapped})
    for mine, theirs in zip(optree.tree_leaves(taken.observations), optree.tree_leaves(data["observations"])):
        assert mine.dtype.isnative
        np.testing.assert_array_equal(mine, theirs)
    if np.dtype(np.longdouble).itemsize > 8:
        with pytest.raises(RolloutError, match="up to 64 bits"):
            Rollout.from_dict({**data, "rewards": data["rewards"].astype(np.longdouble)})
