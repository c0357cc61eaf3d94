"""What the audit of a critic measures: Monte-Carlo estimates of V and Q, and how much of the policy's gradient is noise.

States of fresh episodes are each restored many times and continued with the current policy. All copies of a vector env are brought to the
same state: by `set_state` where the environment has it, else by replaying the episode's seed and actions. Half of the copies then sample
the first action, which estimates V(s); the other half repeat the one that the episode took there, which estimates Q(s, a). In both, the
environment's own later randomness is that of the episode.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple, cast

import numpy as np
import optree

from inchworm.backends.registry import backend_of, compute_advantages, is_builtin, make_learner, make_policy
from inchworm.config.sections import PPOConfig, TrainingConfig
from inchworm.core.errors import BadNumberError, ConfigError, EnvError
from inchworm.core.protocols import Policy
from inchworm.core.seeding import derive_seed, make_stream
from inchworm.core.spaces import map_tree, tree_leaves
from inchworm.core.types import EnvStep, Tree
from inchworm.env.vector_env import LaneVectorEnv
from inchworm.rollout.rollout import Rollout, select_lanes

NOT_REPLAYABLE = (
    "the environment cannot be replayed: the same seed and actions led to {what}. Its randomness must come from the seed of reset() "
    "(self.np_random) alone; inchworm check-env shows where it does not"
)


class Episodes(NamedTuple):
    """One fresh episode in each copy, padded to the longest: arrays [T, E], and lengths [E]."""

    rewards: np.ndarray
    values: np.ndarray
    next_values: np.ndarray
    """V of each row's true successor."""
    terminated: np.ndarray
    truncated: np.ndarray
    lengths: np.ndarray


class Start(NamedTuple):
    """A state of a fresh episode, to continue from."""

    copy: int
    step: int
    actions: list[Tree]
    """What the environment got from the beginning of the episode on, the action taken in this state last; [*act] each."""
    observation: Tree
    memory: Tree
    """[1, *mem] of the policy, before it reads the observation."""
    saved: Mapping[str, Any] | None
    """The copy's entry of `state_dict`, with the environment's own state; None if it has no get_state."""


class Continuations(NamedTuple):
    """Discounted returns from one state."""

    sampled: np.ndarray
    """[M] with first actions sampled."""
    repeated: np.ndarray
    """[M] with the episode's action first."""
    critic_share: float
    """The mean weight of the critic's value that stands in where a continuation was cut off."""


class BranchPlayer:
    """Plays fresh episodes, and continuations of their states.

    The vector env has no time limit of its own if `limit` is given: fresh episodes are cut off there, and continuations go on. Rewards
    are divided by `reward_scale`, in whose units the critic's values are.
    """

    def __init__(
        self, env: LaneVectorEnv, policy: Policy, *, gamma: float, max_steps: int, limit: int, seed: int, reward_scale: float
    ) -> None:
        self.env, self.policy, self.gamma, self.max_steps, self.limit = env, policy, gamma, max_steps, limit
        self.seed, self._scale = seed, reward_scale
        self._seeds = [derive_seed(seed, "audit episode", copy) for copy in range(env.num_envs)]
        self._to_array = backend_of(policy).to_array

    def play(self, wanted: Mapping[int, Sequence[int]] | None = None) -> tuple[Episodes, list[Start]]:
        """Play the fresh episodes, the same ones at every call; return them and the `wanted` states (step -> copies)."""
        env, policy, copies = self.env, self.policy, self.env.num_envs
        rng = make_stream(self.seed, "audit episodes")
        memory, now = policy.initial_state(copies), env.reset(self._seeds)
        lengths, running = np.zeros(copies, np.int64), np.ones(copies, np.bool_)  # [E]
        rows: list[tuple[np.ndarray, ...]] = []  # (rewards, terminated, truncated), [E] each
        values = [self._values(now.observations, memory, now.episode_starts)]  # [E] each, one more than rows
        final: dict[tuple[int, int], float] = {}  # (step, copy) -> V of the successor where the environment truncated
        log: list[Tree] = []  # [E, *act] each
        starts: list[Start] = []
        while running.any():
            step = len(rows)
            acted = policy.act(now.observations, memory, now.episode_starts, rng)
            log.append(map_tree(np.array, acted.env_actions))
            chosen = list((wanted or {}).get(step, ()))
            saved = env.state_dict()["copies"] if chosen else []
            for copy in chosen:
                actions = [map_tree(itemgetter(copy), actions) for actions in log]
                shown = map_tree(np.array, map_tree(itemgetter(copy), now.observations))
                kept: Tree = optree.tree_map(itemgetter([copy]), memory)
                starts.append(Start(copy, step, actions, shown, kept, saved[copy] if "state" in saved[copy] else None))
            memory, now = acted.state, env.step(acted.env_actions)
            for ended in now.ended:
                if running[ended.lane] and now.truncated[ended.lane]:
                    final[step, ended.lane] = self._final_value(ended.final_observation, memory, ended.lane)
            truncated = now.truncated | (~now.terminated & (step + 1 >= self.limit))
            rows.append((now.rewards.astype(np.float64) / self._scale, now.terminated.copy(), truncated))
            lengths += running
            running &= ~(now.terminated | truncated)
            values.append(self._values(now.observations, memory, now.episode_starts))
        rewards, terminated, truncated = map(np.stack, zip(*rows))  # [T, E] each
        if not np.isfinite(rewards).all():
            raise BadNumberError("the environment returned a reward that is not finite; run inchworm check-env to find the step")
        next_values = np.where(terminated, 0.0, np.stack(values[1:]))  # [T, E]
        for place, value in final.items():
            next_values[place] = value
        over = np.arange(len(rows))[:, None] >= lengths  # [T, E] what the copies did after their episodes
        rewards, row_values, next_values = (np.where(over, 0.0, array) for array in (rewards, np.stack(values[:-1]), next_values))
        return Episodes(rewards, row_values, next_values, terminated | over, truncated & ~over, lengths), starts

    def continue_from(self, start: Start, number: int) -> Continuations:
        """Continue a state in every copy to the end, or for `max_steps`; `number` decides the noise of acting."""
        env, policy, copies = self.env, self.policy, self.env.num_envs
        half, taken = copies // 2, start.actions[-1]
        # Both halves act with the same noise, so that the difference of their returns is the first action's doing.
        halves = [(part, make_stream(self.seed, "audit continuations", number)) for part in (slice(half), slice(half, copies))]
        memory = optree.tree_map(lambda leaf: np.repeat(leaf, copies, 0), start.memory)
        now = self._restore(start)
        returns, weights, running = np.zeros(copies), np.zeros(copies), np.ones(copies, np.bool_)  # [E]
        discount = 1.0
        for step in range(self.max_steps):
            acted = []
            for part, rng in halves:
                shown, kept = (optree.tree_map(itemgetter(part), tree) for tree in (now.observations, memory))
                acted.append(policy.act(shown, kept, now.episode_starts[part], rng))
            actions: Tree = optree.tree_map(lambda *parts: np.concatenate(parts), *[each.env_actions for each in acted])
            memory = optree.tree_map(lambda *parts: np.concatenate(parts), *[each.state for each in acted])
            if step == 0:
                for leaf, value in zip(tree_leaves(actions), tree_leaves(taken), strict=True):
                    leaf[half:] = value
            now = env.step(actions)
            returns[running] += discount * now.rewards[running].astype(np.float64) / self._scale
            discount *= self.gamma
            for ended in now.ended:
                lane = ended.lane
                if running[lane] and now.truncated[lane]:
                    returns[lane] += discount * self._final_value(ended.final_observation, memory, lane)
                    weights[lane] = discount
                running[lane] = False
            if not running.any():
                break
        if running.any():
            returns[running] += discount * self._values(now.observations, memory, now.episode_starts)[running]
            weights[running] = discount
        return Continuations(returns[:half], returns[half:], float(weights.mean()))

    def _restore(self, start: Start) -> EnvStep:
        """Bring every copy to a state."""
        env, copies = self.env, self.env.num_envs
        if start.saved is not None:
            state = env.state_dict()
            nothing = {name: part[:0] for name, part in state["actions"].items()}
            same = [{**start.saved, "replayable": False}] * copies  # by its own state, without its actions
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what could not be restored is an error here
                env.load_state_dict({**state, "copies": same, "actions": nothing, "strayed": []})
            if env.inexact:
                raise EnvError(f"the environment cannot be restored by its get_state and set_state: {env.inexact[0]}")
            return env.reset(indices=())
        now = env.reset([self._seeds[start.copy]] * copies)
        for action in start.actions[:-1]:
            now = env.step(map_tree(lambda leaf: np.repeat(leaf[None], copies, 0), action))
            if now.ended:
                raise EnvError(NOT_REPLAYABLE.format(what="an earlier end of the episode"))
        for leaf, expected in zip(tree_leaves(now.observations), tree_leaves(start.observation), strict=True):
            if not np.array_equal(leaf, np.broadcast_to(expected, leaf.shape), equal_nan=leaf.dtype.kind == "f"):
                raise EnvError(NOT_REPLAYABLE.format(what="another observation"))
        return now

    def _values(self, observations: Tree, memory: Tree, episode_starts: np.ndarray) -> np.ndarray:
        """V [E] of what the copies show."""
        batch = optree.tree_map(lambda leaf: leaf[None], observations)
        values = self.policy.value(batch, memory, episode_starts[None])
        array = self._to_array(values)
        row: np.ndarray = np.array(values if array is None else array, np.float64)[0]
        return row

    def _final_value(self, observation: Tree, memory: Tree, lane: int) -> float:
        """V of the last observation [*obs] of an episode, with the memory after the row before it."""
        shown = optree.tree_map(lambda leaf: np.asarray(leaf)[None], observation)
        kept: Tree = optree.tree_map(itemgetter([lane]), memory)
        return float(self._values(shown, kept, np.zeros(1, np.bool_))[0])


@dataclass(frozen=True)
class Samples:
    """States of fresh episodes with their continuations, in the units that the critic learns in."""

    episodes: Episodes
    starts: tuple[Start, ...]
    sampled: np.ndarray  # [S, M] returns that follow the state
    repeated: np.ndarray  # [S, M] and those that follow the action taken there
    critic_share: float

    @classmethod
    def draw(cls, player: BranchPlayer, states: int, progress: Callable[[int], None] | None) -> Samples:
        """Choose states spread over fresh episodes, each step as likely as any other, and continue them."""
        episodes, _ = player.play()
        steps, copies = np.nonzero(np.arange(len(episodes.rewards))[:, None] < episodes.lengths)  # of all rows
        order = np.argsort((steps + 0.5) / episodes.lengths[copies], kind="stable")
        rng = make_stream(player.seed, "audit states")
        edges = np.linspace(0, len(order), min(states, len(order)) + 1).astype(np.int64)
        chosen = [order[rng.integers(*edge)] for edge in pairwise(edges.tolist())]  # one of each stratum
        wanted: dict[int, list[int]] = {}
        for row in chosen:
            wanted.setdefault(int(steps[row]), []).append(int(copies[row]))
        again, starts = player.play(wanted)
        if not all(np.array_equal(one, other) for one, other in zip(episodes, again)):
            raise EnvError(NOT_REPLAYABLE.format(what="another episode"))
        played: list[Continuations] = []
        for number, start in enumerate(starts):
            played.append(player.continue_from(start, number))
            if progress is not None:
                progress((number + 1) * player.env.num_envs)
        sampled, repeated, shares = zip(*played)
        return cls(episodes, tuple(starts), np.stack(sampled), np.stack(repeated), float(np.mean(shares)))

    @cached_property
    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """The step and the episode of each state, [S] each."""
        steps, copies = zip(*[(start.step, start.copy) for start in self.starts])
        return np.array(steps), np.array(copies)

    @cached_property
    def advantages(self) -> np.ndarray:
        """[S] Q(s, a) - V(s), as estimated."""
        gaps: np.ndarray = self.repeated.mean(1) - self.sampled.mean(1)
        return gaps

    @property
    def advantage_std(self) -> float:
        """Spread of the true advantages."""
        return std_without(self.advantages, (self.repeated - self.sampled).var(1, ddof=1) / self.sampled.shape[1])

    @property
    def reachable(self) -> float:
        """Correlation of the true advantages with the estimated ones."""
        spread = float(self.advantages.std(ddof=1))
        return min(1.0, self.advantage_std / spread) if spread > 0 else 0.0


def std_without(values: np.ndarray, noise: np.ndarray) -> float:
    """The standard deviation of values [S] without the variance of their estimates [S]."""
    return math.sqrt(max(0.0, float(values.var(ddof=1) - noise.mean())))


RATE = 1e4
"""Learning rate of the step that a gradient is read from; a large one leaves nothing of it to the rounding of the weights."""


@dataclass(frozen=True)
class GradientNoise:
    """Signal and noise of the policy's gradient, from the gradients of equal parts of a rollout (McCandlish et al. 2018)."""

    parts: int
    samples: int
    """Samples of each part."""
    signal: float
    """Squared norm of the true gradient; an estimate without bias, so that it may be below 0."""
    noise: float
    """Trace of the covariance of one sample's gradient."""
    snr_per_sample: float
    snr_se: float
    """Its standard error, by leaving out each part in turn."""

    @property
    def noise_scale(self) -> float:
        """The batch size at which signal and noise are equal; infinite where there is no signal."""
        return 1.0 / self.snr_per_sample if self.snr_per_sample > 0 else math.inf

    def snr(self, samples: float) -> float:
        """The signal-to-noise ratio of a batch, as powers."""
        return samples * self.snr_per_sample


def gradient_noise(policy: Policy, rollout: Rollout, config: TrainingConfig) -> GradientNoise:
    """The noise of the policy's gradient, from the gradients of single lanes of a rollout that the policy has collected.

    A gradient is read from what the learner of the policy's backend does in one step of plain gradient descent, so that any policy that can
    be trained can be measured. Advantages are those of the config, normalised over the whole rollout.
    """
    ppo = config.ppo
    plain = PPOConfig(
        optimizer="sgd",
        learning_rate=RATE,
        gamma=0.0,
        vf_coef=0.0,
        ent_coef=0.0,
        max_grad_norm=None,
        update_epochs=1,
        num_minibatches=1,
        rollout_steps=rollout.num_steps,
        normalize_advantages="off",
        sequence_length="auto" if ppo.sequence_length == "auto" else min(ppo.sequence_length, rollout.num_steps),
        freeze=ppo.freeze,
    )
    learned, before, version = _learnable(policy), policy.get_weights(), policy.policy_version
    estimates = compute_advantages(learned, rollout, ppo)
    advantages = estimates.advantages.astype(np.float64)  # [T, K]
    if ppo.normalize_advantages != "off":
        advantages = (advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-8)
    # Without discount an advantage is the reward less the value, so these rewards make a learner find these advantages in any part.
    rollout = dataclasses.replace(rollout, rewards=(estimates.values + advantages).astype(rollout.rewards.dtype))
    run = config.run.replace(backend=getattr(learned, "backend", "torch"))
    learner: Any = make_learner(learned, config.replace(ppo=plain, run=run))

    def restore() -> None:
        learned.set_weights(before)
        learned.policy_version = version

    def moved(lane: int, factor: float) -> dict[str, np.ndarray]:
        """What a step on a lane takes from each weight."""
        restore()
        learner.learning_rate_scale = factor
        if "warm_up" in learner.update(select_lanes(rollout, [lane])):
            raise ConfigError("the policy's normalisers have seen no data, so it has no gradient yet; train it first")
        return {name: before[name].astype(np.float64) - weight for name, weight in learned.get_weights().items()}

    try:
        names = [name for name, difference in moved(0, 0.0).items() if not difference.any()]  # others are statistics, not learned
        steps = [moved(lane, 1.0) for lane in range(rollout.num_lanes)]
    finally:
        restore()
    parts = np.stack([np.concatenate([step[name].ravel() for name in names]) for step in steps]) / RATE  # [K, P]
    count, samples = len(parts), rollout.num_valid // len(parts)
    products = parts @ parts.T  # [K, K]: all that is needed of them

    def estimate(kept: np.ndarray) -> tuple[float, float]:
        """(signal, noise of one sample) of some parts."""
        inner = products[np.ix_(kept, kept)]
        mean_square = float(inner.mean())
        variance = (float(np.trace(inner)) - len(kept) * mean_square) / (len(kept) - 1)
        return mean_square - variance / len(kept), max(variance, np.finfo(np.float64).tiny) * samples

    signal, noise = estimate(np.arange(count))
    ratios = np.array([np.divide(*estimate(np.delete(np.arange(count), part))) for part in range(count)])
    error = math.sqrt((count - 1) * float(ratios.var()))
    return GradientNoise(count, samples, signal, noise, signal / noise, error)


def _learnable(policy: Policy) -> Policy:
    """A copy that a learner may change; a policy of the user's cannot be copied, and gets its weights back."""
    if not is_builtin(policy):
        return policy
    spec, backend = cast(Any, policy).spec, cast(Any, policy).backend
    return make_policy(spec, weights=policy.get_weights(), backend="torch" if backend == "numpy" and spec.memory is not None else backend)
