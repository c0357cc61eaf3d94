"""G1: collectors in processes and on Ray that are killed, the process that learns from them, and a node of a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from faults import runs
from faults.programme import Outcome, Work, procedure
from faults.runs import RUN, Child, fresh, wait_for

UPDATES, LONG = 30, 200
"""Of a run; the long one has time for many faults."""
COLLECTORS, NODE_CPUS = 4, 2
MARKS = {"async": "inchworm.collect.async_collector", "ray": "ray::CollectorActor"}
"""What the command line of a collector's process contains."""
STALENESS = {"async": 1, "ray": 0}


def command(engine: str, staleness: int, *flags: str, updates: int = UPDATES, collectors: int = COLLECTORS) -> list[str]:
    """A run of eight copies, shared by the collectors."""
    own = ["--collect.engine", engine, "--collect.staleness", str(staleness), "--collect.num-collectors", str(collectors)]
    own += ["--collect.restarts", "1000", "--run.checkpoint-interval", "5", *flags]
    own += ["--collect.ray-cpus", "0.25"] if engine == "ray" and "--collect.ray-cpus" not in flags else []
    return runs.train_command(*own, workers=0, updates=updates, steps=64)


def collectors_of(pid: int, engine: str) -> list[int]:
    """The collectors' processes, among all that descend from a process."""
    found = []
    for each in runs.descendants(pid):
        with contextlib.suppress(OSError):
            if MARKS[engine] in Path(f"/proc/{each}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                found.append(each)
    return found


def iteration(child: Child) -> int:
    """The last iteration of a child's run."""
    return runs.last_iteration(child.directory / RUN / "metrics.jsonl")


def check_end(outcome: Outcome, what: str, directory: Path, code: int | None, error: str, expected: dict[str, str]) -> None:
    """Count a run, which must have ended as the undisturbed one."""
    different = runs.differences(runs.fingerprint(directory / RUN), expected)
    outcome.check(code == 0 and not different, f"{what}: ended with {code}; these differ: {different}; {error[-300:]}")


@procedure("G1", full=20, test=0)
def collectors_killed(work: Work) -> Outcome:
    """kill -9 of a random collector at random moments of a run, in processes and on Ray.

    Must: the collector is back within 10 s; the final weights, metrics and checkpoints are those of collectors in one process (so that
    every rollout was learned from once), and so they are with 1, 2 and 4 collectors on Ray of which none is killed.
    `count` collectors of each engine.
    """
    outcome, rng = Outcome(), random.Random(work.seed)
    for collectors in (1, 2, COLLECTORS):
        expected = runs.undisturbed(work.scratch / f"local-{collectors}", command("local", 0, collectors=collectors))
        directory = work.scratch / f"ray-{collectors}"
        ended = runs.run(command("ray", 0, collectors=collectors), directory)
        found = runs.fingerprint(directory / RUN)
        if collectors == 1:  # in this process it is no group, so that its checkpoint has another layout
            expected, found = ({name: one.get(name, "") for name in ("metrics.jsonl", "policy.safetensors")} for one in (expected, found))
        different = runs.differences(found, expected)
        outcome.check(ended.code == 0 and not different, f"{collectors} collectors on Ray: {ended.code}; these differ: {different}")
    for engine, stale in STALENESS.items():
        expected = runs.undisturbed(work.scratch / f"undisturbed-{stale}", command("local", stale, updates=LONG))
        times: list[float] = []
        most = 0
        for number in range(work.count):  # usually one run takes all of them
            directory = fresh(work.scratch / f"{engine}-{number}")
            before = len(times)
            with runs.started(command(engine, stale, updates=LONG), directory) as child:
                _kill_collectors(child, engine, work, rng, times, outcome)
                check_end(outcome, engine, directory, child.code_within(2 * runs.LIMIT), child.errors(), expected)
            most = max(most, len(times) - before)
            if len(times) >= work.count:
                break
        outcome.check(len(times) >= work.count, f"{engine}: only {len(times)} of {work.count} collectors could be killed")
        outcome.figures |= {f"longest until replaced, {engine}": runs.longest(times), f"most kills in one run, {engine}": str(most)}
    return outcome


def _kill_collectors(child: Child, engine: str, work: Work, rng: random.Random, times: list[float], outcome: Outcome) -> None:
    """Kill collectors of a running child until there are enough or it has ended."""
    while len(times) < work.count:
        wait_for(lambda: len(collectors_of(child.pid, engine)) == COLLECTORS or not child.running(), runs.LIMIT)
        time.sleep(rng.uniform(0.0, 0.3))
        pids = collectors_of(child.pid, engine)
        if not child.running() or not pids:
            return
        victim, began = rng.choice(pids), time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        again = wait_for(lambda: not child.running() or len(set(collectors_of(child.pid, engine)) - {victim}) == COLLECTORS, 60)  # noqa: B023
        took = time.monotonic() - began
        if child.running():
            outcome.check(again is not None and not work.late(took, 10.0), f"{engine}: replaced after {took:.1f} s")
            times.append(took)
            work.tick(len(times), work.count)


@procedure("G1b", full=5, test=0)
def learners_killed(work: Work) -> Outcome:
    """kill -9 of the process that learns from collectors in processes and on Ray.

    Must: within 30 s no collector is left, within two minutes no process at all (helpers of Ray itself wait a minute for their dead
      cluster), and the run resumes to the bits of an undisturbed one.
    `count` of each engine.
    """
    outcome, rng = Outcome(), random.Random(work.seed)
    for engine, stale in STALENESS.items():
        expected = runs.undisturbed(work.scratch / f"undisturbed-{stale}", command("local", stale))
        helpers: list[int] = []
        for number in work.each():
            directory = fresh(work.scratch / f"{engine}-{number}")
            with runs.started(command(engine, stale), directory) as child:
                wait_for(lambda: iteration(child) >= 5 or not child.running(), runs.LIMIT)
                time.sleep(rng.uniform(0.0, 0.3))
                mine, left = collectors_of(child.pid, engine), runs.descendants(child.pid)
                if child.running():
                    os.kill(child.pid, signal.SIGKILL)
                    helpers += left
                    _check_gone(outcome, engine, mine, 30)
            ended = runs.run(command(engine, stale), directory)
            check_end(outcome, f"{engine}, resumed", directory, ended.code, ended.error, expected)
        _check_gone(outcome, engine, helpers, 120)
    return outcome


def _check_gone(outcome: Outcome, engine: str, pids: list[int], seconds: float) -> None:
    gone = wait_for(lambda: all(map(runs.is_gone, pids)), seconds, 0.1)
    alive = [pid for pid in pids if not runs.is_gone(pid)]
    outcome.check(gone is not None, f"{engine}: {seconds} s after the learner's death these are left: {alive}")


@procedure("G1c", full=5, test=0)
def nodes_lost(work: Work) -> Outcome:
    """A node of a Ray cluster of two is lost with its collectors; and the process that learns, while the cluster stays.

    Must: the run ends with the bits of an undisturbed one. If the other node has room, learning continues within 60 s; if not, within
      60 s after the node is back. A learner that was killed resumes on the same cluster to the same bits.
    `count` nodes, with and without room on the other one in turns, and a learner after each.
    """
    outcome, rng = Outcome(), random.Random(work.seed)
    expected = runs.undisturbed(work.scratch / "undisturbed", command("local", 0, updates=LONG))
    times: dict[bool, list[float]] = {True: [], False: []}
    with _cluster() as cluster:
        node = None
        for number in work.each():
            node = cluster.add_node(num_cpus=NODE_CPUS, node_ip_address="127.0.0.1") if node is None else node
            has_room = number % 2 == 0
            cpus = NODE_CPUS / COLLECTORS if has_room else 2 * NODE_CPUS / COLLECTORS
            flags = ["--collect.ray-address", cluster.address, "--collect.ray-strategy", "spread", "--collect.ray-cpus", str(cpus)]
            run = command("ray", 0, *flags, updates=LONG)
            directory = fresh(work.scratch / f"node-{number}")
            with runs.started(run, directory) as child:
                wait_for(lambda: iteration(child) >= 5 or not child.running(), runs.LIMIT)
                time.sleep(rng.uniform(0.0, 0.5))
                raylet = node.all_processes["raylet"][0].process.pid
                there, at = len(collectors_of(raylet, "ray")), iteration(child)
                cluster.remove_node(node, allow_graceful=False)  # kill -9
                node = None
                if not has_room:
                    time.sleep(10.0)
                    node = cluster.add_node(num_cpus=NODE_CPUS, node_ip_address="127.0.0.1")
                began = time.monotonic()
                # One more iteration may have been complete when the node was lost.
                again = wait_for(lambda: iteration(child) >= min(at + 2, LONG) or not child.running(), runs.LIMIT, 0.02)  # noqa: B023
                times[has_room].append(time.monotonic() - began)
                in_time = again is not None and not work.late(again, 60.0)
                outcome.check(in_time and there > 0, f"node {number} with {there} collectors: learning continued after {again} s")
                check_end(outcome, f"node {number}", directory, child.code_within(runs.LIMIT), child.errors(), expected)
            directory = fresh(work.scratch / f"learner-{number}")
            with runs.started(run, directory) as child:
                wait_for(lambda: iteration(child) >= 5 or not child.running(), runs.LIMIT)
                time.sleep(rng.uniform(0.0, 0.5))
                child.process.kill()
            ended = runs.run(run, directory)
            check_end(outcome, f"learner {number}", directory, ended.code, ended.error, expected)
    outcome.figures["longest until learning continued, other node has room"] = runs.longest(times[True], 1)
    outcome.figures["after the node's return, other node has none"] = runs.longest(times[False], 1)
    return outcome


@contextlib.contextmanager
def _cluster() -> Iterator[Any]:
    """A Ray cluster of one node on 127.0.0.1, in processes of this one."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": NODE_CPUS, "include_dashboard": False, "node_ip_address": "127.0.0.1"}
    )
    try:
        yield cluster
    finally:
        cluster.shutdown()
