"""A loss or gradient that is not finite moves nothing; three in a row stop the run with the minibatch saved."""

from __future__ import annotations

import numpy as np
import optree
import pytest
import torch
from gymnasium import spaces

from inchworm.backends.learner import MAX_BAD_STEPS
from inchworm.backends.torch.learner import PPOOptimizer
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.config.sections import PPOConfig
from inchworm.core.errors import BadNumberError
from inchworm.core.tensor_file import read_tensor_file
from inchworm.core.trees import unflatten_tree
from inchworm.core.types import Evaluation

CONFIG = PPOConfig(update_epochs=2, num_minibatches=4, learning_rate=1e-2)


class Flawed(TorchPolicy):
    """Spoils the minibatches whose number is in `bad`, in the way that `how` says."""

    bad: frozenset[int] = frozenset()
    how = "nan loss"
    number = 0

    def evaluate(self, minibatch):
        evaluation = super().evaluate(minibatch)
        if not torch.is_grad_enabled():
            return evaluation
        self.number += 1
        if self.number - 1 not in self.bad:
            return evaluation
        values = evaluation.values
        if self.how == "nan loss":
            values = values * float("nan")
        elif self.how == "infinite loss":
            values = values + float("inf")
        else:  # a finite loss whose gradient is not: d sqrt(x) / dx at 0
            values = values + (values * 0).sqrt()
        return Evaluation(evaluation.log_probs, evaluation.entropy, values, evaluation.value_scale)


def state_of(learner):
    return [np.array(leaf) for leaf in optree.tree_leaves(learner.state_dict()["moments"])]


def equal(one, other):
    return len(one) == len(other) > 0 and all(np.array_equal(a, b) for a, b in zip(one, other))


@pytest.mark.parametrize("how", ["nan loss", "infinite loss", "nan gradient"])
@pytest.mark.parametrize("optimizer", ["own", "sgd"])
def test_a_bad_minibatch_moves_neither_weights_nor_moments(make_policy, collect, parameters, how, optimizer):
    policy = Flawed(make_policy().spec)
    foreign = torch.optim.SGD(policy.parameters(), lr=0.1, momentum=0.9) if optimizer == "sgd" else None
    learner = PPOOptimizer(policy, CONFIG.replace(num_minibatches=1, update_epochs=1), optimizer=foreign, device="cpu")
    learner.update(collect(policy))  # a good one, so that there are moments to harm
    before, moments = parameters(policy), state_of(learner)
    policy.bad, policy.how = frozenset({policy.number}), how
    stats = learner.update(collect(policy, seed=1))
    np.testing.assert_array_equal(parameters(policy), before)
    assert equal(state_of(learner), moments)
    assert stats["skipped_steps"] == 1
    assert all(np.isfinite(list(stats.values())))
    learner.update(collect(policy, seed=2))
    assert (parameters(policy) != before).any()  # and on it goes
    assert np.isfinite(parameters(policy)).all()


@pytest.mark.parametrize("bad", [{0}, {1, 2}, {0, 1, 3, 4, 6, 7}], ids=str)
def test_bad_ones_between_good_ones_are_counted_and_left_out(make_policy, collect, parameters, bad):
    policy = Flawed(make_policy().spec)
    policy.bad = frozenset(bad)
    learner = PPOOptimizer(policy, CONFIG, device="cpu")
    stats = learner.update(collect(policy))
    assert policy.number == 8
    assert stats["skipped_steps"] == len(bad)
    assert all(np.isfinite(list(stats.values())))
    assert np.isfinite(parameters(policy)).all()
    assert learner.optimizer.state_dict()["step"] == 8 - len(bad)


def test_three_in_a_row_stop_the_run_with_the_minibatch_saved(make_policy, collect, parameters, tmp_path):
    space = spaces.Dict({"x": spaces.Box(-2, 2, (3,)), "action_mask": spaces.MultiBinary(3)})
    policy = Flawed(make_policy(space).spec)
    policy.bad = frozenset({1, 2, 3})
    learner = PPOOptimizer(policy, CONFIG, device="cpu", dump_directory=tmp_path / "run" / "dumps")
    rollout = collect(policy)
    with pytest.raises(
        BadNumberError, match=r"3 minibatches in a row \(loss nan, gradient norm nan\).*bad_minibatch.safetensors"
    ) as caught:
        learner.update(rollout)
    assert "ppo.learning_rate" in str(caught.value)
    assert np.isfinite(parameters(policy)).all()
    path = tmp_path / "run" / "dumps" / "bad_minibatch.safetensors"
    arrays, header = read_tensor_file(path, kind="minibatch", max_version=1)
    tree = unflatten_tree(arrays, header["structure"])
    assert tree["observations"]["x"].shape == (1, 9, 3)  # 36 samples in 4 minibatches
    rows = {row.tobytes() for row in rollout.observations["x"].reshape(-1, 3)}
    assert all(row.tobytes() in rows for row in tree["observations"]["x"][0])
    assert np.isfinite(tree["returns"]).all()
    assert learner.updates == 0


def test_a_row_of_three_reaches_over_epochs_and_updates(make_policy, collect, tmp_path):
    policy = Flawed(make_policy().spec)
    policy.bad = frozenset({3, 4, 5})  # the last of epoch 1, the first two of epoch 2
    with pytest.raises(BadNumberError):
        PPOOptimizer(policy, CONFIG, device="cpu", dump_directory=tmp_path).update(collect(policy))
    policy = Flawed(make_policy().spec)
    policy.bad = frozenset({6, 7, 8})  # the last two of one update, the first of the next
    learner = PPOOptimizer(policy, CONFIG, device="cpu")
    learner.update(collect(policy))
    assert learner.state_dict()["bad_steps"] == 2
    resumed = PPOOptimizer(policy, CONFIG, device="cpu", dump_directory=tmp_path)
    resumed.load_state_dict(learner.state_dict())
    with pytest.raises(BadNumberError):
        resumed.update(collect(policy, seed=1))


def test_without_a_directory_the_minibatch_is_saved_where_the_message_says(make_policy, collect, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    policy = Flawed(make_policy().spec)
    policy.bad = frozenset(range(MAX_BAD_STEPS))
    with pytest.raises(BadNumberError):
        PPOOptimizer(policy, CONFIG, device="cpu").update(collect(policy))
    (found,) = tmp_path.glob("inchworm-*/bad_minibatch.safetensors")
    read_tensor_file(found, kind="minibatch", max_version=1)


def test_a_policy_that_says_nan_from_the_start_leaves_finite_metrics(make_policy, collect):
    class Lost(Flawed):
        def evaluate(self, minibatch):
            evaluation = super().evaluate(minibatch)
            return Evaluation(evaluation.log_probs * float("nan"), evaluation.entropy, evaluation.values, evaluation.value_scale)

    policy = Lost(make_policy().spec)
    learner = PPOOptimizer(policy, CONFIG.replace(update_epochs=1, num_minibatches=1), device="cpu")
    rollout = collect(policy)
    with pytest.warns(UserWarning, match="ratio_error"):
        stats = learner.update(rollout)
    assert all(np.isfinite(list(stats.values())))
    assert stats["skipped_steps"] == 1
