"""Serves the front door: what `PPOTrainer` is given, in its many forms, becomes one config, one vector env and one policy."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, cast

import gymnasium as gym

from inchworm.backends.interface import is_builtin, make_policy
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.config import EnvConfig, EvalConfig, PolicyConfig, PPOConfig, TrainingConfig
from inchworm.env.build import dress_given, make_from
from inchworm.env.groups import make_groups
from inchworm.env.lane_env import LaneVectorEnv
from inchworm.env.native import NativeCartPole
from inchworm.env.rehearsal import rehearse_resume
from inchworm.env.vector_env import make_vector_env
from inchworm.errors import ConfigError, SpaceError
from inchworm.policy.spec import PolicySpec
from inchworm.protocols import Actor, Policy, VectorEnv
from inchworm.rollout.size import check_fits, in_words, rollout_bytes
from inchworm.spaces import Space, leaf_shape, leaves, mask_sizes
from inchworm.train.choices import settle

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
    lanes = _fixed_lanes(env)
    if lanes is not None and num_envs not in (None, lanes):
        raise ConfigError(f"num_envs={num_envs}, but the {type(env).__name__} that was given has {lanes} lane(s); give an id or a factory")
    lanes = num_envs if lanes is None else lanes
    if lanes is None:
        return config
    if isinstance(env, gym.Env) and config.num_workers not in (0, "auto"):
        raise ConfigError(f"env.num_workers={config.num_workers}, but an environment that was handed over stays here; give a factory")
    workers = config.num_workers
    return config.replace(num_envs=lanes, num_workers=workers if workers == "auto" else min(workers, lanes))


def _fixed_lanes(env: Any) -> int | None:
    if isinstance(env, gym.vector.VectorEnv):  # before gymnasium.Env: an EnvPool is both
        return int(env.num_envs)
    if isinstance(env, gym.Env):
        return 1
    return int(env.num_lanes) if isinstance(env, VectorEnv) else None


def _describe(env: Any) -> str:
    """What to call an environment that is no id, so that the run's record does not name another one."""
    if isinstance(env, gym.Env):
        return env.spec.id if env.spec is not None else type(env.unwrapped).__name__
    name = getattr(env, "__qualname__", None)
    return type(env).__name__ if name is None else f"{env.__module__}:{name}"


def _network(policy: Any, config: PolicyConfig) -> PolicyConfig:
    if isinstance(policy, PolicyConfig):
        return policy
    if isinstance(policy, PolicySpec):
        return policy.config
    if isinstance(policy, str):
        if policy not in ("mlp", "cnn"):
            raise ConfigError(f"there is no policy called {policy!r}; use mlp or cnn, a PolicySpec, or a policy of yours")
        return config.replace(kind=policy)
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
    )
    if rehearse:
        try:
            _rehearse(env, config, envs)
        except BaseException:  # somebody pressed Ctrl-C
            for group in envs:
                group.close()
            raise
    return envs


def _rehearse(env: Any, config: TrainingConfig, envs: tuple[VectorEnv, ...]) -> None:
    """Mark environments that cannot be resumed exactly. One that was handed over cannot be copied to find out."""
    ours = [group for group in envs if isinstance(group, LaneVectorEnv) and not isinstance(group, NativeCartPole)]
    if not ours or isinstance(env, gym.Env | VectorEnv | gym.vector.VectorEnv):
        return
    world = config.env.replace(num_envs=1, num_workers=0, help_workers=False)
    source = _source(env, world)
    # What was to stay out of this process does: it may crash or hang, and a worker's end is not the run's.
    apart = int(config.env.num_workers not in (0, "auto") and not config.env.help_workers)
    options: dict[str, Any] = {"seed": config.run.seed, "worker_timeout": world.worker_timeout, "worker_restarts": 0}
    flaw = rehearse_resume(lambda: cast(LaneVectorEnv, make_vector_env(source, 1, apart, **options)), world.id, once=bool(apart))
    if flaw is not None:
        for group in ours:
            group.mark_inexact(flaw)


def describe_size(env: VectorEnv, config: TrainingConfig) -> str:
    """What a rollout will take, in a line; refused if there is not so much memory."""
    lanes, steps = config.env.num_envs, config.ppo.rollout_steps
    needed = rollout_bytes(env.observation_space, env.action_space, steps, lanes)
    check_fits(needed, what=f"a rollout of {lanes} lanes x {steps} steps")
    return f"a rollout is {lanes} lanes x {steps} steps, {in_words(needed)}; {config.run.backend} learns from it"


def _source(env: Any, config: EnvConfig) -> Any:
    """What copies are made from: the config, or what was given, with the config's limit and wrappers around it."""
    if isinstance(env, str | EnvConfig):
        return config
    if isinstance(env, VectorEnv | gym.vector.VectorEnv):  # before gymnasium.Env: an EnvPool is both
        return env
    if isinstance(env, gym.Env):
        return dress_given(env, config)
    is_factory = callable(env)
    return partial(make_from, env, config) if is_factory else env


def resolve_policy(policy: Any, config: TrainingConfig, env: VectorEnv) -> Policy:
    """The policy to train: made from a name or spec, or the one that was given; a mere `Actor` can only collect."""
    if isinstance(policy, str | PolicyConfig):
        policy = PolicySpec(env.observation_space, env.action_space, config.policy)
    if isinstance(policy, PolicySpec):
        _check_spaces(policy, env)
        needed = _COPIES * 4 * sum(math.prod(shape) for shape in policy.layers.values())
        check_fits(needed, what="learning with this network", use="use smaller policy.hidden_sizes")
        return make_policy(policy, seed=config.run.seed, backend=config.run.backend)
    if is_builtin(policy):
        _check_spaces(policy.spec, env)
    if isinstance(policy, NumpyPolicy) and config.run.backend != "numpy":  # here it acts only: its twin learns
        return make_policy(policy.spec, weights=policy.get_weights(), backend=config.run.backend)
    if isinstance(policy, Actor):
        return cast(Policy, policy)
    raise ConfigError(f"{policy!r} is no policy: it needs initial_state and act (see inchworm.protocols.Policy), or use mlp or cnn")


def _check_spaces(spec: PolicySpec, env: VectorEnv) -> None:
    """Refuse a policy that was made for another world. Bounds may differ: they are no part of a network."""
    pairs = {"observation": (spec.observation_space, env.observation_space), "action": (spec.action_space, env.action_space)}
    for what, (ours, theirs) in pairs.items():
        if _form(ours) != _form(theirs):
            raise SpaceError(f"the policy was made for the {what} space {ours}, but the environment has {theirs}; use a policy made for it")


def _form(space: Space) -> list[Any]:
    return [(path, type(leaf), leaf_shape(leaf), mask_sizes(leaf)) for path, leaf in leaves(space)]


def evaluation_source(env: Any, config: TrainingConfig) -> Any:
    """Where evaluation gets environments of its own from; None where only the ones that train exist."""
    if isinstance(env, VectorEnv | gym.vector.VectorEnv):
        return None
    if isinstance(env, gym.Env):
        spec = env.spec
        return None if spec is None else lambda: dress_given(gym.make(spec), config.env)
    return _source(env, config.env)
