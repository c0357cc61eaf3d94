"""The buffer, with rows that identify their origin: every entry of row t, lane b is 100 * t + b. The size of a rollout."""

import weakref

import numpy as np
import optree
import pytest
from gymnasium import spaces

from doubles.toys import SpacesEnv
from inchworm import PPOTrainer, TrainingConfig
from inchworm.core.errors import ConfigError, RolloutError
from inchworm.core.types import EpisodeRecord
from inchworm.rollout import buffer as buffer_module
from inchworm.rollout.buffer import RolloutBuffer, available_bytes, check_fits, format_bytes, rollout_bytes
from inchworm.rollout.rollout import ARRAY_FIELDS

BOX, CHOICE = spaces.Box(-1e6, 1e6, (2,), np.float32), spaces.Discrete(1000)


def row(t: int, lanes: int, **changes):
    number = 100 * t + np.arange(lanes)
    return {
        "observations": np.stack([number, -number], -1).astype(np.float32),
        "actions": number.astype(np.int64),
        "log_probs": -number.astype(np.float32),
        "rewards": 2 * number.astype(np.float32),
        "terminated": np.zeros(lanes, bool),
        "truncated": np.zeros(lanes, bool),
        "episode_starts": np.zeros(lanes, bool),
        **changes,
    }


def lanes_with(*chosen: int, of: int) -> np.ndarray:
    return np.isin(np.arange(of), chosen)


def last_observations(lanes: int) -> np.ndarray:
    return np.stack([9000 + np.arange(lanes)] * 2, -1).astype(np.float32)


def test_rows_arrive_where_they_belong():
    buffer = RolloutBuffer.create(4, 3, BOX, CHOICE)
    for t in range(4):
        assert len(buffer) == t
        buffer.add(**row(t, 3, valid=lanes_with(t % 3, of=3), episode_starts=lanes_with(0, of=3)))
    episodes = [EpisodeRecord(1.0, 2, 0, 7)]
    rollout = buffer.get(last_observations=last_observations(3), policy_version=5, weights_fingerprint=2**63 + 1, episodes=episodes)
    number = 100 * np.arange(4)[:, None] + np.arange(3)
    np.testing.assert_array_equal(rollout.observations, np.stack([number, -number], -1))
    np.testing.assert_array_equal(rollout.actions, number)
    np.testing.assert_array_equal(rollout.log_probs, -number)
    np.testing.assert_array_equal(rollout.rewards, 2 * number)
    np.testing.assert_array_equal(rollout.valid, [lanes_with(t % 3, of=3) for t in range(4)])
    assert rollout.episode_starts[:, 0].all()
    assert not rollout.episode_starts[:, 1:].any()
    assert rollout.policy_version.tolist() == [5, 5, 5]
    assert rollout.weights_fingerprint.tolist() == [2**63 + 1] * 3
    assert rollout.episodes == tuple(episodes)
    assert rollout.num_valid == 4
    # no lane ended: the cut rows are each lane's last row, with what the next act would read
    np.testing.assert_array_equal(rollout.cut_rows, [[3, 0], [3, 1], [3, 2]])
    np.testing.assert_array_equal(rollout.cut_observations, last_observations(3))
    rollout.validate(BOX, CHOICE)


def test_cut_rows_of_truncated_terminated_and_last_rows():
    buffer = RolloutBuffer.create(3, 3, BOX, CHOICE)
    buffer.add(**row(0, 3, truncated=lanes_with(2, of=3), terminated=lanes_with(1, of=3)))
    buffer.add_cut(2, np.array([1.0, 2.0]))
    buffer.add_cut(1, np.array([3.0, 4.0]))  # terminated before the last row: nothing follows, nothing is kept
    buffer.add(**row(1, 3, truncated=lanes_with(0, 2, of=3)))
    buffer.add_cut(2, np.array([11.0, 12.0]))
    buffer.add_cut(0, np.array([5.0, 6.0]))
    buffer.add(**row(2, 3, truncated=lanes_with(1, of=3), terminated=lanes_with(2, of=3)))
    buffer.add_cut(2, np.array([9.0, 10.0]))
    buffer.add_cut(1, np.array([7.0, 8.0]))
    rollout = buffer.get(last_observations=last_observations(3))
    np.testing.assert_array_equal(rollout.cut_rows, [[0, 2], [1, 0], [1, 2], [2, 0], [2, 1], [2, 2]])  # sorted by (t, b), none twice
    np.testing.assert_array_equal(rollout.cut_observations, [[1, 2], [5, 6], [11, 12], [9000, 9000], [7, 8], [9, 10]])
    assert rollout.cut_rows.dtype == np.int32
    assert rollout.cut_observations.dtype == np.float32
    rollout.validate(BOX, CHOICE)


@pytest.mark.parametrize(("flag", "steps"), [("terminated", 1), ("truncated", 1), ("truncated", 2)])
def test_a_lane_that_ended_needs_its_true_successor(flag, steps):
    buffer = RolloutBuffer.create(steps, 2, BOX, CHOICE)
    for t in range(steps):
        buffer.add(**row(t, 2, **({flag: lanes_with(1, of=2)} if t == 0 else {})))
    with pytest.raises(RolloutError, match=r"lane 1 ended at row 0 without its true successor; call add_cut\(1"):
        buffer.get(last_observations=last_observations(2))


def test_a_kept_rollout_is_read_only_and_untouched_by_the_next():
    buffer = RolloutBuffer.create(1, 2, BOX, CHOICE)
    buffer.add(**row(3, 2))
    kept = buffer.get(last_observations=last_observations(2))
    with pytest.raises(RolloutError, match=r"full \(1 rows\).*reset\(\)"):
        buffer.add(**row(4, 2))
    buffer.reset(2)
    assert len(buffer) == 0
    with pytest.raises(RolloutError, match="holds 0 of 2 rows"):
        buffer.get(last_observations=last_observations(2))
    buffer.add(**row(5, 2))
    buffer.add(**row(6, 2))
    following = buffer.get(last_observations=last_observations(2) + 1)
    assert kept.actions.tolist() == [[300, 301]]
    assert following.actions.tolist() == [[500, 501], [600, 601]]
    for rollout in (kept, following):
        for name in rollout:
            value = rollout[name]
            if isinstance(value, np.ndarray):
                assert not value.flags.writeable, name
    with pytest.raises(ValueError, match="read-only"):
        kept.rewards[0, 0] = 1


def test_wrong_calls_of_add_cut_and_get():
    buffer = RolloutBuffer.create(2, 2, BOX, CHOICE)
    with pytest.raises(RolloutError, match="call add first"):
        buffer.add_cut(0, np.zeros(2))
    buffer.add(**row(0, 2))
    with pytest.raises(RolloutError, match="lane 2"):
        buffer.add_cut(2, np.zeros(2))
    buffer.add_cut(0, np.zeros(2))
    with pytest.raises(RolloutError, match="already"):
        buffer.add_cut(0, np.zeros(2))
    with pytest.raises(RolloutError, match=r"cut_observations: got float64\[3\], expected float32\[2\]"):
        buffer.add_cut(1, np.zeros(3))
    buffer.add(**row(1, 2))
    with pytest.raises(RolloutError, match=r"cut_observations: got float32\[1, 2\], expected float32\[2, 2\]"):
        buffer.get(last_observations=last_observations(1))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"rewards": np.zeros(1, np.float32)}, r"rewards: got float32\[1\], expected float32\[3\]"),  # would broadcast
        ({"rewards": np.float32(0)}, r"rewards: got float32\[\]"),
        ({"observations": np.zeros((3, 1), np.float32)}, r"observations: got float32\[3, 1\], expected float32\[3, 2\]"),
        ({"actions": np.zeros(3, np.float32)}, r"actions: got float32\[3\], expected int64\[3\]"),  # would be cut to whole numbers
        ({"terminated": np.zeros(3, np.float32)}, r"terminated: got float32\[3\], expected bool\[3\]"),
    ],
)
def test_wrong_rows_are_not_broadcast_or_cast(changes, words):
    buffer = RolloutBuffer.create(2, 3, BOX, CHOICE)
    with pytest.raises(RolloutError, match=words):
        buffer.add(**row(0, 3, **changes))
    assert len(buffer) == 0


def test_other_float_widths_and_lists_are_cast():
    buffer = RolloutBuffer.create(1, 2, BOX, CHOICE)
    buffer.add(**row(0, 2, rewards=np.array([0.5, 1.5]), log_probs=[-1.0, -2.0]))
    rollout = buffer.get(last_observations=last_observations(2))
    assert rollout.rewards.dtype == rollout.log_probs.dtype == np.float32
    assert rollout.rewards.tolist() == [[0.5, 1.5]]


def test_trees_keep_their_dtypes():
    observation_space = spaces.Dict({"image": spaces.Box(0, 255, (4, 4, 1), np.uint8), "parts": spaces.Tuple([spaces.Discrete(5)])})
    action_space = spaces.Dict({"go": spaces.MultiDiscrete([3, 3]), "aim": spaces.Box(-1, 1, (2,), np.float32)})
    buffer = RolloutBuffer.create(2, 1, observation_space, action_space)
    for t in range(2):
        observation = {"image": np.full((1, 4, 4, 1), t, np.uint8), "parts": (np.array([t]),)}
        action = {"go": np.array([[t, 2]]), "aim": np.array([[0.1, 5.0]], np.float32)}
        buffer.add(**row(0, 1, observations=observation, actions=action, truncated=np.array([t == 0])))
        if t == 0:
            buffer.add_cut(0, {"image": np.full((4, 4, 1), 200, np.uint8), "parts": (np.int64(4),)})
    rollout = buffer.get(last_observations={"image": np.full((1, 4, 4, 1), 99, np.uint8), "parts": (np.array([3]),)})
    assert rollout.observations["image"].dtype == np.uint8
    assert rollout.observations["image"].shape == (2, 1, 4, 4, 1)
    assert rollout.observations["parts"][0].tolist() == [[0], [1]]
    assert rollout.actions["go"].tolist() == [[[0, 2]], [[1, 2]]]
    assert rollout.actions["aim"][0, 0, 1] == 5.0  # as sampled, beyond the bounds
    assert rollout.cut_observations["image"][:, 0, 0, 0].tolist() == [200, 99]
    assert rollout.cut_observations["parts"][0].tolist() == [4, 3]
    rollout.validate(observation_space, action_space)


def test_a_gaussian_action_of_an_integer_box_is_stored_as_sampled():
    buffer = RolloutBuffer.create(1, 1, BOX, spaces.Box(0, 10, (1,), np.int32))
    buffer.add(**row(0, 1, actions=np.array([[2.75]], np.float32)))
    assert buffer.get(last_observations=last_observations(1)).actions.tolist() == [[[2.75]]]


def test_memory_is_recorded_every_few_rows_and_after_cuts():
    # The memory before row t is 10 * t + lane; after reading row t it is 10 * (t + 1) + lane.
    def memory(t: int) -> dict[str, np.ndarray]:
        return {"h": (10 * t + np.arange(2))[:, None].astype(np.float32)}

    buffer = RolloutBuffer.create(5, 2, BOX, CHOICE, state=memory(0), state_every=2)
    for t in range(5):
        buffer.add(**row(t, 2, state=memory(t), truncated=np.array([False, t == 1])))
        if t == 1:
            buffer.add_cut(1, np.zeros(2), {"h": memory(t + 1)["h"][1]})
    rollout = buffer.get(last_observations=last_observations(2), last_state=memory(5))
    assert rollout.policy_state["h"].shape == (3, 2, 1)  # ceil(5 / 2) rows: 0, 2, 4
    assert rollout.policy_state["h"][..., 0].tolist() == [[0, 1], [20, 21], [40, 41]]
    assert rollout.cut_rows.tolist() == [[1, 1], [4, 0], [4, 1]]
    assert rollout.cut_state["h"][:, 0].tolist() == [21, 50, 51]
    rollout.validate()


def test_global_state_is_kept_once_per_env_copy():
    buffer = RolloutBuffer.create(2, 4, BOX, CHOICE, global_state=np.zeros((2, 3), np.float32))
    for t in range(2):
        buffer.add(**row(t, 4, global_state=np.full((2, 3), t, np.float32)))
        if t == 0:
            buffer.add_cut(3, np.zeros(2), (), np.full(3, 7, np.float32))  # lane 3 was truncated there
    last = np.array([[10, 11, 12], [20, 21, 22]], np.float32)  # of the two copies
    rollout = buffer.get(last_observations=last_observations(4), last_global_state=last)
    assert rollout.global_state.shape == (2, 2, 3)
    assert rollout.global_state[1, 0, 0] == 1
    assert rollout.cut_rows.tolist() == [[0, 3], [1, 0], [1, 1], [1, 2], [1, 3]]
    assert rollout.cut_global_state.tolist() == [[7, 7, 7], [10, 11, 12], [10, 11, 12], [20, 21, 22], [20, 21, 22]]  # once a lane
    assert rollout.lanes_per_copy == 2
    rollout.validate()


def test_empty_buffers():
    rollout = RolloutBuffer.create(0, 2, BOX, CHOICE).get(last_observations=last_observations(2))
    assert (rollout.num_steps, rollout.num_lanes, rollout.num_valid) == (0, 2, 0)
    assert rollout.cut_rows.shape == (0, 2)
    rollout.validate(BOX, CHOICE)
    with pytest.raises(RolloutError, match="num_steps=-1"):
        RolloutBuffer.create(-1, 2, BOX, CHOICE)


def test_the_buffer_keeps_no_reference_to_the_rollout():
    buffer = RolloutBuffer.create(1, 2, BOX, CHOICE)
    buffer.add(**row(0, 2))
    rollout = buffer.get(last_observations=last_observations(2))
    rewards = weakref.ref(rollout.rewards)
    del rollout
    assert rewards() is None
    with pytest.raises(RolloutError, match="full"):
        buffer.add_cut(0, np.zeros(2))


def test_the_size_by_hand() -> None:
    # a row: 4 floats observed, 1 int64 action, log-prob and reward as float32, 4 flags: 16 + 8 + 8 + 4 = 36 bytes
    # 128 steps x 64 lanes x 36 = 294,912, and 64 successors of 16 bytes = 1,024
    assert rollout_bytes(spaces.Box(-1, 1, (4,)), spaces.Discrete(2), 128, 64) == 295_936


@pytest.mark.parametrize(
    ("observation_space", "action_space"),
    [
        (spaces.Box(0, 255, (8, 8, 3), np.uint8), spaces.Discrete(3)),
        (spaces.Dict({"a": spaces.Box(-1, 1, (3,)), "b": spaces.Discrete(4)}), spaces.Box(-1, 1, (2,))),
    ],
)
def test_the_size_is_that_of_a_rollout_without_ends(observation_space: spaces.Space, action_space: spaces.Space) -> None:
    with PPOTrainer("mlp", SpacesEnv(observation_space, action_space, episode_length=8), seed=0) as trainer:
        rollout = trainer.collect_rollouts(7)
    held = ("policy_version", "weights_fingerprint", "cut_rows", "cut_valid")
    arrays = [leaf for name in ARRAY_FIELDS if name not in held for leaf in optree.tree_leaves(getattr(rollout, name))]
    assert sum(array.nbytes for array in arrays) == rollout_bytes(observation_space, action_space, 7, 1)


def test_a_rollout_larger_than_the_free_memory_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_module, "available_bytes", lambda: 1000)
    check_fits(1000, what="x")
    with pytest.raises(ConfigError, match=r"^x takes 1 kB, but 1 kB of memory are free; use fewer env.num_envs or ppo.rollout_steps$"):
        check_fits(1001, what="x")
    config = TrainingConfig.from_dict({"ppo": {"rollout_steps": 64}, "env": {"num_envs": 8}})
    with pytest.raises(ConfigError, match="a rollout of 8 lanes x 64 steps takes 18"):
        PPOTrainer("mlp", "CartPole-v1", config)
    monkeypatch.setattr(buffer_module, "available_bytes", lambda: None)
    check_fits(10**15, what="x")


def test_free_memory_as_the_system_reports_it(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    assert available_bytes() is None or available_bytes() > 10**6
    facts = tmp_path / "meminfo"
    facts.write_text("MemTotal: 9 kB\nMemAvailable:     2048 kB\n")
    monkeypatch.setattr(buffer_module, "_MEMINFO", facts)
    assert available_bytes() == 2048 * 1024
    facts.write_text("nothing of the kind\n")
    monkeypatch.setattr(buffer_module.os, "sysconf", lambda name: {"SC_AVPHYS_PAGES": 3, "SC_PAGE_SIZE": 4096}[name])
    assert available_bytes() == 3 * 4096
    monkeypatch.setattr(buffer_module.os, "sysconf", _unknown)
    assert available_bytes() is None


def _unknown(name: str) -> int:
    raise ValueError(name)


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 bytes"), (999, "999 bytes"), (18_600, "18.6 kB"), (2_500_000, "2.5 MB"), (3 * 10**9, "3 GB"), (10**16, "1e+04 TB")],
)
def test_format_bytes(count: int, words: str) -> None:
    assert format_bytes(count) == words
