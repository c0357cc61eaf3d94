"""When a policy is rated and joins its past selves, what is written, and that a broken rating does not end a run."""

import json
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest

from doubles.teams import SPEC, Always, Teams
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.core.protocols import Policy
from inchworm.selfplay.callback import LadderCallback, SelfPlayCallback
from inchworm.selfplay.pool import OpponentPool
from inchworm.selfplay.ratings import Rating, RatingBook, RatingEntry, RatingGames
from inchworm.selfplay.report import ratings_page, ratings_svg


def at(iteration):
    return SimpleNamespace(iteration=iteration, env_steps=100 * iteration, metrics={}, failures=[])


def made(tmp_path, games=None, **options):
    policy = NumpyPolicy(SPEC, seed=0)
    assert isinstance(policy, Policy)
    pool = OpponentPool({"weak<1>": Always(0), "strong": Always(3)}, size=3)
    pool.bind(policy)
    games = games or RatingGames(lambda copies: Teams(copies, 4), episodes=4)
    players = iter([Always(1), *[Always(2)] * 50])
    return pool, SelfPlayCallback(pool, lambda: next(players), games=games, directory=tmp_path, **options)


def test_the_schedule(tmp_path):
    pool, callback = made(tmp_path, snapshot_interval=3, rating_interval=2)
    callback.on_train_start(at(0))
    assert set(pool.book.anchors) == {"weak<1>", "strong"}
    before = dict(pool.book.anchors)
    assert [entry.iteration for entry in pool.book.history] == [0]
    rated = {}
    for iteration in range(1, 8):
        state = at(iteration)
        callback.on_rollout(state, None)
        callback.on_iteration(state, state.metrics)
        rated[iteration] = "rating" in state.metrics
        assert state.metrics["pool_size"] == 1 + iteration // 3
    assert [iteration for iteration, was in rated.items() if was] == [2, 4, 6]
    assert list(pool.selves) == ["self-0", "self-3", "self-6"]
    assert pool.selves["self-3"].rating is None
    assert pool.selves["self-6"].rating == pool.book.history[-1].rating  # rated in the iteration that it joined in
    assert pool.book.anchors == before
    callback.on_train_start(at(7))  # a run that goes on rates its fixed players no more
    assert pool.book.anchors == before
    assert len(pool.book.history) == 4


def test_ratings_are_written_as_they_come(tmp_path):
    pool, callback = made(tmp_path, rating_interval=1)
    callback.on_train_start(at(0))
    state = at(1)
    callback.on_iteration(state, state.metrics)
    saved = json.loads((tmp_path / "ratings.json").read_text())
    assert saved["history"][1]["rating"] == state.metrics["rating"]
    assert saved["history"][1]["rating_sigma"] == state.metrics["rating_sigma"]
    assert saved["history"][1]["win_rates"] == {"weak<1>": 1.0, "strong": 0.0}
    callback.on_train_end(state)
    assert "strong" in (tmp_path / "ratings.html").read_text()
    assert pool.book.history[1].env_steps == 100


def test_a_disk_that_is_full_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    pool, callback = made(tmp_path / "file" / "below")
    pool.book.history.append(RatingEntry(0, 0, Rating(), {}))
    with pytest.warns(UserWarning, match="ratings could not be written"):
        callback.on_train_end(at(1))


def test_a_broken_rating_is_written_down_and_training_goes_on(tmp_path):
    class Broken(RatingGames):
        def rate(self, *args):
            raise RuntimeError("no")

    _, callback = made(tmp_path, Broken(lambda copies: Teams(copies, 4), episodes=2), rating_interval=1)
    callback.on_train_start(at(0))
    state = at(1)
    callback.on_iteration(state, state.metrics)
    assert state.failures == ["the rating after iteration 1 failed: RuntimeError: no"]
    assert state.metrics["rating_failed"] == 1.0
    assert "rating" not in state.metrics


def test_a_ladders_numbers_join_the_row():
    callback = LadderCallback(lambda: {"opponent/skill": 0.3})
    state = at(1)
    callback.on_train_start(state)
    callback.on_rollout(state, None)
    callback.on_iteration(state, state.metrics)
    callback.on_train_end(state)
    assert state.metrics == {"opponent/skill": 0.3}


def test_the_report_shows_the_curve_the_band_and_the_fixed_players():
    entries = [RatingEntry(i, 1000 * i, Rating(20.0 + i, 2.0), {"a<b": 0.5 + 0.1 * i}) for i in range(4)]
    book = RatingBook({"a<b": Rating(22.0, 1.0)}, entries)
    svg = ElementTree.fromstring(ratings_svg(book))
    (curve,), (band,) = svg.findall("polyline"), svg.findall("polygon")
    points = [tuple(map(float, point.split(","))) for point in curve.get("points").split()]
    assert len(points) == 4
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert [y for _, y in points] == sorted((y for _, y in points), reverse=True)  # up the page
    assert len(band.get("points").split()) == 8
    # the scale runs from 16 - 1 to 27 + 1 over 345 pixels from y = 30: the fixed player at 22 is at 30 + 345 * 6 / 13
    dashed = [line for line in svg.findall("line") if line.get("stroke-dasharray")]
    assert float(dashed[0].get("y1")) == pytest.approx(30 + 345 * 6 / 13, abs=0.1)
    told = [(text.text, float(text.get("y"))) for text in svg.findall("text")]
    ratings, steps = ["16", "18", "20", "22", "24", "26", "28"], ["0", "500", "1,000", "1,500", "2,000", "2,500", "3,000"]
    assert [text for text, _ in told] == ["rating", *ratings, *steps, "env steps", "the policy 23.0", "a<b 22.0"]
    assert told[-1][1] - told[-2][1] == pytest.approx(345 / 13, abs=0.1)  # a rating of 1 apart: room enough


def test_players_of_like_strength_are_named_one_below_the_other():
    book = RatingBook({"one": Rating(20.0, 1.0), "two": Rating(20.0, 1.0)}, [RatingEntry(0, 0, Rating(20.0, 2.0), {})])
    texts = ElementTree.fromstring(ratings_svg(book)).findall("text")[-3:]
    assert [text.text for text in texts] == ["one 20.0", "two 20.0", "the policy 20.0"]
    places = [float(text.get("y")) for text in texts]
    assert places[1] - places[0] == places[2] - places[1] == 15.0


def test_the_page_holds_no_names_as_html_and_loads_nothing():
    entries = [RatingEntry(i, 1000 * i, Rating(20.0 + i, 2.0), {"a<b": 0.5 + 0.1 * i}) for i in range(4)]
    book = RatingBook({"a<b": Rating(22.0, 1.0)}, entries)
    page = ratings_page(book)
    assert "a&lt;b" in page
    assert "a<b" not in page
    assert "80%" in page
    assert "http" not in page
