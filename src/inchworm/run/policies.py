"""Saved policies by name: `load_policy` of a policy file, a run or a checkpoint, and the players of matches and evaluations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from inchworm.backends.registry import read_description, rebuild_policy
from inchworm.collect.actors import make_actor
from inchworm.config.sections import EnvConfig, TrainingConfig
from inchworm.core.errors import ConfigError
from inchworm.core.protocols import Actor, Policy, VectorEnv
from inchworm.core.tensor_file import untrusted
from inchworm.core.types import Weights
from inchworm.env.source import env_source
from inchworm.policy.file import LoadedPolicy, PolicyDescription, read_policy_file
from inchworm.policy.spec import PolicySpec
from inchworm.run.checkpoint import MANIFEST, TrainingCheckpointer, load_checkpoint
from inchworm.run.directory import CHECKPOINTS, CONFIG, POLICY, Run, open_run
from inchworm.run.store import is_versioned, read_version

if TYPE_CHECKING:
    from inchworm.backends.torch.network import Network

PolicyT = TypeVar("PolicyT", bound=Policy)
RUNS = Path("runs")
EXPECTED = f"expected a policy file, a run directory (with {POLICY}) or a checkpoint directory (with {MANIFEST})"


@overload
def load_policy(
    path: str | Path, backend: str = ..., *, network: Network | Callable[[PolicySpec], Network] | None = ..., policy: None = ...
) -> LoadedPolicy: ...


@overload
def load_policy(path: str | Path, backend: str = ..., *, network: None = ..., policy: PolicyT) -> PolicyT: ...


@overload
def load_policy(path: str | Path, backend: str = ..., *, network: None = ..., policy: Callable[[], PolicyT]) -> PolicyT: ...


def load_policy(path: str | Path, backend: str = "auto", *, network: Any = None, policy: Any = None) -> Any:
    """Load a policy from a policy file, a run directory (its latest policy), a checkpoint directory, or the name of a run in runs/; or a
    version of a `PolicyStore`, as `policies@best` or `models:/NAME@best`.

    `backend="auto"` acts in NumPy where that is possible, and imports torch only for convolutions and networks of your own. Files never
    import code: for a network of your own pass its class, what makes it from the spec, or an instance as `network`; for a policy class of
    your own an instance, or what makes one without arguments, as `policy`. An instance gets the weights and is returned.
    """
    description, weights, found = read_saved(path)
    if description is None:
        names = sorted({name.partition("/")[0] for name in weights if "/" in name})
        raise ConfigError(
            f"{found} holds several policies ({', '.join(names)}); load one by its file, such as {POLICY.replace('.', f'-{names[0]}.')} of "
            "the run, or all with TrainingCheckpointer.load_policy"
        )
    return rebuild_policy(description, weights, str(found), backend=backend, network=network, policy=policy)


def read_saved(path: str | Path) -> tuple[PolicyDescription | None, Weights, Path]:
    """Read the description and weights of what `load_policy` takes, and return them with the path where they were found.

    Several policies have no single description, and weights named `part/weight`.
    """
    if is_versioned(path):
        return *read_version(str(path)), Path(path)
    target = next((one for one in (Path(path), RUNS / path) if one.exists()), None)
    if target is None:
        raise FileNotFoundError(f"there is no {path}; {EXPECTED}")
    if target.is_dir() and (target / POLICY).is_file():
        target = target / POLICY
    if not target.is_dir():
        return *read_policy_file(target), target
    checkpoints = target / CHECKPOINTS if (target / CHECKPOINTS).is_dir() else target
    if not (checkpoints / MANIFEST).is_file() and TrainingCheckpointer(checkpoints).latest() is None:
        raise ConfigError(f"{target} holds no policy; {EXPECTED}")
    checkpoint = load_checkpoint(checkpoints)
    with untrusted(f"{checkpoint.path} holds no valid policy"):
        described, weights = checkpoint.state.get("spec"), checkpoint.state["weights"]
        if described is not None and "policies" in described:
            return None, weights, checkpoint.path
        description = read_description(described)
        description.check(weights)
        rewards = checkpoint.state["learner"].get("rewards")
        description = description if rewards is None else description.with_rewards(rewards)
    return description, weights, checkpoint.path


def is_built_in(name: str) -> bool:
    """Tell whether the name is of a player that needs no file."""
    return name == "random" or name.partition(":")[0] == "heuristic"


def make_player(name: str, source: Any, env: VectorEnv | None = None) -> tuple[Actor, str]:
    """Make or load the player of that name; return it with its name in results, which is the path of a loaded policy.

    A name is random, heuristic, heuristic:0.5, a policy file or a run. Built-in players are made for `env`, which was made from `source`.
    """
    if is_one_policy(name):
        return load_policy(name), name
    given = None if source is None else env_source(source).given
    config = EnvConfig(id=given) if isinstance(given, str) else given if isinstance(given, EnvConfig) else None
    if not is_built_in(name) or env is None:
        policy, path = load_run_policy(open_player(name, env=None if config is None else config.id))
        return policy, str(path)
    if name == "random":
        return make_actor(name, env.action_space, ""), name
    if config is None:
        raise ConfigError("this environment has no heuristic; give a run, a policy file or random")
    return make_actor(name, env.action_space, config.id, config.kwargs), name


def open_player(name: str, *, env: str | None = None) -> Run:
    """Open the run that a player is named by; the error lists what else a player may be."""
    return open_run(name, env=env, hint="; a player is a run, a policy file, heuristic, heuristic:0.5 or random")


def is_one_policy(name: str) -> bool:
    """Whether a name is a policy by itself: a policy file, or a version in a `PolicyStore` or in MLflow's registry."""
    return Path(name).is_file() or is_versioned(name)


def is_saved_policy(name: str) -> bool:
    """Whether a name is a policy without the config of a run: a policy file, or a directory with a policy, such as a checkpoint."""
    path = Path(name)
    is_run = any((one / CONFIG).is_file() for one in (path, RUNS / path))
    return bool(name) and (path.exists() or is_versioned(name)) and not is_run


def run_of(name: str, *, env: str | None = None) -> Run | None:
    """The run that holds a policy file or checkpoint, which knows the environment; None if none does, or if `env` is another one."""
    directory = Path(name).absolute().parent
    directory = directory.parent if directory.name == CHECKPOINTS else directory
    if not (directory / CONFIG).is_file() or (env is not None and TrainingConfig.from_yaml(directory / CONFIG).env.id != env):
        return None
    return open_run(directory, env=env)


def load_run_policy(run: Run, *, best: bool = False) -> tuple[Policy, Path]:
    """Load a run's latest or best policy; return it with its path. Several policies are loaded from a checkpoint, with their lanes."""
    path = run.policy_path(best=best)
    if path.exists():
        return load_policy(path), path
    checkpoints = TrainingCheckpointer(run.checkpoints)
    checkpoint = checkpoints.best() if best else checkpoints.latest()
    if run.policy_names and checkpoint is not None:
        return checkpoints.load_policy(checkpoint).policy, checkpoint
    hint = "omit --best" if best else f"inchworm resume {run.typed} continues its training"
    raise ConfigError(f"the run {run.path} has no {path.name} yet; {hint}")
