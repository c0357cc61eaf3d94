"""What a step costs besides learning, for the page: the figures of `vector_envs.py` and of `acting.py`, measured one after the other.

python benchmarks/step_costs.py
"""

from __future__ import annotations

from typing import Any

import jobs
import results
from figures import Section, Target, table

LANES = (1, 8, 64)
ACTING = ("act", "collector", "whole", "ended episode")


def acting_figures() -> list[dict[str, Any]]:
    """Microseconds of a step of collecting, without an environment, for each world of `acting.py` and number of lanes."""
    import acting

    return [{"world": world, "lanes": lanes, **acting.measure(world, lanes, 512, 7)} for world in acting.WORLDS for lanes in LANES]


def asked() -> dict[str, dict[str, float]]:
    """World -> ratio -> its floor, as `vector_envs.py` has them."""
    import vector_envs

    return vector_envs.TARGETS


def section(data: dict[str, Any]) -> Section:
    """The page's section."""
    lines = ["Microseconds for one step of 8 copies, median and range; ratios are taken within each repeat.", ""]
    targets: list[Target] = []
    for world, found in data["vector_envs"].items():
        lines += table([world, "µs"], ([name, _spread(value, ".0f")] for name, value in found["sides"].items()))
        lines += table([f"{world}, times as fast", "ratio"], ([name, _spread(value, ".2f")] for name, value in found["ratios"].items()))
        floors = data["asked"].get(world, {})
        targets += [Target(f"{world}, 8 copies: {name}", found["ratios"][name]["median"], floor) for name, floor in floors.items()]
    rows = ([one["world"], str(one["lanes"]), *(f"{one[name]:.1f}" for name in ACTING)] for one in data["acting"])
    lines += ["Microseconds of a step of collecting around an environment that costs nothing, with the usual 64x64 network in NumPy:", ""]
    lines += table(["actions", "lanes", *ACTING], rows)
    return Section("A step's cost: vector envs and acting", lines, targets)


def _spread(value: dict[str, float], form: str) -> str:
    return f"{value['median']:{form}} ({value['low']:{form}} to {value['high']:{form}})"


def main() -> None:
    """Measure, print, keep."""
    data = {
        "vector_envs": jobs.run("vector_envs:measure", {}),
        "asked": jobs.run("step_costs:asked", {}),
        "acting": jobs.run("step_costs:acting_figures", {}),
    }
    for target in section(data).targets:
        print(target.row())
    results.save("step_costs", data)


if __name__ == "__main__":
    main()
