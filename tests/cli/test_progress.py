import io

import pytest

from inchworm.cli import evaluate as module
from inchworm.cli.evaluate import progress
from inchworm.tracking.console import Terminal, make_terminal


def test_a_terminal_gets_a_bar() -> None:
    out = io.StringIO()
    terminal = Terminal(file=out, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    with progress("episodes", 4, terminal=terminal) as tell:
        tell(3)
    assert "episodes" in out.getvalue()
    assert "3/4" in out.getvalue()


def test_elsewhere_a_line_comes_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    with progress("episodes", 4000, terminal=make_terminal(file=out)) as tell:
        for now in (1.0, 9.0, 11.0, 12.0, 22.0):  # lines are at least ten seconds apart
            tell(int(now * 100))
    assert out.getvalue() == "episodes 1,100/4,000\nepisodes 2,200/4,000\n"


def test_quiet_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("episodes", 4, quiet=True) as tell:
        tell(1)
    assert capsys.readouterr().err == ""
