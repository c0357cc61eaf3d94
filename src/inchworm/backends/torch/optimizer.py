"""Step 9 of 9: the gradient steps that draw a policy up to a rollout; after the last epoch its statistics move."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import optree
import torch
from torch import Tensor, nn

from inchworm.backends.numpy.loss import LossCoefficients
from inchworm.backends.torch.custom_losses import CustomLoss, bind_custom_losses, needs_successors
from inchworm.backends.torch.encoding import to_tensor, to_tensors
from inchworm.backends.torch.gae import compute_advantages
from inchworm.backends.torch.guard import BadNumberGuard
from inchworm.backends.torch.loss import normalize, ppo_loss
from inchworm.backends.torch.minibatches import harmless, sequences_of, shuffled
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.backends.torch.step import MinibatchStep, Row
from inchworm.config import PPOConfig
from inchworm.errors import ConfigError, RolloutError
from inchworm.policy.weights import fingerprint
from inchworm.protocols import Policy
from inchworm.rollout.rollout import Rollout
from inchworm.seeding import make_stream, restore_stream, stream_state
from inchworm.train.schedules import schedule_factor
from inchworm.types import Advantages, Array, Minibatch, Tree, UpdateStats

RATIO_TOLERANCE = 1e-3
EMPTY = dict.fromkeys(("loss", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm"), 0.0)


class PPOOptimizer:
    """Learns a torch policy from rollouts, whoever collected them; never touches an environment or its input.

    `policy` is a `TorchPolicy`, or any `torch.nn.Module` that keeps the `Policy` protocol. `total_timesteps` is what schedules
    run towards; it is only needed when one is not constant.
    """

    def __init__(
        self,
        policy: Any,
        config: PPOConfig | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        device: str | torch.device | None = None,
        seed: int = 0,
        total_timesteps: int | None = None,
        dump_directory: str | Path | None = None,
    ) -> None:
        if not isinstance(policy, nn.Module):
            raise ConfigError(f"the torch backend learns torch.nn.Module policies; {type(policy).__name__} is none")
        self.policy = cast(Policy, policy)
        self._builtin = policy if isinstance(policy, TorchPolicy) else None  # whose spaces and statistics are known
        self.config = config if config is not None else PPOConfig()
        self.device = pick_device(device)
        self.total_timesteps = total_timesteps
        self.learning_rate_scale = 1.0
        """Multiplies the schedule's learning rate from the next update on: the knob for whoever steers it from outside."""
        self.env_steps = 0
        self.updates = 0
        self._guard = BadNumberGuard(dump_directory)
        self._stream = make_stream(seed, "shuffle")
        policy.to(self.device)
        self._parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad and parameter.numel()]
        self.optimizer = optimizer if optimizer is not None else self._make_optimizer()
        self._step = MinibatchStep(self.policy, self.config, self._parameters, self.optimizer)
        self._initial_rates = [float(group["lr"]) for group in self.optimizer.param_groups]

    def update(self, rollout: Rollout | Mapping[str, Any], custom_loss_fns: Sequence[Callable[..., Tensor]] = ()) -> UpdateStats:
        """Some epochs of minibatch steps on one rollout; its arrays are only read."""
        rollout = rollout if isinstance(rollout, Rollout) else Rollout.from_dict(rollout)
        losses = bind_custom_losses(custom_loss_fns)
        self._check(rollout)
        if rollout.num_valid == 0:
            return UpdateStats({**EMPTY, **{f"loss/{loss.name}": 0.0 for loss in losses}, "learning_rate": self.learning_rate})
        on_device = harmless(rollout.map(partial(to_tensor, device=self.device)))  # the one transfer
        advantages = compute_advantages(self.policy, on_device, self.config)
        if self._statistics_pending():
            metrics = {**EMPTY, "warm_up": 1.0}
        else:
            metrics = self._epochs(on_device, advantages, losses)
        metrics["explained_variance"] = explained_variance(advantages, on_device.valid)
        metrics["learning_rate"] = self.learning_rate
        metrics["staleness"] = float(self._staleness(rollout))
        self.policy.update_statistics(rollout, advantages.returns)
        self.policy.policy_version += 1
        self.updates += 1
        self.env_steps += rollout.num_valid
        return UpdateStats(metrics)

    def compute_ppo_loss(
        self,
        observations: Tree,
        actions: Tree,
        log_probs: Array,
        advantages: Array,
        returns: Array,
        values: Array,
        *,
        valid: Array | None = None,
        episode_starts: Array | None = None,
        policy_state: Tree = (),
    ) -> dict[str, Tensor]:
        """The loss terms of [N, …] samples (or [L, N, …] sequences) under the current weights, `loss` with its gradient graph.

        Advantages are taken as they are given: normalise them before, if you want that.
        """
        flat = np.ndim(log_probs) == 1
        fields_given = (observations, actions, log_probs, advantages, returns, values)
        trees = [to_tensors(tree, self.device) for tree in fields_given]
        shape = np.shape(log_probs)
        trees.append(to_tensor(np.ones(shape, bool) if valid is None else valid, self.device))
        trees.append(to_tensor(np.zeros(shape, bool) if episode_starts is None else episode_starts, self.device))
        if flat:
            trees = [to_sequences(tree) for tree in trees]
        names = ("observations", "actions", "log_probs", "advantages", "returns", "values", "valid", "episode_starts")
        minibatch = Minibatch(**dict(zip(names, trees)), policy_state=to_tensors(policy_state, self.device))
        return ppo_loss(self.policy.evaluate(minibatch), minibatch, self._coefficients(), minibatch.valid.sum())

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
        packed = self.optimizer.state_dict()
        moments = {str(index): {name: _to_plain(value) for name, value in entry.items()} for index, entry in packed["state"].items()}
        return {
            "moments": moments,
            "stream": stream_state(self._stream),
            "env_steps": self.env_steps,
            "updates": self.updates,
            "bad_steps": self._guard.bad_steps,
            "learning_rate_scale": self.learning_rate_scale,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` described."""
        groups = self.optimizer.state_dict()["param_groups"]
        moments = {int(index): {name: _from_plain(value) for name, value in entry.items()} for index, entry in state["moments"].items()}
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self._stream = restore_stream(state["stream"])
        self.learning_rate_scale = float(state["learning_rate_scale"])
        self.env_steps, self.updates, self._guard.bad_steps = (int(state[name]) for name in ("env_steps", "updates", "bad_steps"))

    def _epochs(self, rollout: Rollout, advantages: Advantages, losses: tuple[CustomLoss, ...]) -> dict[str, float]:
        length = sequence_length(self.config, rollout)
        sequences = sequences_of(rollout, self._scaled(advantages, rollout.valid), length, successors=needs_successors(losses))
        total = sequences.valid.shape[1]
        coefficients = self._coefficients()
        self._set_learning_rate()
        rows: list[Row] = []
        epochs = 0
        for _ in range(self.config.update_epochs):
            epoch = list(shuffled(sequences, self.config.minibatches_for(total, length), self._stream.permutation(total)))
            if not rows:
                ratio_error = self._ratio_error(epoch[0])
            done = [self._step(minibatch, coefficients, losses) for minibatch in epoch]
            rows += done
            epochs += 1
            self._guard.watch(epoch, done)
            if self.config.target_kl is not None and _mean(done, "approx_kl") > 1.5 * self.config.target_kl:
                break
        return {**summary(rows), "ratio_error": ratio_error, "epochs": float(epochs)}

    def _ratio_error(self, minibatch: Minibatch) -> float:
        """How far the first minibatch's probability ratios are from 1, before any step: 0 up to rounding if what acted is what learns."""
        with torch.no_grad():
            ratio = (self.policy.evaluate(minibatch).log_probs - minibatch.log_probs).exp()
            error = float(((ratio - 1).abs() * minibatch.valid).max().nan_to_num(nan=torch.finfo(ratio.dtype).max))
        if not error <= RATIO_TOLERANCE and self._actors.tolist() == [fingerprint(self.policy.get_weights())]:
            warnings.warn(f"ratio_error is {error:.2g}: the policy that learns disagrees with the one that acted", stacklevel=4)
        return error

    def _scaled(self, advantages: Advantages, valid: Tensor) -> Advantages:
        if self.config.normalize_advantages != "batch":
            return advantages
        scaled = normalize(advantages.advantages, valid)
        return Advantages(advantages.values, advantages.next_values, scaled, advantages.returns)

    def _check(self, rollout: Rollout) -> None:
        if self._builtin is not None:
            rollout.validate(self._builtin.spec.observation_space, self._builtin.spec.action_space)
        else:
            rollout.validate()
        staleness, limit = self._staleness(rollout), self.config.max_staleness
        self._actors = np.unique(rollout.weights_fingerprint)  # whose weights made the rollout
        if limit is not None and staleness > limit:
            raise RolloutError(
                f"the rollout was made by weights {staleness} updates old, more than ppo.max_staleness={limit}; "
                "collect a newer one or raise ppo.max_staleness"
            )

    def _staleness(self, rollout: Rollout) -> int:
        """Updates between the weights that acted and these; 0 for a rollout that says nothing of it."""
        known = rollout.policy_version[rollout.weights_fingerprint != 0]
        return self.policy.policy_version - int(known.min()) if known.size else 0

    def _statistics_pending(self) -> bool:
        return self._builtin is not None and self._builtin.statistics.pending

    def _coefficients(self) -> LossCoefficients:
        config = self.config
        clip_coef = config.clip_coef * self._factor("clip_schedule")
        return LossCoefficients(clip_coef, config.vf_coef, config.ent_coef * self._factor("ent_schedule"), config.clip_vloss)

    def _factor(self, name: str) -> float:
        kind = getattr(self.config, name)
        if kind != "constant" and self.total_timesteps is None:
            raise ConfigError(f'ppo.{name}="{kind}" needs the run\'s length: PPOOptimizer(…, total_timesteps=…)')
        return schedule_factor(kind, self.progress)

    def _set_learning_rate(self) -> None:
        factor = self._factor("learning_rate_schedule") * self.learning_rate_scale
        for group, initial in zip(self.optimizer.param_groups, self._initial_rates):
            group["lr"] = initial * factor

    def _make_optimizer(self) -> torch.optim.Optimizer:
        config = self.config
        kind = torch.optim.AdamW if config.weight_decay else torch.optim.Adam
        return kind(self._parameters, lr=config.learning_rate, eps=config.adam_eps, weight_decay=config.weight_decay, fused=True)


def pick_device(device: str | torch.device | None) -> torch.device:
    """The device to learn on: the one given, or cuda if there is one."""
    if device is None or device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"run.device={device!r} cannot be used here ({str(error).splitlines()[0]}); use cpu or auto") from None
    return chosen


def sequence_length(config: PPOConfig, rollout: Rollout) -> int:
    """L: 1 without memory, else up to 32, or what the config says."""
    if config.sequence_length != "auto":
        return min(int(config.sequence_length), max(1, rollout.num_steps))
    return min(rollout.num_steps, 32) if optree.tree_leaves(rollout.policy_state) else 1


def explained_variance(advantages: Advantages, valid: Tensor) -> float:
    """1 - Var[returns - values] / Var[returns]: 1 is a perfect critic, 0 one that knows the mean; 0 where returns do not vary."""
    returns, errors = advantages.returns[valid], (advantages.returns - advantages.values)[valid]
    if len(returns) < 2:
        return 0.0
    variance = float(returns.double().var())
    return 1.0 - float(errors.double().var()) / variance if variance > 0 else 0.0


def to_sequences(tree: Tree) -> Tree:
    """[N, …] as sequences of one step, [1, N, …]."""
    return optree.tree_map(lambda leaf: leaf[None], tree)


def summary(rows: list[Row]) -> dict[str, float]:
    """The means over all minibatch steps that were taken, and how many were not."""
    taken = [row for row in rows if not bool(row["bad"]) and not bool(row["empty"])]
    names = [name for name in rows[0] if name not in ("bad", "empty")]
    return {**{name: _mean(taken, name) if taken else 0.0 for name in names}, "skipped_steps": float(len(rows) - len(taken))}


def _mean(rows: list[Row], name: str) -> float:
    return float(torch.stack([row[name].float() for row in rows if name in row]).mean())


def _to_plain(value: Any) -> Any:
    return value.detach().cpu().numpy().copy() if isinstance(value, Tensor) else value


def _from_plain(value: Any) -> Any:
    return torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value
