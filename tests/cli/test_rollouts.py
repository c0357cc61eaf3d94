"""The two motions from the command line: a rollout goes from one command to the other in a file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inchworm.rollout.rollout import Rollout
from inchworm.run.directory import open_run
from inchworm.run.policies import load_policy
from inchworm.tracking.jsonl import read_rows


def test_collect_writes_a_rollout_of_the_runs_policy(cli: Any, run: Path, tmp_path: Path) -> None:
    result = cli("collect", "small", "--out", "r.st", "--steps", 50, "--num-envs", 3)
    assert result.code == 0, result.err
    assert "rollout: r.st (150 steps, finished episodes: " in result.out
    assert result.out.endswith("next:    inchworm learn small r.st\n")
    rollout = Rollout.load(tmp_path / "r.st")
    assert (rollout.num_steps, rollout.num_lanes) == (50, 3)
    assert rollout.policy_version.tolist() == [load_policy(run / "policy.safetensors").policy_version] * 3


def test_the_same_seed_collects_the_same_rollout(cli: Any, run: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert cli("collect", "small", "--out", name, "--seed", seed, "--quiet").out == ""
    a, b, c = (Rollout.load(tmp_path / name) for name in "abc")
    assert np.array_equal(a.observations, b.observations)
    assert not np.array_equal(a.observations, c.observations)
    assert a.num_steps == open_run("small").config.ppo.rollout_steps


def test_learn_moves_the_policy_once_per_file_and_saves_it(cli: Any, run: Path) -> None:
    before = load_policy(run / "policy.safetensors").get_weights()
    cli("collect", "small", "--out", "a.st")
    cli("collect", "small", "--out", "b.st", "--seed", 5)
    result = cli("learn", "small", "a.st", "b.st", "--epochs", 2)
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0].startswith("a.st: loss ")
    assert lines[1].startswith("b.st: loss ")
    after = load_policy(run / "policy.safetensors").get_weights()
    assert int(after["policy_version"]) == int(before["policy_version"]) + 2
    assert not np.array_equal(after["actor.head.weight"], before["actor.head.weight"])
    assert [row["iteration"] for row in read_rows(run / "metrics.jsonl")][-2:] == [5, 6]
    assert open_run("small").config.ppo.update_epochs == 1  # --epochs was for this time only
    # the run continues from there
    assert cli("resume", "small", "--total-timesteps", 320, "--evaluation.final-episodes", 0, "--quiet").code == 0
    assert [row["iteration"] for row in read_rows(run / "metrics.jsonl")][-1] == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["collect", "small"], "add --out rollout.safetensors"),
        (["collect", "--out", "x"], "no run is given"),
        (["collect", "small", "--out", "x", "--steps", "0"], "collect needs 1 step or more"),
        (["collect", "small", "--out", "x", "--num-envs", "0"], "env.num_envs=0 must be 1 or more"),
        (["learn", "small"], "no rollout is given; inchworm collect small --out FILE makes one"),
        (["learn", "small", "nowhere.st"], "nowhere.st"),
        (["learn", "small", "x", "--epochs", "0"], "ppo.update_epochs=0 must be 1 or more"),
        (["learn"], "no run is given"),
        (["collect", "small", "--out", "file/r.st"], "cannot write --out file/r.st"),
    ],
)
def test_wrong_use_is_one_line(refused: Any, run: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "file").touch()
    refused(message, *arguments)
    refused("policy.safetensors", "learn", "small", run / "policy.safetensors", code=1)
