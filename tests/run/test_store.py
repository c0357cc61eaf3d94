import json
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from inchworm import EvalConfig, NumpyPolicy, PolicyConfig, PolicyEvaluator, PolicySpec, PolicyStore, PPOConfig, PPOTrainer, load_policy
from inchworm.cli.main import main
from inchworm.core.errors import ConfigError, CorruptFileError

SPEC = PolicySpec(gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2), PolicyConfig(hidden_sizes=(4,)))


def made(value: float) -> NumpyPolicy:
    policy = NumpyPolicy(SPEC)
    weights = policy.get_weights()
    policy.set_weights({name: np.full_like(array, value) if name.endswith("bias") else array for name, array in weights.items()})
    return policy


@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_versions_are_saved_listed_loaded_and_compared(kind: str, tmp_path: Path) -> None:
    store = PolicyStore(None if kind == "memory" else tmp_path / "policies")
    assert store.list() == []
    with pytest.raises(ConfigError, match=r"there is no version latest in .*; its newest versions: none"):
        store.get()
    policy = made(1.0)
    store.save(policy, score=10.0, metadata={"epoch": 1, "lr": 0.1})
    policy.set_weights(made(9.0).get_weights())  # what was saved does not change with it
    store.save(made(2.0), score=30.0, metadata={"epoch": 2, "lr": 0.1})
    store.save(made(3.5), metadata={"epoch": 3})
    assert [record.version for record in store.list()] == [1, 2, 3]
    assert [store.get(which).version for which in ("latest", "best", 1, "1")] == [3, 2, 1, 1]
    assert {name: bool((array == 1.0).all()) for name, array in store.load(1).get_weights().items()}["actor.head.bias"]
    compared = store.compare(1, 2)
    assert compared["score"] == 20.0
    assert compared["metadata"] == {"epoch": (1, 2)}
    assert set(compared["weights"].values()) == {1.0}
    assert all(name.endswith("bias") for name in compared["weights"])
    assert store.compare("best", "latest")["score"] is None
    with pytest.raises(ConfigError, match=r"there is no version 7 in .*; its newest versions: 1, 2, 3"):
        store.load(7)
    with pytest.raises(ConfigError, match=r"score=nan must be a finite number"):
        store.save(made(1.0), score=float("nan"))
    with pytest.raises(ConfigError, match=r"metadata.x is ndarray"):
        store.save(made(1.0), metadata={"x": np.zeros(3)})


def test_versions_in_files_are_policies_by_name_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = PPOConfig(rollout_steps=8)
    with PPOTrainer("mlp", "CartPole-v1", config, num_envs=2, seed=1) as trainer:
        record = PolicyStore("policies").save(trainer.policy, score=1.0)
        assert record.uri == "policies@1"
        weights = trainer.policy.get_weights()
    loaded = load_policy("policies@best").get_weights()
    assert all(np.array_equal(loaded[name], weights[name]) for name in weights)
    assert load_policy("policies/v000001.safetensors").spec == load_policy("policies@latest").spec
    with PPOTrainer("mlp", "CartPole-v1", config, num_envs=2, seed=2, init_from="policies@1") as trainer:
        assert np.array_equal(trainer.policy.get_weights()["actor.head.weight"], weights["actor.head.weight"])
    baseline = EvalConfig(baseline="policies@best", episodes=2, num_envs=1)
    with PolicyEvaluator("CartPole-v1", baseline) as evaluator:
        assert evaluator.evaluate(load_policy("policies@1")).difference == 0.0  # the same policy on the same seeds
    assert main(["evaluate", "policies@1", "--env", "CartPole-v1", "--episodes", "2"]) == 0
    assert main(["check-policy", "policies@best", "CartPole-v1", "--steps", "50"]) == 0
    with pytest.raises(ConfigError, match=r"there is no version 9 in policies"):
        load_policy("policies@9")
    with pytest.raises(FileNotFoundError, match=r"there is no nowhere@best"):
        load_policy("nowhere@best")


def test_a_changed_file_and_a_damaged_description_are_named(tmp_path: Path) -> None:
    store = PolicyStore(tmp_path)
    store.save(made(1.0))
    store.save(made(2.0))
    (tmp_path / "v000001.safetensors").write_bytes((tmp_path / "v000002.safetensors").read_bytes())
    with pytest.raises(CorruptFileError, match=r"v000001.safetensors is not the policy that was saved"):
        store.load(1)
    (tmp_path / "v000002.json").write_text(json.dumps({"score": 1}))
    with pytest.raises(CorruptFileError, match=r"v000002.json is damaged"):
        store.list()


def test_a_version_without_its_description_is_not_one(tmp_path: Path) -> None:
    store = PolicyStore(tmp_path)
    store.save(made(1.0))
    (tmp_path / "v000001.json").unlink()  # killed between the two files
    assert store.list() == []
    assert store.save(made(2.0)).version == 1
    assert {name: bool((array == 2.0).all()) for name, array in store.load().get_weights().items()}["actor.head.bias"]
