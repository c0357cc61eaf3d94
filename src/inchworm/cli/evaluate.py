"""`inchworm evaluate RUN`: the score of a run's policy on environments of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from inchworm.cli.arguments import UsageError, parse, split
from inchworm.cli.match import meet, tell
from inchworm.cli.progress import progress
from inchworm.cli.runs import load_run_policy, named_run
from inchworm.cli.worlds import check_can_be_made
from inchworm.config import EnvConfig, EvalConfig
from inchworm.evaluate.evaluator import PolicyEvaluator
from inchworm.evaluate.match_stats import MatchStats
from inchworm.evaluate.players import check_made_for
from inchworm.evaluate.stats import EvalStats
from inchworm.evaluate.suite_games import count_episodes
from inchworm.evaluate.suite_stats import SuiteStats
from inchworm.evaluate.suites import load_suites
from inchworm.protocols import Policy
from inchworm.run import Run
from inchworm.selfplay.build import evaluation_opponent, make_evaluator
from inchworm.tracking.terminal import make_terminal

PROG = "inchworm evaluate"


@dataclass(frozen=True)
class EvaluateOptions:
    """Score a run's policy. With nothing else given: the episodes that ended its training, acting greedily.

    With --opponent it meets another player, half of the games from either side on the same seeds; with --suite it is scored on
    every environment that a file names.
    """

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
    opponent: Annotated[str | None, tyro.conf.arg(metavar="PLAYER")] = None
    """Whom to meet: heuristic, heuristic:0.5 (of that skill), random, a run or a policy file."""
    skill: float | None = None
    """The skill of --opponent heuristic, from 0 to 1; at full strength by default."""
    save_replay: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the first game against --opponent to this file; inchworm replay FILE shows it."""
    suite: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """A YAML file of named groups of environments and opponents; see docs/evaluation.md."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print everything, episode by episode, as JSON."""
    quiet: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Show no progress."""


def run(arguments: Sequence[str]) -> int:
    """Evaluate, and print the score."""
    options = parse(EvaluateOptions, arguments, PROG)
    _check(options)
    positional, _ = split(EvaluateOptions, arguments)
    known = named_run(positional, PROG, env=options.env)
    policy, path = load_run_policy(known, best=options.best)
    if options.opponent is not None:
        env = _env(known, options)
        tell(_meet(known, policy, path, options), env, as_json=options.json)
        return 0
    stats = _evaluate(known, policy, path, options) if options.suite is None else _evaluate_suites(known, policy, options)
    terminal = make_terminal()
    if options.json:
        terminal.print(json.dumps(stats.to_dict()), markup=False)
    elif options.suite is not None:
        terminal.print(f"{path}:\n{stats}", markup=False)
    else:
        opponent = evaluation_opponent(known.config)
        terminal.print(f"{path}{'' if opponent is None else f' against {opponent}'}: {stats}", markup=False)
    return 0


def _check(options: EvaluateOptions) -> None:
    """Refuse flags that do not go together."""
    if options.best and options.last:
        raise UsageError("--best and --last are two policies; give one")
    if options.opponent is None:
        for flag, value in (("--skill", options.skill), ("--save-replay", options.save_replay)):
            if value is not None:
                raise UsageError(f"{flag} is of a match; add --opponent heuristic")
    elif options.skill is not None and options.opponent != "heuristic":
        raise UsageError(f"--skill is of --opponent heuristic, not of {options.opponent}")
    elif options.skill is not None and not 0.0 <= options.skill <= 1.0:
        raise UsageError(f"--skill {options.skill:g} must be from 0 to 1")
    if options.suite is not None:
        for flag, value in (("--opponent", options.opponent), ("--episodes", options.episodes)):
            if value is not None:
                raise UsageError(f"{flag} and --suite do not go together: a suite names its own; leave one of them out")


def _config(known: Run, options: EvaluateOptions) -> EvalConfig:
    """The run's own way of evaluating, as the options change it."""
    defaults = known.config.evaluation
    return defaults.replace(
        seed=defaults.seed if options.seed is None else options.seed,
        num_envs=defaults.num_envs if options.num_envs is None else options.num_envs,
        episodes=(defaults.final_episodes or 100) if options.episodes is None else options.episodes,
        deterministic=not options.sampled,
    )


def _env(known: Run, options: EvaluateOptions) -> EnvConfig:
    return known.config.env if options.env is None else known.config.env.replace(id=options.env)


def _evaluate(known: Run, policy: Policy, path: Path, options: EvaluateOptions) -> EvalStats:
    config, env = _config(known, options), _env(known, options)
    check_can_be_made(env)
    evaluator = make_evaluator(env, known.config.replace(env=env, evaluation=config))  # as training has it, with its opponent
    with evaluator, progress("episodes", config.episodes, quiet=options.quiet) as told:
        check_made_for(policy, evaluator.vector_env, str(path))
        return evaluator.evaluate(policy, progress=told)


def _evaluate_suites(known: Run, policy: Policy, options: EvaluateOptions) -> SuiteStats:
    config, suites = _config(known, options), load_suites(str(options.suite), env=options.env)
    for group, simulations in suites.items():
        for simulation in simulations:
            check_can_be_made(simulation.env, where=f"suite {group}, {simulation.name}: ")
    with PolicyEvaluator(config=config) as evaluator, progress("episodes", count_episodes(suites), quiet=options.quiet) as told:
        return evaluator.evaluate_suites(policy, suites, progress=told)


def _meet(known: Run, policy: Policy, path: Path, options: EvaluateOptions) -> MatchStats:
    config, env = _config(known, options), _env(known, options)
    opponent = str(options.opponent) if options.skill is None else f"{options.opponent}:{options.skill}"
    games = config.episodes if options.episodes is not None else config.episodes + config.episodes % 2
    return meet(
        (str(path), opponent),
        env,
        first=policy,
        episodes=games,
        seed=config.seed,
        deterministic=config.deterministic,
        num_envs=config.num_envs,
        replay_file=options.save_replay,
        quiet=options.quiet,
    )
