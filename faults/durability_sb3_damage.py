"""A6 for Stable-Baselines3: the zip of PPO.save and the pickle of VecNormalize.save, damaged in the same ways."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from functools import partial
from pathlib import Path

from faults.durability_damage import FILE_KINDS, damaged
from faults.durability_fork import run_forked
from faults.durability_sb3 import NAME, SAME, SILENT, UNREADABLE, judge, save, warm
from faults.programme import Outcome, Work, peer

DAMAGED_PER_KIND = 60


@peer("A6", NAME)
def damaged_files(work: Work) -> Outcome:
    """Each file is loaded in a child."""
    warm(work.scratch / "warm")
    outcome, rng, found = Outcome(), random.Random(work.seed), Counter[str]()
    for step, updates in enumerate((1, 2)):
        run_forked(partial(save, work.scratch / f"{step}", updates), work.scratch)
    files = {name: (work.scratch / "0" / name).read_bytes() for name in ("model.zip", "normalize.pkl")}
    older = (work.scratch / "1" / "normalize.pkl").read_bytes()
    expected = (work.scratch / "0" / "digest").read_text()
    cases = [(name, kind) for name in files for kind in FILE_KINDS] + [
        ("both", "two files swapped"),
        ("normalize.pkl", "part of another step"),
    ]
    each = min(work.count, DAMAGED_PER_KIND)
    for number in work.each(len(cases) * each):
        name, kind = cases[number // each]
        _damage(work.scratch / "case", name, kind, files, older, rng)
        ended = run_forked(lambda: judge(work.scratch / "case", expected), work.scratch, limit=20)
        verdict = {UNREADABLE: "error raised", SAME: "loaded, content unchanged", SILENT: "silently wrong"}.get(
            ended.code, "process died or hung"
        )
        found[verdict] += 1
        outcome.check(verdict in ("error raised", "loaded, content unchanged"), f"{name}, {kind}: {verdict}")
    outcome.figures.update({verdict: str(count) for verdict, count in found.items()})
    outcome.notes.append(f"{each} of each kind; a load that gives back the right content counts as fine although nothing was noticed")
    return outcome


def _damage(directory: Path, name: str, kind: str, files: dict[str, bytes], older: bytes, rng: random.Random) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    changed: dict[str, bytes | None] = dict(files)
    if kind == "two files swapped":
        changed = {"model.zip": files["normalize.pkl"], "normalize.pkl": files["model.zip"]}
    elif kind == "part of another step":
        changed[name] = older
    else:
        changed[name] = damaged(files[name], kind, rng)
    for file, content in changed.items():
        if content is not None:
            (directory / file).write_bytes(content)
