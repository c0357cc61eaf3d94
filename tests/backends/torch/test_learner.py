"""`PPOOptimizer.update`: what it changes, what it never changes, what it refuses, and every sample exactly once an epoch."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import optree
import pytest
import torch
from gymnasium import spaces

from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.backends.torch.gae import compute_advantages
from inchworm.backends.torch.learner import PPOOptimizer, pick_device
from inchworm.backends.torch.loss import normalize
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.config.sections import PPOConfig
from inchworm.core.errors import BadNumberError, ConfigError, RolloutError
from inchworm.core.protocols import Learner
from inchworm.rollout.rollout import Rollout, combine_rollouts

CONFIG = PPOConfig(learning_rate=1e-2, update_epochs=2, num_minibatches=4, rollout_steps=12)
TERMS = ("loss", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")


def learner_of(policy, config=CONFIG, **options):
    return PPOOptimizer(policy, config, **{"device": "cpu", **options})


def test_an_update_changes_weights_and_counts(make_policy, collect, parameters):
    policy = make_policy()
    learner, before, rollout = learner_of(policy), parameters(policy), collect(policy)
    assert isinstance(learner.updates, int)
    stats = learner.update(rollout)
    assert (parameters(policy) != before).mean() > 0.9
    assert (learner.updates, learner.env_steps, policy.policy_version) == (1, 36, 1)
    for name in (*TERMS, "grad_norm", "explained_variance", "learning_rate", "ratio_error", "epochs", "skipped_steps", "staleness"):
        assert np.isfinite(stats[name]), name
    assert stats["ratio_error"] < 5e-5
    assert stats["epochs"] == 2
    assert dict(stats) == {name: stats[name] for name in stats}
    assert len(stats) == len(list(stats))
    learner.update(collect(policy, seed=1))
    assert (learner.updates, learner.env_steps, policy.policy_version) == (2, 72, 2)


def test_it_learns_what_pays(make_policy, collect):
    # The reward is obs[0] * action: after some updates the mean reward of fresh rollouts is clearly higher.
    policy = make_policy(hidden_sizes=(16,))
    learner = learner_of(policy, CONFIG.replace(update_epochs=4))
    first = collect(policy, 40, 8, seed=100).rewards.mean()
    for seed in range(15):
        learner.update(collect(policy, 40, 8, seed=seed))
    assert collect(policy, 40, 8, seed=101).rewards.mean() > first + 0.3


def test_the_input_is_never_changed(make_policy, collect):
    policy = make_policy(spaces.Dict({"x": spaces.Box(-2, 2, (3,)), "action_mask": spaces.MultiBinary(3)}), normalize_observations=True)
    rollout = collect(policy)
    dead = rollout.valid.copy()
    dead[3:5, 1] = False
    rollout = replace(rollout, valid=dead)
    copies = [leaf.copy() for leaf in optree.tree_leaves(rollout.to_dict()) if isinstance(leaf, np.ndarray)]
    learner = learner_of(policy)
    learner.update(rollout)
    learner.update(rollout)
    arrays = [leaf for leaf in optree.tree_leaves(rollout.to_dict()) if isinstance(leaf, np.ndarray)]
    assert len(arrays) == len(copies) > 10
    for array, copy in zip(arrays, copies):
        assert array.tobytes() == copy.tobytes()


def test_a_writable_rollout_is_not_changed_either(make_policy, collect):
    policy = make_policy()
    rollout = collect(policy).map(np.array)  # an own, writable copy of every array
    before = [leaf.tobytes() for leaf in optree.tree_leaves(rollout.to_dict()) if isinstance(leaf, np.ndarray)]
    learner_of(policy).update(rollout)
    assert before == [leaf.tobytes() for leaf in optree.tree_leaves(rollout.to_dict()) if isinstance(leaf, np.ndarray)]


def test_the_same_seed_gives_the_same_bits(make_policy, collect, parameters):
    results = []
    for seed in (5, 5, 6):
        policy = make_policy()
        learner = learner_of(policy, seed=seed)
        learner.update(collect(policy))
        results.append(parameters(policy))
    np.testing.assert_array_equal(results[0], results[1])
    assert (results[0] != results[2]).any()


@pytest.mark.parametrize("empty", ["no steps", "nobody alive"])
def test_an_empty_rollout_is_zeros_and_changes_nothing(make_policy, collect, parameters, empty):
    policy = make_policy()
    full = collect(policy)
    if empty == "no steps":
        needed = ("observations", "actions", "log_probs", "rewards", "terminated")
        rollout = Rollout.from_dict({name: full[name][:0] for name in needed})
    else:
        rollout = replace(full, valid=np.zeros_like(full.valid))
    before, learner = parameters(policy), learner_of(policy)
    stats = learner.update(rollout)
    assert all(stats[name] == 0.0 for name in (*TERMS, "grad_norm"))
    np.testing.assert_array_equal(parameters(policy), before)
    assert policy.policy_version == 0


@pytest.mark.parametrize(("steps", "lanes", "options"), [(1, 1, {}), (1, 3, {"minibatch_size": 64}), (3, 1, {"num_minibatches": 8})])
def test_a_batch_smaller_than_a_minibatch(make_policy, collect, parameters, steps, lanes, options):
    policy = make_policy()
    learner = learner_of(policy, PPOConfig(**options))
    before = parameters(policy)
    stats = learner.update(collect(policy, steps, lanes, episode_length=2))
    assert all(np.isfinite(list(stats.values())))
    assert (parameters(policy) != before).any()


@pytest.mark.parametrize("normalization", ["batch", "minibatch", "off"])
@pytest.mark.parametrize("size", [1, 7])  # 36 samples: minibatches of one, and of 6 with padding (a remainder of 1 after 5 of 7)
def test_odd_minibatches_stay_finite(make_policy, collect, normalization, size):
    policy = make_policy()
    learner = learner_of(policy, PPOConfig(minibatch_size=size, num_minibatches=None, normalize_advantages=normalization, update_epochs=1))
    stats = learner.update(collect(policy))
    assert all(np.isfinite(list(stats.values())))
    assert stats["skipped_steps"] == 0


class Recorder(TorchPolicy):
    """Keeps every minibatch that it is asked to learn from."""

    def evaluate(self, minibatch):
        if torch.is_grad_enabled():
            self.__dict__.setdefault("seen", []).append(minibatch)
        return super().evaluate(minibatch)


def identifiable(policy, steps, lanes, dead=()):
    """Observation, log-prob and reward of row (t, b) all tell which row it is."""
    number = np.arange(steps * lanes, dtype=np.float32).reshape(steps, lanes)
    valid = np.ones((steps, lanes), bool)
    for row in dead:
        valid[row] = False
    return Rollout.from_dict(
        {
            "observations": np.stack([number, number, number], -1) / 100,
            "actions": (number % 3).astype(np.int64),
            "log_probs": -number / 100,
            "rewards": number,
            "terminated": np.ones((steps, lanes), bool),
            "valid": valid,
        }
    )


@pytest.mark.parametrize(
    "options",
    [{"num_minibatches": 4}, {"minibatch_size": 5}, {"num_minibatches": 3, "gradient_accumulation": 2}, {"num_minibatches": 7}],
    ids=str,
)
def test_every_valid_sample_exactly_once_an_epoch(make_policy, options):
    policy = make_policy()
    policy = Recorder(policy.spec)
    config = PPOConfig(update_epochs=3, normalize_advantages="off", **options)
    learner = learner_of(policy, config)
    dead = [(0, 0), (4, 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        learner.update(identifiable(policy, 7, 3, dead))
    numbers, orders = [], []
    for minibatch in policy.seen:
        valid = minibatch.valid[0]
        number = (minibatch.observations[0, valid][:, 0] * 100).round().int()
        numbers += number.tolist()
        orders.append(tuple(number.tolist()))
        # Whatever belongs to a row stays with it: each field tells the same number.
        np.testing.assert_allclose(-minibatch.log_probs[0, valid] * 100, number, atol=1e-4)
        np.testing.assert_allclose(minibatch.rewards[0, valid], number)
        np.testing.assert_allclose(minibatch.returns[0, valid], number, atol=1e-4)  # every row is terminal: the return is its reward
        np.testing.assert_array_equal(minibatch.actions[0, valid], number % 3)
    alive = sorted(set(range(21)) - {0, 4 * 3 + 2})
    epochs = [sorted(numbers[start : start + 19]) for start in (0, 19, 38)]
    assert epochs == [alive] * 3
    assert len(set(orders)) == len(orders)  # each epoch is shuffled anew


@pytest.mark.parametrize(
    ("options", "steps"), [({"num_minibatches": 4}, 4), ({"minibatch_size": 10}, 4), ({"minibatch_size": 36}, 1), ({}, 8)]
)
def test_how_many_steps_an_epoch_takes(make_policy, collect, options, steps):
    policy = make_policy()
    learner = learner_of(policy, PPOConfig(update_epochs=1, **options))
    learner.update(collect(policy))  # 36 samples; 36 / 10 -> 4 minibatches of 9
    assert learner.optimizer.state_dict()["step"] == steps


def test_a_plain_mapping_is_taken(make_policy, collect, parameters):
    results = []
    for form in ("rollout", "mapping", "lists and next_observations"):
        policy = make_policy()
        rollout = collect(policy, 6, 2, episode_length=50)  # no ends inside: only the last rows have successors to give
        data = rollout.to_dict()
        if form.startswith("lists"):
            successors = np.concatenate([rollout.observations[1:], rollout.cut_observations[None]])
            needed = ("observations", "actions", "log_probs", "rewards", "terminated", "truncated")
            data = {name: rollout[name].tolist() if name == "rewards" else rollout[name] for name in needed}
            data["next_observations"] = successors
        learner_of(policy).update(rollout if form == "rollout" else data)
        results.append(parameters(policy))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_loaded_and_combined_rollouts_teach_the_same(make_policy, collect, parameters, tmp_path):
    results = []
    for way in ("fresh", "loaded", "combined"):
        policy = make_policy()
        rollout = collect(policy, 10, 4)
        if way == "loaded":
            rollout = Rollout.load(rollout.save(tmp_path / "r.safetensors"))
        if way == "combined":
            rollout = combine_rollouts([rollout.select_lanes([0, 1]), rollout.select_lanes([2, 3])])
        learner_of(policy).update(rollout)
        results.append(parameters(policy))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_rollouts_of_two_times_can_be_combined(make_policy, collect):
    policy = make_policy()
    learner = learner_of(policy)
    stats = learner.update(combine_rollouts([collect(policy, seed=seed) for seed in range(3)]))
    assert learner.env_steps == 108
    assert stats["ratio_error"] < 5e-5


def test_what_is_refused(make_policy, collect):
    policy = make_policy()
    rollout, learner = collect(policy), learner_of(policy)
    data = rollout.to_dict()
    with pytest.raises(RolloutError, match="lacks rewards"):
        learner.update({name: value for name, value in data.items() if name != "rewards"})
    with pytest.raises(RolloutError, match="did you mean observations"):
        learner.update({"obs": 1, **data})
    with pytest.raises(RolloutError, match=r"observations: got float32\[12, 3, 2\], expected float32\[T, B, 3\]"):
        learner.update(data | {"observations": rollout.observations[..., :2], "cut_observations": rollout.cut_observations[..., :2]})
    with pytest.raises(RolloutError, match="terminated: got float32"):
        learner.update(data | {"terminated": rollout.terminated.astype(np.float32)})
    with pytest.raises(RolloutError, match="actions"):
        learner.update(data | {"actions": rollout.actions.astype(np.float32)})
    with pytest.raises(RolloutError, match=r"actions: 3 at \(t=0, b=0\) is not in Discrete"):
        learner.update(data | {"actions": np.full_like(rollout.actions, 3)})
    with pytest.raises(RolloutError, match="log_probs"):
        learner.update(data | {"log_probs": rollout.log_probs[:-1]})
    bad = np.array(rollout.rewards)
    bad[4, 2] = np.nan
    with pytest.raises(BadNumberError, match=r"rewards at \(t=4, b=2\) is not finite"):
        learner.update(data | {"rewards": bad})
    assert learner.updates == 0
    assert policy.policy_version == 0


@pytest.mark.parametrize("normalization", ["batch", "minibatch", "off"])
def test_garbage_in_dead_rows_changes_nothing(make_policy, collect, parameters, normalization):
    space = spaces.Dict({"x": spaces.Box(-2, 2, (3,)), "action_mask": spaces.MultiBinary(3)})
    results, told = [], ("episodes", "cut_valid")  # left out: they would say that somebody lives there
    for garbage in (0.0, np.nan, 1e30):
        policy = make_policy(space)
        data = {name: optree.tree_map(np.array, value) for name, value in collect(policy).to_dict().items() if name not in told}
        valid = np.ones((12, 3), bool)
        valid[8:, 1] = valid[:2, 0] = False
        data["terminated"][7, 1] = True  # it died here
        data["truncated"][7, 1] = False
        data["truncated"][8:, 1] = False
        data["valid"] = valid
        for name in ("log_probs", "rewards"):
            data[name][~valid] = garbage
        data["observations"]["x"][~valid] = garbage
        data["observations"]["action_mask"][~valid] = 0
        data["actions"][~valid] = 99 if garbage else 0
        dead_cuts = ~valid[tuple(data["cut_rows"].T)]
        assert dead_cuts.any()
        data["cut_observations"]["x"][dead_cuts] = garbage
        needed = data["truncated"].copy()
        needed[-1] = True
        keep = needed[tuple(data["cut_rows"].T)]
        data["cut_rows"] = data["cut_rows"][keep]
        data["cut_observations"] = optree.tree_map(lambda leaf, keep=keep: leaf[keep], data["cut_observations"])
        learner = learner_of(policy, CONFIG.replace(clip_vloss=True, normalize_advantages=normalization))
        stats = learner.update(data)
        assert learner.env_steps == valid.sum() == 30
        assert all(np.isfinite(list(stats.values())))
        assert stats["skipped_steps"] == 0
        results.append(parameters(policy))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize(
    ("observation_space", "action_space"),
    [(spaces.Discrete(3, start=5), spaces.Discrete(3)), (spaces.Box(-2, 2, (3,)), spaces.MultiDiscrete([2, 3], start=[4, -9]))],
    ids=["observations", "actions"],
)
def test_dead_rows_may_hold_what_their_space_does_not(make_policy, collect, observation_space, action_space):
    policy = make_policy(observation_space, action_space)
    rollout = collect(policy)
    valid = rollout.valid.copy()
    valid[6:, 2] = False
    dead = {name: np.where(valid.reshape(12, 3, *[1] * (rollout[name].ndim - 2)), rollout[name], 0) for name in ("observations", "actions")}
    stats = learner_of(policy).update(
        replace(rollout, valid=valid, **{name: array.astype(rollout[name].dtype) for name, array in dead.items()})
    )
    assert all(np.isfinite(list(stats.values())))
    assert stats["ratio_error"] < 5e-5


def test_the_kl_stop_leaves_the_epochs(make_policy, collect):
    def epochs(target_kl, rate):
        policy = make_policy()
        learner = learner_of(policy, CONFIG.replace(update_epochs=6, target_kl=target_kl, learning_rate=rate))
        return learner.update(collect(policy, 24, 4))

    assert epochs(None, 0.1)["epochs"] == 6  # however far it goes
    assert epochs(None, 0.1)["approx_kl"] > 0.015
    assert epochs(0.01, 0.1)["epochs"] < 6
    assert epochs(1e-12, 1e-2)["epochs"] == 1  # checked after each epoch: at least one
    assert epochs(0.01, 1e-6)["epochs"] == 6  # small steps stay below 1.5 * 0.01


def test_staleness(make_policy, collect):
    policy = make_policy()
    learner = learner_of(policy, CONFIG.replace(max_staleness=1))
    old = collect(policy)
    assert learner.update(old)["staleness"] == 0
    assert learner.update(old)["staleness"] == 1  # its weights are one update old by now
    with pytest.raises(RolloutError, match=r"2 updates old, more than ppo.max_staleness=1"):
        learner.update(old)
    learner.update(collect(policy))
    unknown = Rollout.from_dict({**old.to_dict(), "weights_fingerprint": 0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert learner.update(unknown)["staleness"] == 0  # it says nothing of its origin: its log-probs are no surprise


def test_a_policy_that_disagrees_with_the_rollout_is_warned_about(make_policy, collect):
    policy = make_policy()
    rollout = collect(policy)
    moved = Rollout.from_dict({**rollout.to_dict(), "log_probs": rollout.log_probs + np.float32(0.1)})
    with pytest.warns(UserWarning, match="ratio_error is 0.095"):  # 1 - e^-0.1
        learner_of(policy).update(moved)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner_of(make_policy()).update(rollout)


@pytest.mark.parametrize("form", ["samples", "sequences"])
def test_compute_ppo_loss_gives_the_terms_of_the_update(make_policy, collect, form):
    policy = make_policy(action_space=spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(-1, 1, (2,))}))
    rollout = collect(policy)
    config = PPOConfig(update_epochs=1, num_minibatches=1, normalize_advantages="batch", clip_vloss=True)
    learner = learner_of(policy, config)
    tensors = rollout.map(lambda array: torch.from_numpy(array.astype(np.int64) if array.dtype == np.uint64 else np.array(array)))
    found = compute_advantages(policy, tensors, config)
    fields = {
        "observations": rollout.observations,
        "actions": rollout.actions,
        "log_probs": rollout.log_probs,
        "advantages": normalize(found.advantages, tensors.valid).numpy(),
        "returns": found.returns.numpy(),
        "values": found.values.numpy(),
    }
    if form == "samples":
        fields = {name: optree.tree_map(lambda leaf: leaf.reshape(36, *leaf.shape[2:]), tree) for name, tree in fields.items()}
    terms = learner.compute_ppo_loss(**fields)
    assert terms["loss"].requires_grad
    stats = learner.update(rollout)
    for name in TERMS:
        assert float(terms[name].detach()) == pytest.approx(stats[name], rel=1e-5, abs=1e-6), name


def test_compute_ppo_loss_leaves_invalid_samples_out(make_policy, collect):
    policy = make_policy()
    rollout, learner = collect(policy, 4, 1, episode_length=9), learner_of(policy)
    row = np.ones(4, np.float32)
    fields = {"observations": rollout.observations[:, 0], "actions": rollout.actions[:, 0], "log_probs": rollout.log_probs[:, 0]}
    fields |= {"advantages": row, "returns": row, "values": row}
    half = {name: value[:2] for name, value in fields.items()}
    whole = learner.compute_ppo_loss(**fields, valid=np.array([True, True, False, False]))
    torch.testing.assert_close(whole["loss"], learner.compute_ppo_loss(**half)["loss"])


@pytest.mark.parametrize("action_space", [spaces.Discrete(3), spaces.Box(-1, 1, (2,))], ids=["discrete", "box"])
@pytest.mark.parametrize("pieces", [2, 3, 100])
def test_gradient_accumulation_changes_nothing(make_policy, collect, parameters, action_space, pieces):
    results, metrics = [], []

    def entropy_like(policy, evaluation, valid):
        return (evaluation.values**2 * valid).sum() / valid.sum()

    for k in (1, pieces):
        policy = make_policy(action_space=action_space)
        rollout = collect(policy)
        policy.double()
        config = CONFIG.replace(gradient_accumulation=k, normalize_advantages="minibatch", clip_vloss=True)
        metrics.append(learner_of(policy, config).update(rollout, [entropy_like]))
        results.append(parameters(policy))
    np.testing.assert_allclose(results[1], results[0], rtol=0, atol=1e-12)
    for name, value in metrics[0].items():
        assert metrics[1][name] == pytest.approx(value, rel=1e-6, abs=1e-9), name


def test_a_huge_reward_needs_a_value_normaliser_and_harms_nothing_without_one(make_policy, collect, parameters, tmp_path):
    # Without: ½ (1e30)² is no float32, so the step is not taken, and three such minibatches stop the run.
    policy = make_policy()
    rollout = collect(policy)
    huge = Rollout.from_dict({**rollout.to_dict(), "rewards": rollout.rewards * np.float32(1e30)})
    before, learner = parameters(policy), learner_of(policy, dump_directory=tmp_path)
    with pytest.raises(BadNumberError, match="3 minibatches in a row"):
        learner.update(huge)
    np.testing.assert_array_equal(parameters(policy), before)
    # With: the first update moves the statistics alone; from then on the loss is in units of 1e30.
    policy = make_policy(normalize_values=True)
    learner = learner_of(policy)
    assert learner.update(huge)["warm_up"] == 1
    stats = learner.update(huge)
    assert all(np.isfinite(list(stats.values())))
    assert stats["skipped_steps"] == 0
    assert 0 < stats["value_loss"] < 10


def test_equal_advantages_normalise_to_nothing(make_policy):
    # Every row is terminal with reward 7 and the critic is constant: all advantages are equal, so no action is preferred.
    policy = make_policy()
    learner = learner_of(policy, CONFIG.replace(ent_coef=0.0))
    rng = np.random.default_rng(0)
    data = {
        "observations": np.zeros((10, 3, 3), np.float32),
        "actions": rng.integers(0, 3, (10, 3)),
        "log_probs": np.full((10, 3), np.log(1 / 3), np.float32),
        "rewards": np.full((10, 3), 7.3, np.float32),
        "terminated": np.ones((10, 3), bool),
    }
    actor = policy.network.actor["head"].bias
    stats = learner.update(data)
    assert stats["policy_loss"] == 0.0
    assert (actor == 0).all()
    assert stats["value_loss"] > 0


def test_a_foreign_optimizer_takes_our_gradient(make_policy, collect):
    policy = make_policy()
    rollout, config = collect(policy), PPOConfig(update_epochs=1, num_minibatches=1, max_grad_norm=None, learning_rate=0.123)
    learner = learner_of(policy, config, optimizer=torch.optim.SGD(policy.parameters(), lr=0.05))
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    stats = learner.update(rollout)
    norm = 0.0
    for name, p in policy.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.detach(), before[name] - 0.05 * p.grad)  # w - lr g, with its own lr
            norm += float(p.grad.square().sum())
    assert stats["grad_norm"] == pytest.approx(norm**0.5, rel=1e-5)  # no clipping


def test_a_foreign_optimizer_is_saved_and_follows_the_schedule(make_policy, collect, parameters):
    def learner(policy):
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.05, momentum=0.9)
        return learner_of(policy, CONFIG.replace(learning_rate_schedule="linear"), optimizer=optimizer, total_timesteps=72)

    policy = make_policy()
    first = learner(policy)
    first.update(collect(policy))
    state, weights = first.state_dict(), policy.get_weights()
    rollout = collect(policy, seed=1)
    first.update(rollout)
    assert first.optimizer.param_groups[0]["lr"] == pytest.approx(0.025)  # half of the run is over
    resumed = make_policy()
    resumed.set_weights(weights)
    second = learner(resumed)
    second.load_state_dict(state)
    second.update(rollout)
    np.testing.assert_array_equal(parameters(resumed), parameters(policy))


def test_gradients_are_clipped_by_their_global_norm(make_policy, collect):
    policy = make_policy()
    limit = 0.01
    learner = learner_of(policy, PPOConfig(update_epochs=1, num_minibatches=1, max_grad_norm=limit))
    stats = learner.update(collect(policy))
    assert stats["grad_norm"] > limit  # the metric is the norm before clipping
    norm = sum(float(p.grad.square().sum()) for p in policy.parameters() if p.grad is not None) ** 0.5
    assert norm == pytest.approx(limit, rel=1e-3)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_our_adam_is_torchs(make_policy, collect, parameters, weight_decay):
    config = CONFIG.replace(weight_decay=weight_decay)
    kind = torch.optim.AdamW if weight_decay else torch.optim.Adam
    policy, other = make_policy(), make_policy()
    theirs = kind(other.parameters(), lr=config.learning_rate, eps=config.adam_eps, weight_decay=weight_decay)
    learner, twin = learner_of(policy, config), learner_of(other, config, optimizer=theirs)
    assert learner.optimizer.eps == config.adam_eps
    for seed in range(3):
        rollout = collect(policy, seed=seed)
        one, two = learner.update(rollout), twin.update(rollout)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-5)
    np.testing.assert_allclose(parameters(policy), parameters(other), rtol=0, atol=1e-5)


def test_parameters_of_two_dtypes_need_an_optimizer_of_theirs(make_policy):
    policy = make_policy()
    policy.network.critic.double()
    with pytest.raises(ConfigError, match=r"one dtype, and these are torch.float32, torch.float64"):
        learner_of(policy)


def test_who_can_be_learned(make_policy):
    policy = make_policy()
    with pytest.raises(ConfigError, match=r"torch.nn.Module policies, not NumpyPolicy"):
        PPOOptimizer(NumpyPolicy(policy.spec))
    learner: Learner = PPOOptimizer(policy)  # keeps the contract, with a config and a device of its own choice
    assert learner.updates == 0


def test_devices():
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device(torch.device("cpu")) == torch.device("cpu")
    assert pick_device(None) == pick_device("auto")
    for wrong in ("cuda:99", "no such device"):
        with pytest.raises(ConfigError, match=r"cannot be used here .*; use cpu or auto"):
            pick_device(wrong)


def test_sequences_of_several_steps_give_a_memoryless_policy_the_same_minibatch(make_policy, collect, parameters):
    results = []
    for length in (1, 5):  # 12 = 5 + 5 + 2: the last sequence is padded
        policy = make_policy()
        config = PPOConfig(update_epochs=2, num_minibatches=1, sequence_length=length)
        learner_of(policy, config).update(collect(policy))
        results.append(parameters(policy))
    np.testing.assert_allclose(results[0], results[1], rtol=0, atol=1e-5)
