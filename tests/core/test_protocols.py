"""Tests of core/protocols.py: a vector env that was written elsewhere gets the optional attributes it lacks."""

from types import SimpleNamespace

import pytest

from inchworm.core.protocols import UNKNOWN_EXACTNESS, VectorEnv, complete_vector_env, reads_global_state


def test_defaults_of_a_vector_env():
    env = complete_vector_env(SimpleNamespace(num_lanes=6))
    assert (env.lanes_per_copy, env.num_envs, env.global_state_space, env.agents_leave) == (1, 6, None, False)
    assert env.inexact == (UNKNOWN_EXACTNESS,)
    teams = complete_vector_env(SimpleNamespace(num_lanes=6, lanes_per_copy=3, inexact=["a clock"]))
    assert (teams.num_envs, teams.agents_leave, teams.inexact) == (2, True, ["a clock"])


@pytest.mark.parametrize(("exact", "known"), [(True, True), (False, False), (1, False)])
def test_exact_alone_is_understood(exact, known):
    env = complete_vector_env(SimpleNamespace(num_lanes=1, exact=exact))
    assert env.inexact == (() if known else (UNKNOWN_EXACTNESS,))


def test_a_class_may_inherit_the_defaults():
    class Mine(VectorEnv):
        num_lanes = num_envs = 2

    assert (Mine().lanes_per_copy, Mine().global_state_space, Mine().agents_leave) == (1, None, False)
    assert Mine().inexact == (UNKNOWN_EXACTNESS,)


def test_a_critic_is_central_if_it_says_so():
    assert reads_global_state(SimpleNamespace(central_critic=True))
    assert not reads_global_state(SimpleNamespace(central_critic=False))
    assert not reads_global_state(object())
