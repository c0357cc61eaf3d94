"""Meta-learning: contexts are recorded, tasks are those that were asked for, and adaptation is scored on held-out tasks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inchworm import MetaLearningPPOTrainer, PolicyConfig, PPOConfig, PPOTrainer, Task, TrialEnv, evaluate_adaptation
from inchworm.config.sections import CurriculumConfig, EvalConfig, RunConfig, TrainingConfig
from inchworm.core.errors import ConfigError, InchwormError
from inchworm.train.meta import task_trajectories
from inchworm.worlds.tasks import PhysicsCartPole, PointWorld, point_goals

SMALL, PPO = PolicyConfig(hidden_sizes=(8,)), PPOConfig(rollout_steps=16, num_minibatches=2, update_epochs=1, learning_rate=1e-3)
EAST, NORTH = Task("east", {"goal_x": 1.0, "goal_y": 0.0}), Task("north", {"goal_x": 0.0, "goal_y": 1.0})


def trainer_of(env: Any = PointWorld, **options: Any) -> MetaLearningPPOTrainer:
    return MetaLearningPPOTrainer(SMALL, env, **({"config": PPO, "tasks": point_goals(), "num_envs": 4, "num_workers": 0} | options))


def test_a_rollout_holds_the_context_of_each_round() -> None:
    with trainer_of(adaptations=2) as trainer:
        assert trainer.get_task_trajectories(EAST).shape == (0, 16, 8)
        rollout = trainer.collect_task_specific_rollouts([EAST, NORTH])
        assert (rollout.num_steps, rollout.num_lanes) == (16, 12)  # 4 lanes, three rounds
        table, index = rollout.context
        assert table.shape == (12, 2, 16, 8)  # a row for each lane of each round
        known = table[..., 0].sum((1, 2))
        assert known.tolist() == [0.0] * 4 + [16.0] * 4 + [32.0] * 4
        assert (index == np.arange(12)).all()
        np.testing.assert_array_equal(table[4:8, 0], table[8:12, 0])
        first = task_trajectories(rollout.select_lanes([0, 1, 2, 3]), trainer.policy.spec)  # type: ignore[attr-defined]
        np.testing.assert_array_equal(table[4:8, 0], first[:, 0])
        np.testing.assert_array_equal(trainer.get_task_trajectories(NORTH)[0], first[1, 0])
        # The rewards are those of the lane's task.
        place = rollout.next_observations
        goals = np.array([[1.0, 0.0], [0.0, 1.0]] * 6)
        np.testing.assert_allclose(rollout.rewards, -np.linalg.norm(place - goals, axis=-1), atol=1e-5)
        assert trainer.learn(rollout)["ratio_error"] < 5e-5


def test_the_features_of_the_first_episode_by_hand() -> None:
    with trainer_of(PhysicsCartPole, tasks=[Task("usual")], num_envs=1, config=PPO.replace(rollout_steps=60)) as trainer:
        rollout = trainer.collect_rollouts()
        shown = task_trajectories(rollout, trainer.policy.spec)[0, 0]  # type: ignore[attr-defined]
    last = int(np.flatnonzero(rollout.terminated[:, 0])[0])
    assert last < 59, "a second episode has begun"
    assert not shown[last:].any(), "nothing is known to follow the last step, and a later episode is another trajectory"
    for t in range(last):
        action, seen = rollout.actions[t, 0], rollout.observations[t, 0]
        row = [1.0, 1.0, action == 0, action == 1, *seen, *(rollout.next_observations[t, 0] - seen)]
        np.testing.assert_allclose(shown[t], row, rtol=1e-6)


def test_adaptation_is_scored_greedily_with_the_context_of_one_sampled_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    """A greedy policy that does not know its task may do the same in all tasks, and so find out nothing."""
    contexts: list[np.ndarray | None] = []
    with trainer_of(PhysicsCartPole, tasks=[Task("usual")], config=PPO.replace(rollout_steps=100)) as trainer:
        policy: Any = trainer.policy
        acted: list[tuple[int, bool]] = []
        act, set_context = policy.act, policy.set_context

        def spy(*arguments: Any, deterministic: bool = False) -> Any:
            acted.append((len(contexts), deterministic))
            return act(*arguments, deterministic=deterministic)

        def keep(table: np.ndarray | None, index: np.ndarray | None = None) -> None:
            contexts.append(table)
            set_context(table, index)

        monkeypatch.setattr(policy, "act", spy)
        monkeypatch.setattr(policy, "set_context", keep)
        found = trainer.evaluate_adaptation([Task("usual"), Task("reversed", {"force": -10.0})], episodes=2)
        assert {(number, deterministic) for number, deterministic in acted} == {(1, True), (1, False), (2, True), (2, False), (3, True)}
    assert found.returns.shape == (3, 2)
    assert contexts[0] is contexts[3] is None
    for count in (1, 2):
        table = contexts[count]
        assert table is not None
        assert table.shape[:2] == (2, count)
        steps = table[..., 0].sum(-1)  # [tasks, trajectories]
        assert (steps > 3).all()
        assert (steps < 100).all(), "an untrained policy falls: no trajectory is longer than its episode"
    assert contexts[2] is not None
    np.testing.assert_array_equal(contexts[2][:, :1], contexts[1])


def test_given_trajectories_are_the_context_of_all_lanes() -> None:
    with trainer_of() as trainer:
        trainer.collect_task_specific_rollouts(EAST)
        given = trainer.get_task_trajectories(EAST)
        rollout = trainer.collect_rollouts(8, task_trajectories=given)
        np.testing.assert_array_equal(rollout.context[0], given[None])
        assert (rollout.context[1] == 0).all()
        assert trainer.learn(rollout)["ratio_error"] < 5e-5


def test_a_resumed_run_draws_the_tasks_of_an_uninterrupted_one(tmp_path: Path) -> None:
    config = TrainingConfig(ppo=PPO, evaluation=EvalConfig(interval=0, final_episodes=0), run=RunConfig(checkpoint_interval=1))
    with trainer_of(config=config, run_dir=tmp_path / "whole") as trainer:
        whole = trainer.train(total_timesteps=4 * 128)
    with trainer_of(config=config, run_dir=tmp_path / "part") as trainer:
        first = trainer.train(total_timesteps=2 * 128)
    with trainer_of(config=config, run_dir=tmp_path / "part") as trainer:
        trainer.load_checkpoint()
        second = trainer.train(total_timesteps=4 * 128)
    for name in ("loss", "mean_reward"):
        assert first[name] + second[name] == whole[name]


def test_meta_train_takes_tasks_and_steps_and_held_out_tasks_are_scored() -> None:
    with trainer_of() as trainer:
        history = trainer.meta_train([EAST, NORTH], steps_per_task=64, iterations=2)
        assert history["timesteps"] == [256.0, 512.0]  # 4 copies of 64 steps
        assert trainer.get_task_trajectories(EAST).shape == (1, 32, 8)
        found = trainer.evaluate_adaptation([EAST, NORTH, Task("far", {"goal_x": 9.0})], episodes=1)
        assert found.returns.shape == (2, 3)
        assert (found.returns[:, 2] < found.returns[:, 0]).all()
        assert str(found).splitlines()[2] == f"after 1 episode: return {found.means[1]:.5g}"
        with pytest.raises(ConfigError, match="no held-out tasks"):
            trainer.evaluate_adaptation()


def test_the_same_policy_without_context_is_never_given_any() -> None:
    with trainer_of(use_context=False) as trainer:
        assert trainer.collect_rollouts().context == ()
        assert len(trainer.evaluate_adaptation().means) == 1


def test_trials_are_scored_by_their_inner_episodes() -> None:
    make = lambda: TrialEnv(PointWorld(), episodes=2)  # noqa: E731
    with PPOTrainer(PolicyConfig(kind="gru", hidden_sizes=(8,), memory_size=8), make, PPO, num_envs=2, num_workers=0) as trainer:
        found = evaluate_adaptation(trainer.policy, make, [EAST, NORTH], 1, steps=32)
        assert found.returns.shape == (2, 2)
        assert (found.returns < -8).all(), "16 steps about 1 from the goal"
        with pytest.raises(ConfigError, match=r"TrialEnv\(…, episodes=3\)"):
            evaluate_adaptation(trainer.policy, make, [EAST], 2, steps=32)
        with pytest.raises(ConfigError, match="not ended within 8 steps"):
            evaluate_adaptation(trainer.policy, make, [EAST], 1, steps=8)


def test_wrong_use_is_one_line() -> None:
    for options, words in (
        ({"adaptations": 0}, "adaptations=0 must be 1 or more"),
        ({"tasks": []}, "one task or more"),
        ({"config": TrainingConfig(run=RunConfig(backend="numpy"))}, "the task encoder is in torch, not numpy"),
        ({"config": TrainingConfig(curriculum=CurriculumConfig(mode="progress"))}, r"set curriculum\.mode=none"),
    ):
        with pytest.raises(ConfigError, match=words):
            trainer_of(**options)
    with trainer_of(num_envs=2) as trainer:
        with pytest.raises(ConfigError, match=r"3 tasks need as many copies of the environment; set env\.num_envs=3"):
            trainer.collect_task_specific_rollouts([EAST, NORTH, Task("x")])
        with pytest.raises(InchwormError, match="does not know the option 'goal'"):
            trainer.collect_task_specific_rollouts(Task("wrong", {"goal": 1.0}))
        for unknown, words in (("east", "not 'east'"), ([{"goal_x": 1.0}], "not {'goal_x'")):
            with pytest.raises(ConfigError, match=words):
                trainer.collect_task_specific_rollouts(unknown)
        with pytest.raises(ConfigError, match=r"a task is a Task\(name, options\) with a mapping of reset options, not 'east'"):
            evaluate_adaptation(trainer.policy, PointWorld, ["east"], steps=8)
        with pytest.raises(ConfigError, match="fewer than the 2 rounds"):
            trainer.meta_train(steps_per_task=1)
