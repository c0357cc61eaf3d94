"""Saved policies by name: `load_policy` of a policy file, a run or a checkpoint, and the players of matches and evaluations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from inchworm.backends.registry import read_description, rebuild_policy
from inchworm.config.sections import TrainingConfig
from inchworm.core.errors import ConfigError
from inchworm.core.protocols import Policy
from inchworm.core.tensor_file import untrusted
from inchworm.core.types import Weights
from inchworm.policy.file import LoadedPolicy, PolicyDescription, read_policy_file
from inchworm.policy.spec import PolicySpec
from inchworm.run.checkpoint import MANIFEST, TrainingCheckpointer
from inchworm.run.directory import CHECKPOINTS, CONFIG, POLICY, Run, open_run

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
    """Load a policy from a policy file, a run directory (its latest policy), a checkpoint directory, or the name of a run in runs/.

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
    target = next((one for one in (Path(path), RUNS / path) if one.exists()), None)
    if target is None:
        raise FileNotFoundError(f"there is no {path}; {EXPECTED}")
    if target.is_dir() and (target / POLICY).is_file():
        target = target / POLICY
    if not target.is_dir():
        return *read_policy_file(target), target
    if (target / MANIFEST).is_file():
        checkpoint = TrainingCheckpointer(target.parent).load(target)
    else:
        checkpoints = TrainingCheckpointer(target / CHECKPOINTS if (target / CHECKPOINTS).is_dir() else target)
        if checkpoints.latest() is None:
            raise ConfigError(f"{target} holds no policy; {EXPECTED}")
        checkpoint = checkpoints.load()
    with untrusted(f"{checkpoint.path} holds no valid policy"):
        described, weights = checkpoint.state.get("spec"), checkpoint.state["weights"]
        if described is not None and "policies" in described:
            return None, weights, checkpoint.path
        description = read_description(described)
        description.check(weights)
        rewards = checkpoint.state["learner"].get("rewards")
        description = description if rewards is None else description.with_rewards(rewards)
    return description, weights, checkpoint.path


def load_named_policy(name: str, *, env: str | None = None) -> tuple[Policy, Path]:
    """Load a policy file, or the latest policy of a run; return it with its path. `env` as for `open_run`."""
    if Path(name).is_file():
        return load_policy(name), Path(name)
    return load_run_policy(open_player(name, env=env))


def open_player(name: str, *, env: str | None = None) -> Run:
    """Open the run that a player is named by; the error lists what else a player may be."""
    return open_run(name, env=env, hint="; a player is a run, a policy file, heuristic, heuristic:0.5 or random")


def is_saved_policy(name: str) -> bool:
    """Whether a name is a policy without the config of a run: a policy file, or a directory with a policy, such as a checkpoint."""
    path = Path(name)
    is_run = any((one / CONFIG).is_file() for one in (path, RUNS / path))
    return bool(name) and path.exists() and not is_run


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
    if policy_names(run) and checkpoint is not None:
        return checkpoints.load_policy(checkpoint).policy, checkpoint
    hint = "omit --best" if best else f"inchworm resume {run.typed} continues its training"
    raise ConfigError(f"the run {run.path} has no {path.name} yet; {hint}")


def policy_file_names(run: Run, *, best: bool = False) -> list[str]:
    """Return the names of a run's policy files: one, or one for each of several policies."""
    path = run.policy_path(best=best)
    return [f"{path.stem}-{name}{path.suffix}" for name in policy_names(run)] or [path.name]


def policy_names(run: Run) -> list[str]:
    """Return the names of a run's policies if it trains several, else an empty list."""
    path = run.policy_path()
    return sorted(part.stem.removeprefix(f"{path.stem}-") for part in run.path.glob(f"{path.stem}-*{path.suffix}"))
