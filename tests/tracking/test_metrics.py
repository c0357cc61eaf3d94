import re
from pathlib import Path
from unittest.mock import Mock, call

import pytest

from inchworm.tracking.metrics import GROUPS, StatsLogger, grouped_name

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_everything_reaches_every_tracker_in_order() -> None:
    trackers = Mock()
    logger = StatsLogger([trackers.a, trackers.b])
    logger.log({"loss": 1.0}, 5)
    logger.log_params({"seed": 0})
    logger.log_artifact(Path("x"))
    logger.close()
    each = ("log", {"loss": 1.0}, 5), ("log_params", {"seed": 0}), ("log_artifact", Path("x")), ("close",)
    assert trackers.mock_calls == [getattr(getattr(call, name), method)(*given) for method, *given in each for name in "ab"]


def test_all_are_closed_even_if_one_cannot_be() -> None:
    trackers = Mock()
    trackers.a.close.side_effect = OSError("disk full")
    with pytest.raises(OSError, match="disk full"):
        StatsLogger([trackers.a, trackers.b]).close()
    trackers.b.close.assert_called_once_with()


@pytest.mark.parametrize(
    ("name", "expect"),
    [
        ("policy_loss", "loss/policy_loss"),
        ("loss/curiosity", "loss/curiosity"),
        ("approx_kl", "update/approx_kl"),
        ("grad_norm/curiosity", "update/grad_norm/curiosity"),
        ("mean_return", "episode/mean_return"),
        ("episode/win", "episode/win"),
        ("win_rate/self-20", "opponent/win_rate/self-20"),
        ("evaluation/mean_return", "evaluation/mean_return"),
        ("evaluation/info/speed", "evaluation/info/speed"),
        ("timing/seconds", "time/seconds"),
        ("system/memory_mb", "system/memory_mb"),
        ("red/approx_kl", "update/red/approx_kl"),  # of the policy red
        ("mine", "other/mine"),
        ("my/own", "my/own"),
    ],
)
def test_every_metric_has_a_group(name: str, expect: str) -> None:
    assert grouped_name(name) == expect


def test_the_sections_of_the_page_are_the_groups() -> None:
    """That the page has every metric that is logged, and no other, is tested in test_docs."""
    _, *sections = re.split(r"^## (\w+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    listed: dict[str, list[str]] = {
        title.lower(): [name for row in re.findall(r"^\| (`.*?) \| ", text, re.MULTILINE) for name in re.findall("`([^`]+)`", row)]
        for title, text in zip(sections[::2], sections[1::2])
    }
    assert list(listed) == list(GROUPS)
    for group, names in listed.items():
        found = [grouped_name(re.sub(r"<\w+>", "x", name)) for name in names if name != "<part>/<metric>"]
        assert {name.partition("/")[0] for name in found} == {group}
        assert set(GROUPS[group]) <= {name.partition("/<")[0] for name in names}


def test_an_iteration_becomes_groups_with_what_the_process_uses() -> None:
    logger = StatsLogger()
    metrics = logger.process({"mine": 3.0, "loss": 1.0, "timing/seconds": 2.0})
    assert metrics["loss"] == 1.0
    assert metrics["system/memory_mb"] > 1  # a Python process has more
    sum(range(10**6))  # takes processor time
    assert 0 < logger.process({})["system/cpu_share"] < 100
    groups = logger.groups(metrics)
    assert list(groups) == ["loss", "time", "system", "other"]
    assert groups["loss"] == {"loss": 1.0}
    assert groups["time"] == {"seconds": 2.0}
    assert groups["other"] == {"mine": 3.0}
