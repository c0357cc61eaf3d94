"""Serves the front door: a run at one moment, all that it is, taken from a trainer's parts and given back to them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inchworm.abilities import SaysExact, SaysInexact, Stateful
from inchworm.config import TrainingConfig
from inchworm.errors import ConfigError
from inchworm.manifest import Note
from inchworm.policy.spec import PolicySpec
from inchworm.protocols import VectorEnv
from inchworm.run import FREE_FIELDS, NotExactWarning
from inchworm.train.callbacks import FunctionCallback

FORMAT = 2
_PARTS = {"format", "config", "weights", "learner", "collector", "state"}
_KEYS = {1: _PARTS, 2: _PARTS | {"spec", "callbacks", "trackers"}}

SAYS_NOTHING = "this vector env says nothing of its exactness"


@dataclass(frozen=True, slots=True)
class Moment:
    """All that a run is between two iterations, and what its record must say of it."""

    state: Mapping[str, Any]
    process: Mapping[str, Any]
    note: Note

    @property
    def iteration(self) -> int:
        """How many iterations the run has behind it."""
        return int(self.state["state"]["iteration"])


def inexactness(envs: Sequence[VectorEnv]) -> list[str]:
    """What of the environments a checkpoint cannot bring back, a sentence each, none twice."""
    sentences: list[str] = []
    for env in envs:
        if isinstance(env, SaysInexact):
            sentences += env.inexact
        elif not (isinstance(env, SaysExact) and env.exact is True):
            sentences.append(SAYS_NOTHING)
    return list(dict.fromkeys(sentences))


def binding_config(config: TrainingConfig) -> dict[str, Any]:
    """What of a config a checkpoint is bound to: all but what may change while a run goes on."""
    sections = config.to_dict()
    return {
        section: {name: value for name, value in fields.items() if f"{section}.{name}" not in FREE_FIELDS}
        for section, fields in sections.items()
    }


def check_parts(state: Mapping[str, Any], step: int, spec: Mapping[str, Any] | None) -> None:
    """Refuse a state that is not a trainer's, of another iteration than it says, or of another network."""
    keys = _KEYS.get(state.get("format"))  # type: ignore[arg-type]
    if keys is None or set(state) != keys:
        raise ConfigError(
            f"this is no checkpoint of a trainer that this inchworm knows: it holds {', '.join(sorted(state))} in format "
            f"{state.get('format')}; see TrainingCheckpointer.load_policy for a policy alone"
        )
    if state["state"]["iteration"] != step:
        raise ConfigError(f"the checkpoint of iteration {step} says of itself that it is of iteration {state['state']['iteration']}")
    if state.get("spec") is not None and spec is not None and _completed(state["spec"]) != spec:
        raise ConfigError("the checkpoint is of another network than this trainer's; give the policy that it was made with")


def _completed(spec: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A described network with the fields that came later; a composite's parts each by itself."""
    if spec is None:
        return None
    if "policies" in spec:
        return {**spec, "policies": {name: _completed(part) for name, part in spec["policies"].items()}}
    return PolicySpec.from_dict(spec).to_dict()


def states_of(parts: Sequence[object]) -> list[dict[str, Any]]:
    """What callbacks or trackers remember, with their places and names."""
    held = enumerate(map(_holder, parts))
    return [{"place": place, "name": type(part).__name__, "state": part.state_dict()} for place, part in held if isinstance(part, Stateful)]


def give_states(parts: Sequence[object], saved: Sequence[Mapping[str, Any]], what: str) -> None:
    """Give back what `states_of` took, each to the part in its place; a place that is filled otherwise is told of."""
    for entry in saved:
        part = _holder(parts[entry["place"]]) if 0 <= entry["place"] < len(parts) else None
        if isinstance(part, Stateful) and type(part).__name__ == entry["name"]:
            part.load_state_dict(entry["state"])
            continue
        found = "none" if part is None else f"a {type(part).__name__}"
        warnings.warn(
            f"the checkpoint holds the state of {what} {entry['place'] + 1}, a {entry['name']}, but there is {found} in its place: it is "
            f"left out and the run goes on, but not bit for bit; give the same {what}s in the same order",
            NotExactWarning,
            stacklevel=3,
        )


def _holder(part: object) -> object:
    """Who remembers: behind a plain callable, the callable itself."""
    return part.function if isinstance(part, FunctionCallback) else part
