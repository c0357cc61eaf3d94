"""Custom losses: names, weights that change, parameters and state of their own, and what is refused, on every backend."""

import functools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from doubles.learners import JAX, NUMPY, SIDES, TORCH, collect, parameters
from inchworm import Loss, PPOConfig, PPOTrainer
from inchworm.backends.custom_losses import bind_custom_losses
from inchworm.core.errors import BadNumberError, ConfigError

WHOLE = PPOConfig(update_epochs=1, num_minibatches=1, normalize_advantages="off", max_grad_norm=None)
BOTH = pytest.mark.parametrize("side", SIDES, ids=lambda side: side.name)


def slope_of(side: Any, value: float = 3.0, slope: float = 2.0) -> Any:
    """A loss of that value whose gradient by each V is the slope."""

    def steep(values: Any) -> Any:
        return side.answer(value, slope, values)

    return steep


# ---- weights and names
@BOTH
def test_a_weight_multiplies_value_and_gradient_and_follows_the_progress(side: Any) -> None:
    policies = side.policy(), side.policy()
    rollout = collect(policies[0])
    halved = side.learner(policies[0], WHOLE).update(rollout, [Loss(slope_of(side), weight=0.5)])
    assert (halved["loss/steep"], halved["loss_weight/steep"]) == (1.5, 0.5)
    learner, falling = side.learner(policies[1], WHOLE, total_timesteps=144), Loss(slope_of(side), lambda progress: 1 - progress, "pull")
    learner.env_steps = 36  # a quarter of the run
    stats = learner.update(rollout, [falling])
    assert (stats["loss/pull"], stats["loss_weight/pull"]) == (3 * 0.75, 0.75)
    assert stats["grad_norm/pull"] == pytest.approx(1.5 * halved["grad_norm/steep"], rel=1e-5)
    learner.env_steps = 300  # after the planned end the progress is 1
    stats = learner.update(rollout, [falling])
    assert (stats["loss/pull"], stats["grad_norm/pull"]) == (0, 0)


def test_a_jax_program_is_compiled_once_for_all_weights() -> None:
    traced = []

    def steep(values: Any) -> Any:
        traced.append(values)
        return JAX.answer(1.0, 1.0, values)

    learner = JAX.learner(JAX.policy(), WHOLE, total_timesteps=1000)
    rollout = collect(learner.policy)
    losses = [Loss(steep, weight=lambda progress: 1 - progress)]
    weights = [learner.update(rollout, losses)["loss_weight/steep"]]
    calls = len(traced)
    weights.append(learner.update(rollout, losses)["loss_weight/steep"])
    assert len(traced) == calls
    assert weights[0] > weights[1]


@BOTH
@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (lambda progress: float("nan"), "the weight of the custom loss steep is nan"),
        ("linear", "the weight of the custom loss steep is not a number"),
    ],
)
def test_a_weight_that_is_no_number_is_named(side: Any, weight: Any, message: str) -> None:
    policy = side.policy()
    with pytest.raises(ConfigError, match=message):
        side.learner(policy, WHOLE, total_timesteps=100).update(collect(policy), [Loss(slope_of(side), weight)])


def test_a_schedule_needs_the_length_of_the_run() -> None:
    policy = TORCH.policy()
    with pytest.raises(ConfigError, match="the weight of the custom loss steep needs the run's length"):
        TORCH.learner(policy, WHOLE).update(collect(policy), [Loss(slope_of(TORCH), lambda progress: progress)])


def test_names() -> None:
    class Named:
        name = "mine"

        def __call__(self, values: Any) -> Any: ...

    class Module(nn.Module):
        def forward(self, observations: Any, *, valid: Any) -> Any: ...

    def plain(values: Any, weight: float = 1.0) -> Any: ...

    bound = bind_custom_losses([Named(), Module(), functools.partial(plain, weight=2.0), Loss(plain, name="other")])
    assert [loss.name for loss in bound] == ["mine", "Module", "plain", "other"]
    assert (bound[1].arguments, bound[1].keywords) == (("observations",), ("valid",))  # those of `forward`


# ---- what is refused, a line each
VECTORS = {"numpy": lambda values: (values, {"values": values}), "torch": lambda values: values, "jax": lambda values: values}
CONSTANTS = {
    "numpy": lambda advantages: (float(advantages.mean()), {}),
    "torch": lambda advantages: advantages.mean(),
    "jax": lambda advantages: jnp.mean(advantages),
}


@BOTH
def test_bad_losses_are_refused_in_one_line_and_change_nothing(side: Any) -> None:
    def vector(values: Any) -> Any:
        return VECTORS[side.name](values)

    def constant(advantages: Any) -> Any:
        return CONSTANTS[side.name](advantages)

    def unknown(next_obs: Any) -> Any: ...

    policy = side.policy()
    rollout, before = collect(policy), parameters(policy)
    learner = side.learner(policy, WHOLE)
    returned = "did not return its gradients" if side is NUMPY else r"returned \(1, 36\); it must return a scalar"
    for losses, message in (
        ([vector], f"the custom loss vector {returned}"),
        ([constant], "the custom loss constant has no gradient: its value depends on no parameter"),
        ([unknown], "the custom loss unknown asks for 'next_obs'; a loss may ask for policy"),
        ([slope_of(side), slope_of(side)], "two custom losses are called steep; give them different names"),
        (vector, "custom losses are given as a list"),
        ([0.1], r"a custom loss is a function or an object that can be called, not 0\.1"),
    ):
        with pytest.raises(ConfigError, match=message):
            learner.update(rollout, losses)
        np.testing.assert_array_equal(parameters(policy), before)


# ---- parameters and state of a loss
class Predictor(nn.Module):
    """Predicts the next observation; three times as fast as the policy learns."""

    learning_rate = 9e-4

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.model = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, observations: Any, next_observations: Any) -> Any:
        self.calls += 1
        return (self.model(observations) - next_observations).square().mean()


def bits(module: nn.Module) -> list[np.ndarray]:
    return [parameter.detach().numpy().copy() for parameter in module.parameters()]


def test_own_parameters_are_moved_by_an_optimiser_of_their_own() -> None:
    loss, policies = Predictor(), [TORCH.policy(), TORCH.policy()]
    rollout = collect(policies[0])
    before = bits(loss)
    stats = TORCH.learner(policies[0], WHOLE).update(rollout, [loss])
    TORCH.learner(policies[1], WHOLE).update(rollout)
    np.testing.assert_array_equal(parameters(policies[0]), parameters(policies[1]))  # the policy has no part in it
    moved = np.abs(bits(loss)[0] - before[0])
    np.testing.assert_allclose(moved, 9e-4, rtol=1e-3)  # Adam's first step is the learning rate
    assert stats["grad_norm/Predictor"] > 1e-3
    assert int(loss.calls) == 1


def test_an_optimiser_that_is_brought_is_used() -> None:
    loss = Predictor()
    loss.optimizer = torch.optim.SGD(loss.parameters(), lr=0.5)
    before, seen = bits(loss), collect(TORCH.policy())
    TORCH.learner(TORCH.policy(), WHOLE).update(seen, [loss])
    gradient = loss.model.weight.grad.numpy()
    np.testing.assert_allclose(bits(loss)[0], before[0] - 0.5 * gradient, rtol=1e-6)


def test_a_bad_minibatch_moves_neither_policy_nor_loss() -> None:
    class Spoilt(Predictor):
        def forward(self, observations: Any, next_observations: Any) -> Any:
            return super().forward(observations, next_observations) * torch.sqrt(self.model.weight.sum() * 0)  # gradient 0 / 0

    loss, policy = Spoilt(), TORCH.policy()
    before, start = bits(loss), parameters(policy)
    with pytest.raises(BadNumberError, match="the custom loss Spoilt, or its gradient, was not finite"):
        TORCH.learner(policy, WHOLE.replace(num_minibatches=4)).update(collect(policy), [loss])
    np.testing.assert_array_equal(bits(loss)[0], before[0])
    np.testing.assert_array_equal(parameters(policy), start)


@pytest.mark.parametrize("side", [NUMPY, JAX], ids=lambda side: side.name)
def test_own_parameters_need_torch(side: Any) -> None:
    policy = side.policy()
    with pytest.raises(ConfigError, match="the custom loss Predictor has parameters of its own, which are learned with"):
        side.learner(policy, WHOLE).update(collect(policy), [Predictor()])


class Counter:
    """A loss with state and without parameters, on any backend."""

    def __init__(self, side: Any) -> None:
        self.side, self.calls = side, 0

    def __call__(self, values: Any) -> Any:
        self.calls += 1
        return self.side.answer(float(self.calls), 0.0, values)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: Any) -> None:
        self.calls = state["calls"]


@pytest.mark.parametrize("side", [NUMPY, TORCH], ids=lambda side: side.name)
def test_state_waits_for_its_loss(side: Any) -> None:
    policy = side.policy()
    rollout, first = collect(policy), side.learner(policy, WHOLE)
    first.update(rollout, [Counter(side)])
    saved = first.state_dict()
    second = side.learner(policy, WHOLE)
    second.load_state_dict(saved)
    assert second.state_dict()["losses"] == saved["losses"]  # kept until the loss is there
    assert second.update(rollout, [Counter(side)])["loss/Counter"] == 2
    assert "losses" not in side.learner(policy, WHOLE).state_dict()


def run(directory: Path | None, steps: list[int]) -> tuple[PPOTrainer, Any, Any]:
    """Train to each number of steps in turn, in a new trainer with a new model each time, which begins with other weights."""
    from examples.curiosity import Curiosity, RandomNetworkDistillation, make_env

    for index, total in enumerate(steps):
        torch.manual_seed(index)
        model = RandomNetworkDistillation(6, 4, 4)
        bonus = Curiosity(model)
        config = PPOConfig(rollout_steps=16, update_epochs=2, num_minibatches=2)
        trainer = PPOTrainer("mlp", lambda: make_env(6), config, num_envs=2, backend="torch", callbacks=[bonus])
        if index and directory is not None:
            trainer.load_checkpoint(directory)
        trainer.train(total_timesteps=total, custom_loss_fns=[model])
        if directory is not None:
            trainer.save_checkpoint(directory)
        trainer.close()
    return trainer, model, bonus


def test_a_resumed_run_with_a_loss_of_ones_own_has_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    whole, resumed = run(None, [256]), run(tmp_path, [128, 256])
    for name, weight in whole[0].policy.get_weights().items():
        np.testing.assert_array_equal(weight, resumed[0].policy.get_weights()[name], err_msg=name)
    for one, other in zip(bits(whole[1]), bits(resumed[1]), strict=True):
        np.testing.assert_array_equal(one, other)
    assert whole[2].square == resumed[2].square
