"""What of a run's parts can be brought back, and who is given what."""

from typing import Any

import pytest
from gymnasium import spaces

from inchworm import PolicyConfig, PolicySpec
from inchworm.core.errors import ConfigError
from inchworm.run.saver import FORMAT, check_state, states_of
from inchworm.train.callbacks import BaseCallback, FunctionCallback, stateful_parts


class Remembers(BaseCallback):
    def __init__(self, number: int) -> None:
        self.number = number

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: Any) -> None:
        self.number = state["number"]

    def __call__(self, state: Any, metrics: Any) -> None: ...


def test_only_what_remembers_is_saved_with_its_place_and_name() -> None:
    parts = stateful_parts([BaseCallback(), Remembers(1), FunctionCallback(lambda state, metrics: None), FunctionCallback(Remembers(2))])
    assert states_of(parts) == [
        {"place": 1, "name": "Remembers", "state": {"number": 1}},
        {"place": 3, "name": "Remembers", "state": {"number": 2}},
    ]


def test_a_checkpoint_from_before_a_field_existed_is_of_the_same_network() -> None:
    spec = PolicySpec(spaces.Box(-1, 1, (2,)), spaces.Discrete(2), PolicyConfig())
    before, now = spec.to_dict(), spec.to_dict()
    del before["config"]["central_critic"], before["config"]["memory_size"]
    parts = {"format": FORMAT, "config": {}, "weights": {}, "learner": {}, "collector": {}, "callbacks": [], "trackers": []}
    state = {**parts, "state": {"iteration": 3}, "spec": before}
    check_state(state, 3, now)
    check_state({**state, "spec": {"policies": {"red": before, "bot": None}}}, 3, {"policies": {"red": now, "bot": None}})
    other = PolicySpec(spec.observation_space, spec.action_space, PolicyConfig(hidden_sizes=(3,))).to_dict()
    for wrong, ours in ((before, other), ({"policies": {"red": before}}, {"policies": {"red": other}})):
        with pytest.raises(ConfigError, match="a different network"):
            check_state({**state, "spec": wrong}, 3, ours)
