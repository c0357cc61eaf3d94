"""Serves the front door: whether torch's minibatch step is compiled. A function of the config alone, so that a run is, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from inchworm.config import TrainingConfig

COMPILE_SECONDS = 40.0
"""What a first compilation takes: 12 to 32 s were measured on a busy machine of two cores (tracing 2, the rest g++), 4 to 11 s
where torch's cache has the graph. The first is assumed, because what a cache holds is no part of a config."""
SECONDS_PER_STEP = 0.7e-3
SECONDS_PER_SAMPLE = 0.25e-6
"""What a compiled step saves: it no longer pays some 120 small operations, and passes over the samples fewer times. Measured with
64x64 networks and one thread, eager less compiled: 0.77 ms at 64 samples a minibatch, 0.86 at 128, 0.98 at 256, 1.2 at 2048.
Matrix products take the same time in both, so that wider networks save no more."""


@dataclass(frozen=True, slots=True)
class CompileChoice:
    """What `ppo.compile="auto"` came to."""

    compile: Literal["off", "on"]
    reason: str
    """One sentence for the log."""


def choose_compile(config: TrainingConfig, *, builtin: bool = True) -> CompileChoice:
    """On where the run's planned minibatch steps save more than the compiling takes.

    `builtin` is false for a network, policy, loss or optimiser that somebody brings: those are not compiled.
    """
    obstacle = _obstacle(config, builtin)
    if obstacle:
        return CompileChoice("off", f"ppo.compile=off, because {obstacle}")
    steps, size = planned_steps(config)
    saved = steps * (SECONDS_PER_STEP + SECONDS_PER_SAMPLE * size)
    chosen: Literal["off", "on"] = "on" if saved > COMPILE_SECONDS else "off"
    facts = f"{steps:,} minibatch steps of {size} samples save about {saved:.0f} s and compiling takes up to {COMPILE_SECONDS:.0f} s"
    return CompileChoice(chosen, f"ppo.compile={chosen}, because {facts}")


def planned_steps(config: TrainingConfig) -> tuple[int, int]:
    """How many minibatch steps a run will take, and how many samples each reads."""
    ppo, run = config.ppo, config.run
    batch = ppo.rollout_steps * config.env.num_envs
    iterations = -(-run.total_timesteps // batch)
    if run.max_iterations is not None:
        iterations = min(iterations, run.max_iterations)
    minibatches = ppo.minibatches_for(batch)
    return iterations * ppo.update_epochs * minibatches, -(-batch // minibatches)


def _obstacle(config: TrainingConfig, builtin: bool) -> str:
    """Why a compiled step is out of the question; empty if it is not."""
    if config.run.backend != "torch":
        return f"run.backend={config.run.backend} has nothing to compile"
    if not builtin:
        return "only built-in policies with the built-in loss and optimiser are compiled"
    if config.ppo.gradient_accumulation > 1:
        return f"ppo.gradient_accumulation={config.ppo.gradient_accumulation} is not compiled"
    if config.policy.kind in ("lstm", "gru"):
        return f"policy.kind={config.policy.kind} runs in a kernel of its own and is not compiled"
    if config.policy.kind == "cnn":
        return "convolutions take nearly all of the time and gain nothing"
    return ""
