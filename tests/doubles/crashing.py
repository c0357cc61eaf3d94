"""An environment whose replays are exact only if everything is, faults that it has once at a given moment, and killed workers."""

import ctypes
import functools
import os
import signal
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from doubles.stepping import frozen, random_actions
from inchworm.core.spaces import MASK_KEY
from inchworm.env.values import random_mask
from inchworm.worlds.toys import DEATHS, JOINS, Comings


class World(gym.Env):
    """Several leaves, masks, options, rewards and lengths, all depending on the whole history: seed, options and every action."""

    def __init__(self, shortest=3, longest=12):
        self.observation_space = spaces.Dict(
            place=spaces.Box(-np.inf, np.inf, (2,), np.float64), image=spaces.Box(0, 255, (3, 3), np.uint8)
        )
        self.action_space = spaces.Dict(go=spaces.Discrete(4), push=spaces.Box(-1, 1, (2,), np.float32))
        self.shortest, self.longest = shortest, longest

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.normal(size=2) + (options or {}).get("bonus", 0)
        self.left = int(self.np_random.integers(self.shortest, self.longest))
        return self._observe()

    def _observe(self):
        image = self.np_random.integers(0, 256, (3, 3)).astype(np.uint8)
        return {"place": self.place.copy(), "image": image}, {MASK_KEY: random_mask(self.action_space, self.np_random)}

    def step(self, action):
        self.place = self.place * 0.9 + action["push"] + int(action["go"]) * self.np_random.normal()
        self.left -= 1
        observation, info = self._observe()
        cut = self.left == 0 and bool(self.np_random.integers(2))
        info["left"] = self.left
        return observation, float(self.place.sum()), self.left == 0 and not cut, cut, info


class FickleTeam(Comings):
    """Its agents leave and join by another plan once the file `marker` exists; nothing else in its steps differs."""

    def __init__(self, marker):
        super().__init__(JOINS if marker.exists() else DEATHS)
        marker.touch()

    def _observations(self, agents):
        return {agent: np.zeros(3, np.float32) for agent in agents}

    def step(self, actions):
        observations, rewards, *rest = super().step(dict.fromkeys(self.agents, 0))
        return observations, dict.fromkeys(rewards, 0.0), *rest


class Faulty(gym.Wrapper):
    """Has each of some faults once, in the first process that gets there: (moment, how often that moment came before, fault).

    The moments are init, reset, step (before the environment steps) and stepped (after it has, before the result is returned).
    """

    def __init__(self, env, directory, faults):
        super().__init__(env)
        self.directory, self.faults, self.counts = Path(directory), faults, {}
        self.reach("init")

    def reach(self, moment):
        count = self.counts[moment] = self.counts.get(moment, -1) + 1
        done = len(list(self.directory.iterdir()))
        if done < len(self.faults) and self.faults[done][:2] == (moment, count):
            try:
                (self.directory / str(done)).touch(exist_ok=False)
            except FileExistsError:  # another process was faster
                return
            self.faults[done][2]()

    def reset(self, **kwargs):
        self.reach("reset")
        return super().reset(**kwargs)

    def step(self, action):
        self.reach("step")
        result = super().step(action)
        self.reach("stepped")
        return result


class Steered(gym.Wrapper):
    """A `World` whose steps take as many seconds as a file says, or raise an error where it says `raise`."""

    def __init__(self, path):
        super().__init__(World())
        self.path = path

    def step(self, action):
        text = self.path.read_text()
        if text == "raise":
            raise ValueError("no more fuel")
        time.sleep(float(text))
        return super().step(action)


def faulty(directory, *faults, **lengths):
    """A factory of `World`s with faults."""
    return lambda: Faulty(World(**lengths), directory, faults)


is_killed = functools.partial(signal.raise_signal, signal.SIGKILL)
exits = functools.partial(os._exit, 3)
raises_system_exit = functools.partial(sys.exit, "enough")
segfaults = functools.partial(ctypes.string_at, 0)
sleeps = functools.partial(time.sleep, 600)


def runs_out_of_memory():
    raise MemoryError("no more")


def ignores_sigterm():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        sum(range(1000))


def play(env, steps, disturb=lambda env, moment, number: None):
    """Take random legal steps with options and single resets in between; return all steps. `disturb` is called at each moment."""
    rng = np.random.default_rng(5)
    disturb(env, "new", 0)
    taken = [frozen(env.reset())]
    for number in range(steps):
        if number % 7 == 3:
            disturb(env, "options", number)
            env.set_reset_options({"bonus": number}, indices=[number % env.num_envs])
            taken.append(frozen(env.reset(indices=())) if number % 2 else taken[-1])
        if number % 11 == 5:
            disturb(env, "reset", number)
            taken.append(frozen(env.reset(indices=[number % env.num_envs])))
        actions = random_actions(env, taken[-1], rng)
        disturb(env, "idle", number)
        env.send(actions)
        disturb(env, "sent", number)
        taken.append(frozen(env.recv()))
    return taken


def workers(env):
    """The worker processes of a vector env."""
    return env._engine._workers


def kill(env, index, wait=True):
    """Kill a worker; by default it is dead when this returns."""
    victim = workers(env)[index].process
    victim.kill()
    if wait:
        victim.wait()
