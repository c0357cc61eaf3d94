"""What a game of Skirmish may be made of."""

import subprocess
import sys

import pytest

from inchworm.core.errors import ConfigError
from inchworm.worlds.skirmish import SkirmishConfig, SkirmishVectorEnv
from inchworm.worlds.skirmish.state import (
    ALLY,
    CLASSES,
    ENEMY,
    HEADINGS,
    LATTICE,
    OWN,
    Layout,
    action_space,
    observation_space,
    state_space,
)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"units": ()}, "must name 1 to 10 units"),
        ({"units": ("scout",) * 11}, "must name 1 to 10 units"),
        ({"units": ("Scout",)}, "'Scout' is not a unit class; use scout, soldier, heavy"),
        ({"width": 9.0}, "width=9.0 must be 10 or more"),
        ({"height": 12.1}, "height=12.1 must be a multiple of 1/8"),
        ({"wall_pairs": 5}, "wall_pairs=5 must be 4 or less"),
        ({"zone_radius": 7.0}, "zone_radius=7.0 must be 6 or less"),
        ({"zone_target": 0}, "zone_target=0 must be 1 or more"),
        ({"max_steps": 0}, "max_steps=0 must be 1 or more"),
        ({"max_stpes": 10}, "did you mean max_steps"),
        ({"max_steps": 1.5}, "max_steps"),
    ],
)
def test_what_is_wrong_is_said(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SkirmishConfig(**fields)


def test_classes_keep_float32_exact() -> None:
    """Lengths on the lattice, whole damage: what the world's exactness rests on."""
    for kind in CLASSES.values():
        for length in (kind.speed, kind.diagonal, kind.radius, kind.reach, kind.sight):
            assert length * LATTICE == round(length * LATTICE)
        assert 0 < kind.turn < HEADINGS / 2
        assert kind.reach <= kind.sight, "what is shot at is seen"


@pytest.mark.parametrize("size", [1, 3, 10])
def test_spaces(size: int) -> None:
    config = SkirmishConfig(units=("soldier",) * size)
    width = len(OWN) + 3 + 8 + size * (len(ALLY) + len(ENEMY))
    space = observation_space(config)
    assert space["observation"].shape == (width,) == (Layout(size).width,)  # type: ignore[index]
    assert space["action_mask"].shape == (9 + 3 + 1 + size,)  # type: ignore[index]
    assert action_space(config).nvec.tolist() == [9, 3, 1 + size]  # type: ignore[attr-defined]
    assert state_space(config).shape == (2 * size * 7 + 4 + 3 * 4,)


def test_the_native_world_needs_no_pettingzoo() -> None:
    code = (
        "import sys; sys.modules['pettingzoo'] = None\n"
        "from inchworm.worlds.skirmish import SkirmishVectorEnv, parallel_env\n"
        "from inchworm.core.errors import MissingExtraError\n"
        "SkirmishVectorEnv(num_envs=1).reset()\n"
        "try:\n    parallel_env()\nexcept MissingExtraError as error:\n    sys.stdout.write(str(error))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.endswith('pip install "inchworm[marl]"')


def test_a_config_or_plain_data_with_its_fields() -> None:
    config = SkirmishConfig(units=["heavy", "scout"])
    assert config.units == ("heavy", "scout")
    assert SkirmishConfig.from_dict(config.to_dict()) == config
    with SkirmishVectorEnv(config, 1) as one, SkirmishVectorEnv({"units": ["heavy", "scout"]}, 1) as two:
        assert one.config == two.config == config
