"""F2 and F4: every value of a checkpoint changed, and resuming with another config, version, thread count or processor."""

from __future__ import annotations

import copy
import json
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from faults import runs
from faults.everyday_cases import FIELDS
from faults.programme import Outcome, Work, procedure
from faults.resume import Rule, flags, settings, train
from faults.runs import RUN, differences, fingerprint
from inchworm.config.sections import TrainingConfig
from inchworm.core.errors import InchwormError
from inchworm.core.tensor_file import flatten_tree
from inchworm.run.checkpoint import ManifestNote, TrainingCheckpointer, manifest_text, read_manifest
from inchworm.run.directory import BIT_FIELDS, FREE_FIELDS, NotExactWarning
from inchworm.train.trainer import PPOTrainer

STOP, END = 5, 7
"""The checkpoint is of this update, and the resumed run ends after that one; an evaluation lies between."""
DRAWS = 700
"""From each process-wide generator in every update: more than the 624 words that one holds, so that each of them is used."""
TRANSIENT = {
    "learner/stream/uinteger": "half of a draw, looked at only while has_uint32 is 1",
    "collector/stream/uinteger": "half of a draw, looked at only while has_uint32 is 1",
    "learner/env_steps": "a training sets it to the collector's count before every update; only a learner of its own counts by itself",
    **{
        f"collector/vector_env/copies/1/next_options/{bound}": "the rule of this run sets other options before the second copy is reset"
        for bound in ("low", "high")
    },
    "learner/bad_steps": "minibatches in a row that were not finite: the next good one sets it to 0",
}
"""Values that are taken over at loading, and need not show in what follows, with the reason why."""
OF_PYTHON = {"generators/random/0": "Python's number of its own format, of which two hold the same words"}
"""What is not ours to judge."""
ON_FAILURE = {"collector/starts": "read only where the replay of a copy leads elsewhere, to tell a new episode from a running one"}
"""Values that an undamaged run does not read."""
BACKENDS = ("numpy", "torch")


class Drawing(Rule):
    """The rule, which also draws from the generators of the process, as people's own worlds and losses may."""

    def on_iteration(self, state: Any, metrics: Mapping[str, float]) -> bool:
        """The sums of what was drawn become metrics."""
        state.metrics["drawn/random"] = sum(random.random() for _ in range(DRAWS))
        state.metrics["drawn/gauss"] = random.gauss(0, 1) + float(np.random.standard_normal())  # noqa: NPY002 - each keeps a second one back
        state.metrics["drawn/numpy"] = float(np.random.random(DRAWS).sum())  # noqa: NPY002
        if self._trainer.config.run.backend == "torch":
            import torch

            state.metrics["drawn/torch"] = float(torch.rand(DRAWS, dtype=torch.float64).sum() + torch.randn(1).sum())
        return super().on_iteration(state, metrics)


def train_and_draw(directory: Path, data: Mapping[str, Any], *, resume: bool) -> dict[str, str]:
    """Start a run that ends after `STOP`, or continue to `END`; its fingerprint, and `loaded`, its whole state right after loading."""
    config = TrainingConfig.from_dict(data)
    loaded = {}
    with PPOTrainer(config.policy, config.env, config, run_dir=directory) as trainer:
        if resume:
            trainer.load_checkpoint()
            arrays, structure = flatten_tree(trainer.full_state())
            loaded = {"loaded": str(structure) + "".join(array.tobytes().hex() for array in arrays.values())}
        trainer.train(callback=Drawing(trainer, END))
    return fingerprint(directory) | loaded


Path_ = tuple[Any, ...]


def leaves(tree: Any, path: Path_ = ()) -> Iterator[tuple[Path_, str]]:
    """Every value as (path, what to do to it). A list of numbers is changed in one place, and any list is also shortened."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    elif isinstance(tree, list | tuple):
        if tree:
            yield path, "shortened"
        if tree and all(isinstance(item, int | float) and not isinstance(item, bool) for item in tree):
            yield (*path, len(tree) // 2), "changed"
        else:
            for index, value in enumerate(tree):
                yield from leaves(value, (*path, index))
    elif not (isinstance(tree, np.ndarray) and tree.size == 0):
        yield path, "changed"


def changed(value: Any) -> Any:
    """Another value of the same type, different enough to matter."""
    if isinstance(value, np.ndarray):
        result = value.copy()
        place = np.unravel_index(result.size // 2, result.shape)
        result[place] = changed(result[place].item())
        return result
    if value is None:
        return 1.0
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value - 1 if value > 0 else value + 1
    if isinstance(value, float):
        return value + max(0.5, 0.5 * abs(value))
    text = str(value)
    return str(int(text) + 2) if text.isdigit() else text + "x"  # an increment of a stream must stay odd


def put(tree: Any, path: Path_, how: str) -> Any:
    """A copy of the tree with that one place changed."""
    if not path:
        return tree[:-1] if how == "shortened" else changed(tree)
    key, rest = path[0], path[1:]
    if isinstance(tree, tuple):
        return tuple(put(item, rest, how) if index == key else item for index, item in enumerate(tree))
    result = copy.copy(tree)
    result[key] = put(tree[key], rest, how)
    return result


def resumed_with(stopped: Path, directory: Path, checkpoint: Any, path: Path_, how: str, data: Mapping[str, Any]) -> dict[str, str]:
    """The fingerprint of a run that continues from a valid checkpoint with one value changed."""
    shutil.copytree(stopped, directory)
    shutil.rmtree(directory / "checkpoints")
    whole = put({"state": checkpoint.state, "process": checkpoint.process}, path, how) if path else {"state": checkpoint.state}
    manifest = checkpoint.manifest
    note = ManifestNote(**{name: manifest[name] for name in ("rows", "threads", "cpu_capability", "exact")})
    process = whole.get("process", checkpoint.process)
    TrainingCheckpointer(directory / "checkpoints").save(checkpoint.step, whole["state"], process=process, note=note)
    return train_and_draw(directory, data, resume=True)


@procedure("F2", full=100, test=5)
def every_leaf(work: Work) -> Outcome:
    """Every value in a checkpoint changed, one at a time.

    Must: the resumed run differs or is refused, for 100 % of the values.
    `count` of every 100 values, on both backends: CartPole with everything on that has state.
    """
    import torch

    outcome, kinds = Outcome(), Counter[str]()
    foreign: list[str] = []
    for backend in BACKENDS:
        data, stopped = settings("discrete", backend), work.scratch / f"{backend}-stopped"
        with warnings.catch_warnings(action="ignore"):
            random.seed(1)
            np.random.seed(1)  # noqa: NPY002
            torch.manual_seed(1)
            train_and_draw(stopped, {**data, "run": {**data["run"], "max_iterations": STOP}}, resume=False)
            checkpoint = TrainingCheckpointer(stopped / "checkpoints").load()
            expected = resumed_with(stopped, work.scratch / f"{backend}-as-it-was", checkpoint, (), "", data)
            again = resumed_with(stopped, work.scratch / f"{backend}-once-more", checkpoint, (), "", data)
            outcome.check(again == expected, f"{backend}: unchanged, it differs in {differences(again, expected)}")
            places = list(leaves({"state": checkpoint.state, "process": checkpoint.process}))
            chosen = [place for number, place in enumerate(places) if number * work.count // 100 != (number - 1) * work.count // 100]
            for number in work.each(len(chosen)):
                path, how = chosen[number]
                directory = work.scratch / f"{backend}-{number}"
                found: Any
                with warnings.catch_warnings(record=True, action="always") as caught:
                    try:
                        found = resumed_with(stopped, directory, checkpoint, path, how, data)
                    except Exception as error:  # whatever a changed checkpoint leads to is a finding
                        found = error
                warned = any(issubclass(entry.category, NotExactWarning) for entry in caught)
                shutil.rmtree(directory, ignore_errors=True)
                name, differ = "/".join(map(str, path[1:])), set[str]()
                if isinstance(found, Exception):
                    what = "refused" if isinstance(found, InchwormError) else "refused by an error that is not ours"
                else:
                    differ = set(differences(found, expected).split(", ")) - {""}
                    taken = "taken over" if differ else "nothing"
                    what = "another later state" if differ - {"loaded"} else "a warning that it is not bit for bit" if warned else taken
                if differ & {"metrics.jsonl", "policy.safetensors", "best_policy.safetensors"}:
                    what = "other numbers"
                kinds[what] += 1
                if what == "refused by an error that is not ours":
                    foreign.append(f"{name} {how}: {type(found).__name__}: {str(found)[:80]}")
                excused = (what == "taken over" and name in TRANSIENT) or name in OF_PYTHON or name in ON_FAILURE
                outcome.check(what not in ("nothing", "taken over") or excused, f"{backend}, {name} {how}: {what}")
        outcome.figures[f"values of a checkpoint, {backend}"] = str(len(places))
    outcome.figures |= {what: str(number) for what, number in sorted(kinds.items())}
    outcome.notes.append("the count is a share in per cent; a list of numbers counts as one value, and every list is also shortened")
    outcome.notes += [f"may show nowhere: {name}: {why}" for name, why in {**TRANSIENT, **OF_PYTHON, **ON_FAILURE}.items()]
    outcome.notes += [f"refused, but not in our words: {text}" for text in foreign[:5]]
    return outcome


OTHER_STOP, OTHER_END = 3, 5
NOT_EXACT = "NotExactWarning: "
UNLIKE = {"env.atari", "env.help_workers", "opponent.mode", "policy.central_critic", "policy.kind", "run.directory", "run.name"}
"""Fields of which this world has no other value that could be run, or that say where the run is."""
OTHERS: dict[str, Any] = {"torch": "1.0.0", "numpy": "1.0.0", "python": "3.0.0", "gymnasium": "0.1", "cpu": "another", "simd": "NONE"}
"""What a manifest may say of the machine, each with something else."""


def other_configs(work: Work, outcome: Outcome, stopped: Path, data: Mapping[str, Any]) -> None:
    """Every field of the config with another value."""
    whole = TrainingConfig.from_dict(data).to_dict()
    names = [name for name in FIELDS if name not in UNLIKE]
    tried = {"refused": 0, "warned of": 0, "free": 0}
    for number in work.each(min(work.count, len(names))):
        name = names[number * len(names) // min(work.count, len(names))]
        section, key = name.split(".")
        field, now = FIELDS[name], whole[section][key]
        choices = [not now] if field.kind == "bool" else [each for each in (*field.usual, *field.options) if each not in (now, None)]
        value = choices[0] if choices else None if now is not None else 5
        changed = {**whole, section: {**whole[section], key: value}}
        if name == "ppo.minibatch_size":
            changed["ppo"]["num_minibatches"] = None
        directory = work.scratch / "other"
        shutil.copytree(stopped, directory)
        message = ""
        with warnings.catch_warnings(record=True, action="always") as caught:
            try:
                config = TrainingConfig.from_dict(changed)
                with PPOTrainer(config.policy, config.env, config, run_dir=directory) as trainer:
                    trainer.load_checkpoint()
            except InchwormError as error:
                message = f"{type(error).__name__}: {error}"
        warned = [f"{warning.category.__name__}: {warning.message}" for warning in caught]
        before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file() and path.name != "lock"}
        kept = all((directory / path.relative_to(stopped)).read_bytes() == content for path, content in before.items())
        shutil.rmtree(directory)
        line = f"{name}: {now} → {value}"
        if name in FREE_FIELDS:
            fine, what = not message, "free"
        elif name in BIT_FIELDS:
            fine, what = any(line in text and NOT_EXACT in text for text in warned) or message.startswith("ConfigError"), "warned of"
        else:
            fine, what = message.startswith("ConfigError") and line in message and kept, "refused"
        tried[what] += 1
        outcome.check(fine, f"{line} must be {what}: {message or 'it was taken'}; {warned}")
    outcome.figures |= {f"config fields {what}": str(count) for what, count in tried.items()}


def rewrite_manifest(directory: Path, **changes: Any) -> None:
    """Let the newest checkpoint say that it was made elsewhere, in the library's own writing."""
    newest = TrainingCheckpointer(directory / "checkpoints").latest()
    assert newest is not None
    manifest = read_manifest(newest)
    for name, value in changes.items():
        place = manifest["versions"] if name in manifest["versions"] else manifest
        place[name] = value
    (newest / "manifest.json").write_text(manifest_text(manifest), encoding="utf-8")


def other_machines(work: Work, outcome: Outcome, stopped: Path, data: Mapping[str, Any], expected: Mapping[str, str]) -> None:
    """Other versions, threads and processors: warned of by name, and the run continues to its end."""
    cases: dict[str, dict[str, Any]] = {name: {name: value} for name, value in OTHERS.items()}
    cases["cpu_capability"] = {"cpu_capability": "NONE"}
    cases["nothing"] = {}
    for name, changes in cases.items():
        directory = work.scratch / f"elsewhere-{name}"
        shutil.copytree(stopped, directory)
        rewrite_manifest(directory, **changes)
        found, warned = train(directory, data, resume=True, updates=OTHER_END)
        ours = [text for text in warned if NOT_EXACT in text]
        fine = not ours if name == "nothing" else any(text.startswith(f"{NOT_EXACT}{name}: ") for text in ours)
        outcome.check(fine and found == expected, f"another {name}: it warned {warned}, bits equal: {found == expected}")
    threads = {**data, "run": {**data["run"], "threads": 2}}
    directory = work.scratch / "threads"
    shutil.copytree(stopped, directory)
    _, warned = train(directory, threads, resume=True, updates=OTHER_END)
    fine = any("run.threads: 1 → 2" in text and NOT_EXACT in text for text in warned)
    outcome.check(fine and fingerprint(directory) != {}, f"another thread count: it warned {warned}")


def by_command_line(work: Work, outcome: Outcome) -> None:
    """The same from the command line: exit code 2 and one line with the diff; a warning and exit code 0."""
    begin = ["train", "CartPole-v1", *flags(settings("discrete", "torch")), "--run.directory=.", f"--run.name={RUN}", "--quiet"]
    before = runs.undisturbed(work.scratch, runs.command([*begin, f"--run.max-iterations={OTHER_STOP}"]))
    run = work.scratch / RUN
    for flag, line in (("--ppo.gamma=0.5", "→ 0.5"), ("--run.seed=9", "run.seed: 3 → 9")):
        ended = runs.run(runs.command(["resume", RUN, flag]), work.scratch)
        one_line = line in ended.error and len(ended.error.strip().splitlines()) == 1 and "Traceback" not in ended.error
        outcome.check(ended.code == 2 and one_line and fingerprint(run) == before, f"resume {flag}: exit code {ended.code}: {ended.error}")
    versions = json.loads((run / "versions.json").read_text())
    (run / "versions.json").write_text(json.dumps({**versions, "torch": "1.0.0"}))
    rewrite_manifest(run, cpu_capability="NONE", numpy="1.0.0")
    line = ["resume", RUN, "--run.threads=2", f"--run.max-iterations={OTHER_END}", "--quiet"]
    ended = runs.run(runs.command(line), work.scratch)
    for name in ("torch: 1.0.0", "numpy: 1.0.0", "cpu_capability: NONE", "run.threads: 1 → 2"):
        warned = any(name in text and "bit" in text for text in ended.error.splitlines())
        outcome.check(ended.code == 0 and warned, f"resume elsewhere ({name}): exit code {ended.code}: {ended.error}")


@procedure("F4", full=60, test=4)
def other_circumstances(work: Work) -> Outcome:
    """Resume with another config, thread count, version or processor.

    Must: another config is refused with a diff and exit code 2; the rest causes a warning, and the run continues.
    `count` fields of the config, each with another value; then everything that a manifest says of the machine.
    """
    outcome, data, stopped = Outcome(), settings("discrete", "torch"), work.scratch / "stopped"
    train(stopped, settings("discrete", "torch", max_iterations=OTHER_STOP), resume=False, updates=OTHER_END)
    whole = work.scratch / "whole"
    expected, _ = train(whole, data, resume=False, updates=OTHER_END)
    other_configs(work, outcome, stopped, data)
    other_machines(work, outcome, stopped, data, expected)
    if not work.reduced:  # the suite has its own tests of the commands
        by_command_line(work, outcome)
    outcome.notes.append("another version or processor is what the checkpoint's manifest says, rewritten by the library's own writer")
    return outcome
