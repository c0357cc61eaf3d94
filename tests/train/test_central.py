"""Training with a central critic: whole runs in environments with state(), and what is refused."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gymnasium import spaces

from inchworm import (
    NumpyPolicy,
    PolicyConfig,
    PolicyMap,
    PolicySpec,
    PPOConfig,
    PPOOptimizer,
    PPOTrainer,
    RolloutCollector,
    TorchPolicy,
    make_vector_env,
)
from inchworm.backends.torch.network import Network
from inchworm.core.errors import ConfigError, InchwormError, RolloutError

pytest.importorskip("pettingzoo")
from inchworm.worlds.toys import DEATHS, JOINS, Comings, comings

PPO = PPOConfig(rollout_steps=16, num_minibatches=2, update_epochs=2)
CENTRAL = PolicyConfig(hidden_sizes=(8,), memory_size=8, central_critic=True)
WORLD = partial(comings, plan=JOINS, masks="key")


def test_credit_after_death_needs_a_central_critic() -> None:
    """A custom network cannot train in such an environment, and no such policy learns from a rollout in which agents died."""
    with make_vector_env(lambda: Comings(DEATHS), 2, global_state=True) as env:
        plain = PolicySpec(env.observation_space, env.action_space, PolicyConfig(hidden_sizes=(4,)))
        with pytest.raises(ConfigError, match="which only a central critic can value"):
            PPOTrainer(TorchPolicy(plain, network=Network()), env, PPO)
        collector = RolloutCollector(env, NumpyPolicy(plain))
        all_alive = collector.collect(2)  # of three agents in each of two copies the second dies after 2 steps
        some_dead = collector.collect(4)
    learner = PPOOptimizer(TorchPolicy(plain), PPO)
    assert learner.update(all_alive)["epochs"] > 0
    with pytest.raises(RolloutError, match="agents that died, so credit continues after death"):
        learner.update(some_dead)


@pytest.mark.filterwarnings("error")  # neither is a ratio off nor a rollout stale
def test_several_policies_with_central_critics(tmp_path: Path) -> None:
    several = PolicyMap(policies={"a": CENTRAL, "b": CENTRAL.replace(kind="gru")}, lane_map=["a", "b", "a"])
    with PPOTrainer(several, WORLD, PPO, num_envs=2, run_dir=tmp_path) as trainer:
        history = trainer.train(100)
    assert max(*history["a/ratio_error"], *history["b/ratio_error"]) < 5e-5
    mixed = PolicyMap(policies={"a": CENTRAL, "b": PolicyConfig()}, lane_map=["a", "b", "a"])
    with pytest.raises(ConfigError, match="credited with rewards after death, which only a central critic can value"):
        PPOTrainer(mixed, WORLD, PPO, num_envs=2)


def test_what_cannot_be_is_refused_in_one_line() -> None:
    def refused(words: str, kind: type[InchwormError], build: Any) -> None:
        with pytest.raises(kind, match=words) as caught:
            build()
        assert "\n" not in str(caught.value)

    refused("state", InchwormError, lambda: PPOTrainer(CENTRAL, "CartPole-v1", PPO, num_envs=2))
    refused("does not learn a central critic", ConfigError, lambda: PPOTrainer(CENTRAL, WORLD, PPO, num_envs=2, backend="numpy").learner)
    with make_vector_env(WORLD, 2, global_state=True) as env:
        refused("set policy.central_critic=true, create it without global_state", ConfigError, lambda: PPOTrainer("mlp", env, PPO))
        other = PolicySpec(env.observation_space, env.action_space, CENTRAL, spaces.Box(-1, 1, (7,)))
        refused("made for the global state space", InchwormError, lambda: PPOTrainer(other, env, PPO))
