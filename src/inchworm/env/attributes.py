"""Serves `vector_state.py`: the attributes of an object that hold data, taken out as plain data and arrays, and put back.

What is put back may come from a file, so it can neither choose a name nor a kind: an attribute gets what it already is.
"""

from __future__ import annotations

import copy as copying
import enum
import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from inchworm.core.errors import EnvError
from inchworm.core.seeding import restore_stream, stream_state

_FIXED = (
    gym.Space,
    gym.envs.registration.EnvSpec,
    enum.Enum,
    functools.partial,
    np.dtype,
    np.ufunc,
    type,
    types.BuiltinFunctionType,
    types.FunctionType,
    types.MethodType,
    types.ModuleType,
)
"""What an attribute may hold besides data: things that steps do not change."""

_DESCRIPTIONS = ("metadata", "_metadata", "_saved_kwargs")
"""Attributes by which Gymnasium describes an environment; no step changes them."""

Packed = Mapping[str, Any]
"""{kind: value}, the kind being array, number, stream or plain."""


def data_of(part: Any) -> dict[str, Any]:
    """The attributes that hold data."""
    return {name: value for name, value in _attributes(part).items() if _is_data(value)}


def strangers_of(part: Any) -> dict[str, Any]:
    """The attributes that hold neither data nor things that steps do not change."""
    return {name: value for name, value in _attributes(part).items() if not _is_data(value) and not isinstance(value, _FIXED)}


def _attributes(part: Any) -> dict[str, Any]:
    left_out = (*_DESCRIPTIONS, "env") if isinstance(part, gym.vector.VectorWrapper) else _DESCRIPTIONS
    return {name: value for name, value in vars(part).items() if name not in left_out}


def _is_data(value: Any) -> bool:
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind in "biuf" and value.dtype.itemsize <= 8
    if isinstance(value, np.random.Generator):
        return type(value.bit_generator) is np.random.PCG64
    return _is_plain(value)


def _is_plain(value: Any) -> bool:
    """Whether JSON keeps it: exact types, because a subclass may hold more than its value."""
    if value is None or type(value) in (bool, int, float, str):
        return True
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return type(value) is dict and all(type(key) is str and _is_plain(item) for key, item in value.items())


def pack(value: Any) -> dict[str, Any]:
    """Data with its kind, as a copy."""
    return copying.deepcopy(_labelled(value))


def _labelled(value: Any) -> dict[str, Any]:
    if isinstance(value, np.ndarray):
        return {"array": value}
    if isinstance(value, np.generic):
        return {"number": np.asarray(value)}
    if isinstance(value, np.random.Generator):
        return {"stream": stream_state(value)}
    return {"plain": value}


def unpack(packed: Packed) -> Any:
    """The data that `pack` took, as a copy."""
    ((kind, value),) = packed.items()
    if kind == "stream":
        return restore_stream(value)
    return np.array(value)[()] if kind == "number" else copying.deepcopy(value)


def check_fits(name: str, present: Any, packed: Packed) -> None:
    """Refuse data that is not what the attribute holds: a number where a number is, an array of that shape where an array is, and so on."""
    form, now = _form(packed), _form(_labelled(present))
    comes_and_goes = None in (form, now) and "stream" not in (*(form or ()), *(now or ()))
    if form != now and not comes_and_goes:
        raise EnvError(f"the attribute {name!r} is {type(present).__name__} here, but what was saved of it is {form[0] if form else None}")


def _form(packed: Packed) -> tuple[Any, ...] | None:
    """What must not change; None for None, which comes and goes."""
    ((kind, value),) = packed.items()
    if kind == "array":
        return (kind, str(value.dtype), value.shape)
    if kind == "plain" and value is None:
        return None
    if kind == "number" and np.shape(value) != ():
        return ("no number",)
    return ("number",) if kind == "number" or isinstance(value, bool | int | float) else (kind, type(value).__name__)


def fill(pairs: Sequence[tuple[Any, Packed]]) -> None:
    """Put streams back, and arrays, in place, because other attributes may look at the same memory.

    Two that are one array here, but were not when they were saved, part: the second is left as it is, to get memory of its own.
    """
    filled: list[tuple[np.ndarray, np.ndarray]] = []
    for present, packed in pairs:
        ((kind, value),) = packed.items()
        if not _is_data(present) or _form(_labelled(present)) != _form(packed):
            continue
        if kind == "stream":
            present.bit_generator.state = restore_stream(value).bit_generator.state
        if kind != "array" or not present.flags.writeable:
            continue
        shared = [(array, saved) for array, saved in filled if np.may_share_memory(array, present)]
        present[...] = value
        if all(array.tobytes() == saved.tobytes() for array, saved in shared):
            filled.append((present, value))
        for array, saved in shared:
            array[...] = saved


def same_data(present: Any, packed: Packed) -> bool:
    """Whether an attribute holds these bits."""
    if not _is_data(present):
        return False
    ((kind, value),), ((known, saved),) = _labelled(present).items(), packed.items()
    if kind != known:
        return False
    if kind in ("array", "number"):
        return (value.dtype, value.shape, value.tobytes()) == (saved.dtype, saved.shape, saved.tobytes())
    return bool(value == saved)
