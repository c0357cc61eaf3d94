"""Tests of env/make.py: one environment from its config."""

import sys
import types

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import wrappers

from doubles.toys import ConstantReward, Counter
from inchworm.config.sections import EnvConfig, WrapperConfig
from inchworm.core.errors import ConfigError, EnvError, MissingExtraError
from inchworm.env import make as build
from inchworm.env.check import check_env
from inchworm.env.make import RecreatedWorld, make_env, make_from
from inchworm.env.restore import refuse_stateful_wrappers, wrapper_chain


def chain(env):
    return [type(wrapper).__name__ for wrapper in wrapper_chain(env)]


def test_a_registered_id_is_made_with_its_arguments_and_limit():
    env = make_env(EnvConfig(id="CartPole-v1", kwargs={"sutton_barto_reward": True}, max_episode_steps=3))
    env.reset(seed=0)
    results = [env.step(0) for _ in range(3)]
    assert [r[1] for r in results] == [0.0, 0.0, 0.0]  # Sutton and Barto: 0 until the pole falls
    assert [r[3] for r in results] == [False, False, True]
    assert "PassiveEnvChecker" not in chain(env)


def test_a_factory_by_name_gets_the_arguments_and_the_limit():
    env = make_env(EnvConfig(id="doubles.toys:Counter", kwargs={"length": 9}, max_episode_steps=4))
    assert isinstance(env.unwrapped, Counter)
    assert env.unwrapped.length == 9
    env.reset(seed=1)
    assert [env.step(0)[3] for _ in range(4)] == [False, False, False, True]


def test_arguments_that_are_not_accepted_are_named():
    with pytest.raises(EnvError, match=r"CartPole-v1.*env.kwargs=\{'wheels': 3\}"):
        make_env(EnvConfig(id="CartPole-v1", kwargs={"wheels": 3}))
    with pytest.raises(EnvError, match=r"toys:Corridor cannot be called with env.kwargs=\{'lenth': 3\}: .*lenth.*; it takes \(length"):
        make_env(EnvConfig(id="doubles.toys:Corridor", kwargs={"lenth": 3}))


@pytest.mark.parametrize(
    ("id", "words"),
    [
        ("doubles.toys:Countr", r"has no Countr; did you mean Counter\?"),
        ("no_such_module_here:make", "there is no module no_such_module_here"),
        ("inchworm.no_such:make", r"there is no module inchworm\.no_such"),
        ("module_of_numbers:seven", "seven of module_of_numbers is int, not a function"),
        ("module_of_numbers:not_an_env", r"returned int, not a gymnasium\.Env"),
        ("CartPol-v1", r"'CartPol-v1' is not registered.*did you mean CartPole-v1\?"),
        ("CartPole-v99", r"did you mean CartPole-v\d"),
    ],
)
def test_an_id_that_cannot_be_made_is_explained(monkeypatch, id, words):
    module = types.ModuleType("module_of_numbers")
    module.seven, module.not_an_env = 7, lambda: 7
    monkeypatch.setitem(sys.modules, "module_of_numbers", module)
    with pytest.raises(EnvError, match=words):
        make_env(EnvConfig(id=id))


def test_a_module_in_the_working_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "my_toys_here.py").write_text("from doubles.toys import Counter as make\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    assert isinstance(make_env(EnvConfig(id="my_toys_here:make")), Counter)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import surely_not_installed_anywhere", "ModuleNotFoundError: .*surely_not_installed_anywhere"),
        ("import sys\nsys.exit(0)", "SystemExit: 0"),
        ("import sys\ndef make():\n    sys.exit(0)", "SystemExit: 0"),
        ("def make():\n    return 1 / 0", "ZeroDivisionError: .*"),
    ],
)
def test_what_a_module_or_factory_raises_is_named(code, error, tmp_path, monkeypatch):
    name = f"toys_that_raise_{abs(hash(code))}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EnvError, match=rf"{name}.* raised {error}.*\n  at .*{name}.py:\d in "):
        make_env(EnvConfig(id=f"{name}:make"))


def test_gymnasiums_module_and_id_form(monkeypatch):
    module = types.ModuleType("module_that_registers")
    monkeypatch.setitem(sys.modules, "module_that_registers", module)
    monkeypatch.setitem(gym.registry, "ToyOfTests-v0", gym.envs.registration.EnvSpec("ToyOfTests-v0", ConstantReward))
    assert isinstance(make_env(EnvConfig(id="module_that_registers:ToyOfTests-v0")).unwrapped, ConstantReward)


def test_wrappers_by_name_innermost_first():
    clip = WrapperConfig(name="ClipReward", kwargs={"min_reward": -0.5, "max_reward": 0.5})
    env = make_env(EnvConfig(id="CartPole-v1", wrappers=(clip, WrapperConfig(name="TimeAwareObservation")), frame_stack=3))
    assert chain(env)[:3] == ["FrameStack", "TimeAwareObservation", "ClipReward"]
    assert env.observation_space.shape == (3, 5)
    env.reset(seed=0)
    assert env.step(0)[1] == 0.5


def test_stacked_frames_are_gymnasiums():
    ours = make_env(EnvConfig(id="CartPole-v1", frame_stack=3))
    theirs = wrappers.FrameStackObservation(gym.make("CartPole-v1"), 3)
    assert ours.observation_space == theirs.observation_space
    for seed in (0, 1):
        (first, _), (expected, _) = ours.reset(seed=seed), theirs.reset(seed=seed)
        assert np.array_equal(first, expected)
        kept = first.copy()
        for action in (0, 1, 1, 0, 1):
            observation, other = ours.step(action)[0], theirs.step(action)[0]
            assert observation.dtype == other.dtype
            assert np.array_equal(observation, other)
        assert np.array_equal(first, kept)  # an observation that was given out does not change


def test_observations_that_are_not_boxes_are_stacked_too():
    time_aware = WrapperConfig(name="TimeAwareObservation", kwargs={"flatten": False})
    observation, _ = make_env(EnvConfig(id="CartPole-v1", wrappers=(time_aware,), frame_stack=2)).reset(seed=0)
    assert {key: value.shape for key, value in observation.items()} == {"obs": (2, 4), "time": (2, 1)}


def test_unknown_and_wrong_wrappers_are_rejected():
    with pytest.raises(ConfigError, match=r"no ClipRewards; did you mean ClipReward\?"):
        make_env(EnvConfig(wrappers=(WrapperConfig(name="ClipRewards"),)))
    with pytest.raises(ConfigError, match=r"ClipReward could not be made with \{'low': 1\}"):
        make_env(EnvConfig(wrappers=(WrapperConfig(name="ClipReward", kwargs={"low": 1}),)))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("NormalizeObservation", "policy.normalize_observations"),
        ("NormalizeReward", "policy.normalize_values"),
        ("Autoreset", "true final observation"),
    ],
)
def test_wrappers_whose_state_crosses_episodes_are_rejected(name, hint):
    with pytest.raises(ConfigError, match=hint):
        make_env(EnvConfig(wrappers=(WrapperConfig(name=name),)))
    with pytest.raises(EnvError, match=hint):
        refuse_stateful_wrappers(wrappers.TimeLimit(getattr(wrappers, name)(gym.make("CartPole-v1")), 5))


def test_a_users_own_normalise_wrapper_is_not_taken_for_gymnasiums():
    class NormalizeObservation(gym.Wrapper):
        pass

    refuse_stateful_wrappers(NormalizeObservation(gym.make("CartPole-v1")))


@pytest.mark.parametrize(
    ("id", "words"),
    [
        ("LunarLander-v3", r'pip install "inchworm\[box2d\]"'),
        ("HalfCheetah-v5", r'pip install "inchworm\[mujoco\]"'),
        ("ALE/Pong-v5", r'pip install "inchworm\[atari\]"'),
        ("CartPole-v1", "needs frobnicator"),
    ],
)
def test_a_missing_dependency_is_explained(monkeypatch, id, words):
    def make(*args, **kwargs):
        raise gym.error.DependencyNotInstalled("needs frobnicator")

    monkeypatch.setattr(gym, "make", make)
    monkeypatch.setitem(sys.modules, "ale_py", None)  # makes `import ale_py` raise ImportError
    with pytest.raises(MissingExtraError, match=words):
        make_env(EnvConfig(id=id))


def test_atari_preprocessing():
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    env = make_env(EnvConfig(id="ALE/Breakout-v5", atari=True, frame_stack=4, max_episode_steps=7))
    assert (env.observation_space.shape, env.observation_space.dtype) == ((4, 84, 84), np.uint8)
    assert env.unwrapped._frameskip == 1
    observation, _ = env.reset(seed=3)
    again, _ = env.reset(seed=3)
    assert np.array_equal(observation, again)
    ends = [env.step(0)[3] for _ in range(7)]
    assert ends == [False] * 6 + [True]  # the limit counts steps of four frames


def test_missing_opencv_is_explained(monkeypatch):
    pytest.importorskip("ale_py")
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(MissingExtraError, match=r'OpenCV; type: pip install "inchworm\[atari\]"'):
        make_env(EnvConfig(id="ALE/Breakout-v5", atari=True))


def test_atari_rewards_are_signs():
    assert [build._sign(reward) for reward in (-7.0, 0.0, 200.0)] == [-1.0, 0.0, 1.0]


def test_atari_preprocessing_of_another_world_is_rejected():
    pytest.importorskip("ale_py")
    with pytest.raises(EnvError, match="CartPole-v1"):
        make_env(EnvConfig(id="CartPole-v1", atari=True))
    with pytest.raises(EnvError, match="does not fit"):
        make_env(EnvConfig(id="doubles.toys:Counter", atari=True))


def play(env, seed, actions):
    seen = [env.reset(seed=seed)[0]]
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(action)
        seen.append(np.append(observation, reward))
        if terminated or truncated:
            break
    return [row.tobytes() for row in seen]


def after_others(env, seed):
    """An episode in a copy that has played three others."""
    rng = np.random.default_rng(seed)
    for other in range(3):
        play(env, 100 + other, rng.uniform(-1, 1, (80, 4)).astype(np.float32))
    actions = rng.uniform(-1, 1, (250, 4)).astype(np.float32)
    return play(env, seed, actions), actions


def test_a_used_walker_walks_as_a_fresh_one():
    pytest.importorskip("Box2D")
    config = EnvConfig(id="BipedalWalker-v3")
    recreated, unchanged = [], []
    for seed in range(3):
        used, actions = after_others(make_env(config), seed)
        fresh = play(gym.make(config.id), seed, actions)
        recreated.append(used == fresh)
        unchanged.append(after_others(gym.make(config.id), seed)[0] == fresh)
    assert all(recreated)
    assert not all(unchanged)  # else Gymnasium has fixed it, and RecreatedWorld can go
    assert not [problem for problem in check_env(config).problems if "deterministic" in problem]
    made = make_from(lambda: gym.make(config.id, hardcore=True), config)
    assert isinstance(made, RecreatedWorld)
    assert not isinstance(make_env(EnvConfig(id="LunarLander-v3")), RecreatedWorld)
