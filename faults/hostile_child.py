"""A process that opens one hostile file after another, each in a fork, under an audit hook.

`python -m faults.hostile_child` reads one job per line from standard input and writes one report per line, both JSON. Everything
that a loader needs is imported before the first job, so that the time and memory of a report are those of the loader.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.runs import status_number

FORBIDDEN = (
    "pickle.find_class", "marshal.loads", "marshal.load", "subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty",
    "os.posix_spawn", "os.spawn", "pty.spawn", "socket.connect", "socket.bind", "webbrowser.open", "urllib.Request",
    "ftplib.connect", "http.client.connect", "smtplib.connect", "code.__new__", "shelve.open", "sqlite3.connect",
)  # fmt: skip
WRITES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown", "shutil.rmtree")
LIMIT_SECONDS = 60.0


class Watch:
    """An audit hook that denies and records what no loader of data should do. Only the directory `inside` may be written to."""

    def __init__(self, inside: str) -> None:
        self.hits: list[str] = []
        self._inside = os.path.realpath(inside)
        self._armed = False
        sys.addaudithook(self._audit)

    def __enter__(self) -> Watch:
        self._armed = True
        return self

    def __exit__(self, *_: object) -> None:
        self._armed = False

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._armed:
            return
        self._armed = False  # the hook's own calls must not trigger it
        try:
            hit = self._hit(event, arguments)
        finally:
            self._armed = True
        if hit:
            self.hits.append(hit)
            raise PermissionError(f"denied: {hit}")

    def _hit(self, event: str, arguments: tuple[Any, ...]) -> str:
        if event in FORBIDDEN and not (event.startswith("marshal") and _importing()):
            return f"{event} {str(arguments)[:200]}"
        if event == "ctypes.dlopen" and arguments[0] and self._is_inside(str(arguments[0])):
            return f"{event} {arguments[0]}"
        if event == "open" and isinstance(arguments[0], str | bytes):
            flags = arguments[2] if isinstance(arguments[2], int) else 0
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            return self._outside(event, arguments[0], follow=not flags & os.O_NOFOLLOW) if writes else ""
        if event in WRITES and isinstance(arguments[0], str | bytes | os.PathLike):
            places = arguments[:2] if event in ("os.rename", "os.link") else arguments[:1]
            return next((hit for place in places if (hit := self._outside(event, place, follow=event == "os.truncate"))), "")
        if event in ("exec", "compile") and not _importing():
            # Code in the sandbox, or that names the canary as all hostile code does; annotations are compiled, too.
            name, code = (arguments[0].co_filename, arguments[0].co_consts) if event == "exec" else (str(arguments[1]), arguments[0])
            foreign = (os.path.isabs(name) and self._is_inside(name)) or "canary" in repr(code)
            return f"{event} {str(arguments)[:200]}" if foreign else ""
        if event == "import" and arguments[1] and self._is_inside(str(arguments[1])):
            return f"import {arguments[0]} from {arguments[1]}"
        return ""

    def _outside(self, event: str, place: Any, *, follow: bool) -> str:
        text = os.fsdecode(place)
        where = text if follow else os.path.join(os.path.realpath(os.path.dirname(text) or "."), os.path.basename(text))
        return "" if self._is_inside(where, follow=follow) or where == "/dev/null" else f"{event} outside the sandbox: {text}"

    def _is_inside(self, where: str, *, follow: bool = True) -> bool:
        real = os.path.realpath(where) if follow else where
        return real == self._inside or real.startswith(self._inside + os.sep)


def _importing() -> bool:
    """Whether an import is on the stack."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def load(loader: str, path: str) -> Any:
    """Open a file with the public function for its kind."""
    from inchworm.config.sections import TrainingConfig
    from inchworm.rollout.rollout import Rollout
    from inchworm.run.checkpoint import TrainingCheckpointer
    from inchworm.run.directory import load_config
    from inchworm.run.policies import load_policy
    from inchworm.worlds.replay import load_replay, replay_page

    loaders: dict[str, Callable[[str], Any]] = {
        "policy": load_policy,
        "rollout": Rollout.load,
        "replay": lambda path: replay_page(load_replay(path)),
        "checkpoint": lambda path: TrainingCheckpointer(Path(path).parent).load(path),
        "newest checkpoint": lambda path: TrainingCheckpointer(path).load(),
        "checkpoint policy": lambda path: TrainingCheckpointer(Path(path).parent).load_policy(path),
        "run config": load_config,
        "config": TrainingConfig.from_yaml,
    }
    return loaders[loader](path)


def _attempt(job: dict[str, Any]) -> dict[str, Any]:
    """Open the file and report what happened."""
    from inchworm.core.errors import InchwormError

    os.chdir(job["sandbox"])
    report: dict[str, Any] = {"error": "", "family": True, "text": "", "code": None}
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest memory so far
    before, began = status_number(os.getpid(), "VmRSS"), time.process_time()
    out, err = io.StringIO(), io.StringIO()
    watch = Watch(job["sandbox"])
    with watch, warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            if job["loader"] == "command":
                from inchworm.cli.main import main

                report["code"] = main(job["arguments"])
            else:
                load(job["loader"], job["path"])
        except BaseException as error:  # reported to the parent, whatever it is
            report |= {"error": f"{type(error).__name__}: {error}"[:500], "family": isinstance(error, InchwormError)}
    report |= {
        "seconds": time.process_time() - began,
        "memory": max(0, status_number(os.getpid(), "VmHWM") - before) * 1024,
        "hits": watch.hits,
    }
    return {**report, "text": err.getvalue()[-2000:], "printed": out.getvalue()[-2000:]}


def _in_a_fork(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job in a forked child, which is killed if it hangs."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        with contextlib.suppress(BaseException), os.fdopen(write, "w") as answer:
            answer.write(json.dumps(_attempt(job)))
        os._exit(0)
    os.close(write)
    text, deadline = b"", time.monotonic() + LIMIT_SECONDS
    with os.fdopen(read, "rb", buffering=0) as answer:
        while select.select([answer], [], [], max(0.0, deadline - time.monotonic()))[0]:
            piece = answer.read(65536)
            if not piece:
                break
            text += piece
    if time.monotonic() >= deadline:
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    ended = {"hung": status == -signal.SIGKILL, "signal": -status if status < 0 else 0}
    return {**(json.loads(text) if text and not ended["hung"] else {}), **ended}


def main() -> None:
    """Serve jobs until standard input ends."""
    os.environ["COLUMNS"] = "1000"
    import inchworm.backends.numpy.learner
    import inchworm.cli.evaluate
    import inchworm.cli.rollouts
    import inchworm.cli.show
    import inchworm.cli.train
    import inchworm.run.directory
    import inchworm.train.trainer

    inchworm.run.directory.versions()  # Python's own `platform` asks uname, once
    with contextlib.suppress(Exception):  # what these import on their first use
        load("policy", "/nowhere")
    for command in (["config", "CartPole-v1"], *([name, "--help"] for name in ("resume", "learn", "evaluate", "collect", "replay"))):
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            inchworm.cli.main.main(command)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_in_a_fork(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
