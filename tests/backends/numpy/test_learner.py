"""The NumPy learner: its gradient against differences of the reference loss, and what is its own; `conformance/` has what all share."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import optree
import pytest
from gymnasium import spaces

from inchworm.backends import registry as interface
from inchworm.backends.numpy.learner import Adam, MinibatchStep, NumpyOptimizer, RolloutSamples
from inchworm.backends.numpy.loss import ppo_loss, value_errors
from inchworm.backends.numpy.network import FlatNetwork
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.config.sections import PolicyConfig, PPOConfig, TrainingConfig
from inchworm.core.errors import BadNumberError, ConfigError, SpaceError
from inchworm.core.protocols import Learner
from inchworm.core.spaces import mask_space, with_mask
from inchworm.core.types import Advantages, Evaluation, LossCoefficients, Minibatch
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.sequences import fill_invalid_rows

BOX = spaces.Box(-1, 1, (2,))
SPACES = {
    "discrete": (spaces.Discrete(3), "clip"),
    "multi_discrete": (spaces.MultiDiscrete([2, 3]), "clip"),
    "multi_binary": (spaces.MultiBinary(2), "clip"),
    "box_clip": (BOX, "clip"),
    "box_tanh": (BOX, "tanh"),
    "dict": (spaces.Dict({"z": spaces.Discrete(3, start=-1), "a": BOX}), "clip"),
    "tuple": (spaces.Tuple([spaces.Box(-1, 1, (1,)), spaces.MultiDiscrete([2, 3])]), "tanh"),
}
STEP = 1e-5


class Bench:
    """One minibatch, the learner's gradient of it, and the reference loss at any weights."""

    def __init__(self, policy, rollout, coefficients, *, dead=False, seed=0):
        rng = np.random.default_rng(seed)
        shape = rollout.rewards.shape
        self.policy, self.coefficients = policy, coefficients
        # Behaviour that was somebody else's, and a critic that has moved: ratios and values on both sides of their clips.
        rollout = replace(rollout, log_probs=rollout.log_probs + rng.normal(0, 0.4, shape).astype(np.float32))
        scale = policy.statistics.value_std
        values = policy.value(rollout.observations)
        old = values + scale * rng.normal(0, 0.4, shape)
        self.advantages = Advantages(old, old, rng.normal(size=shape), values + scale * rng.normal(0, 0.4, shape))
        valid = rng.random(shape) < 0.7 if dead else np.ones(shape, bool)
        self.rollout = replace(rollout, valid=valid)
        flat = {name: getattr(self.rollout, name) for name in ("observations", "actions", "log_probs", "valid", "episode_starts")}
        flat |= {name: getattr(self.advantages, name) for name in ("values", "advantages", "returns")}
        self.minibatch = Minibatch(**optree.tree_map(lambda leaf: leaf.reshape(1, -1, *leaf.shape[2:]), flat))

    def learned(self, garbage=None):
        """(metrics, gradient by weight name) of one step, whose rate is 0."""
        given = self.rollout if garbage is None else with_garbage(self.rollout, garbage)
        config = PPOConfig(normalize_advantages="off")
        network = FlatNetwork(self.policy.spec, np.dtype(np.float64))
        network.load(self.policy.get_weights())
        step = MinibatchStep(self.policy, config, network, Adam(network.parameters, eps=1e-5, weight_decay=0.0))
        samples = RolloutSamples(self.policy, fill_invalid_rows(given), self.advantages, 1, successors=False)
        (whole,) = samples.shuffled(1, np.random.default_rng(0).permutation(given.rewards.size))
        return step(whole, self.coefficients, 0.0, ()), network.gradients

    def terms(self, weights=None):
        policy = self.policy if weights is None else NumpyPolicy(self.policy.spec, self.policy.get_weights() | weights)
        evaluation, minibatch = policy.evaluate(self.minibatch), self.minibatch  # each [1, N]
        flat = Evaluation(evaluation.log_probs[0], evaluation.entropy[0], evaluation.values[0], evaluation.value_scale)
        samples = SimpleNamespace(
            **{name: getattr(minibatch, name)[0] for name in ("log_probs", "advantages", "returns", "values", "valid")}
        )
        return ppo_loss(flat, samples, self.coefficients, int(minibatch.valid.sum()))[0]

    def check(self, garbage=None, only=""):
        """Every metric is the reference's and every slope the difference that its parameter makes."""
        row, gradients = self.learned(garbage)
        for name, value in self.terms().items():
            assert row[name] == pytest.approx(float(value), abs=1e-12), name
        squares = sum(float(np.square(gradient).sum()) for gradient in gradients.values())
        assert row["grad_norm"] == pytest.approx(squares**0.5, rel=1e-12)
        weights = self.policy.get_weights()
        for name, gradient in gradients.items():
            if not name.startswith(only):
                continue
            for index in np.ndindex(gradient.shape):
                sides = []
                for step in (STEP, -STEP):
                    moved = weights[name].copy()
                    moved[index] += step
                    sides.append(float(self.terms({name: moved})["loss"]))
                assert gradient[index] == pytest.approx((sides[0] - sides[1]) / (2 * STEP), abs=1e-8), (name, index)
        return row


def with_garbage(rollout, garbage):
    """Something else in every row where nobody lived."""
    dead = ~rollout.valid
    data = {name: optree.tree_map(np.array, getattr(rollout, name)) for name in ("observations", "actions", "log_probs")}
    for leaf in optree.tree_leaves(data):
        leaf[dead] = garbage if leaf.dtype.kind == "f" else 0
    return replace(rollout, **data)


def coefficients_of(clip_coef=0.2, vf_coef=0.7, ent_coef=0.3, clip_vloss=False):
    return LossCoefficients(clip_coef, vf_coef, ent_coef, clip_vloss)


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu", "leaky_relu", "silu"])
@pytest.mark.parametrize("shared_trunk", [False, True], ids=["separate", "shared"])
@pytest.mark.parametrize("hidden_sizes", [(), (4,), (3, 4, 3)], ids=["0", "1", "3"])
def test_the_gradient_of_every_architecture(make_policy, collect, activation, shared_trunk, hidden_sizes):
    options = {"hidden_sizes": hidden_sizes, "activation": activation, "shared_trunk": shared_trunk}
    policy = make_policy(dtype=np.float64, random=True, **options)
    row = Bench(policy, collect(policy, 5, 2), coefficients_of(clip_vloss=True)).check()
    assert 0.1 < row["clip_fraction"] < 0.9


@pytest.mark.parametrize("ent_coef", [0.0, 0.3])
@pytest.mark.parametrize(("name", "masked"), [(name, m) for name in SPACES for m in (False, True) if not (m and name.startswith("box"))])
def test_the_gradient_of_every_action_space(make_policy, collect, name, masked, ent_coef):
    space, bounds = SPACES[name]
    observations = with_mask(spaces.Box(-2, 2, (2,)), mask_space(space)) if masked else spaces.Box(-2, 2, (2,))
    policy = make_policy(observations, space, dtype=np.float64, random=True, hidden_sizes=(3,), action_bounds=bounds)
    Bench(policy, collect(policy, 5, 2), coefficients_of(ent_coef=ent_coef)).check()


@pytest.mark.parametrize("clip_vloss", [False, True], ids=["free values", "clipped values"])
@pytest.mark.parametrize("normalize_values", [False, True], ids=["reward units", "normalised values"])
@pytest.mark.parametrize("dead", [False, True], ids=["all alive", "some dead"])
def test_the_gradient_of_the_value_loss_and_of_valid_rows_alone(make_policy, collect, clip_vloss, normalize_values, dead):
    policy = make_policy(spaces.Dict({"x": spaces.Box(-2, 2, (2,)), "action_mask": spaces.MultiBinary(3)}), dtype=np.float64, random=True)
    if normalize_values:
        policy = make_policy(
            policy.spec.observation_space, dtype=np.float64, random=True, normalize_values=True, normalize_observations=True
        )
        moved = {"value_normalizer.mean": np.array(7.0), "value_normalizer.var": np.array(9.0), "value_normalizer.count": np.array(5)}
        moved |= {"observation_normalizer.mean": np.array([0.5, -1.0]), "observation_normalizer.var": np.array([0.25, 4.0])}
        policy.set_weights(policy.get_weights() | moved)
    bench = Bench(policy, collect(policy, 8, 3), coefficients_of(clip_vloss=clip_vloss, ent_coef=0.0), dead=dead)
    said, scale = policy.evaluate(bench.minibatch).values, policy.statistics.value_std
    away = np.abs(said - bench.minibatch.values) > 0.2 * scale
    better = np.abs(said - bench.minibatch.returns) < np.abs(bench.minibatch.values - bench.minibatch.returns)
    for group in (away & better, away & ~better, ~away):  # held and flat, worse and moving, within reach
        assert group.sum() >= 3
    for garbage in (None, np.nan, 1e30) if dead else (None,):
        bench.check(garbage)


def test_a_log_std_beyond_its_bounds_does_not_move(make_policy, collect):
    # Under tanh the log std is held within -5 … 2: beyond them neither the loss nor its slope sees it.
    space = spaces.Box(-1, 1, (4,))
    policy = make_policy(None, space, dtype=np.float64, random=True, hidden_sizes=(3,), action_bounds="tanh")
    policy.set_weights(policy.get_weights() | {"log_std": np.array([2.5, 1.5, 0.0, -6.0])})
    bench = Bench(policy, collect(policy, 5, 2), coefficients_of())
    bench.check(only="log_std")  # a std of exp(-5) bends the loss by the means more than differences can follow
    moving = bench.learned()[1]["log_std"] != 0
    np.testing.assert_array_equal(moving, [False, True, True, False])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_value_within_reach_moves_however_its_sum_is_rounded(dtype):
    # V0 + (V - V0) is V only up to rounding, so the held error may be the larger one by a bit: the slope still is (V - R) / s².
    rng = np.random.default_rng(0)
    values, returns = (rng.normal(0, spread, (1, 2000)).astype(dtype) for spread in (0.02, 1))  # V0 is far from V in units of V
    old = values + rng.uniform(-0.19, 0.19, values.shape).astype(dtype)
    held = old + (values - old)
    assert (np.square(held - returns) > np.square(values - returns)).sum() > 20  # it does happen
    said = Evaluation(values, values, values, dtype(1))
    _, gradient = value_errors(said, returns, old, coefficients_of(clip_vloss=True))
    np.testing.assert_allclose(gradient, values - returns, rtol=1e-3, atol=1e-6)


def test_a_ratio_of_nobody_is_no_error(make_policy, collect):
    # Log-probs that are off by 3 where nobody lives, and by 0.01 in one living row: the error is e^0.01 - 1.
    policy = make_policy(dtype=np.float64)
    bench = Bench(policy, collect(policy, 4, 2), coefficients_of())
    network = FlatNetwork(policy.spec, np.dtype(np.float64))
    network.load(policy.get_weights())
    step = MinibatchStep(policy, PPOConfig(), network, Adam(network.parameters, eps=1e-5, weight_decay=0.0))
    (whole,) = RolloutSamples(policy, bench.rollout, bench.advantages, 1, successors=False).shuffled(1, np.arange(8))
    whole.log_probs[:] = policy.evaluate(bench.minibatch).log_probs[0]
    whole.log_probs[5] -= 3
    whole.log_probs[2] -= 0.01
    assert step.ratio_error(whole) == pytest.approx(np.expm1(3))
    assert step.ratio_error(replace(whole, valid=np.arange(8) != 5)) == pytest.approx(np.expm1(0.01))


CONFIG = PPOConfig(learning_rate=1e-2, update_epochs=2, num_minibatches=4)


def test_adam_gets_the_clipped_gradient(make_policy, collect):
    # After one step Adam's mean is 0.1 times the clipped gradient, whose norm is the limit; without a limit it is grad_norm.
    for limit in (0.01, None, 1e9):
        policy = make_policy()
        learner = NumpyOptimizer(policy, PPOConfig(update_epochs=1, num_minibatches=1, max_grad_norm=limit))
        stats = learner.update(collect(policy))
        assert stats["grad_norm"] > 0.02  # the metric is the norm before clipping
        found = np.linalg.norm(learner.optimizer.mean) / 0.1
        assert found == pytest.approx(0.01 if limit == 0.01 else stats["grad_norm"], rel=1e-3)


def test_moments_are_saved_by_the_names_of_the_weights(make_policy, collect):
    policy = make_policy()
    learner = NumpyOptimizer(policy, CONFIG)
    learner.update(collect(policy))
    moments = learner.state_dict()["moments"]
    assert moments["step"] == 8  # 2 epochs of 4
    for name in ("mean", "square"):
        assert {key: array.shape for key, array in moments[name].items()} == policy.spec.layers
    joined = np.concatenate([array.reshape(-1) for array in moments["square"].values()])
    np.testing.assert_array_equal(joined, learner.optimizer.square)
    assert not np.shares_memory(moments["mean"]["actor.head.bias"], learner.optimizer.mean)


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


def test_images_are_refused_in_words():
    config = PolicyConfig(kind="cnn", cnn_filters=((4, 5, 3),), cnn_features=4)
    spec = PolicySpec(spaces.Box(0, 255, (36, 36, 3), np.uint8), spaces.Discrete(2), config)
    with pytest.raises(SpaceError, match=r'convolutions do not run in NumPy; use the torch backend for policy.kind="cnn"'):
        interface.make_policy(spec, backend="numpy")


def test_the_interface_makes_it_with_the_runs_seed_and_length(make_policy, tmp_path):
    config = TrainingConfig.from_dict({"run": {"seed": 5, "total_timesteps": 77, "backend": "numpy"}, "ppo": {"clip_coef": 0.3}})
    policy = make_policy()
    learner = interface.make_learner(policy, config, dump_directory=tmp_path)
    assert isinstance(learner, NumpyOptimizer)
    assert learner.total_timesteps == 77
    assert learner.config.clip_coef == 0.3
    assert learner.state_dict()["stream"] == NumpyOptimizer(policy, seed=5).state_dict()["stream"]
    assert isinstance(interface.make_policy(policy.spec, backend="numpy"), NumpyPolicy)


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
