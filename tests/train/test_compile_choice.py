"""What `ppo.compile="auto"` comes to: planned steps by hand, both sides of the threshold, and what is never compiled."""

from __future__ import annotations

import subprocess
import sys

import pytest

from inchworm.config.sections import EnvConfig, PolicyConfig, PPOConfig, RunConfig, TrainingConfig
from inchworm.train.resolve import COMPILE_SECONDS, SECONDS_PER_SAMPLE, SECONDS_PER_STEP, choose_compile, planned_steps


def config_of(total: int = 1_000_000, *, policy: PolicyConfig | None = None, run: dict | None = None, **ppo) -> TrainingConfig:
    return TrainingConfig(
        env=EnvConfig(num_envs=4),
        policy=policy or PolicyConfig(),
        ppo=PPOConfig(**{"rollout_steps": 250, "minibatch_size": 100, "update_epochs": 3, **ppo}),
        run=RunConfig(total_timesteps=total, **(run or {})),
    )


def test_planned_steps_by_hand():
    # 4 lanes x 250 steps = 1000 a rollout, 10 minibatches of 100, 3 epochs: 30 steps an iteration.
    assert planned_steps(config_of(5_000)) == (5 * 30, 100)
    assert planned_steps(config_of(5_001)) == (6 * 30, 100)  # a run ends with whole iterations
    assert planned_steps(config_of(5_000, run={"max_iterations": 2})) == (2 * 30, 100)
    assert planned_steps(config_of(5_000, minibatch_size=None, num_minibatches=8)) == (5 * 24, 125)


def test_it_is_on_from_where_it_repays():
    enough = COMPILE_SECONDS / (SECONDS_PER_STEP + 100 * SECONDS_PER_SAMPLE) / 30  # iterations
    below, above = choose_compile(config_of(1000 * int(enough))), choose_compile(config_of(1000 * (int(enough) + 1)))
    assert (below.compile, above.compile) == ("off", "on")
    assert above.reason.startswith("ppo.compile=on, because ")
    assert "minibatch steps of 100 samples save about 40 s and compiling takes up to 40 s" in above.reason
    assert choose_compile(config_of(100_000_000)).compile == "on"
    assert choose_compile(config_of(10_000)).compile == "off"


@pytest.mark.parametrize(
    ("config", "builtin", "why"),
    [
        (config_of(10**8, run={"backend": "numpy"}), True, "run.backend=numpy has nothing to compile"),
        (config_of(10**8, gradient_accumulation=2), True, "ppo.gradient_accumulation=2 is not compiled"),
        (config_of(10**8, policy=PolicyConfig(kind="cnn")), True, "convolutions"),
        (config_of(10**8), False, "only built-in policies"),
    ],
    ids=["numpy", "accumulation", "cnn", "foreign"],
)
def test_what_is_never_compiled(config, builtin, why):
    choice = choose_compile(config, builtin=builtin)
    assert choice.compile == "off"
    assert why in choice.reason


def test_choosing_needs_no_torch():
    code = "import sys, inchworm.train.resolve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
