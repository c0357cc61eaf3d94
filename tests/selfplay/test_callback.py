"""Opponents from a config, when the policy is rated and joins the pool, what is written, and self-play runs in Skirmish."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from doubles.teams import SPEC, Always, Teams
from inchworm.analysis.report import report
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.collect.opponents import OpponentVectorEnv, RandomActor
from inchworm.config.sections import EvalConfig, OpponentConfig, PPOConfig, RunConfig, TrainingConfig
from inchworm.core.errors import ConfigError, MissingExtraError, SpaceError
from inchworm.evaluate.evaluator import make_evaluator
from inchworm.policy.file import save_policy
from inchworm.selfplay.callback import (
    LadderCallback,
    RatingGames,
    SelfPlayCallback,
    bind_pool,
    make_opponent,
    opponent_callbacks,
    with_opponents,
)
from inchworm.selfplay.opponent_pool import OpponentPool, Rating, RatingEntry
from inchworm.train.trainer import PPOTrainer, create_training_components


def at(iteration):
    return SimpleNamespace(iteration=iteration, env_steps=100 * iteration, metrics={}, failures=[])


def made(tmp_path, games=None, **options):
    policy = NumpyPolicy(SPEC, seed=0)
    pool = OpponentPool({"weak<1>": Always(0), "strong": Always(3)}, size=3)
    pool.bind(policy)
    games = games or RatingGames(lambda copies: Teams(copies, 4), episodes=4)
    players = iter([Always(1), *[Always(2)] * 50])
    return pool, SelfPlayCallback(pool, lambda: next(players), games=games, directory=tmp_path, **options)


def test_the_schedule(tmp_path):
    pool, callback = made(tmp_path, snapshot_interval=3, rating_interval=2)
    callback.on_train_start(at(0))
    assert set(pool.book.anchors) == {"weak<1>", "strong"}
    before = dict(pool.book.anchors)
    assert [entry.iteration for entry in pool.book.history] == [0]
    rated = {}
    for iteration in range(1, 8):
        state = at(iteration)
        callback.on_rollout(state, None)
        callback.on_iteration(state, state.metrics)
        rated[iteration] = "rating" in state.metrics
        assert state.metrics["pool_size"] == 1 + iteration // 3
    assert [iteration for iteration, was in rated.items() if was] == [2, 4, 6]
    assert list(pool.selves) == ["self-0", "self-3", "self-6"]
    assert pool.selves["self-3"].rating is None
    assert pool.selves["self-6"].rating == pool.book.history[-1].rating  # rated in the iteration that it joined in
    assert pool.book.anchors == before
    callback.on_train_start(at(7))  # a resumed run does not rate its fixed players again
    assert pool.book.anchors == before
    assert len(pool.book.history) == 4


def test_ratings_are_written_as_they_come(tmp_path):
    pool, callback = made(tmp_path, rating_interval=1)
    callback.on_train_start(at(0))
    state = at(1)
    callback.on_iteration(state, state.metrics)
    saved = json.loads((tmp_path / "ratings.json").read_text())
    assert saved["history"][1]["rating"] == state.metrics["rating"]
    assert saved["history"][1]["rating_sigma"] == state.metrics["rating_sigma"]
    assert saved["history"][1]["win_rates"] == {"weak<1>": 1.0, "strong": 0.0}
    callback.on_train_end(state)
    assert pool.book.history[1].env_steps == 100


def test_ratings_that_cannot_be_written_are_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    pool, callback = made(tmp_path / "file" / "below")
    pool.book.history.append(RatingEntry(0, 0, Rating(), {}))
    with pytest.warns(UserWarning, match="ratings could not be written"):
        callback.on_train_end(at(1))


def test_a_failed_rating_is_recorded_and_training_continues(tmp_path):
    class Broken(RatingGames):
        def rate(self, *args):
            raise RuntimeError("no")

    _, callback = made(tmp_path, Broken(lambda copies: Teams(copies, 4), episodes=2), rating_interval=1)
    callback.on_train_start(at(0))
    state = at(1)
    callback.on_iteration(state, state.metrics)
    assert state.failures == ["the rating after iteration 1 failed: RuntimeError: no"]
    assert state.metrics["rating_failed"] == 1.0
    assert "rating" not in state.metrics


def test_a_ladders_metrics_are_logged():
    state = at(1)
    LadderCallback(lambda: {"opponent/skill": 0.3}).on_iteration(state, state.metrics)
    assert state.metrics == {"opponent/skill": 0.3}


# ---- opponents from a config

SPACES = Teams.observation_space, Teams.action_space


def config_of(mode="self_play", **opponent):
    return TrainingConfig.from_dict(
        {"env": {"id": "Teams-v0", "num_envs": 6}, "opponent": {"mode": mode, "rating_interval": 0, **opponent}}
    )


def training(tmp_path, iterations, **opponent):
    plain = config_of(snapshot_interval=2, pool_size=2, **opponent)
    changed = plain.replace(
        policy=plain.policy.replace(hidden_sizes=(8,)),
        ppo=PPOConfig(rollout_steps=8, update_epochs=2, num_minibatches=2, learning_rate=0.01),
        evaluation=EvalConfig(interval=0, final_episodes=0),
        run=RunConfig(backend="numpy", max_iterations=iterations, total_timesteps=10**9, checkpoint_interval=3),
    )
    return PPOTrainer("mlp", Teams(6, 4), changed, run_dir=tmp_path)


def test_each_mode_makes_its_opponent():
    assert isinstance(make_opponent(config_of("random"), *SPACES), RandomActor)
    pool = make_opponent(config_of("self_play"), *SPACES)
    assert isinstance(pool, OpponentPool)
    assert list(pool.fixed) == ["random"]  # this world has no heuristic
    assert pool.keep_selves
    assert not make_opponent(config_of("pool"), *SPACES).keep_selves
    with pytest.raises(ConfigError, match="Teams-v0 has no heuristic"):
        make_opponent(config_of("heuristic"), *SPACES)


def test_policy_files_are_players_named_by_their_weights(tmp_path):
    policy = NumpyPolicy(SPEC, seed=3)
    path = save_policy(tmp_path / "rival.safetensors", SPEC, policy.get_weights())
    names = list(make_opponent(config_of("pool", policies=[str(path)]), *SPACES).fixed)
    assert names[0] == "random"
    assert names[1].startswith("policy-")
    save_policy(path, SPEC, NumpyPolicy(SPEC, seed=4).get_weights())
    assert list(make_opponent(config_of("pool", policies=[str(path)]), *SPACES).fixed)[1] != names[1]
    with pytest.raises(ConfigError, match=r"cannot read missing\.safetensors of opponent.policies"):
        make_opponent(config_of("pool", policies=["missing.safetensors"]), *SPACES)
    with pytest.raises(SpaceError, match="rival"):
        make_opponent(config_of("pool", policies=[str(path)]), SPACES[1], SPACES[1])


def test_sides():
    alternating = with_opponents(Teams(3, 4), config_of("self_play"))  # copies 0 to 2 play sides 0, 1, 0
    assert alternating.lanes.tolist() == [0, 1, 6, 7, 8, 9]
    assert alternating.state_dict()["source"] is not None
    assert with_opponents(Teams(2, 4), config_of("random", sides="second")).lanes.tolist() == [2, 3, 6, 7]
    assert with_opponents(Teams(2, 4), config_of("random", sides="first")).lanes.tolist() == [0, 1, 4, 5]
    alone = Teams(2, 4)
    assert with_opponents(alone, config_of("none")) is alone


def test_worlds_without_two_teams_are_refused():
    for world, agents in ((Teams(2, 3), 3), (Teams(2, 1), 1)):
        with pytest.raises(ConfigError, match=f"needs an environment with two teams, but a copy of Teams-v0 has {agents} agent"):
            with_opponents(world, config_of("random"))
    with pytest.raises(ConfigError, match="a copy of CartPole-v1 has 1 agent"):
        PPOTrainer("mlp", "CartPole-v1", TrainingConfig(opponent=OpponentConfig(mode="random")))


def test_a_missing_package_is_reported_first(monkeypatch):
    monkeypatch.setitem(sys.modules, "openskill.models", None)
    with pytest.raises(MissingExtraError, match=r'pip install "inchworm\[marl\]"'):
        make_opponent(config_of("self_play", rating_interval=5), *SPACES)
    make_opponent(config_of("self_play"), *SPACES)


def test_self_play_needs_weights():
    env = with_opponents(Teams(2, 4), config_of("self_play"))
    with pytest.raises(ConfigError, match="Always only acts"):
        bind_pool(env, Always(1))
    bind_pool(with_opponents(Teams(2, 4), config_of("random")), Always(1))


def test_an_environment_instance_cannot_be_rated():
    rated = config_of("self_play", rating_interval=1)
    env = with_opponents(Teams(2, 4), rated)
    with pytest.warns(UserWarning, match="ratings disabled"):
        opponent_callbacks(env, lambda: Always(1), rated, None)
    assert opponent_callbacks(with_opponents(Teams(2, 4), config_of("random")), lambda: Always(1), config_of("random"), None) == []


def test_self_play_learns_to_choose_the_greatest_action(tmp_path):
    """The action 3 never loses this game. A random policy plays 1.5 on average."""
    with training(tmp_path, 20) as trainer:
        trainer.train()
        step = trainer.collector.policy.act(
            {"seen": np.array([[1.0, 0.0, 2.0]], np.float32), "action_mask": np.array([[1, 1, 1, 1, 0]])},
            (),
            np.zeros(1, bool),
            np.random.default_rng(0),
            deterministic=True,
        )
    assert step.env_actions.tolist() == [3]


def test_the_parts_without_a_trainer_have_opponents_too():
    config = config_of("self_play")
    parts = create_training_components(config.replace(run=config.run.replace(backend="numpy")), "mlp", Teams(6, 4))
    assert isinstance(parts.collector.vector_env, OpponentVectorEnv)
    assert type(parts.callbacks[0]).__name__ == "SelfPlayCallback"
    assert list(parts.collector.vector_env.opponent.selves) == ["self-0"]
    parts.collector.close()


# ---- runs in Skirmish

SMALL = {"units": ["scout", "soldier"], "max_steps": 20, "wall_pairs": 0}


def skirmish_config(mode, *, iterations=4, policy=None, **opponent):
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
    trainer = train(tmp_path, skirmish_config(mode, iterations=2, **options))
    assert trainer.failures == []
    assert trainer.env.num_lanes == 8  # 4 copies x 2 units of ours
    assert "4 envs x 2 agents x 16 steps" in trainer.size
    score = trainer.state.evaluations[-1]
    assert 0.0 <= score["win_rate"] <= 1.0
    assert score["episodes"] == 4
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert ("opponent/skill" in rows[0]) == (mode == "heuristic")
    assert ("rating" in rows[1]) == (mode == "pool")


def test_self_play_resumes_bit_for_bit(tmp_path):
    """Past selves, their memory, the opponent of each copy, and the ratings are restored."""
    policy = {"kind": "gru", "memory_size": 6}
    whole = train(tmp_path / "whole", skirmish_config("self_play", policy=policy))
    train(tmp_path / "half", skirmish_config("self_play", policy=policy, iterations=2))
    rest = train(tmp_path / "half", skirmish_config("self_play", policy=policy))
    assert whole.failures == rest.failures == []
    for name, value in whole.policy.get_weights().items():
        assert np.array_equal(value, rest.policy.get_weights()[name]), name
    assert whole.env.playing == rest.env.playing
    ratings = [json.loads((tmp_path / name / "ratings.json").read_text()) for name in ("whole", "half")]
    assert ratings[0] == ratings[1]
    assert [entry["iteration"] for entry in ratings[0]["history"]] == [0, 2, 4]
    assert set(ratings[0]["anchors"]) == {"random", "heuristic:0.5", "heuristic"}
    assert "ratings" in report(tmp_path / "whole").read_text()


def test_evaluation_is_the_same_each_time_and_from_both_sides():
    config = skirmish_config("self_play")
    with make_evaluator(config.env, config) as evaluator:
        env = evaluator.vector_env
        assert isinstance(env, OpponentVectorEnv)
        assert env.lanes.tolist() == [0, 1, 6, 7]  # side 0 of copy 0, side 1 of copy 1
        assert type(env.opponent.actor(env.opponent.name)).__name__ == "HeuristicPolicy"
        actor = env.opponent.actor(env.opponent.name)
        first, second = (evaluator.evaluate(actor, 4, deterministic=False) for _ in range(2))
    assert first.returns.tolist() == second.returns.tolist()
