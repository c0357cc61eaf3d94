"""Tests of env/registry.py: a world from another package is trained in, scored and played against by its id."""

import numpy as np
import pytest

from doubles.duel import DuelVectorEnv
from inchworm import EvalConfig, PPOConfig, PPOTrainer, TrainingConfig, evaluate_policy, evaluate_vs_heuristic
from inchworm.collect.actors import RandomActor
from inchworm.config.sections import EnvConfig, OpponentConfig, RunConfig
from inchworm.core.errors import ConfigError, EnvError
from inchworm.env import registry
from inchworm.env.registry import World, find_world, heuristic_env, register_world, vectorised


class Drawn(DuelVectorEnv):
    """Games whose episodes get seeds here."""

    def reset(self, seeds=None, indices=None):
        copies = range(self.num_envs) if indices is None else indices
        return super().reset([10 * copy for copy in copies] if seeds is None else seeds, copies)


class Heuristic(RandomActor):
    """Plays the greatest number it may at full skill."""

    def __init__(self, skill):
        super().__init__(Drawn.action_space)
        self.number = round(4 * skill)

    def act(self, observations, state, episode_starts, rng, *, deterministic=False):
        step = super().act(observations, state, episode_starts, rng)
        step.actions[:] = step.env_actions[:] = self.number
        return step


DUEL = World(
    make_vector=lambda config, **_: Drawn(config.num_envs),
    kwargs_of=lambda rules: rules if isinstance(rules, set) else None,
    make_heuristic=lambda _, skill: Heuristic(skill),
    has_teams=True,
)
NOT_A_WORLD = "text"


@pytest.fixture(autouse=True)
def worlds(monkeypatch):
    monkeypatch.setattr(registry, "_WORLDS", dict(registry._WORLDS))
    register_world("Duel-v0", f"{__name__}:DUEL")


def test_a_world_from_outside_trains_evaluates_and_plays():
    config = TrainingConfig(
        env=EnvConfig(id="Duel-v0", num_envs=4),
        ppo=PPOConfig(rollout_steps=8, num_minibatches=2, update_epochs=1),
        opponent=OpponentConfig(mode="heuristic", skill=0.5),
        evaluation=EvalConfig(episodes=4, num_envs=2, interval=0, final_episodes=4),
        run=RunConfig(seed=1, max_iterations=2, backend="numpy"),
    )
    with PPOTrainer("mlp", config.env, config) as trainer:
        assert trainer.env.num_lanes == 8  # one team of each copy
        history = trainer.train()
        assert len(history["timesteps"]) == 2
        stats = trainer.evaluate(4)
        assert set(np.unique(stats.infos["win"])) <= {0.0, 0.5, 1.0}
        policy = trainer.collector.policy
    assert evaluate_policy(policy, "Duel-v0", 4, num_envs=2).episodes == 4
    match, _ = evaluate_vs_heuristic(Heuristic(1.0), "Duel-v0", 4, skill=0.0)
    assert match.wins == 4


def test_worlds_are_found_by_id():
    assert find_world("Duel-v0") is DUEL
    assert find_world("Acrobot-v1") is None
    assert "Duel-v0" in registry.team_worlds()
    assert vectorised(EnvConfig(id="Duel-v0")) is DUEL
    assert vectorised(EnvConfig(id="Duel-v0", frame_stack=2)) is None
    assert vectorised(EnvConfig(id="Duel-v0", native=False)) is None


def test_an_id_is_registered_once():
    register_world("Duel-v0", f"{__name__}:DUEL")  # the same again
    with pytest.raises(EnvError, match="Duel-v0 is registered already"):
        register_world("Duel-v0", "elsewhere:DUEL")
    register_world("Text-v0", f"{__name__}:NOT_A_WORLD")
    with pytest.raises(EnvError, match="registered as a world, but is of type str"):
        find_world("Text-v0")


def test_worlds_with_a_heuristic():
    assert heuristic_env("Duel-v0") == EnvConfig(id="Duel-v0")
    with pytest.raises(ConfigError, match=r"no heuristic for the id CartPole-v1.*Duel-v0"):
        heuristic_env("CartPole-v1")
    with pytest.raises(ConfigError, match="no heuristic for int"):
        heuristic_env(3)
