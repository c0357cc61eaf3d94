"""The doctor: reads the metrics of a run and says what is likely wrong, by which numbers, and what to try.

A rule looks at one thing and returns a `Finding` or None. Rules are listed from causes to symptoms, which is the order in which findings
are shown: rewards in the thousands come before the gradients that they make large. Thresholds are medians over a part of the run, so that
single bad updates and the beginning do not decide; they were set on some environments and are tested on others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from gymnasium import spaces

from inchworm.analysis.runs import RunRecord
from inchworm.core.spaces import leaf_shape, leaves

MIN_UPDATES = 5
"""Fewer updates than this are not judged."""
SETTLED = 20
"""Updates from which on a critic that knows nothing, large gradients and weak evaluations are no longer those of a beginning."""
SLOW = 1_000.0
"""Env steps per second below which it is worth saying what the time is spent on."""


@dataclass(frozen=True)
class Finding:
    """Something that is likely wrong."""

    rule: str
    title: str
    why: str
    """The numbers that say so."""
    tries: tuple[str, ...]
    """What to do about it, the best first."""
    note: bool = False
    """Whether it costs only time: no reason to distrust the result."""
    follows: str = ""
    """The rule of an earlier finding that may be the cause of this one."""


class Vitals:
    """The medians that the rules compare, of the updates of a run that took steps."""

    def __init__(self, run: RunRecord) -> None:
        self.run, self.ppo, self.policy = run, run.config.ppo, run.config.policy
        self.updates = len(run.column("loss"))

    def median(self, name: str, begin: float = 0.25, end: float = 1.0) -> float | None:
        """The median of a metric from one part of the run to another; None if it has none."""
        values = self.run.column(name)
        part = values[int(begin * len(values)) : max(1, int(np.ceil(end * len(values))))]
        return float(np.median(part)) if len(part) else None

    def returns(self) -> tuple[float, float, float] | None:
        """The mean return at the beginning, that at the end, and how much it moves between two rows."""
        values = self.run.column("mean_return")
        if len(values) < MIN_UPDATES:
            return None
        size = max(1, len(values) // 10)
        return float(values[:size].mean()), float(values[-size:].mean()), float(np.median(np.abs(np.diff(values))))

    @property
    def improved(self) -> bool:
        """Whether the mean return at the end is clearly above that at the beginning."""
        found = self.returns()
        if found is None:
            return False
        early, late, noise = found
        return late - early > max(0.1 * abs(early), 8 * noise)  # means over 100 episodes move slowly

    @property
    def return_scale(self) -> float | None:
        """The root mean square of the returns that the critic learns, in the units in which it learns them."""
        mean, std = self.median("return_mean"), self.median("return_std")
        return None if mean is None or std is None else float(np.hypot(mean, std))


Rule = Callable[[Vitals], Finding | None]


def learning_rate_zero(vitals: Vitals) -> Finding | None:
    """The optimiser's step size is 0 in a part of the run."""
    rates = vitals.run.column("learning_rate")
    share = float((rates <= 1e-10).mean()) if len(rates) else 0.0
    if share <= 0.1:
        return None
    return Finding(
        "learning_rate_zero",
        "The learning rate is zero, so nothing is learned",
        f"learning_rate is 0 in {share:.0%} of the updates (ppo.learning_rate={vitals.ppo.learning_rate:g}, "
        f"schedule {vitals.ppo.learning_rate_schedule})",
        ("set ppo.learning_rate, such as 3e-4", "a schedule decays to 0 at run.total_timesteps: raise that, or use a constant schedule"),
    )


def endless_episodes(vitals: Vitals) -> Finding | None:
    """No episode has ended."""
    config = vitals.run.config
    steps = vitals.run.env_steps / config.env.num_envs
    ended = max(vitals.run.column("episodes"), default=0.0)
    if ended or steps < 2_000:
        return None
    return Finding(
        "endless_episodes",
        "Episodes never end",
        f"no episode ended in {steps:,.0f} steps of each copy, so there is no return to look at",
        (
            "set env.max_episode_steps to truncate episodes",
            "check that the environment returns terminated=True at its end: inchworm check-env",
        ),
    )


def hidden_termination(vitals: Vitals) -> Finding | None:
    """All episodes are reported as truncated, but their lengths say that no time limit did it."""
    shares, episodes = vitals.run.column("truncated_share"), max(vitals.run.column("episodes"), default=0.0)
    length, spread = vitals.median("mean_length", 0.0), vitals.median("length_std", 0.0)
    if episodes < 20 or not len(shares) or shares.min() < 1.0 or length is None or spread is None or spread < 0.05 * length:
        return None
    return Finding(
        "hidden_termination",
        "Truncation hides termination: the critic values what follows a real end",
        f"all {episodes:,.0f} episodes were truncated and none terminated, but their lengths vary ({length:.4g} ± {spread:.3g}), which a "
        "time limit does not do",
        (
            "let the environment return terminated=True where the episode really ends, truncated=True only where a limit cuts it off",
            "a wrapper of the old Gym API may report every done as truncated; inchworm check-env shows what is returned",
        ),
    )


def reward_scale(vitals: Vitals) -> Finding | None:
    """Returns are far from unit scale, and nothing normalises them."""
    scale = vitals.return_scale
    normalised = vitals.policy.normalize_values or vitals.ppo.scale_rewards
    if scale is None or normalised or not (scale > 1_000 or 0 < scale < 0.02):
        return None
    found = vitals.returns()
    if scale < 0.02 and found is not None and max(abs(found[0]), abs(found[1])) == 0.0:
        return None  # no rewards at all
    return Finding(
        "reward_scale",
        f"Rewards are {'large' if scale > 1 else 'tiny'} and nothing normalises them",
        f"the returns that the critic learns have the scale {scale:.3g} (return_mean, return_std); networks learn best near 1",
        ("set ppo.scale_rewards=true", "or policy.normalize_values=true", "or divide the rewards in the environment"),
    )


def observation_scale(vitals: Vitals) -> Finding | None:
    """Observations are far from unit scale, and nothing normalises them."""
    scale = vitals.median("observation_scale", 0.0)
    if scale is None or vitals.policy.normalize_observations or 0.03 <= scale <= 30:
        return None
    return Finding(
        "observation_scale",
        f"Observations are {'large' if scale > 1 else 'tiny'} and nothing normalises them",
        f"observation_scale is {scale:.3g}: the root mean square of the largest feature; networks learn best near 1",
        ("set policy.normalize_observations=true", "or scale the observations in the environment"),
    )


def forced_actions(vitals: Vitals) -> Finding | None:
    """Masks leave one action nearly everywhere."""
    share = vitals.median("forced_share", 0.0)
    if share is None or share < 0.9:
        return None
    return Finding(
        "forced_actions",
        "Action masks leave a single action, so there is nothing to decide",
        f"in {share:.0%} of the steps (forced_share) the mask allows one action",
        ("check the mask: 1 or True means allowed", "let the environment skip steps without a choice"),
    )


def no_reward_signal(vitals: Vitals) -> Finding | None:
    """Advantages do not differ, so that the policy gradient is noise."""
    spread, scale, found = vitals.median("advantage_std"), vitals.return_scale, vitals.returns()
    if spread is None or scale is None or found is None:
        return None
    values = vitals.run.column("mean_return")
    alike = max(vitals.run.column("episodes")) >= 20 and np.ptp(values) <= 1e-6 * max(1.0, abs(found[1]))
    if not alike and (vitals.updates < SETTLED or vitals.improved or spread > 1e-3 * scale):
        return None
    return Finding(
        "no_reward_signal",
        "Advantages have no spread: all actions look alike",
        f"advantage_std is {spread:.2g} at returns of scale {scale:.2g}, and "
        + (f"all episodes have the return {found[1]:.4g}" if alike else f"the mean return stays at {found[1]:.4g}"),
        (
            "check that the reward depends on the actions: inchworm check-env shows the rewards of random ones",
            "with rare rewards, explore more (ppo.ent_coef), use longer rollouts, or reward progress on the way",
        ),
    )


def dead_memory(vitals: Vitals) -> Finding | None:
    """The memory of a recurrent policy holds nothing, or is not trained through time."""
    if vitals.policy.kind not in ("lstm", "gru"):
        return None
    spread = vitals.median("memory_spread", 0.0)
    if vitals.ppo.sequence_length == 1:
        return Finding(
            "dead_memory",
            "The memory is not trained: sequences have one step",
            "with ppo.sequence_length=1 no gradient reaches what an earlier step put into the memory",
            ("set ppo.sequence_length=auto, or to the number of steps to remember", "or use policy.kind=mlp, which is faster"),
        )
    if spread is None or spread >= 0.01:
        return None
    return Finding(
        "dead_memory",
        "The memory is dead: it is nearly the same in all situations",
        f"memory_spread is {spread:.2g}: the memory hardly depends on what was observed",
        (
            "check that observations vary and are near unit scale (policy.normalize_observations)",
            "raise ppo.learning_rate, or use policy.kind=mlp if nothing has to be remembered",
        ),
    )


def large_updates(vitals: Vitals) -> Finding | None:
    """The policy moves further in an update than PPO's clip can bound."""
    kl, clipped = vitals.median("approx_kl"), vitals.median("clip_fraction")
    if kl is None or clipped is None:
        return None
    constant_clip = vitals.ppo.clip_schedule == "constant" and vitals.ppo.clip_coef >= 0.1
    worst = float(vitals.run.column("approx_kl").max())  # after a single explosion nothing may move any more
    if kl <= 0.08 and worst <= 1.0 and not (constant_clip and clipped > 0.6):
        return None
    return Finding(
        "large_updates",
        "Updates are too large: the policy moves further than PPO's clip can bound",
        f"approx_kl has the median {kl:.3g} and the maximum {worst:.3g} (0.001 to 0.03 is usual), clip_fraction the median {clipped:.2g} "
        "(0.02 to 0.3)",
        (
            f"lower ppo.learning_rate (now {vitals.ppo.learning_rate:g}) by a factor of 3 to 10",
            f"lower ppo.update_epochs (now {vitals.ppo.update_epochs}), or set ppo.target_kl=0.02",
            "use larger minibatches",
        ),
    )


def no_updates(vitals: Vitals) -> Finding | None:
    """The policy hardly moves, although it takes steps."""
    kl, clipped = vitals.median("approx_kl", 0.0, 0.5), vitals.median("clip_fraction", 0.0, 0.5)
    if vitals.updates < SETTLED or kl is None or clipped is None or kl > 2e-5 or clipped > 1e-3:
        return None
    return Finding(
        "no_updates",
        "Updates have no effect: the policy hardly moves",
        f"approx_kl has the median {kl:.2g} (0.001 to 0.03 is usual), clip_fraction {clipped:.2g} (0.02 to 0.3)",
        (
            f"raise ppo.learning_rate (now {vitals.ppo.learning_rate:g}; 1e-4 to 1e-3 is usual)",
            f"raise ppo.update_epochs (now {vitals.ppo.update_epochs}), or use smaller minibatches",
            "check that ppo.freeze does not keep the actor",
        ),
    )


def entropy_collapse(vitals: Vitals) -> Finding | None:
    """The policy became deterministic early, without a better return for it."""
    entropy = vitals.run.column("entropy")
    if vitals.updates < SETTLED or vitals.returns() is None or vitals.improved:
        return None
    start, half = float(np.max(entropy[: max(1, len(entropy) // 10)])), float(np.median(entropy[len(entropy) // 3 :]))
    spec = vitals.run.spec
    boxes = [] if spec is None else [leaf_shape(space) for _, space in leaves(spec.action_space) if isinstance(space, spaces.Box)]
    dimensions = sum(int(np.prod(shape)) for shape in boxes)
    collapsed = start - half > 2.5 * dimensions if dimensions else start > 0 and half < 0.2 * start
    if not collapsed:
        return None
    return Finding(
        "entropy_collapse",
        "Exploration has ended early: the policy became deterministic before it was any better",
        f"entropy fell from {start:.3g} to {half:.3g} in the first third of the run, and the mean return did not rise",
        (
            f"raise ppo.ent_coef (now {vitals.ppo.ent_coef:g})",
            f"lower ppo.learning_rate (now {vitals.ppo.learning_rate:g})",
            "check the scale of the rewards, and that the best action does not depend on something unobserved",
        ),
    )


def useless_critic(vitals: Vitals) -> Finding | None:
    """The critic explains nothing of the returns in the second half of the run."""
    explained, spread = vitals.median("explained_variance", 0.5), vitals.median("return_std", 0.5)
    scale = vitals.return_scale
    if vitals.updates < SETTLED or explained is None or explained > 0.02 or spread is None or scale is None or spread <= 0.01 * scale:
        return None  # where all returns are alike there is nothing to explain
    return Finding(
        "useless_critic",
        "The critic predicts returns no better than a constant",
        f"explained_variance has the median {explained:.2g} in the second half of the run (it should rise towards 1)",
        (
            "set ppo.scale_rewards=true or policy.normalize_values=true where returns are large",
            f"raise ppo.vf_coef (now {vitals.ppo.vf_coef:g}), or ppo.update_epochs",
            "check that the observations hold what the return depends on, such as the time left",
        ),
    )


def value_scale(vitals: Vitals) -> Finding | None:
    """The critic's error is larger than the spread of the returns: its values are on another scale."""
    loss, spread, mean = vitals.median("value_loss", 0.5), vitals.median("return_std", 0.5), vitals.median("return_mean", 0.5)
    if vitals.updates < SETTLED or vitals.policy.normalize_values or loss is None or spread is None or mean is None:
        return None
    if np.sqrt(2 * loss) <= max(2.5 * spread, 0.2 * abs(mean)):
        return None
    return Finding(
        "value_scale",
        "Values are on another scale than the returns",
        f"value_loss is {loss:.3g}, but a constant at the mean return would reach {spread**2 / 2:.3g} (half of return_std², "
        f"{spread:.3g}²; the mean is {mean:.3g})",
        ("set ppo.scale_rewards=true or policy.normalize_values=true", "raise ppo.learning_rate or ppo.vf_coef", "train longer"),
    )


def clipped_gradients(vitals: Vitals) -> Finding | None:
    """The gradient is always far above its bound, so that the step size is decided by the clip alone."""
    norms, bound = vitals.run.column("grad_norm"), vitals.ppo.max_grad_norm
    if bound is None or len(norms) < SETTLED:
        return None
    median, share = float(np.median(norms)), float((norms > 5 * bound).mean())
    if median <= 200 * bound or share < 0.9:
        return None
    return Finding(
        "clipped_gradients",
        "The gradient is always clipped, and by far",
        f"grad_norm has the median {median:.3g}, {median / bound:.0f} times ppo.max_grad_norm={bound:g}, and is above 5 times that in "
        f"{share:.0%} of the updates; most of it is usually the value loss",
        (
            "set ppo.scale_rewards=true or policy.normalize_values=true",
            f"lower ppo.vf_coef (now {vitals.ppo.vf_coef:g})",
            "raise ppo.max_grad_norm",
        ),
    )


def evaluation_gap(vitals: Vitals) -> Finding | None:
    """Evaluations are far below the returns of training."""
    rows, run = vitals.run.evaluations, vitals.run
    name = "episode/team_return" if "episode/team_return" in run.names else "mean_return"
    training = run.column(name)
    if not rows or vitals.updates < SETTLED or len(training) < MIN_UPDATES:
        return None
    last, trained = rows[-1], float(np.median(training[-max(3, len(training) // 20) :]))
    score, spread = last["evaluation/mean_return"], last.get("evaluation/std_return", 0.0)
    error = spread / np.sqrt(max(1.0, last.get("evaluation/episodes", 1.0)))
    gap, reach = trained - score, float(training.max() - training.min())
    if gap <= max(4 * error, 0.3 * reach, 0.3 * abs(trained)):
        return None
    how = "greedily" if run.config.evaluation.deterministic else "by sampling"
    return Finding(
        "evaluation_gap",
        "Evaluations are far below the returns of training",
        f"the last evaluation has a mean return of {score:.4g}, training {trained:.4g} (the policy is evaluated {how})",
        (
            "try evaluation.deterministic=false: the greedy action may not be what was trained",
            "check that the environment is the same in evaluation: wrappers, clipped rewards, lost lives that end training episodes",
            "compare the normalisers: custom wrappers that normalise in training only are the usual cause",
        ),
    )


def time_bound(vitals: Vitals) -> Finding | None:
    """A slow run spends nearly all of its time in the environment, or in learning."""
    seconds, speeds = vitals.run.seconds, [row["steps_per_second"] for row in vitals.run.timing if "steps_per_second" in row]
    total = sum(seconds.values())
    if len(speeds) < MIN_UPDATES or total < 30 or float(np.median(speeds)) > SLOW:
        return None
    name, most = max(seconds.items(), key=lambda item: item[1])
    if most < 0.8 * total or name not in _BOUND:
        return None
    title, tries = _BOUND[name]
    why = f"{most / total:.0%} of {total:,.0f} s were spent there, at {np.median(speeds):,.0f} steps per second"
    return Finding("time_bound", title, why, tries, note=True)


_BOUND = {
    "env": (
        "The environment decides the speed",
        ("set env.num_workers=auto, or to the number of cores", "raise env.num_envs", "make its step faster: --profile shows the parts"),
    ),
    "learn": (
        "Learning decides the speed",
        (
            "use larger minibatches (ppo.minibatch_size) or fewer ppo.update_epochs",
            "try run.backend=numpy for small networks, ppo.compile=auto for long torch runs, a GPU for large ones",
        ),
    ),
}

RULES: tuple[Rule, ...] = (
    learning_rate_zero,
    endless_episodes,
    hidden_termination,
    reward_scale,
    observation_scale,
    forced_actions,
    dead_memory,
    no_reward_signal,
    clipped_gradients,
    large_updates,
    no_updates,
    entropy_collapse,
    evaluation_gap,
    value_scale,
    useless_critic,
    time_bound,
)
"""From causes to symptoms."""

FOLLOWS = {
    "dead_memory": ("observation_scale",),
    "no_reward_signal": ("forced_actions",),
    "clipped_gradients": ("reward_scale", "observation_scale"),
    "large_updates": ("observation_scale",),
    "no_updates": ("learning_rate_zero", "forced_actions", "no_reward_signal", "clipped_gradients", "reward_scale", "observation_scale"),
    "entropy_collapse": ("reward_scale", "observation_scale", "large_updates", "forced_actions"),
    "evaluation_gap": ("learning_rate_zero", "no_updates", "observation_scale"),
    "value_scale": ("reward_scale", "observation_scale", "learning_rate_zero", "no_updates", "hidden_termination", "endless_episodes"),
    "useless_critic": (
        "reward_scale", "observation_scale", "learning_rate_zero", "no_updates", "no_reward_signal", "large_updates", "value_scale",
        "hidden_termination", "endless_episodes",
    ),
}  # fmt: skip
"""Rule -> rules that explain it, if they have found something."""


def diagnose(run: RunRecord) -> list[Finding]:
    """What is likely wrong with a run, the most likely cause first; empty for a healthy one, or one that is too short to judge."""
    vitals = Vitals(run)
    if vitals.updates < MIN_UPDATES:
        return []
    found: dict[str, Finding] = {}
    for rule in RULES:
        finding = rule(vitals)
        if finding is not None:
            cause = next((name for name in FOLLOWS.get(finding.rule, ()) if name in found), "")
            found[finding.rule] = replace(finding, follows=cause)
    return sorted(found.values(), key=lambda finding: (finding.note, bool(finding.follows)))


def findings_text(findings: list[Finding]) -> str:
    """Findings as lines for a terminal."""
    lines = []
    for number, finding in enumerate(findings, 1):
        lines.append(f"{number}. {finding.title}" + (f" (probably because of {finding.follows})" if finding.follows else ""))
        lines.append(f"   why: {finding.why}")
        lines += [f"   {'try:' if index == 0 else '    '} {text}" for index, text in enumerate(finding.tries)]
        lines.append(f"   see: docs/troubleshooting.md#{finding.rule.replace('_', '-')}")
    return "\n".join(lines)
