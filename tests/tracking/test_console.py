import io
import os
import re
import sys
import threading
from types import ModuleType
from typing import Any

import pytest
from rich.progress import Progress

from inchworm.core.types import Activity
from inchworm.tracking.console import ConsoleTracker, Curve, Terminal, detach, make_terminal


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


def as_terminal(out: io.StringIO, width: int = 160) -> Terminal:
    return Terminal(file=out, force_terminal=True, width=width, highlight=False, color_system=None, _environ={"TERM": "xterm"})


def live(clock: Clock, total: int | None = 1000, seconds_between_draws: float = 1e6) -> tuple[ConsoleTracker, io.StringIO]:
    """A live view that is drawn by `draw()` only, unless the seconds are given."""
    out = io.StringIO()
    options: dict[str, Any] = {"clock": clock, "seconds_between_draws": seconds_between_draws}
    return ConsoleTracker(total, title="CartPole-v1", terminal=as_terminal(out), **options), out


def test_a_plain_line_tells_progress_speed_time_left_scores_and_losses(clock: Clock) -> None:
    tracker, out = plain(clock)
    clock.now = 2.0
    # 250 steps in 2 s: 125 steps/s, and the other 750 take 6 s
    tracker.log({"mean_return": 21.25, "loss": 0.5, "approx_kl": 0.0123, "entropy": 0.6, "value_loss": 3.0}, 250)
    assert out.getvalue() == "250/1,000 steps 25%  125 steps/s  0:02 elapsed, 0:06 left  return 21.2  loss 0.5  entropy 0.6  kl 0.0123\n"


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
    assert "600/1,000 steps 60%  100 steps/s  0:01 elapsed, 0:04 left" in tracker.line()


def test_nothing_is_known_before_the_clock_moved_and_without_a_target(clock: Clock) -> None:
    tracker, out = plain(clock, None)
    tracker.log({}, 10)
    assert out.getvalue() == "10 steps  0:00 elapsed\n"


def test_long_times_have_hours(clock: Clock) -> None:
    tracker, out = plain(clock, 1_000_000)
    clock.now = 1.0
    tracker.log({}, 100)  # 999,900 steps at 100 a second are 9,999 s = 2 h 46 min 39 s
    assert "2:46:39 left" in out.getvalue()


def test_the_live_view_shows_bar_scores_and_losses_and_rows_alone_draw_nothing(clock: Clock) -> None:
    tracker, out = live(clock)
    tracker.start()
    assert "0/1,000 steps" in out.getvalue()
    drawn = len(out.getvalue())
    for tick in range(1, 101):
        clock.now = tick / 100
        tracker.log({"mean_return": 20.0, "loss": 0.25, "explained_variance": 0.5}, tick)
    tracker.log({"evaluation/mean_return": 432.1}, 500)
    assert len(out.getvalue()) == drawn
    tracker.close()
    shown = out.getvalue()[drawn:]
    for text in ("500/1,000 steps 50%", "━", "return 20.0", "evaluation 432.1", "best 432.1", "loss 0.25", "explained variance 0.5"):
        assert text in shown
    assert "0:01 elapsed, 0:01 left" in shown  # 500 steps a second
    tracker.log({}, 600)  # a second view after closing, below the first
    tracker.close()
    assert "600/1,000 steps 60%" in out.getvalue()


def test_the_live_view_moves_within_an_iteration(clock: Clock) -> None:
    tracker, out = live(clock)
    now = Activity(100, 3, "collecting", 0.25)
    tracker.start(100, None, lambda: now)
    tracker.log({"loss": 1.0}, 100)
    now = Activity(150, 3, "collecting", 0.5)
    clock.now = 2.0
    tracker.draw()
    head, doing = out.getvalue().splitlines()[-4:-2]
    assert "150/1,000 steps 15%" in head
    assert re.fullmatch(r"iteration 3  collecting  ━+[╸╺]? +50%  0:02 elapsed", doing.strip())
    now = Activity(200, 3, "learning")
    tracker.draw()
    assert "iteration 3  learning  0:02 elapsed" in out.getvalue()
    tracker.close()
    assert "iteration" not in out.getvalue().splitlines()[-3]  # nothing is being done any more


def test_a_thread_draws_the_live_view_until_it_is_closed(clock: Clock) -> None:
    tracker, _ = live(clock, seconds_between_draws=0.001)
    seen: list[threading.Thread] = []
    enough = threading.Event()

    def watch() -> Activity:
        seen.append(threading.current_thread())
        if len(seen) == 5:
            enough.set()
        return Activity(0, 1, "collecting", 0.0)

    tracker.start(0, None, watch)
    assert enough.wait(120)
    tracker.close()
    assert seen[0] is threading.current_thread() is not seen[4]
    assert seen[4].daemon
    assert not seen[4].is_alive()


class Reflowing(io.StringIO):
    """A terminal as text: rows, cursor, and lines that wrap when it is made narrower."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.row, self.column = [""], 0, 0

    def write(self, text: str) -> int:
        for number, code, line in re.findall(r"\x1b\[([?\d;]*)([A-Za-z])|([\r\n]|[^\x1b\r\n]+)", text):
            if code == "A":
                self.row -= int(number)
            elif code == "K":
                self.rows[self.row] = ""
            elif line == "\n":
                self.row, self.column = self.row + 1, 0
                self.rows += [""] * (self.row == len(self.rows))
            elif line == "\r":
                self.column = 0
            elif line:
                row = self.rows[self.row].ljust(self.column)
                self.rows[self.row] = row[: self.column] + line + row[self.column + len(line) :]
                self.column += len(line)
        return len(text)

    def narrow(self, width: int) -> None:
        below = len(self.rows) - self.row
        self.rows = [row[at : at + width] for row in self.rows for at in range(0, max(1, len(row)), width)]
        self.row = len(self.rows) - below


def test_a_narrower_terminal_has_no_stale_lines(clock: Clock) -> None:
    out = Reflowing()
    terminal = as_terminal(out, 120)
    terminal.print("before " * 12)
    tracker = ConsoleTracker(1000, title="CartPole-v1", terminal=terminal, clock=clock, seconds_between_draws=1e6)
    clock.now = 1.0
    losses = dict.fromkeys(("loss", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "explained_variance"), 0.123)
    tracker.log({"mean_return": 20.0, **losses}, 100)
    tracker.draw()
    for width in (70, 50, 25, 110):
        if width < 110:
            out.narrow(width)
        terminal.width = width
        tracker.draw()
        fresh = Reflowing()
        as_terminal(fresh, width).print(tracker.view(), end="")
        view = [row.rstrip() for row in fresh.rows if row]
        rows = [row for row in out.rows if row]
        assert [row.rstrip() for row in rows[-len(view) :]] == view
        assert "".join(rows[: -len(view)]).rstrip() == ("before " * 12).rstrip()  # it stays, and nothing else does
    terminal.print("a line above")
    tracker.close()
    assert sum("return 20.0" in row for row in out.rows) == 1


def test_a_curve_shows_the_whole_run_in_a_few_characters() -> None:
    curve = Curve()
    curve.add(5.0)
    assert str(curve) == ""
    curve.add(5.0)
    assert str(curve) == "▄▄"
    for value in (10.0, 40.0):
        curve.add(value)
    assert str(curve) == "▁▁▂█"  # 5 is 0/35 of the way, 10 is 5/35: round(7 * 5 / 35) = 1
    for value in range(1000):
        curve.add(float(value))
    assert len(str(curve)) <= 24
    assert (str(curve)[0], str(curve)[-1]) == ("▁", "█")
    assert list(str(curve)) == sorted(str(curve))  # it rises from the first value to the last
    curve.add(float("inf"))
    assert str(curve) == ""


def test_returns_and_evaluations_have_curves_where_the_terminal_can_show_them(clock: Clock) -> None:
    tracker, out = live(clock)
    for step, value in enumerate((10.0, 20.0, 30.0)):
        tracker.log({"mean_return": value, "evaluation/mean_return": -value}, step)
    tracker.draw()
    assert "return 30.0 ▁▅█  evaluation -30.0 █▅▁  best -10.0" in re.sub(r"(?<=\S) {3,}", "  ", out.getvalue())
    assert "▁" not in tracker.line()
    tracker.close()
    tracker, out = live(clock)
    for step, rate in enumerate((0.25, 0.5)):
        tracker.log({"evaluation/mean_return": -rate, "evaluation/win_rate": rate}, step)
    tracker.draw()
    assert re.search(r"win rate 0\.50 ▁█ +evaluation -0\.5 +best", out.getvalue())  # of the win rate where there is one
    tracker.close()
    file = io.TextIOWrapper(io.BytesIO(), "ascii")
    ascii_only = Terminal(file=file, force_terminal=True, width=160, color_system=None, _environ={"TERM": "xterm"})
    tracker = ConsoleTracker(1000, terminal=ascii_only, clock=clock, seconds_between_draws=1e6)
    for step in range(3):
        tracker.log({"mean_return": float(step)}, step)
    tracker.close()
    file.seek(0)
    assert "return 2.0" in file.read()


def test_in_a_notebook_one_output_is_updated_and_ipywidgets_are_not_needed(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, dict[str, str]]] = []

    class Handle:
        def update(self, view: Any) -> None:
            shown.append(("update", view._repr_mimebundle_([], [])))

    def display(view: Any, *, display_id: bool) -> Handle:
        assert display_id
        shown.append(("display", view._repr_mimebundle_([], [])))
        return Handle()

    ipython = ModuleType("IPython.display")
    ipython.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", ipython)
    terminal = Terminal(force_jupyter=True)
    tracker = ConsoleTracker(1000, title="<CartPole>", terminal=terminal, clock=clock, seconds_between_draws=1e6)
    tracker.start(0, None, lambda: Activity(50, 1, "collecting", 0.5))
    tracker.log({"mean_return": 20.0}, 100)
    tracker.draw()
    tracker.close()
    assert [kind for kind, _ in shown] == ["display", "update", "update"]
    first, middle, last = (bundle["text/plain"] for _, bundle in shown)
    assert ("50/1,000 steps" in first, "collecting" in first) == (True, True)
    assert "return 20.0" in middle
    assert ("100/1,000 steps 10%" in last, "collecting" in last) == (True, False)
    assert "&lt;CartPole&gt;" in shown[-1][1]["text/html"]
    assert "\x1b" not in last


def test_without_ipython_a_notebook_gets_lines(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython.display", None)
    tracker = ConsoleTracker(1000, terminal=Terminal(force_jupyter=True, quiet=False), clock=clock)
    tracker.start()
    tracker.log({}, 10)
    assert tracker._screen is None
    tracker.close()


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
    terminal.print("a [bold]b[/bold] \x1b[2J \x9b1m\tc\nruns/d:bug:e")
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
    head, times = (line.rstrip() for line in out.getvalue().splitlines()[:2])
    assert head.startswith("Skirmish-v0  ━━━")
    assert head.endswith("54,777/60,000 steps 91%  13,694 steps/s")
    assert times == "0:04 elapsed, 0:00 left"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_silences_the_terminal_and_progress_bars_and_raises_nothing() -> None:
    with open("/dev/full", "w") as file:
        terminal = make_terminal(file=file)
        terminal.print("x" * 100_000)
        terminal.print("y")
        assert terminal.quiet
    with open("/dev/full", "w") as file, Progress(console=make_terminal(file=file)) as progress:
        progress.advance(progress.add_task("steps", total=2))


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
