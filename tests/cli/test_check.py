import sys
from pathlib import Path
from typing import Any

import pytest

BAD = """
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


def test_a_sound_environment_is_said_to_be_so(cli: Any) -> None:
    result = cli("check-env", "CartPole-v1")
    assert result.code == 0, result.out + result.err
    assert result.out.splitlines()[-1] == "CartPole-v1: all checks passed"


def test_problems_make_the_exit_code_1(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "bad_world.py").write_text(BAD)
    result = cli("check-env", "bad_world:Bad")
    assert result.code == 1
    assert result.out.startswith("problem: ")
    assert "problem" in result.out.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no environment is given; type: inchworm check-env CartPole-v1"),
        (["CartPol-v1"], "did you mean CartPole-v1?"),
        (["CartPole-v1", "--env.kwargs", "{nonsense: 1}"], "nonsense"),
    ],
)
def test_wrong_use_is_one_line(cli: Any, arguments: list[str], message: str) -> None:
    result = cli("check-env", *arguments)
    assert result.code == 2
    assert message in result.err
    assert len(result.err.splitlines()) == 1
