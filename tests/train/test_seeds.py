"""Many seeds: each is the run that it would be alone, whatever happens to the others."""

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from doubles.runs import BATCH, small_config
from doubles.seeds import train_here
from inchworm.config.sections import EnvConfig, EvalConfig, PPOConfig, TrainingConfig
from inchworm.core.errors import ConfigError
from inchworm.core.types import SeedEvent
from inchworm.run.bundle import Bundle, create_bundle
from inchworm.run.directory import CONFIG
from inchworm.train import seed_trainers
from inchworm.train.seed_trainers import ProcessTrainer, default_jobs, follow_parent
from inchworm.train.seeds import SeedScore, SeedsSummary, train_bundle, train_seeds
from inchworm.train.trainer import PPOTrainer

EVALUATED = EvalConfig(interval=0, final_episodes=2, num_envs=2)


def config_of(iterations: int = 4, **run: Any) -> TrainingConfig:
    return small_config(iterations=iterations, evaluation=EVALUATED, backend="numpy", checkpoint_interval=1, **run)


def results(path: Path) -> dict[str, bytes]:
    """What two equal runs have in common."""
    return {name: (path / name).read_bytes() for name in ("metrics.jsonl", "policy.safetensors", "best_policy.safetensors")}


def alone(config: TrainingConfig, seed: int, path: Path) -> dict[str, bytes]:
    with PPOTrainer(config.policy, config.env, config, seed=seed, run_dir=path) as trainer:
        trainer.train()
    return results(path)


@pytest.mark.parametrize("jobs", [1, 2])
def test_each_seed_is_bit_identical_to_a_single_run_and_called_again_finished_ones_are_left_alone(tmp_path: Path, jobs: int) -> None:
    config = config_of()
    summary = train_seeds(config.policy, config.env, config, seeds=2, jobs=jobs, run_dir=tmp_path / "many")
    for seed in range(2):
        assert results(tmp_path / "many" / f"seed-{seed}") == alone(config, seed, tmp_path / f"alone-{seed}")
    assert [(row.seed, row.status, row.env_steps, row.iteration) for row in summary.seeds] == [
        (0, "done", 4 * BATCH, 4),
        (1, "done", 4 * BATCH, 4),
    ]
    assert [row.stop_reason for row in summary.seeds] == ["total_timesteps"] * 2
    written = json.loads((tmp_path / "many" / "summary.json").read_text())
    assert [row["score"] for row in written["seeds"]] == summary.scores.tolist()
    assert written["interquartile_mean"] == pytest.approx(summary.scores.mean())  # of two
    times = {path: path.stat().st_mtime_ns for seed in range(2) for path in (tmp_path / "many" / f"seed-{seed}").rglob("*")}
    again = train_seeds(config.policy, config.env, config, seeds=3, jobs=jobs, run_dir=tmp_path / "many")
    assert [row.seed for row in again.seeds] == [0, 1, 2]
    assert again.seeds[:2] == summary.seeds
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert not list((tmp_path / "many").glob("*.log"))


def test_a_factory_callbacks_and_losses_are_sent_to_the_processes(tmp_path: Path) -> None:
    def stop_at_2(state: Any, metrics: Any) -> bool:
        return state.iteration < 2 or "loss/calm" not in metrics

    def calm(values: Any) -> Any:
        return 1e-3 * values.square().mean()

    config = config_of(6).replace(run=config_of(6).run.replace(backend="torch"))
    options: dict[str, Any] = {"seeds": [5], "run_dir": tmp_path / "many", "callbacks": [stop_at_2], "custom_loss_fns": [calm]}
    for _ in range(2):  # a callback ended it, so it is not continued
        summary = train_seeds("mlp", lambda: gym.make("CartPole-v1"), config, **options)
        assert [(row.seed, row.status, row.iteration, row.stop_reason) for row in summary.seeds] == [(5, "done", 2, "callback")]


def fail_once(path: Path, how: str) -> Any:
    """A callback that fails in the first process that comes to iteration 2, and never again."""

    def callback(state: Any, metrics: Any) -> None:
        del metrics
        if state.iteration == 2:
            with contextlib.suppress(FileExistsError), open(path, "x"):
                if how == "error":
                    raise ValueError("a wire came loose")
                os.kill(os.getpid(), signal.SIGKILL)

    return callback


@pytest.mark.parametrize(
    ("how", "text"), [("error", "ValueError: a wire came loose"), ("kill", "its process was killed by SIGKILL (perhaps out of memory)")]
)
def test_an_error_in_one_seed_does_not_lose_the_others_and_is_tried_again(tmp_path: Path, how: str, text: str) -> None:
    config = config_of()
    options: dict[str, Any] = {"seeds": 3, "jobs": 1, "run_dir": tmp_path / "many", "callbacks": [fail_once(tmp_path / how, how)]}
    with pytest.warns(UserWarning, match="seed 0 failed"):
        summary = train_seeds(config.policy, config.env, config, **options)
    assert [row.status for row in summary.seeds] == ["failed", "done", "done"]
    assert [row.seed for row in summary.failed] == [0]
    assert text in (summary.seeds[0].error or "")
    assert summary.scores.size == 2
    log = tmp_path / "many" / "seed-0.log"
    assert log.exists() == (how == "error")
    assert how != "error" or "Traceback" in log.read_text()
    assert "seed 0: " in (tmp_path / "many" / "summary.md").read_text()
    again = train_seeds(config.policy, config.env, config, **options)
    assert [row.status for row in again.seeds] == ["done"] * 3
    assert results(tmp_path / "many" / "seed-0") == alone(config, 0, tmp_path / "alone")
    assert not log.exists()


def test_stopping_saves_every_seed_and_calling_again_ends_with_the_same_bits(tmp_path: Path) -> None:
    config = config_of(60, name="many", directory=str(tmp_path))
    trainer = ProcessTrainer(config.policy, config.env, 2)
    seen: set[int] = set()

    def interrupted(bundle: Bundle, seeds: Sequence[int]) -> Generator[SeedEvent, None, None]:
        for event in trainer(bundle, seeds):
            seen.update([event.seed] if event.env_steps else [])
            yield event
            if len(seen) == 2:
                signal.raise_signal(signal.SIGINT)

    with create_bundle(config, range(3)) as bundle:
        with pytest.raises(KeyboardInterrupt):
            train_bundle(bundle, interrupted)
        for seed in seen:
            assert list((bundle.run_path(seed) / "checkpoints").iterdir())
        assert not list(bundle.path.glob("*.log"))
        summary = train_bundle(bundle, trainer)
    assert [row.status for row in summary.seeds] == ["done"] * 3
    single = config.replace(run=config.run.replace(name=None))
    for seed in range(3):
        assert results(bundle.run_path(seed)) == alone(single, seed, tmp_path / f"alone-{seed}")


SCRIPT = """
from doubles.runs import small_config
from inchworm import train_seeds
config = small_config(iterations=10**6, backend="numpy", checkpoint_interval=10**6)
train_seeds(config.policy, config.env, config, seeds=2, jobs=2, run_dir="many")
"""


@pytest.mark.slow
def test_seeds_save_and_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    runs = [tmp_path / "many" / f"seed-{seed}" for seed in range(2)]
    deadline, path = time.monotonic() + 120, os.pathsep.join(map(os.path.abspath, sys.path))
    with subprocess.Popen([sys.executable, "-c", SCRIPT], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}) as parent:
        try:
            while not all((run / "metrics.jsonl").exists() for run in runs):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            parent.kill()
    while not all(list(run.glob("checkpoints/step-*")) and free(run / "lock") for run in runs):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("unread", [b"", b"a report"])
def test_a_seed_ends_with_its_parent_whether_or_not_that_has_read_its_reports(unread: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    signals: list[int] = []
    monkeypatch.setattr("os.kill", lambda pid, number: signals.append(number))
    parent, child = socket.socketpair()
    child.sendall(unread)
    parent.close()
    with child:
        follow_parent(child)
    assert signals == [signal.SIGINT]


def free(lock: Path) -> bool:
    with open(lock, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_wrong_use_is_one_error_and_leaves_nothing(tmp_path: Path) -> None:
    config = config_of()
    options: dict[str, Any] = {"run_dir": tmp_path / "many"}
    with pytest.raises(ConfigError, match="minibatch_size=1000 is larger than the rollout"):
        train_seeds("mlp", config.env, config.replace(ppo=PPOConfig(rollout_steps=8, minibatch_size=1000)), **options)
    env = gym.make("CartPole-v1")
    with pytest.raises(ConfigError, match=r"every seed needs environments of its own, and a .* cannot be copied; pass an id or a factory"):
        train_seeds("mlp", env, config, **options)
    with open(os.devnull, "w") as file, pytest.raises(ConfigError, match="cannot be sent to another process"):
        train_seeds("mlp", "CartPole-v1", config, callbacks=[lambda state, metrics: file.write("")], **options)
    with pytest.raises(ConfigError, match="seeds=0 must be 1 or more"):
        train_seeds("mlp", "CartPole-v1", config, seeds=0, **options)
    with pytest.raises(ConfigError, match="jobs=0 must be 1 or more"):
        train_seeds("mlp", "CartPole-v1", config, jobs=0, **options)
    with pytest.raises(ConfigError, match="a callback must be a function"):
        train_seeds("mlp", "CartPole-v1", config, callbacks=[3], **options)  # type: ignore[list-item]
    assert not (tmp_path / "many").exists()


class Warns(gym.Wrapper[Any, Any, Any, Any]):
    """An environment that warns, and prints."""

    def reset(self, **options: Any) -> Any:
        warnings.warn("the pole is loud", stacklevel=1)
        os.write(1, b"creak\n")
        return super().reset(**options)


def test_warnings_of_all_seeds_appear_once_and_what_they_print_is_in_their_logs(tmp_path: Path) -> None:
    config = config_of(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        train_seeds("mlp", lambda: Warns(gym.make("CartPole-v1")), config, seeds=2, run_dir=tmp_path / "many")
    assert [str(warning.message) for warning in caught].count("the pole is loud") == 1
    assert "creak" in (tmp_path / "many" / "seed-1.log").read_text()


def test_jobs_and_workers_follow_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seed_trainers, "usable_cores", lambda: 8)
    config = config_of()
    workers = {"auto": 8, 0: 8, 1: 8, 2: 4, 3: 2, 8: 1}
    for count, jobs in workers.items():
        assert default_jobs(config.replace(env=EnvConfig(num_envs=8, num_workers=count)), 16) == jobs  # type: ignore[arg-type]
    assert default_jobs(config.replace(env=EnvConfig(num_envs=8, num_workers=1, help_workers=True)), 16) == 4
    assert default_jobs(config, 3) == 3
    monkeypatch.setattr(seed_trainers, "usable_cores", lambda: 1)
    assert default_jobs(config.replace(env=EnvConfig(num_envs=8, num_workers=4)), 3) == 1


def test_a_bundle_that_is_trained_together_is_resumed_together(tmp_path: Path) -> None:
    config = config_of(name="many", directory=str(tmp_path))
    calls: list[list[int]] = []

    def trainer(bundle: Bundle, seeds: Sequence[int]) -> Generator[SeedEvent, None, None]:
        calls.append(list(seeds))
        yield from train_here(bundle, seeds[:1] if len(calls) == 1 else seeds)

    with create_bundle(config, range(3)) as bundle:
        bundle.update(config, together=True)
        assert [row.status for row in train_bundle(bundle, trainer).seeds] == ["done", "unfinished", "unfinished"]
        assert not (bundle.run_path(1) / CONFIG).exists()
        longer = bundle.config.replace(run=bundle.config.run.replace(total_timesteps=6 * BATCH))
        bundle.update(longer)
        assert [row.iteration for row in train_bundle(bundle, trainer).seeds] == [6, 6, 6]
        train_bundle(bundle, trainer)
    assert calls == [[0, 1, 2], [0, 1, 2], []]


def test_a_seed_without_its_final_evaluation_is_not_finished(tmp_path: Path) -> None:
    """Seed 0 has reached its limit, but a longer run and a run whose evaluation was cut off are continued."""
    config = config_of(name="many", directory=str(tmp_path)).replace(evaluation=EvalConfig(interval=0, final_episodes=0))
    with create_bundle(config, range(1)) as bundle:
        summary = train_bundle(bundle, train_here)
        assert (summary.score_of, summary.seeds[0].status) == ("training", "done")
        bundle.update(config.replace(evaluation=EVALUATED))
        seeds: list[int] = []
        train_bundle(bundle, lambda bundle, left: (seeds.append(seed) or SeedEvent(seed, "failed", text="no") for seed in left))
        assert seeds == [0]


def test_the_summary_by_hand() -> None:
    scores = [1.0, 2.0, 3.0, 4.0, 100.0]
    rows = tuple(SeedScore(seed, "done", score, env_steps=1_000, stop_reason="total_timesteps") for seed, score in enumerate(scores))
    summary = SeedsSummary(Path("runs/x"), "CartPole-v1", rows)
    assert summary.interquartile_mean == 3.0  # of 2, 3, 4
    low, high = summary.interval95
    assert 1.0 <= low < 3.0 < high <= 100.0
    assert str(summary) == (
        f"CartPole-v1, 5 seeds: interquartile mean 3 [{low:.5g}, {high:.5g}] of final evaluations (95 % bootstrap interval)"
    )
    assert (summary.failed, summary.unfinished) == ((), ())
    assert "| 4 | 100 | 1,000 | done |" in summary.page()
    wins = (replace(rows[0], win_rate=0.5, converged={"env_steps": 512}), SeedScore(7, "failed", error="it\nbroke", env_steps=5))
    mixed = SeedsSummary(Path("runs/x"), "Skirmish-v0", wins)
    assert mixed.table() == (
        ["seed", "score", "win rate", "env steps", "converged after", "status"],
        [["0", "1", "0.50", "1,000", "512", "done"], ["7", "", "", "5", "", "failed"]],
    )
    assert str(mixed) == "Skirmish-v0, 2 seeds, 1 of them not done: interquartile mean 1 of final evaluations"
    assert mixed.page().endswith("\n\n- seed 7: it broke\n")
    assert mixed.to_dict()["interval95"] == [None, None]
    assert json.loads(json.dumps(mixed.to_dict(), allow_nan=False)) == mixed.to_dict()
    empty = SeedsSummary(Path("runs/x"), "CartPole-v1", wins[1:])
    assert np.isnan(empty.interquartile_mean)
    assert empty.score_text() == "no scores"
