"""Step 3 of 9 where several processes learn together: each collects from its own lanes, and all have the counters and episodes of all.

Lanes are numbered over all ranks. The policy's random numbers are drawn for all lanes and each rank uses those of its own, so that any
number of ranks collects the same data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from inchworm.collect.collector import RolloutCollector
from inchworm.core.errors import ConfigError
from inchworm.core.protocols import Actor, VectorEnv
from inchworm.core.seeding import make_stream
from inchworm.core.types import EnvStep, EpisodeRecord
from inchworm.rollout.buffer import RolloutBuffer
from inchworm.rollout.rollout import Rollout, rollout_metrics

_OWN = ("stream", "returns", "lengths", "policy_state", "started", "starts", "vector_env")
"""The parts of a collector's state that each rank has of its own."""


class RankGroup(Protocol):
    """What is asked of the other ranks; `backends/torch/distributed` has it."""

    rank: int
    lanes: np.ndarray

    @property
    def lane_range(self) -> tuple[int, int]:
        """The first of this rank's lanes, and the one after the last."""

    def announce(self, command: str, number: int = 0) -> None:
        """Have the other ranks do the same, if this one leads them."""

    def gather_tree(self, tree: Any) -> list[Any]:
        """Trees of arrays and plain data of every rank, on every rank."""


class LaneStream:
    """A random stream of all lanes, of which one rank uses the rows of its own lanes; built-in policies draw by these two methods."""

    def __init__(self, stream: np.random.Generator, total: int, own: slice) -> None:
        self.bit_generator, self._stream, self._total, self._own = stream.bit_generator, stream, total, own

    def random(self, shape: tuple[int, ...]) -> np.ndarray:
        """Uniform numbers of the own lanes [B, …]."""
        return self._stream.random((self._total, *shape[1:]))[self._own]

    def standard_normal(self, shape: tuple[int, ...], dtype: Any = np.float64) -> np.ndarray:
        """Normal numbers of the own lanes [B, …]."""
        return self._stream.standard_normal((self._total, *shape[1:]), dtype)[self._own]


class RankCollector(RolloutCollector):
    """Collects a rank's part of each rollout. `env_steps`, `episodes` and `recent` are those of all ranks.

    The built-in policies draw from one stream of all lanes, a policy of the user's from a stream of each rank.
    """

    def __init__(self, vector_env: VectorEnv, policy: Actor, ranks: RankGroup, *, seed: int = 0, builtin: bool, **options: Any) -> None:
        super().__init__(vector_env, policy, seed=seed, **options)
        self._ranks, self._shares_stream = ranks, builtin
        self._ended_at: list[int] = []  # the row in which each episode of the running collect ended
        self.rollout_metrics: dict[str, float] = {}
        """Of the last rollout, over the parts of all ranks."""
        self.finished: tuple[EpisodeRecord, ...] = ()
        """The episodes that ended in it, in all lanes."""
        self.loaded: Mapping[str, Any] = {}
        """What was loaded last, for the other ranks."""
        if not builtin:
            self._stream = make_stream(seed, "sampling", ranks.rank)
        self._share_stream()

    def _share_stream(self) -> None:
        if self._shares_stream:
            first, end = self._ranks.lane_range
            shared: Any = LaneStream(self._stream, int(self._ranks.lanes.sum()), slice(first, end))
            self._stream = shared

    def collect(self, num_steps: int) -> Rollout:
        """The next `num_steps` steps of this rank's lanes; the other ranks do the same."""
        self._ranks.announce("collect", num_steps)
        steps, episodes, recent = self.env_steps, self.episodes, self.recent.copy()
        self._ended_at = []
        rollout = super().collect(num_steps)
        first = self._ranks.lane_range[0]
        rows = [[row, e.lane + first, e.episode_return, e.length, e.seed, dict(e.info)] for row, e in zip(self._ended_at, rollout.episodes)]
        weights = {"ended": int((rollout.dones & rollout.valid).sum()), "valid": rollout.num_valid}
        parts = self._ranks.gather_tree({"rows": rows, "metrics": rollout_metrics(rollout), **weights})
        ended = sorted((row for part in parts for row in part["rows"]), key=lambda row: row[:2])  # as in one process
        self.finished = tuple(EpisodeRecord(total, length, lane, seed, info) for _, lane, total, length, seed, info in ended)
        self.env_steps = steps + sum(part["valid"] for part in parts)
        self.episodes = episodes + len(self.finished)
        self.recent = recent
        self.recent.extend(self.finished)
        self.rollout_metrics = merged_metrics(parts)
        return rollout

    def _end_episodes(self, step: EnvStep, buffer: RolloutBuffer) -> list[EpisodeRecord]:
        records = super()._end_episodes(step, buffer)
        self._ended_at += [len(buffer)] * len(records)
        return records

    def state_dict(self) -> dict[str, Any]:
        """The state of every rank's lanes, and the common counters."""
        self._ranks.announce("state")
        state = super().state_dict()
        parts = self._ranks.gather_tree({name: state.pop(name) for name in _OWN})
        return {**state, "ranks": parts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned on the same number of ranks."""
        saved = len(state.get("ranks", (state,)))
        if saved != len(self._ranks.lanes):
            raise ConfigError(
                f"the checkpoint is of {saved} process{'es' if saved > 1 else ''} and now there are {len(self._ranks.lanes)}; resume with "
                f"torchrun --nproc-per-node {saved}, or start a new run from its policy (run.init_from)"
            )
        common = {name: value for name, value in state.items() if name != "ranks"}
        super().load_state_dict({**common, **state["ranks"][self._ranks.rank]})
        self.loaded = state
        self._share_stream()


def merged_metrics(parts: list[dict[str, Any]]) -> dict[str, float]:
    """The metrics of a rollout from those of its parts: means, weighted by what each counts."""
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part["metrics"]):
        having = [part for part in parts if name in part["metrics"]]
        weights = np.array([part["ended" if name == "truncated_share" else "valid"] for part in having], np.float64)
        values = np.array([part["metrics"][name] for part in having])
        if name == "observation_scale":  # a root mean square
            merged[name] = float(np.sqrt(np.average(np.square(values), weights=weights)))
        else:
            merged[name] = float(np.average(values, weights=weights))
    return merged
