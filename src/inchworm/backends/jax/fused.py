"""Steps 3 to 9 of 9 as one compiled program: collect and learn, for as many iterations as are asked for, of one seed or of several.

The number of iterations is an argument of the program, so that one compilation serves a whole run, and how a run is divided into calls
changes no bit of it. Whatever the iterations need from the host comes in as arrays: the orders of the samples, drawn from the learner's
stream as in every backend, and the settings after schedules. Several seeds are the same program under `vmap`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from inchworm.backends.corrections import MIN_VARIANCE
from inchworm.backends.jax.gae import Estimates
from inchworm.backends.jax.learner import JaxOptimizer
from inchworm.backends.jax.native import NativeEnv
from inchworm.backends.jax.network import Scales, paused_garbage_collection
from inchworm.backends.jax.samples import Steps
from inchworm.backends.jax.scan_collector import (
    MEASURES,
    ScanCollector,
    Scanned,
    ScanState,
    rollout_measures,
    scan_rollout,
    steps_on_device,
)
from inchworm.backends.jax.update import ONE_THREAD, Carry, Metrics, Program, compiled, is_small, read_settings, update
from inchworm.backends.learner import ORDER_SAMPLE, TARGETS
from inchworm.config.sections import TrainingConfig
from inchworm.core.types import RECENT_EPISODES, Iteration
from inchworm.policy.statistics import EPSILON
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
    """The other fields of `Metrics` in order, `TARGETS` and `MEASURES`. Packed, because every array is a kernel to compile."""
    returns: Array
    """[T, B] f32: of the episodes that ended with this step."""
    lengths: Array
    """[T, B] i32: the same; 0 where none ended."""
    samples: tuple[Array, ...]
    """What normalisers are moved by: the flat observations [T, B, F] and the value targets [T, B]; `()` without any."""
    rewards: tuple[Array, ...]
    """What the scale of rewards is moved by: rewards and `starts` [T, B]; `()` where rewards are not scaled."""
    hashes: Array
    """[5, T + 2] u32: of `hash_stages`."""


class RewardState(NamedTuple):
    """What the scale of rewards depends on before a rollout, as in `RewardScaler`."""

    mean: Any
    var: Any
    count: Any
    running: Any
    """[B]"""


class Call(NamedTuple):
    """What the host gives a call of one seed."""

    state: FusedState
    scales: Scales
    scaled: RewardState | tuple[()]
    """`()` where rewards are not scaled."""
    orders: np.ndarray
    """[M, epochs, N]: the orders of the samples, for the most iterations of a call."""
    settings: np.ndarray
    """[M, …]"""


class FusedProgram(NamedTuple):
    """What decides the program of an iteration."""

    env: NativeEnv
    learning: Program
    num_steps: int


def scale_rewards(before: RewardState, rewards: Array, starts: Array, gamma: Array) -> Array:
    """Rewards [T, B] divided by the standard deviation of discounted returns, these included: `RewardScaler` in the types of JAX."""

    def row(sums: Array, given: tuple[Array, Array]) -> tuple[Array, Array]:
        reward, begins = given
        sums = reward + jnp.where(begins, 0, gamma * sums)
        return sums, sums

    rewards = rewards.astype(before.running.dtype)
    sums = lax.scan(row, before.running, (rewards, starts))[1]
    share = sums.size / (before.count + sums.size)
    delta = sums.mean() - before.mean
    var = (1 - share) * before.var + share * (jnp.square(sums - sums.mean()).mean() + jnp.square(delta) * (1 - share))
    return rewards / jnp.where(var > MIN_VARIANCE, jnp.sqrt(var + EPSILON), 1)


def target_numbers(estimates: Estimates) -> tuple[Array, ...]:
    """The metrics `TARGETS` of an update, as `target_metrics` of `backends/learner` computes them."""
    both = jnp.stack([estimates.returns, estimates.returns - estimates.values]).reshape(2, -1)  # together: fewer kernels to compile
    means = both.mean(1)
    variance, unexplained = jnp.square(both - means[:, None]).mean(1)
    explained = jnp.where(variance > 0, 1 - unexplained / jnp.where(variance > 0, variance, 1), 0)
    return explained, means[0], jnp.sqrt(variance), jnp.sqrt(unexplained)


def hash_rows(*arrays: Array) -> Array:
    """A 32-bit hash [T] of each row over all arrays [T, …]: the sum of the row's words, each times an odd number that its place decides.

    A row of which one word differs never has the same one. The numbers are not linear in the place, so that regular differences do not
    cancel out; at the end every bit of the sum moves the upper half, of which marks are made.
    """
    total = jnp.zeros(len(arrays[0]), jnp.uint32)
    for number, array in enumerate(arrays):
        words = lax.bitcast_convert_type(array, jnp.uint32) if array.dtype.itemsize >= 4 else array.astype(jnp.uint32)  # [T, …]
        count = math.prod(words.shape[1:])
        places = np.arange(1, count + 1, dtype=np.uint32) * np.uint32(0x9E3779B1) + np.uint32(number << 24)
        keys = (places ^ (places >> 15)) * np.uint32(0x85EBCA77)
        keys = (keys ^ (keys >> 13) | 1).reshape(words.shape[1:])  # not the words: XLA would divide to find each one's place
        total += (words * keys).sum(tuple(range(1, words.ndim)), dtype=jnp.uint32)
    total = (total ^ (total >> 16)) * np.uint32(0x85EBCA77)
    return (total ^ (total >> 15)) * np.uint32(0x9E3779B1)


def hash_stages(scanned: Scanned, steps: Steps, estimates: Estimates, weights: Array) -> Array:
    """Hashes of what an iteration computed [5, T + 2] u32: by step of observations, what followed them, actions, log-probs and advantages.

    The last two columns are of the successors of cut rows and of the weights.
    """
    # Read from memory what is there anyway: XLA would compute log-probs, returns and values once more for their hashes.
    scanned, steps, estimates, weights = lax.optimization_barrier((scanned, steps, estimates, weights))  # type: ignore[no-untyped-call]
    ends = scanned.terminated + 2 * scanned.truncated + 4 * scanned.starts
    rows = (
        hash_rows(*jax.tree.leaves(scanned.observations)),
        hash_rows(scanned.rewards, ends),
        hash_rows(scanned.choices, scanned.gaussians),
        hash_rows(scanned.log_probs),
        hash_rows(estimates.returns, estimates.values),
    )
    whole = hash_rows(steps.cuts.flat[None], *(image[None] for image in steps.cuts.images)), hash_rows(weights[None])
    return jnp.concatenate([jnp.stack(rows), jnp.broadcast_to(jnp.concatenate(whole), (len(rows), 2))], 1)


def run_iteration(
    program: FusedProgram, lanes: Any, state: FusedState, scales: Scales, scaled: Any, permutations: Array, settings: Array
) -> tuple[FusedState, Report, Array]:
    """One iteration: collect, learn. The last result tells whether all numbers are fine; else the state must not be kept."""
    learning = program.learning
    params = state.carry.params(learning)
    scan, scanned = scan_rollout(program.env, learning.spec, program.num_steps, params, scales, state.scan, lanes)
    steps = steps_on_device(learning.spec, scanned, learning.length)
    if scaled:
        steps = steps._replace(rewards=scale_rewards(scaled, scanned.rewards, scanned.starts, read_settings(settings).gamma))
    carry, metrics, estimates = update(learning, state.carry, scales, steps, permutations, settings)
    sums = jnp.stack([carry.state.rows[0].sum(), steps.rewards.sum(), steps.flat.sum()])  # finite only if every number is
    numbers = (*metrics[1:], *target_numbers(estimates), *rollout_measures(learning.spec, scanned))
    report = Report(
        table=metrics.table,
        numbers=jnp.stack([jnp.asarray(number, metrics.table.dtype) for number in numbers]),
        returns=scanned.returns,
        lengths=jnp.where(scanned.ended, scanned.lengths, 0),
        samples=(steps.flat, estimates.returns) if learning.policy.statistics.parts else (),
        rewards=(scanned.rewards, scanned.starts) if scaled else (),
        hashes=hash_stages(scanned, steps, estimates, carry.state.rows[0]),
    )
    return FusedState(scan, carry), report, jnp.isfinite(sums).all() & ~metrics.stopped


def run_iterations(
    program: FusedProgram,
    lanes: Any,
    state: FusedState,
    scales: Scales,
    scaled: Any,
    permutations: Array,
    settings: Array,
    count: Any,
    active: Any,
) -> tuple[FusedState, Report, Array]:
    """The first `count` iterations for which there are permutations [M, epochs, N] and settings [M, …].

    Stops after an iteration whose numbers are not finite; then the state is of no use, and a call with the number of good ones returns the
    state after the last of them. Returns the state, the reports of all [M, …], and the number of good ones. With `active` [S], S seeds are
    computed at once, those that are not active for nothing: they only keep the others' places, so that the program stays the same. State
    and scales then have a first axis S, permutations and settings one after M. Where normalisers or the scale of rewards change, which the
    host does between two calls, `count` must be 1.
    """
    one = partial(run_iteration, program, lanes)
    iterate = jax.jit(jax.vmap(one) if active.ndim else one)  # traced once: for the shapes, and as the body of the loop
    shapes = jax.eval_shape(iterate, state, scales, scaled, permutations[0], settings[0])[1]
    nothing: Report = jax.tree.map(lambda leaf: jnp.zeros((permutations.shape[0], *leaf.shape), leaf.dtype), shapes)

    def advance(loop: tuple[FusedState, Report, Array, Array, Array]) -> tuple[FusedState, Report, Array, Array, Array]:
        before, reports, number, fine, good = loop
        after, report, finite = iterate(before, scales, scaled, permutations[number], settings[number])
        fine &= finite
        reports = jax.tree.map(lambda whole, new: lax.dynamic_update_index_in_dim(whole, new, number, 0), reports, report)
        return after, reports, number + 1, fine, good + fine

    start = (state, nothing, jnp.zeros((), jnp.int32), active, jnp.zeros(active.shape, jnp.int32))
    end, reports, _, _, good = lax.while_loop(lambda loop: (loop[2] < count) & loop[3].any(), advance, start)
    return end, reports, good


_compiled = compiled(run_iterations, {**ONE_THREAD, "xla_cpu_use_fusion_emitters": False})
"""Of the module, so that a second training of a trainer compiles nothing. Without XLA's fusion emitters, which use MLIR, the loop takes
half the time to compile, and at most a tenth more to run."""


def why_not_fused(policy: Any, collector: Any, learner: Any) -> str | None:
    """Why collect and learn cannot be one program, in a few words; None if they can."""
    if not isinstance(collector, ScanCollector) or not isinstance(learner, JaxOptimizer):
        return "the environments are stepped from the host"
    if any(name.partition(".")[0] in policy.statistics.parts for name in learner.frozen):
        return "ppo.freeze keeps a normaliser"
    if learner.config.correction != "off" or learner.config.proximal_decay is not None:
        return "ppo.correction and ppo.proximal_decay look at a rollout before it is learned from"
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
        # Where an epoch may end an update, the next orders depend on it, where the rate adapts, the next settings do, and normalisers and
        # the scale of rewards are moved on the host, in float64.
        stops = ppo.target_kl is not None
        moves = ppo.learning_rate_schedule == "adaptive" or ppo.scale_rewards or learner.policy.statistics.parts
        alone = stops or moves
        self._most = 1 if alone else max(1, min(MOST_ITERATIONS, MOST_ROWS // self.steps_per_iteration))
        self._count = 1  # of the next call
        self._num_minibatches = ppo.minibatches_for(self._sequences, self._program.learning.length)
        size = self.steps_per_iteration // self._num_minibatches
        self._run = partial(_compiled[is_small(self._program.learning, size)], self._program)

    def __call__(self, components: Any, most: int) -> list[Iteration]:
        """Compute at most `most` iterations: as many as take about `CALL_SECONDS`."""
        del components
        [found] = self.together([self], most)
        if isinstance(found, Exception):
            raise found
        return found

    @staticmethod
    def together(seeds: Sequence[FusedTraining | None], most: int) -> list[list[Iteration] | Exception]:
        """Compute at most `most` iterations of several seeds of one config at once; the result of a seed may be an error.

        None keeps the place of a seed that is over. Neither its absence nor what other seeds do changes a bit of a seed.
        """
        running = [seed for seed in seeds if seed is not None]
        count = max(1, min(most, *(seed._limit() for seed in running)))
        began = time.perf_counter()
        calls = [None if seed is None else seed._call(count) for seed in seeds]
        outcomes = running[0]._compute(calls, count)
        results: list[list[Iteration] | Exception] = []
        for seed, call, outcome in zip(seeds, calls, outcomes):
            try:
                results.append([] if seed is None or call is None else seed._take_over(call, count, *outcome))
            except Exception as error:
                results.append(error)
        for seed in running:
            seed._count = seed._next_count(count, time.perf_counter() - began)
        return results

    def _limit(self) -> int:
        """The most iterations of the next call: what takes about `CALL_SECONDS`, what fits into its arrays, what is left of the run."""
        left = -(-(self._target - self._collector.env_steps) // self.steps_per_iteration)
        return min(self._count, self._most, left)

    def _compute(self, calls: Sequence[Call | None], count: int) -> list[tuple[FusedState, Any, int]]:
        """Run the program; for each call the state after its last good iteration, the reports, and the number of good iterations."""
        lanes, filled = self._collector.lane_numbers, [call for call in calls if call is not None]
        with self._learner.policy.precision(), paused_garbage_collection():
            if len(calls) == 1:
                after, reports, found = self._run(lanes, *filled[0], count, np.True_)
                good = int(found)
                if 0 < good < count:
                    after = self._run(lanes, *filled[0], good, np.True_)[0]
                return [(after, jax.device_get(reports), good)]
            *trees, orders, settings = zip(*(filled[0] if call is None else call for call in calls))
            trees = [jax.tree.map(lambda *leaves: np.stack(leaves), *each) for each in trees]
            arguments = (lanes, *trees, np.stack(orders, 1), np.stack(settings, 1))
            active = np.array([call is not None for call in calls])
            after, reports, goods = jax.device_get(self._run(*arguments, count, active))
            fewer = {*goods.tolist()} - {0, count}
            states = {count: after} | {good: jax.device_get(self._run(*arguments, good, active)[0]) for good in fewer}

        def at(place: int, tree: Any, axis: int) -> Any:
            return jax.tree.map(lambda leaf: leaf.take(place, axis), tree)

        return [(at(place, states.get(good, after), 0), at(place, reports, 1), good) for place, good in enumerate(goods.tolist())]

    def _take_over(self, call: Call, count: int, after: FusedState, reports: Any, good: int) -> list[Iteration]:
        """Move the collector and the learner to the state after `good` of `count` iterations, and return what each of them did."""
        collector, learner = self._collector, self._learner
        if not good:  # its parts, one after another, find out what is wrong, and keep nothing of it
            learner.set_stream(self._stream)
            learner.env_steps = collector.env_steps
            rollout = collector.collect(self._program.num_steps)
            stats = learner.update(rollout)
            return [Iteration(stats, collector.env_steps, collector.episodes, rollout.episodes[-RECENT_EPISODES:])]
        updates = learner.updates
        epochs = [int(self._metrics(reports, index).epochs) for index in range(good)]
        learner.adopt(after.carry, self._stream, self._sequences, epochs, self.steps_per_iteration, drawn=count)
        valid = np.ones(reports.lengths.shape[1:], bool)
        if reports.samples:
            learner.policy.add_to_statistics(reports.samples[0][0], reports.samples[1][0], valid)
        if learner.reward_scaler is not None:
            learner.reward_scaler.add(reports.rewards[0][0], reports.rewards[1][0], reports.lengths[0] > 0, valid)
        iterations = [self._iteration(index, reports, call, updates + index + 1) for index in range(good)]
        records = [record for iteration in iterations for record in iteration.records]
        collector.advance(after.scan, good * self.steps_per_iteration, iterations[-1].episodes - collector.episodes, records)
        return iterations

    def _metrics(self, reports: Any, index: int) -> Metrics:
        return Metrics(reports.table[index], *reports.numbers[index, : len(Metrics._fields) - 1])

    def _call(self, count: int) -> Call:
        """The state, and the orders of the samples and the settings of `count` iterations, in arrays for the most that a call can have."""
        collector, learner = self._collector, self._learner
        begin, self._stream = collector.env_steps, learner.copy_stream()
        orders = np.zeros((self._most, learner.config.update_epochs, self._sequences), np.int32)
        settings = []
        for index in range(count):
            learner.env_steps = begin + index * self.steps_per_iteration
            orders[index] = learner.permutations(self._sequences)
            settings.append(learner.settings())
        learner.env_steps = begin
        state, scaler = FusedState(collector.state, learner.carry()), learner.reward_scaler
        scaled: RewardState | tuple[()] = ()
        if scaler is not None:
            found = scaler.statistics
            numbers = (found.mean, found.var, found.count, scaler.before(len(collector.lane_numbers)))
            scaled = RewardState(*(np.asarray(number, learner.policy.dtype) for number in numbers))
        return Call(state, learner.policy.scales, scaled, orders, np.stack(settings + settings[-1:] * (self._most - count)))

    def _iteration(self, index: int, reports: Any, call: Call, updates: int) -> Iteration:
        """What one iteration of a call did; `updates` are those after it."""
        collector, learner = self._collector, self._learner
        ended = reports.lengths[: index + 1] > 0  # [iterations, T, B]
        numbers = np.asarray(call.state.scan.episodes) + ended[:-1].sum((0, 1))  # [B] of the lanes' episodes before the iteration
        records = collector.records(ended[-1], reports.returns[index], reports.lengths[index], numbers)
        found = learner.epoch_metrics(self._program.learning, self._metrics(reports, index))
        targets, measures = np.split(reports.numbers[index, len(Metrics._fields) - 1 :].astype(float), [len(TARGETS)])
        found |= dict(zip(TARGETS, targets.tolist())) | {name: value for name, value in zip(MEASURES, measures.tolist()) if value >= 0}
        found |= {
            "learning_rate": learner.learning_rate if self._program.learning.adaptive else float(read_settings(call.settings[index]).rate),
            "staleness": 0.0,
            "n_updates": float(updates),
            **({} if learner.reward_scaler is None else {"reward_scale": learner.reward_scaler.scale}),
        }
        total = collector.episodes + int(ended.sum())
        observations, results, actions, log_probs, advantages = reports.hashes[index, :, :-2]
        cuts, weights = reports.hashes[index, 0, -2:]
        stages = {
            "environment": (observations, results, cuts),
            "acting": (actions, log_probs),
            "advantages": (advantages,),
            "order": (call.orders[index, :, :ORDER_SAMPLE], np.int64(self._num_minibatches)),
            "weights": (weights,),
        }
        return Iteration(found, collector.env_steps + (index + 1) * self.steps_per_iteration, total, records[-RECENT_EPISODES:], stages)

    def _next_count(self, count: int, seconds: float) -> int:
        """The number of iterations that take about `CALL_SECONDS`, at most twice as many as the last time."""
        return max(1, min(2 * count, int(CALL_SECONDS * count / max(seconds, 1e-9))))
