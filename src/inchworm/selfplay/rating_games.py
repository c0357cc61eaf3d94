"""Serves the loop: the games of a rating, on environments of their own, the same ones each time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations

import numpy as np

from inchworm.env.opponents import OpponentVectorEnv, TeamVectorEnv, team_lanes
from inchworm.errors import ConfigError, EnvError
from inchworm.evaluate.games import Game
from inchworm.protocols import Actor, VectorEnv
from inchworm.seeding import derive_seed, make_stream
from inchworm.selfplay.ratings import Rating, calibrate, rate

_MOST_COPIES = 16


class RatingGames:
    """Plays pairs of games: each seed twice, once from either side. The environments are made at the first game and kept until `close`."""

    def __init__(self, make_env: Callable[[int], VectorEnv], *, episodes: int = 20, seed: int = 0, deterministic: bool = True) -> None:
        """`make_env(n)` makes n copies of a world of two teams; `deterministic` says whether the first player acts greedily."""
        self.episodes = episodes + episodes % 2
        self._make_env, self._seed, self._deterministic = make_env, seed, deterministic
        self._env: TeamVectorEnv | None = None

    def play(self, ours: Actor, theirs: Actor) -> np.ndarray:
        """What `ours` made of each game [episodes]: 1 won, 0 lost, 0.5 drawn."""
        inner = self._inner()
        lanes = team_lanes(inner.num_envs, inner.lanes_per_copy, np.arange(inner.num_envs) % 2)
        env = OpponentVectorEnv(inner, theirs, lanes, seed=self._seed)
        # Episode i is played in copy i % n, n even: neighbours have the same seed and different sides.
        seeds = [derive_seed(self._seed, "rating", episode // 2) for episode in range(self.episodes)]
        try:
            stats = Game(env, seeds, self._seed).play(ours, make_stream(self._seed, "rating"), self._deterministic)
        except BaseException:  # a half-stepped environment is no ground for the next game
            self.close()
            raise
        wins = stats.infos.get("win")
        if wins is None or np.isnan(wins).any():
            raise EnvError("the world does not say who won (info win at the end of an episode), so nobody can be rated in it")
        return np.asarray(wins)

    def calibrate(self, fixed: Mapping[str, Actor]) -> dict[str, Rating]:
        """The fixed players' ratings, by games among themselves: each with each, in turns."""
        pairs = list(combinations(fixed, 2))
        wins = {pair: self.play(fixed[pair[0]], fixed[pair[1]]) for pair in pairs}
        return calibrate(list(fixed), [(*pair, float(wins[pair][turn])) for turn in range(self.episodes) for pair in pairs])

    def rate(self, policy: Actor, fixed: Mapping[str, Actor], anchors: Mapping[str, Rating]) -> tuple[Rating, dict[str, float]]:
        """A policy's rating, and its win rate against each fixed player."""
        if not fixed:
            raise ConfigError("a rating needs a fixed player; give opponent.anchors")
        wins = {name: self.play(policy, player) for name, player in fixed.items()}
        results = [(name, float(wins[name][turn])) for turn in range(self.episodes) for name in fixed]
        return rate(results, anchors), {name: float(won.mean()) for name, won in wins.items()}

    def close(self) -> None:
        """Close the environments; the next game makes new ones."""
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def _inner(self) -> TeamVectorEnv:
        if self._env is None:
            env = self._make_env(min(_MOST_COPIES, self.episodes))
            if not isinstance(env, TeamVectorEnv):
                raise EnvError(f"{type(env).__name__} does not say how many lanes a copy has, so nobody can be rated in it")
            self._env = env
        return self._env
