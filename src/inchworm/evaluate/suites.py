"""Named groups of environments and opponents, and a policy's scores on them. Serves the evaluator and `inchworm evaluate --suite`.

A suite is data: `{"combat": [{"env": "Skirmish-v0", "opponent": "heuristic", "episodes": 20}, …], "control": ["CartPole-v1"]}`. Each
group's score is the mean of its simulations' scores, the overall score the mean of the groups'.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from inchworm.config.reading import MAX_LENGTH, load_yaml
from inchworm.config.sections import EnvConfig, EvalConfig
from inchworm.core.errors import ConfigError, CorruptFileError, EnvError, SpaceError
from inchworm.core.protocols import Actor
from inchworm.core.seeding import derive_seed, make_stream
from inchworm.core.tensor_file import read_bytes
from inchworm.evaluate.games import Game, Progress, opened
from inchworm.evaluate.matches import check_made_for, even_copies, make_player, play_match
from inchworm.evaluate.stats import EvalStats

SCORE, OVERALL = "score", "overall"
"""The names of a group's own score, which no simulation may have, and of the score of all groups."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SimulationStats:
    """What a policy reached in one simulation."""

    stats: EvalStats
    """Every episode."""
    score_range: tuple[float, float] | None = None
    """The returns that score 0 and 1, if the suite gives them."""

    @property
    def measure(self) -> str:
        """What the score is: `win_rate` where the environment says who won, else `scaled_return` or `mean_return`."""
        if self.stats.win_rate is not None:
            return "win_rate"
        return "mean_return" if self.score_range is None else "scaled_return"

    @property
    def score(self) -> float:
        """The win rate where there is one; else the mean return, scaled if the suite gives a range."""
        if self.stats.win_rate is not None:
            return self.stats.win_rate
        low, high = self.score_range or (0.0, 1.0)
        return self.stats.mean_return if self.score_range is None else (self.stats.mean_return - low) / (high - low)

    @property
    def explained(self) -> str:
        """What the score is and how it came about; of a match the statistics begin with that already."""
        told = str(self.stats)
        measure = self.measure.replace("_", " ")
        return told if told.startswith(measure) else f"{measure}; {told}"


@dataclass(frozen=True, eq=False)
class SuiteStats(Mapping[str, float]):
    """A mapping of scores: `<group>/<simulation>`, `<group>/score` (the mean of its simulations) and `overall` (the mean of the groups).

    Every group counts the same, however many simulations it has.
    """

    groups: Mapping[str, Mapping[str, SimulationStats]]
    """group -> simulation -> what was found."""

    def group_score(self, group: str) -> float:
        """The mean score of a group's simulations."""
        return float(np.mean([simulation.score for simulation in self.groups[group].values()]))

    @property
    def overall(self) -> float:
        """The mean of the groups' scores."""
        return float(np.mean([self.group_score(group) for group in self.groups]))

    @property
    def scores(self) -> dict[str, float]:
        """All of them, in order."""
        found: dict[str, float] = {}
        for group, simulations in self.groups.items():
            found |= {f"{group}/{name}": simulation.score for name, simulation in simulations.items()}
            found[f"{group}/{SCORE}"] = self.group_score(group)
        return {**found, OVERALL: self.overall}

    @property
    def mixed(self) -> bool:
        """Whether returns were averaged with something else, so that the overall score says little: a suite's score_range mends it."""
        measures = [simulation.measure for simulations in self.groups.values() for simulation in simulations.values()]
        return "mean_return" in measures and len(measures) > 1

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a file: the scores, and everything about each simulation."""
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
        """One line for each score: of each simulation, with what the score is and how it came about; of each group; and of all."""
        how = {f"{group}/{name}": one.explained for group, simulations in self.groups.items() for name, one in simulations.items()}
        how[OVERALL] = "a mean of returns of different kinds: give a score_range in the suite" if self.mixed else ""
        width = max(map(len, self.scores))
        rows = [(f"{name:<{width}}  {score:>7.4g}", how.get(name, "")) for name, score in self.scores.items()]
        return "\n".join(f"{score}  ({told})" if told else score for score, told in rows)


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """One environment of a suite, with whom the policy meets in it."""

    env: Any
    """An `EnvConfig`, a mapping of its fields, an id, or whatever else `make_vector_env` takes."""
    opponent: str | Actor | None = None
    """Who plays the other side, as in a match: heuristic, heuristic:0.5, random, a run, a policy file, or an actor. None: there is none."""
    episodes: int = 20
    """How many are played; with an opponent an even number, half of them from either side."""
    name: str = ""
    """What its score is called; by default the environment's id, and whom the policy met there."""
    score_range: tuple[float, float] | None = None
    """Returns that score 0 and 1, so that scores of different environments can be averaged; without it a return scores itself."""


Suites = Mapping[str, Sequence[Simulation]]
"""group -> its simulations."""


def read_suites(data: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Simulation, ...]]:
    """Suites from plain data (or from simulations), every entry checked and named."""
    if not isinstance(data, Mapping) or not data:
        raise ConfigError('a suite names no environment; give groups of them, such as {"control": ["CartPole-v1"]}')
    return {str(group): _read_group(str(group), entries) for group, entries in data.items()}


def load_suites(path: str | Path, *, env: str | None = None) -> dict[str, tuple[Simulation, ...]]:
    """Suites from a YAML file. Code is never imported because a file says so: an id with ":" must be given as `env` too."""
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
            if ":" in name and not name.startswith("envpool:") and name != env:
                raise ConfigError(
                    f"{path}: suite {group} names code to import ({name}), which a file may not decide; if you trust it, type: --env {name}"
                )
    return suites


def _read_group(group: str, entries: Any) -> tuple[Simulation, ...]:
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise ConfigError(f"suite {group} must be a list of environments, not {entries!r:.80}")
    if not entries:
        raise ConfigError(f"suite {group} names no environment; give one, such as CartPole-v1, or leave {group} out")
    simulations = tuple(_read_entry(entry, f"suite {group}, entry {number}") for number, entry in enumerate(entries, 1))
    names = [simulation.name for simulation in simulations]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"suite {group} has two simulations called {name}; give each a name of its own")
        if name == SCORE:
            raise ConfigError(f"suite {group}: no simulation can be called {SCORE}, which is the group's own; give another name")
    return simulations


def _read_entry(entry: Any, where: str) -> Simulation:
    if isinstance(entry, Simulation):
        fields = {field.name: getattr(entry, field.name) for field in dataclasses.fields(entry)}
    elif isinstance(entry, Mapping):
        fields = dict(entry)
    else:
        fields = {"env": entry}
    known = [field.name for field in dataclasses.fields(Simulation)]
    for key in fields:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known names: {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {key}; {hint}")
    if fields.get("env") in (None, "", {}):
        raise ConfigError(f"{where} names no environment; give env, such as env: CartPole-v1")
    return _checked(Simulation(**{**fields, "env": _read_env(fields["env"], where)}), where)


def _read_env(env: Any, where: str) -> Any:
    try:
        if isinstance(env, str):
            return EnvConfig(id=env)
        return EnvConfig.from_dict(env) if isinstance(env, Mapping) else env
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _checked(simulation: Simulation, where: str) -> Simulation:
    episodes, limits = simulation.episodes, simulation.score_range
    if type(episodes) is not int or episodes < 1:
        raise ConfigError(f"{where}: episodes={episodes!r:.80} must be 1 or more")
    if simulation.opponent is not None and episodes % 2:
        raise ConfigError(f"{where}: episodes={episodes} is odd, but half are played from either side; give {episodes + 1}")
    if simulation.opponent is not None and not isinstance(simulation.opponent, str | Actor):
        raise ConfigError(f"{where}: opponent={simulation.opponent!r:.80} must be heuristic, random, a run, a policy file or an actor")
    if not isinstance(simulation.name, str):
        raise ConfigError(f"{where}: name={simulation.name!r:.80} must be text")
    if limits is not None:
        limits = _checked_range(limits, where)
    return dataclasses.replace(simulation, name=simulation.name or _default_name(simulation), score_range=limits)


def _checked_range(limits: Any, where: str) -> tuple[float, float]:
    numbers = isinstance(limits, Sequence) and len(limits) == 2 and all(type(bound) in (int, float) for bound in limits)
    if not numbers or not math.isfinite(limits[0]) or not math.isfinite(limits[1]) or limits[0] == limits[1]:
        raise ConfigError(f"{where}: score_range={limits!r:.80} must be two different numbers, the returns that score 0 and 1")
    return float(limits[0]), float(limits[1])


def _default_name(simulation: Simulation) -> str:
    env, opponent = simulation.env, simulation.opponent
    world = env.id if isinstance(env, EnvConfig) else getattr(env, "__name__", type(env).__name__)
    if opponent is None:
        return str(world)
    return f"{world} vs {opponent if isinstance(opponent, str) else type(opponent).__name__}"


def evaluate_suites(
    policy: Actor,
    suites: Mapping[str, Sequence[Any]],
    *,
    deterministic: bool = True,
    num_envs: int = 8,
    seed: int = EvalConfig.seed,
    progress: Progress | None = None,
) -> SuiteStats:
    """Score a policy on every simulation of every group; `progress` is told how many episodes of all are finished.

    The seeds are derived from `seed` alone: how many copies play does not change which episodes they are.
    """
    groups = read_suites(suites)
    found: dict[str, dict[str, SimulationStats]] = {}
    before = 0
    for group, simulations in groups.items():
        found[group] = {}
        for simulation in simulations:
            tell = None if progress is None else _after(progress, before)
            stats = _play(policy, simulation, f"suite {group}, {simulation.name}", (deterministic, num_envs, seed), tell)
            found[group][simulation.name] = SimulationStats(stats=stats, score_range=simulation.score_range)
            before += simulation.episodes
    return SuiteStats(found)


def count_episodes(suites: Mapping[str, Sequence[Simulation]]) -> int:
    """How many episodes all simulations have."""
    return sum(simulation.episodes for simulations in suites.values() for simulation in simulations)


def _after(progress: Progress, before: int) -> Progress:
    return lambda finished: progress(before + finished)


def _play(policy: Actor, simulation: Simulation, where: str, how: tuple[bool, int, int], progress: Progress | None) -> EvalStats:
    """One simulation; whatever does not fit is told with its place in the suite."""
    deterministic, num_envs, seed = how
    matched = simulation.opponent is not None
    copies = even_copies(num_envs, simulation.episodes) if matched else min(num_envs, simulation.episodes)
    try:
        with opened(simulation.env, copies, seed) as env:
            check_made_for(policy, env, "the policy")
            if simulation.opponent is not None:
                opponent = simulation.opponent
                second = make_player(opponent, env, simulation.env) if isinstance(opponent, str) else opponent
                options: dict[str, Any] = {"deterministic": deterministic, "seed": seed, "progress": progress}
                names = ("the policy", opponent if isinstance(opponent, str) else type(opponent).__name__)
                return play_match(policy, second, env, simulation.episodes, players=names, **options)
            seeds = [derive_seed(seed, "suite", episode) for episode in range(simulation.episodes)]
            return Game(env, seeds, seed).play(policy, make_stream(seed, "evaluation"), deterministic, progress)
    except (ConfigError, SpaceError, EnvError) as error:
        raise type(error)(f"{where}: {error}") from error
