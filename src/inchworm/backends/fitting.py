"""Serves step 6 of 9: whether a rollout holds what a policy needs to learn from it: its memory, and the state that its critic reads."""

from __future__ import annotations

import optree

from inchworm.abilities import reads_global_state
from inchworm.backends.numpy.central import NO_GLOBAL_STATE
from inchworm.errors import RolloutError
from inchworm.policy.spec import PolicySpec
from inchworm.protocols import Policy
from inchworm.rollout.checks import check_space
from inchworm.rollout.rollout import Rollout


def check_memory(spec: PolicySpec, rollout: Rollout) -> None:
    """Refuse a rollout without the memory that the policy needs to begin its sequences with."""
    if spec.memory is None:
        return
    recorded = len((optree.tree_leaves(rollout.policy_state) or [()])[0])
    if not recorded or not spec.memory.fits(rollout.policy_state, (recorded, rollout.num_lanes)):
        raise RolloutError(
            f"the policy remembers (policy.kind={spec.config.kind}, {spec.memory.layers} x {spec.memory.size}), but the rollout's "
            "policy_state is not of that memory; collect it with this policy"
        )


def check_global_state(spec: PolicySpec, rollout: Rollout) -> None:
    """Refuse a rollout without the global state that a central critic reads."""
    if spec.global_state_space is None:
        return
    if not optree.tree_leaves(rollout.global_state):
        raise RolloutError(NO_GLOBAL_STATE)
    check_space(rollout.global_state, spec.global_state_space, "global_state")
    if rollout.lanes_per_copy > spec.lanes_per_copy > 1:
        raise RolloutError(
            f"the rollout has {rollout.lanes_per_copy} lanes per copy, but the policy's central critic was made for {spec.lanes_per_copy}"
        )


def check_credit(policy: Policy, rollout: Rollout) -> None:
    """Refuse a rollout whose credit runs on through the rows of the dead, unless the critic can value those."""
    if optree.tree_leaves(rollout.global_state) and not rollout.valid.all() and not reads_global_state(policy):
        raise RolloutError(
            "the rollout has a global state and agents that died, so their credit goes on after death, which only a central critic can "
            "value; learn with policy.central_critic=true, or collect from a vector env made without global_state"
        )
