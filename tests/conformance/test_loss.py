"""Every term of PPO's loss on every backend: arithmetic by hand, and a loop over samples that shares no code with them."""

import math
from itertools import product

import numpy as np
import pytest

from inchworm.core.types import Evaluation, LossCoefficients, Minibatch


def make(
    dtype=np.float64, *, log_probs, old_log_probs=None, advantages=None, values=None, returns=None, old_values=None, valid=None, **more
):
    """One-step sequences [1, N]; what is not named is zero."""
    shape = (1, len(log_probs))

    def row(given):
        return np.zeros(shape, dtype) if given is None else np.asarray(given, dtype).reshape(shape)

    minibatch = Minibatch(
        observations=np.zeros(shape),
        actions=np.zeros(shape),
        log_probs=row(old_log_probs),
        advantages=row(advantages),
        returns=row(returns),
        values=row(old_values),
        valid=np.ones(shape, bool) if valid is None else np.asarray(valid, bool).reshape(shape),
        episode_starts=np.zeros(shape, bool),
    )
    scale = np.asarray(more.get("value_scale", 1.0), dtype)
    return Evaluation(row(log_probs), row(more.get("entropy")), row(values), scale), minibatch


def run(backend, evaluation, minibatch, *, clip_coef=0.2, vf_coef=0.5, ent_coef=0.01, clip_vloss=False, vf_clip_coef=0.2, count=None):
    count = backend.array(np.asarray(minibatch.valid.sum() if count is None else count))
    coefficients = LossCoefficients(clip_coef, vf_coef, ent_coef, clip_vloss, vf_clip_coef)
    terms = backend.loss.ppo_loss(backend.evaluation(evaluation), backend.minibatch(minibatch), coefficients, count)
    return {name: float(backend.numpy(term)) for name, term in terms.items()}


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "policy_loss", "clipped"),
    [
        (2.0, 1.0, -1.2, 1),  # min(e² · 1, 1.2 · 1)
        (2.0, -1.0, math.exp(2), 1),  # min(-e², -1.2): the wrong way is not clipped, but the ratio still counts as outside
        (0.1, 1.0, -1.1051709180756477, 0),  # e^0.1 = 1.10517 lies within 0.8 … 1.2
        (-1.0, 1.0, -math.exp(-1), 1),  # min(0.36788, 0.8)
        (-1.0, -1.0, 0.8, 1),  # min(-0.36788, -0.8)
    ],
)
def test_the_clipped_surrogate_by_hand(backend, log_ratio, advantage, policy_loss, clipped):
    terms = run(backend, *make(log_probs=[log_ratio], advantages=[advantage]))
    assert terms["policy_loss"] == pytest.approx(policy_loss, abs=1e-12)
    assert terms["clip_fraction"] == clipped


@pytest.mark.parametrize(
    ("new", "target", "scale", "bound", "value_loss"),
    [
        (1.0, 0.0, 1.0, None, 0.5),  # ½ (1 - 0)²
        (7.0, 1.0, 3.0, None, 2.0),  # ½ ((7 - 1) / 3)²
        # Bound 0.2, scale 10: the value may move by 2 from the old 0: held at 2, errors (1/10)² and (4/10)²: ½ · 0.16.
        (5.0, 6.0, 10.0, 0.2, 0.08),
        (5.0, 6.0, 10.0, None, 0.005),  # ½ · 0.01
        (5.0, -6.0, 10.0, 0.2, 0.605),  # the unclipped error (11/10)² is the worse one: ½ · 1.21
        (-5.0, -6.0, 10.0, 0.2, 0.08),  # and downwards
        (5.0, 6.0, 10.0, 0.4, 0.02),  # a bound of 0.4: held at 4, error (2/10)²
        (5.0, 6.0, 10.0, 0.0, 0.18),  # a bound of 0: held at 0, error (6/10)²
        (5.0, 6.0, 10.0, 0.6, 0.005),  # a bound of 0.6: not held
    ],
)
def test_the_value_loss_by_hand(backend, new, target, scale, bound, value_loss):
    numbers = make(log_probs=[0.0], old_values=[0.0], values=[new], returns=[target], value_scale=scale)
    terms = run(backend, *numbers, clip_vloss=bound is not None, vf_clip_coef=bound or 0.0)  # clip_coef stays 0.2
    assert terms["value_loss"] == pytest.approx(value_loss, abs=1e-12)
    assert terms["loss"] == pytest.approx(0.5 * value_loss, abs=1e-12)


def test_the_entropy_bonus_lowers_the_loss(backend):
    # mean entropy (1 + 3) / 2 = 2; loss = 0 + 0 - 0.01 · 2
    terms = run(backend, *make(log_probs=[0.0, 0.0], entropy=[1.0, 3.0]))
    assert terms["entropy"] == pytest.approx(2, abs=1e-12)
    assert terms["loss"] == pytest.approx(-0.02, abs=1e-12)


def test_approx_kl_is_the_k3_estimator(backend):
    # log ratios ln 2 and -ln 2: (2 - 1 - 0.6931) and (0.5 - 1 + 0.6931) have the mean (0.30685 + 0.19315) / 2 = 0.25.
    assert run(backend, *make(log_probs=[math.log(2), -math.log(2)]))["approx_kl"] == pytest.approx(0.25, abs=1e-12)
    assert run(backend, *make(log_probs=[0.3], old_log_probs=[0.3]))["approx_kl"] == 0.0


def test_only_valid_rows_count(backend):
    # Two valid rows of four: the sums are divided by 2, whatever the others hold.
    evaluation, minibatch = make(
        log_probs=[0.1, 50.0, 0.1, -50.0], advantages=[1.0, 9.0, 3.0, -9.0], values=[1.0, 99.0, 3.0, 99.0],
        entropy=[1.0, 7.0, 2.0, 7.0], valid=[1, 0, 1, 0],
    )  # fmt: skip
    terms = run(backend, evaluation, minibatch)
    assert terms["policy_loss"] == pytest.approx(-math.exp(0.1) * 2, abs=1e-12)  # mean of 1 and 3
    assert terms["value_loss"] == pytest.approx((0.5 * 1 + 0.5 * 9) / 2, abs=1e-12)
    assert terms["entropy"] == pytest.approx(1.5, abs=1e-12)
    assert terms["clip_fraction"] == 0.0
    assert terms["approx_kl"] == pytest.approx(math.exp(0.1) - 1.1, abs=1e-12)


def test_parts_of_a_minibatch_add_up_to_it(backend):
    rng = np.random.default_rng(5)
    whole = make(log_probs=rng.normal(size=7), advantages=rng.normal(size=7), values=rng.normal(size=7), returns=rng.normal(size=7))
    together = run(backend, *whole, count=7)
    parts = []
    for part in (slice(0, 3), slice(3, 7)):
        evaluation, minibatch = whole
        pieces = {"log_probs": evaluation.log_probs[0, part], "advantages": minibatch.advantages[0, part]}
        pieces |= {"values": evaluation.values[0, part], "returns": minibatch.returns[0, part]}
        parts.append(run(backend, *make(**pieces), count=7))
    for name, expected in together.items():
        assert parts[0][name] + parts[1][name] == pytest.approx(expected, abs=1e-12)


def test_no_valid_row_gives_zeros(backend):
    terms = run(backend, *make(log_probs=[1.0], advantages=[2.0], values=[3.0], valid=[0]))
    assert set(terms.values()) == {0.0}


def by_loop(evaluation, minibatch, clip_coef, vf_coef, ent_coef, clip_vloss, vf_clip_coef):
    """The definitions, sample by sample, in Python's own numbers."""
    rows = [index for index in np.ndindex(minibatch.valid.shape) if minibatch.valid[index]]
    policy = value = entropy = kl = clipped = 0.0
    for row in rows:
        log_ratio = float(evaluation.log_probs[row]) - float(minibatch.log_probs[row])
        ratio, advantage = math.exp(log_ratio), float(minibatch.advantages[row])
        policy -= min(ratio * advantage, min(max(ratio, 1 - clip_coef), 1 + clip_coef) * advantage) / len(rows)
        scale, new, old, ret = (
            float(x) for x in (evaluation.value_scale, evaluation.values[row], minibatch.values[row], minibatch.returns[row])
        )
        error = ((new - ret) / scale) ** 2
        if clip_vloss:
            held = old + min(max(new - old, -vf_clip_coef * scale), vf_clip_coef * scale)
            error = max(error, ((held - ret) / scale) ** 2)
        value += 0.5 * error / len(rows)
        entropy += float(evaluation.entropy[row]) / len(rows)
        kl += (ratio - 1 - log_ratio) / len(rows)
        clipped += (abs(ratio - 1) > clip_coef) / len(rows)
    loss = policy + vf_coef * value - ent_coef * entropy
    return {"loss": loss, "policy_loss": policy, "value_loss": value, "entropy": entropy, "approx_kl": kl, "clip_fraction": clipped}


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-6), (np.float64, 1e-12)])
@pytest.mark.parametrize("clip_vloss", [False, True])
def test_equals_the_loop_over_samples(backend, dtype, tolerance, clip_vloss):
    rng = np.random.default_rng(11)
    for scale, clip_coef in product((1.0, 2.5, 0.01), (0.0, 0.1, 0.3)):
        numbers = {name: rng.normal(size=12) for name in ("log_probs", "old_log_probs", "advantages", "entropy")}
        numbers |= {name: scale * rng.normal(size=12) for name in ("values", "returns", "old_values")}
        evaluation, minibatch = make(dtype, **numbers, value_scale=scale, valid=rng.random(12) < 0.7)
        options = {"clip_coef": clip_coef, "vf_coef": 0.7, "ent_coef": 0.02, "clip_vloss": clip_vloss, "vf_clip_coef": 0.5 * clip_coef}
        found, expected = run(backend, evaluation, minibatch, **options), by_loop(evaluation, minibatch, **options)
        for name, number in expected.items():
            assert found[name] == pytest.approx(number, rel=tolerance, abs=tolerance), name


def normalized(backend, advantages, valid=None, dtype=np.float32):
    array = np.asarray(advantages, dtype)[None]
    flags = np.ones(array.shape, bool) if valid is None else np.asarray(valid, bool)[None]
    return backend.numpy(backend.loss.normalize(backend.array(array), backend.array(flags)))[0]


def test_normalize_by_hand(backend):
    # 1, 2, 3, 6: mean 3, squares 4 + 1 + 0 + 9 = 14, std with n - 1: sqrt(14 / 3) = 2.160247
    np.testing.assert_allclose(normalized(backend, [1, 2, 3, 6]), np.array([-2, -1, 0, 3]) / 2.1602468994692867, rtol=1e-6)
    # The row in the middle is not valid: 1, 3 have mean 2 and std sqrt(2); it becomes 0 and moves nothing.
    np.testing.assert_allclose(normalized(backend, [1, 1e6, 3], [1, 0, 1]), [-(0.5**0.5), 0, 0.5**0.5], rtol=1e-6)
    np.testing.assert_allclose(normalized(backend, [1, np.nan, 3], [1, 0, 1]), [-(0.5**0.5), 0, 0.5**0.5], rtol=1e-6)


def test_normalize_at_the_edges(backend):
    np.testing.assert_array_equal(normalized(backend, [5.0]), [5.0])  # one sample has no deviation: it stays
    np.testing.assert_array_equal(normalized(backend, [5.0, 7.0], [0, 1])[1], 7.0)
    np.testing.assert_array_equal(normalized(backend, [1234.567] * 1000), np.zeros(1000))  # all equal: exactly 0, not rounding / rounding
    np.testing.assert_allclose(normalized(backend, [1e30, 3e30]), [-(0.5**0.5), 0.5**0.5], rtol=1e-6)  # its square overflows float32
    assert normalized(backend, [1.0, 2.0]).dtype == np.float32
    # 0 and 2e-8: mean 1e-8, std sqrt(2) 1e-8, and 1e-8 is added to it: 1 / (sqrt(2) + 1) = sqrt(2) - 1
    np.testing.assert_allclose(normalized(backend, [0.0, 2e-8]), [1 - 2**0.5, 2**0.5 - 1], rtol=1e-6)


def test_the_value_scale_may_be_a_plain_number(backend):
    evaluation, minibatch = make(log_probs=[0.0], old_values=[0.0], values=[5.0], returns=[6.0])
    plain = backend.evaluation(evaluation)
    plain = Evaluation(plain.log_probs, plain.entropy, plain.values, 1.0)
    errors = backend.loss.value_errors(plain, backend.minibatch(minibatch), LossCoefficients(0.9, 0.5, 0.0, True, 0.2))
    assert float(backend.numpy(errors)[0, 0]) == pytest.approx(0.5 * 5.8**2, abs=1e-12)
