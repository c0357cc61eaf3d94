"""Atari games with the usual preprocessing; an episode begins from its seed without loading the game again.

The frames are those of Gymnasium's `AtariPreprocessing` (no-op starts of 1 to 30 frames, each action for four frames, the larger of the
last two pictures, 84 x 84 grey, a lost life ends the episode), bit for bit, and so are the games; only the time they take differs.
"""

from __future__ import annotations

import re
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces, wrappers

from inchworm.core.errors import MissingExtraError

_NOOPS, _SKIP, _SIZE = 30, 4, 84

_GENERATOR = re.compile(rb"(?:\d+ ){624}\d+")
"""A generator (mt19937) as the emulator writes it: 624 words and the place of the next one, which is 624 before the first draw."""


def preprocess(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """The usual preprocessing: ours if nothing is wrapped around the emulator, else Gymnasium's, which goes through the wrappers."""
    try:
        if _is_plain(env):
            return AtariFrames(env.unwrapped)
        return wrappers.AtariPreprocessing(
            env, noop_max=_NOOPS, frame_skip=_SKIP, screen_size=_SIZE, terminal_on_life_loss=True, grayscale_obs=True
        )
    except (ImportError, gym.error.DependencyNotInstalled) as error:
        raise MissingExtraError('Atari preprocessing needs OpenCV; type: pip install "inchworm[atari]"') from error


def _is_plain(env: gym.Env[Any, Any]) -> bool:
    """Whether this is ale-py's own environment of pictures and buttons, with nothing around it but the check of Gymnasium's call order."""
    if type(env) is wrappers.OrderEnforcing:
        env = env.env
    if type(env).__module__ != "ale_py.env":
        return False
    game: Any = env
    pictures = isinstance(game.observation_space, spaces.Box) and len(game.observation_space.shape) > 1
    return pictures and not game.continuous and game._frameskip == 1 and game.get_action_meanings()[0] == "NOOP"


class AtariFrames(gym.Wrapper[Any, Any, Any, Any]):
    """What an agent sees of a game, straight from the emulator: only frames that are used are rendered.

    A lost life ends the episode, and the next episode is a new game and not, as is common elsewhere, the next life of the same one: an
    episode must follow from its seed, its options and its actions, or it could not be replayed.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        import cv2

        self._cv2 = cv2
        game: Any = env
        self._game, self._ale = game, game.ale
        self._moves = list(game._action_set)
        self._powered_on = PoweredOn(game)
        self._lives = 0
        screen = self._ale.getScreenDims()
        self._shown, self._before = np.zeros(screen, np.uint8), np.zeros(screen, np.uint8)  # [210, 160]; some games have 250 lines
        self.observation_space = spaces.Box(0, 255, (_SIZE, _SIZE), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin a game, and let it run for 1 to 30 frames, as the seed says, without touching it."""
        info = self._begin(seed, options)
        for _ in range(int(self._game.np_random.integers(1, _NOOPS + 1))):
            self._ale.act(self._moves[0])
            info |= self._info()
            if self._ale.game_over():
                info = self._begin(seed, options)
        self._lives = self._ale.lives()
        self._ale.getScreenGrayscale(self._shown)
        self._before.fill(0)
        return self._picture(), info

    def _begin(self, seed: int | None, options: dict[str, Any] | None) -> dict[str, Any]:
        if seed is None:
            info: dict[str, Any] = self._game.reset(options=options)[1]
            return info
        gym.Env.reset(self._game, seed=seed)
        seeds = self._game.seed_game(seed)
        self._powered_on.restore(int(seeds[1]))
        self._ale.reset_game()
        return {**self._info(), "seeds": seeds}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Hold an action for four frames, or for fewer if the episode ends in them: then the picture is of the frames before."""
        ale, move, reward, lost = self._ale, self._moves[action], 0.0, False
        for frame in range(_SKIP):
            reward += ale.act(move)
            lives = ale.lives()
            lost = lives < self._lives
            self._lives = lives
            if lost or ale.game_over():
                break
            if frame == _SKIP - 2:
                ale.getScreenGrayscale(self._before)
            elif frame == _SKIP - 1:
                ale.getScreenGrayscale(self._shown)
        return self._picture(), reward, lost or ale.game_over(with_truncation=False), ale.game_truncated(), self._info()

    def _picture(self) -> np.ndarray:
        """The larger of the last two frames: many games draw a sprite in every other one only. [84, 84]"""
        np.maximum(self._shown, self._before, out=self._shown)
        picture: np.ndarray = self._cv2.resize(self._shown, (_SIZE, _SIZE), interpolation=self._cv2.INTER_AREA)
        return picture

    def _info(self) -> dict[str, Any]:
        ale = self._ale
        return {"lives": ale.lives(), "episode_frame_number": ale.getEpisodeFrameNumber(), "frame_number": ale.getFrameNumber()}


class PoweredOn:
    """The emulator's state just after a game has been loaded, for any seed.

    Loading takes some 100 ms, and all that a seed changes is the generator that repeats actions at random ("sticky actions"). So the
    machine is loaded once, and its saved state is restored with that generator seeded anew. It is the game's reset from there that makes
    the machine clean: a state saved after the reset would save its time too, but does not hold all of the picture chip, and not the action
    that may be repeated.

    This is verified: what is made for the seed of a second load must be that load's state. It never is if loading draws numbers
    (in a few games it does: they play some frames, and the seed decides how), nor if an emulator saves in another format; then the game
    is loaded for every episode.
    """

    def __init__(self, game: Any) -> None:
        self._game = game
        self._saved: bytes | None = None  # the state after the first load, made with the seed
        self._first_seed = -1
        self._is_right: bool | None = None  # unknown until the second load

    def restore(self, seed: int) -> None:
        """Bring the machine to where loading with this seed, which has been set, brings it; `ale.reset_game` must follow."""
        if self._is_right and self._saved is not None:
            from ale_py import ALEState

            state: Any = ALEState.__new__(ALEState)
            state.__setstate__(_reseeded(self._saved, seed))
            self._game.ale.restoreState(state)
            return
        self._game.load_game()
        if self._is_right is None:
            loaded = self._game.ale.cloneState(include_rng=True).serialize()
            if self._saved is None:
                self._saved, self._first_seed = loaded, seed
            elif seed != self._first_seed:
                self._is_right = _reseeded(self._saved, seed) == loaded


def _reseeded(saved: bytes, seed: int) -> bytes:
    """A saved state with the generator of repeated actions, the last of its two, seeded anew.

    The state is six numbers, the machine with its length before it, and two numbers more; the generator ends the machine, with its own
    length before it; all numbers are 4 bytes, the lowest first.
    """
    found = list(_GENERATOR.finditer(saved))
    if len(found) != 2:
        return b""
    text = _generator(seed)
    machine = saved[28 : found[1].start() - 4] + _number(len(text)) + text
    return saved[:24] + _number(len(machine)) + machine + saved[found[1].end() :]


def _generator(seed: int) -> bytes:
    """A seeded generator before its first draw, as text."""
    generator: Any = np.random.RandomState(seed).get_state(legacy=False)  # an mt19937 too
    return " ".join(map(str, [*generator["state"]["key"].tolist(), generator["state"]["pos"]])).encode()


def _number(value: int) -> bytes:
    return value.to_bytes(4, "little")
