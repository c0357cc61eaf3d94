"""A6: files that were damaged after they were written, of every kind that is read again: checkpoints, rollouts, policies."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults import durability_runs as runs
from faults.durability_writer import state_of
from faults.programme import Outcome, Work, procedure

ZEROED = 512
FILE_KINDS = ("bit flip", "truncation", "512 zeroed bytes", "bytes added", "file removed")
"""What can happen to one file."""
PAIR_KINDS = ("two files swapped", "part of another step")
"""What needs a second one."""


def damaged(content: bytes, kind: str, rng: random.Random) -> bytes | None:
    """One file's bytes after damage; None if it is gone."""
    if kind == "file removed":
        return None
    if kind == "truncation":
        return content[: rng.randrange(len(content))]
    if kind == "bytes added":
        return content + rng.randbytes(rng.randint(1, 64))
    changed = bytearray(content)
    while bytes(changed) == content:
        place = rng.randrange(len(content))
        if kind == "bit flip":
            changed[place] ^= 1 << rng.randrange(8)
        else:
            changed[place : place + ZEROED] = bytes(min(ZEROED, len(content) - place))
    return bytes(changed)


@dataclass
class Tally:
    """What became of the damaged files."""

    outcome: Outcome
    counts: Counter[str] = field(default_factory=Counter)

    def enter(self, what: str, kind: str, verdict: str) -> None:
        """`verdict` is empty where the damage was noticed, named, and got round."""
        self.counts["silently wrong"] += verdict.startswith("silently")
        self.outcome.check(not verdict, f"{what}, {kind}: {verdict}")


@procedure(
    "A6",
    title="damaged checkpoints, rollouts and policies: bit flips, truncation, zeroed bytes, swapped, mixed, missing and longer files",
    must="all noticed, the file named, none silently wrong; of checkpoints the one before is taken, with a warning",
    full=10_000,
    test=20,
)
def damaged_files(work: Work) -> Outcome:
    """`count` files of each kind of damage, for each kind of file."""
    with runs.in_memory(work) as here:
        return _damage_all(here, here.scratch)


def _damage_all(work: Work, scratch: Path) -> Outcome:
    rng, tally = random.Random(work.seed), Tally(Outcome())
    subjects: list[Any] = [Checkpoints(scratch / "checkpoints"), *single_files(scratch)]
    cases = [(subject, kind) for subject in subjects for kind in subject.kinds]
    for number in work.each(len(cases) * 10):  # in tenths, to tell how far it is
        subject, kind = cases[number // 10]
        for _ in range(work.count * (number % 10) // 10, work.count * (number % 10 + 1) // 10):
            tally.enter(subject.name, kind, subject.verdict(kind, rng))
    tally.outcome.figures["silently wrong"] = str(tally.counts["silently wrong"])
    tally.outcome.figures["kinds of damage"] = ", ".join(f"{len(subject.kinds)} to {subject.name}" for subject in subjects)
    tally.outcome.notes.append("the count is per kind of damage and kind of file")
    return tally.outcome


class Checkpoints:
    """Two checkpoints, of which the newer is damaged."""

    name = "checkpoints"
    kinds = (*FILE_KINDS, *PAIR_KINDS)

    def __init__(self, directory: Path) -> None:
        from inchworm.run.checkpoint import TrainingCheckpointer

        self._checkpointer = TrainingCheckpointer(directory)
        for step in (1, 2):
            self._checkpointer.save(step, state_of(step))
        self._before, self._newest = self._checkpointer.all()[-2:]
        self._content = {path.name: path.read_bytes() for path in self._newest.iterdir()}
        self._older = {path.name: path.read_bytes() for path in self._before.iterdir()}
        self._digests = {path: runs.digest(self._checkpointer.load(path).state) for path in (self._before, self._newest)}

    def verdict(self, kind: str, rng: random.Random) -> str:
        """Damage, load, put right again; what was wrong with how it went."""
        changed = self._changed(kind, rng)
        for name, content in changed.items():
            _put(self._newest / name, content)
        try:
            return self._load(changed)
        finally:
            for name in changed:
                _put(self._newest / name, self._content[name])

    def _changed(self, kind: str, rng: random.Random) -> dict[str, bytes | None]:
        name, other = rng.sample(sorted(self._content), 2)
        if kind == "two files swapped":
            return {name: self._content[other], other: self._content[name]}
        if kind == "part of another step":
            changed = [name] if rng.random() < 0.7 else [name, other]
            return {name: self._older[name] for name in changed if self._older[name] != self._content[name]}
        return {name: damaged(self._content[name], kind, rng)}

    def _load(self, changed: dict[str, bytes | None]) -> str:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = self._checkpointer.load()
        if runs.digest(found.state) != self._digests.get(found.path):
            return f"silently wrong: {found.path.name} with another content, {list(changed)} changed"
        if found.path != self._before:
            return f"not noticed in {list(changed)}"
        said = " ".join(str(warning.message) for warning in caught)
        named = self._newest.name in said and any(name in said for name in changed)
        return "" if named else f"the warning does not name {' or '.join(changed)}: {said}"


@dataclass
class SingleFile:
    """A file that stands alone, and how it is read."""

    name: str
    path: Path
    read: Callable[[Path], Any]
    other: bytes
    """A file of another kind, as if the two had been swapped."""
    sister: bytes
    """One of the same kind with other content."""
    kinds: tuple[str, ...] = (*FILE_KINDS, *PAIR_KINDS)

    def __post_init__(self) -> None:
        self._content = self.path.read_bytes()
        self._expected = runs.digest(self.read(self.path))

    def verdict(self, kind: str, rng: random.Random) -> str:
        """Damage, load, put right again; what was wrong with how it went."""
        from inchworm.core.errors import CorruptFileError

        _put(self.path, self._damaged(kind, rng))
        try:
            found = self.read(self.path)
        except (CorruptFileError, FileNotFoundError) as error:
            return "" if str(self.path) in str(error) else f"the error does not name the file: {error}"
        finally:
            _put(self.path, self._content)
        return "not noticed" if runs.digest(found) == self._expected else "silently wrong"

    def _damaged(self, kind: str, rng: random.Random) -> bytes | None:
        if kind == "two files swapped":
            return self.other
        if kind == "part of another step":
            cut = rng.randrange(1, min(len(self._content), len(self.sister)))
            mixed = self.sister[:cut] + self._content[cut:]
            return mixed if mixed not in (self._content, self.sister) else damaged(mixed, "bit flip", rng)
        return damaged(self._content, kind, rng)


def single_files(scratch: Path) -> list[SingleFile]:
    """A rollout and a policy, each with a sister."""
    from inchworm.policy.file import read_policy, save_policy
    from inchworm.rollout.fake import create_fake_rollout
    from inchworm.rollout.rollout import Rollout

    spec, weights = _a_policy()
    policies, rollouts = [], []
    for number in range(2):
        policies.append(save_policy(scratch / f"policy-{number}.safetensors", spec, _moved(weights, number)))
        rollout = create_fake_rollout(spec.observation_space, spec.action_space, 12, 2, seed=number, episode_length=5)
        rollouts.append(Path(rollout.save(scratch / f"rollout-{number}.safetensors")))
    one, two = (path.read_bytes() for path in (rollouts[0], policies[0]))
    return [
        SingleFile("rollouts", rollouts[0], lambda path: rollout_tree(Rollout.load(path)), two, rollouts[1].read_bytes()),
        SingleFile("policies", policies[0], lambda path: read_policy(path)[1], one, policies[1].read_bytes()),
    ]


def _moved(weights: dict[str, Any], number: int) -> dict[str, Any]:
    import numpy as np

    return {name: np.asarray(value + number, value.dtype) for name, value in weights.items()}


def rollout_tree(rollout: Any) -> dict[str, Any]:
    """A rollout as plain data and arrays."""
    fields = dict(rollout.to_dict())
    return {**fields, "episodes": [[episode.seed, episode.episode_return, episode.length] for episode in rollout.episodes]}


def _a_policy() -> tuple[Any, dict[str, Any]]:
    import gymnasium
    import numpy as np

    from inchworm.backends.numpy.policy import NumpyPolicy
    from inchworm.config.sections import PolicyConfig
    from inchworm.policy.spec import PolicySpec

    env = gymnasium.make("CartPole-v1")
    spec = PolicySpec(env.observation_space, env.action_space, PolicyConfig(hidden_sizes=(4,), normalize_observations=True))
    return spec, {name: np.array(value) for name, value in NumpyPolicy(spec, seed=0).get_weights().items()}


def _put(path: Path, content: bytes | None) -> None:
    path.unlink(missing_ok=True) if content is None else path.write_bytes(content)
