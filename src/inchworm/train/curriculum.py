"""Curricula: which level of difficulty, or which task, each copy of the environment gets at its next reset.

The environments keep the level with their reset options, so that running episodes, resumed runs and rebuilt workers are exact; an
episode's record says at which level it began (`curriculum_level`). Evaluations have their own fixed level.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from inchworm.collect.opponents import OpponentVectorEnv
from inchworm.config.sections import CurriculumConfig, TrainingConfig
from inchworm.core.errors import ConfigError
from inchworm.core.protocols import BaseCallback, Callback, VectorEnv
from inchworm.core.seeding import make_stream, restore_stream, stream_state
from inchworm.core.types import EpisodeRecord
from inchworm.evaluate.evaluator import set_level
from inchworm.rollout.rollout import Rollout
from inchworm.selfplay.opponent_pool import SkillLadder
from inchworm.train.loop import TrainingState

SUCCESS = ("is_success", "success", "win")
"""Names in an episode's last info that tell whether it was a success, in this order."""


class LevelResults:
    """The latest episodes of one level: their successes, where known, and returns."""

    def __init__(self, window: int) -> None:
        self.successes: deque[float] = deque(maxlen=window)
        self.returns: deque[float] = deque(maxlen=window)
        self.episodes = 0

    @property
    def success_rate(self) -> float | None:
        """The mean success of the window; None before the first episode whose success is known."""
        return float(np.mean(self.successes)) if self.successes else None

    @property
    def mean_return(self) -> float | None:
        """The mean return of the window; None before the first episode."""
        return float(np.mean(self.returns)) if self.returns else None

    @property
    def progress(self) -> float:
        """How much success, or else the return, differs between the older and the newer half of the window."""
        values = np.array(self.successes or self.returns)
        half = len(values) // 2
        return float(abs(values[half:].mean() - values[:half].mean())) if half else 0.0


class CurriculumCallback(BaseCallback):
    """Chooses the levels of the next episodes after each iteration, and reports success and return for each level.

    To choose them in another way, override `choose`, which returns a level for each copy of the environment; with callbacks of a trainer
    it is bound to the trainer's environments, else call `bind`. Its state is saved with the run.
    """

    def __init__(self, config: CurriculumConfig | None = None) -> None:
        self.config = config if config is not None else CurriculumConfig(mode="progress")
        self.levels: list[int] = []
        """The level that each copy has from its next reset on."""
        self.level = self.config.start_level
        """The level of `progress` and `adaptive`, and the one of `set_level`."""
        self.results = {level: LevelResults(self.config.window) for level in range(1, self.config.num_levels + 1)}
        self.total_timesteps = 0
        """The run's planned length, which `progress` refers to."""
        self._env: VectorEnv | None = None
        self._stream = make_stream(0, "curriculum")

    def bind(self, env: VectorEnv, config: TrainingConfig) -> None:
        """Set the environments whose levels are chosen, and the run's seed and planned length."""
        if self.config.opponent_skills and not (isinstance(env, OpponentVectorEnv) and isinstance(env.opponent, SkillLadder)):
            raise ConfigError("curriculum.opponent_skills needs an environment with two teams, and opponent.mode=heuristic")
        self._env, self.total_timesteps = env, config.run.total_timesteps
        self._stream = make_stream(config.run.seed, "curriculum")

    @property
    def env(self) -> VectorEnv:
        """The environments that it is bound to."""
        if self._env is None:
            raise ConfigError("this curriculum has no environments: pass it to a trainer (callbacks=[…]), or call bind(env, config)")
        return self._env

    @property
    def success_rate(self) -> float | None:
        """The success rate at the current level; None without an episode there."""
        return self.results[self.level].success_rate

    def set_level(self, level: int) -> None:
        """Give all copies this level from their next resets on, until the curriculum chooses again."""
        self.level = self.config.check_level(level, "difficulty_level")
        self._assign([level] * self.env.num_envs)

    def on_train_start(self, state: TrainingState) -> None:
        """Set the first levels; a run that is resumed has them."""
        if len(self.levels) != self.env.num_envs:
            self.levels = []
        self._assign(self.levels or self.choose(state))

    def on_rollout(self, state: TrainingState, rollout: Rollout) -> None:
        """Add the episodes that ended, each to the level at which it began."""
        del state
        for episode in rollout.episodes:
            level = int(episode.info.get("curriculum_level", 0))
            if level in self.results:  # else it began before the curriculum
                self.add(level, episode)

    def add(self, level: int, episode: EpisodeRecord) -> None:
        """Add an episode to a level's results."""
        results, success = self.results[level], self._success(episode)
        results.episodes += 1
        results.returns.append(episode.episode_return)
        if success is not None:
            results.successes.append(success)

    def _success(self, episode: EpisodeRecord) -> float | None:
        if self.config.success_return is not None:
            return float(episode.episode_return >= self.config.success_return)
        found = next((episode.info[name] for name in SUCCESS if name in episode.info), None)
        if found is None and self.config.mode == "adaptive":
            raise ConfigError(
                f"curriculum.mode=adaptive needs to know which episodes are successes, and the last info has none of "
                f"{', '.join(SUCCESS)}; set curriculum.success_return to the return from which an episode is one"
            )
        return found

    def on_iteration(self, state: TrainingState, metrics: Mapping[str, float]) -> bool | None:
        """Report the levels of this iteration, then choose the next."""
        del metrics
        shown: dict[str, float | None] = {"level": float(np.mean(self.levels)) if self.levels else None}
        for level, results in self.results.items():
            if results.episodes:
                found = {"success": results.success_rate, "return": results.mean_return, "episodes": float(results.episodes)}
                shown |= {f"{name}_{level}": value for name, value in found.items()}
        state.metrics |= {f"curriculum/{name}": value for name, value in shown.items() if value is not None}
        self._assign(self.choose(state))
        return None

    def choose(self, state: TrainingState) -> list[int]:
        """The level of each copy's next episodes, as `mode` says."""
        copies = self.env.num_envs
        if self.config.mode == "learning_progress":
            return [int(level) for level in self._stream.choice(list(self.results), size=copies, p=self.probabilities())]
        if self.config.mode == "adaptive":
            self._adapt()
        else:
            self.level = self._level_at(state.env_steps / max(1, self.total_timesteps))
        return [self.level] * copies

    def _level_at(self, progress: float) -> int:
        """The level after this share of the run."""
        count = self.config.num_levels - 1
        milestones = self.config.milestones or [0.6 * place / count for place in range(1, count + 1)]
        return 1 + sum(progress >= milestone for milestone in milestones)

    def _adapt(self) -> None:
        """Move one level up or down if the window of the current one says so; the window of the new level begins empty."""
        results, config = self.results[self.level], self.config
        rate = results.success_rate
        if rate is None or len(results.successes) < config.window:
            return
        step = (rate > config.promote and self.level < config.num_levels) - (rate < config.demote and self.level > 1)
        if step:
            self.level += step
            self.results[self.level].successes.clear()
            self.results[self.level].returns.clear()

    def probabilities(self) -> list[float]:
        """How often `learning_progress` draws each level: in proportion to its progress, and a share of `explore` uniformly."""
        progress = np.array([results.progress for results in self.results.values()])
        uniform = np.full(len(progress), 1 / len(progress))
        share = progress / progress.sum() if progress.sum() > 0 else uniform
        return list((1 - self.config.explore) * share + self.config.explore * uniform)

    def _assign(self, levels: list[int]) -> None:
        """Pass the levels of copies that change to the environments, and to the opponents if they have a skill for each."""
        env, before = self.env, self.levels or [0] * len(levels)
        for level in sorted(set(levels)):
            self.config.check_level(level, "a level of choose()")
            changed = [copy for copy, own in enumerate(levels) if own == level and before[copy] != level]
            if changed or not self.levels:
                set_level(env, self.config, level, changed)
        self.levels = list(levels)
        skills = self.config.opponent_skills
        if skills and isinstance(env, OpponentVectorEnv) and isinstance(env.opponent, SkillLadder):
            for copy, level in enumerate(levels):
                env.opponent.hold(skills[level - 1], [copy])

    def state_dict(self) -> dict[str, Any]:
        """The levels, what is known of each, and the random stream."""
        return {
            "level": self.level,
            "levels": list(self.levels),
            "results": [[list(one.successes), list(one.returns), one.episodes] for one in self.results.values()],
            "stream": stream_state(self._stream),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; the environments have their levels by their own state."""
        if len(state["results"]) != len(self.results):
            raise ConfigError(f"the saved curriculum has {len(state['results'])} levels, here are {len(self.results)}")
        self.level, self.levels = int(state["level"]), [int(level) for level in state["levels"]]
        self._stream = restore_stream(state["stream"])
        for one, (successes, returns, episodes) in zip(self.results.values(), state["results"]):
            one.successes, one.returns = (deque(values, maxlen=self.config.window) for values in (successes, returns))
            one.episodes = int(episodes)


def resolve_curriculum(curriculum: Any, config: TrainingConfig) -> tuple[TrainingConfig, list[Callback]]:
    """What `curriculum=` of a loop means: a mode, a `CurriculumConfig`, or a callback of the user's; the config and callbacks with it."""
    if isinstance(curriculum, str):
        curriculum = CurriculumConfig(mode=curriculum)  # type: ignore[arg-type]
    if isinstance(curriculum, CurriculumConfig):
        return config.replace(curriculum=curriculum), []
    if curriculum is not None and not isinstance(curriculum, CurriculumCallback):
        raise ConfigError(f"curriculum must be a mode, a CurriculumConfig or a CurriculumCallback, not {type(curriculum).__name__}")
    return config, [] if curriculum is None else [curriculum]


def bound_curricula(config: TrainingConfig, env: VectorEnv, callbacks: list[Callback]) -> list[Callback]:
    """The callbacks with the config's curriculum first, all curricula among them bound to the environments."""
    if config.curriculum.mode != "none":
        callbacks = [CurriculumCallback(config.curriculum), *callbacks]
    curricula = [callback for callback in callbacks if isinstance(callback, CurriculumCallback)]
    if len(curricula) > 1:
        raise ConfigError("there are two curricula, and an environment has one level; leave out curriculum.mode, or one of the callbacks")
    for curriculum in curricula:
        curriculum.bind(env, config)
    return callbacks
