"""Memory as data: names, shapes, first weights, and what is refused."""

import numpy as np
import pytest
from gymnasium import spaces

from inchworm.backends.numpy.learner import NumpyOptimizer
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.config.sections import PolicyConfig, PPOConfig
from inchworm.core.errors import ConfigError, InchwormError, SpaceError
from inchworm.policy.layout import MemoryLayout
from inchworm.policy.spec import PolicySpec

SEEN, ACTED = spaces.Box(-1, 1, (3,)), spaces.Discrete(2)


def spec(kind="lstm", **options):
    return PolicySpec(SEEN, ACTED, PolicyConfig(**{"kind": kind, "hidden_sizes": (6,), "memory_size": 4, **options}))


def test_after_the_hidden_layers_actor_and_critic_are_heads_on_the_memory():
    # LSTM: 4 gates x 4 = 16 rows; the first layer reads the trunk's 6 numbers, the second the first's 4
    assert spec(memory_layers=2).layers == {
        "trunk.0.weight": (6, 3), "trunk.0.bias": (6,),
        "memory.0.input.weight": (16, 6), "memory.0.input.bias": (16,), "memory.0.state.weight": (16, 4), "memory.0.state.bias": (16,),
        "memory.1.input.weight": (16, 4), "memory.1.input.bias": (16,), "memory.1.state.weight": (16, 4), "memory.1.state.bias": (16,),
        "actor.head.weight": (2, 4), "actor.head.bias": (2,), "critic.head.weight": (1, 4), "critic.head.bias": (1,),
    }  # fmt: skip


def test_before_the_hidden_layers_each_has_its_own():
    # GRU: 3 gates x 4 = 12 rows
    assert spec("gru", memory_place="before").layers == {
        "memory.0.input.weight": (12, 3), "memory.0.input.bias": (12,), "memory.0.state.weight": (12, 4), "memory.0.state.bias": (12,),
        "actor.0.weight": (6, 4), "actor.0.bias": (6,), "actor.head.weight": (2, 6), "actor.head.bias": (2,),
        "critic.0.weight": (6, 4), "critic.0.bias": (6,), "critic.head.weight": (1, 6), "critic.head.bias": (1,),
    }  # fmt: skip


def test_without_hidden_layers_the_memory_reads_the_observation():
    assert spec(hidden_sizes=()).memory == MemoryLayout("lstm", 3, 4, 1)
    assert spec("mlp").memory is None


@pytest.mark.parametrize(("kind", "gates"), [("lstm", 4), ("gru", 3)])
def test_each_gate_begins_orthogonal_and_an_lstm_with_open_forget_gates(kind, gates):
    weights = NumpyPolicy(spec(kind, memory_layers=2), seed=3).get_weights()
    for layer in range(2):
        for part in ("input", "state"):
            for gate in np.split(weights[f"memory.{layer}.{part}.weight"], gates):  # [4, reads]
                np.testing.assert_allclose(gate @ gate.T, np.eye(4), atol=1e-6)  # gain 1
        bias = weights[f"memory.{layer}.input.bias"]
        np.testing.assert_array_equal(bias, np.repeat([0, 1, 0, 0], 4) if kind == "lstm" else 0)  # input, forget, cell, output
        np.testing.assert_array_equal(weights[f"memory.{layer}.state.bias"], 0)
    halves = np.split(weights["memory.0.state.weight"], gates)
    assert not np.allclose(halves[0], halves[1])


def test_the_bias_of_forget_gates_is_a_setting_and_changes_nothing_else():
    default, chosen = (
        NumpyPolicy(spec("lstm", memory_layers=2, **more), seed=3).get_weights() for more in ({}, {"lstm_forget_bias": -0.5})
    )
    for name, array in chosen.items():
        if name in ("memory.0.input.bias", "memory.1.input.bias"):
            np.testing.assert_array_equal(array, np.repeat([0, -0.5, 0, 0], 4))  # input, forget, cell, output
        else:
            np.testing.assert_array_equal(array, default[name], err_msg=name)


def test_a_policy_described_before_the_bias_was_a_setting_still_loads():
    described = spec("lstm").to_dict()
    del described["config"]["lstm_forget_bias"]
    assert PolicySpec.from_dict(described) == spec("lstm")


def test_other_first_weights_are_uniform_by_fan_in():
    weights = NumpyPolicy(spec(orthogonal_init=False), seed=3).get_weights()
    for name in ("memory.0.state.weight", "memory.0.state.bias"):
        assert 0 < np.abs(weights[name]).max() <= 0.5  # 1 / sqrt(4)


@pytest.mark.parametrize(("kind", "names"), [("lstm", ["cell", "hidden"]), ("gru", ["hidden"])])
def test_the_state_is_the_callers(kind, names):
    policy = NumpyPolicy(spec(kind, memory_layers=2))
    state = policy.initial_state(5)
    assert sorted(state) == names
    assert all(leaf.shape == (5, 2, 4) and leaf.dtype == np.float32 and not leaf.any() for leaf in state.values())
    kept = {name: leaf.copy() for name, leaf in state.items()}
    rows = np.ones((5, 3), np.float32)
    first = policy.act(rows, state, np.zeros(5, bool), np.random.default_rng(0))
    again = policy.act(rows, state, np.zeros(5, bool), np.random.default_rng(0))
    np.testing.assert_equal(state, kept)  # it is read, not written
    np.testing.assert_equal(first.state, again.state)


@pytest.mark.parametrize(
    "state", [(), {"hidden": np.zeros((2, 1, 4))}, {"hidden": np.zeros((3, 1, 4)), "cell": np.zeros((3, 1, 4))}], ids=["none", "gru", "3"]
)
def test_another_state_is_refused(state):
    torch_policy = pytest.importorskip("inchworm.backends.torch.policy").TorchPolicy
    for policy in (NumpyPolicy(spec()), torch_policy(spec())):
        with pytest.raises(InchwormError, match=r"memory \(lstm\).*each \[2, 1, 4\].*policy.initial_state\(2\)"):
            policy.act(np.zeros((2, 3), np.float32), state, np.zeros(2, bool), np.random.default_rng(0))


def test_predict_says_that_it_forgets_and_predict_with_memory_does_not():
    torch_policy = pytest.importorskip("inchworm.backends.torch.policy").TorchPolicy
    numpy_policy = NumpyPolicy(spec(), seed=1)
    for policy in (numpy_policy, torch_policy(spec(), numpy_policy.get_weights())):
        with pytest.warns(UserWarning, match="predict_with_memory"):
            first = policy.predict(np.ones(3, np.float32))
        action, state = policy.predict_with_memory(np.ones(3, np.float32))
        assert action == first
        rows = np.ones((1, 3), np.float32)
        step = policy.act(rows, policy.initial_state(1), np.ones(1, bool), np.random.default_rng(0))
        np.testing.assert_array_equal(state["hidden"], step.state["hidden"])
        _, state = policy.predict_with_memory(np.ones(3, np.float32), state)
        step = policy.act(rows, step.state, np.zeros(1, bool), np.random.default_rng(0))
        np.testing.assert_array_equal(state["hidden"], step.state["hidden"])
    assert NumpyPolicy(spec("mlp")).predict_with_memory(np.ones(3, np.float32))[1] == ()


@pytest.mark.parametrize(
    ("name", "wrong"), [("memory_size", 0), ("memory_layers", 0), ("memory_layers", 101), ("memory_place", "under"), ("kind", "rnn")]
)
def test_a_memory_that_cannot_be_is_refused(name, wrong):
    with pytest.raises(ConfigError, match=f"policy.{name}={wrong!r} "):
        PolicyConfig.from_dict({"kind": "lstm", name: wrong})


def test_numpy_acts_and_does_not_learn():
    with pytest.raises(ConfigError, match=r"policy.kind=lstm.*--backend torch"):
        NumpyOptimizer(NumpyPolicy(spec()))


def test_images_need_torch():
    images = PolicySpec(spaces.Box(0, 255, (36, 36, 3), np.uint8), ACTED, PolicyConfig(kind="gru"))
    with pytest.raises(SpaceError, match=r'policy.kind="gru" on images'):
        NumpyPolicy(images)


@pytest.mark.parametrize(
    ("given", "steps", "expected"), [("auto", 512, 32), ("auto", 20, 20), (1, 512, 1), (48, 512, 48), (512, 512, 512), (48, 20, 20)]
)
def test_sequences_have_1_row_only_where_the_config_asks_for_it(given, steps, expected):
    assert PPOConfig(sequence_length=given).sequence_length_for(steps, memory=True) == expected
    assert PPOConfig(sequence_length="auto").sequence_length_for(steps, memory=False) == 1
