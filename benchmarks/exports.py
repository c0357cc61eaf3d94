"""Every architecture in every format of `inchworm export`: the largest difference from the policy, in onnxruntime, torch.export and NumPy.

python benchmarks/exports.py          (about eight minutes)

Policies have random weights with which every part matters, observations are normalised, and each is compared on three steps of a batch of 1
and of 16: logits, means, log-std, the actions, and the memory.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import results
from figures import Section, Target, table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

FORMATS = ("onnx", "torch", "numpy")
BOUND = 1e-5


def policies() -> Iterator[tuple[str, Any]]:
    """Every kind with every form of action, dict observations and masks; then whatever else a policy's config and spaces can express."""
    from gymnasium import spaces

    from inchworm import PolicyConfig, PolicySpec
    from inchworm.core.padding import DIMENSIONS_KEY
    from run import test_export as cases

    variants: list[tuple[str, dict[str, Any]]] = [("", {}), (", dict observations", {}), (", with masks", {"masked": True})]
    for kind, action, (label, options) in product(("mlp", "cnn", "lstm", "gru"), cases.ACTIONS, variants):
        continuous = action in ("clip", "tanh")
        if (options and continuous) or (label == ", dict observations" and kind == "cnn"):
            continue
        seen = {"seen": cases.SCENE} if label == ", dict observations" else {}
        yield f"{kind}, {action.replace('_', '-')}{label}", cases.policy_of(cases.spec_of(kind, action, **options, **seen))
    more: list[tuple[str, str, dict[str, Any]]] = [
        *((kind, "images and masks", {"seen": cases.IMAGES, "masked": True}) for kind in ("lstm", "gru")),
        *(
            (kind, "two layers of memory, before the hidden layers", {"memory_layers": 2, "memory_place": "before"})
            for kind in ("lstm", "gru")
        ),
        *(
            (kind, "central critic, normalised values", {"central_critic": True, "normalize_values": True})
            for kind in ("mlp", "cnn", "lstm", "gru")
        ),
        *(("mlp", f"activation {name}", {"activation": name}) for name in ("relu", "elu", "leaky_relu", "silu")),
        ("mlp", "shared trunk", {"shared_trunk": True}),
        ("mlp", "no hidden layer", {"hidden_sizes": ()}),
        ("mlp", "no normaliser", {"normalize_observations": False}),
    ]
    for kind, label, options in more:
        yield f"{kind}, hybrid, {label}", cases.policy_of(cases.spec_of(kind, "hybrid", **options))
    others = {
        "discrete observations": spaces.Discrete(5, start=2),
        "float64 observations": spaces.Box(-1.0, 1.0, (2, 2), np.float64),
        "agents without some dimensions": spaces.Dict({"x": cases.NUMBERS, DIMENSIONS_KEY: spaces.MultiBinary(2)}),
    }
    for label, seen in others.items():
        spec = PolicySpec(seen, cases.BOX, PolicyConfig(hidden_sizes=(8, 6), normalize_observations=True))
        yield f"mlp, clip, {label}", cases.policy_of(spec)


def measure() -> dict[str, dict[str, float]]:
    """The largest difference, by architecture and format."""
    from inchworm import export_policy

    found: dict[str, dict[str, float]] = {}
    for name, policy in policies():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = {one: export_policy(policy, Path(folder) / one, one).max_error for one in FORMATS}  # type: ignore[arg-type]
        print(name, found[name], flush=True)
    return found


def section(data: dict[str, Any]) -> Section:
    """The part of the page."""
    worst = {one: max(row[one] for row in data.values()) for one in FORMATS}
    lines = [
        f"{len(data)} policies: every kind with every form of action (hybrid is a dict of a discrete choice, continuous dimensions and",
        "switches), with dict observations and masks, and the other settings and spaces of a policy. The numbers are the largest",
        "difference from the policy of logits, means, log-std, actions and memory, absolute below 1 and relative above. Not exported, and",
        "refused by name: policies with a task encoder, several policies as one (each is exported alone), policy classes of your own, and",
        "in NumPy networks of your own.",
        "",
        *table(["", *FORMATS], [[name, *(f"{row[one]:.1e}" for one in FORMATS)] for name, row in data.items()]),
        "",
    ]
    return Section("Exports", lines, [Target(f"exports to {one}: largest difference", worst[one], BOUND, False, "") for one in FORMATS])


if __name__ == "__main__":
    results.save("exports", measure())
