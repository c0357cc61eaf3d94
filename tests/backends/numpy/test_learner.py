"""The parts of the NumPy learner, and what only it does; `conformance/` tests updates and gradients next to those of other backends."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from gymnasium import spaces

from doubles.learners import CONFIG, NUMPY, collect, parameters
from inchworm.backends.numpy.learner import NumpyOptimizer
from inchworm.backends.numpy.optimizer import Adam
from inchworm.core.errors import ConfigError
from inchworm.core.protocols import Learner

BOX = spaces.Box(-1, 1, (2,))


@pytest.mark.parametrize(("log_std", "moves"), [(2.5, False), (1.5, True), (-6.0, False)])
def test_a_log_std_beyond_its_bounds_does_not_move(log_std, moves):
    # Under tanh the log std is held within -5 and 2: beyond them neither the loss nor its gradient sees it.
    policy = NUMPY.policy(None, BOX, action_bounds="tanh", log_std_init=log_std)
    NumpyOptimizer(policy, CONFIG).update(collect(policy))
    assert ((policy.get_weights()["log_std"] != log_std) == moves).all()


@pytest.mark.parametrize("rate", [0.0, 1e-2])
def test_weights_set_between_updates_are_those_that_learn(rate):
    policy, other = NUMPY.policy(), NUMPY.policy(seed=9)
    learner, rollout = NUMPY.learner(policy, CONFIG.replace(learning_rate=rate)), collect(policy)
    learner.update(rollout)
    policy.set_weights(other.get_weights())
    learner.update(rollout)
    moved = np.abs(parameters(policy) - parameters(other)).max()
    assert 0 < moved < 0.2 if rate else moved == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weights_keep_their_dtype(dtype):
    policy = NUMPY.policy(None, spaces.Tuple([BOX, spaces.Discrete(2)]), dtype=dtype, action_bounds="tanh", normalize_values=True)
    learner = NumpyOptimizer(policy, CONFIG)
    for seed in range(2):
        learner.update(collect(policy, seed=seed))
    assert {policy.get_weights()[name].dtype for name in policy.spec.layers} == {np.dtype(dtype)}
    assert learner.optimizer.mean.dtype == dtype


def test_which_policies_can_be_learned():
    class Own:
        """A user's policy."""

    with pytest.raises(ConfigError, match=r"learns MLP policies of inchworm, not Own: use --backend torch"):
        NumpyOptimizer(Own())
    with pytest.raises(ConfigError, match=r"has no ppo.optimizer=muon: use --backend torch, or one of adam, adamw, rmsprop, sgd"):
        NumpyOptimizer(NUMPY.policy(), CONFIG.replace(optimizer="muon"))
    learner: Learner = NumpyOptimizer(NUMPY.policy())  # keeps the contract, with a config of its own choice
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
