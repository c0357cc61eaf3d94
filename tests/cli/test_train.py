import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from inchworm.config.sections import TrainingConfig
from inchworm.env.vector_env import LaneVectorEnv
from inchworm.evaluate.evaluator import PolicyEvaluator
from inchworm.tracking.jsonl import read_rows

WORLD = """
import gymnasium as gym

def make_env(**kwargs):
    return gym.make("CartPole-v1", **kwargs)
"""


def only_run(directory: Path) -> Path:
    (path,) = (directory / "runs").iterdir()
    return path


def test_train_ends_with_the_score_the_run_and_what_to_type_next(cli: Any, small: list[str], tmp_path: Path) -> None:
    result = cli("train", "CartPole-v1", *small)
    assert (result.code, result.err) == (0, "")
    path = only_run(tmp_path)
    lines = result.out.splitlines()
    assert lines[0] == f"training CartPole-v1 for 256 steps, seed 0, run runs/{path.name}"
    assert lines[-4].startswith("score: ")
    assert lines[-4].endswith("mean return over 3 episodes (95 % interval)")
    assert lines[-3].startswith(f"run:   runs/{path.name} (policy.safetensors, best_policy.safetensors, ")
    assert lines[-2] == f"next:  inchworm evaluate {path.name} --episodes 100"
    assert lines[-1] == f"       inchworm resume {path.name} --total-timesteps 512"
    assert any("256/256 steps 100%" in line for line in lines)


def test_a_run_has_all_its_files(trained: Path) -> None:
    names = {path.name for path in trained.iterdir()}
    assert names >= {"config.yaml", "versions.json", "metrics.jsonl", "timing.jsonl", "checkpoints", "policy.safetensors"}
    config = TrainingConfig.from_yaml(trained / "config.yaml")
    assert (config.env.num_envs, config.ppo.rollout_steps, config.run.total_timesteps) == (2, 32, 256)
    rows = read_rows(trained / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 4]  # the last row is the final evaluation
    assert [row["env_steps"] for row in rows] == [64, 128, 192, 256, 256]
    assert rows[-1]["evaluation/episodes"] == 3.0
    assert not any(name.startswith(("timing/", "seconds")) for row in rows for name in row)
    assert all(row["steps_per_second"] > 0 for row in read_rows(trained / "timing.jsonl"))


def test_equal_runs_have_equal_metrics_and_policies(cli: Any, small: list[str], trained: Path, tmp_path: Path) -> None:
    assert cli("train", "CartPole-v1", *small, "--quiet").out == ""
    path = only_run(tmp_path)
    for name in ("metrics.jsonl", "policy.safetensors"):
        assert (path / name).read_bytes() == (trained / name).read_bytes()


def test_a_given_name_that_is_finished_says_how_to_go_on(cli: Any, small: list[str], run: Path) -> None:
    result = cli("train", "CartPole-v1", *small, "--run.name", "small")
    assert result.code == 0
    assert "has reached its target (256 steps in 4 iterations)" in result.out
    assert result.out.endswith("inchworm resume small --total-timesteps 512\n")
    other = cli("train", "CartPole-v1", *small, "--run.name", "small", "--ppo.gamma", "0.5")
    assert other.code == 2
    assert "ppo.gamma: 0.98 → 0.5" in other.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["CartPol-v1"], "did you mean CartPole-v1?"),
        (["no_such_module:make"], "there is no module no_such_module"),
        (["CartPole-v1", "--env.kwargs", "{gravitty: 5}"], "gravitty"),
        (["CartPole-v1", "--ppo.minibatch-size", "100000"], "larger than the rollout"),
        (["CartPole-v1", "--run.name", "../x"], "is not a valid name"),
    ],
)
def test_wrong_use_is_one_line_and_leaves_nothing_behind(cli: Any, tmp_path: Path, arguments: list[str], message: str) -> None:
    result = cli("train", *arguments)
    assert result.code == 2
    assert message in result.err
    assert len(result.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_factory_of_ones_own_is_typed_and_typed_again(
    cli: Any, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_world.py").write_text(WORLD)
    result = cli("train", "my_world:make_env", *small, "--run.name=mine")
    assert result.code == 0, result.err
    assert "inchworm evaluate mine --env my_world:make_env" in result.out
    refused = cli("evaluate", "mine")
    assert refused.code == 2
    assert "type: --env my_world:make_env" in refused.err
    assert cli("evaluate", "mine", "--env", "my_world:make_env", "--episodes", 2).code == 0
    assert cli("resume", "mine", "--env", "my_world:make_env", "--total-timesteps", 320, "--quiet").code == 0
    assert cli("collect", "mine", "--env", "my_world:make_env", "--out", "r.st").code == 0


def test_a_failed_evaluation_does_not_stop_training_and_makes_the_exit_code_3(
    cli: Any, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("the scoring world ended")

    monkeypatch.setattr(PolicyEvaluator, "evaluate", fails)
    result = cli("train", "CartPole-v1", *small)
    assert result.code == 3
    assert "the scoring world ended" in result.err
    assert "score: unknown, the last evaluation failed" in result.out
    assert len(list((only_run(tmp_path) / "checkpoints").iterdir())) == 2


def test_without_evaluation_there_is_no_score(cli: Any, small: list[str]) -> None:
    result = cli("train", "CartPole-v1", *small, "--evaluation.interval=0", "--evaluation.final-episodes=0")
    assert result.code == 0
    assert "score: no evaluation was requested" in result.out


def test_legacy_names_in_a_file_are_reported_in_one_line_each(cli: Any, small: list[str], tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("env: {id: CartPole-v1}\nppo: {lr: 0.001, clip_range: 0.1}\n")
    result = cli("config", "--config", "old.yaml")
    assert result.code == 0
    assert result.err.splitlines() == [
        "warning: ppo.lr is called ppo.learning_rate here; accepted",
        "warning: ppo.clip_range is called ppo.clip_coef here; accepted",
    ]


def wait_for_rows(process: subprocess.Popen[str], tmp_path: Path, more: int) -> None:
    path = tmp_path / "runs" / "long" / "metrics.jsonl"
    target, deadline = len(read_rows(path)) + more, time.monotonic() + 90
    while len(read_rows(path)) < target:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def begin(tmp_path: Path, *flags: str, **options: Any) -> subprocess.Popen[str]:
    """A long run in a process of its own, past its first iterations."""
    arguments = ["train", "CartPole-v1", "--run.name=long", "--run.total-timesteps=100000000", "--ppo.rollout-steps=128", *flags]
    process = subprocess.Popen(
        [sys.executable, "-m", "inchworm", *arguments],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        **{"stdout": subprocess.PIPE, **options},
    )
    wait_for_rows(process, tmp_path, 3)
    return process


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_saves_its_last_iteration_and_goes_on(tmp_path: Path, number: signal.Signals, code: int, cli: Any) -> None:
    process = begin(tmp_path)
    began = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert time.monotonic() - began < 10
    assert (process.returncode, err) == (code, "")
    assert out.splitlines()[-1] == "  inchworm resume long"
    done = read_rows(tmp_path / "runs" / "long" / "metrics.jsonl")[-1]["iteration"]
    result = cli("resume", "long", "--run.max-iterations", done + 1, "--evaluation.final-episodes", 0)
    assert result.code == 0, result.err
    assert [row["iteration"] for row in read_rows(tmp_path / "runs" / "long" / "metrics.jsonl")] == list(range(1, done + 2))


@pytest.mark.slow
def test_a_run_goes_on_when_nobody_reads_its_output_any_more(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    process = begin(tmp_path, "--evaluation.interval=1", "--evaluation.episodes=1", stdout=writing)  # each evaluation prints a line
    os.close(writing)
    os.close(reading)
    wait_for_rows(process, tmp_path, 4)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")


@pytest.mark.parametrize("pipe", ["| head -1", ">&-", "| head -1 2>&-"])
def test_a_run_whose_output_nobody_reads_is_trained_to_its_end(tmp_path: Path, small: list[str], pipe: str) -> None:
    command = f"{sys.executable} -m inchworm train CartPole-v1 {' '.join(small)} --run.name=x --backend=numpy"
    done = subprocess.run(
        ["bash", "-c", f"{command} {pipe}; exit ${{PIPESTATUS[0]}}"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(read_rows(tmp_path / "runs" / "x" / "metrics.jsonl")) == 5


def test_a_warning_that_nobody_can_read_ends_nothing(cli: Any, small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def write(self, text: str) -> int:
            raise BrokenPipeError

        def flush(self) -> None: ...

    monkeypatch.setattr(sys, "stderr", Broken())
    monkeypatch.setattr(LaneVectorEnv, "inexact", property(lambda self: ["it has a clock"]))
    assert cli("train", "CartPole-v1", *small, "--run.name=x").code == 0


def test_the_first_line_waits_for_nothing_heavy(tmp_path: Path) -> None:
    """When the first line is printed, neither torch nor anything that trains has been imported."""
    script = """
import sys
from inchworm.cli import train
from inchworm.cli.main import main

def first_line(run, *, quiet):
    print(sorted(name for name in ("torch", "inchworm.train.trainer", "inchworm.collect.collector") if name in sys.modules))
    raise SystemExit(0)

train.open_terminal = first_line
main(["train", "CartPole-v1", "--backend", "torch"])
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "[]"
