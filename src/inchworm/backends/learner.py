"""Step 9 of 9, what every backend shares: the order of an update, its checks, schedules, counters and the shuffle stream.

A backend adds four motions: look at a rollout with the critic, cut it into sequences, shuffle them into minibatches, and
take one optimiser step on each.
"""

from __future__ import annotations

import math
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import optree

from inchworm.backends.custom_losses import CustomLoss, bind_custom_losses, needs_successors
from inchworm.backends.numpy.loss import LossCoefficients
from inchworm.backends.numpy.policy import NO_GLOBAL_STATE
from inchworm.config.sections import PPOConfig, Schedule
from inchworm.core.errors import BadNumberError, ConfigError, RolloutError
from inchworm.core.protocols import Policy, reads_global_state
from inchworm.core.seeding import make_stream, restore_stream, stream_state
from inchworm.core.tensor_file import write_tensor_file
from inchworm.core.trees import flatten_tree
from inchworm.core.types import Advantages, Minibatch, Seam, Tree, UpdateStats
from inchworm.policy.file import fingerprint
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.checks import check_space
from inchworm.rollout.rollout import Rollout


def check_memory(spec: PolicySpec, rollout: Rollout) -> None:
    """Refuse a rollout without the memory that the policy needs to begin its sequences with."""
    if spec.memory is None:
        return
    recorded = len((optree.tree_leaves(rollout.policy_state) or [()])[0])
    if not recorded or not spec.memory.fits(rollout.policy_state, (recorded, rollout.num_lanes)):
        raise RolloutError(
            f"the policy remembers (policy.kind={spec.config.kind}, {spec.memory.layers} x {spec.memory.size}), but the rollout's "
            "policy_state is not of that memory; collect it with this policy"
        )


def check_global_state(spec: PolicySpec, rollout: Rollout) -> None:
    """Refuse a rollout without the global state that a central critic reads."""
    if spec.global_state_space is None:
        return
    if not optree.tree_leaves(rollout.global_state):
        raise RolloutError(NO_GLOBAL_STATE)
    check_space(rollout.global_state, spec.global_state_space, "global_state")
    if rollout.lanes_per_copy > spec.lanes_per_copy > 1:
        raise RolloutError(
            f"the rollout has {rollout.lanes_per_copy} lanes per copy, but the policy's central critic was made for {spec.lanes_per_copy}"
        )


def check_credit(policy: Policy, rollout: Rollout) -> None:
    """Refuse a rollout whose credit runs on through the rows of the dead, unless the critic can value those."""
    if optree.tree_leaves(rollout.global_state) and not rollout.valid.all() and not reads_global_state(policy):
        raise RolloutError(
            "the rollout has a global state and agents that died, so their credit goes on after death, which only a central critic can "
            "value; learn with policy.central_critic=true, or collect from a vector env made without global_state"
        )


Table = Mapping[str, np.ndarray]
"""What an epoch's minibatch steps gave, one entry [n] each, under metric names; and the flags `bad` and `empty`."""

MAX_BAD_STEPS = 3
"""Bad minibatches in a row after which the run stops."""


class BadNumberGuard:
    """Counts bad minibatches in a row, over epochs and updates."""

    def __init__(self, dump_directory: str | Path | None) -> None:
        self.bad_steps = 0
        self._directory = dump_directory

    def watch(self, table: Table, minibatches: Sequence[Any], whole: Callable[[Any], Minibatch]) -> None:
        """Read an epoch's flags, once; several in a row stop the run, with the last minibatch saved, as `whole` gives it."""
        if not table["bad"].any():
            self.bad_steps = 0
            return
        for index, bad in enumerate(table["bad"]):
            self.bad_steps = self.bad_steps + 1 if bad else 0
            if self.bad_steps >= MAX_BAD_STEPS:
                saved = self._dump(whole(minibatches[index]))
                raise BadNumberError(
                    f"the loss or its gradient was not finite in {MAX_BAD_STEPS} minibatches in a row (loss {table['loss'][index]:g}, "
                    f"gradient norm {table['grad_norm'][index]:g}); the weights are as before them, the minibatch is saved in "
                    f"{saved}. Lower ppo.learning_rate, or look at the observations and rewards in that file"
                )

    def check_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Stop before anybody acts with, or saves, a weight that a good gradient has carried out of range."""
        for name, array in weights.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise BadNumberError(
                    f"the weight {name} is not finite after this update; lower ppo.learning_rate. Nothing of the update was saved"
                )

    def _dump(self, minibatch: Minibatch) -> Path:
        directory = Path(self._directory) if self._directory is not None else Path(tempfile.mkdtemp(prefix="inchworm-"))
        directory.mkdir(parents=True, exist_ok=True)
        tree: Tree = {field.name: getattr(minibatch, field.name) for field in fields(minibatch)}
        arrays, structure = flatten_tree(optree.tree_map(_as_array, tree))
        path = directory / "bad_minibatch.safetensors"
        return write_tensor_file(path, arrays, kind="minibatch", version=1, header={"structure": structure})


def _as_array(leaf: Any) -> np.ndarray:
    """A NumPy array, or another library's in the host's memory, as a NumPy array."""
    return np.asarray(leaf if isinstance(leaf, np.ndarray) else leaf.detach().cpu())


def schedule_factor(kind: Schedule, progress: float) -> float:
    """What a coefficient is multiplied with at `progress` from 0 (the run's start) to 1 (its planned end)."""
    progress = min(max(progress, 0.0), 1.0)
    if kind == "linear":
        return 1.0 - progress
    if kind == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0


RATIO_TOLERANCE = 1e-3
EMPTY = dict.fromkeys(("loss", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm"), 0.0)


class BaseLearner(ABC):
    """Learns a policy from rollouts, whoever collected them; never touches an environment or its input.

    `total_timesteps` is what schedules run towards; it is only needed when one is not constant.
    """

    policy: Policy

    def __init__(
        self, config: PPOConfig | None, *, seed: int = 0, total_timesteps: int | None = None, dump_directory: str | Path | None = None
    ) -> None:
        self.config = config if config is not None else PPOConfig()
        self.total_timesteps = total_timesteps
        self.learning_rate_scale = 1.0
        """Multiplies the schedule's learning rate from the next update on: the knob for whoever steers it from outside."""
        self.env_steps = 0
        self.updates = 0
        self._guard = BadNumberGuard(dump_directory)
        self._stream = make_stream(seed, "shuffle")

    def update(self, rollout: Rollout | Mapping[str, Any], custom_loss_fns: Sequence[Callable[..., Any]] = ()) -> UpdateStats:
        """Some epochs of minibatch steps on one rollout; its arrays are only read."""
        rollout = rollout if isinstance(rollout, Rollout) else Rollout.from_dict(rollout)
        losses = bind_custom_losses(custom_loss_fns)
        self._check(rollout)
        if rollout.num_valid == 0:
            return UpdateStats({**EMPTY, **{f"loss/{loss.name}": 0.0 for loss in losses}, "learning_rate": self.learning_rate})
        own, advantages = self._look(rollout)
        metrics = {**EMPTY, "warm_up": 1.0} if self._statistics_pending() else self._epochs(own, advantages, losses)
        metrics["explained_variance"] = explained_variance(
            self._to_host(advantages.returns), self._to_host(advantages.values), rollout.valid
        )
        metrics["learning_rate"] = self.learning_rate
        metrics["staleness"] = float(self._staleness(rollout))
        self.policy.update_statistics(rollout, advantages.returns)
        self._guard.check_weights(self.policy.get_weights())
        self.policy.policy_version += 1
        self.updates += 1
        self.env_steps += rollout.num_valid
        return UpdateStats(metrics)

    def _epochs(self, rollout: Rollout, advantages: Advantages, losses: tuple[CustomLoss, ...]) -> dict[str, float]:
        length = sequence_length(self.config, rollout)
        sequences = self._sequences(rollout, advantages, length, successors=needs_successors(losses))
        total = sequences.valid.shape[1]
        coefficients, rate_factor = self._coefficients(), self._factor("learning_rate_schedule") * self.learning_rate_scale
        tables: list[Table] = []
        try:
            for _ in range(self.config.update_epochs):
                minibatches = self._shuffled(sequences, self.config.minibatches_for(total, length), self._stream.permutation(total))
                if not tables:
                    ratio_error = self._checked_ratio(minibatches[0])
                tables.append(self._steps(minibatches, coefficients, rate_factor, losses))
                self._guard.watch(tables[-1], minibatches, self._whole)
                if self.config.target_kl is not None and summary(tables[-1:])["approx_kl"] > 1.5 * self.config.target_kl:
                    break
        finally:
            self._hand_over()
        return {**summary(tables), "ratio_error": ratio_error, "epochs": float(len(tables))}

    def _hand_over(self) -> None:  # noqa: B027 - nothing to do where the steps move the policy itself
        """Give the policy the new weights, where the backend's steps move a copy of its own."""

    @abstractmethod
    def _look(self, rollout: Rollout) -> tuple[Rollout, Advantages]:
        """The rollout in the backend's own arrays, harmless where no agent lived, and the critic's view of it."""

    @abstractmethod
    def _sequences(self, rollout: Rollout, advantages: Advantages, length: int, *, successors: bool) -> Any:
        """The whole rollout as [L, N] sequences; `valid` [L, N] says which rows count."""

    @abstractmethod
    def _shuffled(self, sequences: Any, num_minibatches: int, permutation: np.ndarray) -> Sequence[Any]:
        """One epoch: every sequence in exactly one minibatch."""

    @abstractmethod
    def _steps(
        self, minibatches: Sequence[Any], coefficients: LossCoefficients, rate_factor: float, losses: tuple[CustomLoss, ...]
    ) -> Table:
        """One optimiser step on each minibatch, and what each of them gave."""

    def _whole(self, minibatch: Any) -> Minibatch:
        """A minibatch of `_shuffled` as the value that people read."""
        whole: Minibatch = minibatch
        return whole

    @abstractmethod
    def _ratio_error(self, minibatch: Any) -> float:
        """How far the minibatch's probability ratios are from 1."""

    @abstractmethod
    def _to_host(self, array: Any) -> np.ndarray:
        """One of the backend's arrays as NumPy's."""

    @abstractmethod
    def _statistics_pending(self) -> bool:
        """Whether a normaliser has seen nothing yet, so that this rollout only moves the statistics."""

    @abstractmethod
    def _moments(self) -> dict[str, Any]:
        """The optimiser's state as plain data and arrays."""

    @abstractmethod
    def _load_moments(self, moments: Mapping[str, Any]) -> None:
        """Take it back."""

    def seams(self) -> list[Seam]:
        """The sections of an update, for a profile; a backend adds what happens inside `_steps`."""
        return [("GAE", self, "_look"), ("gather", self, "_sequences"), ("gather", self, "_shuffled"), ("forward", self, "_ratio_error")]

    @property
    def progress(self) -> float:
        """How much of the planned run has been learned from, 0 to 1."""
        return 0.0 if not self.total_timesteps else min(1.0, self.env_steps / self.total_timesteps)

    @property
    def learning_rate(self) -> float:
        """The learning rate at this point of the schedule."""
        return self.config.learning_rate * self._factor("learning_rate_schedule") * self.learning_rate_scale

    def state_dict(self) -> dict[str, Any]:
        """Optimiser moments, shuffle stream and counters as plain data and arrays."""
        return {
            "moments": self._moments(),
            "stream": stream_state(self._stream),
            "env_steps": self.env_steps,
            "updates": self.updates,
            "bad_steps": self._guard.bad_steps,
            "learning_rate_scale": self.learning_rate_scale,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` described."""
        self._load_moments(state["moments"])
        self._stream = restore_stream(state["stream"])
        self.learning_rate_scale = float(state["learning_rate_scale"])
        self.env_steps, self.updates, self._guard.bad_steps = (int(state[name]) for name in ("env_steps", "updates", "bad_steps"))

    def _checked_ratio(self, minibatch: Any) -> float:
        """The first minibatch's ratio error before any step: 0 up to rounding if what acted is what learns; warned of otherwise."""
        error = self._ratio_error(minibatch)
        if not error <= RATIO_TOLERANCE and self._actors.tolist() == [fingerprint(self.policy.get_weights())]:
            warnings.warn(f"ratio_error is {error:.2g}: the policy that learns disagrees with the one that acted", stacklevel=4)
        return error

    def _check(self, rollout: Rollout) -> None:
        self._validate(rollout)
        check_credit(self.policy, rollout)
        staleness, limit = self._staleness(rollout), self.config.max_staleness
        self._actors = np.unique(rollout.weights_fingerprint)  # whose weights made the rollout
        if limit is not None and staleness > limit:
            raise RolloutError(
                f"the rollout was made by weights {staleness} updates old, more than ppo.max_staleness={limit}; "
                "collect a newer one or raise ppo.max_staleness"
            )

    @abstractmethod
    def _validate(self, rollout: Rollout) -> None:
        """Refuse a rollout that is not whole, or not of the policy's spaces."""

    def _staleness(self, rollout: Rollout) -> int:
        """Updates between the weights that acted and these; 0 for a rollout that says nothing of it."""
        known = rollout.policy_version[rollout.weights_fingerprint != 0]
        return self.policy.policy_version - int(known.min()) if known.size else 0

    def _coefficients(self) -> LossCoefficients:
        config = self.config
        clip_coef = config.clip_coef * self._factor("clip_schedule")
        return LossCoefficients(clip_coef, config.vf_coef, config.ent_coef * self._factor("ent_schedule"), config.clip_vloss)

    def _factor(self, name: str) -> float:
        kind = getattr(self.config, name)
        if kind != "constant" and self.total_timesteps is None:
            raise ConfigError(f'ppo.{name}="{kind}" needs the run\'s length: {type(self).__name__}(…, total_timesteps=…)')
        return schedule_factor(kind, self.progress)


def sequence_length(config: PPOConfig, rollout: Rollout) -> int:
    """L: 1 without memory, else up to 32, or what the config says."""
    return config.sequence_length_for(rollout.num_steps, memory=bool(optree.tree_leaves(rollout.policy_state)))


def explained_variance(returns: np.ndarray, values: np.ndarray, valid: np.ndarray) -> float:
    """1 - Var[returns - values] / Var[returns]: 1 is a perfect critic, 0 one that knows the mean; 0 where returns do not vary."""
    returns, errors = returns[valid].astype(np.float64), (returns - values)[valid].astype(np.float64)
    if len(returns) < 2:
        return 0.0
    variance = float(returns.var())
    return 1.0 - float(errors.var()) / variance if variance > 0 else 0.0


def summary(tables: Sequence[Table]) -> dict[str, float]:
    """The means over all minibatch steps that were taken, and how many were not."""
    whole = {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
    skipped = (whole.pop("bad") != 0) | (whole.pop("empty") != 0)
    means = {name: float(column[~skipped].mean()) if not skipped.all() else 0.0 for name, column in whole.items()}
    return {**means, "skipped_steps": float(skipped.sum())}
