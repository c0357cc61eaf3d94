"""`inchworm version`: the versions of everything that decides a result."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from inchworm.cli.arguments import UsageError
from inchworm.versions import versions


def run(arguments: Sequence[str]) -> int:
    """Print them, one a line."""
    if arguments:
        raise UsageError(f"unexpected argument {arguments[0]}; inchworm version takes none")
    sys.stdout.write("".join(f"{name} {version or 'not installed'}\n" for name, version in versions().items()))
    return 0
