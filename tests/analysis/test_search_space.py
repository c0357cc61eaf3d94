"""Search spaces: reading them, values by hand, and what is refused before anything is trained."""

from pathlib import Path
from typing import Any

import pytest

from inchworm.analysis.search_space import Choice, Range, base_values, check_space, default_space, read_space, with_values
from inchworm.config.presets import PRESETS
from inchworm.config.sections import EnvConfig, PolicyConfig, PPOConfig, TrainingConfig
from inchworm.core.errors import ConfigError

BASE = TrainingConfig()


def test_a_range_and_a_list_by_hand() -> None:
    """Half of 1e-4..1e-2 by logarithm is 1e-3; half of 0.8..1 is 0.9; 2..8 in steps of 3 is 2, 5, 8."""
    text = {
        "ppo.learning_rate": "1e-4..1e-2:log",
        "ppo.gae_lambda": "0.8..1",
        "ppo.update_epochs": "2..8:3",
        "ppo.gamma": "0.9, 0.99",
        "policy.hidden_sizes": "[[8], [16, 16]]",
        "policy.normalize_observations": "true,false",
    }
    space = check_space(BASE, text)
    assert space["ppo.learning_rate"] == Range(1e-4, 1e-2, log=True)
    assert space["ppo.learning_rate"].at(0.5) == pytest.approx(1e-3)
    assert space["ppo.learning_rate"].place(1e-3) == pytest.approx(0.5)
    assert space["ppo.gae_lambda"].at(0.5) == pytest.approx(0.9)
    assert space["ppo.gae_lambda"].place(1.1) is None
    assert space["ppo.update_epochs"] == Range(2, 8, step=3, whole=True)
    assert [space["ppo.update_epochs"].at(share) for share in (0.0, 0.4, 0.5, 1.0)] == [2, 2, 5, 8]
    assert space["ppo.update_epochs"].place(3) is None
    assert space["ppo.gamma"] == Choice((0.9, 0.99))
    assert space["policy.hidden_sizes"] == Choice(([8], [16, 16]))
    assert space["policy.hidden_sizes"].place([16, 16]) == 1.0
    assert space["policy.normalize_observations"].place(True) == 0.0
    again = check_space(BASE, {name: entry.plain for name, entry in space.items()})
    assert again == space, "as it is written, it is read back"


def test_values_are_set_and_found_again() -> None:
    space = check_space(BASE, {"ppo.minibatch_size": [64, 128], "policy.hidden_sizes": [[64, 64], [8]]})
    config = with_values(BASE, {"ppo.minibatch_size": 64, "policy.hidden_sizes": [8]})
    assert (config.ppo.minibatch_size, config.ppo.num_minibatches, config.policy.hidden_sizes) == (64, None, (8,))
    assert base_values(config, space) == {"ppo.minibatch_size": 64, "policy.hidden_sizes": [8]}
    assert base_values(BASE, space) is None, "its minibatches are not of 64 or 128"
    counts = check_space(config, {"ppo.num_minibatches": [2, 4]})
    assert with_values(config, {"ppo.num_minibatches": 4}).ppo.minibatch_size is None
    assert base_values(BASE, counts) is None, "8 by default"


@pytest.mark.parametrize("env", [*PRESETS, "none", "tiny", "lstm"])
def test_the_default_space_has_the_settings_that_it_is_made_around(env: str) -> None:
    others = {
        "none": BASE,
        "tiny": TrainingConfig(env=EnvConfig(num_envs=1), ppo=PPOConfig(rollout_steps=8, minibatch_size=8)),
        "lstm": TrainingConfig(policy=PolicyConfig(kind="lstm"), ppo=PPOConfig(sequence_length=512)),
    }
    base = others[env] if env in others else PRESETS[env].config
    space = check_space(base, default_space(base))
    values = base_values(base, space)
    assert values is not None
    found = with_values(base, values)
    assert found.replace(ppo=found.ppo.replace(num_minibatches=base.ppo.num_minibatches)) == base


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({}, "the search space is empty"),
        ({"ppo.gama": [0.9]}, "unknown field ppo.gama; did you mean ppo.gamma?"),
        ({"gamma": [0.9]}, "unknown field gamma; did you mean ppo.gamma?"),
        ({"ppo.clip_range": [0.1]}, "unknown field ppo.clip_range; did you mean ppo.clip_coef?"),
        ({"run.seed": [1, 2]}, "run.seed cannot be searched"),
        ({"env.id": ["CartPole-v1"]}, "env.id cannot be searched"),
        ({"env.num_workers": [0, 1]}, "env.num_workers cannot be searched"),
        ({"evaluation.seed": [0, 1]}, "evaluation.seed cannot be searched"),
        ({"ppo.gamma": "0.9..1.5"}, r"ppo.gamma=1.5 must be 1 or less"),
        ({"ppo.gamma": [0.9, 1.5]}, r"ppo.gamma=1.5 must be 1 or less"),
        ({"ppo.update_epochs": "0..4"}, "ppo.update_epochs=0.* must be 1 or more"),
        ({"ppo.update_epochs": "1.5..4"}, "ppo.update_epochs=1.5 must be an integer"),
        ({"ppo.gamma": "0.99..0.9"}, "the range ppo.gamma=0.99..0.9 is empty: 0.99 is not below 0.9"),
        ({"ppo.gamma": "0.9..0.9"}, "is empty"),
        ({"ppo.ent_coef": "0..0.1:log"}, "spaced by logarithm and begins at 0; begin above 0"),
        ({"ppo.gamma": "0.9..0.99:often"}, "is not a range; write LOW..HIGH"),
        ({"ppo.update_epochs": "2..8:9"}, "the step of ppo.update_epochs=2..8:9 must be a whole number above 0 and at most 6"),
        ({"policy.normalize_observations": "0..1"}, "policy.normalize_observations=0.0 must be true or false"),
        ({"ppo.gamma": []}, "no value for ppo.gamma"),
        ({"ppo.gamma": [0.9, 0.9]}, "a value of ppo.gamma twice"),
        ({"ppo.gamma": 0.9}, "the search space has ppo.gamma=0.9; give a list"),
        ({"ppo.gamma": "[0.9"}, "the values of ppo.gamma are not valid"),
        ({"ppo.minibatch_size": [64], "ppo.num_minibatches": [2]}, "exclude each other; search one of them"),
        (
            {"ppo.minibatch_size": [64, 512], "ppo.rollout_steps": [32, 64]},
            "minibatch_size=512 is larger than the rollout .*narrow the space",
        ),
    ],
)
def test_what_the_config_refuses_is_refused_before_training(space: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as found:
        check_space(BASE, space)
    assert "\n" not in str(found.value)


def test_files_and_assignments(tmp_path: Path) -> None:
    file = tmp_path / "space.yaml"
    file.write_text("ppo.gamma: [0.9, 0.99]\nppo.learning_rate: 1e-4..1e-2:log\n")
    assert read_space([str(file), "ppo.gamma=0.5,0.6"]) == {"ppo.gamma": "0.5,0.6", "ppo.learning_rate": "1e-4..1e-2:log"}
    for content in ("[1, 2]", "a: [", "\0"):
        file.write_text(content)
        with pytest.raises(ConfigError, match=r"space.yaml"):
            read_space([str(file)])
    with pytest.raises(ConfigError, match=r"--space ppo.gamma is neither FIELD=VALUES, such as .*, nor a readable file"):
        read_space(["ppo.gamma"])
