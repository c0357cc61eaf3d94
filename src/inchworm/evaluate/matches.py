"""Matches between two players, each seed played from either side, and the replay of the first game."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from inchworm.collect.opponents import OpponentVectorEnv, check_spaces, team_lanes
from inchworm.config.sections import EvalConfig
from inchworm.core.errors import ConfigError
from inchworm.core.protocols import Actor, VectorEnv
from inchworm.core.seeding import derive_seed
from inchworm.env.registry import heuristic_env, team_worlds
from inchworm.evaluate.games import Progress, RecordedVectorEnv, check_episodes, episode_limit, opened, play_games
from inchworm.evaluate.stats import MatchStats
from inchworm.run.policies import make_player


def check_made_for(actor: Actor, env: VectorEnv, who: str) -> None:
    """Reject a player made for other spaces; the actions of one without declared spaces are checked when it acts."""
    if not isinstance(actor, Actor):
        raise ConfigError(f"{who} is of type {type(actor).__name__} and cannot act: it needs initial_state and act (see inchworm.Actor)")
    check_spaces(actor, env.observation_space, env.action_space, who)


def play_match(
    first: Actor | str,
    second: Actor | str,
    env: Any,
    episodes: int | None = None,
    seeds: Sequence[int] | None = None,
    *,
    deterministic: bool = True,
    num_envs: int = 8,
    seed: int = EvalConfig.seed,
    max_episode_steps: int | None = None,
    players: tuple[str, str] | None = None,
    save_replay: bool = False,
    record: int = 0,
    progress: Progress | None = None,
) -> MatchStats:
    """Play `episodes` games (default 100) between two players, half of them from either side on the same seeds.

    A player is an actor or the name of one: random, heuristic, heuristic:0.5, a run, a policy file. `players` are their names in results.
    `env` is anything that `make_vector_env` accepts, with two teams in each copy. Given seeds are one for each pair of games: half as
    many as episodes. Both players act greedily, or both sample. `num_envs` is rounded up to an even number, one half for each side; it
    does not change which games are played. A game that has not ended after `max_episode_steps` is cut off and counted as a draw; by
    default that is the limit that the environment is registered with, else 100,000. The actions of the first `record` games are kept.
    """
    pairs = pair_seeds(episodes, seeds, seed)
    with opened(env, even_copies(num_envs, 2 * len(pairs)), seed) as inner:
        ours, our_name = make_player(first, env, inner) if isinstance(first, str) else (first, "first")
        theirs, their_name = make_player(second, env, inner) if isinstance(second, str) else (second, "second")
        names = players or (our_name, their_name)
        width, copies = inner.lanes_per_copy, inner.num_envs
        if width % 2:
            raise ConfigError(
                f"a match needs an environment with two teams, such as {team_worlds()}; a copy of this one has {width} lane(s)"
            )
        if copies % 2:
            raise ConfigError(f"a match needs an even number of env copies, one half for each side, not {copies}")
        for actor, name in zip((ours, theirs), names):
            check_made_for(actor, inner, name)
        limit = episode_limit(env, max_episode_steps)
        make_replay = getattr(inner, "make_replay", None) if save_replay else None
        if save_replay and make_replay is None:
            raise ConfigError(
                f"cannot make a replay of {type(inner).__name__}, which has no make_replay; only games of {team_worlds()} can be replayed, "
                "without wrappers and without env.max_episode_steps (use max_steps in env.kwargs)"
            )
        recorded = RecordedVectorEnv(inner) if save_replay or record else None
        lanes = team_lanes(copies, width, np.arange(copies) % 2)  # game i is played from side i % 2
        played: Any = recorded or inner
        against = OpponentVectorEnv(played, theirs, lanes, seed=seed, deterministic=deterministic)
        games = [one for one in pairs for _ in (0, 1)]
        if recorded is not None:
            recorded.record(max(record, 1))
        stats = play_games(ours, against, games, seed, deterministic=deterministic, max_episode_steps=limit, progress=progress)
        kept = [] if recorded is None else recorded.finish(stats.lengths.tolist())
        replay = None if make_replay is None else make_replay(kept[0].seed, kept[0].actions, names, kept[0].info)
    fields = {field.name: getattr(stats, field.name) for field in dataclasses.fields(stats)}
    return MatchStats(**{**fields, "recorded": tuple(kept[:record])}, players=names, replay=replay)


def evaluate_vs_heuristic(
    policy: Actor,
    env_config: Any,
    episodes: int | None = None,
    seeds: Sequence[int] | None = None,
    device: Any = None,  # noqa: ARG001 - accepted for compatibility; a policy acts on its own device
    save_replay: bool = False,
    *,
    deterministic: bool = True,
    skill: float = 1.0,
    heuristic: Actor | None = None,
    num_envs: int = 8,
    seed: int = EvalConfig.seed,
    max_episode_steps: int | None = None,
    progress: Progress | None = None,
) -> tuple[MatchStats, dict[str, Any] | None]:
    """Score a policy against a world's heuristic at `skill` (0 to 1); return the stats and, if requested, a replay of the first game.

    `env_config` is the world as an id or an `EnvConfig`, or its rules, as its config object or a mapping of the fields. Episodes and
    seeds are as in `play_match`: each seed is played from either side. `heuristic` replaces the opponent by another actor. `device` is
    ignored: a policy acts on its own device.
    """
    source = heuristic_env(env_config)
    if heuristic is not None and skill != 1.0:
        raise ConfigError(f"skill={skill} applies to the built-in heuristic; do not give both skill and heuristic")
    how: dict[str, Any] = {"deterministic": deterministic, "seed": seed, "save_replay": save_replay, "progress": progress}
    how |= {"num_envs": num_envs, "max_episode_steps": max_episode_steps, "players": ("policy", "heuristic")}
    stats = play_match(policy, f"heuristic:{skill}" if heuristic is None else heuristic, source, episodes, seeds, **how)
    return stats, None if stats.replay is None else dict(stats.replay)


def pair_seeds(episodes: int | None, seeds: Sequence[int] | None, seed: int) -> list[int]:
    """Return one seed for each pair of games: the given ones, or ones derived from `seed`."""
    if episodes is None:
        episodes = 100 if seeds is None else 2 * len(seeds)
    check_episodes(episodes)
    if episodes % 2:
        raise ConfigError(f"episodes={episodes} is odd, but each seed is played once from either side; give {episodes + 1}")
    if seeds is None:
        return [derive_seed(seed, "match", pair) for pair in range(episodes // 2)]
    if 2 * len(seeds) != episodes:
        raise ConfigError(
            f"{len(seeds)} seeds, each played from either side, are {2 * len(seeds)} episodes, but episodes={episodes}; "
            f"give {episodes // 2} seeds, or episodes={2 * len(seeds)}"
        )
    return [int(one) for one in seeds]


def even_copies(num_envs: int, episodes: int) -> int:
    """Return the number of env copies of a match: even, and at most the number of games."""
    if num_envs < 1:
        raise ConfigError(f"num_envs={num_envs} must be 1 or more")
    return min(num_envs + num_envs % 2, episodes)
