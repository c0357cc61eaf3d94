"""How fast is Skirmish? 64 arenas of 3 v 3 with random legal actions on one core, compared with a plain Python loop over 64 single arenas.

    python benchmarks/skirmish.py
    python benchmarks/skirmish.py --repeats 3 --seconds 0.5      # a quick look; nothing is kept

A lane-step is one step of one unit: observations, masks, rewards, resets and the vector env's own bookkeeping included. "whole" has
the drawing of the actions in it, "env" has not. The sides take turns within a repeat; a ratio is taken within each repeat.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jobs
import results
from figures import Section, Target, table

ARENAS = 64
REPEATS, SECONDS = 9, 1.0
FLOOR = 300_000
"""Lane-steps per second that are asked for."""

Turn = Callable[[], float]
"""One step of all arenas; the seconds that were spent on the environment alone."""


def measure(repeats: int, seconds: float) -> dict[str, list[float]]:
    """Lane-steps per second of each side in each repeat, on one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    sides = {"all at once": _all_at_once(), "plain loop": _plain_loop()}
    speeds: dict[str, list[float]] = {}
    for repeat in range(-1, repeats):  # the first is thrown away: it loads and allocates
        for name, turn in sides.items():
            whole, env = _time(turn, seconds / 5 if repeat < 0 else seconds)
            if repeat >= 0:
                speeds.setdefault(f"{name}, whole", []).append(whole)
                speeds.setdefault(f"{name}, env", []).append(env)
    return speeds


def _time(turn: Turn, seconds: float) -> tuple[float, float]:
    """(lane-steps per second with the drawing of actions, and without)."""
    began, steps, inside = time.perf_counter(), 0, 0.0
    while (passed := time.perf_counter() - began) < seconds:
        inside += turn()
        steps += 1
    lane_steps = steps * ARENAS * 6
    return lane_steps / passed, lane_steps / inside


def _all_at_once() -> Turn:
    import numpy as np

    from inchworm.worlds.skirmish import SkirmishVectorEnv

    env, rng = SkirmishVectorEnv(num_envs=ARENAS), np.random.default_rng(0)
    mask = env.reset().observations["action_mask"]  # the vector env's own, renewed by each step

    def turn() -> float:
        actions = _draw(mask, rng)
        began = time.perf_counter()
        env.step(actions)
        return time.perf_counter() - began

    return turn


def _plain_loop() -> Turn:
    """The same world, one arena after another."""
    import numpy as np

    from inchworm.worlds.skirmish import SkirmishConfig, SkirmishWorld

    worlds, rng = [SkirmishWorld(SkirmishConfig(), 1) for _ in range(ARENAS)], np.random.default_rng(0)
    for seed, world in enumerate(worlds):
        world.begin([seed])
    seeds = iter(range(ARENAS, 2**31))

    def turn() -> float:
        inside = 0.0
        for world in worlds:
            state = world.state
            actions = _draw(state.mask.reshape(-1, 6).T, rng)  # [6, 3]
            began = time.perf_counter()
            world.step(np.ascontiguousarray(actions.T).reshape(3, 2, 3, 1))
            world.rewards()
            state.observations.reshape(-1, 6).T.copy(), state.mask.reshape(-1, 6).T.copy()
            if state.reasons[0]:
                world.begin([next(seeds)])
            inside += time.perf_counter() - began
        return inside

    return turn


def _draw(mask: Any, rng: Any) -> Any:
    """[B, 3]: uniform over the legal moves, turns and attacks."""
    import numpy as np

    drawn = rng.random(mask.shape, np.float32)
    drawn *= mask
    actions = np.empty((len(mask), 3), np.int64)
    for part, columns in enumerate((slice(0, 9), slice(9, 12), slice(12, None))):
        drawn[:, columns].argmax(1, out=actions[:, part])
    return actions


def section(data: dict[str, list[float]]) -> Section:
    """The page's section."""
    lines = [f"{ARENAS} arenas of 3 v 3, random legal actions, one core: lane-steps per second, median and range over repeats.", ""]
    lines += table(["Skirmish", "lane-steps/s"], ([name, _spread(speeds, ",.0f")] for name, speeds in data.items()))
    ratios = [ours / theirs for ours, theirs in zip(data["all at once, whole"], data["plain loop, whole"], strict=True)]
    lines += [f"All at once is {_spread(ratios, '.1f')} times as fast as the plain loop over single arenas.", ""]
    targets = [
        Target("Skirmish 3 v 3, 64 arenas, one core, actions drawn too", median(data["all at once, whole"]), FLOOR, unit="lane-steps/s")
    ]
    return Section("Skirmish", lines, targets)


def _spread(values: list[float], form: str) -> str:
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each side in each repeat")
    options = parser.parse_args()
    data = jobs.run("skirmish:measure", {"repeats": options.repeats, "seconds": options.seconds})
    found = section(data)
    print("\n".join([*found.lines, *(target.row() for target in found.targets)]))
    if (options.repeats, options.seconds) == (REPEATS, SECONDS):
        results.save("skirmish", data)


if __name__ == "__main__":
    main()
