"""D4 and D5: the normalisers' arithmetic at a thousand million samples, and what the checks at the boundary cost."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from faults.measuring import benchmark
from faults.programme import Outcome, Work, procedure


def _chunk(rng: np.random.Generator, size: int, offset: float, repeats: int) -> Any:
    """Statistics of `size` samples, merged with themselves until they stand for `size * repeats`."""
    from inchworm.policy.statistics import RunningMeanStd

    chunk = RunningMeanStd((2,))
    chunk.update(rng.normal(offset, (1.0, 3.0), (size, 2)))
    whole = chunk.copy()
    while whole.count < size * repeats:
        whole.merge(whole.copy() if whole.count * 2 <= size * repeats else chunk)
    return whole


def exact_moments(chunks: list[Any]) -> tuple[list[Fraction], list[Fraction], int]:
    """Mean and variance of all chunks together, in fractions: nothing is rounded."""
    count = sum(int(chunk.count) for chunk in chunks)
    means, variances = [], []
    for dimension in range(2):
        mean = sum(Fraction(float(chunk.mean[dimension])) * int(chunk.count) for chunk in chunks) / count
        squares = sum(
            (Fraction(float(chunk.var[dimension])) + (Fraction(float(chunk.mean[dimension])) - mean) ** 2) * int(chunk.count)
            for chunk in chunks
        )
        means.append(Fraction(mean))
        variances.append(Fraction(squares) / count)
    return means, variances, count


def _error(found: Any, means: list[Fraction], variances: list[Fraction]) -> float:
    pairs = [*zip(found.mean, means), *zip(found.var, variances)]
    return max(abs(float((Fraction(float(have)) - want) / want)) for have, want in pairs)


@procedure(
    "D4",
    title="Normalisers: 1e9 samples by merging, at an offset of 1e6, in any order",
    must="relative error at most 1e-6; merged against one by one at most 1e-12 at an offset of 100 (any order at 1e6: 1e-11)",
    full=20,
    test=2,
)
def normalizers(work: Work) -> Outcome:
    """Chunks that stand for 1e9 samples, merged in several orders, beside fractions; and a stream in pieces beside the whole."""
    from inchworm.policy.statistics import RunningMeanStd

    outcome = Outcome()
    worst = worst_order = worst_stream = 0.0
    for number in work.each():
        rng = np.random.default_rng((work.seed, number))
        chunks = [_chunk(rng, 2_000, 1e6, 10_000) for _ in range(50)]  # 50 * 2,000 * 10,000 = 1e9 samples
        means, variances, count = exact_moments(chunks)
        results = []
        for order in (range(50), range(49, -1, -1), rng.permutation(50), rng.permutation(50)):
            total = RunningMeanStd((2,))
            for index in order:
                total.merge(chunks[int(index)])
            results.append(total)
        worst = max(worst, *(_error(total, means, variances) for total in results))
        between = [float(np.max(np.abs(total.mean / results[0].mean - 1))) for total in results]
        between += [float(np.max(np.abs(total.var / results[0].var - 1))) for total in results]
        worst_order = max(worst_order, *between)
        outcome.check(count == 10**9 and all(total.count == count for total in results), f"{number}: {count} samples")
        outcome.check(worst <= 1e-6, f"{number}: relative error {worst:.1e}")
        outcome.check(worst_order <= 1e-11, f"{number}: {worst_order:.1e} between two orders")
        worst_stream = max(worst_stream, _stream_error(rng))
        outcome.check(worst_stream <= 1e-12, f"{number}: {worst_stream:.1e} between a stream in pieces and the whole")
    outcome.figures = {
        "relative error": f"{worst:.1e}",
        "between orders": f"{worst_order:.1e}",
        "pieces against the whole": f"{worst_stream:.1e}",
    }
    outcome.notes.append(
        "at an offset of 1e6 a float64 mean has 1e-10 of rounding, so that two orders of merging, and merged against one by one, differ by "
        "about 2e-12 in the variance: more than the 1e-12 that holds at an offset of 100"
    )
    outcome.notes.append("a chunk is 2,000 samples merged with themselves 10,000 times over; the 1e9 are counted, not drawn")
    return outcome


def _stream_error(rng: np.random.Generator) -> float:
    """One stream of 20,000 samples, at an offset of 100, entered in pieces of any size, against all of it at once.

    (At an offset of 1e6 a mean has 1e-10 of absolute precision, and the variance of pieces and whole agree to about 2e-12.)
    """
    from inchworm.policy.statistics import RunningMeanStd

    samples = rng.normal(100.0, (1.0, 3.0), (20_000, 2))
    whole, pieces = RunningMeanStd((2,)), RunningMeanStd((2,))
    whole.update(samples)
    for part in np.split(samples, sorted(rng.integers(0, 20_000, 200))):
        pieces.update(part)
    return float(max(np.max(np.abs(pieces.mean / whole.mean - 1)), np.max(np.abs(pieces.var / whole.var - 1))))


@procedure("D5", title="Cost of the checks at the boundary", must="at most 2 % of profiled training time", full=1, test=0, alone=True)
def boundary_cost(work: Work) -> Outcome:
    """`benchmarks/boundary_cost.py`: a share inside one run, for four works."""
    module = benchmark("boundary_cost")
    outcome = Outcome()
    for number in work.each(len(module.WORKS)):
        cost = module.measure(module.WORKS[number])
        outcome.check(cost.share <= 0.02, f"{cost.name}: {cost.share:.2%}")
        outcome.figures[cost.name] = f"{cost.share:.2%}"
    return outcome
