"""Where two runs part: faults put in on purpose, identical runs, and files that cannot be compared."""

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from doubles.run_files import write_run
from doubles.runs import small_config
from inchworm.analysis.diff import RunDiff, diff_runs, find_parting
from inchworm.cli.main import main
from inchworm.config.sections import TrainingConfig
from inchworm.core.errors import ConfigError
from inchworm.core.seeding import make_stream
from inchworm.tracking.jsonl import HASHES, read_rows
from inchworm.train.stages import STAGES
from inchworm.train.trainer import PPOTrainer

CONFIG = small_config(iterations=5, backend="numpy")
"""Five iterations of 8 steps of 2 lanes."""


class Drift(gym.Env[Any, Any]):
    """A random walk that episodes of 5 steps cut off; from its `breaks`-th step on, a little noise of its own."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, breaks: int | None = None, shift: int = 0) -> None:
        self._breaks, self._shift, self._total = breaks, shift, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=None if seed is None else seed + self._shift, options=options)
        self._place, self._steps = self.np_random.standard_normal(2), 0
        return self._place.astype(np.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps, self._total = self._steps + 1, self._total + 1
        self._place = self._place + (0.1 if action else -0.1)
        if self._breaks is not None and self._total >= self._breaks:
            self._place = self._place + 1e-3 * np.random.default_rng().standard_normal(2)
        return self._place.astype(np.float32), float(self._place[0]), False, self._steps == 5, {}


def train(
    path: Path,
    config: TrainingConfig = CONFIG,
    env: Callable[[], gym.Env[Any, Any]] = Drift,
    fault: Callable[[PPOTrainer], None] | None = None,
) -> Path:
    with PPOTrainer(config.policy, env, config, run_dir=path) as trainer:
        if (path / "checkpoints").exists() and trainer.continues:
            trainer.load_checkpoint()
        if fault is not None:
            fault(trainer)
        trainer.train()
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("diff") / "plain")


def other_noise(trainer: PPOTrainer) -> None:
    trainer.collector._stream = make_stream(99, "sampling")


def other_order(trainer: PPOTrainer) -> None:
    learner: Any = trainer.learner
    learner._stream = make_stream(99, "shuffle")


def from_the_twelfth_step(trainer: PPOTrainer, change: Callable[[Any], Any]) -> None:
    """Change what the policy does from the fourth step of the second iteration on."""
    act, steps = trainer.collector._policy.act, itertools.count(1)

    def changed(*arguments: Any, **options: Any) -> Any:
        acted = act(*arguments, **options)
        return change(acted) if next(steps) >= 12 else acted

    trainer.collector._policy.act = changed  # type: ignore[method-assign]


def log_probs_of_other_bits(trainer: PPOTrainer) -> None:
    from_the_twelfth_step(trainer, lambda acted: dataclasses.replace(acted, log_probs=np.nextafter(acted.log_probs, np.float32(1))))


def other_actions(trainer: PPOTrainer) -> None:
    from_the_twelfth_step(trainer, lambda acted: dataclasses.replace(acted, actions=1 - acted.actions, env_actions=1 - acted.env_actions))


PPO = CONFIG.ppo
FAULTS: dict[str, tuple[dict[str, Any], tuple[int, str, int | None]]] = {
    "seed of the environment": ({"env": lambda: Drift(shift=7)}, (1, "environment", 0)),
    "sampling noise": ({"fault": other_noise}, (1, "acting", 0)),
    "gamma": ({"config": CONFIG.replace(ppo=PPO.replace(gamma=0.9))}, (1, "advantages", None)),
    "shuffle stream": ({"fault": other_order}, (1, "order", None)),
    "learning rate": ({"config": CONFIG.replace(ppo=PPO.replace(learning_rate=1e-3))}, (1, "weights", None)),
    # The third iteration begins after 16 steps of each lane: the 19th is its third.
    "environment that is not deterministic": ({"env": lambda: Drift(breaks=19)}, (3, "environment", 3)),
    "log-probs": ({"fault": log_probs_of_other_bits}, (2, "acting", None)),
    "actions in the middle of a rollout": ({"fault": other_actions}, (2, "acting", 3)),
    "seed of the run": ({"config": CONFIG.replace(run=CONFIG.run.replace(seed=1))}, (0, "weights", None)),
    "number of minibatches": ({"config": CONFIG.replace(ppo=PPO.replace(num_minibatches=4))}, (1, "order", None)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_in_its_iteration_and_stage(plain: Path, tmp_path: Path, name: str) -> None:
    how, (iteration, stage, step) = FAULTS[name]
    found = diff_runs(plain, train(tmp_path / "faulty", **how))
    assert found.parting is not None
    assert (found.parting.iteration, found.parting.stage) == (iteration, stage)
    if stage != "acting" or iteration != 1:  # another number may lead to the same action, with the same log-prob
        assert found.parting.step == step
    assert not found.missing


def test_what_differs_is_listed_and_the_command_says_it(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = CONFIG.replace(ppo=PPO.replace(gamma=0.9), run=CONFIG.run.replace(checkpoint_interval=2))
    path = train(tmp_path / "faulty", config)
    (path / "versions.json").write_text(json.dumps(json.loads((path / "versions.json").read_text()) | {"numpy": "0.1", "cpu": "abacus"}))
    found = diff_runs(plain, path)
    assert found.settings == ("ppo.gamma: 0.99 → 0.9",)
    assert len(found.other_settings) == 1
    assert found.other_settings[0].startswith("run.checkpoint_interval: ")
    assert [line.partition(":")[0] for line in (*found.versions, *found.machine)] == ["numpy", "cpu"]
    assert main(["diff", str(plain), str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "plain and faulty part in iteration 1 (16 env steps), stage advantages"
    assert lines[1].startswith("likely:        ppo.gamma")
    assert "config:        ppo.gamma: 0.99 → 0.9" in lines


def test_equal_runs_are_identical_whatever_the_workers_and_across_a_resume(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resumed, steps = tmp_path / "resumed", 16
    train(resumed, CONFIG.replace(run=CONFIG.run.replace(total_timesteps=3 * steps, checkpoint_interval=2)))
    shutil.rmtree(sorted((resumed / "checkpoints").glob("step-*"))[-1])  # as after a kill: three iterations, the checkpoint of two
    with (resumed / HASHES).open("a") as file:
        file.write('{"iteration": 4, "wei')
    train(resumed, CONFIG.replace(run=CONFIG.run.replace(checkpoint_interval=2)))
    assert (resumed / HASHES).read_bytes() == (plain / HASHES).read_bytes()
    workers = train(tmp_path / "workers", CONFIG.replace(env=CONFIG.env.replace(num_workers=2)))
    for path in (resumed, workers):
        found = diff_runs(plain, path)
        assert found.identical
        assert (found.settings, found.missing, found.iterations) == ((), {}, (5, 5))
    assert main(["diff", str(plain), str(workers)]) == 0
    printed = capsys.readouterr().out
    assert "plain and workers are identical in all 5 iterations\n" in printed
    assert "no effect on training: env.num_workers: " in printed


def test_a_shorter_run_and_a_torn_line_are_compared_as_far_as_they_go(plain: Path, tmp_path: Path) -> None:
    shorter = Path(shutil.copytree(plain, tmp_path / "shorter"))
    lines = (shorter / HASHES).read_bytes().splitlines(keepends=True)  # five iterations, and the last weights
    (shorter / HASHES).write_bytes(b"".join(lines[:4]) + lines[4][:-30])
    found = diff_runs(plain, shorter)
    assert (found.identical, found.iterations) == (True, (5, 4))
    assert "identical in all 4 iterations that both have; plain has 1 more" in str(found)


def test_rows_of_an_earlier_version_and_of_compiled_loops_are_named(plain: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(plain, tmp_path / "late"))
    rows = read_rows(path / HASHES)
    for row in rows[3:5]:
        del row["environment"], row["acting"]
    (path / HASHES).write_text("".join(json.dumps(row) + "\n" for row in rows[2:]))  # iterations 3, 4 and 5
    found = diff_runs(plain, path)
    assert (found.identical, found.begins, found.missing) == (True, 3, {"environment": 2, "acting": 2})
    assert "iterations before 3, by an earlier version" in str(found)
    assert "environment in 2 of 3 iterations" in str(found)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", "is not a run: it is empty"),
        ("foreign", "is not a run: it has no config.yaml but photo.png"),
        ("old", "has no hashes in hashes.jsonl: its first iteration is not over, or it was trained by an earlier version (inchworm 0.0.1)"),
        ("half", "has no hashes in hashes.jsonl"),
        ("apart", "no iteration in common that could be compared: there are hashes of the iterations 0 to 5 of plain and 8 to 8 of apart"),
        ("absent", "there is no run"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    path = tmp_path / name
    if name in ("old", "half", "apart"):
        write_run(path)
        (path / "versions.json").write_text('{"inchworm": "0.0.1"}')
        (path / HASHES).write_text({"old": "", "half": '{"iteration": 1, "env', "apart": '{"iteration": 8, "weights": "1"}\n'}[name])
    elif name != "absent":
        path.mkdir()
    if name == "foreign":
        (path / "photo.png").touch()
    assert main(["diff", str(plain), str(path)]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert len(printed.splitlines()) == 1


def test_runs_of_one_name_are_told_by_their_paths(plain: Path, tmp_path: Path) -> None:
    shutil.copytree(plain, tmp_path / "plain")
    assert str(diff_runs(plain, tmp_path / "plain")).startswith(f"{plain} and {tmp_path / 'plain'} are identical in all 5 iterations")


def test_one_run_is_not_enough(capsys: pytest.CaptureFixture[str], plain: Path) -> None:
    assert main(["diff", str(plain)]) == 2
    assert "two runs are compared; type: inchworm diff RUN OTHER" in capsys.readouterr().err


def test_hostile_hashes_are_no_hashes(plain: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(plain, tmp_path / "hostile"))
    row = {"iteration": 1, "env_steps": "x", "environment": [1], "environment_steps": 7, "acting": {"a": None}, "acting_steps": "\u2028"}
    (path / HASHES).write_text(json.dumps(row) + "\n")
    found = diff_runs(path, plain)
    assert isinstance(found, RunDiff)
    assert found.parting is not None
    assert (found.parting.stage, found.parting.env_steps) == ("environment", 0)


def test_the_first_different_stage_of_an_iteration_is_named() -> None:
    """Hashes by hand: every stage after one that differs differs, too."""
    stages = list(STAGES)
    for place, stage in enumerate(stages):
        one = dict.fromkeys(stages, "1")
        other = one | dict.fromkeys(stages[place:], "2")
        found = find_parting({1: one, 2: one}, {1: one, 2: other})
        assert found is not None
        assert (found.iteration, found.stage) == (2, stage)
    with pytest.raises(ConfigError):
        diff_runs("a", "b")
