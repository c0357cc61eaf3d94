"""The training loop: collect (steps 3 to 5), learn (steps 6 to 9), call the callbacks, until the run is done.

The loop knows its parts only by their protocols. `train/trainer.py` puts them together.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from inchworm.config.sections import ConvergenceConfig, RunConfig, TrainingConfig
from inchworm.core.errors import ConfigError
from inchworm.core.protocols import BaseCallback, Callback, Collector, Learner, Policy
from inchworm.core.types import RECENT_EPISODES, EpisodeRecord, Iteration
from inchworm.rollout.rollout import Rollout, rollout_metrics


class History(dict[str, list[float]]):
    """What `train` returns: a list per metric with one entry per iteration of the call, its evaluations, and why it ended."""

    def __init__(self) -> None:
        super().__init__({name: [] for name in ("timesteps", "mean_reward", "loss", "policy_loss", "value_loss", "entropy")})
        self.evaluations: list[dict[str, Any]] = []
        """The evaluations of the call in order, the final one last, each as `EvalStats.to_dict()` with `iteration` and `env_steps`."""
        self.stop_reason: str | None = None
        """The limit that was reached ("total_timesteps", "max_iterations", "max_episodes"), "converged", "callback" or "interrupted"."""
        self.convergence: dict[str, Any] | None = None
        """Whether, when and why the run has converged (see `convergence_report`); None without a `convergence.target`."""

    def __repr__(self) -> str:
        """One line; `dict(history)` shows the lists."""
        counts = {"iteration": len(self.get("timesteps", ())), "evaluation": len(self.evaluations)}
        parts = [f"{count:,} {name}{'' if count == 1 else 's'}" for name, count in counts.items()]
        parts += [f"the last with mean return {row['mean_return']:.5g}" for row in self.evaluations[-1:] if "mean_return" in row]
        return f"History({', '.join(parts)}, stop_reason={self.stop_reason!r})"


@dataclass
class TrainingState:
    """Progress of a run, as callbacks see it. What cannot be read from the run's other parts is saved in checkpoints."""

    iteration: int = 0
    env_steps: int = 0
    episodes: int = 0
    recent: deque[EpisodeRecord] = field(default_factory=lambda: deque(maxlen=RECENT_EPISODES))
    should_stop: bool = False
    interrupted: bool = False
    phase: str = ""
    """"collecting" or "learning" within an iteration, else empty; a step function of your own may set it, too."""
    evaluating: bool = False
    """Whether an evaluation is running, which may be left at any time: it changes nothing of the training."""
    settled: bool = True
    """Whether the policy, the collector and the learner are as this iteration left them; not so while callbacks see an iteration in the
    middle of several that were computed in one call."""
    stages: Mapping[str, tuple[np.ndarray, ...]] = field(default_factory=dict)
    """`Iteration.stages` of the last iteration, if a compiled loop did it."""
    ended: bool = False
    """Whether everything that follows the last iteration is done, too."""
    best_score: float | None = None
    """The best evaluation score so far."""
    best_iteration: int | None = None
    """The iteration after which it was reached."""
    scored: int | None = None
    """The iteration after which the final evaluation was taken."""
    convergence: dict[str, Any] = field(default_factory=dict)
    """The checks so far, as plain data: see `train/callbacks`; empty without a target."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the current iteration; callbacks may add to them."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Errors outside of the training itself, such as a crashed evaluation."""
    history: History = field(default_factory=History)
    keep_history: bool = True
    """Whether `history` is filled; long runs that do not read it can save the memory."""

    @property
    def stopped(self) -> bool:
        """Whether a callback has stopped the run, and what follows its last iteration is still to be done."""
        return self.should_stop and not self.interrupted and not self.ended

    def state_dict(self) -> dict[str, Any]:
        """What cannot be read from the collector, as plain data."""
        state: dict[str, Any] = {"iteration": self.iteration, "best_score": self.best_score, "stopped": self.stopped}
        return {**state, "convergence": dict(self.convergence)} if self.convergence else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.iteration, self.best_score = int(state["iteration"]), state["best_score"]
        self.convergence = dict(state.get("convergence", {}))
        self.best_iteration = self.scored = None  # the checkpoint's manifest knows whether it was this iteration
        self.should_stop, self.interrupted, self.ended = bool(state.get("stopped", False)), False, False

    def follow(self, collector: Collector) -> None:
        """Take over the collector's counters: what it has taken in the loop and outside, without rows from elsewhere."""
        self.env_steps, self.episodes, self.recent = collector.env_steps, collector.episodes, collector.recent.copy()


class FunctionCallback(BaseCallback):
    """A plain function as an `on_iteration` callback: `function(state, metrics)`, False stops the run."""

    def __init__(self, function: Callable[[TrainingState, Mapping[str, float]], bool | None]) -> None:
        self.function = function

    def on_iteration(self, state: TrainingState, metrics: Mapping[str, float]) -> bool | None:
        """Call the function."""
        return self.function(state, metrics)


_CALLS = {
    "on_train_start": ("state",),
    "on_rollout": ("state", "rollout"),
    "on_iteration": ("state", "metrics"),
    "on_train_end": ("state",),
}
"""The methods of a callback, and their arguments."""


def as_callback(callback: Callback | Callable[..., Any]) -> Callback:
    """Wrap a plain function as a callback; return a callback unchanged. Anything else is refused before training begins."""
    given: Any = callback
    name = getattr(given, "__name__", type(given).__name__)
    if isinstance(given, type):
        raise ConfigError(f"the callback {name} is a class; give an instance of it: {name}()")
    if getattr(given, "not_a_method_of_a_callback", None) is not None:
        raise ConfigError(f"the callback {name} has every attribute that it is asked for, as a mock; give a function or a BaseCallback")
    has = [method for method in _CALLS if callable(getattr(given, method, None))]
    if not has and not callable(given):
        raise ConfigError(f"a callback must be a function of (state, metrics) or a BaseCallback; got {type(given).__name__}")
    if has and len(has) < len(_CALLS):
        missing = ", ".join(method for method in _CALLS if method not in has)
        raise ConfigError(f"the callback {name} has no {missing}; derive it from inchworm.train.callbacks.BaseCallback, which has all")
    calls = {f"{name}.{method}": (getattr(given, method), _CALLS[method]) for method in has} or {name: (given, _CALLS["on_iteration"])}
    for call, (function, arguments) in calls.items():
        with contextlib.suppress(ValueError):  # some built-in functions do not say what they take
            signature = inspect.signature(function)
            try:
                signature.bind(*arguments)
            except TypeError:
                raise ConfigError(f"the callback {call} is called with ({', '.join(arguments)}), but takes {signature}") from None
    return given if has else FunctionCallback(given)


def stateful_parts(callbacks: Sequence[Callback]) -> list[object]:
    """The objects that may hold state: a callback itself, or the function inside a `FunctionCallback`."""
    return [callback.function if isinstance(callback, FunctionCallback) else callback for callback in callbacks]


def reads_rollouts(callback: Callback) -> bool:
    """Whether a callback does something in `on_rollout`: it has its own, and does not tell otherwise by an attribute of this name."""
    own = getattr(type(callback), "on_rollout", None) is not BaseCallback.on_rollout
    return own and bool(getattr(callback, "reads_rollouts", True))


@dataclass(frozen=True)
class TrainingComponents:
    """The parts that an iteration uses; `dataclasses.replace` exchanges one."""

    config: TrainingConfig
    policy: Policy
    collector: Collector
    learner: Learner
    custom_losses: tuple[Callable[..., Any], ...] = ()
    callbacks: tuple[Callback, ...] = ()


StepFunction = Callable[[TrainingState, TrainingComponents], Mapping[str, float]]


class FusedStep(Protocol):
    """Iterations in which collect and learn are one program, so that many can be computed in one call.

    The call leaves the policy, the collector and the learner as the last of them does. How many there are changes no result.
    """

    def __call__(self, components: TrainingComponents, most: int) -> Sequence[Iteration]:
        """Compute at least one and at most `most` iterations. Where there is a static `together`, it does so for several seeds at once."""


MOST_AHEAD = 1_000_000
"""Iterations that are asked of a fused step if nothing has to see the run's parts between them."""


def iterations_ahead(state: TrainingState, components: TrainingComponents) -> int:
    """How many iterations may be computed before a limit is reached or a callback has to see the run's parts, at least 1.

    A callback tells by `sees_every` after how many iterations it has to, 0 for never; one without it may look at anything, and stop.
    """
    run = components.config.run
    if run.max_episodes is not None:
        return 1
    most = MOST_AHEAD if run.max_iterations is None else run.max_iterations - state.iteration
    intervals = [getattr(callback, "sees_every", 1) for callback in components.callbacks]
    return max(1, min([most, *(interval - state.iteration % interval for interval in intervals if interval)]))


def run_training_loop(state: TrainingState, components: TrainingComponents, step_fn: StepFunction, fused: FusedStep | None = None) -> None:
    """Iterate until the run is done, by `fused` where it is given. `state` is up to date whatever ends the loop."""
    for callback in components.callbacks:
        callback.on_train_start(state)
    ended = time.perf_counter()
    while not is_done(state, components.config.run):
        began, steps_before = time.perf_counter(), state.env_steps
        between = began - ended
        warming_up = getattr(components.learner, "warming_up", False)  # a short rollout, once
        if fused is None or warming_up:
            answer = step_fn(state, components)
            if not isinstance(answer, Mapping):
                raise ConfigError(f"step_fn returned {type(answer).__name__}; it must return metrics, a mapping of names to numbers")
            metrics, state.phase, state.stages = dict(answer), "", {}
            ended = time.perf_counter()
            finish_iteration(state, components, metrics, ended - began, between, state.env_steps - steps_before)
            continue
        state.phase = "training"
        iterations = fused(components, iterations_ahead(state, components))
        state.phase = ""
        ended = time.perf_counter()
        seconds = (ended - began) / len(iterations)
        for place, one in enumerate(iterations, 1):
            steps, finished = one.env_steps - state.env_steps, one.episodes - state.episodes
            state.env_steps, state.episodes, state.settled = one.env_steps, one.episodes, place == len(iterations)
            state.stages = one.stages
            state.recent.extend(one.records)
            metrics = {**one.metrics, **episode_metrics(state), "iteration_episodes": float(finished)}
            finish_iteration(state, components, metrics, seconds, between / len(iterations), steps)
    for callback in components.callbacks:
        callback.on_train_end(state)


def finish_iteration(
    state: TrainingState, components: TrainingComponents, metrics: dict[str, float], seconds: float, between: float, steps: int
) -> None:
    """Count an iteration of `steps` env steps, show it to the callbacks, and add it to the history; `between` is the time before it."""
    state.iteration += 1
    timing = {"seconds": seconds, "between_seconds": between, "steps_per_second": steps / max(seconds, 1e-9)}
    state.metrics = metrics | {f"timing/{name}": value for name, value in timing.items()}
    for callback in components.callbacks:
        answer = callback.on_iteration(state, state.metrics)
        if isinstance(answer, bool | np.bool_) and not answer:  # NumPy's comparisons return their own False
            state.should_stop = True
    if state.keep_history:
        row = {"timesteps": float(state.env_steps), "mean_reward": state.metrics.get("mean_return", math.nan), **state.metrics}
        length = len(state.history.get("timesteps", ()))
        for name in {**state.history, **row}:  # NaN for a metric that this iteration lacks
            state.history.setdefault(name, [math.nan] * length).append(row.get(name, math.nan))


def default_training_step(state: TrainingState, components: TrainingComponents) -> dict[str, float]:
    """One iteration: collect a rollout, learn from it, give the new weights to the collector.

    Where normalisers have no data yet, the first iteration is a short one that only initialises them.
    """
    began, steps_before, episodes_before = time.perf_counter(), state.env_steps, state.episodes
    ppo, warming_up = components.config.ppo, getattr(components.learner, "warming_up", False)  # a learner from elsewhere may lack it
    state.phase = "collecting"
    env_seconds = getattr(components.collector, "env_seconds", 0.0)  # a collector from elsewhere may lack it
    rollout = components.collector.collect(ppo.warm_up_steps if warming_up else ppo.rollout_steps)
    state.follow(components.collector)
    for callback in components.callbacks:
        changed = callback.on_rollout(state, rollout)
        if changed is not None and not isinstance(changed, (Rollout, Mapping)):
            raise ConfigError(f"on_rollout of the callback {type(callback).__name__} must return a rollout or None, not {changed!r:.80}")
        rollout = rollout if changed is None else changed
    env_seconds = getattr(components.collector, "env_seconds", 0.0) - env_seconds
    collected = time.perf_counter()
    state.phase = "learning"
    components.learner.env_steps = steps_before  # not the number of rows learned from: a rollout may hold some from elsewhere
    stats = components.learner.update(rollout, components.custom_losses)
    give_weights(components.policy, components.collector)
    return {
        **stats,
        **(gathered if (gathered := getattr(components.collector, "rollout_metrics", None)) is not None else rollout_metrics(rollout)),
        **episode_metrics(state, getattr(components.collector, "finished", rollout.episodes)),
        "iteration_episodes": float(state.episodes - episodes_before),
        "timing/collect_seconds": collected - began,
        **({"timing/env_seconds": env_seconds} if env_seconds else {}),
        "timing/learn_seconds": time.perf_counter() - collected,
    }


def give_weights(policy: Policy, collector: Collector) -> None:
    """Let a collector act with the policy's weights, unless it reads them itself."""
    if getattr(collector, "follows", None) is not policy:
        collector.set_weights(policy.get_weights())


def is_done(state: TrainingState, run: RunConfig) -> bool:
    """Whether a run has reached its target or was stopped."""
    return state.should_stop or bool(reached_limits(state, run))


def reached_limits(state: TrainingState, run: RunConfig) -> dict[str, int]:
    """The limits that a run has reached, by their names in `RunConfig`, with what it has done."""
    done = {"total_timesteps": state.env_steps, "max_iterations": state.iteration, "max_episodes": state.episodes}
    limits = {name: getattr(run, name) for name in done}
    return {name: count for name, count in done.items() if limits[name] is not None and count >= limits[name]}


def episode_metrics(state: TrainingState, episodes: Sequence[EpisodeRecord] = ()) -> dict[str, float]:
    """Counters, means over recent episodes, and means of the numbers in the environment's own `info`."""
    metrics = {"episodes": float(state.episodes)}
    if state.recent:
        metrics["mean_return"] = float(np.mean([episode.episode_return for episode in state.recent]))
        metrics["mean_length"] = float(np.mean([episode.length for episode in state.recent]))
        metrics["length_std"] = float(np.std([episode.length for episode in state.recent]))
    for name in sorted({name for episode in episodes for name in episode.info}):
        values = [episode.info[name] for episode in episodes if name in episode.info]
        metrics[f"episode/{name}"] = float(np.mean(values))
    return metrics


# When a run has converged, and why it ends: the mean return of the latest episodes has been at the target for some checks in a row. The
# record of the checks is part of `TrainingState`, so that a resumed run decides as an uninterrupted one.


class ConvergenceCallback(BaseCallback):
    """Notes when a run has converged, stops it unless `stop` is false, and reports how near it is.

    A check compares the mean return of the latest `window` episodes with the target: after every evaluation, or with
    `returns="training"` after every iteration in which an episode ended. A check below the target starts the count again.
    """

    def __init__(self, config: ConvergenceConfig) -> None:
        assert config.target is not None
        self._config, self._target = config, config.target
        self.reads_rollouts = config.returns == "training"
        self.sees_every = int(self.reads_rollouts)

    def on_train_start(self, state: TrainingState) -> None:
        """Begin the record, unless one with the same settings was restored."""
        if state.convergence.get("settings") != settings_of(self._config):
            state.convergence = {"settings": settings_of(self._config), "returns": [], "best": None, "checks": 0}

    def on_rollout(self, state: TrainingState, rollout: Rollout) -> None:
        """Add the episodes of training, if those are compared."""
        if self.reads_rollouts:
            self._add(state, [episode.episode_return for episode in rollout.episodes])

    def on_iteration(self, state: TrainingState, metrics: Mapping[str, float]) -> bool | None:
        """Check, if there is something new; False stops the run."""
        del metrics
        record, config = state.convergence, self._config
        if config.returns == "evaluation" and state.evaluations and state.evaluations[-1]["iteration"] == state.iteration:
            self._add(state, state.evaluations[-1].get("returns", ()))  # a failed one has none
        if not record.pop("new", False) or len(record["returns"]) < config.window:
            return None
        mean = sum(record["returns"]) / config.window
        record["best"] = mean if record["best"] is None else max(mean, record["best"])
        record["checks"] = record["checks"] + 1 if mean >= self._target else 0
        if record["checks"] >= config.patience:  # the first time counts: with `stop` false there may be others
            record.setdefault("converged", {"iteration": state.iteration, "env_steps": state.env_steps, "mean_return": mean})
        shown = {"mean_return": mean, "best_mean_return": record["best"], "checks": record["checks"], "converged": "converged" in record}
        state.metrics |= {f"convergence/{name}": float(value) for name, value in shown.items()}
        return False if config.stop and "converged" in record else None

    def _add(self, state: TrainingState, returns: Any) -> None:
        record = state.convergence
        if len(returns):
            record["returns"] = [*record["returns"], *map(float, returns)][-self._config.window :]
            record["new"] = True


def settings_of(config: ConvergenceConfig) -> dict[str, Any]:
    """The settings that a record of checks belongs to: all but what follows from it."""
    return {name: value for name, value in config.to_dict().items() if name != "stop"}


def has_converged(state: TrainingState, config: ConvergenceConfig) -> bool:
    """Whether the run has converged with these settings."""
    return "converged" in state.convergence and state.convergence["settings"] == settings_of(config)


def has_stopped(state: TrainingState, config: ConvergenceConfig) -> bool:
    """Whether the run has converged and ends for that reason; with other settings it may continue."""
    return config.stop and has_converged(state, config)


def stop_reason(state: TrainingState, config: TrainingConfig) -> str:
    """Why a run that is done has ended, in one word: see `History.stop_reason`."""
    if state.interrupted:
        return "interrupted"
    if state.should_stop:
        return "converged" if has_stopped(state, config.convergence) else "callback"
    return next(iter(reached_limits(state, config.run)))


def describe_end(state: TrainingState, config: TrainingConfig) -> str:
    """Say which limit a run has reached, or that it has converged, and what to pass to continue; empty if neither."""
    limits = reached_limits(state, config.run)
    if "total_timesteps" in limits:
        taken, target = limits["total_timesteps"], config.run.total_timesteps
        return (
            f"{taken:,} env steps have been taken, and total_timesteps={target} counts from the start of the run; "
            f"to continue, pass a larger number, such as train(total_timesteps={2 * taken})"
        )
    if limits:
        reached = " and ".join(f"run.{name}={getattr(config.run, name)}" for name in limits)
        return f"the run has reached {reached}; to continue, create the trainer with a larger number or None"
    if has_stopped(state, config.convergence):
        return (
            f"{describe_convergence(state, config.convergence)}; to continue, create the trainer with another convergence.target or None, "
            "or with convergence.stop=False"
        )
    return ""


def convergence_report(state: TrainingState, config: ConvergenceConfig) -> dict[str, Any] | None:
    """Whether, when and why a run has converged, as plain data; None if it has no target.

    `converged`, the settings, `best_mean_return` and `checks` of the last check, `text`, and, if it has converged, the `iteration`,
    `env_steps` and `mean_return` when it did.
    """
    if config.target is None:
        return None
    record = state.convergence
    found = dict(record["converged"]) if has_converged(state, config) else {}
    checked = {"best_mean_return": record.get("best"), "checks": record.get("checks", 0)}
    return {"converged": bool(found), **settings_of(config), **checked, **found, "text": describe_convergence(state, config)}


def describe_convergence(state: TrainingState, config: ConvergenceConfig) -> str:
    """Say whether, when and why a run converged; empty if it has no target, or one that was never compared and ends nothing."""
    best = state.convergence.get("best")
    if config.target is None or (best is None and not config.stop):
        return ""
    episodes = f"the last {config.window} {config.returns} episodes"
    if not has_converged(state, config):
        reached = "" if best is None else f"; the best mean return of {episodes} was {best:.5g}"
        return f"not converged: the target is {config.target:g}{reached}"
    found = state.convergence["converged"]
    times = f" in {config.patience} checks in a row" if config.patience > 1 else ""
    return (
        f"converged after {found['env_steps']:,} steps ({found['iteration']:,} iterations): the mean return of {episodes}, "
        f"{found['mean_return']:.5g}, was at least {config.target:g}{times}"
    )
