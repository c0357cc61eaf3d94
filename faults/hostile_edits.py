"""Serves B2: changes at random, by bytes and by meaning."""

from __future__ import annotations

import copy
import random
from typing import Any

VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1,
    2**31,
    2**63,
    10**30,
    0.5,
    1e308,
    "",
    "nan",
    "inf",
    "os.system",
    "\0",
    [],
    [[]],
    {},
    {"kind": "Box"},
    {"array": "x"},
    {"float": "x"},
    {"dict": {"a": 1}},
    {"list": [1]},
    {"tuple": []},
    [1, 2],
    ["a"],
    "float32",
    [0, 0],
    [2**40, 0],
)
SNIPPETS = (
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b'"',
    b"null",
    b"-",
    b"1e999",
    b"NaN",
    b"\\u0000",
    b"\xff",
    b"\0" * 8,
    b"[[[[",
    b"9" * 40,
    b"!!",
    b"&a",
    b"*a",
    b"\n",
    b"  ",
    b"? ",
)


def edit_bytes(blob: bytes, rng: random.Random) -> bytes:
    """One to three edits: a bit, a byte, a piece taken out, doubled, moved, or put in."""
    for _ in range(rng.randint(1, 3)):
        at, length = rng.randrange(max(1, len(blob))), rng.choice((1, 1, 2, 8, 64))
        kind = rng.randrange(6)
        if kind == 0 and blob:
            blob = blob[:at] + bytes([blob[at] ^ (1 << rng.randrange(8))]) + blob[at + 1 :]
        elif kind == 1:
            blob = blob[:at] + bytes([rng.randrange(256)]) + blob[at + 1 :]
        elif kind == 2:
            blob = blob[:at] + blob[at + length :]
        elif kind == 3:
            blob = blob[:at] + blob[at : at + length] + blob[at:]
        elif kind == 4:
            blob = blob[:at] + rng.choice(SNIPPETS) + blob[at:]
        else:
            blob = blob[:at] if rng.random() < 0.3 else blob[:at] + bytes(length) + blob[at + length :]
    return blob


def edit_meaning(data: Any, rng: random.Random) -> Any:
    """Plain data with one or two of its values, keys or entries changed."""
    data = copy.deepcopy(data)
    for _ in range(rng.randint(1, 2)):
        place = data
        while isinstance(place, dict | list) and place:
            key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
            inner = place[key]
            if not isinstance(inner, dict | list) or not inner or rng.random() < 0.25:
                _change(place, key, rng)
                break
            place = inner
    return data


def _change(place: Any, key: Any, rng: random.Random) -> None:
    kind = rng.randrange(4)
    if kind == 0:
        del place[key]
    elif kind == 1 and isinstance(place, dict):
        place[rng.choice(("", "x", "__class__", "0"))] = place.pop(key)
    elif kind == 2 and isinstance(place, list):
        place.extend(place[:3])
    else:
        place[key] = copy.deepcopy(rng.choice(VALUES))
