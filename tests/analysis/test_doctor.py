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


NEAR: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # rule -> metrics that look like its illness and are none, and the same beyond its threshold
    "learning_rate_zero": ({"learning_rate": 1e-7}, {"learning_rate": 0.0}),
    "hidden_termination": ({"truncated_share": 1.0, "length_std": 0.0}, {"truncated_share": 1.0, "length_std": 40.0}),
    "reward_scale": ({"return_mean": 600.0, "return_std": 600.0}, {"return_mean": 800.0, "return_std": 800.0}),
    "observation_scale": ({"observation_scale": 29.0}, {"observation_scale": 31.0}),
    "forced_actions": ({"forced_share": 0.89}, {"forced_share": 0.91}),
    "no_reward_signal": ({"advantage_std": 1e-9}, {"advantage_std": 1e-9, "mean_return": 20.0}),
    "clipped_gradients": ({"grad_norm": 99.0}, {"grad_norm": 101.0}),
    "large_updates": ({"approx_kl": 0.07, "clip_fraction": 0.5}, {"approx_kl": 0.09, "clip_fraction": 0.5}),
    "no_updates": ({"approx_kl": 1e-5, "clip_fraction": 0.002}, {"approx_kl": 1e-5, "clip_fraction": 0.0005}),
    "value_scale": (
        {"value_loss": 90.0, "return_mean": 5.0, "return_std": 6.0},
        {"value_loss": 120.0, "return_mean": 5.0, "return_std": 6.0},
    ),
    "useless_critic": ({"explained_variance": 0.03}, {"explained_variance": 0.01}),
}


@pytest.mark.parametrize("rule", NEAR)
def test_both_sides_of_a_threshold(healthy: RunRecord, rule: str) -> None:
    """Medians are equal to the metrics here; `ppo.max_grad_norm` is 0.5."""
    for changes, is_sick in zip(NEAR[rule], (False, True), strict=True):
        rows = [
            {**row, "mean_length": 200.0, "mean_return": 20.0 + 5 * number, **changes} for number, row in enumerate([*healthy.rows] * 4)
        ]
        assert (rule in rules_of(dataclasses.replace(healthy, rows=rows))) == is_sick, changes


def test_a_normaliser_excuses_any_scale(healthy: RunRecord) -> None:
    large = {"return_mean": 1e5, "return_std": 1e5, "observation_scale": 1e5}
    run = dataclasses.replace(healthy, rows=[{**row, **large} for row in healthy.rows])
    assert rules_of(run)[:2] == ["reward_scale", "observation_scale"]
    for values in ({"policy": {"normalize_observations": True, "normalize_values": True}},
                   {"policy": {"normalize_observations": True}, "ppo": {"scale_rewards": True}}):  # fmt: skip
        config = run.config.replace(**{name: getattr(run.config, name).replace(**changed) for name, changed in values.items()})
        assert not {"reward_scale", "observation_scale"} & {*rules_of(dataclasses.replace(run, config=config))}


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
