"""Learning, against answers that are known: each world has a value or a best action that a broken learner does not reach."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from doubles.toys import ActionReward, ConstantReward, ContextualReward, Corridor, DelayedReward, ObservedReward, TruncatedForever
from inchworm.collect.opponents import RandomActor
from inchworm.config.sections import PolicyConfig, PPOConfig, TrainingConfig
from inchworm.core.spaces import MASK_KEY
from inchworm.env.registry import config_for
from inchworm.train.trainer import PPOTrainer
from inchworm.worlds.toys import MemoryCorridor, MixedMemoryCorridor

LANES, STEPS = 8, 16
QUICK = PPOConfig(rollout_steps=STEPS, num_minibatches=2, update_epochs=4, learning_rate=1e-2, ent_coef=0.0, vf_coef=1.0, gamma=0.9)


def trained(env: Any, iterations: int, *, ppo: PPOConfig = QUICK, callbacks: Any = (), **policy: Any) -> PPOTrainer:
    network = PolicyConfig(**{"hidden_sizes": (16,), **policy})
    trainer = PPOTrainer(network, env, ppo, num_envs=LANES, seed=1, callbacks=callbacks)
    trainer.train(iterations * LANES * STEPS)
    return trainer


def values(trainer: PPOTrainer, *observations: float) -> list[float]:
    """The learned critic at observations of one number."""
    seen = np.array(observations, np.float32)[None, :, None]  # [1, N, 1]
    return np.asarray(trainer.policy.value(seen, (), np.zeros((1, len(observations)), bool)))[0].tolist()


@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "popart"])
def test_a_constant_reward_is_its_own_value(normalize: bool) -> None:
    trainer = trained(ConstantReward, 25, normalize_values=normalize)
    assert values(trainer, 0.0) == pytest.approx([1.0], abs=0.03)


def test_a_value_reads_the_observation() -> None:
    trainer = trained(ObservedReward, 30)
    assert values(trainer, -1.0, 1.0) == pytest.approx([-1.0, 1.0], abs=0.05)


@pytest.mark.parametrize("gamma", [0.5, 0.9])
def test_a_reward_one_step_away_is_worth_gamma(gamma: float) -> None:
    trainer = trained(DelayedReward, 30, ppo=QUICK.replace(gamma=gamma))
    assert values(trainer, 0.0, 1.0) == pytest.approx([gamma, 1.0], abs=0.05)


FOREVER = QUICK.replace(gamma=0.8, learning_rate=2e-2)
"""Reward 1 for ever: V = 1 / (1 - 0.8) = 5. If the cut after 5 steps were an end, no value could pass 1 + 0.8 + … + 0.8⁴ = 3.36."""


@pytest.mark.parametrize("gae_lambda", [0.0, 1.0])
def test_a_truncation_is_not_a_termination(gae_lambda: float) -> None:
    trainer = trained(TruncatedForever, 60, ppo=FOREVER.replace(gae_lambda=gae_lambda))
    assert values(trainer, 0.0) == pytest.approx([5.0], rel=0.03)


def test_the_better_of_two_actions() -> None:
    trainer = trained(ActionReward, 20)
    assert trainer.evaluate(10).mean_return == 1.0
    assert trainer.evaluate(200, deterministic=False).mean_return > 0.9  # it is sure of it, too
    assert values(trainer, 0.0)[0] > 0.9


def test_the_action_depends_on_the_observation() -> None:
    trainer = trained(ContextualReward, 25)
    assert trainer.evaluate(40).returns.tolist() == [1.0] * 40  # a policy that does not look earns 0
    assert [trainer.policy.predict(np.array([sign], np.float32)) for sign in (-1.0, 1.0)] == [0, 1]  # type: ignore[attr-defined]


@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalised"])
def test_a_reward_at_the_end_of_a_corridor_is_walked_to(normalize: bool) -> None:
    trainer = trained(Corridor, 40, normalize_observations=normalize, normalize_values=normalize)
    stats = trainer.evaluate(8)
    assert stats.mean_return == 1.0
    assert stats.lengths.tolist() == [5] * 8  # the shortest way
    # V(place) = 0.9 ** (steps to go - 1), for a policy that is nearly sure
    assert values(trainer, 0.0, 0.8) == pytest.approx([0.9**4, 1.0], abs=0.1)


class OneStep(gym.Env[Any, Any]):
    """Episodes of one step; what is seen is drawn anew."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        return self.draw(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.draw(), self.reward(action), True, False, {}  # what the subclasses define


class BestLegal(OneStep):
    """Action a earns a, but only some are legal, which only the mask shows. The best policy takes the highest legal one."""

    action_space = spaces.Discrete(4)
    observation_space = spaces.Dict({"nothing": spaces.Box(0.0, 1.0, (1,), np.float32), MASK_KEY: spaces.MultiBinary(4)})

    def draw(self) -> Any:
        self.mask = self.np_random.integers(0, 2, 4).astype(np.int8)
        self.mask[self.np_random.integers(4)] = 1
        return {"nothing": np.zeros(1, np.float32), MASK_KEY: self.mask}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.mask[int(action)], "an illegal action was taken"
        best = int(np.flatnonzero(self.mask)[-1])
        return self.draw(), float(action), True, False, {"is_best": int(action) == best}


def test_masked_actions_are_never_taken_and_the_best_legal_one_is_learned() -> None:
    trainer = trained(BestLegal, 25)
    stats = trainer.evaluate(50)  # the world itself asserts that every action is legal
    assert stats.infos["is_best"].tolist() == [1.0] * 50
    assert len(set(stats.returns)) > 1  # the highest legal action differs from episode to episode


class Aim(OneStep):
    """See ±1, aim at half of it: reward -(a - s/2)². Guessing 0 earns -0.25."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space: Any = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def draw(self) -> Any:
        self.target = getattr(self, "drawn", 0.0) / 2
        self.drawn = float(self.np_random.integers(2) * 2 - 1)
        return np.array([self.drawn], np.float32)

    def reward(self, action: Any) -> float:
        return -float((action[0] - self.target) ** 2)


@pytest.mark.parametrize("bounds", ["clip", "tanh"])
def test_a_continuous_action_is_aimed(bounds: str) -> None:
    trainer = trained(Aim, 50, action_bounds=bounds, log_std_init=-0.5)
    assert trainer.evaluate(20).mean_return > -0.01
    aims = [float(trainer.policy.predict(np.array([sign], np.float32))[0]) for sign in (-1.0, 1.0)]  # type: ignore[attr-defined]
    assert aims == pytest.approx([-0.5, 0.5], abs=0.1)


@pytest.mark.parametrize("bounds", ["clip", "tanh"])
def test_a_best_action_at_the_edge_of_the_box_is_reached(bounds: str) -> None:
    class Edge(Aim):
        action_space = spaces.Box(-3.0, -1.0, (1,), np.float32)  # and bounds other than ±1

        def reward(self, action: Any) -> float:
            assert -3.0 <= action[0] <= -1.0
            return float(action[0])

    trainer = trained(Edge, 30, action_bounds=bounds)
    assert trainer.evaluate(10).mean_return > -1.15  # the middle is -2, the best -1


class Hybrid(Aim):
    """A gear that must match what is seen, and an aim that must be half of it: the best policy earns 1."""

    action_space = spaces.Dict({"aim": spaces.Box(-1.0, 1.0, (1,), np.float32), "gear": spaces.Discrete(2, start=1)})

    def reward(self, action: Any) -> float:
        right = int(action["gear"]) == (2 if self.target > 0 else 1)
        return float(right) - float((action["aim"][0] - self.target) ** 2)


def test_the_parts_of_a_hybrid_action_are_learned_together() -> None:
    trainer = trained(Hybrid, 50, log_std_init=-0.5)
    stats = trainer.evaluate(20)
    assert stats.min_return > 0.95  # the gear alone earns 0.75, the aim alone 0.5


class Side(OneStep):
    """A tiny image whose left or right half is bright, wherever exactly: action 0 for left, 1 for right."""

    observation_space = spaces.Box(0, 255, (1, 8, 8), np.uint8)
    action_space = spaces.Discrete(2)

    def draw(self) -> Any:
        self.side, self.next = getattr(self, "next", 0), int(self.np_random.integers(2))
        image = np.zeros((1, 8, 8), np.uint8)
        row, column = self.np_random.integers(0, 7), 4 * self.next + self.np_random.integers(0, 3)
        image[0, row : row + 2, column : column + 2] = 255
        return image

    def reward(self, action: Any) -> float:
        return 1.0 if int(action) == self.side else -1.0


def test_convolutions_tell_left_from_right() -> None:
    gentle = QUICK.replace(learning_rate=5e-3)
    trainer = trained(Side, 40, ppo=gentle, kind="cnn", cnn_filters=((8, 3, 1), (8, 3, 2)), cnn_features=16)
    assert trainer.evaluate(50).mean_return > 0.9  # a blind one earns 0


RECALL = PPOConfig(
    rollout_steps=63, sequence_length=63, num_minibatches=4, update_epochs=4, learning_rate=3e-3, ent_coef=0.01, gamma=0.99, gae_lambda=0.95
)
"""A rollout is three whole episodes of the corridor of 20 in each lane, and one sequence."""


def success(env: Any, kind: str, steps: int, *, seed: int = 0, ppo: PPOConfig = RECALL) -> float:
    """The share of right turns in 200 greedy episodes after training; training stops early once 100 episodes in a row went right."""

    def solved(state: Any, metrics: Any) -> bool:
        del state, metrics
        recent = [episode.info["is_success"] for episode in trainer.collector.recent]
        return not (len(recent) == 100 and np.mean(recent) >= 0.99)

    policy = PolicyConfig(kind=kind, hidden_sizes=(32,), memory_size=32, log_std_init=-1.0)  # type: ignore[arg-type]
    with PPOTrainer(policy, env, ppo, num_envs=16, seed=seed) as trainer:
        trainer.train(steps, callback=solved)
        rate = trainer.evaluate(200).success_rate
    assert rate is not None
    return rate


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_cue_is_remembered_over_a_few_steps(kind: str) -> None:
    assert success(lambda: MemoryCorridor(5), kind, 20_000) >= 0.95  # without memory 0.5


@pytest.mark.slow
@pytest.mark.parametrize("env", [MemoryCorridor, MixedMemoryCorridor])
def test_a_cue_is_remembered_over_20_steps(env: Any) -> None:
    assert success(env, "lstm", 60_000) >= 0.95


def test_without_memory_it_is_chance() -> None:
    assert success(lambda: MemoryCorridor(5), "mlp", 20_000) == pytest.approx(0.5, abs=0.14)  # 4 standard errors of 200 fair coins


@pytest.mark.slow
def test_cartpole_is_solved_by_its_preset_within_its_budget() -> None:
    config = config_for("CartPole-v1")
    assert config.run.total_timesteps <= 60_000
    with PPOTrainer(config.policy, config.env, config, seed=1) as trainer:
        history = trainer.train()
        assert trainer.total_timesteps <= 60_000 + config.ppo.rollout_steps * config.env.num_envs
        stats = trainer.evaluate(100)
    assert stats.mean_return >= 475
    assert trainer.failures == []
    assert history.convergence is not None
    assert (history.convergence["converged"], history.convergence["target"], history.stop_reason) == (True, 475.0, "total_timesteps")


WORLDS = {
    "simple_speaker_listener_v4": ({"speaker": {"agents": "speaker_*"}, "listener": {"agents": "listener_*"}}, 800, -77.2, -62.0),
    "simple_adversary_v3": ({"adversary": {"agents": "adversary_*"}, "good": {"agents": "agent_*"}}, 1_200, -14.8, -11.0),
}
"""Policies by role, steps of an iteration, mean team return of random agents, and what must be reached; 64 episodes are ± 5 and ± 2."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "several", "backend"),
    [
        ("simple_speaker_listener_v4", True, "numpy"),
        ("simple_adversary_v3", False, "numpy"),
    ],
)
def test_agents_with_different_spaces_learn(world: str, several: bool, backend: str) -> None:
    pytest.importorskip("mpe2")
    roles, batch, by_chance, least = WORLDS[world]
    config = TrainingConfig.from_dict(
        {
            "env": {"id": f"mpe2.{world}:parallel_env", "num_envs": 16, "num_workers": 0},
            "policy": {"hidden_sizes": (32, 32)},
            "ppo": {"rollout_steps": 25, "num_minibatches": 4, "learning_rate": 6e-3, "gamma": 0.95},
            "evaluation": {"interval": 0, "final_episodes": 0, "num_envs": 16, "deterministic": False},
            "run": {"backend": backend, "seed": 2},
            "policies": roles if several else {},
        }
    )
    with PPOTrainer(config.policy, config.env, config) as trainer:
        random = trainer.evaluator.evaluate(RandomActor(trainer.env.action_space), 64)  # type: ignore[union-attr]
        assert random.mean_return == pytest.approx(by_chance, abs=0.5)
        history = trainer.train(16 * batch)
        assert max(history["ratio_error"]) < 1e-4
        assert trainer.evaluate(64).mean_return > least
