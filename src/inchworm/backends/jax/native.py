"""Step 1 of 9 in JAX: environments as pure functions, and all lanes of one moved together.

A JAX-native environment is an object with the attributes of `NativeEnv`: `reset` and `step` are pure, and never reset by themselves. Here
lanes begin new episodes where one ended, and the true last observation is kept. An episode is a function of its seed and actions: its key
is made from the seed, and a step's key from that and the number of the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import define_prng_impl

from inchworm.config.sections import EnvConfig
from inchworm.core.errors import ConfigError, EnvError
from inchworm.core.spaces import Space, build_tree, leaf, leaf_dtype, leaf_shape, map_tree, tree_leaves
from inchworm.core.types import Array, Tree
from inchworm.env.episodes import Ended, Replay
from inchworm.env.restore import Restore
from inchworm.env.step_arrays import StepRows, allocate_rows
from inchworm.env.vector_env import Engine, LaneVectorEnv

# JAX's own random numbers, bit for bit, written out so that a draw is one kernel.
#
# On a CPU, JAX computes Threefry (Salmon et al. 2011) as a loop over its rounds, of many kernels. Written one after another, the same
# rounds took a third of the time to compile, and of 8,192 numbers less than half of the time to run.

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def threefry(key: Array, high: Array, low: Array) -> tuple[Array, Array]:
    """Threefry-2x32 with 20 rounds: two words of any shape from a key [2] u32 and a counter of two words of that shape.

    The operations are those of `lax`: operators such as `+` are traced as functions of their own, which takes longer.
    """
    words = [lax.broadcast(word, low.shape) for word in (key[0], key[1], key[0] ^ key[1] ^ _PARITY)]
    high, low = lax.add(high, words[0]), lax.add(low, words[1])
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            high = lax.add(high, low)
            rotated = lax.shift_left(low, np.uint32(distance)), lax.shift_right_logical(low, np.uint32(32 - distance))
            low = lax.bitwise_xor(lax.bitwise_or(*rotated), high)
        high = lax.add(high, words[(group + 1) % 3])
        low = lax.add(lax.add(low, words[(group + 2) % 3]), np.uint32(group + 1))
    return high, low


def _count(key: Array, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Two words for each place of a shape of less than 2**32 places."""
    places = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
    return threefry(key, jnp.zeros_like(places), places)


def _random_bits(key: Array, width: int, shape: tuple[int, ...]) -> Array:
    high, low = _count(key, shape)
    if width == 64:
        return (high.astype(jnp.uint64) << np.uint64(32)) | low.astype(jnp.uint64)
    return (high ^ low).astype(f"uint{width}")


def _fold_in(key: Array, data: Any) -> Array:
    return jnp.stack(threefry(key, jnp.zeros_like(data), data))


def _seed(seed: Array) -> Array:
    return jnp.stack([jnp.zeros((), jnp.uint32), seed.astype(jnp.uint32)])


_IMPLEMENTATION = define_prng_impl(
    key_shape=(2,),
    seed=_seed,
    split=lambda key, shape: jnp.stack(_count(key, shape), -1),
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="threefry2x32_in_one_kernel",
    tag="fry1",
)


def typed_keys(words: Array) -> Array:
    """Keys for `jax.random` from their words [..., 2] u32."""
    keys: Array = jax.random.wrap_key_data(words, impl=_IMPLEMENTATION)
    return keys


# Environments and their lanes


class NativeEnv(Protocol):
    """An environment as pure functions of arrays, for one lane."""

    observation_space: Space
    action_space: Space
    max_episode_steps: int | None
    """Steps after which `step` truncates, at the latest; None if it may do so at any time."""

    def reset(self, key: Array) -> tuple[Tree, Tree]:
        """The first observation and state of an episode."""

    def step(self, key: Array, state: Tree, action: Tree) -> tuple[Tree, Tree, Array, Array, Array]:
        """Observation, state, reward, terminated and truncated after one step, without a reset."""


class Lanes(NamedTuple):
    """Where B lanes are between two steps; every leaf [B, …]."""

    observations: Tree
    """What to act on next."""
    state: Tree
    keys: Array
    """[B, 2] u32: the keys of the running episodes, that is, their seeds in two words."""
    lengths: Array
    """[B] i32: steps of the running episodes; -1 where one is over, and the next has not begun."""


class Outcome(NamedTuple):
    """What one step of B lanes showed."""

    rewards: Array
    """[B] f32"""
    terminated: Array
    """[B] bool"""
    truncated: Array
    """[B] bool; never true where `terminated` is."""
    observations: Tree
    """[B, *obs] the true successors, before any reset."""


def seed_words(seeds: np.ndarray) -> np.ndarray:
    """Seeds from 0 to 2**63 - 1 as keys, [n] -> [n, 2] u32."""
    wide = np.asarray(seeds, np.uint64)
    return np.stack([wide >> np.uint64(32), wide & np.uint64(0xFFFF_FFFF)], -1).astype(np.uint32)


def derive_seeds(run: Any, lanes: Any, episodes: Any) -> Any:
    """A 31-bit seed for each episode (run seed, lane, number), all u32, by the finaliser of MurmurHash3; for NumPy's arrays and JAX's."""
    mixed = run
    for counter in (lanes, episodes):
        mixed = mixed ^ (counter * np.uint32(0x9E3779B1))
        mixed = (mixed ^ (mixed >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        mixed = (mixed ^ (mixed >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        mixed = mixed ^ (mixed >> np.uint32(16))
    return mixed >> np.uint32(1)


@partial(jax.jit, static_argnums=0, inline=True)
def begin_lanes(env: NativeEnv, keys: Array) -> Lanes:
    """Begin an episode in every lane; `keys` is [B, 2] u32. Traced once for its shapes and for the programs that it is a part of."""
    observations, state = jax.vmap(env.reset)(typed_keys(keys))
    return Lanes(observations, state, keys, jnp.zeros(keys.shape[0], jnp.int32))


def step_lanes(env: NativeEnv, lanes: Lanes, actions: Tree) -> tuple[Lanes, Outcome]:
    """Move every lane by one step, without resets. An environment that ignores its key costs nothing for it."""
    lengths = lanes.lengths + 1
    keys = jax.vmap(jax.random.fold_in)(typed_keys(lanes.keys), lengths.astype(jnp.uint32))
    observations, state, rewards, terminated, truncated = jax.vmap(env.step)(keys, lanes.state, actions)
    return Lanes(observations, state, lanes.keys, lengths), Outcome(rewards, terminated, truncated, observations)


def replace_lanes(chosen: Array, fresh: Lanes, lanes: Lanes) -> Lanes:
    """The lanes, with those that are `chosen` [B] replaced by fresh ones."""

    def pick(new: Array, old: Array) -> Array:
        return jnp.where(chosen.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    replaced: Lanes = jax.tree.map(pick, fresh, lanes)
    return replaced


def read_space(space: Any) -> Space:
    """A Gymnasium space from one of the same form, such as gymnax's, which is recognised by its attributes."""
    if isinstance(space, gym.Space):
        return space
    choices: Any = getattr(space, "n", None)
    if choices is not None and not getattr(space, "shape", ()):  # navix has arrays of choices, too
        return gym.spaces.Discrete(int(choices))
    inner = getattr(space, "spaces", None)
    if isinstance(inner, Mapping):
        return gym.spaces.Dict({key: read_space(part) for key, part in inner.items()})
    if inner is not None:
        return gym.spaces.Tuple([read_space(part) for part in inner])
    bounds = [getattr(space, old, getattr(space, new, None)) for old, new in (("low", "minimum"), ("high", "maximum"))]
    if any(bound is None for bound in bounds):
        raise EnvError(f"{type(space).__name__} is not a space that a JAX-native environment can have; use Box, Discrete, Dict or Tuple")
    dtype = np.dtype(space.dtype)
    dtype = np.dtype(np.uint8) if dtype.kind == "b" else np.dtype(np.float32) if dtype.kind == "f" else dtype
    shape = tuple(space.shape)
    low, high = (np.broadcast_to(np.asarray(bound), shape) for bound in bounds)
    info = np.iinfo(dtype) if dtype.kind in "iu" else np.finfo(dtype)
    return gym.spaces.Box(np.clip(low, info.min, info.max).astype(dtype), np.clip(high, info.min, info.max).astype(dtype), dtype=dtype)


def fit_to_space(space: Space, observation: Tree) -> Tree:
    """An observation with the shapes and types of a space."""

    def fit(path: tuple[str | int, ...], own: Space) -> Array:
        return jnp.asarray(leaf(observation, path), device_dtype(own)).reshape(leaf_shape(own))

    return build_tree(space, fit)


def device_dtype(space: Space) -> Any:
    """The type in which JAX holds the values of a leaf: 32 bits where Gymnasium has 64, unless the process enables 64."""
    return jax.dtypes.canonicalize_dtype(leaf_dtype(space))


def refuse_settings(config: EnvConfig) -> None:
    """Reject settings that a JAX-native environment cannot honour: those that put Python around each copy."""
    why_not = why_not_native(config)
    if why_not is not None:
        raise ConfigError(f"{why_not}, and env.id={config.id!r} is stepped by JAX, all copies at once; leave it at its default")


def why_not_native(config: EnvConfig) -> str | None:
    """The setting because of which the copies of a config must be made one by one, as `env.frame_stack=4`; None if there is none."""
    asked = {
        "wrappers": [wrapper.name for wrapper in config.wrappers],
        "atari": config.atari,
        "frame_stack": config.frame_stack if config.frame_stack > 1 else None,
        "num_workers": config.num_workers if config.num_workers != "auto" else None,
    }
    return next((f"env.{name}={value}" for name, value in asked.items() if value), None)


def most_truncations(env: NativeEnv, num_steps: int) -> int:
    """The largest number of truncations of a lane in a rollout: any number if the environment has no known time limit."""
    limit = env.max_episode_steps
    return num_steps if limit is None else min(num_steps, math.ceil(num_steps / limit))


# A JAX-native environment behind the `VectorEnv` contract, for whatever steps from the host.
#
# Evaluation, `check-env` and the other backends use it. Training with the JAX backend takes the same lanes into a compiled scan instead.


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
