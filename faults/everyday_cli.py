"""For G4: the command line on many configs in one process, `python -m faults.everyday_cli FILE…`; a line of JSON for each."""

from __future__ import annotations

import io
import json
import resource
import sys
import time
import traceback
from contextlib import redirect_stderr, redirect_stdout

MEMORY = 6 << 30
"""What the process may map: a config that asks for a hundred times that must not take the machine with it."""


def main() -> None:
    """Call it once for nothing, so that what it imports on its way is not timed."""
    from inchworm.cli.main import main as command_line

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    answer(command_line, ["train", "--config", "there-is-none.yaml"])
    for path in sys.argv[1:]:
        code, text, seconds = answer(command_line, ["train", "--config", path, "--quiet"])
        sys.stdout.write(json.dumps({"code": code, "text": text, "seconds": seconds}) + "\n")
        sys.stdout.flush()


def answer(command_line: object, arguments: list[str]) -> tuple[int, str, float]:
    """Exit code, what went to standard error, and how long it took."""
    said, began, code = io.StringIO(), time.perf_counter(), -1
    with redirect_stderr(said), redirect_stdout(io.StringIO()):
        try:
            code = command_line(arguments)  # type: ignore[operator]
        except Exception:  # what a person would see as a traceback
            traceback.print_exc()
    return code, said.getvalue().strip(), time.perf_counter() - began


if __name__ == "__main__":
    main()
