"""The ratings page: the curve, the band, the fixed players, and a table."""

import xml.etree.ElementTree as ElementTree

import pytest

from inchworm.selfplay.ratings import Rating, RatingBook, RatingEntry
from inchworm.selfplay.report import ratings_page, ratings_svg

BOOK = RatingBook({"a<b": Rating(22.0, 1.0)}, [RatingEntry(i, 1000 * i, Rating(20.0 + i, 2.0), {"a<b": 0.5 + 0.1 * i}) for i in range(4)])


def test_the_report_shows_the_curve_the_band_and_the_fixed_players():
    svg = ElementTree.fromstring(ratings_svg(BOOK))
    (curve,), (band,) = svg.findall("polyline"), svg.findall("polygon")
    points = [tuple(map(float, point.split(","))) for point in curve.get("points").split()]
    assert len(points) == 4
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert [y for _, y in points] == sorted((y for _, y in points), reverse=True)  # up the page
    assert len(band.get("points").split()) == 8
    # the scale runs from 16 - 1 to 27 + 1 over 345 pixels from y = 30: the fixed player at 22 is at 30 + 345 * 6 / 13
    dashed = [line for line in svg.findall("line") if line.get("stroke-dasharray")]
    assert float(dashed[0].get("y1")) == pytest.approx(30 + 345 * 6 / 13, abs=0.1)
    texts = [(text.text, float(text.get("y"))) for text in svg.findall("text")]
    ratings, steps = ["16", "18", "20", "22", "24", "26", "28"], ["0", "500", "1,000", "1,500", "2,000", "2,500", "3,000"]
    assert [text for text, _ in texts] == ["rating", *ratings, *steps, "env steps", "the policy 23.0", "a<b 22.0"]
    assert texts[-1][1] - texts[-2][1] == pytest.approx(345 / 13, abs=0.1)  # a rating of 1 apart: room enough


def test_names_of_equal_players_do_not_overlap():
    book = RatingBook({"one": Rating(20.0, 1.0), "two": Rating(20.0, 1.0)}, [RatingEntry(0, 0, Rating(20.0, 2.0), {})])
    texts = ElementTree.fromstring(ratings_svg(book)).findall("text")[-3:]
    assert [text.text for text in texts] == ["one 20.0", "two 20.0", "the policy 20.0"]
    places = [float(text.get("y")) for text in texts]
    assert places[1] - places[0] == places[2] - places[1] == 15.0


def test_the_page_escapes_names_and_loads_nothing():
    page = ratings_page(BOOK)
    assert "a&lt;b" in page
    assert "a<b" not in page
    assert "80%" in page
    assert "http" not in page
