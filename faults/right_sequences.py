"""E4: memory. Sequences with every pattern of resets, beside one step after another."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from faults.programme import Outcome, Work, procedure

BEFORE = 3
"""Steps before the rollout that is looked at, so that its first row has something to remember."""
LIMITS = {"float64": 1e-12, "float32": 1e-6}


def rollout_with_all_masks(policy: Any, steps: int, length: int) -> tuple[Any, Any]:
    """The world, and its rollout of 2 ** steps lanes: in lane b an episode starts at row t where bit t of b is set."""
    from faults.right_memory import ScriptedEnv
    from inchworm.backends.registry import acting_policy
    from inchworm.collect.collector import RolloutCollector

    lanes = np.arange(2**steps)
    starts = (lanes[None] >> np.arange(steps)[:, None]) & 1  # [T, B]
    kinds = 1 + (lanes[None] + np.arange(steps)[:, None]) % 2  # an end of either kind
    ends = np.zeros((BEFORE + steps, len(lanes)), np.int64)
    ends[BEFORE - 1 : -1] = starts * kinds  # an episode starts where the step before ended one
    ends[-1] = (lanes // 2) % 3  # and the last row ends in either way, or goes on
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

    from inchworm.backends.torch.encoding import to_tensor
    from inchworm.backends.torch.gae import compute_advantages
    from inchworm.backends.torch.learner import PackedSequences, sequences_of
    from inchworm.config.sections import PPOConfig
    from inchworm.rollout.sequences import minibatch_places

    tensors = rollout.map(lambda array: to_tensor(array, "cpu"))
    advantages = compute_advantages(policy, tensors, PPOConfig(sequence_length=length))
    packed = PackedSequences(sequences_of(tensors, advantages, length, successors=False))
    count = packed.valid.shape[1]
    order = np.random.default_rng(length).permutation(count)
    places, real = minibatch_places(count, 3)
    shape = (rollout.num_steps, rollout.num_lanes)
    found = {"log_probs": np.full(shape, np.nan), "values": np.full(shape, np.nan)}
    with torch.no_grad():
        for minibatch, columns, is_real in zip(packed.shuffled(3, order), order[places], real):
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


@procedure(
    "E4",
    title="Memory: sequences with every pattern of resets beside one step after another",
    must="all patterns for T up to 8, every sequence length, padded and not: float64 to 1e-12, float32 to 1e-6",
    full=8,
    test=3,
)
def all_resets(work: Work) -> Outcome:
    """For every T, L, kind, number of layers and width one rollout with a lane for each pattern of resets."""
    import torch

    from faults.right_memory import BuiltIn, LstmPolicy
    from inchworm.backends.registry import learning_threads

    outcome, worst = Outcome(), dict.fromkeys(LIMITS, 0.0)
    with learning_threads(1):
        for steps in (number + 1 for number in work.each()):
            for kind, length, layers, width in product(("lstm", "gru", "brought"), range(1, steps + 1), (1, 2), LIMITS):
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
                    fine = error[lane] <= LIMITS[width] and behaviour[lane] <= LIMITS["float32"]
                    outcome.check(fine, f"{kind}: T {steps}, L {length}, {layers} layers, {width}, pattern {lane:b}: {error[lane]:.1e}")
    outcome.figures |= {f"largest error, {width}": f"{error:.1e}" for width, error in worst.items()}
    outcome.notes.append(
        "the count is the longest T; a case is one pattern of resets for one T, sequence length, kind, depth (1, 2) and width"
    )
    outcome.notes.append(
        "the kinds are the built-in LSTM and GRU, which act in NumPy and learn in torch, and an LSTM that the procedure brings"
    )
    return outcome
