"""Serves the front door: whether a policy was made for an environment."""

from __future__ import annotations

from inchworm.abilities import SharesState
from inchworm.errors import ConfigError, SpaceError
from inchworm.policy.spec import PolicySpec
from inchworm.protocols import VectorEnv
from inchworm.spaces import Space, form_of, in_one_line


def check_spaces(spec: PolicySpec, env: VectorEnv) -> None:
    """Refuse a policy that was made for another world. Bounds may differ: they are no part of a network."""
    pairs = {"observation": (spec.observation_space, env.observation_space), "action": (spec.action_space, env.action_space)}
    shared = shared_space(env)
    check_critic(spec.global_state_space is not None, env)
    if spec.global_state_space is not None and shared is not None:
        pairs["global state"] = (spec.global_state_space, shared)
    for what, (ours, theirs) in pairs.items():
        if form_of(ours) != form_of(theirs):
            raise SpaceError(
                f"the policy was made for the {what} space {in_one_line(ours)}, but the environment has {in_one_line(theirs)}; "
                "use a policy made for it"
            )


def check_critic(is_central: bool, env: VectorEnv) -> None:
    """Refuse a world that shows its state to a critic that does not look at it: nobody could value what the dead are credited with."""
    if shared_space(env) is not None and not is_central:
        raise ConfigError(
            "the environment shares a global state, so that credit goes on after a death, which only a central critic can value; "
            "set policy.central_critic=true, or make it without global_state, or bring a policy that ReadsGlobalState"
        )


def shared_space(env: VectorEnv) -> Space | None:
    """What the environment shows to a central critic; None if it shows nothing."""
    return env.global_state_space if isinstance(env, SharesState) else None
