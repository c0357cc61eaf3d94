"""Hashes of rows and rollouts, and the rows that iterations leave."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from doubles.runs import SMALL, small_config
from doubles.teams import Teams
from inchworm.analysis.diff import diff_runs
from inchworm.config.sections import EnvConfig, EvalConfig, PPOConfig, RunConfig, TrainingConfig
from inchworm.core.seeding import make_stream
from inchworm.policy.composite import PolicyMap
from inchworm.rollout.fake import create_fake_rollout
from inchworm.rollout.rollout import Rollout
from inchworm.tracking.jsonl import HASHES, read_rows
from inchworm.train import stages
from inchworm.train.stages import STAGES, hash_rows, pack_marks, read_hashes, rollout_hashes, unpack_marks
from inchworm.train.trainer import PPOTrainer

PLAIN = {"environment", "acting", "advantages", "order", "weights_before", "environment_steps", "acting_steps"}


@pytest.mark.parametrize("dtype", ["u1", "i8", "f4", "f8", "?"])
@pytest.mark.parametrize("block", [2**16, 2])  # of one word or two, rows are wide and hashed in pieces
def test_a_changed_value_changes_the_hash_of_its_row_alone(monkeypatch: pytest.MonkeyPatch, dtype: str, block: int) -> None:
    monkeypatch.setattr(stages, "BLOCK", block)
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 2, (6, 3, 5)).astype(dtype)
    before = hash_rows([rows, rows[:, 0]])
    for place in np.ndindex(rows.shape):
        other = rows.copy()
        other[place] = 1 - other[place]
        assert np.flatnonzero(hash_rows([other, rows[:, 0]]) != before).tolist() == [place[0]]


def test_changes_that_cancel_in_a_sum_do_not_in_the_hash() -> None:
    """Two signs turned, two lanes exchanged, and a value moved from one array to the next."""
    rows = np.random.default_rng(0).standard_normal((1, 4)).astype(np.float64)
    zeros = np.zeros_like(rows)
    different = [rows], [rows * [[-1, -1, 1, 1]]], [rows[:, ::-1]], [zeros, rows]
    assert len({int(hash_rows(one)[0]) for one in different}) == 4
    assert hash_rows([rows]) == hash_rows([rows, zeros]), "zeros at the end count nothing; runs have rows of one form"


def test_marks_are_the_upper_bits_and_foreign_text_has_none() -> None:
    assert unpack_marks(pack_marks(np.array([0x12345678, 0xFFFF0001], np.uint32))).tolist() == [0x1234, 0xFFFF]
    for foreign in ("odd", "!", 7, None, ["a"], "YQ=="):
        assert not len(unpack_marks(foreign))


def fake() -> Rollout:
    return create_fake_rollout(spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(4), 12, 2, episode_length=5)


def changed(rollout: Rollout, **fields: Any) -> set[str]:
    """The stages of a rollout whose hashes other fields change."""
    before, after = rollout_hashes(rollout), rollout_hashes(dataclasses.replace(rollout, **fields))
    return {stage for stage in ("environment", "acting") if before[stage] != after[stage]}


def test_every_field_belongs_to_one_stage() -> None:
    rollout = fake()
    for name in ("observations", "rewards", "cut_observations"):
        assert changed(rollout, **{name: getattr(rollout, name) + np.float32(0.5)}) == {"environment"}
    for name in ("terminated", "truncated", "episode_starts"):
        assert changed(rollout, **{name: ~getattr(rollout, name)}) == {"environment"}
    assert changed(rollout, actions=(rollout.actions + 1) % 4) == {"acting"}
    assert changed(rollout, log_probs=np.nextafter(rollout.log_probs, np.float32(1))) == {"acting"}
    assert changed(rollout, policy_version=rollout.policy_version + 1) == set()


def test_rows_without_an_agent_may_hold_anything() -> None:
    rollout, valid = fake(), np.ones((12, 2), np.bool_)
    valid[4, 1] = False
    rollout = dataclasses.replace(rollout, valid=valid)
    observations, actions = rollout.observations.copy(), rollout.actions.copy()
    observations[4, 1], actions[4, 1] = np.nan, 3 - actions[4, 1]
    assert changed(rollout, observations=observations, actions=actions) == set()
    observations[4, 0] = 7
    assert changed(rollout, observations=observations) == {"environment"}
    assert changed(rollout, valid=np.ones_like(valid)) >= {"environment"}


class Alone(Teams):
    """Without a global state."""

    def _show(self, *arguments: Any) -> Any:
        return dataclasses.replace(super()._show(*arguments), global_state=())


def team_run(path: Path) -> dict[int, dict[str, Any]]:
    """Two policies of four agents, of which one leaves early."""
    policy = PolicyMap(policies={"one": SMALL, "two": SMALL}, lane_map=["one", "one", "two", "two"])
    with PPOTrainer(policy, Alone(num_envs=2), small_config(iterations=3), run_dir=path) as trainer:
        trainer.train()
    return read_hashes(path / HASHES)


def test_several_policies_and_agents_that_leave(tmp_path: Path) -> None:
    one, other = team_run(tmp_path / "one"), team_run(tmp_path / "other")
    assert one == other
    assert set(one[1]) >= PLAIN | {"weights"}


def test_weights_are_those_before_the_next_iteration_and_the_last_ones(tmp_path: Path) -> None:
    with PPOTrainer(SMALL, "CartPole-v1", small_config(iterations=3, backend="numpy"), run_dir=tmp_path / "run") as trainer:
        trainer.train()
        last = trainer.collector.collect(1).weights_fingerprint[0]
    rows = read_rows(tmp_path / "run" / HASHES)
    assert [row["iteration"] for row in rows] == [1, 2, 3, 3]
    assert set(rows[0]) == {"iteration", "env_steps", *PLAIN}
    assert set(rows[3]) == {"iteration", "env_steps", "weights"}
    found = read_hashes(tmp_path / "run" / HASHES)
    assert [found[number]["weights"] for number in (0, 1, 2)] == [row["weights_before"] for row in rows[:3]]
    assert int(found[3]["weights"], 16) == int(last)
    assert set(STAGES) <= set(found[3])


def test_a_run_without_a_directory_takes_no_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "hash_rows", lambda _: 1 / 0)
    with PPOTrainer(SMALL, "CartPole-v1", small_config(iterations=1)) as trainer:
        trainer.train()
        learner: Any = trainer.learner
        assert learner.on_stage is None


def compiled_run(path: Path, fault: Callable[[PPOTrainer], None] | None = None, together: int = 64, **changes: Any) -> Path:
    """A run of four iterations in a compiled loop, of at most `together` in a call."""
    config = TrainingConfig(
        env=EnvConfig(id="CartPole-v1", num_envs=2, num_workers=0),
        policy=SMALL,
        ppo=PPOConfig(**{"rollout_steps": 32, "num_minibatches": 2, "update_epochs": 1, **changes}),
        evaluation=EvalConfig(interval=0, final_episodes=0),
        run=RunConfig(total_timesteps=256, backend="jax", checkpoint_interval=together),
    )
    with PPOTrainer(SMALL, config.env, config, run_dir=path) as trainer:
        if fault is not None:
            fault(trainer)
        trainer.train()
        assert trainer.state.iteration == 4
    return path


def other_weights(trainer: PPOTrainer) -> None:
    weights = trainer.policy.get_weights()
    trainer.policy.set_weights({name: array + 1e-6 if name == "critic.head.bias" else array for name, array in weights.items()})


def other_sampling(trainer: PPOTrainer) -> None:
    collector: Any = trainer.collector
    seeds = np.array(collector.state.seeds)
    collector._state = collector.state._replace(seeds=seeds + np.array([0, 1], np.uint32))


def other_episodes(trainer: PPOTrainer) -> None:
    collector: Any = trainer.collector
    seeds = np.array(collector.state.seeds)
    collector._state = collector.state._replace(seeds=seeds + np.array([1, 0], np.uint32))


def other_shuffle(trainer: PPOTrainer) -> None:
    learner: Any = trainer.learner
    learner._stream = make_stream(99, "shuffle")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("jax")
    return compiled_run(tmp_path_factory.mktemp("compiled") / "plain")


def test_a_compiled_loop_takes_hashes_of_every_stage_however_it_is_divided_into_calls(compiled: Path, tmp_path: Path) -> None:
    same = diff_runs(compiled, compiled_run(tmp_path / "same", together=1))
    assert same.identical
    assert not same.missing
    rows = read_hashes(compiled / HASHES)
    assert all(str(rows[number][stage]).startswith("loop:") for number in (1, 2, 3, 4) for stage in STAGES)
    assert len({rows[number][stage] for number in (1, 2, 3, 4) for stage in STAGES}) == 20
    assert (compiled / HASHES).read_bytes() == (tmp_path / "same" / HASHES).read_bytes()


@pytest.mark.parametrize(
    ("how", "iteration", "stage"),
    [
        ({"fault": other_episodes}, 1, "environment"),
        ({"fault": other_sampling}, 1, "acting"),
        ({"gamma": 0.9}, 1, "advantages"),
        ({"fault": other_shuffle}, 1, "order"),
        ({"learning_rate": 1e-3}, 1, "weights"),
        ({"learning_rate_schedule": "linear"}, 2, "weights"),
        ({"fault": other_weights}, 0, "weights"),
    ],
)
def test_where_two_compiled_loops_part(compiled: Path, tmp_path: Path, how: dict[str, Any], iteration: int, stage: str) -> None:
    parting = diff_runs(compiled, compiled_run(tmp_path / "other", **how)).parting
    assert parting is not None
    assert (parting.iteration, parting.stage) == (iteration, stage)
    assert (parting.step is not None) == (stage in ("environment", "acting"))


def test_a_compiled_loop_cannot_be_compared_with_another_kind_of_run(compiled: Path, tmp_path: Path) -> None:
    with PPOTrainer(SMALL, "CartPole-v1", small_config(iterations=2, backend="numpy"), run_dir=tmp_path / "host") as trainer:
        trainer.train()
    found = diff_runs(compiled, tmp_path / "host")
    assert {found.missing[stage] for stage in STAGES} == {2}
    assert "the hashes of a compiled loop can be compared only with those of another one" in str(found)


def test_large_rollouts_are_hashed_at_once_with_the_same_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(name: str) -> dict[int, dict[str, Any]]:
        with PPOTrainer(SMALL, "CartPole-v1", small_config(iterations=3, backend="numpy"), run_dir=tmp_path / name) as trainer:
            trainer.train()
        return read_hashes(tmp_path / name / HASHES)

    kept = run("kept")
    monkeypatch.setattr(stages, "KEPT_BYTES", 0)
    assert run("at once") == kept
