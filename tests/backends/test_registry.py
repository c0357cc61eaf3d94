"""The backend registry: which policy acts, which learner learns, and on how many threads."""

import dataclasses
import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import threadpoolctl
import torch
from gymnasium import spaces

from inchworm import PPOTrainer
from inchworm.backends.numpy.learner import NumpyOptimizer
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.backends.registry import (
    acting_policy,
    compute_advantages,
    compute_gae,
    get_backend,
    is_builtin,
    learning_threads,
    make_learner,
    make_policy,
    register_backend,
)
from inchworm.backends.torch.learner import PPOOptimizer
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.config.sections import BACKENDS, PolicyConfig, PPOConfig, RunConfig, TrainingConfig
from inchworm.core.errors import ConfigError
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.fake import create_fake_rollout

SPEC = PolicySpec(spaces.Box(-1, 1, (2,)), spaces.Discrete(2), PolicyConfig(hidden_sizes=(4,)))
IMAGES = PolicySpec(
    spaces.Box(0, 255, (36, 36, 3), np.uint8), spaces.Discrete(2), PolicyConfig(kind="cnn", cnn_filters=((4, 5, 3),), cnn_features=4)
)


def test_a_small_policy_acts_in_numpy_and_an_image_policy_where_it_learns():
    policy = make_policy(SPEC, seed=3)
    assert isinstance(policy, TorchPolicy)
    actor = acting_policy(policy)
    assert isinstance(actor, NumpyPolicy)
    assert is_builtin(actor)
    assert is_builtin(policy)
    np.testing.assert_array_equal(actor.get_weights()["actor.0.weight"], policy.get_weights()["actor.0.weight"])
    assert acting_policy(actor) is actor
    images = make_policy(IMAGES)
    assert acting_policy(images) is images
    weights = policy.get_weights()
    np.testing.assert_array_equal(make_policy(SPEC, seed=9, weights=weights).get_weights()["actor.0.weight"], weights["actor.0.weight"])


def test_a_stub_that_only_acts_is_left_alone():
    stub = SimpleNamespace(initial_state=lambda num_lanes: (), act=lambda *given, deterministic=False: None)
    assert acting_policy(stub) is stub
    assert not is_builtin(stub)


@pytest.mark.parametrize(("backend", "kind"), [("numpy", NumpyOptimizer), ("torch", PPOOptimizer)])
def test_the_learner_gets_the_runs_seed_device_and_length(tmp_path, backend, kind):
    run = {"seed": 5, "total_timesteps": 77, "device": "cpu", "backend": backend}
    policy = make_policy(SPEC, backend=backend)
    learner = make_learner(policy, TrainingConfig.from_dict({"run": run, "ppo": {"clip_coef": 0.3}}), dump_directory=tmp_path)
    assert isinstance(learner, kind)
    assert learner.total_timesteps == 77
    assert learner.config.clip_coef == 0.3
    assert learner.state_dict()["stream"] == kind(policy, seed=5).state_dict()["stream"]


def test_advantages_are_the_same_from_both_backends():
    policy = make_policy(SPEC)
    rollout = create_fake_rollout(SPEC.observation_space, SPEC.action_space, 20, 3)
    ours = [compute_advantages(one, rollout, PPOConfig()) for one in (policy, NumpyPolicy(SPEC, policy.get_weights()))]
    for name in ("values", "next_values", "advantages", "returns"):
        one, other = (getattr(found, name) for found in ours)
        assert isinstance(one, np.ndarray)
        np.testing.assert_allclose(one, other, atol=5e-6)
    # At a cut row the next value is that of the true successor, elsewhere that of the next row.
    values, found = ours[1].values, ours[1].next_values
    cut = np.zeros((20, 3), bool)
    cut[tuple(rollout.cut_rows.T)] = True
    np.testing.assert_array_equal(found[:-1][~cut[:-1]], values[1:][~cut[:-1]])
    true = NumpyPolicy(SPEC, policy.get_weights()).value(rollout.cut_observations[None])[0]
    np.testing.assert_allclose(found[tuple(rollout.cut_rows.T)], true, atol=1e-6)
    np.testing.assert_allclose(ours[1].returns, ours[1].advantages + values, atol=1e-6)


def test_cut_rows_are_normalised_like_every_row():
    spec = PolicySpec(SPEC.observation_space, SPEC.action_space, PolicyConfig(hidden_sizes=(4,), normalize_observations=True))
    policy = make_policy(spec)
    rollout = create_fake_rollout(spec.observation_space, spec.action_space, 20, 3)
    wide = dataclasses.replace(rollout, observations=100 + 50 * rollout.observations)  # so that a row that is not scaled saturates
    policy.update_statistics(wide, wide.rewards)
    for one in (policy, NumpyPolicy(spec, policy.get_weights())):
        # Where the true successors are the observations themselves, their values are those of the rows.
        rows = tuple(wide.cut_rows.T)
        same = dataclasses.replace(wide, cut_observations=wide.observations[rows])
        found = compute_advantages(one, same, PPOConfig())
        np.testing.assert_allclose(found.next_values[rows], found.values[rows], atol=1e-6)
        assert np.ptp(found.values) > 0.1


def test_threads_are_put_back():
    before = torch.get_num_threads()
    with learning_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with pytest.raises(ZeroDivisionError), learning_threads(before + 1):
        raise ZeroDivisionError
    assert torch.get_num_threads() == before
    with learning_threads(0):
        assert torch.get_num_threads() == before


def test_matrices_of_numpy_get_one_thread_whatever_torch_gets():
    def blas() -> list[int]:
        return [library["num_threads"] for library in threadpoolctl.threadpool_info() if library["user_api"] == "blas"]

    before = blas()
    with learning_threads(2, "numpy"):
        assert set(blas()) == {1}
    assert blas() == before


DUMMY = """
from inchworm.backends.numpy.backend import *
from inchworm.backends.numpy.backend import NumpyPolicy
from inchworm.backends.numpy.learner import NumpyOptimizer

made = []

class DummyPolicy(NumpyPolicy):
    backend = "dummy"

class DummyLearner(NumpyOptimizer):
    pass

def make_policy(spec, weights, seed):
    return DummyPolicy(spec, weights, seed=seed)

def make_learner(policy, config, dump_directory):
    made.append(DummyLearner(policy, config.ppo, seed=config.run.seed, total_timesteps=config.run.total_timesteps))
    return made[-1]
"""


def test_another_package_adds_a_backend_and_trains_with_it(tmp_path, monkeypatch):
    monkeypatch.setitem(BACKENDS, "dummy", "")
    monkeypatch.delitem(BACKENDS, "dummy")  # and is removed after the test
    with pytest.raises(ConfigError, match=r"run.backend='dummy' is not known; use auto, numpy or torch"):
        RunConfig(backend="dummy")
    (tmp_path / "dummy_backend.py").write_text(DUMMY)
    monkeypatch.syspath_prepend(tmp_path)
    register_backend("dummy", "dummy_backend")
    config = TrainingConfig(run=RunConfig(backend="dummy", directory=str(tmp_path)), ppo=PPOConfig(rollout_steps=16, num_minibatches=2))
    with PPOTrainer("mlp", "CartPole-v1", config, num_envs=2) as trainer:
        before = trainer.policy.get_weights()["actor.0.weight"]
        trainer.learn(trainer.collect_rollouts())
        assert type(trainer.policy).__name__ == "DummyPolicy"
        assert np.abs(trainer.policy.get_weights()["actor.0.weight"] - before).max() > 0
    assert [learner.updates for learner in importlib.import_module("dummy_backend").made] == [1]
    with pytest.raises(ConfigError, match="already registered as dummy_backend"):
        register_backend("dummy", "another_module")
    with pytest.raises(ConfigError, match=r"there is no backend 'jax'; use one of numpy, torch, dummy"):
        get_backend("jax")


def test_gae_of_tensors_is_a_tensor_with_the_same_numbers() -> None:
    rng = np.random.default_rng(0)
    numbers, flags = rng.normal(size=(3, 5, 2)).astype(np.float32), rng.random((2, 5, 2)) < 0.3
    expected = compute_gae(*numbers, *flags, 0.9, 0.8)
    found = compute_gae(*torch.from_numpy(numbers), *torch.from_numpy(flags), 0.9, 0.8)
    assert isinstance(found, torch.Tensor)
    np.testing.assert_array_equal(found.numpy(), expected)


def test_gae_takes_flags_of_0_and_1_and_lists_but_not_a_mixture() -> None:
    # One lane, gamma 0.5, lambda 1: the first row ends its episode, so A = [1, 2 + 0.5 * 4 - 1, 3 + 0.5 * 8 - 2]
    # with the second row's advantage 3 + 0.5 * A_2 = 5.5.
    lists = [[1.0], [2.0], [3.0]], [[0.0], [1.0], [2.0]], [[9.0], [4.0], [8.0]], [[1], [0], [0]], [[0], [0], [0]]
    expected = [[1.0], [5.5], [5.0]]
    assert compute_gae(*lists, 0.5, 1.0).tolist() == expected
    floats = [np.array(one, np.float32) for one in lists]
    assert compute_gae(*floats, 0.5, 1.0).tolist() == expected
    tensors = [torch.tensor(one) for one in floats]
    assert compute_gae(*tensors, 0.5, 1.0).tolist() == expected
    with pytest.raises(ConfigError, match="is given numpy and torch arrays; give all five arguments as torch tensors"):
        compute_gae(*tensors[:4], floats[4], 0.5, 1.0)
