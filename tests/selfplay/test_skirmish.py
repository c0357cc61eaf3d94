"""Every mode in the world it is for: training, scoring, ratings, resumed runs with memory, and the ratio that must be 1."""

import json

import numpy as np
import pytest

from inchworm.cli.main import main
from inchworm.collect.opponents import OpponentVectorEnv
from inchworm.config.sections import TrainingConfig
from inchworm.selfplay.callback import MatchEvaluator, make_evaluator
from inchworm.train.trainer import PPOTrainer

SMALL = {"units": ["scout", "soldier"], "max_steps": 20, "wall_pairs": 0}


def config_of(mode, *, iterations=4, policy=None, **opponent):
    fields = {"mode": mode, "snapshot_interval": 1, "pool_size": 2, "rating_interval": 2, "rating_episodes": 2, **opponent}
    data = {
        "env": {"id": "Skirmish-v0", "num_envs": 4, "num_workers": 0, "kwargs": SMALL},
        "policy": {"hidden_sizes": [8], **(policy or {})},
        "ppo": {"rollout_steps": 16, "update_epochs": 1, "num_minibatches": 2},
        "opponent": fields,
        "evaluation": {"interval": 0, "final_episodes": 4, "num_envs": 2},
        "run": {"max_iterations": iterations, "total_timesteps": 10**9, "checkpoint_interval": 2},
    }
    return TrainingConfig.from_dict(data)


def train(directory, config):
    with PPOTrainer(config.policy, config.env, config, run_dir=directory) as trainer:
        if (directory / "checkpoints").exists():
            trainer.load_checkpoint()
        trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("mode", "options"), [("random", {}), ("heuristic", {"skill_start": 0.3}), ("pool", {"anchors": ["random", "heuristic"]})]
)
def test_a_run_in_each_mode_is_scored_by_its_wins(mode, options, tmp_path):
    trainer = train(tmp_path, config_of(mode, iterations=2, **options))
    assert trainer.failures == []
    assert trainer.env.num_lanes == 8  # 4 copies x 2 units of ours
    assert "4 envs x 2 agents x 16 steps" in trainer.size
    score = trainer.state.evaluations[-1]
    assert 0.0 <= score["win_rate"] <= 1.0
    assert score["episodes"] == 4
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert ("opponent/skill" in rows[0]) == (mode == "heuristic")
    assert ("rating" in rows[1]) == (mode == "pool")


@pytest.mark.parametrize("policy", [{}, {"kind": "gru", "memory_size": 6}])
def test_self_play_resumes_bit_for_bit(policy, tmp_path):
    """Past selves, their memory, who plays where, and the ratings all come back."""
    whole = train(tmp_path / "whole", config_of("self_play", policy=policy))
    train(tmp_path / "half", config_of("self_play", policy=policy, iterations=2))
    rest = train(tmp_path / "half", config_of("self_play", policy=policy))
    assert whole.failures == rest.failures == []
    for name, value in whole.policy.get_weights().items():
        assert np.array_equal(value, rest.policy.get_weights()[name]), name
    assert whole.env.playing == rest.env.playing
    ratings = [json.loads((tmp_path / name / "ratings.json").read_text()) for name in ("whole", "half")]
    assert ratings[0] == ratings[1]
    assert [entry["iteration"] for entry in ratings[0]["history"]] == [0, 2, 4]
    assert set(ratings[0]["anchors"]) == {"random", "heuristic:0.5", "heuristic"}
    assert "svg" in (tmp_path / "whole" / "ratings.html").read_text()


def test_workers_change_no_bit():
    weights = []
    for workers in (0, 2):
        config = config_of("self_play", iterations=2, rating_interval=0)
        config = config.replace(env=config.env.replace(num_workers=workers), evaluation=config.evaluation.replace(final_episodes=0))
        with PPOTrainer(config.policy, config.env, config) as trainer:
            trainer.train()
            weights.append(trainer.policy.get_weights())
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_heuristic_is_above_chance_on_the_scale(tmp_path):
    trainer = train(tmp_path, config_of("self_play", iterations=1, rating_episodes=10))
    anchors = trainer.env.opponent.book.anchors
    assert anchors["random"].mu < anchors["heuristic"].mu


@pytest.mark.parametrize("kind", ["mlp", "lstm"])
def test_the_ratio_is_one_against_opponents(kind, tmp_path):
    config = config_of("self_play", policy={"kind": kind}, rating_interval=0)
    with PPOTrainer(config.policy, config.env, config) as trainer:
        trainer.collect_rollouts(16)  # so that memory is carried over
        rollout = trainer.collect_rollouts(16)
        stats = trainer.learn(rollout)
    assert stats["ratio_error"] < 5e-5


def test_evaluation_is_the_same_each_time_and_from_both_sides():
    config = config_of("self_play")
    with make_evaluator(config.env, config) as evaluator:
        assert isinstance(evaluator, MatchEvaluator)
        env = evaluator.vector_env
        assert isinstance(env, OpponentVectorEnv)
        assert env.lanes.tolist() == [0, 1, 6, 7]  # side 0 of copy 0, side 1 of copy 1
        assert type(env.opponent.actor(env.opponent.name)).__name__ == "HeuristicPolicy"
        actor = env.opponent.actor(env.opponent.name)
        first, second = (evaluator.evaluate(actor, 4, deterministic=False) for _ in range(2))
    assert first.returns.tolist() == second.returns.tolist()


def test_the_command_line_trains_against_past_selves(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    kwargs = "{units: [scout], max_steps: 10, wall_pairs: 0}"
    flags = ["--opponent.mode", "self_play", "--opponent.rating-interval", "1", "--opponent.rating-episodes", "2", "--run.name", "duel"]
    sizes = ["--num-envs", "2", "--num-workers", "0", "--ppo.rollout-steps", "8", "--ppo.num-minibatches", "1", "--run.max-iterations", "2"]
    assert main(["train", "Skirmish-v0", *flags, *sizes, "--env.kwargs", kwargs, "--evaluation.final-episodes", "2"]) == 0
    shown = capsys.readouterr().out
    assert "rating" in shown
    assert (tmp_path / "runs" / "duel" / "ratings.html").exists()
    assert main(["train", "CartPole-v1", "--opponent.mode", "random", "--num-workers", "0"]) != 0
    assert "needs an environment with two teams" in capsys.readouterr().err
