"""Connect four, learned by playing both sides: games against random play and against a player that looks one move ahead.

    python benchmarks/connect_four.py                             # three seeds; kept
    python benchmarks/connect_four.py --seeds 0 --steps 200000    # a quick look; nothing is kept

PettingZoo's `connect_four_v3`, an AEC environment with action masks, without the wrappers that only check for misuse: they take
nearly half of its time. A run is a separate process; then its policy plays 200 games against
each player, 100 seeds from either side, greedy and sampled. The lookahead player completes four in a row if it can, else prevents the other
player from doing so with the next move, else plays at random.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import time
from typing import Any

import numpy as np

import jobs
import results
from figures import Section, Target, table

EPISODES, SEEDS, STEPS, MINUTES = 200, (0, 1, 2), 2_000_000, 15.0
ENOUGH = {"random": 0.95, "lookahead": 0.5}
ROWS, COLUMNS = 6, 7
LINES = np.array(
    [
        [(row + step * down) * COLUMNS + column + step * right for step in range(4)]
        for row, column in itertools.product(range(ROWS), range(COLUMNS))
        for down, right in ((0, 1), (1, 0), (1, 1), (1, -1))
        if row + 3 * down < ROWS and 0 <= column + 3 * right < COLUMNS
    ]
)
"""[69, 4] the cells of every four in a row."""


class Lookahead:
    """Looks one move ahead: win, else prevent the other's win, else random."""

    def initial_state(self, num_lanes: int) -> Any:
        """It has no memory."""
        del num_lanes
        return ()

    def act(self, observations: Any, state: Any, episode_starts: Any, rng: np.random.Generator, *, deterministic: bool = False) -> Any:
        """A column for each board [B, 6, 7, 2], whose planes are the own stones and the other's."""
        from inchworm.core.types import PolicyStep

        del episode_starts, deterministic
        legal = observations["action_mask"] != 0  # [B, 7]
        own, other = np.moveaxis(observations["observation"] != 0, -1, 0)  # [B, 6, 7]
        worth = rng.random(legal.shape) + 4.0 * completes(own, own | other) + 2.0 * completes(other, own | other)
        actions = np.where(legal, worth, -1.0).argmax(1)
        return PolicyStep(actions, actions, np.zeros(len(actions), np.float32), state)


def completes(stones: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """[B, 7] the columns in which one more stone makes four in a row."""
    boards, found = np.arange(len(stones)), np.zeros((len(stones), COLUMNS), bool)
    for column in range(COLUMNS):
        row = ROWS - 1 - taken[:, :, column].sum(1)  # [B] the lowest free cell; -1 in a full column
        after = stones.copy()
        after[boards, row.clip(0), column] |= row >= 0
        found[:, column] = after.reshape(len(stones), -1)[:, LINES].all(2).any(1)
    return found


def train(seed: int, steps: int) -> dict[str, Any]:
    """One run: its minutes, and the games at its end."""
    from pettingzoo.classic import connect_four_v3

    from inchworm import EnvConfig, EvalConfig, PolicyConfig, PPOConfig, PPOTrainer, RandomActor, RunConfig, TrainingConfig, play_match

    # The entropy bonus is high because advantages are normalised: quiet moves are then drawn nearly at random, so that many kinds of
    # threats occur, while a win or a loss outweighs it many times. The discount makes a win now worth more than one later, and the short
    # horizon of the advantages credits the move that won or lost.
    config = TrainingConfig(
        env=EnvConfig(num_envs=64, num_workers=1, help_workers=True),
        policy=PolicyConfig(hidden_sizes=(512, 128), activation="relu", shared_trunk=True),
        ppo=PPOConfig(
            learning_rate=1.5e-3, learning_rate_schedule="linear", gamma=0.9, gae_lambda=0.6, ent_coef=0.3,
            vf_coef=1.0, update_epochs=4, rollout_steps=32, minibatch_size=512,
        ),
        evaluation=EvalConfig(interval=0, final_episodes=0),
        run=RunConfig(seed=seed, total_timesteps=steps),
    )  # fmt: skip
    start, used = time.perf_counter(), cpu_seconds()
    with PPOTrainer(config.policy, connect_four_v3.raw_env, config) as trainer:
        trainer.train()
        minutes = (time.perf_counter() - start) / 60
    found: dict[str, Any] = {"seed": seed, "steps": trainer.total_timesteps, "minutes": minutes, "cpu_minutes": (cpu_seconds() - used) / 60}
    for name, player in (("random", RandomActor(trainer.env.action_space)), ("lookahead", Lookahead())):
        for how, deterministic in (("greedy", True), ("sampled", False)):
            games = play_match(trainer.policy, player, connect_four_v3.raw_env, EPISODES, deterministic=deterministic, num_envs=50)
            found[f"{name}, {how}"] = {"win_rate": games.win_rate, "interval95": list(games.win_interval95)}
    return found


def cpu_seconds() -> float:
    """CPU time of this process and of its workers that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def section(data: list[dict[str, Any]]) -> Section:
    """The part of the page."""
    names = [name for name in data[0] if isinstance(data[0][name], dict)]
    rows = [
        [str(run["seed"]), f"{run['steps']:,}", f"{run['minutes']:.1f}", f"{run['cpu_minutes']:.1f}"]
        + [f"{run[name]['win_rate']:.3f} [{', '.join(f'{end:.3f}' for end in run[name]['interval95'])}]" for name in names]
        for run in data
    ]
    lines = [
        "PettingZoo's connect four (`connect_four_v3`), one policy that plays and learns both sides on two cores; then 200 games against",
        "each player, half from either side: win rate with its 95 % interval, draws counted as half. The lookahead player completes four",
        "in a row if it can, else prevents the other player from doing so with the next move, else plays at random.",
        "",
        *table(["seed", "moves", "minutes", "CPU minutes", *names], rows),
    ]
    targets = [
        Target(f"connect four, {name}, greedy: lower end of the interval, worst seed", _worst(data, name), bound, unit="")
        for name, bound in ENOUGH.items()
    ]
    slowest = max(run["minutes"] for run in data)
    return Section(
        "Connect four",
        lines,
        [*targets, Target("connect four, minutes of training, slowest seed", slowest, MINUTES, at_least=False, unit="minutes")],
    )


def _worst(data: list[dict[str, Any]], name: str) -> float:
    return min(float(run[f"{name}, greedy"]["interval95"][0]) for run in data)


def main() -> None:
    """Train, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS, help="moves of each run")
    options = parser.parse_args()
    data = []
    for seed in options.seeds:
        data.append(jobs.run("connect_four:train", {"seed": seed, "steps": options.steps}))
        print(data[-1], flush=True)
    found = section(data)
    print("\n".join([*found.lines, *(target.row() for target in found.targets)]))
    if options.steps == STEPS and tuple(options.seeds) == SEEDS:
        results.save("connect_four", data)


if __name__ == "__main__":
    main()
