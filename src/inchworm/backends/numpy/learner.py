"""Step 9 of 9 in NumPy: the gradient steps of PPO, with every gradient written out. The place to read the algorithm.

A minibatch goes through `MinibatchStep` from top to bottom: forward pass, loss and its gradients (`loss`), backward pass
(`distributions`, `network`), clipping, `optimizer`. What comes before and after, in the order of an update, is in `backends/learner`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optree

from inchworm.backends.custom_losses import CustomLoss, no_gradient
from inchworm.backends.learner import ALL_FROZEN, MinibatchLearner, StepMetrics
from inchworm.backends.numpy import backend
from inchworm.backends.numpy.distributions import ActionTerms
from inchworm.backends.numpy.gae import compute_advantages
from inchworm.backends.numpy.loss import LossGradients, Samples, normalize, ppo_loss
from inchworm.backends.numpy.network import FlatNetwork
from inchworm.backends.numpy.optimizer import Optimizer, make_optimizer
from inchworm.backends.numpy.policy import NumpyPolicy, encode_legal, flatten_actions
from inchworm.config.sections import PPOConfig
from inchworm.core.errors import ConfigError, describe_error
from inchworm.core.protocols import Policy
from inchworm.core.types import Advantages, Evaluation, LossCoefficients, Minibatch, ProfilePoint, Tree
from inchworm.policy.spec import LOG_STD, TANH_LOG_STD_RANGE
from inchworm.rollout.rollout import Rollout
from inchworm.rollout.sequences import (
    fill_invalid_rows,
    minibatch_fields,
    minibatch_places,
    select_sequences,
    split_into_sequences,
    split_valid,
)


class RolloutSamples:
    """A whole rollout as samples, in the order of its sequences."""

    def __init__(self, policy: NumpyPolicy, rollout: Rollout, advantages: Advantages, length: int, *, successors: bool) -> None:
        layout, dtype = policy.spec.actions, advantages.values.dtype
        steps = minibatch_fields(rollout, advantages, np.where, successors=successors)
        self._steps = split_into_sequences(steps, length)  # every leaf [L, N, …]
        self.valid = split_valid(rollout.valid, length)  # [L, N]
        self._length, self._all_valid = length, bool(self.valid.all())
        observations = self._steps["observations"]
        choices, gaussians = flatten_actions(layout, self._steps["actions"], 2)
        mask = encode_legal(policy.spec, observations, 2)
        self._inputs = policy.encode(observations, 2)[0].astype(dtype, copy=False)  # [n, F]
        self._choices, self._gaussians = _columns(choices), _columns(gaussians).astype(dtype)
        self._mask = None if mask is None else _columns(mask)
        scalars = [self._steps[name].reshape(-1) for name in ("log_probs", "advantages", "returns", "values")]
        self._scalars = np.stack(scalars).astype(dtype, copy=False)  # [4, n]

    def shuffled(self, num_minibatches: int, permutation: np.ndarray) -> list[Samples]:
        """One epoch: every sequence in exactly one minibatch, in the order of `permutation`; padding is marked invalid."""
        places, real = minibatch_places(len(permutation), num_minibatches)
        columns = permutation[places]  # [minibatches, N]
        step_starts = np.arange(self._length)[:, None] * self.valid.shape[1]  # [L, 1] where the samples of each step begin
        order = (columns[:, None] + step_starts).reshape(-1)  # [all samples], minibatch after minibatch
        valid = None
        if not (self._all_valid and real.all()):
            valid = self.valid.reshape(-1)[order] & np.repeat(real[:, None], self._length, 1).reshape(-1)
        log_probs, advantages, returns, values = self._scalars.take(order, 1)
        # One gather for the epoch; minibatches are views of it.
        epoch = Samples(
            inputs=self._inputs.take(order, 0),
            choices=self._choices.take(order, 1),
            gaussians=self._gaussians.take(order, 1),
            mask=None if self._mask is None else self._mask.take(order, 1),
            log_probs=log_probs,
            advantages=advantages,
            returns=returns,
            values=values,
            valid=valid,
            length=self._length,
            minibatch=partial(self._minibatch, columns.reshape(-1), real.reshape(-1)),
        )
        size = columns.shape[1] * self._length
        return [
            epoch.part(slice(index * size, (index + 1) * size), partial(self._minibatch, chosen, flags))
            for index, (chosen, flags) in enumerate(zip(columns, real))
        ]

    def _minibatch(self, columns: np.ndarray, real: np.ndarray) -> Minibatch:
        return Minibatch(**select_sequences(self._steps, columns), valid=self.valid[:, columns] & real)


def _columns(array: np.ndarray) -> np.ndarray:
    """[L, N, k] -> [k, n]"""
    return np.ascontiguousarray(np.moveaxis(array, -1, 0)).reshape(array.shape[-1], array.shape[0] * array.shape[1])


def micro_batches(samples: Samples, pieces: int) -> Iterator[Samples]:
    """A minibatch in `pieces` parts of whole sequences, for gradient accumulation."""
    if pieces == 1:
        yield samples
        return
    width = len(samples.returns) // samples.length
    whole = samples.minibatch()
    fields: Tree = {field.name: getattr(whole, field.name) for field in dataclasses.fields(whole)}
    for start, stop in pairwise(np.linspace(0, width, min(pieces, width) + 1).astype(int)):
        chosen = (np.arange(samples.length)[:, None] * width + np.arange(start, stop)).reshape(-1)
        sequences = Minibatch(**optree.tree_map(lambda leaf, part=slice(start, stop): leaf[:, part], fields))
        yield samples.part(chosen, lambda sequences=sequences: sequences)  # type: ignore[misc]


def as_minibatch(samples: Samples) -> Minibatch:
    """The same samples as [L, N] sequences, with advantages as the step has normalised them."""
    return dataclasses.replace(samples.minibatch(), advantages=samples.advantages.reshape(samples.length, -1))


class ForwardPass(NamedTuple):
    """The current policy's outputs for some samples, each [n], and how to backpropagate through its action distribution."""

    evaluation: Evaluation
    actions: ActionTerms


OUTPUTS = ("log_probs", "entropy", "values")
"""The outputs [L, N] that a custom loss may return its gradient by; besides these, any weight by its name."""


class MinibatchStep:
    """One optimiser step on one minibatch, or none where its loss or gradient is not finite or no sample is valid."""

    def __init__(
        self, policy: NumpyPolicy, config: PPOConfig, network: FlatNetwork, optimizer: Optimizer, frozen: Set[str] = frozenset()
    ) -> None:
        self._policy, self._config, self._network, self._optimizer = policy, config, network, optimizer
        marks = np.zeros(len(network.parameters), np.bool_)
        for name in frozen & network.weights.keys():
            network.views(marks)[name][...] = True
        self._frozen = np.flatnonzero(marks)  # places of the frozen weights in the flat vectors
        self._log_std = network.weights.get(LOG_STD, np.zeros(0, network.parameters.dtype))
        self._squashes = policy.spec.config.action_bounds == "tanh"

    def __call__(
        self, samples: Samples, coefficients: LossCoefficients, learning_rate: float, losses: Sequence[CustomLoss]
    ) -> dict[str, float]:
        """Update the weights once; return the metrics of the step, and the flags `bad` and `empty`."""
        if self._config.normalize_advantages == "minibatch":
            samples.advantages[:] = normalize(samples.advantages, samples.valid)
        count = samples.count
        if self._config.gradient_accumulation == 1 and not losses:
            terms = self.loss_and_gradient(samples, self.forward(samples), coefficients, count)
            gradient = self._network.gradient
        else:
            terms, gradient = self._accumulate(samples, coefficients, count, losses)
        if len(self._frozen):
            gradient[self._frozen] = 0
        norm = math.sqrt(np.dot(gradient, gradient))
        bad, empty = not math.isfinite(terms["loss"] + norm), count == 0
        if not (bad or empty):
            limit, kept = self._config.max_grad_norm, self._network.parameters[self._frozen]
            self._optimizer.step(gradient, learning_rate, scale=1.0 if limit is None else min(1.0, limit / (norm + 1e-6)))
            self._network.parameters[self._frozen] = kept  # no weight decay either
        return {**terms, "grad_norm": norm, "bad": float(bad), "empty": float(empty)}

    def forward(self, samples: Samples) -> ForwardPass:
        """Run the network on the samples."""
        outputs, normalized = self._network.over(len(samples.inputs)).forward(samples.inputs)
        log_std = np.clip(self._log_std, *TANH_LOG_STD_RANGE) if self._squashes else self._log_std
        actions = ActionTerms(self._policy.spec.actions, outputs, log_std, samples.mask, samples.choices, samples.gaussians)
        statistics = self._policy.statistics
        values = normalized * statistics.value_std + statistics.value_mean
        return ForwardPass(Evaluation(actions.log_probs, actions.entropy, values, values.dtype.type(statistics.value_std)), actions)

    def loss_and_gradient(self, samples: Samples, forward: ForwardPass, coefficients: LossCoefficients, count: int) -> dict[str, float]:
        """Fill the network's gradient with that of PPO's loss over these samples, and return the loss terms."""
        terms, gradients = ppo_loss(forward.evaluation, samples, coefficients, count)
        self._backward(samples, forward, gradients)
        return terms

    def _backward(self, samples: Samples, forward: ForwardPass, gradients: LossGradients) -> None:
        """Backpropagate the loss's gradients by log-prob, entropy and value into the gradient of every parameter."""
        d_outputs, d_log_std = forward.actions.backward(gradients.log_probs, gradients.entropy)
        # V = std · output + mean, so the gradient by the output is std times the gradient by V.
        self._network.over(len(samples.inputs)).backward(d_outputs, gradients.values * self._policy.statistics.value_std)
        if len(self._log_std):
            if self._squashes:  # a log std that is clipped to its bound has no gradient
                low, high = TANH_LOG_STD_RANGE
                d_log_std = d_log_std * ((self._log_std >= low) & (self._log_std <= high))
            self._network.gradients[LOG_STD][:] = d_log_std

    def _accumulate(
        self, samples: Samples, coefficients: LossCoefficients, count: int, losses: Sequence[CustomLoss]
    ) -> tuple[dict[str, float], np.ndarray]:
        """Sum loss terms and gradients over micro-batches and custom losses."""
        row: dict[str, float] = {}
        total = np.zeros_like(self._network.gradient)
        custom_gradients = {loss.name: np.zeros_like(total) for loss in losses}
        for micro in micro_batches(samples, self._config.gradient_accumulation):
            forward, share = self.forward(micro), micro.count / max(count, 1)
            terms = self.loss_and_gradient(micro, forward, coefficients, count)
            total += self._network.gradient
            shaped = {name: getattr(forward.evaluation, name).reshape(micro.length, -1) for name in OUTPUTS}  # [L, N]
            evaluation = Evaluation(**shaped, value_scale=forward.evaluation.value_scale)
            shape, dtype = evaluation.values.shape, evaluation.values.dtype
            for loss in losses:
                value, gradients = _call(loss, self._policy, as_minibatch(micro), evaluation, self._network)
                by = [share * np.asarray(gradients.get(name, np.zeros(shape)), dtype).reshape(-1) for name in OUTPUTS]
                self._backward(micro, forward, LossGradients(*by))
                for name in gradients.keys() - set(OUTPUTS):
                    self._network.gradients[name] += share * np.asarray(gradients[name], total.dtype)
                custom_gradients[loss.name] += loss.weight * self._network.gradient
                terms[f"loss/{loss.name}"] = loss.weight * share * value
                terms["loss"] += loss.weight * share * value
            row = {name: row.get(name, 0.0) + term for name, term in terms.items()}
        for name, gradient in custom_gradients.items():
            gradient[self._frozen] = 0
            total += gradient
            row[f"grad_norm/{name}"] = math.sqrt(np.dot(gradient, gradient))
        return row, total


def _call(
    loss: CustomLoss, policy: Policy, minibatch: Minibatch, evaluation: Evaluation, network: FlatNetwork
) -> tuple[float, Mapping[str, np.ndarray]]:
    """Call a custom loss and validate what it returned: its value, and its gradients by name."""
    shape = evaluation.values.shape
    wanted = (
        f"with run.backend=numpy a loss is given NumPy arrays and must return (value, gradients), gradients by {', '.join(OUTPUTS)} "
        f"{list(shape)} or by a weight's name; set run.backend=torch, which derives gradients itself, for one that is written for torch"
    )
    try:
        answer = loss(policy, minibatch, evaluation)
    except (AttributeError, TypeError) as error:  # what NumPy's arrays raise where a tensor is expected
        raise ConfigError(f"the custom loss {loss.name} raised {describe_error(error)}\n{wanted}") from error
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping) and np.ndim(answer[0]) == 0):
        raise ConfigError(f"the custom loss {loss.name} did not return its gradients; {wanted}")
    value, gradients = answer
    if not gradients:
        raise no_gradient(loss.name)
    shapes = dict.fromkeys(OUTPUTS, shape) | {name: view.shape for name, view in network.weights.items()}
    for name, gradient in gradients.items():
        if name not in shapes:
            raise ConfigError(f"the custom loss {loss.name} returned a gradient by {name!r}; valid names are {', '.join(shapes)}")
        if np.shape(gradient) != shapes[name]:
            raise ConfigError(
                f"the custom loss {loss.name} returned a gradient by {name} of shape {np.shape(gradient)}, not {shapes[name]}"
            )
    return float(value), gradients


class NumpyOptimizer(MinibatchLearner):
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
            raise ConfigError(f"the numpy backend learns MLP policies of inchworm, not {type(policy).__name__}: use --backend torch")
        if policy.spec.memory is not None:
            raise ConfigError(f"the numpy backend does not learn memory (policy.kind={policy.spec.config.kind}): use --backend torch")
        if policy.central_critic:
            raise ConfigError("the numpy backend does not learn a central critic (policy.central_critic=true): use --backend torch")
        self.policy: NumpyPolicy = policy
        self.spec, self.statistics = policy.spec, policy.statistics
        weights = policy.get_weights()
        self._network = FlatNetwork(policy.spec, np.dtype(weights["actor.head.weight"].dtype))
        self.optimizer = make_optimizer(self._network.parameters, self.config)
        if self.frozen >= self._network.weights.keys():
            raise ConfigError(ALL_FROZEN)
        self._step = MinibatchStep(policy, self.config, self._network, self.optimizer, self.frozen)

    def log_probs(self, rollout: Rollout) -> np.ndarray:
        """The log-probs [T, B] of a rollout's actions."""
        return backend.log_probs(self.policy, rollout, self.config)

    def critic_pass(self, rollout: Rollout, log_ratios: np.ndarray | None) -> tuple[Rollout, Advantages]:
        """Fill invalid rows and compute advantages."""
        filled = fill_invalid_rows(rollout)
        return filled, compute_advantages(self.policy, filled, self.config, log_ratios)

    def make_sequences(
        self, rollout: Rollout, advantages: Advantages, length: int, weights: np.ndarray | None = None, *, successors: bool
    ) -> RolloutSamples:
        """Load the current weights, and lay the rollout out as samples, with advantages normalised if that is per batch."""
        if self.config.normalize_advantages == "batch":
            advantages = dataclasses.replace(advantages, advantages=normalize(advantages.advantages, rollout.valid))
        if weights is not None:
            advantages = dataclasses.replace(advantages, advantages=advantages.advantages * weights)
        self._network.load(self.policy.get_weights())
        return RolloutSamples(self.policy, rollout, advantages, length, successors=successors)

    def shuffle(self, sequences: RolloutSamples, num_minibatches: int, permutation: np.ndarray) -> list[Samples]:
        """One epoch of minibatches."""
        return sequences.shuffled(num_minibatches, permutation)

    def take_steps(
        self, minibatches: Sequence[Samples], coefficients: LossCoefficients, rate_factor: float, losses: tuple[CustomLoss, ...]
    ) -> StepMetrics:
        """Take one step on each minibatch."""
        rows = []
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # the step checks for non-finite numbers itself
            for samples in minibatches:
                if losses:
                    self.publish_weights()  # a custom loss may read the policy
                rows.append(self._step(samples, coefficients, self.config.learning_rate * rate_factor, losses))
        return dict(zip(rows[0], np.array([list(row.values()) for row in rows]).T))

    def publish_weights(self) -> None:
        """Copy the flat network's weights into the policy."""
        self.policy.set_weights(self.policy.get_weights() | self._network.weights)

    def ratios(self, minibatch: Samples) -> np.ndarray:
        """The probability ratios [n] of the valid samples."""
        with np.errstate(over="ignore", invalid="ignore"):
            ratios: np.ndarray = np.exp(self._step.forward(minibatch).evaluation.log_probs - minibatch.log_probs)
        return ratios if minibatch.valid is None else ratios[minibatch.valid]

    def host_minibatch(self, minibatch: Samples) -> Minibatch:
        """The samples as [L, N] sequences."""
        return as_minibatch(minibatch)

    def to_host(self, array: np.ndarray) -> np.ndarray:
        """The array itself."""
        return array

    def profile_points(self) -> list[ProfilePoint]:
        """The sections of an update; forward pass, backward pass and optimiser are separate functions here."""
        step = self._step
        inside = [("forward", step, "forward"), ("backward", step, "loss_and_gradient"), ("optimiser", self.optimizer, "step")]
        return [*super().profile_points(), *inside]

    def moments(self) -> dict[str, Any]:
        """The optimiser's state by the names of the weights that are trained."""
        return self.optimizer.state_dict(self._trained_views)

    def load_moments(self, moments: Mapping[str, Any]) -> None:
        """Restore the optimiser's state."""
        self.optimizer.load_state_dict(moments, self._trained_views)

    def _trained_views(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        return {name: view for name, view in self._network.views(vector).items() if name not in self.frozen}
