"""Several policies as one: which part acts in which lane, with which memory, and what is refused."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from inchworm import Actor, CompositePolicy, NumpyPolicy, Policy, PolicyConfig, PolicyMap, PolicySpec, Rollout, create_fake_rollout
from inchworm.core.errors import ConfigError, InchwormError
from inchworm.core.types import PolicyStep, Tree

OBSERVATIONS = spaces.Dict({"a": spaces.Box(-1, 1, (3,)), "b": spaces.Discrete(2)})
ACTIONS = spaces.Dict({"turn": spaces.Box(-1, 1, (1,)), "fire": spaces.Discrete(3)})


def mlp(seed: int = 0, **config: Any) -> NumpyPolicy:
    return NumpyPolicy(PolicySpec(OBSERVATIONS, ACTIONS, PolicyConfig(hidden_sizes=(4,), **config)), seed=seed)


class Counter:
    """An actor whose memory counts the steps of its lane's episode, and whose action contains its mark and what it remembers."""

    def __init__(self, mark: float) -> None:
        self.mark = mark

    def initial_state(self, num_lanes: int) -> Tree:
        return {"steps": np.zeros((num_lanes, 1))}

    def act(self, observations: Tree, state: Tree, episode_starts: Any, rng: Any, *, deterministic: bool = False) -> PolicyStep:
        steps = np.where(episode_starts[:, None], 0.0, state["steps"]) + 1
        actions = {"turn": np.full((len(steps), 1), self.mark, np.float32), "fire": steps[:, 0].astype(np.int64)}
        return PolicyStep(actions, actions, np.full(len(steps), -self.mark, np.float32), {"steps": steps})


def seen(num_lanes: int, seed: int = 0) -> Tree:
    rng = np.random.default_rng(seed)
    return {"a": rng.uniform(-1, 1, (num_lanes, 3)).astype(np.float32), "b": rng.integers(0, 2, num_lanes)}


def test_each_lane_is_played_by_the_part_that_the_map_names() -> None:
    policy = CompositePolicy({"x": Counter(1.0), "y": Counter(2.0)}, ["y", "x", "y"])
    state, starts = policy.initial_state(6), np.zeros(6, bool)
    step = policy.act(seen(6), state, starts, np.random.default_rng(0))
    assert step.actions["turn"][:, 0].tolist() == [2, 1, 2, 2, 1, 2]  # the map of one copy, for two copies
    assert step.log_probs.tolist() == [-2, -1, -2, -2, -1, -2]
    assert policy.lanes_of("x", 6).tolist() == [1, 4]
    assert policy.lanes_of("y", 6).tolist() == [0, 2, 3, 5]


def test_memory_is_full_width_moves_in_own_lanes_only_and_is_forgotten_at_starts() -> None:
    policy = CompositePolicy({"x": Counter(1.0), "y": Counter(2.0), "z": mlp()}, ["y", "x", "z"])
    state = policy.initial_state(6)
    assert {name: tree["steps"].shape for name, tree in state.items()} == {"x": (6, 1), "y": (6, 1)}  # z has none
    starts = np.zeros(6, bool)
    for expected in (1, 2):
        before = {name: tree["steps"].copy() for name, tree in state.items()}
        step = policy.act(seen(6), state, starts, np.random.default_rng(0))
        for name in state:
            np.testing.assert_array_equal(state[name]["steps"], before[name])  # the caller's memory is the caller's
        state = step.state
        assert state["y"]["steps"][:, 0].tolist() == [expected, 0, 0, expected, 0, 0]
        assert state["x"]["steps"][:, 0].tolist() == [0, expected, 0, 0, expected, 0]
    starts[3] = True  # y's lane of the second copy begins anew
    state = policy.act(seen(6), state, starts, np.random.default_rng(0)).state
    assert state["y"]["steps"][:, 0].tolist() == [3, 0, 0, 1, 0, 0]
    assert state["x"]["steps"][:, 0].tolist() == [0, 3, 0, 0, 3, 0]


def test_without_memory_the_state_is_empty() -> None:
    policy = CompositePolicy({"x": mlp(), "y": mlp(1)}, ["x", "y"])
    assert policy.initial_state(4) == ()
    assert policy.act(seen(4), (), np.zeros(4, bool), np.random.default_rng(0)).state == ()


def test_parts_act_as_they_would_alone_on_one_stream() -> None:
    x, y = mlp(0), mlp(1)
    policy, observations, starts = CompositePolicy({"x": x, "y": y}, ["x", "y", "y", "x"]), seen(4), np.zeros(4, bool)
    step = policy.act(observations, (), starts, np.random.default_rng(7))
    rng = np.random.default_rng(7)  # x draws first, for lanes 0 and 3, then y, for 1 and 2
    for part, lanes in ((x, [0, 3]), (y, [1, 2])):
        own = part.act({key: value[lanes] for key, value in observations.items()}, (), starts[lanes], rng)
        for key in ("turn", "fire"):
            np.testing.assert_array_equal(step.actions[key][lanes], own.actions[key])
            np.testing.assert_array_equal(step.env_actions[key][lanes], own.env_actions[key])
        np.testing.assert_array_equal(step.log_probs[lanes], own.log_probs)


def test_values_are_each_critics_own() -> None:
    x, y = mlp(0), mlp(1)
    policy = CompositePolicy({"x": x, "y": y}, ["y", "x"])
    observations = create_fake_rollout(OBSERVATIONS, ACTIONS, 5, 4).observations
    values = policy.value(observations, (), np.zeros((5, 4), bool))
    for part, lanes in ((y, [0, 2]), (x, [1, 3])):
        np.testing.assert_array_equal(values[:, lanes], part.value({key: value[:, lanes] for key, value in observations.items()}))


def test_weights_travel_under_the_parts_names() -> None:
    x, y = mlp(0), mlp(1)
    policy, other = CompositePolicy({"x": x, "y": y}, ["x", "y"]), CompositePolicy({"x": mlp(2), "y": mlp(3)}, ["x", "y"])
    policy.policy_version = 7
    weights = policy.get_weights()
    assert {name.partition("/")[0] for name in weights} == {"x", "y", "policy_version"}
    other.set_weights(weights)
    assert other.policy_version == 7
    np.testing.assert_array_equal(other.get_weights()["y/actor.head.weight"], y.get_weights()["actor.head.weight"])
    with pytest.raises(InchwormError, match=r"unknown \['z/actor"):
        other.set_weights({**weights, "z/actor": np.zeros(1)})
    with pytest.raises(InchwormError, match="unknown version"):
        other.set_weights({name: value for name, value in weights.items() if name != "policy_version"})
    with pytest.raises(InchwormError, match="missing"):
        other.set_weights({name: value for name, value in weights.items() if name != "x/critic.head.bias"})


def test_a_part_may_be_a_mere_actor() -> None:
    policy = CompositePolicy({"x": mlp(), "bot": Counter(1.0)}, ["x", "bot"])
    assert policy.trainable == ("x",)
    assert all(name.startswith(("x/", "policy_version")) for name in policy.get_weights())
    assert isinstance(policy, Policy)
    assert isinstance(policy, Actor)
    with pytest.raises(ConfigError, match="the part bot is a Counter, an actor without a critic"):
        policy.value(create_fake_rollout(OBSERVATIONS, ACTIONS, 2, 2).observations, policy.initial_state(2), np.zeros((2, 2), bool))


def with_memory(rollout: Rollout) -> Rollout:
    """A rollout whose memory identifies part and lane: x at 100 + lane, y at 200 + lane."""
    lanes = np.arange(rollout.num_lanes, dtype=float)
    state = {name: np.tile(base + lanes, (rollout.num_steps, 1)) for name, base in (("x", 100), ("y", 200))}
    cut = {name: base + rollout.cut_rows[:, 1].astype(float) for name, base in (("x", 100), ("y", 200))}
    return Rollout.from_dict({**rollout.to_dict(), "policy_state": state, "cut_state": cut})


def test_a_parts_rollout_has_its_lanes_and_its_memory() -> None:
    policy = CompositePolicy({"x": Counter(1.0), "y": Counter(2.0), "z": mlp()}, ["y", "x", "z"])
    rollout = with_memory(create_fake_rollout(OBSERVATIONS, ACTIONS, 4, 6))
    own = policy.part_of(rollout, "x")
    assert own.policy_state.tolist() == [[101, 104]] * 4
    assert own.cut_state.tolist() == [101 if lane == 0 else 104 for lane in own.cut_rows[:, 1]]
    np.testing.assert_array_equal(own.rewards, rollout.rewards[:, [1, 4]])
    assert policy.part_of(rollout, "z").policy_state == ()


def test_statistics_see_own_lanes_only() -> None:
    x, y = mlp(0, normalize_observations=True), mlp(1, normalize_observations=True)
    policy = CompositePolicy({"x": x, "y": y}, ["x", "y"], trainable=["x"])
    rollout = create_fake_rollout(OBSERVATIONS, ACTIONS, 8, 4)
    policy.update_statistics(rollout, rollout.rewards)
    assert x.statistics.observations is not None
    assert y.statistics.observations is not None
    assert (x.statistics.observations.count, y.statistics.observations.count) == (16, 0)  # 8 steps of lanes 0 and 2
    np.testing.assert_allclose(x.statistics.observations.mean[:3], rollout.observations["a"][:, [0, 2]].mean((0, 1)), rtol=1e-5)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda p: CompositePolicy(p, ["x", "y", "w"]), "lane_map names 'w', but the policies are x, y"),
        (lambda p: CompositePolicy(p, ["x"]), "the policy y has no lane in lane_map, which names x; leave it out"),
        (lambda p: CompositePolicy(p, "xy"), "need names and a lane map"),
        (lambda p: CompositePolicy({}, ["x"]), "need names and a lane map"),
        (lambda p: CompositePolicy({"a/b": p["x"]}, ["a/b"]), "'a/b' cannot name a policy; use letters"),
        (lambda p: CompositePolicy({"loss": p["x"]}, ["loss"]), "'loss' cannot name a policy"),
        (lambda p: CompositePolicy(p, ["x", "y"], trainable=["w"]), "trainable names 'w', but there are x, y"),
        (lambda p: CompositePolicy({**p, "y": Counter(1)}, ["x", "y"], trainable=["y"]), "'y', but it is a Counter, which cannot learn"),
        (
            lambda p: CompositePolicy(p, ["x", "y"], trainable="x", ppo={"y": {}}),
            "ppo names 'y', but it does not learn; those that learn: x",
        ),
        (lambda p: CompositePolicy(p, ["x", "y"], ppo={"x": {"rollout_steps": 3}}), "ppo.rollout_steps belongs to the rollout"),
        (lambda p: CompositePolicy(p, ["x", "y"]).check_lanes(5), r"lane_map names 2 lane\(s\), but the environment has 5; name 5, or"),
        (lambda p: CompositePolicy(p, ["x", "y"]).check_lanes(8, 4), "but the environment has 8; name the 4 of one copy or all 8"),
        (
            lambda p: CompositePolicy(p, ["x", "y"]).initial_state(1) or CompositePolicy(p, ["x", "y"]).lanes_of("x", 3),
            "the environment has 3",
        ),
        (lambda p: CompositePolicy(p, ["x", "y"]).evaluate(None), "is learned part by part"),  # type: ignore[arg-type]
        (lambda p: PolicyMap(policies=p, lane_map=["x", "w"]), "lane_map names 'w'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(build: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        build({"x": mlp(), "y": mlp(1)})
    assert "\n" not in str(caught.value)
