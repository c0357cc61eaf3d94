"""The JAX peers of the benchmarks, each in a virtual environment of its own: they need packages that exclude the ones of inchworm.

    python3 -m venv ENVS/rejax && ENVS/rejax/bin/pip install rejax==0.1.3 gymnax==0.0.9 jax==0.10.2
    python3 -m venv ENVS/purejaxrl && ENVS/purejaxrl/bin/pip install gymnax==0.0.9 jax==0.10.2 flax optax distrax
    git clone https://github.com/luchris429/purejaxrl ENVS/purejaxrl-src

    --rejax-python ENVS/rejax/bin/python --purejaxrl ENVS/purejaxrl-src --purejaxrl-python ENVS/purejaxrl/bin/python

A peer that is not given is left out, and said to be. inchworm's compiled programs are kept where it keeps them by itself, under the
user's cache directory, which is a fresh one here; the peers' by the same settings of JAX, which they leave to the user.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jobs

OURS = "inchworm-jax"
REJAX, PUREJAXRL = "rejax", "purejaxrl"


@dataclass(frozen=True)
class JaxSide:
    """A side: the module with its functions, the interpreter that has its packages, and what its functions are given besides."""

    name: str
    module: str
    python: str = sys.executable
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def run(self, function: str, arguments: Mapping[str, Any], threads: int, cache: Path) -> Any:
        """Call a function of the side in a fresh process; compiled programs are kept in this directory."""
        settings = {"XDG_CACHE_HOME": str(cache)}
        if self.name != OURS:
            settings |= {
                "JAX_COMPILATION_CACHE_DIR": str(cache),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            }
        call = f"{self.module}:{function}"
        return jobs.run(call, {**arguments, **self.arguments}, threads=threads, environment=settings, python=self.python)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that name the peers."""
    parser.add_argument("--rejax-python", type=Path, help="interpreter of the environment that has rejax")
    parser.add_argument("--purejaxrl", type=Path, help="a checkout of PureJaxRL")
    parser.add_argument("--purejaxrl-python", type=Path, help="interpreter of the environment that has what PureJaxRL needs")


def sides(options: argparse.Namespace, ours: str) -> list[JaxSide]:
    """The sides that can run; `ours` is the module of inchworm's functions. The others are named with what they lack."""
    found = []
    if importlib.util.find_spec("jax") is not None:
        found.append(JaxSide(OURS, ours))
    else:
        print(f"without {OURS}: jax is not installed; type: pip install -e '.[jax,jax-envs]'")
    if options.rejax_python is not None:
        found.append(JaxSide(REJAX, "rejax_side", str(options.rejax_python.absolute())))
    else:
        print(f"without {REJAX}: give --rejax-python")
    if options.purejaxrl is not None and options.purejaxrl_python is not None:
        python, checkout = (str(path.absolute()) for path in (options.purejaxrl_python, options.purejaxrl))
        found.append(JaxSide(PUREJAXRL, "purejaxrl_side", python, {"checkout": checkout}))
    else:
        print(f"without {PUREJAXRL}: give --purejaxrl and --purejaxrl-python")
    return found
