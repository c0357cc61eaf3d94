"""Flags over the config's fields; wrong use is one line."""

import contextlib
import io
import re
from pathlib import Path
from typing import Annotated, Any

import pytest

from inchworm.cli.arguments import NO_FLAG, OTHER_FLAGS, Metavar, TrainOptions, parse, parse_with_config, resolve_config
from inchworm.cli.evaluate import EvaluateOptions
from inchworm.config.reading import FROM_LIST, ConfigBase, config_class
from inchworm.config.sections import TrainingConfig, WrapperConfig
from inchworm.core.errors import ConfigError
from inchworm.env.registry import config_for


def resolved(*arguments: str) -> TrainingConfig:
    options, changes = parse_with_config(TrainOptions, arguments, "prog")
    return resolve_config(options.env, options.config, changes, "prog")


CLIP = (WrapperConfig(name="ClipReward", kwargs={"min_reward": -1}),)


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--ppo.clip-coef", "0.1"], "ppo.clip_coef", 0.1),
        (["--ppo.clip_coef=0.1"], "ppo.clip_coef", 0.1),
        (["--ppo.gamma", "1"], "ppo.gamma", 1.0),
        (["--ppo.gamma", "0.1", "--ppo.gamma", "0.2"], "ppo.gamma", 0.2),
        (["--policy.log-std-init", "-1e-3"], "policy.log_std_init", -0.001),
        (["--ppo.rollout-steps", "1_000"], "ppo.rollout_steps", 1000),
        (["--ppo.max-grad-norm", "None"], "ppo.max_grad_norm", None),
        (["--ppo.max-grad-norm=null"], "ppo.max_grad_norm", None),
        (["--run.name", "None"], "run.name", None),
        (["--run.name", "123"], "run.name", "123"),
        (["--run.directory", "-"], "run.directory", "-"),
        (["--ppo.sequence-length", "4"], "ppo.sequence_length", 4),
        (["--ppo.sequence-length", "auto"], "ppo.sequence_length", "auto"),
        (["--policy.kind", "cnn"], "policy.kind", "cnn"),
        (["--env.atari"], "env.atari", True),
        (["--env.atari", "True"], "env.atari", True),
        (["--env.atari=FALSE"], "env.atari", False),
        (["--env.no-native"], "env.native", False),
        (["--env.no-native", "false"], "env.native", True),
        (["--policy.hidden-sizes", "32", "16"], "policy.hidden_sizes", (32, 16)),
        (["--policy.hidden-sizes=8"], "policy.hidden_sizes", (8,)),
        (["--policy.hidden-sizes"], "policy.hidden_sizes", ()),
        (["--policy.cnn-filters", "1", "2", "3", "4", "5", "6"], "policy.cnn_filters", ((1, 2, 3), (4, 5, 6))),
        (["--policy.cnn-filters", "[[1, 2, 3], [4, 5, 6]]"], "policy.cnn_filters", ((1, 2, 3), (4, 5, 6))),
        (["--policy.hidden-sizes=[32, 16]"], "policy.hidden_sizes", (32, 16)),
        (["--policy.hidden-sizes", "[]"], "policy.hidden_sizes", ()),
        (["--ppo.freeze", "[actor.*, log_std]"], "ppo.freeze", ("actor.*", "log_std")),
        (["--opponent.anchors", "random", "heuristic:0.5"], "opponent.anchors", ("random", "heuristic:0.5")),
        (["--env.kwargs", "{gravity: 5, list: [1, 2]}"], "env.kwargs", {"gravity": 5, "list": [1, 2]}),
        (["--env.kwargs={a: 1}", "--env.kwargs", "{b: x=y}"], "env.kwargs", {"b": "x=y"}),
        (["--env.wrappers=[{name: ClipReward, kwargs: {min_reward: -1}}]"], "env.wrappers", CLIP),
        (["--seed", "3"], "run.seed", 3),
        (["--total_timesteps=5"], "run.total_timesteps", 5),
        (["--total-timesteps", "1e6"], "run.total_timesteps", 1_000_000),
        (["--ppo.rollout-steps=2.5e2"], "ppo.rollout_steps", 250),
        (["--policy.hidden-sizes", "1e2", "64"], "policy.hidden_sizes", (100, 64)),
        (["--env.num-workers", "1e0"], "env.num_workers", 1),
        (["--evaluation.max-episode-steps", "1E3"], "evaluation.max_episode_steps", 1_000),
        (["--num-envs", "3"], "env.num_envs", 3),
        (["--num-workers", "auto"], "env.num_workers", "auto"),
        (["--backend", "numpy"], "run.backend", "numpy"),
        (["--compile", "auto"], "ppo.compile", "auto"),
    ],
)
def test_a_flag_sets_its_field_wherever_the_environment_is_named(words: list[str], field: str, value: Any) -> None:
    section, _, name = field.partition(".")
    base = config_for("Taxi-v3")
    expected = base.replace(**{section: getattr(base, section).replace(**{name: value})})
    assert resolved("Taxi-v3", *words) == expected
    if not isinstance(value, tuple):  # a list extends to the next flag
        assert resolved(*words, "Taxi-v3") == expected


def test_a_command_has_its_own_flags_and_arguments() -> None:
    @config_class("--")
    class Options(ConfigBase):
        """What it does."""

        first: Annotated[str, Metavar("A", positional=True)] = ""
        rest: Annotated[tuple[str, ...], FROM_LIST, Metavar("B", positional=True)] = ()
        num_envs: int | None = None
        open: bool = True

    assert parse(Options, ["x", "--num-envs=3", "y", "--no-open", "z"], "prog") == Options(
        first="x", rest=("y", "z"), num_envs=3, open=False
    )
    with pytest.raises(ConfigError, match=r"^--num_envs='many' must be an integer$"):
        parse(Options, ["--num-envs", "many"], "prog")


def test_the_config_file_is_changed_by_flags_and_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("env: {id: Acrobot-v1, kwargs: {a: [1, {b: 2}]}, wrappers: [{name: ClipReward}]}\nppo: {gamma: 0.5, gae_lambda: 0.5}\n")
    config = resolved("--config", str(file), "--ppo.gamma", "0.7")
    assert (config.env.id, config.ppo.gamma, config.ppo.gae_lambda) == ("Acrobot-v1", 0.7, 0.5)
    assert config.env.kwargs == {"a": [1, {"b": 2}]}
    assert config.env.wrappers[0].name == "ClipReward"
    assert resolved("Taxi-v3", f"--config={file}").env.id == "Taxi-v3"
    assert resolved("--env.id", "CartPole-v1") == resolved("CartPole-v1")
    file.write_text("env: {id: 'my_module:make_env'}")  # code to import must be typed
    with pytest.raises(ConfigError, match=rf"prog my_module:make_env --config {file}$"):
        resolved("--config", str(file))
    assert resolved("my_module:make_env", "--config", str(file)).env.id == "my_module:make_env"


def test_a_directory_as_config_is_answered_with_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^the config {tmp_path} is a directory, and a YAML file is expected, as inchworm config ENV"):
        resolved("--config", str(tmp_path))
    (tmp_path / "config.yaml").write_text("env: {id: Taxi-v3}")  # the directory of a run
    with pytest.raises(ConfigError, match=rf"a YAML file is expected; use {tmp_path}/config.yaml$"):
        resolved("--config", str(tmp_path))
    assert resolved("--config", str(tmp_path / "config.yaml")).env.id == "Taxi-v3"


def test_a_setting_replaces_the_one_it_excludes() -> None:
    by_number = resolved("CartPole-v1", "--ppo.num-minibatches", "4").ppo  # the preset has a minibatch_size
    assert (by_number.num_minibatches, by_number.minibatch_size) == (4, None)
    by_size = resolved("Skirmish-v0", "--ppo.minibatch-size=64").ppo  # the preset has num_minibatches
    assert (by_size.num_minibatches, by_size.minibatch_size) == (None, 64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), r"no environment is given; type: prog CartPole-v1, or prog --config FILE"),
        (("X-v0", "--env.id", "Y-v0"), r"X-v0 and --env.id Y-v0 are two environments; give one"),
        (("X-v0", "--ppo.clip-cof", "1"), r"unknown flag --ppo.clip-cof; did you mean --ppo.clip-coef\?"),
        (("X-v0", "--threads", "1"), r"unknown flag --threads; did you mean --run.threads\?"),
        (("X-v0", "--interval=1"), r"unknown flag --interval; did you mean --evaluation.interval\?"),
        (("X-v0", "--clip-cof", "1"), r"unknown flag --clip-cof; did you mean --ppo.clip-coef\?"),
        (("X-v0", "--rollout", "1"), r"unknown flag --rollout; did you mean --ppo.rollout-steps\?"),
        (("X-v0", "--xyzzy"), r"unknown flag --xyzzy; prog --help lists all flags"),
        (("X-v0", "--eval"), r"unknown flag --eval; prog --help lists all flags"),  # any of --evaluation.* would be a guess
        (("X-v0", "--wandb"), r"unknown flag --wandb; it is called --tracking.wandb.project NAME here"),
        (("X-v0", "--push-url", "x"), r"unknown flag --push-url; runs are delivered by trackers: --tracking.mlflow.uri URL or .*"),
        (("X-v0", "--wandb-run-name", "x"), r"unknown flag --wandb-run-name; it is called --tracking.wandb.name here"),
        (("X-v0", "--tensorboard-log", "x"), r"unknown flag --tensorboard-log; it is called --tracking.tensorboard here"),
        (("X-v0", "--track"), r"unknown flag --track; it is called --tracking.wandb.project NAME here"),
        (("X-v0", "--eval-every", "5"), r"unknown flag --eval-every; it is called --evaluation.interval \(counted in iterations\) here"),
        (("X-v0", "--num-steps", "5"), r"unknown flag --num-steps; it is called --ppo.rollout-steps here"),
        (("X-v0", "--n_envs=5"), r"unknown flag --n-envs; it is called --env.num-envs here"),
        (("X-v0", "-n", "5"), r"unknown flag -n; it is called --total-timesteps here"),
        (("X-v0", "--clip-range", "5"), r"unknown flag --clip-range; it is called --ppo.clip-coef here"),
        (("X-v0", "--value-coef", "5"), r"unknown flag --value-coef; it is called --ppo.vf-coef \(twice theirs if .*"),
        (("X-v0", "--ppo.value-coef", "5"), r"unknown flag --ppo.value-coef; it is called --ppo.vf-coef \(twice theirs if .*"),
        (("X-v0", "--train-batch-size", "5"), r"unknown flag --train-batch-size; it is called --ppo.rollout-steps \(their batch .*"),
        (("X-v0", "--capture-video"), r"unknown flag --capture-video; a video of a run is a command of its own: inchworm video RUN"),
        (("--env-id", "X-v0"), r"unknown flag --env-id; give the environment as the first argument: inchworm train CartPole-v1"),
        (("X-v0", "-x"), r"unknown flag -x; prog --help lists all flags"),
        (("X-v0", "more"), r"unexpected argument more; prog --help lists all flags"),
        (("X-v0", "--env.atari", "yes"), r"unexpected argument yes; .*"),
        (("X-v0", "--env.atari=yes"), r"--env.atari=yes must be true or false"),
        (("X-v0", "--ppo.gamma"), r"--ppo.gamma needs a value; prog --help lists all flags"),
        (("X-v0", "--run.name", "--quiet"), r"--run.name needs a value; .*"),
        (("X-v0", "--env.kwargs"), r"--env.kwargs needs a value in YAML; .*"),
        (("X-v0", "--env.kwargs", "{"), r"--env.kwargs '\{' is not valid YAML: .*"),
        (("X-v0", "--env.kwargs", "5"), r"env.kwargs=5 must be a mapping of names to values"),
        (("X-v0", "--ppo.gamma", "abc"), r"ppo.gamma='abc' must be a number"),
        (("X-v0", "--ppo.rollout-steps", "1.5"), r"ppo.rollout_steps=1.5 must be an integer"),
        (("X-v0", "--ppo.rollout-steps", "1e-3"), r"ppo.rollout_steps=0.001 must be an integer"),
        (("X-v0", "--total-timesteps", "1e30"), r"run.total_timesteps=1e\+30 must be an integer"),  # 1e30 as a float is another number
        (("X-v0", "--ppo.sequence-length", "x"), r"ppo.sequence_length='x' must be an integer, or 'auto'"),
        (("X-v0", "--policy.hidden-sizes", "8", "x"), r"policy.hidden_sizes\[1\]='x' must be an integer"),
        (("X-v0", "--policy.kind", "rnn"), r"policy.kind='rnn' must be 'mlp', 'cnn', 'lstm' or 'gru'"),
        (("--config", "nowhere.yaml"), r"cannot read the config nowhere.yaml.*"),
    ],
)
def test_wrong_use_is_one_line_that_says_what_to_type(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$") as caught:
        resolved(*arguments)
    assert "\n" not in str(caught.value)


def test_every_flag_of_another_trainer_is_answered_by_one_that_exists() -> None:
    named = [name for names in (*OTHER_FLAGS.values(), *NO_FLAG.values()) for name in names]
    assert len(named) == len(set(named))
    for name in named:  # none is a flag here, or would be answered by a similar one
        with pytest.raises(ConfigError, match=f"^unknown flag {name}; (?!did you mean|prog --help)"):
            resolved("X-v0", name, "1")
    known = set(re.findall(r"--[a-z0-9.-]+", _help_of_train()))
    assert {flag.partition(" ")[0] for flag in OTHER_FLAGS} <= known


def _help_of_train() -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
        resolved("--help")
    return out.getvalue()


def test_other_commands_name_their_own_flags_or_the_command() -> None:
    for words, message in (
        ("--n-envs", "it is called --num-envs here"),
        ("--n-eval-episodes", "it is called --episodes here"),
        ("--batch-size", "it is called --ppo.minibatch-size in inchworm train"),
    ):
        with pytest.raises(ConfigError, match=f"^unknown flag {words}; {message}$"):
            parse(EvaluateOptions, ["run", words, "1"], "prog")


def test_help_lists_every_flag_with_its_type_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        resolved("CartPole-v1", "--ppo.gamma", "--help")
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "usage: prog ENV [flags]"
    assert "ppo: How the policy learns from a rollout." in lines
    at = lines.index("  --ppo.gamma FLOAT")
    assert lines[at + 1] == "      Discount of the next step's value. (default: 0.98)"
    for line in (
        "  --config FILE",
        "  --run.seed, --seed INT",
        "  --env.atari, --env.no-atari",
        "  --env.num-workers, --num-workers INT|auto",
        "  --env.kwargs YAML",
        "  --policy.cnn-filters INT INT INT …",
        "  --ppo.target-kl FLOAT|null",
        "  --policy.kind mlp|cnn|lstm|gru",
    ):
        assert line in lines
