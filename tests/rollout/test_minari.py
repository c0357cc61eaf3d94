"""Rollouts as Minari datasets and back: rows, ends and successors stay what they were."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from inchworm.core.errors import MissingExtraError, RolloutError
from inchworm.rollout.fake import create_fake_rollout
from inchworm.rollout.minari import export_minari, import_minari
from inchworm.rollout.rollout import Rollout, combine_rollouts

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:minari.utils")
minari = pytest.importorskip("minari")
OBSERVED = spaces.Dict({"image": spaces.Box(0, 255, (4, 4, 3), np.uint8), "speed": spaces.Box(-1, 1, (2,), np.float32)})
ACTED = spaces.Discrete(3)
SPACES = {"observation_space": OBSERVED, "action_space": ACTED}


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))


def rows(rollout: Rollout) -> list[tuple[object, ...]]:
    """Every valid row with its successor, as a set that knows no lanes; what follows a terminated row is not read."""
    following, found = rollout.next_observations, []
    for t, b in np.argwhere(rollout.valid).tolist():
        at = (t, b)
        after = () if rollout.terminated[at] else (following["speed"][at].tobytes(), following["image"][at].tobytes())
        numbers = (float(rollout.log_probs[at]), float(rollout.rewards[at]), int(rollout.actions[at]), bool(rollout.episode_starts[at]))
        seen = (rollout.observations["speed"][at].tobytes(), rollout.observations["image"][at].tobytes())
        found.append((*seen, *numbers, bool(rollout.terminated[at]), *after))
    return sorted(found)


@pytest.mark.parametrize("lanes", [1, 3])
def test_round_trip(lanes: int) -> None:
    parts = [create_fake_rollout(OBSERVED, ACTED, steps, 2, seed=steps, episode_length=6) for steps in (20, 11)]
    rollout = replace(combine_rollouts(parts), policy_version=np.full(4, 7, np.int32), weights_fingerprint=np.full(4, 2**64 - 3, np.uint64))
    dataset = export_minari(rollout, "inchworm/round-trip-v0", **SPACES)
    assert dataset.total_steps == rollout.num_valid == 62
    for episode in dataset.iterate_episodes():
        assert len(episode.observations["speed"]) == len(episode) + 1
        assert bool(episode.terminations[-1]) != bool(episode.truncations[-1])
        assert not (episode.terminations[:-1] | episode.truncations[:-1]).any()
    back = import_minari("inchworm/round-trip-v0", lanes=lanes)
    back.validate(OBSERVED, ACTED)
    assert back.num_lanes == lanes
    assert rows(back) == rows(rollout)
    assert (back.policy_version.tolist(), back.weights_fingerprint.tolist()) == ([7] * lanes, [2**64 - 3] * lanes)
    # a row is truncated where its episode was, where the rollout ended, and nowhere else
    ends = rollout.truncated.copy()
    for lane in range(4):
        last = int(np.flatnonzero(rollout.valid[:, lane])[-1])
        ends[last, lane] |= not rollout.terminated[last, lane]
    assert back.truncated.sum() + lanes_without_padding(back) >= ends.sum()


def lanes_without_padding(rollout: Rollout) -> int:
    return int((rollout.valid[-1] & ~rollout.dones[-1]).sum())


def test_data_of_others_need_the_log_probs_of_an_assumed_policy() -> None:
    rollout = create_fake_rollout(spaces.Box(-1, 1, (2,)), ACTED, 12, 1, episode_length=5)
    from minari.data_collector import EpisodeBuffer

    buffer = EpisodeBuffer(
        id=0,
        observations=np.concatenate([rollout.observations[:, 0], rollout.observations[-1:, 0]]),  # type: ignore[arg-type]
        actions=rollout.actions[:, 0],  # type: ignore[arg-type]
        rewards=rollout.rewards[:, 0],  # type: ignore[arg-type]
        terminations=np.zeros(12, bool),  # type: ignore[arg-type]
        truncations=np.arange(12) == 11,  # type: ignore[arg-type]
    )
    dataset = minari.create_dataset_from_buffers("plain-v0", [buffer], observation_space=spaces.Box(-1, 1, (2,)), action_space=ACTED)
    with pytest.raises(RolloutError, match="no log_probs in its infos"):
        import_minari(dataset)
    taken = import_minari(dataset, log_probs=lambda rollout: np.full(rollout.rewards.shape, -0.5))
    np.testing.assert_array_equal(taken.observations[:, 0], rollout.observations[:, 0])
    assert (taken.log_probs == -0.5).all()
    assert taken.truncated[:, 0].tolist() == [False] * 11 + [True]
    assert [episode.length for episode in taken.episodes] == [12]


@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_a_lane_tells_the_policy_of_all_its_episodes(lanes: int) -> None:
    """With the version of its first episode alone, old rows would pass for new ones, and no guard would look at them."""
    rollout = create_fake_rollout(OBSERVED, ACTED, 12, 4, seed=3)
    versions, prints = np.array([5, 4, 5, 2], np.int32), np.array([7, 6, 7, 9], np.uint64)
    export_minari(replace(rollout, policy_version=versions, weights_fingerprint=prints), "mixed-v0", **SPACES)
    taken = import_minari("mixed-v0", lanes=lanes)
    for version, own in ((5, 7), (4, 6), (2, 9)):
        before, after = versions == version, taken.policy_version == version
        assert set(taken.weights_fingerprint[after].tolist()) == {own}
        assert sorted(rollout.rewards[:, before].ravel()) == sorted(taken.rewards[:, after][taken.valid[:, after]])


def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    rollout = create_fake_rollout(OBSERVED, ACTED, 4, 1)
    with pytest.raises(RolloutError, match="actions"):
        export_minari(rollout, "wrong-v0", observation_space=OBSERVED, action_space=spaces.Box(-1, 1, (2,)))
    with pytest.raises(RolloutError, match="no valid row"):
        export_minari(replace(rollout, valid=np.zeros_like(rollout.valid)), "wrong-v0", **SPACES)
    assert not list(tmp_path.iterdir())
    export_minari(rollout, "right-v0", **SPACES)
    with pytest.raises(RolloutError, match="lanes=0 must be 1 or more"):
        import_minari("right-v0", lanes=0)


def test_what_a_dataset_cannot_hold_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = create_fake_rollout(OBSERVED, ACTED, 4, 1)
    with pytest.warns(UserWarning, match="has no place for extras"):
        export_minari(replace(rollout, extras={"x": np.ones((4, 1))}), "lossy-v0", **SPACES)
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'inchworm\[minari\]'"):
        import_minari("lossy-v0")
