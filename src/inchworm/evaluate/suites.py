"""Named groups of environments and opponents, and a policy's scores on them. Serves the evaluator and `inchworm evaluate --suite`.

A suite is data: `{"combat": [{"env": "Skirmish-v0", "opponent": "heuristic", "episodes": 20}, …], "control": ["CartPole-v1"]}`. Each
group's score is the mean of its simulations' scores, the overall score the mean of the groups'.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from inchworm.config import EnvConfig
from inchworm.errors import ConfigError, CorruptFileError
from inchworm.evaluate.suite_stats import SCORE
from inchworm.files import read_bytes
from inchworm.protocols import Actor
from inchworm.yaml_text import MAX_LENGTH, load_yaml


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
