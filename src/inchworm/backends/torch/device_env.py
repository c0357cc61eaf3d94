"""Step 1 of 9 for simulators on a device: vector envs that take and return torch tensors, behind the `VectorEnv` contract.

Isaac Lab, ManiSkill, Brax and others differ in small things, which `DeviceVectorEnv` settles once. `DeviceCollector` steps it without
leaving the device; `send` and `recv` convert to NumPy, for whatever steps from the host, such as an evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from inchworm.backends.torch.network import to_tensor
from inchworm.core.errors import EnvError
from inchworm.core.protocols import Closes, default_agents
from inchworm.core.seeding import derive_seed
from inchworm.core.spaces import Space, build_tree, leaf, leaf_dtype, leaf_shape, leaves, map_tree, path_name
from inchworm.core.types import EndedEpisode, EnvStep, Tree

NO_STATE = "the simulator offers no get_state and set_state, so its episodes begin anew at a resume"
NO_FINAL = (
    "the simulator does not return the last observation of an episode; where a step limit cuts one off, the observation before it is used "
    "in its place"
)
FINALS = ("final_observation", "final_obs")
"""What the last observations are called in the info: by ManiSkill and Gymnasium before 1.0, and by Gymnasium since."""
POLICY_GROUP = "policy"
"""The group of observations that is for the policy, where there are several, as in Isaac Lab."""


class DeviceStep(NamedTuple):
    """One step of all lanes, on the device."""

    observations: Tree
    """[B, *obs] what to act on next: where an episode ended, the first of the next."""
    rewards: Tensor
    """[B] f32"""
    terminated: Tensor
    """[B] bool"""
    truncated: Tensor
    """[B] bool; never true where `terminated` is."""
    final_observations: Tree | None
    """[B, *obs], valid where an episode ended; None where the simulator does not return them."""


class DeviceVectorEnv(Closes):
    """A simulator of `num_envs` lanes: `reset() -> (obs, info)`, `step(actions) -> (obs, rewards, terminated, truncated, info)`.

    It resets a lane in the step in which its episode ends, and then has the last observations in `info["final_observation"]`. The four
    values of older interfaces are read, too, with `info["truncation"]` or `info["time_outs"]`. With `get_state() -> tree of tensors` and
    `set_state(tree)` a run is resumed exactly.
    """

    lanes_per_copy = 1
    global_state_space = None
    agents_leave = turn_based = False
    resets_itself = True
    agents = default_agents(1)
    agent_spaces = ()
    kept_infos = ()

    def __init__(self, env: Any, *, seed: int = 0, first_copy: int = 0) -> None:
        self.env, self._inner = env, getattr(env, "unwrapped", env)
        self.num_envs = self.num_lanes = int(self._inner.num_envs)
        self.device = torch.device(self._inner.device)
        space, self.action_space = (self._space_of(f"{name}_space") for name in ("observation", "action"))
        self._group = POLICY_GROUP if isinstance(space, gym.spaces.Dict) and POLICY_GROUP in space.spaces else None
        self.observation_space = cast(gym.spaces.Dict, space).spaces[self._group] if self._group is not None else space
        self._seed = derive_seed(seed, "simulator", first_copy)
        self._leaves = [(path, leaf_shape(part), torch_dtype(leaf_dtype(part))) for path, part in leaves(self.observation_space)]
        self._keeps_state = all(callable(getattr(self._inner, name, None)) for name in ("get_state", "set_state"))
        self._flaws = [] if self._keeps_state else [NO_STATE]
        self._now: Tree = None  # the newest observations
        self._shown: EnvStep | None = None

    def _space_of(self, name: str) -> Space:
        for owner in (self.env, self._inner):
            for label in (f"single_{name}", name):
                space = getattr(owner, label, None)
                if isinstance(space, gym.Space):
                    return space
        raise EnvError(f"{type(self._inner).__name__} has no single_{name} or {name}; set it to the Gymnasium space of one lane")

    @property
    def inexact(self) -> list[str]:
        """Why a resumed run may differ from an uninterrupted one, a sentence each."""
        return list(self._flaws)

    @property
    def exact(self) -> bool:
        """Whether a resumed run is bit-identical to an uninterrupted one."""
        return not self._flaws

    # ---- on the device

    def begin(self) -> Tree:
        """Reset all lanes and return their first observations [B, *obs]."""
        found = self.env.reset(seed=self._seed) if self._takes_seed() else self.env.reset()
        self._now = self._observations(found[0] if isinstance(found, tuple) else found, "reset()")
        return self._now

    def _takes_seed(self) -> bool:
        code = getattr(getattr(type(self.env), "reset", None), "__code__", None)
        return code is None or "seed" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] or bool(code.co_flags & 8)

    def advance(self, actions: Tree) -> DeviceStep:
        """Step all lanes with actions [B, *act] on the device."""
        found = self.env.step(actions)
        if len(found) == 5:
            observations, rewards, terminated, truncated, info = found
        else:
            observations, rewards, done, info = found
            cut = info.get("truncation", info.get("time_outs"))
            truncated = torch.zeros_like(done) if cut is None else cut
            terminated = done.bool() & ~truncated.bool()
        last = next((info[name] for name in FINALS if name in info), None)
        terminated = terminated.bool().reshape(-1)
        self._now = self._observations(observations, "step()")
        return DeviceStep(
            self._now,
            rewards.reshape(-1).float(),
            terminated,
            truncated.bool().reshape(-1) & ~terminated,
            None if last is None else self._observations(last, "final_observation"),
        )

    def _observations(self, given: Any, where: str) -> Tree:
        """Observations in the form of the space: the policy's group, with its shapes and types."""
        tree = given[self._group] if self._group is not None and isinstance(given, Mapping) else given
        pieces = {}
        for path, shape, dtype in self._leaves:
            value = leaf(tree, path)
            if not isinstance(value, Tensor) or tuple(value.shape) != (self.num_lanes, *shape):
                found = f"{type(value).__name__}{list(value.shape) if isinstance(value, Tensor) else ''}"
                raise EnvError(
                    f"{where} of {type(self._inner).__name__} returned {found} for {path_name(path)!r}, not a tensor of shape "
                    f"{[self.num_lanes, *shape]}; set its observation space to that of one lane"
                )
            pieces[path] = value.to(dtype)
        return pieces[()] if () in pieces else build_tree(self.observation_space, lambda path, _: pieces[path])

    def get_state(self) -> Any:
        """The state of all lanes as a tree of arrays; None where the simulator offers none."""
        return map_tree(lambda part: part.cpu().numpy().copy(), self._inner.get_state()) if self._keeps_state else None

    def set_state(self, state: Any) -> Tree:
        """Restore what `get_state` returned, or begin new episodes; return the observations of the lanes if they begin."""
        if state is None or not self._keeps_state:
            return self.begin()
        self.begin()
        self._inner.set_state(map_tree(lambda part: to_tensor(np.array(part), self.device), state))
        return None

    # ---- from the host

    def reset(self, seeds: Sequence[int] | None = None, indices: Sequence[int] | None = None) -> EnvStep:
        """Begin new episodes in all lanes; with `indices=()` show the lanes as they are. The simulator chooses its episodes itself."""
        del seeds
        if indices is not None and len(indices) == 0 and self._shown is not None:
            return self._shown
        if indices is not None and len(indices) not in (0, self.num_envs):
            raise EnvError(f"the simulator resets itself, so only all {self.num_envs} lanes can be reset, not {list(indices)} alone")
        zeros = np.zeros(self.num_lanes, np.float32)
        self._shown = self._step(self.begin(), zeros, zeros != 0, zeros != 0, np.ones(self.num_lanes, np.bool_), ())
        return self._shown

    def _step(self, observations: Tree, rewards: Any, terminated: Any, truncated: Any, starts: Any, ended: Any) -> EnvStep:
        return EnvStep(to_host(observations), rewards, terminated, truncated, starts, np.ones(self.num_lanes, np.bool_), ended)

    def send(self, actions: Tree) -> None:
        """Take a step; `recv` returns it."""
        step = self.advance(map_tree(lambda part: torch.from_numpy(np.array(part)).to(self.device), actions))
        rewards, terminated, truncated = (part.cpu().numpy() for part in (step.rewards, step.terminated, step.truncated))
        over = terminated | truncated
        lanes = over.nonzero()[0].tolist()
        last = self._last_observations(step)
        ended = tuple(EndedEpisode(lane, 0, map_tree(partial(_row, lane), last), {}) for lane in lanes)
        self._shown = self._step(step.observations, rewards, terminated, truncated, over, ended)

    def _last_observations(self, step: DeviceStep) -> Tree:
        assert self._shown is not None
        if step.final_observations is None:
            self.note_no_finals()
            return self._shown.observations
        return to_host(step.final_observations)

    def note_no_finals(self) -> None:
        """Note that the last observations of episodes are not known."""
        if NO_FINAL not in self._flaws:
            self._flaws.append(NO_FINAL)

    def recv(self) -> EnvStep:
        """The step that `send` took."""
        assert self._shown is not None
        return self._shown

    def step(self, actions: Tree) -> EnvStep:
        """`send`, then `recv`."""
        self.send(actions)
        return self.recv()

    def set_reset_options(self, options: Mapping[str, Any] | None, indices: Sequence[int] | None = None) -> None:
        """Accept no options: the simulator resets itself."""
        del indices
        if options:
            raise EnvError(f"the simulator resets itself, without options; got {dict(options)}")

    def state_dict(self) -> dict[str, Any]:
        """The state of all lanes, if the simulator offers it."""
        shown = None if self._shown is None else {"observations": map_tree(np.array, self._shown.observations)}
        return {"simulator": self.get_state(), "shown": shown, "starts": None if self._shown is None else self._shown.episode_starts.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        begun = self.set_state(state["simulator"])
        observations = state["shown"]["observations"] if begun is None and state["shown"] is not None else self._now
        zeros = np.zeros(self.num_lanes, np.float32)
        starts = np.ones(self.num_lanes, np.bool_) if begun is not None else np.array(state["starts"])
        self._shown = self._step(observations, zeros, zeros != 0, zeros != 0, starts, ())

    def close(self) -> None:
        """Leave the simulator open: it belongs to the caller."""


def _row(lane: int, rows: np.ndarray) -> np.ndarray:
    return np.array(rows[lane])


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """Torch's name of a NumPy dtype."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


def to_host(tree: Tree) -> Tree:
    """Tensors as NumPy arrays of their own."""
    return map_tree(lambda part: part.cpu().numpy().copy() if isinstance(part, Tensor) else np.array(part), tree)


def adapt_device_env(env: Any, *, seed: int = 0, first_copy: int = 0, **_: Any) -> DeviceVectorEnv:
    """A simulator behind the `VectorEnv` contract."""
    return DeviceVectorEnv(env, seed=seed, first_copy=first_copy)
