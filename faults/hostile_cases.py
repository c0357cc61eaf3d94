"""Serves B1: the crafted files, one case each. Where a format has a checksum it is right: only what is under it is hostile."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.hostile_payloads import payloads
from faults.hostile_tools import fresh_run, newest_checkpoint, sign_checkpoint, signed, tensor_file, tensor_parts


@dataclass(frozen=True)
class Sandbox:
    """Where a case is set up: `inside` may be written to, `victim` beside it must stay as it is."""

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
        return fresh_run(self.genuine, self.inside)

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


def all_cases(genuine: Path) -> list[Case]:
    """Every case. `genuine` is where the genuine files are: some cases are made for each part of them."""
    from faults.hostile_checkpoints import checkpoint_cases
    from faults.hostile_replays import replay_cases
    from faults.hostile_runs import command_cases, state_cases, yaml_cases
    from faults.hostile_specs import policy_cases, rollout_cases

    return [
        *_foreign(),
        *_tensor_cases("policy"),
        *_tensor_cases("rollout"),
        *policy_cases(),
        *rollout_cases(),
        *checkpoint_cases(),
        *yaml_cases(),
        *command_cases(),
        *state_cases(genuine),
        *replay_cases(),
    ]


def _foreign() -> Iterator[Case]:
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


def _tensor_cases(kind: str) -> Iterator[Case]:
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
