"""Collectors on Ray: how many times as fast as one, what a step costs on the wire, how large and how quick to start an actor is.

python benchmarks/ray_scaling.py [--repeats 5] [--steps 64] [--many 16] [--rllib-python ENVS/rllib/bin/python]

Everything runs on a cluster that is started here, on 127.0.0.1. The peer is RLlib's env runner in an environment of its own:

    python3 -m venv ENVS/rllib && ENVS/rllib/bin/pip install "ray[rllib]==2.60.0" gymnasium torch==2.13.0
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import jobs
import results
from figures import Section, Target, median_range, table
from inchworm import NumpyPolicy, PolicyConfig, PolicySpec, RayCollector, make_vector_env
from inchworm.collect.host import STATE_SHARE, CollectorEnvs, Host, Job, Recipe, Share
from inchworm.collect.ray_collector import connect
from slow_worlds import Endless, cartpole

BUSY_SECONDS, SLEEP_SECONDS = 2e-3, 20e-3
CLUSTER_CPUS, IDLE_CPUS = 4, 0.1
"""Of the cluster, which starts as many processes in advance, and of an actor that mostly waits."""
COPIES = 8
"""Copies of the busy environment, whoever steps them."""
NODES = (1, 10, 100, 1_000)
NETWORKS = {"1 Gbit/s": 1e9 / 8, "10 Gbit/s": 10e9 / 8, "100 Gbit/s": 100e9 / 8}
CORES_PER_NODE, ROLLOUT_STEPS = 32, 512
"""Of the calculation; each core runs a collector, which steps `COPIES` copies."""


def policy_for(env: Any) -> NumpyPolicy:
    """A policy of the usual size."""
    with make_vector_env(env, 1) as made:  # type: ignore[attr-defined]
        return NumpyPolicy(PolicySpec(made.observation_space, made.action_space, PolicyConfig()))


def rate(env: Any, collectors: int, copies: int, steps: int, rollouts: int, *, cpus: float) -> float:
    """Env steps per second of collecting, after a first rollout in which everything starts."""
    with RayCollector(env, policy_for(env), num_collectors=collectors, num_envs=copies, cpus=cpus) as made:
        made.collect(steps)
        began = time.perf_counter()
        for _ in range(rollouts):
            made.collect(steps)
        return steps * copies * rollouts / (time.perf_counter() - began)


def bytes_sent(env: Any, steps: int, copies: int, rollouts: int) -> dict[str, float]:
    """What a collector's answers take in the object store per env step, and the arrays of their rollouts alone."""
    import ray

    recipe = Recipe(CollectorEnvs.of(env, copies).make, policy_for(env), state_share=STATE_SHARE)
    host = Host(recipe, Share(0, 0, copies, 1))
    stored = alone = 0
    for number in range(rollouts):
        answer = host.collect(Job(number, number, steps, number, 0), None)
        reference = ray.put((answer, []))
        stored += ray.experimental.get_object_locations([reference])[reference]["object_size"]
        alone += answer.rollout.nbytes
    host.close()
    weights = sum(array.nbytes for array in recipe.actor.get_weights().values())  # type: ignore[attr-defined]
    taken = steps * copies * rollouts
    return {"stored": stored / taken, "rollout": alone / taken, "ratio": stored / alone, "weights": weights}


def message_seconds(collectors: int, rollouts: int) -> float:
    """What a rollout costs the driver's processor besides its bytes: to ask an actor for it and take it, a rollout of one step."""
    policy = policy_for("CartPole-v1")
    with RayCollector("CartPole-v1", policy, num_collectors=collectors, num_envs=collectors, cpus=IDLE_CPUS) as made:
        made.collect(1)
        began = time.process_time()
        for _ in range(rollouts):
            made.collect(1)
        return (time.process_time() - began) / (rollouts * collectors)


def learn_seconds(steps: int) -> float:
    """What a learner of the usual size takes for an env step."""
    from inchworm import PPOConfig, PPOTrainer

    with PPOTrainer("mlp", "CartPole-v1", PPOConfig(rollout_steps=steps, max_staleness=9), num_envs=COPIES, backend="numpy") as trainer:
        rollout = trainer.collect_rollouts()
        trainer.learn(rollout)
        began = time.perf_counter()
        for _ in range(3):
            trainer.learn(rollout)
        return (time.perf_counter() - began) / (3 * rollout.num_valid)


def our_actor(starts: int) -> list[dict[str, float]]:
    """Seconds from creating an actor until it has its environments, and its resident megabytes after a rollout."""
    found = []
    for _ in range(starts):
        with RayCollector("CartPole-v1", policy_for("CartPole-v1"), num_envs=1, cpus=IDLE_CPUS) as made:
            began = time.perf_counter()
            made.collect(1)
            seconds = time.perf_counter() - began
            made.collect(64)
            found.append({"seconds": seconds, "megabytes": resident(int(made.processes[0].split()[1]))})
    return found


def resident(pid: int) -> float:
    """Megabytes of a process in memory."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return float(status.partition("VmRSS:")[2].split()[0]) / 1e3


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, the sides of each ratio in turns."""
    import ray

    connect(None, CLUSTER_CPUS)
    busy, sleeping = partial(cartpole, BUSY_SECONDS), partial(cartpole, SLEEP_SECONDS, sleeps=True)
    found: dict[str, Any] = {"repeats": options.repeats, "steps": options.steps, "many": options.many, "load": os.getloadavg()[0]}
    settings = [("busy", busy, 2, (COPIES, COPIES), 1.0), ("sleeping", sleeping, options.many, (1, options.many), IDLE_CPUS)]
    for name, env, count, copies, cpus in settings:
        runs: dict[str, list[float]] = {"one": [], "several": []}
        for repeat in range(options.repeats):
            sides = [("one", 1, copies[0]), ("several", count, copies[1])]
            for side, collectors, own in sides if repeat % 2 == 0 else reversed(sides):
                runs[side].append(rate(env, collectors, own, options.steps, 3, cpus=cpus))
        found[name] = runs
        print(name, {side: [round(value, 1) for value in values] for side, values in runs.items()}, flush=True)
    # 800 short rollouts are a whole episode of 100,000 steps, in which what a replay of it needs grows far beyond a rollout.
    found["bytes"] = {
        "CartPole-v1": bytes_sent("CartPole-v1", ROLLOUT_STEPS, COPIES, 10),
        "endless episodes": bytes_sent(Endless, 128, COPIES, 800),
    }
    found["message"], found["learn"] = message_seconds(options.many, 50), learn_seconds(256)
    found["actor"] = our_actor(options.repeats)
    ray.shutdown()
    if options.rllib_python is not None:
        python = str(options.rllib_python.absolute())
        found["rllib"] = jobs.run("rllib_side:start_runners", {"starts": options.repeats}, python=python)
    print({name: found.get(name) for name in ("bytes", "message", "learn", "actor", "rllib")}, flush=True)
    return found


def limits(data: dict[str, Any]) -> list[list[str]]:
    """Env steps per second by number of nodes, and what binds: the collectors, the learner, the driver's messages or its network.

    A collector steps an environment of `BUSY_SECONDS`; there is one for each core. A rollout is a message.
    """
    wire, per_rollout = data["bytes"]["CartPole-v1"]["stored"], ROLLOUT_STEPS * COPIES
    each = statistics.median(data["busy"]["one"])  # steps per second of a collector
    rows = []
    for nodes in NODES:
        collectors = nodes * CORES_PER_NODE
        most = {"collectors": collectors * each, "learner": 1 / data["learn"], "messages": per_rollout / data["message"]}
        # The weights go to each node once per iteration, in which every collector makes a rollout.
        sent = wire + nodes * data["bytes"]["CartPole-v1"]["weights"] / (collectors * per_rollout)
        row = [f"{nodes:,}", f"{collectors:,}", f"{collectors * per_rollout / 1e6:,.1f}", *(f"{value:,.0f}" for value in most.values())]
        row += [f"{speed / sent:,.0f}" for speed in NETWORKS.values()]
        binds = min({**most, "network of 1 Gbit/s": NETWORKS["1 Gbit/s"] / sent}.items(), key=lambda item: item[1])
        rows.append([*row, f"{binds[0]}: {binds[1]:,.0f}"])
    return rows


def section(data: dict[str, Any]) -> Section:
    """The page's section."""
    ratios = {name: [b / a for a, b in zip(data[name]["one"], data[name]["several"])] for name in ("busy", "sleeping")}
    names = {
        "busy": f"2, {COPIES} copies, a step computes for 2 ms",
        "sleeping": f"{data['many']}, one copy each, a step sleeps for 20 ms",
    }
    rates = [
        [text, *(median_range(data[name][side], ",.0f") for side in ("one", "several")), median_range(ratios[name], ".2f")]
        for name, text in names.items()
    ]
    sent = data["bytes"]
    sizes = [[name, f"{own['stored']:.1f}", f"{own['rollout']:.1f}", f"{own['ratio']:.3f}"] for name, own in sent.items()]
    sides = {"inchworm's collector": data["actor"], **({"RLlib's env runner": data["rllib"]} if "rllib" in data else {})}
    actors = [
        [name, median_range([one["seconds"] for one in runs], ".2f"), median_range([one["megabytes"] for one in runs], ".0f")]
        for name, runs in sides.items()
    ]
    each, per_rollout = statistics.median(data["busy"]["one"]), ROLLOUT_STEPS * COPIES
    lines = [
        f"{data['repeats']} repeats in turns, with a load of {data['load']:.1f} on the machine before; rollouts of {data['steps']} steps;",
        "median and range.",
        "",
        *table(["collectors", "env steps/s of one", "of several", "times"], rates),
        "",
        "What a collector's answers take in Ray's object store: the rollouts, and at times the state from which a lost actor is rebuilt.",
        f"Rollouts of {ROLLOUT_STEPS} steps; with endless episodes 128 steps, over a whole episode of 100,000.",
        "",
        *table(["environment", "bytes per env step", "of which the rollout", "ratio"], sizes),
        "",
        *table(["actor", "seconds until its first step", "resident MB"], actors),
        "",
        *([] if "rllib" in data else ["RLlib was not measured: give `--rllib-python`.", ""]),
        "**How many collectors one learner feeds.** A calculation from the figures of this page, not a measurement of so many machines.",
        "It assumes:",
        "",
        f"- nodes of {CORES_PER_NODE} cores with a collector on each, and an environment whose step computes for 2 ms",
        f"- rollouts of {ROLLOUT_STEPS} steps of {COPIES} copies",
        f"- a learner that takes {1e6 * data['learn']:.1f} µs for an env step (CartPole, 64x64, NumPy, one thread)",
        f"- {1e3 * data['message']:.2f} ms of the driver's processor for the messages of a rollout, as with {data['many']} collectors",
        f"- {sent['CartPole-v1']['stored']:.1f} bytes on the wire for an env step",
        f"- weights of {sent['CartPole-v1']['weights'] / 1e3:.1f} kB, which go to each node once per iteration",
        "",
        "The columns after the third are the env steps per second that this part alone could do; the smallest binds.",
        "",
        *table(
            ["nodes", "collectors", "million steps per iteration", "collectors do", "learner does", "messages allow", *NETWORKS, "binds"],
            limits(data),
        ),
        "",
        f"So one learner on a CPU keeps up with {1 / data['learn'] / each:,.0f} such collectors. A faster one, a GPU or several ranks,",
        "meets other limits: a network of 1 Gbit/s with",
        f"{NETWORKS['1 Gbit/s'] / sent['CartPole-v1']['stored'] / each:,.0f} collectors, and the driver's messages with",
        f"{per_rollout / data['message'] / each:,.0f}. With longer rollouts there are fewer messages, but not fewer bytes; and the learner",
        "must hold all rollouts of an iteration, with 1,000 nodes",
        f"{NODES[-1] * CORES_PER_NODE * per_rollout * sent['CartPole-v1']['rollout'] / 1e9:.1f} GB.",
        "",
    ]
    targets = [
        Target("2 Ray collectors, 2 ms a step, as fast as one", statistics.median(ratios["busy"]), 1.8),
        Target(f"{data['many']} Ray collectors, sleeping, as fast as one", statistics.median(ratios["sleeping"]), 14 / 16 * data["many"]),
        *(
            Target(f"bytes in the object store, of the rollout's own: {name}", own["ratio"], 1.2, at_least=False)
            for name, own in sent.items()
        ),
    ]
    if "rllib" in data:
        ours, theirs = (statistics.median(one["megabytes"] for one in data[name]) for name in ("actor", "rllib"))
        targets.append(Target("resident memory of an actor, of RLlib's env runner", ours / theirs, 1.0, at_least=False))
    return Section("Collectors on Ray", lines, targets)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--many", type=int, default=16)
    parser.add_argument("--rllib-python", type=Path, help="interpreter of the environment that has RLlib")
    parser.add_argument("--dry", action="store_true", help="keep nothing")
    options = parser.parse_args()
    data = measure(options)
    for line in section(data).lines:
        print(line)
    if not options.dry:
        results.save("ray_scaling", data)


if __name__ == "__main__":
    main()
