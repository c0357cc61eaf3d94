"""`inchworm check-env ENV` and `inchworm check-policy POLICY ENV`: find what would break training."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import field
from typing import Annotated, Any, get_args, get_type_hints

from inchworm.cli.arguments import ENV, Metavar, UsageError, has_several_agents, make_named_env, parse
from inchworm.cli.main import FAILED, OK
from inchworm.config.reading import FROM_LIST, ConfigBase, config_class
from inchworm.config.sections import EnvConfig, PolicyConfig, WrapperConfig
from inchworm.core.errors import InchwormError, describe_error
from inchworm.core.types import CheckReport
from inchworm.env.check import check_env, make_checked
from inchworm.env.source import make_vector_env
from inchworm.policy.composite import CompositePolicy
from inchworm.policy_check.checker import check_policy
from inchworm.run.directory import open_run
from inchworm.run.policies import is_one_policy, load_policy, load_run_policy
from inchworm.tracking.console import make_terminal

PROG_CHECK_ENV, PROG_CHECK_POLICY = "inchworm check-env", "inchworm check-policy"
_COPIES = 4
_KINDS: tuple[str, ...] = get_args(get_type_hints(PolicyConfig)["kind"])


@config_class("--env.")
class EnvArguments(ConfigBase):
    """What the environment is made with."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments, such as '{gravity: 5}'."""
    wrappers: Annotated[tuple[WrapperConfig, ...], FROM_LIST] = ()
    """Wrappers, innermost first, such as '[{name: ClipReward, kwargs: {min_reward: -1}}]'."""


@config_class("--")
class CheckOptions(ConfigBase):
    """Look for what would break training: wrong spaces, bad numbers, lost observations, randomness that ignores the seed."""

    env_id: Annotated[str, ENV] = ""
    """A Gymnasium id, or package.module:make_env for your own factory."""
    max_episode_steps: int | None = None
    """As env.max_episode_steps of a run."""
    frame_stack: int = 1
    """As env.frame_stack of a run."""
    atari: bool = False
    """As env.atari of a run."""
    env: EnvArguments = field(default_factory=EnvArguments)


def run_check_env(arguments: Sequence[str]) -> int:
    """Check an environment; problems make the exit code 1."""
    options = parse(CheckOptions, arguments, PROG_CHECK_ENV)
    if not options.env_id:
        raise UsageError(f"no environment is given; type: {PROG_CHECK_ENV} CartPole-v1")
    config = EnvConfig(
        id=options.env_id,
        kwargs=options.env.kwargs,
        wrappers=options.env.wrappers,
        max_episode_steps=options.max_episode_steps,
        frame_stack=options.frame_stack,
        atari=options.atari,
    )
    make_named_env(config, make=make_checked).close()  # one that cannot be made is wrong use
    return _show(config.id, check_env(config))


@config_class("--")
class CheckPolicyOptions(ConfigBase):
    """Check a policy against what training relies on: ratio 1, masks, memory, lanes, gradients, weights."""

    policy: Annotated[str, Metavar("POLICY", positional=True)] = ""
    """package.module:make_policy (called with the observation space and the action space), a kind such as mlp, a run, or a policy file."""
    env_id: Annotated[str, ENV] = ""
    """A Gymnasium id, or package.module:make_env; a run's own environment by default."""
    steps: int = 24
    """Steps of the rollout that the policy is checked on."""
    seed: int = 0
    """Seed of everything random."""
    env: EnvArguments = field(default_factory=EnvArguments)


def run_check_policy(arguments: Sequence[str]) -> int:
    """Check a policy; problems make the exit code 1."""
    options = parse(CheckPolicyOptions, arguments, PROG_CHECK_POLICY)
    if not options.policy:
        raise UsageError(f"no policy is given; type: {PROG_CHECK_POLICY} package.module:make_policy CartPole-v1")
    policy, config = _policy_and_env(options)
    has_several_agents(config)  # an environment that cannot be made is wrong use
    if callable(policy):
        with closing(make_vector_env(config, _COPIES, 0, seed=options.seed)) as env:
            try:
                policy = policy(env.observation_space, env.action_space)
            except InchwormError:
                raise
            except Exception as error:
                raised = " ".join(describe_error(error).split())
                raise UsageError(f"{options.policy}(observation_space, action_space) raised {raised}; --traceback shows all") from error
            report = check_policy(policy, env, steps=options.steps, seed=options.seed)
    else:
        report = check_policy(policy, config, steps=options.steps, seed=options.seed)
    return _show(options.policy, report)


def _policy_and_env(options: CheckPolicyOptions) -> tuple[Any, EnvConfig]:
    """Return the policy, its kind or its factory, and the environment to check it in."""
    name = options.policy
    saved = is_one_policy(name)
    if saved or ":" in name or name in _KINDS:
        if not options.env_id:
            raise UsageError(f"no environment is given; type: {PROG_CHECK_POLICY} {name} CartPole-v1")
        config = EnvConfig(id=options.env_id, kwargs=options.env.kwargs, wrappers=options.env.wrappers)
        if not saved:
            return name if name in _KINDS else _import_factory(name), config
        return load_policy(name), config
    hint = f"; a policy is package.module:make_policy, {', '.join(_KINDS)}, a run or a policy file"
    run = open_run(name, env=options.env_id or None, hint=hint)
    policy, _ = load_run_policy(run)
    if isinstance(policy, CompositePolicy):
        files = ", ".join(str(run.path / f"policy-{part}.safetensors") for part in policy.learned)
        raise UsageError(f"the run {run.path} has several policies; check each by its file, with an environment: {files}")
    return policy, run.config.env.replace(id=options.env_id) if options.env_id else run.config.env


def _import_factory(name: str) -> Callable[..., Any]:
    """Import the function that the command line names; nothing else is imported by name."""
    module_name, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise UsageError(f"{name}: there is no module {error.name}; install it, or start in the directory that holds it") from None
    except AttributeError:
        raise UsageError(f"{name}: the module {module_name} has no {attribute}") from None
    if not callable(found):
        raise UsageError(f"{name} is not a function; it must take (observation_space, action_space) and return a policy")
    factory: Callable[..., Any] = found
    return factory


def _show(name: str, report: CheckReport) -> int:
    make_terminal().print(f"{name}: {report}")
    return OK if report.ok else FAILED
