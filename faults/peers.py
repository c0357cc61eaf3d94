"""The same faults with Stable-Baselines3, used as its documentation describes: A1, A6, C1, C7, D1 and F1.

`python -m faults.peers WORKERS` is the training script of C1 and C7.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
import re
import resource
import shutil
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from faults import bad_data_steps, resume, runs
from faults.bad_data_steps import LANE, Spoiled
from faults.durability_child import Killer, around
from faults.durability_files import FILE_KINDS, damaged
from faults.durability_strace import run_forked
from faults.processes_worlds import BEATS, STEP_SECONDS
from faults.programme import Outcome, Work, peer
from faults.runs import fresh, wait_for

NAME = "Stable-Baselines3"
UPDATES, LANES, STEPS = 20, 4, 32
TOTAL = UPDATES * LANES * STEPS
DURATIONS = {"save": 8000, "learn": 15000, "collect": 15000}
"""Microseconds within which a kill is set; one that comes too late is tried again, sooner, in the next phase of its kind."""
MOST_KILLS, MOST_DAMAGED, MOST_RUNS = 40, 60, 6
"""Cases at most: of A1; of A6 for each kind of damage; of C1 and C7, where each case goes the same way."""
VERDICTS = {0: "loaded, content unchanged", 3: "error raised", 4: "silently wrong"}


def _vector_env(lanes: int) -> Any:
    import gymnasium
    from stable_baselines3.common.vec_env import DummyVecEnv

    return DummyVecEnv([lambda: gymnasium.make("CartPole-v1")] * lanes)


def _model() -> Any:
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import VecNormalize

    torch.set_num_threads(1)
    return PPO(
        "MlpPolicy", VecNormalize(_vector_env(LANES)), learning_rate=lambda left: 3e-4 * left, n_steps=STEPS, batch_size=64, n_epochs=2,
        seed=0, device="cpu", policy_kwargs={"net_arch": [16, 16]},
    )  # fmt: skip


def _load(model: Path, normalizer: Path, env: Any) -> Any:
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import VecNormalize

    return PPO.load(model, env=VecNormalize.load(str(normalizer), env), device="cpu")


def _digest(model: Any) -> str:
    """SHA-256 of weights, optimizer and normalizer."""
    result = hashlib.sha256()
    named: list[tuple[str, Any]] = list(model.policy.state_dict().items())
    for index, entry in model.policy.optimizer.state_dict()["state"].items():
        named += [(f"{index} {name}", value) for name, value in entry.items()]
    for name, tensor in named:
        result.update(name.encode() + tensor.detach().numpy().tobytes())
    normalizer = model.get_vec_normalize_env()
    for statistics in (normalizer.obs_rms, normalizer.ret_rms):
        result.update(statistics.mean.tobytes() + statistics.var.tobytes() + repr(float(statistics.count)).encode())
    return result.hexdigest()


def _train(directory: Path, kill: tuple[str, int, int] | None = None) -> int:
    """Start, or continue from the newest checkpoint that loads, to the end; the digest is written to a file."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import CheckpointCallback
    from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
    from stable_baselines3.common.vec_env import VecNormalize

    found = [re.fullmatch(r"rl_model_(\d+)_steps\.zip", path.name) for path in directory.glob("*.zip")]
    model, begun = None, 0
    for step in sorted((int(match[1]) for match in found if match), reverse=True):
        try:
            files = (directory / f"rl_model_{step}_steps.zip", directory / f"rl_model_vecnormalize_{step}_steps.pkl")
            model, begun = _load(*files, _vector_env(LANES)), step
            break
        except Exception as error:  # a damaged pickle may raise anything
            (directory / "unreadable").write_text(f"{type(error).__name__}: {error}")
    if model is None:
        model = _model()
    if kill is not None:
        phase, killer, inside = kill[0], Killer(*kill, directory / "note"), threading.local()
        owners: dict[str, list[tuple[Any, str]]] = {
            "save": [(PPO, "save"), (VecNormalize, "save")],
            "learn": [(PPO, "train")],
            "collect": [(OnPolicyAlgorithm, "collect_rollouts")],
        }
        for owner, method in owners[phase]:
            setattr(owner, method, around(getattr(owner, method), phase, killer, inside))
    if begun < TOTAL:
        callback = CheckpointCallback(STEPS, str(directory), save_vecnormalize=True)
        model.learn(TOTAL - begun, callback=callback, reset_num_timesteps=begun == 0)
    (directory / "digest").write_text(_digest(model))
    return 0


@peer("A1", NAME)
def killed_trainers(work: Work) -> Outcome:
    """One kill per run; the restart loads the newest checkpoint and continues."""
    _save(work.scratch / "warm", 1)  # so that children need not import anything
    outcome, rng, found = Outcome(), random.Random(work.seed), Counter[str]()
    ended = run_forked(partial(_train, work.scratch), work.scratch)
    if ended.code:
        raise RuntimeError(f"the undisturbed run ended with code {ended.code}: {ended.error[-500:]}")
    expected = (work.scratch / "digest").read_text()
    for number in work.each(min(work.count, MOST_KILLS)):
        phase, directory = ("save", "learn", "save", "collect")[number % 4], work.scratch / f"run-{number}"
        for _ in range(10):
            shutil.rmtree(directory, ignore_errors=True)
            kill = (phase, rng.randint(1, UPDATES - 2), int(rng.random() * DURATIONS[phase]))
            if run_forked(partial(_train, directory, kill), directory).code == -9:
                break
        else:
            raise RuntimeError(f"no kill inside {phase} succeeded")
        ended, unreadable = run_forked(partial(_train, directory), directory), directory / "unreadable"
        same = not ended.code and (directory / "digest").read_text() == expected
        verdict = f"code {ended.code}" if ended.code else "the same bits" if same else "other bits at the end"
        found[verdict] += 1
        found["newest checkpoint incomplete or unreadable"] += unreadable.exists()
        why = re.sub(r"\S*/", "", unreadable.read_text())[:120] if unreadable.exists() else ""
        outcome.check(same, f"killed in {phase}: {verdict} {why}".strip())
        shutil.rmtree(directory)
    outcome.figures.update({verdict: str(count) for verdict, count in found.items()})
    outcome.notes.append("CheckpointCallback after every rollout with save_vecnormalize; PPO.load of the newest, VecNormalize.load, learn")
    return outcome


def _save(directory: Path, updates: int) -> int:
    """Save a model and its normalizer after some updates, and their digest; then load them."""
    directory.mkdir(parents=True)
    model = _model()
    model.learn(updates * LANES * STEPS)
    model.save(directory / "model.zip")
    model.get_vec_normalize_env().save(str(directory / "normalize.pkl"))
    (directory / "digest").write_text(_digest(model))
    _load(directory / "model.zip", directory / "normalize.pkl", _vector_env(LANES))
    return 0


def _judge(directory: Path, expected: str) -> int:
    """A key of `VERDICTS`. A damaged pickle may do anything, so memory and time are bounded."""
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    signal.alarm(15)
    try:
        model = _load(directory / "model.zip", directory / "normalize.pkl", _vector_env(LANES))
        return 0 if _digest(model) == expected else 4
    except Exception:
        return 3


@peer("A6", NAME)
def damaged_files(work: Work) -> Outcome:
    """The zip of PPO.save and the pickle of VecNormalize.save, damaged in the same ways; each is loaded in a child."""
    _save(work.scratch / "warm", 1)
    outcome, rng, found = Outcome(), random.Random(work.seed), Counter[str]()
    for step, updates in enumerate((1, 2)):
        run_forked(partial(_save, work.scratch / f"{step}", updates), work.scratch)
    files = {name: (work.scratch / "0" / name).read_bytes() for name in ("model.zip", "normalize.pkl")}
    older = (work.scratch / "1" / "normalize.pkl").read_bytes()
    expected = (work.scratch / "0" / "digest").read_text()
    cases = [(name, kind) for name in files for kind in FILE_KINDS]
    cases += [("both", "two files swapped"), ("normalize.pkl", "part of another step")]
    each = min(work.count, MOST_DAMAGED)
    for number in work.each(len(cases) * each):
        name, kind = cases[number // each]
        changed: dict[str, bytes | None] = dict(files)
        if kind == "two files swapped":
            changed = {"model.zip": files["normalize.pkl"], "normalize.pkl": files["model.zip"]}
        else:
            changed[name] = older if kind == "part of another step" else damaged(files[name], kind, rng)
        directory = fresh(work.scratch / "case")
        for file, content in changed.items():
            if content is not None:
                (directory / file).write_bytes(content)
        ended = run_forked(partial(_judge, directory, expected), work.scratch, limit=20)
        verdict = VERDICTS.get(ended.code, "process died or hung")
        found[verdict] += 1
        outcome.check(verdict in (VERDICTS[0], VERDICTS[3]), f"{name}, {kind}: {verdict}")
    outcome.figures.update({verdict: str(count) for verdict, count in found.items()})
    outcome.notes.append(f"{each} of each kind; a load that returns the right content counts as a pass although nothing was noticed")
    return outcome


def script(workers: int) -> None:
    """Train with CheckpointCallback, save on Ctrl-C as RL Zoo does, and continue from the newest model."""
    import torch
    from gymnasium.wrappers import TimeLimit
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import CheckpointCallback
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

    from faults.processes_worlds import Pole

    def make() -> Any:
        return TimeLimit(Pole(), 200)

    torch.set_num_threads(1)
    steps, copies = 64, workers or 8
    env: VecEnv = SubprocVecEnv([make] * copies) if workers else DummyVecEnv([make] * copies)
    saved = sorted(Path("checkpoints").glob("*.zip"), key=lambda path: int(path.stem.split("_")[1]))
    if saved:
        model = PPO.load(saved[-1], env=env)
    else:
        model = PPO("MlpPolicy", env, n_steps=steps, batch_size=128, n_epochs=4, seed=0, device="cpu")
    callback = CheckpointCallback(save_freq=4 * steps, save_path="checkpoints", name_prefix="model")
    Path("begun").touch()
    try:
        model.learn(UPDATES * steps * copies - model.num_timesteps, callback=callback, reset_num_timesteps=False)
    except KeyboardInterrupt:
        model.save(f"checkpoints/model_{model.num_timesteps}_steps")
        env.close()
        sys.exit(130)
    Path("weights").write_bytes(b"".join(tensor.numpy().tobytes() for tensor in model.policy.state_dict().values()))
    env.close()


def _command(workers: int) -> list[str]:
    return [sys.executable, "-m", "faults.peers", str(workers)]


def _weights(workers: int, directory: Path) -> bytes:
    """The final weights of an undisturbed or continued run; empty if it fails."""
    runs.run(_command(workers), directory)
    return (directory / "weights").read_bytes() if (directory / "weights").exists() else b""


@peer("C1", NAME)
def workers_killed(work: Work) -> Outcome:
    """SubprocVecEnv with 4 workers, one of them killed at a random moment; one kill per run."""
    outcome, rng, waits, ends = Outcome(), random.Random(work.seed), list[float](), set[str]()
    expected = _weights(4, work.scratch / "undisturbed")
    for number in work.each(min(work.count, MOST_RUNS)):
        directory = fresh(work.scratch / f"{number}")
        beats = fresh(directory / "beats")
        with runs.started(_command(4), directory, **{BEATS: str(beats), STEP_SECONDS: "0.001"}) as child:
            wait_for(lambda: len(list(beats.iterdir())) == 4 or not child.running(), 60)  # noqa: B023
            time.sleep(rng.uniform(0.0, 1.0))
            pids = runs.descendants(child.pid)
            began = time.monotonic()
            os.kill(int(rng.choice(sorted(beats.iterdir())).name), signal.SIGKILL)
            code = child.code_within(60)
            waits.append(time.monotonic() - began)
            left = wait_for(lambda: all(runs.is_gone(pid) for pid in pids), 5.0) is None  # noqa: B023
        last = (child.errors().strip().splitlines() or ["nothing"])[-1][:100]
        ends.add(f"exit code {code} ({last}){', processes left' if left else ''}")
        same = (directory / "weights").exists() and (directory / "weights").read_bytes() == expected
        outcome.check(same, f"kill {number}: the run ended with exit code {code} ({last})")
    outcome.figures = {"longest until the run ended": runs.longest(waits), "how it ended": "; ".join(sorted(ends)[:3])}
    outcome.notes.append(f"at most {MOST_RUNS} kills, one per run: SubprocVecEnv(4), PPO, 20 updates of 64 steps; a kill ends the run")
    return outcome


@peer("C7", NAME)
def signals(work: Work) -> Outcome:
    """SIGINT at random moments of training (each fifth time SIGTERM), then the script again, which loads the newest model."""
    outcome, rng, waits = Outcome(), random.Random(work.seed), list[float]()
    expected = _weights(0, work.scratch / "undisturbed")
    saved, resumed, total = 0, 0, min(work.count, MOST_RUNS)

    def newest(directory: Path) -> int:
        return max((int(path.stem.split("_")[1]) for path in (directory / "checkpoints").glob("*.zip")), default=0)

    for number in work.each(total):
        directory = fresh(work.scratch / f"{number}")
        kind = signal.SIGTERM if number % 5 == 4 else signal.SIGINT
        with runs.started(_command(0), directory, **{STEP_SECONDS: "0.0002"}) as child:
            wait_for(lambda: (directory / "begun").exists() or not child.running(), 60)  # noqa: B023
            time.sleep(rng.uniform(0.1, 1.5))
            before, began = newest(directory), time.monotonic()
            os.kill(child.pid, kind)
            code = child.code_within(60)
            waits.append(time.monotonic() - began)
        kept = newest(directory) > before
        same = _weights(0, directory) == expected
        saved, resumed = saved + kept, resumed + same
        words = f"{'saved' if kept else 'nothing saved'}, the resumed run {'equal' if same else 'different'}"
        outcome.check(kept and same and code in (128 + kind, -kind), f"{kind.name}: exit code {code}, {words}")
    outcome.figures = {
        "longest until out": runs.longest(waits),
        "saved on the signal": f"{saved} of {total}",
        "resumed run bit-identical": f"{resumed} of {total}",
    }
    outcome.notes.append(
        f"at most {MOST_RUNS} signals; CheckpointCallback every 4 updates, and the script itself saves the model on KeyboardInterrupt and "
        "exits with 130, as RL Zoo does; the newest model is loaded and learns on with reset_num_timesteps=False"
    )
    return outcome


@peer("D1", NAME)
def wrong_steps(work: Work) -> Outcome:
    """The same environments in a DummyVecEnv, with VecCheckNan as its documentation recommends, and without."""
    outcome, cases, bare = Outcome(), list(bad_data_steps.CASES), 0
    for number in work.each(len(cases)):
        bare += not _stops(cases[number], checked=False)
        problem = _stops(cases[number], checked=True)
        outcome.check(not problem, f"{cases[number]}: {problem}")
    outcome.figures = {"without VecCheckNan": f"{bare} of {len(cases)}"}
    outcome.notes.append("a pass is any error before the environment is stepped again; it need not name lane, step and key")
    return outcome


def _stops(case: str, *, checked: bool) -> str:
    """Empty if learning stops at the wrong step, else what happens instead."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv, VecCheckNan

    Spoiled.last = None
    lanes = bad_data_steps.LANES
    envs: Any = DummyVecEnv([functools.partial(Spoiled, case) for _ in range(lanes)])
    envs.set_options([{"chosen": lane == LANE} for lane in range(lanes)])
    envs = VecCheckNan(envs, raise_exception=True) if checked else envs
    with warnings.catch_warnings(action="ignore"):
        try:
            PPO("MultiInputPolicy", envs, n_steps=32, batch_size=32, n_epochs=1, device="cpu", seed=0).learn(lanes * 32)
        except Exception as error:  # anything that stops it in time counts
            seen = Spoiled.last
            return "" if seen is not None and seen.steps_after == 0 else f"noticed later: {type(error).__name__}: {str(error)[:80]}"
    return "not noticed"


@peer("F1", NAME)
def stop_and_resume(work: Work) -> Outcome:
    """Model and VecNormalize saved between two updates, loaded, and trained to the same end; how many end with the same weights."""
    import stable_baselines3
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import VecNormalize

    steps, lanes, seed = resume.STEPS, resume.ENVS, work.seed + 3
    total, size = resume.UPDATES * steps * lanes, steps * lanes
    torch.set_num_threads(1)

    class SaveAfterUpdate(BaseCallback):
        def _on_rollout_start(self) -> None:
            k = self.num_timesteps // size
            if k:
                self.model.save(work.scratch / f"model-{k}")
                self.model.get_vec_normalize_env().save(str(work.scratch / f"normalizer-{k}.pkl"))

        def _on_step(self) -> bool:
            return True

    def make_env() -> Any:
        env = _vector_env(lanes)
        env.seed(seed)
        return env

    def make_model() -> Any:
        return PPO(
            "MlpPolicy", VecNormalize(make_env()), n_steps=steps, batch_size=size // 2, n_epochs=3, target_kl=0.004, seed=seed,
            learning_rate=lambda left: 0.01 * (0.3 + 0.7 * left), policy_kwargs={"net_arch": [6]}, device="cpu",
        )  # fmt: skip

    def weights(model: Any) -> bytes:
        return b"".join(tensor.numpy().tobytes() for _, tensor in sorted(model.policy.state_dict().items()))

    outcome, ks = Outcome(), resume.stops(work.count)
    whole = make_model().learn(total, callback=SaveAfterUpdate())
    again = make_model().learn(total)  # only now: making a model seeds the process
    for index in work.each(len(ks)):
        k = ks[index]
        model = _load(work.scratch / f"model-{k}", work.scratch / f"normalizer-{k}.pkl", make_env())
        model.learn(total - k * size, reset_num_timesteps=False)
        same = model.num_timesteps == whole.num_timesteps and weights(model) == weights(whole)
        outcome.check(same, f"stopped after {k}: the weights differ")
    same = "equal" if weights(again) == weights(whole) else "different"
    outcome.figures["the same run twice, undisturbed"] = f"{same} weights"
    outcome.notes.append(f"version {stable_baselines3.__version__}, CartPole, PPO.save and VecNormalize.save right after update k")
    outcome.notes.append("loaded into a new trainer, it resets its environments and draws from fresh random streams")
    return outcome


if __name__ == "__main__":
    script(int(sys.argv[1]))
