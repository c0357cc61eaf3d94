"""A8: files that are saved over while somebody reads them."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from faults import durability_runs as runs
from faults.durability_damage import single_files
from faults.durability_fork import run_forked
from faults.durability_writer import policy_of, state_of
from faults.programme import Outcome, Work, procedure
from inchworm.core.errors import CorruptFileError
from inchworm.core.tensor_file import read_tensor_file, write_tensor_file
from inchworm.run.checkpoint import TrainingCheckpointer


@procedure(
    "A8",
    title="load, save to the same path, load; and loads while another process saves (policy file, rollout, checkpoints that are pruned)",
    must="bit-identical; no torn read, and nothing reported as damaged that only was replaced",
    full=1000,
    test=50,
)
def read_while_written(work: Work) -> Outcome:
    """`count` loads of each kind beside a process that saves without a pause."""
    with runs.in_memory(work) as here:
        return _read_all(here, here.scratch)


def _read_all(work: Work, scratch: Path) -> Outcome:
    """In memory, where saving is quick and so the two meet often."""
    outcome = Outcome()
    _save_over(scratch, outcome)
    for kind, save, load in (
        ("policy file", _save_file, _load_file),
        ("rollout", _save_rollout, _load_rollout),
        ("checkpoints", _save_checkpoint, _load_checkpoint),
    ):
        directory = scratch / kind
        directory.mkdir()
        save(directory, 1)
        writer = os.fork()
        if writer == 0:
            _write_for_ever(save, directory)
        try:
            seen = {_try(load, directory, kind, number, outcome) for number in work.each()}
        finally:
            os.kill(writer, signal.SIGKILL)
            os.waitpid(writer, 0)
        outcome.figures[f"different {kind} seen"] = str(len(seen - {-1}))
    return outcome


def _save_over(scratch: Path, outcome: Outcome) -> None:
    """What was loaded is saved to where it came from: the file does not change, nor what was loaded from it."""
    for file in single_files(scratch):
        before, content = file.read(file.path), file.path.read_bytes()
        first = runs.digest(before)
        ended = run_forked(partial(_again, file.name, file.path), scratch)
        same = file.path.read_bytes() == content and runs.digest(before) == first == runs.digest(file.read(file.path))
        outcome.check(ended.code == 0 and same, f"{file.name} saved to their own path: code {ended.code} {ended.error[-200:]}")
    checkpointer = TrainingCheckpointer(scratch / "over")
    checkpointer.save(1, state_of(1))
    loaded = checkpointer.load()
    again = checkpointer.save(1, loaded.state)
    same = runs.digest(checkpointer.load(again).state) == runs.digest(loaded.state) == runs.digest(state_of(1))
    outcome.check(same, "a checkpoint saved again is another")


def _again(name: str, path: Path) -> int:
    """Load and save to the same path."""
    from inchworm.policy.file import read_policy, save_policy
    from inchworm.rollout.rollout import Rollout

    if name == "rollouts":
        Rollout.load(path).save(path)
    else:
        save_policy(path, *read_policy(path))
    return 0


def _try(load: Callable[[Path], int], directory: Path, kind: str, number: int, outcome: Outcome) -> int:
    """One load; the step that was found, or -1."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step = load(directory)
    except (CorruptFileError, OSError, UserWarning, ValueError) as error:
        outcome.check(False, f"{kind}, load {number}: {type(error).__name__}: {error}")
        return -1
    outcome.check(True, "")
    return step


def _write_for_ever(save: Callable[[Path, int], Any], directory: Path) -> None:
    """The other process; it ends when it is killed, or by itself after a while."""
    try:
        step, until = 1, time.monotonic() + 600
        while time.monotonic() < until:
            step += 1
            save(directory, step)
    finally:
        os._exit(1)


def _save_file(directory: Path, step: int) -> None:
    write_tensor_file(directory / "policy.safetensors", policy_of(step), kind="policy", version=1, header={"step": step})


def _load_file(directory: Path) -> int:
    arrays, header = read_tensor_file(directory / "policy.safetensors", kind="policy", max_version=1)
    return _equal(int(header["step"]), arrays, policy_of(int(header["step"])))


def _save_rollout(directory: Path, step: int) -> None:
    from gymnasium import spaces

    from inchworm.rollout.fake import create_fake_rollout

    create_fake_rollout(spaces.Box(-1, 1, (3,)), spaces.Discrete(2), 40, 4, seed=step % 5).save(directory / "rollout.safetensors")


def _load_rollout(directory: Path) -> int:
    """The file proves itself whole by its checksum; which of the five it is, its first episode's seed says."""
    from inchworm.rollout.rollout import Rollout

    return int(Rollout.load(directory / "rollout.safetensors").episodes[0].seed)


def _save_checkpoint(directory: Path, step: int) -> None:
    TrainingCheckpointer(directory).save(step, state_of(step))


def _load_checkpoint(directory: Path) -> int:
    found = TrainingCheckpointer(directory).load()
    return _equal(found.step, found.state, state_of(found.step))


def _equal(step: int, found: Any, expected: Any) -> int:
    if runs.digest(found) != runs.digest(expected):
        raise ValueError(f"step {step} has another content than was saved")
    return step
