"""Spaces of different sizes: the one that holds them all, and the way to an agent's own part and back."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from inchworm.core.errors import SpaceError
from inchworm.core.padding import DIMENSIONS_KEY, AgentSpaces, OwnPart, unite_agents, unite_spaces
from inchworm.core.spaces import MASK_KEY


def box(*shape: int, low: float = -1, high: float = 1, dtype: Any = np.float32) -> spaces.Box:
    return spaces.Box(low, high, shape, dtype)


@pytest.mark.parametrize(
    ("one", "other", "union"),
    [
        (box(2), box(3, high=2), spaces.Box(-1, np.array([2, 2, 2], np.float32), dtype=np.float32)),
        (box(2, dtype=np.float64), box(3), box(3, dtype=np.float64)),
        (box(1, 3, low=0), box(2, 1, low=0), box(2, 3, low=0)),  # the corner that neither has is between their bounds
        (spaces.Discrete(3), spaces.Discrete(5), spaces.Discrete(5)),
        (spaces.Discrete(2, start=-1), spaces.Discrete(2, start=3), spaces.Discrete(6, start=-1)),
        (spaces.MultiDiscrete([2, 5]), spaces.MultiDiscrete([3, 4, 6]), spaces.MultiDiscrete([3, 5, 6])),
        (spaces.MultiBinary(2), spaces.MultiBinary(4), spaces.MultiBinary(4)),
        (spaces.Dict({"a": box(2)}), spaces.Dict({"a": box(1), "b": box(1)}), spaces.Dict({"a": box(2), "b": box(1)})),
        (spaces.Tuple([box(2)]), spaces.Tuple([box(1), spaces.Discrete(2)]), spaces.Tuple([box(2), spaces.Discrete(2)])),
    ],
)
def test_the_smallest_space_that_holds_both(one: Any, other: Any, union: Any) -> None:
    assert unite_spaces({"a": one, "b": other}, "action") == union
    assert unite_spaces({"b": other, "a": one}, "action") == union


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (box(2), spaces.Discrete(2)),
        (box(2), box(2, 2)),
        (box(2), box(2, low=0, high=9, dtype=np.uint8)),
        (spaces.Discrete(3), spaces.MultiDiscrete([3])),
        (box(2), spaces.Dict({"a": box(2)})),
    ],
)
def test_what_cannot_be_united_is_refused_in_one_line(one: Any, other: Any) -> None:
    with pytest.raises(SpaceError, match="the action spaces of scout and guard cannot be padded to one") as caught:
        unite_spaces({"scout": one, "guard": other}, "action")
    assert "\n" not in str(caught.value)
    with pytest.raises(SpaceError, match="of scout and guard at camera cannot be padded"):
        unite_spaces({"scout": spaces.Dict({"camera": one}), "guard": spaces.Dict({"camera": other})}, "observation")


HYBRID = spaces.Dict({"aim": box(2), "go": spaces.MultiDiscrete([2, 3], start=[0, 4])})
LARGER = spaces.Dict({"aim": box(3), "go": spaces.MultiDiscrete([4, 3, 2], start=[-1, 4, 7]), "call": spaces.Discrete(2)})


def test_masks_and_dimensions_of_an_agent_that_has_less() -> None:
    agents = {"small": AgentSpaces(box(2), HYBRID), "large": AgentSpaces(box(4), LARGER)}
    seen, acted = unite_agents(agents)
    assert isinstance(seen, spaces.Dict)
    assert set(seen.spaces) == {"observation", MASK_KEY, DIMENSIONS_KEY}
    assert acted == LARGER
    part = OwnPart((seen, acted), (box(2), HYBRID))
    # go: of -1, 0, 1, 2 the agent has 0 and 1; of 4, 5, 6 all; a third choice it lacks, so the first is the only legal one
    assert {path: mask.tolist() for path, mask in part.legal.items()} == {("go",): [0, 1, 1, 0, 1, 1, 1, 1, 0], ("call",): [1, 0]}
    assert part.dimensions.tolist() == [True, True, False]
    assert OwnPart((seen, acted), (box(4), LARGER)).has_all_choices


def test_equal_agents_are_not_padded_and_their_masks_are_kept() -> None:
    alike = {name: AgentSpaces(box(2), spaces.Discrete(3)) for name in "ab"}
    assert unite_agents(alike) == (box(2), spaces.Discrete(3))
    masked = {name: AgentSpaces(box(2), spaces.Discrete(3), masked=True) for name in "ab"}
    assert unite_agents(masked) == (spaces.Dict({"observation": box(2), MASK_KEY: spaces.MultiBinary(3)}), spaces.Discrete(3))


def test_own_parts_are_cut_and_padded_back() -> None:
    whole = unite_agents({"small": AgentSpaces(box(2), HYBRID, masked=True), "large": AgentSpaces(box(4), LARGER)})
    own = AgentSpaces(box(2), HYBRID, masked=True)
    part = OwnPart(whole, (own.observation_space, own.action_space))
    mask = {"go": np.arange(9)[None], "call": np.zeros((1, 2))}
    seen = {"observation": np.arange(4, dtype=np.float32)[None], MASK_KEY: mask, DIMENSIONS_KEY: np.array([[1, 1, 0]])}
    cut = part.observations(seen)
    assert cut["observation"].tolist() == [[0, 1]]
    assert cut[MASK_KEY]["go"].tolist() == [[1, 2, 4, 5, 6]]
    assert set(cut) == {"observation", MASK_KEY}
    action = {"aim": np.array([[0.5, -0.5]], np.float32), "go": np.array([[1, 6]])}
    padded = part.padded_actions(action)
    assert {key: value.tolist() for key, value in padded.items()} == {"aim": [[0.5, -0.5, 0]], "go": [[1, 6, 7]], "call": [0]}
    assert {key: value.tolist() for key, value in part.actions(padded).items()} == {key: value.tolist() for key, value in action.items()}


def test_spaces_of_agents_as_plain_data() -> None:
    own = AgentSpaces(box(2), HYBRID, masked=True)
    assert AgentSpaces.from_dict(own.to_dict()) == own
