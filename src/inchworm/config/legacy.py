"""Names of older trainers, translated for configs that come as plain data (`from_dict`, `from_yaml`).

Where two trainers gave one name different meanings (`batch_size`), the keys next to it decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inchworm.core.errors import ConfigError

_PPO = {
    "clip_range": "clip_coef",
    "clip_epsilon": "clip_coef",
    "n_epochs": "update_epochs",
    "epochs_per_update": "update_epochs",
    "value_coef": "vf_coef",
    "entropy_coef": "ent_coef",
    "lr": "learning_rate",
    "n_steps": "rollout_steps",
    "rollout_length": "rollout_steps",
    "tbptt_chunk_length": "sequence_length",
    "bptt_horizon": "sequence_length",
}
_MOVED = {
    "total_timesteps": ("run", "total_timesteps"),
    "checkpoint_interval": ("run", "checkpoint_interval"),
    "seed": ("run", "seed"),
    "device": ("run", "device"),
    "evaluate_interval": ("evaluation", "interval"),
    "max_episodes": ("run", "max_episodes"),
    "max_steps_per_episode": ("env", "max_episode_steps"),
    "eval_frequency": ("evaluation", "interval"),
    "eval_episodes": ("evaluation", "episodes"),
    "log_frequency": ("run", "log_interval"),
    "target_reward": ("convergence", "target"),
    "convergence_window": ("convergence", "window"),
    "early_stopping_patience": ("convergence", "patience"),
    "notes": ("run", "notes"),
    "enable_mlflow": ("tracking", "mlflow"),
    "wandb": ("tracking", "wandb"),
}
"""Settings of a trainer outside `ppo`: the section and the name that they have here."""

_OF_PPO = (*_PPO, "norm_adv", "batch_size", "minibatch_size", "learning_rate", "optimizer", "gamma", "gae_lambda", "max_grad_norm")
"""Names by which a table without sections means `ppo`."""

_ONE_ENV = ("clip_epsilon", "epochs_per_update", "max_steps_per_episode")
"""Names of a trainer that has one environment, so that its batch is the steps of that one."""

_SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "agent": {"name": ("policy", "kind")},
    "environment": {"name": ("env", "id"), "max_steps": ("env", "max_episode_steps")},
    "optimizer": {
        "type": ("ppo", "optimizer"),
        "learning_rate": ("ppo", "learning_rate"),
        "lr": ("ppo", "learning_rate"),
        "eps": ("ppo", "adam_eps"),
        "weight_decay": ("ppo", "weight_decay"),
    },
    "hardware": {"device": ("run", "device"), "num_workers": ("env", "num_workers")},
    "curriculum": {},
    "evaluation": {"episodes_per_suite": ("evaluation", "episodes"), "generate_replays": ("evaluation", "save_replay")},
}
"""Sections of a trainer -> their settings that have another place or name here."""
_ONE_VALUE = {
    "optimizer.beta1": 0.9, "optimizer.beta2": 0.999,
    "hardware.num_gpus": 1, "hardware.distributed": False, "hardware.cpu_offload": False, "hardware.gradient_checkpointing": False,
}  # fmt: skip
"""Settings that do not exist here, with the only value that is accepted."""

_FILES = "all files of a run are in one directory; set run.directory and run.name"
_NO_SETTING = {
    "push_url": "a run is delivered by trackers; set tracking.mlflow.uri or tracking.wandb.project, as docs/tracking.md shows",
    "checkpoint_dir": _FILES,
    "log_dir": _FILES,
    "replay_dir": _FILES,
    "evaluation.suites": "suites are passed to PolicyEvaluator().evaluate_suites, as docs/evaluation.md shows",
    "evaluation.replay_interval": "a replay is kept of every evaluation; set evaluation.keep_replays",
    "curriculum.enabled": "levels are set by curriculum.mode and curriculum.levels, as docs/curricula.md shows",
}
_POLICY_KINDS = {"simple_mlp": "mlp", "simple_cnn": "cnn"}


def current_name(old: str) -> str | None:
    """The field that a name of an older trainer stands for, as `section.field`; None if it is not one."""
    if old in _PPO:
        return f"ppo.{_PPO[old]}"
    return ".".join(_MOVED[old]) if old in _MOVED else None


def modern_names(config: str, data: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return `data` under current names for the config class `config`, and a message for each name that was changed."""
    reports: list[str] = []
    if not isinstance(data, Mapping):
        raise ConfigError(f"{config}.from_dict needs a mapping of names to values, not {type(data).__name__}")
    if config == "PPOConfig":
        return _ppo(data, reports), reports
    if config == "TrainingConfig":
        return _training(data, reports), reports
    return _without_groups(data) if config == "CollectConfig" else dict(data), reports


def _ppo(data: Mapping[str, Any], reports: list[str], where: str = "", lanes: Any = None) -> dict[str, Any]:
    """Translate the section `ppo`. With `lanes` (copies of the environment), transitions per update become steps."""
    modern: dict[str, Any] = {}
    for key, value in data.items():
        name = _PPO.get(key, key)
        old, amount, why = f"{where}{key}", "", ""  # for the report
        if key == "norm_adv":
            if not isinstance(value, bool):
                raise ConfigError(f"{where}norm_adv={value!r} must be true or false; it is called {where}normalize_advantages here")
            name, value = "normalize_advantages", "minibatch" if value else "off"
        elif key == "value_coef":
            if type(value) not in (int, float):
                raise ConfigError(f"{where}value_coef={value!r} must be a number; it is half of {where}vf_coef here")
            old, value = f"{old}={value}", 2 * value
            amount, why = f"={value}", ", because the value loss has a factor 1/2"
        elif key == "batch_size" and "minibatch_size" not in data:
            name = "minibatch_size"
        elif key == "batch_size" and lanes is None and not data.keys().isdisjoint(_ONE_ENV):
            name, why = "rollout_steps", ", for one environment: divide it by their number if there are more"
        elif key == "batch_size":
            if type(value) is not int or type(lanes) is not int or lanes < 1 or value % lanes:
                raise ConfigError(
                    f"{where}batch_size={value} with minibatch_size means transitions per update; "
                    f"use {where}rollout_steps = {value} / lanes instead"
                )
            name, amount, value = "rollout_steps", f" = {value} / {lanes} lanes", value // lanes
        if name in modern or (name != key and name in data):
            raise ConfigError(f"{where}{key} and {where}{name} are the same setting; keep {where}{name}")
        if name != key:
            reports.append(f"{old} is called {where}{name}{amount} here{why}; accepted")
        modern[name] = value
    return modern


def _without_groups(collect: Mapping[str, Any]) -> dict[str, Any]:
    """Drop `collect.groups: 1` of earlier versions; alternating groups were removed."""
    groups = collect.get("groups", 1)
    if type(groups) is not int or groups != 1:
        raise ConfigError(
            f"collect.groups={groups!r} is not supported: alternating groups were removed; delete it, and use env.num_workers with "
            "env.help_workers=true to step faster"
        )
    return {name: value for name, value in collect.items() if name != "groups"}


def _training(data: Mapping[str, Any], reports: list[str]) -> dict[str, Any]:
    """Translate a whole config: move `experiment_name`, `agent`, `trainer` and a table without sections to their sections."""
    modern = {key: dict(value) if isinstance(value, Mapping) else value for key, value in data.items()}
    trainer = _section("trainer", modern.pop("trainer", {}))
    moves: list[tuple[str, str, str, Any]] = []  # old name, section, name, value
    if "experiment_name" in modern:
        moves.append(("experiment_name", "run", "name", modern.pop("experiment_name")))
    for name in _SECTIONS:
        if name in modern and (name != "optimizer" or isinstance(modern[name], Mapping)):  # `optimizer` is also a name of `ppo`
            moves += _section_moves(name, modern)
    if isinstance(modern.get("wandb"), dict) and "notes" in modern["wandb"]:
        moves.append(("wandb.notes", "run", "notes", modern["wandb"].pop("notes") or ""))
    table = {key: modern.pop(key) for key in list(modern) if key in (*_MOVED, *_OF_PPO, *_NO_SETTING)}
    for where, settings in (("", table), ("trainer.", trainer)):
        for key, value in settings.items():
            if key in _NO_SETTING:
                raise ConfigError(f"{where}{key}={value!r:.80} is not supported: {_NO_SETTING[key]}")
            if value is not None or key not in ("seed", "wandb"):  # null leaves the choice to us
                moves.append((f"{where}{key}", *_MOVED.get(key, ("ppo", key)), _tracker(key, value)))
    for old, section, name, value in moves:
        target = modern.setdefault(section, {})
        if not isinstance(target, dict):
            raise ConfigError(f"{section} must be a mapping of names to values, not {target!r}")
        if name in target:
            raise ConfigError(f"{old} and {section}.{name} are the same setting; keep {section}.{name}")
        target[name] = value
        if section != "ppo" or name not in (*_PPO, "norm_adv", "batch_size"):  # these are reported when the section is translated
            reports.append(f"{old} is called {section}.{name} here; accepted")
    convergence = modern.get("convergence")
    if "target_reward" in {*table, *trainer} and isinstance(convergence, dict) and "returns" not in convergence:
        convergence["returns"] = "training"
        reports.append("convergence.returns=training is set, because that trainer compares the returns of training episodes")
    if not {*table, *trainer}.isdisjoint(_ONE_ENV):
        _complete_episodes(modern, reports)
    if isinstance(modern.get("collect"), dict):
        modern["collect"] = _without_groups(modern["collect"])
    if isinstance(modern.get("ppo"), dict):
        env = modern.get("env")
        modern["ppo"] = _ppo(modern["ppo"], reports, "ppo.", env.get("num_envs", 8) if isinstance(env, dict) else 8)
    return modern


def _section(name: str, found: Any) -> dict[str, Any]:
    if not isinstance(found, Mapping):
        raise ConfigError(f"{name} must be a mapping of names to values, not {found!r:.80}")
    return dict(found)


def _section_moves(name: str, config: dict[str, Any]) -> list[tuple[str, str, str, Any]]:
    """Take a section of another trainer out of a config; return its settings as (old name, section, name, value) here.

    `evaluation` and `curriculum` are sections here, too: settings that have their names here stay.
    """
    section = _section(name, config.pop(name) or {})
    moves: list[tuple[str, str, str, Any]] = []
    if name == "agent" and "hidden_size" in section:
        layers = section.pop("num_layers", 2)
        if type(layers) is not int or not 1 <= layers <= 100:
            raise ConfigError(f"agent.num_layers={layers!r:.80} must be from 1 to 100")
        moves.append(("agent.hidden_size", "policy", "hidden_sizes", [section.pop("hidden_size")] * layers))
    elif name == "optimizer" and "lr_schedule_enabled" in section:
        kind, is_on = section.pop("lr_schedule_type", "cosine"), section.pop("lr_schedule_enabled")
        moves.append(("optimizer.lr_schedule_type", "ppo", "learning_rate_schedule", kind if is_on else "constant"))
    elif name == "hardware" and not section.get("distributed"):
        section.pop("backend", None)  # of communication between processes
    elif name == "evaluation" and section.pop("enabled", True) is False:
        section |= {"interval": 0, "final_episodes": 0}
    elif name == "curriculum" and "enabled" not in section:
        if section:
            config[name] = section
        return moves
    elif name == "curriculum" and not section["enabled"]:
        section = {}
    kept, kwargs = dict[str, Any](), dict[str, Any]()
    for key, value in section.items():
        old, here = f"{name}.{key}", _SECTIONS[name].get(key)
        if here is not None:
            moves.append((old, *here, _POLICY_KINDS.get(str(value), value) if name == "agent" else value))
        elif old in _NO_SETTING:
            raise ConfigError(f"{old}={value!r:.80} is not supported: {_NO_SETTING[old]}")
        elif name == "evaluation":
            kept[key] = value
        elif name == "environment":
            kwargs |= _section(old, value) if key in ("kwargs", "overrides") else {key: value}
        elif old not in _ONE_VALUE:
            here_called = "; the section is called policy here" if name == "agent" else ""
            raise ConfigError(f"unknown config key {old}{here_called}")
        elif value != _ONE_VALUE[old]:
            raise ConfigError(f"{old}={value!r:.80} is not supported; the only value is {_ONE_VALUE[old]}, so leave it out")
    if name == "evaluation":
        config[name] = kept
    return [*moves, *([(name, "env", "kwargs", kwargs)] if kwargs else [])]


def _tracker(key: str, value: Any) -> Any:
    """Translate how a trainer turns a tracker on: `enable_mlflow: true`, or `wandb` with `enabled` or `track`; others stay as they are."""
    if key == "enable_mlflow":
        return {"experiment": "inchworm" if value else None}
    if key != "wandb":
        return value
    if not isinstance(value, dict):
        raise ConfigError(f"wandb={value!r:.80} must be a mapping of names to values; tracking.wandb.project turns it on")
    modern = {"name" if name == "run_name" else name: setting for name, setting in value.items() if name not in ("enabled", "track")}
    return modern if value.get("enabled", value.get("track", True)) else {**modern, "mode": "disabled"}


def _complete_episodes(modern: dict[str, Any], reports: list[str]) -> None:
    """Set what a trainer of one environment implies: `env.num_envs=1`, and enough `run.total_timesteps` for all of its episodes."""
    env, run = modern.setdefault("env", {}), modern.get("run", {})
    if isinstance(env, dict) and "num_envs" not in env:
        env["num_envs"] = 1
        reports.append("env.num_envs=1 is set, because that trainer has one environment; give env.num_envs for more")
    if not isinstance(env, dict) or not isinstance(run, dict) or "total_timesteps" in run:
        return
    episodes, steps = run.get("max_episodes"), env.get("max_episode_steps")
    if type(episodes) is int and type(steps) is int:
        run["total_timesteps"] = episodes * steps
        reports.append(f"run.total_timesteps={episodes * steps} is set: {episodes} episodes of at most {steps} steps")
