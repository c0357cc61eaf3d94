"""Serves the front door: what a config leaves to us is chosen here, once, with a reason; the run's config then says what was chosen."""

from __future__ import annotations

from inchworm.config import TrainingConfig
from inchworm.env.choice import choose_num_workers
from inchworm.train.compile_choice import choose_compile


def settle(config: TrainingConfig, *, builtin: bool = True) -> tuple[TrainingConfig, list[str]]:
    """The config without `auto` in `env.num_workers` and `ppo.compile`, and the reasons, a sentence each.

    `builtin` says whether the policy is one of ours. How many workers there are changes no number of the run; whether its step
    is compiled changes last bits, and is therefore a function of the config alone.
    """
    reasons = []
    if config.env.num_workers == "auto":
        workers = choose_num_workers(config.env)
        config = config.replace(env=config.env.replace(num_workers=workers.num_workers, help_workers=workers.help_workers))
        reasons.append(workers.reason)
    if config.ppo.compile == "auto":
        compiled = choose_compile(config, builtin=builtin)
        config = config.replace(ppo=config.ppo.replace(compile=compiled.compile))
        reasons.append(compiled.reason)
    return config, reasons
