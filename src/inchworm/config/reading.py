"""Config classes and their files: strict YAML, plain mappings, and validation errors as one line each."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import re
import textwrap
import typing
import warnings
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, cast, dataclass_transform

import pydantic.dataclasses
import yaml
from pydantic import BeforeValidator, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, ErrorDetails, to_jsonable_python

from inchworm.config.legacy import current_name, modern_names
from inchworm.core.errors import ConfigError, CorruptFileError
from inchworm.core.tensor_file import read_bytes

MAX_LENGTH = 65_536
"""Most characters of a YAML text: a config has a few thousand, and reading this many takes about a second."""

_MAX_BITS = 128  # of an integer: `0xfff…` and `1:59:59…` can be of any size, and Python refuses to print huge ones


class _Loader(yaml.SafeLoader):
    """Safe YAML in which `1e-4` is a number (YAML 1.1 requires a dot) and a duplicate key is an error.

    Aliases are refused: a few lines of them can expand to gigabytes, or refer to themselves.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, f"alias *{event.anchor} is not supported; repeat the value", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):  # others are refused by the base class
                if key in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", node.start_mark)
                seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        value: int = super().construct_yaml_int(node)
        if value.bit_length() > _MAX_BITS:
            raise yaml.constructor.ConstructorError(None, None, f"an integer of more than {_MAX_BITS} bits", node.start_mark)
        return value


class _Dumper(yaml.SafeDumper):
    """Safe YAML that the loader reads back unchanged: text that looks like a number is quoted, no aliases."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


_FLOAT = re.compile(r"^[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+$")
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
for _each in (_Loader, _Dumper):
    _each.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def dump_yaml(data: Any) -> str:
    """Write plain data as YAML that `load_yaml` reads back unchanged, keys in order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False)


def load_yaml(text: str) -> Any:
    """Read plain data from YAML text. Duplicate keys, aliases and anything but plain data raise `YAMLError`."""
    if len(text) > MAX_LENGTH:
        raise yaml.YAMLError(f"{len(text):,} characters; at most {MAX_LENGTH:,} are read")
    try:
        return _Loader(text).get_single_data()
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:  # PyYAML lets them through
        raise yaml.YAMLError(f"not plain data: {error}") from error


ConfigT = TypeVar("ConfigT", bound="ConfigBase")


class LegacyNameWarning(UserWarning):
    """A config used a name of an older trainer; the message gives the current one."""


class ConfigBase:
    """What all configs share: reading from plain data, writing to it, and changing fields by making a new one."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Make a config from plain data. Names of older trainers are accepted with a `LegacyNameWarning`."""
        modern, reports = modern_names(cls.__name__, data)
        for report in reports:
            warnings.warn(report, LegacyNameWarning, stacklevel=2)
        return cls(**{str(key): value for key, value in modern.items()})

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Read a config from a YAML file."""
        if Path(path).is_dir():
            inside = Path(path) / "config.yaml"
            hint = f"; use {inside}" if inside.is_file() else ", as inchworm config ENV prints one"
            raise ConfigError(f"the config {path} is a directory, and a YAML file is expected{hint}")
        try:
            data = load_yaml(read_bytes(path, limit=4 * MAX_LENGTH).decode())
        except (OSError, UnicodeDecodeError, CorruptFileError, yaml.YAMLError) as error:
            raise ConfigError(f"cannot read the config {path}: {' '.join(str(error).split())}") from error
        if not isinstance(data, dict):
            raise ConfigError(f"the config {path} holds {type(data).__name__}, not a mapping of names to values")
        return cls.from_dict(data)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that `from_dict` reads back: dicts, lists, numbers, text."""
        return cast(dict[str, Any], to_jsonable_python(self))

    def to_yaml(self) -> str:
        """Return the config as YAML text."""
        return dump_yaml(self.to_dict())

    def replace(self, **changes: Any) -> Self:
        """Return a config with some fields changed, validated again."""
        return cast(Self, dataclasses.replace(cast(Any, self), **changes))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Accept a mapping for a nested config, which pydantic's strict mode would refuse; its values stay strict."""
        schema = handler(source)
        cast(dict[str, Any], handler.resolve_ref_schema(schema))["strict"] = False
        return schema


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
def config_class(prefix: str = "") -> Callable[[type[ConfigT]], type[ConfigT]]:
    """Decorate a frozen, strictly validated dataclass whose constructor raises `ConfigError`; `prefix` precedes field names in messages."""

    def decorate(cls: type[ConfigT]) -> type[ConfigT]:
        settings = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants")
        made: Any = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=settings)(cls)
        validate = made.__init__

        @functools.wraps(validate)
        def construct(self: ConfigT, **values: Any) -> None:
            try:
                validate(self, **values)
            except ValidationError as error:
                raise ConfigError(_explain(error.errors(include_url=False), made, prefix)) from None

        made.__init__ = construct
        return cast(type[ConfigT], made)

    return decorate


FROM_LIST = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""Annotates tuples: YAML and command lines give lists."""


def as_whole(value: Any) -> Any:
    """Return a float that is a whole number as an integer, and any other value unchanged. Larger ones may not be what was typed."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53 else value


Integer = Annotated[int, BeforeValidator(as_whole)]
"""An integer that may be written as `1e6`, which is a float in YAML and in Python."""


def field_docs(cls: type[Any]) -> dict[str, str]:
    """Return the docstring under each field of a config class. (pydantic reads them on import, which takes 30 ms.)"""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    docs = {field.name: "" for field in dataclasses.fields(cls)}
    for node, after in itertools.pairwise(cast(ast.ClassDef, definition).body):
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            docs[ast.unparse(node.target)] = " ".join(str(after.value.value).split())
    return docs


_MUST_BE = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "a mapping of names to values",
    "dataclass_type": "a mapping of names to values",
    "finite_number": "a finite number",
    "literal_error": "{expected}",
    "greater_than": "above {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than_equal": "{le} or less",
    "too_long": "a list of {max_length}",
}
"""What a value must be, by pydantic's type of error."""


def _explain(errors: list[ErrorDetails], cls: type[Any], prefix: str) -> str:
    """Turn validation errors into one line."""
    demands: dict[str, list[str]] = {}  # several for one value if its type is a union
    for error in errors:
        name, owner, hint = "", cls, cast(Any, cls)
        for part in error["loc"]:
            if isinstance(part, int):
                name, hint = f"{name}[{part}]", next(iter(typing.get_args(hint)), None)
            elif typing.get_origin(hint) is dict:
                name, hint = f"{name}.{part}", typing.get_args(hint)[1]
            elif isinstance(hint, type) and issubclass(hint, ConfigBase):  # else it names a member of a union
                name, owner = f"{name}.{part}" if name else f"{prefix}{part}", hint
                hint = typing.get_type_hints(hint).get(part)
        if error["type"] in ("unexpected_keyword_argument", "invalid_key"):
            known = [f.name for f in dataclasses.fields(owner)]
            near = difflib.get_close_matches(str(part), known, n=1, cutoff=0.5)
            help_text = f"did you mean {name.removesuffix(str(part))}{near[0]}?" if near else f"known names: {', '.join(known)}"
            if (renamed := current_name(str(part))) is not None and renamed.rpartition(".")[2] in known:
                twice = ", and is twice as large, because the value loss has a factor 1/2" if part == "value_coef" else ""
                help_text = f"it is called {renamed} here{twice}"
            return f"unknown config key {name}; {help_text}"
        if error["type"] == "missing":
            demands[f"{name} is missing"] = []
        else:
            context = error.get("ctx", {})
            limits = {key: int(x) if isinstance(x, float) and x.is_integer() else x for key, x in context.items()}  # 1, not 1.0
            demand = _MUST_BE.get(error["type"], "valid ({msg})").format(msg=error["msg"], **limits)
            demands.setdefault(f"{name}={short(error['input'])}", []).append(demand)
    return "; ".join(f"{value} must be {', or '.join(musts)}" if musts else value for value, musts in demands.items())


def short(value: Any) -> str:
    """Return the `repr` of a value, cut to fit into a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_plain(value: Any, name: str) -> None:
    """Refuse a value that a YAML file could not hold."""
    if value is None or isinstance(value, bool | int | float | str):
        return
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_plain(item, f"{name}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"{name} has the key {short(key)}; keys must be text")
            check_plain(item, f"{name}.{key}")
    else:
        raise ConfigError(
            f"{name} is {type(value).__name__}; a config holds plain data (numbers, text, lists, dicts); "
            "pass arrays as lists (tolist()) and other objects through an environment factory"
        )


def check_name(name: str, field_name: str) -> None:
    """Refuse a name that would lead out of its directory, or that file systems cannot store."""
    plain = name.strip(". ") == name.strip() and name == name.strip()
    fits = len(name) <= 120 and len(name.encode("utf-8", "replace")) <= 250  # file systems count bytes
    if not name or not plain or not fits or any(c in name for c in "/\\\0") or not name.isprintable():
        raise ConfigError(f"{field_name}={name!r:.200} is not a valid name; use letters, digits, '-', '_' and '.', at most 120 characters")


def check_path(path: str, field_name: str) -> None:
    """Refuse text that cannot be a path."""
    if not path or "\0" in path or path.encode("utf-8", "replace").decode() != path:
        raise ConfigError(f"{field_name}={path!r:.200} is not a valid path; use text without NUL")
