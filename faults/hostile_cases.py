"""Crafted policies, rollouts and checkpoints for B1, one case each. Checksums are valid: only the content is hostile."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.hostile_tools import newest_checkpoint, payloads, sign_checkpoint, signed, tensor_file, tensor_parts
from inchworm.run.checkpoint import TrainingCheckpointer, manifest_text


@dataclass(frozen=True)
class Sandbox:
    """The directories of a case: `inside` may be written to, `victim` next to it must not change."""

    inside: Path
    victim: Path
    canary: Path
    genuine: Path

    def put(self, name: str, content: bytes | str) -> str:
        """Write a file in the sandbox and return its path. A surrogate such as \\udcff stands for one byte that is not UTF-8."""
        path = self.inside / name
        path.write_bytes(content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content)
        return str(path)

    def run(self) -> Path:
        """Copy the genuine run."""
        shutil.copytree(self.genuine / "runs", self.inside / "runs")
        return self.inside / "runs" / "good"

    def checkpoint(self) -> Path:
        """The newest checkpoint of a copy of the genuine run."""
        return newest_checkpoint(self.run())


@dataclass(frozen=True)
class Case:
    """One crafted input: its loader, and how to create it. `make(box, *given)` returns its path, or the arguments of a command."""

    name: str
    loader: str
    make: Callable[..., Any]
    given: tuple[Any, ...] = ()
    may_load: bool = False
    """Whether opening it may succeed because nothing in it is wrong; it must then do no harm."""


@dataclass
class Parts:
    """A tensor file in parts that a case changes."""

    layout: dict[str, Any]
    entry: dict[str, Any]
    data: bytes

    def set_header(self, path: str, value: Any) -> None:
        set_at(self.entry, f"header.{path}", value)

    def set_entry(self, key: str, value: Any) -> None:
        self.entry[key] = value

    def set_tensor(self, key: str, value: Any) -> None:
        """Change a field of the first tensor that is not a number."""
        self.layout[self.first()][key] = value

    def rename(self, name: str) -> None:
        self.layout[name] = self.layout.pop(self.first())

    def overlay(self) -> None:
        """Let all tensors have the same place."""
        self.layout = dict.fromkeys(self.layout, self.layout[self.first()])

    def first(self) -> str:
        return next(name for name, tensor in self.layout.items() if tensor["shape"])

    def patch(self, name: str, offset: int, new: bytes) -> None:
        """Overwrite bytes of a tensor."""
        begin = self.layout[name]["data_offsets"][0] + offset
        self.data = self.data[:begin] + new + self.data[begin + len(new) :]

    def set_data(self, change: Callable[[bytes], bytes]) -> None:
        self.data = change(self.data)

    def header_text(self, text: str) -> bytes:
        """The file with JSON text of any kind in the entry's header."""
        mine = json.dumps({"sha256": "0" * 64, **{k: v for k, v in self.entry.items() if k not in ("sha256", "header")}, "header": "@"})
        inner = json.dumps(mine.replace('"@"', f'{{"spec": {text}, "fields": {text}}}'), ensure_ascii=False)
        return signed('{"__metadata__":{"inchworm":' + inner + "}," + json.dumps(self.layout)[1:], self.data)

    def layout_text(self, text: str) -> bytes:
        """The file with JSON text of any kind in its layout."""
        inner = json.dumps(json.dumps({"sha256": "0" * 64, **{k: v for k, v in self.entry.items() if k != "sha256"}}))
        return signed('{"__metadata__":{"inchworm":' + inner + '},"x":' + text + "," + json.dumps(self.layout)[1:], self.data)


def edited(name: str, loader: str, change: Callable[..., bytes | None], *given: Any, kind: str = "", may_load: bool = False) -> Case:
    """A case that calls a method of `Parts` on the genuine policy or rollout, whichever `kind` names (default: as the loader)."""

    def make(box: Sandbox) -> str:
        path = "rollout.safetensors" if (kind or loader) == "rollout" else "runs/good/policy.safetensors"
        parts = Parts(*tensor_parts((box.genuine / path).read_bytes()))
        blob = change(parts, *given)
        return box.put("x.safetensors", tensor_file(parts.layout, parts.entry, parts.data) if blob is None else blob)

    return Case(f"{loader}: {name}", loader, make, may_load=may_load)


def set_at(data: Any, path: str, value: Any) -> Any:
    """Set the value at a path such as "config.kind" and return the data; `...` removes the key."""
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place = data
    for key in way:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return data


def put_payload(box: Sandbox, file: str, name: str) -> str:
    return box.put(file, payloads(box.canary)[name])


def foreign_cases() -> Iterator[Case]:
    """Files of other programs under our file names."""
    extensions = ("safetensors", "pt", "pkl", "npz", "ckpt", "bin", "yaml")
    for number, name in enumerate(payloads(Path("x"))):
        for loader in ("policy", "rollout", "config"):
            yield Case(f"{name} as a {loader}", loader, put_payload, (f"file.{extensions[number % len(extensions)]}", name))
        yield Case(f"{name} as a checkpoint's arrays", "checkpoint", _with_file, ("arrays.safetensors", None, name))


def tensor_cases(kind: str) -> Iterator[Case]:
    """Abuse of the format itself, with a valid checksum."""
    for dtype in ("BF16", "F8_E4M3", "object", "O", "V8", "<U8", ">f4", "pickle", None, 3, ["F32"], "os.system"):
        yield edited(f"dtype {dtype!r}", kind, Parts.set_tensor, "dtype", dtype)
    for shape in ([-1], [2**63], [2**32, 2**32], [2.5], "4", None, [[4]], [1] * 100, {"a": 1}, [10**30]):
        yield edited(f"shape {str(shape)[:30]}", kind, Parts.set_tensor, "shape", shape)
    for offsets in ([0, 2**40], [-8, 0], [8, 0], [0], None, "all", [0.5, 1], [0, 10**30], [0, 4]):
        yield edited(f"offsets {offsets}", kind, Parts.set_tensor, "data_offsets", offsets)
    yield edited("all tensors at one place", kind, Parts.overlay)
    for name in ("../../canary", "/etc/passwd", "a\0b", "\ud800", "__class__", "", "x" * 100_000):
        yield edited(f"a tensor called {name[:20]!r}", kind, Parts.rename, name)
    for key, value in {"kind": "os.system", "version": True, "header": []}.items():
        yield edited(f"{key} {value!r}", kind, Parts.set_entry, key, value)
    for version in (0, -1, 3, 10**9, "1", 1.0, None):
        yield edited(f"version {version!r}", kind, Parts.set_entry, "version", version)
    yield edited("an empty header", kind, Parts.set_entry, "header", {})
    classes = {"__class__": "os.system", "__reduce__": ["os.system", "touch canary"]}
    yield edited("classes in the header", kind, Parts.set_entry, "header", classes)
    yield edited("data after the end", kind, Parts.set_data, lambda data: data + b"more")
    yield edited("data cut off", kind, Parts.set_data, lambda data: data[:-4])
    yield edited("no data", kind, Parts.set_data, lambda data: b"")
    big = {"deep": "[" * 100_000 + "]" * 100_000, "wide": "[" + "[]," * 1_500_000 + "[]]"}
    texts = {"NaN": "NaN", "a number of 10,000 digits": "9" * 10_000, "1e999": "1e999", "cut off": "[1,", "not UTF-8": '"\udcff"'}
    for name, text in {**big, **texts}.items():
        yield edited(f"header {name}", kind, Parts.header_text, text)
    for name, text in {**big, "doubled": '{"a":1},"x":{"a":2}'}.items():
        yield edited(f"layout {name}", kind, Parts.layout_text, text)


def policy_cases() -> Iterator[Case]:
    """Specs that ask for too much, or for something other than a policy."""
    nested: Any = {"kind": "Discrete", "n": 2, "start": 0}
    for _ in range(300):
        nested = {"kind": "Tuple", "spaces": [nested]}
    image = {"kind": "Box", "shape": [3, 100_000, 100_000], "dtype": "uint8", "low": 0, "high": 255}
    box = {"kind": "Box", "shape": [4], "dtype": "float32", "low": "-inf", "high": "inf"}
    changes: dict[str, tuple[str, Any]] = {
        "layers of 10^9": ("config.hidden_sizes", [10**9] * 3),
        "layers of 10^30": ("config.hidden_sizes", [10**30]),
        "100,000 layers": ("config.hidden_sizes", [4] * 100_000),
        "layers as text": ("config.hidden_sizes", "64"),
        "an unknown kind": ("config.kind", "os.system"),
        "an unknown option": ("config.__class__", "os.system"),
        "config as a list": ("config", []),
        "no config": ("config", ...),
        "no spaces": ("observation_space", ...),
        "an unknown space": ("observation_space.kind", "gymnasium.spaces.Text"),
        "a space that is a list": ("observation_space", [1]),
        "a Box of 10^10": ("observation_space.shape", [10**10]),
        "a Box of 2^60": ("observation_space.shape", [2] * 60),
        "a Box of -4": ("observation_space.shape", [-4]),
        "a Box of 4.0": ("observation_space.shape", [4.0]),
        "a Box of rank 100": ("observation_space.shape", [1] * 100),
        "a Box of objects": ("observation_space.dtype", "object"),
        "a Box of records": ("observation_space.dtype", "f4,f4"),
        "a Box of dates": ("observation_space.dtype", "datetime64[s]"),
        "a Box of big-endian": ("observation_space.dtype", ">f4"),
        "a Box of a dict": ("observation_space.dtype", {"names": ["a"]}),
        "bounds of NaN": ("observation_space.low", "nan"),
        "bounds of code": ("observation_space.low", "__import__('os').system('touch canary')"),
        "bounds of other length": ("observation_space.low", [0.0] * 7),
        "bounds as a dict": ("observation_space.high", {"a": 1}),
        "bounds the wrong way": ("observation_space.low", 5e30),
        "a Discrete of 10^15": ("action_space.n", 10**15),
        "a Discrete of -1": ("action_space.n", -1),
        "a Discrete of 2.5": ("action_space.n", 2.5),
        "a Discrete from 10^30": ("action_space.start", 10**30),
        "a MultiBinary of 10^12": ("action_space", {"kind": "MultiBinary", "n": 10**12}),
        "a MultiBinary of [10^6, 10^6]": ("action_space", {"kind": "MultiBinary", "n": [10**6, 10**6]}),
        "a MultiDiscrete of 10^15": ("action_space", {"kind": "MultiDiscrete", "nvec": [10**15], "start": [0]}),
        "a ragged MultiDiscrete": ("action_space", {"kind": "MultiDiscrete", "nvec": [[2], [2, 3]], "start": [0]}),
        "an empty Dict": ("observation_space", {"kind": "Dict", "spaces": {}}),
        "an empty Tuple": ("action_space", {"kind": "Tuple", "spaces": []}),
        "300 spaces deep": ("action_space", nested),
        "100,000 spaces": ("observation_space", {"kind": "Tuple", "spaces": [box] * 100_000}),
        "an image of 10^10": ("observation_space", image),
        "a mask that fits nothing": ("observation_space", {"kind": "Dict", "spaces": {"action_mask": box, "o": box}}),
    }
    for name, (path, value) in changes.items():
        yield edited(name, "policy", Parts.set_header, f"spec.{path}", value, may_load="deep" in name)

    def strided(parts: Parts) -> None:
        spec = parts.entry["header"]["spec"]
        spec["observation_space"] = image
        spec["config"] |= {"kind": "cnn", "cnn_filters": [[1, 1, 99_999]], "cnn_features": 1}

    yield edited("an image of 10^10 that a stride makes small", "policy", strided)
    for name, number in {"NaN": b"\0\0\xc0\x7f", "infinity": b"\0\0\x80\x7f"}.items():
        yield edited(f"weights of {name}", "policy", Parts.patch, "actor.0.weight", 0, number)
    yield edited("weights of whole numbers", "policy", lambda parts: parts.layout["actor.0.weight"].update(dtype="I32"))
    for name in ("policy_version", "observation_normalizer.count", "observation_normalizer.var"):
        yield edited(f"a negative {name}", "policy", Parts.patch, name, 7, b"\xff")


def rollout_cases() -> Iterator[Case]:
    """Structures that do not fit, and invalid episodes."""
    deep: Any = None
    for _ in range(400):
        deep = {"list": [deep]}

    def episode(**changes: Any) -> tuple[str, Any]:
        good = {"episode_return": 1.0, "length": 1, "lane": 0, "seed": 1, "info": {"dict": {}}}
        return "fields.dict.episodes", {"list": [{"dict": good | changes}]}

    changes: dict[str, tuple[str, Any]] = {
        "no fields": ("fields", ...),
        "fields as text": ("fields", "os.system"),
        "an unknown node": ("fields.dict.context", {"object": "os.system"}),
        "a node with two kinds": ("fields.dict.context", {"dict": {}, "list": []}),
        "a number beyond floats": ("fields.dict.context", {"float": 10**400}),
        "a float of text": ("fields.dict.context", {"float": "__import__"}),
        "an array that is not there": ("fields.dict.rewards", {"array": "/etc/passwd"}),
        "an array by a list": ("fields.dict.rewards", {"array": []}),
        "rewards as a number": ("fields.dict.rewards", 1.0),
        "rewards as text": ("fields.dict.rewards", "1"),
        "an array twice": ("fields.dict.rewards", {"array": "log_probs"}),
        "400 lists deep": ("fields.dict.context", deep),
        "an unknown field": ("fields.dict.__class__", None),
        "no rewards": ("fields.dict.rewards", ...),
        "episodes as a number": ("fields.dict.episodes", 3),
        "episodes of text": ("fields.dict.episodes", {"list": ["os.system"]}),
        "an episode of lane 10^9": episode(lane=10**9),
        "an episode of lane -1": episode(lane=-1),
        "an episode of text length": episode(length="__import__"),
        "an episode with text in its info": episode(info={"dict": {"a": "<script>"}}),
        "an episode with an unknown key": episode(__class__=1),
        "policy_state of numbers": ("fields.dict.policy_state", {"list": [1, 2]}),
        "observations of nothing": ("fields.dict.observations", {"tuple": []}),
        "global_state of text": ("fields.dict.global_state", "x"),
        "context of numbers instead of arrays": ("fields.dict.context", {"tuple": [1, 2]}),
    }
    for name, (path, value) in changes.items():
        yield edited(name, "rollout", Parts.set_header, path, value)
    yield edited("a bool of 7", "rollout", Parts.patch, "valid", 0, b"\x07")
    yield edited("cut rows beyond the end", "rollout", Parts.patch, "cut_rows", 3, b"\x7f")
    yield edited("a policy as a rollout", "rollout", lambda parts: None, kind="policy")
    yield edited("a rollout as a policy", "policy", lambda parts: None, kind="rollout")


def checkpoint_cases() -> Iterator[Case]:
    """Every file of a checkpoint replaced, with a manifest that matches."""
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
        yield Case(f"checkpoint: state.json {name}", "checkpoint", _with_file, ("state.json", text))
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
        yield Case(f"checkpoint: manifest with {name}", "checkpoint", _with_manifest, (change,))
    for name in ("manifest.json", "state.json", "arrays.safetensors"):
        for what in ("fifo", "/dev/zero", "/dev/stdin", "directory", "missing"):
            yield Case(f"checkpoint: {name} is {what}", "checkpoint", _without, (name, what))
            yield Case(f"checkpoints: newest {name} is {what}", "newest checkpoint", _without, (name, what, True), may_load=True)
        yield Case(f"checkpoint: {name} is a link to a good file", "checkpoint", _linked, (name,), may_load=True)
    yield Case("checkpoint's policy: layers of 10^9", "checkpoint policy", _with_spec, ("config.hidden_sizes", [10**9] * 3))
    yield Case("checkpoint's policy: a Box of 10^10", "checkpoint policy", _with_spec, ("observation_space.shape", [10**10]))


def replace_file(path: Path, what: str) -> str:
    """Put a FIFO, a directory, a symbolic link to the path `what`, or nothing in a file's place; return the file's path."""
    path.unlink(missing_ok=True)
    if what == "fifo":
        os.mkfifo(path)
    elif what == "directory":
        path.mkdir()
    elif what != "missing":
        path.symlink_to(what)
    return str(path)


def _without(box: Sandbox, name: str, what: str, parent: bool = False) -> str:
    path = box.checkpoint()
    replace_file(path / name, what)
    return str(path.parent if parent else path)


def _linked(box: Sandbox, name: str) -> str:
    path = box.checkpoint()
    shutil.move(path / name, box.inside / "elsewhere")
    (path / name).symlink_to(box.inside / "elsewhere")
    return str(path)


def _with_file(box: Sandbox, name: str, text: str | None, payload: str = "") -> str:
    path = box.checkpoint()
    box.put(str(path / name), payloads(box.canary)[payload] if text is None else text)
    sign_checkpoint(path)
    return str(path)


def _with_manifest(box: Sandbox, change: dict[str, Any]) -> str:
    path = box.checkpoint()
    manifest = json.loads((path / "manifest.json").read_text())["manifest"]
    (path / "manifest.json").write_text(manifest_text({**manifest, **change}))
    return str(path)


def _with_spec(box: Sandbox, path: str, value: Any) -> str:
    known = TrainingCheckpointer(box.inside / "checkpoints")
    weights = TrainingCheckpointer(box.checkpoint().parent).load().state["weights"]
    spec = tensor_parts((box.genuine / "runs/good/policy.safetensors").read_bytes())[1]["header"]["spec"]
    return str(known.save(1, {"spec": set_at(spec, path, value), "weights": weights, "metadata": {}}))
