"""Training teams with PPOTrainer: lanes, sizes, resumes, and dead rows that change nothing."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from doubles.runs import bits

pytest.importorskip("pettingzoo")
from inchworm import EnvConfig, EvalConfig, PolicyConfig, PPOConfig, PPOTrainer, RunConfig, TrainingConfig
from inchworm.core.errors import ConfigError, EnvError
from inchworm.env.source import make_vector_env
from inchworm.rollout.rollout import Rollout
from inchworm.tracking.jsonl import METRICS, read_rows
from inchworm.worlds.toys import JOINS, Comings, Sacrifice

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


@pytest.mark.parametrize("backend", ["torch", "numpy"])
def test_the_content_of_invalid_rows_changes_nothing(backend: str):
    """Other observations, actions, log-probs and rewards in the rows of the dead: the same weights, statistics and metrics, bit for bit."""
    config = TrainingConfig(policy=NORMALISED, ppo=SMALL, evaluation=NO_SCORES)
    results = []
    for garbled in (False, True):
        with PPOTrainer("mlp", lambda: Comings(JOINS), config, num_envs=3, backend=backend, seed=1) as trainer:
            metrics = []
            for _ in range(3):
                rollout = trainer.collect_rollouts()
                assert not rollout.valid.all()
                stats = trainer.learn(garble(rollout) if garbled else rollout)
                metrics.append({name: value for name, value in stats.items() if "seconds" not in name})
            results.append((bits(trainer.policy.get_weights()), metrics, trainer.total_timesteps))
    assert results[0] == results[1]


def garble(rollout: Rollout) -> Rollout:
    """Other content in the invalid rows, which must not matter."""
    dead = ~rollout.valid
    rng = np.random.default_rng(0)
    observations = np.where(dead[..., None], rng.normal(size=rollout.observations.shape) * 100, rollout.observations)
    return dataclasses.replace(
        rollout,
        observations=observations.astype(np.float32),
        actions=np.where(dead, rng.integers(0, 3, dead.shape), rollout.actions),
        log_probs=np.where(dead, np.float32(-77), rollout.log_probs),
        rewards=np.where(dead, np.float32(55), rollout.rewards),
    )


def test_workers_change_no_number(tmp_path: Path):
    found = []
    kwargs = {"plan": [[list(stay) for stay in stays] for stays in JOINS]}
    for workers, helped in ((0, False), (1, True), (2, False)):
        env = EnvConfig(id=ID, num_envs=4, kwargs=kwargs, num_workers=workers, help_workers=helped)
        config = TrainingConfig(env=env, ppo=SMALL, policy=NORMALISED, evaluation=NO_SCORES, run=RunConfig(total_timesteps=200))
        with PPOTrainer(NORMALISED, ID, config, run_dir=tmp_path / f"{workers}") as trainer:
            trainer.train()
            found.append((bits(trainer.policy.get_weights()), (tmp_path / f"{workers}" / METRICS).read_bytes()))
    assert found[0] == found[1] == found[2]
    assert "episode/team_return" in read_rows(tmp_path / "0" / METRICS)[-1]


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
