"""One collector of several: what it is made from, what it is asked and answers, and the engine that runs it in this process."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol, Self

import cloudpickle
import gymnasium as gym
import numpy as np
import optree
from gymnasium.envs.registration import EnvSpec

from inchworm.backends.registry import learning_threads
from inchworm.collect.collector import RolloutCollector
from inchworm.core.errors import ConfigError, EnvError
from inchworm.core.protocols import Actor, Closes, VectorEnv
from inchworm.core.seeding import derive_seed
from inchworm.core.types import Weights
from inchworm.env.episodes import plain_options, plain_value
from inchworm.env.restore import CALLS
from inchworm.env.source import env_source, make_vector_env
from inchworm.env.workers.process import WorkerDied
from inchworm.rollout.rollout import Rollout

MakeEnv = Callable[[int, int, int], VectorEnv]
"""Makes the copies of one collector: called with the number of its first copy, how many there are, and the seed of its own streams."""

STATE_SHARE = 0.1
"""The state of a collector travels with a rollout when it is at most this share of the bytes that were sent since the last one, …"""
STATE_INTERVAL, KEPT_BYTES = 256, 256_000_000
"""… or after this many rollouts, or bytes of weights kept to repeat them. A collector that is replaced repeats those since then. After
many rollouts it does not travel if the actions of running episodes are more than that share: replaying those takes as many env steps as
repeating the rollouts."""


def collector_seed(seed: int, index: int) -> int:
    """The seed of a collector's own streams; the first, which may be the only one, has the run's."""
    return seed if index == 0 else derive_seed(seed, "collector", index)


class CollectorEnvs(Closes):
    """The env copies of several collectors, as seen from outside: spaces and agents of a `VectorEnv`, which only the collectors step."""

    def __init__(self, make: MakeEnv, num_envs: int, example: VectorEnv, env_id: str | None = None) -> None:
        """`example` is one copy, from which the description is read."""
        spec = None if env_id is None else gym.registry.get(env_id)
        self.spec = spec if spec is not None and not str(spec.entry_point).startswith(("gymnasium.", "ale_py.")) else None
        self.make, self.num_envs, self.num_lanes = make, num_envs, num_envs * example.lanes_per_copy
        self.observation_space, self.action_space = example.observation_space, example.action_space
        self.global_state_space, self.lanes_per_copy = example.global_state_space, example.lanes_per_copy
        self.turn_based, self.resets_itself, self.agents_leave = example.turn_based, example.resets_itself, example.agents_leave
        self.agents, self.agent_spaces, self.inexact = example.agents, example.agent_spaces, list(example.inexact)
        self.kept_infos = example.kept_infos
        self.changes: list[tuple[dict[str, Any] | None, list[int] | None]] = []
        """Reset options and calls that the collectors have not been given yet, with the copies that they are for."""
        self._has_method: Callable[[str], bool] = getattr(example, "has_method", lambda _: False)  # a closed copy still knows its methods

    @classmethod
    def of(cls, env: Any, num_envs: int, num_workers: int = 0, seed: int = 0, **reads: Any) -> Self:
        """The copies of what `make_vector_env` takes, except existing environments; `reads` are its `global_state` and `keep_infos`."""
        source = env_source(env)
        if not source.can_be_copied:
            raise ConfigError(
                f"a {type(source.given).__name__} exists once and cannot be shared by collectors; give an id, an EnvConfig or a factory"
            )

        def make(first_copy: int, copies: int, own_seed: int) -> VectorEnv:
            del own_seed  # nothing but the actor draws
            return make_vector_env(source, copies, num_workers, seed=seed, first_copy=first_copy, **reads)

        with contextlib.closing(make_vector_env(source, 1, 0, **reads)) as example:
            return cls(make, num_envs, example, source.name if source.is_config else None)

    def set_reset_options(self, options: Mapping[str, Any] | None, indices: Sequence[int] | None = None) -> None:
        """Options that `env.reset` gets from the copies' next reset on, in the rollouts that are begun from now on."""
        self.changes.append((plain_options(options), None if indices is None else [int(index) for index in indices]))

    def call(self, name: str, *arguments: Any, indices: Sequence[int] | None = None, at_reset: bool = True, **keywords: Any) -> None:
        """Call a method of the environment before the copies' next resets, in the rollouts that are begun from now on."""
        if not at_reset:
            raise EnvError(f"{name} cannot be called at once: these env copies are stepped by their collectors")
        if not self.has_method(name):
            raise EnvError(f"the environment has no method {name}")
        made = [name, plain_value(list(arguments), f"{name}: an argument"), plain_value(keywords, f"{name}: an argument")]
        self.changes.append(({CALLS: [made]}, None if indices is None else [int(index) for index in indices]))

    def has_method(self, name: str) -> bool:
        """Whether `call` can call a method of this name."""
        return self._has_method(name)

    def reset(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: the copies are in the collectors."""
        raise EnvError("these env copies are stepped by their collectors; use collect()")

    send = recv = step = state_dict = load_state_dict = reset

    def close(self) -> None:
        """Do nothing: the collectors close their copies."""


@dataclass(frozen=True, slots=True)
class Share:
    """The part of one collector."""

    index: int
    first_copy: int
    num_envs: int
    lanes_per_copy: int

    def __str__(self) -> str:
        first, last = self.first_copy * self.lanes_per_copy, (self.first_copy + self.num_envs) * self.lanes_per_copy - 1
        return f"collector {self.index} ({f'lane {first}' if first == last else f'lanes {first} to {last}'})"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What every collector is made from."""

    make: MakeEnv
    actor: Actor
    seed: int = 0
    sequence_length: int = 1
    threads: int = 1
    """CPU threads with which a collector in another process acts; 0 keeps its default."""
    state_share: float = np.inf
    spec: EnvSpec | None = None
    """The environment as the user's script registered it with Gymnasium."""

    def pack(self) -> bytes:
        """Pickle it for another process."""
        try:
            return cloudpickle.dumps(self)  # type: ignore[no-any-return]
        except Exception as error:  # pickling runs the user's code, which may raise anything
            raise EnvError(
                f"the environment or the policy cannot be sent to other processes ({type(error).__name__}: {error}); use "
                "collect.engine=local, or a function that creates everything it needs itself"
            ) from error

    @staticmethod
    def unpack(data: bytes) -> Recipe:
        """Read what `pack` returned, in a process of the same run."""
        recipe: Recipe = cloudpickle.loads(data)  # of our own driver, over a private socket or Ray
        if recipe.spec is not None:
            gym.registry.setdefault(recipe.spec.id, recipe.spec)
        return recipe

    def acting(self) -> contextlib.AbstractContextManager[None]:
        """Act with its number of threads, as the driver's process does while it trains."""
        return learning_threads(self.threads, "torch" if "torch" in sys.modules else "numpy")


@dataclass(frozen=True, slots=True)
class Job:
    """A rollout to collect, the same for every collector."""

    ticket: int
    """Another one for every job, also for one that repeats a number."""
    number: int
    num_steps: int
    oldest: int
    """The number of the oldest rollout that may have to be collected again."""
    version: int
    changes: tuple[tuple[dict[str, Any] | None, list[int] | None], ...] = ()


class Collected(NamedTuple):
    """A collector's answer to a job."""

    ticket: int
    rollout: Rollout
    env_steps: int
    episodes: int
    seconds: float
    env_seconds: float
    state: dict[str, Any] | None
    """Its state after the rollout, if it was worth sending."""


class SavedState(NamedTuple):
    """A collector's answer to the question for its state before a rollout."""

    number: int
    state: dict[str, Any]


class Failed(NamedTuple):
    """The answer of a collector whose environment, or whose start, raised an error."""

    text: str
    traceback: str


class Host:
    """One collector in the process where it runs. It keeps the states from which it may have to repeat a rollout."""

    def __init__(self, recipe: Recipe, share: Share) -> None:
        self._recipe, self._share = recipe, share
        seed = collector_seed(recipe.seed, share.index)
        env = recipe.make(share.first_copy, share.num_envs, seed)
        try:
            self.collector = RolloutCollector(env, recipe.actor, seed=seed, sequence_length=recipe.sequence_length)
        except BaseException:
            env.close()
            raise
        self._next: int | None = 0  # the rollout that would follow; None in the middle of one
        self._states: dict[int, dict[str, Any]] = {0: self._state_now()}  # before these rollouts
        self._unsent_bytes = self._unsent = 0

    def _state_now(self) -> dict[str, Any]:
        return self.collector.state_dict() | {"recent": []}  # of all collectors together

    def load(self, number: int, state: Mapping[str, Any]) -> None:
        """Continue before a rollout."""
        self._next = None
        self.collector.load_state_dict(state)
        self._next, self._states = number, {number: dict(state)}

    def collect(self, job: Job, weights: Mapping[str, np.ndarray] | None) -> Collected:
        """Collect a rollout with these weights; go back first if it comes earlier than the one that would follow."""
        collector, began = self.collector, time.perf_counter()
        if job.number != self._next:
            self.load(job.number, self._states[job.number])
        self._next = None
        for options, copies in job.changes:
            first = self._share.first_copy
            own = None if copies is None else [each - first for each in copies if 0 <= each - first < self._share.num_envs]
            copies_env: Any = collector.vector_env
            if options is not None and options.keys() == {CALLS}:
                for name, arguments, keywords in options[CALLS]:
                    copies_env.call(name, *arguments, indices=own, **keywords)
            else:
                copies_env.set_reset_options(options, own)
        if weights is not None:
            collector.set_weights(weights)
            actor: Any = self._recipe.actor
            if actor.policy_version != job.version:  # a policy of the user's may not have it among its weights
                actor.policy_version = job.version
        steps, episodes, env_seconds = collector.env_steps, collector.episodes, collector.env_seconds
        rollout = collector.collect(job.num_steps)
        self._next = job.number + 1
        state = self._states[self._next] = self._state_now()
        self._states = {number: known for number, known in self._states.items() if number >= job.oldest}
        self._unsent_bytes, self._unsent = self._unsent_bytes + rollout.nbytes, self._unsent + 1
        kept = 0 if weights is None else self._unsent * sum(array.nbytes for array in weights.values())
        allowed = self._recipe.state_share * self._unsent_bytes
        is_due = self._unsent >= STATE_INTERVAL and _array_bytes(state["vector_env"].get("actions", {})) <= allowed
        small_enough = _array_bytes(state) + 400 * (1 + len(state["starts"])) <= allowed  # with some plain data for each lane
        sends = small_enough or is_due or kept >= KEPT_BYTES
        if sends:
            self._unsent_bytes = self._unsent = 0
        counts = (collector.env_steps - steps, collector.episodes - episodes)
        seconds = time.perf_counter() - began
        return Collected(job.ticket, rollout, *counts, seconds, collector.env_seconds - env_seconds, state if sends else None)

    def state(self, number: int) -> SavedState:
        """The state before a rollout."""
        return SavedState(number, self._states[number])

    def close(self) -> None:
        """Close the environments."""
        self.collector.close()


def _array_bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in optree.tree_leaves(tree) if isinstance(leaf, np.ndarray))


Answer = Collected | SavedState | Failed | WorkerDied


class Engine(Protocol):
    """Where collectors run. A link is one of them; what it is asked is answered in this order, after the answer to `start`, if any."""

    state_share: float
    """See `STATE_SHARE`."""

    def start(self, recipe: Recipe, share: Share) -> Any:
        """Start a collector; return its link."""

    def share(self, weights: Weights) -> Any:
        """Make weights available to all collectors."""

    def load(self, link: Any, number: int, state: Mapping[str, Any]) -> None:
        """Let it continue before a rollout."""

    def collect(self, link: Any, job: Job, weights: Any) -> None:
        """Ask for a rollout, with what `share` returned."""

    def ask_state(self, link: Any, number: int) -> None:
        """Ask for its state before a rollout."""

    def wait(self, links: Sequence[Any], seconds: float) -> list[tuple[Any, Answer]]:
        """Wait for answers, `WorkerDied` for one that has ended; empty after some seconds without any."""

    def kill(self, link: Any, reason: str) -> None:
        """End one that hangs; `reason` is what `WorkerDied` then says."""

    def drop(self, link: Any) -> None:
        """Release what is left of one that has ended."""

    def where(self, link: Any) -> str:
        """In which process it runs, for messages."""

    def close(self, links: Sequence[Any]) -> None:
        """End all, in bounded time."""


class LocalEngine:
    """Collectors in this process, one after another."""

    state_share = np.inf

    def __init__(self) -> None:
        self._asked: deque[tuple[Host, Callable[[], Answer | None]]] = deque()

    def start(self, recipe: Recipe, share: Share) -> Host:
        """Make a collector with a copy of the policy."""
        return Host(dataclasses.replace(recipe, actor=copy.deepcopy(recipe.actor)), share)

    def share(self, weights: Weights) -> Weights:
        """The weights themselves."""
        return weights

    def load(self, link: Host, number: int, state: Mapping[str, Any]) -> None:
        """Restore at once."""
        self._asked = deque(entry for entry in self._asked if entry[0] is not link)
        link.load(number, state)

    def collect(self, link: Host, job: Job, weights: Weights | None) -> None:
        """Collect when it is waited for."""
        self._asked.append((link, lambda: link.collect(job, weights)))

    def ask_state(self, link: Host, number: int) -> None:
        """Answer when it is waited for."""
        self._asked.append((link, lambda: link.state(number)))

    def wait(self, links: Sequence[Host], seconds: float) -> list[tuple[Host, Answer]]:
        """Do the next thing that was asked for; errors are raised as they are."""
        del links, seconds
        link, work = self._asked.popleft()
        answer = work()
        return [] if answer is None else [(link, answer)]

    def forget(self) -> None:
        """Drop what was asked for, after an error."""
        self._asked.clear()

    def kill(self, link: Host, reason: str) -> None:
        """Nothing hangs here while it is waited for."""

    def drop(self, link: Host) -> None:
        """Close it."""
        link.close()

    def where(self, link: Host) -> str:
        """This process."""
        del link
        return "this process"

    def close(self, links: Sequence[Host]) -> None:
        """Close all environments."""
        self.forget()
        for link in links:
            link.close()
