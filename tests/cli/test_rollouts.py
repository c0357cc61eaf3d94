"""The two motions from the command line: a rollout goes from one command to the other in a file."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from inchworm.policy.file import fingerprint
from inchworm.rollout.fake import create_fake_rollout
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


@pytest.mark.filterwarnings("ignore:no info of the first")
def test_collect_keeps_infos_and_inspect_shows_the_columns(cli: Any, run: Path, tmp_path: Path) -> None:
    result = cli("collect", "small", "--out", "r.st", "--steps", 20, "--keep-infos", "speed", "height")
    assert result.code == 0, result.err
    extras = Rollout.load(tmp_path / "r.st").extras
    assert sorted(extras) == ["info/height", "info/speed"]  # CartPole's infos are empty
    lines = dict(line.split(":", 1) for line in cli("inspect", "r.st").out.splitlines())
    assert lines["extras"].strip() == "info/height float32[], info/speed float32[]"
    result = cli(
        "train", "CartPole-v1", "--collect.keep-infos", "speed", "--total-timesteps", 64, "--ppo.rollout-steps", 16, "--run.name", "kept"
    )
    assert result.code == 0, result.err
    assert open_run("kept").config.collect.keep_infos == ("speed",)
    cli("collect", "kept", "--out", "s.st", "--steps", 4)
    assert list(Rollout.load(tmp_path / "s.st").extras) == ["info/speed"]


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


def test_several_rollouts_in_a_directory(cli: Any, run: Path, tmp_path: Path) -> None:
    result = cli("collect", "small", "--out", "many", "--rollouts", 3, "--steps", 20)
    assert result.code == 0, result.err
    assert "rollout: many (3 rollouts, 120 steps" in result.out
    files = sorted((tmp_path / "many").iterdir())
    assert [file.name for file in files] == [f"rollout_000{index}.safetensors" for index in range(3)]
    one, two = (Rollout.load(file) for file in files[:2])
    assert not np.array_equal(one.observations, two.observations)
    assert np.array_equal(one.next_observations[-1, ~one.dones[-1]], two.observations[0, ~one.dones[-1]])  # one after another
    learned = cli("learn", "small", "many")
    assert [line.partition(":")[0] for line in learned.out.splitlines()[:3]] == [f"many/{file.name}" for file in files]


def test_inspect_says_what_is_in_a_file_and_how_old_it_is(cli: Any, run: Path, tmp_path: Path) -> None:
    cli("collect", "small", "--out", "r.st", "--steps", 50, "--num-envs", 3)
    result = cli("inspect", "r.st", "--policy", "small")
    assert result.code == 0, result.err
    lines = dict(line.split(":", 1) for line in result.out.splitlines())
    assert lines["rollout"].strip().startswith("r.st (")
    assert "checksum verified" in lines["rollout"]
    assert lines["size"].strip() == "50 steps x 3 lanes, 150 of 150 rows valid"
    assert lines["observations"].strip() == "float32[4]"
    assert lines["actions"].strip() == "int64[]"
    assert "finished, mean length" in lines["episodes"]
    assert lines["staleness"].strip() == "0: collected with these weights"
    assert lines["sample size"].strip() == "100.0% of the rows are effective"
    rollout = Rollout.load(tmp_path / "r.st")
    shown = [float(word) for word in lines["returns"].replace(",", "").split() if word[0].isdigit()]
    returns = [episode.episode_return for episode in rollout.episodes]
    assert shown == pytest.approx([np.mean(returns), min(returns), max(returns)], rel=1e-3)
    cli("learn", "small", "r.st", "--epochs", 20, "--learning-rate", 0.01)
    result = cli("inspect", "r.st", "--policy", "small")
    lines = dict(line.split(":", 1) for line in result.out.splitlines())
    assert lines["staleness"].strip() == "1 update, if both are of one run"
    assert float(lines["sample size"].strip().partition("%")[0]) < 100
    assert float(lines["behavior KL"]) > 0
    rollout.save(tmp_path / "many" / "sharded", shard_bytes=1)
    rollout.save(tmp_path / "many" / "whole.safetensors")
    result = cli("inspect", "many")
    assert result.out.count("rollout:") == 2
    assert "many/sharded (3 shards, " in result.out
    assert "staleness" not in result.out


def test_a_wrong_file_among_good_ones_leaves_the_run_as_it_is(cli: Any, refused: Any, run: Path, tmp_path: Path) -> None:
    cli("collect", "small", "--out", "good.st")
    good = Rollout.load(tmp_path / "good.st")
    replace(good, actions=np.full_like(good.actions, 7)).save(tmp_path / "action.st")
    replace(good, rewards=np.full_like(good.rewards, np.nan)).save(tmp_path / "nan.st")
    (tmp_path / "short.st").write_bytes((tmp_path / "good.st").read_bytes()[:-9])
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for wrong, message in (("action.st", "7 at (t=0, b=0)"), ("nan.st", "not finite"), ("short.st", "damaged")):
        result = refused(message, "learn", "small", "good.st", wrong, code=1)
        assert wrong in result.err
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    refused("nan.st does not fit the policy small: rewards", "inspect", "nan.st", "--policy", "small", code=1)


@pytest.mark.parametrize("content", [None, b"damaged"])
def test_learn_writes_a_lost_policy_file_again(cli: Any, run: Path, content: bytes | None) -> None:
    cli("collect", "small", "--out", "good.st")
    file = run / "policy.safetensors"
    file.unlink() if content is None else file.write_bytes(content)
    assert cli("learn", "small", "good.st", "--quiet").code == 0
    assert load_policy(file).policy_version == 5  # 4 iterations, and this update


def test_guards_can_be_given_where_one_learns(cli: Any, refused: Any, run: Path) -> None:
    for name in ("first.st", "second.st"):
        cli("collect", "small", "--out", name)
    refused("more than ppo.max_staleness=0", "learn", "small", "first.st", "second.st", "--max-staleness", 0, "--quiet", code=1)
    weights = fingerprint(load_policy(run).get_weights())
    cli("learn", "small", "first.st", "--epochs", 20, "--learning-rate", 0.01, "--quiet")
    moved = fingerprint(load_policy(run).get_weights())
    assert moved != weights
    for guard in (["--min-effective-sample-size", 0.9999], ["--max-behavior-kl", 1e-6]):
        result = cli("learn", "small", "second.st", *guard, "--quiet")
        assert (result.code, "no steps were taken" in result.err) == (0, True)
        assert fingerprint(load_policy(run).get_weights()) == moved


def test_a_rollout_beyond_the_memory_is_refused(cli: Any, refused: Any, run: Path, tmp_path: Path) -> None:
    refused("of memory are free; use fewer --steps", "collect", "small", "--out", "r.st", "--steps", 10**12, "--quiet", code=2)
    assert not (tmp_path / "r.st").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["collect", "small", "--out", "full", "--rollouts", "2"], "full already holds rollouts; choose a new directory"),
        (["collect", "small", "--out", "x", "--rollouts", "0"], "the number of rollouts must be 1 or more"),
        (["learn", "small", "empty"], "empty holds no rollouts"),
        (["inspect"], "no rollout is given"),
        (["inspect", "nowhere.st"], "cannot read the rollout nowhere.st"),
        (["inspect", "full/one.safetensors", "--policy", "nobody"], "--policy nobody: there is no nobody"),
        (["collect", "small"], "add --out rollout.safetensors"),
        (["collect", "--out", "x"], "no run is given"),
        (["collect", "small", "--out", "x", "--steps", "0"], "collect needs 1 step or more"),
        (["collect", "small", "--out", "x", "--num-envs", "0"], "env.num_envs=0 must be 1 or more"),
        (["learn", "small"], "no rollout is given; inchworm collect small --out FILE makes one"),
        (["learn", "small", "nowhere.st"], "nowhere.st"),
        (["learn", "small", "x", "--epochs", "0"], "ppo.update_epochs=0 must be 1 or more"),
        (["learn"], "no run is given"),
        (["collect", "small", "--out", "file/r.st"], "cannot write --out file/r.st"),
        (["collect", "small", "--out", "x", "--env", "Acrobot-v1"], "is of CartPole-v1, which --env can only repeat"),
        (["learn", "small", "full", "--env", "my_world:make_env"], "my_world:make_env is another environment"),
        (["collect", "small", "--out", "file"], "--out file exists and is not a rollout"),
        (["collect", "small", "--out", "full"], "--out full is a directory; name a file in it"),
        (["learn", "small", "full", "--max-staleness", "-1"], "ppo.max_staleness=-1 must be 0 or more"),
    ],
)
def test_wrong_use_is_one_line(refused: Any, run: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    create_fake_rollout(spaces.Box(-1, 1), spaces.Discrete(2), 2, 2).save(tmp_path / "full" / "one.safetensors")
    refused(message, *arguments)
    refused("does not fit the policy small: observations", "inspect", "full", "--policy", "small", code=1)
    refused("file", "inspect", "file", code=1)
    refused("policy.safetensors", "learn", "small", run / "policy.safetensors", code=1)
