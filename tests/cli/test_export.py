"""`inchworm export`: a run, a policy file or several policies become programs; wrong use is one line."""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inchworm import CompositePolicy, NumpyPolicy, load_policy


def test_a_run_and_its_policy_file_are_exported(cli: Any, run: Path, tmp_path: Path) -> None:
    for name in ("small", run / "policy.safetensors"):
        result = cli("export", name, "--format", "numpy", "--out", "out")
        assert result.code == 0, result.err
        assert result.out.startswith("out: actor.py, weights.npz, interface.json; agrees with the policy to ")
        seen = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
        action, _ = runpy.run_path(str(tmp_path / "out" / "actor.py"))["act"](seen)
        policy = load_policy(run / "policy.safetensors")
        assert action.tolist() == [policy.predict(row) for row in seen]


def test_several_policies_get_a_directory_each(cli: Any, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one: Any = load_policy(run / "policy.safetensors")
    team = CompositePolicy({"red": one, "blue": NumpyPolicy(one.spec, seed=1)}, ["red", "blue"])
    monkeypatch.setattr("inchworm.cli.evaluate.load_run_policy", lambda run, best: (team, run.path))
    assert cli("export", "small", "--format", "numpy", "--out", "out").code == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["blue", "red"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["small"], "no directory is given for the export; add --out DIR"),
        (["--out", "x"], "no run is given"),
        (["small", "--format", "tflite", "--out", "x"], "onnx"),
        (["runs/small/policy.safetensors", "--best", "--out", "x"], "--best chooses a policy of a run"),
        (["small", "--out", "runs"], "runs is not empty and holds no earlier export"),
    ],
)
def test_wrong_use_is_one_line(arguments: list[str], message: str, cli: Any, run: Path) -> None:
    result = cli("export", *arguments)
    assert result.code == 2
    assert message in result.err
    assert result.err.count("\n") == 1
