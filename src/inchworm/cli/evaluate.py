"""`inchworm evaluate RUN` (or a policy file), `match A B` and `video RUN`: scores of policies, alone or against others, and videos."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from inchworm.cli.arguments import File, Metavar, RunName, UsageError, has_several_agents, named_run, parse
from inchworm.cli.main import OK
from inchworm.config.reading import ConfigBase, config_class
from inchworm.config.sections import EnvConfig, EvalConfig, TrainingConfig
from inchworm.core.errors import EnvError
from inchworm.core.protocols import Actor, Policy
from inchworm.env.registry import config_for, team_worlds
from inchworm.env.source import env_source
from inchworm.evaluate.evaluator import PolicyEvaluator, check_made_for, evaluation_opponent, make_evaluator, play_match
from inchworm.evaluate.stats import EvalStats
from inchworm.evaluate.suites import SuiteStats, count_episodes, load_suites
from inchworm.evaluate.video import check_display, check_video, drawing_env, save_video, show_video
from inchworm.policy.composite import CompositePolicy
from inchworm.run.directory import REPLAYS, find_run
from inchworm.run.export import TOLERANCE, Format, export_policy
from inchworm.run.policies import is_built_in, is_one_policy, is_saved_policy, load_policy, load_run_policy, open_player, run_of
from inchworm.tracking.console import Terminal, make_terminal
from inchworm.worlds.replay import save_replay

SECONDS_BETWEEN_LINES = 10.0
PROG_EVALUATE, PROG_MATCH, PROG_VIDEO = "inchworm evaluate", "inchworm match", "inchworm video"


@contextmanager
def progress(what: str, total: int, *, quiet: bool = False, terminal: Terminal | None = None) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows how many of `total` are done: a bar on a terminal, else a line from time to time."""
    terminal = terminal or make_terminal(stderr=True, quiet=quiet)
    if not terminal.is_terminal or terminal.is_dumb_terminal:
        last = time.monotonic()

        def print_line(done: int) -> None:
            nonlocal last
            if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                terminal.print(f"{what} {done:,}/{total:,}")

        yield print_line
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=terminal, transient=True, disable=quiet) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


@config_class("--")
class MatchOptions(ConfigBase):
    """Play two players against each other, half of the games from each side on the same seeds, and print the win rate of A.

    A player is a run (its directory, or its name in runs/), a policy file, heuristic, heuristic:0.5 (with that skill) or random.
    """

    first: Annotated[str, Metavar("A", positional=True)] = ""
    """The player whose win rate is printed."""
    second: Annotated[str, Metavar("B", positional=True)] = ""
    """Its opponent."""
    episodes: int = 100
    """Number of games; an even number."""
    seed: int = EvalConfig.seed
    """Seed of the games."""
    sampled: bool = False
    """Let policies sample actions instead of taking the likeliest."""
    save_replay: File = None
    """Write the first game to this file; inchworm replay FILE shows it."""
    env: Annotated[str | None, Metavar("ENV")] = None
    """The environment; by default that of the first run among the two."""
    kwargs: dict[str, Any] | None = None
    """Keyword arguments of the environment, such as '{units: [scout, scout]}'; by default those of that run."""
    num_envs: int = EvalConfig.num_envs
    """Games that run in parallel; does not change which games are played."""
    max_episode_steps: int | None = None
    """Cut games off after this many steps, as draws; by default the limit that the environment is registered with, else 100,000."""
    json: bool = False
    """Print everything, game by game, as JSON."""
    quiet: bool = False
    """Show no progress."""


def run_match(arguments: Sequence[str]) -> int:
    """Play a match and print the result."""
    options = parse(MatchOptions, arguments, PROG_MATCH)
    if not options.first or not options.second:
        raise UsageError(f"a match needs two players; type: {PROG_MATCH} RUN heuristic, or {PROG_MATCH} RUN_A RUN_B")
    players = [name for name in (options.first, options.second) if not is_built_in(name)]
    runs = {name: run_of(name) if options.env is None else None for name in players if is_one_policy(name)}
    runs |= {name: open_player(name, env=options.env) for name in players if name not in runs}
    names = [name for name in players if runs[name] is not None]
    envs = [run.config.env for name in names if (run := runs[name]) is not None]
    if options.env is not None:
        envs = [env.replace(id=options.env) for env in envs] or [EnvConfig(id=options.env)]
    if not envs:
        raise UsageError(f"neither player is a run, so the environment is not known; add --env, such as --env {team_worlds()}")
    env = envs[0]
    if options.kwargs is not None:
        env = env.replace(kwargs=options.kwargs)
    elif env.id != envs[-1].id:
        raise UsageError(f"{names[0]} plays {env.id} and {names[1]} plays {envs[-1].id}; a match needs one environment")
    elif env.kwargs != envs[-1].kwargs:
        warnings.warn(f"{names[0]} and {names[1]} were trained with different env.kwargs; the match uses those of {names[0]}", stacklevel=2)
    settings = EvalConfig(
        episodes=options.episodes,
        seed=options.seed,
        num_envs=options.num_envs,
        deterministic=not options.sampled,
        max_episode_steps=options.max_episode_steps,
    )
    return _play((options.first, options.second), env, settings, options)


def _play(
    players: tuple[str, str], env: EnvConfig, settings: EvalConfig, options: MatchOptions | EvaluateOptions, first: Actor | None = None
) -> int:
    """Play a match of two named players and print the result. If `first` is given it is the first player, and its name a label."""
    replay_file = options.save_replay
    if replay_file is not None and Path(replay_file).is_dir():
        raise UsageError(f"--save-replay {replay_file} is a directory; name a file in it")
    has_several_agents(env)  # an environment that cannot be made is wrong use
    with progress("episodes", settings.episodes, quiet=options.quiet) as show:
        stats = play_match(
            players[0] if first is None else first,
            players[1],
            env,
            settings.episodes,
            deterministic=settings.deterministic,
            num_envs=settings.num_envs,
            seed=settings.seed,
            max_episode_steps=settings.max_episode_steps,
            players=None if first is None else players,
            save_replay=replay_file is not None,
            record=int(isinstance(options, EvaluateOptions) and (options.video is not None or options.render)),
            progress=show,
        )
    if replay_file is not None and stats.replay is not None:
        save_replay(replay_file, stats.replay)
    if isinstance(options, EvaluateOptions):
        _show_first(stats, env, options)
    _print_stats(stats, f"{' against '.join(stats.players)} in {env.id}: {stats}", options)
    return OK


def _print_stats(stats: EvalStats | SuiteStats, text: str, options: MatchOptions | EvaluateOptions) -> None:
    """Print the scores, and the files that were asked for."""
    if options.json:
        text = json.dumps(stats.to_dict())
    else:
        files = {"replay": options.save_replay, "video": options.video if isinstance(options, EvaluateOptions) else None}
        text = "\n".join([text, *(f"{name}: {path}" for name, path in files.items() if path is not None)])
    make_terminal().print(text)


@config_class("--")
class EvaluateOptions(ConfigBase):
    """Evaluate a run's policy, or a policy file. By default: the episodes of the run's final evaluation, with greedy actions.

    A file in a run's directory is evaluated as the run is; for one elsewhere add --env, whose preset is then the default of the rest.
    With --opponent it plays against another player, half of the games from each side on the same seeds; with --suite it is evaluated on
    every environment that a file lists.
    """

    run_name: RunName = ""
    """The run's directory, or its name in runs/; or a policy file."""
    episodes: int | None = None
    """Number of episodes; as many as in the run's final evaluation by default. More than it lists seeds (evaluation.seeds) have others."""
    sampled: bool = False
    """Sample actions instead of taking the likeliest."""
    seed: int | None = None
    """Seed of the episodes; that of the run's own evaluations by default."""
    best: bool = False
    """Use the policy of the best evaluation."""
    last: bool = False
    """Use the latest policy (the default)."""
    env: Annotated[str | None, Metavar("ENV")] = None
    """The environment, if it is code to import (repeat what the run was trained with), or another one with the same spaces."""
    kwargs: dict[str, Any] | None = None
    """Keyword arguments of the environment, such as '{units: [scout, scout]}'; by default those of the run."""
    num_envs: int | None = None
    """Copies of the environment; as in the run's evaluations by default."""
    max_episode_steps: int | None = None
    """Cut episodes off after this many steps and count them as capped; as in the run's evaluations by default."""
    baseline: Annotated[str | None, Metavar("PLAYER")] = None
    """Compare with random, a policy file or a run on the same seeds; for a run with opponents, the opponent. As in the run by default."""
    opponent: Annotated[str | None, Metavar("PLAYER")] = None
    """The opponent: heuristic, heuristic:0.5 (with that skill), random, a run or a policy file."""
    skill: float | None = None
    """The skill of --opponent heuristic, from 0 to 1; 1 by default."""
    save_replay: File = None
    """Write the first game against --opponent to this file; inchworm replay FILE shows it."""
    video: File = None
    """Record the first episode to this file, .mp4 or .gif; inchworm video RUN records more."""
    render: bool = False
    """Show the first episode in a window, once it is played."""
    suite: File = None
    """A YAML file of named groups of environments and opponents; see docs/evaluation.md."""
    json: bool = False
    """Print everything, episode by episode, as JSON."""
    quiet: bool = False
    """Show no progress."""


def run_evaluate(arguments: Sequence[str]) -> int:
    """Evaluate a policy and print the score."""
    options = parse(EvaluateOptions, arguments, PROG_EVALUATE)
    _check_flags(options)
    policy, path, config = policy_and_config(options, PROG_EVALUATE)
    env, settings, records = config.env, config.evaluation, options.video is not None or options.render
    if records:
        check_can_be_drawn(env)
    if options.opponent is not None:
        opponent = options.opponent if options.skill is None else f"{options.opponent}:{options.skill}"
        even = settings.episodes + settings.episodes % 2 if options.episodes is None else settings.episodes
        return _play((str(path), opponent), env, settings.replace(episodes=even, seeds=()), options, first=policy)
    stats: EvalStats | SuiteStats
    if options.suite is not None:
        suites = load_suites(options.suite, env=options.env)
        for group, simulations in suites.items():
            for simulation in simulations:
                has_several_agents(simulation.env, where=f"suite {group}, {simulation.name}: ")
        with PolicyEvaluator(config=settings) as evaluator, progress("episodes", count_episodes(suites), quiet=options.quiet) as show:
            stats = evaluator.evaluate_suites(policy, suites, progress=show)
        text = f"{path}:\n{stats}"
    else:
        stats = evaluate_with(policy, path, config, record=int(records), quiet=options.quiet)
        _show_first(stats, env, options)
        opponent_name = evaluation_opponent(config)
        text = f"{path}{'' if opponent_name is None else f' against {opponent_name}'}: {stats}"
    _print_stats(stats, text, options)
    return OK


def evaluate_with(policy: Policy, path: Path, config: TrainingConfig, *, record: int, quiet: bool) -> EvalStats:
    """Evaluate a policy as in training, with its opponent; the actions of the first `record` episodes are kept."""
    has_several_agents(config.env)  # an environment that cannot be made is wrong use
    evaluator = make_evaluator(config.env, config, record=record)
    with evaluator, progress("episodes", config.evaluation.episodes, quiet=quiet) as show:
        check_made_for(policy, evaluator.vector_env, str(path))
        return evaluator.evaluate(policy, progress=show)


def check_can_be_drawn(env: EnvConfig) -> None:
    """Refuse an environment without images before anything is played; one that cannot be made is wrong use."""
    try:
        with drawing_env(env_source(env)):
            pass
    except EnvError as error:
        raise UsageError(str(error)) from error


def _show_first(stats: EvalStats, env: EnvConfig, options: EvaluateOptions) -> None:
    """Write or show the first episode, if that was asked for."""
    if options.video is not None:
        save_video(options.video, env_source(env), stats.recorded)
    if options.render:
        show_video(env_source(env), stats.recorded)


def policy_and_config(options: EvaluateOptions | VideoOptions, prog: str) -> tuple[Policy, Path, TrainingConfig]:
    """Return the policy, its path, and the config of its run with what the options change; not in a run, the preset of --env."""
    policy, path, config = _load(options, prog)
    env = config.env if options.env is None else config.env.replace(id=options.env)
    env = env if options.kwargs is None else env.replace(kwargs=options.kwargs)
    defaults = config.evaluation
    names = ("seed", "num_envs", "episodes", "baseline", "max_episode_steps")
    given = {name: value for name in names if (value := getattr(options, name, None)) is not None}
    enough = options.seed is None and (options.episodes or 0) <= len(defaults.seeds)
    seeds = defaults.seeds[: options.episodes] if enough else ()
    counts = {"episodes": len(seeds) or defaults.final_episodes or 100, "final_episodes": 0, "seeds": seeds}
    settings = defaults.replace(deterministic=not options.sampled, **{**counts, **given})
    return policy, path, config.replace(env=env, evaluation=settings)


def _load(options: EvaluateOptions | VideoOptions, prog: str) -> tuple[Policy, Path, TrainingConfig]:
    """Return the policy, its path, and the config of its run; for a policy that is not in a run, the preset of --env."""
    if options.best and options.last:
        raise UsageError("--best and --last exclude each other; give one")
    name = options.run_name
    if not is_saved_policy(name):
        run = named_run(name, prog, env=options.env, other_env=True, hint="; a policy file is also accepted")
        return *load_run_policy(run, best=options.best), run.config
    if options.best or options.last:
        raise UsageError(f"--best and --last choose a policy of a run, and {name} is one policy; omit them")
    own_run = run_of(name, env=options.env)
    if own_run is None and options.env is None:
        raise UsageError(f"{name} is not in the directory of a run, so the environment is not known; add --env, such as --env CartPole-v1")
    config = config_for(options.env or "") if own_run is None else own_run.config
    return load_policy(name), Path(name), config


def _check_flags(options: EvaluateOptions) -> None:
    """Refuse flags that exclude each other."""
    if options.opponent is None:
        for flag, value in (("--skill", options.skill), ("--save-replay", options.save_replay)):
            if value is not None:
                raise UsageError(f"{flag} needs an opponent; add --opponent heuristic")
    elif options.skill is not None and options.opponent != "heuristic":
        raise UsageError(f"--skill applies to --opponent heuristic, not to {options.opponent}")
    elif options.skill is not None and not 0.0 <= options.skill <= 1.0:
        raise UsageError(f"--skill {options.skill:g} must be from 0 to 1")
    if options.suite is not None:
        others = {
            "--opponent": options.opponent,
            "--episodes": options.episodes,
            "--video": options.video,
            "--render": options.render or None,
        }
        for flag, value in others.items():
            if value is not None:
                raise UsageError(f"{flag} and --suite exclude each other: a suite defines its own; omit one of them")
    if options.video is not None:
        check_video(options.video)
    if options.render:
        check_display()


@config_class("--")
class VideoOptions(ConfigBase):
    """Record what a run's policy, or a policy file, does: the first episodes that inchworm evaluate scores, with greedy actions."""

    run_name: RunName = ""
    """The run's directory, or its name in runs/; or a policy file."""
    out: File = None
    """The file to write, .mp4 or .gif; by default an mp4 in the run's directory, where the report finds it, or here for a policy file."""
    episodes: int = 1
    """Number of episodes, one after another."""
    sampled: bool = False
    """Sample actions instead of taking the likeliest."""
    seed: int | None = None
    """Seed of the episodes; that of the run's own evaluations by default."""
    fps: float | None = None
    """Frames per second; the environment's own by default."""
    best: bool = False
    """Use the policy of the best evaluation."""
    last: bool = False
    """Use the latest policy (the default)."""
    env: Annotated[str | None, Metavar("ENV")] = None
    """The environment, if it is code to import (repeat what the run was trained with), or another one with the same spaces."""
    kwargs: dict[str, Any] | None = None
    """Keyword arguments of the environment, such as '{units: [scout, scout]}'; by default those of the run."""
    num_envs: int | None = None
    """Copies of the environment that are played, on which sampled actions depend; as in the run's evaluations by default."""
    max_episode_steps: int | None = None
    """Cut episodes off after this many steps; as in the run's evaluations by default."""
    quiet: bool = False
    """Show no progress."""


def run_video(arguments: Sequence[str]) -> int:
    """Play the episodes, write the video, and print its path and the score."""
    options = parse(VideoOptions, arguments, PROG_VIDEO)
    if options.out is not None:
        check_video(options.out, options.fps)
    policy, path, config = policy_and_config(options, PROG_VIDEO)
    out: str | Path = options.out or f"{path.stem}.mp4"
    if options.out is None and not is_saved_policy(options.run_name):
        out = find_run(options.run_name) / REPLAYS / ("best_policy.mp4" if options.best else "policy.mp4")
    check_video(out, options.fps)
    check_can_be_drawn(config.env)
    stats = evaluate_with(policy, path, config, record=options.episodes, quiet=options.quiet)
    save_video(out, env_source(config.env), stats.recorded, options.fps)
    make_terminal().print(f"{out}: {stats}")
    return OK


# `inchworm export RUN`: a policy as a program that acts without inchworm.

PROG_EXPORT = "inchworm export"


@config_class("--")
class ExportOptions(ConfigBase):
    """Write a policy as ONNX, as a torch.export program, or as a NumPy program, and check that it agrees with the policy."""

    run_name: RunName = ""
    """The run's directory, or its name in runs/; a policy file or a checkpoint is also accepted."""
    format: Format = "onnx"
    """onnx: policy.onnx; torch: policy.pt2, for torch.export.load; numpy: actor.py and weights.npz, which need nothing but NumPy."""
    out: Annotated[str | None, Metavar("DIR")] = None
    """The directory to write, which is new, empty or holds an earlier export."""
    best: bool = False
    """Export the policy of the best evaluation instead of the latest."""
    tolerance: float = TOLERANCE
    """The largest accepted difference from the policy, relative where a number is above 1."""


def run_export(arguments: Sequence[str]) -> int:
    """Write the export, check it, and print where it is."""
    options = parse(ExportOptions, arguments, PROG_EXPORT)
    if options.out is None:
        raise UsageError(f"no directory is given for the export; add --out DIR, as in {PROG_EXPORT} RUN --out exported")
    policy: Policy
    if is_saved_policy(options.run_name):
        if options.best:
            raise UsageError(f"--best chooses a policy of a run, and {options.run_name} is one policy; omit it")
        policy = load_policy(options.run_name)
    else:
        policy, _ = load_run_policy(named_run(options.run_name, PROG_EXPORT, hint="; a policy file is also accepted"), best=options.best)
    parts = policy.learned if isinstance(policy, CompositePolicy) else {"": policy}  # several policies: a directory each
    for name, part in parts.items():
        written = export_policy(part, Path(options.out) / name, options.format, tolerance=options.tolerance)
        files = ", ".join(file.name for file in written.files)
        make_terminal().print(f"{written.directory}: {files}; agrees with the policy to {written.max_error:.1g}")
    return OK
