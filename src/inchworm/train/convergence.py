"""When a run has converged, and why it ends: the mean return of the latest episodes has been at the target for some checks in a row.

The record of the checks is part of `TrainingState`, so that a resumed run decides as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inchworm.config.sections import ConvergenceConfig, TrainingConfig
from inchworm.core.protocols import BaseCallback
from inchworm.rollout.rollout import Rollout
from inchworm.train.loop import TrainingState, reached_limits


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
