"""`inchworm train` and `inchworm resume`: what is printed, what is written, what is refused."""

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from inchworm.backends.numpy.learner import NumpyOptimizer
from inchworm.backends.torch.network import Network
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.config.sections import TrainingConfig
from inchworm.env.vector_env import LaneVectorEnv
from inchworm.evaluate.evaluator import PolicyEvaluator
from inchworm.policy.file import save_policy
from inchworm.run.directory import open_run
from inchworm.run.policies import load_policy
from inchworm.tracking.jsonl import read_rows


def only_run(directory: Path) -> Path:
    (path,) = (directory / "runs").iterdir()
    return path


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != "lock"}


def test_train_ends_with_the_score_the_run_and_what_to_type_next(cli: Any, small: list[str], tmp_path: Path) -> None:
    result = cli("train", "CartPole-v1", *small)
    assert (result.code, result.err) == (0, "")
    path = only_run(tmp_path)
    lines = result.out.splitlines()
    assert lines[0] == f"training CartPole-v1 for 256 steps, seed 0, run runs/{path.name}"
    assert re.match(r"score: mean return \S+ ± \S+ \(95 %, 3 greedy episodes\), from ", lines[-4])
    assert lines[-3].startswith(f"run:   runs/{path.name} (policy.safetensors, best_policy.safetensors, ")
    assert lines[-2] == f"next:  inchworm evaluate {path.name} --episodes 100"
    assert lines[-1] == f"       inchworm resume {path.name} --total-timesteps 512"
    assert any("256/256 steps 100%" in line for line in lines)


def test_names_with_spaces_are_quoted_in_what_to_type(cli: Any, small: list[str], tmp_path: Path) -> None:
    """Every suggested command, split as a shell splits it, is one that works."""
    trained = cli("train", "CartPole-v1", *small, "--run.name", "my first run")
    *_, evaluate, resume = trained.out.splitlines()
    assert shlex.split(evaluate) == ["next:", "inchworm", "evaluate", "my first run", "--episodes", "100"]
    assert shlex.split(resume) == ["inchworm", "resume", "my first run", "--total-timesteps", "512"]
    assert cli("resume", "my first run").out.endswith("inchworm resume 'my first run' --total-timesteps 512\n")
    collected = cli("collect", "my first run", "--steps", 4, "--out", "of my run.st").out.splitlines()[-1]
    assert shlex.split(collected) == ["next:", "inchworm", "learn", "my first run", "of my run.st"]
    assert "inchworm collect 'my first run' --out FILE" in cli("learn", "my first run").err
    shutil.rmtree(tmp_path / "runs/my first run/checkpoints")
    assert "--run.name 'my first run' --overwrite" in cli("resume", "my first run").err
    (tmp_path / "runs/my first run/policy.safetensors").unlink()
    assert "inchworm resume 'my first run' continues" in cli("evaluate", "my first run").err


def test_a_finished_run_says_how_to_continue(cli: Any, refused: Any, small: list[str], run: Path) -> None:
    again, before = ["train", "CartPole-v1", *small, "--run.name", "small"], (run / "config.yaml").read_bytes()
    for arguments in (again, ["resume", "small"], [*again, "--evaluation.episodes", "7"]):
        result = cli(*arguments)
        assert result.code == 0
        assert "has reached its target (256 steps in 4 iterations)" in result.out
        assert result.out.endswith("inchworm resume small --total-timesteps 512\n")
        assert (run / "config.yaml").read_bytes() == before, "nothing was trained with other settings"
    refused("ppo.gamma: 0.98 → 0.5", *again, "--ppo.gamma", "0.5")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "CartPol-v1"], "did you mean CartPole-v1?"),
        (["train", "no_such_module:make"], "there is no module no_such_module"),
        (["train", "CartPole-v1", "--env.kwargs", "{gravitty: 5}"], "gravitty"),
        (["train", "CartPole-v1", "--ppo.minibatch-size", "100000"], "larger than the rollout"),
        (["train", "CartPole-v1", "--preset", "huge"], "small"),
        (["train", "CartPole-v1", "--preset", "small", "--config", "x.yaml"], "--preset small and --config x.yaml are two configs"),
        (["resume"], "no run is given"),
        (["resume", "nope"], "there is no run nope"),
        (["resume", "small", "--ppo.gamma", "0.5"], "ppo.gamma: 0.98 → 0.5"),
        (["resume", "small", "--env.id", "Acrobot-v1"], "env.id: CartPole-v1 → Acrobot-v1"),
    ],
)
def test_wrong_use_is_one_line_and_changes_nothing(refused: Any, run: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    before = contents(tmp_path)
    refused(message, *arguments)
    assert contents(tmp_path) == before


def test_a_factory_must_be_typed_again(cli: Any, refused: Any, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_world.py").write_text(
        "import gymnasium\n\n\ndef make_env(**kwargs):\n    return gymnasium.make('CartPole-v1', **kwargs)\n"
    )
    result = cli("train", "my_world:make_env", *small, "--run.name=mine", "--evaluation.interval=0", "--evaluation.final-episodes=0")
    assert result.code == 0, result.err
    assert "score: no evaluation was requested" in result.out
    assert "inchworm evaluate mine --env my_world:make_env" in result.out
    refused("--env my_world:make_env", "evaluate", "mine")
    assert cli("evaluate", "mine", "--env", "my_world:make_env", "--episodes", 2).code == 0
    assert cli("resume", "mine", "--env", "my_world:make_env", "--total-timesteps", 320, "--quiet").code == 0
    assert cli("collect", "mine", "--env", "my_world:make_env", "--out", "r.st").code == 0


NOISY = """
import threading, time, warnings
import gymnasium

def make_env(fails=False):
    threading.Thread(target=time.sleep, args=(10_000,)).start()
    return Noisy(gymnasium.make("CartPole-v1"), fails)

class Noisy(gymnasium.Wrapper):
    def __init__(self, env, fails):
        super().__init__(env)
        self.fails = fails

    def step(self, action):
        if self.fails:
            raise ValueError("it broke")
        warnings.warn("the pole is\\nloud", stacklevel=1)
        return super().step(action)
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_a_warning_appears_once_and_threads_of_the_environment_do_not_keep_the_command_from_ending(
    small: list[str], tmp_path: Path, workers: int
) -> None:
    (tmp_path / "noisy_world.py").write_text(NOISY)
    command = [sys.executable, "-m", "inchworm", "train", "noisy_world:make_env", *small, f"--env.num-workers={workers}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stderr) == (0, "warning: the pole is loud\n")
    assert "score: " in done.stdout
    if not workers:  # whose threads are in this process
        failed = subprocess.run([*command, "--env.kwargs={fails: true}"], cwd=tmp_path, capture_output=True, text=True, timeout=500)
        assert (failed.returncode, "it broke" in failed.stderr) == (1, True)


def test_a_failed_evaluation_does_not_stop_training_and_makes_the_exit_code_3(
    cli: Any, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("the scoring world ended")

    monkeypatch.setattr(PolicyEvaluator, "evaluate", fails)
    result = cli("train", "CartPole-v1", *small)
    assert result.code == 3
    assert "the scoring world ended" in result.err
    assert "score: unknown, the last evaluation failed" in result.out
    assert len(list((only_run(tmp_path) / "checkpoints").iterdir())) == 2


def test_the_first_line_waits_for_nothing_heavy(tmp_path: Path) -> None:
    """When the first line is printed, neither torch nor anything that trains has been imported."""
    script = """
import sys
from inchworm.cli import train
from inchworm.cli.main import main

def first_line(run, *, quiet):
    print(sorted(name for name in ("torch", "inchworm.train.trainer", "inchworm.collect.collector") if name in sys.modules))
    raise SystemExit(0)

train.open_terminal = first_line
main(["train", "CartPole-v1", "--backend", "torch"])
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "[]"


# resume
def test_flags_that_do_not_affect_completed_training_are_accepted(cli: Any, run: Path) -> None:
    result = cli("resume", "small", "--run.max-iterations=5", "--total-timesteps=1000", "--run.keep-checkpoints=3")
    assert result.code == 0, result.err
    assert "resuming at 256 steps of 1,000" in result.out
    assert TrainingConfig.from_yaml(run / "config.yaml").run.keep_checkpoints == 3
    assert open_run("small").config.run.total_timesteps == 1000
    assert [row["iteration"] for row in read_rows(run / "metrics.jsonl")][-2:] == [5, 5]


def test_a_run_killed_in_its_last_evaluation_only_runs_that(
    cli: Any, small: list[str], trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PolicyEvaluator, "evaluate", killed)
        assert cli("train", "CartPole-v1", *small, "--run.name=cut").code == 130
    path = tmp_path / "runs" / "cut"
    assert [row["iteration"] for row in read_rows(path / "metrics.jsonl")] == [1, 2, 3, 4]
    result = cli("resume", "cut")
    assert result.code == 0, result.err
    assert "all 256 steps are done; running the last evaluation" in result.out
    assert "3 greedy episodes" in result.out
    for name in ("metrics.jsonl", "policy.safetensors", "best_policy.safetensors"):
        assert (path / name).read_bytes() == (trained / name).read_bytes()
    assert "has reached its target" in cli("resume", "cut").out


@pytest.mark.parametrize(("harm", "message"), [("damage", "every checkpoint is damaged"), ("file", ""), ("link", " link")])
@pytest.mark.parametrize("command", ["resume", "train"])
def test_damaged_checkpoints_stop_everything(cli: Any, small: list[str], run: Path, harm: str, message: str, command: str) -> None:
    if harm == "damage":
        for path in (run / "checkpoints").iterdir():
            (path / "state.json").write_bytes(b"{}")
    else:
        shutil.rmtree(run / "checkpoints")
        (run / "checkpoints").touch() if harm == "file" else (run / "checkpoints").symlink_to("gone")
    before = contents(run)
    words = {"resume": ["small", "--total-timesteps=512"], "train": ["CartPole-v1", *small, "--run.name=small"]}
    result = cli(command, *words[command])
    assert result.code == 1
    assert message in result.err
    assert "Traceback" not in result.err
    after = contents(run)
    assert {path.name for path in before if after.get(path) != before[path]} <= {"config.yaml"}  # the new target
    assert after.keys() == before.keys()


class Own(Network):
    """A network that a user brings."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(4, 2), nn.Linear(4, 1)


def test_a_network_of_the_users_is_continued_in_python(refused: Any, run: Path) -> None:
    spec = load_policy(run).spec
    save_policy(run / "policy.safetensors", TorchPolicy(spec, network=Own()))
    before = (run / "config.yaml").read_text()
    message = (
        f"the run runs/small trains the network {__name__}:Own, which a config cannot name; continue in Python: "
        'PPOTrainer(policy, …, run_dir="runs/small"), then load_checkpoint() and train()'
    )
    refused(message, "resume", "small", "--total-timesteps", 512)
    assert (run / "config.yaml").read_text() == before


# interrupts and readers that have gone
@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_an_interrupted_run_saves_its_last_iteration_and_can_be_resumed(
    tmp_path: Path, number: signal.Signals, code: int, cli: Any
) -> None:
    flags = ["--run.name=long", "--run.total-timesteps=100000000", "--ppo.rollout-steps=128"]
    rows, deadline = tmp_path / "runs" / "long" / "metrics.jsonl", time.monotonic() + 90
    options: dict[str, Any] = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-m", "inchworm", "train", "CartPole-v1", *flags], **options) as process:
        try:
            while len(read_rows(rows)) < 3:
                assert time.monotonic() < deadline
                assert process.poll() is None, process.communicate()
                time.sleep(0.05)
            process.send_signal(number)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, err) == (code, "finishing this iteration, press again to stop now\n")
    done = read_rows(rows)[-1]["iteration"]
    (saved,) = [line for line in out.splitlines() if line.startswith("interrupted; ")]
    assert saved == f"interrupted; {read_rows(rows)[-1]['env_steps']:,} steps ({done:,} iterations) are saved. To continue:"
    assert out.splitlines()[-1] == "  inchworm resume long"
    result = cli("resume", "long", "--run.max-iterations", done + 1, "--evaluation.final-episodes", 0)
    assert result.code == 0, result.err
    assert [row["iteration"] for row in read_rows(rows)] == list(range(1, done + 2))


ENDLESS = """
import gymnasium as gym, numpy as np
from gymnasium import spaces
class Endless(gym.Env):
    observation_space, action_space = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}
    def step(self, action):
        self.steps += 1
        if self.steps == 1_000:  # no rollout is as long
            open("evaluating", "w").close()
        return np.zeros(2, np.float32), 1.0, False, False, {}
"""


@pytest.mark.slow
def test_an_evaluation_of_endless_episodes_can_be_terminated(tmp_path: Path, small: list[str], cli: Any) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    code, never = "endless:Endless", f"--evaluation.max-episode-steps={10**15}"

    def terminate(*arguments: str) -> tuple[int, str]:
        (tmp_path / "evaluating").unlink(missing_ok=True)
        with subprocess.Popen([sys.executable, "-m", "inchworm", *arguments], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
            try:
                deadline = time.monotonic() + 90
                while not (tmp_path / "evaluating").exists():
                    assert time.monotonic() < deadline
                    assert process.poll() is None
                    time.sleep(0.05)
                process.terminate()
                out, _ = process.communicate(timeout=60)
            finally:
                process.kill()
        return process.returncode, out

    ended, out = terminate("train", code, *small, "--run.name=endless", "--env.num-workers=0", never)
    assert (ended, out.splitlines()[-1]) == (143, f"  inchworm resume endless --env {code}")
    assert terminate("evaluate", "endless", "--env", code) == (143, "")
    result = cli("resume", "endless", "--env", code, "--evaluation.max-episode-steps", 9)
    assert result.code == 0, result.err
    assert "all 256 steps are done; running the last evaluation" in result.out
    assert re.search(r"3 of 3 episodes capped at \S+ steps \(evaluation.max_episode_steps\)", result.out)
    assert "evaluation 9.0 (3 capped)" in result.out
    result = cli("evaluate", "endless", "--env", code, "--max-episode-steps", 7)
    assert result.out.endswith("3 of 3 episodes capped at 7 steps\n")


@pytest.mark.parametrize("pipe", ["| head -1", ">&-", "| head -1 2>&-"])
def test_a_run_whose_output_is_not_read_is_trained_to_its_end(tmp_path: Path, small: list[str], pipe: str) -> None:
    command = f"{sys.executable} -m inchworm train CartPole-v1 {' '.join(small)} --run.name=x --backend=numpy"
    done = subprocess.run(
        ["bash", "-c", f"{command} {pipe}; exit ${{PIPESTATUS[0]}}"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(read_rows(tmp_path / "runs" / "x" / "metrics.jsonl")) == 5


def test_what_is_not_exact_is_reported_once_if_it_can_be_printed(cli: Any, small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def write(self, text: str) -> int:
            raise BrokenPipeError

        def flush(self) -> None: ...

    monkeypatch.setattr(LaneVectorEnv, "inexact", property(lambda _: ["it has a clock"]))
    for arguments in (["train", "CartPole-v1", *small, "--run.name=clock"], ["resume", "clock", "--total-timesteps=512"]):
        result = cli(*arguments)
        assert result.code == 0
        assert result.err.count("it has a clock") == 1
    monkeypatch.setattr(sys, "stderr", Broken())
    assert cli("resume", "clock", "--total-timesteps=576").code == 0


# errors


FAILS = """
from doubles.toys import Counter

class Env(Counter):
    def step(self, action):
        return super().step(action) if self.steps < 4 else self.fail()

    def fail(self):
        raise ValueError("a wire came loose")
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_environment_is_short_and_the_traceback_on_request(
    cli: Any, tmp_path: Path, small: list[str], workers: int
) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    flags = ["fails:Env", *small, f"--env.num-workers={workers}", "--quiet"]
    short = cli("train", *flags, "--run.name=short")
    assert short.code == 1
    first, *frames, last = [line for line in short.err.splitlines() if not line.startswith("warning: ")]
    assert first.endswith("step raised ValueError: a wire came loose")
    assert [frame.rpartition(" in ")[2] for frame in frames] == ["step", "fail"]
    assert last.endswith("inchworm resume short --env fails:Env")
    long = cli("train", *flags, "--run.name=long", "--traceback")
    assert long.code == 1
    assert 'raise ValueError("a wire came loose")' in long.err
    assert "Traceback (most recent call last)" in long.err
    assert long.err.splitlines()[-1].endswith("inchworm resume long --env fails:Env")


# what to type next


def test_an_interruption_before_anything_is_saved_says_so(cli: Any, small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("inchworm.train.trainer.make_collector", interrupt)
    result = cli("train", "CartPole-v1", *small, "--run.name=early")
    assert result.code == 130
    assert result.out.splitlines()[-2:] == [
        "interrupted; nothing was saved by this command. To start it again:",
        "  inchworm resume early",
    ]


@pytest.mark.parametrize(
    ("updates", "text"),
    [
        (0, "nothing was saved by this command. To start it again:"),
        (1, "64 steps (1 iteration) are saved. To continue:"),
        (2, "128 steps (2 iterations) are saved. To continue:"),
    ],
)
def test_a_second_press_names_the_steps_that_are_saved(
    cli: Any, small: list[str], monkeypatch: pytest.MonkeyPatch, updates: int, text: str
) -> None:
    learn = NumpyOptimizer.update

    def twice(learner: Any, *arguments: Any) -> Any:
        if learner.updates == updates:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return learn(learner, *arguments)

    monkeypatch.setattr("inchworm.train.callbacks.SNAPSHOT_SHARE", 1e9)  # as if iterations were slow
    monkeypatch.setattr(NumpyOptimizer, "update", twice)
    result = cli("train", "CartPole-v1", *small, "--run.name=twice", "--run.checkpoint-interval=0", "--run.backend=numpy")
    assert result.code == 130
    assert f"interrupted; {text}" in result.out


@pytest.mark.parametrize(
    ("limit", "more"),
    [
        ("--run.max-iterations=2", "--run.max-iterations 4"),
        ("--run.max-episodes=1", "--run.max-episodes "),
        ("--quiet=false", "--total-timesteps 512"),
    ],
)
def test_the_hint_names_the_limit_that_ended_the_run(cli: Any, small: list[str], limit: str, more: str) -> None:
    result = cli("train", "CartPole-v1", *small, "--run.name=ended", limit)
    (hint,) = [line.strip() for line in result.out.splitlines() if "inchworm resume" in line]
    assert hint.startswith(f"inchworm resume ended {more}")
    again = cli("resume", "ended")
    assert again.out.splitlines()[-1].strip() == hint
    before = len(read_rows(Path("runs/ended/metrics.jsonl")))
    assert cli(*hint.split()[1:], "--quiet").code == 0
    assert len(read_rows(Path("runs/ended/metrics.jsonl"))) > before


def test_a_converged_run_says_so_and_continues_with_another_target(cli: Any, small: list[str]) -> None:
    flags = ["--convergence.target=5", "--convergence.window=1", "--convergence.returns=training", "--total-timesteps=100000"]
    result = cli("train", "CartPole-v1", *small, "--run.name=ended", *flags)
    text = "converged after 64 steps (1 iterations): the mean return of the last 1 training episodes, "
    assert text in result.out
    again = cli("resume", "ended")
    assert (again.code, f"has {text}" in again.out) == (0, True)
    assert again.out.rstrip().endswith("inchworm resume ended --convergence.target null")
    assert "not converged: the target is 600;" in cli("resume", "ended", "--convergence.target=600", "--total-timesteps=128").out


def test_a_preset_reports_its_target_and_one_that_is_typed_ends_the_run(cli: Any, small: list[str]) -> None:
    flags = [*small, "--evaluation.interval=1", "--evaluation.episodes=20", "--quiet=false"]
    reported = cli("train", "CartPole-v1", *flags, "--run.name=reported")
    assert "not converged: the target is 475; the best mean return of the last 20 evaluation episodes was " in reported.out
    assert "256/256 steps" in reported.out
    stopped = cli("train", "CartPole-v1", *flags, "--run.name=stopped", "--convergence.target=5")
    assert "converged after 64 steps (1 iterations)" in stopped.out
    assert TrainingConfig.from_yaml("runs/stopped/config.yaml").convergence.stop
    continued = cli("train", "CartPole-v1", *flags, "--run.name=continued", "--convergence.target=5", "--convergence.no-stop")
    assert "converged after 64 steps (1 iterations)" in continued.out
    assert "256/256 steps" in continued.out
    assert "converged yes" in continued.out
    again = cli("resume", "continued", "--convergence.stop", "--total-timesteps=512")
    assert "has converged after 64 steps" in again.out


def test_a_run_whose_checkpoints_were_deleted_starts_over_only_if_asked(cli: Any, run: Path, small: list[str]) -> None:
    rows, policy = (run / "metrics.jsonl").read_bytes(), (run / "policy.safetensors").read_bytes()
    shutil.rmtree(run / "checkpoints")
    flags = ["CartPole-v1", *small, "--run.name=small", "--quiet"]
    for command in (["train", *flags], ["resume", "small"]):
        refused = cli(*command)
        assert refused.code == 2
        assert "its checkpoints are gone" in refused.err
        assert "--run.name small --overwrite" in refused.err
        assert (run / "metrics.jsonl").read_bytes() == rows
    assert cli("train", *flags, "--overwrite").code == 0
    assert (run / "metrics.jsonl").read_bytes() == rows
    assert (run / "policy.safetensors").read_bytes() == policy
    assert cli("train", *flags, "--overwrite", "--ppo.gamma=0.5").code == 0  # also with other settings
    assert (run / "policy.safetensors").read_bytes() != policy


def test_settings_of_trackers_are_flags_and_lines_of_yaml_and_may_change_on_resume(cli: Any, small: list[str], tmp_path: Path) -> None:
    flags = ["--tracking.wandb.project", "worms", "--tracking.wandb.tags", "a", "b", "--tracking.wandb.mode", "disabled", "--tracking.csv"]
    assert cli("train", "CartPole-v1", *small, "--run.name", "one", *flags, "--run.notes", "a try").code == 0
    config = open_run(tmp_path / "runs" / "one").config
    assert (config.tracking.wandb.project, config.tracking.wandb.tags, config.run.notes) == ("worms", ("a", "b"), "a try")
    assert TrainingConfig.from_yaml(tmp_path / "runs" / "one" / "config.yaml") == config
    lines = (tmp_path / "runs" / "one" / "tracking" / "metrics.csv").read_text().splitlines()
    assert len(lines) == 1 + len(read_rows(tmp_path / "runs" / "one" / "metrics.jsonl"))
    assert "report.html" in json.loads((tmp_path / "runs" / "one" / "tracking" / "csv.json").read_text())["files"]
    assert cli("resume", "one", "--total-timesteps", "512", "--tracking.no-csv", "--tracking.wandb.entity", "me").code == 0
    changed = open_run(tmp_path / "runs" / "one").config.tracking
    assert (changed.csv, changed.wandb.project, changed.wandb.entity) == (False, "worms", "me")


def test_a_run_is_shipped_later_and_nothing_twice(cli: Any, small: list[str], tmp_path: Path) -> None:
    assert cli("train", "CartPole-v1", *small, "--run.name", "one").code == 0
    refused = cli("ship", "one")
    assert refused.code == 2
    assert "turn one on: inchworm ship one --tracking.tensorboard" in refused.err
    assert "--ppo.gamma changes nothing here" in cli("ship", "one", "--ppo.gamma", "0.5").err
    for _ in range(2):
        assert cli("ship", "one", "--tracking.csv").out == "runs/one is delivered to csv\n"
    lines = (tmp_path / "runs" / "one" / "tracking" / "metrics.csv").read_text().splitlines()
    assert len(lines) == 1 + len(read_rows(tmp_path / "runs" / "one" / "metrics.jsonl"))
    assert open_run(tmp_path / "runs" / "one").config.tracking.sinks == []  # flags of one delivery


def test_what_cannot_be_shipped_is_named_with_the_command_for_later(cli: Any, small: list[str], tmp_path: Path) -> None:
    assert cli("train", "CartPole-v1", *small, "--run.name", "one").code == 0
    (tmp_path / "runs" / "one" / "tracking" / "metrics.csv").mkdir(parents=True)  # cannot be written
    failed = cli("ship", "one", "--tracking.csv", "--tracking.finish-seconds", "0.5")
    assert failed.code == 1
    assert failed.err.startswith("warning: csv: IsADirectoryError")
    assert failed.out.startswith("not delivered yet: ")
    assert failed.out.endswith(" to csv; type: inchworm ship one\n")
