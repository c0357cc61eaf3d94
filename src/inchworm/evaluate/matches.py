"""Two players in one world, each seed played from either side. Serves evaluation against opponents, and `inchworm match`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from inchworm.collect.actors import SKIRMISH, make_actor
from inchworm.collect.opponents import OpponentVectorEnv, check_spaces, team_lanes
from inchworm.config.sections import EnvConfig, EvalConfig
from inchworm.core.errors import ConfigError
from inchworm.core.protocols import Actor, Policy, VectorEnv
from inchworm.core.seeding import derive_seed, make_stream
from inchworm.core.types import EnvStep, Tree
from inchworm.evaluate.games import Game, Progress, check_episodes, lanes_of_a_copy, num_copies, opened
from inchworm.evaluate.stats import EvalStats, MatchStats
from inchworm.policy.file import load_policy
from inchworm.run.checkpoint import TrainingCheckpointer
from inchworm.run.directory import Run, open_run
from inchworm.worlds.replay import make_replay

if TYPE_CHECKING:
    from inchworm.worlds.skirmish import SkirmishConfig, SkirmishVectorEnv


def make_player(name: str, env: VectorEnv, source: Any) -> Actor:
    """The player of that name in a world; `source` is what the world was made of."""
    if is_built_in(name):
        return _built_in(name, env, source)
    return named_policy(name, env=source.id if isinstance(source, EnvConfig) else None)[0]


def is_built_in(name: str) -> bool:
    """Whether the name is of a player that needs no file."""
    return name == "random" or name.partition(":")[0] == "heuristic"


def named_policy(name: str, *, env: str | None = None) -> tuple[Policy, Path]:
    """The policy that a name means, and where it is: a file, or the latest of a run; `env` as for `open_run`."""
    if Path(name).is_file():
        return load_policy(name), Path(name)
    return run_policy(player_run(name, env=env))


def player_run(name: str, *, env: str | None = None) -> Run:
    """The run of that name (its directory, or its name in runs/), or one line that says what a player may be."""
    try:
        return open_run(name, env=env)
    except ConfigError as error:
        hint = "; a player is a run, a policy file, heuristic, heuristic:0.5 or random" if "there is no run" in str(error) else ""
        raise ConfigError(f"{error}{hint}") from None


def run_policy(run: Run, *, best: bool = False) -> tuple[Policy, Path]:
    """A run's latest policy or its best, and where it is. Several policies come from a checkpoint, which knows who plays which lane."""
    path = run.policy_path(best=best)
    if path.exists():
        return load_policy(path), path
    kept = TrainingCheckpointer(run.checkpoints)
    checkpoint = kept.best() if best else kept.latest()
    if parts_of(run) and checkpoint is not None:
        return kept.load_policy(checkpoint).policy, checkpoint
    hint = "leave --best out" if best else f"inchworm resume {run.path} trains it further"
    raise ConfigError(f"the run {run.path} has no {path.name} yet; {hint}")


def parts_of(run: Run) -> list[str]:
    """The names of a run's policies, where it trains several; empty where it trains one."""
    path = run.policy_path()
    return sorted(part.stem.removeprefix(f"{path.stem}-") for part in run.path.glob(f"{path.stem}-*{path.suffix}"))


def _built_in(name: str, env: VectorEnv, source: Any) -> Actor:
    if name == "random":
        return make_actor(name, env.action_space, "")
    if not isinstance(source, EnvConfig) or source.id != SKIRMISH:
        world = source.id if isinstance(source, EnvConfig) else "this environment"
        raise ConfigError(f"{world} has no heuristic, which plays {SKIRMISH} alone; give a run, a policy file or random")
    return make_actor(name, env.action_space, source.id, source.kwargs)


def skirmish_env(config: Any) -> EnvConfig:
    """A game of Skirmish as an env config: of its id, of its rules (also as a mapping), or as it is."""
    from inchworm.worlds.skirmish import SkirmishConfig

    if config == SKIRMISH:
        return EnvConfig(id=SKIRMISH)
    if isinstance(config, Mapping):
        config = SkirmishConfig.from_dict(config)
    if isinstance(config, SkirmishConfig):
        return EnvConfig(id=SKIRMISH, kwargs=config.to_dict())
    if not isinstance(config, EnvConfig) or config.id != SKIRMISH:
        found = f"the id {config.id}" if isinstance(config, EnvConfig) else type(config).__name__
        raise ConfigError(f'the heuristic plays {SKIRMISH} alone, not {found}; give EnvConfig(id="{SKIRMISH}") or a SkirmishConfig')
    return config


def check_made_for(actor: Actor, env: VectorEnv, who: str) -> None:
    """Refuse a player that was made for another world; one that does not say what it was made for is found out when it acts."""
    if not isinstance(actor, Actor):
        raise ConfigError(f"{who} is of type {type(actor).__name__} and cannot act: it needs initial_state and act (see inchworm.Actor)")
    check_spaces(actor, env.observation_space, env.action_space, who)


class RecordedVectorEnv:
    """The `VectorEnv` contract passed on unchanged, with an eye on copy 0 until its first game is over."""

    def __init__(self, inner: VectorEnv, players: tuple[str, str]) -> None:
        self._inner, self._players = _skirmish(inner), players
        self.observation_space, self.action_space = inner.observation_space, inner.action_space
        self.num_lanes, self.num_envs, self.lanes_per_copy = inner.num_lanes, self._inner.num_envs, self._inner.lanes_per_copy
        self._seed = -1
        self._actions: list[np.ndarray] = []  # [2n, 3] each
        self._info: Mapping[str, float] | None = None  # the last of the first game, once it is over

    def reset(self, seeds: Sequence[int] | None = None, indices: Sequence[int] | None = None) -> EnvStep:
        """Pass it on; the first one begins the game that is recorded."""
        if self._seed < 0 and seeds is not None:
            self._seed = int(seeds[0])
        return self._inner.reset(seeds, indices)

    def send(self, actions: Tree) -> None:
        """Pass it on, and keep what copy 0 does."""
        if self._info is None:
            self._actions.append(np.array(actions[: self.lanes_per_copy], np.int64))
        self._inner.send(actions)

    def recv(self) -> EnvStep:
        """Pass it on, and see whether the game is over."""
        step = self._inner.recv()
        if self._info is None:
            self._info = next((ended.info for ended in step.ended if ended.lane == 0), None)
        return step

    def step(self, actions: Tree) -> EnvStep:
        """`send`, then `recv`."""
        self.send(actions)
        return self.recv()

    def set_reset_options(self, options: Mapping[str, Any] | None, indices: Sequence[int] | None = None) -> None:
        """Pass it on."""
        self._inner.set_reset_options(options, indices)

    def state_dict(self) -> dict[str, Any]:
        """Of the environments; a recording is not saved."""
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Pass it on."""
        self._inner.load_state_dict(state)

    def close(self) -> None:
        """Pass it on."""
        self._inner.close()

    def replay(self) -> dict[str, Any]:
        """The first game: its world, a frame for the beginning and for each step, and how it ended."""
        from inchworm.worlds.skirmish import SkirmishWorld

        if self._info is None:
            raise RuntimeError("the first game is not over")
        world = SkirmishWorld(self._inner.config, 1)
        world.begin([self._seed])
        frames = [world.frame(0)]
        for joint in self._actions:
            by_team = joint.reshape(2, self.lanes_per_copy // 2, -1, 1)  # [2, n, 3, 1]
            world.step(np.ascontiguousarray(by_team.transpose(2, 0, 1, 3)))
            frames.append(world.frame(0))
        meta = {"seed": self._seed, "players": list(self._players), "steps": len(self._actions), "hp_margin": self._info["hp_margin"]}
        return make_replay(world.describe(0), frames, meta, self._info)


def _skirmish(env: VectorEnv) -> SkirmishVectorEnv:
    from inchworm.worlds.skirmish import SkirmishVectorEnv

    if not isinstance(env, SkirmishVectorEnv):
        raise ConfigError(
            f"no replay can be made of {type(env).__name__}: only games of Skirmish-v0 can be shown, without wrappers and with "
            "env.max_episode_steps left out (max_steps among its kwargs limits them)"
        )
    return env


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
