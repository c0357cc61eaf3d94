"""E3: the same weights and rollout on every backend: whole updates in float64, one optimiser step in float32."""

from __future__ import annotations

from typing import Any

import numpy as np

from faults.programme import Outcome, Work, procedure
from faults.right_worlds import World, learner_of, policy_of, random_rollout, random_world

WHOLE, ONE_STEP = 1e-10, 1e-5


def difference(world: World, rollout: Any, config: Any, width: str) -> tuple[float, float]:
    """The largest difference of any weight or statistic after an update on each backend, and how far the weights moved at all."""
    after = []
    for backend in ("numpy", "torch"):
        policy = policy_of(world, backend, width)
        learner_of(policy, config, backend).update(rollout)
        after.append({name: np.asarray(value, np.float64) for name, value in policy.get_weights().items()})
    apart = max(float(np.abs(after[0][name] - after[1][name]).max(initial=0.0)) for name in after[0])
    moved = max(float(np.abs(after[0][name] - world.weights[name]).max(initial=0.0)) for name in world.spec.layers)
    return apart, moved


@procedure(
    "E3",
    title="The same update on every backend",
    must="10 epochs in float64 to 1e-10, one optimiser step in float32 to 1e-5, for every parameter",
    full=300,
    test=10,
)
def same_update(work: Work) -> Outcome:
    """Random worlds, 4 minibatches an epoch, clipped gradients, every way of normalising advantages."""
    from inchworm.backends.registry import learning_threads

    outcome, worst = Outcome(), {"ten epochs, float64": 0.0, "one step, float32": 0.0}
    for number in work.each():
        world = random_world(np.random.default_rng([work.seed, 3, number]), seed=number, one_minibatch=False)
        rollout = random_rollout(world, num_steps=10)
        once = world.config.replace(update_epochs=1, num_minibatches=1, learning_rate=3e-4)
        for what, config, width, limit in (
            ("ten epochs, float64", world.config, "float64", WHOLE),
            ("one step, float32", once, "float32", ONE_STEP),
        ):
            with learning_threads(1):
                apart, moved = difference(world, rollout, config, width)
            outcome.check(
                apart <= limit and moved > 1e-4, f"case {number}, {world.describe()}, {what}: {apart:.1e} apart, moved {moved:.1e}"
            )
            worst[what] = max(worst[what], apart)
    outcome.figures |= {f"largest difference, {what}": f"{apart:.1e}" for what, apart in worst.items()}
    outcome.notes.append("the backends are NumPy and torch; JAX comes with its own")
    return outcome
