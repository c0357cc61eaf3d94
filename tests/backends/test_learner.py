"""The parts of an update that every backend shares, and the losses of users: what they get, how they are logged, what is refused."""

import functools
import math
from dataclasses import replace

import jax
import numpy as np
import pytest
import torch
from gymnasium import spaces

from doubles.learners import JAX, NUMPY, SIDES, TORCH, collect, of_unknown_weights, parameters
from inchworm.backends.custom_losses import ARGUMENTS
from inchworm.backends.learner import ratio_metrics, summary, target_metrics
from inchworm.backends.numpy.policy import NumpyPolicy, fresh_weights
from inchworm.config.sections import PPOConfig
from inchworm.core.errors import BadNumberError, ConfigError


def test_means_are_over_the_steps_that_were_taken():
    table = {
        "approx_kl": np.array([0.1, np.nan, 0.0, 0.3]),
        "bad": np.array([0.0, 1.0, 0.0, 0.0]),
        "empty": np.array([0.0, 0.0, 1.0, 0.0]),
    }
    found = summary([table])  # steps 0 and 3: (0.1 + 0.3) / 2
    assert found == {"approx_kl": pytest.approx(0.2), "skipped_steps": 2.0}
    assert summary([table, {name: column[:1] for name, column in table.items()}])["approx_kl"] == pytest.approx(0.5 / 3)
    none = {"approx_kl": np.array([np.nan]), "bad": np.array([1.0]), "empty": np.array([0.0])}
    assert summary([none]) == {"approx_kl": 0.0, "skipped_steps": 1.0}


def test_explained_variance_by_hand():
    # returns 1, 2, 3, 4 (variance 5/3); values 1, 2, 3, 3: errors 0, 0, 0, 1 (variance 1/4): 1 - 0.25 / (5/3) = 0.85
    values, returns = np.array([[1.0, 2, 3, 3, 99]]), np.array([[1.0, 2, 3, 4, -99]])
    valid = np.array([[True, True, True, True, False]])

    def explained_variance(*given):
        return target_metrics(*given)["explained_variance"]

    assert explained_variance(returns, values, valid) == pytest.approx(0.85, abs=1e-12)
    assert explained_variance(returns, returns, valid) == 1.0
    assert explained_variance(np.ones((1, 5)), values, valid) == 0.0  # returns that do not vary
    assert explained_variance(returns, values, np.array([[True, False, False, False, False]])) == 0.0


def test_ratio_metrics_by_hand():
    # |r - 1| is at most 2; (1 + 3)² / (1 + 9) / 2 = 0.8
    assert ratio_metrics(np.array([1.0, 3.0])) == {"ratio_error": 2.0, "effective_sample_size": pytest.approx(0.8)}
    assert ratio_metrics(np.zeros(0)) == {"ratio_error": 0.0, "effective_sample_size": 1.0}
    for bad in (np.nan, np.inf):
        assert ratio_metrics(np.array([1.0, bad], np.float32)) == {"ratio_error": np.finfo(np.float32).max, "effective_sample_size": 0.0}
    assert ratio_metrics(np.zeros(4))["effective_sample_size"] == 0.0
    assert ratio_metrics(np.full(3, 1e30, np.float32))["effective_sample_size"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("kind", "progress", "factor"),
    [("constant", 0.3, 1.0), ("linear", 0.25, 0.75), ("cosine", 1 / 3, 0.75), ("cosine", 1.0, 0.0)]  # ½ (1 + cos(π/3)) = 0.75
    + [(kind, 2.0, 0.0) for kind in ("linear", "cosine")],  # after the planned end
)
def test_schedules_by_hand(kind, progress, factor):
    learner = NUMPY.learner(NUMPY.policy(), PPOConfig(learning_rate=1e-3, learning_rate_schedule=kind), total_timesteps=1_200)
    learner.env_steps = round(1_200 * progress)
    assert learner.learning_rate == pytest.approx(1e-3 * factor, abs=1e-15)


# Losses of users: in NumPy they return their gradients, torch derives them

WHOLE = PPOConfig(update_epochs=1, num_minibatches=1, normalize_advantages="off", max_grad_norm=None)
SEVERAL = PPOConfig(learning_rate=1e-2, update_epochs=2, num_minibatches=5, normalize_advantages="minibatch")
HYBRID = spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Discrete(3)])


@pytest.fixture(params=SIDES, ids=lambda side: side.name)
def side(request):
    return request.param


def numpy_pull(policy):
    """100 times the first bias of the actor's head, plus 7."""
    bias = policy.get_weights()["actor.head.bias"]
    return 100 * bias[0] + 7, {"actor.head.bias": np.array([100.0, 0, 0])}


def torch_pull(policy):
    return 100 * policy.network.actor["head"].bias[0] + 7


def jax_pull(policy):
    return 100 * policy.params["actor.head.bias"][0] + 7


PULLS = {"numpy": numpy_pull, "torch": torch_pull, "jax": jax_pull}


def nothing(side, values):
    """A loss of 0."""
    return side.answer(0.0, 0.0, values)


def test_a_loss_with_batch_as_keywords_gets_everything(side):
    seen, policy = {}, side.policy()
    rollout = collect(policy)

    def whole(policy, *, advantages, scale=2.0, **batch):
        seen.update(batch, policy=policy, advantages=advantages, scale=scale)
        return side.answer(0.0, 0.0, batch["values"])

    assert side.learner(policy, WHOLE).update(rollout, [whole])["loss/whole"] == 0
    assert seen.keys() == {*ARGUMENTS, "scale"}
    assert seen["policy"] is policy or (side is JAX and seen["policy"].spec is policy.spec)  # in JAX a copy with traced weights
    assert seen["scale"] == 2.0
    assert seen["next_observations"].shape == seen["obs"].shape == seen["observations"].shape
    assert seen["minibatch"].rewards is seen["rewards"]
    assert seen["evaluation"].values is seen["values"]


@pytest.mark.parametrize(("value", "slope"), [(math.nan, 0.0), (0.0, math.nan)], ids=["value", "gradient"])
def test_a_custom_loss_that_is_not_finite_is_named(side, value, slope, tmp_path):
    def curiosity(values):
        return side.answer(value, slope, values)

    def fine(values):
        return side.answer(0.0, 0.0, values)

    policy = side.policy()
    before = parameters(policy)
    with pytest.raises(BadNumberError, match=r"the custom loss curiosity, or its gradient, was not finite") as caught:
        side.learner(policy, SEVERAL, dump_directory=tmp_path).update(collect(policy), [curiosity, fine])
    assert "learning_rate" not in str(caught.value)
    np.testing.assert_array_equal(parameters(policy), before)


class InNumpy:
    """Each loss with its gradients, by hand. Their means are over valid samples, so that micro-batches add up."""

    @staticmethod
    def by_values(values, returns, valid):
        # Σ (V - R)³ / n: gradient 3 (V - R)² / n
        off = (values - returns) * valid
        return (off**3).sum() / valid.sum(), {"values": 3 * off**2 / valid.sum()}

    @staticmethod
    def by_log_probs(log_probs, advantages, valid):
        # -Σ A log p / n
        return -(log_probs * advantages * valid).sum() / valid.sum(), {"log_probs": -advantages * valid / valid.sum()}

    @staticmethod
    def by_entropy(entropy, valid):
        # Σ (H - 1)² / n
        return ((entropy - 1) ** 2 * valid).sum() / valid.sum(), {"entropy": 2 * (entropy - 1) * valid / valid.sum()}

    @staticmethod
    def by_all(log_probs, entropy, values, valid):
        # Σ log p · H · V / n: three gradients at once
        gradients = {"log_probs": entropy * values, "entropy": log_probs * values, "values": log_probs * entropy}
        value = (log_probs * entropy * values * valid).sum() / valid.sum()
        return value, {name: gradient * valid / valid.sum() for name, gradient in gradients.items()}

    @staticmethod
    def by_weights(policy):
        # ½ Σ w² of the actor's first layer, and 3 Σ log_std
        weights = policy.get_weights()
        first, log_std = weights["actor.0.weight"], weights["log_std"]
        return 0.5 * (first**2).sum() + 3 * log_std.sum(), {"actor.0.weight": first, "log_std": np.full(log_std.shape, 3.0)}

    @staticmethod
    def by_both(values, policy, valid):
        # The mean value and the critic's last bias: a gradient through the network and one past it, to the same weight
        bias = policy.get_weights()["critic.head.bias"]
        value = (values * valid).sum() / valid.sum() + 2 * (bias**2).sum()
        return value, {"values": valid / valid.sum(), "critic.head.bias": 4 * bias}


def without_gradients(loss):
    """The same loss where torch derives the gradients."""

    @functools.wraps(loss)
    def value(*given):
        return loss(*given)[0]

    return value


class InTorch:
    by_values, by_log_probs, by_entropy, by_all = (
        staticmethod(without_gradients(loss)) for loss in (InNumpy.by_values, InNumpy.by_log_probs, InNumpy.by_entropy, InNumpy.by_all)
    )

    @staticmethod
    def by_weights(policy):
        return 0.5 * policy.network.actor["0"].weight.square().sum() + 3 * policy.log_std.sum()

    @staticmethod
    def by_both(values, policy, valid):
        return (values * valid).sum() / valid.sum() + 2 * policy.network.critic["head"].bias.square().sum()


class InJax(InTorch):
    @staticmethod
    def by_weights(policy):
        return 0.5 * (policy.params["actor.0.weight"] ** 2).sum() + 3 * policy.params["log_std"].sum()

    @staticmethod
    def by_both(values, policy, valid):
        return (values * valid).sum() / valid.sum() + 2 * (policy.params["critic.head.bias"] ** 2).sum()


LOSSES = ("by_values", "by_log_probs", "by_entropy", "by_all", "by_weights", "by_both")


@pytest.mark.parametrize(("names", "pieces"), [(("by_values",), 1), (LOSSES, 1), (LOSSES, 3)])
def test_values_gradient_norms_and_weights_are_those_of_torch(names, pieces):
    spec = NUMPY.policy(action_space=HYBRID, action_bounds="tanh", normalize_values=True).spec
    weights, rng = fresh_weights(spec, 0), np.random.default_rng(7)
    weights |= {name: rng.normal(0, 0.5, shape) for name, shape in spec.layers.items()}
    policies = [side.policy_of(spec, weights) for side in SIDES]
    learners = [side.learner(one, SEVERAL.replace(gradient_accumulation=pieces)) for side, one in zip(SIDES, policies)]
    for seed in range(3):
        rollout = of_unknown_weights(collect(policies[0], seed=seed))  # they are those of one of them
        valid = rollout.valid.copy()
        valid[3:6, 1] = False
        rollout = replace(rollout, valid=valid)
        kinds = (InNumpy, InTorch, InJax)
        stats = [learner.update(rollout, [getattr(kind, name) for name in names]) for learner, kind in zip(learners, kinds)]
        for policy, found in zip(policies[1:], stats[1:]):
            assert stats[0].keys() == found.keys()
            for name in found:
                assert stats[0][name] == pytest.approx(found[name], rel=1e-9, abs=1e-9), name
            for name, weight in policy.get_weights().items():
                np.testing.assert_allclose(policies[0].get_weights()[name], weight, rtol=0, atol=1e-10, err_msg=name)
    for name in names:
        assert stats[0][f"grad_norm/{name}"] > 1e-3


def test_the_total_is_the_sum_and_each_gradient_norm_is_its_own(side):
    # 100 times the actor's first bias in addition to PPO's own loss: its norm is 100, and Adam's first step moves it by the rate.
    def pull(policy):
        return PULLS[side.name](policy)

    policy = side.policy()
    rollout = collect(policy)
    plain = side.learner(side.policy(), WHOLE).update(rollout)
    stats = side.learner(policy, WHOLE).update(rollout, [pull])
    assert stats["loss/pull"] == 7
    assert stats["loss"] == pytest.approx(plain["loss"] + 7, abs=1e-5)
    assert stats["grad_norm/pull"] == pytest.approx(100)
    assert stats["grad_norm"] == pytest.approx(100, rel=0.02)
    assert stats["grad_norm"] != pytest.approx(100, rel=1e-7)  # PPO's own is in it
    assert policy.get_weights()["actor.head.bias"][0] == pytest.approx(-3e-4, rel=1e-2)


def test_what_a_loss_gets(side):
    seen, recorded = {}, []

    def my_loss(policy, obs, actions, rewards, values, advantages, minibatch, evaluation, log_probs, entropy):
        seen.update(locals())
        side.record(recorded, {"obs": obs, "actions": actions, "rewards": rewards, "valid": minibatch.valid} | of(evaluation))
        square = float(torch.as_tensor(values).detach().square().mean()) if side is not JAX else (values**2).mean()
        return side.answer(jax.lax.stop_gradient(square) if side is JAX else square, 0.0, values)

    def of(evaluation):
        return {name: getattr(evaluation, name) for name in ("log_probs", "entropy", "values")}

    policy = side.policy()
    rollout, reference = collect(policy), NumpyPolicy(policy.spec, policy.get_weights())
    stats = side.learner(policy, WHOLE).update(rollout, [my_loss])
    assert seen["policy"] is policy or (side is JAX and seen["policy"].spec is policy.spec)
    arrays = recorded[0]
    order, expected = np.argsort(arrays["rewards"].reshape(-1)), np.argsort(rollout.rewards.reshape(-1))
    np.testing.assert_array_equal(arrays["obs"].reshape(-1, 3)[order], rollout.observations.reshape(-1, 3)[expected])
    np.testing.assert_array_equal(arrays["actions"].reshape(-1)[order], rollout.actions.reshape(-1)[expected])
    np.testing.assert_allclose(arrays["log_probs"].reshape(-1)[order], rollout.log_probs.reshape(-1)[expected], atol=1e-5)
    for name in ("log_probs", "entropy", "values"):
        assert arrays[name].shape == (1, 36)
        assert seen[name] is getattr(seen["evaluation"], name)
    np.testing.assert_allclose(arrays["values"][0], reference.value(arrays["obs"])[0], atol=1e-5)
    assert arrays["valid"].all()
    assert seen["minibatch"].next_observations == ()  # made on demand only
    assert side is JAX or seen["evaluation"].value_scale == 1
    assert stats["loss/my_loss"] == pytest.approx((arrays["values"] ** 2).mean(), rel=1e-6)


def test_a_loss_that_fails_leaves_the_weights_of_the_steps_before():
    def fails(policy, values):
        seen.append(parameters(policy))
        if len(seen) == 3:
            raise ZeroDivisionError
        return 0.0, {"values": np.zeros_like(values)}

    seen = []
    policy = NUMPY.policy()
    before = parameters(policy)
    with pytest.raises(ZeroDivisionError):
        NUMPY.learner(policy, SEVERAL).update(collect(policy), [fails])
    np.testing.assert_array_equal(parameters(policy), seen[-1])
    assert (parameters(policy) != before).any()


@pytest.mark.parametrize(("length", "pieces"), [(1, 1), (4, 2)])
def test_next_observations_are_the_true_successors(side, length, pieces):
    policy, found, recorded = side.policy(), {}, []
    rollout = replace(collect(policy), rewards=np.arange(36, dtype=np.float32).reshape(12, 3))  # so that each row is known by its reward

    def curiosity(next_observations, rewards, values):
        side.record(recorded, (rewards.reshape(-1), next_observations.reshape(-1, 3)))
        return nothing(side, values)

    side.learner(policy, WHOLE.replace(sequence_length=length, gradient_accumulation=pieces)).update(rollout, [curiosity])
    for numbers, successors in recorded:
        found.update(zip(numbers.tolist(), successors.tolist()))
    np.testing.assert_array_equal([found[number] for number in range(36)], rollout.next_observations.reshape(36, 3))


def test_names_of_partials_and_objects(side):
    def scaled(values, weight=1.0):
        assert weight == 2
        return nothing(side, values)

    class Penalty:
        def __call__(self, log_probs):
            return nothing(side, log_probs)

    policy = side.policy()
    stats = side.learner(policy, WHOLE).update(collect(policy), [functools.partial(scaled, weight=2.0), Penalty()])
    assert (stats["loss/scaled"], stats["loss/Penalty"]) == (0, 0)


def test_arguments_and_names_are_checked_before_anything_moves(side):
    policy = side.policy()
    learner, rollout = side.learner(policy, WHOLE), collect(policy)

    def asks(observation):
        return nothing(side, observation)

    def by_keyword(*, reward):
        return nothing(side, reward)

    for wrong, words in ((asks, "'observation'; a loss may ask for policy, minibatch"), (by_keyword, "'reward'")):
        with pytest.raises(ConfigError, match=f"the custom loss {wrong.__name__} asks for {words}"):
            learner.update(rollout, [wrong])
    with pytest.raises(ConfigError, match="two custom losses are called numpy_pull"):
        learner.update(rollout, [numpy_pull, numpy_pull])
    assert learner.updates == 0


@pytest.mark.parametrize(
    ("answer", "words"),
    [(lambda values: values, r"returned \(1, 36\); it must return a scalar tensor"), (lambda values: 1.0, "returned float")],
)
def test_in_torch_a_loss_must_return_a_scalar_tensor(answer, words):
    def my_loss(values):
        return answer(values)

    policy = TORCH.policy()
    with pytest.raises(ConfigError, match=f"the custom loss my_loss {words}"):
        TORCH.learner(policy, WHOLE).update(collect(policy), [my_loss])


def refusal(answer):
    def my_loss(values):
        return answer

    policy = NUMPY.policy()
    before = policy.get_weights()
    with pytest.raises(ConfigError) as caught:
        NUMPY.learner(policy, WHOLE).update(collect(policy), [my_loss])
    np.testing.assert_equal(policy.get_weights(), before)
    return str(caught.value)


@pytest.mark.parametrize(
    "answer", [1.0, torch.zeros(()), None, (1.0,), (1.0, {}, {}), (1.0, np.zeros((1, 36))), (np.zeros(2), {}), [1.0, {}]], ids=repr
)
def test_a_loss_that_returns_something_else_is_refused(answer):
    message = refusal(answer)
    assert message.startswith("the custom loss my_loss did not return its gradients; with run.backend=numpy a loss is given NumPy arrays")
    assert "must return (value, gradients), gradients by log_probs, entropy, values [1, 36] or by a weight's name" in message
    assert "set run.backend=torch" in message


def test_a_loss_that_is_written_for_torch_is_told_what_to_set():
    def smooth(values):
        return values.square().clamp(max=1.0).mean()  # NumPy's arrays have no square()

    policy = NUMPY.policy()
    with pytest.raises(ConfigError, match=r"(?s)smooth raised AttributeError.*set run.backend=torch") as caught:
        NUMPY.learner(policy, WHOLE).update(collect(policy), [smooth])
    assert isinstance(caught.value.__cause__, AttributeError)


def test_gradients_by_unknown_names_and_of_wrong_shapes_are_refused():
    message = refusal((1.0, {"advantages": np.zeros((1, 36))}))
    assert (
        "the custom loss my_loss returned a gradient by 'advantages'; valid names are log_probs, entropy, values, actor.0.weight" in message
    )
    assert refusal((1.0, {"values": np.zeros(36)})).endswith("a gradient by values of shape (36,), not (1, 36)")
    assert refusal((1.0, {"actor.head.bias": 2.0})).endswith("by actor.head.bias of shape (), not (3,)")
