"""rejax's side of a benchmark of JAX-native environments. It runs in a virtual environment of rejax's own, through `jobs.run(python=…)`.

rejax clips gradients element by element and updates actor and critic apart; everything else is as in the work. Its evaluations are
inside the compiled program; a speed run has none.
"""

from __future__ import annotations

import time
from typing import Any

import memory
from jax_measures import CompileClock, Watch, greedy_returns, installed
from jobs import since_start
from works import Work, find, scaled

PACKAGES = ("rejax", "gymnax", "jax", "flax", "optax")


def build(work: Work, steps: int) -> Any:
    """The algorithm whose `train` makes this many steps."""
    import optax
    from rejax import PPO  # type: ignore[import-not-found]

    minibatches = work.batch // work.minibatch_size
    rate: Any = work.learning_rate
    if work.linear:
        rate = optax.linear_schedule(rate, 0.0, work.total_timesteps // work.batch * work.update_epochs * minibatches)
    algorithm = PPO.create(
        env=work.env_id.removeprefix("gymnax:"),
        agent_kwargs={"activation": "tanh", "hidden_layer_sizes": (64, 64)},
        num_envs=work.num_envs,
        num_steps=work.rollout_steps,
        num_minibatches=minibatches,
        num_epochs=work.update_epochs,
        learning_rate=rate,
        gamma=work.gamma,
        gae_lambda=work.gae_lambda,
        clip_eps=work.clip_coef,
        vf_coef=work.vf_coef,
        ent_coef=work.ent_coef,
        max_grad_norm=work.max_grad_norm,
        total_timesteps=steps,
        eval_freq=steps,
        skip_initial_evaluation=True,
    )
    return algorithm.replace(eval_callback=lambda *_: ())


def train(group: str, name: str, seed: int, scale: float = 1.0, *, threads: int = 1) -> dict[str, Any]:
    """The same compiled training twice, with two keys: the first one compiles, the second is timed."""
    del threads  # set by the process's environment
    import jax

    work = scaled(find(group, name), scale)
    algorithm = build(work, work.total_timesteps)
    program = jax.jit(algorithm.train)
    ready, base, compiling = since_start(), memory.resident(), CompileClock()
    began, cpu_began = time.perf_counter(), time.process_time()
    jax.block_until_ready(program(jax.random.key(seed)))
    start, cpu_start, compiled = time.perf_counter(), time.process_time(), compiling.seconds()
    state, _ = jax.block_until_ready(program(jax.random.key(1000 + seed)))
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    steps = int(state.global_step)
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
        "last_return": float(_score(algorithm, state, seed).mean()),
        "versions": installed(PACKAGES),
    }


def _score(algorithm: Any, state: Any, seed: int) -> Any:
    """Returns of 100 greedy episodes."""
    return greedy_returns(
        algorithm.env,
        algorithm.env_params,
        lambda params, observations: algorithm.actor.apply(params, observations, method="_action_dist").logits,
        state.actor_ts.params,
        seed,
    )


def solve(seed: int, interval: int) -> dict[str, Any]:
    """Training in compiled pieces of some iterations, with a greedy evaluation after each, until CartPole-v1 is solved."""
    import jax

    work = find("solve", "solve")
    algorithm = build(work, interval * work.batch)
    state = jax.jit(algorithm.init_state)(jax.random.key(seed))
    piece = jax.jit(lambda state: algorithm.train(train_state=state)[0])
    watch = Watch()
    for _ in range(work.total_timesteps // (interval * work.batch)):
        state = jax.block_until_ready(piece(state))
        if watch.solved(int(state.global_step), lambda state=state: _score(algorithm, state, seed)):
            break
    return {**watch.result(), "versions": installed(PACKAGES)}
