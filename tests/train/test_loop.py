"""The loop and its parts without the trainer: what is called when, what is counted, what stops it."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from doubles.toys import ActionReward, Corridor, Counter, TruncatedForever
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.config.sections import CollectConfig, EnvConfig, PolicyConfig, PPOConfig, RunConfig, TrainingConfig
from inchworm.core.errors import ConfigError
from inchworm.core.types import EpisodeRecord, UpdateStats
from inchworm.env.source import make_vector_env
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.rollout import Rollout, select_lanes
from inchworm.train.callbacks import BaseCallback, FunctionCallback, as_callback
from inchworm.train.loop import (
    TrainingComponents,
    TrainingState,
    default_training_step,
    episode_metrics,
    is_done,
    run_training_loop,
)
from inchworm.train.trainer import PPOTrainer, create_training_components, functional_training_loop

STEPS, LANES = 8, 2
BATCH = STEPS * LANES


def config(*, total: int = 4 * BATCH, **run: Any) -> TrainingConfig:
    return TrainingConfig(
        env=EnvConfig(num_envs=LANES),
        ppo=PPOConfig(rollout_steps=STEPS, num_minibatches=2, update_epochs=1, learning_rate=1e-2),
        run=RunConfig(total_timesteps=total, **run),
    )


def policy_for(env: Any, *, seed: int = 0) -> TorchPolicy:
    one = make_vector_env(env, 1)
    return TorchPolicy(PolicySpec(one.observation_space, one.action_space, PolicyConfig(hidden_sizes=(8,))), seed=seed)


class FakeCollector:
    """Counts, and hands out rollouts that were collected before."""

    def __init__(self, rollouts: list[Rollout], journal: list[Any]) -> None:
        self.rollouts, self.journal = rollouts, journal

    def collect(self, num_steps: int) -> Rollout:
        self.journal.append(("collect", num_steps))
        return self.rollouts.pop(0)

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        self.journal.append(("set_weights", weights["tag"]))


class FakeLearner:
    updates = 0
    total_timesteps: int | None = None

    def __init__(self, journal: list[Any]) -> None:
        self.journal = journal

    def update(self, rollout: Any, custom_loss_fns: Any = ()) -> UpdateStats:
        self.updates += 1
        self.journal.append(("update", rollout, tuple(custom_loss_fns)))
        return UpdateStats({"loss": float(self.updates), "policy_loss": 0.5, "value_loss": 0.25, "entropy": 0.125})


class FakePolicy:
    def __init__(self) -> None:
        self.version = 0

    def get_weights(self) -> dict[str, Any]:
        self.version += 1
        return {"tag": self.version}


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
    fake: Any = FakePolicy()
    collector = FakeCollector(list(rollouts()), journal)
    return TrainingComponents(config(**run), fake, collector, FakeLearner(journal), tuple(losses), tuple(callbacks))


# ---- what an iteration is


def test_an_iteration_is_collect_callbacks_learn_hand_over_in_this_order() -> None:
    journal: list[Any] = []
    watchers = (Journal("first", journal), Journal("second", journal))
    loss = lambda: 0  # noqa: E731 - only its identity matters
    state = TrainingState()
    run_training_loop(state, parts(journal, callbacks=watchers, losses=[loss], total=2 * BATCH), default_training_step)
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


def test_a_rollout_that_a_callback_returns_is_what_is_learned_from() -> None:
    class Shaped(BaseCallback):
        def on_rollout(self, state: TrainingState, rollout: Rollout) -> Rollout:
            return dataclasses.replace(rollout, rewards=rollout.rewards + 10)

    journal: list[Any] = []
    run_training_loop(TrainingState(), parts(journal, callbacks=[Shaped(), Shaped()], total=BATCH), default_training_step)
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


# ---- what stops it


@pytest.mark.parametrize(
    ("run", "iterations"),
    [
        ({"total": 3 * BATCH}, 3),
        ({"total": 3 * BATCH - 1}, 3),  # the target is reached, not undershot
        ({"total": 2 * BATCH + 1}, 3),
        ({"max_iterations": 2}, 2),
        ({"max_episodes": 4}, 1),  # 8 steps of episodes of 3: 2 a lane in the first rollout
        ({"max_episodes": 5}, 2),
        ({"total": BATCH, "max_iterations": 3, "max_episodes": 50}, 1),
    ],
)
def test_stops_at_whatever_comes_first(run: dict[str, Any], iterations: int) -> None:
    state = TrainingState()
    run_training_loop(state, parts([], **run), default_training_step)
    assert (state.iteration, state.env_steps) == (iterations, iterations * BATCH)


@pytest.mark.parametrize("false", [False, np.bool_(False)])
def test_a_callback_that_returns_false_stops_it_after_all_callbacks_ran(false: Any) -> None:
    journal: list[Any] = []
    stop = as_callback(lambda state, metrics: false if state.iteration == 2 else True)
    state = TrainingState()
    run_training_loop(state, parts(journal, callbacks=[stop, Journal("later", journal)]), default_training_step)
    assert state.iteration == 2
    assert state.should_stop
    assert [entry[1:3] for entry in journal if entry[0] == "later" and entry[1] != "rollout"] == [
        ("start", 0),
        ("iteration", 1),
        ("iteration", 2),
        ("end", 2),
    ]


@pytest.mark.parametrize(("answer", "iterations"), [(None, 4), (True, 4), (0, 4), ("", 4), (np.bool_(True), 4), (np.bool_(False), 1)])
def test_nothing_but_false_stops_it(answer: Any, iterations: int) -> None:
    state = TrainingState()
    run_training_loop(state, parts([], callbacks=[as_callback(lambda state, metrics: answer)]), default_training_step)
    assert state.iteration == iterations


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

        def on_iteration(self, state: Any, metrics: Any) -> None: ...

        def __call__(self) -> None: ...

    duck, base = Duck(), BaseCallback()
    assert as_callback(duck) is duck  # type: ignore[arg-type, comparison-overlap]
    assert as_callback(base) is base
    assert isinstance(as_callback(lambda state, metrics: None), FunctionCallback)


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
    assert "mean_return" not in episode_metrics(TrainingState(), rollouts()[0])


def test_means_are_over_the_last_hundred_episodes_and_infos_over_the_iterations() -> None:
    state = TrainingState()
    state.recent.extend(EpisodeRecord(float(index), index, 0, 0) for index in range(150))
    rollout = dataclasses.replace(
        rollouts()[0],
        episodes=(EpisodeRecord(0.0, 1, 0, 0, {"success": 1.0, "b": 4.0}), EpisodeRecord(0.0, 1, 1, 0, {"success": 0.0})),
    )
    metrics = episode_metrics(state, rollout)
    assert metrics["mean_return"] == metrics["mean_length"] == 99.5  # the mean of 50 … 149
    assert (metrics["episode/success"], metrics["episode/b"]) == (0.5, 4.0)
    assert metrics["iteration_episodes"] == 2


def test_the_clock_is_kept_apart_by_name() -> None:
    def slow(state: TrainingState, components: TrainingComponents) -> Mapping[str, float]:
        state.env_steps += 100
        return UpdateStats({"loss": 1.0})  # any mapping will do

    clocked = TrainingState()
    run_training_loop(clocked, parts([], max_iterations=1), slow)
    assert {name for name in clocked.metrics if name.startswith("timing/")} == {"timing/seconds", "timing/steps_per_second"}
    assert clocked.metrics["timing/steps_per_second"] == pytest.approx(100 / clocked.metrics["timing/seconds"])
    assert clocked.metrics["loss"] == 1.0


# ---- whole runs


def test_functional_training_loop_trains_a_toy_from_its_parts() -> None:
    policy = policy_for(ActionReward)
    quick = config(total=40 * BATCH).replace(
        ppo=PPOConfig(rollout_steps=STEPS, update_epochs=4, num_minibatches=1, learning_rate=3e-2, ent_coef=0.0)
    )
    state = functional_training_loop(quick, policy, ActionReward)
    assert state.iteration == 40
    assert state.episodes == state.env_steps == 40 * BATCH  # episodes of one step
    assert policy.policy_version == 40
    first, last = state.history["iteration_episodes"], state.history["mean_reward"][-1]
    assert first[0] == BATCH
    assert last > 0.9  # a coin earns 0, the best policy 1


def test_functional_and_trainer_give_the_same_bits() -> None:
    weights = []
    for seed_again in range(2):
        del seed_again
        policy = policy_for("CartPole-v1", seed=3)
        functional_training_loop(config(seed=3).replace(env=EnvConfig(id="CartPole-v1", num_envs=LANES)), policy)
        weights.append(policy.get_weights())
    with PPOTrainer(policy_for("CartPole-v1", seed=3), "CartPole-v1", config(seed=3)) as trainer:
        trainer.train()
        weights.append(trainer.policy.get_weights())
    for name, value in weights[0].items():
        assert value.tobytes() == weights[1][name].tobytes() == weights[2][name].tobytes(), name


def test_the_configs_threads_are_used_and_then_put_back() -> None:
    """Threads change last bits, so they are the config's wherever the run is started from."""
    import torch

    before, seen = torch.get_num_threads(), list[int]()

    def look(state: TrainingState, components: TrainingComponents) -> dict[str, float]:
        seen.append(torch.get_num_threads())
        return {}

    torch.set_num_threads(3)
    for threads in (1, 2, 0):  # 0 leaves them as they are
        functional_training_loop(config(max_iterations=1, threads=threads), policy_for("CartPole-v1"), step_fn=look)
    assert seen == [1, 2, 3]
    assert torch.get_num_threads() == 3
    torch.set_num_threads(before)


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

    state = functional_training_loop(config(total=20), policy, env, step_fn=collect_only)
    # 5 steps of 2 lanes: rewards 1 2 3 1 2 and, going on, 3 1 2 3 1
    assert state.history["reward"] == [18, 20]
    assert all(np.array_equal(before[name], value) for name, value in policy.get_weights().items())


def test_custom_losses_reach_the_learner_and_are_logged_by_name() -> None:
    def pull_values_to_five(values: Any) -> Any:
        return ((values - 5.0) ** 2).mean()

    def nothing(policy: Any, obs: Any, actions: Any, rewards: Any, values: Any, advantages: Any) -> Any:
        assert (obs.shape[:2], actions.shape) == (rewards.shape, advantages.shape)
        return 0.0 * values.sum()

    pulled = config(total=60 * BATCH).replace(ppo=PPOConfig(rollout_steps=STEPS, learning_rate=3e-2, vf_coef=0.0, num_minibatches=1))
    policy = policy_for(TruncatedForever)
    state = functional_training_loop(pulled, policy, TruncatedForever, custom_losses=[pull_values_to_five, nothing])
    assert float(policy.value(np.zeros((1, 1, 1), np.float32))[0, 0]) == pytest.approx(5.0, abs=0.1)
    losses = state.history["loss/pull_values_to_five"]
    assert losses[0] > 20 > 0.1 > losses[-1]
    assert set(state.history["loss/nothing"]) == {0.0}
    assert state.history["grad_norm/pull_values_to_five"][0] > 0


def test_the_environments_are_closed_whatever_happens() -> None:
    closed: list[int] = []

    class Door(Counter):
        def close(self) -> None:
            closed.append(1)

    def fail(state: Any, components: Any) -> dict[str, float]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        functional_training_loop(config(), policy_for(Door), Door, step_fn=fail)
    assert len(closed) >= LANES


def test_a_policy_that_cannot_learn_leaves_no_environment_open() -> None:
    standing: list[int] = []

    class Door(Counter):
        def __init__(self) -> None:
            standing.append(1)
            super().__init__()

        def close(self) -> None:
            standing.pop()

    with pytest.raises(ConfigError, match="FakePolicy"):
        create_training_components(config(), FakePolicy(), Door)  # type: ignore[arg-type]
    assert not standing


def test_the_components_work_alone() -> None:
    env = functools.partial(Corridor, 3)
    policy = policy_for(env)
    made = create_training_components(config(seed=4).replace(collect=CollectConfig(max_replay_steps=7)), policy, env)
    rollout = made.collector.collect(12)
    before = policy.get_weights()
    stats = made.learner.update(rollout)
    made.collector.set_weights(policy.get_weights())
    again = made.collector.collect(3)
    assert (rollout.num_lanes, again.num_steps) == (LANES, 3)
    assert math.isfinite(stats["loss"])
    assert any(not np.array_equal(before[name], value) for name, value in policy.get_weights().items())
    assert again.policy_version.tolist() == [1, 1]
    assert made.learner.total_timesteps == config().run.total_timesteps
    made.collector.close()


def test_the_config_names_the_environment_by_default() -> None:
    made = create_training_components(config(), policy_for("CartPole-v1"))
    assert made.collector.collect(2).observations.shape == (2, LANES, 4)
    made.collector.close()


def test_the_state_that_is_saved_is_what_cannot_be_read_off_elsewhere() -> None:
    state = TrainingState(iteration=7, best_score=1.5, env_steps=3)
    other = TrainingState()
    other.load_state_dict(state.state_dict())
    assert (other.iteration, other.best_score) == (7, 1.5)
