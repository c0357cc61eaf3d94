"""Plays the simulations of suites, one after another. Serves the evaluator and `inchworm evaluate --suite`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inchworm.config import EvalConfig
from inchworm.errors import ConfigError, EnvError, SpaceError
from inchworm.evaluate.games import Game, Progress
from inchworm.evaluate.matches import even_copies, play_match
from inchworm.evaluate.players import check_made_for, make_player
from inchworm.evaluate.stats import EvalStats
from inchworm.evaluate.suite_stats import SimulationStats, SuiteStats
from inchworm.evaluate.suites import Simulation, read_suites
from inchworm.evaluate.worlds import opened
from inchworm.protocols import Actor
from inchworm.seeding import derive_seed, make_stream


def evaluate_suites(
    policy: Actor,
    suites: Mapping[str, Sequence[Any]],
    *,
    deterministic: bool = True,
    num_envs: int = 8,
    seed: int = EvalConfig.seed,
    progress: Progress | None = None,
) -> SuiteStats:
    """Score a policy on every simulation of every group; `progress` is told how many episodes of all are finished.

    The seeds are derived from `seed` alone: how many copies play does not change which episodes they are.
    """
    groups = read_suites(suites)
    found: dict[str, dict[str, SimulationStats]] = {}
    before = 0
    for group, simulations in groups.items():
        found[group] = {}
        for simulation in simulations:
            tell = None if progress is None else _after(progress, before)
            stats = _play(policy, simulation, f"suite {group}, {simulation.name}", (deterministic, num_envs, seed), tell)
            found[group][simulation.name] = SimulationStats(stats=stats, score_range=simulation.score_range)
            before += simulation.episodes
    return SuiteStats(found)


def count_episodes(suites: Mapping[str, Sequence[Simulation]]) -> int:
    """How many episodes all simulations have."""
    return sum(simulation.episodes for simulations in suites.values() for simulation in simulations)


def _after(progress: Progress, before: int) -> Progress:
    return lambda finished: progress(before + finished)


def _play(policy: Actor, simulation: Simulation, where: str, how: tuple[bool, int, int], progress: Progress | None) -> EvalStats:
    """One simulation; whatever does not fit is told with its place in the suite."""
    deterministic, num_envs, seed = how
    matched = simulation.opponent is not None
    copies = even_copies(num_envs, simulation.episodes) if matched else min(num_envs, simulation.episodes)
    try:
        with opened(simulation.env, copies, seed) as env:
            check_made_for(policy, env, "the policy")
            if simulation.opponent is not None:
                opponent = simulation.opponent
                second = make_player(opponent, env, simulation.env) if isinstance(opponent, str) else opponent
                options: dict[str, Any] = {"deterministic": deterministic, "seed": seed, "progress": progress}
                names = ("the policy", opponent if isinstance(opponent, str) else type(opponent).__name__)
                return play_match(policy, second, env, simulation.episodes, players=names, **options)
            seeds = [derive_seed(seed, "suite", episode) for episode in range(simulation.episodes)]
            return Game(env, seeds, seed).play(policy, make_stream(seed, "evaluation"), deterministic, progress)
    except (ConfigError, SpaceError, EnvError) as error:
        raise type(error)(f"{where}: {error}") from error
