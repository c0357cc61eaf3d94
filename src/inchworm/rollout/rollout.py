"""Between steps 5 and 6 of 9: the rollout, the one value that passes from collect to learn; combining, selecting lanes, metrics."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import optree

from inchworm.core.errors import RolloutError
from inchworm.core.spaces import MASK_KEY, Space
from inchworm.core.types import Array, EpisodeRecord, Tree
from inchworm.rollout.fields import (
    FLAT_DTYPES,
    LEARNER_FIELDS,
    PLAIN,
    MissingSuccessors,
    check_choices,
    check_fields,
    check_finite,
    check_space,
    check_structure,
    complete_fields,
    freeze,
    lane_numbers,
    named_leaves,
    sort_cut_rows,
)
from inchworm.rollout.files import load_fields, load_shards, save_fields, save_shards


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """What the environment and the behaviour policy did in T steps of B lanes; read-only.

    It can also be used as a mapping: `rollout["rewards"]`, `"rewards" in rollout`, `dict(rollout)`. `rollout["dones"]` and
    `rollout["next_observations"]` are made from the fields.
    """

    observations: Tree  # [T, B, *obs]      raw; may hold the key "action_mask"
    actions: Tree  # [T, B, *act]           as sampled, not as clipped or squashed for the env
    log_probs: Array  # [T, B] f32          of the behaviour policy, summed over the parts of a hybrid action
    rewards: Array  # [T, B] f32            as the environment gave them
    terminated: Array  # [T, B] bool        this step ended the episode: nothing follows
    truncated: Array  # [T, B] bool         this step was cut off: something would have followed
    episode_starts: Array  # [T, B] bool    this observation opens an episode, or an agent joins: memory is reset before it is read
    valid: Array  # [T, B] bool             False where the lane had no agent
    policy_state: Tree = ()  # [ceil(T/S), B, *mem]  memory BEFORE reading the observation, every S rows
    state_every: int = 0  #                 S; 0 if it is unknown, or there is no memory
    cut_rows: Array  # [K, 2] i32           (t, b) of every truncated row and of each lane's last row, sorted
    cut_observations: Tree  # [K, *obs]     the TRUE successor there, before any reset
    cut_state: Tree = ()  # [K, *mem]       memory after reading observations[t, b]; empty where an agent joins there
    cut_valid: Array  # [K] bool            False where the successor has no agent
    global_state: Tree = ()  # [T, E, *]    for a central critic, once per env copy
    cut_global_state: Tree = ()  # [K, *]   at the true successor of each cut row
    context: Tree = ()  # (table [C, …], index [T, B])  task context that the behaviour policy was given
    extras: Tree = ()  # {name: [T, B, …]}  infos that are kept, and columns of your own; learning hands them to custom losses only
    policy_version: Array  # [B] i32        which weights acted
    weights_fingerprint: Array  # [B] u64   and of which run: versions of two runs collide
    episodes: tuple[EpisodeRecord, ...] = ()

    @property
    def num_steps(self) -> int:
        """Number of steps T."""
        return int(self.rewards.shape[0])

    @property
    def num_lanes(self) -> int:
        """Number of lanes B."""
        return int(self.rewards.shape[1])

    @property
    def lanes_per_copy(self) -> int:
        """Number of adjacent lanes that share a row of `global_state`; 1 if there is none."""
        found = optree.tree_leaves(self.global_state)
        return self.num_lanes // max(1, int(found[0].shape[1])) if found else 1

    @property
    def num_valid(self) -> int:
        """Number of valid rows: what `env_steps` counts."""
        return int(self.valid.sum())

    @property
    def dones(self) -> Array:
        """[T, B] bool: this step ended the episode or was cut off."""
        return self.terminated | self.truncated

    @property
    def next_observations(self) -> Tree:
        """The observation after each step, [T, B, *obs]: the next row's, and at cut rows the true successor.

        Do not use the rows that are terminated: they hold the first observation of the lane's next episode.
        Leaves are only indexed, so tensors work as well as arrays.
        """
        time, lane = self.cut_rows[:, 0], self.cut_rows[:, 1]
        following = np.minimum(np.arange(1, self.num_steps + 1), self.num_steps - 1)  # [T]

        def shifted(leaf: Array, cuts: Array) -> Array:
            successors = leaf[following]  # [T, B, *obs]: indexing by an array makes a copy
            successors[time, lane] = cuts
            return successors

        return optree.tree_map(shifted, self.observations, self.cut_observations)

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes."""
        return sum(int(leaf.nbytes) for name in ARRAY_FIELDS for leaf in optree.tree_leaves(self[name]))

    def __repr__(self) -> str:
        """One line without the arrays: `Rollout(64 steps x 8 lanes, observations [64, 8, 4] float32, …)`."""

        def described(leaf: Any) -> str:
            return f"{list(np.shape(leaf))} {getattr(leaf, 'dtype', type(leaf).__name__)}"

        shapes = [
            f"{'.'.join([name, *map(str, path)])} {described(leaf)}"
            for name in ("observations", "actions")
            for path, leaf in zip(*optree.tree_flatten_with_path(self[name])[:2])
        ]
        versions = sorted(set(np.ravel(self.policy_version).tolist()))
        version = "policy version " + " to ".join(map(str, dict.fromkeys((versions[0], versions[-1])))) if versions else "no policy version"
        invalid = self.num_steps * self.num_lanes - self.num_valid
        steps = f"{self.num_steps} steps x {self.num_lanes} lanes" + (f" ({invalid} rows not valid)" if invalid else "")
        episodes = f"{len(self.episodes)} finished episode{'' if len(self.episodes) == 1 else 's'}"
        return f"Rollout({', '.join([steps, *shapes, episodes, version])})"

    def keys(self) -> tuple[str, ...]:
        """Return the names of the fields."""
        return FIELDS

    def __iter__(self) -> Iterator[str]:
        return iter(FIELDS)

    def __contains__(self, name: object) -> bool:
        return name in FIELDS

    def __getitem__(self, name: str) -> Any:
        if name not in FIELDS and name not in DERIVED:
            if name in LEARNER_FIELDS:
                raise KeyError(f"a rollout does not hold {name}; compute_advantages(policy, rollout, config) computes it")
            near = difflib.get_close_matches(str(name), FIELDS, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(FIELDS)}"
            raise KeyError(f"a rollout has no field {name!r}; {hint}")
        return getattr(self, name)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name; the arrays are shared, not copied."""
        return {name: getattr(self, name) for name in FIELDS}

    @property
    def on_device(self) -> bool:
        """Whether its arrays are a framework's tensors, as a collector on a device makes them."""
        return not isinstance(self.rewards, np.ndarray)

    def to_numpy(self) -> Rollout:
        """Return the rollout with NumPy arrays; itself if it has them."""
        if not self.on_device:
            return self
        from inchworm.backends.registry import backend_of_array  # which backends there are is known above this package

        to_array = backend_of_array(self.rewards).to_array

        def on_host(leaf: Any) -> np.ndarray:
            found = to_array(leaf)
            return np.asarray(leaf) if found is None else found

        arrays: dict[str, Any] = {name: freeze(optree.tree_map(on_host, getattr(self, name))) for name in ARRAY_FIELDS}
        return dataclasses.replace(self, **arrays)

    def to_torch(self, device: Any = "cpu") -> dict[str, Any]:
        """Return the fields by name, with `dones` and `next_observations`, as torch tensors on a device; the arrays are copied."""
        from inchworm.backends.registry import get_backend  # which backends there are is known above this package

        as_tensor = get_backend("torch").from_array
        whole = {name: getattr(self, name) for name in (*FIELDS, *DERIVED)}
        arrays: Tree = {name: value for name, value in whole.items() if name not in PLAIN}
        return {**whole, **optree.tree_map(lambda array: as_tensor(array).to(device), arrays)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, missing_successors: MissingSuccessors = "refuse") -> Self:
        """Make a rollout from data of any origin: another process, `torch.load`, or made up.

        Required: observations, actions, log_probs, rewards, terminated, all [T, B, …], and the true successors of truncated
        and last rows, either as `next_observations` [T, B, *obs] or as `cut_rows` and `cut_observations`. They may be omitted
        if every lane's last row is terminated and no row is truncated. All other fields have defaults. Flat arrays [N, …] are one lane.
        NumPy arrays, lists and CPU tensors are accepted. The input is neither changed nor shared.

        For data without successors, `missing_successors` tells what follows the rows whose next row is not their successor: with
        "own_observation" the value of what they saw themselves, with "end" nothing, as if the episode had terminated. Both warn.
        """
        return cls(**complete_fields(data, FIELDS, missing_successors))

    def map(self, function: Callable[[Any], Any]) -> Self:
        """Apply `function`, such as a transfer to a device, to every array; episodes are kept."""
        fields: dict[str, Any] = {name: optree.tree_map(function, getattr(self, name)) for name in ARRAY_FIELDS}
        return dataclasses.replace(self, **fields)

    def select_lanes(self, lanes: Sequence[int] | np.ndarray) -> Rollout:
        """Return the rollout of some lanes, in this order."""
        return select_lanes(self, lanes)

    def validate(self, observation_space: Space | None = None, action_space: Space | None = None) -> None:
        """Raise `RolloutError` or `BadNumberError` naming what is wrong, also against these spaces if they are given."""
        if self.on_device:
            self.to_numpy().validate(observation_space, action_space)
            return
        check_fields(self.to_dict())
        if observation_space is not None:
            check_space(self.observations, observation_space, "observations")
        if action_space is not None:
            check_space(self.actions, action_space, "actions")
            check_choices(self.actions, action_space, self.valid)
        check_finite(self.to_dict())

    def save(self, path: str | Path, *, shard_bytes: int | None = None) -> Path:
        """Write the rollout atomically: to one file, or to a new directory of files of about `shard_bytes` bytes, each of some lanes."""
        host = self.to_numpy()
        if shard_bytes is None:
            return save_fields(path, host.to_dict())
        width = host.lanes_per_copy
        copies = max(1, host.num_lanes // width)
        together = width * max(1, int(shard_bytes * copies / max(1, host.nbytes)))  # lanes per shard
        firsts = range(0, max(1, host.num_lanes), together)
        lanes = [np.arange(first, min(first + together, host.num_lanes)) for first in firsts]
        return save_shards(path, host.to_dict(), lanes, lambda chosen: host.select_lanes(chosen).to_dict())

    @classmethod
    def load(cls, path: str | Path, *, mapped: bool = False) -> Rollout:
        """Read what `save` wrote, a file or a directory of shards; a damaged file raises `CorruptFileError`.

        A file is read into memory once. With `mapped` its arrays stay on the disk and are paged in as they are used; do not write to the
        file meanwhile. (Replacing it, as `save` does, is safe.)
        """
        if Path(path).is_dir():
            parts, order = load_shards(path, FIELDS)
            whole = combine_rollouts([cls(**fields) for fields in parts])
            return dataclasses.replace(whole, episodes=tuple(whole.episodes[index] for index in order))
        fields = load_fields(path, FIELDS, mapped=mapped)
        return cls(**{name: fields[name] for name in FIELDS})


FIELDS = tuple(field.name for field in dataclasses.fields(Rollout))
DERIVED = ("dones", "next_observations")
"""What is made from the fields and can be read like them."""
ARRAY_FIELDS = tuple(name for name in FIELDS if name not in PLAIN)
_CUTS = ("cut_observations", "cut_state", "cut_valid", "cut_global_state")  # each [K, …]


def combine_rollouts(given: Sequence[Rollout | Mapping[str, Any]]) -> Rollout:
    """Concatenate rollouts along lanes. Right for parallel workers and for rollouts taken one after another.

    Each must have the same trees, shapes and dtypes; a mapping is read by `Rollout.from_dict`. Shorter ones are padded with invalid rows
    at the end, which count nowhere. Lanes of episodes and cut rows are renumbered.
    """
    rollouts = tuple((one if isinstance(one, Rollout) else Rollout.from_dict(one)).to_numpy() for one in given)
    _check_combinable(rollouts)
    rollouts = tuple(_padded(rollout, max(one.num_steps for one in rollouts), number) for number, rollout in enumerate(rollouts))
    first_lane = np.cumsum([0, *(rollout.num_lanes for rollout in rollouts)])  # [R + 1]
    cut_rows = np.concatenate([rollout.cut_rows + np.array([0, lane]) for rollout, lane in zip(rollouts, first_lane)])  # [K, 2]
    order = sort_cut_rows(cut_rows)

    def join(name: str, axis: int) -> Tree:
        trees = [rollout[name] for rollout in rollouts]
        return freeze(optree.tree_map(lambda *leaves: np.concatenate(leaves, axis), *trees))

    context: Tree = ()
    if rollouts[0].context != ():
        tables = [rollout.context[0] for rollout in rollouts]
        first_row = np.cumsum([0, *(optree.tree_leaves(table)[0].shape[0] for table in tables)])
        table = optree.tree_map(lambda *leaves: np.concatenate(leaves), *tables)  # [sum C, …]
        index = np.concatenate([rollout.context[1] + row for rollout, row in zip(rollouts, first_row)], 1)  # [T, B]
        context = freeze((table, index.astype(rollouts[0].context[1].dtype)))
    return Rollout(
        **{name: join(name, axis=1) for name in ("observations", "actions", *FLAT_DTYPES, "policy_state", "global_state", "extras")},
        **{name: _take(join(name, axis=0), order) for name in _CUTS},
        state_every=min(rollout.state_every for rollout in rollouts),
        cut_rows=freeze(cut_rows[order].astype(np.int32)),
        context=context,
        policy_version=join("policy_version", axis=0),
        weights_fingerprint=join("weights_fingerprint", axis=0),
        episodes=tuple(
            dataclasses.replace(episode, lane=episode.lane + int(lane))
            for rollout, lane in zip(rollouts, first_lane)
            for episode in rollout.episodes
        ),
    )


def _check_combinable(rollouts: Sequence[Rollout]) -> None:
    """Reject rollouts that differ in more than the number of lanes and of cut rows."""
    if not rollouts:
        raise RolloutError("there is no rollout to combine; give at least one")
    first = rollouts[0]
    for number, other in enumerate(rollouts[1:], 1):
        for name in ("observations", "actions", "policy_state", "global_state", "cut_state", "cut_global_state", "extras"):
            where = f"rollout {number}: {name}"
            check_structure(other[name], first[name], where, "rollout 0")
            lane_axis = 0 if name.startswith("cut_") else 1
            for (leaf_name, leaf), model in zip(named_leaves(other[name], where), optree.tree_leaves(first[name])):
                same_length = lane_axis == 1 and other.num_steps == first.num_steps
                shapes = [(*array.shape[: lane_axis * same_length], *array.shape[lane_axis + 1 :]) for array in (leaf, model)]
                if shapes[0] != shapes[1] or leaf.dtype != model.dtype:
                    raise RolloutError(
                        f"{leaf_name}: {leaf.dtype}{list(leaf.shape)} does not fit {model.dtype}{list(model.shape)} of rollout 0"
                    )
        check_structure(other.context, first.context, f"rollout {number}: context", "rollout 0")
        if other.lanes_per_copy != first.lanes_per_copy:
            raise RolloutError(
                f"rollout {number}: global_state has {other.lanes_per_copy} lanes per env copy, rollout 0 {first.lanes_per_copy}"
            )
    spacings = {rollout.state_every for rollout in rollouts} - {0}
    if len(spacings) > 1:
        raise RolloutError(f"memory is recorded every {sorted(spacings)} rows; combine rollouts of one ppo.sequence_length")


def _padded(rollout: Rollout, num_steps: int, number: int) -> Rollout:
    """Append invalid rows up to `num_steps`. What was a lane's last row is cut off there, so that no advantage comes from the padding."""
    own = rollout.num_steps
    if own == num_steps:
        return rollout
    every, memory = rollout.state_every, optree.tree_leaves(rollout.policy_state)
    if own == 0 or (memory and not every):
        raise RolloutError(
            f"rollout {number} has {own} steps, not {num_steps}, and cannot be padded: "
            + ("it has no row" if own == 0 else "state_every, the number of rows between its recorded policy states, is not known")
        )
    last = own - 1
    rows = np.minimum(np.arange(num_steps), last)  # [T] padding repeats the last row
    records = np.minimum(np.arange(-(-num_steps // max(1, every))), -(-own // max(1, every)) - 1)  # the memory's
    padding = np.arange(num_steps) > last
    cut = rollout.truncated.copy()
    cut[last] = ~rollout.terminated[last]
    at_end = np.flatnonzero(rollout.cut_rows[:, 0] == last)  # sorted, so lane by lane
    ends = np.stack([np.full(rollout.num_lanes, num_steps - 1), np.arange(rollout.num_lanes)], 1)

    def longer(tree: Tree, rows: np.ndarray = rows) -> Tree:
        return freeze(optree.tree_map(lambda leaf: leaf[rows], tree))

    fields: dict[str, Any] = {name: longer(rollout[name]) for name in ("observations", "actions", "log_probs", "global_state", "extras")}
    zeros = {"rewards": rollout.rewards, "terminated": rollout.terminated, "truncated": cut, "valid": rollout.valid}
    for name, array in (zeros | {"episode_starts": rollout.episode_starts}).items():
        fields[name] = freeze(np.where(padding[:, None], np.zeros((), array.dtype), array[rows]))
    for name in _CUTS:
        fields[name] = freeze(optree.tree_map(lambda leaf: np.concatenate([leaf, leaf[at_end]]), rollout[name]))
    fields["cut_valid"] = freeze(np.concatenate([rollout.cut_valid, np.zeros(rollout.num_lanes, np.bool_)]))
    if rollout.context != ():
        fields["context"] = (rollout.context[0], longer(rollout.context[1]))
    return dataclasses.replace(
        rollout,
        **fields,
        policy_state=longer(rollout.policy_state, records),
        cut_rows=freeze(np.concatenate([rollout.cut_rows, ends]).astype(np.int32)),
    )


def _take(tree: Tree, rows: np.ndarray) -> Tree:
    return freeze(optree.tree_map(lambda leaf: leaf[rows], tree))


def select_lanes(rollout: Rollout, lanes: Sequence[int] | np.ndarray) -> Rollout:
    """Return the rollout of some lanes (numbers in any order, or a bool per lane), with their cut rows and episodes renumbered."""
    chosen = lane_numbers(lanes, rollout.num_lanes)  # [n]
    new_lane = np.full(rollout.num_lanes, -1)  # [B] the lane's new number, -1 where it is not chosen
    new_lane[chosen] = np.arange(len(chosen))
    kept = np.flatnonzero(new_lane[rollout.cut_rows[:, 1]] >= 0)
    cut_rows = np.stack([rollout.cut_rows[kept, 0], new_lane[rollout.cut_rows[kept, 1]]], 1)
    order = sort_cut_rows(cut_rows)

    def columns(tree: Tree, chosen: np.ndarray = chosen) -> Tree:
        return freeze(optree.tree_map(lambda leaf: leaf[:, chosen], tree))

    # A row of global_state per env copy if every copy keeps equally many adjacent lanes, else one per lane.
    copies = chosen // max(1, rollout.lanes_per_copy)  # [n] the env copy of each chosen lane
    starts = np.flatnonzero(np.diff(copies, prepend=-1))
    lengths = np.diff(starts, append=len(copies))
    return Rollout(
        **{name: columns(rollout[name]) for name in ("observations", "actions", *FLAT_DTYPES, "policy_state", "extras")},
        **{name: _take(rollout[name], kept[order]) for name in _CUTS},
        state_every=rollout.state_every,
        cut_rows=freeze(cut_rows[order].astype(np.int32)),
        global_state=columns(rollout.global_state, copies[starts] if len(set(lengths.tolist())) == 1 else copies),
        context=rollout.context if rollout.context == () else (rollout.context[0], columns(rollout.context[1])),
        policy_version=_take(rollout.policy_version, chosen),
        weights_fingerprint=_take(rollout.weights_fingerprint, chosen),
        episodes=tuple(dataclasses.replace(e, lane=int(new_lane[e.lane])) for e in rollout.episodes if new_lane[e.lane] >= 0),
    )


def rollout_metrics(rollout: Rollout) -> dict[str, float]:
    """The metrics that need nothing but the rollout; each is absent where it has no meaning, such as `memory_spread` without memory."""
    seen, mask = rollout.observations, None
    if isinstance(seen, Mapping) and MASK_KEY in seen:
        mask = seen[MASK_KEY]
        seen = {key: inner for key, inner in seen.items() if key != MASK_KEY}
    metrics: dict[str, float] = {}
    rows = None if rollout.valid.all() else rollout.valid
    scales = [_largest_scale(leaf, rows) for leaf in optree.tree_leaves(seen) if leaf.dtype.kind == "f" and leaf.ndim <= 3 and leaf.size]
    if scales and rollout.num_valid:
        metrics["observation_scale"] = max(scales)
    ended = rollout.dones & rollout.valid  # [T, B]
    if ended.any():
        metrics["truncated_share"] = float(1.0 - rollout.terminated[ended].mean())
    if mask is not None and rollout.num_valid:
        metrics["forced_share"] = forced_share(mask, rollout.actions, rollout.valid)
    memories = [leaf for leaf in optree.tree_leaves(rollout.cut_state) if len(leaf) > 1]
    if memories:  # [K, *mem] each
        metrics["memory_spread"] = max(float(leaf.std(axis=0).mean()) for leaf in memories)
    return metrics


def _largest_scale(leaf: np.ndarray, rows: np.ndarray | None) -> float:
    """The largest root mean square of a feature of [T, B, *obs], over all rows or the valid ones."""
    values = leaf.reshape(leaf.shape[0] * leaf.shape[1], -1) if rows is None else leaf[rows].reshape(int(rows.sum()), -1)  # [N, features]
    if not len(values):
        return 0.0
    return float(np.sqrt(np.einsum("nf,nf->f", values, values, dtype=np.float64) / len(values)).max())


def forced_share(mask: Tree, actions: Tree, valid: np.ndarray) -> float:
    """The share of valid rows [T, B] whose mask leaves one action; 0 where a part of the action is continuous."""
    parts = optree.tree_leaves(actions)
    if any(part.dtype.kind == "f" for part in parts):
        return 0.0
    choices = sum(int(np.prod(part.shape[2:])) for part in parts)  # a Discrete action is one choice, MultiDiscrete one of each part
    allowed = sum(np.asarray(leaf != 0).reshape(*valid.shape, -1).sum(-1) for leaf in optree.tree_leaves(mask))  # [T, B]
    return float((np.asarray(allowed) <= choices)[valid].mean())
