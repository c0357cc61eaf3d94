"""The display of several seeds."""

import io

from inchworm.core.types import SeedEvent
from inchworm.tracking.console import SeedsView, Terminal, make_terminal


def shown(view: SeedsView) -> str:
    terminal = Terminal(file=io.StringIO(), record=True, width=120)
    terminal.print(view.view())
    return terminal.export_text()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_plain_lines_at_the_end_of_a_seed_and_every_few_seconds() -> None:
    out, clock = io.StringIO(), Clock()
    view = SeedsView(range(4), 1_000, terminal=make_terminal(file=out), clock=clock)
    view.start({0: 5.0})
    view.update(SeedEvent(1, "progress", 0))
    view.update(SeedEvent(2, "progress", 100))
    clock.now = 10.0
    view.update(SeedEvent(1, "progress", 400, {"mean_return": 3.0}))
    # 400 of the 400 + 900 + 1,000 steps that seeds 1 to 3 had left took 10 s, so that 600 + 900 + 1,000 take 62.5 s.
    assert out.getvalue().splitlines() == [
        "1 of 4 seeds are done already",
        "1/4 seeds done  running: 1 at 40%, 2 at 10%  0:10 elapsed, 1:02 left",
    ]
    view.update(SeedEvent(1, "done", 1_000), score=7.25)
    view.update(SeedEvent(2, "failed", text="a wire came loose"))
    view.update(SeedEvent(3, "done", 1_000))
    view.close()
    assert out.getvalue().splitlines()[2:] == [
        "seed 1: done, score 7.25 (2 of 4 seeds done)",
        "seed 2: failed: a wire came loose (2 of 4 seeds done)",
        "seed 3: done (3 of 4 seeds done)",
    ]
    assert view.line() == "3/4 seeds done, 1 failed  0:10 elapsed"


def test_the_live_view_has_a_line_for_all_one_for_each_running_seed_and_the_scores() -> None:
    out = io.StringIO()
    terminal = Terminal(file=out, force_terminal=True, width=120)
    view = SeedsView(range(3), 1_000, title="CartPole-v1", terminal=terminal, clock=Clock(), seconds_between_draws=0.0)
    view.start({})
    view.update(SeedEvent(0, "done", 1_000), score=499.5)
    view.update(SeedEvent(1, "progress", 500, {"mean_return": 20.0, "evaluation/mean_return": 30.0}))
    lines = shown(view).splitlines()
    assert lines[0].startswith("CartPole-v1")
    assert "1/3 seeds done" in lines[0]
    assert lines[1].startswith("seed 1")
    assert lines[1].rstrip().endswith("500/1,000 steps  return 20  evaluation 30")
    assert lines[2].rstrip() == "done  0: 499.5"
    view.update(SeedEvent(1, "failed", text="it broke"))
    assert "seed 1 failed: it broke" in shown(view)
    view.close()
    assert "499.5" in out.getvalue()
