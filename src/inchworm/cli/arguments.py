"""From words on the command line to options and configs; wrong use becomes one line. Serves every command.

`tyro` reads the flags from the config types, so that a flag, its type and its help are written once, under the config's field.
"""

from __future__ import annotations

import dataclasses
import difflib
import io
import typing
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, TypeVar

import tyro
import yaml

from inchworm.config.presets import config_for
from inchworm.config.reading import load_yaml
from inchworm.config.sections import TrainingConfig
from inchworm.core.errors import ConfigError
from inchworm.run.directory import load_config

Options = TypeVar("Options")

YAML_FLAGS = {"--env.kwargs": "{gravity: 5}", "--env.wrappers": "[{name: ClipReward, kwargs: {min_reward: -1}}]"}
"""Flags that take plain data of any shape, as YAML, with an example each."""

SHORT_FLAGS = {
    "--backend": "--run.backend",
    "--seed": "--run.seed",
    "--total-timesteps": "--run.total-timesteps",
    "--num-envs": "--env.num-envs",
    "--num-workers": "--env.num-workers",
    "--compile": "--ppo.compile",
}
"""What is typed most, without its section."""


class UsageError(ConfigError):
    """A command line that cannot be understood."""


def spelled_out(arguments: Sequence[str]) -> list[str]:
    """The arguments with every short flag in full."""
    words = [argument.partition("=") for argument in arguments]
    return [f"{SHORT_FLAGS.get(flag.replace('_', '-'), flag)}{equals}{value}" for flag, equals, value in words]


def _switched(options: type[Any], arguments: Sequence[str]) -> list[str]:
    """The arguments with `--a.switch true` (or `=true`) as `--a.switch`, and with `false` as `--a.no-switch`."""
    switches = {flag for flag, kind in flags_of(options).items() if kind == "switch"}
    result: list[str] = []
    for argument in arguments:
        before = result[-1].replace("_", "-") if result else ""
        flag, equals, value = argument.partition("=")
        name = flag.replace("_", "-") if equals else before
        value = (value if equals else argument).lower()
        if name not in switches or value not in ("true", "false"):
            result.append(argument)
            continue
        head, dot, last = name.removeprefix("--").rpartition(".")
        result[len(result) if equals else -1 :] = [name if value == "true" else f"--{head}{dot}no-{last}"]
    return result


def parse(options: type[Options], arguments: Sequence[str], prog: str, default: Options | None = None) -> Options:
    """The options that `arguments` give, over the defaults."""
    arguments, complaints = _switched(options, arguments), io.StringIO()
    try:
        with redirect_stderr(complaints):
            if default is None:
                return tyro.cli(options, prog=prog, args=arguments)
            return tyro.cli(options, prog=prog, args=arguments, default=default)
    except SystemExit as end:
        if end.code in (0, None):  # the help was asked for and has been printed
            raise
        raise UsageError(_one_line(complaints.getvalue(), list(flags_of(options)), prog)) from None


def _one_line(box: str, flags: Sequence[str], prog: str) -> str:
    """What tyro's box of several lines says, in one."""
    message = _first_paragraph(box)
    strangers = message.removeprefix("Unrecognized options: ").split(", ")
    if message.startswith("Unrecognized"):
        flag = next((word for word in strangers if word.startswith("-")), None)
        near = None if flag is None else _nearest(flag, flags)
        if near is not None:
            return f"unknown flag {flag}; did you mean {near}?"
        message = f"unexpected argument {strangers[0]}" if flag is None else f"unknown flag {flag}"
    message = message.removeprefix("Error parsing ").rstrip(".")
    return f"{message[:1].lower()}{message[1:]}; {prog} --help lists all flags"


def _first_paragraph(box: str) -> str:
    """The text between the title and the next rule. Where the output is not UTF-8, the box has a rule under its title and no sides."""
    paragraphs: list[list[str]] = [[]]
    for line in box.splitlines():
        inner = line.strip("│ \t")
        if line.startswith(("╭", "╰")) or (inner and not inner.strip("─-")):
            paragraphs.append([])
        else:
            paragraphs[-1] += inner.split()
    return " ".join(paragraphs[1] if len(paragraphs) > 1 else paragraphs[0])


def _nearest(flag: str, flags: Sequence[str]) -> str | None:
    """The flag that was probably meant: the same last word (`--seed` for `--run.seed`), else the most similar one."""
    wanted = flag.partition("=")[0].replace("_", "-")
    same_word = [known for known in flags if known.rpartition(".")[2] == wanted.lstrip("-")]
    in_run = [known for known in same_word if known.startswith("--run.")]
    near = in_run or same_word or difflib.get_close_matches(wanted, flags, n=1, cutoff=0.5)
    return near[0] if near else None


def flags_of(options: type[Any], prefix: str = "--") -> dict[str, str]:
    """Every flag of an options class, as flag -> `switch` (no value), `many` (values up to the next flag) or `one`.

    The flags of a field named `settings` have no prefix of their own.
    """
    flags: dict[str, str] = {}
    plain, annotated = typing.get_type_hints(options), typing.get_type_hints(options, include_extras=True)
    for field in dataclasses.fields(options):
        name, hint = field.name.replace("_", "-"), plain[field.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            flags |= flags_of(hint, prefix if field.name == "settings" else f"{prefix}{name}.")
        elif hint is bool:
            flags |= {f"{prefix}{name}": "switch", f"{prefix}no-{name}": "switch"}
        elif tyro.conf.Positional not in typing.get_args(annotated[field.name])[1:]:
            flags[f"{prefix}{name}"] = "many" if typing.get_origin(hint) is tuple else "one"
    return flags


def split(options: type[Any], arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The arguments that belong to no flag, and the value of each flag that has one; a first look, before the defaults are known."""
    kinds = flags_of(options) | dict.fromkeys(YAML_FLAGS, "one")
    positional: list[str] = []
    values: dict[str, str] = {}
    waiting, kind = "", ""
    for argument in _switched(options, arguments):
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            waiting = flag.replace("_", "-")
            kind = "" if equals else kinds.get(waiting, "one")
            if equals:
                values[waiting] = value
        elif kind in ("one", "many"):
            values[waiting] = argument
            kind = "many" if kind == "many" else ""
        elif not argument.startswith("-"):
            positional.append(argument)
    return positional, values


def config_from(options: type[Any], arguments: Sequence[str], prog: str) -> TrainingConfig:
    """The config that the flags change: of `--config FILE`, else the environment's preset, else the defaults."""
    positional, values = split(options, arguments)
    env = positional[0] if positional else values.get("--env.id")
    file = values.get("--config")
    if env is None and file is None:
        if asks_for_help(arguments):
            return TrainingConfig()
        raise UsageError(f"no environment is given; type: {prog} CartPole-v1, or {prog} --config FILE")
    if env is not None and values.get("--env.id", env) != env:
        raise UsageError(f"{env} and --env.id {values['--env.id']} name two environments; give one")
    if file is not None:
        config = load_config(Path(file), env=env, allow=f"{prog} {{id}} --config {file}")
    else:
        config = config_for(str(env))
    return config if env is None else config.replace(env=config.env.replace(id=env))


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Whether `-h` or `--help` is among the arguments."""
    return "-h" in arguments or "--help" in arguments


def parse_over(options: type[Options], arguments: Sequence[str], prog: str, config: TrainingConfig) -> Options:
    """Options whose field `settings` is a whole config: `config`, changed by the flags.

    What tyro has no flags for (`env.kwargs`, `env.wrappers`) is taken out before it looks and put back afterwards.
    """
    rest, config = take_yaml_flags(arguments, config)
    config = _without_rivals(config, split(options, rest)[1], central="--policy.central-critic" in _switched(options, rest))
    bare = config.replace(env=config.env.replace(kwargs={}, wrappers=()))
    with_defaults: Any = options
    parsed: Any = parse(options, rest, prog, with_defaults(settings=bare))
    settings = parsed.settings
    env = settings.env.replace(kwargs=config.env.kwargs, wrappers=config.env.wrappers)
    return typing.cast(Options, dataclasses.replace(parsed, settings=settings.replace(env=env)))


def _without_rivals(config: TrainingConfig, given: Mapping[str, str], *, central: bool) -> TrainingConfig:
    """Of two fields that cannot both be, the one on the command line takes the place of the one in the config."""
    needs_torch = central or given.get("--policy.kind") in ("lstm", "gru")
    if needs_torch and "--run.backend" not in given:  # presets of small worlds learn in NumPy
        config = config.replace(run=config.run.replace(backend="torch"))
    by_number, by_size = "--ppo.num-minibatches" in given, "--ppo.minibatch-size" in given
    if by_number and not by_size:
        return config.replace(ppo=config.ppo.replace(minibatch_size=None))
    return config.replace(ppo=config.ppo.replace(num_minibatches=None)) if by_size and not by_number else config


def take_yaml_flags(arguments: Sequence[str], config: TrainingConfig) -> tuple[list[str], TrainingConfig]:
    """`--env.kwargs '{gravity: 5}'` and the like put into the config, and the arguments without them."""
    rest: list[str] = []
    pending = list(arguments)
    while pending:
        argument = pending.pop(0)
        flag, equals, value = argument.partition("=")
        if flag not in YAML_FLAGS:
            rest.append(argument)
            continue
        if not equals:
            if not pending:
                raise UsageError(f"{flag} needs a value in YAML, such as {flag} '{YAML_FLAGS[flag]}'")
            value = pending.pop(0)
        config = _with_yaml(config, flag, value)
    return rest, config


def _with_yaml(config: TrainingConfig, flag: str, text: str) -> TrainingConfig:
    try:
        value = load_yaml(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{flag} {text!r} is no YAML: {' '.join(str(error).split())}") from None
    data = config.to_dict()
    data["env"][flag.removeprefix("--env.")] = value
    return TrainingConfig.from_dict(data)
