"""Rollouts as Minari datasets, which other libraries of offline reinforcement learning read, and the other way round."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import optree

from inchworm.core.errors import MissingExtraError, RolloutError
from inchworm.core.spaces import Space
from inchworm.core.types import EpisodeRecord, Tree
from inchworm.rollout.rollout import Rollout, combine_rollouts

_KEPT = ("log_probs", "policy_version", "weights_fingerprint", "episode_starts")
"""What PPO needs besides Minari's own fields. It goes into the infos, which have one entry more than there are steps: it is not used."""
_LOST = ("policy_state", "global_state", "context", "extras")


def export_minari(
    rollout: Rollout, dataset_id: str, *, observation_space: Space, action_space: Space, env: Any = None, **metadata: Any
) -> Any:
    """Write a rollout as a new Minari dataset, an episode for each stretch of a lane, and return the dataset.

    An episode that the rollout cuts off is truncated there, with its true successor as the last observation. `env` is an id, a spec or an
    environment that the dataset shall name; `metadata` are other arguments of `minari.create_dataset_from_buffers`, such as `author`.
    """
    minari, buffers = _minari(), []
    rollout.validate(observation_space, action_space)
    if not rollout.num_valid:
        raise RolloutError("the rollout has no valid row, so there is nothing to write")
    if lost := [name for name in _LOST if optree.tree_leaves(rollout[name])]:
        warnings.warn(f"a Minari dataset has no place for {', '.join(lost)} of the rollout; they are left out", stacklevel=2)
    following = rollout.next_observations
    from minari.data_collector import EpisodeBuffer

    for number, (lane, first, last) in enumerate(_stretches(rollout)):
        rows = slice(first, last + 1)
        ended = rollout.terminated[rows, lane]
        truncations = rollout.truncated[rows, lane].copy()
        truncations[-1] = not ended[-1]
        observations: Tree = optree.tree_map(
            lambda leaf, after, at=(rows, lane), end=(last, lane): np.concatenate([leaf[at], after[end][None]]),
            rollout.observations,
            following,
        )
        columns = {name: rollout[name][rows, lane] if rollout[name].ndim == 2 else rollout[name][[lane] * len(ended)] for name in _KEPT}
        infos = {name: np.concatenate([column, column[-1:]]) for name, column in columns.items()}
        actions: Tree = optree.tree_map(lambda leaf, at=(rows, lane): leaf[at], rollout.actions)
        flags: dict[str, Any] = {"terminations": ended, "truncations": truncations}
        rewards: Any = rollout.rewards[rows, lane]
        buffers.append(EpisodeBuffer(id=number, observations=observations, actions=actions, rewards=rewards, infos=infos, **flags))
    spaces = {"observation_space": observation_space, "action_space": action_space}
    return minari.create_dataset_from_buffers(dataset_id, buffers, env=env, jpeg_encoding=False, **spaces, **metadata)


def import_minari(dataset: Any, *, lanes: int = 1, log_probs: Callable[[Rollout], np.ndarray] | None = None) -> Rollout:
    """Make a rollout of a Minari dataset, or of the id of one: its episodes one after another, in `lanes` lanes of about equal length.

    A lane holds episodes of one policy, whose version and fingerprint it tells: with several, there may be more lanes.

    The log-probs of the policy that acted are read from the infos, where `export_minari` writes them. For a dataset without them,
    `log_probs(rollout)` returns them as [T, B]: those of the policy that you assume to have acted.
    """
    if lanes < 1:
        raise RolloutError(f"lanes={lanes} must be 1 or more")
    found = _minari().load_dataset(dataset) if isinstance(dataset, str) else dataset
    episodes = list(found.iterate_episodes())
    if not episodes:
        raise RolloutError(f"the dataset {dataset!s:.80} has no episodes")
    known = all("log_probs" in (episode.infos or {}) for episode in episodes)
    if not known and log_probs is None:
        raise RolloutError(
            "the dataset has no log_probs in its infos, and PPO needs those of the policy that acted; pass log_probs=, a function of the "
            "rollout"
        )
    by_policy: dict[tuple[int, ...], list[Any]] = {}
    for episode in sorted(episodes, key=len, reverse=True):
        by_policy.setdefault(tuple(_policy_of(episode).values()), []).append(episode)
    steps, shares = sum(map(len, episodes)), list[list[Any]]()
    for group in by_policy.values():
        own: list[list[Any]] = [[] for _ in range(max(1, min(round(lanes * sum(map(len, group)) / max(1, steps)), len(group))))]
        for episode in group:  # each to the shortest lane so far
            min(own, key=lambda share: sum(map(len, share))).append(episode)
        shares += own
    rollout = combine_rollouts([_one_lane(sorted(share, key=lambda episode: episode.id), known=known) for share in shares])
    if log_probs is None:
        return rollout
    return Rollout.from_dict({**rollout.to_dict(), "log_probs": np.asarray(log_probs(rollout), np.float32)})


def _policy_of(episode: Any) -> dict[str, int]:
    """The version and fingerprint of the policy that acted; 0 if the dataset does not tell."""
    return {name: int(np.asarray((episode.infos or {}).get(name, [0]))[0]) for name in ("policy_version", "weights_fingerprint")}


def _stretches(rollout: Rollout) -> Iterator[tuple[int, int, int]]:
    """(lane, first row, last row) of every stretch of valid rows of one episode, lane by lane."""
    valid, ended = rollout.valid, rollout.dones
    for lane in range(rollout.num_lanes):
        first = None
        for row in range(rollout.num_steps):
            if not valid[row, lane]:
                continue
            first = row if first is None else first
            over = row == rollout.num_steps - 1 or ended[row, lane] or not valid[row + 1, lane]
            if over:
                yield lane, first, row
                first = None


def _one_lane(episodes: Sequence[Any], *, known: bool) -> Rollout:
    """The rollout [T, 1] of episodes one after another."""

    def join(trees: Sequence[Tree]) -> Tree:
        return optree.tree_map(lambda *leaves: np.concatenate(leaves)[:, None], *trees)

    def column(name: str, default: Any, dtype: Any) -> np.ndarray:
        found = [(one.infos or {}).get(name) for one in episodes]
        parts = [np.full(len(one), default) if given is None else np.asarray(given)[: len(one)] for one, given in zip(episodes, found)]
        return np.concatenate(parts).astype(dtype)[:, None]

    lengths = np.array([len(episode) for episode in episodes])
    ends = np.cumsum(lengths) - 1  # [episodes] last rows
    starts = np.zeros((int(lengths.sum()), 1), np.bool_)
    starts[ends - lengths + 1] = True
    if known:
        starts = column("episode_starts", False, np.bool_)
    terminated = np.concatenate([np.asarray(one.terminations, np.bool_) for one in episodes])[:, None]
    truncated = np.zeros_like(terminated)
    truncated[ends] = ~terminated[ends]
    needed = truncated.copy()
    needed[-1] = True
    chosen = [episode for episode, end in zip(episodes, ends) if needed[end, 0]]
    finals = [optree.tree_map(lambda leaf: np.asarray(leaf)[-1], one.observations) for one in chosen]
    begun = starts[ends - lengths + 1, 0]  # [episodes] whether their first step is in the dataset
    over = [bool(one.terminations[-1] or one.truncations[-1]) for one in episodes]
    whole = [one for one, first, last in zip(episodes, begun, over) if first and last]
    return Rollout.from_dict(
        {
            "observations": join([optree.tree_map(lambda leaf: np.asarray(leaf)[:-1], one.observations) for one in episodes]),
            "actions": join([optree.tree_map(np.asarray, one.actions) for one in episodes]),
            "log_probs": column("log_probs", 0.0, np.float32),
            "rewards": np.concatenate([np.asarray(one.rewards, np.float32).reshape(-1) for one in episodes])[:, None],
            "terminated": terminated,
            "truncated": truncated,
            "episode_starts": starts,
            "cut_rows": np.argwhere(needed).astype(np.int32),
            "cut_observations": optree.tree_map(lambda *leaves: np.stack(leaves), *finals),
            **_policy_of(episodes[0]),
            "episodes": [EpisodeRecord(float(np.sum(one.rewards)), len(one), 0, 0) for one in whole],
        }
    )


def _minari() -> Any:
    try:
        import minari
    except ImportError:
        raise MissingExtraError("Minari is not installed; type: pip install 'inchworm[minari]'") from None
    return minari
