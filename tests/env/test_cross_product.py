"""Every kind of observation with every kind of action and every source of masks, in-process and in workers."""

import functools

import numpy as np
import pytest
from gymnasium import spaces

from doubles.stepping import assert_equal_steps, assert_equal_trees, frozen, random_actions, run
from doubles.toys import SpacesEnv
from inchworm.core.spaces import MASK_KEY
from inchworm.env.source import make_vector_env

OBSERVATIONS = {
    "box": spaces.Box(-1, 1, (3,), np.float32),
    "box64": spaces.Box(-np.inf, np.inf, (2, 2), np.float64),
    "scalar": spaces.Box(-1, 1, (), np.float32),
    "image": spaces.Box(0, 255, (4, 4, 3), np.uint8),
    "discrete": spaces.Discrete(4, start=-1),
    "multidiscrete": spaces.MultiDiscrete([3, 2]),
    "multibinary": spaces.MultiBinary((2, 2)),
    "dict": spaces.Dict(image=spaces.Box(0, 255, (4, 4), np.uint8), inner=spaces.Dict(goal=spaces.Discrete(3))),
    "tuple": spaces.Tuple([spaces.Box(-1, 1, (2,), np.float32), spaces.MultiBinary(2)]),
}
ACTIONS = {
    "discrete": spaces.Discrete(3),
    "started": spaces.Discrete(3, start=5),
    "multidiscrete": spaces.MultiDiscrete([3, 2]),
    "multibinary": spaces.MultiBinary(3),
    "box": spaces.Box(-2, 2, (2,), np.float32),
    "box64": spaces.Box(-2, 2, (1, 2), np.float64),
    "dict": spaces.Dict(go=spaces.Discrete(2, start=1), turn=spaces.Box(-1, 1, (1,), np.float32)),
    "tuple": spaces.Tuple([spaces.MultiDiscrete([2, 3]), spaces.Box(-1, 1, (), np.float32), spaces.Dict(b=spaces.MultiBinary(2))]),
}
MASKS = [None, "key", "info", "action_masks", "get_action_mask"]
CASES = [(o, a, m) for o in OBSERVATIONS for a in ACTIONS for m in MASKS if m is None or not a.startswith("box")]


def factory(observation, action, mask, length=3):
    return functools.partial(SpacesEnv, OBSERVATIONS[observation], ACTIONS[action], length, mask)


@pytest.mark.parametrize(("observation", "action", "mask"), CASES)
def test_in_process(observation, action, mask):
    """Legal actions reach the env as its own (it raises otherwise), and replay leads back to the same place."""
    make = factory(observation, action, mask)
    env = make_vector_env(make, 2, seed=1)
    taken = run(env, 7)
    assert (MASK_KEY in taken[0].observations if isinstance(taken[0].observations, dict) else False) == (mask is not None)
    assert sum(len(step.ended) for step in taken) == 4  # 2 lanes, 2 ends in 7 steps of episodes of 3
    assert taken[-1].rewards.tolist() == [1, 1]
    for step in taken:
        for ended in step.ended:
            assert env.observation_space.contains(_as_element(env.observation_space, ended.final_observation))
    other = make_vector_env(make, 2, seed=1)
    other.load_state_dict(env.state_dict())
    assert_equal_trees(other.reset(indices=()).observations, taken[-1].observations)
    actions = random_actions(env, taken[-1], np.random.default_rng(5))
    assert_equal_steps([frozen(env.step(actions))], [frozen(other.step(actions))])


def _as_element(space, tree):
    if isinstance(space, spaces.Dict):
        return {key: _as_element(inner, tree[key]) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_as_element(inner, part) for inner, part in zip(space.spaces, tree))
    return np.int64(tree) if isinstance(space, spaces.Discrete) else np.asarray(tree)


EVERYTHING_SEEN = spaces.Dict({name: space for name, space in OBSERVATIONS.items() if name != "dict"} | {"nested": OBSERVATIONS["dict"]})
EVERYTHING_DONE = spaces.Dict({name: space for name, space in ACTIONS.items() if name != "dict"} | {"nested": ACTIONS["dict"]})


@pytest.mark.parametrize("mask", MASKS)
def test_in_two_workers_with_every_kind_at_once(mask):
    make = functools.partial(SpacesEnv, EVERYTHING_SEEN, EVERYTHING_DONE, 3, mask)
    with make_vector_env(make, 3, 2, seed=1) as workers, make_vector_env(make, 3, seed=1) as here:
        assert workers.observation_space == here.observation_space
        assert workers.action_space == here.action_space
        taken = run(workers, 7)
        assert_equal_steps(taken, run(here, 7))
        state = here.state_dict()
        assert workers.state_dict()["copies"] == state["copies"]
        workers.load_state_dict(state)
        assert_equal_trees(workers.reset(indices=()).observations, taken[-1].observations)


@pytest.mark.parametrize(
    ("observation", "action", "mask"), [("box", "started", "info"), ("image", "box", None), ("tuple", "tuple", "action_masks")]
)
def test_in_two_workers_one_kind_at_a_time(observation, action, mask):
    make = factory(observation, action, mask)
    with make_vector_env(make, 2, 2, seed=1) as workers:
        assert_equal_steps(run(workers, 7), run(make_vector_env(make, 2, seed=1), 7))
