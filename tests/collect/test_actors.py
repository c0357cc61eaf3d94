"""A random actor draws legal actions uniformly; names make actors."""

import numpy as np
import pytest
from gymnasium import spaces

from doubles.teams import Teams
from inchworm.collect.actors import RandomActor, make_actor
from inchworm.config.sections import read_opponent
from inchworm.core.errors import ConfigError
from inchworm.core.protocols import Actor


def test_choices_are_uniform_over_what_the_mask_allows():
    actor, lanes = RandomActor(spaces.Discrete(4, start=10)), 8000
    assert isinstance(actor, Actor)
    assert actor.initial_state(3) == ()
    mask = np.tile([1, 0, 1, 1], (lanes, 1))
    step = actor.act({"action_mask": mask}, (), np.zeros(lanes, bool), np.random.default_rng(0))
    counts = np.bincount(step.env_actions - 10, minlength=4)
    # a third of 8000 is 2667; the standard deviation is sqrt(8000 * 1/3 * 2/3) = 42
    assert counts[1] == 0
    assert np.abs(counts[[0, 2, 3]] - 2667).max() < 5 * 42
    assert np.allclose(step.log_probs, -np.log(3))
    assert step.log_probs.dtype == np.float32
    assert step.env_actions.dtype == np.int64


def test_numbers_are_uniform_within_bounds_and_normal_without():
    space = spaces.Dict(
        {"a": spaces.Box(np.array([-2.0, -np.inf]), np.array([4.0, np.inf]), (2,), np.float64), "b": spaces.MultiDiscrete([2, 3])}
    )
    step = RandomActor(space).act({}, (), np.zeros(9000, bool), np.random.default_rng(1))
    bounded, free = step.env_actions["a"].T
    assert -2 <= bounded.min() < -1.9
    assert 3.9 < bounded.max() <= 4
    assert abs(bounded.mean() - 1) < 0.1
    assert abs(free.mean()) < 0.05
    assert abs(free.std() - 1) < 0.05
    assert step.env_actions["b"].max(axis=0).tolist() == [1, 2]
    assert step.env_actions["a"].dtype == np.float64
    # density 1/6, a normal's, and 1/2 x 1/3
    expected = -np.log(6) - 0.5 * free**2 - 0.5 * np.log(2 * np.pi) - np.log(6)
    assert np.allclose(step.log_probs, expected, atol=1e-4)


def test_actors_by_name():
    assert isinstance(make_actor("random", Teams.action_space, "Any-v0"), RandomActor)
    assert read_opponent("heuristic:0.25") == ("heuristic", 0.25)
    assert read_opponent("heuristic") == ("heuristic", 1.0)
    for name, words in (("unknown", "unknown opponent"), ("heuristic", "Any-v0 has no heuristic")):
        with pytest.raises(ConfigError, match=words):
            make_actor(name, Teams.action_space, "Any-v0")
    for text in ("2", "x", "nan", "-0.1", ""):
        with pytest.raises(ConfigError, match="the skill must be from 0 to 1"):
            read_opponent(f"heuristic:{text}")
