"""ratio == 1 where everything comes together: mask x memory x dict x hybrid x team, with deaths, joins and opponents.

A team policy acts for adjacent lanes whose agents die and join; the learner then gives every valid row the log-prob that it was taken
with, however the rollout is cut into sequences. The last tests see that a wrong memory or a wrong reset would be noticed.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import optree
import pytest
from gymnasium import spaces

pytest.importorskip("pettingzoo")
from inchworm.backends.numpy.learner import NumpyOptimizer
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.backends.torch.checking import evaluated
from inchworm.backends.torch.learner import PPOOptimizer as TorchOptimizer
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.collect.collector import RolloutCollector
from inchworm.collect.opponents import OpponentVectorEnv, team_lanes
from inchworm.config.sections import PolicyConfig, PPOConfig
from inchworm.core.padding import DIMENSIONS_KEY
from inchworm.core.spaces import MASK_KEY, mask_space, with_mask
from inchworm.env.source import make_vector_env
from inchworm.env.values import is_legal
from inchworm.policy.composite import CompositePolicy, own_spaces
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.rollout import Rollout
from inchworm.worlds.skirmish import HeuristicPolicy, SkirmishConfig, SkirmishVectorEnv
from inchworm.worlds.toys import DEATHS, JOINS, Comings

PLANS = {"deaths": DEATHS, "joins": JOINS}
COPIES, STEPS = 3, 19
TOLERANCE = 5e-5
MEMORIES = [("lstm", 1), ("lstm", 2), ("gru", 1), ("gru", 2)]
KINDS = [("mlp", 1), *MEMORIES]


class Party(Comings):
    """`Comings` with any mixture of masks, dict observations and hybrid actions; an illegal action raises."""

    def __init__(self, plan: str, *, masked: bool = True, nested: bool = True, hybrid: bool = True) -> None:
        super().__init__(PLANS[plan])
        self.masked, self.nested, self.hybrid = masked, nested, hybrid

    def action_space(self, agent: str) -> spaces.Space[Any]:
        del agent
        go = spaces.Discrete(3, start=1)
        return spaces.Dict({"go": go, "aim": spaces.Box(-1.0, 1.0, (2,), np.float32)}) if self.hybrid else go

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        seen = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        whole = spaces.Dict({"seen": seen, "phase": spaces.Discrete(4)}) if self.nested else seen
        return with_mask(whole, mask_space(self.action_space(agent))) if self.masked else whole

    def legal(self, agent: str) -> Any:
        mask = self._mask(agent).astype(np.int8)
        return {"go": mask} if self.hybrid else mask

    def _observations(self, agents: Sequence[str]) -> dict[str, Any]:
        return {agent: self._observe(agent, row) for agent, row in super()._observations(agents).items()}

    def _observe(self, agent: str, row: Any) -> Any:
        whole: Any = {"seen": row, "phase": self._now % 4} if self.nested else row
        if not self.masked:
            return whole
        return {**(whole if self.nested else {"observation": row}), MASK_KEY: self.legal(agent)}

    def step(self, actions: Mapping[str, Any]) -> Any:
        for agent, action in actions.items():
            assert self.action_space(agent).contains(action)
            assert not self.masked or is_legal(self.action_space(agent), action, self.legal(agent))
        return super().step({agent: int(action["go"] if self.hybrid else action) for agent, action in actions.items()})


def twins(env: Any, kind: str, layers: int, **options: Any) -> tuple[NumpyPolicy, TorchPolicy]:
    """The same policy twice, to act and to learn, with outputs that depend on what it saw and remembers."""
    config = PolicyConfig(kind=kind, hidden_sizes=(6,), memory_size=5, memory_layers=layers, **options)  # type: ignore[arg-type]
    learner = TorchPolicy(PolicySpec(env.observation_space, env.action_space, config), seed=3)
    weights = learner.get_weights()
    learner.set_weights({**weights, "actor.head.weight": 100 * weights["actor.head.weight"]})
    return NumpyPolicy(learner.spec, learner.get_weights()), learner


def collected(env: Any, actor: Any, steps: int = STEPS) -> Rollout:
    """The second rollout, so that memory and episodes come from before; its memory is recorded at every row."""
    collector = RolloutCollector(env, actor, seed=2, sequence_length=1)
    collector.collect(7)
    return collector.collect(steps)


def gap(learner: TorchPolicy, rollout: Rollout, length: int) -> float:
    logs = evaluated(learner, rollout, length).log_probs
    return float(np.abs(logs - rollout.log_probs)[rollout.valid].max())


def assert_ratio_is_one(learner: TorchPolicy, rollout: Rollout) -> None:
    assert 0 < rollout.num_valid < rollout.valid.size  # some agents were dead or absent
    for length in (1, 4, rollout.num_steps):
        assert gap(learner, rollout, length) <= TOLERANCE, length


@pytest.mark.parametrize(("kind", "layers"), KINDS)
@pytest.mark.parametrize("plan", list(PLANS))
def test_every_combination(kind: str, layers: int, plan: str) -> None:
    for masked, nested, hybrid in itertools.product((False, True), repeat=3):
        with make_vector_env(functools.partial(Party, plan, masked=masked, nested=nested, hybrid=hybrid), COPIES, 0, seed=4) as env:
            actor, learner = twins(env, kind, layers, memory_place="before" if nested else "after")
            assert_ratio_is_one(learner, collected(env, actor))


class Roles(Party):
    """`Party` whose agents differ: the first has two choices more to aim and a shorter view, the second lacks the aim."""

    def action_space(self, agent: str) -> spaces.Space[Any]:
        aim = spaces.Box(-1.0, 1.0, (4 if agent == "agent_0" else 2,), np.float32)
        go = spaces.Discrete(3 if agent == "agent_0" else 4, start=1)
        if not self.hybrid:
            return go
        return spaces.Dict({"go": go} if agent == "agent_1" else {"go": go, "aim": aim})

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        seen = spaces.Box(-np.inf, np.inf, (2 if agent == "agent_0" else 3,), np.float32)
        whole = spaces.Dict({"seen": seen, "phase": spaces.Discrete(4)}) if self.nested else seen
        return with_mask(whole, mask_space(self.action_space(agent))) if self.masked else whole

    def legal(self, agent: str) -> Any:
        mask = np.append(self._mask(agent), agent == "agent_2")[: 3 if agent == "agent_0" else 4].astype(np.int8)
        return {"go": mask} if self.hybrid else mask

    def _observe(self, agent: str, row: Any) -> Any:
        return super()._observe(agent, row[:2] if agent == "agent_0" else row)


def scaled_twins(own: Any, kind: str, config: dict[str, Any]) -> tuple[NumpyPolicy, TorchPolicy]:
    return twins(SimpleNamespace(observation_space=own[0], action_space=own[1]), kind, 1, **config)


@pytest.mark.parametrize("kind", ["mlp", "lstm", "gru"])
@pytest.mark.parametrize("bounds", ["clip", "tanh"])
def test_agents_with_different_spaces_share_a_policy_or_have_their_own(kind: str, bounds: str) -> None:
    lane_map = ["leader", "rest", "rest"]
    config = {"action_bounds": bounds}
    for masked, nested, hybrid in itertools.product((False, True), repeat=3):
        with make_vector_env(functools.partial(Roles, "joins", masked=masked, nested=nested, hybrid=hybrid), COPIES, 0, seed=4) as env:
            actor, learner = twins(env, kind, 1, **config)
            rollout = collected(env, actor)
            assert_ratio_is_one(learner, rollout)
            assert (DIMENSIONS_KEY in rollout.observations) == hybrid
            own = own_spaces(lane_map, env)
            pairs = {name: scaled_twins(own[name], kind, config) for name in own}
            acting = CompositePolicy({name: pair[0] for name, pair in pairs.items()}, lane_map)
            acting.fit(env)
            rollout = collected(env, acting)
            for name, (_, learner) in pairs.items():
                part = acting.part_of(rollout, name)
                part.validate(*own[name])
                assert all(gap(learner, part, length) <= TOLERANCE for length in (1, 4, STEPS))
            leader = acting.part_of(rollout, "leader")
            assert not isinstance(leader.observations, dict) or DIMENSIONS_KEY not in leader.observations


def test_missing_dimensions_count_in_no_log_prob_entropy_or_gradient() -> None:
    with make_vector_env(functools.partial(Roles, "joins"), COPIES, 0, seed=4) as env:
        actor, learner = twins(env, "mlp", 1)
        rollout = collected(env, actor)
    aims = rollout.actions["aim"]
    assert (aims[:, 1::3] == 0).all()
    assert (aims[:, 2::3, 2:] == 0).all()
    assert (aims[:, 0::3] != 0).all()
    everything = {**rollout.observations, DIMENSIONS_KEY: np.ones_like(rollout.observations[DIMENSIONS_KEY])}
    assert gap(learner, dataclasses.replace(rollout, observations=everything), 1) > 100 * TOLERANCE
    both = evaluated(learner, rollout, 1)
    minibatch = SimpleNamespace(**{name: getattr(rollout, name) for name in ("observations", "actions", "policy_state", "episode_starts")})
    reference = actor.evaluate(cast(Any, SimpleNamespace(**vars(minibatch), global_state=(), valid=rollout.valid)))
    np.testing.assert_allclose(both.entropy[rollout.valid], reference.entropy[rollout.valid], atol=1e-5)
    config = PPOConfig(rollout_steps=STEPS, num_minibatches=2, update_epochs=2, learning_rate=1e-2, ent_coef=0.1)
    learners = NumpyOptimizer(actor, config, seed=1), TorchOptimizer(learner, config, seed=1)
    for one in learners:
        one.update(rollout)
    ours, theirs = (one.policy.get_weights() for one in learners)
    for name, weight in ours.items():
        np.testing.assert_allclose(weight, theirs[name], atol=2e-5, err_msg=name)


SMALL = SkirmishConfig(units=("scout", "scout"), width=10.0, height=6.0, wall_pairs=0, max_steps=60)


@pytest.mark.parametrize(("kind", "layers"), MEMORIES)
def test_with_opponents_that_shoot_and_with_one_that_remembers(kind: str, layers: int) -> None:
    inner = SkirmishVectorEnv(SMALL, 2, seed=5)
    for opponent, sides in ((HeuristicPolicy(SMALL), [0, 1]), (twins(inner, "lstm", 1)[0], 0)):
        env = OpponentVectorEnv(inner, opponent, team_lanes(2, 4, sides), seed=1)
        actor, learner = twins(env, kind, layers)
        rollout = collected(env, actor, 80)
        assert rollout.num_valid < rollout.valid.size or sides == 0  # some were shot
        for length in (1, 8, 80):
            assert gap(learner, rollout, length) <= TOLERANCE


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_wrong_memory_or_reset_would_be_noticed(kind: str) -> None:
    with make_vector_env(functools.partial(Party, "joins"), COPIES, 0, seed=4) as env:
        actor, learner = twins(env, kind, 2)
        rollout = collected(env, actor)
    nothing = dataclasses.replace(rollout, policy_state=optree.tree_map(np.zeros_like, rollout.policy_state))
    assert gap(learner, nothing, 4) > 100 * TOLERANCE
    never = dataclasses.replace(rollout, episode_starts=np.zeros_like(rollout.episode_starts))
    assert gap(learner, never, STEPS) > 100 * TOLERANCE
    # an agent that joins begins with an empty memory: without that flag its rows would differ
    joins = rollout.episode_starts[1:] & ~(rollout.terminated | rollout.truncated)[:-1]
    assert joins.any()
    rows = np.array(rollout.episode_starts)
    rows[1:][joins] = False
    assert gap(learner, dataclasses.replace(rollout, episode_starts=rows), STEPS) > TOLERANCE
