"""The regression guard: short runs compared with Stable-Baselines3. Has inchworm lost more than 40 % of its recorded lead?

    python benchmarks/guard.py                                      # ends with an error if it has
    python benchmarks/guard.py --record                             # writes benchmarks/recorded.json

Only ratios are compared, never times: peer and inchworm run in turns in one process, a few iterations each, and the median over
rounds counts. A first failure is measured again before it is believed. It takes some seconds, so it is part of the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from works import SPEED, Work

RECORDED = Path(__file__).with_name("recorded.json")
ITERATIONS = {"W1": 5, "W3": 6}
"""Iterations of each turn: about a quarter of a second for the peer."""
BACKENDS = {"inchworm-numpy": "numpy", "inchworm-torch": "torch"}
PEER = "stable-baselines3"
ROUNDS = 7
ALLOWED_LOSS = 0.4

Ratios = dict[str, dict[str, float]]
"""work -> side -> how many times as fast as the peer"""


def measure(works: list[str], rounds: int = ROUNDS) -> Ratios:
    """The median ratio of every side on every work."""
    found: Ratios = {}
    for name in works:
        with contextlib.ExitStack() as closing:
            turns = {side: _our_turn(SPEED[name], backend, ITERATIONS[name], closing) for side, backend in BACKENDS.items()}
            turns[PEER] = _their_turn(SPEED[name], ITERATIONS[name])
            seconds = timed(turns, rounds)
        found[name] = {side: median_ratio(seconds[side], seconds[PEER]) for side in BACKENDS}
    return found


def timed(turns: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side's turns, taken in turns after one round of warm-up."""
    for turn in turns.values():
        turn()
    seconds: dict[str, list[float]] = {side: [] for side in turns}
    for _ in range(rounds):
        for side, turn in turns.items():
            began = time.perf_counter()
            turn()
            seconds[side].append(time.perf_counter() - began)
    return seconds


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    """How many times as fast: the ratio is taken within each round, then its median."""
    return median(b / a for a, b in zip(ours, theirs, strict=True))


def _our_turn(work: Work, backend: str, iterations: int, closing: contextlib.ExitStack) -> Callable[[], None]:
    from inchworm import PPOTrainer
    from inchworm_side import config_of

    config = config_of(dataclasses.replace(work, total_timesteps=10**9), 0, backend=backend)  # type: ignore[arg-type]
    trainer = closing.enter_context(PPOTrainer("mlp", work.env_id, config))
    return lambda: trainer.train(trainer.total_timesteps + iterations * work.batch) and None


def _their_turn(work: Work, iterations: int) -> Callable[[], None]:
    import torch

    from sb3_side import build

    torch.set_num_threads(1)
    model = build(work, 0)
    return lambda: model.learn(iterations * work.batch, reset_num_timesteps=False) and None


def losses(recorded: Ratios, measured: Ratios) -> dict[str, float]:
    """`work side` -> the part of its recorded lead that is gone, where that is too much. What is recorded must be measured."""
    gone = {f"{work} {side}": 1 - measured[work][side] / ratio for work, sides in recorded.items() for side, ratio in sides.items()}
    return {name: loss for name, loss in gone.items() if loss > ALLOWED_LOSS}


def check(recorded: Ratios, measure_works: Callable[[list[str]], Ratios]) -> list[str]:
    """What has been lost, one line each; a work that failed is measured a second time, and only then believed."""
    measured = measure_works(list(recorded))
    lost = losses(recorded, measured)
    if lost:
        again = sorted({name.partition(" ")[0] for name in lost})
        measured |= measure_works(again)
        lost = losses({work: recorded[work] for work in again}, measured)
    for work, sides in measured.items():
        print(
            f"{work}: "
            + ", ".join(f"{side} {ratio:.2f} (recorded {recorded[work].get(side, float('nan')):.2f})" for side, ratio in sides.items())
        )
    return [f"{name} lost {loss:.0%} of its recorded lead over {PEER}; {ALLOWED_LOSS:.0%} is allowed" for name, loss in lost.items()]


def main() -> None:
    """Record, or check and end with an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write what is measured now")
    options = parser.parse_args()
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")  # before anything heavy is imported
    if options.record:
        ratios = measure(list(ITERATIONS), rounds=3 * ROUNDS)
        RECORDED.write_text(json.dumps(ratios, indent=1) + "\n", encoding="utf-8")
        print(f"recorded: {ratios}")
        return
    if not RECORDED.exists():
        raise SystemExit("there is no benchmarks/recorded.json; type: python benchmarks/guard.py --record")
    problems = check(json.loads(RECORDED.read_text(encoding="utf-8")), measure)
    for problem in problems:
        print(problem, file=sys.stderr)
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
