"""Step 7 of 9 in NumPy: a rollout becomes the arrays that learning reads, encoded once; an epoch is one gather of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import optree

from inchworm.backends.numpy.encoding import encode_mask, flatten_actions
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.rollout.rollout import Rollout
from inchworm.rollout.sequences import minibatch_places, select_sequences, split_into_sequences, split_valid
from inchworm.rollout.successors import successor_observations
from inchworm.spaces import MASK_KEY
from inchworm.types import Advantages, Minibatch, Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Some samples as learning reads them. They are [L, N] sequences laid flat, n = L · N, one row or column a sample."""

    inputs: np.ndarray
    """[n, F] encoded and normalised observations"""
    choices: np.ndarray
    """[G, n]"""
    gaussians: np.ndarray
    """[D, n]"""
    mask: np.ndarray | None
    """[C, n], or None where every choice is legal"""
    scalars: np.ndarray
    """[4, n] behaviour log-probs, advantages, returns, values before the update; an array of this epoch alone"""
    valid: np.ndarray | None
    """[n] bool, or None where every sample counts"""
    length: int
    """L"""
    minibatch: Callable[[], Minibatch]
    """The same samples as the value that custom losses and people read; made when it is asked for."""

    @property
    def log_probs(self) -> np.ndarray:
        """[n] of the behaviour policy."""
        row: np.ndarray = self.scalars[0]
        return row

    @property
    def advantages(self) -> np.ndarray:
        """[n]"""
        row: np.ndarray = self.scalars[1]
        return row

    @property
    def returns(self) -> np.ndarray:
        """[n]"""
        row: np.ndarray = self.scalars[2]
        return row

    @property
    def values(self) -> np.ndarray:
        """[n] before the update."""
        row: np.ndarray = self.scalars[3]
        return row

    @property
    def count(self) -> int:
        """Samples that count."""
        return self.scalars.shape[1] if self.valid is None else int(np.count_nonzero(self.valid))


class RolloutSamples:
    """A whole rollout as samples, in the order of its sequences."""

    def __init__(self, policy: NumpyPolicy, rollout: Rollout, advantages: Advantages, length: int, *, successors: bool) -> None:
        layout, dtype = policy.spec.actions, advantages.values.dtype
        facts = {name: getattr(rollout, name) for name in ("observations", "actions", "rewards", "terminated", "truncated")}
        opinions = {
            "log_probs": rollout.log_probs,
            "advantages": np.where(rollout.valid, advantages.advantages, dtype.type(0)),
            "returns": np.where(rollout.valid, advantages.returns, advantages.values),
            "values": advantages.values,
        }
        facts |= {"episode_starts": rollout.episode_starts, "next_observations": successor_observations(rollout) if successors else ()}
        self._steps = split_into_sequences({**facts, **opinions}, length)  # every leaf [L, N, …]
        self.valid = split_valid(rollout.valid, length)  # [L, N]
        self._length = length
        self._step_starts = np.arange(length)[:, None] * self.valid.shape[1]  # [L, 1] where the samples of each step begin
        self._all_valid = bool(self.valid.all())
        observations = self._steps["observations"]
        choices, gaussians = flatten_actions(layout, self._steps["actions"], 2)
        mask = encode_mask(layout, observations[MASK_KEY], 2) if policy.spec.observations.has_mask else None
        self._inputs = policy.encode(observations, 2)[0].astype(dtype, copy=False)  # [n, F]
        self._choices, self._gaussians = _columns(choices), _columns(gaussians).astype(dtype)
        self._mask = None if mask is None else _columns(mask)
        self._scalars = np.stack([self._steps[name].reshape(-1) for name in opinions]).astype(dtype, copy=False)

    def shuffled(self, num_minibatches: int, permutation: np.ndarray) -> list[Samples]:
        """One epoch: every sequence in exactly one minibatch, in the order of `permutation`; padding is marked invalid."""
        places, real = minibatch_places(len(permutation), num_minibatches)
        columns = permutation[places]  # [minibatches, N]
        order = (columns[:, None] + self._step_starts).reshape(-1)  # [all samples], minibatch after minibatch
        whole = self._take(order)
        valid = None
        if not (self._all_valid and real.all()):
            valid = self.valid.reshape(-1)[order] & np.repeat(real[:, None], self._length, 1).reshape(-1)
        size = columns.shape[1] * self._length
        return [
            _window(whole, valid, slice(index * size, (index + 1) * size), self._length, partial(self._minibatch, part, flags))
            for index, (part, flags) in enumerate(zip(columns, real))
        ]

    def _take(self, order: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None, np.ndarray]:
        """The one gather of an epoch."""
        inputs, scalars = self._inputs.take(order, 0), self._scalars.take(order, 1)
        mask = None if self._mask is None else self._mask.take(order, 1)
        return inputs, self._choices.take(order, 1), self._gaussians.take(order, 1), mask, scalars

    def _minibatch(self, columns: np.ndarray, real: np.ndarray) -> Minibatch:
        return Minibatch(**select_sequences(self._steps, columns), valid=self.valid[:, columns] & real)


def _window(
    whole: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None, np.ndarray],
    valid: np.ndarray | None,
    part: slice,
    length: int,
    minibatch: Callable[[], Minibatch],
) -> Samples:
    """A minibatch of an epoch: views, no copies."""
    inputs, choices, gaussians, mask, scalars = whole
    return Samples(
        inputs=inputs[part],
        choices=choices[:, part],
        gaussians=gaussians[:, part],
        mask=None if mask is None else mask[:, part],
        scalars=scalars[:, part],
        valid=None if valid is None else valid[part],
        length=length,
        minibatch=minibatch,
    )


def micro_batches(samples: Samples, pieces: int) -> Iterator[Samples]:
    """A minibatch in `pieces` parts of whole sequences, for gradient accumulation."""
    if pieces == 1:
        yield samples
        return
    width = samples.scalars.shape[1] // samples.length
    whole = samples.minibatch()
    for start, stop in pairwise(np.linspace(0, width, min(pieces, width) + 1).astype(int)):
        chosen = (np.arange(samples.length)[:, None] * width + np.arange(start, stop)).reshape(-1)
        yield Samples(
            inputs=samples.inputs[chosen],
            choices=samples.choices[:, chosen],
            gaussians=samples.gaussians[:, chosen],
            mask=None if samples.mask is None else samples.mask[:, chosen],
            scalars=samples.scalars[:, chosen],
            valid=None if samples.valid is None else samples.valid[chosen],
            length=samples.length,
            minibatch=_piece(whole, slice(start, stop)),
        )


def _piece(whole: Minibatch, part: slice) -> Callable[[], Minibatch]:
    fields: Tree = {field.name: getattr(whole, field.name) for field in dataclasses.fields(whole)}
    return lambda: Minibatch(**optree.tree_map(lambda leaf: leaf[:, part], fields))


def as_minibatch(samples: Samples) -> Minibatch:
    """The same samples as people read them, advantages as the step has them."""
    return dataclasses.replace(samples.minibatch(), advantages=as_rows(samples.advantages, samples.length))


def _columns(array: np.ndarray) -> np.ndarray:
    """[L, N, k] -> [k, n]"""
    return np.ascontiguousarray(np.moveaxis(array, -1, 0)).reshape(array.shape[-1], array.shape[0] * array.shape[1])


def as_rows(values: np.ndarray, length: int) -> np.ndarray:
    """[n] -> [L, N]"""
    return values.reshape(length, -1)
