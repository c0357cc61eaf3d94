"""Players by name, and whether they fit a world. Serves matches, suites and the commands.

A player is called `heuristic` (at full strength), `heuristic:0.5` (of that skill), `random`, or by its run or policy file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inchworm.checkpoint import TrainingCheckpointer
from inchworm.config import EnvConfig
from inchworm.env.actors import SKIRMISH, make_actor
from inchworm.env.opposition import check_spaces
from inchworm.errors import ConfigError
from inchworm.policy.weights import load_policy
from inchworm.protocols import Actor, Policy, VectorEnv
from inchworm.run import Run, open_run


def make_player(name: str, env: VectorEnv, source: Any) -> Actor:
    """The player of that name in a world; `source` is what the world was made of."""
    if is_built_in(name):
        return _built_in(name, env, source)
    return named_policy(name, env=source.id if isinstance(source, EnvConfig) else None)[0]


def is_built_in(name: str) -> bool:
    """Whether the name is of a player that needs no file."""
    return name == "random" or name.partition(":")[0] == "heuristic"


def named_policy(name: str, *, env: str | None = None) -> tuple[Policy, Path]:
    """The policy that a name means, and where it is: a file, or the latest of a run; `env` as for `open_run`."""
    if Path(name).is_file():
        return load_policy(name), Path(name)
    return run_policy(player_run(name, env=env))


def player_run(name: str, *, env: str | None = None) -> Run:
    """The run of that name (its directory, or its name in runs/), or one line that says what a player may be."""
    try:
        return open_run(name, env=env)
    except ConfigError as error:
        hint = "; a player is a run, a policy file, heuristic, heuristic:0.5 or random" if "there is no run" in str(error) else ""
        raise ConfigError(f"{error}{hint}") from None


def run_policy(run: Run, *, best: bool = False) -> tuple[Policy, Path]:
    """A run's latest policy or its best, and where it is. Several policies come from a checkpoint, which knows who plays which lane."""
    path = run.policy_path(best=best)
    if path.exists():
        return load_policy(path), path
    kept = TrainingCheckpointer(run.checkpoints)
    checkpoint = kept.best() if best else kept.latest()
    if parts_of(run) and checkpoint is not None:
        return kept.load_policy(checkpoint).policy, checkpoint
    hint = "leave --best out" if best else f"inchworm resume {run.path} trains it further"
    raise ConfigError(f"the run {run.path} has no {path.name} yet; {hint}")


def parts_of(run: Run) -> list[str]:
    """The names of a run's policies, where it trains several; empty where it trains one."""
    path = run.policy_path()
    return sorted(part.stem.removeprefix(f"{path.stem}-") for part in run.path.glob(f"{path.stem}-*{path.suffix}"))


def _built_in(name: str, env: VectorEnv, source: Any) -> Actor:
    if name == "random":
        return make_actor(name, env.action_space, "")
    if not isinstance(source, EnvConfig) or source.id != SKIRMISH:
        world = source.id if isinstance(source, EnvConfig) else "this environment"
        raise ConfigError(f"{world} has no heuristic, which plays {SKIRMISH} alone; give a run, a policy file or random")
    return make_actor(name, env.action_space, source.id, source.kwargs)


def skirmish_env(config: Any) -> EnvConfig:
    """A game of Skirmish as an env config: of its id, of its rules (also as a mapping), or as it is."""
    from inchworm.env.skirmish import SkirmishConfig

    if config == SKIRMISH:
        return EnvConfig(id=SKIRMISH)
    if isinstance(config, Mapping):
        config = SkirmishConfig.from_dict(config)
    if isinstance(config, SkirmishConfig):
        return EnvConfig(id=SKIRMISH, kwargs=config.to_dict())
    if not isinstance(config, EnvConfig) or config.id != SKIRMISH:
        found = f"the id {config.id}" if isinstance(config, EnvConfig) else type(config).__name__
        raise ConfigError(f'the heuristic plays {SKIRMISH} alone, not {found}; give EnvConfig(id="{SKIRMISH}") or a SkirmishConfig')
    return config


def check_made_for(actor: Actor, env: VectorEnv, who: str) -> None:
    """Refuse a player that was made for another world; one that does not say what it was made for is found out when it acts."""
    if not isinstance(actor, Actor):
        raise ConfigError(f"{who} is of type {type(actor).__name__} and cannot act: it needs initial_state and act (see inchworm.Actor)")
    check_spaces(actor, env.observation_space, env.action_space, who)
