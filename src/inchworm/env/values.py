"""Step 1 of 9: what an environment returns, values and action masks, is checked against its space and written into its lane's row.

Values are never broadcast or guessed: a value has the shape and kind of its space, or an error says what is wrong. A mask is the
observation key `action_mask`, the result of the environment's `action_masks()` or `get_action_mask()`, or `info["action_mask"]`, in this
order; where the first reset provides one, every step must.
"""

from __future__ import annotations

import copy
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, Self, TypeAlias

import numpy as np
from gymnasium import spaces

from inchworm.core.errors import EnvError, SpaceError
from inchworm.core.spaces import (
    MASK_KEY,
    Path,
    Space,
    build_tree,
    leaf,
    leaf_dtype,
    leaf_shape,
    leaves,
    map_tree,
    mask_sizes,
    mask_space,
    path_name,
    tree_leaves,
    value_range,
)
from inchworm.core.types import Array, Tree
from inchworm.env.restore import accepts, env_options, make_calls

Write: TypeAlias = Callable[[Any, Any, int], None]
"""(value, tree of rows [B, *leaf], lane): check the value and put it into its row."""

_KINDS = {"f": "floating-point", "i": "integer", "u": "integer", "b": "boolean"}
_NOTHING = object()


class Refusal(Exception):
    """A value that does not fit its space. Caught where the lane and the step are known, and raised as an `EnvError` that names them."""


class CastWarning(UserWarning):
    """An environment returns another dtype than its space declares, so every value is cast."""


RESET_KEYWORDS = "reset must accept the keywords seed and options: def reset(self, *, seed=None, options=None)"


def call_reset(env: Any, seed: int, options: Any, where: Callable[[], str]) -> Any:
    """Make the calls that the options hold, then `env.reset`; one without the keywords, as in old versions of Gym, is an error."""
    if options:
        make_calls(env, options, where)
        options = copy.deepcopy(env_options(options))
    try:
        return env.reset(seed=seed, options=options)
    except TypeError:
        if accepts(env.unwrapped.reset, seed=seed, options=options):
            raise
        raise EnvError(f"{where()}: {RESET_KEYWORDS}") from None


def returns_five(env: Any, action: Any) -> bool:
    """Whether an environment's own step returns five values; unknown counts as true.

    To be asked after a step has failed: Gymnasium's wrappers cannot unpack the four values of old versions of Gym.
    """
    try:
        result = env.unwrapped.step(action)
    except (Exception, SystemExit):
        return True
    return not isinstance(result, tuple) or len(result) == 5


def brief(value: Any) -> str:
    """A value as short text for a message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 120 else f"{text[:117]}..."


def make_writer(space: Space, path: Path = ()) -> Write:
    """The function that checks one value of `space` and writes it into its row."""
    if isinstance(space, spaces.Dict):
        by_key = [(key, make_writer(inner, (*path, key))) for key, inner in space.spaces.items()]
        keys = set(space.spaces)

        def write_dict(value: Any, rows: Any, lane: int) -> None:
            if not isinstance(value, dict | Mapping):
                raise refusal(path, f"must be a dict with the keys {sorted(keys)}", value)
            if value.keys() != keys:
                raise refusal(path, f"has the keys {sorted(map(str, value.keys()))}, but its space has {sorted(keys)}")
            for key, put in by_key:
                put(value[key], rows[key], lane)

        return write_dict
    if isinstance(space, spaces.Tuple):
        by_index = [make_writer(inner, (*path, index)) for index, inner in enumerate(space.spaces)]

        def write_tuple(value: Any, rows: Any, lane: int) -> None:
            if not isinstance(value, tuple | list) or len(value) != len(by_index):
                raise refusal(path, f"must be a tuple of {len(by_index)} values", value)
            for put, part, part_rows in zip(by_index, value, rows):
                put(part, part_rows, lane)

        return write_tuple
    list(leaves(space, path))  # refuses kinds of spaces that are not supported
    if not isinstance(space, spaces.Discrete):
        return _array_writer(space, path)
    low, high = map(int, value_range(space))

    def write_choice(value: Any, rows: Any, lane: int) -> None:
        if type(value) is not int:
            scalar = isinstance(value, np.ndarray) and value.shape == () and value.dtype.kind in "iu"
            if not scalar and not isinstance(value, np.integer):
                raise refusal(path, "must be one integer", value)
            value = int(value)
        if not low <= value < high:
            raise refusal(path, f"is outside {space}", value)
        rows[lane] = value

    return write_choice


def _array_writer(space: Space, path: Path) -> Write:
    """The writer of a leaf that is an array: it brings an array of nearly the right dtype to that of the space, or refuses it."""
    shape, dtype = leaf_shape(space), leaf_dtype(space)
    warned = False
    # A Box has no range check here: a rounding error may leave its bounds, so `check_env` looks at them.
    limits = None if isinstance(space, spaces.Box) else value_range(space)

    def write(value: Any, rows: Any, lane: int) -> None:
        # `is` on dtypes is the quick answer for the usual case; what it misses is checked by `adapt`.
        if type(value) is not np.ndarray or value.dtype is not dtype or value.shape != shape:
            value = adapt(value)
        if limits is not None and ((value < limits[0]) | (value >= limits[1])).any():
            raise refusal(path, f"is outside {space}", value)
        rows[lane] = value

    def adapt(value: Any) -> np.ndarray:
        nonlocal warned
        if not isinstance(value, np.ndarray | np.generic) and not (shape == () and isinstance(value, float | int)):
            raise refusal(path, f"must be a NumPy array of shape {shape} and dtype {dtype}", value)
        array = np.asarray(value, dtype if type(value) is float and dtype.kind == "f" else None)
        if array.shape != shape:
            raise refusal(path, f"has shape {array.shape}, but its space has {shape}", value)
        if array.dtype == dtype:
            return array
        given, promised = _KINDS.get(array.dtype.kind), _KINDS.get(dtype.kind)
        if given is None or (given != promised and not (given == "boolean" and isinstance(space, spaces.MultiBinary))):
            raise refusal(path, f"has dtype {array.dtype}, but its space has {dtype}", array)
        with np.errstate(over="ignore"):  # a float that is too large becomes infinite, and that stops the run
            cast = array.astype(dtype)
        if promised == "integer" and not np.array_equal(cast, array):
            raise refusal(path, f"has dtype {array.dtype} and values that {dtype} cannot hold", array)
        if not warned and not np.can_cast(array.dtype, dtype, "safe"):
            warned = True
            warnings.warn(
                f"{path_name(path)} comes as {array.dtype}, but its space has {dtype}: it is cast at every step; "
                f"let the environment return {dtype}",
                CastWarning,
                stacklevel=2,
            )
        return cast

    return write


def real_scalar(value: Any, path: Path = ("reward",)) -> float:
    """A reward, or the number at `path`, as a float; anything but one real number is refused."""
    scalar = isinstance(value, np.ndarray) and value.shape == () and value.dtype.kind in "fiub"
    if not scalar and not isinstance(value, float | int | np.floating | np.integer | np.bool_):
        raise refusal(path, "must be one real number (an array needs shape ())", value)
    try:
        return float(value)
    except OverflowError:
        raise refusal(path, "is an integer too large for a float", value) from None


def flag(value: Any, name: str) -> bool:
    """A `terminated` or `truncated` as a bool."""
    if isinstance(value, bool | np.bool_) or (isinstance(value, np.ndarray) and value.shape == () and value.dtype == np.bool_):
        return bool(value)
    raise refusal((name,), "must be one bool", value)


def info_numbers(info: Mapping[Any, Any]) -> dict[str, float]:
    """The finite numbers of an `info`, as floats; text, arrays and nested values are left out.

    Numbers that are not finite are left out too, because one NaN would make the mean of all episodes NaN.
    """
    if not isinstance(info, Mapping):
        raise refusal(("info",), "must be a dict", info)
    numbers = {}
    for key, value in info.items():
        if isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating):
            try:
                number = float(value)
            except OverflowError:
                continue
            if math.isfinite(number):
                numbers[str(key)] = number
    return numbers


def put_infos(info: Mapping[Any, Any], columns: Mapping[str, Array], lane: int) -> None:
    """Write the numbers of an `info` that are kept into their columns [B]; NaN where it has no such key, or None."""
    if not isinstance(info, Mapping):
        raise refusal(("info",), "must be a dict", info)
    for name, column in columns.items():
        value = info.get(name)
        column[lane] = math.nan if value is None else real_scalar(value, ("info", name))


def refusal(path: Path, what: str, value: Any = _NOTHING) -> Refusal:
    """The exception that says what is wrong with the value at `path`."""
    got = "" if value is _NOTHING else f"; got {type(value).__name__}: {brief(value)}"
    return Refusal(f"{path_name(path)} {what}{got}")


Put: TypeAlias = Callable[[Any, Any], None]
"""(actions [B, *act], rows [B, *act]): check the actions and copy them into the rows."""

Split: TypeAlias = Callable[[Tree], list[Any]]
"""Actions [N, *act] as N elements of the action space that share no memory with them."""


def make_put(space: Space, what: str = "actions") -> Put:
    """The function that checks a batch of actions (or of `what`, with the space's structure) and copies it into rows."""
    paths = [path for path, _ in leaves(space)]
    if not paths:
        raise SpaceError(f"the space of {what}, {space}, has no parts")

    def put(value: Any, rows: Any) -> None:
        if paths[0] and (not isinstance(value, dict | tuple) or len(tree_leaves(value)) != len(paths)):
            raise SpaceError(f"{what} must have the structure of {space}, not {type(value).__name__}")
        for path in paths:
            try:
                part, row = leaf(value, path), leaf(rows, path)
            except (KeyError, IndexError, TypeError):
                raise SpaceError(f"{what} lack the part {path_name(path)!r} of {space}") from None
            if type(part) is np.ndarray and part.dtype is row.dtype and part.shape == row.shape:
                row[...] = part  # the usual case, in the least time; what `is` misses is checked below
                continue
            array, which = np.asarray(part), what + "".join(f"[{key!r}]" for key in path)
            if array.shape != row.shape:
                raise SpaceError(f"{which} have shape {array.shape}, but {row.shape[0]} lanes need {row.shape}")
            try:
                np.copyto(row, array, casting="same_kind")
            except TypeError:
                raise SpaceError(f"{which} have dtype {array.dtype}, but the space has {row.dtype}") from None

    return put


def make_split(space: Space) -> Split:
    """The function that splits a batch of actions into elements: Python ints, new arrays, dicts and tuples of them."""
    if isinstance(space, spaces.Dict):
        keys = list(space.spaces)
        parts = [(key, make_split(space.spaces[key])) for key in keys]
        return lambda batch: [dict(zip(keys, row)) for row in zip(*(split(batch[key]) for key, split in parts))]
    if isinstance(space, spaces.Tuple):
        splits = [make_split(inner) for inner in space.spaces]
        return lambda batch: list(zip(*(split(part) for split, part in zip(splits, batch))))
    if isinstance(space, spaces.Discrete):
        return np.ndarray.tolist
    if leaf_shape(space) == ():
        return lambda batch: [batch[index, ...].copy() for index in range(len(batch))]
    return lambda batch: list(batch.copy())


MaskSource = Literal["key", "action_masks", "get_action_mask", "info"]

_METHODS: tuple[MaskSource, ...] = ("action_masks", "get_action_mask")


MASKS_UNKNOWN = (
    f"info holds {MASK_KEY!r}, which is not known before an environment instance is reset; pass a factory (its class) instead of the "
    "instance, or give it a method action_masks()"
)


class Masks:
    """Fetches the mask that belongs to an observation, and writes it into its lane's row."""

    def __init__(self, source: MaskSource, action_space: Space, ask: Callable[..., Any] | None = None) -> None:
        self.source, self._ask, self._action_space = source, ask, action_space
        sizes = [(path, part, mask_sizes(part)) for path, part in leaves(action_space)]
        # Of each discrete leaf its path, space, number of entries, and where each of its parts begins in the flat mask.
        self._leaves = [(path, part, sum(own), np.array([0, *accumulate(own)][:-1])) for path, part, own in sizes if own]

    @classmethod
    def find(
        cls, observation_space: Space, action_space: Space, method: Callable[[str], Any], probe: Callable[[], Iterable[Any]]
    ) -> Self | None:
        """Where the masks come from; None if there are none.

        `method` returns the environment's method of a name, or None; `probe` resets the environment and returns its infos, if needed.
        """
        if not any(mask_sizes(part) for _, part in leaves(action_space)):
            return None
        if isinstance(observation_space, spaces.Dict) and MASK_KEY in observation_space.spaces:
            given, wanted = observation_space.spaces[MASK_KEY], mask_space(action_space)
            found, needed = ({path: np.prod(leaf_shape(part)) for path, part in leaves(space)} for space in (given, wanted))
            if found != needed:
                raise EnvError(f"the observation key {MASK_KEY!r} has the space {given}, but masks of {action_space} need {wanted}")
            return cls("key", action_space)
        for name in _METHODS:
            ask = method(name)
            if callable(ask):
                return cls(name, action_space, ask)
        in_info = any(isinstance(info, Mapping) and MASK_KEY in info for info in probe())
        return cls("info", action_space) if in_info else None

    def fetch(self, observation: Any, info: Mapping[str, Any], *agent: Any) -> Any:
        """The mask of the latest observation, of an `agent` where there are several; None if there is none."""
        if self._ask is not None:
            return self._ask(*agent)
        return (observation if self.source == "key" else info).get(MASK_KEY)

    def write(self, mask: Any, rows: Tree, lane: int, *, acted_on: bool) -> None:
        """Check a mask and put it into its row. If it is `acted_on`, every discrete part must have a legal action."""
        if mask is None:
            raise Refusal(f"{MASK_KEY} missing: reset() provided it via {self.source}, this step did not")
        for path, space, total, firsts in self._leaves:
            try:
                given = leaf(mask, path)
            except (KeyError, IndexError, TypeError):
                raise refusal((MASK_KEY,), f"must have the structure of {mask_space(self._action_space)}", mask) from None
            name, row = (MASK_KEY, *path), leaf(rows, path)
            flat = given
            if type(given) is not np.ndarray:  # a flat list, or one vector per part
                try:
                    flat = np.concatenate([np.asarray(part).reshape(-1) for part in given])
                except (TypeError, ValueError):
                    raise refusal(name, "must be a vector of true and false", given) from None
            if flat.shape != (total,) and not (flat.size == total and row.shape[1:] == flat.shape):
                raise refusal(name, f"has shape {flat.shape}, but masks of {space} need ({total},)", given)
            flat = flat.reshape(-1)
            # As in the collector, a byte of a boolean array is looked for: that takes a third of the time of any() and all().
            if flat.dtype != np.bool_:
                if flat.dtype.kind not in "iuf" or 1 in (flat != (legal := flat != 0)).tobytes():
                    raise refusal(name, "must hold true and false, or 1 and 0", given)
                flat = legal
            if acted_on and 0 in np.logical_or.reduceat(flat, firsts).tobytes():
                raise refusal(name, f"leaves no legal action in a part of {space}", given)
            row[lane] = flat.reshape(row.shape[1:])


def allow_all(rows: Tree, lane: int) -> None:
    """Write the mask of a state in which no action follows."""
    for part in tree_leaves(rows):
        part[lane] = 1


def random_mask(action_space: Space, rng: np.random.Generator) -> Tree:
    """A mask in which every discrete part has one legal action or more."""
    actions = dict(leaves(action_space))

    def one(path: Path, space: Space) -> np.ndarray:
        mask = rng.integers(2, size=leaf_shape(space)).astype(np.int8)
        first = 0
        for size in mask_sizes(actions[path]):
            mask[first + rng.integers(size)] = 1
            first += size
        return mask

    return build_tree(mask_space(action_space), one)


def is_legal(action_space: Space, action: Any, mask: Tree) -> bool:
    """Whether every discrete part of an action is allowed by its mask."""
    for path, part in leaves(action_space):
        sizes = mask_sizes(part)
        if sizes:
            chosen = np.reshape(np.asarray(leaf(action, path)) - getattr(part, "start", 0), -1).astype(np.int64)
            firsts = np.cumsum([0, *sizes[:-1]])
            if not np.asarray(leaf(mask, path))[firsts + chosen].all():
                return False
    return True


_DIFFERENT = 16
"""Number of different actions drawn where all lanes could share one."""


def legal_action(space: Space, observation: Tree, rng: np.random.Generator) -> Any:
    """A random action that the observation's mask allows, if it has one."""
    masks = observation.get(MASK_KEY) if isinstance(observation, dict) else None

    def one(path: tuple[str | int, ...], part: Space) -> Any:
        sizes = mask_sizes(part)
        if not sizes:
            part.seed(int(rng.integers(2**31)))
            return part.sample()
        mask = np.ones(sum(sizes)) if masks is None else np.reshape(leaf(masks, path), -1)
        pieces = np.split(mask, np.cumsum(sizes)[:-1])
        chosen = np.array([rng.choice(np.flatnonzero(piece)) for piece in pieces])
        start = part.start if isinstance(part, spaces.Discrete | spaces.MultiDiscrete) else 0
        if isinstance(part, spaces.Discrete):
            return int(chosen[0] + start)
        return (chosen.reshape(part.shape or ()) + start).astype(part.dtype)

    return build_tree(space, one)


def put_legal_actions(space: Space, observations: Tree, rng: np.random.Generator, rows: Tree, lanes: Sequence[int]) -> None:
    """Write random legal actions of some lanes into the rows [B, *act]; all lanes see `observations` [B, *obs].

    Without masks what is legal for one lane is legal for all, and many lanes share a few actions, because drawing one is slow.
    """
    masked = isinstance(observations, dict) and MASK_KEY in observations
    drawn = []
    for place, lane in enumerate(lanes):
        if masked or place < _DIFFERENT:
            seen = map_tree(operator.itemgetter(lane), observations)
            drawn.append(tree_leaves(legal_action(space, seen, rng)))
        for row, part in zip(tree_leaves(rows), drawn[place % len(drawn)]):
            row[lane] = part
