"""PPO in two motions: collect a rollout, learn from it.

`__all__` is the public surface. Names are imported when they are first used, so that `import inchworm` costs nothing: a
program that only acts never imports a learning framework, and `PPOOptimizer` and `TorchPolicy` are what brings torch in.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inchworm.abilities import Stateful
    from inchworm.backends.interface import compute_advantages
    from inchworm.backends.numpy.gae import compute_gae
    from inchworm.backends.numpy.policy import NumpyPolicy
    from inchworm.backends.torch.optimizer import PPOOptimizer
    from inchworm.backends.torch.policy import TorchPolicy
    from inchworm.checkpoint import PolicyRecord, TrainerRecord, TrainingCheckpointer
    from inchworm.collect.collector import RolloutCollector
    from inchworm.config import (
        CollectConfig,
        EnvConfig,
        EvalConfig,
        OpponentConfig,
        PolicyConfig,
        PPOConfig,
        RunConfig,
        TrainingConfig,
        WrapperConfig,
    )
    from inchworm.env.actors import RandomActor
    from inchworm.env.build import make_env
    from inchworm.env.checker import check_env
    from inchworm.env.opponents import OpponentSource, OpponentVectorEnv, team_lanes
    from inchworm.env.vector_env import make_vector_env
    from inchworm.errors import InchwormError, WorkerRestartWarning
    from inchworm.evaluate.evaluator import PolicyEvaluator, evaluate_policy
    from inchworm.evaluate.match_stats import MatchStats
    from inchworm.evaluate.matches import evaluate_vs_heuristic, play_match
    from inchworm.evaluate.stats import EvalStats
    from inchworm.evaluate.suite_games import evaluate_suites
    from inchworm.evaluate.suite_stats import SuiteStats
    from inchworm.evaluate.suites import Simulation, load_suites
    from inchworm.normalization import ReturnNormalizer, RunningMeanStd
    from inchworm.policy.composite import CompositePolicy, PolicyMap
    from inchworm.policy.spec import PolicySpec
    from inchworm.policy.weights import load_policy, save_policy
    from inchworm.policy_check.checker import check_policy
    from inchworm.presets import config_for, small_fast_config
    from inchworm.protocols import Actor, Policy, VectorEnv
    from inchworm.replay.format import load_replay, save_replay
    from inchworm.replay.page import replay_page
    from inchworm.rollout.buffer import RolloutBuffer
    from inchworm.rollout.fake import create_fake_rollout
    from inchworm.rollout.rollout import Rollout, combine_rollouts, select_lanes
    from inchworm.rollout.sequences import iter_minibatches, split_into_sequences
    from inchworm.run import NotExactWarning
    from inchworm.selfplay.callback import SelfPlayCallback
    from inchworm.selfplay.pool import OpponentPool
    from inchworm.selfplay.rating_games import RatingGames
    from inchworm.selfplay.ratings import Rating
    from inchworm.tracking.stats_logger import StatsLogger
    from inchworm.train.loop import (
        TrainingComponents,
        TrainingState,
        create_training_components,
        default_training_step,
        functional_training_loop,
    )
    from inchworm.train.trainer import PPOTrainer
    from inchworm.types import Advantages, EnvStep, EpisodeRecord, Evaluation, Minibatch, PolicyStep, UpdateStats

    __version__: str

__all__ = [
    "Actor",
    "Advantages",
    "CollectConfig",
    "CompositePolicy",
    "EnvConfig",
    "EnvStep",
    "EpisodeRecord",
    "EvalConfig",
    "EvalStats",
    "Evaluation",
    "InchwormError",
    "MatchStats",
    "Minibatch",
    "NotExactWarning",
    "NumpyPolicy",
    "OpponentConfig",
    "OpponentPool",
    "OpponentSource",
    "OpponentVectorEnv",
    "PPOConfig",
    "PPOOptimizer",
    "PPOTrainer",
    "Policy",
    "PolicyConfig",
    "PolicyEvaluator",
    "PolicyMap",
    "PolicyRecord",
    "PolicySpec",
    "PolicyStep",
    "RandomActor",
    "Rating",
    "RatingGames",
    "ReturnNormalizer",
    "Rollout",
    "RolloutBuffer",
    "RolloutCollector",
    "RunConfig",
    "RunningMeanStd",
    "SelfPlayCallback",
    "Simulation",
    "Stateful",
    "StatsLogger",
    "SuiteStats",
    "TorchPolicy",
    "TrainerRecord",
    "TrainingCheckpointer",
    "TrainingComponents",
    "TrainingConfig",
    "TrainingState",
    "UpdateStats",
    "VectorEnv",
    "WorkerRestartWarning",
    "WrapperConfig",
    "__version__",
    "check_env",
    "check_policy",
    "combine_rollouts",
    "compute_advantages",
    "compute_gae",
    "config_for",
    "create_fake_rollout",
    "create_training_components",
    "default_training_step",
    "evaluate_policy",
    "evaluate_suites",
    "evaluate_vs_heuristic",
    "functional_training_loop",
    "iter_minibatches",
    "load_policy",
    "load_replay",
    "load_suites",
    "make_env",
    "make_vector_env",
    "play_match",
    "replay_page",
    "save_policy",
    "save_replay",
    "select_lanes",
    "small_fast_config",
    "split_into_sequences",
    "team_lanes",
]

_HOMES = {
    "abilities": ("Stateful",),
    "backends.interface": ("compute_advantages",),
    "backends.numpy.gae": ("compute_gae",),
    "backends.numpy.policy": ("NumpyPolicy",),
    "backends.torch.optimizer": ("PPOOptimizer",),
    "backends.torch.policy": ("TorchPolicy",),
    "checkpoint": ("PolicyRecord", "TrainerRecord", "TrainingCheckpointer"),
    "collect.collector": ("RolloutCollector",),
    "config": (
        "CollectConfig",
        "EnvConfig",
        "EvalConfig",
        "OpponentConfig",
        "PPOConfig",
        "PolicyConfig",
        "RunConfig",
        "TrainingConfig",
        "WrapperConfig",
    ),
    "env.actors": ("RandomActor",),
    "env.build": ("make_env",),
    "env.checker": ("check_env",),
    "env.opponents": ("OpponentSource", "OpponentVectorEnv", "team_lanes"),
    "env.vector_env": ("make_vector_env",),
    "errors": ("InchwormError", "WorkerRestartWarning"),
    "evaluate.evaluator": ("PolicyEvaluator", "evaluate_policy"),
    "evaluate.match_stats": ("MatchStats",),
    "evaluate.matches": ("evaluate_vs_heuristic", "play_match"),
    "evaluate.stats": ("EvalStats",),
    "evaluate.suite_games": ("evaluate_suites",),
    "evaluate.suite_stats": ("SuiteStats",),
    "evaluate.suites": ("Simulation", "load_suites"),
    "normalization": ("ReturnNormalizer", "RunningMeanStd"),
    "policy.composite": ("CompositePolicy", "PolicyMap"),
    "policy.spec": ("PolicySpec",),
    "policy.weights": ("load_policy", "save_policy"),
    "policy_check.checker": ("check_policy",),
    "presets": ("config_for", "small_fast_config"),
    "protocols": ("Actor", "Policy", "VectorEnv"),
    "replay.format": ("load_replay", "save_replay"),
    "replay.page": ("replay_page",),
    "rollout.buffer": ("RolloutBuffer",),
    "rollout.fake": ("create_fake_rollout",),
    "rollout.rollout": ("Rollout", "combine_rollouts", "select_lanes"),
    "rollout.sequences": ("iter_minibatches", "split_into_sequences"),
    "run": ("NotExactWarning",),
    "selfplay.callback": ("SelfPlayCallback",),
    "selfplay.pool": ("OpponentPool",),
    "selfplay.rating_games": ("RatingGames",),
    "selfplay.ratings": ("Rating",),
    "tracking.stats_logger": ("StatsLogger",),
    "train.loop": (
        "TrainingComponents",
        "TrainingState",
        "create_training_components",
        "default_training_step",
        "functional_training_loop",
    ),
    "train.trainer": ("PPOTrainer",),
    "types": ("Advantages", "EnvStep", "EpisodeRecord", "Evaluation", "Minibatch", "PolicyStep", "UpdateStats"),
}
"""Which module each public name lives in."""

_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name == "__version__":
        value: Any = importlib.import_module("importlib.metadata").version("inchworm")
    elif name in _HOME_OF:
        value = getattr(importlib.import_module(f"inchworm.{_HOME_OF[name]}"), name)
    else:
        raise AttributeError(f"module 'inchworm' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return sorted({*globals(), *__all__})
