"""Turn-based games as training sees them: ratio == 1 with memory and opponents, workers and resumes bit for bit, a game that is learned."""

import functools

import numpy as np
import pytest

pytest.importorskip("pettingzoo")
from doubles.runs import finish
from doubles.stepping import assert_equal_rollouts
from doubles.turns import Stones, TakesOne
from inchworm import EvalConfig, OpponentConfig, PolicyConfig, PPOConfig, PPOTrainer, RunConfig, TrainingConfig, play_match
from inchworm.collect.collector import RolloutCollector
from inchworm.collect.opponents import OpponentVectorEnv, RandomActor, team_lanes
from inchworm.env.source import make_vector_env

GAME = functools.partial(Stones, 6, seeded=True)
THREE = functools.partial(Stones, 7, 3, out=4, seeded=True)


def config_of(kind="mlp", **sections):
    return TrainingConfig(
        policy=PolicyConfig(kind=kind, hidden_sizes=(16,), memory_size=8),
        ppo=PPOConfig(rollout_steps=40, num_minibatches=2, update_epochs=2, learning_rate=1e-2, sequence_length="auto"),
        evaluation=EvalConfig(interval=0, final_episodes=0),
        **sections,
    )


@pytest.mark.parametrize("game", [GAME, THREE])
@pytest.mark.parametrize("kind", ["mlp", "lstm", "gru"])
def test_the_learner_gives_every_move_the_probability_that_it_was_taken_with(kind, game):
    with PPOTrainer(config_of(kind).policy, game, config_of(kind), num_envs=3, backend="torch") as trainer:
        errors = [trainer.learn(trainer.collect_rollouts())["ratio_error"] for _ in range(4)]
    assert max(errors) < 5e-5


def test_memory_that_also_counts_the_moves_of_others_would_be_noticed(monkeypatch):
    monkeypatch.setattr("inchworm.collect.collector.hold_memory", lambda after, before, moved: after)
    with PPOTrainer(config_of("gru").policy, GAME, config_of("gru"), num_envs=3, backend="torch") as trainer:
        errors = [trainer.learn(trainer.collect_rollouts())["ratio_error"] for _ in range(4)]
    assert max(errors) > 1e-3


def test_an_opponent_with_memory_remembers_its_own_turns_only():
    """A player that counts its turns in memory plays the same game whether it is ours or the opponent."""

    class Counts(TakesOne):
        def initial_state(self, num_lanes):
            return np.zeros((num_lanes, 1), np.float32)

        def act(self, observations, state, episode_starts, rng, *, deterministic=False):
            step = super().act(observations, (), episode_starts, rng)
            turns = np.where(episode_starts[:, None], 0, state) + 1
            seen = observations["observation"]  # stones left, stones at first: they tell how many turns there were
            own = np.where(seen[:, 2] == 0, 1 + (seen[:, 1] - seen[:, 0]) // 2, 1 + (seen[:, 1] - seen[:, 0] - 1) // 2)
            moves = np.ones(len(seen), bool) if self.last is None else (seen != self.last).any(1)  # while it waits, nothing new is shown
            self.wrong += int((own != turns[:, 0])[moves & (seen[:, 1] > 0)].sum())
            self.last = seen.copy()
            return type(step)(step.actions, step.env_actions, step.log_probs, turns.astype(np.float32))

    player, opponent = Counts(), Counts()
    player.wrong = opponent.wrong = 0
    player.last = opponent.last = None
    with make_vector_env(GAME, 4, 0) as inner:
        env = OpponentVectorEnv(inner, opponent, team_lanes(4, 2, np.arange(4) % 2))
        assert env.turn_based
        rollout = RolloutCollector(env, player).collect(60)
    assert rollout.num_valid > 80
    assert (player.wrong, opponent.wrong) == (0, 0)


def test_workers_and_a_resume_in_the_middle_of_games_change_nothing(tmp_path):
    def trainer(run_dir, workers=0, steps=400):
        config = config_of("gru", opponent=OpponentConfig(mode="self_play", snapshot_interval=1, rating_interval=0))
        config = config.replace(env=config.env.replace(num_workers=workers), run=RunConfig(total_timesteps=steps, backend="torch"))
        return PPOTrainer(config.policy, GAME, config, num_envs=4, run_dir=tmp_path / run_dir)

    whole = finish(trainer("whole"))
    assert finish(trainer("workers", workers=2)) == whole
    with trainer("halves", steps=200) as first:
        first.train()
        first.save_checkpoint()
    assert finish(trainer("halves"), resume=True) == whole


def test_the_same_rollout_from_a_file(tmp_path):
    with PPOTrainer("mlp", THREE, config_of(), num_envs=3) as trainer:
        rollout = trainer.collect_rollouts()
        path = rollout.save(tmp_path / "moves.safetensors")
        assert_equal_rollouts(type(rollout).load(path), rollout)


class Perfect(TakesOne):
    """Leaves a multiple of three stones if it can, which wins."""

    def act(self, observations, state, episode_starts, rng, *, deterministic=False):
        step = super().act(observations, state, episode_starts, rng)
        actions = (observations["observation"][:, 0] % 3 == 2).astype(np.int64)
        return type(step)(actions, actions, step.log_probs, ())


@pytest.mark.no_cover
def test_a_game_is_learned_by_playing_both_sides():
    """A policy that learned nothing wins half of its games against random play; no player can do better than the perfect one."""
    game = functools.partial(Stones, 6, toll=0.0, seeded=True)
    policy = PolicyConfig(hidden_sizes=(64, 64), normalize_observations=True)
    config = PPOConfig(rollout_steps=64, minibatch_size=256, learning_rate=3e-3, gamma=1.0, ent_coef=0.02)
    with PPOTrainer(policy, game, config, num_envs=32) as trainer:
        trainer.train(100_000)
        opponent = RandomActor(trainer.env.action_space)
        learned, perfect = (play_match(player, opponent, game, 400).win_rate for player in (trainer.policy, Perfect()))
    assert perfect > 0.7
    assert learned > perfect - 0.05
