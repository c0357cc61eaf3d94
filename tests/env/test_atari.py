"""Tests of env/atari.py: the frames are Gymnasium's, and an episode follows from its seed and its actions alone."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import wrappers

from inchworm.config.sections import EnvConfig
from inchworm.env import atari
from inchworm.env.make import make_env
from inchworm.env.restore import wrapper_chain

ale_py = pytest.importorskip("ale_py")
pytest.importorskip("cv2")


def ours(game, **kwargs):
    env = make_env(EnvConfig(id=f"ALE/{game}-v5", atari=True, kwargs=kwargs))
    return next(wrapper for wrapper in wrapper_chain(env) if isinstance(wrapper, atari.AtariFrames))


def gymnasiums(game, **kwargs):
    gym.register_envs(ale_py)
    world = gym.make(f"ALE/{game}-v5", frameskip=1, disable_env_checker=True, **kwargs)
    return wrappers.AtariPreprocessing(world, noop_max=30, frame_skip=4, screen_size=84, terminal_on_life_loss=True)


def episode(env, seed, length=60):
    """Everything that an episode shows, played with actions that follow from its seed, up to its end or for `length` steps."""
    observation, info = env.reset(seed=seed)
    shown = [(observation.tobytes(), info)]
    choose = np.random.default_rng(seed)
    for _ in range(length):
        observation, reward, terminated, truncated, info = env.step(int(choose.integers(env.action_space.n)))
        shown.append((observation.tobytes(), reward, terminated, truncated, info))
        if terminated or truncated:
            break
    return shown


def play_on(env, steps, seed=0):
    """A history: random actions, on and on after lost lives, up to the end of the game; whether it ended."""
    choose = np.random.default_rng(seed)
    for _ in range(steps):
        env.step(int(choose.integers(env.action_space.n)))
        if env.unwrapped.ale.game_over():
            return True
    return False


# Breakout has paddles and lives, Pong no lives; the first picture of Amidar is one that a restored state does not bring back. Berzerk and
# DoubleDunk draw from their generators while they are loaded, DoubleDunk more numbers for some seeds than for others.
@pytest.mark.parametrize(
    ("game", "restores"), [("Breakout", True), ("Pong", True), ("Amidar", True), ("Berzerk", False), ("DoubleDunk", False)]
)
def test_an_episode_is_gymnasiums_whatever_was_played_before(game, restores):
    env, reference = ours(game), gymnasiums(game)
    shown = {}
    for seed, steps in {11: 3, 12: 25, 13: 90}.items():
        shown[seed] = episode(env, seed)
        assert shown[seed] == episode(reference, seed)
        play_on(env, steps)
    assert env._powered_on._is_right is restores  # so the third was begun without loading the game
    assert episode(env, 11) == shown[11]


def test_an_episode_after_a_lost_life_and_after_a_game_over_is_a_new_game():
    env, reference = ours("Breakout"), gymnasiums("Breakout")
    for seed in (1, 2):
        env.reset(seed=seed)
    lost = episode(env, 3, length=400)
    assert lost[-1][2]
    assert lost[-1][4]["lives"] == 4  # of five: the game itself would go on
    after_a_life = episode(env, 4)
    assert after_a_life[0][1]["lives"] == 5
    assert play_on(env, 5000)
    after_the_game = episode(env, 4)
    assert after_a_life == after_the_game == episode(reference, 4)


def test_the_game_is_loaded_twice_and_then_never_again(monkeypatch):
    env = ours("Breakout")
    loads = []
    load = env._game.load_game
    monkeypatch.setattr(env._game, "load_game", lambda: (loads.append(1), load()))
    for seed, loaded in ((7, 1), (7, 2), (8, 3), (9, 3), (7, 3)):  # the same seed again proves nothing
        env.reset(seed=seed)
        assert len(loads) == loaded


@pytest.mark.parametrize(
    "kwargs",
    [
        {"repeat_action_probability": 0.0},  # 0.25 is the default
        {"repeat_action_probability": 0.9},
        {"mode": 4, "difficulty": 1, "max_num_frames_per_episode": 60},  # 15 steps: no ball is lost in them
        {"max_num_frames_per_episode": 12},  # within the no-ops: the episode begins again
    ],
    ids=str,
)
def test_options_of_the_game_are_kept(kwargs):
    env, reference = ours("Breakout", **kwargs), gymnasiums("Breakout", **kwargs)
    for seed in (1, 2, 3):
        shown = episode(env, seed, 40)
        assert shown == episode(reference, seed, 40)
        assert shown[-1][3] == ("max_num_frames_per_episode" in kwargs)  # truncated
    env.step(3)  # "left", which the first frame of the next episode must not repeat
    assert episode(env, 5, 40) == episode(reference, 5, 40)


def test_a_reset_without_a_seed_goes_on_with_the_stream():
    env, reference = ours("Pong"), gymnasiums("Pong")
    for one in (env, reference):
        one.reset(seed=3)
        one.reset()
    assert np.array_equal(env.step(2)[0], reference.step(2)[0])


def test_a_format_that_is_not_known_is_loaded_for_every_episode(monkeypatch):
    monkeypatch.setattr(atari, "_GENERATOR", atari.re.compile(rb"no such generator"))
    env, reference = ours("Breakout"), gymnasiums("Breakout")
    for seed in (1, 2, 3):
        assert episode(env, seed, 20) == episode(reference, seed, 20)
    assert env._powered_on._is_right is False


def test_a_generator_is_written_as_the_emulator_does():
    words = [int(word) for word in atari._generator(5489).split()]
    assert words[:2] == [5489, 1301868182]  # 1812433253 * (5489 ^ 5489 >> 30) + 1, of 32 bits
    assert len(words) == 625
    assert words[-1] == 624


def test_other_worlds_go_through_gymnasiums_preprocessing():
    gym.register_envs(ale_py)
    limited = wrappers.TimeLimit(gym.make("ALE/Pong-v5", frameskip=1), 9)
    assert isinstance(atari.preprocess(limited), wrappers.AtariPreprocessing)
    with pytest.raises(ValueError, match="frame-skip"):
        atari.preprocess(gym.make("ALE/Pong-v5", frameskip=4))
    grey = atari.preprocess(gym.make("ALE/Pong-v5", frameskip=1, obs_type="grayscale", disable_env_checker=True))
    assert isinstance(grey, atari.AtariFrames)
