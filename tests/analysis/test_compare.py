"""Comparisons of two settings: the measures by hand, whole ones, continued ones, and what is refused."""

import dataclasses
import html
import json
import re
import shutil
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from doubles.run_files import write_pairs, write_run
from doubles.runs import small_config
from doubles.seeds import train_here
from inchworm.analysis.compare import COMPARISON, ComparisonConfig, compare_settings, comparison_page, measure_pairs, read_comparison
from inchworm.analysis.runs import areas, read_run
from inchworm.cli.main import main
from inchworm.config.sections import EvalConfig, TrainingConfig
from inchworm.core.errors import ConfigError, InchwormError
from inchworm.core.types import SeedEvent
from inchworm.run.bundle import Bundle
from inchworm.train.seed_trainers import ProcessTrainer


@pytest.fixture(autouse=True)
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Train in this process, in an empty directory; the runs that were trained, in order."""
    found: list[str] = []

    def train(trainer: ProcessTrainer, bundle: Bundle, seeds: Sequence[int]) -> Generator[SeedEvent, None, None]:
        found.extend(f"{bundle.path.name}/{seed}" for seed in seeds)
        yield from train_here(bundle, seeds)

    monkeypatch.setattr(ProcessTrainer, "__call__", train)
    monkeypatch.chdir(tmp_path)
    return found


def settings(path: Path, **ppo: Any) -> tuple[TrainingConfig, TrainingConfig]:
    evaluation = EvalConfig(interval=0, final_episodes=1, num_envs=1)
    base = small_config(iterations=2, backend="numpy", evaluation=evaluation, name=path.name, directory=str(path.parent), report=True)
    return base, base.replace(ppo=base.ppo.replace(**ppo))


def comparison(path: Path, seeds: int = 8) -> ComparisonConfig:
    base, changed = settings(path, gamma=0.9)
    return ComparisonConfig(base=base, changed=changed, seeds=seeds)


def test_the_answer_by_hand(tmp_path: Path) -> None:
    """Final scores differ by 50, 51 and 49 in three pairs of three, curves not at all; a fourth run has no partner."""
    config = comparison(tmp_path / "first", seeds=3)
    write_pairs(tmp_path, {"base": [100.0, 110.0, 120.0], "changed": [150.0, 161.0, 169.0]})
    found = measure_pairs(tmp_path, config)
    assert (found.pairs, found.finished, found.answered) == (3, True, True)
    assert found.values["score"].tolist() == [[100.0, 110.0, 120.0], [150.0, 161.0, 169.0]]
    assert (found.answers["score"].mean, found.answers["area"].mean) == (50.0, 0.0)
    assert found.answers["score"].differs
    assert not found.answers["area"].differs
    assert str(found) == "ppo.gamma: 0.99 → 0.9: the final score is higher, as 3 of up to 3 pairs show"
    _, (area, score) = found.table()
    assert area[0] == "area under curve"
    assert score[:4] == ["final score", "110", "160", "+50"]
    assert score[-2:] == ["3", "yes"]
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["measures"]["score"]["differs"] is True


def test_pairs_count_up_to_the_first_that_is_not_done(tmp_path: Path) -> None:
    config = comparison(tmp_path / "first", seeds=5)
    write_pairs(tmp_path, {"base": [1.0, 2.0, 3.0], "changed": [1.0]})
    found = measure_pairs(tmp_path, config)
    assert (found.pairs, found.finished) == (1, False)
    assert "not answered after 1 of 5 pairs" in str(found)
    assert found.table()[1][0][4] == "too few pairs"
    assert not measure_pairs(tmp_path / "nowhere", config).pairs


def test_the_area_is_the_mean_return_over_the_steps_of_both(tmp_path: Path) -> None:
    """From 10 to 30 in 20 rows of 512 steps: the mean is 20. The other run ends after half of them, with 20: (15 + 20) / 2."""
    curve = {number * 512: 10 + 20 * (number - 1) / 19 for number in range(1, 21)}
    runs = []
    for rows in (20, 10):
        run = read_run(write_run(tmp_path / f"{rows}", rows=rows))
        table = [{"env_steps": float(step), "mean_return": value} for step, value in list(curve.items())[:rows]]
        runs.append(dataclasses.replace(run, rows=table))
    whole, half = areas(runs)
    assert whole == pytest.approx(20.0, abs=0.01)
    last = table[-1]["mean_return"]
    assert half == pytest.approx((9 * (10 + last) / 2 + 10 * last) / 19, abs=0.01)
    assert areas([dataclasses.replace(run, rows=[]) for run in runs]) == (0.0, 0.0)


def test_a_comparison_is_trained_once_and_continued(tmp_path: Path, trained: list[str]) -> None:
    base, changed = settings(tmp_path / "runs" / "first", gamma=0.9)
    found = compare_settings(base, changed, seeds=3, jobs=2)
    assert trained == ["base/0", "base/1", "changed/0", "changed/1", "base/2", "changed/2"]
    assert (found.pairs, found.finished) == (3, True)
    assert np.isfinite(found.values["area"]).all()
    path = tmp_path / "runs" / "first"
    page = (path / "report.html").read_text()
    assert "6 runs" in page
    assert "ppo.gamma" in page
    answer = (path / "comparison.json").read_bytes()
    shutil.rmtree(path / "changed" / "seed-1")
    (path / "changed" / "summary.json").unlink()  # as after a kill
    trained.clear()
    again = compare_settings(base, changed, seeds=3, jobs=1)
    assert trained == ["changed/1"]
    assert (path / "comparison.json").read_bytes() == answer
    assert str(again) == str(found)
    trained.clear()
    compare_settings(base, changed, seeds=3)
    assert not trained
    with pytest.raises(ConfigError, match=r"holds another comparison \(changed.ppo.gamma: 0.9 → 0.5\)"):
        compare_settings(base, settings(path, gamma=0.5)[1], seeds=3)
    with pytest.raises(ConfigError, match=r"\(seeds: 3 → 4\)"):
        compare_settings(base, changed, seeds=4)
    compare_settings(base, settings(path, learning_rate=1e-4)[1], seeds=3, jobs=3, overwrite=True)
    assert len(trained) == 6
    assert read_comparison(path).changes == ["ppo.learning_rate: 0.0003 → 0.0001"]


def test_the_same_setting_twice_has_the_same_runs(tmp_path: Path, trained: list[str]) -> None:
    """Common random numbers: a change that affects nothing leaves every difference at 0."""
    base, _ = settings(tmp_path / "same")
    found = compare_settings(base, base.replace(run=base.run.replace(checkpoint_interval=3)), seeds=3, jobs=3)
    assert (found.answers["area"].mean, found.answers["score"].mean) == (0.0, 0.0)
    assert not found.answered
    assert "no difference is shown by 3 pairs" in str(found)


def test_a_seed_that_fails_ends_it_and_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, changed = settings(tmp_path / "failing", gamma=0.9)

    def fail(trainer: ProcessTrainer, bundle: Bundle, seeds: Sequence[int]) -> Generator[SeedEvent, None, None]:
        yield SeedEvent(seeds[0], "progress", 0)
        yield SeedEvent(seeds[0], "failed", text="it broke")

    with monkeypatch.context() as patched:
        patched.setattr(ProcessTrainer, "__call__", fail)
        found = compare_settings(base, changed, seeds=3, jobs=1)
    assert (found.finished, found.pairs, [score.error for score in found.failed]) == (False, 0, ["it broke", "it broke"])
    assert compare_settings(base, changed, seeds=3, jobs=3).finished


def test_a_score_that_is_missing_and_a_damaged_summary_are_one_line(tmp_path: Path) -> None:
    config = comparison(tmp_path / "first", seeds=3)
    write_pairs(tmp_path, {"base": [1.0], "changed": [None]})
    with pytest.raises(InchwormError, match=r"seed 0 in .*changed has no score"):
        measure_pairs(tmp_path, config)
    (tmp_path / "base" / "summary.json").write_text('{"seeds": [')
    with pytest.raises(ConfigError, match="is not a readable summary"):
        measure_pairs(tmp_path, config)


SMALL = ["--ppo.rollout-steps=8", "--env.num-envs=2", "--total-timesteps=64", "--evaluation.final-episodes=1", "--backend=numpy"]
SMALL += ["--ppo.minibatch-size=8", "--evaluation.interval=0"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], trained: list[str]) -> None:
    arguments = ["compare", "CartPole-v1", *SMALL, "--seeds=3", "--jobs=3", "--run.name=lambda"]
    assert main([*arguments, "--change", "ppo.gae_lambda=0.5", "--change", "ppo.max_grad_norm=null"]) == 0
    page = Path("runs/lambda/report.html").read_bytes()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "comparing two settings of CartPole-v1 with up to 3 seeds, 64 steps each, run runs/lambda"
    assert "base: seeds 0 to 2" in lines
    assert any(line.startswith("final score") for line in lines)
    assert lines[-1] == "run:    runs/lambda (report.html, comparison.json, base, changed)"
    assert lines[-2].startswith("answer: ppo.gae_lambda: ")
    assert read_comparison(Path("runs/lambda")).changed.ppo.max_grad_norm is None
    trained.clear()
    assert main(["compare", "lambda", "--quiet"]) == 0
    assert not trained
    Path("runs/lambda/report.html").unlink()
    assert main(["report", "lambda"]) == 0
    assert main(["report", "lambda", "--out", "page.html"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["runs/lambda/report.html", "page.html"]
    assert len(Path("page.html").read_bytes()) == len(page)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["CartPole-v1"], "no change is given; type: inchworm compare ENV --change ppo.gae_lambda=0.9"),
        (["--change", "ppo.gamma=0.9"], "no environment is given"),
        (
            ["CartPole-v1", "--change", "ppo.gae_lamda=0.9"],
            "--change ppo.gae_lamda=0.9: unknown flag --ppo.gae-lamda; did you mean --ppo.gae-lambda?",
        ),
        (["CartPole-v1", "--change", "gamma=0.9"], "--change gamma=0.9 must be SETTING=VALUE with the section"),
        (["CartPole-v1", "--change", "ppo.gamma"], "--change ppo.gamma must be SETTING=VALUE"),
        (["CartPole-v1", "--change", "ppo.gamma=2"], "ppo.gamma"),
        (["CartPole-v1", "--change", "run.seed=3"], "both settings have the same seeds, in one directory; change another setting"),
        (["CartPole-v1", "--change", "env.num_envs=8", "--env.num-envs=8"], "the two settings are equal"),
        (["CartPole-v1", "--change", "ppo.gamma=0.9", "--seeds=2"], "--seeds 2 is too few to show a difference"),
        (["CartPole-v1", "--change", "ppo.gamma=0.9", "--run.name=single"], "is a single run; use another run.name"),
        (["CartPole-v1", "--change", "ppo.gamma=0.9", "--run.name=foreign"], "is not a comparison and holds photo.png"),
        (["old", "--seeds=9", "--change", "ppo.gamma=0.9"], "old is a comparison, which continues as it began"),
        (["damaged"], "comparison"),
    ],
)
def test_wrong_use_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    write_run(tmp_path / "runs" / "single")
    for name in ("foreign", "old", "damaged"):
        (tmp_path / "runs" / name).mkdir()
    (tmp_path / "runs/foreign/photo.png").touch()
    (tmp_path / "runs/old" / COMPARISON).write_text(comparison(tmp_path / "old").to_yaml())
    (tmp_path / "runs/damaged" / COMPARISON).write_text("base: {ppo: [")
    before = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert main(["compare", *arguments]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert len(printed.splitlines()) == 1
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == before


def test_the_page_has_the_answer_its_looks_and_every_pair(tmp_path: Path) -> None:
    """Final scores differ by 50, 51 and 49, so the mean is 50 after 3 of 3 pairs, which is the first look; curves do not differ."""
    config = comparison(tmp_path / "first", seeds=3)
    write_pairs(tmp_path, {"base": [100.0, 110.0, 120.0], "changed": [150.0, 161.0, 169.0]})
    page = comparison_page(measure_pairs(tmp_path, config))
    assert "<p>ppo.gamma: 0.99 → 0.9: the final score is higher, as 3 of up to 3 pairs show</p>" in page
    assert "<td>1</td><td>119.5</td><td>119.5</td><td>+0</td><td>110</td><td>161</td><td>+51</td>" in page
    charts = [json.loads(html.unescape(text)) for text in re.findall(r'data-chart="([^"]*)"', page)]
    looks = [chart for chart in charts if chart["over"] == "pairs" and chart["lines"][0]["y"] == [50.0]]
    line, above, below = looks[0]["lines"]
    half = line["high"][0] - 50.0
    assert (line["x"], line["low"][0]) == ([3], pytest.approx(50.0 - half))
    assert 0 < half < 50, "0 is left out of the interval, and the mean is beyond the boundary"
    assert (above["y"][0], below["y"][0]) == (pytest.approx(half, rel=1e-3), pytest.approx(-half, rel=1e-3))
    curves = next(chart for chart in charts if chart["lines"][-1]["name"] == "mean of the pairs")
    assert {*curves["lines"][-1]["y"], *curves["lines"][0]["y"]} == {0.0}
    assert "6 runs" in page


def test_a_page_of_pairs_before_the_first_look_says_so(tmp_path: Path) -> None:
    config = comparison(tmp_path / "first", seeds=5)
    write_pairs(tmp_path, {"base": [1.0, 2.0], "changed": [2.0, 3.0]})
    assert comparison_page(measure_pairs(tmp_path, config)).count("The first look needs 3 pairs or more.") == 2
