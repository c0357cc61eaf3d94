"""Between steps 1 and 2: the contract of an engine, which moves the copies of an environment and writes their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from inchworm.env import channel
from inchworm.env.memory import StepRows, tree_leaves
from inchworm.spaces import Space
from inchworm.types import Tree

Ended = tuple[int, Mapping[str, float]]
"""A lane whose copy's episode ended in this step, and the numbers of its last `info`."""


@dataclass(frozen=True, slots=True)
class Replay:
    """An episode as far as it went: enough to bring a copy there again."""

    copy: int
    seed: int
    options: Any
    actions: Tree
    """[n, *act]; [n, k, *act] where a copy has k lanes, those of dead agents among them"""


def pack_replay(jobs: Sequence[Replay]) -> bytes:
    """Replays as a message to a worker."""
    header = {
        "copies": [job.copy for job in jobs],
        "seeds": [job.seed for job in jobs],
        "options": [job.options for job in jobs],
        "lengths": [len(tree_leaves(job.actions)[0]) for job in jobs],
    }
    raw = b"".join(part.tobytes() for job in jobs for part in tree_leaves(job.actions))
    return channel.pack(channel.REPLAY, header, raw)


class Engine(Protocol):
    """What moves the copies.

    A copy may have several lanes, one for each agent that may ever live in it. It then writes `rows.valid` and `rows.joined` in every
    reset and step, where an episode ended also `rows.final_valid`, and if the rows have a global state that, too, also the final one.
    Whose agent is not alive shows a legal observation, every action allowed. Its action is in the rows, and ignored.
    An agent that leaves while the episode goes on: without a global state it is terminated (or truncated) in that step; with one it is
    not, but its later rows are invalid and keep their rewards, and it gets its flag with the others when the copy's episode ends.
    Where a lane is truncated and the episode goes on, its row shows the agent's true last observation once.
    """

    observation_space: Space
    action_space: Space
    lanes_per_copy: int
    rows: StepRows

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin episodes in some copies; their first observations stand in the rows."""
        ...

    def start(self) -> None:
        """Begin a step with the actions that stand in the rows."""
        ...

    def finish(self) -> list[Ended]:
        """Wait for it: the step stands in the rows; where an episode ended, the next has begun with its `next_seeds`.

        Returns all lanes of the copies whose episode ended; an agent that leaves before ends no episode.
        """
        ...

    def set_options(self, indices: Sequence[int], options: Sequence[Any]) -> None:
        """Reset options from the copies' next reset on."""
        ...

    def replay(self, jobs: Sequence[Replay]) -> list[tuple[float, int]]:
        """Bring copies to where their episodes stood: (return, steps) of each; fewer steps if one ended on the way."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...
