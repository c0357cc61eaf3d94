"""Several policies that learn, each from its own lanes: exactly as alone, and together in the trainer."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from inchworm import (
    CompositePolicy,
    NumpyPolicy,
    PolicyConfig,
    PolicyMap,
    PolicySpec,
    PPOConfig,
    PPOOptimizer,
    PPOTrainer,
    Rollout,
    RolloutCollector,
    TorchPolicy,
    TrainingCheckpointer,
    compute_advantages,
    load_policy,
    make_vector_env,
)
from inchworm.backends.composite import CompositeLearner
from inchworm.backends.learner import HISTORY
from inchworm.backends.registry import acting_policy
from inchworm.config.sections import TrainingConfig
from inchworm.core.errors import ConfigError, SpaceError
from inchworm.evaluate.evaluator import evaluate_policy
from inchworm.policy.composite import own_spaces
from inchworm.policy.file import fingerprint
from inchworm.train.profile import Profile

PPO = PPOConfig(rollout_steps=16, num_minibatches=2, update_epochs=2)
LANE_MAP = ["red", "blue"]


def mlp(seed: int) -> TorchPolicy:
    with make_vector_env("CartPole-v1", 1) as env:
        return TorchPolicy(PolicySpec(env.observation_space, env.action_space, PolicyConfig(hidden_sizes=(8,))), seed=seed)


def collected(policy: CompositePolicy) -> Rollout:
    with make_vector_env("CartPole-v1", 4) as env:
        return RolloutCollector(env, acting_policy(policy)).collect(16)


def learner_of(policy: CompositePolicy) -> CompositeLearner:
    return CompositeLearner(policy, {name: PPOOptimizer(policy.policies[name], PPO) for name in policy.trainable})


def same(ours: Any, theirs: Any) -> bool:
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_parts_learn_to_the_bit_what_two_learners_learn_alone() -> None:
    policy = CompositePolicy({"red": mlp(0), "blue": mlp(1)}, LANE_MAP)
    alone = {"red": PPOOptimizer(mlp(0), PPO), "blue": PPOOptimizer(mlp(1), PPO)}
    learner = learner_of(policy)
    for update in range(3):
        rollout = collected(policy)
        stats = learner.update(rollout)
        for name, lanes in (("red", [0, 2]), ("blue", [1, 3])):
            print_of_part = np.full(2, fingerprint(alone[name].policy.get_weights()), np.uint64)
            own = dataclasses.replace(rollout.select_lanes(lanes), weights_fingerprint=print_of_part)
            expected = alone[name].update(own)
            assert {key.removeprefix(f"{name}/"): value for key, value in stats.items() if key.startswith(f"{name}/")} == dict(expected)
            assert same(policy.learned[name].get_weights(), alone[name].policy.get_weights()), (name, update)
        assert stats["policy_loss"] == np.mean([stats["red/policy_loss"], stats["blue/policy_loss"]])
        assert stats["ratio_error"] == max(stats["red/ratio_error"], stats["blue/ratio_error"])
        sizes = stats["red/effective_sample_size"], stats["blue/effective_sample_size"]
        assert stats["effective_sample_size"] == min(sizes)
    assert (learner.updates, policy.policy_version, learner.env_steps) == (3, 3, 3 * 16 * 4)
    assert policy.learned["red"].policy_version == 3


def test_a_part_without_valid_rows_stays_and_the_other_learns() -> None:
    policy = CompositePolicy({"red": mlp(0), "blue": mlp(1)}, LANE_MAP)
    rollout, before = collected(policy), {name: part.get_weights() for name, part in policy.learned.items()}
    valid = rollout.valid.copy()
    valid[:, [1, 3]] = False
    learner = learner_of(policy)
    learner.update(dataclasses.replace(rollout, valid=np.zeros_like(valid)))  # without valid rows there is no update at all
    assert (learner.updates, policy.policy_version) == (0, 0)
    stats = learner.update(dataclasses.replace(rollout, valid=valid))
    assert same(policy.learned["blue"].get_weights(), before["blue"])
    assert not same(policy.learned["red"].get_weights(), before["red"])
    assert (stats["red/n_updates"], stats["blue/n_updates"], stats["n_updates"]) == (1, 0, 1)
    for name in ("loss", "explained_variance", "epochs"):  # the mean is over parts that learned
        assert stats[name] == stats[f"red/{name}"] != stats[f"blue/{name}"] == 0


@pytest.mark.filterwarnings("ignore:the rollout was made by weights")
def test_staleness_is_counted_from_a_parts_own_version() -> None:
    old = mlp(0)
    old.policy_version = 40  # it has learned elsewhere before
    policy = CompositePolicy({"red": old, "blue": mlp(1)}, LANE_MAP)
    rollout, learner = collected(policy), learner_of(policy)
    assert learner.update(rollout.to_dict())["red/staleness"] == 0
    stats = learner.update(rollout)  # the same once more: one update old by now
    assert (stats["red/staleness"], stats["blue/staleness"], stats["staleness"]) == (1, 1, 1)
    assert old.policy_version == 42


@pytest.mark.filterwarnings("ignore:the rollout was made by weights")
def test_a_part_knows_recent_weights_of_the_whole_also_after_a_resume() -> None:
    policy = CompositePolicy({"red": mlp(0), "blue": mlp(1)}, LANE_MAP)
    stranger = collected(CompositePolicy({"red": mlp(2), "blue": mlp(3)}, LANE_MAP))
    rollout, learner = collected(policy), learner_of(policy)
    learner.update(rollout)
    state = learner.state_dict()
    learner.update(rollout)
    resumed = learner_of(policy)
    resumed.load_state_dict(state)
    assert resumed.update(rollout)["staleness"] == 2
    assert resumed.update(stranger)["blue/staleness"] == HISTORY
    resumed.load_state_dict({name: value for name, value in state.items() if name != "history"})  # of an older checkpoint
    assert resumed.update(rollout)["staleness"] == HISTORY


def test_frozen_parts_stay_and_own_settings_are_used() -> None:
    several = PolicyMap(policies={"red": "mlp", "blue": "mlp"}, lane_map=LANE_MAP, trainable=["red"], ppo={"red": {"learning_rate": 1e-2}})
    with PPOTrainer(several, "CartPole-v1", PPO, num_envs=4) as trainer:
        before = trainer.policy.get_weights()
        history = trainer.train(64)
        after = trainer.policy.get_weights()
    assert not np.array_equal(before["red/actor.0.weight"], before["blue/actor.0.weight"])  # each has a seed of its own
    moved = {name.partition("/")[0] for name in before if not np.array_equal(before[name], after[name])}
    assert moved == {"red", "policy_version"}
    assert history["red/learning_rate"] == [1e-2]
    assert "blue/policy_loss" not in history


def test_schedules_run_with_the_whole_run() -> None:
    config = PPO.replace(learning_rate_schedule="linear")
    with PPOTrainer(PolicyMap(policies={"red": "mlp", "blue": "mlp"}, lane_map=LANE_MAP), "CartPole-v1", config, num_envs=4) as trainer:
        history = trainer.train(4 * 64)
    rates = [3e-4 * (1 - share) for share in (0, 0.25, 0.5, 0.75)]  # 64 of 256 steps in each iteration, 32 of them each part's
    np.testing.assert_allclose(history["red/learning_rate"], rates)
    np.testing.assert_allclose(history["blue/learning_rate"], rates)


def test_a_composite_that_is_given_is_the_one_that_learns() -> None:
    policy = CompositePolicy({"red": mlp(0), "blue": mlp(1)}, LANE_MAP)
    with PPOTrainer(policy, "CartPole-v1", PPO, num_envs=4) as trainer:
        trainer.learn(trainer.collect_rollouts())
        assert trainer.policy is policy
        assert trainer.device == "cpu"
        assert trainer.optimizer.keys() == {"red", "blue"}
        assert isinstance(trainer.collector.policy, CompositePolicy)
        assert all(isinstance(part, NumpyPolicy) for part in trainer.collector.policy.policies.values())
    assert policy.policy_version == 1


SEVERAL = PolicyMap(
    policies={"red": PolicyConfig(kind="gru", hidden_sizes=(8,), memory_size=8), "blue": PolicyConfig(normalize_observations=True)},
    lane_map=LANE_MAP,
)


def run(directory: Path, *targets: int) -> dict[str, np.ndarray]:
    for index, target in enumerate(targets):
        with PPOTrainer(SEVERAL, "CartPole-v1", PPO, num_envs=4, run_dir=directory) as trainer:
            if index:
                trainer.load_checkpoint()
            trainer.train(target)
            weights = trainer.policy.get_weights()
    return weights


def test_a_resumed_run_has_the_same_bits_and_a_file_for_each_policy(tmp_path: Path) -> None:
    whole, resumed = run(tmp_path / "whole", 6 * 64), run(tmp_path / "parts", 2 * 64, 6 * 64)
    assert same(whole, resumed)
    assert (tmp_path / "whole" / "metrics.jsonl").read_bytes() == (tmp_path / "parts" / "metrics.jsonl").read_bytes()
    assert not (tmp_path / "whole" / "policy.safetensors").exists()
    for name in ("red", "blue"):
        part = load_policy(tmp_path / "whole" / f"policy-{name}.safetensors")
        assert same(part.get_weights(), {key.removeprefix(f"{name}/"): value for key, value in whole.items() if key.startswith(f"{name}/")})
    record = TrainingCheckpointer(tmp_path / "whole" / "checkpoints").load_policy()
    assert isinstance(record.policy, CompositePolicy)
    assert same(record.policy.get_weights(), whole)


def test_a_policy_file_that_is_missing_is_written_again(tmp_path: Path) -> None:
    run(tmp_path, 64)
    (tmp_path / "policy-blue.safetensors").unlink()
    with PPOTrainer(SEVERAL, "CartPole-v1", PPO, num_envs=4, run_dir=tmp_path) as trainer:
        trainer.load_checkpoint()
        with pytest.raises(ConfigError, match="several policies have a file each"):
            trainer.save_policy(tmp_path / "x.safetensors")
    assert (tmp_path / "policy-blue.safetensors").exists()


def test_a_checkpoint_of_another_lane_map_is_refused(tmp_path: Path) -> None:
    run(tmp_path, 64)
    other = dataclasses.replace(SEVERAL, lane_map=["blue", "red"])
    with (
        PPOTrainer(other, "CartPole-v1", PPO, num_envs=4, run_dir=tmp_path) as trainer,
        pytest.raises(ConfigError, match="a different network"),
    ):
        trainer.load_checkpoint()
    with pytest.raises(ConfigError, match="is of learners for red, but blue learn here"):
        learner_of(CompositePolicy({"blue": mlp(0)}, ["blue"])).load_state_dict({"parts": {"red": {}}})


def test_advantages_are_each_critics_own() -> None:
    policy = CompositePolicy({"red": mlp(0), "blue": mlp(1)}, LANE_MAP)
    rollout = collected(policy)
    whole = compute_advantages(policy, rollout, PPO)
    for name, lanes in (("red", [0, 2]), ("blue", [1, 3])):
        own = compute_advantages(policy.learned[name], rollout.select_lanes(lanes), PPO)
        for field in ("values", "next_values", "advantages", "returns"):
            np.testing.assert_array_equal(getattr(whole, field)[:, lanes], getattr(own, field))
            assert getattr(whole, field).dtype == getattr(own, field).dtype


def test_parts_learn_in_numpy_and_a_profile_sees_inside_every_part() -> None:
    profile = Profile()
    several = PolicyMap(policies={"red": "mlp", "blue": "mlp"}, lane_map=LANE_MAP)
    with PPOTrainer(several, "CartPole-v1", PPO, num_envs=2, backend="numpy") as trainer:
        history = trainer.train(32, profile=profile)
    assert profile.calls["GAE"] == 2
    assert max(history["ratio_error"]) < 5e-5


@pytest.mark.parametrize(
    ("several", "words"),
    [
        ({"lane_map": ["red", "blue", "red"]}, r"lane_map names 3 lane\(s\), but the environment has 4; name 4, or a part that repeats"),
        ({"policies": {"red": "mlp", "blue": "tree"}}, "there is no policy called 'tree'"),
        ({"ppo": {"red": {"learning_rat": 1}}}, "learning_rat"),
        ({"trainable": []}, r"no policy is trainable \(trainable=\(\) for red, blue\)"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(several: dict[str, Any], words: str) -> None:
    plan = dataclasses.replace(PolicyMap(policies={"red": "mlp", "blue": "mlp"}, lane_map=LANE_MAP), **several)
    with pytest.raises(ConfigError, match=words) as caught, PPOTrainer(plan, "CartPole-v1", PPO, num_envs=4) as trainer:
        trainer.train(64)
    assert "\n" not in str(caught.value)


def by_role(workers: int, **policy: Any) -> TrainingConfig:
    return TrainingConfig.from_dict(
        {
            "env": {"id": "mpe2.simple_adversary_v3:parallel_env", "num_envs": 2, "num_workers": workers},
            "policy": {"hidden_sizes": (8,), "memory_size": 4, **policy},
            "ppo": {"rollout_steps": 12, "num_minibatches": 2, "update_epochs": 2, "learning_rate": 1e-2},
            "evaluation": {"interval": 0, "final_episodes": 0},
            "policies": {"adversary": {"agents": "adversary_*", "policy": {"kind": "gru"}}, "good": {"agents": ["agent_0", "agent_*"]}},
        }
    )


def test_roles_of_a_config_resume_with_the_same_bits_in_workers_and_with_memory(tmp_path: Path) -> None:
    pytest.importorskip("mpe2")
    found = {}
    for name, targets, workers in (("whole", (4 * 72,), 0), ("parts", (2 * 72, 4 * 72), 2)):
        config = by_role(workers, normalize_observations=True)
        for index, target in enumerate(targets):
            with PPOTrainer(config.policy, config.env, config, run_dir=tmp_path / name) as trainer:
                if index:
                    trainer.load_checkpoint()
                history = trainer.train(target)
                trainer.save_checkpoint()
                found[name] = trainer.policy.get_weights()
        assert max(history["ratio_error"]) < 1e-4
    assert same(found["whole"], found["parts"])
    adversary = load_policy(tmp_path / "parts" / "policy-adversary.safetensors")
    assert (adversary.spec.observation_space.shape, adversary.spec.config.kind) == ((8,), "gru")
    record = TrainingCheckpointer(tmp_path / "parts" / "checkpoints").load_policy()
    assert isinstance(record.policy, CompositePolicy)
    assert record.policy.to_dict(lambda _: None)["spaces"]["own"].keys() == {"adversary"}  # it acts alone, too
    one = evaluate_policy(record.policy, config.env, 4)
    parts = {name: load_policy(tmp_path / "parts" / f"policy-{name}.safetensors") for name in ("adversary", "good")}
    files = CompositePolicy(parts, ["adversary", "good", "good"])
    assert np.array_equal(one.returns, evaluate_policy(files, config.env, 4).returns)
    with PPOTrainer(config.policy, config.env, config, run_dir=tmp_path / "parts") as trainer:
        trainer.load_checkpoint()
        assert np.array_equal(one.returns, evaluate_policy(trainer.collector.policy, config.env, 4).returns)


def test_a_part_that_is_given_may_be_made_for_its_role_or_for_all_lanes() -> None:
    pytest.importorskip("mpe2")
    config = by_role(0)
    with make_vector_env(config.env, seed=0) as env:
        lane_map = ["adversary", "good", "good"]
        own = own_spaces(lane_map, env)
        assert [space.shape for space, _ in own.values()] == [(8,), (10,)]
        for spaces_of in (own["adversary"], (env.observation_space, env.action_space)):
            adversary = NumpyPolicy(PolicySpec(*spaces_of, PolicyConfig()))
            several = PolicyMap(policies={"adversary": adversary, "good": "mlp"}, lane_map=lane_map)
            with PPOTrainer(several, config.env, PPO, num_envs=2, backend="numpy") as trainer:
                trainer.learn(trainer.collect_rollouts(4))
        stranger = NumpyPolicy(PolicySpec(spaces.Box(-1, 1, (7,)), env.action_space, PolicyConfig()))
        with pytest.raises(SpaceError, match=r"made for the observation space Box.*\(7,\).*has Box.*\(8,\)"):
            PPOTrainer(PolicyMap(policies={"adversary": stranger, "good": "mlp"}, lane_map=lane_map), config.env, PPO)


def test_policies_are_given_once() -> None:
    config = by_role(0)
    with pytest.raises(ConfigError, match="the config has the policies adversary, good, and a PolicyMap is given, too"):
        PPOTrainer(SEVERAL, "CartPole-v1", config)


def test_weights_are_frozen_in_one_policy_or_in_all() -> None:
    several = PolicyMap(policies={"red": "mlp", "blue": "mlp"}, lane_map=LANE_MAP)

    def changed(*freeze: str) -> set[str]:
        with PPOTrainer(several, "CartPole-v1", PPO.replace(freeze=freeze), num_envs=4) as trainer:
            before = trainer.policy.get_weights()
            trainer.learn(trainer.collect_rollouts())
            after = trainer.policy.get_weights()
        return {name for name in before if not np.array_equal(before[name], after[name])}

    every = changed()
    assert {"red/actor.0.weight", "blue/actor.0.weight"} <= every
    assert every - changed("red/actor.0.*") == {"red/actor.0.weight", "red/actor.0.bias"}
    assert every - changed("*/actor.0.bias") == every - changed("actor.0.bias") == {"red/actor.0.bias", "blue/actor.0.bias"}
    with pytest.raises(ConfigError, match=r"ppo.freeze: no policy matches 'green/actor.\*'; the policies are red, blue"):
        changed("green/actor.*")
