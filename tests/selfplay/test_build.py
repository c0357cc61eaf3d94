"""From a config to opponents: whom each mode means, what is refused, and that a run against its past selves resumes bit for bit."""

import numpy as np
import pytest

from doubles.teams import SPEC, Always, Teams
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.collect.actors import RandomActor
from inchworm.collect.opponents import OpponentVectorEnv
from inchworm.config.sections import EvalConfig, OpponentConfig, PPOConfig, RunConfig, TrainingConfig
from inchworm.core.errors import ConfigError, MissingExtraError, SpaceError
from inchworm.policy.file import save_policy
from inchworm.selfplay.callback import bind_pool, make_opponent, opponent_callbacks, with_opponents
from inchworm.selfplay.pool import OpponentPool
from inchworm.train.trainer import PPOTrainer, create_training_components

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


def test_modes_mean_opponents():
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
    with pytest.raises(ConfigError, match=r"names nobody\.safetensors, which cannot be read"):
        make_opponent(config_of("pool", policies=["nobody.safetensors"]), *SPACES)
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
        with pytest.raises(ConfigError, match=f"needs a world with two teams, but a copy of Teams-v0 has {agents} agent"):
            with_opponents(world, config_of("random"))
    with pytest.raises(ConfigError, match="a copy of CartPole-v1 has 1 agent"):
        PPOTrainer("mlp", "CartPole-v1", TrainingConfig(opponent=OpponentConfig(mode="random")))


def test_a_missing_package_is_told_before_anything_is_made(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "openskill.models", None)
    with pytest.raises(MissingExtraError):
        make_opponent(config_of("self_play", rating_interval=5), *SPACES)
    make_opponent(config_of("self_play"), *SPACES)


def test_self_play_needs_weights():
    env = with_opponents(Teams(2, 4), config_of("self_play"))
    with pytest.raises(ConfigError, match="Always only acts"):
        bind_pool(env, Always(1))
    bind_pool(with_opponents(Teams(2, 4), config_of("random")), Always(1))


def test_what_was_handed_over_cannot_be_rated():
    rated = config_of("self_play", rating_interval=1)
    env = with_opponents(Teams(2, 4), rated)
    with pytest.warns(UserWarning, match="nobody is rated"):
        opponent_callbacks(env, lambda: Always(1), rated, None)
    assert opponent_callbacks(with_opponents(Teams(2, 4), config_of("random")), lambda: Always(1), config_of("random"), None) == []


def test_a_run_against_its_past_selves_resumes_bit_for_bit(tmp_path):
    with training(tmp_path / "whole", 8) as whole:
        history = whole.train()
    with training(tmp_path / "half", 3) as half:
        half.train()
    with training(tmp_path / "half", 8) as rest:
        rest.load_checkpoint()
        rest.train()
    for name, value in whole.policy.get_weights().items():
        assert np.array_equal(value, rest.policy.get_weights()[name]), name
    assert (tmp_path / "whole" / "metrics.jsonl").read_bytes() == (tmp_path / "half" / "metrics.jsonl").read_bytes()
    pools = [trainer.env.opponent for trainer in (whole, rest)]
    assert pools[0].metrics() == pools[1].metrics()
    assert [one.iteration for one in pools[0].selves.values() if not one.retired][-1] == 8
    assert history["pool_size"] == [1.0] + [2.0] * 7  # the initial policy, then a snapshot after iteration 2; at most 2
    assert whole.env.num_lanes == 12
    assert whole.total_timesteps < 8 * 8 * 12 + 1


def test_self_play_learns_to_choose_the_greatest_action(tmp_path):
    """Who always plays 3 never loses this game. A random policy draws 1.5 a step."""
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


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mode": "league"}, "opponent.mode"),
        ({"skill": 1.5}, "opponent.skill=1.5 must be 1 or less"),
        ({"skill": 0.5, "skill_start": 0.8}, "skill_start=0.8 is above opponent.skill=0.5"),
        ({"skill_threshold": 0.0}, "opponent.skill_threshold=0.0 must be above 0"),
        ({"latest_share": 0.7, "anchor_share": 0.4}, "add up to more than 1"),
        ({"anchors": ["random", "clever"]}, r"opponent.anchors\[1\]: unknown opponent 'clever'"),
        ({"anchors": ["heuristic:2"]}, r"opponent.anchors\[0\]: heuristic:2: the skill must be from 0 to 1"),
        ({"policies": [""]}, r"opponent.policies\[0\]=''"),
        ({"pool_size": 0}, "opponent.pool_size=0"),
        ({"snapshot_interval": 0}, "opponent.snapshot_interval=0"),
        ({"rating_interval": -1}, "opponent.rating_interval=-1"),
        ({"rating_episodes": 0}, "opponent.rating_episodes=0"),
        ({"pfsp_power": -1.0}, "opponent.pfsp_power=-1.0"),
        ({"poolsize": 3}, "did you mean opponent.pool_size"),
    ],
)
def test_bad_fields_are_one_clear_line(fields, words):
    with pytest.raises(ConfigError, match=words):
        TrainingConfig.from_dict({"opponent": fields})
