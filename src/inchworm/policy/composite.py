"""Step 4 of 9 for several policies: a lane map assigns each lane to a policy, and one composite policy acts for all lanes.

Each part learns separately, from the rollout of its own lanes: see `backends/composite`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import optree

from inchworm.config.sections import TrainingConfig
from inchworm.core.errors import ConfigError, InchwormError
from inchworm.core.padding import OwnPart, unite_agents
from inchworm.core.protocols import Actor, Policy, VectorEnv
from inchworm.core.spaces import Space, form_of, space_from_dict, space_to_dict
from inchworm.core.types import Array, Evaluation, Minibatch, PolicyStep, Tree, Weights
from inchworm.policy.spec import VERSION

if TYPE_CHECKING:
    from inchworm.rollout.rollout import Rollout

Overrides: TypeAlias = Mapping[str, Mapping[str, Any]]
"""By part, the fields of `PPOConfig` that differ from the run's."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,60}")  # it becomes part of file names and metrics
_TAKEN = {"loss", "grad_norm", "timing", "evaluation", "episode", "opponent", "win_rate"}  # what metrics are called already
_SHARED = {"rollout_steps", "sequence_length"}  # one rollout serves all parts


@dataclass(frozen=True, kw_only=True)
class PolicyMap:
    """Several policies, before they are made, and the lanes that each plays: what `PPOTrainer` takes instead of one policy.

    `policies` maps names to anything that the trainer takes as a policy ("mlp", a `PolicyConfig`, a policy, an `Actor`).
    `lane_map` names the policy of each lane of one env copy, or of all lanes.
    """

    policies: Mapping[str, Any]
    lane_map: Sequence[str]
    trainable: Sequence[str] | None = None
    """The policies that learn; None for all that can. The others act and stay as they are."""
    ppo: Overrides = field(default_factory=dict)
    """By name, the fields of `PPOConfig` that differ from the run's, such as `{"red": {"learning_rate": 1e-3}}`."""

    def __post_init__(self) -> None:
        _check_names(self.policies, self.lane_map)

    @classmethod
    def from_config(cls, config: TrainingConfig, agents: Sequence[str]) -> PolicyMap:
        """The policies of a config, each for the agents whose names its patterns match."""
        roles = config.policies.items()
        found = {agent: [name for name, role in roles if any(fnmatchcase(agent, one) for one in role.agents)] for agent in agents}
        everyone = f"the agents are {', '.join(agents)}"
        for agent, names in found.items():
            if len(names) != 1:
                which = f"both policies.{names[0]}.agents and policies.{names[1]}.agents match" if names else "no policy's agents match"
                raise ConfigError(f"{which} the agent {agent}; every agent belongs to one policy, and {everyone}")
        for name, role in config.policies.items():
            for pattern in role.agents:
                if not any(fnmatchcase(agent, pattern) for agent in agents):
                    raise ConfigError(f"policies.{name}.agents={pattern!r:.80} matches no agent; {everyone}")
        return cls(
            policies={name: config.role_policy(name) for name in config.policies},
            lane_map=[found[agent][0] for agent in agents],
            trainable=[name for name, role in config.policies.items() if role.trainable],
            ppo={name: role.ppo for name, role in config.policies.items() if role.ppo},
        )

    def filled(self, policies: Mapping[str, Actor]) -> CompositePolicy:
        """The composite policy of these parts."""
        return CompositePolicy(policies, self.lane_map, trainable=self.trainable, ppo=self.ppo)


class CompositePolicy:
    """Several policies that act as one: `lane_map[i]` names the policy of lane i of a copy.

    Its memory is a dict with the memory of each part that has one, for all lanes; in lanes of other parts it never changes. All parts draw
    from one stream, in their order. Weights are named `part/weight`.
    """

    def __init__(
        self,
        policies: Mapping[str, Actor],
        lane_map: Sequence[str],
        *,
        trainable: Sequence[str] | None = None,
        ppo: Overrides | None = None,
    ) -> None:
        _check_names(policies, lane_map)
        self.policies, self.lane_map = dict(policies), tuple(lane_map)
        self.learned = {name: part for name, part in self.policies.items() if isinstance(part, Policy)}
        """The parts that have weights; a part may be only an `Actor`, such as a heuristic."""
        asked = (trainable,) if isinstance(trainable, str) else trainable
        for name in asked or ():
            if name in self.learned:
                continue
            known = f"there are {', '.join(self.policies)}"
            if name in self.policies:
                known = f"it is a {type(self.policies[name]).__name__}, which cannot learn"
            raise ConfigError(f"trainable names {name!r:.80}, but {known}")
        self.trainable = tuple(name for name in self.learned if asked is None or name in asked)
        self.ppo = {name: dict(fields) for name, fields in (ppo or {}).items()}
        for name, fields in self.ppo.items():
            if name not in self.trainable:
                raise ConfigError(f"ppo names {name!r:.80}, but it does not learn; those that learn: {', '.join(self.trainable) or 'none'}")
            if shared := sorted(_SHARED & fields.keys()):
                raise ConfigError(f"ppo.{shared[0]} belongs to the rollout, which all policies share; set it for the run, not for {name}")
        self.policy_version = 0
        self._with_memory = [name for name, part in self.policies.items() if optree.tree_leaves(part.initial_state(1))]
        self._known_places: dict[int, tuple[dict[str, np.ndarray], np.ndarray]] = {}
        self._own: dict[str, OwnPart] = {}  # of the parts whose spaces are smaller than those of the lanes

    def replaced(self, policies: Mapping[str, Actor]) -> CompositePolicy:
        """The same composite with other parts under the same names, such as NumPy copies that act."""
        twin = CompositePolicy(policies, self.lane_map, trainable=self.trainable, ppo=self.ppo)
        twin.policy_version, twin._own = self.policy_version, self._own
        return twin

    def fit(self, env: VectorEnv) -> None:
        """Check the lane map against an environment. Where its agents differ in spaces, each part will see and send only its own part.

        A part that was made for the common spaces of all lanes keeps these.
        """
        self.check_lanes(env.num_lanes, env.lanes_per_copy)
        whole, own = (env.observation_space, env.action_space), own_spaces(self.lane_map, env)
        for name, part in self.policies.items():
            made_for = getattr(part, "spec", part)
            declared = [getattr(made_for, what, None) for what in ("observation_space", "action_space")]
            if any(space is not None for space in declared) and all(
                space is None or form_of(space) == form_of(common) for space, common in zip(declared, whole)
            ):
                own[name] = whole
        self._own = {name: OwnPart(whole, spaces) for name, spaces in own.items() if spaces != whole}

    def lanes_of(self, name: str, num_lanes: int) -> np.ndarray:
        """The lanes [n] of one part among `num_lanes`."""
        return self._places(num_lanes)[0][name]

    def initial_state(self, num_lanes: int) -> Tree:
        """The memory of each part that has one, for all lanes; `()` if none has."""
        return {name: self.policies[name].initial_state(num_lanes) for name in self._with_memory} or ()

    def act(
        self, observations: Tree, state: Tree, episode_starts: Array, rng: np.random.Generator, *, deterministic: bool = False
    ) -> PolicyStep:
        """Let each part act for its lanes, one after another."""
        places, inverse = self._places(len(episode_starts))
        after: dict[str, Tree] = {}
        steps = []
        for name, lanes in places.items():
            own = optree.tree_map(lambda leaf, lanes=lanes: leaf[lanes], state[name]) if name in self._with_memory else ()
            seen = optree.tree_map(lambda leaf, lanes=lanes: leaf[lanes], observations)
            cut = self._own.get(name)
            seen = seen if cut is None else cut.observations(seen)
            step = self.policies[name].act(seen, own, episode_starts[lanes], rng, deterministic=deterministic)
            if cut is not None:
                padded = cut.padded_actions(step.actions), cut.padded_actions(step.env_actions)
                step = PolicyStep(*padded, step.log_probs, step.state)
            if name in self._with_memory:
                after[name] = optree.tree_map(np.array, state[name])  # the caller owns the old arrays
                for memory, own_memory in zip(optree.tree_leaves(after[name]), optree.tree_leaves(step.state)):
                    memory[lanes] = own_memory
            steps.append(step)
        actions, env_actions, log_probs = (
            optree.tree_map(lambda *parts: np.concatenate(parts)[inverse], *[getattr(step, what) for step in steps])  # [B, …]
            for what in ("actions", "env_actions", "log_probs")
        )
        return PolicyStep(actions, env_actions, log_probs, after or ())

    def value(self, observations: Tree, state: Tree = (), episode_starts: Array = ()) -> np.ndarray:
        """The values [L, B] of observations [L, B, *obs], each by the critic of the lane's part, in reward units."""
        places, inverse = self._places(optree.tree_leaves(observations)[0].shape[1])
        values = []
        for name, lanes in places.items():
            part = self.learned.get(name)
            if part is None:
                raise ConfigError(f"the part {name} is a {type(self.policies[name]).__name__}, an actor without a critic")
            own = optree.tree_map(lambda leaf, lanes=lanes: leaf[lanes], state[name]) if name in self._with_memory else ()
            seen = optree.tree_map(lambda leaf, lanes=lanes: leaf[:, lanes], observations)
            seen = self._own[name].observations(seen) if name in self._own else seen
            starts = episode_starts[:, lanes] if len(episode_starts) else episode_starts
            values.append(np.asarray(part.value(seen, own, starts)))
        return np.concatenate(values, 1)[:, inverse]

    def evaluate(self, minibatch: Minibatch) -> Evaluation:
        """Raise: the sequences of a minibatch belong to one part."""
        del minibatch
        raise ConfigError("a composite policy is learned part by part; use composite.policies[name].evaluate on a minibatch of its lanes")

    def update_statistics(self, rollout: Rollout, returns: Array) -> None:
        """Enter each learning part's own lanes into its normalisers."""
        for name in self.trainable:
            self.learned[name].update_statistics(self.part_of(rollout, name), returns[:, self.lanes_of(name, rollout.num_lanes)])

    def part_of(self, rollout: Rollout, name: str) -> Rollout:
        """A part's lanes of a rollout, with its own memory, observations and actions."""
        own = rollout.select_lanes(self.lanes_of(name, rollout.num_lanes))
        if cut := self._own.get(name):
            fields: Tree = {field: cut.observations(own[field]) for field in ("observations", "cut_observations")}
            fields["actions"] = cut.actions(own.actions)
            for array in optree.tree_leaves(fields):
                array.flags.writeable = False  # as all arrays of a rollout
            own = dataclasses.replace(own, **fields)
        if name not in self._with_memory:
            return dataclasses.replace(own, policy_state=(), state_every=0, cut_state=())
        return dataclasses.replace(own, policy_state=own.policy_state[name], cut_state=own.cut_state[name])

    def get_weights(self) -> Weights:
        """Copies of the weights of all parts, named `part/weight`."""
        named = {f"{name}/{key}": value for name, part in self.learned.items() for key, value in part.get_weights().items()}
        return {**named, VERSION: np.array(self.policy_version, np.int64)}

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Set the weights of all parts; names and shapes must match exactly."""
        shares = {name: weights_of(weights, name) for name in self.learned}
        unknown = sorted(weights.keys() - {VERSION} - {f"{name}/{key}" for name, share in shares.items() for key in share})
        if unknown or VERSION not in weights:
            raise InchwormError(f"these weights do not fit the policies {', '.join(self.learned)}: unknown {unknown or 'version'}")
        for name, part in self.learned.items():
            part.set_weights(shares[name])
        self.policy_version = int(weights[VERSION])

    def check_lanes(self, num_lanes: int, lanes_per_copy: int = 1) -> None:
        """Raise if the lane map does not fit an environment with this many lanes."""
        named = len(self.lane_map)
        fits = named in (lanes_per_copy, num_lanes) if lanes_per_copy > 1 else num_lanes % named == 0
        if not fits:
            choice = (
                f"the {lanes_per_copy} of one copy or all {num_lanes}" if lanes_per_copy > 1 else f"{num_lanes}, or a part that repeats"
            )
            raise ConfigError(f"lane_map names {named} lane(s), but the environment has {num_lanes}; name {choice}")

    def to_dict(self, describe: Callable[[Actor], Any]) -> dict[str, Any]:
        """The composite as plain data, each part by `describe`; checkpoints are compared with it."""
        parts = {name: describe(part) for name, part in self.policies.items()}
        described = {"policies": parts, "lane_map": list(self.lane_map), "trainable": list(self.trainable), "ppo": self.ppo}
        if not self._own:
            return described
        whole = next(iter(self._own.values())).whole
        own = {name: list(map(space_to_dict, part.own)) for name, part in self._own.items()}
        return {**described, "spaces": {"whole": list(map(space_to_dict, whole)), "own": own}}

    def restore_spaces(self, described: Mapping[str, Any]) -> None:
        """Restore what `to_dict` described as `spaces`."""
        observation_space, action_space = map(space_from_dict, described["whole"])
        for name, (seen, acts) in described["own"].items():
            self._own[name] = OwnPart((observation_space, action_space), (space_from_dict(seen), space_from_dict(acts)))

    def _places(self, num_lanes: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The lanes [n] of each part, and the position of each lane [B] in the concatenation of all parts' lanes."""
        if num_lanes not in self._known_places:
            self.check_lanes(num_lanes)
            names = np.array(self.lane_map * (num_lanes // len(self.lane_map)))
            places = {name: np.flatnonzero(names == name) for name in self.policies}
            self._known_places[num_lanes] = places, np.argsort(np.concatenate(list(places.values())))
        return self._known_places[num_lanes]


def own_spaces(lane_map: Sequence[str], env: VectorEnv) -> dict[str, tuple[Space, Space]]:
    """The observation and the action space of each name in a lane map: those that its agents have in common."""
    whole = (env.observation_space, env.action_space)
    names = dict.fromkeys(lane_map)
    if not env.agent_spaces:
        return dict.fromkeys(names, whole)
    places = {name: sorted({lane % env.lanes_per_copy for lane, other in enumerate(lane_map) if other == name}) for name in names}
    agents = {name: {env.agents[place]: env.agent_spaces[place] for place in places[name]} for name in names}
    return {name: whole if len(own) == len(env.agents) else unite_agents(own) for name, own in agents.items()}


def weights_of(weights: Mapping[str, np.ndarray], name: str) -> Weights:
    """The weights of one part, from those of a composite policy."""
    prefix = f"{name}/"
    return {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}


def _check_names(policies: Mapping[str, Any], lane_map: Sequence[str]) -> None:
    if not policies or isinstance(lane_map, str):
        raise ConfigError("several policies need names and a lane map, such as {'red': 'mlp', 'blue': 'mlp'} and ['red', 'blue']")
    for name in policies:
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _TAKEN:
            raise ConfigError(
                f"{name!r:.80} cannot name a policy; use letters, digits, '-', '_' and '.', but not {', '.join(sorted(_TAKEN))}"
            )
    unknown = [name for name in lane_map if name not in policies]
    if unknown:
        raise ConfigError(f"lane_map names {unknown[0]!r:.80}, but the policies are {', '.join(policies)}")
    idle = [name for name in policies if name not in lane_map]
    if idle:
        raise ConfigError(
            f"the policy {idle[0]} has no lane in lane_map, which names {', '.join(dict.fromkeys(lane_map)) or 'none'}; leave it out"
        )
