"""F2: every value in a checkpoint changed, one at a time: nothing is saved in vain, nothing is ignored at loading."""

from __future__ import annotations

import copy
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from faults.programme import Outcome, Work, procedure
from faults.resume_runs import Rule, bits, differing, settings

STOP, END = 5, 7
"""The checkpoint is of this update, and the resumed run ends after that one; an evaluation lies between."""
DRAWS = 700
"""From each process-wide generator in every update: more than the 624 words that one holds, so that each of them is used."""
TRANSIENT = {
    "learner/stream/uinteger": "half of a draw, looked at only while has_uint32 is 1",
    "collector/stream/uinteger": "half of a draw, looked at only while has_uint32 is 1",
    "learner/bad_steps": "minibatches in a row that were not finite: the next good one sets it to 0",
}
"""Values that are taken over at loading, and need not show in what follows, with the reason why."""
OF_PYTHON = {"generators/random/0": "Python's number of its own format, of which two hold the same words"}
"""What is not ours to judge."""
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


def seed_process(backend: str) -> None:
    """The generators of the process where every run of this procedure finds them, whoever drew before."""
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    if backend == "torch":
        import torch

        torch.manual_seed(1)


def train(directory: Path, data: Mapping[str, Any], *, resume: bool) -> dict[str, str]:
    """Begin a run that ends after `STOP`, or go on to `END`; its bits, and `loaded`, its whole state right after loading."""
    from inchworm.config.sections import TrainingConfig
    from inchworm.core.trees import flatten_tree
    from inchworm.train.trainer import PPOTrainer

    config = TrainingConfig.from_dict(data)
    loaded = {}
    with PPOTrainer(config.policy, config.env, config, run_dir=directory) as trainer:
        if resume:
            trainer.load_checkpoint()
            arrays, structure = flatten_tree(trainer.full_state())
            loaded = {"loaded": str(structure) + "".join(array.tobytes().hex() for array in arrays.values())}
        trainer.train(callback=Drawing(trainer, END))
    return bits(directory) | loaded


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
    """The bits of a run that goes on from a valid checkpoint with one value changed."""
    from inchworm.run.checkpoint import ManifestNote, TrainingCheckpointer

    shutil.copytree(stopped, directory)
    shutil.rmtree(directory / "checkpoints")
    whole = put({"state": checkpoint.state, "process": checkpoint.process}, path, how) if path else {"state": checkpoint.state}
    manifest = checkpoint.manifest
    note = ManifestNote(
        rows=manifest["rows"], threads=manifest["threads"], cpu_capability=manifest["cpu_capability"], exact=manifest["exact"]
    )
    TrainingCheckpointer(directory / "checkpoints").save(
        checkpoint.step, whole["state"], process=whole.get("process", checkpoint.process), note=note
    )
    return train(directory, data, resume=True)


def judge(found: Any, expected: Mapping[str, str], told: bool) -> str:
    """What a change led to: refused, other numbers, another later state, a warning, or nothing."""
    if isinstance(found, Exception):
        from inchworm.core.errors import InchwormError

        return "refused" if isinstance(found, InchwormError) else "refused by an error that is not ours"
    differ = set(differing(found, expected).split(", ")) - {""}
    if differ & {"metrics.jsonl", "policy.safetensors", "best_policy.safetensors"}:
        return "other numbers"
    if differ - {"loaded"}:
        return "another later state"
    return "a warning that it is not bit for bit" if told else "taken over" if differ else "nothing"


def _tried(function: Any, *given: Any) -> tuple[Any, bool]:
    """The answer or the error, and whether it was warned that bits are others now."""
    from inchworm.run.directory import NotExactWarning

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            answer: Any = function(*given)
        except Exception as error:  # whatever a changed checkpoint leads to is a finding
            answer = error
    return answer, any(issubclass(entry.category, NotExactWarning) for entry in told)


@procedure(
    "F2",
    title="Every value in a checkpoint changed, one at a time",
    must="the resumed run differs or is refused, for 100 % of the values",
    full=100,
    test=5,
)
def every_leaf(work: Work) -> Outcome:
    """`count` of every 100 values, on both backends: CartPole with everything on that has a memory."""
    from inchworm.run.checkpoint import TrainingCheckpointer

    outcome, kinds = Outcome(), Counter[str]()
    foreign: list[str] = []
    for backend in BACKENDS:
        data, stopped = settings("discrete", backend), work.scratch / f"{backend}-stopped"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seed_process(backend)
            train(stopped, {**data, "run": {**data["run"], "max_iterations": STOP}}, resume=False)
            checkpoint = TrainingCheckpointer(stopped / "checkpoints").load()
            expected = resumed_with(stopped, work.scratch / f"{backend}-as-it-was", checkpoint, (), "", data)
            again = resumed_with(stopped, work.scratch / f"{backend}-once-more", checkpoint, (), "", data)
            outcome.check(again == expected, f"{backend}: unchanged, it differs in {differing(again, expected)}")
            places = list(leaves({"state": checkpoint.state, "process": checkpoint.process}))
            chosen = [place for number, place in enumerate(places) if number * work.count // 100 != (number - 1) * work.count // 100]
            for number in work.each(len(chosen)):
                path, how = chosen[number]
                directory = work.scratch / f"{backend}-{number}"
                found, warned = _tried(resumed_with, stopped, directory, checkpoint, path, how, data)
                shutil.rmtree(directory, ignore_errors=True)
                what, name = judge(found, expected, warned), "/".join(map(str, path[1:]))
                kinds[what] += 1
                if what == "refused by an error that is not ours":
                    foreign.append(f"{name} {how}: {type(found).__name__}: {str(found)[:80]}")
                excused = (what == "taken over" and name in TRANSIENT) or name in OF_PYTHON
                outcome.check(
                    what not in ("nothing", "taken over") or excused, f"{backend}, {name} {how}: {what}, the resumed run is the same"
                )
        outcome.figures[f"values of a checkpoint, {backend}"] = str(len(places))
    outcome.figures |= {what: str(number) for what, number in sorted(kinds.items())}
    outcome.notes.append("the count is a share in per cent; a list of numbers counts as one value, and every list is also shortened")
    outcome.notes += [f"may show nowhere: {name}: {why}" for name, why in {**TRANSIENT, **OF_PYTHON}.items()]
    outcome.notes += [f"refused, but not in our words: {text}" for text in foreign[:5]]
    return outcome
