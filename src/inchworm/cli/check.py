"""`inchworm check-env ENV`: what in an environment would break training, in words."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import tyro

from inchworm.cli.arguments import UsageError, parse, take_yaml_flags
from inchworm.cli.main import FAILED, OK
from inchworm.cli.names import check_can_be_made, load_run_policy, made
from inchworm.config.sections import EnvConfig, PolicyConfig, TrainingConfig
from inchworm.core.errors import ConfigError, InchwormError
from inchworm.core.protocols import VectorEnv
from inchworm.env.check import check_env
from inchworm.env.source import make_vector_env
from inchworm.policy.composite import CompositePolicy
from inchworm.policy_check.checker import check_policy
from inchworm.policy_check.findings import PolicyReport, place_of
from inchworm.run.directory import open_run
from inchworm.tracking.console import make_terminal

PROG_CHECK_ENV = "inchworm check-env"


@dataclass(frozen=True)
class CheckOptions:
    """Look for what would break training: spaces that lie, bad numbers, lost observations, randomness that no seed governs.

    Two more flags take YAML: --env.kwargs '{gravity: 5}' and --env.wrappers '[{name: ClipReward, kwargs: {min_reward: -1}}]'.
    """

    env_id: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV")] = ""
    """A Gymnasium id, or package.module:make_env for a factory of yours."""
    max_episode_steps: int | None = None
    """As env.max_episode_steps of a run."""
    frame_stack: int = 1
    """As env.frame_stack of a run."""
    atari: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """As env.atari of a run."""


def run_check_env(arguments: Sequence[str]) -> int:
    """Check, and say what was found; problems make the exit code 1."""
    rest, config = take_yaml_flags(arguments, TrainingConfig())
    options = parse(CheckOptions, rest, PROG_CHECK_ENV)
    if not options.env_id:
        raise UsageError(f"no environment is given; type: {PROG_CHECK_ENV} CartPole-v1")
    env = config.env.replace(
        id=options.env_id, max_episode_steps=options.max_episode_steps, frame_stack=options.frame_stack, atari=options.atari
    )
    return _report_env(env)


def _report_env(config: EnvConfig) -> int:
    terminal = make_terminal()
    env = made(config)
    try:
        report = check_env(env)
    finally:
        env.close()
    for problem in report.problems:
        terminal.print(f"problem: {problem}", markup=False)
    for note in report.notes:
        terminal.print(f"note: {note}", markup=False)
    count = len(report.problems)
    found = "nothing that would break training" if report.ok else f"{count} problem{'s' if count > 1 else ''}"
    terminal.print(f"{config.id}: {found}", markup=False)
    return OK if report.ok else FAILED


PROG_CHECK_POLICY = "inchworm check-policy"
_COPIES = 4


@dataclass(frozen=True)
class CheckPolicyOptions:
    """Try the laws of training on a policy: ratio 1, masks, memory, lanes, gradients, weights. Each broken one is said in words.

    Two more flags take YAML: --env.kwargs '{gravity: 5}' and --env.wrappers '[{name: ClipReward, kwargs: {min_reward: -1}}]'.
    """

    policy: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="POLICY")] = ""
    """package.module:make_policy (called with the observation space and the action space), a kind such as mlp, a run, or a policy file."""
    env_id: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV")] = ""
    """A Gymnasium id, or package.module:make_env; of a run, its own by default."""
    steps: int = 24
    """Steps of the rollout that it is tried on."""
    seed: int = 0
    """Of everything that is drawn."""


def run_check_policy(arguments: Sequence[str]) -> int:
    """Check, and say what was found; problems make the exit code 1."""
    rest, config = take_yaml_flags(arguments, TrainingConfig())
    options = parse(CheckPolicyOptions, rest, PROG_CHECK_POLICY)
    if not options.policy:
        raise UsageError(f"no policy is given; type: {PROG_CHECK_POLICY} package.module:make_policy CartPole-v1")
    return _tell(options.policy, _check(options, config.env))


def _check(options: CheckPolicyOptions, env: EnvConfig) -> PolicyReport:
    policy, world = _source(options, env)
    check_can_be_made(world)
    if not callable(policy):
        return check_policy(policy, world, steps=options.steps, seed=options.seed)
    vector_env = make_vector_env(world, _COPIES, 0, seed=options.seed)
    try:
        made = _called(policy, options.policy, vector_env)
        return check_policy(made, vector_env, steps=options.steps, seed=options.seed)
    finally:
        vector_env.close()


def _called(factory: Callable[..., Any], name: str, env: VectorEnv) -> Any:
    """What somebody's function makes of the spaces; whatever it raises is told in one line."""
    try:
        return factory(env.observation_space, env.action_space)
    except InchwormError:
        raise
    except Exception as error:
        raised = f"{type(error).__name__}: {' '.join(str(error).split())}{place_of(error)}"
        raise UsageError(f"{name}(observation_space, action_space) raised {raised}; --debug shows the traceback") from error


def _source(options: CheckPolicyOptions, env: EnvConfig) -> tuple[Any, EnvConfig]:
    """The policy or its factory, and the world to try it in."""
    name, given = options.policy, options.env_id
    is_file = Path(name).is_file()
    if not given and (is_file or ":" in name or name in _kinds()):
        raise UsageError(f"no environment is given; type: {PROG_CHECK_POLICY} {name} CartPole-v1")
    if is_file:
        from inchworm.policy.file import load_policy

        return load_policy(name), env.replace(id=given)
    if name in _kinds():
        return name, env.replace(id=given)
    if ":" in name:
        return _factory(name), env.replace(id=given)
    try:
        known = open_run(name, env=given or None)
    except ConfigError as error:
        hint = f"; a policy is package.module:make_policy, {', '.join(_kinds())}, a run or a policy file" if "no run" in str(error) else ""
        raise UsageError(f"{error}{hint}") from None
    policy, _ = load_run_policy(known)
    if isinstance(policy, CompositePolicy):
        files = ", ".join(str(known.path / f"policy-{part}.safetensors") for part in policy.learned)
        raise UsageError(f"the run {known.path} has several policies; check each by its file, with an environment: {files}")
    return policy, known.config.env.replace(id=given) if given else known.config.env


def _kinds() -> tuple[str, ...]:
    return get_args(get_type_hints(PolicyConfig)["kind"])


def _factory(name: str) -> Callable[..., Any]:
    """The function that the command line names; nothing else is ever imported by name."""
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
        raise UsageError(f"{name} is no function; it must take (observation_space, action_space) and return a policy")
    factory: Callable[..., Any] = found
    return factory


def _tell(name: str, report: PolicyReport) -> int:
    terminal = make_terminal()
    for problem in report.problems:
        terminal.print(f"problem: {problem}", markup=False)
    for note in report.notes:
        terminal.print(f"note: {note}", markup=False)
    count = len(report.problems)
    found = "keeps every law of training" if report.ok else f"{count} problem{'s' if count > 1 else ''}"
    terminal.print(f"{name}: {found}", markup=False)
    return OK if report.ok else FAILED
