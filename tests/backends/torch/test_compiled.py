"""The compiled minibatch step: the same numbers as the eager one, one state for both, and what it refuses."""

import json
import os

import numpy as np
import pytest
import torch
from gymnasium import spaces

from doubles.learners import TORCH, collect, of_unknown_weights, parameters
from inchworm.backends.torch import compiled
from inchworm.backends.torch.learner import PPOOptimizer
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.config.sections import PolicyConfig, PPOConfig
from inchworm.core.errors import BadNumberError, ConfigError, InchwormError
from inchworm.core.spaces import mask_space, with_mask
from inchworm.core.tensor_file import flatten_tree, unflatten_tree
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.rollout import Rollout

HYBRID = spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(-1, 1, (2,))})
MASKED = with_mask(spaces.Dict({"x": spaces.Box(-2, 2, (3,)), "kind": spaces.Discrete(3, start=5)}), mask_space(HYBRID))
WORLD = spaces.Box(-9, 9, (2,))
PLAIN = PPOConfig(learning_rate=1e-2, update_epochs=2, num_minibatches=4, rollout_steps=12)
CASES = {
    # Between them every branch of the step; each compiles once, so two cases have to do.
    "everything on": (  # masks, dicts, hybrid actions, tanh, normalisers, value clip, AdamW, padding (36 columns in 5), schedules
        MASKED, HYBRID, {"shared_trunk": True, "action_bounds": "tanh", "normalize_observations": True, "normalize_values": True},
        PLAIN.replace(
            num_minibatches=5, clip_vloss=True, vf_clip_coef=0.1, weight_decay=0.1, normalize_advantages="minibatch",
            learning_rate_schedule="linear", clip_schedule="linear", ent_schedule="linear",
        ),
    ),
    "central critic, everything off": (
        None, None, {"central_critic": True, "normalize_observations": True},
        PLAIN.replace(max_grad_norm=None, ent_coef=0.0, learning_rate_schedule="adaptive", max_learning_rate=0.05, freeze=("actor.0.*",)),
    ),
}  # fmt: skip


def learner_of(policy, config, compile):
    return PPOOptimizer(policy, config.replace(compile=compile), device="cpu", total_timesteps=200)


def policy_of(observation_space, action_space, options, seed=0):
    config = PolicyConfig(hidden_sizes=(8,), **options)
    world = WORLD if config.central_critic else None
    spec = PolicySpec(observation_space or spaces.Box(-2, 2, (3,)), action_space or spaces.Discrete(3), config, world, 3)
    return TorchPolicy(spec, seed=seed)


def with_world(rollout):
    """The rollout with a global state; its three lanes belong to one copy."""
    rng = np.random.default_rng(0)
    shapes = {"global_state": (len(rollout.rewards), 1, 2), "cut_global_state": (len(rollout.cut_rows), 2)}
    return Rollout.from_dict(rollout.to_dict() | {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize("case", CASES)
def test_it_agrees_with_the_eager_step_and_continues_from_its_state(case):
    *given, config = CASES[case]
    gather = (lambda *known, **options: with_world(collect(*known, **options))) if "central" in case else collect
    policies = {mode: policy_of(*given) for mode in ("off", "on")}
    learners = {mode: learner_of(policy, config, mode) for mode, policy in policies.items()}
    rates = set()
    for seed in range(3):
        rollout = of_unknown_weights(gather(policies["off"], seed=seed))  # they are those of one of the two
        stats = {mode: learner.update(rollout) for mode, learner in learners.items()}
        rates.add(stats["off"]["learning_rate"])
        for name in stats["off"]:
            assert stats["on"][name] == pytest.approx(stats["off"][name], rel=1e-3, abs=1e-4), name
    assert np.abs(parameters(policies["on"]) - parameters(policy_of(*given))).max() > 1e-3  # it did move
    np.testing.assert_allclose(parameters(policies["on"]), parameters(policies["off"]), rtol=0, atol=1e-5)
    states = {mode: learner.state_dict()["moments"] for mode, learner in learners.items()}
    assert states["on"]["step"] == states["off"]["step"] >= 8
    for key in ("mean", "square"):
        for name, value in states["off"][key].items():
            np.testing.assert_allclose(states["on"][key][name], value, rtol=0, atol=1e-5)
    assert len(rates) > 1
    assert len(learners["on"]._compiled._graphs) == 1, "neither schedules nor statistics compile it again"
    exact_resume(learners["on"], policies["on"], gather, policy_of(*given, seed=5), config)
    if "central" in case:
        frozen_weights_are_read(learners["on"], policies["on"], gather)
        nothing_moves(learners["on"], policies["on"], rollout)


def exact_resume(learner, policy, gather, resumed, config):
    """Continue directly, and from what a file holds: the same bits. The graph is shared, so that it is compiled once."""
    arrays, structure = flatten_tree(learner.state_dict())
    state, weights = unflatten_tree({name: a.copy() for name, a in arrays.items()}, json.loads(json.dumps(structure))), policy.get_weights()
    rollout = gather(policy, seed=7)
    learner.update(rollout)
    resumed.set_weights(weights)
    other = learner_of(resumed, config, "on")
    other._compiled._graphs = learner._compiled._graphs
    other.load_state_dict(state)
    other.update(rollout)
    np.testing.assert_equal(resumed.get_weights(), policy.get_weights())


def frozen_weights_are_read(learner, policy, gather):
    """They are as before all updates, and they are inputs of the graph: shared with another policy, it reads the other's."""
    *given, config = CASES["central critic, everything off"]
    fresh, now = policy_of(*given).get_weights(), policy.get_weights()
    assert {name for name in fresh if np.array_equal(fresh[name], now[name])} == {"actor.0.weight", "actor.0.bias"}
    others = {mode: policy_of(*given) for mode in ("off", "on")}
    for other in others.values():
        other.set_weights({**now, "actor.0.weight": now["actor.0.weight"] + np.linspace(-2, 2, 24, dtype=np.float32).reshape(8, 3)})
    rollout = of_unknown_weights(gather(other, seed=9))
    learners = {mode: learner_of(other, config, mode) for mode, other in others.items()}
    learners["on"]._compiled._graphs = learner._compiled._graphs
    stats = {mode: learner.update(rollout) for mode, learner in learners.items()}
    for name in ("entropy", "policy_loss", "approx_kl", "grad_norm"):
        assert stats["on"][name] == pytest.approx(stats["off"][name], rel=1e-3, abs=1e-4), name


def nothing_moves(learner, policy, rollout):
    """A loss that is not finite, and a minibatch without valid rows."""
    before, moments = parameters(policy), learner.state_dict()["moments"]
    huge = rollout.to_dict() | {"rewards": rollout.rewards * np.float32(1e30)}  # ½ (1e30)² overflows float32
    with pytest.raises(BadNumberError, match="3 minibatches in a row"):
        learner.update(huge)
    minibatch = learner.shuffle(learner.make_sequences(*learner.critic_pass(rollout, None), 1, successors=False), 4, np.arange(36))[0]
    minibatch.valid[:] = False
    table = learner.take_steps([minibatch], learner._coefficients(), 1.0, ())
    assert (table["empty"], table["bad"], table["loss"]) == (1, 0, 0)
    np.testing.assert_array_equal(parameters(policy), before)
    np.testing.assert_equal(learner.state_dict()["moments"], moments)


def test_what_is_refused():
    class Mine(TorchPolicy):
        pass

    policy = TORCH.policy()
    sgd = torch.optim.SGD(policy.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"not an optimizer of your own; set ppo.compile=off"):
        PPOOptimizer(policy, PLAIN.replace(compile="on"), optimizer=sgd, device="cpu")
    with pytest.raises(ConfigError, match=r"with Adam, not ppo.optimizer=muon; set ppo.compile=off"):
        learner_of(policy, PLAIN.replace(optimizer="muon"), "on")
    with pytest.raises(ConfigError, match=r"not ppo.gradient_accumulation=2; set ppo.compile=off"):
        learner_of(policy, PLAIN.replace(gradient_accumulation=2), "on")
    with pytest.raises(ConfigError, match=r"not a network or policy of your own; set ppo.compile=off"):
        learner_of(TorchPolicy(policy.spec, network=policy.network), PLAIN, "on")
    with pytest.raises(ConfigError, match=r"not a network or policy of your own"):
        learner_of(Mine(policy.spec), PLAIN, "on")  # its evaluate may be anything
    with pytest.raises(ConfigError, match=r"not a policy with memory \(policy.kind=lstm\); set ppo.compile=off"):
        learner_of(TORCH.policy(kind="lstm"), PLAIN, "on")

    def my_loss(values):
        return values.mean()

    with pytest.raises(ConfigError, match=r"not the custom loss my_loss; set ppo.compile=off"):
        learner_of(policy, PLAIN, "on").update(collect(policy), [my_loss])


def test_auto_is_off_for_the_learner_alone():
    assert learner_of(TORCH.policy(), PLAIN, "auto")._compiled is None


def test_without_a_compiler(monkeypatch):
    from torch._inductor.exc import InvalidCxxCompiler

    def none_here(*_, **__):
        raise InvalidCxxCompiler

    monkeypatch.setattr(torch._inductor, "compile", none_here)
    policy = TORCH.policy()
    with pytest.raises(InchwormError, match=r"needs a C\+\+ compiler.*install g\+\+ or clang, or set ppo.compile=off"):
        learner_of(policy, PLAIN, "on").update(collect(policy))


def test_the_cache_is_the_users_unless_torchs_variable_is_set(monkeypatch, tmp_path):
    monkeypatch.delenv(compiled.CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with compiled.cache_directory():
        assert os.environ[compiled.CACHE_VARIABLE] == str(tmp_path / "inchworm" / "torchinductor")
    assert compiled.CACHE_VARIABLE not in os.environ
    monkeypatch.setenv(compiled.CACHE_VARIABLE, "elsewhere")
    with compiled.cache_directory():
        assert os.environ[compiled.CACHE_VARIABLE] == "elsewhere"
    assert os.environ[compiled.CACHE_VARIABLE] == "elsewhere"
