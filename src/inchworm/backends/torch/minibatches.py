"""Step 7 of 9 in torch: a rollout with its advantages becomes shuffled minibatches, one gather an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor

from inchworm.backends.torch.encoding import to_tensors
from inchworm.backends.torch.loss import normalize
from inchworm.rollout.lane_states import PLACE, WORLD, lane_states
from inchworm.rollout.rollout import Rollout
from inchworm.rollout.sequences import minibatch_places, sequence_states, split_into_sequences, split_valid
from inchworm.rollout.successors import successor_observations
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
        "global_state": to_tensors(lane_states(rollout), rollout.valid.device),
    }
    return Minibatch(
        **split_into_sequences(steps, length),
        valid=split_valid(rollout.valid, length),
        policy_state=sequence_states(rollout.policy_state, rollout.num_steps, length, rollout.state_every),
    )


class PackedSequences:
    """A rollout's sequences, packed so that an epoch gathers few arrays: all leaves [L, N] of one dtype are one array [L, N, k]."""

    def __init__(self, sequences: Minibatch, shared: Tree = ()) -> None:
        """`shared` is a global state that `sequences` leaves out, once for each env copy, [L, N / lanes per copy, *]."""
        self.valid, self._shared = sequences.valid, shared
        leaves: Tree = {field.name: getattr(sequences, field.name) for field in fields(sequences)}
        self._states = leaves.pop(PER_SEQUENCE)
        flat, self._structure = optree.tree_flatten(leaves)
        self._places = _by_kind(flat)
        self._packs = [torch.stack([flat[index] for index in place], -1) if len(place) > 1 else flat[place[0]] for place in self._places]
        named: Any = self._structure.unflatten(range(len(flat)))
        self._valid_at, self._advantages_at = named["valid"], named["advantages"]

    def shuffled(self, num_minibatches: int, permutation: np.ndarray, *, normalized: bool = False) -> list[Minibatch]:
        """One epoch: every sequence in exactly one minibatch, in the order of `permutation`; padding is marked invalid.

        `normalized` gives each minibatch advantages of mean 0 and standard deviation 1, all of them at once.
        """
        places, real = minibatch_places(len(permutation), num_minibatches)  # [minibatches, N]
        columns = torch.from_numpy(permutation[places].reshape(-1)).to(self.valid.device)
        leaves = self._gathered(columns)
        if not real.all():
            leaves[self._valid_at] = leaves[self._valid_at] & torch.from_numpy(np.array(real).reshape(-1)).to(self.valid.device)
        if normalized:
            by_minibatch = (self.valid.shape[0], len(places), -1)  # [L, minibatches, N]
            advantages, valid = (leaves[index].reshape(by_minibatch) for index in (self._advantages_at, self._valid_at))
            leaves[self._advantages_at] = normalize(advantages, valid, dims=(0, 2)).flatten(1)
        cuts = zip(*[leaf.chunk(len(places), 1) for leaf in leaves])  # equal parts, because they are padded; views, no copies
        states = self._states_of(columns, len(places))
        parts = [Minibatch(**self._structure.unflatten(cut), policy_state=state) for cut, state in zip(cuts, states)]
        return self._with_worlds(parts, columns) if optree.tree_leaves(self._shared) else parts

    def _with_worlds(self, parts: list[Minibatch], columns: Tensor) -> list[Minibatch]:
        """Give each sequence of the minibatches the state of its copy, and its place there."""
        length, width = self.valid.shape
        per_copy = width // optree.tree_leaves(self._shared)[0].shape[1]
        # Column chunk * B + lane is of copy lane // k, whose column is chunk * B / k + lane // k.
        worlds: Tree = optree.tree_map(lambda leaf: leaf.index_select(1, columns // per_copy), self._shared)
        states: Tree = {WORLD: worlds, PLACE: (columns % per_copy).repeat(length, 1)}
        chosen, structure = optree.tree_flatten(states)
        cuts = zip(*[leaf.chunk(len(parts), 1) for leaf in chosen])
        return [replace(part, global_state=structure.unflatten(cut)) for part, cut in zip(parts, cuts)]

    def _states_of(self, columns: Tensor, num_minibatches: int) -> list[Tree]:
        """What the sequences of each minibatch begin with."""
        leaves, structure = optree.tree_flatten(self._states)
        if not leaves:
            return [self._states] * num_minibatches
        return [structure.unflatten(cut) for cut in zip(*[leaf[columns].chunk(num_minibatches) for leaf in leaves])]

    def _gathered(self, columns: Tensor) -> list[Tensor]:
        """All leaves [L, n, …] of these columns, in order."""
        leaves: dict[int, Tensor] = {}
        for place, pack in zip(self._places, self._packs):
            chosen = pack.index_select(1, columns)
            leaves |= zip(place, chosen.movedim(-1, 0).contiguous().unbind() if len(place) > 1 else [chosen])
        return [leaves[index] for index in range(len(leaves))]


def _by_kind(leaves: list[Tensor]) -> list[list[int]]:
    """Which leaves can be one array: those [L, N] of one dtype."""
    kinds: dict[Any, list[int]] = {}
    for index, leaf in enumerate(leaves):
        kinds.setdefault(leaf.dtype if leaf.ndim == 2 else index, []).append(index)
    return list(kinds.values())


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
