import shutil
from pathlib import Path
from typing import Any

import pytest

from inchworm.config.sections import TrainingConfig
from inchworm.env.vector_env import LaneVectorEnv
from inchworm.evaluate.evaluator import PolicyEvaluator
from inchworm.run import checkpoint as checkpoint_module
from inchworm.run.directory import open_run
from inchworm.tracking.jsonl import read_rows


def test_a_longer_run_equals_one_that_was_meant_to_be_that_long(cli: Any, small: list[str], run: Path, tmp_path: Path) -> None:
    # constant schedules: a linear one would have fallen faster in the shorter run
    flags = [*small, "--ppo.learning-rate-schedule=constant", "--ppo.clip-schedule=constant", "--evaluation.final-episodes=0", "--quiet"]
    assert cli("train", "CartPole-v1", *flags, "--run.name=whole", "--run.total-timesteps=512").code == 0
    assert cli("train", "CartPole-v1", *flags, "--run.name=parts").code == 0
    result = cli("resume", "parts", "--total-timesteps", 512)
    assert result.code == 0, result.err
    assert "resuming at 256 steps of 512" in result.out
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


def test_where_every_checkpoint_is_damaged_nothing_begins_again(cli: Any, small: list[str], run: Path) -> None:
    for state in run.glob("checkpoints/step-*/state.json"):
        state.write_text("{}")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"}
    for arguments in (["resume", "small", "--total-timesteps", 512], ["train", "CartPole-v1", *small, "--run.name=small"]):
        result = cli(*arguments)
        assert result.code != 0
        assert "every checkpoint is damaged" in result.err
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"}
    assert {path.name for path in before if after.get(path) != before[path]} <= {"config.yaml"}  # the new target
    assert after.keys() == before.keys()


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


def test_a_run_killed_in_its_last_evaluation_only_takes_that(
    cli: Any, small: list[str], trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PolicyEvaluator, "evaluate", killed)
        assert cli("train", "CartPole-v1", *small, "--run.name=cut").code == 130
    path = tmp_path / "runs" / "cut"
    assert [row["iteration"] for row in read_rows(path / "metrics.jsonl")] == [1, 2, 3, 4]
    result = cli("resume", "cut")
    assert result.code == 0, result.err
    assert "all 256 steps are done; running the last evaluation" in result.out
    assert "mean return over 3 episodes" in result.out
    for name in ("metrics.jsonl", "policy.safetensors", "best_policy.safetensors"):
        assert (path / name).read_bytes() == (trained / name).read_bytes()
    again = cli("resume", "cut")
    assert "has reached its target" in again.out
    assert (path / "metrics.jsonl").read_bytes() == (trained / "metrics.jsonl").read_bytes()


def test_checkpoints_that_have_gone_are_told(cli: Any, run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    result = cli("resume", "small", "--quiet")
    assert result.code == 0
    assert result.err == ("warning: runs/small has rows up to iteration 4 but no checkpoint (its checkpoints are gone); starting over\n")


def spoil(run: Path) -> None:
    for path in (run / "checkpoints").iterdir():
        (path / "state.json").write_bytes(b"{}")


def replace_by_file(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").touch()


def replace_by_link(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").symlink_to("gone")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (spoil, "every checkpoint is damaged"),
        (replace_by_file, "cannot be read"),
        (replace_by_link, "is a link, and nothing is written through one"),
    ],
)
@pytest.mark.parametrize("command", ["resume", "train"])
def test_checkpoints_that_cannot_be_read_stop_everything(
    cli: Any, small: list[str], run: Path, harm: Any, message: str, command: str
) -> None:
    harm(run)
    rows = (run / "metrics.jsonl").read_bytes()
    arguments = (
        ["resume", "small", "--total-timesteps=512"] if command == "resume" else ["train", "CartPole-v1", *small, "--run.name=small"]
    )
    result = cli(*arguments)
    assert result.code == 1
    assert message in result.err
    assert "Traceback" not in result.err
    assert (run / "metrics.jsonl").read_bytes() == rows


def test_a_last_save_that_fails_is_one_line_and_no_success(
    cli: Any, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "write_tensor_file", full)
        result = cli("train", "CartPole-v1", *small, "--run.name=full")
    assert result.code == 1
    told = result.err.splitlines()
    assert len(told) == 2
    assert told[0].startswith("warning: a save failed: [Errno 28] No space left on device while saving the checkpoint of iteration 2")
    assert told[1].startswith("inchworm: the last save of the run failed; earlier checkpoints are intact.")
    assert "step-000000000004" in told[1]
    assert list((tmp_path / "runs" / "full" / "checkpoints").iterdir()) == []
    assert cli("resume", "full", "--quiet").code == 0


def test_what_is_not_exact_is_said_once(cli: Any, small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LaneVectorEnv, "inexact", property(lambda self: ["it has a clock"]))
    for arguments in (["train", "CartPole-v1", *small, "--run.name=clock"], ["resume", "clock", "--total-timesteps=512"]):
        result = cli(*arguments)
        assert result.code == 0
        assert result.err.count("it has a clock") == 1
