"""`inchworm export RUN`: a policy as a program that acts without inchworm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from inchworm.cli.arguments import Metavar, RunName, UsageError, named_run, parse
from inchworm.cli.main import OK
from inchworm.config.reading import ConfigBase, config_class
from inchworm.core.protocols import Policy
from inchworm.policy.composite import CompositePolicy
from inchworm.run.export import TOLERANCE, Format, export_policy
from inchworm.run.policies import is_saved_policy, load_policy, load_run_policy
from inchworm.tracking.console import make_terminal

PROG_EXPORT = "inchworm export"


@config_class("--")
class ExportOptions(ConfigBase):
    """Write a policy as ONNX, as a torch.export program, or as a NumPy program, and check that it agrees with the policy."""

    run_name: RunName = ""
    """The run's directory, or its name in runs/; a policy file or a checkpoint is also accepted."""
    format: Format = "onnx"
    """onnx: policy.onnx; torch: policy.pt2, for torch.export.load; numpy: actor.py and weights.npz, which need nothing but NumPy."""
    out: Annotated[str | None, Metavar("DIR")] = None
    """The directory to write, which is new, empty or holds an earlier export."""
    best: bool = False
    """Export the policy of the best evaluation instead of the latest."""
    tolerance: float = TOLERANCE
    """The largest accepted difference from the policy, relative where a number is above 1."""


def run_export(arguments: Sequence[str]) -> int:
    """Write the export, check it, and print where it is."""
    options = parse(ExportOptions, arguments, PROG_EXPORT)
    if options.out is None:
        raise UsageError(f"no directory is given for the export; add --out DIR, as in {PROG_EXPORT} RUN --out exported")
    policy: Policy
    if is_saved_policy(options.run_name):
        if options.best:
            raise UsageError(f"--best chooses a policy of a run, and {options.run_name} is one policy; omit it")
        policy = load_policy(options.run_name)
    else:
        policy, _ = load_run_policy(named_run(options.run_name, PROG_EXPORT, hint="; a policy file is also accepted"), best=options.best)
    parts = policy.learned if isinstance(policy, CompositePolicy) else {"": policy}  # several policies: a directory each
    for name, part in parts.items():
        written = export_policy(part, Path(options.out) / name, options.format, tolerance=options.tolerance)
        files = ", ".join(file.name for file in written.files)
        make_terminal().print(f"{written.directory}: {files}; agrees with the policy to {written.max_error:.1g}")
    return OK
