"""What `compare.py` measured, as a section of the performance page: pure functions of its data."""

from __future__ import annotations

from statistics import median
from typing import Any

from figures import Run, Section, Target, compile_seconds, geometric_mean, known_median, median_range, or_dash, ratios, speed, table
from side import LIMIT, PEER
from works import SPEED

EAGER, COMPILED, NUMPY, JAX = "inchworm-torch", "inchworm-compiled", "inchworm-numpy", "inchworm-jax"
SBX = "sbx"
COMPILING = (COMPILED, JAX, SBX)
FLOORS: tuple[tuple[str, tuple[str, ...], str, float, float], ...] = (
    ("eager torch", (EAGER,), PEER, 2.0, 1.5),
    ("compiled torch", (COMPILED,), PEER, 4.0, 2.5),
    ("the better of NumPy and torch", (NUMPY, EAGER, COMPILED), PEER, 6.0, 3.5),
    ("JAX", (JAX,), PEER, 6.0, 3.8),
    ("JAX", (JAX,), SBX, 5.0, 2.5),
)
"""Name, sides, the peer that they are compared with, and the floors: geometric mean over the works, and the least of them."""
PEER_NAMES = {PEER: "Stable-Baselines3", SBX: "SBX"}
LIMITS = {"W1": 4.0, "W2": 8.0, "W3": 8.0, "W5": 4.0}
"""How many times as fast as inchworm's best the C program may be."""

Works = dict[str, dict[str, Any]]


def section(data: dict[str, Any]) -> Section:
    """Tables and targets."""
    works, sides = data["works"], data["sides"]
    repeats = len(next(iter(works.values()))["runs"][sides[0]])
    lines = [
        "Every side trains the same works (`benchmarks/works.py`) in one run, in turns, each run in a separate process, after two",
        f"iterations of warm-up; {repeats} repeats. Speeds are env steps per second with training included, median and range. `c` is a",
        "hand-written single-thread C program that does the same work (on HalfCheetah-v5: the environment alone, stepped in Python).",
        "",
        *table(["work", "environment", "env steps", *sides], (_speed_row(work, part, sides) for work, part in works.items())),
        f"How many times as fast as {PEER}, taken within each repeat; *C limit*: how many times as fast as inchworm's best `c` is.",
        "",
        *_ratio_table(works, sides),
        "Share of the time that learning took, and the mean return of the last 100 training episodes:",
        "",
        *table(["work", *sides], ([work, *(_share_return(part["runs"][side]) for side in sides)] for work, part in works.items())),
        "Threads that each side used (the faster of those tried, work by work), seconds from process start until ready to train,",
        "seconds of compiling with empty and with filled caches (median over works), megabytes after imports and at the peak of the",
        "last work:",
        "",
        *table(
            ["side", "threads", "start-up", "first compile", "cached", "base MB", "peak MB"], (_side_row(side, works) for side in sides)
        ),
    ]
    return Section("Speed compared with other libraries", lines, targets(works, sides))


def targets(works: Works, sides: list[str]) -> list[Target]:
    """The floors against the peer, and against the C program."""
    found: list[Target] = []
    for name, chosen, peer, mean_floor, least_floor in FLOORS:
        of_work = best_ratios(works, [side for side in chosen if side in sides], peer) if peer in sides else {}
        against = f"{name} against {PEER_NAMES[peer]}"
        mean = geometric_mean(of_work.values()) if of_work else None
        found.append(Target(f"{against}, geometric mean of {_names(works)}", mean, mean_floor))
        least = min(of_work, key=lambda work: of_work[work]) if of_work else None
        at = f" ({least})" if least else ""
        found.append(Target(f"{against}, the least{at}", of_work[least] if least else None, least_floor))
    for work, bound in LIMITS.items():
        if work in works:
            found.append(Target(f"the C program against inchworm's best, {work}", limit_ratio(works[work], sides), bound, at_least=False))
    return found


def best_ratios(works: Works, sides: list[str], peer: str = PEER) -> dict[str, float]:
    """Work -> median ratio to the peer of whichever of the sides has the highest one."""
    if not sides:
        return {}
    return {work: max(median(ratios(part["runs"][side], part["runs"][peer])) for side in sides) for work, part in works.items()}


def best_side(part: dict[str, Any], sides: list[str]) -> str | None:
    """inchworm's fastest way to do a work, by median speed."""
    ours = [side for side in (NUMPY, EAGER, COMPILED, JAX) if side in sides]
    return max(ours, key=lambda side: median(map(speed, part["runs"][side]))) if ours else None


def limit_ratio(part: dict[str, Any], sides: list[str]) -> float | None:
    """Median over repeats of the C program's speed over inchworm's best."""
    best = best_side(part, sides)
    return median(ratios(part["runs"][LIMIT], part["runs"][best])) if best and LIMIT in sides else None


def _names(works: Works) -> str:
    names = list(works)
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _speed_row(work: str, part: dict[str, Any], sides: list[str]) -> list[str]:
    steps = part["runs"][sides[0]][0]["steps"]
    return [work, SPEED[work].env_id, f"{steps:,}", *(median_range([speed(run) for run in part["runs"][side]], ",.0f") for side in sides)]


def _ratio_table(works: Works, sides: list[str]) -> list[str]:
    shown = [side for side in sides if side not in (PEER, LIMIT)] if PEER in sides else []
    rows = []
    for work, part in works.items():
        cells = [median_range(ratios(part["runs"][side], part["runs"][PEER]), ".2f") for side in shown]
        rows.append([work, *cells, best_side(part, sides) or "–", or_dash(limit_ratio(part, sides), ".1f")])
    means = [f"{geometric_mean(best_ratios(works, [side]).values()):.2f}" for side in shown]
    return table(["work", *shown, "inchworm's best", "C limit"], [*rows, ["geometric mean", *means, "", ""]])


def _share_return(runs: list[Run]) -> str:
    share = known_median(run["learn_seconds"] / run["seconds"] for run in runs if run["learn_seconds"] is not None)
    return f"{or_dash(share, '.0%')}, {or_dash(known_median(run['last_return'] for run in runs), '.0f')}"


def _side_row(side: str, works: Works) -> list[str]:
    runs = [run for part in works.values() for run in part["runs"][side]]
    used = ", ".join(f"{work} {part['threads'][side]}" for work, part in works.items())
    counts = {part["threads"][side] for part in works.values()}
    first = cached = None
    if side in COMPILING:
        first = known_median(compile_seconds(next(iter(part["sweep"][side].values()))) for part in works.values())
        cached = known_median(compile_seconds(run) for run in runs)
    last = list(works.values())[-1]["runs"][side]
    memory = [or_dash(_megabytes(last, name), ",.0f") for name in ("base_bytes", "peak_bytes")]
    seconds = or_dash(known_median(run.get("startup_seconds") for run in runs), ".1f")
    return [side, str(counts.pop()) if len(counts) == 1 else used, seconds, or_dash(first, ".1f"), or_dash(cached, ".1f"), *memory]


def _megabytes(runs: list[Run], name: str) -> float | None:
    found = known_median(run.get(name) for run in runs)
    return None if found is None else found / 1e6
