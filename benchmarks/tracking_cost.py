"""What tracking costs a training: its time with every tracker on, against none, in turns; also with a slow MLflow server.

python benchmarks/tracking_cost.py [--repeats 3] [--steps 2000000]          (about ten minutes, on a quiet machine)

The wait at the end of a training is not part of it and is given apart. MLflow writes its SQLite file, or is a server on this machine, which
runs with the lowest priority because servers run elsewhere.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import results
from figures import Section, Target, table
from inchworm import EvalConfig, MlflowConfig, PPOTrainer, TrackingConfig, TrainingConfig, WandbConfig
from inchworm.config.presets import PRESETS

LIMIT = 1.02
"""What a training may take with trackers, relative to one without."""


def free_port() -> int:
    """A port of 127.0.0.1 that is free now."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def mlflow_server(folder: Path) -> Iterator[int]:
    """A server of MLflow on a port of 127.0.0.1."""
    port = free_port()
    store = [f"--backend-store-uri=sqlite:///{folder}/server.db", f"--artifacts-destination={folder}/artifacts"]
    command = ["nice", "-n", "19", sys.executable, "-m", "mlflow", "server", *store, "--host=127.0.0.1", f"--port={port}", "--workers=1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        yield port
    finally:
        os.killpg(process.pid, 15)
        process.wait()


@contextmanager
def delayed(port: int, seconds: float) -> Iterator[int]:
    """A port of 127.0.0.1 that passes everything on to another, each request after `seconds`; in a process of its own."""
    listening = free_port()
    process = subprocess.Popen(["nice", "-n", "19", sys.executable, __file__, "--pass-on", str(listening), str(port), str(seconds)])
    try:
        yield listening
    finally:
        process.kill()
        process.wait()


def pass_on(listening: int, port: int, seconds: float) -> None:
    """The process of `delayed`."""

    def copy(source: socket.socket, target: socket.socket, wait: float) -> None:
        while data := source.recv(65536):
            time.sleep(wait)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

    listener = socket.create_server(("127.0.0.1", listening))
    while True:
        client, _ = listener.accept()
        server = socket.create_connection(("127.0.0.1", port))
        for pair in ((client, server, seconds), (server, client, 0.0)):
            threading.Thread(target=copy, args=pair, daemon=True).start()


def train(config: TrainingConfig, tracking: TrackingConfig, directory: Path) -> dict[str, float]:
    """Train once; seconds of `train`, which starts the trackers' process, its processor seconds, and seconds of the wait at the end."""
    with PPOTrainer("mlp", config.env, config.replace(tracking=tracking), run_dir=directory) as trainer:
        began = time.perf_counter(), time.process_time()
        trainer.train()
        ended = time.perf_counter(), time.process_time()
    seconds, busy = (now - then for now, then in zip(ended, began))
    return {"seconds": seconds, "busy": busy, "wait": time.perf_counter() - ended[0]}


def measure(repeats: int, steps: int) -> dict[str, Any]:
    """Every training of every side, in turns."""
    preset = PRESETS["CartPole-v1"].config
    run = preset.run.replace(total_timesteps=steps, report=False)
    config = preset.replace(run=run, evaluation=EvalConfig(interval=0, final_episodes=0))
    wandb = WandbConfig(project="benchmark", mode="offline")
    runs: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name, mlflow_server(Path(name)) as port, delayed(port, 0.5) as slow:
        every = {"csv": True, "tensorboard": True, "wandb": wandb, "finish_seconds": 10.0}
        sides = {
            "none": TrackingConfig(),
            "every tracker": TrackingConfig(**every, mlflow=MlflowConfig(experiment="benchmark")),
            "every tracker, a server of MLflow answers in 500 ms": TrackingConfig(
                **every, mlflow=MlflowConfig(uri=f"http://127.0.0.1:{slow}")
            ),
        }
        train(config, sides["none"], Path(name) / "warm-up")
        for repeat in range(repeats):
            order = list(sides) if repeat % 2 == 0 else list(reversed(sides))
            found = {side: train(config, sides[side], Path(name) / f"{repeat}-{order.index(side)}") for side in order}
            for side, one in found.items():
                runs.setdefault(side, []).append(one)
            print({side: {key: round(value, 3) for key, value in one.items()} for side, one in found.items()}, flush=True)
    return {
        "steps": steps,
        "rows": -(-steps // (preset.env.num_envs * preset.ppo.rollout_steps)),
        "repeats": repeats,
        "load": os.getloadavg()[0],
        "runs": runs,
    }


def section(data: dict[str, Any]) -> Section:
    """The page's section."""
    seconds = statistics.median(one["seconds"] for one in data["runs"]["none"])
    lines = [
        f"The preset of CartPole-v1, {data['steps']:,} steps in {seconds:.0f} seconds, {data['rows']:,} rows of metrics, {data['repeats']}",
        f"repeats in turns, with a load of {data['load']:.0f} on the machine:",
        "time of a training with trackers, relative to one without. Wall time is compared within each repeat, median and range: it",
        "holds what the trackers' process takes from the machine. Processor time is that of the training process, the least of all",
        "repeats. The wait is at the end of a training, for what has not been delivered yet.",
        "",
    ]
    base, rows, targets = data["runs"]["none"], [], []
    for side, found in data["runs"].items():
        if side != "none":
            wall = [one["seconds"] / without["seconds"] for one, without in zip(found, base)]
            busy = min(one["busy"] for one in found) / min(one["busy"] for one in base)
            wait = statistics.median(one["wait"] for one in found)
            rows.append([side, f"{statistics.median(wall):.2f} ({min(wall):.2f} to {max(wall):.2f})", f"{busy:.3f}", f"{wait:.1f} s"])
            targets.append(Target(f"{side}: wall time, of that without, median", statistics.median(wall), LIMIT, at_least=False))
            targets.append(Target(f"{side}: processor time, of that without", busy, LIMIT, at_least=False))
    lines += table(["trackers", "wall time", "processor time", "wait at the end"], rows)
    return Section("The cost of tracking", lines, targets)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2_000_000)
    parser.add_argument("--pass-on", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.pass_on is not None:
        listening, port, seconds = options.pass_on
        pass_on(int(listening), int(port), float(seconds))
    data = measure(options.repeats, options.steps)
    for line in section(data).lines:
        print(line)
    results.save("tracking_cost", data)


if __name__ == "__main__":
    main()
