"""B3: no loader that runs code, in the source and at work."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from faults.programme import ROOT, Outcome, Work, procedure

BANNED_MODULES = {"pickle", "cPickle", "_pickle", "dill", "joblib", "shelve", "marshal", "cloudpickle", "jsonpickle", "dbm"}
BANNED_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "torch.load",
    "torch.jit.load",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "yaml.load_all",
    "np.load",
    "numpy.load",
    "pickle.load",
    "pickle.loads",
    "cloudpickle.load",
    "cloudpickle.loads",
    "tempfile.mktemp",
    "shutil.unpack_archive",
}
ALLOWED = {
    ("env/workers/program.py", "cloudpickle.loads"),
    ("env/workers/program.py", "cloudpickle"),
    ("env/workers/process.py", "cloudpickle"),
    ("env/workers/pool.py", "cloudpickle"),
    ("env/workers/recipe.py", "cloudpickle"),
}
"""A factory goes to a worker of ours by cloudpickle, over a private socket; nobody else reads pickles, and no file is one."""


def banned_uses(source: str, name: str) -> Iterator[str]:
    """What a module of the library must not contain."""
    for node in ast.walk(ast.parse(source)):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names if alias.name.partition(".")[0] in BANNED_MODULES]
        elif isinstance(node, ast.ImportFrom):
            found = [node.module] if node.module and node.module.partition(".")[0] in BANNED_MODULES else []
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            found = [called] if called in BANNED_CALLS else []
            found += [f"{called}({word.arg})" for word in node.keywords if word.arg in ("allow_pickle", "shell", "weights_only")]
        yield from (f"{name}:{node.lineno}: {use}" for use in found if (name, use) not in ALLOWED)


@procedure(
    "B3",
    title="No loader that runs code: source, and an audit hook on train, resume, evaluate, collect, learn",
    must="0 hits",
    full=1,
    test=0,
)
def nothing_unpickles(work: Work) -> Outcome:
    """Every module is looked through; then whole commands run with a hook that hears every unpickling."""
    outcome = Outcome()
    package = ROOT / "src" / "inchworm"
    for path in sorted(package.rglob("*.py")):
        uses = list(banned_uses(path.read_text(encoding="utf-8"), path.relative_to(package).as_posix()))
        outcome.check(not uses, "; ".join(uses))
    for backend in ("numpy", "torch"):
        for words, hits in _heard(work.scratch, backend):
            outcome.check(hits == [], f"{words}: {hits[:3]}")
    outcome.notes.append("the whole suite is not run under the hook: test tools and peers unpickle on purpose; B1 hears every loader")
    return outcome


_HEARD = """
import sys, json
hits = []
def hear(event, arguments):
    if event in ("pickle.find_class", "os.system"):
        hits.append(f"{event} {arguments!r}"[:200])
sys.addaudithook(hear)
from inchworm.cli.main import main
code = main(sys.argv[1:])
sys.stderr.write("\\n" + json.dumps([code, hits]) + "\\n")
"""


def _heard(scratch: Path, backend: str) -> Iterator[tuple[str, list[str]]]:
    small = ["--num-envs", "2", "--num-workers", "1", "--ppo.rollout-steps", "8", "--ppo.num-minibatches", "2", "--ppo.update-epochs", "1"]
    small += ["--total-timesteps", "32", "--evaluation.final-episodes", "2", "--backend", backend, "--run.name", backend, "--quiet"]
    run = f"runs/{backend}"
    for command in (
        ["train", "CartPole-v1", *small],
        ["resume", run, "--total-timesteps", "64", "--quiet"],
        ["evaluate", run, "--episodes", "2", "--quiet"],
        ["collect", run, "--out", f"{backend}.safetensors", "--quiet"],
        ["learn", run, f"{backend}.safetensors", "--quiet"],
    ):
        ended = subprocess.run([sys.executable, "-c", _HEARD, *command], cwd=scratch, capture_output=True, text=True, timeout=180)
        code, hits = (
            json.loads(ended.stderr.strip().splitlines()[-1])
            if ended.returncode == 0 and ended.stderr.strip()
            else (ended.returncode, [ended.stderr[-300:]])
        )
        yield f"{backend}: inchworm {command[0]}", [*hits, *([] if code == 0 else [f"it ended with {code}"])]
