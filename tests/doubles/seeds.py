"""Seeds that are trained in this process, one after another: the smallest trainer of a bundle."""

from collections.abc import Generator, Sequence

from inchworm.core.types import SeedEvent
from inchworm.run.bundle import Bundle
from inchworm.train.trainer import functional_training_loop


def train_here(bundle: Bundle, seeds: Sequence[int]) -> Generator[SeedEvent, None, None]:
    for seed in seeds:
        yield SeedEvent(seed, "progress", 0)
        config = bundle.run_config(seed)
        state = functional_training_loop(config, config.policy)
        yield SeedEvent(seed, "done", state.env_steps, text=state.history.stop_reason or "", failures=state.failures)
