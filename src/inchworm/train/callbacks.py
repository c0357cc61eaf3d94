"""Callbacks of the training loop: evaluate, checkpoint, snapshot, track; and the handling of Ctrl-C."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from inchworm.config.sections import EvalConfig, RunConfig
from inchworm.core.errors import InchwormError
from inchworm.core.protocols import Actor, Policy, Tracker
from inchworm.core.protocols import BaseCallback as BaseCallback  # users subclass it from here
from inchworm.evaluate.evaluator import PolicyEvaluator
from inchworm.evaluate.video import KeptReplays
from inchworm.run.policies import PolicyStore
from inchworm.run.saver import Saver, last_save
from inchworm.tracking.metrics import StatsLogger
from inchworm.train.loop import TrainingState, reached_limits

SNAPSHOT_SHARE = 0.0025
"""Share of the time spent on snapshots: one that takes 0.5 ms is taken every 0.2 s, one that takes 20 ms every 8 s."""

MAX_AGE_SECONDS = 10.0
"""How old a snapshot may become, whatever it costs, unless the last iteration is older."""


class EvaluateCallback(BaseCallback):
    """Evaluates the policy at intervals and at the end, and calls `on_best` for every new best score.

    An error in an evaluation is recorded and training continues.
    """

    profile_section = "evaluation"

    def __init__(
        self,
        evaluator: PolicyEvaluator,
        actor: Callable[[], Actor],
        config: EvalConfig,
        on_best: Callable[[], None],
        before_final: Callable[[TrainingState], None] | None = None,
        replays: KeptReplays | None = None,
    ) -> None:
        """`before_final` is called before the final evaluation, which may be long, to save the state first; `replays` keeps episodes."""
        self._evaluator, self._actor, self._config, self._on_best = evaluator, actor, config, on_best
        self._before_final, self._replays = before_final, replays
        self.sees_every = config.interval

    def on_iteration(self, state: TrainingState, metrics: Mapping[str, float]) -> None:
        """Evaluate if it is due; the scores are added to the iteration's metrics."""
        del metrics
        if self._config.interval and state.iteration % self._config.interval == 0:
            self._evaluate(state, self._config.episodes)

    def on_train_end(self, state: TrainingState) -> None:
        """Run the final evaluation, once, unless the run was interrupted."""
        if self._config.final_episodes and not state.interrupted and state.scored != state.iteration:
            if self._before_final is not None:
                self._before_final(state)
            self._evaluate(state, self._config.final_episodes)
            state.scored = state.iteration

    def _evaluate(self, state: TrainingState, episodes: int) -> None:
        state.evaluating = True
        try:
            stats = self._evaluator.evaluate(self._actor(), episodes)
            if self._replays is not None:
                try:
                    self._replays.keep(state.env_steps, stats)
                except (InchwormError, OSError) as error:
                    warnings.warn(f"the replay of the evaluation after iteration {state.iteration} is missing: {error}", stacklevel=2)
        except Exception as error:
            state.failures.append(f"the evaluation after iteration {state.iteration} failed: {type(error).__name__}: {error}")
            state.evaluations.append({"iteration": state.iteration, "failed": traceback.format_exc()})
            state.metrics["evaluation/failed"] = 1.0
            return
        finally:
            state.evaluating = False
        state.evaluations.append({"iteration": state.iteration, "env_steps": state.env_steps, **stats.to_dict()})
        state.metrics |= {f"evaluation/{name}": value for name, value in stats.metrics().items()}
        if state.best_score is None or stats.mean_return > state.best_score:
            state.best_score, state.best_iteration = stats.mean_return, state.iteration
            self._on_best()


class CheckpointCallback(BaseCallback):
    """Saves every `interval` iterations or `seconds`, whenever an evaluation was the best so far, and at the end.

    A save that fails is a warning and is retried after the next iteration; only the last one must succeed.
    """

    profile_section = "checkpoints"

    def __init__(self, saver: Saver, interval: int, seconds: float | None = None, *, keep_best: bool = False) -> None:
        self._saver, self.sees_every, self._keep_best = saver, interval, keep_best  # by time, after iterations that are computed together
        self._seconds = seconds or math.inf
        self._saved_at = time.monotonic()
        self._saved: tuple[object, ...] | None = None
        self._failed = False

    def on_iteration(self, state: TrainingState, metrics: Mapping[str, float]) -> None:
        """Save if it is due, or if the last save failed."""
        del metrics
        self._warn_on_error(self._saver.finalize, False)
        if not state.settled:
            return
        is_best = self._keep_best and state.best_iteration == state.iteration
        by_time = time.monotonic() - self._saved_at >= self._seconds
        if self._failed or is_best or by_time or (self.sees_every and state.iteration % self.sees_every == 0):
            self._warn_on_error(self._save_once, state)

    def flush(self, state: TrainingState) -> None:
        """Save what has not been saved yet, before something long begins."""
        self._warn_on_error(self._save_once, state)
        self._warn_on_error(self._saver.finalize, True)

    def on_train_end(self, state: TrainingState) -> None:
        """Save what has not been saved yet; this save must succeed."""
        state.ended = not state.interrupted
        self._warn_on_error(self._saver.finalize, True)
        with last_save():
            self._save_once(state)
            self._saver.finalize(True)
            self._saver.check_all_written()

    def _save_once(self, state: TrainingState) -> None:
        # The final evaluation may have found the best policy so far, and the checkpoint must record that it was taken.
        now = (state.iteration, state.best_score, state.scored, state.stopped)
        if self._saved != now:
            self._warn_on_error(self._saver.finalize, True)
            self._saver.save_in_background()
            self._saved, self._failed, self._saved_at = now, False, time.monotonic()

    def _warn_on_error(self, part: Callable[[Any], object], argument: Any) -> None:
        try:
            part(argument)
        except OSError as error:
            if not self._failed:  # once until it works again
                warnings.warn(f"a save failed: {error}; training continues and retries after each iteration", stacklevel=3)
            self._saved, self._failed = None, True


class StoreCallback(BaseCallback):
    """Saves versions of the policy in a `PolicyStore`: every `interval` iterations and at the end.

    Their score is the mean return of the last evaluation, if that was of these weights, else of the recent training episodes.
    """

    def __init__(self, store: PolicyStore, policy: Policy, interval: int) -> None:
        self._store, self._policy, self.sees_every = store, policy, interval
        self._saved: tuple[int, int] | None = None  # of the newest version: its iteration, and the evaluations until then

    def on_iteration(self, state: TrainingState, metrics: Mapping[str, float]) -> None:
        """Save if it is due."""
        del metrics
        if self.sees_every and state.iteration % self.sees_every == 0:
            self._save(state)

    def on_train_end(self, state: TrainingState) -> None:
        """Save the last weights, if they are not saved yet."""
        if self._saved != (state.iteration, len(state.evaluations)):
            self._save(state)

    def _save(self, state: TrainingState) -> None:
        evaluated = bool(state.evaluations) and state.evaluations[-1]["iteration"] == state.iteration
        score = state.evaluations[-1]["mean_return"] if evaluated else state.metrics.get("mean_return")
        self._store.save(self._policy, score, {"iteration": state.iteration, "env_steps": state.env_steps})
        self._saved = (state.iteration, len(state.evaluations))


class SnapshotCallback(BaseCallback):
    """Keeps the state of a complete iteration in memory, so that an error, or Ctrl-C within a long iteration, can save it.

    With iterations of seconds that is the last one. With fast iterations only some are kept, for 0.25 % of the time, but one in
    `MAX_AGE_SECONDS` at least.
    """

    profile_section, sees_every = "checkpoints", 0  # what is computed together is kept together

    def __init__(self, take: Callable[[], Any]) -> None:
        self._take_state = take
        self._due_at = self._cost = self._taken_at = self._iteration_at = 0.0
        self.taken: Any = None

    def on_train_start(self, state: TrainingState) -> None:
        """Keep the initial state."""
        del state
        self._take()

    def on_iteration(self, state: TrainingState, metrics: Mapping[str, float]) -> None:
        """Keep this iteration if the last snapshot is old, or would be after another iteration like this one."""
        del metrics
        if not state.settled:
            return
        now = time.monotonic()
        if now > self._due_at or now + (now - self._iteration_at) > self._taken_at + MAX_AGE_SECONDS:
            self._take()
        self._iteration_at = time.monotonic()

    def _take(self) -> None:
        began = time.monotonic()
        self.taken = self._take_state()
        now = time.monotonic()
        before, self._cost = self._cost, now - began
        self._due_at = now + min(before, self._cost) / SNAPSHOT_SHARE  # the smaller of two: one may have been delayed
        self._taken_at = self._iteration_at = began


class TrackCallback(BaseCallback):
    """Passes metrics to the trackers: every `run.log_interval` iterations, after evaluations, and of the last iteration."""

    profile_section, sees_every = "tracking", 0  # it reads only the metrics of each

    def __init__(self, trackers: Sequence[Tracker], run: RunConfig) -> None:
        self._logger, self._run = StatsLogger(trackers), run
        self._logged_evaluations = 0
        self._unlogged: tuple[dict[str, float], int] | None = None  # the last iteration's row and env steps

    def on_train_start(self, state: TrainingState) -> None:
        """Ignore evaluations of earlier calls."""
        self._logged_evaluations = len(state.evaluations)

    def on_iteration(self, state: TrainingState, metrics: Mapping[str, float]) -> None:
        """Log the row if it is due, contains an evaluation, or is the last one."""
        self._unlogged = {"iteration": float(state.iteration), **metrics}, state.env_steps
        is_last = state.stopped or bool(reached_limits(state, self._run))
        if is_last or state.iteration % self._run.log_interval == 0 or len(state.evaluations) > self._logged_evaluations:
            self._logged_evaluations = len(state.evaluations)
            self.log_unlogged()

    def on_train_end(self, state: TrainingState) -> None:
        """Log the final evaluation, if there was one."""
        if len(state.evaluations) > self._logged_evaluations:
            final = {name: value for name, value in state.metrics.items() if name.startswith("evaluation/")}
            self._unlogged, self._logged_evaluations = None, len(state.evaluations)
            self._logger.log({"iteration": float(state.iteration), **final}, state.env_steps)

    def log_unlogged(self) -> None:
        """Log the last complete iteration, unless it is logged: a run that is interrupted or fails ends with any iteration.

        `train` calls this after the last save, so that a resumed run removes the row and has those of an undisturbed one.
        """
        unlogged, self._unlogged = self._unlogged, None
        if unlogged is not None and self._logger.trackers:
            metrics, step = unlogged
            self._logger.log(self._logger.process(metrics), step)


GRACE_SECONDS = 7.0
"""Seconds that a running iteration may take to finish after Ctrl-C."""

FINISHING = "finishing this iteration, press again to stop now"


@contextlib.contextmanager
def ignoring_interrupts() -> Iterator[None]:
    """Leave the first SIGINT to the process that leads, which gets it, too, and says when to stop; raise on a second one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        del frame
        received.append(number)
        if len(received) > 2:  # torchrun passes on the first, which the terminal has sent, too
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def interruptible(state: TrainingState) -> Iterator[None]:
    """Stop the loop after its iteration on the first SIGINT; raise on a second one, in an evaluation, or when the grace period ends.

    The first is answered at once on stderr. Outside the main thread this does nothing, because signals cannot be caught there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A real signal to this thread, which also interrupts an environment that sleeps or blocks; a flag would not.
    timer = threading.Timer(GRACE_SECONDS, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    timer.daemon = True

    def on_signal(number: int, frame: FrameType | None) -> None:
        del number, frame
        again, state.interrupted, state.should_stop = state.interrupted, True, True
        if again or state.evaluating:
            raise KeyboardInterrupt
        timer.start()
        if sys.stderr is not None:
            with contextlib.suppress(OSError, ValueError, RuntimeError):  # closed, or just being written to
                sys.stderr.write(f"{FINISHING}\n")
                sys.stderr.flush()

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)
