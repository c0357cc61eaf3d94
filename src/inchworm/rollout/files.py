"""Rollouts on disk: one verified file without pickle, or a directory of shards, each a file of some of the lanes."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from inchworm.core.errors import CorruptFileError, RolloutError
from inchworm.core.tensor_file import (
    TEMPORARY,
    flatten_tree,
    make_directory,
    read_tensor_file,
    sync_directory,
    unflatten_tree,
    untrusted,
    write_tensor_file,
)
from inchworm.core.types import EpisodeRecord
from inchworm.rollout.fields import check_fields, freeze, valid_at_cuts

KIND, VERSION = "rollout", 3
"""Version 3 has `extras`; a rollout without them is written as version 2."""
SUFFIX = ".safetensors"
_SINCE_2: dict[str, Any] = {"cut_global_state": (), "state_every": 0}
"""Defaults of fields that files of version 1 lack, apart from `cut_valid`, which is derived."""
_SINCE_3: dict[str, Any] = {"extras": ()}
_SHARD = re.compile(r"shard-(\d{5})-of-(\d{5})\.safetensors")


def save_fields(path: str | Path, fields: Mapping[str, Any], shard: Sequence[Any] = ()) -> Path:
    """Write a rollout's fields to one file atomically.

    `shard` is its number, how many shards there are, the name of the whole, and which of its episodes are inside.
    """
    names = [field.name for field in dataclasses.fields(EpisodeRecord)]
    episodes = [{name: getattr(episode, name) for name in names} | {"info": dict(episode.info)} for episode in fields["episodes"]]
    has_extras = fields["extras"] != () and len(fields["extras"]) > 0
    written = {name: value for name, value in fields.items() if has_extras or name not in _SINCE_3}
    arrays, structure = flatten_tree({**written, "episodes": episodes})
    header = {"fields": structure, **({"shard": list(shard)} if shard else {})}
    return write_tensor_file(path, arrays, kind=KIND, version=3 if has_extras else 2, header=header)


def load_fields(path: str | Path, names: Sequence[str], *, mapped: bool = False, shard: Sequence[Any] = ()) -> dict[str, Any]:
    """Read the fields that `save_fields` wrote, check them and make them read-only.

    The arrays are views of the file's bytes, which are read once, or with `mapped` of the file itself.
    """
    arrays, header = read_tensor_file(path, kind=KIND, max_version=VERSION, mapped=mapped)
    freeze(arrays)
    with untrusted(f"{path} does not hold a valid rollout"):
        if shard and header.get("shard", [])[: len(shard)] != list(shard):
            raise RolloutError("it is a shard of another rollout, or its name was changed")
        fields: dict[str, Any] = _SINCE_2 | _SINCE_3 | unflatten_tree(arrays, header["fields"])
        if "cut_valid" not in fields:
            fields["cut_valid"] = freeze(valid_at_cuts(fields))
        if set(fields) != set(names):
            raise RolloutError(f"missing or unknown fields: {sorted(set(fields) ^ set(names))}")
        fields["episodes"] = tuple(_episode_of_file(episode) for episode in fields["episodes"])
        check_fields(fields)
        fields["shard"] = header.get("shard", ())
    return fields


def _episode_of_file(data: Any) -> EpisodeRecord:
    """Rebuild a record, which must consist of plain numbers."""
    episode = EpisodeRecord(**data)
    whole = (episode.length, episode.lane, episode.seed)
    numbers = (episode.episode_return, *episode.info.values())
    if any(type(number) is not int for number in whole) or any(type(number) not in (int, float) for number in numbers):
        raise RolloutError(f"the episode {data!s:.200} contains something other than numbers")
    return episode


def save_shards(
    directory: str | Path, whole: Mapping[str, Any], lanes: Sequence[np.ndarray], select: Callable[[np.ndarray], Mapping[str, Any]]
) -> Path:
    """Write the shards of a rollout to a new directory, all of them or none: for each of `lanes` the fields that `select` returns."""
    directory = Path(directory)
    if directory.exists():
        raise FileExistsError(17, "a directory of shards is written as a whole; choose a new name or remove the old one", str(directory))
    name = hashlib.sha256()
    for field in ("rewards", "log_probs", "weights_fingerprint", "policy_version"):
        name.update(whole[field].tobytes())
    temporary = directory.parent / f"{TEMPORARY}{directory.name[:100]}-{uuid.uuid4().hex}"
    try:
        make_directory(temporary)
        for index, chosen in enumerate(lanes):
            inside = set(chosen.tolist())
            episodes = [place for place, episode in enumerate(whole["episodes"]) if episode.lane in inside]  # their order is not in them
            shard = (index, len(lanes), name.hexdigest(), episodes)
            save_fields(temporary / f"shard-{index:05d}-of-{len(lanes):05d}{SUFFIX}", select(chosen), shard)
        temporary.rename(directory)
        sync_directory(directory.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return directory


def load_shards(directory: str | Path, names: Sequence[str]) -> tuple[list[dict[str, Any]], list[int]]:
    """Read the fields of all shards in a directory, and the order of all their episodes.

    The files stay mapped, so that joining their arrays takes the memory of one rollout.
    """
    found = shards_in(directory)
    if not found:
        raise CorruptFileError(f"{directory} holds no shards of a rollout; give one of its files, or a directory that Rollout.save wrote")
    count = int(_SHARD.fullmatch(found[0].name)[2])  # type: ignore[index]
    missing = [
        name for name in (f"shard-{index:05d}-of-{count:05d}{SUFFIX}" for index in range(count)) if not (Path(directory) / name).exists()
    ]
    if missing or len(found) != count:
        raise CorruptFileError(f"{directory} does not hold exactly {count} shards" + (f": {missing[0]} is missing" if missing else ""))
    parts: list[dict[str, Any]] = []
    for index, path in enumerate(found):
        whole = parts[0]["shard"][2:3] if parts else ()
        parts.append(load_fields(path, names, mapped=True, shard=(index, count, *whole)))
    with untrusted(f"{directory} does not hold a valid rollout"):
        places = [place for part in parts for place in part["shard"][3]]
        if sorted(places) != list(range(sum(len(part["episodes"]) for part in parts))):
            raise RolloutError("its shards do not tell the order of their episodes")
    order = np.argsort(np.array(places, np.int64)).tolist()
    return [{name: part[name] for name in names} for part in parts], order


def shards_in(directory: str | Path) -> list[Path]:
    """The shards in a directory, in order; empty if it holds none."""
    return sorted(path for path in Path(directory).iterdir() if _SHARD.fullmatch(path.name))


def numbered_paths(directory: str | Path, count: int) -> list[Path]:
    """Name files for `count` rollouts in a directory, which must not hold others: learning would take them for the same collection."""
    if count < 1:
        raise RolloutError(f"the number of rollouts must be 1 or more, not {count}")
    directory = Path(directory)
    if directory.is_dir() and any(directory.glob(f"*{SUFFIX}")):
        raise RolloutError(f"{directory} already holds rollouts; choose a new directory, or remove them")
    return [directory / f"rollout_{index:04d}{SUFFIX}" for index in range(count)]


def rollout_paths(given: str | Path | Sequence[str | Path]) -> list[Path]:
    """The rollouts that files and directories stand for: a file, a directory of shards, or all files of a directory by name."""
    paths: list[Path] = []
    for one in map(Path, [given] if isinstance(given, str | Path) else given):
        if not one.is_dir() or shards_in(one):
            paths.append(one)
            continue
        inside = sorted(
            path
            for path in one.iterdir()
            if not path.name.startswith(TEMPORARY) and (path.suffix == SUFFIX or (path.is_dir() and shards_in(path)))
        )
        if not inside:
            raise RolloutError(f"{one} holds no rollouts (*{SUFFIX}); inchworm collect RUN --rollouts 10 --out {one} makes some")
        paths += inside
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(2, "No such file or directory", str(path))
    return paths
