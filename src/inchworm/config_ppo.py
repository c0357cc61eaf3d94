"""The knobs of learning from a rollout. Serves `config`."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from inchworm.config_base import STRICT, ConfigBase, check_positive, check_range, in_words
from inchworm.errors import ConfigError

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
