"""`check_env` of PettingZoo environments: what is fine is said to be, and what would break training is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("pettingzoo")
from inchworm.env.check import check_env
from inchworm.worlds.toys import DEATHS, JOINS, Comings, Sacrifice


class Plain(Comings):
    """Without a global state."""

    def state(self) -> Any:
        raise NotImplementedError


def test_what_is_fine():
    report = check_env(lambda: Plain([[(0, 5, "terminated")], [(0, 5, "truncated")]]))
    assert report.ok, report
    assert report.notes == ()
    report = check_env(lambda: Comings(DEATHS), steps=30)
    assert report.ok, report
    assert [note.partition(":")[0] for note in report.notes] == ["state() gives a global state", "agents leave before their episode ends"]
    assert any("agents join running episodes" in note for note in check_env(Comings(JOINS)).notes)
    assert check_env("inchworm.worlds.toys:comings", steps=4).ok
    assert check_env(Sacrifice).ok


def test_a_real_one():
    pytest.importorskip("mpe2")
    report = check_env("mpe2.simple_spread_v3:parallel_env", steps=60)
    assert report.ok, report
    refused = check_env("mpe2.simple_tag_v3:parallel_env")
    assert any("pad them to one shape" in problem for problem in refused.problems)


def test_a_given_one_stays_open_and_a_made_one_does_not():
    closed = []

    class Closing(Comings):
        def close(self):
            closed.append(self)

    given = Closing(DEATHS)
    assert check_env(given, steps=3).ok
    assert closed == []
    assert check_env(lambda: Closing(DEATHS), steps=3).ok
    assert len(closed) == 2  # the first, and the fresh copy


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("clock", "not deterministic: the same environment, reset with the same seed, gave different observations at step"),
        ("made", "not deterministic: a fresh copy, reset with the same seed, gave different observations at step 0"),
        ("nan", "observation of agent_1 at step 2 has values that are not finite"),
        ("bounds", "observation of agent_0 at step 5 leaves its bounds"),
        ("still there", "still in env.agents"),
        ("raises", "stepping raised RuntimeError: no"),
        ("state", "of the global state at step 3 has values that are not finite"),
        ("keyword", "reset must accept the keywords seed and options"),
        ("close", "closing raised RuntimeError: never"),
    ],
)
def test_what_would_break_training(name: str, words: str):
    report = check_env(FAULTS[name], steps=30)
    assert any(words in problem for problem in report.problems), report


def test_notes():
    endless = check_env(lambda: Plain([[(0, 999, "terminated")], [(0, 999, "terminated")]]), steps=5)
    assert any("no episode ended within 5 random steps" in note for note in endless.notes)
    absent = check_env(lambda: Plain([[(0, 9, "terminated")], [(8, 9, "terminated")]]), steps=5)
    assert any("agent_1 of possible_agents were never alive" in note for note in absent.notes)


class Clock(Plain):
    ticks = 0

    def _observations(self, agents):
        type(self).ticks += 1
        return {agent: np.full(3, self.ticks, np.float32) for agent in agents}


class Made(Plain):
    count = 0

    def __init__(self):
        super().__init__(DEATHS)
        type(self).count += 1
        self.number = self.count

    def _observations(self, agents):
        return {agent: np.full(3, self.number, np.float32) for agent in agents}


class NaN(Plain):
    def _observations(self, agents):
        shown = super()._observations(agents)
        if self._now == 2:
            shown["agent_1"][0] = np.nan
        return shown


class Bounds(Plain):
    def observation_space(self, agent):
        return spaces.Box(0, 4, (3,), np.float32)


class Still(Plain):
    def step(self, actions):
        result = super().step(actions)
        self.agents = list(self.possible_agents)
        return result


class Raises(Plain):
    def step(self, actions):
        raise RuntimeError("no")


class State(Comings):
    def state(self):
        return super().state() * (np.nan if self._now == 3 else 1)


class Keyword(Plain):
    def reset(self, seed=None):
        return super().reset(seed)


class Close(Plain):
    def close(self):
        raise RuntimeError("never")


FAULTS: dict[str, Any] = {
    "clock": Clock,
    "made": Made,
    "nan": lambda: NaN([[(0, 6, "terminated")], [(0, 6, "terminated")]]),
    "bounds": lambda: Bounds([[(0, 6, "terminated")], [(0, 3, "terminated")]]),
    "still there": Still,
    "raises": Raises,
    "state": State,
    "keyword": Keyword,
    "close": Close,
}
