"""Meta-learning: a policy learns to adapt to tasks from what it has seen of them, and is scored on tasks that were not trained.

The policy collects in each task, first knowing nothing of it, then conditioned on the trajectories of earlier episodes. These are
recorded as the rollout's context, so that learning sees what acting saw, and trains the encoder that reads them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inchworm.backends.numpy.policy import encode_observations, flatten_actions
from inchworm.collect.collector import RolloutCollector
from inchworm.config.sections import PolicyConfig, PPOConfig, TrainingConfig
from inchworm.core.errors import ConfigError
from inchworm.core.protocols import Actor, BaseCallback, Callback, Policy, reads_context
from inchworm.core.seeding import make_stream, restore_stream, stream_state
from inchworm.env.tasks import Task, TaskDistribution, TaskList, check_tasks
from inchworm.evaluate.games import make_world
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.rollout import Rollout, combine_rollouts
from inchworm.train.loop import History
from inchworm.train.trainer import EnvLike, PPOTrainer


def num_features(spec: PolicySpec) -> int:
    """Size of a step's features."""
    return 2 + spec.actions.num_outputs + 2 * spec.observations.size


def task_trajectories(rollout: Rollout, spec: PolicySpec) -> np.ndarray:
    """What the first episode of each lane shows of its task, [B, 1, T, F] f32: one trajectory for each lane.

    The features of a step are 1, the reward, the action (choices one-hot), the observation, and how it changed. Steps without a known
    successor, because nothing follows, invalid rows, and those of later episodes are all 0.
    """
    layout = spec.actions
    choices, gaussians = flatten_actions(layout, rollout.actions, 2)  # [T, B, G], [T, B, D]
    hot = [np.eye(size, dtype=np.float32)[choices[..., group]] for group, size in enumerate(layout.group_sizes)]
    seen, then = (encode_observations(spec.observations, tree, 2) for tree in (rollout.observations, rollout.next_observations))
    ended = rollout.terminated | rollout.truncated  # [T, B]
    first = np.cumsum(ended, 0) - ended == 0
    present = (rollout.valid & first & ~rollout.terminated)[..., None].astype(np.float32)
    features = np.concatenate([np.ones_like(present), rollout.rewards[..., None], *hot, gaussians, seen, then - seen], -1, dtype=np.float32)
    shown: np.ndarray = np.where(present > 0, features, np.float32(0)).swapaxes(0, 1)[:, None]
    return np.ascontiguousarray(shown)


class TaskSampler(BaseCallback):
    """Draws the tasks of each iteration. As a callback, its random stream is saved with the run."""

    def __init__(self, tasks: TaskDistribution, seed: int) -> None:
        self.tasks, self._stream = tasks, make_stream(seed, "tasks")

    def draw(self, count: int) -> list[Task]:
        """Draw tasks, one for each copy."""
        return [self.tasks.sample(self._stream) for _ in range(count)]

    def state_dict(self) -> dict[str, Any]:
        """The stream's position."""
        return {"stream": stream_state(self._stream)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the stream."""
        self._stream = restore_stream(state["stream"])


@dataclass(frozen=True, slots=True)
class Adaptation:
    """Returns of a policy in tasks, after 0, 1, 2, … episodes of adaptation."""

    tasks: tuple[str, ...]
    returns: np.ndarray
    """[episodes + 1, tasks]"""

    @property
    def means(self) -> list[float]:
        """The mean over tasks after each number of episodes."""
        return [float(mean) for mean in self.returns.mean(1)]

    def __str__(self) -> str:
        rows = [f"after {count} episode{'s' * (count != 1)}: return {mean:.5g}" for count, mean in enumerate(self.means)]
        return "\n".join([f"{len(self.tasks)} held-out tasks", *rows])


def evaluate_adaptation(
    policy: Actor, env: Any, tasks: Sequence[Task], episodes: int = 2, *, steps: int, seed: int = 1_000_003, deterministic: bool = True
) -> Adaptation:
    """Score a policy in each task after 0 to `episodes` episodes there, one copy of the environment for each task.

    A policy with a task encoder is given earlier episodes as context. Their actions are sampled, as they are when it learns, also if
    those of the episodes that are scored are not: a policy that does not know its task may stand still, and would find out nothing. Any
    other policy plays trials, so `env` makes a `TrialEnv` of `episodes` + 1 episodes. An episode, or a trial, has at most `steps` steps.
    """
    with contextlib.closing(make_world(env, len(tasks), seed)) as world:
        for copy, task in enumerate(check_tasks(tasks)):
            world.set_reset_options(task.options, [copy])
        scored = RolloutCollector(world, _Greedy(policy) if deterministic else policy, seed=seed)
        if reads_context(policy):
            returns = _with_context(policy, RolloutCollector(world, policy, seed=seed), scored, len(tasks), episodes, steps)
        else:
            infos = [episode.info for episode in _first_episodes(scored.collect(steps), len(tasks))]
            if any(f"return_{episodes}" not in info for info in infos):
                raise ConfigError(f"without a task encoder, pass an env that makes TrialEnv(…, episodes={episodes + 1})")
            returns = [[info[f"return_{number}"] for info in infos] for number in range(episodes + 1)]
    return Adaptation(tuple(task.name for task in tasks), np.array(returns))


def _with_context(
    policy: Any, sampled: RolloutCollector, scored: RolloutCollector, lanes: int, episodes: int, steps: int
) -> list[list[float]]:
    """Score `episodes` + 1 times, each with the trajectories of all sampled episodes before as context."""
    known: list[np.ndarray] = []
    returns = []
    try:
        for number in range(episodes + 1):
            policy.set_context(np.concatenate(known, 1) if known else None)
            scored.restart()
            returns.append([episode.episode_return for episode in _first_episodes(scored.collect(steps), lanes)])
            if number < episodes:
                sampled.restart()
                known.append(task_trajectories(sampled.collect(steps), policy.spec))
    finally:
        policy.set_context(None)
    return returns


def _first_episodes(rollout: Rollout, lanes: int) -> list[Any]:
    """The first finished episode of each lane."""
    found = {episode.lane: episode for episode in reversed(rollout.episodes)}
    if len(found) < lanes:
        raise ConfigError(f"an episode has not ended within {rollout.num_steps} steps; pass more steps")
    return [found[lane] for lane in range(lanes)]


class _Greedy:
    """Acts as a policy does, without sampling."""

    def __init__(self, policy: Actor) -> None:
        self._policy = policy

    def initial_state(self, num_lanes: int) -> Any:
        """The policy's."""
        return self._policy.initial_state(num_lanes)

    def act(self, observations: Any, state: Any, episode_starts: Any, rng: Any, *, deterministic: bool = True) -> Any:
        """The policy's most likely actions."""
        del deterministic
        return self._policy.act(observations, state, episode_starts, rng, deterministic=True)


class MetaLearningPPOTrainer(PPOTrainer):
    """A `PPOTrainer` of a policy that is conditioned on its task by an encoder of earlier trajectories there (`TaskPolicy`, in torch).

    Every iteration draws a task for each copy of the environment from `tasks`, and collects `ppo.rollout_steps` steps in it without
    context, then as many with the first episode of every round before as context, `adaptations` times. Without `use_context` the encoder
    is never given anything: the same policy, to compare with.
    """

    def __init__(
        self,
        policy: str | PolicyConfig | PolicySpec,
        env: EnvLike,
        config: PPOConfig | TrainingConfig | None = None,
        *,
        tasks: TaskDistribution | Sequence[Task],
        adaptations: int = 1,
        embedding_size: int = 16,
        use_context: bool = True,
        num_envs: int | None = None,
        num_workers: Any = None,
        seed: int | None = None,
        device: str | None = None,
        callbacks: Sequence[Any] = (),
        trackers: Sequence[Any] = (),
        run_dir: str | Path | None = None,
    ) -> None:
        asked = config.run.backend if isinstance(config, TrainingConfig) else "auto"
        if asked not in ("auto", "torch"):
            raise ConfigError(f"the task encoder is in torch, not {asked}; set run.backend=torch or auto")
        if adaptations < 1:
            raise ConfigError(f"adaptations={adaptations} must be 1 or more")
        if isinstance(config, TrainingConfig) and config.curriculum.mode != "none":
            raise ConfigError("a meta-learning trainer chooses the tasks itself; set curriculum.mode=none")
        self.tasks = TaskList(tasks) if isinstance(tasks, Sequence) else tasks
        self.adaptations, self.use_context, self._embedding_size = adaptations, use_context, embedding_size
        self._trajectories: dict[str, np.ndarray] = {}
        own_seed = seed if seed is not None else config.run.seed if isinstance(config, TrainingConfig) else 0
        self._sampler = TaskSampler(self.tasks, own_seed)
        own: list[Callback] = [self._sampler, *callbacks]
        given: dict[str, Any] = {"num_envs": num_envs, "num_workers": num_workers, "seed": seed, "device": device, "run_dir": run_dir}
        super().__init__(policy, env, config, **given, backend="torch", callbacks=own, trackers=trackers)

    def make_policy(self, policy: Any) -> Policy:
        """Make the policy with its task encoder."""
        from inchworm.backends.torch.context import TaskPolicy  # which needs torch

        if isinstance(policy, TaskPolicy):
            return policy
        spec = policy if isinstance(policy, PolicySpec) else None
        if spec is None and not isinstance(policy, str | PolicyConfig):
            raise ConfigError(f"MetaLearningPPOTrainer makes its policy from mlp or a PolicyConfig, not {type(policy).__name__}")
        spec = spec or PolicySpec(self.env.observation_space, self.env.action_space, self.config.policy)
        return TaskPolicy(spec, num_features(spec), embedding_size=self._embedding_size, seed=self.config.run.seed)

    def get_task_trajectories(self, task: Task) -> np.ndarray:
        """What was last collected in a task, [trajectories, length, features]; without any trajectory if it was never visited."""
        spec = self._task_policy.spec
        empty = np.zeros((0, self.config.ppo.rollout_steps, num_features(spec)), np.float32)
        return self._trajectories.get(task.name, empty)

    @property
    def _task_policy(self) -> Any:
        return self.policy

    def collect_rollouts(self, n_steps: int | None = None, task_trajectories: np.ndarray | None = None) -> Rollout:
        """Collect in drawn tasks; with `task_trajectories` [trajectories, length, features], one context for all lanes in their tasks."""
        if task_trajectories is None:
            return self.collect_task_specific_rollouts(self._sampler.draw(self.env.num_envs), n_steps)
        table = np.asarray(task_trajectories, np.float32)[None]  # [1, n, L, F]
        return self._collect_with(table, np.zeros(self.env.num_lanes, np.int64), n_steps)

    def collect_task_specific_rollouts(self, task: Task | Sequence[Task], n_steps: int | None = None) -> Rollout:
        """Collect in one task, or in several that the copies take in turn: `n_steps` steps without context, then as many with it.

        The lanes of the result are those of the environment, once for each round, and its context is what each round was given.
        """
        chosen = check_tasks([task] if isinstance(task, Task | str) else list(task))
        if not chosen or len(chosen) > self.env.num_envs:
            raise ConfigError(f"{len(chosen)} tasks need as many copies of the environment; set env.num_envs={max(1, len(chosen))}")
        for place, one in enumerate(chosen):
            self.env.set_reset_options(one.options, list(range(place, self.env.num_envs, len(chosen))))
        lanes, spec = self.env.num_lanes, self._task_policy.spec
        steps = n_steps if n_steps is not None else self.config.ppo.rollout_steps
        known = np.zeros((lanes, self.adaptations, steps, num_features(spec)), np.float32)  # [K, n, L, F]
        rounds = []
        for number in range(self.adaptations + 1):
            self.collector.restart()
            rollout = self._collect_with(known if self.use_context else None, np.arange(lanes), steps)
            rounds.append(rollout)
            if number < self.adaptations:
                known = known.copy()
                known[:, number] = task_trajectories(rollout, spec)[:, 0]
        for place, one in enumerate(chosen):
            self._trajectories[one.name] = known[place * self.env.lanes_per_copy]
        return combine_rollouts(rounds)

    def _collect_with(self, table: np.ndarray | None, index: np.ndarray, n_steps: int | None) -> Rollout:
        """Collect, acting with this context, and record it."""
        policy = self._task_policy
        policy.set_context(table, index)
        try:
            rollout = super().collect_rollouts(n_steps)
        finally:
            policy.set_context(None)
        if table is None:
            return rollout
        every = np.broadcast_to(index, (rollout.num_steps, len(index))).copy()  # [T, B]
        return dataclasses.replace(rollout, context=(table, every))

    def meta_train(
        self, tasks: TaskDistribution | Sequence[Task] | None = None, steps_per_task: int | None = None, iterations: int = 10
    ) -> History:
        """Train for some iterations, each with a task for every copy of the environment and `steps_per_task` steps in each of them.

        `tasks` replaces those of the trainer. The return value is that of `train`, which this calls.
        """
        if tasks is not None:
            self.tasks = self._sampler.tasks = TaskList(tasks) if isinstance(tasks, Sequence) else tasks
        if steps_per_task is not None:
            steps = steps_per_task // (self.adaptations + 1)
            if steps < 1:
                raise ConfigError(f"steps_per_task={steps_per_task} are fewer than the {self.adaptations + 1} rounds of an iteration")
            self.config = self.config.replace(ppo=self.config.ppo.replace(rollout_steps=steps))
        each = self.env.num_lanes * self.config.ppo.rollout_steps * (self.adaptations + 1)
        return self.train(total_timesteps=self.total_timesteps + iterations * each)

    def evaluate_adaptation(self, tasks: Sequence[Task] | None = None, episodes: int = 2) -> Adaptation:
        """Score the policy in held-out tasks, or in those given, after 0 to `episodes` episodes of adaptation in each."""
        chosen = list(self.tasks.held_out() if tasks is None else tasks)
        if not chosen or self.evaluator is None or self.evaluator.source is None:
            raise ConfigError("there are no held-out tasks; pass tasks" if not chosen else "pass the env as an id or a factory")
        policy = self._task_policy
        if not self.use_context:
            episodes = 0
        return evaluate_adaptation(
            policy, self.evaluator.source, chosen, episodes, steps=self.config.ppo.rollout_steps, seed=self.config.evaluation.seed
        )
