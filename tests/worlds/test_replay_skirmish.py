"""A real game of Skirmish is a replay: what the world describes passes the check, and the page and the images show it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from doubles.browser import Browser
from inchworm.worlds.replay import check_replay, load_replay, replay_page, save_replay
from inchworm.worlds.skirmish import HeuristicPolicy, SkirmishConfig, SkirmishVectorEnv
from inchworm.worlds.skirmish.render import GROUND, TEAMS, render_frame


def play(config: SkirmishConfig, steps: int) -> dict[str, Any]:
    """The first steps of a game of the heuristic against itself; at its end the next one begins at once, so it is left out."""
    env, player, rng = SkirmishVectorEnv(config, 1), HeuristicPolicy(config), np.random.default_rng(3)
    step, state = env.reset([5]), player.initial_state(env.lanes_per_copy)
    frames = [env.frame(0)]
    for _ in range(steps):
        acted = player.act(step.observations, state, step.episode_starts, rng)
        step, state = env.step(acted.env_actions), acted.state
        if step.ended:
            break
        frames.append(env.frame(0))
    meta = {"seed": 5, "players": ["heuristic", "heuristic"]}
    return {"format": "inchworm-replay", "version": 1, "world": env.describe(0), "meta": meta, "frames": frames, "result": None}


@pytest.mark.parametrize("units", [("scout",), ("scout", "soldier", "heavy"), ("heavy",) * 10])
def test_a_game_is_a_replay_and_comes_back_from_its_file(units: tuple[str, ...], tmp_path: Path) -> None:
    replay = play(SkirmishConfig(units=units), 60)
    assert check_replay(replay) is replay
    assert len(replay["frames"]) > 5
    assert load_replay(save_replay(tmp_path / "game.json", replay)) == replay
    assert any(frame["shots"] for frame in replay["frames"])


def test_images_show_the_units_where_the_frame_has_them() -> None:
    replay = play(SkirmishConfig(), 3)
    world, frame = replay["world"], replay["frames"][-1]
    image = render_frame(world, frame, 480)  # 16 x 12 units in 480 x 360 pixels, 60 rows above
    for unit, (x, y, *_) in zip(world["units"], frame["units"]):
        rim = image[int(60 + (world["height"] - y + 0.8 * unit["radius"]) * 30), int(x * 30)]
        assert tuple(rim.tolist()) == TEAMS[unit["team"]]
    assert tuple(image[61, 1].tolist()) == GROUND


@pytest.mark.slow
def test_the_page_shows_a_real_game(browser: Browser, tmp_path: Path) -> None:
    replay = play(SkirmishConfig(), 40)
    path = tmp_path / "game.html"
    path.write_text(replay_page(replay), encoding="utf-8")
    browser.open(path)
    browser.press("End")
    last = replay["frames"][-1]["units"]
    shown = browser.value("[...document.querySelectorAll('#units .place')].map(place => place.textContent)")
    assert [[float(part) for part in text.split(", ")] for text in shown] == [pytest.approx([x, y], abs=0.051) for x, y, *_ in last]
    assert browser.complaints() == []
