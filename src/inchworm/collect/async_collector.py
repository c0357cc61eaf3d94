"""Collectors in processes of their own, which keep collecting while this one learns: `python -m inchworm.collect.async_collector`.

Weights and rollouts travel through shared memory, of which a message brings the descriptor, so that no writer waits for a reader.
"""

from __future__ import annotations

import os
import socket
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from inchworm.collect.group import CollectorGroup
from inchworm.collect.host import Answer, Collected, CollectorEnvs, Failed, Host, Job, Recipe, SavedState, Share
from inchworm.core.errors import EnvError, WorkerError
from inchworm.core.protocols import Actor
from inchworm.core.tensor_file import flatten_tree, unflatten_tree
from inchworm.core.types import EpisodeRecord, Weights
from inchworm.env.restore import pack_tree, unpack_tree
from inchworm.env.step_arrays import map_shared, open_shared
from inchworm.env.workers import messages
from inchworm.env.workers.messages import Message
from inchworm.env.workers.process import Waiter, WorkerDied, WorkerProcess, end_processes
from inchworm.env.workers.program import Worker, main
from inchworm.env.workers.rebuild import START_SECONDS
from inchworm.rollout.fields import freeze
from inchworm.rollout.rollout import Rollout

COLLECT, COLLECTED = b"k", b"K"
"""Messages of a rollout, beside those of `env/workers/messages`: SETUP, SET_STATES and GET_STATES are used with a collector's state."""
_ALIGNED = 64  # bytes at which an array begins
_GRACE_SECONDS = 2.0


def share_tree(tree: Any) -> tuple[dict[str, Any], int]:
    """Write a tree of arrays and plain data into shared memory; return its layout and the descriptor of the memory."""
    arrays, structure = flatten_tree(tree)
    listed, size = [], 0
    for name, array in arrays.items():
        listed.append((name, array.dtype.str, array.shape, size))
        size += -(-array.nbytes // _ALIGNED) * _ALIGNED
    descriptor = open_shared(size)
    memory = map_shared(descriptor)
    for array, (_, _, _, start) in zip(arrays.values(), listed):
        np.ndarray(array.shape, array.dtype, memory, start)[...] = array
    return {"structure": structure, "arrays": listed}, descriptor


def map_tree(layout: Mapping[str, Any], descriptor: int) -> Any:
    """The tree that `share_tree` wrote, with read-only arrays in the shared memory, whose descriptor is closed."""
    try:
        memory = map_shared(descriptor)
    finally:
        os.close(descriptor)
    arrays = {name: np.ndarray(tuple(shape), dtype, memory, start) for name, dtype, shape, start in layout["arrays"]}
    return unflatten_tree(freeze(arrays), layout["structure"])


# ---- in the process of a collector


class CollectorWorker(Worker):
    """Serves a collector in its process."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self._host: Host | None = None
        self._recipe: Recipe | None = None

    def _hosted(self) -> Host:
        if self._host is None:
            raise WorkerError("the collector could not be started")  # its error was sent before
        return self._host

    def setup(self, message: Message) -> bytes:
        """Make the collector."""
        sys.path[:] = message.header["path"]
        self._recipe = Recipe.unpack(message.raw)
        with self._recipe.acting():
            self._host = Host(self._recipe, Share(*message.header["share"]))
        return b""

    def set_states(self, message: Message) -> bytes:
        """Continue from a state."""
        state = unpack_tree(message.header["state"], message.raw)
        self._hosted().load(message.header["number"], state)
        return b""

    def collect(self, message: Message) -> bytes:
        """Collect a rollout, and send it."""
        if not message.descriptors:
            raise EnvError("the weights could not be opened: too many open files; raise ulimit -n")
        header, (descriptor,) = message.header, message.descriptors
        weights = map_tree(header["weights"], descriptor)
        assert self._recipe is not None
        with self._recipe.acting():
            found = self._hosted().collect(Job(*header["job"]), weights)
        rollout = found.rollout.to_dict()
        episodes = [(e.episode_return, e.length, e.lane, e.seed, dict(e.info)) for e in found.rollout.episodes]
        layout, memory = share_tree({"rollout": {**rollout, "episodes": episodes}, "state": found.state})
        facts = [found.ticket, found.env_steps, found.episodes, found.seconds, found.env_seconds]
        try:
            socket.send_fds(self._connection, [messages.pack(COLLECTED, {"facts": facts, "layout": layout})], [memory])
        finally:
            os.close(memory)
        return b""

    def get_states(self, message: Message) -> bytes:
        """Return the state before a rollout."""
        number = message.header["number"]
        packed, raw = pack_tree(self._hosted().state(number).state)
        return messages.pack(messages.STATES, {"number": number, "state": packed}, raw)

    def close(self, _: Message) -> bytes:
        """Close the environments."""
        if self._host is not None:
            self._host.close()
        return messages.pack(messages.CLOSED, [])

    _HANDLERS: dict[bytes, Callable[[CollectorWorker, Message], bytes]] = {  # type: ignore[assignment]  # noqa: RUF012
        messages.SETUP: setup,
        messages.SET_STATES: set_states,
        messages.GET_STATES: get_states,
        COLLECT: collect,
        messages.CLOSE: close,
    }


# ---- in the process that learns


class CollectorProcess(WorkerProcess):
    """A collector's process, as its parent sees it."""

    program, name = "inchworm.collect.async_collector", "collector"
    count, timeout_setting = "collect.num_collectors", "collect.timeout if a rollout"
    descriptors = 1


class ProcessEngine:
    """Collectors in processes of this machine."""

    state_share = np.inf

    def __init__(self) -> None:
        self._packed: bytes | None = None
        self._waiter = Waiter(0.0)
        self._by_descriptor: dict[int, CollectorProcess] = {}

    def start(self, recipe: Recipe, share: Share) -> CollectorProcess:
        """Start a process and let it make its collector."""
        if self._packed is None:
            self._packed = recipe.pack()
        link = CollectorProcess(share.index, share.first_copy, share.num_envs, START_SECONDS)
        link.lanes_per_copy = share.lanes_per_copy
        self._by_descriptor[link.connection.fileno()] = link
        self._waiter.register(link.connection.fileno())
        own = [share.index, share.first_copy, share.num_envs, share.lanes_per_copy]
        link.send(messages.pack(messages.SETUP, {"path": sys.path, "share": own}, self._packed))
        return link

    def share(self, weights: Weights) -> _SharedWeights:
        """Write weights into shared memory, once for all collectors."""
        return _SharedWeights(weights)

    def load(self, link: CollectorProcess, number: int, state: Mapping[str, Any]) -> None:
        """Send a state."""
        packed, raw = pack_tree(state)
        link.send(messages.pack(messages.SET_STATES, {"number": number, "state": packed}, raw))

    def collect(self, link: CollectorProcess, job: Job, weights: _SharedWeights | None) -> None:
        """Ask for a rollout."""
        shared = _SharedWeights(None) if weights is None else weights
        own = [job.ticket, job.number, job.num_steps, job.oldest, job.version, job.changes]
        link.send(messages.pack(COLLECT, {"job": own, "weights": shared.layout}), shared.descriptor)

    def ask_state(self, link: CollectorProcess, number: int) -> None:
        """Ask for a state."""
        link.send(messages.pack(messages.GET_STATES, {"number": number}))

    def wait(self, links: Sequence[CollectorProcess], seconds: float) -> list[tuple[CollectorProcess, Answer]]:
        """Receive what has arrived, a message from each process at most."""
        events = self._waiter.wait(seconds)
        ready = [self._by_descriptor[descriptor] for descriptor, _ in events]
        # A process that has exited may have left its socket open to a child of it.
        ready += [link for link in links if not events and link.has_died()]
        answers = []
        for link in ready:
            answer = self._receive(link)
            if answer is not None:
                answers.append((link, answer))
        return answers

    def _receive(self, link: CollectorProcess) -> Answer | None:
        try:
            message = link.receive()
        except WorkerDied:
            return WorkerDied(link.exit_reason())
        except WorkerError as error:
            text = str(error).removeprefix(f"{link}: ")
            return Failed(text, error.__cause__.args[0] if error.__cause__ is not None else "")
        if message.kind == COLLECTED:
            found = map_tree(message.header["layout"], *message.descriptors)
            fields = found["rollout"]
            rollout = Rollout(**{**fields, "episodes": tuple(EpisodeRecord(*episode) for episode in fields["episodes"])})
            ticket, env_steps, episodes, seconds, env_seconds = message.header["facts"]
            return Collected(ticket, rollout, env_steps, episodes, seconds, env_seconds, found["state"])
        if message.kind == messages.STATES:
            return SavedState(message.header["number"], unpack_tree(message.header["state"], message.raw))
        return None  # a warning, which is repeated

    def kill(self, link: CollectorProcess, reason: str) -> None:
        """Kill a process that hangs."""
        link.kill(reason)

    def drop(self, link: CollectorProcess) -> None:
        """Reap a process."""
        descriptor = link.connection.fileno()
        if self._by_descriptor.pop(descriptor, None) is not None:
            self._waiter.unregister(descriptor)
        link.end()

    def where(self, link: CollectorProcess) -> str:
        """Its process id."""
        return f"process {link.process.pid}"

    def close(self, links: Sequence[CollectorProcess]) -> None:
        """Ask all processes to end, and kill those that do not."""
        busy = [link for link in links if link.process.poll() is None]
        for problem in end_processes(list(links), _GRACE_SECONDS if busy else 0.0):
            warnings.warn(problem, stacklevel=4)
        self._by_descriptor.clear()


class _SharedWeights:
    """Weights in shared memory, as long as they may be sent."""

    def __init__(self, weights: Weights | None) -> None:
        self.layout, self.descriptor = share_tree(weights)

    def __del__(self) -> None:
        os.close(self.descriptor)


class AsyncCollector(CollectorGroup):
    """Collectors in processes of this machine, which collect the next rollout while the last one is learned from.

    `env` is what `make_vector_env` takes, except existing environments; `policy` acts in every process with the weights it has here.
    """

    def __init__(
        self,
        env: Any,
        policy: Actor,
        *,
        num_collectors: int = 1,
        num_envs: int = 8,
        seed: int = 0,
        staleness: int = 1,
        **options: Any,
    ) -> None:
        envs = env if isinstance(env, CollectorEnvs) else CollectorEnvs.of(env, num_envs, seed=seed)
        super().__init__(envs, policy, ProcessEngine(), num_collectors=num_collectors, seed=seed, staleness=staleness, **options)


if __name__ == "__main__":
    main(sys.argv[1:], CollectorWorker)
