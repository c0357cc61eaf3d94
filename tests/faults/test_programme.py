"""Every procedure of the fault programme with its small count, and the harness itself."""

import json
from pathlib import Path

import pytest

from faults import page
from faults.__main__ import count_of
from faults.programme import Outcome, Procedure, Work, as_data, load_all

PROCEDURES = load_all()


@pytest.mark.slow
@pytest.mark.parametrize("id", [id for id, entry in PROCEDURES.items() if entry.test])
def test_a_procedure_with_its_small_count(id: str, tmp_path: Path) -> None:
    entry = PROCEDURES[id]
    if not entry.possible():
        pytest.skip(f"needs {entry.needs}")
    (tmp_path / "scratch").mkdir()
    outcome = entry.run(Work(entry.test, tmp_path / "scratch"))
    assert outcome.is_fine, f"{outcome.passed} of {outcome.total}: {outcome.failures}"


def _nothing(work: Work) -> Outcome:
    return Outcome()


def _entry(full: int = 200, usual: int = 50) -> Procedure:
    return Procedure("A1", "kill | it", "all <b>", full, usual, 1, _nothing)


def test_an_outcome_without_a_case_is_not_fine() -> None:
    assert not Outcome().is_fine
    outcome = Outcome()
    assert outcome.check(True, "")
    assert outcome.is_fine
    assert not outcome.check(False, "it broke")
    assert (outcome.passed, outcome.total, outcome.failures, outcome.is_fine) == (1, 2, ["it broke"], False)


def test_counts_are_the_usual_ones_or_a_share_of_the_full_ones() -> None:
    assert count_of(_entry(), None) == 50
    assert count_of(_entry(), 0.1) == 20
    assert count_of(_entry(), 0.001) == 1


def test_work_tells_how_far_it_is() -> None:
    told: list[tuple[int, int]] = []
    assert list(Work(2, Path(), tick=lambda done, total: told.append((done, total))).each()) == [0, 1]
    assert told == [(0, 2), (1, 2), (2, 2)]


def test_results_are_merged_by_id_and_by_who(tmp_path: Path) -> None:
    page.keep("A1", "", {"passed": 1}, tmp_path)
    page.keep("A1", "SB3", {"passed": 0}, tmp_path)
    page.keep("B1", "", {"passed": 3}, tmp_path)
    page.keep("A1", "", {"passed": 2}, tmp_path)
    kept = page.read_all(tmp_path)
    assert {id: {who: found["passed"] for who, found in entry.items()} for id, entry in kept.items()} == {
        "A1": {"inchworm": 2, "SB3": 0},
        "B1": {"inchworm": 3},
    }


def test_the_page_says_what_was_reduced_what_fell_short_and_what_the_peer_did() -> None:
    found = {**as_data(Outcome(49, 50, {"longest": "1 s"}, ["number 7: gone"], ["a note"]), count=50, seconds=3.0), "machine": "m"}
    peer = {**as_data(Outcome(0, 5, {}, ["lost"]), count=5, seconds=1.0), "machine": "m"}
    text = page.page_text({"A1": _entry()}, {"A1": {"inchworm": found, "SB3": peer}})
    assert "| A1 | kill \\| it | all &lt;b&gt; | 49 of 50 | 50 (reduced; full: 200) | **short** |" in text
    assert "**A1**: number 7: gone" in text
    assert "SB3: 0 of 5 | lost |" in text
    assert "longest 1 s; a note" in text
    assert "(reduced" not in page.page_text({"A1": _entry(full=50)}, {"A1": {"inchworm": found}})


def test_a_procedure_that_was_not_measured_is_on_the_page() -> None:
    assert "not measured yet" in page.page_text({"A1": _entry()}, {})


def test_the_kept_results_are_of_known_procedures_and_on_the_page() -> None:
    for id, who in page.read_all().items():
        assert id in PROCEDURES
        assert json.dumps(who)
    assert page.PAGE.read_text(encoding="utf-8") == page.page_text(PROCEDURES, page.read_all())
