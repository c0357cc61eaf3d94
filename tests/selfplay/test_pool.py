"""Win rates, the draw by them, the pool and the skill ladder: who is drawn how often, who is retired, and that all of it is restored."""

import numpy as np
import pytest

from doubles.teams import SPEC, Always, Teams
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.collect.opponents import OpponentSource, OpponentVectorEnv, team_lanes
from inchworm.core.errors import ConfigError
from inchworm.core.protocols import Stateful
from inchworm.run.checkpoint import TrainingCheckpointer
from inchworm.selfplay.pool import OpponentPool, Score, SkillLadder, draw_index, pfsp_weights
from inchworm.selfplay.ratings import Rating


def test_a_win_rate_begins_at_one_half_and_is_smoothed():
    score = Score()
    assert score.win_rate == 0.5
    score.add(1.0)
    assert score.win_rate == pytest.approx(2 / 3)  # (1 + 1) / (1 + 2)
    score.add(0.5)
    # the first counts 0.99 now: (0.99 + 0.5 + 1) / (0.99 + 1 + 2)
    assert score.win_rate == pytest.approx(2.49 / 3.99)


def test_old_games_lose_weight():
    score = Score()
    for _ in range(2000):
        score.add(0.0)
    for _ in range(100):
        score.add(1.0)
    # 100 games of weight (1 - 0.99^100) / 0.01 = 63.4 of 100
    assert score.games == pytest.approx(100, abs=1e-3)
    assert score.wins == pytest.approx((1 - 0.99**100) / 0.01)


def test_pfsp_weights_by_hand():
    # (0.5, 0.25, 0) squared is (0.25, 0.0625, 0), whose sum is 0.3125
    assert pfsp_weights([0.5, 0.75, 1.0], 2.0) == pytest.approx([0.8, 0.2, 0.0])
    assert pfsp_weights([0.5, 0.75, 1.0], 1.0) == pytest.approx([2 / 3, 1 / 3, 0.0])
    assert pfsp_weights([0.5, 0.9], 0.0) == pytest.approx([0.5, 0.5])
    assert pfsp_weights([1.0, 1.0, 1.0, 1.0], 2.0) == pytest.approx([0.25] * 4)


def test_the_draw_has_these_probabilities():
    rng, drawn = np.random.default_rng(0), np.zeros(3)
    for _ in range(4000):
        drawn[draw_index(np.array([0.7, 0.0, 0.3]), rng)] += 1
    # 2800 expected, standard deviation sqrt(4000 * 0.7 * 0.3) = 29
    assert drawn[1] == 0
    assert abs(drawn[0] - 2800) < 5 * 29
    assert draw_index(np.array([0.5, 0.5 - 1e-12]), _Top()) == 1  # rounding never leads past the end


class _Top:
    def random(self):
        return 1.0 - 1e-16


def pool_of(selves=3, **options):
    """A pool with past selves 0, 1, 2, …, of different weights."""
    policy = NumpyPolicy(SPEC, seed=0)
    pool = OpponentPool(**options)
    pool.bind(policy)
    for iteration in range(1, selves):
        policy.set_weights(NumpyPolicy(SPEC, seed=iteration).get_weights())
        pool.add_self(iteration)
    return pool, policy


def shares(pool, draws=4000):
    rng = np.random.default_rng(1)
    names = [pool.draw(0, rng) for _ in range(draws)]
    return {name: names.count(name) / draws for name in dict.fromkeys(names)}


def test_the_first_past_self_is_the_policy_as_it_begins():
    pool, _ = pool_of(1)
    assert isinstance(pool, OpponentSource)
    assert isinstance(pool, Stateful)
    assert list(pool.selves) == ["self-0"]
    assert shares(pool, 10) == {"self-0": 1.0}


def test_shares_of_newest_anchors_and_the_rest():
    pool, _ = pool_of(3, fixed={"a": Always(1), "b": Always(2)}, latest_share=0.4, anchor_share=0.2, power=1.0)
    for _ in range(8):
        pool.record("self-0", 1.0)  # beaten
        pool.record("b", 1.0)
    beaten = pool.selves["self-0"].score.win_rate
    # newest 0.4; anchors 0.2, by what is lost: 0.5 to 1 - beaten; the rest 0.4 over the three past selves likewise
    lost = 1 - beaten
    rest = 0.4 / (lost + 1.0)
    expected = {"self-2": 0.4 + 0.5 * rest, "self-1": 0.5 * rest, "self-0": lost * rest}
    expected |= {"a": 0.2 * 0.5 / (0.5 + lost), "b": 0.2 * lost / (0.5 + lost)}
    found = shares(pool)
    assert found.keys() == expected.keys()
    for name, share in expected.items():
        assert found[name] == pytest.approx(share, abs=5 * np.sqrt(share / 4000))


def test_without_past_selves_all_games_are_against_fixed_players():
    pool = OpponentPool({"a": Always(1), "b": Always(2)}, keep_selves=False)
    assert set(shares(pool, 50)) == {"a", "b"}
    assert pool.actor("a").action == 1
    assert pool.metrics() == {}
    with pytest.raises(ConfigError, match="needs a fixed player"):
        OpponentPool(keep_selves=False)
    with pytest.raises(ConfigError, match="call bind"):
        OpponentPool().add_self(0)
    with pytest.raises(ConfigError, match="is empty"):
        OpponentPool().draw(0, np.random.default_rng(0))


def test_the_easiest_is_retired_and_never_the_newest():
    pool, policy = pool_of(3, size=3)
    pool.record("self-1", 1.0)
    pool.record("self-0", 0.0)
    pool.add_self(3)
    assert list(pool.selves) == ["self-0", "self-2", "self-3"]
    for _ in range(9):
        pool.record("self-3", 1.0)
    pool.add_self(4)  # now self-3 is the easiest, and no longer the newest
    assert list(pool.selves) == ["self-0", "self-2", "self-4"]
    pool.add_self(5)  # self-2 and self-4 are alike: the older is retired
    assert list(pool.selves) == ["self-0", "self-4", "self-5"]
    assert policy is not pool.actor("self-5")
    for name, losses in (("self-0", 5), ("self-4", 3), ("self-5", 1)):
        for _ in range(losses):
            pool.record(name, 0.0)
    pool.add_self(6)  # it has lost no game yet, so it is the easiest; but it is the newest
    assert list(pool.selves) == ["self-0", "self-4", "self-6"]


def test_a_past_self_keeps_its_weights_and_stays_while_it_plays():
    pool, policy = pool_of(1, size=1, latest_share=1.0)
    before = {name: value.copy() for name, value in policy.get_weights().items()}
    assert pool.draw(7, np.random.default_rng(0)) == "self-0"
    policy.set_weights(NumpyPolicy(SPEC, seed=5).get_weights())
    pool.add_self(1)
    old = pool.actor("self-0").get_weights()
    assert all(np.array_equal(old[name], before[name]) for name in before)
    assert pool.selves["self-0"].retired
    assert pool.draw(7, np.random.default_rng(0)) == "self-1"  # its last episode is over
    assert list(pool.selves) == ["self-1"]
    with pytest.raises(ConfigError, match="no self-0 in the pool"):
        pool.actor("self-0")


def test_metrics_name_every_opponent_with_a_game():
    pool, _ = pool_of(2, fixed={"a": Always(1)})
    pool.record("a", 1.0)
    pool.record("self-1", 0.0)
    assert pool.metrics() == {"win_rate/a": pytest.approx(2 / 3), "win_rate/self-1": pytest.approx(1 / 3), "pool_size": 2.0}


def test_a_pool_is_restored_from_a_checkpoint(tmp_path):
    def make():
        pool = OpponentPool({"a": Always(1)}, size=2, anchor_share=0.3)
        policy = NumpyPolicy(SPEC, seed=0)
        pool.bind(policy)
        return OpponentVectorEnv(Teams(4, 4), pool, team_lanes(4, 4, [0, 1, 0, 1]), seed=2), pool, policy

    def play(env, steps):
        return [(env.step(np.full(8, 2)).rewards.copy(), env.inner.got.copy(), env.playing) for _ in range(steps)]

    env, pool, policy = make()
    env.reset()
    for iteration in range(1, 5):
        play(env, 4)
        policy.set_weights(NumpyPolicy(SPEC, seed=iteration).get_weights())
        pool.add_self(iteration, Rating(20.0 + iteration, 2.0))
    assert any(one.retired for one in pool.selves.values())  # one that only finishes its episode
    TrainingCheckpointer(tmp_path).save(1, env.state_dict())
    other, again, _ = make()
    other.load_state_dict(TrainingCheckpointer(tmp_path).load().state)
    other.reset(indices=())
    assert again.selves["self-4"].rating == Rating(24.0, 2.0)
    for one, two in zip(play(env, 30), play(other, 30), strict=True):
        assert np.array_equal(one[1], two[1])
        assert one[2] == two[2]
    assert pool.metrics() == again.metrics()


def test_other_fixed_players_are_refused():
    state = OpponentPool({"a": Always(1)}, keep_selves=False).state_dict()
    with pytest.raises(ConfigError, match="has the fixed players a, but this one b"):
        OpponentPool({"b": Always(1)}, keep_selves=False).load_state_dict(state)


def climb(ladder, wins):
    for win in wins:
        ladder.record(ladder.name, win)


def test_twenty_games_that_are_mostly_won_raise_the_skill_by_a_tenth():
    ladder = SkillLadder(Always, start=0.75, top=0.9, threshold=0.6)
    assert isinstance(ladder, OpponentSource)
    assert isinstance(ladder, Stateful)
    climb(ladder, [1.0] * 19)
    assert ladder.skill == 0.75
    climb(ladder, [1.0])
    assert ladder.skill == 0.85
    assert ladder.metrics() == {"opponent/skill": 0.85, "opponent/win_rate": 0.5}  # counted anew
    for _ in range(30):
        ladder.record("heuristic:0.75", 1.0)  # episodes that began before
    assert ladder.skill == 0.85
    climb(ladder, [0.5] * 200)
    assert ladder.skill == 0.85  # a half is less than 0.6
    climb(ladder, [1.0] * 500)
    assert ladder.skill == 0.9  # never above the top
    assert ladder.draw(0, None) == "heuristic:0.9"


def test_actors_are_made_by_the_skill_in_their_name():
    ladder = SkillLadder(Always, start=0.3)
    assert ladder.actor("heuristic:0.3").action == 0.3
    assert ladder.actor("heuristic:0.3") is ladder.actor("heuristic:0.3")
    with pytest.raises(ConfigError, match="against self-3, but the opponent here is a heuristic"):
        ladder.actor("self-3")


def test_a_ladder_is_restored():
    one, other = SkillLadder(Always, start=0.1), SkillLadder(Always, start=0.1)
    climb(one, [1.0] * 35)
    other.load_state_dict(one.state_dict())
    for _ in range(40):
        climb(one, [1.0])
        climb(other, [1.0])
        assert one.state_dict() == other.state_dict()
    assert one.skill == pytest.approx(0.4)  # 75 wins are three times 20
