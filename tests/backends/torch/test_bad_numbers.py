"""A loss or gradient that is not finite moves nothing; three in a row stop the run with the minibatch saved."""

from __future__ import annotations

import numpy as np
import optree
import pytest
import torch

from inchworm.backends.torch.learner import PPOOptimizer
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.config.sections import PPOConfig
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
