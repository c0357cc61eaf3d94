"""Every example runs, from its own file, with tiny settings; and each is listed here, so that none is forgotten."""

import itertools
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inchworm.cli.main import main

EXAMPLES = Path(__file__).parents[1] / "examples"
# steps that make each one run at least twice round its loop
STEPS = {
    "collectors": 800,
    "components": 600,
    "curiosity": 2100,
    "curriculum": "1600 4096",
    "custom_loss": 600,
    "custom_network": 600,
    "demonstrations": 300,
    "diversity": 1100,
    "device_env": 17000,
    "episode_trainer": 2048,
    "functional_loop": 600,
    "meta_learning": 3072,
    "offline": 2048,
    "own_env": 1100,
    "stored_rollouts": 800,
    "structured_config": 600,
    "teams": 100,
    "transformer_policy": 600,
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def _threads() -> Any:
    """Examples that use the optimiser alone choose torch's threads for the whole process: put them back."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} - {"__init__"} == set(STEPS)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("name", sorted(STEPS))
def test_example_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *str(STEPS[name]).split()])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out.strip(), "an example shows what it did"


def test_curriculum_gets_harder_at_30_and_60_percent() -> None:
    history = runpy.run_path(str(EXAMPLES / "curriculum.py"))["corridor"](6144)  # 12 iterations of 8 lanes x 64 steps
    lengths = history["episode/length"]
    assert lengths[0] == 4.0
    assert lengths[-1] == 16.0
    assert lengths == sorted(lengths)


def test_the_episode_trainer_calls_back_for_every_episode_and_ends_with_an_evaluation(tmp_path: Path) -> None:
    module = runpy.run_path(str(EXAMPLES / "episode_trainer.py"))
    settings = {"max_steps_per_episode": 50, "eval_frequency": 2, "eval_episodes": 4, "epochs_per_update": 1, "batch_size": 64}
    settings |= {"minibatch_size": 64, "convergence_window": 5, "early_stopping_patience": 2}

    def trained(**more: Any) -> tuple[dict[str, Any], list[dict[str, Any]], Any]:
        seen: list[dict[str, Any]] = []
        trainer = module["EpisodeTrainer"]("mlp", "CartPole-v1", **settings, **more)
        results = trainer.train(callback=lambda metrics: seen.append(metrics))
        alone = trainer.evaluate(num_episodes=3)
        trainer.close()
        return results, seen, alone

    results, seen, alone = trained(max_episodes=12, target_reward=475.0)
    assert (results["stop_reason"], results["converged"], results["converged_at_step"]) == ("max_episodes", False, None)
    assert [metrics["episode"] for metrics in seen] == list(range(1, results["episodes"] + 1))
    lengths = [metrics["step_metrics"]["episode_length"] for metrics in seen]
    assert [metrics["step_metrics"]["episode_reward"] for metrics in seen] == lengths  # a reward of 1 a step
    assert seen[-1]["step_metrics"]["avg_reward"] == pytest.approx(sum(lengths) / len(lengths))
    assert any(metrics["eval_metrics"] for metrics in seen)
    assert results["final_evaluation"]["episodes"] == 100
    assert 5.0 < results["best_avg_reward"] < 50.0
    assert alone.keys() == {"avg_reward", "std_reward", "min_reward", "max_reward"}

    results, seen, _ = trained(max_episodes=1000, target_reward=5.0)  # an episode of CartPole is longer than that
    assert (results["stop_reason"], results["converged"]) == ("converged", True)
    assert results["converged_at_step"] == results["history"]["timesteps"][-1]
    assert results["final_evaluation"]["episodes"] == 100, "also after an early stop"


def test_own_env_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES.parent))
    assert main(["check-env", "examples.own_env:make_env"]) == 0
    arguments = ["--env.kwargs", "{length: 4}", "--run.total-timesteps", "128", "--ppo.rollout-steps", "16", "--run.name", "corridor"]
    assert main(["train", "examples.own_env:make_env", *arguments, "--evaluation.final-episodes", "5"]) == 0
    assert "score:" in capsys.readouterr().out
    assert (tmp_path / "runs" / "corridor" / "policy.safetensors").exists()
    assert os.listdir(tmp_path / "runs") == ["corridor"]


def test_curiosity_finds_the_goal_that_plain_ppo_does_not() -> None:
    """The reduced form of benchmarks/curiosity.py: a shorter corridor and one seed."""
    main = runpy.run_path(str(EXAMPLES / "curiosity.py"))["main"]
    assert main(24_576, "rnd", 3, 12) == 1.0
    assert main(24_576, "off", 3, 12) == 0.0


@pytest.mark.usefixtures("_threads")
def test_a_transformer_remembers_and_its_ratios_are_1() -> None:
    from inchworm import PPOConfig, PPOTrainer
    from inchworm.worlds.toys import MemoryCorridor

    make = runpy.run_path(str(EXAMPLES / "transformer_policy.py"))["make_policy"]
    corridor = MemoryCorridor(length=4)  # the cue is in the window of 8 at the end; without memory half of the returns are 0
    policy = make(corridor.observation_space, corridor.action_space)
    config = PPOConfig(learning_rate=1e-3, rollout_steps=60, update_epochs=4, num_minibatches=4, sequence_length=20)
    with PPOTrainer(policy, lambda: MemoryCorridor(length=4), config, num_envs=8, seed=0, backend="torch") as trainer:
        history = trainer.train(total_timesteps=7_000)
    assert max(history["ratio_error"]) < 5e-5
    assert history["mean_reward"][-1] > 0.9


def test_demonstrations_help_and_skills_end_in_different_places() -> None:
    alone, helped = runpy.run_path(str(EXAMPLES / "demonstrations.py"))["main"](8_000)
    assert helped > 1.2 * alone
    places = runpy.run_path(str(EXAMPLES / "diversity.py"))["main"](8_000)
    assert min(np.linalg.norm(one - other) for one, other in itertools.combinations(places, 2)) > 0.7
