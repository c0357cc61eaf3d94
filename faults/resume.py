"""F1 to F4: resume and determinism. Here is F1, stopping after every update; the others are in modules of their own."""

from __future__ import annotations

import shutil

from faults import resume_leaves, resume_other, resume_same  # noqa: F401 - they enter their procedures
from faults.programme import Outcome, Work, peer, procedure
from faults.resume_runs import UPDATES, WORLDS, bits, command, differing, flags, go, quietly, settings

BACKENDS = ("torch", "numpy")
STOPS = UPDATES - 1


def stops(count: int) -> list[int]:
    """After which updates to stop: all of 1 … 20, or `count` of them from the first to the last."""
    count = max(1, min(count, STOPS))
    return sorted({1 + round(place * (STOPS - 1) / max(count - 1, 1)) for place in range(count)})


@procedure(
    "F1",
    title="Stop after update k and resume; then a chain of resumes",
    must="every k of 1 … 20, and 20 resumes in a row: weights, optimiser, normalisers and metrics bit for bit",
    full=20,
    test=2,
)
def stop_and_resume(work: Work) -> Outcome:
    """Each k on both backends and both kinds of action, and with an LSTM, in this process; some of them again as processes of their own."""
    outcome, ks = Outcome(), stops(work.count)
    combinations = [*((world, backend) for world in WORLDS for backend in BACKENDS), ("memory", "torch")]
    wholes = {}
    for world, backend in combinations:
        directory = work.scratch / f"{world}-{backend}"
        wholes[world, backend], told = quietly(go, directory / "whole", settings(world, backend), resume=False)
        outcome.check(not told, f"{world} {backend}, undisturbed: it warned {told}")
    for index in work.each(len(ks)):
        for world, backend in combinations:
            directory = work.scratch / f"{world}-{backend}" / str(ks[index])
            _, before = quietly(go, directory, settings(world, backend, max_iterations=ks[index]), resume=False)
            found, told = quietly(go, directory, settings(world, backend), resume=True)
            wrong = differing(found, wholes[world, backend])
            outcome.check(not wrong and not before + told, f"{world} {backend}, stopped after {ks[index]}: {wrong} differ; {before + told}")
            shutil.rmtree(directory)
    for world, backend in combinations:
        directory = work.scratch / f"{world}-{backend}" / "chain"
        for number, k in enumerate(ks):
            quietly(go, directory, settings(world, backend, max_iterations=k), resume=number > 0)
        found, told = quietly(go, directory, settings(world, backend), resume=True)
        wrong = differing(found, wholes[world, backend])
        outcome.check(not wrong and not told, f"{world} {backend}, a chain of {len(ks)} resumes: {wrong} differ; {told}")
    by_processes(work, outcome, combinations, ks)
    outcome.notes.append(
        "on: linear and cosine schedules, KL stop, both normalisers, evaluations with the best kept, a callback that stops"
    )
    outcome.notes[-1] += " the run and widens its starts by what it remembers"
    outcome.notes.append("every k and the chain with a new trainer in one process; the first, middle and last k also as new processes,")
    outcome.notes[-1] += " without that callback"
    outcome.notes.append("a compiled step comes with its own issue")
    return outcome


def by_processes(work: Work, outcome: Outcome, combinations: list[tuple[str, str]], ks: list[int]) -> None:
    """`inchworm train`, stopped after k, and `inchworm resume`: three processes beside one."""
    chosen = sorted({ks[0], ks[len(ks) // 2], ks[-1]}) if work.count >= STOPS else ks[:1]
    for world, backend in combinations if work.count >= STOPS else combinations[-1:]:
        directory = work.scratch / f"{world}-{backend}-processes"
        directory.mkdir()
        data = settings(world, backend)
        begin = ["train", data["env"]["id"], *flags(data), "--quiet"]
        code, said = command(*begin, "--run.name=whole", f"--run.max-iterations={UPDATES}", cwd=directory)
        outcome.check(code == 0, f"{world} {backend}, undisturbed process: exit code {code}: {said[-300:]}")
        expected = bits(directory / "runs" / "whole")
        for k in chosen:
            codes = [command(*begin, f"--run.name=at-{k}", f"--run.max-iterations={k}", cwd=directory)]
            codes.append(command("resume", f"at-{k}", f"--run.max-iterations={UPDATES}", "--quiet", cwd=directory))
            wrong = differing(bits(directory / "runs" / f"at-{k}"), expected)
            outcome.check(all(c == 0 for c, _ in codes) and not wrong, f"{world} {backend}, processes, k {k}: {wrong} differ; {codes}")


@peer("F1", "Stable-Baselines3")
def stop_and_resume_sb3(work: Work) -> Outcome:
    """The same k's with its own way: the model and its VecNormalize saved after update k, loaded, and trained to the same end."""
    from faults.resume_sb3 import run

    return run(work, stops(work.count))
