"""Building blocks of section B: genuine files, payloads, valid checksums over invalid content, and the process that opens files."""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import json
import marshal
import os
import pickle
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np

from faults.programme import child_environment
from inchworm.cli.main import main
from inchworm.run.checkpoint import digest, manifest_text

BEFORE_DIGEST = '{"__metadata__":{"inchworm":"{\\"sha256\\": \\"'


def make_genuine(directory: Path) -> Path:
    """Create a directory with a small run (runs/good: config, checkpoints, policy, metrics) and a rollout of it."""
    directory.mkdir(parents=True, exist_ok=True)
    small = ["--run.directory", str(directory / "runs"), "--run.name", "good", "--backend", "numpy", "--quiet"]
    small += ["--num-envs", "2", "--num-workers", "0", "--ppo.rollout-steps", "8", "--ppo.num-minibatches", "2", "--ppo.update-epochs", "1"]
    small += ["--total-timesteps", "48", "--evaluation.final-episodes", "0", "--run.checkpoint-interval", "1"]
    small += ["--policy.hidden-sizes", "4", "--policy.normalize-observations"]
    here = Path.cwd()
    os.chdir(directory)
    try:
        for command in (["train", "CartPole-v1", *small], ["collect", "runs/good", "--out", "rollout.safetensors", "--quiet"]):
            if main(command) != 0:
                raise RuntimeError(f"the genuine files could not be made: {command}")
    finally:
        os.chdir(here)
    return directory


def tensor_parts(blob: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Split a tensor file into the layout of its tensors, the inchworm entry and the data."""
    length = int.from_bytes(blob[:8], "little")
    layout = json.loads(blob[8 : 8 + length])
    entry = json.loads(layout.pop("__metadata__")["inchworm"])
    return layout, entry, blob[8 + length :]


def signed(text: str, data: bytes = b"") -> bytes:
    """A tensor file with any header text that begins as usual; its digest, 64 characters after that beginning, is made valid."""
    content = text.encode("utf-8", "surrogatepass")
    blob = struct.pack("<Q", len(content)) + content + data
    at = 8 + len(BEFORE_DIGEST)
    blank = blob[:at] + b"0" * 64 + blob[at + 64 :]
    return blank[:at] + hashlib.sha256(blank).hexdigest().encode() + blank[at + 64 :]


def tensor_file(layout: dict[str, Any], entry: dict[str, Any], data: bytes) -> bytes:
    """The reverse of `tensor_parts`, with a valid digest."""
    entry = {"sha256": "0" * 64, **{name: value for name, value in entry.items() if name != "sha256"}}
    header = {"__metadata__": {"inchworm": json.dumps(entry)}, **layout}
    return signed(json.dumps(header, separators=(",", ":")), data)


def sign_checkpoint(directory: Path) -> None:
    """Make the digests in a checkpoint's manifest match its files."""
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())["manifest"]
    manifest["files"] = {name: digest((directory / name).read_bytes()) for name in manifest["files"]}
    manifest.pop("arrays", None)
    path.write_text(manifest_text(manifest))


def newest_checkpoint(run: Path) -> Path:
    """The newest checkpoint directory of a run."""
    return sorted(path for path in (run / "checkpoints").iterdir() if path.name.startswith("step-"))[-1]


class Opener:
    """The process that opens hostile files; see `hostile_child`."""

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "faults.hostile_child"]
        environment = child_environment(PYTHONDONTWRITEBYTECODE="1")
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)
        return self

    def open(self, job: dict[str, Any]) -> dict[str, Any]:
        """The report of one job; the child bounds its time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return dict(json.loads(self._process.stdout.readline()))

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


class Touch:
    """Pickled, it becomes a call that makes the canary."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._canary}",)


@functools.cache
def payloads(canary: Path) -> dict[str, bytes]:
    """Name -> bytes of a file of another program. All code in them touches the canary and nothing else."""
    evil = Touch(canary)
    code = f"open({str(canary)!r}, 'w').close()"
    entities = ['<!ENTITY a0 "canary">'] + [f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 10)]
    return {
        "pickle, protocol 0": pickle.dumps(evil, 0),
        "pickle, protocol 2": pickle.dumps({"state_dict": evil}, 2),
        "pickle, protocol 5": pickle.dumps([evil], 5),
        "two pickles in a row": pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps(evil, 2),  # early torch
        "torch zip": _zip({"archive/data.pkl": pickle.dumps(evil, 2), "archive/version": b"3\n", "archive/byteorder": b"big"}),
        "torch tar": _tar({name: pickle.dumps(evil, 2) for name in ("sys_info", "pickle", "storages", "tensors")}),
        "npz of objects": _saved(np.savez, weights=np.array([evil], object)),
        "npy of objects": _saved(np.save, np.array([evil], object), allow_pickle=True),
        "npz of big-endian numbers": _saved(np.savez, weights=np.arange(3, dtype=">f8")),
        "compressed pickle": zlib.compress(pickle.dumps(evil)),
        "zip with names that climb": _zip({"../../canary": b"x", "/tmp/canary": b"x", "..\\canary": b"x", "a\0b": b"x"}),
        "tar with names that climb": _tar({"../../canary": b"x", "/tmp/canary": b"x"}),
        "zip bomb": _zip({"weights": bytes(20_000_000)}),
        "gzip bomb": gzip.compress(bytes(20_000_000)),
        "byte code": b"\xa7\x0d\x0d\x0a" + bytes(12) + marshal.dumps(compile(code, "canary", "exec")),
        "Python": f"import os\n{code}\n".encode(),
        "shell": f"#!/bin/sh\ntouch {canary}\n".encode(),
        "XML with entities in entities": ("<!DOCTYPE x [" + "".join(entities) + "]><x>&a9;</x>").encode(),
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


def _saved(save: Callable[..., None], *values: Any, **named: Any) -> bytes:
    file = io.BytesIO()
    save(file, *values, **named)
    return file.getvalue()
