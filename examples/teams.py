"""Two teams: five agents with shared weights learn to beat a scripted team of five, then play it from both sides.

python examples/teams.py [STEPS]
"""

from __future__ import annotations

import sys

from inchworm import MatchStats, OpponentConfig, PPOTrainer, config_for, play_match


def main(steps: int = 100_000) -> MatchStats:
    config = config_for("Skirmish-v0")  # tuned settings; each agent of our team is a lane of the rollout
    config = config.replace(opponent=OpponentConfig(mode="heuristic", skill=0.3))
    with PPOTrainer(config.policy, config.env, config, num_envs=8, seed=0) as trainer:
        rollout = trainer.collect_rollouts(16)
        print(f"{rollout.num_lanes} lanes of {trainer.env.num_envs} games; {rollout.num_valid} steps of agents that live")
        trainer.train(total_timesteps=steps)
        result = play_match(trainer.collector.policy, "heuristic:0.3", config.env, episodes=20)
    print(result)
    return result


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
