"""Skirmish as a vector env: the same bits however many arenas are stepped together, wherever they run, and whichever side is whose."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from doubles.skirmish import BLUE, RED, random_legal
from doubles.stepping import assert_equal_steps, frozen
from inchworm.config.sections import EnvConfig
from inchworm.core.errors import ConfigError
from inchworm.core.types import EnvStep
from inchworm.env.source import choose_num_workers, make_vector_env
from inchworm.worlds.skirmish import HeuristicPolicy, SkirmishConfig, SkirmishVectorEnv, SkirmishWorld
from inchworm.worlds.skirmish.state import COMPONENTS

MIXED = ("scout", "soldier", "heavy")
SHORT = {"max_steps": 40, "zone_target": 15}


def actions_for(world: SkirmishWorld, rng: np.random.Generator) -> np.ndarray:
    """[3, 2, n, E]: drawn without a look at the masks, so that some are illegal; attacks often."""
    n = world.config.team_size
    shape = (2, n, world.num_arenas)
    return np.stack([rng.integers(0, size, shape) for size in (9, 3, 1 + n)])


def arrays(world: SkirmishWorld) -> dict[str, np.ndarray]:
    return {field.name: getattr(world.state, field.name) for field in dataclasses.fields(world.state)}


@pytest.mark.parametrize("units", [MIXED, MIXED * 3 + ("heavy",), ("soldier",)], ids=len)
def test_an_arena_has_the_same_bits_alone_as_among_many(units: tuple[str, ...]) -> None:
    """In the middle, where all units shoot; every array of the state after every step."""
    config, arenas = SkirmishConfig(units=units), 21
    many, rng = SkirmishWorld(config, arenas), np.random.default_rng(0)
    alone = [SkirmishWorld(config, 1) for _ in range(arenas)]
    many.begin(range(arenas))
    crowd(many)
    for seed, world in enumerate(alone):
        world.begin([seed])
        crowd(world)
    for _ in range(25):
        joint = actions_for(many, rng)
        many.step(joint)
        for arena, world in enumerate(alone):
            world.step(joint[..., arena : arena + 1].copy())
            for name, array in arrays(world).items():
                assert np.array_equal(array[..., 0], arrays(many)[name][..., arena]), name
    assert (many.state.health < many.state.health.max()).any(), "shots were exchanged"


def crowd(world: SkirmishWorld) -> None:
    """Everybody nearer to the middle."""
    world.state.places *= np.float32(0.5)
    world.observe()


def test_swapping_the_teams_changes_nothing_but_their_names() -> None:
    config = SkirmishConfig()
    one, other, rng = SkirmishWorld(config, 16), SkirmishWorld(config, 16), np.random.default_rng(1)
    for world in (one, other):
        world.begin(range(16))
        crowd(world)
    for _ in range(40):
        joint = actions_for(one, rng)
        one.step(joint)
        other.step(np.ascontiguousarray(joint[:, ::-1]))
        for name in ("observations", "mask", "rewards", "reward_sums"):
            assert np.array_equal(arrays(one)[name], arrays(other)[name][:, ::-1]), name
        assert np.array_equal(one.state.health, other.state.health[::-1])
    assert (one.state.health[BLUE] != one.state.health[RED]).any()


def player(skill: float) -> Callable[[EnvStep], np.ndarray]:
    """The actions of players that meet and shoot."""
    policy, rng = HeuristicPolicy(SkirmishConfig(**SHORT), skill), np.random.default_rng(0)
    return lambda step: policy.act(step.observations, (), step.episode_starts, rng).env_actions


def play(env: Any, steps: int, act: Callable[[EnvStep], np.ndarray] | None = None) -> list[EnvStep]:
    """The first step and `steps` more, as copies."""
    act, taken = act or player(0.6), [frozen(env.reset())]
    for _ in range(steps):
        taken.append(frozen(env.step(act(taken[-1]))))
    return taken


@pytest.mark.parametrize("global_state", [False, True])
def test_native_equals_one_pettingzoo_arena_per_copy_with_and_without_workers(global_state: bool) -> None:
    pytest.importorskip("pettingzoo")
    kinds = [(True, 0), (False, 0), (True, 1)]  # workers hold PettingZoo arenas
    runs = []
    for native, workers in kinds:
        config = EnvConfig(id="Skirmish-v0", num_envs=3, num_workers=workers, native=native, kwargs=SHORT)
        with make_vector_env(config, seed=5, global_state=global_state) as env:  # type: ignore[attr-defined]
            assert isinstance(env, SkirmishVectorEnv) == (native and not workers)
            runs.append(play(env, 70))
    assert sum(len(step.ended) for step in runs[0]) >= 6, "games ended"
    assert any((~step.valid).any() for step in runs[0]), "units died"
    for run in runs[1:]:
        assert_equal_steps(runs[0], run)


def test_the_id_is_stepped_natively_unless_something_is_put_around_it() -> None:
    config = EnvConfig(id="Skirmish-v0", num_envs=2)
    assert choose_num_workers(config).num_workers == 0
    env = make_vector_env(config.replace(kwargs={"units": ["scout"]}))
    assert isinstance(env, SkirmishVectorEnv)
    assert (env.config.units, env.num_lanes, env.lanes_per_copy) == (("scout",), 4, 2)
    env.close()
    with pytest.raises(ConfigError, match="did you mean zone_target"):
        make_vector_env(config.replace(kwargs={"zone_targte": 3}))


@pytest.mark.parametrize("global_state", [False, True])
def test_flags_and_validity_of_the_dead(global_state: bool) -> None:
    with SkirmishVectorEnv(SHORT, 8, seed=2, global_state=global_state) as env:
        steps = play(env, 120, player(0.8))
    width, seen_deaths = 6, 0
    for before, after in itertools.pairwise(steps):
        ended = {ended.lane // width for ended in after.ended}
        for lane in range(8 * width):
            flags = bool(after.terminated[lane]), bool(after.truncated[lane])
            if lane // width in ended:
                assert flags in ((True, False), (False, True))
                assert after.valid[lane]
                assert after.episode_starts[lane]
                continue
            assert not after.episode_starts[lane]
            died = bool(before.valid[lane]) and not after.valid[lane]
            seen_deaths += died
            assert flags == (died and not global_state, False)
            assert after.valid[lane] <= before.valid[lane], "no unit comes back within a game"
            if not after.valid[lane]:
                assert not after.observations["observation"][lane].any()
    assert seen_deaths >= 10
    assert any(step.rewards[~step.valid].any() for step in steps), "the dead get what their team gets"


def test_every_ended_lane_tells_the_same_game() -> None:
    with SkirmishVectorEnv({"max_steps": 60, "zone_target": 15}, 16, seed=3) as env:
        steps = play(env, 200, player(0.8))
    games = [ended for step in steps for ended in step.ended]
    assert len(games) >= 6 * 20
    ways = dict.fromkeys(("ended_elimination", "ended_zone", "ended_time"), 0.0)
    for start in range(0, len(games), 6):
        lanes = [dict(ended.info) for ended in games[start : start + 6]]
        blue, red = lanes[0], lanes[3]
        assert [info["win"] for info in lanes] == [blue["win"]] * 3 + [1.0 - blue["win"]] * 3
        assert all(info["hp_margin"] == -red["hp_margin"] for info in lanes[:3])
        assert -1.0 <= blue["hp_margin"] <= 1.0
        assert (blue["zone_score"], blue["enemy_zone_score"]) == (red["enemy_zone_score"], red["zone_score"])
        assert sum(blue[way] for way in ways) == 1.0
        for way in ways:
            ways[way] += blue[way]
        total = sum(info[f"reward/{name}"] for info in lanes for name in COMPONENTS)
        assert total == pytest.approx(blue["team_return"], abs=1e-5)
    assert all(ways.values()), f"games end in all ways: {ways}"


def test_a_game_cut_off_shows_its_last_observation() -> None:
    with SkirmishVectorEnv({"max_steps": 3}, 2, seed=0) as env:
        step = env.reset()
        for turn in range(3):
            assert not step.ended, turn
            step = env.step(np.zeros((12, 3), np.int64))
    assert step.truncated.all()
    assert not step.terminated.any()
    for ended in step.ended:
        assert ended.final_observation["observation"][7] == 0.0, "no time left"
        assert step.observations["observation"][ended.lane][7] == 1.0
        assert (ended.info["ended_time"], ended.info["win"]) == (1.0, 0.5)


def test_observations_stay_in_their_space() -> None:
    with SkirmishVectorEnv({"units": MIXED * 2, **SHORT}, 16, global_state=True) as env:
        rng, step = np.random.default_rng(0), env.reset()
        assert env.global_state_space is not None
        for _ in range(60):
            seen = step.observations["observation"]
            assert seen.min() >= -1.0
            assert seen.max() <= 1.0
            assert env.global_state_space.contains(step.global_state[0])
            assert env.observation_space.contains({key: array[5] for key, array in step.observations.items()})
            step = env.step(random_legal(step.observations["action_mask"], rng, 6))
            assert all(env.observation_space.contains(dict(ended.final_observation)) for ended in step.ended)


def test_a_saved_env_is_restored_with_the_same_bits() -> None:
    act = player(0.7)
    with SkirmishVectorEnv(SHORT, 4, seed=9, global_state=True) as env, SkirmishVectorEnv(SHORT, 4, global_state=True) as other:
        step = play(env, 55, act)[-1]
        other.load_state_dict(env.state_dict())
        assert other.exact
        again = other.reset(indices=())
        assert np.array_equal(again.observations["observation"], step.observations["observation"])
        assert np.array_equal(again.valid, step.valid)
        for _ in range(60):
            actions = act(step)
            step = frozen(env.step(actions))
            assert_equal_steps([step], [other.step(actions)])
        assert [other.frame(copy) for copy in range(4)] == [env.frame(copy) for copy in range(4)]


def test_a_game_saved_natively_continues_in_pettingzoo_arenas() -> None:
    pytest.importorskip("pettingzoo")
    config, act = EnvConfig(id="Skirmish-v0", num_envs=2, kwargs=SHORT), player(0.9)
    with make_vector_env(config, seed=4) as env, make_vector_env(config.replace(native=False)) as other:  # type: ignore[attr-defined]
        step = play(env, 36, act)[-1]
        assert not step.valid.all(), "some unit is dead"
        other.load_state_dict(env.state_dict())
        assert other.exact
        actions = act(step)
        assert_equal_steps([env.step(actions)], [other.step(actions)])


def test_describe_gives_plain_data() -> None:
    with SkirmishVectorEnv({"units": ["scout", "heavy"]}, 2, seed=1) as env:
        env.reset()
        world, frame = env.describe(1), env.frame(1)
    expected = {"game": "Skirmish-v0", "width": 16.0, "height": 12.0, "teams": ["blue", "red"], "zone": {"x": 8.0, "y": 6.0, "radius": 2.5}}
    assert world | expected == world
    assert [(unit["team"], unit["kind"]) for unit in world["units"]] == [(0, "scout"), (0, "heavy"), (1, "scout"), (1, "heavy")]
    assert len(world["walls"]) == 6
    assert all(0 <= x0 < x1 <= 16 and 0 <= y0 < y1 <= 12 for x0, y0, x1, y1 in world["walls"])
    turned = sorted([16 - x1, 12 - y1, 16 - x0, 12 - y0] for x0, y0, x1, y1 in world["walls"])
    assert turned == sorted(world["walls"]), "the arena is its own image turned by 180 degrees"
    blue, red = frame["units"][0], frame["units"][2]
    assert (blue[0] + red[0], blue[1] + red[1], blue[3]) == (16.0, 12.0, 60.0)
    assert (frame["score"], frame["shots"]) == ([0.0, 0.0], [])
