"""What a config leaves open is chosen once, said, written down, and kept by whoever goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from inchworm import PPOTrainer, TrainingConfig
from inchworm.env.workers.auto import WorkerChoice
from inchworm.run.directory import keep_choices
from inchworm.train import resolve as choices
from inchworm.train.resolve import settle

OPEN = {"env": {"num_workers": "auto", "num_envs": 4}, "ppo": {"compile": "auto"}}


def small(**run: object) -> dict[str, object]:
    return {
        "ppo": {"rollout_steps": 8, "update_epochs": 1, "num_minibatches": 1, "compile": "auto"},
        "env": {"num_envs": 2, "num_workers": "auto"},
        "evaluation": {"interval": 0, "final_episodes": 0},
        "run": {"total_timesteps": 32, **run},
    }


def test_nothing_is_left_open_and_each_choice_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "choose_num_workers", lambda _: WorkerChoice(3, "3 workers: because", help_workers=True))
    config, reasons = settle(TrainingConfig.from_dict(OPEN))
    assert (config.env.num_workers, config.env.help_workers) == (3, True)
    assert config.ppo.compile == "off"  # 100,000 steps do not repay it
    assert reasons[0] == "3 workers: because"
    assert reasons[1].startswith("ppo.compile=off, because ")
    assert settle(config) == (config, [])
    long = TrainingConfig.from_dict(OPEN | {"run": {"total_timesteps": 100_000_000}})
    assert settle(long)[0].ppo.compile == "on"
    assert settle(long, builtin=False)[0].ppo.compile == "off"


def test_a_run_that_goes_on_keeps_its_choices() -> None:
    before = TrainingConfig.from_dict({"env": {"num_workers": 2, "help_workers": True}, "ppo": {"compile": "on"}})
    now = TrainingConfig.from_dict(OPEN | {"run": {"total_timesteps": 7}})
    kept = keep_choices(before, now)
    assert kept.env.help_workers
    assert (kept.env.num_workers, kept.ppo.compile, kept.run.total_timesteps, kept.env.num_envs) == (2, "on", 7, 4)
    fixed = TrainingConfig.from_dict({"env": {"num_workers": 1}, "ppo": {"compile": "off"}})
    assert keep_choices(before, fixed) == fixed


def test_a_trainer_settles_and_a_resumed_one_does_as_the_run_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainingConfig.from_dict(small())
    with PPOTrainer("mlp", "CartPole-v1", config, run_dir=tmp_path) as trainer:
        assert (trainer.config.env.num_workers, trainer.config.ppo.compile) == (0, "off")
        assert len(trainer.choices) == 2
        trainer.train()
    longer = config.replace(run=config.run.replace(total_timesteps=10**9))  # which by itself would be compiled
    with PPOTrainer("mlp", "CartPole-v1", longer, run_dir=tmp_path) as trainer:
        assert trainer.config.ppo.compile == "on"
        trainer.load_checkpoint()
        assert trainer.config.ppo.compile == "off"
        trainer.train(total_timesteps=64)
        assert trainer.total_timesteps == 64


def test_the_runs_own_config_says_what_was_chosen(cli_run: Path) -> None:
    saved = yaml.safe_load((cli_run / "config.yaml").read_text())
    assert saved["env"]["num_workers"] == 0
    assert saved["ppo"]["compile"] == "off"


@pytest.fixture
def cli_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    from inchworm.cli.main import main

    monkeypatch.chdir(tmp_path)
    flags = ["--compile", "auto", "--backend", "numpy", "--total-timesteps", "256", "--run.name", "x", "--profile"]
    assert main(["train", "CartPole-v1", *flags]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "training CartPole-v1 for 256 steps, seed 0, run runs/x"
    assert lines[1] == "no worker processes: all 8 copies of CartPole-v1 are stepped together"
    assert lines[2] == "ppo.compile=off, because run.backend=numpy has nothing to compile"
    assert lines[3] == "rollout: 8 envs x 64 steps (18.6 kB), backend: numpy"
    assert "where the time went" in out
    assert main(["train", "CartPole-v1", *flags]) == 0  # auto again, on a run that exists: it keeps what it chose
    return tmp_path / "runs" / "x"
