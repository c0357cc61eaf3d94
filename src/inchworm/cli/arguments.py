"""Command-line arguments: one flag for each field of a command's options and, where a command has one, of its config.

A flag's type, default and help come from its field; values are validated by the class that the field belongs to. A flag of another trainer
(CleanRL, Stable-Baselines3 and its zoo, …) is answered with what it is called here, or why there is none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import shlex
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml

from inchworm.config.legacy import current_name
from inchworm.config.presets import SIZES
from inchworm.config.reading import ConfigBase, as_whole, config_class, field_docs, load_yaml
from inchworm.config.sections import Count, EnvConfig, RoleConfig, TrainingConfig
from inchworm.core.errors import ConfigError, CorruptFileError, EnvError, MissingExtraError, close_names, env_errors
from inchworm.env.make import make_env
from inchworm.env.pettingzoo_copy import is_team_env
from inchworm.env.registry import config_for, is_vector_only, team_worlds, vectorised
from inchworm.env.restore import Env
from inchworm.policy.file import read_policy_file
from inchworm.run.directory import Run, load_config, open_run

OptionsT = TypeVar("OptionsT", bound=ConfigBase)
Changes = dict[str, dict[str, Any]]
"""Values given on the command line, by section and field of the config."""

SWITCHES = (bool, bool | None)
"""Types of flags that may stand alone; without it, an optional one is null."""
SHORT_FLAGS = ("run.backend", "run.seed", "run.total_timesteps", "env.num_envs", "env.num_workers", "ppo.compile")
"""Fields whose flags may be typed without the section."""


class UsageError(ConfigError):
    """A command line that cannot be understood."""


@dataclass(frozen=True)
class Metavar:
    """The name of a field's value in help texts; a positional field is given without a flag, a repeated one as often as one likes."""

    name: str
    positional: bool = False
    repeated: bool = False


ENV = Metavar("ENV", positional=True)
RunName = Annotated[str, Metavar("RUN", positional=True)]
File = Annotated[str | None, Metavar("FILE")]
Preset = Literal["small", "medium", "large"] | None


@dataclass(frozen=True)
class _Flag:
    path: tuple[str, ...]
    """The field: ("quiet",) of the options, ("ppo", "gamma") of a section."""
    owner: type[ConfigBase]
    hint: Any
    default: Any
    metavar: Metavar | None = None

    @property
    def names(self) -> list[str]:
        """The flag, then its negation if it is a switch, or its short form."""
        *section, last = (part.replace("_", "-") for part in self.path)
        name = "--" + ".".join([*section, last])
        if self.hint in SWITCHES:
            return [name, "--" + ".".join([*section, f"no-{last}"])]
        return [name, f"--{last}"] if ".".join(self.path) in SHORT_FLAGS else [name]

    @property
    def takes(self) -> Literal["switch", "yaml", "many", "one"]:
        """What follows the flag."""
        if self.hint in SWITCHES:
            return "switch"
        origin, inner = typing.get_origin(self.hint), typing.get_args(self.hint)
        if origin is tuple:
            return "yaml" if isinstance(inner[0], type) and issubclass(inner[0], ConfigBase) else "many"
        return "yaml" if dict in (origin, *map(typing.get_origin, inner)) else "one"


def parse(options: type[OptionsT], arguments: Sequence[str], prog: str) -> OptionsT:
    """Return a command's options."""
    own, sections = _read(_flags(options()), options, arguments, prog)
    return options(**own, **sections)


def parse_with_config(options: type[OptionsT], arguments: Sequence[str], prog: str) -> tuple[OptionsT, Changes]:
    """Return a command's options, and the changes to the config that other flags ask for.

    Defaults in the help text are those of the environment's preset if the environment is the first argument.
    """
    flags = _flags(options())
    env = arguments[0] if arguments and flags[0].metavar == ENV and not arguments[0].startswith("-") else ""
    own, changes = _read(flags + _flags(config_for(env) if env else TrainingConfig()), options, arguments, prog)
    return options(**own), changes


def _flags(config: ConfigBase, section: tuple[str, ...] = ()) -> list[_Flag]:
    """List the flags of a config, with its values as defaults; fields that are configs themselves are sections."""
    flags: list[_Flag] = []
    plain, annotated = typing.get_type_hints(type(config)), typing.get_type_hints(type(config), include_extras=True)
    for field in dataclasses.fields(typing.cast(Any, config)):
        value, path = getattr(config, field.name), (*section, field.name)
        if isinstance(value, ConfigBase):
            flags += _flags(value, path)
        else:
            metavar = [extra for extra in getattr(annotated[field.name], "__metadata__", ()) if isinstance(extra, Metavar)]
            flags.append(_Flag(path, type(config), plain[field.name], value, *metavar))
    return flags


def _read(flags: list[_Flag], options: type[ConfigBase], arguments: Sequence[str], prog: str) -> tuple[dict[str, Any], Changes]:
    """Return the values that are given for the fields of the options, and for those of sections."""
    if "-h" in arguments or "--help" in arguments:
        sys.stdout.write(_help(flags, options, prog))
        raise SystemExit(0)
    positional = [flag for flag in flags if flag.metavar is not None and flag.metavar.positional]
    by_name = {name: flag for flag in flags if flag not in positional for name in flag.names}
    own: dict[str, Any] = {}
    sections: Changes = {}
    words = list(arguments)
    while words:
        name, equals, value = words.pop(0).partition("=")
        typed, name = name, name.replace("_", "-") if name.startswith("--") else name + equals + value
        if not name.startswith("-") or name == "-":
            if not positional:
                raise UsageError(f"unexpected argument {name}; {prog} --help lists all flags")
            flag = positional[0] if positional[0].takes == "many" else positional.pop(0)
            own[flag.path[0]] = [*own.get(flag.path[0], ()), name] if flag.takes == "many" else name
            continue
        role_flag = _role_flag(typed, by_name)
        if role_flag is None and name not in by_name:
            same_word = [known for known in by_name if known.rpartition(".")[2] == name.lstrip("-")]  # `--run.threads` for `--threads`
            in_run = [known for known in same_word if known.startswith("--run.")]
            elsewhere = None if same_word else explain_other_flag(name, set(by_name))
            fields = {known.rpartition(".")[2].lstrip("-"): known for known in by_name}  # `--ppo.clip-coef` for `--clip-cof`
            near = in_run or same_word or close_names(name, by_name)
            if not near and not any(known.startswith(name) for known in by_name):  # one of a section's flags would be a guess
                near = [fields[one] for one in close_names(name.lstrip("-"), fields)]
            help_text = f"did you mean {near[0]}?" if near else f"{prog} --help lists all flags"
            raise UsageError(f"unknown flag {name}; {elsewhere or help_text}")
        flag = role_flag or by_name[name]
        given = [value] if equals else []
        while not equals and words and not words[0].startswith("--") and (flag.takes == "many" or not given):
            if flag.takes == "switch" and words[0].lower() not in ("true", "false"):
                break
            given.append(words.pop(0))
        target: dict[str, Any] = own if flag.owner is options else sections
        for part in flag.path[:-1]:
            target = target.setdefault(part, {})
        kept = target.get(flag.path[-1], ()) if flag.metavar is not None and flag.metavar.repeated else ()
        value = _value(flag, name, given, prog)
        target[flag.path[-1]] = [*kept, *value] if kept else value
    return own, sections


def _role_flag(name: str, by_name: Mapping[str, _Flag]) -> _Flag | None:
    """The flag of a setting of one of several policies: --policies.scouts.agents, --policies.scouts.ppo.learning-rate."""
    first, role, setting = [*name.split(".", 2), "", ""][:3]
    if first != "--policies" or not role:
        return None
    own = {f"--{flag.path[0]}": flag for flag in _flags(RoleConfig())}
    of_sections = {known: flag for known, flag in by_name.items() if flag.path[0] in ("policy", "ppo")}
    like = (own | of_sections).get(f"--{setting.replace('_', '-')}")
    return None if like is None else dataclasses.replace(like, path=("policies", role, *like.path))


def _value(flag: _Flag, name: str, words: list[str], prog: str) -> Any:
    """Convert the words after a flag to plain data. A word of the wrong type stays text, which validation refuses by the field's name."""
    if flag.takes == "switch":
        word = (words or ["true"])[0].lower()
        if word not in ("true", "false"):
            raise UsageError(f"{name}={words[0]} must be true or false")
        return (word == "true") == (name != flag.names[1])
    if flag.takes == "many" and len(words) == 1 and words[0].startswith("["):  # a list in YAML, as in a config file
        return _from_yaml(name, words[0])
    if flag.takes == "many":
        item = typing.get_args(flag.hint)[0]
        size = len(typing.get_args(item))  # of tuples in a tuple, which are given one after the other
        values = [_convert(typing.get_args(item)[0] if size else item, word) for word in words]
        return [values[start : start + size] for start in range(0, len(values), size)] if size else values
    if not words:
        raise UsageError(f"{name} needs a value{' in YAML' if flag.takes == 'yaml' else ''}; {prog} --help lists all flags")
    if flag.takes == "one":
        return _convert(flag.hint, words[0])
    return _from_yaml(name, words[0])


def _from_yaml(name: str, word: str) -> Any:
    try:
        return load_yaml(word)
    except yaml.YAMLError as error:
        raise UsageError(f"{name} {word!r} is not valid YAML: {' '.join(str(error).split())}") from None


def _convert(hint: Any, word: str) -> Any:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union else (hint,)
    if types.NoneType in kinds and word in ("None", "none", "null"):
        return None
    for kind in (int, float):
        if kind in kinds:
            with suppress(ValueError):
                return kind(word)
    if int in kinds:
        with suppress(ValueError):
            return as_whole(float(word))  # 1e6
    return word


def _help(flags: list[_Flag], options: type[ConfigBase], prog: str) -> str:
    """Return the help text of a command: its description, then its flags by section."""
    width = min(shutil.get_terminal_size().columns, 120)
    positional = " ".join(flag.metavar.name for flag in flags if flag.metavar is not None and flag.metavar.positional)
    lines = [f"usage: {prog} {positional} [flags]", ""]
    for paragraph in str(inspect.getdoc(options)).split("\n\n"):
        lines += [*textwrap.wrap(paragraph, width), ""]
    docs: dict[type, dict[str, str]] = {}
    for flag in flags:
        if flag.owner not in docs:
            docs[flag.owner] = field_docs(flag.owner)
            if flag.owner is not options:
                section = ".".join(flag.path[:-1]) or flag.path[0]
                lines += ["", f"{section}: {inspect.getdoc(RoleConfig if flag.owner is TrainingConfig else flag.owner)}"]
        metavar = flag.metavar or Metavar(_metavar(flag.hint) if flag.takes != "yaml" else "YAML")
        names = "" if metavar.positional else ", ".join(flag.names) + " "
        is_empty = flag.default is False or flag.default in ("", None, (), {})
        default = "" if is_empty else f" (default: {_as_typed(flag.default)})"
        lines.append(f"  {names}{metavar.name}".rstrip())
        lines += textwrap.wrap(docs[flag.owner][flag.path[-1]] + default, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines) + "\n"


def _metavar(hint: Any) -> str:
    """Name a type in help texts: `FLOAT`, `INT|auto`, `INT …`."""
    inner = typing.get_args(hint)
    if hint in SWITCHES:
        return ""
    if not inner:
        return {str: "TEXT", int: "INT", float: "FLOAT"}.get(hint, "null")
    if typing.get_origin(hint) is tuple:
        return f"{_metavar(inner[0])} …" if inner[-1] is Ellipsis else " ".join(map(_metavar, inner))
    return "|".join(part if isinstance(part, str) else _metavar(part) for part in inner)


def _as_typed(value: Any) -> str:
    """Return a default as it is typed."""
    if isinstance(value, tuple):
        return " ".join(map(_as_typed, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def resolve_config(env: str, file: str | None, changes: Changes, prog: str, size: str | None = None) -> TrainingConfig:
    """Return the config of `--config FILE`, that of `--preset SIZE`, or else the environment's preset, with the changes."""
    named = changes.get("env", {}).get("id", env)
    if env and named != env:
        raise UsageError(f"{env} and --env.id {named} are two environments; give one")
    if not named and file is None:
        raise UsageError(f"no environment is given; type: {prog} CartPole-v1, or {prog} --config FILE")
    if size is not None and file is not None:
        raise UsageError(f"--preset {size} and --config {file} are two configs to start from; give one")
    if file is None:
        return apply_changes(config_for(named) if size is None else SIZES[size](named), changes)
    typed = shlex.quote(file).replace("{", "{{").replace("}", "}}")
    config = load_config(Path(file), env=named or None, allow=f"{prog} {{id}} --config {typed}")
    return apply_changes(config.replace(env=config.env.replace(id=named)) if named else config, changes)


def apply_changes(config: TrainingConfig, changes: Changes) -> TrainingConfig:
    """Return the config with the changes; a setting that excludes another one replaces it."""
    data = config.to_dict()
    ppo = changes.get("ppo", {})
    if "num_minibatches" in ppo or "minibatch_size" in ppo:
        data["ppo"] |= {"num_minibatches": None, "minibatch_size": None}
    if "target" in changes.get("convergence", {}):
        data["convergence"]["stop"] = True  # a preset's target ends nothing, one that is typed does
    for section, fields in changes.items():
        if section == "tracking":
            _merge(data[section], fields)
            continue
        if section != "policies":
            data[section] |= fields
            continue
        if not isinstance(fields, dict) or not all(isinstance(role, dict) for role in fields.values()):
            raise UsageError(f"--policies {fields!r:.80} must map names to settings, such as '{{scouts: {{agents: scout_*}}}}'")
        for name, role in fields.items():
            _merge(data["policies"].setdefault(name, {}), role)
    return TrainingConfig.from_dict(data)


def _merge(before: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Change fields, and those of sections within."""
    for key, value in changes.items():
        before[key] = {**before.get(key, {}), **value} if isinstance(value, dict) else value


def named_run(name: str, prog: str, *, env: str | None = None, other_env: bool = False, hint: str = "") -> Run:
    """Open the run that a command names; `hint` ends the message that there is none.

    `env` repeats the run's environment, or with `other_env` may be another one.
    """
    if not name:
        raise UsageError(f"no run is given; type: {prog} RUN, the run's directory or its name in runs/")
    run = open_run(name, env=env, hint=hint)
    if env not in (None, run.config.env.id) and not other_env:
        raise UsageError(f"the run {run.typed} is of {run.config.env.id}, which --env can only repeat, and {env} is another environment")
    return run


def check_policy_of_config(run: Run) -> None:
    """Refuse to train a run whose policies are not made from its config, but in Python: several by lanes, or a network of the user's."""
    what, policy, names = "", "policy", run.policy_names
    if names and not run.config.policies:
        what, policy = f"several policies ({', '.join(names)}) that are not in its config", "PolicyMap(…)"
    elif not names and run.policy_path().is_file():
        with contextlib.suppress(CorruptFileError):  # a damaged file is written again, from the checkpoint
            description, _ = read_policy_file(run.policy_path())
            what = f"the {description.own} {description.class_path}, which a config cannot name" if description.own else ""
    if what:
        raise UsageError(
            f"the run {run.path} trains {what}; continue in Python: "
            f'PPOTrainer({policy}, …, run_dir="{run.path}"), then load_checkpoint() and train()'
        )


def make_named_env(config: EnvConfig, *, where: str = "", make: Callable[[EnvConfig], Env] = make_env) -> Env:
    """Make an environment; an error is wrong use, and its message begins with `where`."""
    try:
        return make(config)
    except (ConfigError, EnvError, MissingExtraError) as error:
        raise UsageError(f"{where}{error}") from error


def check_can_be_trained_in(config: TrainingConfig) -> None:
    """Make the run's environment once; refuse settings for several agents if it has one."""
    if has_several_agents(config.env):
        return
    if config.opponent.mode != "none":
        raise UsageError(
            f"opponent.mode={config.opponent.mode} needs an environment with two teams, such as {team_worlds()}; "
            f"{config.env.id} has one agent"
        )
    if config.policy.central_critic:
        raise UsageError(f"policy.central_critic needs an environment with several agents; {config.env.id} has one")


def has_several_agents(config: EnvConfig, *, where: str = "") -> bool:
    """Make the environment once, and return whether it has several agents. An error's message begins with `where`."""
    if is_vector_only(config.id):
        return False
    world = vectorised(config)
    if world is not None and world.has_teams:  # made without PettingZoo
        try:
            world.check_kwargs(config.kwargs)
        except ConfigError as error:
            raise UsageError(f"{where}{error}") from error
        return True
    env = make_named_env(config, where=where)
    with env_errors(f"{where}{config.id}", "close"):
        env.close()
    return is_team_env(env)


OTHER_FLAGS = {
    "--total-timesteps": ("-n", "--n-timesteps", "--num-timesteps", "--timesteps", "--total-steps", "--max-steps", "--steps", "--frames"),
    "--run.max-iterations": ("--updates", "--num-updates", "--total-updates", "--iterations", "--num-iterations", "--n-iterations"),
    "--run.max-episodes": ("--num-episodes", "--n-episodes"),
    "--run.name": ("--exp-name", "--experiment-name", "--run-name"),
    "--run.directory": ("-f", "--log-folder", "--log-dir", "--logdir", "--save-dir", "--output-dir", "--out-dir"),
    "--run.checkpoint-interval": ("--save-every", "--save-interval", "--save-freq", "--checkpoint-every", "--checkpoint-freq"),
    "--run.log-interval": ("--log-every", "--log-freq"),
    "--run.threads": ("--num-threads", "--n-threads", "--torch-threads"),
    "--run.device cuda": ("--cuda", "--gpu", "--use-cuda"),
    "--run.device cpu": ("--cpu", "--no-cuda"),
    "--env.num-envs": ("--n-envs", "--num-env", "--envs"),
    "--env.num-workers": ("--n-workers", "--workers", "--num-processes", "--num-cpu", "--vec-env", "--num-env-runners"),
    "--env.kwargs": ("--env-kwargs", "--env-args"),
    "--env.frame-stack": ("--framestack", "--n-stack", "--num-stack"),
    "--evaluation.interval (counted in iterations)": ("--eval-every", "--eval-freq", "--eval-interval", "--evaluate-every"),
    "--evaluation.episodes": ("--n-eval-episodes", "--num-eval-episodes"),
    "--evaluation.num-envs": ("--n-eval-envs", "--num-eval-envs"),
    "--tracking.wandb.project NAME": ("--track", "--wandb", "--use-wandb", "--wandb-project", "--wandb-project-name"),
    "--tracking.wandb.name": ("--wandb-run-name", "--wandb-name"),
    "--tracking.wandb.mode": ("--wandb-mode",),
    "--tracking.wandb.entity": ("--wandb-entity",),
    "--tracking.wandb.group": ("--wandb-group",),
    "--tracking.wandb.tags": ("--wandb-tags",),
    "--tracking.mlflow.experiment NAME": ("--mlflow", "--use-mlflow", "--enable-mlflow", "--mlflow-experiment"),
    "--tracking.mlflow.uri": ("--mlflow-uri", "--tracking-uri", "--mlflow-tracking-uri"),
    "--tracking.tensorboard": ("--tensorboard-log", "--tb", "--logger"),
    "--convergence.target": ("--reward-threshold", "--stop-reward"),
    "--ppo.rollout-steps": ("--num-steps", "--horizon", "--unroll-length", "--steps-per-env", "--n-step"),
    "--ppo.rollout-steps (their batch divided by the lanes)": ("--train-batch-size", "--train-batch-size-per-learner"),
    "--ppo.minibatch-size": ("--batch-size", "--mini-batch-size", "--sgd-minibatch-size"),
    "--ppo.num-minibatches": ("--n-minibatches", "--nminibatches", "--num-mini-batch", "--minibatches"),
    "--ppo.update-epochs": ("--epochs", "--ppo-epochs", "--ppo-epoch", "--num-epochs", "--k-epochs", "--num-sgd-iter", "--noptepochs"),
    "--ppo.learning-rate-schedule linear": ("--anneal-lr", "--lr-decay", "--use-linear-lr-decay", "--lr-schedule"),
    "--ppo.gae-lambda": ("--lam", "--lambda", "--gae-lam", "--tau"),
    "--ppo.clip-coef": ("--clip", "--clip-param", "--clip-ratio", "--clip-eps", "--eps-clip"),
    "--ppo.clip-vloss": ("--clip-range-vf", "--vf-clip-param", "--clip-value"),
    "--ppo.vf-coef (twice theirs if their loss has no factor 1/2)": ("--value-coef", "--value-loss-coef", "--vf-coeff", "--vf-loss-coeff"),
    "--ppo.ent-coef": ("--entropy-coeff", "--ent-coeff", "--entropy", "--entropy-bonus"),
    "--ppo.max-grad-norm": ("--grad-clip", "--clip-grad", "--grad-norm"),
    "--ppo.target-kl": ("--kl-target", "--max-kl"),
    "--ppo.normalize-advantages": ("--norm-adv", "--normalize-advantage", "--adv-norm"),
    "--ppo.scale-rewards": ("--norm-reward", "--norm-rewards", "--normalize-reward", "--reward-norm", "--norm-rew"),
    "--policy.normalize-observations": ("--norm-obs", "--normalize", "--normalize-obs", "--obs-norm"),
    "--policy.hidden-sizes": ("--hidden-size", "--hidden-dim", "--net-arch", "--hidden-units", "--hiddens"),
    "--policy.kind lstm": ("--lstm", "--use-lstm", "--recurrent", "--recurrent-policy"),
    "--policy.kind": ("--policy", "--network", "--model", "--arch"),
    "--curriculum.mode": ("--curriculum", "--use-curriculum", "--curriculum-mode"),
    "--opponent.mode": ("--train-mode", "--self-play", "--selfplay"),
    "--env.kwargs '{width: 20, height: 20}'": ("--size",),
    "--config": ("-conf", "--conf-file", "--config-file", "--hyperparams", "--yaml", "--cfg"),
}
"""The flag here, with a value or a note -> its names elsewhere; fields of a config and names that configs accept need no entry."""

NO_FLAG = {
    "runs are delivered by trackers: --tracking.mlflow.uri URL or --tracking.wandb.project NAME, later by inchworm ship": ("--push-url",),
    "gradients are not recorded one by one; grad_norm is a metric": ("--wandb-watch", "--wandb-watch-freq"),
    "a resumed run continues its W&B run: inchworm resume RUN": ("--wandb-id", "--wandb-resume"),
    "give the environment as the first argument: inchworm train CartPole-v1": (
        "--env", "--env-id", "--env-name", "--gym-id", "--task", "--game",
    ),
    "type inchworm resume RUN to continue a run": (
        "-i", "--trained-agent", "--resume", "--load", "--load-checkpoint", "--checkpoint", "--restore",
    ),
    "a video of a run is a command of its own: inchworm video RUN": (
        "--capture-video", "--record-video", "--video", "--render",
    ),
    "progress is shown unless --quiet is given": ("-P", "--progress", "--progress-bar", "--verbose", "-v"),
    "PPO is the only algorithm, so leave it out": ("--algo", "--algorithm", "--agent"),
    "runs are deterministic without it": ("--torch-deterministic", "--cudnn-deterministic"),
    "the policy is always saved in the directory of the run": ("--save-model", "--save-policy"),
    "name the package with the environment: inchworm train package:Id": ("--gym-packages", "--env-package"),
    "a search is a command of its own: inchworm sweep ENV --trials 20": ("--optimize", "-optimize", "--n-trials", "--sweep"),
}  # fmt: skip
"""What to do instead -> names of flags that do not exist here."""


def explain_other_flag(name: str, known: set[str]) -> str | None:
    """What to type instead of a flag of another trainer; None if it is not known. `known` are the flags of the command."""
    if "." in name:  # a word of theirs in a section of ours, as --ppo.value-coef
        name = f"--{name.rpartition('.')[2]}"
    for text, names in NO_FLAG.items():
        if name in names:
            return text
    legacy = current_name(name.lstrip("-").replace("-", "_"))
    here = next((flag for flag, names in OTHER_FLAGS.items() if name in names), None)
    here = here or (None if legacy is None else "--" + legacy.replace("_", "-"))
    if here is None:
        return None
    flag, space, note = here.partition(" ")
    short = "--" + flag.lstrip("-").rpartition(".")[2]
    if flag not in known and short not in known:
        return f"it is called {here} in inchworm train"
    return f"it is called {flag if flag in known else short}{space}{note} here"  # --num-envs of evaluate has no section


@config_class("--")
class TrainOptions(ConfigBase):
    """Train a policy on an environment. Flags change the environment's preset, or the config of --config.

    A switch may be followed by true or false, and null clears an optional value. Flags that take YAML are typed as
    --env.kwargs '{gravity: 5}' or --env.wrappers '[{name: ClipReward, kwargs: {min_reward: -1}}]'.
    """

    env: Annotated[str, ENV] = ""
    """A Gymnasium id, or package.module:make_env for your own factory."""
    config: File = None
    """Start from this YAML file, as `inchworm config ENV` prints it, instead of from a preset."""
    preset: Preset = None
    """Start from a config of this size, for any environment (a run of seconds, minutes or hours), instead of from the environment's own."""
    quiet: bool = False
    """Print nothing but errors and warnings."""
    profile: bool = False
    """Print a table of where the time went at the end."""
    overwrite: bool = False
    """Start over in the directory of --run.name: delete the run that is there."""
    seeds: Count | None = None
    """Train this many seeds, from --run.seed on, each as a run of its own, and summarise their scores."""
    jobs: Count | None = None
    """Seeds that are trained at a time, in a process each; by default as many as there are cores."""
    together: bool | None = None
    """Train all seeds at once in one compiled program, with --backend jax and a JAX-native environment; by default if not on a CPU."""
