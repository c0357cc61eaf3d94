"""The critic's audit against closed forms: values, errors, and correlations of advantages."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest

from doubles.known import known_policy
from doubles.policies import Careful, world
from doubles.toys import KeptPaidActions, LateReward, PaidActions, TruncatedForever, Unseeded, watched
from inchworm import (
    Audit,
    EnvConfig,
    NumpyPolicy,
    OpponentConfig,
    PolicyConfig,
    PolicySpec,
    PPOConfig,
    RandomActor,
    TrainingConfig,
    audit,
    make_vector_env,
)
from inchworm.analysis.audit import CriticError, suggest
from inchworm.analysis.estimates import BranchPlayer, Samples
from inchworm.core.errors import ConfigError, EnvError
from inchworm.worlds.toys import MemoryCorridor, comings

GAMMA, P = PaidActions.discount, 0.3
CONFIG = PPOConfig(gamma=GAMMA, rollout_steps=16, num_minibatches=4)
TRAINING = TrainingConfig(ppo=CONFIG)
SIZE: dict[str, Any] = {"states": 96, "branches": 16}


@pytest.fixture(scope="module")
def exact() -> Audit:
    """Of the critic that knows the closed form: V = p (1 - gamma^n) / (1 - gamma) with n steps to come."""
    return audit(known_policy(PaidActions(), slope=P), PaidActions, CONFIG, **SIZE)


def test_it_agrees_with_the_closed_form(exact: Audit) -> None:
    values = [P * (1 - GAMMA**left) / (1 - GAMMA) for left in range(1, 9)]  # of the 8 states of an episode
    whole = exact.critic[0]
    assert (whole.states, exact.critic_share) == (96, 0.0)
    assert whole.true_mean == pytest.approx(np.mean(values), abs=0.08)
    assert whole.true_std == pytest.approx(np.std(values), abs=0.08)
    # Var of the return with n steps to come is p (1 - p) (1 - gamma^2n) / (1 - gamma^2).
    variances = [P * (1 - P) * (1 - GAMMA ** (2 * left)) / (1 - GAMMA**2) for left in range(1, 9)]
    assert exact.return_std == pytest.approx(np.sqrt(np.mean(variances)), rel=0.05)
    # An action is worth 1: Q(s, a) - V(s) = a - p, whose standard deviation is sqrt(p (1 - p)).
    assert exact.advantage_std == pytest.approx(math.sqrt(P * (1 - P)), rel=0.2)
    assert [part.where for part in exact.critic] == ["whole episode", "first third", "middle third", "last third"]
    for part in exact.critic:
        assert abs(part.bias) < 3 * part.bias_se < 0.3
        assert 0.01 < part.rmse_se < 0.15, "also where nothing is left of the error"
        assert part.rmse < 0.15, "the noise of the estimates is subtracted: without that it is 0.27"


@pytest.mark.parametrize("shift", [3.0, -1.5])
def test_a_critic_made_wrong_on_purpose_is_found(exact: Audit, shift: float) -> None:
    steeper = 1.2 * P  # wrong by 0.2 V besides
    found = audit(known_policy(PaidActions(), slope=steeper, offset=shift), PaidActions, CONFIG, **SIZE)
    known = [0.2 * P * (1 - GAMMA**left) / (1 - GAMMA) for left in range(1, 9)]
    assert found.critic[0].bias == pytest.approx(shift + np.mean(known), abs=0.1 * abs(shift))
    for part, places in zip(found.critic[1:], (known[5:], known[2:5], known[:3]), strict=True):
        assert part.bias == pytest.approx(shift + np.mean(places), abs=0.1 * abs(shift)), part.where
    assert found.critic[0].rmse == pytest.approx(abs(found.critic[0].bias), rel=0.1)
    assert found.suggestions[0].setting == "critic: values are biased"
    assert "1. critic: values are biased\n   why: the critic is off by" in str(found)
    assert str(found).endswith("is not known from this: inchworm compare doubles.toys:PaidActions --change ppo.… measures it")
    assert not any("critic" in each.setting for each in exact.suggestions)


def test_continuations_run_on_past_a_time_limit() -> None:
    """Episodes of 10 steps are cut off, and V = p / (1 - gamma) = 3 does not know the limit."""
    env = EnvConfig(id="doubles.toys:PaidActions", kwargs={"length": 0}, max_episode_steps=10)
    policy = known_policy(PaidActions(0), offset=7.0)
    found = audit(policy, env, TRAINING, states=40, branches=8)
    assert found.critic[0].true_mean == pytest.approx(3.0, abs=0.15)
    assert found.critic[0].bias == pytest.approx(4.0, abs=0.15)
    assert found.critic_share == pytest.approx(GAMMA**44), "44 is the first n with gamma^n < 0.01"
    assert "run on past the time limit" in str(found)
    short = audit(policy, env, TRAINING, states=40, branches=8, max_steps=2)
    assert short.critic_share == pytest.approx(GAMMA**2)
    assert short.critic[0].true_mean == pytest.approx(P * (1 + GAMMA) + GAMMA**2 * 7, abs=0.15)


def test_where_the_environment_truncates_the_critic_stands_in() -> None:
    """n rewards of 1, then the critic's 4: sum of gamma^k for k < n, plus gamma^n 4, for n = 1 to 5 steps to come."""
    found = audit(known_policy(TruncatedForever(), offset=4.0), TruncatedForever, CONFIG, states=40, branches=4)
    true = [(1 - GAMMA**left) / (1 - GAMMA) + 4 * GAMMA**left for left in range(1, 6)]
    assert found.critic[0].true_mean == pytest.approx(np.mean(true), rel=1e-6)
    assert found.critic[0].bias == pytest.approx(4 - np.mean(true), rel=1e-6)
    assert found.critic_share == pytest.approx(np.mean([GAMMA**left for left in range(1, 6)]))
    assert "the critic's value stands in, as in training" in str(found)


def test_the_correlation_of_gae_for_each_lambda() -> None:
    """With V = 0 and gamma = 1, GAE's advantages are lambda r and r in the two steps, and the true ones r - p and 0."""
    config = CONFIG.replace(gamma=1.0, gae_lambda=0.7)
    found = audit(known_policy(LateReward(), p=0.5), LateReward, config, states=192, branches=32)
    assert [fit.gae_lambda for fit in found.lambdas] == [0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0]
    for fit in found.lambdas:
        each = fit.gae_lambda
        # Over both steps: E[A G] = lambda / 8, Var A = 1/8, E[G] = (1 + lambda) / 4, E[G²] = (1 + lambda²) / 4.
        correlation = each / 8 / math.sqrt((1 + each**2) / 4 - ((1 + each) / 4) ** 2) / math.sqrt(1 / 8)
        assert fit.correlation == pytest.approx(correlation, abs=0.08), each
        assert fit.low <= fit.correlation <= fit.high
    assert found.reachable > 0.95
    assert any(each.tries == "ppo.gae_lambda=1" for each in found.suggestions)


def test_a_policy_of_your_own_with_memory_and_masks_is_audited_and_left_as_it_was() -> None:
    policy = Careful()  # whose `center` moves with every update, without a gradient
    before = policy.get_weights()
    found = audit(policy, world, CONFIG, states=8, branches=2)
    assert found.critic[0].true_mean > 1, "each of 5 legal actions earns 1"
    assert found.gradient.noise > 0
    for name, weight in policy.get_weights().items():
        assert np.array_equal(weight, before[name]), name


def test_the_same_seed_gives_the_same_result(exact: Audit) -> None:
    policy = known_policy(PaidActions(), slope=P)
    again = audit(policy, PaidActions, CONFIG, **SIZE)
    assert again.to_dict() == exact.to_dict()
    assert audit(policy, PaidActions, CONFIG, **SIZE, seed=1).critic != exact.critic
    few: dict[str, Any] = {"states": 3, "branches": 2, "max_steps": 2}
    here, workers = (EnvConfig(id="doubles.toys:PaidActions", num_workers=count) for count in (0, 2))
    assert audit(policy, workers, TRAINING, **few) == audit(policy, here, TRAINING, **few)


def test_get_state_restores_what_a_replay_does(exact: Audit) -> None:
    kept = audit(known_policy(PaidActions(), slope=P), KeptPaidActions, CONFIG, **SIZE)
    assert (exact.restored_by, kept.restored_by) == ("replay", "get_state")
    assert (kept.critic, kept.lambdas) == (exact.critic, exact.lambdas)
    assert "restored by get_state" in str(kept)


def test_memory_at_the_branch_is_that_after_the_prefix() -> None:
    """An LSTM that certainly turns to (or from) the side of the cue, which only the first observation shows, does so in continuations."""
    world = MemoryCorridor(4)
    spec = PolicySpec(world.observation_space, world.action_space, PolicyConfig(kind="lstm", memory_size=8, hidden_sizes=(8,)))
    policy = NumpyPolicy(spec, seed=5)
    weights = policy.get_weights()
    policy.set_weights(weights | {"actor.head.weight": 1e6 * weights["actor.head.weight"]})
    with make_vector_env(lambda: MemoryCorridor(4), 16) as env:
        player = BranchPlayer(env, policy, gamma=1.0, max_steps=10, limit=100, seed=0, reward_scale=1.0)
        samples = Samples.draw(player, 40, None)
    returns = samples.episodes.rewards.sum(0)  # [E]
    assert len({*returns.tolist()}) == 1, "the turn depends on the cue: else it would be right half of the time"
    assert {*samples.rows[0].tolist()} == {0, 1, 2, 3, 4}
    assert (samples.sampled == returns[0]).all()
    assert (samples.repeated == returns[0]).all()


def test_a_run_with_memory_and_scaled_rewards_is_audited(tmp_path: Any) -> None:
    from inchworm import PPOTrainer, RunConfig

    config = TrainingConfig(
        env=EnvConfig(id="CartPole-v1", num_envs=2),
        policy=PolicyConfig(kind="gru", memory_size=8, hidden_sizes=(8,)),
        ppo=PPOConfig(rollout_steps=32, num_minibatches=2, update_epochs=1, scale_rewards=True),
        run=RunConfig(total_timesteps=256, report=False),
    )
    with PPOTrainer(config.policy, config.env, config, run_dir=tmp_path / "run") as trainer:
        trainer.train()
        scaler = trainer.learner.reward_scaler
    shown: list[int] = []
    found = audit(tmp_path / "run", states=6, branches=2, max_steps=20, progress=shown.append)
    assert shown == [4, 8, 12, 16, 20, 24]
    assert scaler.scale > 1.5
    assert found.critic[0].true_mean > 2, "in the environment's own rewards"
    assert found.critic[0].bias < -2, "a critic that knows nothing yet, in the same units"
    assert json.loads(json.dumps(found.to_dict()))["gradient"]["parts"] == 32
    with pytest.raises(ConfigError, match="only a run with a built-in policy says"):
        audit(trainer.policy, config.env, config)


def test_what_to_try(exact: Audit) -> None:
    assert [each.tries for each in exact.suggestions] == ["ppo.gae_lambda=0"], "a critic without error needs nothing but its values"
    gradient = dataclasses.replace(exact.gradient, snr_per_sample=0.1, snr_se=0.001)
    fits = tuple(dataclasses.replace(fit, gain_low=0.0) for fit in exact.lambdas)
    calm = dataclasses.replace(exact, gradient=gradient, lambdas=fits, suggestions=())
    assert suggest(calm, TRAINING) == []
    assert str(calm).endswith("\nnothing stands out")
    assert "too noisy" not in str(calm)
    assert f"too noisy to tell lambdas apart: more --branches than {calm.branches}" in str(dataclasses.replace(calm, reachable=0.29))

    def found(**changes: Any) -> list[str]:
        return [each.setting for each in suggest(dataclasses.replace(calm, **changes), TRAINING)]

    whole = calm.critic[0]
    wrong: tuple[CriticError, ...] = (dataclasses.replace(whole, rmse=2 * whole.true_std, rmse_se=0.01),)
    assert found(critic=wrong) == ["critic: values are inaccurate"]
    large = (dataclasses.replace(whole, rmse=400.0, rmse_se=1.0, true_mean=-300.0, true_std=100.0),)
    for critic, is_large in ((wrong, False), (large, True)):  # normalised values are suggested by the scale of the values
        (advice,) = suggest(dataclasses.replace(calm, critic=critic), TRAINING)
        assert ("policy.normalize_values=true" in advice.tries) == is_large
    at_the_end = dataclasses.replace(calm.critic[3], bias=0.7 * whole.true_std, bias_se=0.01)
    assert found(critic=(*calm.critic[:3], at_the_end)) == ["critic: values are biased"]
    noisy = dataclasses.replace(calm.gradient, snr_per_sample=1e-4, snr_se=1e-4)
    assert found(gradient=noisy) == ["batch: the gradient is mostly noise"]
    still = dataclasses.replace(calm.gradient, snr_per_sample=-1e-4, snr_se=1e-5)
    assert "no signal was found in the noise" in str(dataclasses.replace(calm, gradient=still))
    assert found(gradient=dataclasses.replace(calm.gradient, snr_per_sample=9.0)) == ["batch: a minibatch has hardly any noise"]
    blind = tuple(dataclasses.replace(fit, correlation=0.1, low=0.0, high=0.2, gain_low=-0.1) for fit in calm.lambdas)
    far = TRAINING.replace(ppo=CONFIG.replace(gamma=0.99))
    (gamma,) = suggest(dataclasses.replace(calm, lambdas=blind), far)
    assert gamma.setting == "advantages: those of no lambda follow the true ones"
    assert gamma.tries.startswith("larger batches, or ppo.gamma=0.97, ")
    both = found(critic=wrong, gradient=noisy)
    assert both == ["critic: values are inaccurate", "batch: the gradient is mostly noise"], "the furthest from usual comes first"


def test_an_environment_that_cannot_be_replayed_is_refused() -> None:
    policy = known_policy(PaidActions())
    with pytest.raises(EnvError, match="cannot be replayed: the same seed and actions led to another episode"):
        audit(policy, Unseeded, CONFIG, states=4, branches=2)


def test_copies_are_closed_when_it_is_interrupted() -> None:
    env, still_open = watched(PaidActions)

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit(known_policy(PaidActions()), env, CONFIG, states=4, branches=2, progress=interrupt)
    assert still_open == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env": None}, "the environment of the policy is not known"),
        ({"env": PaidActions()}, "give an id, a config or a factory"),
        ({"env": comings}, "for environments with one agent, and this one has 3"),
        ({"config": TrainingConfig(opponent=OpponentConfig(mode="random"))}, "not for opponents"),
        ({"run_or_policy": RandomActor(PaidActions().action_space)}, "RandomActor is not a policy with a critic"),
        ({"states": 2}, "states=2 must be 3 or more"),
        ({"branches": 1}, "branches=1 must be 2 or more"),
        ({"max_steps": 0}, "max_steps=0 must be 1 or more"),
        ({"run_or_policy": "nowhere"}, "there is no run nowhere"),
    ],
)
def test_wrong_use_is_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        audit(**{"run_or_policy": known_policy(PaidActions()), "env": PaidActions, "config": CONFIG, **changes})
    assert "\n" not in str(raised.value)
