"""Every knob of a run: typed, frozen, strict, documented once. The CLI's flags and the docs' table come from here.

`from_dict` and `from_yaml` also take the spellings of older trainers (`clip_range`, `n_epochs`, `lr`, …) and report each with
a `LegacyNameWarning`; constructors take the names below and no others.
"""

from __future__ import annotations

import math
from dataclasses import field
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from inchworm.config.reading import (
    MOST_COPIES,
    STRICT,
    ConfigBase,
    LegacyNameWarning,
    check_name,
    check_path,
    check_plain,
    check_positive,
    check_range,
    in_words,
)
from inchworm.core.errors import ConfigError

__all__ = [
    "CollectConfig",
    "EnvConfig",
    "EvalConfig",
    "LegacyNameWarning",
    "OpponentConfig",
    "PPOConfig",
    "PolicyConfig",
    "RunConfig",
    "Schedule",
    "TrainingConfig",
    "WrapperConfig",
]


@in_words
@dataclass(frozen=True, kw_only=True, config=STRICT)
class WrapperConfig(ConfigBase):
    """One wrapper of `gymnasium.wrappers`, by its class name."""

    name: str
    """The class name, such as FlattenObservation or ClipReward."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Its arguments, besides the environment."""

    def __post_init__(self) -> None:
        check_plain(self.kwargs, f"env.wrappers: {self.name}: kwargs")


@in_words
@dataclass(frozen=True, kw_only=True, config=STRICT)
class EnvConfig(ConfigBase):
    """The world and how many copies of it run."""

    id: str = "CartPole-v1"
    """A Gymnasium id, or package.module:make_env for a factory of yours (taken from the command line only, never from a file)."""
    num_envs: int = 8
    """Copies of the environment; one with several agents fills a lane for each of them."""
    num_workers: int | Literal["auto"] = "auto"
    """Processes that step the copies; 0 steps them in this process. auto looks at the environment for a moment and chooses."""
    help_workers: bool = False
    """Step a share of the copies in this process while the workers step theirs: as many processes as cores, and nobody waits."""
    worker_timeout: float = 60.0
    """Seconds after which a worker that does not answer counts as hung."""
    worker_restarts: int = 10
    """How often workers that died or hung are replaced within ten minutes, before one more ends the run; 0: the first one does."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment."""
    max_episode_steps: int | None = None
    """Truncate episodes after this many steps; none keeps the registered limit."""
    wrappers: tuple[WrapperConfig, ...] = ()
    """Wrappers of gymnasium.wrappers, innermost first."""
    atari: bool = False
    """The usual Atari preprocessing: no-op starts, frame skip 4 with max, 84x84 grey, end of life ends training episodes, sign rewards."""
    frame_stack: int = 1
    """How many last observations are stacked along a new first axis."""
    native: bool = True
    """Step Gymnasium's own vectorised version where there is one that gives the same bits."""

    def __post_init__(self) -> None:
        check_range(self, "num_envs", 1, MOST_COPIES)
        check_range(self, "max_episode_steps", 1, None)
        check_range(self, "frame_stack", 1, 1_000)
        check_plain(self.kwargs, "env.kwargs")
        if self.num_workers != "auto":
            check_range(self, "num_workers", 0, None)
            if int(self.num_workers) > self.num_envs:
                raise ConfigError(
                    f"env.num_workers={self.num_workers} is more than env.num_envs={self.num_envs}; use {self.num_envs} workers or fewer"
                )
            if self.help_workers and not 1 <= int(self.num_workers) < self.num_envs:
                raise ConfigError(f"env.help_workers needs 1 to {self.num_envs - 1} env.num_workers to help, not {self.num_workers}")
        check_positive(self, "worker_timeout")
        check_range(self, "worker_timeout", 0.0, 1e6)
        check_range(self, "worker_restarts", 0, None)
        if not self.id.strip():
            raise ConfigError("env.id is empty; give a Gymnasium id such as CartPole-v1")
        if not self.id.isprintable():
            raise ConfigError(f"env.id={self.id!r:.200} holds characters that cannot be printed; give a Gymnasium id such as CartPole-v1")

    @property
    def may_have_teams(self) -> bool:
        """Whether a copy may have several lanes, which only the environment itself can say: it is a factory's, or a world of teams."""
        return ":" in self.id or self.id.startswith("Skirmish-")


_MOST = 100_000


@in_words
@dataclass(frozen=True, kw_only=True, config=STRICT)
class OpponentConfig(ConfigBase):
    """Who plays the other team, in a world that has two."""

    mode: Literal["none", "random", "heuristic", "pool", "self_play"] = "none"
    """none: the policy plays every lane. pool draws from anchors and policies, self_play from the policy's own past."""
    skill: float = 1.0
    """Of the heuristic, from 0 to 1."""
    skill_start: float | None = None
    """Begin with this skill and raise it to skill, a tenth at a time, as the policy wins; none begins with skill."""
    skill_threshold: float = 0.6
    """Win rate over the last games, 20 at least, at which the heuristic's skill is raised."""
    sides: Literal["alternate", "first", "second"] = "alternate"
    """Which team is ours: the first in even copies and the second in odd ones, or the same one in all."""
    pool_size: int = 10
    """Past selves that are kept; beyond it the one that is beaten most often leaves, never the newest."""
    snapshot_interval: int = 20
    """Iterations after which the policy joins its past selves."""
    pfsp_power: float = 2.0
    """Members are drawn by (1 - win rate) to this power: 0 draws all alike, more prefers those that win."""
    latest_share: float = 0.5
    """Share of self-play games against the newest past self."""
    anchor_share: float = 0.0
    """Share of self-play games against the anchors."""
    anchors: tuple[str, ...] = ()
    """Fixed players: random, heuristic, heuristic:0.5. None given: random, and the heuristic at 0.5 and 1 where the world has one."""
    policies: tuple[str, ...] = ()
    """Policy files that are fixed players, too."""
    rating_interval: int = 20
    """Iterations between ratings against the fixed players, in pool and self_play; 0 rates nobody."""
    rating_episodes: int = 20
    """Episodes of a rating against each fixed player, half of them from either side (an odd number is rounded up)."""

    def __post_init__(self) -> None:
        for name in ("skill", "skill_start", "skill_threshold", "latest_share", "anchor_share"):
            check_range(self, name, 0.0, 1.0)
        check_range(self, "pool_size", 1, _MOST)
        check_range(self, "snapshot_interval", 1, None)
        check_range(self, "pfsp_power", 0.0, 100.0)
        check_range(self, "rating_interval", 0, None)
        check_range(self, "rating_episodes", 1, _MOST)
        check_positive(self, "skill_threshold")
        if self.skill_start is not None and self.skill_start > self.skill:
            raise ConfigError(
                f"opponent.skill_start={self.skill_start} is above opponent.skill={self.skill}; begin with {self.skill} or less"
            )
        if self.latest_share + self.anchor_share > 1.0:
            raise ConfigError(
                f"opponent.latest_share={self.latest_share} and opponent.anchor_share={self.anchor_share} are more than 1 together"
            )
        for index, name in enumerate(self.anchors):
            try:
                read_opponent(name)
            except ConfigError as error:
                raise ConfigError(f"opponent.anchors[{index}]: {error}") from None
        for index, path in enumerate(self.policies):
            check_path(path, f"opponent.policies[{index}]")


def read_opponent(name: str) -> tuple[Literal["random", "heuristic"], float]:
    """The kind and the skill that a name means."""
    kind, colon, text = name.partition(":")
    if name == "random":
        return "random", 0.0
    if kind != "heuristic":
        raise ConfigError(f"there is no opponent called {name!r:.80}; use random, heuristic, or heuristic:0.5 for one of that skill")
    try:
        skill = float(text) if colon else 1.0
    except ValueError:
        skill = math.nan
    if not 0.0 <= skill <= 1.0:
        raise ConfigError(f"{name!s:.80} has no skill from 0 to 1; write heuristic:0.5")
    return "heuristic", skill


Activation = Literal["tanh", "relu", "elu", "leaky_relu", "silu"]


@in_words
@dataclass(frozen=True, kw_only=True, config=STRICT)
class PolicyConfig(ConfigBase):
    """The network and its normalisers."""

    kind: Literal["mlp", "cnn", "lstm", "gru"] = "mlp"
    """mlp flattens every observation; cnn sends images through convolutions first; lstm and gru remember, and convolve images, too."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers, of actor and critic alike."""
    activation: Activation = "tanh"
    """Between the layers."""
    shared_trunk: bool = False
    """One trunk for actor and critic instead of one each."""
    orthogonal_init: bool = True
    """Orthogonal weights with gains sqrt 2 (hidden), 0.01 (actions), 1 (value); else uniform by fan-in."""
    log_std_init: float = 0.0
    """Initial log standard deviation of Gaussian actions."""
    action_bounds: Literal["clip", "tanh"] = "clip"
    """How a Gaussian action is brought into a Box: clipped on its way to the environment, or squashed."""
    normalize_observations: bool = False
    """Scale continuous observations by running mean and standard deviation, inside the policy."""
    normalize_values: bool = False
    """Let the value head predict normalised returns (PopArt)."""
    observation_clip: float = 10.0
    """Bound of normalised observations."""
    cnn_filters: tuple[tuple[int, int, int], ...] = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
    """Convolutions as (channels, kernel, stride)."""
    cnn_features: int = 512
    """Width of the layer after the convolutions."""
    memory_size: int = 64
    """Width of the memory of lstm and gru; actor and critic read the same one, so turn normalize_values on where returns are large."""
    memory_layers: int = 1
    """Recurrent layers, one above the other."""
    memory_place: Literal["before", "after"] = "after"
    """Where the memory stands: after the hidden layers, which actor and critic then share, or before them."""
    central_critic: bool = False
    """Let the critic also read the world's global state, which no actor sees; what follows an agent's death is then credited to it."""

    def __post_init__(self) -> None:
        check_range(self, "memory_size", 1, MOST_COPIES)
        check_range(self, "memory_layers", 1, 100)
        for index, size in enumerate(self.hidden_sizes):
            if not 1 <= size <= MOST_COPIES:
                raise ConfigError(f"policy.hidden_sizes[{index}]={size!r:.80} must be from 1 to {MOST_COPIES}")
        for index, layer in enumerate(self.cnn_filters):
            if min(layer) < 1 or max(layer) > 10_000:
                raise ConfigError(f"policy.cnn_filters[{index}]={layer!r:.80} must be (channels, kernel, stride), each from 1 to 10000")
        check_range(self, "cnn_features", 1, MOST_COPIES)
        check_positive(self, "observation_clip")
        check_range(self, "log_std_init", -20.0, 5.0)


Schedule = Literal["constant", "linear", "cosine"]

_MEMORY_LENGTH = 32
"""Steps that a policy with memory learns from in a row, if nobody says how many."""


@in_words
@dataclass(frozen=True, kw_only=True, config=STRICT)
class PPOConfig(ConfigBase):
    """How the policy learns from a rollout."""

    learning_rate: float = 3e-4
    """Adam's step size at the start of the run."""
    gamma: float = 0.99
    """Discount of the next step's value."""
    gae_lambda: float = 0.95
    """GAE's trade between bias (0: one-step TD) and variance (1: Monte Carlo)."""
    clip_coef: float = 0.2
    """How far the probability ratio may move from 1 before its gradient is cut."""
    vf_coef: float = 0.5
    """Weight of the value loss, which is half the mean squared error (a loss without the half needs half this weight)."""
    ent_coef: float = 0.01
    """Weight of the entropy bonus."""
    max_grad_norm: float | None = 0.5
    """Global norm that gradients are scaled down to; none leaves them alone."""
    update_epochs: int = 4
    """Passes over each rollout."""
    rollout_steps: int = 512
    """Steps that every lane takes per iteration; times the lanes this is the batch."""
    num_minibatches: int | None = None
    """Minibatches per epoch; 8 unless minibatch_size is given."""
    minibatch_size: int | None = None
    """Samples per minibatch, instead of num_minibatches; a rollout that has fewer is one minibatch."""
    gradient_accumulation: int = 1
    """Micro-batches whose gradients are added up before each optimiser step; the result is the same, the memory less."""
    normalize_advantages: Literal["batch", "minibatch", "off"] = "batch"
    """Over what advantages are given mean 0 and standard deviation 1 (n - 1) before the loss."""
    clip_vloss: bool = False
    """Also bound how far the value moves from the one before the update, by clip_coef in units of the value scale."""
    target_kl: float | None = None
    """Leave the epochs once an epoch's mean approx_kl is above 1.5 times this."""
    adam_eps: float = 1e-5
    """Adam's epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay (AdamW); 0 is plain Adam."""
    learning_rate_schedule: Schedule = "constant"
    """How learning_rate moves to 0 over the run's total_timesteps."""
    clip_schedule: Schedule = "constant"
    """The same for clip_coef."""
    ent_schedule: Schedule = "constant"
    """The same for ent_coef."""
    sequence_length: int | Literal["auto"] = "auto"
    """Steps that are evaluated in a row; auto is 1 without memory, else 32 or the rollout if that is shorter."""
    max_staleness: int | None = None
    """Refuse rollouts made by weights more than this many updates old; none only reports it."""
    compile: Literal["off", "on", "auto"] = "off"
    """Compile torch's minibatch step as one graph; auto does it if the run is long enough to repay the compiling."""

    def __post_init__(self) -> None:
        check_range(self, "learning_rate", 0.0, None)
        for name in ("gamma", "gae_lambda"):
            check_range(self, name, 0.0, 1.0)
        for name in ("clip_coef", "vf_coef", "ent_coef", "weight_decay"):
            check_range(self, name, 0.0, None)
        for name in ("update_epochs", "rollout_steps", "num_minibatches", "minibatch_size", "gradient_accumulation"):
            check_range(self, name, 1, None)
        for name in ("max_grad_norm", "target_kl", "adam_eps"):
            check_positive(self, name)
        check_range(self, "max_staleness", 0, None)
        if self.sequence_length != "auto":
            check_range(self, "sequence_length", 1, self.rollout_steps)
        if self.num_minibatches is not None and self.minibatch_size is not None:
            raise ConfigError(
                f"ppo.num_minibatches={self.num_minibatches} and ppo.minibatch_size={self.minibatch_size} say the same thing twice; "
                "give one of them and leave the other out (null)"
            )

    def sequence_length_for(self, num_steps: int, *, memory: bool) -> int:
        """L for a rollout of `num_steps` steps: what the config says, else 1 without memory and up to 32 with it."""
        if self.sequence_length != "auto":
            return min(int(self.sequence_length), max(1, num_steps))
        return max(1, min(num_steps, _MEMORY_LENGTH)) if memory else 1

    def minibatches_for(self, num_sequences: int, sequence_length: int = 1) -> int:
        """Into how many minibatches an epoch over `num_sequences` sequences is split."""
        if self.minibatch_size is None:
            return max(1, min(self.num_minibatches or 8, num_sequences))
        per_minibatch = max(1, self.minibatch_size // sequence_length)
        return max(1, -(-num_sequences // per_minibatch))


@in_words
@dataclass(frozen=True, kw_only=True, config=STRICT)
class CollectConfig(ConfigBase):
    """How rollouts are gathered."""

    max_replay_steps: int = 100_000
    """Actions of a running episode that are kept for replay; a longer episode starts afresh after a resume."""

    def __post_init__(self) -> None:
        check_range(self, "max_replay_steps", 0, None)


@in_words
@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvalConfig(ConfigBase):
    """How the policy is scored, on environments of its own."""

    interval: int = 50
    """Iterations between evaluations; 0 evaluates at the end only. Never at step 0, always at the end."""
    episodes: int = 20
    """Episodes of each evaluation during training."""
    final_episodes: int = 100
    """Episodes of the evaluation at the end; 0 leaves it out."""
    num_envs: int = 8
    """Copies of the environment that evaluation uses."""
    deterministic: bool = True
    """Act greedily (else sample)."""
    seed: int = 1_000_003
    """Evaluation episodes are derived from this seed, the same ones each time."""

    def __post_init__(self) -> None:
        for name in ("interval", "final_episodes", "seed"):
            check_range(self, name, 0, None)
        check_range(self, "episodes", 1, None)
        check_range(self, "num_envs", 1, MOST_COPIES)


@in_words
@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunConfig(ConfigBase):
    """The run as a whole."""

    name: str | None = None
    """Directory name of the run; a name that exists continues that run. None makes a unique one."""
    directory: str = "runs"
    """Where runs are kept."""
    seed: int = 0
    """Everything random in the run is derived from this."""
    total_timesteps: int = 100_000
    """Stop once this many env steps have been taken, counted from the run's beginning."""
    max_iterations: int | None = None
    """Stop after this many iterations, if that is sooner."""
    max_episodes: int | None = None
    """Stop after this many finished episodes, if that is sooner."""
    backend: Literal["torch", "numpy"] = "torch"
    """What learns: torch, or NumPy with gradients by hand, for MLP policies: no torch in the process, and faster with small networks."""
    device: str = "auto"
    """Where it learns: auto is cuda if there is one, else cpu."""
    threads: int = 1
    """Threads of torch on the CPU, part of the result's bits; NumPy uses one. 0 leaves both as they are."""
    checkpoint_interval: int = 50
    """Iterations between checkpoints; 0 writes one at the end only."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept."""
    keep_best: bool = True
    """Keep the checkpoint of the best evaluation, too: one is written whenever an evaluation has never been better."""
    log_interval: int = 1
    """Iterations between rows of metrics."""

    def __post_init__(self) -> None:
        for name in ("seed", "checkpoint_interval"):
            check_range(self, name, 0, None)
        check_range(self, "threads", 0, 1_024)
        for name in ("total_timesteps", "max_iterations", "max_episodes", "log_interval"):
            check_range(self, name, 1, None)
        check_range(self, "keep_checkpoints", 2, None)
        if self.name is not None:
            check_name(self.name, "run.name")
        check_path(self.directory, "run.directory")


@in_words
@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainingConfig(ConfigBase):
    """A whole run: with the library's versions, all that decides its result."""

    env: EnvConfig = field(default_factory=EnvConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    collect: CollectConfig = field(default_factory=CollectConfig)
    opponent: OpponentConfig = field(default_factory=OpponentConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        if self.run.backend == "numpy" and self.policy.kind in ("lstm", "gru"):
            raise ConfigError(f"policy.kind={self.policy.kind} learns in torch only (it acts in NumPy by itself); use run.backend=torch")
        if not self.env.may_have_teams:  # else a copy may have more lanes than one, and who makes it looks again
            check_minibatches(self.ppo, self.env.num_envs)


def check_minibatches(ppo: PPOConfig, num_lanes: int) -> None:
    """Refuse minibatches that a rollout of so many lanes cannot fill."""
    batch = ppo.rollout_steps * num_lanes
    if ppo.minibatch_size is not None and ppo.minibatch_size > batch:
        raise ConfigError(
            f"ppo.minibatch_size={ppo.minibatch_size} is larger than the rollout ({num_lanes} lanes x "
            f"{ppo.rollout_steps} steps = {batch}); use {batch} or fewer, or more env.num_envs"
        )
    if ppo.num_minibatches is not None and ppo.num_minibatches > batch:
        raise ConfigError(
            f"ppo.num_minibatches={ppo.num_minibatches} is more than the samples of a rollout ({num_lanes} lanes x "
            f"{ppo.rollout_steps} steps = {batch}); use {batch} or fewer"
        )
