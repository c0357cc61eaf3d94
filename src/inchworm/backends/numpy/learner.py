"""Step 9 of 9 in NumPy: the gradient steps that draw a policy up to a rollout, with gradients by hand. No torch anywhere."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import optree

from inchworm.backends.custom_losses import CustomLoss
from inchworm.backends.learner import BaseLearner, Table
from inchworm.backends.numpy.distributions import ActionTerms
from inchworm.backends.numpy.gae import compute_advantages
from inchworm.backends.numpy.loss import LossCoefficients, normalize, surrogate_and_slope, value_errors_and_slope
from inchworm.backends.numpy.network import FlatNetwork
from inchworm.backends.numpy.policy import NumpyPolicy, encode_mask, flatten_actions
from inchworm.config.sections import PPOConfig
from inchworm.core.errors import ConfigError, InchwormError
from inchworm.core.spaces import MASK_KEY
from inchworm.core.types import Advantages, Evaluation, Minibatch, Seam, Tree
from inchworm.policy.spec import LOG_STD, TANH_LOG_STD_RANGE
from inchworm.rollout.rollout import Rollout
from inchworm.rollout.sequences import (
    harmless,
    minibatch_places,
    select_sequences,
    split_into_sequences,
    split_valid,
    successor_observations,
)

BETA_MEAN, BETA_SQUARE = 0.9, 0.999


class Adam:
    """Running means of the gradient and of its square, and the step they make.

    Both means begin at 0 and are therefore too small by the factor 1 - betaᵗ after t steps, which is divided out. With
    `weight_decay` the parameters also shrink by that share of the learning rate, apart from the gradient (AdamW).
    """

    def __init__(self, parameters: np.ndarray, *, eps: float, weight_decay: float) -> None:
        self.parameters = parameters
        self.mean, self.square = np.zeros_like(parameters), np.zeros_like(parameters)
        self.steps = 0
        self._eps, self._weight_decay = eps, weight_decay
        self._scratch, self._step = np.empty_like(parameters), np.empty_like(parameters)

    def step(self, gradient: np.ndarray, learning_rate: float, *, scale: float = 1.0) -> None:
        """Move the parameters against `scale` times the gradient."""
        self.steps += 1
        new, step = self._scratch, self._step
        # mean = beta mean + (1 - beta) gradient, and the same for its square
        np.multiply(gradient, (1 - BETA_MEAN) * scale, out=new)
        self.mean *= BETA_MEAN
        self.mean += new
        np.multiply(gradient, gradient, out=new)
        new *= (1 - BETA_SQUARE) * scale * scale
        self.square *= BETA_SQUARE
        self.square += new
        if self._weight_decay:
            self.parameters *= 1 - learning_rate * self._weight_decay
        # step = rate · mean / (1 - beta₁ᵗ) / (sqrt(square / (1 - beta₂ᵗ)) + eps), with u = sqrt(1 - beta₂ᵗ) taken out of the root
        u = math.sqrt(1 - BETA_SQUARE**self.steps)
        np.sqrt(self.square, out=new)
        new += self._eps * u
        np.divide(self.mean, new, out=step)
        step *= learning_rate * u / (1 - BETA_MEAN**self.steps)
        self.parameters -= step


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Some samples as learning reads them. They are [L, N] sequences laid flat, n = L · N, one row or column a sample."""

    inputs: np.ndarray
    """[n, F] encoded and normalised observations"""
    choices: np.ndarray
    """[G, n]"""
    gaussians: np.ndarray
    """[D, n]"""
    mask: np.ndarray | None
    """[C, n], or None where every choice is legal"""
    scalars: np.ndarray
    """[4, n] behaviour log-probs, advantages, returns, values before the update; an array of this epoch alone"""
    valid: np.ndarray | None
    """[n] bool, or None where every sample counts"""
    length: int
    """L"""
    minibatch: Callable[[], Minibatch]
    """The same samples as the value that custom losses and people read; made when it is asked for."""

    @property
    def log_probs(self) -> np.ndarray:
        """[n] of the behaviour policy."""
        row: np.ndarray = self.scalars[0]
        return row

    @property
    def advantages(self) -> np.ndarray:
        """[n]"""
        row: np.ndarray = self.scalars[1]
        return row

    @property
    def returns(self) -> np.ndarray:
        """[n]"""
        row: np.ndarray = self.scalars[2]
        return row

    @property
    def values(self) -> np.ndarray:
        """[n] before the update."""
        row: np.ndarray = self.scalars[3]
        return row

    @property
    def count(self) -> int:
        """Samples that count."""
        return self.scalars.shape[1] if self.valid is None else int(np.count_nonzero(self.valid))


class RolloutSamples:
    """A whole rollout as samples, in the order of its sequences."""

    def __init__(self, policy: NumpyPolicy, rollout: Rollout, advantages: Advantages, length: int, *, successors: bool) -> None:
        layout, dtype = policy.spec.actions, advantages.values.dtype
        facts = {name: getattr(rollout, name) for name in ("observations", "actions", "rewards", "terminated", "truncated")}
        opinions = {
            "log_probs": rollout.log_probs,
            "advantages": np.where(rollout.valid, advantages.advantages, dtype.type(0)),
            "returns": np.where(rollout.valid, advantages.returns, advantages.values),
            "values": advantages.values,
        }
        facts |= {"episode_starts": rollout.episode_starts, "next_observations": successor_observations(rollout) if successors else ()}
        self._steps = split_into_sequences({**facts, **opinions}, length)  # every leaf [L, N, …]
        self.valid = split_valid(rollout.valid, length)  # [L, N]
        self._length = length
        self._step_starts = np.arange(length)[:, None] * self.valid.shape[1]  # [L, 1] where the samples of each step begin
        self._all_valid = bool(self.valid.all())
        observations = self._steps["observations"]
        choices, gaussians = flatten_actions(layout, self._steps["actions"], 2)
        mask = encode_mask(layout, observations[MASK_KEY], 2) if policy.spec.observations.has_mask else None
        self._inputs = policy.encode(observations, 2)[0].astype(dtype, copy=False)  # [n, F]
        self._choices, self._gaussians = _columns(choices), _columns(gaussians).astype(dtype)
        self._mask = None if mask is None else _columns(mask)
        self._scalars = np.stack([self._steps[name].reshape(-1) for name in opinions]).astype(dtype, copy=False)

    def shuffled(self, num_minibatches: int, permutation: np.ndarray) -> list[Samples]:
        """One epoch: every sequence in exactly one minibatch, in the order of `permutation`; padding is marked invalid."""
        places, real = minibatch_places(len(permutation), num_minibatches)
        columns = permutation[places]  # [minibatches, N]
        order = (columns[:, None] + self._step_starts).reshape(-1)  # [all samples], minibatch after minibatch
        whole = self._take(order)
        valid = None
        if not (self._all_valid and real.all()):
            valid = self.valid.reshape(-1)[order] & np.repeat(real[:, None], self._length, 1).reshape(-1)
        size = columns.shape[1] * self._length
        return [
            _window(whole, valid, slice(index * size, (index + 1) * size), self._length, partial(self._minibatch, part, flags))
            for index, (part, flags) in enumerate(zip(columns, real))
        ]

    def _take(self, order: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None, np.ndarray]:
        """The one gather of an epoch."""
        inputs, scalars = self._inputs.take(order, 0), self._scalars.take(order, 1)
        mask = None if self._mask is None else self._mask.take(order, 1)
        return inputs, self._choices.take(order, 1), self._gaussians.take(order, 1), mask, scalars

    def _minibatch(self, columns: np.ndarray, real: np.ndarray) -> Minibatch:
        return Minibatch(**select_sequences(self._steps, columns), valid=self.valid[:, columns] & real)


def _window(
    whole: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None, np.ndarray],
    valid: np.ndarray | None,
    part: slice,
    length: int,
    minibatch: Callable[[], Minibatch],
) -> Samples:
    """A minibatch of an epoch: views, no copies."""
    inputs, choices, gaussians, mask, scalars = whole
    return Samples(
        inputs=inputs[part],
        choices=choices[:, part],
        gaussians=gaussians[:, part],
        mask=None if mask is None else mask[:, part],
        scalars=scalars[:, part],
        valid=None if valid is None else valid[part],
        length=length,
        minibatch=minibatch,
    )


def micro_batches(samples: Samples, pieces: int) -> Iterator[Samples]:
    """A minibatch in `pieces` parts of whole sequences, for gradient accumulation."""
    if pieces == 1:
        yield samples
        return
    width = samples.scalars.shape[1] // samples.length
    whole = samples.minibatch()
    for start, stop in pairwise(np.linspace(0, width, min(pieces, width) + 1).astype(int)):
        chosen = (np.arange(samples.length)[:, None] * width + np.arange(start, stop)).reshape(-1)
        yield Samples(
            inputs=samples.inputs[chosen],
            choices=samples.choices[:, chosen],
            gaussians=samples.gaussians[:, chosen],
            mask=None if samples.mask is None else samples.mask[:, chosen],
            scalars=samples.scalars[:, chosen],
            valid=None if samples.valid is None else samples.valid[chosen],
            length=samples.length,
            minibatch=_piece(whole, slice(start, stop)),
        )


def _piece(whole: Minibatch, part: slice) -> Callable[[], Minibatch]:
    fields: Tree = {field.name: getattr(whole, field.name) for field in dataclasses.fields(whole)}
    return lambda: Minibatch(**optree.tree_map(lambda leaf: leaf[:, part], fields))


def as_minibatch(samples: Samples) -> Minibatch:
    """The same samples as people read them, advantages as the step has them."""
    return dataclasses.replace(samples.minibatch(), advantages=as_rows(samples.advantages, samples.length))


def _columns(array: np.ndarray) -> np.ndarray:
    """[L, N, k] -> [k, n]"""
    return np.ascontiguousarray(np.moveaxis(array, -1, 0)).reshape(array.shape[-1], array.shape[0] * array.shape[1])


def as_rows(values: np.ndarray, length: int) -> np.ndarray:
    """[n] -> [L, N]"""
    return values.reshape(length, -1)


Row = dict[str, float]
"""What one minibatch step gave, under metric names; and the flags `bad` and `empty`."""


OPINIONS = ("log_probs", "entropy", "values")
"""What a custom loss may give its slope by, each [L, N]; besides these, any weight by its name."""


@dataclass(frozen=True, slots=True)
class _View:
    """What the current weights say of some samples, each [n], and the way back from their actions."""

    said: Evaluation
    actions: ActionTerms


class MinibatchStep:
    """One optimiser step on one minibatch, or none at all where its loss or gradient is not finite."""

    def __init__(self, policy: NumpyPolicy, config: PPOConfig, network: FlatNetwork, adam: Adam) -> None:
        self._policy, self._config, self._network, self._adam = policy, config, network, adam
        self._log_std = network.weights.get(LOG_STD, np.zeros(0, network.parameters.dtype))
        self._squashes = policy.spec.config.action_bounds == "tanh"

    def __call__(self, samples: Samples, coefficients: LossCoefficients, learning_rate: float, losses: Sequence[CustomLoss]) -> Row:
        """Move the weights once and say what happened."""
        if self._config.normalize_advantages == "minibatch":
            samples.advantages[:] = normalize(samples.advantages, samples.valid)
        count = samples.count
        if self._config.gradient_accumulation == 1 and not losses:
            row, gradient = self._backward(samples, self._look(samples), coefficients, count), self._network.gradient
        else:
            row, gradient = self._add_up(samples, coefficients, count, losses)
        norm = math.sqrt(np.dot(gradient, gradient))
        row |= {"grad_norm": norm, "bad": float(not math.isfinite(row["loss"] + norm)), "empty": float(count == 0)}
        if not (row["bad"] or row["empty"]):
            limit = self._config.max_grad_norm
            self._adam.step(gradient, learning_rate, scale=1.0 if limit is None else min(1.0, limit / (norm + 1e-6)))
        return row

    def ratio_error(self, samples: Samples) -> float:
        """How far the probability ratios of valid samples are from 1."""
        error = np.abs(np.exp(self._look(samples).said.log_probs - samples.log_probs) - 1)
        worst = float(np.max(error if samples.valid is None else error * samples.valid))
        return worst if math.isfinite(worst) else float(np.finfo(error.dtype).max)

    def _look(self, samples: Samples) -> _View:
        """The way there: what the weights say of the samples."""
        outputs, normalized = self._network.over(len(samples.inputs)).forward(samples.inputs)
        log_std = np.clip(self._log_std, *TANH_LOG_STD_RANGE) if self._squashes else self._log_std
        actions = ActionTerms(self._policy.spec.actions, outputs, log_std, samples.mask, samples.choices, samples.gaussians)
        statistics = self._policy.statistics
        values = normalized * statistics.value_std + statistics.value_mean
        return _View(Evaluation(actions.log_probs, actions.entropy, values, values.dtype.type(statistics.value_std)), actions)

    def _backward(self, samples: Samples, view: _View, coefficients: LossCoefficients, count: int) -> Row:
        """Fill the network's gradient with that of PPO's loss over these samples, and say each term's share of them.

        Every term is a sum over valid samples divided by one count; so its slope by a sample is that sample's own, times `weight`.
        """
        c, said = coefficients, view.said
        share = said.values.dtype.type(1 / max(count, 1))
        log_ratio = said.log_probs - samples.log_probs  # [n], as all below
        ratio = np.exp(log_ratio)
        weight = np.full(len(ratio), share) if samples.valid is None else samples.valid * share
        surrogate, surrogate_slope = surrogate_and_slope(ratio, samples.advantages, c.clip_coef)
        errors, error_slope = value_errors_and_slope(said, samples, c)
        self._pull(
            samples,
            view,
            d_log_probs=-weight * surrogate_slope,
            d_entropy=-c.ent_coef * weight if c.ent_coef else None,
            d_values=c.vf_coef * weight * error_slope,
        )
        policy_loss = -float(np.dot(surrogate, weight))
        value_loss = float(np.dot(errors, weight))
        entropy = float(np.dot(said.entropy, weight))
        return {
            "loss": policy_loss + c.vf_coef * value_loss - c.ent_coef * entropy,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "approx_kl": float(np.dot(ratio - 1 - log_ratio, weight)),  # the k3 estimator: see `loss`
            "clip_fraction": float(np.dot(np.abs(ratio - 1) > c.clip_coef, weight)),
        }

    def _pull(self, samples: Samples, view: _View, *, d_log_probs: np.ndarray, d_entropy: np.ndarray | None, d_values: np.ndarray) -> None:
        """The way back: from slopes by log-prob, entropy and value, each [n], to the gradient of every parameter."""
        d_outputs, d_log_std = view.actions.slopes(d_log_probs, d_entropy)
        # V = std · output + mean, so the slope by the output is std times the slope by V.
        self._network.over(len(samples.inputs)).backward(d_outputs, d_values * self._policy.statistics.value_std)
        if len(self._log_std):
            if self._squashes:  # a log std that is held at its bound does not move
                low, high = TANH_LOG_STD_RANGE
                d_log_std = d_log_std * ((self._log_std >= low) & (self._log_std <= high))
            self._network.gradients[LOG_STD][:] = d_log_std

    def _add_up(self, samples: Samples, coefficients: LossCoefficients, count: int, losses: Sequence[CustomLoss]) -> tuple[Row, np.ndarray]:
        """The loss terms and the whole gradient, over micro-batches and custom losses: sums, because both are."""
        row: Row = {}
        total = np.zeros_like(self._network.gradient)
        customs = {loss.name: np.zeros_like(total) for loss in losses}
        for micro in micro_batches(samples, self._config.gradient_accumulation):
            view = self._look(micro)
            terms = self._backward(micro, view, coefficients, count)
            total += self._network.gradient
            for loss in losses:
                terms[f"loss/{loss.name}"], gradient = self._custom(loss, micro, view, micro.count / max(count, 1))
                terms["loss"] += terms[f"loss/{loss.name}"]
                customs[loss.name] += gradient
            row = {name: row.get(name, 0.0) + term for name, term in terms.items()}
        for name, gradient in customs.items():
            total += gradient
            row[f"grad_norm/{name}"] = math.sqrt(np.dot(gradient, gradient))
        return row, total

    def _custom(self, loss: CustomLoss, samples: Samples, view: _View, share: float) -> tuple[float, np.ndarray]:
        """A custom loss over these samples and its gradient by every parameter, both times `share`."""
        shaped = {name: as_rows(getattr(view.said, name), samples.length) for name in OPINIONS}
        said = Evaluation(**shaped, value_scale=view.said.value_scale)
        shape, dtype = said.values.shape, said.values.dtype
        value, slopes = _checked(loss, loss(self._policy, as_minibatch(samples), said), self._network, shape)
        by = [share * np.asarray(slopes.get(name, np.zeros(shape)), dtype).reshape(-1) for name in OPINIONS]
        self._pull(samples, view, d_log_probs=by[0], d_entropy=by[1], d_values=by[2])
        gradient = self._network.gradient.copy()
        parts = self._network.views(gradient)
        for name in slopes.keys() - set(OPINIONS):
            parts[name] += share * np.asarray(slopes[name], gradient.dtype)
        return share * value, gradient


def _checked(loss: CustomLoss, answer: Any, network: FlatNetwork, shape: tuple[int, ...]) -> tuple[float, Mapping[str, np.ndarray]]:
    """What a custom loss returned, refused where it is not its value with its slopes."""
    wanted = f"(value, gradients), gradients by {', '.join(OPINIONS)} {list(shape)} or by a weight's name; NumPy cannot derive them itself"
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping) and np.ndim(answer[0]) == 0):
        raise ConfigError(f"with --backend numpy the custom loss {loss.name} must return {wanted}; or use --backend torch")
    value, slopes = answer
    shapes = dict.fromkeys(OPINIONS, shape) | {name: view.shape for name, view in network.weights.items()}
    for name, slope in slopes.items():
        if name not in shapes:
            raise ConfigError(f"the custom loss {loss.name} gives a gradient by {name!r}; it may be by {', '.join(shapes)}")
        if np.shape(slope) != shapes[name]:
            raise ConfigError(f"the custom loss {loss.name} gives a gradient by {name} of shape {np.shape(slope)}, not {shapes[name]}")
    return float(value), slopes


class NumpyOptimizer(BaseLearner):
    """Learns a `NumpyPolicy`: an MLP over any observation and action space."""

    device = "cpu"

    def __init__(
        self,
        policy: Any,
        config: PPOConfig | None = None,
        *,
        seed: int = 0,
        total_timesteps: int | None = None,
        dump_directory: str | Path | None = None,
    ) -> None:
        super().__init__(config, seed=seed, total_timesteps=total_timesteps, dump_directory=dump_directory)
        if not isinstance(policy, NumpyPolicy):
            raise ConfigError(f"the numpy backend learns MLP policies of inchworm; {type(policy).__name__} is none: use --backend torch")
        if policy.spec.memory is not None:
            raise ConfigError(f"the numpy backend does not learn memory (policy.kind={policy.spec.config.kind}): use --backend torch")
        if policy.central_critic:
            raise ConfigError("the numpy backend does not learn a central critic (policy.central_critic=true): use --backend torch")
        self.policy: NumpyPolicy = policy
        weights = policy.get_weights()
        self._network = FlatNetwork(policy.spec, np.dtype(weights["actor.head.weight"].dtype))
        self.optimizer = Adam(self._network.parameters, eps=self.config.adam_eps, weight_decay=self.config.weight_decay)
        self._step = MinibatchStep(policy, self.config, self._network, self.optimizer)

    def _look(self, rollout: Rollout) -> tuple[Rollout, Advantages]:
        safe = harmless(rollout)
        return safe, compute_advantages(self.policy, safe, self.config)

    def _sequences(self, rollout: Rollout, advantages: Advantages, length: int, *, successors: bool) -> RolloutSamples:
        if self.config.normalize_advantages == "batch":
            scaled = normalize(advantages.advantages, rollout.valid)
            advantages = Advantages(advantages.values, advantages.next_values, scaled, advantages.returns)
        self._network.load(self.policy.get_weights())
        return RolloutSamples(self.policy, rollout, advantages, length, successors=successors)

    def _shuffled(self, sequences: RolloutSamples, num_minibatches: int, permutation: np.ndarray) -> list[Samples]:
        return sequences.shuffled(num_minibatches, permutation)

    def _steps(
        self, minibatches: Sequence[Samples], coefficients: LossCoefficients, rate_factor: float, losses: tuple[CustomLoss, ...]
    ) -> Table:
        rows = []
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # the step itself looks whether numbers are finite
            for samples in minibatches:
                if losses:
                    self._hand_over()  # whoever brings a loss may look at the policy
                rows.append(self._step(samples, coefficients, self.config.learning_rate * rate_factor, losses))
        return dict(zip(rows[0], np.array([list(row.values()) for row in rows]).T))

    def _hand_over(self) -> None:
        self.policy.set_weights(self.policy.get_weights() | self._network.weights)

    def _ratio_error(self, minibatch: Samples) -> float:
        with np.errstate(over="ignore", invalid="ignore"):
            return self._step.ratio_error(minibatch)

    def _whole(self, minibatch: Samples) -> Minibatch:
        return as_minibatch(minibatch)

    def _to_host(self, array: np.ndarray) -> np.ndarray:
        return array

    def _statistics_pending(self) -> bool:
        return self.policy.statistics.pending

    def _validate(self, rollout: Rollout) -> None:
        rollout.validate(self.policy.spec.observation_space, self.policy.spec.action_space)

    def seams(self) -> list[Seam]:
        """Forward, backward and Adam are functions of their own here."""
        step = self._step
        return [*super().seams(), ("forward", step, "_look"), ("backward", step, "_backward"), ("optimiser", self.optimizer, "step")]

    def _moments(self) -> dict[str, Any]:
        adam = self.optimizer
        named = {name: self._network.views(vector.copy()) for name, vector in (("mean", adam.mean), ("square", adam.square))}
        return {"step": adam.steps, **named}

    def _load_moments(self, moments: Mapping[str, Any]) -> None:
        adam = self.optimizer
        adam.steps = int(moments["step"])
        for name, vector in (("mean", adam.mean), ("square", adam.square)):
            differing = sorted(set(moments[name]) ^ set(self._network.weights))
            if differing:
                raise InchwormError(f"this optimiser state does not fit the policy: {differing} are only on one side")
            for weight, part in self._network.views(vector).items():
                if np.shape(moments[name][weight]) != part.shape:  # assigning would spread a smaller one over the larger
                    shapes = f"{np.shape(moments[name][weight])}; the policy needs {part.shape}"
                    raise InchwormError(f"the optimiser's {name} of {weight} has shape {shapes}")
                part[...] = moments[name][weight]
