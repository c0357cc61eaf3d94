"""A server for E6 that runs tests on a copy of the package, each time in a fork of a process that has imported everything else.

Started as `python -P …/bugs_server.py` with the copy's `src` on PYTHONPATH, which the workers of the tests inherit. A line of JSON on
standard input names the tests and a time limit; a line on standard output has the result.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

HEAVY = ("numpy", "torch", "gymnasium", "hypothesis", "optree", "pydantic", "rich", "safetensors.numpy", "yaml", "pytest")
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow", "--tb=line", "--hypothesis-seed=0", "-W", "ignore")


class Witness:
    """A pytest plugin that records the first failure."""

    def __init__(self) -> None:
        self.failed, self.kind, self.tests = "", "", 0

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed, self.kind = f"{report.nodeid} (at collection)", _last_line(report)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.tests += report.when == "call"
        if report.failed and not self.failed:
            self.failed, self.kind = report.nodeid, _last_line(report)


def _last_line(report: Any) -> str:
    """The error of a failure, such as `AssertionError: assert 1 == 2`."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash is not None else report.longrepr).strip()


def run_tests(tests: list[str], log: Path, *, keep_bytecode: bool) -> dict[str, Any]:
    """In the fork: the tests, on the package that PYTHONPATH names."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    sys.dont_write_bytecode = not keep_bytecode
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in programs started in the background
    import pytest

    witness = Witness()
    code = pytest.main([*OPTIONS, *tests], plugins=[witness])
    package = sys.modules.get("inchworm")
    where = "" if package is None else str(package.__file__)
    return {"code": int(code), "failed": witness.failed, "kind": witness.kind[:300], "tests": witness.tests, "package": where}


def serve() -> None:
    """Answer until standard input ends."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of libraries must not come between the lines
    for name in HEAVY:
        importlib.import_module(name)
    assert "inchworm" not in sys.modules, "the package must be imported anew in every fork"
    for line in sys.stdin:
        job = json.loads(line)
        answer = Path(job["log"]).with_suffix(".json")
        answer.unlink(missing_ok=True)
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            with contextlib.suppress(BaseException):
                answer.write_text(json.dumps(run_tests(job["tests"], Path(job["log"]), keep_bytecode=job["keep_bytecode"])))
            os._exit(0)
        in_time = _wait(pid, began + job["limit"])
        found = (
            json.loads(answer.read_text())
            if in_time and answer.exists()
            else {"code": -1, "failed": "", "kind": "", "tests": 0, "package": ""}
        )
        lines.write(json.dumps({**found, "in_time": in_time, "seconds": time.monotonic() - began}) + "\n")
        lines.flush()


def _wait(pid: int, deadline: float) -> bool:
    """Whether a fork has ended by itself before `deadline`; afterwards it and what it started in its group are gone."""
    in_time = False
    while time.monotonic() < deadline and not in_time:
        in_time = os.waitpid(pid, os.WNOHANG)[0] == pid
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if not in_time:
        os.waitpid(pid, 0)
    return in_time


if __name__ == "__main__":
    serve()
