"""Every setting of a run: typed, frozen, validated, documented under its field. The CLI's flags and the docs' table come from here.

`from_dict` and `from_yaml` also accept names of older trainers (`clip_range`, `n_epochs`, `lr`, …), each with a
`LegacyNameWarning`; constructors accept only the names below.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field

from inchworm.config.reading import FROM_LIST, ConfigBase, Integer, check_name, check_path, check_plain, config_class, short
from inchworm.core.errors import ConfigError

_MAX_INT = 2**63 - 1  # every part of a program can hold it

Count = Annotated[Integer, Field(ge=1, le=_MAX_INT)]
NonNegative = Annotated[Integer, Field(ge=0, le=_MAX_INT)]
Size = Annotated[Integer, Field(ge=1, le=1_000_000)]  # more is a typo that would take all memory
Share = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(ge=0)]
_FilterSize = Annotated[Integer, Field(ge=1, le=10_000)]
Positive = Annotated[float, Field(gt=0)]
Filter = Annotated[tuple[_FilterSize, _FilterSize, _FilterSize], FROM_LIST]
if TYPE_CHECKING:  # a list is accepted where a tuple is; the field is a tuple
    Texts: TypeAlias = Sequence[str]
    Sizes: TypeAlias = Sequence[int]
    Seeds: TypeAlias = Sequence[int]
    Filters: TypeAlias = Sequence[Sequence[int]]
else:
    Texts = Annotated[tuple[str, ...], FROM_LIST]
    Sizes = Annotated[tuple[Size, ...], FROM_LIST]
    Seeds = Annotated[tuple[NonNegative, ...], FROM_LIST]
    Filters = Annotated[tuple[Filter, ...], FROM_LIST]


BACKENDS = {
    "numpy": "inchworm.backends.numpy.backend",
    "torch": "inchworm.backends.torch.backend",
    "jax": "inchworm.backends.jax.backend",
}
"""The backends that `run.backend` accepts, with their modules; `inchworm.backends.registry.register_backend` adds others."""


@config_class("env.wrappers.")
class WrapperConfig(ConfigBase):
    """One wrapper of `gymnasium.wrappers`, by its class name."""

    name: str
    """The class name, such as FlattenObservation or ClipReward."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Its keyword arguments, without the environment."""

    def __post_init__(self) -> None:
        check_plain(self.kwargs, f"env.wrappers: {self.name}: kwargs")


@config_class("env.")
class EnvConfig(ConfigBase):
    """The environment, and how many copies of it run."""

    id: str = "CartPole-v1"
    """A Gymnasium id, or package.module:make_env for your own factory (accepted on the command line, not from a file)."""
    num_envs: Size = 8
    """Copies of the environment; each agent of a copy is one lane."""
    num_workers: NonNegative | Literal["auto"] = "auto"
    """Processes that step the copies; 0 steps them in this process. auto measures the environment briefly and chooses."""
    help_workers: bool = False
    """Also step a share of the copies in this process while the workers step theirs, so that no core is idle."""
    worker_timeout: Annotated[float, Field(gt=0, le=1e6)] = 60.0
    """Seconds after which a worker that does not respond is considered hung."""
    worker_restarts: NonNegative = 10
    """Workers that are replaced within ten minutes after dying or hanging; one more ends the run. 0 ends it at the first."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment."""
    max_episode_steps: Count | None = None
    """Truncate episodes after this many steps; null keeps the registered limit."""
    wrappers: Annotated[tuple[WrapperConfig, ...], FROM_LIST] = ()
    """Wrappers of gymnasium.wrappers, innermost first."""
    atari: bool = False
    """The usual Atari preprocessing: no-op starts, frame skip 4 with max, 84x84 grey, lost lives end training episodes, sign rewards."""
    frame_stack: Annotated[Integer, Field(ge=1, le=1_000)] = 1
    """Number of latest observations stacked along a new first axis."""
    native: bool = True
    """Use the environment's vectorised implementation where one exists that gives bit-identical results."""
    jax_native: bool = True
    """With run.backend=jax, use the environment's JAX-native implementation where there is one: it has the same dynamics, rounded to
    float32, and draws other initial states."""

    def __post_init__(self) -> None:
        check_plain(self.kwargs, "env.kwargs")
        if self.num_workers != "auto":
            if self.num_workers > self.num_envs:
                raise ConfigError(
                    f"env.num_workers={self.num_workers} is more than env.num_envs={self.num_envs}; use {self.num_envs} workers or fewer"
                )
            if self.help_workers and not 1 <= self.num_workers < self.num_envs:
                raise ConfigError(f"env.help_workers needs env.num_workers from 1 to {self.num_envs - 1}, not {self.num_workers}")
        if not self.id.strip():
            raise ConfigError("env.id is empty; give a Gymnasium id such as CartPole-v1")
        if not self.id.isprintable():
            raise ConfigError(f"env.id={self.id!r:.200} has unprintable characters; give a Gymnasium id such as CartPole-v1")


@config_class("opponent.")
class OpponentConfig(ConfigBase):
    """The opponents, in an environment with two teams."""

    mode: Literal["none", "random", "heuristic", "pool", "self_play"] = "none"
    """none: the policy plays every lane. pool samples from anchors and policies, self_play from snapshots of the policy."""
    skill: Share = 1.0
    """Skill of the heuristic, from 0 to 1."""
    skill_start: Share | None = None
    """Start with this skill and raise it to skill in steps of 0.1 as the policy wins; null starts with skill."""
    skill_threshold: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Win rate over the latest games (at least 20) at which the heuristic's skill is raised."""
    sides: Literal["alternate", "first", "second"] = "alternate"
    """The team that the policy plays: the first in even copies and the second in odd ones, or the same in all."""
    pool_size: Annotated[Integer, Field(ge=1, le=100_000)] = 10
    """Snapshots of the policy that are kept; beyond that, the one beaten most often is dropped, never the newest."""
    snapshot_interval: Count = 20
    """Iterations between snapshots of the policy."""
    pfsp_power: Annotated[float, Field(ge=0, le=100)] = 2.0
    """Opponents are sampled in proportion to (1 - win rate) to this power: 0 is uniform, more prefers strong ones."""
    latest_share: Share = 0.5
    """Share of self-play games against the newest snapshot."""
    anchor_share: Share = 0.0
    """Share of self-play games against the anchors."""
    anchors: Texts = ()
    """Fixed opponents: random, heuristic, heuristic:0.5. Default: random, and the heuristic at 0.5 and 1 if there is one."""
    policies: Texts = ()
    """Policy files that are also fixed opponents."""
    rating_interval: NonNegative = 20
    """Iterations between ratings against the fixed opponents, in pool and self_play; 0 disables ratings."""
    rating_episodes: Annotated[Integer, Field(ge=1, le=100_000)] = 20
    """Episodes of a rating against each fixed opponent, half from each side (an odd number is rounded up)."""

    def __post_init__(self) -> None:
        if self.skill_start is not None and self.skill_start > self.skill:
            raise ConfigError(f"opponent.skill_start={self.skill_start} is above opponent.skill={self.skill}; use {self.skill} or less")
        if self.latest_share + self.anchor_share > 1.0:
            raise ConfigError(
                f"opponent.latest_share={self.latest_share} and opponent.anchor_share={self.anchor_share} add up to more than 1"
            )
        for index, name in enumerate(self.anchors):
            try:
                read_opponent(name)
            except ConfigError as error:
                raise ConfigError(f"opponent.anchors[{index}]: {error}") from None
        for index, path in enumerate(self.policies):
            check_path(path, f"opponent.policies[{index}]")


def read_opponent(name: str) -> tuple[Literal["random", "heuristic"], float]:
    """Return the kind and the skill of an opponent by its name."""
    kind, colon, text = name.partition(":")
    if name == "random":
        return "random", 0.0
    if kind != "heuristic":
        raise ConfigError(f"unknown opponent {name!r:.80}; use random, heuristic, or heuristic:0.5 for a skill of 0.5")
    try:
        skill = float(text) if colon else 1.0
    except ValueError:
        skill = math.nan
    if not 0.0 <= skill <= 1.0:
        raise ConfigError(f"{name!s:.80}: the skill must be from 0 to 1, such as heuristic:0.5")
    return "heuristic", skill


Activation = Literal["tanh", "relu", "elu", "leaky_relu", "silu"]


@config_class("policy.")
class PolicyConfig(ConfigBase):
    """The network and its normalisers."""

    kind: Literal["mlp", "cnn", "lstm", "gru"] = "mlp"
    """mlp flattens observations; cnn passes images through convolutions first; lstm and gru have memory, and convolutions for images
    that are large enough for them."""
    hidden_sizes: Sizes = (64, 64)
    """Widths of the hidden layers of actor and critic."""
    activation: Activation = "tanh"
    """Activation function between the layers."""
    shared_trunk: bool = False
    """One trunk for actor and critic instead of one each."""
    orthogonal_init: bool = True
    """Orthogonal weights with gains sqrt 2 (hidden), 0.01 (actions), 1 (value); else uniform by fan-in."""
    log_std_init: Annotated[float, Field(ge=-20, le=5)] = 0.0
    """Initial log standard deviation of Gaussian actions."""
    action_bounds: Literal["clip", "tanh"] = "clip"
    """How Gaussian actions are kept within a Box: clipped before they reach the environment, or squashed by tanh."""
    normalize_observations: bool = False
    """Normalise continuous observations by their running mean and standard deviation, inside the policy."""
    normalize_values: bool = False
    """Let the value head predict normalised returns (PopArt)."""
    observation_clip: Positive = 10.0
    """Normalised observations are clipped to plus or minus this."""
    cnn_filters: Filters = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
    """Convolutions as (channels, kernel, stride)."""
    cnn_features: Size = 512
    """Width of the layer after the convolutions."""
    memory_size: Size = 64
    """Width of the memory of lstm and gru. Actor and critic share it, so use normalize_values where returns are large."""
    memory_layers: Annotated[Integer, Field(ge=1, le=100)] = 1
    """Number of recurrent layers."""
    memory_place: Literal["before", "after"] = "after"
    """Position of the memory: after the hidden layers, which actor and critic then share, or before them."""
    lstm_forget_bias: Annotated[float, Field(ge=-20, le=20)] = 1.0
    """Initial bias of an LSTM's forget gates, with orthogonal_init: at 1 they are 73 % open and it remembers longer at first, at 0 half."""
    central_critic: bool = False
    """Let the critic also see the environment's global state, which actors do not; rewards after an agent's death then count for it."""


Schedule = Literal["constant", "linear", "cosine"]

_MEMORY_LENGTH = 32
"""Sequence length of policies with memory, unless configured."""


@config_class("ppo.")
class PPOConfig(ConfigBase):
    """How the policy learns from a rollout."""

    learning_rate: Weight = 3e-4
    """The optimiser's step size at the start of the run."""
    optimizer: Literal["adam", "adamw", "rmsprop", "sgd", "muon"] = "adam"
    """adam and adamw, which needs weight_decay; rmsprop and sgd, both without momentum; muon for matrices and adamw for the rest, with
    torch."""
    gamma: Share = 0.99
    """Discount of the next step's value."""
    gae_lambda: Share = 0.95
    """GAE's trade-off between bias (0: one-step TD) and variance (1: Monte Carlo)."""
    clip_coef: Weight = 0.2
    """How far the probability ratio may move from 1 before its gradient is cut."""
    vf_coef: Weight = 0.5
    """Weight of the value loss, which is half the mean squared error (a loss without the half needs half this weight)."""
    ent_coef: Weight = 0.01
    """Weight of the entropy bonus."""
    max_grad_norm: Positive | None = 0.5
    """Gradients are scaled down to this global norm; null disables it."""
    update_epochs: Count = 4
    """Passes over each rollout."""
    rollout_steps: Count = 512
    """Steps of every lane per iteration; times the number of lanes this is the batch."""
    num_minibatches: Count | None = None
    """Minibatches per epoch; 8 unless minibatch_size is given."""
    minibatch_size: Count | None = None
    """Samples per minibatch, instead of num_minibatches; a smaller rollout is one minibatch."""
    gradient_accumulation: Count = 1
    """Micro-batches whose gradients are summed before each optimiser step: the same result with less memory."""
    normalize_advantages: Literal["batch", "minibatch", "off"] = "batch"
    """Whether advantages are normalised to mean 0 and standard deviation 1 (n - 1) over the batch, each minibatch, or not."""
    scale_rewards: bool = False
    """Learn from rewards divided by the running standard deviation of the discounted return; rollouts and reported returns stay raw."""
    clip_vloss: bool = False
    """Also bound how far the value moves from the one before the update, by vf_clip_coef in units of the value scale."""
    vf_clip_coef: Weight | None = None
    """The bound of clip_vloss; null is clip_coef."""
    target_kl: Positive | None = None
    """End the update after an epoch whose mean approx_kl is above 1.5 times this."""
    adam_eps: Positive = 1e-5
    """Epsilon of adam, adamw and rmsprop."""
    weight_decay: Weight = 0.0
    """Decoupled weight decay of any optimizer: every step also shrinks the weights by learning_rate times this."""
    learning_rate_schedule: Literal["constant", "linear", "cosine", "adaptive"] = "constant"
    """How learning_rate changes: linear and cosine decay to 0 over the run's total_timesteps. adaptive divides it by 1.5 after an epoch
    whose mean approx_kl is above twice desired_kl, and multiplies it by 1.5 after one below half of it."""
    desired_kl: Positive = 0.01
    """The approx_kl that learning_rate_schedule=adaptive keeps to."""
    min_learning_rate: Positive = 1e-5
    """Lowest rate of learning_rate_schedule=adaptive."""
    max_learning_rate: Positive = 1e-2
    """Highest rate of learning_rate_schedule=adaptive."""
    clip_schedule: Schedule = "constant"
    """How clip_coef and vf_clip_coef decay to 0 over the run's total_timesteps."""
    ent_schedule: Schedule = "constant"
    """The same for ent_coef."""
    sequence_length: Count | Literal["auto"] = "auto"
    """Consecutive steps that are evaluated as one sequence; auto is 1 without memory, else 32 or the rollout if that is shorter."""
    max_staleness: NonNegative | None = None
    """Refuse rollouts collected with weights more than this many updates old, or of another history; null reports and warns once."""
    min_effective_sample_size: Share | None = None
    """Take no steps on a rollout whose importance ratios leave a smaller share of its samples effective; null only reports it."""
    max_behavior_kl: Positive | None = None
    """Take no steps on a rollout if the current policy is further than this KL from the one that collected it; null only reports it."""
    correction: Literal["off", "vtrace"] = "off"
    """vtrace computes advantages and value targets of older rollouts for the current policy, with truncated importance ratios; on fresh
    ones it is GAE."""
    vtrace_clip: Positive = 1.0
    """Where correction=vtrace truncates importance ratios, for a step's own difference as for those before it."""
    proximal_decay: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Bound steps from a proximal policy, an average of past weights that decays by this at each update, and correct for the policy that
    collected by importance weights: the decoupled objective. 0 is the current weights. null bounds steps from the policy that collected."""
    freeze: Texts = ()
    """Names of weights that learning does not change, as patterns such as actor.* (see docs/policies.md)."""
    compile: Literal["off", "on", "auto"] = "off"
    """Compile torch's minibatch step as one graph; auto does so if the run is long enough to repay compilation."""

    def __post_init__(self) -> None:
        if self.sequence_length != "auto" and self.sequence_length > self.rollout_steps:
            raise ConfigError(
                f"ppo.sequence_length={self.sequence_length} is longer than a rollout (ppo.rollout_steps={self.rollout_steps}); "
                f"use {self.rollout_steps} or less"
            )
        if self.num_minibatches is not None and self.minibatch_size is not None:
            raise ConfigError(
                f"ppo.num_minibatches={self.num_minibatches} and ppo.minibatch_size={self.minibatch_size} exclude each other; "
                "set one of them to null"
            )
        if self.proximal_decay is not None and self.normalize_advantages == "minibatch":
            raise ConfigError(
                f"ppo.proximal_decay={self.proximal_decay:g} weights advantages after they are normalised over the batch; set "
                "ppo.normalize_advantages=batch or off"
            )
        if self.optimizer == "adamw" and not self.weight_decay:
            raise ConfigError(
                "ppo.optimizer=adamw is Adam with weight decay; set ppo.weight_decay, such as 0.01, or use ppo.optimizer=adam"
            )
        if self.learning_rate_schedule == "adaptive" and not self.min_learning_rate <= self.learning_rate <= self.max_learning_rate:
            raise ConfigError(
                f"ppo.learning_rate={self.learning_rate:g} is not from ppo.min_learning_rate={self.min_learning_rate:g} to "
                f"ppo.max_learning_rate={self.max_learning_rate:g}, the bounds of ppo.learning_rate_schedule=adaptive; change one of them"
            )

    @property
    def warm_up_steps(self) -> int:
        """Steps of every lane that only initialise the normalisers: 5 % of a rollout, but at least 4, so that they hold some motion."""
        return min(self.rollout_steps, max(4, self.rollout_steps // 20))

    def sequence_length_for(self, num_steps: int, *, memory: bool) -> int:
        """Return the sequence length for a rollout of `num_steps` steps."""
        if self.sequence_length != "auto":
            return min(self.sequence_length, max(1, num_steps))
        return max(1, min(num_steps, _MEMORY_LENGTH)) if memory else 1

    def minibatches_for(self, num_sequences: int, sequence_length: int = 1) -> int:
        """Return the number of minibatches of an epoch over `num_sequences` sequences."""
        if self.minibatch_size is None:
            return max(1, min(self.num_minibatches or 8, num_sequences))
        per_minibatch = max(1, self.minibatch_size // sequence_length)
        return max(1, -(-num_sequences // per_minibatch))


@config_class("collect.")
class CollectConfig(ConfigBase):
    """How rollouts are collected."""

    max_replay_steps: NonNegative = 100_000
    """Most actions of a running episode that are kept for replay; a longer episode is not continued by a resume, it starts over."""
    engine: Literal["local", "async", "ray"] = "local"
    """Where rollouts are collected: in this process, in processes of their own while this one learns, or by actors of a Ray cluster."""
    num_collectors: Annotated[Integer, Field(ge=1, le=100_000)] = 1
    """Collectors, each with its share of env.num_envs and a sampling stream of its own; their rollouts are joined side by side. The same
    number gives the same result on every engine, and each has env.num_workers processes."""
    staleness: Annotated[Integer, Field(ge=0, le=1_000)] | Literal["auto"] = "auto"
    """Updates by which the weights that collect are older than those that learn: collecting continues during as many updates. 0 collects
    and learns in turns. auto is 1 with engine=async, else 0."""
    keep_infos: Texts = ()
    """Names of numbers in the environment's info that every step keeps, as the rollout's columns extras["info/NAME"]; NaN where a step has
    none."""
    timeout: Annotated[float, Field(gt=0, le=1e6)] = 600.0
    """Seconds after which a collector in another process that has not returned its rollout is considered hung and replaced."""
    restarts: NonNegative = 10
    """How often one collector is replaced within ten minutes after dying or hanging; once more ends the run. 0 ends it at the first."""
    ray_address: str | None = None
    """An existing Ray cluster as host:port, or auto for the one on this machine; null is that of RAY_ADDRESS, as in a Ray job, else one
    that is started for the run on this machine."""
    ray_cpus: Annotated[float, Field(ge=0, le=10_000)] = 1.0
    """CPUs that Ray reserves for each collector."""
    ray_memory: Annotated[Integer, Field(ge=1, le=_MAX_INT)] | None = None
    """Bytes of memory that Ray reserves for each collector; null reserves none."""
    ray_resources: dict[str, float] = field(default_factory=dict)
    """Other resources of Ray that each collector needs, such as {simulator: 1} to place it on nodes started with them."""
    ray_strategy: Literal["default", "spread"] = "default"
    """How Ray places collectors: on as few nodes as it thinks best, or spread over all."""

    def __post_init__(self) -> None:
        twice = {name for name in self.keep_infos if list(self.keep_infos).count(name) > 1}
        if twice or "" in self.keep_infos:
            raise ConfigError(f"collect.keep_infos={short(list(self.keep_infos))}: {'names differ' if twice else 'a name is not empty'}")
        if self.ray_address is not None and self.engine != "ray":
            raise ConfigError(f"collect.ray_address={short(self.ray_address)} is used by collect.engine=ray, not by {self.engine}")
        for name, amount in self.ray_resources.items():
            if not 0 < amount < math.inf:
                raise ConfigError(f"collect.ray_resources: {short(name)} must be a positive amount, not {amount}")

    @property
    def is_plain(self) -> bool:
        """Whether there is one collector in this process, in turns with learning."""
        return self.engine == "local" and self.num_collectors == 1 and self.staleness in (0, "auto")


if TYPE_CHECKING:
    Shares: TypeAlias = Sequence[float]
    Options: TypeAlias = Sequence[dict[str, Any]]
else:
    Shares = Annotated[tuple[Share, ...], FROM_LIST]
    Options = Annotated[tuple[dict[str, Any], ...], FROM_LIST]


@config_class("curriculum.")
class CurriculumConfig(ConfigBase):
    """Levels of difficulty, or tasks, of the training episodes. A copy of the environment changes its level at its next reset only."""

    mode: Literal["none", "progress", "adaptive", "learning_progress"] = "none"
    """How the level is chosen: by the share of total_timesteps that is done; up or down by the success rate at the current level; or for
    each copy at random, levels more often where success or return changes."""
    max_level: Annotated[Integer, Field(ge=1, le=10_000)] = 3
    """The highest level; the lowest is 1. With levels it is their number."""
    start_level: Annotated[Integer, Field(ge=1, le=10_000)] = 1
    """The first level of adaptive."""
    option: str = "difficulty"
    """The reset option that has the level's number as its value, unless the environment has a method set_<option>, or levels are given."""
    levels: Options = ()
    """The reset options of each level, from the first, such as [{length: 0.5}, {length: 1.0}]; empty for the level's number."""
    opponent_skills: Shares = ()
    """The skill of the heuristic opponent at each level, from the first; empty leaves it as it is."""
    milestones: Shares = ()
    """With progress, the shares of the run at which the levels from the second on begin; by default evenly spaced up to 0.6, so for three
    levels 0.3 and 0.6."""
    promote: Share = 0.8
    """With adaptive, the success rate above which the level rises."""
    demote: Share = 0.3
    """With adaptive, the success rate below which it falls."""
    window: Annotated[Integer, Field(ge=2, le=1_000_000)] = 50
    """Number of a level's latest episodes whose mean is its success rate and return; adaptive decides only when there are as many."""
    success_return: float | None = None
    """The return from which an episode is a success; null takes is_success, success or win of its last info."""
    explore: Share = 0.2
    """With learning_progress, the share of the copies whose level is drawn uniformly."""
    evaluation_level: Annotated[Integer, Field(ge=1, le=10_000)] | None = None
    """The level of all evaluations, which the curriculum never changes; null is the highest."""

    def __post_init__(self) -> None:
        for index, options in enumerate(self.levels):
            check_plain(options, f"curriculum.levels[{index}]")
        for name in ("start_level", "evaluation_level"):
            self.check_level(getattr(self, name) or 1, f"curriculum.{name}")
        for name, count in (("opponent_skills", self.num_levels), ("milestones", self.num_levels - 1)):
            found = getattr(self, name)
            if found and len(found) != count:
                raise ConfigError(f"curriculum.{name} has {len(found)} values, but {self.num_levels} levels need {count}")
        if list(self.milestones) != sorted(self.milestones):
            raise ConfigError(f"curriculum.milestones={short(list(self.milestones))} must not fall")
        if self.demote > self.promote:
            raise ConfigError(f"curriculum.demote={self.demote:g} is above curriculum.promote={self.promote:g}")

    @property
    def num_levels(self) -> int:
        """Number of levels."""
        return len(self.levels) or self.max_level

    def check_level(self, level: Any, name: str) -> int:
        """Return a level, or refuse one that there is not; `name` is how the user gave it."""
        if isinstance(level, bool) or level not in range(1, self.num_levels + 1):
            more = "give more curriculum.levels" if self.levels else "raise curriculum.max_level"
            raise ConfigError(f"{name}={short(level)} is not a level of the curriculum, which are 1 to {self.num_levels}; {more}")
        return int(level)


@config_class("evaluation.")
class EvalConfig(ConfigBase):
    """How the policy is evaluated, on separate copies of the environment."""

    interval: NonNegative = 50
    """Iterations between evaluations; 0 evaluates only at the end. There is always one at the end and none at step 0."""
    episodes: Count = 20
    """Episodes of each evaluation during training."""
    final_episodes: NonNegative = 100
    """Episodes of the evaluation at the end; 0 skips it."""
    num_envs: Size = 8
    """Copies of the environment for evaluation."""
    deterministic: bool = True
    """Act greedily (else sample)."""
    seed: NonNegative = 1_000_003
    """Seed of the evaluation episodes, which are the same each time."""
    seeds: Seeds = ()
    """Seeds of the episodes, one for each of episodes and of final_episodes; by default they are derived from seed."""
    max_episode_steps: Count | None = None
    """Steps after which an episode that has not ended is cut off and counted as capped. null: the limit that the environment is
    registered with, else 100,000."""
    baseline: str | None = None
    """What the policy is compared with: random, a policy file or a run. The score is then also reported as the difference to the baseline's
    on the same seeds. Against opponents the baseline is the opponent, by default the world's heuristic, or random where it has none."""
    save_replay: bool = False
    """Keep the first episode of each evaluation in the run's directory: as a replay for inchworm replay where there are replays, as in
    Skirmish, else as a video (mp4, or gif without PyAV). It needs the video extra."""
    keep_replays: Count = 5
    """Number of newest replays and videos of save_replay that are kept."""

    def __post_init__(self) -> None:
        count = len(self.seeds)
        others = {"episodes": self.episodes, "final_episodes": self.final_episodes}
        others = {name: value for name, value in others.items() if value != count and (value or name == "episodes")}
        if self.seeds and others:
            found = " and ".join(f"evaluation.{name}={value}" for name, value in others.items())
            wanted = " and ".join(f"evaluation.{name}={count}{' or 0' if name == 'final_episodes' else ''}" for name in others)
            raise ConfigError(f"evaluation.seeds has {count} seeds, one for each episode, but {found}; set {wanted}")


@config_class("convergence.")
class ConvergenceConfig(ConfigBase):
    """When a run counts as converged, and whether it then stops, before its other limits."""

    target: float | None = None
    """Mean return to reach; null has none."""
    window: Count = 100
    """Number of latest episodes whose mean return is compared with the target; before there are as many, nothing is compared."""
    patience: Count = 1
    """Checks in a row that must be at the target; one below it starts the count again."""
    returns: Literal["evaluation", "training"] = "evaluation"
    """Which episodes: those of evaluations, checked after each, or those of training, checked after each iteration in which one ended."""
    stop: bool = True
    """Whether a run that has converged stops; else it continues and only reports when it converged, as presets with a target do. On the
    command line, --convergence.target alone also turns this on."""

    @property
    def stops(self) -> bool:
        """Whether there is a target that ends the run."""
        return self.target is not None and self.stop


def _known_backend(name: Any) -> Any:
    known = ["auto", *BACKENDS]
    if name not in known:
        raise ConfigError(f"run.backend={short(name)} is not known; use {', '.join(known[:-1])} or {known[-1]}")
    return name


@config_class("run.")
class RunConfig(ConfigBase):
    """The run as a whole."""

    name: str | None = None
    """Directory name of the run; an existing one is continued. null generates a unique name."""
    directory: str = "runs"
    """Parent directory of runs."""
    init_from: str | None = None
    """Begin with the weights of this policy file, run or checkpoint, in the names and shapes of the new policy; null makes new ones."""
    init_weights: Texts = ()
    """Take over only the weights with these names, as patterns such as actor.*; by default all, and they must be the same."""
    seed: NonNegative = 0
    """Seed from which all randomness of the run is derived."""
    total_timesteps: Count = 100_000
    """Env steps of the whole run, counted from its start."""
    max_iterations: Count | None = None
    """Stop after this many iterations, if that is sooner."""
    max_episodes: Count | None = None
    """Stop after this many finished episodes, if that is sooner."""
    backend: Annotated[str, BeforeValidator(_known_backend)] = "auto"
    """What trains the policy: numpy (MLP policies only), which is fast for small networks and needs no torch, or torch. auto
    chooses numpy where it can train the policy, and writes the choice into the run; it depends only on the config."""
    device: str = "auto"
    """Device of torch: auto is cuda if available, else cpu."""
    threads: Annotated[Integer, Field(ge=0, le=1_024)] = 1
    """CPU threads of torch, which affect the result's bits; NumPy uses one. 0 keeps the current setting of both."""
    rank_timeout: Annotated[float, Field(gt=0, le=1e6)] = 1800.0
    """Seconds that learners in several processes wait for each other: longer than an evaluation takes, in which all wait for rank 0."""
    checkpoint_interval: NonNegative = 50
    """Iterations between checkpoints; 0 writes none at intervals, only by time and at the end."""
    checkpoint_seconds: Weight | None = 300.0
    """Seconds after which a checkpoint is written even if the interval has not passed; 0 or null writes none by time."""
    keep_checkpoints: Annotated[Integer, Field(ge=2, le=_MAX_INT)] = 2
    """Number of newest checkpoints that are kept."""
    keep_best: bool = True
    """Also keep the checkpoint of the best evaluation: one is written after every evaluation that sets a new record."""
    log_interval: Count = 1
    """Iterations between rows of metrics."""
    report: bool = True
    """Write report.html and curve.svg into the run's directory when a training has ended: in Python, when its trainer is closed."""
    notes: str = ""
    """Anything worth remembering about the run; trackers show it with the run."""

    def __post_init__(self) -> None:
        if self.name is not None:
            check_name(self.name, "run.name")
        check_path(self.directory, "run.directory")
        if self.init_from is not None:
            check_path(self.init_from, "run.init_from")
        elif self.init_weights:
            raise ConfigError(
                f"run.init_weights={short(list(self.init_weights))} needs run.init_from, the policy file or run to take them from"
            )


@config_class("tracking.wandb.")
class WandbConfig(ConfigBase):
    """Weights & Biases, on if a project is given. The key comes from WANDB_API_KEY or `wandb login`, never from a config."""

    project: str | None = None
    """The project; null is off."""
    mode: Literal["online", "offline", "disabled"] = "online"
    """online uploads while training; offline writes files to tracking/wandb of the run, for `wandb sync`; disabled is off."""
    entity: str | None = None
    """The user or team; null is the account's default."""
    name: str | None = None
    """The run's name there; null is the name of the run's directory."""
    group: str | None = None
    """The group of runs that it belongs to."""
    tags: Texts = ()
    """Tags of the run there."""

    def __post_init__(self) -> None:
        given = {"mode": self.mode == "offline", "entity": self.entity, "name": self.name, "group": self.group, "tags": self.tags}
        names = [name for name, value in given.items() if value]
        if names and self.project is None and self.mode != "disabled":
            raise ConfigError(f"tracking.wandb.{names[0]} is set, but nothing is sent to W&B without a project; set tracking.wandb.project")

    @property
    def on(self) -> bool:
        """Whether it is used."""
        return self.project is not None and self.mode != "disabled"


@config_class("tracking.mlflow.")
class MlflowConfig(ConfigBase):
    """MLflow, on if an experiment or a uri is given. Credentials come from MLflow's own environment variables, never from a config."""

    experiment: str | None = None
    """The experiment; null is off, or inchworm if a uri is given."""
    uri: str | None = None
    """A server, such as http://127.0.0.1:5000, or another store of MLflow; null is MLFLOW_TRACKING_URI, else mlflow.db in run.directory."""
    register: bool = True
    """Register the best policy as a model when the run has converged or improves on the registered one; the best has the alias best."""
    model_name: str | None = None
    """The name of that model; null is the environment's id."""

    def __post_init__(self) -> None:
        if self.uri is not None and "@" in urlsplit(self.uri).netloc:
            raise ConfigError(
                "tracking.mlflow.uri has a user name or password, and configs are written to files; set MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD instead"
            )

    @property
    def on(self) -> bool:
        """Whether it is used."""
        return self.experiment is not None or self.uri is not None


@config_class("tracking.")
class TrackingConfig(ConfigBase):
    """Where metrics go besides metrics.jsonl, from a process of their own that reads that file."""

    csv: bool = False
    """Write metrics.csv and timing.csv to tracking/ of the run."""
    tensorboard: bool = False
    """Write TensorBoard's event files to tracking/tensorboard of the run."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    """Weights & Biases."""
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)
    """MLflow."""
    finish_seconds: Annotated[float, Field(ge=0, le=1e6)] = 30.0
    """How long the end of a training waits for what is not delivered yet; `inchworm ship RUN` delivers the rest later."""

    @property
    def sinks(self) -> list[str]:
        """The names of the trackers that are on."""
        on = {"csv": self.csv, "tensorboard": self.tensorboard, "wandb": self.wandb.on, "mlflow": self.mlflow.on}
        return [name for name, used in on.items() if used]


_FROM_TEXT = BeforeValidator(lambda value: (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value)


@config_class("policies.")
class RoleConfig(ConfigBase):
    """One of several policies: the agents that it plays, and what differs from the run's settings."""

    agents: Annotated[tuple[str, ...], _FROM_TEXT] = ()
    """Patterns of agent names, such as scout_* or [guard_0, guard_1]; every agent belongs to exactly one policy."""
    policy: dict[str, Any] = field(default_factory=dict)
    """Settings of the section policy that differ."""
    ppo: dict[str, Any] = field(default_factory=dict)
    """Settings of the section ppo that differ, such as learning_rate; rollout_steps and sequence_length belong to all policies."""
    trainable: bool = True
    """Whether it learns; else it acts with its initial weights."""


@config_class()
class TrainingConfig(ConfigBase):
    """A whole run: together with the versions of the libraries, it determines the result."""

    env: EnvConfig = field(default_factory=EnvConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    collect: CollectConfig = field(default_factory=CollectConfig)
    opponent: OpponentConfig = field(default_factory=OpponentConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    convergence: ConvergenceConfig = field(default_factory=ConvergenceConfig)
    run: RunConfig = field(default_factory=RunConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    policies: dict[str, RoleConfig] = field(default_factory=dict)
    """Several policies by name, such as {scouts: {agents: scout_*}}; empty for one policy that plays all agents. Also as flags:
    --policies.scouts.agents, --policies.scouts.ppo.learning-rate."""

    def __post_init__(self) -> None:
        for name, role in self.policies.items():
            self._check_role(name, role)
        if self.run.backend == "numpy" and self.policy.kind in ("lstm", "gru"):
            raise ConfigError(f"policy.kind={self.policy.kind} can be trained with torch and jax; use run.backend=torch, jax or auto")
        if self.run.backend in ("numpy", "jax") and self.ppo.optimizer == "muon":
            raise ConfigError("ppo.optimizer=muon is only in torch; use run.backend=torch or auto, or ppo.optimizer=adam")
        if self.run.backend == "jax" and self.ppo.compile == "on":
            raise ConfigError("ppo.compile=on compiles torch's step, and run.backend=jax is always compiled; set ppo.compile=off")
        self._check_collectors()
        if self.curriculum.opponent_skills and self.opponent.mode != "heuristic":
            raise ConfigError(f"curriculum.opponent_skills needs opponent.mode=heuristic, not {self.opponent.mode}")
        if self.convergence.stops and self.convergence.returns == "evaluation" and not self.evaluation.interval:
            raise ConfigError(
                f"convergence.target={self.convergence.target:g} is compared with evaluations, and evaluation.interval=0 makes none during "
                "training; set evaluation.interval, or convergence.returns=training"
            )

    def role_policy(self, name: str) -> PolicyConfig:
        """Return the policy section of one of several policies."""
        return self.policy.replace(**self.policies[name].policy)

    def _check_collectors(self) -> None:
        """Refuse collectors without copies, opponents that several cannot share, and rollouts that learn would refuse."""
        collect, opponent, stale = self.collect, self.opponent, self.collect.staleness
        if collect.num_collectors > self.env.num_envs:
            raise ConfigError(
                f"collect.num_collectors={collect.num_collectors} is more than env.num_envs={self.env.num_envs}, which they share; use "
                f"{self.env.num_envs} collectors or fewer"
            )
        if not collect.is_plain and (opponent.mode in ("pool", "self_play") or opponent.skill_start is not None):
            what = "opponent.skill_start" if opponent.skill_start is not None else f"opponent.mode={opponent.mode}"
            raise ConfigError(
                f"{what} needs its opponents in one collector; leave collect.engine, collect.num_collectors and collect.staleness out"
            )
        if stale != "auto" and self.ppo.max_staleness is not None and stale > self.ppo.max_staleness:
            raise ConfigError(
                f"collect.staleness={stale} collects rollouts that ppo.max_staleness={self.ppo.max_staleness} refuses; use the same, or "
                "leave ppo.max_staleness out"
            )

    def _check_role(self, name: str, role: RoleConfig) -> None:
        """Refuse a policy without agents, or with settings that its sections do not have."""
        if not role.agents:
            raise ConfigError(
                f"policies.{name}.agents is missing; give the names of the agents that it plays, or a pattern such as scout_*"
            )
        try:
            kind = self.role_policy(name).kind
            self.ppo.replace(**role.ppo)
        except (ConfigError, TypeError) as error:
            raise ConfigError(f"policies.{name}: {error}") from None
        if "central_critic" in role.policy:
            raise ConfigError(f"policies.{name}.policy.central_critic: all policies share the global state; set policy.central_critic")
        if self.run.backend == "numpy" and kind in ("lstm", "gru"):
            raise ConfigError(f"policies.{name}.policy.kind={kind} can be trained with torch and jax; use run.backend=torch, jax or auto")


def check_minibatches(ppo: PPOConfig, num_lanes: int) -> None:
    """Refuse minibatches that a rollout of `num_lanes` lanes cannot fill; the number of lanes is known once the environment is made."""
    batch = ppo.rollout_steps * num_lanes
    rollout = f"({num_lanes} lanes x {ppo.rollout_steps} steps = {batch}); use {batch} or fewer"
    if ppo.minibatch_size is not None and ppo.minibatch_size > batch:
        raise ConfigError(f"ppo.minibatch_size={ppo.minibatch_size} is larger than the rollout {rollout}, or more env.num_envs")
    if ppo.num_minibatches is not None and ppo.num_minibatches > batch:
        raise ConfigError(f"ppo.num_minibatches={ppo.num_minibatches} is more than the samples of a rollout {rollout}")
