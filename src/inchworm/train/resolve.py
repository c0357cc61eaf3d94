"""Serves the front door: what `PPOTrainer` is given, in its many forms, becomes one config, one vector env and one policy."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, cast

import gymnasium as gym

from inchworm.abilities import HasTeams, lanes_per_copy, reads_global_state
from inchworm.backends.interface import is_builtin, make_policy
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.config import EnvConfig, EvalConfig, PolicyConfig, PPOConfig, TrainingConfig, check_minibatches
from inchworm.env.build import dress_given, make_from
from inchworm.env.groups import make_groups
from inchworm.env.lane_env import LaneVectorEnv
from inchworm.env.native import NativeCartPole
from inchworm.env.rehearsal import rehearse_resume
from inchworm.env.teams import is_team_env
from inchworm.env.vector_env import make_vector_env
from inchworm.errors import ConfigError
from inchworm.policy.composite import CompositePolicy, PolicyMap
from inchworm.policy.spec import PolicySpec
from inchworm.protocols import Actor, Policy, VectorEnv
from inchworm.rollout.size import check_fits, in_words, rollout_bytes
from inchworm.seeding import derive_seed
from inchworm.selfplay.build import with_opponents
from inchworm.train.choices import settle
from inchworm.train.fitting import check_critic, check_spaces, shared_space

_COPIES = 4
"""Of every weight, in 4 bytes: itself, its gradient, Adam's two moments."""


def resolve_config(
    policy: Any,
    env: Any,
    config: PPOConfig | TrainingConfig | None,
    *,
    num_envs: int | None,
    seed: int | None,
    backend: str | None,
    device: object | None,
) -> TrainingConfig:
    """One whole config out of what the trainer was given; arguments win over the config."""
    if config is not None and not isinstance(config, PPOConfig | TrainingConfig):
        raise ConfigError(f"config must be a PPOConfig or a TrainingConfig, not {type(config).__name__}; see PPOConfig.from_dict")
    # Without a TrainingConfig no score was asked for, so none is taken during training; `evaluate` is there at any time.
    base = config if isinstance(config, TrainingConfig) else TrainingConfig(evaluation=EvalConfig(interval=0, final_episodes=0))
    given = {"seed": seed, "backend": backend, "device": None if device is None else str(device)}
    return base.replace(
        env=_world(env, base.env, num_envs),
        policy=_network(policy, base.policy),
        ppo=config if isinstance(config, PPOConfig) else base.ppo,
        run=base.run.replace(**{name: value for name, value in given.items() if value is not None}),
    )


def _world(env: Any, config: EnvConfig, num_envs: int | None) -> EnvConfig:
    """The env config of a run: what is asked for, or a description of what was handed over."""
    if isinstance(env, EnvConfig):
        config = env
    elif isinstance(env, str):
        config = config.replace(id=env)
    else:
        config = config.replace(id=_describe(env))
    copies = _fixed_copies(env)
    if copies is not None and num_envs not in (None, copies):
        what = "copies" if isinstance(env, HasTeams) and env.lanes_per_copy > 1 else "lane(s)"
        raise ConfigError(f"num_envs={num_envs}, but the {type(env).__name__} that was given has {copies} {what}; give an id or a factory")
    copies = num_envs if copies is None else copies
    if copies is None:
        return config
    if (isinstance(env, gym.Env) or is_team_env(env)) and config.num_workers not in (0, "auto"):
        raise ConfigError(f"env.num_workers={config.num_workers}, but an environment that was handed over stays here; give a factory")
    workers = config.num_workers
    return config.replace(num_envs=copies, num_workers=workers if workers == "auto" else min(workers, copies))


def _fixed_copies(env: Any) -> int | None:
    """How many copies there are of what was handed over; None if they are still to be made."""
    if isinstance(env, gym.vector.VectorEnv):  # before gymnasium.Env: an EnvPool is both
        return int(env.num_envs)
    if isinstance(env, gym.Env) or is_team_env(env):
        return 1
    return env.num_lanes // lanes_per_copy(env) if isinstance(env, VectorEnv) else None


def _describe(env: Any) -> str:
    """What to call an environment that is no id, so that the run's record does not name another one."""
    if isinstance(env, gym.Env):
        return env.spec.id if env.spec is not None else type(env.unwrapped).__name__
    if is_team_env(env) or (isinstance(env, HasTeams) and env.lanes_per_copy > 1):  # by its module: so it is no id of one lane a copy
        kind = type(env.unwrapped if is_team_env(env) else env)
        return f"{kind.__module__}:{kind.__qualname__}"
    name = getattr(env, "__qualname__", None)
    return type(env).__name__ if name is None else f"{env.__module__}:{name}"


def _network(policy: Any, config: PolicyConfig) -> PolicyConfig:
    if isinstance(policy, PolicyConfig):
        return policy
    if isinstance(policy, PolicySpec):
        return policy.config
    if isinstance(policy, str):
        if policy not in ("mlp", "cnn", "lstm", "gru"):
            raise ConfigError(f"there is no policy called {policy!r}; use mlp, cnn, lstm or gru, a PolicySpec, or a policy of yours")
        return config.replace(kind=policy)
    if isinstance(policy, PolicyMap | CompositePolicy):  # a world that shows its state shows it to all
        parts = [_network(part, config) for part in policy.policies.values()]
        return config.replace(central_critic=any(part.central_critic for part in parts))
    built: Any = policy
    return built.spec.config if is_builtin(policy) else config


def resolve_choices(policy: Any, env: Any, config: TrainingConfig) -> tuple[TrainingConfig, list[str]]:
    """The config with nothing left to choose, and why it was chosen so.

    What is no id may share things with this process, which a worker would not see: it stays here unless workers are asked for.
    """
    if not isinstance(env, str | EnvConfig) and config.env.num_workers == "auto":
        config = config.replace(env=config.env.replace(num_workers=0))
    return settle(config, builtin=isinstance(policy, str | PolicyConfig | PolicySpec) or is_builtin(policy))


def resolve_envs(env: Any, config: TrainingConfig, *, rehearse: bool = False) -> tuple[VectorEnv, ...]:
    """The environments that train: one vector env, or one for each group; with `rehearse` it is tried whether they can be resumed."""
    world = config.env
    envs = make_groups(
        _source(env, world),
        world.num_envs,
        world.num_workers,
        config.collect.groups,
        seed=config.run.seed,
        worker_timeout=world.worker_timeout,
        worker_restarts=world.worker_restarts,
        max_replay_steps=config.collect.max_replay_steps,
        global_state=config.policy.central_critic,
    )
    try:
        if rehearse:
            _rehearse(env, config, envs)
        return with_opponents(envs, config)
    except BaseException:  # there are no opponents for it, or somebody pressed Ctrl-C
        for group in envs:
            if group is not env:  # somebody else's stays open
                group.close()
        raise


def _rehearse(env: Any, config: TrainingConfig, envs: tuple[VectorEnv, ...]) -> None:
    """Mark environments that cannot be resumed exactly. One that was handed over cannot be copied to find out."""
    ours = [group for group in envs if isinstance(group, LaneVectorEnv) and not isinstance(group, NativeCartPole)]
    if not ours or isinstance(env, gym.Env | VectorEnv | gym.vector.VectorEnv) or is_team_env(env):
        return
    world = config.env.replace(num_envs=1, num_workers=0, help_workers=False)
    source = _source(env, world)
    # What was to stay out of this process does: it may crash or hang, and a worker's end is not the run's.
    apart = int(config.env.num_workers not in (0, "auto") and not config.env.help_workers)
    options: dict[str, Any] = {"seed": config.run.seed, "worker_timeout": world.worker_timeout, "worker_restarts": 0}
    options["global_state"] = config.policy.central_critic
    flaw = rehearse_resume(lambda: cast(LaneVectorEnv, make_vector_env(source, 1, apart, **options)), world.id, once=bool(apart))
    if flaw is not None:
        for group in ours:
            group.mark_inexact(flaw)


def describe_size(env: VectorEnv, config: TrainingConfig) -> str:
    """What a rollout will take, in a line; refused if there is not so much memory, or if it is too small for its minibatches."""
    lanes, steps = config.env.num_envs * lanes_per_copy(env), config.ppo.rollout_steps
    check_minibatches(config.ppo, lanes)
    needed = rollout_bytes(env.observation_space, env.action_space, steps, lanes, shared_space(env), config.env.num_envs)
    check_fits(needed, what=f"a rollout of {lanes} lanes x {steps} steps")
    return f"a rollout is {lanes} lanes x {steps} steps, {in_words(needed)}; {config.run.backend} learns from it"


def _source(env: Any, config: EnvConfig) -> Any:
    """What copies are made from: the config, or what was given, with the config's limit and wrappers around it."""
    if isinstance(env, str | EnvConfig):
        return config
    if isinstance(env, VectorEnv | gym.vector.VectorEnv):  # before gymnasium.Env: an EnvPool is both
        return env
    if isinstance(env, gym.Env) or is_team_env(env):
        return dress_given(env, config)
    is_factory = callable(env)
    return partial(make_from, env, config) if is_factory else env


def resolve_policy(policy: Any, config: TrainingConfig, env: VectorEnv) -> Policy:
    """The policy to train: made from a name or spec, or the one that was given; a mere `Actor` can only collect."""
    if isinstance(policy, PolicyMap | CompositePolicy):
        return _resolve_parts(policy, config, env)
    if isinstance(policy, str | PolicyConfig):
        policy = PolicySpec(env.observation_space, env.action_space, config.policy, shared_space(env), lanes_per_copy(env))
    if isinstance(policy, PolicySpec):
        check_spaces(policy, env)
        needed = _COPIES * 4 * sum(math.prod(shape) for shape in policy.layers.values())
        check_fits(needed, what="learning with this network", use="use smaller policy.hidden_sizes")
        return make_policy(policy, seed=config.run.seed, backend=config.run.backend)
    if is_builtin(policy):
        check_spaces(policy.spec, env)
    if isinstance(policy, NumpyPolicy) and config.run.backend != "numpy":  # here it acts only: its twin learns
        return make_policy(policy.spec, weights=policy.get_weights(), backend=config.run.backend)
    if isinstance(policy, Policy) and not is_builtin(policy):
        check_critic(reads_global_state(policy), env)
    if isinstance(policy, Actor):
        return cast(Policy, policy)
    raise ConfigError(
        f"{policy!r} is no policy: it needs initial_state and act (see inchworm.protocols.Policy), or use mlp, cnn, lstm or gru"
    )


def _resolve_parts(several: PolicyMap | CompositePolicy, config: TrainingConfig, env: VectorEnv) -> CompositePolicy:
    """Each of several policies as `resolve_policy` makes one, with initial weights of its own."""
    parts: dict[str, Actor] = {}
    for index, (name, part) in enumerate(several.policies.items()):
        run = config.run.replace(seed=derive_seed(config.run.seed, "part", index))
        parts[name] = resolve_policy(part, config.replace(run=run, policy=_network(part, config.policy)), env)
    if isinstance(several, CompositePolicy) and all(parts[name] is part for name, part in several.policies.items()):
        policy = several  # whoever made it keeps it
    else:
        policy = several.filled(parts) if isinstance(several, PolicyMap) else several.replaced(parts)
    policy.check_lanes(env.num_lanes, lanes_per_copy(env))
    return policy


def evaluation_source(env: Any, config: TrainingConfig) -> Any:
    """Where evaluation gets environments of its own from; None where only the ones that train exist."""
    if isinstance(env, VectorEnv | gym.vector.VectorEnv) or is_team_env(env):
        return None
    if isinstance(env, gym.Env):
        spec = env.spec
        return None if spec is None else lambda: dress_given(gym.make(spec), config.env)
    return _source(env, config.env)
