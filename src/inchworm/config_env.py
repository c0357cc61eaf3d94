"""The knobs of the environments that a run is made of. Serves `config`."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from inchworm.config_base import MOST_COPIES, STRICT, ConfigBase, check_plain, check_positive, check_range, in_words
from inchworm.errors import ConfigError


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
