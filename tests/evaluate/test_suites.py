from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from doubles.duel import DuelVectorEnv, OfAnotherWorld, Plays
from inchworm.config.sections import EnvConfig, EvalConfig
from inchworm.core.errors import ConfigError, EnvError, SpaceError
from inchworm.evaluate.evaluator import PolicyEvaluator
from inchworm.evaluate.stats import EvalStats
from inchworm.evaluate.suites import Simulation, SimulationStats, SuiteStats, count_episodes, evaluate_suites, load_suites, read_suites


class Steps(gym.Env[np.ndarray, int]):
    """Episodes of seed % 4 + 1 steps that pay the action each; it shows what a duel shows."""

    observation_space = spaces.Box(0.0, 1000.0, (3,), np.float32)
    action_space = spaces.Discrete(5)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.left, self.steps = (seed or 0) % 4 + 1, 0
        return np.zeros(3, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        seen = np.array([self.steps, 0, 0], np.float32)
        return seen, float(action), self.steps == self.left, False, {}


class Pays(Steps):
    """One step that pays 10 times the action."""

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.zeros(3, np.float32), 10.0 * action, True, False, {}


def simple(score: float, *, wins: bool = False, score_range: tuple[float, float] | None = None) -> SimulationStats:
    infos = {"win": np.array([score, score])} if wins else {}
    stats = EvalStats(returns=np.array([score, score]), lengths=np.array([1, 1]), seeds=np.array([1, 2]), infos=infos)
    return SimulationStats(stats=stats, score_range=score_range)


def test_a_groups_score_is_the_mean_of_its_simulations_and_overall_the_mean_of_the_groups() -> None:
    # combat: (0.5 + 1) / 2 = 0.75; control: 30 on a scale from 10 to 50 is (30 - 10) / 40 = 0.5; overall (0.75 + 0.5) / 2 = 0.625,
    # though the mean of the three simulations would be 0.6667
    stats = SuiteStats(
        {
            "combat": {"easy": simple(1.0, wins=True), "hard": simple(0.5, wins=True)},
            "control": {"pole": simple(30.0, score_range=(10, 50))},
        }
    )
    assert dict(stats) == {
        "combat/easy": 1.0,
        "combat/hard": 0.5,
        "combat/score": 0.75,
        "control/pole": 0.5,
        "control/score": 0.5,
        "overall": 0.625,
    }
    assert len(stats) == 6
    assert stats["combat/score"] == 0.75
    assert stats.groups["control"]["pole"].measure == "scaled_return"
    assert not stats.mixed
    lines = str(stats).splitlines()
    assert [line[:22] for line in lines] == [  # names to the left, numbers to the right
        "combat/easy          1",
        "combat/hard        0.5",
        "combat/score      0.75",
        "control/pole       0.5",
        "control/score      0.5",
        "overall          0.625",
    ]
    assert lines[0].endswith("  (win rate 1.00 [0.34, 1.00], mean return 1 ± 0 (95 %, 2 greedy episodes), from 1 to 1, mean length 1)")
    data = stats.to_dict()
    assert data["scores"]["overall"] == 0.625
    assert data["groups"]["combat"]["easy"]["measure"] == "win_rate"
    assert data["groups"]["combat"]["easy"]["episodes"] == 2


def test_returns_among_other_scores_are_pointed_out() -> None:
    stats = SuiteStats({"a": {"x": simple(30.0), "y": simple(0.5, wins=True)}})
    assert stats.groups["a"]["x"].measure == "mean_return"
    assert stats.mixed
    assert "add score_range" in str(stats)
    assert not SuiteStats({"a": {"x": simple(30.0)}}).mixed


def test_environments_and_opponents_are_played() -> None:
    suites = {
        "duels": [
            {"env": DuelVectorEnv(2), "opponent": Plays(1), "episodes": 4, "name": "weak"},
            {"env": DuelVectorEnv(2), "opponent": Plays(4), "episodes": 2, "name": "strong"},
        ],
        "alone": [{"env": Steps, "episodes": 5}, Simulation(env=Pays, episodes=3, score_range=(0.0, 60.0))],
    }
    counts: list[int] = []
    stats = PolicyEvaluator(config=EvalConfig(num_envs=2)).evaluate_suites(Plays(3), suites, progress=counts.append)
    lengths = stats.groups["alone"]["Steps"].stats.lengths
    # 3 beats 1 and loses to 4; Steps pays 3 a step; Pays pays 30, which is 0.5 on a scale to 60
    assert stats.groups["duels"]["weak"].stats.episodes == 4
    assert dict(stats) == {
        "duels/weak": 1.0,
        "duels/strong": 0.0,
        "duels/score": 0.5,
        "alone/Steps": 3 * lengths.mean(),
        "alone/Pays": 0.5,
        "alone/score": (3 * lengths.mean() + 0.5) / 2,
        "overall": (0.5 + (3 * lengths.mean() + 0.5) / 2) / 2,
    }
    assert counts == sorted(counts)
    assert counts[-1] == 4 + 2 + 5 + 3 == count_episodes(read_suites(suites))


def test_copies_do_not_change_the_episodes_and_numbers_repeat() -> None:
    found = [evaluate_suites(Plays(2), {"a": [Simulation(env=Steps, episodes=9)]}, num_envs=copies).to_dict() for copies in (1, 4, 4, 20)]
    assert found[0] == found[1] == found[2] == found[3]
    other = evaluate_suites(Plays(2), {"a": [Simulation(env=Steps, episodes=9)]}, seed=5).to_dict()
    assert other["groups"]["a"]["Steps"]["seeds"] != found[0]["groups"]["a"]["Steps"]["seeds"]


def test_an_evaluator_of_suites_alone_has_no_environment() -> None:
    with pytest.raises(ConfigError, match="this evaluator has no environment"):
        PolicyEvaluator().evaluate(Plays(1))


def test_entries_are_read_and_named() -> None:
    suites = read_suites({"a": ["CartPole-v1", {"env": {"id": "Acrobot-v1", "kwargs": {}}, "opponent": "random"}, EnvConfig(id="X-v1")]})
    assert [one.name for one in suites["a"]] == ["CartPole-v1", "Acrobot-v1 vs random", "X-v1"]
    assert [one.env.id for one in suites["a"]] == ["CartPole-v1", "Acrobot-v1", "X-v1"]
    assert read_suites(suites) == suites


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "the suite is empty; give groups"),
        ({"a": []}, "suite a is empty; give an environment, such as CartPole-v1, or remove a"),
        ({"a": None}, "suite a must be a list of environments, not None"),
        ({"a": "CartPole-v1"}, "suite a must be a list of environments, not 'CartPole-v1'"),
        ({"a": [{"episodes": 3}]}, "suite a, entry 1 has no environment; give env, such as env: CartPole-v1"),
        ({"a": ["X-v1", {"env": ""}]}, "suite a, entry 2 has no environment"),
        ({"a": [None]}, "suite a, entry 1 has no environment"),
        ({"a": [{"env": "X-v1", "episode": 3}]}, "suite a, entry 1: unknown config key episode; did you mean episodes?"),
        ({"a": [{"env": "X-v1", "zzz": 3}]}, "suite a, entry 1: unknown config key zzz; known names: env, opponent"),
        ({"a": [{"env": {"id": "X-v1", "num_env": 3}}]}, "suite a, entry 1: unknown config key env.num_env; did you mean env.num_envs?"),
        ({"a": [{"env": "X-v1", "episodes": 0}]}, "suite a, entry 1: episodes=0 must be 1 or more"),
        ({"a": [{"env": "X-v1", "episodes": "3"}]}, "suite a, entry 1: episodes='3' must be an integer"),
        ({"a": [{"env": "X-v1", "opponent": "random", "episodes": 3}]}, "suite a, entry 1: episodes=3 is odd"),
        ({"a": [{"env": "X-v1", "opponent": 3}]}, "suite a, entry 1: opponent=3 must be heuristic"),
        ({"a": [{"env": "X-v1", "name": 3}]}, "suite a, entry 1: name=3 must be text"),
        ({"a": [{"env": "X-v1", "name": "score"}]}, "suite a: a simulation cannot be called score"),
        ({"a": [{"env": "X-v1", "score_range": [1]}]}, r"suite a, entry 1: score_range\[1\] is missing"),
        ({"a": [{"env": "X-v1", "score_range": [1, 1]}]}, "suite a, entry 1: score_range=.* must be two different numbers"),
        ({"a": ["X-v1", "X-v1"]}, "suite a has two simulations called X-v1; give them different names"),
    ],
)
def test_what_is_wrong_with_a_suite_is_one_line(data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}") as caught:
        read_suites(data)
    assert "\n" not in str(caught.value)


def test_what_does_not_fit_names_suite_and_environment() -> None:
    with pytest.raises(SpaceError, match=r"^suite a, Steps: the policy was made for the observation space"):
        evaluate_suites(OfAnotherWorld(1), {"a": [Steps]})
    with pytest.raises(EnvError, match=r"^suite a, Nowhere-v1: .*Nowhere"):
        evaluate_suites(Plays(1), {"a": ["Nowhere-v1"]})
    with pytest.raises(ConfigError, match=r"^suite a, CartPole-v1 vs heuristic: CartPole-v1 has no heuristic"):
        evaluate_suites(Plays(1), {"a": [{"env": "CartPole-v1", "opponent": "heuristic"}]})
    with pytest.raises(ConfigError, match=r"^suite a, Steps vs random: a match needs an environment with two teams"):
        evaluate_suites(Plays(1), {"a": [{"env": Steps, "opponent": "random"}]})
    with pytest.raises(
        ConfigError, match=r"^suite a, Steps vs absent: there is no run absent.*a player is a run, a policy file, heuristic"
    ):
        evaluate_suites(Plays(1), {"a": [{"env": Steps, "opponent": "absent"}]})


def test_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "suite.yaml"
    file.write_text("control:\n  - CartPole-v1\n  - {env: {id: Acrobot-v1}, episodes: 4, name: swing, score_range: [-500, 0]}\n")
    suites = load_suites(file)
    assert [one.name for one in suites["control"]] == ["CartPole-v1", "swing"]
    assert suites["control"][1].score_range == (-500.0, 0.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the suite is empty"),
        ("a: []", "suite a is empty"),
        ("a: [", "cannot read the suite .*suite.yaml"),
        ("a: ['my.module:make_env']", r"suite a imports code \(my.module:make_env\).* add --env my.module:make_env"),
        ("a: [{env: CartPole-v1, env: X-v1}]", "cannot read the suite .*duplicate key"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "suite.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_suites(file)
    assert "suite.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_code_that_is_named_by_hand_too_may_be_imported(tmp_path: Path) -> None:
    file = tmp_path / "suite.yaml"
    file.write_text("a: ['my.module:make_env', 'envpool:Pong-v5']")
    assert [one.env.id for one in load_suites(file, env="my.module:make_env")["a"]] == ["my.module:make_env", "envpool:Pong-v5"]
    with pytest.raises(ConfigError, match="cannot read the suite"):
        load_suites(tmp_path / "none.yaml")
