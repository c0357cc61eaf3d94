"""Config files at random for G4, most of them broken in one known way, with what must become of each.

What each field may be is written here a second time, independently of the config itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

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

WORDS = {"float": ("number",), "int": ("whole number",), "bool": ("true or false",), "text": ("text",), "ints": ("list", "whole number")}
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
    limits = [str(int(limit)) if limit == int(limit) else str(limit) for limit in (field.low, field.high) if limit is not None]
    bounds = any(f"must be {limit} or" in message for limit in limits) or "must be above 0" in message
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


RAW = "rawtext"
"""Stands in the written YAML where text goes that no writer would make."""
SECTIONS = ("env", "policy", "ppo", "collect", "evaluation", "run")


@dataclass(frozen=True)
class Case:
    """A config file, and what must become of it."""

    what: str
    text: bytes
    outcome: str
    """`refused`, `read`, or `either`."""
    words: tuple[str, ...] = ()
    """All of these must be in the error."""
    field: Field | None = None
    """Of what the error must say what is allowed."""
    value: tuple[str, Any] | None = None
    """A field and what it must be once it is read."""


def written(data: Data, raw: str = "") -> bytes:
    """The data as YAML, with `raw` in place of `RAW`."""
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True).replace(RAW, raw).encode("utf-8", "surrogatepass")


def put(data: Data, name: str, value: Any) -> Data:
    section, key = name.split(".")
    return {**data, section: {**data.get(section, {}), key: value}}


def _any_field(rng: np.random.Generator, *kinds: str) -> tuple[str, Field]:
    names = [name for name, field in FIELDS.items() if not kinds or field.kind in kinds]
    name = names[int(rng.integers(len(names)))]
    return name, FIELDS[name]


def _pick(rng: np.random.Generator, options: Any) -> Any:
    return options[int(rng.integers(len(options)))]


def wrong_type(data: Data, rng: np.random.Generator) -> Case:
    name, field = _any_field(rng)
    return Case("wrong type", written(put(data, name, wrong_types(field, rng))), "refused", (name,), field)


def wrong_range(data: Data, rng: np.random.Generator) -> Case:
    name, field = _any_field(rng, "float", "int", "ints")
    return Case("out of range", written(put(data, name, out_of_range(field, rng))), "refused", (name,), field)


def not_finite(data: Data, rng: np.random.Generator) -> Case:
    name, _ = _any_field(rng, "float", "int")
    raw = _pick(rng, (".nan", ".NaN", ".inf", "-.inf"))
    return Case("not finite", written(put(data, name, RAW), raw), "refused", (name,), FIELDS[name])


def unknown_key(data: Data, rng: np.random.Generator) -> Case:
    name, _ = _any_field(rng)
    section, key = name.split(".")
    place = int(rng.integers(len(key)))
    typo = _pick(rng, (key[:place] + key[place + 1 :], key + "x", key.upper(), key.replace("_", "-") + "-", "zzz", "\u00e9\u4e16", "a b"))
    return Case("unknown key", written(put(data, f"{section}.{typo}", 1)), "refused", (f"{section}.{typo}", "did you mean|known names"))


def unknown_section(data: Data, rng: np.random.Generator) -> Case:
    key = _pick(rng, ("ppoo", "training", "Env", 1, 1.5, True))
    return Case("unknown section", written({**data, key: {}}), "refused", (str(key), "did you mean|known names"))


def doubled_key(data: Data, rng: np.random.Generator) -> Case:
    section = _pick(rng, SECTIONS)
    if rng.random() < 0.5:
        return Case("doubled section", written({"a": RAW}, "1\nrun: {}\nrun: {}"), "refused", ("'run'", "duplicate"))
    return Case("doubled key", written(put(data, f"{section}.a", RAW), "1\n  a: 2"), "refused", ("'a'", "duplicate"))


def exponent(data: Data, rng: np.random.Generator) -> Case:
    raw, number = _pick(rng, (("1e-4", 1e-4), ("1E-4", 1e-4), ("2e0", 2.0), ("+1e-4", 1e-4), ("1.5e-3", 1.5e-3), (".5e-2", 5e-3)))
    return Case("1e-4", written(put(data, "ppo.learning_rate", RAW), raw), "read", value=("ppo.learning_rate", number))


def exponent_as_text(data: Data, rng: np.random.Generator) -> Case:
    name, field = _any_field(rng, "float")
    return Case("'1e-4'", written(put(data, name, RAW), _pick(rng, ("'1e-4'", '"1e-4"', "!!str 1e-4"))), "refused", (name,), field)


def tricky_text(data: Data, rng: np.random.Generator) -> Case:
    """Text that looks like something else: it must be read as text, and written so that it is read as text again."""
    text = _pick(rng, ("1e5", "1e-4", "3", "0x1F", "true", "no", "null", "~", "1:30", "2001-01-01", "1_000", ".5e3", "-", "=", "<<"))
    if rng.random() < 0.5 and text not in ("-", "~", "=", "<<", ".5e3"):  # names of directories that are not hidden
        return Case("text like a number", written(put(data, "run.name", RAW), f"'{text}'"), "read", value=("run.name", text))
    return Case("text like a number", written(put(data, "env.kwargs", {"a": RAW}), f"'{text}'"), "read", value=("env.kwargs", {"a": text}))


def tag(data: Data, rng: np.random.Generator) -> Case:
    raw = _pick(
        rng,
        (
            "!!python/object/apply:os.system ['touch owned']",
            "!!python/name:os.system ''",
            "!!python/tuple [1, 2]",
            "!!python/object:inchworm.config.sections.PPOConfig {}",
            "!!python/module:os ''",
            "!foreign 3",
        ),
    )
    name, _ = _any_field(rng)
    return Case("tag", written(put(data, name, RAW), raw), "refused", ("tag",))


def alias(data: Data, rng: np.random.Generator) -> Case:
    raw = _pick(rng, ("&a [1]\nextra: *a", "&a 1\nextra: [*a, *a]", "&a {b: 1}\n<<: *a"))
    return Case("alias", written({**data, "first": RAW}, raw), "refused", ("*a",))


def huge(data: Data, rng: np.random.Generator) -> Case:
    name, _ = _any_field(rng, "int")
    raw = str(_pick(rng, HUGE)) if rng.random() < 0.7 else "1" + "0" * int(_pick(rng, (400, 5000)))
    return Case("huge number", written(put(data, name, RAW), raw), "either", (f"{name}|{name.partition('.')[2]}: |digits",))


def wrong_section(data: Data, rng: np.random.Generator) -> Case:
    section, value = _pick(rng, SECTIONS), _pick(rng, (None, 3, "text", [1], [{"gamma": 0.9}], True, 1.5))
    return Case("section of another kind", written({**data, section: value}), "refused", (section, "mapping"))


def wrong_document(data: Data, rng: np.random.Generator) -> Case:
    return Case("no mapping", _pick(rng, (b"", b"3", b"text", b"[1, 2]", b"- env", b"null", b"~", b"# nothing\n")), "refused", ("mapping",))


def broken_text(data: Data, rng: np.random.Generator) -> Case:
    whole = written(data)
    cut = int(rng.integers(len(whole)))
    text = _pick(
        rng,
        (
            b"\tppo: {}",
            b"ppo: {gamma: [}",
            whole[:cut] + b"\x00" + whole[cut:],
            whole[:cut] + b"\xff\xfe" + whole[cut:],
            b"[" * 3000,
            b"{a: " * 2000,
            whole + b"---\n" + whole,
            b"ppo: {gamma: !!float abc}",
            b"run: {name: !!timestamp 2001-13-45}",
            b"run: {name: !!binary zz}",
            b"? [a]\n: b",
        ),
    )
    return Case("no YAML", text, "refused", ("cannot read the config",))


def nested(data: Data, rng: np.random.Generator) -> Case:
    name, value, *words = _pick(
        rng,
        (
            ("env.kwargs", [1], "dictionary|mapping"),
            ("env.kwargs", {1: 2}, "string|text"),
            ("env.kwargs", "a"),
            ("env.wrappers", [1], "mapping"),
            ("env.wrappers", [{"name": 1}], "text"),
            ("env.wrappers", [{}], "name"),
            ("env.wrappers", {"a": "b"}),
            ("env.wrappers", [{"name": "ClipReward", "kw": 1}], "kwargs"),
            ("policy.cnn_filters", [[1, 2]], "is missing"),
            ("policy.cnn_filters", [[1, 2, "x"]], "whole number"),
            ("policy.cnn_filters", [[1, 2, 0]], "1 or more"),
            ("policy.cnn_filters", 3),
        ),
    )
    return Case("nested data", written(put(data, name, value)), "refused", (name, *words))


def not_plain(data: Data, rng: np.random.Generator) -> Case:
    """What YAML can make and no checkpoint can hold."""
    raw = _pick(rng, ("2001-01-01", "!!set {x}", "!!binary aGVsbG8=", "[2001-01-01 10:00:00]", "{b: !!set {y}}"))
    return Case("data that is not plain", written(put(data, "env.kwargs", {"a": RAW}), raw), "refused", ("env.kwargs",))


def at_odds(data: Data, rng: np.random.Generator) -> Case:
    changes, words = _pick(
        rng,
        (
            ({"ppo.num_minibatches": 2, "ppo.minibatch_size": 4}, ("ppo.num_minibatches", "ppo.minibatch_size")),
            ({"ppo.num_minibatches": None, "ppo.minibatch_size": 999}, ("ppo.minibatch_size", "or fewer")),
            ({"ppo.num_minibatches": 999}, ("ppo.num_minibatches", "or fewer")),
            ({"env.num_workers": 99}, ("env.num_workers", "env.num_envs")),
            ({"env.help_workers": True}, ("env.help_workers", "env.num_workers")),
            ({"policy.kind": "lstm", "run.backend": "numpy"}, ("policy.kind=lstm", "run.backend=torch")),
            ({"ppo.sequence_length": 999}, ("ppo.sequence_length", "or less")),
        ),
    )
    for name, value in changes.items():
        data = put(data, name, value)
    return Case("fields at odds", written(data), "refused", words)


def bad_name(data: Data, rng: np.random.Generator) -> Case:
    name = _pick(rng, ("../x", "/abs", "a/b", "a\\b", "", ".", "..", " a", "a\0b", "x" * 300, "a\nb", "\u202eevil"))
    return Case("run name", written(put(data, "run.name", name)), "refused", ("run.name", "letters"))


def in_order(data: Data, rng: np.random.Generator) -> Case:
    prefix, ending = _pick(rng, ((b"", b"\n"), (b"\xef\xbb\xbf", b"\n"), (b"", b"\r\n"), (b"---\n", b"\n")))
    return Case("in order", prefix + written(data).replace(b"\n", ending), "read")


KINDS: tuple[Callable[[Data, np.random.Generator], Case], ...] = (
    *(wrong_type, wrong_type, wrong_type, wrong_range, wrong_range, not_finite, unknown_key, unknown_section, doubled_key, exponent, tag),
    *(
        exponent_as_text,
        tricky_text,
        alias,
        huge,
        wrong_section,
        wrong_document,
        broken_text,
        nested,
        not_plain,
        at_odds,
        bad_name,
        in_order,
    ),
)


def random_case(seed: int, number: int) -> Case:
    """Case `number`; kinds take turns."""
    rng = np.random.default_rng([seed, 4, number])
    return KINDS[number % len(KINDS)](valid_data(rng), rng)
