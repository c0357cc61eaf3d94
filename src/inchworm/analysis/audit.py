"""The critic's audit: how wrong the critic is, how good GAE's advantages are, and how much of the policy's gradient is noise.

Training sees one continuation of each state. Episodes can be replayed, so an audit plays many (see `estimates`) and knows V(s) and
Q(s, a) up to an error that it states. Continuations run on past a time limit where that can be lifted: training bootstraps there, so the
true value is that of an episode that goes on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import optree

from inchworm.analysis.estimates import BranchPlayer, GradientNoise, Samples, gradient_noise, std_without
from inchworm.analysis.runs import read_run
from inchworm.backends.corrections import RewardScaler
from inchworm.backends.registry import acting_policy, compute_gae, is_builtin
from inchworm.collect.collector import RolloutCollector
from inchworm.collect.opponents import check_spaces
from inchworm.config.sections import EnvConfig, PPOConfig, TrainingConfig
from inchworm.core.errors import ConfigError, EnvError
from inchworm.core.protocols import Policy, reads_global_state
from inchworm.core.seeding import derive_seed, make_stream
from inchworm.env.registry import config_for, vectorised
from inchworm.env.source import EnvSource, env_source, make_vector_env
from inchworm.env.vector_env import LaneVectorEnv
from inchworm.policy.composite import CompositePolicy
from inchworm.policy.file import read_policy_file
from inchworm.run.directory import open_run
from inchworm.run.policies import load_run_policy

LAMBDAS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 1.0)
NEGLIGIBLE = 0.01
"""Weight of the critic's value at which a continuation may be cut off."""
MOST_STEPS = 10_000
"""Steps of a fresh episode without a time limit, and of a continuation whose discount hardly falls."""
NO_LIMIT = 10**9
LIFTED = "continuations run on past the time limit, where training bootstraps"
NOT_LIFTED = "where the environment truncates, the critic's value stands in, as in training"
LANES, GRADIENT_STEPS = 32, 1_024
"""Lanes of the rollout that the gradient is measured on, each an equal part of it, and their most steps."""
RESAMPLES = 2_000
THIRDS = ("first", "middle", "last")
INACCURATE, OFFSET, SMALL = 0.5, 0.25, 0.05
"""What stands out: an rms error (or a bias in one third), or a bias, of this share of the spread of the true values; a spread below this
share of their mean counts as that."""
LARGE = 10.0
"""Scale of the true values, in the units that the critic learns, from which on normalised values are worth trying."""
UNCERTAIN = 0.3
"""The correlation that perfect advantages would reach, below which those of several lambdas are not worth reading."""
NOISY, EXACT = 0.5, 30.0
"""Signal-to-noise ratios of a batch below which, and of a minibatch above which, another size is worth trying."""


@dataclass(frozen=True)
class CriticError:
    """The critic against Monte-Carlo values, over some states. Values are in reward units; each `_se` is a standard error."""

    where: str
    states: int
    true_mean: float
    true_std: float
    """Spread of the true values, without the noise of their estimates."""
    bias: float
    """Mean of V - V true."""
    bias_se: float
    rmse: float
    """Root of the mean squared error, from which the variance of the Monte-Carlo estimates is subtracted."""
    rmse_se: float


@dataclass(frozen=True)
class LambdaFit:
    """How well GAE's advantages with this lambda agree with Q(s, a) - V(s): correlation and its 95 % bootstrap interval."""

    gae_lambda: float
    correlation: float
    low: float
    high: float
    gain_low: float
    """What it gains at least over the lambda in use: the lower end of an interval that holds for all lambdas together (Bonferroni)."""


@dataclass(frozen=True)
class Suggestion:
    """What to try."""

    setting: str
    why: str
    """The numbers that say so."""
    tries: str
    weight: float
    """How far the numbers are beyond what is usual; the largest comes first."""


@dataclass(frozen=True)
class Audit:
    """The result of `audit`."""

    name: str
    policy_version: int
    env: str
    gamma: float
    gae_lambda: float
    seed: int
    episodes: int
    branches: int
    restored_by: str
    """`get_state` or `replay`."""
    time_limit: str
    """How continuations treat the time limit."""
    critic_share: float
    """Mean weight of the critic's own value in the Monte-Carlo estimates, where continuations were cut off."""
    critic: tuple[CriticError, ...]
    """Of all states, then of each third of the episodes."""
    return_std: float
    """Standard deviation of the discounted returns that follow one state."""
    advantage_std: float
    """Spread of the true advantages, without the noise of their estimates."""
    reachable: float
    """The correlation that perfect advantages would have with the estimates."""
    lambdas: tuple[LambdaFit, ...]
    gradient: GradientNoise
    batch: int
    minibatch: int
    suggestions: tuple[Suggestion, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data; a noise scale that is infinite is None."""
        data: dict[str, Any] = dataclasses.asdict(self)
        scale = self.gradient.noise_scale
        data["gradient"] |= {"noise_scale": scale if math.isfinite(scale) else None}
        for name in ("batch", "minibatch"):
            data["gradient"][f"{name}_snr"] = self.gradient.snr(data[name])
        return data

    def __str__(self) -> str:
        """The tables for a terminal."""
        lines = [
            f"{self.name}: policy version {self.policy_version} in {self.env}, gamma {self.gamma:g}, lambda {self.gae_lambda:g}",
            f"{self.critic[0].states:,} states of {self.episodes} fresh episodes, 2 x {self.branches} continuations each, seed {self.seed}",
            f"restored by {self.restored_by}: the environment's later randomness is that of the episode, only actions differ",
            f"{self.time_limit}; the critic has a weight of {self.critic_share:.1%} in the true values",
            "",
            f"{'critic':<15}{'states':>7}{'true value':>20}{'bias':>20}{'rms error':>20}",
        ]
        for part in self.critic:
            true = f"{part.true_mean:.4g} (sd {part.true_std:.2g})"
            bias, rmse = f"{part.bias:+.3g} ± {part.bias_se:.2g}", f"{part.rmse:.3g} ± {part.rmse_se:.2g}"
            lines.append(f"{part.where:<15}{part.states:>7}{true:>20}{bias:>20}{rmse:>20}")
        lines += ["", f"{'lambda':<15}correlation of GAE's advantages with Q(s, a) - V(s); perfect ones would reach {self.reachable:.2f}"]
        for fit in self.lambdas:
            used = "  (used)" if fit.gae_lambda == self.gae_lambda else ""
            lines.append(f"{fit.gae_lambda:<15g}{fit.correlation:.2f} [{fit.low:.2f}, {fit.high:.2f}]{used}")
        if self.reachable < UNCERTAIN:
            lines.append(
                f"{'':<15}too noisy to tell lambdas apart: more --branches than {self.branches} raise what perfect ones would reach"
            )
        lines += ["", f"{'gradient':<15}{'samples':>9}{'signal/noise':>20}{'share of noise':>16}"]
        for name, samples in (("minibatch", self.minibatch), ("batch", self.batch), ("4 x batch", 4 * self.batch)):
            ratio, error = self.gradient.snr(samples), samples * self.gradient.snr_se
            lines.append(f"{name:<15}{samples:>9,}{f'{ratio:.3g} ± {error:.2g}':>20}{1 / (1 + max(ratio, 0.0)):>16.0%}")
        scale = self.gradient.noise_scale
        equal = f"equal at {scale:,.0f} samples" if math.isfinite(scale) else "no signal was found in the noise"
        lines += [f"{'noise scale':<15}{equal} ({self.gradient.parts} parts of {self.gradient.samples:,} samples)", ""]
        if not self.suggestions:
            return "\n".join([*lines, "nothing stands out"])
        for number, found in enumerate(self.suggestions, 1):
            lines += [f"{number}. {found.setting}", f"   why: {found.why}", f"   try: {found.tries}"]
        return "\n".join(
            [*lines, "", f"whether a change helps is not known from this: inchworm compare {self.env} --change ppo.… measures it"]
        )


def audit(
    run_or_policy: str | Path | Policy,
    env: Any = None,
    config: TrainingConfig | PPOConfig | None = None,
    *,
    states: int = 128,
    branches: int = 16,
    seed: int = 0,
    max_steps: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Audit:
    """Audit the critic of a run (its directory, or its name in runs/), or of a policy in an environment, under its current policy.

    From each of `states` states, `branches` continuations estimate V(s) and as many Q(s, a), for `max_steps` steps; by default until the
    discount is below 1 %. `env` is an id, a config or a factory, and `config` says how the policy is trained; a run knows both, but code to
    import must be named again. `progress` is called with the number of finished continuations, `2 * states * branches` in the end. The same
    seed gives the same result.
    """
    for what, value, least in (("states", states, 3), ("branches", branches, 2), ("max_steps", max_steps, 1)):
        if value is not None and value < least:
            raise ConfigError(f"{what}={value} must be {least} or more")
    scale = None
    if isinstance(run_or_policy, str | Path):
        run = open_run(read_run(run_or_policy, rows=False).path, env=env)  # which says in a line what is not a run
        policy, path = load_run_policy(run)
        name, settings = run.path.resolve().name, run.config
        env = settings.env if env is None else settings.env.replace(id=env)
        if settings.ppo.scale_rewards and is_builtin(policy):
            scaler = RewardScaler(settings.ppo.gamma)
            scaler.statistics.load_state_dict(read_policy_file(path)[0].reward_statistics or {})
            scale = scaler.scale
    elif env is None:
        raise ConfigError("the environment of the policy is not known; use audit(policy, env), or audit(run)")
    else:
        policy, name = run_or_policy, "policy"
        settings = config_for(env) if isinstance(env, str) else TrainingConfig()
        settings = config if isinstance(config, TrainingConfig) else settings if config is None else settings.replace(ppo=config)
        settings = settings.replace(env=env if isinstance(env, EnvConfig) else settings.env.replace(id=env_source(env).name))
    _refuse(policy, env, settings, scale)
    return _audit(
        policy, env_source(env).with_config(settings.env), settings, name, (states, branches, seed, max_steps), scale or 1.0, progress
    )


def _refuse(policy: Policy, env: Any, config: TrainingConfig, scale: float | None) -> None:
    """Refuse what cannot be audited."""
    if config.opponent.mode != "none" or config.policies or isinstance(policy, CompositePolicy) or reads_global_state(policy):
        raise ConfigError("the audit is for one policy that plays alone: not for opponents, several policies or a central critic")
    if not isinstance(policy, Policy):
        raise ConfigError(f"{type(policy).__name__} is not a policy with a critic, so there is nothing to audit")
    if not env_source(env).can_be_copied:
        raise ConfigError("the audit makes copies of the environment; give an id, a config or a factory, not an instance or a vector env")
    if config.ppo.scale_rewards and scale is None:
        raise ConfigError("ppo.scale_rewards is set, and only a run with a built-in policy says what rewards were divided by; audit that")


def _audit(
    policy: Policy,
    source: EnvSource,
    config: TrainingConfig,
    name: str,
    size: tuple[int, int, int, int | None],
    scale: float,
    progress: Callable[[int], None] | None,
) -> Audit:
    """Play, measure and suggest."""
    (states, branches, seed, max_steps), ppo = size, config.ppo
    actor, limit = cast(Policy, acting_policy(policy)), source.max_episode_steps
    lifted = limit is not None and source.is_config and not config.env.wrappers  # a wrapper may show the agent the limit
    if max_steps is None:
        max_steps = min(MOST_STEPS, math.ceil(math.log(NEGLIGIBLE) / math.log(ppo.gamma))) if 0 < ppo.gamma < 1 else MOST_STEPS
    with _copies(source, 2 * branches, seed, lifted=lifted) as env:
        check_spaces(actor, env.observation_space, env.action_space, "the policy")
        how = {"gamma": ppo.gamma, "reward_scale": scale}
        player = BranchPlayer(env, actor, max_steps=max_steps, limit=limit or MOST_STEPS, seed=seed, **how)
        samples = Samples.draw(player, states, progress)
    steps, other_seed = min(ppo.rollout_steps, GRADIENT_STEPS), derive_seed(seed, "audit gradient")
    length = ppo.sequence_length_for(steps, memory=bool(optree.tree_leaves(actor.initial_state(1))))
    with _copies(source, LANES, other_seed, lifted=False) as env:
        collector = RolloutCollector(env, actor, seed=other_seed, sequence_length=length)
        collector.collect(min(steps, math.ceil(samples.episodes.lengths.mean())))  # so that lanes are at different places of episodes
        rollout = collector.collect(steps)
    rollout = dataclasses.replace(rollout, rewards=(rollout.rewards / scale).astype(rollout.rewards.dtype))
    batch = config.env.num_envs * ppo.rollout_steps
    found = Audit(
        name=name,
        policy_version=int(policy.policy_version),
        env=config.env.id,
        gamma=ppo.gamma,
        gae_lambda=ppo.gae_lambda,
        seed=seed,
        episodes=2 * branches,
        branches=branches,
        restored_by="replay" if samples.starts[0].saved is None else "get_state",
        time_limit=LIFTED if lifted else NOT_LIFTED,
        critic_share=samples.critic_share,
        critic=critic_errors(samples, scale),
        return_std=scale * math.sqrt(samples.sampled.var(1, ddof=1).mean()),
        advantage_std=scale * samples.advantage_std,
        reachable=samples.reachable,
        lambdas=lambda_fits(samples, sorted({*LAMBDAS, ppo.gae_lambda}), ppo),
        gradient=gradient_noise(policy, rollout, config),
        batch=batch,
        minibatch=max(1, batch // ppo.minibatches_for(-(-batch // length), length)),
        suggestions=(),
    )
    return dataclasses.replace(found, suggestions=tuple(suggest(found, config)))


@contextmanager
def _copies(source: EnvSource, copies: int, seed: int, *, lifted: bool) -> Iterator[LaneVectorEnv]:
    """Copies of the environment as in training, without its time limit if that is `lifted`."""
    if source.is_config:
        env = source.given
        workers = 0 if env.num_workers == "auto" or vectorised(env) is not None else min(env.num_workers, copies)
        env = env.replace(num_envs=copies, num_workers=workers, help_workers=False)
        source = EnvSource(env.replace(max_episode_steps=NO_LIMIT) if lifted else env, "config")
    made = make_vector_env(source, copies, seed=seed)
    try:
        if made.lanes_per_copy > 1 or made.turn_based:
            raise ConfigError(f"the audit is for environments with one agent, and this one has {made.lanes_per_copy}")
        if not isinstance(made, LaneVectorEnv) or not made.takes_seeds or made.resets_itself:
            raise EnvError("the environment cannot be replayed: its episodes do not begin with a given seed, one by one")
        yield made
    finally:
        made.close()


def critic_errors(samples: Samples, scale: float) -> tuple[CriticError, ...]:
    """The critic's error in all states and in each third of the episodes; the thirds without states are left out."""
    steps, copies = samples.rows
    true, noise = samples.sampled.mean(1) * scale, samples.sampled.var(1, ddof=1) / samples.sampled.shape[1] * scale**2  # [S]
    errors = samples.episodes.values[samples.rows] * scale - true
    third = (3 * steps) // samples.episodes.lengths[copies]
    found = []
    for where, part in [("whole episode", third >= 0), *((f"{name} third", third == k) for k, name in enumerate(THIRDS))]:
        count = int(part.sum())
        if count < 2:
            continue
        error, squares = errors[part], errors[part] ** 2 - noise[part]
        rmse = math.sqrt(max(0.0, squares.mean()))
        error_se = _clustered_se(squares, copies[part])  # of the mean square; where that is near 0, its root is known less well
        rmse_se = min(math.sqrt(error_se), error_se / (2 * rmse)) if rmse > 0 else math.sqrt(error_se)
        spread = std_without(true[part], noise[part])
        bias = (float(error.mean()), _clustered_se(error, copies[part]))
        found.append(CriticError(where, count, float(true[part].mean()), spread, *bias, rmse, rmse_se))
    return tuple(found)


def lambda_fits(samples: Samples, lambdas: Sequence[float], ppo: PPOConfig) -> tuple[LambdaFit, ...]:
    """The correlation for each lambda; its interval resamples episodes, because states of one are alike."""
    episodes, (steps, copies) = samples.episodes, samples.rows
    arrays = (episodes.rewards, episodes.values, episodes.next_values, episodes.terminated, episodes.truncated)
    estimates = np.stack([compute_gae(*arrays, ppo.gamma, each)[steps, copies] for each in lambdas])  # [L, S]
    rng, names = make_stream(0, "audit resamples"), np.unique(copies)
    counts = rng.multinomial(len(names), np.full(len(names), 1 / len(names)), RESAMPLES)  # [R, episodes]
    weights = np.concatenate([np.ones((1, len(copies))), counts[:, np.searchsorted(names, copies)]])  # [1 + R, S]; all of them first
    weights /= weights.sum(1, keepdims=True)
    x = estimates - (weights @ estimates.T)[:, :, None]  # [1 + R, L, S]
    y = samples.advantages - (weights @ samples.advantages)[:, None]  # [1 + R, S]
    both = np.einsum("rs,rls,rs->rl", weights, x, y)
    size = np.sqrt(np.einsum("rs,rls->rl", weights, x * x) * (weights * y * y).sum(1, keepdims=True))
    found = np.divide(both, size, out=np.zeros_like(both), where=size > 0)  # [1 + R, L]
    gains = found - found[:, [lambdas.index(ppo.gae_lambda)]]
    low, high = np.quantile(found[1:], (0.025, 0.975), axis=0)
    columns = zip(
        lambdas, found[0].tolist(), low.tolist(), high.tolist(), np.quantile(gains[1:], 0.025 / max(1, len(lambdas) - 1), axis=0).tolist()
    )
    return tuple(LambdaFit(*column) for column in columns)


def _clustered_se(values: np.ndarray, episodes: np.ndarray) -> float:
    """The standard error of the mean of values [n] that belong to episodes [n]: those of one episode are not independent."""
    sums = np.bincount(episodes, values - values.mean())
    groups = len(np.unique(episodes))
    return math.sqrt(float(np.square(sums).sum()) * groups / max(1, groups - 1)) / len(values)


def suggest(found: Audit, config: TrainingConfig) -> list[Suggestion]:
    """What to try, the furthest from usual first; empty if nothing stands out. Thresholds are not calibrated by what helped."""
    whole, ppo, suggestions = found.critic[0], config.ppo, list[Suggestion]()
    unit = max(whole.true_std, SMALL * abs(whole.true_mean))
    thirds = ", ".join(f"{part.where} {part.bias:+.2g}" for part in found.critic[1:])
    spread = f"true values spread by {whole.true_std:.3g}"
    remedies = "raise ppo.vf_coef, ppo.learning_rate or ppo.update_epochs, or train longer"
    if math.hypot(whole.true_mean, whole.true_std) > LARGE and not (config.policy.normalize_values or config.ppo.scale_rewards):
        remedies = f"policy.normalize_values=true or ppo.scale_rewards=true, because values are large; else {remedies}"
    parts = zip(found.critic, (OFFSET, *[INACCURATE] * (len(found.critic) - 1)))
    excess = max((abs(part.bias) - 2 * part.bias_se) / (limit * unit) if unit > 0 else 0.0 for part, limit in parts)
    if excess > 1:
        why = f"the critic is off by {whole.bias:+.3g} ± {whole.bias_se:.2g} on average ({thirds}); {spread}"
        suggestions.append(Suggestion("critic: values are biased", why, remedies, 1 + excess))
    elif whole.rmse - 2 * whole.rmse_se > INACCURATE * unit:
        why = f"its rms error is {whole.rmse:.3g} ± {whole.rmse_se:.2g} (bias {thirds}); {spread}"
        suggestions.append(Suggestion("critic: values are inaccurate", why, remedies, 1 + whole.rmse / (INACCURATE * unit)))
    used = next(fit for fit in found.lambdas if fit.gae_lambda == ppo.gae_lambda)
    best = max(found.lambdas, key=lambda fit: fit.correlation)
    if best.gain_low > 0.02:
        why = (
            f"its advantages correlate {best.correlation:.2f} with the true ones, those of {used.gae_lambda:g} only {used.correlation:.2f}"
        )
        weight = 1 + 5 * (best.correlation - used.correlation)
        title = f"lambda: advantages with {best.gae_lambda:g} are closer to the true ones"
        suggestions.append(Suggestion(title, why, f"ppo.gae_lambda={best.gae_lambda:g}", weight))
    drowned = max(fit.high for fit in found.lambdas) < 0.3 and found.reachable > 0.6
    if drowned and ppo.gamma > 0.9 and not suggestions:  # a wrong critic or lambda would explain it
        why = f"no lambda correlates above {best.correlation:.2f}: returns of one state vary by {found.return_std:.3g}, advantages by "
        why += f"{found.advantage_std:.3g}"
        shorter = 1 - 3 * (1 - ppo.gamma) if ppo.gamma < 1 else 0.99
        tries = f"larger batches, or ppo.gamma={shorter:.4g}, with which returns vary less and rewards far ahead count less"
        suggestions.append(Suggestion("advantages: those of no lambda follow the true ones", why, tries, 1.5))
    batch_snr, error = found.gradient.snr(found.batch), found.batch * found.gradient.snr_se
    if batch_snr + 2 * error < NOISY:
        scale = found.gradient.noise_scale
        wanted = f"towards {scale:,.0f} samples" if math.isfinite(scale) else "several times"
        why = f"the signal-to-noise ratio of a batch of {found.batch:,} samples is {batch_snr:.2g} ± {error:.2g}"
        tries = f"raise env.num_envs x ppo.rollout_steps {wanted}, or lower ppo.learning_rate; a policy that is done learning has no signal"
        suggestions.append(Suggestion("batch: the gradient is mostly noise", why, tries, 1 + (NOISY - max(batch_snr, 0.0)) / NOISY))
    small = found.gradient.snr(found.minibatch)
    if small - 2 * found.minibatch * found.gradient.snr_se > EXACT:
        why = f"the signal-to-noise ratio of a minibatch of {found.minibatch:,} samples is {small:.3g}"
        tries = "more minibatches (ppo.num_minibatches), or smaller batches: as many steps then make more updates"
        suggestions.append(Suggestion("batch: a minibatch has hardly any noise", why, tries, 1.0))
    return sorted(suggestions, key=lambda each: -each.weight)
