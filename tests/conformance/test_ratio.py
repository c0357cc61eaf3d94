"""ratio == 1: for NumPy and torch actors alike, the learner gives the same actions the same log-probs before its first step.

Every observation space × every action space × mask, with normalisers in every second of them, for acting in NumPy and in torch, MLP
and CNN. This one property catches wrong masks, wrong encodings, wrong statistics and rounded actions.
"""

import numpy as np
import optree
import torch
from gymnasium import spaces

from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.backends.torch.network import to_tensors
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.config.sections import PolicyConfig
from inchworm.core.types import Minibatch
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.fake import create_fake_rollout

ROWS = 6
FILTERS = ((4, 3, 2), (4, 2, 1))


def spec_of(case, space, kind, normalize):
    config = PolicyConfig(
        kind=kind,
        hidden_sizes=(6,),
        action_bounds=case.bounds,
        normalize_observations=normalize,
        normalize_values=normalize,
        cnn_filters=FILTERS,
        cnn_features=5,
    )
    return PolicySpec(case.observation_space(space), case.action_space, config)


def ratios(actor, learner, observations, *, deterministic=False):
    """log pi_learner - log pi_actor of the actions that the actor takes."""
    step = actor.act(observations, (), np.ones(ROWS, bool), np.random.default_rng(1), deterministic=deterministic)
    row = torch.zeros((1, ROWS))
    batched = to_tensors(optree.tree_map(lambda leaf: leaf[None], (observations, step.actions)), "cpu")
    zeros = dict.fromkeys(("log_probs", "advantages", "returns", "values"), row)
    minibatch = Minibatch(observations=batched[0], actions=batched[1], valid=row == 0, episode_starts=row != 0, **zeros)
    with torch.no_grad():
        evaluation = learner.evaluate(minibatch)
    assert torch.isfinite(evaluation.entropy).all()
    return evaluation.log_probs[0].numpy() - step.log_probs


def test_the_learner_agrees_with_the_actor(request, case, observation_space):
    normalize = sum(request.node.callspec.indices.values()) % 2 == 1  # every space meets both
    image = isinstance(observation_space, spaces.Box) and observation_space.shape == (8, 9, 3)
    for kind in ("mlp", "cnn") if image else ("mlp",):
        spec = spec_of(case, observation_space, kind, normalize)
        learner = TorchPolicy(spec, seed=2)
        with torch.no_grad():
            learner.network.actor["head"].weight.mul_(100)  # so that the distribution depends on the observation
        if normalize:
            rollout = create_fake_rollout(spec.observation_space, spec.action_space, 5, 2, seed=3)
            learner.update_statistics(rollout, torch.randn(5, 2))
        observations = case.observations(observation_space, (ROWS,), np.random.default_rng(4))
        actors = [learner] if kind == "cnn" else [learner, NumpyPolicy(spec, learner.get_weights())]
        for actor in actors:
            np.testing.assert_allclose(ratios(actor, learner, observations), 0, atol=5e-5)


def test_in_float64_they_agree_to_1e_10(case):
    space = spaces.Dict({"b": spaces.Box(-1, 1, (2,)), "a": spaces.Discrete(3)})
    spec = spec_of(case, space, "mlp", True)
    learner = TorchPolicy(spec, seed=2).double()
    with torch.no_grad():
        learner.network.actor["head"].weight.mul_(100)
    learner.update_statistics(create_fake_rollout(spec.observation_space, spec.action_space, 5, 2, seed=3), torch.randn(5, 2))
    observations = case.observations(space, (ROWS,), np.random.default_rng(4))
    for actor in (learner, NumpyPolicy(spec, learner.get_weights())):
        for deterministic in (False, True):
            difference = ratios(actor, learner, observations, deterministic=deterministic)
            assert difference.dtype == np.float64
            np.testing.assert_allclose(difference, 0, atol=1e-10)
