"""How long until CartPole-v1 is solved? A greedy mean of 475 or more over 100 evaluation episodes, timed from the start of the process.

    python benchmarks/solve.py                                      # 5 seeds; inchworm with NumPy and with torch, Stable-Baselines3
    python benchmarks/solve.py --seeds 2 --sides inchworm-torch stable-baselines3

All sides have the same hyper-parameters (`works.SOLVE`) and are evaluated after every 20 iterations, on 8 environments at a time. The
time of evaluating is reported separately: it is not learning, and its frequency is a choice of the user.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

import jobs
import results
from figures import Section, Target, table
from jax_measures import EPISODES, SOLVED, Watch
from works import SOLVE

INTERVAL = 20
EVAL_ENVS = 8
OURS = {"inchworm-numpy": "numpy", "inchworm-torch": "torch"}
PEER = "stable-baselines3"

Seeds = dict[str, list[dict[str, Any]]]


def ours(seed: int, backend: str) -> dict[str, Any]:
    """inchworm until it is solved."""
    from inchworm import PPOTrainer, TrainingState
    from inchworm_side import config_of

    config = config_of(SOLVE, seed, backend=backend)  # type: ignore[arg-type]
    config = config.replace(evaluation=config.evaluation.replace(num_envs=EVAL_ENVS))
    watch = Watch()

    def look(state: TrainingState, metrics: object) -> bool:
        del metrics
        return not (state.iteration % INTERVAL == 0 and watch.solved(state.env_steps, lambda: trainer.evaluate(EPISODES).returns))

    with PPOTrainer("mlp", SOLVE.env_id, config) as trainer:
        trainer.train(callback=look)
    return watch.result()


def theirs(seed: int) -> dict[str, Any]:
    """Stable-Baselines3 until it is solved."""
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    from sb3_side import build

    torch.set_num_threads(1)
    watch = Watch()
    model = build(SOLVE, seed)
    eval_env = make_vec_env(SOLVE.env_id, n_envs=EVAL_ENVS, seed=10_000 + seed)

    class Look(BaseCallback):
        """Looks where a rollout begins, which is right after learning."""

        rollouts = 0
        done = False

        def _on_rollout_start(self) -> None:
            if self.rollouts and self.rollouts % INTERVAL == 0:
                self.done = watch.solved(self.num_timesteps, self.score)
            self.rollouts += 1

        def score(self) -> Any:
            """The returns of the evaluation episodes."""
            return evaluate_policy(model, eval_env, EPISODES, deterministic=True, return_episode_rewards=True)[0]

        def _on_step(self) -> bool:
            return not self.done

    model.learn(SOLVE.total_timesteps, callback=Look())
    return watch.result()


def main() -> None:
    """Measure seed by seed, in turns; print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sides", nargs="+", default=[*OURS, PEER], choices=[*OURS, PEER])
    options = parser.parse_args()
    runs: Seeds = {side: [] for side in options.sides}
    for seed in range(options.seeds):
        for side in options.sides:
            call, extra = ("solve:theirs", {}) if side == PEER else ("solve:ours", {"backend": OURS[side]})
            runs[side].append(jobs.run(call, {"seed": seed, **extra}))
            print(f"{side} seed {seed}: {runs[side][-1]}")
    for target in section(runs).targets:
        print(target.row())
    if options.seeds >= 5 and PEER in runs:
        results.save("solve", runs)


def medians(runs: list[dict[str, Any]], key: str) -> float:
    """The median over seeds; a seed that was not solved took longer than any."""
    found = median(run[key] if run["steps"] is not None else float("inf") for run in runs)
    return float(found)


def whole(runs: list[dict[str, Any]]) -> float:
    """Median seconds with the evaluations."""
    return float(median(run["seconds"] + run["evaluating"] if run["steps"] is not None else float("inf") for run in runs))


def section(data: Seeds) -> Section:
    """The page's section."""
    rows = []
    for side, runs in data.items():
        solved = sum(run["steps"] is not None for run in runs)
        steps = " ".join("–" if run["steps"] is None else f"{run['steps']:,}" for run in runs)
        figures = [f"{whole(runs):.1f}", f"{medians(runs, 'seconds'):.1f}", f"{medians(runs, 'steps'):,.0f}"]
        rows.append([side, f"{solved} of {len(runs)}", *figures, steps])
    lines = [
        f"CartPole-v1 until a greedy evaluation over {EPISODES} episodes has a mean of {SOLVED:.0f} or more, from the start of the",
        "process: imports, environments, training. The hyper-parameters are those of `works.SOLVE` on every side, an evaluation every",
        f"{INTERVAL} iterations, one thread.",
        "",
        *table(["side", "solved", "seconds", "without evaluations", "env steps", "env steps, seed by seed"], rows),
    ]
    return Section("CartPole solved", lines, targets(data))


def targets(data: Seeds) -> list[Target]:
    """The best of inchworm's ways against the peer."""
    sides = [side for side in OURS if side in data]
    if PEER not in data or not sides:
        return []
    best = min(sides, key=lambda side: whole(data[side]))
    mine, peer = data[best], data[PEER]
    return [
        Target(f"CartPole solved: wall seconds of {best} over Stable-Baselines3's", _over(whole(mine), whole(peer)), 1 / 3, False),
        Target(
            "CartPole solved: the same without the time of evaluations",
            _over(medians(mine, "seconds"), medians(peer, "seconds")),
            1 / 3,
            False,
        ),
        Target("CartPole solved: env steps over Stable-Baselines3's", _over(medians(mine, "steps"), medians(peer, "steps")), 1.0, False),
    ]


def _over(a: float, b: float) -> float:
    """a / b where both are known; solving at all beats not solving."""
    return float("nan") if a == float("inf") else a / b


if __name__ == "__main__":
    main()
