"""Ctrl-C: once saves the last complete iteration and leaves, twice leaves at once; and the saved run resumes bit for bit."""

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from doubles.runs import BATCH, SMALL, finish, outcome, small_config
from doubles.toys import Corridor
from inchworm.config.sections import EvalConfig
from inchworm.tracking.jsonl import METRICS, read_rows
from inchworm.train import callbacks as interrupt
from inchworm.train.callbacks import BaseCallback, interruptible
from inchworm.train.loop import TrainingState
from inchworm.train.trainer import PPOTrainer


def trainer_for(run_dir: Path | None, env: Any = Corridor, *, interval: int = 0, checkpoint_interval: int = 100) -> PPOTrainer:
    evaluation = EvalConfig(interval=interval, final_episodes=0, num_envs=1, episodes=2)
    return PPOTrainer(SMALL, env, small_config(evaluation=evaluation, checkpoint_interval=checkpoint_interval), run_dir=run_dir)


def undisturbed(tmp_path: Path, **options: Any) -> dict[str, Any]:
    return finish(trainer_for(tmp_path / "undisturbed", **options))


@pytest.fixture(autouse=True)
def the_handler_is_put_back() -> Any:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


class At(BaseCallback):
    """Does something in the middle of an iteration."""

    def __init__(self, iteration: int, action: Callable[[], Any]) -> None:
        self.iteration, self.action = iteration, action

    def on_rollout(self, state: TrainingState, rollout: Any) -> None:
        if state.iteration + 1 == self.iteration:
            self.action()


def press() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("iteration", [1, 3])
def test_once_finishes_the_iteration_saves_it_and_leaves(iteration: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []

    def press_and_read() -> None:
        press()
        said.append(capsys.readouterr().err)  # at once, not when the iteration has ended

    with trainer_for(tmp_path / "run") as trainer:
        with pytest.raises(KeyboardInterrupt):
            trainer.train(callback=At(iteration, press_and_read))
        assert said == ["finishing this iteration, press again to stop now\n"]
        assert trainer.saver.saved == (iteration, iteration * BATCH)
        assert trainer.state.interrupted
        assert trainer.state.iteration == trainer.n_updates == iteration
        assert len(trainer.state.history["loss"]) == iteration
    assert [row["iteration"] for row in read_rows(tmp_path / "run" / METRICS)] == list(range(1, iteration + 1))
    assert newest(tmp_path / "run") == iteration
    assert finish(trainer_for(tmp_path / "run"), resume=True) == undisturbed(tmp_path)


def test_the_same_trainer_can_continue(tmp_path: Path) -> None:
    with trainer_for(tmp_path / "run") as trainer:
        with pytest.raises(KeyboardInterrupt):
            trainer.train(callback=At(2, press))
        trainer.train()
        assert outcome(trainer) == undisturbed(tmp_path)


def test_without_a_run_directory_it_just_stops() -> None:
    with trainer_for(None) as trainer:
        with pytest.raises(KeyboardInterrupt):
            trainer.train(callback=At(2, press))
        assert trainer.n_updates == 2


def test_twice_leaves_at_once_with_the_iteration_before(tmp_path: Path) -> None:
    reached: list[str] = []

    def twice() -> None:
        press()
        reached.append("still here")  # the first press only asks
        press()
        reached.append("too far")

    with trainer_for(tmp_path / "run") as trainer, pytest.raises(KeyboardInterrupt):
        trainer.train(callback=At(3, twice))
    assert reached == ["still here"]
    assert 0 <= newest(tmp_path / "run") <= 2
    assert finish(trainer_for(tmp_path / "run"), resume=True) == undisturbed(tmp_path)


def newest(run_dir: Path) -> int:
    return max(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*"))


def stuck() -> None:
    """A step that takes for ever, in a way that only a signal ends."""
    press()
    time.sleep(60)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr("inchworm.train.callbacks.SNAPSHOT_SHARE", 1e9)  # as if iterations were slow


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("iteration", [1, 4])
def test_an_iteration_that_does_not_end_is_left_and_the_last_complete_one_saved(tmp_path: Path, iteration: int) -> None:
    with trainer_for(tmp_path / "run") as trainer:
        with pytest.raises(KeyboardInterrupt):
            trainer.train(callback=At(iteration, stuck))
        assert trainer.total_timesteps == iteration * BATCH  # in the middle of that iteration
    assert newest(tmp_path / "run") == iteration - 1
    assert (tmp_path / "run" / "policy.safetensors").exists()
    assert finish(trainer_for(tmp_path / "run"), resume=True) == undisturbed(tmp_path)


@pytest.mark.usefixtures("impatient")
def test_an_iteration_that_is_left_can_be_taken_again_by_the_same_trainer(tmp_path: Path) -> None:
    """Also when it was left in the middle of an environment's step."""
    steps = [-1_000_000]

    class Sleepy(Corridor):
        def step(self, action: Any) -> Any:
            steps[0] += 1
            if steps[0] == 2 * BATCH + 5:
                stuck()
            return super().step(action)

    with trainer_for(tmp_path / "run", Sleepy) as trainer:
        steps[0] = 0  # those of the trial at the start do not count
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        trainer.load_checkpoint()
        assert trainer.state.iteration == 2
        trainer.train()
        assert outcome(trainer) == undisturbed(tmp_path)


@pytest.mark.parametrize(("interval", "saved"), [(3, 2), (0, 6)])
def test_an_evaluation_is_left_at_once(tmp_path: Path, interval: int, saved: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it could be saved, so there is nothing to wait for: neither during training nor at its end."""
    monkeypatch.setattr(interrupt, "GRACE_SECONDS", 600.0)
    monkeypatch.setattr("inchworm.train.callbacks.SNAPSHOT_SHARE", 1e9)
    trainer_is_made, steps = [False], [0]

    class EndlessWhenScored(Corridor):
        def __init__(self) -> None:
            super().__init__()
            self.scored = trainer_is_made[0]

        def step(self, action: Any) -> Any:
            if not self.scored:
                return super().step(action)
            steps[0] += 1
            if steps[0] == 50:
                press()
            return super().reset()[0], 0.0, False, False, {}

    config = small_config(evaluation=EvalConfig(interval=interval, final_episodes=2, num_envs=1), checkpoint_interval=100)
    with PPOTrainer(SMALL, EndlessWhenScored, config, run_dir=tmp_path / "run") as trainer:
        trainer_is_made[0] = True
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    assert steps == [50]
    assert newest(tmp_path / "run") == saved


def test_an_older_snapshot_does_not_replace_a_newer_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr("inchworm.train.callbacks.SNAPSHOT_SHARE", 1e-9)  # the snapshot stays the one of the start
    with trainer_for(tmp_path, checkpoint_interval=1) as trainer, pytest.raises(KeyboardInterrupt):
        trainer.train(callback=At(4, stuck))
    assert newest(tmp_path) == 3


def test_outside_the_main_thread_nothing_is_caught() -> None:
    histories: list[Any] = []

    def run() -> None:
        with trainer_for(None) as trainer:
            histories.append(trainer.train())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert len(histories[0]["loss"]) == 6


def test_the_timer_does_not_outlive_the_run() -> None:
    state = TrainingState()
    with interruptible(state):
        press()
        assert state.interrupted
        assert state.should_stop
        [timer] = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    timer.join(1.0)  # it would wait for seven seconds, and then interrupt whatever runs by then
    assert not timer.is_alive()
