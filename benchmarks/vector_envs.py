"""How fast are vector envs? One process, workers and Gymnasium's AsyncVectorEnv step the same copies, in turns.

    python benchmarks/vector_envs.py                          # 8 copies of CartPole-v1 and of HalfCheetah-v5
    python benchmarks/vector_envs.py --repeats 5 --seconds 0.05

"helped" means that this process steps a share of the copies itself, like a worker (`env.help_workers`). A figure is the time of one
step of all copies, in µs, as the median over repeats with the range. Sides take turns within a repeat, so that whatever else the
machine does falls on all of them; a ratio is the median of the repeats' own ratios. `measure()` returns all of it as a dict.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median
from typing import Any

import gymnasium as gym
import numpy as np
from rich.console import Console
from rich.table import Table

from inchworm.config.sections import EnvConfig
from inchworm.env.source import make_vector_env

COPIES = 8
WORLDS = ("CartPole-v1", "HalfCheetah-v5")
ONE, WORKER, HELPED, WORKERS, ASYNC, NATIVE = "one process", "1 worker", "1 worker helped", "2 workers", "AsyncVectorEnv", "native"
ACT_ONE, ACT_HELPED = "acting, one process", "acting, 1 worker helped"

Step = Callable[[], None]
"""One step of all copies."""

TARGETS = {
    "CartPole-v1": {"workers / AsyncVectorEnv": 5.0},
    "HalfCheetah-v5": {"1 worker helped / one process": 1.4, "workers / AsyncVectorEnv": 1.3},
}


def measure(repeats: int = 9, seconds: float = 0.4) -> dict[str, Any]:
    """For each world, the sides' µs a step and the ratios: {world: {"sides": {name: figure}, "ratios": {name: figure}}}."""
    return {world: _measure_world(world, repeats, seconds) for world in WORLDS}


def _measure_world(world: str, repeats: int, seconds: float) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        sides = {name: stack.enter_context(make()) for name, make in _sides(world).items()}
        for step in sides.values():
            _time(step, seconds / 5)  # first steps load and allocate
        times: dict[str, list[float]] = {name: [] for name in sides}
        for repeat in range(repeats):
            for name in sides if repeat % 2 == 0 else list(sides)[::-1]:
                times[name].append(_time(sides[name], seconds))
    return {"sides": {name: figure(values) for name, values in times.items()}, "ratios": _ratios(times)}


def _time(step: Step, seconds: float) -> float:
    """µs a step, measured over some seconds."""
    began, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < seconds:
        step()
        count += 1
    return passed / count * 1e6


def figure(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": median(values), "low": min(values), "high": max(values)}


def _ratios(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """How many times faster, repeat by repeat."""

    def ratio(slow: str, fast: list[float]) -> dict[str, float]:
        return figure([one / other for one, other in zip(times[slow], fast)])

    best = min((times[WORKER], times[HELPED], times[WORKERS]), key=median)
    ratios = {
        "workers / AsyncVectorEnv": ratio(ASYNC, best),
        "1 worker helped / one process": ratio(ONE, times[HELPED]),
        "2 workers / one process": ratio(ONE, times[WORKERS]),
        "2 workers / AsyncVectorEnv": ratio(ASYNC, times[WORKERS]),
        "1 worker helped / one process, acting": ratio(ACT_ONE, times[ACT_HELPED]),
    }
    return ratios | ({"native / one process": ratio(ONE, times[NATIVE])} if NATIVE in times else {})


def _sides(world: str) -> dict[str, Callable[[], contextlib.AbstractContextManager[Step]]]:
    sides: dict[str, Callable[[], contextlib.AbstractContextManager[Step]]] = {
        ONE: lambda: _ours(world, 0),
        WORKER: lambda: _ours(world, 1),
        HELPED: lambda: _ours(world, 1, helped=True),
        WORKERS: lambda: _ours(world, 2),
        ASYNC: lambda: _gymnasium(world),
        ACT_ONE: lambda: _acting(world, 0),
        ACT_HELPED: lambda: _acting(world, 1, helped=True),
    }
    if world == "CartPole-v1":
        sides[NATIVE] = lambda: _ours(world, 0, native=True)
    return sides


@contextlib.contextmanager
def _ours(world: str, workers: int, *, native: bool = False, helped: bool = False) -> Iterator[Step]:
    """Random actions, chosen beforehand."""
    env = make_vector_env(EnvConfig(id=world, num_envs=COPIES, native=native, num_workers=workers, help_workers=helped))
    env.action_space.seed(0)
    actions = [np.stack([env.action_space.sample() for _ in range(COPIES)]) for _ in range(64)]
    env.reset()
    yield _cycle(env.step, actions)
    env.close()


@contextlib.contextmanager
def _gymnasium(world: str) -> Iterator[Step]:
    env = gym.make_vec(world, num_envs=COPIES, vectorization_mode="async")  # with shared memory, its default
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(64)]
    env.reset(seed=0)
    yield _cycle(env.step, actions)
    env.close()


def _cycle(step: Callable[[Any], Any], actions: list[Any]) -> Step:
    turn = 0

    def one() -> None:
        nonlocal turn
        turn = (turn + 1) % len(actions)
        step(actions[turn])

    return one


@contextlib.contextmanager
def _acting(world: str, workers: int, *, helped: bool = False) -> Iterator[Step]:
    """A small network acts on what it sees."""
    config = EnvConfig(id=world, num_envs=COPIES, native=False, num_workers=workers, help_workers=helped)
    env = make_vector_env(config)
    act = _network(env.observation_space, env.action_space)
    env.send(act(env.reset().observations))

    def step() -> None:
        env.send(act(env.recv().observations))

    yield step
    env.recv()
    env.close()


def _network(observation_space: Any, action_space: Any) -> Callable[[np.ndarray], np.ndarray]:
    """64 x 64 tanh, a sample and its log-probability, as a policy makes them: some tens of µs."""
    rng = np.random.default_rng(0)
    discrete = isinstance(action_space, gym.spaces.Discrete)
    sizes = (observation_space.shape[0], 64, 64, int(action_space.n) if discrete else action_space.shape[0])
    layers = [(rng.normal(0.0, 0.1, pair).astype(np.float32), np.zeros(pair[1], np.float32)) for pair in pairwise(sizes)]

    def act(observations: np.ndarray) -> np.ndarray:
        hidden = observations.astype(np.float32)
        for weights, biases in layers[:-1]:
            hidden = np.tanh(hidden @ weights + biases)
        out = hidden @ layers[-1][0] + layers[-1][1]  # [B, act]
        if discrete:
            logits = out - out.max(1, keepdims=True)
            logits -= np.log(np.exp(logits).sum(1, keepdims=True))
            return (logits - np.log(rng.exponential(size=out.shape))).argmax(1)
        noise = rng.standard_normal(out.shape, np.float32)
        (-0.5 * noise * noise - 0.919).sum(1)  # the log-probability, which a rollout keeps
        return np.clip(out + noise, action_space.low, action_space.high)

    return act


def table(world: str, results: dict[str, Any]) -> Table:
    """Times, then ratios with what is asked of them."""
    shown = Table("", "median", "range", "asked", title=f"{COPIES} copies of {world}: µs for a step of all")
    for name, value in results["sides"].items():
        shown.add_row(name, f"{value['median']:.0f}", f"{value['low']:.0f} to {value['high']:.0f}", "")
    shown.add_section()
    for name, value in results["ratios"].items():
        asked = TARGETS[world].get(name)
        verdict = "" if asked is None else f"{asked:.1f}: {'yes' if value['median'] >= asked else 'NO'}"
        shown.add_row(name, f"{value['median']:.2f}", f"{value['low']:.2f} to {value['high']:.2f}", verdict)
    return shown


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.4, help="of each side in each repeat")
    options = parser.parse_args()
    console = Console()
    for world, results in measure(options.repeats, options.seconds).items():
        console.print(table(world, results))


if __name__ == "__main__":
    main()
