"""A1 for Stable-Baselines3, as its documentation says: CheckpointCallback with VecNormalize; load the newest, learn on."""

from __future__ import annotations

import hashlib
import random
import re
import resource
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

from faults.durability_child import Killer
from faults.durability_fork import run_forked
from faults.programme import Outcome, Work, peer

NAME = "Stable-Baselines3"
UPDATES, LANES, STEPS = 20, 4, 32
TOTAL = UPDATES * LANES * STEPS
PHASES = ("save", "learn", "save", "collect")
DURATIONS = {"save": 8000, "learn": 15000, "collect": 15000}
"""Microseconds within which a kill is set; one that comes too late is tried again in the next phase of its kind, sooner."""
KILLS = 40
UNREADABLE, SILENT, SAME = 3, 4, 0


def _vector_env() -> Any:
    import gymnasium
    from stable_baselines3.common.vec_env import DummyVecEnv

    return DummyVecEnv([lambda: gymnasium.make("CartPole-v1")] * LANES)


def _new() -> Any:
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import VecNormalize

    env = VecNormalize(_vector_env())
    return PPO(
        "MlpPolicy", env, learning_rate=lambda left: 3e-4 * left, n_steps=STEPS, batch_size=64, n_epochs=2, seed=0, device="cpu",
        policy_kwargs={"net_arch": [16, 16]},
    )  # fmt: skip


def _saved(directory: Path) -> list[int]:
    """Steps of its checkpoints, newest first."""
    found = [re.fullmatch(r"rl_model_(\d+)_steps\.zip", path.name) for path in directory.glob("*.zip")]
    return sorted((int(match[1]) for match in found if match), reverse=True)


def _load(directory: Path, step: int) -> Any:
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import VecNormalize

    env = VecNormalize.load(str(directory / f"rl_model_vecnormalize_{step}_steps.pkl"), _vector_env())
    return PPO.load(directory / f"rl_model_{step}_steps.zip", env=env, device="cpu")


def _load_newest(directory: Path) -> tuple[Any, int]:
    """The newest that loads, as a careful user's script would find it; or a new run."""
    for step in _saved(directory):
        try:
            return _load(directory, step), step
        except Exception as error:  # a damaged pickle may raise anything
            (directory / "unreadable").write_text(f"{type(error).__name__}: {error}")
    return _new(), 0


def _digest(model: Any) -> str:
    """Weights, optimiser and normaliser."""
    made = hashlib.sha256()
    named: list[tuple[str, Any]] = [*model.policy.state_dict().items(), *_flat(model.policy.optimizer.state_dict()["state"])]
    for name, tensor in named:
        made.update(f"{name}".encode())
        made.update(tensor.detach().numpy().tobytes())
    normalize = model.get_vec_normalize_env()
    for statistics in (normalize.obs_rms, normalize.ret_rms) if normalize is not None else ():
        made.update(statistics.mean.tobytes() + statistics.var.tobytes() + repr(float(statistics.count)).encode())
    return made.hexdigest()


def _flat(state: dict[Any, dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(f"{index} {name}", value) for index, entry in state.items() for name, value in entry.items()]


def save(directory: Path, updates: int) -> int:
    """A model and its normaliser after so many updates, and their digest."""
    directory.mkdir(parents=True)
    model = _new()
    model.learn(updates * LANES * STEPS)
    model.save(directory / "model.zip")
    model.get_vec_normalize_env().save(str(directory / "normalize.pkl"))
    (directory / "digest").write_text(_digest(model))
    return 0


def judge(directory: Path, expected: str, *, bounded: bool = True) -> int:
    """Load as its documentation says; a damaged pickle may do anything, so memory and time are bounded."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import VecNormalize

    if bounded:
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
        signal.alarm(15)
    try:
        env = VecNormalize.load(str(directory / "normalize.pkl"), _vector_env())
        model = PPO.load(directory / "model.zip", env=env, device="cpu")
        return SAME if _digest(model) == expected else SILENT
    except Exception:
        return UNREADABLE


def warm(directory: Path) -> None:
    """Do everything once here, so that children find imported what they need."""
    import torch

    torch.set_num_threads(1)
    save(directory, 1)
    judge(directory, "", bounded=False)


def _train(directory: Path, kill: tuple[str, int, int] | None = None) -> int:
    """Begin, or go on from the newest checkpoint, to the end; the digest goes to a file."""
    import torch
    from stable_baselines3.common.callbacks import CheckpointCallback

    torch.set_num_threads(1)
    model, step = _load_newest(directory)
    if kill is not None:
        _arm(kill, directory / "note")
    callback = CheckpointCallback(STEPS, str(directory), save_vecnormalize=True)
    if step < TOTAL:
        model.learn(TOTAL - step, callback=callback, reset_num_timesteps=step == 0)
    (directory / "digest").write_text(_digest(model))
    return 0


def _arm(kill: tuple[str, int, int], note: Path) -> None:
    """Hooks round the one phase that is wanted."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
    from stable_baselines3.common.vec_env import VecNormalize

    phase, number, microseconds = kill
    killer = Killer(phase, number, microseconds, note)
    owners: dict[str, list[tuple[Any, str]]] = {
        "save": [(PPO, "save"), (VecNormalize, "save")],
        "learn": [(PPO, "train")],
        "collect": [(OnPolicyAlgorithm, "collect_rollouts")],
    }
    for owner, method in owners[phase]:
        setattr(owner, method, _around(getattr(owner, method), phase, killer))


def _around(function: Callable[..., Any], phase: str, killer: Killer) -> Callable[..., Any]:
    @wraps(function)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        killer.enter(phase)
        try:
            return function(*arguments, **named)
        finally:
            killer.leave(phase)

    return wrapped


@peer("A1", NAME)
def killed_trainers(work: Work) -> Outcome:
    """One kill a run; the restart loads the newest checkpoint and learns on."""
    warm(work.scratch / "warm")
    outcome, rng, found = Outcome(), random.Random(work.seed), Counter[str]()
    ended = run_forked(lambda: _train(work.scratch), work.scratch)
    if ended.code:
        raise RuntimeError(f"the undisturbed run ended with code {ended.code}: {ended.error[-500:]}")
    expected = (work.scratch / "digest").read_text()
    for number in work.each(min(work.count, KILLS)):
        phase, directory = PHASES[number % len(PHASES)], work.scratch / f"run-{number}"
        _kill(directory, phase, rng)
        ended = run_forked(partial(_train, directory), directory)
        unreadable = directory / "unreadable"
        same = not ended.code and (directory / "digest").read_text() == expected
        verdict = f"code {ended.code}" if ended.code else "the same bits" if same else "other bits at the end"
        found[verdict] += 1
        found["newest checkpoint incomplete or unreadable"] += unreadable.exists()
        why = f"({_why(unreadable)})" if unreadable.exists() else ""
        outcome.check(verdict == "the same bits", f"killed in {phase}: {verdict} {why}".strip())
        shutil.rmtree(directory)
    outcome.figures.update({verdict: str(count) for verdict, count in found.items()})
    outcome.notes.append(
        "CheckpointCallback after every rollout with save_vecnormalize; PPO.load of the newest, VecNormalize.load, learn on"
    )
    return outcome


def _why(unreadable: Path) -> str:
    return re.sub(r"\S*/", "", unreadable.read_text())[:120]


def _kill(directory: Path, phase: str, rng: random.Random) -> None:
    """A run that is killed inside a phase."""
    for _ in range(10):
        shutil.rmtree(directory, ignore_errors=True)
        kill = (phase, rng.randint(1, UPDATES - 2), int(rng.random() * DURATIONS[phase]))
        if run_forked(partial(_train, directory, kill), directory).code == -9:
            return
    raise RuntimeError(f"no kill inside {phase} succeeded")
