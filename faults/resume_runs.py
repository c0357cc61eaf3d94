"""For F1 to F4: small runs with everything on that has a memory, and the bits that they leave behind."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

UPDATES = 21
"""Updates of a whole run, after which its own rule stops it; the plan, which schedules follow, is longer."""
PLANNED = 30
STEPS, ENVS = 16, 2
SECONDS = 120.0
"""How long a command may take."""

WORLDS: dict[str, dict[str, Any]] = {"discrete": {"id": "CartPole-v1"}, "box": {"id": "Pendulum-v1", "max_episode_steps": 40}}


def settings(world: str, backend: str, *, seed: int = 3, **run: Any) -> dict[str, Any]:
    """Schedules, KL stop, normalisers and evaluations on; small enough for twenty updates in a quarter of a second.

    The world "memory" is the discrete one with an LSTM, whose sequences do not fill a rollout.
    """
    memory = {"kind": "lstm", "memory_size": 5, "memory_layers": 2} if world == "memory" else {}
    ppo: dict[str, Any] = {"rollout_steps": STEPS, "update_epochs": 3, "num_minibatches": 2, "target_kl": 0.004, "learning_rate": 0.01}
    ppo |= {"learning_rate_schedule": "linear", "clip_schedule": "cosine", "ent_schedule": "linear", "clip_vloss": True}
    ppo |= {"sequence_length": 7} if memory else {}
    return {
        "env": {"num_envs": ENVS, "num_workers": 0, **WORLDS["discrete" if memory else world]},
        "policy": {"hidden_sizes": [6], "normalize_observations": True, "normalize_values": True, **memory},
        "ppo": ppo,
        "evaluation": {"interval": 3, "episodes": 2, "final_episodes": 0, "num_envs": 2},
        "run": {"backend": backend, "seed": seed, "total_timesteps": PLANNED * STEPS * ENVS, "checkpoint_interval": 0, **run},
    }


class Rule:
    """A callback that remembers: it makes the world harder whenever returns have not risen, and stops the run when it has seen enough."""

    def __init__(self, trainer: Any, updates: int = UPDATES) -> None:
        self._trainer, self._updates = trainer, updates
        self.best, self.seen, self.level = -1e9, 0, 0

    def on_train_start(self, state: Any) -> None:
        """Nothing to do."""

    def on_rollout(self, state: Any, rollout: Any) -> None:
        """Nothing to do."""

    def on_iteration(self, state: Any, metrics: Mapping[str, float]) -> bool:
        """Look at the mean return; a level more is a wider start."""
        self.seen += 1
        found = metrics.get("mean_return", -1e9)
        if found > self.best:
            self.best = found
        else:
            self.level += 1
            wide = min(0.05 + 0.01 * self.level, 0.2)
            pendulum = "Pendulum" in self._trainer.config.env.id
            options = {"x_init": wide, "y_init": wide} if pendulum else {"low": -wide, "high": wide}
            self._trainer.env.set_reset_options(options)
        state.metrics["rule/level"] = float(self.level)
        return self.seen < self._updates

    def on_train_end(self, state: Any) -> None:
        """Nothing to do."""

    def state_dict(self) -> dict[str, Any]:
        """All that it remembers."""
        return {"best": self.best, "seen": self.seen, "level": self.level}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember that."""
        self.best, self.seen, self.level = float(state["best"]), int(state["seen"]), int(state["level"])


def go(directory: Path, data: Mapping[str, Any], *, resume: bool, updates: int = UPDATES) -> dict[str, str]:
    """A trainer of its own in this process: begin, or go on from the newest checkpoint; the bits that it leaves."""
    from inchworm.config.sections import TrainingConfig
    from inchworm.train.trainer import PPOTrainer

    config = TrainingConfig.from_dict(data)
    with PPOTrainer(config.policy, config.env, config, run_dir=directory) as trainer:
        if resume:
            trainer.load_checkpoint()
        trainer.train(callback=Rule(trainer, updates))
        assert not trainer.failures, trainer.failures
    return bits(directory)


def bits(directory: Path) -> dict[str, str]:
    """SHA-256 of all that is a function of the run: newest state with weights, optimiser and normalisers, metrics, policies."""
    from inchworm.run.checkpoint import TrainingCheckpointer

    newest = TrainingCheckpointer(directory / "checkpoints").latest()
    paths = [directory / name for name in ("metrics.jsonl", "policy.safetensors", "best_policy.safetensors")]
    if newest is not None:
        paths += [newest / "state.json", newest / "arrays.safetensors"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in paths if path.exists()}


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """The names of files whose bits differ or that only one side has."""
    return ", ".join(sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)))


def flags(data: Mapping[str, Any]) -> list[str]:
    """A config as flags of the command line; switches have no value."""
    words = []
    for section, fields in data.items():
        for name, value in fields.items():
            flag = f"{section}.{name.replace('_', '-')}"
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--{section}.no-{name.replace('_', '-')}")
            elif isinstance(value, list):
                words += [f"--{flag}", *map(str, value)]
            elif flag != "env.id":
                words.append(f"--{flag}={value}")
    return words


def command(*words: Any, cwd: Path, seconds: float = SECONDS, **environment: str) -> tuple[int, str]:
    """`inchworm …` in a process of its own: exit code and what went to standard error."""
    line = [sys.executable, "-m", "inchworm", *map(str, words)]
    with subprocess.Popen(
        line, cwd=cwd, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as child:
        try:
            _, said = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            _, said = child.communicate()
            return -1, f"it took more than {seconds:g} s: {said.decode(errors='replace')}"
    return child.returncode, said.decode(errors="replace")


def quietly(function: Any, *given: Any, **named: Any) -> tuple[Any, list[str]]:
    """The answer, and the warnings on the way."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        answer = function(*given, **named)
    return answer, [str(entry.message) for entry in told]
