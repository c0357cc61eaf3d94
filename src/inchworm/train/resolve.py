"""Resolve what `PPOTrainer` is given, in its many forms, into one config, one vector env and one policy."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.backends.registry import get_backend, is_builtin, make_policy, native_choice, num_ranks
from inchworm.collect.host import CollectorEnvs
from inchworm.config.sections import EnvConfig, EvalConfig, PolicyConfig, PPOConfig, RunConfig, TrainingConfig, check_minibatches
from inchworm.core.errors import ConfigError, InchwormError, SpaceError
from inchworm.core.protocols import Actor, Policy, VectorEnv, reads_global_state
from inchworm.core.seeding import derive_seed
from inchworm.core.spaces import Space, check_same_form, form_of, in_one_line, wide_one_hots
from inchworm.env.source import EnvSource, choose_num_workers, env_source, make_vector_env
from inchworm.env.vector_env import LaneVectorEnv, try_resume
from inchworm.evaluate.evaluator import PolicyEvaluator
from inchworm.policy.composite import CompositePolicy, PolicyMap, own_spaces
from inchworm.policy.file import check_shapes, match_names
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.buffer import check_fits, format_bytes, rollout_bytes
from inchworm.run.policies import read_saved
from inchworm.selfplay.callback import with_opponents

COMPILE_SECONDS = 40.0
"""Time of a first compilation: 12 to 32 s were measured on a busy machine of two cores, 4 to 11 s with a warm cache. The first is
assumed, because the content of a cache is not part of a config."""
SECONDS_PER_STEP = 0.7e-3
SECONDS_PER_SAMPLE = 0.25e-6
"""Time saved by a compiled step. Measured with 64x64 networks and one thread, eager less compiled: 0.77 ms at 64 samples a minibatch,
0.86 at 128, 0.98 at 256, 1.2 at 2048. Matrix products take the same time in both, so wider networks do not save more."""
WIDE = 1024
"""Width of layers from which torch is as fast as NumPy. Measured with one thread, a minibatch step of 64 samples: 0.30 ms against 1.06
with 64x64, 1.2 against 2.3 with 256x256, 5.1 against 6.6 with 512x512, 21.4 against 19.8 with 1024x1024."""
_COPIES = 4
"""Numbers of 4 bytes per weight: the weight, its gradient, and two moments of Adam."""


def check_spaces(spec: PolicySpec, env: VectorEnv, own: tuple[Space, Space] | None = None) -> None:
    """Reject a policy made for other spaces than the lanes', or its agents' `own`. Bounds may differ: they are not part of a network."""
    check_critic(spec.global_state_space is not None, env)
    whole = (env.observation_space, env.action_space)
    fits_whole = all(form_of(ours) == form_of(theirs) for ours, theirs in zip((spec.observation_space, spec.action_space), whole))
    observed, acted = whole if fits_whole or own is None else own
    for what, ours, theirs in (
        ("observation", spec.observation_space, observed),
        ("action", spec.action_space, acted),
        ("global state", spec.global_state_space, env.global_state_space),
    ):
        if ours is not None and theirs is not None and form_of(ours) != form_of(theirs):
            raise SpaceError(
                f"the policy was made for the {what} space {in_one_line(ours)}, but the environment has {in_one_line(theirs)}; "
                "use a policy made for it"
            )


def check_critic(is_central: bool, env: VectorEnv) -> None:
    """Reject a global state without a central critic, which alone can value the rewards that dead agents are credited with."""
    if env.global_state_space is not None and not is_central:
        raise ConfigError(
            "the environment has a global state, so agents are credited with rewards after death, which only a central critic can value; "
            "set policy.central_critic=true, create it without global_state, or pass a policy that implements ReadsGlobalState"
        )


def resolve_config(
    policy: Any,
    env: Any,
    config: PPOConfig | TrainingConfig | None,
    *,
    num_envs: int | None = None,
    num_workers: int | str | None = None,
    seed: int | None = None,
    backend: str | None = None,
    device: object | None = None,
    init_from: str | Path | None = None,
    init_weights: Sequence[str] | None = None,
) -> TrainingConfig:
    """Build the complete config from what the trainer was given; arguments override the config."""
    if config is not None and not isinstance(config, PPOConfig | TrainingConfig):
        raise ConfigError(f"config must be a PPOConfig or a TrainingConfig, not {type(config).__name__}; see PPOConfig.from_dict")
    # Without a TrainingConfig no evaluation was asked for during training; `evaluate` can be called at any time.
    base = config if isinstance(config, TrainingConfig) else TrainingConfig(evaluation=EvalConfig(interval=0, final_episodes=0))
    if base.policies and not isinstance(policy, str | PolicyConfig):
        raise ConfigError(
            f"the config has the policies {', '.join(base.policies)}, and a {type(policy).__name__} is given, too; leave policies out of "
            'the config, or give "mlp" or a PolicyConfig, from which its policies take their settings'
        )
    given: dict[str, Any] = {"seed": seed, "backend": backend, "device": None if device is None else str(device)}
    if env_source(env).kind == "device" and device is None and base.run.device == "auto":
        given["device"] = str(getattr(env, "unwrapped", env).device)  # where the data is
    given |= {"init_from": None if init_from is None else str(init_from)}
    given |= {"init_weights": None if init_weights is None else tuple(init_weights)}
    return base.replace(
        env=_world(env_source(env), base.env, num_envs, num_workers),
        policy=_network(policy, base.policy),
        ppo=config if isinstance(config, PPOConfig) else base.ppo,
        run=base.run.replace(**{name: value for name, value in given.items() if value is not None}),
    )


def _world(source: EnvSource, config: EnvConfig, num_envs: int | None, num_workers: int | str | None) -> EnvConfig:
    """The env config of a run: the one given, or a description of the environment given; arguments override it."""
    config = source.given if source.kind == "config" else config.replace(id=source.name)
    if num_workers is not None:
        if source.is_vector and num_workers not in (0, "auto"):
            name = type(source.given).__name__
            raise ConfigError(f"num_workers={num_workers}, but the {name} steps its own copies; pass an id or a factory")
        copies = num_envs if num_envs is not None else config.num_envs
        helps = config.help_workers and num_workers not in (0, "auto")
        config = config.replace(num_workers=num_workers, num_envs=copies, help_workers=helps)
    copies = source.num_copies
    if copies is not None and num_envs not in (None, copies):
        what = "copies" if source.kind == "vector" and source.given.lanes_per_copy > 1 else "lane(s)"
        raise ConfigError(f"num_envs={num_envs}, but the {type(source.given).__name__} has {copies} {what}; pass an id or a factory")
    copies = num_envs if copies is None else copies
    if copies is None:
        return config
    if source.is_instance and config.num_workers not in (0, "auto"):
        raise ConfigError(f"env.num_workers={config.num_workers}, but an environment instance stays in this process; pass a factory")
    workers = config.num_workers
    return config.replace(num_envs=copies, num_workers=workers if workers == "auto" else min(workers, copies))


def _network(policy: Any, config: PolicyConfig) -> PolicyConfig:
    if isinstance(policy, PolicyConfig):
        return policy
    if isinstance(policy, PolicySpec):
        return policy.config
    if isinstance(policy, str):
        if policy not in ("mlp", "cnn", "lstm", "gru"):
            raise ConfigError(f"there is no policy called {policy!r}; use mlp, cnn, lstm or gru, a PolicySpec, or your own policy")
        return config.replace(kind=policy)
    if isinstance(policy, PolicyMap | CompositePolicy):  # all parts see the same global state
        parts = [_network(part, config) for part in policy.policies.values()]
        return config.replace(central_critic=any(part.central_critic for part in parts))
    built: Any = policy
    return built.spec.config if is_builtin(policy) else config


def resolve_choices(policy: Any, env: Any, config: TrainingConfig, *, losses: bool = False) -> tuple[TrainingConfig, list[str]]:
    """Replace `auto` in `run.backend`, `env.num_workers` and `ppo.compile`; return the config and the reasons, a sentence each.

    An environment given as an object may share state with this process, so it stays here unless workers are asked for. The number of
    workers never changes a result; the backend and compiling change the last bits and are therefore functions of the config alone, and
    of whether the policy and losses are the user's own.
    """
    reasons = []
    if env_source(env).kind == "device" and config.run.backend == "auto":
        config = config.replace(run=config.run.replace(backend="torch"))
        reasons.append("run.backend=torch, because the environment's tensors are torch's")
    if config.run.backend == "auto":
        backend, reason = choose_backend(policy, config, losses=losses)
        config = config.replace(run=config.run.replace(backend=backend))
        reasons.append(f"run.backend={backend}, because {reason}")
    if config.collect.staleness == "auto":
        config = config.replace(collect=config.collect.replace(staleness=int(config.collect.engine == "async")))
    is_native, reason = is_native_env(env, config)
    if reason:
        reasons.append(reason)
    if is_native:
        config = config.replace(env=config.env.replace(num_workers=0, help_workers=False))
    elif config.env.num_workers == "auto" and config.collect.is_plain and env_source(env).is_config:
        workers = choose_num_workers(config.env)
        config = config.replace(env=config.env.replace(num_workers=workers.num_workers, help_workers=workers.help_workers))
        reasons.append(workers.reason)
    elif config.env.num_workers == "auto":
        config = config.replace(env=config.env.replace(num_workers=0))
    if config.ppo.compile == "auto":
        builtin = isinstance(policy, str | PolicyConfig | PolicySpec) or is_builtin(policy)
        chosen, reason = choose_compile(config, builtin=builtin)
        config = config.replace(ppo=config.ppo.replace(compile=chosen))
        reasons.append(f"ppo.compile={chosen}, because {reason}")
    return config, reasons


def is_native_env(env: Any, config: TrainingConfig) -> tuple[bool, str]:
    """Whether the backend steps the environments itself, and the reason, a sentence that may be empty. A function of the config alone."""
    if not env_source(env).is_config or config.run.backend == "auto" or not config.collect.is_plain:
        return False, ""
    is_native, reason = native_choice(config.run.backend, config.env)
    if is_native and config.collect.keep_infos:
        return False, f"stepping {config.env.id} on the host, because collect.keep_infos is set, and JAX-native environments have no infos"
    return is_native, reason


def choose_backend(policy: Any, config: TrainingConfig, *, losses: bool) -> tuple[str, str]:
    """Choose NumPy where it can train the policy and is not slower, else torch; return the choice and the reason.

    `losses` tells whether custom losses are given.
    """
    ppo, run = config.ppo, config.run
    parts: list[Any] = [policy]
    overrides: list[Mapping[str, Any]] = [role.ppo for role in config.policies.values()]
    if isinstance(policy, PolicyMap | CompositePolicy):
        parts, overrides = list(policy.policies.values()), list(policy.ppo.values())
    parts = [config.role_policy(name) for name in config.policies] or parts
    networks = [_network(part, config.policy) for part in parts]
    others = [kind for kind in (network.kind for network in networks) if kind != "mlp"]
    widest = max((size for network in networks for size in network.hidden_sizes), default=0)
    built_in = (str, PolicyConfig, PolicySpec, NumpyPolicy)
    if any(getattr(part, "backend", None) == "jax" for part in parts):
        return "jax", "the policy is one of JAX's"
    if not all(isinstance(part, built_in) or not isinstance(part, Policy) for part in parts):
        return "torch", "it trains policies that are given as torch modules"
    if others:
        return "torch", f"it alone trains policy.kind={others[0]}"
    if any(network.central_critic for network in networks):
        return "torch", "it alone trains a central critic"
    if losses:
        return "torch", "it derives the gradients of custom losses"
    if "muon" in (ppo.optimizer, *(own.get("optimizer") for own in overrides)):
        return "torch", "it alone has ppo.optimizer=muon"
    if ppo.compile == "on":
        return "torch", "it alone has ppo.compile=on"
    if num_ranks() > 1:
        return "torch", "it alone learns in several processes"
    if run.device not in ("auto", "cpu"):
        return "torch", f"it alone has run.device={run.device}"
    if widest >= WIDE:
        return "torch", f"layers of {widest} are as fast there, and faster with more threads or a GPU"
    return "numpy", "it is fast for small networks"


def choose_compile(config: TrainingConfig, *, builtin: bool) -> tuple[str, str]:
    """Choose "on" if the planned minibatch steps save more time than compiling takes, else "off"; return the choice and the reason.

    `builtin` is false for a user's network, policy, loss or optimiser, which are not compiled.
    """
    ppo, run, kind = config.ppo, config.run, config.policy.kind
    if run.backend != "torch":
        return "off", "JAX is always compiled" if run.backend == "jax" else f"run.backend={run.backend} has nothing to compile"
    if not builtin:
        return "off", "only built-in policies with the built-in loss and optimiser are compiled"
    if ppo.optimizer not in ("adam", "adamw"):
        return "off", f"ppo.optimizer={ppo.optimizer} is not compiled"
    if config.policies:
        return "off", "several policies are not compiled"
    if num_ranks() > 1:
        return "off", "the gradients of several processes are summed within a step"
    if ppo.gradient_accumulation > 1:
        return "off", f"ppo.gradient_accumulation={ppo.gradient_accumulation} is not compiled"
    if kind in ("lstm", "gru"):
        return "off", f"policy.kind={kind} runs in its own kernel and is not compiled"
    if kind == "cnn":
        return "off", "convolutions take nearly all of the time and gain nothing"
    batch = ppo.rollout_steps * config.env.num_envs
    iterations = -(-run.total_timesteps // batch)
    if run.max_iterations is not None:
        iterations = min(iterations, run.max_iterations)
    minibatches = ppo.minibatches_for(batch)
    steps, size = iterations * ppo.update_epochs * minibatches, -(-batch // minibatches)
    saved = steps * (SECONDS_PER_STEP + SECONDS_PER_SAMPLE * size)
    facts = f"{steps:,} minibatch steps of {size} samples save about {saved:.0f} s and compiling takes up to {COMPILE_SECONDS:.0f} s"
    return ("on" if saved > COMPILE_SECONDS else "off"), facts


def check_ranks(env: Any, config: TrainingConfig) -> None:
    """Reject what cannot be learned in several processes."""
    source, copies = env_source(env), config.env.num_envs
    obstacle = None
    if config.ppo.compile == "on":
        obstacle = "ppo.compile=on, because gradients are summed within a step; set ppo.compile=off"
    elif config.opponent.mode != "none":
        obstacle = f"opponent.mode={config.opponent.mode}, because opponents are not split over processes; set opponent.mode=none"
    elif not config.collect.is_plain:
        obstacle = "collect.engine, collect.num_collectors or collect.staleness, because each process collects by itself; leave them out"
    elif config.curriculum.mode != "none":
        obstacle = f"curriculum.mode={config.curriculum.mode}, which only the first of them would follow; set curriculum.mode=none"
    elif config.policies:
        obstacle = f"the policies {', '.join(config.policies)}; train one policy"
    elif source.is_instance:
        obstacle = f"one {type(source.given).__name__}, which is a single copy; pass an id or a factory"
    elif not source.is_vector and copies < num_ranks():
        obstacle = f"env.num_envs={copies}; each needs at least one copy"
    if obstacle is not None:
        raise ConfigError(f"WORLD_SIZE={num_ranks()} processes cannot learn together with {obstacle}")


def resolve_env(env: Any, config: TrainingConfig, *, rehearse: bool = False, ranks: Any = None) -> VectorEnv:
    """Create the environments for training as one vector env; with `rehearse`, test whether they can be resumed exactly.

    Those of several collectors, or of collectors elsewhere, are only described: the collectors create them. Of several `ranks` each gets
    its share of the copies, which are numbered over all of them; vector envs that were given are the shares.
    """
    source, world = env_source(env), config.env
    if is_native_env(env, config)[0]:
        options: dict[str, Any] = {"seed": config.run.seed, "global_state": config.policy.central_critic}
        return with_opponents(get_backend(config.run.backend).make_native_env(world, **options), config)
    if ranks is not None:
        return make_rank_env(source, config, ranks, rehearse=rehearse)
    if config.collect.is_plain:
        return make_train_env(source, config, 0, world.num_envs, config.run.seed, rehearse=rehearse)
    if not source.can_be_copied:
        raise ConfigError(
            f"collectors cannot share a {type(source.given).__name__}, which exists once; pass an id or a factory, or leave "
            "collect.engine, collect.num_collectors and collect.staleness out"
        )
    workers = world.num_workers
    if workers != "auto" and workers > world.num_envs // config.collect.num_collectors:
        raise ConfigError(
            f"env.num_workers={workers} is more than the copies of each collector ({world.num_envs} env.num_envs shared by "
            f"{config.collect.num_collectors} collectors); use env.num_workers=0"
        )
    example = config.replace(env=world.replace(num_workers=0, help_workers=False))
    with contextlib.closing(make_train_env(source, example, 0, 1, config.run.seed, rehearse=rehearse)) as one:
        make = partial(make_train_env, source, config)
        return cast(VectorEnv, CollectorEnvs(make, world.num_envs, one, world.id if source.is_config else None))


def make_rank_env(source: EnvSource, config: TrainingConfig, ranks: Any, *, rehearse: bool) -> VectorEnv:
    """Create the copies of one of several processes that learn together."""
    world, first_copy, end = config.env, 0, config.env.num_envs
    if not source.is_vector:
        first_copy, end = (world.num_envs * rank // ranks.count for rank in (ranks.rank, ranks.rank + 1))
        workers = world.num_workers if world.num_workers == "auto" else min(world.num_workers, end - first_copy - world.help_workers)
        config = config.replace(env=world.replace(num_workers=workers))
    vector_env = make_train_env(source, config, first_copy, end - first_copy, config.run.seed, rehearse=rehearse)
    if vector_env.turn_based:
        if vector_env is not source.given:
            vector_env.close()
        raise ConfigError(
            "several processes cannot learn from agents that move one after another: the parts of a rollout would differ in length"
        )
    return vector_env


def make_train_env(
    source: EnvSource, config: TrainingConfig, first_copy: int, num_envs: int, own_seed: int, *, rehearse: bool = False
) -> VectorEnv:
    """Create the copies of a collector, with their opponents, whose streams are derived from `own_seed`."""
    world = config.env
    options: dict[str, Any] = {
        "seed": config.run.seed,
        "worker_timeout": world.worker_timeout,
        "global_state": config.policy.central_critic,
        "keep_infos": config.collect.keep_infos,
    }
    vector_env = make_vector_env(
        source.with_config(world.replace(num_envs=num_envs)),
        num_envs,
        world.num_workers,
        worker_restarts=world.worker_restarts,
        max_replay_steps=config.collect.max_replay_steps,
        first_copy=first_copy,
        **options,
    )
    try:
        if rehearse and isinstance(vector_env, LaneVectorEnv) and vector_env.needs_trial and source.can_be_copied:
            single = source.with_config(world.replace(num_envs=1, num_workers=0, help_workers=False))
            # An environment meant for workers may crash or hang: test it in a worker, too.
            apart = int(world.num_workers not in (0, "auto") and not world.help_workers)
            make_copy = partial(make_vector_env, single, 1, apart, worker_restarts=0, **options)
            flaw = try_resume(cast(Callable[[], LaneVectorEnv], make_copy), world.id, once=bool(apart))
            if flaw is not None:
                vector_env.mark_inexact(flaw)
        return with_opponents(vector_env, config.replace(run=config.run.replace(seed=own_seed)), first_copy)
    except BaseException:  # such as no opponents for this environment, or Ctrl-C
        if vector_env is not source.given:  # the caller's own stays open
            vector_env.close()
        raise


def resolve_eval_env(env: Any, eval_env: Any, config: EnvConfig, seed: int) -> EnvSource | None:
    """The environments for evaluation: those given for it, else separate copies of those that train; None where there can be none."""
    if eval_env is None:
        return env_source(env).for_evaluation(config)
    if eval_env is env and not env_source(env).can_be_copied:
        raise ConfigError("eval_env is the environment that trains, which an evaluation would disturb; pass another instance, or a factory")
    source = env_source(eval_env)
    if source.kind == "gymnasium.vector":  # adapted here, so that the evaluator does not close the caller's own
        return env_source(make_vector_env(eval_env, seed=seed))
    return source.with_config(source.given if source.kind == "config" else config.replace(id=source.name))


def check_eval_env(evaluator: PolicyEvaluator, env: VectorEnv) -> None:
    """Reject environments for evaluation that have other spaces than those that train, before training."""
    try:
        found = evaluator.vector_env
        trained, evaluated = (env.observation_space, env.action_space), (found.observation_space, found.action_space)
        check_same_form("eval_env does not fit: the policy", trained, evaluated)
    except BaseException:
        evaluator.close()
        raise


def describe_size(env: VectorEnv, config: TrainingConfig) -> str:
    """The size of a rollout, in one line. Raises if it does not fit into memory, or is too small for its minibatches."""
    copies, agents, steps = config.env.num_envs, env.lanes_per_copy, config.ppo.rollout_steps
    lanes = copies * agents
    check_minibatches(config.ppo, lanes)
    needed = rollout_bytes(env.observation_space, env.action_space, steps, lanes, env.global_state_space, copies)
    check_fits(needed, what=f"a rollout of {lanes} lanes x {steps} steps")
    envs = f"{copies} envs" if agents == 1 else f"{copies} envs x {agents} agents"
    collect = config.collect
    where = "" if collect.is_plain else f", collectors: {collect.num_collectors} {collect.engine}"
    return f"rollout: {envs} x {steps:,} steps ({format_bytes(needed)}), backend: {config.run.backend}{where}"


def resolve_policy(policy: Any, config: TrainingConfig, env: VectorEnv, own: tuple[Space, Space] | None = None) -> Policy:
    """The policy to train, created from a name or spec, or the one given; an `Actor` that is not a `Policy` can only collect.

    `own` are the observation and the action space of the agents that it plays, if it does not play all lanes.
    """
    if config.policies:
        policy, config = PolicyMap.from_config(config, env.agents), config.replace(policies={})
    if isinstance(policy, PolicyMap | CompositePolicy):
        return _resolve_parts(policy, config, env)
    if isinstance(policy, str | PolicyConfig):
        observed, acted = own or (env.observation_space, env.action_space)
        for sentence in wide_one_hots(observed):
            warnings.warn(sentence, stacklevel=3)
        policy = PolicySpec(observed, acted, config.policy, env.global_state_space, env.lanes_per_copy)
    if isinstance(policy, PolicySpec):
        check_spaces(policy, env, own)
        needed = _COPIES * 4 * sum(math.prod(shape) for shape in policy.layers.values())
        check_fits(needed, what="learning with this network", use="use smaller policy.hidden_sizes")
        return make_policy(policy, seed=config.run.seed, backend=config.run.backend)
    if is_builtin(policy):
        check_spaces(policy.spec, env, own)
    if isinstance(policy, NumpyPolicy) and config.run.backend != "numpy":  # NumPy only acts here: the backend trains a copy
        return make_policy(policy.spec, weights=policy.get_weights(), backend=config.run.backend)
    if isinstance(policy, Policy) and not is_builtin(policy):
        check_critic(reads_global_state(policy), env)
    if isinstance(policy, Actor):
        return cast(Policy, policy)
    raise ConfigError(
        f"a {type(policy).__name__} is not a policy: it needs initial_state and act (see inchworm.core.protocols.Policy); "
        "or use mlp, cnn, lstm or gru"
    )


class WarmStart(NamedTuple):
    """What a run begins with."""

    text: str
    reward_statistics: Mapping[str, float] | None
    """Those of the saved policy's training, if all of its weights are taken over and its rewards were scaled."""


def warm_start(policy: Policy, run: RunConfig) -> WarmStart | None:
    """Set the weights that the run begins with, if it names any. The version stays that of a new policy."""
    if run.init_from is None:
        return None
    if not isinstance(policy, Policy):
        raise ConfigError(f"run.init_from needs a policy with weights, but {type(policy).__name__} only acts")
    where = f"run.init_from={run.init_from}"
    try:
        description, weights, found = read_saved(run.init_from)
    except (OSError, InchwormError) as error:
        raise ConfigError(f"{where}: {error}") from error
    own = policy.get_weights()
    every = match_names(["*"], own, where)
    names = match_names(run.init_weights, own, "run.init_weights") if run.init_weights else every
    saved = {name: weights[name] for name in match_names(["*"], weights, where)}
    try:
        check_shapes(saved, {name: own[name].shape for name in names}, more=bool(run.init_weights))
    except InchwormError as error:
        part = "" if run.init_weights else "; run.init_weights takes over a part of them, such as 'actor.*'"
        raise ConfigError(f"{where}: {error}{part}") from None
    policy.set_weights({**own, **{name: saved[name].astype(own[name].dtype) for name in names}})
    rewards = description.reward_statistics if description is not None and names == every else None
    return WarmStart(f"beginning with {'all' if names == every else len(names)} of the {len(every)} weights from {found}", rewards)


def _resolve_parts(several: PolicyMap | CompositePolicy, config: TrainingConfig, env: VectorEnv) -> CompositePolicy:
    """Resolve each of several policies, with separate initial weights."""
    parts: dict[str, Actor] = {}
    own = own_spaces(several.lane_map, env)
    for index, (name, part) in enumerate(several.policies.items()):
        run = config.run.replace(seed=derive_seed(config.run.seed, "part", index))
        parts[name] = resolve_policy(part, config.replace(run=run, policy=_network(part, config.policy)), env, own[name])
    if isinstance(several, CompositePolicy) and all(parts[name] is part for name, part in several.policies.items()):
        policy = several  # keep the caller's object
    else:
        policy = several.filled(parts) if isinstance(several, PolicyMap) else several.replaced(parts)
    policy.fit(env)
    return policy
