"""`inchworm collect RUN --out FILE`: the first motion alone. Gathers a rollout with a run's policy and writes it to a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from inchworm.abilities import lanes_per_copy
from inchworm.cli.arguments import UsageError, parse, split
from inchworm.cli.runs import as_typed, load_run_policy, named_run
from inchworm.collect.collector import RolloutCollector
from inchworm.env.vector_env import make_vector_env
from inchworm.protocols import Policy, VectorEnv
from inchworm.rollout.rollout import Rollout
from inchworm.run import Run
from inchworm.seeding import derive_seed
from inchworm.selfplay.build import bind_pool, with_opponents
from inchworm.tracking.terminal import make_terminal

PROG = "inchworm collect"


@dataclass(frozen=True)
class CollectOptions:
    """Gather a rollout with a run's policy, for looking at it or for `inchworm learn`. No learning framework is involved."""

    run_name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = ""
    """The run's directory, or its name in runs/."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """Where the rollout goes."""
    steps: int | None = None
    """Steps of every lane; the run's ppo.rollout_steps by default."""
    num_envs: int | None = None
    """Copies of the environment; the run's env.num_envs by default."""
    seed: int | None = None
    """Of episodes and actions; derived from the run's seed and the policy's version by default."""
    best: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Act with the best policy by evaluation instead of the latest."""
    env: Annotated[str | None, tyro.conf.arg(metavar="MODULE:FACTORY")] = None
    """The environment, where it is code to import: repeat what the run was trained with."""
    quiet: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Say nothing but errors and warnings."""


def run(arguments: Sequence[str]) -> int:
    """Collect, save, and say what is in the file."""
    options = parse(CollectOptions, arguments, PROG)
    if not options.out:
        raise UsageError("no file is given for the rollout; add --out rollout.safetensors")
    known = named_run(split(CollectOptions, arguments)[0], PROG, env=options.env)
    policy, _ = load_run_policy(known, best=options.best)
    terminal = make_terminal(quiet=options.quiet)
    steps = known.config.ppo.rollout_steps if options.steps is None else options.steps
    seed = derive_seed(known.config.run.seed, "collect", policy.policy_version) if options.seed is None else options.seed
    env = _env(known, policy, options.num_envs, seed)
    try:
        terminal.print(f"collecting {steps:,} steps of {_lanes(env)} of {known.config.env.id}", markup=False)
        length = known.config.ppo.sequence_length_for(steps, memory=True)
        rollout = RolloutCollector(env, policy, seed=seed, sequence_length=length).collect(steps)
    finally:
        env.close()
    try:
        path = rollout.save(Path(options.out))
    except OSError as error:
        raise UsageError(f"cannot write --out {options.out}: {error}") from error
    terminal.print(f"rollout: {path} ({_summary(rollout)})\nnext:    inchworm learn {as_typed(known)} {path}", markup=False)
    return 0


def _env(known: Run, policy: Policy, num_envs: int | None, seed: int) -> VectorEnv:
    """As in the run's training: with its opponents (of self-play, the policy as it is) and, for a central critic, its global state."""
    run, world = known.config, known.config.env
    copies = world.num_envs if num_envs is None else num_envs
    workers = world.num_workers if world.num_workers == "auto" else min(world.num_workers, copies)
    env = make_vector_env(world.replace(num_envs=copies, num_workers=workers), seed=seed, global_state=run.policy.central_critic)
    try:
        unrated = run.replace(run=run.run.replace(seed=seed), opponent=run.opponent.replace(rating_interval=0))
        envs = with_opponents((env,), unrated)
        bind_pool(envs, policy)
        return envs[0]
    except BaseException:  # there are no opponents for it, or somebody pressed Ctrl-C
        env.close()
        raise


def _lanes(env: VectorEnv) -> str:
    copies = env.num_lanes // lanes_per_copy(env)
    return f"{env.num_lanes} lanes" + ("" if copies == env.num_lanes else f" ({copies} copies)")


def _summary(rollout: Rollout) -> str:
    returns = [episode.episode_return for episode in rollout.episodes]
    told = f", mean return {np.mean(returns):.4g}" if returns else ""
    return f"{rollout.num_valid:,} steps, finished episodes: {len(returns)}{told}"
