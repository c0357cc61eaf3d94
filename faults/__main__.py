"""Run the fault programme, or a part of it, and write docs/reliability.md.

make faults                        every procedure with its usual count (half an hour)
make faults IDS="A1 C7"            only these; earlier results of the others stay on the page
make faults FACTOR=1               with the full counts of the programme
python -m faults --list            list the procedures (with . and tests on PYTHONPATH)
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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from faults import page
from faults.programme import PEERS, ROOT, Outcome, Procedure, Work, as_data, child_environment, load_all


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults", description="The fault programme.")
    parser.add_argument("ids", nargs="*", help="which procedures; all by default")
    parser.add_argument("--factor", type=float, default=None, help="share of the full counts; by default the usual count of each")
    parser.add_argument("--jobs", type=int, default=2, help="procedures at once; those that measure short times run alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-peers", action="store_true", help="leave the peers out")
    parser.add_argument("--dry-run", action="store_true", help="neither store results nor write the page")
    parser.add_argument("--list", action="store_true", help="list the procedures")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)  # ID or ID:peer, in a child process
    parser.add_argument("--count", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    procedures, console = load_all(), Console()
    if options.list:
        table = Table("ID", "what", "must", "usual", "full", "in the suite")
        for entry in procedures.values():
            table.add_row(entry.id, entry.title, entry.must, str(entry.usual), str(entry.full), str(entry.test))
        console.print(table)
        return 0
    if options.one:
        return run_here(options)
    unknown = [name for name in options.ids if name not in procedures]
    if unknown:
        console.print(f"there is no procedure {', '.join(unknown)}; --list shows all", markup=False)
        return 2
    began = time.monotonic()
    jobs = [(entry, "") for name, entry in procedures.items() if not options.ids or name in options.ids]
    if not options.no_peers:
        jobs += [(entry, name) for entry, _ in jobs for id, name in PEERS if id == entry.id]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        with concurrent.futures.ThreadPoolExecutor(max(1, options.jobs)) as pool:
            passed = list(pool.map(lambda job: run_in_child(*job, options, progress), [job for job in jobs if not job[0].alone]))
        passed += [run_in_child(*job, options, progress) for job in jobs if job[0].alone]
    if not options.dry_run:
        page.PAGE.write_text(page.page_text(procedures, page.read_all()), encoding="utf-8")
    minutes = (time.monotonic() - began) / 60
    console.print(f"{len(passed)} procedures in {minutes:.1f} minutes; {sum(passed)} passed; the page is {page.PAGE.relative_to(ROOT)}")
    return 0 if all(passed) else 1


def count_of(entry: Procedure, factor: float | None) -> int:
    """The usual count, or a share of the full one, at least 1."""
    return entry.usual if factor is None else max(1, round(entry.full * factor))


def run_here(options: argparse.Namespace) -> int:
    """Run one procedure in this process; progress and outcome go to standard output as lines of JSON."""
    name, _, peer_name = options.one.partition(":")
    run = PEERS[name, peer_name] if peer_name else load_all()[name].run
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of libraries must not come between the lines

    def tick(done: int, total: int) -> None:
        lines.write(json.dumps({"done": done, "total": total}) + "\n")
        lines.flush()

    began = time.monotonic()
    outcome = run(Work(options.count, options.scratch, seed=options.seed, reduced=False, tick=tick))
    lines.write(json.dumps({"outcome": as_data(outcome, count=options.count, seconds=time.monotonic() - began)}) + "\n")
    lines.flush()
    return 0


def run_in_child(entry: Procedure, peer_name: str, options: argparse.Namespace, progress: Progress) -> bool:
    """Run one procedure in a child process, store its result and return whether it passed. Failures of a peer are findings."""
    name = f"{entry.id}:{peer_name}" if peer_name else entry.id
    task = progress.add_task(f"{name} {entry.title[:50]}", total=None)
    count = count_of(entry, options.factor)
    if not entry.possible():
        if not options.dry_run:
            page.keep(entry.id, peer_name, {"not_run": f"needs {entry.needs}", "count": count})
        return False
    parent = Path(tempfile.mkdtemp(prefix=f"faults-{entry.id}-"))
    scratch, log = parent / "scratch", parent.with_suffix(".log")
    scratch.mkdir()  # alone in its parent: some procedures check that nothing appears next to it
    command = [sys.executable, "-m", "faults", "--one", name, "--count", str(count), "--scratch", str(scratch), "--seed", str(options.seed)]
    found: dict[str, Any] = {}
    began = time.monotonic()
    with log.open("wb") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=child_environment()) as process:
        assert process.stdout is not None
        for message in map(json.loads, process.stdout):
            found = message.get("outcome", found)
            if not found:
                progress.update(task, completed=message["done"], total=message["total"])
    shutil.rmtree(parent, ignore_errors=True)
    if found:
        log.unlink()
    else:
        last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
        failure = f"the procedure itself ended with code {process.returncode}: {last} (see {log})"
        found = as_data(Outcome(total=1, failures=[failure]), count=0, seconds=time.monotonic() - began)
    found["measured"] = datetime.date.today().isoformat()
    if not options.dry_run:
        page.keep(entry.id, peer_name, found)
    passed = found["passed"] == found["total"] > 0
    word = "passed" if passed else "FAILED" if not peer_name else "as found"
    lines = [f"{name:28} {found['passed']}/{found['total']} {word} in {found['seconds']:.0f} s"]
    lines += [f"    {failure[:300]}" for failure in found["failures"][:3] if not peer_name]
    progress.console.print("\n".join(lines), markup=False, highlight=False)
    return passed or bool(peer_name)


if __name__ == "__main__":
    sys.exit(main())
