"""A heuristic that grows with the policy: when it does, by how much, and that games of older skills do not count."""

import pytest

from doubles.teams import Always
from inchworm.collect.opponents import OpponentSource
from inchworm.core.errors import ConfigError
from inchworm.core.protocols import Stateful
from inchworm.selfplay.pool import SkillLadder


def climb(ladder, wins):
    for win in wins:
        ladder.record(ladder.name, win)


def test_twenty_games_that_are_mostly_won_raise_the_skill_by_a_tenth():
    ladder = SkillLadder(Always, start=0.75, top=0.9, threshold=0.6)
    assert isinstance(ladder, OpponentSource)
    assert isinstance(ladder, Stateful)
    climb(ladder, [1.0] * 19)
    assert ladder.skill == 0.75
    climb(ladder, [1.0])
    assert ladder.skill == 0.85
    assert ladder.metrics() == {"opponent/skill": 0.85, "opponent/win_rate": 0.5}  # counted from nothing again
    for _ in range(30):
        ladder.record("heuristic:0.75", 1.0)  # episodes that began before
    assert ladder.skill == 0.85
    climb(ladder, [0.5] * 200)
    assert ladder.skill == 0.85  # a half is less than 0.6
    climb(ladder, [1.0] * 500)
    assert ladder.skill == 0.9  # never above the top
    assert ladder.draw(0, None) == "heuristic:0.9"


def test_actors_are_made_by_the_skill_in_their_name():
    ladder = SkillLadder(Always, start=0.3)
    assert ladder.actor("heuristic:0.3").action == 0.3
    assert ladder.actor("heuristic:0.3") is ladder.actor("heuristic:0.3")
    with pytest.raises(ConfigError, match="against self-3, but the opponent here is a heuristic"):
        ladder.actor("self-3")


def test_it_goes_on_where_it_was():
    one, other = SkillLadder(Always, start=0.1), SkillLadder(Always, start=0.1)
    climb(one, [1.0] * 35)
    other.load_state_dict(one.state_dict())
    for _ in range(40):
        climb(one, [1.0])
        climb(other, [1.0])
        assert one.state_dict() == other.state_dict()
    assert one.skill == pytest.approx(0.4)  # 75 wins are three times 20
