"""Ratings: who wins rises, more games say more, fixed players stand still, and games are played in pairs."""

import numpy as np
import pytest

from doubles.teams import Always, Counter, Teams
from inchworm.core.errors import ConfigError, EnvError
from inchworm.selfplay.callback import RatingGames
from inchworm.selfplay.ratings import Rating, RatingBook, RatingEntry, calibrate, rate

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
