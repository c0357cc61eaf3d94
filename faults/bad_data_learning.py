"""D2 to D5: losses that are not finite, edges of the loss, the precision of the normalisers, and the cost of the checks."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import optree
from gymnasium import spaces

from faults.programme import Outcome, Work, benchmark, procedure
from faults.right_worlds import BACKENDS, advantage_sum
from inchworm import PPOTrainer
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.backends.registry import compute_advantages, make_learner, make_policy
from inchworm.config.sections import PolicyConfig, PPOConfig, RunConfig, TrainingConfig
from inchworm.core.errors import BadNumberError
from inchworm.core.tensor_file import read_tensor_file
from inchworm.core.types import Minibatch
from inchworm.policy.file import read_policy
from inchworm.policy.spec import PolicySpec
from inchworm.policy.statistics import RunningMeanStd
from inchworm.rollout.rollout import Rollout
from inchworm.run.checkpoint import TrainingCheckpointer


def make_parts(backend: str, *, dump: Path | None = None, **options: Any) -> tuple[Any, Any]:
    """A small policy and its learner; options are the spaces, fields of `policy`, and fields of PPOConfig."""
    observation_space = options.pop("observation_space", spaces.Box(-2.0, 2.0, (3,), np.float32))
    action_space = options.pop("action_space", spaces.Discrete(3))
    spec = PolicySpec(observation_space, action_space, PolicyConfig(hidden_sizes=(8,), **options.pop("policy", {})))
    policy = make_policy(spec, backend=backend)  # type: ignore[arg-type]
    ppo = PPOConfig(**{"update_epochs": 1, "num_minibatches": 1, **options})
    return policy, make_learner(policy, TrainingConfig(ppo=ppo, run=RunConfig(backend=backend, device="cpu")), dump_directory=dump)  # type: ignore[arg-type]


def make_rollout(policy: Any, steps: int, lanes: int, *, seed: int = 0, **fields: Any) -> Any:
    """Random observations with the policy's own actions; nothing ends unless `fields` say so."""
    rng = np.random.default_rng(seed)
    space = policy.spec.observation_space
    whole = fields.pop("observations", None)
    if whole is None:
        whole = rng.normal(0, 1, (steps + 1, lanes, *space.shape)).astype(np.float32)
    rows = [policy.act(optree.tree_map(lambda leaf, t=t: leaf[t], whole), (), np.zeros(lanes, bool), rng) for t in range(steps)]
    data: dict[str, Any] = {
        "observations": optree.tree_map(lambda leaf: leaf[:-1], whole),
        "next_observations": optree.tree_map(lambda leaf: leaf[1:], whole),
        "actions": optree.tree_map(lambda *leaves: np.stack(leaves), *[row.actions for row in rows]),
        "log_probs": np.stack([row.log_probs for row in rows]),
        "rewards": rng.normal(0, 1, (steps, lanes)).astype(np.float32),
        "terminated": np.zeros((steps, lanes), bool),
        "truncated": np.zeros((steps, lanes), bool),
    }
    return Rollout.from_dict({**data, **fields})


def arrays_of(policy: Any, learner: Any) -> list[np.ndarray]:
    """Everything that a step moves."""
    return [np.array(leaf) for leaf in optree.tree_leaves([policy.get_weights(), learner.state_dict()["moments"]])]


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    """Whether all arrays but one are equal: the policy version moves with every update."""
    return sum(not np.array_equal(a, b) for a, b in zip(one, other)) <= 1


def spoiling(backend: str, how: str, bad: set[int]) -> Callable[..., Any]:
    """A custom loss that is 0, and bad in the minibatches whose numbers are in `bad`."""
    calls = iter(range(10**9))

    def numpy_loss(values: Any) -> Any:
        number = next(calls)
        slope = np.full(values.shape, np.nan if number in bad and how == "NaN gradient" else 0.0)
        value = {"NaN loss": np.nan, "infinite loss": np.inf}.get(how, 0.0) if number in bad else 0.0
        return value, {"values": slope}

    def torch_loss(values: Any) -> Any:
        number = next(calls)
        if number not in bad:
            return values.sum() * 0.0
        return (values * 0).sqrt().sum() if how == "NaN gradient" else (values * 0).sum() + float("nan" if how == "NaN loss" else "inf")

    return numpy_loss if backend == "numpy" else torch_loss


@procedure("D2", full=1, test=1)
def bad_losses(work: Work) -> Outcome:
    """A loss or gradient that is not finite, forced into both backends.

    Must: the step is not taken, counted; 3 in a row stop with a dump; no such weight is ever saved.
    By a custom loss, and by a learning rate that overflows.
    """
    outcome = Outcome()
    for backend in BACKENDS:
        for how in ("NaN loss", "infinite loss", "NaN gradient"):
            for words, fine in _spoiled(backend, how, work.scratch / f"{backend} {how}"):
                outcome.check(fine, f"{backend}, {how}: {words}")
        for rate in (1e20, 1e38, 1e39, 1e300):
            wrong = _overflow(backend, rate, work.scratch / f"{backend} {rate:g}")
            outcome.check(not wrong, f"{backend}, learning rate {rate:g}: {wrong}")
    return outcome


def _spoiled(backend: str, how: str, dump: Path) -> Iterator[tuple[str, bool]]:
    policy, learner = make_parts(backend, dump=dump)
    learner.update(make_rollout(policy, 8, 3), [spoiling(backend, how, set())])
    before = arrays_of(policy, learner)
    stats = learner.update(make_rollout(policy, 8, 3, seed=1), [spoiling(backend, how, {0})])
    yield "the step moved something", same(before, arrays_of(policy, learner))
    yield f"it counted {stats['skipped_steps']} skipped steps", stats["skipped_steps"] == 1
    yield "a metric is not finite", bool(np.isfinite(list(stats.values())).all())
    learner.update(make_rollout(policy, 8, 3, seed=2), [spoiling(backend, how, set())])
    yield "the next good step moved nothing", not same(before, arrays_of(policy, learner))
    policy, learner = make_parts(backend, dump=dump, num_minibatches=8)
    stats = learner.update(make_rollout(policy, 8, 3), [spoiling(backend, how, {0, 1, 3, 4, 6})])
    yield f"of five bad steps, never three in a row, {stats['skipped_steps']} were skipped", stats["skipped_steps"] == 5
    try:
        learner.update(make_rollout(policy, 8, 3), [spoiling(backend, how, {2, 3, 4})])
        yield "three in a row did not stop it", False
    except BadNumberError as error:
        arrays, _ = read_tensor_file(dump / "bad_minibatch.safetensors", kind="minibatch", max_version=1)
        yield "the dump is not named, or not whole", str(dump) in str(error) and "observations" in arrays
    yield "a weight is not finite", all(np.isfinite(array).all() for array in arrays_of(policy, learner))


def _overflow(backend: str, rate: float, directory: Path) -> str:
    """Train with a rate at which weights overflow: it must stop, and no file may contain such a weight."""
    ppo = PPOConfig(learning_rate=rate, rollout_steps=16, num_minibatches=1, update_epochs=1, max_grad_norm=None)
    config = TrainingConfig(ppo=ppo, run=RunConfig(backend=backend, checkpoint_interval=1, total_timesteps=640))  # type: ignore[arg-type]
    stopped = ""
    trainer = PPOTrainer("mlp", "CartPole-v1", config, num_envs=2, run_dir=directory)
    with warnings.catch_warnings(action="ignore"), np.errstate(all="ignore"), trainer:
        try:
            trainer.train(custom_loss_fns=())
        except BadNumberError as error:
            stopped = str(error)
    weights = [read_policy(path)[1] for path in directory.glob("*.safetensors") if "policy" in path.name]
    weights += [TrainingCheckpointer(path.parent).load(path).state["weights"] for path in (directory / "checkpoints").glob("step-*")]
    saved = all(np.isfinite(array).all() for each in weights for array in each.values())
    return "weights that are not finite were saved" if not saved else "" if stopped or weights else "it neither stopped nor saved"


@procedure("D3", full=1, test=1)
def edges(work: Work) -> Outcome:
    """Edges: huge rewards, equal advantages, minibatches of 1, one step, ends on the boundary, masks, saturation.

    Must: finite loss, gradient and weights; GAE as the brute-force sum.
    Each edge on each backend: an update, and the advantages compared with a plain loop in float64.
    """
    outcome = Outcome()
    cases = list(_edges())
    for number in work.each(len(cases)):
        name, parts, shape, fields, law = cases[number]
        for backend in BACKENDS:
            wrong = _at_edge(backend, parts, shape, fields, law)
            outcome.check(not wrong, f"{name}, {backend}: {wrong}")
    outcome.notes.append("a reward of 1e30 needs policy.normalize_values: its square is beyond float32, and training would stop")
    return outcome


Law = Callable[[Any], bool] | None


def _edges() -> Iterator[tuple[str, dict[str, Any], tuple[int, int], dict[str, Any], Law]]:
    def ends(steps: int, lanes: int, *rows: int) -> np.ndarray:
        flags = np.zeros((steps, lanes), bool)
        flags[list(rows)] = True
        return flags

    big = {"rewards": np.full((8, 2), 1e30, np.float32)}
    yield "rewards of 1e30", {"policy": {"normalize_values": True}}, (8, 2), big, None
    one_big = {"rewards": np.where(np.arange(16).reshape(8, 2) == 5, 1e30, 0).astype(np.float32)}
    yield "one reward of 1e30", {"policy": {"normalize_values": True}}, (8, 2), one_big, None
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
        law = (lambda stats: abs(stats["entropy"]) < 1e-6) if any(row) else None
        yield words, {"observation_space": space}, (8, 2), {"observations": seen}, law
    box = spaces.Box(-1.0, 1.0, (2,), np.float32)
    for far in (5.0, 20.0, 200.0):
        fields = {"actions": np.full((8, 2, 2), far, np.float32), "log_probs": "own"}
        yield f"tanh of {far:g}", {"action_space": box, "policy": {"action_bounds": "tanh"}}, (8, 2), fields, None
    huge = {"observations": np.full((9, 2, 3), 1e30, np.float32)}
    yield "observations of 1e30, normalised", {"policy": {"normalize_observations": True}}, (8, 2), huge, None
    yield "no valid rows", {}, (8, 2), {"valid": np.zeros((8, 2), bool)}, None


def _at_edge(backend: str, parts: dict[str, Any], shape: tuple[int, int], fields: dict[str, Any], law: Law) -> str:
    policy, learner = make_parts(backend, **parts)
    with warnings.catch_warnings(action="ignore"), np.errstate(all="ignore"):
        rollout = make_rollout(policy, *shape, **{name: value for name, value in fields.items() if not isinstance(value, str)})
        if "log_probs" in fields:  # the log-probs that the policy gives these actions now
            flat = np.zeros_like(rollout.rewards)
            given = {name: rollout[name] for name in ("observations", "actions", "valid", "episode_starts")}
            minibatch = Minibatch(**given, log_probs=flat, advantages=flat, returns=flat, values=flat)
            found = NumpyPolicy(policy.spec, policy.get_weights()).evaluate(minibatch).log_probs
            rollout = dataclasses.replace(rollout, log_probs=np.asarray(found, np.float32))
        config, seen = learner.config, compute_advantages(policy, rollout, learner.config)
        plain = advantage_sum(
            rollout, *(np.asarray(part, np.float64) for part in (seen.values, seen.next_values)), config.gamma, config.gae_lambda
        )
        error = np.abs(np.asarray(seen.advantages) - plain)[rollout.valid].max(initial=0.0) / max(
            1.0, np.abs(plain[rollout.valid]).max(initial=0.0)
        )
        stats = [learner.update(rollout) for _ in range(2)][-1]  # with a normaliser the first only moves the statistics
    if not np.isfinite(list(stats.values())).all() or stats.get("skipped_steps", 0):
        return f"skipped {stats.get('skipped_steps')}, { ({k: v for k, v in stats.items() if not np.isfinite(v)}) }"
    if not all(np.isfinite(array).all() for array in arrays_of(policy, learner)):
        return "a weight is not finite"
    if law is not None and not law(stats):
        return f"the law does not hold: {dict(stats)}"
    return "" if error <= 5e-6 else f"the advantages are {error:.1e} from the plain sum"


@procedure("D4", full=20, test=2)
def normalizers(work: Work) -> Outcome:
    """Normalisers: 1e9 samples by merging, at an offset of 1e6, in any order.

    Must: relative error at most 1e-6; merged against one by one at most 1e-12 at an offset of 100 (any order at 1e6: 1e-11).
    Chunks that represent 1e9 samples, merged in several orders, against fractions; and a stream in pieces against the whole.
    """
    outcome = Outcome()
    worst = worst_order = worst_stream = 0.0
    for number in work.each():
        rng = np.random.default_rng((work.seed, number))
        chunks = []
        for _ in range(50):  # 2,000 samples, merged with themselves until they represent 2e7: 1e9 in all
            part = RunningMeanStd((2,))
            part.update(rng.normal(1e6, (1.0, 3.0), (2_000, 2)))
            chunks.append(part.copy())
            while chunks[-1].count < 2e7:
                chunks[-1].merge(chunks[-1].copy() if chunks[-1].count <= 1e7 else part)
        count = sum(int(chunk.count) for chunk in chunks)
        exact = [[(Fraction(float(c.mean[d])), Fraction(float(c.var[d])), int(c.count)) for c in chunks] for d in range(2)]
        means = [sum(mean * n for mean, _, n in parts) / Fraction(count) for parts in exact]  # nothing is rounded
        variances = [sum((var + (mean - m) ** 2) * n for mean, var, n in parts) / count for m, parts in zip(means, exact)]
        results = []
        for order in (range(50), range(49, -1, -1), rng.permutation(50), rng.permutation(50)):
            total = RunningMeanStd((2,))
            for index in order:
                total.merge(chunks[int(index)])
            results.append(total)
        for total in results:
            pairs = [*zip(total.mean, means), *zip(total.var, variances)]
            worst = max(worst, *(abs(float((Fraction(float(have)) - want) / want)) for have, want in pairs))
        between = [float(np.max(np.abs(total.mean / results[0].mean - 1))) for total in results]
        between += [float(np.max(np.abs(total.var / results[0].var - 1))) for total in results]
        worst_order = max(worst_order, *between)
        outcome.check(count == 10**9 and all(total.count == count for total in results), f"{number}: {count} samples")
        outcome.check(worst <= 1e-6, f"{number}: relative error {worst:.1e}")
        outcome.check(worst_order <= 1e-11, f"{number}: {worst_order:.1e} between two orders")
        samples = rng.normal(100.0, (1.0, 3.0), (20_000, 2))  # at an offset of 1e6 pieces and whole agree to about 2e-12 only
        whole, pieces = RunningMeanStd((2,)), RunningMeanStd((2,))
        whole.update(samples)
        for part in np.split(samples, sorted(rng.integers(0, 20_000, 200))):
            pieces.update(part)
        apart = [np.max(np.abs(pieces.mean / whole.mean - 1)), np.max(np.abs(pieces.var / whole.var - 1))]
        worst_stream = max(worst_stream, *map(float, apart))
        outcome.check(worst_stream <= 1e-12, f"{number}: {worst_stream:.1e} between a stream in pieces and the whole")
    outcome.figures = {
        "relative error": f"{worst:.1e}",
        "between orders": f"{worst_order:.1e}",
        "pieces against the whole": f"{worst_stream:.1e}",
    }
    outcome.notes.append(
        "at an offset of 1e6 a float64 mean has 1e-10 of rounding, so that two orders of merging, and merged against one by one, differ by "
        "about 2e-12 in the variance: more than the 1e-12 that holds at an offset of 100"
    )
    outcome.notes.append("a chunk is 2,000 samples merged with themselves 10,000 times over; the 1e9 are counted, not drawn")
    return outcome


@procedure("D5", full=1, test=0, alone=True)
def boundary_cost(work: Work) -> Outcome:
    """Cost of the checks at the boundary.

    Must: at most 2 % of profiled training time.
    `benchmarks/boundary_cost.py`: a share inside one run, for four works.
    """
    module = benchmark("boundary_cost")
    outcome = Outcome()
    for number in work.each(len(module.WORKS)):
        cost = module.measure(module.WORKS[number])
        outcome.check(cost.share <= 0.02, f"{cost.name}: {cost.share:.2%}")
        outcome.figures[cost.name] = f"{cost.share:.2%}"
    return outcome
