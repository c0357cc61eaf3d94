"""Training teams with PPOTrainer: lanes, sizes, resumes, and dead rows that change nothing."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pettingzoo")
from inchworm import EnvConfig, EvalConfig, OpponentConfig, PolicyConfig, PPOConfig, PPOTrainer, RunConfig, TrainingConfig, load_replay
from inchworm.core.errors import ConfigError, EnvError
from inchworm.env.source import make_vector_env
from inchworm.worlds.toys import Comings, Sacrifice

ID = "inchworm.worlds.toys:comings"
SMALL = PPOConfig(rollout_steps=10, num_minibatches=2, update_epochs=2)
NORMALISED = PolicyConfig(hidden_sizes=(8,), normalize_observations=True, normalize_values=True)
NO_SCORES = EvalConfig(interval=0, final_episodes=0)


def test_num_envs_counts_copies_and_steps_are_of_the_living():
    with PPOTrainer("mlp", Comings, SMALL, num_envs=4) as trainer:
        assert (trainer.env.num_lanes, trainer.config.env.num_envs) == (12, 4)
        assert trainer.size.startswith("rollout: 4 envs x 3 agents x 10 steps (")
        rollout = trainer.collect_rollouts()
        # 10 steps: a game of 6 (18 - 4 dead rows) and 4 steps of the next (12 - 2)
        assert rollout.num_valid == 4 * (14 + 10)
        history = trainer.train(200)
        assert history["timesteps"][-1] % 4 == 0
        assert history["episode/team_return"] == [185.0] * len(history["episode/team_return"])
        assert max(history["ratio_error"]) < 5e-5


def test_one_environment_is_one_copy_with_all_its_lanes():
    with PPOTrainer("mlp", Comings(), PPOConfig(rollout_steps=10, minibatch_size=30, update_epochs=1)) as trainer:
        assert trainer.env.num_lanes == 3
        assert trainer.config.env.id == "inchworm.worlds.toys:Comings"
        trainer.train(30)
    with pytest.raises(ConfigError, match=r"num_envs=2, but the Comings has 1 lane\(s\)"):
        PPOTrainer("mlp", Comings(), SMALL, num_envs=2)
    with pytest.raises(ConfigError, match="stays in this process; pass a factory"):
        PPOTrainer("mlp", Comings(), TrainingConfig(env=EnvConfig(num_envs=2, num_workers=1)))


def test_a_vector_env_of_teams_says_how_many_copies_it_has():
    with PPOTrainer("mlp", make_vector_env(Comings, 2), PPOConfig(rollout_steps=10, minibatch_size=60, update_epochs=1)) as trainer:
        assert (trainer.config.env.num_envs, trainer.env.num_lanes) == (2, 6)
        trainer.train(50)
    with pytest.raises(ConfigError, match="num_envs=6, but the InProcessVectorEnv has 2 copies"):
        PPOTrainer("mlp", make_vector_env(Comings, 2), SMALL, num_envs=6)


def test_minibatches_are_measured_by_lanes():
    """4 copies of 3 lanes x 10 steps are 120 samples, not 40."""
    for given in ({"minibatch_size": 120}, {"num_minibatches": 120}):
        with PPOTrainer("mlp", Comings, PPOConfig(rollout_steps=10, update_epochs=1, **given), num_envs=4):
            pass
    for given in ({"minibatch_size": 121}, {"num_minibatches": 121}):
        with pytest.raises(ConfigError, match=rf"ppo.{next(iter(given))}=121 is .* \(12 lanes x 10 steps = 120\)"):
            PPOTrainer("mlp", Comings, PPOConfig(rollout_steps=10, **given), num_envs=4)


def test_what_is_made_for_one_agent_does_not_fit():
    for given in ({"frame_stack": 2}, {"atari": True}):
        with pytest.raises(EnvError, match=f"env.{next(iter(given))} cannot be used with"):
            make_vector_env(EnvConfig(id=ID, num_envs=1, **given))
    with make_vector_env(EnvConfig(id=ID, num_envs=1, max_episode_steps=2)) as env:
        env.reset()
        env.step(np.zeros(3, np.int64))
        assert env.step(np.zeros(3, np.int64)).truncated.tolist() == [True, False, True]  # the second died in that step


@pytest.mark.slow
@pytest.mark.parametrize(("central", "least", "most"), [(True, 1.7, 1.91), (False, -0.11, 0.3)])
def test_a_sacrifice_is_learned_where_credit_runs_on_after_death(central: bool, least: float, most: float):
    """The hero's death costs 0.1 and wins 1 for each of two: the best is 1.9. Where credit stops at death, it learns to live, for 0."""
    config = TrainingConfig(
        policy=PolicyConfig(hidden_sizes=(32,), central_critic=central),
        ppo=PPOConfig(rollout_steps=32, num_minibatches=2, learning_rate=5e-3, ent_coef=0.0),
        evaluation=NO_SCORES,
    )
    with PPOTrainer("mlp", Sacrifice, config, num_envs=16) as trainer:
        history = trainer.train(10_000)
    assert 0.5 < history["episode/team_return"][0] < 1.4  # about half of the heroes, at first
    assert least < history["episode/team_return"][-1] < most


def test_a_game_of_every_evaluation_is_kept(tmp_path: Path) -> None:
    env = EnvConfig(id="Skirmish-v0", num_envs=2, num_workers=0, kwargs={"units": ["scout"], "max_steps": 8, "wall_pairs": 0})
    config = TrainingConfig(
        env=env,
        ppo=PPOConfig(rollout_steps=8, num_minibatches=1, update_epochs=1),
        opponent=OpponentConfig(mode="heuristic"),
        evaluation=EvalConfig(interval=1, seeds=[5, 6], num_envs=2, save_replay=True),
        run=RunConfig(total_timesteps=32),
    )
    with PPOTrainer("mlp", env, config, run_dir=tmp_path) as trainer:
        trainer.train()
        assert not trainer.failures
    files = sorted((tmp_path / "replays").iterdir())
    assert [path.name for path in files] == [f"iteration-{iteration:09d}.json" for iteration in range(1, trainer.state.iteration + 1)]
    replay = load_replay(files[-1])
    assert replay["meta"]["players"] == ["policy", "heuristic"]
    assert replay["meta"]["seed"] == 5


def test_an_environment_without_replays_is_refused_before_training(tmp_path: Path) -> None:
    config = TrainingConfig(evaluation=EvalConfig(save_replay=True), run=RunConfig(total_timesteps=32))
    with (
        PPOTrainer("mlp", "CartPole-v1", config, num_envs=2, run_dir=tmp_path) as trainer,
        pytest.raises(ConfigError, match=r"evaluation.save_replay: cannot make a replay of"),
    ):
        trainer.train()
