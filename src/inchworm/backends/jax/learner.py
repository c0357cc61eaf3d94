"""Step 9 of 9: the learner of JAX policies. One compiled call takes all steps of an update (`update`); here is what surrounds it.

The host draws the order of the samples, as in every backend, passes a rollout's arrays, and reads weights and metrics once.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inchworm.backends.corrections import OldData
from inchworm.backends.custom_losses import CustomLoss
from inchworm.backends.jax import backend
from inchworm.backends.jax.loss import normalize
from inchworm.backends.jax.optimizer import State, check_kind, first_state, join_vector, moments_to_dict, split_vector, state_from_dict
from inchworm.backends.jax.policy import JaxPolicy
from inchworm.backends.jax.samples import steps_of
from inchworm.backends.jax.update import Carry, Metrics, Program, compiled_update, settings_array
from inchworm.backends.learner import ALL_FROZEN, EMPTY, RATIO_TOLERANCE, BaseLearner, StepMetrics, summary
from inchworm.config.sections import PPOConfig
from inchworm.core.errors import ConfigError
from inchworm.core.types import Advantages, Minibatch, ProfilePoint, Tree
from inchworm.rollout.rollout import Rollout
from inchworm.rollout.sequences import (
    fill_invalid_rows,
    lane_states,
    minibatch_places,
    num_sequences,
    select_sequences,
    sequence_states,
    split_into_sequences,
    split_valid,
)


class JaxOptimizer(BaseLearner):
    """Learns a `JaxPolicy` from rollouts, wherever they were collected; an update is one compiled function."""

    def __init__(
        self,
        policy: Any,
        config: PPOConfig | None = None,
        *,
        device: str | None = None,
        seed: int = 0,
        total_timesteps: int | None = None,
        dump_directory: str | Path | None = None,
    ) -> None:
        super().__init__(config, seed=seed, total_timesteps=total_timesteps, dump_directory=dump_directory)
        if not isinstance(policy, JaxPolicy):
            raise ConfigError(f"the jax backend learns built-in policies of its own, not {type(policy).__name__}: use --backend torch")
        check_settings(self.config, device)
        backend.use_compilation_cache()
        self.policy: JaxPolicy = policy
        self.spec, self.statistics = policy.spec, policy.statistics
        self.shapes = {name: shape for name, shape in policy.spec.layers.items() if name not in self.frozen}
        """The shapes of the weights that learn, in the order of the flat vector."""
        if not self.shapes:
            raise ConfigError(ALL_FROZEN)
        self.optimizer = self.config.optimizer
        """The name of the optimiser; its state is in `moments()`."""
        size = sum(int(np.prod(shape)) for shape in self.shapes.values())
        self._state = first_state(self.optimizer, size, policy.dtype)  # on the device from the second update on
        self._published: Mapping[str, np.ndarray] | None = None  # the policy's weights that its first row was made from, or became
        self._programs: dict[Any, Program] = {}

    @property
    def device(self) -> str:
        """The device that computes."""
        return str(jax.devices()[0].platform)

    def program(self, rollout_steps: int, losses: tuple[CustomLoss, ...] = ()) -> Program:
        """What decides the compiled update of rollouts with so many steps."""
        length = self.config.sequence_length_for(rollout_steps, memory=self.policy.spec.memory is not None)
        key = (length, *[id(loss.function) for loss in losses])
        if key not in self._programs:
            self._programs[key] = Program(self.policy, self.config, self.frozen, losses, length)
        return self._programs[key]

    def carry(self) -> Carry:
        """Weights, the optimiser's state and counters as `update` takes them."""
        weights = self.policy.host_weights
        if weights is not self._published:
            rows = np.array(self._state.rows)
            rows[0] = join_vector(weights, self.shapes)
            self._published, self._state = weights, State(rows, self._state.steps)
        frozen = {name: weights[name] for name in self.frozen if name in weights}
        return Carry(self._state, np.asarray(self._guard.bad_steps, np.int32), frozen)

    def take_over(self, carry: Carry) -> None:
        """Adopt the weights and the optimiser's state after an update: the one transfer of weights to the host."""
        trained = split_vector(np.asarray(carry.state.rows)[0], self.shapes)
        self.policy.adopt({**self.policy.host_weights, **trained})
        self._published, self._state = self.policy.host_weights, carry.state

    def adopt(self, carry: Carry, stream: np.random.Generator, total: int, epochs: Sequence[int], steps: int, *, drawn: int) -> None:
        """Take over what a compiled loop computed: an update for each of `epochs`, its number of epochs, on `steps` env steps each.

        `stream` is the shuffle stream before the loop, for which orders of `total` sequences of `drawn` updates were drawn.
        """
        self.take_over(carry)
        self._guard.bad_steps = int(carry.bad_steps)
        used = sum(max(1, count) for count in epochs)
        if used < drawn * self.config.update_epochs:
            self._stream = stream
            for _ in range(used):
                stream.permutation(total)
        self._history.clear()  # a loop keeps no weights but the last
        self.policy.policy_version += len(epochs)
        self.updates += len(epochs)
        self.env_steps += len(epochs) * steps

    def copy_stream(self) -> np.random.Generator:
        """A copy of the shuffle stream, at the same position."""
        return copy.deepcopy(self._stream)

    def set_stream(self, stream: np.random.Generator) -> None:
        """Continue the shuffle stream from another position."""
        self._stream = stream

    def settings(self) -> np.ndarray:
        """The numbers of the next update, after schedules."""
        return settings_array(self.config, self._coefficients(), self.learning_rate, self.policy.dtype)

    def permutations(self, total: int) -> np.ndarray:
        """The order of the sequences in every epoch [epochs, N] i32, from the shuffle stream."""
        return np.stack([self._stream.permutation(total) for _ in range(self.config.update_epochs)]).astype(np.int32)

    def log_probs(self, rollout: Rollout) -> np.ndarray:
        """The log-probs [T, B] of a rollout's actions."""
        return backend.log_probs(self.policy, rollout, self.config)

    def learn(
        self, rollout: Rollout, losses: tuple[CustomLoss, ...], *, on_policy: bool, old: OldData | None = None
    ) -> tuple[dict[str, float], Advantages]:
        """Advantages and all steps, in one compiled call."""
        filled = fill_invalid_rows(rollout if old is None or old.log_probs is None else replace(rollout, log_probs=old.log_probs))
        if self.policy.statistics.pending:  # it was collected without them: it only initialises them
            return {**EMPTY, "warm_up": 1.0}, backend.compute_advantages(self.policy, filled, self.config)
        program, before = self.program(rollout.num_steps, losses), self._stream.bit_generator.state
        total = num_sequences(rollout.num_steps, rollout.num_lanes, program.length)
        steps = steps_of(program.spec, filled, program.length, raw_fields(filled, losses) if losses else None)
        if old is not None:
            corrects = self.config.correction == "vtrace"
            steps = steps._replace(log_ratios=old.log_ratios if corrects else (), weights=() if old.weights is None else old.weights)
        permutations = self.permutations(total)
        with self.policy.precision():
            update = compiled_update(program, program.length * -(-total // self.config.minibatches_for(total, program.length)))
            weights = np.array([loss.weight for loss in losses], self.policy.dtype)
            settings = np.concatenate([self.settings(), weights])
            carry, metrics, estimates = update(program, self.carry(), self.policy.scales, steps, permutations, settings)
            metrics, estimates = jax.device_get((metrics, estimates))
        advantages = Advantages(*estimates)
        self.take_over(carry)
        epochs = max(1, int(metrics.epochs))
        if epochs < self.config.update_epochs:  # the shuffle stream is left as if only these had drawn from it, as in every backend
            self._stream.bit_generator.state = before
            for _ in range(epochs):
                self._stream.permutation(total)
        for order in permutations[:epochs]:
            self.tell_order(order.astype(np.int64), self.config.minibatches_for(total, program.length))
        return self._report(program, metrics, filled, advantages, permutations, on_policy and old is None), advantages

    def _report(
        self, program: Program, metrics: Metrics, rollout: Rollout, advantages: Advantages, permutations: np.ndarray, on_policy: bool
    ) -> dict[str, float]:
        """The metrics of the epochs that were run; bad minibatches are counted, and too many in a row end the run."""
        if on_policy and float(metrics.ratio_error) > RATIO_TOLERANCE:
            self._warn_of_ratio_error(float(metrics.ratio_error), None)
        for rows, permutation in zip(metrics.table[: int(metrics.epochs)], permutations):
            epoch = dict(zip(program.columns, rows.T))
            minibatches = [(program, rollout, advantages, permutation, index) for index in range(len(epoch["bad"]))]
            self._guard.watch(epoch, minibatches, self.host_minibatch)
        return self.epoch_metrics(program, metrics)

    def epoch_metrics(self, program: Program, metrics: Metrics) -> dict[str, float]:
        """The metrics of the epochs that were run; an adaptive learning rate follows them."""
        first = {"ratio_error": float(metrics.ratio_error), "effective_sample_size": float(metrics.effective_sample_size)}
        self.epoch = int(metrics.epochs)
        if not self.epoch:
            return {**EMPTY, **first}
        epochs: list[StepMetrics] = [dict(zip(program.columns, rows.T)) for rows in metrics.table[: self.epoch]]
        if program.adaptive:
            for epoch in epochs:
                self._adapt_learning_rate(summary([epoch])["approx_kl"])
        return {**summary(epochs), **first, "epochs": float(self.epoch)}

    def host_minibatch(self, minibatch: tuple[Program, Rollout, Advantages, np.ndarray, int]) -> Minibatch:
        """One minibatch of an epoch as NumPy arrays: it is selected again, from the rollout."""
        program, rollout, found, permutation, index = minibatch
        length, normalization = program.length, self.config.normalize_advantages
        advantages = np.where(rollout.valid, found.advantages, 0)
        if normalization == "batch":
            advantages = np.asarray(normalize(jnp.asarray(advantages), jnp.asarray(rollout.valid)))
        steps = raw_fields(rollout, program.losses) | {
            "log_probs": rollout.log_probs,
            "advantages": np.where(rollout.valid, advantages, 0),
            "returns": np.where(rollout.valid, found.returns, found.values),
            "values": found.values,
        }
        places, real = minibatch_places(len(permutation), self.config.minibatches_for(len(permutation), length))
        columns = permutation[places[index]]
        chosen = select_sequences(split_into_sequences(steps, length), columns)
        valid = split_valid(np.array(rollout.valid), length)[:, columns] & real[index]
        if normalization == "minibatch":
            chosen["advantages"] = np.asarray(normalize(jnp.asarray(chosen["advantages"]), jnp.asarray(valid)))
        states = sequence_states(rollout.policy_state, rollout.num_steps, length, rollout.state_every)
        return Minibatch(**chosen, valid=valid, policy_state=jax.tree.map(lambda leaf: leaf[columns], states))

    def profile_points(self) -> list[ProfilePoint]:
        """An update is one section: it is one compiled call."""
        return [("compiled update", self, "learn")]

    def to_host(self, array: Any) -> np.ndarray:
        """The array in NumPy."""
        return np.asarray(array)

    def moments(self) -> dict[str, Any]:
        """The optimiser's state by the names of the weights that are trained."""
        return moments_to_dict(self.optimizer, self._state, self.shapes)

    def load_moments(self, moments: Mapping[str, Any]) -> None:
        """Restore the optimiser's state."""
        self._state = state_from_dict(self.optimizer, moments, self.shapes, self.policy.dtype)
        self._published = None


def check_settings(config: PPOConfig, device: str | None) -> None:
    """Refuse, before anything is compiled, what this backend cannot do."""
    check_kind(config.optimizer)
    if config.compile == "on":
        raise ConfigError("ppo.compile=on compiles torch's step, and run.backend=jax is always compiled; set ppo.compile=off")
    platform = jax.devices()[0].platform
    if device not in (None, "auto", platform):
        raise ConfigError(f"run.device={device!r}: JAX computes on {platform} here; set run.device=auto, and choose with JAX_PLATFORMS")


def raw_fields(rollout: Rollout, losses: Sequence[CustomLoss]) -> dict[str, Tree]:
    """The fields of a minibatch that only custom losses read, each leaf [T, B, …]; successors are made if one asks for them."""
    successors = any("next_observations" in (*loss.arguments, *loss.keywords) for loss in losses)
    return {
        "observations": rollout.observations,
        "actions": rollout.actions,
        "rewards": rollout.rewards,
        "terminated": rollout.terminated,
        "truncated": rollout.truncated,
        "episode_starts": rollout.episode_starts,
        "next_observations": rollout.next_observations if successors else (),
        "global_state": lane_states(rollout),
        "extras": rollout.extras,
    }
