"""One format for rollouts, policies and checkpoints: a safetensors file that proves itself whole. Serves every step that saves.

The file's one metadata entry is JSON: the SHA-256 of the whole file with that digest's own digits as zeros, then format, kind,
version and a header of plain data. Whatever is damaged is noticed. Nothing is unpickled, and no file stays mapped after reading.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from inchworm.errors import CorruptFileError

TEMPORARY = ".tmp-"
"""Names of files and directories that are not yet whole begin like this."""

_ENTRY = "inchworm"
_NO_DIGEST = b"0" * 64
_BEFORE_DIGEST = b'{"__metadata__":{"inchworm":"{\\"sha256\\": \\"'  # the first bytes of the header, so the digest has one place
_DIGEST_AT = 8 + len(_BEFORE_DIGEST)
_DTYPES = {
    "bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "uint8": "U8", "uint16": "U16", "uint32": "U32",
    "uint64": "U64", "float16": "F16", "float32": "F32", "float64": "F64",
}  # fmt: skip


def write_tensor_file(path: str | Path, arrays: Mapping[str, np.ndarray], *, kind: str, version: int, header: Mapping[str, Any]) -> Path:
    """Write named arrays and a header of plain data to one file, whole or not at all. Equal content makes equal bytes."""
    checked = {name: _storable(name, arrays[name]) for name in sorted(arrays)}
    entry = {"sha256": _NO_DIGEST.decode(), "format": "inchworm", "kind": kind, "version": version, "header": dict(header)}
    blob = memoryview(save(checked, {_ENTRY: json.dumps(entry, allow_nan=False)}))
    if blob[8:_DIGEST_AT] != _BEFORE_DIGEST:
        raise RuntimeError("this version of safetensors orders its header in another way; install the tested version")
    digest = hashlib.sha256(blob).hexdigest().encode()
    return write_atomically(path, (blob[:_DIGEST_AT], digest, blob[_DIGEST_AT + len(digest) :]))


def _storable(name: str, array: np.ndarray) -> np.ndarray:
    check_key(name, "array name")
    if name == "__metadata__":
        raise ValueError("an array cannot be called __metadata__: safetensors keeps that name for itself")
    if not isinstance(array, np.ndarray) or array.dtype.name not in _DTYPES:
        raise TypeError(f"{name} is {getattr(array, 'dtype', type(array).__name__)}; a file holds NumPy arrays of {', '.join(_DTYPES)}")
    # safetensors reads the memory as it lies: it must lie in order.
    return np.asarray(array, array.dtype.newbyteorder("="), order="C")


def check_key(key: Any, what: str) -> None:
    """Refuse names that a file could not give back unchanged."""
    if not isinstance(key, str) or "\0" in key or (not key.isascii() and key.encode("utf-8", "replace").decode() != key):
        raise TypeError(f"the {what} {key!r} must be text without NUL")


def write_atomically(path: str | Path, content: str | bytes | Sequence[bytes | memoryview]) -> Path:
    """Put a file in place, whole or not at all: write beside it, sync, rename, sync the directory."""
    path = Path(path)
    parts = (content.encode(),) if isinstance(content, str) else (content,) if isinstance(content, bytes) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f"{TEMPORARY}{path.name[:100]}-{uuid.uuid4().hex}"
    try:
        write_synced(temporary, parts)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
    return path


def write_synced(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """A new file whose bytes have reached the disk."""
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


def read_tensor_file(path: str | Path, *, kind: str, max_version: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays and header that `write_tensor_file` wrote. Anything else is refused with `CorruptFileError`."""
    blob = Path(path).read_bytes()
    try:
        layout = _verified_layout(blob)
        header = _checked_entry(layout, kind, max_version)
        arrays = load(blob)
    except (SafetensorError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise CorruptFileError(f"{path} cannot be read: {error}") from None
    return {name: arrays[name] for name in sorted(arrays)}, header


def _verified_layout(blob: bytes) -> dict[str, Any]:
    """safetensors' own header, after the whole file has passed its checksum."""
    length = int.from_bytes(blob[:8], "little")
    if len(blob) < 8 or length > len(blob) - 8:
        raise ValueError(f"its {len(blob)} bytes are too few for the header it claims; it is cut off or no tensor file")
    if blob[8:_DIGEST_AT] != _BEFORE_DIGEST:
        raise ValueError("it is no inchworm file, or its header is damaged")
    after = _DIGEST_AT + len(_NO_DIGEST)
    digest = hashlib.sha256(blob[:_DIGEST_AT])
    digest.update(_NO_DIGEST)
    digest.update(memoryview(blob)[after:])
    if digest.hexdigest().encode() != blob[_DIGEST_AT:after]:
        raise ValueError("its checksum does not match its content; it is damaged")
    return read_json(blob[8 : 8 + length].decode())


def _checked_entry(layout: dict[str, Any], kind: str, max_version: int) -> dict[str, Any]:
    entry = read_json(layout["__metadata__"][_ENTRY])
    found, version, header = entry["kind"], entry["version"], entry["header"]
    if found != kind:
        raise ValueError(f"it is a {found} file, and a {kind} file is needed")
    if type(version) is not int or not 1 <= version <= max_version:
        raise ValueError(
            f"it has version {version} of the {kind} format, and this inchworm reads up to version {max_version}; update inchworm"
        )
    if type(header) is not dict:
        raise ValueError("its header is no mapping")
    for name, tensor in layout.items():
        if name != "__metadata__" and tensor["dtype"] not in _DTYPES.values():
            raise ValueError(f"{name} has the unknown dtype {tensor['dtype']}")
    return header


def read_json(text: str) -> dict[str, Any]:
    """A JSON object, strictly: no doubled keys, no NaN. Raises `ValueError`."""
    data = json.loads(text, object_pairs_hook=_no_doubles, parse_constant=_no_constants)
    if type(data) is not dict:
        raise ValueError("JSON that is no object")
    return data


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("JSON with a key that stands there twice")
    return data


def _no_constants(text: str) -> Any:
    raise ValueError(f"JSON with the number {text}")
