"""Step 1 of 9: Skirmish, many arenas stepped together: all moves, then all turns, then all shots, then ends and rewards.

A step is elementwise arithmetic on arrays with the arena as last axis. Its numbers are exact in float32, or rounded the same way at any
position of an array, so an arena's bits do not depend on how many others are stepped with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from inchworm.core.errors import EnvError
from inchworm.core.types import Array
from inchworm.worlds.skirmish.sight import Observer, Sightings
from inchworm.worlds.skirmish.state import (
    COMPONENTS,
    DIRECTIONS,
    ELIMINATION,
    HEADINGS,
    HELD,
    NO_TEAM,
    REASONS,
    TIME,
    UNIT_STATE,
    ArenaState,
    Layout,
    SkirmishConfig,
    draw_spawns,
    draw_walls,
    empty_state,
)


def decide(config: SkirmishConfig, state: ArenaState) -> None:
    """Set `winners` and `reasons` after a step: elimination comes before zone, zone before time.

    If the same shots eliminate both teams, the game is a draw. On time the higher zone score wins, then the larger remaining health.
    """
    left = np.logical_or.reduce(state.alive, 1)  # [2, E]
    eliminated = ~(left[0] & left[1])
    held = np.maximum(state.scores[0], state.scores[1]) >= config.zone_target
    late = state.steps >= config.max_steps
    state.reasons[:] = 0
    state.winners[:] = NO_TEAM
    if not (eliminated | held | late).any():
        return
    state.reasons[late] = TIME
    state.reasons[held] = HELD
    state.reasons[eliminated] = ELIMINATION
    health = np.add.reduce(state.health, 1)  # [2, E]: whole numbers, so the order of the sum does not matter
    units = left.astype(np.float32)
    for reason, first, second in ((TIME, state.scores, health), (HELD, state.scores, state.scores), (ELIMINATION, units, units)):
        lead = np.where(first[0] != first[1], first[0] - first[1], second[0] - second[1])  # [E]
        winners = np.where(lead > 0, 0, np.where(lead < 0, 1, NO_TEAM))
        np.copyto(state.winners, winners, where=state.reasons == reason)


_ANGLES = [2.0 * math.pi * heading / HEADINGS for heading in range(HEADINGS // 2)]
_HALF_TURN = np.array([[round(math.cos(angle), 9) for angle in _ANGLES], [round(math.sin(angle), 9) for angle in _ANGLES]], np.float32)
_FACINGS = np.concatenate([_HALF_TURN, -_HALF_TURN], 1)
"""[2 (x, y), HEADINGS] f32: the second half is the first rotated by 180 degrees, to the bit."""

DAMAGE, HURT, KILL, DEATH, ZONE, WIN = range(len(COMPONENTS))


def write_rewards(state: ArenaState, weights: Array, dealt: Array, lost: Array, kills: Array) -> None:
    """Write `rewards` and add them to the sums. Damage dealt, health lost and kills are [2, n, E], for each unit.

    `weights` [component, 1, 1, 1] f32 are those of a config.
    """
    parts = state.rewards
    parts[DAMAGE], parts[HURT], parts[KILL], parts[DEATH] = dealt, lost, kills, state.died
    held = state.holds[0].astype(np.float32) - state.holds[1]  # [E]
    parts[ZONE, 0], parts[ZONE, 1] = held, -held
    # A game that ends on time is truncated: the critic bootstraps its value, so paying the win as well would count it twice.
    won = np.where((state.winners != NO_TEAM) & (state.reasons != TIME), 1 - 2 * state.winners, 0)  # [E]
    parts[WIN, 0], parts[WIN, 1] = won, -won
    parts *= weights
    state.reward_sums += parts


TEAMS = ("blue", "red")


def agent_names(config: SkirmishConfig) -> tuple[str, ...]:
    """The names of an arena's units, in the order of its lanes: blue_0, blue_1, …, red_0, …"""
    return tuple(f"{team}_{unit}" for team in TEAMS for unit in range(config.team_size))


STEP_SECONDS = 0.2
"""How long a step takes in a replay."""


class SkirmishWorld:
    """`num_arenas` arenas of one config. `begin` starts games and `step` steps all arenas; `state` holds everything about them."""

    def __init__(self, config: SkirmishConfig, num_arenas: int) -> None:
        size = config.team_size
        self.config, self.num_arenas = config, num_arenas
        self.state = empty_state(config, num_arenas)
        self._observer = Observer(config)
        c = config
        weights = (c.reward_damage / 100.0, c.reward_hurt / 100.0, c.reward_kill, c.reward_death, c.reward_zone, c.reward_win)
        self._reward_weights = np.array(weights, np.float32).reshape(-1, 1, 1, 1)  # in the order of COMPONENTS
        kinds = config.classes
        self._full_health = np.array([kind.health for kind in kinds], np.float32)[:, None]  # [n, 1]
        self._damage = np.array([kind.damage for kind in kinds], np.float32)[:, None]
        self._cooldown = np.array([kind.cooldown for kind in kinds], np.float32)[:, None]
        moves = [[(0.0, 0.0)] * size]
        for x, y in DIRECTIONS:
            lengths = [kind.speed if 0 in (x, y) else kind.diagonal for kind in kinds]
            moves.append([(x * length, y * length) for length in lengths])
        self._moves = np.array(moves, np.float32).reshape(-1, 2).T.copy()  # [2 (x, y), move * n + unit]
        self._turns = np.array([[0] * size, [kind.turn for kind in kinds], [-kind.turn for kind in kinds]]).reshape(-1)
        self._units = np.arange(size)[:, None]  # [n, 1]
        lanes = 2 * size * num_arenas
        starts = np.cumsum([0, *Layout(size).choices[:-1]])
        self._mask_places = (starts[:, None] * lanes + np.arange(lanes)).reshape(3, 2, size, num_arenas)
        self._mask_stride = lanes
        self._sizes = np.array(Layout(size).choices, np.uint64).reshape(3, 1, 1, 1)
        self._enemies = np.arange(1, size + 1)[:, None, None, None]  # [j, 1, 1, 1]

    def begin(self, seeds: Sequence[int], arenas: Sequence[int] | None = None) -> None:
        """Start a game in every arena, each drawn from its own seed. With `arenas` only these are drawn; the others restart their games."""
        state, config = self.state, self.config
        for arena, seed in zip(range(self.num_arenas) if arenas is None else arenas, seeds):
            stream = np.random.Generator(np.random.PCG64(int(seed)))
            state.walls[..., arena] = draw_walls(config, stream)
            state.spawns[..., arena] = draw_spawns(config, stream)
        state.places[:] = state.spawns[:, None]
        state.headings[:] = 0
        state.health[:] = self._full_health
        state.alive[:] = True
        for array in (state.cooldowns, state.scores, state.holds, state.steps, state.shots, state.hits, state.died):
            array[:] = 0
        state.rewards[:], state.reward_sums[:] = 0.0, 0.0
        state.winners[:], state.reasons[:] = NO_TEAM, 0
        self.observe()

    def observe(self) -> None:
        """Recompute facings, observations and masks after the state was changed from outside."""
        np.take(_FACINGS, self.state.headings, axis=1, out=self.state.facings, mode="clip")
        self._observer.write(self.state, self._observer.sightings(self.state), self._observer.in_zone(self.state))

    def step(self, actions: Array) -> None:
        """Step all arenas with actions [3 (move, turn, attack), 2, n, E] int; parts that the mask forbids are ignored.

        A finished game stays in the state until `begin` starts another.
        """
        state, observer = self.state, self._observer
        if (actions.view(np.uint64) >= self._sizes).any():  # as unsigned, a negative number is huge
            raise EnvError(f"actions must be from 0 to {[int(size) - 1 for size in self._sizes.ravel()]} for (move, turn, attack)")
        allowed = state.mask.reshape(-1).take(actions * self._mask_stride + self._mask_places)
        allowed &= state.alive
        actions = actions * allowed  # 0 is always allowed: stay, do not turn, do not attack
        state.places += self._moves[:, actions[0] * self.config.team_size + self._units]
        state.headings += self._turns[actions[1] * self.config.team_size + self._units]
        state.headings &= HEADINGS - 1
        np.take(_FACINGS, state.headings, axis=1, out=state.facings, mode="clip")
        sightings = observer.sightings(state)
        state.steps += np.float32(1.0)
        dealt, lost, kills = self._shoot(actions[2], sightings)
        in_zone = observer.in_zone(state)
        held = np.logical_or.reduce(in_zone, 1)  # [2, E]
        np.greater(held, held[::-1], out=state.holds)
        state.scores += state.holds
        decide(self.config, state)
        write_rewards(state, self._reward_weights, dealt, lost, kills)
        observer.write(state, sightings, in_zone)

    def _shoot(self, targets: Array, sightings: Sightings) -> tuple[Array, Array, Array]:
        """Resolve all shots together; return (damage dealt, health lost, kills) of each unit, [2, n, E].

        Whether a shot is allowed depends on the positions before the step; it hits if the enemy is in the arc after all moves.
        """
        state = self.state
        hits = (targets == self._enemies) & sightings.in_arc  # [j, 2, i, E]
        blows = hits * self._damage
        taken = np.add.reduce(blows, 2)[:, ::-1].swapaxes(0, 1)  # [2, n, E]: whole numbers, so the order does not matter
        before = state.health.copy()
        np.subtract(before, taken, out=state.health)
        np.maximum(state.health, np.float32(0.0), out=state.health)
        np.greater(state.health, 0, out=state.alive)
        lost = before - state.health
        np.greater(lost > 0, state.alive, out=state.died)
        state.shots[:] = targets
        np.logical_or.reduce(hits, 0, out=state.hits)
        np.copyto(state.cooldowns, self._cooldown, where=targets > 0)
        state.cooldowns -= np.float32(1.0)
        np.maximum(state.cooldowns, np.float32(0.0), out=state.cooldowns)
        rest = before[::-1].swapaxes(0, 1)[:, :, None]  # [j, 2, 1, E]: a shot deals no more than what is left
        dealt = np.add.reduce(np.minimum(blows, rest), 0)
        kills = np.logical_or.reduce(hits & state.died[::-1].swapaxes(0, 1)[:, :, None], 0)
        return dealt, lost, kills

    def rewards(self) -> Array:
        """[2, n, E] f32: the rewards of the last step, the sum of their components in their order."""
        first, second, *others = self.state.rewards
        total = first + second
        for part in others:
            total += part
        return total

    def episode_infos(self, arena: int) -> list[dict[str, float]]:
        """Return the final info of each unit, the first team's units first.

        win is 1, 0, or 0.5 for a draw; hp_margin the mean share of health left in the own team minus the enemy's (0 for dead units);
        zone_score and enemy_zone_score in steps; one of ended_elimination, ended_zone and ended_time is 1; reward/<component> are sums
        over the game.
        """
        config, state = self.config, self.state
        winner, reason = int(state.winners[arena]), int(state.reasons[arena])
        blue, red = (
            sum(left / kind.health for left, kind in zip(health, config.classes)) / config.team_size
            for health in state.health[..., arena].tolist()
        )
        scores = state.scores[:, arena].tolist()
        sums = state.reward_sums[..., arena].reshape(len(COMPONENTS), -1).T.tolist()
        ended = {f"ended_{name}": float(reason == index) for index, name in enumerate(REASONS) if name}
        infos = []
        for unit, parts in enumerate(sums):
            team = unit // config.team_size
            info = {"win": 0.5 if winner == NO_TEAM else float(winner == team), "hp_margin": (red - blue) if team else (blue - red)}
            info |= {"zone_score": scores[team], "enemy_zone_score": scores[1 - team], **ended}
            infos.append(info | {f"reward/{name}": part for name, part in zip(COMPONENTS, parts)})
        return infos

    def global_state(self, out: Array) -> None:
        """Write [E, S]: every unit's `UNIT_STATE` (dead ones as zeros), clock, scores, holder, and the walls of the left half."""
        config, state = self.config, self.state
        size, arenas = config.team_size, state.steps.shape[-1]
        units = np.empty((len(UNIT_STATE), 2, size, arenas), np.float32)
        edge = np.array([config.width / 2, config.height / 2], np.float32)
        units[:4] = np.concatenate([state.places / edge[:, None, None, None], state.facings])
        np.negative(units[:4, 1], out=units[:4, 1])
        full = np.array([[kind.health, kind.cooldown] for kind in config.classes], np.float32).T[:, None, :, None]
        units[4:6] = np.stack([state.health, state.cooldowns]) / full
        units[6] = 1.0
        np.copyto(units, np.float32(0.0), where=~state.alive)
        width = units[:, :, :, 0].size
        out[:, :width] = units.reshape(width, arenas).T
        scores = state.scores / np.float32(config.zone_target)
        holder = state.holds[0].astype(np.float32) - state.holds[1]
        out[:, width : width + 4] = np.stack([np.float32(1.0) - state.steps / np.float32(config.max_steps), *scores, holder], 1)
        left = state.walls[:, :, : config.wall_pairs] / edge[:, None, None]  # [2, 2, pairs, E]
        out[:, width + 4 :] = left.reshape(-1, arenas).T

    def describe(self, arena: int) -> dict[str, Any]:
        """Describe for a replay what does not change during a game; (0, 0) is the lower left corner."""
        config, state = self.config, self.state
        middle = np.array([config.width / 2, config.height / 2])
        centres, halves = state.walls[..., arena].astype(np.float64)  # [2 (x, y), W]
        corners = np.concatenate([middle[:, None] + centres - halves, middle[:, None] + centres + halves])
        units = [
            {
                "team": team,
                "kind": name,
                "max_health": kind.health,
                "radius": kind.radius,
                "range": kind.reach,
                "arc": math.radians(kind.arc),
            }
            for team in range(2)
            for name, kind in zip(config.units, config.classes)
        ]
        return {
            "game": "Skirmish-v0",
            "width": config.width,
            "height": config.height,
            "walls": corners.T.tolist(),
            "zone": {"x": config.width / 2, "y": config.height / 2, "radius": config.zone_radius},
            "teams": list(TEAMS),
            "units": units,
            "max_steps": config.max_steps,
            "step_seconds": STEP_SECONDS,
        }

    def frame(self, arena: int) -> dict[str, Any]:
        """Describe units, scores and shots after the last step as one frame of a replay."""
        config, state = self.config, self.state
        size = config.team_size
        units, shots = [], []
        for team, sign in enumerate((1.0, -1.0)):
            for unit in range(size):
                x, y = (sign * float(state.places[axis, team, unit, arena]) for axis in range(2))
                heading = (int(state.headings[team, unit, arena]) + team * HEADINGS // 2) % HEADINGS
                facing = 2.0 * math.pi * heading / HEADINGS
                rest = [float(state.health[team, unit, arena]), float(state.cooldowns[team, unit, arena])]
                units.append([x + config.width / 2, y + config.height / 2, facing, *rest])
                target = int(state.shots[team, unit, arena])
                if target:
                    shots.append([team * size + unit, (1 - team) * size + target - 1, int(state.hits[team, unit, arena])])
        return {"units": units, "score": state.scores[:, arena].tolist(), "shots": shots}
