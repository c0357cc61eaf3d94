"""Step 9 of 9, shared by all backends: the order of an update, its checks, schedules, counters and the shuffle stream.

`BaseLearner.update` is the story of an update. `MinibatchLearner` takes its steps epoch by epoch; a backend adds the critic pass, cutting
a rollout into sequences, shuffling them into minibatches, and the optimiser steps on those. One that compiles all of
it has its own `learn`.
"""

from __future__ import annotations

import copy
import math
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import optree

from inchworm.backends.corrections import (
    OldData,
    ProximalWeights,
    RewardScaler,
    decoupled,
    describe_distance,
    importance_metrics,
    log_ratios_of,
)
from inchworm.backends.custom_losses import CustomLoss, bind_custom_losses
from inchworm.config.sections import PPOConfig
from inchworm.core.errors import BadNumberError, ConfigError, InchwormError, RolloutError
from inchworm.core.protocols import Policy, Stateful, reads_context, reads_global_state
from inchworm.core.seeding import make_stream, restore_stream, stream_state
from inchworm.core.tensor_file import flatten_tree, write_tensor_file
from inchworm.core.types import Advantages, LossCoefficients, Minibatch, ProfilePoint, Tree, UpdateStats, Weights
from inchworm.policy.file import VALUE_HEAD, fingerprint, match_names
from inchworm.policy.spec import NO_GLOBAL_STATE, PolicySpec
from inchworm.policy.statistics import GLOBAL_STATE, OBSERVATIONS, VALUES, PolicyStatistics
from inchworm.rollout.fields import check_space
from inchworm.rollout.rollout import Rollout

StepMetrics = Mapping[str, np.ndarray]
"""The metrics of an epoch's minibatch steps, one column [n] each, and the flags `bad` and `empty`."""

BETA_MEAN, BETA_SQUARE = 0.9, 0.999
"""Decay of Adam's running means of the gradient and of its square."""
RMS_DECAY = 0.99
"""Decay of RMSprop's running mean of the gradient's square."""
MAX_BAD_STEPS = 3
"""Bad minibatches in a row after which the run stops."""
RATIO_TOLERANCE = 1e-3
ADAPTIVE_STEP, ADAPTIVE_MARGIN = 1.5, 2.0
"""Factor by which an adaptive learning rate changes, and how far from `desired_kl` the KL may be, up or down, before it does."""
ORDER_SAMPLE = 64
"""Entries of an epoch's order that are reported as one stage."""
HISTORY = 1000
"""Number of most recent weights, by their fingerprints, that a learner recognises in a rollout."""
ALL_FROZEN = "ppo.freeze matches every weight that could be trained; leave some out"
_OF_STEPS = ("loss", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")
TARGETS = ("explained_variance", "return_mean", "return_std", "advantage_std")
EMPTY = dict.fromkeys((*_OF_STEPS, "ratio_error", "epochs", "skipped_steps", *TARGETS, "staleness"), 0.0) | {"effective_sample_size": 1.0}
"""The metrics of an update that takes no step."""


class Ranks:
    """The processes that learn together, each from the rollouts of its own lanes: here one, so every sum is its own.

    `backends/torch/distributed` has the one of several. Every method is collective: all ranks call it in the same order.
    """

    rank, count = 0, 1

    def begin_update(self, learner: BaseLearner) -> None:
        """Give the learner of every rank the counters and the learning rate of rank 0."""

    def total(self, count: int) -> int:
        """The sum of a count over all ranks."""
        return count

    def all_rows(self, rows: np.ndarray) -> np.ndarray:
        """The rows [n, …] of all ranks, in order of rank."""
        return rows

    def own_lanes(self, values: np.ndarray) -> np.ndarray:
        """The part of values [B, …] of all lanes that is this rank's."""
        return values

    def merge(self, mean: Any, var: Any, count: int) -> tuple[Any, Any, int]:
        """Mean, population variance and number of the samples of all ranks, from those of this rank's."""
        return mean, var, count

    def synchronise(self, policy: Policy) -> None:
        """Give every rank the weights of rank 0, where they differ."""


class BaseLearner(ABC):
    """Learns a policy from rollouts, wherever they were collected; never touches an environment or its input.

    `spec` and `statistics` are those of a built-in policy, and None for a policy of the user's. `total_timesteps` is what schedules run
    towards; it is only needed when one is not constant.
    """

    policy: Policy
    takes_tensors = False
    """Whether it learns from a rollout of torch tensors as it is."""
    spec: PolicySpec | None = None
    statistics: PolicyStatistics | None = None

    def __init__(
        self, config: PPOConfig | None, *, seed: int = 0, total_timesteps: int | None = None, dump_directory: str | Path | None = None
    ) -> None:
        self.config = config if config is not None else PPOConfig()
        self.total_timesteps = total_timesteps
        self.initial_rate = self.config.learning_rate
        """The learning rate that schedules start from."""
        self.learning_rate_scale = 1.0
        """Multiplies the schedule's learning rate from the next update on, to control it from outside; the adaptive schedule moves it."""
        self.env_steps = 0
        self.updates = 0
        self.epoch = 0
        """The epoch of the running or last update, from 1. Another thread may ask."""
        self.on_stage: Callable[..., object] | None = None
        """Called within an update with the name of a stage and its arrays: "order" for each epoch, and once "advantages"."""
        self.reward_scaler = RewardScaler(self.config.gamma) if self.config.scale_rewards else None
        self._running = np.zeros(0)  # [B] of the reward scaler, of the lanes of all ranks
        self.ranks = Ranks()
        """The processes that learn together; see `join`."""
        decay = self.config.proximal_decay
        self._proximal = None if decay is None else ProximalWeights(decay)
        self._guard = BadNumberGuard(dump_directory)
        self._history: deque[int] = deque(maxlen=HISTORY)  # fingerprints of the weights before each update, oldest first
        self._warned: set[str] = set()
        self._stream = make_stream(seed, "shuffle")
        self._losses: dict[str, object] = {}  # the custom losses that were attached, by name
        self._loss_states: dict[str, Any] = {}  # of a loaded checkpoint, until their losses are attached

    @cached_property
    def frozen(self) -> frozenset[str]:
        """The names of the weights that do not change: those that `ppo.freeze` matches.

        A normaliser is frozen as a whole, and that of values with the value head, which it would rescale.
        """
        if not self.config.freeze:
            return frozenset()
        names = list(self.policy.get_weights())
        matched = set(match_names(self.config.freeze, names, "ppo.freeze"))
        touched = {name.partition(".")[0] for name in matched} | ({VALUES} if matched & set(VALUE_HEAD) else set())
        return frozenset(matched | {name for name in names if name.partition(".")[0] in touched & {OBSERVATIONS, VALUES, GLOBAL_STATE}})

    def join(self, ranks: Ranks) -> None:
        """Learn together with other processes: every sum over valid rows, and every statistic, is over the rows of all of them."""
        self.ranks = ranks
        ranks.synchronise(self.policy)
        for statistics in () if self.statistics is None else self.statistics.parts.values():
            statistics.merge_ranks = ranks.merge
        if self.reward_scaler is not None:
            self.reward_scaler.statistics.merge_ranks = ranks.merge

    def update(self, rollout: Rollout | Mapping[str, Any], custom_loss_fns: Sequence[Callable[..., Any]] = ()) -> UpdateStats:
        """Take several epochs of minibatch steps on one rollout; its arrays are only read."""
        self.ranks.begin_update(self)
        rollout = rollout if isinstance(rollout, Rollout) else Rollout.from_dict(rollout)
        rollout = rollout if self.takes_tensors else rollout.to_numpy()
        progress = None if self.total_timesteps is None else self.progress
        losses = tuple(loss.at(progress) for loss in self.attach_losses(custom_loss_fns))
        staleness = self._check(rollout)
        num_valid = self.ranks.total(rollout.num_valid)
        if num_valid == 0:
            counters = {"learning_rate": self.learning_rate, "n_updates": float(self.updates)}
            return UpdateStats({**EMPTY, **{f"loss/{loss.name}": 0.0 for loss in losses}, **counters})
        kept = self._frozen_weights()
        own = bool((rollout.weights_fingerprint == np.uint64(self._history[-1])).all())
        on_policy = self.ranks.total(int(not own)) == 0
        old = self._look_back(rollout, on_policy=on_policy)
        if old is not None and (reason := describe_distance(old.metrics, self.config)):
            warnings.warn(f"no steps were taken on this rollout: {reason}. Collect a newer one or change the setting", stacklevel=3)
            counters = {"learning_rate": self.learning_rate, "n_updates": float(self.updates), "staleness": min(staleness, float(HISTORY))}
            return UpdateStats({**EMPTY, **{f"loss/{loss.name}": 0.0 for loss in losses}, **old.metrics, **counters})
        metrics, advantages = self.learn(
            rollout if self.reward_scaler is None else self.reward_scaler(rollout), losses, on_policy=on_policy, old=old
        )
        metrics |= {} if old is None else old.metrics
        returns, values = self.to_host(advantages.returns), self.to_host(advantages.values)
        if self.on_stage is not None:
            all_valid = rollout.valid.all()
            self.on_stage("advantages", *(array if all_valid else np.where(rollout.valid, array, 0) for array in (returns, values)))
        valid = self.to_host(rollout.valid) if rollout.on_device else rollout.valid
        metrics |= target_metrics(returns, values, valid, self.ranks)
        metrics["learning_rate"] = self.learning_rate
        metrics["staleness"] = min(staleness, float(HISTORY))  # metrics are finite
        metrics |= {f"loss_weight/{loss.name}": loss.weight for loss in losses if loss.schedule != 1.0}
        if self.reward_scaler is not None:
            self._running = self.ranks.all_rows(self.reward_scaler.running)
            metrics["reward_scale"] = self.reward_scaler.scale
        if f"{VALUES}.mean" in kept:  # then the value head, whether frozen or just trained, is not rescaled
            kept |= {name: weight for name, weight in self.policy.get_weights().items() if name in VALUE_HEAD}
        self.policy.update_statistics(rollout, advantages.returns)
        if kept:
            self.policy.set_weights(self.policy.get_weights() | kept)
        self.ranks.synchronise(self.policy)
        self._guard.check_weights(self.policy.get_weights())
        if self._proximal is not None:
            self._proximal.add(self.policy.get_weights())
        self.policy.policy_version += 1
        self.updates += 1
        self.env_steps += num_valid
        metrics["n_updates"] = float(self.updates)
        return UpdateStats(metrics)

    def attach_losses(self, functions: Sequence[Callable[..., Any]]) -> tuple[CustomLoss, ...]:
        """Bind custom losses, and restore the state that a loaded checkpoint holds of them; `update` does so, too."""
        losses = bind_custom_losses(functions)
        for loss in losses:
            if self._losses.get(loss.name) is not loss.owner:
                self.adopt_loss(loss)
                self._losses[loss.name] = loss.owner
                if loss.name in self._loss_states:
                    self.restore_loss(loss.name, self._loss_states.pop(loss.name))
        return losses

    def adopt_loss(self, loss: CustomLoss) -> None:
        """Prepare for a loss that is new here; only torch optimises parameters of its own."""
        if callable(getattr(loss.owner, "parameters", None)):
            raise ConfigError(f"the custom loss {loss.name} has parameters of its own, which are learned with run.backend=torch only")

    def loss_state(self, name: str) -> Any:
        """The state of an attached loss that has one, as plain data and arrays."""
        owner = self._losses[name]
        return copy.deepcopy(owner.state_dict()) if isinstance(owner, Stateful) else None

    def restore_loss(self, name: str, state: Any) -> None:
        """Restore what `loss_state` returned."""
        owner = self._losses[name]
        if isinstance(owner, Stateful):
            owner.load_state_dict(state)

    def _look_back(self, rollout: Rollout, *, on_policy: bool) -> OldData | None:
        """What an update needs to know of a rollout that other weights collected, or of a proximal policy that has other weights.

        None where the clip around the recorded log-probs is all there is to it, as in PPO.
        """
        if self.statistics is not None and self.statistics.pending:  # it only initialises the normalisers
            return None
        weights = self.policy.get_weights()
        proximal = weights
        if self._proximal is not None:
            if not self._proximal.started:
                self._proximal.add(weights)
            proximal = self._proximal.within(weights)
        same = self._proximal is None or fingerprint(proximal) == self._history[-1]
        if on_policy and same:
            return None
        rollout = rollout.to_numpy()
        current = rollout.log_probs if on_policy else self.log_probs(rollout)
        log_ratios = log_ratios_of(current, rollout)
        old = OldData(importance_metrics(self.ranks.all_rows(log_ratios[rollout.valid])), log_ratios)
        if self._proximal is None:
            return old
        if not same:
            self.policy.set_weights(proximal)
            try:
                current = self.log_probs(rollout)
            finally:
                self.policy.set_weights(weights)
        return decoupled(old, current, rollout)

    def _frozen_weights(self) -> Weights:
        """Copies of the frozen weights, to be set again after an update: buffers and statistics change without a gradient step."""
        kept = {name: weight for name, weight in self.policy.get_weights().items() if name in self.frozen} if self.frozen else {}
        for name in kept:
            if name.endswith("_normalizer.count") and kept[name] == 0:
                raise ConfigError(
                    f"ppo.freeze keeps {name.removesuffix('.count')} without data; begin with a policy that has some (run.init_from), "
                    "or freeze other weights"
                )
        return kept

    def _check(self, rollout: Rollout) -> float:
        """Reject a rollout that is incomplete, does not fit the policy, or is too old; return how many updates old it is.

        Infinity stands for weights outside this policy's recent history, such as those of another run, whose versions mean nothing here.
        """
        if rollout.on_device:  # made and checked by our own collector: only whether it is this policy's is not known
            if self.spec is not None:
                for what, space in (("observations", self.spec.observation_space), ("actions", self.spec.action_space)):
                    check_space(optree.tree_map(lambda leaf: self.to_host(leaf[:1]), rollout[what]), space, what)
        else:
            check_rollout(self.spec, rollout)
        if optree.tree_leaves(rollout.global_state) and not rollout.valid.all() and not reads_global_state(self.policy):
            raise RolloutError(
                "the rollout has a global state and agents that died, so credit continues after death, which only a central critic can "
                "value; learn with policy.central_critic=true, or collect from a vector env made without global_state"
            )
        if rollout.context != () and not reads_context(self.policy):
            raise RolloutError(
                "the rollout has a task context, with which its actions were chosen, and this policy reads none; learn from it with the "
                "policy that collected it (a TaskPolicy)"
            )
        current = fingerprint(self.policy.get_weights())
        if not self._history or self._history[-1] != current:
            self._history.append(current)
        known = rollout.weights_fingerprint != 0  # a rollout of unknown origin has no version
        staleness, made_by = 0.0, ""
        if not set(rollout.weights_fingerprint[known].tolist()) <= set(self._history):
            staleness, made_by = math.inf, "weights that are not in the recent history of this policy"
        elif known.any():
            staleness = float(self.policy.policy_version - int(rollout.policy_version[known].min()))
            made_by = f"weights that are {staleness:.0f} update{'' if staleness == 1 else 's'} old"
        limit = self.config.max_staleness
        if limit is not None and staleness > limit:
            raise RolloutError(
                f"the rollout was made by {made_by}, more than ppo.max_staleness={limit}; collect a newer one or "
                + ("raise ppo.max_staleness" if math.isfinite(staleness) else "set ppo.max_staleness=null")
            )
        if limit is None and staleness > 0:
            self._warn_once(
                "staleness",
                f"the rollout was made by {made_by}; PPO corrects for other weights only near the current ones. "
                "Set ppo.max_staleness to the age that you expect, or ppo.min_effective_sample_size to skip what is too far away",
            )
        return staleness

    def _warn_once(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(message, stacklevel=4)

    def tell_order(self, order: np.ndarray, num_minibatches: int) -> None:
        """Tell an epoch's order of the samples [N], by the first of them: orders that differ do so there."""
        if self.on_stage is not None:
            self.on_stage("order", order[:ORDER_SAMPLE], num_minibatches)

    def _adapt_learning_rate(self, approx_kl: float) -> None:
        """Lower the rate where the policy moves too far in an epoch, raise it where it hardly moves; 0 is an epoch without steps."""
        config, rate = self.config, self.learning_rate
        if approx_kl > ADAPTIVE_MARGIN * config.desired_kl:
            adapted = max(rate / ADAPTIVE_STEP, min(rate, config.min_learning_rate))
        elif 0 < approx_kl < config.desired_kl / ADAPTIVE_MARGIN:
            adapted = min(rate * ADAPTIVE_STEP, max(rate, config.max_learning_rate))
        else:
            return
        self.learning_rate_scale = adapted / self.initial_rate

    def _warn_of_ratio_error(self, ratio_error: float, minibatch: Any) -> None:
        """Warn once that the weights that collected a rollout do not agree with its log-probs, and name the likely cause."""
        message = f"ratio_error is {ratio_error:.2g}: the policy that learns disagrees with the one that acted"
        if parts := self.mode_parts(minibatch):
            message += f"; these behave differently in training and in acting: {', '.join(parts)}. Use layers such as LayerNorm instead"
        self._warn_once("ratio_error", message)

    @abstractmethod
    def learn(
        self, rollout: Rollout, losses: tuple[CustomLoss, ...], *, on_policy: bool, old: OldData | None = None
    ) -> tuple[dict[str, float], Advantages]:
        """Compute the advantages and take all steps; return the metrics and the advantages.

        Before any step the ratios of the first minibatch are 1 up to rounding if these weights collected the rollout (`on_policy`) and
        there is no `old`, which has V-trace's ratios and the proximal policy's log-probs.
        """

    @abstractmethod
    def log_probs(self, rollout: Rollout) -> np.ndarray:
        """The log-probs [T, B] of a rollout's actions under the current weights."""

    @abstractmethod
    def to_host(self, array: Any) -> np.ndarray:
        """One of the backend's arrays as a NumPy array."""

    @abstractmethod
    def moments(self) -> dict[str, Any]:
        """The optimiser's state as plain data and arrays."""

    @abstractmethod
    def load_moments(self, moments: Mapping[str, Any]) -> None:
        """Restore the optimiser's state."""

    def mode_parts(self, minibatch: Any) -> list[str]:
        """The parts of the policy, such as dropout, that behave differently while learning; the built-in networks have none."""
        del minibatch
        return []

    @abstractmethod
    def profile_points(self) -> list[ProfilePoint]:
        """The sections of an update, for a profile."""

    @property
    def warming_up(self) -> bool:
        """Whether the first update will only initialise the normalisers, so that `ppo.warm_up_steps` steps are enough for it."""
        return self.updates == 0 and self.statistics is not None and self.statistics.pending

    @property
    def progress(self) -> float:
        """The share of the planned run that has been learned from, 0 to 1."""
        return 0.0 if not self.total_timesteps else min(1.0, self.env_steps / self.total_timesteps)

    @property
    def learning_rate(self) -> float:
        """The learning rate at this point of the schedule."""
        return self.initial_rate * self._factor("learning_rate_schedule") * self.learning_rate_scale

    def _coefficients(self) -> LossCoefficients:
        config = self.config
        clip, entropy = self._factor("clip_schedule"), self._factor("ent_schedule")
        vf_clip_coef = config.clip_coef if config.vf_clip_coef is None else config.vf_clip_coef
        return LossCoefficients(config.clip_coef * clip, config.vf_coef, config.ent_coef * entropy, config.clip_vloss, vf_clip_coef * clip)

    def _factor(self, name: str) -> float:
        """The factor of a scheduled coefficient at this point of the run."""
        kind = getattr(self.config, name)
        if kind not in ("linear", "cosine"):
            return 1.0
        if self.total_timesteps is None:
            raise ConfigError(f'ppo.{name}="{kind}" needs the run\'s length: {type(self).__name__}(…, total_timesteps=…)')
        return 1.0 - self.progress if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * self.progress))

    @property
    def reward_statistics(self) -> dict[str, np.ndarray] | None:
        """Mean, var and count of the discounted returns that rewards are scaled by; None without `ppo.scale_rewards`."""
        return None if self.reward_scaler is None else self.reward_scaler.statistics.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Optimiser moments, shuffle stream, counters, the scale of rewards and the state of custom losses, as plain data and arrays."""
        states = {name: self.loss_state(name) for name in self._losses}
        losses = self._loss_states | {name: state for name, state in states.items() if state is not None}
        rewards = None if self.reward_scaler is None else self.reward_scaler.state_dict()
        if rewards is not None and self.ranks.count > 1:  # of the lanes of all ranks; rank 0 alone asks, and has what the update exchanged
            rewards["running"] = self._running
        return {
            "moments": self.moments(),
            "stream": stream_state(self._stream),
            "env_steps": self.env_steps,
            "updates": self.updates,
            "bad_steps": self._guard.bad_steps,
            "learning_rate_scale": self.learning_rate_scale,
            "history": np.array(self._history, np.uint64),
            **({} if self._proximal is None else {"proximal": self._proximal.state_dict()}),
            **({} if rewards is None else {"rewards": rewards}),
            **({"losses": losses} if losses else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.load_moments(state["moments"])
        self._stream = restore_stream(state["stream"])
        self.learning_rate_scale = float(state["learning_rate_scale"])
        self._history = deque(np.asarray(state.get("history", ())).tolist(), maxlen=HISTORY)  # older checkpoints lack it
        self.env_steps, self.updates, self._guard.bad_steps = (int(state[name]) for name in ("env_steps", "updates", "bad_steps"))
        if self.reward_scaler is not None and "rewards" in state:  # an older state, or one without scaling, has none
            self.reward_scaler.load_state_dict(state["rewards"])
            self._running = self.reward_scaler.running
            self.reward_scaler.running = self.ranks.own_lanes(self._running)
        self._loss_states = dict(state.get("losses", {}))
        for name in self._losses.keys() & self._loss_states.keys():
            self.restore_loss(name, self._loss_states.pop(name))
        if self._proximal is not None and "proximal" in state:
            self._proximal.load_state_dict(state["proximal"])


class MinibatchLearner(BaseLearner):
    """A learner that takes its steps epoch by epoch: a backend adds how minibatches are made, and one step on each."""

    def learn(
        self, rollout: Rollout, losses: tuple[CustomLoss, ...], *, on_policy: bool, old: OldData | None = None
    ) -> tuple[dict[str, float], Advantages]:
        """Compute the advantages, then run the epochs."""
        weights = None
        if old is not None and old.log_probs is not None:  # the clip is around the proximal policy
            rollout, weights = replace(rollout, log_probs=old.log_probs), old.weights
        filled, advantages = self.critic_pass(rollout, old.log_ratios if old is not None and self.config.correction == "vtrace" else None)
        if self.statistics is not None and self.statistics.pending:  # it was collected without them: it only initialises them
            return {**EMPTY, "warm_up": 1.0}, advantages
        return self._epochs(filled, advantages, losses, weights, on_policy=on_policy and old is None), advantages

    def _epochs(
        self, rollout: Rollout, advantages: Advantages, losses: tuple[CustomLoss, ...], weights: np.ndarray | None, *, on_policy: bool
    ) -> dict[str, float]:
        """Run the epochs, until the last one or until `target_kl` is exceeded.

        Both `target_kl` and an adaptive learning rate look at an epoch's mean KL when it is over, so a minibatch step depends on neither.
        """
        length = self.config.sequence_length_for(rollout.num_steps, memory=bool(optree.tree_leaves(rollout.policy_state)))
        # Successors are made on demand: they take memory.
        successors = any("next_observations" in (*loss.arguments, *loss.keywords) for loss in losses)
        sequences = self.make_sequences(rollout, advantages, length, weights, successors=successors)
        total = self.ranks.total(sequences.valid.shape[1])
        config, coefficients = self.config, self._coefficients()
        adaptive = config.learning_rate_schedule == "adaptive"
        epochs: list[StepMetrics] = []
        try:
            for self.epoch in range(1, config.update_epochs + 1):
                order = self._stream.permutation(total)
                minibatches = self.shuffle(sequences, config.minibatches_for(total, length), order)
                self.tell_order(order, len(minibatches))
                if not epochs:
                    first = ratio_metrics(self.ranks.all_rows(self.ratios(minibatches[0])))
                    if on_policy and first["ratio_error"] > RATIO_TOLERANCE:
                        self._warn_of_ratio_error(first["ratio_error"], minibatches[0])
                rate_factor = self._factor("learning_rate_schedule") * self.learning_rate_scale
                epochs.append(self.take_steps(minibatches, coefficients, rate_factor, losses))
                self._guard.watch(epochs[-1], minibatches, self.host_minibatch)
                if config.target_kl is None and not adaptive:
                    continue
                approx_kl = summary(epochs[-1:])["approx_kl"]
                if adaptive:
                    self._adapt_learning_rate(approx_kl)
                if config.target_kl is not None and approx_kl > 1.5 * config.target_kl:
                    break
        finally:
            self.publish_weights()
        return {**summary(epochs), **first, "epochs": float(len(epochs))}

    @abstractmethod
    def critic_pass(self, rollout: Rollout, log_ratios: np.ndarray | None) -> tuple[Rollout, Advantages]:
        """The rollout in the backend's arrays, with its invalid rows filled, and its advantages: V-trace's with `log_ratios` [T, B]."""

    @abstractmethod
    def make_sequences(
        self, rollout: Rollout, advantages: Advantages, length: int, weights: np.ndarray | None = None, *, successors: bool
    ) -> Any:
        """The whole rollout as [L, N] sequences, with `valid` [L, N]; normalised advantages are multiplied by `weights` [T, B]."""

    @abstractmethod
    def shuffle(self, sequences: Any, num_minibatches: int, permutation: np.ndarray) -> Sequence[Any]:
        """One epoch: every sequence in exactly one minibatch."""

    @abstractmethod
    def ratios(self, minibatch: Any) -> np.ndarray:
        """The probability ratios [n] of the valid rows, current to recorded, in the mode that learns and without changing anything."""

    @abstractmethod
    def take_steps(
        self, minibatches: Sequence[Any], coefficients: LossCoefficients, rate_factor: float, losses: tuple[CustomLoss, ...]
    ) -> StepMetrics:
        """Take one optimiser step on each minibatch."""

    @abstractmethod
    def host_minibatch(self, minibatch: Any) -> Minibatch:
        """A minibatch of `shuffle` as NumPy arrays."""

    def publish_weights(self) -> None:
        """Copy the new weights into the policy, where the backend's steps move a copy of them."""

    def profile_points(self) -> list[ProfilePoint]:
        """The sections of an update, for a profile; a backend adds those inside `take_steps`."""
        return [
            ("GAE", self, "critic_pass"),
            ("gather", self, "make_sequences"),
            ("gather", self, "shuffle"),
            ("forward", self, "ratios"),
        ]


class BadNumberGuard:
    """Counts bad minibatches in a row, across epochs and updates, and stops the run after `MAX_BAD_STEPS` of them."""

    def __init__(self, dump_directory: str | Path | None) -> None:
        self.bad_steps = 0
        self._directory = dump_directory

    def watch(self, metrics: StepMetrics, minibatches: Sequence[Any], to_host: Callable[[Any], Minibatch]) -> None:
        """Read the flags of an epoch; where too many steps in a row are bad, save the last minibatch and raise."""
        if not metrics["bad"].any():
            self.bad_steps = 0
            return
        for index, bad in enumerate(metrics["bad"]):
            self.bad_steps = self.bad_steps + 1 if bad else 0
            if self.bad_steps < MAX_BAD_STEPS:
                continue
            directory = Path(self._directory) if self._directory is not None else Path(tempfile.mkdtemp(prefix="inchworm-"))
            directory.mkdir(parents=True, exist_ok=True)
            minibatch = to_host(minibatches[index])
            tree: Tree = {field.name: getattr(minibatch, field.name) for field in fields(minibatch)}
            arrays, structure = flatten_tree(tree)
            path = directory / "bad_minibatch.safetensors"
            write_tensor_file(path, arrays, kind="minibatch", version=1, header={"structure": structure})
            causes = bad_custom_losses({name: float(column[index]) for name, column in metrics.items()})
            what, advice = "the loss or its gradient", "Lower ppo.learning_rate, or look at the observations and rewards in that file"
            if causes:  # PPO's own terms are fine
                what, advice = f"the custom loss {' and '.join(causes)}, or its gradient,", "Correct what it computes for that minibatch"
            raise BadNumberError(
                f"{what} was not finite in {MAX_BAD_STEPS} minibatches in a row (loss {metrics['loss'][index]:g}, "
                f"gradient norm {metrics['grad_norm'][index]:g}); the weights are as before them, the minibatch is saved in "
                f"{path}. {advice}"
            )

    def check_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Stop before a weight that is no longer finite is used for acting, or saved."""
        for name, array in weights.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise BadNumberError(
                    f"the weight {name} is not finite after this update; lower ppo.learning_rate. Nothing of the update was saved"
                )


def check_rollout(spec: PolicySpec | None, rollout: Rollout) -> None:
    """Reject a rollout that does not fit a policy: its spaces, its memory, the global state of a central critic.

    A policy without a spec is one that somebody brings: of its rollouts only their numbers are checked.
    """
    if spec is None:
        rollout.validate()
        return
    rollout.validate(spec.observation_space, spec.action_space)
    if spec.memory is not None:
        recorded = len((optree.tree_leaves(rollout.policy_state) or [()])[0])
        if not recorded or not spec.memory.fits(rollout.policy_state, (recorded, rollout.num_lanes)):
            raise RolloutError(
                f"the policy has a memory (policy.kind={spec.config.kind}, {spec.memory.layers} x {spec.memory.size}), but the rollout's "
                "policy_state does not fit it; collect it with this policy"
            )
    if spec.global_state_space is None:
        return
    if not optree.tree_leaves(rollout.global_state):
        raise RolloutError(NO_GLOBAL_STATE)
    check_space(rollout.global_state, spec.global_state_space, "global_state")
    if rollout.lanes_per_copy > spec.lanes_per_copy > 1:
        raise RolloutError(
            f"the rollout has {rollout.lanes_per_copy} lanes per copy, but the policy's central critic was made for {spec.lanes_per_copy}"
        )


def check_moments(moments: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Reject a state of another optimiser than Adam, or one whose names or shapes are not those of the weights."""
    if "mean" not in moments:
        raise InchwormError(f"this state is of {moments.get('optimizer', 'an optimizer of your own')}, and Adam was to be restored from it")
    for kind in ("mean", "square"):
        differing = sorted(set(moments[kind]) ^ set(shapes))
        if differing:
            raise InchwormError(f"this optimiser state does not fit the policy: {differing} are only on one side")
        for name, shape in shapes.items():
            found = np.shape(moments[kind][name])  # assigning would broadcast a smaller one
            if found != tuple(shape):
                raise InchwormError(f"the optimiser's {kind} of {name} has shape {found}; the policy needs {tuple(shape)}")


def check_optimizer_state(
    state: Mapping[str, Any], optimizer: str, shapes: Mapping[str, tuple[int, ...]]
) -> Mapping[str, Mapping[str, Any]]:
    """Reject a state of another optimiser or of other weights; return it by the names of the weights.

    A weight that has had no gradient has no state; an optimiser's counters are scalars.
    """
    if state.get("optimizer") != optimizer:
        found = state.get("optimizer", "adam" if "mean" in state else "an optimizer of your own")
        raise InchwormError(f"this state is of {found}, and ppo.optimizer={optimizer} was to be restored from it")
    weights: Mapping[str, Mapping[str, Any]] = state["weights"]
    for name, entry in weights.items():
        if name not in shapes:
            raise InchwormError(f"this optimiser state does not fit the policy, which has no {name}")
        for kind, value in entry.items():
            if np.ndim(value) and np.shape(value) != tuple(shapes[name]):
                raise InchwormError(f"the optimiser's {kind} of {name} has shape {np.shape(value)}; the policy needs {tuple(shapes[name])}")
    return weights


def ratio_metrics(ratios: np.ndarray) -> dict[str, float]:
    """The largest distance of a ratio [n] from 1, and the effective sample size (Σw)² / Σw² as a share of n, 0 to 1 (Kong 1992)."""
    if not len(ratios):
        return {"ratio_error": 0.0, "effective_sample_size": 1.0}
    worst, weights = float(np.abs(ratios - 1).max()), ratios.astype(np.float64)
    if not math.isfinite(worst):
        return {"ratio_error": float(np.finfo(ratios.dtype).max), "effective_sample_size": 0.0}
    squares = float(np.square(weights).sum())
    return {
        "ratio_error": worst,
        "effective_sample_size": min(1.0, float(weights.sum()) ** 2 / squares / len(weights)) if squares else 0.0,
    }


def bad_custom_losses(row: Mapping[str, float]) -> list[str]:
    """The custom losses that made a step not finite: their value or gradient is not, while PPO's own terms are."""
    if not all(math.isfinite(row[name]) for name in ("policy_loss", "value_loss", "entropy")):
        return []
    names = [key.removeprefix("loss/") for key in row if key.startswith("loss/")]
    return [name for name in names if not math.isfinite(row[f"loss/{name}"] + row.get(f"grad_norm/{name}", 0.0))]


def target_metrics(returns: np.ndarray, values: np.ndarray, valid: np.ndarray, ranks: Ranks | None = None) -> dict[str, float]:
    """How well values predict returns, the scale of both, and the spread of the advantages, which are their difference.

    explained_variance is 1 - Var[returns - values] / Var[returns]: 1 is a perfect critic, 0 one that knows the mean; 0 where returns do
    not vary.
    """
    known, advantages = returns[valid].astype(np.float64), (returns - values)[valid].astype(np.float64)
    ranks = Ranks() if ranks is None else ranks
    (return_mean, variance), (_, spread) = (_mean_and_variance(samples, ranks) for samples in (known, advantages))
    return {
        "explained_variance": 1.0 - spread / variance if variance > 0 else 0.0,
        "return_mean": return_mean,
        "return_std": math.sqrt(variance),
        "advantage_std": math.sqrt(spread),
    }


def _mean_and_variance(samples: np.ndarray, ranks: Ranks) -> tuple[float, float]:
    """Mean and population variance of the samples [n] of all ranks."""
    mean, variance = (samples.mean(), samples.var()) if len(samples) else (np.zeros(()), np.zeros(()))
    mean, variance, _ = ranks.merge(mean, variance, len(samples))
    return float(mean), float(variance)


def summary(epochs: Sequence[StepMetrics]) -> dict[str, float]:
    """The means over all minibatch steps that were taken, and the number of steps that were skipped."""
    whole = {name: np.concatenate([metrics[name] for metrics in epochs]) for name in epochs[0]}
    skipped = (whole.pop("bad") != 0) | (whole.pop("empty") != 0)
    means = {name: float(column[~skipped].mean()) if not skipped.all() else 0.0 for name, column in whole.items()}
    return {**means, "skipped_steps": float(skipped.sum())}
