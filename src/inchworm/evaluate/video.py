"""Videos of what a policy does: its recorded episodes are played again, bit for bit, in an environment that draws them.

An evaluation only keeps the actions of its first episodes, so being recorded changes nothing about it, also where its copies are stepped
together or in workers. A reward that differs when the actions are played again is an error: the video would show something else.
"""

from __future__ import annotations

import importlib.util
import io
import itertools
import math
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from inchworm.config.sections import EnvConfig, EvalConfig
from inchworm.core.errors import ConfigError, EnvError, MissingExtraError, env_errors
from inchworm.core.protocols import Actor
from inchworm.core.tensor_file import write_atomically
from inchworm.core.types import Array
from inchworm.env.local import LocalCopies
from inchworm.env.make import call_factory, make_env, make_from
from inchworm.env.pettingzoo_copy import Team
from inchworm.env.registry import is_vector_only
from inchworm.env.restore import Env
from inchworm.env.source import EnvSource, env_source
from inchworm.env.values import make_put
from inchworm.evaluate.evaluator import PolicyEvaluator
from inchworm.evaluate.games import for_evaluation
from inchworm.evaluate.stats import EvalStats, RecordedEpisode
from inchworm.worlds.replay import save_replay

MODULES = {".mp4": ("av", "PyAV"), ".gif": ("PIL", "Pillow")}
"""The formats by suffix, and what writes them."""
GIF_PIXELS, GIF_FPS = 320, 50
"""Images of a gif are scaled down to this width or height, and are shown at most this often: browsers slow faster ones down."""
MODE = "rgb_array"


def record_video(
    policy: Actor,
    env: Any,
    path: str | Path,
    episodes: int | None = None,
    *,
    seeds: Sequence[int] | None = None,
    deterministic: bool = True,
    num_envs: int = 8,
    seed: int = EvalConfig.seed,
    max_episode_steps: int | None = None,
    fps: float | None = None,
) -> EvalStats:
    """Evaluate a policy as `evaluate_policy` does, and write all episodes to one video; the suffix of `path` is .mp4 or .gif.

    There is one episode by default, or one for each of the given seeds. `env` is an id, an `EnvConfig`, a factory or an environment that
    can draw itself (render_mode rgb_array). `fps` is the environment's own by default.
    """
    check_video(path, fps)
    count = episodes if episodes is not None else 1 if seeds is None else len(seeds)
    how: dict[str, Any] = {"deterministic": deterministic, "seed": seed, "max_episode_steps": max_episode_steps}
    config = EvalConfig(episodes=max(1, count), num_envs=max(1, min(num_envs, count)), **how)
    source = env_source(env)
    with drawing_env(source):  # refused before anything is played
        pass
    with PolicyEvaluator(source, config, record=count) as evaluator:
        stats = evaluator.evaluate(policy, count, seeds=seeds)
    save_video(path, source, stats.recorded, fps)
    return stats


def check_video(path: str | Path, fps: float | None = None) -> None:
    """Refuse a video that cannot be written, before anything is played."""
    suffix = Path(path).suffix.lower()
    if suffix not in MODULES or Path(path).is_dir():
        raise ConfigError(f"a video is an .mp4 or a .gif file, and {path} is not; name one, such as video.mp4")
    module, package = MODULES[suffix]
    if importlib.util.find_spec(module) is None:
        other = ", or write a .gif" if suffix == ".mp4" and importlib.util.find_spec("PIL") is not None else ""
        raise MissingExtraError(f'writing {path} needs {package}; type: pip install "inchworm[video]"{other}')
    if fps is not None and not 0.1 <= fps <= 240:
        raise ConfigError(f"fps={fps:g} must be from 0.1 to 240")


def save_video(path: str | Path, source: EnvSource, episodes: Sequence[RecordedEpisode], fps: float | None = None) -> Path:
    """Draw recorded episodes of an environment and write them to one video, completely or not at all."""
    check_video(path, fps)
    with drawing_env(source) as env:
        frames = draw_episodes(env, source.name, episodes)
        encode = _mp4 if Path(path).suffix.lower() == ".mp4" else _gif
        return write_atomically(path, encode(frames, fps or own_fps(env)))


@contextmanager
def drawing_env(source: EnvSource) -> Iterator[Env]:
    """Make one environment that draws its frames, as evaluation makes it; a given one that draws them already is used and stays open."""
    given: Any = source.given
    for name, value in ({} if has_display() else {"SDL_VIDEODRIVER": "dummy", "MUJOCO_GL": "egl"}).items():
        os.environ.setdefault(name, value)  # else pygame and MuJoCo look for a display
    if source.is_vector or (source.is_config and is_vector_only(str(given if source.kind == "id" else given.id))):
        raise ConfigError(
            f"{source.name} cannot be recorded: its copies are stepped all together by another package, which draws no frames; "
            "evaluate the policy in an environment of Gymnasium with the same spaces, such as --env CartPole-v1"
        )
    env: Any = given
    if source.can_be_copied:
        plain, drawing = _makers(source)
        with env_errors(source.name, "making the environment"):
            try:
                env = drawing()
            except EnvError:  # one that does not take render_mode, or is wrong anyway: then this raises, too
                env = plain()
    try:
        if _render_mode(env) != MODE and isinstance(env, gym.Env) and not source.is_config:
            env = _made_again(env, env is given)
        if _render_mode(env) != MODE:
            modes = getattr(_unwrapped(env), "metadata", {}).get("render_modes") or "none"
            raise ConfigError(
                f'{source.name} cannot be recorded: it was made without render_mode="{MODE}" (its render modes: {modes}); '
                "let the factory take render_mode as an argument or set it, and let render() return an image"
            )
        yield env
    finally:
        if env is not given:
            with env_errors(source.name, "close"):
                env.close()


def _makers(source: EnvSource) -> tuple[Callable[[], Env], Callable[[], Env]]:
    """What makes one environment, as evaluation makes it and with the argument render_mode."""

    def drawing(config: EnvConfig) -> EnvConfig:
        return config.replace(kwargs={**config.kwargs, "render_mode": MODE})

    given: Any = source.given
    if source.is_config:
        config = for_evaluation(EnvConfig(id=given) if source.kind == "id" else given, 1)
        return partial(make_env, config), partial(make_env, drawing(config))
    if isinstance(given, partial) and given.func is make_from:  # a factory with a config's limit and wrappers
        factory, config = given.args
        return given, partial(make_from, factory, drawing(config))
    return given, partial(call_factory, given, drawing(EnvConfig()))


def _made_again(env: gym.Env[Any, Any], is_given: bool) -> gym.Env[Any, Any]:
    """The same environment with frames, from its spec; the environment itself if it has none."""
    try:
        again: gym.Env[Any, Any] = gym.make(env.spec, render_mode=MODE, disable_env_checker=True)  # type: ignore[arg-type]
    except Exception:  # no spec, or a wrapper that cannot be made again: the caller says what to do
        return env
    if not is_given:
        env.close()
    return again


def _unwrapped(env: Any) -> Any:
    """What steps and draws: PettingZoo's environment of a team, else the environment."""
    return env.env if isinstance(env, Team) else env


def _render_mode(env: Any) -> Any:
    return getattr(_unwrapped(env), "render_mode", None)


def own_fps(env: Env) -> float:
    """The frames per second that an environment declares, else 30."""
    declared = getattr(_unwrapped(env), "metadata", {}).get("render_fps")
    return float(declared) if isinstance(declared, int | float) and 0.1 <= declared <= 240 else 30.0


class _Camera:
    """Draws an environment after each of its steps, also the last of an episode: the copy that steps it then resets it at once."""

    def __init__(self, env: Env, name: str) -> None:
        self._env, self._name = _unwrapped(env), name
        self._step, self._is_own = self._env.step, "step" in vars(self._env)
        self._env.step = self._step_and_draw
        self.frame: Array | None = None

    def _step_and_draw(self, action: Any) -> Any:
        result = self._step(action)
        if action is not None:  # that is the move of an agent that has left a turn-based game
            self.frame = self.draw()
        return result

    def draw(self) -> Array:
        """Return the image [height, width, 3] uint8 of the environment as it is."""
        with env_errors(self._name, "render"):
            frame = self._env.render()
        if not isinstance(frame, np.ndarray) or frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            found = f"{frame.dtype} {frame.shape}" if isinstance(frame, np.ndarray) else type(frame).__name__
            raise EnvError(f"{self._name}: render() must return an image [height, width, 3] of uint8 to be recorded; got {found}")
        return frame

    def remove(self) -> None:
        """Leave the environment as it was."""
        if self._is_own:
            self._env.step = self._step
        else:
            del self._env.step


def draw_episodes(env: Env, name: str, episodes: Iterable[RecordedEpisode]) -> Generator[Array, None, None]:
    """Play recorded episodes again and yield an image [height, width, 3] uint8 of each reset and each step."""
    camera = _Camera(env, name)
    try:
        copies = LocalCopies(lambda: env, 0, 1)
        rows = copies.allocate(1)[0]
        copies.attach(rows)
        put = make_put(copies.action_space)
        for episode in episodes:
            copies.reset([0], [episode.seed])
            yield camera.draw()
            for step, (actions, rewards) in enumerate(zip(episode.actions, episode.rewards), 1):
                put(actions, rows.actions)
                ended = copies.step()
                if not np.array_equal(rows.rewards, rewards) or (ended and step < len(episode.actions)):
                    raise EnvError(
                        f"{name} cannot be recorded: the actions of the episode of seed {episode.seed}, played again, gave another result "
                        f"at step {step}, so its episodes depend on more than their seed and actions"
                    )
                if camera.frame is not None:
                    yield camera.frame
    finally:
        camera.remove()


def _mp4(frames: Iterator[Array], fps: float) -> bytes:
    """Encode images as H.264, which every browser plays."""
    import av

    buffer, stream = io.BytesIO(), None
    with av.open(buffer, "w", format="mp4") as container:
        for frame in _of_one_size(frames):
            even = np.pad(frame, ((0, frame.shape[0] % 2), (0, frame.shape[1] % 2), (0, 0)), mode="edge")  # as the format needs
            if stream is None:
                stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000), options={"crf": "25", "threads": "1"})
                stream.height, stream.width, stream.pix_fmt = *even.shape[:2], "yuv420p"
            container.mux(stream.encode(av.VideoFrame.from_ndarray(even, "rgb24")))
        if stream is not None:
            container.mux(stream.encode())
    return buffer.getvalue()


def _gif(frames: Iterator[Array], fps: float) -> bytes:
    """Encode images as an animation that repeats, of `GIF_PIXELS` and `GIF_FPS` at most."""
    from PIL import Image

    every = math.ceil(fps / GIF_FPS)

    def small(frame: Array) -> Any:
        image = Image.fromarray(frame)
        image.thumbnail((GIF_PIXELS, GIF_PIXELS))
        return image.quantize(128, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)

    images = (small(frame) for frame in itertools.islice(_of_one_size(frames), 0, None, every))
    buffer, hundredths = io.BytesIO(), max(2, round(100 * every / fps))
    next(images).save(buffer, "GIF", save_all=True, append_images=images, duration=10 * hundredths, loop=0)
    return buffer.getvalue()


def _of_one_size(frames: Iterable[Array]) -> Iterator[Array]:
    shape = None
    for frame in frames:
        shape = shape or frame.shape
        if frame.shape != shape:
            raise EnvError(f"render() returned images of different sizes, {shape} and {frame.shape}; a video has one size")
        yield frame


def has_display() -> bool:
    """Whether windows can be opened here."""
    return not sys.platform.startswith("linux") or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def check_display() -> None:
    """Refuse to open a window where there is no display."""
    if not has_display():
        raise ConfigError("there is no display to show a window on (DISPLAY is not set); write a file instead: --video video.mp4")
    if importlib.util.find_spec("pygame") is None:
        raise MissingExtraError('a window needs pygame; type: pip install "inchworm[video]"')


def show_video(source: EnvSource, episodes: Sequence[RecordedEpisode]) -> None:
    """Draw recorded episodes in a window, at the environment's frames per second, until they end or the window is closed."""
    check_display()
    import pygame

    with drawing_env(source) as env:
        frames, clock, screen = draw_episodes(env, source.name, episodes), pygame.time.Clock(), None
        pygame.display.init()
        try:
            for frame in frames:
                if screen is None:
                    screen = pygame.display.set_mode((frame.shape[1], frame.shape[0]))
                    pygame.display.set_caption(source.name)
                if any(event.type == pygame.QUIT for event in pygame.event.get()):
                    break
                screen.blit(pygame.surfarray.make_surface(frame.swapaxes(0, 1)), (0, 0))
                pygame.display.flip()
                clock.tick(own_fps(env))
        finally:
            frames.close()
            pygame.display.quit()


class KeptReplays:
    """Keeps the first episode of the newest evaluations as files: a replay where games can be replayed, else a video."""

    def __init__(self, evaluator: PolicyEvaluator, directory: Path, keep: int, players: tuple[str, str]) -> None:
        """`players` are the names of the first and the second team. What cannot be drawn here is refused, before training."""
        self._evaluator, self._directory, self._keep, self._players = evaluator, directory, keep, players
        self._suffix = ".json"
        if evaluator.make_replay is None and evaluator.source is not None:
            self._suffix = ".gif" if importlib.util.find_spec("av") is None and importlib.util.find_spec("PIL") is not None else ".mp4"
            check_video(directory / f"video{self._suffix}")
            with drawing_env(evaluator.source) as env:
                list(draw_episodes(env, evaluator.source.name, [RecordedEpisode(seed=0)]))

    def keep(self, env_steps: int, stats: EvalStats) -> None:
        """Write the first episode of an evaluation, named by the run's env steps, unless it is there, and delete the oldest files."""
        path = self._directory / f"step-{env_steps:012d}{self._suffix}"
        if path.exists():  # of the evaluation before the last one, or of the time before a resume: the same episode
            return
        episode, source = stats.recorded[0], self._evaluator.source
        if self._evaluator.make_replay is not None:
            save_replay(path, self._evaluator.make_replay(episode.seed, episode.actions, self._players, episode.info))
        elif source is not None:
            save_video(path, source, [episode])
        for old in sorted(self._directory.glob("step-*"))[: -self._keep]:
            old.unlink(missing_ok=True)
