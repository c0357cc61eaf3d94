"""Worlds by id: what they offer besides copies made by Gymnasium. A world is imported when asked for, so `env` never imports `worlds`.

To add a world, put one line into the table below, or call `register_world` from your own package. The table of well-known packages of
environments at the end is for messages: what to type to get an id of theirs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inchworm.config.sections import EnvConfig, TrainingConfig
from inchworm.core.errors import ConfigError, EnvError, MissingExtraError
from inchworm.core.protocols import Actor, VectorEnv

if TYPE_CHECKING:
    from inchworm.config.presets import Preset


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The description of a world; all parts are optional."""

    make_copy: str | None = None
    """`package.module:function`, which makes one copy from `env.kwargs`; None where Gymnasium makes it. Named, as it may need an extra."""
    make_vector: Callable[..., VectorEnv] | None = None
    """Makes all copies as one vector env: `make_vector(config, *, global_state, seed, first_copy, max_replay_steps)`."""
    vector_fits: Callable[[EnvConfig], bool] = lambda config: True  # noqa: ARG005
    """Whether `make_vector` can make a config's copies, bit-identical to those made one by one; asked only if nothing is wrapped around."""
    check_kwargs: Callable[[Mapping[str, Any]], object] = dict
    """Raises `ConfigError` for `env.kwargs` that the world does not take."""
    kwargs_of: Callable[[Any], Mapping[str, Any] | None] = lambda rules: None  # noqa: ARG005
    """`env.kwargs` of the world's own config object; None for any other object."""
    make_heuristic: Callable[[Mapping[str, Any], float], Actor] | None = None
    """Makes a hand-written player from `env.kwargs` and a skill from 0 to 1."""
    has_teams: bool = False
    """Whether a copy has two teams, as halves of its lanes."""
    preset: Preset | None = None
    """A tuned config, for worlds that are not in `config/presets`."""


_WORLDS = {
    "CartPole-v0": "inchworm.worlds.cartpole:WORLD",
    "CartPole-v1": "inchworm.worlds.cartpole:WORLD",
    "Maze-v0": "inchworm.worlds.toys:MAZE",
    "PhysicsCartPole-v0": "inchworm.worlds.tasks:CARTPOLE",
    "PointWorld-v0": "inchworm.worlds.tasks:POINT",
    "Skirmish-v0": "inchworm.worlds.skirmish:WORLD",
    "Symbolic-v0": "inchworm.worlds.symbolic:WORLD",
}
"""Id -> `package.module:NAME` of its `World`."""

ENVPOOL = "envpool:"
"""Prefix of the ids of environments that EnvPool makes: `envpool:Pong-v5`."""

_VECTOR_PREFIXES = {
    ENVPOOL: ("inchworm.env.foreign:make_envpool", "envpool", "envpool"),
    **{
        f"{package}:": ("inchworm.backends.jax.worlds:make_jax_env", "jax", "jax-envs")
        for package in ("gymnax", "brax", "navix", "craftax")
    },
}
"""Prefix of ids whose copies are always made and stepped as one vector env -> what makes it from an `EnvConfig`, the package that it needs,
and the extra that installs it."""


def register_world(id: str, path: str) -> None:
    """Add a world under its id; `path` is the `package.module:NAME` of its `World`, which is imported when it is first needed."""
    if _WORLDS.setdefault(id, path) != path:
        raise EnvError(f"the world {id} is registered already, as {_WORLDS[id]}")


def vector_maker(id: str) -> Callable[..., VectorEnv] | None:
    """What makes all copies of an id with a known prefix as one vector env: `make(config, *, global_state, seed, …)`; else None."""
    for prefix, (path, package, extra) in _VECTOR_PREFIXES.items():
        if id.startswith(prefix):
            module, _, name = path.partition(":")
            try:
                importlib.import_module(package)
                make: Callable[..., VectorEnv] = getattr(importlib.import_module(module), name)
            except ImportError as error:
                if isinstance(error, ModuleNotFoundError) and error.name != package:
                    raise
                install = f'pip install "inchworm[{extra}]"'
                raise MissingExtraError(f"{id} needs {package}, which cannot be imported ({error}); type: {install}") from error
            return make
    return None


def device_maker() -> Callable[..., VectorEnv]:
    """What puts a simulator whose lanes are torch tensors behind the `VectorEnv` contract."""
    make: Callable[..., VectorEnv] = importlib.import_module("inchworm.backends.torch.device_env").adapt_device_env
    return make


def is_vector_only(id: str) -> bool:
    """Whether the copies of an id can only be made all together, as one vector env, by the package that its prefix names."""
    return id.startswith(tuple(_VECTOR_PREFIXES))


def names_code(id: str) -> bool:
    """Whether an id names code to import, `package.module:make_env`; a prefix such as `envpool:` names a known package."""
    return ":" in id and not is_vector_only(id)


def find_world(id: str) -> World | None:
    """The description of a world, or None for an id that is only Gymnasium's (or that of a factory)."""
    return _load(_WORLDS[id]) if id in _WORLDS else None


@functools.cache
def _load(path: str) -> World:
    module, _, name = path.partition(":")
    world = getattr(importlib.import_module(module), name)
    if not isinstance(world, World):
        raise EnvError(f"{path} is registered as a world, but is of type {type(world).__name__}; make it an inchworm.env.registry.World")
    return world


def find_preset(id: str) -> Preset | None:
    """The tuned config of an environment; None if it has none."""
    from inchworm.config.presets import PRESETS  # env workers need none of them

    if id in PRESETS:
        return PRESETS[id]
    world = find_world(id)
    return None if world is None else world.preset


def config_for(env_id: str) -> TrainingConfig:
    """Return the config that `inchworm train ENV` starts from: the environment's preset, or the defaults."""
    preset = find_preset(env_id)
    return TrainingConfig(env=EnvConfig(id=env_id)) if preset is None else preset.config


def vectorised(config: EnvConfig) -> World | None:
    """The world that makes all copies of a config as one vector env; None where copies are made one by one."""
    if not config.native or config.wrappers or config.atari or config.frame_stack > 1:
        return None
    world = find_world(config.id)
    return world if world is not None and world.make_vector is not None and world.vector_fits(config) else None


def team_worlds() -> str:
    """The registered ids of worlds with two teams, for messages."""
    return ", ".join(id for id, path in _WORLDS.items() if _load(path).has_teams)


def heuristic_of(id: str) -> Callable[[Mapping[str, Any], float], Actor] | None:
    """What makes a world's hand-written player; None if it has none."""
    world = find_world(id)
    return None if world is None else world.make_heuristic


def heuristic_env(given: Any) -> EnvConfig:
    """The env config of a world with a heuristic: given as config or id, or by its rules, as a mapping or as the world's config object."""
    if isinstance(given, str):
        given = EnvConfig(id=given)
    if isinstance(given, EnvConfig):
        if heuristic_of(given.id) is not None:
            return given
        found = f"the id {given.id}"
    else:
        for id in _WORLDS:
            world = _load(_WORLDS[id])
            kwargs = world.kwargs_of(given) if world.make_heuristic is not None else None
            if kwargs is not None:
                return EnvConfig(id=id, kwargs=dict(kwargs))
        found = type(given).__name__
    known = ", ".join(id for id in _WORLDS if heuristic_of(id) is not None)
    raise ConfigError(f"there is no heuristic for {found}; give the id of a world that has one ({known}), or its rules")


_ATARI = (
    "Alien|Amidar|Assault|Asterix|Asteroids|Atlantis|BankHeist|BattleZone|BeamRider|Berzerk|Bowling|Boxing|Breakout|Centipede|"
    "ChopperCommand|CrazyClimber|Defender|DemonAttack|DoubleDunk|Enduro|FishingDerby|Freeway|Frostbite|Gopher|Gravitar|Hero|IceHockey|"
    "Jamesbond|Kangaroo|Krull|KungFuMaster|MontezumaRevenge|MsPacman|NameThisGame|Phoenix|Pitfall|Pong|PrivateEye|Qbert|Riverraid|"
    "RoadRunner|Robotank|Seaquest|Skiing|Solaris|SpaceInvaders|StarGunner|Surround|Tennis|TimePilot|Tutankham|UpNDown|Venture|"
    "VideoPinball|WizardOfWor|YarsRevenge|Zaxxon"
)


@dataclass(frozen=True, slots=True)
class Package:
    """A well-known package of environments, and the ids that it registers; Gymnasium knows them after the package was imported."""

    ids: str
    """A regular expression that they match from the start."""
    module: str
    """What to import."""
    install: str
    """What to give to `pip install`."""
    typed: str = "{module}:{id}"
    """The id as it is typed here; the groups of `ids` can be named."""


PACKAGES = (
    Package(r"(MiniGrid|BabyAI)-", "minigrid", "minigrid"),
    Package(r"MiniWorld-", "miniworld", "miniworld"),
    Package(
        r"(highway|merge|roundabout|parking|intersection|racetrack|exit|lane-keeping|two-way|u-turn)(-[A-Za-z-]+)?-v\d",
        "highway_env",
        "highway-env",
    ),
    Package(r"(ALE/|.*NoFrameskip-)", "ale_py", '"inchworm[atari]"', "{id}"),
    Package(rf"(?P<game>{_ATARI})(-ram)?(Deterministic)?(-ram)?(-v\d+)?$", "ale_py", '"inchworm[atari]"', "ALE/{game}-v5"),
    Package(r"(Fetch|Hand(Reach|Manipulate)|(Ant|Point)Maze_|AdroitHand|FrankaKitchen)", "gymnasium_robotics", "gymnasium-robotics"),
    Package(r"Panda(Reach|Push|Slide|PickAndPlace|Stack|Flip)", "panda_gym", "panda-gym"),
    Package(r"Meta-World/", "metaworld", "metaworld"),
    Package(r"dm_control/", "shimmy", '"shimmy[dm-control]"'),
    Package(r"Vizdoom", "vizdoom.gymnasium_wrapper", "vizdoom"),
    Package(r"PyFlyt/", "PyFlyt.gym_envs", "pyflyt"),
    Package(r"FlappyBird-", "flappy_bird_gymnasium", "flappy-bird-gymnasium"),
    Package(r"popgym-", "popgym", "popgym"),
    Package(r"(Endless-)?(MortarMayhem|MysteryPath|SearingSpotlights)", "memory_gym", "memory-gym"),
    Package(r"MiniHack-", "minihack", "minihack"),
    Package(r"NetHack", "nle", "nle"),
    Package(r"tetris_gymnasium/", "tetris_gymnasium", "tetris-gymnasium"),
    Package(r"gym_pusht/", "gym_pusht", "gym-pusht"),
    Package(r"(procgen_gym/)?procgen-(?P<game>\w+)", "procgen_gym", "procgen-gym", "{module}:procgen_gym/procgen-{game}-v0"),
    Package(r"(?P<game>simple(_\w+)?_v\d+)$", "mpe2", "mpe2", "{module}.{game}:parallel_env"),
    Package(r"mpe2\.", "mpe2", "mpe2", "{id}:parallel_env"),
    Package(r"pettingzoo\.classic\.", "pettingzoo", '"inchworm[marl]"', "{id}:env"),
    Package(r"pettingzoo\.", "pettingzoo", '"inchworm[marl]"', "{id}:parallel_env"),
)
"""In the order in which they are tried."""


def package_hint(id: str) -> str | None:
    """What to type to get the environment of an id, if a well-known package has it; `package:Id` is asked about as `Id`.

    A module without what to make in it gets that; one that has it is only answered with what to install.
    """
    module, _, name = id.rpartition(":")
    if name in ("parallel_env", "env", "raw_env"):
        install = next((one.install for one in PACKAGES if one.module == module.partition(".")[0]), None)
        return None if install is None or importlib.util.find_spec(module.partition(".")[0]) else f"type: pip install {install}"
    for package in PACKAGES:
        found = re.match(package.ids, name)
        if found is not None:
            typed = package.typed.format(module=package.module, id=name, **found.groupdict())
            top = package.module.partition(".")[0]
            if importlib.util.find_spec(top) is None:
                return f"type: pip install {package.install}, then use {typed}"
            return f"the package {top} is installed; use {typed}" if typed != id else None
    return None
