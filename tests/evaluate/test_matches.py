"""Matches in a world of known games: who plays the larger number wins."""

import json
from typing import Any

import numpy as np
import pytest

from doubles.duel import DuelVectorEnv, OfAnotherWorld, Plays, length_of
from inchworm.core.errors import ConfigError, SpaceError
from inchworm.core.seeding import derive_seed
from inchworm.evaluate.matches import even_copies, pair_seeds, play_match
from inchworm.evaluate.stats import MatchStats


def test_each_seed_is_played_from_either_side() -> None:
    env = DuelVectorEnv(2)
    first, second = Plays(3), Plays(1)
    stats = play_match(first, second, env, seeds=[4, 8, 3])
    assert stats.seeds.tolist() == [4, 4, 8, 8, 3, 3]
    assert stats.sides.tolist() == [0, 1, 0, 1, 0, 1]
    assert stats.infos["side"].tolist() == [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    # The first player's two agents are paid 3 n and 3 (n = 3, 3, 4, 4, 2, 2 steps), and only they are counted.
    lengths = [length_of(seed) for seed in (4, 4, 8, 8, 3, 3)]
    assert stats.lengths.tolist() == lengths == [3, 3, 4, 4, 2, 2]
    assert stats.agent_returns.tolist() == [[3 * n, 3] for n in lengths]
    # margin = (3 n + 3 - (n + 1)) / (8 n) = (2 n + 2) / (8 n)
    assert stats.infos["hp_margin"].tolist() == [(2 * n + 2) / (8 * n) for n in lengths]
    assert (stats.win_rate, stats.wins, stats.draws, stats.losses) == (1.0, 6, 0, 0)
    assert not env.closed
    # the second player saw the other sides of the same games
    assert {float(row[2]) for seen in second.seen for row in seen} == {0.0, 1.0}
    assert all(np.array_equal(mine[:, 1], theirs[:, 1]) for mine, theirs in zip(first.seen, second.seen))


def test_pairs_cancel_what_a_side_gives() -> None:
    # Equal players draw, but with seed 7 side 0 wins draws: 1 from side 0, 0 from side 1, so 0.5 all in all.
    stats = play_match(Plays(2), Plays(2), DuelVectorEnv(2), seeds=[7, 17])
    assert stats.infos["win"].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert (stats.win_rate, stats.win_rate_on(0), stats.win_rate_on(1)) == (0.5, 1.0, 0.0)
    assert (stats.wins, stats.draws, stats.losses) == (2, 0, 2)
    even = play_match(Plays(2), Plays(2), DuelVectorEnv(2), seeds=[4])
    assert (even.win_rate, even.wins, even.draws, even.losses) == (0.5, 0, 2, 0)


def test_the_number_of_copies_does_not_change_the_games() -> None:
    results = [play_match(Plays(3), Plays(4), DuelVectorEnv(copies), 10, seed=3).to_dict() for copies in (2, 4, 10)]
    assert results[0] == results[1] == results[2]
    assert results[0]["seeds"] == [derive_seed(3, "match", pair) for pair in range(5) for _ in (0, 1)]
    assert results[0]["win_rate"] == 0.0


def test_the_same_players_get_the_same_numbers_sampled_too() -> None:
    env = DuelVectorEnv(2)
    matches = [play_match(Plays(3), Plays(3), env, 20, deterministic=False).to_dict() for _ in range(2)]
    assert matches[0] == matches[1]
    assert matches[0]["deterministic"] is False
    assert 0 < matches[0]["wins"] < 20
    greedy = play_match(Plays(3), Plays(3), env, 20)
    assert greedy.wins == greedy.losses  # all are draws, but for seeds that end in 7


def test_a_hundred_games_unless_told_otherwise() -> None:
    assert play_match(Plays(3), Plays(1), DuelVectorEnv(8)).episodes == 100


def test_progress_counts_games() -> None:
    told: list[int] = []
    play_match(Plays(3), Plays(1), DuelVectorEnv(2), 6, progress=told.append)
    assert told[-1] == 6


@pytest.mark.parametrize(
    ("episodes", "seeds", "message"),
    [
        (4, [1, 2, 3], "3 seeds, each played from either side, are 6 episodes, but episodes=4; give 2 seeds, or episodes=6"),
        (7, None, "episodes=7 is odd, but each seed is played once from either side; give 8"),
        (0, None, "an evaluation of 0 episodes says nothing"),
        (None, [], "an evaluation of 0 episodes says nothing"),
    ],
)
def test_seeds_and_episodes_must_agree(episodes: int | None, seeds: list[int] | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pair_seeds(episodes, seeds, 0)


def test_copies_are_an_even_number() -> None:
    assert [even_copies(count, 10) for count in (1, 2, 7, 8, 30)] == [2, 2, 8, 8, 10]
    with pytest.raises(ConfigError, match="num_envs=0 must be 1 or more"):
        even_copies(0, 10)
    with pytest.raises(ConfigError, match="even number of copies, one half for each side, not 3"):
        play_match(Plays(1), Plays(2), DuelVectorEnv(3), 4)


def test_a_world_without_two_teams_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a match needs two teams in one world.* has 1 lane"):
        play_match(Plays(1), Plays(2), "CartPole-v1", 4)


@pytest.mark.parametrize("place", [0, 1])
def test_a_player_from_another_world_is_refused_in_one_line(place: int) -> None:
    players: list[Any] = [Plays(1), Plays(1)]
    players[place] = OfAnotherWorld(1)
    with pytest.raises(SpaceError, match=r"^mine was made for the observation space Box.*but the environment has Box") as caught:
        play_match(*players, DuelVectorEnv(2), 4, players=("mine", "mine"))
    assert "\n" not in str(caught.value)


def test_a_replay_needs_a_world_that_can_be_shown() -> None:
    with pytest.raises(ConfigError, match="no replay can be made of DuelVectorEnv: only games of Skirmish-v0"):
        play_match(Plays(1), Plays(2), DuelVectorEnv(2), 4, save_replay=True)


def make(wins: list[float], **fields: Any) -> MatchStats:
    ones = np.ones(len(wins))
    return MatchStats(returns=ones, lengths=ones * 12, seeds=ones, infos={"win": wins, "hp_margin": ones * 0.25}, **fields)  # type: ignore[dict-item]


def test_a_match_is_one_line() -> None:
    # 8 of 10 by 7 wins and 2 draws: [0.49, 0.94], as in test_wilson
    stats = make([1.0] * 7 + [0.5, 0.5, 0.0])
    assert str(stats) == (
        "win rate 0.80 [0.49, 0.94] (7 won, 2 drawn, 1 lost of 10 greedy episodes), health margin 0.250, mean return 1, mean length 12"
    )
    silent = MatchStats(returns=[1.0, 2.0], lengths=[1, 1], seeds=[1, 1])  # type: ignore[arg-type]
    assert str(silent).startswith("mean return 1.5")
    assert (silent.wins, silent.draws, silent.losses, silent.win_rate_on(0)) == (0, 0, 0, None)


def test_a_match_is_plain_data() -> None:
    stats = make([1.0, 0.5, 0.0, 1.0], players=("a", "b"), replay={"frames": []})
    data = stats.to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert (data["players"], data["wins"], data["draws"], data["losses"], data["sides"]) == (["a", "b"], 2, 1, 1, [0, 1, 0, 1])
    assert "replay" not in data


def test_environments_that_were_made_here_are_closed_also_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[DuelVectorEnv] = []

    def make(source: Any, num_envs: int, *, seed: int) -> DuelVectorEnv:
        assert (source, seed) == ("Duel-v0", 9)
        made.append(DuelVectorEnv(num_envs))
        return made[-1]

    monkeypatch.setattr("inchworm.evaluate.games.make_vector_env", make)
    play_match(Plays(1), Plays(2), "Duel-v0", 4, num_envs=3, seed=9)
    with pytest.raises(SpaceError):
        play_match(OfAnotherWorld(1), Plays(2), "Duel-v0", 4, seed=9)
    assert [env.num_envs for env in made] == [4, 4]
    assert [env.closed for env in made] == [True, True]
