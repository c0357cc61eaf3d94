"""Every knob of a run: typed, frozen, strict, documented once. The CLI's flags and the docs' table come from here.

`from_dict` and `from_yaml` also take the spellings of older trainers (`clip_range`, `n_epochs`, `lr`, …) and report each with
a `LegacyNameWarning`; constructors take the names below and no others.
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic.dataclasses import dataclass

from inchworm.config_base import MOST_COPIES, STRICT, ConfigBase, LegacyNameWarning, check_name, check_path, check_range, in_words
from inchworm.config_env import EnvConfig, WrapperConfig
from inchworm.config_opponent import OpponentConfig
from inchworm.config_policy import PolicyConfig
from inchworm.config_ppo import PPOConfig, Schedule
from inchworm.errors import ConfigError

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
class CollectConfig(ConfigBase):
    """How rollouts are gathered."""

    groups: Literal[1, 2] = 1
    """Groups of copies that act and step in turns: with 2 and workers, one half steps while the policy acts for the other."""
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
