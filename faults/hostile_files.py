"""B1 and B2: crafted files, and files changed at random, opened by every loader and command."""

from __future__ import annotations

import copy
import json
import random
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from doubles.replays import small_replay
from faults import hostile_tools
from faults.hostile_cases import Case, Sandbox, checkpoint_cases, foreign_cases, policy_cases, rollout_cases, tensor_cases
from faults.hostile_runs import command_cases, replay_cases, state_cases, yaml_cases
from faults.hostile_tools import Opener, make_genuine, newest_checkpoint, sign_checkpoint, signed, tensor_file, tensor_parts
from faults.programme import Outcome, Work, procedure
from inchworm.config.sections import TrainingConfig
from inchworm.core.errors import ConfigError, CorruptFileError
from inchworm.policy.file import read_policy
from inchworm.rollout.rollout import Rollout
from inchworm.run.checkpoint import TrainingCheckpointer, manifest_text
from inchworm.run.policies import load_policy
from inchworm.worlds.replay import load_replay, replay_page

MEGABYTE = 1_000_000
MOST_SECONDS, MOST_MEMORY = 2.0, 100 * MEGABYTE


@procedure("B1", full=1_200, test=30)
def crafted_files(work: Work) -> Outcome:
    """Crafted files with valid checksums, opened by every loader and command.

    Must: 0 executions, 0 signals, 0 writes elsewhere; at most 2 s of CPU and the file's size + 100 MB; one clear InchwormError.
    Each case in a child process under an audit hook, with a canary that any executed code would touch.
    """
    outcome, counts, genuine = Outcome(), Counter[str](), make_genuine(work.scratch / "genuine")
    cases = [*foreign_cases(), *tensor_cases("policy"), *tensor_cases("rollout"), *policy_cases(), *rollout_cases(), *checkpoint_cases()]
    cases += [*yaml_cases(), *command_cases(), *state_cases(genuine), *replay_cases()]
    cases = [cases[number * len(cases) // work.count] for number in range(work.count)] if work.count < len(cases) else cases
    slowest, largest = 0.0, 0.0
    with Opener() as child:
        for number in work.each(len(cases)):
            case, directory = cases[number], work.scratch / "case"
            shutil.rmtree(directory, ignore_errors=True)
            box = Sandbox(directory / "inside", directory / "outside" / "victim", directory / "canary", genuine)
            box.inside.mkdir(parents=True)
            box.victim.parent.mkdir()
            box.victim.write_text("mine\n")
            made = case.make(box, *case.given)
            size = sum(path.stat().st_size for path in box.inside.rglob("*") if path.is_file() and not path.is_symlink())
            given = {"arguments": made} if case.loader == "command" else {"path": made}
            found = child.open({"sandbox": str(box.inside), "loader": case.loader, **given})
            problem = _problem(case, box, found, size, work)
            outcome.check(not problem, f"{case.name}: {problem}")
            slowest, largest = max(slowest, found.get("seconds", 0.0)), max(largest, found.get("memory", 0) / MEGABYTE)
            counts[case.loader] += 1
    outcome.figures = {"slowest": f"{slowest:.2f} s", "most memory above the start": f"{largest:.0f} MB"}
    outcome.notes.append("files by loader: " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    return outcome


def _problem(case: Case, box: Sandbox, found: dict[str, Any], size: int, work: Work) -> str:
    """What was wrong with how a case was handled. A command prints one clear line and ends with 1 or 2, or with 0 if nothing is wrong."""
    if found["hung"] or found["signal"]:
        return "it hung and was killed" if found["hung"] else f"it died of signal {found['signal']}"
    if found["hits"] or box.canary.exists():
        return f"it did what no loader may do: {found['hits'] or 'the canary was touched'}"
    if box.victim.read_text() != "mine\n" or [path.name for path in box.victim.parent.iterdir()] != ["victim"]:
        return "it wrote to a file outside of its directory"
    if work.late(found["seconds"], MOST_SECONDS) or found["memory"] > size + MOST_MEMORY:
        return f"it took {found['seconds']:.2f} s and {found['memory'] / MEGABYTE:.0f} MB for {size / MEGABYTE:.1f} MB"
    if case.loader != "command":
        if not found["error"]:
            return "" if case.may_load else "it was loaded as a good file"
        return "" if found["family"] else f"not an InchwormError: {found['error']}"
    lines = [line for line in found["text"].splitlines() if not line.startswith("warning: ")]
    if found["error"]:
        return f"not caught: {found['error']}"
    if found["code"] == 0:
        return "" if case.may_load and not lines else f"it continued and printed {lines[:3]}"
    fine = found["code"] in (1, 2) and len(lines) == 1 and lines[0].startswith("inchworm: ")
    return "" if fine else f"code {found['code']}, {len(lines)} lines: {' / '.join(lines)[:300]}"


VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2**31, 2**63, 10**30, 0.5, 1e308, "", "nan", "inf", "os.system", "\0", [], [[]], {}, {"kind": "Box"},
    {"array": "x"}, {"float": "x"}, {"dict": {"a": 1}}, {"list": [1]}, {"tuple": []}, [1, 2], ["a"], "float32", [0, 0], [2**40, 0],
)  # fmt: skip
SNIPPETS = (
    b"{", b"}", b"[", b"]", b",", b":", b'"', b"null", b"-", b"1e999", b"NaN", b"\\u0000", b"\xff", b"\0" * 8, b"[[[[", b"9" * 40,
    b"!!", b"&a", b"*a", b"\n", b"  ", b"? ",
)  # fmt: skip


def edit_bytes(blob: bytes, rng: random.Random) -> bytes:
    """One to three edits: a bit, a byte, a piece taken out, doubled, moved, or put in."""
    for _ in range(rng.randint(1, 3)):
        at, length = rng.randrange(max(1, len(blob))), rng.choice((1, 1, 2, 8, 64))
        kind = rng.randrange(6)
        if kind == 0 and blob:
            blob = blob[:at] + bytes([blob[at] ^ (1 << rng.randrange(8))]) + blob[at + 1 :]
        elif kind == 1:
            blob = blob[:at] + bytes([rng.randrange(256)]) + blob[at + 1 :]
        elif kind == 2:
            blob = blob[:at] + blob[at + length :]
        elif kind == 3:
            blob = blob[:at] + blob[at : at + length] + blob[at:]
        elif kind == 4:
            blob = blob[:at] + rng.choice(SNIPPETS) + blob[at:]
        else:
            blob = blob[:at] if rng.random() < 0.3 else blob[:at] + bytes(length) + blob[at + length :]
    return blob


def edit_meaning(data: Any, rng: random.Random) -> Any:
    """Plain data with one or two of its values, keys or entries changed."""
    data = copy.deepcopy(data)
    for _ in range(rng.randint(1, 2)):
        place = data
        while isinstance(place, dict | list) and place:
            key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
            inner = place[key]
            if not isinstance(inner, dict | list) or not inner or rng.random() < 0.25:
                kind = rng.randrange(4)
                if kind == 0:
                    del place[key]
                elif kind == 1 and isinstance(place, dict):
                    place[rng.choice(("", "x", "__class__", "0"))] = place.pop(key)
                elif kind == 2 and isinstance(place, list):
                    place.extend(place[:3])
                else:
                    place[key] = copy.deepcopy(rng.choice(VALUES))
                break
            place = inner
    return data


HEAD = len(hostile_tools.BEFORE_DIGEST) + 64
CONFIG = {
    "env": {
        "id": "CartPole-v1",
        "num_envs": 4,
        "kwargs": {"gravity": 9.8, "name": "a"},
        "wrappers": [{"name": "ClipReward", "kwargs": {}}],
    },
    "ppo": {"learning_rate": 3e-4, "minibatch_size": 64, "target_kl": None},
    "policy": {"hidden_sizes": [64, 64], "activation": "tanh"},
    "run": {"name": "x", "seed": 3},
}


@dataclass(frozen=True)
class Format:
    """One kind of file: how to change it, and how to open it. `change` returns whether the result must be refused."""

    name: str
    change: Callable[[random.Random, int], bool]
    open: Callable[[], Any]


def _tensor_format(name: str, genuine: Path, path: Path, opened: Callable[[Path], Any]) -> Format:
    blob = genuine.read_bytes()
    layout, entry, data = tensor_parts(blob)
    header = len(blob) - len(data)

    def change(rng: random.Random, number: int) -> bool:
        kind = number % 4
        if kind == 0:
            mutant = edit_bytes(blob, rng)
        elif kind == 1:  # the header's text, with a valid checksum
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


def _text_format(name: str, path: Path, data: Any, dump: Callable[[Any], str], opened: Callable[[Path], Any]) -> Format:
    """A format without a checksum: text that `dump` makes of plain data."""
    text = dump(data).encode()

    def change(rng: random.Random, number: int) -> bool:
        path.write_bytes(edit_bytes(text, rng) if number % 2 else dump(edit_meaning(data, rng)).encode())
        return False

    return Format(name, change, lambda: opened(path))


def formats(scratch: Path) -> list[Format]:
    """All file formats."""
    genuine = make_genuine(scratch / "genuine")
    run = genuine / "runs" / "good"
    return [
        _tensor_format("policy", run / "policy.safetensors", scratch / "policy", lambda path: load_policy(path, "numpy")),
        _tensor_format("rollout", genuine / "rollout.safetensors", scratch / "rollout", Rollout.load),
        _checkpoint_format(newest_checkpoint(run), scratch / "copy" / newest_checkpoint(run).name),
        _text_format("config", scratch / "config.yaml", CONFIG, yaml.safe_dump, TrainingConfig.from_yaml),
        _text_format("replay", scratch / "replay.json", small_replay(), json.dumps, lambda path: replay_page(load_replay(path))),
    ]


@procedure("B2", full=10_000, usual=4_000, test=60)
def mutants(work: Work) -> Outcome:
    """Files changed at random, in each of five formats, and headers made by Hypothesis.

    Must: only errors of the CorruptFileError family (ConfigError for configs); nothing over 2 s; what fails its checksum is never taken.
    `count` mutants of each format, in this process.
    """
    outcome, taken = Outcome(), {}
    kinds = formats(work.scratch)
    slowest = 0.0
    numbers = work.each(work.count * len(kinds))
    for kind in kinds:
        rng, loaded = random.Random(f"{work.seed}/{kind.name}"), 0
        for number in range(work.count):
            next(numbers)
            must_fail = kind.change(rng, number)
            began, wrong = time.process_time(), ""
            with warnings.catch_warnings(action="ignore"):
                try:
                    kind.open()
                    loaded += 1
                    wrong = "it was changed but accepted" if must_fail else ""
                except Exception as error:
                    if not isinstance(error, ConfigError if kind.name == "config" else CorruptFileError):
                        wrong = f"{type(error).__name__}: {error}"
            seconds = time.process_time() - began
            wrong = wrong or (f"it took {seconds:.1f} s" if work.late(seconds, MOST_SECONDS) else "")
            slowest = max(slowest, seconds)
            outcome.check(not wrong, f"{kind.name}, mutant {number}: {wrong}")
        taken[kind.name] = loaded
    _headers(outcome, work)
    outcome.figures = {"slowest": f"{slowest * 1000:.0f} ms"}
    outcome.figures |= {f"{name}: still valid after the change": f"{count} of {work.count}" for name, count in taken.items()}
    outcome.notes.append("three quarters of the mutants of files with a checksum get a valid one, so that the parsers are reached")
    return outcome


def _headers(outcome: Outcome, work: Work) -> None:
    """Headers of any shape, by Hypothesis, with a valid checksum."""
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    words = "spec fields dict list tuple array float kind Box shape config observation_space rewards episodes"
    names = st.sampled_from(words.split())
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
