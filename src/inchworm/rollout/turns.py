"""After step 5 of 9, where agents take turns: the rows of all moves become, for each lane, the rows of its own moves.

While a turn-based environment is stepped, every row is one move in each copy, and only the lane whose agent moves is valid. What a policy
learns from are its own decisions: what the agent saw at its turn, what it did, the rewards that it got until its next turn, and what it saw
then. `own_turns` makes these rows, so that advantages, sequences and memory work as they do anywhere else.
"""

from __future__ import annotations

import numpy as np
import optree

from inchworm.core.types import Array, Tree
from inchworm.rollout.checks import freeze
from inchworm.rollout.rollout import Rollout


def hold_memory(after: Tree, before: Tree, moved: Array) -> Tree:
    """The memory [B, *mem] after a move: a lane whose agent has waited keeps the one from before."""
    return optree.tree_map(lambda new, old: np.where(moved.reshape(-1, *[1] * (new.ndim - 1)), new, old), after, before)


def own_turns(moves: Rollout) -> Rollout:
    """Keep the rows in which a lane's agent moved, with the rewards up to its next turn, or up to the end of its game.

    Lanes with fewer moves than others are padded with invalid rows at the end. The last move of a lane in a running game has no known
    result: it is left out, and what the agent saw then is the true successor of the move before it. `moves` must have the memory of
    every row (`state_every=1`).
    """
    valid, ended = moves.valid, moves.terminated | moves.truncated  # [T, B]
    num_steps, num_lanes = valid.shape
    times, lanes = np.arange(num_steps)[:, None], np.arange(num_lanes)
    latest = np.maximum.accumulate(np.where(valid, times, -1), axis=0)  # [T, B] the row of the lane's latest move, -1 before its first
    game = np.cumsum(ended, axis=0) - ended  # [T, B] how many of the lane's games ended before the row
    belongs = (latest >= 0) & (game == game[latest, lanes])  # [T, B] the row's reward is that of the latest move
    time, lane = np.nonzero(belongs)
    move = latest[time, lane]
    rewards = np.zeros(valid.shape)
    np.add.at(rewards, (move, lane), moves.rewards[time, lane])
    end = np.full(valid.shape, -1)  # [T, B] the row in which the game of a move ended before the agent's next turn, else -1
    ends = ended[time, lane]
    end[move[ends], lane[ends]] = time[ends]
    last = latest[-1]  # [B]
    known = valid & ((end >= 0) | (times < last))  # [T, B] the moves whose result is known

    time, lane = np.nonzero(known)
    place = (np.cumsum(known, axis=0) - 1)[time, lane]
    counts = known.sum(axis=0)  # [B]
    length = max(1, int(counts.max(initial=0)))
    source = np.zeros((length, num_lanes), np.int64)  # [T', B] the row that each new row is made of; padding is made of the first
    source[place, lane] = time
    real = np.arange(length)[:, None] < counts  # [T', B]
    over = np.where(real, end[source, lanes], -1)  # [T', B]

    def pick(leaf: Array, rows: Array = source) -> Array:
        return leaf[rows, lanes]

    terminated, truncated = (pick(flag, over) & (over >= 0) for flag in (moves.terminated, moves.truncated))
    # A lane whose data ends before the last row is cut off there, unless its game ended: no advantage may come from its padding.
    short = np.flatnonzero((counts > 0) & (counts < length))
    truncated[counts[short] - 1, short] |= ~terminated[counts[short] - 1, short]

    cuts = truncated.copy()
    cuts[-1] = True
    rows, at = np.nonzero(cuts)  # [K] each, sorted by row and lane
    given = np.full(valid.shape, -1)
    given[moves.cut_rows[:, 0], moves.cut_rows[:, 1]] = np.arange(len(moves.cut_rows))
    by_limit = over[rows, at] >= 0  # the game ended here, so that its last observation was recorded, if anything follows it
    index = np.where(by_limit, given[over[rows, at], at], -1)  # [K] the number of that record
    follows = np.where(index < 0, last[at].clip(0), 0)  # [K] else the row of the agent's next turn

    def successors(leaf: Array, recorded: Array) -> Array:
        return np.where((index >= 0).reshape(-1, *[1] * (leaf.ndim - 2)), recorded[index], leaf[follows, at])

    return Rollout(
        observations=freeze(optree.tree_map(pick, moves.observations)),
        actions=freeze(optree.tree_map(pick, moves.actions)),
        log_probs=freeze(pick(moves.log_probs)),
        rewards=freeze(np.where(real, pick(rewards), 0.0).astype(np.float32)),
        terminated=freeze(terminated),
        truncated=freeze(truncated),
        episode_starts=freeze(pick(moves.episode_starts)),
        valid=freeze(real),
        policy_state=freeze(optree.tree_map(pick, moves.policy_state)),
        state_every=moves.state_every,
        cut_rows=freeze(np.stack([rows, at], axis=1).astype(np.int32)),
        cut_observations=freeze(optree.tree_map(successors, moves.observations, moves.cut_observations)),
        cut_state=freeze(optree.tree_map(successors, moves.policy_state, moves.cut_state)),
        cut_valid=freeze(real[rows, at] & ~terminated[rows, at]),
        policy_version=moves.policy_version,
        weights_fingerprint=moves.weights_fingerprint,
        episodes=moves.episodes,
    )
