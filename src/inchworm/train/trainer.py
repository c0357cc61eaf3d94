"""`PPOTrainer`, and the loop as a function: the one place where the parts of a training are put together."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import gymnasium as gym

from inchworm.backends.composite import CompositeLearner
from inchworm.backends.learner import BaseLearner
from inchworm.backends.registry import (
    acting_policy,
    fuse,
    is_builtin,
    join_ranks,
    learning_threads,
    make_learner,
    make_native_collector,
)
from inchworm.collect.collector import RolloutCollector
from inchworm.collect.group import make_group
from inchworm.collect.host import CollectorEnvs
from inchworm.collect.rank_collector import RankCollector
from inchworm.config.sections import CurriculumConfig, EnvConfig, MlflowConfig, PolicyConfig, PPOConfig, TrainingConfig, WandbConfig
from inchworm.core.errors import USAGE_ERRORS, ConfigError, SaveError, error_text
from inchworm.core.protocols import Actor, Callback, Closes, Learner, Policy, Tracker, VectorEnv
from inchworm.core.types import Activity, UpdateStats
from inchworm.env.foreign import GymVectorEnv
from inchworm.env.sb3 import VecEnv
from inchworm.env.source import env_source
from inchworm.evaluate.evaluator import PolicyEvaluator, check_baseline, evaluation_opponent, make_evaluator
from inchworm.evaluate.stats import EvalStats
from inchworm.evaluate.video import KeptReplays
from inchworm.policy.composite import PolicyMap
from inchworm.policy.file import save_policy
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.rollout import Rollout
from inchworm.run.checkpoint import TrainingCheckpointer
from inchworm.run.directory import CHECKPOINTS, REPLAYS, Run, create_run
from inchworm.run.policies import PolicyStore
from inchworm.run.saver import Saver, TrainerParts
from inchworm.selfplay.callback import bind_pool, opponent_callbacks
from inchworm.tracking.jsonl import JsonlTracker
from inchworm.tracking.metrics import StatsLogger
from inchworm.tracking.shipping import Shipping, artefacts, check_installed, with_trackers
from inchworm.train.callbacks import (
    CheckpointCallback,
    EvaluateCallback,
    SnapshotCallback,
    StoreCallback,
    TrackCallback,
    ignoring_interrupts,
    interruptible,
)
from inchworm.train.curriculum import CurriculumCallback, bound_curricula, resolve_curriculum
from inchworm.train.loop import (
    ConvergenceCallback,
    FusedStep,
    History,
    StepFunction,
    TrainingComponents,
    TrainingState,
    as_callback,
    convergence_report,
    default_training_step,
    describe_end,
    give_weights,
    has_stopped,
    reads_rollouts,
    run_training_loop,
    stateful_parts,
    stop_reason,
)
from inchworm.train.profile import Profile
from inchworm.train.resolve import (
    WarmStart,
    check_eval_env,
    check_ranks,
    describe_size,
    resolve_choices,
    resolve_config,
    resolve_env,
    resolve_eval_env,
    resolve_policy,
    warm_start,
)
from inchworm.train.stages import StageCallback

if TYPE_CHECKING:
    from inchworm.tracking.console import ConsoleTracker, Terminal

NO_COPY = "an environment instance cannot be copied for evaluation; pass PPOTrainer an id or a factory, or eval_env"


EnvLike: TypeAlias = str | EnvConfig | gym.Env[Any, Any] | Callable[[], gym.Env[Any, Any]] | VectorEnv | GymVectorEnv | VecEnv
"""What `PPOTrainer` takes as an environment."""

RUN_DIRECTORY = ("run.name", "run.directory")
RUN_FILES = ("run.checkpoint_interval", "run.checkpoint_seconds", "run.keep_checkpoints", "run.keep_best", "run.log_interval")


def changed_settings(config: TrainingConfig, names: Sequence[str]) -> list[str]:
    """Those of the named settings that differ from their defaults, each as `run.name='first'`."""
    default, found = TrainingConfig(), []
    for name in names:
        section, field = name.split(".")
        value = getattr(getattr(config, section), field)
        if value != getattr(getattr(default, section), field):
            found.append(f"{name}={value!r}")
    return found


def make_collector(policy: Policy, env: VectorEnv, config: TrainingConfig, ranks: Any = None) -> RolloutCollector:
    """Create the collector of a run, and bind a pool of opponents in the environments to its policy.

    Where the policy's backend steps the environments itself, or there are several collectors, it has the place of a `RolloutCollector`.
    """
    length = config.ppo.sequence_length_for(config.ppo.rollout_steps, memory=True)  # read only if the policy has memory
    if ranks is not None:
        own: dict[str, Any] = {"seed": config.run.seed, "sequence_length": length, "builtin": is_builtin(policy)}
        return RankCollector(env, acting_policy(policy), ranks, follows=policy, **own)
    if isinstance(env, CollectorEnvs):
        return cast(RolloutCollector, make_group(env, acting_policy(policy), config, sequence_length=length, follows=policy))
    native = make_native_collector(policy, env, seed=config.run.seed, sequence_length=length)
    if native is not None:
        return cast(RolloutCollector, native)
    collector = RolloutCollector(env, acting_policy(policy), seed=config.run.seed, sequence_length=length, follows=policy)
    bind_pool(env, collector.policy)
    return collector


def create_training_components(
    config: TrainingConfig,
    policy: str | PolicySpec | Policy,
    env: Any = None,
    *,
    custom_losses: Sequence[Callable[..., Any]] = (),
    callbacks: Sequence[Callback] = (),
) -> TrainingComponents:
    """Create the parts of an iteration for a loop of your own, which calls `default_training_step` or what it consists of.

    `policy` and `env` are what `PPOTrainer` takes; `env` is by default the config's. Settings of files and evaluations are refused,
    because nothing here would read them.
    """
    unused = changed_settings(config, (*RUN_DIRECTORY, *RUN_FILES))
    if config.evaluation.interval or config.evaluation.final_episodes:
        unused += changed_settings(config, [f"evaluation.{field.name}" for field in dataclasses.fields(config.evaluation)])
    if config.convergence.stops:
        unused += changed_settings(config, ["convergence.target"])
    unused += [f"tracking.{name}" for name in config.tracking.sinks]
    if unused:
        raise ConfigError(
            f"{', '.join(unused)} would have no effect: create_training_components makes only the parts of an iteration; "
            "use functional_training_loop or PPOTrainer, or leave the defaults"
        )
    source = config.env if env is None else env
    config, _ = resolve_choices(policy, source, config, losses=bool(custom_losses))
    vector_env = resolve_env(source, config)
    try:
        policy = resolve_policy(policy, config, vector_env)
        begun = warm_start(policy, config.run)
        learner, collector = begin_learner(make_learner(policy, config), begun), make_collector(policy, vector_env, config)
        opponents = opponent_callbacks(vector_env, lambda: collector.policy, config, env_source(source).for_evaluation(config.env))
        callbacks = bound_curricula(config, vector_env, list(callbacks))
    except BaseException:
        vector_env.close()
        raise
    return TrainingComponents(config, policy, collector, learner, tuple(custom_losses), (*opponents, *callbacks))


def functional_training_loop(
    config: TrainingConfig,
    policy: str | PolicySpec | Policy,
    env: Any = None,
    *,
    step_fn: StepFunction | None = None,
    custom_losses: Sequence[Callable[..., Any]] = (),
    callbacks: Sequence[Callback] = (),
    policy_store: PolicyStore | None = None,
    curriculum: str | CurriculumConfig | CurriculumCallback | None = None,
    fuse: Callable[..., FusedStep | str] = fuse,
) -> TrainingState:
    """Train as the config says, in one call; `step_fn` replaces or wraps `default_training_step`, and `fuse` what compiles iterations.

    With a `policy_store` a version of the policy is saved there every `run.checkpoint_interval` iterations and at the end.
    `curriculum` is a mode ("progress", "adaptive", "learning_progress"), a `CurriculumConfig`, or a `CurriculumCallback` of your own.

    If `run.name` or `run.directory` is set, the run is written there, and an existing one of that name is continued. Otherwise nothing
    is written, and settings of files are refused.
    """
    config, curricula = resolve_curriculum(curriculum, config)
    writes = bool(changed_settings(config, RUN_DIRECTORY))
    files = [name for name in RUN_FILES if policy_store is None or name != "run.checkpoint_interval"]
    if not writes and (unused := changed_settings(config, files)):
        raise ConfigError(
            f"{', '.join(unused)} would have no effect without a run directory; set run.name or run.directory, or leave the defaults"
        )
    with contextlib.ExitStack() as stack:
        source = config.env if env is None else env
        config = resolve_config(policy, source, config)
        run = stack.enter_context(create_run(config)) if writes else None
        config, _ = resolve_choices(policy, source, config if run is None else run.config, losses=bool(custom_losses))
        if run is not None:
            run.save_config(config)  # what was chosen by measuring is chosen once
        try:
            trainer = PPOTrainer(policy, config.env if env is None else env, config, callbacks=[*curricula, *callbacks], run_dir=run)
        except USAGE_ERRORS:
            if run is not None:
                run.discard()
            raise
        stack.enter_context(trainer)
        if trainer.continues:
            trainer.load_checkpoint()
        trainer.fuse = fuse
        if policy_store is not None:
            trainer.callbacks.append(StoreCallback(policy_store, trainer.policy, config.run.checkpoint_interval))
        trainer.train(custom_loss_fns=custom_losses, step_fn=step_fn)
    return trainer.state


def keep_replays(evaluator: PolicyEvaluator, config: TrainingConfig, run_dir: Path | None) -> KeptReplays:
    """What keeps the first episode of each evaluation in the run's directory, as `evaluation.save_replay` asks for."""
    if run_dir is None:
        raise ConfigError("evaluation.save_replay=true writes into the run's directory, and there is none; pass run_dir")
    players = ("policy", evaluation_opponent(config) or "policy")
    try:
        in_order = players if config.opponent.sides != "second" else players[::-1]
        return KeptReplays(evaluator, run_dir / REPLAYS, config.evaluation.keep_replays, in_order)
    except BaseException:
        evaluator.close()
        raise


def begin_learner(learner: Learner, begun: WarmStart | None) -> Learner:
    """Give a new learner the reward statistics that belong to the weights of a warm start, if there are any."""
    scaler = learner.reward_scaler if isinstance(learner, BaseLearner) else None
    if begun is not None and begun.reward_statistics is not None and scaler is not None:
        scaler.statistics.load_state_dict(begun.reward_statistics)
    return learner


def make_console(config: TrainingConfig, terminal: Terminal | None = None) -> ConsoleTracker:
    """Create the display of a run's progress, on `terminal` or on this process's."""
    from inchworm.tracking.console import ConsoleTracker  # imports rich

    against = evaluation_opponent(config) or config.evaluation.baseline or ""
    return ConsoleTracker(config.run.total_timesteps, title=config.env.id, baseline=against, terminal=terminal)


class Override:
    """A part of the loop with a method replaced by that of a trainer's subclass."""

    def __init__(self, part: object, **methods: Callable[..., Any]) -> None:
        vars(self).update(methods, _part=part)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if callable(value):
            vars(self)[name] = value
        else:  # a counter belongs to the part
            setattr(self._part, name, value)


class PPOTrainer(Closes):
    """Trains a policy in an environment: collect, learn, repeat.

    `policy` is "mlp", "cnn", "lstm", "gru", a `PolicyConfig`, a `PolicySpec`, a policy, or a `PolicyMap` of several; `env` an id, an
    `EnvConfig`, a Gymnasium environment, a factory of them or a vector env: a `VectorEnv`, or Gymnasium's, EnvPool's or
    Stable-Baselines3's; `config` a `PPOConfig` or a `TrainingConfig`. Keywords override the config. With a `run_dir` the run is written
    there: config, metrics, checkpoints, policies. `train` evaluates only if a `TrainingConfig` asks for it; `evaluate` can be called at any
    time. Both use separate copies of `env`, or `eval_env`, which is anything that `env` may be, with the same spaces. The weights begin as
    those of `init_from`, a policy file, run or checkpoint, all or those whose names match a pattern of `init_weights`. `trackers` are
    "csv", "tensorboard", "mlflow", a `MlflowConfig`, a `WandbConfig`, and objects with the methods of `Tracker`; `close` waits for them.
    `curriculum` is a mode, a `CurriculumConfig`, or a `CurriculumCallback` of your own.
    """

    default_curriculum: str | None = None
    """The mode of the curriculum of a trainer that is given none."""

    def __init__(
        self,
        policy: str | PolicyConfig | PolicySpec | PolicyMap | Actor,
        env: EnvLike,
        config: PPOConfig | TrainingConfig | None = None,
        *,
        num_envs: int | None = None,
        num_workers: int | Literal["auto"] | None = None,
        seed: int | None = None,
        backend: str | None = None,
        device: str | None = None,
        eval_env: EnvLike | None = None,
        init_from: str | Path | None = None,
        init_weights: Sequence[str] | None = None,
        callbacks: Sequence[Callback | Callable[..., Any]] = (),
        trackers: Sequence[Tracker | str | WandbConfig | MlflowConfig] = (),
        curriculum: str | CurriculumConfig | CurriculumCallback | None = None,
        run_dir: str | Path | Run | None = None,
    ) -> None:
        if not isinstance(callbacks, Sequence):
            raise ConfigError(f"callbacks must be a list of callbacks, not {type(callbacks).__name__}; put it into one: callbacks=[…]")
        own = [as_callback(callback) for callback in callbacks]  # before anything is made
        given: dict[str, Any] = {"num_envs": num_envs, "num_workers": num_workers, "seed": seed, "backend": backend, "device": device}
        asked = resolve_config(policy, env, config, **given, init_from=init_from, init_weights=init_weights)
        if curriculum is None and asked.curriculum.mode == "none" and not any(isinstance(one, CurriculumCallback) for one in own):
            curriculum = self.default_curriculum
        asked, curricula = resolve_curriculum(curriculum, asked)
        tracking, own_trackers = with_trackers(asked.tracking, trackers)
        check_installed(tracking)
        if tracking.sinks and run_dir is None:
            raise ConfigError(f"tracking.{tracking.sinks[0]} delivers what is in the directory of a run; set run.name, or give run_dir")
        self._asked = asked.replace(tracking=tracking)
        self.config, self.choices = resolve_choices(policy, env, self._asked)
        self.ranks: Any = join_ranks(self.config.run)
        """This process's place among those that learn together; None if it is the only one."""
        if self.ranks is not None:
            check_ranks(env, self.config)
        if not self.is_main:
            own_trackers, run_dir = [], None
        evaluated = resolve_eval_env(env, eval_env, self.config.env, self.config.evaluation.seed) if self.is_main else None
        run = run_dir if run_dir is None or isinstance(run_dir, Run) else Path(run_dir)
        self.run_dir = run.path if isinstance(run, Run) else run
        self.env = resolve_env(env, self.config, rehearse=run is not None, ranks=self.ranks)
        try:
            if self.ranks is not None:
                self.ranks.set_lanes(self.env.num_lanes)
                copies = int(self.ranks.lanes.sum()) // self.env.lanes_per_copy  # those of all ranks, where each brought its own
                self.config, self._asked = (each.replace(env=each.env.replace(num_envs=copies)) for each in (self.config, self._asked))
            self.size = describe_size(self.env, self.config)
            self.callbacks = bound_curricula(self.config, self.env, [*curricula, *own])
            self.policy = self.make_policy(policy)
            self.continues = self.run_dir is not None and TrainingCheckpointer(self.run_dir / CHECKPOINTS).latest() is not None
            """Whether the run has a checkpoint, which `load_checkpoint` restores."""
            self.warm_start = None if self.continues else warm_start(self.policy, self.config.run)
            """Where the initial weights are from; None for new ones, and for a run that is resumed."""
            keeps = self.config.evaluation.save_replay
            self.evaluator = None if evaluated is None else make_evaluator(evaluated, self.config, record=int(keeps))
            if eval_env is not None and self.evaluator is not None:
                check_eval_env(self.evaluator, self.env)
            if evaluated is not None:
                check_baseline(self.config, evaluated, self.env)
            self._replays = None if self.evaluator is None or not keeps else keep_replays(self.evaluator, self.config, self.run_dir)
        except BaseException:
            if self.env is not env:  # the caller's own stays open
                self.env.close()
            raise
        self.collector = make_collector(self.policy, self.env, self.config, self.ranks)
        self.state = TrainingState()
        self._in_loop, self.fuse = False, fuse
        self._shipping: Shipping | None = None
        self._has_files, self._stop_reason = False, ""  # since the last training has ended
        self.trackers = [*([JsonlTracker(self.run_dir)] if self.run_dir else []), *own_trackers]
        parts = TrainerParts(
            policy=self.policy,
            collector=self.collector,
            state=self.state,
            rows=[tracker for tracker in self.trackers if isinstance(tracker, JsonlTracker)],
            trackers=own_trackers,
            learner=lambda: self.learner,
            config=lambda: self.config,
            keep_compile=self._keep_compile,
            inexact=lambda: self.inexact,
        )
        self.saver = Saver(run, self._asked, parts)
        self.saver.set_callbacks(stateful_parts(self.callbacks))
        self._snapshot = SnapshotCallback(self.saver.take)
        if run is not None:
            self.saver.warn_inexact(self.inexact)
        rated = evaluated if evaluated is not None and evaluated.can_be_copied else None
        self.opponents = opponent_callbacks(self.env, lambda: self.collector.policy, self.config, rated, self.run_dir)
        for tracker in self.trackers:
            tracker.log_params(self.config.to_dict())
        if self.ranks is not None:
            self.learner  # noqa: B018 - made now, because all ranks exchange their weights at the same time

    @property
    def is_main(self) -> bool:
        """Whether this process leads the training: the only one, or rank 0 of several. Only it writes files, evaluates and logs."""
        return self.ranks is None or self.ranks.rank == 0

    @cached_property
    def learner(self) -> Learner:
        """The learner of the policy, created when first used, so that collecting needs no learning framework."""
        learner = begin_learner(make_learner(self.policy, self.config, dump_directory=self.run_dir), self.warm_start)
        if self.ranks is not None:
            if not isinstance(learner, BaseLearner):
                raise ConfigError("several policies cannot be learned in several processes; train one policy")
            learner.join(self.ranks)
        return learner

    @property
    def optimizer(self) -> Any:
        """The optimiser inside the learner."""
        learner: Any = self.learner
        return learner.optimizer

    @property
    def device(self) -> str:
        """The device on which the policy learns."""
        learner: Any = self.learner
        return str(learner.device)

    @property
    def curriculum(self) -> CurriculumCallback | None:
        """The curriculum of the training, if there is one."""
        return next((callback for callback in self.callbacks if isinstance(callback, CurriculumCallback)), None)

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
        """What of the environments a checkpoint cannot restore exactly, a sentence each."""
        return list(dict.fromkeys(self.env.inexact))

    @property
    def failures(self) -> list[str]:
        """Errors outside of the training itself, such as a crashed evaluation."""
        return self.state.failures

    def make_policy(self, policy: Any) -> Policy:
        """Make the policy from what the trainer was given; the environments are made, and the config is complete."""
        return resolve_policy(policy, self.config, self.env)

    def collect_rollouts(self, n_steps: int | None = None) -> Rollout:
        """Collect the next `n_steps` steps of every lane with the current policy, without learning."""
        return self.collector.collect(n_steps if n_steps is not None else self.config.ppo.rollout_steps)

    def learn(self, rollout: Rollout | Mapping[str, Any], custom_loss_fns: Sequence[Callable[..., Any]] = ()) -> UpdateStats:
        """Update the policy from a rollout of any origin. Neither the environment nor the rollout is changed.

        Outside of `train`, each call is one iteration of the run.
        """
        with learning_threads(self.config.run.threads, self.config.run.backend):
            stats = self.learner.update(rollout, custom_loss_fns)
        give_weights(self.policy, self.collector)
        if not self._in_loop:  # which counts its own iterations
            self.state.iteration += 1
            self.state.follow(self.collector)
        return stats

    def train(
        self,
        total_timesteps: int | None = None,
        callback: Callback | Callable[..., Any] | None = None,
        *,
        custom_loss_fns: Sequence[Callable[..., Any]] = (),
        step_fn: StepFunction | None = None,
        profile: Profile | None = None,
        progress: bool | ConsoleTracker = False,
    ) -> History:
        """Collect and learn until `total_timesteps` env steps have been taken since the start of the run.

        Returns the history of this call: a list per metric (timesteps, mean_reward, loss, …) with one entry per iteration, with the
        evaluations as `history.evaluations`, why the call ended as `history.stop_reason`, and with a `convergence.target` whether and when
        the run converged as `history.convergence`. `progress` shows the progress: a live view in a terminal and in a notebook, else plain
        lines.
        """
        own = [*self.callbacks, *([as_callback(callback)] if callback is not None else [])]
        if not self.is_main:
            return self._follow(own, custom_loss_fns)
        if not isinstance(progress, bool) and not callable(getattr(progress, "start", None)):
            raise ConfigError(f"progress must be True, False or a ConsoleTracker, not {progress!r:.80}")
        config = self.config
        if total_timesteps is not None:
            config = config.replace(run=config.run.replace(total_timesteps=total_timesteps))
        self._has_files = False
        self.saver.claim_directory()
        self.saver.note_outcome(None)
        self.learner.total_timesteps = config.run.total_timesteps
        if isinstance(self.learner, BaseLearner | CompositeLearner):
            self.learner.attach_losses(custom_loss_fns)  # before a callback asks a loss for intrinsic rewards
        if self.curriculum is not None:
            self.curriculum.total_timesteps = config.run.total_timesteps
        # A run that was killed after a callback stopped it only has to finish.
        self.state.should_stop = self.state.stopped or has_stopped(self.state, config.convergence)
        self.state.interrupted = self.state.ended = False
        self.state.follow(self.collector)
        history = self.state.history = History()
        evaluated = len(self.state.evaluations)
        unscored = config.evaluation.final_episodes and self.evaluator is not None and self.state.scored != self.state.iteration
        if not unscored and (text := describe_end(self.state, config)):
            warnings.warn(f"nothing to train: {text}", stacklevel=2)
        self.saver.set_callbacks(stateful_parts(own))
        self._snapshot.taken = None  # one of an earlier call may be of another run
        console = make_console(config) if progress is True else progress or None
        track = TrackCallback([*self.trackers, *([console] if console else [])], config.run)
        components = self._components(config, custom_loss_fns, own, track)
        if self._shipping is None and self.run_dir is not None and config.tracking.sinks:
            self._shipping = Shipping(self.run_dir, config)
        try:
            if console:
                console.start(self.state.env_steps, self.state.best_score, self.activity)
            leading = contextlib.nullcontext() if self.ranks is None else self.ranks.leading()
            with learning_threads(config.run.threads, config.run.backend), interruptible(self.state), leading:
                self._in_loop = True
                if profile is not None:
                    profile.run(self.state, components, step_fn or default_training_step)
                else:
                    fused = self._fused_step(components) if step_fn is None else None
                    run_training_loop(self.state, components, step_fn or default_training_step, fused)
        except KeyboardInterrupt:
            self.saver.save_snapshot(self._snapshot.taken)
            self.saver.note_outcome("interrupted")
            raise
        except SaveError:  # everything is done, and saving has been tried
            raise
        except BaseException as error:
            self._save_after(error)
            self.saver.note_outcome("failed", f"{type(error).__name__}: {error_text(error, 500)}")
            raise
        finally:
            self._in_loop, self.state.phase = False, ""
            history.evaluations = self.state.evaluations[evaluated:]
            history.convergence = convergence_report(self.state, config.convergence)
            self.saver.wait()
            self._close_evaluator()
            track.log_unlogged()
            if isinstance(components.callbacks[0], StageCallback):
                components.callbacks[0].log_last()
            if console:
                console.close()
        history.stop_reason = stop_reason(self.state, config)
        self.saver.note_outcome("interrupted" if self.state.interrupted else "finished", history.stop_reason or "")
        if self.state.interrupted:
            raise KeyboardInterrupt
        self._stop_reason = history.stop_reason or ""
        self.state.ended = self._has_files = True
        return history

    def _follow(self, callbacks: Sequence[Callback], custom_loss_fns: Sequence[Callable[..., Any]]) -> History:
        """Do with this rank's lanes what rank 0 announces, until its training ends; of the callbacks only `on_rollout` is called here."""
        rollouts: list[Rollout] = []

        def collect(num_steps: int) -> None:
            rollout = self.collector.collect(num_steps)
            self.state.follow(self.collector)
            for callback in callbacks:
                changed: Any = callback.on_rollout(self.state, rollout)
                rollout = rollout if changed is None else changed
            rollouts[:] = [rollout]

        def update(_: int) -> None:
            self.learner.update(rollouts[0], custom_loss_fns)
            give_weights(self.policy, self.collector)

        with learning_threads(self.config.run.threads, self.config.run.backend), ignoring_interrupts():
            self.ranks.follow({"collect": collect, "update": update, "state": lambda _: self.collector.state_dict()})
        return History()

    def release_ranks(self) -> None:
        """End the `train` of the other ranks, if this one leads and will not train."""
        if self.ranks is not None:
            with self.ranks.leading():
                pass

    def activity(self) -> Activity:
        """What the training is doing now. It reads counters that are kept anyway, so another thread may ask often."""
        state, share = self.state, None
        phase = "evaluating" if state.evaluating else state.phase
        if phase == "collecting":
            share = self.collector.share_collected
        elif phase == "learning":
            share = getattr(self.learner, "epoch", 0) / self.config.ppo.update_epochs or None  # a learner of several policies has none
        return Activity(self.collector.env_steps, state.iteration + bool(state.phase), phase, share)

    def evaluate(self, episodes: int | None = None, *, deterministic: bool | None = None) -> EvalStats:
        """Evaluate the policy on environments created for it."""
        if not self.is_main:
            return EvalStats.from_dict(self.ranks.broadcast_tree())
        if self.evaluator is None:
            raise ConfigError(NO_COPY)
        with learning_threads(self.config.run.threads, self.config.run.backend):
            stats = self.evaluator.evaluate(self.collector.policy, episodes, deterministic)
        if self.ranks is not None and not self._in_loop:
            self.ranks.broadcast_tree(stats.to_dict())
        return stats

    def save_checkpoint(self, directory: str | Path | None = None) -> Path:
        """Write the complete state as a checkpoint, to the run's directory (with the policy file) or to the one given."""
        if not self.is_main:
            self.collector.state_dict()  # its part of rank 0's
            return Path(self.ranks.broadcast_tree())
        path = self.saver.save(directory)
        if self.ranks is not None and not self._in_loop:
            self.ranks.broadcast_tree(str(path))
        return path

    def full_state(self) -> dict[str, Any]:
        """The complete state of the training, as plain data and arrays."""
        return self.saver.full_state()

    def load_checkpoint(self, path: str | Path | None = None) -> None:
        """Restore a checkpoint: the newest of the run, or the one given (or the newest in a directory of checkpoints)."""
        if self.ranks is None:
            self.saver.load(path)
            return
        if self.is_main:
            self.saver.load(path)
            loaded = {
                "weights": self.policy.get_weights(),
                "learner": self.learner.state_dict(),
                "collector": cast(RankCollector, self.collector).loaded,
            }
            self.ranks.broadcast_tree(loaded)
            return
        loaded = self.ranks.broadcast_tree()
        self.policy.set_weights(loaded["weights"])
        self.learner.load_state_dict(loaded["learner"])
        self.collector.load_state_dict(loaded["collector"])

    def save_policy(self, path: str | Path) -> Path:
        """Write the policy file: description, weights and normalisers, and with `ppo.scale_rewards` the statistics of rewards."""
        learner = self.__dict__.get("learner")
        if not self.is_main:
            return Path(path)
        return save_policy(path, self.policy, reward_statistics=learner.reward_statistics if isinstance(learner, BaseLearner) else None)

    def close(self) -> None:
        """Close environments and trackers, which get the files of a training that has ended; safe to call twice."""
        with contextlib.ExitStack() as stack:  # in reverse order, all of them even if one fails
            stack.callback(self.saver.close)  # releases the run's lock last
            for tracker in reversed(self.trackers):
                stack.callback(tracker.close)
            stack.callback(self.collector.close)
            stack.callback(self._close_evaluator)
            stack.callback(self._deliver)
            stack.callback(self._write_report)
            stack.callback(self.saver.wait)

    def __repr__(self) -> str:
        own_network = getattr(self.policy, "own_network", None)  # of the user's, inside a TorchPolicy
        policy = getattr(getattr(self.policy, "spec", None), "config", None) if own_network is None else None
        parts = [
            policy.kind if policy is not None else type(own_network or self.policy).__name__,
            f"{self.config.env.id} x {self.config.env.num_envs}",
            f"backend {self.config.run.backend}",
            f"{self.collector.env_steps:,} env steps",
            f"iteration {self.state.iteration:,}",
            *([f"run {self.run_dir}"] if self.run_dir else []),
        ]
        return f"PPOTrainer({', '.join(parts)})"

    def _components(
        self, config: TrainingConfig, losses: Sequence[Callable[..., Any]], own: Sequence[Callback], track: TrackCallback
    ) -> TrainingComponents:
        """The parts of an iteration, with what a subclass overrides, and all callbacks in order: evaluate, opponents, own, track, save."""
        collector: Any = self.collector
        if type(self).collect_rollouts is not PPOTrainer.collect_rollouts:
            collector = Override(collector, collect=self.collect_rollouts)
        learner: Any = self.learner
        if type(self).learn is not PPOTrainer.learn:
            learner = Override(learner, update=self.learn)
        run, saver, callbacks = config.run, self.saver, list[Callback]()
        checkpoints = CheckpointCallback(saver, run.checkpoint_interval, run.checkpoint_seconds, keep_best=run.keep_best)
        saves = self.run_dir is not None
        scored = config.evaluation.interval or config.evaluation.final_episodes
        if scored and self.evaluator is None:
            warnings.warn(f"no evaluation during training: {NO_COPY}", stacklevel=3)
        elif scored and self.evaluator is not None:
            flush = checkpoints.flush if saves else None
            callbacks.append(
                EvaluateCallback(
                    self.evaluator, lambda: self.collector.policy, config.evaluation, saver.write_best_policy, flush, self._replays
                )
            )
        if config.convergence.stops and config.convergence.returns == "evaluation" and self.evaluator is None:
            raise ConfigError(f"convergence.target is compared with evaluations: {NO_COPY}, or set convergence.returns=training")
        if config.convergence.target is not None:
            callbacks.append(ConvergenceCallback(config.convergence))
        callbacks += [*self.opponents, *own, track, *([checkpoints, self._snapshot] if saves else [])]
        if saves:
            stages = StageCallback(self.policy, next(tracker for tracker in self.trackers if isinstance(tracker, JsonlTracker)))
            callbacks.insert(0, stages)  # it sees a rollout before others may replace it
            if isinstance(self.learner, BaseLearner | CompositeLearner):
                self.learner.on_stage = stages.on_stage
        return TrainingComponents(config, self.policy, collector, learner, tuple(losses), tuple(callbacks))

    def _fused_step(self, components: TrainingComponents) -> FusedStep | None:
        """Collect and learn as one program, if the backend can, and nothing has to see what is between them."""
        has_parts = components.collector is self.collector and components.learner is self.learner
        if not has_parts or components.custom_losses or any(map(reads_rollouts, components.callbacks)):
            return None
        fused = self.fuse(self.policy, self.collector, self.learner, components.config)
        return None if isinstance(fused, str) else cast(FusedStep, fused)

    def _save_after(self, error: BaseException) -> None:
        """Save the newest complete iteration after an error, and note on the error what is saved and how to continue."""
        taken = self._snapshot.taken
        if isinstance(error, USAGE_ERRORS) and (taken is None or taken.iteration == 0):  # nothing to continue with
            return
        try:
            self.saver.save_snapshot(taken)
        except Exception as problem:  # must not hide the error
            error.add_note(f"saving failed, too: {type(problem).__name__}: {problem}")
        stopped = f"stopped after iteration {self.state.iteration} and {self.state.env_steps:,} steps"
        error.add_note(stopped if self.run_dir is None else f"{stopped}; {self.saver.describe_saved()}")

    def _keep_compile(self, compiled: str) -> None:
        """Use the checkpoint's choice where `auto` was asked for: it is made once per run."""
        if self._asked.ppo.compile == "auto" and compiled != self.config.ppo.compile:
            self.config = self.config.replace(ppo=self.config.ppo.replace(compile=compiled))
            self.__dict__.pop("learner", None)  # created again when it is needed

    def _write_report(self) -> None:
        """Write the report of a training that has ended."""
        if self._has_files and self.run_dir is not None and self.config.run.report:
            from inchworm.analysis.report import after_training, write_last_report  # late: it takes a moment, and reads files only

            with after_training():
                write_last_report(self.run_dir, self._stop_reason)

    def _deliver(self) -> None:
        """Hand the run's files to trackers, and wait for those that are served by a process of their own, if the training has ended."""
        shipping, self._shipping = self._shipping, None
        ended, self._has_files = self._has_files, False
        if shipping is not None:
            shipping.release()
        for path in artefacts(self.run_dir) if ended and self.run_dir is not None else ():
            StatsLogger(self.trackers).log_artifact(path)
        if shipping is not None and ended:
            shipping.finish()

    def _close_evaluator(self) -> None:
        if self.evaluator is not None:
            self.evaluator.close()


class CurriculumPPOTrainer(PPOTrainer):
    """A `PPOTrainer` whose environment gets harder while it trains: by the config's `curriculum`, or in three levels by progress.

    The level is set at each copy's next reset, by the environment's method `set_difficulty` if it has one, else by the reset option
    `difficulty`. A subclass may override only `collect_rollouts`, or only `learn`.
    """

    default_curriculum = "progress"

    def collect_rollouts(self, n_steps: int | None = None, difficulty_level: int | None = None) -> Rollout:
        """Collect the next steps; with a level, episodes begin there until the curriculum chooses again."""
        if difficulty_level is not None and self.curriculum is not None:
            self.curriculum.set_level(difficulty_level)
        return super().collect_rollouts(n_steps)
