"""Matches in a world of known games, where the larger number wins, and in Skirmish against its heuristic."""

from typing import Any

import numpy as np
import pytest

from doubles.duel import DuelVectorEnv, OfAnotherWorld, Plays, length_of
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.collect.opponents import RandomActor
from inchworm.config.sections import EnvConfig, PolicyConfig
from inchworm.core.errors import ConfigError, SpaceError
from inchworm.core.seeding import derive_seed
from inchworm.evaluate.evaluator import evaluate_vs_heuristic, even_copies, pair_seeds, play_match
from inchworm.policy.spec import PolicySpec
from inchworm.worlds.replay import check_replay
from inchworm.worlds.skirmish import HeuristicPolicy, SkirmishConfig, SkirmishVectorEnv


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


def test_a_hundred_games_by_default_and_progress_counts_them() -> None:
    counts: list[int] = []
    assert play_match(Plays(3), Plays(1), DuelVectorEnv(8), progress=counts.append).episodes == 100
    assert counts[-1] == 100


@pytest.mark.parametrize(
    ("episodes", "seeds", "message"),
    [
        (4, [1, 2, 3], "3 seeds, each played from either side, are 6 episodes, but episodes=4; give 2 seeds, or episodes=6"),
        (7, None, "episodes=7 is odd, but each seed is played once from either side; give 8"),
        (0, None, "episodes=0 must be 1 or more"),
        (None, [], "episodes=0 must be 1 or more"),
    ],
)
def test_seeds_and_episodes_must_agree(episodes: int | None, seeds: list[int] | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pair_seeds(episodes, seeds, 0)


def test_copies_are_an_even_number() -> None:
    assert [even_copies(count, 10) for count in (1, 2, 7, 8, 30)] == [2, 2, 8, 8, 10]
    with pytest.raises(ConfigError, match="num_envs=0 must be 1 or more"):
        even_copies(0, 10)
    with pytest.raises(ConfigError, match="even number of env copies, one half for each side, not 3"):
        play_match(Plays(1), Plays(2), DuelVectorEnv(3), 4)


def test_a_world_without_two_teams_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a match needs an environment with two teams.* has 1 lane"):
        play_match(Plays(1), Plays(2), "CartPole-v1", 4)


@pytest.mark.parametrize("place", [0, 1])
def test_a_player_from_another_world_is_refused_in_one_line(place: int) -> None:
    players: list[Any] = [Plays(1), Plays(1)]
    players[place] = OfAnotherWorld(1)
    with pytest.raises(SpaceError, match=r"^mine was made for the observation space Box.*but the environment has Box") as caught:
        play_match(*players, DuelVectorEnv(2), 4, players=("mine", "mine"))
    assert "\n" not in str(caught.value)


def test_a_replay_needs_a_world_that_can_be_shown() -> None:
    with pytest.raises(ConfigError, match=r"cannot make a replay of DuelVectorEnv.*only games of Skirmish-v0"):
        play_match(Plays(1), Plays(2), DuelVectorEnv(2), 4, save_replay=True)


def test_environments_that_were_made_here_are_closed_also_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[DuelVectorEnv] = []

    def make(source: Any, num_envs: int, *, seed: int) -> DuelVectorEnv:
        assert (source.id, seed) == ("Duel-v0", 9)
        made.append(DuelVectorEnv(num_envs))
        return made[-1]

    monkeypatch.setattr("inchworm.evaluate.games.make_vector_env", make)
    play_match(Plays(1), Plays(2), "Duel-v0", 4, num_envs=3, seed=9)
    with pytest.raises(SpaceError):
        play_match(OfAnotherWorld(1), Plays(2), "Duel-v0", 4, seed=9)
    assert [env.num_envs for env in made] == [4, 4]
    assert [env.closed for env in made] == [True, True]


RULES = SkirmishConfig(units=("scout", "soldier"), wall_pairs=1, max_steps=40, zone_target=15)
WORLD = EnvConfig(id="Skirmish-v0", kwargs=RULES.to_dict())


def policy_for(rules: SkirmishConfig = RULES) -> NumpyPolicy:
    env = SkirmishVectorEnv(rules, 1)
    return NumpyPolicy(PolicySpec(env.observation_space, env.action_space, PolicyConfig(hidden_sizes=(8,))), seed=1)


def test_the_heuristic_beats_an_untrained_policy_and_both_sides_are_played() -> None:
    stats, replay = evaluate_vs_heuristic(policy_for(), WORLD, 8, device="cpu")
    assert replay is None
    assert stats.episodes == 8
    assert stats.seeds.tolist() == np.repeat(stats.seeds[::2], 2).tolist()
    assert len(set(stats.seeds.tolist())) == 4
    assert stats.agent_returns.shape == (8, 2)
    assert stats.win_rate is not None
    assert stats.win_rate <= 0.25
    assert stats.mean_hp_margin is not None
    assert stats.players == ("policy", "heuristic")
    assert stats.wins + stats.draws + stats.losses == 8


def test_players_may_be_named() -> None:
    stats = play_match("heuristic:0.5", "random", WORLD, 2, num_envs=2)
    assert stats.players == ("heuristic:0.5", "random")
    assert play_match("random", policy_for(), WORLD, 2, num_envs=2).players == ("random", "second")


def test_the_world_may_be_a_config_an_id_or_its_rules() -> None:
    by_config, *others = (evaluate_vs_heuristic(policy_for(), world, 2)[0].to_dict() for world in (WORLD, RULES, WORLD.kwargs))
    assert others == [by_config] * 2
    default = SkirmishConfig()
    by_id, by_rules = (evaluate_vs_heuristic(HeuristicPolicy(default), world, 2)[0].to_dict() for world in ("Skirmish-v0", default))
    assert by_id == by_rules


def test_the_heuristic_is_as_good_as_itself_and_better_than_a_weaker_one() -> None:
    stats, _ = evaluate_vs_heuristic(HeuristicPolicy(RULES), WORLD, 10)
    # both sides play the same way in a world that looks the same from either: each pair is a win and a loss, or two draws
    assert stats.win_rate == 0.5
    assert stats.infos["win"].reshape(-1, 2).sum(1).tolist() == [1.0] * 5
    weak, _ = evaluate_vs_heuristic(HeuristicPolicy(RULES), WORLD, 40, skill=0.0)
    assert weak.win_rate is not None
    assert weak.win_rate > 0.8


def test_another_heuristic_can_be_met() -> None:
    env = SkirmishVectorEnv(RULES, 2)
    by_random, _ = evaluate_vs_heuristic(HeuristicPolicy(RULES), WORLD, 10, heuristic=RandomActor(env.action_space))
    assert by_random.win_rate is not None
    assert by_random.win_rate > 0.8
    with pytest.raises(ConfigError, match=r"skill=0.5 applies to the built-in heuristic"):
        evaluate_vs_heuristic(HeuristicPolicy(RULES), WORLD, 4, heuristic=RandomActor(env.action_space), skill=0.5)


def test_a_policy_that_cannot_act_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"^policy is of type NoneType and cannot act"):
        evaluate_vs_heuristic(None, WORLD, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("world", "message"),
    [
        (EnvConfig(id="CartPole-v1"), r"no heuristic for the id CartPole-v1; .*\(Skirmish-v0\)"),
        ("CartPole-v1", "no heuristic for the id CartPole-v1"),
        (3, "no heuristic for int"),
        (EnvConfig(id="Skirmish-v0", kwargs={"unit": ["scout"]}), "unknown config key unit; did you mean units?"),
    ],
)
def test_other_worlds_are_rejected(world: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluate_vs_heuristic(policy_for(), world, 4)


class Filming(SkirmishVectorEnv):
    """Keeps every frame of copy 0 that can be seen from outside."""

    def reset(self, seeds: Any = None, indices: Any = None) -> Any:
        step = super().reset(seeds, indices)
        if indices is None or len(indices) == self.num_envs:
            self.frames = [self.frame(0)]
            self.world = self.describe(0)
        return step

    def recv(self) -> Any:
        step = super().recv()
        self.frames.append(self.frame(0))
        return step


def test_the_replay_is_the_first_game_with_its_last_moment() -> None:
    env = Filming(RULES, 4)
    stats = play_match(HeuristicPolicy(RULES), HeuristicPolicy(RULES, 0.3), env, 12, players=("a", "b"), save_replay=True)
    replay: Any = stats.replay
    check_replay(replay)
    steps = int(stats.lengths[0])
    assert len(replay["frames"]) == steps + 1
    assert replay["frames"][:steps] == env.frames[:steps]  # the frame after the last step is of the next game there
    assert replay["frames"][steps] != env.frames[steps]
    assert replay["world"] == env.world
    assert replay["meta"] == {"seed": int(stats.seeds[0]), "players": ["a", "b"], "steps": steps, "hp_margin": stats.infos["hp_margin"][0]}
    win = stats.infos["win"][0]
    assert replay["result"]["winner"] == {1.0: 0, 0.0: 1, 0.5: None}[win]
    assert stats.infos[f"ended_{replay['result']['reason']}"][0] == 1.0
    # the last frame's health shows the margin: the mean of what share of its health each unit of a side has left
    shares = [unit[3] / kind["max_health"] for unit, kind in zip(replay["frames"][-1]["units"], replay["world"]["units"])]
    health = [sum(shares[side : side + 2]) / 2 for side in (0, 2)]
    assert health[0] - health[1] == pytest.approx(stats.infos["hp_margin"][0])


def test_the_replay_of_a_game_that_was_cut_off_ends_there_without_a_result() -> None:
    players = RandomActor(SkirmishVectorEnv(RULES, 1).action_space), HeuristicPolicy(RULES)
    stats = play_match(*players, SkirmishVectorEnv(RULES, 2), 4, save_replay=True, max_episode_steps=3)
    replay: Any = stats.replay
    check_replay(replay)
    assert stats.capped_episodes == 4
    assert (len(replay["frames"]), replay["meta"]["steps"], replay["result"]) == (4, 3, None)


def test_recording_changes_no_game_and_vs_heuristic_hands_it_out() -> None:
    policy = policy_for()
    plain, nothing = evaluate_vs_heuristic(policy, WORLD, 4, deterministic=False)
    filmed, replay = evaluate_vs_heuristic(policy, WORLD, 4, deterministic=False, save_replay=True)
    assert nothing is None
    assert plain.to_dict() == filmed.to_dict()
    assert replay is not None
    assert check_replay(replay)["meta"]["players"] == ["policy", "heuristic"]
