"""Serves B1: what other programs would run or choke on, as bytes. Every piece of code in them touches the canary, and nothing else."""

from __future__ import annotations

import functools
import gzip
import io
import marshal
import os
import pickle
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np


class Touch:
    """Pickled, it becomes a call that makes the canary."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._canary}",)


@functools.cache
def payloads(canary: Path) -> dict[str, bytes]:
    """Name -> bytes of a file that is none of ours."""
    evil = Touch(canary)
    code = f"open({str(canary)!r}, 'w').close()"
    return {
        "pickle, protocol 0": pickle.dumps(evil, 0),
        "pickle, protocol 2": pickle.dumps({"state_dict": evil}, 2),
        "pickle, protocol 5": pickle.dumps([evil], 5),
        "two pickles in a row": pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps(evil, 2),  # early torch
        "torch zip": _zip({"archive/data.pkl": pickle.dumps(evil, 2), "archive/version": b"3\n", "archive/byteorder": b"big"}),
        "torch tar": _tar({name: pickle.dumps(evil, 2) for name in ("sys_info", "pickle", "storages", "tensors")}),
        "npz of objects": _npz(evil),
        "npy of objects": _npy(evil),
        "npz of big-endian numbers": _npz(np.arange(3, dtype=">f8")),
        "compressed pickle": zlib.compress(pickle.dumps(evil)),
        "zip with names that climb": _zip({"../../canary": b"x", "/tmp/canary": b"x", "..\\canary": b"x", "a\0b": b"x"}),
        "tar with names that climb": _tar({"../../canary": b"x", "/tmp/canary": b"x"}),
        "zip bomb": _zip({"weights": bytes(20_000_000)}),
        "gzip bomb": gzip.compress(bytes(20_000_000)),
        "byte code": b"\xa7\x0d\x0d\x0a" + bytes(12) + marshal.dumps(compile(code, "canary", "exec")),
        "Python": f"import os\n{code}\n".encode(),
        "shell": f"#!/bin/sh\ntouch {canary}\n".encode(),
        "XML with entities in entities": _entities(),
        "HTML": f"<script>fetch('http://127.0.0.1:9/{canary}')</script>".encode(),
        "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(512),
        "nothing": b"",
        "seven bytes": b"\x01" * 7,
        "header of 100 MB, claimed": struct.pack("<Q", 100_000_000) + b'{"__metadata__":{' + bytes(100),
        "header of 2^63, claimed": struct.pack("<Q", 2**63) + b"{}",
        "header of 10 MB of brackets": struct.pack("<Q", 10_000_000) + b"[" * 10_000_000,
    }


def _zip(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def _tar(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def _npz(value: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, weights=value if isinstance(value, np.ndarray) else np.array([value], object))
    return file.getvalue()


def _npy(value: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([value], object), allow_pickle=True)
    return file.getvalue()


def _entities() -> bytes:
    lines = ['<!ENTITY a0 "canary">'] + [f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 10)]
    return ("<!DOCTYPE x [" + "".join(lines) + "]><x>&a9;</x>").encode()
