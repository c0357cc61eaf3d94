"""Matches in Skirmish itself: the heuristic, its skill, and the replay of the first game."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.collect.actors import RandomActor
from inchworm.config.sections import EnvConfig, PolicyConfig
from inchworm.core.errors import ConfigError, SpaceError
from inchworm.evaluate.matches import RecordedVectorEnv, evaluate_vs_heuristic, play_match
from inchworm.policy.spec import PolicySpec
from inchworm.worlds.replay import check_replay
from inchworm.worlds.skirmish import HeuristicPolicy, SkirmishConfig, SkirmishVectorEnv

RULES = SkirmishConfig(units=("scout", "soldier"), wall_pairs=1, max_steps=40, zone_target=15)
WORLD = EnvConfig(id="Skirmish-v0", kwargs=RULES.to_dict())


def policy_for(rules: SkirmishConfig = RULES) -> NumpyPolicy:
    env = SkirmishVectorEnv(rules, 1)
    return NumpyPolicy(PolicySpec(env.observation_space, env.action_space, PolicyConfig(hidden_sizes=(8,))), seed=1)


@pytest.mark.parametrize("world", [WORLD, RULES], ids=["EnvConfig", "SkirmishConfig"])
def test_the_heuristic_beats_an_untrained_policy_and_both_sides_are_played(world: Any) -> None:
    stats, replay = evaluate_vs_heuristic(policy_for(), world, 8, device="cpu")
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


def test_the_heuristic_itself_is_as_good_as_the_heuristic() -> None:
    stats, _ = evaluate_vs_heuristic(HeuristicPolicy(RULES), WORLD, 10)
    # both sides play the same way in a world that looks the same from either: each pair is a win and a loss, or two draws
    assert stats.win_rate == 0.5
    assert stats.infos["win"].reshape(-1, 2).sum(1).tolist() == [1.0] * 5


def test_a_weaker_heuristic_loses_more() -> None:
    full, _ = evaluate_vs_heuristic(HeuristicPolicy(RULES), WORLD, 40)
    weak, _ = evaluate_vs_heuristic(HeuristicPolicy(RULES), WORLD, 40, skill=0.0)
    assert full.win_rate == 0.5
    assert weak.win_rate is not None
    assert weak.win_rate > 0.8


def test_another_heuristic_can_be_met() -> None:
    env = SkirmishVectorEnv(RULES, 2)
    by_random, _ = evaluate_vs_heuristic(HeuristicPolicy(RULES), WORLD, 10, heuristic=RandomActor(env.action_space))
    assert by_random.win_rate is not None
    assert by_random.win_rate > 0.8
    with pytest.raises(ConfigError, match=r"skill=0.5 is of the built-in heuristic, but another one was given"):
        evaluate_vs_heuristic(HeuristicPolicy(RULES), WORLD, 4, heuristic=RandomActor(env.action_space), skill=0.5)


def test_greedy_and_sampled_repeat_and_copies_change_no_greedy_game() -> None:
    policy = policy_for()
    for deterministic in (True, False):
        found = [evaluate_vs_heuristic(policy, WORLD, 6, deterministic=deterministic)[0].to_dict() for _ in range(2)]
        assert found[0] == found[1]
        assert found[0]["deterministic"] is deterministic
    # the heuristic is exact in any batch
    few, many = (evaluate_vs_heuristic(HeuristicPolicy(RULES), WORLD, 8, num_envs=copies)[0].to_dict() for copies in (2, 8))
    assert few == many


def test_seeds_are_one_for_each_pair() -> None:
    stats, _ = evaluate_vs_heuristic(policy_for(), WORLD, seeds=[11, 22])
    assert stats.seeds.tolist() == [11, 11, 22, 22]
    with pytest.raises(ConfigError, match="2 seeds, each played from either side, are 4 episodes, but episodes=2"):
        evaluate_vs_heuristic(policy_for(), WORLD, 2, [11, 22])


def test_the_world_may_be_an_id_or_a_mapping_of_its_rules() -> None:
    by_config, by_mapping = (evaluate_vs_heuristic(policy_for(), world, 2)[0].to_dict() for world in (WORLD, WORLD.kwargs))
    assert by_config == by_mapping
    default = SkirmishConfig()
    by_id, by_rules = (evaluate_vs_heuristic(HeuristicPolicy(default), world, 2)[0].to_dict() for world in ("Skirmish-v0", default))
    assert by_id == by_rules


def test_what_cannot_act_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^policy is of type NoneType and cannot act"):
        evaluate_vs_heuristic(None, WORLD, 2)  # type: ignore[arg-type]


def test_a_policy_of_another_world_is_refused_in_one_line() -> None:
    with pytest.raises(SpaceError, match=r"^policy was made for the observation space") as caught:
        evaluate_vs_heuristic(policy_for(SkirmishConfig(units=("scout",))), WORLD, 4)
    assert "\n" not in str(caught.value)
    other = NumpyPolicy(PolicySpec(spaces.Box(-1, 1, (4,)), spaces.Discrete(2), PolicyConfig()))
    with pytest.raises(SpaceError, match=r"^policy was made for the observation space"):
        evaluate_vs_heuristic(other, WORLD, 4)


@pytest.mark.parametrize(
    ("world", "message"),
    [
        (EnvConfig(id="CartPole-v1"), "the heuristic plays Skirmish-v0 alone, not the id CartPole-v1"),
        ("CartPole-v1", "the heuristic plays Skirmish-v0 alone, not str; give EnvConfig"),
        ({"unit": ["scout"]}, "unknown config key unit; did you mean units?"),
        (EnvConfig(id="Skirmish-v0", kwargs={"unit": ["scout"]}), "unknown config key unit; did you mean units?"),
    ],
)
def test_a_world_that_is_none_is_refused(world: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluate_vs_heuristic(policy_for(), world, 4)


@pytest.mark.parametrize("skill", [-0.1, 1.5])
def test_a_skill_is_from_0_to_1(skill: float) -> None:
    with pytest.raises(ConfigError, match="0 to 1"):
        evaluate_vs_heuristic(policy_for(), WORLD, 4, skill=skill)


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


def test_recording_changes_no_game_and_vs_heuristic_hands_it_out() -> None:
    policy = policy_for()
    plain, nothing = evaluate_vs_heuristic(policy, WORLD, 4, deterministic=False)
    filmed, replay = evaluate_vs_heuristic(policy, WORLD, 4, deterministic=False, save_replay=True)
    assert nothing is None
    assert plain.to_dict() == filmed.to_dict()
    assert replay is not None
    assert check_replay(replay)["meta"]["players"] == ["policy", "heuristic"]


def test_a_recording_passes_everything_on() -> None:
    env = SkirmishVectorEnv(RULES, 2)
    recorded = RecordedVectorEnv(env, ("a", "b"))
    step = recorded.reset([1, 2])
    recorded.set_reset_options(None)
    with pytest.raises(RuntimeError, match="not over"):
        recorded.replay()
    before = recorded.state_dict()
    actions = np.zeros((recorded.num_lanes, 3), np.int64)
    first = recorded.step(actions).observations["observation"].copy()
    recorded.load_state_dict(before)
    recorded.reset(indices=())
    assert np.array_equal(recorded.step(actions).observations["observation"], first)
    assert step.observations["observation"].shape[0] == 8
    recorded.close()
    with pytest.raises(Exception, match="closed"):
        env.reset()
