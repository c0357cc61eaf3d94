"""Runs the fault programme, or some of it, and writes docs/reliability.md.

make faults                        every procedure, with its usual count (half an hour)
make faults IDS="A1 C7"            these alone; what was measured before stays on the page
make faults FACTOR=1               with the full counts of the programme
python -m faults --list            what there is (with . and tests on PYTHONPATH)
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from faults import page
from faults.programme import PEERS, ROOT, Procedure, Work, as_data, child_environment, load_all

LIMIT_SECONDS = 4 * 3600.0
console = Console()


def main() -> int:
    """The command."""
    options = _options()
    procedures = load_all()
    if options.list:
        console.print(_listing(procedures))
        return 0
    if options.one:
        return _run_here(options)
    unknown = [name for name in options.ids if name not in procedures]
    if unknown:
        console.print(f"there is no procedure {', '.join(unknown)}; --list shows all", markup=False)
        return 2
    chosen = [entry for name, entry in procedures.items() if not options.ids or name in options.ids]
    began = time.monotonic()
    fine = _run_all(chosen, options)
    page.write_page()
    minutes = (time.monotonic() - began) / 60
    console.print(f"{len(fine)} procedures in {minutes:.1f} minutes; {sum(fine)} fine; the page is {page.PAGE.relative_to(ROOT)}")
    return 0 if all(fine) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m faults", description="The fault programme.")
    parser.add_argument("ids", nargs="*", help="which procedures; all by default")
    parser.add_argument("--factor", type=float, default=None, help="share of the full counts; by default each procedure's usual count")
    parser.add_argument("--jobs", type=int, default=2, help="procedures at once; those that measure short times run alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-peers", action="store_true", help="leave the peers out")
    parser.add_argument("--list", action="store_true", help="what there is")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)  # ID or ID:peer, in a process of its own
    parser.add_argument("--count", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def count_of(entry: Procedure, factor: float | None) -> int:
    """How often: the usual count, or a share of the full one, at least once."""
    return entry.usual if factor is None else max(1, round(entry.full * factor))


def _run_here(options: argparse.Namespace) -> int:
    """One procedure in this process: progress and the outcome go to standard output as lines."""
    name, _, peer_name = options.one.partition(":")
    run = PEERS[name, peer_name] if peer_name else load_all()[name].run
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not stand between the lines

    def tick(done: int, total: int) -> None:
        lines.write(json.dumps({"done": done, "total": total}) + "\n")
        lines.flush()

    began = time.monotonic()
    outcome = run(Work(options.count, options.scratch, seed=options.seed, reduced=False, tick=tick))
    lines.write(json.dumps({"outcome": as_data(outcome, count=options.count, seconds=time.monotonic() - began)}) + "\n")
    lines.flush()
    return 0


def _run_all(chosen: list[Procedure], options: argparse.Namespace) -> list[bool]:
    jobs = [(entry, "") for entry in chosen]
    if not options.no_peers:
        jobs += [(entry, name) for entry in chosen for id, name in PEERS if id == entry.id]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    fine: list[bool] = []
    with Progress(*columns, console=console) as progress:
        together = [job for job in jobs if not job[0].alone]
        with concurrent.futures.ThreadPoolExecutor(max(1, options.jobs)) as pool:
            fine += pool.map(lambda job: _run_one(*job, options, progress), together)
        fine += [_run_one(*job, options, progress) for job in jobs if job[0].alone]
    return fine


def _run_one(entry: Procedure, peer_name: str, options: argparse.Namespace, progress: Progress) -> bool:
    """One procedure in a process of its own; keeps what it measured. A peer's failures are findings, not errors."""
    name = f"{entry.id}:{peer_name}" if peer_name else entry.id
    task = progress.add_task(f"{name} {entry.title[:50]}", total=None)
    count = count_of(entry, options.factor)
    if not entry.possible():
        page.keep(entry.id, peer_name, {"not_run": f"needs {entry.needs}", "count": count})
        return False
    own = Path(tempfile.mkdtemp(prefix=f"faults-{entry.id}-"))
    scratch, log = own / "scratch", own.with_suffix(".log")
    scratch.mkdir()  # with nobody beside it: some look there for what should not be
    command = [sys.executable, "-m", "faults", "--one", name, "--count", str(count), "--scratch", str(scratch), "--seed", str(options.seed)]
    try:
        found = _follow(command, log, progress, task)
    finally:
        shutil.rmtree(own, ignore_errors=True)
    found["measured"] = datetime.date.today().isoformat()
    page.keep(entry.id, peer_name, found)
    fine = found["passed"] == found["total"] > 0
    word = "fine" if fine else "NOT FINE" if not peer_name else "as found"
    progress.console.print(
        f"{name:28} {found['passed']}/{found['total']} {word} in {found['seconds']:.0f} s", markup=False, highlight=False
    )
    for failure in found["failures"][:3] if not peer_name else ():
        progress.console.print(f"    {failure[:300]}", markup=False, highlight=False)
    return fine or bool(peer_name)


def _follow(command: list[str], log: Path, progress: Progress, task: TaskID) -> dict[str, Any]:
    """The outcome of a procedure's process; one that ends without an outcome has failed."""
    began = time.monotonic()
    with log.open("wb") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=child_environment()) as process:
        assert process.stdout is not None
        for line in process.stdout:
            message = json.loads(line)
            if "outcome" in message:
                process.wait(timeout=60)
                log.unlink()
                return dict(message["outcome"])
            progress.update(task, completed=message["done"], total=message["total"])
    tail = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
    failure = f"the procedure itself ended with code {process.returncode}: {tail[0]} (see {log})"
    return {"passed": 0, "total": 1, "figures": {}, "failures": [failure], "notes": [], "count": 0, "seconds": time.monotonic() - began}


def _listing(procedures: dict[str, Procedure]) -> Table:
    table = Table("ID", "what", "must", "usual", "full", "in the suite")
    for entry in procedures.values():
        table.add_row(entry.id, entry.title, entry.must, str(entry.usual), str(entry.full), str(entry.test))
    return table


if __name__ == "__main__":
    sys.exit(main())
