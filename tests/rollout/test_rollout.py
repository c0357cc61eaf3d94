"""The rollout: reading, checks, data of other origin, combining, selecting lanes, metrics."""

import dataclasses
import warnings

import numpy as np
import optree
import pytest
import torch
from gymnasium import spaces

from doubles.stepping import assert_equal_rollouts
from inchworm.backends.numpy import gae
from inchworm.core.errors import BadNumberError, RolloutError
from inchworm.core.spaces import MASK_KEY
from inchworm.core.types import EpisodeRecord
from inchworm.rollout.fake import create_fake_rollout
from inchworm.rollout.rollout import ARRAY_FIELDS, FIELDS, Rollout, combine_rollouts, forced_share, rollout_metrics, select_lanes

BOX, CHOICE = spaces.Box(-10, 10, (2,), np.float32), spaces.Discrete(3)


def data(steps: int = 3, lanes: int = 2, **changes):
    """The required fields of a rollout: entry 10 * t + b, every lane's last row terminated."""
    number = 10 * np.arange(steps)[:, None] + np.arange(lanes)
    terminated = np.zeros((steps, lanes), bool)
    terminated[-1:] = True
    return {
        "observations": np.stack([number, number + 0.5], -1).astype(np.float32),
        "actions": number % 3,
        "log_probs": -np.ones((steps, lanes), np.float32),
        "rewards": number.astype(np.float32),
        "terminated": terminated,
        **changes,
    }


def rich(seed: int = 0, steps: int = 6, lanes: int = 4, copies: int = 2) -> Rollout:
    """A rollout with every field in use, its numbers made of (t, b)."""
    number = 1000 * seed + 10 * np.arange(steps)[:, None] + np.arange(lanes)  # [T, B]
    truncated = np.zeros((steps, lanes), bool)
    truncated[2, 1] = truncated[4, 3 % lanes] = True
    rows = np.argwhere(truncated | (np.arange(steps) == steps - 1)[:, None])
    at_cuts = number[tuple(rows.T)]
    return Rollout.from_dict(
        {
            "observations": {"a": number.astype(np.float32), "b": (np.stack([number, number], -1).astype(np.uint8),)},
            "actions": number,
            "log_probs": number.astype(np.float32),
            "rewards": number.astype(np.float32),
            "terminated": np.zeros((steps, lanes), bool),
            "truncated": truncated,
            "valid": number % 7 != 0,
            "policy_state": {"h": number[::2, :, None].astype(np.float32)},
            "state_every": 2,
            "cut_rows": rows.astype(np.int32),
            "cut_valid": at_cuts % 3 != 0,
            "cut_observations": {"a": at_cuts + np.float32(0.5), "b": (np.stack([at_cuts, at_cuts], -1).astype(np.uint8),)},
            "cut_state": {"h": at_cuts[:, None].astype(np.float32)},
            "global_state": (100 * np.arange(steps)[:, None] + np.arange(copies)).astype(np.float32),
            "cut_global_state": at_cuts + np.float32(0.25),
            "context": (np.arange(3.0) + 10 * seed, number % 3),
            "extras": {"speed": number * 0.5, "pair": np.stack([number, -number], -1)},
            "policy_version": seed + np.arange(lanes),
            "weights_fingerprint": np.full(lanes, 2**64 - 1 - seed, np.uint64),
            "episodes": [EpisodeRecord(1.5, 3, 1, 77, {"won": 1.0}), {"episode_return": 2.0, "length": 4, "lane": 3 % lanes, "seed": 5}],
        }
    )


# reading
def test_sizes_and_mapping_access():
    rollout = rich()
    assert (rollout.num_steps, rollout.num_lanes) == (6, 4)
    assert rollout.num_valid == int((rollout["valid"]).sum()) < 24
    assert len(rollout["observations"]["a"]) == 6
    assert "rewards" in rollout
    assert "values" not in rollout
    assert tuple(rollout.keys()) == tuple(rollout) == FIELDS
    assert dict(rollout).keys() == rollout.to_dict().keys()
    assert rollout.to_dict()["rewards"] is rollout.rewards
    expected = sum(leaf.nbytes for name in ARRAY_FIELDS for leaf in optree.tree_leaves(rollout[name]))
    assert rollout.nbytes == expected > 0
    with pytest.raises(KeyError, match="did you mean 'rewards'"):
        rollout["reward"]
    with pytest.raises(KeyError, match="compute_advantages"):
        rollout["advantages"]
    with pytest.raises(KeyError, match="it has observations"):
        rollout["zzzzzz"]


def test_the_repr_is_one_line_of_shapes():
    rollout = Rollout.from_dict(data(policy_version=np.array([3, 3])))
    assert repr(rollout) == (
        "Rollout(3 steps x 2 lanes, observations [3, 2, 2] float32, actions [3, 2] int64, 0 finished episodes, policy version 3)"
    )
    several = combine_rollouts([rollout, Rollout.from_dict(data(policy_version=np.array([5, 4])))])
    assert repr(several).endswith("policy version 3 to 5)")
    space = spaces.Dict(image=spaces.Box(0, 255, (8, 8), np.uint8), action_mask=spaces.MultiBinary(3))
    text = repr(create_fake_rollout(space, CHOICE, num_steps=4000, num_lanes=2, seed=0))
    assert ("observations.image [4000, 2, 8, 8] uint8" in text, "observations.action_mask [4000, 2, 3]" in text) == (True, True)
    assert len(text) < 300
    dead = dataclasses.replace(rollout, valid=np.zeros((3, 2), bool), episodes=(EpisodeRecord(1.0, 3, 0, 7),))
    assert "3 steps x 2 lanes (6 rows not valid)" in repr(dead)
    assert "1 finished episode, " in repr(dead)
    assert "0 steps x 0 lanes" in repr(Rollout.from_dict(data(0, 0)))


def test_dones_and_successors_are_read_like_fields():
    rollout = rich()
    np.testing.assert_array_equal(rollout["dones"], rollout.terminated | rollout.truncated)
    for found, own in zip(optree.tree_leaves(rollout["next_observations"]), optree.tree_leaves(rollout.next_observations), strict=True):
        np.testing.assert_array_equal(found, own)
    assert "dones" not in rollout  # what is made from the fields is not stored with them


def test_the_same_as_tensors():
    rollout = rich()
    tensors = rollout.to_torch()
    assert tensors.keys() == {*FIELDS, "dones", "next_observations"}
    for name in (*ARRAY_FIELDS, "dones", "next_observations"):
        for tensor, array in zip(optree.tree_leaves(tensors[name]), optree.tree_leaves(rollout[name]), strict=True):
            assert isinstance(tensor, torch.Tensor)
            np.testing.assert_array_equal(tensor.numpy(), array)
    tensors["rewards"].zero_()  # a copy
    assert rollout.rewards.any()
    assert tensors["episodes"] == rollout.episodes


def test_map_reaches_every_array():
    torch = pytest.importorskip("torch")
    rollout = rich()
    tensors = rollout.map(torch.tensor)
    for name in ARRAY_FIELDS:
        for array, tensor in zip(optree.tree_leaves(rollout[name]), optree.tree_leaves(tensors[name])):
            assert isinstance(tensor, torch.Tensor), name
            np.testing.assert_array_equal(tensor.numpy(), array)
    assert tensors.episodes is rollout.episodes
    assert (tensors.num_steps, tensors.num_lanes, tensors.num_valid, tensors.nbytes) == (6, 4, rollout.num_valid, rollout.nbytes)
    assert_equal_rollouts(tensors.map(lambda tensor: tensor.numpy()), rollout)


# from_dict
def test_the_required_fields_make_a_rollout():
    rollout = Rollout.from_dict(data())
    assert not rollout.truncated.any()
    assert rollout.valid.all()
    assert rollout.episode_starts.tolist() == [[True, True], [False, False], [False, False]]
    assert rollout.cut_rows.tolist() == [[2, 0], [2, 1]]
    np.testing.assert_array_equal(rollout.cut_observations, rollout.observations[2])
    assert rollout.policy_version.tolist() == [0, 0]
    assert rollout.weights_fingerprint.dtype == np.uint64
    assert (rollout.policy_state, rollout.cut_state, rollout.global_state, rollout.context, rollout.episodes) == ((), (), (), (), ())
    rollout.validate(BOX, CHOICE)


def test_round_trip_through_plain_data_and_a_file(tmp_path):
    rollout = rich()
    loaded = Rollout.load(str(rollout.save(tmp_path / "sub" / "one.safetensors")))
    assert_equal_rollouts(loaded, rollout)
    loaded.validate()
    assert not any(leaf.flags.writeable for name in ARRAY_FIELDS for leaf in optree.tree_leaves(loaded[name]))
    assert_equal_rollouts(Rollout.from_dict(rollout.to_dict()), rollout)
    assert_equal_rollouts(Rollout.from_dict(dict(rollout)), rollout)
    rollout.validate()


def test_the_input_is_neither_changed_nor_shared():
    given = data()
    copies = {name: array.copy() for name, array in given.items()}
    rollout = Rollout.from_dict(given)
    for name, array in given.items():
        np.testing.assert_array_equal(array, copies[name])
        assert array.flags.writeable
        assert not np.shares_memory(array, rollout[name])
        assert not rollout[name].flags.writeable
    given["rewards"][:] = -1
    np.testing.assert_array_equal(rollout.rewards, copies["rewards"])
    assert Rollout.from_dict(rollout.to_dict()).rewards is rollout.rewards  # read-only: no copy


def test_flags_are_completed():
    terminated, truncated = np.zeros((4, 1), bool), np.zeros((4, 1), bool)
    terminated[0] = truncated[2] = True
    given = data(4, 1, terminated=terminated, truncated=truncated, next_observations=np.zeros((4, 1, 2), np.float32))
    assert Rollout.from_dict(given).episode_starts[:, 0].tolist() == [True, True, False, True]
    given["episode_starts"] = np.zeros((4, 1), bool)
    assert not Rollout.from_dict(given).episode_starts.any()
    both = Rollout.from_dict(data(truncated=data()["terminated"]))  # both flags count as terminated
    assert both.terminated[2].all()
    assert not both.truncated.any()


def test_cut_rows_come_from_next_observations():
    truncated = np.zeros((3, 2), bool)
    truncated[0, 1] = True
    successors = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    rollout = Rollout.from_dict(data(terminated=np.zeros((3, 2), bool), truncated=truncated, next_observations=successors))
    assert rollout.cut_rows.tolist() == [[0, 1], [2, 0], [2, 1]]
    # rows (0, 1), (2, 0), (2, 1) of 0 … 11 in pairs
    assert rollout.cut_observations.tolist() == [[2, 3], [8, 9], [10, 11]]


def test_given_cut_rows_are_sorted_with_what_belongs_to_them():
    given = rich().to_dict()
    order = [3, 0, 5, 1, 4, 2]
    assert len(given["cut_rows"]) == 6
    for name in ("cut_rows", "cut_observations", "cut_state", "cut_valid", "cut_global_state"):
        given[name] = optree.tree_map(lambda leaf: leaf[order], given[name])
    assert_equal_rollouts(Rollout.from_dict(given), rich())


def test_tensors_and_lists_are_accepted():
    torch = pytest.importorskip("torch")
    expected = Rollout.from_dict(data())
    assert_equal_rollouts(Rollout.from_dict({name: torch.from_numpy(array) for name, array in data().items()}), expected)
    assert_equal_rollouts(Rollout.from_dict(data(rewards=data()["rewards"].tolist(), terminated=data()["terminated"].tolist())), expected)
    with pytest.raises(RolloutError, match=r"log_probs: .*detach\(\)"):
        Rollout.from_dict(data(log_probs=torch.ones((3, 2), requires_grad=True)))


def test_flat_arrays_are_one_lane():
    columns = data(lanes=1, extras={"speed": np.ones((3, 1))}, context=(np.ones(2), np.ones((3, 1), int)))
    flat = {name: optree.tree_map(lambda leaf: leaf[:, 0], value) for name, value in columns.items() if name != "context"}
    flat["context"] = (np.ones(2), np.ones(3, int))
    assert_equal_rollouts(Rollout.from_dict(flat), Rollout.from_dict(columns))
    more = {"terminated": np.zeros(3, bool), "truncated": np.array([True, False, False])}
    cut = Rollout.from_dict({**flat, **more, "cut_rows": [0, 2], "cut_observations": np.array([[7, 7], [8, 8]], "f")})
    assert cut.cut_rows.tolist() == [[0, 0], [2, 0]]
    following = Rollout.from_dict({**flat, **more, "next_observations": np.full((3, 2), 5, "f")})
    assert following.cut_observations.tolist() == [[5, 5], [5, 5]]


@pytest.mark.parametrize("missing", ["own_observation", "end"])
def test_data_without_successors_are_taken_as_they_are_told_to_be(missing):
    no = np.zeros((4, 2), bool)
    terminated, truncated = no.copy(), no.copy()
    terminated[0, 0] = truncated[1, 1] = terminated[3, 0] = True
    given = data(4, 2, terminated=terminated, truncated=truncated)
    with pytest.warns(UserWarning, match="2 rows have no successor in the data"):  # (1, 1), and lane 1's last row
        rollout = Rollout.from_dict(given, missing_successors=missing)
    rollout.validate(BOX, CHOICE)
    ends = {(0, 0), (3, 0)} | ({(1, 1), (3, 1)} if missing == "end" else set())
    assert {tuple(row) for row in np.argwhere(rollout.terminated).tolist()} == ends
    assert rollout.truncated.sum() == (missing == "own_observation")
    successors = rollout.next_observations[:, 1, 0]  # lane 1 saw 1, 11, 21, 31
    assert successors.tolist() == ([11, 21, 31, 31] if missing == "end" else [11, 11, 31, 31])
    assert rollout.episode_starts[:, 1].tolist() == [True, False, True, False]
    with pytest.raises(RolloutError, match="missing_successors="):
        Rollout.from_dict(given)
    with pytest.raises(RolloutError, match="use refuse, own_observation, end"):
        Rollout.from_dict(given, missing_successors="next")


def test_dones_alone_are_read_as_terminated_only_on_request():
    given = data(3, 2)
    given["dones"] = given.pop("terminated")
    with pytest.raises(RolloutError, match="give terminated"):
        Rollout.from_dict(given)
    with pytest.warns(UserWarning, match="dones is read as terminated"):
        assert_equal_rollouts(Rollout.from_dict(given, missing_successors="end"), Rollout.from_dict(data(3, 2)))


def test_wider_floats_and_whole_rewards_are_cast():
    rollout = Rollout.from_dict(data(log_probs=-np.ones((3, 2)), rewards=np.ones((3, 2), np.int64)))
    assert rollout.log_probs.dtype == rollout.rewards.dtype == np.float32


def test_what_the_learner_computes_is_ignored_with_a_warning():
    with pytest.warns(UserWarning, match="values, returns ignored: learn computes them itself"):
        rollout = Rollout.from_dict(data(values=np.zeros((3, 2)), returns="whatever"))
    assert_equal_rollouts(rollout, Rollout.from_dict(data()))


@pytest.mark.parametrize("shape", [(0, 2), (3, 0), (0, 0)])
def test_empty_rollouts_are_legal(shape):
    rollout = Rollout.from_dict(data(*shape))
    assert (rollout.num_steps, rollout.num_lanes, rollout.num_valid) == (*shape, 0)
    rollout.validate(BOX, CHOICE)
    assert combine_rollouts([rollout, rollout]).num_lanes == 2 * shape[1]


T32 = np.zeros((3, 2))
REJECTED = {
    "typo": ({"log_prob": T32}, "unknown rollout key 'log_prob'; did you mean log_probs?"),
    "obs": ({"obs": T32}, "did you mean observations"),
    "dones": ({"dones": T32}, "give terminated"),
    "masks": ({"action_masks": T32}, 'key "action_mask" of observations'),
    "unknown": ({"qqqqqq": T32}, "known keys: observations"),
    "float flags": ({"terminated": np.ones((3, 2))}, r"terminated: got float64\[3, 2\], expected bool.*use bool"),
    "int flags": ({"terminated": np.ones((3, 2), np.uint8)}, r"terminated: got uint8\[3, 2\].*use bool"),
    "int log-probs": ({"log_probs": np.ones((3, 2), int)}, r"log_probs: got int64\[3, 2\], expected float32\[T, B\]"),
    "bool rewards": ({"rewards": np.ones((3, 2), bool)}, "rewards: got bool"),
    "objects": ({"actions": np.full((3, 2), None)}, r"actions: got object\[3, 2\]"),
    "text": ({"observations": np.full((3, 2), "x")}, "observations: got <U1"),
    "ragged": ({"rewards": [[1.0], [1.0, 2.0]]}, "rewards: cannot be read as an array"),
    "one axis": ({"rewards": np.ones(3)}, r"rewards: got float32\[3\].*rewards\[:, None\]"),
    "three axes": ({"rewards": np.ones((3, 2, 1))}, r"rewards: got float32\[3, 2, 1\], expected float32\[T, B\]$"),
    "log-prob shape": ({"log_probs": np.ones((3, 1))}, r"log_probs: got float32\[3, 1\], expected float32\[3, 2\]"),
    "flag shape": ({"terminated": np.ones((2, 2), bool)}, r"terminated: got bool\[2, 2\], expected bool\[3, 2\]"),
    "valid shape": ({"valid": np.ones((2, 2), bool)}, r"valid: got bool\[2, 2\], expected bool\[3, 2\]"),
    "obs shape": ({"observations": np.ones((2, 2, 2))}, r"observations: got float64\[2, 2, 2\], expected numbers\[3, 2, …\]"),
    "leaf shape": ({"actions": {"x": np.ones((3, 1))}}, r"actions\.x: got float64\[3, 1\]"),
    "empty tree": ({"actions": ()}, "actions: contains no array"),
    "tree keys": ({"actions": {1: T32}}, "keys of a tree must be text"),
    "successors": ({"terminated": np.zeros((3, 2), bool)}, "add next_observations"),
    "truncation": ({"truncated": np.eye(3, 2, dtype=bool)}, "add next_observations"),
    "next shape": ({"next_observations": np.ones((2, 2, 2))}, r"next_observations: got float64\[2, 2, 2\], expected numbers\[3, 2"),
    "next tree": ({"next_observations": {"x": np.ones((3, 2, 2))}}, r"cut_observations: its tree .* differs from that of obs"),
    "next dtype": (
        {"next_observations": np.ones((3, 2, 2)), "observations": np.ones((3, 2, 2), np.uint8)},
        r"cut_observations: got float64\[2, 2\], expected uint8\[2, 2\]",
    ),
    "twice": ({"next_observations": T32, "cut_rows": T32}, "hold the same data"),
    "cut rows alone": ({"cut_rows": T32.astype(int)}, "has cut_rows but lacks cut_observations"),
    "cuts alone": ({"cut_observations": T32}, "has cut_observations but lacks cut_rows"),
    "cut dtype": ({"cut_rows": T32, "cut_observations": T32}, r"cut_rows: got float64\[3, 2\], expected int32\[K, 2\]"),
    "cut missing": ({"cut_rows": [[2, 0]], "cut_observations": np.ones((1, 2), "f")}, r"cut_rows: \(t=2, b=1\) is missing"),
    "cut doubled": (
        {"cut_rows": [[2, 0], [2, 0], [2, 1]], "cut_observations": np.ones((3, 2), "f")},
        r"cut_rows: \(t=2, b=0\) is listed twice",
    ),
    "cut outside": ({"cut_rows": [[2, 2]], "cut_observations": np.ones((1, 2), "f")}, "outside the rollout of 3 steps"),
    "cut count": ({"cut_rows": [[2, 0], [2, 1]], "cut_observations": np.ones((1, 2))}, "one row for each of cut_rows"),
    "version": ({"policy_version": np.ones(3, int)}, r"policy_version: got int64\[3\], expected int32\[2\] or one number"),
    "memory lanes": ({"policy_state": np.ones((3, 5))}, r"policy_state: got float64\[3, 5\], expected numbers\[T/S, 2"),
    "memory cuts": ({"policy_state": np.ones((3, 2))}, "cut_state: its tree"),
    "global state": ({"global_state": np.ones((3, 3))}, "3 env copies do not divide 2 lanes"),
    "context": ({"context": np.ones((3, 2))}, r"context: expected \(table"),
    "context index": ({"context": (np.ones(2), np.full((3, 2), 2))}, "integers from 0 to 1"),
    "episode lane": ({"episodes": [EpisodeRecord(1.0, 1, 2, 0)]}, "is not an EpisodeRecord of one of 2 lanes"),
    "episode keys": ({"episodes": [{"reward": 1.0}]}, "episodes: .* is not an EpisodeRecord"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_wrong_data_are_rejected_with_a_reason(case):
    changes, words = REJECTED[case]
    with pytest.raises(RolloutError, match=words):
        Rollout.from_dict(data(**changes))


def test_a_rollout_is_made_from_a_mapping_with_the_required_fields():
    with pytest.raises(RolloutError, match="lacks actions; required are observations"):
        Rollout.from_dict({name: array for name, array in data().items() if name != "actions"})
    with pytest.raises(RolloutError, match="not from list"):
        Rollout.from_dict(list(data()))


# validate
def test_validate_against_spaces():
    rollout = Rollout.from_dict(data())
    rollout.validate(BOX, CHOICE)
    with pytest.raises(RolloutError, match=r"observations: got float32\[3, 2, 2\], expected float32\[T, B, 3\]"):
        rollout.validate(spaces.Box(-1, 1, (3,)))
    with pytest.raises(RolloutError, match="expected uint8"):
        rollout.validate(spaces.Box(0, 255, (2,), np.uint8))
    with pytest.raises(RolloutError, match=r"observations: its tree \* differs from that of its space, \{'x': \*\}"):
        rollout.validate(spaces.Dict({"x": BOX}))
    with pytest.raises(RolloutError, match=r"actions: 2 at \(t=1, b=1\) is not in Discrete\(2\)"):
        rollout.validate(BOX, spaces.Discrete(2))  # the actions are 0 1 / 1 2 / 2 0


def test_choices_of_every_discrete_space():
    many = spaces.Dict(
        {"m": spaces.MultiDiscrete([2, 3]), "b": spaces.MultiBinary(2), "d": spaces.Discrete(2, start=5), "x": spaces.Box(0, 1)}
    )
    rollout = create_fake_rollout(BOX, many, 10, 2)
    rollout.validate(BOX, many)
    for key, wrong in (("m", 3), ("b", 2), ("d", 4)):
        actions = {name: leaf.copy() for name, leaf in rollout.actions.items()}
        actions[key][4, 1] = wrong
        with pytest.raises(RolloutError, match=rf"actions.{key}: .* at \(t=4, b=1\)"):
            dataclasses.replace(rollout, actions=actions).validate(BOX, many)
        valid = rollout.valid.copy()
        valid[4, 1] = False
        dataclasses.replace(rollout, actions=actions, valid=valid).validate(BOX, many)


@pytest.mark.parametrize("name", ["observations", "log_probs", "rewards"])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_named(name, number):
    given = data()
    given[name][1, 1] = number
    rollout = Rollout.from_dict(given)
    with pytest.raises(BadNumberError, match=rf"{name} at \(t=1, b=1\) is not finite"):
        rollout.validate()
    valid = np.ones((3, 2), bool)
    valid[1, 1] = False
    Rollout.from_dict({**given, "valid": valid}).validate()
    successors = {"cut_rows": [[2, 0], [2, 1]], "cut_observations": np.array([[1, 1], [1, number]], np.float32)}
    with pytest.raises(BadNumberError, match=r"cut_observations at \(t=2, b=1\)"):
        Rollout.from_dict(data(**successors)).validate()


def test_a_reward_beyond_float32_is_noticed():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rollout = Rollout.from_dict(data(rewards=np.full((3, 2), 1e300)))
    with pytest.raises(BadNumberError, match="rewards"):
        rollout.validate()


# combine and select
def test_combine_rebases_everything():
    one, two = rich(0), rich(1, lanes=2, copies=1)
    both = combine_rollouts([one, two.to_dict()])  # a mapping is a rollout, too
    both.validate()
    np.testing.assert_array_equal(both.rewards, np.concatenate([one.rewards, two.rewards], 1))
    np.testing.assert_array_equal(both.observations["b"][0][:, 4:], two.observations["b"][0])
    np.testing.assert_array_equal(both.policy_state["h"][:, 4:], two.policy_state["h"])
    np.testing.assert_array_equal(both.extras["pair"][:, 4:], two.extras["pair"])
    np.testing.assert_array_equal(both.global_state, np.concatenate([one.global_state, two.global_state], 1))
    assert both.policy_version.tolist() == [0, 1, 2, 3, 1, 2]
    assert both.weights_fingerprint.tolist() == [2**64 - 1] * 4 + [2**64 - 2] * 2
    # lanes of the second rollout begin at 4: its truncated rows (2, 1) and (4, 1) are (2, 5) and (4, 5)
    assert both.cut_rows.tolist() == [[2, 1], [2, 5], [4, 3], [4, 5], *([5, lane] for lane in range(6))]
    successors = both.next_observations["a"]
    np.testing.assert_array_equal(successors, np.concatenate([r.next_observations["a"] for r in (one, two)], 1))
    # at (t, b) the number is 1000 * seed + 10 t + b, and a quarter more is the global state that followed
    cut = [21.25, 1021.25, 43.25, 1041.25, *(50.25 + lane for lane in range(4)), 1050.25, 1051.25]
    assert both.cut_global_state.tolist() == cut
    assert [(e.lane, e.episode_return) for e in both.episodes] == [(1, 1.5), (3, 2.0), (5, 1.5), (5, 2.0)]
    table, index = both.context
    np.testing.assert_array_equal(table[index], np.concatenate([one.context[0][one.context[1]], two.context[0][two.context[1]]], 1))


def test_combine_and_select_are_inverse():
    one, two = rich(0), rich(1)
    both = combine_rollouts([one, two])
    first, second = both.select_lanes(range(4)), select_lanes(both, [False] * 4 + [True] * 4)
    for back, original in ((first, one), (second, two)):
        table, index = back.context
        np.testing.assert_array_equal(table[index], original.context[0][original.context[1]])
        assert_equal_rollouts(dataclasses.replace(back, context=()), dataclasses.replace(original, context=()))
    assert_equal_rollouts(combine_rollouts([one]), one)


def test_select_in_any_order():
    rollout = rich()
    chosen = rollout.select_lanes([3, 0, 1])
    chosen.validate()
    np.testing.assert_array_equal(chosen.rewards, rollout.rewards[:, [3, 0, 1]])
    # old lanes 3, 0, 1 are now 0, 1, 2: the truncated rows (2, 1) and (4, 3) are (2, 2) and (4, 0)
    assert chosen.cut_rows.tolist() == [[2, 2], [4, 0], [5, 0], [5, 1], [5, 2]]
    np.testing.assert_array_equal(chosen.next_observations["a"], rollout.next_observations["a"][:, [3, 0, 1]])
    assert [(e.lane, e.episode_return) for e in chosen.episodes] == [(2, 1.5), (0, 2.0)]
    # lanes 3 | 0, 1 belong to the copies 1 | 0, 0: not equally many, so each lane has its own row
    np.testing.assert_array_equal(chosen.global_state, rollout.global_state[:, [1, 0, 0]])
    assert chosen.cut_global_state.tolist() == [21.25, 43.25, 53.25, 50.25, 51.25]


def brute_force_gae(rollout: Rollout, values: np.ndarray, at_cuts: np.ndarray, gamma: float, decay: float) -> np.ndarray:
    """A_t as the sum over the rows that follow, until the lane's data end or an episode does; values come by (t, b) and by cut row."""
    found = np.full(rollout.rewards.shape, np.nan)
    cuts = {(t, b): value for (t, b), value in zip(rollout.cut_rows.tolist(), at_cuts)}
    for t, b in np.argwhere(rollout.valid).tolist():
        total, weight = 0.0, 1.0
        for u in range(t, rollout.num_steps):
            following = cuts[u, b] if (u, b) in cuts else values[u + 1, b]
            delta = rollout.rewards[u, b] + gamma * following * (not rollout.terminated[u, b]) - values[u, b]
            total, weight = total + weight * delta, weight * gamma * decay
            if rollout.terminated[u, b] or rollout.truncated[u, b]:
                break
        found[t, b] = total
    return found


def test_rollouts_of_different_lengths_are_padded_and_keep_their_advantages():
    rng = np.random.default_rng(0)
    parts = [create_fake_rollout(BOX, CHOICE, steps, lanes, seed=steps, episode_length=4) for steps, lanes in ((3, 2), (9, 1), (6, 3))]
    both = combine_rollouts(parts)
    both.validate(BOX, CHOICE)
    assert (both.num_steps, both.num_lanes, both.num_valid) == (9, 6, 3 * 2 + 9 + 6 * 3)
    assert not both.valid[3:, :2].any()
    assert not both.rewards[~both.valid].any()
    values, first = rng.standard_normal((9, 6)), 0
    at_cuts = rng.standard_normal(len(both.cut_rows))
    whole = gae.compute_gae(
        both.rewards, values, gae.shift_values(values, both.cut_rows, at_cuts), both.terminated, both.truncated, 0.9, 0.8
    )
    number = {tuple(row): index for index, row in enumerate(both.cut_rows.tolist())}
    for part in parts:
        lanes = slice(first, first + part.num_lanes)
        cuts = at_cuts[[number[t, b + first] for t, b in part.cut_rows.tolist()]]
        expected = brute_force_gae(part, values[: part.num_steps, lanes], cuts, 0.9, 0.8)
        np.testing.assert_allclose(whole[: part.num_steps, lanes], expected, rtol=1e-12)
        np.testing.assert_array_equal(
            both.cut_observations[[number[t, b + first] for t, b in part.cut_rows.tolist()]], part.cut_observations
        )
        first += part.num_lanes


def test_padding_every_field():
    short, long = rich(0, steps=5), rich(1, steps=6)
    both = combine_rollouts([short, long])
    both.validate()
    assert both.policy_state["h"].shape == (3, 8, 1)  # rows 0, 2 and 4 of either
    assert both.truncated[4].tolist() == [True] * 4 + [False] * 3 + [True]  # (4, 3) was truncated; the short ones are cut off there
    assert both.extras["pair"].shape == (6, 8, 2)
    kept = both.select_lanes(range(4))
    for name in ("observations", "actions", "log_probs", "rewards", "valid", "episode_starts", "global_state", "extras"):
        for leaf, own in zip(optree.tree_leaves(kept[name]), optree.tree_leaves(short[name]), strict=True):
            np.testing.assert_array_equal(leaf[:5], own)


def test_a_global_state_needs_its_successors_unless_nothing_follows():
    data = {name: np.zeros((2, 2), np.float32) for name in ("observations", "actions", "log_probs", "rewards")}
    data |= {"terminated": np.array([[False, False], [True, True]]), "global_state": np.array([[[1.0]], [[2.0]]], np.float32)}
    rollout = Rollout.from_dict(data)
    assert rollout.cut_rows.tolist() == [[1, 0], [1, 1]]
    assert rollout.cut_global_state.tolist() == [[2.0], [2.0]]  # never read: nothing follows
    data["next_observations"], data["truncated"] = data["observations"], np.array([[True, False], [False, False]])
    with pytest.raises(RolloutError, match=r"add cut_rows .* and cut_global_state \[K, \*\]"):
        Rollout.from_dict(data)


def test_select_keeps_one_global_state_per_copy_where_it_can():
    rollout = rich()
    assert rollout.select_lanes([0, 2]).global_state.shape == (6, 2)  # one lane of each copy
    np.testing.assert_array_equal(rollout.select_lanes([3, 2]).global_state, rollout.global_state[:, [1]])
    assert rollout.select_lanes([]).num_lanes == 0
    rollout.select_lanes([]).validate()


@pytest.mark.parametrize(
    "lanes, words", [([4], "from 0 to 3"), ([-1], "from 0"), ([1, 1], "twice"), ([0.5], "numbers"), ([True], "one bool")]
)
def test_wrong_lanes_are_rejected(lanes, words):
    with pytest.raises(RolloutError, match=words):
        rich().select_lanes(lanes)


@pytest.mark.parametrize(
    "other, words",
    [
        (lambda: dataclasses.replace(rich(steps=5), state_every=0), "rollout 1 has 5 steps, not 6, and cannot be padded: state_every"),
        (lambda: rich().map(lambda leaf: leaf[:0]), "rollout 1 has 0 steps, not 6, and cannot be padded: it has no row"),
        (lambda: dataclasses.replace(rich(), extras={"height": np.zeros((6, 4), "f")}), "rollout 1: extras: its tree"),
        (
            lambda: dataclasses.replace(rich(), actions=rich().actions.astype(np.int32)),
            r"rollout 1: actions: int32\[6, 4\] does not fit int64\[6, 4\]",
        ),
        (lambda: dataclasses.replace(rich(), observations=rich().observations["a"]), "rollout 1: observations: its tree"),
        (lambda: dataclasses.replace(rich(), policy_state={"h": np.zeros((6, 4, 1), "f")}), "rollout 1: policy_state.h"),
        (lambda: dataclasses.replace(rich(), cut_state={"h": np.zeros((6, 2), "f")}), "rollout 1: cut_state.h"),
        (lambda: dataclasses.replace(rich(), context=()), "rollout 1: context"),
        (lambda: rich(copies=4), "rollout 1: global_state has 1 lanes per env copy, rollout 0 2"),
    ],
)
def test_rollouts_that_do_not_fit_are_rejected(other, words):
    with pytest.raises(RolloutError, match=words):
        combine_rollouts([rich(), other()])
    with pytest.raises(RolloutError, match="no rollout to combine"):
        combine_rollouts([])


def quiet(**changes) -> Rollout:
    """A rollout in which no episode ends."""
    made = create_fake_rollout(spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(3), 2, 2, seed=0)
    no = np.zeros((2, 2), np.bool_)
    return dataclasses.replace(made, **{"terminated": no, "truncated": no, "valid": ~no, **changes})


def test_the_scale_is_the_largest_root_mean_square_of_a_feature_over_valid_rows():
    observations = np.array([[[3.0, 100.0], [0.0, 1.0]], [[4.0, 1.0], [0.0, 1.0]]], np.float32)
    valid = np.array([[False, True], [True, True]])
    assert rollout_metrics(quiet(observations=observations))["observation_scale"] == pytest.approx(np.sqrt((10_000 + 3) / 4))
    assert rollout_metrics(quiet(observations=observations, valid=valid))["observation_scale"] == pytest.approx(np.sqrt(16 / 3))


def test_the_share_of_truncated_ends():
    terminated, truncated = np.array([[True, False], [False, False]]), np.array([[False, True], [True, False]])
    assert rollout_metrics(quiet(terminated=terminated, truncated=truncated))["truncated_share"] == pytest.approx(2 / 3)
    assert "truncated_share" not in rollout_metrics(quiet()), "no episode ended"


def test_the_share_of_rows_without_a_choice():
    valid = np.ones((2, 2), np.bool_)
    mask = np.array([[[1, 0, 0], [1, 1, 0]], [[0, 0, 1], [1, 1, 1]]], np.int8)
    assert forced_share(mask, np.zeros((2, 2), np.int64), valid) == 0.5
    assert forced_share(mask, np.zeros((2, 2, 2), np.int64), valid) == 0.75, "two parts with one choice each have two entries"
    assert forced_share({"a": mask}, {"a": np.zeros((2, 2), np.int64), "b": np.zeros((2, 2, 1), np.float32)}, valid) == 0.0
    seen = {"observation": np.zeros((2, 2, 1), np.float32), MASK_KEY: mask}
    assert rollout_metrics(quiet(observations=seen))["forced_share"] == 0.5


def test_the_spread_of_the_memory_is_over_lanes_and_absent_without_memory():
    state = (np.array([[1.0, 0.0], [-1.0, 0.0]], np.float32),)
    assert rollout_metrics(quiet(cut_state=state))["memory_spread"] == 0.5  # standard deviations 1 and 0
    assert "memory_spread" not in rollout_metrics(quiet())
