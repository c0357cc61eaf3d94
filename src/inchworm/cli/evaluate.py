"""`inchworm evaluate RUN`: the score of a run's policy on environments of its own."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
import yaml
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from inchworm.cli.arguments import UsageError, parse, split
from inchworm.cli.names import check_can_be_made, load_run_policy, named_run
from inchworm.config.reading import load_yaml
from inchworm.config.sections import EnvConfig, EvalConfig
from inchworm.core.errors import EnvError
from inchworm.core.protocols import Actor, Policy, VectorEnv
from inchworm.evaluate.evaluator import PolicyEvaluator
from inchworm.evaluate.games import make_world
from inchworm.evaluate.matches import (
    check_made_for,
    even_copies,
    is_built_in,
    make_player,
    pair_seeds,
    play_match,
)
from inchworm.evaluate.stats import EvalStats, MatchStats
from inchworm.evaluate.suites import SuiteStats, count_episodes, load_suites
from inchworm.run.directory import Run
from inchworm.run.policies import load_named_policy, open_player
from inchworm.selfplay.callback import evaluation_opponent, make_evaluator
from inchworm.tracking.console import Terminal, make_terminal
from inchworm.worlds.replay import save_replay

SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def progress(what: str, total: int, *, quiet: bool = False, terminal: Terminal | None = None) -> Iterator[Callable[[int], None]]:
    """A function to be told how many of `total` are done, while the work lasts."""
    terminal = terminal or make_terminal(stderr=True, quiet=quiet)
    if not terminal.is_terminal or terminal.is_dumb_terminal:
        yield _lines(what, total, terminal)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=terminal, transient=True, disable=quiet) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def _lines(what: str, total: int, terminal: Terminal) -> Callable[[int], None]:
    last = time.monotonic()

    def tell(done: int) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            terminal.print(f"{what} {done:,}/{total:,}", markup=False)

    return tell


PROG_MATCH = "inchworm match"


@dataclass(frozen=True)
class MatchOptions:
    """Let two players meet, half of the games from either side on the same seeds, and print how A fares against B.

    A player is a run (its directory, or its name in runs/), a policy file, heuristic, heuristic:0.5 (of that skill) or random.
    """

    first: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="A")] = ""
    """The player whose win rate is printed."""
    second: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="B")] = ""
    """Whom it meets."""
    episodes: int = 100
    """How many games; an even number."""
    seed: int = EvalConfig.seed
    """Other games than the usual ones."""
    sampled: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Let policies sample actions instead of taking the likeliest."""
    save_replay: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the first game to this file; inchworm replay FILE shows it."""
    env: Annotated[str | None, tyro.conf.arg(metavar="ENV")] = None
    """The world; by default that of the first run among the two."""
    kwargs: Annotated[str | None, tyro.conf.arg(metavar="YAML")] = None
    """Arguments of the world, as YAML, such as '{units: [scout, scout]}'; by default those of that run."""
    num_envs: int = EvalConfig.num_envs
    """Games that run side by side; their number does not change which games are played."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print everything, game by game, as JSON."""
    quiet: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Show no progress."""


def run_match(arguments: Sequence[str]) -> int:
    """Play, and print the result."""
    options = parse(MatchOptions, arguments, PROG_MATCH)
    if not options.first or not options.second:
        raise UsageError(f"a match needs two players; type: {PROG_MATCH} RUN heuristic, or {PROG_MATCH} RUN_A RUN_B")
    env = _world(options)
    stats = meet(
        (options.first, options.second),
        env,
        episodes=options.episodes,
        seed=options.seed,
        deterministic=not options.sampled,
        num_envs=options.num_envs,
        replay_file=options.save_replay,
        quiet=options.quiet,
    )
    tell(stats, env, as_json=options.json)
    return 0


def meet(
    players: tuple[str, str],
    env: EnvConfig,
    *,
    first: Actor | None = None,
    episodes: int,
    seed: int,
    deterministic: bool,
    num_envs: int,
    replay_file: str | None,
    quiet: bool,
) -> MatchStats:
    """The match of two named players; the first one may be there already, and then its name is a label."""
    pair_seeds(episodes, None, seed)
    if replay_file is not None and Path(replay_file).is_dir():
        raise UsageError(f"--save-replay {replay_file} is a directory; name a file in it")
    try:
        world = make_world(env, even_copies(num_envs, episodes), seed)
    except EnvError as error:
        raise UsageError(str(error)) from error
    try:
        one, ours = _player(players[0], world, env) if first is None else (first, players[0])
        other, theirs = _player(players[1], world, env)
        with progress("episodes", episodes, quiet=quiet) as told:
            stats = play_match(
                one,
                other,
                world,
                episodes,
                deterministic=deterministic,
                seed=seed,
                players=(ours, theirs),
                save_replay=replay_file is not None,
                progress=told,
            )
    finally:
        world.close()
    if replay_file is not None and stats.replay is not None:
        save_replay(replay_file, stats.replay)
    return stats


def _player(name: str, world: VectorEnv, env: EnvConfig) -> tuple[Actor, str]:
    """The player, and what it is called in the result: where its policy is, or the name of one without."""
    if is_built_in(name):
        return make_player(name, world, env), name
    policy, path = load_named_policy(name, env=env.id)
    return policy, str(path)


def tell(stats: MatchStats, env: EnvConfig, *, as_json: bool) -> None:
    """Print the result, for people or for programs."""
    terminal = make_terminal()
    if as_json:
        terminal.print(json.dumps(stats.to_dict()), markup=False)
    else:
        first, second = stats.players
        terminal.print(f"{first} against {second} in {env.id}: {stats}", markup=False)


def _world(options: MatchOptions) -> EnvConfig:
    """The world that the options name, else that of the first run among the players."""
    names = [name for name in (options.first, options.second) if not is_built_in(name) and not Path(name).is_file()]
    runs = [open_player(name, env=options.env) for name in names]
    worlds = [run.config.env if options.env is None else run.config.env.replace(id=options.env) for run in runs]
    if not worlds and options.env is None:
        raise UsageError("neither player is a run, so the world is not known; add --env Skirmish-v0")
    world = worlds[0] if worlds else EnvConfig(id=str(options.env))
    if options.kwargs is not None:
        return world.replace(kwargs=_arguments(options.kwargs))
    if len(worlds) == 2 and worlds[0].id != worlds[1].id:
        raise UsageError(f"{names[0]} plays {worlds[0].id} and {names[1]} plays {worlds[1].id}: they have no world in common")
    if len(worlds) == 2 and worlds[0].kwargs != worlds[1].kwargs:
        warnings.warn(f"{names[0]} and {names[1]} were trained in different worlds; they meet in that of {names[0]}", stacklevel=2)
    return world


def _arguments(text: str) -> dict[str, object]:
    try:
        value = load_yaml(text)
    except yaml.YAMLError as error:
        raise UsageError(f"--kwargs {text!r} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise UsageError(f"--kwargs {text!r} must be a mapping of names to values, such as '{{units: [scout, scout]}}'")
    return value


PROG_EVALUATE = "inchworm evaluate"


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


def run_evaluate(arguments: Sequence[str]) -> int:
    """Evaluate, and print the score."""
    options = parse(EvaluateOptions, arguments, PROG_EVALUATE)
    _check(options)
    positional, _ = split(EvaluateOptions, arguments)
    known = named_run(positional, PROG_EVALUATE, env=options.env)
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
