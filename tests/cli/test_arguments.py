import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest
import tyro

from inchworm.cli.arguments import UsageError, config_from, flags_of, parse, parse_over, split, take_yaml_flags
from inchworm.config.presets import config_for
from inchworm.config.sections import TrainingConfig
from inchworm.core.errors import ConfigError


@dataclass(frozen=True)
class Options:
    env: Annotated[str, tyro.conf.Positional] = ""
    config: str = ""
    quiet: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    settings: Annotated[TrainingConfig, tyro.conf.arg(name="")] = field(default_factory=TrainingConfig)


def resolved(*arguments: str) -> TrainingConfig:
    return parse_over(Options, arguments, "prog", config_from(Options, arguments, "prog")).settings


def test_flags_are_those_of_the_config_and_know_what_they_take() -> None:
    flags = flags_of(Options)
    assert flags["--ppo.clip-coef"] == "one"
    assert flags["--env.no-atari"] == flags["--quiet"] == "switch"
    assert flags["--policy.hidden-sizes"] == "many"
    assert "--env" not in flags  # it is the positional argument


def test_the_environment_is_found_wherever_it_stands() -> None:
    for arguments in (
        ["CartPole-v1", "--ppo.gamma", "0.9"],
        ["--ppo.gamma", "0.9", "CartPole-v1"],
        ["--quiet", "CartPole-v1", "--ppo.gamma=0.9"],
        ["--policy.log_std_init", "-1", "CartPole-v1", "--policy.hidden-sizes", "8", "8"],
    ):
        assert split(Options, arguments)[0] == ["CartPole-v1"], arguments
    assert split(Options, ["--policy.hidden-sizes", "8", "8"]) == ([], {"--policy.hidden-sizes": "8"})


def test_flags_change_the_preset() -> None:
    config = resolved("CartPole-v1", "--ppo.clip-coef", "0.1", "--policy.hidden-sizes", "32", "16", "--env.num-workers", "2")
    expected = config_for("CartPole-v1")
    assert config == expected.replace(
        ppo=expected.ppo.replace(clip_coef=0.1),
        policy=expected.policy.replace(hidden_sizes=(32, 16)),
        env=expected.env.replace(num_workers=2),
    )


def test_the_config_file_is_changed_by_flags_and_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("env: {id: Acrobot-v1, kwargs: {a: [1, {b: 2}]}, wrappers: [{name: ClipReward}]}\nppo: {gamma: 0.5, gae_lambda: 0.5}\n")
    config = resolved("--config", str(file), "--ppo.gamma", "0.7")
    assert (config.env.id, config.ppo.gamma, config.ppo.gae_lambda) == ("Acrobot-v1", 0.7, 0.5)
    assert config.env.kwargs == {"a": [1, {"b": 2}]}
    assert config.env.wrappers[0].name == "ClipReward"
    assert resolved("Taxi-v3", f"--config={file}").env.id == "Taxi-v3"


def test_an_environment_by_its_flag_is_the_same_as_by_its_place() -> None:
    assert resolved("--env.id", "CartPole-v1") == resolved("CartPole-v1")
    with pytest.raises(UsageError, match=r"CartPole-v1 and --env.id Acrobot-v1 name two environments"):
        resolved("CartPole-v1", "--env.id", "Acrobot-v1")


def test_code_to_import_must_be_typed(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("env: {id: 'my_module:make_env'}")
    with pytest.raises(ConfigError, match=rf"type: prog my_module:make_env --config {file}$"):
        resolved("--config", str(file))
    assert resolved("my_module:make_env", "--config", str(file)).env.id == "my_module:make_env"


def test_plain_data_of_any_shape_is_given_as_yaml() -> None:
    config = resolved(
        "CartPole-v1", "--env.kwargs", "{gravity: 5, list: [1, 2]}", "--env.wrappers=[{name: ClipReward, kwargs: {min_reward: -1}}]"
    )
    assert config.env.kwargs == {"gravity": 5, "list": [1, 2]}
    assert config.env.wrappers[0].to_dict() == {"name": "ClipReward", "kwargs": {"min_reward": -1}}
    assert resolved("--env.wrappers", "[{name: ClipReward}]", "CartPole-v1").env.id == "CartPole-v1"
    for wrong, message in {"{": "is no YAML", "5": r"env\.kwargs=5"}.items():
        with pytest.raises(ConfigError, match=message):
            take_yaml_flags(["--env.kwargs", wrong], TrainingConfig())
    with pytest.raises(UsageError, match="needs a value in YAML, such as"):
        take_yaml_flags(["--env.kwargs"], TrainingConfig())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), r"^no environment is given; type: prog CartPole-v1, or prog --config FILE$"),
        (("CartPole-v1", "--ppo.clip-cof", "1"), r"^unknown flag --ppo.clip-cof; did you mean --ppo.clip-coef\?$"),
        (("CartPole-v1", "--threads", "1"), r"^unknown flag --threads; did you mean --run.threads\?$"),
        (("CartPole-v1", "--interval=1"), r"did you mean --evaluation.interval\?$"),
        (("CartPole-v1", "--num-envs=1"), r"^unknown flag --num-envs(=1)?; did you mean --env.num-envs\?$"),
        (("CartPole-v1", "--xyzzy"), r"^unknown flag --xyzzy; prog --help lists all flags$"),
        (("CartPole-v1", "more"), r"^unexpected argument more; prog --help"),
        (("CartPole-v1", "--ppo.gamma"), r"^missing value for argument '--ppo.gamma'"),
        (("CartPole-v1", "--ppo.gamma", "abc"), r"^--ppo.gamma: could not convert string to float: 'abc'"),
        (
            ("CartPole-v1", "--policy.kind", "rnn"),
            r"^invalid choice 'rnn' for argument '--policy.kind'. Expected one of \('mlp', 'cnn', 'lstm', 'gru'\)",
        ),
        (("CartPole-v1", "--ppo.gamma", "2"), r"^ppo.gamma=2.0 must be 1 or less$"),
        (("CartPole-v1", "--ppo.num-minibatches", "4", "--ppo.minibatch-size", "64"), r"exclude each other"),
        (("--config", "nowhere.yaml"), r"^cannot read the config nowhere.yaml"),
    ],
)
def test_wrong_use_is_one_line_that_says_what_to_type(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolved(*arguments)
    assert "\n" not in str(caught.value)
    assert not set("│╭╰─") & set(str(caught.value))


def test_the_number_of_minibatches_takes_the_place_of_their_size_and_back() -> None:
    by_number = resolved("CartPole-v1", "--ppo.num-minibatches", "4").ppo  # the preset has a minibatch_size
    assert (by_number.num_minibatches, by_number.minibatch_size) == (4, None)
    by_size = resolved("Taxi-v3", "--ppo.minibatch-size=64").ppo
    assert (by_size.num_minibatches, by_size.minibatch_size) == (None, 64)


def test_long_complaints_are_unwrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    with pytest.raises(UsageError, match=r"^--ppo.gamma: could not convert string to float: 'abc def ghi jkl mno pqr stu'; prog"):
        parse(Options, ["x", "--ppo.gamma", "abc def ghi jkl mno pqr stu"], "prog")


def test_boxes_drawn_in_ascii_are_understood_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), "latin-1"))
    with pytest.raises(UsageError, match=r"^unknown flag --ppo.clip-cof; did you mean --ppo.clip-coef\?$"):
        parse(Options, ["x", "--ppo.clip-cof", "1"], "prog")
    with pytest.raises(UsageError, match=r"^--ppo.gamma: could not convert string to float: 'abc'; prog"):
        parse(Options, ["x", "--ppo.gamma", "abc"], "prog")


def test_help_is_printed_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        resolved("--help")
    assert end.value.code == 0
    assert "--ppo.clip-coef FLOAT" in capsys.readouterr().out
