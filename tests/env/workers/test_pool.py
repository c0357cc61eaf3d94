"""Tests of env/workers/pool.py from outside: equal bits in every layout, errors, deaths, time-outs, this process's share, teams."""

import functools
import gc
import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import cloudpickle
import numpy as np
import pytest
from gymnasium import spaces

from doubles.crashing import ignores_sigterm, kill, sleeps, workers
from doubles.stepping import assert_equal_steps, continue_run, frozen, reset_and_step, run
from doubles.toys import Corridor, Counter
from inchworm.config.sections import EnvConfig
from inchworm.core.errors import ConfigError, EnvError, WorkerError
from inchworm.core.protocols import VectorEnv
from inchworm.core.seeding import episode_seed
from inchworm.env.source import InProcessVectorEnv, WorkerVectorEnv, make_vector_env
from inchworm.worlds.toys import DEATHS, JOINS, Comings

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test module

needs_pettingzoo = pytest.mark.skipif(importlib.util.find_spec("pettingzoo") is None, reason="PettingZoo is not installed")


class Faulty(Counter):
    """Calls `fault` at a given moment in the copy of lane `lane`."""

    def __init__(self, moment, fault, lane=1):
        super().__init__(length=50)
        self.moment, self.fault, self.faulty_seed = moment, fault, episode_seed(0, lane, 0)
        if moment == "init":
            fault()

    def reset(self, *, seed=None, options=None):
        if self.moment == "reset" and seed == self.faulty_seed:
            self.fault()
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if self.moment == "step" and self.episode == self.faulty_seed and self.steps == 2:
            self.fault()
        return super().step(action)

    def close(self):
        if self.moment == "close":
            self.fault()


def raises(kind, *content):
    def fault():
        raise kind(*content) from KeyError("the cause")

    return fault


def play(make, num_envs, num_workers):
    with WorkerVectorEnv(make, num_envs, num_workers, worker_restarts=0) as env:
        reset_and_step(env, 5)


class Loud(Counter):
    """Warns when it is made, in every step, and when it is closed, with a category that the parent cannot know."""

    def __init__(self):
        super().__init__(length=50)
        warnings.warn("made", DeprecationWarning, stacklevel=1)

    def step(self, action):
        warnings.warn("stepped", type("Own", (RuntimeWarning,), {}), stacklevel=1)
        return super().step(action)

    def close(self):
        warnings.warn("closed", UserWarning, stacklevel=1)


def test_warnings_of_workers_are_those_of_this_process_and_shown_once(capfd):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        play(Loud, 4, 2)
    assert [(str(each.message), each.category) for each in caught] == [
        ("made", DeprecationWarning),
        ("stepped", RuntimeWarning),
        ("closed", UserWarning),
    ]
    assert {each.filename for each in caught} == {__file__}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore", DeprecationWarning)  # the filters of this process decide
        warnings.simplefilter("ignore", RuntimeWarning)
        play(Loud, 4, 2)
    assert [str(each.message) for each in caught] == ["closed"]
    assert capfd.readouterr().err == ""  # nothing passes them by


# ---- the same bits in every layout
@pytest.mark.parametrize(("copies", "workers", "helped"), [(5, 3, False), (5, 2, True)])
def test_any_number_of_workers_gives_the_same_bits(copies, workers, helped):
    config = EnvConfig(id="CartPole-v1", num_envs=copies, native=False)
    with make_vector_env(config, seed=3, num_workers=0) as here:
        expected = run(here, 120)
    with make_vector_env(config.replace(num_workers=workers, help_workers=helped), seed=3) as env:
        assert isinstance(env, WorkerVectorEnv)
        assert isinstance(env, VectorEnv)
        assert (env.num_lanes, env.num_envs) == (copies, copies)
        if helped:  # a share of the copies is in this process
            assert len(env._engine._local.copies) == copies - copies * workers // (workers + 1) >= 1
        assert_equal_steps(run(env, 120), expected)


def test_partial_resets_options_and_states_are_the_same_too():
    def both(call):
        results = [frozen(call(env)) for env in (remote, here)]
        assert_equal_steps(results[:1], results[1:])

    def make():
        return Corridor(length=3)

    with WorkerVectorEnv(make, 3, 2, help_workers=True) as remote, InProcessVectorEnv(make, 3) as here:
        for env in (remote, here):
            env.set_reset_options({"place": 1}, indices=[0, 2])
        both(lambda env: env.reset(seeds=[4, 5, 6]))
        both(lambda env: env.step(np.array([1, 1, 1])))
        for copies in ([0], [2], ()):
            both(lambda env, copies=copies: env.reset(indices=copies))
        both(lambda env: env.step(np.array([1, 0, 1])))
        assert remote.state_dict()["copies"] == here.state_dict()["copies"]
        state = remote.state_dict()
        both(lambda env: env.step(np.array([1, 0, 1])))
        for env in (remote, here):
            env.load_state_dict(state)
        both(lambda env: env.reset(indices=()))
        both(lambda env: env.step(np.array([1, 1, 1])))
        state["copies"][1]["episode_return"] = 7.0
        with pytest.warns(UserWarning, match="lane 1 could not be restored"):
            remote.load_state_dict(state)


def test_workers_import_neither_torch_nor_the_users_script(tmp_path):
    script = tmp_path / "user_script.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys
        print("the script runs in", os.getpid())
        import numpy as np, gymnasium as gym
        from gymnasium import spaces
        from inchworm.env.source import make_vector_env

        class Mine(gym.Env):
            observation_space, action_space = spaces.Box(-1, 1, (1,)), spaces.Discrete(2)
            def reset(self, *, seed=None, options=None):
                return np.zeros(1, np.float32), {}
            def step(self, action):
                slow = () if "inchworm.env.make" in sys.modules else ("pydantic",)  # which reads a config
                bad = [name for name in ("torch", "user_script", "jax", *slow) if name in sys.modules]
                return np.zeros(1, np.float32), float(len(bad)), True, False, {"pid": os.getpid(), "argv": len(sys.argv)}

        gym.register("MineOfScript-v0", Mine)                     # no main guard, and known in this process alone
        for env in (Mine, "MineOfScript-v0"):
            with make_vector_env(env, 2, 2) as vector_env:
                vector_env.reset()
                step = vector_env.step(np.zeros(2, int))
                pids = {ended.info["pid"] for ended in step.ended}
                print("rewards", step.rewards.tolist(), "processes", len(pids | {os.getpid()}))
        """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert len([line for line in lines if line.startswith("the script runs")]) == 1
    assert lines[1:] == ["rewards [0.0, 0.0] processes 3"] * 2


# ---- errors in environments
class Unpicklable(Exception):
    def __reduce__(self):
        raise RuntimeError("cannot be pickled")


class WithoutText(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("moment", "kind", "content", "words"),
    [
        *((moment, ValueError, "boom", "ValueError: boom") for moment in ("init", "reset", "step")),
        ("step", KeyboardInterrupt, "", "KeyboardInterrupt"),
        ("step", ValueError, "100 % of %s", "ValueError: 100 % of %s"),
        ("step", ValueError, "żółw \ud800", "ValueError: żółw"),
        ("step", ValueError, "x" * 10_000_000, "ValueError: xxx"),
        ("step", Unpicklable, "not sent", "Unpicklable: not sent"),
        ("step", WithoutText, "", "WithoutText: (its"),
    ],
    ids=lambda value: getattr(value, "__name__", ascii(value)[:20]),
)
def test_an_error_arrives_with_its_traceback_lane_and_seed(moment, kind, content, words):
    with pytest.raises(WorkerError) as caught:
        play(lambda: Faulty(moment, raises(kind, content)), 2, 1)
    first, *frames = [line for line in str(caught.value).splitlines() if line != "  while lane 0 was made"]
    assert words in first
    assert frames[-1].startswith(f"  at {__file__}:")
    assert frames[-1].endswith(" in fault")  # the frame that raised
    traceback = str(caught.value.__cause__)
    assert "Traceback in the worker" in traceback
    assert len(content) > 1000 or "KeyError: 'the cause'" in traceback
    assert len(str(caught.value)) + len(traceback) < 40_000
    steps = {"init": "", "reset": "0", "step": "3"}[moment]
    where = f"lane 1, step {steps} of episode 1 with seed {episode_seed(0, 1, 0)}: " if steps else ""
    assert first.startswith(f"env worker 0 (lanes 0 to 1): {where}")


def test_a_broken_contract_is_reported_in_one_line():
    with pytest.raises(WorkerError) as caught:
        play(type("Broken", (Counter,), {"step": lambda self, action: (np.zeros(5), 0.0, False, False, {})}), 2, 1)
    assert str(caught.value).startswith("env worker 0 (lanes 0 to 1): lane 0, step 1 of episode 1")
    assert len(str(caught.value).splitlines()) == 1
    assert caught.value.__cause__ is None


def test_after_an_error_the_vector_env_can_only_be_closed():
    env = make_vector_env(lambda: Faulty("reset", raises(ValueError, "boom")), 2, 1)
    with pytest.raises(WorkerError, match="boom"):
        env.reset()
    with pytest.raises(WorkerError, match="have ended after an earlier error"):
        env.reset()
    env.close()
    env.close()
    with pytest.raises(EnvError, match="closed"):
        env.reset()


@pytest.mark.parametrize(
    ("workers", "helped", "words"), [(2, False, "different workers have different spaces"), (1, True, "all copies must be alike")]
)
def test_processes_with_different_spaces_are_rejected(workers, helped, words):
    def make():
        env = Counter()
        env.action_space = spaces.Discrete(2 + os.getpid() % 1000)
        return env

    with pytest.raises(EnvError, match=words):
        WorkerVectorEnv(make, 2, workers, help_workers=helped)


def test_the_number_of_workers_is_checked():
    for number in (0, 3):
        with pytest.raises(EnvError, match=f"num_workers={number} must be from 1 to 2, because num_envs=2"):
            WorkerVectorEnv(Counter, 2, number)
    with pytest.raises(EnvError, match=r"num_workers=2.* must be from 1 to 1, because num_envs=2"):
        WorkerVectorEnv(Counter, 2, 2, help_workers=True)
    for number in (0, 4):
        with pytest.raises(ConfigError, match=f"env.help_workers needs env.num_workers from 1 to 3, not {number}"):
            EnvConfig(num_envs=4, num_workers=number, help_workers=True)


# ---- deaths and time-outs, without restarts
def test_a_worker_that_dies_is_named():
    where = rf"lane 1, step \d of episode 1 with seed {episode_seed(0, 1, 0)}: step raised SystemExit: 3 .*in fault"
    with WorkerVectorEnv(lambda: Faulty("step", raises(SystemExit, 3)), 3, 3, worker_restarts=0) as env:
        reset_and_step(env, 2)
        seeds = f"episode seeds by lane 1: {episode_seed(0, 1, 0)}"
        with pytest.raises(WorkerError, match=rf"(?s)env worker 1 \(lane 1\) exited: {where}.*{seeds}.*because env.worker_restarts=0"):
            env.step(np.zeros(3, int))


def test_a_death_while_another_worker_is_slow_is_noticed():
    env = WorkerVectorEnv(lambda: Faulty("step", sleeps, lane=0), 2, 2, worker_restarts=0)
    reset_and_step(env, 2)
    env.send(np.zeros(2, int))
    time.sleep(0.1)  # worker 0 sleeps now
    kill(env, 1)
    with pytest.raises(WorkerError, match=r"env worker 1 \(lane 1\) was killed by SIGKILL"):
        env.recv()


def test_a_long_replay_reports_that_it_is_alive():
    class Slow(Counter):
        def step(self, action):
            time.sleep(0.05)
            return super().step(action)

    env = make_vector_env(lambda: Counter(length=99), 1)
    reset_and_step(env, 80)
    with WorkerVectorEnv(lambda: Slow(length=99), 1, 1, worker_timeout=3.0, worker_restarts=0) as remote:  # the replay takes 4 s
        remote.load_state_dict(env.state_dict())
        assert remote.reset(indices=()).observations[0, 1] == 80


# ---- Ctrl-C and the end
def test_an_environment_may_fail_to_close_or_never_close():
    env = make_vector_env(lambda: Faulty("close", raises(OSError, "stuck")), 1, 1)
    with pytest.warns(UserWarning, match="lane 0 failed to close: OSError: stuck"):
        env.close()
    for fault in (sleeps, ignores_sigterm):
        env = WorkerVectorEnv(lambda fault=fault: Faulty("close", fault), 1, 1)
        env._engine.close(0.2)
        env.close()


def test_an_interrupted_exchange_is_not_continued():
    env = WorkerVectorEnv(lambda: Faulty("step", lambda: time.sleep(1.0), lane=0), 2, 2)
    reset_and_step(env, 2)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        env.step(np.zeros(2, int))
    with pytest.raises(EnvError, match="failed or was interrupted"):
        env.step(np.zeros(2, int))
    with pytest.raises(WorkerError, match="was interrupted"):
        env.reset()
    env.close()


def test_a_second_interrupt_while_closing_leaves_no_process():
    env = WorkerVectorEnv(lambda: Faulty("close", sleeps), 2, 2)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        env.close()
    timer.join()


def test_ctrl_c_does_not_reach_workers():
    env = make_vector_env(Counter, 2, 1)
    env.reset()
    for worker in workers(env):
        assert os.getpgid(worker.process.pid) != os.getpgid(0)
        os.kill(worker.process.pid, signal.SIGINT)
    assert env.step(np.zeros(2, int)).observations[:, 1].tolist() == [1, 1]
    env.close()


def test_the_garbage_collector_ends_workers():
    env = make_vector_env(Counter, 1, 1)
    pid = workers(env)[0].process.pid
    del env
    gc.collect()
    assert not os.path.exists(f"/proc/{pid}")


def test_workers_die_with_their_parent():
    code = """
import os, sys, time, numpy as np
from gymnasium.envs.classic_control import CartPoleEnv
from inchworm.env.source import make_vector_env
class Hangs(CartPoleEnv):
    def step(self, action):
        while True:
            sum(range(1000))
env = make_vector_env(Hangs, 2, 2)
env.reset()
env.send(np.zeros(2, int))
print(*[worker.process.pid for worker in env._engine._workers], flush=True)
time.sleep(600)
"""

    def is_running(pid):
        """A zombie that init has not reaped yet has ended."""
        try:
            with open(f"/proc/{pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with parent.stdout:
        pids = parent.stdout.readline().split()
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 120
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(pids) == 2
    assert not any(map(is_running, pids))


def test_workers_made_in_a_thread_outlive_it():
    made = []
    thread = threading.Thread(target=lambda: made.append(make_vector_env(Counter, 1, 1)))
    thread.start()
    thread.join()
    made[0].reset()
    assert made[0].step(np.zeros(1, int)).observations[0, 1] == 1
    made[0].close()


def test_a_forked_process_does_not_end_its_parents_workers():
    env = make_vector_env(Counter, 1, 1)
    env.reset()
    pid = os.fork()
    if pid == 0:
        env.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert env.step(np.zeros(1, int)).observations[0, 1] == 1
    env.close()


# ---- this process's share
@pytest.mark.parametrize(("lane", "error"), [(0, WorkerError), (1, EnvError)])
def test_an_error_in_a_worker_or_in_this_process(lane, error):
    with WorkerVectorEnv(lambda: Faulty("step", raises(ZeroDivisionError, "boom"), lane), 3, 1, help_workers=True) as env:
        reset_and_step(env, 2)  # the worker has lane 0, this process lanes 1 and 2
        with pytest.raises(error, match="boom"):
            env.step(np.zeros(3, int))
        if lane == 1:  # the workers are still usable, and nothing of the last exchange is left over
            reset_and_step(env, 3)


# ---- teams
def team(plan):
    return functools.partial(Comings, plan, masks="info")


@needs_pettingzoo
@pytest.mark.parametrize(("plan", "workers", "helped", "shared"), [(DEATHS, 2, False, False), (JOINS, 1, True, True)])
def test_teams_have_the_same_bits_in_every_layout(plan, workers, helped, shared):
    with InProcessVectorEnv(team(plan), 3, seed=3, global_state=shared) as here:
        expected = run(here, 14)
    with WorkerVectorEnv(team(plan), 3, workers, help_workers=helped, seed=3, global_state=shared) as env:
        assert (env.num_lanes, env.num_envs, env.lanes_per_copy) == (9, 3, 3)
        assert (env.global_state_space is not None) == shared
        assert_equal_steps(run(env, 14), expected)


@needs_pettingzoo
def test_an_error_of_a_team_in_a_worker_names_its_lane():
    class Wrong(Comings):
        def step(self, actions):
            result = super().step(actions)
            result[1]["agent_1"] = float("nan")
            return result

    with WorkerVectorEnv(Wrong, 2, 2) as env:
        env.reset()
        with pytest.raises(WorkerError, match=r"agent 'agent_1' \(lane [14]\), step 1 of episode 1 with seed .*reward is nan"):
            env.step(np.zeros(6, np.int64))


@needs_pettingzoo
def test_the_state_of_a_team_can_be_loaded_in_another_layout():
    options = {"seed": 3, "global_state": True}
    with (
        InProcessVectorEnv(team(JOINS), 3, **options) as env,
        WorkerVectorEnv(team(JOINS), 3, 2, help_workers=True, **options) as other,
    ):
        run(env, 8)
        other.load_state_dict(env.state_dict())
        assert not other.inexact
        assert_equal_steps(continue_run(other, 6), continue_run(env, 6))
