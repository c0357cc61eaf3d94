"""For F1: Stable-Baselines3 stopped after update k and resumed, as its documentation says: PPO and VecNormalize, saved and loaded."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from faults.programme import Outcome, Work
from faults.resume_runs import ENVS, STEPS, UPDATES


def make_world(seed: int) -> Any:
    """Two copies of CartPole in one process, seeded."""
    import gymnasium as gym
    from stable_baselines3.common.vec_env import DummyVecEnv

    venv = DummyVecEnv([lambda: gym.make("CartPole-v1") for _ in range(ENVS)])
    venv.seed(seed)
    return venv


def linear(progress: float) -> float:
    """A learning rate that falls with the run's progress, as its schedules are written; the last update still moves."""
    return 0.01 * (0.3 + 0.7 * progress)


def make_model(seed: int) -> Any:
    """The same sizes, schedule, KL stop and normalisers as ours."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import VecNormalize

    return PPO(
        "MlpPolicy",
        VecNormalize(make_world(seed)),
        n_steps=STEPS,
        batch_size=STEPS * ENVS // 2,
        n_epochs=3,
        learning_rate=linear,
        target_kl=0.004,
        policy_kwargs={"net_arch": [6]},
        seed=seed,
        device="cpu",
    )


def saver(directory: Path) -> Any:
    """A callback that saves model and normaliser between two updates: the most complete moment that it offers."""
    from stable_baselines3.common.callbacks import BaseCallback

    class SaveAfterUpdate(BaseCallback):
        def _on_rollout_start(self) -> None:
            k = self.num_timesteps // (STEPS * ENVS)
            if k:
                self.model.save(directory / f"model-{k}")
                self.model.get_vec_normalize_env().save(str(directory / f"normalizer-{k}.pkl"))

        def _on_step(self) -> bool:
            return True

    return SaveAfterUpdate()


def digest(model: Any) -> str:
    """Of its weights alone."""
    parts = hashlib.sha256()
    for name, tensor in sorted(model.policy.state_dict().items()):
        parts.update(name.encode() + tensor.numpy().tobytes())
    return parts.hexdigest()


def run(work: Work, ks: list[int]) -> Outcome:
    """How many of the resumed runs end with the weights of the undisturbed one."""
    import stable_baselines3
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import VecNormalize

    torch.set_num_threads(1)
    outcome, seed, total = Outcome(), work.seed + 3, UPDATES * STEPS * ENVS
    whole = make_model(seed)
    whole.learn(total, callback=saver(work.scratch))
    again = make_model(seed)  # only now: making one seeds the process
    again.learn(total)
    for index in work.each(len(ks)):
        k = ks[index]
        venv = VecNormalize.load(str(work.scratch / f"normalizer-{k}.pkl"), make_world(seed))
        model = PPO.load(work.scratch / f"model-{k}", env=venv, device="cpu")
        model.learn(total - k * STEPS * ENVS, reset_num_timesteps=False)
        fine = model.num_timesteps == whole.num_timesteps and digest(model) == digest(whole)
        outcome.check(fine, f"stopped after {k}: the weights differ")
    same = "equal" if digest(again) == digest(whole) else "different"
    outcome.figures["the same run twice, undisturbed"] = f"{same} weights"
    outcome.notes.append(f"version {stable_baselines3.__version__}, CartPole, PPO.save and VecNormalize.save right after update k")
    outcome.notes.append("loaded into a new trainer, it resets its environments and draws from fresh random streams")
    return outcome
