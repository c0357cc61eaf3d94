"""The memory worlds show what they promise: a cue at the start, no trace of it until the choice, and chance without memory."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from inchworm.env.check import check_env
from inchworm.worlds.toys import LEFT, RIGHT, WALK, HideEntries, MemoryCorridor, MixedMemoryCorridor, PartialCartPole


def episode(env: Any, seed: int, choose: Any) -> tuple[list[Any], list[float], dict[str, Any]]:
    """Observations, rewards and the last info of one episode; `choose(cue, at_end)` acts."""
    observation, _ = env.reset(seed=seed)
    cue, seen, rewards, over = env.unwrapped.cue, [observation], [], False
    while not over:
        observation, reward, over, cut, info = env.step(choose(cue, len(rewards) == env.unwrapped.length))
        assert not cut
        seen.append(observation)
        rewards.append(reward)
    return seen, rewards, info


def turn(cue: int, end: bool) -> int:
    del end
    return RIGHT if cue > 0 else LEFT


def mixed(cue: int, end: bool) -> dict[str, Any]:
    return {"turn": turn(cue, end) if end else WALK, "reach": np.array([0.5 * cue], np.float32)}


def test_the_cue_is_seen_once_and_the_choice_comes_20_steps_later() -> None:
    env = MemoryCorridor()
    by_cue = {}
    for seed in range(10):
        seen, rewards, info = episode(env, seed, turn)
        assert len(rewards) == 21  # 20 steps, then the choice
        assert rewards == [0.0] * 20 + [1.0]
        assert info == {"is_success": 1.0}
        assert seen[0].tolist() == [env.cue, 0.0]
        assert [row.tolist() for row in seen[1:20]] == [[0.0, 0.0]] * 19
        assert seen[20].tolist() == [0.0, 1.0]
        by_cue[env.cue] = np.stack(seen[1:])
    np.testing.assert_array_equal(by_cue[-1], by_cue[1])  # both cues came, and nothing after them tells which


def test_the_wrong_side_earns_nothing() -> None:
    _, rewards, info = episode(MemoryCorridor(3), 0, lambda cue, end: 1 - turn(cue, end))
    assert rewards == [0.0, 0.0, 0.0, 0.0]
    assert info == {"is_success": 0.0}


def test_without_memory_half_of_the_choices_are_right() -> None:
    for side in (LEFT, RIGHT):
        env = MemoryCorridor(1)
        wins = [episode(env, seed, lambda cue, end, side=side: side)[2]["is_success"] for seed in range(400)]
        assert np.mean(wins) == pytest.approx(0.5, abs=0.1)  # 4 standard errors of 0.025


def test_the_mixed_corridor_has_masks_a_dict_and_a_hybrid_action() -> None:
    env = MixedMemoryCorridor(4)
    seen, rewards, info = episode(env, 1, mixed)
    assert rewards == [0.0] * 4 + [1.0]
    assert info["is_success"] == 1.0
    assert [row["action_mask"]["turn"].tolist() for row in seen[:5]] == [[0, 0, 1]] * 4 + [[1, 1, 0]]
    assert [int(row["here"]) for row in seen[:5]] == [0, 0, 0, 0, 1]
    assert [float(row["cue"][0]) for row in seen[:5]] == [env.cue, 0, 0, 0, 0]
    assert all(env.observation_space.contains(row) for row in seen)
    # the turn alone, with the reach on the wrong side: 1 - (0.5 + 0.5)^2 = 0
    _, rewards, info = episode(env, 1, lambda cue, end: {**mixed(cue, end), "reach": np.array([-0.5 * cue], np.float32)})
    assert rewards[-1] == pytest.approx(0.0)
    assert info["is_success"] == 1.0
    env.reset(seed=0)
    with pytest.raises(ValueError, match="illegal at place 0 of 4"):
        env.step({"turn": LEFT, "reach": np.zeros(1, np.float32)})


def test_the_velocities_of_the_pole_are_hidden() -> None:
    partial, whole = PartialCartPole(), gym.make("CartPole-v1")
    assert partial.observation_space.shape == (2,)
    np.testing.assert_array_equal(partial.reset(seed=3)[0], whole.reset(seed=3)[0][[0, 2]])
    np.testing.assert_array_equal(partial.step(1)[0], whole.step(1)[0][[0, 2]])


@pytest.mark.parametrize("name", ["MemoryCorridor", "MixedMemoryCorridor", "PartialCartPole"])
def test_they_are_sound_and_have_ids(name: str) -> None:
    report = check_env(f"inchworm.worlds.toys:{name}")
    assert report.ok, str(report)


def test_what_they_cannot_be_made_of() -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        MemoryCorridor(0)
    with pytest.raises(ValueError, match="Box of rank 1"):
        HideEntries(gym.make("FrozenLake-v1"), (0,))
