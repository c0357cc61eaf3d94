"""Tests of the worker pool from outside: equality, errors, deaths, time-outs, leftovers."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import cloudpickle
import numpy as np
import pytest
from gymnasium import spaces

from doubles.stepping import assert_equal_steps, frozen, run
from doubles.toys import Corridor, Counter
from inchworm.config.sections import EnvConfig
from inchworm.core.errors import EnvError, WorkerError
from inchworm.core.protocols import VectorEnv
from inchworm.core.seeding import episode_seed
from inchworm.env.source import WorkerVectorEnv, make_vector_env

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test module


def descriptors():
    gc.collect()
    return sorted(os.listdir("/proc/self/fd"))


def children():
    return [process for process in os.listdir("/proc") if process.isdigit() and _parent(process) == os.getpid()]


def _parent(process):
    with contextlib.suppress(OSError), open(f"/proc/{process}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])
    return None


def mapped():
    """Whether shared memory of a vector env is mapped; it has no name in any directory, only this one in the kernel."""
    with open("/proc/self/maps") as file:
        return "memfd:inchworm" in file.read()


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    """No process, descriptor or shared memory survives a test."""
    before = len(descriptors()), set(children())
    yield
    assert (len(descriptors()), set(children())) == before
    assert not mapped()


def test_shared_memory_is_mapped_while_the_vector_env_lives():
    env = make_vector_env(Counter, 1, 1)
    assert mapped()
    names = set(os.listdir("/dev/shm"))
    assert not [name for name in names if "inchworm" in name]
    env.close()


class Faulty(Counter):
    """Does something bad at a given moment in the copy whose seed it is given."""

    def __init__(self, moment, deed, lane=1):
        super().__init__(length=50)
        self.moment, self.deed, self.seed_of_doom = moment, deed, episode_seed(0, lane, 0)
        if moment == "init":
            deed()

    def reset(self, **kwargs):
        result = super().reset(**kwargs)
        if self.moment == "reset" and self.episode == self.seed_of_doom:
            self.deed()
        return result

    def step(self, action):
        if self.moment == "step" and self.episode == self.seed_of_doom and self.steps == 2:
            self.deed()
        return super().step(action)

    def close(self):
        if self.moment == "close":
            self.deed()


def raises(error):
    def deed():
        raise error

    return deed


def reset_and_step(env, steps):
    env.reset()
    for _ in range(steps):
        env.step(np.zeros(env.num_lanes, int))


def play(make, num_envs, num_workers):
    with WorkerVectorEnv(make, num_envs, num_workers, worker_restarts=0) as env:
        reset_and_step(env, 5)


def test_any_number_of_workers_gives_the_same_bits():
    config = EnvConfig(id="CartPole-v1", num_envs=5, native=False)
    here = run(make_vector_env(config, seed=3), 120)
    for workers in (1, 2, 4):
        with make_vector_env(config, num_workers=workers, seed=3) as env:
            assert isinstance(env, WorkerVectorEnv)
            assert isinstance(env, VectorEnv)
            assert (env.num_lanes, env.num_envs) == (5, 5)
            assert_equal_steps(run(env, 120), here)


def test_partial_resets_options_and_states_are_the_same_too():
    def both(call):
        results = [frozen(call(env)) for env in (workers, here)]
        assert_equal_steps(results[:1], results[1:])

    with make_vector_env(lambda: Corridor(length=3), 3, 2) as workers:
        here = make_vector_env(lambda: Corridor(length=3), 3)
        for env in (workers, here):
            env.set_reset_options({"place": 1}, indices=[2])
        both(lambda env: env.reset(seeds=[4, 5, 6]))
        both(lambda env: env.step(np.array([1, 1, 1])))
        both(lambda env: env.reset(indices=[0]))
        both(lambda env: env.reset(indices=()))
        both(lambda env: env.step(np.array([1, 0, 1])))
        state = workers.state_dict()
        both(lambda env: env.step(np.array([1, 0, 1])))
        for env in (workers, here):
            env.load_state_dict(state)
        both(lambda env: env.reset(indices=()))
        both(lambda env: env.step(np.array([1, 1, 1])))
        state["copies"][1]["episode_return"] = 7.0
        with pytest.warns(UserWarning, match="lane 1 could not be restored"):
            workers.load_state_dict(state)


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
                bad = [name for name in ("torch", "user_script", "jax") if name in sys.modules]
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


class Unpicklable(Exception):
    def __init__(self):
        super().__init__("held by a lambda")
        self.lock = threading.Lock()


class Speechless(Exception):
    def __str__(self):
        raise RuntimeError("no words")


ERRORS = {
    "plain": (lambda: raises(ValueError("boom")), "ValueError: boom"),
    "percent": (lambda: raises(ValueError("100 % of %s")), "ValueError: 100 % of %s"),
    "unicode": (lambda: raises(ValueError("żółw \ud800")), "ValueError: żółw"),
    "interrupt": (lambda: raises(KeyboardInterrupt()), "KeyboardInterrupt: "),
}


EARLY = [("init", "plain"), ("init", "interrupt"), ("reset", "plain"), ("reset", "interrupt")]


@pytest.mark.parametrize(("moment", "kind"), [*EARLY, *(("step", kind) for kind in ERRORS)])
def test_an_error_arrives_with_its_traceback_lane_and_seed(moment, kind):
    deed, words = ERRORS[kind]
    deed = deed()
    with pytest.raises(WorkerError) as caught:
        play(lambda: Faulty(moment, deed), 2, 1)
    text = str(caught.value)
    assert words in text
    assert "Traceback in the worker" in text
    assert "in deed" in text  # the frame that raised
    if moment == "init":
        assert text.startswith("env worker 0 (lanes 0 to 1): ")
    else:
        assert text.startswith(f"env worker 0 (lanes 0 to 1), lane 1, episode seed {episode_seed(0, 1, 0)}: ")


def test_errors_that_cannot_travel_arrive_as_text():
    def unpicklable():
        raise Unpicklable

    def huge():
        raise ValueError("x" * 10_000_000)

    def speechless():
        raise Speechless

    def caused():
        try:
            raise KeyError("the cause")
        except KeyError as error:
            raise RuntimeError("the effect") from error

    for deed, words in ((unpicklable, "Unpicklable: held by a lambda"), (huge, "ValueError: xxx"), (speechless, "Speechless: (its")):
        with pytest.raises(WorkerError) as caught:
            play(lambda deed=deed: Faulty("step", deed, lane=0), 1, 1)
        assert words in str(caught.value)
        assert len(str(caught.value)) < 40_000
    with pytest.raises(WorkerError, match=r"(?s)RuntimeError: the effect.*KeyError: 'the cause'.*RuntimeError: the effect"):
        play(lambda: Faulty("step", caused, lane=0), 1, 1)


def test_a_broken_contract_is_told_in_one_line():
    class Broken(Counter):
        def step(self, action):
            return np.zeros(5), 0.0, False, False, {}

    with pytest.raises(WorkerError) as caught:
        play(Broken, 2, 1)
    assert "EnvError: lane 0, step 1" in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_an_error_while_closing_is_a_warning():
    env = make_vector_env(lambda: Faulty("close", raises(OSError("stuck"))), 1, 1)
    with pytest.warns(UserWarning, match="lane 0 failed to close: OSError: stuck"):
        env.close()
    env.close()


def test_after_an_error_the_vector_env_is_gone_but_can_be_closed():
    env = make_vector_env(lambda: Faulty("reset", raises(ValueError("boom"))), 2, 1)
    with pytest.raises(WorkerError, match="boom"):
        env.reset()
    with pytest.raises(WorkerError, match="have ended after an earlier error"):
        env.reset()
    env.close()
    env.close()
    with pytest.raises(EnvError, match="closed"):
        env.reset()


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        (lambda: os.kill(os.getpid(), 9), "was killed by SIGKILL"),
        (lambda: os._exit(3), "exited with code 3"),
        (raises(SystemExit(3)), f"exited, lane 1, episode seed {episode_seed(0, 1, 0)}: SystemExit: 3.*in deed"),
    ],
)
def test_a_worker_that_dies_is_named_at_once(deed, words):
    with WorkerVectorEnv(lambda: Faulty("step", deed), 3, 3, worker_restarts=0) as env:
        env.reset()
        env.step(np.zeros(3, int)), env.step(np.zeros(3, int))
        with pytest.raises(WorkerError, match=rf"(?s)env worker 1 \(lane 1\) {words}.*episode seeds by lane 1: {episode_seed(0, 1, 0)}"):
            env.step(np.zeros(3, int))


def test_a_death_between_steps_or_beside_a_slow_worker_is_noticed():
    def slow():
        time.sleep(3600)

    env = WorkerVectorEnv(lambda: Faulty("step", slow, lane=0), 2, 2, worker_restarts=0)
    env.reset()
    victim = env._engine._workers[1].process
    victim.kill()
    victim.wait()
    with pytest.raises(WorkerError, match=r"env worker 1 \(lane 1\) was killed by SIGKILL"):
        env.step(np.zeros(2, int))
    env = WorkerVectorEnv(lambda: Faulty("step", slow, lane=0), 2, 2, worker_restarts=0)
    env.reset()
    env.step(np.zeros(2, int)), env.step(np.zeros(2, int))
    env.send(np.zeros(2, int))
    killer = threading.Timer(0.3, env._engine._workers[1].process.kill)
    killer.start()
    with pytest.raises(WorkerError, match=r"env worker 1 \(lane 1\) was killed by SIGKILL"):
        env.recv()
    killer.join()


def test_a_worker_that_dies_at_the_start_is_named():
    with pytest.raises(WorkerError, match=r"env worker 0 \(lanes 0 to 1\) exited with code 7, while its environments were created"):
        play(lambda: Faulty("init", lambda: os._exit(7)), 2, 1)


def sleeps():
    time.sleep(60)


def ignores_sigterm():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        sum(range(1000))


@pytest.mark.parametrize("deed", [sleeps, ignores_sigterm])
@pytest.mark.parametrize("moment", ["reset", "step"])
def test_a_worker_that_hangs_is_ended_after_its_timeout(moment, deed):
    env = WorkerVectorEnv(lambda: Faulty(moment, deed), 2, 2, worker_timeout=2.0, worker_restarts=0)
    with pytest.raises(WorkerError, match=r"env worker 1 \(lane 1\).*no answer within 2 s; raise env.worker_timeout"):
        reset_and_step(env, 3)
    env.close()


def test_closing_is_bounded_even_if_an_environment_never_closes():
    env = WorkerVectorEnv(lambda: Faulty("close", ignores_sigterm), 1, 1)
    env._engine.close(0.2)
    env.close()
    env = WorkerVectorEnv(lambda: Faulty("close", sleeps), 1, 1)
    env.close()


def test_an_interrupted_exchange_is_not_continued_but_closed():
    env = WorkerVectorEnv(lambda: Faulty("step", lambda: time.sleep(0.5), lane=0), 2, 2)
    env.reset()
    env.step(np.zeros(2, int)), env.step(np.zeros(2, int))
    timers = [threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)) for delay in (0.1,)]
    for timer in timers:
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
    for process in env._engine._workers:
        assert os.getpgid(process.process.pid) != os.getpgid(0)
        os.kill(process.process.pid, signal.SIGINT)
    assert env.step(np.zeros(2, int)).observations[:, 1].tolist() == [1, 1]
    env.close()


def test_the_garbage_collector_ends_workers():
    env = make_vector_env(Counter, 1, 1)
    pid = env._engine._workers[0].process.pid
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
print(*[process.process.pid for process in env._engine._workers], flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with parent.stdout:
        pids = parent.stdout.readline().split()
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 120
    while any(_is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [pid for pid in pids if _is_running(pid)] == []


def _is_running(pid):
    """A zombie that init has not reaped yet has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


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


def test_a_factory_that_cannot_be_sent_is_explained():
    lock = threading.Lock()
    with pytest.raises(EnvError, match=r"cannot be sent to worker processes.*env\.num_workers=0"):
        make_vector_env(lambda: (lock, Counter())[1], 2, 2)


def test_workers_with_different_spaces_are_refused():
    def make():
        env = Counter()
        env.action_space = spaces.Discrete(2 + os.getpid() % 1000)
        return env

    with pytest.raises(EnvError, match="different workers have different spaces"):
        make_vector_env(make, 2, 2)


def test_the_number_of_workers_is_checked():
    for workers in (0, 3):
        with pytest.raises(EnvError, match=f"num_workers={workers} must be from 1 to 2, because num_envs=2"):
            WorkerVectorEnv(Counter, 2, workers)


def test_a_long_replay_says_that_it_is_alive():
    class Slow(Counter):
        def step(self, action):
            time.sleep(0.06)
            return super().step(action)

    env = make_vector_env(lambda: Counter(length=99), 1)
    env.reset()
    for _ in range(60):
        env.step(np.zeros(1, int))
    with WorkerVectorEnv(lambda: Slow(length=99), 1, 1, worker_timeout=3.0) as workers:  # the replay takes 3.6 s
        workers.load_state_dict(env.state_dict())
        assert workers.reset(indices=()).observations[0, 1] == 60


@pytest.mark.slow
def test_many_cycles_leave_nothing_behind():
    for _ in range(6):
        with make_vector_env("CartPole-v1", 2, 2) as env:
            run(env, 5)
