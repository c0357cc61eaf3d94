"""Serves B1: policies and rollouts whose bytes are in order and whose meaning is not."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from faults.hostile_cases import Case, at, edited
from faults.hostile_tools import tensor_file


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
