"""Saving and restoring: saves that fail, background saves, the complete state of a run, and what a kill leaves."""

import errno
import functools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from doubles.disk import failing, record_syncs
from doubles.runs import BATCH, LANES, SMALL, bits, finish, outcome, small_config
from doubles.toys import ActionReward, Corridor
from doubles.trackers import Recorder
from inchworm import PolicySpec
from inchworm.config.sections import EvalConfig, PolicyConfig, PPOConfig, TrainingConfig
from inchworm.core.errors import BadNumberError, ConfigError, InchwormError
from inchworm.evaluate.evaluator import PolicyEvaluator
from inchworm.evaluate.stats import EvalStats
from inchworm.policy.file import read_policy
from inchworm.run import checkpoint as checkpoint_module
from inchworm.run import saver as saver_module
from inchworm.run.checkpoint import TrainingCheckpointer, manifest_text
from inchworm.run.directory import NotExactWarning
from inchworm.run.policies import load_policy
from inchworm.run.saver import BACKGROUND_RATIO, FORMAT, SaveThread, check_state
from inchworm.tracking.jsonl import HASHES, METRICS, TIMING, read_rows
from inchworm.train.callbacks import BaseCallback
from inchworm.train.loop import TrainingState
from inchworm.train.trainer import PPOTrainer

config = functools.partial(small_config, backend="numpy", checkpoint_interval=2)


def trainer_for(run_dir: Path, env: Any = "CartPole-v1", settings: TrainingConfig | None = None, **more: Any) -> PPOTrainer:
    return PPOTrainer(SMALL, env, settings or config(), run_dir=run_dir, **more)


def steps(run_dir: Path) -> list[int]:
    return [int(path.name[5:17]) for path in TrainingCheckpointer(run_dir / "checkpoints").all()]


# ---- saves that fail
class FullDisk:
    """A function that refuses to write after some iterations, and counts its refusals. As a callback it runs before their saves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int, owner: Any, name: str, *iterations: int) -> None:
        self.code, self.function, self.iterations = code, getattr(owner, name), iterations
        self.full, self.asked = False, 0
        monkeypatch.setattr(owner, name, self.write)

    def write(self, *arguments: Any, **options: Any) -> Any:
        if self.full:
            self.asked += 1
            raise OSError(self.code, os.strerror(self.code))
        return self.function(*arguments, **options)

    def __call__(self, state: TrainingState, metrics: Mapping[str, float]) -> None:
        self.full = state.iteration in self.iterations


@pytest.mark.parametrize(("point", "code"), [("write_tensor_file", errno.ENOSPC), ("write_synced", errno.EIO)])
def test_a_failed_save_is_reported_once_and_retried_after_each_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, code: int
) -> None:
    monkeypatch.setattr(saver_module, "BACKGROUND_RATIO", math.inf)
    disk = FullDisk(monkeypatch, code, checkpoint_module, point, 4, 5, 6)
    there: list[tuple[int, list[int]]] = []

    def watch(state: TrainingState, metrics: Mapping[str, float]) -> None:
        there.append((state.iteration, steps(tmp_path)))
        disk(state, metrics)

    with trainer_for(tmp_path, settings=config(iterations=9, checkpoint_interval=4)) as trainer:
        with pytest.warns(UserWarning, match="a save failed") as caught:
            trainer.train(callback=watch)
        assert trainer.state.iteration == 9
    told = [str(warning.message) for warning in caught if "a save failed" in str(warning.message)]
    assert len(told) == 1
    assert f"[Errno {code}] {os.strerror(code)} while saving the checkpoint of iteration 4" in told[0]
    assert "step-000000000004'; training continues and retries" in told[0]
    assert disk.asked == 3  # after 4, 5 and 6
    assert there[6:] == [(7, []), (8, [7]), (9, [7, 8])]  # after 7 it works, and the interval is as before
    assert steps(tmp_path) == [8, 9]
    assert not list((tmp_path / "checkpoints").glob(".tmp*"))
    monkeypatch.undo()
    whole = finish(trainer_for(tmp_path / "whole", settings=config(iterations=9, checkpoint_interval=4)))
    assert whole[METRICS] == (tmp_path / METRICS).read_bytes()


@pytest.mark.parametrize("ratio", [math.inf, 0], ids=["in this thread", "in the background"])
def test_old_checkpoints_stay_and_a_last_save_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ratio: float) -> None:
    monkeypatch.setattr(saver_module, "BACKGROUND_RATIO", ratio)
    disk = FullDisk(monkeypatch, errno.ENOSPC, checkpoint_module, "write_synced", 5, 6)
    with trainer_for(tmp_path) as trainer, pytest.warns(UserWarning, match="a save failed"):  # noqa: PT031
        with pytest.raises(InchwormError, match=r"the last save of the run failed.*\[Errno 28\].*step-000000000006"):
            trainer.train(callback=disk)
        left = steps(tmp_path)
        assert left == [2, 4] or (ratio == 0 and left == [2])  # in the background the save of 4 may still be under way
        disk.full = False
        trainer.train()  # nothing is left but the save
    assert steps(tmp_path) == [left[-1], 6]
    assert not list(tmp_path.rglob(".tmp*"))


def test_rows_wait_and_no_checkpoint_is_newer_than_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver_module, "BACKGROUND_RATIO", math.inf)  # every save in this thread, however slow the iterations are
    disk = FullDisk(monkeypatch, errno.ENOSPC, os, "write", 3, 4, 5)
    there: list[tuple[int, list[int], int]] = []

    def watch(state: TrainingState, metrics: Mapping[str, float]) -> None:
        there.append((state.iteration, steps(tmp_path), len(read_rows(tmp_path / METRICS))))
        disk(state, metrics)

    with trainer_for(tmp_path, settings=config(iterations=8)) as trainer, pytest.warns(UserWarning, match=r"metrics\.jsonl"):
        trainer.train(callback=watch)
    assert there[4:7] == [(5, [2], 2), (6, [2], 2), (7, [2, 6], 6)]
    assert [row["iteration"] for row in read_rows(tmp_path / METRICS)] == list(range(1, 9))
    assert [row["iteration"] for row in read_rows(tmp_path / TIMING)] == list(range(1, 9))


def test_rows_are_synced_before_the_checkpoint_that_knows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with trainer_for(tmp_path, settings=config(iterations=2)) as trainer:
        events = record_syncs(monkeypatch)
        trainer.train()
    before = events[: events.index("rename")]
    assert before.index(METRICS) < before.index(TIMING) < min(at for at, name in enumerate(before) if "arrays.safetensors" in name)
    manifest = TrainingCheckpointer(tmp_path / "checkpoints").load().manifest
    assert manifest["rows"] == {METRICS: 2, TIMING: 2, HASHES: 2}


@pytest.mark.parametrize("name", ["policy.safetensors", "best_policy.safetensors"])
def test_a_policy_file_that_cannot_be_written_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    save, left = saver_module.save_policy, [3]

    def refuse(path: Path, *arguments: Any, **more: Any) -> Path:
        if path.name == name and left[0]:
            left[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(path, *arguments, **more)

    monkeypatch.setattr(saver_module, "save_policy", refuse)
    scores = EvalConfig(interval=2, episodes=1, final_episodes=0, num_envs=1)
    with trainer_for(tmp_path, ActionReward, config(evaluation=scores)) as trainer:
        with pytest.warns(UserWarning, match=rf"\[Errno 28\] No space left on device while writing: .*/{name}'; training continues"):
            trainer.train()
        assert trainer.state.iteration == 6
    assert left == [0]
    best = name.startswith("best")
    version = load_policy(tmp_path / name).policy_version
    assert version == (trainer.state.best_iteration if best else 6)


def test_a_policy_file_that_can_never_be_written_ends_in_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver_module, "save_policy", failing(errno.EACCES))
    with trainer_for(tmp_path) as trainer, pytest.warns(UserWarning, match="Permission denied"):  # noqa: PT031
        with pytest.raises(InchwormError, match=r"the last save .*policy\.safetensors"):
            trainer.train()
        with pytest.raises(OSError, match=r"policy\.safetensors"):
            trainer.save_checkpoint()
    assert steps(tmp_path) == [4, 6]  # the checkpoints are whole


def test_an_error_that_is_not_the_disks_is_not_hidden(tmp_path: Path) -> None:
    class Unsayable(Patience):
        def state_dict(self) -> dict[str, Any]:
            return {"x": object()}

    with trainer_for(tmp_path, callbacks=[Unsayable(9)]) as trainer, pytest.raises(TypeError, match="callbacks/0/state/x is object"):
        trainer.train()


# ---- in the background
@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_what_is_written_in_the_background_is_the_state_at_that_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Training continues while the writer sleeps: had it shared an array, the checkpoint would hold the future."""
    write, threads, taken = checkpoint_module.write_tensor_file, list[str](), dict[int, list[bytes]]()

    def slow(*arguments: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        time.sleep(0.2)
        return write(*arguments, **options)

    def look(state: TrainingState, metrics: Mapping[str, float]) -> None:
        taken[state.iteration] = bits(trainer.full_state())

    monkeypatch.setattr(saver_module, "BACKGROUND_RATIO", 0)  # every save but the first goes to the thread
    monkeypatch.setattr(checkpoint_module, "write_tensor_file", slow)
    whole = config(iterations=10, max_iterations=9, checkpoint_interval=3, keep_checkpoints=9, backend=backend).replace(
        policy=PolicyConfig(hidden_sizes=(8,), normalize_observations=True, normalize_values=True)
    )
    with PPOTrainer(whole.policy, "CartPole-v1", whole, run_dir=tmp_path) as trainer:
        trainer.train(callback=look)
    assert threads == ["MainThread", "inchworm-save", "inchworm-save"]
    for step in (3, 6, 9):
        assert bits(TrainingCheckpointer(tmp_path).load(tmp_path / f"checkpoints/step-{step:012d}").state) == taken[step]
    assert read_policy(tmp_path / "policy.safetensors")[1]["policy_version"] == 9


# ---- the best
def test_the_best_by_evaluation_is_kept_also_off_the_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = [1.0, 5.0, 2.0, 3.0, 4.0, 4.0, 4.0, 4.0, 4.0]

    def evaluate(self: Any, actor: Any, episodes: int, deterministic: Any = None) -> EvalStats:
        ones = np.ones(episodes)
        return EvalStats(returns=ones * scores.pop(0), lengths=ones, seeds=ones, infos={})

    monkeypatch.setattr(PolicyEvaluator, "evaluate", evaluate)
    settings = config(iterations=9, checkpoint_interval=4, evaluation=EvalConfig(interval=1, episodes=2, final_episodes=0))
    with trainer_for(tmp_path, settings=settings) as trainer:
        trainer.train()
        assert (trainer.state.best_score, trainer.state.best_iteration) == (5.0, 2)
    checkpoints = TrainingCheckpointer(tmp_path / "checkpoints")
    assert steps(tmp_path) == [2, 8, 9]
    best = checkpoints.best()
    assert best is not None
    assert best.name == "step-000000000002"
    manifest = json.loads((best / "manifest.json").read_text())["manifest"]
    assert (manifest["best"], manifest["score"]) == (True, 5.0)
    assert load_policy(tmp_path / "best_policy.safetensors").policy_version == 2
    (tmp_path / "best_policy.safetensors").unlink()
    with trainer_for(tmp_path, settings=settings) as trainer:
        trainer.load_checkpoint()
        assert (trainer.state.iteration, trainer.state.best_score) == (9, 5.0)
    assert load_policy(tmp_path / "best_policy.safetensors").policy_version == 2  # from the checkpoint


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    with trainer_for(tmp_path) as trainer:
        broken = trainer.policy.get_weights()
        broken["actor.head.bias"][0] = np.nan
        trainer.policy.set_weights(broken)
        with pytest.raises(BadNumberError, match=r"the weight actor.head.bias is not finite; not saved"):
            trainer.save_checkpoint()
    assert steps(tmp_path) == []


def test_without_keep_best_only_the_newest_stay(tmp_path: Path) -> None:
    scores = EvalConfig(interval=1, episodes=1, final_episodes=0, num_envs=1)
    finish(trainer_for(tmp_path, ActionReward, config(iterations=5, evaluation=scores, keep_best=False)))
    assert steps(tmp_path) == [4, 5]
    assert (tmp_path / "best_policy.safetensors").exists()


# ---- the policy file is a copy of the checkpoint
@pytest.mark.parametrize("left", ["an older one", "none", "half a one", "a newer one"])
def test_a_policy_file_that_is_not_of_the_checkpoint_is_written_again(tmp_path: Path, left: str) -> None:
    path = tmp_path / "policy.safetensors"
    with trainer_for(tmp_path, settings=config(max_iterations=2)) as trainer:
        trainer.train()
        older = path.read_bytes()
        trainer.train()
    finish(trainer_for(tmp_path, settings=config(max_iterations=4)), resume=True)
    expect = path.read_bytes()
    if left == "none":
        path.unlink()
    elif left == "a newer one":
        finish(trainer_for(tmp_path, settings=config()), resume=True)
        shutil.rmtree(tmp_path / "checkpoints" / "step-000000000006")
    else:
        path.write_bytes(older if left == "an older one" else expect[:100])
    with trainer_for(tmp_path) as trainer:
        trainer.load_checkpoint()  # all state is in the checkpoint; the file is never read back
        assert path.read_bytes() == expect
        assert bits(trainer.policy.get_weights()) == bits(load_policy(path).get_weights())


# ---- what else a run is
class Patience(BaseCallback):
    """Stops after so many calls: a stop rule with a memory."""

    def __init__(self, limit: int) -> None:
        self.limit, self.calls = limit, 0

    def on_iteration(self, state: TrainingState, metrics: Mapping[str, float]) -> bool:
        self.calls += 1
        return self.calls < self.limit

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls, "seen": np.arange(self.calls)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.calls = int(state["calls"])
        assert state["seen"].tolist() == list(range(self.calls))


class Counting:
    """The same rule as a callable object."""

    def __init__(self) -> None:
        rule = Patience(5)
        self.ask, self.state_dict, self.load_state_dict = rule.on_iteration, rule.state_dict, rule.load_state_dict

    def __call__(self, state: TrainingState, metrics: Mapping[str, float]) -> bool:
        return self.ask(state, metrics)


LEARNING = {  # of the settings of learning, those whose state is more than Adam's
    "numpy rmsprop": ("numpy", {"optimizer": "rmsprop"}),
    "torch rmsprop": ("torch", {"optimizer": "rmsprop"}),
    "numpy sgd": ("numpy", {"optimizer": "sgd"}),
    "torch sgd": ("torch", {"optimizer": "sgd"}),
    "torch muon": ("torch", {"optimizer": "muon", "weight_decay": 0.1}),
    "numpy adaptive": ("numpy", {"learning_rate_schedule": "adaptive", "max_learning_rate": 1.0}),
    "torch adaptive": ("torch", {"learning_rate_schedule": "adaptive", "max_learning_rate": 1.0}),
}


@pytest.mark.parametrize(("backend", "learning"), LEARNING.values(), ids=LEARNING)
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(tmp_path: Path, backend: str, learning: dict[str, Any]) -> None:
    ppo = PPOConfig(**{"rollout_steps": 8, "num_minibatches": 2, "update_epochs": 3, "learning_rate": 1e-3, **learning})
    settings = config(ppo=ppo, backend=backend)
    whole = finish(trainer_for(tmp_path / "whole", settings=settings))
    finish(trainer_for(tmp_path / "parts", settings=settings), 3 * BATCH)
    assert finish(trainer_for(tmp_path / "parts", settings=settings), 6 * BATCH, resume=True) == whole
    rates = [json.loads(line)["learning_rate"] for line in (tmp_path / "whole" / METRICS).read_text().splitlines()]
    assert len(set(rates)) > 2 if "learning_rate_schedule" in learning else set(rates) == {1e-3}


@pytest.mark.parametrize("where", ["trainer", "train", "callable"])
def test_stateful_callbacks_are_restored_with_the_run(tmp_path: Path, where: str) -> None:
    def go(run_dir: Path, limit: int | None = None) -> int:
        rule: Any = Counting() if where == "callable" else Patience(5)
        given = {"callbacks": [lambda state, metrics: None, rule]} if where == "trainer" else {}
        settings = config(max_iterations=limit, checkpoint_interval=1)
        with trainer_for(run_dir, settings=settings, **given) as trainer:
            if (run_dir / "checkpoints").exists():
                trainer.load_checkpoint()
            trainer.train(callback=None if where == "trainer" else rule)
            return trainer.state.iteration

    assert go(tmp_path / "whole") == 5
    assert go(tmp_path / "parts", 3) == 3
    assert go(tmp_path / "parts") == 5
    assert (tmp_path / "parts" / METRICS).read_bytes() == (tmp_path / "whole" / METRICS).read_bytes()


@pytest.mark.parametrize(("others", "found"), [([], "none"), ([Counting()], "a Counting"), ([BaseCallback()], "a BaseCallback")])
def test_a_missing_or_different_callback_is_reported(tmp_path: Path, others: list[Any], found: str) -> None:
    finish(trainer_for(tmp_path, callbacks=[Patience(9)], settings=config(max_iterations=1)))
    with trainer_for(tmp_path, callbacks=others) as trainer:
        trainer.load_checkpoint()
        with pytest.warns(NotExactWarning, match=f"state of callback 1, a Patience, but found {found} in its place"):
            trainer.train(2 * BATCH)


def test_stateful_trackers_are_restored_too(tmp_path: Path) -> None:
    class Tracking(Recorder):
        run_id = ""

        def state_dict(self) -> dict[str, Any]:
            return {"run_id": "abc" if self.rows else ""}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            self.run_id = state["run_id"]

    finish(trainer_for(tmp_path, trackers=[Tracking()], settings=config(max_iterations=1)))
    tracker = Tracking()
    with trainer_for(tmp_path, trackers=[tracker]) as trainer:
        trainer.load_checkpoint()
    assert tracker.run_id == "abc"


def test_a_run_that_was_stopped_and_then_killed_only_ends(tmp_path: Path) -> None:
    """The stop rule had decided; what was left was the last evaluation."""

    def stop(state: TrainingState, metrics: Mapping[str, float]) -> bool:
        return state.iteration < 3

    settings = config(checkpoint_interval=1, evaluation=EvalConfig(interval=0, final_episodes=2, num_envs=1))
    expect = finish(trainer_for(tmp_path / "whole", settings=settings), callback=stop)

    def kill(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with trainer_for(tmp_path / "killed", settings=settings) as trainer, pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(trainer.evaluator), "evaluate", kill)
        with pytest.raises(KeyboardInterrupt):
            trainer.train(callback=stop)
    with trainer_for(tmp_path / "killed", settings=settings) as trainer:
        trainer.load_checkpoint()
        trainer.train()
        assert trainer.state.iteration == 3
        assert outcome(trainer) == expect
        trainer.train(callback=lambda state, metrics: False)  # a further call continues
        assert trainer.state.iteration == 4


@pytest.mark.filterwarnings("ignore:nothing to train")
def test_the_last_evaluation_is_taken_once(tmp_path: Path) -> None:
    settings = config(iterations=2, evaluation=EvalConfig(interval=0, final_episodes=2, num_envs=1))
    with trainer_for(tmp_path, settings=settings) as trainer:
        trainer.train()
        trainer.train()
        assert len(trainer.state.evaluations) == 1
    with trainer_for(tmp_path, settings=settings) as trainer:
        trainer.load_checkpoint()
        trainer.train()
        assert trainer.state.evaluations == []
        assert [row["iteration"] for row in read_rows(tmp_path / METRICS)] == [1, 2, 2]
        trainer.train(3 * BATCH)
        assert len(trainer.state.evaluations) == 1
    assert [row["iteration"] for row in read_rows(tmp_path / METRICS)] == [1, 2, 2, 3, 3]


def test_a_run_killed_after_the_row_of_its_last_evaluation_has_that_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(iterations=2, evaluation=EvalConfig(interval=0, final_episodes=2, num_envs=1))
    expect = finish(trainer_for(tmp_path / "whole", settings=settings))
    commit, saves = TrainingCheckpointer.commit, [0]

    def dies(self: Any, *prepared: Any) -> Path:
        saves[0] += 1
        if saves[0] == 2:  # the one after the evaluation
            raise SystemError("power cut")
        return commit(self, *prepared)

    with trainer_for(tmp_path / "killed", settings=settings) as trainer, monkeypatch.context() as patch:
        patch.setattr(TrainingCheckpointer, "commit", dies)
        with pytest.raises(SystemError):
            trainer.train()
    assert len(read_rows(tmp_path / "killed" / METRICS)) == 3
    with trainer_for(tmp_path / "killed", settings=settings) as trainer:
        trainer.load_checkpoint()
        assert len(read_rows(tmp_path / "killed" / METRICS)) == 2
    assert finish(trainer_for(tmp_path / "killed", settings=settings), resume=True) == expect


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_the_random_generators_of_the_process_are_restored(tmp_path: Path, backend: str) -> None:
    def draw_into(state: TrainingState, metrics: Any) -> None:
        metrics["drawn"] = sum(draw())

    def seed() -> None:
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        torch.manual_seed(1)

    seed()
    with trainer_for(tmp_path / "whole", settings=config(backend=backend)) as trainer:
        expect = trainer.train(callback=draw_into)["drawn"]
    seed()
    with trainer_for(tmp_path / "parts", settings=config(backend=backend, max_iterations=3)) as trainer:
        first = trainer.train(callback=draw_into)["drawn"]
    draw()
    with trainer_for(tmp_path / "parts", settings=config(backend=backend)) as trainer:
        trainer.load_checkpoint()
        assert first + trainer.train(callback=draw_into)["drawn"] == expect


# ---- loading
def damage(run_dir: Path, change: Any) -> None:
    """Change the state of the newest checkpoint, with all checksums in order."""
    checkpoints = TrainingCheckpointer(run_dir / "checkpoints")
    checkpoint = checkpoints.load()
    change(checkpoint.state)
    shutil.rmtree(checkpoint.path)
    checkpoints.save(checkpoint.step, checkpoint.state)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.update(format=3), "not a trainer checkpoint in a format that this inchworm reads"),
        (lambda state: state.update(format=1), "not a trainer checkpoint"),
        (lambda state: state.pop("callbacks"), "not a trainer checkpoint"),
        (lambda state: state.update(more=1), "not a trainer checkpoint"),
        (lambda state: state["state"].update(iteration=1), "of iteration 2 holds the state of iteration 1"),
        (lambda state: state["spec"]["config"].update(activation="relu"), "a different network"),
    ],
)
def test_a_state_that_is_not_this_runs_is_refused(tmp_path: Path, change: Any, words: str) -> None:
    finish(trainer_for(tmp_path, settings=config(iterations=2)))
    expect = {path: path.read_bytes() for path in tmp_path.glob("*.*")}
    damage(tmp_path, change)
    with trainer_for(tmp_path) as trainer, pytest.raises(ConfigError, match=words):
        trainer.load_checkpoint()
    assert {path: path.read_bytes() for path in tmp_path.glob("*.*")} == expect


def test_a_checkpoint_of_the_previous_format_resumes(tmp_path: Path) -> None:
    whole = finish(trainer_for(tmp_path / "whole"))

    def older(state: dict[str, Any]) -> None:
        for name in ("spec", "callbacks", "trackers"):
            del state[name]
        state["format"], state["config"] = 1, config(max_iterations=4).to_dict()
        state["state"] = {name: state["state"][name] for name in ("iteration", "best_score")}

    finish(trainer_for(tmp_path / "parts", settings=config(max_iterations=4)))
    damage(tmp_path / "parts", older)
    assert finish(trainer_for(tmp_path / "parts"), resume=True)[METRICS] == whole[METRICS]


def other_manifest(run_dir: Path, **changes: Any) -> None:
    path = TrainingCheckpointer(run_dir / "checkpoints").all()[-1] / "manifest.json"
    manifest = json.loads(path.read_text())["manifest"]
    manifest |= {name: value for name, value in changes.items() if name != "versions"}
    manifest["versions"] |= changes.get("versions", {})
    path.write_text(manifest_text(manifest))


def test_other_versions_threads_and_processors_are_reported_once(tmp_path: Path) -> None:
    settings = config(iterations=2, threads=0, backend="torch")
    finish(trainer_for(tmp_path, settings=settings))
    other_manifest(tmp_path, versions={"numpy": "1.0", "simd": "SSE"}, threads=99, cpu_capability="NEON")
    with trainer_for(tmp_path, settings=settings) as trainer, pytest.warns(NotExactWarning) as caught:
        trainer.load_checkpoint()
    told = sorted(str(warning.message) for warning in caught)
    assert [line.split(":")[0] for line in told] == ["cpu_capability", "numpy", "simd", "threads"]
    assert told[1] == f"numpy: 1.0 → {np.__version__}: continuing; results will no longer be bit-identical"
    assert told[3].startswith(f"threads: 99 → {torch.get_num_threads()}: ")


def test_what_is_not_exact_is_in_the_manifest_and_reported(tmp_path: Path) -> None:
    from inchworm.env.source import make_vector_env

    def world() -> Any:
        env: Any = make_vector_env(Corridor, LANES)
        env.mark_inexact("it has a clock")
        return env

    with pytest.warns(NotExactWarning, match="resuming will not be bit-exact: it has a clock"):  # at once
        trainer = trainer_for(tmp_path, world())
    assert trainer.inexact == ["it has a clock"]
    with trainer, warnings.catch_warnings():
        warnings.simplefilter("error", NotExactWarning)  # and not again
        trainer.train()
    assert TrainingCheckpointer(tmp_path / "checkpoints").load().manifest["exact"] == ["it has a clock"]
    with trainer_for(tmp_path, make_vector_env(Corridor, LANES)) as trainer, pytest.warns(NotExactWarning, match="it has a clock"):
        trainer.load_checkpoint()


def test_a_run_whose_checkpoints_were_deleted_is_not_begun_again(tmp_path: Path) -> None:
    expect = finish(trainer_for(tmp_path / "run"))
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    files = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(ConfigError, match=r"rows up to iteration 6 but no checkpoint: its checkpoints are gone.*delete the directory$"):
        finish(trainer_for(tmp_path / "run"))
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == files
    shutil.rmtree(tmp_path / "run")
    assert finish(trainer_for(tmp_path / "run")) == expect


def test_missing_rows_are_reported(tmp_path: Path) -> None:
    finish(trainer_for(tmp_path, settings=config(max_iterations=4)))
    (tmp_path / METRICS).write_bytes(b"".join((tmp_path / METRICS).read_bytes().splitlines(keepends=True)[:1]))
    with trainer_for(tmp_path) as trainer, pytest.warns(UserWarning, match="has 1 rows, and had 4 when the checkpoint was written"):
        trainer.load_checkpoint()


def test_a_checkpoint_from_elsewhere_does_not_take_over_a_run(tmp_path: Path) -> None:
    for name, iterations in (("one", 2), ("two", 4)):
        finish(trainer_for(tmp_path / name, settings=config(max_iterations=iterations)))
    rows = (tmp_path / "two" / METRICS).read_bytes()
    with trainer_for(tmp_path / "two") as trainer:
        trainer.load_checkpoint(tmp_path / "one" / "checkpoints")
        with pytest.raises(ConfigError, match="already holds a run"):
            trainer.train()
    assert (tmp_path / "two" / METRICS).read_bytes() == rows
    with trainer_for(tmp_path / "three") as trainer:  # an empty directory is not a run yet
        trainer.load_checkpoint(tmp_path / "one" / "checkpoints")
        trainer.train()
        assert trainer.state.iteration == 6
    assert [row["iteration"] for row in read_rows(tmp_path / "three" / METRICS)] == [3, 4, 5, 6]


def test_a_factory_of_another_name_resumes(tmp_path: Path) -> None:
    def short_corridor() -> Corridor:
        return Corridor(4)

    def the_same_corridor() -> Corridor:
        return Corridor(4)

    with trainer_for(tmp_path, short_corridor, settings=config(max_iterations=2)) as trainer:
        trainer.train()
        assert ":" in trainer.config.env.id  # it names code
    with trainer_for(tmp_path, the_same_corridor) as trainer:
        trainer.load_checkpoint()
        assert trainer.state.iteration == 2


# ---- the thread that saves
class World:
    """A clock that the test moves, and jobs that take some of its time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.saver = SaveThread(lambda: self.now)
        self.threads: list[str] = []

    def save(self, *, after: float, takes: float = 1.0, error: Exception | None = None) -> str:
        """A save `after` seconds since the last began; where it was done."""
        self.now += after

        def job() -> None:
            self.now += takes
            self.threads.append(threading.current_thread().name)
            if error is not None:
                raise error

        began = self.now
        self.saver.run(job)
        self.saver.wait()
        self.now = began
        return self.threads[-1]


def test_the_first_save_is_synchronous_and_later_ones_in_the_background_after_twenty_times_their_duration() -> None:
    world = World()
    assert world.save(after=1000.0) == "MainThread"
    assert world.save(after=BACKGROUND_RATIO - 0.1) == "MainThread"  # a save takes 1 second
    assert world.save(after=BACKGROUND_RATIO + 0.1) == "inchworm-save"
    assert world.save(after=BACKGROUND_RATIO + 0.1, takes=2.0) == "inchworm-save"
    assert world.save(after=BACKGROUND_RATIO + 0.1, takes=1.0) == "MainThread"  # the last one took 2
    assert world.save(after=BACKGROUND_RATIO + 0.1) == "inchworm-save"


def test_after_a_failure_the_next_is_done_here() -> None:
    world = World()
    world.save(after=0.0)
    with pytest.raises(OSError, match="full"):
        world.save(after=100.0, error=OSError(28, "full"))
    assert world.threads[-1] == "inchworm-save"
    assert world.save(after=100.0) == "MainThread"
    with pytest.raises(OSError, match="full"):
        world.save(after=1.0, error=OSError(28, "full"))
    assert world.save(after=100.0) == "MainThread"


def test_one_at_a_time_and_the_next_waits() -> None:
    world, go, done = World(), threading.Event(), list[str]()
    world.save(after=0.0)
    world.now += 100.0
    world.saver.run(lambda: done.append(f"first {go.wait(60)}"))
    assert world.saver.busy
    assert done == []
    threading.Timer(0.1, go.set).start()
    world.now += 1000.0
    world.saver.run(lambda: done.append("second"))
    world.saver.wait()
    assert done == ["first True", "second"]
    assert not world.saver.busy


def test_an_error_in_the_background_is_raised_once() -> None:
    world = World()
    world.save(after=0.0)
    world.now += 100.0
    world.saver.run(failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        world.saver.wait()
    world.saver.wait()


def test_the_thread_takes_no_signal() -> None:
    """A signal that the system hands to another thread would not wake a main thread that sleeps."""
    world, blocked = World(), set[int]()
    world.save(after=0.0)
    world.now += 100.0
    world.saver.run(lambda: blocked.update(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    world.saver.wait()
    assert {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} <= blocked
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


# ---- the state of callbacks, and of checkpoints of earlier versions
def test_a_checkpoint_from_before_a_field_existed_is_of_the_same_network() -> None:
    spec = PolicySpec(spaces.Box(-1, 1, (2,)), spaces.Discrete(2), PolicyConfig())
    before, now = spec.to_dict(), spec.to_dict()
    del before["config"]["central_critic"], before["config"]["memory_size"]
    parts = {"format": FORMAT, "config": {}, "weights": {}, "learner": {}, "collector": {}, "callbacks": [], "trackers": []}
    state = {**parts, "state": {"iteration": 3}, "spec": before}
    check_state(state, 3, now)
    check_state({**state, "spec": {"policies": {"red": before, "bot": None}}}, 3, {"policies": {"red": now, "bot": None}})
    other = PolicySpec(spec.observation_space, spec.action_space, PolicyConfig(hidden_sizes=(3,))).to_dict()
    for wrong, ours in ((before, other), ({"policies": {"red": before}}, {"policies": {"red": other}})):
        with pytest.raises(ConfigError, match="a different network"):
            check_state({**state, "spec": wrong}, 3, ours)


# ---- the state of the process
def draw() -> list[float]:
    gauss = [random.gauss(0, 1), float(np.random.standard_normal())]  # noqa: NPY002 - both keep a second number for later
    return [*gauss, random.random(), float(np.random.rand()), float(torch.rand(())), float(torch.randn(()))]  # noqa: NPY002


def test_torch_is_not_imported_for_it() -> None:
    script = """
import sys
from inchworm.run.checkpoint import as_arrays
from inchworm.run.saver import generators_state, process_facts, restore_generators
state = generators_state()
restore_generators(state | {"torch": "00"})  # of a process that had torch: nothing here could draw from it
assert "torch" not in state
assert process_facts(0) == {"threads": None, "cpu_capability": None} and process_facts(3)["threads"] == 3
assert as_arrays({"a": [1, (2.5, None)]}) == {"keys": ["a"], "values": [[1, [2.5, None]]]}
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
