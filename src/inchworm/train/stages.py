"""A hash per stage of every iteration, in `hashes.jsonl`, from which `inchworm diff` tells where two runs part.

The stages are those of the walk: what the environment returned, how the policy acted, the advantages, the order of the samples, and the
weights after the update. Environment and acting feed each other step by step, so both also have a mark per step. Hashes are only read to
compare runs; nothing of a training depends on them.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from inchworm.core.protocols import BaseCallback, Policy
from inchworm.core.seeding import make_stream
from inchworm.core.spaces import tree_leaves
from inchworm.core.types import Array
from inchworm.policy.file import fingerprint
from inchworm.rollout.rollout import Rollout
from inchworm.tracking.jsonl import JsonlTracker, read_rows
from inchworm.train.loop import TrainingState

STAGES = {
    "environment": "environment",
    "acting": "acting",
    "advantages": "advantages",
    "order": "minibatch order",
    "weights": "weights",
}
"""The stages of an iteration in their order, with their names in texts."""

BEFORE = "weights_before"
"""The name of the hash of the weights that acted."""
COMPILED = "loop:"
"""How hashes begin that a compiled loop took on its device. They are made in another way than those of NumPy arrays."""
KEPT_BYTES = 2**18
"""Rollouts up to this size are kept until their rows are written, several together; larger ones are hashed when they come."""
BLOCK = 2**16
"""Words that are multiplied at a time, so that they stay in the processor's cache."""


@lru_cache(maxsize=32)
def _keys(size: int) -> np.ndarray:
    """[size] u64: random numbers, the first of which are the same for every size."""
    return make_stream(0, "stages").integers(0, 2**64, size, np.uint64)


def hash_rows(leaves: Sequence[Array]) -> np.ndarray:
    """A 32-bit hash [T] of each row over all arrays [T, …].

    It is the upper half of the sum of the row's 32-bit words, each times a random 64-bit number: rows that differ have the same one with
    probability 2^-32 (Lemire & Kaser 2014, "Strongly universal string hashing is fast", section 3). For short rows a product of matrices
    is many times faster than a checksum of each.
    """
    sums, offset = list[np.ndarray](), 0  # [T] u64 each
    for leaf in leaves:
        array = np.ascontiguousarray(leaf)
        content = array.reshape(len(array), array.size // max(1, len(array))).view(np.uint8)  # [T, bytes]
        if missing := -content.shape[1] % 4:
            content = np.concatenate([content, np.zeros((len(content), missing), np.uint8)], 1)
        words: np.ndarray = content.view(np.uint32)  # [T, W]
        if words.shape[1] > BLOCK and array.ndim > 2:  # wide rows, such as images of many lanes: each lane first
            words = hash_rows([array.reshape(-1, *array.shape[2:])]).reshape(array.shape[:2])
        width = words.shape[1]
        keys, rows = _keys(1 << (offset + width).bit_length())[offset : offset + width], max(1, BLOCK // max(1, width))
        products = [words[start : start + rows] @ keys for start in range(0, len(words), rows)]
        sums.append(products[0] if len(products) == 1 else np.concatenate(products))
        offset += width
    return _upper_halves(sum(sums[1:], sums[0]))


def _upper_halves(numbers: np.ndarray) -> np.ndarray:
    """The upper half of the bits of each of [n] unsigned numbers: a view, which costs less than a shift and a conversion."""
    size = numbers.dtype.itemsize
    halves: np.ndarray = np.ascontiguousarray(numbers.astype(f"<u{size}", copy=False).view(f"<u{size // 2}")[1::2])
    return halves


def rollout_hashes(rollout: Rollout) -> dict[str, str]:
    """The hashes of a rollout: environment and acting, each with its marks per step.

    The environment acts on the policy by observations, and the policy on the environment by actions, so that marks of these tell which of
    the two differed first. Of rows without an agent, which hold anything, only that they are invalid counts.
    """
    all_valid = bool(rollout.valid.all())

    def known(*trees: Any) -> list[Array]:
        found = [leaf for tree in trees for leaf in tree_leaves(tree)]
        if all_valid:
            return found
        return [np.where(rollout.valid.reshape(*rollout.valid.shape, *(1,) * (leaf.ndim - 2)), leaf, 0) for leaf in found]

    seen, done = hash_rows(known(rollout.observations)), hash_rows(known(rollout.actions))  # [T] each
    results = known(rollout.rewards, rollout.terminated, rollout.truncated, rollout.episode_starts)
    cuts = (rollout.cut_rows, rollout.cut_observations, rollout.cut_valid, rollout.global_state, rollout.cut_global_state)
    environment = checksum(seen, *results, rollout.valid, *(leaf for tree in cuts for leaf in tree_leaves(tree)))
    marks = {f"{stage}_steps": pack_marks(hashes) for stage, hashes in (("environment", seen), ("acting", done))}
    return {"environment": f"{environment:08x}", "acting": f"{checksum(done, *known(rollout.log_probs)):08x}", **marks}


def checksum(*arrays: Array) -> int:
    """CRC-32 of the bytes of some arrays."""
    result = 0
    for array in arrays:
        content: Any = np.ascontiguousarray(array)
        result = zlib.crc32(content, result)
    return result


def pack_marks(hashes: np.ndarray) -> str:
    """The upper 16 bits of each row's hash, in base64."""
    return base64.b64encode(_upper_halves(hashes).tobytes()).decode()


def unpack_marks(text: Any) -> np.ndarray:
    """The marks [n] of `pack_marks`; none if the text is not one."""
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), "<u2")
    except (ValueError, TypeError):
        return np.zeros(0, np.uint16)


class StageCallback(BaseCallback):
    """Writes a row of hashes per iteration into the run's directory.

    It sees the rollout as it was collected, with the fingerprint of the weights that acted, which are those after the iteration before;
    and the learner passes advantages and orders to `on_stage`. Iterations of a compiled loop bring hashes of their own.
    """

    profile_section, sees_every, reads_rollouts = "tracking", 0, False  # it does not keep iterations from being computed together

    def __init__(self, policy: Policy, tracker: JsonlTracker) -> None:
        self._policy, self._tracker = policy, tracker
        self._row: dict[str, Any] = {}  # of the running iteration, or of the end until it is written
        self._rollout: Rollout | None = None  # of the running iteration
        self._computed: dict[str, list[bytes]] = {}  # stage -> content of the running iteration

    def on_train_start(self, state: TrainingState) -> None:
        """Forget what is left of an earlier call, and hash the weights that the run begins with."""
        self._row, self._rollout, self._computed = {}, None, {}
        if state.iteration == 0:
            self._row[BEFORE] = f"{fingerprint(self._policy.get_weights()):016x}"

    def on_rollout(self, state: TrainingState, rollout: Rollout) -> None:
        """Keep what was collected; a large rollout is hashed at once."""
        del state
        acted = int(rollout.weights_fingerprint[0]) or fingerprint(self._policy.get_weights())  # 0: a collector that does not know
        self._row, self._rollout = {BEFORE: f"{acted:016x}"}, rollout.to_numpy()
        if self._rollout.nbytes > KEPT_BYTES:
            self._row, self._rollout = self._row | rollout_hashes(self._rollout), None

    def on_stage(self, stage: str, *arrays: Array) -> None:
        """Keep what the learner computed in a stage; called again, it goes into the same hash."""
        self._computed.setdefault(stage, []).extend(np.asarray(array).tobytes() for array in arrays)

    def on_iteration(self, state: TrainingState, metrics: Mapping[str, float]) -> None:
        """Log the row, which is made when several are written together."""
        del metrics
        row, rollout, computed, stages = self._row, self._rollout, self._computed, state.stages
        if state.settled and not stages and rollout is None and "environment" not in row:  # the next rollout does not bring them either
            row["weights"] = f"{fingerprint(self._policy.get_weights()):016x}"
        head = {"iteration": state.iteration, "env_steps": state.env_steps}

        def make_row() -> dict[str, Any]:
            found = head | row | ({} if rollout is None else rollout_hashes(rollout))
            found |= {stage: f"{zlib.crc32(b''.join(parts)):08x}" for stage, parts in computed.items()}
            if stages:
                found |= {stage: f"{COMPILED}{checksum(*arrays):08x}" for stage, arrays in stages.items()}
                found |= {f"{stage}_steps": pack_marks(stages[stage][0]) for stage in ("environment", "acting")}
            return found

        if row or rollout is not None or computed or stages:
            self._tracker.log_hashes(make_row)
        self._row, self._rollout, self._computed = {}, None, {}

    def on_train_end(self, state: TrainingState) -> None:
        """Hash the final weights, for `log_last`."""
        weights = f"{fingerprint(self._policy.get_weights()):016x}"
        self._row = {"iteration": state.iteration, "env_steps": state.env_steps, "weights": weights}

    def log_last(self) -> None:
        """Write the hash of the final weights, if training has come to its end.

        `train` calls this after the last save, so that a resumed run removes the row and has those of an undisturbed one.
        """
        if "iteration" in (row := self._row):
            self._tracker.log_hashes(lambda: row)
        self._row = {}


def comparable(one: Any, other: Any) -> bool:
    """Whether two hashes of a stage are there and made in the same way."""
    return bool(one and other) and str(one).startswith(COMPILED) == str(other).startswith(COMPILED)


def is_compiled(rows: Mapping[int, Mapping[str, Any]]) -> bool:
    """Whether a run's hashes are those of a compiled loop."""
    return any(str(row.get("environment")).startswith(COMPILED) for row in rows.values())


def read_hashes(path: Path) -> dict[int, dict[str, Any]]:
    """The hashes of a run's iterations by their numbers; those of iteration 0 are of the weights that it began with."""
    found: dict[int, dict[str, Any]] = {}
    for row in read_rows(path):
        if "iteration" in row:
            known = found.setdefault(row["iteration"], {})
            known.update(row | known if str(known.get("environment")).startswith(COMPILED) else row)
    for number, row in list(found.items()):
        if row.get(BEFORE) and (number == 1 or number - 1 in found):
            found.setdefault(number - 1, {}).setdefault("weights", row[BEFORE])
    return found
