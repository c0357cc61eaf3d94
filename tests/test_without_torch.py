"""inchworm without torch, as `pip install inchworm` brings it: whatever needs it says the line to type."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

NO_TORCH = "import sys\nsys.modules['torch'] = None  # from now on an import of torch fails as if it were not installed\n"
INSTALL = 'pip install "inchworm[torch]"'


def python(code: str, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process in which torch cannot be imported; env workers inherit that."""
    (directory / "sitecustomize.py").write_text(NO_TORCH, encoding="utf-8")
    paths = os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=directory, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )


def inchworm(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python("from inchworm.cli.main import main; import sys; sys.exit(main(sys.argv[1:]))", directory, *arguments)


SMALL = ("--total-timesteps", "256", "--ppo.rollout-steps", "32", "--num-envs", "4", "--num-workers", "1", "--run.name", "light")


def test_a_run_is_trained_resumed_and_evaluated(tmp_path: Path) -> None:
    trained = inchworm(tmp_path, "train", "CartPole-v1", *SMALL)
    assert trained.returncode == 0, trained.stderr
    assert "run.backend=numpy, because" in trained.stdout
    assert "backend: numpy" in (tmp_path / "runs" / "light" / "config.yaml").read_text(encoding="utf-8")
    assert inchworm(tmp_path, "resume", "light", "--total-timesteps", "512").returncode == 0
    assert inchworm(tmp_path, "evaluate", "light", "--episodes", "2").returncode == 0
    acted = python("import inchworm; print(inchworm.load_policy('runs/light/policy.safetensors').predict([0.0] * 4))", tmp_path)
    assert acted.stdout.strip() in ("0", "1"), acted.stderr


@pytest.mark.parametrize("setting", [("--policy.kind", "lstm"), ("--backend", "torch")], ids=" ".join)
def test_what_needs_torch_says_how_to_install_it_and_leaves_nothing(tmp_path: Path, setting: tuple[str, str]) -> None:
    refused = inchworm(tmp_path, "train", "CartPole-v1", *SMALL, *setting)
    assert refused.returncode == 2
    assert refused.stderr.strip() == f"inchworm: run.backend=torch needs torch, which is not installed; type: {INSTALL}"
    assert not list(tmp_path.glob("runs/*"))


def test_all_names_are_imported_without_those_of_torch(tmp_path: Path) -> None:
    found = python("from inchworm import *\nprint('PPOTrainer' in dir(), 'TorchPolicy' in dir())", tmp_path)
    assert found.stdout.strip() == "True False", found.stderr


def test_names_of_torch_are_refused_on_use_and_not_on_import(tmp_path: Path) -> None:
    code = "import inchworm\ntry:\n    inchworm.TorchPolicy\nexcept ImportError as error:\n    print(type(error).__name__, error)"
    assert (
        python(code, tmp_path).stdout.strip()
        == f"MissingExtraError inchworm.TorchPolicy needs torch, which is not installed; type: {INSTALL}"
    )
