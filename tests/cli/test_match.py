import json
from pathlib import Path
from typing import Any

import pytest

from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.config.sections import EnvConfig, EvalConfig, PolicyConfig, RunConfig, TrainingConfig
from inchworm.evaluate.matches import evaluate_vs_heuristic, play_match
from inchworm.policy.file import load_policy, save_policy
from inchworm.policy.spec import PolicySpec
from inchworm.run.directory import create_run
from inchworm.tracking.jsonl import read_rows
from inchworm.worlds.replay import load_replay
from inchworm.worlds.skirmish import HeuristicPolicy, SkirmishConfig, SkirmishVectorEnv

RULES = {"units": ["scout"], "wall_pairs": 0, "max_steps": 30, "zone_target": 10}


def make_run(name: str, seed: int, **rules: Any) -> Path:
    """A run in Skirmish whose policy has never learnt anything."""
    world = EnvConfig(id="Skirmish-v0", kwargs={**RULES, **rules})
    config = TrainingConfig(env=world, run=RunConfig(name=name), evaluation=EvalConfig(final_episodes=5, num_envs=4))
    run = create_run(config)
    run.close()
    env = SkirmishVectorEnv(world.kwargs, 1)
    spec = PolicySpec(env.observation_space, env.action_space, PolicyConfig(hidden_sizes=(8,)))
    for best in (False, True):
        save_policy(run.policy_path(best=best), spec, NumpyPolicy(spec, seed=seed + best).get_weights())
    return run.path


@pytest.fixture
def skirmish(cli: Any) -> None:
    """Two runs, runs/a and runs/b; `cli` has made the working directory."""
    make_run("a", 1)
    make_run("b", 5)


def policy(path: str) -> Any:
    return load_policy(Path("runs") / path / "policy.safetensors")


def test_two_runs_meet(cli: Any, skirmish: None) -> None:
    result = cli("match", "a", "runs/b", "--episodes", 6, "--quiet")
    assert result.code == 0, result.err
    expected = play_match(policy("a"), policy("b"), EnvConfig(id="Skirmish-v0", kwargs=RULES), 6)
    assert result.out == f"runs/a/policy.safetensors against runs/b/policy.safetensors in Skirmish-v0: {expected}\n"
    assert "win rate 0." in result.out or "win rate 1." in result.out
    assert " of 6 greedy episodes), health margin " in result.out


def test_everything_as_json_sampled_with_another_seed(cli: Any, skirmish: None) -> None:
    result = cli("match", "a", "heuristic:0.5", "--episodes", 4, "--sampled", "--seed", 3, "--num-envs", 2, "--json", "--quiet")
    rules = SkirmishConfig.from_dict(RULES)
    how: dict[str, Any] = {"deterministic": False, "seed": 3, "num_envs": 2}
    expected, _ = evaluate_vs_heuristic(policy("a"), rules, 4, skill=0.5, **how)
    assert json.loads(result.out) == {**expected.to_dict(), "players": ["runs/a/policy.safetensors", "heuristic:0.5"]}


def test_players_without_a_run_need_a_world(cli: Any, skirmish: None) -> None:
    without = cli("match", "heuristic", "random", "--episodes", 4)
    assert without.code == 2
    assert "add --env Skirmish-v0" in without.err
    rules = "{units: [scout], wall_pairs: 0, max_steps: 30, zone_target: 10}"
    result = cli("match", "heuristic", "runs/a/policy.safetensors", "--episodes", 4, "--env", "Skirmish-v0", "--kwargs", rules, "--quiet")
    assert result.code == 0, result.err
    assert result.out.startswith("heuristic against runs/a/policy.safetensors in Skirmish-v0: win rate ")


def test_the_first_game_is_saved(cli: Any, skirmish: None) -> None:
    result = cli("match", "heuristic", "a", "--episodes", 2, "--save-replay", "games/first.json", "--quiet")
    assert result.code == 0, result.err
    replay = load_replay("games/first.json")
    assert replay["meta"]["players"] == ["heuristic", "runs/a/policy.safetensors"]
    assert len(replay["frames"]) == replay["meta"]["steps"] + 1


def test_runs_of_different_worlds_meet_in_the_first_ones(cli: Any, skirmish: None) -> None:
    make_run("long", 2, max_steps=31)
    result = cli("match", "long", "a", "--episodes", 2, "--quiet")
    assert result.code == 0
    assert "long and a were trained with different env.kwargs; the match uses those of long" in result.err
    make_run("wide", 2, units=["scout", "scout"])
    strangers = cli("match", "wide", "a", "--episodes", 2, "--quiet")
    assert strangers.code == 2
    last = strangers.err.splitlines()[-1]
    assert last.startswith("inchworm: runs/a/policy.safetensors was made for the observation space")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "a match needs two players; type: inchworm match RUN heuristic"),
        (["a"], "a match needs two players"),
        (["a", "nobody"], "there is no run nobody"),
        (["a", "b", "--episodes", "5"], "episodes=5 is odd, but each seed is played once from either side; give 6"),
        (["a", "b", "--episodes", "0"], "episodes=0 must be 1 or more"),
        (["a", "b", "--num-envs", "0"], "num_envs=0 must be 1 or more"),
        (["a", "heuristic:2"], "from 0 to 1"),
        (["a", "b", "--env", "CartPole-v1", "--kwargs", "{}"], "a match needs an environment with two teams"),
        (["a", "heuristic", "--env", "CartPole-v1", "--kwargs", "{}"], "CartPole-v1 has no heuristic"),
        (["a", "b", "--env", "Nowhere-v1"], "Nowhere-v1"),
        (["a", "b", "--kwargs", "[1]"], "must be a mapping of names to values"),
        (["a", "b", "--kwargs", "{"], "is not valid YAML"),
        (["a", "b", "--kwargs", "{unit: [scout]}"], "did you mean units?"),
    ],
)
def test_wrong_use_is_one_line(cli: Any, skirmish: None, arguments: list[str], message: str) -> None:
    result = cli("match", *arguments)
    assert result.code == 2, result.err
    assert message in result.err
    assert len(result.err.splitlines()) == 1


def test_a_run_without_a_policy_says_so(cli: Any, skirmish: None) -> None:
    Path("runs/b/policy.safetensors").unlink()
    result = cli("match", "a", "b")
    assert result.code == 2
    assert "the run runs/b has no policy.safetensors yet; inchworm resume runs/b continues its training" in result.err


def test_evaluate_meets_an_opponent(cli: Any, skirmish: None) -> None:
    result = cli("evaluate", "a", "--opponent", "heuristic", "--skill", 0.25, "--episodes", 4, "--save-replay", "game.json", "--quiet")
    assert result.code == 0, result.err
    expected, _ = evaluate_vs_heuristic(policy("a"), SkirmishConfig.from_dict(RULES), 4, skill=0.25, num_envs=4)
    assert result.out == f"runs/a/policy.safetensors against heuristic:0.25 in Skirmish-v0: {expected}\n"
    assert load_replay("game.json")["meta"]["players"] == ["runs/a/policy.safetensors", "heuristic:0.25"]


def test_evaluate_meets_at_full_strength_an_even_number_of_times_and_the_best_policy(cli: Any, skirmish: None) -> None:
    result = cli("evaluate", "a", "--opponent", "heuristic", "--best", "--json", "--quiet")
    best = load_policy("runs/a/best_policy.safetensors")
    expected, _ = evaluate_vs_heuristic(best, SkirmishConfig.from_dict(RULES), 6, num_envs=4)  # its final evaluation has 5
    found = json.loads(result.out)
    assert found == {**expected.to_dict(), "players": ["runs/a/best_policy.safetensors", "heuristic"]}
    assert found["episodes"] == 6


def test_evaluate_meets_other_runs_and_random(cli: Any, skirmish: None) -> None:
    for opponent in ("random", "b", "runs/b/best_policy.safetensors"):
        result = cli("evaluate", "a", "--opponent", opponent, "--episodes", 2, "--quiet")
        assert result.code == 0, result.err
        assert " of 2 greedy episodes)" in result.out


def test_evaluate_on_a_suite_with_opponents(cli: Any, skirmish: None) -> None:
    world = "{id: Skirmish-v0, kwargs: {units: [scout], wall_pairs: 0, max_steps: 30, zone_target: 10}}"
    Path("suite.yaml").write_text(
        f"combat:\n  - {{env: {world}, opponent: heuristic, episodes: 4}}\n  - {{env: {world}, opponent: b, episodes: 2, name: sibling}}\n"
    )
    result = cli("evaluate", "a", "--suite", "suite.yaml", "--quiet", "--json")
    assert result.code == 0, result.err
    scores = json.loads(result.out)["scores"]
    expected, _ = evaluate_vs_heuristic(policy("a"), SkirmishConfig.from_dict(RULES), 4)
    assert scores["combat/Skirmish-v0 vs heuristic"] == expected.win_rate
    assert set(scores) == {"combat/Skirmish-v0 vs heuristic", "combat/sibling", "combat/score", "overall"}
    text = cli("evaluate", "a", "--suite", "suite.yaml", "--quiet").out
    assert text.startswith("runs/a/policy.safetensors:\ncombat/Skirmish-v0 vs heuristic  ")


def test_without_an_opponent_the_score_is_that_of_the_final_evaluation(cli: Any) -> None:
    flags = "--opponent.mode heuristic --env.num-envs 2 --ppo.rollout-steps 16 --ppo.minibatch-size 32 --run.total-timesteps 32 --quiet"
    flags += " --evaluation.final-episodes 4 --evaluation.num-envs 2 --backend numpy --run.name small"
    trained = cli("train", "Skirmish-v0", "--env.kwargs", json.dumps(RULES), *flags.split())
    assert trained.code == 0, trained.err
    final = read_rows(Path("runs/small/metrics.jsonl"))[-1]
    stats = json.loads(cli("evaluate", "small", "--json", "--quiet").out)
    assert stats["mean_return"] == final["evaluation/mean_return"]
    assert stats["win_rate"] == final["evaluation/win_rate"]
    assert stats["win_interval95"] == [final["evaluation/win_interval95_low"], final["evaluation/win_interval95_high"]]
    assert stats["episodes"] == 4


def test_the_strong_heuristic_wins_by_name_as_by_object(cli: Any, skirmish: None) -> None:
    found = json.loads(cli("match", "heuristic", "a", "--episodes", 4, "--json", "--quiet").out)
    rules = SkirmishConfig.from_dict(RULES)
    expected = play_match(HeuristicPolicy(rules), policy("a"), EnvConfig(id="Skirmish-v0", kwargs=RULES), 4)
    assert found["infos"] == expected.to_dict()["infos"]
