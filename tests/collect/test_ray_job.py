"""The entrypoint of the documented Kubernetes manifest as a Ray job, on a cluster of this machine with Ray's job server."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
TINY = "--run.total-timesteps 512 --ppo.rollout-steps 16 --evaluation.interval 0 --evaluation.final-episodes 0 --quiet"


@pytest.mark.by_hand
def test_the_entrypoint_of_the_manifest_runs_as_a_ray_job(tmp_path: Path) -> None:
    """It joins the cluster that it was submitted to: the run has 4 iterations of 8 copies x 16 steps, collected by 8 actors."""
    pytest.importorskip("aiohttp_cors", reason='the job server needs: pip install "ray[default]"')
    import ray

    from inchworm.collect.ray_collector import _loopback_only

    found = re.search(r"^  entrypoint: inchworm (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    arguments = [*shlex.split(found[1].replace("/shared/runs", str(tmp_path))), *TINY.split()]
    with _loopback_only():
        context = ray.init("local", num_cpus=10, include_dashboard=True, dashboard_port=0, log_to_driver=False, logging_level="error")
    try:
        address = f"http://{context.dashboard_url}"
        submit = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", address, "--"]
        done = subprocess.run([*submit, sys.executable, "-m", "inchworm", *arguments], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    finally:
        ray.shutdown()
    assert "succeeded" in done.stdout
    assert (tmp_path / "job" / "policy.safetensors").is_file()
    assert len((tmp_path / "job" / "metrics.jsonl").read_text().splitlines()) == 4
