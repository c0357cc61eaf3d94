import json
from pathlib import Path
from typing import Any

import pytest

from inchworm.evaluate.evaluator import evaluate_policy
from inchworm.policy.file import load_policy
from inchworm.tracking.jsonl import read_rows


def test_by_default_the_score_is_that_of_the_final_evaluation(cli: Any, run: Path) -> None:
    result = cli("evaluate", "small", "--json")
    assert result.code == 0, result.err
    final = read_rows(run / "metrics.jsonl")[-1]
    stats = json.loads(result.out)
    assert stats["episodes"] == 3
    assert stats["mean_return"] == final["evaluation/mean_return"]
    assert stats["deterministic"] is True


def test_the_score_is_one_line_by_path_or_by_name(cli: Any, run: Path) -> None:
    by_name, by_path = cli("evaluate", "small", "--episodes", 4), cli("evaluate", run, "--episodes", 4, "--last")
    assert by_name.code == by_path.code == 0
    assert by_name.out.startswith("runs/small/policy.safetensors: mean return ")
    assert "4 greedy episodes" in by_name.out
    assert by_name.out.split(": ")[1] == by_path.out.split(": ")[1]
    assert len(by_name.out.splitlines()) == 1


def test_episodes_seed_and_sampling_are_those_asked_for(cli: Any, run: Path) -> None:
    result = cli("evaluate", "small", "--episodes", 5, "--seed", 7, "--sampled", "--num-envs", 2, "--best", "--json")
    expected = evaluate_policy(load_policy(run / "best_policy.safetensors"), "CartPole-v1", 5, seed=7, deterministic=False, num_envs=2)
    assert json.loads(result.out) == expected.to_dict()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no run is given; type: inchworm evaluate RUN"),
        (["smal"], "there is no run smal; nearest in runs: small"),
        (["small", "--best", "--last"], "--best and --last exclude each other"),
        (["small", "--episodes", "0"], "evaluation.episodes=0 must be 1 or more"),
        (["small", "--env", "Acrobot-v1"], "was made for the observation space"),
        (["small", "--env", "Nowhere-v1"], "is not registered"),
        (["small", "--opponent", "heuristic"], "CartPole-v1 has no heuristic, only Skirmish-v0 has"),
        (["small", "--opponent", "random"], "a match needs an environment with two teams"),
        (["small", "--skill", "0.5"], "--skill needs an opponent; add --opponent heuristic"),
        (["small", "--save-replay", "x.json"], "--save-replay needs an opponent; add --opponent heuristic"),
        (["small", "--opponent", "random", "--skill", "0.5"], "--skill applies to --opponent heuristic, not to random"),
        (["small", "--suite", "x.yaml", "--opponent", "random"], "--opponent and --suite exclude each other"),
        (["small", "--suite", "x.yaml", "--episodes", "3"], "--episodes and --suite exclude each other"),
        (["small", "--suite", "x.yaml"], "cannot read the suite x.yaml"),
        (["small", "--episode", "3"], "unknown flag --episode; did you mean --episodes?"),
    ],
)
def test_wrong_use_is_one_line(cli: Any, run: Path, arguments: list[str], message: str) -> None:
    result = cli("evaluate", *arguments)
    assert result.code == 2
    assert message in result.err
    assert len(result.err.splitlines()) == 1


def test_a_run_without_a_policy_says_so(cli: Any, run: Path) -> None:
    (run / "best_policy.safetensors").unlink()
    assert "has no best_policy.safetensors yet; omit --best" in cli("evaluate", "small", "--best").err
    (run / "policy.safetensors").unlink()
    result = cli("evaluate", "small")
    assert result.code == 2
    assert "inchworm resume runs/small continues its training" in result.err


def test_a_damaged_policy_is_a_failure_in_one_line(cli: Any, run: Path) -> None:
    content = bytearray((run / "policy.safetensors").read_bytes())
    content[-1] ^= 1
    (run / "policy.safetensors").write_bytes(content)
    result = cli("evaluate", "small")
    assert result.code == 1
    assert "policy.safetensors" in result.err
    assert "Traceback" not in result.err


def test_a_suite_is_scored_in_groups(cli: Any, run: Path) -> None:
    Path("suite.yaml").write_text(
        "control:\n  - {env: CartPole-v1, episodes: 3, score_range: [0, 500]}\n  - {env: CartPole-v0, episodes: 2, name: short}\n"
    )
    result = cli("evaluate", "small", "--suite", "suite.yaml", "--json", "--quiet")
    assert result.code == 0, result.err
    data = json.loads(result.out)
    pole, short = (data["groups"]["control"][name]["mean_return"] for name in ("CartPole-v1", "short"))
    assert data["scores"] == {
        "control/CartPole-v1": pole / 500,
        "control/short": short,
        "control/score": (pole / 500 + short) / 2,
        "overall": (pole / 500 + short) / 2,
    }
    lines = cli("evaluate", "small", "--suite", "suite.yaml").out.splitlines()
    assert lines[0] == "runs/small/policy.safetensors:"
    assert lines[1].startswith(f"control/CartPole-v1  {pole / 500:>7.4g}  (scaled return; mean return {pole:.5g}")
    assert lines[-1].startswith("overall  ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("control: []", "suite.yaml: suite control is empty"),
        ("control: [Acrobot-v1]", "suite control, Acrobot-v1: the policy was made for the observation space"),
        ("control: [Nowhere-v1]", "suite control, Nowhere-v1: "),
        ("control: ['x.y:make']", "suite.yaml: suite control imports code (x.y:make)"),
    ],
)
def test_a_suite_that_does_not_fit_is_one_line(cli: Any, run: Path, text: str, message: str) -> None:
    Path("suite.yaml").write_text(text)
    result = cli("evaluate", "small", "--suite", "suite.yaml")
    assert result.code == 2
    assert message in result.err
    assert len(result.err.splitlines()) == 1
