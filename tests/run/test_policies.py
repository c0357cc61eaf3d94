"""`load_policy`: of files, runs and checkpoints; networks and policy classes of users, which come from the caller."""

import json
import shutil
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

import inchworm
from examples.custom_network import OwnPolicy, ResidualNetwork
from inchworm import (
    EvalConfig,
    NumpyPolicy,
    PolicyConfig,
    PolicyEvaluator,
    PolicyMap,
    PolicySpec,
    PolicyStore,
    PPOConfig,
    PPOTrainer,
    RandomActor,
    TorchPolicy,
    TrainingCheckpointer,
    evaluate_policy,
    load_policy,
    save_policy,
)
from inchworm.cli.main import main
from inchworm.config.sections import OpponentConfig, TrainingConfig
from inchworm.core.errors import BadNumberError, ConfigError, CorruptFileError
from inchworm.core.tensor_file import write_tensor_file
from inchworm.selfplay.callback import fixed_players

CARTPOLE = gym.make("CartPole-v1")
SPEC = PolicySpec(CARTPOLE.observation_space, CARTPOLE.action_space, PolicyConfig(hidden_sizes=(4,)))
PPO = PPOConfig(rollout_steps=8, num_minibatches=2, update_epochs=2)
BATCH = 16
SEEN = np.array([0.1, -0.2, 0.03, 0.4], np.float32)


def own_network() -> TorchPolicy:
    torch.manual_seed(1)
    return TorchPolicy(SPEC, network=ResidualNetwork(SPEC, width=8))


def own_policy() -> OwnPolicy:
    torch.manual_seed(1)
    return OwnPolicy(4, 2)


def small(spec: PolicySpec) -> ResidualNetwork:
    return ResidualNetwork(spec, width=8)


def train(policy, run_dir: Path, steps: int = 2 * BATCH):
    with PPOTrainer(policy, "CartPole-v1", PPO, num_envs=2, run_dir=run_dir) as trainer:
        if (run_dir / "checkpoints").exists():
            trainer.load_checkpoint()
        trainer.train(steps)
        return trainer.policy.get_weights()


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


# ---- what is loaded


def test_a_run_a_checkpoint_and_a_file_are_loaded(tmp_path, monkeypatch):
    weights = train("mlp", tmp_path / "runs" / "first")
    run = tmp_path / "runs" / "first"
    newest = TrainingCheckpointer(run / "checkpoints").latest()
    for path in (run, str(run), run / "policy.safetensors", run / "checkpoints", newest):
        policy = load_policy(path)
        assert same(policy.get_weights(), weights), path
        assert policy.predict(SEEN) in (0, 1)
    monkeypatch.chdir(tmp_path)
    assert same(load_policy("first").get_weights(), weights)  # in runs/
    (run / "policy.safetensors").unlink()
    assert same(load_policy(run).get_weights(), weights)  # of the newest checkpoint


def test_anything_else_is_answered_with_what_was_expected(tmp_path):
    expected = "expected a policy file, a run directory .with policy.safetensors., a checkpoint directory .with manifest.json. or a version"
    with pytest.raises(FileNotFoundError, match=f"there is no nowhere; {expected}"):
        load_policy("nowhere")
    with pytest.raises(ConfigError, match=f"holds no policy; {expected}"):
        load_policy(tmp_path)
    PolicyStore(tmp_path / "store").save(NumpyPolicy(SPEC, seed=0))
    with pytest.raises(ConfigError, match=r"store holds versions of a policy; name one: .*store@latest, .*store@best or a number"):
        load_policy(tmp_path / "store")
    path = write_tensor_file(tmp_path / "x", {}, kind="rollout", version=1, header={})
    with pytest.raises(CorruptFileError, match="it is a rollout file, not a policy file"):
        load_policy(path)


def test_a_run_of_several_policies_is_loaded_part_by_part(tmp_path):
    several = PolicyMap(policies={"red": "mlp", "blue": own_policy()}, lane_map=["red", "blue"])
    train(several, tmp_path)
    with pytest.raises(ConfigError, match=r"holds several policies \(blue, red\); load one by its file, such as policy-blue.safetensors"):
        load_policy(tmp_path)
    assert isinstance(load_policy(tmp_path / "policy-red.safetensors"), NumpyPolicy)
    assert isinstance(load_policy(tmp_path / "policy-blue.safetensors", policy=own_policy), OwnPolicy)
    train(several, tmp_path, 4 * BATCH)


# ---- networks of users


@pytest.mark.parametrize("give", [small, ResidualNetwork(SPEC, width=8)], ids=["factory", "instance"])
def test_a_network_of_ones_own_is_saved_and_loaded(tmp_path, give):
    policy = own_network()
    weights = train(policy, tmp_path / "run")
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints", save_policy(tmp_path / "saved", policy)):
        loaded = load_policy(path, network=give)
        assert isinstance(loaded, TorchPolicy)
        assert same(loaded.get_weights(), weights)
        assert loaded.predict(SEEN) == policy.predict(SEEN)
    assert evaluate_policy(loaded, "CartPole-v1", 2).episodes == 2
    record = TrainingCheckpointer(tmp_path / "run" / "checkpoints").load_policy(network=give)
    assert same(record.policy.get_weights(), weights)


@pytest.mark.parametrize("give", [own_policy, OwnPolicy(4, 2)], ids=["factory", "instance"])
def test_a_policy_class_of_ones_own_is_saved_and_loaded(tmp_path, give):
    weights = train(own_policy(), tmp_path / "run")
    loaded = load_policy(tmp_path / "run", policy=give)
    assert isinstance(loaded, OwnPolicy)
    assert (loaded is give) == isinstance(give, OwnPolicy)
    assert same(loaded.get_weights(), weights)
    assert same(load_policy(tmp_path / "run" / "checkpoints", policy=give).get_weights(), weights)


@pytest.mark.parametrize("make", [own_network, own_policy])
def test_a_run_of_ones_own_network_resumes_with_the_same_bits(tmp_path, make):
    whole = train(make(), tmp_path / "whole", 4 * BATCH)
    train(make(), tmp_path / "parts", 2 * BATCH)
    (tmp_path / "parts" / "policy.safetensors").unlink()
    assert same(train(make(), tmp_path / "parts", 4 * BATCH), whole)
    one, other = ((tmp_path / name / "policy.safetensors").read_bytes() for name in ("whole", "parts"))
    assert one == other


def test_deleted_checkpoints_of_ones_own_network_are_noticed(tmp_path):
    train(own_policy(), tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(ConfigError, match="its checkpoints are gone"):
        train(own_policy(), tmp_path)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (own_network, r"the network examples.custom_network:ResidualNetwork, .*; use load_policy\(.*, network=ResidualNetwork\)$"),
        (
            own_policy,
            r"the policy examples.custom_network:OwnPolicy, .*; use load_policy\(.*, policy=OwnPolicy\(…\)\) with the arguments of",
        ),
    ],
)
def test_without_the_class_the_answer_names_it_and_what_to_pass(tmp_path, make, words):
    train(make(), tmp_path)
    for path in (tmp_path / "policy.safetensors", tmp_path / "checkpoints"):
        with pytest.raises(ConfigError, match=f"holds the weights of {words}"):
            load_policy(path)


def test_a_file_names_code_that_is_never_imported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    for header in ({"policy": "trap:Trap"}, {"spec": SPEC.to_dict(), "network": "trap:Trap"}):
        path = write_tensor_file(tmp_path / "x", own_policy().get_weights(), kind="policy", version=2, header=header)
        with pytest.raises(ConfigError, match="trap:Trap"):
            load_policy(path)
        assert same(load_policy(path, policy=own_policy).get_weights(), own_policy().get_weights())
    assert "trap" not in sys.modules
    for name in ("trap:\x1b[31m", "no colon", 3, "x" * 999 + ":y"):
        path = write_tensor_file(tmp_path / "x", {}, kind="policy", version=2, header={"policy": name})
        with pytest.raises(CorruptFileError, match="not the import path of a class"):
            load_policy(path, policy=own_policy)


def test_a_wrong_class_is_answered_with_the_names_and_shapes_that_differ(tmp_path):
    network, policy = save_policy(tmp_path / "network", own_network()), save_policy(tmp_path / "policy", own_policy())
    with pytest.raises(
        ConfigError, match=r"network.inlet.weight has shape \(8, 4\); the policy needs \(64, 4\); .*more have another shape"
    ):
        load_policy(network, network=ResidualNetwork)
    with pytest.raises(
        ConfigError, match=r"written by examples.custom_network:OwnPolicy, does not fit .*NumpyPolicy: .*missing actor.head.bias.*unknown"
    ):
        load_policy(policy, policy=NumpyPolicy(SPEC))
    with pytest.raises(ConfigError, match=r"actor.0.weight has shape \(64, 4\); the policy needs \(64, 3\)"):
        load_policy(policy, policy=OwnPolicy(3, 2))
    with pytest.raises(ConfigError, match="holds a built-in policy; leave network out"):
        load_policy(save_policy(tmp_path / "mlp", NumpyPolicy(SPEC)), network=small)
    with pytest.raises(ConfigError, match=r"use load_policy\(.*, policy=OwnPolicy"):
        load_policy(policy, network=small)
    with pytest.raises(ConfigError, match=r"network must be an inchworm\.backends\.torch.network.Network"):
        load_policy(network, network=lambda _: torch.nn.Linear(4, 2))
    with pytest.raises(ConfigError, match="policy must be a policy"):
        load_policy(policy, policy=lambda: RandomActor(CARTPOLE.action_space))
    with pytest.raises(ConfigError, match="policy must be a policy, or make one without arguments; it is 'x'"):
        load_policy(policy, policy="x")
    with pytest.raises(ConfigError, match="networks of users act in torch, not in numpy; leave backend out"):
        load_policy(network, "numpy", network=small)
    train(own_network(), tmp_path / "run")
    wide = TorchPolicy(SPEC, network=ResidualNetwork(SPEC))
    with pytest.raises(CorruptFileError, match=r"does not fit this trainer: .*network.inlet.weight has shape \(8, 4\)"):
        train(wide, tmp_path / "run")


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path):
    broken = own_policy()
    with torch.no_grad():
        broken.actor[0].bias[3] = torch.nan
    with pytest.raises(BadNumberError, match=r"actor.0.bias is not finite at \[3\]"):
        save_policy(tmp_path / "x", broken)
    with pytest.raises(ConfigError, match="a spec has no weights"):
        save_policy(tmp_path / "x", SPEC)
    with pytest.raises(ConfigError, match="RandomActor is not a policy with weights"):
        save_policy(tmp_path / "x", RandomActor(CARTPOLE.action_space))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_buffers_of_any_dtype_are_part_of_the_file(tmp_path):
    class Normed(ResidualNetwork):
        def __init__(self, spec: PolicySpec) -> None:
            super().__init__(spec, width=8)
            self.register_buffer("count", torch.tensor(7))
            self.register_buffer("seen", torch.tensor([True, False]))

    path = save_policy(tmp_path / "x", TorchPolicy(SPEC, network=Normed(SPEC)))
    weights = inchworm.load_policy(path, network=Normed).get_weights()
    assert (weights["network.count"].tolist(), weights["network.seen"].tolist()) == (7, [True, False])
    with pytest.raises(ConfigError, match=r"Normed, and files never .*, network=Normed\)$"):
        load_policy(path)


SMALL = PolicySpec(gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2), PolicyConfig(hidden_sizes=(4,)))


def made(value: float) -> NumpyPolicy:
    policy = NumpyPolicy(SMALL)
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
    opponents = TrainingConfig(opponent=OpponentConfig(mode="pool", anchors=("random",), policies=("policies@best",)))
    players = fixed_players(opponents, CARTPOLE.observation_space, CARTPOLE.action_space)
    assert np.array_equal(next(player for name, player in players.items() if name != "random").get_weights()["actor.head.weight"],
                          weights["actor.head.weight"])  # fmt: skip
    assert main(["evaluate", "policies@1", "--env", "CartPole-v1", "--episodes", "2"]) == 0
    assert main(["check-policy", "policies@best", "CartPole-v1", "--steps", "50"]) == 0
    with pytest.raises(ConfigError, match=r"there is no version 9 in policies"):
        load_policy("policies@9")
    with pytest.raises(ConfigError, match=r"^models:CartPole-v1 is not a registered policy; expected models:/NAME@best or models:/NAME/3$"):
        load_policy("models:CartPole-v1")
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
