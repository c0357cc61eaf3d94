"""PPOTrainer: collect and learn apart and together, and runs that resume where they stopped."""

import copy
import functools
import io
import json
import math
import re
import shutil
import signal
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from doubles.runs import BATCH, LANES, SMALL, STEPS, bits, finish, outcome, small_config
from doubles.toys import ActionReward, Corridor
from doubles.trackers import Recorder
from inchworm.backends.torch.network import Network
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.config.sections import EnvConfig, EvalConfig, PolicyConfig, PPOConfig, TrainingConfig
from inchworm.core.errors import ConfigError, EnvError, SpaceError
from inchworm.core.types import Activity, UpdateStats
from inchworm.env.source import WorkerVectorEnv, make_vector_env
from inchworm.policy.composite import PolicyMap
from inchworm.policy.file import fingerprint
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.fake import create_fake_rollout
from inchworm.rollout.rollout import Rollout, combine_rollouts
from inchworm.run.directory import CHECKPOINTS, POLICY
from inchworm.run.policies import load_policy
from inchworm.tracking.console import ConsoleTracker, Terminal
from inchworm.tracking.jsonl import METRICS, TIMING, read_rows
from inchworm.train.callbacks import BaseCallback
from inchworm.train.loop import TrainingComponents, TrainingState, default_training_step
from inchworm.train.trainer import PPOTrainer, functional_training_loop
from inchworm.worlds.toys import DEATHS, JOINS, comings

pytestmark = pytest.mark.filterwarnings("error:ratio_error")  # the policy that acts is the one that learns

PPO = PPOConfig(rollout_steps=STEPS, num_minibatches=2, update_epochs=2, learning_rate=1e-2)
OBSERVED, ACTED = spaces.Box(-1.0, 1.0, (3,), np.float32), spaces.Discrete(2)
config = functools.partial(small_config, ppo=PPO, checkpoint_interval=2)


def trainer_for(env: Any = "CartPole-v1", settings: TrainingConfig | None = None, **more: Any) -> PPOTrainer:
    return PPOTrainer(SMALL, env, settings or config(), **more)


class Forbidden:
    """A vector env that fails on any use."""

    observation_space, action_space, num_lanes = OBSERVED, ACTED, 2

    def _no(self, *arguments: Any, **more: Any) -> Any:
        raise AssertionError("learn touched the environment")

    reset = send = recv = step = set_reset_options = state_dict = load_state_dict = _no

    def close(self) -> None: ...


# ---- learn alone
def test_learn_takes_made_up_data_and_no_environment_and_never_writes_its_input() -> None:
    trainer = PPOTrainer(SMALL, Forbidden(), PPO)
    rollout = create_fake_rollout(OBSERVED, ACTED, 20, 3)
    mapping = {name: np.array(rollout[name]) for name in ("observations", "actions", "log_probs", "rewards", "terminated", "truncated")}
    mapping |= {"cut_rows": np.array(rollout.cut_rows), "cut_observations": np.array(rollout.cut_observations)}
    before = {name: value.tobytes() for name, value in mapping.items()}
    stats = trainer.learn(mapping)
    assert {name: value.tobytes() for name, value in mapping.items()} == before
    assert all(type(value) is np.ndarray and value.flags.writeable for value in mapping.values())
    assert isinstance(stats, UpdateStats)
    assert {"loss", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm", "explained_variance"} <= set(stats)
    assert all(type(value) is float and math.isfinite(value) for value in stats.values())
    assert trainer.n_updates == 1
    assert trainer.total_timesteps == 0  # nothing was collected


def test_learn_passes_the_new_weights_to_the_collector_and_takes_custom_losses() -> None:
    def touch(values: Any) -> Any:
        return values.mean()

    with trainer_for() as trainer:
        stats = trainer.learn(trainer.collect_rollouts(), custom_loss_fns=[touch])
        assert "loss/touch" in stats
        assert bits(trainer.collector.policy.get_weights()) == bits(trainer.policy.get_weights())
        assert trainer.collect_rollouts(1).policy_version.tolist() == [1] * LANES


# ---- trainers that share a policy


def shared_policy() -> TorchPolicy:
    env = gym.make("CartPole-v1")
    config = PolicyConfig(hidden_sizes=(8,), normalize_observations=True)
    return TorchPolicy(PolicySpec(env.observation_space, env.action_space, config), seed=3)


def test_trainers_that_share_a_policy_act_with_its_current_weights() -> None:
    policy = shared_policy()
    trainers = [PPOTrainer(policy, "CartPole-v1", PPO, num_envs=2, seed=seed) for seed in range(4)]
    for update in range(4):
        rollout = combine_rollouts([trainer.collect_rollouts(n_steps=16) for trainer in trainers])
        assert rollout.policy_version.tolist() == [update] * 8
        assert set(rollout.weights_fingerprint.tolist()) == {fingerprint(policy.get_weights())}
        stats = trainers[0].learn(rollout)
        assert stats["staleness"] == 0
        assert stats.get("ratio_error", 0.0) < 5e-5  # the first update only moves the statistics
    for trainer in trainers:
        trainer.close()


def outside_load(policy: TorchPolicy) -> None:
    policy.load_state_dict({name: value + 0.1 for name, value in policy.state_dict().items()})


def outside_data(policy: TorchPolicy) -> None:
    for parameter in policy.parameters():
        parameter.data.mul_(2)  # invisible to torch's version counters


@pytest.mark.parametrize("change", [outside_load, outside_data])
def test_the_collector_follows_changes_of_the_policy_from_outside(change: Any) -> None:
    policy = shared_policy()
    with PPOTrainer(policy, "CartPole-v1", PPO, num_envs=2) as trainer:
        trainer.learn(trainer.collect_rollouts())  # moves the statistics
        before = trainer.collect_rollouts()
        change(policy)
        after = trainer.collect_rollouts()
        assert set(after.weights_fingerprint.tolist()) == {fingerprint(policy.get_weights())} != set(before.weights_fingerprint.tolist())
        assert bits(trainer.collector.policy.get_weights()) == bits(policy.get_weights())
        assert trainer.learn(after)["ratio_error"] < 5e-5
        change(policy)
        trainer.evaluate(2)
        assert bits(trainer.collector.policy.get_weights()) == bits(policy.get_weights())


def test_parts_of_a_composite_policy_follow_too() -> None:
    red, blue = shared_policy(), shared_policy()
    with PPOTrainer(PolicyMap(policies={"red": red, "blue": blue}, lane_map=["red", "blue"]), "CartPole-v1", PPO, num_envs=2) as trainer:
        trainer.collect_rollouts()
        outside_load(blue)
        assert set(trainer.collect_rollouts().weights_fingerprint.tolist()) == {fingerprint(trainer.policy.get_weights())}
        assert bits(trainer.collector.policy.get_weights()) == bits(trainer.policy.get_weights())


# ---- collect alone
def test_collect_never_learns() -> None:
    with trainer_for() as trainer:
        before = trainer.policy.get_weights()
        rollouts = [trainer.collect_rollouts(), trainer.collect_rollouts(n_steps=5)]
        assert bits(trainer.policy.get_weights()) == bits(before)
        assert [len(rollout["observations"]) for rollout in rollouts] == [STEPS, 5]
        assert {"observations", "actions", "rewards", "log_probs", "terminated", "truncated"} <= set(rollouts[0].keys())
        assert trainer.total_timesteps == LANES * (STEPS + 5)
        assert trainer.n_updates == 0


# ---- train
def test_train_collects_learns_and_remembers() -> None:
    with trainer_for() as trainer:
        history = trainer.train()
        assert history["timesteps"] == [BATCH * k for k in range(1, 7)]
        assert {"mean_reward", "loss", "policy_loss", "value_loss", "entropy"} <= history.keys()
        assert {len(values) for values in history.values()} == {6}
        assert (trainer.total_timesteps, trainer.n_updates, trainer.policy.policy_version) == (6 * BATCH, 6, 6)
        assert trainer.episode_rewards == [episode.episode_return for episode in trainer.collector.recent]
        assert history["mean_reward"][-1] == pytest.approx(np.mean(trainer.episode_rewards))
        assert type(trainer.optimizer).__name__ == "Adam"
        assert trainer.device in ("cpu", "cuda")


def test_the_names_of_history_are_there_even_if_nothing_happened() -> None:
    with trainer_for() as trainer:
        trainer.train(BATCH)
        with pytest.warns(UserWarning, match="nothing to train"):
            history = trainer.train(BATCH)  # the target is absolute and has been reached
        assert history == {name: [] for name in ("timesteps", "mean_reward", "loss", "policy_loss", "value_loss", "entropy")}
        assert trainer.n_updates == 1


def test_the_target_is_absolute_and_a_second_call_continues_to_it() -> None:
    with trainer_for() as whole, trainer_for() as halves:
        whole.train(6 * BATCH)
        first, second = halves.train(3 * BATCH), halves.train(6 * BATCH)
        assert (first["timesteps"][-1], second["timesteps"]) == (3 * BATCH, [4 * BATCH, 5 * BATCH, 6 * BATCH])
        assert bits(whole.policy.get_weights()) == bits(halves.policy.get_weights())


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({}, "96 env steps have been taken, and total_timesteps=96 counts from the start of the run; .*train(total_timesteps=192)"),
        ({"max_iterations": 2}, "the run has reached run.max_iterations=2; to continue, create the trainer with a larger number or None"),
    ],
)
def test_a_second_call_that_has_nothing_to_do_says_what_to_pass(limits: dict[str, Any], message: str) -> None:
    with trainer_for(settings=config(**limits)) as trainer:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trainer.train()
        with pytest.warns(UserWarning, match="^nothing to train") as caught:
            assert trainer.train().stop_reason in ("total_timesteps", "max_iterations")
        (warning,) = caught
        assert re.fullmatch("nothing to train: " + message.replace("(", "\\(").replace(")", "\\)"), str(warning.message))
        assert warning.filename == __file__  # the line that called train


def test_a_call_that_only_has_to_evaluate_does_not_warn(tmp_path: Path) -> None:
    settings = config(evaluation=EvalConfig(interval=0, final_episodes=2, num_envs=1))
    finish(trainer_for(run_dir=tmp_path))  # without an evaluation
    with trainer_for(run_dir=tmp_path, settings=settings) as trainer, warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.load_checkpoint()
        history = trainer.train()
    assert (len(history["timesteps"]), [row["episodes"] for row in history.evaluations]) == (0, [2])


def test_the_history_holds_the_evaluations_of_the_call_and_why_it_ended() -> None:
    settings = config(evaluation=EvalConfig(interval=2, episodes=3, final_episodes=5, num_envs=1))
    with trainer_for(settings=settings) as trainer:
        history = trainer.train(4 * BATCH)
        assert [(row["iteration"], row["env_steps"], row["episodes"]) for row in history.evaluations] == [
            (2, 2 * BATCH, 3),
            (4, 4 * BATCH, 3),
            (4, 4 * BATCH, 5),  # the final one
        ]
        assert history.stop_reason == "total_timesteps"
        assert {len(values) for values in history.values()} == {4}  # still a dict of lists, one entry per iteration
        assert history["evaluation/mean_return"][1] == history.evaluations[0]["mean_return"]
        score = history.evaluations[-1]["mean_return"]
        assert repr(history) == (
            f"History(4 iterations, 3 evaluations, the last with mean return {score:.5g}, stop_reason='total_timesteps')"
        )
        second = trainer.train(6 * BATCH, lambda state, metrics: state.iteration < 5)
        assert second.stop_reason == "callback"
        assert [row["iteration"] for row in second.evaluations] == [5]
        assert copy.copy(second).evaluations == second.evaluations
    with trainer_for(settings=config(max_episodes=1)) as trainer:
        assert trainer.train(10_000).stop_reason == "max_episodes"


def test_an_interrupted_call_says_so_in_the_state() -> None:
    def interrupt(state: TrainingState, metrics: Mapping[str, float]) -> None:
        signal.raise_signal(signal.SIGINT)

    with trainer_for() as trainer:
        with pytest.raises(KeyboardInterrupt):
            trainer.train(callback=interrupt)
        assert trainer.state.history.stop_reason == "interrupted"


def test_the_repr_is_one_line(tmp_path: Path) -> None:
    with trainer_for(run_dir=tmp_path / "mine") as trainer:
        trainer.train(2 * BATCH)
        text = f"mlp, CartPole-v1 x 2, backend torch, {2 * BATCH} env steps, iteration 2, run {tmp_path}/mine"
        assert repr(trainer) == f"PPOTrainer({text})"
    with PPOTrainer(TorchPolicy(PolicySpec(OBSERVED, ACTED, SMALL)), Forbidden(), PPO) as trainer:  # type: ignore[arg-type]
        assert repr(trainer).startswith("PPOTrainer(mlp, Forbidden x 2, ")


# ---- progress
def test_progress_without_a_terminal_is_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with trainer_for() as trainer:
        trainer.train(2 * BATCH)
        assert capsys.readouterr().out == ""
        trainer.train(4 * BATCH, progress=True)
        first, *_, last = capsys.readouterr().out.splitlines()
        assert first.startswith(f"{3 * BATCH}/{4 * BATCH} steps 75%  ")
        assert last.startswith(f"{4 * BATCH}/{4 * BATCH} steps 100%  ")


def test_a_wrong_progress_or_rollout_of_a_callback_is_named() -> None:
    with trainer_for() as trainer:
        with pytest.raises(ConfigError, match="progress must be True, False or a ConsoleTracker, not 'yes'"):
            trainer.train(BATCH, progress="yes")  # type: ignore[arg-type]
        assert trainer.total_timesteps == 0
        callback = BaseCallback()
        callback.on_rollout = lambda state, rollout: "rollout"  # type: ignore[method-assign, assignment, return-value, misc]
        with pytest.raises(ConfigError, match="on_rollout of the callback BaseCallback must return a rollout or None, not 'rollout'"):
            trainer.train(BATCH, callback)


def test_progress_in_a_terminal_is_a_live_view_that_is_closed_whatever_happens() -> None:
    def fails(state: TrainingState, metrics: Mapping[str, float]) -> None:
        if state.iteration == 2:
            raise RuntimeError("broken")

    out = io.StringIO()
    terminal = Terminal(file=out, force_terminal=True, width=100, _environ={"TERM": "xterm"})
    with trainer_for() as trainer, pytest.raises(RuntimeError, match="broken"):
        trainer.train(callback=fails, progress=ConsoleTracker(6 * BATCH, terminal=terminal))
    assert out.getvalue().startswith("\x1b[?25l")  # the cursor is hidden
    assert out.getvalue().endswith("\x1b[?25h")  # and shown again
    assert f"{BATCH}/{6 * BATCH} steps 17%" in out.getvalue()  # the last complete iteration
    assert not [thread for thread in threading.enumerate() if thread.name == "inchworm progress"]


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_the_activity_moves_within_an_iteration(backend: str) -> None:
    seen: list[Activity] = []

    class Watched(ActionReward):
        def step(self, action: Any) -> Any:
            seen.append(trainer.activity())
            return super().step(action)

    with PPOTrainer(SMALL, Watched, config(backend=backend), num_envs=1) as trainer:
        learner: Any = trainer.learner
        take_steps = learner.take_steps
        learner.take_steps = lambda *given: (seen.append(trainer.activity()), take_steps(*given))[1]
        assert trainer.activity() == Activity(0, 0, "")
        trainer.train(2 * STEPS, lambda state, metrics: seen.append(trainer.activity()))
    collecting = [Activity(step, 1, "collecting", step / STEPS) for step in range(STEPS)]
    learning = [Activity(STEPS, 1, "learning", epoch / 2) for epoch in (1, 2)]
    assert seen[: STEPS + 3] == [*collecting, *learning, Activity(STEPS, 1, "")]
    assert seen[STEPS + 3] == Activity(STEPS, 2, "collecting", 0.0)


def test_steps_that_were_collected_by_hand_count() -> None:
    with trainer_for() as trainer:
        trainer.collect_rollouts(2 * STEPS)
        assert trainer.train(3 * BATCH)["timesteps"] == [3 * BATCH]


def test_schedules_run_towards_the_target_of_the_call() -> None:
    with trainer_for(settings=config(ppo=PPO.replace(learning_rate_schedule="linear"))) as trainer:
        rates = trainer.train(4 * BATCH)["learning_rate"]
    assert rates == pytest.approx([1e-2, 0.75e-2, 0.5e-2, 0.25e-2])  # update k is taken at (k - 1) / 4 of the way


def test_callbacks_of_the_constructor_and_of_the_call_are_both_called() -> None:
    calls = []
    trainer = trainer_for(callbacks=[lambda state, metrics: calls.append("constructor")])
    finish(trainer, BATCH, lambda state, metrics: calls.append("call"))
    assert calls == ["constructor", "call"]


def test_train_calls_the_learn_of_a_subclass() -> None:
    class Twice(PPOTrainer):
        """Learns each rollout twice, by calling the ordinary motion."""

        seen: ClassVar[list[int]] = []

        def learn(self, rollout: Any, custom_loss_fns: Any = ()) -> UpdateStats:
            self.seen.append(rollout.num_steps)
            super().learn(rollout, custom_loss_fns)
            return super().learn(rollout, custom_loss_fns)

    with Twice(SMALL, functools.partial(Corridor, 5), config(ppo=PPO.replace(max_staleness=1))) as trainer:
        history = trainer.train(3 * BATCH)
        assert Twice.seen == [STEPS] * 3
        assert trainer.n_updates == 6
        assert history["staleness"] == [1.0] * 3, "the second time the weights are one update further"


def test_a_subclass_may_collect_several_at_once() -> None:
    class Wide(PPOTrainer):
        def collect_rollouts(self, n_steps: int | None = None) -> Rollout:
            first, second = super().collect_rollouts(n_steps), super().collect_rollouts(n_steps)
            return combine_rollouts([first, second])

    with Wide(SMALL, "CartPole-v1", config()) as trainer:
        assert trainer.train(4 * BATCH)["timesteps"] == [2 * BATCH, 4 * BATCH]
        assert trainer.total_timesteps == 4 * BATCH


class Enriched(PPOTrainer):
    """Adds a rollout that it collected before, as one from a file would be, to each that it collects."""

    def collect_rollouts(self, n_steps: int | None = None) -> Rollout:
        fresh = super().collect_rollouts(n_steps)
        return combine_rollouts([fresh, create_fake_rollout(self.env.observation_space, self.env.action_space, STEPS, 3 * LANES)])


class EnrichedLater(BaseCallback):
    """The same as a callback."""

    def on_rollout(self, state: TrainingState, rollout: Rollout) -> Rollout:
        env = make_vector_env("CartPole-v1", 1)
        return combine_rollouts([rollout, create_fake_rollout(env.observation_space, env.action_space, STEPS, 3 * LANES)])


@pytest.mark.parametrize("added", ["by a subclass", "by a callback", "by a subclass that also learns"])
def test_added_rows_are_not_env_steps_of_this_run(added: str, tmp_path: Path) -> None:
    class Learns(Enriched):
        def learn(self, rollout: Any, custom_loss_fns: Any = ()) -> UpdateStats:
            return super().learn(rollout, custom_loss_fns)

    kind = {"by a subclass": Enriched, "by a callback": PPOTrainer}.get(added, Learns)
    settings = config(iterations=4, ppo=PPO.replace(learning_rate_schedule="linear"))
    make = functools.partial(kind, SMALL, "CartPole-v1", settings, callbacks=[EnrichedLater()] if added == "by a callback" else [])
    with make(run_dir=tmp_path / "whole") as trainer:
        history = trainer.train()
        assert history["timesteps"] == [BATCH, 2 * BATCH, 3 * BATCH, 4 * BATCH]
        assert history["episodes"][-1] == trainer.state.episodes == trainer.collector.episodes
        assert history["learning_rate"] == pytest.approx([1e-2, 0.75e-2, 0.5e-2, 0.25e-2])
        whole = outcome(trainer)
    with make(run_dir=tmp_path / "parts") as trainer:
        trainer.train(callback=lambda state, metrics: state.iteration < 2)
    assert finish(make(run_dir=tmp_path / "parts"), resume=True) == whole


def test_a_loop_by_hand_counts_iterations_so_that_its_checkpoints_are_kept_apart(tmp_path: Path) -> None:
    settings = config(iterations=5, keep_checkpoints=2)
    with trainer_for(settings=settings, run_dir=tmp_path / "hand") as trainer:
        for number in (1, 2, 3):
            trainer.learn(trainer.collect_rollouts())
            assert (trainer.state.iteration, trainer.state.env_steps) == (number, number * BATCH)
            assert trainer.save_checkpoint().name == f"step-{number:012d}"
        assert len(list((tmp_path / "hand" / "checkpoints").iterdir())) == 2
        assert trainer.train()["timesteps"] == [4 * BATCH, 5 * BATCH]
        assert trainer.state.iteration == 5
        by_hand = bits(trainer.full_state())
    with trainer_for(settings=settings, run_dir=tmp_path / "hand") as trainer:
        trainer.load_checkpoint(tmp_path / "hand" / "checkpoints" / f"step-{4:012d}")
        trainer.train()
        assert bits(trainer.full_state()) == by_hand


# ---- evaluate
def test_evaluate_at_any_time_with_the_weights_of_now() -> None:
    with trainer_for(ActionReward, config(evaluation=EvalConfig(interval=0, final_episodes=0, num_envs=2, episodes=3))) as trainer:
        weights = trainer.policy.get_weights()
        for action, score in ((0, -1.0), (1, 1.0)):
            weights["actor.head.bias"] = np.where(np.arange(2) == action, 9.0, -9.0).astype(np.float32)
            trainer.policy.set_weights(weights)
            trainer.collector.set_weights(weights)
            stats = trainer.evaluate(episodes=7)
            assert (stats.mean_return, len(stats.returns)) == (score, 7)
        assert len(trainer.evaluate().returns) == 3  # the config's number
        weights["actor.head.bias"][:] = 0
        trainer.collector.set_weights(weights)
        assert set(trainer.evaluate(40, deterministic=False).returns) == {-1.0, 1.0}
        assert len(set(trainer.evaluate(40).returns)) == 1
        assert trainer.total_timesteps == 0


def test_what_cannot_be_copied_cannot_be_evaluated_on() -> None:
    for env in (Corridor(), make_vector_env(Corridor, 2)):
        with PPOTrainer(SMALL, env, PPO) as trainer, pytest.raises(ConfigError, match="pass PPOTrainer an id or a factory"):
            trainer.evaluate()


class Half(ActionReward):
    """The same spaces with half of the rewards."""

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        return observation, reward / 2, *rest


@pytest.mark.parametrize("kind", ["factory", "instance", "vector", "gymnasium.vector"])
def test_evaluations_use_the_environment_given_for_them(kind: str) -> None:
    """Also where the environment that trains is an instance, which cannot be copied; the caller's own is not closed."""
    given: Any = Half
    if kind != "factory":
        given = {"instance": Half, "vector": lambda: make_vector_env(Half, 2), "gymnasium.vector": lambda: gymnasium_vector(Half)}[kind]()
    settings = config(evaluation=EvalConfig(interval=1, episodes=3, final_episodes=4, num_envs=2), total_timesteps=2 * STEPS)
    with PPOTrainer(SMALL, ActionReward(), settings, eval_env=given, num_envs=1) as trainer:
        for _ in range(2):  # train closes the evaluator's environments at its end
            assert set(np.abs(trainer.evaluate(episodes=3).returns)) == {0.5}
            trainer.train()
        assert [abs(row["mean_return"]) <= 0.5 for row in trainer.state.evaluations] == [True] * 3
        assert {abs(episode.episode_return) for episode in trainer.collector.recent} == {1.0}


def gymnasium_vector(make: Any) -> gym.vector.VectorEnv:
    return gym.vector.SyncVectorEnv([make, make], autoreset_mode=gym.vector.AutoresetMode.DISABLED)


def test_an_id_for_evaluation_gets_the_settings_of_training() -> None:
    settings = config().replace(env=EnvConfig(id="CartPole-v1", num_envs=2, max_episode_steps=5))
    with PPOTrainer(SMALL, settings.env, settings, eval_env="CartPole-v0") as trainer:
        assert trainer.evaluate(episodes=2).lengths.max() <= 5
    with PPOTrainer(SMALL, settings.env, settings, eval_env=EnvConfig(id="CartPole-v0", max_episode_steps=3)) as trainer:
        assert trainer.evaluate(episodes=2).lengths.tolist() == [3, 3]


def test_a_baseline_that_cannot_play_is_refused_before_training(tmp_path: Path) -> None:
    with PPOTrainer(SMALL, "Pendulum-v1", PPOConfig(rollout_steps=8), num_envs=1) as other:
        path = other.save_policy(tmp_path / "pendulum.safetensors")
    with pytest.raises(SpaceError, match=r"the baseline .*pendulum.* was made for the observation space"):
        PPOTrainer(SMALL, "CartPole-v1", config().replace(evaluation=EvalConfig(baseline=str(path))))
    with pytest.raises(ConfigError, match="CartPole-v1 has no heuristic to play against"):
        PPOTrainer(SMALL, "CartPole-v1", config().replace(evaluation=EvalConfig(baseline="heuristic")))


def test_a_wrong_environment_for_evaluation_is_refused_before_training() -> None:
    with pytest.raises(SpaceError, match=r"eval_env does not fit: the policy was made for the observation space .*, but .* has"):
        trainer_for(eval_env="Acrobot-v1")
    env = ActionReward()
    with pytest.raises(ConfigError, match="eval_env is the environment that trains"):
        PPOTrainer(SMALL, env, PPO, eval_env=env)


def test_workers_by_keyword() -> None:
    for env in ("CartPole-v1", Corridor):
        with PPOTrainer(SMALL, env, PPO, num_envs=4, num_workers=2) as trainer:
            assert (trainer.config.env.num_workers, trainer.config.env.num_envs) == (2, 4)
            assert isinstance(trainer.env, WorkerVectorEnv)
            several = trainer.collect_rollouts()
        with PPOTrainer(SMALL, env, PPO, num_envs=4, num_workers=0) as trainer:
            assert bits(trainer.collect_rollouts().to_dict()) == bits(several.to_dict())
    with pytest.raises(ConfigError, match=r"env.num_workers=9 is more than env.num_envs=4"):
        PPOTrainer(SMALL, "CartPole-v1", PPO, num_envs=4, num_workers=9)
    with pytest.raises(ConfigError, match=r"env.num_workers=1, but an environment instance stays in this process"):
        PPOTrainer(SMALL, Corridor(), PPO, num_workers=1)
    with pytest.raises(ConfigError, match="num_workers=1, but the InProcessVectorEnv steps its own copies"):
        PPOTrainer(SMALL, make_vector_env(Corridor, 2), PPO, num_workers=1)


def test_evaluating_does_not_change_what_is_learned() -> None:
    watched = config(evaluation=EvalConfig(interval=2, episodes=3, final_episodes=4, num_envs=2))
    with trainer_for(settings=watched) as one, trainer_for() as other:
        one.train()
        other.train()
        assert bits(one.policy.get_weights()) == bits(other.policy.get_weights())


def test_the_configs_threads_are_used_and_then_restored() -> None:
    """Threads change last bits, so they are the config's wherever the run is started from."""
    before, seen = torch.get_num_threads(), list[int]()

    def look(*_: Any) -> Any:
        seen.append(torch.get_num_threads())
        return {}

    def loss(values: Any) -> Any:
        look()
        return 0.0 * values.mean()

    torch.set_num_threads(3)
    for threads in (1, 0):  # 0 leaves them as they are
        functional_training_loop(small_config(max_iterations=1, threads=threads), "mlp", step_fn=look)
    with trainer_for(settings=config(threads=2, max_iterations=1)) as trainer:
        trainer.train(step_fn=look)
        trainer.learn(trainer.collect_rollouts(), [loss])
    assert (seen[:3], set(seen[3:])) == ([1, 3, 2], {2})
    assert torch.get_num_threads() == 3
    torch.set_num_threads(before)


# ---- checkpoints
NORMALISED = SMALL.replace(normalize_observations=True, normalize_values=True, memory_size=6)
LSTM, GRU = NORMALISED.replace(kind="lstm", memory_layers=2), NORMALISED.replace(kind="gru")
SEQUENCES = PPO.replace(sequence_length=3)  # 8 = 3 + 3 + 2
SCHEDULED = PPO.replace(learning_rate_schedule="linear", clip_schedule="cosine", ent_schedule="linear")
EXACT: dict[str, tuple[PolicyConfig, PPOConfig, Any, int]] = {  # with the number of workers of the resumed run
    "plain": (SMALL, PPO, "CartPole-v1", 0),
    "normalised, scheduled": (NORMALISED, SCHEDULED, "CartPole-v1", 0),
    "lstm": (LSTM, SEQUENCES, "CartPole-v1", 2),
    "gru": (GRU, SEQUENCES, "CartPole-v1", 0),
    "scaled rewards": (NORMALISED, PPO.replace(scale_rewards=True), "CartPole-v1", 0),
    "team, scaled rewards": (SMALL, PPO.replace(scale_rewards=True), functools.partial(comings, plan=DEATHS, masks="info"), 0),
    "team": (NORMALISED, PPO, functools.partial(comings, plan=DEATHS, masks="info"), 0),
    "team, lstm": (LSTM, SEQUENCES, functools.partial(comings, plan=JOINS, masks="info"), 0),
    "central critic": (GRU.replace(central_critic=True), SEQUENCES, functools.partial(comings, plan=JOINS, masks="key"), 0),
}


@pytest.mark.parametrize(("kind", "stop"), [("plain", 1), ("normalised, scheduled", 1), *((kind, 3) for kind in EXACT)])
def test_stopped_and_resumed_is_the_undisturbed_run_bit_for_bit(kind: str, stop: int, tmp_path: Path) -> None:
    policy, ppo, env, workers = EXACT[kind]
    scores = EvalConfig(interval=2, episodes=2, final_episodes=0, num_envs=2)
    whole = config(iterations=20, policy=policy, ppo=ppo, evaluation=scores, max_iterations=6)
    with PPOTrainer(policy, env, whole, run_dir=tmp_path / "whole") as trainer:
        trainer.train()
        undisturbed = trainer.full_state()
    whole = whole.replace(env=whole.env.replace(num_workers=workers))
    with PPOTrainer(policy, env, whole.replace(run=whole.run.replace(max_iterations=stop)), run_dir=tmp_path / "parts") as trainer:
        trainer.train()
        steps = trainer.total_timesteps
    with PPOTrainer(policy, env, whole, run_dir=tmp_path / "parts") as trainer:
        trainer.load_checkpoint()
        assert (trainer.state.iteration, trainer.total_timesteps, trainer.state.env_steps) == (stop, steps, steps)
        assert trainer.n_updates == trainer.policy.policy_version == stop
        trainer.train()
        resumed = trainer.full_state()
    for part in ("weights", "learner", "state", "config", *(() if workers else ("collector",))):  # workers save their state apart
        assert bits(undisturbed[part]) == bits(resumed[part]), part
    assert bits(undisturbed["collector"]["policy_state"]) == bits(resumed["collector"]["policy_state"])
    for name in (METRICS, "policy.safetensors", "best_policy.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes(), name
    assert len(read_rows(tmp_path / "parts" / METRICS)) == len(read_rows(tmp_path / "parts" / TIMING)) == 6


LONG = PPO.replace(rollout_steps=100)
SQUAD = functools.partial(comings, plan=DEATHS, masks="info")
WARM_UPS: dict[str, tuple[Any, Any, str]] = {
    "numpy": (NORMALISED, "CartPole-v1", "numpy"),
    "torch": (NORMALISED, "CartPole-v1", "torch"),
    "lstm": (LSTM, "CartPole-v1", "torch"),
    "several": (PolicyMap(policies={"a": NORMALISED, "b": NORMALISED.replace(kind="gru")}, lane_map=["a", "b", "a"]), SQUAD, "torch"),
}


@pytest.mark.parametrize("case", WARM_UPS)
def test_normalisers_cost_a_twentieth_of_a_rollout_and_the_next_one_is_learned_from(case: str) -> None:
    policy, env, backend = WARM_UPS[case]
    rollouts: list[Any] = []
    settings = config(ppo=LONG, policy=NORMALISED, max_iterations=3, total_timesteps=10**9, backend=backend)
    with PPOTrainer(policy, env, settings, callbacks=[Keep(rollouts)]) as trainer:
        history = trainer.train()
        assert trainer.n_updates == 3
        assert trainer.total_timesteps == sum(rollout.num_valid for rollout in rollouts)
    assert [rollout.num_steps for rollout in rollouts] == [5, 100, 100]
    assert history["warm_up"][0] == 1
    assert np.isnan(history["warm_up"][1:]).all()
    assert max(history["ratio_error"][1:]) < 5e-5
    assert history["grad_norm"][0] == 0 < min(history["grad_norm"][1:])


class Keep(BaseCallback):
    """Keeps the rollouts of a run."""

    def __init__(self, rollouts: list[Any]) -> None:
        self.rollouts = rollouts

    def on_rollout(self, state: TrainingState, rollout: Any) -> None:
        self.rollouts.append(rollout)


def test_a_policy_with_statistics_needs_no_warm_up(tmp_path: Path) -> None:
    settings = config(ppo=LONG, policy=NORMALISED, max_iterations=1, total_timesteps=10**9)
    with PPOTrainer("mlp", "CartPole-v1", settings) as trainer:
        trainer.learn(trainer.collect_rollouts(LONG.warm_up_steps))
        policy = trainer.policy
    with PPOTrainer(policy, "CartPole-v1", settings) as trainer:
        assert "warm_up" not in trainer.train()
        assert trainer.total_timesteps == 100 * LANES


@pytest.mark.parametrize(("rollout_steps", "steps"), [(1, 1), (4, 4), (80, 4), (100, 5), (119, 5), (2048, 102)])
def test_a_warm_up_has_a_twentieth_of_the_steps_but_a_few(rollout_steps: int, steps: int) -> None:
    assert PPOConfig(rollout_steps=rollout_steps).warm_up_steps == steps


def die(iteration: int, state: TrainingState, metrics: Mapping[str, float]) -> None:
    """A callback that fails before the row and the checkpoint of an iteration."""
    if state.iteration == iteration:
        raise SystemError("power cut")


@pytest.fixture
def power_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is saved after an error, as if the process had been killed."""
    monkeypatch.setattr(PPOTrainer, "_save_after", lambda *_: None)


@pytest.mark.usefixtures("power_cuts")
def test_a_killed_run_writes_its_lost_rows_again_and_once(tmp_path: Path) -> None:
    """Checkpoints after 2, 4, 6; killed after 3, whose row is on disk already."""
    whole = finish(trainer_for(run_dir=tmp_path / "whole"))
    with trainer_for(run_dir=tmp_path / "killed") as trainer, pytest.raises(SystemError):
        trainer.train(callback=functools.partial(die, 4))
    assert [row["iteration"] for row in read_rows(tmp_path / "killed" / METRICS)] == [1, 2, 3]
    assert finish(trainer_for(run_dir=tmp_path / "killed"), resume=True) == whole


@pytest.mark.usefixtures("power_cuts")
def test_a_run_killed_before_its_first_checkpoint_begins_again_with_a_clean_record(tmp_path: Path) -> None:
    with trainer_for(run_dir=tmp_path / "killed") as trainer, pytest.raises(SystemError):
        trainer.train(callback=functools.partial(die, 2))
    assert len(read_rows(tmp_path / "killed" / METRICS)) == 1
    with pytest.warns(UserWarning, match=r"no checkpoint \(it ended before the first one\); starting over"):
        again = finish(trainer_for(run_dir=tmp_path / "killed"))
    assert again == finish(trainer_for(run_dir=tmp_path / "whole"))


def test_a_run_without_its_checkpoints_is_not_begun_again_even_if_it_has_no_policy_file(tmp_path: Path) -> None:
    finish(trainer_for(run_dir=tmp_path), 4 * BATCH)
    shutil.rmtree(tmp_path / CHECKPOINTS)
    (tmp_path / POLICY).unlink()  # networks of users have none
    with trainer_for(run_dir=tmp_path) as trainer, pytest.raises(ConfigError, match=r"rows up to iteration 4 .*its checkpoints are gone"):
        trainer.train(8 * BATCH)


def test_a_directory_that_holds_a_run_is_not_overwritten_by_another(tmp_path: Path) -> None:
    finish(trainer_for(run_dir=tmp_path), 2 * BATCH)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with trainer_for(run_dir=tmp_path) as trainer:
        with pytest.raises(ConfigError, match=r"holds a run .*step-000000000002.*load_checkpoint"):
            trainer.train(4 * BATCH)
        with pytest.raises(ConfigError, match="holds a run"):
            trainer.save_checkpoint()
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
        trainer.load_checkpoint()
        trainer.train(4 * BATCH)
    assert [row["iteration"] for row in read_rows(tmp_path / METRICS)] == [1, 2, 3, 4]


def test_a_checkpoint_by_hand_and_back(tmp_path: Path) -> None:
    with trainer_for() as trainer:
        with pytest.raises(ConfigError, match=r"run_dir=…\) or save_checkpoint\(directory\)"):
            trainer.save_checkpoint()
        with pytest.raises(ConfigError, match=r"run_dir=…\) or load_checkpoint\(path\)"):
            trainer.load_checkpoint()
        trainer.train(2 * BATCH)
        path = trainer.save_checkpoint(tmp_path / "mine")
        assert path.parent == tmp_path / "mine"
        expect = trainer.train(4 * BATCH)
        later = trainer.policy.get_weights()
        for target in (path, tmp_path / "mine"):  # the checkpoint, or the directory of them
            trainer.load_checkpoint(target)
            assert trainer.total_timesteps == 2 * BATCH
            again = trainer.train(4 * BATCH)
            assert bits(trainer.policy.get_weights()) == bits(later)
            assert again["loss"] == expect["loss"]
    assert not (tmp_path / "mine" / "policy.safetensors").exists()


def test_saving_before_training_does_not_get_in_its_way(tmp_path: Path) -> None:
    with trainer_for(run_dir=tmp_path) as trainer:
        trainer.save_checkpoint()
        trainer.train(BATCH)
        assert trainer.state.iteration == 1


# ---- what a run leaves behind
def test_a_run_directory(tmp_path: Path) -> None:
    with trainer_for(settings=config(log_interval=2), run_dir=tmp_path / "run") as trainer:
        trainer.train()
        assert bits(load_policy(tmp_path / "run" / "policy.safetensors").get_weights()) == bits(trainer.policy.get_weights())
    rows = read_rows(tmp_path / "run" / METRICS)
    assert [(row["iteration"], row["env_steps"]) for row in rows] == [(2, 2 * BATCH), (4, 4 * BATCH), (6, 6 * BATCH)]
    assert {"loss", "entropy", "mean_return"} <= rows[-1].keys()
    assert not [name for row in rows for name in row if "timing" in name or "seconds" in name]
    timing = read_rows(tmp_path / "run" / TIMING)
    assert {"seconds", "collect_seconds", "learn_seconds", "steps_per_second"} <= timing[0].keys()
    assert TrainingConfig.from_yaml(tmp_path / "run" / "config.yaml") == trainer.config


@pytest.mark.parametrize("end", ["target", "max_iterations", "callback", "step function"])
def test_the_last_iteration_has_its_row_whatever_the_interval(end: str, tmp_path: Path) -> None:
    def step(state: TrainingState, components: TrainingComponents) -> dict[str, float]:
        state.should_stop = end == "step function" and state.iteration == 4
        return default_training_step(state, components)

    run: dict[str, Any] = {"max_iterations": 5} if end == "max_iterations" else {"iterations": 5 if end == "target" else 9}
    scores = EvalConfig(interval=0, final_episodes=2, num_envs=2)
    with trainer_for(settings=config(log_interval=3, evaluation=scores, **run), run_dir=tmp_path) as trainer:
        history = trainer.train(callback=lambda state, metrics: end != "callback" or state.iteration < 5, step_fn=step)
    rows = read_rows(tmp_path / METRICS)
    assert [(row["iteration"], row.get("loss"), "evaluation/mean_return" in row) for row in rows] == [
        (3, history["loss"][2], False),
        (5, history["loss"][4], False),
        (5, None, True),
    ]
    with trainer_for(settings=config(log_interval=3, evaluation=scores, **run), run_dir=tmp_path) as trainer:
        trainer.load_checkpoint()
    assert read_rows(tmp_path / METRICS) == rows


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemError])
def test_the_last_iteration_before_an_error_has_its_row_until_the_run_is_resumed(error: type[BaseException], tmp_path: Path) -> None:
    settings = config(iterations=9, log_interval=3)

    def fail(state: TrainingState, components: TrainingComponents) -> dict[str, float]:
        if state.iteration == 5 and error is SystemError:
            raise error
        if state.iteration == 4 and error is KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
        return default_training_step(state, components)

    whole = finish(trainer_for(settings=settings, run_dir=tmp_path / "whole"))
    with trainer_for(settings=settings, run_dir=tmp_path / "broken") as trainer, pytest.raises(error):
        trainer.train(step_fn=fail)
    rows = read_rows(tmp_path / "broken" / METRICS)
    assert [row["iteration"] for row in rows] == [3, 5]
    assert rows[-1]["loss"] == trainer.state.metrics["loss"]
    assert finish(trainer_for(settings=settings, run_dir=tmp_path / "broken"), resume=True) == whole  # rows 3, 6 and 9


def test_trackers_get_the_config_once_and_a_row_an_iteration() -> None:
    recorder = Recorder()
    with trainer_for(trackers=[recorder]) as trainer:
        trainer.train(3 * BATCH)
        assert recorder.params == [trainer.config.to_dict()]
        json.dumps(recorder.params)  # plain data
        assert [(step, row["iteration"]) for step, row in recorder.rows] == [(BATCH, 1.0), (2 * BATCH, 2.0), (3 * BATCH, 3.0)]
        assert [row["loss"] for _, row in recorder.rows] == trainer.state.history["loss"]
    assert recorder.closed == 1


def test_close_twice_and_no_training_after() -> None:
    trainer = trainer_for()
    trainer.train(BATCH)
    trainer.evaluate(1)
    trainer.close()
    trainer.close()
    with pytest.raises(EnvError, match="closed"):
        trainer.train(2 * BATCH)


def test_a_custom_network_trains_and_is_saved(tmp_path: Path) -> None:
    class Own(Network):
        def __init__(self) -> None:
            super().__init__()
            self.actor, self.critic = torch.nn.Linear(4, 2), torch.nn.Linear(4, 1)

        def action_outputs(self, observations: Any) -> Any:
            return self.actor(observations)

        def values(self, observations: Any) -> Any:
            return self.critic(observations)[..., 0]

    env = make_vector_env("CartPole-v1", 2)
    policy = TorchPolicy(PolicySpec(env.observation_space, env.action_space, PolicyConfig()), network=Own())
    with PPOTrainer(policy, env, PPO, run_dir=tmp_path) as trainer:
        assert trainer.collector.policy is policy
        assert repr(trainer).startswith("PPOTrainer(Own, ")
        trainer.train(2 * BATCH)
        assert trainer.n_updates == 2
        trainer.save_policy(tmp_path / "saved.safetensors")
        expect = policy.get_weights()
        trainer.load_checkpoint()
        assert bits(policy.get_weights()) == bits(expect)
    for name in ("policy.safetensors", "saved.safetensors"):
        assert bits(load_policy(tmp_path / name, network=lambda _: Own()).get_weights()) == bits(expect)
    with pytest.raises(ConfigError, match=r"network must be an .*Network, or make one from the spec; it is 'module:Own'"):
        load_policy(tmp_path / "saved.safetensors", network="module:Own")  # type: ignore[call-overload]


def test_a_run_does_not_continue_with_another_config(tmp_path: Path) -> None:
    finish(trainer_for(run_dir=tmp_path), BATCH)
    with trainer_for(settings=config(ppo=PPO.replace(gamma=0.5)), run_dir=tmp_path) as trainer:
        with pytest.raises(ConfigError, match=r"another config: ppo.gamma: 0.99 → 0.5"):
            trainer.load_checkpoint()
        trainer.load_checkpoint(tmp_path / "checkpoints")  # by name it is the start of something else


class Resets(gym.Env[Any, Any]):
    """Counts its resets; Box actions need no look at infos, discrete ones would."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, actions: spaces.Space[Any], info: dict[str, Any] | None = None) -> None:
        self.action_space, self.info, self.resets = actions, info or {}, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.resets += 1
        return np.zeros(2, np.float32), dict(self.info)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(2, np.float32), 0.0, False, False, dict(self.info)


@pytest.mark.parametrize("actions", [spaces.Discrete(3), spaces.Box(-1.0, 1.0, (1,), np.float32)])
@pytest.mark.parametrize("writes", [False, True])
def test_making_a_trainer_never_resets_the_environment_that_it_is_given(actions: Any, writes: bool, tmp_path: Path) -> None:
    env = Resets(actions)
    with PPOTrainer("mlp", env, PPOConfig(rollout_steps=8), run_dir=tmp_path if writes else None) as trainer:
        assert env.resets == 0
        trainer.collect_rollouts()
        assert env.resets == 1


def test_nor_a_team_that_it_is_given() -> None:
    team, seeds = comings(), list[Any]()
    reset = team.reset
    team.reset = lambda seed=None, options=None: (seeds.append(seed), reset(seed, options))[1]
    with PPOTrainer("mlp", team, PPOConfig(rollout_steps=8)) as trainer:
        assert seeds == []
        trainer.collect_rollouts(1)
        assert len(seeds) == 1


def test_a_registered_environment_is_looked_at_in_another_copy() -> None:
    env = gym.make("Taxi-v4", render_mode="rgb_array")  # its infos hold masks
    resets: list[int] = []
    reset = env.unwrapped.reset
    env.unwrapped.reset = lambda **options: (resets.append(1), reset(**options))[1]  # type: ignore[method-assign]
    with PPOTrainer("mlp", env, PPOConfig(rollout_steps=8)) as trainer:
        assert resets == []
        assert set(trainer.collect_rollouts().observations) == {"observation", "action_mask"}


def test_masks_in_the_infos_of_another_instance_are_refused_with_what_to_pass() -> None:
    env = Resets(spaces.Discrete(3), {"action_mask": np.ones(3, np.int8)})
    with (
        PPOTrainer("mlp", env, PPOConfig(rollout_steps=8)) as trainer,
        pytest.raises(EnvError, match=r"info holds 'action_mask'.*pass a factory \(its class\) instead of the instance, or .*action_masks"),
    ):
        trainer.collect_rollouts()
    with PPOTrainer("mlp", comings(masks="info"), PPOConfig(rollout_steps=8)) as trainer, pytest.raises(EnvError, match="pass a factory"):
        trainer.collect_rollouts()
    with PPOTrainer("mlp", lambda: Resets(spaces.Discrete(3), env.info), PPOConfig(rollout_steps=8), num_envs=1) as trainer:
        assert set(trainer.collect_rollouts().observations) == {"observation", "action_mask"}
