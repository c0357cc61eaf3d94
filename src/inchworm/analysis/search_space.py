"""The search space of a sweep: fields of the config with a range or a list of values each, checked against the config before training.

A range is text, `1e-4..1e-2:log` or `32..256:32` (low, high, and how it is spaced); anything else is a list of values. A file of them:

```yaml
ppo.learning_rate: 1e-4..1e-2:log
ppo.gae_lambda: [0.9, 0.95, 0.98]
policy.hidden_sizes: [[64, 64], [128, 128]]
```
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import yaml

from inchworm.config.legacy import current_name
from inchworm.config.reading import load_yaml, short
from inchworm.config.sections import TrainingConfig, check_minibatches
from inchworm.core.errors import ConfigError, CorruptFileError, close_names
from inchworm.core.seeding import make_stream
from inchworm.core.tensor_file import read_bytes
from inchworm.run.directory import FREE_FIELDS

Values: TypeAlias = dict[str, Any]
"""A setting of the searched fields: field -> value."""

SECTIONS = ("env", "policy", "ppo", "opponent")
"""Sections whose fields can be searched. Those of others do not alter training, or would change what trials are compared by."""
CHECKED_COMBINATIONS = 64
"""Combinations of extreme values that the config must accept, and as many of others: all, or at random if there are more."""


@dataclass(frozen=True)
class Choice:
    """A list of values, each plain data."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return json.dumps(list(self.values), ensure_ascii=False)

    @property
    def plain(self) -> list[Any]:
        """As it is written in YAML."""
        return list(self.values)

    def at(self, share: float) -> Any:
        """The value at a share of the list, from 0 to 1."""
        return self.values[min(len(self.values) - 1, int(share * len(self.values)))]

    def place(self, value: Any) -> float | None:
        """Where a value is, from 0 to 1; None if it is not one of them."""
        found = [index for index, one in enumerate(self.values) if type(one) is type(value) and one == value]
        return found[0] / max(1, len(self.values) - 1) if found else None


@dataclass(frozen=True)
class Range:
    """All numbers from `low` to `high`, spaced evenly, by their logarithm, or with a step."""

    low: float
    high: float
    log: bool = False
    step: float | None = None
    whole: bool = False
    """Whether it is of integers."""

    def __str__(self) -> str:
        return f"{self.low!r}..{self.high!r}" + (":log" if self.log else f":{self.step!r}" if self.step is not None else "")

    @property
    def plain(self) -> str:
        """As it is written in YAML."""
        return str(self)

    def at(self, share: float) -> float:
        """The number at a share of the range, from 0 to 1."""
        if self.log:
            found = self.low * math.exp(math.log(self.high / self.low) * share)
        else:
            found = self.low + (self.high - self.low) * share
        if self.step is not None:
            found = self.low + self.step * math.floor((found - self.low) / self.step + 1e-9)
        return min(self.high, max(self.low, round(found) if self.whole else found))

    def place(self, value: Any) -> float | None:
        """Where a number is, from 0 to 1; None if the range does not have it."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            return None
        if self.step is not None and abs((value - self.low) / self.step - round((value - self.low) / self.step)) > 1e-9:
            return None
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


Space: TypeAlias = dict[str, Range | Choice]
"""Searched fields, such as `ppo.gamma`, and their values."""


def default_space(base: TrainingConfig) -> dict[str, str | list[Any]]:
    """Return the space that sweeps search by default: settings of PPO and the size of rollouts, around those of `base`.

    Every list contains the value of `base`, and minibatches fit into the smallest rollout.
    """
    ppo, copies = base.ppo, base.env.num_envs
    smallest = ppo.minibatch_size or ppo.num_minibatches or 8

    def around(value: float, others: Iterable[float] = ()) -> list[float]:
        return sorted({value, *others})

    halves = copies % 2 == 0 and ppo.rollout_steps % 2 == 0 and copies * ppo.rollout_steps // 4 >= smallest
    if base.policy.kind in ("lstm", "gru"):  # shorter rollouts would be shorter sequences
        halves = False
    sizes = (0.5, 1, 2) if halves else (1, 2)
    space: dict[str, str | list[Any]] = {
        "ppo.learning_rate": "2e-05..0.01:log",
        "ppo.gamma": around(ppo.gamma, (0.9, 0.95, 0.98, 0.99, 0.995, 0.999)),
        "ppo.gae_lambda": "0.8..1.0",
        "ppo.clip_coef": "0.1..0.4",
        "ppo.ent_coef": around(ppo.ent_coef, (0.0, 0.001, 0.003, 0.01, 0.03)),
        "ppo.update_epochs": "2..20:log",
        "ppo.rollout_steps": [int(ppo.rollout_steps * size) for size in sizes],
        "env.num_envs": [int(copies * size) for size in sizes],
    }
    batch = int(copies * ppo.rollout_steps * sizes[0] ** 2)
    if ppo.minibatch_size is not None:
        fitting = [size for size in (ppo.minibatch_size // 2, 2 * ppo.minibatch_size) if 8 <= size <= batch]
        space["ppo.minibatch_size"] = around(ppo.minibatch_size, fitting)
    else:
        space["ppo.num_minibatches"] = around(ppo.num_minibatches or 8, [count for count in (4, 8, 16) if count <= batch])
    return space


def read_space(words: Sequence[str]) -> dict[str, Any]:
    """Read what follows `--space`: assignments such as `ppo.gamma=0.9,0.99`, and YAML files of them."""
    space: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if equals:
            space[name] = text
            continue
        try:
            data = load_yaml(read_bytes(Path(word), limit=1_000_000).decode())
        except (OSError, UnicodeDecodeError, CorruptFileError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"--space {word} is neither FIELD=VALUES, such as ppo.learning_rate=1e-4..1e-2:log, nor a readable file: {reason}"
            ) from None
        if not isinstance(data, dict):
            raise ConfigError(f"{word} holds {type(data).__name__}, not a mapping of fields to values, as in ppo.gamma: [0.9, 0.99]")
        space |= {str(key): value for key, value in data.items()}
    return space


def check_space(base: TrainingConfig, given: Mapping[str, Any], lanes_per_copy: int = 1) -> Space:
    """Return the space that is described, if the config accepts all its values, and its combinations as far as they are tried."""
    if not given:
        raise ConfigError("the search space is empty; give a field, such as --space ppo.learning_rate=1e-4..1e-2:log")
    space = {name: _read_entry(base, name, entry) for name, entry in given.items()}
    if {"ppo.minibatch_size", "ppo.num_minibatches"} <= space.keys():
        raise ConfigError("ppo.minibatch_size and ppo.num_minibatches exclude each other; search one of them")
    stream = make_stream(0, "search space")
    many = 2 ** len(space) > CHECKED_COMBINATIONS
    corners = stream.integers(0, 2, (CHECKED_COMBINATIONS, len(space))) if many else itertools.product((0, 1), repeat=len(space))
    for shares in (*corners, *stream.random((CHECKED_COMBINATIONS, len(space)))):
        values = {name: entry.at(float(share)) for (name, entry), share in zip(space.items(), shares)}
        try:
            config = with_values(base, values)
            check_minibatches(config.ppo, config.env.num_envs * lanes_per_copy)
        except ConfigError as error:
            raise ConfigError(f"the search space has a combination that cannot be trained: {error}; narrow the space") from None
    return space


def _read_entry(base: TrainingConfig, name: str, entry: Any) -> Range | Choice:
    """Read one entry and check each of its values, or both ends of its range, against the field."""
    check_field(base, name)
    if isinstance(entry, str) and ".." in entry:
        return _read_range(base, name, entry)
    if isinstance(entry, str):
        try:
            entry = load_yaml(entry if entry.startswith("[") else f"[{entry}]")
        except yaml.YAMLError as error:
            raise ConfigError(f"the values of {name} are not valid: {' '.join(str(error).split())}") from None
    if not isinstance(entry, list | tuple):
        raise ConfigError(f"the search space has {name}={short(entry)}; give a list of values, or a range such as 0.8..1.0")
    if not entry:
        raise ConfigError(f"the search space has no value for {name}; give a list such as [0.9, 0.95], or a range such as 0.8..1.0")
    values = [_field_value(with_values(base, {name: one}), name) for one in entry]
    plain = tuple(list(value) if isinstance(value, tuple) else value for value in values)
    if len({json.dumps(value) for value in plain}) < len(plain):
        raise ConfigError(f"the search space has a value of {name} twice: {short(list(plain))}")
    return Choice(plain)


def _read_range(base: TrainingConfig, name: str, text: str) -> Range:
    ends, _, spacing = text.partition(":")
    try:
        low, high = (float(end) for end in ends.split(".."))
        step = None if spacing in ("", "log") else float(spacing)
    except ValueError:
        raise ConfigError(f"{name}={text} is not a range; write LOW..HIGH, LOW..HIGH:log or LOW..HIGH:STEP") from None
    found = [_field_value(with_values(base, {name: end}), name) for end in (low, high)]
    if any(isinstance(end, bool) or not isinstance(end, int | float) for end in found):
        raise ConfigError(f"{name} is not a number, so it has no range; give a list of values, such as {name}=a,b")
    low, high = found
    if not low < high:
        raise ConfigError(f"the range {name}={text} is empty: {low:g} is not below {high:g}")
    if spacing == "log" and low <= 0:
        raise ConfigError(f"the range {name}={text} is spaced by logarithm and begins at {low:g}; begin above 0, or leave out :log")
    whole = isinstance(low, int)
    if step is not None and (not 0 < step <= high - low or (whole and not step.is_integer())):
        raise ConfigError(f"the step of {name}={text} must be {'a whole number ' if whole else ''}above 0 and at most {high - low:g}")
    if step is not None and whole:
        step = int(step)
    return Range(low, high, log=spacing == "log", step=step, whole=whole)


def check_field(base: TrainingConfig, name: str) -> None:
    """Refuse a name that is not a field, or not one that a sweep can vary."""
    section, _, field = name.partition(".")
    known = [f"{part}.{key}" for part in SECTIONS for key in getattr(base, part).to_dict()]
    if name in FREE_FIELDS or name == "env.id" or (section not in SECTIONS and section in base.to_dict()):
        raise ConfigError(f"{name} cannot be searched: it does not alter training, or trials could not be compared by their scores")
    if name not in known:
        here = current_name(field or name)
        near = [here] if here in known else close_names(name, known) or [one for one in known if one.partition(".")[2] == name]
        raise ConfigError(
            f"the search space has an unknown field {name}; " + (f"did you mean {near[0]}?" if near else "inchworm config ENV prints all")
        )


def _field_value(config: TrainingConfig, name: str) -> Any:
    section, _, field = name.partition(".")
    return getattr(getattr(config, section), field)


def with_values(base: TrainingConfig, values: Mapping[str, Any]) -> TrainingConfig:
    """Return the config with searched fields set; the size and the number of minibatches replace each other."""
    data = base.to_dict()
    if not {"ppo.minibatch_size", "ppo.num_minibatches"}.isdisjoint(values):
        data["ppo"] |= {"minibatch_size": None, "num_minibatches": None}
    for name, value in values.items():
        section, _, field = name.partition(".")
        data[section][field] = value
    return TrainingConfig.from_dict(data)


def base_values(base: TrainingConfig, space: Space) -> Values | None:
    """The values of `base` in the space; None if it lies outside."""
    found: Values = {}
    for name, entry in space.items():
        value = _field_value(base, name)
        if name == "ppo.num_minibatches" and value is None and base.ppo.minibatch_size is None:
            value = 8  # what null stands for
        value = list(value) if isinstance(value, tuple) else value
        if entry.place(value) is None:
            return None
        found[name] = value
    return found


def places(space: Space, rows: Sequence[Values]) -> dict[str, np.ndarray]:
    """Where the values of trials are within each entry, from 0 to 1: field -> [trials] f64."""
    return {name: np.array([entry.place(row[name]) for row in rows], np.float64) for name, entry in space.items()}
