"""Numbers of the environment's infos as columns of a rollout, wherever the environment is stepped."""

import dataclasses
import functools
import sys
import warnings
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from doubles.runs import small_config
from doubles.stepping import assert_equal_rollouts
from inchworm import PPOTrainer, RolloutCollector, combine_rollouts, make_vector_env
from inchworm.collect.async_collector import AsyncCollector
from inchworm.collect.group import CollectorGroup
from inchworm.collect.host import CollectorEnvs, LocalEngine
from inchworm.collect.opponents import OpponentVectorEnv, RandomActor
from inchworm.config.sections import CollectConfig, EnvConfig, RunConfig, TrainingConfig
from inchworm.core.errors import ConfigError, EnvError
from inchworm.core.types import EnvStep
from inchworm.env.source import WorkerVectorEnv
from inchworm.rollout.rollout import Rollout
from inchworm.train.callbacks import BaseCallback
from inchworm.train.resolve import is_native_env
from inchworm.worlds.toys import Comings

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test module

KEPT = ("n", "happy", "third")
STEPS, LANES = 14, 4


class Telling(gym.Env[np.ndarray, int]):
    """Episodes of `length` steps. Its infos: `n` counts the steps, `happy` is a bool, `third` is only in the third step."""

    observation_space, action_space = spaces.Box(-1, 9, (1,), np.float32), spaces.Discrete(2)
    now = 0

    def __init__(self, length: int = 4, **more: Any) -> None:
        self.length, self.more = length, more

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.now = 0
        return np.zeros(1, np.float32), {"n": -100, "happy": True, "third": 7.0}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.now += 1
        info = {"n": self.now, "happy": bool(self.now % 2), "text": "x", "array": np.zeros(2), **self.more}
        if self.now == 3:
            info["third"] = np.float64(0.5)
        return np.full(1, self.now, np.float32), 1.0, self.now == self.length, False, info


def collected(env: Any, steps: int = STEPS, **options: Any) -> Rollout:
    with make_vector_env(env, **options) as made:
        assert made.kept_infos == tuple(options["keep_infos"])
        return RolloutCollector(made, RandomActor(made.action_space)).collect(steps)


LENGTHS = (3, 4, 5, 6)
"""Of the episodes in each lane, where a vector env is given."""


def of_library(kind: Any, mode: AutoresetMode) -> Any:
    return kind([functools.partial(Telling, length) for length in LENGTHS], autoreset_mode=mode)


def of_sb3() -> Any:
    made = [functools.partial(Telling, length) for length in LENGTHS]
    return pytest.importorskip("stable_baselines3.common.vec_env").DummyVecEnv(made)


@pytest.mark.parametrize(
    ("env", "options"),
    [
        (lambda: Telling, {"num_envs": LANES, "num_workers": 0}),
        (lambda: Telling, {"num_envs": LANES, "num_workers": 2}),
        (lambda: of_library(SyncVectorEnv, AutoresetMode.DISABLED), {}),
        (lambda: of_library(SyncVectorEnv, AutoresetMode.SAME_STEP), {}),
        (lambda: of_library(AsyncVectorEnv, AutoresetMode.DISABLED), {}),
        (of_sb3, {}),
    ],
    ids=["in process", "workers", "gymnasium", "gymnasium, same step", "gymnasium, processes", "stable-baselines3"],
)
def test_each_row_has_the_info_of_its_own_step_also_where_an_episode_ends(env: Any, options: Any) -> None:
    extras = collected(env(), keep_infos=KEPT, **options).extras
    assert list(extras) == [f"info/{name}" for name in KEPT]
    assert all(column.dtype == np.float32 for column in extras.values())
    lengths = LENGTHS if not options else [4] * LANES
    counted = np.stack([np.resize(np.arange(length) + 1, STEPS) for length in lengths], 1)  # not the -100 of a reset
    np.testing.assert_array_equal(extras["info/n"], counted)
    np.testing.assert_array_equal(extras["info/happy"], counted % 2)
    np.testing.assert_array_equal(extras["info/third"], np.where(counted == 3, 0.5, np.nan))


def test_a_share_that_is_stepped_in_this_process_keeps_them_too() -> None:
    with make_vector_env(Telling, LANES, 0, keep_infos=KEPT) as plain:
        expected = RolloutCollector(plain, RandomActor(plain.action_space)).collect(STEPS)
    with WorkerVectorEnv(Telling, LANES, 1, help_workers=True, keep_infos=KEPT) as helped:
        assert_equal_rollouts(RolloutCollector(helped, RandomActor(helped.action_space)).collect(STEPS), expected)


def test_nothing_is_kept_unless_it_is_asked_for() -> None:
    with make_vector_env(Telling, LANES, 0) as env:
        assert env.kept_infos == ()
        assert env.reset().infos == ()
        assert env.step(np.zeros(LANES, int)).infos == ()
        assert RolloutCollector(env, RandomActor(env.action_space)).collect(3).extras == ()


def test_a_reset_has_no_infos_of_a_step() -> None:
    with make_vector_env(Telling, LANES, 0, keep_infos=["n"]) as env:
        env.reset()
        assert env.step(np.zeros(LANES, int)).infos["n"].tolist() == [1.0] * LANES
        assert np.isnan(env.reset(indices=[0]).infos["n"]).all()


def test_the_columns_are_saved_combined_and_selected(tmp_path: Path) -> None:
    one, two = (
        collected(Telling, num_envs=2, num_workers=0, keep_infos=KEPT),
        collected(Telling, 9, num_envs=2, num_workers=0, keep_infos=KEPT),
    )
    one.save(tmp_path / "one")
    assert_equal_rollouts(Rollout.load(tmp_path / "one"), one)
    both = combine_rollouts([one, two])
    assert_equal_rollouts(both.select_lanes([0, 1]), one)
    np.testing.assert_array_equal(both.extras["info/n"][:9, 2:], two.extras["info/n"])


@pytest.mark.parametrize("engine", ["local", "async"])
def test_several_collectors_keep_those_of_one(engine: str) -> None:
    envs = CollectorEnvs.of(Telling, LANES, keep_infos=KEPT)
    assert envs.kept_infos == KEPT
    actor = RandomActor(Telling.action_space)
    kinds: dict[str, Any] = {
        "local": lambda: CollectorGroup(envs, actor, LocalEngine(), num_collectors=2),
        "async": lambda: AsyncCollector(envs, actor, num_collectors=2),
    }
    collectors = kinds[engine]()
    try:
        got = collectors.collect(STEPS).extras
    finally:
        collectors.close()
    expected = collected(Telling, num_envs=LANES, num_workers=0, keep_infos=KEPT).extras
    for name, column in expected.items():
        np.testing.assert_array_equal(got[name], column)


# ---- several agents


def test_agents_that_are_not_there_have_none_and_those_that_leave_have_their_last() -> None:
    plan = (((0, 4, "terminated"),), ((0, 2, "truncated"),), ((1, 4, "terminated"),))
    rollout = collected(functools.partial(Comings, plan), 4, num_envs=1, num_workers=0, keep_infos=["steps", "place"])
    steps, place = rollout.extras["info/steps"], rollout.extras["info/place"]
    nan = np.nan
    np.testing.assert_array_equal(steps.T, [[1, 2, 3, 4], [1, 2, nan, nan], [1, 2, 3, 4]])  # the third is shown as it joins in step 1
    np.testing.assert_array_equal(place.T, [[0, 0, 0, 0], [1, 1, nan, nan], [2, 2, 2, 2]])
    assert rollout.valid.T.tolist() == [[True] * 4, [True, True, False, False], [False, True, True, True]]


def test_the_opponents_lanes_are_left_out() -> None:
    plan = (((0, 3, "terminated"),), ((0, 3, "terminated"),))
    with make_vector_env(functools.partial(Comings, plan), 2, 0, keep_infos=["place", "steps"]) as inner:
        env = OpponentVectorEnv(inner, RandomActor(inner.action_space), [1, 3])
        rollout = RolloutCollector(env, RandomActor(env.action_space)).collect(5)
    assert (rollout.extras["info/place"] == 1).all()
    assert rollout.extras["info/steps"].T.tolist() == [[1, 2, 3, 1, 2]] * 2


def test_where_agents_take_turns_it_is_the_info_with_which_the_move_became_known() -> None:
    pytest.importorskip("pettingzoo")
    from doubles.turns import Stones, TakesOne

    class TellingStones(Stones):
        """`left` in an agent's info are the stones on the table when it is its turn, or when the game is over."""

        def step(self, action: int | None) -> None:
            super().step(action)
            self.infos = {agent: {"left": float(self.left)} for agent in self.agents}

    with make_vector_env(functools.partial(TellingStones, 5), 1, 0, keep_infos=["left"]) as env:
        rollout = RolloutCollector(env, TakesOne()).collect(9)
    # 5 stones: player 0 moves at 5, 3, 1 and player 1 at 4, 2. What each finds at its next turn, or at the end:
    left = rollout.extras["info/left"]
    assert left[rollout.valid[:, 0], 0].tolist() == [3, 1, 0, 3]
    assert left[rollout.valid[:, 1], 1].tolist() == [2, 0, 2]


# ---- training


class Recorded(BaseCallback):
    """A callback that keeps the rollouts."""

    def __init__(self) -> None:
        super().__init__()
        self.rollouts: list[Rollout] = []

    def on_rollout(self, state: Any, rollout: Rollout) -> None:
        self.rollouts.append(rollout)


def test_a_run_keeps_them_and_so_does_the_resumed_one(tmp_path: Path) -> None:
    config = small_config(iterations=4)
    config = config.replace(env=config.env.replace(num_envs=2), collect=CollectConfig(keep_infos=["n"]))

    def rollouts(directory: Path, *totals: int) -> list[Rollout]:
        recorded = Recorded()
        for total in totals:
            with PPOTrainer(config.policy, Telling, config, run_dir=directory) as trainer:
                if total != totals[0]:
                    trainer.load_checkpoint()
                trainer.train(total_timesteps=total, callback=recorded)
                trainer.save_checkpoint()
        return recorded.rollouts

    whole, parts = rollouts(tmp_path / "whole", 64), rollouts(tmp_path / "parts", 32, 64)
    assert len(whole) == len(parts) == 4
    for one, other in zip(whole, parts):
        assert_equal_rollouts(one, other)
    assert whole[2].extras["info/n"][:4].T.tolist() == [[1, 2, 3, 4]] * 2
    changed = config.replace(collect=CollectConfig(keep_infos=["n", "happy"]))
    with PPOTrainer(config.policy, Telling, changed, run_dir=tmp_path / "whole") as trainer:  # nothing that was learned depends on it
        trainer.load_checkpoint()
        assert sorted(trainer.collector.collect(3).extras) == ["info/happy", "info/n"]


def test_a_custom_loss_gets_them() -> None:
    seen: list[float] = []

    def loss(policy: Any, minibatch: Any, evaluation: Any) -> Any:
        seen.extend(minibatch.extras["info/n"].reshape(-1).tolist())
        return evaluation.values.mean()

    config = small_config(iterations=1)
    config = config.replace(collect=CollectConfig(keep_infos=["n"]))
    with PPOTrainer(config.policy, Telling, config) as trainer:
        trainer.train(custom_loss_fns=[loss])
    assert sorted(seen) == sorted([1.0, 2.0, 3.0, 4.0] * 4)


def test_an_environment_that_is_stepped_as_one_is_stepped_copy_by_copy_with_the_same_bits() -> None:
    def rollout(**options: Any) -> Rollout:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CartPole's infos are empty
            with make_vector_env("CartPole-v1", 3, 0, seed=4, **options) as env:
                return RolloutCollector(env, RandomActor(env.action_space)).collect(60)

    kept = rollout(keep_infos=["any"])
    assert np.isnan(kept.extras["info/any"]).all()
    assert_equal_rollouts(dataclasses.replace(kept, extras=()), rollout())


# ---- errors


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("bad", np.zeros(2), r"lane 0, step 1 .*: info.bad must be one real number \(an array needs shape \(\)\); got ndarray"),
        ("bad", "text", "info.bad must be one real number .*; got str: 'text'"),
        ("bad", {"a": 1.0}, "info.bad must be one real number .*; got dict"),
    ],
)
def test_what_is_not_one_number_is_refused_by_name(name: str, value: Any, message: str, workers: int) -> None:
    with pytest.raises(EnvError, match=message):
        collected(functools.partial(Telling, **{name: value}), num_envs=1, num_workers=workers, keep_infos=[name])


def test_what_is_not_one_number_is_refused_by_name_in_vector_envs_and_teams() -> None:
    with pytest.raises(EnvError, match=r"lane 0: info.array must be one real number"):
        collected(of_library(SyncVectorEnv, AutoresetMode.DISABLED), keep_infos=["array"])
    env = SyncVectorEnv([functools.partial(Telling, nested={"a": 1.0})] * 2, autoreset_mode=AutoresetMode.DISABLED)
    with pytest.raises(EnvError, match=r"lane 0: info.nested must be an array with a number for each lane; got dict"):
        collected(env, keep_infos=["nested"])
    plan = (((0, 3, "terminated"),), ((0, 3, "terminated"),))
    with pytest.raises(EnvError, match=r"agent 'agent_0' .*: info.action_mask must be one real number"):
        collected(functools.partial(Comings, plan, masks="info"), num_envs=1, num_workers=0, keep_infos=["action_mask"])


@pytest.mark.filterwarnings("ignore:no info of the first")
def test_none_is_a_missing_value() -> None:
    rollout = collected(functools.partial(Telling, none=None), num_envs=1, num_workers=0, keep_infos=["n", "none"])
    assert np.isnan(rollout.extras["info/none"]).all()


def test_a_name_that_no_info_has_is_reported_once() -> None:
    with make_vector_env(Telling, 1, 0, keep_infos=["n", "m", "third"]) as env:
        collector = RolloutCollector(env, RandomActor(env.action_space))
        with pytest.warns(UserWarning, match=r"no info of the first 5 steps has 'm' \(collect.keep_infos\)") as seen:
            collector.collect(5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            collector.collect(5)
    assert len(seen) == 1


class Plain:
    """A vector env written elsewhere."""

    observation_space, action_space, num_lanes, exact = Telling.observation_space, Telling.action_space, 1, True

    def reset(self, seeds: Any = None, indices: Any = None) -> EnvStep:
        raise NotImplementedError

    send = recv = step = set_reset_options = state_dict = load_state_dict = close = reset


def test_environments_that_cannot_keep_them_are_refused() -> None:
    with pytest.raises(EnvError, match=r"does not keep 'n' of its infos; make it by make_vector_env\(…, keep_infos=…\)"):
        make_vector_env(Plain(), keep_infos=["n"])  # type: ignore[arg-type]
    with make_vector_env(Telling, 1, 0, keep_infos=["n"]) as env:
        assert make_vector_env(env, keep_infos=["n"]) is env
        with pytest.raises(EnvError, match="does not keep 'happy'"):
            make_vector_env(env, keep_infos=["n", "happy"])


def test_simulators_on_a_device_and_environments_of_jax_are_refused_by_name() -> None:
    pytest.importorskip("torch")
    from examples.device_env import TensorCartPole

    with pytest.raises(EnvError, match=r"infos of TensorCartPole, a simulator on a device, are not kept; leave collect.keep_infos out"):
        make_vector_env(TensorCartPole(2), keep_infos=["n"])
    pytest.importorskip("gymnax")
    config = TrainingConfig(
        env=EnvConfig(id="gymnax:CartPole-v1"), collect=CollectConfig(keep_infos=["n"]), run=RunConfig(backend="jax", report=False)
    )
    with pytest.raises(
        EnvError, match=r"gymnax:CartPole-v1.*: a JAX-native environment has no infos to keep; leave collect.keep_infos out"
    ):
        PPOTrainer(config.policy, config.env, config)
    native, reason = is_native_env("CartPole-v1", config.replace(env=EnvConfig()))
    assert not native
    assert reason.startswith("stepping CartPole-v1 on the host, because collect.keep_infos is set")


@pytest.mark.parametrize(("names", "message"), [(("a", "a"), "names differ"), (("",), "a name is not empty")])
def test_names_are_checked(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CollectConfig(keep_infos=names)
