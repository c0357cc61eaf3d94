"""D1: worlds that break their promise in one step, and what a peer makes of them."""

from __future__ import annotations

import functools
import warnings
from typing import Any

from faults.programme import Outcome, Work, peer, procedure


@procedure(
    "D1",
    title="Worlds that break their promise in one step of one lane, in process, in a worker, batched",
    must="an error at that very step naming lane, step, key and value; weights, normalisers and earlier rollouts untouched",
    full=1,
    test=1,
)
def wrong_steps(work: Work) -> Outcome:
    """Every case; the second rollout has the fault in it, and the first must stay what it was."""
    from faults.bad_data_worlds import BATCHED, CASES, HARMLESS

    outcome = Outcome()
    layouts = (0, 1)
    jobs: list[tuple[str, int | str]] = [(case, layout) for case in CASES for layout in layouts]
    jobs += [(case, "batched") for case in BATCHED] + [(case, layout) for case in HARMLESS for layout in layouts]
    workers = _pool_size(work)
    jobs = [job for number, job in enumerate(jobs) if job[1] != 1 or number % workers == 0]
    for number in work.each(len(jobs)):
        case, layout = jobs[number]
        where = {0: "in process", 1: "in a worker"}.get(layout, "batched")  # type: ignore[call-overload]
        wrong = _harmless(case, int(layout)) if case in HARMLESS else _refused(case, layout)
        outcome.check(not wrong, f"{case}, {where}: {wrong}")
    outcome.figures = {
        "cases": f"{len(CASES)} that must be refused, {len(BATCHED)} of them or like them batched, {len(HARMLESS)} that must not"
    }
    return outcome


def _pool_size(work: Work) -> int:
    """In the fast suite (which gives a scratch directory of pytest's) one case in six is tried in a worker, too: each starts a process."""
    return 6 if "pytest" in str(work.scratch) else 1


def _collector(case: str, layout: int | str) -> Any:
    from faults.bad_data_worlds import LANES, SEED, Spoiled, SpoiledVector
    from inchworm.backends.numpy.policy import NumpyPolicy
    from inchworm.collect.collector import RolloutCollector
    from inchworm.config.sections import PolicyConfig
    from inchworm.env.source import make_vector_env
    from inchworm.policy.spec import PolicySpec

    if layout == "batched":
        env = make_vector_env(SpoiledVector(case), seed=SEED)
    else:
        env = make_vector_env(functools.partial(Spoiled, case), LANES, int(layout), seed=SEED)
    spec = PolicySpec(env.observation_space, env.action_space, PolicyConfig(hidden_sizes=(4,), normalize_observations=True))
    return RolloutCollector(env, NumpyPolicy(spec), seed=SEED)


def _content(rollout: Any) -> list[bytes]:
    import optree

    return [leaf.tobytes() for name in ("observations", "rewards", "actions") for leaf in optree.tree_leaves(rollout[name])]


def _refused(case: str, layout: int | str) -> str:
    """What is wrong with how a case is refused, or nothing."""
    from faults.bad_data_worlds import BATCHED, CASES, LANE, STEP
    from inchworm.core.errors import InchwormError
    from inchworm.policy.file import fingerprint

    words = BATCHED[case][2] if layout == "batched" else (f"lane {LANE}", *CASES[case][1])
    is_number = layout == "batched" and isinstance(BATCHED[case][1], float)
    collector = _collector(case, layout)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            first = collector.collect(8)
            kept, before = _content(first), fingerprint(collector.policy.get_weights())
            try:
                collector.collect(8)
            except InchwormError as error:
                text = str(error)
            except Exception as error:  # any other error is no answer
                return f"not an error of ours: {type(error).__name__}: {error}"
            else:
                return "nobody noticed"
    finally:
        collector.close()
    # Batched arrays are looked at as a whole: an array of a wrong shape or type has no lane.
    words = (*words, f"step {STEP}") if layout != "batched" or is_number else words
    words = (*words, f"lane {LANE}") if is_number else words
    missing = [word for word in words if word not in text]
    if missing:
        return f"the error does not say {missing}: {text[:300]}"
    if fingerprint(collector.policy.get_weights()) != before or _content(first) != kept:
        return "the policy or the rollout before has changed"
    return "" if collector.env_steps == (STEP - 1) * 3 else f"{collector.env_steps} steps were counted, not {(STEP - 1) * 3}"


def _harmless(case: str, layout: int) -> str:
    """What is wrong with how a harmless oddity is taken, or nothing."""
    import numpy as np

    from faults.bad_data_worlds import LANE, LANES, STEP

    collector = _collector(case, layout)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("default")
            rollout = collector.collect(16)
    finally:
        collector.close()
    row, ended = STEP - 1, case in ("both flags", "NaN in info")
    flags = bool(rollout.terminated[row, LANE]), bool(rollout.truncated[row, LANE])
    if flags != (ended, False):
        return f"terminated and truncated are {flags}"
    if case == "float64 observation":
        casts = [str(warning.message) for warning in told if "float64" in str(warning.message)]
        right = rollout.observations["x"].dtype == np.float32 and rollout.observations["x"][STEP, LANE, 0] == np.float32(
            0.01 * STEP
        ) + np.float32(0.25)
        return "" if right and (layout or len(casts) == 1) else f"{len(casts)} warnings, value {rollout.observations['x'][STEP, LANE]}"
    if case == "NaN in info":
        infos = [dict(episode.info) for episode in rollout.episodes]
        return "" if infos == [{"fine": 2.0}] else f"the episodes' info is {infos}"
    return "" if np.isfinite(rollout.rewards).all() and rollout.rewards.shape == (16, LANES) else "a reward is not finite"


@peer("D1", "Stable-Baselines3")
def wrong_steps_sb3(work: Work) -> Outcome:
    """The same worlds in a DummyVecEnv, with VecCheckNan as its documentation recommends, and without."""
    from faults.bad_data_worlds import CASES

    outcome, bare = Outcome(), 0
    cases = list(CASES)
    for number in work.each(len(cases)):
        bare += not _sb3(cases[number], checked=False)
        wrong = _sb3(cases[number], checked=True)
        outcome.check(not wrong, f"{cases[number]}: {wrong}")
    outcome.figures = {"without VecCheckNan": f"{bare} of {len(cases)}"}
    outcome.notes.append("a pass is any error before the world is stepped again; that it names lane, step and key is not asked of it")
    return outcome


def _sb3(case: str, *, checked: bool) -> str:
    """Whether learning stops at the step that is wrong; what happens instead, or nothing."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv, VecCheckNan

    from faults.bad_data_worlds import LANE, LANES, Spoiled

    Spoiled.last = None
    envs: Any = DummyVecEnv([functools.partial(Spoiled, case) for _ in range(LANES)])
    envs.set_options([{"chosen": lane == LANE} for lane in range(LANES)])
    envs = VecCheckNan(envs, raise_exception=True) if checked else envs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            PPO("MultiInputPolicy", envs, n_steps=32, batch_size=32, n_epochs=1, device="cpu", seed=0).learn(LANES * 32)
        except Exception as error:  # whatever stops it in time counts
            seen = Spoiled.last
            return "" if seen is not None and seen.steps_after == 0 else f"noticed later: {type(error).__name__}: {str(error)[:80]}"
    return "nobody noticed"
