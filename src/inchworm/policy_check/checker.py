"""`check_policy`: does a policy act and learn as training requires? Reports in plain sentences what does not.

It acts, collects and evaluates with the same parts as training, so a policy that passes here has a ratio of 1 there. The checks of acting
are in `acting.py`; those of learning (steps 6 to 9 of 9), on a short rollout that the policy itself collected, are here.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import optree
from gymnasium import spaces

from inchworm.backends.registry import acting_policy, get_backend, learning_threads
from inchworm.collect.collector import RolloutCollector
from inchworm.config.sections import EnvConfig, PolicyConfig
from inchworm.core.protocols import Actor, Policy, VectorEnv
from inchworm.core.spaces import MASK_KEY, build_tree, leaf, leaves, mask_sizes, mask_space
from inchworm.core.types import CheckReport, Tree
from inchworm.env.source import env_source
from inchworm.policy.spec import PolicySpec
from inchworm.policy_check import acting
from inchworm.policy_check.acting import CLOSE, LANES, ROWS, Findings, Subject, distance, lane_of, observation_pool, same_bits
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
    weights: Any = findings.attempt("weights", "get_weights", subject.policy.get_weights)
    named = isinstance(weights, dict) and all(isinstance(key, str) and isinstance(part, np.ndarray) for key, part in weights.items())
    if weights is not None and not named:
        findings.problem("weights", "get_weights must return a dict of names and NumPy arrays")
    if not findings.passed("shapes", "weights"):
        return
    findings.attempt("acting", "act", lambda: _check_acting(subject, findings))
    if not findings.passed("masks", "randomness", "acting"):
        return
    rollout = findings.attempt("collecting", f"collecting {steps} steps", lambda: _collect(subject, steps))
    if rollout is None:
        return
    check_evaluation(subject, rollout, findings)
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
        check_masks(subject, rollout, findings)
    if findings.passed("lanes"):
        check_lanes(subject, rollout, findings)
    if subject.has_memory and findings.passed("memory", "lanes"):
        check_memory(subject, rollout, findings)
    if findings.passed("masks", "memory", "lanes"):
        check_ratio(subject, rollout, findings)
    check_gradients(subject, rollout, findings)
    if subject.can_be_copied:
        check_weights(subject, rollout, findings)


def _collect(subject: Subject, steps: int) -> Rollout:
    """Collect a short rollout of two lanes or more, with the memory recorded at every row."""
    collector = RolloutCollector(subject.env, subject.actor, seed=subject.seed, sequence_length=1)
    rollout = collector.collect(steps)
    return rollout if rollout.num_lanes > 1 else combine_rollouts([rollout, collector.collect(steps)])


TOLERANCE = 5e-5
"""Largest difference between the log-probs of acting and of learning in float32."""


def check_evaluation(subject: Subject, rollout: Rollout, findings: Findings) -> None:
    """Check that `evaluate` and `value` return the right shapes, with gradients, repeatably, and in the same units."""
    tools, policy = subject.tools, subject.policy
    problems = findings.attempt("shapes", "evaluate or value", lambda: tools.faults_of_evaluation(subject.copy_policy(), rollout))
    for problem in problems or ():
        findings.problem("shapes", problem)
    if not findings.passed("shapes"):
        return
    once, again = (tools.evaluated(policy, rollout) for _ in range(2))
    if not same_bits(dataclasses.astuple(once), dataclasses.astuple(again)):
        findings.problem(
            "repeatable",
            "evaluate gives different numbers for the same minibatch each time; is dropout on? Call eval() when gradients are off",
        )
        return
    learned = tools.evaluated(subject.copy_policy(), rollout, gradients=True)
    if distance(learned.log_probs, once.log_probs) > TOLERANCE:
        findings.note(
            "while gradients are on, evaluate gives different log-probs than act (dropout or batch normalisation in training mode?): "
            "the ratio of the first minibatch is then not 1"
        )
    gap = distance(tools.critic_values(policy, rollout) / once.value_scale, once.values / once.value_scale)
    if gap > 1e-3:
        findings.problem(
            "values",
            f"value and evaluate disagree by {gap:.2g} on the same rows; both must return the same critic's values in reward units",
        )


def check_masks(subject: Subject, rollout: Rollout, findings: Findings) -> None:
    """Check that `evaluate` applies the masks: where the action taken is the only legal one, its discrete parts have log-prob 0."""
    parts = dict(leaves(subject.env.action_space))

    def only_taken(path: Any, _: Any) -> np.ndarray:
        """Mask [T, B, n] that allows only the actions [T, B, *act] that were taken."""
        space, taken = parts[path], leaf(rollout.actions, path)
        start = np.asarray(space.start).reshape(-1) if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) else 0
        chosen = (taken.reshape(*taken.shape[:2], -1) - start).astype(np.int64)  # [T, B, parts]
        hot = [np.eye(size, dtype=np.int8)[chosen[..., place]] for place, size in enumerate(mask_sizes(space))]
        return np.concatenate(hot, -1)

    masks = (optree.tree_map(np.ones_like, rollout.observations[MASK_KEY]), build_tree(mask_space(subject.env.action_space), only_taken))
    free, bound = (
        subject.tools.evaluated(
            subject.policy, dataclasses.replace(rollout, observations={**rollout.observations, MASK_KEY: mask})
        ).log_probs
        for mask in masks
    )
    discrete = all(mask_sizes(part) for part in parts.values())
    if same_bits(free, bound) or (discrete and np.abs(bound).max() > CLOSE):
        findings.problem(
            "masks", "evaluate ignores the masks that act obeyed; give the logits of illegal choices a large negative number there too"
        )


def check_lanes(subject: Subject, rollout: Rollout, findings: Findings) -> None:
    """Check that changing one column of a minibatch changes no other."""
    changed = with_other_observations(subject, rollout, slice(None), lanes=slice(0, 1))
    base, after = (subject.tools.evaluated(subject.policy, part) for part in (rollout, changed))
    results = {name: (getattr(base, name), getattr(after, name)) for name in ("log_probs", "entropy", "values")}
    values = [subject.tools.critic_values(subject.policy, part) for part in (rollout, changed)]
    valid = rollout.valid[:, 1:]  # invalid rows are filled from a valid row, perhaps of lane 0
    for what, (one, other) in {**results, "values (by value)": (values[0], values[1])}.items():
        gap = distance(one[:, 1:][valid], other[:, 1:][valid])
        if gap > CLOSE * max(1.0, base.value_scale):
            findings.problem(
                "lanes",
                f"changing one lane's observations changed the {what} that evaluate gives other lanes by {gap:.2g}; compute per lane",
            )
            return


def check_memory(subject: Subject, rollout: Rollout, findings: Findings) -> None:
    """Check that in `evaluate` memory runs along the rows, begins with `policy_state`, and is reset where an episode starts."""
    tools, policy, steps = subject.tools, subject.policy, rollout.num_steps
    last, middle = steps - 1, steps // 2
    without_starts = dataclasses.replace(rollout, episode_starts=np.zeros_like(rollout.episode_starts))
    base = tools.evaluated(policy, without_starts)
    changed = tools.evaluated(policy, with_other_observations(subject, without_starts, slice(0, last)))
    if same_bits(base.log_probs[last], changed.log_probs[last]):
        findings.problem("memory", "in evaluate earlier rows change no later row's log-prob; carry the memory from row to row")
        return
    if same_bits(base.values[last], changed.values[last]):
        findings.note("the critic does not read the memory: its values depend on the current observation only")
    reversed_state = optree.tree_map(lambda part: np.array(part[::-1]), without_starts.policy_state)
    other = tools.evaluated(policy, dataclasses.replace(without_starts, policy_state=reversed_state))
    if same_bits(base.log_probs[0], other.log_probs[0]) and not same_bits(reversed_state, without_starts.policy_state):
        findings.problem("memory", "evaluate does not begin with minibatch.policy_state, the memory before the first row")
        return

    starts = np.array(rollout.episode_starts)  # [T, B] an agent that joins later starts with a reset memory, too
    starts[:middle], starts[middle] = False, True
    restarted = dataclasses.replace(rollout, episode_starts=starts)
    pair = (restarted, with_other_observations(subject, restarted, slice(0, middle)))
    valid = rollout.valid[middle:]  # invalid rows are filled from a valid row, perhaps an earlier one
    results = [tools.evaluated(policy, part) for part in pair]
    gap = max(distance(*[getattr(result, name)[middle:][valid] for result in results]) for name in ("log_probs", "values"))
    if gap > CLOSE:
        findings.problem(
            "memory", f"in evaluate rows after an episode's start still depend on rows before it (by {gap:.2g}); reset at episode_starts"
        )
    elif distance(*[tools.critic_values(policy, part)[middle:][valid] for part in pair]) > CLOSE:
        findings.problem(
            "memory", "value's rows after an episode's start still depend on rows before it; reset at episode_starts there too"
        )


def check_ratio(subject: Subject, rollout: Rollout, findings: Findings) -> None:
    """Check that `evaluate` gives actions the log-probs that acting gave them, whatever the sequence length."""
    steps = rollout.num_steps
    for length in sorted({1, max(1, steps // 4), steps}):
        logs = subject.tools.evaluated(subject.policy, rollout, length).log_probs
        gap = np.where(rollout.valid, np.abs(logs - rollout.log_probs), 0)
        if not gap.max() <= TOLERANCE:
            row, lane = np.unravel_index(int(np.nanargmax(gap)), gap.shape)
            findings.problem(
                "ratio",
                f"evaluate gives log-prob {logs[row, lane]:.6g} where act gave {rollout.log_probs[row, lane]:.6g} (row {row}, lane {lane}, "
                f"sequences of {length}); both must use the same weights, normalisers, masks and memory, and sum over an action's parts",
            )
            return


def check_gradients(subject: Subject, rollout: Rollout, findings: Findings) -> None:
    """Check that the gradient reaches every parameter, and with memory also flows through time."""
    rollout = with_other_observations(subject, rollout, slice(None))  # constant or zero observations would give zero gradients
    gradients = findings.attempt(
        "gradient",
        "the backward pass",
        lambda: subject.tools.parameter_gradients(subject.copy_policy(), rollout, rollout.num_steps, slice(None)),
    )
    if gradients is None:
        return
    reached = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    unreached = [name for name in gradients if name not in reached]
    if unreached:
        findings.problem(
            "gradient",
            f"{format_names(unreached)} get no gradient: not connected to evaluate's outputs; use them, or set requires_grad=False",
        )
    zero = [name for name, gradient in reached.items() if not gradient.any()]
    if zero:
        findings.note(f"{format_names(zero)} get a gradient of exactly 0 here: behind a layer of zeros, dead units, or without effect")
    bad = [name for name, gradient in reached.items() if not np.isfinite(gradient).all()]
    if bad:
        findings.problem("gradient", f"{format_names(bad)} get a gradient that is not finite; look for log(0), sqrt(0) or a division by 0")
    if subject.has_memory and findings.passed("gradient", "memory"):
        _check_gradient_through_time(subject, rollout, findings)


_ROW_FIELDS = ("observations", "actions", "log_probs", "rewards", "terminated", "truncated", "episode_starts", "valid", "global_state")
"""Fields of a rollout [T, …], without the memory."""
_CUT_FIELDS = ("cut_rows", "cut_observations", "cut_state", "cut_valid", "cut_global_state")
"""Fields of a rollout [K, …]."""


def _check_gradient_through_time(subject: Subject, rollout: Rollout, findings: Findings) -> None:
    """Compare the last row's gradient with that of the row alone, which starts with the same memory but has no past."""

    def window(rows: slice, policy_state: Tree) -> Rollout:
        fields: Any = {name: lane_of(rollout[name], rows) for name in _ROW_FIELDS}
        cuts: Any = {name: lane_of(rollout[name], slice(0, 0)) for name in _CUT_FIELDS}
        no_starts = np.zeros_like(fields["episode_starts"])
        return dataclasses.replace(rollout, **{**fields, "episode_starts": no_starts}, **cuts, policy_state=policy_state)

    length = min(ROWS, rollout.num_steps)
    state = lane_of(rollout.policy_state, 0)
    for row in range(length - 1):
        state = subject.act(lane_of(rollout.observations, row), state).state
    sequence = window(slice(0, length), lane_of(rollout.policy_state, slice(0, length)))
    alone = window(slice(length - 1, length), optree.tree_map(lambda part: part[None], state))
    through_time, without = (
        subject.tools.parameter_gradients(subject.copy_policy(), part, part.num_steps, slice(part.num_steps - 1, part.num_steps))
        for part in (sequence, alone)
    )
    pairs = [
        (gradient, 0.0 if without[name] is None else without[name])
        for name, gradient in through_time.items()
        if gradient is not None and gradient.size
    ]
    gap = max(float(np.abs(gradient - other).max()) for gradient, other in pairs)
    if gap <= 1e-5 * max(float(np.abs(gradient).max()) for gradient, _ in pairs) and _memory_is_computed(subject, rollout):
        findings.problem("memory", "no gradient flows through time: a row's loss does not reach earlier rows; detach nothing between rows")


def _memory_is_computed(subject: Subject, rollout: Rollout) -> bool:
    """Whether the memory depends on weights; nothing has to be backpropagated through one that only keeps observations."""
    if not subject.can_be_copied:
        return True
    moved = subject.copy_policy()
    subject.tools.disturb(moved)
    rows = lane_of(rollout.observations, slice(0, min(ROWS, rollout.num_steps)))
    return not same_bits(dataclasses.replace(subject, actor=moved).remember(rows), subject.remember(rows))


def check_weights(subject: Subject, rollout: Rollout, findings: Findings) -> None:
    """Check that `get_weights` copies everything that acting and learning depend on, and that `set_weights` restores it."""
    tools, moved = subject.tools, subject.copy_policy()
    weights = moved.get_weights()
    kept = {name: value.copy() for name, value in weights.items()}
    before, tensors = _behaviour(subject, moved, rollout), tools.tensors(moved)
    tools.disturb(moved)
    changed = [name for name in kept if not same_bits(kept[name], weights[name])]
    if changed:
        findings.problem("weights", f"get_weights returns the policy's own memory ({format_names(changed)} changed with it); return copies")
        return
    findings.attempt("weights", "set_weights", lambda: moved.set_weights(kept))
    if findings.passed("weights") and distance(before, _behaviour(subject, moved, rollout)) > 1e-6:
        lost = [name for name, value in tools.tensors(moved).items() if not same_bits(value, tensors[name])]
        findings.problem(
            "weights",
            f"set_weights(get_weights()) does not restore the policy: {format_names(lost) or 'something'} stays changed; save it too",
        )
    if not findings.passed("weights"):
        return

    fresh = copy.deepcopy(moved)  # what learning changes besides the parameters must be part of the weights, too
    findings.attempt("weights", "update_statistics", lambda: tools.exercise(moved, rollout))
    findings.attempt("weights", "set_weights after update_statistics", lambda: fresh.set_weights(moved.get_weights()))
    if findings.passed("weights") and distance(_behaviour(subject, moved, rollout), _behaviour(subject, fresh, rollout)) > 1e-5:
        restored = tools.tensors(fresh)
        lost = [name for name, value in tools.tensors(moved).items() if not same_bits(value, restored[name])]
        what = format_names(lost) or "something"
        findings.problem("weights", f"{what} changed in update_statistics or evaluate, but is not in get_weights; save it with the weights")


def _behaviour(subject: Subject, policy: Any, rollout: Rollout) -> Tree:
    """Return what a policy does as numbers: greedy actions, log-probs and memory, and its evaluation of the rollout."""
    acting = dataclasses.replace(subject, policy=policy, actor=policy)
    rows = subject.observations("behaviour", ROWS, LANES)
    step = acting.act(lane_of(rows, 0), acting.remember(rows))
    evaluation = subject.tools.evaluated(policy, rollout)
    values = (evaluation.values / evaluation.value_scale, subject.tools.critic_values(policy, rollout))
    return (step.actions, step.log_probs, step.state, evaluation.log_probs, *values)


def with_other_observations(subject: Subject, rollout: Rollout, rows: slice, lanes: slice = slice(None)) -> Rollout:
    """Replace the observations in some rows and lanes; masks are kept, because the actions were taken under them."""
    others = subject.observations("another past", *rollout.rewards.shape)

    def one(leaf: np.ndarray, new: np.ndarray) -> np.ndarray:
        changed = np.array(leaf)
        changed[rows, lanes] = new[rows, lanes]
        return changed

    changed: Any = optree.tree_map(one, rollout.observations, others)
    if subject.has_mask:
        changed[MASK_KEY] = rollout.observations[MASK_KEY]
    return dataclasses.replace(rollout, observations=changed)


def format_names(names: list[str]) -> str:
    """Format the first few names of a list."""
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
