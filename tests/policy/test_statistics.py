"""Running statistics by hand, far from zero and in any order of merging; the normalizers of a policy as named weights."""

import itertools

import numpy as np
import pytest
import torch
from gymnasium import spaces

from inchworm.config.sections import PolicyConfig
from inchworm.policy.spec import PolicySpec
from inchworm.policy.statistics import PolicyStatistics, ReturnNormalizer, RunningMeanStd


def test_before_any_data():
    rms = RunningMeanStd((2,))
    assert rms.mean.tolist() == [0, 0]
    assert rms.var.tolist() == [1, 1]
    assert rms.count == 0
    np.testing.assert_allclose(rms.std, np.sqrt(1 + 1e-8))
    rms.update(np.zeros((0, 2)))
    rms.merge(RunningMeanStd((2,)))
    assert (rms.count, rms.var.tolist()) == (0, [1, 1])


def test_by_hand():
    rms = RunningMeanStd()
    rms.update([1.0, 3.0])
    # mean 2, population variance ((1 - 2)^2 + (3 - 2)^2) / 2 = 1
    assert (float(rms.mean), float(rms.var), rms.count) == (2, 1, 2)
    rms.update(np.array(8.0))  # one sample, no batch axis
    # mean 12 / 3 = 4, variance (9 + 1 + 16) / 3
    assert float(rms.mean) == pytest.approx(4, abs=1e-15)
    assert float(rms.var) == pytest.approx(26 / 3, abs=1e-14)
    assert rms.count == 3
    assert float(rms.std) == pytest.approx(np.sqrt(26 / 3 + 1e-8))


def test_batches_of_any_rank_equal_all_at_once():
    data = np.random.default_rng(0).normal(3, 2, (7, 5, 4))
    one, many = RunningMeanStd((4,)), RunningMeanStd((4,))
    one.update(data)
    for row in data:
        many.update(row)
    np.testing.assert_allclose(one.mean, data.reshape(-1, 4).mean(0), rtol=1e-13)
    np.testing.assert_allclose(one.var, data.reshape(-1, 4).var(0), rtol=1e-13)
    np.testing.assert_allclose(many.mean, one.mean, rtol=1e-12)
    np.testing.assert_allclose(many.var, one.var, rtol=1e-12)
    assert many.count == one.count == 35


def test_where_leaves_samples_out():
    data = np.arange(12.0).reshape(3, 2, 2)
    where = np.array([[True, False], [False, False], [True, True]])
    rms = RunningMeanStd((2,))
    rms.update(data, where=where)
    # the samples (0, 1), (8, 9), (10, 11)
    np.testing.assert_allclose(rms.mean, [6, 7])
    np.testing.assert_allclose(rms.var, np.full(2, ((0 - 6) ** 2 + (8 - 6) ** 2 + (10 - 6) ** 2) / 3))
    assert rms.count == 3
    rms.update(np.full((1, 2), np.nan), where=np.array([False]))
    assert rms.count == 3
    assert np.isfinite(rms.mean).all()


@pytest.mark.parametrize("where", [np.ones((2,), bool), np.ones((3, 2)), np.ones((3, 2, 2), bool)])
def test_where_of_another_shape_or_kind_is_refused(where):
    with pytest.raises(ValueError, match=r"where must be bool\[3, 2\]"):
        RunningMeanStd((2,)).update(np.zeros((3, 2, 2)), where=where)


def test_samples_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="do not end in"):
        RunningMeanStd((3,)).update(np.zeros((5, 2)))
    with pytest.raises(ValueError, match="do not end in"):
        RunningMeanStd((3,)).update(np.zeros(()))
    with pytest.raises(ValueError, match="do not merge"):
        RunningMeanStd((3,)).merge(RunningMeanStd((2,)))


def test_an_offset_of_a_million_costs_nothing():
    noise = np.random.default_rng(1).standard_normal((1000, 50))
    rms = RunningMeanStd()
    for row in 1e6 + noise:
        rms.update(row)
    exact = (1e6 + noise).astype(np.longdouble)
    assert float(rms.mean) == pytest.approx(float(exact.mean()), rel=1e-14)
    assert float(rms.var) == pytest.approx(float(exact.var()), rel=1e-9)


def test_merging_in_any_order():
    rng = np.random.default_rng(3)
    parts = [rng.normal(mean, 1 + abs(mean), size) for mean, size in ((0, 5), (10, 1), (-3, 40), (2, 7))]
    whole = np.concatenate(parts)
    for order in itertools.permutations(range(4)):
        total = RunningMeanStd()
        for index in order:
            part = RunningMeanStd()
            part.update(parts[index])
            total.merge(part)
        assert float(total.mean) == pytest.approx(whole.mean(), rel=1e-12)
        assert float(total.var) == pytest.approx(whole.var(), rel=1e-12)


def test_a_constant_stays_finite():
    rms = RunningMeanStd((1,))
    rms.update(np.full((100, 1), 0.1, np.float32))
    assert rms.var[0] < 1e-20
    assert np.isfinite(rms.normalize(np.array([[0.1], [0.2]]))).all()


def test_normalize_and_back():
    rms = RunningMeanStd((2,))
    rms.update(np.array([[0.0, 10.0], [2.0, 30.0]]))  # means 1, 20; standard deviations 1, 10
    scaled = rms.normalize(np.array([[3.0, 0.0]]))
    np.testing.assert_allclose(scaled, [[2, -2]], rtol=1e-7)
    np.testing.assert_allclose(rms.denormalize(scaled), [[3, 0]], atol=1e-12)
    np.testing.assert_allclose(rms.normalize(np.array([[100.0, 0.0]]), clip=1.5), [[1.5, -1.5]])
    assert rms.normalize(np.zeros((1, 2), np.float32)).dtype == np.float32
    assert rms.normalize(np.zeros((1, 2), np.uint8)).dtype == np.float64
    assert rms.denormalize(np.zeros((1, 2), np.float32)).dtype == np.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_tensors_give_tensors(dtype):
    rms = RunningMeanStd((2,))
    rms.update(torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True))
    samples = torch.tensor([[5, 6]], dtype=dtype)
    for method in (rms.normalize, rms.denormalize):
        found, expected = method(samples), method(samples.numpy())
        assert found.dtype == (torch.float64 if dtype == torch.int64 else dtype)
        np.testing.assert_array_equal(found.numpy(), expected)


def test_the_state_of_scalar_statistics_holds_arrays():
    rms = RunningMeanStd()
    rms.update(np.array([1.0, 2.0]))
    assert [type(value) for value in rms.state_dict().values()] == [np.ndarray] * 3  # NumPy's own scalars cannot be saved


def test_state_round_trip():
    rms = RunningMeanStd((3,))
    rms.update(np.random.default_rng(0).standard_normal((9, 3)))
    state = rms.state_dict()
    assert sorted(state) == ["count", "mean", "var"]
    other = RunningMeanStd((3,))
    other.load_state_dict(state)
    state["mean"][:] = 99  # neither side shares its arrays
    assert other.mean.tolist() == rms.mean.tolist()
    assert (other.var.tolist(), other.count) == (rms.var.tolist(), 9)
    other.update(np.ones((1, 3)))
    assert rms.count == 9
    with pytest.raises(ValueError, match="do not fit"):
        RunningMeanStd((2,)).load_state_dict(rms.state_dict())
    with pytest.raises(ValueError, match="mean, var and count"):
        RunningMeanStd((3,)).load_state_dict({"mean": 0})


def test_a_copy_is_equal_and_independent():
    original = RunningMeanStd((2,))
    original.update(np.array([[1.0, 2.0], [3.0, 6.0]]))
    copy = original.copy()
    original.update(np.array([[100.0, 100.0]]))
    np.testing.assert_array_equal(copy.mean, [2.0, 4.0])  # (1 + 3) / 2, (2 + 6) / 2
    assert (copy.count, original.count) == (2, 3)


def test_returns():
    normalizer = ReturnNormalizer()
    assert normalizer.mean == 0
    assert normalizer.std == pytest.approx(1)
    normalizer.update(np.array([[100.0, 300.0], [np.nan, 0.0]]), where=np.array([[True, True], [False, False]]))
    assert normalizer.mean == 200
    assert normalizer.std == pytest.approx(100)
    assert normalizer.rms.count == 2
    # mean and scale are both undone: a normalised value of 0.5 is 250 in reward units, not 50
    assert float(normalizer.denormalize(np.array(0.5))) == pytest.approx(250)
    assert float(normalizer.normalize(np.array(250.0))) == pytest.approx(0.5)
    other = ReturnNormalizer()
    other.load_state_dict(normalizer.state_dict())
    assert (other.mean, other.std) == (normalizer.mean, normalizer.std)


SPACE = spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(-9, 9, (2,))})


def statistics_of(**options):
    return PolicyStatistics(PolicySpec(SPACE, spaces.Discrete(2), PolicyConfig(**options)))


def test_off_means_nothing():
    statistics = statistics_of()
    statistics.update(np.ones((2, 1, 4)), np.ones((2, 1)), np.ones((2, 1), bool))
    assert not statistics.pending
    assert statistics.to_weights() == {}
    assert (statistics.value_mean, statistics.value_std) == (0.0, 1.0)


def test_pending_until_the_first_rollout():
    for options in ({"normalize_observations": True}, {"normalize_values": True}):
        statistics = statistics_of(**options)
        assert statistics.pending
        statistics.update(np.ones((2, 1, 4)), np.ones((2, 1)), np.zeros((2, 1), bool))
        assert statistics.pending  # no row was valid
        statistics.update(np.ones((2, 1, 4)), np.ones((2, 1)), np.ones((2, 1), bool))
        assert not statistics.pending


def test_centre_and_scale_by_hand():
    # b is 1 and 3: mean 2, variance 1; the one-hot entries of a stay as they are.
    statistics = statistics_of(normalize_observations=True, normalize_values=True)
    flat = np.array([[[1, 0, 1, 5]], [[0, 1, 3, 5]]], np.float32)
    statistics.update(flat, np.array([[2.0], [6.0]]), np.ones((2, 1), bool))
    center, inverse_std = statistics.observation_scale
    np.testing.assert_allclose(center, [0, 0, 2, 5])
    np.testing.assert_allclose(inverse_std, [1, 1, 1, 1e4], rtol=1e-6)  # a constant: sqrt(0 + 1e-8) = 1e-4
    assert center.dtype == inverse_std.dtype == np.float32
    assert statistics.value_mean == 4.0
    np.testing.assert_allclose(statistics.value_std, np.sqrt(4 + 1e-8))


def test_to_named_weights_and_back():
    statistics, other = (statistics_of(normalize_observations=True, normalize_values=True) for _ in range(2))
    statistics.update(np.random.default_rng(0).normal(size=(5, 2, 4)), np.arange(10.0).reshape(5, 2), np.ones((5, 2), bool))
    named = statistics.to_weights()
    assert set(named) == {f"{kind}_normalizer.{name}" for kind in ("observation", "value") for name in ("mean", "var", "count")}
    other.from_weights(named)
    np.testing.assert_equal(other.to_weights(), named)
    named["observation_normalizer.mean"] += 1  # a copy
    assert (other.to_weights()["observation_normalizer.mean"] != named["observation_normalizer.mean"]).all()


def test_what_a_central_critic_reads_has_statistics_of_its_own():
    # The world's one number is 1 and 3: mean 2, variance 1. It counts once per copy, whichever agents live there.
    shared = spaces.Box(-9, 9, (1,))
    config = PolicyConfig(normalize_observations=True, central_critic=True)
    statistics = PolicyStatistics(PolicySpec(SPACE, spaces.Discrete(2), config, global_state_space=shared, lanes_per_copy=2))
    assert statistics.pending
    world = np.array([[[1, 0, 1]], [[1, 0, 3]]], np.float32)  # [T, E, 3]: the place in the copy, as two entries, stays as it is
    statistics.update(np.ones((2, 2, 4), np.float32), np.ones((2, 2)), np.array([[True, True], [True, False]]), world)
    assert not statistics.pending
    center, inverse_std = statistics.global_scale
    np.testing.assert_allclose(center, [0, 0, 2])
    np.testing.assert_allclose(inverse_std, [1, 1, 1], rtol=1e-6)
    again = PolicyStatistics(PolicySpec(SPACE, spaces.Discrete(2), config, global_state_space=shared, lanes_per_copy=2))
    again.from_weights(statistics.to_weights())
    np.testing.assert_array_equal(again.global_scale[0], center)
