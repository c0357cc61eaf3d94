"""Win rates, the draw by them, the pool and the skill ladder: who is drawn how often, who is retired, and that all of it is restored."""

import numpy as np
import pytest

from doubles.teams import SPEC, Always, Counter, Teams
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.collect.opponents import OpponentSource, OpponentVectorEnv, team_lanes
from inchworm.core.errors import ConfigError, EnvError
from inchworm.core.protocols import Stateful
from inchworm.run.checkpoint import TrainingCheckpointer
from inchworm.selfplay.callback import RatingGames
from inchworm.selfplay.opponent_pool import (
    OpponentPool,
    Rating,
    RatingBook,
    RatingEntry,
    Score,
    SkillLadder,
    calibrate,
    draw_index,
    pfsp_weights,
    rate,
)


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


FIXED = {"weak": Rating(15.0, 1.5), "strong": Rating(35.0, 1.5)}


def test_winning_raises_losing_lowers_and_games_make_it_surer():
    won, lost, drawn = (rate([("weak", win)], FIXED) for win in (1.0, 0.0, 0.5))
    assert won.mu > 25.0 > lost.mu
    assert won.mu > drawn.mu > lost.mu
    sigmas = [rate([("weak", 1.0), ("strong", 0.0)] * games, FIXED).sigma for games in (0, 1, 3, 10)]
    assert sigmas[0] == 25 / 3
    assert sigmas == sorted(sigmas, reverse=True)
    assert rate([("strong", 1.0)], FIXED).mu > won.mu  # a stronger one is worth more
    middle = rate([("weak", 1.0), ("strong", 0.0)] * 10, FIXED)
    assert 15 < middle.mu < 35
    assert middle.interval95 == (middle.mu - 2 * middle.sigma, middle.mu + 2 * middle.sigma)
    assert {"weak": Rating(15.0, 1.5), "strong": Rating(35.0, 1.5)} == FIXED
    assert rate([], FIXED, start=Rating(3.0, 1.0)) == Rating(3.0, 1.0)


def test_fixed_players_are_put_in_order_by_games_among_themselves():
    ratings = calibrate(["a", "b", "c"], [("a", "b", 0.0), ("a", "c", 0.0), ("b", "c", 0.0)] * 10)
    assert ratings["a"].mu < ratings["b"].mu < ratings["c"].mu
    assert calibrate(["alone"], []) == {"alone": Rating()}


def test_a_book_is_restored():
    book = RatingBook({"a": Rating(20.0, 1.0)}, [RatingEntry(4, 100, Rating(26.0, 3.0), {"a": 0.75})])
    other = RatingBook()
    other.load_state_dict(book.state_dict())
    assert other == book


class Watched(Teams):
    """Keeps the seeds of every reset."""

    def reset(self, seeds=None, indices=None):
        self.asked = [*getattr(self, "asked", []), *zip(seeds or (), indices or (), strict=True)]
        return super().reset(seeds, indices)


def test_each_seed_is_played_from_either_side():
    worlds = []
    games = RatingGames(lambda copies: worlds.append(Watched(copies, 4)) or worlds[-1], episodes=5)
    ours = Always(2)
    wins = games.play(ours, Always(1))
    # (copy, agent): the first half of even copies, the second of odd ones
    assert ours.lanes[0][:6] == [[0, 0], [0, 1], [1, 2], [1, 3], [2, 0], [2, 1]]
    assert wins.tolist() == [1.0] * 6  # an odd number is rounded up; 2 is more than 1 on either side
    seeds = [seed for seed, _ in worlds[0].asked]
    assert seeds[0::2] == seeds[1::2]  # copies 0 and 1, 2 and 3, …: the same seed, and sides 0 and 1
    assert len(set(seeds)) == 3
    assert games.play(Always(2), Always(3)).tolist() == [0.0] * 6
    assert games.play(Always(2), Always(2)).tolist() == [0.5] * 6
    games.close()
    games.close()
    assert worlds[0].closed == 1


def test_a_rating_is_the_same_each_time():
    games = RatingGames(lambda copies: Teams(copies, 4), episodes=6, deterministic=False)
    fixed = {"one": Always(1), "counter": Counter(), "two": Always(2)}
    anchors = games.calibrate(fixed)
    assert anchors == games.calibrate(fixed)
    assert anchors["one"].mu < anchors["two"].mu
    weak, weak_rates = games.rate(Always(0), fixed, anchors)
    strong, strong_rates = games.rate(Always(3), fixed, anchors)
    assert weak_rates == {"one": 0.0, "counter": 0.0, "two": 0.0}
    assert strong_rates == {"one": 1.0, "counter": 1.0, "two": 1.0}
    assert weak.interval95[1] < strong.interval95[0]
    assert games.rate(Counter(), fixed, anchors) == games.rate(Counter(), fixed, anchors)


def test_worlds_that_cannot_rate_say_so():
    class Silent(Teams):
        def recv(self):
            step = super().recv()
            for ended in step.ended:
                del ended.info["win"]
            return step

    with pytest.raises(EnvError, match="ratings need info"):
        RatingGames(lambda copies: Silent(copies, 4), episodes=2).play(Always(1), Always(1))
    with pytest.raises(ConfigError, match="two teams need an even number of lanes"):
        RatingGames(lambda copies: Teams(copies, 1), episodes=2).play(Always(1), Always(1))
    with pytest.raises(ConfigError, match="needs a fixed player"):
        RatingGames(lambda copies: Teams(copies, 4)).rate(Always(1), {}, {})


def test_a_game_that_fails_leaves_no_half_stepped_world():
    made = []

    class Broken(Always):
        def act(self, *args, **kwargs):
            raise RuntimeError("broken")

    games = RatingGames(lambda copies: made.append(Teams(copies, 4)) or made[-1], episodes=2)
    with pytest.raises(RuntimeError):
        games.play(Broken(1), Always(1))
    assert made[0].closed == 1
    assert np.all(games.play(Always(2), Always(1)) == 1.0)
    assert len(made) == 2


def test_a_rating_finds_the_strength_that_the_games_were_drawn_with():
    """Bradley-Terry: a win has the probability 1 / (1 + exp(-(mu - other) / (sqrt 2 * 25/6))). Sixty games, thirty times."""
    anchors = {"low": Rating(5.0, 3.0), "middle": Rating(25.0, 3.0), "high": Rating(45.0, 3.0)}
    rng = np.random.default_rng(0)
    for true in (15.0, 38.0):
        chance = {name: 1 / (1 + np.exp(-(true - other.mu) / (np.sqrt(2) * 25 / 6))) for name, other in anchors.items()}
        found = [rate([(name, float(rng.random() < chance[name])) for _ in range(20) for name in anchors], anchors) for _ in range(30)]
        spread = float(np.std([rating.mu for rating in found]))
        assert abs(np.mean([rating.mu for rating in found]) - true) < 2.0
        assert spread < found[0].sigma < 2 * spread  # honest, on the careful side
