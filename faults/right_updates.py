"""E1, E3 and E4: advantages, whole updates and sequences compared with independent versions."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from gymnasium import spaces

from faults.programme import Outcome, Work, procedure
from faults.right_worlds import advantage_sum, learner_of, policy_of, random_rollout, random_world
from inchworm.backends.numpy import gae as numpy_gae
from inchworm.backends.registry import acting_policy, learning_threads
from inchworm.collect.collector import RolloutCollector
from inchworm.config.sections import PPOConfig
from inchworm.rollout.sequences import minibatch_places

LAMBDAS = (0.0, 0.3, 0.5, 0.9, 0.95, 0.99, 1.0)
GAMMAS = (0.0, 0.5, 0.9, 0.99, 0.999, 1.0)
WIDE, NARROW = 1e-10, 5e-6


@dataclass(frozen=True)
class Case:
    """Random rows [T, B] in float64; every number of them is also a float32, so that both widths are given the same ones."""

    rewards: np.ndarray
    values: np.ndarray
    next_values: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    gamma: float
    gae_lambda: float


def random_case(rng: np.random.Generator) -> Case:
    """From one row up; ends of both kinds, together and on the boundary; few lanes and many, which take different ways."""
    shape = (int(rng.integers(1, 25)), int(rng.choice([1, 2, 3, 9])))  # [T, B]
    rewards, values, cuts = rng.standard_normal((3, *shape)).astype(np.float32).astype(np.float64)
    terminated, truncated = rng.random((2, *shape)) < rng.choice([0.0, 0.1, 0.5])
    if rng.random() < 0.5:  # an episode that ends exactly where the rollout does
        (terminated if rng.random() < 0.5 else truncated)[-1] = True
    next_values = np.concatenate([values[1:], cuts[-1:]])  # [T, B]
    next_values[truncated] = cuts[truncated]
    next_values[terminated] = 1e6  # nothing follows: the value must not be used
    return Case(rewards, values, next_values, terminated, truncated, float(rng.choice(GAMMAS)), float(rng.choice(LAMBDAS)))


def by_stable_baselines3(case: Case) -> np.ndarray:
    """Its RolloutBuffer on the same rows, filled as its collect_rollouts fills it: a truncated reward has gamma V(successor) added."""
    import torch
    from stable_baselines3.common.buffers import RolloutBuffer

    steps, lanes = case.rewards.shape
    box = spaces.Box(-1, 1, (1,))
    buffer = RolloutBuffer(steps, box, box, "cpu", case.gae_lambda, case.gamma, lanes)
    ends = case.terminated | case.truncated
    cut = case.truncated & ~case.terminated
    buffer.rewards[:] = case.rewards + np.where(cut, case.gamma * case.next_values, 0)
    buffer.values[:] = case.values
    buffer.episode_starts[1:] = ends[:-1]
    last = np.where(case.terminated[-1], 0, case.next_values[-1])
    buffer.compute_returns_and_advantage(torch.tensor(last, dtype=torch.float32), ends[-1])
    return buffer.advantages.astype(np.float64)


@procedure("E1", full=10_000, test=100)
def advantages(work: Work) -> Outcome:
    """Advantages compared with the sum written out.

    Must: float64 to 1e-10, float32 to 5e-6, and within 5e-6 of Stable-Baselines3.
    Each case on NumPy and torch, in both widths, and in the peer's buffer.
    """
    import torch

    from inchworm.backends.torch import gae as torch_gae

    functions: dict[str, tuple[Any, Any]] = {
        "NumPy": (numpy_gae.compute_gae, np.asarray),
        "torch": (torch_gae.compute_gae, torch.from_numpy),
        "torch on a device": (torch_gae.gae_on_device, torch.from_numpy),
    }
    outcome, worst = Outcome(), dict[str, float]()
    with_peer = importlib.util.find_spec("stable_baselines3") is not None
    widths = {"float64": (np.float64, WIDE), "float32": (np.float32, NARROW)}
    for number in work.each():
        case = random_case(np.random.default_rng([work.seed, number]))
        expected = advantage_sum(case, case.values, case.next_values, case.gamma, case.gae_lambda)
        largest = max(1.0, float(np.abs(expected).max()))
        errors: dict[str, tuple[float, float]] = {}
        for (name, (function, convert)), (width, (dtype, limit)) in product(functions.items(), widths.items()):
            given = [array.astype(dtype) for array in (case.rewards, case.values, case.next_values)]
            result = np.asarray(function(*map(convert, (*given, case.terminated, case.truncated)), case.gamma, case.gae_lambda))
            assert result.dtype == dtype, f"{name} returned {result.dtype}"
            errors[f"{name}, {width}"] = (float(np.abs(result - expected).max()) / largest, limit)
        if with_peer:
            errors["Stable-Baselines3"] = (float(np.abs(by_stable_baselines3(case) - expected).max()) / largest, NARROW)
        wrong = {name: error for name, (error, limit) in errors.items() if not error <= limit}
        outcome.check(not wrong, f"case {number}, {case.rewards.shape}, gamma {case.gamma}, lambda {case.gae_lambda}: {wrong}")
        worst = {name: max(error, worst.get(name, 0.0)) for name, (error, _) in errors.items()}
    outcome.figures |= {f"largest error, {name}": f"{error:.1e}" for name, error in worst.items()}
    outcome.notes.append("errors are relative to the largest advantage of the case where that is above 1")
    outcome.notes.append("JAX and TorchRL are not compared: neither is installed")
    if not with_peer:
        outcome.notes.append("Stable-Baselines3 is not installed, so it was not compared")
    return outcome


WHOLE, ONE_STEP = 1e-10, 1e-5


@procedure("E3", full=300, test=10)
def same_update(work: Work) -> Outcome:
    """The same update on every backend.

    Must: 10 epochs in float64 to 1e-10, one optimiser step in float32 to 1e-5, for every parameter.
    Random worlds, 4 minibatches an epoch, clipped gradients, every way of normalising advantages.
    """
    outcome, worst = Outcome(), {"ten epochs, float64": 0.0, "one step, float32": 0.0}
    for number in work.each():
        world = random_world(np.random.default_rng([work.seed, 3, number]), seed=number, one_minibatch=False)
        rollout = random_rollout(world, num_steps=10)
        once = world.config.replace(update_epochs=1, num_minibatches=1, learning_rate=3e-4)
        for what, config, width, limit in (
            ("ten epochs, float64", world.config, "float64", WHOLE),
            ("one step, float32", once, "float32", ONE_STEP),
        ):
            after = []
            for backend in ("numpy", "torch"):
                policy = policy_of(world, backend, width)
                with learning_threads(1):
                    learner_of(policy, config, backend).update(rollout)
                after.append({name: np.asarray(value, np.float64) for name, value in policy.get_weights().items()})
            apart = max(float(np.abs(after[0][name] - after[1][name]).max(initial=0.0)) for name in after[0])
            moved = max(float(np.abs(after[0][name] - world.weights[name]).max(initial=0.0)) for name in world.spec.layers)
            fine = apart <= limit and moved > 1e-4
            outcome.check(fine, f"case {number}, {world.describe()}, {what}: difference {apart:.1e}, moved {moved:.1e}")
            worst[what] = max(worst[what], apart)
    outcome.figures |= {f"largest difference, {what}": f"{apart:.1e}" for what, apart in worst.items()}
    outcome.notes.append("the backends are NumPy and torch; JAX comes with its own")
    return outcome


BEFORE = 3
"""Steps before the rollout that is looked at, so that its first row has something to remember."""
SEQUENCE_LIMITS = {"float64": 1e-12, "float32": 1e-6}


def rollout_with_all_masks(policy: Any, steps: int, length: int) -> tuple[Any, Any]:
    """The world, and its rollout of 2 ** steps lanes: in lane b an episode starts at row t where bit t of b is set."""
    from faults.right_memory import ScriptedEnv

    lanes = np.arange(2**steps)
    starts = (lanes[None] >> np.arange(steps)[:, None]) & 1  # [T, B]
    kinds = 1 + (lanes[None] + np.arange(steps)[:, None]) % 2  # an end of either kind
    ends = np.zeros((BEFORE + steps, len(lanes)), np.int64)
    ends[BEFORE - 1 : -1] = starts * kinds  # an episode starts where the step before ended one
    ends[-1] = (lanes // 2) % 3  # and the last row ends in either way, or continues
    env = ScriptedEnv(ends, seed=steps)
    collector = RolloutCollector(env, acting_policy(policy), seed=1, sequence_length=length)
    collector.collect(BEFORE)
    rollout = collector.collect(steps)
    assert np.array_equal(rollout.episode_starts, starts.astype(bool))
    return env, rollout


def step_by_step(policy: Any, env: Any, rollout: Any) -> dict[str, np.ndarray]:
    """log-probs, values and values of the true successors [T, B]: one row after another, with nothing of the library's."""
    import torch

    state = {name: torch.from_numpy(np.array(leaf[0])) for name, leaf in rollout.policy_state.items()}
    found: dict[str, list[Any]] = {"log_probs": [], "values": [], "next_values": []}
    with torch.no_grad():
        for t in range(rollout.num_steps):
            now = BEFORE + t
            start = torch.from_numpy(np.array(rollout.episode_starts[t]))
            features, state = policy.step(torch.from_numpy(env.seen[now]), state, start)
            logs = policy.actor(features).log_softmax(-1).numpy()
            found["log_probs"].append(logs[np.arange(len(logs)), rollout.actions[t]])
            found["values"].append(policy.critic(features).squeeze(-1).numpy())
            over = rollout.truncated[t][:, None]
            successors = np.where(over, env.last[now + 1], env.seen[now + 1])
            after, _ = policy.step(torch.from_numpy(successors), state, torch.zeros(rollout.num_lanes, dtype=torch.bool))
            found["next_values"].append(policy.critic(after).squeeze(-1).numpy())
    return {name: np.stack(rows) for name, rows in found.items()}


def in_sequences(policy: Any, rollout: Any, length: int) -> dict[str, np.ndarray]:
    """The same as learning sees it: cut into shuffled minibatches of sequences, and put back to [T, B]."""
    import torch

    from inchworm.backends.torch.gae import compute_advantages
    from inchworm.backends.torch.learner import PackedSequences, sequences_of
    from inchworm.backends.torch.network import to_tensor

    tensors = rollout.map(lambda array: to_tensor(array, "cpu"))
    advantages = compute_advantages(policy, tensors, PPOConfig(sequence_length=length))
    packed = PackedSequences(sequences_of(tensors, advantages, length, successors=False))
    count = packed.valid.shape[1]
    order = np.random.default_rng(length).permutation(count)
    places, real = minibatch_places(count, 3)
    shape = (rollout.num_steps, rollout.num_lanes)
    found = {"log_probs": np.full(shape, np.nan), "values": np.full(shape, np.nan)}
    with torch.no_grad():
        for minibatch, columns, is_real in zip(packed.minibatches(order[places], real), order[places], real):
            said = policy.evaluate(minibatch)
            for place, column in enumerate(columns):
                chunk, lane = divmod(int(column), rollout.num_lanes)
                rows = min(length, rollout.num_steps - chunk * length)  # the rest is padding
                valid = minibatch.valid[:, place].numpy()
                assert valid.tolist() == [bool(is_real[place]) and row < rows for row in range(length)]
                if is_real[place]:
                    found["log_probs"][chunk * length : chunk * length + rows, lane] = said.log_probs[:rows, place].numpy()
                    found["values"][chunk * length : chunk * length + rows, lane] = said.values[:rows, place].numpy()
    return {**found, "next_values": advantages.next_values.numpy(), "first_look": advantages.values.numpy()}


@procedure("E4", full=8, test=3)
def all_resets(work: Work) -> Outcome:
    """Memory: sequences with every pattern of resets compared with single steps.

    Must: all patterns for T up to 8, every sequence length, padded and not: float64 to 1e-12, float32 to 1e-6.
    For every T, L, kind, number of layers and width one rollout with a lane for each pattern of resets.
    """
    import torch

    from faults.right_memory import BuiltIn, LstmPolicy

    outcome, worst = Outcome(), dict.fromkeys(SEQUENCE_LIMITS, 0.0)
    with learning_threads(1):
        for steps in (number + 1 for number in work.each()):
            for kind, length, layers, width in product(("lstm", "gru", "brought"), range(1, steps + 1), (1, 2), SEQUENCE_LIMITS):
                dtype = torch.float64 if width == "float64" else torch.float32
                policy = LstmPolicy(layers, dtype, layers) if kind == "brought" else BuiltIn(kind, layers, dtype, layers)
                env, rollout = rollout_with_all_masks(policy, steps, length)
                expected = step_by_step(policy, env, rollout)
                found = in_sequences(policy, rollout, length)
                errors = [np.abs(found[name] - expected[name]) for name in ("log_probs", "values")]
                errors.append(np.abs(found["first_look"] - expected["values"]))
                errors.append(np.where(rollout.terminated, 0.0, np.abs(found["next_values"] - expected["next_values"])))
                behaviour = np.abs(rollout.log_probs - expected["log_probs"]).max(0)  # float32 in every rollout
                error = np.max(errors, axis=(0, 1))  # [B]
                worst[width] = max(worst[width], float(error.max()))
                for lane in range(rollout.num_lanes):
                    fine = error[lane] <= SEQUENCE_LIMITS[width] and behaviour[lane] <= SEQUENCE_LIMITS["float32"]
                    outcome.check(fine, f"{kind}: T {steps}, L {length}, {layers} layers, {width}, pattern {lane:b}: {error[lane]:.1e}")
    outcome.figures |= {f"largest error, {width}": f"{error:.1e}" for width, error in worst.items()}
    outcome.notes.append("the count is the longest T; a case is one pattern of resets for one T, length, kind, depth (1, 2) and width")
    outcome.notes.append("the kinds are the built-in LSTM and GRU, which act in NumPy and learn in torch, and a custom LSTM")
    return outcome
