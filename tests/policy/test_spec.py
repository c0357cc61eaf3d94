"""An architecture as data: shapes, initial weights and the way to a file and back."""

import json
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from inchworm import load_policy, save_policy
from inchworm.backends.numpy.policy import NumpyPolicy, fresh_weights
from inchworm.config.sections import PolicyConfig
from inchworm.core.errors import InchwormError, SpaceError
from inchworm.core.seeding import make_stream
from inchworm.policy.layout import channels_first
from inchworm.policy.spec import PolicySpec, initial_weights

BOX = spaces.Box(-1, 1, (3,))


def spec_of(observation_space=BOX, action_space=None, **options):
    return PolicySpec(observation_space, action_space or spaces.Discrete(4), PolicyConfig(**options))


def test_shapes_of_separate_trunks():
    # 3 inputs, hidden 8 and 5, 4 logits; the critic has its own.
    assert spec_of(hidden_sizes=(8, 5)).layers == {
        "actor.0.weight": (8, 3), "actor.0.bias": (8,), "actor.1.weight": (5, 8), "actor.1.bias": (5,),
        "actor.head.weight": (4, 5), "actor.head.bias": (4,),
        "critic.0.weight": (8, 3), "critic.0.bias": (8,), "critic.1.weight": (5, 8), "critic.1.bias": (5,),
        "critic.head.weight": (1, 5), "critic.head.bias": (1,),
    }  # fmt: skip


def test_shapes_of_a_shared_trunk_and_of_gaussian_actions():
    # 2 choices and 3 Gaussian means make 5 outputs, and 3 log-stds.
    space = spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(-1, 1, (3,))})
    assert spec_of(action_space=space, hidden_sizes=(8,), shared_trunk=True).layers == {
        "trunk.0.weight": (8, 3), "trunk.0.bias": (8,),
        "actor.head.weight": (5, 8), "actor.head.bias": (5,), "critic.head.weight": (1, 8), "critic.head.bias": (1,), "log_std": (3,),
    }  # fmt: skip
    assert spec_of(hidden_sizes=(), shared_trunk=True).layers["actor.head.weight"] == (4, 3)


def test_shapes_of_convolutions():
    # 4x84x84: (84 - 8) / 4 + 1 = 20, (20 - 4) / 2 + 1 = 9, 9 - 3 + 1 = 7: 64 * 7 * 7 = 3136.
    layers = spec_of(spaces.Box(0, 255, (4, 84, 84), np.uint8), kind="cnn").layers
    assert layers["cnn.observation.0.weight"] == (32, 4, 8, 8)
    assert layers["cnn.observation.1.weight"] == (64, 32, 4, 4)
    assert layers["cnn.observation.2.weight"] == (64, 64, 3, 3)
    assert layers["cnn.observation.head.weight"] == (512, 3136)
    assert layers["actor.0.weight"] == (64, 512)
    # 40 wide and 36 high, channels last: (36 - 8) / 4 + 1 = 8 -> 3 -> 1 and (40 - 8) / 4 + 1 = 9 -> 3 -> 1: 64 * 1 * 1
    layers = spec_of(spaces.Box(0, 255, (36, 40, 3), np.uint8), kind="cnn").layers
    assert layers["cnn.observation.0.weight"] == (32, 3, 8, 8)
    assert layers["cnn.observation.head.weight"] == (512, 64)


def test_channels_are_the_smaller_end():
    assert channels_first((4, 84, 84))
    assert not channels_first((96, 96, 3))


def test_an_image_that_is_too_small_is_refused():
    # One value after (3, 1) needs 3, after (4, 2) 2 * 2 + 4 = 8, after (8, 4) 7 * 4 + 8 = 36.
    for side, use in ((35, "[[16, 3, 1], [32, 3, 1]] or policy.kind=mlp"), (3, "[[16, 2, 1]] or policy.kind=mlp")):
        with pytest.raises(SpaceError, match=r"too small for policy.cnn_filters, which need 36x36 or more; use ") as error:
            _ = spec_of(spaces.Box(0, 255, (side, side + 1, 2), np.uint8), kind="cnn").layers
        assert str(error.value).endswith(use)
    assert spec_of(spaces.Box(0, 1, (3, 3, 2)), kind="cnn", cnn_filters=((16, 2, 1),)).layers["cnn.observation.head.weight"] == (512, 64)
    with pytest.raises(SpaceError, match=r"; use policy.kind=mlp$"):
        _ = spec_of(spaces.Box(0, 1, (1, 1, 1)), kind="cnn").layers


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_with_memory_only_images_that_are_large_enough_are_convolved(kind):
    board, picture = spaces.Box(0, 1, (7, 7, 3), np.int8), spaces.Box(0, 255, (36, 36, 1), np.uint8)
    assert spec_of(board, kind=kind).layers["trunk.0.weight"] == (64, 147)
    layers = spec_of(spaces.Dict({"board": board, "picture": picture}), kind=kind).layers
    assert [name for name in layers if name.startswith("cnn.") and name.endswith("head.weight")] == ["cnn.picture.head.weight"]
    assert layers["trunk.0.weight"] == (64, 147 + 512)
    assert "cnn.observation.0.weight" in spec_of(board, kind=kind, cnn_filters=((8, 3, 1),)).layers


def test_cnn_without_an_image_is_refused():
    with pytest.raises(SpaceError, match=r'needs an image.*use "mlp"'):
        _ = spec_of(kind="cnn").layers


def gram(matrix):
    flat = matrix.reshape(len(matrix), -1).astype(np.float64)
    return flat @ flat.T if flat.shape[0] <= flat.shape[1] else flat.T @ flat


@pytest.mark.parametrize("seed", [0, 1])
def test_orthogonal_weights_with_the_usual_gains(seed):
    # Rows (or columns, whichever are fewer) are orthogonal with length gain: W Wᵀ = gain² I.
    spec = spec_of(
        spaces.Box(0, 255, (36, 36, 3), np.uint8), kind="cnn", cnn_filters=((8, 5, 3), (6, 3, 2)), hidden_sizes=(16, 12), cnn_features=20
    )
    weights = initial_weights(spec, make_stream(seed, "weights"))
    for name, value in weights.items():
        if name.endswith("bias"):
            assert (value == 0).all()
            continue
        gain = {"actor.head.weight": 0.01, "critic.head.weight": 1.0}.get(name, np.sqrt(2))
        found = gram(value)
        np.testing.assert_allclose(found, gain**2 * np.eye(len(found)), atol=1e-6 * gain**2 + 1e-9, err_msg=name)
        assert value.dtype == np.float32
        assert value.flags.c_contiguous
    assert weights.keys() == spec.layers.keys()
    assert all(weights[name].shape == shape for name, shape in spec.layers.items())


def test_orthogonal_matrices_are_drawn_evenly():
    # Without the sign correction of the QR the diagonal would be biased; over many draws each entry's mean is 0 within 5 sigma.
    spec = spec_of(hidden_sizes=(3,))
    draws = np.stack([initial_weights(spec, make_stream(seed, "weights"))["actor.0.weight"] for seed in range(300)])
    assert (np.abs(draws.mean(0)) < 5 * np.sqrt(2 / 3) / np.sqrt(300)).all()


def test_uniform_weights_by_fan_in():
    weights = initial_weights(spec_of(spaces.Box(-1, 1, (100,)), orthogonal_init=False, hidden_sizes=(400,)), make_stream(0, "weights"))
    for name, fan_in in (("actor.0.weight", 100), ("actor.0.bias", 100), ("actor.head.weight", 400), ("actor.head.bias", 400)):
        assert np.abs(weights[name]).max() <= 1 / np.sqrt(fan_in)
        assert weights[name].dtype == np.float32
    assert np.abs(weights["actor.0.weight"]).max() > 0.99 / np.sqrt(100)
    assert weights["actor.0.weight"].std() == pytest.approx(1 / np.sqrt(3 * 100), rel=0.02)


def test_log_std_begins_where_the_config_says():
    weights = initial_weights(spec_of(action_space=spaces.Box(-1, 1, (2,)), log_std_init=-0.5), make_stream(0, "weights"))
    np.testing.assert_array_equal(weights["log_std"], [-0.5, -0.5])


@pytest.mark.parametrize(
    "observation_space",
    [
        BOX,
        spaces.Box(-np.inf, np.inf, (2, 3), np.float64),
        spaces.Box(np.array([0, -1], np.float32), np.array([1, np.inf], np.float32)),
        spaces.Box(0, 255, (8, 8, 3), np.uint8),
        spaces.Tuple([spaces.Discrete(3, start=-1), spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 0], [0, 1]])]),
        spaces.Dict({"a": spaces.MultiBinary((2, 2)), "b": spaces.Dict({"c": BOX}), "action_mask": spaces.MultiBinary(4)}),
    ],
    ids=lambda space: type(space).__name__,
)
def test_to_plain_data_and_back(observation_space):
    spec = spec_of(observation_space, hidden_sizes=(3,), log_std_init=-1.0)
    data = json.loads(json.dumps(spec.to_dict()))  # it survives a file
    again = PolicySpec.from_dict(data)
    assert again.observation_space == spec.observation_space
    assert again.action_space == spec.action_space
    assert again.config == spec.config
    assert again.layers == spec.layers


WORLD = spaces.Box(-1, 1, (5,))


def central(lanes_per_copy: int = 1, **config: object) -> PolicySpec:
    return PolicySpec(
        BOX, spaces.Discrete(2), PolicyConfig(**{"hidden_sizes": (7,), "central_critic": True, **config}), WORLD, lanes_per_copy
    )  # type: ignore[arg-type]


def test_the_critic_reads_own_features_place_and_world_and_has_layers_of_its_own():
    assert central().layers["critic.0.weight"] == (7, 3 + 5)
    assert central(4).layers["critic.0.weight"] == (7, 3 + 4 + 5)
    assert central(4).layers["actor.0.weight"] == (7, 3)
    shared = central(shared_trunk=True).layers
    assert (shared["critic.0.weight"], shared["critic.head.weight"], shared["actor.head.weight"]) == ((7, 7 + 5), (1, 7), (2, 7))
    remembering = central(kind="lstm", memory_size=6).layers
    assert (remembering["critic.0.weight"], remembering["actor.head.weight"]) == ((7, 6 + 5), (2, 6))


def test_the_actor_begins_as_it_would_without():
    plain = fresh_weights(PolicySpec(BOX, spaces.Discrete(2), PolicyConfig(hidden_sizes=(7,))), 3)
    for name, value in fresh_weights(central(2), 3).items():
        if name.startswith("actor"):
            np.testing.assert_array_equal(value, plain[name])


def test_a_global_state_that_is_not_read_is_not_part_of_a_spec():
    spec = central(4, central_critic=False)
    assert (spec.global_state_space, spec.lanes_per_copy, spec.global_state) == (None, 1, None)
    assert spec == PolicySpec(BOX, spaces.Discrete(2), PolicyConfig(hidden_sizes=(7,)))
    assert "global_state_space" not in spec.to_dict()


def test_the_file_keeps_it(tmp_path: Path):
    policy = NumpyPolicy(central(4, normalize_observations=True))
    loaded = load_policy(save_policy(tmp_path / "policy.safetensors", policy.spec, policy.get_weights()))
    assert isinstance(loaded, NumpyPolicy)
    assert loaded.spec == policy.spec
    assert loaded.get_weights().keys() == policy.get_weights().keys()
    assert "global_state_normalizer.mean" in loaded.get_weights()
    world = {"world": np.ones((1, 2, 5), np.float32), "place": np.array([[0, 3]])}
    given = (np.ones((1, 2, 3), np.float32), (), np.zeros((1, 2), bool), world, np.array([[True, False]]))
    np.testing.assert_array_equal(loaded.value(*given), policy.value(*given))


def test_files_from_before_load_as_what_they_were():
    spec = PolicySpec(BOX, spaces.Discrete(2), PolicyConfig(hidden_sizes=(7,)))
    before = spec.to_dict()
    del before["config"]["central_critic"]
    assert PolicySpec.from_dict(before) == spec


@pytest.mark.parametrize("lanes", [0, "two", 1e3, 10**9])
def test_a_file_with_a_strange_number_of_lanes_is_refused(lanes: object):
    with pytest.raises(SpaceError, match="lanes per copy"):
        PolicySpec.from_dict({**central(2).to_dict(), "lanes_per_copy": lanes})


def test_weights_of_another_kind_of_critic_are_refused():
    with pytest.raises(InchwormError, match=r"critic.0.weight has shape \(7, 3\); the policy needs \(7, 8\)"):
        NumpyPolicy(central(), fresh_weights(central(central_critic=False), 0))
