"""Step 1 of 9: methods of an environment that are called by name in every copy, such as `set_difficulty` and `set_task`.

What changes the task is kept with the reset options, and called before every reset: an episode is a function of its seed, options, calls
and actions, so that a resumed run, a replay and a rebuilt worker repeat it. The options that the environment sees hold nothing of this.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from inchworm.core.errors import EnvError, InchwormError, describe_error

if TYPE_CHECKING:  # reading it takes half of the time in which a worker starts
    from inchworm.config.sections import CurriculumConfig

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


def set_level(env: Any, curriculum: CurriculumConfig, level: int, indices: Sequence[int] | None = None) -> None:
    """Give copies of a vector env a level of a curriculum, from their next resets on: by reset options, or by its method."""
    curriculum.check_level(level, "level")
    method = f"set_{curriculum.option}"
    has_method = getattr(env, "has_method", None)  # a vector env that was written elsewhere may lack it
    calls = not curriculum.levels and has_method is not None and has_method(method)
    options = dict(curriculum.levels[level - 1]) if curriculum.levels else {} if calls else {curriculum.option: level}
    env.set_reset_options({**options, LEVEL: level}, indices)
    if calls:
        env.call(method, level, indices=indices)
