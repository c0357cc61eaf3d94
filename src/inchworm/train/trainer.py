"""The front door: `PPOTrainer`, a thin shell that makes the parts, keeps them together, and calls the loop."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import gymnasium as gym

from inchworm.backends.registry import acting_policy, learning_threads, make_learner, policy_files
from inchworm.collect.collector import RolloutCollector
from inchworm.config.sections import EnvConfig, PolicyConfig, PPOConfig, TrainingConfig
from inchworm.core.errors import ConfigError
from inchworm.core.protocols import Actor, Callback, Learner, Tracker, VectorEnv
from inchworm.core.types import UpdateStats
from inchworm.evaluate.stats import EvalStats
from inchworm.policy.composite import PolicyMap
from inchworm.policy.file import save_policy
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.rollout import Rollout
from inchworm.run.directory import Run
from inchworm.run.saver import Keeper, RunFiles, inexactness
from inchworm.selfplay.callback import bind_pool, make_evaluator, opponent_callbacks
from inchworm.tracking.jsonl import JsonlTracker
from inchworm.train.callbacks import CheckpointCallback, EvaluateCallback, SnapshotCallback, TrackCallback, as_callback, interruptible
from inchworm.train.loop import StepFunction, TrainingComponents, TrainingState, default_training_step, run_training_loop
from inchworm.train.profile import Profile
from inchworm.train.resolve import describe_size, evaluation_source, resolve_choices, resolve_config, resolve_env, resolve_policy

NO_COPY = "an environment that was handed over cannot be copied for evaluation; give PPOTrainer an id or a factory"


def ordered_callbacks(
    trainer: PPOTrainer,
    config: TrainingConfig,
    own: Sequence[Callback],
    saving: tuple[CheckpointCallback, SnapshotCallback] | None,
) -> list[Callback]:
    """In the order in which an iteration needs them: score, watch the opponents, the user's `own`, write down, save."""
    chosen: list[Callback] = []
    scored = config.evaluation.interval or config.evaluation.final_episodes
    if scored and trainer.evaluator is None:
        warnings.warn(f"no scores are taken during training: {NO_COPY}", stacklevel=4)
    elif scored and trainer.evaluator is not None:
        safe = saving[0].secure if saving else None
        best = trainer.files.write_best_policy
        chosen.append(EvaluateCallback(trainer.evaluator, lambda: trainer.collector.policy, config.evaluation, best, safe))
    chosen += [*trainer.opponents, *own]
    if trainer.trackers:
        chosen.append(TrackCallback(trainer.trackers, config.run.log_interval))
    return [*chosen, *(saving or ())]


class OwnCollection:
    """A trainer's own `collect_rollouts` as a collector."""

    def __init__(self, trainer: PPOTrainer) -> None:
        self._trainer = trainer
        self.set_weights = trainer.collector.set_weights
        self.state_dict = trainer.collector.state_dict
        self.load_state_dict = trainer.collector.load_state_dict
        self.close = trainer.collector.close

    def collect(self, num_steps: int) -> Rollout:
        """What the subclass collects."""
        return self._trainer.collect_rollouts(num_steps)


class OwnLearning:
    """A trainer's own `learn` as a learner."""

    def __init__(self, trainer: PPOTrainer) -> None:
        self._trainer = trainer
        self.updates, self.total_timesteps = trainer.learner.updates, trainer.learner.total_timesteps
        self.state_dict = trainer.learner.state_dict
        self.load_state_dict = trainer.learner.load_state_dict

    def update(self, rollout: Rollout | Mapping[str, Any], custom_loss_fns: Sequence[Callable[..., Any]] = ()) -> UpdateStats:
        """What the subclass learns."""
        return self._trainer.learn(rollout, custom_loss_fns)


class PPOTrainer:
    """Trains a policy in an environment: collect, learn, repeat.

    `policy` is "mlp", "cnn", "lstm", "gru", a `PolicyConfig`, a `PolicySpec`, a policy, or a `PolicyMap` of several; `env` an id, an
    `EnvConfig`, a Gymnasium environment, a factory of them or a `VectorEnv`; `config` a `PPOConfig` or a whole `TrainingConfig`. Keywords
    override the config. With a `run_dir` the run is written there: config, metrics, checkpoints, policies. Scores are taken during
    `train` only if a `TrainingConfig` asks for it; `evaluate` takes one at any time.
    """

    def __init__(
        self,
        policy: str | PolicyConfig | PolicySpec | PolicyMap | Actor,
        env: str | EnvConfig | gym.Env[Any, Any] | Callable[[], gym.Env[Any, Any]] | VectorEnv,
        config: PPOConfig | TrainingConfig | None = None,
        *,
        num_envs: int | None = None,
        seed: int | None = None,
        backend: str | None = None,
        device: str | None = None,
        callbacks: Sequence[Callback | Callable[..., Any]] = (),
        trackers: Sequence[Tracker] = (),
        run_dir: str | Path | Run | None = None,
    ) -> None:
        asked = resolve_config(policy, env, config, num_envs=num_envs, seed=seed, backend=backend, device=device)
        self._asked = asked
        self.config, self.choices = resolve_choices(policy, env, asked)
        run = run_dir if run_dir is None or isinstance(run_dir, Run) else Path(run_dir)
        self.run_dir = run.path if isinstance(run, Run) else run
        self.env = resolve_env(env, self.config, rehearse=run is not None)
        try:
            self.size = describe_size(self.env, self.config)
            self.policy = resolve_policy(policy, self.config, self.env)
        except BaseException:
            if self.env is not env:  # the caller's own stays open
                self.env.close()
            raise
        length = self.config.ppo.sequence_length_for(self.config.ppo.rollout_steps, memory=True)  # read only if there is memory
        self.collector = RolloutCollector(self.env, acting_policy(self.policy), seed=self.config.run.seed, sequence_length=length)
        bind_pool(self.env, self.collector.policy)
        self.state = TrainingState()
        self.callbacks = [as_callback(callback) for callback in callbacks]
        self.trackers = [*([JsonlTracker(self.run_dir)] if self.run_dir else []), *trackers]
        self.files = RunFiles(run, self.policy, self.trackers, asked)
        self._keeper = Keeper(self, self.files, trackers)
        if run is not None:
            self.files.warn_of_inexact(self.inexact)
        source = evaluation_source(env, self.config)
        self.evaluator = make_evaluator(source, self.config) if source is not None else None
        self.opponents = opponent_callbacks(self.env, lambda: self.collector.policy, self.config, source, self.run_dir)
        for tracker in self.trackers:
            tracker.log_params(self.config.to_dict())

    @cached_property
    def learner(self) -> Learner:
        """The optimiser of the policy; made when it is first needed, so that collecting needs no learning framework."""
        return make_learner(self.policy, self.config, dump_directory=self.run_dir)

    @property
    def optimizer(self) -> Any:
        """The optimiser inside the learner."""
        learner: Any = self.learner
        return learner.optimizer

    @property
    def device(self) -> str:
        """Where the policy learns."""
        learner: Any = self.learner
        return str(learner.device)

    @property
    def total_timesteps(self) -> int:
        """Env steps collected so far."""
        return self.collector.env_steps

    @property
    def n_updates(self) -> int:
        """Updates learned so far."""
        return self.learner.updates

    @property
    def episode_rewards(self) -> list[float]:
        """Returns of the last 100 finished episodes."""
        return [episode.episode_return for episode in self.collector.recent]

    @property
    def inexact(self) -> list[str]:
        """What of the environments a checkpoint cannot bring back, a sentence each."""
        return inexactness(self.env)

    @property
    def failures(self) -> list[str]:
        """What went wrong beside the training itself."""
        return self.state.failures

    def collect_rollouts(self, n_steps: int | None = None) -> Rollout:
        """The next `n_steps` steps of every lane, with the policy as it is. Never learns."""
        return self.collector.collect(n_steps if n_steps is not None else self.config.ppo.rollout_steps)

    def learn(self, rollout: Rollout | Mapping[str, Any], custom_loss_fns: Sequence[Callable[..., Any]] = ()) -> UpdateStats:
        """Draw the policy up to a rollout, whoever collected it. Never touches the environment or the rollout."""
        with learning_threads(self.config.run.threads, self.config.run.backend):
            stats = self.learner.update(rollout, custom_loss_fns)
        self.collector.set_weights(self.policy.get_weights())
        return stats

    def train(
        self,
        total_timesteps: int | None = None,
        callback: Callback | Callable[..., Any] | None = None,
        *,
        custom_loss_fns: Sequence[Callable[..., Any]] = (),
        step_fn: StepFunction | None = None,
        profile: Profile | None = None,
    ) -> dict[str, list[float]]:
        """Collect and learn until `total_timesteps` env steps have been taken since the run's beginning.

        Returns the history of this call: lists under timesteps, mean_reward, loss and every other metric, one entry an iteration.
        """
        config = self._config_to(total_timesteps)
        self.files.begin(self.state.iteration)
        self.learner.total_timesteps = config.run.total_timesteps
        self.state.should_stop = self.state.stopped  # a run that was killed after it had been stopped only has to end
        self.state.interrupted = self.state.ended = False
        self.state.follow(self.collector)
        self.state.history = {"timesteps": [], "mean_reward": [], "loss": [], "policy_loss": [], "value_loss": [], "entropy": []}
        own = [*self.callbacks, *([as_callback(callback)] if callback is not None else [])]
        self._keeper.begin(own)
        components = TrainingComponents(
            config,
            self.policy,
            OwnCollection(self) if self._overrides("collect_rollouts") else self.collector,
            OwnLearning(self) if self._overrides("learn") else self.learner,
            tuple(custom_loss_fns),
            tuple(ordered_callbacks(self, config, own, self._keeper.callbacks(config.run))),
        )
        try:
            with learning_threads(config.run.threads, config.run.backend), interruptible(self.state):
                if profile is None:
                    run_training_loop(self.state, components, step_fn or default_training_step)
                else:
                    profile.run(self.state, components, step_fn or default_training_step)
        except KeyboardInterrupt:
            self._keeper.save_snapshot()
            raise
        finally:
            self._keeper.wait()
            self._close_evaluator()
        if self.state.interrupted:
            raise KeyboardInterrupt
        self.state.ended = True
        return self.state.history

    def evaluate(self, episodes: int | None = None, *, deterministic: bool | None = None) -> EvalStats:
        """Score the policy on environments of its own."""
        if self.evaluator is None:
            raise ConfigError(NO_COPY)
        with learning_threads(self.config.run.threads, self.config.run.backend):
            return self.evaluator.evaluate(self.collector.policy, episodes, deterministic)

    def save_checkpoint(self, directory: str | Path | None = None) -> Path:
        """Write all state as one checkpoint, into the run's directory or the one given; and the policy file beside it."""
        return self._keeper.save(directory)

    def full_state(self) -> dict[str, Any]:
        """All that a run is at this moment, as plain data and arrays."""
        return self._keeper.full_state()

    def load_checkpoint(self, path: str | Path | None = None) -> None:
        """Go on from a checkpoint: the newest of the run, or the one (or the directory of them) given."""
        self._keeper.load(path)

    def keep_choices(self, compiled: str) -> None:
        """Go on as the run began: `auto` is chosen once."""
        if self._asked.ppo.compile == "auto" and compiled != self.config.ppo.compile:
            self.config = self.config.replace(ppo=self.config.ppo.replace(compile=compiled))
            self.__dict__.pop("learner", None)  # made anew when it is needed

    def save_policy(self, path: str | Path) -> Path:
        """Write the policy file: spec, weights and normalisers, for acting anywhere."""
        files = policy_files(self.policy, Path(path).name, self.policy.get_weights())
        if len(files) != 1:  # each of several has one of its own, which inchworm.save_policy writes
            raise ConfigError("only built-in networks have a policy file; save a network of your own with its own state_dict")
        ((spec, weights),) = files.values()
        return save_policy(path, spec, weights)

    def close(self) -> None:
        """Close environments and trackers; safe to call twice."""
        with contextlib.ExitStack() as stack:  # from the last to the first, all of them, also if one fails
            stack.callback(self.files.close)  # the lock last: until then nobody else may write
            for tracker in reversed(self.trackers):
                stack.callback(tracker.close)
            stack.callback(self.collector.close)
            stack.callback(self._close_evaluator)
            stack.callback(self._keeper.wait)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _overrides(self, method: str) -> bool:
        """Whether a subclass has written its own `method`, which the loop must then call."""
        return getattr(type(self), method) is not getattr(PPOTrainer, method)

    def _config_to(self, total_timesteps: int | None) -> TrainingConfig:
        if total_timesteps is None:
            return self.config
        return self.config.replace(run=self.config.run.replace(total_timesteps=total_timesteps))

    def _close_evaluator(self) -> None:
        if self.evaluator is not None:
            self.evaluator.close()
