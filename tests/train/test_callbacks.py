"""Callbacks of a run: evaluating, keeping the best, saving, logging."""

import itertools
from typing import Any
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import pytest

from doubles.runs import BATCH, LANES, small_config
from doubles.toys import ActionReward, Corridor, watched
from doubles.trackers import Recorder
from inchworm.config.sections import EnvConfig, EvalConfig, PPOConfig, RunConfig, TrainingConfig
from inchworm.evaluate.stats import EvalStats
from inchworm.run.policies import PolicyStore, load_policy
from inchworm.train import callbacks as module
from inchworm.train.callbacks import BaseCallback, CheckpointCallback, EvaluateCallback, SnapshotCallback, TrackCallback
from inchworm.train.loop import TrainingState
from inchworm.train.trainer import PPOTrainer, functional_training_loop


class FakeEvaluator:
    """Gives the scores it was made with, one after another; an exception among them is raised."""

    def __init__(self, *scores: Any) -> None:
        self.scores, self.asked = list(scores), list[tuple[Any, int]]()

    def evaluate(self, actor: Any, episodes: int) -> EvalStats:
        self.asked.append((actor, episodes))
        score = self.scores.pop(0)
        if isinstance(score, BaseException):
            raise score
        ones = np.ones(episodes)
        return EvalStats(returns=ones * score, lengths=ones, seeds=ones, infos={"success": ones})


def evaluating(*scores: Any, interval: int = 2, final_episodes: int = 9) -> tuple[EvaluateCallback, FakeEvaluator, list[float]]:
    evaluator, bests = FakeEvaluator(*scores), list[float]()
    actor: Any = "the actor"
    callback = EvaluateCallback(
        evaluator,  # type: ignore[arg-type]
        lambda: actor,
        EvalConfig(interval=interval, episodes=5, final_episodes=final_episodes),
        lambda: bests.append(1.0),
    )
    return callback, evaluator, bests


def live(callback: BaseCallback, iterations: int, state: TrainingState | None = None) -> TrainingState:
    """A run of so many iterations, as a callback sees it."""
    state = state or TrainingState()
    callback.on_train_start(state)
    for _ in range(iterations):
        state.iteration += 1
        state.env_steps += BATCH
        state.metrics = {"loss": float(state.iteration)}
        callback.on_iteration(state, state.metrics)
    callback.on_train_end(state)
    return state


@pytest.mark.parametrize(
    ("interval", "final", "iterations", "after"),
    [
        (2, 9, 5, [(2, 5), (4, 5), (5, 9)]),  # (iteration, episodes): never at 0, always at the end
        (2, 9, 4, [(2, 5), (4, 5), (4, 9)]),
        (2, 0, 5, [(2, 5), (4, 5)]),
        (0, 9, 5, [(5, 9)]),
        (9, 9, 5, [(5, 9)]),
    ],
)
def test_evaluates_at_intervals_and_at_the_end_and_never_at_the_start(
    interval: int, final: int, iterations: int, after: list[tuple[int, int]]
) -> None:
    callback, evaluator, _ = evaluating(*itertools.repeat(1.0, 9), interval=interval, final_episodes=final)
    state = live(callback, iterations)
    assert [entry["iteration"] for entry in state.evaluations] == [iteration for iteration, _ in after]
    assert evaluator.asked == [("the actor", episodes) for _, episodes in after]
    assert [entry["env_steps"] for entry in state.evaluations] == [iteration * BATCH for iteration, _ in after]


def test_each_new_best_score_is_reported() -> None:
    callback, _, bests = evaluating(-5.0, -7.0, -5.0, -4.0, 2.0, interval=1)
    state = live(callback, 4)
    assert len(bests) == 3  # -5 (the first), -4, 2; an equal score is not better
    assert state.best_score == 2.0


def test_a_resumed_run_knows_its_best() -> None:
    callback, _, bests = evaluating(3.0, 5.0, interval=1, final_episodes=0)
    live(callback, 2, TrainingState(best_score=4.0))
    assert len(bests) == 1  # only the 5


def test_a_crash_is_recorded_and_training_continues() -> None:
    callback, evaluator, bests = evaluating(1.0, RuntimeError("the scoring world ended"), 2.0, interval=1, final_episodes=0)
    state = live(callback, 3)
    assert len(evaluator.asked) == 3
    assert len(bests) == 2
    assert state.failures == ["the evaluation after iteration 2 failed: RuntimeError: the scoring world ended"]
    assert "Traceback" in state.evaluations[1]["failed"]
    assert state.evaluations[1]["iteration"] == 2
    callback, _, _ = evaluating(RuntimeError(), interval=1, final_episodes=0)
    assert live(callback, 1).metrics["evaluation/failed"] == 1.0


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SystemExit()])
def test_interrupts_and_exits_are_not_caught(stop: BaseException) -> None:
    callback, _, _ = evaluating(stop, interval=1)
    with pytest.raises(type(stop)):
        live(callback, 1)


def test_no_evaluation_at_the_end_of_an_interrupted_run() -> None:
    callback, evaluator, _ = evaluating(1.0, interval=0)
    live(callback, 1, TrainingState(interrupted=True))
    assert not evaluator.asked


def test_what_was_learned_is_safe_before_the_long_evaluation_at_the_end() -> None:
    order: list[str] = []

    class Watched(FakeEvaluator):
        def evaluate(self, actor: Any, episodes: int) -> EvalStats:
            order.append("evaluate")
            return super().evaluate(actor, episodes)

    def saved(state: TrainingState) -> None:
        order.append(f"saved {state.iteration}")

    callback = EvaluateCallback(Watched(1.0), object, EvalConfig(interval=0), lambda: order.append("best"), saved)  # type: ignore[arg-type]
    live(callback, 3)
    assert order == ["saved 3", "evaluate", "best"]


@pytest.mark.parametrize(("interval", "iterations", "saved"), [(2, 5, [2, 4, 5]), (2, 4, [2, 4]), (0, 3, [3]), (7, 3, [3])])
def test_saves_at_intervals_and_at_the_end_and_nothing_twice(interval: int, iterations: int, saved: list[int]) -> None:
    got, saver, state = list[int](), Mock(), TrainingState()
    saver.save_in_background.side_effect = lambda: got.append(state.iteration)
    live(CheckpointCallback(saver, interval), iterations, state)
    assert got == saved


def test_saves_again_if_the_last_evaluation_was_the_best() -> None:
    """The file of the best policy has changed, so the checkpoint must know its score, or a worse one would replace it later."""
    got, saver, state = list[float | None](), Mock(), TrainingState(iteration=1, best_score=1.0)
    saver.save_in_background.side_effect = lambda: got.append(state.best_score)
    callback = CheckpointCallback(saver, 1)
    callback.on_iteration(state, {})
    callback.on_train_end(state)
    assert got == [1.0]
    state.best_score = 2.0
    callback.on_train_end(state)
    assert got == [1.0, 2.0]


@pytest.mark.parametrize(
    ("cost", "expect"),
    [
        (0.00525, [0, 1, 1, 1, 1, 1, 2, 3, 3]),  # the first two, and then four hundred times as long between them: 2.1 s
        (0.0016, [0, 1, 1, 2, 2, 3, 4, 5, 5]),  # or 0.64 s
        (0.0, [0, 1, 2, 3, 4, 5, 6, 7, 8]),  # costs nothing: each
    ],
)
def test_a_snapshot_is_never_old_and_rarely_taken(cost: float, expect: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    now, count = [100.0], itertools.count()
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    def full_state() -> dict[str, Any]:
        now[0] += cost
        return {"number": next(count)}

    callback, state = SnapshotCallback(full_state), TrainingState()
    callback.on_train_start(state)
    taken = [callback.taken["number"]]
    for seconds in (0.5, 0.5, 0.5, 0.6, 0.1, 3.0, 5.0, 0.1):
        now[0] += seconds
        callback.on_iteration(state, {})
        taken.append(callback.taken["number"])
    assert taken == expect


@pytest.mark.parametrize(("cost", "seconds"), [(0.5, 0.3), (0.5, 4.0), (3.0, 6.0), (1.0, 20.0)])
def test_a_snapshot_is_at_most_ten_seconds_or_one_iteration_old_whatever_it_costs(
    cost: float, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    def full_state() -> float:
        now[0] += cost
        return now[0] - cost

    callback, state = SnapshotCallback(full_state), TrainingState()
    callback.on_train_start(state)
    for _ in range(100):
        began = now[0]
        now[0] += seconds
        assert now[0] - callback.taken <= 10.0 or callback.taken >= began - cost
        callback.on_iteration(state, {})


@pytest.mark.parametrize(("seconds", "expect"), [(300.0, [3, 6, 8]), (0.0, [8]), (None, [8])])
def test_checkpoints_by_time(seconds: float | None, expect: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    now, saved, saver, state = [100.0], list[int](), Mock(), TrainingState()
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    saver.save_in_background.side_effect = lambda: saved.append(state.iteration)
    callback = CheckpointCallback(saver, 0, seconds)
    for state.iteration in range(1, 9):
        now[0] += 100.0
        callback.on_iteration(state, {})
    callback.on_train_end(state)
    assert saved == expect


def test_rows_at_intervals_to_every_tracker() -> None:
    trackers = [Recorder(), Recorder()]
    live(TrackCallback(trackers, RunConfig(log_interval=2)), 5)
    assert trackers[0].rows == trackers[1].rows
    rows = [(step, {name: value for name, value in row.items() if not name.startswith("system/")}) for step, row in trackers[0].rows]
    assert rows == [(2 * BATCH, {"iteration": 2.0, "loss": 2.0}), (4 * BATCH, {"iteration": 4.0, "loss": 4.0})]
    assert all("system/memory_mb" in row for _, row in trackers[0].rows)


def test_an_evaluation_is_logged_whenever_it_comes() -> None:
    tracker = Recorder()
    callback = TrackCallback([tracker], RunConfig(log_interval=4))
    state = TrainingState(evaluations=[{"old": 1}])
    callback.on_train_start(state)
    for iteration in (1, 2, 3):
        state.iteration, state.metrics = iteration, {"loss": float(iteration)}
        if iteration == 2:
            state.evaluations.append({})
            state.metrics["evaluation/mean_return"] = 7.0
        callback.on_iteration(state, state.metrics)
    assert [row["iteration"] for _, row in tracker.rows] == [2.0]
    assert tracker.rows[0][1]["evaluation/mean_return"] == 7.0
    state.evaluations.append({})
    state.metrics["evaluation/mean_return"] = 8.0
    callback.on_train_end(state)
    assert tracker.rows[1:] == [(0, {"iteration": 3.0, "evaluation/mean_return": 8.0})]  # the rest of that row is logged, or not due
    callback.on_train_end(state)
    assert len(tracker.rows) == 2


def test_the_worlds_of_evaluation_are_closed_when_training_ends() -> None:
    door, open_worlds = watched(ActionReward)
    with PPOTrainer("mlp", door, small_config(iterations=2, evaluation=EvalConfig(interval=1, final_episodes=2, num_envs=3))) as trainer:
        trainer.train()
        assert len(open_worlds) == LANES  # those that train
        trainer.evaluate(1)
        assert len(open_worlds) == LANES + 3
    assert not open_worlds


def test_an_environment_that_was_handed_over_is_trained_in_without_scores() -> None:
    env: gym.Env[Any, Any] = Corridor()
    with PPOTrainer("mlp", env, small_config(iterations=2, evaluation=EvalConfig(interval=1))) as trainer:
        with pytest.warns(UserWarning, match=r"no evaluation during training.* pass PPOTrainer an id or a factory"):
            trainer.train()
        assert trainer.state.evaluations == []


def test_the_loop_saves_versions_in_a_store(tmp_path):
    store = PolicyStore(tmp_path / "versions")
    config = TrainingConfig(
        env=EnvConfig(id="CartPole-v1", num_envs=2),
        ppo=PPOConfig(rollout_steps=16, update_epochs=1, num_minibatches=2),
        run=RunConfig(total_timesteps=160, checkpoint_interval=2),  # 5 iterations of 2 x 16 steps
    )
    state = functional_training_loop(config, "mlp", policy_store=store)
    versions = store.list()
    assert [version.metadata["iteration"] for version in versions] == [2, 4, 5]
    assert [version.metadata["env_steps"] for version in versions] == [64, 128, 160]
    assert versions[-1].score == state.evaluations[-1]["mean_return"] if state.evaluations else state.metrics["mean_return"]
    assert load_policy(f"{tmp_path / 'versions'}@latest").policy_version == 5
