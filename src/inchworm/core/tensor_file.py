"""Verified safetensors files, which hold rollouts, policies and checkpoints; trees of arrays and plain data in them; atomic writes.

The file's one metadata entry is JSON: the SHA-256 of the whole file (computed with the digest's own digits as zeros), then format, kind,
version and a header of plain data. Any damage is detected. Nothing is unpickled, and no file stays mapped after reading unless that is
asked for. A checksum protects against accidents, not attacks, so the content is still validated as untrusted data.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import shutil
import stat
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from inchworm.core.errors import CorruptFileError, InchwormError

TEMPORARY = ".tmp-"
"""Prefix of files and directories that are not yet complete."""

JSON_PIECES = 500_000
"""Limit on the values in one JSON text: a few bytes of text can take hundreds in memory. (A rollout of 50,000 episodes has this many.)"""

_ENTRY = "inchworm"
_NO_DIGEST = b"0" * 64
_BEFORE_DIGEST = b'{"__metadata__":{"inchworm":"{\\"sha256\\": \\"'  # the first bytes of the header, so the digest has a fixed position
_DIGEST_AT = 8 + len(_BEFORE_DIGEST)
_DTYPES = {
    "bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "uint8": "U8", "uint16": "U16", "uint32": "U32",
    "uint64": "U64", "float16": "F16", "float32": "F32", "float64": "F64",
}  # fmt: skip


def write_tensor_file(path: str | Path, arrays: Mapping[str, np.ndarray], *, kind: str, version: int, header: Mapping[str, Any]) -> Path:
    """Write named arrays and a header of plain data to one file, completely or not at all. Equal content gives equal bytes."""
    checked = {}
    for name in sorted(arrays):
        array = arrays[name]
        check_key(name, "array name")
        if name == "__metadata__":
            raise ValueError("an array cannot be called __metadata__: safetensors reserves that name")
        if not isinstance(array, np.ndarray) or array.dtype.name not in _DTYPES:
            raise TypeError(f"{name} is {getattr(array, 'dtype', type(array).__name__)}; a file holds NumPy arrays of {', '.join(_DTYPES)}")
        checked[name] = np.asarray(array, array.dtype.newbyteorder("="), order="C")  # safetensors writes the memory as it is
    entry = {"sha256": _NO_DIGEST.decode(), "format": "inchworm", "kind": kind, "version": version, "header": dict(header)}
    text = json.dumps(entry, allow_nan=False)
    if json_pieces(text) > JSON_PIECES:
        raise ValueError(f"the header of {path} has more than {JSON_PIECES:,} values, too many to be read again; save in smaller pieces")
    blob = memoryview(save(checked, {_ENTRY: text}))
    if blob[8:_DIGEST_AT] != _BEFORE_DIGEST:
        raise RuntimeError("this version of safetensors orders its header differently; install the tested version")
    digest = hashlib.sha256(blob).hexdigest().encode()
    return write_atomically(path, (blob[:_DIGEST_AT], digest, blob[_DIGEST_AT + len(digest) :]))


def check_key(key: Any, what: str) -> None:
    """Reject names that a file could not return unchanged."""
    if not isinstance(key, str) or "\0" in key or (not key.isascii() and key.encode("utf-8", "replace").decode() != key):
        raise TypeError(f"the {what} {key!r} must be text without NUL")


def write_atomically(path: str | Path, content: str | bytes | Sequence[bytes | memoryview]) -> Path:
    """Write a file completely or not at all: write a temporary file, sync, rename, sync the directory."""
    path = Path(path)
    parts = (content.encode(),) if isinstance(content, str) else (content,) if isinstance(content, bytes) else content
    temporary = path.parent / f"{TEMPORARY}{path.name[:100]}-{uuid.uuid4().hex}"
    try:
        make_directory(path.parent)
        write_synced(temporary, parts)
        temporary.replace(path)
        sync_directory(path.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):  # errors of writing and syncing do not name the file
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    return path


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents, so that their names survive a power loss."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in missing:
        with suppress(PermissionError):  # a directory that may be entered but not read
            sync_directory(directory.parent)


def remove_temporaries(directory: Path) -> None:
    """Remove what a killed writer left. Call it only while no other process can be writing here."""
    for path in directory.glob(f"{TEMPORARY}*"):
        if not path.is_dir() or path.is_symlink():
            path.unlink(missing_ok=True)
            continue
        try:
            shutil.rmtree(path)
        except OSError:
            shutil.rmtree(path, ignore_errors=True)  # a second try after a transient error; otherwise the next writer removes it


def write_synced(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """Write a new file and sync it to disk."""
    with path.open("xb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make renames in a directory survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_bytes(path: str | Path, *, limit: int | None = None) -> bytes:
    """Read a regular file of at most `limit` bytes. Pipes and devices are rejected: they could block, or never end."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", closefd=True) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise CorruptFileError(f"{path} is not a regular file")
        if limit is not None and status.st_size > limit:
            raise CorruptFileError(f"{path} has {status.st_size:,} bytes, more than the limit of {limit:,}")
        return file.read() if limit is None else file.read(limit)


@contextmanager
def untrusted(what: str, *, keep: tuple[type[InchwormError], ...] = ()) -> Iterator[None]:
    """Turn any error caused by file data of a wrong name, type, shape or range into a `CorruptFileError`.

    Errors of the types in `keep` pass unchanged.
    """
    try:
        yield
    except keep:
        raise
    except (InchwormError, ValueError, SafetensorError) as error:  # these have a readable message
        raise CorruptFileError(f"{what}: {error}") from None
    except (TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, RecursionError) as error:
        raise CorruptFileError(f"{what}: {type(error).__name__} {error}") from None


def map_bytes(path: str | Path) -> memoryview:
    """Map a regular file into memory, read-only; it is paged in as it is read, and unmapped when no view of it is left."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CorruptFileError(f"{path} is not a regular file")
        if not status.st_size:
            raise CorruptFileError(f"{path} cannot be read: it is empty")
        return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
    finally:
        os.close(descriptor)


def read_tensor_file(
    path: str | Path, *, kind: str, max_version: int, mapped: bool | None = None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read the arrays and header that `write_tensor_file` wrote; raises `CorruptFileError` for anything else.

    By default the arrays are copies of their own. With `mapped` they are read-only views: of the file's bytes, which are then in memory
    once (False), or of the mapped file (True).
    """
    blob = map_bytes(path) if mapped else read_bytes(path)
    with untrusted(f"{path} cannot be read"):
        layout = _verified_layout(blob)
        entry = read_json(layout["__metadata__"][_ENTRY])
        found, version, header = entry["kind"], entry["version"], entry["header"]
        if found != kind:
            raise ValueError(f"it is a {found} file, not a {kind} file")
        if type(version) is not int or not 1 <= version <= max_version:
            raise ValueError(
                f"it has version {version} of the {kind} format, and this inchworm reads up to version {max_version}; update inchworm"
            )
        if type(header) is not dict:
            raise ValueError("header is not a mapping")
        for name, tensor in layout.items():
            if name != "__metadata__" and tensor["dtype"] not in _DTYPES.values():
                raise ValueError(f"{name} has the unknown dtype {tensor['dtype']}")
        arrays = load(bytes(blob)) if mapped is None else _views(blob, layout)
        for name, array in arrays.items():
            if array.dtype == np.bool_ and (array.view(np.uint8) > 1).any():
                raise ValueError(f"{name} holds a byte that is neither true nor false")
    return {name: arrays[name] for name in sorted(arrays)}, header


def _views(blob: bytes | memoryview, layout: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays as views of the file, which they must fill without gaps and overlaps."""
    start = end = 8 + int.from_bytes(blob[:8], "little")
    names = {name: np.dtype(dtype) for dtype, name in _DTYPES.items()}
    arrays = {}
    for name, tensor in sorted(((name, tensor) for name, tensor in layout.items() if name != "__metadata__"), key=_place):
        (first, last), shape, dtype = tensor["data_offsets"], tensor["shape"], names[tensor["dtype"]]
        if any(type(number) is not int or number < 0 for number in (first, last, *shape)):
            raise ValueError(f"{name} has the offsets {first}, {last} and the shape {shape!s:.80}")
        if start + first != end or last - first != math.prod(shape) * dtype.itemsize or start + last > len(blob):
            raise ValueError(f"the bytes {first} to {last} of {name} do not fit {dtype}{shape!s:.80}, what is before it, or the file")
        array: np.ndarray = np.ndarray(tuple(shape), dtype, blob, end)
        arrays[name] = array if array.flags.aligned else array.copy()
        end = start + last
    if end != len(blob):
        raise ValueError(f"{len(blob) - end} bytes at its end belong to no array")
    return arrays


def _place(named: tuple[str, Mapping[str, Any]]) -> Any:
    """Where a tensor lies in the file; empty ones first where several begin at one place."""
    return tuple(named[1]["data_offsets"])


def _verified_layout(blob: bytes | memoryview) -> dict[str, Any]:
    """Verify the checksum of the whole file and return the header of safetensors."""
    length = int.from_bytes(blob[:8], "little")
    if len(blob) < 8 or length > len(blob) - 8:
        raise ValueError(f"its {len(blob)} bytes are too few for its header; it is truncated or not a tensor file")
    if blob[8:_DIGEST_AT] != _BEFORE_DIGEST:
        raise ValueError("not an inchworm file, or its header is damaged")
    after = _DIGEST_AT + len(_NO_DIGEST)
    digest = hashlib.sha256(blob[:_DIGEST_AT])
    digest.update(_NO_DIGEST)
    digest.update(memoryview(blob)[after:])
    if digest.hexdigest().encode() != blob[_DIGEST_AT:after]:
        raise ValueError("its checksum does not match its content; it is damaged")
    return read_json(bytes(blob[8 : 8 + length]).decode())


def read_json(text: str) -> dict[str, Any]:
    """Parse a JSON object strictly: no duplicate keys, no NaN, bounded size. Raises `ValueError`."""

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data = dict(pairs)
        if len(data) != len(pairs):
            raise ValueError("duplicate key in JSON")
        return data

    def no_constants(text: str) -> Any:
        raise ValueError(f"JSON contains the number {text}")

    if json_pieces(text) > JSON_PIECES:
        raise ValueError(f"JSON with more than {JSON_PIECES:,} values")
    data = json.loads(text, object_pairs_hook=without_duplicates, parse_constant=no_constants)
    if type(data) is not dict:
        raise ValueError("JSON is not an object")
    return data


def json_pieces(text: str) -> int:
    """Upper bound on the number of values in a JSON text, without parsing it."""
    return text.count(",") + text.count("[") + text.count("{")


_SCALARS = (bool, int, float, str)


def flatten_tree(tree: Any) -> tuple[dict[str, np.ndarray], Any]:
    """A tree of dicts, tuples, lists, arrays and plain values as (named arrays, the rest as JSON data)."""
    arrays: dict[str, np.ndarray] = {}
    return arrays, _flatten(tree, (), arrays)


def _flatten(tree: Any, path: tuple[str, ...], arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(tree, np.generic):
        tree = tree.item()
    if isinstance(tree, Mapping):
        for key in tree:
            check_key(key, f"key of {'/'.join(path) or 'the tree'}")
        return {"dict": {key: _flatten(value, (*path, key), arrays) for key, value in tree.items()}}
    if isinstance(tree, tuple | list):
        kind = "tuple" if isinstance(tree, tuple) else "list"
        return {kind: [_flatten(value, (*path, str(index)), arrays) for index, value in enumerate(tree)]}
    if isinstance(tree, np.ndarray):
        name = "/".join(path) or "array"
        while name in arrays or name == "__metadata__":  # keys that contain a slash can make the same name twice
            name += "'"
        arrays[name] = tree
        return {"array": name}
    if isinstance(tree, float) and not math.isfinite(tree):
        return {"float": repr(tree)}
    if tree is None or isinstance(tree, _SCALARS):
        return tree
    raise TypeError(
        f"{'/'.join(path) or 'the tree'} is {type(tree).__name__}; a file holds dicts, tuples, lists, arrays, numbers, text and None"
    )


def unflatten_tree(arrays: Mapping[str, np.ndarray], structure: Any) -> Any:
    """The tree that `flatten_tree` took apart. Every array must be used once; what does not fit is a `CorruptFileError`."""
    left = dict(arrays)
    try:
        tree = _unflatten(structure, left)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CorruptFileError(f"the structure does not fit the arrays: {type(error).__name__} {error}") from None
    if left:
        raise CorruptFileError(f"the structure does not name the arrays {sorted(left)}")
    return tree


def _unflatten(node: Any, left: dict[str, np.ndarray]) -> Any:
    if node is None or isinstance(node, _SCALARS):
        return node
    ((kind, content),) = node.items()
    if kind == "dict":
        return {key: _unflatten(value, left) for key, value in content.items()}
    if kind in ("tuple", "list"):
        items = [_unflatten(value, left) for value in content]
        return tuple(items) if kind == "tuple" else items
    if kind == "array":
        return left.pop(content)
    if kind == "float":
        return float(content)
    raise ValueError(f"unknown node {kind!r}")
