"""Steps 3 to 9 of 9 as one compiled program: collect and learn, for as many iterations as are asked for.

The number of iterations is an argument of the program, so that one compilation serves a whole run, and how a run is divided into calls
changes no bit of it. Whatever the iterations need from the host comes in as arrays: the orders of the samples, drawn from the learner's
stream as in every backend, and the settings after schedules.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from inchworm.backends.jax.learner import JaxOptimizer
from inchworm.backends.jax.native import NativeEnv
from inchworm.backends.jax.network import Scales
from inchworm.backends.jax.scan import ScanState, scan_rollout, steps_on_device
from inchworm.backends.jax.scan_collector import ScanCollector
from inchworm.backends.jax.update import Carry, Metrics, Program, Settings, update
from inchworm.collect.collector import RECENT_EPISODES
from inchworm.config.sections import TrainingConfig
from inchworm.core.types import Iteration
from inchworm.rollout.sequences import num_sequences

CALL_SECONDS = 0.5
"""How long a call should take: Ctrl-C is answered, and progress shown, between two calls."""
MOST_ITERATIONS = 64
MOST_ROWS = 2**20
"""The most iterations of a call, and the most rows of all of them: what each shows of its episodes is kept until the call is over."""


class FusedState(NamedTuple):
    """All that an iteration changes: arrays only."""

    scan: ScanState
    carry: Carry


class Report(NamedTuple):
    """What the host gets of an iteration; stacked, a leading axis of the call's iterations."""

    table: Array
    """`Metrics.table`"""
    numbers: Array
    """The other fields of `Metrics` in order, and the explained variance. Packed, because every array is a kernel to compile."""
    returns: Array
    """[T, B] f32: of the episodes that ended with this step."""
    lengths: Array
    """[T, B] i32: the same; 0 where none ended."""


class FusedProgram(NamedTuple):
    """What decides the program of an iteration."""

    env: NativeEnv
    learning: Program
    num_steps: int


def run_iteration(
    program: FusedProgram, state: FusedState, scales: Scales, lanes: Any, permutations: Array, settings: Array
) -> tuple[FusedState, Report, Array]:
    """One iteration: collect, learn. The last result tells whether all numbers are fine; else the state must not be kept."""
    learning = program.learning
    params = state.carry.params(learning)
    scan, scanned = scan_rollout(program.env, learning.spec, program.num_steps, params, scales, state.scan, lanes)
    steps = steps_on_device(learning.spec, scanned, learning.length)
    carry, metrics, estimates = update(learning, state.carry, scales, steps, permutations, settings)
    finite = jnp.isfinite(carry.weights).all() & jnp.isfinite(steps.rewards).all() & jnp.isfinite(steps.flat).all()
    errors = estimates.returns - estimates.values
    variance, unexplained = (jnp.square(array - array.mean()).mean() for array in (estimates.returns, errors))
    explained = jnp.where(variance > 0, 1 - unexplained / jnp.where(variance > 0, variance, 1), 0)
    numbers = jnp.stack([jnp.asarray(number, metrics.table.dtype) for number in (*metrics[1:], explained)])
    report = Report(metrics.table, numbers, scanned.returns, jnp.where(scanned.ended, scanned.lengths, 0))
    return FusedState(scan, carry), report, finite & ~metrics.stopped


def run_iterations(
    program: FusedProgram, state: FusedState, scales: Scales, lanes: Any, permutations: Array, settings: Array, count: Any
) -> tuple[FusedState, Report, Array]:
    """The first `count` iterations for which there are permutations [M, epochs, N] and settings [M, …].

    Stops before an iteration whose numbers are not finite. Returns the state after the last good one, the reports of all [M, …], and the
    number of good ones.
    """
    iterate = partial(run_iteration, program)
    shapes = jax.eval_shape(iterate, state, scales, lanes, permutations[0], settings[0])[1]
    nothing: Report = jax.tree.map(lambda leaf: jnp.zeros((permutations.shape[0], *leaf.shape), leaf.dtype), shapes)

    def advance(loop: tuple[FusedState, Report, Array, Array]) -> tuple[FusedState, Report, Array, Array]:
        before, reports, number, _ = loop
        after, report, fine = iterate(before, scales, lanes, permutations[number], settings[number])
        kept: FusedState = lax.cond(fine, lambda: after, lambda: before)
        reports = jax.tree.map(lambda whole, one: lax.dynamic_update_index_in_dim(whole, one, number, 0), reports, report)
        return kept, reports, number + fine, fine

    start = (state, nothing, jnp.zeros((), jnp.int32), jnp.ones((), bool))
    end, reports, number, _ = lax.while_loop(lambda loop: (loop[2] < count) & loop[3], advance, start)
    return end, reports, number


def why_not_fused(policy: Any, collector: Any, learner: Any) -> str | None:
    """Why collect and learn cannot be one program, in a few words; None if they can."""
    if not isinstance(collector, ScanCollector) or not isinstance(learner, JaxOptimizer):
        return "the environments are stepped from the host"
    if policy.statistics.parts or learner.config.scale_rewards:
        return "normalisers and the scale of rewards are moved on the host"
    return None


class FusedTraining:
    """Iterations of a run as one program; called by the training loop for as many as may be computed together.

    It moves the collector's and the learner's state, so that either can also be used alone between two calls.
    """

    def __init__(self, collector: ScanCollector, learner: JaxOptimizer, config: TrainingConfig) -> None:
        ppo, self._collector, self._learner = config.ppo, collector, learner
        self._target = config.run.total_timesteps
        self._program = FusedProgram(collector.native, learner.program(ppo.rollout_steps), ppo.rollout_steps)
        self.steps_per_iteration = ppo.rollout_steps * len(collector.lane_numbers)
        self._sequences = num_sequences(ppo.rollout_steps, len(collector.lane_numbers), self._program.learning.length)
        # Where an epoch may end an update, the next orders depend on it, and where the rate adapts, the next settings do.
        alone = ppo.target_kl is not None or ppo.min_effective_sample_size is not None or ppo.learning_rate_schedule == "adaptive"
        self._most = 1 if alone else max(1, min(MOST_ITERATIONS, MOST_ROWS // self.steps_per_iteration))
        self._count = 1  # of the next call
        self._run = jax.jit(partial(run_iterations, self._program))

    def __call__(self, components: Any, most: int) -> list[Iteration]:
        """Compute at most `most` iterations: as many as take about `CALL_SECONDS`."""
        del components
        collector, learner, policy = self._collector, self._learner, self._learner.policy
        left = -(-(self._target - collector.env_steps) // self.steps_per_iteration)
        count = max(1, min(most, self._count, self._most, left))
        began, before, self._updates = time.perf_counter(), learner.copy_stream(), learner.updates
        orders, settings = self._inputs(count)
        state = FusedState(collector.state, learner.carry())
        with policy.precision():
            after, reports, done = self._run(state, policy.scales, collector.lane_numbers, orders, settings, count)
            reports, good = jax.device_get(reports), int(done)
        if not good:  # its parts, one after another, find out what is wrong, and keep nothing of it
            learner.set_stream(before)
            return [self._apart()]
        epochs = [int(Metrics(table, *row[:-1]).epochs) for table, row in zip(reports.table[:good], reports.numbers)]
        learner.adopt(after.carry, before, self._sequences, epochs, self.steps_per_iteration)
        numbers = np.asarray(state.scan.episodes)
        iterations = [self._iteration(index, reports, settings[index], numbers) for index in range(good)]
        records = [record for iteration in iterations for record in iteration.records]
        collector.advance(after.scan, good * self.steps_per_iteration, iterations[-1].episodes - collector.episodes, records)
        self._count = self._next_count(good, time.perf_counter() - began)
        return iterations

    def _inputs(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The orders of the samples and the settings of `count` iterations, in arrays for the most that a call can have."""
        learner, begin = self._learner, self._collector.env_steps
        orders = np.zeros((self._most, learner.config.update_epochs, self._sequences), np.int32)
        settings = []
        for index in range(count):
            learner.env_steps = begin + index * self.steps_per_iteration
            orders[index] = learner.permutations(self._sequences)
            settings.append(learner.settings())
        learner.env_steps = begin
        return orders, np.stack(settings + settings[-1:] * (self._most - count))

    def _iteration(self, index: int, reports: Any, settings: np.ndarray, numbers: np.ndarray) -> Iteration:
        """What one iteration did; `numbers` [B] are those of the lanes' episodes before the call."""
        collector, learner = self._collector, self._learner
        ended = reports.lengths[: index + 1] > 0  # [iterations, T, B]
        records = collector.records(ended[-1], reports.returns[index], reports.lengths[index], numbers + ended[:-1].sum((0, 1)))
        *others, explained = reports.numbers[index].tolist()
        found = learner.epoch_metrics(self._program.learning, Metrics(reports.table[index], *others))
        found |= {
            "explained_variance": explained,
            "learning_rate": learner.learning_rate if self._program.learning.adaptive else float(Settings._make(settings).rate),
            "staleness": 0.0,
            "n_updates": float(self._updates + index + 1),
        }
        total = collector.episodes + int(ended.sum())
        return Iteration(found, collector.env_steps + (index + 1) * self.steps_per_iteration, total, records[-RECENT_EPISODES:])

    def _apart(self) -> Iteration:
        """One iteration by the collector and the learner themselves."""
        collector, learner = self._collector, self._learner
        learner.env_steps = collector.env_steps
        rollout = collector.collect(self._program.num_steps)
        stats = learner.update(rollout)
        return Iteration(stats, collector.env_steps, collector.episodes, rollout.episodes[-RECENT_EPISODES:])

    def _next_count(self, count: int, seconds: float) -> int:
        """The number of iterations that take about `CALL_SECONDS`, at most twice as many as the last time."""
        return max(1, min(2 * count, int(CALL_SECONDS * count / max(seconds, 1e-9))))
