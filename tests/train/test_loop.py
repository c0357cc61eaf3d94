"""The loop and its parts without the trainer: what is called when, what is counted, what stops it."""

import dataclasses
import functools
import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from doubles.runs import BATCH, LANES, SMALL, STEPS, bits, small_config
from doubles.toys import Counter, watched
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.config.sections import EvalConfig, PPOConfig, RunConfig, TrainingConfig
from inchworm.core.errors import ConfigError
from inchworm.core.types import EpisodeRecord, Iteration, UpdateStats
from inchworm.env.source import make_vector_env
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.rollout import Rollout, select_lanes
from inchworm.run.policies import load_policy
from inchworm.tracking.jsonl import read_rows
from inchworm.train.callbacks import BaseCallback
from inchworm.train.loop import (
    FunctionCallback,
    TrainingComponents,
    TrainingState,
    as_callback,
    default_training_step,
    episode_metrics,
    is_done,
    run_training_loop,
)
from inchworm.train.trainer import PPOTrainer, create_training_components, functional_training_loop

FAST = PPOConfig(rollout_steps=STEPS, num_minibatches=2, update_epochs=1, learning_rate=1e-2)
config = functools.partial(small_config, iterations=4, ppo=FAST)


def policy_for(env: Any, *, seed: int = 0) -> TorchPolicy:
    one = make_vector_env(env, 1)
    return TorchPolicy(PolicySpec(one.observation_space, one.action_space, SMALL), seed=seed)


class FakeParts:
    """Collector, learner and policy in one: returns rollouts that were collected before, and records its calls."""

    updates = env_steps = episodes = 0
    total_timesteps: int | None = None

    def __init__(self, journal: list[Any]) -> None:
        self.rollouts, self.journal = list(rollouts()), journal
        self.recent: deque[EpisodeRecord] = deque(maxlen=100)

    def collect(self, num_steps: int) -> Rollout:
        self.journal.append(("collect", num_steps))
        rollout = self.rollouts.pop(0)
        self.env_steps += rollout.num_valid
        self.episodes += len(rollout.episodes)
        self.recent.extend(rollout.episodes)
        return rollout

    def update(self, rollout: Any, custom_loss_fns: Any = ()) -> UpdateStats:
        self.updates += 1
        self.journal.append(("update", rollout, tuple(custom_loss_fns)))
        return UpdateStats({"loss": float(self.updates), "policy_loss": 0.5, "value_loss": 0.25, "entropy": 0.125})

    def get_weights(self) -> dict[str, Any]:
        return {"tag": self.updates}

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        self.journal.append(("set_weights", weights["tag"]))


class Journal(BaseCallback):
    """Records its calls."""

    def __init__(self, name: str, journal: list[Any]) -> None:
        self.name, self.journal = name, journal

    def on_train_start(self, state: TrainingState) -> None:
        self.journal.append((self.name, "start", state.iteration, state.env_steps))

    def on_rollout(self, state: TrainingState, rollout: Rollout) -> Rollout | None:
        self.journal.append((self.name, "rollout", rollout))

    def on_iteration(self, state: TrainingState, metrics: Mapping[str, float]) -> bool | None:
        self.journal.append((self.name, "iteration", state.iteration, state.env_steps, metrics["loss"]))

    def on_train_end(self, state: TrainingState) -> None:
        self.journal.append((self.name, "end", state.iteration))


@functools.cache
def rollouts(count: int = 6, length: int = 3) -> tuple[Rollout, ...]:
    """Each 8 steps of 2 lanes of `Counter`, whose episodes of `length` steps go on from one to the next."""
    env = functools.partial(Counter, length)
    components = create_training_components(config(), policy_for(env), env)
    return tuple(components.collector.collect(STEPS) for _ in range(count))


def parts(journal: list[Any], *, callbacks: Any = (), losses: Any = (), **run: Any) -> TrainingComponents:
    collector, learner = FakeParts(journal), FakeParts(journal)
    shared: Any = {"policy": learner, "collector": collector, "learner": learner}
    return TrainingComponents(config(**run), **shared, custom_losses=tuple(losses), callbacks=tuple(callbacks))


# ---- what an iteration is
def test_an_iteration_is_collect_callbacks_learn_hand_over_in_this_order() -> None:
    journal: list[Any] = []
    watchers = (Journal("first", journal), Journal("second", journal))
    loss = lambda: 0  # noqa: E731 - only its identity matters
    state = TrainingState()
    run_training_loop(state, parts(journal, callbacks=watchers, losses=[loss], iterations=2), default_training_step)
    iterations = [
        [
            ("collect", STEPS),
            ("first", "rollout", rollout),
            ("second", "rollout", rollout),
            ("update", rollout, (loss,)),
            ("set_weights", number),
            ("first", "iteration", number, number * BATCH, float(number)),
            ("second", "iteration", number, number * BATCH, float(number)),
        ]
        for number, rollout in enumerate(rollouts()[:2], 1)
    ]
    starts, ends = ([(name, *what) for name in ("first", "second")] for what in (("start", 0, 0), ("end", 2)))
    assert journal == [*starts, *iterations[0], *iterations[1], *ends]


def test_a_collector_that_follows_the_policy_is_not_given_its_weights() -> None:
    journal: list[Any] = []
    components = parts(journal, iterations=1)
    components.collector.follows = components.policy
    run_training_loop(TrainingState(), components, default_training_step)
    assert [what for what, *_ in journal] == ["collect", "update"]


def test_a_rollout_that_a_callback_returns_is_what_is_learned_from() -> None:
    class Shaped(BaseCallback):
        def on_rollout(self, state: TrainingState, rollout: Rollout) -> Rollout:
            return dataclasses.replace(rollout, rewards=rollout.rewards + 10)

    journal: list[Any] = []
    run_training_loop(TrainingState(), parts(journal, callbacks=[Shaped(), Shaped()], iterations=1), default_training_step)
    [learned] = [entry[1] for entry in journal if entry[0] == "update"]
    assert np.array_equal(learned.rewards, rollouts()[0].rewards + 20)  # each callback saw what the one before it returned


def test_what_was_collected_counts_whatever_a_callback_makes_of_it() -> None:
    class OneLane(BaseCallback):
        def on_rollout(self, state: TrainingState, rollout: Rollout) -> Rollout:
            return select_lanes(rollout, [0])

    state = TrainingState()
    run_training_loop(state, parts([], callbacks=[OneLane()], max_iterations=2), default_training_step)
    assert state.env_steps == 2 * BATCH
    assert state.episodes == len(rollouts()[0].episodes) + len(rollouts()[1].episodes)
    assert state.metrics["iteration_episodes"] == len(rollouts()[1].episodes)


# ---- what stops it
@pytest.mark.parametrize(
    ("run", "iterations"),
    [
        ({"total_timesteps": 3 * BATCH}, 3),
        ({"total_timesteps": 3 * BATCH - 1}, 3),  # the target is reached, not undershot
        ({"total_timesteps": 2 * BATCH + 1}, 3),
        ({"max_iterations": 2}, 2),
        ({"max_episodes": 4}, 1),  # 8 steps of episodes of 3: 2 a lane in the first rollout
        ({"max_episodes": 5}, 2),
        ({"total_timesteps": BATCH, "max_iterations": 3, "max_episodes": 50}, 1),
    ],
)
def test_stops_at_whatever_comes_first(run: dict[str, Any], iterations: int) -> None:
    state = TrainingState()
    run_training_loop(state, parts([], **run), default_training_step)
    assert (state.iteration, state.env_steps) == (iterations, iterations * BATCH)


@pytest.mark.parametrize(
    ("answer", "iterations"), [(None, 4), (True, 4), (0, 4), ("", 4), (np.bool_(True), 4), (np.bool_(False), 2), (False, 2)]
)
def test_only_false_stops_it_after_all_callbacks_ran(answer: Any, iterations: int) -> None:
    journal: list[Any] = []
    stop = as_callback(lambda state, metrics: answer if state.iteration == 2 else True)
    state = TrainingState()
    run_training_loop(state, parts(journal, callbacks=[stop, Journal("later", journal)]), default_training_step)
    assert (state.iteration, state.should_stop) == (iterations, iterations == 2)
    calls = [entry[1:3] for entry in journal if entry[0] == "later" and entry[1] != "rollout"]
    assert calls == [("start", 0), *(("iteration", number) for number in range(1, iterations + 1)), ("end", iterations)]


@pytest.mark.parametrize("moment", ["on_train_start", "on_rollout", "on_iteration", "on_train_end"])
def test_an_exception_in_a_callback_stops_the_run(moment: str) -> None:
    class Broken(BaseCallback):
        pass

    def fail(*arguments: Any) -> None:
        raise ZeroDivisionError(moment)

    setattr(Broken, moment, fail)
    with pytest.raises(ZeroDivisionError, match=moment):
        run_training_loop(TrainingState(), parts([], callbacks=[Broken()]), default_training_step)


def test_a_run_that_is_done_takes_no_step() -> None:
    journal: list[Any] = []
    state = TrainingState(env_steps=4 * BATCH, iteration=4)
    run_training_loop(state, parts(journal, callbacks=[Journal("it", journal)]), default_training_step)
    assert journal == [("it", "start", 4, 4 * BATCH), ("it", "end", 4)]
    assert is_done(state, config().run)
    assert not is_done(TrainingState(env_steps=4 * BATCH - 1), config().run)


def test_only_functions_are_wrapped_as_callbacks() -> None:
    class Duck:
        """Keeps the protocol without inheriting anything, and can be called, too."""

        def on_train_start(self, state: Any) -> None: ...

        def on_rollout(self, state: Any, rollout: Any) -> None: ...

        def on_iteration(self, state: Any, metrics: Any) -> None: ...

        def on_train_end(self, state: Any) -> None: ...

        def __call__(self) -> None: ...

    duck, base = Duck(), BaseCallback()
    assert as_callback(duck) is duck  # type: ignore[arg-type, comparison-overlap]
    assert as_callback(base) is base
    assert isinstance(as_callback(lambda state, metrics: None), FunctionCallback)
    assert isinstance(as_callback(lambda *arguments: None), FunctionCallback)
    assert isinstance(as_callback(print), FunctionCallback)


class ForgetsTheRollout(BaseCallback):
    def on_rollout(self, state: Any) -> None: ...  # type: ignore[override]


class OnlyIterations:
    def on_iteration(self, state: Any, metrics: Any) -> None: ...


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (3, r"a callback must be a function of \(state, metrics\) or a BaseCallback; got int"),
        (lambda metrics: None, r"the callback <lambda> is called with \(state, metrics\), but takes \(metrics\)"),
        (ForgetsTheRollout, r"the callback ForgetsTheRollout is a class; give an instance of it: ForgetsTheRollout\(\)"),
        (ForgetsTheRollout(), r"the callback ForgetsTheRollout.on_rollout is called with \(state, rollout\), but takes \(state: .*\).*"),
        (Mock(), "the callback Mock has every attribute that it is asked for, as a mock; give a function or a BaseCallback"),
        (OnlyIterations(), r"the callback OnlyIterations has no on_train_start, on_rollout, on_train_end; derive it from .*BaseCallback.*"),
    ],
)
def test_a_wrong_callback_is_refused_in_one_line_before_anything_happens(wrong: Any, message: str, tmp_path: Path) -> None:
    def never() -> Any:
        raise AssertionError("an environment was made")

    with pytest.raises(ConfigError, match=f"^{message}$"):
        PPOTrainer("mlp", never, callbacks=[wrong], run_dir=tmp_path / "run")
    with PPOTrainer("mlp", "CartPole-v1", num_envs=1, run_dir=tmp_path / "run") as trainer:
        with pytest.raises(ConfigError, match=f"^{message}$"):
            trainer.train(total_timesteps=8, callback=wrong)
        assert trainer.total_timesteps == 0


def test_callbacks_are_a_list() -> None:
    with pytest.raises(ConfigError, match=r"^callbacks must be a list of callbacks, not function; put it into one: callbacks=\[…\]$"):
        PPOTrainer("mlp", "CartPole-v1", callbacks=lambda state, metrics: None)  # type: ignore[arg-type]


# ---- what it remembers
def test_history_has_one_entry_an_iteration_under_every_name() -> None:
    state = TrainingState()
    run_training_loop(state, parts([]), default_training_step)
    assert state.history["timesteps"] == [16, 32, 48, 64]
    assert state.history["loss"] == [1, 2, 3, 4]
    assert {"mean_reward", "policy_loss", "value_loss", "entropy", "timing/seconds", "timing/collect_seconds"} <= state.history.keys()
    assert {len(values) for values in state.history.values()} == {4}
    # Episodes of Counter(3) earn 1 + 2 + 3.
    assert state.history["mean_reward"] == state.history["mean_return"] == [6] * 4
    assert state.history["mean_length"] == [3] * 4


def test_a_metric_that_an_iteration_lacks_is_nan_there() -> None:
    state = TrainingState()

    def sometimes(state: TrainingState, metrics: Mapping[str, float]) -> None:
        if state.iteration in (2, 3):
            state.metrics["now_and_then"] = float(state.iteration)

    run_training_loop(state, parts([], callbacks=[as_callback(sometimes)]), default_training_step)
    assert str(state.history["now_and_then"]) == "[nan, 2.0, 3.0, nan]"


def test_the_mean_reward_is_nan_before_the_first_episode_ends() -> None:
    env = functools.partial(Counter, 20)
    state = functional_training_loop(config(), policy_for(env), env)
    # 8 steps an iteration: the first episodes of 20 steps end in the third, and earn 1 + … + 20
    assert [math.isnan(value) for value in state.history["mean_reward"]] == [True, True, False, False]
    assert state.history["mean_reward"][2:] == [210, 210]
    assert "mean_return" not in episode_metrics(TrainingState(), rollouts()[0].episodes)


def test_means_are_over_the_last_hundred_episodes_and_infos_over_the_iterations() -> None:
    state = TrainingState()
    state.recent.extend(EpisodeRecord(float(index), index, 0, 0) for index in range(150))
    rollout = dataclasses.replace(
        rollouts()[0],
        episodes=(EpisodeRecord(0.0, 1, 0, 0, {"success": 1.0, "b": 4.0}), EpisodeRecord(0.0, 1, 1, 0, {"success": 0.0})),
    )
    metrics = episode_metrics(state, rollout.episodes)
    assert metrics["mean_return"] == metrics["mean_length"] == 99.5  # the mean of 50 … 149
    assert (metrics["episode/success"], metrics["episode/b"]) == (0.5, 4.0)


def test_the_clock_is_kept_apart_by_name() -> None:
    def slow(state: TrainingState, components: TrainingComponents) -> Mapping[str, float]:
        state.env_steps += 100
        return UpdateStats({"loss": 1.0})  # any mapping will do

    clocked = TrainingState()
    run_training_loop(clocked, parts([], max_iterations=1), slow)
    assert {name for name in clocked.metrics if name.startswith("timing/")} == {
        "timing/seconds",
        "timing/between_seconds",
        "timing/steps_per_second",
    }
    assert clocked.metrics["timing/steps_per_second"] == pytest.approx(100 / clocked.metrics["timing/seconds"])
    assert clocked.metrics["loss"] == 1.0


# ---- whole runs
def test_functional_and_trainer_give_the_same_bits() -> None:
    policies = [policy_for("CartPole-v1", seed=3) for _ in range(3)]
    for policy in policies[:2]:
        functional_training_loop(config(seed=3), policy)
    with PPOTrainer(policies[2], "CartPole-v1", config(seed=3)) as trainer:
        trainer.train()
    assert bits(policies[0].get_weights()) == bits(policies[1].get_weights()) == bits(policies[2].get_weights())


def test_a_step_function_may_wrap_the_default_one() -> None:
    seen: list[float] = []

    def wrapped(state: TrainingState, components: TrainingComponents) -> dict[str, float]:
        metrics = default_training_step(state, components)
        seen.append(metrics["loss"])
        if len(seen) == 2:
            state.should_stop = True  # early stopping
        return {**metrics, "seen": float(len(seen))}

    state = functional_training_loop(config(), policy_for("CartPole-v1"), step_fn=wrapped)
    assert state.iteration == len(seen) == 2
    assert state.history["seen"] == [1, 2]
    assert state.history["loss"] == seen


def test_a_step_function_may_replace_the_default_one() -> None:
    env = functools.partial(Counter, 3)
    policy = policy_for(env)
    before = policy.get_weights()

    def collect_only(state: TrainingState, components: TrainingComponents) -> dict[str, float]:
        rollout = components.collector.collect(5)
        state.env_steps += rollout.num_valid
        return {"reward": float(rollout.rewards.sum())}

    state = functional_training_loop(config(total_timesteps=20), policy, env, step_fn=collect_only)
    # 5 steps of 2 lanes: rewards 1 2 3 1 2 and, going on, 3 1 2 3 1
    assert state.history["reward"] == [18, 20]
    assert all(np.array_equal(before[name], value) for name, value in policy.get_weights().items())


@pytest.mark.parametrize("answer", [None, [1.0]])
def test_a_step_function_that_returns_no_metrics_is_refused_in_one_line(answer: Any) -> None:
    with pytest.raises(ConfigError, match=f"step_fn returned {type(answer).__name__}; it must return metrics"):
        functional_training_loop(config(), policy_for("CartPole-v1"), step_fn=lambda state, components: answer)


def test_the_environments_are_closed_whatever_happens() -> None:
    def fail(state: Any, components: Any) -> dict[str, float]:
        raise ZeroDivisionError

    door, open_doors = watched(Counter)
    with pytest.raises(ZeroDivisionError):
        functional_training_loop(config(), policy_for(Counter), door, step_fn=fail)
    with pytest.raises(ConfigError, match="FakeParts"):
        create_training_components(config(), FakeParts([]), door)  # type: ignore[arg-type]
    assert not open_doors


@pytest.mark.parametrize("by", ["run.name", "run.directory"])
def test_functional_training_loop_writes_evaluates_and_continues_a_run(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scores = EvalConfig(interval=2, episodes=2, final_episodes=0, num_envs=2)
    where = {"name": "mine"} if by == "run.name" else {"directory": "elsewhere"}
    run = {**where, "checkpoint_interval": 2, "keep_checkpoints": 9, "keep_best": False, "log_interval": 3}
    state = functional_training_loop(config(iterations=5, evaluation=scores, **run), "mlp", env="CartPole-v1")
    assert [entry["iteration"] for entry in state.evaluations] == [2, 4]
    [path] = (tmp_path / where.get("directory", "runs")).iterdir()
    assert [row["iteration"] for row in read_rows(path / "metrics.jsonl")] == [2, 3, 4, 5]
    assert sorted(entry.name[-1] for entry in (path / "checkpoints").iterdir()) == ["2", "4", "5"]
    if by == "run.name":
        again = functional_training_loop(config(iterations=7, evaluation=scores, **run), "mlp", env="CartPole-v1")
        assert (again.iteration, again.history["timesteps"]) == (7, [6 * BATCH, 7 * BATCH])
        with pytest.raises(ConfigError, match=r"has another config: run\.seed: 0 → 1"):
            functional_training_loop(config(seed=1, evaluation=scores, **run), "mlp", env="CartPole-v1")
    with PPOTrainer("mlp", "CartPole-v1", config(iterations=7 if by == "run.name" else 5)) as trainer:
        trainer.train()
    assert bits(load_policy(path / "policy.safetensors").get_weights()) == bits(trainer.policy.get_weights())


@pytest.mark.parametrize(
    "run", [{"checkpoint_interval": 3}, {"checkpoint_seconds": 1.0}, {"keep_checkpoints": 5}, {"keep_best": False}, {"log_interval": 2}]
)
def test_settings_of_files_are_refused_where_nothing_is_written(run: dict[str, Any]) -> None:
    [(name, value)] = run.items()
    with pytest.raises(ConfigError, match=rf"^run\.{name}={value!r} would have no effect without a run directory; set run\.name"):
        functional_training_loop(config(**run), "mlp")
    with pytest.raises(ConfigError, match=rf"^run\.{name}={value!r} would have no effect: create_training_components"):
        create_training_components(config(**run), "mlp")


def test_parts_of_an_iteration_refuse_a_run_directory_and_evaluations() -> None:
    asked = config(name="mine", evaluation=EvalConfig(interval=5, episodes=3))
    with pytest.raises(ConfigError, match=r"^run\.name='mine', evaluation\.interval=5, evaluation\.episodes=3 would have no effect"):
        create_training_components(asked, "mlp")


def test_a_wrong_config_leaves_no_run_behind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="minibatch"):
        functional_training_loop(config(directory=str(tmp_path), ppo=FAST.replace(num_minibatches=1_000)), "mlp")
    assert not list(tmp_path.iterdir())


def test_components_from_the_config_alone() -> None:
    made = create_training_components(config(), policy_for("CartPole-v1"))
    assert made.collector.collect(2).observations.shape == (2, LANES, 4)
    assert made.learner.total_timesteps == 4 * BATCH
    made.collector.close()


class Ahead(BaseCallback):
    """Needs to see the run every third iteration."""

    sees_every = 3

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int, bool]] = []

    def on_iteration(self, state: TrainingState, metrics: Mapping[str, float]) -> None:
        self.seen.append((state.iteration, state.env_steps, int(metrics["number"]), state.settled))


def fused_run(callback: Ahead, limits: dict[str, int], learner: object = None) -> tuple[TrainingState, list[int]]:
    """A run of iterations of 10 steps and an episode each, computed five at a time at most; and how many were asked for."""
    state, asked = TrainingState(), list[int]()

    def fused(components: TrainingComponents, most: int) -> list[Iteration]:
        del components
        asked.append(most)
        begin = state.iteration
        numbers = range(begin + 1, begin + 1 + min(most, 5))
        return [Iteration({"number": number}, 10 * number, number, [EpisodeRecord(float(number), 10, 0, 0)]) for number in numbers]

    config = TrainingConfig(run=RunConfig(**limits))
    parts: Any = TrainingComponents(config, None, None, learner, (), (callback,))  # type: ignore[arg-type]
    run_training_loop(state, parts, lambda *_: {"number": -1.0}, fused)
    return state, asked


def test_iterations_are_computed_up_to_what_a_callback_needs_and_all_are_shown() -> None:
    callback = Ahead()
    state, asked = fused_run(callback, {"max_iterations": 8})
    assert asked == [3, 3, 2]
    assert callback.seen == [(n, 10 * n, n, n in (3, 6, 8)) for n in range(1, 9)]
    assert state.history["mean_reward"] == [(n + 1) / 2 for n in range(1, 9)]
    assert state.history["iteration_episodes"] == [1.0] * 8


def test_where_an_episode_may_end_the_run_every_iteration_is_computed_alone() -> None:
    state, asked = fused_run(Ahead(), {"max_episodes": 2})
    assert asked == [1, 1]
    assert state.episodes == 2


def test_the_first_rollout_of_normalisers_is_collected_apart() -> None:
    learner = SimpleNamespace(warming_up=True)

    class Once(Ahead):
        def on_iteration(self, state: TrainingState, metrics: Mapping[str, float]) -> None:
            super().on_iteration(state, metrics)
            learner.warming_up = False

    callback = Once()
    fused_run(callback, {"max_iterations": 3}, learner)
    assert [number for _, _, number, _ in callback.seen] == [-1, 2, 3]
