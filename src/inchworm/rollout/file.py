"""A rollout's fields as one safetensors file, without pickle."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inchworm.core.errors import RolloutError
from inchworm.core.tensor_file import read_tensor_file, untrusted, write_tensor_file
from inchworm.core.trees import flatten_tree, unflatten_tree
from inchworm.core.types import EpisodeRecord
from inchworm.rollout.checks import check_fields, freeze, valid_at_cuts

KIND, VERSION = "rollout", 2
_SINCE_2: dict[str, Any] = {"cut_global_state": (), "state_every": 0}
"""Defaults of fields that files of version 1 lack, apart from `cut_valid`, which is derived."""


def save_fields(path: str | Path, fields: Mapping[str, Any]) -> Path:
    """Write a rollout's fields to one file atomically."""
    names = [field.name for field in dataclasses.fields(EpisodeRecord)]
    episodes = [{name: getattr(episode, name) for name in names} | {"info": dict(episode.info)} for episode in fields["episodes"]]
    arrays, structure = flatten_tree({**fields, "episodes": episodes})
    return write_tensor_file(path, arrays, kind=KIND, version=VERSION, header={"fields": structure})


def load_fields(path: str | Path, names: Sequence[str]) -> dict[str, Any]:
    """Read the fields that `save_fields` wrote, check them and make them read-only."""
    arrays, header = read_tensor_file(path, kind=KIND, max_version=VERSION)
    freeze(arrays)
    with untrusted(f"{path} does not hold a valid rollout"):
        fields: dict[str, Any] = _SINCE_2 | unflatten_tree(arrays, header["fields"])
        if "cut_valid" not in fields:
            fields["cut_valid"] = freeze(valid_at_cuts(fields))
        if set(fields) != set(names):
            raise RolloutError(f"missing or unknown fields: {sorted(set(fields) ^ set(names))}")
        fields["episodes"] = tuple(_episode(episode) for episode in fields["episodes"])
        check_fields(fields)
    return fields


def _episode(data: Any) -> EpisodeRecord:
    """Rebuild a record, which must consist of plain numbers."""
    episode = EpisodeRecord(**data)
    whole = (episode.length, episode.lane, episode.seed)
    numbers = (episode.episode_return, *episode.info.values())
    if any(type(number) is not int for number in whole) or any(type(number) not in (int, float) for number in numbers):
        raise RolloutError(f"the episode {data!s:.200} contains something other than numbers")
    return episode
