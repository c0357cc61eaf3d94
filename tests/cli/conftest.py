"""What the tests of commands share: a working directory, a run that was trained in seconds, and the command line in-process."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from inchworm.cli.main import main

SMALL = ["--env.num-envs=2", "--ppo.rollout-steps=32", "--ppo.minibatch-size=64", "--ppo.update-epochs=1", "--run.total-timesteps=256"]
SMALL += ["--run.checkpoint-interval=2", "--evaluation.final-episodes=3", "--evaluation.num-envs=2"]
"""Four iterations of 64 steps."""


@dataclass
class Result:
    code: int
    out: str
    err: str


Cli = Callable[..., Result]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """`cli("train", "CartPole-v1")` in an empty working directory."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> Result:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture
def refused(cli: Cli) -> Cli:
    """`refused(message, *arguments)`: the command ends with code 2 and one line that contains the message."""

    def check(message: str, *arguments: object, code: int = 2) -> Result:
        result = cli(*arguments)
        assert result.code == code, result.err
        assert message in result.err
        assert len(result.err.splitlines()) == 1
        return result

    return check


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, trained once."""
    directory = tmp_path_factory.mktemp("trained") / "runs"
    assert main(["train", "CartPole-v1", *SMALL, "--run.name=small", f"--run.directory={directory}", "--quiet"]) == 0
    return directory / "small"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of that run, as runs/small in the test's own directory."""
    return Path(shutil.copytree(trained, tmp_path / "runs" / "small"))


@pytest.fixture
def small() -> list[str]:
    """The flags of that run."""
    return list(SMALL)
