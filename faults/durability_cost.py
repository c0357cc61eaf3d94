"""A10: what checkpoints cost."""

from __future__ import annotations

from faults.measuring import benchmark
from faults.programme import Outcome, Work, procedure


@procedure(
    "A10",
    title="Cost of a checkpoint a minute",
    must="at most 1 % of profiled training time",
    full=1,
    test=0,
    alone=True,
)
def checkpoint_cost(work: Work) -> Outcome:
    """`benchmarks/checkpoint_cost.py`: what a save takes in the training thread, and all that watches over it, as a share of a minute."""
    module = benchmark("checkpoint_cost")
    works = list(module.ITERATIONS.items())
    outcome = Outcome()
    for number in work.each(len(works)):
        name, iterations = works[number]
        row = module.measure(name, iterations)
        outcome.check(row["share"] <= 0.01, f"{name}: {row['share']:.2%}")
        outcome.figures[name] = f"{row['share']:.2%} ({1e3 * row['save']:.0f} ms for {row['bytes'] / 1e6:.2g} MB)"
    outcome.notes.append("counted as if every save were made in the training thread, which is the most that it can cost")
    return outcome
