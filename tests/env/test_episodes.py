"""Tests of env/episodes.py: the log of actions keeps what running episodes need, and no more."""

import numpy as np

from inchworm.env.episodes import ActionLog, RunningReturns


def test_the_log_keeps_what_the_oldest_episode_needs():
    actions = np.zeros(2, int)
    starts = np.array([0, 0])
    log = ActionLog(actions, starts, limit=1000)
    for step in range(300):
        actions[:] = step, -step
        log.append()
        if step == 249:
            starts[:] = 250, 10
    assert log.now == 300
    assert log.since(250, slice(0, 1))[0].tolist() == list(range(250, 300))
    assert log.since(10, slice(1, 2))[0].tolist() == [-step for step in range(10, 300)]
    starts[:] = 299
    for step in range(300, 2000):
        starts[:] = step
        log.append()
    assert len(log._buffers[0]) <= 1200  # it does not grow with the run
    for step in range(2000, 9000):
        starts[:] = step
        log.append()
    assert len(log._buffers[0]) == 64  # and shrinks again


def test_the_log_is_bounded_by_its_limit():
    actions = np.zeros(1, int)
    log = ActionLog(actions, np.array([0]), limit=50)
    for step in range(5000):
        actions[0] = step
        log.append()
    assert len(log._buffers[0]) <= 200
    assert log.since(4950, slice(0, 1))[0].tolist() == list(range(4950, 5000))


def test_a_copy_of_several_lanes_keeps_their_joint_actions():
    actions = np.zeros((4, 2), np.float32)  # 2 copies of 2 lanes
    log = ActionLog(actions, np.array([0, 1]), limit=9)
    for step in range(3):
        actions[:] = np.arange(8).reshape(4, 2) + 10 * step
        log.append()
    (kept,) = log.since(1, slice(2, 4))
    assert kept.shape == (2, 2, 2)
    assert kept[0].tolist() == [[14, 15], [16, 17]]
    (whole,) = log.since(0, slice(0, 2))
    other = ActionLog(actions, np.array([0, 1]), limit=9)
    starts = other.preload([[whole], [kept]], 2)
    assert starts.tolist() == [0, 1]
    assert np.array_equal(other.since(1, slice(2, 4))[0], kept)
    assert np.array_equal(other.since(0, slice(0, 2))[0], whole)


def test_returns_have_the_bits_of_one_addition_after_another():
    rng = np.random.default_rng(0)
    rewards = np.zeros(3, np.float32)
    running = RunningReturns(rewards, 3)
    expected = [0.0, 0.0, 0.0]
    for step in range(500):
        rewards[:] = rng.normal(size=3) * 10.0 ** rng.integers(-3, 4, 3)
        running.append()
        expected = [total + float(reward) for total, reward in zip(expected, rewards)]
        if step in (10, 64, 200):
            running.clear(1)  # an episode ends in copy 1 and its next one begins
            expected[1] = 0.0
        if step in (63, 100, 101, 499):
            assert running.sums().tolist() == expected


def test_returns_of_a_copy_are_the_sums_of_its_lanes():
    rewards = np.array([1, 2, 30, 40], np.float32)
    running = RunningReturns(rewards, 2)
    running.append(), running.append()
    assert running.sums().tolist() == [6.0, 140.0]
