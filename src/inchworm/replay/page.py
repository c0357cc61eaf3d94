"""A replay as one HTML page that needs nothing from outside. Serves `inchworm replay`.

Nothing from the file becomes markup: the data lie in the page as JSON that no parser of HTML can leave, and the script shows them as text
alone. The page's own policy lets exactly its script and its style run, by their hashes, and forbids every connection.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from inchworm.replay.format import check_replay

MARK = "<!-- inchworm replay -->"
"""In the first line of every page, so that a command knows whose page it replaces."""

_HIDDEN = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
_EXACT_IN_JAVASCRIPT = 2**53


def replay_page(replay: Mapping[str, Any]) -> str:
    """The page for a replay, checked first: whoever opens it sees the game, offline."""
    data = check_replay(dict(replay))
    template, style, script = (files("inchworm.replay").joinpath(name).read_text(encoding="utf-8") for name in _PARTS)
    parts = {
        "mark": MARK,
        "style": style,
        "script": script,
        "style-hash": _hash(style),
        "script-hash": _hash(script),
        "data": embedded({**data, "meta": _shown(data["meta"])}),
    }
    # In one pass, so that nothing inside a part is taken for a place to fill.
    return re.sub(r"\{\{([a-z-]+)\}\}", lambda match: parts[match.group(1)], template)


_PARTS = ("page.html", "page.css", "page.js")


def embedded(data: Any) -> str:
    """JSON that can stand in a script element: ASCII alone, and nothing that ends the element or begins a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&]", lambda match: _HIDDEN[match.group()], text)


def _hash(text: str) -> str:
    """What a Content-Security-Policy calls an inline element by."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _shown(value: Any) -> Any:
    """Plain data in which whole numbers that JavaScript would round, as it does large seeds, are text."""
    if type(value) is dict:
        return {name: _shown(inner) for name, inner in value.items()}
    if type(value) is list:
        return [_shown(inner) for inner in value]
    return str(value) if type(value) is int and abs(value) > _EXACT_IN_JAVASCRIPT else value
