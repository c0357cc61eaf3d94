"""Random config files for G4, most of them invalid in one known way, with the expected result of each.

The allowed values of every field are repeated here, independently of the config classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
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
    """Of a choice, or known texts; for an int, words that are allowed instead."""
    empty: bool = False
    """Whether null is allowed."""
    usual: tuple[Any, ...] = ()
    """Valid values to draw from, small enough to run."""


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
    "ppo.optimizer": Field("choice", options=("adam", "adamw", "rmsprop", "sgd", "muon"), usual=("adam", "rmsprop", "sgd")),
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
    "ppo.scale_rewards": _FLAG,
    "ppo.clip_vloss": _FLAG,
    "ppo.vf_clip_coef": _float(0, 0.0, 0.1, empty=True),
    "ppo.target_kl": _float(0, 0.01, 0.1, above=True, empty=True),
    "ppo.adam_eps": _float(0, 1e-8, 1e-5, above=True),
    "ppo.weight_decay": _float(0, 0.0, 0.01),
    "ppo.learning_rate_schedule": Field("choice", options=(*_SCHEDULE.options, "adaptive"), usual=_SCHEDULE.options),
    "ppo.desired_kl": _float(0, 0.01, 0.02, above=True),
    "ppo.min_learning_rate": _float(0, 1e-6, 1e-5, above=True),
    "ppo.max_learning_rate": _float(0, 1e-2, 0.1, above=True),
    "ppo.clip_schedule": _SCHEDULE,
    "ppo.ent_schedule": _SCHEDULE,
    "ppo.sequence_length": _int(1, 1, words=("auto",)),
    "ppo.max_staleness": _int(0, 0, 3, empty=True),
    "ppo.min_effective_sample_size": _float(0, 0.0, 0.5, high=1, empty=True),
    "ppo.max_behavior_kl": _float(0, 0.1, 1.0, above=True, empty=True),
    "ppo.correction": _choice("off", "vtrace"),
    "ppo.vtrace_clip": _float(0, 1.0, 2.0, above=True),
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
    "env.jax_native": _FLAG,
    "run.report": _FLAG,
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
    "policy.lstm_forget_bias": Field("float", -20, 20, usual=(0.0, 1.0)),
    "policy.central_critic": Field("bool", usual=(False,)),  # it needs a world with state()
    "collect.max_replay_steps": _int(0, 0, 10, 100_000),
    "collect.timeout": _float(0, 60.0, 600.0, high=1_000_000, above=True),
    "collect.restarts": _int(0, 0, 10),
    "curriculum.mode": Field("choice", options=("none", "progress", "adaptive", "learning_progress"), usual=("none",)),
    "curriculum.max_level": _int(1, 3, high=10_000),
    "curriculum.start_level": _int(1, 1, high=10_000),
    "curriculum.option": Field("text", usual=("difficulty",)),
    "curriculum.promote": _float(0, 0.8, 1.0, high=1),
    "curriculum.demote": _float(0, 0.0, 0.3, high=1),
    "curriculum.window": _int(2, 2, 50, high=1_000_000),
    "curriculum.success_return": Field("float", empty=True, usual=(None, 100.0)),
    "curriculum.explore": _float(0, 0.0, 0.2, high=1),
    "curriculum.evaluation_level": _int(1, None, 1, high=10_000, empty=True),
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
    "evaluation.max_episode_steps": _int(1, None, 5, 50, empty=True),
    "evaluation.baseline": Field("text", empty=True, usual=(None, "random")),
    "evaluation.save_replay": Field("bool", usual=(False,)),
    "evaluation.keep_replays": _int(1, 1, 5),
    "convergence.target": Field("float", empty=True, usual=(None,)),
    "convergence.window": _int(1, 1, 100),
    "convergence.patience": _int(1, 1, 3),
    "convergence.returns": _choice("training", "evaluation"),
    "convergence.stop": _FLAG,
    "run.name": Field("text", empty=True, usual=(None,)),
    "run.directory": Field("text", usual=("runs",)),
    "run.seed": _int(0, 0, 1, 12345),
    "run.total_timesteps": _int(1, 1),
    "run.max_iterations": _int(1, 2, empty=True),
    "run.max_episodes": _int(1, empty=True),
    "run.backend": Field("text", options=("torch", "numpy"), usual=("torch", "numpy")),  # backends can be registered
    "run.device": Field("text", usual=("cpu", "auto")),
    "run.threads": _int(0, 0, 1),
    "run.checkpoint_interval": _int(0, 0, 1, 2),
    "run.checkpoint_seconds": _float(0, 0.0, 300.0, empty=True),
    "run.keep_checkpoints": _int(2, 2, 3),
    "run.keep_best": _FLAG,
    "run.log_interval": _int(1, 1, 2),
    "run.init_from": Field("text", empty=True, usual=(None,)),
    "run.rank_timeout": _float(0, 60.0, 1800.0, high=1_000_000, above=True),
    "run.notes": Field("text", usual=("", "why: to see")),
    "tracking.csv": Field("bool", usual=(False,)),  # one that is on starts a process
    "tracking.tensorboard": Field("bool", usual=(False,)),
    "tracking.finish_seconds": _float(0, 0.0, 30.0, high=1_000_000),
}
OTHERS = (
    *("env.kwargs", "env.wrappers", "policy.cnn_filters", "opponent.anchors", "opponent.policies"),
    *("ppo.freeze", "run.init_weights", "evaluation.seeds", "tracking.wandb", "tracking.mlflow"),
    *("curriculum.levels", "curriculum.milestones", "curriculum.opponent_skills", "ppo.proximal_decay"),
    *("collect.engine", "collect.num_collectors", "collect.staleness", "collect.keep_infos"),
    *("collect.ray_address", "collect.ray_cpus", "collect.ray_memory", "collect.ray_resources", "collect.ray_strategy"),
)
"""Fields of nested data or of lists of text, and fields that depend on others, which have separate cases or tests."""

WORDS = {"float": ("number",), "int": ("integer",), "bool": ("true or false",), "text": ("text",), "ints": ("list", "integer")}
"""Kind -> words of which one must be in the error for a value of another type."""
WRONG_TYPES: dict[str, tuple[Any, ...]] = {
    "float": ("0.5", "abc", "", True, False, [0.5], {"a": 1}),
    "int": ("3", 1.5, True, [3], {"a": 1}),
    "bool": (0, 1, "true", "yes", 0.0, [True]),
    "text": (3, 1.5, True, ["a"], {"a": "b"}),
    "ints": (3, "64", [1.5], ["a"], [[4]], {"a": 1}, [True]),
    "choice": ("", "Tanh", "nope", 1.5, 77, [], {}, ["a"]),
}


def out_of_range(field: Field) -> list[Any]:
    """Values of the right type beyond a bound."""
    if field.kind == "float" and field.low is None:
        return []
    if field.kind == "float":
        low = -1e-9 if field.low == 0 else (field.low or 0.0) - 0.1
        return [low, -1e30, *([0.0] if field.above else []), *([] if field.high is None else [field.high + 1e-6, 1e30])]
    if field.kind == "int":
        return [int(field.low or 0) - 1, -(10**30), *([] if field.high is None else [field.high + 1])]
    return [[0], [4, -1], [-(10**30)]] if field.kind == "ints" else []


def says_what_is_allowed(field: Field, message: str) -> bool:
    """Whether an error names the allowed values of a field: its choices, its bounds, or its type."""
    choices = bool(field.options) and all(str(option) in message for option in field.options)
    limits = [str(int(limit)) if limit == int(limit) else str(limit) for limit in (field.low, field.high) if limit is not None]
    bounds = any(f"must be {limit} or" in message for limit in limits) or "must be above 0" in message
    return choices or bounds or any(word in message for word in WORDS.get(field.kind, ()))


def valid_data(rng: np.random.Generator, *, share: float = 0.3) -> Data:
    """A valid config: usual values in a share of the fields, small enough to run."""
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
"""Placeholder in the YAML for text that no YAML writer would produce."""
SECTIONS = ("env", "policy", "ppo", "collect", "evaluation", "run")


@dataclass(frozen=True)
class Case:
    """A config file and the expected result of reading it."""

    what: str
    text: bytes
    outcome: str
    """`refused`, `read`, or `either`."""
    words: tuple[str, ...] = ()
    """All of these must be in the error."""
    field: Field | None = None
    """Field whose allowed values the error must name."""
    value: tuple[str, Any] | None = None
    """A field and its value once the file is read."""


def written(data: Data, raw: str = "") -> bytes:
    """The data as YAML, with `raw` in place of `RAW`."""
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True).replace(RAW, raw).encode("utf-8", "surrogatepass")


def put(data: Data, name: Any, value: Any) -> Data:
    """A copy of the data with another field ("section.key") or another section."""
    if not isinstance(name, str) or "." not in name:
        return {**data, name: value}
    section, key = name.split(".")
    return {**data, section: {**data.get(section, {}), key: value}}


@dataclass(frozen=True)
class Change:
    """One way to change a valid config; the other fields are those of `Case`."""

    what: str
    changes: dict[Any, Any]
    words: tuple[str, ...] = ()
    raw: str = ""
    outcome: str = "refused"
    field: Field | None = None
    value: tuple[str, Any] | None = None
    rewrite: Callable[[bytes, int], bytes] = lambda text, place: text
    """Change of the file's text; the second argument is a random place in it."""


def _field_changes() -> Iterator[Change]:
    """Every field with values that it does not allow."""
    tags = ("!!python/object/apply:os.system ['touch owned']", "!!python/name:os.system ''", "!!python/tuple [1, 2]", "!foreign 3")
    tags += ("!!python/object:inchworm.config.sections.PPOConfig {}", "!!python/module:os ''")
    for name, field in FIELDS.items():
        section, key = name.split(".")
        unknown = ["", "nope"] if field.kind == "text" and field.options else []
        for value in (*WRONG_TYPES[field.kind], *unknown, *([] if field.empty else [None])):
            yield Change("wrong type", {name: value}, (name,), field=field)
        for value in out_of_range(field):
            yield Change("out of range", {name: value}, (name,), field=field)
        for typo in (
            key[: len(key) // 2] + key[len(key) // 2 + 1 :],
            key + "x",
            key.upper(),
            key.replace("_", "-") + "-",
            "zzz",
            "é世",
            "a b",
        ):
            yield Change("unknown key", {f"{section}.{typo}": 1}, (f"{section}.{typo}", "did you mean|known names"))
        for raw in (".nan", ".NaN", ".inf", "-.inf") if field.kind in ("float", "int") else ():
            yield Change("not finite", {name: RAW}, (name,), raw, field=field)
        for raw in ("'1e-4'", '"1e-4"', "!!str 1e-4") if field.kind == "float" else ():
            yield Change("'1e-4'", {name: RAW}, (name,), raw, field=field)
        for raw in (*map(str, HUGE), "1" + "0" * 400, "1" + "0" * 5000) if field.kind == "int" else ():
            yield Change("huge number", {name: RAW}, (f"{name}|{key}: |digits",), raw, "either")
        for raw in tags:
            yield Change("tag", {name: RAW}, ("tag",), raw)


def _other_changes() -> Iterator[Change]:
    """Sections, nested data, contradictions, and text that is not YAML."""
    for key in ("ppoo", "training", "Env", 1, 1.5, True):
        yield Change("unknown section", {key: {}}, (str(key), "did you mean|known names"))
    for section, value in product(SECTIONS, (None, 3, "text", [1], [{"gamma": 0.9}], True, 1.5)):
        yield Change("section of another type", {section: value}, (section, "mapping"))
    yield Change("duplicate key", {"a": RAW}, ("'run'", "duplicate"), "1\nrun: {}\nrun: {}")
    for section in SECTIONS:
        yield Change("duplicate key", {f"{section}.a": RAW}, ("'a'", "duplicate"), "1\n  a: 2")
    numbers = {"1e-4": 1e-4, "1E-4": 1e-4, "2e0": 2.0, "+1e-4": 1e-4, "1.5e-3": 1.5e-3, ".5e-2": 5e-3}
    for raw, number in numbers.items():
        yield Change("1e-4", {"ppo.learning_rate": RAW}, raw=raw, outcome="read", value=("ppo.learning_rate", number))
    # Text that looks like something else must be read as text, and written so that it is read as text again.
    for text in ("1e5", "1e-4", "3", "0x1F", "true", "no", "null", "~", "1:30", "2001-01-01", "1_000", ".5e3", "-", "=", "<<"):
        kwargs = ("env.kwargs", {"a": text})
        yield Change("text like a number", {"env.kwargs": {"a": RAW}}, raw=f"'{text}'", outcome="read", value=kwargs)
        if text not in ("-", "~", "=", "<<", ".5e3"):  # names of directories that are not hidden
            yield Change("text like a number", {"run.name": RAW}, raw=f"'{text}'", outcome="read", value=("run.name", text))
    for raw in ("&a [1]\nextra: *a", "&a 1\nextra: [*a, *a]", "&a {b: 1}\n<<: *a"):
        yield Change("alias", {"first": RAW}, ("*a",), raw)
    for raw in ("2001-01-01", "!!set {x}", "!!binary aGVsbG8=", "[2001-01-01 10:00:00]", "{b: !!set {y}}"):
        yield Change("data that no checkpoint can hold", {"env.kwargs": {"a": RAW}}, ("env.kwargs",), raw)
    for text in ("../x", "/abs", "a/b", "a\\b", "", ".", "..", " a", "a\0b", "x" * 300, "a\nb", "\u202eevil"):
        yield Change("run name", {"run.name": text}, ("run.name", "letters"))
    nested: tuple[tuple[str, Any, str], ...] = (
        ("env.kwargs", [1], "dictionary|mapping"),
        ("env.kwargs", {1: 2}, "string|text"),
        ("env.kwargs", "a", ""),
        ("env.wrappers", [1], "mapping"),
        ("env.wrappers", [{"name": 1}], "text"),
        ("env.wrappers", [{}], "name"),
        ("env.wrappers", {"a": "b"}, ""),
        ("env.wrappers", [{"name": "ClipReward", "kw": 1}], "kwargs"),
        ("policy.cnn_filters", [[1, 2]], "is missing"),
        ("policy.cnn_filters", [[1, 2, "x"]], "integer"),
        ("policy.cnn_filters", [[1, 2, 0]], "1 or more"),
        ("policy.cnn_filters", 3, ""),
    )
    for name, value, word in nested:
        yield Change("nested data", {name: value}, (name, word))
    contradictions: tuple[tuple[dict[str, Any], str, str], ...] = (
        ({"ppo.num_minibatches": 2, "ppo.minibatch_size": 4}, "ppo.num_minibatches", "ppo.minibatch_size"),
        ({"env.num_workers": 99}, "env.num_workers", "env.num_envs"),
        ({"env.help_workers": True}, "env.help_workers", "env.num_workers"),
        ({"policy.kind": "lstm", "run.backend": "numpy"}, "policy.kind=lstm", "run.backend=torch"),
        ({"ppo.sequence_length": 999}, "ppo.sequence_length", "or less"),
    )
    for changes, *words in contradictions:
        yield Change("contradiction", changes, tuple(words))
    for document in (b"", b"3", b"text", b"[1, 2]", b"- env", b"null", b"~", b"# nothing\n"):
        yield Change("not a mapping", {}, ("mapping",), rewrite=lambda text, place, document=document: document)
    broken = (b"\tppo: {}", b"ppo: {gamma: [}", b"[" * 3000, b"{a: " * 2000, b"ppo: {gamma: !!float abc}", b"? [a]\n: b")
    for document in (*broken, b"run: {name: !!timestamp 2001-13-45}", b"run: {name: !!binary zz}"):
        yield Change("not YAML", {}, ("cannot read the config",), rewrite=lambda text, place, document=document: document)
    for piece in (b"\x00", b"\xff\xfe"):
        put_in: Any = lambda text, place, piece=piece: text[:place] + piece + text[place:]  # noqa: E731
        yield Change("not YAML", {}, ("cannot read the config",), rewrite=put_in)
    yield Change("not YAML", {}, ("cannot read the config",), rewrite=lambda text, place: text + b"---\n" + text)
    for prefix, ending in ((b"", b"\n"), (b"\xef\xbb\xbf", b"\n"), (b"", b"\r\n"), (b"---\n", b"\n")):
        yield Change("valid", {}, outcome="read", rewrite=lambda text, place, p=prefix, e=ending: p + text.replace(b"\n", e))


CHANGES: dict[str, list[Change]] = {}
for _change in (*_field_changes(), *_other_changes()):
    CHANGES.setdefault(_change.what, []).append(_change)
TURNS = (*CHANGES, "wrong type", "wrong type", "out of range")
"""Kinds of changes in the order in which they take turns; wrong values are tried more often."""


def random_case(seed: int, number: int) -> Case:
    """Case `number`; the kinds of changes take turns."""
    rng = np.random.default_rng([seed, 4, number])
    data, choices = valid_data(rng), CHANGES[TURNS[number % len(TURNS)]]
    change = choices[int(rng.integers(len(choices)))]
    for name, value in change.changes.items():
        data = put(data, name, value)
    text = written(data, change.raw)
    text = change.rewrite(text, int(rng.integers(len(text))))
    return Case(change.what, text, change.outcome, change.words, change.field, change.value)
