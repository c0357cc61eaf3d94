"""Tests of env/workers/rebuild.py: a worker may die or hang at any moment, and the numbers are those of a run in which none did."""

import contextlib
import functools
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings

import cloudpickle
import numpy as np
import pytest

from doubles.dying import World, doomed, end, exits, ignores_sigterm, killed, leaves, play, processes, runs_out, segfaults, sleeps
from doubles.stepping import assert_equal_steps, assert_equal_trees, frozen, random_actions
from doubles.toys import Counter
from inchworm.core.errors import EnvError, WorkerError, WorkerRestartWarning
from inchworm.env.source import InProcessVectorEnv, WorkerVectorEnv, make_vector_env
from inchworm.env.step_arrays import map_tree, open_shared
from inchworm.env.workers.rebuild import RestartBudget

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test module

LANES, STEPS = 4, 60
LAYOUTS = [(1, False), (2, False), (4, False), (1, True), (2, True)]
MOMENTS = {"new": [0], "idle": [0, 17, 40], "sent": [1, 20, 41], "options": [3, 10, 31], "reset": [5, 16, 49]}
FAST = {("new", 1), ("idle", 2), ("sent", 2), ("options", 4), ("reset", 1)}
CASES = [
    pytest.param(moment, *layout, marks=[] if (moment, layout[0]) in FAST else [pytest.mark.slow])
    for moment in MOMENTS
    for layout in LAYOUTS
]


@functools.cache
def undisturbed(steps=STEPS):
    with InProcessVectorEnv(World, LANES, seed=3) as env:
        return play(env, steps)


def descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def children():
    with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{os.getpid()}/children") as file:
        return set(file.read().split())
    return set()


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    before = descriptors(), children()
    yield
    assert (descriptors(), children()) == before
    assert not [name for name in os.listdir("/dev/shm") if "inchworm" in name]


def restarted(seen):
    return [str(warning.message) for warning in seen if issubclass(warning.category, WorkerRestartWarning)]


def check(make, workers=2, helped=False, disturb=lambda env, moment, number: None, restarts=1, **options):
    """Play with harm; every step must be that of the undisturbed run. `restarts` is how many there must be."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with WorkerVectorEnv(make, LANES, workers, help_workers=helped, seed=3, **options) as env:
            assert_equal_steps(play(env, STEPS, disturb), undisturbed())
    assert len(restarted(seen)) == restarts
    return restarted(seen)


def test_the_world_has_all_that_could_go_wrong():
    steps = undisturbed()
    assert sum(len(step.ended) for step in steps) > 20
    assert any(step.terminated.any() for step in steps)
    assert any(step.truncated.any() for step in steps)
    assert sum(step.episode_starts.all() for step in steps) == 1


@pytest.mark.parametrize(("moment", "workers", "helped"), CASES)
def test_a_worker_that_is_killed_at_any_moment_changes_nothing(moment, workers, helped):
    """Three deaths each; those before the first reset have nothing to replay."""

    def harm(env, now, number):
        if now == moment and number in MOMENTS[moment]:
            end(env, number % workers)

    told = check(World, workers, helped, harm, restarts=len(MOMENTS[moment]))
    assert all("was killed by SIGKILL" in text and "it was replaced in" in text for text in told)
    if moment != "reset":  # where the only copy of a worker may be the one that is reset
        assert all(("replaying" in text) == (moment != "new") for text in told)


@pytest.mark.parametrize(
    ("moment", "count"), [("step", 0), ("step", 33), ("stepped", 0), ("stepped", 9), ("reset", 1), ("reset", 2), ("reset", 5)]
)
def test_a_worker_that_dies_inside_its_world_changes_nothing(tmp_path, moment, count):
    (text,) = check(doomed(tmp_path, (moment, count, killed)))
    assert "was killed by SIGKILL" in text


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        (exits, "exited with code 3"),
        (leaves, "exited, lane 0, episode seed [0-9]+: SystemExit: enough"),
        (segfaults, "was killed by SIGSEGV"),
        (runs_out, "exited, lane 0, episode seed [0-9]+: MemoryError: no more"),
    ],
)
def test_every_way_to_die_counts(tmp_path, deed, words):
    (text,) = check(doomed(tmp_path, ("step", 9, deed)), 1)
    assert re.match(rf"env worker 0 \(lanes 0 to 3\) {words}", text)


@pytest.mark.parametrize("deed", [sleeps, ignores_sigterm])
@pytest.mark.parametrize(("moment", "count"), [("step", 9), ("reset", 4), ("reset", 1)])
def test_a_worker_that_hangs_is_replaced(tmp_path, moment, count, deed):
    (text,) = check(doomed(tmp_path, (moment, count, deed)), worker_timeout=2.0)
    assert "gave no answer within 2 s; raise env.worker_timeout if a step may take longer; it was replaced" in text


def test_a_successor_may_die_while_it_is_set_up_or_replays(tmp_path):
    """The first dies in its world, the next at once, the next in its replay, the next in the step that is done again."""
    deeds = [("step", 9, killed), ("init", 0, exits), ("step", 0, killed), ("stepped", 1, killed)]
    told = check(doomed(tmp_path, *deeds), 1, restarts=4)
    assert [("its replacement" in text) for text in told] == [True, True, True, False]
    assert "10 restarts" not in told[0]
    assert "(9 restarts left within ten minutes)" in told[0]
    assert "(6 restarts left within ten minutes)" in told[3]


def test_a_worker_may_die_while_the_copies_are_made(tmp_path):
    (text,) = check(doomed(tmp_path, ("init", 0, exits)))
    assert "replaying" not in text


def test_all_workers_may_die_at_once():
    def harm(env, now, number):
        if (now, number) in (("idle", 21), ("sent", 40)):
            for index in range(4):
                end(env, index, wait=False)
            for process in processes(env):
                process.process.wait()

    check(World, 4, disturb=harm, restarts=8)


def test_a_worker_that_has_no_part_in_an_exchange_is_replaced_too():
    """Lane 0 is worker 0's; a reset of lane 3 alone notices its death all the same."""
    reference = InProcessVectorEnv(World, LANES, seed=3)
    with WorkerVectorEnv(World, LANES, 4, seed=3) as env:
        step, _ = (frozen(each.reset()) for each in (env, reference))
        rng = np.random.default_rng(0)
        for _ in range(5):
            actions = random_actions(env, step, rng)
            step, _ = (frozen(each.step(actions)) for each in (env, reference))
        end(env, 0)
        slow = processes(env)[3].process
        os.kill(slow.pid, 19)  # SIGSTOP, so that worker 0 is looked at before worker 3 answers
        timer = threading.Timer(0.3, os.kill, (slow.pid, 18))
        timer.start()
        with pytest.warns(WorkerRestartWarning, match="env worker 0 "):
            assert_equal_steps([frozen(env.reset(indices=[3]))], [frozen(reference.reset(indices=[3]))])
        timer.join()
        actions = random_actions(env, env.reset(indices=()), rng)
        reference.reset(indices=())
        assert_equal_steps([frozen(env.step(actions))], [frozen(reference.step(actions))])


def test_a_rebuild_between_steps_leaves_the_last_step_readable():
    """The collector may read rewards and flags of a step after options were set: they must not be those of a replay."""
    with WorkerVectorEnv(World, LANES, 2, seed=3) as env, InProcessVectorEnv(World, LANES, seed=3) as reference:
        rng = np.random.default_rng(1)
        step, _ = (frozen(each.reset()) for each in (env, reference))
        ends = 0
        for _ in range(40):
            actions = random_actions(env, step, rng)
            live, step = env.step(actions), frozen(reference.step(actions))
            if step.ended and ends < 3:
                ends += 1
                end(env, step.ended[0].lane // 2)
                with pytest.warns(WorkerRestartWarning):
                    env.set_reset_options(None)
            assert_equal_steps([frozen(live)], [step])
        live, step = env.reset(indices=[0]), frozen(reference.reset(indices=[0]))  # rewards are 0 now, unlike those of a replay
        end(env, 1)
        with pytest.warns(WorkerRestartWarning):
            env.set_reset_options(None)
        assert_equal_steps([frozen(live)], [step])
        assert ends == 3


def test_a_saved_state_is_loaded_though_workers_die(tmp_path):
    with InProcessVectorEnv(World, LANES, seed=3) as env:
        step = play(env, 30)[-1]
        env.set_reset_options({"bonus": 4}, indices=[1])
        state = env.state_dict()
        rng = np.random.default_rng(2)
        expected = []
        for _ in range(20):
            step = frozen(env.step(random_actions(env, step, rng)))
            expected.append(step)
    for harm in ("options", "replay", "play"):
        deeds = [("step", 0, killed)] if harm == "replay" else []
        (tmp_path / harm).mkdir()
        with WorkerVectorEnv(doomed(tmp_path / harm, *deeds), LANES, 2, seed=3) as env:
            if harm == "play":  # the copies stand in other episodes than the saved ones
                env.reset()
            if harm != "replay":
                end(env, 1)
            with pytest.warns(WorkerRestartWarning):
                env.load_state_dict(state)
            step = env.reset(indices=())
            rng = np.random.default_rng(2)
            for other in expected:
                step = frozen(env.step(random_actions(env, step, rng)))
                assert_equal_steps([step], [other])


def test_groups_do_not_feel_each_others_deaths():
    """Another vector env may have a step under way while one is rebuilt."""
    first, second = (WorkerVectorEnv(World, 2, 1, seed=3, first_copy=copy) for copy in (0, 2))
    with first, second, InProcessVectorEnv(World, LANES, seed=3) as reference:
        rng = np.random.default_rng(0)
        step = frozen(reference.reset())
        first.reset(), second.reset()
        for number in range(20):
            actions = random_actions(reference, step, rng)
            step = frozen(reference.step(actions))
            groups = (first, lambda rows: rows[:2]), (second, lambda rows: rows[2:])
            for group, half in groups:
                group.send(map_tree(half, actions))
            if number == 11:
                end(first, 0)
            for group, half in groups:
                got = group.recv()
                np.testing.assert_array_equal(got.rewards, half(step.rewards))
                assert_equal_trees(got.observations, map_tree(half, step.observations))


def test_kills_at_random_moments_change_nothing():
    rng = np.random.default_rng(int.from_bytes(os.urandom(4)))
    env = WorkerVectorEnv(World, LANES, 2, seed=3)

    def kill():
        for _ in range(5):
            time.sleep(rng.uniform(0.0, 0.2))
            victim = processes(env)[int(rng.integers(2))]
            pid = victim.process.pid
            os.kill(pid, 9)
            while victim.process.pid == pid:  # until it is being replaced
                time.sleep(0.001)

    killer = threading.Thread(target=kill)
    with env, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        killer.start()
        while killer.is_alive():
            steps = play(env, STEPS)
            env._ledger.episodes = [-1] * LANES  # the same seeds again
            env.set_reset_options(None)
            assert_equal_steps(steps, undisturbed())
        killer.join()
    assert len(restarted(seen)) == 5


class Forgetful(Counter):
    """Observations depend on the process, rewards do not: only the observation betrays a replay."""

    def _observe(self):
        return super()._observe() + (os.getpid() % 1000 + 1 if self.steps else 0)


class Moody(Counter):
    """Rewards depend on the process."""

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, reward + os.getpid() % 1000, *rest


class Short(Counter):
    """Episodes end earlier in a process that is not the first."""

    def __init__(self, marker):
        super().__init__(length=6 if marker.exists() else 50)
        marker.touch()


def die_idle(env):
    end(env, 0)
    env.step(np.zeros(1, int))


def die_unheard(env):
    env.send(np.zeros(1, int))
    while not env._rows.rewards[0] >= 10.0:  # until the step is done
        time.sleep(0.001)
    time.sleep(0.1)
    end(env, 0)
    assert env._engine._workers[0].connection.recv(1) == b"S"  # but nobody heard that it was
    env.recv()


def die_before_options(env):
    end(env, 0)
    env.set_reset_options(None)


@pytest.mark.parametrize("harm", [die_idle, die_unheard, die_before_options])
def test_a_replay_that_leads_elsewhere_ends_the_run(harm, tmp_path):
    cases = [
        (lambda: Forgetful(length=50), "a different observation"),
        (lambda: Moody(length=50), "return and length"),
        (lambda: Short(tmp_path / "made"), r"return and length \(15.0, 5\) instead of \(45.0, 9\)"),
    ]
    for make, words in cases:
        with WorkerVectorEnv(make, 1, 1) as env:
            env.reset()
            for _ in range(9):
                env.step(np.zeros(1, int))
            with pytest.raises(WorkerError, match=f"cannot rebuild lane 0.*{words}"):
                harm(env)
            with pytest.raises(EnvError):
                env.step(np.zeros(1, int))


def test_an_episode_that_was_not_kept_ends_the_run():
    with WorkerVectorEnv(lambda: Counter(length=500), 1, 1, max_replay_steps=10) as env:
        env.reset()
        for _ in range(200):
            env.step(np.zeros(1, int))
        end(env, 0)
        with pytest.raises(WorkerError, match=r"lane 0 could not be brought back.*200 steps, and collect.max_replay_steps=10 are kept"):
            env.step(np.zeros(1, int))


def test_restarts_are_bounded():
    with WorkerVectorEnv(Counter, 2, 2, worker_restarts=2) as env:
        env.reset()
        for _ in range(2):
            end(env, 1)
            with pytest.warns(WorkerRestartWarning):
                env.step(np.zeros(2, int))
        end(env, 0)
        with pytest.raises(WorkerError) as caught:
            env.step(np.zeros(2, int))
    assert "env worker 0 (lane 0) was killed by SIGKILL" in str(caught.value)
    assert "there were 2 restarts before (env.worker_restarts=2 within ten minutes)" in str(caught.value)
    assert "env worker 1 (lane 1) was killed by SIGKILL (perhaps out of memory) (2 x)" in str(caught.value)


def test_a_worker_that_dies_at_every_start_ends_in_an_error():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        words = r"env worker 0 \(lanes 0 to 1\) exited with code 3, while .* created; not restarted: there were 3 restarts"
        with pytest.raises(WorkerError, match=words):
            WorkerVectorEnv(exits, 2, 1, worker_restarts=3)
    assert len(restarted(seen)) == 3


def test_no_restarts_at_all():
    with WorkerVectorEnv(Counter, 2, 2, worker_restarts=0) as env:
        env.reset()
        end(env, 1)
        with pytest.raises(WorkerError, match=r"env worker 1 \(lane 1\) was killed by SIGKILL.*because env.worker_restarts=0"):
            env.step(np.zeros(2, int))


def test_old_restarts_are_forgotten_but_not_those_of_one_exchange(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    restarts = RestartBudget(2)
    for _ in range(10):  # one every 400 s: never more than two in 600 s
        restarts.spend("worker", "died", "", 0)
        now[0] += 400
    assert restarts.left == 0  # counted when the last one was spent
    for attempt in range(2):  # a world that hangs every time, 400 s long
        restarts.spend("worker", "hung", "", attempt)
        now[0] += 400
    with pytest.raises(WorkerError, match="worker hung; not restarted: there were 2 restarts"):
        restarts.spend("worker", "hung", "", 2)


def test_a_dead_worker_is_replaced_in_little_time_and_leaves_nothing():
    """Descriptors and children stay what they were over many restarts, also where a socket gets another number."""
    lower = os.open(os.devnull, os.O_RDONLY)
    with WorkerVectorEnv(Counter, 2, 1, worker_restarts=100) as env:
        env.reset()
        os.close(lower)
        before = descriptors(), len(children())
        for _ in range(5):
            end(env, 0)
            with pytest.warns(WorkerRestartWarning):
                env.step(np.zeros(2, int))
            assert (descriptors(), len(children())) == before
        assert len(env._engine._by_descriptor) == 1


def test_ctrl_c_while_a_worker_is_rebuilt_leaves_nothing(tmp_path):
    env = WorkerVectorEnv(doomed(tmp_path, ("step", 9, killed), ("step", 3, sleeps)), LANES, 1, seed=3)
    timer = threading.Timer(2.0, os.kill, (os.getpid(), 2))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        play(env, STEPS)
    timer.join()
    with pytest.raises(WorkerError, match="was interrupted"):
        env.reset()
    env.close()


def test_an_error_in_the_replay_is_told(tmp_path):
    def raises():
        raise ValueError("only here")

    env = WorkerVectorEnv(doomed(tmp_path, ("step", 9, killed), ("step", 3, raises)), LANES, 1, seed=3)
    with pytest.raises(
        WorkerError, match=r"(?s)env worker 0 \(lanes 0 to 3\), lane \d, episode seed \d+: ValueError: only here.*in raises"
    ):
        play(env, STEPS)
    env.close()


def test_a_worker_whose_child_holds_its_socket_is_missed_all_the_same(tmp_path):
    def forks_and_dies():
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        os._exit(5)

    (text,) = check(doomed(tmp_path, ("step", 9, forks_and_dies)))
    assert "exited with code 5" in text


def test_the_number_of_restarts_reaches_the_workers():
    for made in (make_vector_env("CartPole-v1", 2, 1, worker_restarts=0), make_vector_env(Counter, 2, 1, worker_restarts=0)):
        with made as env:
            env.reset()
            end(env, 0)
            with pytest.raises(WorkerError, match="worker_restarts=0"):
                env.step(np.zeros(2, int))


LIMITED = """
import os, resource, sys
from inchworm.env.source import make_vector_env
from inchworm.core.errors import WorkerError
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
held = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]
try:
    make_vector_env("CartPole-v1", 8, 4)
except WorkerError as error:
    print(error)
    sys.exit(3)
"""


def test_too_few_open_files_are_a_clear_error():
    """No signal, no hang, no traceback: exit code 3 is the script's own."""
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (3, "")
    words = r"env worker \d \(lanes \d to \d\) could not be started: .*Too many open files; use fewer env.num_workers"
    assert re.match(words, done.stdout)


def test_memory_that_cannot_be_had_is_a_clear_error(monkeypatch):
    with pytest.raises(WorkerError, match=r"MB of memory to share with the env workers could not be had: .*Cannot allocate memory"):
        open_shared(1 << 50)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        WorkerError, match=r"0.0 MB of memory .* could not be had: .*No space left.*; use fewer env.num_envs, or env.num_wo"
    ):
        WorkerVectorEnv(Counter, 2, 1)


def test_a_process_that_cannot_be_started_is_a_clear_error(monkeypatch):
    def refuses(*args, **kwargs):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with WorkerVectorEnv(Counter, 2, 2) as env:
        env.reset()
        monkeypatch.setattr(subprocess, "Popen", refuses)
        end(env, 1)
        with pytest.raises(WorkerError, match=r"env worker 1 \(lane 1\) could not be started: .*temporarily unavailable.*ulimit -u"):
            env.step(np.zeros(2, int))
    with pytest.raises(WorkerError, match=r"env worker 0 \(lane 0\) could not be started"):
        WorkerVectorEnv(Counter, 2, 2)


def test_ctrl_c_waits_until_a_process_that_is_being_started_has_an_owner(monkeypatch):
    started = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.01)

    env = WorkerVectorEnv(Counter, 2, 2)
    env.reset()
    end(env, 1)
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        env.step(np.zeros(2, int))
    assert processes(env)[1].process is started[0]
    assert signal.getsignal(signal.SIGINT) is before
    env.close()
    assert started[0].returncode is not None
