"""C1 and C7 on Stable-Baselines3: this module is both the procedures and, as `python -m faults.processes_sb3`, the script that trains."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from faults.processes_tools import descendants, fresh, is_gone, seconds, started, wait_for
from faults.processes_worlds import BEATS, STEP_SECONDS
from faults.programme import Outcome, Work, peer

NAME = "Stable-Baselines3"
MOST = 6
"""Cases at most: each of them is a run of its own, and each goes the same way."""
STEPS, UPDATES = 64, 20


def _train(workers: int) -> None:
    """The script: 20 updates, CheckpointCallback, and the model saved on Ctrl-C as its authors' RL Zoo does; goes on from what is there."""
    import torch
    from gymnasium.wrappers import TimeLimit
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import CheckpointCallback
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

    from faults.processes_worlds import Pole

    def make() -> Any:
        return TimeLimit(Pole(), 200)

    torch.set_num_threads(1)
    copies = workers or 8
    env: VecEnv = SubprocVecEnv([make] * copies) if workers else DummyVecEnv([make] * copies)
    total = UPDATES * STEPS * copies
    saved = sorted(Path("checkpoints").glob("*.zip"), key=lambda path: int(path.stem.split("_")[1]))
    if saved:
        model = PPO.load(saved[-1], env=env)
    else:
        model = PPO("MlpPolicy", env, n_steps=STEPS, batch_size=128, n_epochs=4, seed=0, device="cpu")
    callback = CheckpointCallback(save_freq=4 * STEPS, save_path="checkpoints", name_prefix="model")
    Path("begun").touch()
    try:
        model.learn(total - model.num_timesteps, callback=callback, reset_num_timesteps=False)
    except KeyboardInterrupt:
        model.save(f"checkpoints/model_{model.num_timesteps}_steps")
        env.close()
        sys.exit(130)
    Path("weights").write_bytes(b"".join(tensor.numpy().tobytes() for tensor in model.policy.state_dict().values()))
    env.close()


def _command(workers: int) -> list[str]:
    return [sys.executable, "-m", "faults.processes_sb3", str(workers)]


def _weights(workers: int, directory: Path, **variables: str) -> bytes:
    """What an undisturbed run, or one that goes on, ends with; nothing if it fails."""
    with started(_command(workers), directory, **variables) as child:
        child.code_within(120)
    return (directory / "weights").read_bytes() if (directory / "weights").exists() else b""


@peer("C1", NAME)
def workers_killed(work: Work) -> Outcome:
    """SubprocVecEnv with 4 workers, one of them killed at a random moment; one kill a run."""
    outcome = Outcome()
    moment = random.Random(work.seed)
    wanted = _weights(4, fresh(work.scratch / "undisturbed"))
    waits: list[float] = []
    ends: set[str] = set()
    for number in work.each(min(work.count, MOST)):
        directory = fresh(work.scratch / f"{number}")
        how = _kill_one(directory, moment, waits)
        ends.add(how)
        same = (directory / "weights").exists() and (directory / "weights").read_bytes() == wanted
        outcome.check(same, f"kill {number}: the run ended with {how}")
    outcome.figures = {"longest until the run ended": seconds(waits), "how it ended": "; ".join(sorted(ends)[:3])}
    outcome.notes.append(f"at most {MOST} kills, one a run: SubprocVecEnv(4), PPO, 20 updates of 64 steps; a kill ends the run")
    return outcome


def _kill_one(directory: Path, moment: random.Random, waits: list[float]) -> str:
    """How a run ended after one of its workers was killed."""
    beats = fresh(directory / "beats")
    with started(_command(4), directory, **{BEATS: str(beats), STEP_SECONDS: "0.001"}) as child:
        wait_for(lambda: len(list(beats.iterdir())) == 4 or not child.running(), 60)
        time.sleep(moment.uniform(0.0, 1.0))
        everybody = descendants(child.pid)
        began = time.monotonic()
        os.kill(int(moment.choice(sorted(beats.iterdir())).name), signal.SIGKILL)
        code = child.code_within(60)
        waits.append(time.monotonic() - began)
        left = wait_for(lambda: all(is_gone(pid) for pid in everybody), 5.0) is None
        last = (child.said().strip().splitlines() or ["nothing"])[-1][:100]
    return f"exit code {code} ({last}){', processes left' if left else ''}"


@peer("C7", NAME)
def signals(work: Work) -> Outcome:
    """SIGINT at random moments of training (each fifth time SIGTERM), then the script again, which loads the newest model."""
    outcome = Outcome()
    moment = random.Random(work.seed)
    wanted = _weights(0, fresh(work.scratch / "undisturbed"))
    waits: list[float] = []
    saved = resumed = 0
    total = min(work.count, MOST)
    for number in work.each(total):
        directory = fresh(work.scratch / f"{number}")
        kind = signal.SIGTERM if number % 5 == 4 else signal.SIGINT
        code, kept = _signal_one(directory, kind, moment, waits)
        same = _weights(0, directory) == wanted
        saved, resumed = saved + kept, resumed + same
        words = f"{'saved' if kept else 'nothing saved'}, the resumed run {'equal' if same else 'different'}"
        outcome.check(kept and same and code in (128 + kind, -kind), f"{kind.name}: exit code {code}, {words}")
    outcome.figures = {
        "longest until out": seconds(waits),
        "saved on the signal": f"{saved} of {total}",
        "resumed run bit-identical": f"{resumed} of {total}",
    }
    outcome.notes.append(
        f"at most {MOST} signals; CheckpointCallback every 4 updates, and the script itself saves the model on KeyboardInterrupt and exits "
        "with 130, as the RL Zoo of its authors does; the newest model is loaded and learns on with reset_num_timesteps=False"
    )
    return outcome


def _signal_one(directory: Path, kind: signal.Signals, moment: random.Random, waits: list[float]) -> tuple[int | None, bool]:
    """The exit code, and whether anything was saved because of the signal."""
    with started(_command(0), directory, **{STEP_SECONDS: "0.0002"}) as child:
        wait_for(lambda: (directory / "begun").exists() or not child.running(), 60)
        time.sleep(moment.uniform(0.1, 1.5))
        before = _newest(directory)
        began = time.monotonic()
        os.kill(child.pid, kind)
        code = child.code_within(30)
        waits.append(time.monotonic() - began)
    return code, _newest(directory) > before


def _newest(directory: Path) -> int:
    """Steps of the newest model."""
    return max((int(path.stem.split("_")[1]) for path in (directory / "checkpoints").glob("*.zip")), default=0)


if __name__ == "__main__":
    _train(int(sys.argv[1]))
