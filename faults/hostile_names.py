"""B3 to B6: loaders that run code, names that escape their directory, text that controls a terminal or page, secrets."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from doubles.replays import small_replay
from doubles.run_files import write_run
from faults import page
from faults.programme import ROOT, Outcome, Work, procedure
from inchworm.analysis.report import report_page
from inchworm.analysis.runs import read_run
from inchworm.cli.main import main
from inchworm.config.sections import TrainingConfig
from inchworm.core.errors import ConfigError
from inchworm.run.directory import create_run
from inchworm.tracking.console import ConsoleTracker, make_terminal
from inchworm.worlds.replay import replay_page

BANNED_MODULES = {"pickle", "cPickle", "_pickle", "dill", "joblib", "shelve", "marshal", "cloudpickle", "jsonpickle", "dbm"}
BANNED_CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.load", "torch.jit.load", "yaml.load",
    "yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "np.load", "numpy.load", "pickle.load", "pickle.loads",
    "cloudpickle.load", "cloudpickle.loads", "tempfile.mktemp", "shutil.unpack_archive",
}  # fmt: skip
ALLOWED = {
    ("env/workers/program.py", "cloudpickle.loads"),
    ("env/workers/program.py", "cloudpickle"),
    ("env/workers/pool.py", "cloudpickle"),
}
"""Factories are sent to workers by cloudpickle over a private socket; nothing else reads pickles, and no file is one."""


@procedure("B3", full=1, test=0)
def nothing_unpickles(work: Work) -> Outcome:
    """No loader that runs code: source, and an audit hook on train, resume, evaluate, collect, learn.

    Must: 0 hits.
    Every module is searched; then whole commands run under a hook that records every unpickling.
    """
    outcome = Outcome()
    package = ROOT / "src" / "inchworm"
    for path in sorted(package.rglob("*.py")):
        name, uses = path.relative_to(package).as_posix(), list[str]()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found: list[str] = []
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names if alias.name.partition(".")[0] in BANNED_MODULES]
            elif isinstance(node, ast.ImportFrom):
                found = [node.module] if node.module and node.module.partition(".")[0] in BANNED_MODULES else []
            elif isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                found = [called] if called in BANNED_CALLS else []
                found += [f"{called}({word.arg})" for word in node.keywords if word.arg in ("allow_pickle", "shell", "weights_only")]
            uses += [f"{name}:{node.lineno}: {use}" for use in found if (name, use) not in ALLOWED]
        outcome.check(not uses, "; ".join(uses))
    for backend in ("numpy", "torch"):
        run, rollout = f"runs/{backend}", f"{backend}.safetensors"
        for command in (
            ["train", "CartPole-v1", *SMALL, "--num-workers", "1", "--backend", backend, "--run.name", backend],
            ["resume", run, "--total-timesteps", "64"],
            ["evaluate", run, "--episodes", "2"],
            ["collect", run, "--out", rollout],
            ["learn", run, rollout],
        ):
            line = [sys.executable, "-c", _AUDITED, *command, "--quiet"]
            ended = subprocess.run(line, cwd=work.scratch, capture_output=True, text=True, timeout=180)
            last = (ended.stderr.strip().splitlines() or [""])[-1]
            outcome.check(ended.returncode == 0 and json.loads(last) == [0, []], f"{backend}: inchworm {command[0]}: {last}")
    outcome.notes.append("the suite does not run under the hook, because test tools and peers unpickle; B1 audits every loader")
    return outcome


_AUDITED = """
import sys, json
hits = []
def audit(event, arguments):
    if event in ("pickle.find_class", "os.system"):
        hits.append(f"{event} {arguments!r}"[:200])
sys.addaudithook(audit)
from inchworm.cli.main import main
code = main(sys.argv[1:])
sys.stderr.write("\\n" + json.dumps([code, hits]) + "\\n")
"""
"""A command under a hook that records every unpickling."""
SMALL = ["--num-envs", "2", "--ppo.rollout-steps", "8", "--ppo.num-minibatches", "2", "--ppo.update-epochs", "1"]
SMALL += ["--total-timesteps", "32", "--evaluation.final-episodes", "2"]


CLIMBING = (
    "../../x", "/abs", "a\0b", "x" * 300, "..", ".", "", " ", "a/b", "a\\b", "~", "~root", "\n", "a\nb", "\ud800", ".tmp-x", "CON",
    "nul", "-rf", "ä" * 120, "*", "$(x)", "%s", "a:b",
)  # fmt: skip


@procedure("B4", full=5000, test=60)
def names(work: Work) -> Outcome:
    """Names and paths that escape their directory, end early or are invalid.

    Must: 0 writes outside the run's directory; the error names the field.
    Run names, directories and environment ids, known to be harmful or made by Hypothesis.
    """
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    outcome = Outcome()
    real = work.scratch / "real"
    (real / "runs").mkdir(parents=True)
    (work.scratch / "linked").symlink_to(real)  # a parent that is a link
    before = _listing(work.scratch)
    ticks = work.each(work.count)
    part = st.text(max_size=40) | st.sampled_from(CLIMBING) | st.text(alphabet="./\\~ \0\nabc-", max_size=12)

    @settings(max_examples=work.count, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(part, min_size=1, max_size=3).map("/".join) | part | part, st.sampled_from(("run.name", "env.id", "run.directory")))
    def attempt(text: str, field: str) -> None:
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
    return {str(path.relative_to(scratch)) for path in scratch.rglob("*")} | {f"../{path.name}" for path in scratch.parent.iterdir()}


def _named(text: str, field: str, scratch: Path, before: set[str]) -> str:
    """Begin a run with this name; what is wrong with what came of it, or nothing."""
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
    "[bold]x[/bold]", "[link=http://x]y[/link]", "[/]", "\x1b[2J\x1b]0;owned\x07", "\x9b31m", "a\rb", "<script>alert(1)</script>",
    '" onload="x', "{{7*7}}", "</style>", "|a|b|", "\u202eabc",
)  # fmt: skip


@procedure("B5", full=1, test=1)
def text_is_text(work: Work) -> Outcome:
    """Markup and control characters in names, metrics, messages and pages.

    Must: shown as they are, never interpreted.
    Every place that prints a name from elsewhere: terminal, errors, warnings, the live view, a config's YAML, the pages of docs/.
    """
    outcome = Outcome()
    for text in HOSTILE_TEXT:
        for place, shown in _shown(text, work.scratch):
            obeyed = [c for c in shown if not c.isprintable() and c not in "\n\t "]
            kept = text.isprintable() is False or text in shown
            outcome.check(not obeyed and kept, f"{place} with {text!r}: {shown[-200:]!r}")
        cell = page.cell(text)
        outcome.check("<" not in cell and "|" not in cell.replace("\\|", ""), f"a page's cell with {text!r}: {cell!r}")
        outcome.check(not (wrong := _replay_page_obeys(text)), f"the page of a replay with {text!r}: {wrong}")
        outcome.check(not (wrong := _report_obeys(text, work.scratch)), f"the report of a run with {text!r}: {wrong}")
    outcome.notes.append("the pages of replays and reports are opened in a browser, too, where there is one: tests/worlds, tests/analysis")
    return outcome


class _Tags(HTMLParser):
    """The elements of a page, each with the names of its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[str, ...]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, tuple(name for name, _ in attrs)))


def _report_obeys(text: str, scratch: Path) -> str:
    """What a text in the names and values of a run adds to its report but text and numbers."""
    pages = []
    for name in ("plain", text):
        directory = write_run(scratch / f"report-{len(list(scratch.iterdir()))}", rows=8, **{name: 1.0, f"episode/{name}": 2.0})
        (directory / "versions.json").write_text(json.dumps({name: name}))
        (directory / "outcome.json").write_text(json.dumps({"outcome": "failed", "reason": name}))
        pages.append(report_page([read_run(directory)]))
    tags = [_Tags(page).found for page in pages]
    return "" if tags[0] == tags[1] else "other markup"


def _replay_page_obeys(text: str) -> str:
    """What a text in every place of a replay changes in its page but the data; nothing, where all is well."""
    replay, rest = small_replay(), []
    replay["world"] |= {"game": text, "teams": [text, text]}
    replay["world"]["units"][0]["kind"] = text
    replay["meta"] = {"players": [text, text], text: [text]}
    opening = '<script type="application/json" id="replay">'
    for html in (replay_page(replay), replay_page(small_replay())):
        before, _, after = html.partition(opening)
        data, _, after = after.partition("</script>")
        rest.append((before, after))
        if set(data) & set("<>&") or not data.isascii() or not data.isprintable():
            return "characters that are more than text"
    return "" if rest[0] == rest[1] else "other markup"


def _shown(text: str, scratch: Path) -> Iterator[tuple[str, str]]:
    """(where, what is printed there for `text`), without colours of our own."""

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


SECRETS = (
    "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "WANDB_API_KEY", "GITHUB_TOKEN", "MLFLOW_TRACKING_PASSWORD", "DATABASE_URL",
    "HTTPS_PROXY", "PGPASSWORD",
)  # fmt: skip


@procedure("B6", full=1, test=0)
def secrets(work: Work) -> Outcome:
    """Secrets in the environment.

    Must: 0 found in checkpoints, configs, metrics, versions, dumps, output.
    Runs that end well, in a worker's error, and in a dump of bad numbers; then every file and every line of output is searched.
    """
    outcome = Outcome()
    marks = {name: f"canary-{number:04d}-{os.urandom(8).hex()}" for number, name in enumerate(SECRETS)}
    (work.scratch / "worlds.py").write_text(_WORLDS)
    environment = {**os.environ, **marks}
    for backend in ("numpy", "torch"):
        for number, (world, workers) in enumerate((("CartPole-v1", 1), ("worlds:breaks", 1), ("worlds:huge", 0))):
            options = ["--num-workers", str(workers), "--backend", backend, "--run.name", f"{backend}{number}"]
            command = [sys.executable, "-m", "inchworm", "train", world, *SMALL, *options]
            ended = subprocess.run(command, cwd=work.scratch, env=environment, capture_output=True, timeout=180)
            found = [name for name, mark in marks.items() if mark.encode() in ended.stdout + ended.stderr]
            outcome.check(not found, f"{world} printed {found}")
            outcome.check(ended.returncode == (0 if number == 0 else 1), f"{world} ended with {ended.returncode}: {ended.stderr[-300:]!r}")
    files = [path for path in work.scratch.rglob("*") if path.is_file() and path.name != "worlds.py"]
    for path in files:
        content = path.read_bytes()
        found = [name for name, mark in marks.items() if mark.encode() in content]
        outcome.check(not found, f"{path.relative_to(work.scratch)} holds {found}")
    outcome.figures = {"files searched": str(len(files))}
    return outcome


_WORLDS = """
import gymnasium as gym

class Breaks(gym.Wrapper):
    def step(self, action):
        raise RuntimeError("broken on purpose")

class Huge(gym.RewardWrapper):
    def reward(self, reward):
        return 1e30

def breaks():
    return Breaks(gym.make("CartPole-v1"))

def huge():
    return Huge(gym.make("CartPole-v1"))
"""
