"""An error in the middle of a run: the newest complete state is saved, the error names it, and the resumed run has the same bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from doubles.runs import BATCH, SMALL, finish, small_config
from doubles.toys import Corridor
from inchworm.core.errors import BadNumberError, ConfigError, EnvError
from inchworm.run.checkpoint import TrainingCheckpointer
from inchworm.run.policies import load_policy
from inchworm.train import callbacks as callbacks_module
from inchworm.train.callbacks import BaseCallback
from inchworm.train.loop import TrainingState
from inchworm.train.trainer import PPOTrainer


@pytest.fixture(autouse=True)
def every_iteration_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if iterations took seconds: then a snapshot is taken after each."""
    monkeypatch.setattr(callbacks_module, "SNAPSHOT_SHARE", 1e9)


class Failing(Corridor):
    """Does something wrong in one step of its life, and in none if the file says that it did."""

    at = 3 * BATCH + 5
    begun: Path
    calls = [-1_000_000]  # noqa: RUF012

    def observe(self, observation: Any) -> Any:
        raise ValueError("a wire came loose")

    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        self.calls[0] += 1
        if self.calls[0] == self.at and not self.begun.exists():
            self.begun.touch()
            observation = self.observe(observation)
        return observation, *rest


class ShowsNaN(Failing):
    def observe(self, observation: Any) -> Any:
        return np.full_like(observation, np.nan)


class Exits(Failing):
    def observe(self, observation: Any) -> Any:
        raise SystemExit(0)


class Stumbling(BaseCallback):
    """Fails once, in one of the calls of the fourth iteration."""

    def __init__(self, call: str) -> None:
        self.call, self.counts = call, {"seen": 0}

    def fail(self, call: str, iteration: int) -> None:
        if call == self.call and iteration == 4:
            raise RuntimeError("the callback stumbled")

    def on_rollout(self, state: TrainingState, rollout: Any) -> None:
        self.fail("on_rollout", state.iteration + 1)

    def on_iteration(self, state: TrainingState, metrics: Any) -> None:
        self.counts["seen"] += 1
        self.fail("on_iteration", state.iteration)

    def state_dict(self) -> dict[str, Any]:
        return self.counts  # the object itself, which changes later

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = dict(state)


def trainer_for(run_dir: Path | None, env: Any = Corridor, **more: Any) -> PPOTrainer:
    return PPOTrainer(SMALL, env, small_config(checkpoint_interval=100), run_dir=run_dir, **more)


def fail(trainer: PPOTrainer, error: type[BaseException], match: str) -> BaseException:
    Failing.calls[0] = 0  # those of the trial at the start do not count
    with trainer, pytest.raises(error, match=match) as caught:
        trainer.train()
    Failing.calls[0] = -1_000_000
    return caught.value


def check_saved_and_resumed(tmp_path: Path, error: BaseException, *, make: Callable[[Path], PPOTrainer], saved: int = 3) -> None:
    """The state after `saved` iterations is on disk with its policy, the error says so, and the resumed run has the undisturbed bits."""
    run_dir = tmp_path / "run"
    (note,) = [note for note in error.__notes__ if "saved" in note]
    assert note.startswith("stopped after ")
    assert f"; the state after iteration {saved} ({saved * BATCH} steps) is saved in {run_dir / 'checkpoints'}" in note
    assert note.endswith("; to continue: load_checkpoint(), then train()")
    checkpoint = TrainingCheckpointer(run_dir / "checkpoints").load()
    assert checkpoint.step == saved
    weights = load_policy(run_dir / "policy.safetensors").get_weights()
    assert all(np.array_equal(weights[name], value) for name, value in checkpoint.state["weights"].items())
    assert finish(make(run_dir), resume=True) == finish(make(tmp_path / "undisturbed"))


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        (Failing, EnvError, "a wire came loose"),
        (ShowsNaN, BadNumberError, "nan"),
        (Exits, EnvError, "step raised SystemExit: 0"),
    ],
)
def test_an_environment_that_fails_costs_one_iteration(kind: type[Failing], error: type[Exception], text: str, tmp_path: Path) -> None:
    kind.begun = tmp_path / "begun"
    found = fail(trainer_for(tmp_path / "run", kind), error, text)
    check_saved_and_resumed(tmp_path, found, make=lambda run_dir: trainer_for(run_dir, kind))


@pytest.mark.parametrize("call", ["on_rollout", "on_iteration"])
def test_a_callback_that_fails_costs_one_iteration(call: str, tmp_path: Path) -> None:
    error = fail(trainer_for(tmp_path / "run", callbacks=[Stumbling(call)]), RuntimeError, "stumbled")
    check_saved_and_resumed(tmp_path, error, make=lambda run_dir: trainer_for(run_dir, callbacks=[Stumbling("none")]))


def test_a_learner_that_fails_costs_one_iteration(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path / "run")
    update = trainer.learner.update

    def broken(*arguments: Any) -> Any:
        if trainer.state.iteration == 3:
            raise MemoryError("no more")
        return update(*arguments)

    trainer.learner.update = broken  # type: ignore[method-assign]
    check_saved_and_resumed(tmp_path, fail(trainer, MemoryError, "no more"), make=trainer_for)


def test_a_failure_in_the_first_iteration_saves_the_beginning(tmp_path: Path) -> None:
    class AtOnce(Failing):
        at, begun = 5, tmp_path / "begun"

    error = fail(trainer_for(tmp_path / "run", AtOnce), EnvError, "loose")
    check_saved_and_resumed(tmp_path, error, make=lambda run_dir: trainer_for(run_dir, AtOnce), saved=0)


def test_wrong_use_saves_nothing(tmp_path: Path) -> None:
    def wrong(state: Any, rollout: Any) -> Any:
        raise ConfigError("these settings exclude each other")

    with trainer_for(tmp_path / "run") as trainer, pytest.raises(ConfigError) as caught:
        trainer.train(step_fn=wrong)
    assert not hasattr(caught.value, "__notes__")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_without_a_run_directory_the_error_is_as_it_was() -> None:
    error = fail(trainer_for(None, callbacks=[Stumbling("on_rollout")]), RuntimeError, "stumbled")
    assert error.__notes__ == [f"stopped after iteration 3 and {4 * BATCH} steps"]


def test_a_save_that_fails_does_not_hide_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TrainingCheckpointer, "prepare", full)
    error = fail(trainer_for(tmp_path / "run", callbacks=[Stumbling("on_rollout")]), RuntimeError, "stumbled")
    assert "No space left on device" in error.__notes__[0]
    assert error.__notes__[1:] == [f"stopped after iteration 3 and {4 * BATCH} steps; no state of the run is saved"]
