"""For all tests: signals as a terminal has them, one thread, one cache of compiled graphs, and where coverage is not measured."""

import gc
import os
import signal
import threading
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
UNMEASURED = ("conformance", "faults")
"""Tests of several modules at once, as those in no folder: each module's own tests reach the same lines, and tracing costs a third more."""


def pytest_configure(config: pytest.Config) -> None:
    if threading.current_thread() is threading.main_thread():  # a suite that is started in the background inherits ignored signals
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # on arrays this small, threads only wait for each other
    # Most JAX programs of the suite run once: compiling them without optimisation takes a sixth of the time.
    fast = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ.setdefault("XLA_FLAGS", fast)
    os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # nor does a test read the source lines of a program
    gc.set_threshold(20_000)  # programs consist of many objects, and nearly all live on
    if getattr(config, "cache", None) is not None:  # what was compiled is kept for all test processes and the next run of the suite
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(config.cache.mkdir("torchinductor"))
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(config.cache.mkdir("jax"))
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


def pytest_collection_finish() -> None:
    set_aside()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        set_aside()


def set_aside() -> None:
    """Let later garbage collections skip what is alive: modules and compiled programs, through which a pass takes seconds."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == TESTS or item.path.relative_to(TESTS).parts[0] in UNMEASURED:
            item.add_marker(pytest.mark.no_cover)
