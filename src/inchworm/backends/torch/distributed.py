"""Learning in several processes, the ranks of torch.distributed: what they sum, and who tells whom what to do next.

Every rank collects from its own lanes and computes the gradient of its own rows. All sums over rows are summed over the ranks and divided
once, so the weights are those of one process with all lanes, up to rounding, and equal on all ranks. Rank 0 runs the training loop: it
alone writes files, evaluates, calls callbacks and decides when to stop. The other ranks follow: before it collects, learns or takes
the state, rank 0 announces it, and they do the same with their lanes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import load, save
from torch import Tensor, nn

from inchworm.backends.learner import BaseLearner, Ranks
from inchworm.core.errors import ConfigError, RankError
from inchworm.core.protocols import Policy
from inchworm.core.tensor_file import flatten_tree, unflatten_tree
from inchworm.policy.file import fingerprint
from inchworm.policy.statistics import RunningMeanStd

COMMANDS = ("end", "collect", "update", "state")
"""What rank 0 announces."""


class TorchRanks(Ranks):
    """The ranks of a process group.

    `lanes` [ranks] is how many lanes each has; lanes are numbered over all ranks in order. Numbers of the host travel through a gloo
    group; gradients through the default group where that is nccl's (untested: the machines that tests run on have no GPU).
    """

    def __init__(self, timeout: float) -> None:
        self.rank, self.count, self.timeout = dist.get_rank(), dist.get_world_size(), timeout
        self._host = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._device = None if "nccl" in str(dist.get_backend()) else self._host
        self.lanes = np.zeros(self.count, np.int64)  # until `set_lanes`
        self._leads = False

    def set_lanes(self, own: int) -> None:
        """Exchange how many lanes each rank has."""
        self.lanes = self.all_rows(np.array([own], np.int64))

    @property
    def lane_range(self) -> tuple[int, int]:
        """The first of this rank's lanes, and the one after the last."""
        end = int(self.lanes[: self.rank + 1].sum())
        return end - int(self.lanes[self.rank]), end

    # ---- sums and exchanges

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Turn the error of a collective call into one line: another rank has ended or hangs."""
        try:
            yield
        except (RuntimeError, ValueError) as error:  # a ValueError if the group is destroyed
            raise RankError(
                f"rank {self.rank} of {self.count} stops, because another rank has ended or did not answer within {self.timeout:g} s "
                "(run.rank_timeout); the first error that a rank printed is the cause"
            ) from error

    def sum(self, part: Tensor) -> Tensor:
        """The sum of a tensor over all ranks."""
        whole = part.clone()
        with self._together():
            dist.all_reduce(whole, group=self._device if part.device.type != "cpu" else self._host)
        return whole

    def sum_gradients(self, parameters: Sequence[nn.Parameter], row: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sum the parameters' gradients over all ranks, in place, and return the summed terms of the loss: one exchange for all."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        parts = [*gradients, *row.values()]
        whole = self.sum(torch.cat([part.reshape(-1).to(gradients[0].dtype) for part in parts]))
        summed = torch.split(whole, [part.numel() for part in parts])
        for gradient, total in zip(gradients, summed):
            gradient.copy_(total.view_as(gradient))
        return {name: total.view_as(row[name]) for name, total in zip(row, summed[len(gradients) :])}

    def gather_bytes(self, own: bytes) -> list[bytes]:
        """The bytes of every rank, on every rank."""
        with self._together():
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
            dist.all_gather(sizes, torch.tensor([len(own)]), group=self._host)
            longest = max(1, max(int(size) for size in sizes))
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else 0
            parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.count)]
            dist.all_gather(parts, padded, group=self._host)
        return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes)]

    def broadcast_bytes(self, given: bytes = b"") -> bytes:
        """The bytes of rank 0, on every rank."""
        with self._together():
            size = torch.tensor([len(given)])
            dist.broadcast(size, 0, group=self._host)
            whole = torch.zeros(int(size), dtype=torch.uint8)
            if self.rank == 0 and given:
                whole.copy_(torch.frombuffer(bytearray(given), dtype=torch.uint8))
            dist.broadcast(whole, 0, group=self._host)
        return whole.numpy().tobytes()

    def gather_tree(self, tree: Any) -> list[Any]:
        """Trees of arrays and plain data of every rank, on every rank."""
        return [tree_from_bytes(blob) for blob in self.gather_bytes(tree_to_bytes(tree))]

    def broadcast_tree(self, tree: Any = None) -> Any:
        """Rank 0's tree, on every rank."""
        return tree_from_bytes(self.broadcast_bytes(tree_to_bytes(tree) if self.rank == 0 else b""))

    # ---- what learners ask for

    def begin_update(self, learner: BaseLearner) -> None:
        """Announce the update, and give the learner of every rank the counters and the learning rate of rank 0."""
        self.announce("update")
        own = [learner.env_steps, learner.total_timesteps, learner.learning_rate_scale, learner.initial_rate]
        learner.env_steps, learner.total_timesteps, learner.learning_rate_scale, learner.initial_rate = self.broadcast_tree(own)

    def total(self, count: int) -> int:
        """The sum of a count over all ranks."""
        return int(self.sum(torch.tensor(count)))

    def all_rows(self, rows: np.ndarray) -> np.ndarray:
        """The rows [n, …] of all ranks, in order of rank."""
        parts = self.gather_bytes(np.ascontiguousarray(rows).tobytes())
        return np.concatenate([np.frombuffer(part, rows.dtype).reshape(-1, *rows.shape[1:]) for part in parts])

    def own_lanes(self, values: np.ndarray) -> np.ndarray:
        """The part of values [B, …] of all lanes that is this rank's."""
        return values[slice(*self.lane_range)] if len(values) == self.lanes.sum() else values

    def own_columns(self, columns: np.ndarray, real: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """This rank's part of minibatches of all lanes' sequences [minibatches, N], as numbers of its own sequences; and which are real.

        The permutation is that of one process with all lanes. A rank's parts differ in size, so they are padded to the largest.
        """
        chunks, lanes = np.divmod(columns, int(self.lanes.sum()))
        first, end = self.lane_range
        mine = real & (lanes >= first) & (lanes < end)
        places = np.argsort(~mine, axis=1, kind="stable")[:, : max(1, int(mine.sum(1).max()))]  # own ones first, in their order
        own = np.take_along_axis(chunks * (end - first) + lanes - first, places, 1)
        kept = np.take_along_axis(mine, places, 1)
        return np.where(kept, own, 0), kept

    def merge(self, mean: Any, var: Any, count: int) -> tuple[Any, Any, int]:
        """Mean, population variance and number of the samples of all ranks, merged in order of rank (Chan et al. 1979)."""
        shape = np.shape(mean)
        rows = self.all_rows(np.concatenate([np.ravel(mean), np.ravel(var), [count]])[None].astype(np.float64))
        whole = RunningMeanStd(shape)
        for row in rows:
            size = (len(row) - 1) // 2
            whole.add_moments(row[:size].reshape(shape), row[size:-1].reshape(shape), int(row[-1]))
        return (whole.mean, whole.var, whole.count) if whole.count else (mean, var, 0)

    def synchronise(self, policy: Policy) -> None:
        """Give every rank the weights of rank 0, where they differ: at the start, and buffers such as running means after an update."""
        weights = policy.get_weights()
        if len(set(self.all_rows(np.array([fingerprint(weights)], np.uint64)).tolist())) > 1:
            policy.set_weights(self.broadcast_tree(weights))

    # ---- who does what

    def announce(self, command: str, number: int = 0) -> None:
        """Have the other ranks do the same, if this one leads them."""
        if self._leads:
            self._command(COMMANDS.index(command), number)

    def _command(self, command: int = 0, number: int = 0) -> tuple[int, int]:
        message = torch.tensor([command, number])
        with self._together():
            dist.broadcast(message, 0, group=self._host)
        return int(message[0]), int(message[1])

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """Lead the other ranks inside; they are released at the end, or lose their connection if it fails."""
        self._leads = True
        try:
            yield
            self.announce("end")
        except BaseException:
            leave()  # in the middle of an exchange no message can be sent to them
            raise
        finally:
            self._leads = False

    def follow(self, handlers: Mapping[str, Callable[[int], object]]) -> None:
        """Do what rank 0 announces, until it announces the end."""
        while True:
            command, number = self._command()
            if COMMANDS[command] == "end":
                return
            handlers[COMMANDS[command]](number)


def own_part(part: Tensor) -> Tensor:
    """The sum over all processes where there is one."""
    return part


def tree_to_bytes(tree: Any) -> bytes:
    """A tree of arrays and plain data as bytes that hold no code."""
    arrays, structure = flatten_tree(tree)
    return bytes(save({name: np.asarray(array, order="C") for name, array in arrays.items()}, {"tree": json.dumps(structure)}))


def tree_from_bytes(blob: bytes) -> Any:
    """The tree that `tree_to_bytes` wrote."""
    header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
    return unflatten_tree(load(blob), json.loads(header["__metadata__"]["tree"]))


@functools.cache
def _join(timeout: float) -> TorchRanks:
    if not dist.is_initialized():  # Ray Train has made the group
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ConfigError(f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but {' and '.join(missing)} not set; start the ranks with torchrun")
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        try:
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(seconds=timeout))
        except (RuntimeError, ValueError) as error:
            raise RankError(f"the ranks could not meet within {timeout:g} s (run.rank_timeout): {str(error).splitlines()[0]}") from error
    return TorchRanks(timeout)


def join_ranks(timeout: float) -> TorchRanks:
    """This process's place among the ranks that torchrun or Ray Train has started; they meet at the first call."""
    return _join(timeout)


def leave() -> None:
    """Close the connections to the other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _join.cache_clear()
