"""Two players in one world, each seed played from either side. Serves evaluation against opponents, and `inchworm match`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inchworm.config import EnvConfig, EvalConfig
from inchworm.env.opponents import OpponentVectorEnv, team_lanes
from inchworm.errors import ConfigError
from inchworm.evaluate.games import Game, Progress, check_episodes, lanes_of_a_copy, num_copies
from inchworm.evaluate.match_stats import MatchStats
from inchworm.evaluate.players import check_made_for, make_player, skirmish_env
from inchworm.evaluate.recording import RecordedVectorEnv
from inchworm.evaluate.stats import EvalStats
from inchworm.evaluate.worlds import opened
from inchworm.protocols import Actor, VectorEnv
from inchworm.seeding import derive_seed, make_stream

if TYPE_CHECKING:
    from inchworm.env.skirmish import SkirmishConfig


def play_match(
    first: Actor,
    second: Actor,
    env: Any,
    episodes: int | None = None,
    seeds: Sequence[int] | None = None,
    *,
    deterministic: bool = True,
    num_envs: int = 8,
    seed: int = EvalConfig.seed,
    players: tuple[str, str] = ("first", "second"),
    save_replay: bool = False,
    progress: Progress | None = None,
) -> MatchStats:
    """Let two actors play `episodes` games (100 by default), half of them from either side on the same seeds.

    `env` is whatever `make_vector_env` takes, with two teams in each copy. Given seeds are one for each pair, so there must be half as many
    as episodes. Both act greedily, or both sample. The copies, `num_envs` of them, are an even number, one half for each side; how many
    there are does not change which games are played.
    """
    pairs = pair_seeds(episodes, seeds, seed)
    with opened(env, even_copies(num_envs, 2 * len(pairs)), seed) as inner:
        _check_two_teams(inner)
        for actor, name in zip((first, second), players):
            check_made_for(actor, inner, name)
        recorded = RecordedVectorEnv(inner, players) if save_replay else None
        ours = _first_players_env(inner if recorded is None else recorded, second, seed, deterministic)
        game = Game(ours, [one for one in pairs for _ in (0, 1)], seed)
        stats = game.play(first, make_stream(seed, "evaluation"), deterministic, progress)
    return _as_match(stats, players, None if recorded is None else recorded.replay())


def evaluate_vs_heuristic(
    policy: Actor,
    env_config: EnvConfig | SkirmishConfig | Mapping[str, Any] | str,
    episodes: int | None = None,
    seeds: Sequence[int] | None = None,
    device: Any = None,  # noqa: ARG001 - a policy acts where it is; taken because trainers of this kind are called with one
    save_replay: bool = False,
    *,
    deterministic: bool = True,
    skill: float = 1.0,
    heuristic: Actor | None = None,
    num_envs: int = 8,
    seed: int = EvalConfig.seed,
    progress: Progress | None = None,
) -> tuple[MatchStats, dict[str, Any] | None]:
    """Score a policy in Skirmish against the heuristic, at full strength unless `skill` (0 to 1) says otherwise; and replay the first game.

    `env_config` is a `SkirmishConfig` or a mapping of its fields, or Skirmish-v0 as an id or an `EnvConfig`. Episodes and seeds as in
    `play_match`: each seed is played from either side. `heuristic` is another actor to meet in its place. `device` is not needed: a
    policy acts where it is.
    """
    source = skirmish_env(env_config)
    if heuristic is not None and skill != 1.0:
        raise ConfigError(f"skill={skill} is of the built-in heuristic, but another one was given; leave one of them out")
    pairs = pair_seeds(episodes, seeds, seed)
    with opened(source, even_copies(num_envs, 2 * len(pairs)), seed) as env:
        opponent = heuristic if heuristic is not None else make_player(f"heuristic:{skill}", env, source)
        how: dict[str, Any] = {"deterministic": deterministic, "seed": seed, "save_replay": save_replay, "progress": progress}
        stats = play_match(policy, opponent, env, seeds=pairs, players=("policy", "heuristic"), **how)
    return stats, None if stats.replay is None else dict(stats.replay)


def pair_seeds(episodes: int | None, seeds: Sequence[int] | None, seed: int) -> list[int]:
    """One seed for each pair of games: the given ones, or ones derived from `seed`."""
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
    """How many copies a match runs: an even number, and no more than there are games."""
    if num_envs < 1:
        raise ConfigError(f"num_envs={num_envs} must be 1 or more")
    return min(num_envs + num_envs % 2, episodes)


def _check_two_teams(env: VectorEnv) -> None:
    width, copies = lanes_of_a_copy(env), num_copies(env)
    if width % 2:
        raise ConfigError(f"a match needs two teams in one world, as Skirmish-v0 has, but a copy of this environment has {width} lane(s)")
    if copies % 2:
        raise ConfigError(f"a match needs an even number of copies, one half for each side, not {copies}")


def _first_players_env(inner: VectorEnv, second: Actor, seed: int, deterministic: bool) -> OpponentVectorEnv:
    """The lanes of the first player: side 0 in even copies, side 1 in odd ones, so that game i is played from side i % 2."""
    copies = num_copies(inner)
    lanes = team_lanes(copies, lanes_of_a_copy(inner), [copy % 2 for copy in range(copies)])
    return OpponentVectorEnv(inner, second, lanes, seed=seed, deterministic=deterministic)


def _as_match(stats: EvalStats, players: tuple[str, str], replay: dict[str, Any] | None) -> MatchStats:
    fields = {field.name: getattr(stats, field.name) for field in dataclasses.fields(stats)}
    return MatchStats(**fields, players=players, replay=replay)
