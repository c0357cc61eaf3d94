"""When a run counts as converged."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import pytest

from doubles.runs import BATCH, finish, small_config
from inchworm.config.sections import ConvergenceConfig, EvalConfig
from inchworm.core.errors import ConfigError
from inchworm.run.checkpoint import TrainingCheckpointer
from inchworm.tracking.jsonl import read_rows
from inchworm.train.loop import ConvergenceCallback, TrainingState, convergence_report, describe_convergence, has_converged
from inchworm.train.trainer import PPOTrainer, create_training_components


def checked(config: ConvergenceConfig, *rounds: list[float]) -> tuple[TrainingState, list[bool | None]]:
    """The state after iterations whose evaluations, or trainings, had these returns, and what the callback answered to each."""
    state, callback, answers = TrainingState(), ConvergenceCallback(config), []
    callback.on_train_start(state)
    for returns in rounds:
        rollout: Any = SimpleNamespace(episodes=[SimpleNamespace(episode_return=value) for value in returns])
        callback.on_rollout(state, rollout)
        state.iteration, state.env_steps, state.metrics = state.iteration + 1, state.env_steps + 10, {}
        if config.returns == "evaluation" and returns:
            state.evaluations.append({"iteration": state.iteration, "returns": returns})
        answers.append(callback.on_iteration(state, {}))
    return state, answers


@pytest.mark.parametrize("returns", ["evaluation", "training"])
def test_the_window_must_be_full_and_at_the_target_for_some_checks_in_a_row(returns: Any) -> None:
    """Means of the last 3: (9 + 9 + 9)/3 = 9, then 12, then 9 again, then (9 + 12 + 12)/3 = 11, then 12."""
    config = ConvergenceConfig(target=11.0, window=3, patience=2, returns=returns)
    state, answers = checked(config, [9.0, 9.0], [9.0], [12.0, 12.0, 12.0], [9.0] * 3, [], [12.0, 12.0], [12.0])
    assert answers == [None, None, None, None, None, None, False]
    assert state.convergence["converged"] == {"iteration": 7, "env_steps": 70, "mean_return": 12.0}
    last = {"mean_return": 12.0, "best_mean_return": 12.0, "checks": 2.0, "converged": 1.0}
    assert state.metrics == {f"convergence/{name}": value for name, value in last.items()}
    assert describe_convergence(state, config) == (
        f"converged after 70 steps (7 iterations): the mean return of the last 3 {returns} episodes, 12, "
        "was at least 11 in 2 checks in a row"
    )


def test_nothing_is_checked_without_new_episodes_and_a_failed_evaluation_has_none() -> None:
    config = ConvergenceConfig(target=1.0, window=1, patience=3)
    state, answers = checked(config, [2.0], [], [])
    state.evaluations.append({"iteration": 4, "failed": "…"})
    state.iteration, state.metrics = 4, {}
    assert ConvergenceCallback(config).on_iteration(state, {}) is None
    assert (answers, state.convergence["checks"], state.metrics) == ([None] * 3, 1, {})
    assert (
        describe_convergence(state, config)
        == "not converged: the target is 1; the best mean return of the last 1 evaluation episodes was 2"
    )
    assert describe_convergence(state, ConvergenceConfig()) == ""


def config_of(**convergence: Any) -> Any:
    evaluation = EvalConfig(interval=2, episodes=2, final_episodes=3)
    return small_config(iterations=40, evaluation=evaluation, checkpoint_interval=1).replace(convergence=ConvergenceConfig(**convergence))


def test_a_converged_run_stops_is_evaluated_and_continues_only_with_other_settings(tmp_path: Path) -> None:
    config = config_of(target=5.0, window=4, patience=2)  # an episode of CartPole is longer than that
    with PPOTrainer(config.policy, config.env, config, run_dir=tmp_path) as trainer:
        history = trainer.train()
    assert trainer.state.convergence["converged"]["iteration"] == trainer.state.iteration == 6  # windows are full after 4 and 6
    assert history["convergence/checks"][-1] == 2.0
    assert history.stop_reason == "converged"
    assert history.convergence is not None
    assert (history.convergence["converged"], history.convergence["iteration"], history.convergence["target"]) == (True, 6, 5.0)
    assert history.convergence["text"].startswith("converged after ")
    assert history.convergence["text"].endswith("was at least 5 in 2 checks in a row")
    newest = TrainingCheckpointer(tmp_path / "checkpoints").load()
    assert newest.manifest["converged"] == newest.state["state"]["convergence"]["converged"] == trainer.state.convergence["converged"]
    assert read_rows(tmp_path / "metrics.jsonl")[-2]["convergence/converged"] == 1.0  # the final evaluation is the last row
    assert trainer.state.evaluations[-1]["episodes"] == 3, "the final evaluation"
    with PPOTrainer(config.policy, config.env, config, run_dir=tmp_path) as again:
        again.load_checkpoint()
        assert has_converged(again.state, config.convergence)
        with pytest.warns(UserWarning, match=r"nothing to train: converged after .*with another convergence.target or None, or with "):
            assert again.train().stop_reason == "converged"
        assert again.state.iteration == 6
    longer = config.replace(convergence=ConvergenceConfig())
    with PPOTrainer(longer.policy, longer.env, longer, run_dir=tmp_path) as again:
        again.load_checkpoint()
        again.train(8 * BATCH)
        assert again.state.iteration == 8


def test_a_target_that_stops_nothing_is_reported_with_the_first_time(tmp_path: Path) -> None:
    """Means 12, 9, 12: converged at the first, which a fall below the target does not take back; and the run continues."""
    config = ConvergenceConfig(target=11.0, window=1, stop=False)
    state, answers = checked(config, [12.0], [9.0], [13.0])
    assert answers == [None, None, None]
    assert state.convergence["converged"] == {"iteration": 1, "env_steps": 10, "mean_return": 12.0}
    assert (state.convergence["best"], state.convergence["checks"], state.metrics["convergence/converged"]) == (13.0, 1, 1.0)
    whole = config_of(target=5.0, window=2, stop=False).replace(run=small_config(iterations=8, checkpoint_interval=1).run)
    with PPOTrainer(whole.policy, whole.env, whole, run_dir=tmp_path) as trainer:
        history = trainer.train()
    assert (history.stop_reason, trainer.state.iteration) == ("total_timesteps", 8)
    assert history.convergence is not None
    assert (history.convergence["converged"], history.convergence["iteration"]) == (True, 2)
    # Told to stop, the same run has converged: the record is that of the same settings.
    stops = whole.replace(convergence=whole.convergence.replace(stop=True))
    with PPOTrainer(stops.policy, stops.env, stops, run_dir=tmp_path) as again:
        again.load_checkpoint()
        with pytest.warns(UserWarning, match="nothing to train"):
            assert again.train(100 * BATCH).stop_reason == "converged"


def test_without_a_target_there_is_no_report_and_one_that_was_never_compared_says_nothing() -> None:
    state = TrainingState()
    assert convergence_report(state, ConvergenceConfig()) is None
    silent = convergence_report(state, ConvergenceConfig(target=5.0, stop=False))
    assert silent is not None
    assert (silent["converged"], silent["best_mean_return"], silent["checks"], silent["text"]) == (False, None, 0, "")
    assert describe_convergence(state, ConvergenceConfig(target=5.0)) == "not converged: the target is 5"


def test_a_target_that_stops_nothing_needs_no_evaluations() -> None:
    """So that a preset with a target works without evaluations, with an environment that cannot be copied, and in a loop of one's own."""
    config = small_config(iterations=1).replace(convergence=ConvergenceConfig(target=5.0, stop=False))
    with PPOTrainer(config.policy, gym.make("CartPole-v1"), config) as trainer:
        history = trainer.train()
    assert history.convergence is not None
    assert history.convergence["converged"] is False
    parts = create_training_components(config, "mlp")
    parts.collector.close()


def test_a_resumed_run_converges_as_an_undisturbed_one(tmp_path: Path) -> None:
    config = config_of(target=5.0, window=4, patience=3).replace(evaluation=EvalConfig(interval=2, episodes=2, final_episodes=0))

    def trained(name: str, *stops: int) -> Any:
        for number, stop in enumerate((*stops, 40)):
            trainer = PPOTrainer(config.policy, config.env, config, run_dir=tmp_path / name)
            result = finish(trainer, stop * BATCH, resume=number > 0)
        return result, trainer.state.convergence

    whole = trained("whole")
    assert whole[1]["converged"]["iteration"] == 8
    assert trained("stopped", 3, 5) == whole


def test_a_target_that_nothing_is_compared_with_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"evaluation.interval=0 makes none during training.*convergence.returns=training"):
        config_of(target=1.0).replace(evaluation=EvalConfig(interval=0))
    with pytest.raises(ConfigError, match=r"convergence.target=5.0 would have no effect"):
        create_training_components(config_of(target=5.0).replace(evaluation=EvalConfig()).replace(run=small_config().run), "mlp")
