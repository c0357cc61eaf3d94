"""Serves steps 6 and 8 of 9: sequences [L, N, …] laid flat as rows [L·N, …], and how many of those are read at once."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import optree
from torch import Tensor

from inchworm.types import Tree

VALUE_CHUNK = 16_384
"""Rows that the critic reads at once, so that a rollout does not need the memory of all its activations."""
VALUE_NUMBERS = 2**24
"""And the numbers in those rows: observations of more than 1,024, such as images, are read fewer at once."""


def chunks(tree: Tree, rows: int) -> Iterator[Tree]:
    """Rows [rows, …], some at a time."""
    size = rows_at_once(tree, 1)
    for start in range(0, rows, size):
        yield optree.tree_map(operator.itemgetter(slice(start, start + size)), tree)


def rows_at_once(tree: Tree, num_leading: int) -> int:
    """How many rows of such leaves, which have so many axes in front."""
    numbers = sum(leaf.shape[num_leading:].numel() for leaf in optree.tree_leaves(tree))  # of one row
    return max(1, min(VALUE_CHUNK, VALUE_NUMBERS // max(1, int(numbers))))


def merge_leading(tree: Tree) -> tuple[Tree, tuple[int, int]]:
    """[L, N, …] as [L·N, …], which is what networks read; and (L, N)."""
    if isinstance(tree, Tensor):
        return tree.flatten(0, 1), (tree.shape[0], tree.shape[1])
    first = optree.tree_leaves(tree)[0]
    return optree.tree_map(lambda leaf: leaf.flatten(0, 1), tree), (first.shape[0], first.shape[1])
