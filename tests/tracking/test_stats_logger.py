from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from inchworm.tracking.console import StatsLogger


class Recorder:
    def __init__(self, calls: list[Any], name: str, *, broken: bool = False) -> None:
        self.calls, self.name, self.broken = calls, name, broken

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.calls.append((self.name, dict(metrics), step))

    def log_params(self, params: Mapping[str, Any]) -> None:
        self.calls.append((self.name, dict(params)))

    def log_artifact(self, path: Path) -> None:
        self.calls.append((self.name, path))

    def close(self) -> None:
        self.calls.append((self.name, "closed"))
        if self.broken:
            raise OSError("disk full")


def test_everything_reaches_every_tracker_in_order() -> None:
    calls: list[Any] = []
    logger = StatsLogger([Recorder(calls, "a"), Recorder(calls, "b")])
    logger.log({"loss": 1.0}, 5)
    logger.log_params({"seed": 0})
    logger.log_artifact(Path("x"))
    logger.close()
    assert calls == [
        ("a", {"loss": 1.0}, 5),
        ("b", {"loss": 1.0}, 5),
        ("a", {"seed": 0}),
        ("b", {"seed": 0}),
        ("a", Path("x")),
        ("b", Path("x")),
        ("a", "closed"),
        ("b", "closed"),
    ]


def test_all_are_closed_even_if_one_cannot_be() -> None:
    calls: list[Any] = []
    logger = StatsLogger([Recorder(calls, "a", broken=True), Recorder(calls, "b")])
    with pytest.raises(OSError, match="disk full"):
        logger.close()
    assert calls == [("a", "closed"), ("b", "closed")]
