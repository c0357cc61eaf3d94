"""Serves B1: checkpoints, every file of which may be something else, under a manifest that fits."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from faults.hostile_cases import Case, Sandbox, at
from faults.hostile_tools import sign_checkpoint, tensor_parts


def checkpoint_cases() -> Iterator[Case]:
    """Every file of a checkpoint as something else, under a manifest that fits."""
    deep, wide = '{"state":' + "[" * 50_000 + "]" * 50_000 + "}", '{"state":[' + "[]," * 1_500_000 + "[]]}"
    for name, text in {
        "deep": deep,
        "wide": wide,
        "a list": "[]",
        "without state": "{}",
        "doubled": '{"state":1,"state":2}',
        "NaN": '{"state":NaN}',
        "empty": "",
        "text": '{"state":"os.system"}',
        "an unknown node": '{"state":{"object":"os.system"}}',
        "an array twice": '{"state":{"list":[{"array":"x"},{"array":"x"}]}}',
        "a number of 10,000 digits": '{"state":' + "9" * 10_000 + "}",
        "a float of 10^400": '{"state":{"float":1' + "0" * 400 + "}}",
        "not UTF-8": "\udcff",
    }.items():
        yield Case(f"checkpoint: state.json {name}", "checkpoint", lambda box, text=text: _with_file(box, "state.json", text))
    for name, change in {
        "step as text": {"step": "3"},
        "step of another": {"step": 10**6},
        "step -1": {"step": -1},
        "version 99": {"version": 99},
        "version text": {"version": "1"},
        "version true": {"version": [1]},
        "no files": {"files": {}},
        "files as a list": {"files": []},
        "files elsewhere": {"files": {"../../../canary": {"size": 0}}},
        "arrays as text": {"arrays": "os.system"},
    }.items():
        yield Case(f"checkpoint: manifest with {name}", "checkpoint", lambda box, change=change: _with_manifest(box, change))
    for name in ("manifest.json", "state.json", "arrays.safetensors"):
        for what in ("fifo", "/dev/zero", "/dev/stdin", "directory", "missing"):
            yield Case(
                f"checkpoint: {name} is {what}", "checkpoint", lambda box, name=name, what=what: become(box.checkpoint(), name, what)
            )
            yield Case(
                f"checkpoints: newest {name} is {what}",
                "newest checkpoint",
                lambda b, n=name, w=what: str(Path(become(b.checkpoint(), n, w)).parent),
                True,
            )
        yield Case(f"checkpoint: {name} is a link to a good file", "checkpoint", lambda box, name=name: _linked(box, name), True)
    for name, path, value in (
        ("layers of 10^9", "config.hidden_sizes", [10**9] * 3),
        ("a Box of 10^10", "observation_space.shape", [10**10]),
    ):
        yield Case(f"checkpoint's policy: {name}", "checkpoint policy", lambda box, path=path, value=value: _with_spec(box, path, value))


def become(directory: Path, name: str, what: str) -> str:
    """Put something else in a file's place; the directory's path."""
    path = directory / name
    path.unlink(missing_ok=True)
    if what == "fifo":
        os.mkfifo(path)
    elif what == "directory":
        path.mkdir()
    elif what != "missing":
        path.symlink_to(what)
    return str(directory)


def _linked(box: Sandbox, name: str) -> str:
    path = box.checkpoint()
    shutil.move(path / name, box.inside / "elsewhere")
    (path / name).symlink_to(box.inside / "elsewhere")
    return str(path)


def _with_file(box: Sandbox, name: str, text: str) -> str:
    path = box.checkpoint()
    (path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    sign_checkpoint(path)
    return str(path)


def _with_manifest(box: Sandbox, change: dict[str, Any]) -> str:
    from inchworm.run.checkpoint import manifest_text

    path = box.checkpoint()
    manifest = json.loads((path / "manifest.json").read_text())["manifest"]
    (path / "manifest.json").write_text(manifest_text({**manifest, **change}))
    return str(path)


def _with_spec(box: Sandbox, path: str, value: Any) -> str:
    from inchworm.run.checkpoint import TrainingCheckpointer

    known = TrainingCheckpointer(box.inside / "checkpoints")
    weights = TrainingCheckpointer(box.checkpoint().parent).load().state["weights"]
    spec = tensor_parts((box.genuine / "runs/good/policy.safetensors").read_bytes())[1]["header"]["spec"]
    return str(known.save(1, {"spec": at(spec, path, value), "weights": weights, "metadata": {}}))
