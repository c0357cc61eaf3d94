"""Crafted policies, rollouts and checkpoints for B1, one case each. Checksums are valid: only the content is hostile."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.hostile_tools import newest_checkpoint, payloads, sign_checkpoint, signed, tensor_file, tensor_parts


@dataclass(frozen=True)
class Sandbox:
    """Where a case is set up: `inside` may be written to, `victim` next to it must not change."""

    inside: Path
    victim: Path
    canary: Path
    genuine: Path

    def put(self, name: str, content: bytes | str) -> str:
        """A file in the sandbox; its path."""
        path = self.inside / name
        path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
        return str(path)

    def run(self) -> Path:
        """A copy of the genuine run."""
        shutil.copytree(self.genuine / "runs", self.inside / "runs")
        return self.inside / "runs" / "good"

    def checkpoint(self) -> Path:
        """The newest checkpoint of such a copy, alone with its name."""
        return newest_checkpoint(self.run())

    def parts(self, kind: str) -> tuple[dict[str, Any], dict[str, Any], bytes]:
        """The genuine policy or rollout file, taken apart."""
        path = self.genuine / ("rollout.safetensors" if kind == "rollout" else "runs/good/policy.safetensors")
        return tensor_parts(path.read_bytes())


@dataclass(frozen=True)
class Case:
    """One crafted input: who opens it, and how to make it. `make` returns its path, or the arguments of a command."""

    name: str
    loader: str
    make: Callable[[Sandbox], Any]
    may_load: bool = False
    """Whether opening it may succeed, because nothing in it is wrong: it must then do no harm."""


def foreign_cases() -> Iterator[Case]:
    """Files of other programs behind our names."""
    extensions = ("safetensors", "pt", "pkl", "npz", "ckpt", "bin", "yaml")
    for number, name in enumerate(payloads(Path("x"))):
        for loader in ("policy", "rollout", "config"):

            def make(box: Sandbox, name: str = name, extension: str = extensions[number % len(extensions)]) -> str:
                return box.put(f"file.{extension}", payloads(box.canary)[name])

            yield Case(f"{name} as a {loader}", loader, make)

        def replace(box: Sandbox, name: str = name) -> str:
            path = box.checkpoint()
            (path / "arrays.safetensors").write_bytes(payloads(box.canary)[name])
            sign_checkpoint(path)
            return str(path)

        yield Case(f"{name} as a checkpoint's arrays", "checkpoint", replace)


Edit = Callable[[dict[str, Any], dict[str, Any], bytes], bytes]


def edited(name: str, loader: str, edit: Edit, kind: str = "", may_load: bool = False) -> Case:
    return Case(
        f"{loader}: {name}", loader, lambda box: box.put("x.safetensors", edit(*copy.deepcopy(box.parts(kind or loader)))), may_load
    )


def tensor_cases(kind: str) -> Iterator[Case]:
    """Tricks of the format itself, under a right checksum."""

    def tensors(change: Callable[[dict[str, Any], str], None]) -> Edit:
        def edit(layout: dict[str, Any], entry: dict[str, Any], data: bytes) -> bytes:
            change(layout, next(name for name, tensor in layout.items() if tensor["shape"]))
            return tensor_file(layout, entry, data)

        return edit

    def entries(**changes: Any) -> Edit:
        return lambda layout, entry, data: tensor_file(layout, {**entry, **changes}, data)

    def field(key: str, value: Any) -> Edit:
        return tensors(lambda layout, name: layout[name].update({key: value}))

    for dtype in ("BF16", "F8_E4M3", "object", "O", "V8", "<U8", ">f4", "pickle", None, 3, ["F32"], "os.system"):
        yield edited(f"dtype {dtype!r}", kind, field("dtype", dtype))
    for shape in ([-1], [2**63], [2**32, 2**32], [2.5], "4", None, [[4]], [1] * 100, {"a": 1}, [10**30]):
        yield edited(f"shape {str(shape)[:30]}", kind, field("shape", shape))
    for offsets in ([0, 2**40], [-8, 0], [8, 0], [0], None, "all", [0.5, 1], [0, 10**30], [0, 4]):
        yield edited(f"offsets {offsets}", kind, field("data_offsets", offsets))
    yield edited("all tensors at one place", kind, tensors(lambda layout, name: [t.update(layout[name]) for t in layout.values()]))  # type: ignore[func-returns-value]
    for name in ("../../canary", "/etc/passwd", "a\0b", "\ud800", "__class__", "", "x" * 100_000):
        yield edited(
            f"a tensor called {name[:20]!r}", kind, tensors(lambda layout, first, name=name: layout.update({name: layout.pop(first)}))
        )
    for key, value in {"kind": "os.system", "version": True, "header": []}.items():
        yield edited(f"{key} {value!r}", kind, entries(**{key: value}))
    for version in (0, -1, 3, 10**9, "1", 1.0, None):
        yield edited(f"version {version!r}", kind, entries(version=version))
    yield edited("a header without anything", kind, entries(header={}))
    yield edited("classes in the header", kind, entries(header={"__class__": "os.system", "__reduce__": ["os.system", "touch canary"]}))
    yield edited("data after the end", kind, lambda layout, entry, data: tensor_file(layout, entry, data + b"more"))
    yield edited("data cut off", kind, lambda layout, entry, data: tensor_file(layout, entry, data[:-4]))
    yield edited("a tensor no offset of which is there", kind, lambda layout, entry, data: tensor_file(layout, entry, b""))
    deep, wide = "[" * 100_000 + "]" * 100_000, "[" + "[]," * 1_500_000 + "[]]"
    for name, text in {
        "deep": deep,
        "wide": wide,
        "NaN": "NaN",
        "a number of 10,000 digits": "9" * 10_000,
        "1e999": "1e999",
        "cut off": "[1,",
        "not UTF-8": '"\udcff"',
    }.items():

        def raw(layout: dict[str, Any], entry: dict[str, Any], data: bytes, text: str = text) -> bytes:
            mine = json.dumps({"sha256": "0" * 64, **{k: v for k, v in entry.items() if k not in ("sha256", "header")}, "header": "@"})
            inner = json.dumps(mine.replace('"@"', f'{{"spec": {text}, "fields": {text}}}'), ensure_ascii=False)
            return signed('{"__metadata__":{"inchworm":' + inner + "}," + json.dumps(layout)[1:], data)

        yield edited(f"header {name}", kind, raw)
    for name, text in {"deep": deep, "wide": wide, "doubled": '{"a":1},"x":{"a":2}'}.items():

        def outer(layout: dict[str, Any], entry: dict[str, Any], data: bytes, text: str = text) -> bytes:
            inner = json.dumps(json.dumps({"sha256": "0" * 64, **{k: v for k, v in entry.items() if k != "sha256"}}))
            return signed('{"__metadata__":{"inchworm":' + inner + '},"x":' + text + "," + json.dumps(layout)[1:], data)

        yield edited(f"layout {name}", kind, outer)


def at(data: Any, path: str, value: Any) -> Any:
    """The data with `value` at a path such as "config.kind"; `...` removes the key."""
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place = data
    for key in way:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return data


def policy_cases() -> Iterator[Case]:
    """Specs that ask for too much, or for something else than a policy."""
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
        yield edited(
            name,
            "policy",
            lambda layout, e, d, p=path, v=value: tensor_file(layout, at(e, f"header.spec.{p}", v), d),
            may_load="deep" in name,
        )

    def striding(layout: dict[str, Any], entry: dict[str, Any], data: bytes) -> bytes:
        spec = entry["header"]["spec"]
        spec["observation_space"] = image
        spec["config"] |= {"kind": "cnn", "cnn_filters": [[1, 1, 99_999]], "cnn_features": 1}
        return tensor_file(layout, entry, data)

    yield edited("an image of 10^10 that is strided away", "policy", striding)
    for name, change in {
        "NaN": lambda t: t | {"bytes": b"\0\0\xc0\x7f"},
        "infinity": lambda t: t | {"bytes": b"\0\0\x80\x7f"},
        "whole numbers": lambda t: t | {"dtype": "I32"},
    }.items():

        def weights(layout: dict[str, Any], entry: dict[str, Any], data: bytes, change: Any = change) -> bytes:
            changed = change(layout["actor.0.weight"])
            begin = changed["data_offsets"][0]
            new = changed.pop("bytes", data[begin : begin + 4])
            layout["actor.0.weight"] = changed
            return tensor_file(layout, entry, data[:begin] + new + data[begin + 4 :])

        yield edited(f"weights of {name}", "policy", weights)
    for name in ("policy_version", "observation_normalizer.count", "observation_normalizer.var"):

        def negative(layout: dict[str, Any], entry: dict[str, Any], data: bytes, name: str = name) -> bytes:
            begin = layout[name]["data_offsets"][0]
            return tensor_file(layout, entry, data[: begin + 7] + b"\xff" + data[begin + 8 :])

        yield edited(f"a negative {name}", "policy", negative)


def rollout_cases() -> Iterator[Case]:
    """Structures that do not fit, episodes that are none."""
    deep: Any = None
    for _ in range(400):
        deep = {"list": [deep]}
    good = {"dict": {"episode_return": 1.0, "length": 1, "lane": 0, "seed": 1, "info": {"dict": {}}}}
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
        "an episode of lane 10^9": ("fields.dict.episodes", {"list": [at(copy.deepcopy(good), "dict.lane", 10**9)]}),
        "an episode of lane -1": ("fields.dict.episodes", {"list": [at(copy.deepcopy(good), "dict.lane", -1)]}),
        "an episode of text length": ("fields.dict.episodes", {"list": [at(copy.deepcopy(good), "dict.length", "__import__")]}),
        "an episode with text in its info": (
            "fields.dict.episodes",
            {"list": [at(copy.deepcopy(good), "dict.info", {"dict": {"a": "<script>"}})]},
        ),
        "an episode with an unknown key": ("fields.dict.episodes", {"list": [at(copy.deepcopy(good), "dict.__class__", 1)]}),
        "policy_state of numbers": ("fields.dict.policy_state", {"list": [1, 2]}),
        "observations of nothing": ("fields.dict.observations", {"tuple": []}),
        "global_state of text": ("fields.dict.global_state", "x"),
        "context of arrays that are none": ("fields.dict.context", {"tuple": [1, 2]}),
    }
    for name, (path, value) in changes.items():
        yield edited(name, "rollout", lambda layout, e, d, p=path, v=value: tensor_file(layout, at(e, f"header.{p}", v), d))

    def seven(layout: dict[str, Any], entry: dict[str, Any], data: bytes) -> bytes:
        begin = layout["valid"]["data_offsets"][0]
        return tensor_file(layout, entry, data[:begin] + b"\x07" + data[begin + 1 :])

    def beyond(layout: dict[str, Any], entry: dict[str, Any], data: bytes) -> bytes:
        begin = layout["cut_rows"]["data_offsets"][0]
        return tensor_file(layout, entry, data[: begin + 3] + b"\x7f" + data[begin + 4 :])

    yield edited("a bool of 7", "rollout", seven)
    yield edited("cut rows beyond the end", "rollout", beyond)
    yield edited("a policy as a rollout", "rollout", tensor_file, kind="policy")
    yield edited("a rollout as a policy", "policy", tensor_file, kind="rollout")


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
