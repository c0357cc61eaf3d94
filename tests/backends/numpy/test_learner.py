"""The parts of the NumPy learner, and what only it does; `conformance/` tests updates and gradients next to those of other backends."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from dataclasses import fields, replace

import numpy as np
import optree
import pytest
import torch
from gymnasium import spaces

from inchworm.backends.numpy.learner import Adam, NumpyOptimizer, RolloutSamples, as_minibatch, micro_batches
from inchworm.config.sections import PPOConfig
from inchworm.core.errors import BadNumberError, ConfigError
from inchworm.core.protocols import Learner
from inchworm.core.spaces import mask_space, with_mask
from inchworm.core.types import Advantages, Minibatch
from inchworm.rollout.rollout import Rollout

CONFIG = PPOConfig(learning_rate=1e-2, update_epochs=2, num_minibatches=4)
BOX = spaces.Box(-1, 1, (2,))


@pytest.mark.parametrize(("log_std", "moves"), [(2.5, False), (1.5, True), (-6.0, False)])
def test_a_log_std_beyond_its_bounds_does_not_move(make_policy, collect, log_std, moves):
    # Under tanh the log std is held within -5 and 2: beyond them neither the loss nor its gradient sees it.
    policy = make_policy(None, BOX, action_bounds="tanh", log_std_init=log_std)
    NumpyOptimizer(policy, CONFIG).update(collect(policy))
    assert ((policy.get_weights()["log_std"] != log_std) == moves).all()


def test_weights_that_somebody_sets_between_updates_are_those_that_learn(make_policy, collect, parameters):
    results = []
    for set_between in (False, True):
        policy = make_policy()
        other = make_policy(random=True).get_weights()
        learner = NumpyOptimizer(policy, CONFIG.replace(learning_rate=0.0 if not set_between else 1e-2))
        rollout = collect(policy)
        learner.update(rollout)
        policy.set_weights(other)
        learner.update(rollout)
        results.append(parameters(policy))
    start = np.concatenate([other[name].reshape(-1) for name in policy.spec.layers])
    np.testing.assert_array_equal(results[0], start)  # at a rate of 0 they stay what was set
    assert 0 < np.abs(results[1] - start).max() < 0.2  # and else move on from there


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weights_keep_their_dtype(make_policy, collect, dtype):
    policy = make_policy(None, spaces.Tuple([BOX, spaces.Discrete(2)]), dtype=dtype, action_bounds="tanh", normalize_values=True)
    learner = NumpyOptimizer(policy, CONFIG)
    for seed in range(2):
        learner.update(collect(policy, seed=seed))
    assert {policy.get_weights()[name].dtype for name in policy.spec.layers} == {np.dtype(dtype)}
    assert learner.optimizer.mean.dtype == dtype


def test_bad_numbers_are_met_in_silence(make_policy, collect, parameters, tmp_path):
    # exp overflows, infinity minus infinity is nan: the step looks for that itself, and warns nobody line by line.
    policy = make_policy()
    rollout = collect(policy)
    huge = replace(rollout, rewards=rollout.rewards * np.float32(1e30))
    before = parameters(policy)
    learner = NumpyOptimizer(policy, CONFIG, dump_directory=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(BadNumberError, match="3 minibatches in a row"):
            learner.update(huge)
    np.testing.assert_array_equal(parameters(policy), before)


def test_who_can_be_learned(make_policy):
    class Own:
        """Somebody's own policy."""

    with pytest.raises(ConfigError, match=r"learns MLP policies of inchworm, not Own: use --backend torch"):
        NumpyOptimizer(Own())
    learner: Learner = NumpyOptimizer(make_policy())  # keeps the contract, with a config of its own choice
    assert learner.updates == 0
    assert learner.device == "cpu"


TRAIN = """
import sys
from inchworm import PPOTrainer
from inchworm.config.sections import TrainingConfig
config = TrainingConfig.from_dict({"run": {"backend": "numpy", "max_iterations": 2, "checkpoint_interval": 0, "directory": sys.argv[1]},
    "env": {"num_envs": 2}, "ppo": {"rollout_steps": 16, "num_minibatches": 2},
    "evaluation": {"episodes": 1, "final_episodes": 1, "num_envs": 1}})
with PPOTrainer("mlp", "CartPole-v1", config) as trainer:
    history = trainer.train()
assert len(history["loss"]) == 2, history
assert trainer.state.env_steps == 64
assert not {"torch", "jax"} & set(sys.modules), sorted(name for name in sys.modules if name.startswith("torch"))[:5]
"""


def test_a_run_in_numpy_imports_no_framework(tmp_path):
    done = subprocess.run([sys.executable, "-c", TRAIN, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


# Samples: what belongs to a row stays with it, through sequences, shuffle, windows and micro-batches

T, B = 6, 2
SPACE = spaces.Dict({"x": spaces.Box(-100, 100, (2,))})
ACTIONS = spaces.Dict({"d": spaces.MultiDiscrete([2, 3], start=[4, -1]), "g": spaces.Box(-9, 9, (2,))})


def numbered(valid=None):
    """Every array of row (t, b) tells its number 2 t + b; masks are legal at the number's own bits."""
    number = np.arange(T * B, dtype=np.float32).reshape(T, B)
    whole = number.astype(np.int64)
    rollout = Rollout.from_dict(
        {
            "observations": {"x": np.stack([number, -number], -1), "action_mask": {"d": mask_of(whole)}},
            "actions": {"d": np.stack([4 + whole % 2, whole % 3 - 1], -1), "g": np.stack([number / 2, number / 4], -1)},
            "log_probs": -number,
            "rewards": 10 * number,
            "terminated": whole % 5 == 4,
            "truncated": np.zeros((T, B), bool),
            "valid": np.ones((T, B), bool) if valid is None else valid,
            "next_observations": {"x": np.stack([number + 2, -number - 2], -1), "action_mask": {"d": mask_of(whole + 2)}},
        }
    )
    return rollout, Advantages(number + 100, number + 200, number + 300, number + 400)


def mask_of(number):
    """[..., 5] with the first choice of either group always legal."""
    bits = (np.asarray(number)[..., None] >> np.arange(5)) & 1
    bits[..., 0] = bits[..., 2] = 1
    return bits.astype(np.int8)


@pytest.fixture
def samples_of(make_policy):
    def make(length=1, *, valid=None, successors=False, **options):
        policy = make_policy(with_mask(SPACE, mask_space(ACTIONS)), ACTIONS, **options)
        rollout, advantages = numbered(valid)
        return RolloutSamples(policy, rollout, advantages, length, successors=successors)

    return make


def check_rows(samples):
    """Each column tells one number in all of its fields; the numbers."""
    number = samples.inputs[:, 0]
    whole = number.astype(np.int64)
    np.testing.assert_array_equal(samples.inputs[:, 1], -number)
    np.testing.assert_array_equal(samples.choices, [whole % 2, whole % 3])
    np.testing.assert_array_equal(samples.gaussians, [number / 2, number / 4])
    np.testing.assert_array_equal(samples.mask, (mask_of(whole) != 0).T)
    np.testing.assert_array_equal(samples.log_probs, -number)
    np.testing.assert_array_equal(samples.advantages, number + 300)
    np.testing.assert_array_equal(samples.returns, number + 400)
    np.testing.assert_array_equal(samples.values, number + 100)
    minibatch = as_minibatch(samples)
    rows = number.reshape(samples.length, -1)
    np.testing.assert_array_equal(minibatch.observations["x"][..., 0], rows)
    np.testing.assert_array_equal(minibatch.observations["action_mask"]["d"], mask_of(rows.astype(np.int64)))
    np.testing.assert_array_equal(minibatch.actions["d"][..., 0], 4 + rows % 2)
    np.testing.assert_array_equal(minibatch.actions["g"][..., 0], rows / 2)
    for name, expected in {"log_probs": -rows, "rewards": 10 * rows, "advantages": rows + 300, "returns": rows + 400}.items():
        np.testing.assert_array_equal(getattr(minibatch, name), expected, err_msg=name)
    np.testing.assert_array_equal(minibatch.values, rows + 100)
    np.testing.assert_array_equal(minibatch.terminated, rows % 5 == 4)
    np.testing.assert_array_equal(minibatch.episode_starts, numbered()[0].episode_starts.reshape(-1)[rows.astype(int)])
    valid = np.ones(len(whole), bool) if samples.valid is None else samples.valid
    np.testing.assert_array_equal(minibatch.valid, valid.reshape(samples.length, -1))
    assert samples.count == valid.sum()
    return whole


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_row_once_and_whole(samples_of, dtype):
    permutation = np.random.default_rng(0).permutation(12)
    whole = samples_of(dtype=dtype)
    parts = whole.shuffled(3, permutation)
    found = [check_rows(part) for part in parts]
    np.testing.assert_array_equal(np.concatenate(found), permutation)
    assert all(part.valid is None and part.count == 4 for part in parts)
    assert parts[0].inputs.dtype == parts[0].gaussians.dtype == np.float32  # as the advantages of this test
    np.testing.assert_array_equal(whole.valid, np.ones((1, 12), bool))


def test_sequences_go_on_in_time(samples_of):
    # L = 4 of T = 6: chunks of 4 and of 2 + 2 repeated rows. Column chunk · B + lane begins at number 8 · chunk + lane.
    whole = samples_of(4)
    np.testing.assert_array_equal(whole.valid, [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]])
    permutation = np.array([2, 1, 3, 0])
    parts = whole.shuffled(3, permutation)  # 2, 1 and 1 sequences, padded to 2
    numbers = [check_rows(part).reshape(4, -1) for part in parts]
    np.testing.assert_array_equal(numbers[0], [[8, 1], [10, 3], [10, 5], [10, 7]])
    np.testing.assert_array_equal(parts[0].valid.reshape(4, -1), [[1, 1], [1, 1], [0, 1], [0, 1]])
    np.testing.assert_array_equal(numbers[1][:, 0], [9, 11, 11, 11])
    np.testing.assert_array_equal(parts[1].valid.reshape(4, -1), [[1, 0], [1, 0], [0, 0], [0, 0]])
    np.testing.assert_array_equal(numbers[2][:, 0], [0, 2, 4, 6])
    assert sum(part.count for part in parts) == 12


def test_dead_rows_do_not_count_and_have_no_advantage_and_no_value_error(samples_of):
    valid = np.ones((T, B), bool)
    valid[2, 1] = valid[5, 0] = False  # numbers 5 and 10
    (part,) = samples_of(valid=valid).shuffled(1, np.arange(12))
    np.testing.assert_array_equal(part.valid, ~np.isin(np.arange(12), [5, 10]))
    assert part.count == 10
    np.testing.assert_array_equal(part.advantages[[5, 10]], 0)
    np.testing.assert_array_equal(part.returns[[5, 10]], part.values[[5, 10]])
    np.testing.assert_array_equal(part.values[[5, 10]], [105, 110])
    np.testing.assert_array_equal(part.advantages[[4, 11]], [304, 311])


def test_an_epochs_scalars_are_its_own(samples_of):
    # A minibatch that normalises its advantages in place changes neither the next epoch nor its neighbours.
    whole = samples_of()
    first, second = whole.shuffled(2, np.arange(12))
    first.advantages[:] = 0
    np.testing.assert_array_equal(as_minibatch(first).advantages, 0)  # what people read is what the step has
    np.testing.assert_array_equal(second.advantages, np.arange(6, 12) + 300)
    for part in whole.shuffled(2, np.arange(12)):
        check_rows(part)


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("pieces", [1, 2, 3, 99])
def test_micro_batches_are_the_minibatch_in_pieces(samples_of, length, pieces):
    valid = np.ones((T, B), bool)
    valid[1, 0] = False
    (whole,) = samples_of(length, valid=valid, successors=True).shuffled(1, np.random.default_rng(2).permutation(12 // length))
    parts = list(micro_batches(whole, pieces))
    assert len(parts) == min(pieces, 12 // length)
    assert sum(part.count for part in parts) == whole.count == 11
    for name in ("inputs", "choices", "gaussians", "mask", "log_probs", "advantages", "returns", "values", "valid"):
        axis = 1 if name in ("choices", "gaussians", "mask") else 0

        def rows(part, name=name, axis=axis):
            leaf = getattr(part, name)
            return leaf.reshape(*leaf.shape[:axis], length, -1, *leaf.shape[axis + 1 :])

        joined = np.concatenate([rows(part) for part in parts], axis + 1)
        np.testing.assert_array_equal(joined, rows(whole), err_msg=name)
    expected = as_minibatch(whole)
    found = [as_minibatch(part) for part in parts]
    for field in fields(Minibatch):
        trees = [getattr(part, field.name) for part in found]
        joined = optree.tree_map(lambda *leaves: np.concatenate(leaves, 1), *trees)
        optree.tree_map(np.testing.assert_array_equal, joined, getattr(expected, field.name))


# Adam, by hand and compared with torch's


def test_two_steps_by_hand():
    # Gradient 2, then -1; rate 0.1, eps 0. The first step is the rate itself: mean 0.2 / 0.1 = 2, square 0.004 / 0.001 = 4, 2 / sqrt 4 = 1.
    # Then mean 0.9 · 0.2 - 0.1 = 0.08, over 1 - 0.81 = 0.19: 0.42105; square 0.999 · 0.004 + 0.001 = 0.004996, over 0.001999: 2.49925.
    parameters = np.array([5.0])
    adam = Adam(parameters, eps=0.0, weight_decay=0.0)
    adam.step(np.array([2.0]), 0.1)
    assert parameters[0] == pytest.approx(4.9, abs=1e-12)
    adam.step(np.array([-1.0]), 0.1)
    assert adam.mean[0] == pytest.approx(0.08, abs=1e-12)
    assert adam.square[0] == pytest.approx(0.004996, abs=1e-12)
    assert parameters[0] == pytest.approx(4.9 - 0.1 * (0.08 / 0.19) / math.sqrt(0.004996 / 0.001999), abs=1e-12)
    assert adam.steps == 2


def test_epsilon_and_decay_by_hand():
    # The first step with gradient g is rate · g / (|g| + eps), after the parameter shrank by rate · decay: 5 · (1 - 0.1 · 0.5) = 4.75.
    parameters = np.array([5.0])
    Adam(parameters, eps=3.0, weight_decay=0.5).step(np.array([2.0]), 0.1)
    assert parameters[0] == pytest.approx(4.75 - 0.1 * 2 / 5, abs=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-6), (np.float64, 1e-12)])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("eps", [1e-5, 1e-8])
def test_fifty_steps_as_torch_takes_them(dtype, tolerance, decay, eps):
    rng = np.random.default_rng(0)
    parameters = rng.normal(size=20).astype(dtype)
    theirs = torch.from_numpy(parameters.copy()).requires_grad_()
    kind = torch.optim.AdamW if decay else torch.optim.Adam
    optimizer = kind([theirs], lr=1e-2, eps=eps, weight_decay=decay)
    ours = Adam(parameters, eps=eps, weight_decay=decay)
    for step in range(50):
        gradient = (rng.normal(size=20) * 10.0 ** rng.integers(-6, 3, 20)).astype(dtype)
        gradient[0] = 0  # a parameter that nothing pulls at
        before = gradient.copy()
        rate = 1e-2 * (1 - step / 60)  # as a schedule would
        optimizer.param_groups[0]["lr"] = rate
        theirs.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        ours.step(gradient, rate)
        np.testing.assert_array_equal(gradient, before)
        np.testing.assert_allclose(parameters, theirs.detach().numpy(), rtol=0, atol=tolerance)
    assert parameters.dtype == ours.mean.dtype == ours.square.dtype == dtype
    state = optimizer.state[theirs]
    np.testing.assert_allclose(ours.mean, state["exp_avg"].numpy(), rtol=10 * tolerance, atol=tolerance)
    np.testing.assert_allclose(ours.square, state["exp_avg_sq"].numpy(), rtol=10 * tolerance, atol=tolerance)
    assert ours.steps == 50


def test_scale_is_the_gradient_scaled():
    rng = np.random.default_rng(1)
    one, other = rng.normal(size=(1, 6)).repeat(2, 0)
    scaled, plain = Adam(one, eps=1e-5, weight_decay=0.0), Adam(other, eps=1e-5, weight_decay=0.0)
    for _ in range(5):
        gradient, scale = rng.normal(size=6), float(rng.uniform(0.01, 1))
        scaled.step(gradient, 0.1, scale=scale)
        plain.step(gradient * scale, 0.1)
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-14)
        np.testing.assert_allclose(scaled.square, plain.square, rtol=1e-13)


def test_a_rate_of_0_moves_the_moments_alone():
    parameters = np.ones(3)
    adam = Adam(parameters, eps=1e-5, weight_decay=0.3)
    adam.step(np.full(3, 2.0), 0.0)
    np.testing.assert_array_equal(parameters, 1.0)
    np.testing.assert_allclose(adam.mean, 0.2)
