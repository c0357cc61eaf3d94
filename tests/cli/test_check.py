"""`inchworm check-env` and `inchworm check-policy`: problems are listed and make the exit code 1; wrong use is one line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BAD_WORLD = """
import gymnasium as gym
import numpy as np
from gymnasium import spaces

class Bad(gym.Env):
    observation_space = spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.full(2, np.nan, np.float32), {}

    def step(self, action):
        return np.full(2, np.nan, np.float32), 1.0, False, True, {}
"""

OWN_POLICY = """
from torch import nn

from inchworm import PolicyConfig, PolicySpec, TorchPolicy
from inchworm.backends.torch.network import Network


class Net(Network):
    def __init__(self, spare):
        super().__init__()
        self.actor, self.critic = nn.Linear(4, 2), nn.Linear(4, 1)
        self.spare = nn.Linear(4, 1) if spare else None

    def action_outputs(self, observations):
        return self.actor(observations)

    def values(self, observations):
        return self.critic(observations).squeeze(-1)


def sound(observation_space, action_space):
    return TorchPolicy(PolicySpec(observation_space, action_space, PolicyConfig()), network=Net(spare=False))


def loose(observation_space, action_space):
    return TorchPolicy(PolicySpec(observation_space, action_space, PolicyConfig()), network=Net(spare=True))


def broken(observation_space):
    return None


number = 3
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of the user's in the working directory."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, text in (("bad_world", BAD_WORLD), ("own_policy", OWN_POLICY)):
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text(text)


@pytest.mark.parametrize("arguments", [["check-env", "CartPole-v1"], ["check-policy", "own_policy:sound", "CartPole-v1"]])
def test_all_checks_passed(cli: Any, arguments: list[str]) -> None:
    result = cli(*arguments)
    assert result.code == 0, result.out + result.err
    assert result.out.splitlines()[-1] == f"{arguments[1]}: all checks passed"


def test_problems_make_the_exit_code_1(cli: Any) -> None:
    result = cli("check-env", "bad_world:Bad")
    assert result.code == 1
    assert result.out.startswith("problem: ")
    assert "problem" in result.out.splitlines()[-1]
    result = cli("check-policy", "own_policy:loose", "CartPole-v1")
    assert result.code == 1
    assert "problem: gradient: network.spare.weight, network.spare.bias get no gradient" in " ".join(result.out.split())
    assert result.out.splitlines()[-1] == "own_policy:loose: 1 problem"


def test_the_example_of_a_custom_network_passes(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    result = cli("check-policy", "examples.custom_network:make_policy", "CartPole-v1")
    assert result.code == 0, result.out + result.err
    assert result.out == "examples.custom_network:make_policy: all checks passed\n"


def test_a_kind_a_run_and_a_policy_file_are_policies_too(cli: Any, run: Path) -> None:
    assert cli("check-policy", "mlp", "Pendulum-v1", "--env.wrappers", "[{name: FlattenObservation}]").code == 0
    assert cli("check-policy", run).code == 0
    assert cli("check-policy", "small", "CartPole-v1", "--steps", 8, "--seed", 2).code == 0
    assert cli("check-policy", run / "policy.safetensors", "CartPole-v1").code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check-env"], "no environment is given; type: inchworm check-env CartPole-v1"),
        (["check-env", "CartPol-v1"], "did you mean CartPole-v1?"),
        (["check-env", "CartPole-v1", "--env.kwargs", "{nonsense: 1}"], "nonsense"),
        (["check-env", "CartPole-v1", "--env.kwargs", "3"], "--env.kwargs=3 must be a mapping of names to values"),
        (["check-policy"], "no policy is given; type: inchworm check-policy package.module:make_policy CartPole-v1"),
        (["check-policy", "mlp"], "no environment is given; type: inchworm check-policy mlp CartPole-v1"),
        (["check-policy", "mlp", "CartPol-v1"], "did you mean CartPole-v1?"),
        (["check-policy", "mlp", "CartPole-v1", "--env.kwargs", "{nonsense: 1}"], "nonsense"),
        (["check-policy", "nowhere:make", "CartPole-v1"], "there is no module nowhere"),
        (["check-policy", "own_policy:make", "CartPole-v1"], "the module own_policy has no make"),
        (["check-policy", "own_policy:number", "CartPole-v1"], "own_policy:number is not a function"),
        (["check-policy", "own_policy:broken", "CartPole-v1"], "raised TypeError: broken() takes 1 positional argument but 2 were given"),
        (["check-policy", "wizard"], "a policy is package.module:make_policy, mlp, cnn, lstm, gru, a run or a policy file"),
        (["check-policy", "wizard", "CartPole-v1"], "there is no run wizard"),
    ],
)
def test_wrong_use_is_one_line(refused: Any, arguments: list[str], message: str) -> None:
    refused(message, *arguments)
