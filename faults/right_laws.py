"""E5: invariants of training: ratio 1, separate episodes, files that change nothing, any order of lanes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optree

from doubles.toys import SpacesEnv
from faults.programme import Outcome, Work, procedure
from faults.right_worlds import BACKENDS, World, learner_of, policy_of, random_rollout, random_world
from inchworm.backends.registry import acting_policy, compute_advantages, learning_threads
from inchworm.collect.collector import RolloutCollector
from inchworm.core.types import Minibatch, PolicyStep
from inchworm.env.source import make_vector_env
from inchworm.policy.file import save_policy
from inchworm.rollout.rollout import Rollout
from inchworm.run.policies import load_policy
from inchworm.train.trainer import PPOTrainer

NARROW, WIDE = 5e-5, 1e-10


def make_env(world: World, num_envs: int = 3) -> Any:
    """Copies of a world with these spaces, masks included."""
    seen = world.spec.observation_space["observation"] if world.masked else world.spec.observation_space
    mask = "key" if world.masked else None
    return make_vector_env(lambda: SpacesEnv(seen, world.spec.action_space, 4, mask), num_envs, 0, seed=world.seed)  # type: ignore[arg-type]


def ratio_is_one(world: World, backend: str) -> str:
    """Collect, then learn: the first minibatch's ratio is 1, its KL 0, its clip fraction 0. Returns what is wrong."""
    policy = policy_of(world, backend, "float32")
    env = make_env(world)
    try:
        rollout = RolloutCollector(env, acting_policy(policy), seed=world.seed).collect(9)
    finally:
        env.close()
    stats = learner_of(policy, world.config.replace(update_epochs=1, num_minibatches=1), backend).update(rollout)
    off = {name: stats[name] for name in ("ratio_error", "approx_kl", "clip_fraction")}
    fine = off["ratio_error"] <= NARROW and abs(off["approx_kl"]) <= NARROW and off["clip_fraction"] == 0
    return "" if fine else f"float32: {off}"


def ratio_is_one_in_float64(world: World, backend: str) -> str:
    """The same in float64, without a rollout, whose log-probs are float32."""
    import torch

    from inchworm.backends.torch.network import to_tensors

    policy, rows = policy_of(world, backend, "float64"), random_rollout(world)
    observations = optree.tree_map(lambda leaf: np.array(leaf[0]), rows.observations)
    step = policy.act(observations, (), np.zeros(rows.num_lanes, bool), np.random.default_rng(world.seed))
    blank = np.zeros((1, rows.num_lanes))
    seen, done = optree.tree_map(lambda leaf: np.array(leaf)[None], (observations, step.actions))
    arrays = {"observations": seen, "actions": done, "valid": blank == 0, "episode_starts": blank != 0}
    arrays |= dict.fromkeys(("log_probs", "advantages", "returns", "values"), blank)
    given = arrays if backend == "numpy" else to_tensors(arrays, "cpu")
    with torch.no_grad():
        found = np.asarray(policy.evaluate(Minibatch(**given)).log_probs)[0]
    log_ratio = found - step.log_probs
    ratio = np.exp(log_ratio)
    off = [float(np.abs(ratio - 1).max()), float(np.abs(ratio - 1 - log_ratio).mean())]
    return "" if found.dtype == step.log_probs.dtype == np.float64 and max(off) <= WIDE else f"float64: ratio and KL off by {off}"


def episodes_are_separate(world: World, backend: str) -> str:
    """Other rewards in one episode change its advantages and no others."""
    policy, rollout = policy_of(world, backend, "float32"), random_rollout(world, num_steps=11)
    rng = np.random.default_rng(world.seed)
    starts = np.cumsum(rollout.episode_starts, 0)  # [T, B] the number of a lane's episode
    t, lane = int(rng.integers(rollout.num_steps)), int(rng.integers(rollout.num_lanes))
    touched = np.zeros(starts.shape, bool)
    touched[:, lane] = starts[:, lane] == starts[t, lane]
    rewards = np.where(touched, rollout.rewards + rng.normal(5, 1, starts.shape), rollout.rewards).astype(np.float32)
    before = compute_advantages(policy, rollout, world.config).advantages
    after = compute_advantages(policy, replace(rollout, rewards=rewards), world.config).advantages
    if not np.array_equal(before[~touched], after[~touched]):
        return "another episode's advantages moved"
    return "" if (before[touched] != after[touched]).all() else "the episode's own advantages did not move"


def lane_order_is_irrelevant(world: World, backend: str) -> str:
    """Lanes in another order: the same rows and the same advantages, in that order."""

    class First:
        """Takes the first legal choice, or a function of the observation; lanes are independent."""

        def initial_state(self, num_lanes: int) -> Any:
            del num_lanes
            return ()

        def act(self, observations: Any, state: Any, episode_starts: Any, rng: Any, *, deterministic: bool = False) -> PolicyStep:
            del episode_starts, rng, deterministic
            lanes = len(observations["action_mask"] if world.masked else observations)
            if world.kind == "box":
                actions = np.clip(np.stack([observations.sum(-1)] * 2, -1), -2, 2).astype(np.float32)
            else:
                mask = observations["action_mask"] if world.masked else np.ones((lanes, sum(world.choices)))
                parts = np.split(mask, np.cumsum(world.choices)[:-1], axis=1)
                actions = np.stack([part.argmax(1) for part in parts], -1)
                actions = actions[:, 0] if world.kind == "discrete" else actions
            return PolicyStep(actions, actions, np.zeros(lanes, np.float32), state)

    order = np.random.default_rng(world.seed).permutation(5)
    rollouts = []
    for seeds in (np.arange(5), order):
        env = make_env(world, 5)
        try:
            collector = RolloutCollector(env, First())
            collector._now = env.reset(seeds=[int(seed) for seed in seeds])
            rollouts.append(collector.collect(4))  # one episode of each lane; the next ones have the copies' own seeds
        finally:
            env.close()
    one, other = rollouts
    policy = policy_of(world, backend, "float32")
    for name in ("observations", "actions", "rewards", "terminated", "truncated"):
        ours, theirs = getattr(one, name), getattr(other, name)
        pairs = [(ours[key], theirs[key]) for key in ours] if isinstance(ours, dict) else [(ours, theirs)]
        if not all(np.array_equal(a[:, order], b) for a, b in pairs):
            return f"{name} are others"
    straight = compute_advantages(policy, one, world.config).advantages[:, order]
    apart = float(np.abs(straight - compute_advantages(policy, other, world.config).advantages).max())
    return "" if apart <= 1e-5 else f"advantages are {apart:.1e} apart"  # a matrix product may round a row by its place


def files_change_nothing(world: World, backend: str, directory: Path) -> str:
    """A rollout, a policy and a checkpoint through their files, then learn: the bits of learn without."""
    rollout = random_rollout(world)
    policy = policy_of(world, backend, "float32")
    learner_of(policy, world.config, backend).update(rollout)
    expected = policy.get_weights()

    loaded = Rollout.load(rollout.save(directory / "rollout.safetensors"))
    policy = policy_of(world, backend, "float32")
    learner_of(policy, world.config, backend).update(loaded)
    if not same(policy.get_weights(), expected):
        return "learning from the saved rollout gave other weights"
    path = save_policy(directory / "policy.safetensors", world.spec, policy_of(world, backend, "float32").get_weights())
    policy = load_policy(path, backend)  # type: ignore[arg-type]
    learner_of(policy, world.config, backend).update(rollout)
    return "" if same(policy.get_weights(), expected) else "learning of the saved policy gave other weights"


def checkpoints_change_nothing(world: World, backend: str, directory: Path) -> str:
    """Two trainers, one of them from the other's checkpoint, learn and collect the same."""
    config = world.config.replace(rollout_steps=6, update_epochs=2)
    with (
        PPOTrainer(world.spec, make_env(world), config, seed=1, backend=backend) as first,
        PPOTrainer(world.spec, make_env(world), config, seed=1, backend=backend) as second,
    ):
        for _ in range(2):  # with normalisers the first only moves the statistics
            first.learn(first.collect_rollouts())
        first.save_checkpoint(directory / "checkpoints")
        second.load_checkpoint(directory / "checkpoints")
        for _ in range(2):
            rollouts = [trainer.collect_rollouts() for trainer in (first, second)]
            if not np.array_equal(rollouts[0].log_probs, rollouts[1].log_probs):
                return "the loaded trainer collected another rollout"
            for trainer, rollout in zip((first, second), rollouts):
                trainer.learn(rollout)
            if not same(first.policy.get_weights(), second.policy.get_weights()):
                return "the loaded trainer learned other weights"
    return ""


FILE_LAWS: tuple[Callable[..., str], ...] = (files_change_nothing, checkpoints_change_nothing)


def same(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> bool:
    return ours.keys() == theirs.keys() and all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)


@procedure("E5", full=300, usual=80, test=4)
def laws(work: Work) -> Outcome:
    """Laws: ratio 1 at first, episodes apart, files change nothing, lanes in any order.

    Must: exact; ratio, KL and clip fraction to 5e-5 in float32, 1e-10 in float64.
    Every law on random worlds: spaces, masks, normalisers.
    """
    outcome = Outcome()
    with learning_threads(1):
        for number in work.each():
            world = random_world(np.random.default_rng([work.seed, 5, number]), seed=number, one_minibatch=False)
            for backend in BACKENDS:
                directory = work.scratch / f"{number}-{backend}"
                directory.mkdir()
                for law in (ratio_is_one, ratio_is_one_in_float64, episodes_are_separate, lane_order_is_irrelevant, *FILE_LAWS):
                    broken = law(world, backend, *([directory] if law in FILE_LAWS else []))
                    outcome.check(not broken, f"case {number}, {world.describe()}, {backend}, {law.__name__}: {broken}")
    outcome.notes.append("lanes in another order: rollouts are compared bit for bit, advantages to 1e-5 (products may round by row)")
    return outcome
