"""Operating systems: Windows is refused in one line, and no call is needed that macOS lacks."""

import json
import os
import subprocess
import sys
from pathlib import Path

WHY = (
    "ImportError: inchworm does not run on Windows itself: it needs file locks, signals and shared memory of Linux or macOS; "
    "use it in WSL, see https://learn.microsoft.com/windows/wsl/install"
)


def test_windows_is_refused_at_import_with_what_to_use() -> None:
    program = "import sys\nsys.platform = 'win32'\nsys.modules['fcntl'] = None\nimport inchworm"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == WHY
    assert "fcntl" not in done.stderr


WITHOUT = """
import os
for name in ("memfd_create", "sched_yield", "sched_getaffinity", "posix_fallocate"):
    delattr(os, name)
"""

PROGRAM = """
import json, os, sys
from inchworm import EnvConfig, PPOConfig, PPOTrainer
assert (getattr(os, "memfd_create", None) is None) == (sys.argv[2] == "without")
env = EnvConfig(id="Acrobot-v1", num_envs=3, num_workers=2)
with PPOTrainer("mlp", env, PPOConfig(rollout_steps=16, num_minibatches=2), seed=3, run_dir=sys.argv[1]) as trainer:
    trainer.train(total_timesteps=96)
    print(json.dumps([float(array.sum()) for array in trainer.policy.get_weights().values()]))
"""


def test_a_run_with_workers_needs_none_of_the_calls_that_macos_lacks(tmp_path: Path) -> None:
    results = {}
    for name, customise in (("with", ""), ("without", WITHOUT)):
        (tmp_path / "sitecustomize.py").write_text(customise)  # read by the workers, too
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / name), name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        results[name] = json.loads(done.stdout.splitlines()[-1])
    assert results["with"] == results["without"]
