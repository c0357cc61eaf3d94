"""`inchworm config ENV`: the config that `train` would use, as YAML that `train --config` reads, with what each field means."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import sys
import textwrap
import typing
from collections.abc import Sequence
from typing import Any

import yaml

from inchworm.cli.arguments import config_from, parse_over, spelled_out
from inchworm.cli.train import TrainOptions
from inchworm.config import TrainingConfig
from inchworm.presets import PRESETS

PROG = "inchworm config"


def run(arguments: Sequence[str]) -> int:
    """Print the config."""
    arguments = spelled_out(arguments)
    options = parse_over(TrainOptions, arguments, PROG, config_from(TrainOptions, arguments, PROG))
    sys.stdout.write(commented_yaml(options.settings))
    return 0


def commented_yaml(config: TrainingConfig) -> str:
    """The config as YAML, each field with its description."""
    lines = [_origin(config)]
    hints = typing.get_type_hints(TrainingConfig)
    for name, section in config.to_dict().items():
        lines += ["", f"# {inspect.getdoc(hints[name])}", f"{name}:"]
        comments = field_comments(hints[name])
        for key, value in section.items():
            lines.append(textwrap.indent(f"{_entry(key, value)}  # {comments[key]}", "  "))
    return "\n".join(lines) + "\n"


def _origin(config: TrainingConfig) -> str:
    tuned = PRESETS.get(config.env.id)
    if tuned is None:
        return f"# {config.env.id} has no preset: these are the defaults"
    known = f", which reaches {tuned.score}" if tuned.score else ""
    return f"# the preset of {config.env.id}{known}" if config == tuned.config else f"# the preset of {config.env.id}, changed"


def _entry(key: str, value: Any) -> str:
    """`key: value` on one line; the flow style keeps nested values there too."""
    text = yaml.safe_dump({key: value}, default_flow_style=True, sort_keys=False, width=10**6)
    return text.strip()[1:-1]


def field_comments(config: type[Any]) -> dict[str, str]:
    """What stands under each field of a config class, which is where fields are documented."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(config)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    comments = {field.name: "" for field in dataclasses.fields(config)}
    for node, after in itertools.pairwise(body):
        is_field = isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if is_field and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            comments[node.target.id] = " ".join(str(after.value.value).split())  # type: ignore[attr-defined]
    return comments
