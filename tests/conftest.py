"""For all tests: signals as a terminal has them, one thread, and one cache of compiled graphs."""

import os
import signal
import threading

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if threading.current_thread() is threading.main_thread():  # a suite that is started in the background inherits ignored signals
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # on arrays this small, threads only wait for each other
    # Most JAX programs of the suite run once: compiling them without optimisation takes a sixth of the time.
    fast = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ.setdefault("XLA_FLAGS", fast)
    if getattr(config, "cache", None) is not None:  # what was compiled is kept for the next run of the suite
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(config.cache.mkdir("torchinductor"))
        os.environ["INCHWORM_JAX_CACHE"] = str(config.cache.mkdir("jax"))
