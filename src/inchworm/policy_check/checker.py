"""`check_policy`: does a policy act and learn as training requires? Reports in plain sentences what does not.

It acts, collects and evaluates with the same parts as training, so a policy that passes here has a ratio of 1 there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import gymnasium as gym

from inchworm.backends.registry import acting_policy, get_backend, learning_threads
from inchworm.collect.collector import RolloutCollector
from inchworm.config.sections import EnvConfig, PolicyConfig
from inchworm.core.protocols import Actor, Policy, VectorEnv
from inchworm.core.types import CheckReport
from inchworm.env.source import env_source
from inchworm.policy.spec import PolicySpec
from inchworm.policy_check import acting, learning
from inchworm.policy_check.acting import Findings, Subject, observation_pool
from inchworm.rollout.rollout import Rollout, combine_rollouts
from inchworm.train.resolve import resolve_choices, resolve_config, resolve_env, resolve_policy

_METHODS = ("policy_version", "initial_state", "act", "value", "evaluate", "update_statistics", "get_weights", "set_weights")
_COPIES = 4
"""Of an environment that can be copied."""


class PolicyReport(CheckReport):
    """Result of `check_policy`: `problems` break or degrade training, `notes` are worth knowing."""

    subject = "policy"


def check_policy(
    policy: str | PolicyConfig | PolicySpec | Actor,
    env: str | EnvConfig | gym.Env[Any, Any] | Callable[[], gym.Env[Any, Any]] | VectorEnv,
    *,
    steps: int = 24,
    seed: int = 0,
) -> PolicyReport:
    """Check whether `policy` can be trained in `env`; both are what `PPOTrainer` takes. The given policy is not changed.

    Environments made here are closed; a given one stays open after some random steps.
    """
    findings = Findings()
    asked = resolve_config(policy, env, None, num_envs=None, seed=seed, backend="torch", device="cpu")
    num_envs = env_source(env).num_copies or min(_COPIES, asked.env.num_envs)
    config, _ = resolve_choices(policy, env, asked.replace(env=asked.env.replace(num_workers=0, num_envs=num_envs)))
    vector_env = resolve_env(env, config)
    try:
        chosen = resolve_policy(policy, config, vector_env)
        with learning_threads(1):  # batches are too small to gain from threads
            _run_checks(chosen, vector_env, steps, seed, findings)
    finally:
        if vector_env is not env:
            vector_env.close()
    return PolicyReport(tuple(dict.fromkeys(findings.problems)), tuple(dict.fromkeys(findings.notes)))  # without duplicates


def _run_checks(policy: Any, env: VectorEnv, steps: int, seed: int, findings: Findings) -> None:
    """Run the checks in an order in which the first failure is the cause: checks that depend on a failed one are skipped."""
    checking: Any = get_backend("torch").checking()
    missing = [name for name in _METHODS if name not in dir(policy)]
    if missing:
        findings.problem("protocol", f"{type(policy).__name__} has no {', '.join(missing)}: see inchworm.Policy for what each of them does")
    elif not checking.is_module(policy):
        findings.problem("protocol", f"{type(policy).__name__} is not a torch.nn.Module, so torch cannot train it; make it one")
    elif not isinstance(policy, Policy) or type(policy.policy_version) is not int:
        findings.problem("protocol", f"policy_version must be an int, 0 at the start, not {policy.policy_version!r}")
    if not findings.passed("protocol"):
        return
    can_be_copied = True
    try:
        policy = copy.deepcopy(policy)  # the checks run on a copy
    except Exception as error:  # user code may raise anything
        findings.note(f"the policy cannot be copied ({type(error).__name__}: {error}), so it was used itself; its weights were not checked")
        can_be_copied = False
    subject = Subject(policy, acting_policy(policy), env, observation_pool(env, seed), seed, can_be_copied, checking)

    acting.check_step(subject, findings)
    learning.check_weights_form(subject, findings)
    if not findings.passed("shapes", "weights"):
        return
    findings.attempt("acting", "act", lambda: _check_acting(subject, findings))
    if not findings.passed("masks", "randomness", "acting"):
        return
    rollout = findings.attempt("collecting", f"collecting {steps} steps", lambda: _collect(subject, steps))
    if rollout is None:
        return
    learning.check_evaluation(subject, rollout, findings)
    if findings.passed("shapes", "repeatable"):
        findings.attempt("learning", "evaluate", lambda: _check_learning(subject, rollout, findings))


def _check_acting(subject: Subject, findings: Findings) -> None:
    acting.check_randomness(subject, findings)
    if not findings.passed("randomness"):
        return
    if subject.has_mask:
        acting.check_masks(subject, findings)
    if findings.passed("deterministic acting"):  # these compare greedy actions
        acting.check_lanes(subject, findings)
        if subject.has_memory and findings.passed("lanes"):
            acting.check_memory(subject, findings)


def _check_learning(subject: Subject, rollout: Rollout, findings: Findings) -> None:
    if subject.has_mask:
        learning.check_masks(subject, rollout, findings)
    if findings.passed("lanes"):
        learning.check_lanes(subject, rollout, findings)
    if subject.has_memory and findings.passed("memory", "lanes"):
        learning.check_memory(subject, rollout, findings)
    if findings.passed("masks", "memory", "lanes"):
        learning.check_ratio(subject, rollout, findings)
    learning.check_gradients(subject, rollout, findings)
    if subject.can_be_copied:
        learning.check_weights(subject, rollout, findings)


def _collect(subject: Subject, steps: int) -> Rollout:
    """Collect a short rollout of two lanes or more, with the memory recorded at every row."""
    collector = RolloutCollector(subject.env, subject.actor, seed=subject.seed, sequence_length=1)
    rollout = collector.collect(steps)
    return rollout if rollout.num_lanes > 1 else combine_rollouts([rollout, collector.collect(steps)])
