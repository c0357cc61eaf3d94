"""Step 7 of 9 in torch: a rollout with its advantages becomes shuffled minibatches, one gather an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor

from inchworm.rollout.rollout import Rollout, successor_observations
from inchworm.rollout.sequences import iter_minibatches, select_sequences, sequence_states, split_into_sequences, split_valid
from inchworm.types import Advantages, Minibatch, Tree

PER_SEQUENCE = "policy_state"
"""The one field of a minibatch that has no time axis: [N, *mem]."""


def sequences_of(rollout: Rollout, advantages: Advantages, length: int, *, successors: bool) -> Minibatch:
    """The whole rollout as one minibatch of [L, N] sequences, in order."""
    steps = {
        "observations": rollout.observations,
        "actions": rollout.actions,
        "log_probs": rollout.log_probs,
        "rewards": rollout.rewards,
        "terminated": rollout.terminated,
        "truncated": rollout.truncated,
        "episode_starts": rollout.episode_starts,
        "advantages": torch.where(rollout.valid, advantages.advantages, 0),
        "returns": torch.where(rollout.valid, advantages.returns, advantages.values),
        "values": advantages.values,
        "next_observations": successor_observations(rollout) if successors else (),
    }
    return Minibatch(
        **split_into_sequences(steps, length),
        valid=split_valid(rollout.valid, length),
        policy_state=sequence_states(rollout.policy_state),
    )


def harmless(rollout: Rollout) -> Rollout:
    """The rollout with a living row's observation, action and log-prob wherever no agent lived: no forward pass meets garbage.

    Zeros would not do: a space need not contain them (`Discrete(3, start=1)`), and a mask of zeros forbids every action.
    Rewards stay there, if they are numbers: a recursion may run through such rows.
    """
    if bool(rollout.valid.all()) or not bool(rollout.valid.any()):
        return rollout
    alive = tuple(rollout.valid.nonzero()[0].tolist())  # (t, b) of the first living row
    alive_at_cuts = rollout.valid[rollout.cut_rows[:, 0].long(), rollout.cut_rows[:, 1].long()]  # [K]
    fields_read = {name: getattr(rollout, name) for name in ("observations", "actions", "log_probs")}
    rows = {name: optree.tree_map(lambda leaf: leaf[alive], tree) for name, tree in fields_read.items()}
    changed = {name: _filled(tree, rollout.valid, rows[name]) for name, tree in fields_read.items()}
    changed["cut_observations"] = _filled(rollout.cut_observations, alive_at_cuts, rows["observations"])
    changed["rewards"] = torch.where(rollout.valid | rollout.rewards.isfinite(), rollout.rewards, 0)
    return _replaced(rollout, changed)


def _filled(tree: Tree, keep: Tensor, row: Tree) -> Tree:
    """The tree with `row` wherever `keep` is false."""
    return optree.tree_map(lambda leaf, fill: torch.where(keep.reshape(*keep.shape, *[1] * fill.ndim), leaf, fill), tree, row)


def _replaced(rollout: Rollout, changes: dict[str, Any]) -> Rollout:
    return Rollout(**{**{field.name: getattr(rollout, field.name) for field in fields(rollout)}, **changes})


def shuffled(sequences: Minibatch, num_minibatches: int, permutation: np.ndarray) -> Iterator[Minibatch]:
    """One epoch: every sequence in exactly one minibatch, in the order of `permutation`; padding is marked invalid."""
    parts = list(iter_minibatches(len(permutation), num_minibatches, permutation))
    device = sequences.valid.device
    columns = torch.from_numpy(np.concatenate([part for part, _ in parts])).to(device)
    real = np.concatenate([flags for _, flags in parts])
    gathered = {field.name: getattr(sequences, field.name) for field in fields(sequences)}
    states = optree.tree_map(lambda leaf: leaf[columns], gathered.pop(PER_SEQUENCE))
    gathered = select_sequences(gathered, columns)
    if not real.all():
        gathered["valid"] = gathered["valid"] & torch.from_numpy(real).to(device)
    width = len(parts[0][0])
    for start in range(0, len(columns), width):
        yield columns_of(gathered, states, start, start + width)


def columns_of(leaves: Tree, states: Tree, start: int, stop: int) -> Minibatch:
    """Sequences `start` to `stop` as a minibatch; views, no copies."""
    chosen = optree.tree_map(lambda leaf: leaf[:, start:stop], leaves)
    return Minibatch(**chosen, policy_state=optree.tree_map(lambda leaf: leaf[start:stop], states))


def micro_batches(minibatch: Minibatch, pieces: int) -> Iterator[Minibatch]:
    """A minibatch in `pieces` parts, for gradient accumulation."""
    if pieces == 1:
        yield minibatch
        return
    leaves = {field.name: getattr(minibatch, field.name) for field in fields(minibatch)}
    states = leaves.pop(PER_SEQUENCE)
    width = minibatch.valid.shape[1]
    edges = np.linspace(0, width, min(pieces, width) + 1).astype(int)
    for start, stop in pairwise(edges):
        yield columns_of(leaves, states, int(start), int(stop))
