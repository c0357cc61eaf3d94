"""Where the time goes: sections that add up, counted once, and parts that are as before afterwards."""

import time
from typing import Any

import pytest

from doubles.runs import STEPS, bits, small_config
from inchworm import EvalConfig, PPOTrainer
from inchworm.train import profile as module
from inchworm.train.callbacks import BaseCallback
from inchworm.train.profile import SECTIONS, Profile, table_text


class Clock:
    """A clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)


def test_each_second_belongs_to_the_innermost_section(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, profile = Clock(monkeypatch), Profile()

    def pass_time(seconds: float, inner: Any = None) -> None:
        clock.now += seconds
        if inner is not None:
            inner()
            clock.now += seconds

    env = profile.timed("env", lambda: pass_time(3))
    collect = profile.timed("write", lambda: pass_time(1, env))
    profile.timed("other", lambda: pass_time(0.5, collect))()
    # other: 0.5 before and 0.5 after; write: 1 before and 1 after; env: 3
    assert profile.seconds == {"other": 1.0, "write": 2.0, "env": 3.0}
    assert [(name, share) for name, _, share, _ in profile.rows()] == [("env", 3 / 6), ("write", 2 / 6), ("other", 1 / 6)]


def test_what_happens_inside_an_evaluation_is_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, profile = Clock(monkeypatch), Profile()

    def act() -> None:
        clock.now += 2

    watched = profile.timed("act", act)
    profile.timed("evaluation", watched)()
    watched()
    assert profile.seconds == {"evaluation": 2.0, "act": 2.0}
    assert profile.calls == {"evaluation": 1, "act": 1}


def test_time_is_charged_when_something_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, profile = Clock(monkeypatch), Profile()

    def fail() -> None:
        clock.now += 1
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        profile.timed("env", fail)()
    profile.timed("act", lambda: None)()
    assert profile.seconds["env"] == 1.0


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_a_run_adds_up_and_is_not_changed_by_being_watched(backend: str, tmp_path: Any) -> None:
    class Slow(BaseCallback):
        def on_iteration(self, state: Any, metrics: Any) -> None:
            time.sleep(0.01)

    scores = EvalConfig(interval=2, episodes=1, final_episodes=1)
    config = small_config(iterations=3, evaluation=scores, checkpoint_interval=1, backend=backend)

    def weights(profile: Profile | None, name: str) -> Any:
        with PPOTrainer("mlp", "CartPole-v1", config, callbacks=[Slow()], run_dir=tmp_path / name) as trainer:
            trainer.learner  # noqa: B018 - made before the clock starts
            began = time.perf_counter()
            trainer.train(profile=profile)
            whole.append(time.perf_counter() - began)
            assert "collect" not in vars(trainer.collector)  # its own methods again
            assert "act" not in vars(trainer.collector.policy)
            return bits(trainer.policy.get_weights())

    profile, whole = Profile(), []
    watched = weights(profile, "a")
    assert watched == weights(None, "b")
    rows = profile.rows()
    assert {name for name, *_ in rows} == {*SECTIONS, "callbacks"}
    assert sum(share for _, _, share, _ in rows) == pytest.approx(1.0)
    assert 0.0 < sum(profile.seconds.values()) < whole[0]
    assert profile.seconds["callbacks"] >= 0.03  # 3 iterations of 10 ms
    calls = {name: count for name, _, _, count in rows}
    assert calls["act"] == 3 * STEPS
    assert calls["env"] == 2 * 3 * STEPS + 1  # send and recv, and the first reset
    assert table_text(rows)[-1][0] == "all"
    assert table_text(rows)[-1][2] == "100.0%"
