"""`check_policy`: sound policies pass, and each fault is found alone and named."""

from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from doubles import policies
from doubles.policies import Careful, world
from doubles.toys import ConstantReward, SpacesEnv
from inchworm.backends.torch.network import Network
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.config.sections import EnvConfig, PolicyConfig
from inchworm.core.errors import ConfigError
from inchworm.env.source import make_vector_env
from inchworm.policy.spec import PolicySpec
from inchworm.policy_check.checker import check_policy
from inchworm.worlds.toys import MixedMemoryCorridor


def test_a_memory_that_only_keeps_observations_is_sound():
    from examples.transformer_policy import make_policy

    env = gym.make("CartPole-v1")
    report = check_policy(make_policy(env.observation_space, env.action_space), "CartPole-v1")
    assert report.ok, report.problems


BROKEN: dict[str, tuple[str, str]] = {
    "NotAnInt": ("protocol", "policy_version must be an int"),
    "WrongShape": ("shapes", "log_probs must be floats [6]"),
    "Outside": ("shapes", "is not in Discrete(3)"),
    "OtherState": ("shapes", "state must have the form of initial_state"),
    "Scribbler": ("shapes", "act modifies the observations"),
    "WrongEvaluation": ("shapes", "evaluate's values must be a tensor [L, N]"),
    "Raising": ("shapes", "evaluate or value raised KeyError: 'features' at "),
    "GlobalNoise": ("randomness", "draws from a global stream"),
    "OwnMemory": ("randomness", "keep memory in the state that act returns"),
    "DropsOut": ("randomness", "dropout is on"),
    "NeverSamples": ("randomness", "never draws from rng"),
    "AlwaysSamples": ("deterministic acting", "act(deterministic=True) depends on rng"),
    "IgnoresMasks": ("masks", "under the mask"),
    "MasksAfterwards": ("masks", "a single legal action must have log-prob 0"),
    "EvaluatesUnmasked": ("masks", "evaluate ignores the masks"),
    "MixesLanes": ("lanes", "changing what lane 0 saw changed"),
    "CountsLanes": ("lanes", "in another order"),
    "MixesLearning": ("lanes", "evaluate gives other lanes"),
    "NeverFed": ("memory", "lead to the same memory"),
    "NeverRead": ("memory", "the memory changes no action and no log-prob"),
    "NeverForgets": ("memory", "still depend on the past"),
    "ForgetsAll": ("memory", "lanes that continue change"),
    "LearnsWithoutMemory": ("memory", "earlier rows change no later row's log-prob"),
    "LearnsFromNothing": ("memory", "does not begin with minibatch.policy_state"),
    "LearnsOverEnds": ("memory", "rows after an episode's start still depend"),
    "CutsTime": ("memory", "no gradient flows through time"),
    "OtherTemperature": ("ratio", "sequences of 1"),
    "OtherUnits": ("values", "value and evaluate disagree"),
    "LooseHead": ("gradient", "forgotten.weight, forgotten.bias get no gradient"),
    "InfiniteGradient": ("gradient", "not finite"),
    "SharesWeights": ("weights", "returns the policy's own memory"),
    "LosesBuffer": ("weights", "center changed in update_statistics or evaluate, but is not in get_weights"),
    "LosesParameter": ("weights", "does not restore the policy: actor.bias stays changed"),
    "ListOfWeights": ("weights", "a dict of names and NumPy arrays"),
    "DropsOutInEvaluate": ("repeatable", "is dropout on?"),
}
"""Name of the policy -> the check that fails, and part of the problem."""
NOTED = {
    "DropsOutWhileLearning": "while gradients are on",
    "BlindCritic": "the critic does not read the memory",
    "Forgetful": "cell.weight_hh get a gradient of exactly 0",  # which is true: it reads zeros
    "ZeroHead": "before get a gradient of exactly 0",
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_a_fault_is_found_alone_and_named(name: str) -> None:
    check, words = BROKEN[name]
    report = check_policy(getattr(policies, name)(), world)
    assert not report.ok
    assert {problem.partition(":")[0] for problem in report.problems} == {check}, str(report)
    assert words in str(report)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda step: (step.actions,), "act must return PolicyStep(actions, env_actions, log_probs, state), not tuple"),
        (
            lambda step: replace(step, actions=step.actions[:, None]),
            "act's actions must be a NumPy array [6] for 6 lanes, not ndarray [6, 1]",
        ),
        (lambda step: replace(step, log_probs=step.log_probs * np.nan), "act's log_probs are not finite"),
    ],
)
def test_malformed_steps_are_described(change: Any, words: str) -> None:
    class Malformed(Careful):
        def act(self, *args: Any, **kwargs: Any) -> Any:
            return change(super().act(*args, **kwargs))

    report = check_policy(Malformed(), world)
    assert words in str(report)
    assert {problem.partition(":")[0] for problem in report.problems} == {"shapes"}


def test_an_initial_state_must_hold_arrays() -> None:
    class Malformed(Careful):
        def initial_state(self, num_lanes: int) -> Any:
            return {"h": 0.5 * num_lanes}

    assert "initial_state(6) must hold NumPy arrays [6, …]; leaf 0 is float" in str(check_policy(Malformed(), world))


def test_a_careful_policy_passes() -> None:
    report = check_policy(Careful(), world)
    assert report.ok, str(report)
    assert report.notes == ()
    assert str(report) == "the policy is ready for training"


@pytest.mark.parametrize("name", list(NOTED))
def test_what_is_worth_knowing_is_a_note(name: str) -> None:
    report = check_policy(getattr(policies, name)(), world)
    assert report.ok, str(report)
    assert any(NOTED[name] in note for note in report.notes), str(report)


def test_the_policy_and_the_global_streams_stay_as_they_were() -> None:
    policy = Careful()
    before = policy.get_weights()
    numpy_before, torch_before = np.random.get_state()[1].copy(), torch.random.get_rng_state()  # noqa: NPY002
    check_policy(policy, world)
    assert np.array_equal(numpy_before, np.random.get_state()[1])  # noqa: NPY002
    assert torch.equal(torch_before, torch.random.get_rng_state())
    after = policy.get_weights()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in policy.parameters())


HYBRID = spaces.Dict({"aim": spaces.Box(-1.0, 1.0, (2,), np.float32), "gear": spaces.Discrete(3, start=1), "on": spaces.MultiBinary(2)})
BUILT_IN = {
    "mlp": ("mlp", "CartPole-v1"),
    "mlp of one number": ("mlp", ConstantReward),
    "continuous": (PolicyConfig(hidden_sizes=(8,), action_bounds="tanh"), "Pendulum-v1"),
    "normalised": (PolicyConfig(normalize_observations=True, normalize_values=True), EnvConfig(id="CartPole-v1")),
    "masked hybrid": ("mlp", lambda: SpacesEnv(spaces.Dict({"x": spaces.Box(-1, 1, (2,)), "y": spaces.Discrete(3)}), HYBRID, mask="info")),
    "lstm": (PolicyConfig(kind="lstm", memory_size=6, hidden_sizes=(8,)), "CartPole-v1"),
    "lstm of two layers before": (PolicyConfig(kind="lstm", memory_size=6, memory_layers=2, memory_place="before"), MixedMemoryCorridor),
    "gru": (PolicyConfig(kind="gru", memory_size=6, memory_layers=2, hidden_sizes=(8,)), MixedMemoryCorridor),
    "small cnn": (
        PolicyConfig(kind="cnn", cnn_filters=((4, 3, 2), (4, 2, 1)), cnn_features=8, hidden_sizes=(8,)),
        lambda: SpacesEnv(spaces.Box(0, 255, (3, 12, 12), np.uint8), spaces.Discrete(2)),
    ),
}


@pytest.mark.parametrize("name", list(BUILT_IN))
def test_built_in_policies_pass(name: str) -> None:
    policy, env = BUILT_IN[name]
    report = check_policy(policy, env)
    assert report.ok, str(report)
    assert report.notes == ()


@pytest.mark.parametrize(("kind", "central"), [("mlp", False), ("lstm", False), ("gru", True)])
def test_a_team_with_deaths_passes(kind: str, central: bool) -> None:
    pytest.importorskip("pettingzoo")
    config = PolicyConfig(kind=kind, hidden_sizes=(8,), memory_size=6, central_critic=central)  # type: ignore[arg-type]
    report = check_policy(config, "inchworm.worlds.toys:comings")
    assert report.ok, str(report)


class Wide(Network):
    def __init__(self, *, dropout: float = 0.0, batch_norm: bool = False) -> None:
        super().__init__()
        between = nn.BatchNorm1d(16) if batch_norm else nn.Dropout(dropout)
        self.actor = nn.Sequential(nn.Linear(4, 16), between, nn.Tanh(), nn.Linear(16, 2))
        self.critic = nn.Linear(4, 1)

    def action_outputs(self, observations: Any) -> Any:
        return self.actor(observations)

    def values(self, observations: Any) -> Any:
        return self.critic(observations).squeeze(-1)


def user_network(**options: Any) -> TorchPolicy:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = Wide(**options)
    env = gym.make("CartPole-v1")
    return TorchPolicy(PolicySpec(env.observation_space, env.action_space, PolicyConfig()), network=network)


def test_a_users_network_passes() -> None:
    report = check_policy(user_network(), "CartPole-v1")
    assert report.ok, str(report)
    assert report.notes == ()


@pytest.mark.parametrize("options", [{"dropout": 0.5}, {"batch_norm": True}], ids=["dropout", "batch_norm"])
def test_layers_that_are_on_while_learning_are_noted(options: dict[str, Any]) -> None:
    report = check_policy(user_network(**options), "CartPole-v1")
    assert report.ok, str(report)
    assert any("while gradients are on" in note for note in report.notes)


def test_every_form_of_environment_is_taken() -> None:
    env = gym.make("CartPole-v1")
    assert check_policy("mlp", env).ok
    env.reset()  # still open
    vector = make_vector_env("CartPole-v1", 3)
    assert check_policy("mlp", vector).ok
    assert vector.reset().episode_starts.all()
    vector.close()


class OnlyActs:
    def initial_state(self, num_lanes: int) -> Any:
        del num_lanes
        return ()

    def act(self, observations: Any, state: Any, episode_starts: Any, rng: Any, *, deterministic: bool = False) -> Any: ...


def test_missing_methods_are_listed() -> None:
    report = check_policy(OnlyActs(), "CartPole-v1")
    assert report.problems == (
        (
            "protocol: OnlyActs has no policy_version, value, evaluate, update_statistics, get_weights, set_weights: "
            "see inchworm.Policy for what each of them does"
        ),
    )
    with pytest.raises(ConfigError, match="there is no policy called 'mpl'"):
        check_policy("mpl", "CartPole-v1")


class PlainObject(OnlyActs):
    policy_version = 0
    value = evaluate = update_statistics = get_weights = set_weights = None


def test_a_policy_must_be_a_module() -> None:
    assert "is not a torch.nn.Module" in str(check_policy(PlainObject(), "CartPole-v1"))


class Uncopied(Careful):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("one of a kind")


def test_a_policy_that_cannot_be_copied_is_checked_itself() -> None:
    report = check_policy(Uncopied(), world)
    assert report.ok
    assert "cannot be copied (RuntimeError: one of a kind)" in report.notes[0]


class RaisingWorld(SpacesEnv):
    def step(self, action: Any) -> Any:
        if self._steps == 3:
            raise OSError("the simulator is gone")
        return super().step(action)


def test_a_world_that_breaks_is_not_the_policys_fault() -> None:
    with pytest.raises(Exception, match="the simulator is gone"):
        check_policy("mlp", lambda: RaisingWorld(spaces.Box(-1, 1, (2,)), spaces.Discrete(2)))
