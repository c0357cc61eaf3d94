"""Serves section B: genuine files to start from, checksums made right over content that is not, and the process that opens files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from faults.programme import child_environment

BEFORE_DIGEST = '{"__metadata__":{"inchworm":"{\\"sha256\\": \\"'


def make_genuine(directory: Path) -> Path:
    """A directory with a small run (runs/good: config, checkpoints, policy, metrics) and a rollout of it, made by the library itself."""
    from inchworm.cli.main import main

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
    """A tensor file taken apart: the tensors' layout, the entry of ours, the data."""
    length = int.from_bytes(blob[:8], "little")
    layout = json.loads(blob[8 : 8 + length])
    entry = json.loads(layout.pop("__metadata__")["inchworm"])
    return layout, entry, blob[8 + length :]


def signed(text: str, data: bytes = b"") -> bytes:
    """A tensor file with any header text that begins as ours do; the digest, 64 characters after that beginning, is made right."""
    content = text.encode("utf-8", "surrogatepass")
    blob = struct.pack("<Q", len(content)) + content + data
    at = 8 + len(BEFORE_DIGEST)
    blank = blob[:at] + b"0" * 64 + blob[at + 64 :]
    return blank[:at] + hashlib.sha256(blank).hexdigest().encode() + blank[at + 64 :]


def tensor_file(layout: dict[str, Any], entry: dict[str, Any], data: bytes) -> bytes:
    """The reverse of `tensor_parts`, with a right digest, whatever is in them."""
    entry = {"sha256": "0" * 64, **{name: value for name, value in entry.items() if name != "sha256"}}
    header = {"__metadata__": {"inchworm": json.dumps(entry)}, **layout}
    return signed(json.dumps(header, separators=(",", ":")), data)


def sign_checkpoint(directory: Path) -> None:
    """Make a checkpoint's manifest say what its files are, whatever they are."""
    from inchworm.run.checkpoint import digest, manifest_text

    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())["manifest"]
    manifest["files"] = {name: digest((directory / name).read_bytes()) for name in manifest["files"]}
    manifest.pop("arrays", None)
    path.write_text(manifest_text(manifest))


def newest_checkpoint(run: Path) -> Path:
    """The last one of a run."""
    return sorted(path for path in (run / "checkpoints").iterdir() if path.name.startswith("step-"))[-1]


class Opener:
    """The process that opens hostile files; see `hostile_child`."""

    def __init__(self) -> None:
        environment = child_environment(PYTHONDONTWRITEBYTECODE="1")
        command = [sys.executable, "-m", "faults.hostile_child"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)

    def open(self, job: dict[str, Any]) -> dict[str, Any]:
        """What came of one job; the child bounds its time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return dict(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def opener() -> Iterator[Opener]:
    """An opener that is ended whatever happens."""
    made = Opener()
    try:
        yield made
    finally:
        made.close()


def fresh_run(genuine: Path, sandbox: Path) -> Path:
    """A copy of the genuine run in a sandbox of its own."""
    shutil.copytree(genuine / "runs", sandbox / "runs")
    return sandbox / "runs" / "good"
