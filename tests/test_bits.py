"""A dozen short runs whose final weights and metrics are compared, bit for bit, with recorded ones.

A run is a function of its config and seed, so a change of structure must not move a single bit. Bits also depend on the CPU, the
BLAS and the versions of NumPy and torch: hashes are recorded for each such machine, and on an unknown one the weights are compared to
1e-5 instead. A change that moves bits on purpose records them again, in a commit that says why:

    python tests/test_bits.py
"""

import hashlib
import json
import platform
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from pettingzoo import ParallelEnv
from threadpoolctl import threadpool_info

from inchworm import EnvConfig, EvalConfig, OpponentConfig, PolicyConfig, PolicyMap, PPOConfig, PPOTrainer, RunConfig, TrainingConfig

HASHES = Path(__file__).parent / "golden_bits" / "hashes.json"
WEIGHTS = Path(__file__).parent / "golden_bits" / "weights.npz"


class Mixed(gym.Env[Any, Any]):
    """Dict observations, a mask in the observation, and an action with a discrete, a masked and a continuous part."""

    observation_space = spaces.Dict(
        {
            "seen": spaces.Box(-1, 1, (3,), np.float32),
            "kind": spaces.Discrete(3),
            "action_mask": spaces.Dict({"move": spaces.MultiBinary(4)}),
        }
    )
    action_space = spaces.Dict({"move": spaces.Discrete(4), "turn": spaces.Box(-1, 1, (2,), np.float32)})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._steps = 0
        return self._observe(), {}

    def _observe(self) -> dict[str, Any]:
        self._mask = self.np_random.integers(2, size=4).astype(np.int8)
        self._mask[self.np_random.integers(4)] = 1
        seen = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        return {"seen": seen, "kind": int(self.np_random.integers(3)), "action_mask": {"move": self._mask}}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self._mask[action["move"]] == 1
        self._steps += 1
        over, cut = self._steps == 7, bool(self.np_random.integers(2))
        return self._observe(), float(action["move"]) - float(action["turn"][0]) ** 2, over and not cut, over and cut, {}


class Recall(gym.Env[Any, Any]):
    """The first observation holds a cue; the reward of the last of five steps asks for it."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._cue, self._steps = int(self.np_random.integers(2)), 0
        return np.array([2 * self._cue - 1, 0], np.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        over = self._steps == 5
        return np.array([0, self._steps / 5], np.float32), float(over and action == self._cue), over, False, {}


class Squad(ParallelEnv[str, Any, int]):  # type: ignore[misc]
    """Three agents; the second dies after two of six steps. The reward is the number of agents that chose alike."""

    metadata: dict[str, Any] = {"name": "squad", "is_parallelizable": True}  # noqa: RUF012
    possible_agents = ["a", "b", "c"]  # noqa: RUF012
    state_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    render_mode = None

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self._rng, self._steps, self.agents = np.random.default_rng(seed), 0, list(self.possible_agents)
        return self._seen(self.agents), {agent: {} for agent in self.agents}

    def _seen(self, agents: list[str]) -> dict[str, Any]:
        self._luck = float(self._rng.random())
        return {agent: np.array([self.possible_agents.index(agent), self._steps, self._luck], np.float32) for agent in agents}

    def state(self) -> np.ndarray:
        return np.array([self._steps, self._luck], np.float32)

    def step(self, actions: dict[str, int]) -> tuple[dict[str, Any], ...]:
        acted, chosen = self.agents, list(actions.values())
        self._steps += 1
        rewards = {agent: float(chosen.count(actions[agent])) for agent in acted}
        ends = {agent: self._steps == 6 or (agent == "b" and self._steps == 2) for agent in acted}
        self.agents = [agent for agent in acted if not ends[agent]]
        return self._seen(acted), rewards, ends, dict.fromkeys(acted, False), {agent: {} for agent in acted}


PPO = PPOConfig(rollout_steps=16, update_epochs=2, num_minibatches=2)
SMALL = PolicyConfig(hidden_sizes=(8,), normalize_observations=True, normalize_values=True)
SKIRMISH = EnvConfig(id="Skirmish-v0", num_envs=4, num_workers=0, kwargs={"units": ["scout", "soldier"], "max_steps": 20, "wall_pairs": 0})
OPPONENT = {"snapshot_interval": 1, "pool_size": 2, "rating_interval": 2, "rating_episodes": 2}


def run(
    directory: Path, *, env: Any, policy: Any = SMALL, ppo: PPOConfig = PPO, half: bool = False, **sections: Any
) -> dict[str, np.ndarray]:
    """Train for four iterations, stopping and resuming after two if `half`; return the final weights."""
    env_config = sections.pop("env_config", env if isinstance(env, EnvConfig) else EnvConfig(num_envs=4, num_workers=0))
    backend = sections.pop("backend", "torch")
    for iterations in (2, 4) if half else (4,):
        config = TrainingConfig(
            env=env_config,
            policy=policy if isinstance(policy, PolicyConfig) else SMALL,
            ppo=ppo,
            evaluation=EvalConfig(interval=2, episodes=4, final_episodes=4, num_envs=2),
            run=RunConfig(total_timesteps=10**9, max_iterations=iterations, checkpoint_interval=2, backend=backend, seed=7),
            **sections,
        )
        with PPOTrainer(policy, env, config, run_dir=directory) as trainer:
            if (directory / "checkpoints").exists():
                trainer.load_checkpoint()
            trainer.train()
            weights = {name: np.array(value) for name, value in trainer.policy.get_weights().items()}
    return weights


def skirmish(directory: Path, mode: str, **options: Any) -> dict[str, np.ndarray]:
    return run(directory, env=SKIRMISH, opponent=OpponentConfig(mode=mode, **OPPONENT, **options))


def cartpole() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1")


CARTPOLE = EnvConfig(id="CartPole-v1", num_envs=4, num_workers=0)
CASES: dict[str, Callable[[Path], dict[str, np.ndarray]]] = {
    "cartpole-numpy": lambda path: run(path, env=CARTPOLE, backend="numpy"),
    "cartpole-torch": lambda path: run(path, env=CARTPOLE),
    "cartpole-torch-clipped": lambda path: run(
        path, env=CARTPOLE, ppo=PPO.replace(clip_vloss=True, gradient_accumulation=2, normalize_advantages="minibatch", weight_decay=0.01)
    ),
    "cartpole-copies": lambda path: run(path, env=cartpole),
    "cartpole-workers": lambda path: run(path, env=cartpole, env_config=EnvConfig(num_envs=4, num_workers=2)),
    "cartpole-helped": lambda path: run(path, env=cartpole, env_config=EnvConfig(num_envs=4, num_workers=1, help_workers=True)),
    "mixed-torch": lambda path: run(path, env=Mixed),
    "mixed-numpy": lambda path: run(path, env=Mixed, backend="numpy", policy=SMALL.replace(shared_trunk=True, action_bounds="tanh")),
    "lstm": lambda path: run(path, env=Recall, policy=SMALL.replace(kind="lstm", memory_size=6), ppo=PPO.replace(sequence_length=8)),
    "gru": lambda path: run(path, env=Recall, policy=SMALL.replace(kind="gru", memory_size=6, memory_place="before")),
    "team-central-critic": lambda path: run(path, env=Squad, policy=SMALL.replace(central_critic=True)),
    "composite": lambda path: run(
        path,
        env=Squad,
        policy=PolicyMap(policies={"one": "mlp", "two": SMALL.replace(kind="gru", memory_size=4)}, lane_map=["one", "two", "one"]),
    ),
    "heuristic": lambda path: skirmish(path, "heuristic", skill_start=0.3),
    "self-play": lambda path: skirmish(path, "self_play"),
    "self-play-resumed": lambda path: run(path, env=SKIRMISH, half=True, opponent=OpponentConfig(mode="self_play", **OPPONENT)),
    "cartpole-resumed": lambda path: run(path, env=CARTPOLE, half=True),
}
ALIKE = (("cartpole-copies", "cartpole-workers"), ("cartpole-copies", "cartpole-helped"), ("self-play", "self-play-resumed"))
"""Cases that must have the same weights on any machine."""


def machine() -> str:
    """Name what the bits of a run depend on besides its config."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), ""
    )
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]  # type: ignore[index]
    kernels = "+".join(np.show_config(mode="dicts")["SIMD Extensions"]["found"][-3:])  # type: ignore[index]
    [library] = [each for each in threadpool_info() if each["user_api"] == "blas" and "numpy" in each["filepath"]]
    products = "AVX-512" if library["architecture"] in ("SkylakeX", "Cooperlake") else library["architecture"]
    versions = f"numpy {np.__version__}, torch {torch.__version__}, {blas['name']} {blas['version']} {products}"
    return f"{platform.machine()} {model} [{kernels}; {torch.backends.cpu.get_cpu_capability()}], {versions}"


def hash_weights(weights: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(weights.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def measure(case: str, directory: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights = CASES[case](directory)
    return weights, {"weights": hash_weights(weights), "metrics": hashlib.sha256((directory / "metrics.jsonl").read_bytes()).hexdigest()}


@pytest.mark.parametrize("case", CASES)
def test_the_bits_of_a_run(case: str, tmp_path: Path) -> None:
    weights, hashes = measure(case, tmp_path / "run")
    recorded = json.loads(HASHES.read_text()).get(machine())
    if recorded is not None:
        assert {kind: hashes[kind] for kind in recorded[case]} == recorded[case]  # metrics are recorded where they were last renewed
        return
    warnings.warn(f"no bits are recorded for this machine ({machine()}); weights are compared to 1e-5", stacklevel=1)
    with np.load(WEIGHTS) as expected:
        for name, array in weights.items():
            np.testing.assert_allclose(array, expected[f"{case}:{name}"], rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_workers_and_resumes_have_the_recorded_bits_of_the_plain_run(one: str, other: str) -> None:
    for cases in json.loads(HASHES.read_text()).values():
        assert cases[one]["weights"] == cases[other]["weights"]


def test_compiled_torch_repeats_itself(tmp_path: Path) -> None:
    """The compiled step is not compared with a recorded hash: its bits depend on the compiler of the machine."""
    given = {"env": CARTPOLE, "policy": PolicyConfig(hidden_sizes=(8,)), "ppo": PPO.replace(compile="on")}  # a small graph compiles sooner
    first, second = (hash_weights(run(tmp_path / name, **given)) for name in ("first", "second"))
    assert first == second


def record() -> None:
    """Write the hashes of this machine, and the weights for all others."""
    import tempfile

    recorded = json.loads(HASHES.read_text()) if HASHES.exists() else {}
    arrays: dict[str, np.ndarray] = {}
    recorded[machine()] = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as directory:
            weights, recorded[machine()][case] = measure(case, Path(directory) / "run")
        arrays |= {f"{case}:{name}": array for name, array in weights.items()}
        sys.stdout.write(f"{case} {recorded[machine()][case]['weights'][:12]}\n")
    HASHES.write_text(json.dumps(recorded, indent=1) + "\n")
    np.savez_compressed(WEIGHTS, **arrays)  # type: ignore[arg-type]


if __name__ == "__main__":
    record()
