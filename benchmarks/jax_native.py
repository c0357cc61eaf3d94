"""Whole loops compiled by JAX: inchworm's fused training of gymnax's CartPole against rejax and PureJaxRL, in one run, in turns.

    python benchmarks/jax_native.py --rejax-python ENVS/rejax/bin/python \\
        --purejaxrl ENVS/purejaxrl-src --purejaxrl-python ENVS/purejaxrl/bin/python         # see jax_peers.py
    python benchmarks/jax_native.py --works N64 --repeats 1 --steps-scale 0.2               # a quick look; nothing is kept

Each run is a separate process. Short runs with 1 and with 2 threads come first, and each side keeps what suited it. Then, in each
repeat, each side runs twice: with an empty cache of compiled programs, and with what that run left in it. Compiling is the time in which
JAX traced, lowered and compiled, or read from its cache, by its own report.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import jobs
import memory
import results
from figures import Run, Section, Target, geometric_mean, median_range, ratios, speed, table
from jax_peers import OURS, JaxSide, add_options, sides
from works import NATIVE

COUNTS = (10, 20, 40, 80)
"""Iterations of N64 whose times must be proportional."""
SWEEP_SCALE = 0.25

Works = dict[str, dict[str, Any]]


def train(group: str, name: str, seed: int, scale: float = 1.0, *, threads: int = 1) -> dict[str, Any]:
    """inchworm's side: two iterations to compile, then the rest."""
    from inchworm_side import train as train_host
    from jax_measures import CompileClock, installed

    importlib.import_module("gymnax")  # which computes arrays; the peers' clocks start after it, too
    compiling = CompileClock()
    found = train_host(group, name, seed, scale, threads=threads, warmup=2, backend="jax")
    return {**found, "compile_seconds": compiling.seconds(), "versions": installed(("gymnax", "jax", "optax"))}


def growth(counts: list[int], seed: int = 0) -> list[dict[str, float]]:
    """Seconds of so many iterations of N64, one after another in one process, compiled before."""
    from inchworm import PPOTrainer
    from inchworm_side import config_of

    work = dataclasses.replace(NATIVE["N64"], total_timesteps=(2 + sum(counts)) * NATIVE["N64"].batch)
    found = []
    with PPOTrainer("mlp", work.env_id, config_of(work, seed, backend="jax")) as trainer:
        trainer.train(2 * work.batch)
        for count in counts:
            began = time.perf_counter()
            trainer.train(trainer.total_timesteps + count * work.batch)
            found.append({"iterations": count, "seconds": time.perf_counter() - began})
    return found


def program_bytes(name: str) -> dict[str, int]:
    """Bytes of the arrays of a work's compiled loop by XLA's own account, of one rollout among them, and of the process around it.

    The loop's parts are made as a trainer makes them, because a trainer does not show the compiled program.
    """
    import jax
    import numpy as np

    from inchworm import PPOTrainer
    from inchworm.backends.jax.fused import FusedTraining, run_iterations
    from inchworm.backends.jax.scan_collector import ScanCollector
    from inchworm_side import config_of
    from scaling import rollout_bytes

    with PPOTrainer("mlp", NATIVE[name].env_id, config_of(NATIVE[name], 0, backend="jax")) as trainer:
        collector: Any = trainer.collector
        assert isinstance(collector, ScanCollector)
        loop = FusedTraining(collector, trainer.learner, trainer.config)  # type: ignore[arg-type]
        call, ready = loop._call(1), memory.resident()
        program = jax.jit(run_iterations, static_argnums=0).lower(loop._program, collector.lane_numbers, *call, 1, np.True_).compile()
        compiled, sizes = memory.resident(), program.memory_analysis()
        return {
            "rollout": rollout_bytes(trainer.collect_rollouts()),
            "arguments": sizes.argument_size_in_bytes,
            "results": sizes.output_size_in_bytes,
            "temporary": sizes.temp_size_in_bytes,
            "compiling": compiled - ready,
        }


def by_processor_time(run: Run) -> Run:
    """The run in the seconds of its process's threads together: on a machine that does much else, the better measure of one thread."""
    compiling = run["warmup_cpu_seconds"] - run["cpu_seconds"] * run["warmup_steps"] / run["steps"]
    return {**run, "seconds": run["cpu_seconds"], "compile_seconds": max(0.0, compiling)}


def measure(
    works: list[str], found: list[JaxSide], repeats: int, scale: float, threads: list[int], directory: Path, cpu_time: bool = False
) -> dict[str, Any]:
    """All runs: per work and side the thread setting chosen, the runs with an empty cache, and those after them."""
    parts: Works = {}
    for work in works:
        chosen = {side.name: best_threads(side, work, threads, scale, directory) for side in found}
        print(f"{work} threads: {chosen}", flush=True)
        cold, warm = ({side.name: [] for side in found} for _ in range(2))
        for repeat in range(repeats):
            turn = repeat % len(found)
            for side in found[turn:] + found[:turn]:
                cache = directory / f"{side.name}-{work}-{repeat}"
                arguments = {"group": "native", "name": work, "seed": repeat, "scale": scale, "threads": chosen[side.name]}
                for runs in (cold, warm):
                    run = side.run("train", arguments, chosen[side.name], cache)
                    runs[side.name].append(by_processor_time(run) if cpu_time else run)
                speeds = " and ".join(f"{speed(runs[side.name][-1]):,.0f}" for runs in (cold, warm))
                compiling = " and ".join(f"{runs[side.name][-1]['compile_seconds']:.1f}" for runs in (cold, warm))
                print(f"{work} {side.name} repeat {repeat}: {speeds} steps/s, compiling {compiling} s", flush=True)
        parts[work] = {"threads": chosen, "cold": cold, "warm": warm}
    data: dict[str, Any] = {"sides": [side.name for side in found], "works": parts}
    if any(side.name == OURS for side in found):
        data["growth"] = [jobs.run("jax_native:growth", {"counts": list(COUNTS)}) for _ in range(repeats)]
        data["program_bytes"] = {work: jobs.run("jax_native:program_bytes", {"name": work}) for work in works}
    return data


def best_threads(side: JaxSide, work: str, threads: list[int], scale: float, directory: Path) -> int:
    """The thread setting with the highest speed in a short run."""
    counts = [count for count in threads if count <= len(os.sched_getaffinity(0))] or [1]
    if len(counts) == 1:
        return counts[0]
    arguments = {"group": "native", "name": work, "seed": 0, "scale": SWEEP_SCALE * scale}
    return max(
        counts, key=lambda count: speed(side.run("train", {**arguments, "threads": count}, count, directory / f"{side.name}-{work}-sweep"))
    )


def all_ratios(part: dict[str, Any], ours: str, theirs: str) -> list[float]:
    """How many times as fast, in both runs of each repeat."""
    return [ratio for runs in (part["cold"], part["warm"]) for ratio in ratios(runs[ours], runs[theirs])]


def over_faster_peer(part: dict[str, Any], peers: list[str]) -> float:
    """The median ratio to whichever peer is the faster one on the work."""
    return min(median(all_ratios(part, OURS, peer)) for peer in peers)


def compiling(part: dict[str, Any], kind: str, side: str) -> float:
    """Median seconds of compiling with an empty cache ("cold") or a filled one ("warm")."""
    return median(run["compile_seconds"] for run in part[kind][side])


def targets(data: dict[str, Any]) -> list[Target]:
    """Speed against the faster peer, compiling against each, growth in steps and in envs."""
    works, names = data["works"], data["sides"]
    peers = [name for name in names if name != OURS]
    if OURS not in names:
        return []
    found = []
    if peers:
        faster = {work: over_faster_peer(part, peers) for work, part in works.items()}
        least = min(faster, key=lambda work: faster[work])
        found = [
            Target("JAX, whole loop compiled, against the faster of its peers, geometric mean", geometric_mean(faster.values()), 1.2),
            Target(f"JAX, whole loop compiled, against the faster of its peers, the least ({least})", faster[least], 1.0),
        ]
    for peer in peers:
        for kind, words, bound in (("cold", "first compile", 0.5), ("warm", "compile from the cache", 0.2)):
            over = geometric_mean(compiling(part, kind, OURS) / compiling(part, "cold", peer) for part in works.values())
            found.append(Target(f"JAX: {words} over {peer}'s first", over, bound, at_least=False))
    if data.get("growth"):
        found.append(Target(f"JAX: time of a step, {COUNTS[-1]} iterations over {COUNTS[0]}", _growth(data["growth"]), 1.1, at_least=False))
    sizes = sorted(works, key=lambda work: NATIVE[work].num_envs)
    for fewer, more in itertools.pairwise(sizes):
        cost = median(1 / ratio for ratio in ratios(_all(works[more]), _all(works[fewer])))
        words = f"JAX: time of a step, {NATIVE[more].num_envs:,} envs over {NATIVE[fewer].num_envs:,}"
        found.append(Target(words, cost, 1.1, at_least=False))
    return found


def _all(part: dict[str, Any]) -> list[Run]:
    return [*part["cold"][OURS], *part["warm"][OURS]]


def _growth(repeats: list[list[dict[str, float]]]) -> float:
    per_step = [[one["seconds"] / one["iterations"] for one in repeat] for repeat in repeats]
    return median(repeat[-1] / repeat[0] for repeat in per_step)


def section(data: dict[str, Any]) -> Section:
    """The page's section."""
    works, names = data["works"], data["sides"]
    peers = [name for name in names if name != OURS]
    steps = NATIVE["N64"].rollout_steps
    lines = [
        f"gymnax's CartPole-v1, {steps} steps of each env an iteration, four epochs of four minibatches, the same networks and",
        "hyper-parameters (`works.NATIVE`): collecting and learning are one compiled program on every side. Env steps per second after",
        "compiling, median and range; each run in a separate process, in turns, each side with the better of 1 and 2 threads.",
        "rejax clips gradients element by element; otherwise all sides do the same work.",
        "",
        *table(["envs", *names], (_speeds(work, part, names) for work, part in works.items())),
    ]
    if OURS in names and peers:
        rows = [[_envs(work), *(median_range(all_ratios(part, OURS, peer), ".2f") for peer in peers)] for work, part in works.items()]
        lines += ["How many times as fast inchworm is, taken within each repeat:", "", *table(["envs", *peers], rows)]
    lines += [
        "Seconds from process start until ready to train, seconds of compiling with an empty cache and with a filled one, megabytes",
        "before training and at the peak of either run, mean return of 100 greedy episodes afterwards (inchworm: of the last 100",
        "training episodes):",
        "",
        *table(
            ["envs", "side", "threads", "start-up", "first compile", "cached", "base MB", "peak MB", "peak MB, cached", "return"],
            ([_envs(work), name, *_side_cells(part, name)] for work, part in works.items() for name in names),
        ),
    ]
    if "program_bytes" in data:
        times = "; ".join(
            f"{one['iterations']} take {median(repeat[index]['seconds'] for repeat in data['growth']):.2f} s"
            for index, one in enumerate(data["growth"][0])
        )
        lines += [
            f"Iterations of inchworm with {_envs('N64')} envs, compiled before: {times}.",
            "",
            "Megabytes of inchworm's compiled loop: the arrays of one rollout; what a call is given, returns, and holds meanwhile, by",
            "XLA's own account (the rollout, its packed samples and those of an epoch in order are among the last); what compiling added",
            "to the process, most of which it does not give back. Reading from the cache needs little of that: the second peak above.",
            "",
            *table(
                ["envs", "rollout", "arguments", "results", "temporary", "compiling"],
                ([_envs(work), *(f"{size / 1e6:,.1f}" for size in sizes.values())] for work, sizes in data["program_bytes"].items()),
            ),
        ]
    versions = {name: next(iter(works.values()))["cold"][name][0].get("versions", {}) for name in names}
    shown = (f"{name}: {', '.join(f'{package} {version}' for package, version in found.items())}" for name, found in versions.items())
    lines += [f"Versions: {'; '.join(shown)}.", ""]
    return Section("Whole loops compiled by JAX", lines, targets(data))


def _envs(work: str) -> str:
    return f"{NATIVE[work].num_envs:,}"


def _speeds(work: str, part: dict[str, Any], names: list[str]) -> list[str]:
    runs = {name: [*part["cold"][name], *part["warm"][name]] for name in names}
    return [_envs(work), *(median_range([speed(run) for run in runs[name]], ",.0f") for name in names)]


def _side_cells(part: dict[str, Any], name: str) -> list[str]:
    runs = [*part["cold"][name], *part["warm"][name]]
    of = lambda key: median(run[key] or 0.0 for run in runs)  # noqa: E731
    seconds = [f"{of('startup_seconds'):.1f}", *(f"{compiling(part, kind, name):.1f}" for kind in ("cold", "warm"))]
    return [
        str(part["threads"][name]),
        *seconds,
        f"{of('base_bytes') / 1e6:,.0f}",
        *(f"{median(run['peak_bytes'] for run in part[kind][name]) / 1e6:,.0f}" for kind in ("cold", "warm")),
        f"{of('last_return'):.0f}",
    ]


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", nargs="+", default=list(NATIVE), choices=list(NATIVE))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="thread settings to choose from")
    parser.add_argument("--steps-scale", type=float, default=1.0, help="part of the steps, for a quick look")
    parser.add_argument("--cpu-time", action="store_true", help="compare processor time, for a busy machine; nothing is kept")
    parser.add_argument("--only-peers", action="store_true", help="leave inchworm out; nothing is kept")
    add_options(parser)
    options = parser.parse_args()
    found = [side for side in sides(options, "jax_native") if not (options.only_peers and side.name == OURS)]
    with tempfile.TemporaryDirectory(prefix="inchworm-jax-native-") as directory:
        data = measure(options.works, found, options.repeats, options.steps_scale, options.threads, Path(directory), options.cpu_time)
    shown = section(data)
    print("\n".join([*shown.lines, *(target.row() for target in shown.targets)]))
    if options.steps_scale == 1.0 and options.works == list(NATIVE) and not (options.only_peers or options.cpu_time) and len(found) > 1:
        results.save("jax_native", data)


if __name__ == "__main__":
    main()
