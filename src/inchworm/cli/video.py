"""`inchworm video RUN`: what the policy of a run, or of a policy file, does, as an mp4 or gif."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from inchworm.cli.arguments import File, Metavar, RunName, parse
from inchworm.cli.evaluate import check_can_be_drawn, evaluate_with, policy_and_config
from inchworm.cli.main import OK
from inchworm.config.reading import ConfigBase, config_class
from inchworm.env.source import env_source
from inchworm.evaluate.video import check_video, save_video
from inchworm.run.directory import REPLAYS, find_run
from inchworm.run.policies import is_saved_policy
from inchworm.tracking.console import make_terminal

PROG_VIDEO = "inchworm video"


@config_class("--")
class VideoOptions(ConfigBase):
    """Record what a run's policy, or a policy file, does: the first episodes that inchworm evaluate scores, with greedy actions."""

    run_name: RunName = ""
    """The run's directory, or its name in runs/; or a policy file."""
    out: File = None
    """The file to write, .mp4 or .gif; by default an mp4 in the run's directory, where the report finds it, or here for a policy file."""
    episodes: int = 1
    """Number of episodes, one after another."""
    sampled: bool = False
    """Sample actions instead of taking the likeliest."""
    seed: int | None = None
    """Seed of the episodes; that of the run's own evaluations by default."""
    fps: float | None = None
    """Frames per second; the environment's own by default."""
    best: bool = False
    """Use the policy of the best evaluation."""
    last: bool = False
    """Use the latest policy (the default)."""
    env: Annotated[str | None, Metavar("ENV")] = None
    """The environment, if it is code to import (repeat what the run was trained with), or another one with the same spaces."""
    kwargs: dict[str, Any] | None = None
    """Keyword arguments of the environment, such as '{units: [scout, scout]}'; by default those of the run."""
    num_envs: int | None = None
    """Copies of the environment that are played, of which sampled actions depend; as in the run's evaluations by default."""
    max_episode_steps: int | None = None
    """Cut episodes off after this many steps; as in the run's evaluations by default."""
    quiet: bool = False
    """Show no progress."""


def run_video(arguments: Sequence[str]) -> int:
    """Play the episodes, write the video, and print its path and the score."""
    options = parse(VideoOptions, arguments, PROG_VIDEO)
    if options.out is not None:
        check_video(options.out, options.fps)
    policy, path, config = policy_and_config(options, PROG_VIDEO)
    out: str | Path = options.out or f"{path.stem}.mp4"
    if options.out is None and not is_saved_policy(options.run_name):
        out = find_run(options.run_name) / REPLAYS / ("best_policy.mp4" if options.best else "policy.mp4")
    check_video(out, options.fps)
    check_can_be_drawn(config.env)
    stats = evaluate_with(policy, path, config, record=options.episodes, quiet=options.quiet)
    save_video(out, env_source(config.env), stats.recorded, options.fps)
    make_terminal().print(f"{out}: {stats}")
    return OK
