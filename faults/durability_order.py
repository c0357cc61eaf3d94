"""A5: the order of system calls in a save, so that a power loss can take nothing that was said to be saved."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from faults import durability_strace
from faults.durability_fork import inchworm
from faults.durability_points import writer
from faults.durability_run_points import arguments
from faults.durability_runs import NAME
from faults.durability_strace import Call
from faults.programme import Outcome, Work, procedure

WRITES = ("write", "pwrite64", "writev", "ftruncate")
CALLS = (*durability_strace.CALLS, "pwrite64", "writev")
_PATH = re.compile(r'"([^"]*)"')
_DESCRIPTOR = re.compile(r"^\d+<([^>]*)>")


@dataclass
class Disk:
    """What is on the disk for certain, by the log: a file's bytes after its fsync, a name after its directory's."""

    below: Path
    dirty: set[str] = field(default_factory=set)
    """Files with bytes that have not been synced."""
    unsynced: dict[str, str] = field(default_factory=dict)
    """New or changed names -> their directory, until that is synced."""
    violations: list[str] = field(default_factory=list)
    renames: int = 0

    def see(self, call: Call) -> None:
        """Follow one call."""
        if call.failed:
            return
        if call.name in WRITES:
            self._write(_DESCRIPTOR.match(call.text))
        elif call.name in ("fsync", "fdatasync"):
            self._sync(_DESCRIPTOR.match(call.text))
        elif call.name.startswith("mkdir"):
            self._name(self._paths(call)[0])
        elif call.name.startswith("rename"):
            self._rename(*self._paths(call)[:2])
        elif call.name == "openat" and "O_CREAT" in call.text:
            self._name(self._paths(call)[0])

    def _paths(self, call: Call) -> list[str]:
        return [str(Path(self.below.parent, found)) for found in _PATH.findall(call.text)]

    def _write(self, match: re.Match[str] | None) -> None:
        if match and match[1].startswith(str(self.below)):
            self.dirty.add(match[1])

    def _sync(self, match: re.Match[str] | None) -> None:
        if match:
            self.dirty.discard(match[1])
            self.unsynced = {name: parent for name, parent in self.unsynced.items() if parent != match[1]}

    def _name(self, path: str) -> None:
        if path.startswith(str(self.below)):
            self.unsynced[path] = str(Path(path).parent)

    def _rename(self, old: str, new: str) -> None:
        """A rename that commits: everything that goes with it must be on the disk before."""
        inside = f"{old}/"
        if not Path(new).name.startswith(".tmp-"):
            self.renames += 1
            late = [path for path in self.dirty if path == old or path.startswith(inside)]
            late += [name for name, parent in self.unsynced.items() if parent == old or parent.startswith(inside)]
            self.violations += [f"{Path(new).name} got its name before {Path(path).name} was synced" for path in late]
            self._check_before(new)
        self.dirty = {path for path in self.dirty if path != old and not path.startswith(inside)}
        self.unsynced = {name: parent for name, parent in self.unsynced.items() if name != old and not name.startswith(inside)}
        self._name(new)

    def _check_before(self, new: str) -> None:
        """A name whose rename was not synced when the next one of its directory came: the save before had returned by then."""
        late = [name for name, parent in self.unsynced.items() if name != new and _is_kept(name) and parent == str(Path(new).parent)]
        self.violations += [f"the name of {Path(name).name} was not synced before {Path(new).name} came" for name in late]

    def at_the_end(self) -> None:
        """What was never synced, of all that was committed."""
        self.violations += [f"the name {Path(name).name} was never synced" for name in self.unsynced if _is_kept(name)]


def _is_kept(name: str) -> bool:
    """Whether a name is one that a later start relies on: not temporary, and not one of those that are appended to."""
    return "/.tmp-" not in name and Path(name).name not in ("lock", "metrics.jsonl", "timing.jsonl")


def follow(calls: Sequence[Call], below: Path) -> Disk:
    """What a log of calls says of everything below a directory."""
    disk = Disk(below)
    for call in calls:
        disk.see(call)
    disk.at_the_end()
    return disk


@procedure(
    "A5",
    title="power loss: the order of write, fsync and rename in the log of system calls",
    must="every file is synced before the rename that commits it, and its directory, and those that were made for it, after: 0 violations",
    full=50,
    test=2,
    needs="strace",
    possible=durability_strace.possible,
)
def order(work: Work) -> Outcome:
    """`count` saves of the writer, then a whole run from the command line."""
    outcome = Outcome()
    saves = work.scratch / "saves"
    disk = follow(durability_strace.trace(writer(saves, work.count), work.scratch, work.scratch / "log", calls=CALLS), saves / "run")
    outcome.total += disk.renames
    outcome.passed += max(0, disk.renames - len(disk.violations))
    outcome.failures += [f"the writer: {text}" for text in dict.fromkeys(disk.violations)]
    whole = work.scratch / "whole"
    calls = durability_strace.trace(inchworm(arguments()), whole, work.scratch / "log", calls=CALLS)
    disk_of_run = follow(calls, whole / NAME)
    outcome.total += disk_of_run.renames
    outcome.passed += max(0, disk_of_run.renames - len(disk_of_run.violations))
    outcome.failures += [f"a run: {text}" for text in dict.fromkeys(disk_of_run.violations)]
    outcome.figures["commits followed"] = f"{disk.renames} of the writer, {disk_of_run.renames} of a whole run"
    outcome.notes.append("the order alone; a file system that drops what was not synced (LazyFS) was not tried")
    return outcome
