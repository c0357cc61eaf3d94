"""The list of historic bugs fits today's source, mutants are made where they should be, and what counts as noticed."""

import importlib.util
from pathlib import Path

import pytest

import inchworm
from faults import bugs, bugs_mutants
from faults.bugs import BUGS, Bug, Edit, Form, Verdict
from faults.programme import ROOT

SOURCE = Path(inchworm.__file__).parent
needs_mutmut = pytest.mark.skipif(importlib.util.find_spec("mutmut") is None, reason="needs mutmut")


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.number} {bug.title}")
def test_a_bug_fits_todays_source_and_is_python(bug: Bug) -> None:
    assert bug.forms
    for one in bug.forms:
        for file, text in bugs.edited(one, bugs.sources([one], SOURCE)).items():
            compile(text, file, "exec", dont_inherit=True)
        for test in one.tests:
            path, _, name = test.partition("::")
            assert (ROOT / "tests" / path).exists()
            assert not name or f"def {name}(" in (ROOT / "tests" / path).read_text(encoding="utf-8")


def test_there_are_34_each_once() -> None:
    assert [bug.number for bug in BUGS] == list(range(1, 35))


def test_a_text_that_no_longer_fits_is_an_error_that_says_so() -> None:
    with pytest.raises(ValueError, match=r"a\.py has this text 0 times instead of once; bring bugs_data\.toml up to date: 'x'"):
        bugs.edited(Form((Edit("a.py", "x", "y"),), ()), {"a.py": "1"})
    with pytest.raises(ValueError, match="2 times"):
        bugs.edited(Form((Edit("a.py", "x", "y"),), ()), {"a.py": "xx"})


def test_some_of_many_are_spread_over_all() -> None:
    assert bugs.spread(34, 2) == [0, 33]
    assert bugs.spread(34, 1) == [0]
    assert bugs.spread(5, 3) == [0, 2, 4]
    assert bugs.spread(3, 9) == [0, 1, 2]


def test_only_what_a_test_says_counts_as_judged() -> None:
    assert Verdict(False, "t.py::test_x", "assert 1 == 2", True, 1.0).judged
    assert not Verdict(False, "t.py (at collection)", "assert 1 == 2", True, 1.0).judged
    assert not Verdict(False, "t.py::test_x", "NameError: name 'y' is not defined", True, 1.0).judged
    assert not Verdict(True, "", "", True, 1.0).judged


TEXT = '''"""A module."""
from a import b
Alias: TypeAlias = "x | y"

@cache(16)
def half(x: "float" = 1.0) -> "float":
    """Half of it."""
    if x < 0:
        raise ValueError("no", 3)
    warnings.warn("1 + 1", stacklevel=2)
    return x / 2  # 2
'''


@needs_mutmut
def test_mutants_are_small_and_leave_texts_for_people_alone() -> None:
    found = bugs_mutants.mutants_of("policy/normalization.py", TEXT)
    assert {(mutant.before.strip(), mutant.after.strip()) for mutant in found} == {
        ("1.0", "2.0"),
        ("< 0", "<= 0"),
        ("0", "1"),
        ("x / 2", "x * 2"),
        ("2", "3"),
    }
    (divided,) = [mutant for mutant in found if mutant.after == "x * 2"]
    assert divided.key == "return x / 2  # 2 :: x / 2 -> x * 2"
    assert divided.applied(TEXT) == TEXT.replace("x / 2", "x * 2")


@needs_mutmut
def test_of_some_modules_only_what_a_resume_depends_on() -> None:
    text = "class A:\n    def state_dict(self):\n        return 1\n\n    def other(self):\n        return 2\n"
    assert [mutant.before for mutant in bugs_mutants.mutants_of("collect/collector.py", text)] == ["1"]


@needs_mutmut
def test_fewer_mutants_are_some_of_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bugs_mutants, "TESTS", dict.fromkeys(("core/seeding.py", "backends/numpy/gae.py", "backends/torch/gae.py"), ()))
    some, more = bugs_mutants.chosen(9, SOURCE), bugs_mutants.chosen(30, SOURCE)
    assert len(some) == 9
    assert len(more) == 30
    assert {mutant.key for mutant in some} <= {mutant.key for mutant in more}
    assert len({mutant.module for mutant in some}) == 3


def test_modules_tests_and_reasons_are_there() -> None:
    for module, tests in bugs_mutants.TESTS.items():
        assert (SOURCE / module).exists()
        for test in tests:
            assert (ROOT / "tests" / test.partition("::")[0]).exists()
    for module, known in bugs_mutants.reasons().items():
        text = " ".join((SOURCE / module).read_text(encoding="utf-8").split())
        for key, reason in known.items():
            assert reason
            assert " ".join(key.partition(" :: ")[0].split()) in text, f"{module} has no such line any more: {key}"


def test_a_survivor_needs_a_reason_and_few_may_survive() -> None:
    mutants = [bugs_mutants.Mutant("m.py", f"line {number}", "a", "b", 0, 1) for number in range(20)]
    known = {"m.py": {mutants[0].key: "equal", mutants[1].key: "equal"}}
    one = bugs.judged(mutants, mutants[:1], known)
    assert one.is_fine
    assert one.figures["noticed"] == "19 of 20 (95.0 %), in 1 modules"
    assert "survivor in m.py: `line 0 :: a -> b` — equal" in one.notes
    assert bugs.judged(mutants, mutants[5:6], known).failures == ["survived without a reason: m.py: line 5 :: a -> b"]
    assert bugs.judged(mutants, mutants[:2], known).failures == ["only 18 of 20 were noticed, less than 95 %"]
