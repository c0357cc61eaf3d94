import errno
import importlib.metadata
import json
import os
import platform
import re
import sys
from pathlib import Path

import pytest

from doubles.disk import failing
from inchworm.config.sections import TrainingConfig
from inchworm.core.errors import ConfigError, InchwormError
from inchworm.run.directory import NotExactWarning, config_changes, create_run, load_config, open_run, take_lock, versions


def config_in(directory: Path, name: str | None = None, env: str = "CartPole-v1", **ppo: object) -> TrainingConfig:
    return TrainingConfig.from_dict({"env": {"id": env}, "ppo": ppo, "run": {"name": name, "directory": str(directory / "runs")}})


@pytest.fixture
def mine(tmp_path: Path) -> TrainingConfig:
    """The config of a run that exists, named `mine`."""
    config = config_in(tmp_path, "mine")
    create_run(config).close()
    return config


def with_run(config: TrainingConfig, **changes: object) -> TrainingConfig:
    return config.replace(run=config.run.replace(**changes))


def test_a_new_run_has_a_unique_sortable_name_its_config_and_versions(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    with create_run(config) as first, create_run(config) as second:
        assert re.fullmatch(r"CartPole-v1-\d{8}-\d{6}-[0-9a-f]{4}", first.name)
        assert first.name != second.name
        assert not first.continued
        assert TrainingConfig.from_yaml(first.path / "config.yaml") == config
        assert json.loads((first.path / "versions.json").read_text()) == versions()
        assert first.checkpoints == first.path / "checkpoints"
        assert (first.policy_path().name, first.policy_path(best=True).name) == ("policy.safetensors", "best_policy.safetensors")


@pytest.mark.parametrize(
    ("env", "stem"), [("ALE/Pong-v5", "ALE-Pong-v5"), ("my_pkg.world:make_env", "my_pkg.world-make_env"), ("../..", "run")]
)
def test_names_stay_within_the_directory_whatever_the_environment_is_called(tmp_path: Path, env: str, stem: str) -> None:
    with create_run(config_in(tmp_path, env=env)) as run:
        assert run.path.parent == tmp_path / "runs"
        assert run.name.startswith(f"{stem}-2")


def test_a_given_name_continues_that_run(tmp_path: Path, mine: TrainingConfig) -> None:
    with create_run(mine) as again:
        assert again.continued
        assert again.path == tmp_path / "runs" / "mine"


def test_another_config_is_refused_with_the_differences(tmp_path: Path, mine: TrainingConfig) -> None:
    other = config_in(tmp_path, "mine", gamma=0.9, minibatch_size=64)
    with pytest.raises(ConfigError, match=r"ppo\.gamma: 0\.99 → 0\.9, ppo\.minibatch_size: None → 64; leave it unchanged"):
        create_run(other)
    create_run(mine).close()  # the refusal left neither the lock nor a changed config behind


def test_fields_that_do_not_touch_the_past_may_change_and_are_kept(tmp_path: Path, mine: TrainingConfig) -> None:
    longer = with_run(mine, total_timesteps=200_000, keep_checkpoints=5)
    create_run(longer).close()
    assert open_run(tmp_path / "runs" / "mine").config == longer


def test_another_thread_count_continues_with_a_warning(mine: TrainingConfig) -> None:
    with pytest.warns(NotExactWarning, match=r"run\.threads: 1 → 2: continuing; results will no longer be bit-identical"):
        create_run(with_run(mine, threads=2)).close()


def test_other_versions_continue_with_a_warning_each(tmp_path: Path) -> None:
    config = config_in(tmp_path, "mine")
    with create_run(config) as run:
        (run.path / "versions.json").write_text(json.dumps({**versions(), "torch": "1.0"}))
    with pytest.warns(NotExactWarning, match=r"torch: 1\.0 → "):
        create_run(config).close()


def test_a_directory_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"is not a run .* but holds thesis\.tex"):
        create_run(config_in(tmp_path, "mine"))


def test_a_directory_left_by_a_kill_before_the_config_was_written_is_taken(tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "lock").touch()
    (tmp_path / "runs" / "mine" / ".tmp-config.yaml-0").write_text("env:")
    with create_run(config_in(tmp_path, "mine")) as run:
        assert not run.continued
        assert not list(run.path.glob(".tmp-*"))


def test_a_directory_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(ConfigError, match=r"cannot make a run in run\.directory="):
        create_run(config_in(tmp_path, "mine"))


def test_a_second_trainer_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    config = config_in(tmp_path, "mine")
    with create_run(config) as run:
        run.lock()  # who holds it may ask again
        with pytest.raises(InchwormError, match=rf"runs/mine is in use by process {os.getpid()}; wait for it"):
            create_run(config)
        with pytest.raises(InchwormError, match="in use by process"):
            open_run(run.path).lock()
    run.close()  # closing twice does no harm
    create_run(config).close()


def test_a_run_is_found_by_path_and_by_name(tmp_path: Path, mine: TrainingConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "runs/mine", tmp_path / "runs" / "mine"):
        assert open_run(name).path.resolve() == tmp_path / "runs" / "mine"
    assert open_run("mine", directory=tmp_path / "runs").name == "mine"


def test_an_unknown_run_is_answered_with_names_that_are_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="there is no run cartpole, and none in runs; inchworm train ENV makes one"):
        open_run("cartpole")
    for name in ("cartpole-1", "acrobot-1"):
        create_run(config_in(tmp_path, name)).close()
    with pytest.raises(ConfigError, match=r"there is no run cartpole; nearest in runs: cartpole-1$"):
        open_run("cartpole")
    with pytest.raises(ConfigError, match=r"there is no run frozen-lake; none of the 2 in runs has a similar name$"):
        open_run("frozen-lake")


def test_code_to_import_is_never_taken_from_a_file(tmp_path: Path) -> None:
    create_run(config_in(tmp_path, "mine", env="my_module:make_env")).close()
    path = tmp_path / "runs" / "mine"
    with pytest.raises(ConfigError, match=r"names code to import \(my_module:make_env\).* add --env my_module:make_env$"):
        open_run(path)
    with pytest.raises(ConfigError, match="names code to import"):
        load_config(path / "config.yaml", env="my_module:other")
    assert open_run(path, env="my_module:make_env").config.env.id == "my_module:make_env"


def test_changes_name_nested_fields() -> None:
    before = TrainingConfig.from_dict({"env": {"kwargs": {"gravity": 9.8}}})
    after = TrainingConfig.from_dict({"env": {"kwargs": {"gravity": 5.0, "wind": True}}})
    assert config_changes(before, after) == {
        "env.kwargs.gravity": "env.kwargs.gravity: 9.8 → 5.0",
        "env.kwargs.wind": "env.kwargs.wind: None → True",
    }
    assert config_changes(before, before) == {}


def test_versions_name_what_decides_a_result() -> None:
    found = versions()
    assert found.keys() >= {"python", "inchworm", "numpy", "torch", "gymnasium", "platform", "cpu"}
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))


def test_versions_that_cannot_be_found_are_recorded_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    monkeypatch.setattr(Path, "read_text", failing(errno.ENOENT))
    found = versions.__wrapped__()
    assert found["torch"] is None
    assert found["cpu"] == platform.machine()


def test_what_a_killed_writer_left_goes_when_the_lock_is_taken(tmp_path: Path, mine: TrainingConfig) -> None:
    path = tmp_path / "runs" / "mine"
    (path / "checkpoints" / ".tmp-half").mkdir(parents=True)
    (path / "checkpoints" / ".tmp-half" / "state.json").write_text("{")
    (path / ".tmp-policy").write_text("half")
    create_run(mine).close()
    assert sorted(entry.name for entry in path.rglob("*")) == ["checkpoints", "config.yaml", "lock", "versions.json"]


@pytest.mark.parametrize("name", ["checkpoints", "replays"])
def test_checkpoints_and_replays_behind_a_link_are_refused(tmp_path: Path, mine: TrainingConfig, name: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / ".tmp-of-another").write_text("x")
    (tmp_path / "runs" / "mine" / name).symlink_to(elsewhere)
    with pytest.raises(InchwormError, match=f"{name} is a symbolic link"):
        create_run(mine)
    assert (elsewhere / ".tmp-of-another").exists()


@pytest.mark.parametrize("text", ["[" * 100_000, '{"numpy": 1', "[]", "\udcff", None])
def test_a_strange_record_of_versions_is_a_warning(tmp_path: Path, mine: TrainingConfig, text: str | None) -> None:
    path = tmp_path / "runs" / "mine" / "versions.json"
    path.unlink()
    if text is None:
        os.mkfifo(path)  # must not be waited for
    else:
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.warns(NotExactWarning, match=r"cannot compare versions: .*versions\.json"):
        create_run(mine).close()


@pytest.mark.parametrize("name", ["1e5", "12", "1_0", "0x1f", "true", "null", "1:30", "2001-01-01", "-1e-3"])
def test_a_run_whose_name_looks_like_something_else_can_be_continued(tmp_path: Path, name: str) -> None:
    config = config_in(tmp_path, name)
    create_run(config).close()
    with create_run(config) as run:
        assert run.continued
        assert run.config.run.name == name


def test_a_link_is_not_followed_and_its_target_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keys")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(InchwormError, match="cannot lock the run x"):
        take_lock(tmp_path / "lock", "the run x")
    assert (tmp_path / "precious").read_text() == "keys"


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(InchwormError, match="lock is not a regular file"):
        take_lock(tmp_path / "lock", "the run x")


def test_a_full_disk_takes_the_name_of_the_holder_but_not_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", failing(errno.ENOSPC))
    first = take_lock(tmp_path / "lock", "the run x")
    with pytest.raises(InchwormError, match="that has just started"):
        take_lock(tmp_path / "lock", "the run x")
    os.close(first)
