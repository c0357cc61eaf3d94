"""Configs: strict, frozen, answered in words; older spellings taken from plain data alone."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import os
import time
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inchworm.config.reading import check_name, dump_yaml, load_yaml
from inchworm.config.sections import (
    CollectConfig,
    EnvConfig,
    EvalConfig,
    LegacyNameWarning,
    PolicyConfig,
    PPOConfig,
    RunConfig,
    TrainingConfig,
    WrapperConfig,
)
from inchworm.core.errors import ConfigError

SECTIONS = {
    "env": EnvConfig,
    "policy": PolicyConfig,
    "ppo": PPOConfig,
    "collect": CollectConfig,
    "evaluation": EvalConfig,
    "run": RunConfig,
}


def test_the_usual_defaults():
    ppo = PPOConfig()
    assert (ppo.learning_rate, ppo.gamma, ppo.gae_lambda, ppo.clip_coef) == (3e-4, 0.99, 0.95, 0.2)
    assert (ppo.vf_coef, ppo.ent_coef, ppo.max_grad_norm, ppo.update_epochs, ppo.rollout_steps) == (0.5, 0.01, 0.5, 4, 512)


def full() -> TrainingConfig:
    return TrainingConfig(
        env=EnvConfig(
            id="X-v0", num_envs=3, num_workers=2, kwargs={"a": [1, {"b": None}]}, wrappers=(WrapperConfig(name="W", kwargs={"n": 1}),)
        ),
        policy=PolicyConfig(kind="cnn", hidden_sizes=(3,), cnn_filters=((1, 2, 3),)),
        ppo=PPOConfig(learning_rate=1e-20, minibatch_size=32, target_kl=None, sequence_length=4),
        run=RunConfig(name="run 1", max_iterations=4),
    )


@pytest.mark.parametrize("config", [TrainingConfig(), full()])
def test_round_trips(config, tmp_path):
    assert TrainingConfig.from_dict(config.to_dict()) == config
    (tmp_path / "c.yaml").write_text(config.to_yaml())
    assert TrainingConfig.from_yaml(tmp_path / "c.yaml") == config
    assert TrainingConfig.from_yaml(str(tmp_path / "c.yaml")).to_yaml() == config.to_yaml()


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PPOConfig().gamma = 0.5


def test_replace_checks_again():
    assert PPOConfig().replace(gamma=0.5).gamma == 0.5
    assert full().replace(ppo=PPOConfig(gamma=0.1)).ppo.gamma == 0.1
    for changes in ({"gamma": 2.0}, {"gamma": "x"}, {"gama": 0.5}):
        with pytest.raises(ConfigError, match="gam"):
            PPOConfig().replace(**changes)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_is_documented(section):
    names = [field.name for field in dataclasses.fields(SECTIONS[section])]
    ((source,),) = [ast.parse(inspect.getsource(SECTIONS[section])).body]
    documented = [
        field.target.id
        for field, after in itertools.pairwise(source.body)
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value.value, str)
    ]
    assert documented == names


REFUSED = [
    (PPOConfig, {"gamma": 1.5}, "ppo.gamma=1.5 must be from 0 to 1"),
    (PPOConfig, {"gae_lambda": -0.1}, "ppo.gae_lambda=-0.1 must be from 0 to 1"),
    (PPOConfig, {"learning_rate": -1.0}, "ppo.learning_rate=-1.0 must be 0 or more"),
    (PPOConfig, {"max_grad_norm": 0.0}, "ppo.max_grad_norm=0.0 must be above 0"),
    (PPOConfig, {"adam_eps": 0.0}, "ppo.adam_eps=0.0 must be above 0"),
    (PPOConfig, {"rollout_steps": 0}, "ppo.rollout_steps=0 must be 1 or more"),
    (PPOConfig, {"rollout_steps": 8, "sequence_length": 9}, "ppo.sequence_length=9 must be from 1 to 8"),
    (PPOConfig, {"num_minibatches": 4, "minibatch_size": 4}, "say the same thing twice"),
    (PPOConfig, {"max_staleness": -1}, "ppo.max_staleness=-1 must be 0 or more"),
    (PPOConfig, {"gamma": "0.9"}, "ppo.gamma='0.9': input should be a valid number"),
    (PPOConfig, {"gamma": float("nan")}, "ppo.gamma=nan: input should be a finite number"),
    (PPOConfig, {"clip_coef": float("inf")}, "ppo.clip_coef=inf"),
    (PPOConfig, {"update_epochs": True}, "ppo.update_epochs=True"),
    (PPOConfig, {"update_epochs": 2.0}, "ppo.update_epochs=2.0"),
    (PPOConfig, {"clip_vloss": 1}, "ppo.clip_vloss=1"),
    (PPOConfig, {"normalize_advantages": "yes"}, "'batch', 'minibatch' or 'off'"),
    (
        PPOConfig,
        {"sequence_length": "long"},
        "ppo.sequence_length='long': input should be a valid integer; ppo.sequence_length='long': .*'auto'",
    ),
    (PPOConfig, {"clip_range": 0.1}, "unknown config key ppo.clip_range; did you mean ppo.clip_"),
    (PPOConfig, {"zzzzzzzz": 0.1}, "known names: learning_rate"),
    (EnvConfig, {"num_envs": 0}, "env.num_envs=0 must be from 1 to 1000000"),
    (EnvConfig, {"num_envs": 2, "num_workers": 3}, "env.num_workers=3 is more than env.num_envs=2; use 2 workers or fewer"),
    (EnvConfig, {"num_workers": -1}, "env.num_workers=-1"),
    (EnvConfig, {"worker_timeout": 0.0}, "env.worker_timeout"),
    (EnvConfig, {"id": " "}, "env.id is empty"),
    (PolicyConfig, {"hidden_sizes": (64, 0)}, r"policy.hidden_sizes\[1\]=0 must be from 1 to 1000000"),
    (PolicyConfig, {"cnn_filters": ((1, 0, 1),)}, r"policy.cnn_filters\[0\]"),
    (PolicyConfig, {"log_std_init": 6.0}, "from -20 to 5"),
    (PolicyConfig, {"observation_clip": 0.0}, "policy.observation_clip"),
    (CollectConfig, {"max_replay_steps": -1}, "collect.max_replay_steps"),
    (EvalConfig, {"episodes": 0}, "evaluation.episodes"),
    (EvalConfig, {"interval": -1}, "evaluation.interval=-1 must be 0 or more"),
    (EvalConfig, {"interval": "x"}, "evaluation.interval='x'"),
    (RunConfig, {"keep_checkpoints": 1}, "run.keep_checkpoints=1 must be 2 or more"),
    (RunConfig, {"seed": -1}, "run.seed"),
    (RunConfig, {"name": "../x"}, "run.name='../x' is no plain name"),
    (WrapperConfig, {"name": 3}, "env.wrappers.name=3"),
]


@pytest.mark.parametrize("cls, values, words", REFUSED)
def test_refused_in_words(cls, values, words):
    with pytest.raises(ConfigError, match=words):
        cls(**values)


@pytest.mark.parametrize(
    "data, words",
    [
        ({"ppo": {"clip": 0.1}}, "unknown config key ppo.clip; did you mean ppo.clip_coef?"),
        ({"poo": {}}, "unknown config key poo; did you mean ppo?"),
        ({"ppo": 3}, "ppo must be a mapping of names to values, not 3"),
        ({"ppo": {"gamma": "x"}}, "ppo.gamma='x'"),
        ({"policy": {"hidden_sizes": 64}}, "policy.hidden_sizes=64"),
        ({"policy": {"hidden_sizes": [64, "a"]}}, "policy.hidden_sizes.1='a'"),
        ({"policy": {"cnn_filters": [[1, 2]]}}, r"policy.cnn_filters\[0\]=\[1, 2\] must have 3 entries"),
        ({"env": {"wrappers": ["X"]}}, r"env.wrappers\[0\] must be a mapping"),
        (
            {"env": {"wrappers": [{"name": "X", "kwrgs": {}}]}},
            r"unknown config key env.wrappers\[0\].kwrgs; did you mean env.wrappers\[0\].kwargs",
        ),
        ({3: 4}, "unknown config key 3"),
        (
            {"ppo": {"minibatch_size": 512, "rollout_steps": 32}},
            r"ppo.minibatch_size=512 is larger than the rollout \(8 lanes x 32 steps = 256\); use 256 or fewer, or more env.num_envs",
        ),
        ({"ppo": {"num_minibatches": 9, "rollout_steps": 1}}, r"ppo.num_minibatches=9 is more than .*\(8 lanes x 1 steps = 8\)"),
    ],
)
def test_whole_configs_refused_in_words(data, words):
    with pytest.raises(ConfigError, match=words):
        TrainingConfig.from_dict(data)


@pytest.mark.parametrize("data", [None, 3, [("ppo", {})], "ppo"])
def test_only_mappings(data):
    with pytest.raises(ConfigError, match="mapping"):
        TrainingConfig.from_dict(data)


def test_minibatches():
    assert PPOConfig().minibatches_for(4096) == 8
    assert PPOConfig().minibatches_for(3) == 3  # never more than sequences
    assert PPOConfig().minibatches_for(0) == 1
    assert PPOConfig(num_minibatches=4).minibatches_for(100) == 4
    assert PPOConfig(minibatch_size=64).minibatches_for(100) == 2  # ceil(100 / 64)
    assert PPOConfig(minibatch_size=64).minibatches_for(10) == 1  # larger than the batch: the whole batch
    assert PPOConfig(minibatch_size=64).minibatches_for(16, sequence_length=16) == 4  # 4 sequences of 16 each
    assert PPOConfig(minibatch_size=4).minibatches_for(3, sequence_length=16) == 3


# files


def from_text(tmp_path, text: str | bytes) -> TrainingConfig:
    path = tmp_path / "c.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return TrainingConfig.from_yaml(path)


@pytest.mark.parametrize(
    "text, number", [("1e-4", 1e-4), ("1E+2", 100.0), ("-1e3", -1000.0), (".5e1", 5.0), ("2.5e-3", 2.5e-3), ("1_0e1", 100.0)]
)
def test_numbers_as_people_write_them(text, number):
    assert load_yaml(f"x: {text}") == {"x": number}
    assert isinstance(load_yaml(text), float)


def test_text_that_only_looks_like_a_number_stays_text():
    assert load_yaml("[e5, 1e, 1e5x]") == ["e5", "1e", "1e5x"]


@pytest.mark.parametrize(
    "text, words",
    [
        ("ppo: {gamma: 0.9, gamma: 0.8}", "'gamma' stands there twice"),
        ("!!python/object/apply:os.system ['true']", "python/object"),
        ("ppo: {gamma: !!bool maybe}", "no plain data"),
        ("ppo: {gamma: 2001-99-99}", "no plain data"),
        ("ppo: {gamma: !!int x}", "no plain data"),
        ("ppo: {gamma: !!timestamp x}", "no plain data"),
        ("[" * 600, "cannot read the config"),
        ("env: {kwargs: &a {x: *a}}", r"the alias \*a: write the value out"),
        ("? [1]\n: 2", "unhashable"),
        (b"\xff\xfe\x00", "decode"),
        ("a\0b", "special characters"),
        ("", "holds NoneType, not a mapping"),
        ("- 1", "holds list, not a mapping"),
        ("a: [", "expected"),
        ("--- {}\n--- {}", "single document"),
        ("ppo: {gamma: .nan}", "ppo.gamma=nan"),
    ],
)
def test_files_refused_in_one_line(tmp_path, text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        from_text(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_a_bomb_of_aliases_is_refused(tmp_path):
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60)]
    with pytest.raises(ConfigError, match="alias"):
        from_text(tmp_path, "\n".join([*lines, "ppo: {gamma: *a59}"]))


def test_missing_files(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the config .*nothing.yaml"):
        TrainingConfig.from_yaml(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match="cannot read the config"):
        TrainingConfig.from_yaml(tmp_path)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
keys = st.sampled_from(
    [f.name for cls in SECTIONS.values() for f in dataclasses.fields(cls)] + ["batch_size", "norm_adv", "lr", "name"]
) | st.text(max_size=4)
sections = st.sampled_from([*SECTIONS, "agent", "trainer", "experiment_name"]) | st.text(max_size=4)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(sections, values | st.dictionaries(keys, values, max_size=4), max_size=4))
def test_any_data_makes_a_config_or_a_config_error(data):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LegacyNameWarning)
        try:
            config = TrainingConfig.from_dict(data)
        except ConfigError:
            return
    assert isinstance(config, TrainingConfig)


# names


@pytest.mark.parametrize("name", ["a", "run 1", "CartPole-v1_2.5", "ü", "x" * 120])
def test_plain_names(name):
    check_name(name, "run.name")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "/abs", "a/b", "a\\b", "a\0b", "x" * 121, " x", "x ", ".hidden", "x.", "a\nb", "a\x7f"]
)
def test_names_that_would_leave_their_place(name):
    with pytest.raises(ConfigError, match=r"run.name"):
        check_name(name, "run.name")


# older spellings


@pytest.mark.parametrize(
    "old, value, new",
    [
        ("clip_range", 0.1, "clip_coef"),
        ("clip_epsilon", 0.1, "clip_coef"),
        ("n_epochs", 3, "update_epochs"),
        ("epochs_per_update", 3, "update_epochs"),
        ("value_coef", 0.1, "vf_coef"),
        ("entropy_coef", 0.1, "ent_coef"),
        ("lr", 0.1, "learning_rate"),
        ("n_steps", 7, "rollout_steps"),
        ("rollout_length", 7, "rollout_steps"),
        ("tbptt_chunk_length", 7, "sequence_length"),
        ("bptt_horizon", 7, "sequence_length"),
        ("batch_size", 64, "minibatch_size"),
    ],
)
def test_older_names_are_taken_and_reported(old, value, new):
    with pytest.warns(LegacyNameWarning, match=f"^{old} is called {new} here; taken as such$"):
        assert getattr(PPOConfig.from_dict({old: value}), new) == value
    with pytest.warns(LegacyNameWarning, match=f"^ppo.{old} is called ppo.{new} here"):
        assert getattr(TrainingConfig.from_dict({"ppo": {old: value}}).ppo, new) == value
    with pytest.raises(ConfigError, match=f"{old} and {new} say the same thing twice; keep {new}|beside minibatch_size"):
        PPOConfig.from_dict({old: value, new: value})
    with pytest.raises(ConfigError, match="unknown config key"):
        PPOConfig(**{old: value})  # from plain data only


def test_no_warning_for_todays_names():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TrainingConfig.from_dict(full().to_dict())


def test_norm_adv():
    with pytest.warns(LegacyNameWarning):
        assert PPOConfig.from_dict({"norm_adv": True}).normalize_advantages == "minibatch"
    with pytest.warns(LegacyNameWarning):
        assert PPOConfig.from_dict({"norm_adv": False}).normalize_advantages == "off"
    with pytest.raises(ConfigError, match="norm_adv='false' must be true or false"):
        PPOConfig.from_dict({"norm_adv": "false"})


def test_two_older_names_of_one_field():
    with pytest.raises(ConfigError, match="say the same thing twice"):
        PPOConfig.from_dict({"clip_range": 0.1, "clip_epsilon": 0.1})


def test_batch_size_beside_minibatch_size_counts_transitions():
    # 2048 transitions per update over 16 lanes are 128 steps
    with pytest.warns(LegacyNameWarning, match=r"ppo.batch_size=2048 is ppo.rollout_steps=128 for 16 lanes here"):
        config = TrainingConfig.from_dict({"env": {"num_envs": 16}, "ppo": {"batch_size": 2048, "minibatch_size": 64}})
    assert (config.ppo.rollout_steps, config.ppo.minibatch_size) == (128, 64)
    with pytest.warns(LegacyNameWarning):
        assert TrainingConfig.from_dict({"ppo": {"batch_size": 64, "minibatch_size": 8}}).ppo.rollout_steps == 8
    for env, ppo in (({"num_envs": 3}, {}), ({"num_envs": 0}, {}), ({"num_envs": "8"}, {}), ({}, {"rollout_steps": 4})):
        with pytest.raises(ConfigError, match=r"ppo.batch_size=2048 transitions per update"):
            TrainingConfig.from_dict({"env": env, "ppo": {"batch_size": 2048, "minibatch_size": 64, **ppo}})
    with pytest.raises(ConfigError, match="means transitions per update"):
        PPOConfig.from_dict({"batch_size": 2048, "minibatch_size": 64})


def test_an_older_whole_config():
    old = {
        "experiment_name": "first",
        "agent": {"name": "simple_mlp", "hidden_size": 32},
        "trainer": {
            "total_timesteps": 1000,
            "checkpoint_interval": 5,
            "seed": 3,
            "device": "cpu",
            "evaluate_interval": 7,
            "clip_range": 0.1,
            "gamma": 0.9,
        },
    }
    with pytest.warns(LegacyNameWarning) as caught:
        config = TrainingConfig.from_dict(old)
    assert (config.run.name, config.policy.kind, config.policy.hidden_sizes) == ("first", "mlp", (32, 32))
    assert (config.run.total_timesteps, config.run.checkpoint_interval, config.run.seed, config.run.device) == (1000, 5, 3, "cpu")
    assert (config.evaluation.interval, config.ppo.clip_coef, config.ppo.gamma) == (7, 0.1, 0.9)
    told = {str(warning.message) for warning in caught}
    assert "trainer.evaluate_interval is called evaluation.interval here; taken as such" in told
    assert "agent.hidden_size is called policy.hidden_sizes here; taken as such" in told
    assert old["agent"] == {"name": "simple_mlp", "hidden_size": 32}  # the input is not changed


@pytest.mark.parametrize(
    "data, words",
    [
        ({"agent": {"layers": 3}}, "unknown config key agent.layers; the section is called policy here"),
        ({"agent": 3}, "agent must be a mapping"),
        ({"agent": {"name": []}}, "policy.kind=\\[\\]"),
        ({"trainer": "x"}, "trainer must be a mapping"),
        ({"trainer": {"lr": 0.1}, "ppo": {"learning_rate": 0.1}}, "say the same thing twice"),
        ({"trainer": {"seed": 1}, "run": {"seed": 1}}, "trainer.seed and run.seed say the same thing twice; keep run.seed"),
        ({"trainer": {"seed": 1}, "run": 3}, "run must be a mapping"),
    ],
)
def test_older_configs_refused_in_words(data, words):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LegacyNameWarning)
        with pytest.raises(ConfigError, match=words):
            TrainingConfig.from_dict(data)


@pytest.mark.parametrize(
    "text", ['a: !!int ""', 'a: !!float ""', 'a: "\\UFFFFFFFF"', "a: 0x" + "f" * 5000, "a: 1" + ":59" * 5000, "#" * 70_000, "? [1]\n: 2"]
)
def test_yaml_that_breaks_its_own_parser_is_refused_in_words(tmp_path, text):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"cannot read the config .*x\.yaml"):
        TrainingConfig.from_yaml(tmp_path / "x.yaml")


def test_a_mapping_of_many_keys_is_read_in_time_that_grows_with_it():
    began = time.process_time()
    assert len(load_yaml("{" + ", ".join(f"k{n}: 1" for n in range(4_000)) + "}")) == 4_000
    assert time.process_time() - began < 5.0  # by comparing each with each it took minutes for ten times as many


def test_a_pipe_is_no_config(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe is no regular file"):
        TrainingConfig.from_yaml(tmp_path / "pipe")


def test_names_and_paths_that_no_file_system_takes():
    check_name("ä" * 120, "run.name")  # 240 bytes
    with pytest.raises(ConfigError, match=r"run\.name"):
        check_name("漢" * 100, "run.name")  # 300 bytes
    for path in ("", "a\0b", "\ud800"):
        with pytest.raises(ConfigError, match=r"run\.directory"):
            RunConfig(directory=path)
    for id in ("CartPole-v1\nrun: {}", "\x1b[2J"):
        with pytest.raises(ConfigError, match=r"env\.id"):
            EnvConfig(id=id)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EnvConfig(num_envs=10**9), r"env.num_envs=1000000000 must be from 1 to 1000000"),
        (lambda: EnvConfig(max_episode_steps=2**63), r"env.max_episode_steps=\d+ must be from 1 to 9223372036854775807"),
        (lambda: EnvConfig(frame_stack=10**9), "env.frame_stack=1000000000 must be from 1 to 1000"),
        (lambda: EnvConfig(worker_timeout=1e308), r"env.worker_timeout=1e\+308 must be from 0 to 1e\+06"),
        (lambda: EvalConfig(num_envs=10**9), "evaluation.num_envs=1000000000 must be from 1 to 1000000"),
        (lambda: RunConfig(threads=100_000), "run.threads=100000 must be from 0 to 1024"),
        (lambda: RunConfig(total_timesteps=10**400), r"run.total_timesteps=1000+\.\.\. must be from 1 to"),
        (lambda: PolicyConfig(hidden_sizes=(10**30,)), r"policy.hidden_sizes\[0\]=10+ must be from 1 to 1000000"),
        (lambda: PolicyConfig(cnn_filters=((32, 10**9, 4),)), r"policy.cnn_filters\[0\]=.* each from 1 to 10000"),
        (lambda: CollectConfig.from_dict({"groups": True}), "collect.groups=True is not supported"),
        (lambda: TrainingConfig.from_dict({"collect": {"groups": 2}}), "collect.groups=2 is not supported: .* delete it"),
        (lambda: EnvConfig(kwargs={"when": {1, 2}}), "env.kwargs.when is set; a config holds plain data"),
        (lambda: EnvConfig(kwargs={"a": [{"b": b"x"}]}), r"env.kwargs.a\[0\].b is bytes"),
        (lambda: EnvConfig(kwargs={"a": {1: 2}}), "env.kwargs.a has the key 1; its keys must be text"),
        (lambda: WrapperConfig(name="ClipReward", kwargs={"f": len}), "env.wrappers: ClipReward: kwargs.f is builtin_function"),
    ],
)
def test_what_no_machine_or_file_could_hold_is_refused_in_words(make, message) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@given(st.text(max_size=12) | st.from_regex(r"\A[-+]?[0-9_.]{1,4}[eE][-+]?[0-9]{1,2}\Z"))
def test_text_in_a_config_stays_text(text: str) -> None:
    data = {"a": text, "list": [text, 1e-05, 1e5, 7, None, True]}
    if text.isprintable():
        assert load_yaml(dump_yaml(data)) == data


def test_one_group_of_an_earlier_config_is_dropped() -> None:
    assert CollectConfig.from_dict({"groups": 1, "max_replay_steps": 7}) == CollectConfig(max_replay_steps=7)
    assert TrainingConfig.from_dict({"collect": {"groups": 1}}) == TrainingConfig()
