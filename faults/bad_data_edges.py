"""D3: the edges at which a loss could stop being finite, on every backend."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from faults.bad_data_learning import BACKENDS, arrays_of, make_parts, make_rollout
from faults.programme import Outcome, Work, procedure


@procedure(
    "D3",
    title="Edges: huge rewards, equal advantages, minibatches of 1, one step, ends on the boundary, masks, saturation",
    must="finite loss, gradient and weights; GAE as the brute-force sum",
    full=1,
    test=1,
)
def edges(work: Work) -> Outcome:
    """Each edge on each backend: an update, and the advantages beside a plain loop in float64."""
    outcome = Outcome()
    cases = list(_edges())
    for number in work.each(len(cases)):
        name, parts, shape, fields, law = cases[number]
        for backend in BACKENDS:
            wrong = _at_edge(backend, parts, shape, fields, law)
            outcome.check(not wrong, f"{name}, {backend}: {wrong}")
    outcome.notes.append(
        "a reward of 1e30 needs policy.normalize_values: its square is beyond float32, so that without it the three-in-a-row stop answers"
    )
    return outcome


Law = Callable[[Any], bool] | None


def _edges() -> Iterator[tuple[str, dict[str, Any], tuple[int, int], dict[str, Any], Law]]:
    from gymnasium import spaces

    def ends(steps: int, lanes: int, *rows: int) -> np.ndarray:
        flags = np.zeros((steps, lanes), bool)
        flags[list(rows)] = True
        return flags

    big = {"rewards": np.full((8, 2), 1e30, np.float32)}
    yield "rewards of 1e30", {"policy": {"normalize_values": True}}, (8, 2), big, None
    yield (
        "one reward of 1e30",
        {"policy": {"normalize_values": True}},
        (8, 2),
        {"rewards": np.where(np.arange(16).reshape(8, 2) == 5, 1e30, 0).astype(np.float32)},
        None,
    )
    yield "rewards of 1e15", {}, (8, 2), {"rewards": np.full((8, 2), 1e15, np.float32)}, None
    equal = {"rewards": np.zeros((8, 2), np.float32), "terminated": np.ones((8, 2), bool), "observations": np.zeros((9, 2, 3), np.float32)}
    yield "all advantages equal", {"ent_coef": 0.0, "vf_coef": 0.0}, (8, 2), equal, lambda stats: abs(stats["policy_loss"]) < 1e-6
    yield "minibatches of 1", {"num_minibatches": 16, "normalize_advantages": "minibatch"}, (8, 2), {}, None
    yield "a remainder of 1", {"num_minibatches": None, "minibatch_size": 5}, (8, 2), {}, None
    yield "one step", {}, (1, 2), {}, None
    yield "one step of one lane", {}, (1, 1), {}, None
    yield "one step of one lane, normalised by minibatch", {"normalize_advantages": "minibatch"}, (1, 1), {}, None
    yield "episodes of length 1", {}, (8, 2), {"terminated": np.ones((8, 2), bool)}, None
    yield "episodes cut after 1 step", {}, (8, 2), {"truncated": np.ones((8, 2), bool)}, None
    yield "an end exactly on the boundary", {}, (8, 2), {"terminated": ends(8, 2, 7)}, None
    yield "a cut exactly on the boundary", {}, (8, 2), {"truncated": ends(8, 2, 7)}, None
    yield "an end just before the boundary", {}, (8, 2), {"terminated": ends(8, 2, 6)}, None
    space = spaces.Dict({"x": spaces.Box(-2.0, 2.0, (3,), np.float32), "action_mask": spaces.MultiBinary(3)})
    for words, row in (("all actions but one masked", [0, 1, 0]), ("all actions masked", [0, 0, 0])):
        mask = np.broadcast_to(np.array(row, np.int8), (9, 2, 3)).copy()
        seen = {"x": np.random.default_rng(3).normal(0, 1, (9, 2, 3)).astype(np.float32), "action_mask": mask}
        yield (
            words,
            {"observation_space": space},
            (8, 2),
            {"observations": seen},
            (lambda stats: abs(stats["entropy"]) < 1e-6) if any(row) else None,
        )
    box = spaces.Box(-1.0, 1.0, (2,), np.float32)
    for far in (5.0, 20.0, 200.0):
        actions = np.full((8, 2, 2), far, np.float32)
        yield (
            f"tanh of {far:g}",
            {"action_space": box, "policy": {"action_bounds": "tanh"}},
            (8, 2),
            {"actions": actions, "log_probs": "own"},
            None,
        )
    yield (
        "observations of 1e30, normalised",
        {"policy": {"normalize_observations": True}},
        (8, 2),
        {"observations": np.full((9, 2, 3), 1e30, np.float32)},
        None,
    )
    yield "rows without a living agent", {}, (8, 2), {"valid": np.zeros((8, 2), bool)}, None


def _at_edge(backend: str, parts: dict[str, Any], shape: tuple[int, int], fields: dict[str, Any], law: Law) -> str:
    from inchworm.backends.registry import compute_advantages

    policy, learner = make_parts(backend, **parts)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        rollout = make_rollout(policy, *shape, **{name: value for name, value in fields.items() if not isinstance(value, str)})
        if "log_probs" in fields:
            rollout = _with_own_log_probs(policy, rollout)
        seen = compute_advantages(policy, rollout, learner.config)
        error = _gae_error(seen, rollout, learner.config)
        stats = [learner.update(rollout) for _ in range(2)][-1]  # with a normaliser the first only moves the statistics
    if not np.isfinite(list(stats.values())).all() or stats.get("skipped_steps", 0):
        return f"skipped {stats.get('skipped_steps')}, { ({k: v for k, v in stats.items() if not np.isfinite(v)}) }"
    if not all(np.isfinite(array).all() for array in arrays_of(policy, learner)):
        return "a weight is not finite"
    if law is not None and not law(stats):
        return f"the law does not hold: {dict(stats)}"
    return "" if error <= 5e-6 else f"the advantages are {error:.1e} from the plain sum"


def _with_own_log_probs(policy: Any, rollout: Any) -> Any:
    """The rollout's actions with the log-probs that the policy gives them now."""
    import dataclasses

    from inchworm.backends.numpy.policy import NumpyPolicy
    from inchworm.core.types import Minibatch

    own = NumpyPolicy(policy.spec, policy.get_weights())
    flat = np.zeros_like(rollout.rewards)
    minibatch = Minibatch(
        observations=rollout.observations,
        actions=rollout.actions,
        log_probs=flat,
        advantages=flat,
        returns=flat,
        values=flat,
        valid=rollout.valid,
        episode_starts=rollout.episode_starts,
    )
    return dataclasses.replace(rollout, log_probs=np.asarray(own.evaluate(minibatch).log_probs, np.float32))


def _gae_error(seen: Any, rollout: Any, config: Any) -> float:
    """How far the advantages are from the plain recursion in float64, relative to the largest."""
    values, following = np.asarray(seen.values, np.float64), np.asarray(seen.next_values, np.float64)
    total, plain = np.zeros(rollout.num_lanes), np.zeros(values.shape)
    for t in reversed(range(rollout.num_steps)):
        goes_on = ~rollout.terminated[t]
        delta = rollout.rewards[t].astype(np.float64) + config.gamma * following[t] * goes_on - values[t]
        total = delta + config.gamma * config.gae_lambda * (goes_on & ~rollout.truncated[t]) * total
        plain[t] = total
    valid = rollout.valid
    if not valid.any():
        return 0.0
    return float(np.abs(np.asarray(seen.advantages) - plain)[valid].max() / max(1.0, np.abs(plain[valid]).max()))
