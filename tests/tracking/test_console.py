import io
import os
from pathlib import Path
from unittest.mock import Mock, call

import pytest
from rich.progress import Progress

from inchworm.tracking.console import ConsoleTracker, StatsLogger, Terminal, detach, make_terminal


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def plain(clock: Clock, total: int | None = 1000, **options: object) -> tuple[ConsoleTracker, io.StringIO]:
    out = io.StringIO()
    return ConsoleTracker(total, terminal=make_terminal(file=out), clock=clock, **options), out  # type: ignore[arg-type]


def live(clock: Clock, total: int | None = 1000) -> tuple[ConsoleTracker, io.StringIO]:
    out = io.StringIO()
    terminal = Terminal(file=out, force_terminal=True, width=160, highlight=False, color_system=None, _environ={"TERM": "xterm"})
    return ConsoleTracker(total, title="CartPole-v1", terminal=terminal, clock=clock), out


def test_a_plain_line_tells_progress_speed_time_left_scores_and_losses(clock: Clock) -> None:
    tracker, out = plain(clock)
    clock.now = 2.0
    # 250 steps in 2 s: 125 steps/s, and the other 750 take 6 s
    tracker.log({"mean_return": 21.25, "loss": 0.5, "approx_kl": 0.0123, "entropy": 0.6, "value_loss": 3.0}, 250)
    assert out.getvalue() == "250/1,000 steps 25%  125 steps/s  0:06 left  return 21.2  loss 0.5  entropy 0.6  kl 0.0123\n"


def test_lines_come_every_few_seconds_with_each_evaluation_and_at_the_end(clock: Clock) -> None:
    tracker, out = plain(clock, seconds_between_lines=5.0)
    for second in range(1, 9):  # shown: 1 (the first) and 6
        clock.now = float(second)
        tracker.log({"loss": 1.0}, 100 * second)
    assert [line.split("/")[0] for line in out.getvalue().splitlines()] == ["100", "600"]
    tracker.log({"evaluation/mean_return": 80.0}, 900)
    tracker.log({"evaluation/mean_return": 60.0}, 950)
    assert "evaluation 60.0  best 80.0" in out.getvalue().splitlines()[-1]
    tracker.log({"loss": 1.0}, 1000)
    assert len(out.getvalue().splitlines()) == 4
    tracker.close()
    tracker.close()
    assert out.getvalue().splitlines()[4].startswith("1,000/1,000 steps 100%")
    assert len(out.getvalue().splitlines()) == 5


def test_a_resumed_run_measures_its_speed_from_where_it_resumed(clock: Clock) -> None:
    tracker, _ = plain(clock)
    clock.now = 100.0
    tracker.start(500)
    clock.now = 101.0
    tracker.log({}, 600)
    assert tracker.steps_per_second == 100.0
    assert tracker.seconds_left == 4.0


def test_nothing_is_known_before_the_clock_moved_and_without_a_target(clock: Clock) -> None:
    tracker, out = plain(clock, None)
    tracker.log({}, 10)
    assert (tracker.steps_per_second, tracker.seconds_left) == (None, None)
    assert out.getvalue() == "10 steps\n"


def test_long_times_have_hours(clock: Clock) -> None:
    tracker, out = plain(clock, 1_000_000)
    clock.now = 1.0
    tracker.log({}, 100)  # 999,900 steps at 100 a second are 9,999 s = 2 h 46 min 39 s
    assert "2:46:39 left" in out.getvalue()


def test_the_live_view_shows_bar_scores_and_losses_and_is_redrawn_a_few_times_a_second_at_most(clock: Clock) -> None:
    tracker, out = live(clock)
    tracker.start()
    assert "0/1,000 steps" in out.getvalue()
    for tick in range(1, 101):  # 100 rows in one second: drawn at most 4 times, besides the first
        clock.now = tick / 100
        tracker.log({"mean_return": 20.0, "loss": 0.25, "explained_variance": 0.5}, tick)
    assert out.getvalue().count("CartPole-v1") <= 6
    tracker.log({"evaluation/mean_return": 432.1}, 500)
    tracker.close()
    shown = out.getvalue()
    for text in ("500/1,000 steps 50%", "━", "return 20.0", "evaluation 432.1", "best 432.1", "loss 0.25", "explained variance 0.5"):
        assert text in shown


def test_quiet_shows_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = ConsoleTracker(100, quiet=True, clock=clock)
    tracker.start()
    tracker.log({"loss": 1.0}, 50)
    tracker.log_params({})
    tracker.log_artifact(None)  # type: ignore[arg-type]
    tracker.close()
    assert capsys.readouterr().out == ""


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    out = io.StringIO()
    Terminal(file=out, force_terminal=True).print("[red]text[/red]")
    assert "\x1b[31m" not in out.getvalue()


def test_a_reader_that_has_gone_silences_the_terminal(clock: Clock) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as gone:
        tracker = ConsoleTracker(100, terminal=make_terminal(file=gone), clock=clock)
        tracker.log({"loss": 1.0}, 10)  # the pipe breaks here, and the run continues
        clock.now = 100.0
        tracker.log({"loss": 1.0}, 20)
        tracker.close()
        assert tracker._terminal.quiet
        print("discarded", file=gone, flush=True)  # the descriptor leads to nothing now


def test_streams_without_a_descriptor_need_no_detaching() -> None:
    detach(io.StringIO())
    detach(object())


def test_names_do_not_steer_the_terminal() -> None:
    file = io.StringIO()
    terminal = make_terminal(file=file)
    terminal.print("a [bold]b[/bold] \x1b[2J \x9b1m\tc\nruns/d:bug:e", markup=False)
    assert file.getvalue().split() == ["a", "[bold]b[/bold]", "c", "runs/d:bug:e"]
    file.truncate(0)
    terminal.print(ConsoleTracker(title="x\x1b]0;y\x07", terminal=terminal).view())
    assert "\x1b" not in file.getvalue()


def test_wins_and_ratings_are_shown_where_there_are_any() -> None:
    tracker = ConsoleTracker(1000, quiet=True)
    tracker.log({"mean_return": 1.0}, 10)
    assert "win rate" not in tracker.line()
    assert "rating" not in tracker.line()
    tracker.log({"episode/win": 0.625, "rating": 31.25, "rating_sigma": 1.5}, 20)
    assert "win rate in training 0.62" in tracker.line()
    assert "rating 31.2±3.0" in tracker.line()  # two sigma


def test_a_resumed_runs_best_is_that_of_all_its_evaluations(clock: Clock) -> None:
    tracker, out = plain(clock)
    tracker.start(500, 90.0)
    tracker.log({"evaluation/mean_return": 60.0, "evaluation/win_rate": 0.25}, 600)
    assert "win rate 0.25  evaluation 60.0  best 90.0" in out.getvalue()


def test_in_80_columns_the_bar_gives_way_and_no_word_is_broken(clock: Clock) -> None:
    tracker, _ = plain(clock, total=60_000, title="Skirmish-v0")
    clock.now = 4.0
    tracker.log({"loss": 0.5}, 54_777)
    out = io.StringIO()
    Terminal(file=out, force_terminal=True, width=80, color_system=None, _environ={"TERM": "xterm"}).print(tracker.view())
    head = out.getvalue().splitlines()[0]
    assert head.startswith("Skirmish-v0  ━━━")
    assert head.endswith("54,777/60,000 steps 91%  13,694 steps/s  0:00 left")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_silences_the_terminal_and_progress_bars_and_raises_nothing() -> None:
    with open("/dev/full", "w") as file:
        terminal = make_terminal(file=file)
        terminal.print("x" * 100_000)
        terminal.print("y")
        assert terminal.quiet
    with open("/dev/full", "w") as file, Progress(console=make_terminal(file=file)) as progress:
        progress.advance(progress.add_task("steps", total=2))


def test_everything_reaches_every_tracker_in_order() -> None:
    trackers = Mock()
    logger = StatsLogger([trackers.a, trackers.b])
    logger.log({"loss": 1.0}, 5)
    logger.log_params({"seed": 0})
    logger.log_artifact(Path("x"))
    logger.close()
    each = ("log", {"loss": 1.0}, 5), ("log_params", {"seed": 0}), ("log_artifact", Path("x")), ("close",)
    assert trackers.mock_calls == [getattr(getattr(call, name), method)(*given) for method, *given in each for name in "ab"]


def test_all_are_closed_even_if_one_cannot_be() -> None:
    trackers = Mock()
    trackers.a.close.side_effect = OSError("disk full")
    with pytest.raises(OSError, match="disk full"):
        StatsLogger([trackers.a, trackers.b]).close()
    trackers.b.close.assert_called_once_with()


def test_returns_of_agents_and_teams_are_labelled_and_the_win_rate_stands_first() -> None:
    tracker = ConsoleTracker(100, baseline="heuristic", terminal=make_terminal(file=io.StringIO()))
    evaluation = {"mean_return": 8.0, "win_rate": 0.75, "win_interval95_low": 0.53, "win_interval95_high": 0.89}
    tracker.log({"mean_return": 3.0, "episode/team_return": 6.0, **{f"evaluation/{name}": value for name, value in evaluation.items()}}, 10)
    line = tracker.line()
    assert (
        "win rate against heuristic 0.75 [0.53, 0.89]  return per agent 3.0  per team 6.0  evaluation per team 8.0  best per team 8.0"
        in line
    )


def test_the_difference_to_a_baseline_is_shown_with_its_interval() -> None:
    tracker = ConsoleTracker(100, baseline="random", terminal=make_terminal(file=io.StringIO()))
    difference = {"difference": 12.0, "difference_interval95_low": 10.5, "difference_interval95_high": 13.5}
    tracker.log({"evaluation/mean_return": 8.0, **{f"evaluation/{name}": value for name, value in difference.items()}}, 10)
    assert "evaluation 8.0  difference to random +12.0 [10.5, 13.5]  best 8.0" in tracker.line()
