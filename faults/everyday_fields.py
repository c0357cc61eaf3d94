"""For G4: what each field of the config may be, said once more and by other means than the config's own, and how to break it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Data = dict[str, Any]
HUGE = (10**30, 10**18, -(10**30))


@dataclass(frozen=True)
class Field:
    """One field: its kind, its bounds or choices, and whether it may be empty."""

    kind: str  # float, int, bool, choice, text, ints (a list of them)
    low: float | None = None
    high: float | None = None
    above: bool = False
    """Whether `low` itself is too low."""
    options: tuple[Any, ...] = ()
    """Of a choice; and words that an int may be instead."""
    empty: bool = False
    """Whether null is taken."""
    usual: tuple[Any, ...] = ()
    """Good values to draw from, small enough to be run."""


def _float(low: float, *usual: float, high: float | None = None, above: bool = False, empty: bool = False) -> Field:
    return Field("float", low, high, above, empty=empty, usual=usual)


def _int(low: int, *usual: Any, high: int | None = None, empty: bool = False, words: tuple[str, ...] = ()) -> Field:
    return Field("int", low, high, empty=empty, usual=(*usual, *words), options=words)


def _choice(*options: Any) -> Field:
    return Field("choice", options=options, usual=options)


_FLAG = Field("bool", usual=(False, True))
_SCHEDULE = _choice("constant", "linear", "cosine")

FIELDS: dict[str, Field] = {
    "ppo.learning_rate": _float(0, 0.0, 3e-4, 1e-2),
    "ppo.gamma": _float(0, 0.0, 0.9, 0.99, 1.0, high=1),
    "ppo.gae_lambda": _float(0, 0.0, 0.95, 1.0, high=1),
    "ppo.clip_coef": _float(0, 0.0, 0.1, 0.3),
    "ppo.vf_coef": _float(0, 0.0, 0.5, 2.0),
    "ppo.ent_coef": _float(0, 0.0, 0.01),
    "ppo.max_grad_norm": _float(0, 0.1, 0.5, above=True, empty=True),
    "ppo.update_epochs": _int(1, 1, 2, 3),
    "ppo.rollout_steps": _int(1, 1, 2, 5, 8),
    "ppo.num_minibatches": _int(1, 1, 2, empty=True),
    "ppo.minibatch_size": _int(1, empty=True),
    "ppo.gradient_accumulation": _int(1, 1, 2, 3),
    "ppo.normalize_advantages": _choice("batch", "minibatch", "off"),
    "ppo.clip_vloss": _FLAG,
    "ppo.target_kl": _float(0, 0.01, 0.1, above=True, empty=True),
    "ppo.adam_eps": _float(0, 1e-8, 1e-5, above=True),
    "ppo.weight_decay": _float(0, 0.0, 0.01),
    "ppo.learning_rate_schedule": _SCHEDULE,
    "ppo.clip_schedule": _SCHEDULE,
    "ppo.ent_schedule": _SCHEDULE,
    "ppo.sequence_length": _int(1, 1, words=("auto",)),
    "ppo.max_staleness": _int(0, 0, 3, empty=True),
    "ppo.compile": Field("choice", options=("off", "on", "auto"), usual=("off",)),
    "env.id": Field("text", usual=("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCarContinuous-v0")),
    "env.num_envs": _int(1, 2, 3, 4),
    "env.num_workers": _int(0, 0, words=("auto",)),
    "env.help_workers": Field("bool", usual=(False,)),
    "env.worker_timeout": _float(0, 30.0, 60.0, above=True),
    "env.worker_restarts": _int(0, 0, 10),
    "env.max_episode_steps": _int(1, 1, 5, 50, empty=True),
    "env.atari": Field("bool", usual=(False,)),
    "env.frame_stack": _int(1, 1, 2),
    "env.native": _FLAG,
    "policy.kind": Field("choice", options=("mlp", "cnn", "lstm", "gru"), usual=("mlp",)),
    "policy.hidden_sizes": Field("ints", 1, usual=([], [4], [5, 3])),
    "policy.activation": _choice("tanh", "relu", "elu", "leaky_relu", "silu"),
    "policy.shared_trunk": _FLAG,
    "policy.orthogonal_init": _FLAG,
    "policy.log_std_init": Field("float", -20, 5, usual=(-1.0, 0.0, 0.5)),
    "policy.action_bounds": _choice("clip", "tanh"),
    "policy.normalize_observations": _FLAG,
    "policy.normalize_values": _FLAG,
    "policy.observation_clip": _float(0, 5.0, 10.0, above=True),
    "policy.cnn_features": _int(1, 8, 512),
    "policy.memory_size": _int(1, 3, 8),
    "policy.memory_layers": _int(1, 1, 2, high=100),
    "policy.memory_place": _choice("before", "after"),
    "policy.central_critic": Field("bool", usual=(False,)),  # it needs a world with state()
    "collect.max_replay_steps": _int(0, 0, 10, 100_000),
    "opponent.mode": Field("choice", options=("none", "random", "heuristic", "pool", "self_play"), usual=("none",)),
    "opponent.skill": Field("float", 0, 1, usual=(1.0, 0.5)),
    "opponent.skill_start": _float(0, 0.0, 0.5, high=1, empty=True),
    "opponent.skill_threshold": _float(0, 0.5, 0.7, high=1, above=True),
    "opponent.sides": _choice("alternate", "first", "second"),
    "opponent.pool_size": _int(1, 1, 5, high=100_000),
    "opponent.snapshot_interval": _int(1, 1, 20),
    "opponent.pfsp_power": _float(0, 0.0, 2.0, high=100),
    "opponent.latest_share": _float(0, 0.0, 0.5, high=1),
    "opponent.anchor_share": _float(0, 0.0, 0.5, high=1),
    "opponent.rating_interval": _int(0, 0, 20),
    "opponent.rating_episodes": _int(1, 1, 20, high=100_000),
    "evaluation.interval": _int(0, 0, 1, 2),
    "evaluation.episodes": _int(1, 1, 2),
    "evaluation.final_episodes": _int(0, 0, 1),
    "evaluation.num_envs": _int(1, 1, 2),
    "evaluation.deterministic": _FLAG,
    "evaluation.seed": _int(0, 0, 7),
    "run.name": Field("text", empty=True, usual=(None,)),
    "run.directory": Field("text", usual=("runs",)),
    "run.seed": _int(0, 0, 1, 12345),
    "run.total_timesteps": _int(1, 1),
    "run.max_iterations": _int(1, 2, empty=True),
    "run.max_episodes": _int(1, empty=True),
    "run.backend": _choice("torch", "numpy"),
    "run.device": Field("text", usual=("cpu", "auto")),
    "run.threads": _int(0, 0, 1),
    "run.checkpoint_interval": _int(0, 0, 1, 2),
    "run.keep_checkpoints": _int(2, 2, 3),
    "run.keep_best": _FLAG,
    "run.log_interval": _int(1, 1, 2),
}
OTHERS = ("env.kwargs", "env.wrappers", "policy.cnn_filters", "opponent.anchors", "opponent.policies")
"""Fields of nested data, which have cases of their own."""

WORDS = {"float": ("number",), "int": ("integer",), "bool": ("boolean",), "text": ("string",), "ints": ("tuple", "integer", "list")}
"""What an error must say is allowed, for a value of another type: one of these."""


def wrong_types(field: Field, rng: np.random.Generator) -> Any:
    """A value that is of no type that the field takes."""
    wrong: dict[str, Sequence[Any]] = {
        "float": ("0.5", "abc", "", True, False, [0.5], {"a": 1}),
        "int": ("3", 1.5, 2.0, True, [3], {"a": 1}),
        "bool": (0, 1, "true", "yes", 0.0, [True]),
        "text": (3, 1.5, True, ["a"], {"a": "b"}),
        "ints": (3, "64", [1.5], ["a"], [[4]], {"a": 1}, [True]),
        "choice": ("", "Tanh", "nope", 1.5, 77, [], {}, ["a"]),
    }
    near = [True, 1.0, "1"] if field.options == (1, 2) else []  # equal to a choice, and not it
    values = [*wrong[field.kind], *near, *([] if field.empty else [None])]
    return values[int(rng.integers(len(values)))]


def out_of_range(field: Field, rng: np.random.Generator) -> Any:
    """A value of the right type beyond a bound, or None if there is no bound."""
    if field.kind == "float":
        low = -1e-9 if field.low == 0 else (field.low or 0.0) - 0.1
        beyond = [low, -1e30, *([0.0] if field.above else []), *([] if field.high is None else [field.high + 1e-6, 1e30])]
    elif field.kind == "int":
        beyond = [int(field.low or 0) - 1, -(10**30), *([] if field.high is None else [field.high + 1])]
    elif field.kind == "ints":
        beyond = [[0], [4, -1], [-(10**30)]]
    else:
        return None
    return beyond[int(rng.integers(len(beyond)))]


def says_what_is_allowed(field: Field, message: str) -> bool:
    """Whether an error tells what the field may be: its choices, its bounds, or its type."""
    choices = bool(field.options) and all(str(option) in message for option in field.options)
    bounds = field.low is not None and any(word in message for word in (f"{field.low:g}", "above 0"))
    return choices or bounds or any(word in message for word in WORDS.get(field.kind, ()))


def valid_data(rng: np.random.Generator, *, share: float = 0.3) -> Data:
    """A config that is in order: usual values in a share of the fields, small enough to be run."""
    data: Data = {}
    for name, field in FIELDS.items():
        if field.usual and rng.random() < share:
            section, key = name.split(".")
            data.setdefault(section, {})[key] = field.usual[int(rng.integers(len(field.usual)))]
    env, ppo = data.setdefault("env", {}), data.setdefault("ppo", {})
    env.setdefault("num_envs", 2)
    env["num_workers"] = 0
    ppo.setdefault("rollout_steps", 4)
    ppo.pop("minibatch_size", None)
    return data
