"""Steps 3 to 5 of 9 on a device: act, step and write rows as torch tensors, behind the `Collector` contract.

The rollout's arrays are made on the device before the first step, and learning takes them as they are; `rollout.to_numpy()` is the
ordinary rollout. Random numbers are drawn once for a whole rollout.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor

from inchworm.backends.torch.device_env import DeviceStep, DeviceVectorEnv, to_host, torch_dtype
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.core.errors import ConfigError
from inchworm.core.protocols import Actor
from inchworm.core.seeding import derive_seed
from inchworm.core.spaces import build_tree, leaf_dtype, leaf_shape, leaves, path_name, tree_leaves
from inchworm.core.types import RECENT_EPISODES, EpisodeRecord, ProfilePoint, Tree
from inchworm.policy.file import fingerprint
from inchworm.rollout.fields import action_dtype, bad_number
from inchworm.rollout.rollout import Rollout


class DeviceCollector:
    """Collects rollouts of tensors from a simulator with a built-in `TorchPolicy`. It has the place of a `RolloutCollector`."""

    def __init__(self, vector_env: DeviceVectorEnv, policy: TorchPolicy, *, seed: int = 0, sequence_length: int = 1) -> None:
        self.vector_env, self.follows, self.device = vector_env, policy, vector_env.device
        policy.to(self.device)
        self.env_steps = self.episodes = 0
        self.recent: deque[EpisodeRecord] = deque(maxlen=RECENT_EPISODES)
        self.share_collected = 0.0
        """How much of the running or last `collect` is done, 0 to 1."""
        self.rollout_metrics: dict[str, float] = {}
        """Of the last rollout."""
        self._state_every = sequence_length
        self._generator = torch.Generator(self.device)
        self._generator.manual_seed(derive_seed(seed, "sampling"))
        self._reset_episode_state()

    @property
    def policy(self) -> Actor:
        """The policy, which acts with its current weights."""
        return self.follows

    def _reset_episode_state(self) -> None:
        lanes = self.vector_env.num_lanes
        self._now: Tree = None
        self._starts = torch.ones(lanes, dtype=torch.bool, device=self.device)
        self._returns = torch.zeros(lanes, dtype=torch.float64, device=self.device)
        self._lengths = torch.zeros(lanes, dtype=torch.int64, device=self.device)
        self._state: Tree = optree.tree_map(lambda part: torch.from_numpy(part).to(self.device), self.follows.initial_state(lanes))

    def draw(self, num_steps: int) -> tuple[Tensor, Tensor]:
        """The random numbers of a rollout: uniform ones [T, B, G] for choices, normal ones [T, B, D] for continuous actions."""
        layout, lanes = self.follows.spec.actions, self.vector_env.num_lanes
        own: dict[str, Any] = {"generator": self._generator, "device": self.device}
        uniforms = torch.rand((num_steps, lanes, len(layout.groups)), dtype=torch.float64, **own)
        return uniforms, torch.randn((num_steps, lanes, layout.num_gaussians), dtype=torch.float32, **own)

    def collect(self, num_steps: int) -> Rollout:
        """The next `num_steps` steps of every lane."""
        if num_steps < 1:
            raise ConfigError(f"collect needs 1 step or more, not {num_steps}")
        env, policy = self.vector_env, self.follows
        try:
            if self._now is None:
                self._now = env.begin()
            uniforms, normals = self.draw(num_steps)
            rows = self._allocate(num_steps)
            cuts: list[tuple[Tensor, Tree, Tree]] = []  # places (t, lane), true successors, memory
            ended: list[tuple[Tensor, Tensor, Tensor]] = []  # lanes, returns, lengths
            with torch.no_grad():
                for t in range(num_steps):
                    self._write(rows, t, "observations", self._now)
                    rows["episode_starts"][t] = self._starts
                    if t % self._state_every == 0:
                        self._write(rows, t // self._state_every, "policy_state", self._state)
                    acted = policy.act_on_device(self._now, self._state, self._starts, uniforms[t], normals[t])
                    self._write(rows, t, "actions", acted.actions)
                    rows["log_probs"][t] = acted.log_probs
                    before, self._state = self._now, acted.state
                    step = env.advance(acted.env_actions)
                    rows["rewards"][t], rows["terminated"][t], rows["truncated"][t] = step.rewards, step.terminated, step.truncated
                    self._returns += step.rewards
                    self._lengths += 1
                    self._now, self._starts = step.observations, step.terminated | step.truncated
                    self._end_episodes(t, num_steps, step, before, cuts, ended)
                    self.share_collected = (t + 1) / num_steps
                rollout = self._rollout(rows, cuts, ended)
        except BaseException:
            self._reset_episode_state()  # the positions of the lanes are unknown
            raise
        self.env_steps += num_steps * env.num_lanes
        self.episodes += len(rollout.episodes)
        self.recent.extend(rollout.episodes[-RECENT_EPISODES:])
        self.rollout_metrics = device_metrics(rollout)
        return rollout

    def _allocate(self, num_steps: int) -> dict[str, Any]:
        """Unset arrays of all rows."""
        env = self.vector_env

        def array(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty((num_steps, env.num_lanes, *shape), dtype=dtype, device=self.device)

        recorded = -(-num_steps // self._state_every)
        return {
            "observations": build_tree(
                env.observation_space, lambda _, part: array(*leaf_shape(part), dtype=torch_dtype(leaf_dtype(part)))
            ),
            "actions": build_tree(env.action_space, lambda _, part: array(*leaf_shape(part), dtype=torch_dtype(action_dtype(part)))),
            "log_probs": array(),
            "rewards": array(),
            **{name: array(dtype=torch.bool) for name in ("terminated", "truncated", "episode_starts")},
            "policy_state": optree.tree_map(lambda part: part.new_empty((recorded, *part.shape)), self._state),
        }

    @staticmethod
    def _write(rows: dict[str, Any], row: int, name: str, tree: Tree) -> None:
        if isinstance(tree, Tensor):
            rows[name][row] = tree
            return
        for target, part in zip(tree_leaves(rows[name]), tree_leaves(tree)):
            target[row] = part

    def _end_episodes(self, t: int, num_steps: int, step: DeviceStep, before: Tree, cuts: list[Any], ended: list[Any]) -> None:
        """Note the episodes that ended in a step, and the true successors of its rows: those truncated, and all of the last step."""
        lanes = self._starts.nonzero()[:, 0]  # how many there are is read from the device
        if len(lanes):
            ended.append((lanes, self._returns[lanes], self._lengths[lanes]))
            self._returns[lanes] = 0
            self._lengths[lanes] = 0
        last = t == num_steps - 1
        chosen = (
            torch.arange(self.vector_env.num_lanes, device=self.device) if last else step.truncated.nonzero()[:, 0] if len(lanes) else lanes
        )
        if not len(chosen):
            return
        finals = step.final_observations
        if finals is None and len(lanes):
            finals = before
            self.vector_env.note_no_finals()
        if finals is None:
            shown = self._now
        elif last:  # the successor is the next observation, or where the episode ended its last one
            shown = optree.tree_map(lambda now, end: _where(self._starts, end, now), self._now, finals)
        else:
            shown = optree.tree_map(lambda part: part[chosen], finals)
        places = torch.stack([torch.full_like(chosen, t), chosen], 1)
        cuts.append((places, shown, optree.tree_map(lambda part: part[chosen], self._state)))

    def _rollout(self, rows: dict[str, Any], cuts: list[tuple[Tensor, Tree, Tree]], ended: Sequence[tuple[Tensor, ...]]) -> Rollout:
        """The rollout, whose versions and episodes are on the host."""
        policy, lanes = self.follows, self.vector_env.num_lanes
        places, shown, states = zip(*cuts)
        cut_observations = optree.tree_map(lambda *parts: torch.cat(parts), *shown)
        # A sum is finite only if all its terms are; where it is not, perhaps by overflow, each number is looked at, which takes far longer.
        kept = tree_leaves((rows["observations"], rows["rewards"], cut_observations))
        if not torch.stack([part.sum().isfinite() for part in kept if part.is_floating_point()]).all():
            self._check_finite(rows, cut_observations)
        records: tuple[EpisodeRecord, ...] = ()
        if ended:
            numbers, totals, lengths = (torch.cat(parts).cpu().tolist() for parts in zip(*ended))
            no_info: dict[str, float] = {}  # one for all: thousands of objects would make garbage collection a cost of every rollout
            records = tuple(map(EpisodeRecord, totals, lengths, numbers, repeat(0), repeat(no_info)))
        cut_rows = torch.cat(places).to(torch.int32)
        return Rollout(
            **rows,
            valid=torch.ones_like(rows["terminated"]),
            state_every=self._state_every if tree_leaves(self._state) else 0,
            cut_rows=cut_rows,
            cut_observations=cut_observations,
            cut_state=optree.tree_map(lambda *parts: torch.cat(parts), *states),
            cut_valid=torch.ones(len(cut_rows), dtype=torch.bool, device=self.device),
            policy_version=np.full(lanes, policy.policy_version, np.int32),
            weights_fingerprint=np.full(lanes, fingerprint(policy.get_weights()), np.uint64),
            episodes=records,
        )

    def _check_finite(self, rows: dict[str, Any], cut_observations: Tree) -> None:
        """Raise if a number is not finite, about the first; the steps of its episode are counted within the rollout."""
        named: list[tuple[str, Tensor]] = [("reward", rows["rewards"])]
        for what, tree in (("observation", rows["observations"]), ("final observation", cut_observations)):
            paths = [path for path, _ in leaves(self.vector_env.observation_space)]
            named += [(f"{what} {path_name(path)!r}", part) for path, part in zip(paths, tree_leaves(tree)) if part.is_floating_point()]
        for what, values in named:
            bad = (~values.isfinite()).nonzero()
            if len(bad):
                first = tuple(bad[0, :2].tolist()) if not what.startswith("final") else (int(bad[0, 0]),)
                lane = first[1] if len(first) == 2 else first[0] % self.vector_env.num_lanes
                raise bad_number(what, lane, first[0], values[first].cpu().numpy())

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Act with these weights from the next `collect` on."""
        self.follows.set_weights(weights)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next `collect` depends on besides the weights and, where the simulator offers none, its state."""
        started = self._now is not None
        return {
            "env_steps": self.env_steps,
            "episodes": self.episodes,
            "recent": [[e.episode_return, e.length, e.lane, e.seed, dict(e.info)] for e in self.recent],
            "device": {
                "generator": self._generator.get_state().numpy().copy(),
                "simulator": self.vector_env.get_state() if started else None,
                "started": started,
                **to_host({"starts": self._starts, "returns": self._returns, "lengths": self._lengths, "memory": self._state}),
                **({"now": to_host(self._now)} if started else {}),
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        if "device" not in state:
            raise ConfigError("the state is of environments that were stepped from the host, not on a device; resume it with those")
        self._reset_episode_state()
        self.env_steps, self.episodes = int(state["env_steps"]), int(state["episodes"])
        records = (EpisodeRecord(total, length, lane, seed, info) for total, length, lane, seed, info in state["recent"])
        self.recent = deque(records, maxlen=RECENT_EPISODES)
        saved = state["device"]
        self._generator.set_state(torch.from_numpy(np.array(saved["generator"])))
        if not saved["started"]:
            return
        self._now = self.vector_env.set_state(saved["simulator"])
        if self._now is not None:  # the simulator has no state: new episodes have begun
            return

        def restored(tree: Tree) -> Tree:
            return optree.tree_map(lambda part: torch.from_numpy(np.array(part)).to(self.device), tree)

        self._now, self._state = restored(saved["now"]), restored(saved["memory"])
        self._starts, self._returns, self._lengths = (restored(saved[name]) for name in ("starts", "returns", "lengths"))

    def profile_points(self) -> list[ProfilePoint]:
        """The sections of a collect, for a profile; the remainder is the writing."""
        return [("env", self.vector_env, "begin"), ("env", self.vector_env, "advance"), ("act", self.follows, "act_on_device")]

    def close(self) -> None:
        """Close the environments."""
        self.vector_env.close()


def _where(chosen: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """One lane's value or the other's, each [B, …]."""
    return torch.where(chosen.reshape(-1, *[1] * (one.ndim - 1)), one, other)


def device_metrics(rollout: Rollout) -> dict[str, float]:
    """The metrics of `rollout_metrics` that have a meaning here, read in one transfer."""
    values: dict[str, Tensor] = {}
    scales = [
        (part.reshape(part.shape[0] * part.shape[1], -1).square().sum(0).max() / (part.shape[0] * part.shape[1])).sqrt()
        for part in tree_leaves(rollout.observations)
        if part.is_floating_point() and part.ndim <= 3 and part.numel()
    ]
    if scales:
        values["observation_scale"] = torch.stack(scales).max()
    ended = (rollout.terminated | rollout.truncated).sum()
    if rollout.episodes:
        values["truncated_share"] = rollout.truncated.sum().double() / ended
    numbers = torch.stack(list(values.values())).tolist() if values else []
    return dict(zip(values, numbers))
