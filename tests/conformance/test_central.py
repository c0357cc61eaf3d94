"""A central critic, the same in every backend: what it reads, what it does not, and which agents get credit."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from doubles.learners import telling_weights
from inchworm import Advantages, NumpyPolicy, PolicyConfig, PolicySpec, PPOConfig, Rollout, compute_advantages
from inchworm.backends.numpy.policy import fresh_weights
from inchworm.core.errors import RolloutError
from inchworm.core.types import Minibatch
from inchworm.rollout.sequences import cut_lane_states, lane_states

OBSERVATIONS = spaces.Dict({"seen": spaces.Box(-np.inf, np.inf, (3,)), "action_mask": spaces.MultiBinary(4)})
WORLD = spaces.Dict({"map": spaces.Box(-np.inf, np.inf, (2, 2)), "phase": spaces.Discrete(3)})
ACTIONS = spaces.Discrete(4)
L, N = 5, 4

KINDS: dict[str, dict[str, Any]] = {
    "mlp": {},
    "no hidden layer": {"hidden_sizes": ()},
    "shared trunk": {"shared_trunk": True},
    "lstm after": {"kind": "lstm", "memory_size": 5},
    "gru before": {"kind": "gru", "memory_size": 5, "memory_place": "before", "memory_layers": 2},
    "normalised": {"normalize_observations": True, "normalize_values": True},
}


def spec_of(kind: str) -> PolicySpec:
    return PolicySpec(OBSERVATIONS, ACTIONS, PolicyConfig(**{"hidden_sizes": (6,), **KINDS[kind]}, central_critic=True), WORLD, 3)


def data(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "observations": {"seen": rng.standard_normal((L, N, 3)).astype(np.float32), "action_mask": np.ones((L, N, 4), np.int8)},
        "global_state": {
            "world": {"map": rng.standard_normal((L, N, 2, 2)).astype(np.float32), "phase": rng.integers(0, 3, (L, N))},
            "place": np.tile(np.arange(N) % 3, (L, 1)),
        },
        "valid": rng.random((L, N)) < 0.7,
        "episode_starts": rng.random((L, N)) < 0.2,
    }


def values_of(backend: Any, policy: Any, given: dict[str, Any]) -> np.ndarray:
    state = backend.tree(policy.initial_state(N))
    names = ("observations", "episode_starts", "global_state", "valid")
    observations, starts, world, valid = (backend.tree(given[name]) for name in names)
    return backend.numpy(policy.value(observations, state, starts, world, valid))


def minibatch_of(given: dict[str, Any], state: Any) -> Minibatch:
    numbers = np.zeros((L, N), np.float32)
    empty = dict.fromkeys(("log_probs", "advantages", "returns", "values"), numbers)
    return Minibatch(**given, **empty, actions=np.zeros((L, N), np.int64), policy_state=state)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float64, 1e-10)])
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_the_reference_ones(backend: Any, kind: str, dtype: Any, tolerance: float) -> None:
    spec, given = spec_of(kind), data()
    weights = telling_weights(spec, dtype)
    expected = NumpyPolicy(spec, weights)
    policy = backend.policy(spec, weights)
    reference = expected.value(
        given["observations"], expected.initial_state(N), given["episode_starts"], given["global_state"], given["valid"]
    )
    np.testing.assert_allclose(values_of(backend, policy, given), reference, rtol=0, atol=tolerance)
    evaluation = policy.evaluate(backend.minibatch(minibatch_of(given, policy.initial_state(N))))
    np.testing.assert_allclose(backend.numpy(evaluation.values), reference, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_invalid_rows_are_valued_by_the_world_alone_and_valid_ones_by_both(backend: Any, kind: str) -> None:
    spec, given = spec_of(kind), data()
    policy = backend.policy(spec, telling_weights(spec))
    before = values_of(backend, policy, given)
    other = {**given, "observations": {**given["observations"], "seen": given["observations"]["seen"] + 1}}
    changed = values_of(backend, policy, other) != before
    assert not changed[~given["valid"]].any()
    assert changed[given["valid"]].all()
    world = given["global_state"]["world"]
    elsewhere = {**given, "global_state": {**given["global_state"], "world": {**world, "phase": (world["phase"] + 1) % 3}}}
    assert (values_of(backend, policy, elsewhere) != before).all()
    another = {**given, "global_state": {**given["global_state"], "place": (given["global_state"]["place"] + 1) % 3}}
    assert (values_of(backend, policy, another) != before).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_actor_never_sees_the_world(backend: Any, kind: str) -> None:
    spec, given = spec_of(kind), data()
    policy = backend.policy(spec, telling_weights(spec))
    first = policy.evaluate(backend.minibatch(minibatch_of(given, policy.initial_state(N))))
    given["global_state"]["world"]["map"] += 1
    second = policy.evaluate(backend.minibatch(minibatch_of(given, policy.initial_state(N))))
    np.testing.assert_array_equal(backend.numpy(first.log_probs), backend.numpy(second.log_probs))
    np.testing.assert_array_equal(backend.numpy(first.entropy), backend.numpy(second.entropy))
    assert (backend.numpy(first.values) != backend.numpy(second.values)).all()
    plain = PolicySpec(OBSERVATIONS, ACTIONS, spec.config.replace(central_critic=False))
    actor = [name for name in plain.layers if not name.startswith("critic.")]
    assert {name: spec.layers[name] for name in actor} == {name: plain.layers[name] for name in actor}  # nor has it another network


def test_rows_are_valid_where_nothing_else_is_given(backend: Any) -> None:
    given, policy = data() | {"valid": np.ones((L, N), bool)}, backend.policy(spec_of("mlp"), telling_weights(spec_of("mlp")))
    observations, starts, world = (backend.tree(given[name]) for name in ("observations", "episode_starts", "global_state"))
    np.testing.assert_array_equal(backend.numpy(policy.value(observations, (), starts, world)), values_of(backend, policy, given))


def test_a_missing_global_state_is_reported(backend: Any) -> None:
    given, policy = data(), backend.policy(spec_of("mlp"), telling_weights(spec_of("mlp")))
    with pytest.raises(RolloutError, match=r"central_critic needs a global state, and there is none.*global_state=True"):
        policy.value(backend.tree(given["observations"]), (), backend.array(given["episode_starts"]))
    with pytest.raises(RolloutError, match="there is none"):
        policy.evaluate(backend.minibatch(minibatch_of({**given, "global_state": ()}, ())))


SPACE = spaces.Box(-np.inf, np.inf, (1,))
LINEAR = PolicyConfig(hidden_sizes=())
DISCOUNT = PPOConfig(gamma=0.9, gae_lambda=0.5)


def by_hand(backend: Any, *, central: bool) -> Any:
    """V = 2 seen + 3 world + 0.5, or without the world."""
    spec = PolicySpec(SPACE, spaces.Discrete(2), LINEAR.replace(central_critic=central), SPACE)
    head = np.array([[2.0, 3.0]] if central else [[2.0]])
    weights = {**fresh_weights(spec, 0), "critic.head.weight": head, "critic.head.bias": np.array([0.5])}
    return backend.policy(spec, {name: value.astype(np.float64) if name in spec.layers else value for name, value in weights.items()})


def sacrificed(*, central: bool, truncated: bool = False) -> Rollout:
    """Two lanes of one copy: lane 0 dies in row 0, for -0.1; in row 3 both get 1. The world is at 0, 1, 2, 3, then 7."""
    column = np.zeros((4, 2), np.float32)
    valid = np.array([[True, True], [False, True], [False, True], [False, True]])
    rewards = np.array([[-0.1, 0], [0, 0], [0, 0], [1, 1]], np.float32)
    ended = np.array([[not central, False], [False, False], [False, False], [True, True]])
    if truncated:
        ended[3] = False
    return Rollout.from_dict(
        {
            "observations": np.where(valid, 1, 99)[..., None].astype(np.float32),  # what a dead lane shows is not to be read
            "actions": column.astype(np.int64),
            "log_probs": column,
            "rewards": rewards,
            "terminated": ended,
            "truncated": np.repeat([[False], [False], [False], [truncated]], 2, 1),
            "valid": valid,
            "cut_rows": np.array([[3, 0], [3, 1]], np.int32),
            "cut_observations": np.full((2, 1), 5, np.float32),
            **({"global_state": np.arange(4, dtype=np.float32).reshape(4, 1, 1)} if central else {}),
            **({"cut_global_state": np.full((2, 1), 7, np.float32)} if central else {}),
        }
    )


def advantages_of(backend: Any, **how: bool) -> Advantages:
    return compute_advantages(by_hand(backend, central=how["central"]), sacrificed(**how), DISCOUNT)


def test_a_sacrifice_that_wins_the_game_is_credited(backend: Any) -> None:
    found = advantages_of(backend, central=True)
    # Lane 0 lives in row 0 only: V = 2 + 0.5, then 3 world + 0.5. Lane 1 lives throughout: 2 more in each row.
    np.testing.assert_allclose(found.values, [[2.5, 2.5], [3.5, 5.5], [6.5, 8.5], [9.5, 11.5]], rtol=1e-6)
    np.testing.assert_allclose(found.next_values[:3], found.values[1:], rtol=1e-6)
    # delta = r + 0.9 V' - V: -8.5, 0.9 * 9.5 - 6.5 = 2.05, 0.9 * 6.5 - 3.5 = 2.35, -0.1 + 0.9 * 3.5 - 2.5 = 0.55; then A = delta + 0.45 A'
    np.testing.assert_allclose(found.advantages[:, 0], [1.2480625, 1.55125, -1.775, -8.5], rtol=1e-5)
    assert found.returns[0, 0] == pytest.approx(1.2480625 + 2.5)


def test_without_a_central_critic_credit_stops_at_death(backend: Any) -> None:
    found = advantages_of(backend, central=False)
    assert found.advantages[0, 0] == pytest.approx(-0.1 - 2.5)  # -0.1 and nothing after, less V = 2 + 0.5


def test_where_the_game_is_cut_off_the_world_there_is_valued(backend: Any) -> None:
    found = advantages_of(backend, central=True, truncated=True)
    np.testing.assert_allclose(found.next_values[3], [3 * 7 + 0.5, 2 * 5 + 3 * 7 + 0.5])  # of the dead nothing but the world
    assert found.advantages[3, 0] == pytest.approx(1 + 0.9 * 21.5 - 9.5)
    assert found.advantages[3, 1] == pytest.approx(1 + 0.9 * 31.5 - 11.5, rel=1e-5)


def test_each_lane_has_the_state_of_its_copy() -> None:
    rollout = sacrificed(central=True)
    assert lane_states(rollout)["world"].shape == (4, 2, 1)
    assert lane_states(rollout)["place"].tolist() == [[0, 1]] * 4
    assert cut_lane_states(rollout)["place"].tolist() == [0, 1]
    twice = dataclasses.replace(rollout, global_state=np.stack([np.arange(4.0), 10 + np.arange(4.0)], 1)[..., None])
    assert lane_states(twice)["world"][1, :, 0].tolist() == [1, 11]
    assert lane_states(twice)["place"].tolist() == [[0, 0]] * 4
    assert lane_states(sacrificed(central=False)) == cut_lane_states(sacrificed(central=False)) == ()


def test_a_foreign_critic_is_asked_as_it_always_was() -> None:
    class Foreign:
        def value(self, observations: Any, state: Any, episode_starts: Any) -> np.ndarray:
            return np.zeros(observations.shape[:2])

    from inchworm.backends.numpy.gae import compute_advantages as in_numpy

    assert in_numpy(Foreign(), sacrificed(central=True), DISCOUNT).values.shape == (4, 2)  # type: ignore[arg-type]
