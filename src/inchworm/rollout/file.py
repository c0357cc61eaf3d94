"""Serves the rollout, between steps 5 and 6: a rollout's fields to one file and back, without pickle."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inchworm.core.errors import RolloutError
from inchworm.core.tensor_file import distrusted, read_tensor_file, write_tensor_file
from inchworm.core.trees import flatten_tree, unflatten_tree
from inchworm.core.types import EpisodeRecord
from inchworm.rollout.checks import check_fields, freeze, valid_at_cuts

KIND, VERSION = "rollout", 2
_SINCE_2: dict[str, Any] = {"cut_global_state": (), "state_every": 0}
"""Fields that files of version 1 lack; and `cut_valid`."""


def save_fields(path: str | Path, fields: Mapping[str, Any]) -> Path:
    """Write a rollout's fields to one file, whole or not at all."""
    episodes = [{**_shallow(episode), "info": dict(episode.info)} for episode in fields["episodes"]]
    arrays, structure = flatten_tree({**fields, "episodes": episodes})
    return write_tensor_file(path, arrays, kind=KIND, version=VERSION, header={"fields": structure})


def _shallow(episode: EpisodeRecord) -> dict[str, Any]:
    return {field.name: getattr(episode, field.name) for field in dataclasses.fields(episode)}


def load_fields(path: str | Path, names: Sequence[str]) -> dict[str, Any]:
    """The fields that `save_fields` wrote, checked and read-only."""
    arrays, header = read_tensor_file(path, kind=KIND, max_version=VERSION)
    freeze(arrays)
    with distrusted(f"{path} holds no valid rollout"):
        fields: dict[str, Any] = _SINCE_2 | unflatten_tree(arrays, header["fields"])
        if "cut_valid" not in fields:
            fields["cut_valid"] = freeze(valid_at_cuts(fields))
        if set(fields) != set(names):
            raise RolloutError(f"the fields {sorted(set(fields) ^ set(names))} are missing or unknown")
        fields["episodes"] = tuple(_episode(episode) for episode in fields["episodes"])
        check_fields(fields)
    return fields


def _episode(data: Any) -> EpisodeRecord:
    """A record of plain numbers, as the collector makes them."""
    episode = EpisodeRecord(**data)
    whole = (episode.length, episode.lane, episode.seed)
    numbers = (episode.episode_return, *episode.info.values())
    if any(type(number) is not int for number in whole) or any(type(number) not in (int, float) for number in numbers):
        raise RolloutError(f"the episode {data!s:.200} is not made of numbers")
    return episode
