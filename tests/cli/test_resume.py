import shutil
from pathlib import Path
from typing import Any

import pytest

from inchworm.config import TrainingConfig
from inchworm.run import open_run
from inchworm.tracking.jsonl import read_rows


def test_a_longer_run_equals_one_that_was_meant_to_be_that_long(cli: Any, small: list[str], run: Path, tmp_path: Path) -> None:
    # constant schedules: a linear one would have fallen faster in the shorter run
    flags = [*small, "--ppo.learning-rate-schedule=constant", "--ppo.clip-schedule=constant", "--evaluation.final-episodes=0", "--quiet"]
    assert cli("train", "CartPole-v1", *flags, "--run.name=whole", "--run.total-timesteps=512").code == 0
    assert cli("train", "CartPole-v1", *flags, "--run.name=parts").code == 0
    result = cli("resume", "parts", "--total-timesteps", 512)
    assert result.code == 0, result.err
    assert "going on from 256 of 512 steps" in result.out
    for name in ("metrics.jsonl", "policy.safetensors"):
        assert (tmp_path / "runs" / "parts" / name).read_bytes() == (tmp_path / "runs" / "whole" / name).read_bytes()
    assert open_run("parts").config.run.total_timesteps == 512


def test_a_run_killed_before_its_first_checkpoint_begins_again(cli: Any, run: Path, trained: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    assert cli("resume", "small", "--quiet").code == 0
    assert (run / "metrics.jsonl").read_bytes() == (trained / "metrics.jsonl").read_bytes()


def test_a_finished_run_says_how_to_go_on(cli: Any, run: Path) -> None:
    result = cli("resume", "small")
    assert result.code == 0
    assert result.out.endswith("inchworm resume small --total-timesteps 512\n")


def test_flags_that_do_not_touch_the_past_are_taken(cli: Any, run: Path) -> None:
    assert cli("resume", "small", "--run.max-iterations=5", "--total-timesteps=1000", "--run.keep-checkpoints=3", "--quiet").code == 0
    assert TrainingConfig.from_yaml(run / "config.yaml").run.keep_checkpoints == 3
    assert [row["iteration"] for row in read_rows(run / "metrics.jsonl")][-2:] == [5, 5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no run is given"),
        (["nope"], "there is no run nope"),
        (["small", "--ppo.gamma", "0.5"], "ppo.gamma: 0.98 → 0.5"),
        (["small", "--env.id", "Acrobot-v1"], "env.id: CartPole-v1 → Acrobot-v1"),
        (["small", "--total-timesteps", "0"], "run.total_timesteps=0 must be 1 or more"),
    ],
)
def test_wrong_use_is_one_line_and_changes_nothing(cli: Any, run: Path, arguments: list[str], message: str) -> None:
    before = (run / "config.yaml").read_bytes()
    result = cli("resume", *arguments)
    assert result.code == 2
    assert message in result.err
    assert len(result.err.splitlines()) == 1
    assert (run / "config.yaml").read_bytes() == before


def test_a_run_in_use_is_refused(cli: Any, run: Path) -> None:
    with open_run(run) as holder:
        holder.lock()
        result = cli("resume", "small", "--total-timesteps", 1000)
    assert result.code == 1
    assert "is in use by process" in result.err


def test_help_lists_all_flags(cli: Any) -> None:
    result = cli("resume", "--help")
    assert result.code == 0
    assert "--total-timesteps" in result.out
    assert "--run.keep-checkpoints" in result.out
