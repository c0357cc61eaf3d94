"""Commands on environments with two teams, with a central critic, and on runs of several policies."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import optree
import pytest

from inchworm.config.sections import EnvConfig, EvalConfig, OpponentConfig, PPOConfig, RunConfig, TrainingConfig
from inchworm.evaluate.evaluator import make_evaluator
from inchworm.policy.composite import CompositePolicy, PolicyMap
from inchworm.rollout.rollout import Rollout
from inchworm.run.directory import load_config
from inchworm.run.policies import load_policy
from inchworm.tracking.jsonl import read_rows
from inchworm.train.trainer import PPOTrainer

RULES = "{units: [scout, scout], wall_pairs: 0, max_steps: 6}"
SMALL = ["--env.kwargs", RULES, "--num-envs", "4", "--ppo.rollout-steps", "8", "--ppo.num-minibatches", "2", "--policy.hidden-sizes", "8"]
SMALL += ["--total-timesteps", "64", "--evaluation.final-episodes", "4", "--evaluation.num-envs", "2", "--evaluation.interval", "0"]


@pytest.fixture
def team(cli: Any) -> Path:
    """A run in Skirmish against the heuristic, as the preset has it: 4 arenas of 2 against 2, 8 lanes of ours."""
    result = cli("train", "Skirmish-v0", *SMALL, "--run.name", "team")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    score = next(line for line in lines if line.startswith("score: "))
    assert re.match(r"score: against heuristic: win rate 0\.\d\d \[0\.\d\d, \d\.\d\d\], ", score)
    assert re.search(r", mean team return \S+ ± \S+, per agent \S+ \(95 %, 4 greedy episodes\)", score)
    assert lines[-1].strip() == "inchworm evaluate team --opponent heuristic --save-replay game.json, then inchworm replay game.json"
    return Path("runs/team")


def test_a_run_is_evaluated_against_its_own_opponent_as_at_the_end_of_training(cli: Any, team: Path) -> None:
    team.rename("runs/a:bug:b")  # printed as it is: a terminal library would make a picture of it
    result = cli("evaluate", "a:bug:b")
    assert result.code == 0, result.err
    assert result.out.startswith("runs/a:bug:b/policy.safetensors against heuristic: win rate ")
    stats = json.loads(cli("evaluate", "a:bug:b", "--json", "--quiet").out)
    final = read_rows(Path("runs/a:bug:b/metrics.jsonl"))[-1]
    for name in ("mean_return", "win_rate", "episodes"):
        assert stats[name] == final[f"evaluation/{name}"]
    assert stats["win_interval95"] == [final["evaluation/win_interval95_low"], final["evaluation/win_interval95_high"]]


def test_a_rollout_is_collected_as_in_training_with_the_runs_opponent(cli: Any, team: Path) -> None:
    result = cli("collect", "team", "--out", "r.st", "--steps", 12)
    assert result.code == 0, result.err
    assert "collecting 12 steps of 8 lanes (4 copies) of Skirmish-v0" in result.out
    rollout = Rollout.load("r.st")
    assert rollout.valid.shape == (12, 8)  # ours: two of each arena's four
    assert len(rollout.episodes) == 16  # two games of 6 steps in each of 4 arenas, reported by both of our units
    assert cli("learn", "team", "r.st").code == 0
    assert cli("collect", "team", "--out", "s.st", "--steps", 12, "--seed", 1, "--quiet").code == 0
    assert cli("collect", "team", "--out", "t.st", "--steps", 12, "--seed", 1, "--quiet").code == 0
    one, other = Rollout.load("s.st"), Rollout.load("t.st")
    assert all(np.array_equal(one.observations[key], other.observations[key]) for key in one.observations)
    modes = ["--opponent.mode", "self_play", "--opponent.rating-interval", "0"]  # then the opponent is the policy as it is
    assert cli("train", "Skirmish-v0", *SMALL, *modes, "--run.name", "selves", "--quiet").code == 0
    assert cli("collect", "selves", "--out", "r.st").code == 0
    assert Rollout.load("r.st").num_lanes == 8


def test_a_central_critic_is_trained_collected_and_learned(cli: Any) -> None:
    result = cli("train", "--policy.central-critic", "Skirmish-v0", *SMALL, "--run.name", "central")
    assert result.code == 0, result.err
    assert TrainingConfig.from_yaml("runs/central/config.yaml").run.backend == "torch"  # the preset uses NumPy
    assert cli("collect", "central", "--out", "r.st", "--quiet").code == 0
    assert {part.shape[:2] for part in optree.tree_leaves(Rollout.load("r.st").global_state)} == {(8, 4)}  # [T, E]
    assert cli("learn", "central", "r.st", "--quiet").code == 0
    assert cli("evaluate", "central", "--episodes", 2, "--quiet").code == 0


def test_what_needs_several_agents_is_refused_before_anything_is_written(refused: Any) -> None:
    teams = "opponent.mode=heuristic needs an environment with two teams, such as Skirmish-v0; CartPole-v1 has one agent"
    assert refused(teams, "train", "CartPole-v1", "--opponent.mode", "heuristic").out == ""
    agents = "policy.central_critic needs an environment with several agents; CartPole-v1 has one"
    assert refused(agents, "train", "CartPole-v1", "--policy.central-critic", "true").out == ""
    assert not Path("runs").exists()


def test_skirmish_is_trained_without_pettingzoo(cli: Any, refused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pettingzoo", None)  # as if it were not installed
    assert cli("train", "Skirmish-v0", *SMALL, "--run.name", "bare", "--quiet").code == 0
    assert cli("evaluate", "bare", "--episodes", 2, "--quiet").code == 0
    refused("units: 'wizard' is not a unit class; use scout, soldier, heavy", "train", "Skirmish-v0", "--env.kwargs", "{units: [wizard]}")


def test_a_rollout_of_another_world_is_named(cli: Any, refused: Any, team: Path, run: Path) -> None:
    assert cli("collect", "small", "--out", "pole.st", "--quiet").code == 0
    refused("inchworm: pole.st does not fit the policy: observations: ", "learn", "team", "pole.st", code=1)
    refused("team plays Skirmish-v0 and small plays CartPole-v1; a match needs one environment", "match", "team", "small")


@pytest.fixture
def several(cli: Any) -> TrainingConfig:
    """A run of two policies in Skirmish, made in Python as runs/pair."""
    config = TrainingConfig(
        env=EnvConfig(id="Skirmish-v0", num_envs=2, kwargs={"units": ["scout", "scout"], "max_steps": 6}),
        ppo=PPOConfig(rollout_steps=8, num_minibatches=2),
        opponent=OpponentConfig(mode="heuristic"),
        evaluation=EvalConfig(interval=1, episodes=2, final_episodes=2, num_envs=2),
        run=RunConfig(total_timesteps=64),
    )
    both = PolicyMap(policies={"left": "mlp", "right": "mlp"}, lane_map=["left", "right"])
    with PPOTrainer(both, config.env, config, run_dir="runs/pair") as trainer:
        trainer.train()
    return config


def test_several_policies_are_evaluated_from_their_checkpoint_and_trained_in_python(
    cli: Any, refused: Any, several: TrainingConfig
) -> None:
    result = cli("evaluate", "pair", "--episodes", 4, "--json")
    assert result.code == 0, result.err
    parts = {name: load_policy(f"runs/pair/policy-{name}.safetensors") for name in ("left", "right")}
    evaluation = several.evaluation.replace(episodes=4)
    with make_evaluator(several.env, several.replace(evaluation=evaluation)) as evaluator:
        expected = evaluator.evaluate(CompositePolicy(parts, ["left", "right"])).to_dict()
    assert json.loads(result.out) == expected
    assert cli("evaluate", "pair", "--best", "--episodes", 2, "--quiet").code == 0
    assert cli("evaluate", "pair", "--opponent", "pair", "--episodes", 2, "--quiet").code == 0
    assert cli("match", "heuristic", "pair", "--episodes", 2, "--quiet").code == 0
    assert cli("collect", "pair", "--out", "r.st", "--quiet").code == 0
    for words in (["resume", "pair"], ["learn", "pair", "r.st"]):
        refused("runs/pair trains several policies (left, right) that are not in its config; continue in Python", *words)
    each = "check each by its file, with an environment: runs/pair/policy-left.safetensors, runs/pair/policy-right"
    refused(each, "check-policy", "pair")


SPEAKERS = "mpe2.simple_speaker_listener_v4:parallel_env"
ROLES = ["--policies", "{listener: {agents: [listener_0], ppo: {learning_rate: 0.001}}}", "--policies.speak_er.agents", "speaker_*"]
TINY = ["--env.num-envs", "2", "--ppo.rollout-steps", "10", "--ppo.num-minibatches", "2", "--num-workers", "0", "--quiet"]
TINY += ["--evaluation.final-episodes", "2", "--evaluation.num-envs", "2", "--evaluation.interval", "0"]


def test_policies_of_the_config_are_trained_resumed_collected_learned_and_evaluated(cli: Any, refused: Any) -> None:
    pytest.importorskip("mpe2")
    roles = [*ROLES, "--policies.speak_er.policy.hidden-sizes", "8", "4"]
    for name, target in (("whole", 120), ("parts", 40)):
        result = cli("train", SPEAKERS, *TINY, *roles, "--total-timesteps", target, "--run.name", name)
        assert result.code == 0, result.err
    config = TrainingConfig.from_yaml("runs/parts/config.yaml")
    assert config.policies["speak_er"].agents == ("speaker_*",)
    assert config.role_policy("speak_er").hidden_sizes == (8, 4)
    assert config.policies["listener"].ppo == {"learning_rate": 0.001}
    where = ["--env", SPEAKERS]
    assert cli("resume", "parts", *where, "--total-timesteps", 120, "--quiet").code == 0
    for name, size, choices in (("speak_er", 3, 3), ("listener", 11, 5)):  # each file has the role's own spaces
        one, other = (load_policy(f"runs/{run}/policy-{name}.safetensors") for run in ("whole", "parts"))
        assert one.spec.observation_space.shape == (size,)
        assert one.spec.action_space.n == choices
        weights = one.get_weights()
        assert all(np.array_equal(value, weights[key]) for key, value in other.get_weights().items())
        assert 0 <= one.predict(np.zeros(size, np.float32)) < choices
    assert cli("collect", "parts", *where, "--out", "r.st", "--quiet").code == 0
    assert Rollout.load("r.st").observations["observation"].shape == (10, 4, 11)
    result = cli("learn", "parts", *where, "r.st")
    assert result.code == 0, result.err
    assert "policy-speak_er.safetensors" in result.out
    assert cli("evaluate", "parts", *where, "--episodes", 2, "--quiet").code == 0
    changed = ["--policies.listener.ppo.learning-rate", "0.01"]
    refused("policies.listener.ppo.learning_rate: 0.001 → 0.01", "resume", "parts", *where, *changed)


def test_policies_that_do_not_fit_the_agents_are_refused_and_leave_nothing(cli: Any, refused: Any) -> None:
    pytest.importorskip("mpe2")
    for policies, words in (
        ("{a: {agents: speaker_*}}", "no policy's agents match the agent listener_0"),
        ("{a: {agents: '*'}, b: {agents: listener_0}}", "both policies.a.agents and policies.b.agents match the agent listener_0"),
        ("{a: {agents: ['*', red_*]}}", "policies.a.agents='red_*' matches no agent; the agents are speaker_0, listener_0"),
        ("{a: {agent: '*'}}", "unknown config key policies.a.agent; did you mean policies.a.agents?"),
        ("{a: {agents: '*', ppo: {learning_rat: 1}}}", "policies.a: unknown config key ppo.learning_rat; did you mean"),
        ("{a: {agents: '*', ppo: {rollout_steps: 3}}}", "ppo.rollout_steps belongs to the rollout"),
        ("{a: {agents: '*', policy: {central_critic: true}}}", "set policy.central_critic"),
        ("{a: {}}", "policies.a.agents is missing"),
        ("[a]", "must map names to settings"),
    ):
        refused(words, "train", SPEAKERS, *TINY, "--policies", policies)
    refused("unknown flag --policies.a.agent", "train", SPEAKERS, "--policies.a.agent", "x")
    assert not list(Path("runs").glob("*/*"))


def test_the_config_command_shows_policies_that_train_reads(cli: Any) -> None:
    result = cli("config", SPEAKERS, *ROLES)
    Path("two.yaml").write_text(result.out)
    config = load_config("two.yaml", env=SPEAKERS)
    assert list(config.policies) == ["listener", "speak_er"]
    assert cli("config", SPEAKERS, "--config", "two.yaml").out == result.out
