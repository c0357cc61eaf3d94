"""The metrics of a run in one table, which is also their documentation; and `StatsLogger`, which hands an iteration to the trackers.

In the files of a run and in the history a metric has the name of the table. Trackers that show groups get `group/name`.
"""

from __future__ import annotations

import functools
import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inchworm.core.protocols import Tracker


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric, or all of a kind: `<name>` in its name stands for a part that is not known here."""

    group: str
    name: str
    meaning: str
    unit: str = ""
    good: str = ""
    """Good values, and what others mean."""


GROUPS = ("loss", "update", "episode", "opponent", "evaluation", "convergence", "time", "system")
METRICS = (
    Metric("loss", "loss", "policy_loss + vf_coef · value_loss − ent_coef · entropy + custom losses", "",
           "finite; may be negative. Else see [troubleshooting](troubleshooting.md)"),
    Metric("loss", "policy_loss", "minus the clipped surrogate, mean over samples", "advantages",
           "near 0: normalised advantages have mean 0"),
    Metric("loss", "value_loss", "½ mean squared error of values", "value scale²",
           "falls, or stays where returns grow; a rise without better returns is bad"),
    Metric("loss", "entropy", "mean entropy of the action distributions; can be negative for Gaussians", "nats",
           "falls slowly; at its minimum early means that exploration has ended"),
    Metric("loss", "loss/<name>", "a custom loss"),
    Metric("update", "approx_kl", "the k3 estimate of KL(old, new), never negative", "nats",
           "0.001 to 0.03; above about 0.05 the steps are too large"),
    Metric("update", "clip_fraction", "share of samples whose ratio is outside 1 ± clip_coef", "0 to 1", "0.02 to 0.3"),
    Metric("update", "explained_variance", "1 − Var[returns − values] / Var[returns], before the update", "at most 1",
           "rises towards 1; at or below 0 the critic predicts no better than a constant"),
    Metric("update", "grad_norm", "global norm of the gradient before clipping, mean over steps", "",
           "steady; growth by orders of magnitude is bad"),
    Metric("update", "learning_rate",
           "step size of the optimiser, after the schedule; with the adaptive one, the rate after the last epoch", "",
           "follows the schedule; adaptive: away from its bounds"),
    Metric("update", "ratio_error",
           "largest |ratio − 1| in the first minibatch, before any step and in training mode: how far the policy that learns is from"
           " the one that collected", "", "below 0.001 with fresh data; above, a warning is emitted"),
    Metric("update", "effective_sample_size",
           "(Σw)² / (n Σw²) of the same ratios w: the share of the samples that the ratios leave effective", "0 to 1",
           "1 with fresh data; below about 0.5 the data are too old, and `ppo.min_effective_sample_size` can skip them"),
    Metric("update", "staleness",
           "updates between the weights that collected the rollout and the current ones; 1000 for weights that are not among the "
           "last 1000 of this policy, such as another run's", "updates", "0 with fresh data"),
    Metric("update", "n_updates", "updates since the start of the run, this one included", "updates", "grows by 1 per iteration"),
    Metric("update", "epochs", "epochs run", "epochs",
           "`ppo.update_epochs`; fewer after a stop by `ppo.target_kl`, 0 below `ppo.min_effective_sample_size`"),
    Metric("update", "skipped_steps", "minibatches without an effect: the loss or gradient was not finite, or no row was valid",
           "minibatches", "0"),
    Metric("update", "reward_scale", "with `ppo.scale_rewards`, the standard deviation of discounted returns that rewards were divided by",
           "reward", "settles"),
    Metric("update", "warm_up",
           "1 in the first iteration with a normaliser, which takes 5 % of a rollout's steps and only initialises the statistics; "
           "absent otherwise"),
    Metric("update", "grad_norm/<name>", "norm of the gradient of a custom loss", "",
           "small beside `grad_norm`, unless it is meant to dominate"),
    Metric("episode", "iteration", "iterations since the start of the run", "iterations"),
    Metric("episode", "env_steps", "valid steps that the collector has taken since the start of the run; `timesteps` in the history",
           "env steps"),
    Metric("episode", "episodes", "finished episodes since the start of the run", "episodes"),
    Metric("episode", "iteration_episodes", "finished episodes in this iteration", "episodes",
           "above 0; else episodes are longer than an iteration"),
    Metric("episode", "mean_return",
           "mean return of the last 100 finished episodes, per agent; absent (NaN in the history, where it is also `mean_reward`) "
           "before the first", "reward", "rises"),
    Metric("episode", "mean_length", "mean length of the same episodes", "env steps"),
    Metric("episode", "episode/<name>",
           "mean of a number in the last `info` of the iteration's episodes; with several agents also `episode/team_return`"),
    Metric("opponent", "win_rate/<player>",
           "win rate against a member of the pool, (wins + 1) / (games + 2), with older games weighted less", "0 to 1", "above 0.5"),
    Metric("opponent", "pool_size", "past versions of the policy in the pool", "policies", "up to `opponent.pool_size`"),
    Metric("opponent", "rating", "strength against the fixed players ([opponents](opponents.md)); only in iterations with a rating",
           "rating points", "rises"),
    Metric("opponent", "rating_sigma", "uncertainty of the rating", "rating points", "small beside the changes of `rating`"),
    Metric("opponent", "rating_failed", "1 if the games of a rating failed; training continues", "", "absent"),
    Metric("opponent", "opponent/skill", "skill of the heuristic, while it is being raised", "0 to 1", "rises to 1"),
    Metric("opponent", "opponent/win_rate", "win rate against it at that skill", "0 to 1"),
    Metric("evaluation", "evaluation/mean_return", "mean return of the episodes", "reward", "rises; compare it with a random policy's"),
    Metric("evaluation", "evaluation/std_return", "standard deviation of the returns", "reward"),
    Metric("evaluation", "evaluation/min_return", "lowest return", "reward"),
    Metric("evaluation", "evaluation/max_return", "highest return", "reward"),
    Metric("evaluation", "evaluation/median_return", "median return", "reward", "near the mean; else a few episodes decide it"),
    Metric("evaluation", "evaluation/interval95_low", "95 % interval of the mean return (Student's t)", "reward",
           "narrow beside the differences that matter; more `evaluation.episodes` narrow it"),
    Metric("evaluation", "evaluation/interval95_high", "its upper end", "reward"),
    Metric("evaluation", "evaluation/mean_episode_length", "mean length", "env steps"),
    Metric("evaluation", "evaluation/episodes", "number of episodes", "episodes"),
    Metric("evaluation", "evaluation/success_rate", "mean of `is_success` or `success` in the last `info`, if the environment reports it",
           "0 to 1", "rises"),
    Metric("evaluation", "evaluation/win_rate", "mean of `win` in the last `info`, if the environment reports it; a draw is 0.5", "0 to 1",
           "above 0.5"),
    Metric("evaluation", "evaluation/win_interval95_low", "95 % interval of the win rate (Wilson's)", "0 to 1", "above 0.5 as a whole"),
    Metric("evaluation", "evaluation/win_interval95_high", "its upper end", "0 to 1"),
    Metric("evaluation", "evaluation/mean_hp_margin", "mean of `hp_margin` in the last `info`, if the environment reports it", "0 to 1",
           "above 0"),
    Metric("evaluation", "evaluation/info/<name>", "mean of a number in the last `info`"),
    Metric("evaluation", "evaluation/capped_episodes",
           "episodes that did not end and were cut off at `evaluation.max_episode_steps`; absent if there were none", "episodes", "absent"),
    Metric("evaluation", "evaluation/difference",
           "mean difference to the return of `evaluation.baseline` on the same seeds, if there is one", "reward", "above 0"),
    Metric("evaluation", "evaluation/difference_interval95_low", "its 95 % interval (Student's t over pairs of episodes)", "reward",
           "above 0 as a whole"),
    Metric("evaluation", "evaluation/difference_interval95_high", "its upper end", "reward"),
    Metric("evaluation", "evaluation/failed", "1 if the evaluation failed; training continues, and the exit code at the end is 3", "",
           "absent"),
    Metric("convergence", "convergence/mean_return", "mean return of the last `convergence.window` episodes, of evaluations or of training",
           "reward", "rises to the target"),
    Metric("convergence", "convergence/best_mean_return", "the highest of these so far", "reward"),
    Metric("convergence", "convergence/checks",
           "checks in a row at the target; after `convergence.patience` of them the run has converged", "checks"),
    Metric("convergence", "convergence/converged", "whether it has, in this check or before", "0 or 1"),
    Metric("time", "timing/seconds", "duration of the iteration without its callbacks", "s", "steady"),
    Metric("time", "timing/collect_seconds", "part of it spent on collecting", "s"),
    Metric("time", "timing/learn_seconds", "part of it spent on learning", "s"),
    Metric("time", "timing/steps_per_second", "env steps of the iteration per second", "1/s",
           "steady; [performance](performance.md) has figures"),
    Metric("system", "system/memory_mb", "memory of the training process, without its env workers", "MB",
           "steady; growth without end is a leak"),
    Metric("system", "system/cpu_share", "processor time of the training process since the row before, per second: 1 is one core", "cores",
           "about run.threads; less means that it waits for env workers"),
)  # fmt: skip

_TABLE = {metric.name: metric for metric in METRICS}
_KINDS = {metric.name.partition("<")[0]: metric for metric in METRICS if "<" in metric.name}
TIMING_GROUPS = tuple(f"{prefix}/" for prefix in ("timing", "system"))
"""How the names of metrics begin that depend on the clock and the machine; they have a file of their own."""


@functools.cache
def grouped_name(name: str) -> str:
    """The name of a metric in trackers that show groups: `loss/policy_loss`, `time/seconds`, `update/red/approx_kl` of the policy red.

    A metric that is not in the table belongs to the group `other`, unless its name has a group of its own.
    """
    if name in _TABLE:
        return f"{_TABLE[name].group}/{name.removeprefix('timing/').removeprefix(_TABLE[name].group + '/')}"
    kind = next((metric for prefix, metric in _KINDS.items() if name.startswith(prefix)), None)
    if kind is not None:
        return f"{kind.group}/{name.removeprefix(kind.group + '/')}"
    part, slash, rest = name.partition("/")
    inner = grouped_name(rest) if slash else ""
    if inner and not inner.startswith("other/") and inner != rest:
        group, _, last = inner.partition("/")
        return f"{group}/{part}/{last}"
    return name if slash else f"other/{name}"


class StatsLogger:
    """Turns an iteration into named metrics and passes them to each tracker in turn. Exceptions propagate."""

    def __init__(self, trackers: Sequence[Tracker] = ()) -> None:
        """Trackers are called in this order."""
        self.trackers = tuple(trackers)
        self._clock = self._clocks()

    def process(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics of an iteration with those of the group system."""
        before, self._clock = self._clock, self._clocks()
        seconds, busy = (now - then for now, then in zip(self._clock, before))
        return {**metrics, "system/memory_mb": _memory_mb(), "system/cpu_share": busy / max(seconds, 1e-9)}

    def groups(self, metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
        """The same by group, in the order of the table: {"loss": {"policy_loss": 0.1, …}, "update": {…}, …}."""
        found: dict[str, dict[str, float]] = {}
        for name, value in metrics.items():
            group, _, rest = grouped_name(name).partition("/")
            found.setdefault(group, {})[rest] = value
        return {name: found[name] for name in sorted(found, key=lambda name: (*GROUPS, name).index(name))}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log one row at `step` env steps to all."""
        for tracker in self.trackers:
            tracker.log(metrics, step)

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Log the run's config to all."""
        for tracker in self.trackers:
            tracker.log_params(params)

    def log_artifact(self, path: Path) -> None:
        """Log a file of the run to all."""
        for tracker in self.trackers:
            tracker.log_artifact(path)

    def close(self) -> None:
        """Close all, even if one fails; its exception is raised afterwards."""
        with ExitStack() as stack:
            for tracker in reversed(self.trackers):
                stack.callback(tracker.close)

    @staticmethod
    def _clocks() -> tuple[float, float]:
        return time.monotonic(), time.process_time()


def _memory_mb() -> float:
    """Resident memory of this process now; where the system does not say, its peak."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)
