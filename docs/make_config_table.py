"""Write docs/config.md from `inchworm.config.sections`, where every field is documented.

python docs/make_config_table.py
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from pathlib import Path
from typing import Any

from inchworm.config.reading import ConfigBase, field_docs
from inchworm.config.sections import RoleConfig, TrainingConfig

PAGE = Path(__file__).with_name("config.md")

HEAD = """# Config

A run is described by a `TrainingConfig` of ten sections and, for [several policies](several_policies.md), one for each. Every field
has a default; `inchworm config ENV` prints all of them with the environment's preset filled in, as YAML that `inchworm train --config`
reads. On the command line a field is a flag, `--ppo.clip-coef 0.1`; in Python it is a keyword, `PPOConfig(clip_coef=0.1)`. Both are
validated, and the error for a misspelt name suggests the nearest one. Configs are frozen: `config.replace(…)` returns a changed copy.
`from_dict` and `from_yaml` also accept the names of older trainers (see [migration](migration.md)).

This page is generated from the source by `make docs`.
"""


def page() -> str:
    """Return the whole page."""
    hints = typing.get_type_hints(TrainingConfig)
    sections = [field.name for field in dataclasses.fields(TrainingConfig) if field.name != "policies"]
    return HEAD + "".join(section(name, hints[name]) for name in sections) + section("policies.NAME", RoleConfig)


def section(name: str, config: type[Any]) -> str:
    """Return one section: its config class and a table of its fields."""
    comments, defaults = field_docs(config), config().to_dict()
    hints = typing.get_type_hints(config)
    inner = {key: hints[key] for key in defaults if isinstance(hints[key], type) and issubclass(hints[key], ConfigBase)}
    rows = [
        f"| `{key}` | {cell(readable(hints[key]))} | {value(defaults[key])} | {cell(comments[key])} |"
        for key in defaults
        if key not in inner
    ]
    title = f"\n## {name}\n\n`{config.__name__}`: {inspect.getdoc(config)}\n\n"
    table = "| field | type | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
    return title + table + "".join(section(f"{name}.{key}", hint) for key, hint in inner.items())


def readable(hint: Any) -> str:
    """Return a type as people read it: `int or auto`, `float or null`, `list of int`."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is type(None):
        return "null"
    if origin is typing.Literal:
        return ", ".join(str(choice) for choice in inner)
    if origin is tuple:
        return f"list of {readable(inner[0])}" if inner[-1] is Ellipsis else f"({', '.join(map(readable, inner))})"
    if origin is dict:
        return "mapping"
    if origin is not None:
        return " or ".join(map(readable, inner))
    return {"WrapperConfig": "wrapper"}.get(hint.__name__, hint.__name__)


def value(default: Any) -> str:
    """Return a default as it is written in YAML."""
    if default is None:
        return "null"
    return f"`{str(default).lower()}`" if isinstance(default, bool) else f"`{default}`"


def cell(text: str) -> str:
    """Escape text for a table."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
