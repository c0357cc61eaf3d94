from pathlib import Path
from unittest.mock import Mock, call

import pytest

from inchworm.tracking.metrics import GROUPS, METRICS, StatsLogger, grouped_name


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


def test_the_table_names_every_metric_once() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    assert {metric.group for metric in METRICS} == set(GROUPS)
    assert len({grouped_name(name) for name in names}) == len(names)


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
