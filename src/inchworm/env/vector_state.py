"""Serves step 2: where somebody else's vectorised world stands, as its arrays, its numbers and its random stream.

A world that steps all lanes as arrays has one stream, so no lane could be replayed alone; but all that it is can be read from its
attributes and put back; or it offers `get_state` and `set_state` itself. Whether that is really all is not taken on trust: a test goes
back and forth once at the start, and a saved state carries a `glimpse` of the step that follows it, which must be seen again after it
is put back.
"""

from __future__ import annotations

import contextlib
import copy as copying
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from inchworm.core.errors import EnvError
from inchworm.core.types import Tree
from inchworm.env.attributes import check_fits, data_of, fill, pack, same_data, strangers_of, unpack
from inchworm.env.make import wrapper_chain
from inchworm.env.restore import KeepsState, StateKeeper
from inchworm.env.step_arrays import carve_rows, map_tree, tree_leaves
from inchworm.env.trial import put_legal_actions

_WATCHERS = "gymnasium.wrappers.vector"
"""Where wrappers come from that change no state of the world: they look, or they transform what passes."""

_CROSSES_EPISODES = {
    "NormalizeObservation": "policy.normalize_observations=true",
    "NormalizeReward": "policy.normalize_values=true",
}
"""The exceptions among them, and what does their work here."""

_WARM_UP, _LOOK = 6, 16


def crossing_wrappers(env: Any) -> list[str]:
    """Sentences about wrappers of Gymnasium whose statistics cross episodes and are not saved."""
    around = list(_chain(env))
    if isinstance(around[-1], gym.vector.SyncVectorEnv):
        around += wrapper_chain(around[-1].envs[0])
    names = [type(layer).__name__ for layer in around if type(layer).__module__.startswith("gymnasium.wrappers")]
    return [
        f"the statistics of the wrapper {name} cross episodes and are not saved; set {_CROSSES_EPISODES[name]} instead"
        for name in names
        if name in _CROSSES_EPISODES
    ]


def _chain(env: Any) -> Iterator[Any]:
    """The vector env with its wrappers, outermost first."""
    while isinstance(env, gym.vector.VectorWrapper):
        yield env
        env = env.env
    yield env


class VectorState:
    """All that a vectorised world is, to be read and put back. `flaws` says in sentences why it could not be."""

    def __init__(self, env: Any) -> None:
        self._parts = [part for part in _chain(env) if not type(part).__module__.startswith(_WATCHERS)]
        self._env = self._parts[0]
        world = self._parts[-1]
        self._name = type(world).__name__
        self._keeper = StateKeeper(world, ()) if isinstance(world, KeepsState) else None
        if self._keeper is not None:
            self._parts.pop()  # its attributes are its own business
        self._rows, _ = carve_rows(self._env.single_observation_space, self._env.single_action_space, env.num_envs, env.num_envs)
        self.flaws = crossing_wrappers(env)
        if not self.flaws:
            self.flaws += self._test()

    def read(self) -> list[dict[str, Any]]:
        """Copies of the data of each layer, by attribute, and what the world says of itself, if it does: plain data and arrays."""
        own = {} if self._keeper is None else self._keeper.get()
        if "why" in own:
            raise EnvError(own["why"])
        return [*self._attributes(), own]

    def _attributes(self) -> list[dict[str, Any]]:
        return [{name: pack(value) for name, value in data_of(part).items()} for part in self._parts]

    def write(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Put back what `read` gave. Only attributes that exist are set, and only to data of the kind and shape that they have."""
        if len(saved) != len(self._parts) + 1 or bool(saved[-1]) != (self._keeper is not None):
            raise EnvError("the saved world is made of other layers than this one")
        for part, values in zip(self._parts, saved):
            present = data_of(part)
            if set(values) - set(present):
                raise EnvError(f"{type(part).__name__} has no attribute {sorted(set(values) - set(present))[0]!r} that was saved")
            for name, packed in values.items():
                check_fits(name, present[name], packed)
        self._assign(saved)
        if self._keeper is not None:
            self._keeper.set(saved[-1]["state"])

    def _assign(self, saved: Sequence[Mapping[str, Any]]) -> None:
        for part, values in zip(self._parts, saved):
            own = vars(part)
            fill([(own[name], packed) for name, packed in values.items()])
            for name, packed in values.items():
                if not same_data(own[name], packed):
                    own[name] = unpack(packed)

    def glimpse(self, observations: Tree, saved: Sequence[Mapping[str, Any]]) -> str:
        """A hash of the step that follows the state `saved`, in which the world stands; it is taken back."""
        digest = hashlib.sha256()
        for array in tree_leaves(tuple(self._step(observations, np.random.default_rng(0))[:4])):
            digest.update(np.ascontiguousarray(array).tobytes())
        self.write(saved)
        return digest.hexdigest()

    def warm_up(self) -> None:
        """Let all attributes come into being that a running world has."""
        observations, _ = self._env.reset(seed=0)
        self._step(observations, np.random.default_rng(0))

    def _step(self, observations: Tree, rng: np.random.Generator) -> tuple[Any, ...]:
        """One step with random legal actions."""
        everyone = range(len(self._rows.rewards))
        put_legal_actions(self._env.single_action_space, observations, rng, self._rows.actions, everyone)
        result: tuple[Any, ...] = self._env.step(map_tree(np.copy, self._rows.actions))
        return map_tree(lambda value: np.array(value) if isinstance(value, np.ndarray) else value, result)  # type: ignore[no-any-return]

    def _test(self) -> list[str]:
        """Whether the world comes back to where it stood and goes on from there with the same bits; it is left as it was found."""
        if self._strangers():
            return self._strangers()
        before, own = self._attributes(), {}
        try:
            observations, _ = self._env.reset(seed=1)
            own = {} if self._keeper is None else self._keeper.get()  # who has not begun may not be able to say where it stands
            same = self._comes_back(observations)
        except Exception as error:  # somebody else's code may raise anything, and then nothing is promised
            return [self._flaw(f"it could not be tested: {type(error).__name__}: {str(error)[:200]}")]
        finally:
            self._assign(before)
            if self._keeper is not None and "state" in own:
                with contextlib.suppress(Exception):  # then the test has found it already
                    self._keeper.set(own["state"])
        if not same:
            return [self._flaw("brought back to a state, it went on in another way: something of it is not in its attributes")]
        return self._strangers()  # once more: a reset may have brought some

    def _strangers(self) -> list[str]:
        names = [f"{name} ({type(value).__name__})" for part in self._parts for name, value in strangers_of(part).items()]
        what = f"its {', '.join(names)} cannot be saved; keep what changes in arrays, numbers and self.np_random, or offer get_state"
        return [self._flaw(what)] if names else []

    def _flaw(self, why: str) -> str:
        return f"{self._name} is not exactly resumable: {why}"

    def _comes_back(self, observations: Tree) -> bool:
        observations, _ = self._go(observations, _WARM_UP)
        # A file holds plain data: what comes back must do so after a journey through it.
        saved = copying.deepcopy(self.read())
        _, first = self._go(observations, _LOOK)
        self.warm_up()
        self.write(saved)
        _, second = self._go(observations, _LOOK)
        return first == second

    def _go(self, observations: Tree, steps: int) -> tuple[Tree, list[bytes]]:
        """Random steps with resets, one of them of a lane that still runs: (where they led, all that was seen)."""
        rng, seen = np.random.default_rng(steps), []
        for index in range(steps):
            observations, rewards, terminated, truncated, _ = self._step(observations, rng)
            seen += [array.tobytes() for array in tree_leaves((observations, rewards, terminated, truncated))]
            over = terminated | truncated
            over[index % len(over)] |= index == steps // 2  # the stream is drawn from, whether an episode ends or not
            if over.any():
                observations, _ = self._env.reset(options={"reset_mask": over})
                observations = map_tree(np.array, observations)
                seen += [array.tobytes() for array in tree_leaves(observations)]
        return observations, seen
