"""A tracker that only records what it is given."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Recorder:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.params: list[Mapping[str, Any]] = []
        self.closed = 0

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.rows.append((step, dict(metrics)))

    def log_params(self, params: Mapping[str, Any]) -> None:
        self.params.append(params)

    def log_artifact(self, path: Path) -> None: ...

    def close(self) -> None:
        self.closed += 1
