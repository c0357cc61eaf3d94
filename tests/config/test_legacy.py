"""Names of older trainers, accepted from plain data."""

import warnings
from typing import Any

import pytest

from inchworm.config.reading import LegacyNameWarning
from inchworm.config.sections import (
    CollectConfig,
    ConvergenceConfig,
    CurriculumConfig,
    EnvConfig,
    EvalConfig,
    PPOConfig,
    RunConfig,
    TrainingConfig,
)
from inchworm.core.errors import ConfigError

OTHERS = pytest.mark.filterwarnings("ignore::inchworm.config.reading.LegacyNameWarning")
"""Names that are reported besides the one that a test looks for."""
OLDER = {
    "clip_coef": ["clip_range", "clip_epsilon"],
    "update_epochs": ["n_epochs", "epochs_per_update"],
    "ent_coef": ["entropy_coef"],
    "learning_rate": ["lr"],
    "rollout_steps": ["n_steps", "rollout_length"],
    "sequence_length": ["tbptt_chunk_length", "bptt_horizon"],
    "minibatch_size": ["batch_size"],
}


@pytest.mark.parametrize("old, new", [(old, new) for new, names in OLDER.items() for old in names])
def test_an_older_name_is_accepted_from_plain_data_with_a_warning(old: str, new: str) -> None:
    with pytest.warns(LegacyNameWarning, match=f"^{old} is called {new} here; accepted$"):
        assert getattr(PPOConfig.from_dict({old: 1}), new) == 1
    with pytest.warns(LegacyNameWarning, match=f"^ppo.{old} is called ppo.{new} here"):
        assert getattr(TrainingConfig.from_dict({"ppo": {old: 1}}).ppo, new) == 1
    with pytest.raises(ConfigError, match=f"{old} and {new} are the same setting; keep {new}|with minibatch_size"):
        PPOConfig.from_dict({old: 1, new: 1})
    with pytest.raises(ConfigError, match="unknown config key"):
        PPOConfig(**{old: 1})


@OTHERS
def test_value_coef_weighs_a_loss_without_the_half() -> None:
    # c * mean(error^2) there is vf_coef * mean(error^2) / 2 here, so vf_coef = 2c
    with pytest.warns(LegacyNameWarning, match=r"^value_coef=0.5 is called vf_coef=1.0 here, .* 1/2; accepted$"):
        assert PPOConfig.from_dict({"value_coef": 0.5}).vf_coef == 1.0
    for data in ({"ppo": {"value_coef": 0.25}}, {"trainer": {"value_coef": 0.25}}, {"value_coef": 0.25}):
        with pytest.warns(LegacyNameWarning, match=r"ppo.value_coef=0.25 is called ppo.vf_coef=0.5 here"):
            assert TrainingConfig.from_dict(data).ppo.vf_coef == 0.5
    for value in ("0.5", True, None):
        with pytest.raises(ConfigError, match=f"value_coef={value!r} must be a number"):
            PPOConfig.from_dict({"value_coef": value})
    with pytest.raises(ConfigError, match="value_coef and vf_coef are the same setting; keep vf_coef"):
        PPOConfig.from_dict({"value_coef": 0.5, "vf_coef": 1.0})


EPISODES = {
    "max_episodes": 1000, "max_steps_per_episode": 500, "target_reward": 195.0, "convergence_window": 100, "early_stopping_patience": 10,
    "eval_frequency": 50, "eval_episodes": 10,
}  # fmt: skip
EPISODES_PPO = {
    "learning_rate": 3e-4, "clip_epsilon": 0.2, "gamma": 0.99, "gae_lambda": 0.95, "entropy_coef": 0.01, "value_coef": 0.5,
    "max_grad_norm": 0.5, "epochs_per_update": 10, "batch_size": 64, "minibatch_size": 64,
}  # fmt: skip
SAME_PPO = PPOConfig(update_epochs=10, vf_coef=1.0, rollout_steps=64, minibatch_size=64)


def test_the_table_of_a_trainer_of_episodes() -> None:
    with pytest.warns(LegacyNameWarning) as caught:
        config = TrainingConfig.from_dict({**EPISODES, **EPISODES_PPO})
    assert config == TrainingConfig(
        env=EnvConfig(num_envs=1, max_episode_steps=500),  # it has one environment
        ppo=SAME_PPO,
        evaluation=EvalConfig(interval=50, episodes=10),
        convergence=ConvergenceConfig(target=195.0, window=100, patience=10, returns="training"),  # it looks at every episode
        run=RunConfig(max_episodes=1000, total_timesteps=500_000),  # 1000 episodes of at most 500 steps
    )
    messages = " ".join(str(warning.message) for warning in caught)
    changed = {*EPISODES, *EPISODES_PPO} - {"minibatch_size"}
    assert all(f"{name} is called" in messages or f"{name}=" in messages for name in changed)
    assert messages.count("clip_epsilon") == messages.count("value_coef") == messages.count("epochs_per_update") == 1
    with pytest.warns(LegacyNameWarning):
        assert TrainingConfig.from_dict({**EPISODES_PPO, "env": {"num_envs": 4}}).ppo.rollout_steps == 16
    with pytest.warns(LegacyNameWarning):
        config = TrainingConfig.from_dict({"max_episodes": 7, "log_frequency": 3, "run": {"total_timesteps": 50}})
    assert (config.run.max_episodes, config.run.total_timesteps, config.run.log_interval) == (7, 50, 3)


@OTHERS
def test_the_table_of_ppo_alone_is_for_one_environment() -> None:
    with pytest.warns(LegacyNameWarning, match="batch_size is called rollout_steps here, for one environment"):
        assert PPOConfig.from_dict(EPISODES_PPO) == SAME_PPO


@pytest.mark.parametrize("value, expected", [(True, "minibatch"), (False, "off")])
def test_norm_adv(value: bool, expected: str) -> None:
    with pytest.warns(LegacyNameWarning):
        assert PPOConfig.from_dict({"norm_adv": value}).normalize_advantages == expected


def test_batch_size_together_with_minibatch_size_counts_transitions() -> None:
    # 2048 transitions per update over 16 lanes are 128 steps
    with pytest.warns(LegacyNameWarning, match=r"ppo.batch_size is called ppo.rollout_steps = 2048 / 16 lanes here"):
        config = TrainingConfig.from_dict({"env": {"num_envs": 16}, "ppo": {"batch_size": 2048, "minibatch_size": 64}})
    assert (config.ppo.rollout_steps, config.ppo.minibatch_size) == (128, 64)
    with pytest.warns(LegacyNameWarning):
        assert TrainingConfig.from_dict({"ppo": {"batch_size": 64, "minibatch_size": 8}}).ppo.rollout_steps == 8
    for env, ppo in (({"num_envs": 3}, {}), ({"num_envs": 0}, {}), ({"num_envs": "8"}, {}), ({}, {"rollout_steps": 4})):
        with pytest.raises(ConfigError, match=r"ppo.batch_size(=2048 .* transitions per update| and ppo.rollout_steps are the same)"):
            TrainingConfig.from_dict({"env": env, "ppo": {"batch_size": 2048, "minibatch_size": 64, **ppo}})
    with pytest.raises(ConfigError, match="means transitions per update"):
        PPOConfig.from_dict({"batch_size": 2048, "minibatch_size": 64})


def test_an_older_whole_config() -> None:
    trainer = {"total_timesteps": 1000, "checkpoint_interval": 5, "seed": 3, "device": "cpu", "evaluate_interval": 7}
    old = {
        "experiment_name": "first",
        "agent": {"name": "simple_mlp", "hidden_size": 32},
        "trainer": {**trainer, "clip_range": 0.1, "gamma": 0.9, "optimizer": "muon"},
    }
    with pytest.warns(LegacyNameWarning) as caught:
        config = TrainingConfig.from_dict(old)
    assert (config.run.name, config.policy.kind, config.policy.hidden_sizes) == ("first", "mlp", (32, 32))
    assert (config.run.total_timesteps, config.run.checkpoint_interval, config.run.seed, config.run.device) == (1000, 5, 3, "cpu")
    assert (config.evaluation.interval, config.ppo.clip_coef, config.ppo.gamma, config.ppo.optimizer) == (7, 0.1, 0.9, "muon")
    messages = {str(warning.message) for warning in caught}
    assert "trainer.evaluate_interval is called evaluation.interval here; accepted" in messages
    assert "agent.hidden_size is called policy.hidden_sizes here; accepted" in messages
    assert old["agent"] == {"name": "simple_mlp", "hidden_size": 32}, "the input is not changed"


def test_an_optimizer_in_a_table_without_sections() -> None:
    with pytest.warns(LegacyNameWarning) as caught:
        assert TrainingConfig.from_dict({"optimizer": "muon", "lr": 1e-3}).ppo == PPOConfig(optimizer="muon", learning_rate=1e-3)
    assert "optimizer is called ppo.optimizer here; accepted" in {str(warning.message) for warning in caught}


@pytest.mark.parametrize(
    "data, message",
    [
        ({"agent": {"layers": 3}}, "unknown config key agent.layers; the section is called policy here"),
        ({"agent": 3}, "agent must be a mapping"),
        ({"agent": {"name": []}}, r"policy.kind=\[\]"),
        ({"trainer": "x"}, "trainer must be a mapping"),
        ({"trainer": {"lr": 0.1}, "ppo": {"learning_rate": 0.1}}, "are the same setting"),
        ({"trainer": {"seed": 1}, "run": {"seed": 1}}, "trainer.seed and run.seed are the same setting; keep run.seed"),
        ({"trainer": {"seed": 1}, "run": 3}, "run must be a mapping"),
        ({"ppo": {"norm_adv": "false"}}, "ppo.norm_adv='false' must be true or false"),
        ({"ppo": {"clip_range": 0.1, "clip_epsilon": 0.1}}, "are the same setting"),
        ({"collect": {"groups": True}}, "collect.groups=True is not supported"),
        ({"collect": {"groups": 2}}, "collect.groups=2 is not supported: .* delete it"),
        ({"target_reward": 195.0, "convergence": 3}, "convergence must be a mapping"),
        ({"push_url": "https://x"}, "push_url='https://x' is not supported: a run is delivered by trackers; set tracking.mlflow.uri"),
        ({"wandb": True}, "wandb=True must be a mapping .* tracking.wandb.project"),
        ({"max_episodes": "x", "max_steps_per_episode": 500}, "run.max_episodes='x'"),
        ({"gamma": 0.9, "ppo": {"gamma": 0.9}}, "gamma and ppo.gamma are the same setting; keep ppo.gamma"),
        ({"clip_epsilon": 0.1, "env": 3}, "env"),
        (None, "mapping"),
        ([("ppo", {})], "mapping"),
    ],
)
def test_what_is_wrong_in_an_older_config_is_named(data: Any, message: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LegacyNameWarning)
        with pytest.raises(ConfigError, match=message):
            TrainingConfig.from_dict(data)


def test_one_group_of_an_earlier_config_is_dropped() -> None:
    assert CollectConfig.from_dict({"groups": 1, "max_replay_steps": 7}) == CollectConfig(max_replay_steps=7)
    assert TrainingConfig.from_dict({"collect": {"groups": 1}}) == TrainingConfig()


def test_the_constructor_says_what_an_old_name_is_called():
    with pytest.raises(ConfigError, match=r"^unknown config key ppo.n_epochs; it is called ppo.update_epochs here$"):
        PPOConfig(n_epochs=4)
    with pytest.raises(ConfigError, match=r"ppo.value_coef; it is called ppo.vf_coef here, and is twice as large, because"):
        PPOConfig(value_coef=0.5)


def test_trackers_of_an_older_config_are_in_the_section_tracking() -> None:
    wandb = {"enabled": True, "project": "worm", "entity": "me", "run_name": "first"}
    with pytest.warns(LegacyNameWarning, match="wandb is called tracking.wandb here"):
        config = TrainingConfig.from_dict({"wandb": wandb, "notes": "a try", "trainer": {"enable_mlflow": True}})
    assert config.run.notes == "a try"
    assert (config.tracking.wandb.project, config.tracking.wandb.entity, config.tracking.wandb.name) == ("worm", "me", "first")
    assert config.tracking.sinks == ["wandb", "mlflow"]
    with pytest.warns(LegacyNameWarning):
        off = TrainingConfig.from_dict({"wandb": {**wandb, "enabled": False}, "enable_mlflow": False})
    assert off.tracking.sinks == []


SECTIONS: dict[str, Any] = {
    "experiment_name": "whole",
    "agent": {"name": "simple_mlp", "hidden_size": 48, "num_layers": 3},
    "environment": {"name": "Skirmish-v0", "width": 10, "height": 12, "max_steps": 100, "overrides": {"units": 3}},
    "trainer": {"total_timesteps": 10_000, "batch_size": 512, "minibatch_size": 64},
    "ppo": {"update_epochs": 2, "clip_coef": 0.1},
    "optimizer": {
        "type": "adamw", "learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1,
        "lr_schedule_enabled": True, "lr_schedule_type": "linear",
    },
    "curriculum": {"enabled": False, "stages": []},
    "wandb": {"enabled": False, "project": "worms", "notes": "of wandb"},
    "hardware": {"device": "cpu", "num_gpus": 1, "num_workers": 2, "distributed": False, "backend": "nccl"},
    "evaluation": {"enabled": True, "interval": 7, "episodes_per_suite": 10, "generate_replays": True},
    "seed": 4,
}  # fmt: skip


def test_every_section_of_a_modular_trainer() -> None:
    with pytest.warns(LegacyNameWarning) as caught:
        config = TrainingConfig.from_dict(SECTIONS)
    assert config.policy.hidden_sizes == (48, 48, 48)
    assert (config.env.id, config.env.max_episode_steps, config.env.num_workers) == ("Skirmish-v0", 100, 2)
    assert config.env.kwargs == {"width": 10, "height": 12, "units": 3}
    ppo = PPOConfig(
        update_epochs=2, clip_coef=0.1, rollout_steps=64, minibatch_size=64,  # 512 transitions of 8 lanes
        optimizer="adamw", learning_rate=1e-3, adam_eps=1e-8, weight_decay=0.1, learning_rate_schedule="linear",
    )  # fmt: skip
    assert config.ppo == ppo
    assert config.evaluation == EvalConfig(interval=7, episodes=10, save_replay=True)
    assert config.run == RunConfig(name="whole", total_timesteps=10_000, seed=4, device="cpu", notes="of wandb")
    assert (config.tracking.wandb.project, config.tracking.wandb.on) == ("worms", False)
    messages = {str(warning.message) for warning in caught}
    assert {
        "optimizer.eps is called ppo.adam_eps here; accepted",
        "hardware.num_workers is called env.num_workers here; accepted",
        "environment is called env.kwargs here; accepted",
        "evaluation.generate_replays is called evaluation.save_replay here; accepted",
    } <= messages
    assert SECTIONS["optimizer"]["type"] == "adamw", "the input is not changed"


@OTHERS
def test_what_is_off_in_a_section_is_off_here() -> None:
    config = TrainingConfig.from_dict(
        {"optimizer": {"lr_schedule_enabled": False}, "evaluation": {"enabled": False}, "curriculum": None, "wandb": None, "seed": None}
    )
    assert config == TrainingConfig(evaluation=EvalConfig(interval=0, final_episodes=0))


@OTHERS
@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"optimizer": {"beta1": 0.8}}, "optimizer.beta1=0.8 is not supported; the only value is 0.9, so leave it out"),
        ({"optimizer": {"momentum": 0.8}}, "unknown config key optimizer.momentum"),
        ({"optimizer": {"lr_schedule_enabled": True, "lr_schedule_type": "exponential"}}, "learning_rate_schedule='exponential'"),
        ({"optimizer": {"learning_rate": 1e-3}, "ppo": {"learning_rate": 1e-4}}, "are the same setting; keep ppo.learning_rate"),
        ({"hardware": {"distributed": True}}, "hardware.distributed=True is not supported"),
        ({"hardware": 8}, "hardware must be a mapping of names to values, not 8"),
        ({"curriculum": {"enabled": True}}, "curriculum.enabled=True is not supported: levels are set by curriculum.mode"),
        ({"evaluation": {"suites": ["a"]}}, r"evaluation.suites=\['a'\] is not supported: suites are passed to PolicyEvaluator"),
        ({"evaluation": 3}, "evaluation must be a mapping"),
        ({"environment": {"overrides": 3}}, "environment.overrides must be a mapping"),
        ({"agent": {"hidden_size": 8, "num_layers": 10**9}}, "agent.num_layers=1000000000 must be from 1 to 100"),
        ({"log_dir": "./logs"}, "log_dir='./logs' is not supported: all files of a run are in one directory; set run.directory"),
    ],
)
def test_what_a_section_asks_for_and_is_not_here_is_refused_by_name(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        TrainingConfig.from_dict(data)
    assert "\n" not in str(raised.value)


def test_a_curriculum_of_ours_is_read_as_it_is() -> None:
    config = TrainingConfig(curriculum=CurriculumConfig(mode="adaptive", levels=[{"length": 1}, {"length": 2}]))
    assert TrainingConfig.from_dict(config.to_dict()) == config
