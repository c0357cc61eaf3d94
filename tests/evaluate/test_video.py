"""Videos: the episodes are those that an evaluation scores, read back frame by frame; what cannot be recorded is one clear line."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from doubles.painted import HEIGHT, LIGHT, WIDTH, Blind, Forgetful, Grey, Growing, Painted, images
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.collect.opponents import RandomActor
from inchworm.config.sections import EnvConfig, EvalConfig, PolicyConfig, WrapperConfig
from inchworm.core.errors import ConfigError, EnvError, MissingExtraError
from inchworm.env.source import env_source, make_vector_env
from inchworm.evaluate import video as module
from inchworm.evaluate.evaluator import PolicyEvaluator, evaluate_policy, play_match
from inchworm.evaluate.video import record_video, save_video, show_video
from inchworm.policy.spec import PolicySpec
from inchworm.worlds.skirmish import HeuristicPolicy, SkirmishConfig

DRAWN = "doubles.painted:Painted"


def policy_for(env: Any) -> NumpyPolicy:
    """A policy that has never learnt anything, whose sampled actions are all but uniform."""
    made = make_vector_env(env, 1)
    made.close()
    return NumpyPolicy(PolicySpec(made.observation_space, made.action_space, PolicyConfig(hidden_sizes=(8,), normalize_observations=True)))


def same(one: Any, other: Any) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("returns", "lengths", "seeds", "agent_returns"))


@pytest.mark.parametrize("suffix", [".mp4", ".gif"])
def test_it_has_an_image_of_every_reset_and_step_of_the_episodes_that_are_scored(tmp_path: Path, suffix: str) -> None:
    policy, path = policy_for(Painted), tmp_path / f"painted{suffix}"
    how: dict[str, Any] = {"seed": 5, "deterministic": False, "num_envs": 2}
    stats = record_video(policy, DRAWN, path, 3, **how)
    assert same(stats, evaluate_policy(policy, Painted, 3, **how)), "being recorded changes nothing"
    seen = images(path)
    expected = [LIGHT * step for length in stats.lengths for step in range(length + 1)]
    assert len(seen) == len(expected) == stats.lengths.sum() + 3
    size = (HEIGHT + 1, WIDTH + 1) if suffix == ".mp4" else (HEIGHT, WIDTH)  # H.264 needs even numbers
    assert seen.shape[1:] == (*size, 3)
    assert np.abs(seen.mean((1, 2, 3)) - expected).max() < 6, "in order, and the last image is of the step that ended the episode"
    assert list(tmp_path.iterdir()) == [path]


def test_greedy_and_sampled_differ_and_seeds_choose_the_episodes(tmp_path: Path) -> None:
    policy = policy_for(Painted)
    greedy = record_video(policy, DRAWN, tmp_path / "a.gif", seeds=[3, 4])
    sampled = record_video(policy, DRAWN, tmp_path / "b.gif", seeds=[3, 4], deterministic=False)
    assert greedy.seeds.tolist() == sampled.seeds.tolist() == [3, 4]
    assert not np.array_equal(greedy.returns, sampled.returns)
    with pytest.raises(ConfigError, match="evaluation got 2 seeds for 3 episodes"):
        record_video(policy, DRAWN, tmp_path / "c.gif", 3, seeds=[3, 4])


def test_speed_is_the_environments_own_or_the_one_given(tmp_path: Path) -> None:
    import av

    policy = policy_for(Painted)
    for given, expected in ((None, 10), (25, 25)):
        record_video(policy, DRAWN, tmp_path / "a.mp4", fps=given)
        with av.open(str(tmp_path / "a.mp4")) as file:
            assert file.streams.video[0].average_rate == expected
    stats = record_video(policy, DRAWN, tmp_path / "fast.gif", fps=200)  # browsers show 50 images per second: every fourth
    assert len(images(tmp_path / "fast.gif")) == -(-(stats.lengths[0] + 1) // 4)


def test_the_first_episodes_of_a_long_evaluation_are_recorded_and_cut_where_it_cut_them() -> None:
    policy = policy_for(Painted)
    with PolicyEvaluator(Painted, record=3) as evaluator:
        long = evaluator.evaluate(policy, 20)
    short = evaluate_policy(policy, Painted, 3)
    assert np.array_equal(long.returns[:3], short.returns)
    assert [len(episode.actions) for episode in long.recorded] == long.lengths[:3].tolist()
    assert [float(np.sum(episode.rewards, dtype=np.float64)) for episode in long.recorded] == pytest.approx(long.returns[:3].tolist())
    with PolicyEvaluator(Painted, EvalConfig(max_episode_steps=2, num_envs=2), record=3) as evaluator:
        assert [len(episode.actions) for episode in evaluator.evaluate(policy, 3, seeds=[1, 2, 3]).recorded] == [2, 2, 2]
    assert evaluate_policy(policy, Painted, 1).recorded == ()


WRAPPED = EnvConfig(id="CartPole-v1", frame_stack=3, max_episode_steps=9, wrappers=(WrapperConfig(name="FlattenObservation"),))
RULES = {"units": ["scout"], "wall_pairs": 0, "max_steps": 12}
SKIRMISH = EnvConfig(id="Skirmish-v0", kwargs=RULES)


@pytest.mark.parametrize(
    ("env", "height"),
    [
        ("CartPole-v1", 400),  # stepped all together, drawn by Gymnasium's
        (WRAPPED, 400),
        (SKIRMISH, 512),
        (EnvConfig(id="mpe2.simple_spread_v3:parallel_env", max_episode_steps=6), 700),
        ("pettingzoo.classic.tictactoe_v3:env", 1000),  # in turns, with masks
        (lambda: gym.make("CartPole-v1"), 400),  # made again from its spec
        (gym.make("CartPole-v1"), 400),
    ],
    ids=["native", "wrapped", "skirmish", "team", "turns", "factory", "instance"],
)
def test_every_kind_of_environment_is_recorded_as_it_is_scored(tmp_path: Path, env: Any, height: int) -> None:
    policy, path = policy_for(env), tmp_path / "it.mp4"
    stats = record_video(policy, env, path, deterministic=False, seed=2, max_episode_steps=8)
    assert same(stats, evaluate_policy(policy, env, 1, deterministic=False, seed=2, max_episode_steps=8))
    seen = images(path)
    assert len(seen) == stats.lengths[0] + 1
    assert seen.shape[1] == height
    assert (seen[0] != seen[-1]).any()


def test_an_atari_game_is_seen_as_its_screen_not_as_the_observation(tmp_path: Path) -> None:
    pytest.importorskip("ale_py")
    config = EnvConfig(id="ALE/Pong-v5", atari=True, frame_stack=4, max_episode_steps=5)
    made = make_vector_env(config, 1)
    stats = record_video(RandomActor(made.action_space), config, tmp_path / "pong.mp4")
    made.close()
    assert stats.lengths.tolist() == [5]
    assert images(tmp_path / "pong.mp4").shape == (6, 210, 160, 3)


def test_an_instance_that_draws_is_used_and_left_open(tmp_path: Path) -> None:
    env = Painted("rgb_array")
    for given in (env, Painted):  # and a factory that takes render_mode
        stats = record_video(policy_for(Painted), given, tmp_path / "a.gif")
        assert len(images(tmp_path / "a.gif")) == stats.lengths[0] + 1
    assert "step" not in vars(env)


def test_a_game_of_a_match_is_recorded_with_both_players(tmp_path: Path) -> None:
    rules = SkirmishConfig.from_dict(RULES)
    stats = play_match(HeuristicPolicy(rules), HeuristicPolicy(rules, 0.3), SKIRMISH, 4, save_replay=True, record=1)
    assert stats.replay is not None
    path = save_video(tmp_path / "game.gif", env_source(SKIRMISH), stats.recorded)
    assert len(images(path)) == len(stats.replay["frames"])


@pytest.mark.parametrize(
    ("env", "path", "error", "message"),
    [
        (Painted, "it.avi", ConfigError, "a video is an .mp4 or a .gif file, and it.avi is not; name one, such as video.mp4"),
        (Painted, ".", ConfigError, "a video is an .mp4 or a .gif file"),
        (Blind, "it.gif", ConfigError, 'Blind cannot be recorded: it was made without render_mode="rgb_array"'),
        ("doubles.toys:Corridor", "it.gif", ConfigError, "doubles.toys:Corridor cannot be recorded"),
        ("gymnax:CartPole-v1", "it.gif", ConfigError, "gymnax:CartPole-v1 cannot be recorded: its copies are stepped all together"),
        (Grey, "it.gif", EnvError, r"render\(\) must return an image \[height, width, 3\] of uint8 to be recorded; got uint8 \(31, 47\)"),
        (Growing, "it.gif", EnvError, r"render\(\) returned images of different sizes, \(31, 47, 3\) and \(32, 47, 3\)"),
        (Forgetful, "it.gif", EnvError, "played again, gave another result at step 1, so its episodes depend on more than their seed"),
    ],
)
def test_what_cannot_be_recorded_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: Any, path: str, error: type[Exception], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    drawn = env if not isinstance(env, type) or env is Blind else lambda: env("rgb_array")
    with pytest.raises(error, match=message) as raised:
        record_video(policy_for(Painted), drawn, path)
    assert len(str(raised.value).splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=r"fps=0 must be from 0\.1 to 240"):
        record_video(policy_for(Painted), DRAWN, "a.gif", fps=0)


def test_without_pyav_an_mp4_names_what_to_install_and_a_gif_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    policy = policy_for(Painted)
    with pytest.raises(MissingExtraError, match=r'needs PyAV; type: pip install "inchworm\[video\]", or write a \.gif'):
        record_video(policy, DRAWN, tmp_path / "a.mp4")
    record_video(policy, DRAWN, tmp_path / "a.gif")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match=r'needs Pillow; type: pip install "inchworm\[video\]"$'):
        record_video(policy, DRAWN, tmp_path / "b.gif")


def test_a_kill_while_recording_leaves_no_file(tmp_path: Path) -> None:
    program = (
        "from doubles.painted import Dying, Painted\nfrom inchworm import RandomActor, record_video\n"
        "record_video(RandomActor(Painted().action_space), lambda: Dying('rgb_array'), 'a.gif', seeds=[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -9, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_window_shows_it_where_there_is_a_display(monkeypatch: pytest.MonkeyPatch) -> None:
    pygame = pytest.importorskip("pygame")
    with PolicyEvaluator(Painted, record=1) as evaluator:
        stats = evaluator.evaluate(policy_for(Painted), 1)
    source = env_source(lambda: Painted("rgb_array"))
    monkeypatch.setattr(module, "has_display", lambda: True)
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    shown: list[int] = []
    flip = pygame.display.flip
    monkeypatch.setattr(pygame.display, "flip", lambda: (shown.append(pygame.display.get_surface().get_at((3, 3))[0]), flip()))
    monkeypatch.setattr(module, "own_fps", lambda env: 240.0)
    show_video(source, stats.recorded)
    assert shown == [LIGHT * step for step in range(stats.lengths[0] + 1)]
    monkeypatch.setattr(module, "has_display", lambda: False)
    with pytest.raises(ConfigError, match=r"no display to show a window on.*--video video\.mp4"):
        show_video(source, stats.recorded)
