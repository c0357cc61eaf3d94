"""Step 9 of 9 in NumPy: the gradient steps that draw a policy up to a rollout, with gradients by hand. No torch anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from inchworm.backends.custom_losses import CustomLoss
from inchworm.backends.guard import Table
from inchworm.backends.learner import BaseLearner
from inchworm.backends.numpy.adam import Adam
from inchworm.backends.numpy.gae import compute_advantages
from inchworm.backends.numpy.loss import LossCoefficients, normalize
from inchworm.backends.numpy.minibatches import RolloutSamples, Samples, as_minibatch
from inchworm.backends.numpy.network import FlatNetwork
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.backends.numpy.step import MinibatchStep
from inchworm.config import PPOConfig
from inchworm.errors import ConfigError, InchwormError
from inchworm.rollout.living import harmless
from inchworm.rollout.rollout import Rollout
from inchworm.types import Advantages, Minibatch, Seam


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
