"""Step 2 of 9, over other libraries: gymnasium.vector and EnvPool behind the `VectorEnv` contract (`sb3.py`: Stable-Baselines3).

They step all copies in one call. Here resets happen in the step in which an episode ended, with the true final observation kept.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from inchworm.config.sections import EnvConfig
from inchworm.core.errors import EnvError, env_errors
from inchworm.core.seeding import derive_seed
from inchworm.core.spaces import Space, map_tree, tree_leaves, zeros
from inchworm.core.types import Array, Tree
from inchworm.env.episodes import Ended, Replay
from inchworm.env.registry import ENVPOOL
from inchworm.env.restore import REFUSED_WRAPPERS, Restore, StateKeeper, env_options, find_state_keeper, wrapper_chain
from inchworm.env.step_arrays import StepRows, allocate_rows
from inchworm.env.values import Refusal, brief, info_numbers, make_put, make_writer, put_infos, put_legal_actions, refusal
from inchworm.env.vector_env import Engine, LaneVectorEnv

GymVectorEnv = gym.vector.VectorEnv[Any, Any, Any]


class Moved(NamedTuple):
    """One step of all lanes."""

    observations: Tree
    rewards: Array
    terminated: Array
    truncated: Array
    info: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    """Arrays [B] by name, or an info for each lane; where a lane was reset already, that of the episode that ended."""
    finals: Mapping[int, Tree] | None = None
    """The last observation [*obs] of each episode that ended, by lane, from a world that resets itself."""
    running: Mapping[str, Any] | None = None
    """The infos of the lanes whose episode goes on, where `info` has only those of episodes that ended."""


class BatchedWorld(Protocol):
    """A vector env of another library, reduced to what is needed here."""

    observation_space: Space
    action_space: Space
    num_lanes: int
    takes_seeds: bool
    """Whether each episode can be given a seed, and so be replayed."""
    resets_itself: bool
    """Whether a step begins the next episode where one ended; then no lane can be reset alone or with options."""
    state_keeper: StateKeeper | None
    """What saves and restores the state of all lanes, if the vector env offers `get_state` and `set_state`."""
    inexact: list[str]
    """Why a resumed run may differ, a sentence each; empty if it is bit-identical."""

    def begin(self, lanes: Sequence[int], seeds: Sequence[int] | None, options: Mapping[str, Any] | None) -> Tree:
        """Begin episodes in some lanes: their first observations [len(lanes), *obs]."""

    def start(self, actions: Tree) -> None:
        """Begin a step."""

    def finish(self) -> Moved:
        """Wait for it."""

    def close(self) -> None:
        """Release everything."""


def scatter(values: Tree, rows: Tree, lanes: Sequence[int]) -> None:
    """Put values [n, *leaf] into the rows of n lanes."""
    for value, row in zip(tree_leaves(values), tree_leaves(rows)):
        row[list(lanes)] = value


def lane_numbers(info: Mapping[str, Any] | Sequence[Mapping[str, Any]], lane: int) -> dict[str, float]:
    """The numbers of one lane in a list with an info for each lane, or in one info of arrays [B]; `_key` tells which lanes have a key."""
    if not isinstance(info, Mapping):
        return info_numbers(info[lane])
    arrays = {key: value for key, value in info.items() if isinstance(value, np.ndarray) and value.ndim == 1 and not key.startswith("_")}
    known = {key: info.get(f"_{key}", np.ones(len(value), np.bool_)) for key, value in arrays.items()}
    return info_numbers({key: value[lane] for key, value in arrays.items() if known[key][lane] and value.dtype.kind in "biuf"})


def lane_info(info: Mapping[str, Any] | Sequence[Mapping[str, Any]], names: Iterable[str], lane: int) -> dict[str, Any]:
    """What the info of one lane has under some names, in a list of infos or in one info of arrays."""
    if not isinstance(info, Mapping):
        return {name: info[lane].get(name) for name in names}
    found = {}
    for name in names:
        if name in info and (f"_{name}" not in info or info[f"_{name}"][lane]):
            if np.ndim(info[name]) == 0:
                raise refusal(("info", name), "must be an array with a number for each lane", info[name])
            found[name] = info[name][lane]
    return found


def write_outcome(moved: Moved, rows: StepRows) -> None:
    """Check rewards and flags of a step and put them into the rows."""
    lanes = len(rows.rewards)
    rows.rewards[:] = _lane_values(moved.rewards, "rewards", lanes, "fiub")
    rows.terminated[:] = _lane_values(moved.terminated, "terminated", lanes, "b")
    truncated = _lane_values(moved.truncated, "truncated", lanes, "b")
    np.logical_and(truncated, ~rows.terminated, out=rows.truncated)  # both flags mean terminated


def _lane_values(values: Any, name: str, num_lanes: int, kinds: str) -> Array:
    """One value for each lane [B], of one of these kinds: never one for all, never a text that happens to be a number."""
    if isinstance(values, np.ndarray) and values.shape == (num_lanes,) and values.dtype.kind in kinds:
        return values
    wanted = "bool" if kinds == "b" else "real numbers"
    got = f"{values.dtype} of shape {values.shape}" if isinstance(values, np.ndarray | np.generic) else type(values).__name__
    raise EnvError(f"{name} must be an array of {wanted} of shape ({num_lanes},), one for each lane; got {got}: {brief(values)}")


class BatchedVectorEnv(LaneVectorEnv):
    """The `VectorEnv` contract over a vector env of another library."""

    def __init__(self, world: BatchedWorld, *, keep_infos: Sequence[str] = (), **options: Any) -> None:
        super().__init__(BatchedEngine(world, keep_infos), takes_seeds=world.takes_seeds, inexact=world.inexact, **options)
        self.resets_itself = world.resets_itself

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore every copy; of an earlier format without seeds only the episode counts and the options remain."""
        if "copies" not in state:
            actions = {f"part{leaf}": array[:0] for leaf, array in enumerate(tree_leaves(self._rows.actions))}
            unknown = {"seed": 0, "episode_return": 0.0, "replayable": False, "observation_hash": ""}
            copies = [
                {"episode": episode, "options": options, "next_options": options, "length": int(length), **unknown}
                for episode, options, length in zip(state["episodes"], state["options"], state["lengths"])
            ]
            own = {"seed": self._ledger.seed, "first_copy": self._ledger.first_copy}
            state = {**own, "copies": copies, "actions": actions, "strayed": state.get("strayed", ())}
        super().load_state_dict(state)


class BatchedEngine(Engine):
    """Steps all copies in one call, and resets those whose episode ended in the same step."""

    lanes_per_copy = 1

    def __init__(self, world: BatchedWorld, keep_infos: Sequence[str] = ()) -> None:
        self._world, self._lanes = world, world.num_lanes
        self.observation_space, self.action_space = world.observation_space, world.action_space
        self.rows, _ = allocate_rows(self.observation_space, self.action_space, self._lanes, self._lanes, keep_infos=keep_infos)
        self._put = make_put(self.observation_space, "observations")
        self._put_final = make_writer(self.observation_space)
        self._options: list[Any] = [None] * self._lanes

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin episodes in some copies."""
        if self._world.resets_itself and 0 < len(indices) < self._lanes:
            raise EnvError(f"the vector env resets itself, so only all {self._lanes} lanes can be reset, not {list(indices)} alone")
        self._begin(indices, seeds, [self._options[lane] for lane in indices])

    def _begin(self, lanes: Sequence[int], seeds: Sequence[int], options: Sequence[Any]) -> None:
        left = list(zip(lanes, seeds, options))
        while left:  # those that begin with the same options begin together
            same = [entry for entry in left if entry[2] == left[0][2]]
            left = [entry for entry in left if entry not in same]
            chosen = [lane for lane, _, _ in same]
            first = zeros(self.observation_space, (len(chosen),))  # [n, *obs]
            own_seeds = [int(seed) for _, seed, _ in same] if self._world.takes_seeds else None
            self._put(self._world.begin(chosen, own_seeds, env_options(same[0][2])), first)
            scatter(first, self.rows.observations, chosen)

    def start(self) -> None:
        """Begin a step with the actions in the rows."""
        self._world.start(map_tree(np.copy, self.rows.actions))

    def finish(self) -> list[Ended]:
        """Wait for it; where an episode ended, the next begins."""
        moved, over = self._land()
        if not over:
            return []
        if moved.finals is None:
            scatter(map_tree(lambda array: array[over], self.rows.observations), self.rows.final_observations, over)
            self.reset(over, self.rows.next_seeds[over].tolist())
        for lane, last in (moved.finals or {}).items():  # the next episode of these has begun
            try:
                self._put_final(last, self.rows.final_observations, lane)
            except Refusal as refusal:
                raise EnvError(f"the last observation of lane {lane}: {refusal}") from None
        return [(lane, lane_numbers(moved.info, lane)) for lane in over]

    def _land(self) -> tuple[Moved, list[int]]:
        """Write the step of all copies into the rows; returns it and the lanes whose episode ended."""
        moved, rows = self._world.finish(), self.rows
        self._put(moved.observations, rows.observations)
        write_outcome(moved, rows)
        over = (rows.terminated | rows.truncated).nonzero()[0].tolist()
        for lane in range(self._lanes) if rows.infos else ():
            info = moved.info if moved.running is None or lane in over else moved.running
            try:
                put_infos(lane_info(info, rows.infos, lane), rows.infos, lane)
            except Refusal as refusal:
                raise EnvError(f"lane {lane}: {refusal}") from None
        return moved, over

    def set_options(self, indices: Sequence[int], options: Sequence[Any]) -> None:
        """Reset options from the copies' next reset on."""
        if self._world.resets_itself and any(options):
            raise EnvError("the vector env resets itself, without options; give an id or a factory, of which copies are made here")
        for lane, value in zip(indices, options):
            self._options[lane] = value

    def check_method(self, name: str) -> str | None:
        """Say that methods are called on the vector env itself."""
        return f"{name} cannot be called through a vector env that was made elsewhere; call it there, or pass an id or a factory"

    def replay(self, jobs: Sequence[Replay]) -> list[tuple[float, int]]:
        """Replay episodes in their copies, all at once.

        They move together, so each episode begins as many steps late as it is shorter than the longest; before that its copy
        plays an episode whose results are dropped.
        """
        lengths = {job.copy: len(tree_leaves(job.actions)[0]) for job in jobs}
        longest = max(lengths.values(), default=0)
        results = {job.copy: (0.0, 0) for job in jobs}
        lost: set[int] = set()  # copies whose episode ended early
        rng = np.random.default_rng(0)  # not a stream of the run: a reset discards what these actions do
        action_rows, own = tree_leaves(self.rows.actions), {job.copy: (job.seed, job.options) for job in jobs}

        def begin(lanes: Sequence[int]) -> None:
            """Begin the episodes that are replayed, and any in copies without one."""
            begun = [own.get(lane, (0, self._options[lane])) for lane in lanes]
            self._begin(lanes, [seed for seed, _ in begun], [options for _, options in begun])

        if longest:
            begin(range(self._lanes))
        for now in range(longest):
            begin([copy for copy, length in lengths.items() if longest - length == now])
            running = [job for job in jobs if longest - lengths[job.copy] <= now and job.copy not in lost]
            for job in running:
                for row, part in zip(action_rows, tree_leaves(job.actions)):
                    row[job.copy] = part[now - longest + lengths[job.copy]]
            moving = {job.copy for job in running}
            waiting = [lane for lane in range(self._lanes) if lane not in moving]
            put_legal_actions(self.action_space, self.rows.observations, rng, self.rows.actions, waiting)
            self.start()
            _, over = self._land()
            for copy in moving.difference(over):
                total, taken = results[copy]
                results[copy] = total + float(self.rows.rewards[copy]), taken + 1
            lost |= moving.intersection(over)
            begin(over)
        begin([copy for copy, length in lengths.items() if length == 0])
        return [results[job.copy] for job in jobs]

    def get_states(self) -> list[dict[str, Any]]:
        """The state of all copies, as that of the first."""
        if self._world.state_keeper is None:
            return []
        whole = self._world.state_keeper.get()
        others = {"state": {"saved_with_copy": 0}} if "state" in whole else whole
        return [whole] + [others] * (self._lanes - 1)

    def set_states(self, jobs: Sequence[Restore]) -> None:
        """Restore all copies at once."""
        if self._world.state_keeper is None or [job.copy for job in jobs] != list(range(self._lanes)):
            super().set_states(jobs)  # raises
            return
        self._world.begin(range(self._lanes), None, None)
        self._world.state_keeper.set(jobs[0].state)

    def close(self) -> None:
        """Close the world."""
        self._world.close()


class GymnasiumVectorWorld:
    """A `gymnasium.vector.VectorEnv`, best one whose copies can be reset one by one, that is, with `AutoresetMode.DISABLED`.

    With `AutoresetMode.SAME_STEP` it resets itself, and the last observations are in its infos; its episodes then have no seeds.
    """

    def __init__(self, env: GymVectorEnv, seed: int) -> None:
        mode = env.metadata.get("autoreset_mode")
        if mode not in (AutoresetMode.DISABLED, AutoresetMode.SAME_STEP):
            raise EnvError(
                f"a {type(env.unwrapped).__name__} with {mode} resets one step late; make it with "
                'gymnasium.make_vec(…, vectorization_mode="sync", vector_kwargs={"autoreset_mode": "Disabled"}), '
                "or give its id, of which copies are made here"
            )
        self.resets_itself = mode == AutoresetMode.SAME_STEP
        self._env, self._seed, self._actions = env, seed, None
        self.observation_space, self.action_space = env.single_observation_space, env.single_action_space
        self.num_lanes = env.num_envs
        # Else all copies draw from one stream, or begin their episodes themselves.
        self.takes_seeds = isinstance(env.unwrapped, SyncVectorEnv | AsyncVectorEnv) and not self.resets_itself
        self.state_keeper = None if self.takes_seeds else find_state_keeper(env)
        layers = [*wrapper_chain(env), *(wrapper_chain(env.unwrapped.envs[0]) if isinstance(env.unwrapped, SyncVectorEnv) else ())]
        names = [type(layer).__name__ for layer in layers if type(layer).__module__.startswith("gymnasium.wrappers")]
        self.inexact = [f"the wrapper {name} is not saved: {REFUSED_WRAPPERS[name]}" for name in names if name in REFUSED_WRAPPERS]
        if not self.takes_seeds and self.state_keeper is None:
            hint = " (make it with AutoresetMode.DISABLED)" if isinstance(env.unwrapped, SyncVectorEnv | AsyncVectorEnv) else ""
            self.inexact.append(
                f"{type(env.unwrapped).__name__} has no get_state and set_state, and its episodes cannot be given seeds{hint}: "
                "a resumed run starts new episodes"
            )
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
        with env_errors(type(self._env).__name__, "reset"):
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
        with env_errors(type(self._env).__name__, "step"):
            moved = Moved(*self._env.step(self._actions))
        if not self.resets_itself:
            return moved
        over, info = np.flatnonzero(np.logical_or(moved.terminated, moved.truncated)).tolist(), cast(Mapping[str, Any], moved.info)
        if over and "final_obs" not in info:
            raise EnvError(
                f"the episode of lane {over[0]} ended, but info has no 'final_obs': a vector env with AutoresetMode.SAME_STEP must keep "
                "the last observations there; or make it with AutoresetMode.DISABLED, which begins episodes only in reset()"
            )
        finals = {lane: map_tree(operator.itemgetter(lane), info["final_obs"]) for lane in over}
        return moved._replace(info=info.get("final_info", info), finals=finals, running=info)

    def close(self) -> None:
        """Close the vector env."""
        with env_errors(type(self._env).__name__, "close"):
            self._env.close()


class EnvPoolWorld:
    """An EnvPool with Gymnasium's interface. Every lane has its own random stream, from which its episodes are drawn."""

    takes_seeds = resets_itself = False
    state_keeper: StateKeeper | None = None

    def __init__(self, pool: Any) -> None:
        if pool.config["batch_size"] != pool.config["num_envs"] or pool.config["max_num_players"] != 1:
            raise EnvError("an EnvPool must step all lanes at once (batch_size = num_envs) and have one player; make it so")
        self._pool = pool
        self.observation_space, self.action_space = pool.single_observation_space, pool.single_action_space
        self.num_lanes = int(pool.config["num_envs"])
        self._everyone = np.arange(self.num_lanes, dtype=np.int32)
        self.inexact = ["EnvPool can neither save its episodes nor give one a seed: a resumed run starts new episodes"]

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
        """End EnvPool's threads."""
        self._pool.close()


def _places(found: np.ndarray, wanted: Sequence[int] | np.ndarray) -> np.ndarray:
    """The position of each wanted lane among those found."""
    place = {int(lane): index for index, lane in enumerate(found)}
    return np.array([place[int(lane)] for lane in wanted])


def is_envpool(env: Any) -> bool:
    """Whether a vector env is an EnvPool."""
    return any(base.__module__.startswith("envpool.") for base in type(env).__mro__)


def adapt_vector_env(env: GymVectorEnv, *, seed: int = 0, **options: Any) -> BatchedVectorEnv:
    """A `gymnasium.vector.VectorEnv` or an EnvPool, with the `VectorEnv` contract."""
    world: BatchedWorld = EnvPoolWorld(env) if is_envpool(env) else GymnasiumVectorWorld(env, seed)
    return BatchedVectorEnv(world, seed=seed, **options)


def make_envpool(config: EnvConfig, *, global_state: bool = False, seed: int = 0, first_copy: int = 0, **options: Any) -> BatchedVectorEnv:
    """EnvPool's copies of `envpool:Name`; `env.num_workers` is its number of threads. A lane's stream is the same in any layout."""
    if global_state:
        raise EnvError(f"env.id={config.id!r}: EnvPool has no global state for a central critic")
    if config.wrappers or config.atari or config.frame_stack > 1:
        raise EnvError(f"env.id={config.id!r}: wrappers, atari and frame_stack are left to EnvPool; use env.kwargs, such as stack_num")
    limit = {} if config.max_episode_steps is None else {"max_episode_steps": config.max_episode_steps}
    pool = importlib.import_module("envpool").make(
        config.id.removeprefix(ENVPOOL),
        env_type="gymnasium",
        num_envs=config.num_envs,
        num_threads=0 if config.num_workers == "auto" else config.num_workers,
        env_seed=[derive_seed(seed, "envpool", first_copy + lane) for lane in range(config.num_envs)],
        **limit,
        **config.kwargs,
    )
    return BatchedVectorEnv(EnvPoolWorld(pool), seed=seed, first_copy=first_copy, **options)
