"""Configs: strict, frozen, documented; what is wrong is named in one line."""

import dataclasses
import math
import re
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
    WandbConfig,
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


LISTS = """
from gymnasium import spaces
from inchworm import OpponentConfig, PolicyConfig, PolicySpec

config = PolicyConfig(hidden_sizes=[32, 32], cnn_filters=[[8, 4, 2]])
spec = PolicySpec(spaces.Box(-1, 1, (3,)), spaces.Discrete(2), config)
assert config == PolicyConfig(hidden_sizes=(32, 32), cnn_filters=((8, 4, 2),)) and isinstance(hash(config), int)
assert config.replace(hidden_sizes=[4]).hidden_sizes == (4,) and spec.layers["actor.1.weight"] == (32, 32)
assert OpponentConfig(anchors=["random"]).anchors == ("random",)
"""


def test_a_list_is_accepted_where_a_tuple_is() -> None:
    exec(LISTS)


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


def test_frozen_and_replace_validates_again() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PPOConfig().gamma = 0.5  # type: ignore[misc]
    assert PPOConfig().replace(gamma=0.5).gamma == 0.5
    assert PolicyConfig().replace(hidden_sizes=[8]).hidden_sizes == (8,)
    for changes in ({"gamma": 2.0}, {"gamma": "x"}, {"gama": 0.5}):
        with pytest.raises(ConfigError, match="gam"):
            PPOConfig().replace(**changes)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_is_documented(section: str) -> None:
    docs = field_docs(SECTIONS[section])
    assert list(docs) == [field.name for field in dataclasses.fields(SECTIONS[section])]
    assert all(docs.values())


def must(cls: type[ConfigBase], be: str, **values: Any) -> list[tuple[type[ConfigBase], dict[str, Any], str]]:
    """Cases of values that are refused, each with the same words."""
    section = next(name for name, each in SECTIONS.items() if each is cls)
    return [(cls, {name: value}, f"^{section}.{name}={re.escape(repr(value))} must be {be}$") for name, value in values.items()]


INF, NAN, LARGE = float("inf"), float("nan"), 2**63
REFUSED = [
    *must(PPOConfig, "0 or more", gae_lambda=-0.1, learning_rate=-1.0, max_staleness=-1),
    *must(PPOConfig, "1 or less", gamma=1.5),
    *must(PPOConfig, "above 0", max_grad_norm=0.0, adam_eps=0.0),
    *must(PPOConfig, "1 or more", rollout_steps=0),
    *must(PPOConfig, "a finite number", gamma=NAN, clip_coef=INF),
    *must(PPOConfig, "a number", gamma="0.9"),
    *must(PPOConfig, "an integer", update_epochs=True, rollout_steps=2.5, minibatch_size=1e30),
    *must(PPOConfig, "an integer, or 'auto'", sequence_length="long"),
    *must(PPOConfig, "true or false", clip_vloss=1),
    *must(PPOConfig, "'batch', 'minibatch' or 'off'", normalize_advantages="yes"),
    (PPOConfig, {"gamma": "x", "gae_lambda": 2}, "^ppo.gamma='x' must be a number; ppo.gae_lambda=2 must be 1 or less$"),
    (PPOConfig, {"rollout_steps": 8, "sequence_length": 9}, r"ppo.sequence_length=9 is longer than a rollout \(ppo.rollout_steps=8\)"),
    (PPOConfig, {"num_minibatches": 4, "minibatch_size": 4}, "ppo.num_minibatches=4 and ppo.minibatch_size=4 exclude each other"),
    (PPOConfig, {"clip_vlos": 0.1}, r"unknown config key ppo.clip_vlos; did you mean ppo.clip_vloss\?"),
    (PPOConfig, {"zzzzzzzz": 0.1}, "known names: learning_rate"),
    *must(EnvConfig, "1 or more", num_envs=0),
    *must(EnvConfig, "1000000 or less", num_envs=10**9, worker_timeout=1e308),
    *must(EnvConfig, "1000 or less", frame_stack=10**9),
    *must(EnvConfig, "9223372036854775807 or less", max_episode_steps=LARGE),
    *must(EnvConfig, "above 0", worker_timeout=0.0),
    *must(EnvConfig, "0 or more, or 'auto'", num_workers=-1),
    (EnvConfig, {"num_envs": 2, "num_workers": 3}, "env.num_workers=3 is more than env.num_envs=2; use 2 workers or fewer"),
    (EnvConfig, {"num_envs": 2, "num_workers": 2, "help_workers": True}, "env.help_workers needs env.num_workers from 1 to 1, not 2"),
    (EnvConfig, {"id": " "}, "env.id is empty"),
    (EnvConfig, {"id": "CartPole-v1\nrun: {}"}, r"env\.id=.* has unprintable characters"),
    (EnvConfig, {"kwargs": {"when": {1, 2}}}, "env.kwargs.when is set; a config holds plain data"),
    (EnvConfig, {"kwargs": {"a": [{"b": b"x"}]}}, r"env.kwargs.a\[0\].b is bytes"),
    (EnvConfig, {"kwargs": {"a": {1: 2}}}, "env.kwargs.a has the key 1; keys must be text"),
    (EnvConfig, {"wrappers": ["X"]}, r"env.wrappers\[0\]='X' must be a mapping"),
    (EnvConfig, {"wrappers": [{"kwargs": {}}]}, r"env.wrappers\[0\].name is missing"),
    (WrapperConfig, {"name": 3}, "env.wrappers.name=3 must be text"),
    (WrapperConfig, {"name": "ClipReward", "kwargs": {"f": len}}, "env.wrappers: ClipReward: kwargs.f is builtin_function"),
    *must(PolicyConfig, "a list", hidden_sizes=64, cnn_filters={64}),
    *must(PolicyConfig, "5 or less", log_std_init=6.0),
    *must(PolicyConfig, "1 or more", memory_size=0, memory_layers=0),
    *must(PolicyConfig, "100 or less", memory_layers=101),
    *must(PolicyConfig, "'before' or 'after'", memory_place="under"),
    *must(PolicyConfig, "'mlp', 'cnn', 'lstm' or 'gru'", kind="rnn"),
    *must(PolicyConfig, "above 0", observation_clip=0.0),
    (PolicyConfig, {"hidden_sizes": [64, "a"]}, r"policy.hidden_sizes\[1\]='a' must be an integer"),
    (PolicyConfig, {"hidden_sizes": (64, 0)}, r"policy.hidden_sizes\[1\]=0 must be 1 or more"),
    (PolicyConfig, {"hidden_sizes": (10**30,)}, r"policy.hidden_sizes\[0\]=10+ must be 1000000 or less"),
    (PolicyConfig, {"cnn_filters": ((1, 0, 1),)}, r"policy.cnn_filters\[0\]\[1\]=0 must be 1 or more"),
    (PolicyConfig, {"cnn_filters": [[1, 2]]}, r"policy.cnn_filters\[0\]\[2\] is missing"),
    (PolicyConfig, {"cnn_filters": [[1, 2, 3, 4]]}, r"policy.cnn_filters\[0\]=.* must be a list of 3"),
    *must(CollectConfig, "0 or more", max_replay_steps=-1),
    *must(EvalConfig, "1 or more", episodes=0),
    *must(EvalConfig, "an integer", interval="x"),
    *must(OpponentConfig, "1 or less", skill=1.5),
    *must(OpponentConfig, "above 0", skill_threshold=0.0),
    *must(OpponentConfig, "0 or more", rating_interval=-1, pfsp_power=-1.0),
    *must(OpponentConfig, "1 or more", pool_size=0, snapshot_interval=0, rating_episodes=0),
    (OpponentConfig, {"mode": "league"}, "opponent.mode"),
    (OpponentConfig, {"skill": 0.5, "skill_start": 0.8}, "skill_start=0.8 is above opponent.skill=0.5"),
    (OpponentConfig, {"latest_share": 0.7, "anchor_share": 0.4}, "add up to more than 1"),
    (OpponentConfig, {"anchors": ["random", "clever"]}, r"opponent.anchors\[1\]: unknown opponent 'clever'"),
    (OpponentConfig, {"anchors": ["heuristic:2"]}, r"opponent.anchors\[0\]: heuristic:2: the skill must be from 0 to 1"),
    (OpponentConfig, {"policies": [""]}, r"opponent.policies\[0\]=''"),
    *must(RunConfig, "2 or more", keep_checkpoints=1),
    (
        PPOConfig,
        {"optimizer": "adamw"},
        "ppo.optimizer=adamw is Adam with weight decay; set ppo.weight_decay, such as 0.01, or",
    ),
    (PPOConfig, {"optimizer": "lion"}, "ppo.optimizer='lion' must be 'adam', 'adamw', 'rmsprop', 'sgd' or 'muon'"),
    (TrainingConfig, {"ppo": {"optimizer": "muon"}, "run": {"backend": "numpy"}}, "muon is only in torch; use run.backend=torch or auto"),
    (
        PPOConfig,
        {"learning_rate_schedule": "adaptive", "learning_rate": 0.02},
        "ppo.learning_rate=0.02 is not from ppo.min_learning_rate=1e-05 to ppo.max_learning_rate=0.01, the bounds of .*=adaptive; change",
    ),
    *must(RunConfig, "0 or more", seed=-1),
    *must(RunConfig, "1024 or less", threads=100_000),
    (RunConfig, {"total_timesteps": 10**400}, r"run.total_timesteps=1000+\.\.\. must be 9223372036854775807 or less"),
    (RunConfig, {"name": "../x"}, "run.name='../x' is not a valid name"),
    (RunConfig, {"backend": 1.5}, "run.backend=1.5 is not known; use auto, numpy, torch or jax"),
    (RunConfig, {"backend": ["numpy"]}, r"run.backend=\['numpy'\] is not known; use auto, numpy, torch or jax"),
    (RunConfig, {"directory": ""}, "run.directory='' is not a valid path"),
    (TrainingConfig, {"ppo": {"clip": 0.1}}, r"unknown config key ppo.clip; did you mean ppo.clip_coef\?"),
    (TrainingConfig, {"poo": {}}, r"unknown config key poo; did you mean ppo\?"),
    (TrainingConfig, {"ppo": 3}, "ppo=3 must be a mapping of names to values"),
    (TrainingConfig, {"ppo": {"gamma": "x"}}, "ppo.gamma='x' must be a number"),
    (TrainingConfig, {"ppo": {3: 4}}, "unknown config key ppo.3"),
    (
        TrainingConfig,
        {"env": {"wrappers": [{"name": "X", "kwrgs": 1}]}},
        r"unknown config key env.wrappers\[0\].kwrgs; did you mean .*kwargs",
    ),
    (TrainingConfig, {"policy": {"kind": "gru"}, "run": {"backend": "numpy"}}, "policy.kind=gru can be trained with torch and jax"),
    (
        WandbConfig,
        {"mode": "offline"},
        "tracking.wandb.mode is set, but nothing is sent to W&B without a project; set tracking.wandb.project",
    ),
    (WandbConfig, {"tags": ("a",)}, "tracking.wandb.tags is set, but nothing is sent to W&B without a project"),
]


@pytest.mark.parametrize("cls, values, message", REFUSED)
def test_what_is_wrong_is_named_by_the_constructor_and_by_from_dict(cls: type[ConfigBase], values: dict[str, Any], message: str) -> None:
    for make in (cls, lambda **data: cls.from_dict(data)):
        with pytest.raises(ConfigError, match=message) as caught:
            make(**values)
        assert "\n" not in str(caught.value)


def test_integers_may_be_written_as_1e6(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("run: {total_timesteps: 1e6}\nenv: {num_workers: 2e0}\npolicy: {hidden_sizes: [1e2, 64]}\n")
    for config in (
        TrainingConfig.from_yaml(tmp_path / "c.yaml"),
        TrainingConfig(
            run=RunConfig(total_timesteps=1e6),  # type: ignore[arg-type]
            env=EnvConfig(num_workers=2.0),  # type: ignore[arg-type]
            policy=PolicyConfig(hidden_sizes=(1e2, 64)),  # type: ignore[arg-type]
        ),
    ):
        found = (config.run.total_timesteps, config.env.num_workers, *config.policy.hidden_sizes)
        assert found == (1_000_000, 2, 100, 64)
        assert {type(number) for number in found} == {int}


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


def test_policies_by_name_take_what_differs_from_the_run() -> None:
    config = TrainingConfig.from_dict(
        {
            "policy": {"hidden_sizes": [8]},
            "policies": {"a": {"agents": "red_*", "policy": {"activation": "relu"}}, "b": {"agents": ["blue_0"]}},
        }
    )
    assert config.policies["a"].agents == ("red_*",)
    assert (config.role_policy("a").hidden_sizes, config.role_policy("a").activation) == ((8,), "relu")
    assert config.role_policy("b") == config.policy
    assert TrainingConfig.from_dict(config.to_dict()) == config
    assert TrainingConfig().policies == {}


@pytest.mark.parametrize(
    ("policies", "words"),
    [
        ({"a": {}}, "policies.a.agents is missing"),
        ({"a": {"agents": 3}}, "policies.a.agents=3 must be a list"),
        ({"a": {"agents": "x", "trains": True}}, "unknown config key policies.a.trains; did you mean policies.a.trainable"),
        ({"a": {"agents": "x", "policy": {"kind": "lstm"}}}, "policies.a.policy.kind=lstm can be trained with torch and jax"),
        ({"a": {"agents": "x", "policy": {"hidden_sizes": [0]}}}, "policies.a: policy.hidden_sizes"),
        ({"a": {"agents": "x", "ppo": {"gamma": 2.0}}}, "policies.a: ppo.gamma=2.0 must be 1 or less"),
        ({"a": {"agents": "x", "policy": {"central_critic": True}}}, "all policies share the global state"),
    ],
)
def test_policies_that_cannot_be_are_refused_by_name(policies: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        TrainingConfig.from_dict({"policies": policies, "run": {"backend": "numpy"}})


def test_a_tracker_that_is_disabled_needs_no_project() -> None:
    assert not WandbConfig(mode="disabled", entity="me", tags=("a",)).on


def test_listed_seeds_of_evaluations_are_one_for_each_episode() -> None:
    config = EvalConfig(seeds=[5, 6], episodes=2, final_episodes=2)
    assert config.seeds == (5, 6)
    assert EvalConfig(seeds=[5, 6], episodes=2, final_episodes=0).episodes == 2
    both = r"evaluation\.seeds has 2 seeds,.*\.episodes=20 and .*\.final_episodes=100; set .*\.episodes=2 and .*\.final_episodes=2 or 0$"
    with pytest.raises(ConfigError, match=both):
        EvalConfig(seeds=[5, 6])
    with pytest.raises(ConfigError, match=r"but evaluation\.final_episodes=100; set evaluation\.final_episodes=2 or 0"):
        EvalConfig(seeds=[5, 6], episodes=2)
    with pytest.raises(ConfigError, match=r"evaluation\.seeds"):
        EvalConfig(seeds=[-1], episodes=1, final_episodes=0)
