"""Learners of all backends: equal weights after whole updates, and what an update guarantees on each backend."""

import copy
import json
import math
from dataclasses import dataclass, field, replace
from itertools import permutations

import jax.numpy as jnp
import numpy as np
import optree
import pytest
import torch
from gymnasium import spaces

from doubles.learners import BOX, CONFIG, JAX, NUMPY, SIDES, TORCH, Side, collect, of_unknown_weights, parameters
from inchworm.backends.learner import HISTORY, MAX_BAD_STEPS
from inchworm.backends.numpy.policy import fresh_weights
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.config.sections import PolicyConfig, PPOConfig
from inchworm.core.errors import BadNumberError, ConfigError, InchwormError, RolloutError
from inchworm.core.spaces import mask_space, with_mask
from inchworm.core.tensor_file import flatten_tree, read_tensor_file, unflatten_tree
from inchworm.policy.file import fingerprint
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.rollout import Rollout

ROW_FIELDS = (
    "observations", "actions", "log_probs", "rewards", "terminated", "episode_starts", "returns", "advantages", "values",
)  # fmt: skip
SAVED = ("observations", "actions", "log_probs", "advantages", "returns", "valid")
TERMS = ("loss", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")


@pytest.fixture(params=SIDES, ids=lambda side: side.name)
def side(request):
    return request.param


def with_the_dead(rollout, garbage=np.nan):
    """The rollout with an agent that died after row 7 of lane 1 and one that joined lane 0 at row 2; `garbage` in invalid rows."""
    data = {name: optree.tree_map(np.array, value) for name, value in rollout.to_dict().items() if not name.startswith(("cut", "episodes"))}
    valid = np.ones(rollout.rewards.shape, bool)
    valid[8:, 1] = valid[:2, 0] = False
    data |= {"valid": valid, "next_observations": rollout.next_observations}
    data["terminated"][7, 1], data["truncated"][7:, 1] = True, False
    for name in ("observations", "next_observations", "actions", "log_probs", "rewards"):
        for leaf in optree.tree_leaves(data[name]):
            leaf[~valid] = garbage if leaf.dtype.kind == "f" else (99 if garbage else 0)
    changed = Rollout.from_dict(data)
    assert not changed.cut_valid.all()
    return changed


# Whole updates, side by side
def check_alike(policies, stats, tolerance):
    first, *others = (policy.get_weights() for policy in policies)
    for other in others:
        assert first.keys() == other.keys()
        for name in first:
            np.testing.assert_allclose(first[name], other[name], rtol=tolerance, atol=tolerance, err_msg=name)
    for other in stats[1:]:
        assert stats[0].keys() == other.keys()
        for name in stats[0]:
            assert stats[0][name] == pytest.approx(other[name], rel=10 * tolerance, abs=10 * tolerance), name


def side_by_side(spec, config, dtype, *, updates=2, observations=None, change=lambda rollout: rollout):
    """All learners through the same updates from the same weights; each rollout is made by the first's policy of then."""
    weights = fresh_weights(spec, 3)
    rng = np.random.default_rng(4)
    for name, shape in spec.layers.items():  # the fresh action head is nearly 0: make the policy far from uniform
        weights[name] = (weights[name] + rng.normal(0, 0.2, shape)).astype(dtype)
    policies = [side.policy_of(spec, weights) for side in SIDES]
    learners = [side.learner(policy, config, seed=1) for side, policy in zip(SIDES, policies)]
    start, all_stats = parameters(policies[0]), []
    for seed in range(updates):
        seen = None if observations is None else observations((12, 3), np.random.default_rng(seed))
        rollout = of_unknown_weights(change(collect(policies[0], seed=seed, observations=seen)))  # they are those of one of them
        all_stats.append([learner.update(rollout) for learner in learners])
        check_alike(policies, all_stats[-1], 1e-10 if dtype == np.float64 else 1e-5)
    assert np.abs(parameters(policies[0]) - start).max() > 1e-3
    return all_stats


HYBRID = spaces.Dict({"z": spaces.Discrete(3, start=-1), "a": spaces.Box(-1, 1, (2,)), "m": spaces.MultiBinary(2)})
# 36 samples make minibatches of 8, 7, 7, 7 and 7; the clip is narrow, so that few steps reach both of its sides.
PLAIN = PPOConfig(learning_rate=3e-3, update_epochs=3, num_minibatches=5, clip_coef=0.02)
# Settings that do not meet in the code stand together: each row is compiled anew.
OPTIONS = {
    "plain": {},
    "minibatch_size, weight decay, scaled rewards": {
        "num_minibatches": None, "minibatch_size": 10, "weight_decay": 0.1, "scale_rewards": True,
    },
    "one minibatch": {"num_minibatches": 1},
    "accumulation 3": {"gradient_accumulation": 3, "normalize_advantages": "minibatch"},
    "no gradient limit, advantages as they are, no entropy, gamma and lambda": {
        "max_grad_norm": None, "normalize_advantages": "off", "ent_coef": 0.0, "gamma": 0.9, "gae_lambda": 0.5,
    },
    "tight gradient limit, much entropy": {"max_grad_norm": 0.05, "ent_coef": 0.5, "adam_eps": 1e-3},
    "clipped values, own bound, advantages of minibatches": {
        "clip_vloss": True, "vf_clip_coef": 0.3, "normalize_advantages": "minibatch",
    },
    "sequences of 4, clipped values": {"sequence_length": 4, "clip_vloss": True},
    "sequences of 5": {"sequence_length": 5, "gradient_accumulation": 2, "normalize_advantages": "minibatch"},  # 12 = 5 + 5 + 2
    "target_kl": {"target_kl": 1e-4, "update_epochs": 6},
    "rmsprop with decay": {"optimizer": "rmsprop", "weight_decay": 0.1, "adam_eps": 1e-3},
    "sgd": {"optimizer": "sgd", "learning_rate": 0.3, "max_grad_norm": 0.05},
    "sgd with decay": {"optimizer": "sgd", "learning_rate": 0.1, "weight_decay": 0.1, "gradient_accumulation": 2},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.1},
    "adaptive rate": {"learning_rate_schedule": "adaptive", "desired_kl": 2e-3, "update_epochs": 5},
    "frozen weights": {"freeze": ["actor.0.*", "log_std"], "weight_decay": 0.1, "max_grad_norm": 0.05},
    "frozen actor": {"freeze": ["actor.*"], "gradient_accumulation": 2},
}  # fmt: skip


IN_FLOAT32 = ("plain", "sequences of 5", "sgd")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, np.float64) for name in OPTIONS), *((name, np.float32) for name in IN_FLOAT32)],
    ids=lambda given: given if isinstance(given, str) else given.__name__,
)
def test_every_option_gives_equal_weights(name, dtype):
    options = OPTIONS[name]
    config = PolicyConfig(hidden_sizes=(8, 6), normalize_observations=True, normalize_values=True)
    stats = side_by_side(PolicySpec(BOX, HYBRID, config), PLAIN.replace(**options), dtype, updates=3)
    assert stats[0][0]["warm_up"] == 1.0  # the first rollout moves the statistics alone, the others also the weights; PopArt each time
    assert 0 < stats[2][0]["clip_fraction"] < 1
    if "target_kl" in options:
        assert 1 <= stats[1][0]["epochs"] < 6
    if "desired_kl" in options:  # of three updates, the first takes no step; of the others' epochs some raise the rate and some lower it
        rates = [stats[0]["learning_rate"] for stats in stats]
        assert len({PLAIN.learning_rate, *rates}) == 3


@pytest.mark.parametrize(
    ("case", "dead"),
    [*((name, True) for name in ("discrete+mask", "multi_discrete_rank_2+mask", "box_tanh", "dict_mix+mask")), ("nested+mask", False)],
    indirect=["case"],
)
def test_every_kind_of_space_gives_equal_weights(case, dead):
    spec = PolicySpec(case.observation_space(BOX), case.action_space, PolicyConfig(hidden_sizes=(8,), action_bounds=case.bounds))
    side_by_side(
        spec,
        PLAIN.replace(clip_vloss=True),
        np.float64,
        observations=lambda rows, rng: case.observations(BOX, rows, rng),
        change=with_the_dead if dead else lambda rollout: rollout,
    )


@pytest.mark.parametrize(
    ("activation", "shared_trunk", "hidden_sizes"),
    [
        ("tanh", False, ()),
        ("tanh", True, (5, 4, 6)),
        ("relu", False, (5, 4, 6)),
        ("elu", True, (5, 4, 6)),
        ("leaky_relu", False, (6,)),
        ("silu", True, (6,)),
    ],
)
def test_every_architecture_gives_equal_weights(activation, shared_trunk, hidden_sizes):
    config = PolicyConfig(hidden_sizes=hidden_sizes, activation=activation, shared_trunk=shared_trunk)
    side_by_side(PolicySpec(BOX, spaces.Discrete(3), config), PLAIN.replace(update_epochs=1), np.float64)


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop", "sgd"])
def test_a_learner_resumes_from_the_other_backends_state(optimizer):
    config = CONFIG.replace(optimizer=optimizer)
    spec = PolicySpec(BOX, HYBRID, PolicyConfig(hidden_sizes=(8,)))
    weights = {name: value.astype(np.float64) if name in spec.layers else value for name, value in fresh_weights(spec, 0).items()}
    ends = []
    for first, second in ((NUMPY, NUMPY), *permutations(SIDES, 2)):
        policy = first.policy_of(spec, weights)
        learner = first.learner(policy, config)
        learner.update(collect(policy))
        later = second.policy_of(spec, policy.get_weights())
        resumed = second.learner(later, config, seed=99)
        resumed.load_state_dict(learner.state_dict())
        resumed.update(collect(policy, seed=1))
        ends.append(parameters(later))
    for end in ends[1:]:
        np.testing.assert_allclose(end, ends[0], rtol=0, atol=1e-10)


# What an update changes, and what it never changes
def test_an_update_changes_weights_and_counts(side):
    policy = side.policy()
    learner, before = side.learner(policy), parameters(policy)
    stats = learner.update(collect(policy))
    assert (parameters(policy) != before).mean() > 0.9
    assert (learner.updates, learner.env_steps, policy.policy_version) == (1, 36, 1)
    measured = ("ratio_error", "effective_sample_size", "epochs", "skipped_steps", "staleness")
    for name in (*TERMS, "grad_norm", "explained_variance", "learning_rate", *measured):
        assert np.isfinite(stats[name]), name
    assert stats["ratio_error"] < 5e-5
    assert stats["epochs"] == 2
    learner.update(collect(policy, seed=1))
    assert (learner.updates, learner.env_steps, policy.policy_version) == (2, 72, 2)


def test_the_input_is_never_changed(side):
    policy = side.policy(observation_space=with_mask(BOX, mask_space(spaces.Discrete(3))), normalize_observations=True)
    rollout = with_the_dead(collect(policy), 0.0).map(np.array)  # an own, writable copy of every array
    before = [leaf.tobytes() for leaf in optree.tree_leaves(rollout.to_dict()) if isinstance(leaf, np.ndarray)]
    learner = side.learner(policy, CONFIG.replace(normalize_advantages="minibatch", max_staleness=1))
    learner.update(rollout)
    learner.update(rollout)
    assert len(before) > 10
    assert before == [leaf.tobytes() for leaf in optree.tree_leaves(rollout.to_dict()) if isinstance(leaf, np.ndarray)]


def test_the_same_seed_gives_the_same_bits(side):
    results = []
    for seed in (5, 5, 6):
        policy = side.policy()
        side.learner(policy, seed=seed).update(collect(policy))
        results.append(parameters(policy))
    np.testing.assert_array_equal(results[0], results[1])
    assert (results[0] != results[2]).any()


@pytest.mark.parametrize("empty", ["no steps", "no valid row"])
def test_an_empty_rollout_is_zeros_and_changes_nothing(side, empty):
    policy = side.policy()
    full = collect(policy)
    if empty == "no steps":
        rollout = Rollout.from_dict({name: full[name][:0] for name in ("observations", "actions", "log_probs", "rewards", "terminated")})
    else:
        rollout = replace(full, valid=np.zeros_like(full.valid))

    def my_loss(values):
        raise AssertionError

    before, learner = parameters(policy), side.learner(policy)
    stats = learner.update(rollout, [my_loss])
    assert all(stats[name] == 0.0 for name in (*TERMS, "grad_norm", "loss/my_loss"))
    assert stats["learning_rate"] == CONFIG.learning_rate
    np.testing.assert_array_equal(parameters(policy), before)
    assert (policy.policy_version, learner.updates) == (0, 0)


@pytest.mark.parametrize("options", [{}, {"normalize_observations": True}], ids=["plain", "normaliser"])
def test_every_update_has_the_same_metrics_whether_or_not_it_takes_a_step(side, options):
    policy = side.policy(**options)
    learner = side.learner(policy, CONFIG.replace(max_staleness=2))
    empty = replace(collect(policy), valid=np.zeros_like(collect(policy).valid))
    stats = [learner.update(rollout) for rollout in (empty, collect(policy), collect(policy), empty, collect(policy))]
    names = {"ratio_error", "staleness", "n_updates", "epochs", "skipped_steps", "explained_variance", "learning_rate", *TERMS}
    assert all(names <= one.keys() for one in stats)
    assert "behavior_kl" in stats[-1]  # of older weights, which the others of valid rows are not
    assert all(one.keys() - {"warm_up", "behavior_kl"} == stats[-1].keys() - {"behavior_kl"} for one in stats)
    assert [one["n_updates"] for one in stats] == [0, 1, 2, 2, 3]
    assert {type(value) for one in stats for value in one.values()} == {float}


@pytest.mark.parametrize(
    ("steps", "lanes", "options", "normalization"),
    [
        *((1, 1, {}, how) for how in ("batch", "minibatch", "off")),
        (1, 3, {"minibatch_size": 64}, "batch"),
        (3, 1, {"num_minibatches": 8}, "minibatch"),
        (12, 3, {"minibatch_size": 1}, "minibatch"),
        (12, 3, {"minibatch_size": 7}, "minibatch"),
    ],
)
def test_odd_batches_and_minibatches_stay_finite(side, steps, lanes, options, normalization):
    policy = side.policy()
    before = parameters(policy)
    config = PPOConfig(normalize_advantages=normalization, update_epochs=2, **options)
    stats = side.learner(policy, config).update(collect(policy, steps, lanes, episode_length=2))
    assert all(np.isfinite(list(stats.values())))
    assert stats["skipped_steps"] == 0
    assert (parameters(policy) != before).any()


def test_a_minibatch_without_valid_rows_makes_no_step(side):
    # One agent lives in one row of 36: of 36 minibatches of one sample, one makes a step.
    policy = side.policy()
    valid = np.zeros((12, 3), bool)
    valid[5, 1] = True
    learner = side.learner(policy, PPOConfig(minibatch_size=1, update_epochs=1, weight_decay=0.1))
    stats = learner.update(replace(collect(policy), valid=valid))
    assert stats["skipped_steps"] == 35
    assert learner.state_dict()["moments"]["step"] == 1
    assert learner.env_steps == 1


def mask_of(number):
    """[..., 3] with the choice number % 3 legal, and the one after it where the number is odd."""
    return (np.eye(3)[number % 3] + (number % 2)[..., None] * np.eye(3)[(number + 1) % 3]).astype(np.int8)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [
        {"num_minibatches": 4},
        {"minibatch_size": 5},
        {"num_minibatches": 3, "gradient_accumulation": 2},
        {"num_minibatches": 2, "sequence_length": 3, "gradient_accumulation": 2},  # 7 = 3 + 3 + 1
    ],
    ids=str,
)
def test_every_valid_sample_exactly_once_an_epoch(side, options):
    # Every array of row (t, b) tells its number 3 t + b.
    number = np.arange(21).reshape(7, 3)
    small = (number / 100).astype(np.float32)
    actions = spaces.Dict({"d": spaces.Discrete(3, start=4), "g": spaces.Box(-1, 1, (2,))})
    valid = np.ones((7, 3), bool)
    valid[0, 0] = valid[4, 2] = False
    data = {
        "observations": {"x": np.stack([small] * 3, -1), "action_mask": {"d": mask_of(number)}},
        "actions": {"d": 4 + number % 3, "g": np.stack([small, -small], -1)},
        "log_probs": -small,
        "rewards": number.astype(np.float32),
        "terminated": np.ones((7, 3), bool),
        "valid": valid,
    }
    seen = []

    def record(minibatch, values):
        side.record(seen, {name: getattr(minibatch, name) for name in (*ROW_FIELDS, "valid")})
        return side.answer(0.0, 0.0, values)

    policy = side.policy(with_mask(spaces.Dict({"x": BOX}), mask_space(actions)), actions)
    side.learner(policy, PPOConfig(update_epochs=3, normalize_advantages="off", **options)).update(data, [record])
    numbers, orders = [], []
    for minibatch in seen:
        alive = minibatch["valid"]  # [L, n]
        rows = optree.tree_map(lambda leaf, alive=alive: leaf[alive], {name: minibatch[name] for name in ROW_FIELDS})
        found = rows["rewards"].astype(int)
        np.testing.assert_array_equal(rows["observations"]["action_mask"]["d"], mask_of(found))
        np.testing.assert_array_equal(rows["actions"]["d"], 4 + found % 3)
        for hundredths in (rows["observations"]["x"][:, 0], *(rows["actions"]["g"] * [1, -1]).T, -rows["log_probs"]):
            np.testing.assert_allclose(hundredths * 100, found, atol=1e-4)
        for returns in (rows["returns"], rows["advantages"] + rows["values"]):  # every row is terminal
            np.testing.assert_allclose(returns, found, atol=1e-4)
        assert (rows["terminated"] & rows["episode_starts"]).all()
        assert (np.diff(minibatch["rewards"], axis=0)[alive[1:] & alive[:-1]] == 3).all()  # time continues within a sequence
        numbers += found.tolist()
        orders.append(tuple(found.tolist()))
    assert [sorted(numbers[start : start + 19]) for start in (0, 19, 38)] == [sorted(set(range(21)) - {0, 14})] * 3
    assert len(set(orders)) == len(orders)  # each epoch is shuffled anew


def test_what_is_refused(side):
    policy = side.policy()
    rollout, learner = collect(policy), side.learner(policy)
    data = rollout.to_dict()
    with pytest.raises(RolloutError, match="lacks rewards"):
        learner.update({name: value for name, value in data.items() if name != "rewards"})
    with pytest.raises(RolloutError, match=r"observations: got float32\[12, 3, 2\], expected float32\[T, B, 3\]"):
        learner.update(data | {"observations": rollout.observations[..., :2], "cut_observations": rollout.cut_observations[..., :2]})
    with pytest.raises(RolloutError, match=r"actions: 3 at \(t=0, b=0\) is not in Discrete"):
        learner.update(data | {"actions": np.full_like(rollout.actions, 3)})
    bad = np.array(rollout.rewards)
    bad[4, 2] = np.nan
    with pytest.raises(BadNumberError, match=r"rewards at \(t=4, b=2\) is not finite"):
        learner.update(data | {"rewards": bad})
    assert (learner.updates, policy.policy_version) == (0, 0)


@pytest.mark.parametrize("normalization", ["batch", "minibatch"])
def test_garbage_in_dead_rows_changes_nothing(side, normalization):
    results = []
    for garbage in (0.0, np.nan, 1e30):
        space = with_mask(BOX, mask_space(spaces.Discrete(3)))
        policy = side.policy(observation_space=space, normalize_observations=True, normalize_values=True)
        learner = side.learner(policy, CONFIG.replace(clip_vloss=True, normalize_advantages=normalization))
        for seed in range(2):
            clean = collect(side.policy(observation_space=space), seed=seed)
            rollout = of_unknown_weights(with_the_dead(clean, garbage))
            stats = learner.update(replace(rollout, rewards=np.where(rollout.valid, rollout.rewards, 0)))
        assert learner.env_steps == 60
        assert all(np.isfinite(list(stats.values())))
        assert stats["skipped_steps"] == 0
        results.append(policy.get_weights())  # with the statistics of the normalisers
    for result in results[1:]:
        np.testing.assert_equal(result, results[0])


# Guards: staleness, ratio, KL, bad numbers
@pytest.mark.filterwarnings("error")
def test_staleness_is_reported_and_bounded_and_warned_of_where_no_age_is_expected(side):
    policy = side.policy()
    learner, old = side.learner(policy, CONFIG.replace(max_staleness=1)), collect(policy)
    assert [learner.update(old)["staleness"] for _ in range(2)] == [0.0, 1.0]
    with pytest.raises(RolloutError, match=r"2 updates old, more than ppo.max_staleness=1"):
        learner.update(old)
    assert (policy.policy_version, learner.updates) == (2, 2)
    assert learner.update(of_unknown_weights(old))["staleness"] == 0.0
    policy = side.policy()
    learner, old = side.learner(policy), collect(policy)
    learner.update(old)  # not stale
    with pytest.warns(UserWarning, match=r"made by weights that are 1 update old"):
        learner.update(old)
    learner.update(of_unknown_weights(old))


def test_weights_outside_the_history_are_stale_beyond_any_bound(side):
    """A version alone means nothing: another run has the same ones."""
    policy, other = side.policy(), side.policy(seed=1)
    foreign = collect(other)
    assert foreign.policy_version.tolist() == [policy.policy_version] * 3
    learner = side.learner(policy, CONFIG.replace(max_staleness=1000))
    with pytest.raises(RolloutError, match=r"weights that are not in the recent history of this policy, more than ppo.max_staleness=1000"):
        learner.update(foreign)
    assert policy.policy_version == learner.updates == 0
    with pytest.warns(UserWarning, match="made by weights that are not in the recent history"):
        assert side.learner(policy).update(foreign)["staleness"] == HISTORY
    before = collect(policy)
    changed = policy.get_weights()
    policy.set_weights(changed | {"actor.head.bias": changed["actor.head.bias"] + 1})  # from outside: the version is the same
    with pytest.raises(RolloutError, match="recent history"):
        learner.update(before)


def test_the_history_is_bounded_and_saved(side, monkeypatch):
    policy, config = side.policy(), CONFIG.replace(max_staleness=5, update_epochs=1)
    learner, rollouts = side.learner(policy, config), []
    for seed in range(3):
        rollouts.append(collect(policy, seed=seed))
        learner.update(rollouts[-1])
    resumed = side.learner(policy, config)
    resumed.load_state_dict(copy.deepcopy(learner.state_dict()))
    assert [resumed.update(rollout)["staleness"] for rollout in rollouts] == [3, 3, 3]
    old = {name: value for name, value in learner.state_dict().items() if name != "history"}  # of an older checkpoint
    resumed.load_state_dict(old)
    with pytest.raises(RolloutError, match="recent history"):
        resumed.update(rollouts[0])
    monkeypatch.setattr("inchworm.backends.learner.HISTORY", 2)
    resumed = side.learner(policy, config)
    resumed.load_state_dict(learner.state_dict())
    assert len(resumed.state_dict()["history"]) == 2


def test_the_effective_sample_size_by_hand_guards_the_update(side):
    whole = CONFIG.replace(num_minibatches=1, update_epochs=1)
    policy = side.policy()
    rollout = collect(policy)
    # Lane 0 was twice as likely before: its ratios are 1/2, the others' 1. n = 36: (12 · 0.5 + 24)² / (12 · 0.25 + 24) / 36 = 900 / 972
    lane = np.array([math.log(2), 0, 0], np.float32)
    off = replace(of_unknown_weights(rollout), log_probs=rollout.log_probs + lane)
    assert side.learner(side.policy(), whole).update(off)["effective_sample_size"] == pytest.approx(900 / 972, abs=1e-5)
    assert side.learner(side.policy(), whole).update(rollout)["effective_sample_size"] == pytest.approx(1, abs=1e-6)
    dead = np.ones((12, 3), bool)
    dead[:, 0] = False  # what is invalid does not count
    assert side.learner(side.policy(), whole).update(replace(off, valid=dead))["effective_sample_size"] == pytest.approx(1, abs=1e-6)
    before, learner = parameters(policy), side.learner(policy, whole.replace(min_effective_sample_size=0.95))
    with pytest.warns(UserWarning, match=r"effective_sample_size is 0.93, below ppo.min_effective_sample_size=0.95"):
        stats = learner.update(off)
    assert (stats["epochs"], stats["loss"]) == (0, 0)
    assert stats["effective_sample_size"] == pytest.approx(900 / 972, abs=1e-5)
    np.testing.assert_array_equal(parameters(policy), before)
    assert learner.update(of_unknown_weights(rollout))["epochs"] == 1


@pytest.mark.filterwarnings("error", "ignore:the rollout was made by")
def test_a_ratio_that_is_off_is_warned_of_where_it_should_be_1(side):
    policy = side.policy()
    rollout = collect(policy)
    wrong = replace(rollout, log_probs=rollout.log_probs + np.float32(0.01))
    with pytest.warns(UserWarning, match=r"ratio_error is 0.01: the policy that learns disagrees with the one that acted"):
        stats = side.learner(policy).update(wrong)
    assert stats["ratio_error"] == pytest.approx(1 - math.exp(-0.01), abs=1e-4)
    policy = side.policy()
    side.learner(policy).update(rollout)
    side.learner(policy).update(wrong)  # by other weights: an old rollout is allowed to disagree


def test_the_epochs_end_where_the_policy_has_moved_far_enough(side):
    policy = side.policy()
    rollout = collect(policy)
    free = side.learner(policy, CONFIG.replace(update_epochs=6)).update(rollout)
    assert free["epochs"] == 6
    policy = side.policy()
    learner = side.learner(policy, CONFIG.replace(update_epochs=6, target_kl=1e-12))
    stats = learner.update(rollout)
    assert stats["epochs"] == 1  # a whole epoch, then the look
    assert learner.state_dict()["moments"]["step"] == 4
    policy = side.policy()
    # The bound is 1.5 times the target: an epoch whose mean is just below it is followed by another.
    just = stats["approx_kl"] / 1.5
    assert side.learner(policy, CONFIG.replace(update_epochs=2, target_kl=just * 1.01)).update(rollout)["epochs"] == 2
    assert side.learner(side.policy(), CONFIG.replace(update_epochs=2, target_kl=just * 0.99)).update(rollout)["epochs"] == 1


@dataclass
class Flaw:
    """A custom loss that spoils the minibatches whose number is in `bad`, in the way `how`."""

    side: Side
    bad: frozenset[int]
    how: str = "nan loss"
    number: int = field(default=0)

    def count(self):
        self.number += 1
        return self.number - 1

    def __call__(self, values):
        number = self.side.next_number(self.count)
        value, slope = {"nan loss": (math.nan, 0.0), "infinite loss": (math.inf, 0.0), "nan gradient": (0.0, math.nan)}[self.how]
        if self.side is JAX:
            is_bad = jnp.isin(number, jnp.array(sorted(self.bad), int))
            return self.side.answer(jnp.where(is_bad, value, 0.0), jnp.where(is_bad, slope, 0.0), values)
        return self.side.answer(value, slope, values) if number in self.bad else self.side.answer(0.0, 0.0, values)


@pytest.mark.parametrize("how", ["infinite loss", "nan gradient"])
def test_a_bad_minibatch_moves_neither_weights_nor_moments(side, how):
    policy = side.policy()
    learner = side.learner(policy, CONFIG.replace(num_minibatches=1, update_epochs=1, weight_decay=0.1))
    learner.update(collect(policy))  # a good one, so that there are moments to harm
    before, moments = parameters(policy), learner.state_dict()["moments"]
    stats = learner.update(collect(policy, seed=1), [Flaw(side, frozenset({0}), how)])
    np.testing.assert_array_equal(parameters(policy), before)
    np.testing.assert_equal(learner.state_dict()["moments"], moments)
    assert stats["skipped_steps"] == 1
    assert all(np.isfinite(list(stats.values())))
    learner.update(collect(policy, seed=2))
    assert (parameters(policy) != before).any()
    assert np.isfinite(parameters(policy)).all()


@pytest.mark.parametrize("bad", [{1, 2}, {0, 1, 3, 4, 6, 7}], ids=str)
def test_bad_ones_between_good_ones_are_counted_and_left_out(side, bad):
    policy = side.policy()
    learner, flaw = side.learner(policy), Flaw(side, frozenset(bad))
    stats = learner.update(collect(policy), [flaw])
    assert flaw.number == 8
    assert stats["skipped_steps"] == len(bad)
    assert all(np.isfinite(list(stats.values())))
    assert np.isfinite(parameters(policy)).all()
    assert learner.state_dict()["moments"]["step"] == 8 - len(bad)


def test_three_in_a_row_stop_the_run_with_the_minibatch_saved_and_weights_as_before(side, tmp_path):
    space = with_mask(BOX, mask_space(spaces.Discrete(3)))
    steps = []
    for bad in ((), (1, 2, 3)):
        policy = side.policy(observation_space=space)
        rollout, seen = collect(policy), []
        learner = side.learner(policy, CONFIG.replace(update_epochs=1), dump_directory=tmp_path / "run" / "dumps")
        flaw = Flaw(side, frozenset(bad))

        def watch(policy, minibatch, values, seen=seen):
            side.record(seen, ({name: getattr(minibatch, name) for name in SAVED}, policy.get_weights()))
            return side.answer(0.0, 0.0, values)

        if not bad:
            learner.update(rollout, [flaw, watch])
        else:
            message = r"3 minibatches in a row \(loss nan, gradient norm .*bad_minibatch.safetensors"
            with pytest.raises(BadNumberError, match=message):
                learner.update(rollout, [flaw, watch])
            np.testing.assert_equal(policy.get_weights(), seen[1][1])  # as after the one good step
            assert (learner.updates, policy.policy_version) == (0, 0)
        steps.append(seen)
    np.testing.assert_equal(steps[0][1][1], steps[1][1][1])
    arrays, header = read_tensor_file(tmp_path / "run" / "dumps" / "bad_minibatch.safetensors", kind="minibatch", max_version=1)
    tree = unflatten_tree(arrays, header["structure"])
    last = steps[1][3][0]
    for name in SAVED:
        # The program that is compiled for an update may round advantages differently from the one that saves them.
        tolerance = 1e-6 if side is JAX and name == "advantages" else 0
        optree.tree_map(lambda a, b, t=tolerance: np.testing.assert_allclose(a, b, rtol=t, atol=t), tree[name], last[name])


def test_a_row_of_three_reaches_over_epochs_and_updates_and_ends_with_a_good_epoch(side, tmp_path):
    policy = side.policy()
    with pytest.raises(BadNumberError):  # the last of epoch 1, the first two of epoch 2
        side.learner(policy, dump_directory=tmp_path).update(collect(policy), [Flaw(side, frozenset({3, 4, 5}))])
    policy = side.policy()
    flaw = Flaw(side, frozenset({6, 7, 8}))  # the last two of one update, the first of the next
    learner = side.learner(policy)
    learner.update(collect(policy), [flaw])
    assert learner.state_dict()["bad_steps"] == 2
    resumed = side.learner(policy, dump_directory=tmp_path)
    resumed.load_state_dict(learner.state_dict())
    with pytest.raises(BadNumberError):
        resumed.update(collect(policy, seed=1), [flaw])
    policy = side.policy()
    flaw = Flaw(side, frozenset({2, 3, 8}))  # the last two of epoch 1; epoch 2 is good; the first of the next update
    learner = side.learner(policy)
    learner.update(collect(policy), [flaw])
    assert learner.state_dict()["bad_steps"] == 0
    assert learner.update(collect(policy, seed=1), [flaw])["skipped_steps"] == 1


def test_without_a_directory_the_minibatch_is_saved_where_the_message_says(side, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    policy = side.policy()
    with pytest.raises(BadNumberError):
        side.learner(policy).update(collect(policy), [Flaw(side, frozenset(range(MAX_BAD_STEPS)))])
    (found,) = tmp_path.glob("inchworm-*/bad_minibatch.safetensors")
    read_tensor_file(found, kind="minibatch", max_version=1)


def test_weights_that_are_not_finite_are_reported_before_they_are_used(side):
    policy = side.policy()
    rollout = collect(policy)
    policy.set_weights(policy.get_weights() | {"actor.head.bias": np.full(3, np.nan, np.float32)})
    rollout = replace(rollout, weights_fingerprint=np.full(3, fingerprint(policy.get_weights()), np.uint64))
    learner = side.learner(policy, CONFIG.replace(update_epochs=1, num_minibatches=1))
    with pytest.warns(UserWarning, match="ratio_error"), pytest.raises(BadNumberError, match=r"actor\.head\.bias is not finite"):
        learner.update(rollout)
    assert learner.updates == 0


@pytest.mark.filterwarnings("error")  # the overflow is looked for, not warned of line by line
def test_a_huge_reward_needs_a_value_normaliser_and_harms_nothing_without_one(side, tmp_path):
    # Without: ½ (1e30)² overflows float32, so the step is not taken, and three such minibatches stop the run.
    policy = side.policy()
    rollout = collect(policy)
    huge = replace(of_unknown_weights(rollout), rewards=rollout.rewards * np.float32(1e30))
    before = parameters(policy)
    with pytest.raises(BadNumberError, match="3 minibatches in a row"):
        side.learner(policy, dump_directory=tmp_path).update(huge)
    np.testing.assert_array_equal(parameters(policy), before)
    # With: the first update moves the statistics alone; from then on the loss is in units of 1e30.
    policy = side.policy(normalize_values=True)
    learner = side.learner(policy)
    assert learner.update(huge)["warm_up"] == 1
    stats = learner.update(huge)
    assert all(np.isfinite(list(stats.values())))
    assert stats["skipped_steps"] == 0
    assert 0 < stats["value_loss"] < 10


@pytest.mark.parametrize("pieces", [2, 100])
def test_gradient_accumulation_changes_nothing(side, pieces):
    def squares(values, valid):
        count = valid.sum()
        if side is not NUMPY:
            return (values**2 * valid).sum() / count
        return (values**2 * valid).sum() / count, {"values": 2 * values * valid / count}

    spec = PolicySpec(BOX, HYBRID, PolicyConfig(hidden_sizes=(8,)))
    weights = {name: value.astype(np.float64) if name in spec.layers else value for name, value in fresh_weights(spec, 0).items()}
    results, metrics = [], []
    for k in (1, pieces):
        policy = side.policy_of(spec, weights)
        config = CONFIG.replace(gradient_accumulation=k, normalize_advantages="minibatch", clip_vloss=True)
        metrics.append(side.learner(policy, config).update(collect(policy), [squares]))
        results.append(parameters(policy))
    np.testing.assert_allclose(results[1], results[0], rtol=0, atol=1e-12)
    for name, value in metrics[0].items():
        assert metrics[1][name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


def test_sequences_of_several_steps_give_a_memoryless_policy_the_same_minibatch(side):
    results = []
    for length in (1, 5):  # 12 = 5 + 5 + 2: the last sequence is padded
        policy = side.policy()
        side.learner(policy, PPOConfig(update_epochs=2, num_minibatches=1, sequence_length=length)).update(collect(policy))
        results.append(parameters(policy))
    np.testing.assert_allclose(results[0], results[1], rtol=0, atol=1e-5)


# Schedules, and a learner that is saved and restored
SCHEDULED = PPOConfig(
    learning_rate=0.1, clip_coef=0.4, ent_coef=0.02, update_epochs=1, num_minibatches=2,
    learning_rate_schedule="linear", clip_schedule="cosine", ent_schedule="linear",
)  # fmt: skip


def test_linear_and_cosine_by_hand(side):
    # 36 samples an update, 144 in all: the updates begin at 0, 1/4, 1/2, 3/4 and 1 of the run.
    policy = side.policy()
    learner = side.learner(policy, SCHEDULED, total_timesteps=144)
    rates, clips, entropies, moves = [], [], [], []
    for seed in range(6):
        coefficients = learner._coefficients()
        clips.append(coefficients.clip_coef)
        entropies.append(coefficients.ent_coef)
        before = parameters(policy)
        rates.append(learner.update(collect(policy, seed=seed))["learning_rate"])
        moves.append(np.abs(parameters(policy) - before).max())
    assert rates == pytest.approx([0.1, 0.075, 0.05, 0.025, 0, 0])  # past the end it stays at 0
    root = math.sqrt(0.5)  # cos(pi / 4)
    assert clips == pytest.approx([0.4, 0.2 * (1 + root), 0.2, 0.2 * (1 - root), 0, 0])
    assert entropies == pytest.approx([0.02, 0.015, 0.01, 0.005, 0, 0])
    assert 0.1 < moves[0] < 0.21  # two steps of about the rate each
    assert 0 < moves[3] < 0.06
    assert moves[4:] == [0, 0]


def test_the_value_clip_has_a_bound_of_its_own_or_that_of_the_ratio(side):
    # A step of 1 per weight moves every value far beyond 0.01 of the old one, so what the second step may do depends on the bound.
    def value_loss_and_coefficients(**options):
        policy = side.policy()
        config = PPOConfig(learning_rate=0.5, update_epochs=2, num_minibatches=1, clip_coef=0.2, clip_vloss=True, clip_schedule="linear")
        learner = side.learner(policy, config.replace(**options), total_timesteps=72)
        loss = learner.update(collect(policy))["value_loss"]
        return loss, (learner._coefficients().clip_coef, learner._coefficients().vf_clip_coef)

    same, halved = value_loss_and_coefficients()
    assert halved == (0.1, 0.1)  # half of the run is over
    assert value_loss_and_coefficients(vf_clip_coef=0.2) == (same, halved)
    narrow, halved = value_loss_and_coefficients(vf_clip_coef=0.01)
    assert halved == (0.1, 0.005)
    assert abs(narrow - same) > 0.01


def test_the_learning_rate_can_be_steered_from_outside_and_is_saved(side):
    policy = side.policy()
    learner = side.learner(policy, SCHEDULED.replace(num_minibatches=1), total_timesteps=144)
    learner.learning_rate_scale = 0.5
    before = parameters(policy)
    assert learner.update(collect(policy))["learning_rate"] == pytest.approx(0.05)
    assert np.abs(parameters(policy) - before).max() == pytest.approx(0.05, rel=0.05)  # Adam's first step is the rate
    restored = side.learner(policy, SCHEDULED, total_timesteps=144)
    restored.load_state_dict(learner.state_dict())
    assert restored.update(collect(policy))["learning_rate"] == pytest.approx(0.075 / 2)


# The log-probs of these rollouts are 0.3 too low, so every ratio is e^0.3 before the first step and approx_kl is e^0.3 - 1 - 0.3 = 0.0499.
@pytest.mark.parametrize(
    ("desired_kl", "factor"),
    [
        (0.024, 1 / 1.5),  # above twice 0.024
        (0.026, 1.0),
        (0.098, 1.0),
        (0.102, 1.5),  # below half of 0.102
    ],
)
def test_the_adaptive_rate_by_hand(side, desired_kl, factor):
    config = PPOConfig(learning_rate=1e-4, learning_rate_schedule="adaptive", desired_kl=desired_kl, num_minibatches=1, target_kl=0.1)
    policy = side.policy()
    rollout = of_unknown_weights(collect(policy))
    rollout = replace(rollout, log_probs=rollout.log_probs - np.float32(0.3))
    before, learner = parameters(policy), side.learner(policy, config.replace(update_epochs=2))
    stats = learner.update(rollout)
    assert stats["learning_rate"] == pytest.approx(1e-4 * factor**2)  # after two epochs, between which the KL hardly moves
    # Adam's first two steps along an unchanged gradient are the rate each: the second epoch's is the changed one.
    assert np.abs(parameters(policy) - before).max() == pytest.approx(1e-4 * (1 + factor), rel=0.02)
    assert learner.learning_rate == stats["learning_rate"]  # with which the next update begins


def test_the_adaptive_rate_stays_within_its_bounds_and_composes_with_target_kl(side):
    config = PPOConfig(learning_rate=1e-4, learning_rate_schedule="adaptive", num_minibatches=1, update_epochs=4)
    rates = {}
    for desired_kl, options in ((1e-3, {}), (10.0, {}), (1e-3, {"target_kl": 0.01})):
        policy = side.policy()
        rollout = of_unknown_weights(collect(policy))
        rollout = replace(rollout, log_probs=rollout.log_probs - np.float32(0.3))
        bounds = {"min_learning_rate": 5e-5, "max_learning_rate": 3e-4}
        stats = side.learner(policy, config.replace(desired_kl=desired_kl, **bounds, **options)).update(rollout)
        rates[desired_kl, stats["epochs"]] = stats["learning_rate"]
    # 1e-4 / 1.5² would be 4.4e-5, 1e-4 · 1.5³ = 3.4e-4; an update that target_kl ends after one epoch lowers the rate once.
    assert rates == {(1e-3, 4): pytest.approx(5e-5), (10.0, 4): pytest.approx(3e-4), (1e-3, 1): pytest.approx(1e-4 / 1.5)}


def test_constant_schedules_need_no_length_and_others_do(side):
    policy = side.policy()
    side.learner(policy, PPOConfig(learning_rate_schedule="adaptive")).update(collect(policy))
    learner = side.learner(policy, PPOConfig(learning_rate=0.1))
    assert [learner.update(collect(policy))["learning_rate"] for _ in range(2)] == [0.1, 0.1]
    assert learner.progress == 0.0
    for name in ("learning_rate_schedule", "clip_schedule", "ent_schedule"):
        learner = side.learner(policy, PPOConfig(**{name: "linear"}))
        with pytest.raises(ConfigError, match=rf'ppo.{name}="linear" needs the run\'s length: {type(learner).__name__}\('):
            learner.update(collect(policy))


ADAPTIVE = {"learning_rate": 0.01, "learning_rate_schedule": "adaptive"}
NORMALIZED = {"normalize_observations": True, "normalize_values": True}


@pytest.mark.parametrize(
    ("options", "rate", "stop"), [({}, {}, 2), ({}, ADAPTIVE, 3), (NORMALIZED, {}, 3), (NORMALIZED, ADAPTIVE, 1)], ids=repr
)
def test_a_resumed_learner_ends_with_the_same_bits(side, options, rate, stop):
    rollouts = [collect(side.policy(None, HYBRID, **options), seed=seed) for seed in range(4)]

    def learner_of(policy):
        config = SCHEDULED.replace(update_epochs=2, weight_decay=0.01, target_kl=0.5, max_staleness=3, **rate)
        return side.learner(policy, config, seed=3, total_timesteps=200)

    straight = side.policy(None, HYBRID, **options)
    learner = learner_of(straight)
    rates = {learner.update(rollout)["learning_rate"] for rollout in rollouts}
    assert len(rates) > 1

    first = side.policy(None, HYBRID, **options)
    learner_before = learner_of(first)
    for rollout in rollouts[:stop]:
        learner_before.update(rollout)
    # Through what a file can hold: plain data and arrays.
    arrays, structure = flatten_tree(learner_before.state_dict())
    state = unflatten_tree(arrays, json.loads(json.dumps(structure)))
    resumed = side.policy(None, HYBRID, 9, **options)  # begins with other weights
    resumed.set_weights(first.get_weights())
    learner_after = learner_of(resumed)
    learner_after.load_state_dict(state)
    for rollout in rollouts[stop:]:
        learner_after.update(rollout)
    np.testing.assert_equal(resumed.get_weights(), straight.get_weights())
    assert (learner_after.updates, learner_after.env_steps) == (learner.updates, learner.env_steps) == (4, 144)
    assert learner_after.learning_rate == learner.learning_rate
    assert json.dumps(learner_after.state_dict()["stream"]) == json.dumps(learner.state_dict()["stream"])


OPTIMIZERS = ("adam", "adamw", "rmsprop", "sgd", "muon")


def optimizers_of(side):
    return OPTIMIZERS if side is TORCH else OPTIMIZERS[:-1]


def with_optimizer(config, optimizer):
    return config.replace(optimizer=optimizer, weight_decay=0.01 if optimizer == "adamw" else 0.0)


def test_every_optimizer_resumes_with_the_same_bits(side):
    for optimizer in optimizers_of(side):
        rollouts = [collect(side.policy(None, HYBRID), seed=seed) for seed in range(3)]
        config = with_optimizer(CONFIG, optimizer).replace(max_staleness=3)
        straight, stopped, resumed = (side.policy(None, HYBRID, seed) for seed in (0, 0, 9))
        whole, before, after = (side.learner(policy, config, seed=3) for policy in (straight, stopped, resumed))
        for rollout in rollouts:
            whole.update(rollout)
        before.update(rollouts[0])
        before.update(rollouts[1])
        arrays, structure = flatten_tree(before.state_dict())  # what a file can hold
        after.load_state_dict(unflatten_tree(arrays, json.loads(json.dumps(structure))))
        resumed.set_weights(stopped.get_weights())
        after.update(rollouts[2])
        np.testing.assert_equal(resumed.get_weights(), straight.get_weights(), err_msg=optimizer)
        np.testing.assert_equal(after.state_dict(), whole.state_dict(), err_msg=optimizer)


def test_a_state_of_another_optimizer_is_refused(side):
    names = {"adam": "Adam", "adamw": "Adam"}
    kinds = [name for name in optimizers_of(side) if name != "adamw"]  # which has Adam's state
    for ours in kinds:
        for theirs in kinds:
            if ours != theirs:
                learner, other = (side.learner(side.policy(), with_optimizer(CONFIG, name)) for name in (ours, theirs))
                with pytest.raises(InchwormError, match=f"this state is of {theirs}, and .*{names.get(ours, ours)} was to be restored"):
                    learner.load_state_dict(other.state_dict())


@pytest.mark.parametrize("optimizer", ["rmsprop", "sgd"])
def test_a_bad_minibatch_leaves_every_optimizer_alone(side, optimizer):
    policy = side.policy()
    learner = side.learner(policy, CONFIG.replace(num_minibatches=1, update_epochs=1, optimizer=optimizer, weight_decay=0.1))
    learner.update(collect(policy))
    before, saved = parameters(policy), copy.deepcopy(learner.state_dict()["moments"])
    assert learner.update(collect(policy, seed=1), [Flaw(side, frozenset({0}))])["skipped_steps"] == 1
    np.testing.assert_array_equal(parameters(policy), before)
    np.testing.assert_equal(learner.state_dict()["moments"], saved)


def test_rmsprop_and_sgd_by_hand(side):
    """The gradient of the first step, from the change that plain gradient descent makes, gives the steps of the others."""
    config = PPOConfig(learning_rate=0.5, update_epochs=1, num_minibatches=1, max_grad_norm=None, optimizer="sgd")

    def change(**options):
        policy = side.policy(dtype=np.float64)
        before = parameters(policy)
        side.learner(policy, config.replace(**options)).update(collect(policy))
        return before, parameters(policy) - before

    weights, moved = change()
    gradient = moved / -0.5
    assert np.abs(gradient).max() > 0.01
    # square = 0.01 g², so the step is g / (0.1 |g| + eps)
    expected = -0.5 * gradient / (0.1 * np.abs(gradient) + 1e-5)
    np.testing.assert_allclose(change(optimizer="rmsprop")[1], expected, rtol=1e-9, atol=1e-12)
    # Weight decay shrinks the weights by 0.5 · 0.2 of themselves, apart from the gradient.
    np.testing.assert_allclose(change(weight_decay=0.2)[1], moved - 0.1 * weights, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(change(optimizer="rmsprop", weight_decay=0.2)[1], expected - 0.1 * weights, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("share", "expected"), [(0.25, 0.25), (0.999, 0.999), (4.0, 1.0)])
def test_the_gradient_limit_by_hand(side, share, expected):
    """A plain step goes along the gradient g; with a limit m it goes along g · min(1, m / |g|), |g| being the norm over all weights."""
    config = PPOConfig(learning_rate=0.5, update_epochs=1, num_minibatches=1, max_grad_norm=None, optimizer="sgd")

    def change(limit):
        policy = side.policy(dtype=np.float64)
        before = parameters(policy)
        stats = side.learner(policy, config.replace(max_grad_norm=limit)).update(collect(policy))
        return stats["grad_norm"], (parameters(policy) - before) / -0.5

    norm, gradient = change(None)
    assert norm == pytest.approx(np.sqrt(np.sum(gradient**2)), rel=1e-6)
    limited_norm, limited = change(share * norm)
    assert limited_norm == norm  # reported as it was before
    np.testing.assert_allclose(limited, expected * gradient, rtol=1e-4, atol=1e-12)


def test_a_saved_state_is_a_copy_and_all_of_it_is_restored(side):
    policy = side.policy()
    learner = side.learner(policy)
    learner.update(collect(policy))
    state = learner.state_dict()
    before = copy.deepcopy(state)
    assert max(np.abs(leaf).max() for leaf in optree.tree_leaves(before["moments"])) > 0
    learner.update(collect(policy, seed=1))
    np.testing.assert_equal(state, before)
    other = side.learner(side.policy(), seed=77)
    other.load_state_dict(state)
    np.testing.assert_equal(other.state_dict(), before)


def test_a_state_of_another_policy_is_refused(side):
    # A layer of width 1 would otherwise be spread over one of width 8 without a word.
    learner = side.learner(side.policy(hidden_sizes=(8,)))
    with pytest.raises(InchwormError, match=r"mean of actor.0.weight has shape \(1, 3\); the policy needs \(8, 3\)"):
        learner.load_state_dict(side.learner(side.policy(hidden_sizes=(1,))).state_dict())
    with pytest.raises(InchwormError, match=r"does not fit the policy: \['log_std'\] are only on one side"):
        learner.load_state_dict(side.learner(side.policy(None, HYBRID)).state_dict())
    rmsprop = CONFIG.replace(optimizer="rmsprop", update_epochs=1)
    learner, states = side.learner(side.policy(hidden_sizes=(8,)), rmsprop), []
    for policy in (side.policy(hidden_sizes=(1,)), side.policy(None, HYBRID)):
        other = side.learner(policy, rmsprop)
        other.update(collect(policy))
        states.append(other.state_dict())
    with pytest.raises(InchwormError, match=r"square_avg of actor.0.weight has shape \(1, 3\); the policy needs \(8, 3\)"):
        learner.load_state_dict(states[0])
    with pytest.raises(InchwormError, match=r"which has no log_std|of actor.head.weight has shape"):
        learner.load_state_dict(states[1])


# Frozen weights
def norm_of(side, freeze, **options):
    """The gradient norm of the first step of a learner that freezes these weights."""
    policy = side.policy(None, HYBRID, seed=1)
    config = PPOConfig(update_epochs=1, num_minibatches=1, freeze=freeze, **options)
    return side.learner(policy, config).update(collect(policy))["grad_norm"]


def test_the_gradient_norm_counts_what_is_trained(side):
    whole, actor, rest = (norm_of(side, freeze, gradient_accumulation=2) for freeze in ((), ("actor.*",), ("critic.*", "log_std")))
    assert min(actor, rest) > 0.1
    assert actor**2 + rest**2 == pytest.approx(whole**2, rel=1e-4)


def test_frozen_weights_stay_to_the_bit_and_the_others_learn(side):
    policy = side.policy(None, HYBRID, seed=1)
    before, seen = policy.get_weights(), []

    def watching(policy, values):
        side.record(seen, policy.get_weights()["critic.0.weight"])
        return side.answer(0.0, 1.0, values)

    config = CONFIG.replace(freeze=("critic.*", "*.bias"), weight_decay=0.1, gradient_accumulation=2)
    learner = side.learner(policy, config)
    assert learner.frozen == {name for name in before if name.startswith("critic.") or name.endswith(".bias")}
    for seed in range(2):
        stats = learner.update(collect(policy, seed=seed), [watching])
    assert stats.get("grad_norm/watching", 0.0) == 0  # the loss reads the values, whose weights are all frozen
    after = policy.get_weights()
    same = {name for name in before if np.array_equal(before[name], after[name])}
    assert same == learner.frozen
    assert all(np.array_equal(weight, before["critic.0.weight"]) for weight in seen)  # within an update, too
    assert learner.state_dict()["moments"]["mean"].keys() == {"actor.0.weight", "actor.head.weight", "log_std"}
    again = side.learner(side.policy(None, HYBRID, seed=1), config)
    again.load_state_dict(learner.state_dict())
    for name, moment in learner.state_dict()["moments"]["mean"].items():
        np.testing.assert_array_equal(again.state_dict()["moments"]["mean"][name], moment)
    with pytest.raises(InchwormError, match="are only on one side"):
        side.learner(side.policy(None, HYBRID), CONFIG).load_state_dict(learner.state_dict())


def test_a_normaliser_is_frozen_as_a_whole_and_with_the_value_head(side):
    options = {"normalize_observations": True, "normalize_values": True}
    policy = side.policy(**options)
    side.learner(policy).update(collect(policy))  # gives the statistics data
    for freeze, still in (
        (("observation_normalizer.mean",), {"observation_normalizer"}),
        (("value_normalizer.*",), {"value_normalizer"}),
        (("critic.head.bias",), {"value_normalizer", "critic.head.bias"}),
    ):
        before = policy.get_weights()
        side.learner(policy, CONFIG.replace(freeze=freeze)).update(of_unknown_weights(collect(policy, seed=1)))
        after = policy.get_weights()
        same = {name for name in before if np.array_equal(before[name], after[name])}
        assert {name if name.startswith("critic") else name.partition(".")[0] for name in same} == still


def test_values_stay_in_reward_units_where_the_value_head_is_frozen(side):
    """Without steps nothing moves: neither a rescaled head with old statistics, nor an old head with new ones."""
    policy = side.policy(normalize_values=True)
    side.learner(policy).update(collect(policy))
    seen = np.random.default_rng(0).normal(size=(1, 5, 3)).astype(np.float32)
    before = values_of(policy, seen)
    config = CONFIG.replace(freeze=("critic.head.weight",), learning_rate=0.0)
    side.learner(policy, config).update(of_unknown_weights(collect(policy, seed=1)))
    np.testing.assert_array_equal(values_of(policy, seen), before)


def values_of(policy, seen):
    return np.asarray(policy.value(torch.from_numpy(seen) if isinstance(policy, TorchPolicy) else seen))


def test_what_cannot_be_frozen_is_refused(side):
    policy = side.policy(normalize_observations=True)
    with pytest.raises(ConfigError, match=r"ppo.freeze: no weight of the policy matches 'actr.\*'; close to it: actor"):
        side.learner(policy, CONFIG.replace(freeze=("critic.*", "actr.*"))).update(collect(policy))
    with pytest.raises(ConfigError, match=r"ppo.freeze matches every weight that could be trained"):
        side.learner(policy, CONFIG.replace(freeze=("*",)))
    with pytest.raises(ConfigError, match=r"ppo.freeze keeps observation_normalizer without data; begin with a policy that has some"):
        side.learner(policy, CONFIG.replace(freeze=("observation_*",))).update(collect(policy))
