"""Tests of env/registry.py: a world from another package is trained in by its id; an id of a known one is answered with what to type."""

import importlib.util
import sys

import gymnasium as gym
import numpy as np
import pytest

from doubles.duel import DuelVectorEnv
from inchworm import EvalConfig, PPOConfig, PPOTrainer, TrainingConfig, evaluate_policy, evaluate_vs_heuristic
from inchworm.collect.opponents import RandomActor
from inchworm.config.sections import EnvConfig, OpponentConfig, RunConfig
from inchworm.core.errors import ConfigError, EnvError
from inchworm.env import registry
from inchworm.env.make import make_env
from inchworm.env.registry import World, find_world, heuristic_env, package_hint, register_world, vectorised


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


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.mark.parametrize(
    ("id", "install", "typed"),
    [
        ("MiniGrid-Empty-5x5-v0", "minigrid", "minigrid:MiniGrid-Empty-5x5-v0"),
        ("BabyAI-GoTo-v0", "minigrid", "minigrid:BabyAI-GoTo-v0"),
        ("minigrid:MiniGrid-Empty-5x5-v0", "minigrid", "minigrid:MiniGrid-Empty-5x5-v0"),
        ("MiniWorld-Hallway-v0", "miniworld", "miniworld:MiniWorld-Hallway-v0"),
        ("highway-fast-v0", "highway-env", "highway_env:highway-fast-v0"),
        ("parking-ActionRepeat-v0", "highway-env", "highway_env:parking-ActionRepeat-v0"),
        ("FetchReach-v4", "gymnasium-robotics", "gymnasium_robotics:FetchReach-v4"),
        ("AntMaze_UMaze-v5", "gymnasium-robotics", "gymnasium_robotics:AntMaze_UMaze-v5"),
        ("PandaReach-v3", "panda-gym", "panda_gym:PandaReach-v3"),
        ("VizdoomBasic-v1", "vizdoom", "vizdoom.gymnasium_wrapper:VizdoomBasic-v1"),
        ("dm_control/cheetah-run-v0", '"shimmy[dm-control]"', "shimmy:dm_control/cheetah-run-v0"),
        ("Pong-v4", '"inchworm[atari]"', "ALE/Pong-v5"),
        ("Breakout-ramDeterministic-v4", '"inchworm[atari]"', "ALE/Breakout-v5"),
        ("procgen:procgen-coinrun-v0", "procgen-gym", "procgen_gym:procgen_gym/procgen-coinrun-v0"),
        ("simple_spread_v3", "mpe2", "mpe2.simple_spread_v3:parallel_env"),
        ("mpe2.simple_spread_v3", "mpe2", "mpe2.simple_spread_v3:parallel_env"),
        ("pettingzoo.classic.chess_v6", '"inchworm[marl]"', "pettingzoo.classic.chess_v6:env"),
        ("pettingzoo.sisl.pursuit_v4", '"inchworm[marl]"', "pettingzoo.sisl.pursuit_v4:parallel_env"),
    ],
)
@pytest.mark.usefixtures("nothing_installed")
def test_what_to_install_and_what_to_type_then(id, install, typed):
    assert package_hint(id) == f"type: pip install {install}, then use {typed}"


@pytest.mark.usefixtures("nothing_installed")
def test_a_module_that_is_missing_is_answered_with_what_to_install():
    assert package_hint("mpe2.simple_spread_v3:parallel_env") == "type: pip install mpe2"
    assert package_hint("own.module:parallel_env") is None


def test_a_module_alone_is_answered_with_what_to_make_in_it():
    with pytest.raises(EnvError, match=r"not registered with Gymnasium; the package mpe2 is installed; use mpe2.simple_v3:parallel_env$"):
        make_env(EnvConfig(id="mpe2.simple_v3"))
    assert package_hint("mpe2.simple_v3:parallel_env") is None


@pytest.mark.parametrize("id", ["CartPole-v1", "MyGrid-v0", "Pongo-v1", "exit", "package.module:make_env"])
def test_other_ids_have_no_hint(id):
    assert package_hint(id) is None


@pytest.mark.usefixtures("nothing_installed")
def test_an_id_that_is_not_registered_is_not_answered_with_another_environment():
    with pytest.raises(EnvError, match=r"not registered with Gymnasium; type: pip install minigrid, then use minigrid:MiniGrid-Empty"):
        make_env(EnvConfig(id="MiniGrid-Empty-5x5-v0"))
    with pytest.raises(EnvError, match=r"no module minigrid; type: pip install minigrid, then use minigrid:MiniGrid-Empty-5x5-v0$"):
        make_env(EnvConfig(id="minigrid:MiniGrid-Empty-5x5-v0"))
    with pytest.raises(EnvError, match=r"'Quadruped-v0' is not registered with Gymnasium$"):  # nothing is close
        make_env(EnvConfig(id="Quadruped-v0"))


def test_a_package_that_is_installed_but_not_imported_is_named_in_the_id(tmp_path, monkeypatch):
    (tmp_path / "miniworld").mkdir()
    (tmp_path / "miniworld" / "__init__.py").write_text(
        "import gymnasium\ngymnasium.register('MiniWorld-Toy-v0', 'gymnasium.envs.classic_control:CartPoleEnv')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EnvError, match=r"; the package miniworld is installed; use miniworld:MiniWorld-Toy-v0$"):
        make_env(EnvConfig(id="MiniWorld-Toy-v0"))
    try:
        assert make_env(EnvConfig(id="miniworld:MiniWorld-Toy-v0")).spec.id == "MiniWorld-Toy-v0"
        assert make_env(EnvConfig(id="MiniWorld-Toy-v0"))  # imported now
        with pytest.raises(EnvError, match=r"did you mean MiniWorld-Toy-v0\?"):  # its own names are nearer than the package
            make_env(EnvConfig(id="MiniWorld-Toyy-v0"))
    finally:
        gym.registry.pop("MiniWorld-Toy-v0", None)
        sys.modules.pop("miniworld", None)


def test_a_version_that_gymnasium_has_dropped_is_answered_with_the_newest():
    with pytest.raises(EnvError, match=r"^env\.id='HalfCheetah-v3' cannot be made by this version of Gymnasium; use HalfCheetah-v5$"):
        make_env(EnvConfig(id="HalfCheetah-v3"))
