"""B2: files changed at random, by bytes and by meaning, with the checksum left wrong or made right."""

from __future__ import annotations

import json
import random
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.hostile_edits import edit_bytes, edit_meaning
from faults.hostile_tools import BEFORE_DIGEST, make_genuine, newest_checkpoint, sign_checkpoint, signed, tensor_file, tensor_parts
from faults.programme import Outcome, Work, procedure

MOST_SECONDS = 2.0
HEAD = len(BEFORE_DIGEST) + 64
YAML = (
    "env:\n  id: CartPole-v1\n  num_envs: 4\n  kwargs: {gravity: 9.8, name: 'a'}\n"
    "  wrappers: [{name: ClipReward, kwargs: {min_reward: -1}}]\n"
    "ppo:\n  learning_rate: 3e-4\n  minibatch_size: 64\n  target_kl: null\n"
    "policy:\n  hidden_sizes: [64, 64]\n  activation: tanh\nrun:\n  name: x\n  seed: 3\n"
)


class Format:
    """One kind of file: how to change it, and how it is opened. `change` returns whether the result must be refused."""

    def __init__(self, name: str, change: Callable[[random.Random, int], bool], opened: Callable[[], Any]) -> None:
        self.name, self.change, self.opened = name, change, opened


def _tensor_format(name: str, genuine: Path, path: Path, opened: Callable[[Path], Any]) -> Format:
    blob = genuine.read_bytes()
    layout, entry, data = tensor_parts(blob)
    header = len(blob) - len(data)

    def change(rng: random.Random, number: int) -> bool:
        kind = number % 4
        if kind == 0:
            mutant = edit_bytes(blob, rng)
        elif kind == 1:  # the header's text, under a right checksum
            text = edit_bytes(blob[8 + HEAD : header], rng)
            mutant = signed((blob[8 : 8 + HEAD] + text).decode("utf-8", "replace"), data)
        elif kind == 2:
            mutant = tensor_file(edit_meaning(layout, rng), entry, edit_bytes(data, rng) if rng.random() < 0.3 else data)
        else:
            mutant = tensor_file(layout, edit_meaning({**entry, "sha256": ""}, rng), data)
        path.write_bytes(mutant)
        return kind == 0 and mutant != blob

    return Format(name, change, lambda: opened(path))


def _checkpoint_format(genuine: Path, path: Path) -> Format:
    from inchworm.run.checkpoint import TrainingCheckpointer, manifest_text

    shutil.copytree(genuine, path)
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    state, manifest = json.loads(files["state.json"]), json.loads(files["manifest.json"])["manifest"]

    def change(rng: random.Random, number: int) -> bool:
        for name, content in files.items():
            (path / name).write_bytes(content)
        kind, name = number % 4, rng.choice(list(files))
        if kind == 0:
            mutant = edit_bytes(files[name], rng)
            (path / name).write_bytes(mutant)
            return mutant != files[name]
        if kind == 1:
            (path / "state.json").write_bytes(edit_bytes(files["state.json"], rng))
            sign_checkpoint(path)
        elif kind == 2:
            (path / "state.json").write_text(json.dumps(edit_meaning(state, rng)))
            sign_checkpoint(path)
        else:
            (path / "manifest.json").write_text(manifest_text(edit_meaning(manifest, rng)))
        return False

    return Format("checkpoint", change, lambda: TrainingCheckpointer(path.parent).load(path))


def _config_format(path: Path) -> Format:
    import yaml

    from inchworm.config.sections import TrainingConfig

    data = yaml.safe_load(YAML)

    def change(rng: random.Random, number: int) -> bool:
        path.write_bytes(edit_bytes(YAML.encode(), rng) if number % 2 else yaml.safe_dump(edit_meaning(data, rng)).encode())
        return False

    return Format("config", change, lambda: TrainingConfig.from_yaml(path))


def _replay_format(path: Path) -> Format:
    from doubles.replays import small_replay
    from inchworm.worlds.replay import load_replay, replay_page

    data = small_replay()
    blob = json.dumps(data).encode()

    def change(rng: random.Random, number: int) -> bool:
        path.write_bytes(edit_bytes(blob, rng) if number % 2 else json.dumps(edit_meaning(data, rng)).encode())
        return False

    return Format("replay", change, lambda: replay_page(load_replay(path)))


def formats(scratch: Path) -> list[Format]:
    """Every format that is read."""
    from inchworm.policy.file import load_policy
    from inchworm.rollout.rollout import Rollout

    genuine = make_genuine(scratch / "genuine")
    run = genuine / "runs" / "good"
    return [
        _tensor_format("policy", run / "policy.safetensors", scratch / "policy", lambda path: load_policy(path, "numpy")),
        _tensor_format("rollout", genuine / "rollout.safetensors", scratch / "rollout", Rollout.load),
        _checkpoint_format(newest_checkpoint(run), scratch / "copy" / newest_checkpoint(run).name),
        _config_format(scratch / "config.yaml"),
        _replay_format(scratch / "replay.json"),
    ]


@procedure(
    "B2",
    title="Files changed at random, in each of five formats, and headers made by Hypothesis",
    must="only errors of the CorruptFileError family (ConfigError for configs); nothing over 2 s; what fails its checksum is never taken",
    full=10_000,
    usual=4_000,
    test=60,
)
def mutants(work: Work) -> Outcome:
    """`count` mutants of each format, in this process."""
    outcome, taken = Outcome(), {}
    kinds = formats(work.scratch)
    slowest = 0.0
    numbers = work.each(work.count * len(kinds))
    for kind in kinds:
        rng, loaded = random.Random(f"{work.seed}/{kind.name}"), 0
        for number in range(work.count):
            next(numbers)
            wrong, seconds, is_loaded = _one(kind, rng, number)
            slowest, loaded = max(slowest, seconds), loaded + is_loaded
            outcome.check(not wrong, f"{kind.name}, mutant {number}: {wrong}")
        taken[kind.name] = loaded
    _headers(outcome, work)
    outcome.figures = {"slowest": f"{slowest * 1000:.0f} ms"}
    outcome.figures |= {f"{name}: still valid after the change": f"{count} of {work.count}" for name, count in taken.items()}
    outcome.notes.append(
        "three quarters of the mutants of files with a checksum have it made right, so that the parsers behind it are reached"
    )
    return outcome


def _one(kind: Format, rng: random.Random, number: int) -> tuple[str, float, bool]:
    from inchworm.core.errors import ConfigError, CorruptFileError

    must_fail = kind.change(rng, number)
    began, wrong, loaded = time.process_time(), "", False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            kind.opened()
            loaded = True
            wrong = "it was changed, and taken" if must_fail else ""
        except (CorruptFileError, ConfigError) as error:
            wrong = "" if isinstance(error, ConfigError) == (kind.name == "config") else f"{type(error).__name__}: {error}"
        except FileNotFoundError as error:
            wrong = f"FileNotFoundError: {error}"
        except Exception as error:  # any other is what this looks for
            wrong = f"{type(error).__name__}: {error}"
    seconds = time.process_time() - began
    return wrong or (f"it took {seconds:.1f} s" if seconds > MOST_SECONDS else ""), seconds, loaded


def _headers(outcome: Outcome, work: Work) -> None:
    """Headers of any shape, by Hypothesis, under a right checksum."""
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    from inchworm.core.errors import CorruptFileError
    from inchworm.policy.file import read_policy
    from inchworm.rollout.rollout import Rollout

    names = st.sampled_from(
        (
            "spec",
            "fields",
            "dict",
            "list",
            "tuple",
            "array",
            "float",
            "kind",
            "Box",
            "shape",
            "config",
            "observation_space",
            "rewards",
            "episodes",
        )
    )
    leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8) | names
    trees = st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names | st.text(max_size=4), inner, max_size=4), max_leaves=12
    )
    path = work.scratch / "header"

    @settings(
        max_examples=max(20, work.count // 10), deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(st.dictionaries(names, trees, max_size=4), st.sampled_from(("policy", "rollout")), trees)
    def attempt(header: dict[str, Any], kind: str, tensor: Any) -> None:
        layout = {"x": tensor} if isinstance(tensor, dict | list) else {}
        path.write_bytes(tensor_file(layout, {"format": "inchworm", "kind": kind, "version": 1, "header": header}, b""))
        try:
            read_policy(path) if kind == "policy" else Rollout.load(path)
            fine = False
        except CorruptFileError:
            fine = True
        outcome.check(fine, f"header {json.dumps(header)[:200]} as a {kind} was taken")

    try:
        attempt()
    except Exception as error:  # Hypothesis has found an error that is not ours, and shrunk it
        outcome.check(False, f"a header made by Hypothesis: {type(error).__name__}: {error}")
