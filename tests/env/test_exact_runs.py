"""A run over another library's vector env, stopped halfway and resumed with a new one, is bit-identical to an uninterrupted run."""

import hashlib
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from doubles.vector import CartPoles, Kept, Moody
from inchworm import PPOConfig, PPOTrainer


def cartpoles(kind):
    return lambda: kind([lambda: gym.make("CartPole-v1", max_episode_steps=30)] * 3, autoreset_mode=AutoresetMode.DISABLED)


def pendulums():
    return SyncVectorEnv([lambda: gym.make("Pendulum-v1")] * 2, autoreset_mode=AutoresetMode.DISABLED)


VECTOR_ENVS = {
    "sync": cartpoles(SyncVectorEnv),
    "async": cartpoles(AsyncVectorEnv),
    "continuous": pendulums,
    "get_state": Kept,
}


def trainer(make, seed=3):
    return PPOTrainer("mlp", make(), PPOConfig(rollout_steps=20, num_minibatches=2, update_epochs=2), seed=seed)


def fingerprint(run):
    digest = hashlib.sha256()
    for name, array in sorted(run.policy.get_weights().items()):
        digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest(), run.episode_rewards, run.total_timesteps


@pytest.mark.parametrize("name", VECTOR_ENVS)
def test_to_2n_is_to_n_and_on(name, tmp_path):
    make = VECTOR_ENVS[name]
    with trainer(make) as straight:
        steps = 3 * 20 * straight.env.num_lanes
        straight.train(2 * steps)
        expected = fingerprint(straight)
    with trainer(make) as first:
        first.train(steps)
        first.save_checkpoint(tmp_path)
        assert fingerprint(first) != expected
    with trainer(make) as second:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            second.load_checkpoint(tmp_path)
        second.train(2 * steps)
        assert fingerprint(second) == expected
        assert second.env.exact


def moody():
    return SyncVectorEnv([lambda: Moody(False), lambda: Moody(True)], autoreset_mode=AutoresetMode.DISABLED)


@pytest.mark.parametrize(
    ("make", "words"), [(moody, "1 of 2 copies could not be restored"), (lambda: CartPoles(2), "CartPoles has no get_state")]
)
def test_what_did_not_come_back_is_in_the_manifest_of_all_later_checkpoints(make, words, tmp_path):
    with trainer(make) as first:
        first.train(60)
        first.save_checkpoint(tmp_path / "a")
    with trainer(make) as second:
        with pytest.warns(UserWarning, match="starting (a )?new episode"):
            second.load_checkpoint(tmp_path / "a")
        second.train(120)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path = second.save_checkpoint(tmp_path / "b")
        with pytest.raises(AssertionError, match=words):
            raise AssertionError((path / "manifest.json").read_text())
