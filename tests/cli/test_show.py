from pathlib import Path
from typing import Any

import pytest

from inchworm.cli.show import commented_yaml
from inchworm.config.presets import PRESETS, config_for
from inchworm.config.sections import EnvConfig, TrainingConfig


@pytest.mark.parametrize("env", ["CartPole-v1", "Taxi-v3"])
def test_what_is_printed_is_what_train_would_use(cli: Any, tmp_path: Path, env: str) -> None:
    result = cli("config", env)
    assert (result.code, result.err) == (0, "")
    (tmp_path / "printed.yaml").write_text(result.out)
    assert TrainingConfig.from_yaml(tmp_path / "printed.yaml") == config_for(env)
    assert cli("config", "--config", "printed.yaml").out == result.out


def test_every_field_has_its_comment() -> None:
    assert "  gamma: 0.98  # Discount of the next step's value." in commented_yaml(config_for("CartPole-v1")).splitlines()


def test_the_first_line_says_where_the_numbers_come_from(cli: Any) -> None:
    tuned = PRESETS["CartPole-v1"]
    assert commented_yaml(tuned.config).startswith("# the preset of CartPole-v1")
    assert cli("config", "CartPole-v1", "--ppo.gamma=0.5").out.startswith("# the preset of CartPole-v1, changed\n")
    assert cli("config", "Taxi-v3").out.startswith("# Taxi-v3 has no preset: these are the defaults\n")


def test_nested_values_come_back(tmp_path: Path) -> None:
    config = TrainingConfig(env=EnvConfig(kwargs={"a": [1, {"b": "x: y # z"}], "c": "null"}))
    (tmp_path / "printed.yaml").write_text(commented_yaml(config))
    assert TrainingConfig.from_yaml(tmp_path / "printed.yaml") == config


def test_version_prints_what_affects_a_result(cli: Any) -> None:
    assert {line.split()[0] for line in cli("--version").out.splitlines()} >= {"python", "inchworm", "numpy", "torch"}
    assert cli("version", "x").code == 2
