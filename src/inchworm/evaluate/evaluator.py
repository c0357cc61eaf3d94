"""Scoring a policy by seeded episodes, alone or in matches, on environments separate from those of training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from inchworm.collect.opponents import OpponentVectorEnv, check_spaces, own_lanes, team_lanes
from inchworm.config.sections import CurriculumConfig, EvalConfig, TrainingConfig
from inchworm.core.errors import ConfigError
from inchworm.core.protocols import Actor, Closes, VectorEnv
from inchworm.core.seeding import derive_seed, episode_seed
from inchworm.env.registry import heuristic_env, heuristic_of, team_worlds
from inchworm.env.restore import LEVEL
from inchworm.env.source import EnvSource, env_source
from inchworm.evaluate.games import Progress, RecordedVectorEnv, check_episodes, episode_limit, make_world, opened, play_games
from inchworm.evaluate.stats import EvalStats, MatchStats
from inchworm.run.policies import is_built_in, make_player

if TYPE_CHECKING:
    from inchworm.evaluate.suites import SuiteStats


class PolicyEvaluator(Closes):
    """Plays evaluation episodes. The environments are made at the first evaluation and kept until `close`.

    Results are reproducible: episodes and sampled actions depend on `config.seed` only. Nothing is shared with training, and
    the policy's normaliser statistics are not updated.
    """

    def __init__(
        self,
        env: Any = None,
        config: EvalConfig | None = None,
        *,
        wrap: Callable[[VectorEnv], VectorEnv] | None = None,
        prepare: Callable[[VectorEnv], None] | None = None,
        record: int = 0,
    ) -> None:
        """`env` is anything that `make_vector_env` accepts; instances are not closed. `evaluate_suites` needs no `env`.

        `wrap` is applied to the environments when they are made, for example to add an opponent, and `prepare` before it, for example to
        set reset options. The actions of the first `record`
        episodes of each evaluation are kept in its stats, for a video.
        """
        self.config = config or EvalConfig()
        self.source = None if env is None else env_source(env)
        self._wrap, self._record = wrap, record
        self._prepare = prepare
        self._recorder: RecordedVectorEnv | None = None
        self._made: VectorEnv | None = None
        self._played: VectorEnv | None = None
        self._baseline = None if self.config.baseline is None else load_player(self.config.baseline, self.source)
        self._baseline_returns: dict[tuple[bool, tuple[int, ...]], np.ndarray] = {}  # of episodes with these seeds, greedy or not

    def evaluate(
        self,
        policy: Actor,
        episodes: int | None = None,
        deterministic: bool | None = None,
        *,
        seeds: Sequence[int] | None = None,
        progress: Progress | None = None,
    ) -> EvalStats:
        """Play `episodes` episodes (default: the config's), greedily or sampled, with the given seeds, the config's or derived ones."""
        greedy = self.config.deterministic if deterministic is None else deterministic
        count = self.config.episodes if episodes is None else episodes
        check_episodes(count)
        seeds = seeds if seeds is not None else self.config.seeds or None
        if seeds is not None and len(seeds) != count:
            raise ConfigError(f"evaluation got {len(seeds)} seeds for {count} episodes; give one seed per episode, or no seeds")
        env, seed = self.vector_env, self.config.seed
        copies = env.num_envs
        try:
            if seeds is None:  # episode i is number i // copies of copy i % copies
                seeds = [episode_seed(seed, index % copies, index // copies) for index in range(count)]
            limit = episode_limit(self.source, self.config.max_episode_steps)
            games = [int(one) for one in seeds]
            if self._recorder is not None:
                self._recorder.record(min(self._record, count))
            stats = play_games(policy, env, games, seed, deterministic=greedy, max_episode_steps=limit, progress=progress)
            if self._recorder is not None:
                stats = replace(stats, recorded=tuple(self._recorder.finish(stats.lengths.tolist())))
            name, key = self.config.baseline, (greedy, tuple(games))
            if name is None:
                return stats
            if key not in self._baseline_returns:
                self._baseline = self._baseline or load_player(name, self.source, env)
                check_spaces(self._baseline, env.observation_space, env.action_space, f"the baseline {name}")
                played = play_games(self._baseline, env, games, seed, deterministic=greedy, max_episode_steps=limit, purpose="baseline")
                self._baseline_returns[key] = played.returns
            return replace(stats, baseline=name, baseline_returns=self._baseline_returns[key])
        except BaseException:  # do not reuse an environment that is broken or in the middle of a step
            self.close()
            raise

    def evaluate_suites(self, policy: Actor, suites: Mapping[str, Sequence[Any]], *, progress: Progress | None = None) -> SuiteStats:
        """Score a policy on named groups of environments and opponents, with the config's settings but its `episodes`."""
        from inchworm.evaluate.suites import evaluate_suites  # which builds on matches; scoring alone does not

        config = self.config
        how = {name: getattr(config, name) for name in ("deterministic", "num_envs", "seed", "max_episode_steps")}
        return evaluate_suites(policy, suites, **how, progress=progress)

    @property
    def vector_env(self) -> VectorEnv:
        """The environments that are played, made at the first access."""
        if self.source is None:
            raise ConfigError("this evaluator has no environment; use PolicyEvaluator(env), or call evaluate_suites")
        if self._played is None:
            if self.source.kind != "vector":
                self._made = make_world(self.source, self.config.num_envs, self.config.seed)
            env: Any = self.source.given if self._made is None else self._made
            if self._prepare is not None:
                self._prepare(env)
            if self._record:
                env = self._recorder = RecordedVectorEnv(env)
            self._played = env if self._wrap is None else self._wrap(env)
        return self._played

    @property
    def make_replay(self) -> Callable[..., dict[str, Any]] | None:
        """What makes a replay of a recorded game; None where games are not recorded, or cannot be replayed as files."""
        _ = self.vector_env  # makes the environments, and with them the recorder
        return getattr(self._recorder, "make_replay", None)

    def close(self) -> None:
        """Close the environments that were made here; the next evaluation makes new ones."""
        made, self._made, self._played, self._recorder = self._made, None, None, None
        if made is not None:
            made.close()


def evaluate_policy(
    policy: Actor,
    env: Any,
    episodes: int | None = None,
    *,
    seeds: Sequence[int] | None = None,
    deterministic: bool = True,
    num_envs: int = 8,
    seed: int = EvalConfig.seed,
    max_episode_steps: int | None = None,
) -> EvalStats:
    """Score a policy on an environment: 100 episodes by default, with derived seeds or one given seed per episode.

    An episode that has not ended after `max_episode_steps` is cut off and counted in `capped_episodes`; by default that is the limit that
    the environment is registered with, else 100,000.
    """
    if episodes is None:
        episodes = 100 if seeds is None else len(seeds)
    copies = max(1, min(num_envs, episodes))
    how: dict[str, Any] = {"deterministic": deterministic, "seed": seed, "max_episode_steps": max_episode_steps}
    config = EvalConfig(episodes=max(1, episodes), num_envs=copies, **how)
    with PolicyEvaluator(env, config) as evaluator:
        return evaluator.evaluate(policy, episodes, seeds=seeds)


def make_evaluator(source: Any, config: TrainingConfig, *, record: int = 0) -> PolicyEvaluator:
    """Make the evaluator of a run's policy; a run with opponents is scored against its `evaluation_opponent`."""
    opponent, curriculum = evaluation_opponent(config), config.curriculum
    prepare = None
    if curriculum.mode != "none":
        prepare = partial(set_level, curriculum=curriculum, level=curriculum.evaluation_level or curriculum.num_levels)
    if opponent is None:
        return PolicyEvaluator(source, config.evaluation, prepare=prepare, record=record)
    loaded = load_player(opponent, config.env)

    def add_opponent(env: VectorEnv) -> VectorEnv:
        lanes = own_lanes(env, config)
        return OpponentVectorEnv(env, loaded or load_player(opponent, config.env, env), lanes, seed=config.evaluation.seed)

    alone = config.evaluation.replace(baseline=None)  # it plays, and is not compared with
    return PolicyEvaluator(source, alone, wrap=add_opponent, prepare=prepare, record=record)


def load_player(name: str, source: Any, env: VectorEnv | None = None) -> Any:
    """Load or make the player of that name, as in a match; without `env`, None for players that are made for an environment.

    A policy file is loaded when the evaluator is made, so that a missing one is an error before training.
    """
    return None if env is None and is_built_in(name) else make_player(name, source, env)[0]


def check_baseline(config: TrainingConfig, source: EnvSource, env: VectorEnv) -> None:
    """Reject a baseline that cannot play where the policy is evaluated, which has the spaces of `env`, before training."""
    name = config.evaluation.baseline
    if name is not None:
        check_spaces(load_player(name, source.given, env), env.observation_space, env.action_space, f"the baseline {name}")


def evaluation_opponent(config: TrainingConfig) -> str | None:
    """Return the opponent in a run's evaluations; None without opponents.

    It is the baseline of the config, else the heuristic at full skill, or random where there is none.
    """
    if config.opponent.mode == "none":
        return None
    if config.evaluation.baseline is not None:
        return config.evaluation.baseline
    return "heuristic" if config.opponent.mode != "random" and heuristic_of(config.env.id) else "random"


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


def set_level(env: Any, curriculum: CurriculumConfig, level: int, indices: Sequence[int] | None = None) -> None:
    """Give copies of a vector env a level of a curriculum, from their next resets on: by reset options, or by its method."""
    curriculum.check_level(level, "level")
    method = f"set_{curriculum.option}"
    has_method = getattr(env, "has_method", None)  # a vector env that was written elsewhere may lack it
    calls = not curriculum.levels and has_method is not None and has_method(method)
    options = dict(curriculum.levels[level - 1]) if curriculum.levels else {} if calls else {curriculum.option: level}
    env.set_reset_options({**options, LEVEL: level}, indices)
    if calls:
        env.call(method, level, indices=indices)
