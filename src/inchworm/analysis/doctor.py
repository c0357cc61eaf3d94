"""The doctor: reads the metrics of a run and says what is likely wrong, by which numbers, and what to try.

A rule looks at one thing and returns the numbers that say that it is wrong, or None. Rules stand from causes to symptoms, which is the
order in which findings are shown: rewards in the thousands come before the gradients that they make large. Thresholds are medians over a
part of the run, so that single bad updates and the beginning do not decide; they were set on some environments and are tested on others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
    """What the rules compare: medians over the updates of a run that took steps."""

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
        early, late, noise = self.returns() or (0.0, 0.0, 0.0)
        return late - early > max(0.1 * abs(early), 8 * noise)  # means over 100 episodes move slowly

    @property
    def return_scale(self) -> float | None:
        """The root mean square of the returns that the critic learns, in the units in which it learns them."""
        mean, std = self.median("return_mean"), self.median("return_std")
        return None if mean is None or std is None else float(np.hypot(mean, std))

    @property
    def episodes(self) -> float:
        """Finished episodes."""
        return float(max(self.run.column("episodes"), default=0.0))


Look = Callable[[Vitals], str | None]


@dataclass(frozen=True)
class Rule:
    """What to look for, and what to say: texts may name settings, as `{ppo.gamma:g}`."""

    name: str
    title: str
    look: Look
    tries: tuple[str, ...]
    follows: tuple[str, ...]
    """Rules that explain this one, if they have found something."""
    note: bool


RULES: list[Rule] = []
"""From causes to symptoms."""


def rule(*tries: str, follows: tuple[str, ...] = (), note: bool = False) -> Callable[[Look], Look]:
    """Make a rule of a function, after those above it. Its docstring is the title of the finding."""

    def add(look: Look) -> Look:
        RULES.append(Rule(look.__name__, str(look.__doc__).rstrip("."), look, tries, follows, note))
        return look

    return add


def diagnose(run: RunRecord) -> list[Finding]:
    """What is likely wrong with a run, the most likely cause first; empty for a healthy one, or one that is too short to judge."""
    vitals, found = Vitals(run), dict[str, Finding]()
    for one in RULES if vitals.updates >= MIN_UPDATES else ():
        why = one.look(vitals)
        if why is not None:
            cause = next((name for name in one.follows if name in found), "")
            tries = tuple(text.format(ppo=vitals.ppo) for text in one.tries)
            found[one.name] = Finding(one.name, one.title, why, tries, one.note, cause)
    return sorted(found.values(), key=lambda finding: (finding.note, bool(finding.follows)))


def because(finding: Finding, findings: list[Finding]) -> str:
    """` (probably because of 1)`: the number of the finding that may be the cause; empty if there is none."""
    numbers = {one.rule: number for number, one in enumerate(findings, 1)}
    return f" (probably because of {numbers[finding.follows]})" if finding.follows in numbers else ""


def findings_text(findings: list[Finding]) -> str:
    """Findings as lines for a terminal."""
    lines = []
    for number, finding in enumerate(findings, 1):
        lines.append(f"{number}. {finding.title}{because(finding, findings)}")
        lines.append(f"   why: {finding.why}")
        lines += [f"   {'try:' if index == 0 else '    '} {text}" for index, text in enumerate(finding.tries)]
        lines.append(f"   see: docs/troubleshooting.md#{finding.rule.replace('_', '-')}")
    return "\n".join(lines)


# Causes


@rule("set ppo.learning_rate, such as 3e-4", "a schedule decays to 0 at run.total_timesteps: raise that, or use a constant schedule")
def learning_rate_zero(vitals: Vitals) -> str | None:
    """The learning rate is zero, so nothing is learned."""
    rates, ppo = vitals.run.column("learning_rate"), vitals.ppo
    share = float((rates <= 1e-10).mean()) if len(rates) else 0.0
    if share <= 0.1:
        return None
    return f"learning_rate is 0 in {share:.0%} of the updates (it starts at {ppo.learning_rate:g}, schedule {ppo.learning_rate_schedule})"


@rule("set env.max_episode_steps to truncate episodes", "check that the environment returns terminated=True at its end: inchworm check-env")
def endless_episodes(vitals: Vitals) -> str | None:
    """Episodes never end."""
    steps = vitals.run.env_steps / vitals.run.config.env.num_envs
    if vitals.episodes or steps < 2_000:
        return None
    return f"no episode ended in {steps:,.0f} steps of each copy, so there is no return to look at"


@rule(
    "let the environment return terminated=True where the episode really ends, truncated=True only where a limit cuts it off",
    "a wrapper of the old Gym API may report every done as truncated; inchworm check-env shows what is returned",
)
def hidden_termination(vitals: Vitals) -> str | None:
    """Truncation hides termination: the critic values what follows a real end."""
    shares, length, spread = vitals.run.column("truncated_share"), vitals.median("mean_length", 0.0), vitals.median("length_std", 0.0)
    if vitals.episodes < 20 or not len(shares) or shares.min() < 1.0 or length is None or spread is None or spread < 0.05 * length:
        return None
    return (
        f"all {vitals.episodes:,.0f} episodes were truncated and none terminated, but their lengths vary ({length:.4g} ± {spread:.3g}), "
        "which a time limit does not do"
    )


@rule("set ppo.scale_rewards=true", "or policy.normalize_values=true", "or scale the rewards in the environment")
def reward_scale(vitals: Vitals) -> str | None:
    """Rewards are far from unit scale and nothing normalises them."""
    scale, found = vitals.return_scale, vitals.returns()
    if scale is None or vitals.policy.normalize_values or vitals.ppo.scale_rewards or not (scale > 1_000 or 0 < scale < 0.02):
        return None
    if scale < 0.02 and found is not None and max(abs(found[0]), abs(found[1])) == 0.0:
        return None  # no rewards at all
    return f"the returns that the critic learns have the scale {scale:.3g} (return_mean, return_std); networks learn best near 1"


@rule("set policy.normalize_observations=true", "or scale the observations in the environment")
def observation_scale(vitals: Vitals) -> str | None:
    """Observations are far from unit scale and nothing normalises them."""
    scale = vitals.median("observation_scale", 0.0)
    if scale is None or vitals.policy.normalize_observations or 0.03 <= scale <= 30:
        return None
    return f"observation_scale is {scale:.3g}: the root mean square of the largest feature; networks learn best near 1"


@rule("check the mask: 1 or True means allowed", "let the environment skip steps without a choice")
def forced_actions(vitals: Vitals) -> str | None:
    """Action masks leave a single action, so there is nothing to decide."""
    share = vitals.median("forced_share", 0.0)
    return None if share is None or share < 0.9 else f"in {share:.0%} of the steps (forced_share) the mask allows one action"


@rule(
    "set ppo.sequence_length=auto, or to the number of steps to remember",
    "check that observations vary and are near unit scale; with large returns set policy.normalize_values=true",
    "use policy.kind=mlp, which is faster, if nothing has to be remembered",
    follows=("observation_scale",),
)
def dead_memory(vitals: Vitals) -> str | None:
    """The memory is dead."""
    spread = vitals.median("memory_spread", 0.0)
    if vitals.policy.kind not in ("lstm", "gru"):
        return None
    if vitals.ppo.sequence_length == 1:
        return "with ppo.sequence_length=1 no gradient reaches what an earlier step put into the memory"
    return None if spread is None or spread >= 0.01 else f"memory_spread is {spread:.2g}: it is nearly the same in all situations"


@rule(
    "check that the reward depends on the actions: inchworm check-env shows the rewards of random ones",
    "with rare rewards, explore more (ppo.ent_coef), use longer rollouts, or reward progress on the way",
    follows=("forced_actions",),
)
def no_reward_signal(vitals: Vitals) -> str | None:
    """Advantages have no spread: all actions look alike."""
    spread, scale, found = vitals.median("advantage_std"), vitals.return_scale, vitals.returns()
    if spread is None or scale is None or found is None:
        return None
    alike = vitals.episodes >= 20 and np.ptp(vitals.run.column("mean_return")) <= 1e-6 * max(1.0, abs(found[1]))
    if not alike and (vitals.updates < SETTLED or vitals.improved or spread > 1e-3 * scale):
        return None
    shown = f"all episodes have the return {found[1]:.4g}" if alike else f"the mean return stays at {found[1]:.4g}"
    return f"advantage_std is {spread:.2g} at returns of scale {scale:.2g}, and {shown}"


# How the policy moves


@rule(
    "set ppo.scale_rewards=true or policy.normalize_values=true",
    "lower ppo.vf_coef (now {ppo.vf_coef:g})",
    "raise ppo.max_grad_norm",
    follows=("reward_scale", "observation_scale"),
)
def clipped_gradients(vitals: Vitals) -> str | None:
    """The gradient is always clipped, and by far."""
    norms, bound = vitals.run.column("grad_norm"), vitals.ppo.max_grad_norm
    if bound is None or len(norms) < SETTLED or np.median(norms) <= 200 * bound or np.mean(norms > 5 * bound) < 0.9:
        return None
    return (
        f"grad_norm has the median {np.median(norms):.3g}, {np.median(norms) / bound:.0f} times ppo.max_grad_norm={bound:g}; "
        "most of it is usually the value loss"
    )


@rule(
    "lower ppo.learning_rate (now {ppo.learning_rate:g}) by a factor of 3 to 10",
    "lower ppo.update_epochs (now {ppo.update_epochs}), or set ppo.target_kl=0.02",
    "use larger minibatches",
    follows=("observation_scale",),
)
def large_updates(vitals: Vitals) -> str | None:
    """Updates are too large: the policy moves further than PPO's clip can bound."""
    kl, clipped = vitals.median("approx_kl"), vitals.median("clip_fraction")
    if kl is None or clipped is None:
        return None
    worst = float(vitals.run.column("approx_kl").max())  # after a single explosion nothing may move any more
    clips_much = clipped > 0.6 and vitals.ppo.clip_schedule == "constant" and vitals.ppo.clip_coef >= 0.1
    if kl <= 0.08 and worst <= 1.0 and not clips_much:
        return None
    return (
        f"approx_kl has the median {kl:.3g} and the maximum {worst:.3g} (0.001 to 0.03 is usual), clip_fraction the median {clipped:.2g} "
        "(0.02 to 0.3)"
    )


@rule(
    "raise ppo.learning_rate (now {ppo.learning_rate:g}; 1e-4 to 1e-3 is usual)",
    "raise ppo.update_epochs (now {ppo.update_epochs}), or use smaller minibatches",
    "check that ppo.freeze does not keep the actor",
    follows=("learning_rate_zero", "forced_actions", "no_reward_signal", "clipped_gradients", "reward_scale", "observation_scale"),
)
def no_updates(vitals: Vitals) -> str | None:
    """Updates have no effect: the policy hardly moves."""
    kl, clipped = vitals.median("approx_kl", 0.0, 0.5), vitals.median("clip_fraction", 0.0, 0.5)
    if vitals.updates < SETTLED or kl is None or clipped is None or kl > 2e-5 or clipped > 1e-3:
        return None
    return f"approx_kl has the median {kl:.2g} (0.001 to 0.03 is usual), clip_fraction {clipped:.2g} (0.02 to 0.3)"


@rule(
    "raise ppo.ent_coef (now {ppo.ent_coef:g})",
    "lower ppo.learning_rate (now {ppo.learning_rate:g})",
    "check the scale of the rewards, and that the best action does not depend on something unobserved",
    follows=("reward_scale", "observation_scale", "large_updates", "forced_actions"),
)
def entropy_collapse(vitals: Vitals) -> str | None:
    """Exploration has ended early: the policy became deterministic before it was any better."""
    entropy, spec = vitals.run.column("entropy"), vitals.run.spec
    if vitals.updates < SETTLED or vitals.returns() is None or vitals.improved:
        return None
    start, later = float(np.max(entropy[: max(1, len(entropy) // 10)])), float(np.median(entropy[len(entropy) // 3 :]))
    boxes = [] if spec is None else [leaf_shape(space) for _, space in leaves(spec.action_space) if isinstance(space, spaces.Box)]
    dimensions = sum(int(np.prod(shape)) for shape in boxes)
    if not (start - later > 2.5 * dimensions if dimensions else start > 0 and later < 0.2 * start):
        return None
    return f"entropy fell from {start:.3g} to {later:.3g} within a third of the run, and the mean return did not rise"


# What comes of it


@rule(
    "try evaluation.deterministic=false: the greedy action may not be what was trained",
    "check that the environment is the same in evaluation: wrappers, clipped rewards, lost lives that end training episodes",
    "compare the normalisers: custom wrappers that normalise in training only are the usual cause",
    follows=("learning_rate_zero", "no_updates", "observation_scale"),
)
def evaluation_gap(vitals: Vitals) -> str | None:
    """Evaluations are far below the returns of training."""
    rows, run = vitals.run.evaluations, vitals.run
    training = run.column("episode/team_return" if "episode/team_return" in run.names else "mean_return")
    if not rows or vitals.updates < SETTLED or len(training) < MIN_UPDATES:
        return None
    last, trained = rows[-1], float(np.median(training[-max(3, len(training) // 20) :]))
    score = last["evaluation/mean_return"]
    error = last.get("evaluation/std_return", 0.0) / np.sqrt(max(1.0, last.get("evaluation/episodes", 1.0)))
    if trained - score <= max(4 * error, 0.3 * np.ptp(training), 0.3 * abs(trained)):
        return None
    how = "greedily" if run.config.evaluation.deterministic else "by sampling"
    return f"the last evaluation has a mean return of {score:.4g}, training {trained:.4g} (the policy is evaluated {how})"


@rule(
    "set ppo.scale_rewards=true or policy.normalize_values=true",
    "raise ppo.learning_rate or ppo.vf_coef",
    "train longer",
    follows=("reward_scale", "observation_scale", "learning_rate_zero", "no_updates", "hidden_termination", "endless_episodes"),
)
def value_scale(vitals: Vitals) -> str | None:
    """Values are on another scale than the returns."""
    loss, spread, mean = (vitals.median(name, 0.5) for name in ("value_loss", "return_std", "return_mean"))
    if vitals.updates < SETTLED or vitals.policy.normalize_values or loss is None or spread is None or mean is None:
        return None
    if np.sqrt(2 * loss) <= max(2.5 * spread, 0.2 * abs(mean)):
        return None
    constant = f"{spread**2 / 2:.3g} (half of return_std², {spread:.3g}²; the mean is {mean:.3g})"
    return f"value_loss is {loss:.3g}, but a constant at the mean return would reach {constant}"


@rule(
    "set ppo.scale_rewards=true or policy.normalize_values=true where returns are large",
    "raise ppo.vf_coef (now {ppo.vf_coef:g}), or ppo.update_epochs",
    "check that the observations hold what the return depends on, such as the time left",
    follows=("reward_scale", "observation_scale", "learning_rate_zero", "no_updates", "no_reward_signal", "large_updates", "value_scale",
             "hidden_termination", "endless_episodes"),
)  # fmt: skip
def useless_critic(vitals: Vitals) -> str | None:
    """The critic predicts returns no better than a constant."""
    explained, spread, scale = vitals.median("explained_variance", 0.5), vitals.median("return_std", 0.5), vitals.return_scale
    if vitals.updates < SETTLED or explained is None or explained > 0.02 or spread is None or scale is None or spread <= 0.01 * scale:
        return None  # where all returns are alike there is nothing to explain
    return f"explained_variance has the median {explained:.2g} in the second half of the run (it should rise towards 1)"


def _bound_by(part: str, vitals: Vitals) -> str | None:
    """The share of the time that a slow run spends on a part, if that is nearly all of it."""
    seconds, speeds = vitals.run.seconds, [row["steps_per_second"] for row in vitals.run.timing if "steps_per_second" in row]
    total = sum(seconds.values())
    if len(speeds) < MIN_UPDATES or total < 30 or np.median(speeds) > SLOW or seconds.get(part, 0.0) < 0.8 * total:
        return None
    return f"{seconds[part] / total:.0%} of {total:,.0f} s were spent there, at {np.median(speeds):,.0f} steps per second"


@rule(
    "set env.num_workers=auto, or to the number of cores",
    "raise env.num_envs, or make its step faster: --profile shows the parts",
    note=True,
)
def bound_by_env(vitals: Vitals) -> str | None:
    """The environment decides the speed."""
    return _bound_by("env", vitals)


@rule(
    "use larger minibatches (ppo.minibatch_size) or fewer ppo.update_epochs",
    "try run.backend=numpy for small networks, ppo.compile=auto for long torch runs, a GPU for large ones",
    note=True,
)
def bound_by_learning(vitals: Vitals) -> str | None:
    """Learning decides the speed."""
    return _bound_by("learn", vitals)
