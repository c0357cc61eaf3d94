"""Sweeps: trials by hand, whole small ones, killed and continued ones, and what is refused."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import inchworm
from doubles.run_files import write_run
from doubles.runs import small_config
from doubles.seeds import train_here
from inchworm.analysis import sweep as module
from inchworm.analysis.sweep import STUDY, SWEEP, read_sweep_config, run_sweep
from inchworm.analysis.sweep_results import Sweep, SweepConfig, TrialResult, sweep_page, trial_rows
from inchworm.cli.main import main
from inchworm.config.sections import ConvergenceConfig, EvalConfig, PPOConfig, RunConfig, TrainingConfig
from inchworm.core.errors import ConfigError, InchwormError
from inchworm.core.types import SeedEvent
from inchworm.run.bundle import Bundle
from inchworm.train.seed_trainers import ProcessTrainer

optuna = pytest.importorskip("optuna")

SPACE = {"ppo.learning_rate": "1e-4..1e-2:log", "ppo.gamma": [0.9, 0.99], "policy.hidden_sizes": [[8], [4, 4]]}
NextRun = Callable[[], tuple[Bundle, int] | None]


@pytest.fixture(autouse=True)
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Train in this process, in an empty directory; the runs that were trained, with their last iterations, in order."""
    found: list[str] = []

    def train(trainer: ProcessTrainer, next_run: NextRun) -> Generator[tuple[Bundle, SeedEvent], None, None]:
        while (run := next_run()) is not None:
            bundle, seed = run
            place = bundle.seeds.index(seed)
            found.append(f"{bundle.path.name}/{place} to {bundle.config.run.max_iterations or 'the end'}")
            for event in train_here(bundle, [seed]):
                yield bundle, event

    monkeypatch.setattr(ProcessTrainer, "train", train)
    monkeypatch.chdir(tmp_path)
    return found


def base(name: str = "first", iterations: int = 4, **changes: Any) -> TrainingConfig:
    """Four iterations of 16 steps in NumPy, with final scores of 1 episode."""
    evaluation = EvalConfig(interval=0, episodes=1, final_episodes=1, num_envs=1)
    return small_config(iterations=iterations, backend="numpy", evaluation=evaluation, name=name, report=True).replace(**changes)


def small_sweep(config: TrainingConfig | None = None, **options: Any) -> SweepConfig:
    settings: dict[str, Any] = {"space": SPACE, "trials": 3, "seeds": 2, "rungs": 2, "pruner": "none", **options}
    return SweepConfig(base=config or base(), **settings)


def facts(found: Sweep) -> list[Any]:
    """What two equal sweeps have in common."""
    return [(trial.number, trial.state, trial.values, trial.score, dict(trial.seeds), dict(trial.rungs)) for trial in found.trials]


def test_a_sweep_is_trained_rung_by_rung_once_and_extended(tmp_path: Path, trained: list[str]) -> None:
    found = run_sweep(small_sweep(), jobs=1)
    rungs = [f"trial-{trial}/{seed} to {until}" for trial in range(3) for until in (2, "the end") for seed in (0, 1)]
    assert trained == rungs
    path = tmp_path / "runs" / "first"
    assert [trial.state for trial in found.trials] == ["complete"] * 3
    assert all(trial.env_steps == 2 * 4 * 16 for trial in found.trials)
    best = max(found.trials, key=lambda trial: (trial.score or 0.0, -trial.number))
    assert found.best == best
    assert best.score == pytest.approx(sum(best.seeds.values()) / 2)
    written = TrainingConfig.from_yaml(path / "best.yaml")
    assert written == found.best_config
    assert (written.ppo.gamma, list(written.policy.hidden_sizes)) == (best.values["ppo.gamma"], best.values["policy.hidden_sizes"])
    assert (written.run.name, written.run.total_timesteps, written.evaluation) == (None, 64, base().evaluation)
    assert json.loads((path / "sweep.json").read_text())["best"] == best.number
    page = (path / "report.html").read_text()
    assert "3 of 3 trials (3 complete)" in page
    assert page.count("ppo.learning_rate") >= 3
    trained.clear()
    assert facts(run_sweep(small_sweep())) == facts(found)
    assert not trained
    more = run_sweep(small_sweep(trials=4), jobs=1)
    assert [name.partition("/")[0] for name in trained] == ["trial-3"] * 4
    assert facts(more)[:3] == facts(found)


def test_the_first_trial_has_the_settings_that_it_starts_from(trained: list[str]) -> None:
    start = base(ppo=PPOConfig(rollout_steps=8, num_minibatches=2, update_epochs=1, gamma=0.9))
    found = run_sweep(small_sweep(start, trials=1, seeds=1, rungs=1))
    assert found.trials[0].values == {"ppo.learning_rate": 3e-4, "ppo.gamma": 0.9, "policy.hidden_sizes": [8]}
    assert found.base == found.trials[0]
    assert trained == ["trial-0/0 to the end"]


def test_equal_sweeps_have_equal_trials_and_others_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trials are suggested at random, and the last of four by what the first three scored."""
    monkeypatch.setattr(module, "STARTUP_TRIALS", 3)
    names = ("one", "two")
    one, two = (run_sweep(small_sweep(base(name, 1), seeds=1, rungs=1, trials=4), jobs=1) for name in names)
    assert facts(one) == facts(two)
    assert len({trial.values["ppo.learning_rate"] for trial in one.trials}) == 4
    other = base("three", 1)
    other = other.replace(run=other.run.replace(seed=1))
    three = run_sweep(small_sweep(other, seeds=1, rungs=1, trials=2), jobs=1)
    assert all(before.values != after.values for before, after in zip(one.trials[1:], three.trials[1:]))
    assert one.config.all_seeds != three.config.all_seeds


class Killed(BaseException):
    """Ends the process in a test, as a kill does: nothing is cleaned up by our code."""


def test_a_sweep_that_is_killed_anywhere_ends_as_one_that_was_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends at one of the writes to Optuna's storage: in the middle of a suggestion, of a decision, or between the two."""
    settings: dict[str, Any] = {"trials": 2, "seeds": 1, "space": {"ppo.learning_rate": "1e-4..1e-2:log", "ppo.gamma": [0.9, 0.99]}}
    whole = run_sweep(small_sweep(base("whole", 2), **settings), jobs=1)
    storage, names = optuna.storages._CachedStorage, ("set_trial_param", "set_trial_state_values", "set_trial_intermediate_value")
    writes = [0, 0]  # so far, and the deadly one

    def deadly(name: str) -> Callable[..., Any]:
        original = getattr(storage, name)

        def write(*arguments: Any, **options: Any) -> Any:
            writes[0] += 1
            if writes[0] == writes[1]:
                raise Killed
            return original(*arguments, **options)

        return write

    lost = set()
    for place in (2, 4, 6, 9):
        config = small_sweep(base(f"killed-{place}", 2), **settings)
        with monkeypatch.context() as patched:
            writes[:] = 0, place
            for name in (*names, "create_new_trial", "set_trial_user_attr"):
                patched.setattr(storage, name, deadly(name))
            with pytest.raises(Killed):
                run_sweep(config, jobs=1)
        found = run_sweep(config, jobs=1)
        assert [row[1:] for row in facts(found)] == [row[1:] for row in facts(whole)], place
        lost |= {trial.number for trial in found.trials} - {0, 1}
    assert lost == {2}, "a suggestion that was cut off uses up a number, and is made again"


def test_trials_are_pruned_by_the_median_and_count(trained: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores at rung 1 are 1, 2, 3, 4, then 2 < median 2.5: pruned; then 3: kept."""
    wanted = [1.0, 2.0, 3.0, 4.0, 2.0, 3.0]

    def score(searcher: module.Searcher, active: module.ActiveTrial, seed: int, *, final: bool) -> float:
        return wanted[active.trial.number] + 10 * final

    monkeypatch.setattr(module.Searcher, "_measure", score)
    end, config = module.Searcher._end, small_sweep(base(iterations=2), trials=6, seeds=1, pruner="median")

    def killed(searcher: module.Searcher, active: module.ActiveTrial, state: Any, values: Any = None) -> None:
        if state.name == "PRUNED":
            raise Killed
        end(searcher, active, state, values)

    with monkeypatch.context() as patched:
        patched.setattr(module.Searcher, "_end", killed)
        with pytest.raises(Killed):  # when it was to be pruned
            run_sweep(config, jobs=1)
    found = run_sweep(config, jobs=1)
    assert [trial.state for trial in found.trials] == [*["complete"] * 4, "pruned", "complete"]
    assert found.trials[4].rungs == {1: 2.0}
    assert found.trials[4].score is None
    assert "trial-4/0 to the end" not in trained
    assert found.best is not None
    assert (found.best.number, found.best.score) == (3, 14.0)
    headings, rows = trial_rows(found)
    assert headings[:4] == ["trial", "state", "final score", "env steps"]
    assert rows[0][:4] == ["3", "complete", "14", "32"]
    assert rows[-2][:4] == ["4", "pruned", "(rung 1: 2)", "16"]
    assert "(5 complete, 1 pruned): best final score 14, trial 3" in str(found)


def test_the_config_of_a_rung_by_hand() -> None:
    """60,000 steps of 8 x 64 are 118 iterations; the second of 4 rungs ends at 59. 40 evaluations of them are one in 3."""
    ppo = PPOConfig(rollout_steps=64, num_minibatches=2, learning_rate_schedule="linear")
    start = TrainingConfig(
        ppo=ppo, run=RunConfig(total_timesteps=60_000), convergence=ConvergenceConfig(target=475.0, window=20, stop=False)
    )
    space = {"env.num_envs": [8, 16]}
    steps = SweepConfig(base=start, space=space, objective="steps")
    config = steps.trial_config({"env.num_envs": 8}, 2)
    assert (config.run.max_iterations, config.run.total_timesteps) == (59, 60_000), "schedules stretch over the whole run"
    assert (config.evaluation.interval, config.evaluation.final_episodes, config.convergence.stop) == (3, 0, True)
    assert steps.trial_config({"env.num_envs": 8}, 4).run.max_iterations is None
    half = steps.trial_config({"env.num_envs": 16}, 2)
    assert (half.run.max_iterations, half.evaluation.interval) == (30, 1)
    assert steps.trial_config({"env.num_envs": 8}, 2, lanes_per_copy=2).run.max_iterations == 30
    score = SweepConfig(base=start, space=space)
    assert [score.trial_config({}, rung).evaluation.final_episodes for rung in (1, 4)] == [20, 100]
    assert score.trial_config({}, 1).evaluation.interval == 0
    area = SweepConfig(base=start, space=space, objective="area")
    assert area.trial_config({}, 4).evaluation.final_episodes == 0
    with pytest.raises(ConfigError, match=r"the objective steps needs a target.*--convergence.target RETURN"):
        SweepConfig(base=TrainingConfig(), space=space, objective="steps")


def test_the_other_objectives() -> None:
    """Every episode of CartPole has a return of at least 8, so a target of 5 is reached at the first evaluation, after 16 steps, and one of
    600 never: twice the budget of 64. Fewer steps are better."""
    for target, steps in ((5.0, 16.0), (600.0, 128.0)):
        config = base(f"steps-{target:g}", convergence=ConvergenceConfig(target=target, window=1), evaluation=EvalConfig(episodes=1))
        found = run_sweep(small_sweep(config, objective="steps", trials=1, seeds=2))
        assert (found.trials[0].score, set(found.trials[0].seeds.values())) == (steps, {steps})
    area = run_sweep(small_sweep(base("area"), objective="area", trials=1))
    assert area.trials[0].score is not None
    assert area.trials[0].score > 5
    fewer = [TrialResult(number, "complete", {}, score) for number, score in enumerate((300.0, 100.0, 200.0))]
    best = Sweep(Path("x"), small_sweep(config, objective="steps"), {}, tuple(fewer)).best
    assert best is not None
    assert best.number == 1


def test_a_run_that_fails_is_tried_once_more_then_its_trial_fails(trained: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {"trial-1/0": 1, "trial-2/0": 2}
    train = ProcessTrainer.train

    def fail(trainer: ProcessTrainer, next_run: NextRun) -> Generator[tuple[Bundle, SeedEvent], None, None]:
        while (run := next_run()) is not None:
            name = f"{run[0].path.name}/{run[0].seeds.index(run[1])}"
            if broken.get(name, 0):
                broken[name] -= 1
                yield run[0], SeedEvent(run[1], "failed", text="it broke")
            else:
                once = iter([run])
                yield from train(trainer, lambda once=once: next(once, None))  # type: ignore[misc]

    monkeypatch.setattr(ProcessTrainer, "train", fail)
    found = run_sweep(small_sweep(base(iterations=2), rungs=1), jobs=1)
    assert [trial.state for trial in found.trials] == ["complete", "complete", "failed"]
    assert "it broke" in found.trials[2].error
    assert "it broke" in sweep_page(found)
    broken["trial-0/0"] = 2
    with pytest.raises(InchwormError, match=r"trial 0 failed, and none before it has ended: .*it broke"):
        run_sweep(small_sweep(base("at once")), jobs=1)
    assert len(run_sweep(small_sweep(base("at once")), jobs=1).ended) == 3, "it is tried again"


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[2048:] = bytes(len(data) - 2048)
    path.write_bytes(data)


def other_database(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE photos (name TEXT)")
        connection.commit()


def other_study(path: Path) -> None:
    path.unlink()
    optuna.create_study(study_name="theirs", storage=f"sqlite:///{path}")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (damage, r"study.db is (damaged|not a readable SQLite file) \(.*--overwrite"),
        (lambda path: path.write_bytes(b"PNG" * 1000), r"study.db is not a readable SQLite file \(file is not a database\)"),
        (other_database, r"study.db is SQLite, but not Optuna's \(tables: photos\); move it away"),
        (other_study, "study.db is Optuna's, but not of a sweep of inchworm"),
        (Path.unlink, "study.db is missing, and .* has trials; restore it, or start over with --overwrite"),
    ],
)
def test_a_foreign_or_damaged_storage_is_one_line(spoil: Callable[[Path], Any], message: str) -> None:
    config = small_sweep(base(iterations=1), trials=1, seeds=1, rungs=1)
    path = run_sweep(config).path
    spoil(path / STUDY)
    with pytest.raises(ConfigError, match=message) as found:
        run_sweep(config)
    assert "\n" not in str(found.value)
    assert (path / "best.yaml").exists()
    again = run_sweep(config, overwrite=True)
    assert again.finished


def test_another_sweep_is_refused_with_what_differs() -> None:
    config = small_sweep(base(iterations=1), trials=1, seeds=1, rungs=1)
    path = run_sweep(config).path
    for other, message in (
        (config.replace(space={**SPACE, "ppo.gamma": [0.9, 0.95]}), r"another sweep \(space.ppo.gamma: \[0.9, 0.99\] → \[0.9, 0.95\]\)"),
        (config.replace(space={"ppo.gamma": [0.9, 0.99]}), r"space.ppo.learning_rate: 0.0001..0.01:log → None"),
        (config.replace(objective="area"), r"\(objective: score → area\)"),
        (config.replace(base=config.base.replace(env=config.base.env.replace(id="Acrobot-v1"))), r"base.env.id: CartPole-v1 → Acrobot-v1"),
    ):
        with pytest.raises(ConfigError, match=message):
            run_sweep(other)
    with closing(sqlite3.connect(path / STUDY)) as connection:
        connection.execute("UPDATE trial_params SET distribution_json = replace(distribution_json, '0.01', '0.02')")
        connection.commit()
    with pytest.raises(ConfigError, match=r"study.db has trials of another space \(ppo.learning_rate: .*; move it away"):
        run_sweep(config)


def test_without_optuna_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(InchwormError, match=r'a sweep needs Optuna; type: pip install "inchworm\[hpo\]"'):
        inchworm.sweep("CartPole-v1")
    assert not list(tmp_path.iterdir())


def test_from_python(trained: list[str]) -> None:
    ended: list[int] = []
    space = {"ppo.gamma": [0.9, 0.99]}
    options: dict[str, Any] = {"trials": 2, "seeds": 1, "rungs": 1, "pruner": "hyperband", "sampler": "random"}
    found = inchworm.sweep(base(iterations=1), space=space, jobs=1, on_trial=lambda trial: ended.append(trial.number), **options)
    assert (ended, found.finished, len(trained)) == ([0, 1], True, 2)
    with pytest.raises(ConfigError, match="jobs=0 must be 1 or more"):
        inchworm.sweep(base(), space=space, jobs=0)
    with pytest.raises(ConfigError, match=r"sweep.sampler"):
        inchworm.sweep(base(), space=space, sampler="grid")
    with pytest.raises(ConfigError, match=r"unknown config key sweep.steps"):
        inchworm.sweep(base(), space=space, steps=3)


def test_importance_by_hand() -> None:
    """One field decides the score alone, the other not at all; nine trials are too few to say so."""
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
    with module.quiet_optuna():
        for number in range(30):
            trial = study.ask()
            study.tell(trial, trial.suggest_float("ppo.gamma", 0.0, 1.0) + 0 * trial.suggest_float("ppo.gae_lambda", 0.0, 1.0))
            if number == 8:
                assert module.importances(study) == {}
        found = module.importances(study)
    assert found["ppo.gamma"] > 0.8
    assert sum(found.values()) == pytest.approx(1.0)
    config = small_sweep(space=dict.fromkeys(found, "0.0..1.0"), trials=30)
    assert "PED-ANOVA" in sweep_page(Sweep(Path("x"), config, {}, (), found))


SMALL = ["--ppo.rollout-steps=8", "--env.num-envs=2", "--total-timesteps=32", "--evaluation.final-episodes=1", "--backend=numpy"]
SMALL += ["--ppo.minibatch-size=8", "--evaluation.interval=0", "--seeds=1", "--rungs=1"]


def test_the_command(capsys: pytest.CaptureFixture[str], trained: list[str]) -> None:
    arguments = ["sweep", "CartPole-v1", *SMALL, "--trials=2", "--jobs=1", "--run.name=few"]
    arguments += ["--space", "ppo.gamma=0.9,0.98", "policy.hidden_sizes=[[8], [4]]", "--only", "ppo.gamma", "ppo.learning_rate"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("searching 2 settings of CartPole-v1: 2 trials of 1 seeds, up to 32 steps each, objective final score")
    assert lines[1].startswith("trial 0 complete, final score ")
    assert lines[1].endswith("(ppo.gamma=0.98 ppo.learning_rate=0.001)")
    assert lines[-1] == "next:   inchworm train --config runs/few/best.yaml"
    assert any(line.startswith("answer: CartPole-v1, 2 of 2 trials (2 complete): best final score ") for line in lines)
    assert main(["sweep", "few", "--quiet", "--trials=3"]) == 0
    assert [name.partition("/")[0] for name in trained] == ["trial-0", "trial-1", "trial-2"]
    assert main(["train", "--config", "runs/few/best.yaml", "--run.name=again", "--quiet"]) == 0
    assert main(["sweep", "few", "--seeds=5"]) == 2
    assert "few is a sweep, which continues as it began" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no environment is given; type: inchworm sweep CartPole-v1, or the name of a sweep to continue it"),
        (["CartPole-v1", "--space", "ppo.gama=0.9,0.99"], "unknown field ppo.gama; did you mean ppo.gamma?"),
        (["CartPole-v1", "--space", "ppo.gamma=0.9..1.5"], "ppo.gamma=1.5 must be 1 or less"),
        (["CartPole-v1", "--space", "nowhere.yaml"], "--space nowhere.yaml is neither FIELD=VALUES"),
        (["CartPole-v1", "--ppo.gamma=0.9", "--space", "ppo.gamma=0.9,0.99"], "ppo.gamma is set by a flag and searched by --space"),
        (["CartPole-v1", "--only", "ppo.vf_coef"], "--only ppo.vf_coef is not in the search space"),
        (["CartPole-v1", "--only", "ppo.vf_cof"], "unknown field ppo.vf_cof; did you mean ppo.vf_coef?"),
        (["Pendulum-v1", "--objective=steps"], "the objective steps needs a target"),
        (["CartPole-v1", "--run.name=single"], "is a single run; use another run.name"),
        (["CartPole-v1", "--run.name=foreign"], "is not a sweep and holds photo.png"),
        (["damaged"], "cannot read the config runs/damaged/sweep.yaml"),
        (["CartPole-v2"], "CartPole-v2"),
    ],
)
def test_wrong_use_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    write_run(tmp_path / "runs" / "single")
    for name in ("foreign", "damaged"):
        (tmp_path / "runs" / name).mkdir()
    (tmp_path / "runs/foreign/photo.png").touch()
    (tmp_path / "runs/damaged" / SWEEP).write_text("base: {ppo: [")
    before = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert main(["sweep", *arguments]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert len(printed.splitlines()) == 1
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == before


def test_a_sweep_that_is_killed_by_the_system_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 in the second trial, in processes: the trial is continued, and the sweep has the trials of one that was not killed."""
    settings: dict[str, Any] = {"trials": 2, "seeds": 1, "rungs": 1}
    whole = run_sweep(small_sweep(base("whole", iterations=60), **settings), jobs=1)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    config = small_sweep(base("killed", iterations=60), **settings)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    script = "from inchworm.analysis.sweep import *; run_sweep(SweepConfig.from_yaml('config.yaml'), jobs=1)"
    process = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        while not any((tmp_path / "runs/killed/trial-1").glob("seed-*/metrics.jsonl")):
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert read_sweep_config(tmp_path / "runs/killed").trials == 2
    found = run_sweep(config, jobs=1)
    assert [trial.number for trial in found.trials] == [0, 1]
    assert facts(found) == facts(whole)
