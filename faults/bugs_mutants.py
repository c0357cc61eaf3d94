"""Mutants for E6m: the operators of mutmut (`dev` extra) applied to one place of a module at a time.

Excluded are docstrings, type annotations, texts of errors and warnings, decorators (such as the size of a cache), imports and `__all__`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SURVIVORS = Path(__file__).with_name("bugs_survivors.json")
"""Module -> key of a mutant -> why no test needs to notice it."""

_TESTS = {
    "backends/numpy/gae.py": (
        "conformance/test_gae.py backends/numpy/test_gae.py backends/test_registry.py conformance/test_central.py collect/test_teams.py"
    ),
    "backends/torch/gae.py": "conformance/test_gae.py backends/torch/test_gae.py backends/test_registry.py",
    "backends/numpy/loss.py": (
        "conformance/test_loss.py backends/numpy/test_loss.py conformance/test_learner.py::test_every_option_gives_equal_weights "
        "conformance/test_learner.py::test_every_kind_of_space_gives_equal_weights"
    ),
    "backends/torch/loss.py": "conformance/test_loss.py backends/torch/test_loss.py",
    "backends/numpy/distributions.py": (
        "backends/numpy/test_distributions.py conformance/test_learner.py::test_every_kind_of_space_gives_equal_weights "
        "conformance/test_distributions.py conformance/test_policy.py conformance/test_ratio.py"
    ),
    "backends/torch/policy.py": "conformance/test_distributions.py conformance/test_policy.py conformance/test_ratio.py",
    "env/values.py": "env/test_values.py",
    "policy/statistics.py": "policy/test_statistics.py conformance/test_policy.py backends/torch/test_learner.py",
    "backends/learner.py": "backends/test_learner.py conformance/test_learner.py train/test_profile.py",
    "rollout/sequences.py": "rollout/test_sequences.py backends/torch/test_learner.py conformance/test_central.py policy/test_spec.py",
    "policy/layout.py": "policy/test_layout.py policy/test_memory.py conformance/test_memory.py",
    "backends/numpy/network.py": "conformance/test_memory.py policy/test_memory.py",
    "backends/numpy/policy.py": (
        "backends/numpy/test_policy.py conformance/test_central.py policy/test_spec.py conformance/test_policy.py "
        "conformance/test_distributions.py conformance/test_memory.py"
    ),
    "backends/torch/network.py": (
        "backends/torch/test_memory.py conformance/test_memory.py backends/torch/test_network.py conformance/test_central.py "
        "conformance/test_distributions.py backends/torch/test_learner.py"
    ),
    "backends/composite.py": "backends/test_composite.py policy/test_composite.py",
    "env/pettingzoo_copy.py": "env/test_pettingzoo_copy.py collect/test_teams.py env/workers/test_pool.py",
    "collect/opponents.py": "collect/test_opponents.py collect/test_teams.py",
    "collect/collector.py": "collect/test_collector.py collect/test_teams.py",
    "run/checkpoint.py": "run/test_checkpoint.py run/test_saver.py",
    "run/saver.py": "run/test_saver.py train/test_trainer.py cli/test_train.py",
    "env/episodes.py": (
        "env/test_episodes.py env/test_vector_env.py "
        "env/workers/test_rebuild.py::test_a_worker_that_is_killed_at_any_moment_changes_nothing"
    ),
    "core/seeding.py": "core/test_seeding.py",
}
TESTS = {module: tuple(tests.split()) for module, tests in _TESTS.items()}
"""Module -> the test files that concern it, the quickest to judge first."""

ONLY = {"collect/collector.py": ("state_dict", "load_state_dict")}
"""Of these modules, the functions that a resume depends on."""

SILENT = ("warn", "_refuse", "_refusal", "add_note", "untrusted")
"""Functions whose arguments are messages."""


@dataclass(frozen=True)
class Mutant:
    """One small change of one module."""

    module: str
    line: str
    """The line where it begins, without its indentation."""
    before: str
    after: str
    start: int
    end: int

    @property
    def key(self) -> str:
        """Identity that does not depend on the line number."""
        before, after = (" ".join(text.split()) for text in (self.before, self.after))
        return f"{self.line} :: {before} -> {after}"

    def applied(self, text: str) -> str:
        return text[: self.start] + self.after + text[self.end :]


def mutants_of(module: str, text: str) -> list[Mutant]:
    """Every mutant of a module, in the order of its text."""
    import libcst as cst
    from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper
    from mutmut.mutation.mutators import mutation_operators

    wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
    spans = wrapper.resolve(ByteSpanPositionProvider)
    raw = text.encode()
    found: dict[tuple[int, int, str], Mutant] = {}
    for node in _places(wrapper.module, ONLY.get(module)):
        span = spans[node]
        start, end = (len(raw[:place].decode()) for place in (span.start, span.start + span.length))
        changed = [new for kind, operator in mutation_operators if isinstance(node, kind) for new in operator(node)]
        for after in map(wrapper.module.code_for_node, changed):
            first = text.rfind("\n", 0, start) + 1
            line = text[first : text.find("\n", start)].strip()
            mutant = Mutant(module, line, text[start:end], after, start, end)
            if after != mutant.before:
                with contextlib.suppress(SyntaxError):  # raised for a change that is not Python
                    compile(mutant.applied(text), "mutant", "exec", dont_inherit=True)
                    found.setdefault((start, end, after), mutant)
    return sorted(found.values(), key=lambda mutant: (mutant.start, mutant.end, mutant.after))


def _places(module: Any, functions: tuple[str, ...] | None) -> Iterator[Any]:
    """The nodes that may be changed, from the outside in."""
    waiting = [(node, functions is None) for node in reversed(module.children)]
    while waiting:
        node, inside = waiting.pop()
        if _is_left_out(node):
            continue
        inside = inside or (type(node).__name__ == "FunctionDef" and node.name.value in (functions or ()))
        if inside:
            yield node
        waiting += [(child, inside) for child in reversed(node.children)]


def _is_left_out(node: Any) -> bool:
    import libcst as cst

    if isinstance(node, cst.Annotation | cst.Raise | cst.Decorator | cst.Import | cst.ImportFrom | cst.Assert):
        return True
    if isinstance(node, cst.Expr) and isinstance(node.value, cst.SimpleString | cst.ConcatenatedString):
        return True  # a docstring
    if isinstance(node, cst.Assign) and any(getattr(target.target, "value", "") == "__all__" for target in node.targets):
        return True
    if isinstance(node, cst.AnnAssign) and "TypeAlias" in cst.Module([]).code_for_node(node.annotation.annotation):
        return True
    if isinstance(node, cst.Call):
        name = node.func.attr.value if isinstance(node.func, cst.Attribute) else getattr(node.func, "value", "")
        return name in SILENT
    return False


def chosen(count: int, root: Path, *, seed: int = 0) -> list[Mutant]:
    """`count` mutants of all modules, from each in proportion to how many it has; fewer are always some of more.

    Within a module a digest of seed and key decides, so that a change of one line leaves the choice elsewhere as it was.
    """
    ranked: list[tuple[float, Mutant]] = []
    for module in TESTS:
        mutants = mutants_of(module, (root / module).read_text(encoding="utf-8"))
        by_chance = sorted(mutants, key=lambda mutant: _digest(f"{seed}/{module}/{mutant.key}"))
        ranked += [((rank + int(_digest(module)[:8], 16) / 2**32) / len(mutants), mutant) for rank, mutant in enumerate(by_chance)]
    ranked.sort(key=lambda entry: entry[0])
    order = list(TESTS)
    return sorted((mutant for _, mutant in ranked[:count]), key=lambda mutant: (order.index(mutant.module), mutant.start, mutant.after))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def reasons() -> dict[str, dict[str, str]]:
    """Why known survivors survive: module -> key -> reason."""
    return dict(json.loads(SURVIVORS.read_text(encoding="utf-8")))
