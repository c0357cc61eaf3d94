"""`inchworm check-env` and `inchworm check-policy`: problems are listed and make the exit code 1; wrong use is one line."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

OWN_MODULE = """
import gymnasium as gym
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from doubles.policies import Careful, LooseHead
from doubles.toys import ConstantReward

class Bad(ConstantReward):
    def _first(self):
        return super()._first() * float("nan")

def sound(observation_space, action_space):
    return Careful()

def loose(observation_space, action_space):
    return LooseHead()

def broken(observation_space):
    return None

def lanes(autoreset="Disabled"):
    return SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2, autoreset_mode=AutoresetMode(autoreset))

number = 3
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the user's in the working directory."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own", raising=False)
    (tmp_path / "own.py").write_text(OWN_MODULE)


@pytest.mark.parametrize(
    "arguments",
    [
        ["check-env", "CartPole-v1"],
        ["check-env", "own:lanes"],
        ["check-policy", "own:sound", "doubles.policies:world"],
        ["check-policy", "examples.custom_network:make_policy", "CartPole-v1"],
    ],
)
def test_all_checks_passed(cli: Any, arguments: list[str]) -> None:
    result = cli(*arguments)
    assert result.code == 0, result.out + result.err
    what = "policy" if arguments[0] == "check-policy" else "environment"
    assert result.out.splitlines()[0] == f"{arguments[1]}: the {what} is ready for training"


def test_problems_make_the_exit_code_1(cli: Any) -> None:
    result = cli("check-env", "own:Bad")
    assert result.code == 1
    assert re.match(r"own:Bad: \d problem\(s\) would break or degrade training\nproblem: ", result.out)
    result = cli("check-env", "own:lanes", "--env.kwargs", "{autoreset: NextStep}")
    assert result.code == 1
    assert "problem: a SyncVectorEnv with AutoresetMode.NEXT_STEP resets one step late" in " ".join(result.out.split())
    result = cli("check-policy", "own:loose", "doubles.policies:world")
    assert result.code == 1
    assert "problem: gradient: forgotten.weight, forgotten.bias get no gradient" in " ".join(result.out.split())
    assert result.out.splitlines()[0] == "own:loose: 1 problem(s) would break or degrade training"


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
        (["check-policy", "own:make", "CartPole-v1"], "the module own has no make"),
        (["check-policy", "own:number", "CartPole-v1"], "own:number is not a function"),
        (["check-policy", "own:broken", "CartPole-v1"], "raised TypeError: broken() takes 1 positional argument but 2 were given"),
        (["check-policy", "wizard"], "a policy is package.module:make_policy, mlp, cnn, lstm, gru, a run or a policy file"),
        (["check-policy", "wizard", "CartPole-v1"], "there is no run wizard"),
    ],
)
def test_wrong_use_is_one_line(refused: Any, arguments: list[str], message: str) -> None:
    refused(message, *arguments)
