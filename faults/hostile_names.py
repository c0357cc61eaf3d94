"""B4 and B5: names that stay names, and text that steers no terminal and no page."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from faults.programme import Outcome, Work, procedure

CLIMBING = (
    "../../x",
    "/abs",
    "a\0b",
    "x" * 300,
    "..",
    ".",
    "",
    " ",
    "a/b",
    "a\\b",
    "~",
    "~root",
    "\n",
    "a\nb",
    "\ud800",
    ".tmp-x",
    "CON",
    "nul",
    "-rf",
    "ä" * 120,
    "*",
    "$(x)",
    "%s",
    "a:b",
)


@procedure(
    "B4",
    title="Names and paths that climb, end or choke",
    must="0 writes outside the run's directory; the error names the field",
    full=5000,
    test=60,
)
def names(work: Work) -> Outcome:
    """Run names, directories and environment ids, those that are known to hurt and those that Hypothesis thinks of."""
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    outcome = Outcome()
    real = work.scratch / "real"
    (real / "runs").mkdir(parents=True)
    (work.scratch / "linked").symlink_to(real)  # a parent that is a link
    before = _listing(work.scratch)
    done = 0
    ticks = work.each(work.count)
    part = st.text(max_size=40) | st.sampled_from(CLIMBING) | st.text(alphabet="./\\~ \0\nabc-", max_size=12)

    @settings(max_examples=work.count, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(part, min_size=1, max_size=3).map("/".join) | part | part, st.sampled_from(("run.name", "env.id", "run.directory")))
    def attempt(text: str, field: str) -> None:
        nonlocal done
        done += 1
        next(ticks, None)
        wrong = _named(text, field, work.scratch, before)
        outcome.check(not wrong, f"{field}={text!r}: {wrong}")

    attempt()
    for text in CLIMBING:
        for field in ("run.name", "env.id", "run.directory"):
            wrong = _named(text, field, work.scratch, before)
            outcome.check(not wrong, f"{field}={text!r}: {wrong}")
    return outcome


def _listing(scratch: Path) -> set[str]:
    return {str(path.relative_to(scratch)) for path in scratch.rglob("*")} | {f"beside {path.name}" for path in scratch.parent.iterdir()}


def _named(text: str, field: str, scratch: Path, before: set[str]) -> str:
    """Begin a run with this name; what is wrong with what came of it, or nothing."""
    from inchworm.config.sections import TrainingConfig
    from inchworm.core.errors import ConfigError
    from inchworm.run.directory import create_run

    home = scratch / "linked" / "runs"
    data: dict[str, Any] = {"run": {"directory": str(home)}}
    section, _, key = field.partition(".")
    # Whoever types a directory may climb; only what no directory can be is tried there.
    data.setdefault(section, {})[key] = f"{home}/in-{text.replace('..', '__')}" if field == "run.directory" else text
    try:
        run = create_run(TrainingConfig.from_dict(data))
    except ConfigError as error:
        new = sorted(_listing(scratch) - before)
        if new and field != "run.directory":  # whose parents may have been made before the last part was refused
            return f"refused, but there is {new[0]}"
        shutil.rmtree(home)
        home.mkdir()
        return "" if field in str(error) else f"the error names no {field}: {error}"
    made, wanted = Path(os.path.realpath(run.path)), Path(os.path.realpath(home))
    run.close()
    if not made.is_relative_to(wanted) or (field != "run.directory" and made.parent != wanted):
        return f"it was made at {made}"
    shutil.rmtree(wanted)
    wanted.mkdir()
    new = sorted(_listing(scratch) - before)
    return f"there is {new[0]}" if new else ""


HOSTILE_TEXT = (
    "[bold]x[/bold]",
    "[link=http://x]y[/link]",
    "[/]",
    "\x1b[2J\x1b]0;owned\x07",
    "\x9b31m",
    "a\rb",
    "<script>alert(1)</script>",
    '" onload="x',
    "{{7*7}}",
    "</style>",
    "|a|b|",
    "\u202eabc",
)


@procedure(
    "B5",
    title="Markup and control characters in names, metrics, messages and pages",
    must="shown as they are, obeyed by nobody",
    full=1,
    test=1,
)
def text_is_text(work: Work) -> Outcome:
    """Every place that prints a name from elsewhere: terminal, errors, warnings, the live view, a config's YAML, the pages of docs/."""
    outcome = Outcome()
    for text in HOSTILE_TEXT:
        for place, shown in _shown(text, work.scratch):
            obeyed = [c for c in shown if not c.isprintable() and c not in "\n\t "]
            kept = text.isprintable() is False or text in shown
            outcome.check(not obeyed and kept, f"{place} with {text!r}: {shown[-200:]!r}")
    from faults import page

    for text in HOSTILE_TEXT:
        cell = page.cell(text)
        outcome.check("<" not in cell and "|" not in cell.replace("\\|", ""), f"a page's cell with {text!r}: {cell!r}")
    for text in HOSTILE_TEXT:
        outcome.check(not (wrong := _replay_page_obeys(text)), f"the page of a replay with {text!r}: {wrong}")
    outcome.notes.append("the pages of replays are opened in a browser, too, where there is one: tests/worlds/test_replay_browser.py")
    return outcome


def _replay_page_obeys(text: str) -> str:
    """What a text in every place of a replay changes in its page but the data; nothing, where all is well."""
    from doubles.replays import small_replay
    from inchworm.worlds.replay import replay_page

    replay, rest = small_replay(), []
    replay["world"] |= {"game": text, "teams": [text, text]}
    replay["world"]["units"][0]["kind"] = text
    replay["meta"] = {"players": [text, text], text: [text]}
    opening = '<script type="application/json" id="replay">'
    for page in (replay_page(replay), replay_page(small_replay())):
        before, _, after = page.partition(opening)
        data, _, after = after.partition("</script>")
        rest.append((before, after))
        if set(data) & set("<>&") or not data.isascii() or not data.isprintable():
            return "characters that are more than text"
    return "" if rest[0] == rest[1] else "other markup"


def _shown(text: str, scratch: Path) -> Iterator[tuple[str, str]]:
    """(where, what is printed there for `text`), without colours of our own."""
    from inchworm.cli.main import main
    from inchworm.tracking.console import ConsoleTracker, make_terminal

    def said(arguments: list[str]) -> str:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main(arguments)
        return out.getvalue() + err.getvalue()

    file = io.StringIO()
    make_terminal(file=file).print(f"training {text}", markup=False)
    yield "the terminal", file.getvalue()
    file = io.StringIO()
    terminal = make_terminal(file=file)
    tracker = ConsoleTracker(10, title=text, terminal=terminal)
    terminal.print(tracker.view())
    yield "the live view", file.getvalue()
    config = scratch / "x.yaml"
    config.write_text(json.dumps({text: 1}))
    yield "an unknown key", said(["config", "--config", str(config)])
    config.write_text(json.dumps({"env": {"id": text}}))
    yield "an environment's id", said(["config", "--config", str(config)])
    config.write_text(json.dumps({"run": {"name": text, "directory": str(scratch / text.replace("/", "_"))}}))
    yield "a run's name", said(["config", "--config", str(config)])
    yield "a run that is not there", said(["evaluate", text])
    yield "an unknown command", said([text])
