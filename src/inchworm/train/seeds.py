"""Many seeds: the same training with several seeds, one run directory each, and a summary of their scores."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from inchworm.backends.registry import prefers_one_program
from inchworm.config.sections import PolicyConfig, PPOConfig, TrainingConfig
from inchworm.core.errors import USAGE_ERRORS, ConfigError, InchwormError
from inchworm.core.protocols import Actor, Callback
from inchworm.core.tensor_file import read_bytes, read_json
from inchworm.core.types import SeedEvent
from inchworm.env.source import env_source
from inchworm.evaluate.stats import bootstrap_interval95, interquartile_mean
from inchworm.policy.composite import PolicyMap
from inchworm.policy.spec import PolicySpec
from inchworm.run.bundle import SUMMARY_JSON, Bundle, create_bundle
from inchworm.run.checkpoint import Checkpoint, TrainingCheckpointer
from inchworm.run.directory import NOT_BIT_IDENTICAL, NotExactWarning
from inchworm.tracking.jsonl import METRICS, read_rows
from inchworm.train.loop import TrainingState, as_callback, has_stopped, reached_limits
from inchworm.train.resolve import is_native_env, resolve_config
from inchworm.train.seed_trainers import ProcessTrainer, TogetherTrainer, default_jobs

if TYPE_CHECKING:
    from inchworm.tracking.console import SeedsView
    from inchworm.train.trainer import EnvLike

SeedTrainer: TypeAlias = Callable[[Bundle, Sequence[int]], Generator[SeedEvent, None, None]]
"""What trains the runs of a bundle: called with the bundle and the seeds that are not finished, it yields what they report.

Each run is written as `bundle.run_config(seed)` describes a single run, and continued from its newest checkpoint. When the generator is
closed early, every run is saved.
"""


def plan_seeds(
    policy: Any,
    env: Any,
    bundle: Bundle,
    *,
    jobs: int | None = None,
    together: bool | None = None,
    callbacks: Sequence[Any] = (),
    custom_losses: Sequence[Any] = (),
) -> tuple[SeedTrainer, str]:
    """Choose what trains the seeds of a bundle, and say it in a line: one program if `together`, else processes, `jobs` at a time.

    The choice changes the last bits of results, so a bundle keeps it.
    """
    config, own = bundle.config, [*callbacks, *custom_losses]
    if together:
        check_together(policy, env, config, own, jobs=jobs)
    elif together is None and jobs is None and why_not_together(policy, env, config, own) is None:
        together = bundle.together if bundle.continued else prefers_one_program(config.run.backend)
    together = bool(together)
    bundle.update(config, together=together)
    if together:
        return TogetherTrainer(policy), "all seeds together, in one program"
    jobs = jobs or default_jobs(config, len(bundle.seeds))
    trainer = ProcessTrainer(policy, env, jobs, tuple(callbacks), tuple(custom_losses))
    return trainer, f"{jobs} {'process' if jobs == 1 else 'processes'} at a time"


def check_together(policy: Any, env: Any, config: TrainingConfig, functions: Sequence[Any] = (), *, jobs: int | None) -> None:
    """Refuse to train seeds together where that cannot be done."""
    why_not = why_not_together(policy, env, config, functions)
    if why_not is not None or jobs is not None:
        raise ConfigError(f"the seeds cannot be trained together: {why_not or f'jobs={jobs} is a number of processes'}; leave out together")


def why_not_together(policy: Any, env: Any, config: TrainingConfig, functions: Sequence[Any]) -> str | None:
    """Why one program cannot train all seeds, in a sentence; None if it can. `functions` are the user's callbacks and losses."""
    if functions:
        return "callbacks and custom losses are called for one seed at a time"
    if config.policies or not isinstance(policy, str | PolicyConfig | PolicySpec):
        return "only one built-in policy is trained inside a compiled program"
    if config.run.backend in ("auto", "numpy", "torch"):  # not imported for this
        return f"run.backend={config.run.backend} does not compile whole iterations; jax does, with a JAX-native environment"
    if config.convergence.target is not None and config.convergence.returns == "training":
        return "convergence.returns=training reads every rollout"
    if config.curriculum.mode != "none":
        return "a curriculum reads every rollout"
    if config.ppo.freeze and (config.policy.normalize_observations or config.policy.normalize_values):
        return "ppo.freeze may keep a normaliser"
    is_native, reason = is_native_env(env, config)
    return None if is_native else reason or f"{config.env.id} is stepped from the host: it is not JAX-native"


@dataclass(frozen=True, slots=True)
class SeedScore:
    """How the run of one seed ended."""

    seed: int
    status: Literal["done", "failed", "unfinished"]
    score: float | None = None
    """Mean return of its final evaluation; without evaluations that of its last training episodes; None if it is not done."""
    win_rate: float | None = None
    """Win rate of its final evaluation, where there is one."""
    env_steps: int = 0
    iteration: int = 0
    stop_reason: str | None = None
    """Why it ended: see `History.stop_reason`; None if it is not done."""
    converged: Mapping[str, Any] | None = None
    """The iteration, env steps and mean return at which it converged; None if it has not, or has no `convergence.target`."""
    error: str | None = None
    """Why it failed."""
    failures: tuple[str, ...] = ()
    """Errors outside of the training itself, such as a crashed evaluation."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "failures": list(self.failures)}


@dataclass(frozen=True)
class SeedsSummary:
    """The scores of several seeds, with the interquartile mean of those that are done and its interval."""

    path: Path
    """The directory of the bundle; `path / "seed-0"` is the run of seed 0."""
    env: str
    seeds: tuple[SeedScore, ...]
    score_of: Literal["evaluation", "training"] = "evaluation"
    """Whether scores are of final evaluations, or, because none was asked for, of the last training episodes."""

    @property
    def scores(self) -> np.ndarray:
        """[done seeds] f64."""
        return np.array([row.score for row in self.seeds if row.score is not None], np.float64)

    @property
    def interquartile_mean(self) -> float:
        """The mean of the middle half of the scores; NaN without any."""
        return interquartile_mean(self.scores) if self.scores.size else math.nan

    @property
    def interval95(self) -> tuple[float, float]:
        """The 95 % bootstrap interval of the interquartile mean over seeds; NaN below two."""
        return bootstrap_interval95(self.scores)

    @property
    def failed(self) -> tuple[SeedScore, ...]:
        """The seeds whose training raised an error in this call."""
        return tuple(row for row in self.seeds if row.status == "failed")

    @property
    def unfinished(self) -> tuple[SeedScore, ...]:
        """The seeds that are still to be trained or continued, failed ones included."""
        return tuple(row for row in self.seeds if row.status != "done")

    def __str__(self) -> str:
        """One line, such as `CartPole-v1, 16 seeds: interquartile mean 499.2 [497, 500] of final evaluations`."""
        counts = f"{len(self.seeds)} seeds" + (f", {len(self.unfinished)} of them not done" if self.unfinished else "")
        return f"{self.env}, {counts}: {self.score_text()}"

    def score_text(self) -> str:
        """`interquartile mean 499.2 [497, 500] of final evaluations (95 % bootstrap interval)`."""
        if not self.scores.size:
            return "no scores"
        low, high = self.interval95
        interval = "" if math.isnan(low) else f" [{low:.5g}, {high:.5g}]"
        of = "final evaluations" if self.score_of == "evaluation" else "the last training episodes"
        return f"interquartile mean {self.interquartile_mean:.5g}{interval} of {of}{' (95 % bootstrap interval)' if interval else ''}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for `summary.json`: finite floats or None."""

        def plain(value: float) -> float | None:
            return value if math.isfinite(value) else None

        return {
            "env": self.env,
            "score_of": self.score_of,
            "interquartile_mean": plain(self.interquartile_mean),
            "interval95": [plain(end) for end in self.interval95],
            "seeds": [row.to_dict() for row in self.seeds],
        }

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The headings and rows of a table with a row per seed."""
        wins, converged = (any(getattr(row, name) is not None for row in self.seeds) for name in ("win_rate", "converged"))
        headings = ["seed", "score", *(["win rate"] if wins else []), "env steps", *(["converged after"] if converged else []), "status"]
        rows = []
        for row in self.seeds:
            cells = [str(row.seed), "" if row.score is None else f"{row.score:.5g}"]
            cells += ["" if row.win_rate is None else f"{row.win_rate:.2f}"] if wins else []
            cells.append(f"{row.env_steps:,}")
            cells += ["" if row.converged is None else f"{row.converged['env_steps']:,}"] if converged else []
            rows.append([*cells, row.status])
        return headings, rows

    def page(self) -> str:
        """The summary as Markdown, for `summary.md`."""
        headings, rows = self.table()
        lines = [headings, ["---:"] * (len(headings) - 1) + ["---"], *rows]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        errors = "".join(f"\n- seed {row.seed}: {' '.join((row.error or '').split())}" for row in self.failed)
        return f"# {self.path.name}\n\n{self}\n\n{table}\n{errors and f'{errors}{chr(10)}'}"


def train_seeds(
    policy: str | PolicyConfig | PolicySpec | PolicyMap | Actor,
    env: EnvLike,
    config: PPOConfig | TrainingConfig | None = None,
    *,
    seeds: int | Sequence[int] = 5,
    jobs: int | None = None,
    together: bool | None = None,
    run_dir: str | Path | None = None,
    callbacks: Sequence[Callback | Callable[..., Any]] = (),
    custom_loss_fns: Sequence[Callable[..., Any]] = (),
    progress: bool = False,
    overwrite: bool = False,
) -> SeedsSummary:
    """Train the same with several seeds, each as `PPOTrainer` would with its `run.seed`, and return a summary of their scores.

    `seeds` is their number, counted from `run.seed` on, or the seeds themselves. They are trained in processes, `jobs` at a time (by
    default as many as there are cores), or `together` in one compiled program (with JAX and a JAX-native environment; by default if it is
    not on a CPU), and written to `run_dir/seed-0`, …; by default `run_dir` is `run.name` in `run.directory`. Called again, finished seeds
    are left alone and others continued. An error in one seed does not end the others: see `SeedsSummary.failed`. Ctrl-C saves all of them.
    The environment is an id, an `EnvConfig` or a factory; `policy`, factory, callbacks and losses are sent to the processes, so each has
    copies of its own.
    """
    asked = resolve_config(policy, env, config)
    if not env_source(env).can_be_copied:
        raise ConfigError(f"every seed needs environments of its own, and a {type(env).__name__} cannot be copied; pass an id or a factory")
    for callback in callbacks:
        as_callback(callback)  # refuses what is none, before anything is made
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs={jobs} must be 1 or more")
    if run_dir is not None:
        asked = asked.replace(run=asked.run.replace(name=Path(run_dir).name, directory=str(Path(run_dir).parent)))
    if together:
        check_together(policy, env, asked, [*callbacks, *custom_loss_fns], jobs=jobs)
    with create_bundle(asked, choose_seeds(asked, seeds), overwrite=overwrite) as bundle:
        try:
            options: dict[str, Any] = {"callbacks": callbacks, "custom_losses": custom_loss_fns}
            trainer, _ = plan_seeds(policy, env, bundle, jobs=jobs, together=together, **options)
            summary = train_bundle(bundle, trainer, make_view(bundle) if progress else None)
        except USAGE_ERRORS:
            bundle.discard()
            raise
    for row in summary.failed:
        warnings.warn(f"seed {row.seed} failed: {row.error}; {len(summary.unfinished)} seeds are not done", stacklevel=2)
    return summary


def choose_seeds(config: TrainingConfig, seeds: int | Sequence[int]) -> tuple[int, ...]:
    """The seeds that are asked for: as many from `run.seed` on, or those given."""
    if isinstance(seeds, int):
        if seeds < 1:
            raise ConfigError(f"seeds={seeds} must be 1 or more")
        return tuple(range(config.run.seed, config.run.seed + seeds))
    return tuple(map(int, seeds))


def make_view(bundle: Bundle, terminal: Any = None) -> SeedsView:
    """Create the display of a bundle's progress."""
    from inchworm.tracking.console import SeedsView  # imports rich

    return SeedsView(bundle.seeds, bundle.config.run.total_timesteps, title=bundle.config.env.id, terminal=terminal)


def train_bundle(bundle: Bundle, trainer: SeedTrainer, view: SeedsView | None = None) -> SeedsSummary:
    """Train the seeds of a bundle that are not finished, and write the summary and the report. The bundle must be locked."""
    known = {row["seed"]: row for row in read_summary(bundle)}
    rows = {seed: score_seed(bundle, seed, known.get(seed)) for seed in bundle.seeds}
    left = [seed for seed, row in rows.items() if row.status != "done"]
    if bundle.altered and any(rows[seed].env_steps for seed in left):
        warnings.warn(
            f"{bundle.path}: seeds that have begun are trained in another way now (together, in processes, or with more seeds); "
            f"{NOT_BIT_IDENTICAL}",
            NotExactWarning,
            stacklevel=2,
        )
    ended, began = dict[int, SeedEvent](), False
    try:
        if view is not None:
            view.start({seed: row.score for seed, row in rows.items() if row.status == "done"})
        with closing(trainer(bundle, left)) as events:
            for event in events:
                if event.kind == "failed" and event.wrong_use and not began:
                    raise ConfigError(event.text)  # as every other seed would
                began |= event.kind != "failed"
                if event.kind != "progress":
                    ended[event.seed] = event
                    rows[event.seed] = score_seed(bundle, event.seed, known.get(event.seed), event)
                if view is not None:
                    view.update(event, rows[event.seed].score)
    finally:
        if view is not None:
            view.close()
        rows |= {seed: score_seed(bundle, seed, known.get(seed), ended.get(seed)) for seed in left}
        summary = SeedsSummary(bundle.path, bundle.config.env.id, tuple(rows.values()), score_of(bundle.config))
        if began or not left:
            bundle.write_summary(summary.to_dict(), summary.page())
    if began and bundle.config.run.report and any(row.env_steps for row in summary.seeds):
        from inchworm.analysis.report import after_training, report  # late: it takes a moment, and reads files only

        with after_training():
            report(bundle.path)
    return summary


def read_summary(bundle: Bundle) -> list[Mapping[str, Any]]:
    """The rows of the bundle's last summary; none if there is none that can be read."""
    with suppress(OSError, ValueError, KeyError, TypeError, InchwormError):
        return [row for row in read_json(read_bytes(bundle.path / SUMMARY_JSON, limit=10_000_000).decode())["seeds"] if "seed" in row]
    return []


def score_seed(bundle: Bundle, seed: int, known: Mapping[str, Any] | None, event: SeedEvent | None = None) -> SeedScore:
    """How one seed stands: by the event that ended it in this call, or by its checkpoint and `known`, its row in the last summary."""
    run = bundle.find_run(seed)
    rows = [] if run is None else read_rows(run.path / METRICS)
    last = rows[-1] if rows else {}
    counters: dict[str, Any] = {"env_steps": int(last.get("env_steps", 0)), "iteration": int(last.get("iteration", 0))}
    if event is not None and event.kind == "failed":
        return SeedScore(seed, "failed", **counters, error=event.text)
    if run is None or TrainingCheckpointer(run.checkpoints).latest() is None:
        return SeedScore(seed, "unfinished", **counters)
    checkpoint = TrainingCheckpointer(run.checkpoints).load()
    reason = finished_by(checkpoint, bundle.run_config(seed), known) if event is None else event.text
    if reason is None:
        return SeedScore(seed, "unfinished", **counters)
    name = "mean_return" if score_of(bundle.config) == "training" else "evaluation/mean_return"
    scored: Mapping[str, Any] = next((row for row in reversed(rows) if name in row), {})
    return SeedScore(
        seed,
        "done",
        **counters,
        score=scored.get(name),
        win_rate=scored.get("evaluation/win_rate"),
        stop_reason=reason,
        converged=checkpoint.state["state"].get("convergence", {}).get("converged"),
        failures=tuple(event.failures if event is not None else (known or {}).get("failures", ())),
    )


def score_of(config: TrainingConfig) -> Literal["evaluation", "training"]:
    """Whether scores are of evaluations, or of training episodes because no evaluation was asked for."""
    return "evaluation" if config.evaluation.final_episodes or config.evaluation.interval else "training"


def finished_by(checkpoint: Checkpoint, config: TrainingConfig, known: Mapping[str, Any] | None) -> str | None:
    """Why a run has nothing left to do by `config`, as `History.stop_reason`; None if it is to be continued.

    A checkpoint does not tell that a callback ended the run: the last summary does, if nothing has been trained since.
    """
    state = TrainingState()
    state.load_state_dict(checkpoint.state["state"])
    state.env_steps, state.episodes = (int(checkpoint.state["collector"][name]) for name in ("env_steps", "episodes"))
    if config.evaluation.final_episodes and not checkpoint.manifest.get("scored", True):
        return None
    if limits := reached_limits(state, config.run):
        return next(iter(limits))
    if has_stopped(state, config.convergence):
        return "converged"
    ended = known is not None and known.get("status") == "done" and known.get("iteration") == state.iteration
    return "callback" if ended and known is not None and known.get("stop_reason") == "callback" else None
