"""What helps a critic with rewards of any size: PopArt, scaled rewards, both or neither? The peer is Stable-Baselines3 with VecNormalize.

    python benchmarks/value_scaling.py                                     # everything that is not there yet, then the table
    python benchmarks/value_scaling.py --tasks Pendulum-v1 --seeds 2 --scale 0.1 --out /tmp/quick.jsonl
    python benchmarks/value_scaling.py --report                            # the table alone

Observations are normalised everywhere; all else is as in `works.py`. Returns are the environment's, not the scaled ones.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from variants import Case, compare, kept_runs, paired_report
from works import LEARNING, Work, scaled

_MUJOCO = dataclasses.replace(LEARNING["halfcheetah"], total_timesteps=200_000)
WORKS = {
    work.env_id: work
    for work in (
        _MUJOCO,
        dataclasses.replace(_MUJOCO, name="hopper", env_id="Hopper-v5"),
        dataclasses.replace(_MUJOCO, name="walker2d", env_id="Walker2d-v5"),
        LEARNING["pendulum"],
        LEARNING["acrobot"],
    )
}
VARIANTS = {"none": (False, False), "PopArt": (True, False), "scaled rewards": (False, True), "both": (True, True)}
"""Name -> (policy.normalize_values, ppo.scale_rewards)."""
PEER = "Stable-Baselines3, VecNormalize"


def train(env_id: str, popart: bool, scale_rewards: bool, seed: int, scale: float) -> dict[str, Any]:
    """One training with its curve, and the mean returns of greedy and of sampled episodes."""
    from inchworm_side import config_of, train_and_score

    work = scaled(WORKS[env_id], scale)
    config = config_of(work, seed, backend="numpy")
    config = config.replace(
        policy=config.policy.replace(normalize_observations=True, normalize_values=popart),
        ppo=config.ppo.replace(scale_rewards=scale_rewards),
    )
    return train_and_score(config, work.eval_episodes)


def train_peer(env_id: str, seed: int, scale: float) -> dict[str, Any]:
    """The same with Stable-Baselines3, whose VecNormalize scales observations and rewards."""
    import torch
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecNormalize

    from sb3_side import Curve, build

    torch.set_num_threads(1)
    work: Work = scaled(WORKS[env_id], scale)
    model = build(work, seed)
    env = VecNormalize(model.get_env(), gamma=work.gamma)
    model.set_env(env)
    curve, began = Curve(), time.perf_counter()
    model.learn(work.total_timesteps, callback=curve)
    seconds = time.perf_counter() - began
    held = VecNormalize(make_vec_env(env_id, seed=10_000 + seed), training=False, norm_reward=False)
    held.obs_rms = env.obs_rms
    greedy, sampled = (float(evaluate_policy(model, held, work.eval_episodes, deterministic=flag)[0]) for flag in (True, False))  # type: ignore[arg-type]
    steps = int(model.num_timesteps)
    return {"steps": steps, "seconds": seconds, "curve": curve.points, "score": greedy, "sampled_score": sampled}


CASES = [
    Case(task, variant, "PopArt", call, {"env_id": task, **arguments})
    for task in WORKS
    for variant, call, arguments in (
        *((name, "value_scaling:train", {"popart": popart, "scale_rewards": scales}) for name, (popart, scales) in VARIANTS.items()),
        (PEER, "value_scaling:train_peer", {}),
    )
]


def section() -> list[str]:
    """The part of docs/results.md, from the runs that are kept."""
    return [
        "## Scales of rewards and values",
        "",
        "What helps a critic with rewards of any size: PopArt (`policy.normalize_values`), rewards divided by the running deviation of",
        "the discounted return (`ppo.scale_rewards`), both or neither; the peer scales rewards likewise. Observations are normalised",
        "everywhere.",
        "",
        *paired_report(CASES, kept_runs("value_scaling")),
        "",
    ]


if __name__ == "__main__":
    compare("value_scaling", __doc__, CASES, seeds=10)
