"""Training from rollouts that were kept: in files, or in a store of recent ones; and comparing two ways to collect them."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from inchworm.backends.learner import check_rollout
from inchworm.core.errors import BadNumberError, ConfigError, RolloutError, SpaceError
from inchworm.core.protocols import BaseCallback, Policy
from inchworm.core.seeding import make_stream, restore_stream, stream_state
from inchworm.core.types import EpisodeRecord, UpdateStats
from inchworm.evaluate.stats import mean_interval95
from inchworm.rollout.files import numbered_paths, rollout_paths
from inchworm.rollout.rollout import FIELDS, Rollout, combine_rollouts
from inchworm.train.loop import TrainingState

if TYPE_CHECKING:
    from inchworm.train.trainer import PPOTrainer


def save_rollouts(trainer: PPOTrainer, n_rollouts: int, directory: str | Path, *, n_steps: int | None = None) -> list[Path]:
    """Collect rollouts with the trainer's policy, without learning, and write each to a file of a directory; return the files in order."""
    return [trainer.collect_rollouts(n_steps).save(path) for path in numbered_paths(directory, n_rollouts)]


def train_from_saved_rollouts(
    trainer: PPOTrainer,
    files: str | Path | Sequence[str | Path],
    epochs: int = 1,
    *,
    on_update: Callable[[Path, UpdateStats], object] | None = None,
) -> list[UpdateStats]:
    """Learn from files and directories of rollouts in order, `epochs` times, one update for each; nothing is collected.

    All are read and checked before the first update. Rollouts of older weights are guarded and corrected as `ppo.max_staleness`,
    `ppo.min_effective_sample_size`, `ppo.max_behavior_kl`, `ppo.correction` and `ppo.proximal_decay` say. `on_update` is called with the
    file and the metrics of each update, which are also returned.
    """
    if epochs < 1:
        raise ConfigError(f"epochs={epochs} must be 1 or more")
    paths, stats = rollout_paths(files), list[UpdateStats]()
    for path in paths:  # a damaged last file must not leave half the work done
        load_for(trainer.policy, path)
    for _ in range(epochs):
        for path in paths:
            try:
                stats.append(trainer.learn(Rollout.load(path, mapped=True)))
            except (BadNumberError, RolloutError, SpaceError) as error:
                raise type(error)(f"{path} does not fit the policy or the settings: {error}") from error
            if on_update is not None:
                on_update(path, stats[-1])
    return stats


def load_for(policy: Policy | None, path: Path) -> Rollout:
    """Read a rollout, mapped, and check that it fits a policy; with None only its numbers."""
    rollout = Rollout.load(path, mapped=True)
    try:
        check_rollout(getattr(policy, "spec", None), rollout)
    except (BadNumberError, RolloutError, SpaceError) as error:
        raise type(error)(f"{path} does not fit the policy: {error}") from error
    return rollout


class RolloutStore(BaseCallback):
    """The most recent rollouts, at most `capacity` of them, to learn from again: experience replay.

    As a callback of a training it adds `draws` of them to every new rollout, drawn at random without repetition, only such as were
    collected within `max_staleness` updates before it; the store is saved with the run's checkpoints. It can also be filled and drawn from
    by hand, with `add` and `sample`. The guards and corrections of `PPOConfig` for old rollouts apply to what is learned from.
    """

    def __init__(self, capacity: int, *, draws: int = 1, max_staleness: int | None = None, seed: int = 0) -> None:
        if capacity < 1 or draws < 0:
            raise ConfigError(f"a RolloutStore needs capacity >= 1 and draws >= 0, not capacity={capacity}, draws={draws}")
        if max_staleness is not None and max_staleness < 0:
            raise ConfigError(f"a RolloutStore with max_staleness={max_staleness} would never draw; use 0 or more, or None")
        self.capacity, self.draws, self.max_staleness = capacity, draws, max_staleness
        self.rollouts: deque[Rollout] = deque(maxlen=capacity)
        """Oldest first."""
        self._stream = make_stream(seed, "replay")

    def __len__(self) -> int:
        """Number of rollouts in the store."""
        return len(self.rollouts)

    def add(self, rollout: Rollout | Mapping[str, Any]) -> None:
        """Keep a rollout, or a mapping that `Rollout.from_dict` reads; the oldest is dropped where the store is full."""
        self.rollouts.append(rollout if isinstance(rollout, Rollout) else Rollout.from_dict(rollout))

    def sample(self, count: int = 1, *, since: int | None = None) -> list[Rollout]:
        """Draw rollouts at random, each at most once: `count`, or as many as there are; with `since` of this policy version or later."""
        if count < 0:
            raise ConfigError(f"{count} rollouts cannot be drawn; use 0 or more")
        found = [one for one in self.rollouts if since is None or one.policy_version.min(initial=2**31 - 1) >= since]
        chosen = self._stream.choice(len(found), min(count, len(found)), replace=False) if found else ()
        return [found[place] for place in sorted(map(int, chosen))]

    def on_rollout(self, state: TrainingState, rollout: Rollout) -> Rollout | None:
        """Add stored rollouts to a new one, and store that."""
        del state
        newest = int(rollout.policy_version.max(initial=0))
        drawn = self.sample(self.draws, since=None if self.max_staleness is None else newest - self.max_staleness)
        self.add(rollout)
        return combine_rollouts([rollout, *drawn]) if drawn else None

    def state_dict(self) -> dict[str, Any]:
        """The rollouts and the random stream, as plain data and arrays."""
        return {"stream": stream_state(self._stream), "rollouts": [_as_data(rollout) for rollout in self.rollouts]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; the newest rollouts, if this store is smaller."""
        self._stream = restore_stream(state["stream"])
        self.rollouts = deque((Rollout.from_dict(data) for data in state["rollouts"]), maxlen=self.capacity)


def _as_data(rollout: Rollout) -> dict[str, Any]:
    """The fields of a rollout as plain data and arrays."""
    names = [field.name for field in dataclasses.fields(EpisodeRecord)]
    episodes = [{name: getattr(episode, name) for name in names} | {"info": dict(episode.info)} for episode in rollout.episodes]
    return {**{name: rollout[name] for name in FIELDS}, "episodes": episodes}


@dataclass(frozen=True)
class CollectionComparison:
    """Two ways to collect, measured with the same seeds."""

    values: np.ndarray
    """[2, seeds] f64: of the first and of the second."""
    difference: float
    """The mean of second less first over the seeds."""
    interval95: tuple[float, float]
    """Its 95 % interval by Student's t over the pairs."""

    @property
    def differs(self) -> bool:
        """Whether the interval excludes 0."""
        return not self.interval95[0] <= 0 <= self.interval95[1]

    def __str__(self) -> str:
        low, high = self.interval95
        first, second = self.values.mean(1)
        verdict = "a difference" if self.differs else "no difference is shown"
        shown = f"{first:.4g} and {second:.4g}: second less first {self.difference:.4g} [{low:.4g}, {high:.4g}]"
        return f"{shown} over {self.values.shape[1]} seeds, {verdict}"


def mean_return(rollout: Rollout) -> float:
    """The mean return of a rollout's finished episodes."""
    if not rollout.episodes:
        raise RolloutError("no episode ended in the rollout, so it has no mean return; collect more steps, or give another measure")
    return float(np.mean([episode.episode_return for episode in rollout.episodes]))


def compare_collection(
    first: Callable[[int], Rollout],
    second: Callable[[int], Rollout],
    *,
    seeds: Iterable[int] = range(10),
    measure: Callable[[Rollout], float] = mean_return,
) -> CollectionComparison:
    """Compare two ways to collect: each is called with every seed and returns a rollout, of which `measure` makes a number.

    Both should act with one policy, and with the seed for environments and actions, so that the pairs share their luck.
    """
    chosen = list(seeds)
    if len(chosen) < 2:
        raise ConfigError(f"an interval needs 2 seeds or more, not {len(chosen)}")
    if len(set(chosen)) < len(chosen):  # the same pair again is no evidence, and would narrow the interval
        raise ConfigError(f"the seeds {chosen!s:.80} repeat; give each once")
    values = np.array([[float(measure(strategy(seed))) for seed in chosen] for strategy in (first, second)])
    if not np.isfinite(values).all():
        strategy, place = np.argwhere(~np.isfinite(values))[0]
        name = ("first", "second")[strategy]
        raise BadNumberError(
            f"the measure of the {name} strategy with seed {chosen[place]} is {values[strategy, place]}, so nothing can be said"
        )
    differences = values[1] - values[0]
    return CollectionComparison(values, float(differences.mean()), mean_interval95(differences))
