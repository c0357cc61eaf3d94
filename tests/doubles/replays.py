"""Replays: a small one with known numbers, a longer one that looks like a game, a hostile one, and a real game of Skirmish."""

import copy
import math
from typing import Any

import numpy as np

from inchworm.worlds.skirmish import HeuristicPolicy, SkirmishConfig, SkirmishVectorEnv

PWNED = "</script><script>window.pwned=1</script><img src=x onerror='window.pwned=1'>&lt;b&gt;\u2028<!--"


def small_replay() -> dict[str, Any]:
    """Two units, four frames of half a second: the red one is shot in frame 1 (10 of 20 left), and dies in frame 2. Blue scores in 3."""
    world = {
        "game": "Skirmish-v0",
        "width": 20.0,
        "height": 10.0,
        "walls": [[9.0, 0.0, 11.0, 3.0]],
        "zone": {"x": 10.0, "y": 6.0, "radius": 2.0},
        "teams": ["blue", "red"],
        "units": [
            {"team": 0, "kind": "scout", "max_health": 10.0, "radius": 0.5, "range": 6.0, "arc": 1.5},
            {"team": 1, "kind": "heavy", "max_health": 20.0, "radius": 1.0, "range": 4.0, "arc": 2 * math.pi},
        ],
        "max_steps": 100,
        "step_seconds": 0.5,
    }
    frames = [
        {"units": [[4.0, 6.0, 0.0, 10.0, 0.0], [16.0, 6.0, 3.0, 20.0, 0.0]], "score": [0.0, 0.0], "shots": []},
        {"units": [[5.0, 6.0, 0.0, 10.0, 2.0], [15.0, 6.0, 3.0, 10.0, 0.0]], "score": [0.0, 0.0], "shots": [[0, 1, 1], [1, 0, 0]]},
        {"units": [[7.0, 6.0, 0.0, 10.0, 1.0], [14.5, 6.25, 3.0, 0.0, 0.0]], "score": [0.0, 0.0], "shots": [[0, 1, 1]]},
        {"units": [[9.0, 6.0, 0.0, 7.5, 0.0], [14.5, 6.25, 3.0, 0.0, 0.0]], "score": [1.0, 0.0], "shots": []},
    ]
    meta = {"seed": 2**63 + 1, "players": ["policy", "heuristic"], "deterministic": True, "opponent": {"skill": 1.0, "tags": [None]}}
    result = {"winner": 0, "reason": "elimination"}
    return copy.deepcopy({"format": "inchworm-replay", "version": 1, "world": world, "meta": meta, "frames": frames, "result": result})


def long_replay(steps: int = 150, size: int = 3) -> dict[str, Any]:
    """A game of `size` against `size` that looks like one: the teams close in, circle the zone and shoot in turn until red is dead."""
    kinds = ({"kind": "scout", "max_health": 60.0, "radius": 0.5, "range": 7.0, "arc": 1.6},
             {"kind": "soldier", "max_health": 100.0, "radius": 0.6, "range": 6.0, "arc": 1.2},
             {"kind": "heavy", "max_health": 160.0, "radius": 0.8, "range": 5.0, "arc": 2.2})  # fmt: skip
    units = [{"team": team, **kinds[number % 3]} for team in (0, 1) for number in range(size)]
    replay = small_replay()
    replay["world"] |= {"width": 32.0, "height": 24.0, "units": units, "max_steps": max(steps, 1), "step_seconds": 0.1}
    replay["world"] |= {"walls": [[8, 4, 9, 10], [23, 14, 24, 20], [14, 18, 18, 19], [14, 5, 18, 6]]}
    replay["world"] |= {"zone": {"x": 16, "y": 12, "radius": 3.5}}
    replay["meta"], replay["result"] = (
        {"seed": 7, "players": ["policy", "heuristic"], "date": "2026-01-01"},
        {"winner": 0, "reason": "time"},
    )
    replay["frames"] = []
    for step in range(steps + 1):
        rows, distance = [], max(2.5, 13 - 0.14 * step)
        for index, unit in enumerate(units):
            side, turn = 1 - 2 * unit["team"], 0.02 * step + 0.5 * (index % size) - 0.5
            x, y = 16 - side * distance * math.cos(turn), 12 - side * distance * math.sin(turn)
            health = max(0.0, unit["max_health"] - unit["team"] * max(0, step - 45))
            rows.append([round(x, 3), round(y, 3), round(math.atan2(12 - y, 16 - x), 3), health, float((step + 3 * index) % 9)])
        shots = [[step % size, size + step % size, step % 2]] if step > 45 and rows[size + step % size][3] > 0 else []
        replay["frames"].append({"units": rows, "score": [max(0.0, step - 90.0), 0.0], "shots": shots})
    return replay


def hostile_replay() -> dict[str, Any]:
    """A valid replay whose every text is an attack."""
    replay = small_replay()
    replay["world"] |= {"game": PWNED, "teams": [PWNED, PWNED + "2"]}
    for unit in replay["world"]["units"]:
        unit["kind"] = PWNED
    replay["meta"] = {
        "players": [PWNED, "{{script}} ${window.pwned=1}"],
        PWNED: PWNED,
        "__proto__": {"pwned": 1},
        "deep": [{PWNED: [PWNED]}],
    }
    return replay


def skirmish_replay(config: SkirmishConfig, steps: int) -> dict[str, Any]:
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
