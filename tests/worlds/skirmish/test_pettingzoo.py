"""Skirmish as a PettingZoo parallel environment."""

import warnings

import numpy as np
import pytest

from inchworm.core.errors import ConfigError, EnvError
from inchworm.worlds.replay import check_replay
from inchworm.worlds.skirmish import parallel_env

pytest.importorskip("pettingzoo")


@pytest.mark.filterwarnings("ignore:The old environment creation API")
def test_pettingzoos_own_tests_pass_without_a_warning() -> None:
    from pettingzoo.test import parallel_api_test, parallel_seed_test

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel_api_test(parallel_env(max_steps=60), num_cycles=300)
        parallel_seed_test(lambda: parallel_env(max_steps=60), num_cycles=80)


def test_sampled_actions_obey_the_mask() -> None:
    env = parallel_env(units=["scout"])
    observations, _ = env.reset(seed=0)
    mask = observations["blue_0"]["action_mask"]
    space = env.action_space("blue_0")
    space.seed(0)
    drawn = np.array([space.sample(mask) for _ in range(200)])
    assert mask[drawn + np.array([0, 9, 12])].all()
    assert not mask.all(), "some action is illegal: a wall, or no enemy in the arc"


def test_agents_die_and_the_game_ends_for_the_rest() -> None:
    env = parallel_env(units=["soldier"], wall_pairs=0)
    observations, infos = env.reset(seed=1)
    assert env.agents == ["blue_0", "red_0"] == list(observations) == list(infos)
    env.world.state.places[:, 0, 0, 0], env.world.state.places[:, 1, 0, 0] = (-2.0, 4.0), (-2.0, -4.0)  # 4 apart, out of the zone
    env.world.state.health[1] = 12.0
    env.world.observe()
    _, rewards, terminations, truncations, infos = env.step({"blue_0": [0, 0, 1], "red_0": [0, 0, 0]})
    assert terminations == {"blue_0": True, "red_0": True}
    assert not any(truncations.values())
    assert (infos["blue_0"]["win"], infos["red_0"]["win"], infos["red_0"]["ended_elimination"]) == (1.0, 0.0, 1.0)
    assert env.agents == []
    # damage 0.5 * 12 / 100, kill 0.2, win 1; hurt -0.25 * 12 / 100, death -0.2, lost -1
    assert rewards == {"blue_0": pytest.approx(1.26), "red_0": pytest.approx(-1.23)}
    with pytest.raises(EnvError, match="call reset"):
        env.step({})


def test_hp_margin_is_a_difference_of_mean_shares() -> None:
    env = parallel_env(max_steps=1, units=["scout", "heavy"])
    env.reset(seed=0)
    env.world.state.health[:, :, 0] = [[30.0, 160.0], [60.0, 40.0]]
    infos = env.step({agent: [0, 0, 0] for agent in env.agents})[4]
    # blue (30 / 60 + 160 / 160) / 2 = 0.75, red (60 / 60 + 40 / 160) / 2 = 0.625
    assert [infos[agent]["hp_margin"] for agent in ("blue_0", "red_1")] == [0.125, -0.125]


def test_a_game_renders_as_a_replay() -> None:
    env = parallel_env(units=["scout"], render_mode="replay", max_steps=3)
    env.reset(seed=7)
    begun = check_replay(env.render())
    assert (len(begun["frames"]), begun["result"], begun["meta"]["seed"]) == (1, None, 7)
    while env.agents:
        env.step({agent: np.zeros(3, np.int64) for agent in env.agents})
    replay = check_replay(env.render())
    assert len(replay["frames"]) == 1 + 3  # the beginning and every step
    assert replay["frames"][0] == begun["frames"][0]
    assert replay["result"] == {"winner": None, "reason": "time"}  # no unit moved
    env.reset(seed=7)
    assert env.render() == begun


def test_state_and_render() -> None:
    env = parallel_env(render_mode="rgb_array")
    env.reset(seed=0)
    assert env.state_space.contains(env.state())
    image = env.render()
    assert image.dtype == np.uint8
    assert image.ndim == 3
    assert parallel_env().render() is None


def test_resets_without_a_seed_differ_and_repeat_after_one() -> None:
    env = parallel_env()

    def games() -> list[np.ndarray]:
        first = env.reset(seed=4)[0]["blue_0"]["observation"]
        return [first, *(env.reset()[0]["blue_0"]["observation"] for _ in range(2))]

    one, two = games(), games()
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(one, two))
    assert not np.array_equal(one[1], one[2])


def test_bad_input() -> None:
    with pytest.raises(EnvError, match="use rgb_array"):
        parallel_env(render_mode="human")
    with pytest.raises(ConfigError, match="did you mean units"):
        parallel_env(unit=["scout"])
