"""Reading and writing configs: strict YAML, plain mappings, and validation errors as one line each."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import types
import typing
import warnings
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml
from pydantic import ConfigDict, ValidationError

from inchworm.config.legacy import modern_names
from inchworm.core.errors import ConfigError, CorruptFileError
from inchworm.core.tensor_file import read_bytes

MAX_LENGTH = 65_536
"""Characters of a text, at most: a config has a few thousand, and reading takes about a second for so many."""

_MAX_BITS = 128  # of an integer: `0xfff…` and `1:59:59…` can have any number, and Python then refuses to print them


class _Loader(yaml.SafeLoader):
    """Safe YAML in which `1e-4` is a number, as people mean it (YAML 1.1 wants a dot), and a doubled key is an error.

    Aliases are refused: a few lines of them can stand for gigabytes, or for themselves.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, f"the alias *{event.anchor}: write the value out", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):  # the others are refused by the construction itself
                if key in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands there twice", node.start_mark)
                seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        value: int = super().construct_yaml_int(node)
        if value.bit_length() > _MAX_BITS:
            raise yaml.constructor.ConstructorError(None, None, f"an integer of more than {_MAX_BITS} bits", node.start_mark)
        return value


class _Dumper(yaml.SafeDumper):
    """Writes what the loader reads back: text that it would take for a number is quoted."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write a value out wherever it stands."""
        del data
        return True


_FLOAT = re.compile(r"^[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+$")
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
for _each in (_Loader, _Dumper):
    _each.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def dump_yaml(data: Any) -> str:
    """Plain data as text that `load_yaml` reads back as what it was, in the order of its keys."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False)


def load_yaml(text: str) -> Any:
    """Plain data from YAML text; doubled keys, aliases and anything that is not plain data are refused with `YAMLError`."""
    if len(text) > MAX_LENGTH:
        raise yaml.YAMLError(f"{len(text):,} characters are more than the {MAX_LENGTH:,} that are read")
    try:
        return _Loader(text).get_single_data()
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:  # Python's own, let through
        raise yaml.YAMLError(f"no plain data: {error}") from error


STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
"""How pydantic reads every config."""

MOST_COPIES = 1_000_000
"""Copies of an environment, and units of a layer: beyond this it is a slip of the finger, which should not take all memory."""

ConfigT = TypeVar("ConfigT", bound="ConfigBase")
AnyT = TypeVar("AnyT")

_MOST = 2**63 - 1  # the largest whole number that every part of a program can hold


class LegacyNameWarning(UserWarning):
    """A config used a name of an older trainer; the message gives today's."""


class ConfigBase:
    """What all configs share: reading from plain data, writing to it, and changing fields by making a new one."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """A config from plain data. Unknown keys are answered with the nearest name; legacy spellings are taken and reported."""
        modern, reports = modern_names(cls.__name__, data)
        for report in reports:
            warnings.warn(report, LegacyNameWarning, stacklevel=2)
        return _build(cls, modern, "")

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """A config from a YAML file."""
        try:
            data = load_yaml(read_bytes(path, limit=4 * MAX_LENGTH).decode())
        except (OSError, UnicodeDecodeError, CorruptFileError, yaml.YAMLError) as error:
            raise ConfigError(f"cannot read the config {path}: {' '.join(str(error).split())}") from error
        if not isinstance(data, dict):
            raise ConfigError(f"the config {path} holds {type(data).__name__}, not a mapping of names to values")
        return cls.from_dict(data)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back: dicts, lists, numbers, text."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}  # type: ignore[arg-type]

    def to_yaml(self) -> str:
        """The same as YAML text."""
        return dump_yaml(self.to_dict())

    def replace(self, **changes: Any) -> Self:
        """The same config with other values in some fields, checked again."""
        return _build(type(self), {**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)}, **changes}, "")  # type: ignore[arg-type]


def in_words(cls: type[AnyT]) -> type[AnyT]:
    """A config class whose constructor answers wrong names and types with `ConfigError`, as `from_dict` does."""
    checked = cls.__init__

    @functools.wraps(checked)
    def construct(self: AnyT, **values: Any) -> None:
        try:
            checked(self, **values)
        except ValidationError as error:
            unknown = [str(item["loc"][0]) for item in error.errors() if item["type"] == "unexpected_keyword_argument"]
            names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
            raise ConfigError(_unknown(_section(cls), unknown[0], names) if unknown else _explain(error, _section(cls))) from None

    cls.__init__ = construct  # type: ignore[assignment]
    return cls


def check_name(name: str, field_name: str) -> None:
    """Refuse names that would leave the directory they are meant for."""
    plain = name.strip(". ") == name.strip() and name == name.strip()
    fits = len(name) <= 120 and len(name.encode("utf-8", "replace")) <= 250  # file systems count bytes
    if not name or not plain or not fits or any(c in name for c in "/\\\0") or not name.isprintable():
        raise ConfigError(f"{field_name}={name!r:.200} is no plain name; use letters, digits, '-', '_' and '.', at most 120 characters")


def check_path(path: str, field_name: str) -> None:
    """Refuse text that no file system could take as a path."""
    if not path or "\0" in path or path.encode("utf-8", "replace").decode() != path:
        raise ConfigError(f"{field_name}={path!r:.200} is no path; use text without NUL")


def check_range(config: Any, name: str, low: float | None, high: float | None) -> None:
    """Refuse a field that is below `low` or above `high`; an empty field is in range."""
    value = getattr(config, name)
    top = _MOST if high is None and isinstance(value, int) else high
    if value is None or ((low is None or value >= low) and (top is None or value <= top)):
        return
    limits = f"{low:g} or more" if high is None and (top is None or value <= top) else f"from {low:g} to {_top(top)}"
    raise ConfigError(f"{_section(type(config))}{name}={_short(value)} must be {limits}")


def check_plain(value: Any, where: str) -> None:
    """Refuse what is no plain data: a config is written into files, and read back as what it was."""
    if value is None or isinstance(value, bool | int | float | str):
        return
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_plain(item, f"{where}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"{where} has the key {_short(key)}; its keys must be text")
            check_plain(item, f"{where}.{key}")
    else:
        raise ConfigError(
            f"{where} is {type(value).__name__}; a config holds plain data (numbers, text, lists, dicts); "
            "give an array by its tolist(), and anything else by a factory of environments"
        )


def _short(value: Any) -> str:
    """A value in a message: a number of 400 digits says no more than its first ones."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _top(limit: float | None) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


def check_positive(config: Any, name: str) -> None:
    """Refuse a field that is 0 or less."""
    value = getattr(config, name)
    if value is not None and not value > 0:
        raise ConfigError(f"{_section(type(config))}{name}={_short(value)} must be above 0")


_SECTIONS = {"PPOConfig": "ppo", "EnvConfig": "env", "PolicyConfig": "policy", "CollectConfig": "collect", "EvalConfig": "evaluation"}
_SECTIONS |= {"RunConfig": "run", "WrapperConfig": "env.wrappers", "OpponentConfig": "opponent"}


def _section(cls: type) -> str:
    return f"{_SECTIONS[cls.__name__]}." if cls.__name__ in _SECTIONS else ""


def _build(cls: type[ConfigT], data: Mapping[str, Any], where: str) -> ConfigT:
    """`cls` from a mapping, with the full name of whatever is wrong in it."""
    where = where or _section(cls)
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where.rstrip('.') or cls.__name__} must be a mapping of names to values, not {_short(data)}")
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    values = {}
    for key, value in data.items():
        if key not in names:
            raise ConfigError(_unknown(where, str(key), names))
        values[key] = _coerce(hints[key], value, f"{where}{key}")
    return cls(**values)


def _unknown(where: str, key: str, names: list[str]) -> str:
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    hint = f"did you mean {where}{near[0]}?" if near else f"known names: {', '.join(names)}"
    return f"unknown config key {where}{key}; {hint}"


def _coerce(hint: Any, value: Any, where: str) -> Any:
    """Plain data brought to a field's type where that loses nothing: nested mappings to configs, lists to tuples."""
    if isinstance(hint, type) and issubclass(hint, ConfigBase):
        return value if isinstance(value, hint) else _build(hint, value, f"{where}.")
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal and value in inner and not any(type(value) is type(option) for option in inner):
        raise ConfigError(f"{where}={_short(value)} must be one of {', '.join(map(str, inner))}")  # true and 1.0 equal 1, but are not it
    if origin is tuple and isinstance(value, list | tuple):
        kinds = [inner[0]] * len(value) if len(inner) == 2 and inner[1] is Ellipsis else list(inner)
        if len(kinds) != len(value):
            raise ConfigError(f"{where}={_short(value)} must have {len(kinds)} entries")
        return tuple(_coerce(kind, item, f"{where}[{index}]") for index, (kind, item) in enumerate(zip(kinds, value)))
    if origin in (typing.Union, types.UnionType) and value is not None:
        tuples = [kind for kind in inner if typing.get_origin(kind) is tuple]
        return _coerce(tuples[0], value, where) if tuples and isinstance(value, list) else value
    return value


def _explain(error: ValidationError, where: str) -> str:
    parts = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"] if not _is_branch(str(part)))
        parts.append(f"{where}{name}={_short(item.get('input'))}: {item['msg'][0].lower()}{item['msg'][1:]}")
    return "; ".join(dict.fromkeys(parts))


def _is_branch(part: str) -> bool:
    """Pydantic names which kind of a union it tried, as if that were a field."""
    return part in ("int", "float", "str", "bool") or part.startswith(("function-", "literal[", "constrained-"))


def _plain(value: Any) -> Any:
    if isinstance(value, ConfigBase):
        return value.to_dict()
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
