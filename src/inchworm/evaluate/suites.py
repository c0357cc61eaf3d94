"""Suites: named groups of environments and opponents, and a policy's scores on them.

A suite is data: `{"games": [{"env": "my_game:make_env", "opponent": "random", "episodes": 20}, …], "control": ["CartPole-v1"]}`. The
score of a group is the mean over its simulations, the overall score the mean over the groups.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import yaml

from inchworm.config.reading import FROM_LIST, MAX_LENGTH, ConfigBase, config_class, load_yaml
from inchworm.config.sections import Count, EnvConfig, EvalConfig
from inchworm.core.errors import ConfigError, CorruptFileError, EnvError, SpaceError
from inchworm.core.protocols import Actor
from inchworm.core.seeding import derive_seed
from inchworm.core.tensor_file import read_bytes
from inchworm.env.registry import names_code
from inchworm.evaluate.evaluator import check_made_for, play_match
from inchworm.evaluate.games import Progress, episode_limit, opened, play_games
from inchworm.evaluate.stats import EvalStats

SCORE, OVERALL = "score", "overall"
"""Names of a group's score, which no simulation may have, and of the score of all groups."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SimulationStats:
    """A policy's result in one simulation."""

    stats: EvalStats
    """All episodes."""
    score_range: tuple[float, float] | None = None
    """The returns that score 0 and 1, if the suite defines them."""

    @property
    def measure(self) -> str:
        """What the score measures: `win_rate` if the environment reports it, else `scaled_return` or `mean_return`."""
        if self.stats.win_rate is not None:
            return "win_rate"
        return "mean_return" if self.score_range is None else "scaled_return"

    @property
    def score(self) -> float:
        """The win rate if there is one; else the mean return, scaled if the suite defines a range."""
        if self.stats.win_rate is not None:
            return self.stats.win_rate
        low, high = self.score_range or (0.0, 1.0)
        return self.stats.mean_return if self.score_range is None else (self.stats.mean_return - low) / (high - low)

    @property
    def explanation(self) -> str:
        """What the score measures, and the statistics behind it."""
        details, measure = str(self.stats), self.measure.replace("_", " ")
        return details if details.startswith(measure) else f"{measure}; {details}"


@dataclass(frozen=True, eq=False)
class SuiteStats(Mapping[str, float]):
    """A mapping of scores: `<group>/<simulation>`, `<group>/score` (the mean of its simulations) and `overall` (the mean of the groups).

    Every group counts the same, however many simulations it has.
    """

    groups: Mapping[str, Mapping[str, SimulationStats]]
    """group -> simulation -> result."""

    def group_score(self, group: str) -> float:
        """Return the mean score of a group's simulations."""
        return float(np.mean([simulation.score for simulation in self.groups[group].values()]))

    @property
    def overall(self) -> float:
        """The mean of the groups' scores."""
        return float(np.mean([self.group_score(group) for group in self.groups]))

    @property
    def scores(self) -> dict[str, float]:
        """All scores, in order."""
        found: dict[str, float] = {}
        for group, simulations in self.groups.items():
            found |= {f"{group}/{name}": simulation.score for name, simulation in simulations.items()}
            found[f"{group}/{SCORE}"] = self.group_score(group)
        return {**found, OVERALL: self.overall}

    @property
    def mixed(self) -> bool:
        """Whether unscaled returns are averaged with other scores; the overall score is then not meaningful without a score_range."""
        measures = [simulation.measure for simulations in self.groups.values() for simulation in simulations.values()]
        return "mean_return" in measures and len(measures) > 1

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a file: the scores, and everything about each simulation."""
        details = {
            group: {name: {"score": one.score, "measure": one.measure, **one.stats.to_dict()} for name, one in simulations.items()}
            for group, simulations in self.groups.items()
        }
        return {"scores": self.scores, "groups": details}

    def __getitem__(self, name: str) -> float:
        return self.scores[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.scores)

    def __len__(self) -> int:
        return len(self.scores)

    def __str__(self) -> str:
        """One line for each score: of each simulation, with an explanation; of each group; and of all."""
        notes = {f"{group}/{name}": one.explanation for group, simulations in self.groups.items() for name, one in simulations.items()}
        if self.mixed:
            notes[OVERALL] = "mean of returns on different scales; add score_range to the suite"
        width = max(map(len, self.scores))
        rows = [(f"{name:<{width}}  {score:>7.4g}", notes.get(name)) for name, score in self.scores.items()]
        return "\n".join(f"{score}  ({note})" if note else score for score, note in rows)


@config_class()
class Simulation(ConfigBase):
    """One environment of a suite, optionally with an opponent."""

    env: Any = None
    """An `EnvConfig`, a mapping of its fields, an id, or anything else that `make_vector_env` accepts."""
    opponent: Any = None
    """The opponent, as in a match: heuristic, heuristic:0.5, random, a run, a policy file, or an actor; None for no opponent."""
    episodes: Count = 20
    """Number of episodes; with an opponent an even number, half of them from either side."""
    name: str = ""
    """Name of its score; by default the environment's id and the opponent."""
    score_range: Annotated[tuple[float, float] | None, FROM_LIST] = None
    """Returns that score 0 and 1, so that scores of different environments can be averaged; by default the return is the score."""

    def __post_init__(self) -> None:
        if self.opponent is not None and self.episodes % 2:
            raise ConfigError(f"episodes={self.episodes} is odd, but half are played from either side; give {self.episodes + 1}")
        if self.opponent is not None and not isinstance(self.opponent, str | Actor):
            raise ConfigError(f"opponent={self.opponent!r:.80} must be heuristic, random, a run, a policy file or an actor")
        if self.score_range is not None and self.score_range[0] == self.score_range[1]:
            raise ConfigError(f"score_range={self.score_range} must be two different numbers, the returns that score 0 and 1")


def read_suites(data: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Simulation, ...]]:
    """Read suites from plain data (or from simulations); every entry is checked and gets a name."""
    if not isinstance(data, Mapping) or not data:
        raise ConfigError('the suite is empty; give groups of environments, such as {"control": ["CartPole-v1"]}')
    suites: dict[str, tuple[Simulation, ...]] = {}
    for group, entries in data.items():
        if not isinstance(entries, Sequence) or isinstance(entries, str):
            raise ConfigError(f"suite {group} must be a list of environments, not {entries!r:.80}")
        if not entries:
            raise ConfigError(f"suite {group} is empty; give an environment, such as CartPole-v1, or remove {group}")
        simulations = tuple(_read_entry(entry, f"suite {group}, entry {number}") for number, entry in enumerate(entries, 1))
        names = [simulation.name for simulation in simulations]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"suite {group} has two simulations called {name}; give them different names")
            if name == SCORE:
                raise ConfigError(f"suite {group}: a simulation cannot be called {SCORE}, the name of the group's score; rename it")
        suites[str(group)] = simulations
    return suites


def load_suites(path: str | Path, *, env: str | None = None) -> dict[str, tuple[Simulation, ...]]:
    """Read suites from a YAML file. A file alone cannot import code: an id with ":" must also be given as `env`."""
    try:
        data = load_yaml(read_bytes(path, limit=4 * MAX_LENGTH).decode())
    except (OSError, UnicodeDecodeError, CorruptFileError, yaml.YAMLError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
        raise ConfigError(f"cannot read the suite {path}: {why}") from error
    try:
        suites = read_suites(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    for group, simulations in suites.items():
        for simulation in simulations:
            name = simulation.env.id
            if names_code(name) and name != env:
                raise ConfigError(
                    f"{path}: suite {group} imports code ({name}); for safety, config files cannot import code; "
                    f"add --env {shlex.quote(name)}"
                )
    return suites


def _read_entry(entry: Any, where: str) -> Simulation:
    """Read an entry, check its fields, and fill in its default name."""
    try:
        fields = entry if isinstance(entry, Mapping) else {"env": entry}
        simulation = entry if isinstance(entry, Simulation) else Simulation.from_dict(fields)
        env, opponent = simulation.env, simulation.opponent
        if env and isinstance(env, str | Mapping):
            env = EnvConfig.from_dict(env if isinstance(env, Mapping) else {"id": env})
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if env in (None, "", {}):
        raise ConfigError(f"{where} has no environment; give env, such as env: CartPole-v1")
    name = env.id if isinstance(env, EnvConfig) else getattr(env, "__name__", type(env).__name__)
    if opponent is not None:
        name = f"{name} vs {opponent if isinstance(opponent, str) else type(opponent).__name__}"
    return simulation.replace(env=env, name=simulation.name or str(name))


def evaluate_suites(
    policy: Actor,
    suites: Mapping[str, Sequence[Any]],
    *,
    deterministic: bool = True,
    num_envs: int = 8,
    seed: int = EvalConfig.seed,
    max_episode_steps: int | None = None,
    progress: Progress | None = None,
) -> SuiteStats:
    """Score a policy on every simulation of every group; `progress` gets the number of finished episodes of all.

    Episode seeds depend on `seed` only, not on `num_envs`. An episode that has not ended after `max_episode_steps` is cut off; by default
    that is the limit that its environment is registered with, else 100,000.
    """
    how: dict[str, Any] = {"deterministic": deterministic, "seed": seed}

    def report(before: int, finished: int) -> None:
        if progress is not None:
            progress(before + finished)

    results: dict[str, dict[str, SimulationStats]] = {}
    before = 0
    for group, simulations in read_suites(suites).items():
        results[group] = {}
        for simulation in simulations:
            where = f"suite {group}, {simulation.name}"
            how["max_episode_steps"] = episode_limit(simulation.env, max_episode_steps)
            stats = _play(policy, simulation, where, num_envs, progress=partial(report, before), **how)
            results[group][simulation.name] = SimulationStats(stats=stats, score_range=simulation.score_range)
            before += simulation.episodes
    return SuiteStats(results)


def count_episodes(suites: Mapping[str, Sequence[Simulation]]) -> int:
    """Return the number of episodes of all simulations."""
    return sum(simulation.episodes for simulations in suites.values() for simulation in simulations)


def _play(policy: Actor, simulation: Simulation, where: str, num_envs: int, *, seed: int, **how: Any) -> EvalStats:
    """Play one simulation; errors begin with its place in the suite. `how` is what `play_games` and `play_match` both take."""
    opponent, episodes = simulation.opponent, simulation.episodes
    try:
        if opponent is not None:
            names = ("the policy", opponent if isinstance(opponent, str) else type(opponent).__name__)
            return play_match(policy, opponent, simulation.env, episodes, num_envs=num_envs, seed=seed, players=names, **how)
        with opened(simulation.env, min(num_envs, episodes), seed) as env:
            check_made_for(policy, env, "the policy")
            return play_games(policy, env, [derive_seed(seed, "suite", episode) for episode in range(episodes)], seed, **how)
    except (ConfigError, SpaceError, EnvError) as error:
        raise type(error)(f"{where}: {error}") from error
