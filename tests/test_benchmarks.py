"""The benchmarks' own arithmetic: statistics against tables, curves and pages against hand-made ones; and the regression guard."""

import dataclasses
import importlib
import math
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy.stats import t

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_every_script_imports(module: Any) -> None:
    for path in sorted(BENCHMARKS.glob("*.py")):
        module(path.stem)


def test_welch_by_hand(module: Any) -> None:
    """Means 2 and 4, variances 1 and 4, n = 3 each: t = -2 / sqrt(5/3) = -1.549, df = (5/3)² / ((1/3)²/2 + (4/3)²/2) = 50/17."""
    ours, theirs = [1.0, 2.0, 3.0], [2.0, 4.0, 6.0]
    seeds = module("seeds")
    assert seeds.p_differs(ours, theirs) == pytest.approx(2 * t.cdf(-2 / math.sqrt(5 / 3), 50 / 17), abs=1e-12)
    assert seeds.p_differs([5.0, 5.0], [5.0, 5.0]) == 1.0
    assert seeds.p_differs([4.0, 4.0], [5.0, 5.0]) == 0.0


def test_statistics_over_seeds_by_hand(module: Any) -> None:
    seeds = module("seeds")
    assert seeds.half_interval([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2.776 * math.sqrt(0.5), abs=1e-3)  # variance 2.5
    assert seeds.holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})


def test_curves_are_well_formed_and_smoothed_over_a_tenth(module: Any) -> None:
    curves = module("curves")
    curve = [(100 * index, float(index)) for index in range(1, 11)]  # one episode every 100 of 1000 steps
    line = curves.smoothed(curve, 1000)
    assert line[-1] == 10.0  # the last tenth, (900, 1000], holds the episode of return 10 alone
    assert math.isnan(line[0])  # nothing had ended by then
    svg = ElementTree.fromstring(curves.draw("a <b> & c", {"inchworm": np.stack([line, line])}, 1000))
    assert svg.tag.endswith("svg")


@pytest.mark.parametrize(("low", "high"), [(0.0, 500.0), (-1600.0, -120.0), (9.3, 9.4), (-5.0, 5.0)])
def test_ticks_cover_the_values(module: Any, low: float, high: float) -> None:
    ticks = module("curves").nice_ticks(low, high)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert 2 <= len(ticks) <= 8


def a_run(height: float, *, score: float = 500.0) -> dict[str, Any]:
    """A run of 800 steps that earns `height` in its first half and twice that in its second."""
    return {"steps": 800, "curve": [(50 * k, height * (1 + (k > 8))) for k in range(1, 17)], "score": score}


def test_figures_of_a_run_by_hand(module: Any) -> None:
    found = module("learning").figures(a_run(10.0))
    assert found["area under the curve"] == pytest.approx(14.3, abs=0.1)  # twice as high from step 450 on, seen half a window later
    assert (found["last eighth"], found["greedy score"]) == (20.0, 500.0)
    assert "sampled score" not in found


def test_verdicts(module: Any) -> None:
    learning = module("learning")
    good, bad = [a_run(10.0 + i) for i in range(5)], [a_run(1.0 + i / 10) for i in range(5)]
    for ours, theirs, wanted in ((good, bad, "higher"), (bad, good, "lower"), (good, good, "no difference shown")):
        sides = {"inchworm": ours, "stable-baselines3": theirs}
        p_values = learning.corrected_p({"pendulum": sides})
        assert learning.verdict("pendulum", sides, "last eighth", p_values).endswith(wanted)
        assert learning.verdict("pendulum", sides, "greedy score", p_values) == "not tested"
    assert len(learning.rows({"pendulum": sides, "cartpole": {"inchworm": good}})) == len(learning.SHOWN)
    assert learning.preset_verdict({"inchworm": good}) == "5 of 5 seeds at 475 or more, worst 500.0"
    assert learning.preset_verdict({"inchworm": [*good[:4], a_run(1.0, score=474.9)]}).startswith("4 of 5")


# ---- the performance page ----
def _run(steps: float, seconds: float, **more: Any) -> dict[str, Any]:
    return {"steps": steps, "seconds": seconds, "learn_seconds": seconds / 2, "last_return": 100.0, **more}


def _compared(speeds: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """What compare.py keeps, from env steps per second."""
    works = {
        work: {
            "threads": dict.fromkeys(sides, 1),
            "sweep": {side: {"1": _run(1000, 1.0, warmup_steps=1000, warmup_seconds=5.0)} for side in sides},
            "runs": {side: [_run(1000, 1000 / value) for value in values] for side, values in sides.items()},
        }
        for work, sides in speeds.items()
    }
    return {"sides": list(next(iter(speeds.values()))), "works": works}


def test_variants_are_compared_seed_by_seed_and_finished_runs_are_not_repeated(
    module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    variants = module("variants")
    cases = [variants.Case("walk", name, "a", "none:none") for name in ("a", "b")]
    measured: list[tuple[str, int]] = []

    def measure(case: Any, seed: int, scale: float) -> dict[str, Any]:
        measured.append((case.variant, seed))
        height = 10.0 * seed + (seed + 1 if case.variant == "b" else 0)  # b is above a by 1, 2, 3
        named = {"task": case.task, "variant": case.variant, "seed": seed, "scale": scale}
        return {**named, "steps": 1000, "seconds": 1.0, **dict.fromkeys(variants.SHOWN, height)}

    monkeypatch.setattr(variants, "measure", measure)
    path = tmp_path / "runs.jsonl"
    variants.run_missing(path, cases, 2, 1.0, 1)
    path.write_text(path.read_text() + '{"task": "walk", "va')  # killed while it wrote
    variants.run_missing(path, cases, 3, 1.0, 1)
    assert measured == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    runs = variants.read_runs(path)
    assert len(runs) == 6
    text = "\n".join(variants.paired_report(cases, runs))
    assert "| b | 3 | 12 ± 27 |" in text  # 1, 12, 23: 4.303 · 11 / sqrt 3
    assert "| 2 ± 2.5 | 2 ± 2.5 | 2 ± 2.5 |" in text  # 4.303 / sqrt 3
    assert "b from a" in text


@pytest.mark.parametrize("name", ["forget_bias", "value_scaling", "presets", "jax_learning", "off_policy"])
def test_every_variant_has_its_base(module: Any, name: str) -> None:
    cases = module(name).CASES
    known = {(case.task, case.variant) for case in cases}
    assert len(known) == len(cases)
    assert all((case.task, case.base) in known for case in cases)


def test_the_cost_of_the_loop_is_measured_on_equal_work(module: Any) -> None:
    loop_cost = module("loop_cost")
    data = loop_cost.measure(1, 64, ("numpy",))
    found = loop_cost.section(data)
    assert found.title == "The cost of separate parts"
    assert [target.bound for target in found.targets] == [1.02]


def test_simulators_on_a_device_are_compared_within_repeats(module: Any, tmp_path: Any) -> None:
    device_env, work = module("device_env"), module("device_work")
    settings = dataclasses.asdict(work.Settings(num_envs=8, rollout_steps=4, hidden_sizes=(8,), num_minibatches=1))
    device_env.save_trained(settings, 1, str(tmp_path / "weights.npz"))
    row = device_env.collect(settings, "device", 1, str(tmp_path / "weights.npz"))

    def slower(factor: float) -> Any:
        return {policy: {**found, "seconds": factor * found["seconds"]} for policy, found in row.items()}

    names = (device_env.DEVICE, device_env.HOST, device_env.NUMPY)
    collecting = {name: [slower(factor), slower(2 * factor)] for name, factor in zip(names, (1, 2, 4))}
    iteration = {"collect": 1.0, "learn": 3.0, "whole": 4.0}
    training = {device_env.COMPILED: [iteration], device_env.PEER: [{**iteration, "whole": 5.0}]}
    data = {"settings": settings, "repeats": 2, "threads": 1, "trained_for": 1, "load": 0.0, "rsl_rl": "5.5.1"}
    found = device_env.section({**data, "collecting": collecting, "training": training})
    assert [target.value for target in found.targets] == pytest.approx([4.0, 4.0, 0.8])
    assert [target.bound for target in found.targets] == [3.0, 3.0, 1.0]


def test_old_rollouts_are_as_old_as_the_case_says(module: Any) -> None:
    found = module("off_policy").train(2, {"proximal_decay": 0.0}, seed=0, scale=0.04)  # max_staleness refuses older ones
    assert found["steps"] == 2560


def test_a_correction_is_judged_by_its_share_of_the_area_without_it(module: Any) -> None:
    off_policy = module("off_policy")
    figure = "area under the curve"
    runs = [
        {"task": off_policy.task_of(age), "variant": name, "seed": seed, figure: area * (1 + seed)}
        for age, name, area in ((1, "PPO", 100.0), (1, "V-trace", 110.0), (4, "PPO", 100.0), (4, "V-trace", 80.0))
        for seed in range(3)
    ]
    assert "| V-trace | 1.10 ± 0.00, better | 0.80 ± 0.00, not shown to hold |  |" in off_policy.verdicts(runs)


def test_ratios_are_taken_within_repeats(module: Any) -> None:
    """A machine that is twice as slow in the second repeat: 4/2 and 2/1 are both 2, although the speeds are not."""
    figures = module("figures")
    ours, theirs = [_run(100, 100 / 4), _run(100, 100 / 2)], [_run(100, 100 / 2), _run(100, 100 / 1)]
    assert figures.ratios(ours, theirs) == pytest.approx([2.0, 2.0])
    with pytest.raises(ValueError, match="shorter"):
        figures.ratios(ours, theirs[:1])
    assert figures.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert math.isnan(figures.geometric_mean([]))


def test_compiling_is_the_warm_up_beyond_its_own_steps(module: Any) -> None:
    """Two iterations of 50 steps at 100 steps/s take 1 s; the warm-up took 4 s: 3 s of compiling."""
    figures = module("figures")
    assert figures.compile_seconds(_run(500, 5.0, warmup_steps=100, warmup_seconds=4.0)) == pytest.approx(3.0)
    assert figures.compile_seconds(_run(500, 5.0, warmup_steps=100, warmup_seconds=0.5)) == 0.0
    assert figures.compile_seconds(_run(500, 5.0)) is None


@pytest.mark.parametrize(
    ("value", "at_least", "verdict"),
    [(2.0, True, "met"), (1.99, True, "**missed**"), (2.0, False, "met"), (2.01, False, "**missed**"), (None, True, "not measured")],
)
def test_targets(module: Any, value: float | None, at_least: bool, verdict: str) -> None:
    target = module("figures").Target("speed", value, 2.0, at_least)
    assert target.verdict == verdict
    assert target.row().endswith(f"| {verdict} |")


def test_floors_by_hand(module: Any) -> None:
    """Against a peer of 100: torch 200 and 800 (mean sqrt(2 * 8) = 4, least 2), NumPy 900 and 400: the better are 9 and 8."""
    data = _compared(
        {
            "W1": {"inchworm-numpy": [900.0], "inchworm-torch": [200.0], "stable-baselines3": [100.0], "c": [4500.0]},
            "W3": {"inchworm-numpy": [400.0], "inchworm-torch": [800.0], "stable-baselines3": [100.0], "c": [4000.0]},
        }
    )
    found = {target.what: target for target in module("compare_section").section(data).targets}
    value = {what: target.value for what, target in found.items()}
    assert value["eager torch against Stable-Baselines3, geometric mean of W1 to W3"] == pytest.approx(4.0)
    assert value["eager torch against Stable-Baselines3, the least (W1)"] == pytest.approx(2.0)
    assert value["the better of NumPy and torch against Stable-Baselines3, geometric mean of W1 to W3"] == pytest.approx(math.sqrt(72))
    assert value["the better of NumPy and torch against Stable-Baselines3, the least (W3)"] == pytest.approx(8.0)
    assert value["the C program against inchworm's best, W1"] == pytest.approx(5.0)  # 4500 / 900, where 4 are allowed
    assert found["the C program against inchworm's best, W1"].verdict == "**missed**"
    assert found["the C program against inchworm's best, W3"].verdict == "met"  # 4000 / 800 = 5, where 8 are allowed
    assert found["compiled torch against Stable-Baselines3, the least"].verdict == "not measured"


def test_jax_is_held_against_both_peers(module: Any) -> None:
    data = _compared({"W1": {"inchworm-jax": [600.0], "stable-baselines3": [100.0], "sbx": [150.0]}})
    found = {target.what: target.value for target in module("compare_section").section(data).targets}
    assert found["JAX against Stable-Baselines3, geometric mean of W1"] == pytest.approx(6.0)
    assert found["JAX against SBX, the least (W1)"] == pytest.approx(4.0)


def test_the_faster_thread_setting_is_kept(module: Any) -> None:
    fastest = module("compare").fastest
    assert fastest({"1": _run(100, 1.0), "2": _run(100, 0.9)}) == 2
    assert fastest({"1": _run(100, 1.0), "2": _run(100, 1.0)}) == 1


def test_solved_by_hand(module: Any) -> None:
    """Medians over seeds: 3 s + 1 s of evaluating against 12 s + 4 s is a quarter; a seed that was never solved is the slowest."""
    solve = module("solve")
    ours = [{"steps": steps, "seconds": 3.0, "evaluating": 1.0, "score": 500.0} for steps in (10, 20, 30)]
    theirs = [{"steps": steps, "seconds": 12.0, "evaluating": 4.0, "score": 500.0} for steps in (20, 20, 20)]
    values = [target.value for target in solve.section({"inchworm-numpy": ours, "stable-baselines3": theirs}).targets]
    assert values == pytest.approx([0.25, 0.25, 1.0])
    unsolved = {"steps": None, "seconds": None, "evaluating": None, "score": 300.0}
    assert solve.medians([ours[0], ours[1], unsolved], "steps") == 20
    never = solve.section({"inchworm-numpy": [unsolved], "stable-baselines3": theirs[:1]})
    assert {target.verdict for target in never.targets} == {"not measured"}


# ---- JAX ----
def _compiled(speeds: dict[str, float], first: dict[str, float], cached: dict[str, float]) -> dict[str, Any]:
    """A work of jax_native.py with one repeat."""
    more = {"startup_seconds": 1.0, "base_bytes": 10, "peak_bytes": 20, "versions": {"jax": "1.2"}}
    runs = {
        kind: {side: [_run(1000, 1000 / value, compile_seconds=seconds[side], **more)] for side, value in speeds.items()}
        for kind, seconds in (("cold", first), ("warm", cached))
    }
    return {"threads": dict.fromkeys(speeds, 1), **runs}


def test_compiled_loops_by_hand(module: Any) -> None:
    """8 envs: 300 against 100 and 200, 1.5 times the faster; 64 envs: 240 against 300 and 100, 0.8 times: together sqrt(1.2)."""
    native = module("jax_native")
    speeds = [dict(zip(("inchworm-jax", "rejax", "purejaxrl"), values)) for values in ((300.0, 100.0, 200.0), (240.0, 300.0, 100.0))]
    first, cached = {"inchworm-jax": 4.0, "rejax": 10.0, "purejaxrl": 5.0}, {"inchworm-jax": 1.0, "rejax": 2.0, "purejaxrl": 2.0}
    growth = [[{"iterations": 10, "seconds": 1.0}, {"iterations": 80, "seconds": 12.0}]]
    data = {
        "sides": list(first),
        "works": {work: _compiled(values, first, cached) for work, values in zip(("N8", "N64"), speeds)},
        "growth": growth,
        "program_bytes": {"N64": {"rollout": 8_000_000, "arguments": 1, "results": 2, "temporary": 3_000_000, "compiling": 300_000_000}},
    }
    section = native.section(data)
    value = {target.what: target.value for target in section.targets}
    verdict = {target.what: target.verdict for target in section.targets}
    assert value["JAX, whole loop compiled, against the faster of its peers, geometric mean"] == pytest.approx(math.sqrt(1.2))
    assert value["JAX, whole loop compiled, against the faster of its peers, the least (N64)"] == pytest.approx(0.8)
    assert value["JAX: first compile over rejax's first"] == pytest.approx(0.4)
    assert verdict["JAX: first compile over purejaxrl's first"] == "**missed**"  # 4 / 5, where half is allowed
    assert value["JAX: compile from the cache over purejaxrl's first"] == pytest.approx(0.2)
    assert value["JAX: time of a step, 80 iterations over 10"] == pytest.approx(1.5)
    assert value["JAX: time of a step, 64 envs over 8"] == pytest.approx(300 / 240)
    text = "\n".join(section.lines)
    assert "| 8 | 3.00 (3.00 to 3.00) | 1.50 (1.50 to 1.50) |" in text
    assert "| 64 | 8.0 | 0.0 | 0.0 | 3.0 | 300.0 |" in text
    alone = {"sides": ["rejax"], "works": {"N8": _compiled({"rejax": 100.0}, first, cached)}}
    assert native.section(alone).targets == []


def test_compiling_inside_compiling_counts_once(module: Any) -> None:
    """Spans 0 to 4, 1 to 2 within it, 3 to 6 across its end, and 8 to 9: seven seconds."""
    clock = object.__new__(module("jax_measures").CompileClock)
    clock._spans = [(3.0, 6.0), (0.0, 4.0), (8.0, 9.0), (1.0, 2.0)]
    assert clock.seconds() == pytest.approx(7.0)


def test_solved_with_jax_by_hand(module: Any) -> None:
    """9 s with an empty cache against 10 s and 18 s; 6 s with a filled one against NumPy's 3 s. One that is not solved is not measured."""
    solve = module("jax_solve")
    one = lambda seconds: [{"steps": 10, "seconds": seconds - 1.0, "evaluating": 1.0, "score": 500.0}]  # noqa: E731
    runs = {"inchworm-numpy": one(3.0), "inchworm-jax, empty cache": one(9.0), "inchworm-jax, filled cache": one(6.0)}
    runs |= {"rejax, empty cache": one(10.0), "purejaxrl, empty cache": one(18.0)}
    found = solve.section({"threads": {"inchworm-jax": 2}, "runs": runs})
    assert [target.value for target in found.targets] == pytest.approx([0.9, 0.5, 2.0])
    assert "| inchworm-jax, filled cache | 2 | 1 of 1 | 6.0 | 10 |" in found.lines
    never = runs | {"inchworm-jax, filled cache": [{"steps": None, "seconds": 9.0, "evaluating": 0.0, "score": 20.0}]}
    assert solve.targets({"threads": {}, "runs": never})[-1].verdict == "not measured"


def test_learning_with_jax_by_hand(module: Any) -> None:
    """Areas 100 and 100 against 99 and 97: -2 % on average, with a half interval of 12.706 · 1; a seed without its pair is left out."""
    learning = module("jax_learning")
    areas = {"numpy": [100.0, 100.0, 7.0], "jax": [99.0, 97.0]}
    runs = [
        {"task": "Acrobot-v1", "variant": backend, "seed": seed, "steps": 1000, **dict.fromkeys(module("curves").SHOWN, area)}
        for backend, own in areas.items()
        for seed, area in enumerate(own)
    ]
    assert learning.relative_differences(runs, "Acrobot-v1") == pytest.approx([-1.0, -3.0])
    found = {target.what.partition(":")[0]: target for target in learning.targets(runs)}
    assert found["Acrobot-v1"].value == pytest.approx(-2.0 - 12.706, abs=1e-3)
    assert found["Acrobot-v1"].verdict == "**missed**"
    assert found["Pendulum-v1"].verdict == "not measured"
    assert "| Acrobot-v1 | -2.00 ± 12.71 |" in learning.report(learning.CASES, runs)


def test_profiles_by_hand(module: Any) -> None:
    """A column for each work, a row for each section that any of them has."""
    found = module("profiles").section({"numpy": {"W1": {"env": 0.25, "act": 0.75}, "W2": {"env": 1.0}}})
    assert [line for line in found.lines if line.startswith("| ")] == [
        "| numpy | W1 | W2 |", "| env | 25.0% | 100.0% |", "| act | 75.0% | 0.0% |",
    ]  # fmt: skip


def test_images_by_hand(module: Any) -> None:
    """Each side with its faster threads: ours takes 1 s + 2 s, theirs 2 s + 2 s (two threads): 2 and 1 times as fast."""
    one = lambda collect, learn: [{"collect": collect, "learn": learn, "whole": collect + learn}]  # noqa: E731
    data = {
        "steps": 100,
        "runs": {"inchworm": {"1": one(1.0, 2.0), "2": one(3.0, 3.0)}, "stable-baselines3": {"1": one(5.0, 5.0), "2": one(2.0, 2.0)}},
    }
    assert [target.value for target in module("images").section(data).targets] == pytest.approx([2.0, 1.0])


def test_saturation_by_hand(module: Any) -> None:
    """10, 91 and 100 steps/s: the second is within 10 % of the highest. It learns for 6 of its 10 s."""
    rows = [
        {"envs": 1, "steps": 100, "collect_seconds": 8.0, "learn_seconds": 2.0},
        {"envs": 4, "steps": 910, "collect_seconds": 4.0, "learn_seconds": 6.0},
        {"envs": 16, "steps": 1000, "collect_seconds": 4.0, "learn_seconds": 6.0},
    ]
    sentence = module("scaling").saturation(rows)
    assert sentence.startswith("It saturates at 4 copies (91 steps/s; the highest is 100): learning takes 60% of the time there")


def test_steady_by_hand(module: Any) -> None:
    """Ten tenths of ten: the second is 1 s, the last 1.2 s; memory stays; GAE 1 ms of 50 ms is 2 %; a peak of 150 over 80 + 20."""
    seconds = [9.0] * 10 + [1.0] * 80 + [1.2] * 10
    data = {
        "backend": "numpy",
        "long": {"seconds": seconds, "bytes": [100.0] * 100},
        "gae": {"T = 2048, B = 1": {"gae_seconds": 0.001, "iteration_seconds": 0.05}},
        "memory": {"inchworm-numpy": {"base_bytes": 80, "peak_bytes": 150}, "stable-baselines3": {"base_bytes": 200, "peak_bytes": 300}},
        "rollout_bytes": 20,
    }
    steady = module("steady")
    slower, faster = ({"seconds": [1.0] * 90 + [last] * 10, "bytes": [1.0] * 100} for last in (3.0, 0.5))
    assert steady.typical([slower, data["long"], faster]) is data["long"]  # 3, 1.2 and 0.5 times
    found = steady.section(data).targets
    assert [target.value for target in found] == pytest.approx([1.2, 1.0, 2.0, 1.5, 0.5])
    assert [target.verdict for target in found] == ["**missed**", "met", "**missed**", "met", "met"]


def test_the_page_is_made_from_what_there_is(module: Any, tmp_path: Path) -> None:
    page, results = module("page"), module("results")
    data = _compared({"W1": {"inchworm-torch": [200.0, 400.0], "stable-baselines3": [100.0, 100.0]}})
    results.save("compare", data, tmp_path)
    kept = results.load("compare", tmp_path)
    assert results.load("solve", tmp_path) is None
    text = page.text(page.PAGES[0], {"compare": kept})
    assert "| eager torch against Stable-Baselines3, geometric mean of W1 | 3 × | at least 2 × | met |" in text
    assert "| W1 | 3.00 (2.00 to 4.00) | inchworm-torch | – |" in text
    assert "## CartPole solved" not in text
    assert text.count("processor:") == 1
    other = {**kept, "measured": "2000-01-01", "data": [{"steps": 1, "seconds": 1.0, "evaluating": 0.0, "score": 500.0}]}
    both = page.text(page.PAGES[0], {"compare": kept, "solve": {**other, "data": {"inchworm-numpy": other["data"]}}})
    assert both.count("processor:") == 2  # measured on another day, and the page says so


def test_the_report_by_hand(module: Any) -> None:
    data = {"steps": 1_000_000, "bytes": 3_100_000, "writing": 0.5, "seconds": [1.0, 5.0, 1.5], "curves": 40}
    size, opening = module("report_page").section(data).targets
    assert (size.value, size.verdict, opening.value, opening.verdict) == (3.1, "**missed**", 1.5, "met")


def test_guard_believes_a_loss_when_it_is_seen_twice(module: Any) -> None:
    """Recorded 4: 2.4 is a loss of 40 %, which is allowed; 2.2, one of 45 %, is not."""
    guard = module("guard")
    recorded = {"W1": {"inchworm-numpy": 4.0}, "W3": {"inchworm-numpy": 2.0}}
    fine, slow = {"W1": {"inchworm-numpy": 2.41}}, {"W1": {"inchworm-numpy": 2.2}}
    rest = {"W3": {"inchworm-numpy": 2.0}}
    asked: list[list[str]] = []

    def measures(*answers: dict[str, Any]) -> Any:
        left = list(answers)
        return lambda works: asked.append(works) or left.pop(0)

    assert guard.check(recorded, measures(fine | rest)) == []
    assert guard.check(recorded, measures(slow | rest, fine)) == []
    assert asked == [["W1", "W3"], ["W1", "W3"], ["W1"]]
    problems = guard.check(recorded, measures(slow | rest, slow))
    assert problems == ["W1 inchworm-numpy lost 45% of its recorded lead over stable-baselines3; 40% is allowed"]
    assert guard.median_ratio([1.0, 2.0, 1.0], [2.0, 4.0, 9.0]) == 2.0
    with pytest.raises(KeyError):  # what is recorded must be measured
        guard.losses(recorded, rest)


@pytest.mark.slow
def test_the_c_program_learns(module: Any) -> None:
    """40,000 steps of W1 reach 240 and more; a policy that does not learn stays at 20."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    assert module("limit").train("speed", "W1", 0, 0.8)["last_return"] > 150.0


@pytest.mark.slow
def test_compare_end_to_end(module: Any) -> None:
    """Two sides, one repeat, two iterations after the warm-up: every figure of the page is there."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    compare, console = module("compare"), module("rich.console").Console(quiet=True)
    data = compare.measure(console, ["W3"], ["inchworm-numpy", "c"], 1, 1e-6, [1], {})
    (run,) = data["works"]["W3"]["runs"]["inchworm-numpy"]
    assert run["steps"] == run["warmup_steps"] == 2 * 4 * 128
    assert run["peak_bytes"] >= run["base_bytes"] > 0
    assert 0 < run["learn_seconds"] < run["seconds"]
    assert run["startup_seconds"] > 0
    lines = "\n".join(module("compare_section").section(data).lines)
    assert "| W3 | CartPole-v1 | 1,024 |" in lines


def test_a_job_that_fails_says_why(module: Any) -> None:
    with pytest.raises(SystemExit, match=r"(?s)limit:train with .*KeyError: 'W9'"):
        module("jobs").run("limit:train", {"group": "speed", "name": "W9", "seed": 0})


def test_step_costs_by_hand(module: Any) -> None:
    figure = {"median": 5.5, "low": 5.0, "high": 6.0}
    data = {
        "vector_envs": {"CartPole-v1": {"sides": {"one process": figure}, "ratios": {"workers / AsyncVectorEnv": figure}}},
        "asked": {"CartPole-v1": {"workers / AsyncVectorEnv": 5.0}},
        "acting": [{"world": "two choices", "lanes": 8, "act": 1.0, "collector": 2.0, "whole": 3.0, "ended episode": 4.0}],
    }
    section = module("step_costs").section(data)
    assert [target.row() for target in section.targets] == [
        "| CartPole-v1, 8 copies: workers / AsyncVectorEnv | 5.5 × | at least 5 × | met |"
    ]
    assert "| two choices | 8 | 1.0 | 2.0 | 3.0 | 4.0 |" in section.lines


def test_the_maze_by_hand_and_in_small(module: Any) -> None:
    """The best coefficient is that with the best mean: 0.03, with 0.1 + 0.3 over 0.2 + 0.1. Its best seed counts against the target."""
    maze = module("maze")

    def run(mode: str, ent_coef: float, success: float, reached: int | None = None) -> dict[str, Any]:
        return {"mode": mode, "ent_coef": ent_coef, "success": success, "reached": reached, "steps": 10, "seconds": 1.0}

    plain = [run("none", ent_coef, success) for ent_coef, success in ((0.01, 0.2), (0.01, 0.1), (0.03, 0.1), (0.03, 0.3))]
    assert maze.best_entropy(plain) == 0.03
    assert maze.best_entropy([run("none", ent_coef, 0.0) for ent_coef in (0.003, 0.01, 0.1)]) == 0.01
    found = maze.section({"runs": [*plain, run("adaptive", 0.01, 1.0, 7), run("adaptive", 0.01, 0.8)]})
    assert [(target.value, target.verdict) for target in found.targets] == [(0.8, "**missed**"), (0.3, "**missed**")]
    small = maze.train("adaptive", 0, 0.01, 20_000, size=3, levels=2)
    assert (small["level"], small["success"]) == (2.0, 1.0), "nine cells are learned at once"


def test_adaptation_by_hand_and_in_small(module: Any) -> None:
    """Means 4 and 2 after one episode and without context; the half interval of (3, 5) is t(0.975, 1) times 1, that of (2, 2) is 0."""
    meta = module("meta")
    runs = [{"world": "point", "context": True, "means": [0.0, value], "seconds": 1.0} for value in (3.0, 5.0)]
    runs += [{"world": "point", "context": False, "means": [2.0], "seconds": 1.0} for _ in range(2)]
    found = meta.section({"runs": runs})
    assert found.targets[0].value == pytest.approx(2.0)
    assert found.targets[1].value == pytest.approx(2.0 - t.ppf(0.975, 1) * 1.0)  # the standard error of (3, 5) is 1
    for world in ("point", "trials"):
        assert len(meta.train(world, True, 0, steps=2_000)["means"]) == 3


def test_laws_are_found_in_small(module: Any) -> None:
    symbolic = module("symbolic")
    found = symbolic.search_all(["kinetic_energy", "pendulum"], 60_000, 101, 1e-3)
    assert [symbolic.is_found(run) for run in found] == [True, True]
    missed = {**found[0], "score": 0.9999}
    section = symbolic.section({"ppo": [found, [found[0], missed]], "random": [[missed, missed], found]})
    assert (section.targets[0].value, section.targets[0].verdict) == (1, "**missed**")
    assert section.lines[-2] == "Of 4 searches, PPO found 3 laws and random search 2: PPO finds more."
