"""Step 2 of 9 in JAX: a JAX-native environment behind the `VectorEnv` contract, for whatever steps from the host.

Evaluation, `check-env` and the other backends use it. Training with the JAX backend takes the same lanes into a compiled scan instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inchworm.backends.jax.adapters import is_of_package, make_of_package
from inchworm.backends.jax.native import Lanes, NativeEnv, begin_lanes, refuse_settings, replace_lanes, seed_words, step_lanes
from inchworm.backends.jax.worlds import make_world
from inchworm.config.sections import EnvConfig
from inchworm.core.errors import EnvError
from inchworm.core.spaces import map_tree, tree_leaves
from inchworm.core.types import Array, Tree
from inchworm.env.episodes import Ended, Replay
from inchworm.env.restore import Restore
from inchworm.env.step_arrays import StepRows, allocate_rows
from inchworm.env.vector_env import Engine, LaneVectorEnv


class JaxEngine(Engine):
    """Moves all lanes of a JAX-native environment by one compiled call; those whose episode ended begin the next in the same call."""

    start = None  # `finish` takes the step
    lanes_per_copy = 1

    def __init__(self, env: NativeEnv, num_lanes: int) -> None:
        self.native = env
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.rows: StepRows = allocate_rows(self.observation_space, self.action_space, num_lanes, num_lanes)[0]
        self._lanes: Lanes | None = None

        def begin(lanes: Lanes, chosen: Array, keys: Array) -> Lanes:
            return replace_lanes(chosen, begin_lanes(env, keys), lanes)

        def advance(lanes: Lanes, actions: Tree, keys: Array) -> tuple[Lanes, Any]:
            moved, outcome = step_lanes(env, lanes, actions)
            ended = outcome.terminated | outcome.truncated
            following = jax.lax.cond(ended.any(), lambda: begin(moved, ended, keys), lambda: moved)
            return following, outcome

        self._begin_all = jax.jit(lambda keys: begin_lanes(env, keys))
        self._begin, self._advance = jax.jit(begin), jax.jit(advance)

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin episodes in some lanes."""
        chosen, keys = self._chosen(indices, seeds)
        if self._lanes is None:
            self._lanes = self._begin_all(keys)
        else:
            self._lanes = self._begin(self._lanes, chosen, keys)
        self._show(self._lanes.observations, self.rows.observations)

    def _chosen(self, indices: Sequence[int], seeds: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The lanes as flags [B], and keys [B, 2] with those of the seeds in their places."""
        chosen, own = np.zeros(len(self.rows.rewards), np.bool_), np.zeros(len(self.rows.rewards), np.uint64)
        chosen[list(indices)] = True
        own[list(indices)] = list(seeds)
        return chosen, seed_words(own)

    def _show(self, values: Tree, rows: Tree) -> None:
        for value, row in zip(tree_leaves(values), tree_leaves(rows)):
            row[...] = value

    def finish(self) -> list[Ended]:
        """Step all lanes."""
        rows = self.rows
        lanes, outcome = self._advance(self._lanes, _device_actions(rows.actions), seed_words(rows.next_seeds))
        self._lanes = lanes
        self._show(lanes.observations, rows.observations)
        rows.rewards[:], rows.terminated[:], rows.truncated[:] = outcome.rewards, outcome.terminated, outcome.truncated
        over = (rows.terminated | rows.truncated).nonzero()[0].tolist()
        if over:
            self._show(outcome.observations, rows.final_observations)
        return [(lane, {}) for lane in over]

    def set_options(self, indices: Sequence[int], options: Sequence[Any]) -> None:
        """Accept no reset options: a JAX-native environment is reset by its key alone."""
        del indices
        if any(options):
            raise EnvError(f"a JAX-native environment takes no reset options; got {next(filter(None, options))}; put them into env.kwargs")

    def replay(self, jobs: Sequence[Replay]) -> list[tuple[float, int]]:
        """Replay episodes in their lanes, one after another, each in a scratch copy of all lanes."""
        results, count = [], len(self.rows.rewards)
        for job in jobs:
            _, keys = self._chosen(range(count), [job.seed] * count)
            scratch, total, taken = self._begin_all(keys), 0.0, 0
            for index in range(len(tree_leaves(job.actions)[0])):
                actions = map_tree(partial(_repeat_row, index, count), job.actions)
                scratch, outcome = self._advance(scratch, _device_actions(actions), keys)
                if outcome.terminated[job.copy] | outcome.truncated[job.copy]:
                    break
                total, taken = total + float(outcome.rewards[job.copy]), taken + 1
            chosen, _ = self._chosen([job.copy], [0])
            self._lanes = scratch if self._lanes is None else jax.jit(replace_lanes)(chosen, scratch, self._lanes)
            results.append((total, taken))
        if self._lanes is not None:
            self._show(self._lanes.observations, self.rows.observations)
        return results

    def get_states(self) -> list[dict[str, Any]]:
        """The arrays of every lane: its environment's state, key and length."""
        if self._lanes is None:
            return []
        parts = [np.asarray(part) for part in jax.tree.leaves(self._lanes)]
        return [{"state": {f"part{index}": part[lane] for index, part in enumerate(parts)}} for lane in range(len(self.rows.rewards))]

    def set_states(self, jobs: Sequence[Restore]) -> None:
        """Restore the arrays of some lanes."""
        everyone = range(len(self.rows.rewards))
        if self._lanes is None:
            self._lanes = self._begin_all(self._chosen(everyone, [0] * len(everyone))[1])
        parts, form = jax.tree.flatten(self._lanes)
        arrays = [np.array(part) for part in parts]
        for job in jobs:
            for index, array in enumerate(arrays):
                array[job.copy] = job.state[f"part{index}"]
        self._lanes = jax.tree.unflatten(form, [jnp.asarray(array) for array in arrays])

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


def _repeat_row(index: int, count: int, rows: np.ndarray) -> np.ndarray:
    return np.repeat(rows[index : index + 1], count, 0)


def _device_actions(actions: Tree) -> Tree:
    """Actions as JAX takes them; Gymnasium's whole numbers have 64 bits."""
    return map_tree(lambda part: part.astype(np.int32) if part.dtype.kind in "iu" else np.asarray(part), actions)


class JaxVectorEnv(LaneVectorEnv):
    """All lanes of a JAX-native environment, stepped from the host. `native` is the environment itself."""

    needs_trial = False  # an episode is a pure function of its seed and actions

    def __init__(self, env: NativeEnv, num_envs: int, **options: Any) -> None:
        self.native, self.seed, self.first_copy = env, int(options.get("seed", 0)), int(options.get("first_copy", 0))
        super().__init__(JaxEngine(env, num_envs), **options)


_made: dict[tuple[Any, ...], NativeEnv] = {}


def make_native(config: EnvConfig) -> NativeEnv:
    """The JAX-native environment of a config: a package's, or the world with the dynamics of Gymnasium's.

    It has no state, so equal configs get the same object, for which programs are compiled once per process.
    """
    refuse_settings(config)
    key = (config.id, config.max_episode_steps, repr(config.kwargs))
    if key not in _made:
        made = make_of_package(config) if is_of_package(config.id) else make_world(config)
        if made is None:
            raise EnvError(f"there is no JAX-native world for env.id={config.id!r}")
        _made[key] = made
    return _made[key]


def make_jax_env(config: EnvConfig, *, global_state: bool = False, keep_infos: Sequence[str] = (), **options: Any) -> JaxVectorEnv:
    """All copies of a config as one vector env."""
    if global_state:
        raise EnvError(f"env.id={config.id!r}: a JAX-native environment has no global state for a central critic")
    if keep_infos:
        raise EnvError(f"env.id={config.id!r}: a JAX-native environment has no infos to keep; leave collect.keep_infos out")
    return JaxVectorEnv(make_native(config), config.num_envs, **options)
