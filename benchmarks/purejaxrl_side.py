"""PureJaxRL's side of a benchmark of JAX-native environments: the path of a checkout, run in a virtual environment of its own.

Its `wrappers` import brax and navix, which CartPole does not need: where they are not installed, empty modules stand in for them, which
makes it start sooner. Its training is one program from the first step to the last, with the metrics of every step as a result.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import memory
from jax_measures import CompileClock, Watch, greedy_returns, installed
from jobs import since_start
from works import Work, find, scaled

PACKAGES = ("gymnax", "jax", "flax", "optax", "distrax")
_UNUSED = {
    "brax": ("envs",),
    "brax.envs": (),
    "brax.envs.wrappers": (),
    "brax.envs.wrappers.training": ("EpisodeWrapper", "AutoResetWrapper"),
    "navix": (),
}
"""Module -> the names that are imported from it."""


def load(checkout: str) -> Any:
    """The checkout's module `ppo`."""
    absent = [name for name in _UNUSED if importlib.util.find_spec(name.partition(".")[0]) is None]
    for name in absent:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__dict__.update(dict.fromkeys(_UNUSED[name]))
    sys.path.insert(0, str(Path(checkout) / "purejaxrl"))
    return importlib.import_module("ppo")


def settings(work: Work) -> dict[str, Any]:
    """The work in PureJaxRL's names."""
    return {
        "LR": work.learning_rate,
        "NUM_ENVS": work.num_envs,
        "NUM_STEPS": work.rollout_steps,
        "TOTAL_TIMESTEPS": work.total_timesteps,
        "UPDATE_EPOCHS": work.update_epochs,
        "NUM_MINIBATCHES": work.batch // work.minibatch_size,
        "GAMMA": work.gamma,
        "GAE_LAMBDA": work.gae_lambda,
        "CLIP_EPS": work.clip_coef,
        "ENT_COEF": work.ent_coef,
        "VF_COEF": work.vf_coef,
        "MAX_GRAD_NORM": work.max_grad_norm,
        "ACTIVATION": "tanh",
        "ENV_NAME": work.env_id.removeprefix("gymnax:"),
        "ANNEAL_LR": work.linear,
        "DEBUG": False,
    }


def train(group: str, name: str, seed: int, scale: float = 1.0, *, checkout: str, threads: int = 1) -> dict[str, Any]:
    """The same compiled training twice, with two keys: the first one compiles, the second is timed."""
    del threads  # set by the process's environment
    import jax

    ppo = load(checkout)
    work = scaled(find(group, name), scale)
    program = jax.jit(ppo.make_train(settings(work)))
    ready, base, compiling = since_start(), memory.resident(), CompileClock()
    began, cpu_began = time.perf_counter(), time.process_time()
    jax.block_until_ready(program(jax.random.PRNGKey(seed)))
    start, cpu_start, compiled = time.perf_counter(), time.process_time(), compiling.seconds()
    found = jax.block_until_ready(program(jax.random.PRNGKey(1000 + seed)))
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    steps = work.total_timesteps // work.batch * work.batch
    return {
        "steps": steps,
        "seconds": seconds,
        "learn_seconds": None,
        "warmup_steps": steps,
        "warmup_seconds": start - began,
        "cpu_seconds": cpu_seconds,
        "warmup_cpu_seconds": cpu_start - cpu_began,
        "compile_seconds": compiled,
        "startup_seconds": ready,
        "base_bytes": base,
        "peak_bytes": memory.peak(),
        "last_return": float(_score(ppo, found["runner_state"][0], work, seed).mean()),
        "versions": installed(PACKAGES),
    }


def _score(ppo: Any, state: Any, work: Work, seed: int) -> Any:
    """Returns of 100 greedy episodes."""
    import gymnax  # type: ignore[import-not-found]

    env, params = gymnax.make(settings(work)["ENV_NAME"])
    network = ppo.ActorCritic(env.action_space(params).n, activation="tanh")
    return greedy_returns(env, params, lambda weights, observations: network.apply(weights, observations)[0].logits, state.params, seed)


def solve(seed: int, steps: int, *, checkout: str) -> dict[str, Any]:
    """One training of this many steps, since it cannot be stopped on the way, and one greedy evaluation."""
    import jax

    ppo = load(checkout)
    work = dataclasses.replace(find("solve", "solve"), total_timesteps=steps)
    state = jax.block_until_ready(jax.jit(ppo.make_train(settings(work)))(jax.random.PRNGKey(seed)))["runner_state"][0]
    watch = Watch()
    watch.solved(steps, lambda: _score(ppo, state, work, seed))
    return {**watch.result(), "versions": installed(PACKAGES)}
