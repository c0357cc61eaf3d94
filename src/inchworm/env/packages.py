"""Well-known packages of environments: which one an id belongs to, and what to type to get it.

Gymnasium knows an id only after the package that registers it was imported, which `package:Id` asks for.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass

_ATARI = (
    "Alien|Amidar|Assault|Asterix|Asteroids|Atlantis|BankHeist|BattleZone|BeamRider|Berzerk|Bowling|Boxing|Breakout|Centipede|"
    "ChopperCommand|CrazyClimber|Defender|DemonAttack|DoubleDunk|Enduro|FishingDerby|Freeway|Frostbite|Gopher|Gravitar|Hero|IceHockey|"
    "Jamesbond|Kangaroo|Krull|KungFuMaster|MontezumaRevenge|MsPacman|NameThisGame|Phoenix|Pitfall|Pong|PrivateEye|Qbert|Riverraid|"
    "RoadRunner|Robotank|Seaquest|Skiing|Solaris|SpaceInvaders|StarGunner|Surround|Tennis|TimePilot|Tutankham|UpNDown|Venture|"
    "VideoPinball|WizardOfWor|YarsRevenge|Zaxxon"
)


@dataclass(frozen=True, slots=True)
class Package:
    """A package, and the ids that it registers."""

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
