"""Memory on every backend: torch's own LSTM and GRU are the oracle of a step, one step after another is the oracle of sequences.

The sequences run through every pattern of resets: memory that is never fed or never forgotten is noticed, and a gradient that is cut.
"""

import dataclasses
import functools
import itertools

import numpy as np
import optree
import pytest
import torch
from gymnasium import spaces

from doubles.learners import tensors, torch_policy
from doubles.toys import SpacesEnv
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.backends.torch.gae import compute_advantages
from inchworm.backends.torch.learner import sequences_of
from inchworm.backends.torch.network import Memory as TorchMemory
from inchworm.backends.torch.network import Past
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.collect.collector import RolloutCollector
from inchworm.config.sections import PolicyConfig, PPOConfig
from inchworm.core.types import Minibatch
from inchworm.env.source import make_vector_env
from inchworm.policy.layout import MemoryLayout
from inchworm.policy.spec import PolicySpec

KINDS = ("lstm", "gru")
SIZE = 5
DISCRETE = pytest.mark.parametrize("case", ["discrete"], indirect=True)


def spec_of(kind, *, layers=1, place="after", observation_space=None, action_space=None, bounds="clip", **options):
    config = PolicyConfig(
        kind=kind, hidden_sizes=(6,), memory_size=SIZE, memory_layers=layers, memory_place=place, action_bounds=bounds, **options
    )
    return PolicySpec(observation_space or spaces.Box(-2, 2, (3,)), action_space or spaces.Discrete(3), config)


def random_weights(spec, seed=0, dtype=np.float64):
    """Weights of a policy whose outputs depend on what it remembers: no bias is zero, and the heads are wide."""
    rng = np.random.default_rng(seed)
    fresh = NumpyPolicy(spec, seed=seed).get_weights()
    return {
        name: (rng.standard_normal(value.shape) * 0.6).astype(dtype) if name in spec.layers and name != "log_std" else value
        for name, value in fresh.items()
    }


def twins(spec, dtype=np.float64, seed=0):
    """The same policy in NumPy and in torch."""
    weights = random_weights(spec, seed, dtype)
    return NumpyPolicy(spec, weights), torch_policy(spec, weights)


def dense(weights, name, rows, activation=np.tanh):
    layer = 0
    while f"{name}.{layer}.weight" in weights:
        rows = activation(rows @ weights[f"{name}.{layer}.weight"].T + weights[f"{name}.{layer}.bias"])
        layer += 1
    return rows


def torchs_own(spec, weights, inputs):
    """Features [L, N, size] of torch's module with the same weights, from an empty memory."""
    module = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[spec.config.kind](inputs.shape[-1], SIZE, spec.config.memory_layers).double()
    for layer in range(spec.config.memory_layers):
        for part, theirs in (("input", "ih"), ("state", "hh")):
            for kind in ("weight", "bias"):
                ours = torch.from_numpy(weights[f"memory.{layer}.{part}.{kind}"])
                getattr(module, f"{kind}_{theirs}_l{layer}").data.copy_(ours)
    with torch.no_grad():
        return module(torch.from_numpy(inputs))[0].numpy()


@pytest.mark.parametrize(("place", "shared"), [("after", False), ("before", False), ("before", True)])
@pytest.mark.parametrize(("kind", "layers"), list(itertools.product(KINDS, (1, 2, 3))))
def test_a_policy_is_torchs_own_module_between_dense_layers(kind, layers, place, shared):
    spec = spec_of(kind, layers=layers, place=place, shared_trunk=shared)
    weights = random_weights(spec)
    observations = np.random.default_rng(1).standard_normal((4, 2, 3)).astype(np.float32)
    rows = observations.astype(np.float64)
    if place == "after":  # encoded -> hidden layers -> memory -> heads
        features = torchs_own(spec, weights, dense(weights, "trunk", rows))
    else:  # encoded -> memory -> hidden layers, its own or shared -> head
        features = dense(weights, "trunk" if shared else "critic", torchs_own(spec, weights, rows))
    expected = (features @ weights["critic.head.weight"].T + weights["critic.head.bias"])[..., 0]
    for policy in twins(spec):
        np.testing.assert_allclose(np.asarray(policy.value(observations)), expected, atol=1e-12)


def all_masks(length):
    """[L, 2 ** L] every pattern of resets, one a column."""
    return (np.arange(2**length)[None] >> np.arange(length)[:, None]) % 2 == 1


def plain_step(memory, row, state, start):
    """One row of an LSTM or GRU from torch's own cells; a reset is a product with 0."""
    keep = (~start).to(row.dtype)[:, None]
    after = {name: [] for name in state}
    for layer in range(memory.layout.layers):
        w, u, b, d = (memory[str(layer)][part][kind] for kind in ("weight", "bias") for part in ("input", "state"))
        before = [state[name][:, layer] * keep for name in memory.layout.names]
        if memory.layout.kind == "lstm":
            new = torch.lstm_cell(row, before, w, u, b, d)
        else:
            new = (torch.gru_cell(row, before[0], w, u, b, d),)
        row = new[0]
        for name, part in zip(memory.layout.names, new):
            after[name].append(part)
    return row, {name: torch.stack(parts, 1) for name, parts in after.items()}


def in_turn(step, rows, state, starts):
    """Features [L, N, size], one row after another, by `step(row, state, start)`."""
    features = []
    for row, start in zip(rows, starts):
        feature, state = step(row, state, start)
        features.append(feature)
    return torch.stack(features)


def over(memory, rows, state, starts):
    """Features [L, N, size], all rows at once."""
    return memory(rows, Past(state, starts))[0].reshape(*starts.shape, -1)


def step(memory, row, state, start):
    """(features [N, size], state) after one row."""
    return memory(row, Past(state, start[None]))


def plainly(memory, rows, state, starts):
    return in_turn(functools.partial(plain_step, memory), rows, state, starts)


def memory_of(kind, layers, dtype, seed=0):
    memory = TorchMemory(MemoryLayout(kind, 3, SIZE, layers)).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.6)
    return memory


def some_sequences(layout, starts, dtype, seed=0):
    length, count = starts.shape
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn((length, count, layout.inputs), generator=generator, dtype=torch.float64).to(dtype)
    shape = (count, layout.layers, layout.size)
    state = {name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name in layout.names}
    return rows, state, torch.from_numpy(starts)


@pytest.mark.parametrize("length", range(1, 7))
@pytest.mark.parametrize(("kind", "layers"), list(itertools.product(KINDS, (1, 2))))
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_sequences_are_one_step_after_another_whatever_the_resets(kind, layers, length, dtype, limit):
    memory = memory_of(kind, layers, dtype)
    rows, state, starts = some_sequences(memory.layout, all_masks(length), dtype)
    with torch.no_grad():
        expected = plainly(memory, rows, state, starts)
        for found in (over(memory, rows, state, starts), in_turn(functools.partial(step, memory), rows, state, starts)):
            assert float((found - expected).abs().max()) <= limit
        for column in range(starts.shape[1]):  # one alone, with its own padding or none
            part = slice(column, column + 1)
            alone = over(memory, rows[:, part], {name: leaf[part] for name, leaf in state.items()}, starts[:, part])
            assert float((alone - expected[:, part]).abs().max()) <= limit


@pytest.mark.parametrize(("kind", "layers"), list(itertools.product(KINDS, (1, 2, 3))))
def test_gradients_are_those_of_a_plain_loop(kind, layers):
    memory = memory_of(kind, layers, torch.float64)
    rows, state, starts = some_sequences(memory.layout, all_masks(5), torch.float64)
    rows.requires_grad_()
    worth = torch.randn((*starts.shape, SIZE), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs = [rows, *memory.parameters()]
    expected = torch.autograd.grad(plainly(memory, rows, state, starts), inputs, worth)
    found = torch.autograd.grad(over(memory, rows, state, starts), inputs, worth)
    for ours, theirs in zip(found, expected):
        assert float(theirs.abs().max()) > 1e-3
        assert float((ours - theirs).abs().max()) <= 1e-10


@pytest.mark.parametrize(("place", "shared"), [("after", False), ("before", False), ("before", True)])
@pytest.mark.parametrize("kind", KINDS)
def test_numpy_steps_as_torch_does(kind, place, shared):
    spec = spec_of(kind, layers=2, place=place, shared_trunk=shared)
    ours, theirs = twins(spec)
    rng = np.random.default_rng(0)
    state, starts = ours.initial_state(4), np.ones(4, bool)
    other = theirs.initial_state(4)
    for _ in range(5):
        observations = rng.standard_normal((4, 3)).astype(np.float32)
        one = ours.act(observations, state, starts, np.random.default_rng(1))
        two = theirs.act(observations, other, starts, np.random.default_rng(1))
        np.testing.assert_array_equal(one.actions, two.actions)
        np.testing.assert_allclose(one.log_probs, two.log_probs, atol=1e-12)
        for name in state:
            np.testing.assert_allclose(one.state[name], two.state[name], atol=1e-12)
        state, other, starts = one.state, two.state, rng.random(4) < 0.4


def collected(policy, case, space, length, *, steps=20, lanes=4, before=3, seed=0):
    """A rollout with ends of both kinds, in each lane at other rows, after some steps that fill the memory."""
    lengths = itertools.cycle((3, 5, 8, 11))
    mask = "key" if case.masked else None
    with make_vector_env(lambda: SpacesEnv(space, case.action_space, next(lengths), mask), lanes, 0, seed=seed) as env:
        collector = RolloutCollector(env, policy, seed=seed, sequence_length=length)
        collector.collect(before)
        rollout = collector.collect(steps)
    assert rollout.terminated.any()
    assert rollout.truncated.any()
    return rollout


def ratio_error(learner, rollout, length):
    """The largest difference of log-probs, over the rollout cut into sequences."""
    held = tensors(rollout)
    advantages = compute_advantages(learner, held, PPOConfig(sequence_length=length))
    minibatch = sequences_of(held, advantages, length, successors=False)
    with torch.no_grad():
        evaluation = learner.evaluate(minibatch)
    valid = minibatch.valid
    assert float((evaluation.values - minibatch.values)[valid].abs().max()) < 1e-4  # the critic pass read the same sequences
    return float((evaluation.log_probs - minibatch.log_probs)[valid].abs().max()), minibatch, evaluation


@pytest.mark.parametrize("case", ["discrete", "discrete+mask", "box_clip", "dict_mix+mask", "nested+mask"], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_the_ratio_is_1(kind, case):
    space = spaces.Dict({"b": spaces.Box(-1, 1, (2,)), "a": spaces.Discrete(3)})
    for layers, place, length in ((1, "after", 1), (2, "before", 7), (3, "after", 20), (2, "after", 32), (1, "before", 8)):
        spec = spec_of(
            kind,
            layers=layers,
            place=place,
            observation_space=case.observation_space(space),
            action_space=case.action_space,
            bounds=case.bounds,
        )
        actor, learner = twins(spec, np.float32)
        rollout = collected(actor, case, space, length)
        error, minibatch, evaluation = ratio_error(learner, rollout, min(length, rollout.num_steps))
        assert error < 5e-5
        reference = actor.evaluate(as_arrays(minibatch))
        np.testing.assert_allclose(reference.log_probs, evaluation.log_probs.numpy(), atol=5e-5)
        np.testing.assert_allclose(reference.values, evaluation.values.numpy(), atol=1e-4)


def as_arrays(minibatch):
    fields = {field.name: getattr(minibatch, field.name) for field in dataclasses.fields(minibatch)}
    return Minibatch(**optree.tree_map(lambda leaf: leaf.numpy(), fields))


@DISCRETE
@pytest.mark.parametrize("kind", KINDS)
def test_in_float64_the_ratio_is_1_to_1e_10(kind, case):
    spec = spec_of(kind, layers=2, action_space=case.action_space)
    actor, learner = twins(spec, np.float64)
    for length in (1, 7, 20):
        rollout = collected(actor, case, spec.observation_space, length)
        assert rollout.policy_state["hidden"].dtype == np.float64
        _, minibatch, evaluation = ratio_error(learner, rollout, length)
        reference = actor.evaluate(as_arrays(minibatch))  # a rollout keeps log-probs in float32: NumPy computes them again
        np.testing.assert_allclose(reference.log_probs, evaluation.log_probs.numpy(), atol=1e-10)
        np.testing.assert_allclose(reference.values, evaluation.values.numpy(), atol=1e-10)


@DISCRETE
def test_images_are_convolved_before_the_memory_and_torch_acts(case):
    space = spaces.Dict({"camera": spaces.Box(0, 255, (8, 9, 3), np.uint8), "speed": spaces.Box(-1, 1, (2,))})
    options = {"cnn_filters": ((4, 3, 2),), "cnn_features": 5}
    spec = spec_of("lstm", observation_space=space, action_space=case.action_space, **options)
    assert "cnn.camera.0.weight" in spec.layers
    policy = TorchPolicy(spec, seed=1)
    with torch.no_grad():
        policy.network.actor["head"].weight.mul_(100)
    assert ratio_error(policy, collected(policy, case, space, 7), 7)[0] < 5e-5
