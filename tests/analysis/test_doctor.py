"""Every rule of the doctor twice: a run that was made sick on purpose is diagnosed, and healthy ones are not."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from doubles.patients import HEALTHY, SICK, Patient, train_patient
from inchworm.analysis.doctor import MIN_UPDATES, RULES, diagnose, findings_text
from inchworm.analysis.runs import RunRecord

pytestmark = pytest.mark.filterwarnings("ignore")

CASES = [pytest.param(rule, patient, id=f"{rule}-{number}") for rule, patients in SICK.items() for number, patient in enumerate(patients)]


def rules_of(run: RunRecord) -> list[str]:
    return [finding.rule for finding in diagnose(run)]


@pytest.mark.parametrize(("rule", "patient"), CASES)
def test_a_sick_run_is_diagnosed(rule: str, patient: Patient, tmp_path: Path) -> None:
    found = diagnose(train_patient(patient, tmp_path / "run"))
    named = {finding.rule: finding for finding in found}
    assert rule in named
    assert named[rule].tries, "what to try"
    assert any(character.isdigit() for character in named[rule].why), "the numbers"


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_not(name: str, tmp_path: Path) -> None:
    assert rules_of(train_patient(HEALTHY[name], tmp_path / "run")) == []


@pytest.mark.by_hand
@pytest.mark.parametrize(("rule", "patient"), CASES)
def test_thresholds_hold_on_an_environment_and_seed_that_did_not_set_them(rule: str, patient: Patient, tmp_path: Path) -> None:
    assert rule in rules_of(train_patient(patient, tmp_path / "run", env="Acrobot-v1", seed=11))


@pytest.mark.by_hand
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_of_another_seed_are_left_alone(name: str, tmp_path: Path) -> None:
    assert rules_of(train_patient(HEALTHY[name], tmp_path / "run", seed=12)) == []


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return train_patient(Patient(iterations=8), tmp_path_factory.mktemp("healthy") / "run")


def timed(run: RunRecord, **seconds: float) -> RunRecord:
    row = {"env_steps": 100.0, "steps_per_second": 50.0, "between_seconds": 0.0, **seconds}
    return dataclasses.replace(run, timing=[row] * 8)


@pytest.mark.parametrize(("part", "word"), [("env", "environment"), ("learn", "Learning")])
def test_what_a_slow_run_waits_for_is_a_note(healthy: RunRecord, part: str, word: str) -> None:
    env = {"seconds": 10.0, "collect_seconds": 9.5, "env_seconds": 9.0, "learn_seconds": 0.5}
    learn = {"seconds": 10.0, "collect_seconds": 1.0, "env_seconds": 0.5, "learn_seconds": 9.0}
    (finding,) = diagnose(timed(healthy, **(env if part == "env" else learn)))
    assert (finding.rule, finding.note) == (f"bound_by_{'learning' if part == 'learn' else part}", True)
    assert word in finding.title
    assert "90% of 80 s" in finding.why
    assert diagnose(timed(healthy, seconds=10.0, collect_seconds=5.0, env_seconds=4.0, learn_seconds=5.0)) == [], "neither of them"


def test_every_rule_has_a_patient() -> None:
    order = [rule.name for rule in RULES]
    assert {*order} == {*SICK, "bound_by_env", "bound_by_learning"}
    assert all(order.index(cause) < order.index(rule.name) for rule in RULES for cause in rule.follows), "causes are asked first"


def test_every_rule_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert [f"### {rule.name.replace('_', '-')}" for rule in RULES] == [line for line in page.splitlines() if line.startswith("### ")]


def test_causes_come_before_what_follows_from_them(healthy: RunRecord) -> None:
    def sick(row: dict[str, Any]) -> dict[str, Any]:
        scales = {"return_mean": 1e5, "return_std": 1e4, "advantage_std": 1e4, "value_loss": 1e12}
        return {**row, **scales, "explained_variance": -1.0, "grad_norm": 1e6}

    run = dataclasses.replace(healthy, rows=[sick(dict(row)) for row in healthy.rows] * 4)
    found = diagnose(run)
    assert [finding.rule for finding in found] == ["reward_scale", "clipped_gradients", "value_scale", "useless_critic"]
    assert [finding.follows for finding in found] == ["", "reward_scale", "reward_scale", "reward_scale"]
    text = findings_text(found)
    assert text.startswith("1. Rewards are far from unit scale and nothing normalises them\n   why: ")
    assert "   try: set ppo.scale_rewards=true\n" in text
    assert "2. The gradient is always clipped, and by far (probably because of 1)" in text


def test_a_run_of_few_updates_is_not_judged(healthy: RunRecord) -> None:
    few = dataclasses.replace(healthy, rows=[{**row, "learning_rate": 0.0} for row in healthy.rows[: MIN_UPDATES - 1]])
    assert diagnose(few) == []
    enough = dataclasses.replace(healthy, rows=[{**row, "learning_rate": 0.0} for row in healthy.rows[:MIN_UPDATES]])
    assert rules_of(enough)[0] == "learning_rate_zero"
