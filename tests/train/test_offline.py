"""Learning from rollouts that were kept: files of every backend, stale data with and without guards, the store, and comparisons."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from doubles.runs import SMALL
from doubles.stepping import assert_equal_rollouts
from inchworm.config.sections import EnvConfig, PolicyConfig, PPOConfig, RunConfig, TrainingConfig
from inchworm.core.errors import BadNumberError, ConfigError, CorruptFileError, RolloutError, SpaceError
from inchworm.rollout.rollout import Rollout
from inchworm.run.policies import load_policy
from inchworm.train.offline import RolloutStore, compare_collection, mean_return, save_rollouts, train_from_saved_rollouts
from inchworm.train.trainer import PPOTrainer, functional_training_loop

PPO = PPOConfig(rollout_steps=16, num_minibatches=2, update_epochs=2, learning_rate=1e-2)


def trainer_for(**more: Any) -> PPOTrainer:
    return PPOTrainer(SMALL, "CartPole-v1", more.pop("config", PPO), **{"num_envs": 2, "num_workers": 0, "backend": "numpy", **more})


def weights_of(trainer: PPOTrainer) -> np.ndarray:
    weights = trainer.policy.get_weights()
    return np.concatenate([weights[name].reshape(-1) for name in sorted(weights) if "." in name])


def test_rollouts_are_saved_and_learned_from_like_fresh_ones(tmp_path: Path) -> None:
    with trainer_for() as trainer, trainer_for() as other:
        files = save_rollouts(trainer, 3, tmp_path / "kept")
        assert [file.name for file in files] == ["rollout_0000.safetensors", "rollout_0001.safetensors", "rollout_0002.safetensors"]
        seen: list[str] = []
        with pytest.warns(UserWarning, match="1 update old"):
            stats = train_from_saved_rollouts(trainer, tmp_path / "kept", epochs=2, on_update=lambda path, _: seen.append(path.name))
        assert seen == [file.name for file in files] * 2
        assert [one["staleness"] for one in stats] == [0, 1, 2, 3, 4, 5]
        assert (trainer.n_updates, trainer.total_timesteps) == (6, 96)  # 3 rollouts of 32 steps were collected
        collected = [other.collect_rollouts() for _ in range(3)]
        for path, one in zip(files, collected, strict=True):
            assert_equal_rollouts(Rollout.load(path), one)
        other.learn(collected[0])
        with pytest.warns(UserWarning, match="1 update old"):
            other.learn(collected[1])
        for one in [collected[2], *collected]:
            other.learn(one)
        np.testing.assert_array_equal(weights_of(trainer), weights_of(other))
        with pytest.raises(RolloutError, match="already holds rollouts"):
            save_rollouts(trainer, 1, tmp_path / "kept")


def test_nothing_is_learned_where_a_file_is_wrong(tmp_path: Path) -> None:
    with trainer_for() as trainer:
        (file,) = save_rollouts(trainer, 1, tmp_path / "kept")
        before = weights_of(trainer)
        with pytest.raises(FileNotFoundError, match="gone"):
            train_from_saved_rollouts(trainer, [file, tmp_path / "gone"])
        with pytest.raises(ConfigError, match="epochs=0"):
            train_from_saved_rollouts(trainer, file, epochs=0)
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(CorruptFileError, match=re.escape(str(file))):
            train_from_saved_rollouts(trainer, file)
        wrong = trainer.collect_rollouts()
        path = replace(wrong, observations=wrong.observations[..., :3], cut_observations=wrong.cut_observations[..., :3]).save(file)
        good = trainer.collect_rollouts()
        wrong_number = replace(good, rewards=np.full_like(good.rewards, np.nan)).save(tmp_path / "nan.safetensors")
        good_path = good.save(tmp_path / "good.safetensors")
        for error, last in ((RolloutError, path), (BadNumberError, wrong_number)):  # also where the first file would do
            with pytest.raises(error, match=rf"{re.escape(str(last))} does not fit the policy: "):
                train_from_saved_rollouts(trainer, [good_path, last])
        np.testing.assert_array_equal(weights_of(trainer), before)
    assert issubclass(SpaceError, ValueError)


@pytest.mark.parametrize(("collects", "learns"), [("jax", "torch"), ("torch", "jax"), ("jax", "numpy")])
def test_one_backend_collects_and_another_learns(tmp_path: Path, collects: str, learns: str) -> None:
    """The weights are the same, so the data are fresh: their age is 0 and their ratios are 1."""
    with PPOTrainer(SMALL, "CartPole-v1", PPO, num_envs=2, num_workers=0, backend=collects) as one:
        (file,) = save_rollouts(one, 1, tmp_path / "kept")
        policy = one.save_policy(tmp_path / "policy.safetensors")
    with PPOTrainer(SMALL, "CartPole-v1", PPO, num_envs=2, num_workers=0, backend=learns, init_from=policy) as other:
        before = weights_of(other)
        (stats,) = train_from_saved_rollouts(other, file)
        assert stats["staleness"] == 0
        assert stats["ratio_error"] < 1e-4
        assert "behavior_kl" not in stats  # there is nothing to correct
        assert not np.array_equal(weights_of(other), before)


STRONG = PPOConfig(rollout_steps=64, num_minibatches=4, update_epochs=4, learning_rate=2.5e-3, ent_coef=0.0)


def strong_trainer(config: PPOConfig = STRONG, **more: Any) -> PPOTrainer:
    return PPOTrainer(PolicyConfig(hidden_sizes=(32,)), "CartPole-v1", config, num_envs=16, num_workers=0, backend="numpy", **more)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, float]:
    """A policy that balances for long, a rollout from before it had learned anything, and the policy's mean return."""
    directory = tmp_path_factory.mktemp("stale")
    with strong_trainer(seed=1) as trainer:
        stale = trainer.collect_rollouts(256).save(directory / "stale.safetensors")
        trainer.train(50_000)
        return trainer.save_policy(directory / "policy.safetensors"), stale, trainer.evaluate(20, deterministic=False).mean_return


@pytest.mark.parametrize("guard", [{}, {"min_effective_sample_size": 0.8}, {"max_behavior_kl": 0.2}, {"max_staleness": 4}])
@pytest.mark.filterwarnings("ignore:the rollout was made by", "ignore:no steps were taken")
def test_a_stale_file_ruins_a_policy_without_a_guard_and_not_with_one(trained: tuple[Path, Path, float], guard: dict[str, Any]) -> None:
    """The untrained policy acts at random, and the clip holds the policy that learns from its rollout near it."""
    policy, stale, score = trained
    assert score > 200
    with strong_trainer(STRONG.replace(**guard), init_from=policy) as trainer:
        before = weights_of(trainer)
        if "max_staleness" in guard:
            with pytest.raises(RolloutError, match=r"more than ppo.max_staleness=4"):
                train_from_saved_rollouts(trainer, stale, epochs=10)
        else:
            train_from_saved_rollouts(trainer, stale, epochs=10)
        after = trainer.evaluate(20, deterministic=False).mean_return
        if guard:
            np.testing.assert_array_equal(weights_of(trainer), before)
            assert after == score
        else:
            assert after < 0.25 * score


# the store
def collected(count: int) -> list[Rollout]:
    with trainer_for() as trainer:
        return [replace(trainer.collect_rollouts(), policy_version=np.full(2, number, np.int32)) for number in range(count)]


def test_a_store_keeps_the_newest_and_draws_each_at_most_once() -> None:
    store, rollouts = RolloutStore(3, seed=1), collected(5)
    for rollout in rollouts:
        store.add(rollout)
    assert list(store.rollouts) == rollouts[2:]
    assert len(store) == 3
    drawn = [store.sample(2) for _ in range(50)]
    assert all(len({id(one) for one in pair}) == 2 for pair in drawn)
    assert {int(one.policy_version[0]) for pair in drawn for one in pair} == {2, 3, 4}
    assert [int(one.policy_version[0]) for one in store.sample(9)] == [2, 3, 4]
    assert [int(one.policy_version[0]) for one in store.sample(9, since=4)] == [4]
    assert store.sample(1, since=5) == RolloutStore(1).sample(1) == []
    for wrong, message in (({"capacity": 0}, "capacity >= 1"), ({"capacity": 1, "max_staleness": -1}, "would never draw")):
        with pytest.raises(ConfigError, match=message):
            RolloutStore(**wrong)
    with pytest.raises(ConfigError, match="-1 rollouts cannot be drawn"):
        store.sample(-1)
    store.add(rollouts[0].to_dict())  # as `learn` takes it
    assert store.sample(3)[-1].policy_version.tolist() == [0, 0]
    with pytest.raises(RolloutError, match="from a mapping"):
        store.add(5)  # type: ignore[arg-type]


def test_a_store_adds_old_rollouts_to_new_ones_within_their_age() -> None:
    store, rollouts = RolloutStore(4, draws=3, max_staleness=1), collected(4)
    assert store.on_rollout(None, rollouts[0]) is None  # type: ignore[arg-type]
    for number, versions in ((1, [1, 0]), (2, [2, 1]), (3, [3, 2])):
        both = store.on_rollout(None, rollouts[number])  # type: ignore[arg-type]
        assert both is not None
        assert both.policy_version[::2].tolist() == versions


@pytest.mark.filterwarnings("ignore:the rollout was made by")
def test_a_training_with_a_store_resumes_exactly(tmp_path: Path) -> None:
    def train(path: Path, steps: int, store: RolloutStore) -> np.ndarray:
        with trainer_for(run_dir=path, callbacks=[store], config=PPO.replace(max_staleness=4)) as trainer:
            if trainer.continues:
                trainer.load_checkpoint()
            history = trainer.train(steps)
            assert max(history["staleness"]) <= 4
            return weights_of(trainer)

    whole = train(tmp_path / "whole", 32 * 6, RolloutStore(3, max_staleness=2))
    train(tmp_path / "halves", 32 * 3, RolloutStore(3, max_staleness=2))
    continued = RolloutStore(3, max_staleness=2)
    np.testing.assert_array_equal(train(tmp_path / "halves", 32 * 6, continued), whole)
    assert len(continued) == 3


@pytest.mark.filterwarnings("ignore:the rollout was made by")
def test_a_store_in_the_functional_loop_and_in_a_subclass() -> None:
    config = TrainingConfig(env=EnvConfig(num_envs=2, num_workers=0), ppo=PPO, run=RunConfig(backend="numpy", total_timesteps=128))
    store = RolloutStore(2)
    state = functional_training_loop(config, SMALL, callbacks=[store])
    assert (state.env_steps, len(store)) == (128, 2)  # drawn rows are not counted
    assert max(state.history["staleness"]) >= 1

    class Replaying(PPOTrainer):
        store = RolloutStore(4)

        def learn(self, rollout: Any, custom_loss_fns: Any = ()) -> Any:
            stats = super().learn(rollout, custom_loss_fns)
            for old in self.store.sample(1):
                super().learn(old, custom_loss_fns)
            self.store.add(rollout)
            return stats

    with Replaying(SMALL, "CartPole-v1", PPO, num_envs=2, num_workers=0, backend="numpy") as trainer:
        trainer.train(128)
        assert (trainer.total_timesteps, trainer.n_updates) == (128, 7)  # 4 new ones, and 3 old


# comparing two ways to collect
def test_two_ways_to_collect_are_compared_with_paired_seeds() -> None:
    with trainer_for() as trainer:
        rollout = trainer.collect_rollouts()

    def giving(offset: float) -> Any:
        return lambda seed: replace(rollout, rewards=np.full_like(rollout.rewards, seed + offset * (1 + 0.1 * (seed % 2))))

    result = compare_collection(giving(0), giving(1), seeds=range(6), measure=lambda one: float(one.rewards.mean()))
    np.testing.assert_allclose(result.values[0], range(6), atol=1e-5)
    assert result.difference == pytest.approx(1.05)
    # differences 1, 1.1, …: deviation 0.05 · sqrt(6 / 5), so the interval is 1.05 ± t_0.975(5) · that / sqrt(6) = 2.5706 · 0.05 / sqrt(5)
    assert result.interval95 == pytest.approx((1.05 - 0.05748, 1.05 + 0.05748), abs=1e-4)
    assert result.differs
    assert str(result) == "2.5 and 3.55: second less first 1.05 [0.9925, 1.107] over 6 seeds, a difference"
    assert not compare_collection(giving(0), giving(0), seeds=range(6), measure=lambda one: float(one.rewards.mean())).differs
    with pytest.raises(ConfigError, match="2 seeds or more"):
        compare_collection(giving(0), giving(1), seeds=[1])
    with pytest.raises(ConfigError, match=r"seeds \[1, 2, 1\] repeat"):
        compare_collection(giving(0), giving(1), seeds=[1, 2, 1])
    with pytest.raises(BadNumberError, match=r"of the second strategy with seed 3 is nan"):
        compare_collection(giving(0), giving(np.nan), seeds=[3, 4], measure=lambda one: float(one.rewards.mean()))
    with pytest.raises(RolloutError, match="no episode ended"):
        mean_return(replace(rollout, episodes=()))


def test_a_policy_of_a_file_is_used_in_both_ways_to_collect(tmp_path: Path) -> None:
    with trainer_for() as trainer:
        path = trainer.save_policy(tmp_path / "policy.safetensors")

    def with_envs(num_envs: int) -> Any:
        def collect(seed: int) -> Rollout:
            with PPOTrainer(load_policy(path), "CartPole-v1", PPO, num_envs=num_envs, num_workers=0, seed=seed, backend="numpy") as one:
                return one.collect_rollouts(200 // num_envs)

        return collect

    assert compare_collection(with_envs(2), with_envs(4), seeds=range(3)).values.shape == (2, 3)
