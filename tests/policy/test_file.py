"""The policy file: a round trip, damage that is noticed, and acting from it without a learning framework."""

import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from gymnasium import spaces

from inchworm.backends.numpy.policy import NumpyPolicy, fresh_weights
from inchworm.config.sections import PolicyConfig
from inchworm.core.errors import BadNumberError, CorruptFileError, InchwormError
from inchworm.core.tensor_file import write_tensor_file
from inchworm.policy.file import check_weights, fingerprint, read_policy, rescaled_value_head, save_policy
from inchworm.policy.spec import PolicySpec
from inchworm.run.policies import load_policy

SPEC = PolicySpec(
    spaces.Dict({"x": spaces.Box(-1, 1, (2,)), "k": spaces.Discrete(3)}),
    spaces.Dict({"go": spaces.Box(-1, 1, (1,)), "what": spaces.Discrete(2)}),
    PolicyConfig(hidden_sizes=(4,), normalize_observations=True, normalize_values=True, action_bounds="tanh"),
)
IMAGES = PolicySpec(
    spaces.Box(0, 255, (36, 36, 3), np.uint8), spaces.Discrete(2), PolicyConfig(kind="cnn", cnn_filters=((4, 5, 3),), cnn_features=4)
)


def weights_of(spec=SPEC, seed=0):
    return {**fresh_weights(spec, seed), "policy_version": np.array(12)}


def test_a_round_trip_gives_the_same_bits(tmp_path):
    path = save_policy(tmp_path / "policy.safetensors", SPEC, weights_of())
    spec, weights = read_policy(path)
    assert (spec.observation_space, spec.action_space, spec.config) == (SPEC.observation_space, SPEC.action_space, SPEC.config)
    for name, value in weights_of().items():
        assert weights[name].tobytes() == value.tobytes()
        assert weights[name].dtype == value.dtype
    policy = load_policy(path)
    assert isinstance(policy, NumpyPolicy)
    assert policy.policy_version == 12
    observation = {"x": np.array([0.1, -0.3], np.float32), "k": 2}
    expected = NumpyPolicy(SPEC, weights_of()).predict(observation)
    np.testing.assert_array_equal(policy.predict(observation)["go"], expected["go"])


def test_a_whole_file_with_a_wrong_content_is_refused(tmp_path):
    path = tmp_path / "policy.safetensors"

    def write(weights, spec, version=1, kind="policy"):
        write_tensor_file(path, weights, kind=kind, version=version, header={"spec": spec} if spec is not None else {})

    wrong = {**weights_of(), "actor.head.bias": np.zeros(9, np.float32)}
    for weights, spec in (
        (wrong, SPEC.to_dict()),
        ({"x": np.zeros(1)}, SPEC.to_dict()),
        (weights_of(), None),
        (weights_of(), {"observation_space": {"kind": "Box"}}),
        (weights_of(), {**SPEC.to_dict(), "config": {"no_such_field": 1}}),
        (weights_of(), {**SPEC.to_dict(), "action_space": {"kind": "os.system"}}),
        (weights_of(), {**SPEC.to_dict(), "action_space": 3}),
    ):
        write(weights, spec)
        with pytest.raises(CorruptFileError, match="is not a valid policy file"):
            load_policy(path)
    write(weights_of(), SPEC.to_dict(), version=99)
    with pytest.raises(CorruptFileError, match="version 99"):
        load_policy(path)
    write(weights_of(), SPEC.to_dict(), kind="rollout")
    with pytest.raises(CorruptFileError, match="it is a rollout file"):
        load_policy(path)


def test_weights_that_do_not_fit_are_not_saved(tmp_path):
    with pytest.raises(InchwormError, match="missing"):
        save_policy(tmp_path / "policy.safetensors", SPEC, {})
    assert not list(tmp_path.iterdir())
    with pytest.raises(InchwormError, match=r"the weight log_std has shape \(5,\); the policy needs \(1,\)"):
        check_weights(SPEC, {**weights_of(), "log_std": np.zeros(5)})


def test_which_backend_reads_a_file(tmp_path):
    from inchworm.backends.torch.policy import TorchPolicy

    flat = save_policy(tmp_path / "flat", SPEC, weights_of())
    images = save_policy(tmp_path / "images", IMAGES, weights_of(IMAGES))
    assert isinstance(load_policy(flat, "torch"), TorchPolicy)
    assert isinstance(load_policy(flat, "numpy"), NumpyPolicy)
    assert isinstance(load_policy(images), TorchPolicy)
    with pytest.raises(InchwormError, match="torch backend"):
        load_policy(images, "numpy")


def test_acting_from_a_file_imports_no_learning_framework(tmp_path):
    path = save_policy(tmp_path / "policy.safetensors", SPEC, weights_of())
    program = f"""
import sys
import numpy as np
from inchworm.run.policies import load_policy
policy = load_policy({str(path)!r})
action = policy.predict({{"x": np.zeros(2, np.float32), "k": 1}})
assert set(action) == {{"go", "what"}} and type(action["what"]) is int, action
policy.value({{"x": np.zeros((1, 2, 2), np.float32), "k": np.zeros((1, 2), int)}})
assert "torch" not in sys.modules and "jax" not in sys.modules, "a framework was imported"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_a_fingerprint_tells_weights_apart():
    weights = weights_of()
    assert fingerprint(weights) == fingerprint(dict(reversed(weights.items())))
    assert 0 < fingerprint(weights) < 2**64
    changed = {name: value.copy() for name, value in weights.items()}
    changed["actor.head.bias"][0] += 1e-6
    assert fingerprint(changed) != fingerprint(weights)


def test_the_value_head_is_rescaled_only_when_statistics_move():
    weights = {"critic.head.weight": np.array([[2.0]], np.float32), "critic.head.bias": np.array([1.0], np.float32)}
    assert rescaled_value_head(weights, (0.0, 1.0), (0.0, 1.0)) == {}
    # 2 h + 1 in units of (0, 1) is (2 h + 1 - 5) / 4 = 0.5 h - 1 in units of (5, 4).
    moved = rescaled_value_head(weights, (0.0, 1.0), (5.0, 4.0))
    np.testing.assert_allclose(moved["critic.head.weight"], [[0.5]])
    np.testing.assert_allclose(moved["critic.head.bias"], [-1.0])


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("actor.0.weight", np.nan, "not finite"),
        ("critic.head.bias", np.inf, "not finite"),
        ("observation_normalizer.var", -1.0, "negative"),
        ("policy_version", -1, "negative"),
    ],
)
def test_weights_that_no_policy_could_act_with_are_neither_saved_nor_read(tmp_path, name, value, words):
    weights = weights_of()
    weights[name] = weights[name].copy()
    weights[name].flat[0] = value
    with pytest.raises(BadNumberError, match=f"{name} is {words}"):
        save_policy(tmp_path / "x", SPEC, weights)
    assert list(tmp_path.iterdir()) == []
    write_tensor_file(tmp_path / "x", weights, kind="policy", version=1, header={"spec": SPEC.to_dict()})
    with pytest.raises(CorruptFileError, match=f"{name} is {words}"):
        read_policy(tmp_path / "x")


def test_integer_weights_are_refused(tmp_path):
    weights = {**weights_of(), "log_std": np.zeros(1, np.int32)}
    write_tensor_file(tmp_path / "x", weights, kind="policy", version=1, header={"spec": SPEC.to_dict()})
    with pytest.raises(CorruptFileError, match="log_std is of int32, not of float32 or float64"):
        read_policy(tmp_path / "x")


@pytest.mark.parametrize(
    "section, change",
    [
        ("config", {"hidden_sizes": [10**9, 10**9]}),
        ("config", {"hidden_sizes": [4] * 2_000}),
        ("observation_space", {"kind": "Box", "shape": [10**10], "dtype": "float32", "low": 0, "high": 1}),
        ("action_space", {"kind": "MultiBinary", "n": 10**12}),
        ("action_space", {"kind": "Discrete", "n": 10**15, "start": 0}),
    ],
)
def test_a_spec_that_asks_for_too_much_allocates_nothing(tmp_path, section, change):
    spec = SPEC.to_dict()
    spec[section] = {**spec[section], **change} if section == "config" else change
    write_tensor_file(tmp_path / "x", weights_of(), kind="policy", version=1, header={"spec": spec})
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFileError, match="x is not a valid policy file"):
            read_policy(tmp_path / "x")
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()
