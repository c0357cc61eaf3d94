"""Around the walk: the training loop. Collect (steps 3 to 5), learn (steps 6 to 9), tell the callbacks; until the run is done."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from inchworm.backends.registry import acting_policy, learning_threads, make_learner
from inchworm.collect.collector import RECENT_EPISODES, RolloutCollector
from inchworm.config.sections import RunConfig, TrainingConfig
from inchworm.core.protocols import Callback, Collector, Learner, Policy
from inchworm.core.types import EpisodeRecord
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.rollout import Rollout
from inchworm.selfplay.callback import bind_pool, opponent_callbacks
from inchworm.train.resolve import evaluation_source, resolve_choices, resolve_env, resolve_policy


@dataclass
class TrainingState:
    """How far a run has come. Saved with it, unlike what can be read from its files."""

    iteration: int = 0
    env_steps: int = 0
    episodes: int = 0
    recent: deque[EpisodeRecord] = field(default_factory=lambda: deque(maxlen=RECENT_EPISODES))
    should_stop: bool = False
    interrupted: bool = False
    ended: bool = False
    """Whether all that comes after the last iteration has been done, too."""
    best_score: float | None = None
    """The best evaluation so far."""
    best_iteration: int | None = None
    """After which iteration it was taken."""
    scored: int | None = None
    """After which iteration the evaluation at the end was taken."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the current iteration; callbacks may add to it."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """What went wrong beside the training itself, such as a crashed evaluation."""
    history: dict[str, list[float]] = field(default_factory=dict)
    keep_history: bool = True
    """Whether the history grows; a run of days that nobody asks for it need not hold it."""

    @property
    def stopped(self) -> bool:
        """Whether a callback has ended the run, and what comes after its last iteration is still to be done."""
        return self.should_stop and not self.interrupted and not self.ended

    def state_dict(self) -> dict[str, Any]:
        """What cannot be read off the collector, as plain data."""
        return {"iteration": self.iteration, "best_score": self.best_score, "stopped": self.stopped}

    def follow(self, collector: RolloutCollector) -> None:
        """Count what was collected outside the loop, too."""
        self.env_steps, self.episodes, self.recent = collector.env_steps, collector.episodes, collector.recent.copy()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from these counters."""
        self.iteration, self.best_score = int(state["iteration"]), state["best_score"]
        self.best_iteration = self.scored = None  # the checkpoint's manifest says whether it was this one
        self.should_stop, self.interrupted, self.ended = bool(state.get("stopped", False)), False, False


@dataclass(frozen=True)
class TrainingComponents:
    """The parts that an iteration uses; take one out and put your own in with `dataclasses.replace`."""

    config: TrainingConfig
    policy: Policy
    collector: Collector
    learner: Learner
    custom_losses: tuple[Callable[..., Any], ...] = ()
    callbacks: tuple[Callback, ...] = ()


StepFunction = Callable[[TrainingState, TrainingComponents], Mapping[str, float]]


def create_training_components(
    config: TrainingConfig,
    policy: str | PolicySpec | Policy,
    env: Any = None,
    *,
    custom_losses: Sequence[Callable[..., Any]] = (),
    callbacks: Sequence[Callback] = (),
) -> TrainingComponents:
    """The parts of a run, made from its config. `policy` and `env` are whatever `PPOTrainer` takes; by default env is the config's."""
    source = config.env if env is None else env
    config, _ = resolve_choices(policy, source, config)
    vector_env = resolve_env(source, config)
    try:
        policy = resolve_policy(policy, config, vector_env)
        learner = make_learner(policy, config)
        length = config.ppo.sequence_length_for(config.ppo.rollout_steps, memory=True)
        collector = RolloutCollector(vector_env, acting_policy(policy), seed=config.run.seed, sequence_length=length)
        bind_pool(vector_env, collector.policy)
        watching = opponent_callbacks(vector_env, lambda: collector.policy, config, evaluation_source(source, config))
    except BaseException:
        vector_env.close()
        raise
    return TrainingComponents(config, policy, collector, learner, tuple(custom_losses), (*watching, *callbacks))


def functional_training_loop(
    config: TrainingConfig,
    policy: str | PolicySpec | Policy,
    env: Any = None,
    *,
    step_fn: StepFunction | None = None,
    custom_losses: Sequence[Callable[..., Any]] = (),
    callbacks: Sequence[Callback] = (),
) -> TrainingState:
    """A whole run from its parts, without the trainer around it; `step_fn` replaces or wraps `default_training_step`."""
    components = create_training_components(config, policy, env, custom_losses=custom_losses, callbacks=callbacks)
    state = TrainingState()
    try:
        with learning_threads(config.run.threads, config.run.backend):
            run_training_loop(state, components, step_fn or default_training_step)
    finally:
        components.collector.close()
    return state


def run_training_loop(state: TrainingState, components: TrainingComponents, step_fn: StepFunction, *, run: RunConfig | None = None) -> None:
    """Iterate until the run is done; `state` says how far it came, whatever stops it."""
    run = run or components.config.run
    for callback in components.callbacks:
        callback.on_train_start(state)
    while not is_done(state, run):
        began, steps_before = time.perf_counter(), state.env_steps
        state.metrics = dict(step_fn(state, components))
        state.iteration += 1
        state.metrics |= timing(time.perf_counter() - began, state.env_steps - steps_before)
        for callback in components.callbacks:
            answer = callback.on_iteration(state, state.metrics)
            if isinstance(answer, bool | np.bool_) and not answer:  # NumPy's comparisons give their own kind of False
                state.should_stop = True
        if state.keep_history:
            remember(state)
    for callback in components.callbacks:
        callback.on_train_end(state)


def default_training_step(state: TrainingState, components: TrainingComponents) -> dict[str, float]:
    """One iteration: collect, learn, hand the new weights to whoever acts."""
    began = time.perf_counter()
    rollout = components.collector.collect(components.config.ppo.rollout_steps)
    count_rollout(state, rollout)  # what was collected counts, whatever a callback makes of it
    for callback in components.callbacks:
        rollout = callback.on_rollout(state, rollout) or rollout
    collected = time.perf_counter()
    stats = components.learner.update(rollout, components.custom_losses)
    components.collector.set_weights(components.policy.get_weights())
    return {
        **stats,
        **episode_metrics(state, rollout),
        "timing/collect_seconds": collected - began,
        "timing/learn_seconds": time.perf_counter() - collected,
    }


def is_done(state: TrainingState, run: RunConfig) -> bool:
    """Whether a run has reached its target, or was told to stop."""
    return (
        state.should_stop
        or state.env_steps >= run.total_timesteps
        or (run.max_iterations is not None and state.iteration >= run.max_iterations)
        or (run.max_episodes is not None and state.episodes >= run.max_episodes)
    )


def count_rollout(state: TrainingState, rollout: Rollout) -> None:
    """Enter a rollout into the counters."""
    state.env_steps += rollout.num_valid
    state.episodes += len(rollout.episodes)
    state.recent.extend(rollout.episodes)


def episode_metrics(state: TrainingState, rollout: Rollout) -> dict[str, float]:
    """Counters, running means over the last episodes, and the numbers that the environment's own `info` gave."""
    metrics = {"episodes": float(state.episodes), "iteration_episodes": float(len(rollout.episodes))}
    if state.recent:
        metrics["mean_return"] = float(np.mean([episode.episode_return for episode in state.recent]))
        metrics["mean_length"] = float(np.mean([episode.length for episode in state.recent]))
    for name in sorted({name for episode in rollout.episodes for name in episode.info}):
        values = [episode.info[name] for episode in rollout.episodes if name in episode.info]
        metrics[f"episode/{name}"] = float(np.mean(values))
    return metrics


def timing(seconds: float, env_steps: int) -> dict[str, float]:
    """What the clock says of an iteration; kept apart from all that is deterministic."""
    return {"timing/seconds": seconds, "timing/steps_per_second": env_steps / max(seconds, 1e-9)}


def remember(state: TrainingState) -> None:
    """One more entry in every list of the history; a metric that an iteration lacks is NaN there."""
    row = {"timesteps": float(state.env_steps), "mean_reward": state.metrics.get("mean_return", math.nan), **state.metrics}
    length = len(state.history.get("timesteps", ()))
    for name in row.keys() | state.history.keys():
        state.history.setdefault(name, [math.nan] * length).append(row.get(name, math.nan))
