"""Exact resume: environments with `get_state` and `set_state` need no replay; others are compared after it.

Also what else an environment is asked for besides `reset` and `step`: its wrappers, and methods that are called by name.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import gymnasium as gym
import numpy as np
from gymnasium import wrappers

from inchworm.core.errors import EnvError, InchwormError, describe_error

Env: TypeAlias = gym.Env[Any, Any]
"""What copies are made of. A factory may also make a PettingZoo environment; it goes through here as a `Team`."""

REFUSED_WRAPPERS = {
    "NormalizeObservation": "its statistics cross episodes, so none could be replayed; set policy.normalize_observations=true instead",
    "NormalizeReward": "its statistics cross episodes, so none could be replayed; set policy.normalize_values=true instead",
    "Autoreset": "it hides the true final observation; every copy is reset at the end of an episode anyway, so leave it out",
}
"""Gymnasium wrappers with which an episode cannot be replayed, and why."""


@runtime_checkable
class KeepsState(Protocol):
    """An environment, or a wrapper of one, that can save and restore its state.

    The state is plain data: dicts with text keys, lists, tuples, numbers, text, None, and arrays of numbers. After `reset` with the
    episode's seed and options and then `set_state`, in this or another process, it must continue exactly as the saved one would have:
    everything that matters later is in the state, including the random stream.
    """

    def get_state(self) -> Any:
        """Return the state."""

    def set_state(self, state: Any) -> None:
        """Continue from a state."""


_PASS_ON = (
    wrappers.OrderEnforcing,
    wrappers.PassiveEnvChecker,
    wrappers.ClipAction,
    wrappers.RescaleAction,
    wrappers.ClipReward,
    wrappers.DtypeObservation,
    wrappers.FilterObservation,
    wrappers.FlattenObservation,
    wrappers.GrayscaleObservation,
    wrappers.RescaleObservation,
    wrappers.ReshapeObservation,
    wrappers.ResizeObservation,
)
"""Wrappers without state. A time limit has its count, which is saved here."""


class Restore(NamedTuple):
    """A running episode by its saved state."""

    copy: int
    seed: int
    options: Any
    state: Any


class StateKeeper:
    """Reads and sets the state of one copy: its environment's own, and what the time limits around it have counted."""

    def __init__(self, env: KeepsState, limits: Sequence[wrappers.TimeLimit[Any, Any]]) -> None:
        self._env, self._limits = env, limits

    def get(self) -> dict[str, Any]:
        """{"state": a copy of it}, or {"why": why it cannot be saved}."""
        from inchworm.core.tensor_file import flatten_tree, unflatten_tree  # late: most workers do not need it, and start sooner

        try:
            arrays, structure = flatten_tree({"env": self._env.get_state(), "elapsed": [limit._elapsed_steps for limit in self._limits]})
        except (TypeError, ValueError) as error:
            return {"why": f"get_state of {type(self._env).__name__} gave what a file cannot hold: {error}"}
        invalid = [name for name, array in arrays.items() if array.dtype.kind not in "biuf"]
        if invalid:
            return {"why": f"get_state of {type(self._env).__name__} gave arrays that are not of numbers: {invalid}"}
        return {"state": unflatten_tree({name: array.copy() for name, array in arrays.items()}, structure)}

    def set(self, state: Mapping[str, Any]) -> None:
        """Restore what `get` returned."""
        self._env.set_state(state["env"])
        for limit, elapsed in zip(self._limits, state["elapsed"], strict=True):
            limit._elapsed_steps = elapsed


def refuse_stateful_wrappers(env: Env) -> None:
    """Raise if a wrapper carries state from one episode to the next."""
    for wrapper in wrapper_chain(env):
        reason = REFUSED_WRAPPERS.get(type(wrapper).__name__)
        if reason is not None and type(wrapper).__module__.startswith("gymnasium."):
            raise EnvError(f"the wrapper {type(wrapper).__name__} is refused: {reason}")


def wrapper_chain(env: Any) -> Iterator[Any]:
    """The environment or vector env with its wrappers, outermost first, the world itself last."""
    while isinstance(env, gym.Wrapper | gym.vector.VectorWrapper):
        yield env
        env = env.env
    yield env


def find_state_keeper(env: Any) -> StateKeeper | None:
    """The outermost layer with `get_state` and `set_state`, if no wrapper around it has a state that matters."""
    limits: list[wrappers.TimeLimit[Any, Any]] = []
    for layer in wrapper_chain(env):
        if isinstance(layer, KeepsState):
            return StateKeeper(layer, limits) if accepts(layer.get_state) and accepts(layer.set_state, None) else None
        if type(layer) is wrappers.TimeLimit:
            limits.append(layer)
        elif type(layer) not in _PASS_ON and not type(layer).__module__.startswith("gymnasium.wrappers.vector"):
            return None
    return None


def pack_tree(tree: Any) -> tuple[dict[str, Any], bytes]:
    """A tree of plain data and arrays as header and raw bytes of a message."""
    from inchworm.core.tensor_file import flatten_tree

    arrays, structure = flatten_tree(tree)
    listed = [(name, array.dtype.str, array.shape) for name, array in arrays.items()]
    return {"structure": structure, "arrays": listed}, b"".join(array.tobytes() for array in arrays.values())


def unpack_tree(header: Mapping[str, Any], raw: bytes) -> Any:
    """The tree that `pack_tree` packed."""
    from inchworm.core.tensor_file import unflatten_tree

    arrays, start = {}, 0
    for name, dtype, shape in header["arrays"]:
        arrays[name] = np.frombuffer(raw, dtype, int(np.prod(shape)), start).reshape(shape).copy()
        start += arrays[name].nbytes
    return unflatten_tree(arrays, header["structure"])


def why_not_restored(saved: Mapping[str, Any], result: tuple[float, int] | None, seen: str, *, takes_seeds: bool = True) -> str | None:
    """Why a copy is not in its saved state, or None if it is.

    `result` is the return and length of the restored episode, None if it was neither replayed nor set; `seen` the hash of what it shows.
    """
    if saved["episode"] < 0:
        return None
    if result is None and not takes_seeds:
        return "its state was not saved, and without seeds it cannot be replayed"
    if result is None:
        return f"its episode had {saved['length']} steps, more than collect.max_replay_steps kept"
    if result != (saved["episode_return"], saved["length"]):
        return f"replaying its actions gave return and length {result}, but {(saved['episode_return'], saved['length'])} was saved"
    if seen != saved["observation_hash"]:
        return "replaying its actions gave a different observation; is the environment deterministic?"
    return None


def accepts(function: Callable[..., Any], *arguments: Any, **named: Any) -> bool:
    """Whether a function can be called with these arguments: one of the expected name may mean something else."""
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError:
        return False
    except ValueError:  # some built-in callables have no signature
        pass
    return True


# Methods of an environment that are called by name in every copy, such as `set_difficulty` and `set_task`.
#
# What changes the task is kept with the reset options, and called before every reset: an episode is a function of its seed, options, calls
# and actions, so that a resumed run, a replay and a rebuilt worker repeat it. The options that the environment sees hold nothing of this.

CALLS = "inchworm.calls"
"""Key of reset options: the methods to call before the reset, each as [name, arguments, keywords], the latest call of each name."""

LEVEL = "inchworm.level"
"""Key of reset options: a number that an episode's last info then has as `level`, such as the curriculum's level."""


def env_options(options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The reset options that the environment sees; None if there are none."""
    if not options or (CALLS not in options and LEVEL not in options):
        return None if options is None else dict(options)
    return {key: value for key, value in options.items() if key not in (CALLS, LEVEL)} or None


def with_call(options: Mapping[str, Any] | None, call: Sequence[Any]) -> dict[str, Any]:
    """Reset options with one more call, which replaces an earlier one of the same method."""
    kept = [list(one) for one in (options or {}).get(CALLS, ()) if one[0] != call[0]]
    return {**(options or {}), CALLS: [*kept, list(call)]}


def make_calls(env: Any, options: Mapping[str, Any], where: Callable[[], str]) -> None:
    """Make the calls that reset options hold."""
    for name, arguments, keywords in options.get(CALLS, ()):
        call_method(env, name, arguments, keywords, where)


def call_method(env: Any, name: str, arguments: Sequence[Any], keywords: Mapping[str, Any], where: Callable[[], str]) -> Any:
    """Call a method of one copy; an error names the copy and the call."""
    try:
        return find_method(env, name)(*arguments, **keywords)
    except (InchwormError, KeyboardInterrupt):
        raise
    except BaseException as error:  # an environment may raise anything, also SystemExit
        raise EnvError(f"{where()}: {name} raised {describe_error(error)}") from error


def find_method(env: Any, name: str) -> Callable[..., Any]:
    """The method of an environment, or of a wrapper around it; an error names those that are similar."""
    found = None
    for layer in _layers(env):
        found = getattr(layer, name, None)
        if callable(found) and not name.startswith("_"):
            return found  # type: ignore[no-any-return]
    problem = "is private" if name.startswith("_") else "is not a method" if found is not None else "does not exist"
    known = sorted({each for layer in _layers(env) for each in dir(layer) if not each.startswith("_")})
    near = difflib.get_close_matches(name, known, n=1)
    raise EnvError(f"{name} of {type(env.unwrapped).__name__} {problem}" + (f"; did you mean {near[0]}?" if near else ""))


def _layers(env: Any) -> list[Any]:
    """The environment with its wrappers, outermost first."""
    layers = [env]
    while layers[-1] is not env.unwrapped and getattr(layers[-1], "env", None) is not None:
        layers.append(layers[-1].env)
    return layers


def plain_result(value: Any, name: str) -> Any:
    """What a method returned, as plain data that a message can hold."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain_result(item, name) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain_result(item, name) for key, item in value.items()}
    raise EnvError(f"{name} returned {type(value).__name__}; a method that is called in all copies returns numbers, text, lists or dicts")
