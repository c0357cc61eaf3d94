"""The directory of several seeds."""

from pathlib import Path

import pytest

from doubles.runs import small_config
from inchworm.config.sections import EnvConfig, TrainingConfig
from inchworm.core.errors import ConfigError, InchwormError
from inchworm.run.bundle import create_bundle, is_bundle, open_bundle, why_not_alone
from inchworm.run.directory import create_run


def config_in(directory: Path, name: str | None = "many", **run: object) -> TrainingConfig:
    return small_config(name=name, directory=str(directory), **run)


def test_a_bundle_keeps_its_seeds_and_config_and_describes_ordinary_runs(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    with create_bundle(config, [3, 1]) as bundle:
        assert (bundle.path, bundle.seeds, bundle.continued) == (tmp_path / "many", (1, 3), False)
        own = bundle.run_config(3)
        assert (own.run.seed, own.run.name, own.run.directory) == (3, "seed-3", str(tmp_path / "many"))
        single = config.replace(run=config.run.replace(seed=3, name="seed-3", directory=str(tmp_path / "many")))
        assert own == single
        with create_run(own) as run:
            assert run.path == bundle.run_path(3)
        found = bundle.find_run(3)
        assert found is not None
        assert found.config == own
        assert bundle.find_run(1) is None
    assert is_bundle(tmp_path / "many")
    assert is_bundle("many", tmp_path)
    assert not is_bundle("")
    assert not is_bundle(tmp_path / "many" / "seed-3")
    opened = open_bundle("many", directory=tmp_path)
    assert (opened.seeds, opened.config) == ((1, 3), config)


def test_the_same_command_again_adds_seeds_and_refuses_other_settings(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    create_bundle(config, range(2)).close()
    with create_bundle(config.replace(run=config.run.replace(total_timesteps=640, seed=2)), range(2, 5)) as bundle:
        assert (bundle.continued, bundle.seeds, bundle.config.run.total_timesteps) == (True, (0, 1, 2, 3, 4), 640)
        assert bundle.config.run.seed == 0  # as it began
    with pytest.raises(ConfigError, match=r"ppo.gamma: 0.99 → 0.9"):
        create_bundle(config.replace(ppo=config.ppo.replace(gamma=0.9)), range(2))
    create_bundle(config, range(2)).close()  # the lock was released


def test_one_process_trains_a_bundle(tmp_path: Path) -> None:
    with create_bundle(config_in(tmp_path), range(2)), pytest.raises(InchwormError, match="in use by process"):
        create_bundle(config_in(tmp_path), range(2))


def test_runs_and_bundles_do_not_take_each_others_names(tmp_path: Path) -> None:
    create_run(config_in(tmp_path, "one")).close()
    create_bundle(config_in(tmp_path), range(2)).close()
    with pytest.raises(ConfigError, match=r"one is a single run; use another run.name"):
        create_bundle(config_in(tmp_path, "one"), range(2))
    with pytest.raises(ConfigError, match="many holds the runs of several seeds; add --seeds N"):
        create_run(config_in(tmp_path))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").touch()
    with pytest.raises(ConfigError, match=r"notes is not a bundle of seeds and holds a.txt"):
        create_bundle(config_in(tmp_path, "notes"), range(2))
    with pytest.raises(ConfigError, match="there is no bundle of seeds elsewhere"):
        open_bundle("elsewhere", directory=tmp_path)
    with pytest.raises(ConfigError, match="1 seed or more"):
        create_bundle(config_in(tmp_path, "none"), [])
    assert create_bundle(config_in(tmp_path, None), range(2)).path.name.startswith("CartPole-v1-2")


def test_overwrite_deletes_all_runs_and_discard_what_has_not_trained(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    with create_bundle(config, range(3)) as bundle:
        create_run(bundle.run_config(1)).close()
        bundle.log_path(1).write_text("printed")
        bundle.write_summary({"seeds": []}, "# many\n")
    with create_bundle(config.replace(ppo=config.ppo.replace(gamma=0.9)), range(2), overwrite=True) as bundle:
        assert sorted(entry.name for entry in bundle.path.iterdir()) == ["bundle.yaml", "lock"]
        assert (bundle.continued, bundle.seeds) == (False, (0, 1))
        create_run(bundle.run_config(1)).close()
        (bundle.run_path(1) / "metrics.jsonl").touch()
        bundle.discard()
        assert bundle.path.exists()  # a run has trained
        (bundle.run_path(1) / "metrics.jsonl").unlink()
        bundle.discard()
        assert not bundle.path.exists()


def test_a_file_that_names_code_is_refused_without_the_code(tmp_path: Path) -> None:
    config = config_in(tmp_path).replace(env=EnvConfig(id="my_module:make"))
    create_bundle(config, range(2)).close()
    with pytest.raises(ConfigError, match="add --env my_module:make"):
        open_bundle("many", directory=tmp_path)
    assert open_bundle("many", directory=tmp_path, env="my_module:make").seeds == (0, 1)


def test_a_run_of_seeds_trained_together_says_that_it_is_not_exact_alone(tmp_path: Path) -> None:
    for together in (False, True):
        config = config_in(tmp_path, f"many-{together}")
        with create_bundle(config, range(2)) as bundle, create_run(bundle.run_config(1)) as run:
            bundle.update(config, together=together)
            assert why_not_alone(run).startswith("seed-1 was trained in one program with the other seeds" if together else "")
            assert bool(why_not_alone(run)) is together
            assert open_bundle(bundle.path).together is together
    with create_run(config_in(tmp_path, "seed-0")) as run:
        assert why_not_alone(run) == ""
