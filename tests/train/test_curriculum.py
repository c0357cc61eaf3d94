"""Tests of train/curriculum.py: levels change between episodes only, are reported by level, and a resumed run has the same ones."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inchworm import CurriculumCallback, CurriculumConfig, CurriculumPPOTrainer, PPOTrainer, functional_training_loop
from inchworm.config.sections import EnvConfig, EvalConfig, OpponentConfig, PolicyConfig, PPOConfig, RunConfig, TrainingConfig
from inchworm.core.errors import ConfigError
from inchworm.core.types import EpisodeRecord
from inchworm.env.restore import LEVEL
from inchworm.train.loop import TrainingState
from inchworm.train.trainer import create_training_components
from inchworm.worlds.toys import Maze


class Recorder:
    """Stands for a vector env of two copies: the options that its copies get at their next resets."""

    num_envs = 2

    def __init__(self) -> None:
        self.options: list[Any] = [None, None]
        self.times = 0

    def set_reset_options(self, options: Any, indices: Any = None) -> None:
        self.times += 1
        for copy in indices:
            self.options[copy] = options


def bound(steps: int = 100, **settings: Any) -> tuple[CurriculumCallback, Recorder, TrainingState]:
    callback, env, state = CurriculumCallback(CurriculumConfig(**settings)), Recorder(), TrainingState()
    callback.bind(env, TrainingConfig(run=RunConfig(total_timesteps=steps)))  # type: ignore[arg-type]
    callback.on_train_start(state)
    return callback, env, state


def iterate(callback: CurriculumCallback, state: TrainingState, *episodes: tuple[int, float], steps: int = 0) -> dict[str, float]:
    """One iteration with episodes (level, success), whose return is twice the success; its metrics."""
    records = [
        EpisodeRecord(2.0 * success, 1, 0, 0, {"curriculum_level": float(level), "is_success": success}) for level, success in episodes
    ]
    rollout: Any = SimpleNamespace(episodes=records)
    state.env_steps, state.metrics = state.env_steps + steps, {}
    callback.on_rollout(state, rollout)
    callback.on_iteration(state, {})
    return state.metrics


def test_by_progress_the_level_rises_at_30_and_60_percent() -> None:
    callback, env, state = bound(mode="progress")
    levels = [int(iterate(callback, state, steps=10)["curriculum/level"]) for _ in range(10)]
    assert levels == [1, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    assert env.options == [{"difficulty": 3, LEVEL: 3}] * 2
    assert env.times == 3, "only changes are passed on"


def test_by_progress_with_own_milestones_and_options_of_each_level() -> None:
    levels = [{"length": 0.5}, {"length": 1.0}, {"length": 1.5}, {"length": 2.0}]
    callback, env, state = bound(mode="progress", levels=levels, milestones=[0.0, 0.5, 0.5])
    assert env.options[0] == {"length": 1.0, LEVEL: 2}
    iterate(callback, state, steps=50)
    assert env.options[1] == {"length": 2.0, LEVEL: 4}
    assert bound(mode="progress", max_level=5)[0]._level_at(0.45) == 4  # at 0.15, 0.30, 0.45 and 0.60


def test_adaptive_promotes_above_and_demotes_below_a_success_rate_of_a_full_window() -> None:
    callback, _, state = bound(mode="adaptive", window=4, max_level=3)
    assert callback.success_rate is None, "an empty window has no success rate"
    assert "curriculum/success_1" not in iterate(callback, state)
    seen = iterate(callback, state, (1, 1.0), (1, 1.0), (1, 0.0))
    assert (seen["curriculum/level"], seen["curriculum/success_1"], seen["curriculum/return_1"]) == (1.0, 2 / 3, 4 / 3)
    iterate(callback, state, (1, 1.0))  # 3 of 4 = 0.75 is not above 0.8
    assert callback.level == 1
    iterate(callback, state, (1, 1.0), (1, 1.0), (1, 1.0))  # the last 4 are 1
    assert callback.level == 2
    assert callback.success_rate is None
    iterate(callback, state, (1, 1.0), (1, 1.0), (1, 1.0), (1, 1.0))
    assert callback.level == 2, "episodes that began at another level do not count"
    iterate(callback, state, (2, 1.0), (2, 0.0), (2, 0.0))
    assert callback.level == 2, "the window is not full"
    iterate(callback, state, (2, 0.0))  # 1 of 4 = 0.25 is below 0.3
    assert callback.level == 1
    for _ in range(2):
        iterate(callback, state, *[(1, 0.0)] * 4)
    assert callback.level == 1, "there is no level below the first"
    for level in (1, 2, 3, 3):
        seen = iterate(callback, state, *[(level, 1.0)] * 4)
    assert callback.level == 3, "nor above the last"
    assert {name: value for name, value in seen.items() if "_2" in name} == {
        "curriculum/success_2": 1.0,
        "curriculum/return_2": 2.0,
        "curriculum/episodes_2": 8.0,
    }


def test_a_success_is_a_return_if_that_is_set_and_adaptive_needs_one() -> None:
    callback, _, _ = bound(mode="adaptive", success_return=5.0)
    for value in (4.9, 5.0):
        callback.add(1, EpisodeRecord(value, 1, 0, 0))
    assert callback.success_rate == 0.5
    callback, _, _ = bound(mode="adaptive")
    with pytest.raises(ConfigError, match=r"set curriculum\.success_return"):
        callback.add(1, EpisodeRecord(4.9, 1, 0, 0))


def test_learning_progress_draws_the_levels_that_change() -> None:
    callback, _, state = bound(mode="learning_progress", window=4, explore=0.3)
    assert callback.probabilities() == pytest.approx([1 / 3] * 3)
    iterate(callback, state, (1, 1.0), (1, 1.0), (2, 0.0), (2, 0.0), (2, 0.0), (2, 1.0), (3, 0.0), (3, 1.0))
    # progress: |1 - 1| = 0; |(0 + 1)/2 - 0| = 0.5; |1 - 0| = 1
    assert callback.probabilities() == pytest.approx([0.1, 0.7 / 3 + 0.1, 1.4 / 3 + 0.1])
    drawn = np.array([callback.choose(state) for _ in range(2000)])
    assert np.mean(drawn == 1) == pytest.approx(0.1, abs=0.02)  # 4 standard errors of 0.005
    assert np.mean(drawn == 3) == pytest.approx(0.567, abs=0.033)


def test_wrong_settings_are_one_line() -> None:
    for settings, words in (
        ({"start_level": 4}, r"curriculum\.start_level=4 is not a level of the curriculum, which are 1 to 3; raise curriculum\.max_level"),
        ({"evaluation_level": 3, "levels": [{}, {}]}, r"evaluation_level=3 .* 1 to 2; give more curriculum\.levels"),
        ({"milestones": [0.5]}, r"curriculum\.milestones has 1 values, but 3 levels need 2"),
        ({"milestones": [0.5, 0.4]}, "must not fall"),
        ({"demote": 0.9}, r"demote=0\.9 is above"),
        ({"levels": [{"a": object()}]}, r"levels\[0\]"),
        ({"window": 0}, "window"),
    ):
        with pytest.raises(ConfigError, match=words):
            CurriculumConfig(**settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"opponent_skills needs opponent\.mode=heuristic, not none"):
        TrainingConfig(curriculum=CurriculumConfig(opponent_skills=(0.1, 0.2, 0.3)))
    callback, _, _ = bound(mode="adaptive")
    with pytest.raises(ConfigError, match=r"difficulty_level=9 is not a level of the curriculum, which are 1 to 3"):
        callback.set_level(9)
    with pytest.raises(ConfigError, match="call bind"):
        CurriculumCallback().set_level(1)
    with pytest.raises(ConfigError, match="curriculum must be a mode"):
        PPOTrainer("mlp", "CartPole-v1", curriculum=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="two curricula"):
        PPOTrainer("mlp", "CartPole-v1", curriculum="adaptive", callbacks=[CurriculumCallback()])


def config_of(mode: Any = "adaptive", iterations: int = 12, **curriculum: Any) -> TrainingConfig:
    """A maze of 3 x 3 cells, in which every second episode or so succeeds by chance."""
    return TrainingConfig(
        env=EnvConfig(id="Maze-v0", num_envs=4, num_workers=0, kwargs={"size": 3, "levels": 4}),
        policy=PolicyConfig(hidden_sizes=(8,)),
        ppo=PPOConfig(rollout_steps=32, num_minibatches=2, update_epochs=1),
        curriculum=CurriculumConfig(mode=mode, max_level=4, window=4, promote=0.5, demote=0.2, **curriculum),
        evaluation=EvalConfig(interval=3, episodes=4, final_episodes=4, num_envs=2),
        run=RunConfig(total_timesteps=iterations * 128, checkpoint_interval=1),
    )


CURVES = ("curriculum/level", "mean_return", "loss", "curriculum/success_1", "curriculum/return_2", "evaluation/mean_return")


@pytest.mark.parametrize("mode", ["adaptive", "learning_progress"])
def test_a_resumed_run_has_the_levels_of_an_uninterrupted_one(tmp_path: Path, mode: str) -> None:
    config = config_of(mode)
    with PPOTrainer(config.policy, config.env, config, run_dir=tmp_path / "whole") as trainer:
        whole = trainer.train()
        assert len(set(whole["curriculum/level"])) > 2, "the level has moved"
    with PPOTrainer(config.policy, config.env, config, run_dir=tmp_path / "part") as trainer:
        first = trainer.train(callback=lambda state, _: state.iteration < 6)
    with PPOTrainer(config.policy, config.env, config, run_dir=tmp_path / "part") as trainer:
        trainer.load_checkpoint()
        trainer.state.should_stop = trainer.state.ended = False
        second = trainer.train()
    for name in CURVES:
        np.testing.assert_array_equal(first[name] + second[name], whole[name], name)


def test_the_environments_begin_at_the_level_and_evaluations_at_their_own() -> None:
    begun: dict[str, list[int]] = {"train": [], "evaluate": []}

    class Watched(Maze):
        where = "train"

        def set_difficulty(self, level: int) -> None:
            super().set_difficulty(level)
            begun[self.where].append(level)

    class Apart(Watched):
        where = "evaluate"

    config = config_of("progress", evaluation_level=2)
    config = config.replace(env=EnvConfig(num_workers=0))
    make, apart = (lambda: Watched(3, levels=4)), (lambda: Apart(3, levels=4))
    with PPOTrainer(config.policy, make, config, num_envs=2, eval_env=apart) as trainer:
        history = trainer.train()
    assert begun["train"] == sorted(begun["train"])
    assert {1, 2, 3, 4} == set(begun["train"])
    assert set(begun["evaluate"]) == {2}
    assert history["curriculum/level"][-1] == 4.0
    assert history["episode/curriculum_level"][-1] == 4.0


def test_a_subclass_may_override_only_collect_rollouts_or_only_learn() -> None:
    calls: list[str] = []

    class Collects(CurriculumPPOTrainer):
        def collect_rollouts(self, n_steps: int | None = None, difficulty_level: int | None = 2) -> Any:
            calls.append("collect")
            return super().collect_rollouts(n_steps, difficulty_level)

    class Learns(CurriculumPPOTrainer):
        def learn(self, rollout: Any, custom_loss_fns: Any = ()) -> Any:
            calls.append("learn")
            return super().learn(rollout, custom_loss_fns)

    config = PPOConfig(rollout_steps=40, num_minibatches=1, update_epochs=1)
    for kind, level in ((Collects, 2.0), (Learns, 3.0)):
        with kind("mlp", lambda: Maze(3, levels=4), config, num_envs=2) as trainer:
            history = trainer.train(total_timesteps=480)
            trainer.collect_rollouts(60, 1) if kind is Learns else None
            assert trainer.curriculum is not None
            assert trainer.curriculum.config.mode == "progress"
        assert history["episode/curriculum_level"][-1] == level
    assert calls == ["collect"] * 6 + ["learn"] * 6
    with pytest.raises(ConfigError, match="difficulty_level=5 is not a level"):
        trainer.collect_rollouts(8, difficulty_level=5)


def test_a_level_given_to_collect_rollouts_holds_from_the_next_reset_on() -> None:
    with CurriculumPPOTrainer("mlp", lambda: Maze(3, levels=4), num_envs=2, seed=1) as trainer:
        trainer.collect_rollouts(1, difficulty_level=1)
        rollout = trainer.collect_rollouts(100, difficulty_level=3)
        levels = [(episode.lane, episode.info["curriculum_level"]) for episode in rollout.episodes]
        for lane in (0, 1):
            own = [level for where, level in levels if where == lane]
            assert own == [1.0] + [3.0] * (len(own) - 1)
            assert len(own) > 2


def test_the_loop_as_a_function_takes_a_curriculum() -> None:
    config = config_of("none", iterations=4).replace(run=RunConfig(total_timesteps=4 * 128))
    state = functional_training_loop(config, "mlp", curriculum="progress")
    assert state.history["curriculum/level"] == [1.0, 1.0, 2.0, 3.0]  # after 0, 25, 50 and 75 %

    class Downwards(CurriculumCallback):
        def choose(self, state: TrainingState) -> list[int]:
            return [4 - state.iteration // 2] * self.env.num_envs

    state = functional_training_loop(config, "mlp", curriculum=Downwards(CurriculumConfig(max_level=4)))
    assert state.history["curriculum/level"] == [4.0, 4.0, 3.0, 3.0]  # chosen after 0, 1, 2 and 3 iterations, from 1 on
    with create_components(config.replace(curriculum=CurriculumConfig(mode="progress"))) as found:
        assert [type(one) for one in found.callbacks] == [CurriculumCallback]


class create_components:
    def __init__(self, config: TrainingConfig) -> None:
        self.parts = create_training_components(config.replace(run=RunConfig(), evaluation=EvalConfig(interval=0, final_episodes=0)), "mlp")

    def __enter__(self) -> Any:
        return self.parts

    def __exit__(self, *_: object) -> None:
        self.parts.collector.close()


def test_opponents_have_the_skill_of_the_copys_level_from_its_next_game_on() -> None:
    pytest.importorskip("pettingzoo")
    rules = {"units": ["scout"], "max_steps": 4, "width": 10, "height": 10}
    config = TrainingConfig(
        env=EnvConfig(id="Skirmish-v0", num_envs=2, num_workers=0, kwargs=rules),
        policy=PolicyConfig(hidden_sizes=(8,)),
        ppo=PPOConfig(rollout_steps=6, num_minibatches=1, update_epochs=1),
        opponent=OpponentConfig(mode="heuristic"),
        curriculum=CurriculumConfig(mode="progress", opponent_skills=(0.1, 0.5, 0.9)),
        evaluation=EvalConfig(interval=0, final_episodes=0),
    )
    playing = []

    def look(state: TrainingState, _: Any) -> None:
        playing.append(trainer.env.playing)  # type: ignore[attr-defined]

    with PPOTrainer(config.policy, config.env, config) as trainer:
        history = trainer.train(total_timesteps=10 * 12, callback=look)
    # levels after 0 … 9 of 10 iterations: 1, 1, 1, 2, 2, 2, 3, …; a game has 4 steps and an iteration 6, so every iteration ends a game
    assert history["curriculum/level"] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    assert [names[0] for names in playing] == [f"heuristic:{skill}" for skill in (0.1,) * 3 + (0.5,) * 3 + (0.9,) * 4]
