"""G4: configs at random, through the library and the command line; the valid ones are run.

`python -m faults.everyday_configs FILE…` runs the command line on many configs in one process and prints a line of JSON for each.
"""

from __future__ import annotations

import io
import json
import math
import resource
import subprocess
import sys
import time
import traceback
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

from faults.everyday_cases import FIELDS, OTHERS, Case, put, random_case, says_what_is_allowed, valid_data, written
from faults.programme import Outcome, Work, child_environment, procedure
from inchworm.cli.main import main as command_line
from inchworm.config.sections import TrainingConfig
from inchworm.core.errors import ConfigError
from inchworm.train.trainer import PPOTrainer

MEMORY = 6 << 30
"""What the process may map: a config that asks for a hundred times that must not take the machine with it."""


def main() -> None:
    """Run the command once on a missing file, so that its imports are not timed, and then on each file."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for path in ("missing.yaml", *sys.argv[1:]):
        text, began, code = io.StringIO(), time.perf_counter(), -1
        with redirect_stderr(text), redirect_stdout(io.StringIO()):
            try:
                code = command_line(["train", "--config", path, "--quiet"])
            except Exception:  # a user would see a traceback
                traceback.print_exc()
        if path != "missing.yaml":
            row = {"code": code, "text": text.getvalue().strip(), "seconds": time.perf_counter() - began}
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()


def run_two_updates(seed: int, number: int, directory: Path) -> str:
    """Train with a random valid config; says what went wrong. One in forty has workers, one in four a memory."""
    rng = np.random.default_rng([seed, 40, number])
    data = valid_data(rng, share=0.6)
    env, ppo, run = data["env"], data["ppo"], data.setdefault("run", {})
    steps = env["num_envs"] * ppo["rollout_steps"]
    if ppo.get("num_minibatches") and ppo["num_minibatches"] > steps:
        ppo["num_minibatches"] = steps
    run |= {"total_timesteps": 2 * steps, "max_iterations": 2}  # a warm-up is shorter, and an iteration
    if number % 4 == 1:
        data.setdefault("policy", {})["kind"] = ("lstm", "gru")[number // 4 % 2]
        run["backend"] = "torch"
    if number % 40 == 7:
        env["num_workers"] = 2
    data.setdefault("evaluation", {}).setdefault("episodes", 1)
    data["evaluation"].setdefault("final_episodes", 1)
    env.setdefault("max_episode_steps", 50)
    config = TrainingConfig.from_dict(data)
    try:
        with warnings.catch_warnings(action="ignore"), PPOTrainer(config.policy, config.env, config, run_dir=directory) as trainer:
            history = trainer.train()
            failures = list(trainer.failures)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]} with {data}"
    if len(history["loss"]) != 2 or not all(math.isfinite(loss) for loss in history["loss"]):
        return f"losses {history['loss']} with {data}"
    return f"{failures} with {data}" if failures else ""


EXIT_SECONDS = 1.0


def verdict(case: Case, message: str | None) -> str:
    """What is wrong with how a config was taken: `message` is that of its error, None if it was read."""
    if message is None:
        return "it was read" if case.outcome == "refused" else ""
    if case.outcome == "read":
        return f"it was refused: {message}"
    missing = [words for words in case.words if not any(word in message for word in words.split("|"))]
    if missing:
        return f"the error does not say {missing}: {message}"
    if case.field is not None and not says_what_is_allowed(case.field, message):
        return f"the error does not say what is allowed: {message}"
    return f"the error has {len(message)} characters" if len(message) > 2000 else ""


def by_library(case: Case, path: Path) -> str:
    """Read the config here; what is wrong with how that went."""
    path.write_bytes(case.text)
    try:
        config = TrainingConfig.from_yaml(path)
    except ConfigError as error:
        return verdict(case, str(error))
    except Exception as error:
        return f"another exception: {type(error).__name__}: {str(error)[:200]}"
    if case.value is not None:
        name, expected = case.value
        section, key = name.split(".")
        if getattr(getattr(config, section), key) != expected:
            return f"{name} was read as {getattr(getattr(config, section), key)!r}"
    if wrong := verdict(case, None):
        return wrong
    path.write_text(config.to_yaml(), encoding="utf-8")  # as a run does it
    try:
        again = type(config).from_yaml(path)
    except Exception as error:
        return f"written and read again it is refused: {type(error).__name__}: {str(error)[:200]}"
    return "" if again == config else "written and read again it is another config"


def by_command_line(cases: list[tuple[int, Case]], directory: Path, work: Work) -> dict[int, tuple[str, float]]:
    """`inchworm train --config …` for each, in one process after its imports; what is wrong with each, and how long it took."""
    directory.mkdir()
    paths = {number: directory / f"{number}.yaml" for number, _ in cases}
    for number, case in cases:
        paths[number].write_bytes(case.text)
    command = [sys.executable, "-m", "faults.everyday_configs", *map(str, paths.values())]
    with subprocess.Popen(
        command, cwd=directory, env=child_environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as child:
        try:
            output, _ = child.communicate(timeout=120 + 2.0 * len(cases))
        except subprocess.TimeoutExpired:
            child.kill()
            output, _ = child.communicate()
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    found: dict[int, tuple[str, float]] = {}
    for (number, case), row in zip(cases, rows):
        wrong = verdict(case, row["text"])
        if row["code"] != 2 or "Traceback" in row["text"] or len(row["text"].splitlines()) != 1:
            wrong = f"exit code {row['code']}: {row['text'][-300:]}"
        elif work.late(row["seconds"], EXIT_SECONDS):
            wrong = f"it took {row['seconds']:.2f} s"
        found[number] = (wrong, row["seconds"])
    for number, _ in cases[len(rows) :]:
        found[number] = (f"the process ended before it, with code {child.returncode}", 0.0)
    return found


ABSURD: dict[str, Any] = {
    "env.num_envs": 10**9,
    "ppo.rollout_steps": 10**12,
    "policy.hidden_sizes": [10**6, 10**6],
    "env.frame_stack": 10**9,
    "env.max_episode_steps": 2**63,
    "run.total_timesteps": 10**400,
    "evaluation.num_envs": 10**9,
    "env.worker_timeout": 1e308,
    "env.kwargs": {"render_mode": 3},
    "env.wrappers": [{"name": "ClipReward", "kwargs": {"min_reward": 3, "max_reward": 1}}],
}
"""Right in type, and impossible all the same: also one line, naming the field."""


def absurd_cases() -> list[Case]:
    """One for each."""
    small = {"env": {"num_envs": 2, "num_workers": 0}, "ppo": {"rollout_steps": 4}, "run": {"backend": "numpy", "total_timesteps": 8}}
    cases = []
    for name, value in ABSURD.items():
        data = put(put(small, "env.num_workers", 1), name, value) if name == "env.worker_timeout" else put(small, name, value)
        cases.append(Case(f"absurd {name}", written(data), "refused", (name.partition(".")[2],)))
    return cases


@procedure("G4", full=10_000, usual=4_000, test=69, alone=True)
def fuzz(work: Work) -> Outcome:
    """Configs at random: wrong types, ranges, keys, tags, aliases, huge and broken ones.

    Must: invalid: one line with key and allowed values, exit 2 within 1 s, no traceback; every valid one runs 2 updates.
    Every case through the library, one in twenty of the invalid ones through the command line, one in fifty valid ones run.
    """
    outcome, cases = Outcome(), [random_case(work.seed, number) for number in range(work.count)]
    known = {f"{section}.{key}" for section, values in TrainingConfig().to_dict().items() for key in values}
    outcome.check(known == {*FIELDS, *OTHERS}, f"fields that are not tried: {sorted(known ^ {*FIELDS, *OTHERS})}")
    with warnings.catch_warnings(action="ignore"):
        for number in work.each():
            wrong = by_library(cases[number], work.scratch / "config.yaml")
            outcome.check(not wrong, f"case {number}, {cases[number].what}: {wrong}")
    share = [(n, case) for n, case in enumerate(cases) if case.outcome == "refused"][:: 20 if work.count > 1000 else 4]
    share += [(work.count + n, case) for n, case in enumerate(absurd_cases())]
    slowest = 0.0
    for number, (wrong, seconds) in by_command_line(share, work.scratch / "cli", work).items():
        slowest = max(slowest, seconds)
        case = cases[number] if number < work.count else absurd_cases()[number - work.count]
        outcome.check(not wrong, f"case {number} by the command line, {case.what}: {wrong}")
    runs = max(2, work.count // 50)
    for number in work.each(runs):
        wrong = run_two_updates(work.seed, number, work.scratch / f"run-{number}")
        outcome.check(not wrong, f"valid config {number}: {wrong}")
    outcome.figures |= {
        "through the command line": f"{len(share)}",
        "slowest refusal there": f"{slowest:.2f} s",
        "valid ones run": f"{runs}",
    }
    outcome.notes.append("the command line is called in one process, timed from the call to its exit code, after the imports")
    outcome.notes.append("numbers beyond any machine (10^9 environments) count as invalid on the command line")
    return outcome


if __name__ == "__main__":
    main()
