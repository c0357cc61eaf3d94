"""Teams in worker processes: the same bits in every layout, also when a worker dies on the way."""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any

import cloudpickle
import numpy as np
import pytest

from doubles.dying import end
from doubles.stepping import assert_equal_steps, frozen, random_actions, run

pytest.importorskip("pettingzoo")
from inchworm.config.sections import EnvConfig
from inchworm.core.errors import WorkerError, WorkerRestartWarning
from inchworm.env.source import InProcessVectorEnv, WorkerVectorEnv, make_vector_env
from inchworm.env.trial import rehearse_resume
from inchworm.env.workers.auto import choose_num_workers, step_seconds
from inchworm.worlds.team_toys import DEATHS, JOINS, Comings

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test module

PLANS = {"deaths": DEATHS, "joins": JOINS}
COPIES = 3


def make(plan: str, **kwargs: Any) -> Any:
    return functools.partial(Comings, PLANS[plan], masks="info", **kwargs)


@functools.cache
def undisturbed(plan: str, steps: int = 14, *, global_state: bool = True) -> list[Any]:
    with InProcessVectorEnv(make(plan), COPIES, seed=3, global_state=global_state) as env:
        return run(env, steps)


@pytest.mark.parametrize(("workers", "helped"), [(1, False), (2, False), (1, True), (2, True)])
def test_every_layout_has_the_same_bits(workers: int, helped: bool):
    for plan in PLANS:
        with WorkerVectorEnv(make(plan), COPIES, workers, help_workers=helped, seed=3, global_state=True) as env:
            assert (env.num_lanes, env.num_envs, env.lanes_per_copy) == (9, 3, 3)
            assert env.global_state_space is not None
            assert_equal_steps(run(env, 14), undisturbed(plan))


def test_without_a_global_state_too():
    with WorkerVectorEnv(make("deaths"), COPIES, 2, seed=3) as env:
        assert env.global_state_space is None
        assert_equal_steps(run(env, 14), undisturbed("deaths", global_state=False))


@pytest.mark.parametrize("moment", ["idle", "sent", "reset", "options"])
def test_a_worker_that_dies_changes_nothing(moment: str):
    """It is killed at every kind of moment, with agents dead, just gone and just joined in its copies."""
    for plan, at in (("deaths", 3), ("joins", 2), ("joins", 7)):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with WorkerVectorEnv(make(plan), COPIES, 2, seed=3, global_state=True) as env:
                rng = np.random.default_rng(0)
                taken = [frozen(env.reset())]
                for number in range(14):
                    actions = random_actions(env, taken[-1], rng)
                    if number == at and moment == "idle":
                        end(env, 1)
                    if number == at and moment == "options":
                        end(env, 1)
                        env.set_reset_options(None)
                    if number == at and moment == "reset":
                        end(env, 1)
                        again = frozen(env.reset(indices=()))
                        assert again.valid.tolist() == taken[-1].valid.tolist()
                        assert again.episode_starts.tolist() == taken[-1].episode_starts.tolist()
                    env.send(actions)
                    if number == at and moment == "sent":
                        end(env, 0)
                    taken.append(frozen(env.recv()))
                assert_equal_steps(taken, undisturbed(plan))
        told = [str(warning.message) for warning in seen if issubclass(warning.category, WorkerRestartWarning)]
        assert len(told) == 1
        assert "(lanes 0 to 2)" in told[0] if moment == "sent" else "(lanes 3 to 8)" in told[0]


def test_a_worker_that_comes_back_as_somebody_else_is_noticed(tmp_path):
    made = str(tmp_path / "made")

    class Fickle(Comings):
        """Another team in every process, which sees the same: only who lives gives it away."""

        def __init__(self):
            import os

            super().__init__(JOINS if os.path.exists(made) else DEATHS)
            with open(made, "w"):
                pass

        def _observations(self, agents):
            return {agent: np.zeros(3, np.float32) for agent in agents}

        def step(self, actions):
            observations, rewards, *rest = super().step(dict.fromkeys(self.agents, 0))
            return observations, dict.fromkeys(rewards, 0.0), *rest

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with WorkerVectorEnv(Fickle, 1, 1) as env:
            env.reset()
            env.step(np.zeros(3, np.int64))
            end(env, 0)
            with pytest.raises(WorkerError, match="cannot rebuild lane 0"):
                env.set_reset_options(None)


def test_what_an_environment_does_wrong_in_a_worker_names_its_lanes():
    class Wrong(Comings):
        def step(self, actions):
            result = super().step(actions)
            result[1]["agent_1"] = float("nan")
            return result

    with WorkerVectorEnv(lambda: Wrong(DEATHS), 2, 2) as env:
        env.reset()
        with pytest.raises(WorkerError, match=r"agent 'agent_1' \(lane [14]\), step 1 of the episode with seed .*reward is nan"):
            env.step(np.zeros(6, np.int64))


@pytest.mark.parametrize("global_state", [False, True])
def test_a_state_goes_from_one_layout_to_another(global_state: bool):
    options: dict[str, Any] = {"seed": 3, "global_state": global_state}
    with InProcessVectorEnv(make("joins"), COPIES, **options) as env:
        run(env, 8)
        state = env.state_dict()
        rng = np.random.default_rng(5)
        now = env.reset(indices=())
        actions = []
        expected = []
        for _ in range(6):
            actions.append(random_actions(env, now, rng))
            now = env.step(actions[-1])
            expected.append(frozen(now))
    with WorkerVectorEnv(make("joins"), COPIES, 2, help_workers=True, **options) as other:
        other.load_state_dict(state)
        assert other.exact
        other.reset(indices=())
        assert_equal_steps([frozen(other.step(action)) for action in actions], expected)


def test_the_choice_of_workers_looks_at_a_team_as_at_anything():
    assert 0 < step_seconds(make("joins")) < 0.1
    given = choose_num_workers(EnvConfig(num_envs=1), Comings())
    assert (given.num_workers, given.reason) == (0, "no worker processes: an environment instance stays in this process")


def test_a_team_is_rehearsed_like_anything():
    class Whim(Comings):
        drawn = np.random.default_rng(0)

        def state(self):
            return super().state() + self.drawn.random()

    class Late(Comings):
        """One that is a function of seed and actions but for who is there in later episodes."""

        resets = 0

        def reset(self, seed=None, options=None):
            self.resets += 1
            self.plan = [list(stays) for stays in (JOINS if self.resets > 3 else DEATHS)]
            return super().reset(seed, options)

    for kind, shared, flawed in ((Comings, True, False), (Comings, False, False), (Whim, True, True), (Late, False, True)):
        why = rehearse_resume(lambda kind=kind, shared=shared: make_vector_env(kind, 1, 0, global_state=shared), "it")
        assert (why is not None) == flawed, (kind, why)
