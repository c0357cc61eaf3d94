"""`inchworm match A B`: two players in one world, each seed played from either side."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
import yaml

from inchworm.cli.arguments import UsageError, parse
from inchworm.cli.progress import progress
from inchworm.config import EnvConfig, EvalConfig
from inchworm.errors import EnvError
from inchworm.evaluate.match_stats import MatchStats
from inchworm.evaluate.matches import even_copies, pair_seeds, play_match
from inchworm.evaluate.players import is_built_in, make_player, named_policy, player_run
from inchworm.evaluate.worlds import make_world
from inchworm.protocols import Actor, VectorEnv
from inchworm.replay.format import save_replay
from inchworm.tracking.terminal import make_terminal
from inchworm.yaml_text import load_yaml

PROG = "inchworm match"


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


def run(arguments: Sequence[str]) -> int:
    """Play, and print the result."""
    options = parse(MatchOptions, arguments, PROG)
    if not options.first or not options.second:
        raise UsageError(f"a match needs two players; type: {PROG} RUN heuristic, or {PROG} RUN_A RUN_B")
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
    policy, path = named_policy(name, env=env.id)
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
    runs = [player_run(name, env=options.env) for name in names]
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
