"""`inchworm evaluate RUN`: the score of a run's policy on environments of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from inchworm.cli.arguments import UsageError, parse, split
from inchworm.cli.progress import progress
from inchworm.cli.runs import check_fits, load_run_policy, named_run
from inchworm.cli.worlds import check_can_be_made
from inchworm.evaluate.evaluator import PolicyEvaluator
from inchworm.evaluate.stats import EvalStats
from inchworm.protocols import Policy
from inchworm.run import Run
from inchworm.tracking.terminal import make_terminal

PROG = "inchworm evaluate"


@dataclass(frozen=True)
class EvaluateOptions:
    """Score a run's policy. With nothing else given: the episodes that ended its training, acting greedily."""

    run_name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = ""
    """The run's directory, or its name in runs/."""
    episodes: int | None = None
    """How many; as many as the run's final evaluation by default."""
    sampled: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Sample actions instead of taking the likeliest."""
    seed: int | None = None
    """Other episodes than those of the run's own evaluations."""
    best: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """The best policy by evaluation."""
    last: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """The latest policy: the default."""
    env: Annotated[str | None, tyro.conf.arg(metavar="ENV")] = None
    """The environment, where it is code to import (repeat what the run was trained with), or another one with the same spaces."""
    num_envs: int | None = None
    """Copies of the environment; the run's own number by default."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print everything, episode by episode, as JSON."""
    quiet: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Show no progress."""


def run(arguments: Sequence[str]) -> int:
    """Evaluate, and print the score."""
    options = parse(EvaluateOptions, arguments, PROG)
    if options.best and options.last:
        raise UsageError("--best and --last are two policies; give one")
    positional, _ = split(EvaluateOptions, arguments)
    known = named_run(positional, PROG, env=options.env)
    stats = _evaluate(known, load_run_policy(known, best=options.best), options)
    terminal = make_terminal()
    if options.json:
        terminal.print(json.dumps(stats.to_dict()), markup=False)
    else:
        terminal.print(f"{known.policy_path(best=options.best)}: {stats}", markup=False)
    return 0


def _evaluate(known: Run, policy: Policy, options: EvaluateOptions) -> EvalStats:
    defaults = known.config.evaluation
    config = defaults.replace(
        seed=defaults.seed if options.seed is None else options.seed,
        num_envs=defaults.num_envs if options.num_envs is None else options.num_envs,
        episodes=(defaults.final_episodes or 100) if options.episodes is None else options.episodes,
        deterministic=not options.sampled,
    )
    env = known.config.env if options.env is None else known.config.env.replace(id=options.env)
    check_can_be_made(env)
    with PolicyEvaluator(env, config) as evaluator, progress("episodes", config.episodes, quiet=options.quiet) as tell:
        check_fits(known.policy_path(best=options.best), evaluator.vector_env)
        return evaluator.evaluate(policy, progress=tell)
