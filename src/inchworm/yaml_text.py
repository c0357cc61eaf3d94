"""Plain data from YAML text, strictly. Serves configs, whose files people write by hand and get from others."""

from __future__ import annotations

import re
from typing import Any

import yaml


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
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        doubled = [key for index, key in enumerate(keys) if key in keys[:index]]
        if doubled:
            raise yaml.constructor.ConstructorError(None, None, f"the key {doubled[0]!r} stands there twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+$"), list("-+0123456789.")
)


def load_yaml(text: str) -> Any:
    """Plain data from YAML text; doubled keys, aliases and anything that is not plain data are refused with `YAMLError`."""
    try:
        return _Loader(text).get_single_data()
    except (ValueError, KeyError, AttributeError, RecursionError) as error:  # PyYAML lets these of Python's own through
        raise yaml.YAMLError(f"no plain data: {error}") from error
