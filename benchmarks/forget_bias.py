"""How should an LSTM's forget gates begin? Biases 0 and 1, memory after and before the hidden layers, on four tasks that need memory.

    python benchmarks/forget_bias.py                                     # everything that is not there yet, then the table
    python benchmarks/forget_bias.py --tasks corridor --seeds 2 --scale 0.2 --out /tmp/quick.jsonl
    python benchmarks/forget_bias.py --report                            # the table alone

The corridor is that of `corridor.py`, CartPole with hidden velocities that of `recurrent.py`. The long corridor has its cue 50 steps
before the choice. The pendulum's velocity is hidden, too.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from figures import Section
from variants import Case, compare, curve_images, kept_runs, paired_report

PLACES = {"after": "layers first", "before": "memory first"}
BIASES = (1.0, 0.0)
_CORRIDOR = {
    "policy": {"hidden_sizes": (32,), "memory_size": 32},
    "ppo": {"num_minibatches": 4, "update_epochs": 4, "learning_rate": 3e-3, "ent_coef": 0.01},
}
_NORMALISED = {"normalize_observations": True, "normalize_values": True}
TASKS: dict[str, dict[str, Any]] = {
    "corridor": {
        **_CORRIDOR, "env": {"id": "inchworm.worlds.toys:MemoryCorridor", "num_envs": 16},
        "ppo": {**_CORRIDOR["ppo"], "rollout_steps": 63, "sequence_length": 63}, "steps": 40_320,
    },
    "long corridor": {
        **_CORRIDOR, "env": {"id": "inchworm.worlds.toys:MemoryCorridor", "num_envs": 16, "kwargs": {"length": 50}},
        "ppo": {**_CORRIDOR["ppo"], "rollout_steps": 153, "sequence_length": 153}, "steps": 122_400,
    },
    "CartPole without velocities": {
        "env": {"id": "inchworm.worlds.toys:PartialCartPole", "num_envs": 8},
        "policy": {"hidden_sizes": (64, 64), "memory_size": 64, **_NORMALISED},
        "ppo": {
            "rollout_steps": 128, "sequence_length": 32, "minibatch_size": 128, "update_epochs": 10, "learning_rate": 1e-3, "vf_coef": 1.0,
            "ent_coef": 0.0, "normalize_advantages": "minibatch",
        },
        "steps": 60_416,
    },
    "Pendulum without velocity": {
        "env": {"id": "forget_bias:PartialPendulum", "num_envs": 8},
        "policy": {"hidden_sizes": (64, 64), "memory_size": 64, **_NORMALISED},
        "ppo": {
            "rollout_steps": 256, "sequence_length": 32, "minibatch_size": 128, "update_epochs": 10, "learning_rate": 1e-3, "vf_coef": 1.0,
            "gamma": 0.9, "ent_coef": 0.0, "normalize_advantages": "minibatch",
        },
        "steps": 102_400,
    },
}  # fmt: skip


def PartialPendulum(**kwargs: Any) -> gym.Env[Any, Any]:
    """Pendulum-v1 without its angular velocity."""
    from inchworm.worlds.toys import HideEntries

    return HideEntries(gym.make("Pendulum-v1", **kwargs), (0, 1))


def train(task: str, bias: float, place: Any, seed: int, scale: float) -> dict[str, Any]:
    """One training with its curve, and the mean returns of 100 greedy and of 100 sampled episodes."""
    from inchworm import EnvConfig, EvalConfig, PolicyConfig, PPOConfig, RunConfig, TrainingConfig
    from inchworm_side import train_and_score

    given = TASKS[task]
    config = TrainingConfig(
        env=EnvConfig(**given["env"], num_workers=0),
        policy=PolicyConfig(kind="lstm", memory_place=place, lstm_forget_bias=bias, **given["policy"]),
        ppo=PPOConfig(**given["ppo"]),
        evaluation=EvalConfig(interval=0, final_episodes=0, seed=10_000 + seed),
        run=RunConfig(seed=seed, total_timesteps=round(scale * given["steps"]), threads=1, device="cpu"),
    )
    return train_and_score(config, 100)


def variant(bias: float, place: str) -> str:
    """The name of a variant, such as `bias 0, memory first`."""
    return f"bias {bias:g}, {PLACES[place]}"


CASES = [
    *(
        Case(task, variant(bias, place), variant(1.0, place), "forget_bias:train", {"task": task, "bias": bias, "place": place})
        for task in TASKS
        for place in PLACES
        for bias in BIASES
    ),
    *(
        Case("CartPole without velocities", name, variant(1.0, "before"), "recurrent:train_peer", {"shared": shared}, seeds)
        for name, shared, seeds in (("RecurrentPPO, shared LSTM", True, 8), ("RecurrentPPO", False, 5))
    ),
]


def section() -> Section:
    """The part of docs/memory_and_teams.md."""
    runs = kept_runs("forget_bias")
    lines = [
        "Made by `benchmarks/forget_bias.py`. The forget gates of an LSTM begin with the bias 1 (73 % open, the default) or 0 (half open);",
        "the hidden layers come before the memory (layers first, the default) or after it. On CartPole-v1 with its velocities hidden,",
        "sb3-contrib's RecurrentPPO learns with the settings of the section Memory, with one LSTM and with two, as it does by default.",
        "",
        *paired_report(CASES, runs),
        "",
        *curve_images("forget_bias", CASES, runs),
    ]
    return Section("How an LSTM begins", lines)


if __name__ == "__main__":
    compare("forget_bias", __doc__, CASES, seeds=8)
