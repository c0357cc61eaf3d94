"""F3: the same seed twice, in this process and in workers, on every backend: the same bits."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from faults.programme import Outcome, Work, procedure
from faults.resume_runs import differing, go, quietly, settings

UPDATES = 4
WAYS: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 0},
    {"num_workers": 1},
    {"num_workers": 2},
    {"num_workers": 2},
    {"num_workers": 4},
    {"num_workers": 2, "help_workers": True},
]
"""How the copies are stepped."""


def run_of(directory: Path, world: str, backend: str, seed: int, way: Mapping[str, Any]) -> dict[str, str]:
    """The bits of four updates of four copies."""
    from inchworm.core.errors import InchwormError

    data = settings(world, backend, seed=seed)
    data["env"] |= {"num_envs": 4, **way}
    try:
        found, _ = quietly(go, directory, data, resume=False, updates=UPDATES)
    except (AssertionError, InchwormError) as error:  # an evaluation that failed, or a run that cannot be
        found = {str(error): ""}
    shutil.rmtree(directory, ignore_errors=True)
    return dict(found)


@procedure(
    "F3",
    title="The same seed again: in this process, with 1, 2 and 4 workers, helped; torch and NumPy",
    must="equal bits for every seed; the number of workers makes no difference",
    full=10,
    test=1,
)
def same_seed(work: Work) -> Outcome:
    """Discrete actions with even seeds, a Box with odd ones."""
    outcome, distinct = Outcome(), set[str]()
    for seed in work.each():
        world = ("discrete", "box")[seed % 2]
        for backend in ("numpy", "torch"):
            ways = WAYS
            if work.count == 1:  # the fast suite: one way of each kind
                ways = [WAYS[0], WAYS[-1]] if backend == "numpy" else []
            if ways:
                runs = [run_of(work.scratch / f"{seed}-{backend}-{n}", world, backend, seed, way) for n, way in enumerate(ways)]
                distinct.add(runs[0]["policy.safetensors"])
                for way, found in zip(ways[1:], runs[1:]):
                    wrong = differing(found, runs[0])
                    outcome.check(not wrong, f"seed {seed}, {world}, {backend}, {way}: {wrong} differ")
    if work.count > 1:
        expected = 2 * work.count
        outcome.check(
            len(distinct) > expected // 2, f"only {len(distinct)} different policies of {expected} runs: the seed makes no difference"
        )
    outcome.notes.append("workers are started as programs of their own; JAX comes with its own issue")
    return outcome
