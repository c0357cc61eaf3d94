"""The torch loss and distributions: gradients by finite differences, other libraries' densities, masks that carry no gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from inchworm.backends.torch.distributions import log_prob_and_entropy, log_tanh_slope
from inchworm.backends.torch.learner import PPOOptimizer
from inchworm.backends.torch.loss import TERMS, normalize, ppo_loss
from inchworm.config.sections import PPOConfig
from inchworm.core.types import Evaluation, LossCoefficients, Minibatch
from inchworm.policy.layout import action_layout

MIX = spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(-1, 1, (2,)), "c": spaces.MultiBinary(2)})


def samples(policy, collect, rng, spec=None):
    """[N] samples under the names of `compute_ppo_loss`, far enough from the policy that some ratios are clipped."""
    rollout = collect(policy, 8, 2)
    flat = lambda leaf: leaf.reshape(16, *leaf.shape[2:])  # noqa: E731
    tree = {"observations": rollout.observations, "actions": rollout.actions, "log_probs": rollout.log_probs}
    tree = {name: torch.utils._pytree.tree_map(flat, value) for name, value in tree.items()}
    tree["log_probs"] = tree["log_probs"] + rng.normal(0, 0.4, 16).astype(np.float32)
    return {**tree, **{name: rng.normal(size=16) for name in ("advantages", "returns", "values")}}


@pytest.mark.parametrize("clip_vloss", [False, True])
@pytest.mark.parametrize(
    ("action_space", "options"),
    [(spaces.Discrete(3), {}), (MIX, {"shared_trunk": True}), (spaces.Box(-1, 1, (2,)), {"action_bounds": "tanh"})],
    ids=["discrete", "mix", "tanh"],
)
def test_gradients_by_finite_differences(make_policy, collect, action_space, options, clip_vloss):
    rng = np.random.default_rng(0)
    policy = make_policy(action_space=action_space, hidden_sizes=(4,), **options)
    with torch.no_grad():
        policy.network.actor["head"].weight.mul_(50)
    batch = samples(policy, collect, rng)
    policy.double()
    learner = PPOOptimizer(policy, PPOConfig(clip_coef=0.3, ent_coef=0.1, clip_vloss=clip_vloss), device="cpu")
    terms = learner.compute_ppo_loss(**batch)
    assert 0 < float(terms["clip_fraction"]) < 1
    terms["loss"].backward()
    step = 1e-6
    for parameter in policy.parameters():
        if not parameter.numel():
            continue
        flat, gradient = parameter.data.reshape(-1), parameter.grad.reshape(-1)
        for index in rng.choice(len(flat), min(4, len(flat)), replace=False):
            losses = []
            for sign in (1, -1):
                flat[index] += sign * step
                losses.append(float(learner.compute_ppo_loss(**batch)["loss"].detach()))
                flat[index] -= sign * step
            assert float(gradient[index]) == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-6, abs=1e-8)


def test_against_torch_distributions():
    torch.manual_seed(0)
    layout = action_layout(spaces.Tuple([spaces.Discrete(4), spaces.MultiDiscrete([2, 3]), spaces.Box(-1, 1, (2,))]), "clip")
    outputs, log_std = torch.randn(5, layout.num_outputs, dtype=torch.float64), torch.tensor([-0.3, 0.2], dtype=torch.float64)
    choices, gaussians = torch.stack([torch.randint(n, (5,)) for n in (4, 2, 3)], -1), torch.randn(5, 2, dtype=torch.float64)
    parts = [torch.distributions.Categorical(logits=outputs[:, group]) for group in layout.groups]
    normal = torch.distributions.Normal(outputs[:, 9:], log_std.exp())
    log_p, entropy = log_prob_and_entropy(layout, outputs, log_std, None, choices, gaussians)
    expected = sum(part.log_prob(choices[:, index]) for index, part in enumerate(parts)) + normal.log_prob(gaussians).sum(-1)
    torch.testing.assert_close(log_p, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, sum(part.entropy() for part in parts) + normal.entropy().sum(-1), rtol=0, atol=1e-12)


def test_tanh_against_a_transformed_distribution():
    torch.manual_seed(0)
    layout = action_layout(spaces.Box(-1, 1, (3,)), "tanh")
    means, log_std = torch.randn(6, 3, dtype=torch.float64), torch.tensor([-0.5, 0.0, 0.3], dtype=torch.float64)
    normal = torch.distributions.Normal(means, log_std.exp())
    squashed = torch.distributions.TransformedDistribution(normal, torch.distributions.TanhTransform())
    u = normal.sample()
    log_p, _ = log_prob_and_entropy(layout, means, log_std, None, torch.zeros(6, 0, dtype=torch.long), u)
    torch.testing.assert_close(log_p, squashed.log_prob(u.tanh()).sum(-1), rtol=0, atol=1e-9)


def test_the_slope_of_tanh_has_finite_gradients_everywhere():
    x = torch.tensor([-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4], requires_grad=True)
    log_tanh_slope(x).sum().backward()
    # d/dx log(1 - tanh²x) = -2 tanh x
    torch.testing.assert_close(x.grad, -2 * torch.tanh(x.detach()))


def test_masked_logits_get_no_gradient():
    layout = action_layout(spaces.MultiDiscrete([3, 2]), "clip")
    outputs = torch.randn(4, 5, requires_grad=True)
    mask = torch.tensor([[True, False, True, False, True]] * 3 + [[False, True, False, True, False]])  # the last row: one legal choice each
    choices = torch.tensor([[0, 1], [2, 1], [0, 1], [1, 0]])
    log_p, entropy = log_prob_and_entropy(layout, outputs, torch.zeros(0), mask, choices, torch.zeros(4, 0))
    (log_p.sum() + entropy.sum()).backward()
    assert torch.isfinite(outputs.grad).all()
    assert (outputs.grad[~mask] == 0).all()
    assert (outputs.grad[:3, [0, 2]] != 0).all()
    assert (outputs.grad[3] == 0).all()  # nothing to choose, nothing to learn
    assert log_p[3] == 0
    assert entropy[3] == 0


def test_clipping_cuts_the_gradient_and_only_there():
    # A ratio of e² with A > 0 is flat; with A < 0, or at e^0.1, the gradient of -r A with respect to log r is -r A.
    log_probs = torch.tensor([[2.0, 2.0, 0.1]], dtype=torch.float64, requires_grad=True)
    row = torch.zeros(1, 3, dtype=torch.float64)
    minibatch = Minibatch(
        observations=row,
        actions=row,
        log_probs=row,
        advantages=torch.tensor([[1.0, -1.0, 1.0]], dtype=torch.float64),
        returns=row,
        values=row,
        valid=row == 0,
        episode_starts=row != 0,
    )
    evaluation = Evaluation(log_probs, row, row, torch.ones(()))
    ppo_loss(evaluation, minibatch, LossCoefficients(0.2, 0.5, 0.0, False), torch.tensor(3))["loss"].backward()
    np.testing.assert_allclose(log_probs.grad.numpy(), [[0, np.exp(2) / 3, -np.exp(0.1) / 3]], rtol=1e-12)


def test_metrics_carry_no_gradient():
    row = torch.zeros(1, 2)
    minibatch = Minibatch(
        observations=row, actions=row, log_probs=row, advantages=row, returns=row, values=row, valid=row == 0, episode_starts=row != 0
    )
    log_probs = torch.zeros(1, 2, requires_grad=True)
    terms = ppo_loss(Evaluation(log_probs, row, row, torch.ones(())), minibatch, LossCoefficients(0.2, 0.5, 0.0, False), torch.tensor(2))
    assert terms["loss"].requires_grad
    assert not terms["approx_kl"].requires_grad
    assert not terms["clip_fraction"].requires_grad


def test_normalize_is_not_differentiated_into_nothing():
    assert normalize(torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)).item() == 1.0


def evaluated(policy, rows=16):
    observations = torch.randn(1, rows, 3)
    return observations, policy.evaluate(
        Minibatch(
            observations=observations,
            actions=torch.full((1, rows, 2), 50.0),  # far out, where tanh has saturated
            log_probs=torch.zeros(1, rows),
            advantages=torch.ones(1, rows),
            returns=torch.zeros(1, rows),
            values=torch.zeros(1, rows),
            valid=torch.ones(1, rows, dtype=torch.bool),
            episode_starts=torch.zeros(1, rows, dtype=torch.bool),
        )
    )


def test_saturated_tanh_actions_have_finite_gradients(make_policy):
    policy = make_policy(action_space=spaces.Box(-1, 1, (2,)), action_bounds="tanh")
    _, evaluation = evaluated(policy)
    assert torch.isfinite(evaluation.log_probs).all()
    (evaluation.log_probs.sum() + evaluation.entropy.sum()).backward()
    for name, parameter in policy.named_parameters():
        if parameter.grad is not None:
            assert torch.isfinite(parameter.grad).all(), name


def test_the_terms_are_named_once():
    ones = torch.ones((1, 2))
    evaluation = Evaluation(ones, ones, ones, 1.0)
    names = ("observations", "actions", "log_probs", "advantages", "returns", "values")
    minibatch = Minibatch(**dict.fromkeys(names, ones), valid=ones.bool(), episode_starts=ones.bool(), policy_state=())
    assert tuple(ppo_loss(evaluation, minibatch, LossCoefficients(0.2, 0.5, 0.01, False), ones.sum())) == TERMS


def test_several_minibatches_are_normalised_at_once_and_each_for_itself():
    # [L, minibatches, N]: 1, 3 | 10, 30 | 7 alone, whose neighbour is padding.
    advantages = torch.tensor([[[1.0, 3.0], [10.0, 30.0], [7.0, 1e9]]])
    valid = torch.tensor([[[True, True], [True, True], [True, False]]])
    found = normalize(advantages, valid, dims=(0, 2))
    half = 0.5**0.5  # two samples a distance d apart: mean in the middle, std d / sqrt(2)
    torch.testing.assert_close(found[0, :2], torch.tensor([[-half, half], [-half, half]]))
    assert found[0, 2, 0] == 7.0
