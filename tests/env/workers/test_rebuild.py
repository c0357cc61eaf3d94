"""Tests of env/workers/rebuild.py: a worker may die or hang at any moment, and the results are those of a run in which none did."""

import errno
import functools
import os
import re
import sys
import threading
import time
import warnings

import cloudpickle
import numpy as np
import pytest

from doubles import crashing
from doubles.crashing import FickleTeam, World, exits, faulty, is_killed, kill, play, sleeps, workers
from doubles.disk import failing
from doubles.stepping import assert_equal_steps, continue_run, frozen, random_actions, reset_and_step, run
from doubles.toys import Counter
from inchworm.core.errors import EnvError, WorkerError, WorkerRestartWarning
from inchworm.env.source import InProcessVectorEnv, WorkerVectorEnv
from inchworm.env.step_arrays import open_shared
from inchworm.env.workers.rebuild import RestartBudget
from inchworm.worlds.toys import DEATHS, JOINS, Comings

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test module

LANES, STEPS = 4, 60
MOMENTS = [("new", 0), ("idle", 0), ("reset", 5), ("idle", 17), ("sent", 20), ("options", 31)]


@functools.cache
def undisturbed(make=World, **options):
    """A run without faults; that of `World` has ends of both kinds."""
    with InProcessVectorEnv(make, LANES, seed=3, **options) as env:
        steps = play(env, STEPS)
    assert sum(len(step.ended) for step in steps) > 20
    if make is World:
        assert any(step.terminated.any() for step in steps)
        assert any(step.truncated.any() for step in steps)
    return steps


def restarts_of(seen):
    return [str(warning.message) for warning in seen if issubclass(warning.category, WorkerRestartWarning)]


def killing(workers):
    """A disturbance of `play`: some worker is killed at each of the MOMENTS."""
    return lambda env, now, number: kill(env, number % workers) if (now, number) in MOMENTS else None


def check(make, workers=2, helped=False, disturb=lambda env, moment, number: None, restarts=1, expected=None, **options):
    """Play with faults; every step must be that of the undisturbed run. `restarts` is how many there must be."""
    expected = expected or undisturbed()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with WorkerVectorEnv(make, LANES, workers, help_workers=helped, seed=3, **options) as env:
            assert_equal_steps(play(env, STEPS, disturb), expected)
    assert len(restarts_of(seen)) == restarts
    return restarts_of(seen)


@pytest.mark.parametrize(("workers", "helped"), [(4, False), (2, True)])
def test_a_worker_that_is_killed_at_any_moment_changes_nothing(workers, helped):
    """A death before the first reset has nothing to replay; where a copy is reset, it may have been the only one of its worker."""
    kept = {"keep_infos": ("left",)}
    texts = check(World, workers, helped, killing(workers), restarts=len(MOMENTS), expected=undisturbed(**kept), **kept)
    assert all("was killed by SIGKILL" in text and "it was replaced in" in text for text in texts)
    assert ["replaying" in text for text, (now, _) in zip(texts, MOMENTS) if now != "reset"] == [False, True, True, True, True]


@pytest.mark.parametrize("plan", [DEATHS, JOINS])
def test_a_death_changes_nothing_for_a_team(plan):
    """Killed with agents dead, just gone and just joined in the worker's copies."""
    pytest.importorskip("pettingzoo")
    team = functools.partial(Comings, plan, masks="info")
    expected = undisturbed(team, global_state=True)
    texts = check(team, 2, False, killing(2), restarts=len(MOMENTS), expected=expected, global_state=True)
    assert all("(lanes 0 to 5)" in text or "(lanes 6 to 11)" in text for text in texts)


def forks_and_dies():
    """The child holds the socket open."""
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    os._exit(5)


KILLED, HUNG = "was killed by SIGKILL", "gave no answer within 3 s; raise env.worker_timeout if a step may take longer; it was replaced"
RAISED = r"exited: lane \d, step \d+ of episode \d+ with seed \d+: step raised"


@pytest.mark.parametrize(
    ("moment", "count", "fault", "words"),
    [
        *((moment, count, is_killed, KILLED) for moment, count in [("step", 33), ("stepped", 0), ("reset", 5)]),
        ("init", 0, exits, r"exited with code 3; it was replaced in [\d.]+ s \("),  # nothing to replay
        ("step", 9, forks_and_dies, "exited with code 5"),
        ("step", 9, crashing.raises_system_exit, rf"{RAISED} SystemExit: enough"),
        ("step", 9, crashing.segfaults, "was killed by SIGSEGV"),
        ("step", 9, crashing.runs_out_of_memory, rf"{RAISED} MemoryError: no more"),
        ("reset", 4, crashing.ignores_sigterm, HUNG),
    ],
)
def test_a_worker_that_dies_or_hangs_inside_its_environment_changes_nothing(tmp_path, moment, count, fault, words):
    (text,) = check(faulty(tmp_path, (moment, count, fault)), worker_timeout=3.0 if words is HUNG else 60.0)
    assert re.match(rf"env worker \d \(lanes \d to \d\) {words}", text)


def test_a_replacement_may_die_while_it_is_set_up_or_replays(tmp_path):
    """The first dies in its environment, the next at once, the next in its replay, the next in the step that is repeated."""
    faults = [("step", 9, is_killed), ("init", 0, exits), ("step", 0, is_killed), ("stepped", 1, is_killed)]
    texts = check(faulty(tmp_path, *faults), 1, restarts=4)
    assert [("its replacement" in text) for text in texts] == [True, True, True, False]
    assert "(9 restarts left within ten minutes)" in texts[0]
    assert "(6 restarts left within ten minutes)" in texts[3]


def test_all_workers_may_die_at_once():
    def disturb(env, now, number):
        if (now, number) in (("idle", 21), ("sent", 40)):
            for index in range(2):
                kill(env, index, wait=False)
            for worker in workers(env):
                worker.process.wait()

    check(World, 2, disturb=disturb, restarts=4)


def test_a_worker_without_a_part_in_an_exchange_is_replaced_too():
    """Lane 0 is worker 0's; a reset of lane 3 alone notices its death all the same."""
    with WorkerVectorEnv(World, LANES, 4, seed=3) as env, InProcessVectorEnv(World, LANES, seed=3) as reference:
        run(env, 5), run(reference, 5)
        kill(env, 0)
        slow = workers(env)[3].process
        os.kill(slow.pid, 19)  # SIGSTOP, so that worker 0 is looked at before worker 3 answers
        timer = threading.Timer(0.3, os.kill, (slow.pid, 18))
        timer.start()
        with pytest.warns(WorkerRestartWarning, match="env worker 0 "):
            assert_equal_steps([frozen(env.reset(indices=[3]))], [frozen(reference.reset(indices=[3]))])
        timer.join()
        assert_equal_steps(continue_run(env, 1), continue_run(reference, 1))


def test_a_rebuild_between_steps_leaves_the_last_step_readable():
    """The collector may read rewards, flags and infos of a step after options were set: they must not be those of a replay."""
    kept = {"keep_infos": ["left"]}
    with WorkerVectorEnv(World, LANES, 2, seed=3, **kept) as env, InProcessVectorEnv(World, LANES, seed=3, **kept) as reference:
        rng = np.random.default_rng(1)
        step, _ = (frozen(each.reset()) for each in (env, reference))
        ends = 0
        for _ in range(40):
            actions = random_actions(env, step, rng)
            live, step = env.step(actions), frozen(reference.step(actions))
            if step.ended and ends < 3:
                ends += 1
                kill(env, step.ended[0].lane // 2)
                with pytest.warns(WorkerRestartWarning):
                    env.set_reset_options(None)
            assert_equal_steps([frozen(live)], [step])
        live, step = env.reset(indices=[0]), frozen(reference.reset(indices=[0]))  # rewards are 0 now, unlike those of a replay
        kill(env, 1)
        with pytest.warns(WorkerRestartWarning):
            env.set_reset_options(None)
        assert_equal_steps([frozen(live)], [step])
        assert ends == 3


@pytest.mark.parametrize("moment", ["options", "replay", "play"])
def test_a_saved_state_is_loaded_although_workers_die(tmp_path, moment):
    with InProcessVectorEnv(World, LANES, seed=3) as env:
        play(env, 30)
        env.set_reset_options({"bonus": 4}, indices=[1])
        state = env.state_dict()
        expected = continue_run(env, 20)
    faults = [("step", 0, is_killed)] if moment == "replay" else []
    with WorkerVectorEnv(faulty(tmp_path, *faults), LANES, 2, seed=3) as env:
        if moment == "play":  # the copies are in other episodes than the saved ones
            env.reset()
        if moment != "replay":
            kill(env, 1)
        with pytest.warns(WorkerRestartWarning):
            env.load_state_dict(state)
        assert_equal_steps(continue_run(env, 20), expected)


# ---- what cannot be rebuilt
class Different(Counter):
    """Differs in one thing from the environments of other processes: in observations, rewards, or length."""

    def __init__(self, what, marker):
        self.shift = 1 if marker.exists() else 0
        self.what = what
        marker.touch()
        super().__init__(length=6 if what == "length" and self.shift else 50)

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation + self.shift * (self.what == "observation"), reward + self.shift * (self.what == "reward"), *rest


def die_idle(env):
    kill(env, 0)
    env.step(np.zeros(1, int))


def die_after_an_unread_step(env):
    env.send(np.zeros(1, int))
    while not env._rows.rewards[0] >= 10.0:  # until the step is done
        time.sleep(0.001)
    connection = workers(env)[0].connection
    connection.settimeout(120)
    assert connection.recv(1) == b"S"  # read here, so that the pool never sees the answer
    kill(env, 0)
    env.recv()


def die_before_options(env):
    kill(env, 0)
    env.set_reset_options(None)


@pytest.mark.filterwarnings("ignore::inchworm.core.errors.WorkerRestartWarning")
@pytest.mark.parametrize(
    ("die", "what", "words"),
    [
        *((die, "observation", "a different observation") for die in (die_idle, die_after_an_unread_step, die_before_options)),
        (die_idle, "reward", r"return and length \(54.0, 9\) instead of \(45.0, 9\)"),
        (die_idle, "length", r"return and length \(15.0, 5\) instead of \(45.0, 9\)"),
    ],
)
def test_a_replay_with_other_results_ends_the_run(die, what, words, tmp_path):
    with WorkerVectorEnv(lambda: Different(what, tmp_path / "made"), 1, 1) as env:
        reset_and_step(env, 9)
        with pytest.raises(WorkerError, match=f"cannot rebuild lane 0.*gave {words}"):
            die(env)
        with pytest.raises(EnvError):
            env.step(np.zeros(1, int))


def test_a_team_with_other_members_ends_the_run(tmp_path):
    pytest.importorskip("pettingzoo")
    with WorkerVectorEnv(lambda: FickleTeam(tmp_path / "made"), 1, 1) as env:
        env.reset()
        env.step(np.zeros(3, np.int64))
        kill(env, 0)
        with pytest.raises(WorkerError, match="cannot rebuild lane 0"):
            env.set_reset_options(None)


def test_an_episode_that_is_too_long_to_replay_ends_the_run():
    with WorkerVectorEnv(lambda: Counter(length=500), 1, 1, max_replay_steps=10) as env:
        reset_and_step(env, 200)
        kill(env, 0)
        with pytest.raises(WorkerError, match=r"lane 0 .*200 steps.*collect.max_replay_steps=10"):
            env.step(np.zeros(1, int))


def test_an_error_in_the_replay_is_reported(tmp_path):
    def raises():
        raise ValueError("only here")

    env = WorkerVectorEnv(faulty(tmp_path, ("step", 9, is_killed), ("step", 3, raises)), LANES, 1, seed=3)
    with pytest.raises(
        WorkerError, match=r"(?s)env worker 0 \(lanes 0 to 3\): lane \d, step \d+ of .*: step raised ValueError: only here.*in raises"
    ):
        play(env, STEPS)
    env.close()


# ---- limits
def test_restarts_are_bounded():
    with WorkerVectorEnv(Counter, 2, 2, worker_restarts=2) as env:
        env.reset()
        for _ in range(2):
            kill(env, 1)
            with pytest.warns(WorkerRestartWarning):
                env.step(np.zeros(2, int))
        kill(env, 0)
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
    assert len(restarts_of(seen)) == 3


def test_old_restarts_are_forgotten_but_not_those_of_one_exchange(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    budget = RestartBudget(2)
    for _ in range(10):  # one every 400 s: never more than two in 600 s
        budget.spend("worker", "died", "", 0)
        now[0] += 400
    assert budget.left == 0  # counted when the last one was spent
    for attempt in range(2):  # an environment that hangs every time, 400 s long
        budget.spend("worker", "hung", "", attempt)
        now[0] += 400
    with pytest.raises(WorkerError, match="worker hung; not restarted: there were 2 restarts"):
        budget.spend("worker", "hung", "", 2)


def test_restarts_leave_nothing_behind(resources):
    """Descriptors and children stay what they were over many restarts, also where a socket gets another number."""
    lower = os.open(os.devnull, os.O_RDONLY)
    with WorkerVectorEnv(Counter, 2, 1, worker_restarts=100) as env:
        env.reset()
        os.close(lower)
        before = resources()
        for _ in range(3):
            kill(env, 0)
            with pytest.warns(WorkerRestartWarning):
                env.step(np.zeros(2, int))
            assert resources() == before
        assert len(env._engine._by_descriptor) == 1


def test_ctrl_c_during_a_rebuild_leaves_nothing_behind(tmp_path):
    env = WorkerVectorEnv(faulty(tmp_path, ("step", 9, is_killed), ("step", 3, sleeps)), LANES, 1, seed=3)

    def interrupt():
        while len(list(tmp_path.iterdir())) < 2:  # until the replacement sleeps in its replay
            time.sleep(0.01)
        os.kill(os.getpid(), 2)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        play(env, STEPS)
    thread.join()
    with pytest.raises(WorkerError, match="was interrupted"):
        env.reset()
    env.close()


def test_missing_shared_memory_is_a_clear_error(monkeypatch):
    with pytest.raises(WorkerError, match="Cannot allocate memory"):
        open_shared(1 << 50)

    monkeypatch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
    with pytest.raises(WorkerError, match=r"0.0 MB .*No space left.*; use fewer env.num_envs, or env.num_wo"):
        WorkerVectorEnv(Counter, 2, 1)


def test_shared_memory_without_memfd(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with WorkerVectorEnv(Counter, 2, 1) as env:
        env.reset()
        assert env.step(np.zeros(2, int)).observations[:, 1].tolist() == [1, 1]
