"""Serves the front door: `check_policy` tries the laws of training on a policy before training, and says in words what is broken.

It acts, collects and evaluates with the very parts that training uses, so what passes here has a ratio of 1 there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import gymnasium as gym

from inchworm.backends.registry import acting_policy, learning_threads
from inchworm.collect.collector import RolloutCollector
from inchworm.config.sections import EnvConfig, PolicyConfig
from inchworm.core.protocols import Actor, Policy, VectorEnv
from inchworm.policy.spec import PolicySpec
from inchworm.policy_check import acting, learning
from inchworm.policy_check.findings import Findings, PolicyReport, Subject, observation_pool
from inchworm.rollout.rollout import Rollout, combine_rollouts
from inchworm.train.resolve import resolve_choices, resolve_config, resolve_env, resolve_policy

_METHODS = ("policy_version", "initial_state", "act", "value", "evaluate", "update_statistics", "get_weights", "set_weights")
_COPIES = 4
"""Of an environment that can be copied."""


def check_policy(
    policy: str | PolicyConfig | PolicySpec | Actor,
    env: str | EnvConfig | gym.Env[Any, Any] | Callable[[], gym.Env[Any, Any]] | VectorEnv,
    *,
    steps: int = 24,
    seed: int = 0,
) -> PolicyReport:
    """Try the laws of training on `policy` in `env`: both are what `PPOTrainer` takes. The policy that is given is not changed.

    Environments made here are closed; a given one stays open, some random steps further.
    """
    found = Findings()
    asked = resolve_config(policy, env, None, num_envs=None, seed=seed, backend="torch", device="cpu")
    many = 1 if isinstance(env, gym.Env) else min(_COPIES, asked.env.num_envs)
    lanes = asked.env.num_envs if isinstance(env, VectorEnv | gym.vector.VectorEnv) else many
    config, _ = resolve_choices(policy, env, asked.replace(env=asked.env.replace(num_workers=0, num_envs=lanes)))
    vector_env = resolve_env(env, config)
    try:
        chosen = resolve_policy(policy, config, vector_env)
        if _can_learn(chosen, found):
            with learning_threads(1):  # a few numbers gain nothing from threads
                _check(_subject(chosen, vector_env, seed, found), steps, found)
    finally:
        if vector_env is not env:
            vector_env.close()
    return found.report()


def _can_learn(policy: Any, found: Findings) -> bool:
    """Whether it has all that training calls."""
    from inchworm.backends.torch.checking import is_module

    missing = [name for name in _METHODS if name not in dir(policy)]
    if missing:
        found.problem("protocol", f"{type(policy).__name__} has no {', '.join(missing)}: see inchworm.Policy for what each of them does")
    elif not is_module(policy):
        found.problem("protocol", f"{type(policy).__name__} is no torch.nn.Module, so that torch cannot learn it; make it one")
    elif not isinstance(policy, Policy) or type(policy.policy_version) is not int:
        found.problem("protocol", f"policy_version must be an int, 0 at the start, not {policy.policy_version!r}")
    return found.keeps("protocol")


def _subject(policy: Any, env: VectorEnv, seed: int, found: Findings) -> Subject:
    copies = True
    try:
        policy = copy.deepcopy(policy)  # what is checked is used, and the one that was given is not
    except Exception as error:  # somebody's code
        found.note(f"the policy cannot be copied ({type(error).__name__}: {error}), so it was used itself; its weights were not tried")
        copies = False
    return Subject(policy, acting_policy(policy), env, observation_pool(env, seed), seed, copies)


def _check(subject: Subject, steps: int, found: Findings) -> None:
    """The laws in an order in which the first broken one is the cause: those that rest on it are not tried."""
    acting.check_step(subject, found)
    learning.check_form(subject, found)
    if not found.keeps("shapes", "weights"):
        return
    _check_acting(subject, found)
    if not found.keeps("masks", "randomness", "acting"):
        return
    rollout = found.attempt("collecting", f"collecting {steps} steps", lambda: _collect(subject, steps))
    if rollout is None:
        return
    learning.check_evaluation(subject, rollout, found)
    if found.keeps("shapes", "repeatable"):
        found.attempt("learning", "evaluate", lambda: _check_learning(subject, rollout, found))


def _check_acting(subject: Subject, found: Findings) -> None:
    from inchworm.backends.torch.checking import GlobalStreams

    found.attempt("acting", "act", lambda: acting.check_randomness(subject, found, GlobalStreams().replayed))
    if not found.keeps("randomness"):
        return
    if subject.has_mask:
        found.attempt("acting", "act", lambda: acting.check_masks(subject, found))
    if found.keeps("deterministic acting"):  # these compare greedy actions
        found.attempt("acting", "act", lambda: acting.check_lanes(subject, found))
        if subject.has_memory and found.keeps("lanes"):
            found.attempt("acting", "act", lambda: acting.check_memory(subject, found))


def _check_learning(subject: Subject, rollout: Rollout, found: Findings) -> None:
    if subject.has_mask:
        learning.check_masks_learning(subject, rollout, found)
    if found.keeps("lanes"):
        learning.check_lanes_learning(subject, rollout, found)
    if subject.has_memory and found.keeps("memory", "lanes"):
        learning.check_memory_learning(subject, rollout, found)
    if found.keeps("masks", "memory", "lanes"):
        learning.check_ratio(subject, rollout, found)
    learning.check_gradients(subject, rollout, found)
    if subject.copies:
        learning.check_weights(subject, rollout, found)


def _collect(subject: Subject, steps: int) -> Rollout:
    """A short rollout, its memory recorded at every row; two lanes at least, so that lanes have others beside them."""
    collector = RolloutCollector(subject.env, subject.actor, seed=subject.seed, sequence_length=1)
    rollout = collector.collect(steps)
    return rollout if rollout.num_lanes > 1 else combine_rollouts([rollout, collector.collect(steps)])
