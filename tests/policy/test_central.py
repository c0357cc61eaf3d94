"""The spec of a central critic: its layers, its file, and files from before there was one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from inchworm import NumpyPolicy, PolicyConfig, PolicySpec, load_policy, save_policy
from inchworm.backends.numpy.policy import fresh_weights
from inchworm.core.errors import InchwormError, SpaceError

SEEN, WORLD, ACTIONS = spaces.Box(-1, 1, (3,)), spaces.Box(-1, 1, (5,)), spaces.Discrete(2)


def spec_of(lanes_per_copy: int = 1, **config: object) -> PolicySpec:
    return PolicySpec(SEEN, ACTIONS, PolicyConfig(**{"hidden_sizes": (7,), "central_critic": True, **config}), WORLD, lanes_per_copy)  # type: ignore[arg-type]


def test_the_critic_reads_own_features_place_and_world_and_has_layers_of_its_own() -> None:
    assert spec_of().layers["critic.0.weight"] == (7, 3 + 5)
    assert spec_of(4).layers["critic.0.weight"] == (7, 3 + 4 + 5)
    assert spec_of(4).layers["actor.0.weight"] == (7, 3)
    shared = spec_of(shared_trunk=True).layers
    assert (shared["critic.0.weight"], shared["critic.head.weight"], shared["actor.head.weight"]) == ((7, 7 + 5), (1, 7), (2, 7))
    remembering = spec_of(kind="lstm", memory_size=6).layers
    assert (remembering["critic.0.weight"], remembering["actor.head.weight"]) == ((7, 6 + 5), (2, 6))


def test_the_actor_begins_as_it_would_without() -> None:
    plain = fresh_weights(PolicySpec(SEEN, ACTIONS, PolicyConfig(hidden_sizes=(7,))), 3)
    for name, value in fresh_weights(spec_of(2), 3).items():
        if name.startswith("actor"):
            np.testing.assert_array_equal(value, plain[name])


def test_a_world_that_nobody_reads_is_no_part_of_a_spec() -> None:
    spec = spec_of(4, central_critic=False)
    assert (spec.global_state_space, spec.lanes_per_copy, spec.global_state) == (None, 1, None)
    assert spec == PolicySpec(SEEN, ACTIONS, PolicyConfig(hidden_sizes=(7,)))
    assert "global_state_space" not in spec.to_dict()


def test_the_file_keeps_it(tmp_path: Path) -> None:
    policy = NumpyPolicy(spec_of(4, normalize_observations=True))
    loaded = load_policy(save_policy(tmp_path / "policy.safetensors", policy.spec, policy.get_weights()))
    assert isinstance(loaded, NumpyPolicy)
    assert loaded.spec == policy.spec
    assert loaded.get_weights().keys() == policy.get_weights().keys()
    assert "global_state_normalizer.mean" in loaded.get_weights()
    world = {"world": np.ones((1, 2, 5), np.float32), "place": np.array([[0, 3]])}
    given = (np.ones((1, 2, 3), np.float32), (), np.zeros((1, 2), bool), world, np.array([[True, False]]))
    np.testing.assert_array_equal(loaded.value(*given), policy.value(*given))


def test_files_from_before_load_as_what_they_were() -> None:
    spec = PolicySpec(SEEN, ACTIONS, PolicyConfig(hidden_sizes=(7,)))
    before = spec.to_dict()
    del before["config"]["central_critic"]
    assert PolicySpec.from_dict(before) == spec


@pytest.mark.parametrize("lanes", [0, "two", 1e3, 10**9])
def test_a_file_with_a_strange_number_of_lanes_is_refused(lanes: object) -> None:
    with pytest.raises(SpaceError, match="lanes per copy"):
        PolicySpec.from_dict({**spec_of(2).to_dict(), "lanes_per_copy": lanes})


def test_weights_of_another_kind_of_critic_are_refused() -> None:
    with pytest.raises(InchwormError, match=r"critic.0.weight has shape \(7, 3\); the policy needs \(7, 8\)"):
        NumpyPolicy(spec_of(), fresh_weights(spec_of(central_critic=False), 0))
