"""Collect alone: a scripted vector env whose every number says where it belongs, and policies that are stubs."""

import dataclasses
import functools
from collections import Counter as Counts
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optree
import pytest
from gymnasium import spaces

from doubles.stepping import assert_equal_rollouts
from doubles.toys import Corridor, Counter, SpacesEnv
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.collect.collector import RECENT_EPISODES, RolloutCollector
from inchworm.config.sections import EnvConfig, PolicyConfig
from inchworm.core.errors import BadNumberError, ConfigError, RolloutError
from inchworm.core.types import EndedEpisode, EnvStep, PolicyStep, Tree
from inchworm.env.source import make_vector_env
from inchworm.policy.file import fingerprint
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.rollout import ARRAY_FIELDS

LENGTHS = (3, 4, 5)
"""Lane b's episodes have LENGTHS[b] steps; even ones terminate, odd ones are truncated."""


class ScriptedEnv:
    """A mock: lane b, episode e, step s is observed as (b, e, s), and the step that leads there earns 100 b + 10 e + s.

    It keeps the letter of the contract: there is one set of arrays, which every step overwrites.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, lengths: Sequence[int] = LENGTHS) -> None:
        self.num_lanes, self.lengths = len(lengths), lengths
        self.received: list[np.ndarray] = []
        self.resets, self.under_way = 0, False
        self.episode, self.taken = np.zeros(self.num_lanes, int), np.zeros(self.num_lanes, int)
        self.observations = np.zeros((self.num_lanes, 3), np.float32)
        self.rewards = np.zeros(self.num_lanes, np.float32)
        self.flags = {name: np.zeros(self.num_lanes, bool) for name in ("terminated", "truncated", "episode_starts")}
        self.valid = np.ones(self.num_lanes, bool)
        self.poison: dict[tuple[int, str], float] = {}
        """(number of the step since the reset, what) -> the number that lane 1 gets instead."""

    def _show(self, ended: Sequence[EndedEpisode] = ()) -> EnvStep:
        for lane in range(self.num_lanes):
            self.observations[lane] = (lane, self.episode[lane], self.taken[lane])
        return EnvStep(self.observations, self.rewards, **self.flags, valid=self.valid, ended=tuple(ended))

    def reset(self, seeds: Sequence[int] | None = None, indices: Sequence[int] | None = None) -> EnvStep:
        assert seeds is None
        if indices is None:
            self.resets += 1
            self.episode += self.resets > 1
            self.taken[:] = 0
        self.rewards[:] = 0
        self.flags["terminated"][:] = self.flags["truncated"][:] = False
        self.flags["episode_starts"][:] = self.taken == 0
        return self._poisoned(self._show(), 0)

    def send(self, actions: Tree) -> None:
        assert not self.under_way
        self.received.append(np.array(actions))
        self.under_way = True
        for array in (self.observations, self.rewards, *self.flags.values()):
            array.fill(0)  # so that a kept reference instead of a copy is noticed

    def recv(self) -> EnvStep:
        assert self.under_way
        self.under_way = False
        ended = []
        self.taken += 1
        for lane in range(self.num_lanes):
            self.rewards[lane] = 100 * lane + 10 * self.episode[lane] + self.taken[lane]
            over = self.taken[lane] == self.lengths[lane]
            even = self.episode[lane] % 2 == 0
            self.flags["terminated"][lane], self.flags["truncated"][lane] = over and even, over and not even
            self.flags["episode_starts"][lane] = over
            if over:
                final = np.array((lane, self.episode[lane], self.taken[lane]), np.float32)
                ended.append(EndedEpisode(lane, 1000 * lane + int(self.episode[lane]), final, {"odd": float(not even)}))
                self.episode[lane] += 1
                self.taken[lane] = 0
        return self._poisoned(self._show(ended), len(self.received))

    def _poisoned(self, shown: EnvStep, number: int) -> EnvStep:
        for (at, what), value in self.poison.items():
            if at == number and what == "reward":
                self.rewards[1] = value
            elif at == number and what == "observation":
                self.observations[1, 2] = value
            elif at == number and what == "final observation":
                [lane_1] = [ended for ended in shown.ended if ended.lane == 1]
                lane_1.final_observation[0] = value
        return shown

    def step(self, actions: Tree) -> EnvStep:
        raise AssertionError("send and recv are enough")

    def set_reset_options(self, options: Mapping[str, Any] | None, indices: Sequence[int] | None = None) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"episode": self.episode.copy(), "taken": self.taken.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.episode, self.taken = np.array(state["episode"]), np.array(state["taken"])

    def close(self) -> None:
        self.closed = True


class Stub:
    """No weights, no critic. Step k in lane b acts 10 k + b + noise; its memory is how many observations of the episode it has read."""

    def __init__(self) -> None:
        self.calls = 0

    def initial_state(self, num_lanes: int) -> Tree:
        return np.zeros(num_lanes, np.float32)

    def act(self, observations: Tree, state: Tree, episode_starts: Any, rng: Any, *, deterministic: bool = False) -> PolicyStep:
        lanes = np.arange(len(observations))
        actions = (10.0 * self.calls + lanes).astype(np.float32)[:, None]
        self.calls += 1
        memory = np.where(episode_starts, 0, state).astype(np.float32)
        noise = rng.random(len(lanes)).astype(np.float32)
        return PolicyStep(actions, np.clip(actions, -1, 1), noise, memory + 1)


def expected(num_steps: int, first: int = 0) -> dict[str, np.ndarray]:
    """What the script says of rows `first` … of every lane: at row t lane b is in episode t // L, step t % L."""
    row, length = np.arange(first, first + num_steps)[:, None], np.array(LENGTHS)
    episode, step = row // length, row % length
    lanes = np.broadcast_to(np.arange(len(LENGTHS)), episode.shape)
    over = step == length - 1
    return {
        "observations": np.stack([lanes, episode, step], -1).astype(np.float32),
        "rewards": (100 * lanes + 10 * episode + step + 1).astype(np.float32),
        "terminated": over & (episode % 2 == 0),
        "truncated": over & (episode % 2 == 1),
        "episode_starts": step == 0,
        "valid": np.ones_like(over),
        # Before a row the stub has read the rows of the running episode, or all of the last one where a new one opens.
        "policy_state": np.where((step == 0) & (row > 0), length, step).astype(np.float32),
    }


# ---- where every number lands
@pytest.mark.parametrize("calls", [(1,), (23,), (4, 5)], ids=str)
def test_identifiable_rows_land_at_their_time_and_lane(calls: tuple[int, ...]) -> None:
    """Also where episodes continue from one call to the next."""
    env = ScriptedEnv()
    collector = RolloutCollector(env, Stub())
    for number, num_steps in enumerate(calls):
        rollout = collector.collect(num_steps)
        assert (rollout.num_steps, rollout.num_lanes) == (num_steps, 3)  # T rows of B lanes, exactly
        for name, value in expected(num_steps, sum(calls[:number])).items():
            assert np.array_equal(rollout[name], value), name
    assert env.resets == 1


def test_the_sampled_action_is_stored_and_the_clipped_one_is_sent() -> None:
    env = ScriptedEnv()
    rollout = RolloutCollector(env, Stub()).collect(4)
    # row t, lane b: 10 t + b; the env got at most 1
    assert rollout.actions[..., 0].tolist() == [[0, 1, 2], [10, 11, 12], [20, 21, 22], [30, 31, 32]]
    assert np.array(env.received)[..., 0].tolist() == [[0, 1, 1]] + [[1, 1, 1]] * 3


def test_the_log_probs_are_the_policys_and_its_noise_the_collectors_stream() -> None:
    same = [RolloutCollector(ScriptedEnv(), Stub(), seed=3).collect(5).log_probs for _ in range(2)]
    other = RolloutCollector(ScriptedEnv(), Stub(), seed=4).collect(5).log_probs
    assert np.array_equal(*same)
    assert not np.isin(other, same[0]).any()


def test_memory_is_recorded_where_a_sequence_may_begin() -> None:
    rollout = RolloutCollector(ScriptedEnv(), Stub(), sequence_length=3).collect(7)
    assert rollout.policy_state.tolist() == expected(7)["policy_state"][[0, 3, 6]].tolist()


# ---- cut rows
@pytest.mark.parametrize(
    ("steps", "expected_cuts", "memories"),
    [
        (2, {(1, b): [b, 0, 2] for b in range(3)}, [2, 2, 2]),  # nothing ended: what the next act would read
        # Lane 0 terminates at the last row: its final observation (step 3 of episode 0), not the first of episode 1.
        (3, {(2, b): [b, 0, 3] for b in range(3)}, [3, 3, 3]),
        # Lane 0: episode 0 terminates at row 2 (no cut row: nothing follows), episode 1 is truncated at the last row.
        (6, {(5, 0): [0, 1, 3], (5, 1): [1, 1, 2], (5, 2): [2, 1, 1]}, [3, 2, 1]),
        # Truncated in the middle: lane 0 at row 5, lane 1 at row 7. Lane 0 terminates at the last row.
        (9, {(5, 0): [0, 1, 3], (7, 1): [1, 1, 4], (8, 0): [0, 2, 3], (8, 1): [1, 2, 1], (8, 2): [2, 1, 4]}, [3, 4, 3, 1, 4]),
    ],
)
def test_cut_rows_hold_the_true_successors(steps: int, expected_cuts: dict[tuple[int, int], list[float]], memories: list[int]) -> None:
    rollout = RolloutCollector(ScriptedEnv(), Stub()).collect(steps)
    assert dict(zip(map(tuple, rollout.cut_rows.tolist()), rollout.cut_observations.tolist())) == expected_cuts
    assert rollout.cut_state.tolist() == memories


# ---- one call after another
def test_episode_statistics_across_rollout_boundaries() -> None:
    collector = RolloutCollector(ScriptedEnv(), Stub())
    rollouts = [collector.collect(4), collector.collect(4)]
    # Episode e of lane b: L steps of rewards 100 b + 10 e + (1 … L), so L (100 b + 10 e) + L (L + 1) / 2.
    got = [[(e.lane, e.episode_return, e.length, e.seed, dict(e.info)) for e in rollout.episodes] for rollout in rollouts]
    assert got == [
        [(0, 6.0, 3, 0, {"odd": 0.0}), (1, 410.0, 4, 1000, {"odd": 0.0})],  # rows 2 and 3
        [
            (2, 1015.0, 5, 2000, {"odd": 0.0}),  # row 4, begun in the first rollout: 5 · 200 + 15
            (0, 36.0, 3, 1, {"odd": 1.0}),  # row 5, begun in the first rollout: 3 · 10 + 6
            (1, 450.0, 4, 1001, {"odd": 1.0}),  # row 7: 4 · 110 + 10
        ],
    ]
    assert collector.episodes == 5
    assert [episode.episode_return for episode in collector.recent] == [6, 410, 1015, 36, 450]
    assert collector.env_steps == 2 * 4 * 3


def test_only_the_last_hundred_episodes_are_kept_for_means() -> None:
    collector = RolloutCollector(ScriptedEnv((1,)), Stub())
    collector.collect(130)
    assert collector.episodes == 130
    # episode e earns 10 e + 1
    assert [episode.episode_return for episode in collector.recent] == [10 * e + 1 for e in range(30, 130)]
    assert len(collector.recent) == RECENT_EPISODES == 100
    again = RolloutCollector(ScriptedEnv((1,)), Stub())
    again.load_state_dict(collector.state_dict())  # a resumed run keeps no more of them either
    again.collect(1)
    assert len(again.recent) == 100


def test_no_steps_are_refused_and_close_closes_the_environments() -> None:
    env = ScriptedEnv()
    collector = RolloutCollector(env, Stub())
    with pytest.raises(ConfigError, match="1 step or more, not 0"):
        collector.collect(0)
    assert env.resets == 0
    collector.close()
    assert env.closed


# ---- never learns, never asks the critic
class NoCritic(NumpyPolicy):
    """A policy that only acts."""

    def value(self, *arguments: Any, **more: Any) -> Any:
        raise AssertionError("the collector ran the critic")

    evaluate = update_statistics = value


def spec_of(env: Any, **config: Any) -> PolicySpec:
    return PolicySpec(env.observation_space, env.action_space, PolicyConfig(hidden_sizes=(8,), **config))


def test_collect_never_asks_the_critic_and_never_moves_a_weight() -> None:
    env = make_vector_env("CartPole-v1", 3)
    policy = NoCritic(spec_of(env, normalize_observations=True), seed=1)
    before = {name: value.tobytes() for name, value in policy.get_weights().items()}
    RolloutCollector(env, policy).collect(64)
    assert {name: value.tobytes() for name, value in policy.get_weights().items()} == before


def test_a_torch_policy_collects_without_gradients() -> None:
    torch = pytest.importorskip("torch")
    from inchworm.backends.torch.policy import TorchPolicy

    env = make_vector_env("CartPole-v1", 2)
    policy = TorchPolicy(spec_of(env), seed=1)
    rollout = RolloutCollector(env, policy).collect(8)
    assert all(type(leaf) is np.ndarray for name in ARRAY_FIELDS for leaf in optree.tree_leaves(rollout[name]))
    assert all(parameter.grad is None for parameter in policy.parameters())
    assert torch.is_grad_enabled()


def test_weights_given_act_from_the_next_collect_on_and_sign_the_rollout() -> None:
    env = make_vector_env("CartPole-v1", 4)
    policy = NumpyPolicy(spec_of(env), seed=1)
    collector = RolloutCollector(env, policy)
    first = collector.collect(4)
    always_left = policy.get_weights()
    always_left["actor.head.bias"] = np.array([50.0, -50.0], np.float32)
    always_left["policy_version"] = np.array(7, np.int64)
    collector.set_weights(always_left)
    second = collector.collect(4)
    assert first.actions.any()
    assert not second.actions.any()
    later = always_left | {"policy_version": np.array(8, np.int64)}
    policy.set_weights(later)  # as a learner does that shares the object
    third = collector.collect(4)
    assert [rollout.policy_version.tolist() for rollout in (first, second, third)] == [[0] * 4, [7] * 4, [8] * 4]
    signed = [set(rollout.weights_fingerprint.tolist()) for rollout in (first, second, third)]
    assert signed[1:] == [{fingerprint(always_left)}, {fingerprint(later)}]
    assert len(set.union(*signed)) == 3


def test_an_actor_follows_a_policy_and_keeps_other_weights_until_that_policy_changes() -> None:
    env = make_vector_env("CartPole-v1", 2)
    policy, other = NumpyPolicy(spec_of(env), seed=1), NumpyPolicy(spec_of(env), seed=2).get_weights()
    collector = RolloutCollector(env, NumpyPolicy(spec_of(env), seed=3), follows=policy)
    assert collector.collect(2).weights_fingerprint.tolist() == [fingerprint(policy.get_weights())] * 2
    collector.set_weights(other)
    for _ in range(2):
        assert collector.collect(2).weights_fingerprint.tolist() == [fingerprint(other)] * 2
    changed = policy.get_weights() | {"actor.head.bias": np.ones(2, np.float32)}  # of the same version
    policy.set_weights(changed)
    assert collector.collect(2).weights_fingerprint.tolist() == [fingerprint(changed)] * 2
    assert fingerprint(collector.policy.get_weights()) == fingerprint(changed)


def test_weights_are_looked_at_once_per_rollout_not_per_step() -> None:
    class Counting(NumpyPolicy):
        looks = 0

        def get_weights(self) -> Any:
            self.looks += 1
            return super().get_weights()

    env = make_vector_env("CartPole-v1", 2)
    policy = Counting(spec_of(env), seed=1)
    collector = RolloutCollector(env, NumpyPolicy(spec_of(env)), follows=policy)
    policy.looks = 0
    collector.collect(50)
    assert policy.looks == 1


def test_an_actor_without_weights_cannot_be_given_any() -> None:
    collector = RolloutCollector(ScriptedEnv(), Stub())
    with pytest.raises(ConfigError, match="Stub is an actor without weights"):
        collector.set_weights({})
    rollout = collector.collect(1)
    assert rollout.weights_fingerprint.tolist() == rollout.policy_version.tolist() == [0, 0, 0]


# ---- bad numbers
@pytest.mark.parametrize(
    ("at", "what", "says"),
    [
        (0, "observation", r"observation 'observation' of lane 1 is not finite at step 0 of its episode"),  # of the reset
        (2, "reward", r"reward of lane 1 is not finite at step 2 of its episode: nan"),
        (6, "reward", r"reward of lane 1 is not finite at step 2 of its episode: nan"),  # the second step of its second episode
        (3, "observation", r"observation 'observation' of lane 1 is not finite at step 3 of its episode: \[ 1.  0. nan\]"),
        (4, "observation", r"observation 'observation' of lane 1 is not finite at step 0 of its episode"),  # opens the next episode
        (4, "final observation", r"final observation 'observation' of lane 1 is not finite at step 4 of its episode: \[nan  0.  4.\]"),
    ],
)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_is_not_finite_stops_at_its_step(at: int, what: str, says: str, bad: float) -> None:
    env = ScriptedEnv()
    env.poison[at, what] = bad
    collector = RolloutCollector(env, Stub())
    with pytest.raises(BadNumberError, match=says.replace("nan", "inf") if bad == np.inf else says):
        collector.collect(9)
    assert len(env.received) == at  # not one step further
    good = max(at - 1, 0)  # the bad step does not count
    assert collector.env_steps == 3 * good
    assert collector.episodes == len(collector.recent) == sum(good // length for length in LENGTHS)


def test_the_bad_key_of_a_dict_observation_is_named() -> None:
    class Broken(SpacesEnv):
        def step(self, action: Any) -> Any:
            observation, *rest = super().step(action)
            observation["speed"]["x"][:] = np.nan
            return observation, *rest

    seen = spaces.Dict({"camera": spaces.Box(0, 255, (2,), np.uint8), "speed": spaces.Dict({"x": spaces.Box(-9, 9, (1,))})})
    env = make_vector_env(functools.partial(Broken, seen, spaces.Discrete(2)), 2)
    with pytest.raises(BadNumberError, match=r"observation 'speed.x' of lane 0 .* at step 1"):
        RolloutCollector(env, NumpyPolicy(spec_of(env))).collect(3)


class Shapeless(Stub):
    """Returns log-probs of a wrong shape at its third call."""

    def act(self, *given: Any, **named: Any) -> PolicyStep:
        step = super().act(*given, **named)
        return dataclasses.replace(step, log_probs=step.log_probs[:1]) if self.calls == 3 else step


@pytest.mark.parametrize("error", [BadNumberError, KeyboardInterrupt, RolloutError])
def test_after_half_a_step_the_next_collect_begins_new_episodes(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """The third step has a bad number, is interrupted, or was sent before its action turns out to have a wrong shape."""
    env = ScriptedEnv()
    collector = RolloutCollector(env, Shapeless() if error is RolloutError else Stub())
    collector.collect(2)
    with monkeypatch.context() as patch:
        if error is BadNumberError:
            patch.setitem(env.poison, (3, "reward"), np.nan)
        elif error is KeyboardInterrupt:
            patch.setattr(env, "_show", lambda ended=(): (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(error):
            collector.collect(4)
    assert not env.under_way  # what was sent has been received
    rollout = collector.collect(3)
    assert env.resets == 2
    assert rollout.episode_starts[0].all()
    assert rollout.observations[0, :, 2].tolist() == [0, 0, 0]
    assert rollout.policy_state[0].tolist() == [0, 0, 0]
    # The half-lived episode leaves no trace: lane 0 is in its next one now (the bad step ended one more), of three steps.
    episode = rollout.observations[0, 0, 1]
    assert [(e.lane, e.length, e.episode_return) for e in rollout.episodes] == [(0, 3, 30 * episode + 6)]


def test_the_first_error_is_the_one_that_is_reported() -> None:
    class Dying(ScriptedEnv):
        def recv(self) -> EnvStep:
            if len(self.received) == 3:
                raise OSError("gone as well")
            return super().recv()

    with pytest.raises(RolloutError, match="log_probs"):
        RolloutCollector(Dying(), Shapeless()).collect(5)


# ---- options, and saving in the middle
@pytest.mark.parametrize(
    ("env", "workers"),
    [(EnvConfig(id="CartPole-v1"), 0), pytest.param(functools.partial(Counter, 7, truncate=True), 2, marks=pytest.mark.slow)],
    ids=["CartPole-v1", "Counter with workers"],
)
def test_a_collector_resumes_bit_for_bit_from_its_saved_state(env: Any, workers: int) -> None:
    def collector() -> RolloutCollector:
        vector_env = make_vector_env(env, 4, workers, seed=1)
        return RolloutCollector(vector_env, NumpyPolicy(spec_of(vector_env), seed=1), seed=1)

    undisturbed, resumed = collector(), collector()
    undisturbed.collect(11)
    state = undisturbed.state_dict()
    assert undisturbed.state_dict()["lengths"].any()  # in the middle of episodes
    expect = [undisturbed.collect(9), undisturbed.collect(9)]
    resumed.load_state_dict(state)
    for rollout in expect:
        assert_equal_rollouts(resumed.collect(9), rollout)
    assert (resumed.env_steps, resumed.episodes, resumed.recent) == (undisturbed.env_steps, undisturbed.episodes, undisturbed.recent)
    undisturbed.load_state_dict(state)  # the same object goes back, too
    assert_equal_rollouts(undisturbed.collect(9), expect[0])
    for each in (undisturbed, resumed):
        each.close()


def test_the_state_before_the_first_step_is_a_state_too() -> None:
    def collector() -> RolloutCollector:
        env = make_vector_env(functools.partial(Corridor, 4), 2)
        return RolloutCollector(env, NumpyPolicy(spec_of(env), seed=1), seed=1)

    first = collector()
    first.vector_env.set_reset_options({"place": 2})
    state = first.state_dict()
    expect = first.collect(9)
    assert expect.observations[0].ravel().tolist() == [0.5, 0.5]
    second = collector()
    second.load_state_dict(state)  # reset options and all
    assert_equal_rollouts(second.collect(9), expect)
    first.load_state_dict(state)  # back to the very beginning: the same episodes again
    assert_equal_rollouts(first.collect(9), expect)


def test_a_lane_that_replay_does_not_bring_back_counts_from_zero() -> None:
    class Moody(Counter):
        """Forgets its seed: after a restart an episode does not look the same."""

        born = 0

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            Moody.born += 1
            return super().reset(seed=(seed or 0) + Moody.born, options=options)

    def collector() -> RolloutCollector:
        env = make_vector_env(functools.partial(Moody, 6), 1)
        return RolloutCollector(env, NumpyPolicy(spec_of(env), seed=1), seed=1)

    first, second = collector(), collector()
    first.collect(4)
    with pytest.warns(UserWarning, match="lane|copy"):
        second.load_state_dict(first.state_dict())
    rollout = second.collect(6)
    assert rollout.episode_starts[:, 0].tolist() == [True] + [False] * 5
    assert [(e.length, e.episode_return) for e in rollout.episodes] == [(6, 21.0)]  # 1 + … + 6: nothing of the lost episode


def test_a_state_of_several_groups_is_refused() -> None:
    collector = RolloutCollector(ScriptedEnv(), Stub())
    state = collector.state_dict()
    with pytest.raises(ConfigError, match=r"2 alternating groups of environments \(collect.groups\), which were removed"):
        collector.load_state_dict(state | {"vector_env": [state["vector_env"]] * 2})


# ---- what actors may do
class Thrifty(Stub):
    """Keeps what it has seen as its memory, and hands out the same arrays each time."""

    def __init__(self) -> None:
        super().__init__()
        self.actions, self.log_probs = np.zeros((3, 1), np.float32), np.zeros(3, np.float32)

    def initial_state(self, num_lanes: int) -> Tree:
        return np.full((num_lanes, 3), -1, np.float32)

    def act(self, observations: Tree, state: Tree, episode_starts: Any, rng: Any, *, deterministic: bool = False) -> PolicyStep:
        self.actions[:] = self.calls
        self.log_probs[:] = -self.calls
        self.calls += 1
        return PolicyStep(self.actions, self.actions, self.log_probs, observations)


def test_an_actor_may_keep_its_observation_and_reuse_its_arrays() -> None:
    rollout = RolloutCollector(ScriptedEnv(), Thrifty()).collect(6)
    assert np.array_equal(rollout.policy_state[1:], rollout.observations[:-1])  # the memory before row t + 1 is what row t showed
    assert (rollout.policy_state[0] == -1).all()
    calls = np.arange(6)[:, None].repeat(3, 1)  # [T, B]: which act it was
    assert np.array_equal(rollout.actions[..., 0], calls)
    assert np.array_equal(rollout.log_probs, -calls)


def test_the_sections_of_a_profile_are_methods_that_collect_calls() -> None:
    collector = RolloutCollector(ScriptedEnv(), Stub())
    called: Counts[tuple[str, int, str]] = Counts()

    def watched(key: tuple[str, int, str], function: Any, *given: Any) -> Any:
        called[key] += 1
        return function(*given)

    for section, target, method in collector.profile_points():
        setattr(target, method, functools.partial(watched, (section, id(target), method), getattr(target, method)))
    collector.collect(5)
    env = id(collector.vector_env)
    assert called == {("env", env, "reset"): 1, ("env", env, "send"): 5, ("env", env, "recv"): 5, ("act", id(collector.policy), "act"): 5}
