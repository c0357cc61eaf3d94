"""Config files: strict YAML that is read back unchanged; names and paths."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inchworm.config.reading import check_name, check_path, dump_yaml, load_yaml
from inchworm.config.sections import TrainingConfig
from inchworm.core.errors import ConfigError


@pytest.mark.parametrize(
    "text, number", [("1e-4", 1e-4), ("1E+2", 100.0), ("-1e3", -1000.0), (".5e1", 5.0), ("2.5e-3", 2.5e-3), ("1_0e1", 100.0)]
)
def test_numbers_as_people_write_them(text: str, number: float) -> None:
    assert load_yaml(f"x: {text}") == {"x": number}
    assert isinstance(load_yaml(text), float)


@given(st.text(max_size=12) | st.from_regex(r"\A[-+]?[0-9_.]{1,4}[eE][-+]?[0-9]{1,2}\Z"))
def test_text_in_a_config_stays_text(text: str) -> None:
    data = {"a": text, "list": [text, 1e-05, 1e5, 7, None, True]}
    if text.isprintable():
        assert load_yaml(dump_yaml(data)) == data
    assert load_yaml("[e5, 1e, 1e5x]") == ["e5", "1e", "1e5x"]  # which only look like numbers


@pytest.mark.parametrize(
    "text, message",
    [
        ("ppo: {gamma: 0.9, gamma: 0.8}", "duplicate key 'gamma'"),
        ("!!python/object/apply:os.system ['true']", "python/object"),
        ("ppo: {gamma: !!bool maybe}", "not plain data"),
        ("ppo: {gamma: 2001-99-99}", "not plain data"),
        ("ppo: {gamma: !!int x}", "not plain data"),
        ("ppo: {gamma: !!timestamp x}", "not plain data"),
        ("[" * 600, "cannot read the config"),
        ("env: {kwargs: &a {x: *a}}", r"alias \*a is not supported; repeat the value"),
        ("? [1]\n: 2", "unhashable"),
        (b"\xff\xfe\x00", "decode"),
        ("a\0b", "special characters"),
        ("", "holds NoneType, not a mapping"),
        ("- 1", "holds list, not a mapping"),
        ("a: [", "expected"),
        ("--- {}\n--- {}", "single document"),
        ("ppo: {gamma: .nan}", "ppo.gamma=nan"),
        ('a: !!int ""', "cannot read the config"),
        ('a: !!float ""', "cannot read the config"),
        ('a: "\\UFFFFFFFF"', "cannot read the config"),
        ("a: 0x" + "f" * 5000, "an integer of more than 128 bits"),
        ("a: 1" + ":59" * 5000, "an integer of more than 128 bits"),
        ("#" * 70_000, "70,000 characters; at most 65,536 are read"),
    ],
)
def test_a_file_that_is_not_a_config_is_refused_in_one_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message) as caught:
        TrainingConfig.from_yaml(file)
    assert "\n" not in str(caught.value)


def test_missing_files_and_pipes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "nothing.yaml", tmp_path / "pipe"):
        with pytest.raises(ConfigError, match=f"cannot read the config {path}"):
            TrainingConfig.from_yaml(path)
    with pytest.raises(ConfigError, match=f"the config {tmp_path} is a directory, and a YAML file is expected"):
        TrainingConfig.from_yaml(tmp_path)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "/abs", "a/b", "a\\b", "a\0b", "x" * 121, " x", "x ", ".hidden", "x.", "a\nb", "a\x7f", "漢" * 100]
)
def test_names_that_would_leave_their_directory_or_do_not_fit(name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name=.* is not a valid name"):
        check_name(name, "run.name")
    for valid in ("a", "run 1", "CartPole-v1_2.5", "ü", "x" * 120, "ä" * 120):
        check_name(valid, "run.name")


@pytest.mark.parametrize("path", ["", "a\0b", "\ud800"])
def test_paths_that_no_file_system_accepts(path: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.directory=.* is not a valid path"):
        check_path(path, "run.directory")
