"""The noise of the gradient against every sample's own gradient."""

import numpy as np
import pytest

from doubles.known import known_policy
from doubles.toys import ConstantReward, PaidActions
from inchworm import NumpyPolicy, PolicyConfig, PolicySpec, PPOConfig, RolloutCollector, TrainingConfig, make_vector_env
from inchworm.analysis.estimates import gradient_noise
from inchworm.backends.registry import make_policy
from inchworm.core.errors import ConfigError

TRAINING = TrainingConfig(ppo=PPOConfig(gamma=PaidActions.discount, rollout_steps=16, num_minibatches=4))


@pytest.mark.parametrize("normalize", ["off", "batch"])
def test_it_agrees_with_brute_force(normalize: str) -> None:
    """One step, reward a, V = 0: the gradient of A log pi(a) by the two logits is A (a - p) (-1, 1)."""
    p = 0.2
    config = TrainingConfig(ppo=PPOConfig(rollout_steps=8, normalize_advantages=normalize))
    policy = known_policy(PaidActions(), p=p)
    with make_vector_env(lambda: PaidActions(1), 256) as env:
        rollout = RolloutCollector(env, policy).collect(8)
    found = gradient_noise(policy, rollout, config)
    advantages = rollout.actions.astype(np.float64)  # [8, 256]
    if normalize == "batch":
        advantages = (advantages - advantages.mean()) / advantages.std(ddof=1)
    samples = advantages * (rollout.actions - p)
    lanes = samples.mean(0)  # [256]
    assert (found.parts, found.samples) == (256, 8)
    assert found.noise == pytest.approx(2 * 8 * lanes.var(ddof=1), rel=1e-3)
    assert found.signal == pytest.approx(2 * (lanes.mean() ** 2 - lanes.var(ddof=1) / 256), rel=1e-3)
    assert found.noise == pytest.approx(2 * samples.var(), rel=0.2), "rows are independent here, so lanes tell what samples do"
    batches = samples.T.reshape(32, 64).mean(1)  # brute force: batches of 64 samples
    assert found.snr(64) == pytest.approx(batches.mean() ** 2 / batches.var(ddof=1), rel=0.5)
    if normalize == "off":
        assert found.noise_scale == pytest.approx((1 - p) / p, rel=0.25), "Var / mean^2 of a (1 - p)"
    # The error: 1 / sqrt of the number of parts is about what a variance of so many is known to.
    assert 0.5 / 16 < found.snr_se / found.snr_per_sample < 4 / 16


def test_where_nothing_is_to_be_learned_there_is_no_gradient() -> None:
    """The critic knows the constant reward, so advantages are 0, and what an update moves besides (the version) is not a gradient."""
    policy = known_policy(ConstantReward(), offset=1.0)
    with make_vector_env(ConstantReward, 4) as env:
        rollout = RolloutCollector(env, policy).collect(8)
    found = gradient_noise(policy, rollout, TrainingConfig(ppo=PPOConfig(rollout_steps=8, normalize_advantages="off")))
    assert (found.signal, found.snr_per_sample, found.snr(1000)) == (0.0, 0.0, 0.0)
    assert found.noise_scale == np.inf


@pytest.mark.filterwarnings("ignore:the rollout was made by weights")
def test_backends_agree_on_the_noise() -> None:
    spec = PolicySpec(PaidActions().observation_space, PaidActions().action_space, PolicyConfig(hidden_sizes=(8,), normalize_values=True))
    acts = NumpyPolicy(spec)
    acts.set_weights(acts.get_weights() | {"value_normalizer.count": np.array(9)})
    with make_vector_env(PaidActions, 16) as env:
        rollout = RolloutCollector(env, acts).collect(16)
    found = [gradient_noise(make_policy(spec, weights=acts.get_weights(), backend=name), rollout, TRAINING) for name in ("numpy", "torch")]
    assert found[0].snr_per_sample == pytest.approx(found[1].snr_per_sample, rel=1e-3)
    assert found[0].noise == pytest.approx(found[1].noise, rel=1e-3)
    with pytest.raises(ConfigError, match="normalisers have seen no data"):
        gradient_noise(NumpyPolicy(spec), rollout, TRAINING)
