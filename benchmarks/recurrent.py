"""Recurrent learning compared with sb3-contrib's RecurrentPPO on the same work: CartPole with its velocities hidden, an LSTM of 64.

    python benchmarks/recurrent.py                                              # all of it; kept, and shown on the performance page
    python benchmarks/recurrent.py --repeats 1 --iterations 2 --seeds 0         # a quick look at the speed; nothing is kept

Every run is a separate process with one thread, the sides in turns. Both have 8 environments, 128 steps, 10 epochs of 8 minibatches of
128 steps, normalised observations and values (the peer: rewards), the LSTM on the observation, then 64x64 tanh layers for each of actor and
critic. The peer's nearest form has one LSTM, as inchworm always has (`shared_lstm=True, enable_critic_lstm=False`). Its critic reads what
that LSTM says without sending a gradient into it (sb3-contrib detaches it; inchworm does not); a form with both gradients it does not
offer. The way back through the LSTM is one pass with either, so the work is the same. Its default, an LSTM for each of actor and critic,
is measured too: twice the work in the memory. inchworm learns from sequences of 32 steps (its default), and also from whole lanes
of 128, as the peer does; and, as a third form, with its own default order: the 64x64 layers first, shared, then the LSTM.

The peer steps through a minibatch in Python wherever an episode begins in it, so it is slowest while episodes are short. Hence two
speeds: of iterations 3 to 6, and of whole trainings, in which episodes grow long.
"""

from __future__ import annotations

import argparse
import time
from statistics import fmean, median
from typing import Any

import jobs
import results
from figures import Section, Target, median_range, table
from seeds import half_interval

ENV = "inchworm.worlds.toys:PartialCartPole"
ENVS, STEPS, EPOCHS, MINIBATCH, MEMORY, RATE = 8, 128, 10, 128, 64, 1e-3
TRAINING, EPISODES = 59 * ENVS * STEPS, 50
"""Env steps of a training whose return is reported (60,416), and the greedy episodes that are its score."""
PARTS = ("collect", "learn", "whole")
CPU_PARTS = tuple(f"{part} (CPU)" for part in PARTS)
Moment = tuple[float, float]
Figures = dict[str, float]
SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    "inchworm": ("recurrent:ours", {"sequence_length": 32}),
    "inchworm, whole lanes": ("recurrent:ours", {"sequence_length": STEPS}),
    "inchworm, memory last": ("recurrent:ours", {"sequence_length": 32, "place": "after"}),
    "RecurrentPPO, shared LSTM": ("recurrent:theirs", {"shared": True}),
    "RecurrentPPO": ("recurrent:theirs", {"shared": False}),
}
"""Name -> the function that trains, and what it is given besides."""
OURS, PEER, DEFAULT_PEER = "inchworm", "RecurrentPPO, shared LSTM", "RecurrentPPO"
WARMUP = 2


def ours(seed: int, iterations: int, sequence_length: int, place: str = "before", *, score: bool) -> dict[str, Any]:
    """Seconds of each part of each iteration after the warm-up, and the score if it is asked for."""
    from inchworm import EnvConfig, EvalConfig, PolicyConfig, PPOConfig, PPOTrainer, RunConfig, TrainingConfig

    config = TrainingConfig(
        env=EnvConfig(id=ENV, num_envs=ENVS, num_workers=0),
        policy=PolicyConfig(
            kind="lstm", memory_size=MEMORY, memory_place=place, hidden_sizes=(64, 64), activation="tanh",  # type: ignore[arg-type]
            normalize_observations=True, normalize_values=True,
        ),
        ppo=PPOConfig(
            learning_rate=RATE, gamma=0.99, gae_lambda=0.95, clip_coef=0.2, vf_coef=1.0, ent_coef=0.0, max_grad_norm=0.5, adam_eps=1e-5,
            update_epochs=EPOCHS, rollout_steps=STEPS, minibatch_size=MINIBATCH, normalize_advantages="minibatch",
            sequence_length=sequence_length,
        ),
        evaluation=EvalConfig(interval=0, final_episodes=0, seed=10_000 + seed),
        run=RunConfig(seed=seed, total_timesteps=iterations * ENVS * STEPS, threads=1, device="cpu"),
    )  # fmt: skip
    figures: list[Figures] = []
    with PPOTrainer(config.policy, config.env, config) as trainer:
        trainer.learner  # noqa: B018 - made before the clock starts, as the peer's is
        trainer.learn(trainer.collect_rollouts(config.ppo.warm_up_steps))  # initialises the normalisers
        for _ in range(iterations):
            start = now()
            rollout = trainer.collect_rollouts()
            collected = now()
            trainer.learn(rollout)
            figures.append(_figures(start, collected, now()))
        returns = trainer.evaluate(EPISODES, deterministic=True).returns.tolist() if score else []
    return {"iterations": figures[WARMUP:], "returns": returns}


def build_peer(seed: int, shared: bool) -> Any:
    """RecurrentPPO on its vector env; its value loss has no ½, so its coefficient is half of ours."""
    import torch
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    from inchworm.worlds.toys import PartialCartPole

    torch.set_num_threads(1)
    network = {
        "lstm_hidden_size": MEMORY,
        "shared_lstm": shared,
        "enable_critic_lstm": not shared,
        "net_arch": {"pi": [64, 64], "vf": [64, 64]},
    }
    env = VecNormalize(make_vec_env(PartialCartPole, n_envs=ENVS, seed=seed), gamma=0.99)
    return RecurrentPPO(
        "MlpLstmPolicy", env, learning_rate=RATE, n_steps=STEPS, batch_size=MINIBATCH,
        n_epochs=EPOCHS, gamma=0.99, gae_lambda=0.95, clip_range=0.2, ent_coef=0.0, vf_coef=0.5, max_grad_norm=0.5, seed=seed, device="cpu",
        policy_kwargs=network,
    )  # fmt: skip


def peer_returns(model: Any, seed: int, episodes: int, *, deterministic: bool = True) -> list[float]:
    """The returns of its policy on a separate environment, with the statistics of training."""
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecNormalize

    from inchworm.worlds.toys import PartialCartPole

    held = VecNormalize(make_vec_env(PartialCartPole, n_envs=1, seed=10_000 + seed), training=False, norm_reward=False)
    held.obs_rms = model.get_env().obs_rms
    found: Any = evaluate_policy(model, held, episodes, deterministic=deterministic, return_episode_rewards=True)
    return [float(value) for value in found[0]]


def train_peer(seed: int, scale: float, shared: bool) -> dict[str, Any]:
    """One training of the peer with its curve, and the mean returns of 100 greedy and of 100 sampled episodes."""
    from sb3_side import Curve

    model, curve, began = build_peer(seed, shared), Curve(), time.perf_counter()
    model.learn(round(scale * TRAINING), callback=curve)
    seconds = time.perf_counter() - began
    greedy, sampled = (fmean(peer_returns(model, seed, 100, deterministic=flag)) for flag in (True, False))
    steps = int(model.num_timesteps)
    return {"steps": steps, "seconds": seconds, "curve": curve.points, "score": greedy, "sampled_score": sampled}


def theirs(seed: int, iterations: int, shared: bool, *, score: bool) -> dict[str, Any]:
    """The same as `ours` with RecurrentPPO."""
    from sb3_side import Clock

    model = build_peer(seed, shared)

    class Iterations(Clock):
        """Notes when each rollout begins and ends; learning lies between."""

        def __init__(self) -> None:
            super().__init__()
            self.figures: list[Figures] = []
            self.began = self.ended = now()

        def _on_rollout_end(self) -> None:
            super()._on_rollout_end()
            self.ended = now()

        def _add_learning(self) -> None:
            if self._collected is not None:
                self.figures.append(_figures(self.began, self.ended, now()))
            self._collected, self.began = None, now()

    clock = Iterations()
    model.learn(iterations * ENVS * STEPS, callback=clock)
    return {"iterations": clock.figures[WARMUP:], "returns": peer_returns(model, seed, EPISODES) if score else []}


def now() -> Moment:
    """The clock on the wall, and the time that this process has had a CPU for."""
    return time.perf_counter(), time.process_time()


def _figures(start: Moment, collected: Moment, end: Moment) -> Figures:
    wall, cpu = ([b - a for a, b in ((start[k], collected[k]), (collected[k], end[k]), (start[k], end[k]))] for k in (0, 1))
    return {**dict(zip(PARTS, wall, strict=True)), **dict(zip(CPU_PARTS, cpu, strict=True))}


def measure(side: str, *, seed: int, iterations: int, score: bool) -> dict[str, Any]:
    """One run: the median seconds of each part, and the mean score."""
    call, extra = SIDES[side]
    run = jobs.run(call, {"seed": seed, "iterations": iterations, "score": score, **extra})
    figures: dict[str, Any] = {part: median(one[part] for one in run["iterations"]) for part in (*PARTS, *CPU_PARTS)}
    figures |= {f"total {part}": sum(one[part] for one in run["iterations"]) for part in PARTS}
    return {**figures, "seed": seed, "score": fmean(run["returns"]) if score else None}


def part_ratios(data: dict[str, Any], part: str, mine: str = OURS, peer: str = PEER) -> list[float]:
    """How many times as fast as the peer, repeat by repeat."""
    return [b[part] / a[part] for a, b in zip(data["speed"][mine], data["speed"][peer], strict=True)]


def section(data: dict[str, Any]) -> Section:
    """The page's section."""
    rows = []
    for side, runs in data["speed"].items():
        scores = [run["score"] for run in data["scores"].get(side, ())]
        interval = f" ± {half_interval(scores):.0f}" if len(scores) > 2 else ""  # an interval of two is meaningless
        told = f"{fmean(scores):.0f}{interval}; {', '.join(f'{score:.0f}' for score in scores)}" if scores else "–"
        rows.append([side, *(median_range([1000 * run[part] for run in runs], ",.0f") for part in PARTS), told])
    for peer in (PEER, DEFAULT_PEER):
        for what, parts in (("", PARTS), (" in CPU time", CPU_PARTS)):
            rows += [[f"ratio to {peer}{what}", *(median_range(part_ratios(data, part, peer=peer), ".2f") for part in parts), ""]]
    whole = [
        [f"seed {mine['seed']}", *(f"{theirs[f'total {part}'] / mine[f'total {part}']:.2f}" for part in PARTS)]
        for mine, theirs in zip(data["scores"][OURS], data["scores"][PEER], strict=True)
    ]
    lines = [
        f"CartPole-v1 with its velocities hidden, {ENVS} environments x {STEPS} steps, LSTM of {MEMORY} on the observation, then 64x64 for",
        f"actor and for critic, {EPOCHS} epochs of minibatches of {MINIBATCH} steps, one thread, compared with {data['peer']}. The peer's",
        "nearest form has one LSTM for actor and critic, as inchworm has, but the critic sends no gradient into it; its default has two.",
        f"Observations and values (the peer: rewards) are normalised; learning rate {RATE:g}. inchworm's sequences have 32 steps (its",
        "default) or the whole lane's; `memory last` has the 64x64 layers first, shared, then the LSTM, its default order.",
        "",
        f"Milliseconds of an iteration (median and range of {len(data['speed'][OURS])} interleaved repeats), and the mean return of",
        f"{EPISODES} greedy episodes after {TRAINING:,} env steps (mean over seeds, with its 95 % interval if there are three; each seed):",
        "",
        *table(["side", *PARTS, "return"], rows),
        f"How many times as fast as {PEER} over the whole of those trainings, in which episodes grow long and the peer need not step",
        "through its minibatches any more:",
        "",
        *table(["training", *PARTS], whole),
    ]
    found = [Target(f"recurrent, {part} against {PEER}", median(part_ratios(data, part)), 5.0) for part in ("learn", "whole")]
    slowest = min(theirs["total learn"] / mine["total learn"] for mine, theirs in zip(data["scores"][OURS], data["scores"][PEER]))
    found.append(Target(f"recurrent, learn over a whole training against {PEER}, least seed", slowest, 5.0))
    return Section("Memory", lines, found)


def main() -> None:
    """Measure in turns, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=4, help="of a timed run, after its warm-up")
    parser.add_argument("--seeds", type=int, default=3, help="of the trainings whose returns are reported")
    parser.add_argument("--score-sides", nargs="+", choices=list(SIDES), default=[OURS, "inchworm, memory last", PEER])
    options = parser.parse_args()
    from sb3_contrib import __version__ as version

    data: dict[str, Any] = {"peer": f"sb3-contrib {version}", "speed": {side: [] for side in SIDES}, "scores": {side: [] for side in SIDES}}
    for repeat in range(options.repeats):
        for side in list(SIDES)[:: 1 if repeat % 2 == 0 else -1]:
            data["speed"][side].append(measure(side, seed=repeat, iterations=options.iterations + WARMUP, score=False))
            print(f"{side}, repeat {repeat}: {data['speed'][side][-1]}", flush=True)
    for seed in range(options.seeds):
        for side in options.score_sides:
            data["scores"][side].append(measure(side, seed=seed, iterations=TRAINING // (ENVS * STEPS), score=True))
            print(f"{side}, seed {seed}: {data['scores'][side][-1]}", flush=True)
    shown = section(data)
    print("\n".join([*shown.lines, *(target.row() for target in shown.targets)]))
    if options.repeats >= 3 and options.seeds >= 3:
        results.save("recurrent", data)


if __name__ == "__main__":
    main()
