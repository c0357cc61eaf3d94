"""Plain data from YAML text, strictly. Serves configs, whose files people write by hand and get from others."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

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
