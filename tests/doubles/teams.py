"""A small world of two teams for the tests of opponents: everything that it does can be computed in the head."""

from collections.abc import Sequence

import numpy as np
from gymnasium import spaces

from inchworm.config.sections import PolicyConfig
from inchworm.core.spaces import MASK_KEY
from inchworm.core.types import EndedEpisode, EnvStep, PolicyStep
from inchworm.policy.spec import PolicySpec

LENGTH = 5
"""An episode of seed s takes LENGTH + s % 3 steps."""


class Teams:
    """`num_envs` copies of `lanes` agents. A lane's reward is its action; the half with the greater sum of actions wins.

    It sees (copy, agent, step of the episode) and may not choose action 4. Agent 1 of copy 0 is dead from step 2 on.
    """

    observation_space = spaces.Dict({"seen": spaces.Box(-1e6, 1e6, (3,), np.float32), MASK_KEY: spaces.MultiBinary(5)})
    action_space = spaces.Discrete(5)
    exact = True

    def __init__(self, num_envs=4, lanes=4, seed=0, shares_state=False):
        self.global_state_space = spaces.Box(0, 1e6, (1,), np.float32) if shares_state else None
        self.num_envs, self.lanes_per_copy, self.num_lanes, self.seed = num_envs, lanes, num_envs * lanes, seed
        self.seeds, self.episodes = np.full(num_envs, -1), np.zeros(num_envs, np.int64)
        self.steps, self.totals = np.zeros(num_envs, np.int64), np.zeros((num_envs, lanes))
        self.got, self.options, self.closed, self.calls = None, {}, 0, 0

    def reset(self, seeds: Sequence[int] | None = None, indices=None):
        copies = list(range(self.num_envs)) if indices is None else list(indices)
        for place, copy in enumerate(copies):
            self._begin(copy, None if seeds is None else seeds[place])
        return self._show(np.zeros(self.num_lanes, np.float32), np.zeros(self.num_envs, bool), ())

    def _begin(self, copy, seed=None):
        self.seeds[copy] = 100 * self.seed + 10 * copy + self.episodes[copy] if seed is None else seed
        self.episodes[copy] += 1
        self.steps[copy], self.totals[copy] = 0, 0.0

    def _seen(self):
        rows = np.zeros((self.num_envs, self.lanes_per_copy, 3), np.float32)
        rows[..., 0] = np.arange(self.num_envs)[:, None]
        rows[..., 1] = np.arange(self.lanes_per_copy)
        rows[..., 2] = self.steps[:, None]
        return rows.reshape(self.num_lanes, 3)

    def _show(self, rewards, done, ended):
        mask = np.ones((self.num_lanes, 5), np.int8)
        mask[:, 4] = 0
        valid = np.ones(self.num_lanes, bool)
        valid[1] = self.steps[0] < 2
        flags = np.repeat(done, self.lanes_per_copy)
        starts = np.repeat(self.steps == 0, self.lanes_per_copy)
        seen = {"seen": self._seen(), MASK_KEY: mask}
        return EnvStep(seen, rewards, flags, np.zeros_like(flags), starts, valid, ended, self.steps[:, None].astype(np.float32))

    def send(self, actions):
        self.got = np.array(actions)
        self.calls += 1

    def recv(self):
        rewards = self.got.astype(np.float32)
        self.totals += rewards.reshape(self.totals.shape)
        self.steps += 1
        done = self.steps >= LENGTH + self.seeds % 3
        final = self._seen()
        ended = []
        for copy in np.flatnonzero(done):
            halves = self.totals[copy].reshape(2, -1).sum(-1)
            for agent in range(self.lanes_per_copy):
                side = agent // (self.lanes_per_copy // 2)
                win = 0.5 if halves[0] == halves[1] else float(halves[side] > halves[1 - side])
                lane = copy * self.lanes_per_copy + agent
                info = {"win": win, "team_return": float(self.totals[copy].sum())}
                last = {"seen": final[lane], MASK_KEY: np.ones(5, np.int8)}
                ended.append(EndedEpisode(int(lane), int(self.seeds[copy]), last, info, np.array([copy], np.float32)))
            self._begin(copy)
        return self._show(rewards, done, tuple(ended))

    def step(self, actions):
        self.send(actions)
        return self.recv()

    def set_reset_options(self, options, indices=None):
        self.options = {"options": options, "indices": indices}

    def state_dict(self):
        return {name: np.array(getattr(self, name)) for name in ("seeds", "episodes", "steps", "totals")}

    def load_state_dict(self, state):
        for name, value in state.items():
            setattr(self, name, np.array(value))

    def close(self):
        self.closed += 1


class Always:
    """Does the same each step and has no memory."""

    def __init__(self, action):
        self.action, self.calls, self.lanes = action, 0, []

    def initial_state(self, num_lanes):
        return ()

    def act(self, observations, state, episode_starts, rng, *, deterministic=False):
        self.calls += 1
        self.lanes.append(observations["seen"][:, :2].astype(int).tolist())
        actions = np.full(len(episode_starts), self.action)
        return PolicyStep(actions, actions, np.zeros(len(actions), np.float32), state)


class Counter:
    """Plays its count of steps in the episode, plus noise of 0 or 1, modulo 4: memory and stream both show in what it does."""

    def initial_state(self, num_lanes):
        return {"count": np.zeros((num_lanes, 1), np.int64)}

    def act(self, observations, state, episode_starts, rng, *, deterministic=False):
        count = np.where(episode_starts[:, None], 0, state["count"]) + 1
        noise = 0 if deterministic else rng.integers(2, size=len(count))
        actions = (count[:, 0] + noise) % 4
        return PolicyStep(actions, actions, np.zeros(len(actions), np.float32), {"count": count})


SPEC = PolicySpec(Teams.observation_space, Teams.action_space, PolicyConfig(hidden_sizes=(4,)))
"""A small network for this world."""
