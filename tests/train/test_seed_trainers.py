"""All seeds in one compiled program: the same files as in processes, and the same bits however it is stopped and continued."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from inchworm import evaluate_policy, load_policy, train_seeds
from inchworm.analysis.report import write_report
from inchworm.analysis.runs import read_run
from inchworm.backends.jax.fused import FusedTraining
from inchworm.config.sections import ConvergenceConfig, EnvConfig, EvalConfig, PolicyConfig, PPOConfig, RunConfig, TrainingConfig
from inchworm.core.errors import ConfigError
from inchworm.core.types import SeedEvent
from inchworm.run.bundle import Bundle, create_bundle, open_bundle
from inchworm.run.directory import NotExactWarning
from inchworm.train.seed_trainers import ProcessTrainer, SeedGroup, TogetherTrainer
from inchworm.train.seeds import plan_seeds, train_bundle, why_not_together
from inchworm.train.trainer import PPOTrainer

FILES = ("metrics.jsonl", "policy.safetensors", "best_policy.safetensors")
BATCH, ITERATIONS, SEEDS = 24, 6, 3


def config_of(directory: Path | str = "runs", name: str | None = "many", **ppo: Any) -> TrainingConfig:
    return TrainingConfig(
        env=EnvConfig(id="CartPole-v1", num_envs=2, max_episode_steps=10),
        policy=PolicyConfig(hidden_sizes=(8,)),
        ppo=PPOConfig(**{"rollout_steps": 12, "update_epochs": 2, "num_minibatches": 2, "learning_rate": 1e-2, **ppo}),
        evaluation=EvalConfig(interval=3, episodes=2, final_episodes=2, num_envs=2),
        run=RunConfig(
            backend="jax",
            total_timesteps=ITERATIONS * BATCH,
            checkpoint_interval=1,
            keep_checkpoints=9,
            name=name,
            directory=str(directory),
        ),
    )


def results(path: Path) -> dict[str, bytes]:
    return {f"{seed}/{name}": (path / f"seed-{seed}" / name).read_bytes() for seed in range(SEEDS) for name in FILES}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose seeds were trained together, undisturbed."""
    path = tmp_path_factory.mktemp("together")
    summary = train_seeds("mlp", config_of().env, config_of(), seeds=SEEDS, together=True, run_dir=path / "many")
    assert [(row.status, row.iteration, row.stop_reason) for row in summary.seeds] == [("done", ITERATIONS, "total_timesteps")] * SEEDS
    return path / "many"


def test_every_seed_is_an_ordinary_run_with_the_numbers_of_a_single_one(whole: Path, tmp_path: Path) -> None:
    assert sorted(entry.name for entry in whole.iterdir()) == [
        "bundle.yaml", "lock", "report.html", "seed-0", "seed-1", "seed-2", "summary.json", "summary.md"
    ]  # fmt: skip
    assert open_bundle(whole).together
    config = config_of(name=None)
    with PPOTrainer("mlp", config.env, config, seed=1, run_dir=tmp_path / "single") as trainer:
        trainer.train()
        single = trainer.policy.get_weights()
    names = [sorted(file.name for file in path.iterdir() if file.name != "config.yaml") for path in (whole / "seed-1", tmp_path / "single")]
    assert names[0] == names[1]
    policy = load_policy(whole / "seed-1" / "policy.safetensors")
    for name, weight in policy.get_weights().items():
        np.testing.assert_allclose(weight, single[name], rtol=0, atol=1e-5)
    stats = evaluate_policy(policy, "CartPole-v1", episodes=2)
    assert stats.episodes == 2
    assert write_report([read_run(whole / "seed-1")]).exists()
    scores = [row["score"] for row in json.loads((whole / "summary.json").read_text())["seeds"]]
    assert len(set(results(whole).values())) == len(results(whole))  # seeds differ
    assert len(scores) == SEEDS


def test_a_bundle_that_was_stopped_and_continued_has_the_bits_of_one_that_was_not(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seed 2 is left two iterations behind and seed 0 is over, as after a kill."""
    monkeypatch.setattr(FusedTraining, "_next_count", lambda self, count, seconds: 2)

    def interrupted(bundle: Bundle, seeds: Sequence[int]) -> Generator[SeedEvent, None, None]:
        for event in TogetherTrainer("mlp")(bundle, seeds):
            yield event
            signal.raise_signal(signal.SIGINT)

    with create_bundle(config_of(tmp_path), range(SEEDS)) as bundle:
        bundle.update(bundle.config, together=True)
        with pytest.raises(KeyboardInterrupt):
            train_bundle(bundle, interrupted)
        assert all(list(bundle.run_path(seed).glob("checkpoints/step-*")) for seed in range(SEEDS))
        assert [row.status for row in train_bundle(bundle, TogetherTrainer("mlp")).seeds] == ["done"] * SEEDS
        assert results(bundle.path) == results(whole)
        for seed, left in {1: 4, 2: 2}.items():
            checkpoints = sorted(bundle.run_path(seed).glob("checkpoints/step-*"))
            for path in checkpoints[left:]:
                shutil.rmtree(path)
    with open_bundle(bundle.path) as bundle:
        bundle.lock()
        trainer, text = plan_seeds("mlp", bundle.config.env, bundle)
        assert (trainer, text) == (TogetherTrainer("mlp"), "all seeds together, in one program")
        assert [row.status for row in train_bundle(bundle, trainer).seeds] == ["done"] * SEEDS
    assert results(bundle.path) == results(whole)


def test_an_error_in_one_seed_ends_only_that_one(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, failed = FusedTraining._take_over, []

    def fail(self: FusedTraining, *arguments: Any) -> Any:
        if self._collector.state.seeds[0] == seeds_of_1 and self._collector.env_steps == 2 * BATCH and not failed:
            failed.append(True)
            raise ValueError("a wire came loose")
        return taken(self, *arguments)

    with PPOTrainer("mlp", config_of().env, config_of(name=None), seed=1) as trainer:
        seeds_of_1 = trainer.collector.state.seeds[0]
    monkeypatch.setattr(FusedTraining, "_next_count", lambda self, count, seconds: 1)
    monkeypatch.setattr(FusedTraining, "_take_over", fail)
    options: dict[str, Any] = {"seeds": SEEDS, "run_dir": tmp_path / "many"}
    with pytest.warns(UserWarning, match="seed 1 failed: ValueError: a wire came loose"):
        summary = train_seeds("mlp", config_of().env, config_of(), together=True, **options)
    assert [(row.status, row.iteration) for row in summary.seeds] == [("done", 6), ("failed", 2), ("done", 6)]
    assert "a wire came loose" in (tmp_path / "many" / "seed-1.log").read_text()
    assert train_seeds("mlp", config_of().env, config_of(), **options).unfinished == ()
    assert not (tmp_path / "many" / "seed-1.log").exists()
    assert results(tmp_path / "many") == results(whole)


def test_which_seeds_are_trained_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path)
    with create_bundle(config, range(2)) as bundle:
        with pytest.raises(ConfigError, match="cannot be trained together: callbacks and custom losses are called for one seed at a time"):
            plan_seeds("mlp", config.env, bundle, together=True, callbacks=[print])
        with pytest.raises(ConfigError, match="together: jobs=2 is a number of processes"):
            plan_seeds("mlp", config.env, bundle, together=True, jobs=2)
        for options in ({}, {"jobs": 2}):
            assert isinstance(plan_seeds("mlp", config.env, bundle, **options)[0], ProcessTrainer)
        assert not bundle.together
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        assert plan_seeds("mlp", config.env, bundle)[0] == TogetherTrainer("mlp")
        monkeypatch.undo()
        plan_seeds("mlp", config.env, bundle, together=True)
        assert open_bundle(bundle.path).together
    host = config.replace(env=config.env.replace(jax_native=False), run=config.run.replace(name="host"))
    with create_bundle(host, range(2)) as bundle:
        assert isinstance(plan_seeds("mlp", host.env, bundle)[0], ProcessTrainer)
        with pytest.raises(ConfigError, match="stepping CartPole-v1 on the host, because"):
            plan_seeds("mlp", host.env, bundle, together=True)


def test_a_refused_call_leaves_a_bundle_as_it_was(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "many")
    config = config_of().replace(env=config_of().env.replace(jax_native=False))
    with pytest.raises(ConfigError, match="cannot be trained together"):
        train_seeds("mlp", config.env, config, seeds=SEEDS + 2, together=True, run_dir=tmp_path / "many")
    assert len(open_bundle(tmp_path / "many").seeds) == SEEDS


@pytest.mark.parametrize(("settings", "why"), [({"freeze": ["critic.*"]}, "ppo.freeze"), ({}, "convergence.returns=training")])
def test_what_reads_single_iterations_is_not_trained_together(settings: dict[str, Any], why: str) -> None:
    config = config_of(**settings)
    config = config.replace(policy=config.policy.replace(normalize_values=True))
    if not settings:
        config = config.replace(convergence=ConvergenceConfig(target=9.0, returns="training"))
    assert why in str(why_not_together("mlp", config.env, config, ()))


def test_a_second_interruption_ends_every_seed_at_its_step() -> None:
    class Step:
        @staticmethod
        def together(places: Sequence[Any], most: int) -> list[Any]:
            group.leave.set()  # as the second press does, while the program computes
            return [[] for _ in places]

    group, ended = SeedGroup([0, 1], [0, 1]), []

    def train(seed: int) -> None:
        with pytest.raises(KeyboardInterrupt):
            group._step(seed, Step(), None, 1)  # type: ignore[arg-type]
        ended.append(seed)

    threads = [threading.Thread(target=group.run, args=(seed, partial(train, seed))) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(ended) == [0, 1]


def test_seeds_that_had_begun_in_another_program_are_marked(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "many")
    with create_bundle(config_of(tmp_path), range(SEEDS)) as bundle:
        plan_seeds("mlp", bundle.config.env, bundle, jobs=1)
        train_bundle(bundle, lambda bundle, seeds: (event for event in ()))  # all are done
        shutil.rmtree(max(bundle.run_path(1).glob("checkpoints/step-*")))
        with pytest.warns(NotExactWarning, match="seeds that have begun are trained in another way now"):
            train_bundle(bundle, lambda bundle, seeds: (event for event in ()))
