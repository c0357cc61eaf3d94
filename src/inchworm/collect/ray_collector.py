"""Collectors as actors of a Ray cluster, on this machine or on many. The weights are put once for all, and a rollout is one message."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import socket
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from inchworm.collect.group import CollectorGroup
from inchworm.collect.host import STATE_SHARE, Answer, CollectorEnvs, Failed, Host, Job, Recipe, Share
from inchworm.config.sections import CollectConfig
from inchworm.core.errors import ConfigError, InchwormError, MissingExtraError, WorkerError, describe_error, error_text
from inchworm.core.protocols import Actor
from inchworm.core.types import Weights
from inchworm.env.workers.process import TEXT_LIMIT, WorkerDied, describe_warning, repeat_warning
from inchworm.env.workers.program import format_traceback

CONNECT_SECONDS = 5.0
"""How long a cluster's address may take to accept a connection; Ray itself would try for a minute."""
_GRACE_SECONDS = 2.0


def import_ray() -> Any:
    """Ray, or the pip line to type."""
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError('collect.engine=ray needs Ray, which is not installed; type: pip install "inchworm[ray]"') from error
    return ray


def connect(address: str | None, num_cpus: float) -> bool:
    """Connect this process to a cluster, or start one on this machine with these CPUs; return whether it was started here."""
    ray = import_ray()
    if ray.is_initialized():
        return False
    address = address or os.environ.get("RAY_ADDRESS")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address is None or address == "local":
        cpus = max(os.cpu_count() or 1, math.ceil(num_cpus))
        with warnings.catch_warnings(), _loopback_only():
            warnings.simplefilter("ignore")  # about settings of other versions of Ray
            ray.init("local", num_cpus=cpus, include_dashboard=False, **quiet)
        return True
    nothing = f"there is no Ray cluster at {address}"
    start = "start one with `ray start --head`, or leave collect.ray_address out for one that is started for the run"
    host = "localhost"
    if address != "auto":
        host, colon, port = address.removeprefix("ray://").rpartition(":")
        if not colon or not port.isdecimal():
            raise ConfigError(f"collect.ray_address={address!r:.200} is not host:port or auto")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS) as connection:
                found = os.environ.get("RAY_USE_TLS", "0") != "0" or _speaks_grpc(connection)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"{nothing}: {error}; {start}") from None
        if not found:
            raise ConfigError(f"{nothing}, but something else; {start}")
    try:
        # Otherwise Ray would look for a cluster on 127.0.0.1 at this machine's other address, and for minutes.
        with _loopback_only() if host.startswith(("127.", "localhost", "[::1]")) else contextlib.nullcontext():
            ray.init(address, **quiet)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        token = "" if os.environ.get("RAY_AUTH_MODE") == "token" else "if it requires a token, set RAY_AUTH_MODE=token; "
        raise ConfigError(f"cannot join a Ray cluster at {address}: {error_text(error, 300)}; {token}{start}") from None
    return False


def _speaks_grpc(connection: socket.socket) -> bool:
    """Whether a server answers the beginning of an HTTP/2 connection with its settings, as those of Ray do (RFC 9113, section 3.4)."""
    settings = b"\0\0\0\x04\0\0\0\0\0"  # a frame of length 0 and type 4, in stream 0
    connection.settimeout(CONNECT_SECONDS)
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
    answer = connection.recv(9)
    return len(answer) > 3 and answer[3] == settings[3]


@contextlib.contextmanager
def _loopback_only() -> Iterator[None]:
    """Let a cluster that is started inside listen on 127.0.0.1 alone, as Ray does by default on macOS, but not on Linux."""
    name, constants = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", cast(Any, importlib.import_module("ray._private.ray_constants"))
    variable, constant = os.environ.get(name), getattr(constants, "ENABLE_RAY_CLUSTER", True)
    os.environ[name], constants.ENABLE_RAY_CLUSTER = "0", False  # for the cluster's processes, and for this one
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = constant
        if variable is None:
            del os.environ[name]
        else:
            os.environ[name] = variable


class CollectorActor:
    """A collector where Ray has placed it. Each method returns its answer, with the warnings that came up; errors are answers too."""

    def __init__(self, packed: bytes, share: Share, path: Sequence[str]) -> None:
        sys.path.extend(each for each in path if each not in sys.path)
        self._packed, self._share = packed, share
        self._recipe: Recipe
        self._host: Host

    def _answer(self, work: Callable[[], Any]) -> tuple[Any, list[dict[str, Any]]]:
        caught: list[dict[str, Any]] = []

        def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any) -> None:
            caught.append(describe_warning(message, category, filename, lineno))

        with warnings.catch_warnings():
            warnings.simplefilter("default")  # the driver's filters decide
            warnings.showwarning = show
            try:
                answer = work()
            except (SystemExit, MemoryError):  # a new process may succeed
                os._exit(1)
            except BaseException as error:
                ours = isinstance(error, InchwormError)
                text = "\n  ".join([str(error) if ours else describe_error(error), *getattr(error, "__notes__", ())])
                answer = Failed(text[:TEXT_LIMIT], "" if ours and error.__cause__ is None else format_traceback(error)[-2 * TEXT_LIMIT :])
        return answer, caught

    def start(self) -> tuple[Any, list[dict[str, Any]]]:
        """Make the collector; return where it runs."""

        def make() -> str:
            self._recipe = Recipe.unpack(self._packed)
            with self._recipe.acting():
                self._host = Host(self._recipe, self._share)
            return f"process {os.getpid()} on {import_ray().util.get_node_ip_address()}"

        return self._answer(make)

    def load(self, number: int, state: Mapping[str, Any]) -> tuple[Any, list[dict[str, Any]]]:
        """Continue before a rollout."""
        return self._answer(lambda: self._host.load(number, state))

    def collect(self, job: Job, weights: Weights | None) -> tuple[Any, list[dict[str, Any]]]:
        """Collect a rollout."""

        def work() -> Answer:
            with self._recipe.acting():
                return self._host.collect(job, weights)

        return self._answer(work)

    def state(self, number: int) -> tuple[Any, list[dict[str, Any]]]:
        """The state before a rollout."""
        return self._answer(lambda: self._host.state(number))

    def imported(self) -> list[str]:
        """The modules of this process."""
        return sorted(sys.modules)

    def close(self) -> None:
        """Close the environments."""
        self._host.close()


@dataclass(eq=False, slots=True)
class RayLink:
    """An actor as the driver knows it."""

    share: Share
    actor: Any
    pending: deque[Any] = field(default_factory=deque)  # references to answers, in the order of the questions
    where: str = ""
    reason: str = ""


class RayEngine:
    """Collectors as actors of a Ray cluster."""

    state_share = STATE_SHARE

    def __init__(
        self,
        num_collectors: int,
        *,
        address: str | None = None,
        cpus: float = 1.0,
        memory: int | None = None,
        resources: Mapping[str, float] | None = None,
        strategy: str = "default",
    ) -> None:
        """Connect to the cluster at `address`, or start one on this machine. The others are what each actor needs."""
        self._ray = ray = import_ray()
        self._owns_cluster = connect(address, num_collectors * cpus)
        self._needs = {"CPU": cpus, **({} if memory is None else {"memory": memory}), **(resources or {})}
        self._packed: Any = None
        # An actor is replaced by the group, which knows its state; Ray would restart an empty one.
        options: dict[str, Any] = {"num_cpus": cpus, "max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": strategy.upper()}
        if memory is not None:
            options["memory"] = memory
        if resources:
            options["resources"] = dict(resources)
        self._actor_class = ray.remote(**options)(CollectorActor)
        has = ray.cluster_resources()
        wanted = {name: num_collectors * amount for name, amount in self._needs.items()}
        lacking = [f"{amount:g} {name} (it has {has.get(name, 0):g})" for name, amount in wanted.items() if amount > has.get(name, 0)]
        if lacking:
            warnings.warn(
                f"{num_collectors} collectors need {', '.join(lacking)} of the Ray cluster; they wait until it grows. Use fewer "
                "collect.num_collectors, or less collect.ray_cpus, ray_memory or ray_resources",
                stacklevel=5,
            )

    @classmethod
    def of(cls, config: CollectConfig) -> RayEngine:
        """The engine of a config."""
        needs: dict[str, Any] = {"cpus": config.ray_cpus, "memory": config.ray_memory, "resources": config.ray_resources}
        return cls(config.num_collectors, address=config.ray_address, strategy=config.ray_strategy, **needs)

    def start(self, recipe: Recipe, share: Share) -> RayLink:
        """Create an actor, which Ray places and starts when it can."""
        if self._packed is None:
            self._packed = self._ray.put(recipe.pack())
        link = RayLink(share, self._actor_class.remote(self._packed, share, sys.path))
        link.pending.append(link.actor.start.remote())
        return link

    def share(self, weights: Weights) -> Any:
        """Put weights into the object store, once for all collectors."""
        return self._ray.put(weights)

    def load(self, link: RayLink, number: int, state: Mapping[str, Any]) -> None:
        """Send a state."""
        link.pending.append(link.actor.load.remote(number, state))

    def collect(self, link: RayLink, job: Job, weights: Any) -> None:
        """Ask for a rollout."""
        link.pending.append(link.actor.collect.remote(job, weights))

    def ask_state(self, link: RayLink, number: int) -> None:
        """Ask for a state."""
        link.pending.append(link.actor.state.remote(number))

    def wait(self, links: Sequence[RayLink], seconds: float) -> list[tuple[RayLink, Answer]]:
        """Take what has arrived, an answer from each actor at most."""
        first = {link.pending[0]: link for link in links if link.pending}
        ready, _ = self._ray.wait(list(first), num_returns=1, timeout=seconds)
        if ready:
            ready, _ = self._ray.wait(list(first), num_returns=len(first), timeout=0)
        answers = []
        for reference in ready:
            link = first[reference]
            link.pending.popleft()
            answer = self._get(link, reference)
            if answer is not None:
                answers.append((link, answer))
        return answers

    def _get(self, link: RayLink, reference: Any) -> Answer | None:
        exceptions = self._ray.exceptions
        try:
            answer, caught = self._ray.get(reference)
        except exceptions.RayTaskError as error:  # not of the environment, whose errors are answers: such as another version of inchworm
            return Failed(error_text(error.cause if error.cause is not None else error, 500), str(error)[-TEXT_LIMIT:])
        except exceptions.RayError as error:  # its process, its node, or the rollout that was on it
            detail = error_text(error, 2_000).rpartition("The actor is dead because ")[2]
            return WorkerDied(link.reason or f"was lost ({type(error).__name__}: {detail[:300]})")
        for warning in caught:
            repeat_warning(warning)
        if isinstance(answer, str):
            link.where = answer
            return None
        found: Answer | None = answer
        return found

    def kill(self, link: RayLink, reason: str) -> None:
        """Kill an actor that hangs; one that Ray could not place yet is an error."""
        if not link.where:
            needs = ", ".join(f"{name} {amount:g}" for name, amount in self._needs.items())
            raise WorkerError(f"Ray has found no place for {link.share}, which needs {needs}; add nodes, or lower collect.ray_cpus")
        link.reason = reason
        self._ray.kill(link.actor, no_restart=True)

    def drop(self, link: RayLink) -> None:
        """End what is left of an actor."""
        link.pending.clear()
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(link.actor, no_restart=True)

    def where(self, link: RayLink) -> str:
        """Its process and node."""
        return link.where or "an actor that Ray has not placed yet"

    def close(self, links: Sequence[RayLink]) -> None:
        """Ask all actors to close their environments, then end them, and the cluster if it was started here."""
        ray = self._ray
        if not ray.is_initialized():
            return
        closing = [link.actor.close.remote() for link in links if link.where]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=_GRACE_SECONDS)
        for link in links:
            self.drop(link)
        self._packed = None
        if self._owns_cluster:
            ray.shutdown()


class RayCollector(CollectorGroup):
    """Collectors on a Ray cluster, in turns with learning: each `collect` acts with the weights that the policy has then.

    `env` is what `make_vector_env` takes, except existing environments. `address` is an existing cluster; by default one is started on
    this machine. Each collector needs `cpus`, and if they are given `memory` (bytes) and other `resources`.
    """

    default_staleness = 0

    def __init__(
        self,
        env: Any,
        policy: Actor,
        *,
        num_collectors: int = 1,
        num_envs: int = 8,
        seed: int = 0,
        staleness: int | None = None,
        address: str | None = None,
        cpus: float = 1.0,
        memory: int | None = None,
        resources: Mapping[str, float] | None = None,
        strategy: str = "default",
        **options: Any,
    ) -> None:
        envs = env if isinstance(env, CollectorEnvs) else CollectorEnvs.of(env, num_envs, seed=seed)
        needs: dict[str, Any] = {"cpus": cpus, "memory": memory, "resources": resources, "strategy": strategy}
        engine = RayEngine(num_collectors, address=address, **needs)
        stale = self.default_staleness if staleness is None else staleness
        super().__init__(envs, policy, engine, num_collectors=num_collectors, seed=seed, staleness=stale, **options)


class AsyncRayCollector(RayCollector):
    """Collectors on a Ray cluster that collect the next rollout while the last one is learned from, by weights `staleness` updates old."""

    default_staleness = 1
