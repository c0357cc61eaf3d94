"""Step 1 of 9, by somebody else's vector env: Gymnasium's and EnvPool's, as the batched worlds that `batched.py` steps."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from inchworm.config import EnvConfig
from inchworm.env.batched import BatchedVectorEnv
from inchworm.env.lockstep import LockstepVectorEnv
from inchworm.env.memory import map_tree
from inchworm.env.vector_state import VectorState, crossing_wrappers
from inchworm.env.worlds import Moved
from inchworm.errors import EnvError, MissingExtraError
from inchworm.protocols import VectorEnv
from inchworm.seeding import derive_seed
from inchworm.types import Tree

GymVectorEnv = gym.vector.VectorEnv[Any, Any, Any]

ENVPOOL = "envpool:"
"""What an id begins with if EnvPool makes the world: `envpool:Pong-v5`."""


class GymnasiumVectorWorld:
    """A `gymnasium.vector.VectorEnv` whose copies can be reset one by one, that is, with `AutoresetMode.DISABLED`."""

    def __init__(self, env: GymVectorEnv, seed: int) -> None:
        mode = env.metadata.get("autoreset_mode")
        if mode != AutoresetMode.DISABLED:
            raise EnvError(
                f"a {type(env).__name__} with {mode} loses the end of episodes or resets one step late; make it with "
                'gymnasium.make_vec(…, vectorization_mode="sync", vector_kwargs={"autoreset_mode": "Disabled"}), '
                "or give its id, of which copies are made here"
            )
        self._env, self._seed, self._actions = env, seed, None
        self.observation_space, self.action_space = env.single_observation_space, env.single_action_space
        self.num_lanes = env.num_envs
        self.inexact = crossing_wrappers(env)
        self._is_new = True

    def begin(self, lanes: Sequence[int], seeds: Sequence[int] | None, options: Mapping[str, Any] | None) -> Tree:
        """Begin episodes in some lanes: their first observations [len(lanes), *obs]."""
        seed: Any = None
        if seeds is not None:
            seed = [None] * self.num_lanes
            for lane, own in zip(lanes, seeds):
                seed[lane] = own
        elif self._is_new:  # one stream for all lanes: seeded once
            seed = derive_seed(self._seed, "vector env")
        given: dict[str, Any] = dict(options or {})
        if len(lanes) < self.num_lanes:
            if self._is_new:  # some cannot begin before all have begun once
                self._env.reset(seed=seed if seeds is None else None)
            given["reset_mask"] = np.isin(np.arange(self.num_lanes), lanes)
        self._is_new = False
        observations, _ = self._env.reset(seed=seed, options=given or None)
        return map_tree(lambda array: array[list(lanes)], observations)

    def start(self, actions: Tree) -> None:
        """Keep the actions: `finish` takes the step."""
        self._actions = actions

    def finish(self) -> Moved:
        """One step of all lanes."""
        return Moved(*self._env.step(self._actions))

    def close(self) -> None:
        """Close the vector env."""
        self._env.close()


class StreamedWorld(GymnasiumVectorWorld):
    """A vector env that steps all lanes as arrays and draws from one stream: its whole state is saved."""

    def __init__(self, env: GymVectorEnv, seed: int) -> None:
        super().__init__(env, seed)
        self._state = VectorState(env)
        self.inexact = self._state.flaws

    def state(self, observations: Tree) -> dict[str, Any]:
        """Where it stands, and a glimpse of what comes next."""
        saved = self._state.read()
        return {"parts": saved, "glimpse": self._state.glimpse(observations, saved)}

    def restore(self, state: Mapping[str, Any], observations: Tree) -> str | None:
        """Bring it there; why it is not there, or None if what comes next is what came next."""
        self._is_new = False
        try:
            self._state.warm_up()
            self._state.write(state["parts"])
            seen = self._state.glimpse(observations, state["parts"])
        except (EnvError, KeyError, ValueError, TypeError, AttributeError) as error:
            return str(error)
        return None if seen == state["glimpse"] else "brought to its saved state, the world went on in another way"


class EnvPoolWorld:
    """An EnvPool with Gymnasium's interface. Its episodes have no seeds of their own: every lane has a stream of them."""

    def __init__(self, pool: Any) -> None:
        if pool.config["batch_size"] != pool.config["num_envs"] or pool.config["max_num_players"] != 1:
            raise EnvError("an EnvPool must step all lanes at once (batch_size = num_envs) and have one player; make it so")
        self._pool = pool
        self.observation_space, self.action_space = pool.single_observation_space, pool.single_action_space
        self.num_lanes = int(pool.config["num_envs"])
        self._everyone = np.arange(self.num_lanes, dtype=np.int32)
        self.inexact = ["EnvPool can neither save where its episodes stand nor give one a seed: a resumed run begins fresh episodes"]

    def begin(self, lanes: Sequence[int], seeds: Sequence[int] | None, options: Mapping[str, Any] | None) -> Tree:  # noqa: ARG002
        """Begin episodes in some lanes, each the next of its lane's stream: their first observations [len(lanes), *obs]."""
        if options:
            raise EnvError("EnvPool takes no reset options")
        observations, info = self._pool.reset(np.array(lanes, np.int32))
        order = _places(info["env_id"], lanes)
        return map_tree(lambda array: array[order], observations)

    def start(self, actions: Tree) -> None:
        """Begin a step: EnvPool's threads take it from here."""
        self._pool.send(actions, self._everyone)

    def finish(self) -> Moved:
        """Wait for it."""
        observations, rewards, terminated, truncated, info = self._pool.recv()
        order = _places(info["env_id"], self._everyone)
        numbers = {key: value[order] for key, value in info.items() if isinstance(value, np.ndarray) and key != "env_id"}
        return Moved(map_tree(lambda array: array[order], observations), rewards[order], terminated[order], truncated[order], numbers)

    def close(self) -> None:
        """Let EnvPool's threads go."""
        self._pool.close()


def _places(found: np.ndarray, wanted: Sequence[int] | np.ndarray) -> np.ndarray:
    """Where each of the wanted lanes stands among those found."""
    place = {int(lane): index for index, lane in enumerate(found)}
    return np.array([place[int(lane)] for lane in wanted])


def adapt_vector_env(env: GymVectorEnv, *, seed: int = 0, first_copy: int = 0, max_replay_steps: int = 100_000) -> VectorEnv:
    """A `gymnasium.vector.VectorEnv` or an EnvPool, with the `VectorEnv` contract."""
    if any(base.__module__.startswith("envpool.") for base in type(env).__mro__):
        return BatchedVectorEnv(EnvPoolWorld(env), seed=seed, first_copy=first_copy)
    if isinstance(env.unwrapped, SyncVectorEnv | AsyncVectorEnv):  # environments side by side, each with seeds of its own
        world = GymnasiumVectorWorld(env, seed)
        return LockstepVectorEnv(world, seed=seed, first_copy=first_copy, max_replay_steps=max_replay_steps)
    return BatchedVectorEnv(StreamedWorld(env, seed), seed=seed, first_copy=first_copy)


def make_envpool(config: EnvConfig, *, seed: int = 0, first_copy: int = 0) -> BatchedVectorEnv:
    """EnvPool's copies of `envpool:Name`; `env.num_workers` is its number of threads. A lane's stream is the same in any layout."""
    if config.wrappers or config.atari or config.frame_stack > 1:
        raise EnvError(
            f"env.id={config.id!r}: wrappers, atari and frame_stack are EnvPool's own business; use env.kwargs, such as stack_num"
        )
    try:
        envpool = importlib.import_module("envpool")
    except ImportError as error:
        raise MissingExtraError(f'{config.id} needs EnvPool; type: pip install "inchworm[envpool]"') from error
    limit = {} if config.max_episode_steps is None else {"max_episode_steps": config.max_episode_steps}
    pool = envpool.make(
        config.id.removeprefix(ENVPOOL),
        env_type="gymnasium",
        num_envs=config.num_envs,
        num_threads=0 if config.num_workers == "auto" else config.num_workers,
        env_seed=[derive_seed(seed, "envpool", first_copy + lane) for lane in range(config.num_envs)],
        **limit,
        **config.kwargs,
    )
    return BatchedVectorEnv(EnvPoolWorld(pool), seed=seed, first_copy=first_copy)
