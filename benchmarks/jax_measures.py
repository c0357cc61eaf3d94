"""What the sides of JAX benchmarks share: the time of compiling, greedy episodes of a gymnax environment, versions.

Nothing here needs inchworm: a peer's environment has only the peer.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable, Sequence
from typing import Any

from jobs import since_start

EPISODES, SOLVED = 100, 475.0


class Watch:
    """Records the time until an evaluation reaches the target, and how much of it was spent evaluating."""

    def __init__(self) -> None:
        self.evaluating = 0.0
        self.found: dict[str, Any] = {"steps": None, "seconds": None, "evaluating": None, "score": None}

    def solved(self, env_steps: int, score: Callable[[], Any]) -> bool:
        """Take a score, the returns of the evaluation episodes; whether their mean is enough."""
        began = time.perf_counter()
        returns = score()
        mean = float(sum(returns) / len(returns))
        self.evaluating += time.perf_counter() - began
        self.found["score"] = mean
        if mean >= SOLVED:
            self.found |= {"steps": env_steps, "seconds": since_start() - self.evaluating, "evaluating": self.evaluating}
        return mean >= SOLVED

    def result(self) -> dict[str, Any]:
        """Seconds from process start without evaluations, those of evaluations, env steps, and the last score."""
        return self.found


class CompileClock:
    """Seconds in which JAX traced, lowered or compiled, or read a compiled program from its cache, since this was made."""

    def __init__(self) -> None:
        import jax

        self._spans: list[tuple[float, float]] = []
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, duration: float, **_: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            end = time.perf_counter()
            self._spans.append((end - duration, end))

    def seconds(self) -> float:
        """The time covered; tracing a function includes tracing those that it calls."""
        total, covered = 0.0, float("-inf")
        for start, end in sorted(self._spans):
            total += max(0.0, end - max(start, covered))
            covered = max(covered, end)
        return total


_programs: dict[str, Any] = {}


def greedy_returns(env: Any, params: Any, logits: Callable[[Any, Any], Any], weights: Any, seed: int) -> Any:
    """[100] Returns of one greedy episode each, compiled once in a process."""
    if "greedy" not in _programs:
        _programs["greedy"] = _greedy_program(env, params, logits)
    return _programs["greedy"](weights, seed)


def _greedy_program(env: Any, params: Any, logits: Callable[[Any, Any], Any]) -> Any:
    import jax
    import jax.numpy as jnp
    import numpy as np

    def step(weights: Any, carry: Any, key: Any) -> tuple[Any, None]:
        observations, states, running, returns = carry
        actions = jnp.argmax(logits(weights, observations), axis=-1)  # [100]
        keys = jax.random.split(key, EPISODES)
        observations, states, rewards, done, _ = jax.vmap(env.step, in_axes=(0, 0, 0, None))(keys, states, actions, params)
        return (observations, states, running & ~done, returns + jnp.where(running, rewards, 0.0)), None

    def program(weights: Any, seed: Any) -> Any:
        first, rest = jax.random.split(jax.random.PRNGKey(10_000 + seed))
        observations, states = jax.vmap(env.reset, in_axes=(0, None))(jax.random.split(first, EPISODES), params)
        carry = (observations, states, jnp.ones(EPISODES, bool), jnp.zeros(EPISODES))
        (_, _, _, returns), _ = jax.lax.scan(
            lambda carry, key: step(weights, carry, key), carry, jax.random.split(rest, params.max_steps_in_episode)
        )
        return returns

    compiled = jax.jit(program)
    return lambda weights, seed: np.asarray(compiled(weights, seed))


def installed(packages: Sequence[str]) -> dict[str, str]:
    """The versions of the packages that there are."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
