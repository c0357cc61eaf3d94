"""Steps 6 to 9 of 9 in JAX: a whole update as one pure function, from a rollout's arrays to new weights and metrics.

`update` is compiled as it is; its parts can be used inside another compiled function, such as a loop that also collects. What decides
the program is in `Program`; what may change during a run (rates, coefficients, bounds) is in `Settings`, which are arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Literal

from inchworm.backends.custom_losses import CustomLoss, no_gradient
from inchworm.backends.jax.gae import Estimates, compute_advantages
from inchworm.backends.jax.loss import TERMS, normalize, ppo_loss
from inchworm.backends.jax.network import COMPILER_OPTIONS, Params, Past, Scales, forward, log_std_of, reward_units
from inchworm.backends.jax.optimizer import State, apply_gradient, check_kind, split_vector
from inchworm.backends.jax.policy import JaxPolicy, Static, log_prob_and_entropy
from inchworm.backends.jax.samples import Batch, Samples, Steps, columns_of, make_samples, unpack
from inchworm.backends.learner import ADAPTIVE_MARGIN, ADAPTIVE_STEP, MAX_BAD_STEPS
from inchworm.config.sections import PPOConfig
from inchworm.core.errors import ConfigError
from inchworm.core.types import Evaluation, LossCoefficients, Minibatch
from inchworm.rollout.sequences import minibatch_places

Outputs = tuple[Array, Array, Array]
"""The current policy's log-probs, entropy and values of a minibatch, each [L, n]."""


class Settings(NamedTuple):
    """The numbers of an update that change nothing in the program. Pass them as one array, in this order."""

    rate: Any
    """The learning rate, after schedule and scale."""
    clip_coef: Any
    vf_coef: Any
    ent_coef: Any
    vf_clip_coef: Any
    gamma: Any
    gae_lambda: Any
    max_grad_norm: Any
    eps: Any
    weight_decay: Any
    target_kl: Any
    desired_kl: Any
    min_rate: Any
    max_rate: Any
    loss_weights: Any = ()
    """[n] those of the custom losses, if there are any."""


def read_settings(array: Any) -> Settings:
    """The settings of an update from `settings_array`, which the weights of custom losses may follow."""
    count = len(Settings._fields) - 1
    return Settings._make([*array[:count], array[count:] if len(array) > count else ()])


def settings_array(config: PPOConfig, coefficients: LossCoefficients, rate: float, dtype: Any = np.float32) -> np.ndarray:
    """The settings of one update as one array."""
    target = config.target_kl
    settings = Settings(
        rate=rate,
        clip_coef=coefficients.clip_coef,
        vf_coef=coefficients.vf_coef,
        ent_coef=coefficients.ent_coef,
        vf_clip_coef=coefficients.vf_clip_coef,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        max_grad_norm=config.max_grad_norm or np.inf,
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        target_kl=np.inf if target is None else target,
        desired_kl=config.desired_kl,
        min_rate=config.min_learning_rate,
        max_rate=config.max_learning_rate,
    )
    return np.array(settings[:-1], dtype)


class Program(Static):
    """What decides the compiled update: architecture, frozen weights, custom losses, and the settings that change its operations."""

    def __init__(self, policy: JaxPolicy, config: PPOConfig, frozen: frozenset[str], losses: tuple[CustomLoss, ...], length: int) -> None:
        check_kind(config.optimizer)
        self.policy, self.spec, self.losses, self.length = policy, policy.spec, losses, length
        self.config = config
        self.shapes = {name: shape for name, shape in policy.spec.layers.items() if name not in frozen}
        """The shapes of the weights that learn, in the order of the flat vector."""
        self.columns = (*TERMS, "grad_norm", *[f"{kind}/{loss.name}" for loss in losses for kind in ("loss", "grad_norm")], "bad", "empty")
        """The metrics of a step, in order."""
        decided = (config.optimizer, config.normalize_advantages, config.clip_vloss, config.num_minibatches, config.minibatch_size)
        flags = (config.ent_coef > 0, config.max_grad_norm is None, config.weight_decay > 0, config.gradient_accumulation)
        adaptive = config.learning_rate_schedule == "adaptive"
        functions = tuple((loss.name, id(loss.function), loss.arguments, loss.keywords) for loss in losses)
        super().__init__(
            (repr(policy.spec.to_dict()), tuple(self.shapes), *decided, *flags, adaptive, functions, length, config.vtrace_clip)
        )

    @cached_property
    def adaptive(self) -> bool:
        """Whether the learning rate follows the KL."""
        return self.config.learning_rate_schedule == "adaptive"


class Carry(NamedTuple):
    """What an update changes, and what it needs unchanged."""

    state: State
    bad_steps: Any
    """Bad minibatches in a row, i32, across epochs and updates."""
    frozen: Any = ()
    """The other weights by name."""

    def params(self, program: Program) -> Params:
        """All weights by the spec's names."""
        return {**split_vector(self.state.rows[0], program.shapes), **dict(self.frozen or {})}


class Metrics(NamedTuple):
    """What the epochs of an update did."""

    table: Array
    """[epochs, minibatches, columns] of every step; 0 for epochs that were not run."""
    epochs: Array
    """The number of epochs that were run."""
    ratio_error: Array
    """Largest distance from 1 of the ratios of the first minibatch before the first step."""
    effective_sample_size: Array
    """Of the same ratios (Kong 1992), as a share, 0 to 1."""
    rate: Array
    """The learning rate after the last epoch."""
    stopped: Array
    """Whether too many bad minibatches in a row ended the epochs."""


def update(
    program: Program, carry: Carry, scales: Scales, steps: Steps, permutations: Array, settings: Array
) -> tuple[Carry, Metrics, Estimates]:
    """Critic pass, advantages, sequences, and all epochs of minibatch steps on one rollout.

    `permutations` [epochs, N] give the order of the sequences in each epoch, `settings` is `settings_array`.
    """
    given = read_settings(settings)
    discounts = (given.gamma, given.gae_lambda, program.config.vtrace_clip)
    estimates = compute_advantages(program.spec, carry.params(program), scales, steps, program.length, *discounts)
    samples = samples_of(program, scales, steps, estimates)
    carry, metrics = learn(program, carry, scales, samples, permutations, given)
    return carry, metrics, estimates


ONE_THREAD = {**COMPILER_OPTIONS, "xla_cpu_multi_thread_eigen": False}
"""Compiler options by which XLA computes matrix products in the thread that runs the program."""
SMALL_PRODUCT = 2**22
"""Multiplications of a step's largest matrix product up to which one thread is used: a guess, not yet measured on a quiet machine."""


def compiled(function: Callable[..., Any], small_options: Mapping[str, Any] = ONE_THREAD) -> dict[bool, Callable[..., Any]]:
    """A function of a program, compiled when it is first called: for small networks (True), and for others."""
    options = {True: dict(small_options), False: COMPILER_OPTIONS}
    return {small: jax.jit(function, static_argnums=0, compiler_options=chosen) for small, chosen in options.items()}


_updates = compiled(update)


def compiled_update(program: Program, minibatch_size: int) -> Callable[..., tuple[Carry, Metrics, Estimates]]:
    """`update`, compiled when it is first called with a program and shapes; small networks compute in one thread.

    Waking another thread takes longer than a small product, most of all on a busy machine.
    """
    return _updates[is_small(program, minibatch_size)]


def is_small(program: Program, minibatch_size: int) -> bool:
    """Whether the matrix products of a step are too small for several threads."""
    largest = max(math.prod(shape) for shape in program.spec.layers.values())
    return largest * min(minibatch_size, cached_rows(program)) <= SMALL_PRODUCT and not program.spec.observations.images


def samples_of(program: Program, scales: Scales, steps: Steps, estimates: Estimates) -> Samples:
    """The packed sequences of a rollout, with advantages normalised if that is per batch."""
    advantages = estimates.advantages
    if program.config.normalize_advantages == "batch":
        advantages = normalize(advantages, jnp.asarray(steps.valid))
    if not isinstance(steps.weights, tuple):
        advantages = advantages * jnp.asarray(steps.weights).astype(advantages.dtype)
    return make_samples(program.spec, scales, steps, advantages, estimates.values, estimates.returns, program.length)


class _Loop(NamedTuple):
    """The state between epochs."""

    epoch: Array
    carry: Carry
    rate: Array
    table: Array
    go: Array
    """Whether another epoch follows."""
    stopped: Array


def learn(
    program: Program, carry: Carry, scales: Scales, samples: Samples, permutations: Array, settings: Settings
) -> tuple[Carry, Metrics]:
    """All epochs: until the last one, or until `target_kl` is exceeded or too many steps in a row are bad.

    The epochs are a loop with a dynamic end, so that stopping early costs nothing and compiles nothing.
    """
    config, total = program.config, samples.packed.shape[0]
    places, real = minibatch_places(total, config.minibatches_for(total, program.length))  # [m, n]
    count = permutations.shape[0]
    orders = permutations if real.all() else permutations[:, places.reshape(-1)]  # [epochs, m · n]
    first = unpack(program.spec, _real(program, _select(samples, orders[0, : places.shape[1]]), real[0]))
    ratio_error, effective = ratio_metrics(program, carry.params(program), scales, first)

    def epoch(loop: _Loop) -> _Loop:
        chosen = _select(samples, orders[loop.epoch])  # one gather
        chosen = jax.tree.map(lambda leaf: leaf.reshape(*places.shape, *leaf.shape[1:]), chosen)  # [m, n, …]
        chosen = _real(program, chosen, real)
        if config.normalize_advantages == "minibatch":
            columns = columns_of(program.spec)
            advantages = normalize(chosen.packed[..., columns.advantages.start], chosen.packed[..., columns.valid.start] != 0, (1, 2))
            chosen = chosen._replace(packed=chosen.packed.at[..., columns.advantages.start].set(advantages))
        step = partial(take_step, program, scales, settings, loop.rate)
        (carry, worst), rows = lax.scan(step, (loop.carry, jnp.zeros((), jnp.int32)), chosen)
        stopped = worst >= MAX_BAD_STEPS
        rate, go = loop.rate, ~stopped & (loop.epoch + 1 < count)
        at = program.columns.index
        taken = (rows[:, at("bad")] == 0) & (rows[:, at("empty")] == 0)
        approx_kl = jnp.where(taken, rows[:, at("approx_kl")], 0).sum() / jnp.maximum(taken.sum(), 1)  # the mean; 0 if none was taken
        if program.adaptive:
            rate = adapted_rate(rate, approx_kl, settings)
        go &= ~(approx_kl > 1.5 * settings.target_kl)
        return _Loop(loop.epoch + 1, carry, rate, loop.table.at[loop.epoch].set(rows), go, stopped)

    start = _Loop(
        epoch=jnp.zeros((), jnp.int32),
        carry=carry,
        rate=settings.rate,
        table=jnp.zeros((count, len(places), len(program.columns)), carry.state.rows.dtype),
        go=jnp.ones((), bool),
        stopped=jnp.zeros((), bool),
    )
    end = lax.while_loop(lambda loop: loop.go, epoch, start)
    return end.carry, Metrics(end.table, end.epoch, ratio_error, effective, end.rate, end.stopped)


def _select(samples: Samples, order: Array) -> Samples:
    selected: Samples = jax.tree.map(lambda leaf: leaf.at[order].get(mode="promise_in_bounds"), samples)
    return selected


def _real(program: Program, rows: Samples, real: np.ndarray) -> Samples:
    """The rows with those marked invalid that only pad a minibatch; `real` has the axes before [L, k]."""
    if real.all():
        return rows
    at = columns_of(program.spec).valid
    return rows._replace(packed=rows.packed.at[..., at].multiply(real[..., None, None].astype(rows.packed.dtype)))


def adapted_rate(rate: Array, approx_kl: Array, settings: Settings) -> Array:
    """The learning rate after an epoch: lower where the policy moved too far, higher where it hardly moved."""
    lower = jnp.maximum(rate / ADAPTIVE_STEP, jnp.minimum(rate, settings.min_rate))
    higher = jnp.minimum(rate * ADAPTIVE_STEP, jnp.maximum(rate, settings.max_rate))
    little = (approx_kl > 0) & (approx_kl < settings.desired_kl / ADAPTIVE_MARGIN)
    return jnp.where(approx_kl > ADAPTIVE_MARGIN * settings.desired_kl, lower, jnp.where(little, higher, rate))


def evaluate_batch(program: Program, params: Params, scales: Scales, batch: Batch) -> Evaluation:
    """Log-probs, entropy and values [L, n] of a minibatch."""
    spec, shape = program.spec, batch.valid.shape
    past = None if spec.memory is None else Past(batch.memory, batch.starts)
    outputs, normalized = forward(spec, params, batch.inputs, past)
    outputs = outputs.reshape(*shape, spec.actions.num_outputs)
    log_std = log_std_of(spec, params)
    log_probs, entropy = log_prob_and_entropy(spec.actions, outputs, log_std, batch.legal, batch.choices, batch.gaussians)
    return Evaluation(log_probs, entropy, reward_units(scales, normalized).reshape(shape), scales.value_std)


def ratio_metrics(program: Program, params: Params, scales: Scales, batch: Batch) -> tuple[Array, Array]:
    """The largest distance of a valid ratio from 1, and the effective sample size; as in `backends/learner`."""
    ratios = jnp.exp(evaluate_batch(program, params, scales, batch).log_probs - batch.log_probs)
    count = batch.valid.sum(dtype=ratios.dtype)
    worst = jnp.where(batch.valid, jnp.abs(ratios - 1), 0).max()
    finite = jnp.isfinite(worst)
    largest = jnp.where(batch.valid, ratios, 0).max()
    shares = jnp.where(batch.valid & finite, ratios / jnp.where(finite & (largest > 0), largest, 1), 0)
    squares = jnp.square(shares).sum()
    effective = jnp.where(squares > 0, jnp.minimum(1, jnp.square(shares.sum()) / jnp.maximum(squares, 1e-30) / jnp.maximum(count, 1)), 0)
    return jnp.where(finite, worst, np.finfo(ratios.dtype).max), jnp.where(count > 0, effective, 1)


def take_step(
    program: Program, scales: Scales, settings: Settings, rate: Array, state: tuple[Carry, Array], rows: Samples
) -> tuple[tuple[Carry, Array], Array]:
    """One optimiser step on one minibatch, or none where its loss or gradient is not finite or no sample is valid.

    `state` also holds the most bad steps in a row of this epoch; the result is the row of metrics.
    """
    (carry, worst), config = state, program.config
    count = (rows.packed[..., columns_of(program.spec).valid.start] != 0).sum()
    terms, gradient = loss_and_gradient(program, carry, scales, rows, settings, count)
    norm = jnp.sqrt(jnp.vdot(gradient, gradient))
    if config.max_grad_norm is not None:
        gradient = gradient * jnp.minimum(1, settings.max_grad_norm / (norm + 1e-6))
    bad, empty = ~jnp.isfinite(terms["loss"] + norm), count == 0
    decay = settings.weight_decay if config.weight_decay else None
    moved = apply_gradient(config.optimizer, carry.state, gradient, rate, settings.eps, decay)
    learned: State = jax.tree.map(lambda new, old: jnp.where(bad | empty, old, new), moved, carry.state)
    bad_steps = jnp.where(bad, carry.bad_steps + 1, 0)
    terms |= {"grad_norm": norm, "bad": bad, "empty": empty}
    row = jnp.stack([jnp.asarray(terms[name]).astype(gradient.dtype) for name in program.columns])
    return (Carry(learned, bad_steps, carry.frozen), jnp.maximum(worst, bad_steps)), row


def loss_and_gradient(
    program: Program, carry: Carry, scales: Scales, rows: Samples, settings: Settings, count: Array
) -> tuple[dict[str, Array], Array]:
    """The loss terms of a minibatch, and the gradient [P] by all weights that learn; summed over its parts and over custom losses."""
    config, trained = program.config, split_vector(carry.state.rows[0], program.shapes)
    entropy = settings.ent_coef if config.ent_coef else 0.0
    coefficients = LossCoefficients(settings.clip_coef, settings.vf_coef, entropy, config.clip_vloss, settings.vf_clip_coef)
    names = [*TERMS, *(f"loss/{loss.name}" for loss in program.losses)]

    def of_part(part: Samples) -> tuple[Array, list[Array]]:
        """The terms of a part of the minibatch in order, and the gradients [P] of PPO's loss and of each custom one."""
        batch = unpack(program.spec, part)

        def evaluated(trained: Params) -> Outputs:
            evaluation = evaluate_batch(program, {**trained, **dict(carry.frozen or {})}, scales, batch)
            return evaluation.log_probs, evaluation.entropy, evaluation.values

        def own_loss(outputs: Outputs) -> tuple[Array, dict[str, Array]]:
            terms = ppo_loss(Evaluation(*outputs, scales.value_std), batch, coefficients, count)
            return terms["loss"], terms

        outputs, pull = jax.vjp(evaluated, trained)
        (_, terms), by_outputs = jax.value_and_grad(own_loss, has_aux=True)(outputs)
        gradients = [pull(by_outputs)[0]]
        for index, loss in enumerate(program.losses):  # each by itself, so that one that is not finite spoils no other's gradient

            def custom(trained: Params, outputs: Outputs, loss: CustomLoss = loss, weight: Any = settings.loss_weights[index]) -> Array:
                value: Array = weight * call_loss(program, loss, {**trained, **dict(carry.frozen or {})}, scales, batch, outputs, count)
                return value

            if not depends(custom, trained, outputs):
                raise no_gradient(loss.name)
            value, (direct, by_outputs) = jax.value_and_grad(custom, argnums=(0, 1))(trained, outputs)
            gradients.append(jax.tree.map(jnp.add, direct, pull(by_outputs)[0]))
            terms |= {f"loss/{loss.name}": value, "loss": terms["loss"] + value}
        # Each as one array, because parts are added up array by array.
        vectors = [jnp.concatenate([gradient[name].reshape(-1) for name in program.shapes]) for gradient in gradients]
        return jnp.stack([terms[name] for name in names]), vectors

    def of_group(group: Samples) -> tuple[Array, list[Array]]:
        """The sums over equal parts [parts, n, …], one after another."""
        first: Samples = jax.tree.map(lambda leaf: leaf[0], group)
        if len(group.packed) == 1:
            return of_part(first)
        weights = carry.state.rows[0]
        nothing = jnp.zeros(len(names), weights.dtype), [jnp.zeros_like(weights)] * (1 + len(program.losses))
        total, _ = lax.scan(lambda total, part: (jax.tree.map(jnp.add, total, of_part(part)), None), nothing, group)
        return total

    found = [of_group(group) for group in equal_parts(rows, num_parts(program, rows))]
    summed, vectors = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *found)
    terms = dict(zip(names, summed))
    for loss, vector in zip(program.losses, vectors[1:]):
        terms[f"grad_norm/{loss.name}"] = jnp.sqrt(jnp.vdot(vector, vector))
    return terms, sum(vectors[1:], vectors[0])


CACHE_NUMBERS = 2**17
"""Outputs of all layers that are held between the passes forwards and backwards: 0.5 MB, which stay near a core. Minibatches of 65,536
rows of 64x64 networks then took about half the time of one piece (single runs on a busy machine)."""
MOST_PARTS = 256


def cached_rows(program: Program) -> float:
    """The number of rows whose activations fit into a core's cache; any number where minibatches are split otherwise, or not."""
    if program.losses or program.config.gradient_accumulation > 1 or program.spec.observations.images:
        return math.inf
    return CACHE_NUMBERS / sum(shape[0] for name, shape in program.spec.layers.items() if name.endswith("weight"))


def num_parts(program: Program, rows: Samples) -> int:
    """Into how many parts a minibatch is split: as the config says, else into so many equal ones that each fits into a core's cache."""
    count, length = rows.packed.shape[:2]
    if program.config.gradient_accumulation > 1:
        return min(count, program.config.gradient_accumulation)
    fits = [n for n in range(1, MOST_PARTS + 1) if count % n == 0 and count // n * length <= cached_rows(program)]
    return fits[0] if fits else 1


def equal_parts(rows: Samples, parts: int) -> list[Samples]:
    """A minibatch in parts of whole sequences, those of equal size together [parts, n, …]; the larger ones have one sequence more."""
    size, larger = divmod(len(rows.packed), parts)
    split = larger * (size + 1)
    groups = [(slice(0, split), larger), (slice(split, None), parts - larger)]
    return [jax.tree.map(lambda leaf, at=at, n=n: leaf[at].reshape(n, -1, *leaf.shape[1:]), rows) for at, n in groups if n]


def depends(function: Callable[..., Array], *arguments: Any) -> bool:
    """Whether the result of a function depends on its arguments at all."""
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    needed = {variable for variable in jaxpr.outvars if not isinstance(variable, Literal)}
    for equation in reversed(jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars):
            needed.update(variable for variable in equation.invars if not isinstance(variable, Literal))
    return not needed.isdisjoint(jaxpr.invars)


def call_loss(program: Program, loss: CustomLoss, params: Params, scales: Scales, batch: Batch, outputs: Outputs, count: Array) -> Array:
    """The value of a custom loss, a scalar, times the share of the minibatch's samples that this part of it has."""
    minibatch = Minibatch(
        **dict(batch.raw),
        log_probs=batch.log_probs,
        advantages=batch.advantages,
        returns=batch.returns,
        values=batch.values,
        valid=batch.valid,
        policy_state=batch.memory,
    )
    policy = program.policy.with_params(params, scales)
    value = check_loss(loss.name, _called(loss, policy, minibatch, Evaluation(*outputs, scales.value_std)))
    dtype = outputs[0].dtype
    return value.astype(dtype) * (batch.valid.sum(dtype=dtype) / jnp.maximum(count, 1))


def _called(loss: CustomLoss, policy: JaxPolicy, minibatch: Minibatch, evaluation: Evaluation) -> Any:
    call: Callable[..., Any] = loss
    try:
        return call(policy, minibatch, evaluation)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError, AttributeError) as error:
        raise ConfigError(
            f"the custom loss {loss.name} cannot be compiled: {str(error).splitlines()[0]}\nwith run.backend=jax a loss is written in "
            "jax.numpy, without reading numbers out of arrays; set run.backend=torch for one that is written for torch"
        ) from error


def check_loss(name: str, value: Any) -> Array:
    """The value of a custom loss, which must be a scalar array."""
    if isinstance(value, int | float):
        value = jnp.asarray(value)
    if not isinstance(value, jax.Array) or value.shape != ():
        found = tuple(value.shape) if isinstance(value, jax.Array) else type(value).__name__
        raise ConfigError(f"the custom loss {name} returned {found}; it must return a scalar array, such as a mean")
    return value
