"""D2: losses and gradients that are not finite, on every backend."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from faults.programme import Outcome, Work, procedure

BACKENDS = ("numpy", "torch")


def make_parts(
    backend: str,
    *,
    observation_space: Any = None,
    action_space: Any = None,
    policy: dict[str, Any] | None = None,
    dump: Path | None = None,
    **ppo: Any,
) -> tuple[Any, Any]:
    """A small policy and its learner."""
    from gymnasium import spaces

    from inchworm.backends.registry import make_learner, make_policy
    from inchworm.config.sections import PolicyConfig, PPOConfig, RunConfig, TrainingConfig
    from inchworm.policy.spec import PolicySpec

    seen = observation_space if observation_space is not None else spaces.Box(-2.0, 2.0, (3,), np.float32)
    chosen = action_space if action_space is not None else spaces.Discrete(3)
    made = make_policy(PolicySpec(seen, chosen, PolicyConfig(hidden_sizes=(8,), **(policy or {}))), backend=backend)  # type: ignore[arg-type]
    settings = {"update_epochs": 1, "num_minibatches": 1, **ppo}
    config = TrainingConfig(ppo=PPOConfig(**settings), run=RunConfig(backend=backend, device="cpu"))  # type: ignore[arg-type]
    return made, make_learner(made, config, dump_directory=dump)


def make_rollout(policy: Any, steps: int, lanes: int, *, seed: int = 0, **fields: Any) -> Any:
    """Random observations with the policy's own actions; nothing ends unless `fields` say so."""
    import optree

    from inchworm.rollout.rollout import Rollout

    rng = np.random.default_rng(seed)
    space = policy.spec.observation_space
    draw = {"observations": rng.normal(0, 1, (steps + 1, lanes, *space.shape)).astype(np.float32)} if space.shape is not None else {}
    seen = fields.pop("observations", None)
    whole = seen if seen is not None else draw["observations"]
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
    import optree

    return [np.array(leaf) for leaf in optree.tree_leaves([policy.get_weights(), learner.state_dict()["moments"]])]


def same(one: list[np.ndarray], other: list[np.ndarray], *, but: int = 0) -> bool:
    """Whether all but `but` arrays are equal (the version moves with every update)."""
    return sum(not np.array_equal(a, b) for a, b in zip(one, other)) <= but


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


@procedure(
    "D2",
    title="A loss or gradient that is not finite, forced into both backends",
    must="the step is not taken, counted; 3 in a row stop with a dump; no such weight is ever saved",
    full=1,
    test=1,
)
def bad_losses(work: Work) -> Outcome:
    """By a loss of one's own, and by a learning rate that overflows."""
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
    from inchworm.core.errors import BadNumberError
    from inchworm.core.tensor_file import read_tensor_file

    policy, learner = make_parts(backend, dump=dump)
    learner.update(make_rollout(policy, 8, 3), [spoiling(backend, how, set())])
    before = arrays_of(policy, learner)
    stats = learner.update(make_rollout(policy, 8, 3, seed=1), [spoiling(backend, how, {0})])
    yield "the step moved something", same(before, arrays_of(policy, learner), but=1)
    yield f"it counted {stats['skipped_steps']} skipped steps", stats["skipped_steps"] == 1
    yield "a metric is not finite", bool(np.isfinite(list(stats.values())).all())
    learner.update(make_rollout(policy, 8, 3, seed=2), [spoiling(backend, how, set())])
    yield "the next good step moved nothing", not same(before, arrays_of(policy, learner), but=1)
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
    """Train with a rate at which weights overflow: it must stop, and nothing that is on disk may hold such a weight."""
    from inchworm import PPOTrainer
    from inchworm.config.sections import PPOConfig, RunConfig, TrainingConfig
    from inchworm.core.errors import BadNumberError
    from inchworm.policy.file import read_policy
    from inchworm.run.checkpoint import TrainingCheckpointer

    ppo = PPOConfig(learning_rate=rate, rollout_steps=16, num_minibatches=1, update_epochs=1, max_grad_norm=None)
    config = TrainingConfig(ppo=ppo, run=RunConfig(backend=backend, checkpoint_interval=1, total_timesteps=640))  # type: ignore[arg-type]
    stopped = ""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        with PPOTrainer("mlp", "CartPole-v1", config, num_envs=2, run_dir=directory) as trainer:
            try:
                trainer.train(custom_loss_fns=())
            except BadNumberError as error:
                stopped = str(error)
    weights = [read_policy(path)[1] for path in directory.glob("*.safetensors") if "policy" in path.name]
    weights += [TrainingCheckpointer(path.parent).load(path).state["weights"] for path in (directory / "checkpoints").glob("step-*")]
    saved = all(np.isfinite(array).all() for each in weights for array in each.values())
    return "weights that are not finite were saved" if not saved else "" if stopped or weights else "it neither stopped nor saved"
