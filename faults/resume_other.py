"""F4: resume under other circumstances: another config is refused with a diff; other threads, versions or processors are told of."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from faults.everyday_fields import FIELDS, Field
from faults.programme import Outcome, Work, procedure
from faults.resume_runs import bits, command, flags, go, quietly, settings

STOP, END = 3, 5
NOT_EXACT = "not bit for bit"
UNLIKE = {"env.atari", "env.help_workers", "opponent.mode", "policy.central_critic", "policy.kind", "run.directory", "run.name"}
"""Fields of which this world has no other value that could be run, or that say where the run is."""
OTHERS: dict[str, Any] = {"torch": "1.0.0", "numpy": "1.0.0", "python": "3.0.0", "gymnasium": "0.1", "cpu": "another", "simd": "NONE"}
"""What a manifest may say of the machine, each with something else."""


def another(field: Field, now: Any) -> Any:
    """A value that the field may have and has not."""
    if field.kind == "bool":
        return not now
    choices = [value for value in (*field.usual, *field.options) if value not in (now, None)]
    if choices:
        return choices[0]
    return None if now is not None else 5


def resumed(directory: Path, data: Mapping[str, Any]) -> str:
    """Load the run's newest checkpoint into a trainer with this config; the error's text, or "" if it was taken."""
    from inchworm.config.sections import TrainingConfig
    from inchworm.core.errors import InchwormError
    from inchworm.train.trainer import PPOTrainer

    try:
        config = TrainingConfig.from_dict(data)
        with PPOTrainer(config.policy, config.env, config, run_dir=directory) as trainer:
            trainer.load_checkpoint()
    except InchwormError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def other_configs(work: Work, outcome: Outcome, stopped: Path, data: Mapping[str, Any]) -> None:
    """Every field of the config with another value."""
    from inchworm.config.sections import TrainingConfig
    from inchworm.run.directory import BIT_FIELDS, FREE_FIELDS

    whole = TrainingConfig.from_dict(data).to_dict()
    names = [name for name in FIELDS if name not in UNLIKE]
    tried = {"refused": 0, "told of": 0, "free": 0}
    for number in work.each(min(work.count, len(names))):
        name = names[number * len(names) // min(work.count, len(names))]
        section, key = name.split(".")
        value = another(FIELDS[name], whole[section][key])
        changed = {**whole, section: {**whole[section], key: value}}
        if name == "ppo.minibatch_size":
            changed["ppo"]["num_minibatches"] = None
        directory = work.scratch / "other"
        shutil.copytree(stopped, directory)
        message, told = quietly(resumed, directory, changed)
        before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file() and path.name != "lock"}
        kept = all((directory / path.relative_to(stopped)).read_bytes() == content for path, content in before.items())
        shutil.rmtree(directory)
        line = f"{name}: {whole[section][key]} → {value}"
        if name in FREE_FIELDS:
            fine, what = not message, "free"
        elif name in BIT_FIELDS:
            fine, what = any(line in text and NOT_EXACT in text for text in told) or message.startswith("ConfigError"), "told of"
        else:
            fine, what = message.startswith("ConfigError") and line in message and kept, "refused"
        tried[what] += 1
        outcome.check(fine, f"{line} must be {what}: {message or 'it was taken'}; {told}")
    outcome.figures |= {f"config fields {what}": str(count) for what, count in tried.items()}


def rewrite_manifest(directory: Path, **changes: Any) -> None:
    """Let the newest checkpoint say that it was made elsewhere, in the library's own writing."""
    from inchworm.run.checkpoint import TrainingCheckpointer, manifest_text, read_manifest

    newest = TrainingCheckpointer(directory / "checkpoints").latest()
    assert newest is not None
    manifest = read_manifest(newest)
    for name, value in changes.items():
        place = manifest["versions"] if name in manifest["versions"] else manifest
        place[name] = value
    (newest / "manifest.json").write_text(manifest_text(manifest), encoding="utf-8")


def other_machines(work: Work, outcome: Outcome, stopped: Path, data: Mapping[str, Any], expected: Mapping[str, str]) -> None:
    """Other versions, threads and processors: told of by name, and the run goes on to its end."""
    cases: dict[str, dict[str, Any]] = {name: {name: value} for name, value in OTHERS.items()}
    cases["cpu_capability"] = {"cpu_capability": "NONE"}
    cases["nothing"] = {}
    for name, changes in cases.items():
        directory = work.scratch / f"elsewhere-{name}"
        shutil.copytree(stopped, directory)
        rewrite_manifest(directory, **changes)
        found, told = quietly(go, directory, data, resume=True, updates=END)
        ours = [text for text in told if NOT_EXACT in text]
        fine = not ours if name == "nothing" else any(text.startswith(f"{name}: ") for text in ours)
        outcome.check(
            fine and found == expected, f"another {name}: it told {told}, and its bits are {'others' if found != expected else 'right'}"
        )
    threads = {**data, "run": {**data["run"], "threads": 2}}
    directory = work.scratch / "threads"
    shutil.copytree(stopped, directory)
    _, told = quietly(go, directory, threads, resume=True, updates=END)
    fine = any("run.threads: 1 → 2" in text and NOT_EXACT in text for text in told)
    outcome.check(fine and bits(directory) != {}, f"another thread count: it told {told}")


def by_command_line(work: Work, outcome: Outcome) -> None:
    """The same as a person sees it: exit code 2 and one line with the diff; a warning and exit code 0."""
    data = settings("discrete", "torch")
    code, said = command("train", "CartPole-v1", *flags(data), "--run.name=it", f"--run.max-iterations={STOP}", "--quiet", cwd=work.scratch)
    outcome.check(code == 0, f"train: exit code {code}: {said}")
    run = work.scratch / "runs" / "it"
    before = bits(run)
    for flag, line in (("--ppo.gamma=0.5", "→ 0.5"), ("--run.seed=9", "run.seed: 3 → 9")):
        code, said = command("resume", "it", flag, cwd=work.scratch)
        fine = code == 2 and line in said and len(said.strip().splitlines()) == 1 and "Traceback" not in said and bits(run) == before
        outcome.check(fine, f"resume {flag}: exit code {code}: {said}")
    versions = json.loads((run / "versions.json").read_text())
    (run / "versions.json").write_text(json.dumps({**versions, "torch": "1.0.0"}))
    rewrite_manifest(run, cpu_capability="NONE", numpy="1.0.0")
    code, said = command("resume", "it", "--run.threads=2", f"--run.max-iterations={END}", "--quiet", cwd=work.scratch)
    for name in ("torch: 1.0.0", "numpy: 1.0.0", "cpu_capability: NONE", "run.threads: 1 → 2"):
        fine = code == 0 and any(name in line and NOT_EXACT in line for line in said.splitlines())
        outcome.check(fine, f"resume elsewhere ({name}): exit code {code}: {said}")


@procedure(
    "F4",
    title="Resume with another config, thread count, version or processor",
    must="another config is refused with a diff and exit code 2; the rest is told of, and the run goes on",
    full=60,
    test=8,
)
def other_circumstances(work: Work) -> Outcome:
    """`count` fields of the config, each with another value; then everything that a manifest says of the machine."""
    outcome, data, stopped = Outcome(), settings("discrete", "torch"), work.scratch / "stopped"
    quietly(go, stopped, settings("discrete", "torch", max_iterations=STOP), resume=False, updates=END)
    whole = work.scratch / "whole"
    expected, _ = quietly(go, whole, data, resume=False, updates=END)
    other_configs(work, outcome, stopped, data)
    other_machines(work, outcome, stopped, data, expected)
    by_command_line(work, outcome)
    outcome.notes.append("another version or processor is what the checkpoint's manifest says, rewritten by the library's own writer")
    return outcome
