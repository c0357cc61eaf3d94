"""The same batch and weights in Stable-Baselines3 give the same values, log-probs, advantages, loss, gradients and next weights.

Its value loss has no ½, so its vf_coef c is our 2c; it normalises advantages per minibatch with n - 1; Adam's eps is 1e-5 on both sides.
"""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from doubles.learners import tensors
from doubles.toys import SpacesEnv
from inchworm.backends.torch.gae import compute_advantages
from inchworm.backends.torch.learner import PPOOptimizer
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.config.sections import PolicyConfig, PPOConfig
from inchworm.core.seeding import restore_stream, stream_state
from inchworm.core.types import Minibatch
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.rollout import Rollout

pytest.importorskip("stable_baselines3")
pytestmark = pytest.mark.no_cover  # thousands of steps through lines that other tests reach
STEPS, LANES, SEEN = 32, 4, spaces.Box(-np.inf, np.inf, (5,))
CONFIG = PPOConfig(
    learning_rate=3e-3, gamma=0.98, gae_lambda=0.9, clip_coef=0.2, vf_coef=1.0, ent_coef=0.01, update_epochs=1, num_minibatches=1,
    normalize_advantages="minibatch", rollout_steps=STEPS,
)  # fmt: skip
NAMES = {
    "actor.0": "mlp_extractor.policy_net.0",
    "actor.1": "mlp_extractor.policy_net.2",
    "actor.head": "action_net",
    "critic.0": "mlp_extractor.value_net.0",
    "critic.1": "mlp_extractor.value_net.2",
    "critic.head": "value_net",
}


def peer_names():
    for ours, theirs in NAMES.items():
        for kind in ("weight", "bias"):
            yield f"{ours}.{kind}", f"{theirs}.{kind}"
    yield "log_std", "log_std"


def copied(values, theirs):
    return {our: values[their] for our, their in peer_names() if their in theirs}


def ours_and_theirs(action_space, config=CONFIG):
    from stable_baselines3 import PPO
    from stable_baselines3.common.logger import configure
    from stable_baselines3.common.vec_env import DummyVecEnv

    peer = PPO(
        "MlpPolicy", DummyVecEnv([lambda: SpacesEnv(SEEN, action_space)] * LANES), n_steps=STEPS, n_epochs=config.update_epochs,
        batch_size=STEPS * LANES // config.num_minibatches, learning_rate=config.learning_rate, gamma=config.gamma,
        gae_lambda=config.gae_lambda, clip_range=config.clip_coef, vf_coef=config.vf_coef / 2, ent_coef=config.ent_coef,
        max_grad_norm=config.max_grad_norm, seed=1, device="cpu",
    )  # fmt: skip
    peer.set_logger(configure(None, []))
    with torch.no_grad():
        peer.policy.action_net.weight.mul_(100)  # so that the policy is far from uniform
    spec = PolicySpec(SEEN, action_space, PolicyConfig())
    policy = TorchPolicy(spec)
    state = {name: tensor.numpy() for name, tensor in peer.policy.state_dict().items()}
    policy.set_weights({**policy.get_weights(), **copied(state, state)})
    return policy, peer


def rollout_of(policy, seed=0):
    """A rollout of both kinds of ends, acted by another policy so that ratios are not 1."""
    rng = np.random.default_rng(seed)
    observations = rng.standard_normal((STEPS, LANES, 5)).astype(np.float32)
    steps = [policy.act(observations[t], (), np.zeros(LANES, bool), rng) for t in range(STEPS)]
    terminated = rng.random((STEPS, LANES)) < 0.1
    return Rollout.from_dict(
        {
            "observations": observations,
            "actions": np.stack([step.actions for step in steps]),
            "log_probs": np.stack([step.log_probs for step in steps]) + rng.normal(0, 0.2, (STEPS, LANES)).astype(np.float32),
            "rewards": rng.standard_normal((STEPS, LANES)).astype(np.float32),
            "terminated": terminated,
            "truncated": (rng.random((STEPS, LANES)) < 0.1) & ~terminated,
            "next_observations": rng.standard_normal((STEPS, LANES, 5)).astype(np.float32),
        }
    )


def fill(peer, rollout):
    """Their buffer with our rollout, as their collect_rollouts does it: V of the true successor is added to truncated rewards."""
    buffer = peer.rollout_buffer
    buffer.reset()
    rewards = rollout.rewards.copy()
    cuts = {tuple(row): observation for row, observation in zip(rollout.cut_rows.tolist(), rollout.cut_observations)}
    starts = np.zeros(LANES, bool)
    with torch.no_grad():
        for t in range(STEPS):
            for lane in np.flatnonzero(rollout.truncated[t]):
                successor = torch.from_numpy(cuts[(t, int(lane))].copy())[None]
                rewards[t, lane] += CONFIG.gamma * peer.policy.predict_values(successor).item()
            values = peer.policy.predict_values(torch.from_numpy(rollout.observations[t].copy()))
            log_probs = torch.from_numpy(rollout.log_probs[t].copy())
            actions = rollout.actions[t].reshape(LANES, -1)
            buffer.add(rollout.observations[t], actions, rewards[t], starts, values, log_probs)
            starts = rollout.terminated[t] | rollout.truncated[t]
        last = np.stack([cuts[(STEPS - 1, lane)] for lane in range(LANES)])
        buffer.compute_returns_and_advantage(peer.policy.predict_values(torch.from_numpy(last)), starts)


@pytest.mark.parametrize("action_space", [spaces.Discrete(4), spaces.Box(-1, 1, (2,))], ids=["discrete", "box"])
def test_one_update_is_the_same(action_space):
    policy, peer = ours_and_theirs(action_space)
    rollout = rollout_of(policy)
    fill(peer, rollout)
    held = tensors(rollout)

    advantages = compute_advantages(policy, held, CONFIG)
    buffer = peer.rollout_buffer
    np.testing.assert_allclose(advantages.values, buffer.values, atol=1e-5)
    np.testing.assert_allclose(advantages.advantages, buffer.advantages, atol=1e-5)
    np.testing.assert_allclose(advantages.returns, buffer.returns, atol=1e-5)

    flat = rollout.observations.reshape(-1, 5)
    values, log_probs, entropy = peer.policy.evaluate_actions(
        torch.from_numpy(flat.copy()), torch.from_numpy(rollout.actions.reshape(STEPS * LANES, *rollout.actions.shape[2:]).copy())
    )
    fields = {name: held[name] for name in ("observations", "actions", "log_probs", "valid", "episode_starts")}
    fields |= {name: getattr(advantages, name) for name in ("advantages", "returns", "values")}
    found = policy.evaluate(Minibatch(**fields))
    torch.testing.assert_close(found.values.reshape(-1), values.reshape(-1), rtol=0, atol=1e-5)
    torch.testing.assert_close(found.log_probs.reshape(-1), log_probs, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.entropy.reshape(-1), entropy, rtol=0, atol=1e-5)

    learner = PPOOptimizer(policy, CONFIG, device="cpu")
    stats = learner.update(rollout)
    peer.train()
    logged = peer.logger.name_to_value
    assert stats["policy_loss"] == pytest.approx(logged["train/policy_gradient_loss"], abs=1e-5)
    assert stats["value_loss"] == pytest.approx(logged["train/value_loss"] / 2, abs=1e-5)
    assert stats["entropy"] == pytest.approx(-logged["train/entropy_loss"], abs=1e-5)
    assert stats["loss"] == pytest.approx(logged["train/loss"], abs=1e-5)
    assert stats["approx_kl"] == pytest.approx(logged["train/approx_kl"], abs=1e-5)
    assert stats["clip_fraction"] == pytest.approx(logged["train/clip_fraction"], abs=1e-7)
    assert stats["clip_fraction"] > 0.1  # the clip was at work
    assert stats["grad_norm"] > CONFIG.max_grad_norm  # and so was the clipping of gradients

    theirs = dict(peer.policy.named_parameters())
    mine = {name.removeprefix("network."): parameter for name, parameter in policy.named_parameters()}
    for our, their in peer_names():
        if their in theirs:
            torch.testing.assert_close(mine[our].grad, theirs[their].grad, rtol=0, atol=1e-5, msg=lambda text, our=our: f"{our}: {text}")
            torch.testing.assert_close(mine[our], theirs[their], rtol=0, atol=1e-5, msg=lambda text, our=our: f"{our}: {text}")


@pytest.mark.parametrize("action_space", [spaces.Discrete(4), spaces.Box(-1, 1, (2,))], ids=["discrete", "box"])
def test_a_thousand_adam_steps_stay_the_same(action_space, monkeypatch):
    config = CONFIG.replace(learning_rate=3e-4, update_epochs=10, num_minibatches=4)
    policy, peer = ours_and_theirs(action_space, config)
    learner = PPOOptimizer(policy, config, device="cpu")
    shuffles = restore_stream(stream_state(learner._stream))

    def permutation(count):
        """Our next shuffle in their order of samples: ours are step after step, theirs lane after lane."""
        steps, lanes = np.divmod(shuffles.permutation(count), LANES)
        return lanes * STEPS + steps

    monkeypatch.setattr(np.random, "permutation", permutation)
    initial = {their: tensor.detach().clone() for their, tensor in peer.policy.named_parameters()}
    for update in range(25):
        rollout = rollout_of(policy, seed=update)
        fill(peer, rollout)
        learner.update(rollout)
        peer.train()
    theirs, mine = dict(peer.policy.named_parameters()), policy.get_weights()
    assert int(learner.moments()["step"]) == 25 * 10 * 4 == 1000
    for our, their in peer_names():
        if their in theirs:
            expected = theirs[their].detach()
            assert (expected - initial[their]).norm() > 0.05 * initial[their].norm()  # the weights have moved
            error = (torch.from_numpy(mine[our]) - expected).norm() / expected.norm()
            assert error < 1e-5, our
