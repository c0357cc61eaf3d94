"""The JAX learner: compiled once, resumed bit for bit, interchangeable with the other backends, and what it refuses."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from gymnasium import spaces

from doubles.learners import BOX, CONFIG, JAX, TORCH, collect, of_unknown_weights, parameters
from inchworm import EnvConfig, EvalConfig, PolicyConfig, PPOConfig, PPOTrainer, RunConfig, TrainingConfig, load_policy
from inchworm.backends.jax.backend import CACHE_VARIABLE
from inchworm.backends.jax.learner import JaxOptimizer
from inchworm.backends.jax.samples import padded_cuts
from inchworm.backends.registry import compute_gae
from inchworm.core.errors import ConfigError
from inchworm.policy.statistics import RunningMeanStd

PPO = PPOConfig(rollout_steps=32, update_epochs=2, num_minibatches=2)


CARTPOLE = EnvConfig(id="CartPole-v1", num_envs=4, num_workers=0, native=False)


def trained(directory: Path, iterations: int, **policy: Any) -> dict[str, np.ndarray]:
    """The weights of a run after so many iterations, with evaluations and checkpoints; it continues what the directory holds."""
    config = TrainingConfig(
        env=CARTPOLE,
        policy=PolicyConfig(hidden_sizes=(8,), memory_size=8, **policy),
        ppo=PPO,
        evaluation=EvalConfig(interval=2, episodes=2, final_episodes=2, num_envs=2),
        run=RunConfig(total_timesteps=10**9, max_iterations=iterations, checkpoint_interval=2, backend="jax", seed=7),
    )
    with PPOTrainer(config.policy, CARTPOLE, config, run_dir=directory) as trainer:
        if (directory / "checkpoints").exists():
            trainer.load_checkpoint()
        trainer.train()
        return trainer.policy.get_weights()


def test_an_update_is_compiled_once_while_episodes_end(tmp_path: Path) -> None:
    """Ten iterations with episodes that end, evaluations and checkpoints in between compile nothing after the first two."""
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if name == "/jax/core/compile/backend_compile_duration" else None
    )
    counts, ended = [], []
    config = TrainingConfig(
        env=CARTPOLE,
        ppo=PPO,
        evaluation=EvalConfig(interval=3, episodes=2, final_episodes=2, num_envs=2),
        run=RunConfig(total_timesteps=10**9, max_iterations=10, checkpoint_interval=4, backend="jax", seed=7),
    )
    with PPOTrainer("mlp", CARTPOLE, config, run_dir=tmp_path / "run") as trainer:
        for _ in range(10):
            rollout = trainer.collect_rollouts()
            ended.append(len(rollout.episodes))
            trainer.learn(rollout)
            trainer.evaluate(episodes=1)
            trainer.save_checkpoint()
            counts.append(len(compiled))
    assert sum(ended) > 10
    assert counts[0] > 0  # the listener hears
    assert counts == [counts[0]] * 10


def test_twenty_iterations_of_cartpole_have_the_losses_of_the_other_backends():
    """From equal weights and the same recorded actions, those of the NumPy trainer, which learns from them, too."""
    settings = TrainingConfig(env=CARTPOLE, ppo=PPO.replace(learning_rate=1e-3), run=RunConfig(seed=1))
    trainers = [PPOTrainer("mlp", CARTPOLE, settings, backend=backend) for backend in ("numpy", "torch", "jax")]
    for _ in range(20):
        rollout = trainers[0].collect_rollouts()
        first, *others = [trainer.learn(of_unknown_weights(rollout)) for trainer in trainers]
        for other in others:
            for loss in ("loss", "policy_loss", "value_loss", "entropy"):
                assert other[loss] == pytest.approx(first[loss], rel=1e-3, abs=1e-5)
    assert len(trainers[0].episode_rewards) > 20
    for trainer in trainers[1:]:
        np.testing.assert_allclose(parameters(trainer.policy), parameters(trainers[0].policy), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["mlp", "gru"])
def test_two_runs_and_a_resumed_one_have_the_same_bits(tmp_path: Path, kind: str) -> None:
    options = {"kind": kind, "normalize_observations": True, "normalize_values": True}
    straight, again = (trained(tmp_path / name, 6, **options) for name in ("straight", "again"))
    trained(tmp_path / "stopped", 3, **options)
    np.testing.assert_equal(again, straight)
    np.testing.assert_equal(trained(tmp_path / "stopped", 6, **options), straight)


def test_policy_files_are_those_of_every_backend(tmp_path):
    with PPOTrainer("mlp", CARTPOLE, PPO, num_envs=4, backend="jax") as trainer:
        trainer.train(total_timesteps=256)
        path = trainer.save_policy(tmp_path / "policy.safetensors")
        own = trainer.policy.get_weights()
    seen = np.random.default_rng(0).normal(size=(1, 6, 4)).astype(np.float32)
    policies = [load_policy(path, backend=name) for name in ("numpy", "torch", "jax")]
    for policy in policies:
        np.testing.assert_equal(policy.get_weights(), own)
        values = np.asarray(policy.value(torch.from_numpy(seen) if policy.backend == "torch" else seen))
        np.testing.assert_allclose(values, policies[0].value(seen), rtol=1e-5, atol=1e-5)
        actions = [one.act(seen[0], (), np.ones(6, bool), np.random.default_rng(1)).actions for one in (policy, policies[0])]
        np.testing.assert_array_equal(*actions)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compile": "on"}, "ppo.compile=on compiles torch's step, and run.backend=jax is always compiled"),
        ({"optimizer": "muon"}, "no ppo.optimizer=muon: use --backend torch, or one of adam, adamw, rmsprop, sgd"),
    ],
)
def test_settings_that_it_does_not_have_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        JaxOptimizer(JAX.policy(), CONFIG.replace(**options))


def test_devices_and_policies_that_it_does_not_have_are_refused():
    with pytest.raises(ConfigError, match=r"run.device='cuda': JAX computes on cpu here; set run.device=auto"):
        JaxOptimizer(JAX.policy(), CONFIG, device="cuda")
    with pytest.raises(ConfigError, match=r"learns built-in policies of its own, not TorchPolicy: use --backend torch"):
        JaxOptimizer(TORCH.policy(), CONFIG)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda values: values, r"returned \(1, 36\); it must return a scalar array"),
        (lambda values: "no", "returned str"),
        (lambda values: values.square().mean(), r"cannot be compiled: .*square"),
        (lambda values: 1.0 if values.mean() > 0 else 2.0, "cannot be compiled"),
    ],
    ids=["vector", "text", "torch", "branch"],
)
def test_losses_that_cannot_be_compiled_are_named(answer, words):
    def my_loss(values):
        return answer(values)

    policy = JAX.policy()
    before = parameters(policy)
    with pytest.raises(ConfigError, match=f"the custom loss my_loss {words}"):
        JAX.learner(policy, PPOConfig(update_epochs=1, num_minibatches=1)).update(collect(policy), [my_loss])
    np.testing.assert_array_equal(parameters(policy), before)


def test_cut_rows_are_padded_to_few_sizes():
    assert [padded_cuts(count, 3) for count in (0, 3, 96, 97, 192, 193)] == [96, 96, 96, 192, 192, 384]  # 3 times a power of two
    assert [padded_cuts(count, 50) for count in (0, 100, 101)] == [100, 100, 200]  # two of each lane at least
    policy = JAX.policy()
    learner = JAX.learner(policy, CONFIG.replace(max_staleness=9))
    rollout = collect(policy)
    learner.update(replace(rollout, truncated=np.zeros_like(rollout.truncated), cut_rows=rollout.cut_rows[-3:],
                           cut_observations=rollout.cut_observations[-3:], cut_valid=rollout.cut_valid[-3:]))  # fmt: skip


def test_gae_and_statistics_of_jax_arrays():
    rewards, values = jax.numpy.ones((3, 1)), jax.numpy.zeros((3, 1))
    none = jax.numpy.zeros((3, 1), bool)
    found = compute_gae(rewards, values, values, none, none, 1.0, 0.5)
    assert isinstance(found, jax.Array)
    np.testing.assert_allclose(found, [[1.75], [1.5], [1.0]])
    statistics = RunningMeanStd(())
    statistics.update(jax.numpy.array([1.0, 3.0]))
    scaled = statistics.normalize(jax.numpy.array([3.0]))
    assert isinstance(scaled, jax.Array)
    np.testing.assert_allclose(scaled, [1.0], rtol=1e-6)


PROGRAM = f"""
import os, jax
from inchworm import PolicyConfig, PolicySpec
from inchworm.backends.jax.backend import use_compilation_cache
from inchworm.backends.registry import make_policy
from gymnasium import spaces

def kept():
    use_compilation_cache.cache_clear()
    make_policy(PolicySpec(spaces.Box(-1, 1, (2,)), spaces.Discrete(2), PolicyConfig()), backend="jax")
    print(jax.config.jax_compilation_cache_dir)

kept()  # in the directory that the user told JAX
jax.config.update("jax_compilation_cache_dir", None)
os.environ["{CACHE_VARIABLE}"] = "off"
kept()
del os.environ["{CACHE_VARIABLE}"]
kept()
"""


def test_where_compiled_programs_are_kept(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != CACHE_VARIABLE}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "JAX_COMPILATION_CACHE_DIR": "/somewhere"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    found = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True).stdout
    assert found.split() == ["/somewhere", "None", str(tmp_path / "inchworm" / "jax")]


def test_without_jax_the_line_to_type(tmp_path):
    arguments = ["train", "CartPole-v1", "--backend", "jax", "--run.directory", str(tmp_path)]
    code = f"import sys; sys.modules['jax'] = None; from inchworm.cli.main import main; sys.exit(main({arguments!r}))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stderr.strip() == 'inchworm: run.backend=jax needs jax, which is not installed; type: pip install "inchworm[jax]"'
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("kind", "place"), [("cnn", "after"), ("lstm", "before"), ("lstm", "after"), ("gru", "before"), ("gru", "after")])
def test_an_update_of_networks_that_numpy_does_not_train_is_torchs(kind, place):
    options = {
        "kind": kind,
        "memory_size": 6,
        "memory_place": place,
        "cnn_filters": ((4, 3, 1),),
        "cnn_features": 8,
        "normalize_values": True,
    }
    space = spaces.Box(0, 255, (6, 6, 2), np.uint8) if kind == "cnn" else BOX
    policies = [side.policy(space, spaces.Discrete(3), dtype=np.float64, **options) for side in (TORCH, JAX)]
    learners = [side.learner(policy, CONFIG, seed=2) for side, policy in zip((TORCH, JAX), policies)]
    for seed in range(2):
        rollout = of_unknown_weights(recurrent(policies[0], seed))
        stats = [learner.update(rollout) for learner in learners]
        assert dict(stats[0]) == {name: pytest.approx(value, rel=1e-7, abs=1e-7) for name, value in stats[1].items()}
    np.testing.assert_allclose(parameters(policies[1]), parameters(policies[0]), rtol=0, atol=1e-9)


def recurrent(policy, seed):
    """A rollout [12, 3] in which the policy acted step by step, with its memory."""
    layout = policy.spec.memory
    if layout is None:
        return collect(policy, seed=seed)
    plain = collect(TORCH.policy(), seed=seed)
    rng, state, rows = np.random.default_rng(seed), policy.initial_state(3), []
    memory = []
    for observations, starts in zip(plain.observations, plain.episode_starts):
        memory.append(state)
        step = policy.act(observations, state, starts, rng)
        state = step.state
        rows.append(step)
    after = [*memory[1:], state]
    at = plain.cut_rows
    return replace(
        plain,
        actions=np.stack([row.actions for row in rows]),
        log_probs=np.stack([row.log_probs for row in rows]).astype(np.float32),
        policy_state={name: np.stack([one[name] for one in memory]).astype(np.float32) for name in layout.names},
        state_every=1,
        cut_state={name: np.stack([after[t][name][b] for t, b in at]).astype(np.float32) for name in layout.names},
    )
