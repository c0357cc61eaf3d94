"""Step 2 of 9, over somebody else's vector env: the `VectorEnv` contract for worlds that are batched already.

Gymnasium's vector envs and EnvPool step all copies in one call. Here their resets are brought into the same step, with the true final
observation kept. Their episodes have no seeds, so none can be replayed: a world is brought to where it stood by its whole state, if that
can be saved. If it cannot, `inexact` says why, and a resumed run begins fresh episodes and is from there on another run.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from inchworm.config.sections import EnvConfig
from inchworm.core.errors import EnvError, MissingExtraError
from inchworm.core.protocols import VectorEnv
from inchworm.core.seeding import derive_seed
from inchworm.core.spaces import Space, zeros
from inchworm.core.types import Array, EndedEpisode, EnvStep, Tree
from inchworm.env.episodes import Ended, Replay, plain_options
from inchworm.env.step_arrays import StepRows, carve_rows, map_tree, tree_leaves
from inchworm.env.trial import put_legal_actions
from inchworm.env.values import brief, make_put
from inchworm.env.vector_env import LaneVectorEnv, copy_row
from inchworm.env.vector_state import VectorState, crossing_wrappers


class Moved(NamedTuple):
    """One step of all lanes, before any reset."""

    observations: Tree
    rewards: Array
    terminated: Array
    truncated: Array
    info: Mapping[str, Any]


class BatchedWorld(Protocol):
    """A vector env as its library makes it, reduced to what is needed here."""

    observation_space: Space
    action_space: Space
    num_lanes: int
    inexact: list[str]
    """Why the world cannot be brought to where it stood, in sentences; empty if it can."""

    def begin(self, lanes: Sequence[int], seeds: Sequence[int] | None, options: Mapping[str, Any] | None) -> Tree:
        """Begin episodes in some lanes: their first observations [len(lanes), *obs]."""
        ...

    def start(self, actions: Tree) -> None:
        """Begin a step."""
        ...

    def finish(self) -> Moved:
        """Wait for it."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


@runtime_checkable
class SavedWorld(BatchedWorld, Protocol):
    """A world whose whole state can be saved."""

    def state(self, observations: Tree) -> dict[str, Any]:
        """Where it stands, as plain data and arrays; the lanes see `observations`."""
        ...

    def restore(self, state: Mapping[str, Any], observations: Tree) -> str | None:
        """Bring it there; why it is not there, or None if it is."""
        ...


def scatter(values: Tree, rows: Tree, lanes: Sequence[int]) -> None:
    """Put values [n, *leaf] into the rows of n lanes."""
    if isinstance(rows, dict):
        for key, part in rows.items():
            scatter(values[key], part, lanes)
    elif isinstance(rows, tuple):
        for value, part in zip(values, rows):
            scatter(value, part, lanes)
    else:
        rows[list(lanes)] = values


def lane_numbers(info: Mapping[str, Any], lane: int) -> dict[str, float]:
    """The numbers of one lane in an info that holds an array [B] for each key, and for some keys `_key`, who has it."""
    numbers = {}
    for key, value in info.items():
        has = info.get(f"_{key}")
        if key.startswith("_") or not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in "biuf":
            continue
        if (has is None or has[lane]) and np.isfinite(value[lane]):  # one NaN would take the mean of all the others with it
            numbers[key] = float(value[lane])
    return numbers


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


NO_SEED = -1
"""The seed of an episode that had none of its own."""


class BatchedVectorEnv:
    """The `VectorEnv` contract over a batched world whose episodes have no seeds of their own."""

    def __init__(self, world: BatchedWorld, *, seed: int = 0, first_copy: int = 0) -> None:
        self._world, self._seed, self._first_copy = world, seed, first_copy
        self.observation_space, self.action_space = world.observation_space, world.action_space
        self.num_lanes = self.num_envs = lanes = world.num_lanes
        self._rows, _ = carve_rows(self.observation_space, self.action_space, lanes, lanes)
        self._put_actions = make_put(self.action_space)
        self._put_observations = make_put(self.observation_space, (), "observations")
        self._episodes = [-1] * lanes
        self._lengths = np.zeros(lanes, np.int64)  # [B] steps of the running episodes
        self._options: list[dict[str, Any] | None] = [None] * lanes
        self._episode_starts, self._valid = np.zeros(lanes, np.bool_), np.ones(lanes, np.bool_)
        self._strayed: list[str] = []  # of this run: what could not be brought back
        self._sent = self._closed = self._warned = False

    @property
    def inexact(self) -> list[str]:
        """Why a resumed run may have other bits than an uninterrupted one, in sentences; empty if it has the same."""
        return [*self._world.inexact, *self._strayed]

    @property
    def exact(self) -> bool:
        """Whether `load_state_dict` brings every lane to where it stood, so that a resumed run has the bits of an uninterrupted one."""
        return not self.inexact

    def reset(self, seeds: Sequence[int] | None = None, indices: Sequence[int] | None = None) -> EnvStep:
        """Begin new episodes in the copies `indices` (all by default). The world's own streams decide what they are: seeds are not used."""
        self._require(sent=False, begun=False)
        chosen = list(range(self.num_lanes)) if indices is None else [int(index) for index in indices]
        if self._episodes[0] < 0 and len(chosen) < self.num_lanes:
            raise EnvError(f"the first reset must be of all {self.num_lanes} copies")
        if seeds is not None and len(seeds) != len(chosen):
            raise EnvError(f"reset got {len(seeds)} seeds for {len(chosen)} copies")
        if seeds is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"the episodes of {type(self._world).__name__} cannot be given seeds: those of this reset are not used", stacklevel=2
            )
        self._begin(chosen)
        self._rows.rewards[:] = 0.0
        self._rows.terminated[:] = self._rows.truncated[:] = False
        self._episode_starts[:] = self._lengths == 0
        return self._step(())

    def _begin(self, lanes: Sequence[int]) -> None:
        for lane in lanes:
            self._episodes[lane] += 1
        left = list(lanes)
        while left:  # those that begin with the same options begin together
            same = [lane for lane in left if self._options[lane] == self._options[left[0]]]
            left = [lane for lane in left if lane not in same]
            self._begin_alike(same)
        self._lengths[list(lanes)] = 0

    def _begin_alike(self, lanes: list[int]) -> None:
        first = zeros(self.observation_space, (len(lanes),))  # [n, *obs]
        self._put_observations(self._world.begin(lanes, None, self._options[lanes[0]]), first)
        scatter(first, self._rows.observations, lanes)

    def send(self, actions: Tree) -> None:
        """Start one step with actions [B, *act], already within bounds."""
        self._require(sent=False, begun=True)
        self._put_actions(actions, self._rows.actions)
        self._world.start(map_tree(np.copy, self._rows.actions))
        self._sent = True

    def recv(self) -> EnvStep:
        """Wait for the step that `send` started."""
        self._require(sent=True, begun=True)
        moved, rows = self._world.finish(), self._rows
        self._sent = False
        self._put_observations(moved.observations, rows.observations)
        write_outcome(moved, rows)
        self._lengths += 1
        np.logical_or(rows.terminated, rows.truncated, out=self._episode_starts)
        over = self._episode_starts.nonzero()[0].tolist()
        if not over:
            return self._step(())
        ended = [EndedEpisode(lane, NO_SEED, copy_row(rows.observations, lane), lane_numbers(moved.info, lane)) for lane in over]
        self._begin(over)
        return self._step(tuple(ended))

    def step(self, actions: Tree) -> EnvStep:
        """`send`, then `recv`."""
        self.send(actions)
        return self.recv()

    def _step(self, ended: tuple[EndedEpisode, ...]) -> EnvStep:
        rows = self._rows
        return EnvStep(rows.observations, rows.rewards, rows.terminated, rows.truncated, self._episode_starts, self._valid, ended)

    def set_reset_options(self, options: Mapping[str, Any] | None, indices: Sequence[int] | None = None) -> None:
        """Options that the copies' next reset gets, if the world takes any."""
        plain = plain_options(options)
        for lane in range(self.num_lanes) if indices is None else indices:
            self._options[int(lane)] = plain

    def state_dict(self) -> dict[str, Any]:
        """Where all lanes stand, if the world can say so; else how many episodes began. Plain data and arrays."""
        self._require(sent=False, begun=False)
        state = {
            "episodes": list(self._episodes),
            "options": list(self._options),
            "lengths": self._lengths.copy(),
            "strayed": list(self._strayed),
            "world": None,
        }
        if isinstance(self._world, SavedWorld) and not self._world.inexact and self._episodes[0] >= 0:
            state["world"] = self._world.state(self._rows.observations)
            state["observations"] = [array.copy() for array in tree_leaves(self._rows.observations)]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring all lanes to where `state` says. If that cannot be done they begin fresh episodes, with a warning."""
        self._require(sent=False, begun=False)
        if len(state["episodes"]) != self.num_lanes:
            raise EnvError(f"the saved environments are {len(state['episodes'])} copies, here are {self.num_lanes}; set env.num_envs to it")
        self._episodes[:] = [int(episode) for episode in state["episodes"]]
        self._options[:] = state["options"]
        self._strayed = [str(text) for text in state.get("strayed", ())]
        if self._episodes[0] < 0:
            return
        why = self._restore(state)
        if why is not None:
            text = f"no lane came back at a resume, and all began fresh episodes: {why}"
            warnings.warn(f"{type(self._world).__name__} is not exact: {text}", stacklevel=2)
            self._strayed += [text] if text not in self._strayed else []
            self.reset()

    def _restore(self, state: Mapping[str, Any]) -> str | None:
        """Bring all lanes to where they stood; why they are not there, or None if they are."""
        if self._world.inexact or not isinstance(self._world, SavedWorld):
            return "; ".join(self._world.inexact)
        if state.get("world") is None:
            return "where they stood was not saved"
        rows = tree_leaves(self._rows.observations)
        if [(a.shape, a.dtype) for a in rows] != [(a.shape, a.dtype) for a in state["observations"]]:
            return "the saved observations are of other shapes"
        for row, saved in zip(rows, state["observations"]):
            row[...] = saved
        self._lengths[:] = state["lengths"]
        return self._world.restore(state["world"], self._rows.observations)

    def _require(self, *, sent: bool, begun: bool) -> None:
        if self._closed:
            raise EnvError("the vector env is closed; make a new one")
        if begun and self._episodes[0] < 0:
            raise EnvError("the environments have not been reset; call reset() first")
        if self._sent != sent:
            raise EnvError("no step has been sent; call send(actions) first" if sent else "a step has been sent; call recv() first")

    def close(self) -> None:
        """Release everything; safe to call twice."""
        if not self._closed:
            self._closed = True
            self._world.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # a constructor that failed, or an interpreter that is shutting down
            self.close()


class LockstepVectorEnv(LaneVectorEnv):
    """The `VectorEnv` contract over a batched world whose episodes take seeds."""

    def __init__(self, world: BatchedWorld, **options: Any) -> None:
        super().__init__(_Lockstep(world), **options)
        for why in world.inexact:
            self.mark_inexact(why)


class _Lockstep:
    """The engine: resets are brought into the step in which an episode ended."""

    lanes_per_copy = 1

    def __init__(self, world: BatchedWorld) -> None:
        self._world, self._lanes = world, world.num_lanes
        self.observation_space, self.action_space = world.observation_space, world.action_space
        self.rows, _ = carve_rows(self.observation_space, self.action_space, self._lanes, self._lanes)
        self._put = make_put(self.observation_space, (), "observations")
        self._options: list[Any] = [None] * self._lanes

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin episodes in some copies."""
        self._begin(indices, seeds, [self._options[lane] for lane in indices])

    def _begin(self, lanes: Sequence[int], seeds: Sequence[int], options: Sequence[Any]) -> None:
        left = list(zip(lanes, seeds, options))
        while left:  # those that begin with the same options begin together
            same = [entry for entry in left if entry[2] == left[0][2]]
            left = [entry for entry in left if entry not in same]
            chosen = [lane for lane, _, _ in same]
            first = zeros(self.observation_space, (len(chosen),))  # [n, *obs]
            self._put(self._world.begin(chosen, [int(seed) for _, seed, _ in same], same[0][2]), first)
            scatter(first, self.rows.observations, chosen)

    def start(self) -> None:
        """Begin a step with the actions that stand in the rows."""
        self._world.start(map_tree(np.copy, self.rows.actions))

    def finish(self) -> list[Ended]:
        """Wait for it; where an episode ended, the next begins."""
        moved, over = self._land()
        if not over:
            return []
        scatter(map_tree(lambda array: array[over], self.rows.observations), self.rows.final_observations, over)
        self.reset(over, self.rows.next_seeds[over].tolist())
        return [(lane, lane_numbers(moved.info, lane)) for lane in over]

    def _land(self) -> tuple[Moved, list[int]]:
        """One step of all copies stands in the rows; who ended."""
        moved, rows = self._world.finish(), self.rows
        self._put(moved.observations, rows.observations)
        write_outcome(moved, rows)
        return moved, (rows.terminated | rows.truncated).nonzero()[0].tolist()

    def set_options(self, indices: Sequence[int], options: Sequence[Any]) -> None:
        """Reset options from the copies' next reset on."""
        for lane, value in zip(indices, options):
            self._options[lane] = value

    def replay(self, jobs: Sequence[Replay]) -> list[tuple[float, int]]:
        """Bring copies to where their episodes stood, all at once.

        They move together, so each episode begins as many steps late as it is shorter than the longest; till then its copy
        plays an episode that nobody looks at.
        """
        lengths = {job.copy: len(tree_leaves(job.actions)[0]) for job in jobs}
        longest = max(lengths.values(), default=0)
        results = {job.copy: (0.0, 0) for job in jobs}
        lost: set[int] = set()  # copies whose episode ended on the way
        rng = np.random.default_rng(0)  # no stream of the run: these actions are taken back by a reset
        if longest:
            self._begin_anew(range(self._lanes), jobs)
        for now in range(longest):
            self._begin_anew([job.copy for job in jobs if longest - lengths[job.copy] == now], jobs)
            running = [job for job in jobs if longest - lengths[job.copy] <= now and job.copy not in lost]
            self._choose({job.copy: _action(job, now - longest + lengths[job.copy]) for job in running}, rng)
            self.start()
            _, over = self._land()
            for job in running:
                total, taken = results[job.copy]
                results[job.copy] = (total, taken) if job.copy in over else (total + float(self.rows.rewards[job.copy]), taken + 1)
            lost.update(job.copy for job in running if job.copy in over)
            self._begin_anew(over, jobs)
        self._begin_anew([lane for lane, length in lengths.items() if length == 0], jobs)
        return [results[job.copy] for job in jobs]

    def _begin_anew(self, lanes: Sequence[int], jobs: Sequence[Replay]) -> None:
        """Begin the episodes that are replayed; copies without one begin any."""
        own = {job.copy: (job.seed, job.options) for job in jobs}
        begun = [own.get(lane, (0, self._options[lane])) for lane in lanes]
        self._begin(lanes, [seed for seed, _ in begun], [options for _, options in begun])

    def _choose(self, actions: dict[int, list[Any]], rng: np.random.Generator) -> None:
        """Put the given actions into the rows, and legal ones for the copies that wait."""
        for lane, parts in actions.items():
            for row, part in zip(tree_leaves(self.rows.actions), parts):
                row[lane] = part
        waiting = [lane for lane in range(self._lanes) if lane not in actions]
        put_legal_actions(self.action_space, self.rows.observations, rng, self.rows.actions, waiting)

    def close(self) -> None:
        """Close the world."""
        self._world.close()


def _action(job: Replay, step: int) -> list[Any]:
    """The leaves of one action of an episode."""
    return [part[step] for part in tree_leaves(job.actions)]


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
