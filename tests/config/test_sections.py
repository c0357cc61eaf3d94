"""Configs: strict, frozen, documented; what is wrong is named in one line."""

from __future__ import annotations

import dataclasses
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inchworm.config.reading import ConfigBase, LegacyNameWarning, field_docs
from inchworm.config.sections import (
    CollectConfig,
    EnvConfig,
    EvalConfig,
    OpponentConfig,
    PolicyConfig,
    PPOConfig,
    RunConfig,
    TrainingConfig,
    WrapperConfig,
)
from inchworm.core.errors import ConfigError

SECTIONS: dict[str, type[Any]] = {
    "env": EnvConfig,
    "policy": PolicyConfig,
    "ppo": PPOConfig,
    "collect": CollectConfig,
    "opponent": OpponentConfig,
    "evaluation": EvalConfig,
    "run": RunConfig,
}


def test_the_usual_defaults() -> None:
    ppo = PPOConfig()
    assert (ppo.learning_rate, ppo.gamma, ppo.gae_lambda, ppo.clip_coef) == (3e-4, 0.99, 0.95, 0.2)
    assert (ppo.vf_coef, ppo.ent_coef, ppo.max_grad_norm, ppo.update_epochs, ppo.rollout_steps) == (0.5, 0.01, 0.5, 4, 512)


def full() -> TrainingConfig:
    return TrainingConfig(
        env=EnvConfig(
            id="X-v0", num_envs=3, num_workers=2, kwargs={"a": [1, {"b": -math.inf}]}, wrappers=(WrapperConfig(name="W", kwargs={"n": 1}),)
        ),
        policy=PolicyConfig(kind="cnn", hidden_sizes=(3,), cnn_filters=((1, 2, 3),)),
        ppo=PPOConfig(learning_rate=1e-20, minibatch_size=32, target_kl=None, sequence_length=4),
        run=RunConfig(name="run 1", max_iterations=4),
    )


@pytest.mark.parametrize("config", [TrainingConfig(), full()])
def test_round_trips(config: TrainingConfig, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # current names are not reported
        assert TrainingConfig.from_dict(config.to_dict()) == config
    (tmp_path / "c.yaml").write_text(config.to_yaml())
    assert TrainingConfig.from_yaml(tmp_path / "c.yaml") == config
    assert TrainingConfig.from_yaml(str(tmp_path / "c.yaml")).to_yaml() == config.to_yaml()


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PPOConfig().gamma = 0.5  # type: ignore[misc]


def test_replace_validates_again() -> None:
    assert PPOConfig().replace(gamma=0.5).gamma == 0.5
    assert PolicyConfig().replace(hidden_sizes=[8]).hidden_sizes == (8,)
    assert full().replace(ppo=PPOConfig(gamma=0.1)).ppo.gamma == 0.1
    for changes in ({"gamma": 2.0}, {"gamma": "x"}, {"gama": 0.5}):
        with pytest.raises(ConfigError, match="gam"):
            PPOConfig().replace(**changes)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_is_documented(section: str) -> None:
    docs = field_docs(SECTIONS[section])
    assert list(docs) == [field.name for field in dataclasses.fields(SECTIONS[section])]
    assert all(docs.values())


REFUSED = [
    (PPOConfig, {"gamma": 1.5}, "ppo.gamma=1.5 must be 1 or less$"),
    (PPOConfig, {"gae_lambda": -0.1}, "ppo.gae_lambda=-0.1 must be 0 or more$"),
    (PPOConfig, {"learning_rate": -1.0}, "ppo.learning_rate=-1.0 must be 0 or more"),
    (PPOConfig, {"max_grad_norm": 0.0}, "ppo.max_grad_norm=0.0 must be above 0"),
    (PPOConfig, {"adam_eps": 0.0}, "ppo.adam_eps=0.0 must be above 0"),
    (PPOConfig, {"rollout_steps": 0}, "ppo.rollout_steps=0 must be 1 or more"),
    (PPOConfig, {"rollout_steps": 8, "sequence_length": 9}, r"ppo.sequence_length=9 is longer than a rollout \(ppo.rollout_steps=8\)"),
    (PPOConfig, {"num_minibatches": 4, "minibatch_size": 4}, "ppo.num_minibatches=4 and ppo.minibatch_size=4 exclude each other"),
    (PPOConfig, {"max_staleness": -1}, "ppo.max_staleness=-1 must be 0 or more"),
    (PPOConfig, {"gamma": "0.9"}, "ppo.gamma='0.9' must be a number$"),
    (PPOConfig, {"gamma": float("nan")}, "ppo.gamma=nan must be a finite number"),
    (PPOConfig, {"clip_coef": float("inf")}, "ppo.clip_coef=inf must be a finite number"),
    (PPOConfig, {"update_epochs": True}, "ppo.update_epochs=True must be an integer"),
    (PPOConfig, {"update_epochs": 2.0}, "ppo.update_epochs=2.0 must be an integer"),
    (PPOConfig, {"clip_vloss": 1}, "ppo.clip_vloss=1 must be true or false"),
    (PPOConfig, {"normalize_advantages": "yes"}, "ppo.normalize_advantages='yes' must be 'batch', 'minibatch' or 'off'"),
    (PPOConfig, {"sequence_length": "long"}, "^ppo.sequence_length='long' must be an integer, or 'auto'$"),
    (PPOConfig, {"gamma": "x", "gae_lambda": 2}, "^ppo.gamma='x' must be a number; ppo.gae_lambda=2 must be 1 or less$"),
    (PPOConfig, {"clip_vlos": 0.1}, r"unknown config key ppo.clip_vlos; did you mean ppo.clip_vloss\?"),
    (PPOConfig, {"zzzzzzzz": 0.1}, "known names: learning_rate"),
    (EnvConfig, {"num_envs": 0}, "env.num_envs=0 must be 1 or more"),
    (EnvConfig, {"num_envs": 10**9}, "env.num_envs=1000000000 must be 1000000 or less"),
    (EnvConfig, {"num_envs": 2, "num_workers": 3}, "env.num_workers=3 is more than env.num_envs=2; use 2 workers or fewer"),
    (EnvConfig, {"num_workers": -1}, "env.num_workers=-1 must be 0 or more, or 'auto'"),
    (EnvConfig, {"num_envs": 2, "num_workers": 2, "help_workers": True}, "env.help_workers needs env.num_workers from 1 to 1, not 2"),
    (EnvConfig, {"worker_timeout": 0.0}, "env.worker_timeout=0.0 must be above 0"),
    (EnvConfig, {"worker_timeout": 1e308}, r"env.worker_timeout=1e\+308 must be 1000000 or less"),
    (EnvConfig, {"max_episode_steps": 2**63}, r"env.max_episode_steps=\d+ must be 9223372036854775807 or less"),
    (EnvConfig, {"frame_stack": 10**9}, "env.frame_stack=1000000000 must be 1000 or less"),
    (EnvConfig, {"id": " "}, "env.id is empty"),
    (EnvConfig, {"id": "CartPole-v1\nrun: {}"}, r"env\.id=.* has unprintable characters"),
    (EnvConfig, {"kwargs": {"when": {1, 2}}}, "env.kwargs.when is set; a config holds plain data"),
    (EnvConfig, {"kwargs": {"a": [{"b": b"x"}]}}, r"env.kwargs.a\[0\].b is bytes"),
    (EnvConfig, {"kwargs": {"a": {1: 2}}}, "env.kwargs.a has the key 1; keys must be text"),
    (EnvConfig, {"wrappers": ["X"]}, r"env.wrappers\[0\]='X' must be a mapping"),
    (EnvConfig, {"wrappers": [{"kwargs": {}}]}, r"env.wrappers\[0\].name is missing"),
    (WrapperConfig, {"name": 3}, "env.wrappers.name=3 must be text"),
    (WrapperConfig, {"name": "ClipReward", "kwargs": {"f": len}}, "env.wrappers: ClipReward: kwargs.f is builtin_function"),
    (PolicyConfig, {"hidden_sizes": 64}, "policy.hidden_sizes=64 must be a list"),
    (PolicyConfig, {"hidden_sizes": {64}}, r"policy.hidden_sizes=\{64\} must be a list"),
    (PolicyConfig, {"hidden_sizes": [64, "a"]}, r"policy.hidden_sizes\[1\]='a' must be an integer"),
    (PolicyConfig, {"hidden_sizes": (64, 0)}, r"policy.hidden_sizes\[1\]=0 must be 1 or more"),
    (PolicyConfig, {"hidden_sizes": (10**30,)}, r"policy.hidden_sizes\[0\]=10+ must be 1000000 or less"),
    (PolicyConfig, {"cnn_filters": ((1, 0, 1),)}, r"policy.cnn_filters\[0\]\[1\]=0 must be 1 or more"),
    (PolicyConfig, {"cnn_filters": [[1, 2]]}, r"policy.cnn_filters\[0\]\[2\] is missing"),
    (PolicyConfig, {"cnn_filters": [[1, 2, 3, 4]]}, r"policy.cnn_filters\[0\]=.* must be a list of 3"),
    (PolicyConfig, {"log_std_init": 6.0}, "policy.log_std_init=6.0 must be 5 or less"),
    (PolicyConfig, {"observation_clip": 0.0}, "policy.observation_clip=0.0 must be above 0"),
    (CollectConfig, {"max_replay_steps": -1}, "collect.max_replay_steps=-1 must be 0 or more"),
    (EvalConfig, {"episodes": 0}, "evaluation.episodes=0 must be 1 or more"),
    (EvalConfig, {"interval": "x"}, "evaluation.interval='x' must be an integer"),
    (RunConfig, {"keep_checkpoints": 1}, "run.keep_checkpoints=1 must be 2 or more"),
    (RunConfig, {"seed": -1}, "run.seed=-1 must be 0 or more"),
    (RunConfig, {"threads": 100_000}, "run.threads=100000 must be 1024 or less"),
    (RunConfig, {"total_timesteps": 10**400}, r"run.total_timesteps=1000+\.\.\. must be 9223372036854775807 or less"),
    (RunConfig, {"name": "../x"}, "run.name='../x' is not a valid name"),
    (RunConfig, {"backend": 1.5}, "run.backend=1.5 is not known; use numpy or torch"),
    (RunConfig, {"backend": ["numpy"]}, r"run.backend=\['numpy'\] is not known; use numpy or torch"),
    (RunConfig, {"directory": ""}, "run.directory='' is not a valid path"),
    (TrainingConfig, {"ppo": {"clip": 0.1}}, r"unknown config key ppo.clip; did you mean ppo.clip_coef\?"),
    (TrainingConfig, {"poo": {}}, r"unknown config key poo; did you mean ppo\?"),
    (TrainingConfig, {"ppo": 3}, "ppo=3 must be a mapping of names to values"),
    (TrainingConfig, {"ppo": {"gamma": "x"}}, "ppo.gamma='x' must be a number"),
    (TrainingConfig, {"ppo": {3: 4}}, "unknown config key ppo.3"),
    (
        TrainingConfig,
        {"env": {"wrappers": [{"name": "X", "kwrgs": {}}]}},
        r"unknown config key env.wrappers\[0\].kwrgs; did you mean env.wrappers\[0\].kwargs",
    ),
    (TrainingConfig, {"policy": {"kind": "gru"}, "run": {"backend": "numpy"}}, "policy.kind=gru can be trained only with torch"),
]


@pytest.mark.parametrize("cls, values, message", REFUSED)
def test_what_is_wrong_is_named_by_the_constructor_and_by_from_dict(cls: type[ConfigBase], values: dict[str, Any], message: str) -> None:
    for make in (cls, lambda **data: cls.from_dict(data)):
        with pytest.raises(ConfigError, match=message) as caught:
            make(**values)
        assert "\n" not in str(caught.value)


def test_keys_that_are_not_text() -> None:
    with pytest.raises(ConfigError, match="unknown config key 3"):
        TrainingConfig.from_dict({3: 4})  # type: ignore[dict-item]


def test_minibatches() -> None:
    assert PPOConfig().minibatches_for(4096) == 8
    assert PPOConfig().minibatches_for(3) == 3  # never more than sequences
    assert PPOConfig().minibatches_for(0) == 1
    assert PPOConfig(num_minibatches=4).minibatches_for(100) == 4
    assert PPOConfig(minibatch_size=64).minibatches_for(100) == 2  # ceil(100 / 64)
    assert PPOConfig(minibatch_size=64).minibatches_for(10) == 1  # larger than the batch: the whole batch
    assert PPOConfig(minibatch_size=64).minibatches_for(16, sequence_length=16) == 4  # 4 sequences of 16 each
    assert PPOConfig(minibatch_size=4).minibatches_for(3, sequence_length=16) == 3


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
def test_any_data_makes_a_config_or_a_config_error(data: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LegacyNameWarning)
        try:
            config = TrainingConfig.from_dict(data)
        except ConfigError as error:
            if "must be valid (" in str(error):  # an error of pydantic without our wording
                raise
            return
    assert isinstance(config, TrainingConfig)
