"""Tests that the compiled loop is the same training as its parts, in any division into calls."""

from __future__ import annotations

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inchworm.backends.jax import fused as fused_module
from inchworm.backends.jax.native import JaxVectorEnv
from inchworm.config.sections import EnvConfig, EvalConfig, PolicyConfig, PPOConfig, RunConfig, TrainingConfig
from inchworm.core.errors import BadNumberError
from inchworm.train.callbacks import BaseCallback
from inchworm.train.loop import History
from inchworm.train.trainer import PPOTrainer

STEPS, LANES = 12, 3


def config(iterations: int = 6, *, id: str = "CartPole-v1", run: dict | None = None, evaluation: dict | None = None, policy=None, **ppo):
    small = {"rollout_steps": STEPS, "update_epochs": 2, "num_minibatches": 2, "learning_rate": 1e-2, **ppo}
    return TrainingConfig(
        env=EnvConfig(id=id, num_envs=LANES, max_episode_steps=10),
        policy=PolicyConfig(hidden_sizes=(8,), **(policy or {})),
        ppo=PPOConfig(**small),
        evaluation=EvalConfig(**{"interval": 0, "final_episodes": 0, "episodes": 2, "num_envs": 2, **(evaluation or {})}),
        run=RunConfig(backend="jax", seed=5, total_timesteps=iterations * STEPS * LANES, **(run or {})),
    )


def trained(settings: TrainingConfig, *, fused: bool = True, most: int | None = None, monkeypatch=None, **options):
    """A trainer after `train`, and its history; with at most `most` iterations per call."""
    trainer = PPOTrainer("mlp", settings.env, settings, **options)
    if not fused:
        trainer._fused_step = lambda components: None
    if most is not None:
        monkeypatch.setattr(fused_module.FusedTraining, "_next_count", lambda self, count, seconds: most)
    return trainer, trainer.train()


def assert_same_bits(one: PPOTrainer, two: PPOTrainer) -> None:
    """The complete states are equal, array by array and number by number."""
    first, second = jax.tree.flatten(one.full_state()), jax.tree.flatten(two.full_state())
    assert first[1] == second[1]
    for left, right in zip(first[0], second[0]):
        assert np.array_equal(left, right)


# Between them every option of the loop; each compiles a loop and its parts, so three cases have to do.
VARIANTS = {
    "target_kl": {"target_kl": 1e-4, "learning_rate_schedule": "adaptive"},
    "normalisers": {"policy": {"normalize_observations": True, "normalize_values": True}, "scale_rewards": True},
    "linear, minibatch": {
        "learning_rate_schedule": "linear",
        "clip_schedule": "linear",
        "ent_coef": 0.01,
        "normalize_advantages": "minibatch",
        "clip_vloss": True,
        "num_minibatches": 5,
        "freeze": ["critic.head.*"],
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_fused_training_equals_collecting_and_learning_apart(name):
    settings = config(**VARIANTS[name])
    (one, first), (two, second) = trained(settings), trained(settings, fused=False)
    assert one.state.episodes == two.state.episodes > 0
    assert_same_metrics(first, second)
    for metric in ("timesteps", "episodes", "iteration_episodes", "mean_return", "mean_length", "epochs", "n_updates", "staleness"):
        assert np.array_equal(first[metric], second[metric], equal_nan=True)
    for weight, value in one.policy.get_weights().items():
        np.testing.assert_allclose(value, two.policy.get_weights()[weight], rtol=0, atol=1e-6)
    assert [*one.collector.recent] == [*two.collector.recent]
    states = [trainer.full_state()["learner"] for trainer in (one, two)]
    assert states[0]["stream"] == states[1]["stream"]
    for name, value in states[0].get("rewards", {}).items():
        np.testing.assert_allclose(value, states[1]["rewards"][name], rtol=1e-6)


def test_rewards_are_scaled_in_the_precision_of_the_weights():
    settings = config(2, scale_rewards=True)
    with PPOTrainer("mlp", settings.env, settings) as trainer:
        weights = trainer.policy.get_weights()
        trainer.policy.set_weights({name: weights[name].astype(np.float64) for name in weights})
        assert np.isfinite(trainer.train()["loss"]).all()
        assert trainer.policy.get_weights()["actor.head.weight"].dtype == np.float64


def assert_same_metrics(fused: History, apart: History) -> None:
    """Both have the same metrics, apart from those of time, with the same numbers."""
    names = [{name for name in history if not name.startswith("timing/")} for history in (fused, apart)]
    assert names[0] == names[1]
    for metric in names[0] - {"ratio_error"}:
        np.testing.assert_allclose(fused[metric], apart[metric], rtol=1e-5, atol=1e-6, err_msg=metric)


class Masked:
    """A world with a mask that leaves one action in every third step, and episodes of 5 steps."""

    observation_space = gym.spaces.Dict({"action_mask": gym.spaces.MultiBinary(2), "seen": gym.spaces.Box(-9.0, 9.0, (2,), np.float32)})
    action_space = gym.spaces.Discrete(2)
    max_episode_steps = 5

    def reset(self, key):
        start = jax.random.uniform(key, (2,))
        return self._shown(start, jnp.zeros((), jnp.int32)), (start, jnp.zeros((), jnp.int32))

    def step(self, key, state, action):
        del key
        seen, time = state[0] + jnp.where(action == 1, 0.5, -0.5), state[1] + 1
        over = jnp.abs(seen[0]) > 1
        return self._shown(seen, time), (seen, time), seen[1], over, (time >= 5) & ~over

    def _shown(self, seen, time):
        return {"action_mask": jnp.array([1, 1], jnp.int8) - jnp.array([1, 0], jnp.int8) * (time % 3 == 2), "seen": seen}


def test_memory_and_masks_are_trained_inside_the_loop():
    settings = config(2, policy={"kind": "gru", "memory_size": 4}, sequence_length=5)
    one, two = (PPOTrainer("gru", JaxVectorEnv(Masked(), LANES), settings) for _ in range(2))
    two._fused_step = lambda components: None
    first, second = one.train(), two.train()
    assert_same_metrics(first, second)
    assert {"memory_spread", "forced_share", "truncated_share", "observation_scale"} <= set(first)
    for weight, value in one.policy.get_weights().items():
        np.testing.assert_allclose(value, two.policy.get_weights()[weight], rtol=0, atol=1e-6)


def test_neither_a_repetition_nor_the_number_of_iterations_per_call_changes_a_bit(monkeypatch):
    settings = config(7)
    (one, first), (two, second) = trained(settings, most=1, monkeypatch=monkeypatch), trained(settings, most=4, monkeypatch=monkeypatch)
    assert_same_bits(one, two)
    for metric in set(first) - {name for name in first if name.startswith("timing/")}:
        assert np.array_equal(first[metric], second[metric], equal_nan=True)


def test_a_run_resumed_within_what_would_have_been_one_call_has_the_same_bits(tmp_path, monkeypatch):
    whole, _ = trained(config(6), most=4, monkeypatch=monkeypatch, run_dir=tmp_path / "whole")
    for stop in (2, 3):
        path = tmp_path / f"stopped{stop}"
        first, _ = trained(config(6, run={"max_iterations": stop}), most=4, monkeypatch=monkeypatch, run_dir=path)
        assert first.state.iteration == stop
        first.close()
        second = PPOTrainer("mlp", config(6).env, config(6), run_dir=path)
        second.load_checkpoint()
        second.train()
        assert_same_bits(whole, second)
        second.close()


def test_callbacks_see_every_iteration_and_one_of_the_users_sees_the_run_as_it_is(monkeypatch):
    seen = []

    def watch(state, metrics):
        seen.append((state.iteration, state.env_steps, trainer.learner.updates, metrics["n_updates"], state.settled))
        return state.iteration < 4

    monkeypatch.setattr(fused_module.FusedTraining, "_next_count", lambda self, count, seconds: 8)
    trainer = PPOTrainer("mlp", config(6).env, config(6), callbacks=[watch])
    trainer.train()
    assert seen == [(n, n * STEPS * LANES, n, float(n), True) for n in (1, 2, 3, 4)]


def test_a_callback_that_reads_rollouts_gets_them():
    class Doubles(BaseCallback):
        def on_rollout(self, state, rollout):
            del state
            steps.append(rollout.num_steps)

    steps: list[int] = []
    PPOTrainer("mlp", config(2).env, config(2), callbacks=[Doubles()]).train()
    assert steps == [STEPS, STEPS]


def test_the_loop_is_compiled_once(tmp_path):
    compiled, at = [], []

    def count(event: str, duration: float, **_) -> None:
        del duration
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(trainer.state.iteration)

    settings = config(10, num_minibatches=3, evaluation={"interval": 3, "final_episodes": 2}, run={"checkpoint_interval": 2})
    trainer = PPOTrainer("mlp", settings.env, settings, run_dir=tmp_path, callbacks=[lambda state, metrics: at.append(metrics["episodes"])])
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        trainer.train()
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert compiled
    assert set(compiled) == {0}  # before the first iteration was over
    assert at[-1] > at[0]  # episodes ended


class Exploding:
    """A world with episodes of 4 steps, in few of which the third shows a number that is not finite."""

    observation_space = gym.spaces.Box(-1e30, 1e30, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    max_episode_steps = 4

    def __init__(self, what: str) -> None:
        self.what = what

    def reset(self, key):
        return jnp.zeros(2), (jax.random.key_data(key)[1], jnp.zeros((), jnp.int32))

    def step(self, key, state, action):
        del key, action
        seed, time = state[0], state[1] + 1
        bad = jnp.where((time == 3) & (seed % 64 == 0), jnp.nan, 1.0).astype(jnp.float32)
        reward = bad if self.what == "reward" else jnp.ones((), jnp.float32)
        seen = jnp.ones(2, jnp.float32) * (bad if self.what == "observation" else 1.0)
        return seen, (seed, time), reward, jnp.zeros((), bool), time >= 4


@pytest.mark.parametrize("what", ["reward", "observation"])
def test_a_bad_number_inside_the_loop_is_named_and_the_last_good_weights_are_kept(what, monkeypatch):
    monkeypatch.setattr(fused_module.FusedTraining, "_next_count", lambda self, count, seconds: 8)
    trainers = [PPOTrainer("mlp", JaxVectorEnv(Exploding(what), LANES), config(60)) for _ in range(2)]
    trainers[1]._fused_step = lambda components: None
    for trainer in trainers:
        with pytest.raises(BadNumberError, match=f"the {what}.* of lane . is not finite at step 3 of its episode"):
            trainer.train()
    fused, apart = trainers
    assert fused.state.iteration == fused.learner.updates == apart.state.iteration > 1
    assert fused.full_state()["learner"]["stream"] == apart.full_state()["learner"]["stream"]
    for left, right in zip(jax.tree.leaves(fused.collector.state), jax.tree.leaves(apart.collector.state)):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-6)  # of the episodes before the bad iteration
    for name, value in fused.policy.get_weights().items():
        np.testing.assert_allclose(value, apart.policy.get_weights()[name], rtol=0, atol=1e-6)
        assert np.isfinite(value).all()


def test_a_bad_number_of_one_of_several_seeds_leaves_its_last_good_state(monkeypatch):
    """The seed whose numbers are bad in the middle of a call is where it is if it is computed alone, iteration by iteration."""
    monkeypatch.setattr(fused_module.FusedTraining, "_next_count", lambda self, count, seconds: 8)

    def trainer(seed):
        return PPOTrainer("mlp", JaxVectorEnv(Exploding("reward"), LANES), config(60), seed=seed)

    seeds, stopped = [trainer(5), trainer(6)], []
    loops = [fused_module.FusedTraining(one.collector, one.learner, one.config) for one in seeds]
    while not stopped:
        calls = fused_module.FusedTraining.together(loops, 100)
        stopped = [one for one, found in zip(seeds, calls) if one.learner.updates > 1 and len(found) < 8]
    for one in stopped:
        alone = trainer(one.config.run.seed)
        for _ in range(one.learner.updates):
            alone.learn(alone.collect_rollouts())
        for left, right in zip(jax.tree.leaves(one.collector.state), jax.tree.leaves(alone.collector.state)):
            np.testing.assert_allclose(left, right, rtol=0, atol=1e-5)


def test_a_loss_that_explodes_inside_the_loop_ends_the_run_with_its_minibatch(tmp_path):
    settings = config(4, learning_rate=1e30, max_grad_norm=None)
    trainer = PPOTrainer("mlp", settings.env, settings, run_dir=tmp_path)
    with pytest.raises(BadNumberError):
        trainer.train()
    assert all(np.isfinite(value).all() for value in trainer.policy.get_weights().values())


def test_nothing_is_fused_where_a_part_is_replaced():
    class Own(PPOTrainer):
        def collect_rollouts(self, n_steps=None):
            calls.append(n_steps)
            return super().collect_rollouts(n_steps)

    calls: list[int | None] = []
    Own("mlp", config(2).env, config(2)).train()
    assert len(calls) == 2
