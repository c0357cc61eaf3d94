"""A job in a separate process: a function of these scripts with plain arguments and a plain result. No side inherits from another.

    run("sb3_side:train", {"name": "W1", ...}, threads=1)      # in a fresh process: import sb3_side, call train(**arguments)
    run("rejax_side:train", {...}, python=".../bin/python")    # the same by the interpreter of another virtual environment

Inside, `since_start()` is the time since the process was asked for, imports and all.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_STARTED = "INCHWORM_BENCH_STARTED"
_POOLS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NPROC")  # the last one is XLA's


def run(
    call: str, arguments: Mapping[str, Any], *, threads: int = 1, environment: Mapping[str, str] | None = None, python: str = sys.executable
) -> Any:
    """Call `module:function` with the arguments in a fresh process whose thread pools have this size."""
    with tempfile.TemporaryDirectory(prefix="inchworm-job-") as directory:
        out = Path(directory) / "result.json"
        job = json.dumps({"call": call, "arguments": dict(arguments), "out": str(out)})
        done = subprocess.run(
            [python, str(Path(__file__).resolve()), job],
            env={**os.environ, **_thread_settings(threads), **(environment or {}), _STARTED: repr(time.time())},
            cwd=directory,  # simulators leave logs where they run
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{call} with {dict(arguments)} failed:\n{done.stdout}{done.stderr}")
        return json.loads(out.read_text(encoding="utf-8"))


def _thread_settings(threads: int) -> dict[str, str]:
    settings = dict.fromkeys(_POOLS, str(threads))
    if threads == 1:
        settings["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    return settings


def since_start() -> float:
    """Seconds since `run` started this process; 0 in a process that it did not start."""
    started = os.environ.get(_STARTED)
    return 0.0 if started is None else time.time() - float(started)


def main() -> None:
    """Do the job that the first argument describes."""
    job = json.loads(sys.argv[1])
    module, _, function = job["call"].partition(":")
    result = getattr(importlib.import_module(module), function)(**job["arguments"])
    Path(job["out"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
