"""Every architecture in every format of `inchworm export`: the largest difference from the policy, in onnxruntime, torch.export and NumPy.

python benchmarks/exports.py          (about five minutes)

Policies have random weights with which every part matters, observations are normalised, and each is compared on three steps of a batch of 1
and of 16: logits, means, log-std, the actions, and the memory.
"""

from __future__ import annotations

import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import results
from figures import Section, Target, table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

FORMATS = ("onnx", "torch", "numpy")
BOUND = 1e-5


def measure() -> dict[str, dict[str, float]]:
    """The largest difference, by architecture and format."""
    from inchworm import export_policy
    from run import test_export as cases

    found: dict[str, dict[str, float]] = {}
    variants: list[tuple[str, dict[str, Any]]] = [("", {}), (", dict observations", {}), (", with masks", {"masked": True})]
    for kind, action, (label, options) in product(("mlp", "cnn", "lstm", "gru"), cases.ACTIONS, variants):
        continuous = action in ("clip", "tanh")
        if (options and continuous) or (label == ", dict observations" and kind == "cnn"):
            continue
        seen = {"seen": cases.SCENE} if label == ", dict observations" else {}
        policy = cases.policy_of(cases.spec_of(kind, action, **options, **seen))
        with tempfile.TemporaryDirectory() as folder:
            name = f"{kind}, {action.replace('_', '-')}{label}"
            found[name] = {one: export_policy(policy, Path(folder) / one, one).max_error for one in FORMATS}  # type: ignore[arg-type]
        print(name, found[name], flush=True)
    return found


def section(data: dict[str, Any]) -> Section:
    """The part of the page."""
    worst = {one: max(row[one] for row in data.values()) for one in FORMATS}
    lines = [
        f"{len(data)} policies: every kind with every form of action (hybrid is a dict of a discrete choice, continuous dimensions and",
        "switches), and with dict observations and masks. The numbers are the largest difference from the policy of logits, means,",
        "log-std, actions and memory, absolute below 1 and relative above.",
        "",
        *table(["", *FORMATS], [[name, *(f"{row[one]:.1e}" for one in FORMATS)] for name, row in data.items()]),
        "",
    ]
    return Section("Exports", lines, [Target(f"exports to {one}: largest difference", worst[one], BOUND, False, "") for one in FORMATS])


if __name__ == "__main__":
    results.save("exports", measure())
