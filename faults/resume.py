"""F1 and F3: stop after any update and resume; the same seed on any number of workers. Small runs with every kind of state."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from faults import runs
from faults.programme import Outcome, Work, procedure
from inchworm.config.sections import TrainingConfig
from inchworm.core.errors import InchwormError
from inchworm.core.protocols import Callback
from inchworm.train.trainer import PPOTrainer

UPDATES = 21
"""Updates of a whole run, after which its callback stops it; the schedules follow a longer plan."""
STOPS = UPDATES - 1
PLANNED = 30
STEPS, ENVS = 16, 2
BACKENDS = ("torch", "numpy")
WORLDS: dict[str, dict[str, Any]] = {"discrete": {"id": "CartPole-v1"}, "box": {"id": "Pendulum-v1", "max_episode_steps": 40}}


def settings(world: str, backend: str, *, seed: int = 3, **run: Any) -> dict[str, Any]:
    """A config with schedules, KL stop, normalizers and evaluations, small enough for twenty updates in a quarter of a second.

    The world "memory" is the discrete one with an LSTM whose sequences do not fill a rollout.
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


class Rule(Callback):
    """A callback with state: it widens the start whenever returns have not risen, and stops the run after some updates."""

    def __init__(self, trainer: Any, updates: int = UPDATES) -> None:
        self._trainer, self._updates = trainer, updates
        self.best, self.seen, self.level = -1e9, 0, 0

    def on_iteration(self, state: Any, metrics: Mapping[str, float]) -> bool:
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

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "seen": self.seen, "level": self.level}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.seen, self.level = float(state["best"]), int(state["seen"]), int(state["level"])


def train(directory: Path, data: Mapping[str, Any], *, resume: bool, updates: int = UPDATES) -> tuple[dict[str, str], list[str]]:
    """Start a run in this process, or continue from its newest checkpoint; its fingerprint and the warnings."""
    config = TrainingConfig.from_dict(data)
    with (
        warnings.catch_warnings(record=True, action="always") as caught,
        PPOTrainer(config.policy, config.env, config, run_dir=directory) as trainer,
    ):
        if resume:
            trainer.load_checkpoint()
        trainer.train(callback=Rule(trainer, updates))
        assert not trainer.failures, trainer.failures
    return runs.fingerprint(directory), [f"{warning.category.__name__}: {warning.message}" for warning in caught]


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


def stops(count: int) -> list[int]:
    """After which updates to stop: `count` of them, evenly spread from the first to the last but one."""
    count = max(1, min(count, STOPS))
    return sorted({1 + round(place * (STOPS - 1) / max(count - 1, 1)) for place in range(count)})


@procedure("F1", full=20, test=1)
def stop_and_resume(work: Work) -> Outcome:
    """Stop after update k and resume; then a chain of resumes.

    Must: every k of 1 … 20, and 20 resumes in a row: weights, optimiser, normalisers and metrics bit for bit.
    Each k on both backends and both kinds of action, and with an LSTM, in this process; some of them again as new processes.
    """
    outcome, ks = Outcome(), stops(work.count)
    combinations = [*((world, backend) for world in WORLDS for backend in BACKENDS), ("memory", "torch")]
    combinations = combinations[-2:] if work.reduced else combinations
    wholes = {}
    for world, backend in combinations:
        wholes[world, backend], warned = train(work.scratch / f"{world}-{backend}", settings(world, backend), resume=False)
        outcome.check(not warned, f"{world} {backend}, undisturbed: it warned {warned}")

    def check_end(world: str, backend: str, directory: Path, what: str) -> None:
        found, warned = train(directory, settings(world, backend), resume=True)
        wrong = runs.differences(found, wholes[world, backend])
        outcome.check(not wrong and not warned, f"{world} {backend}, {what}: {wrong} differ; {warned}")
        shutil.rmtree(directory)

    for index in work.each(len(ks)):
        for world, backend in combinations:
            directory = work.scratch / f"{world}-{backend}-{ks[index]}"
            train(directory, settings(world, backend, max_iterations=ks[index]), resume=False)
            check_end(world, backend, directory, f"stopped after {ks[index]}")
    for world, backend in combinations:
        directory = work.scratch / f"{world}-{backend}-chain"
        for number, k in enumerate(ks):
            train(directory, settings(world, backend, max_iterations=k), resume=number > 0)
        check_end(world, backend, directory, f"a chain of {len(ks)} resumes")

    for world, backend in combinations if not work.reduced else ():  # the suite has its own tests of the commands
        data = settings(world, backend)
        begin = runs.command(["train", data["env"]["id"], *flags(data), "--run.directory=.", f"--run.name={runs.RUN}", "--quiet"])
        resume = runs.command(["resume", runs.RUN, f"--run.max-iterations={UPDATES}", "--quiet"])
        expected = runs.undisturbed(work.scratch / f"{world}-{backend}-process", [*begin, f"--run.max-iterations={UPDATES}"])
        for k in sorted({ks[0], ks[len(ks) // 2], ks[-1]}):
            directory = work.scratch / f"{world}-{backend}-process-{k}"
            ended = [runs.run(line, directory) for line in ([*begin, f"--run.max-iterations={k}"], resume)]
            wrong = runs.differences(runs.fingerprint(directory / runs.RUN), expected)
            outcome.check(not any(one.code for one in ended) and not wrong, f"{world} {backend}, processes, k {k}: {wrong} differ; {ended}")
    outcome.notes.append(
        "on: linear and cosine schedules, KL stop, both normalisers, evaluations with the best kept, a callback that stops the run and "
        "widens its starts by what it remembers"
    )
    outcome.notes.append("every k and the chain in one process; the first, middle and last k also as new processes, without the callback")
    return outcome


WAYS: tuple[dict[str, Any], ...] = (*({"num_workers": count} for count in (0, 0, 1, 2, 2, 4)), {"num_workers": 2, "help_workers": True})
"""How the copies are stepped."""


@procedure("F3", full=10, test=1)
def same_seed(work: Work) -> Outcome:
    """The same seed again: in this process, with 1, 2 and 4 workers, helped; torch and NumPy.

    Must: equal bits for every seed; the number of workers makes no difference.
    Four updates of four copies: discrete actions with even seeds, a Box with odd ones.
    """
    outcome, distinct = Outcome(), set[str]()
    ways = WAYS if work.count > 1 else (WAYS[0], WAYS[-1])
    backends = ("numpy", "torch") if work.count > 1 else ("numpy",)
    for seed in work.each():
        world = ("discrete", "box")[seed % 2]
        for backend in backends:
            found = []
            for number, way in enumerate(ways):
                data, directory = settings(world, backend, seed=seed), work.scratch / f"{seed}-{backend}-{number}"
                data["env"] |= {"num_envs": 4, **way}
                try:
                    found.append(train(directory, data, resume=False, updates=4)[0])
                except (AssertionError, InchwormError) as error:  # a failed evaluation, or a run that cannot start
                    found.append({str(error): ""})
                shutil.rmtree(directory, ignore_errors=True)
                wrong = runs.differences(found[-1], found[0])
                outcome.check(not wrong, f"seed {seed}, {world}, {backend}, {way}: {wrong} differ")
            distinct.add(found[0].get("policy.safetensors", ""))
    if work.count > 1:
        runs_made = len(backends) * work.count
        few = f"only {len(distinct)} different policies of {runs_made} runs: the seed makes no difference"
        outcome.check(len(distinct) > runs_made // 2, few)
    outcome.notes.append("workers are started as programs; JAX comes with its own backend")
    return outcome
