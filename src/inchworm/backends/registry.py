"""Backends by name: which one acts, learns and computes advantages for a policy. A backend is imported when it is first used.

A backend is a module with the functions of `Backend`; `register_backend` adds one from another package.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

import numpy as np
import threadpoolctl

from inchworm.backends.corrections import log_ratios_of
from inchworm.config.sections import BACKENDS, EnvConfig, PPOConfig, RunConfig, TrainingConfig
from inchworm.core.errors import ConfigError, InchwormError, MissingExtraError
from inchworm.core.protocols import Actor, Learner, Policy, VectorEnv
from inchworm.core.types import Advantages, Array
from inchworm.policy.composite import CompositePolicy, weights_of
from inchworm.policy.file import PolicyDescription, class_path, describe, set_weights
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.rollout import Rollout


class Backend(Protocol):
    """The functions of a backend's module."""

    def make_policy(self, spec: PolicySpec, weights: Mapping[str, np.ndarray] | None, seed: int) -> Policy:
        """A policy that can be trained. Its attributes `backend` and `builtin` are the backend's name and True."""

    def policy_with_network(self, spec: PolicySpec, network: Any) -> Policy:
        """A policy with a network of the user's: an instance, or what makes one from the spec. Only for backends that train such."""

    def make_learner(self, policy: Policy, config: TrainingConfig, dump_directory: str | Path | None) -> Learner:
        """The learner of a policy."""

    def compute_advantages(self, policy: Policy, rollout: Rollout, config: PPOConfig, log_ratios: np.ndarray | None = None) -> Advantages:
        """See `compute_advantages`; `log_ratios` [T, B] are only given with `ppo.correction`."""

    def log_probs(self, policy: Policy, rollout: Rollout, config: PPOConfig) -> np.ndarray:
        """See `log_probs`."""

    def compute_gae(
        self, rewards: Any, values: Any, next_values: Any, terminated: Any, truncated: Any, gamma: float, gae_lambda: float
    ) -> Any:
        """See `compute_gae`."""

    def acting_policy(self, policy: Policy) -> Actor:
        """See `acting_policy`."""

    def to_array(self, value: object) -> np.ndarray | None:
        """A copy of one of the framework's tensors as an array; None for anything else."""

    def from_array(self, array: np.ndarray, like: Any = None) -> Any:
        """A copy of an array as one of the framework's tensors, on the device of `like`."""

    # Optional: a framework whose threads can be set, or that has a global random generator, has these.
    def threads(self, count: int) -> contextlib.AbstractContextManager[None]:
        """Use `count` CPU threads inside."""

    def num_threads(self) -> int:
        """The current number of CPU threads."""

    def cpu_capability(self) -> str:
        """The vector instructions in use, which decide the last bits of a result."""

    def generator_state(self) -> Any:
        """The state of the framework's global random generator, as plain data."""

    def restore_generator(self, state: Any) -> None:
        """Restore what `generator_state` returned."""

    # Optional: a backend that steps some environments itself has these.
    def native_choice(self, config: EnvConfig) -> tuple[bool, str]:
        """Whether it steps the copies of a config itself, and the reason, a sentence that may be empty."""

    def make_native_env(self, config: EnvConfig, **options: Any) -> VectorEnv:
        """The copies of a config for which `native_choice` is true, as one vector env."""

    def make_native_collector(self, policy: Policy, env: VectorEnv, *, seed: int, sequence_length: int) -> Any | None:
        """The collector that steps such a vector env itself; None for any other environment or policy."""

    def fuse(self, policy: Policy, collector: Any, learner: Learner, config: TrainingConfig) -> Any | str:
        """Collect and learn as one program, a `train.loop.FusedStep`; or why that cannot be, in a few words."""

    def prefers_one_program(self) -> bool:
        """Whether several seeds are trained faster in one program, by `FusedStep.together`, than in processes."""

    def join_ranks(self, timeout: float) -> Any:
        """This process's place among several that learn together, a `Ranks` of `backends/learner`."""

    def checking(self) -> ModuleType:
        """The functions that `check_policy` needs; see `backends/torch/checking`. Only for backends that train networks of users."""

    def exporting(self) -> ModuleType:
        """The functions that write a policy as a graph; see `backends/torch/export`. Only for backends that can."""


def register_backend(name: str, module: str) -> None:
    """Add a backend: from now on `run.backend` accepts `name`, and `module` is imported when it is used."""
    if BACKENDS.get(name, module) != module:
        raise ConfigError(f"the backend {name} is already registered as {BACKENDS[name]}; choose another name")
    BACKENDS[name] = module


def get_backend(name: str) -> Backend:
    """The backend of a name."""
    if name not in BACKENDS:
        raise ConfigError(f"there is no backend {name!r:.80}; use one of {', '.join(BACKENDS)}")
    try:
        return cast(Backend, importlib.import_module(BACKENDS[name]))
    except ModuleNotFoundError as error:
        if error.name != name:  # a backend is called as its framework
            raise
        raise MissingExtraError(f'run.backend={name} needs {name}, which is not installed; type: pip install "inchworm[{name}]"') from error


def backend_of(policy: Policy) -> Backend:
    """The backend of a policy: the one that it names, or torch, which trains networks of users."""
    return get_backend(getattr(policy, "backend", "torch"))


def framework_of(value: object) -> str:
    """The name of the backend whose framework made an array; "numpy" for anything else, such as a list."""
    framework = type(value).__module__.partition(".")[0].removesuffix("lib")  # JAX's arrays are of jaxlib
    return framework if framework in BACKENDS else "numpy"


def backend_of_array(value: object) -> Backend:
    """The backend whose framework made an array; NumPy for anything else, such as a list."""
    return get_backend(framework_of(value))


def imported_backends() -> dict[str, Backend]:
    """The backends whose framework (the package of the same name) this process has imported: those whose state is worth saving."""
    return {name: get_backend(name) for name, module in BACKENDS.items() if sys.modules.get(name) or module in sys.modules}


def make_policy(spec: PolicySpec, *, seed: int = 0, weights: Mapping[str, np.ndarray] | None = None, backend: str = "torch") -> Policy:
    """A policy that can be trained, from its spec."""
    return get_backend(backend).make_policy(spec, weights, seed)


def acting_policy(policy: Actor) -> Actor:
    """The actor of a policy during training: a NumPy copy where that is faster, else the policy itself."""
    if isinstance(policy, CompositePolicy):
        return policy.replaced({name: acting_policy(part) for name, part in policy.policies.items()})
    return backend_of(policy).acting_policy(policy) if isinstance(policy, Policy) else policy


def is_builtin(policy: Actor) -> bool:
    """Whether a policy is fully described by its spec and weights; a composite is not, its parts may be."""
    return bool(getattr(policy, "builtin", False))


def policy_files(policy: Actor, name: str, weights: Mapping[str, np.ndarray]) -> dict[str, tuple[Policy, Mapping[str, np.ndarray]]]:
    """What the policy files of a policy hold, by file name: one file, or for a composite one for each part that has weights."""
    if isinstance(policy, CompositePolicy):
        stem, _, kind = name.rpartition(".")
        return {f"{stem}-{part}.{kind}": (learned, weights_of(weights, part)) for part, learned in policy.learned.items()}
    return {name: (policy, weights)} if isinstance(policy, Policy) else {}


def describe_policy(policy: Actor) -> dict[str, Any] | None:
    """The description of a policy, or of the parts of a composite, as plain data; None for an actor. Checkpoints hold it."""
    if isinstance(policy, CompositePolicy):
        return policy.to_dict(describe_policy)
    if is_builtin(policy):
        return cast(Any, policy).spec.to_dict()  # type: ignore[no-any-return]
    return describe(policy).to_dict() if isinstance(policy, Policy) else None


def read_description(described: Mapping[str, Any] | None) -> PolicyDescription:
    """What `describe_policy` returned for one policy; checkpoints of early versions have None for a user's."""
    if described is None:
        return PolicyDescription(None, "policy", "unknown:class")
    return PolicyDescription.from_dict({"spec": described} if "observation_space" in described else described)


def rebuild_policy(
    description: PolicyDescription,
    weights: Mapping[str, np.ndarray],
    where: str,
    *,
    backend: str = "auto",
    network: Any = None,
    policy: Any = None,
) -> Policy:
    """A policy from its description and weights, read from `where`; a network or policy class of the user's comes from the caller.

    `network` is a `Network`, or what makes one from the spec, such as its class; `policy` a policy, or what makes one without arguments.
    """
    spec, own, name = description.spec, description.own, description.class_path.rpartition(":")[2].rpartition(".")[2]
    if policy is not None:
        is_made = (isinstance(policy, Policy) and not isinstance(policy, type)) or not callable(policy)
        made = policy if is_made else policy()
        if not isinstance(made, Policy):
            raise ConfigError(f"policy must be a policy, or make one without arguments; it is {made!r:.80}")
    elif own is None and network is None and spec is not None:
        chosen = ("torch" if spec.observations.images else "numpy") if backend == "auto" else backend
        return make_policy(spec, weights=weights, backend=chosen)
    elif own == "network" and network is not None and spec is not None:
        if backend not in ("auto", "torch"):
            raise ConfigError(f"networks of users act in torch, not in {backend}; leave backend out")
        made = get_backend("torch").policy_with_network(spec, network)
    elif own is None:
        raise ConfigError(f"{where} holds a built-in policy; leave network out")
    else:
        take = f"network={name})" if own == "network" else f"policy={name}(…)) with the arguments of training"
        raise ConfigError(
            f"{where} holds the weights of the {own} {description.class_path}, and files never import code; use "
            f'load_policy("{where}", {take}'
        )
    try:
        set_weights(made, weights)
    except InchwormError as error:
        given = class_path(getattr(made, "own_network", None) or made)
        written = "" if given == description.class_path else f", written by {description.class_path or 'a built-in policy'},"
        raise ConfigError(f"{where}{written} does not fit {given}: {error}") from None
    return made


def make_learner(policy: Policy, config: TrainingConfig, *, dump_directory: str | Path | None = None) -> Learner:
    """The learner of a policy, with the run's seed, device and length. It takes rollouts as old as the collectors make them."""
    stale = config.collect.staleness
    if stale != "auto" and stale > 0 and config.ppo.max_staleness is None:
        config = config.replace(ppo=config.ppo.replace(max_staleness=stale))
    if not isinstance(policy, CompositePolicy):
        return get_backend(config.run.backend).make_learner(policy, config, dump_directory)
    from inchworm.backends.composite import CompositeLearner

    learners: dict[str, Any] = {}
    for name in policy.trainable:
        own = config.replace(ppo=config.ppo.replace(**{"freeze": _freeze_of(name, config.ppo.freeze, policy), **policy.ppo.get(name, {})}))
        learners[name] = make_learner(policy.learned[name], own, dump_directory=dump_directory)
    return CompositeLearner(policy, learners)


def _freeze_of(name: str, patterns: Sequence[str], policy: CompositePolicy) -> tuple[str, ...]:
    """The patterns of `ppo.freeze` for one of several policies: those for all, and its own, `name/weight`."""
    own = []
    for pattern in patterns:
        part, slash, weights = pattern.partition("/")
        if slash and not any(fnmatchcase(known, part) for known in policy.policies):
            raise ConfigError(f"ppo.freeze: no policy matches {pattern!r:.80}; the policies are {', '.join(policy.policies)}")
        if not slash or fnmatchcase(name, part):
            own.append(weights if slash else pattern)
    return tuple(own)


def compute_advantages(policy: Policy, rollout: Rollout, config: PPOConfig) -> Advantages:
    """Values, values of the true successors, advantages and returns of a rollout under the current critic, each [T, B] in NumPy."""
    if isinstance(policy, CompositePolicy):
        from inchworm.backends.composite import composite_advantages

        return composite_advantages(policy, rollout, lambda part, own: compute_advantages(part, own, config))
    if config.correction == "off":
        return backend_of(policy).compute_advantages(policy, rollout, config)
    ratios = log_ratios_of(log_probs(policy, rollout, config), rollout)
    return backend_of(policy).compute_advantages(policy, rollout, config, ratios)


def log_probs(policy: Policy, rollout: Rollout, config: PPOConfig) -> np.ndarray:
    """The log-probs [T, B] of a rollout's actions under the current policy, which `rollout.log_probs` are of the one that collected."""
    return backend_of(policy).log_probs(policy, rollout, config)


def compute_gae(
    rewards: Array, values: Array, next_values: Array, terminated: Array, truncated: Array, gamma: float, gae_lambda: float
) -> Array:
    """Generalised advantage estimates [T, B] (Schulman et al. 2016, equations 11 to 16), of arrays or of one framework's tensors.

    A terminated row has no next value. Neither it nor a truncated row sees the advantages after it, but a truncated row
    keeps its next value: V of the true successor, which `next_values` holds. Flags may be bool or 0 and 1.
    """
    given = [rewards, values, next_values, terminated, truncated]
    kinds = {framework_of(one) for one in given}
    framework = max(kinds, key=lambda kind: kind != "numpy")
    if framework == "numpy":
        given = [np.asarray(one) for one in given]
    elif len(kinds) > 1:
        raise ConfigError(f"compute_gae is given {' and '.join(sorted(kinds))} arrays; give all five arguments as {framework} tensors")
    rewards, values, next_values, ended, cut = given
    return get_backend(framework).compute_gae(rewards, values, next_values, ended != 0, cut != 0, gamma, gae_lambda)


def native_choice(backend: str, config: EnvConfig) -> tuple[bool, str]:
    """Whether a backend steps the copies of a config itself, and the reason, a sentence that may be empty."""
    choose = getattr(get_backend(backend), "native_choice", None)
    return (False, "") if choose is None else choose(config)


def make_native_collector(policy: Actor, env: VectorEnv, *, seed: int, sequence_length: int) -> Any | None:
    """The collector of a policy whose backend steps these environments itself; else None."""
    if not is_builtin(policy):
        return None
    make = getattr(backend_of(cast(Policy, policy)), "make_native_collector", None)
    return None if make is None else make(policy, env, seed=seed, sequence_length=sequence_length)


def fuse(policy: Policy, collector: Any, learner: Learner, config: TrainingConfig) -> Any | str:
    """Collect and learn as one program, where the policy's backend can do that; else why not, in a few words."""
    make = getattr(backend_of(policy), "fuse", None) if is_builtin(policy) else None
    return "the backend learns apart from collecting" if make is None else make(policy, collector, learner, config)


def num_ranks() -> int:
    """How many processes learn together: WORLD_SIZE, which torchrun and Ray Train set together with RANK."""
    size = os.environ.get("WORLD_SIZE", "1") if "RANK" in os.environ else "1"
    if not size.isdecimal() or not os.environ.get("RANK", "0").isdecimal():
        raise ConfigError(f"WORLD_SIZE={size:.20} and RANK={os.environ['RANK']:.20} must be whole numbers; torchrun sets them")
    return max(1, int(size))


def own_rank() -> int:
    """This process's number among them."""
    return int(os.environ["RANK"]) if num_ranks() > 1 else 0


def join_ranks(run: RunConfig) -> Any | None:
    """This process's place among those that learn together; None if it is the only one."""
    if num_ranks() == 1:
        return None
    join = getattr(get_backend(run.backend), "join_ranks", None)
    if join is None:
        raise ConfigError(
            f"run.backend={run.backend} learns in one process, but WORLD_SIZE={num_ranks()} processes were started; use run.backend=torch, "
            "or start it without torchrun"
        )
    return join(run.rank_timeout)


def prefers_one_program(backend: str) -> bool:
    """Whether a backend trains several seeds faster in one program than in processes."""
    ask = getattr(get_backend(backend), "prefers_one_program", None)
    return ask is not None and bool(ask())


@contextlib.contextmanager
def learning_threads(threads: int, backend: str = "torch") -> Iterator[None]:
    """Use this many CPU threads inside, and as many as before outside; 0 changes nothing. The number affects the last bits of a result.

    NumPy's matrix products always get one thread: those of small networks only lose by more, and so they have the same bits everywhere.
    """
    if not threads:
        yield
        return
    use = getattr(get_backend(backend), "threads", None)  # NumPy has one thread, and XLA's are fixed when JAX starts
    with _matrix_library().limit(limits=1), contextlib.nullcontext() if use is None else use(threads):
        yield


@functools.cache
def _matrix_library() -> threadpoolctl.ThreadpoolController:
    """NumPy's matrix library; finding it takes a millisecond."""
    return threadpoolctl.ThreadpoolController().select(user_api="blas")
