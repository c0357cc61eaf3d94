"""Small environments that draw themselves: every image tells the step, and an episode depends on its seed and actions alone."""

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces

HEIGHT, WIDTH, LIGHT = 31, 47, 12


class Painted(gym.Env[np.ndarray, int]):
    """Up to 16 steps; action 1 earns a random number, which also ends the episode if it is above 0.9. Brighter with every step."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.observation_space, self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(2)
        self.steps = 0

    def _see(self) -> np.ndarray:
        return self.np_random.uniform(-1.0, 1.0, 2).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self._see(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        number = float(self.np_random.random())
        return self._see(), number * int(action), number > 0.9, self.steps == 16, {}

    def render(self) -> Any:
        assert self.render_mode == "rgb_array", "only asked for where it was made to draw"
        return np.full((HEIGHT, WIDTH, 3), LIGHT * self.steps, np.uint8)


class Forgetful(Painted):
    """Also depends on how often it was made."""

    made = 0

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        Forgetful.made += 1
        self.own = Forgetful.made

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        observation, _, *rest = super().step(action)
        return observation, float(self.own), *rest  # type: ignore[return-value]


class Blind(Painted):
    """Takes no render_mode."""

    def __init__(self) -> None:
        super().__init__()


class Grey(Painted):
    """Draws what is not an image in colours."""

    def render(self) -> Any:
        return np.zeros((HEIGHT, WIDTH), np.uint8)


class Growing(Painted):
    """Draws larger and larger images."""

    def render(self) -> Any:
        return np.zeros((HEIGHT + self.steps, WIDTH, 3), np.uint8)


class Dying(Painted):
    """Kills its process while its fifth step is drawn."""

    def render(self) -> Any:
        if self.steps == 5:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGKILL)
        return super().render()


def images(path: Any) -> np.ndarray:
    """The images [n, height, width, 3] of an mp4 or gif, read back."""
    if str(path).endswith(".gif"):
        from PIL import Image, ImageSequence

        with Image.open(path) as file:
            return np.array([np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(file)])
    import av

    with av.open(str(path)) as file:
        return np.array([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])
