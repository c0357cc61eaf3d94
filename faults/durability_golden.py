"""A9: files that earlier formats wrote. `python -m faults.durability_golden` (with . and tests on PYTHONPATH) writes today's.

A set is a directory of faults/golden, named after its formats; it is written once and never changed.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

from faults import durability_runs as runs
from faults.programme import Outcome, Work, procedure

GOLDEN = runs.HERE / "golden"
DIGESTS = "digests.json"
NAMES = ("checkpoint", "policy", "rollout")


def read(directory: Path, name: str) -> str:
    """The digest of what one golden file holds today."""
    from faults.durability_damage import rollout_tree
    from inchworm.core.tensor_file import read_tensor_file
    from inchworm.core.trees import unflatten_tree
    from inchworm.policy.file import FILE_VERSION as policy_version
    from inchworm.policy.file import read_policy
    from inchworm.rollout.file import VERSION as rollout_version
    from inchworm.rollout.rollout import Rollout
    from inchworm.run.checkpoint import TrainingCheckpointer

    if name == "checkpoint":
        return runs.digest(TrainingCheckpointer(directory / "checkpoints").load().state)
    if name == "policy":
        path = directory / "policy.safetensors"
        spec, weights = read_policy(path)
        known = _known(spec.to_dict(), read_tensor_file(path, kind="policy", max_version=policy_version)[1]["spec"])
        return runs.digest({"weights": weights, "spec": json.dumps(known, sort_keys=True)})
    path = directory / "rollout.safetensors"
    then = unflatten_tree(*_two(read_tensor_file(path, kind="rollout", max_version=rollout_version)))
    return runs.digest({name: value for name, value in rollout_tree(Rollout.load(path)).items() if name in then})


def _two(file: tuple[Any, Any]) -> tuple[Any, Any]:
    return file[0], file[1]["fields"]


def _known(now: Any, then: Any) -> Any:
    """What is said now of the fields that there were then: those that have come since have their defaults."""
    return {key: _known(now[key], value) for key, value in then.items()} if isinstance(then, dict) else now


@procedure(
    "A9",
    title="golden files: a checkpoint, a policy and a rollout of every format there has been",
    must="each loads with the content it had, or is refused with its version named",
    full=1,
    test=1,
)
def golden(work: Work) -> Outcome:
    """Every set once."""
    from inchworm.core.errors import CorruptFileError

    outcome = Outcome()
    sets = sorted(path for path in GOLDEN.iterdir() if path.is_dir())
    for _ in work.each(1):
        for path in sets:
            copy = work.scratch / path.name  # reading must not depend on being allowed to write beside it, nor write
            shutil.copytree(path, copy)
            expected = json.loads((path / DIGESTS).read_text())
            for name in NAMES:
                try:
                    found = read(copy, name)
                except CorruptFileError as error:
                    outcome.check("version" in str(error), f"the {name} of {path.name}: {error}")
                else:
                    outcome.check(found == expected[name], f"the {name} of {path.name} loads with another content")
            outcome.check(_run_goes_on(copy), f"the run of {path.name} cannot be read as a run's checkpoint")
    outcome.figures["sets"] = ", ".join(path.name for path in sets)
    return outcome


def _run_goes_on(directory: Path) -> bool:
    """A trainer of the same config takes the checkpoint and makes one more update."""
    with _trainer() as trainer, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says rightly that the machine is another
        trainer.load_checkpoint(directory / "checkpoints")
        before = trainer.total_timesteps
        trainer.learn(trainer.collect_rollouts())
        return bool(trainer.total_timesteps > before > 0)


def _trainer() -> Any:
    from inchworm.config.sections import PolicyConfig, PPOConfig
    from inchworm.train.trainer import PPOTrainer

    policy = PolicyConfig(hidden_sizes=(4,), normalize_observations=True, normalize_values=True)
    ppo = PPOConfig(rollout_steps=8, num_minibatches=1, update_epochs=1)
    return PPOTrainer(policy, "CartPole-v1", ppo, num_envs=2, backend="numpy")


def write(name: str) -> Path:
    """Today's files, as a new set."""
    directory = GOLDEN / name
    directory.mkdir(parents=True)
    with mock.patch("platform.platform", return_value="Linux"), _trainer() as trainer:
        for _ in range(2):
            rollout = trainer.collect_rollouts()
            trainer.learn(rollout)
            trainer.state.iteration += 1
        trainer.save_checkpoint(directory / "checkpoints")
        trainer.save_policy(directory / "policy.safetensors")
        rollout.save(directory / "rollout.safetensors")
    (directory / DIGESTS).write_text(json.dumps({name: read(directory, name) for name in NAMES}, indent=1) + "\n")
    return directory


if __name__ == "__main__":
    sys.stdout.write(f"{write(sys.argv[1])}\n")
