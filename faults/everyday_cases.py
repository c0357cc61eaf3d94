"""For G4: config files at random, most of them broken on purpose in one known way, with what must become of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from faults.everyday_fields import FIELDS, HUGE, Data, Field, out_of_range, valid_data, wrong_types

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
    """As YAML; `raw` goes where `RAW` stands."""
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
        return Case("doubled section", written({"a": RAW}, "1\nrun: {}\nrun: {}"), "refused", ("'run'", "twice"))
    return Case("doubled key", written(put(data, f"{section}.a", RAW), "1\n  a: 2"), "refused", ("'a'", "twice"))


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
            ("env.wrappers", [{"name": 1}], "string"),
            ("env.wrappers", [{}], "name"),
            ("env.wrappers", {"a": "b"}),
            ("env.wrappers", [{"name": "ClipReward", "kw": 1}], "kwargs"),
            ("policy.cnn_filters", [[1, 2]], "3"),
            ("policy.cnn_filters", [[1, 2, "x"]], "integer"),
            ("policy.cnn_filters", [[1, 2, 0]], "from 1 to 10000"),
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
            ({"ppo.sequence_length": 999}, ("ppo.sequence_length", "from 1 to")),
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
