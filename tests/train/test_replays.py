"""`evaluation.save_replay`: a run keeps the first episode of its newest evaluations, and trains to the same bits."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from doubles.painted import Painted, images
from doubles.runs import finish, small_config
from inchworm.config.sections import EnvConfig, EvalConfig, TrainingConfig
from inchworm.core.errors import ConfigError
from inchworm.evaluate import video as module
from inchworm.train.trainer import PPOTrainer
from inchworm.worlds.replay import load_replay

PAINTED = EnvConfig(id="doubles.painted:Painted", num_envs=2, num_workers=0)
KEEP = EvalConfig(interval=1, episodes=2, final_episodes=2, num_envs=2, save_replay=True, keep_replays=3)
STEP = 16
"""Env steps of an iteration."""


def config(evaluation: EvalConfig = KEEP, env: EnvConfig = PAINTED, **run: Any) -> TrainingConfig:
    return small_config(iterations=5, evaluation=evaluation, backend="numpy", **run).replace(env=env)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "replays").iterdir())


def trainer(run: Path, given: TrainingConfig) -> PPOTrainer:
    return PPOTrainer(given.policy, given.env, given, run_dir=run)


def test_the_newest_are_kept_and_training_has_the_same_bits(tmp_path: Path) -> None:
    with trainer(tmp_path / "kept", config()) as one:
        one.train()
        stats = one.evaluate(2)
        kept = one.full_state()["weights"]
    assert names(tmp_path / "kept") == [f"step-{n * STEP:012d}.mp4" for n in (3, 4, 5)]
    assert len(images(tmp_path / "kept" / "replays" / f"step-{5 * STEP:012d}.mp4")) == stats.lengths[0] + 1
    with trainer(tmp_path / "plain", config(KEEP.replace(save_replay=False))) as other:
        other.train()
        plain = other.full_state()["weights"]
    assert not (tmp_path / "plain" / "replays").exists()
    assert all(np.array_equal(kept[name], plain[name]) for name in plain)
    rows = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("kept", "plain")]
    assert rows[0] == rows[1]


def test_a_resumed_run_records_no_episode_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    whole = finish(trainer(run, config(checkpoint_interval=2)))
    newest = max((run / "checkpoints").iterdir())
    shutil.rmtree(newest)  # back to an earlier one: the evaluations after it are made again
    before = {path.name: path.stat().st_mtime_ns for path in (run / "replays").iterdir()}
    drawn: list[Path] = []
    save = module.save_video
    monkeypatch.setattr(module, "save_video", lambda path, *rest: (drawn.append(path), save(path, *rest)))
    assert finish(trainer(run, config(checkpoint_interval=2)), resume=True)["weights"] == whole["weights"]
    assert drawn == []
    assert {path.name: path.stat().st_mtime_ns for path in (run / "replays").iterdir()} == before
    (run / "replays" / ".tmp-step-killed.mp4").write_bytes(b"half")  # of a kill: the next process with the lock removes it
    longer = config(checkpoint_interval=2, total_timesteps=6 * STEP)
    finish(trainer(run, longer), resume=True)
    assert drawn == [run / "replays" / f"step-{6 * STEP:012d}.mp4"]
    assert names(run) == [f"step-{n * STEP:012d}.mp4" for n in (4, 5, 6)]


def test_a_game_is_kept_as_a_replay_with_the_names_of_the_players(tmp_path: Path) -> None:
    world = EnvConfig(id="Skirmish-v0", kwargs={"units": ["scout"], "wall_pairs": 0, "max_steps": 6}, num_envs=2)
    given = config(KEEP.replace(interval=0), world)
    given = given.replace(opponent=given.opponent.replace(mode="heuristic"))
    with trainer(tmp_path / "run", given) as made:
        made.train()
        (file,) = (tmp_path / "run" / "replays").iterdir()
        assert file.name == f"step-{made.total_timesteps:012d}.json"
    replay = load_replay(file)
    assert replay["meta"]["players"] == ["policy", "heuristic"]
    assert len(replay["frames"]) == replay["meta"]["steps"] + 1


def test_a_factory_in_python_is_asked_to_draw(tmp_path: Path) -> None:
    given = config(KEEP.replace(interval=0), PAINTED.replace(max_episode_steps=2))
    with PPOTrainer(given.policy, Painted, given, run_dir=tmp_path / "run") as made:
        made.train()
        lengths = made.evaluate(2).lengths.tolist()
    assert max(lengths) == 2
    assert [len(images(tmp_path / "run" / "replays" / name)) for name in names(tmp_path / "run")] == [lengths[0] + 1]


def test_a_failure_costs_the_replay_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_video", fail)
    with trainer(tmp_path / "run", config(KEEP.replace(interval=0))) as made:
        with pytest.warns(UserWarning, match="the replay of the evaluation after iteration 5 is missing: .*No space left"):
            made.train()
        assert made.failures == []
        assert made.state.best_score is not None


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (EnvConfig(id="doubles.painted:Blind", num_envs=2), "doubles.painted:Blind cannot be recorded"),
        (PAINTED, "evaluation.save_replay=true writes into the run's directory, and there is none; pass run_dir"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_training(tmp_path: Path, env: EnvConfig, message: str) -> None:
    given = config(env=env)
    with pytest.raises(ConfigError, match=message):
        PPOTrainer(given.policy, env, given, run_dir=None if env is PAINTED else tmp_path / "run")
