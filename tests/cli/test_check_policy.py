import sys
from pathlib import Path
from typing import Any

import pytest

OWN = """
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


number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_policy", raising=False)
    (tmp_path / "own_policy.py").write_text(OWN)


@pytest.mark.usefixtures("own")
def test_a_factory_of_yours_is_called_with_the_spaces(cli: Any) -> None:
    result = cli("check-policy", "own_policy:sound", "CartPole-v1")
    assert result.code == 0, result.out + result.err
    assert result.out.splitlines()[-1] == "own_policy:sound: all checks passed"


@pytest.mark.usefixtures("own")
def test_problems_make_the_exit_code_1(cli: Any) -> None:
    result = cli("check-policy", "own_policy:loose", "CartPole-v1")
    assert result.code == 1
    assert "problem: gradient: network.spare.weight, network.spare.bias get no gradient" in " ".join(result.out.split())
    assert result.out.splitlines()[-1] == "own_policy:loose: 1 problem"


def test_the_example_of_a_policy_from_end_to_end_is_sound(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    result = cli("check-policy", "examples.custom_network:make_policy", "CartPole-v1")
    assert result.code == 0, result.out + result.err
    assert result.out == "examples.custom_network:make_policy: all checks passed\n"


def test_a_kind_a_run_and_a_policy_file_are_policies_too(cli: Any, run: Path) -> None:
    assert cli("check-policy", "mlp", "Pendulum-v1").code == 0
    assert cli("check-policy", run).code == 0
    assert cli("check-policy", "small", "CartPole-v1", "--steps", 8, "--seed", 2).code == 0
    assert cli("check-policy", run / "policy.safetensors", "CartPole-v1").code == 0


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no policy is given; type: inchworm check-policy package.module:make_policy CartPole-v1"),
        (["mlp"], "no environment is given; type: inchworm check-policy mlp CartPole-v1"),
        (["mlp", "CartPol-v1"], "did you mean CartPole-v1?"),
        (["nowhere:make", "CartPole-v1"], "there is no module nowhere"),
        (["own_policy:make", "CartPole-v1"], "the module own_policy has no make"),
        (["own_policy:number", "CartPole-v1"], "own_policy:number is not a function"),
        (["no_such_run"], "there is no run no_such_run"),
        (["mlp", "CartPole-v1", "--env.kwargs", "{nonsense: 1}"], "nonsense"),
    ],
)
def test_wrong_use_is_one_line(cli: Any, arguments: list[str], message: str) -> None:
    result = cli("check-policy", *arguments)
    assert result.code == 2
    assert message in result.err
    assert len(result.err.splitlines()) == 1


def test_a_function_that_fails_and_a_name_of_nothing_are_one_line(cli: Any) -> None:
    Path("broken.py").write_text("def make(observation_space):\n    return None\n")
    result = cli("check-policy", "broken:make", "CartPole-v1")
    assert result.code == 2
    assert (
        "broken:make(observation_space, action_space) raised TypeError: make() takes 1 positional argument but 2 were given" in result.err
    )
    assert len(result.err.splitlines()) == 1
    result = cli("check-policy", "wizard", "CartPole-v1")
    assert result.code == 2
    assert "there is no run wizard" in result.err
    assert "a policy is package.module:make_policy, mlp, cnn, lstm, gru, a run or a policy file" in result.err
