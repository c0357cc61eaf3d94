"""Step 3 of 9: act, step, write the row. Brings back rollouts; never learns, never asks the critic."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import optree

from inchworm.errors import BadNumberError, ConfigError
from inchworm.policy.weights import fingerprint
from inchworm.protocols import Actor, Policy, VectorEnv
from inchworm.rollout.buffer import RolloutBuffer
from inchworm.rollout.rollout import Rollout
from inchworm.seeding import make_stream, restore_stream, stream_state
from inchworm.spaces import leaf, leaf_dtype, leaves, path_name
from inchworm.types import EndedEpisode, EnvStep, EpisodeRecord, PolicyStep, Tree

RECENT_EPISODES = 100
"""How many last episodes are kept for running means."""


class RolloutCollector:
    """Collects rollouts from a vector env with any `Actor`. Episodes go on from one call to the next.

    It owns the current observation, the memory, and one sampling stream derived from `seed`. `sequence_length` is how often a
    policy's memory is recorded, which is where sequences may begin.
    """

    def __init__(self, vector_env: VectorEnv, policy: Actor, *, seed: int = 0, sequence_length: int = 1) -> None:
        self.vector_env = vector_env
        self.policy = policy
        self.env_steps = 0
        self.episodes = 0
        self.recent: deque[EpisodeRecord] = deque(maxlen=RECENT_EPISODES)
        self._sequence_length = sequence_length
        self._stream = make_stream(seed, "sampling")
        self._float_paths = [path for path, space in leaves(vector_env.observation_space) if leaf_dtype(space).kind == "f"]
        self._returns = np.zeros(vector_env.num_lanes, np.float64)
        self._lengths = np.zeros(vector_env.num_lanes, np.int64)
        self._state = policy.initial_state(vector_env.num_lanes)
        self._version, self._fingerprint = 0, 0
        if isinstance(policy, Policy):
            self._version, self._fingerprint = policy.policy_version, fingerprint(policy.get_weights())
        self._now: EnvStep | None = None
        self._observations: Tree = ()

    def collect(self, num_steps: int) -> Rollout:
        """The next `num_steps` steps of every lane."""
        if num_steps < 1:
            raise ConfigError(f"collect needs 1 step or more, not {num_steps}")
        try:
            return self._collect(num_steps)
        except BaseException:  # after half a step nobody knows where the lanes stand: the next call begins new episodes
            self._forget()
            raise

    def _collect(self, num_steps: int) -> Rollout:
        if self._now is None:
            self._see(self.vector_env.reset(), moved=0)
        self._know_weights()
        env, buffer = self.vector_env, self._make_buffer(num_steps)
        episodes: list[EpisodeRecord] = []
        for _ in range(num_steps):
            before = self._now
            assert before is not None
            # Copies: the env overwrites its own arrays in the step.
            episode_starts, valid = np.array(before.episode_starts), np.array(before.valid)
            global_state = optree.tree_map(np.array, before.global_state)
            step = self.policy.act(self._observations, self._state, episode_starts, self._stream)
            after = env.step(step.env_actions)
            self._check(after, moved=1)
            buffer.add(
                observations=self._observations,
                actions=step.actions,
                log_probs=step.log_probs,
                rewards=after.rewards,
                terminated=after.terminated,
                truncated=after.truncated,
                episode_starts=episode_starts,
                valid=valid,
                state=self._state,
                global_state=global_state,
            )
            self._count(after, valid)
            for ended in after.ended:
                buffer.add_cut(ended.lane, ended.final_observation, _lane(step, ended.lane))
                episodes.append(self._finish(ended))
            self._state = step.state
            self._keep(after)
        return buffer.get(
            last_observations=self._observations,
            last_state=self._state,
            policy_version=self._version,
            weights_fingerprint=self._fingerprint,
            episodes=episodes,
        )

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Act with these weights from the next `collect` on."""
        if not isinstance(self.policy, Policy):
            raise ConfigError(f"{type(self.policy).__name__} is an actor without weights; it cannot be given any")
        self.policy.set_weights(weights)
        self._version, self._fingerprint = self.policy.policy_version, fingerprint(weights)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next `collect` depends on besides the weights."""
        return {
            "stream": stream_state(self._stream),
            "returns": self._returns.copy(),
            "lengths": self._lengths.copy(),
            "env_steps": self.env_steps,
            "episodes": self.episodes,
            "recent": [[e.episode_return, e.length, e.lane, e.seed, dict(e.info)] for e in self.recent],
            "policy_state": optree.tree_map(np.array, self._state),
            "started": self._now is not None,
            "vector_env": self.vector_env.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` described: the environments are brought back by replay."""
        self._stream = restore_stream(state["stream"])
        self._returns, self._lengths = np.array(state["returns"]), np.array(state["lengths"])
        self.env_steps, self.episodes = int(state["env_steps"]), int(state["episodes"])
        self.recent = deque((EpisodeRecord(*entry) for entry in state["recent"]), maxlen=RECENT_EPISODES)
        self._state = state["policy_state"]
        self._now = None
        self.vector_env.load_state_dict(state["vector_env"])
        if state["started"]:
            now = self.vector_env.reset(indices=())
            self._see(now, moved=0)
            self._returns[now.episode_starts] = self._lengths[now.episode_starts] = 0  # copies that replay did not bring back

    def close(self) -> None:
        """Close the environments."""
        self.vector_env.close()

    def _make_buffer(self, num_steps: int) -> RolloutBuffer:
        env = self.vector_env
        assert self._now is not None
        return RolloutBuffer.create(
            num_steps,
            env.num_lanes,
            env.observation_space,
            env.action_space,
            state=self._state,
            state_every=self._sequence_length,
            global_state=self._now.global_state,
        )

    def _know_weights(self) -> None:
        """A policy that acts and learns in one object has moved without `set_weights`: look at it again."""
        if isinstance(self.policy, Policy) and self.policy.policy_version != self._version:
            self._version, self._fingerprint = self.policy.policy_version, fingerprint(self.policy.get_weights())

    def _forget(self) -> None:
        """Know nothing of any running episode."""
        self._now, self._observations = None, ()
        self._returns[:], self._lengths[:] = 0, 0
        self._state = self.policy.initial_state(self.vector_env.num_lanes)

    def _see(self, step: EnvStep, *, moved: int) -> None:
        self._check(step, moved=moved)
        self._keep(step)

    def _keep(self, step: EnvStep) -> None:
        """What to act on next; a copy, because the env overwrites its own."""
        self._now = step
        self._observations = optree.tree_map(np.array, step.observations)

    def _check(self, step: EnvStep, *, moved: int) -> None:
        """Make sure that every number of a step is finite, before any of it is kept; `moved` is 1 after a step, 0 after a reset."""
        if not np.isfinite(step.rewards).all():
            lane = _first_bad(step.rewards)
            raise _bad_number("reward", lane, int(self._lengths[lane]) + moved, step.rewards[lane])
        for path in self._float_paths:
            for ended in step.ended:
                values = leaf(ended.final_observation, path)
                if not np.isfinite(values).all():
                    raise _bad_number(f"final observation {path_name(path)!r}", ended.lane, int(self._lengths[ended.lane]) + moved, values)
            values = leaf(step.observations, path)
            if not np.isfinite(values).all():
                lane = _first_bad(values)
                number = 0 if step.episode_starts[lane] else int(self._lengths[lane]) + moved
                raise _bad_number(f"observation {path_name(path)!r}", lane, number, values[lane])

    def _count(self, step: EnvStep, valid: np.ndarray) -> None:
        self._returns += step.rewards
        self._lengths += valid
        self.env_steps += int(np.count_nonzero(valid))

    def _finish(self, ended: EndedEpisode) -> EpisodeRecord:
        lane = ended.lane
        record = EpisodeRecord(float(self._returns[lane]), int(self._lengths[lane]), lane, ended.seed, dict(ended.info))
        self._returns[lane] = self._lengths[lane] = 0
        self.episodes += 1
        self.recent.append(record)
        return record


def _first_bad(values: np.ndarray) -> int:
    """The first lane of [B, …] with a number that is not finite."""
    return int(np.argwhere(~np.isfinite(values))[0, 0])


def _lane(step: PolicyStep, lane: int) -> Tree:
    """A lane's memory after it has read its observation."""
    return optree.tree_map(lambda array: array[lane], step.state)


def _bad_number(what: str, lane: int, step: int, value: Any) -> BadNumberError:
    return BadNumberError(
        f"the {what} of lane {lane} is not finite at step {step} of its episode: {np.array2string(np.asarray(value), threshold=20)}; "
        "nothing of this step was stored. Run `inchworm check-env` on the environment to find out why"
    )
