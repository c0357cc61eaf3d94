"""`inchworm evaluate` and `inchworm match`: scores as the library computes them; wrong use is one line."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.cli import evaluate as module
from inchworm.cli.evaluate import progress
from inchworm.config.sections import EnvConfig, EvalConfig, PolicyConfig, RunConfig, TrainingConfig
from inchworm.evaluate.evaluator import evaluate_policy, evaluate_vs_heuristic, play_match
from inchworm.policy.file import save_policy
from inchworm.policy.spec import PolicySpec
from inchworm.run.directory import create_run
from inchworm.run.policies import load_policy
from inchworm.tracking.console import Terminal, make_terminal
from inchworm.tracking.jsonl import read_rows
from inchworm.worlds.replay import load_replay
from inchworm.worlds.skirmish import SkirmishConfig, SkirmishVectorEnv


def test_by_default_the_score_is_that_of_the_final_evaluation_in_one_line(cli: Any, run: Path) -> None:
    stats = json.loads(cli("evaluate", "small", "--json").out)
    assert (stats["episodes"], stats["deterministic"]) == (3, True)
    assert stats["mean_return"] == read_rows(run / "metrics.jsonl")[-1]["evaluation/mean_return"]
    by_name, by_path = cli("evaluate", "small"), cli("evaluate", run, "--last")
    assert by_name.out.startswith("runs/small/policy.safetensors: mean return ")
    assert "3 greedy episodes" in by_name.out
    assert by_name.out.split(": ")[1] == by_path.out.split(": ")[1]
    assert len(by_name.out.splitlines()) == 1


def test_episodes_seed_and_sampling_are_those_asked_for(cli: Any, run: Path) -> None:
    result = cli("evaluate", "small", "--episodes", 5, "--seed", 7, "--sampled", "--num-envs", 2, "--best", "--json")
    expected = evaluate_policy(load_policy(run / "best_policy.safetensors"), "CartPole-v1", 5, seed=7, deterministic=False, num_envs=2)
    assert json.loads(result.out) == expected.to_dict()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no run is given; type: inchworm evaluate RUN"),
        (["smal"], "there is no run smal; nearest in runs: small"),
        (["small", "--best", "--last"], "--best and --last exclude each other"),
        (["small", "--episodes", "0"], "evaluation.episodes=0 must be 1 or more"),
        (["small", "--env", "Acrobot-v1"], "was made for the observation space"),
        (["small", "--env", "Nowhere-v1"], "is not registered"),
        (["small", "--opponent", "heuristic"], "CartPole-v1 has no heuristic to play against; use Skirmish-v0"),
        (["small", "--opponent", "random"], "a match needs an environment with two teams"),
        (["small", "--skill", "0.5"], "--skill needs an opponent; add --opponent heuristic"),
        (["small", "--save-replay", "x.json"], "--save-replay needs an opponent; add --opponent heuristic"),
        (["small", "--opponent", "random", "--skill", "0.5"], "--skill applies to --opponent heuristic, not to random"),
        (["small", "--opponent", "heuristic", "--skill", "2"], "--skill 2 must be from 0 to 1"),
        (["small", "--suite", "x.yaml", "--opponent", "random"], "--opponent and --suite exclude each other"),
        (["small", "--suite", "x.yaml", "--episodes", "3"], "--episodes and --suite exclude each other"),
        (["small", "--suite", "x.yaml"], "cannot read the suite x.yaml"),
        (["small", "--suite", "code.yaml"], "code.yaml: suite control imports code (x.y:make)"),
    ],
)
def test_wrong_use_is_one_line(refused: Any, run: Path, arguments: list[str], message: str) -> None:
    Path("code.yaml").write_text("control: ['x.y:make']")
    refused(message, "evaluate", *arguments)


def test_a_missing_or_damaged_policy_is_one_line(refused: Any, run: Path) -> None:
    content = bytearray((run / "policy.safetensors").read_bytes())
    content[-1] ^= 1
    (run / "policy.safetensors").write_bytes(content)
    refused("policy.safetensors", "evaluate", "small", code=1)
    (run / "best_policy.safetensors").unlink()
    refused("has no best_policy.safetensors yet; omit --best", "evaluate", "small", "--best")
    (run / "policy.safetensors").unlink()
    refused("the run runs/small has no policy.safetensors yet; inchworm resume small continues its training", "evaluate", "small")


def test_a_policy_file_is_evaluated_in_the_environment_of_its_run_or_in_the_one_given(cli: Any, run: Path) -> None:
    of_run = json.loads(cli("evaluate", "small", "--json").out)
    assert json.loads(cli("evaluate", "runs/small/policy.safetensors", "--json").out) == of_run
    Path("elsewhere.safetensors").write_bytes((run / "policy.safetensors").read_bytes())
    flags = ["--env", "CartPole-v1", "--episodes", 3, "--num-envs", 2]
    result = cli("evaluate", "elsewhere.safetensors", *flags, "--json")
    assert json.loads(result.out) == of_run
    assert cli("evaluate", "elsewhere.safetensors", *flags).out.startswith("elsewhere.safetensors: mean return ")
    checkpoint = max((run / "checkpoints").iterdir())  # and one without a config, such as a checkpoint or a run of a script
    assert json.loads(cli("evaluate", checkpoint, *flags, "--json").out) == of_run
    assert json.loads(cli("evaluate", checkpoint, "--json").out) == of_run  # in its run, which knows the environment
    heavy = cli("evaluate", "elsewhere.safetensors", *flags, "--kwargs", "{sutton_barto_reward: true}", "--json")
    assert json.loads(heavy.out)["mean_return"] != of_run["mean_return"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["elsewhere"],
            "elsewhere is not in the directory of a run, so the environment is not known; add --env, such as --env CartPole-v1",
        ),
        (
            ["elsewhere", "--best", "--env", "CartPole-v1"],
            "--best and --last choose a policy of a run, and elsewhere is one policy; omit them",
        ),
        (["elsewhere", "--env", "Acrobot-v1"], "was made for the observation space"),
        (
            ["elsewhere.safetensors"],
            "there is no run elsewhere.safetensors; none of the 1 in runs has a similar name; a policy file is also accepted",
        ),
        (["empty", "--env", "CartPole-v1"], "empty holds no policy; expected a policy file, a run directory"),
    ],
)
def test_wrong_use_of_a_policy_file_is_one_line(refused: Any, run: Path, arguments: list[str], message: str) -> None:
    Path("elsewhere").write_bytes((run / "policy.safetensors").read_bytes())
    Path("empty").mkdir()
    refused(message, "evaluate", *arguments)


def test_a_suite_is_scored_in_groups(cli: Any, run: Path) -> None:
    Path("suite.yaml").write_text(
        "control:\n  - {env: CartPole-v1, episodes: 3, score_range: [0, 500]}\n  - {env: CartPole-v0, episodes: 2, name: short}\n"
    )
    result = cli("evaluate", "small", "--suite", "suite.yaml", "--json", "--quiet")
    assert result.code == 0, result.err
    data = json.loads(result.out)
    pole, short = (data["groups"]["control"][name]["mean_return"] for name in ("CartPole-v1", "short"))
    mean = (pole / 500 + short) / 2
    assert data["scores"] == {"control/CartPole-v1": pole / 500, "control/short": short, "control/score": mean, "overall": mean}
    lines = cli("evaluate", "small", "--suite", "suite.yaml").out.splitlines()
    assert lines[0] == "runs/small/policy.safetensors:"
    assert lines[1].startswith(f"control/CartPole-v1  {pole / 500:>7.4g}  (scaled return; mean return {pole:.5g}")
    assert lines[-1].startswith("overall  ")


# two players

RULES = {"units": ["scout"], "wall_pairs": 0, "max_steps": 30, "zone_target": 10}
WORLD = EnvConfig(id="Skirmish-v0", kwargs=RULES)


def make_run(name: str, seed: int, **rules: Any) -> None:
    """A run in Skirmish whose policy has never learnt anything."""
    world = WORLD.replace(kwargs={**RULES, **rules})
    run = create_run(TrainingConfig(env=world, run=RunConfig(name=name), evaluation=EvalConfig(final_episodes=5, num_envs=4)))
    run.close()
    env = SkirmishVectorEnv(world.kwargs, 1)
    spec = PolicySpec(env.observation_space, env.action_space, PolicyConfig(hidden_sizes=(8,)))
    for best in (False, True):
        save_policy(run.policy_path(best=best), spec, NumpyPolicy(spec, seed=seed + best).get_weights())


@pytest.fixture
def skirmish(cli: Any) -> None:
    """Two runs, runs/a and runs/b; `cli` has made the working directory."""
    make_run("a", 1)
    make_run("b", 5)


def policy(path: str) -> Any:
    return load_policy(Path("runs") / path / "policy.safetensors")


@pytest.mark.usefixtures("skirmish")
def test_a_match_of_two_runs(cli: Any) -> None:
    result = cli("match", "a", "runs/b", "--episodes", 6, "--quiet")
    assert result.code == 0, result.err
    expected = play_match(policy("a"), policy("b"), WORLD, 6)
    assert result.out == f"runs/a/policy.safetensors against runs/b/policy.safetensors in Skirmish-v0: {expected}\n"
    assert " of 6 greedy episodes), health margin " in result.out
    result = cli("match", "a", "heuristic:0.5", "--episodes", 4, "--sampled", "--seed", 3, "--num-envs", 2, "--json", "--quiet")
    file = cli("match", "runs/a/policy.safetensors", "random", "--episodes", 2, "--quiet")  # its run knows the environment
    assert file.code == 0, file.err
    rules = SkirmishConfig.from_dict(RULES)
    sampled, _ = evaluate_vs_heuristic(policy("a"), rules, 4, skill=0.5, deterministic=False, seed=3, num_envs=2)
    assert json.loads(result.out) == {**sampled.to_dict(), "players": ["runs/a/policy.safetensors", "heuristic:0.5"]}


@pytest.mark.usefixtures("skirmish")
def test_players_without_a_run_need_an_environment(cli: Any, refused: Any) -> None:
    refused("such as --env Skirmish-v0", "match", "heuristic", "random", "--episodes", 4)
    flags = ["--episodes", 4, "--env", "Skirmish-v0", "--kwargs", json.dumps(RULES), "--save-replay", "games/first.json", "--quiet"]
    result = cli("match", "heuristic", "runs/a/policy.safetensors", *flags)
    assert result.code == 0, result.err
    assert result.out.startswith("heuristic against runs/a/policy.safetensors in Skirmish-v0: win rate ")
    replay = load_replay("games/first.json")
    assert replay["meta"]["players"] == ["heuristic", "runs/a/policy.safetensors"]
    assert len(replay["frames"]) == replay["meta"]["steps"] + 1


@pytest.mark.usefixtures("skirmish")
def test_runs_with_different_kwargs_play_with_those_of_the_first(cli: Any) -> None:
    make_run("long", 2, max_steps=31)
    result = cli("match", "long", "a", "--episodes", 2, "--quiet")
    assert result.code == 0
    assert "long and a were trained with different env.kwargs; the match uses those of long" in result.err
    make_run("wide", 2, units=["scout", "scout"])
    other = cli("match", "wide", "a", "--episodes", 2, "--quiet")
    assert other.code == 2
    assert other.err.splitlines()[-1].startswith("inchworm: runs/a/policy.safetensors was made for the observation space")


@pytest.mark.usefixtures("skirmish")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "a match needs two players; type: inchworm match RUN heuristic"),
        (["a"], "a match needs two players"),
        (["a", "nowhere"], "there is no run nowhere"),
        (["a", "b", "--episodes", "5"], "episodes=5 is odd"),
        (["a", "b", "--episodes", "0"], "episodes=0 must be 1 or more"),
        (["a", "heuristic:2"], "from 0 to 1"),
        (["a", "b", "--env", "CartPole-v1", "--kwargs", "{}"], "a match needs an environment with two teams"),
        (["a", "heuristic", "--env", "CartPole-v1", "--kwargs", "{}"], "CartPole-v1 has no heuristic"),
        (["a", "b", "--env", "Nowhere-v1"], "Nowhere-v1"),
        (["a", "b", "--kwargs", "[1]"], "--kwargs=[1] must be a mapping of names to values"),
        (["a", "b", "--kwargs", "{unit: [scout]}"], "did you mean units?"),
        (["a", "b", "--save-replay", "runs"], "--save-replay runs is a directory; name a file in it"),
    ],
)
def test_wrong_use_of_match_is_one_line(refused: Any, arguments: list[str], message: str) -> None:
    refused(message, "match", *arguments)


@pytest.mark.usefixtures("skirmish")
def test_evaluate_against_an_opponent(cli: Any) -> None:
    rules = SkirmishConfig.from_dict(RULES)
    result = cli("evaluate", "a", "--opponent", "heuristic", "--skill", 0.25, "--episodes", 4, "--save-replay", "game.json", "--quiet")
    assert result.code == 0, result.err
    expected, _ = evaluate_vs_heuristic(policy("a"), rules, 4, skill=0.25, num_envs=4)
    assert result.out == f"runs/a/policy.safetensors against heuristic:0.25 in Skirmish-v0: {expected}\nreplay: game.json\n"
    assert load_replay("game.json")["meta"]["players"] == ["runs/a/policy.safetensors", "heuristic:0.25"]
    best = load_policy("runs/a/best_policy.safetensors")
    expected, _ = evaluate_vs_heuristic(best, rules, 6, num_envs=4)  # the run's final evaluation has 5, a match an even number
    found = json.loads(cli("evaluate", "a", "--opponent", "heuristic", "--best", "--json", "--quiet").out)
    assert found == {**expected.to_dict(), "players": ["runs/a/best_policy.safetensors", "heuristic"]}
    for opponent in ("random", "b", "runs/b/best_policy.safetensors"):
        assert " of 2 greedy episodes)" in cli("evaluate", "a", "--opponent", opponent, "--episodes", 2, "--quiet").out


# progress
def test_a_terminal_gets_a_bar_and_quiet_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    terminal = Terminal(file=out, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    with progress("episodes", 4, terminal=terminal) as show, progress("episodes", 4, quiet=True) as show_nothing:
        show(3)
        show_nothing(3)
    assert "episodes" in out.getvalue()
    assert "3/4" in out.getvalue()
    assert capsys.readouterr().err == ""


def test_elsewhere_a_line_is_printed_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    with progress("episodes", 4000, terminal=make_terminal(file=out)) as show:
        for now in (1.0, 9.0, 11.0, 12.0, 22.0):  # lines are at least ten seconds apart
            show(int(now * 100))
    assert out.getvalue() == "episodes 1,100/4,000\nepisodes 2,200/4,000\n"


def test_a_score_is_compared_with_a_baseline(cli: Any, run: Path, small: list[str]) -> None:
    result = cli("evaluate", "small", "--baseline", "random")
    assert ", difference to random on the same seeds " in result.out
    same = json.loads(cli("evaluate", "small", "--baseline", "runs/small", "--json").out)
    assert (same["baseline"], same["difference"], same["difference_interval95"]) == ("runs/small", 0.0, [0.0, 0.0])
    assert same["baseline_returns"] == same["returns"]
    result = cli("train", "CartPole-v1", *small, "--run.name=compared", "--evaluation.baseline=random")
    assert result.code == 0, result.err
    assert ", difference to random on the same seeds " in next(line for line in result.out.splitlines() if line.startswith("score: "))
    assert "  difference to random " in result.out
    row = read_rows(Path("runs/compared/metrics.jsonl"))[-1]
    assert row["evaluation/difference_interval95_low"] < row["evaluation/difference"] < row["evaluation/difference_interval95_high"]
