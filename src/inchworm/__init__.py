"""PPO in two halves: `collect` runs a policy in an environment and returns a `Rollout`, `learn` updates the policy from it.

The public names are listed in `__init__.pyi`, each with its module, and imported on first use: `import inchworm` is fast,
and a program that only acts never imports a learning framework.
"""

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

if sys.platform == "win32":
    raise ImportError(
        "inchworm does not run on Windows itself: it needs file locks, signals and shared memory of Linux or macOS; "
        "use it in WSL, see https://learn.microsoft.com/windows/wsl/install"
    )

_HOMES = {
    name: module
    for module, name in re.findall(r"^from (\S+) import (\S+) as \2$", Path(f"{__file__}i").read_text(encoding="utf-8"), re.MULTILINE)
}
"""Public name -> the module it lives in."""

_OPTIONAL = [] if importlib.util.find_spec("torch") else [name for name, module in _HOMES.items() if ".backends.torch." in module]
__all__ = sorted({*_HOMES, "__version__"}.difference(_OPTIONAL))


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name == "__version__":
        value: Any = importlib.import_module("importlib.metadata").version("inchworm")
    elif name in _HOMES:
        try:
            value = getattr(importlib.import_module(_HOMES[name]), name)
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "jax"):
                raise
            from inchworm.core.errors import MissingExtraError

            missing = f"inchworm.{name} needs {error.name}, which is not installed"
            raise MissingExtraError(f'{missing}; type: pip install "inchworm[{error.name}]"') from error
    else:
        raise AttributeError(f"module 'inchworm' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted({*globals(), *__all__})
