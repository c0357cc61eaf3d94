"""Around step 2 of 9: a vector env whose other team is played by opponents, so that later steps see only our lanes; random actors."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import optree
from gymnasium import spaces

from inchworm.backends.numpy import distributions
from inchworm.backends.numpy.policy import encode_mask
from inchworm.config.sections import TrainingConfig, read_opponent
from inchworm.core.errors import ConfigError, EnvError
from inchworm.core.padding import AgentSpaces
from inchworm.core.protocols import Actor, Closes, Policy, Stateful, VectorEnv, complete_vector_env, default_agents
from inchworm.core.seeding import make_stream, restore_stream, stream_state
from inchworm.core.spaces import MASK_KEY, Space, check_same_form, map_tree, tree_leaves, zeros
from inchworm.core.types import Array, EndedEpisode, EnvStep, PolicyStep, Tree
from inchworm.env.registry import heuristic_of, team_worlds
from inchworm.env.values import make_put
from inchworm.policy.file import fingerprint
from inchworm.policy.layout import action_layout
from inchworm.rollout.buffer import hold_memory

__all__ = ["OneOpponent", "OpponentSource", "OpponentVectorEnv", "own_lanes", "team_lanes"]


@runtime_checkable
class OpponentSource(Protocol):
    """Chooses the opponent of each episode. A source that is also `Stateful` is saved with the environments."""

    def draw(self, copy: int, rng: np.random.Generator) -> str:
        """Return the name of the opponent of the copy's next episode; all randomness comes from `rng`."""
        ...

    def actor(self, name: str) -> Actor:
        """Return the opponent of that name; called as long as an episode against it runs."""
        ...

    def record(self, name: str, win: float) -> None:
        """Take note of the result of an episode: 1 won by us, 0 lost, 0.5 drawn."""
        ...


class OneOpponent:
    """The same opponent in every episode. A policy's name contains the fingerprint of its weights."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        mark = f"-{fingerprint(actor.get_weights()):016x}" if isinstance(actor, Policy) else ""
        self.name = f"{type(actor).__name__}{mark}"

    def draw(self, copy: int, rng: np.random.Generator) -> str:  # noqa: ARG002 - there is only one
        """Return the name of the only opponent."""
        return self.name

    def actor(self, name: str) -> Actor:
        """Return the only opponent; another name comes from a checkpoint with another opponent."""
        if name != self.name:
            raise ConfigError(f"a saved game is against {name}, but the opponent here is {self.name}; use the opponent of the saved game")
        return self._actor

    def record(self, name: str, win: float) -> None:
        """Results are not tracked."""


def check_spaces(actor: Actor, observation_space: Space, action_space: Space, who: str) -> None:
    """Reject a player made for other spaces; bounds may differ, because networks do not depend on them."""
    declares = getattr(actor, "spec", actor)
    observed, acted = getattr(declares, "observation_space", None), getattr(declares, "action_space", None)
    if observed is not None and acted is not None:  # else its actions are checked when it acts
        check_same_form(who, (observed, acted), (observation_space, action_space))


@dataclass
class _Group:
    """The copies that play against one opponent, in order, and the opponent's memory of their lanes."""

    name: str
    actor: Actor
    copies: np.ndarray  # [n]
    lanes: np.ndarray  # [n * k] global
    state: Tree  # [n * k, *mem]
    actions: Tree  # [n * k, *act] checked


class Opponents:
    """Plays the lanes [E, k] that are not ours, each copy by its current opponent."""

    def __init__(
        self,
        source: OpponentSource,
        spaces: tuple[Space, Space],
        lanes: np.ndarray,
        *,
        seed: int,
        first_copy: int = 0,
        deterministic: bool = False,
        turn_based: bool = False,
    ) -> None:
        """`spaces` are those of an observation and of an action; copies are numbered from `first_copy`."""
        self.source, self._spaces, self._lanes, self._turn_based = source, spaces, lanes, turn_based
        self._seed, self._first_copy, self._deterministic = seed, first_copy, deterministic
        self._put = make_put(spaces[1], what=f"actions of an opponent for {spaces[1]}:")
        self.names: list[str | None] = [None] * len(lanes)
        self._groups: list[_Group] = []
        self.restart()

    def restart(self) -> None:
        """Restart all random streams, so that the same games are played again."""
        self._stream = make_stream(self._seed, "opponents", self._first_copy)
        self._draws = [0] * len(self._lanes)

    def draw(self, copies: Iterable[int]) -> None:
        """Draw the opponents of copies whose episodes begin."""
        changed = False
        for copy in copies:
            stream = make_stream(self._seed, "opponent", self._first_copy + copy, self._draws[copy])
            name = self.source.draw(self._first_copy + copy, stream)
            self._draws[copy] += 1
            changed = changed or name != self.names[copy]
            self.names[copy] = name
        if changed:
            self._regroup()

    def record(self, copy: int, info: Mapping[str, float]) -> None:
        """Report the result of a copy's episode to the source; `info` is our lane's last."""
        name = self.names[copy]
        if name is not None and "win" in info:
            self.source.record(name, float(info["win"]))

    def act(self, now: EnvStep, actions: Tree) -> None:
        """Write the opponents' actions into the actions [B', *act] of all lanes; those of invalid lanes are ignored."""
        for group in self._groups:
            lanes = group.lanes
            seen = map_tree(operator.itemgetter(lanes), now.observations)
            step = group.actor.act(seen, group.state, now.episode_starts[lanes], self._stream, deterministic=self._deterministic)
            group.state = hold_memory(step.state, group.state, now.valid[lanes]) if self._turn_based else step.state
            self._put(step.env_actions, group.actions)
            for target, own in zip(tree_leaves(actions), tree_leaves(group.actions)):
                target[lanes] = own

    def state_dict(self) -> dict[str, Any]:
        """Return the opponent of each copy, their memory, and the random streams."""
        return {
            "names": list(self.names),
            "draws": list(self._draws),
            "stream": stream_state(self._stream),
            "memory": [{"name": group.name, "state": optree.tree_map(np.array, group.state)} for group in self._groups],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore; the source must know every opponent."""
        names = [None if name is None else str(name) for name in state["names"]]
        if len(names) != len(self._lanes) or len(state["draws"]) != len(self._lanes):
            raise ConfigError(
                f"the saved opponents play {len(names)} env copies, but there are {len(self._lanes)}; set env.num_envs={len(names)}"
            )
        self._stream = restore_stream(state["stream"])
        self.names, self._draws = names, [int(count) for count in state["draws"]]
        self._groups = []
        self._regroup()
        saved = {str(entry["name"]): entry["state"] for entry in state["memory"]}
        for group in self._groups:
            group.state = optree.tree_map(np.array, saved[group.name])

    def _regroup(self) -> None:
        """Group the copies by opponent; lanes that keep their opponent keep its memory."""
        before = {group.name: group for group in self._groups}
        self._groups = []
        width = self._lanes.shape[1]
        for name in sorted({name for name in self.names if name is not None}):
            copies = np.array([copy for copy, other in enumerate(self.names) if other == name])
            old = before.get(name)
            if old is not None and np.array_equal(old.copies, copies):
                self._groups.append(old)
                continue
            actor = self.source.actor(name)
            if old is None:
                check_spaces(actor, *self._spaces, f"the opponent {name}")
            lanes = self._lanes[copies].reshape(-1)
            state = optree.tree_map(np.array, actor.initial_state(len(lanes)))
            if old is not None:
                _, source, target = np.intersect1d(old.copies, copies, return_indices=True)
                for fresh, kept in zip(optree.tree_leaves(state), optree.tree_leaves(old.state)):
                    by_copy = fresh.reshape(-1, width, *fresh.shape[1:])  # [n, k, *mem]
                    by_copy[target] = kept.reshape(-1, width, *kept.shape[1:])[source]
            self._groups.append(_Group(name, actor, copies, lanes, state, zeros(self._spaces[1], (len(lanes),))))


SIDE = "first"
"""Key of the global state: the number within its copy of our team's first agent."""


def team_lanes(num_envs: int, lanes_per_copy: int, sides: int | Sequence[int] | Array = 0) -> np.ndarray:
    """Return the lanes of one team in every copy: side 0 is the first half of a copy's lanes, side 1 the second."""
    if lanes_per_copy < 2 or lanes_per_copy % 2:
        raise ConfigError(f"two teams need an even number of lanes per copy, but there are {lanes_per_copy}")
    chosen = np.broadcast_to(np.asarray(sides, np.int64), num_envs) if np.ndim(sides) == 0 else np.asarray(sides, np.int64)
    if chosen.shape != (num_envs,) or ((chosen != 0) & (chosen != 1)).any():
        raise ConfigError(f"sides must be 0 or 1, one number or one for each of {num_envs} copies; got {np.asarray(sides).tolist()!s:.100}")
    width = lanes_per_copy // 2
    first = np.arange(num_envs) * lanes_per_copy + chosen * width  # [E]
    lanes: np.ndarray = (first[:, None] + np.arange(width)).reshape(-1)
    return lanes


def own_lanes(env: VectorEnv, config: TrainingConfig, first_copy: int = 0) -> np.ndarray:
    """Return the lanes that the policy plays by `opponent.sides`; reject an environment without two teams."""
    agents = env.lanes_per_copy
    if agents % 2:
        raise ConfigError(
            f"opponent.mode={config.opponent.mode} needs an environment with two teams, but a copy of {config.env.id} has {agents} "
            f"agent(s); use one such as {team_worlds()}, or opponent.mode=none"
        )
    sides: Any = {"first": 0, "second": 1, "alternate": np.arange(first_copy, first_copy + env.num_envs) % 2}[config.opponent.sides]
    return team_lanes(env.num_envs, agents, sides)


class OpponentVectorEnv(Closes):
    """A vector env of our lanes; the others are played by an actor, or by the opponents that a source draws for each episode.

    `reset` with seeds for all copies also restarts the opponents' random streams: the same seeds then give the same games.
    """

    def __init__(
        self,
        inner: VectorEnv,
        opponent: Actor | OpponentSource,
        lanes: Sequence[int] | Array,
        *,
        seed: int = 0,
        first_copy: int = 0,
        deterministic: bool = False,
    ) -> None:
        """`lanes` are ours, equally many in each copy. `deterministic` opponents act greedily. Copies are numbered from `first_copy`."""
        self.inner = inner = complete_vector_env(inner)
        if inner.lanes_per_copy < 2:
            raise EnvError(f"{type(inner).__name__} has one lane per copy, so it has no teams; set its lanes_per_copy if it has more")
        self.observation_space, self.action_space = inner.observation_space, inner.action_space
        self.num_envs = inner.num_envs
        self.lanes = _check_lanes(inner, lanes)
        theirs = np.setdiff1d(np.arange(inner.num_lanes), self.lanes).reshape(inner.num_envs, -1)  # [E, k]
        self.num_lanes = len(self.lanes)
        self.lanes_per_copy = self.num_lanes // self.num_envs
        self.agents_leave = True  # a copy has several lanes, of which some are hidden
        places = (self.lanes % inner.lanes_per_copy).reshape(self.num_envs, -1)  # [E, k] numbers within the copy
        same = bool((places == places[0]).all())  # else a lane is one agent in some copies and another in others
        self.agents: tuple[str, ...] = tuple(inner.agents[place] for place in places[0]) if same else default_agents(self.lanes_per_copy)
        self.agent_spaces: tuple[AgentSpaces, ...] = tuple(inner.agent_spaces[place] for place in places[0] if same and inner.agent_spaces)
        self._first = self.lanes[:: self.lanes_per_copy] % inner.lanes_per_copy  # [E] the number of our first agent within its copy
        self.global_state_space: Space | None = None
        if inner.global_state_space is not None:  # one critic serves both sides, so it must know which one is ours
            self.global_state_space = spaces.Dict({SIDE: spaces.Discrete(inner.lanes_per_copy), "world": inner.global_state_space})
        both = (self.observation_space, self.action_space)
        if isinstance(opponent, OpponentSource):
            self.opponent = opponent
        elif isinstance(opponent, Actor):
            self.opponent = OneOpponent(opponent)
            check_spaces(opponent, *both, f"the opponent {self.opponent.name}")
        else:
            raise ConfigError(
                f"{type(opponent).__name__} is not an opponent: it needs initial_state and act (an Actor), or draw, actor and record"
            )
        self.turn_based, self.resets_itself, self.kept_infos = inner.turn_based, inner.resets_itself, inner.kept_infos
        how: dict[str, Any] = {"deterministic": deterministic, "turn_based": inner.turn_based}
        self._opponents = Opponents(self.opponent, both, theirs, seed=seed, first_copy=first_copy, **how)
        self._saved_source = self.opponent if isinstance(self.opponent, Stateful) else None
        self._place = np.full(inner.num_lanes, -1)  # [B'] a lane's number among ours, or -1
        self._place[self.lanes] = np.arange(self.num_lanes)
        self._now: EnvStep | None = None  # the step of all lanes to act on; None until it is received
        self._returns = np.zeros(self.num_lanes)  # [B] of the running episodes
        self._put, self._own_actions = make_put(self.action_space), zeros(self.action_space, (self.num_lanes,))
        self._actions = zeros(self.action_space, (inner.num_lanes,))
        self._observations = zeros(self.observation_space, (self.num_lanes,))
        self._rewards = np.zeros(self.num_lanes, np.float32)
        self._flags = tuple(np.zeros(self.num_lanes, np.bool_) for _ in range(4))  # terminated, truncated, episode_starts, valid
        self._seen, self._done = tree_leaves(self._observations), list(zip(tree_leaves(self._actions), tree_leaves(self._own_actions)))

    @property
    def playing(self) -> tuple[str | None, ...]:
        """[E] the name of each copy's opponent; None before its first episode."""
        return tuple(self._opponents.names)

    @property
    def inexact(self) -> Sequence[str]:
        """What of the environments a checkpoint cannot restore; the opponents it can."""
        return self.inner.inexact

    @property
    def exact(self) -> bool:
        """Whether `load_state_dict` restores everything exactly."""
        return not self.inexact

    def reset(self, seeds: Sequence[int] | None = None, indices: Sequence[int] | None = None) -> EnvStep:
        """Begin new episodes in the copies `indices` (all by default) against newly drawn opponents."""
        step = self.inner.reset(seeds, indices)
        copies = list(range(self.num_envs)) if indices is None else [int(index) for index in indices]
        if seeds is not None and len(copies) == self.num_envs:
            self._opponents.restart()
        self._opponents.draw(copies)
        self._now = step
        begins = step.episode_starts.reshape(self.num_envs, -1).all(axis=1)  # [E] not where an agent joins a running episode
        self._returns[np.repeat(begins, self.lanes_per_copy)] = 0.0
        return self._own_step(step)

    def send(self, actions: Tree) -> None:
        """Start one step with our actions [B, *act]; the opponents act on what they see."""
        now = self._now
        if now is None:
            raise EnvError("nothing to act on: the environments were not reset, or a step was not received; call reset() or recv()")
        self._put(actions, self._own_actions)
        for target, own in self._done:
            target[self.lanes] = own
        self._now = None
        self._opponents.act(now, self._actions)
        self.inner.send(self._actions)

    def recv(self) -> EnvStep:
        """Wait for the step that `send` started."""
        step = self.inner.recv()
        self._now = step
        self._returns += step.rewards[self.lanes]
        return self._own_step(step, self._end_episodes(step) if step.ended else ())

    def step(self, actions: Tree) -> EnvStep:
        """`send`, then `recv`."""
        self.send(actions)
        return self.recv()

    def _own_step(self, step: EnvStep, ended: tuple[EndedEpisode, ...] = ()) -> EnvStep:
        """Copy our lanes of a step into arrays of our own."""
        flags = (step.terminated, step.truncated, step.episode_starts, step.valid)
        sources = (*tree_leaves(step.observations), step.rewards, *flags)
        for source, target in zip(sources, (*self._seen, self._rewards, *self._flags)):
            np.take(source, self.lanes, 0, target, "clip")
        shared = () if self.global_state_space is None else {SIDE: self._first, "world": step.global_state}
        terminated, truncated, episode_starts, valid = self._flags
        infos = {name: column[self.lanes] for name, column in step.infos.items()} if step.infos else ()
        return EnvStep(self._observations, self._rewards, terminated, truncated, episode_starts, valid, ended, shared, infos)

    def _end_episodes(self, step: EnvStep) -> tuple[EndedEpisode, ...]:
        """Return our ended episodes, with our team's return; report their results and draw the next opponents."""
        ours: list[EndedEpisode] = []
        copies: dict[int, Mapping[str, float]] = {}  # copy -> the info of our first lane that ended there
        for ended in step.ended:
            place, copy = int(self._place[ended.lane]), ended.lane // self.inner.lanes_per_copy
            copies.setdefault(copy, {})
            if place < 0:
                continue
            first = copy * self.lanes_per_copy
            info: Mapping[str, float] = {**ended.info, "team_return": float(self._returns[first : first + self.lanes_per_copy].sum())}
            shared = () if self.global_state_space is None else {SIDE: self._first[copy], "world": ended.final_global_state}
            ours.append(dataclasses.replace(ended, lane=place, info=info, final_global_state=shared))
            copies[copy] = copies[copy] or info
        for copy, result in copies.items():
            self._opponents.record(copy, result)
            self._returns[copy * self.lanes_per_copy : (copy + 1) * self.lanes_per_copy] = 0.0
        self._opponents.draw(copies)
        return tuple(ours)

    def set_reset_options(self, options: Mapping[str, Any] | None, indices: Sequence[int] | None = None) -> None:
        """Set the options for the copies' next resets."""
        self.inner.set_reset_options(options, indices)

    def call(
        self, name: str, *arguments: Any, indices: Sequence[int] | None = None, at_reset: bool = True, **keywords: Any
    ) -> list[Any] | None:
        """Call a method of the environment in some copies, before their next resets or now: see `LaneVectorEnv.call`."""
        inner: Any = self.inner
        return inner.call(name, *arguments, indices=indices, at_reset=at_reset, **keywords)  # type: ignore[no-any-return]

    def has_method(self, name: str) -> bool:
        """Whether `call` can call a method of this name."""
        inner: Any = self.inner
        return bool(inner.has_method(name))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the environments, the opponents and their source."""
        return {
            "inner": self.inner.state_dict(),
            "lanes": self.lanes.copy(),
            "returns": self._returns.copy(),
            "opponents": self._opponents.state_dict(),
            "source": None if self._saved_source is None else self._saved_source.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore; `reset(indices=())` then returns our lanes as they are."""
        if not np.array_equal(state["lanes"], self.lanes):
            raise ConfigError("the saved game was played in other lanes; use the same opponent.sides and env.num_envs")
        if self._saved_source is not None and state["source"] is not None:
            self._saved_source.load_state_dict(state["source"])
        self.inner.load_state_dict(state["inner"])
        self._opponents.load_state_dict(state["opponents"])
        self._returns = np.array(state["returns"], np.float64)
        self._now = None

    def close(self) -> None:
        """Close the inner env; safe to call twice."""
        self.inner.close()


def _check_lanes(inner: VectorEnv, lanes: Sequence[int] | Array) -> np.ndarray:
    """Check that our lanes [B] are equally many in each copy, and leave some to the opponent."""
    ours = np.asarray(lanes, np.int64)
    inside = ours.ndim == 1 and len(ours) > 0 and (np.diff(ours) > 0).all() and ours[0] >= 0 and ours[-1] < inner.num_lanes
    counts = np.bincount(ours // inner.lanes_per_copy, minlength=inner.num_envs) if inside else np.zeros(1, np.int64)
    if not inside or counts.min() != counts.max() or not 0 < counts[0] < inner.lanes_per_copy:
        raise ConfigError(
            f"our lanes must be sorted, from 0 to {inner.num_lanes - 1}, and equally many in each of {inner.num_envs} copies of "
            f"{inner.lanes_per_copy} lanes, with some left for the opponent; got {ours.tolist()!s:.100} (see team_lanes)"
        )
    return ours


class RandomActor:
    """Draws legal choices and bounded numbers uniformly, unbounded numbers from a standard normal."""

    def __init__(self, action_space: Space) -> None:
        self.action_space = action_space
        self._layout = action_layout(action_space, "clip")
        low, high = self._layout.low.astype(np.float64), self._layout.high.astype(np.float64)
        self._bounded = np.isfinite(low) & np.isfinite(high)  # [D]
        self._low, self._width = np.where(self._bounded, low, 0.0), np.subtract(high, low, where=self._bounded, out=np.ones_like(low))
        self._log_width = np.log(np.maximum(self._width, np.finfo(np.float64).tiny))

    def initial_state(self, num_lanes: int) -> Tree:  # noqa: ARG002 - the protocol's
        """Return the empty state: there is no memory."""
        return ()

    def act(
        self,
        observations: Tree,
        state: Tree,
        episode_starts: Array,
        rng: np.random.Generator,
        *,
        deterministic: bool = False,  # noqa: ARG002 - the protocol's
    ) -> PolicyStep:
        """Draw one legal action per lane."""
        layout, lanes = self._layout, len(episode_starts)
        masked = layout.num_logits and isinstance(observations, dict) and MASK_KEY in observations
        mask = encode_mask(layout, observations[MASK_KEY]) if masked else None
        flat = np.zeros((lanes, layout.num_outputs), np.float32)
        choices, normal, _ = distributions.sample(layout, flat, flat[:1, layout.num_logits :].reshape(-1), mask, rng)
        numbers = np.where(self._bounded, self._low + self._width * rng.random(normal.shape), normal).astype(layout.low.dtype)
        legal = np.ones((lanes, layout.num_logits), bool) if mask is None else mask
        choice_log_probs = np.zeros(lanes)  # [B] minus the log of the number of legal choices, over all groups
        for group in layout.groups:
            choice_log_probs -= np.log(legal[:, group].sum(-1))
        normal_log_probs = -0.5 * normal * normal - distributions.HALF_LOG_2PI  # [B, D]
        log_probs = choice_log_probs + np.where(self._bounded, -self._log_width, normal_log_probs).sum(-1)
        actions = layout.unflatten(choices, numbers, sampled=True)
        env_actions = layout.unflatten(choices, distributions.to_env(layout, numbers))
        return PolicyStep(actions, env_actions, log_probs.astype(np.float32), state)


def make_actor(name: str, action_space: Space, env_id: str, kwargs: Mapping[str, Any] | None = None) -> Actor:
    """Make the actor of that name in a world: random, heuristic, or heuristic:0.5 for one of that skill."""
    kind, skill = read_opponent(name)
    if kind == "random":
        return RandomActor(action_space)
    make_heuristic = heuristic_of(env_id)
    if make_heuristic is None:
        raise ConfigError(f"{env_id} has no heuristic to play against; use {team_worlds()}, or random, a pool of policies, or self_play")
    return make_heuristic(kwargs or {}, skill)
