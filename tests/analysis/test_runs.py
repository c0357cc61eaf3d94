"""Reading run directories: whole, torn, empty, foreign and hostile ones; and lists of runs, deleted and archived."""

import json
import os
import tarfile
from pathlib import Path

import pytest

from doubles.run_files import write_run
from doubles.runs import small_config
from inchworm.analysis.runs import list_runs, read_run, read_runs, remove_run
from inchworm.core.errors import ConfigError, InchwormError
from inchworm.run.directory import CONFIG, LOCK, OUTCOME, take_lock
from inchworm.train.trainer import PPOTrainer


def test_a_run_is_what_its_files_say(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "one", rows=16))
    assert (run.name, run.state, run.reason, run.env_steps) == ("one", "finished", "total_timesteps", 16 * 512)
    assert run.score == 200.0
    assert [row["env_steps"] for row in run.evaluations] == [1024 * number for number in range(1, 9)]
    steps, values = run.series("mean_return")
    assert (len(steps), steps[-1], values[0]) == (16, 8192, pytest.approx(31.25))
    assert run.seconds == pytest.approx({"env": 1.6, "act": 1.6, "learn": 4.8, "rest": 0.0})
    assert run.facts["environment"] == "CartPole-v1"


def test_a_torn_last_line_and_values_that_are_not_numbers_are_left_out(tmp_path: Path) -> None:
    path = write_run(tmp_path / "torn", rows=4)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 5, "env_steps": 2560, "entropy": "0.5", "loss": null, "big": 1e999, "flag": true}\n')
        file.write('[1, 2]\nnot json\n{"entropy": 1.0}\n{"iteration": 6, "env_ste')
    run = read_run(path)
    assert len(run.rows) == 5
    assert run.rows[-1] == {"iteration": 5, "env_steps": 2560}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", "is not a run: it is empty"),
        ("foreign", r"is not a run: it has no config.yaml but photo.png"),
        ("damaged", "is not a readable run"),
        ("half", "has no metrics: it ended before the first iteration was written"),
        ("garbage", "has no metrics: metrics.jsonl has no readable row"),
        ("sweep", "is a sweep, not a run; it holds runs of several seeds, such as .*sweep/trial-0"),
        ("absent", "there is no run"),
    ],
)
def test_what_is_not_a_run_is_one_line(tmp_path: Path, name: str, message: str) -> None:
    path = tmp_path / name
    if name != "absent":
        path.mkdir()
    if name == "foreign":
        (path / "photo.png").touch()
    if name == "damaged":
        (path / CONFIG).write_text("ppo: {gamma: [")
    if name in ("half", "garbage"):
        (path / CONFIG).write_text(small_config().to_yaml())
    if name == "garbage":
        (path / "metrics.jsonl").write_bytes(os.urandom(2_000) + b"\n[1]\n")
    if name == "sweep":
        (path / "trial-0").mkdir()
        for file in ("sweep.yaml", "trial-0/bundle.yaml"):
            (path / file).touch()
    for given in (path, name):
        with pytest.raises(InchwormError, match=message) as caught:
            read_run(given, directory=tmp_path)
        assert "\n" not in str(caught.value)


def test_the_states_of_a_run(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", rows=4)
    for outcome in ("interrupted", "failed", "finished"):
        (path / OUTCOME).write_text(json.dumps({"outcome": outcome, "reason": "why"}))
        assert (read_run(path).state, read_run(path).reason) == (outcome, "why")
    (path / OUTCOME).unlink()
    assert read_run(path).state == "finished", "it has reached its target"
    rows = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(rows[:2]))
    assert read_run(path).state == "interrupted", "it was killed"
    descriptor = take_lock(path / LOCK, "the run")
    assert read_run(path).state == "running"
    os.close(descriptor)
    assert read_run(path).state == "interrupted"


def test_a_training_leaves_how_it_ended(tmp_path: Path) -> None:
    states = []

    def look(state: object, metrics: object) -> None:
        states.append(read_run(tmp_path / "run", rows=False).state)

    config = small_config(iterations=2)
    with PPOTrainer("mlp", config.env, config, run_dir=tmp_path / "run") as trainer:
        trainer.train(callback=look)
    assert states == ["running", "running"]
    run = read_run(tmp_path / "run")
    assert (run.state, run.reason) == ("finished", "total_timesteps")
    assert run.spec is not None
    assert run.facts["actions"] == "Discrete(2)"
    assert {"env", "act", "learn", "rest"} == set(run.seconds)

    def fail(state: object, metrics: object) -> None:
        raise RuntimeError("my callback broke")

    with PPOTrainer("mlp", config.env, config, run_dir=tmp_path / "run") as trainer:
        trainer.load_checkpoint()
        with pytest.raises(RuntimeError):
            trainer.train(64, callback=fail)
    run = read_run(tmp_path / "run")
    assert (run.state, run.reason) == ("failed", "RuntimeError: my callback broke")


def test_a_list_of_runs_has_readable_and_unreadable_ones(tmp_path: Path) -> None:
    for number, name in enumerate(("b", "a")):
        path = write_run(tmp_path / name, rows=4)
        for file in path.iterdir():
            os.utime(file, (number, number))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / CONFIG).write_text("[")
    (tmp_path / "other").mkdir()
    listed = list_runs(tmp_path)
    assert list(listed) == ["b", "a", "bad"]
    assert (listed["bad"].kind, listed["bad"].state) == ("run", "unreadable")
    assert listed["bad"].problem.startswith(f"{tmp_path / 'bad'} is not a readable run: ")
    with pytest.raises(ConfigError, match="there is no directory"):
        list_runs(tmp_path / "nowhere")


def test_what_holds_several_runs_is_listed_and_removed_as_one(tmp_path: Path) -> None:
    for name, file in (("many", "bundle.yaml"), ("asked/base", "bundle.yaml"), ("asked", "comparison.yaml"), ("search", "sweep.yaml")):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / file).touch()
    inside = write_run(tmp_path / "many" / "seed-0", rows=4)
    write_run(tmp_path / "many" / "seed-1", rows=4, seed=1, outcome="interrupted")
    deep = write_run(tmp_path / "asked" / "base" / "seed-0", rows=4)
    listed = list_runs(tmp_path)
    kinds = {name: (entry.kind, entry.state, len(entry.runs)) for name, entry in listed.items()}
    assert kinds == {"many": ("2 seeds", "interrupted", 2), "asked": ("comparison", "", 0), "search": ("sweep", "", 0)}
    for name, run in (("many", inside), ("asked", deep)):
        descriptor = take_lock(run / LOCK, "the run")
        with pytest.raises(InchwormError, match="in use by process"):
            remove_run(name, directory=tmp_path)
        os.close(descriptor)
        assert read_run(run).rows, "nothing is removed"
    descriptor = take_lock(tmp_path / "many" / LOCK, "the bundle")
    assert list_runs(tmp_path)["many"].state == "running"
    os.close(descriptor)
    for name in kinds:
        remove_run(name, directory=tmp_path, archive=name == "many")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["archive"]


def test_a_comparison_stands_for_the_runs_of_both_settings(tmp_path: Path) -> None:
    (tmp_path / "asked").mkdir()
    (tmp_path / "asked" / "comparison.yaml").touch()
    with pytest.raises(ConfigError, match=r"asked holds no run with metrics yet$"):
        read_runs([tmp_path / "asked"])
    for setting in ("changed", "base"):
        for seed in (10, 9):
            write_run(tmp_path / "asked" / setting / f"seed-{seed}", rows=4, seed=seed)
        (tmp_path / "asked" / setting / "bundle.yaml").touch()
    names = ["base/seed-9", "base/seed-10", "changed/seed-9", "changed/seed-10"]
    assert [run.name for run in read_runs(["asked", tmp_path / "asked" / "base"], directory=tmp_path)] == names, "each once"


def test_runs_are_deleted_and_archived(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write_run(runs / "one", rows=4)
    write_run(runs / "two", rows=4)
    remove_run("one", directory=runs)
    packed = remove_run("two", directory=runs, archive=True)
    assert packed == runs / "archive" / "two.tar.gz"
    assert sorted(entry.name for entry in runs.iterdir()) == ["archive"]
    with tarfile.open(packed) as file:
        file.extractall(tmp_path / "back", filter="data")
    assert len(read_run(tmp_path / "back" / "two").rows) == 4


def test_a_run_that_is_named_as_the_archive_is_not_packed_into_itself(tmp_path: Path) -> None:
    for name in ("archive", "one"):
        write_run(tmp_path / name, rows=4)
    for name in ("archive", "one"):
        with pytest.raises(ConfigError, match="archive is a run, and archives would be in its directory; rename it first"):
            remove_run(name, directory=tmp_path, archive=True)
        assert read_run(tmp_path / name).rows


def test_nothing_outside_the_directory_is_removed_nor_a_run_in_use(tmp_path: Path) -> None:
    runs, outside = tmp_path / "runs", write_run(tmp_path / "outside", rows=4)
    inside = write_run(runs / "inside", rows=4)
    (runs / "link").symlink_to(outside)
    (runs / "files").mkdir()
    for name in ("../outside", "link", "files", ".", "..", "", str(outside), "inside/../inside"):
        with pytest.raises(ConfigError, match="is not a run in"):
            remove_run(name, directory=runs)
    descriptor = take_lock(inside / LOCK, "the run")
    with pytest.raises(InchwormError, match="in use by process"):
        remove_run("inside", directory=runs)
    os.close(descriptor)
    assert read_run(outside).rows
    assert read_run(inside).rows
