"""Environments for the tests of other libraries' vector envs: some can be restored, some cannot."""

import types

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode

from inchworm.core.seeding import restore_stream, stream_state


class CartPoles(CartPoleVectorEnv):
    """Gymnasium's vectorised CartPole, with resets that are asked for."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED, "render_modes": []}  # noqa: RUF012

    def reset(self, *, seed=None, options=None):
        mask = None if options is None else options.get("reset_mask")
        if mask is None:
            return super().reset(seed=seed)
        self.prev_done = mask.copy()
        self.state[:, mask] = self.np_random.uniform(self.low, self.high, size=(4, mask.sum()))
        self.steps[mask], self.prev_done = 0, np.zeros(self.num_envs, bool)
        return self.state.T.astype(np.float32), {}

    def step(self, action):
        self.prev_done[:] = False
        return super().step(action)


class Kept(gym.vector.VectorEnv):
    """A vector env with a simulator behind it, and get_state and set_state."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012
    single_observation_space = spaces.Box(-1e9, 1e9, (1,), np.float64)
    single_action_space = spaces.Discrete(3)
    num_envs = 2

    def __init__(self):
        self.simulator = types.SimpleNamespace(x=None, bonus=0)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        fresh = self.np_random.normal(size=(2, 1))
        self.simulator.x = fresh if options is None else np.where(options["reset_mask"][:, None], fresh, self.simulator.x)
        return self.simulator.x.copy(), {}

    def step(self, actions):
        simulator = self.simulator
        simulator.x, simulator.bonus = simulator.x + actions[:, None] + self.np_random.normal(size=(2, 1)), simulator.bonus + 1
        return simulator.x.copy(), np.full(2, float(simulator.bonus)), simulator.x[:, 0] > 6, np.zeros(2, bool), {}

    def get_state(self):
        return {"x": self.simulator.x, "bonus": self.simulator.bonus, "stream": stream_state(self.np_random)}

    def set_state(self, state):
        self.simulator.x, self.simulator.bonus = np.array(state["x"]), state["bonus"]
        self.np_random = restore_stream(state["stream"])


class Unsayable(Kept):
    def get_state(self):
        return {"simulator": self.simulator}


class Hybrid(gym.Env):
    """A world with a mask, a tuple of actions and random ends: the position is a sum of what was done and drawn."""

    observation_space = spaces.Dict({"x": spaces.Box(-1e9, 1e9, (2,), np.float64), "action_mask": spaces.Tuple([spaces.MultiBinary(3)])})
    action_space = spaces.Tuple([spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,), np.float32)])

    def observe(self):
        mask = np.ones(3, np.int8)
        mask[int(abs(self.x[0] * 10)) % 3] = 0
        self.mask = mask
        return {"x": self.x.copy(), "action_mask": (mask,)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = self.np_random.normal(size=2) + (options or {}).get("shift", 0.0)
        return self.observe(), {}

    def step(self, action):
        assert self.mask[action[0]], "an action that the mask forbids"
        self.x = self.x + action[1] * (1 + action[0]) + self.np_random.normal(size=2)
        return self.observe(), float(self.x.sum()), bool(self.np_random.random() < 0.08), False, {}


class Moody(gym.Env):
    """A world that draws from a stream that no seed governs, in the copies that are marked."""

    observation_space = spaces.Box(-9.0, 9.0, (1,), np.float64)
    action_space = spaces.Discrete(2)
    moods = np.random.default_rng(0)

    def __init__(self, moody, ends=False):
        self.moody, self.ends = moody, ends

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.x = 0, self.np_random.random(1)
        return self.x, {}

    def step(self, action):
        self.t += 1
        self.x = (self.x + action + (self.moods.random(1) if self.moody else 0.1)) % 1.0
        return self.x, 1.0, self.ends and self.t == 3, False, {}
